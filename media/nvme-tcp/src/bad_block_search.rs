//! Finds the bad blocks of a command that failed.
//!
//! A status names a field and no block. The target may know more: Get LBA Status lists blocks that it knows to be bad, and
//! the error log names the first block of a command. These are hints: a block is reported bad only after a command over it
//! alone has failed, which also yields the cause, and good only after a command over it has succeeded. Without a hint, or
//! with a wrong one, failing runs are halved.
//!
//! Every step makes the run shorter, so a search ends. A target that repeatedly fails a run but none of its blocks ends the
//! search with an error.

use futures_util::stream::{self, StreamExt};
use sealblock_block::{BadBlock, BadBlockCause, Error, ErrorKind, RequestKind};
use sealblock_integrity::Checks;
use sealblock_protocols_nvme::admin::GetLogPage;
use sealblock_protocols_nvme::logs::{DamageHeader, DamageLog, ErrorEntry, ErrorLog, LogPage};
use sealblock_protocols_nvme::nvm::{GetLbaStatus, LbaStatusAction, LbaStatusList};
use sealblock_protocols_nvme_tcp::host::HostData;
use sealblock_runtime_memory::Buffer;
use sealblock_units::{BlockCount, Extent, Lba};

use crate::commands::{CompletedCommand, Io};

use crate::session::Session;
use crate::status::{CommandContext, bad_block_cause, failure};

/// Blocks of one probe: few, so that the blocks after a bad one are soon read again.
const PROBE_BLOCKS: u32 = 256;
/// Probes in flight at once.
const PROBES: usize = 8;
/// Bytes of one Get LBA Status page: 4095 runs.
const STATUS_BYTES: usize = 64 << 10;
/// Maximum blocks taken from one page as hints; the search finds the others without.
const MAX_HINTS: usize = 4096;

/// The command that probes blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Probe {
    /// Verify, which moves no data.
    Verify,
    /// Read, for targets without Verify.
    Read,
}

/// A search for bad blocks.
pub(crate) struct BadBlockSearch<'a> {
    io: &'a Io,
    extent: Extent,
    checks: Checks,
    probe: Probe,
}

/// A step of the search.
enum SearchTask {
    /// Probe these blocks.
    Probe(Extent),
    /// Split these blocks, which failed.
    Split(Extent, CompletedCommand),
    /// Confirm that the parts of a failed run contain a bad block: at least one was found since `found_before`.
    Confirm { extent: Extent, found_before: usize, is_second: bool, failed: CompletedCommand },
}

impl<'a> BadBlockSearch<'a> {
    pub(crate) fn new(io: &'a Io, checks: Checks, probe: Probe) -> BadBlockSearch<'a> {
        BadBlockSearch { io, extent: Extent::one(Lba::ZERO), checks, probe }
    }

    /// The bad blocks of `extent`, over which a command failed; none if every block is good by now.
    pub(crate) async fn of(mut self, extent: Extent, completed: &CompletedCommand) -> Result<Vec<BadBlock>, Error> {
        self.extent = extent;
        let runs = self.runs(extent, completed).await;
        let mut todo = Vec::new();
        let mut outcomes = stream::iter(runs)
            .map(|run| {
                let search = &self;
                async move { search.probe_run(run).await.map(|failed| (run, failed)) }
            })
            .buffered(PROBES);
        while let Some(outcome) = outcomes.next().await {
            let (run, failed) = outcome?;
            todo.extend(failed.map(|failed| SearchTask::Split(run, failed)));
        }
        drop(outcomes);
        let mut bad_blocks = self.run_tasks(todo).await?;
        add_values(&completed.session, &mut bad_blocks).await;
        Ok(bad_blocks)
    }

    /// Probes the blocks; `None` if all are good, else the failed command.
    async fn probe_run(&self, run: Extent) -> Result<Option<CompletedCommand>, Error> {
        let onward = run.start().get() - self.extent.start().get();
        let checks = self.io.codec.pi_mode.shown().map_or(self.checks, |format| self.checks.advance(onward, format));
        let (completed, kind) = match self.probe {
            Probe::Verify => (self.io.verify_once(run, &checks).await?, RequestKind::Verify),
            Probe::Read => {
                let (protection, _) = self.io.codec.read_checks(run, &checks, false);
                (self.io.read_once(run, protection).await?, RequestKind::Read)
            }
        };
        let status = completed.status();
        match (status.is_success(), bad_block_cause(status)) {
            (true, _) => Ok(None),
            (false, Some(_)) => Ok(Some(completed)),
            (false, None) => {
                let nsid = self.io.session.profile.nsid;
                Err(failure(status, CommandContext { kind, extent: Some(run), queue: completed.queue, nsid }))
            }
        }
    }

    /// Executes the tasks, last in, first out; returns the bad blocks.
    async fn run_tasks(&self, mut todo: Vec<SearchTask>) -> Result<Vec<BadBlock>, Error> {
        let mut bad_blocks = Vec::new();
        while let Some(task) = todo.pop() {
            match task {
                SearchTask::Probe(run) => {
                    todo.extend(self.probe_run(run).await?.map(|failed| SearchTask::Split(run, failed)))
                }
                SearchTask::Split(run, failed) if run.len() == 1 => {
                    let field = bad_block_cause(failed.status()).expect("only statuses about blocks are split");
                    bad_blocks.push(BadBlock::new(run.start(), field, None, None));
                }
                SearchTask::Split(run, failed) => {
                    let parts = self.parts(run, &failed).await;
                    let found_before = bad_blocks.len();
                    todo.push(SearchTask::Confirm { extent: run, found_before, is_second: false, failed });
                    todo.extend(parts.into_iter().map(SearchTask::Probe));
                }
                SearchTask::Confirm { found_before, .. } if bad_blocks.len() > found_before => {}
                SearchTask::Confirm { extent, is_second: true, failed, .. } => {
                    return Err(self.unnamed(extent, &failed));
                }
                SearchTask::Confirm { extent, found_before, .. } => {
                    // No block of the run failed alone. Probe the whole run again; if it fails, search its halves once more.
                    if let Some(failed) = self.probe_run(extent).await? {
                        todo.push(SearchTask::Confirm { extent, found_before, is_second: true, failed });
                        todo.extend(halves(extent).map(SearchTask::Probe));
                    }
                }
            }
        }
        Ok(bad_blocks)
    }

    /// Splits a failing run of several blocks: around the block that the error log names, or in halves.
    async fn parts(&self, run: Extent, failed: &CompletedCommand) -> Vec<Extent> {
        match logged_block(failed, run).await {
            Some(lba) => around(run, lba),
            None => halves(run).to_vec(),
        }
    }

    /// The first runs to probe: each block that the target lists as bad, and the runs between them.
    async fn runs(&self, extent: Extent, completed: &CompletedCommand) -> Vec<Extent> {
        let mut bad = self.listed_blocks(extent, completed, LbaStatusAction::Tracked).await;
        if bad.is_empty() {
            bad = self.listed_blocks(extent, completed, LbaStatusAction::ScanUntracked).await;
        }
        if bad.is_empty() {
            bad.extend(logged_block(completed, extent).await);
        }
        let mut runs = Vec::new();
        let mut from = extent.start().get();
        let end = from + extent.len();
        for lba in bad {
            push_pieces(&mut runs, from, lba.get());
            runs.push(Extent::one(lba));
            from = lba.get() + 1;
        }
        push_pieces(&mut runs, from, end);
        runs
    }

    /// Blocks of `extent` that Get LBA Status lists, ascending, each once.
    async fn listed_blocks(&self, extent: Extent, completed: &CompletedCommand, action: LbaStatusAction) -> Vec<Lba> {
        let session = &completed.session;
        if !session.profile.get_lba_status {
            return Vec::new();
        }
        // The command cannot express a range of 2^16 blocks: request all to the end, and cut the list here.
        let range_blocks = u16::try_from(extent.len()).unwrap_or(0);
        let request = GetLbaStatus { start: extent.start(), max_bytes: STATUS_BYTES as u64, action, range_blocks };
        let data = HostData::Read { buffer: Buffer::zeroed(STATUS_BYTES), layout: None };
        let finished = session.controller.admin.try_execute(request.encode(session.profile.nsid), data).await;
        let Ok(finished) = finished else { return Vec::new() };
        let data = finished.data.filter(|_| finished.completion.status().is_success());
        let list = data.and_then(|data| LbaStatusList::decode(&data.buffer).ok());
        let runs = list.map(|list| list.descriptors).unwrap_or_default();
        let blocks = runs.iter().flat_map(|run| run.extent.iter().take(MAX_HINTS));
        let mut blocks: Vec<Lba> = blocks.take(MAX_HINTS).filter(|lba| contains(extent, *lba)).collect();
        blocks.sort_unstable();
        blocks.dedup();
        blocks
    }

    /// The error of a target that fails a run but none of its blocks alone.
    fn unnamed(&self, extent: Extent, failed: &CompletedCommand) -> Error {
        let status = failed.status();
        let reason = format!(
            "the target answers a command over {extent} with {status}, and finds nothing wrong with any of these blocks alone"
        );
        ErrorKind::Media { reason }.into()
    }
}

/// The block, the run before it and the run after it.
fn around(run: Extent, lba: Lba) -> Vec<Extent> {
    let (start, end) = (run.start().get(), run.start().get() + run.len());
    let before = Extent::from_raw(start, lba.get() - start).ok();
    let behind = Extent::from_raw(lba.get() + 1, end - lba.get() - 1).ok();
    [Some(Extent::one(lba)), before, behind].into_iter().flatten().collect()
}

/// Both halves of a run of at least two blocks.
fn halves(run: Extent) -> [Extent; 2] {
    let half = run.len() / 2;
    let part = |start, blocks| Extent::from_raw(start, blocks).expect("half of two or more blocks is not empty");
    let start = run.start().get();
    [part(start, half), part(start + half, run.len() - half)]
}

/// The blocks from `from` to `end`, exclusive, in pieces of [`PROBE_BLOCKS`].
fn push_pieces(runs: &mut Vec<Extent>, from: u64, end: u64) {
    let piece = BlockCount::new(PROBE_BLOCKS).expect("not 0");
    if let Ok(between) = Extent::from_raw(from, end.saturating_sub(from)) {
        runs.extend(between.split_aligned(piece));
    }
}

/// Maximum entries of the error log that are read.
const MAX_ENTRIES: u64 = 64;
/// Maximum bytes of the damage log that are read, and bytes read with one command.
const DAMAGE_BYTES: u64 = 1 << 20;
const PART_BYTES: u64 = 64 << 10;

/// The block that the error log names for this command, if it is one of `extent`.
pub(crate) async fn logged_block(completed: &CompletedCommand, extent: Extent) -> Option<Lba> {
    let session = &completed.session;
    let entries = u64::from(session.profile.error_entries).clamp(1, MAX_ENTRIES);
    let length = entries * ErrorEntry::BYTES as u64;
    let request = GetLogPage { retain_event: true, ..GetLogPage::new(LogPage::ErrorInformation.code(), length) };
    let page = session.controller.admin.log("Get Log Page, Error Information", request).await.ok()?;
    // Newest first: identifiers are reused, so an older entry with the same one belongs to another command.
    let same_command = |entry: &ErrorEntry| entry.sqid == completed.queue && entry.cid == completed.result.cid;
    let entry = ErrorLog::decode(&page).find(same_command)?;
    let is_this = entry.status().code() == completed.status().code() && entry.nsid == session.profile.nsid;
    let lba = Lba::new(entry.lba);
    (is_this && contains(extent, lba)).then_some(lba)
}

pub(crate) fn contains(extent: Extent, lba: Lba) -> bool {
    lba.get().checked_sub(extent.start().get()).is_some_and(|at| at < extent.len())
}

/// Fills in expected and actual values from the target's damage log. Other targets have another page there, or none; the
/// values then stay unknown.
pub(crate) async fn add_values(session: &Session, bad_blocks: &mut [BadBlock]) {
    if bad_blocks.iter().all(|bad_block| bad_block.cause == BadBlockCause::Media || bad_block.expected.is_some()) {
        return;
    }
    let Some(log) = damage_log(session).await else { return };
    for entry in &log.entries {
        let Some((expected, actual)) = entry.values else { continue };
        let field = entry.field.map_or(BadBlockCause::Media, BadBlockCause::Tag);
        let same = |bad_block: &&mut BadBlock| bad_block.lba == entry.lba && bad_block.cause == field;
        if let Some(bad_block) = bad_blocks.iter_mut().find(same) {
            (bad_block.expected, bad_block.actual) = (Some(expected), Some(actual));
        }
    }
}

/// The damage log of the session's namespace, read without a change in between.
async fn damage_log(session: &Session) -> Option<DamageLog> {
    let nsid = session.profile.nsid;
    let admin = &session.controller.admin;
    let part = async |offset, length_bytes| {
        let request =
            GetLogPage { nsid, offset, retain_event: true, ..GetLogPage::new(LogPage::Damage.code(), length_bytes) };
        admin.log("Get Log Page, Damage", request).await.ok()
    };
    let mut page = part(0, DamageHeader::BYTES as u64).await?.to_vec();
    let header = DamageHeader::read(&page).ok().filter(|header| header.nsid == nsid)?;
    let length = header.length_bytes();
    if length > DAMAGE_BYTES {
        return None;
    }
    while (page.len() as u64) < length {
        let at = page.len() as u64;
        page.extend_from_slice(&part(at, PART_BYTES.min(length - at)).await?);
    }
    let again = part(0, DamageHeader::BYTES as u64).await?;
    let is_same = DamageHeader::read(&again).is_ok_and(|again| again.generation == header.generation);
    if is_same { DamageLog::decode(&page).ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(start: u64, blocks: u64) -> Extent {
        Extent::from_raw(start, blocks).unwrap()
    }

    #[test]
    fn parts_are_shorter_and_leave_nothing_out() {
        for blocks in 2..20 {
            let run = extent(100, blocks);
            assert_eq!(halves(run).iter().map(|half| half.len()).sum::<u64>(), blocks);
            assert!(halves(run).iter().all(|half| half.len() < blocks));
            for lba in run.iter() {
                let parts = around(run, lba);
                assert_eq!(parts.iter().map(|part| part.len()).sum::<u64>(), blocks);
                assert_eq!(parts[0], Extent::one(lba));
            }
        }
    }

    #[test]
    fn pieces_between_hints_may_be_empty() {
        let mut runs = Vec::new();
        push_pieces(&mut runs, 5, 5);
        assert!(runs.is_empty());
        push_pieces(&mut runs, 250, 600);
        assert_eq!(
            runs.iter().map(|run| (run.start().get(), run.len())).collect::<Vec<_>>(),
            [(250, 6), (256, 256), (512, 88)]
        );
    }
}
