//! When slots are in use, and when one that was given up may be used again.
//!
//! A slot is in use from its allocation until its block's next record is durable and no read that may still look at it
//! is under way; and while its space is given back to the medium. Zones load their maps when they are first written to.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use rustc_hash::FxHashMap;
use sealblock_block::Condition;

use crate::free_map::{FreeMap, Run, Runs};
use crate::turns::Queue;

/// Slots that a write has taken and that no record names yet. Dropped with the write, they come back once the medium is sure
/// not to write to them any more.
pub(crate) struct Taken<'a> {
    slots: &'a BlockAllocator,
    zone: u64,
    runs: Runs,
}

impl Taken<'_> {
    /// The runs.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Joins a run to the last one if it follows it.
    fn extend(&mut self, (start, len): Run) -> bool {
        let last = self.runs.last_mut().filter(|last| last.0 + last.1 == start);
        last.map(|last| last.1 += len).is_some()
    }

    /// Records name them from now on.
    pub fn keep(mut self) {
        self.runs.clear();
    }

    /// Gives them back: every write to them has ended.
    pub fn give_back(mut self) {
        self.slots.give_back(self.zone, &std::mem::take(&mut self.runs));
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        if !self.runs.is_empty() {
            self.slots.abandon(self.zone, std::mem::take(&mut self.runs));
        }
    }
}

/// A slot that no record names any more.
#[derive(Clone, Copy)]
struct Retired {
    epoch: u64,
    zone: u64,
    slot: u32,
    punch: bool,
}

/// The slots of every zone.
#[derive(Default)]
pub(crate) struct BlockAllocator {
    zones: RefCell<FxHashMap<u64, FreeMap>>,
    readers: ReaderEpochs,
    retired: RefCell<VecDeque<Retired>>,
    /// Units of slots of which some were given up by an unmap.
    to_punch: RefCell<Vec<(u64, u32)>>,
    /// Space is never given back.
    keep_space: bool,
    /// Something changed since upkeep last looked.
    pub changed: Cell<bool>,
    /// Notified when [`BlockAllocator::changed`] is set.
    pub touched: Condition,
    /// Slots of writes that were dropped half-way: the medium may still be writing to them.
    dropped: RefCell<Vec<(u64, Runs)>>,
    /// Notified when there is something to do for the worker.
    wanted: Rc<Condition>,
    /// Who waits for slots, in a line for each zone.
    pub queue: Queue,
    /// Notified when slots have become free.
    pub freed: Condition,
}

/// A slot may be used again once every read that began before it was given up has ended. Reads are counted by epoch.
#[derive(Default)]
struct ReaderEpochs {
    first: Cell<u64>,
    counts: RefCell<VecDeque<u32>>,
    /// Slots were retired since the newest epoch began, so the next reader opens another.
    stale: Cell<bool>,
}

/// A read under way. Slots that it may look at stay in use until it is dropped.
pub(crate) struct Reading<'a> {
    slots: &'a BlockAllocator,
    epoch: u64,
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        if self.slots.readers.leave(self.epoch) {
            self.slots.reclaim();
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

    /// Ends a read; whether an epoch ended with it.
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

    /// The epoch after which a slot given up now may be used again, or nothing when no read is under way.
    fn defer_free(&self) -> Option<u64> {
        let counts = self.counts.borrow();
        let newest = counts.len().checked_sub(1)?;
        self.stale.set(true);
        Some(self.first.get() + newest as u64)
    }
}

impl BlockAllocator {
    /// The slots of a volume; `wanted` is notified when [`BlockAllocator::work_due`]. With `keep_space` none is ever given back to the
    /// medium.
    pub fn new(wanted: Rc<Condition>, keep_space: bool) -> BlockAllocator {
        BlockAllocator { wanted, keep_space, ..BlockAllocator::default() }
    }

    /// Whether the zone's map is there.
    pub fn loaded(&self, zone: u64) -> bool {
        self.zones.borrow().contains_key(&zone)
    }

    /// Hands over a zone's map.
    pub fn load(&self, zone: u64, map: FreeMap) {
        self.zones.borrow_mut().insert(zone, map);
    }

    /// Takes `count` slots of a zone whose map is there, for the blocks from the one with this index in it on; or none when there
    /// are not enough.
    pub fn take(&self, zone: u64, first: u32, count: u32) -> Option<Taken<'_>> {
        self.take_by(zone, |map| map.take(first, count))
    }

    /// Takes slots of a zone in a way of the caller's.
    pub fn take_by(&self, zone: u64, how: impl FnOnce(&mut FreeMap) -> Option<Runs>) -> Option<Taken<'_>> {
        let runs = how(self.zones.borrow_mut().get_mut(&zone)?)?;
        self.touch();
        Some(Taken { slots: self, zone, runs })
    }

    /// Asks something of a zone's map, or notes something in it; nothing when it is not there.
    pub fn with<T>(&self, zone: u64, what: impl FnOnce(&mut FreeMap) -> T) -> Option<T> {
        self.zones.borrow_mut().get_mut(&zone).map(what)
    }

    /// The zones whose maps are there, in order.
    pub fn zones(&self) -> Vec<u64> {
        let mut zones: Vec<u64> = self.zones.borrow().keys().copied().collect();
        zones.sort_unstable();
        zones
    }

    /// Free slots of a zone.
    pub fn free(&self, zone: u64) -> u32 {
        self.with(zone, |map| map.free()).unwrap_or(0)
    }

    /// Whether space is given back to the medium at all.
    pub fn gives_space_back(&self) -> bool {
        !self.keep_space
    }

    /// Gives back slots that no record ever named.
    pub fn give_back(&self, zone: u64, runs: &[Run]) {
        if let Some(map) = self.zones.borrow_mut().get_mut(&zone) {
            runs.iter().flat_map(|&(start, len)| start..start + len).for_each(|slot| map.release(slot));
        }
        self.freed.notify();
    }

    /// Begins a read: slots in use now stay so until the guard is dropped.
    pub fn read(&self) -> Reading<'_> {
        Reading { slots: self, epoch: self.readers.enter() }
    }

    /// Gives up a slot. It becomes free when no read looks at it any more, after its space was given back if `punch`.
    pub fn defer_free(&self, zone: u64, slot: u32, punch: bool) {
        match self.readers.defer_free() {
            Some(epoch) => self.retired.borrow_mut().push_back(Retired { epoch, zone, slot, punch }),
            None => self.end(Retired { epoch: 0, zone, slot, punch }),
        }
    }

    /// Frees retired slots whose readers have ended.
    fn reclaim(&self) {
        let first = self.readers.first.get();
        loop {
            let next = self.retired.borrow().front().copied().filter(|retired| retired.epoch < first);
            let Some(retired) = next else { break };
            self.retired.borrow_mut().pop_front();
            self.end(retired);
        }
        self.freed.notify();
    }

    fn touch(&self) {
        if !self.changed.replace(true) {
            self.touched.notify();
        }
    }

    fn end(&self, retired: Retired) {
        self.touch();
        let unit = self.with(retired.zone, |map| {
            map.release(retired.slot);
            map.unit_of(retired.slot)
        });
        let Some(unit) = unit.filter(|_| retired.punch && !self.keep_space) else { return };
        let mut units = self.to_punch.borrow_mut();
        if units.last() != Some(&(retired.zone, unit)) {
            units.push((retired.zone, unit));
            self.wanted.notify();
        }
    }

    /// Leaves slots to the worker whose write was dropped half-way.
    fn abandon(&self, zone: u64, runs: Runs) {
        self.dropped.borrow_mut().push((zone, runs));
        self.wanted.notify();
    }

    /// Whether slots wait for [`BlockAllocator::take_punches`] or [`BlockAllocator::take_dropped`].
    pub fn work_due(&self) -> bool {
        !self.to_punch.borrow().is_empty() || !self.dropped.borrow().is_empty()
    }

    /// Slots of writes that were dropped half-way; the caller gives each back with [`BlockAllocator::give_back`] once the medium is done
    /// with them.
    pub fn take_dropped(&self) -> Vec<(u64, Runs)> {
        self.dropped.take()
    }

    /// Takes free slots of a zone that may take space, in whole units: the first ones from a unit on, at most `most` units. Also
    /// gives the unit behind them. They are in use until they are given back.
    pub fn take_stale(&self, zone: u64, from: u32, most: u32) -> Option<(Taken<'_>, u32)> {
        let (run, next) = self.with(zone, |map| {
            let run = map.take_stale(from, most)?;
            Some((run, map.unit_of(run.0 + run.1 - 1) + 1))
        })??;
        Some((Taken { slots: self, zone, runs: Runs::from_buf([run]) }, next))
    }

    /// Slots whose space is to be given back because they were unmapped: those of the first `most` units that are wholly free by
    /// now. They are in use until they are given back or what is returned is dropped. Nothing where no unit waits.
    pub fn take_punches(&self, most: usize) -> Option<Vec<(u64, Taken<'_>)>> {
        let mut units = self.to_punch.borrow_mut();
        if units.is_empty() {
            return None;
        }
        units.sort_unstable();
        units.dedup();
        let mut found: Vec<(u64, Taken<'_>)> = Vec::new();
        let count = most.min(units.len());
        for (zone, unit) in units.drain(..count) {
            let Some(run) = self.with(zone, |map| map.take_stale_unit(unit)).flatten() else { continue };
            let last = found.last_mut().filter(|(before, _)| *before == zone);
            if !last.is_some_and(|(_, taken)| taken.extend(run)) {
                found.push((zone, Taken { slots: self, zone, runs: Runs::from_buf([run]) }));
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
    fn a_slot_is_free_only_after_the_reads_that_may_see_it() {
        let slots = BlockAllocator::default();
        slots.load(0, map(16));
        slots.take(0, 0, 16).unwrap().keep();
        let early = slots.read();
        slots.defer_free(0, 3, false);
        let late = slots.read();
        assert_eq!(slots.free(0), 16);
        drop(late);
        assert_eq!(slots.free(0), 16, "the early read may still look");
        drop(early);
        assert_eq!(slots.free(0), 17);
        slots.defer_free(0, 4, false);
        assert_eq!(slots.free(0), 18, "without readers at once");
    }

    #[test]
    fn slots_that_are_dropped_wait_for_the_medium() {
        let slots = BlockAllocator::default();
        slots.load(0, map(16));
        let taken = slots.take(0, 2, 4).unwrap();
        slots.take(0, 8, 2).unwrap().give_back();
        assert!(!slots.work_due());
        drop(taken);
        assert_eq!((slots.free(0), slots.work_due()), (28, true));
        let dropped = slots.take_dropped();
        assert_eq!(dropped.iter().map(|(zone, runs)| (*zone, &runs[..])).collect::<Vec<_>>(), [(0, &[(2, 4)][..])]);
        assert!(!slots.work_due());
        slots.give_back(0, &dropped[0].1);
        assert_eq!(slots.free(0), 32);
    }

    #[test]
    fn slots_are_punched_some_at_a_time() {
        let slots = BlockAllocator::default();
        slots.load(0, map(256));
        slots.take(0, 0, 256).unwrap().keep();
        (0..48).for_each(|slot| slots.defer_free(0, slot, true));
        for expected in [&[(0, 32)][..], &[(32, 16)]] {
            assert!(slots.work_due());
            let taken = slots.take_punches(2).unwrap();
            assert_eq!(taken.iter().map(|(_, taken)| taken.runs()).collect::<Vec<_>>(), [expected]);
            taken.into_iter().for_each(|(_, taken)| taken.give_back());
        }
        assert!(!slots.work_due() && slots.take_punches(2).is_none());
    }

    #[test]
    fn unmapped_slots_are_punched_in_whole_units_and_not_used_meanwhile() {
        let slots = BlockAllocator::default();
        slots.load(0, map(256));
        slots.take(0, 0, 256).unwrap().keep();
        // Units of 16 slots: the third and the fourth wholly, one slot of the sixth.
        (32..64).chain([80]).for_each(|slot| slots.defer_free(0, slot, true));
        (96..112).for_each(|slot| slots.defer_free(0, slot, false));
        let free = slots.free(0);
        let taken = slots.take_punches(99).unwrap();
        assert_eq!(taken.iter().map(|(_, taken)| taken.runs()).collect::<Vec<_>>(), [&[(32, 32)][..]]);
        assert_eq!(slots.free(0), free - 32, "nobody may write there now");
        taken.into_iter().for_each(|(_, taken)| taken.give_back());
        assert_eq!(slots.free(0), free);
        assert!(slots.take_punches(99).is_none());
        let keeping = BlockAllocator::new(Rc::default(), true);
        keeping.load(0, map(256));
        keeping.take(0, 0, 256).unwrap().keep();
        (0..256).for_each(|slot| keeping.defer_free(0, slot, true));
        assert!(keeping.take_punches(99).is_none() && !keeping.work_due());
    }
}
