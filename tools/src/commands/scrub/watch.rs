//! Waiting for the end of a run, and telling meanwhile what it meets.
//!
//! The server counts what a run meets and does not keep where. So the blocks of a line are those that were checked between two
//! looks; the server's own log names them exactly.

use std::thread;
use std::time::Duration;

use sealblock_stack::StackError;
use sealblock_stack::quantity::count;
use sealblock_stack::range::Run;
use sealblock_units::ByteCount;

use crate::interrupt;
use crate::progress::{Progress, Show};
use crate::report::{reader_has_gone, say};
use sealblock_server::control::client::FoundServer;
use sealblock_server::control::protocol::ControlCommand;
use sealblock_server::status::scrub::{RunStatus, ScrubStatus, StateWord};

/// How often the server is asked; as many lines a second there are at most.
const PROBE_INTERVAL: Duration = Duration::from_millis(250);
/// How often it is looked whether a signal came.
const NAP: Duration = Duration::from_millis(50);

/// How long is waited.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Until {
    /// To the end of the run.
    End,
    /// Or until nobody reads what is printed.
    EndOrUnread,
}

/// How a wait ended.
pub enum Waited {
    /// Nobody reads any more; the scrub continues.
    Unread(Box<ScrubStatus>),
    /// No run is in progress, or it is paused.
    Ended(Box<ScrubStatus>),
    /// By a signal; the scrub continues.
    Interrupted(Box<ScrubStatus>),
}

/// Waits until the run has ended or was paused, or a signal came.
///
/// # Errors
/// When the server does not answer any more.
pub fn wait(found: &FoundServer, first: ScrubStatus, is_silent: bool, until: Until) -> Result<Waited, StackError> {
    interrupt::watch();
    let show = if is_silent { Show::Never } else { Show::OnTerminal };
    let total = ByteCount::new(first.blocks.saturating_mul(first.block_size as u64));
    let progress = Progress::new(&format!("scrubbing {}", first.target), Some(total), show);
    let mut looks = DamageTracker::new(&first);
    let mut status = first;
    loop {
        let met = looks.update(&status);
        if let (Some(line), false) = (met, is_silent) {
            progress.aside(|| say(&line))?;
        }
        show_progress(&progress, &status);
        if !matches!(status.state, StateWord::Running | StateWord::Waiting) || status.run.is_none() {
            return Ok(Waited::Ended(Box::new(status)));
        }
        nap(until);
        if until.has_come() {
            return Ok(Waited::Unread(Box::new(status)));
        }
        if interrupt::came() {
            if let (Some(line), false) = (looks.end(), is_silent) {
                progress.aside(|| say(&line))?;
            }
            return Ok(Waited::Interrupted(Box::new(status)));
        }
        status = found.scrub_command("read the scrub state", ControlCommand::ScrubStatus)?;
    }
}

fn show_progress(progress: &Progress, status: &ScrubStatus) {
    let done = status.position.saturating_mul(status.block_size as u64);
    progress.advance(done.saturating_sub(progress.done_bytes()));
    let bad = status.run.as_ref().map_or(0, |run| run.bad);
    if bad > progress.bad_blocks() {
        progress.bad(bad - progress.bad_blocks());
    }
}

impl Until {
    /// Whether the wait is over before the run has ended.
    fn has_come(self) -> bool {
        self == Until::EndOrUnread && reader_has_gone()
    }
}

fn nap(until: Until) {
    for _ in 0..PROBE_INTERVAL.as_millis() / NAP.as_millis() {
        if interrupt::came() || until.has_come() {
            return;
        }
        thread::sleep(NAP);
    }
}

/// What a run found between two probes.
struct DamageTracker {
    started_unix_s: u64,
    position: u64,
    counts: [u64; 3],
    /// Consecutive blocks, over several probes, among which there are bad ones: how many are bad, repaired and unrepaired.
    open: Option<Run<[u64; 3]>>,
}

impl DamageTracker {
    /// Starts at the state of now. The first line shows what the run found before.
    fn new(status: &ScrubStatus) -> DamageTracker {
        let (started_unix_s, from) = status.run.as_ref().map_or((0, 0), |run| (run.started_unix_s, run.from));
        DamageTracker { started_unix_s, position: from, counts: [0; 3], open: None }
    }

    /// Takes a newer state. Returns a line when a run of bad blocks has ended.
    fn update(&mut self, status: &ScrubStatus) -> Option<String> {
        let is_ours = |run: &&RunStatus| run.started_unix_s == self.started_unix_s;
        let (run, position) = match status.run.as_ref().filter(is_ours) {
            Some(run) => (run, status.position),
            None => {
                let run = status.runs.iter().rev().find(is_ours)?;
                (run, run.from.saturating_add(run.blocks).min(status.blocks))
            }
        };
        let counts = [run.bad, run.repaired, run.unrepaired];
        let met: Vec<u64> = counts.iter().zip(self.counts).map(|(now, before)| now.saturating_sub(before)).collect();
        let blocks = position.saturating_sub(self.position);
        let mut line = None;
        if met[0] > 0 && blocks > 0 {
            let open = self.open.get_or_insert(Run::new(self.position, 0, [0; 3]));
            open.blocks += blocks;
            open.what.iter_mut().zip(&met).for_each(|(sum, met)| *sum += met);
        } else if blocks > 0 {
            line = self.end();
        }
        if blocks > 0 {
            (self.position, self.counts) = (position, counts);
        }
        if status.run.is_none() { line.or_else(|| self.end()) } else { line }
    }

    /// The line of the last run of bad blocks.
    fn end(&mut self) -> Option<String> {
        let run = self.open.take()?;
        let [bad, repaired, unrepaired] = run.what;
        Some(format!(
            "among {}: {}, {repaired} repaired, {unrepaired} unrepaired",
            run.place(),
            count(bad, "bad block")
        ))
    }
}

#[cfg(test)]
mod tests {
    use sealblock_block::Device;
    use sealblock_media_null::NullDevice;
    use sealblock_scrub::ScrubRecord;
    use sealblock_units::BlockSize;

    use super::*;

    fn status(position: u64, counts: [u64; 3], is_under_way: bool) -> ScrubStatus {
        let device = NullDevice::new(BlockSize::B4096, 1000, None);
        assert_eq!(device.geometry().capacity_blocks, 1000);
        let [bad, repaired, unrepaired] = counts;
        let run = RunStatus {
            started_unix_s: 7,
            ended_unix_s: None,
            from: 0,
            blocks: position,
            bad,
            repaired,
            unrepaired,
            unchecked: 0,
            result: None,
        };
        let mut status = ScrubStatus::saved("v".to_owned(), &device, &ScrubRecord::default());
        status.position = if is_under_way { position } else { 0 };
        if is_under_way {
            status.run = Some(run)
        } else {
            status.runs.push(run)
        }
        status
    }

    #[test]
    fn bad_blocks_are_told_with_the_blocks_among_which_they_are_when_no_more_follow() {
        let mut looks = DamageTracker::new(&status(0, [0; 3], true));
        assert_eq!(looks.update(&status(0, [0; 3], true)), None);
        assert_eq!(looks.update(&status(100, [2, 1, 1], true)), None);
        assert_eq!(looks.update(&status(150, [3, 2, 1], true)), None);
        let line = looks.update(&status(200, [3, 2, 1], true)).unwrap();
        assert_eq!(line, "among blocks 0..149: 3 bad blocks, 2 repaired, 1 unrepaired");
        assert_eq!(looks.update(&status(300, [3, 2, 1], true)), None);
        let line = looks.update(&status(1000, [4, 2, 2], false)).unwrap();
        assert_eq!(line, "among blocks 300..999: 1 bad block, 0 repaired, 1 unrepaired");
        assert_eq!(looks.end(), None);
    }

    #[test]
    fn another_run_is_not_ours() {
        let mut looks = DamageTracker::new(&status(0, [0; 3], true));
        let mut other = status(50, [5, 0, 5], true);
        other.run.as_mut().unwrap().started_unix_s = 8;
        assert_eq!(looks.update(&other), None);
        assert_eq!(looks.end(), None);
    }
}
