//! The slots of one zone, and where blocks are put in them so that neighbours stay neighbours.
//!
//! Blocks are seen in *extents* of 1 MiB, slots in *groups* that hold an extent and some spare slots: half of a zone's
//! spare slots are spread over its groups so, the other half makes groups that are wholly free. Most blocks of an extent
//! lie in one group, its *home*. A small write takes a free slot of its home, so a group stays full of one extent
//! however its blocks are overwritten, and a long read finds them within little more than their own length. A
//! write of a whole extent takes a group that is wholly free, which becomes the home; the old one is free as a whole once
//! the write is durable.
//!
//! Nothing of this is on the medium: any slot of the zone may hold any of its blocks. What is kept here about homes and
//! order is found out when the zone is loaded, and if it is wrong, blocks lie less well and nothing worse.

mod load;
mod upkeep;

use rustc_hash::FxHashSet;
use smallvec::SmallVec;

use crate::bits::Bits;
pub(crate) use crate::bits::Run;
pub(crate) use load::Loader;

/// Runs of one request. One is the usual number.
pub(crate) type Runs = SmallVec<[Run; 1]>;

/// Bytes of an extent, and its blocks at most: where blocks are small a zone is too, and is to have many wholly free groups.
const EXTENT_BYTES: u32 = 1 << 20;
const EXTENT_BLOCKS_MAX: u32 = 512;
/// A write of this part of an extent is kept together where it can be, also away from home.
const LONG_PART: u32 = 32;
/// Space is given back in units of so many bytes.
pub(crate) const PUNCH_BYTES: u32 = 64 << 10;
/// No group, or no extent.
const NONE: u16 = u16::MAX;

/// The slots of one zone.
pub(crate) struct FreeMap {
    /// Set: in use.
    slots: Bits,
    free: u32,
    extent_blocks: u32,
    group_slots: u32,
    /// Slots in use of each group.
    used: Vec<u16>,
    /// The extent whose home a group is.
    owner: Vec<u16>,
    /// The group that is an extent's home.
    home: Vec<u16>,
    /// About how many pieces an extent is in, where that is more than the least.
    pieces: Vec<u16>,
    /// Groups that are wholly free and hold an extent.
    whole: u32,
    /// Where the next wholly free group is looked for.
    next_fresh: u32,
    /// The group that takes blocks for which there is no room at home.
    spill: u32,
    /// Units of [`PUNCH_BYTES`] that may take space on the medium though free.
    stale: Bits,
    unit_slots: u32,
    /// Slots that more than one record of the tables names. Such tables were damaged or made on purpose; no record that goes
    /// gives the slot up, because another may still mean it.
    shared: FxHashSet<u32>,
}

impl FreeMap {
    /// The map of a zone of so many blocks and slots, all of them free.
    pub fn new(blocks: u32, slots: u32, block_bytes: u32) -> FreeMap {
        let extent_blocks = (EXTENT_BYTES / block_bytes).min(EXTENT_BLOCKS_MAX).min(blocks);
        let extents = blocks.div_ceil(extent_blocks);
        let group_slots = extent_blocks + (slots - blocks) / 2 / extents;
        let groups = slots.div_ceil(group_slots);
        let unit_slots = PUNCH_BYTES / block_bytes;
        let mut stale = Bits::clear(slots.div_ceil(unit_slots));
        (0..stale.len()).for_each(|unit| stale.set(unit));
        let mut map = FreeMap {
            slots: Bits::clear(slots),
            free: slots,
            extent_blocks,
            group_slots,
            used: vec![0; groups as usize],
            owner: vec![NONE; groups as usize],
            home: vec![NONE; extents as usize],
            pieces: vec![0; extents as usize],
            whole: 0,
            next_fresh: 0,
            spill: 0,
            stale,
            unit_slots,
            shared: FxHashSet::default(),
        };
        map.whole = (0..groups).filter(|&group| map.holds_extent(group)).count() as u32;
        map
    }

    /// Slots that are free.
    pub fn free(&self) -> u32 {
        self.free
    }

    /// Blocks of an extent.
    pub fn extent_blocks(&self) -> u32 {
        self.extent_blocks
    }

    /// Whether no group is wholly free for a write of so many blocks, though one may well be after a commit of so many records.
    pub fn is_tight(&self, count: u32, records: usize) -> bool {
        self.whole == 0 && count * 2 >= self.extent_blocks && records >= 4 * self.extent_blocks as usize
    }

    /// Takes slots for `count` blocks from the one with this index in the zone on, or none when there are too few.
    pub fn take(&mut self, first: u32, count: u32) -> Option<Runs> {
        if self.free < count {
            return None;
        }
        let (mut runs, mut at) = (Runs::new(), first);
        while at < first + count {
            let (extent, offset) = (at / self.extent_blocks, at % self.extent_blocks);
            let here = (self.extent_blocks - offset).min(first + count - at);
            self.place(extent, offset, here, &mut runs);
            at += here;
        }
        Some(runs)
    }

    /// Takes slots for blocks of one extent.
    fn place(&mut self, extent: u32, offset: u32, count: u32, runs: &mut Runs) {
        let natural = self.home_or_new(extent).map(|group| (group * self.group_slots + offset, count));
        if let Some(run) = natural.filter(|&run| self.slots.is_clear(run)) {
            return self.put(run, runs);
        }
        let is_long = count * LONG_PART >= self.extent_blocks;
        if is_long && (offset == 0 || count * 2 >= self.extent_blocks) {
            // The beginning of an extent is written anew, and likely the rest of it follows.
            if let Some(group) = self.fresh_group() {
                self.adopt(extent, group);
                self.pieces[extent as usize] = u16::from(count != self.extent_blocks);
                return self.put((group * self.group_slots + offset, count), runs);
            }
        }
        let together = self.run_at_home(extent, count).or_else(|| self.spill_run(count).filter(|_| is_long));
        if let Some(run) = together {
            self.note_pieces(extent, 1);
            return self.put(run, runs);
        }
        match is_long {
            true => self.put_pieces(extent, count, runs),
            false => (0..count).for_each(|index| self.put_block(extent, offset + index, runs)),
        }
    }

    /// Takes a slot for one block: as near to its place as may be.
    fn put_block(&mut self, extent: u32, offset: u32, runs: &mut Runs) {
        let natural = self.home_of(extent).map(|group| group * self.group_slots + offset);
        let slot = match natural.filter(|&slot| self.slots.is_clear((slot, 1))) {
            Some(slot) => Some((slot, 1)),
            None => {
                self.note_pieces(extent, 1);
                self.run_at_home(extent, 1).or_else(|| self.spill_run(1))
            }
        };
        let anywhere = || self.slots.clear_run(0, self.slots.len(), 1);
        self.put(slot.or_else(anywhere).expect("there are free slots, by their count"), runs);
    }

    /// Takes slots for a long write where no run has room for all of it: at home, then in groups that are no home, those with
    /// most room first, and only then in other homes.
    fn put_pieces(&mut self, extent: u32, count: u32, runs: &mut Runs) {
        let home = self.home_of(extent).map_or(0..0, |group| self.group_range(group));
        let mut mixed: Vec<u32> =
            (0..self.used.len() as u32).filter(|&group| self.owner[group as usize] == NONE).collect();
        mixed.sort_by_key(|&group| self.used[group as usize]);
        let mixed = mixed.into_iter().map(|group| self.group_range(group)).collect::<Vec<_>>();
        let mut missing = count;
        for range in std::iter::once(home).chain(mixed).chain(std::iter::once(0..self.slots.len())) {
            while missing > 0
                && let Some(run) = self.slots.clear_run(range.start, range.end, missing)
            {
                self.note_pieces(extent, 1);
                self.put(run, runs);
                missing -= run.1;
            }
        }
        debug_assert_eq!(missing, 0, "the count of free slots is right");
    }

    /// A run of free slots in an extent's home: among the spare ones first, which are no block's place.
    fn run_at_home(&self, extent: u32, count: u32) -> Option<Run> {
        let range = self.group_range(self.home_of(extent)?);
        let spare = (range.start + self.extent_blocks).min(range.end);
        [spare, range.start].into_iter().find_map(|from| self.run_within(from, range.end, count))
    }

    fn run_within(&self, from: u32, end: u32, count: u32) -> Option<Run> {
        self.slots.clear_runs(from, end, count).find(|&(_, len)| len == count)
    }

    /// A run of free slots away from home: where such blocks are already, so that they do not break up free groups.
    fn spill_run(&mut self, count: u32) -> Option<Run> {
        let within = |map: &FreeMap, group: u32| {
            let range = map.group_range(group);
            map.run_within(range.start, range.end, count)
        };
        if let Some(run) = within(self, self.spill).filter(|_| self.takes_spills(self.spill)) {
            return Some(run);
        }
        let groups = 0..self.used.len() as u32;
        let mixed = groups.filter(|&group| self.takes_spills(group));
        let found = mixed.filter_map(|group| Some((group, within(self, group)?))).next();
        let (group, run) = match found {
            Some(found) => found,
            None => {
                let group = self.fresh_group().or_else(|| self.short_group())?;
                (group, within(self, group)?)
            }
        };
        self.spill = group;
        Some(run)
    }

    /// Whether a group is no home, is in use in part, and is not about to be wholly free: one whose extent was just written anew
    /// is nearly full.
    fn takes_spills(&self, group: u32) -> bool {
        let (used, range) = (u32::from(self.used[group as usize]), self.group_range(group));
        let is_new_home_elsewhere = used * 8 > (range.end - range.start) * 7 && group != self.spill;
        self.owner[group as usize] == NONE && used > 0 && !is_new_home_elsewhere
    }

    /// The last group, where it is too short for an extent.
    fn short_group(&self) -> Option<u32> {
        let last = self.used.len() as u32 - 1;
        (!self.holds_extent(last)).then_some(last)
    }

    fn home_of(&self, extent: u32) -> Option<u32> {
        Some(self.home[extent as usize]).filter(|&group| group != NONE).map(u32::from)
    }

    /// The home of an extent. One that has none gets the group with its own number, else any that is wholly free.
    fn home_or_new(&mut self, extent: u32) -> Option<u32> {
        if let Some(group) = self.home_of(extent) {
            return Some(group);
        }
        let own = Some(extent).filter(|&group| self.used[group as usize] == 0 && self.holds_extent(group));
        let group = own.or_else(|| self.fresh_group())?;
        self.adopt(extent, group);
        Some(group)
    }

    /// A group that is wholly free, from where the last one was on: extents that are written one after the other lie so.
    fn fresh_group(&mut self) -> Option<u32> {
        let groups = self.used.len() as u32;
        let mut order = (self.next_fresh..groups).chain(0..self.next_fresh).filter(|_| self.whole > 0);
        let group = order.find(|&group| self.used[group as usize] == 0 && self.holds_extent(group))?;
        self.next_fresh = (group + 1) % groups;
        Some(group)
    }

    /// Makes a group the home of an extent.
    fn adopt(&mut self, extent: u32, group: u32) {
        if let Some(before) = self.home_of(extent) {
            self.owner[before as usize] = NONE;
        }
        self.home[extent as usize] = group as u16;
        self.owner[group as usize] = extent as u16;
    }

    fn group_range(&self, group: u32) -> std::ops::Range<u32> {
        let start = group * self.group_slots;
        start..(start + self.group_slots).min(self.slots.len())
    }

    fn holds_extent(&self, group: u32) -> bool {
        self.group_range(group).len() as u32 >= self.extent_blocks
    }

    fn note_pieces(&mut self, extent: u32, more: u16) {
        let pieces = &mut self.pieces[extent as usize];
        *pieces = pieces.saturating_add(more);
    }

    /// Takes a run of free slots.
    fn put(&mut self, run: Run, runs: &mut Runs) {
        (run.0..run.0 + run.1).for_each(|slot| self.occupy(slot));
        match runs.last_mut() {
            Some((start, len)) if *start + *len == run.0 => *len += run.1,
            _ => runs.push(run),
        }
    }

    /// Marks a slot as in use; a second time does nothing. Slots past the end are ignored: they come from damaged records.
    fn occupy(&mut self, slot: u32) {
        if slot < self.slots.len() && !self.slots.get(slot) {
            self.mark(slot);
            self.stale.set(slot / self.unit_slots);
        }
    }

    fn mark(&mut self, slot: u32) {
        let group = slot / self.group_slots;
        if self.used[group as usize] == 0 && self.holds_extent(group) {
            self.whole -= 1;
        }
        self.slots.set(slot);
        self.free -= 1;
        self.used[group as usize] += 1;
    }

    /// Marks a slot as free, unless another record may name it.
    pub fn release(&mut self, slot: u32) {
        if self.shared.contains(&slot) {
            return;
        }
        debug_assert!(self.slots.get(slot), "a slot is released once");
        if slot >= self.slots.len() || !self.slots.get(slot) {
            return;
        }
        self.slots.unset(slot);
        self.free += 1;
        let group = slot / self.group_slots;
        self.used[group as usize] -= 1;
        if self.used[group as usize] > 0 {
            return;
        }
        if self.holds_extent(group) {
            self.whole += 1;
        }
        let owner = std::mem::replace(&mut self.owner[group as usize], NONE);
        if owner != NONE {
            self.home[owner as usize] = NONE;
        }
    }
}

#[cfg(test)]
mod tests;
