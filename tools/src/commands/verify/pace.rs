//! When the next piece of a verify may start: `--rate` and `--idle`.
//!
//! What decides is the pace of a scrub ([`Pace`]): a limit with little to catch up, and waiting while the device is busy. A server counts
//! the requests of its clients; a command sees only what the kernel counts for the block devices below ([`DeviceLoad`]), its own
//! requests included. So with `--idle` one piece is in flight, and load is looked at between pieces: requests in flight then are of
//! others, and so is what completes while the verify listens for [`LISTEN_TIME`], which it does every [`LISTEN_EVERY`].

use std::fs;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use sealblock_scrub::{Activity, PIECE_BYTES, PIECE_TIME, Pace};
use sealblock_stack::kernel::below::disks_under;
use sealblock_stack::target::TargetName;
use sealblock_stack::{Cause, StackError};

use crate::interrupt;

/// How long the device is left alone to see what others do on it.
const LISTEN_TIME: Duration = Duration::from_millis(5);
/// How often that is done.
const LISTEN_EVERY: Duration = Duration::from_millis(50);
/// Where the kernel counts requests of block devices.
const DEVICES: &str = "/sys/dev/block";

/// The pace of a verify, over all cores.
pub(super) struct Pacer {
    rate: Option<NonZeroU64>,
    load: Option<DeviceLoad>,
    started: Instant,
    state: Mutex<PaceState>,
}

struct PaceState {
    pace: Pace,
    /// Requests of others that were seen to complete.
    others: u64,
    listened: Instant,
}

impl Pacer {
    /// A pace of at most `rate` bytes a second, which waits while the devices of `load` are busy.
    pub(super) fn new(rate: Option<NonZeroU64>, load: Option<DeviceLoad>) -> Pacer {
        let started = Instant::now();
        let state = PaceState { pace: Pace::from(Duration::ZERO), others: 0, listened: started };
        Pacer { rate, load, started, state: Mutex::new(state) }
    }

    /// Max. bytes of a piece.
    pub(super) fn piece_bytes(&self) -> u64 {
        let in_time = |rate: NonZeroU64| (u128::from(rate.get()) * PIECE_TIME.as_millis() / 1000) as u64;
        let by_rate = self.rate.map_or(u64::MAX, in_time);
        if self.load.is_some() { by_rate.min(PIECE_BYTES) } else { by_rate }
    }

    /// Waits until a piece of `bytes` may start, none is left, or a signal came.
    pub(super) async fn wait(&self, bytes: u64, is_left: impl Fn() -> bool) {
        let mut activity = self.listen().await;
        while is_left() {
            let wait = {
                let mut state = self.lock();
                let now = self.started.elapsed();
                let activity = Activity { completed: state.others, ..activity };
                let wait = state.pace.wait(now, activity, self.load.is_some());
                if wait.is_none() {
                    state.pace.started(now, bytes, self.rate);
                }
                wait
            };
            match wait {
                Some(wait) if !interrupt::came() => activity = self.watch_for(wait).await,
                _ => return,
            }
        }
    }

    /// What others do now; listens if that is due.
    async fn listen(&self) -> Activity {
        let Some(load) = &self.load else { return Activity::default() };
        if self.lock().listened.elapsed() < LISTEN_EVERY {
            return load.now();
        }
        let activity = self.watch_for(LISTEN_TIME).await;
        self.lock().listened = Instant::now();
        activity
    }

    /// Waits, and counts what others complete meanwhile.
    async fn watch_for(&self, time: Duration) -> Activity {
        let before = self.load.as_ref().map(DeviceLoad::now);
        interrupt::sleep(time).await;
        let after = self.load.as_ref().map(DeviceLoad::now);
        let Some((before, after)) = before.zip(after) else { return Activity::default() };
        self.lock().others += after.completed.saturating_sub(before.completed);
        after
    }

    fn lock(&self) -> MutexGuard<'_, PaceState> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// The requests of the block devices at the bottom of a target, as the kernel counts them.
pub(super) struct DeviceLoad {
    /// The `stat` files of the devices (the kernel's `Documentation/block/stat.rst`).
    files: Vec<PathBuf>,
}

impl DeviceLoad {
    /// The devices under a target.
    ///
    /// # Errors
    /// When they are not of this machine, are not known, or do not count.
    pub(super) fn under(target: &TargetName) -> Result<DeviceLoad, StackError> {
        let refused = |why: &dyn std::fmt::Display| {
            let why = format!("--idle cannot determine how busy it is: {why}");
            StackError::new(Cause::Absent, "verify", why).on(target).advise("use --rate, which works for any target")
        };
        let mut files = Vec::new();
        for leaf in target.leaves() {
            let path = leaf.path().ok_or_else(|| refused(&format_args!("{leaf} is not a local device")))?;
            for device in disks_under(path).map_err(|error| refused(&error))? {
                let folder = Path::new(DEVICES).join(device.to_string());
                if fs::read_to_string(folder.join("queue/iostats")).is_ok_and(|counts| counts.trim() == "0") {
                    let why = format!("the kernel does not count requests of device {device} (queue/iostats is 0)");
                    return Err(refused(&why));
                }
                files.push(folder.join("stat"));
            }
        }
        let load = DeviceLoad { files };
        let unread = load.files.iter().find(|file| read(file).is_none());
        match unread {
            Some(file) => Err(refused(&format_args!("{} has no I/O counters", file.display()))),
            None => Ok(load),
        }
    }

    /// All requests of the devices now. A device that has gone has none; its reads fail.
    fn now(&self) -> Activity {
        let each = self.files.iter().filter_map(|file| read(file));
        each.fold(Activity::default(), |all, one| Activity {
            in_flight: all.in_flight.saturating_add(one.in_flight),
            completed: all.completed.wrapping_add(one.completed),
        })
    }
}

fn read(file: &Path) -> Option<Activity> {
    parse(&fs::read_to_string(file).ok()?)
}

/// Counts of reads and writes, of discards and flushes where there are any, and of requests in flight.
fn parse(text: &str) -> Option<Activity> {
    const READS: usize = 0;
    const WRITES: usize = 4;
    const IN_FLIGHT: usize = 8;
    const DISCARDS: usize = 11;
    const FLUSHES: usize = 15;
    let fields = text.split_whitespace().map(|word| word.parse().ok()).collect::<Option<Vec<u64>>>()?;
    let more = [DISCARDS, FLUSHES].into_iter().filter_map(|at| fields.get(at));
    let completed = [fields.get(READS)?, fields.get(WRITES)?]
        .into_iter()
        .chain(more)
        .fold(0, |all: u64, one| all.wrapping_add(*one));
    Some(Activity { in_flight: *fields.get(IN_FLIGHT)?, completed })
}

#[cfg(test)]
mod tests {
    use super::*;
    use sealblock_runtime_reactor::{Config, Reactor};
    use std::sync::Arc;

    #[test]
    fn counts_are_read_in_every_length_that_kernels_print_and_nothing_else() {
        let old = "  10 1 80 4  20 2 160 8  3 5 6\n";
        let activity = |in_flight, completed| Some(Activity { in_flight, completed });
        assert_eq!(parse(old), activity(3, 30));
        assert_eq!(parse("10 1 80 4 20 2 160 8 0 5 6 7 0 0 0 100 0"), activity(0, 137));
        for text in ["", "1 2 3", "10 1 80 4 20 2 160 8 x 5 6", "-1 1 80 4 20 2 160 8 0 5 6"] {
            assert_eq!(parse(text), None, "{text}");
        }
        let most = u64::MAX.to_string();
        assert!(parse(&format!("{most} 0 0 0 {most} 0 0 0 {most}")).is_some());
    }

    #[test]
    fn what_has_no_device_here_is_refused_with_what_to_do_instead() {
        for target in ["mem:1MiB", "nbd://localhost/v", "mirror:mem:1MiB,mem:1MiB", "away"] {
            let refusal = DeviceLoad::under(&target.parse().unwrap()).err().unwrap();
            assert_eq!((refusal.cause(), refusal.advice().is_some()), (Cause::Absent, true), "{refusal}");
        }
    }

    fn stat(file: &Path, in_flight: u64, completed: u64) {
        fs::write(file, format!("{completed} 0 0 0 0 0 0 0 {in_flight} 0 0\n")).unwrap();
    }

    /// Waits for a piece of a device whose counts are in this file.
    fn wait(pacer: &Pacer) -> Duration {
        let reactor = Reactor::new(Config { pool_arena_bytes: 0, ..Config::default() }).unwrap();
        let start = Instant::now();
        reactor.block_on(pacer.wait(4096, || true));
        start.elapsed()
    }

    #[test]
    fn a_piece_waits_while_others_have_requests_in_flight_or_complete_some_but_not_for_ever() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("stat");
        stat(&file, 0, 100);
        let pacer = Arc::new(Pacer::new(None, Some(DeviceLoad { files: vec![file.clone()] })));
        assert_eq!(pacer.piece_bytes(), PIECE_BYTES);
        // What completed between pieces, as the verify's own does, is of no other.
        wait(&pacer);
        stat(&file, 0, 200);
        wait(&pacer);
        assert_eq!(pacer.lock().others, 0);
        // Requests in flight are of others: the piece waits as long as a scrub would.
        stat(&file, 1, 200);
        assert!(wait(&pacer) >= sealblock_scrub::PROBE_INTERVAL);
        // And so is what completes while nothing of the verify is in flight.
        pacer.lock().listened -= LISTEN_EVERY;
        stat(&file, 0, 200);
        let writer = std::thread::spawn({
            let file = file.clone();
            move || {
                (201..400).for_each(|completed| {
                    stat(&file, 0, completed);
                    std::thread::sleep(Duration::from_millis(1));
                })
            }
        });
        while !writer.is_finished() {
            wait(&pacer);
        }
        writer.join().unwrap();
        assert!(pacer.lock().others > 0);
    }

    #[test]
    fn a_rate_has_small_pieces_and_each_costs_its_time() {
        let pacer = Pacer::new(NonZeroU64::new(40_000), None);
        assert_eq!(pacer.piece_bytes(), 4000);
        let start = Instant::now();
        for _ in 0..4 {
            wait(&pacer);
        }
        assert!(
            start.elapsed() >= Duration::from_millis(200),
            "4 pieces of 100 ms, of which the first is free, within the slack"
        );
    }
}
