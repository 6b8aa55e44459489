//! The known bad blocks of a device, which Get LBA Status and the damage log pages report.
//!
//! Bad blocks of a device at the bottom of the stack are in that device's own list, the source of this one. So reading
//! a good copy does not remove a bad one from it, and nothing is forgotten by a restart. This list itself contains only
//! what concerns several copies (a conflict, an older copy), and, for a device without a source, everything, under the
//! following invariants.
//!
//! Invariants: a block is added only if it fails the device's own check; a tag that only a host did not expect is not
//! such an error. At most [`MAX_BAD_BLOCKS`] blocks are listed; if more are found, the list reports an overflow until
//! checks of all blocks have found no more than fit. A block is removed when it is written, zeroed or discarded, and
//! when a check finds it good. While the list is empty, a successful command costs one relaxed load.
//!
//! Shape: one list for each device, shared by all controllers and cores, because damage belongs to the blocks and not
//! to the controller that found it. A read that races with a write of the same block may leave the block in the list
//! although the write repaired it; the next check removes it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use sealblock_block::{
    BadBlock, BadBlockCause, DamageRun, DamageSource, Error, ErrorKind, Geometry, Outcome, Request, RequestKind,
    Response, coarsen, merge_runs, merged,
};
use sealblock_protocols_nvme::logs::{DamageEntry, DamageLog, DamageRunEntry};
use sealblock_protocols_nvme::nvm::{LbaStatusDescriptor, LbaStatusFlags};
use sealblock_units::{Extent, Lba};

use crate::model::damage_pages::{DamagePage, DamagePages};

/// The maximum number of listed bad blocks of one namespace.
pub const MAX_BAD_BLOCKS: usize = 16_384;
/// The maximum number of runs behind the entries of the damage log.
const MAX_LOG_RUNS: usize = 8_192;
/// The maximum number of runs of blocks that are remembered as checked since the list overflowed. Further runs are
/// dropped, and must be checked again.
const MAX_CHECKED_RUNS: usize = 64;

/// The known bad blocks of one device.
#[derive(Default)]
pub(crate) struct DamageList {
    /// The number of listed blocks, plus one during an overflow; from it a command sees without the lock that the list
    /// is empty.
    len: AtomicUsize,
    set: Mutex<DamageSet>,
    /// The lists of the devices at the bottom of the stack.
    source: Mutex<Option<Arc<dyn DamageSource>>>,
    /// The number of additions to them that have been reported.
    reported_additions: AtomicU64,
    /// What hosts read of it.
    pages: DamagePages,
}

/// What is wrong with a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct DamageInfo {
    cause: BadBlockCause,
    values: Option<(u64, u64)>,
    /// True if a host made it bad by Write Uncorrectable.
    is_write_uncorrectable: bool,
}

struct DamageSet {
    blocks: BTreeMap<u64, DamageInfo>,
    /// The capacity since the last resize; late reports of blocks beyond the end are dropped.
    capacity_blocks: u64,
    overflowed: bool,
    /// The blocks that were checked since the overflow: first and last block of sorted runs, no two of which are
    /// adjacent.
    checked: Vec<(u64, u64)>,
    /// Number of changes.
    generation: u64,
    /// Number of changes that added blocks.
    additions: u16,
}

/// Describes a request that the device executes, for the interpretation of its result.
pub(crate) struct RequestSummary {
    pub(crate) kind: RequestKind,
    pub(crate) extent: Option<Extent>,
    /// Blocks of the device.
    pub(crate) capacity_blocks: u64,
}

/// A summary of the list, for the LBA Status Information log.
pub(crate) struct DamageListSummary {
    pub(crate) blocks: usize,
    pub(crate) overflowed: bool,
    pub(crate) additions: u16,
    pub(crate) runs: Vec<LbaStatusDescriptor>,
}

impl RequestSummary {
    /// Describes a request on a device with this geometry.
    pub(crate) fn of(request: &Request, geometry: &Geometry) -> RequestSummary {
        let kind = request.kind();
        // The content of a discarded block is undefined, so a Discard shows nothing about it.
        let extent = request.extent().filter(|_| kind != RequestKind::Discard);
        RequestSummary { kind, extent, capacity_blocks: geometry.capacity_blocks }
    }

    /// Describes a check of these blocks.
    pub(crate) fn of_check(extent: Extent, geometry: &Geometry) -> RequestSummary {
        RequestSummary { kind: RequestKind::Verify, extent: Some(extent), capacity_blocks: geometry.capacity_blocks }
    }

    /// True if the request checks every copy of its blocks.
    fn checks_all_copies(&self) -> bool {
        use RequestKind::{Checksum, Repair, Verify};
        matches!(self.kind, Verify | Checksum | Repair)
    }
}

impl DamageList {
    /// Makes the lists of the devices at the bottom of the stack the source of this one.
    pub(crate) fn set_source(&self, source: Arc<dyn DamageSource>) {
        self.reported_additions.store(source.additions(), Ordering::Relaxed);
        self.source.lock().unwrap_or_else(PoisonError::into_inner).replace(source);
        self.pages.clear();
    }

    fn source(&self) -> Option<Arc<dyn DamageSource>> {
        self.source.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// True if the source has new blocks since this was last called.
    fn has_news(&self) -> bool {
        self.source().is_some_and(|source| {
            let additions = source.additions();
            self.reported_additions.fetch_max(additions, Ordering::Relaxed) < additions
        })
    }

    /// All known runs in these blocks, in order.
    pub(crate) fn all(&self, first: u64, last: u64) -> Vec<DamageRun> {
        let mut runs = self.source().map_or(Vec::new(), |source| merged(&*source, first, last));
        let own = |(lba, info): (&u64, &DamageInfo)| DamageRun {
            is_made: info.is_write_uncorrectable,
            values: info.values,
            ..DamageRun::exact(*lba, *lba, info.cause)
        };
        runs.extend(self.lock().blocks.range(first..=last).map(own));
        merge_runs(runs)
    }

    /// True if no block was dropped.
    pub(crate) fn is_complete(&self) -> bool {
        !self.lock().overflowed
    }

    /// The devices at the bottom of the stack whose lists were lost.
    pub(crate) fn lost_lists(&self) -> Vec<String> {
        self.source().map_or(Vec::new(), |source| source.lost_lists())
    }

    fn is_empty(&self) -> bool {
        self.len.load(Ordering::Relaxed) == 0
    }

    /// Ignores poisoning: a panic elsewhere cannot leave the map half changed.
    fn lock(&self) -> MutexGuard<'_, DamageSet> {
        self.set.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the set, and updates `len`.
    fn change<T>(&self, change: impl FnOnce(&mut DamageSet) -> T) -> T {
        let mut set = self.lock();
        let changed = change(&mut set);
        self.len.store(set.blocks.len() + usize::from(set.overflowed), Ordering::Relaxed);
        changed
    }

    /// Updates the list with the outcome of a request; true if that added blocks.
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
            // The bad blocks of a Copy are not those of its extent.
            Err(error) => match (error.bad_blocks(), summary.extent.filter(|_| summary.kind != RequestKind::Copy)) {
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

    /// Records the bad blocks, in order, that a check of `extent` found, and removes the other blocks of `extent`.
    /// Returns true if that added blocks.
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

    /// Records that all copies of these blocks were checked since the list overflowed.
    pub(crate) fn mark_checked(&self, extent: Extent, summary: &RequestSummary) {
        if !self.is_empty() && summary.checks_all_copies() {
            self.change(|set| set.mark_checked(extent, summary.capacity_blocks));
        }
    }

    /// Records the block of a media error, which does not name it; it is certain only if the request read a single
    /// block.
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

    /// True if the block is listed.
    pub(crate) fn has(&self, lba: Lba) -> bool {
        !self.all(lba.get(), lba.get()).is_empty()
    }

    /// Adds bad blocks; true if any was not listed.
    pub(crate) fn record(&self, bad_blocks: &[BadBlock]) -> bool {
        let has_source = self.source().is_some();
        let is_kept = |bad_block: &&BadBlock| {
            !has_source || matches!(bad_block.cause, BadBlockCause::Conflict | BadBlockCause::Stale)
        };
        // One that is only not compared yet is not lost.
        let is_damage = |bad_block: &&BadBlock| !bad_block.repaired && bad_block.cause != BadBlockCause::Unsettled;
        let unrepaired = bad_blocks.iter().filter(is_damage).filter(is_kept);
        let is_new =
            self.change(|set| set.add(unrepaired.map(|bad_block| (bad_block.lba.get(), DamageInfo::of(bad_block)))));
        self.has_news() || is_new
    }

    fn add_uncorrectable(&self, extent: Extent) -> bool {
        let info = DamageInfo { cause: BadBlockCause::Media, values: None, is_write_uncorrectable: true };
        // The host made these blocks bad itself, so it needs no event.
        if self.source().is_some() {
            self.has_news();
            return false;
        }
        self.change(|set| set.add(extent.iter().map(|lba| (lba.get(), info))));
        false
    }

    /// Removes the blocks that a successful request repaired or found good.
    fn remove_good(&self, extent: Extent, summary: &RequestSummary) {
        match summary.kind {
            RequestKind::Write
            | RequestKind::WriteZeroes
            | RequestKind::Copy
            | RequestKind::CompareAndWrite
            | RequestKind::Discard => {
                self.clear(extent);
            }
            RequestKind::Read | RequestKind::Verify | RequestKind::Checksum | RequestKind::Repair => {
                self.change(|set| set.remove_if(extent, &|_, info| covers(summary, info)));
            }
            RequestKind::Compare
            | RequestKind::Salvage
            | RequestKind::Flush
            | RequestKind::WriteUncorrectable
            | RequestKind::BlockStatus
            | RequestKind::ReadReserved
            | RequestKind::WriteReserved => {}
        }
    }

    /// Removes the blocks that a read found good.
    pub(crate) fn remove_read(&self, extent: Extent) {
        if !self.is_empty() {
            // A read sees only one of the copies.
            self.change(|set| set.remove_if(extent, &|_, info| info.cause != BadBlockCause::Conflict));
        }
    }

    /// Removes blocks that were written, zeroed or discarded.
    pub(crate) fn clear(&self, extent: Extent) {
        if !self.is_empty() {
            self.change(|set| set.remove_if(extent, &|_, _| true));
        }
    }

    /// Drops blocks beyond the device's new end.
    pub(crate) fn resize(&self, capacity_blocks: u64) {
        self.change(|set| set.resize(capacity_blocks));
    }

    /// Returns at most `max_runs` runs of bad blocks within an extent, and whether these are all of them.
    pub(crate) fn runs(&self, extent: Extent, max_runs: usize) -> (Vec<LbaStatusDescriptor>, bool) {
        let mut runs = descriptors(&self.all(extent.start().get(), extent.last().get()));
        let complete = runs.len() <= max_runs && self.is_complete();
        runs.truncate(max_runs);
        (runs, complete)
    }

    /// Returns a summary of the list.
    pub(crate) fn summary(&self) -> DamageListSummary {
        let runs = self.all(0, u64::MAX);
        // The minimum, as everywhere; 0 would tell the host that it need not look.
        let least: u64 = runs.iter().map(|run| run.bad_blocks).sum();
        let blocks = least.max(u64::from(!runs.is_empty()));
        let from_source = self.source().map_or(0, |source| source.additions()) as u16;
        let set = self.lock();
        let (overflowed, additions) = (set.overflowed, set.additions.wrapping_add(from_source));
        let blocks = usize::try_from(blocks).unwrap_or(usize::MAX);
        DamageListSummary { blocks, overflowed, additions, runs: descriptors(&runs) }
    }

    /// Number of changes, here and in the source.
    fn generation(&self) -> u64 {
        let from_source = self.source().map_or(0, |source| source.generation());
        self.lock().generation.wrapping_add(from_source)
    }

    /// The damage log of namespace `nsid` as a page, for a host that begins to read it.
    pub(crate) fn begin_page(&self, nsid: u32, now: Instant) -> Arc<DamagePage> {
        self.pages.begin(nsid, self.generation(), now, || self.damage_log(nsid))
    }

    /// The page with which a read began, if it is still kept.
    pub(crate) fn go_on_page(&self, nsid: u32, begun: &Weak<DamagePage>, now: Instant) -> Option<Arc<DamagePage>> {
        self.pages.go_on(nsid, begun, now)
    }

    /// Returns the damage log of namespace `nsid`: entries for as many bad blocks as it has room for, and none that may
    /// be good; the others as runs. So a host has the same bounds as this server.
    pub(crate) fn damage_log(&self, nsid: u32) -> DamageLog {
        // Before the blocks: what is added in between belongs to a later generation, and is never missing from one that counts it.
        let generation = self.generation();
        let runs = self.all(0, u64::MAX);
        let entry = |run: &DamageRun, lba| DamageEntry {
            lba: Lba::new(lba),
            field: match run.cause {
                BadBlockCause::Tag(field) => Some(field),
                BadBlockCause::Media | BadBlockCause::Conflict | BadBlockCause::Stale | BadBlockCause::Unsettled => {
                    None
                }
            },
            values: run.values,
            write_uncorrectable: run.is_made,
        };
        let (mut entries, mut rest) = (Vec::new(), Vec::new());
        for run in &runs {
            let room = (MAX_BAD_BLOCKS - entries.len()) as u64;
            let behind = if run.is_coarse() { run.first } else { run.first + run.blocks().min(room) };
            entries.extend((run.first..behind).map(|lba| entry(run, lba)));
            if behind <= run.last {
                rest.push(run.part(behind, run.last));
            }
        }
        let is_complete = self.is_complete();
        let run_entry = |run: DamageRun| {
            let DamageEntry { field, write_uncorrectable, .. } = entry(&run, run.first);
            DamageRunEntry { first: run.first, last: run.last, bad_blocks: run.bad_blocks, field, write_uncorrectable }
        };
        let overflowed = !is_complete || !rest.is_empty();
        let runs = is_complete.then(|| coarsen(rest, MAX_LOG_RUNS).into_iter().map(run_entry).collect());
        let is_list_lost = !self.lost_lists().is_empty();
        DamageLog { nsid, generation, overflowed, is_list_lost, entries, runs }
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
    /// Adds or replaces blocks up to the limit; true if any was not listed.
    fn add(&mut self, blocks: impl Iterator<Item = (u64, DamageInfo)>) -> bool {
        let (before, mut changed) = (self.blocks.len(), false);
        let capacity_blocks = self.capacity_blocks;
        for (lba, info) in blocks.filter(|(lba, _)| *lba < capacity_blocks) {
            let has_room = self.blocks.len() < MAX_BAD_BLOCKS;
            match self.blocks.get_mut(&lba) {
                // Write Uncorrectable stays the recorded cause as long as the block cannot be read.
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
                    // Earlier checks found blocks that the list has dropped.
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

    /// Drops blocks beyond the device's new end; if the device grows again later, its blocks there are new.
    fn resize(&mut self, capacity_blocks: u64) {
        self.capacity_blocks = capacity_blocks;
        let gone = self.blocks.split_off(&capacity_blocks);
        self.checked.retain(|(first, _)| *first < capacity_blocks);
        if let Some((_, last)) = self.checked.last_mut() {
            *last = capacity_blocks.saturating_sub(1).min(*last);
        }
        self.generation += u64::from(!gone.is_empty());
    }

    /// Removes the blocks of an extent for which `should_remove` is true.
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
    /// Records that blocks were checked. Once all blocks have been checked without dropping one, the overflow ends.
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

/// True if a check covered every copy.
fn is_complete(response: &Response) -> bool {
    match response {
        Response::Verified(verified) => verified.coverage.is_complete(),
        Response::Checksum(checksum) => checksum.coverage.is_complete(),
        _ => true,
    }
}

/// True if the request would have failed again on this block, so that its success means the block is good.
fn covers(summary: &RequestSummary, info: &DamageInfo) -> bool {
    use RequestKind::{Checksum, Read, Repair, Verify};
    if !matches!(summary.kind, Read | Verify | Checksum | Repair) {
        return false;
    }
    match info.cause {
        BadBlockCause::Media | BadBlockCause::Stale | BadBlockCause::Unsettled => true,
        // A read sees only one of the copies.
        BadBlockCause::Conflict => summary.kind != Read,
        // The device's own check finds these whatever the request expects.
        BadBlockCause::Tag(_) => true,
    }
}

/// Joins adjacent runs with the same flags, up to the maximum length of a descriptor.
fn descriptors(runs: &[DamageRun]) -> Vec<LbaStatusDescriptor> {
    let mut joined: Vec<(u64, u64, LbaStatusFlags)> = Vec::new();
    for run in runs {
        let written = if run.is_made { LbaStatusFlags::WRITE_UNCORRECTABLE } else { LbaStatusFlags::NONE };
        let flags = LbaStatusFlags::UNRECOVERED_READ | written;
        match joined.last_mut() {
            Some((start, len, known)) if *start + *len == run.first && *known == flags => *len += run.blocks(),
            _ => joined.push((run.first, run.blocks(), flags)),
        }
    }
    let most = u64::from(u32::MAX);
    let pieces = joined.into_iter().flat_map(|(start, len, flags)| {
        (0..len.div_ceil(most)).map(move |piece| (start + piece * most, most.min(len - piece * most), flags))
    });
    let descriptor = |(start, len, flags)| {
        let extent = Extent::from_raw(start, len).expect("a piece has few blocks, and each of them an address");
        LbaStatusDescriptor { extent, flags }
    };
    pieces.map(descriptor).collect()
}

#[cfg(test)]
#[path = "damage_list_tests.rs"]
mod tests;
