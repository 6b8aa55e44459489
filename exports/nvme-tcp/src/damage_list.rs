//! Blocks that are known to be bad: what Get LBA Status and the logs of damage report.
//!
//! Invariants: only what fails against the store's own seals gets in, and nothing that a host merely expected; at most
//! [`MAX_BAD_BLOCKS`] blocks are kept, and what did not fit is confessed as an overflow until checks of all blocks have met no
//! more than there is room for; a block leaves the set when it is written, zeroed or discarded, and when a check of the field
//! that was wrong finds it good; while the set is empty a successful command costs one relaxed load.
//!
//! Shape: one set for a namespace, shared by all controllers and cores, because damage belongs to the blocks and not to
//! who met it. A read that races with a write of the same block may leave the block in the set although the write has
//! healed it; the next check takes it out.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use sealblock_block::{BadBlock, BadBlockCause, Error, ErrorKind, Geometry, Outcome, Request, RequestKind, Response};
use sealblock_integrity::{Checks, Field};
use sealblock_protocols_nvme::logs::{DamageEntry, DamageLog};
use sealblock_protocols_nvme::nvm::{LbaStatusDescriptor, LbaStatusFlags};
use sealblock_units::{Extent, Lba};

/// Bad blocks that are remembered of one namespace.
pub const MAX_BAD_BLOCKS: usize = 16_384;
/// Runs of checked blocks that are remembered since the set overflowed. Further ones are forgotten, and to be checked again.
const MAX_CHECKED_RUNS: usize = 64;

/// The blocks of one namespace that are known to be bad.
#[derive(Default)]
pub(crate) struct DamageList {
    /// As many as the set has, and one more while it is not all; a hint for those who only want to know whether there is
    /// anything to do.
    len: AtomicUsize,
    set: Mutex<DamageSet>,
}

/// What is wrong with a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct DamageInfo {
    cause: BadBlockCause,
    values: Option<(u64, u64)>,
    /// It was made so by Write Uncorrectable.
    is_write_uncorrectable: bool,
}

struct DamageSet {
    blocks: BTreeMap<u64, DamageInfo>,
    /// Blocks of the device, once it was resized: what was met beyond by requests of before is no damage any more.
    capacity_blocks: u64,
    overflowed: bool,
    /// The blocks that were checked since it overflowed: first and last of runs, in order, none next to another.
    checked: Vec<(u64, u64)>,
    /// Counts every change.
    generation: u64,
    /// Counts the times that blocks were added.
    additions: u16,
}

/// What an operation was about, kept beside it until it ends.
pub(crate) struct RequestSummary {
    pub(crate) kind: RequestKind,
    pub(crate) extent: Option<Extent>,
    pub(crate) checks: Checks,
    /// What is known of the tags of all blocks, whoever asks: the checks of the store itself.
    pub(crate) own: Checks,
    /// Blocks of the device.
    pub(crate) capacity_blocks: u64,
}

/// The set in few words, for the LBA Status Information log.
pub(crate) struct DamageListSummary {
    pub(crate) blocks: usize,
    pub(crate) overflowed: bool,
    pub(crate) additions: u16,
    pub(crate) runs: Vec<LbaStatusDescriptor>,
}

impl RequestSummary {
    /// What this operation on a device of this shape is about.
    pub(crate) fn of(request: &Request, geometry: &Geometry) -> RequestSummary {
        let checks = match request {
            Request::Read { checks, .. }
            | Request::Verify { checks, .. }
            | Request::Checksum { checks, .. }
            | Request::Repair { checks, .. } => *checks,
            _ => Checks::NONE,
        };
        let own = match (geometry.protection, request.extent()) {
            (Some(format), Some(extent)) => Checks::full(format, extent.start()),
            _ => Checks::NONE,
        };
        let (kind, extent) = (request.kind(), request.extent());
        RequestSummary { kind, extent, checks, own, capacity_blocks: geometry.capacity_blocks }
    }

    /// The store's own check of these blocks.
    pub(crate) fn of_check(extent: Extent, geometry: &Geometry) -> (RequestSummary, Request) {
        let checks = geometry.protection.map_or(Checks::NONE, |format| Checks::full(format, extent.start()));
        let verify = Request::Verify { extent, checks };
        (RequestSummary::of(&verify, geometry), verify)
    }

    /// Whether the operation may have failed for what the host expected of tags, and not for what is stored: blocks are known to
    /// be bad then only if they fail the store's own check.
    pub(crate) fn needs_own_check(&self, outcome: &Outcome) -> bool {
        let expected_by_host = |bad_block: &BadBlock| match bad_block.cause {
            BadBlockCause::Tag(Field::AppTag) => self.checks.app_tag.is_some(),
            BadBlockCause::Tag(Field::StorageTag) => self.checks.storage_tag.is_some(),
            BadBlockCause::Tag(Field::RefTag) => {
                self.checks.initial_ref_tag.is_some_and(|first| self.own.initial_ref_tag != Some(first))
            }
            _ => false,
        };
        let bad_blocks = outcome.as_ref().err().and_then(Error::bad_blocks);
        bad_blocks.is_some_and(|bad_blocks| bad_blocks.as_slice().iter().any(expected_by_host))
    }

    /// Whether the operation checks every copy of its blocks as the store does.
    fn checks_all_copies(&self) -> bool {
        use RequestKind::{Checksum, Repair, Verify};
        matches!(self.kind, Verify | Checksum | Repair)
            && (self.checks.guard || !self.own.guard)
            && (self.checks.initial_ref_tag == self.own.initial_ref_tag || self.own.initial_ref_tag.is_none())
    }
}

impl DamageList {
    fn is_empty(&self) -> bool {
        self.len.load(Ordering::Relaxed) == 0
    }

    /// A panic of another thread cannot leave a map half changed, so its lock is as good as any.
    fn lock(&self) -> MutexGuard<'_, DamageSet> {
        self.set.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the set, and the hint with it.
    fn change<T>(&self, change: impl FnOnce(&mut DamageSet) -> T) -> T {
        let mut set = self.lock();
        let changed = change(&mut set);
        self.len.store(set.blocks.len() + usize::from(set.overflowed), Ordering::Relaxed);
        changed
    }

    /// Learns from the end of an operation; tells whether blocks were added that were not known.
    pub(crate) fn update(&self, summary: &RequestSummary, outcome: &Outcome) -> bool {
        match outcome {
            Ok(_) if summary.kind == RequestKind::WriteUncorrectable => {
                summary.extent.is_some_and(|extent| self.add_uncorrectable(extent))
            }
            Ok(_) if self.is_empty() => false,
            Ok(response) => {
                if let Some(extent) = summary.extent {
                    self.remove_good(extent, summary);
                    if is_complete(response) {
                        self.mark_checked(extent, summary);
                    }
                }
                false
            }
            Err(error) => match (error.bad_blocks(), summary.extent) {
                (Some(bad_blocks), Some(extent)) => {
                    let is_new = self.record_check(extent, summary, bad_blocks.as_slice());
                    if bad_blocks.coverage().is_complete() {
                        self.mark_checked(extent, summary);
                    }
                    is_new
                }
                (Some(bad_blocks), None) => self.record(bad_blocks.as_slice()),
                (None, _) => self.record_media_error(summary, error),
            },
        }
    }

    /// Learns what a check of an extent has found, in order: those blocks are bad, and the others are good. Tells whether any was
    /// not known.
    pub(crate) fn record_check(&self, extent: Extent, summary: &RequestSummary, bad_blocks: &[BadBlock]) -> bool {
        let unrepaired: Vec<BadBlock> = bad_blocks.iter().filter(|bad_block| !bad_block.repaired).copied().collect();
        if !self.is_empty() {
            self.change(|set| {
                set.remove_if(extent, &|lba, info| {
                    covers(summary, info) && unrepaired.binary_search_by_key(&lba, |bad| bad.lba.get()).is_err()
                })
            });
        }
        self.record(&unrepaired)
    }

    /// Remembers that all copies of blocks were checked, since the set overflowed.
    pub(crate) fn mark_checked(&self, extent: Extent, summary: &RequestSummary) {
        if !self.is_empty() && summary.checks_all_copies() {
            self.change(|set| set.mark_checked(extent, summary.capacity_blocks));
        }
    }

    /// A medium that failed does not say where, which is plain if one block was asked for.
    fn record_media_error(&self, summary: &RequestSummary, error: &Error) -> bool {
        let reads = matches!(
            summary.kind,
            RequestKind::Read | RequestKind::Verify | RequestKind::Checksum | RequestKind::Compare
        );
        match summary.extent.filter(|extent| extent.len() == 1) {
            Some(one) if reads && matches!(error.kind(), ErrorKind::Media { .. }) => {
                self.record(&[BadBlock::media(one.start())])
            }
            _ => false,
        }
    }

    /// Whether a block is known to be bad.
    pub(crate) fn has(&self, lba: Lba) -> bool {
        !self.is_empty() && self.lock().blocks.contains_key(&lba.get())
    }

    /// Adds damaged blocks; tells whether any was not known.
    pub(crate) fn record(&self, bad_blocks: &[BadBlock]) -> bool {
        let unrepaired = bad_blocks.iter().filter(|bad_block| !bad_block.repaired);
        self.change(|set| set.add(unrepaired.map(|bad_block| (bad_block.lba.get(), DamageInfo::of(bad_block)))))
    }

    fn add_uncorrectable(&self, extent: Extent) -> bool {
        let info = DamageInfo { cause: BadBlockCause::Media, values: None, is_write_uncorrectable: true };
        // Hosts know what they have spoiled themselves, so no event is due.
        self.change(|set| set.add(extent.iter().map(|lba| (lba.get(), info))));
        false
    }

    /// Takes out what a successful operation has healed or found good.
    fn remove_good(&self, extent: Extent, summary: &RequestSummary) {
        match summary.kind {
            RequestKind::Write | RequestKind::WriteZeroes | RequestKind::Discard => self.clear(extent),
            RequestKind::Read | RequestKind::Verify | RequestKind::Checksum | RequestKind::Repair => {
                self.change(|set| set.remove_if(extent, &|_, info| covers(summary, info)));
            }
            RequestKind::Compare
            | RequestKind::Flush
            | RequestKind::WriteUncorrectable
            | RequestKind::BlockStatus
            | RequestKind::ReadReserved
            | RequestKind::WriteReserved => {}
        }
    }

    /// Takes out what a read that checked all there is to check has found good.
    pub(crate) fn remove_read(&self, extent: Extent) {
        if !self.is_empty() {
            // A read asks one of the copies.
            self.change(|set| set.remove_if(extent, &|_, info| info.cause != BadBlockCause::Conflict));
        }
    }

    /// Every block with what is wrong with it and whether a host has made it so, in order; and whether these are all.
    pub(crate) fn visit(&self, mut visit: impl FnMut(u64, BadBlockCause, bool)) -> bool {
        let set = self.lock();
        set.blocks.iter().for_each(|(lba, info)| visit(*lba, info.cause, info.is_write_uncorrectable));
        !set.overflowed
    }

    /// Takes blocks out that were written, zeroed or discarded.
    pub(crate) fn clear(&self, extent: Extent) {
        if !self.is_empty() {
            self.change(|set| set.remove_if(extent, &|_, _| true));
        }
    }

    /// The device has so many blocks now.
    pub(crate) fn resize(&self, capacity_blocks: u64) {
        self.change(|set| set.resize(capacity_blocks));
    }

    /// The runs of bad blocks within an extent, at most `most` of them, and whether these are all.
    pub(crate) fn runs(&self, extent: Extent, max_runs: usize) -> (Vec<LbaStatusDescriptor>, bool) {
        let set = self.lock();
        let mut runs =
            runs_of(set.blocks.range(extent.start().get()..=extent.last().get()), max_runs.saturating_add(1));
        let complete = runs.len() <= max_runs && !set.overflowed;
        runs.truncate(max_runs);
        (runs, complete)
    }

    /// The set in few words.
    pub(crate) fn summary(&self) -> DamageListSummary {
        let set = self.lock();
        let (blocks, overflowed, additions) = (set.blocks.len(), set.overflowed, set.additions);
        DamageListSummary { blocks, overflowed, additions, runs: runs_of(set.blocks.iter(), usize::MAX) }
    }

    /// The damage log of namespace `nsid`.
    pub(crate) fn damage_log(&self, nsid: u32) -> DamageLog {
        let set = self.lock();
        let entry = |(lba, info): (&u64, &DamageInfo)| DamageEntry {
            lba: Lba::new(*lba),
            field: match info.cause {
                BadBlockCause::Tag(field) => Some(field),
                BadBlockCause::Media | BadBlockCause::Conflict | BadBlockCause::Stale => None,
            },
            values: info.values,
            write_uncorrectable: info.is_write_uncorrectable,
        };
        let (generation, overflowed) = (set.generation, set.overflowed);
        DamageLog { nsid, generation, overflowed, entries: set.blocks.iter().map(entry).collect() }
    }
}

impl Default for DamageSet {
    fn default() -> DamageSet {
        let (blocks, scanned) = (BTreeMap::new(), Vec::new());
        DamageSet {
            blocks,
            capacity_blocks: u64::MAX,
            overflowed: false,
            checked: scanned,
            generation: 0,
            additions: 0,
        }
    }
}

impl DamageSet {
    /// Adds or replaces blocks as far as there is room; tells whether any was not known.
    fn add(&mut self, blocks: impl Iterator<Item = (u64, DamageInfo)>) -> bool {
        let (before, mut changed) = (self.blocks.len(), false);
        let capacity_blocks = self.capacity_blocks;
        for (lba, info) in blocks.filter(|(lba, _)| *lba < capacity_blocks) {
            let has_room = self.blocks.len() < MAX_BAD_BLOCKS;
            match self.blocks.get_mut(&lba) {
                // A block stays marked as written so for as long as it cannot be read.
                Some(known) if known.is_write_uncorrectable && info.cause == BadBlockCause::Media => {}
                Some(known) => {
                    changed |= *known != info;
                    *known = info;
                }
                None if has_room => {
                    self.blocks.insert(lba, info);
                }
                None => {
                    changed |= !self.overflowed;
                    self.overflowed = true;
                    // What was checked before has met blocks that are not remembered.
                    self.checked.clear();
                    break;
                }
            }
        }
        let added = self.blocks.len() > before;
        self.additions = self.additions.wrapping_add(u16::from(added));
        self.generation += u64::from(added || changed);
        added
    }

    /// Takes in that the device has so many blocks now. Those beyond are gone, and what comes in their place later is new.
    fn resize(&mut self, capacity_blocks: u64) {
        self.capacity_blocks = capacity_blocks;
        let gone = self.blocks.split_off(&capacity_blocks);
        self.checked.retain(|(first, _)| *first < capacity_blocks);
        if let Some((_, last)) = self.checked.last_mut() {
            *last = capacity_blocks.saturating_sub(1).min(*last);
        }
        self.generation += u64::from(!gone.is_empty());
    }

    /// Takes out the blocks of an extent for which `goes` holds.
    fn remove_if(&mut self, extent: Extent, should_remove: &dyn Fn(u64, &DamageInfo) -> bool) {
        let range = self.blocks.range(extent.start().get()..=extent.last().get());
        let gone: Vec<u64> = range.filter(|(lba, info)| should_remove(**lba, info)).map(|(lba, _)| *lba).collect();
        for lba in &gone {
            self.blocks.remove(lba);
        }
        self.generation += u64::from(!gone.is_empty());
    }
}

impl DamageSet {
    /// Takes in that blocks were checked. Once all were, and none was left out, the set is all there is.
    fn mark_checked(&mut self, extent: Extent, capacity_blocks: u64) {
        if !self.overflowed {
            return;
        }
        let (mut first, mut last) = (extent.start().get(), extent.last().get());
        self.checked.retain(|&(from, to)| {
            let touches = from <= last.saturating_add(1) && first <= to.saturating_add(1);
            if touches {
                (first, last) = (first.min(from), last.max(to));
            }
            !touches
        });
        if self.checked.len() < MAX_CHECKED_RUNS {
            self.checked.push((first, last));
            self.checked.sort_unstable();
        }
        if self.checked == [(0, capacity_blocks.saturating_sub(1))] {
            self.overflowed = false;
            self.checked.clear();
            self.generation += 1;
        }
    }
}

impl DamageInfo {
    fn of(bad_block: &BadBlock) -> DamageInfo {
        DamageInfo {
            cause: bad_block.cause,
            values: bad_block.expected.zip(bad_block.actual),
            is_write_uncorrectable: false,
        }
    }
}

/// Whether a check has looked at every copy.
fn is_complete(response: &Response) -> bool {
    match response {
        Response::Verified(verified) => verified.coverage.is_complete(),
        Response::Checksum(checksum) => checksum.coverage.is_complete(),
        _ => true,
    }
}

/// Whether an operation would have met this again, so that its silence means that the block is good.
fn covers(summary: &RequestSummary, info: &DamageInfo) -> bool {
    use RequestKind::{Checksum, Read, Repair, Verify};
    if !matches!(summary.kind, Read | Verify | Checksum | Repair) {
        return false;
    }
    match info.cause {
        BadBlockCause::Media | BadBlockCause::Stale => true,
        // A read asks one of the copies.
        BadBlockCause::Conflict => summary.kind != Read,
        BadBlockCause::Tag(Field::Guard) => summary.checks.guard,
        BadBlockCause::Tag(Field::RefTag) => {
            summary.own.initial_ref_tag.is_none() || summary.checks.initial_ref_tag.is_some()
        }
        // What the store itself finds wrong with these it finds whatever is demanded of them.
        BadBlockCause::Tag(Field::AppTag | Field::StorageTag) => true,
    }
}

/// Blocks put together to runs of one kind.
fn runs_of<'a>(blocks: impl Iterator<Item = (&'a u64, &'a DamageInfo)>, max_runs: usize) -> Vec<LbaStatusDescriptor> {
    let mut runs: Vec<(u64, u64, LbaStatusFlags)> = Vec::new();
    for (&lba, info) in blocks {
        let written =
            if info.is_write_uncorrectable { LbaStatusFlags::WRITE_UNCORRECTABLE } else { LbaStatusFlags::NONE };
        let flags = LbaStatusFlags::UNRECOVERED_READ | written;
        let is_full = runs.len() == max_runs;
        match runs.last_mut() {
            Some((start, len, known)) if *start + *len == lba && *known == flags => *len += 1,
            _ if is_full => break,
            _ => runs.push((lba, 1, flags)),
        }
    }
    let descriptor = |(start, len, flags)| {
        let extent = Extent::from_raw(start, len).expect("a run has few blocks, and each of them an address");
        LbaStatusDescriptor { extent, flags }
    };
    runs.into_iter().map(descriptor).collect()
}

#[cfg(test)]
#[path = "damage_list_tests.rs"]
mod tests;
