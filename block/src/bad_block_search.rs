//! Finds the bad blocks of a command that failed, for any transport.
//!
//! A failure has a cause, but often names no block. The device may know more: a list of blocks that it knows to be bad,
//! or the block at which the command failed. These are hints. A block is reported bad only after a command for it alone
//! has failed, which also yields the cause, and good only after a command for it has succeeded. Without a hint, or with
//! a wrong one, failing runs are halved.
//!
//! Every step makes the run shorter, so a search ends. A device that repeatedly fails a run but none of its blocks ends
//! the search with an error.

use futures_util::stream::{self, StreamExt};
use sealblock_units::{BlockCount, Extent, Lba};

use crate::{BadBlock, BadBlockCause, Error, ErrorKind};

/// Blocks of one probe: few, so that the blocks after a bad one are soon read again.
const PROBE_BLOCKS: u32 = 256;
/// Probes in flight at once.
const PROBES: usize = 8;

/// Probes runs of blocks for [`find_bad_blocks`].
pub trait BlockProbe {
    /// A command that failed because of its blocks.
    type Failed;

    /// Probes the blocks with one command; `None` if all are good.
    ///
    /// # Errors
    /// Failures that are not about blocks.
    fn probe(&self, run: Extent) -> impl Future<Output = Result<Option<Self::Failed>, Error>>;

    /// Why the blocks of a command are bad, if it had only one.
    fn cause(&self, failed: &Self::Failed) -> BadBlockCause;

    /// Blocks that may be bad, among those of a failed command.
    fn hints(&self, extent: Extent, failed: &Self::Failed) -> impl Future<Output = Vec<Lba>>;

    /// The block at which a command may have failed.
    fn named(&self, run: Extent, failed: &Self::Failed) -> impl Future<Output = Option<Lba>>;

    /// The device's response as text.
    fn describe(&self, failed: &Self::Failed) -> String;
}

/// A step of the search.
enum SearchTask<F> {
    /// Probe these blocks.
    Probe(Extent),
    /// Split these blocks, which failed.
    Split(Extent, F),
    /// Confirm that the parts of a failed run contain a bad block: at least one was found since `found_before`.
    Confirm { extent: Extent, found_before: usize, is_second: bool, failed: F },
}

/// The bad blocks of `extent`, for which a command failed; none if every block is good by now.
///
/// # Errors
/// Failures that are not about blocks, and a device that fails a run but none of its blocks.
pub async fn find_bad_blocks<P: BlockProbe>(
    probe: &P,
    extent: Extent,
    failed: &P::Failed,
) -> Result<Vec<BadBlock>, Error> {
    let runs = first_runs(extent, probe.hints(extent, failed).await);
    let mut todo = Vec::new();
    let mut outcomes = stream::iter(runs)
        .map(|run| async move { probe.probe(run).await.map(|failed| (run, failed)) })
        .buffered(PROBES);
    while let Some(outcome) = outcomes.next().await {
        let (run, failed) = outcome?;
        todo.extend(failed.map(|failed| SearchTask::Split(run, failed)));
    }
    drop(outcomes);
    run_tasks(probe, todo).await
}

/// Executes the tasks, last in, first out; returns the bad blocks.
async fn run_tasks<P: BlockProbe>(probe: &P, mut todo: Vec<SearchTask<P::Failed>>) -> Result<Vec<BadBlock>, Error> {
    let mut bad_blocks = Vec::new();
    while let Some(task) = todo.pop() {
        match task {
            SearchTask::Probe(run) => todo.extend(probe.probe(run).await?.map(|failed| SearchTask::Split(run, failed))),
            SearchTask::Split(run, failed) if run.len() == 1 => {
                bad_blocks.push(BadBlock::new(run.start(), probe.cause(&failed), None, None));
            }
            SearchTask::Split(run, failed) => {
                let parts = match probe.named(run, &failed).await.filter(|lba| run.contains(*lba)) {
                    Some(lba) => around(run, lba),
                    None => run.halves().into_iter().flatten().collect(),
                };
                let found_before = bad_blocks.len();
                todo.push(SearchTask::Confirm { extent: run, found_before, is_second: false, failed });
                todo.extend(parts.into_iter().map(SearchTask::Probe));
            }
            SearchTask::Confirm { found_before, .. } if bad_blocks.len() > found_before => {}
            SearchTask::Confirm { extent, is_second: true, failed, .. } => {
                return Err(unnamed(extent, &probe.describe(&failed)));
            }
            SearchTask::Confirm { extent, found_before, .. } => {
                // No block of the run failed alone. Probe the whole run again; if it fails, search its halves once
                // more.
                if let Some(failed) = probe.probe(extent).await? {
                    todo.push(SearchTask::Confirm { extent, found_before, is_second: true, failed });
                    todo.extend(extent.halves().into_iter().flatten().map(SearchTask::Probe));
                }
            }
        }
    }
    Ok(bad_blocks)
}

/// The first runs to probe: each hint, and the runs between them.
fn first_runs(extent: Extent, mut hints: Vec<Lba>) -> Vec<Extent> {
    hints.retain(|lba| extent.contains(*lba));
    hints.sort_unstable();
    hints.dedup();
    let mut runs = Vec::new();
    let mut from = extent.start().get();
    // The address after the last block may not exist, but it is only compared.
    let end = from.saturating_add(extent.len());
    for lba in hints {
        push_pieces(&mut runs, from, lba.get());
        runs.push(Extent::one(lba));
        from = lba.get().saturating_add(1);
    }
    push_pieces(&mut runs, from, end);
    runs
}

/// The error of a device that fails a run but none of its blocks alone.
fn unnamed(extent: Extent, answer: &str) -> Error {
    let reason = format!(
        "the device answers a command over {extent} with {answer}, and finds nothing wrong with any of these blocks alone"
    );
    ErrorKind::Media { reason }.into()
}

/// The block, the run before it and the run after it.
fn around(run: Extent, lba: Lba) -> Vec<Extent> {
    let (start, last) = (run.start().get(), run.last().get());
    let before = Extent::from_raw(start, lba.get() - start).ok();
    let behind = lba.checked_add(1).and_then(|next| Extent::from_raw(next.get(), last - lba.get()).ok());
    [Some(Extent::one(lba)), before, behind].into_iter().flatten().collect()
}

/// The blocks from `from` to `end`, exclusive, in pieces of [`PROBE_BLOCKS`].
fn push_pieces(runs: &mut Vec<Extent>, from: u64, end: u64) {
    let piece = BlockCount::new(PROBE_BLOCKS).expect("not 0");
    if let Ok(between) = Extent::from_raw(from, end.saturating_sub(from)) {
        runs.extend(between.split_aligned(piece));
    }
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
