//! When physical blocks are in use, and when one that was deallocated may be used again.
//!
//! A physical block is in use from its allocation until its block's next map entry is durable and every read that may
//! use it has ended; and while it is being deallocated. The map of a block group is loaded when the block group is
//! first written.

pub(crate) mod bits;
pub(crate) mod free_map;
pub(crate) mod idle;
pub(crate) mod turns;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, VecDeque};
use std::rc::Rc;

use rustc_hash::FxHashMap;
use sealblock_block::Condition;

use crate::space::free_map::{FreeMap, Run, Runs};
use crate::space::turns::Queue;

/// Physical blocks that a write has taken and that no map entry names yet. If they are dropped with the write, they are
/// freed once the medium certainly does not write to them any more.
pub(crate) struct Allocation<'a> {
    allocator: &'a BlockAllocator,
    group: u64,
    runs: Runs,
}

impl Allocation<'_> {
    /// The runs of physical blocks.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Extends the last run if this one follows it.
    fn extend(&mut self, (start, len): Run) -> bool {
        let last = self.runs.last_mut().filter(|last| last.0 + last.1 == start);
        last.map(|last| last.1 += len).is_some()
    }

    /// Keeps them: map entries name them from now on.
    pub fn commit(mut self) {
        self.runs.clear();
    }

    /// Frees them: every write to them has ended.
    pub fn release(mut self) {
        self.allocator.release(self.group, &std::mem::take(&mut self.runs));
    }
}

impl Drop for Allocation<'_> {
    fn drop(&mut self) {
        if !self.runs.is_empty() {
            self.allocator.release_dropped(self.group, std::mem::take(&mut self.runs));
        }
    }
}

/// Contiguous physical blocks that no map entry names any more.
#[derive(Clone, Copy)]
struct DeferredFree {
    epoch: u64,
    group: u64,
    run: Run,
    punch: bool,
}

/// Frees physical blocks of a block group; contiguous ones together. Dropping it frees the last ones.
pub(crate) struct Frees<'a> {
    allocator: &'a BlockAllocator,
    group: u64,
    punch: bool,
    run: Run,
}

impl Frees<'_> {
    /// Frees a physical block as [`BlockAllocator::defer_free`] does.
    pub fn add(&mut self, pbn: u32, punch: bool) {
        let (start, len) = self.run;
        if (start + len, self.punch) == (pbn, punch) && len > 0 {
            self.run.1 += 1;
            return;
        }
        self.end();
        (self.run, self.punch) = ((pbn, 1), punch);
    }

    fn end(&mut self) {
        if self.run.1 > 0 {
            self.allocator.defer_free(self.group, self.run, self.punch);
        }
    }
}

impl Drop for Frees<'_> {
    fn drop(&mut self) {
        self.end();
    }
}

/// The physical blocks of every block group.
#[derive(Default)]
pub(crate) struct BlockAllocator {
    groups: RefCell<FxHashMap<u64, FreeMap>>,
    readers: ReaderEpochs,
    deferred: RefCell<VecDeque<DeferredFree>>,
    /// Units with physical blocks whose blocks were deallocated by a request.
    to_punch: RefCell<BTreeSet<(u64, u32)>>,
    /// Free space is never deallocated on the medium.
    keep_space: bool,
    /// True if something changed since idle work last checked.
    pub changed: Cell<bool>,
    /// Notified when [`BlockAllocator::changed`] is set.
    pub touched: Condition,
    /// Physical blocks of dropped writes: the medium may still be writing to them.
    dropped: RefCell<Vec<(u64, Runs)>>,
    /// Notified when there is work for the worker.
    wanted: Rc<Condition>,
    /// Writers that wait for physical blocks, in one queue for each block group.
    pub queue: Queue,
    /// Notified when physical blocks have become free.
    pub freed: Condition,
}

/// Counts reads by epoch: a freed physical block may be reused once every read that began before has ended.
#[derive(Default)]
struct ReaderEpochs {
    first: Cell<u64>,
    counts: RefCell<VecDeque<u32>>,
    /// Physical blocks were freed since the newest epoch began, so the next read begins another one.
    stale: Cell<bool>,
}

/// A read in flight. The physical blocks that it may use stay in use until this is dropped.
pub(crate) struct ReadGuard<'a> {
    allocator: &'a BlockAllocator,
    epoch: u64,
}

impl Drop for ReadGuard<'_> {
    fn drop(&mut self) {
        if self.allocator.readers.leave(self.epoch) {
            self.allocator.reclaim();
        }
    }
}

impl ReaderEpochs {
    fn enter(&self) -> u64 {
        let mut counts = self.counts.borrow_mut();
        if counts.is_empty() || self.stale.replace(false) {
            counts.push_back(0);
        }
        let newest = counts.len() - 1;
        counts[newest] += 1;
        self.first.get() + newest as u64
    }

    /// Ends a read. True if an epoch ended with it.
    fn leave(&self, epoch: u64) -> bool {
        let mut counts = self.counts.borrow_mut();
        counts[(epoch - self.first.get()) as usize] -= 1;
        let mut ended = false;
        while counts.front() == Some(&0) {
            counts.pop_front();
            self.first.set(self.first.get() + 1);
            ended = true;
        }
        ended
    }

    /// The epoch after which a physical block freed now may be reused; `None` if no read is in flight.
    fn defer_free(&self) -> Option<u64> {
        let counts = self.counts.borrow();
        let newest = counts.len().checked_sub(1)?;
        self.stale.set(true);
        Some(self.first.get() + newest as u64)
    }
}

impl BlockAllocator {
    /// The physical blocks of a volume; `wanted` is notified when [`BlockAllocator::has_work`]. With `keep_space` none
    /// is ever deallocated on the medium.
    pub fn new(wanted: Rc<Condition>, keep_space: bool) -> BlockAllocator {
        BlockAllocator { wanted, keep_space, ..BlockAllocator::default() }
    }

    /// True if the block group's map is loaded.
    pub fn is_loaded(&self, group: u64) -> bool {
        self.groups.borrow().contains_key(&group)
    }

    /// Adds the map of a block group.
    pub fn load(&self, group: u64, map: FreeMap) {
        self.groups.borrow_mut().insert(group, map);
    }

    /// Takes `count` physical blocks of a block group whose map is loaded, for the blocks from this index on; `None` if
    /// there are not enough.
    pub fn take(&self, group: u64, first: u32, count: u32) -> Option<Allocation<'_>> {
        self.take_by(group, |map| map.take(first, count))
    }

    /// Takes physical blocks of a block group with a function of the caller's.
    pub fn take_by(&self, group: u64, how: impl FnOnce(&mut FreeMap) -> Option<Runs>) -> Option<Allocation<'_>> {
        let runs = how(self.groups.borrow_mut().get_mut(&group)?)?;
        self.touch();
        Some(Allocation { allocator: self, group, runs })
    }

    /// Reads or changes a block group's map; `None` if it is not loaded.
    pub fn with<T>(&self, group: u64, what: impl FnOnce(&mut FreeMap) -> T) -> Option<T> {
        self.groups.borrow_mut().get_mut(&group).map(what)
    }

    /// The block groups whose maps are loaded, in order.
    pub fn groups(&self) -> Vec<u64> {
        let mut groups: Vec<u64> = self.groups.borrow().keys().copied().collect();
        groups.sort_unstable();
        groups
    }

    /// The number of free physical blocks of a block group.
    pub fn free(&self, group: u64) -> u32 {
        self.with(group, |map| map.free()).unwrap_or(0)
    }

    /// True if free space is deallocated on the medium.
    pub fn gives_space_back(&self) -> bool {
        !self.keep_space
    }

    /// Frees physical blocks that no map entry ever named.
    pub fn release(&self, group: u64, runs: &[Run]) {
        if let Some(map) = self.groups.borrow_mut().get_mut(&group) {
            runs.iter().for_each(|run| map.release(*run));
        }
        self.freed.notify();
    }

    /// Begins a read: physical blocks in use now stay so until the guard is dropped.
    pub fn read(&self) -> ReadGuard<'_> {
        ReadGuard { allocator: self, epoch: self.readers.enter() }
    }

    /// Returns a guard to free physical blocks of a block group one by one.
    pub fn frees(&self, group: u64) -> Frees<'_> {
        Frees { allocator: self, group, punch: false, run: (0, 0) }
    }

    /// Frees physical blocks once every read that may use them has ended. With `punch`, their units are also queued for
    /// deallocation on the medium.
    pub fn defer_free(&self, group: u64, run: Run, punch: bool) {
        match self.readers.defer_free() {
            Some(epoch) => self.deferred.borrow_mut().push_back(DeferredFree { epoch, group, run, punch }),
            None => self.end(DeferredFree { epoch: 0, group, run, punch }),
        }
    }

    /// Frees deferred physical blocks whose readers have ended.
    fn reclaim(&self) {
        let first = self.readers.first.get();
        loop {
            let next = self.deferred.borrow().front().copied().filter(|deferred| deferred.epoch < first);
            let Some(deferred) = next else { break };
            self.deferred.borrow_mut().pop_front();
            self.end(deferred);
        }
        self.freed.notify();
    }

    fn touch(&self) {
        if !self.changed.replace(true) {
            self.touched.notify();
        }
    }

    fn end(&self, DeferredFree { group, run, punch, .. }: DeferredFree) {
        self.touch();
        let units = self.with(group, |map| {
            map.release(run);
            map.unit_of(run.0)..=map.unit_of(run.0 + run.1 - 1)
        });
        let Some(units) = units.filter(|_| punch && !self.keep_space) else { return };
        let mut to_punch = self.to_punch.borrow_mut();
        let before = to_punch.len();
        to_punch.extend(units.map(|unit| (group, unit)));
        if to_punch.len() != before {
            self.wanted.notify();
        }
    }

    /// Leaves the physical blocks of a dropped write to the worker.
    fn release_dropped(&self, group: u64, runs: Runs) {
        self.dropped.borrow_mut().push((group, runs));
        self.wanted.notify();
    }

    /// True if physical blocks wait for [`BlockAllocator::take_punches`] or [`BlockAllocator::take_dropped`].
    pub fn has_work(&self) -> bool {
        !self.to_punch.borrow().is_empty() || !self.dropped.borrow().is_empty()
    }

    /// Takes the physical blocks of dropped writes. The caller frees them with [`BlockAllocator::release`] once the
    /// medium has finished the writes.
    pub fn take_dropped(&self) -> Vec<(u64, Runs)> {
        self.dropped.take()
    }

    /// Takes free physical blocks that may take space on the medium, in whole units: the first ones from unit `from`,
    /// at most `max` units. Also returns the unit after them. They are in use until they are released.
    pub fn take_unpunched(&self, group: u64, from: u32, max: u32) -> Option<(Allocation<'_>, u32)> {
        let (run, next) = self.with(group, |map| {
            let run = map.take_unpunched(from, max)?;
            Some((run, map.unit_of(run.0 + run.1 - 1) + 1))
        })??;
        Some((Allocation { allocator: self, group, runs: Runs::from_buf([run]) }, next))
    }

    /// Takes physical blocks to deallocate on the medium, because their blocks were deallocated: of the first `max`
    /// units, those that are completely free by now. They are in use until they are released or the result is dropped.
    /// `None` if no unit waits.
    pub fn take_punches(&self, max: usize) -> Option<Vec<(u64, Allocation<'_>)>> {
        let mut units = self.to_punch.borrow_mut();
        if units.is_empty() {
            return None;
        }
        let mut found: Vec<(u64, Allocation<'_>)> = Vec::new();
        for (group, unit) in std::iter::from_fn(|| units.pop_first()).take(max) {
            let Some(run) = self.with(group, |map| map.take_unpunched_unit(unit)).flatten() else { continue };
            let last = found.last_mut().filter(|(before, _)| *before == group);
            if !last.is_some_and(|(_, taken)| taken.extend(run)) {
                found.push((group, Allocation { allocator: self, group, runs: Runs::from_buf([run]) }));
            }
        }
        Some(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(blocks: u32) -> FreeMap {
        FreeMap::new(blocks, 2 * blocks, 4096)
    }

    #[test]
    fn a_physical_block_is_free_only_after_the_reads_that_may_see_it() {
        let allocator = BlockAllocator::default();
        allocator.load(0, map(16));
        allocator.take(0, 0, 16).unwrap().commit();
        let early = allocator.read();
        allocator.defer_free(0, (3, 1), false);
        let late = allocator.read();
        assert_eq!(allocator.free(0), 16);
        drop(late);
        assert_eq!(allocator.free(0), 16, "the early read may still look");
        drop(early);
        assert_eq!(allocator.free(0), 17);
        allocator.defer_free(0, (4, 1), false);
        assert_eq!(allocator.free(0), 18, "without readers at once");
    }

    #[test]
    fn physical_blocks_that_are_dropped_wait_for_the_medium() {
        let allocator = BlockAllocator::default();
        allocator.load(0, map(16));
        let taken = allocator.take(0, 2, 4).unwrap();
        allocator.take(0, 8, 2).unwrap().release();
        assert!(!allocator.has_work());
        drop(taken);
        assert_eq!((allocator.free(0), allocator.has_work()), (28, true));
        let dropped = allocator.take_dropped();
        assert_eq!(dropped.iter().map(|(group, runs)| (*group, &runs[..])).collect::<Vec<_>>(), [(0, &[(2, 4)][..])]);
        assert!(!allocator.has_work());
        allocator.release(0, &dropped[0].1);
        assert_eq!(allocator.free(0), 32);
    }

    #[test]
    fn physical_blocks_are_punched_some_at_a_time() {
        let allocator = BlockAllocator::default();
        allocator.load(0, map(256));
        allocator.take(0, 0, 256).unwrap().commit();
        allocator.defer_free(0, (0, 48), true);
        for expected in [&[(0, 32)][..], &[(32, 16)]] {
            assert!(allocator.has_work());
            let taken = allocator.take_punches(2).unwrap();
            assert_eq!(taken.iter().map(|(_, taken)| taken.runs()).collect::<Vec<_>>(), [expected]);
            taken.into_iter().for_each(|(_, taken)| taken.release());
        }
        assert!(!allocator.has_work() && allocator.take_punches(2).is_none());
    }

    #[test]
    fn unmapped_physical_blocks_are_punched_in_whole_units_and_not_used_meanwhile() {
        let allocator = BlockAllocator::default();
        allocator.load(0, map(256));
        allocator.take(0, 0, 256).unwrap().commit();
        // Units of 16 physical blocks: all of the third and the fourth, one physical block of the sixth.
        (32..64).chain([80]).for_each(|pbn| allocator.defer_free(0, (pbn, 1), true));
        allocator.defer_free(0, (96, 16), false);
        let free = allocator.free(0);
        let taken = allocator.take_punches(99).unwrap();
        assert_eq!(taken.iter().map(|(_, taken)| taken.runs()).collect::<Vec<_>>(), [&[(32, 32)][..]]);
        assert_eq!(allocator.free(0), free - 32, "no write may use them now");
        taken.into_iter().for_each(|(_, taken)| taken.release());
        assert_eq!(allocator.free(0), free);
        assert!(allocator.take_punches(99).is_none());
        let keeping = BlockAllocator::new(Rc::default(), true);
        keeping.load(0, map(256));
        keeping.take(0, 0, 256).unwrap().commit();
        keeping.defer_free(0, (0, 256), true);
        assert!(keeping.take_punches(99).is_none() && !keeping.has_work());
    }
}
