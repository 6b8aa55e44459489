//! Which slots are free, and when a slot that was given up may be used again.
//!
//! A slot is in use from its allocation until its block's next record is durable and no read that may still look at it
//! is under way. Zones load their maps when they are first written to.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use rustc_hash::{FxHashMap, FxHashSet};
use sealblock_block::Event;
use smallvec::SmallVec;

/// A run of slots: the first one and how many.
pub(crate) type Run = (u32, u32);
/// Runs of one request. One is the usual number.
pub(crate) type Runs = SmallVec<[Run; 1]>;

/// The slots of one zone: a bit per slot, set when in use.
pub(crate) struct SlotMap {
    words: Vec<u64>,
    slots: u32,
    free: u32,
    cursor: u32,
    /// Slots that more than one record of the tables names. Such tables were damaged or made on purpose; no record that goes
    /// gives the slot up, because another may still mean it.
    shared: FxHashSet<u32>,
}

impl SlotMap {
    /// A map with every slot free.
    pub fn new(slots: u32) -> SlotMap {
        let mut words = vec![0; slots.div_ceil(64) as usize];
        // Bits behind the last slot are never free.
        if let (Some(last), tail @ 1..) = (words.last_mut(), slots % 64) {
            *last = u64::MAX << tail;
        }
        SlotMap { words, slots, free: slots, cursor: 0, shared: FxHashSet::default() }
    }

    fn used(&self, slot: u32) -> bool {
        self.words[slot as usize / 64] >> (slot % 64) & 1 == 1
    }

    /// Marks a slot as in use; a second time does nothing. Slots past the end are ignored: they come from damaged records.
    pub fn occupy(&mut self, slot: u32) {
        if slot < self.slots && !self.used(slot) {
            self.words[slot as usize / 64] |= 1 << (slot % 64);
            self.free -= 1;
        }
    }

    /// Marks the slot of a record that was read from the tables as in use.
    pub fn claim(&mut self, slot: u32) {
        if slot < self.slots && self.used(slot) {
            self.shared.insert(slot);
        }
        self.occupy(slot);
    }

    fn release(&mut self, slot: u32) {
        if self.shared.contains(&slot) {
            return;
        }
        debug_assert!(self.used(slot), "a slot is released once");
        if slot < self.slots && self.used(slot) {
            self.words[slot as usize / 64] &= !(1 << (slot % 64));
            self.free += 1;
        }
    }

    /// The first run of free slots at or behind `from`: its start and its length, at most `most`.
    fn free_run(&self, from: u32, most: u32) -> Option<Run> {
        let start = self.next(from, |word| !word)?;
        let end = self.next(start, |word| word).unwrap_or(self.slots);
        Some((start, (end - start).min(most)))
    }

    /// The first slot at or behind `from` whose bit is set in `view` of its word.
    fn next(&self, from: u32, view: impl Fn(u64) -> u64) -> Option<u32> {
        let (first, shift) = (from as usize / 64, from % 64);
        let mut mask = u64::MAX << shift;
        for (index, word) in self.words.iter().enumerate().skip(first) {
            let seen = view(*word) & mask;
            if seen != 0 {
                let slot = index as u32 * 64 + seen.trailing_zeros();
                return (slot < self.slots).then_some(slot);
            }
            mask = u64::MAX;
        }
        None
    }

    /// Takes `count` slots, or none when there are not enough: at `home` if that is free, else in one run, else in several.
    fn take(&mut self, home: u32, count: u32) -> Option<Runs> {
        if self.free < count {
            return None;
        }
        let at_home = self.free_run(home, count).filter(|&run| run == (home, count));
        let runs = match at_home.or_else(|| self.whole_run(count)) {
            Some(run) => SmallVec::from_buf([run]),
            None => self.pieces(count),
        };
        for &(start, len) in &runs {
            (start..start + len).for_each(|slot| self.occupy(slot));
        }
        if let Some(&(start, len)) = runs.last().filter(|_| at_home.is_none()) {
            self.cursor = (start + len) % self.slots;
        }
        Some(runs)
    }

    /// One run of `count` free slots, looked for from the cursor round.
    fn whole_run(&self, count: u32) -> Option<Run> {
        self.free_runs(count).find(|&(_, len)| len == count)
    }

    fn pieces(&self, count: u32) -> Runs {
        let mut missing = count;
        let mut runs = Runs::new();
        for (start, len) in self.free_runs(count) {
            let len = len.min(missing);
            runs.push((start, len));
            missing -= len;
            if missing == 0 {
                break;
            }
        }
        debug_assert_eq!(missing, 0, "the count of free slots is right");
        runs
    }

    /// Every run of free slots, from the cursor round, none longer than `most`; runs do not overlap.
    fn free_runs(&self, most: u32) -> impl Iterator<Item = Run> {
        let (cursor, slots) = (self.cursor, self.slots);
        let mut at = cursor;
        let mut wrapped = false;
        std::iter::from_fn(move || {
            loop {
                let end = if wrapped { cursor } else { slots };
                match self.free_run(at, most).filter(|&(start, _)| start < end) {
                    Some((start, len)) => {
                        let len = len.min(end - start);
                        at = start + len;
                        return Some((start, len));
                    }
                    None if wrapped => return None,
                    None => (at, wrapped) = (0, true),
                }
            }
        })
    }
}

/// Slots that a write has taken and that no record names yet. Dropped with the write, they come back once the medium is sure
/// not to write to them any more.
pub(crate) struct Taken<'a> {
    slots: &'a Slots,
    zone: u64,
    runs: Runs,
}

impl Taken<'_> {
    /// The runs.
    pub fn runs(&self) -> &[Run] {
        &self.runs
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
pub(crate) struct Slots {
    zones: RefCell<FxHashMap<u64, SlotMap>>,
    readers: Readers,
    retired: RefCell<VecDeque<Retired>>,
    to_punch: RefCell<Vec<(u64, u32)>>,
    /// Slots of writes that were dropped half-way: the medium may still be writing to them.
    dropped: RefCell<Vec<(u64, Runs)>>,
    /// Notified when there is something to do for the worker.
    wanted: Rc<Event>,
    /// Notified when slots have become free.
    pub freed: Event,
}

/// A slot may be used again once every read that began before it was given up has ended. Reads are counted by epoch.
#[derive(Default)]
struct Readers {
    first: Cell<u64>,
    counts: RefCell<VecDeque<u32>>,
    /// Slots were retired since the newest epoch began, so the next reader opens another.
    stale: Cell<bool>,
}

/// A read under way. Slots that it may look at stay in use until it is dropped.
pub(crate) struct Reading<'a> {
    slots: &'a Slots,
    epoch: u64,
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        if self.slots.readers.leave(self.epoch) {
            self.slots.reap();
        }
    }
}

impl Readers {
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
    fn retire(&self) -> Option<u64> {
        let counts = self.counts.borrow();
        let newest = counts.len().checked_sub(1)?;
        self.stale.set(true);
        Some(self.first.get() + newest as u64)
    }
}

impl Slots {
    /// The slots of a volume; `wanted` is notified when [`Slots::work_due`].
    pub fn new(wanted: Rc<Event>) -> Slots {
        Slots { wanted, ..Slots::default() }
    }

    /// Whether the zone's map is there.
    pub fn loaded(&self, zone: u64) -> bool {
        self.zones.borrow().contains_key(&zone)
    }

    /// Hands over a zone's map.
    pub fn load(&self, zone: u64, map: SlotMap) {
        self.zones.borrow_mut().insert(zone, map);
    }

    /// Takes `count` slots of a zone whose map is there, or none when there are not enough.
    pub fn take(&self, zone: u64, home: u32, count: u32) -> Option<Taken<'_>> {
        let runs = self.zones.borrow_mut().get_mut(&zone)?.take(home, count)?;
        Some(Taken { slots: self, zone, runs })
    }

    /// Free slots of a zone.
    pub fn free(&self, zone: u64) -> u32 {
        self.zones.borrow().get(&zone).map_or(0, |map| map.free)
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
    pub fn retire(&self, zone: u64, slot: u32, punch: bool) {
        match self.readers.retire() {
            Some(epoch) => self.retired.borrow_mut().push_back(Retired { epoch, zone, slot, punch }),
            None => self.end(Retired { epoch: 0, zone, slot, punch }),
        }
    }

    /// Frees retired slots whose readers have ended.
    fn reap(&self) {
        let first = self.readers.first.get();
        loop {
            let next = self.retired.borrow().front().copied().filter(|retired| retired.epoch < first);
            let Some(retired) = next else { break };
            self.retired.borrow_mut().pop_front();
            self.end(retired);
        }
        self.freed.notify();
    }

    fn end(&self, retired: Retired) {
        if retired.punch {
            self.to_punch.borrow_mut().push((retired.zone, retired.slot));
            self.wanted.notify();
        } else if let Some(map) = self.zones.borrow_mut().get_mut(&retired.zone) {
            map.release(retired.slot);
        }
    }

    /// Leaves slots to the worker whose write was dropped half-way.
    fn abandon(&self, zone: u64, runs: Runs) {
        self.dropped.borrow_mut().push((zone, runs));
        self.wanted.notify();
    }

    /// Whether slots wait for [`Slots::take_punches`] or [`Slots::take_dropped`].
    pub fn work_due(&self) -> bool {
        !self.to_punch.borrow().is_empty() || !self.dropped.borrow().is_empty()
    }

    /// Slots of writes that were dropped half-way; the caller gives each back with [`Slots::give_back`] once the medium is done
    /// with them.
    pub fn take_dropped(&self) -> Vec<(u64, Runs)> {
        self.dropped.take()
    }

    /// Slots whose space is to be given back, in runs by zone; the caller gives each back with [`Slots::give_back`].
    pub fn take_punches(&self) -> Vec<(u64, Run)> {
        let mut slots = std::mem::take(&mut *self.to_punch.borrow_mut());
        slots.sort_unstable();
        let mut runs: Vec<(u64, Run)> = Vec::new();
        for (zone, slot) in slots {
            match runs.last_mut() {
                Some((z, (start, len))) if *z == zone && *start + *len == slot => *len += 1,
                _ => runs.push((zone, (slot, 1))),
            }
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_taken_once_at_home_or_in_runs_or_in_pieces() {
        let mut map = SlotMap::new(100);
        assert_eq!(map.take(10, 20).unwrap().as_slice(), [(10, 20)]);
        assert_eq!(map.take(10, 20).unwrap().as_slice(), [(30, 20)], "home is taken, the next long run is not");
        assert_eq!(map.take(10, 55).unwrap().iter().map(|run| run.1).sum::<u32>(), 55);
        assert!(map.take(0, 6).is_none());
        assert_eq!(map.free, 5);
        map.release(10);
        assert_eq!(map.take(10, 1).unwrap().as_slice(), [(10, 1)]);
        assert_eq!(map.take(0, 5).unwrap().iter().map(|run| run.1).sum::<u32>(), 5);
        assert_eq!(map.free, 0);
    }

    #[test]
    fn a_slot_that_two_records_name_is_never_free_again() {
        let mut map = SlotMap::new(8);
        [1, 2, 2, 9].into_iter().for_each(|slot| map.claim(slot));
        assert_eq!(map.free, 6);
        [1, 2, 2].into_iter().for_each(|slot| map.release(slot));
        assert_eq!(map.free, 7);
        assert!(map.used(2) && !map.used(1));
    }

    #[test]
    fn every_slot_is_found_whatever_the_cursor() {
        for cursor in [0, 1, 63, 64, 129] {
            let mut map = SlotMap::new(130);
            (map.cursor, map.free) = (cursor, 130);
            (0..130).filter(|slot| slot % 3 == 0).for_each(|slot| map.occupy(slot));
            let free = map.free;
            let runs = map.pieces(free);
            let mut seen: Vec<u32> = runs.iter().flat_map(|&(start, len)| start..start + len).collect();
            seen.sort_unstable();
            assert!(seen.iter().copied().eq((0..130).filter(|slot| slot % 3 != 0)), "cursor {cursor}");
        }
    }

    #[test]
    fn a_slot_is_free_only_after_the_reads_that_may_see_it() {
        let slots = Slots::default();
        slots.load(0, SlotMap::new(16));
        slots.take(0, 0, 16).unwrap().keep();
        let early = slots.read();
        slots.retire(0, 3, false);
        let late = slots.read();
        assert_eq!(slots.free(0), 0);
        drop(late);
        assert_eq!(slots.free(0), 0, "the early read may still look");
        drop(early);
        assert_eq!(slots.free(0), 1);
        slots.retire(0, 4, false);
        assert_eq!(slots.free(0), 2, "without readers at once");
    }

    #[test]
    fn slots_that_are_dropped_wait_for_the_medium() {
        let slots = Slots::default();
        slots.load(0, SlotMap::new(16));
        let taken = slots.take(0, 2, 4).unwrap();
        slots.take(0, 8, 2).unwrap().give_back();
        assert!(!slots.work_due());
        drop(taken);
        assert_eq!((slots.free(0), slots.work_due()), (12, true));
        let dropped = slots.take_dropped();
        assert_eq!(dropped.iter().map(|(zone, runs)| (*zone, &runs[..])).collect::<Vec<_>>(), [(0, &[(2, 4)][..])]);
        assert!(!slots.work_due());
        slots.give_back(0, &dropped[0].1);
        assert_eq!(slots.free(0), 16);
    }

    #[test]
    fn punched_slots_come_in_runs() {
        let slots = Slots::default();
        slots.load(0, SlotMap::new(16));
        slots.take(0, 0, 16).unwrap().keep();
        [5, 3, 4, 9].into_iter().for_each(|slot| slots.retire(0, slot, true));
        assert_eq!(slots.take_punches(), [(0, (3, 3)), (0, (9, 1))]);
        assert_eq!(slots.free(0), 0);
        slots.give_back(0, &[(3, 3)]);
        assert_eq!(slots.free(0), 3);
    }
}
