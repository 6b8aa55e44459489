//! The bad blocks of one device that its own checks have found.
//!
//! Invariants: a block is added only by a check of this device, and removed only by a change of it on this device, or
//! by a full check that found it good. The state of other copies does not matter. No bad block is ever dropped: above
//! [`MAX_DAMAGE_RUNS`] runs, those that are nearest to each other become one *coarse* run. Some of its blocks are bad,
//! and the minimum number of these is known. While no block is bad, a request that succeeds costs one relaxed load.
//!
//! Bounds: every bad block that was found is in a run, the bad blocks of a run are at least `bad_blocks` and at most all
//! of it, and no two runs of a list overlap. So the sums of both over a list are bounds of the number of bad blocks
//! (unreadable ones that hosts made are counted separately). Joining, cutting and merging runs, saving and loading them
//! keep this. A full check replaces what is known of its blocks: after a check of all blocks both bounds are the number
//! that it found, as long as the list has room.
//!
//! A list that was lost is not known to be complete until every block has been checked, written or discarded since: the
//! blocks of which that is not true are *forgotten*, and any of them may have been known to be bad.
//!
//! A read that races with a write of the same block may leave the block in the list although the write repaired it; the
//! next check removes it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use sealblock_units::Extent;

use crate::{BadBlock, BadBlockCause, Error, ErrorKind, Extents, Operation, Outcome, Request, RequestKind, Response};

/// The maximum number of runs that a record lists.
pub const MAX_DAMAGE_RUNS: usize = 65_536;
/// The maximum number of runs of forgotten blocks. Beyond it, blocks in the middle of a run stay forgotten when they are
/// checked.
const MAX_FORGOTTEN_RUNS: usize = 64;

/// A run of blocks, all of which are bad, unless the run is coarse: then some are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DamageRun {
    /// The first block, which was bad when the run was created.
    pub first: u64,
    /// The last block.
    pub last: u64,
    /// The minimum number of bad blocks.
    pub bad_blocks: u64,
    /// What is wrong with them; for a coarse run, with the first one.
    pub cause: BadBlockCause,
    /// True if a host made them unreadable, so that no data were lost.
    pub is_made: bool,
    /// The value that the check computed or requires, and the stored one, if they are known, for a single block.
    pub values: Option<(u64, u64)>,
}

impl DamageRun {
    /// A run of blocks that are all bad.
    pub const fn exact(first: u64, last: u64, cause: BadBlockCause) -> DamageRun {
        DamageRun { first, last, bad_blocks: last - first + 1, cause, is_made: false, values: None }
    }

    /// The run of one bad block.
    pub fn of(bad_block: &BadBlock) -> DamageRun {
        let lba = bad_block.lba.get();
        DamageRun { values: bad_block.expected.zip(bad_block.actual), ..DamageRun::exact(lba, lba, bad_block.cause) }
    }

    /// The number of blocks of the run.
    pub const fn blocks(&self) -> u64 {
        self.last - self.first + 1
    }

    /// True if some of its blocks may be good.
    pub const fn is_coarse(&self) -> bool {
        self.bad_blocks < self.blocks()
    }

    /// The part of the run from `first` to `last`. For a coarse run, it counts the bad blocks that cannot be outside of
    /// the part.
    #[must_use]
    pub fn part(&self, first: u64, last: u64) -> DamageRun {
        let blocks = last - first + 1;
        let bad_blocks = self.bad_blocks.saturating_sub(self.blocks() - blocks);
        DamageRun { first, last, bad_blocks, ..*self }
    }

    /// The parts of the run that are in none of these ranges: first and last block of each, in order.
    fn outside(&self, ranges: impl Iterator<Item = (u64, u64)>) -> Vec<DamageRun> {
        let (mut parts, mut first) = (Vec::new(), self.first);
        for (from, to) in ranges.filter(|(from, to)| *from <= self.last && *to >= self.first) {
            if first < from {
                parts.push(self.part(first, from - 1));
            }
            if to >= self.last {
                return parts;
            }
            first = to + 1;
        }
        parts.push(self.part(first, self.last));
        parts
    }

    /// Joins both runs and the blocks between them.
    fn and(&self, next: &DamageRun) -> DamageRun {
        let (bad_blocks, is_made) = (self.bad_blocks + next.bad_blocks, self.is_made && next.is_made);
        DamageRun { last: next.last, bad_blocks, is_made, values: None, ..*self }
    }
}

/// Reduces runs to at most `max_runs`, in order: first neighbours with the same cause are joined, then those with the
/// smallest gaps.
pub fn coarsen(runs: Vec<DamageRun>, max_runs: usize) -> Vec<DamageRun> {
    if runs.len() <= max_runs {
        return runs;
    }
    let is_one = |a: &DamageRun, b: &DamageRun| {
        a.last + 1 == b.first && (a.cause, a.is_made) == (b.cause, b.is_made) && !a.is_coarse() && !b.is_coarse()
    };
    let joined = joined_by(runs, is_one);
    let excess = joined.len().saturating_sub(max_runs.max(1));
    if excess == 0 {
        return joined;
    }
    // Blocks that hosts made unreadable are joined with damage last, because they are counted separately.
    let gap = |a: &DamageRun, b: &DamageRun| if a.is_made == b.is_made { b.first - a.last } else { u64::MAX };
    let mut gaps: Vec<u64> = joined.windows(2).map(|two| gap(&two[0], &two[1])).collect();
    let (smaller, widest, _) = gaps.select_nth_unstable(excess - 1);
    let widest = *widest;
    // Of the gaps with the largest width, only as many as needed are closed.
    let mut of_widest = excess - smaller.iter().filter(|gap| **gap < widest).count();
    joined_by(joined, |a, b| {
        let gap = gap(a, b);
        let takes = gap < widest || gap == widest && of_widest > 0;
        of_widest -= usize::from(takes && gap == widest);
        takes
    })
}

fn joined_by(runs: Vec<DamageRun>, mut is_one: impl FnMut(&DamageRun, &DamageRun) -> bool) -> Vec<DamageRun> {
    let mut all: Vec<DamageRun> = Vec::new();
    for run in runs {
        match all.last_mut() {
            Some(last) if is_one(last, &run) => *last = last.and(&run),
            _ => all.push(run),
        }
    }
    all
}

/// The number of bad blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DamageCount {
    /// The minimum number.
    pub least: u64,
    /// The maximum number of known ones.
    pub most: u64,
    /// Blocks that hosts made unreadable. Neither number includes them.
    pub made: u64,
}

impl DamageCount {
    /// Adds the blocks of a run.
    pub fn add(&mut self, run: &DamageRun) {
        if run.is_made {
            self.made += run.bad_blocks;
        } else {
            self.least += run.bad_blocks;
            self.most += run.blocks();
        }
    }
}

/// Known bad blocks of one device, or of all devices of a group, in the addresses of the group.
pub trait DamageSource: Send + Sync {
    /// Calls `see` with each run in these blocks, and with the name of the device that has the bad copies. The runs of
    /// one device are in order.
    fn visit(&self, first: u64, last: u64, see: &mut dyn FnMut(&str, DamageRun));

    /// The number of changes of all lists.
    fn generation(&self) -> u64;

    /// The number of changes that added blocks.
    fn additions(&self) -> u64;

    /// The devices whose lists were lost and of which not every block has been checked since: bad blocks that were known
    /// may not be listed.
    fn lost_lists(&self) -> Vec<String>;
}

/// True if a block is in one of these runs, which are in order and do not overlap.
pub fn has_block(runs: &[DamageRun], lba: u64) -> bool {
    let at = runs.partition_point(|run| run.last < lba);
    runs.get(at).is_some_and(|run| run.first <= lba)
}

/// The runs of a source in these blocks, in order. An address at which several copies are bad counts once.
pub fn merged(source: &dyn DamageSource, first: u64, last: u64) -> Vec<DamageRun> {
    let mut runs = Vec::new();
    source.visit(first, last, &mut |_, run| runs.push(run));
    merge_runs(runs)
}

/// Merges the runs of several lists: in order, without overlaps. An address is damaged if a copy is: blocks of one copy
/// that hosts made unreadable do not hide damage of another one.
pub fn merge_runs(runs: Vec<DamageRun>) -> Vec<DamageRun> {
    let (made, damage): (Vec<DamageRun>, Vec<DamageRun>) = runs.into_iter().partition(|run| run.is_made);
    let mut all = merge_alike(damage);
    if made.is_empty() {
        return all;
    }
    let mut rest = Vec::new();
    for run in merge_alike(made) {
        let from = all.partition_point(|damaged| damaged.last < run.first);
        let damaged = all[from..].iter().take_while(|damaged| damaged.first <= run.last);
        rest.extend(run.outside(damaged.map(|damaged| (damaged.first, damaged.last))));
    }
    all.extend(rest);
    all.sort_unstable_by_key(|run| run.first);
    all
}

fn merge_alike(mut runs: Vec<DamageRun>) -> Vec<DamageRun> {
    runs.sort_by_key(|run| (run.first, run.last));
    let mut all: Vec<DamageRun> = Vec::new();
    // Of the last run, the minimum that other lists know of, and the first block behind those that it counts.
    let (mut others, mut behind) = (0, 0);
    for run in runs {
        let Some(before) = all.last_mut().filter(|before| run.first <= before.last) else {
            (others, behind) = (0, run.first);
            all.push(run);
            continue;
        };
        let (last, first) = (run.last.min(before.last), run.first.max(behind));
        if first <= last {
            others += run.part(first, last).bad_blocks;
            behind = last + 1;
            before.bad_blocks = before.bad_blocks.max(others);
        }
        if run.last > before.last {
            let rest = run.part(before.last + 1, run.last);
            (others, behind) = (0, rest.first);
            all.push(rest);
        }
    }
    all
}

/// The known bad blocks of one device.
#[derive(Debug)]
pub struct DamageRecord {
    /// True if any block is listed or forgotten, so that a request can check this without the lock.
    has_any: AtomicBool,
    list: Mutex<DamageRuns>,
}

#[derive(Debug)]
struct DamageRuns {
    /// By first block; no two overlap.
    runs: BTreeMap<u64, DamageRun>,
    /// Forgotten blocks: first and last of each run, in order.
    forgotten: Vec<(u64, u64)>,
    /// Reports of blocks beyond the end come late and are dropped.
    capacity_blocks: u64,
    generation: u64,
    additions: u64,
}

/// What a record must know about a request to a device to interpret its outcome.
#[derive(Clone, Debug)]
pub struct WatchedRequest {
    kind: RequestKind,
    extent: Option<Extent>,
    discarded: Option<Extents>,
    /// True if its success means that the blocks are good on all media of the device.
    is_full_check: bool,
    /// True if it makes blocks unreadable because their data are lost.
    marks_loss: bool,
}

impl WatchedRequest {
    /// Describes a request to a device; `copies` is true if the device has copies. The expectations of the request do
    /// not matter: a device always checks its own integrity first.
    pub fn of(request: &Request, copies: bool) -> WatchedRequest {
        let kind = request.kind();
        let is_full_check = match kind {
            // If there are copies, a read checks only one of them.
            RequestKind::Read => !copies,
            RequestKind::Verify | RequestKind::Checksum | RequestKind::Repair => true,
            _ => false,
        };
        let discarded = (kind == RequestKind::Discard).then(|| request.extents.clone());
        let marks_loss = matches!(request.operation, Operation::WriteUncorrectable { marks_loss: true });
        WatchedRequest { kind, extent: request.extent(), discarded, is_full_check, marks_loss }
    }
}

impl DamageRecord {
    /// The record of a device with this number of blocks, none of which is known to be bad.
    pub fn new(capacity_blocks: u64) -> DamageRecord {
        let (runs, forgotten) = (BTreeMap::new(), Vec::new());
        let list = DamageRuns { runs, forgotten, capacity_blocks, generation: 0, additions: 0 };
        DamageRecord { has_any: AtomicBool::new(false), list: Mutex::new(list) }
    }

    /// True if no block is known to be bad, and none is forgotten.
    pub fn is_empty(&self) -> bool {
        !self.has_any.load(Ordering::Relaxed)
    }

    /// Ignores poisoning: a panic elsewhere cannot leave the map half changed.
    fn lock(&self) -> MutexGuard<'_, DamageRuns> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut DamageRuns)) {
        let mut list = self.lock();
        change(&mut list);
        self.has_any.store(!list.runs.is_empty() || !list.forgotten.is_empty(), Ordering::Relaxed);
    }

    /// Updates the list with the outcome of a request.
    pub fn observe(&self, request: &WatchedRequest, outcome: &Outcome) {
        match outcome {
            Ok(_) if request.kind == RequestKind::WriteUncorrectable => {
                if let Some(extent) = request.extent {
                    let (first, last) = (extent.start().get(), extent.last().get());
                    let is_made = !request.marks_loss;
                    let run = DamageRun { is_made, ..DamageRun::exact(first, last, BadBlockCause::Media) };
                    self.change(|list| list.set(run));
                }
            }
            Ok(Response::Salvaged(left)) => self.add(&left.bad_blocks),
            Ok(_) if self.is_empty() => {}
            Ok(response) => self.change(|list| list.succeeded(request, response)),
            Err(error) => self.failed(request, error),
        }
    }

    #[cold]
    fn failed(&self, request: &WatchedRequest, error: &Error) {
        let Some(extent) = request.extent else { return };
        let lone_block = [BadBlock::media(extent.start())];
        let reads = matches!(
            request.kind,
            RequestKind::Read | RequestKind::Verify | RequestKind::Checksum | RequestKind::Compare
        );
        let bad_blocks = match error.kind() {
            ErrorKind::Integrity(bad_blocks) => bad_blocks.as_slice(),
            // It names no block, so it is conclusive only for a single one.
            ErrorKind::Media { .. } if reads && extent.len() == 1 => &lone_block,
            _ => return,
        };
        let unrepaired: Vec<&BadBlock> = bad_blocks.iter().filter(|bad| !bad.repaired).collect();
        // The bad blocks of a Copy are those of its source.
        let checked = request.is_full_check && error.bad_blocks().is_some_and(|bad| bad.coverage().is_complete());
        self.change(|list| match checked {
            true if !list.runs.is_empty() || !list.forgotten.is_empty() => list.checked(extent, &unrepaired),
            _ => unrepaired.iter().for_each(|bad| list.add(DamageRun::of(bad))),
        });
    }

    /// Adds bad blocks that were not found by a request.
    pub fn add(&self, bad_blocks: &[BadBlock]) {
        if bad_blocks.is_empty() {
            return;
        }
        // One that is only not compared yet is not lost.
        let unrepaired = bad_blocks.iter().filter(|bad| !bad.repaired && bad.cause != BadBlockCause::Unsettled);
        self.change(|list| unrepaired.for_each(|bad| list.add(DamageRun::of(bad))));
    }

    /// Removes blocks, whatever is known about them.
    pub fn clear(&self, extent: Extent) {
        if !self.is_empty() {
            self.change(|list| list.cut(extent.start().get(), extent.last().get()));
        }
    }

    /// Takes over a stored list, which does not count as a change. Blocks that are listed already are known better.
    pub fn restore(&self, runs: &[DamageRun]) {
        self.change(|list| {
            for run in runs.iter().filter(|run| run.first < list.capacity_blocks) {
                let run = run.part(run.first, run.last.min(list.capacity_blocks - 1));
                let parts = run.outside(list.overlapping(run.first, run.last).map(|known| (known.first, known.last)));
                list.runs.extend(parts.into_iter().map(|part| (part.first, part)));
            }
        });
    }

    /// The list of the blocks from `first` on was lost: any of them may have been known to be bad. Like a stored list,
    /// this does not count as a change.
    pub fn forget_from(&self, first: u64) {
        self.change(|list| {
            let last = list.capacity_blocks.checked_sub(1).filter(|last| first <= *last);
            list.forgotten = last.map(|last| (first, last)).into_iter().collect();
        });
    }

    /// The first block that may have been known to be bad before the list was lost, and was not checked since; `None` if
    /// the list is not lost.
    pub fn forgotten_from(&self) -> Option<u64> {
        self.lock().forgotten.first().map(|(first, _)| *first)
    }

    /// Drops blocks beyond the device's new end: if it grows again, the blocks there are new.
    pub fn resize(&self, capacity_blocks: u64) {
        self.change(|list| {
            list.capacity_blocks = capacity_blocks;
            list.cut(capacity_blocks, u64::MAX);
        });
    }

    /// All runs, in order.
    pub fn runs(&self) -> Vec<DamageRun> {
        self.lock().runs.values().copied().collect()
    }

    /// Calls `see` with the parts of runs in these blocks, in order.
    pub fn visit(&self, first: u64, last: u64, mut see: impl FnMut(DamageRun)) {
        if self.is_empty() {
            return;
        }
        let list = self.lock();
        for run in list.overlapping(first, last) {
            see(run.part(run.first.max(first), run.last.min(last)));
        }
    }

    /// The number of changes.
    pub fn generation(&self) -> u64 {
        self.lock().generation
    }

    /// The number of changes that added blocks.
    pub fn additions(&self) -> u64 {
        self.lock().additions
    }
}

impl DamageRuns {
    /// The runs that overlap these blocks, in order.
    fn overlapping(&self, first: u64, last: u64) -> impl Iterator<Item = &DamageRun> {
        let before = self.runs.range(..first).next_back().filter(|(_, run)| run.last >= first);
        before.into_iter().chain(self.runs.range(first..=last)).map(|(_, run)| run)
    }

    /// Removes blocks from the list. The rest of a run on either side stays.
    fn cut(&mut self, first: u64, last: u64) {
        let overlapping: Vec<DamageRun> = self.overlapping(first, last).copied().collect();
        for run in &overlapping {
            self.runs.remove(&run.first);
            if run.first < first {
                self.runs.insert(run.first, run.part(run.first, first - 1));
            }
            if run.last > last {
                self.runs.insert(last + 1, run.part(last + 1, run.last));
            }
        }
        self.generation += u64::from(!overlapping.is_empty());
        self.remember(first, last);
    }

    /// What is known of these blocks does not depend on the lost list any more. The last ones are a change: the list is
    /// complete again.
    fn remember(&mut self, first: u64, last: u64) {
        if self.forgotten.is_empty() {
            return;
        }
        let mut left = Vec::with_capacity(self.forgotten.len() + 1);
        for (from, to) in self.forgotten.iter().copied() {
            left.extend((from < first).then(|| (from, to.min(first.saturating_sub(1)))));
            left.extend((to > last).then(|| (from.max(last.saturating_add(1)), to)));
        }
        if left.len() <= MAX_FORGOTTEN_RUNS {
            self.generation += u64::from(left.is_empty());
            self.forgotten = left;
        }
    }

    /// Replaces what is known of blocks of which a check found these bad, in order, and all others good.
    fn checked(&mut self, extent: Extent, bad_blocks: &[&BadBlock]) {
        let (mut first, last) = (extent.start().get(), extent.last().get());
        // Coarse runs end where the check begins: inside of it, it is now known which blocks are bad.
        let coarse = self.overlapping(first, last).filter(|run| run.is_coarse());
        let coarse: Vec<DamageRun> = coarse.map(|run| run.part(run.first.max(first), run.last.min(last))).collect();
        coarse.iter().for_each(|part| self.cut(part.first, part.last));
        for bad in bad_blocks {
            let lba = bad.lba.get();
            if lba > first {
                self.cut(first, last.min(lba - 1));
            }
            first = first.max(lba + 1);
        }
        if first <= last {
            self.cut(first, last);
        }
        for bad in bad_blocks {
            let block = DamageRun::of(bad);
            let at = coarse.partition_point(|part| part.last < block.first);
            match coarse.get(at).filter(|part| part.first <= block.first) {
                // It was listed before, so that it is no addition.
                Some(part) => {
                    let is_made = part.is_made && block.cause == BadBlockCause::Media;
                    self.set(DamageRun { is_made, ..block });
                }
                None => self.add(block),
            }
        }
        self.remember(extent.start().get(), extent.last().get());
    }

    /// Adds a block that was found bad by something other than a full check. A coarse run with this block may count it
    /// already, so that it has at least one bad block, and not one more.
    fn add(&mut self, block: DamageRun) {
        if block.first >= self.capacity_blocks {
            return;
        }
        self.remember(block.first, block.last);
        let known = self.overlapping(block.first, block.last).next().copied();
        match known {
            // Write Uncorrectable stays the cause as long as the block is unreadable.
            Some(known) if known.is_made && block.cause == BadBlockCause::Media => {}
            Some(known) if known.is_coarse() && !known.is_made => {
                if known.bad_blocks == 0 {
                    self.runs.insert(known.first, DamageRun { bad_blocks: 1, ..known });
                    self.generation += 1;
                }
            }
            Some(known) if known.blocks() > 1 && !known.is_made && known.cause == block.cause => {}
            Some(known) if known == block => {}
            Some(_) => self.set(block),
            None => {
                self.set(block);
                self.additions += 1;
            }
        }
    }

    fn set(&mut self, run: DamageRun) {
        let Some(end) = self.capacity_blocks.checked_sub(1).filter(|end| run.first <= *end) else { return };
        let run = run.part(run.first, run.last.min(end));
        self.cut(run.first, run.last);
        self.runs.insert(run.first, run);
        self.generation += 1;
        if self.runs.len() > MAX_DAMAGE_RUNS {
            // Fewer than the maximum, so that the next block does not need another pass.
            let runs = coarsen(self.runs.values().copied().collect(), MAX_DAMAGE_RUNS / 16 * 15);
            self.runs = runs.into_iter().map(|run| (run.first, run)).collect();
        }
    }

    /// Updates the list after a request that succeeded.
    fn succeeded(&mut self, request: &WatchedRequest, response: &Response) {
        use RequestKind::{CompareAndWrite, Copy, Write, WriteZeroes};
        let is_complete = match response {
            Response::Verified(verified) => verified.coverage.is_complete(),
            Response::Checksum(checksum) => checksum.coverage.is_complete(),
            _ => true,
        };
        let is_changed = matches!(request.kind, Write | WriteZeroes | Copy | CompareAndWrite);
        if let Some(extent) = request.extent.filter(|_| is_changed || request.is_full_check && is_complete) {
            self.cut(extent.start().get(), extent.last().get());
        }
        for extent in request.discarded.iter().flat_map(|extents| extents.iter()) {
            self.cut(extent.start().get(), extent.last().get());
        }
    }
}

#[cfg(test)]
mod tests;
