//! Finds the bad blocks of a command that failed.
//!
//! A status names a field and no block. The controller may know more: Get LBA Status lists blocks that it knows to be bad, and
//! the error log names the first block of a command. These are hints: a block is reported bad only after a command over it
//! alone has failed, which also yields the cause, and good only after a command over it has succeeded. Without a hint, or
//! with a wrong one, failing runs are halved.
//!
//! Every step makes the run shorter, so a search ends. A controller that repeatedly fails a run but none of its blocks ends the
//! search with an error.

use futures_util::stream::{self, StreamExt};
use sealblock_block::{BadBlock, Error, ErrorKind, RequestKind};
use sealblock_integrity::Checks;
use sealblock_protocols_nvme::admin::GetLogPage;
use sealblock_protocols_nvme::logs::{ErrorEntry, ErrorLog, LogPage};
use sealblock_protocols_nvme::nvm::{BlockCommand, GetLbaStatus, IoCommand, LbaStatusAction, LbaStatusList};
use sealblock_units::{BlockCount, Extent, Lba};

use crate::status::bad_block_cause;
use crate::{CompletedCommand, Namespace};

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
pub enum Probe {
    /// Verify, which moves no data.
    Verify,
    /// Read, for controllers without Verify.
    Read,
}

/// A search for bad blocks.
pub struct BadBlockSearch<'a, N> {
    namespace: &'a N,
    extent: Extent,
    checks: Checks,
    probe: Probe,
}

/// A step of the search.
enum SearchTask<C> {
    /// Probe these blocks.
    Probe(Extent),
    /// Split these blocks, which failed.
    Split(Extent, C),
    /// Confirm that the parts of a failed run contain a bad block: at least one was found since `found_before`.
    Confirm { extent: Extent, found_before: usize, is_second: bool, failed: C },
}

impl<'a, N: Namespace> BadBlockSearch<'a, N> {
    /// A search with these checks and this command.
    pub fn new(namespace: &'a N, checks: Checks, probe: Probe) -> BadBlockSearch<'a, N> {
        BadBlockSearch { namespace, extent: Extent::one(Lba::ZERO), checks, probe }
    }

    /// The bad blocks of `extent`, over which a command failed; none if every block is good by now.
    ///
    /// # Errors
    /// Statuses that are not about blocks, and a controller that fails a run but none of its blocks.
    pub async fn of(mut self, extent: Extent, completed: &N::Completed) -> Result<Vec<BadBlock>, Error> {
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
        self.namespace.add_values(completed, &mut bad_blocks).await;
        Ok(bad_blocks)
    }

    /// Probes the blocks; `None` if all are good, else the failed command.
    async fn probe_run(&self, run: Extent) -> Result<Option<N::Completed>, Error> {
        let profile = self.namespace.profile();
        let onward = run.start().get() - self.extent.start().get();
        let checks = profile.pi_mode.shown().map_or(self.checks, |format| self.checks.advance(onward, format));
        let (completed, kind) = match self.probe {
            Probe::Verify => {
                let (protection, _) = profile.read_checks(run, &checks, true);
                let command = IoCommand::Verify(BlockCommand { protection, ..BlockCommand::new(run) });
                (self.namespace.execute_once(command).await?, RequestKind::Verify)
            }
            Probe::Read => {
                let (protection, _) = profile.read_checks(run, &checks, false);
                (self.namespace.read_once(run, protection).await?, RequestKind::Read)
            }
        };
        let status = completed.status();
        match (status.is_success(), bad_block_cause(status)) {
            (true, _) => Ok(None),
            (false, Some(_)) => Ok(Some(completed)),
            (false, None) => Err(self.namespace.failed(kind, Some(run), &completed)),
        }
    }

    /// Executes the tasks, last in, first out; returns the bad blocks.
    async fn run_tasks(&self, mut todo: Vec<SearchTask<N::Completed>>) -> Result<Vec<BadBlock>, Error> {
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
    async fn parts(&self, run: Extent, failed: &N::Completed) -> Vec<Extent> {
        match logged_block(self.namespace, failed, run).await {
            Some(lba) => around(run, lba),
            None => halves(run).to_vec(),
        }
    }

    /// The first runs to probe: each block that the controller lists as bad, and the runs between them.
    async fn runs(&self, extent: Extent, completed: &N::Completed) -> Vec<Extent> {
        let mut bad = self.listed_blocks(extent, completed, LbaStatusAction::Tracked).await;
        if bad.is_empty() {
            bad = self.listed_blocks(extent, completed, LbaStatusAction::ScanUntracked).await;
        }
        if bad.is_empty() {
            bad.extend(logged_block(self.namespace, completed, extent).await);
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
    async fn listed_blocks(&self, extent: Extent, completed: &N::Completed, action: LbaStatusAction) -> Vec<Lba> {
        let profile = self.namespace.profile();
        if !profile.get_lba_status {
            return Vec::new();
        }
        // The command cannot express a range of 2^16 blocks: request all to the end, and cut the list here.
        let range_blocks = u16::try_from(extent.len()).unwrap_or(0);
        let request = GetLbaStatus { start: extent.start(), max_bytes: STATUS_BYTES as u64, action, range_blocks };
        let page = self.namespace.read_page(completed, request.encode(profile.nsid), STATUS_BYTES).await;
        let list = page.and_then(|page| LbaStatusList::decode(&page).ok());
        let runs = list.map(|list| list.descriptors).unwrap_or_default();
        let blocks = runs.iter().flat_map(|run| run.extent.iter().take(MAX_HINTS));
        let mut blocks: Vec<Lba> = blocks.take(MAX_HINTS).filter(|lba| contains(extent, *lba)).collect();
        blocks.sort_unstable();
        blocks.dedup();
        blocks
    }

    /// The error of a target that fails a run but none of its blocks alone.
    fn unnamed(&self, extent: Extent, failed: &N::Completed) -> Error {
        let status = failed.status();
        let reason = format!(
            "the controller answers a command over {extent} with {status}, and finds nothing wrong with any of these blocks alone"
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

/// The block that the error log names for this command, if it is one of `extent`.
pub async fn logged_block<N: Namespace>(namespace: &N, completed: &N::Completed, extent: Extent) -> Option<Lba> {
    let profile = namespace.profile();
    let entries = u64::from(profile.error_entries).clamp(1, MAX_ENTRIES);
    let length = entries * ErrorEntry::BYTES as u64;
    let request = GetLogPage { retain_event: true, ..GetLogPage::new(LogPage::ErrorInformation.code(), length) };
    let page = namespace.read_page(completed, request.encode(), length as usize).await?;
    // Newest first: identifiers are reused, so an older entry with the same one belongs to another command.
    let entry = ErrorLog::decode(&page).find(|entry| namespace.is_logged_as(completed, entry))?;
    let is_this = entry.status().code() == completed.status().code() && entry.nsid == profile.nsid;
    let lba = Lba::new(entry.lba);
    (is_this && contains(extent, lba)).then_some(lba)
}

fn contains(extent: Extent, lba: Lba) -> bool {
    lba.get().checked_sub(extent.start().get()).is_some_and(|at| at < extent.len())
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
