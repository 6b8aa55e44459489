//! Which blocks are damaged, once a command over many of them has failed.
//!
//! A status names a field and no block. The target may know more: Get LBA Status lists blocks that it knows to be bad, and
//! the error log names the first block of a command. These are hints: no block is called bad before a command over it
//! alone has failed, which also tells the field, and none is called good before a command over it has succeeded. Where
//! there is no hint, or a wrong one, failing runs are halved.
//!
//! Every step makes the run in question shorter, so a hunt ends. A target that fails a run, and each time anew, but none
//! of its blocks, is not followed any further: that is an error of its own.

use futures_util::stream::{self, StreamExt};
use sealblock_block::{BadBlock, Error, ErrorKind, RequestKind};
use sealblock_integrity::Checks;
use sealblock_protocols_nvme::nvm::{GetLbaStatus, LbaStatusAction, LbaStatusList};
use sealblock_protocols_nvme_tcp::host::HostData;
use sealblock_runtime_memory::Buffer;
use sealblock_units::{BlockCount, Extent, Lba};

use crate::errors::{add_values, contains, logged_block};
use crate::io::Io;
use crate::reconnecting_session::CompletedCommand;
use crate::status::{CommandContext, bad_block_cause, failure};

/// Blocks of one probe: few enough that what lies behind a bad block is soon read again.
const PROBE_BLOCKS: u32 = 256;
/// Probes under way at once.
const PROBES: usize = 8;
/// Bytes of one answer to Get LBA Status: 4095 runs.
const STATUS_BYTES: usize = 64 << 10;
/// Runs of blocks believed bad that are taken from one answer; the others are found without hints.
const MAX_HINTS: usize = 4096;

/// What a probe is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Probe {
    /// Verify, which moves no data.
    Verify,
    /// Read, for targets without Verify.
    Read,
}

/// A search for damaged blocks.
pub(crate) struct BadBlockSearch<'a> {
    io: &'a Io,
    extent: Extent,
    checks: Checks,
    probe: Probe,
}

/// What is still to be done.
enum SearchTask {
    /// Find out about these blocks.
    Probe(Extent),
    /// These blocks failed so.
    Split(Extent, CompletedCommand),
    /// What was found since there were so many faults is all that these blocks have: at least one, as they failed.
    Confirm { extent: Extent, faults_before: usize, is_second: bool, failed: CompletedCommand },
}

impl<'a> BadBlockSearch<'a> {
    pub(crate) fn new(io: &'a Io, checks: Checks, probe: Probe) -> BadBlockSearch<'a> {
        BadBlockSearch { io, extent: Extent::one(Lba::ZERO), checks, probe }
    }

    /// The damaged blocks of `extent`, which the command answered so is about; none if all are good by now.
    pub(crate) async fn of(mut self, extent: Extent, answered: &CompletedCommand) -> Result<Vec<BadBlock>, Error> {
        self.extent = extent;
        let runs = self.runs(extent, answered).await;
        let mut todo = Vec::new();
        let mut outcomes = stream::iter(runs)
            .map(|run| {
                let hunt = &self;
                async move { hunt.probe_run(run).await.map(|failed| (run, failed)) }
            })
            .buffered(PROBES);
        while let Some(outcome) = outcomes.next().await {
            let (run, failed) = outcome?;
            todo.extend(failed.map(|failed| SearchTask::Split(run, failed)));
        }
        drop(outcomes);
        let mut faults = self.run_tasks(todo).await?;
        add_values(&answered.session, &mut faults).await;
        Ok(faults)
    }

    /// A probe: nothing if the blocks are good, the answer if some are not.
    async fn probe_run(&self, run: Extent) -> Result<Option<CompletedCommand>, Error> {
        let onward = run.start().get() - self.extent.start().get();
        let checks = self.io.codec.pi_mode.shown().map_or(self.checks, |format| self.checks.advance(onward, format));
        let (answered, kind) = match self.probe {
            Probe::Verify => (self.io.verify_once(run, &checks).await?, RequestKind::Verify),
            Probe::Read => {
                let (protection, _) = self.io.codec.read_checks(run, &checks, false);
                (self.io.read_once(run, protection).await?, RequestKind::Read)
            }
        };
        let status = answered.status();
        match (status.is_success(), bad_block_cause(status)) {
            (true, _) => Ok(None),
            (false, Some(_)) => Ok(Some(answered)),
            (false, None) => {
                let nsid = self.io.session.profile.nsid;
                Err(failure(status, CommandContext { kind, extent: Some(run), queue: answered.queue, nsid }))
            }
        }
    }

    /// Works the list off, last in, first out.
    async fn run_tasks(&self, mut todo: Vec<SearchTask>) -> Result<Vec<BadBlock>, Error> {
        let mut faults = Vec::new();
        while let Some(task) = todo.pop() {
            match task {
                SearchTask::Probe(run) => {
                    todo.extend(self.probe_run(run).await?.map(|failed| SearchTask::Split(run, failed)))
                }
                SearchTask::Split(run, failed) if run.len() == 1 => {
                    let field = bad_block_cause(failed.status()).expect("only statuses about blocks are split");
                    faults.push(BadBlock::new(run.start(), field, None, None));
                }
                SearchTask::Split(run, failed) => {
                    let parts = self.parts(run, &failed).await;
                    let faults_before = faults.len();
                    todo.push(SearchTask::Confirm { extent: run, faults_before, is_second: false, failed });
                    todo.extend(parts.into_iter().map(SearchTask::Probe));
                }
                SearchTask::Confirm { faults_before, .. } if faults.len() > faults_before => {}
                SearchTask::Confirm { extent, is_second: true, failed, .. } => {
                    return Err(self.unnamed(extent, &failed));
                }
                SearchTask::Confirm { extent, faults_before, .. } => {
                    // None of its blocks is bad. If the run is still bad as a whole, the halves have one more chance.
                    if let Some(failed) = self.probe_run(extent).await? {
                        todo.push(SearchTask::Confirm { extent, faults_before, is_second: true, failed });
                        todo.extend(halves(extent).map(SearchTask::Probe));
                    }
                }
            }
        }
        Ok(faults)
    }

    /// A failing run of several blocks in shorter ones: around the block that the error log names, or in halves.
    async fn parts(&self, run: Extent, failed: &CompletedCommand) -> Vec<Extent> {
        match logged_block(failed, run).await {
            Some(lba) => around(run, lba),
            None => halves(run).to_vec(),
        }
    }

    /// The first runs to look at: blocks that the target knows to be bad one by one, and what lies between them.
    async fn runs(&self, extent: Extent, answered: &CompletedCommand) -> Vec<Extent> {
        let mut bad = self.known(extent, answered, LbaStatusAction::Tracked).await;
        if bad.is_empty() {
            bad = self.known(extent, answered, LbaStatusAction::ScanUntracked).await;
        }
        if bad.is_empty() {
            bad.extend(logged_block(answered, extent).await);
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
    async fn known(&self, extent: Extent, answered: &CompletedCommand, action: LbaStatusAction) -> Vec<Lba> {
        let session = &answered.session;
        if !session.profile.get_lba_status {
            return Vec::new();
        }
        // A range of 2^16 blocks has no number in the command; then all to the end is asked for, and cut here.
        let range_blocks = u16::try_from(extent.len()).unwrap_or(0);
        let ask = GetLbaStatus { start: extent.start(), max_bytes: STATUS_BYTES as u64, action, range_blocks };
        let data = HostData::Read { buffer: Buffer::zeroed(STATUS_BYTES), layout: None };
        let finished = session.controller.admin.try_execute(ask.encode(session.profile.nsid), data).await;
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

    /// The error of a target that says that blocks are bad and does not say which.
    fn unnamed(&self, extent: Extent, failed: &CompletedCommand) -> Error {
        let status = failed.status();
        let reason = format!(
            "the target answers a command over {extent} with {status}, and finds nothing wrong with any of these blocks alone"
        );
        ErrorKind::Media { reason }.into()
    }
}

/// The block, what is before it, and what is behind it.
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

/// The blocks from `from` up to but not with `end`, in pieces.
fn push_pieces(runs: &mut Vec<Extent>, from: u64, end: u64) {
    let piece = BlockCount::new(PROBE_BLOCKS).expect("not 0");
    if let Ok(between) = Extent::from_raw(from, end.saturating_sub(from)) {
        runs.extend(between.split_aligned(piece));
    }
}

#[cfg(test)]
mod tests;
