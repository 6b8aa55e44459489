//! The groups of regions that labels mark dirty, in the order of their last changes: which ones leave when there are
//! too many, and how far ahead of a change labels mark. Without I/O.
//!
//! A change has a number, which the caller draws from one counter; a group has the number of its last change. So a flush that began
//! after change `n`, while no change was in flight in a group, covers the group exactly if its number is `n` or less. Changes that are
//! in flight when a flush begins get later numbers ([`HotGroups::postpone`]).
//!
//! The list is in the order of these numbers. Nothing here is bound to a limit: what must not leave yet may exceed it.

use std::collections::HashMap;

use sealblock_units::BlockSize;

use crate::label::regions::RegionMap;

/// Bytes of regions that a crash may leave to be compared.
const MAX_BYTES: u64 = 64 << 30;
/// Most groups, and fewest: groups of a device without bitmap pages can be large.
const MAX_GROUPS: u64 = 1024;
const MIN_GROUPS: u64 = 64;
/// One of so many groups leaves when there is no room, so that one label makes room for many.
const PART: u32 = 8;
/// Labels mark a further group ahead for so many marks, and no more than so many.
const MARKS_PER_GROUP_AHEAD: u32 = 16;
const MAX_AHEAD: u32 = 64;

/// Neither newer nor older.
const END: u32 = u32::MAX;

/// A group and its last change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct HotGroup {
    pub group: u32,
    /// Number of its last change.
    pub change: u64,
    /// When that was.
    pub tick: u64,
}

struct Slot {
    hot: HotGroup,
    newer: u32,
    older: u32,
}

/// The groups that were changed, and those that were marked ahead of changes.
pub(crate) struct HotGroups {
    limit: u32,
    /// Groups of the device.
    count: u32,
    /// By group.
    places: HashMap<u32, u32>,
    slots: Vec<Slot>,
    free: Vec<u32>,
    newest: u32,
    oldest: u32,
    /// Labels that were written for groups that were not marked, since all groups left.
    marks: u32,
    /// Groups had to leave for others since then.
    is_crowded: bool,
}

impl HotGroups {
    /// None yet, and at most `limit`; the usual number if that is `None`.
    pub fn new(map: &RegionMap, size: BlockSize, limit: Option<u32>) -> HotGroups {
        let usual = (MAX_BYTES / (map.group_blocks() << size.shift())).clamp(MIN_GROUPS, MAX_GROUPS) as u32;
        HotGroups {
            limit: limit.unwrap_or(usual),
            count: map.group_count(),
            places: HashMap::new(),
            slots: Vec::new(),
            free: Vec::new(),
            newest: END,
            oldest: END,
            marks: 0,
            is_crowded: false,
        }
    }

    /// Most groups, as long as any of them may leave.
    pub fn limit(&self) -> u32 {
        self.limit.min(self.count)
    }

    /// Number of groups.
    pub fn len(&self) -> u32 {
        self.places.len() as u32
    }

    /// True if a group must leave before another one comes.
    pub fn is_full(&self) -> bool {
        self.count > self.limit && self.len() >= self.limit
    }

    /// True if groups are to leave, so that others need not wait until they have.
    pub fn is_due(&self) -> bool {
        self.count > self.limit && self.len() > self.limit - self.at_once()
    }

    /// How many leave at once when there is no room.
    pub fn at_once(&self) -> u32 {
        (self.limit / PART).max(1)
    }

    /// Records a change of a group. Its number must not be lower than any before.
    pub fn touch(&mut self, group: u32, change: u64, tick: u64) {
        let hot = HotGroup { group, change, tick };
        let place = match self.places.get(&group) {
            Some(&place) if place == self.newest => {
                self.slots[place as usize].hot = hot;
                return;
            }
            Some(&place) => {
                self.unlink(place);
                place
            }
            None => self.place(group),
        };
        self.link_newest(place, hot);
    }

    fn place(&mut self, group: u32) -> u32 {
        let place = self.free.pop().unwrap_or_else(|| {
            let hot = HotGroup { group, change: 0, tick: 0 };
            self.slots.push(Slot { hot, newer: END, older: END });
            self.slots.len() as u32 - 1
        });
        self.places.insert(group, place);
        place
    }

    fn link_newest(&mut self, place: u32, hot: HotGroup) {
        self.slots[place as usize] = Slot { hot, newer: END, older: self.newest };
        match self.newest {
            END => self.oldest = place,
            newest => self.slots[newest as usize].newer = place,
        }
        self.newest = place;
    }

    fn unlink(&mut self, place: u32) {
        let Slot { newer, older, .. } = self.slots[place as usize];
        match newer {
            END => self.newest = older,
            newer => self.slots[newer as usize].older = older,
        }
        match older {
            END => self.oldest = newer,
            older => self.slots[older as usize].newer = newer,
        }
    }

    /// A group has left.
    pub fn remove(&mut self, group: u32) {
        if let Some(place) = self.places.remove(&group) {
            self.unlink(place);
            self.free.push(place);
        }
        if self.places.is_empty() {
            (self.marks, self.is_crowded) = (0, false);
        }
    }

    /// Number of the last change of a group; `None` if there was none since the mirror was opened or since the group left.
    pub fn change(&self, group: u32) -> Option<u64> {
        self.places.get(&group).map(|place| self.slots[*place as usize].hot.change)
    }

    /// The groups from the one whose last change is longest ago.
    pub fn oldest_first(&self) -> impl Iterator<Item = HotGroup> + '_ {
        self.walk(self.oldest, |slot| slot.newer)
    }

    /// The groups whose last change is after this one, the newest first.
    pub fn changed_after(&self, change: u64) -> impl Iterator<Item = HotGroup> + '_ {
        self.walk(self.newest, |slot| slot.older).take_while(move |hot| hot.change > change)
    }

    fn walk(&self, first: u32, next: fn(&Slot) -> u32) -> impl Iterator<Item = HotGroup> + '_ {
        let mut at = first;
        std::iter::from_fn(move || {
            let slot = self.slots.get(at as usize)?;
            at = next(slot);
            Some(slot.hot)
        })
    }

    /// Gives the groups that were changed after `change` and are `busy` the number `to`, which is later than all; true if there are
    /// any. A flush that begins now does not cover them.
    pub fn postpone(&mut self, change: u64, to: u64, busy: impl Fn(u32) -> bool) -> bool {
        let (mut at, mut is_any) = (self.newest, false);
        while let Some(Slot { hot, older, .. }) = self.slots.get(at as usize)
            && hot.change > change
        {
            let hot = *hot;
            at = *older;
            // What was postponed is in front of what this walk has yet to see.
            if hot.change < to && busy(hot.group) {
                self.touch(hot.group, to, hot.tick);
                is_any = true;
            }
        }
        is_any
    }

    /// Groups to be marked with a group that is not: itself, and the ones around it. The more marks were needed, the more of
    /// them, so that changes all over a device soon wait for no label; none once there was no room.
    pub fn mark(&mut self, group: u32) -> std::ops::RangeInclusive<u32> {
        self.marks = self.marks.saturating_add(1);
        let ahead = (self.marks / MARKS_PER_GROUP_AHEAD).clamp(1, MAX_AHEAD);
        let around = 1 << ahead.ilog2();
        let first = group / around * around;
        let last = (first + (around - 1)).min(self.count - 1);
        // What is marked ahead must not make groups leave that were changed.
        let has_room = !self.is_crowded && self.len() + around <= self.limit - self.at_once();
        if self.count <= self.limit || has_room { first..=last } else { group..=group }
    }

    /// Groups leave because others need their room.
    pub fn crowded(&mut self) {
        self.is_crowded = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::label::regions::MAX_REGIONS;

    fn groups(count: u64, limit: u32) -> HotGroups {
        // Of 1 MiB each, and of 64 MiB where there are more than a small device has.
        let group_blocks = if count > 1024 { 1 << 14 } else { 1 << 8 };
        let map = RegionMap::new(BlockSize::B4096, count * group_blocks, MAX_REGIONS).unwrap();
        assert_eq!(u64::from(map.group_count()), count);
        HotGroups::new(&map, BlockSize::B4096, Some(limit))
    }

    fn order(hot: &HotGroups) -> Vec<u32> {
        let order: Vec<u32> = hot.oldest_first().map(|hot| hot.group).collect();
        let mut back: Vec<u32> = hot.changed_after(0).map(|hot| hot.group).collect();
        back.reverse();
        assert_eq!(order, back);
        assert_eq!(order.len(), hot.len() as usize);
        order
    }

    #[test]
    fn the_oldest_is_the_one_whose_last_change_is_longest_ago() {
        let mut hot = groups(100, 50);
        for (change, group) in [(1, 7), (2, 9), (3, 4), (4, 7), (5, 7), (6, 9)] {
            hot.touch(group, change, 0);
        }
        assert_eq!(order(&hot), [4, 7, 9]);
        assert_eq!((hot.change(7), hot.change(8)), (Some(5), None));
        hot.remove(7);
        hot.remove(8);
        assert_eq!(order(&hot), [4, 9]);
        hot.touch(30, 7, 0);
        hot.remove(30);
        hot.remove(4);
        hot.remove(9);
        assert_eq!(order(&hot), []);
        hot.touch(1, 8, 0);
        assert_eq!(order(&hot), [1]);
    }

    #[test]
    fn what_is_busy_when_a_flush_begins_is_not_covered_by_it() {
        let mut hot = groups(100, 50);
        (1..=6).for_each(|change| hot.touch(change as u32 + 10, change, 3));
        assert!(!hot.postpone(2, 7, |_| false));
        assert!(hot.postpone(2, 7, |group| group % 2 == 0 || group == 11), "11 was flushed before");
        assert_eq!(order(&hot), [11, 12, 13, 15, 16, 14]);
        let covered: Vec<u32> = hot.changed_after(2).filter(|hot| hot.change <= 6).map(|hot| hot.group).collect();
        assert_eq!(covered, [15, 13]);
        assert!(hot.oldest_first().all(|hot| hot.tick == 3), "nothing was changed");
    }

    #[test]
    fn room_is_made_early_and_only_where_not_all_groups_have_room() {
        let mut hot = groups(100, 16);
        (0..14).for_each(|group| hot.touch(group, 1, 0));
        assert!(!hot.is_due() && !hot.is_full());
        hot.touch(14, 2, 0);
        assert!(hot.is_due() && !hot.is_full());
        hot.touch(15, 2, 0);
        assert!(hot.is_full() && hot.at_once() == 2);
        let mut hot = groups(16, 16);
        (0..16).for_each(|group| hot.touch(group, 1, 0));
        assert!(!hot.is_due() && !hot.is_full());
    }

    /// Marks all groups, from one that is far from the last to the next, and returns how many labels that took.
    fn marks_until_all_are_hot(count: u32) -> u32 {
        let mut hot = groups(u64::from(count), count);
        let mut labels = 0;
        // A prime: every group comes once.
        for group in (0..count).map(|at| at * 7919 % count) {
            if hot.change(group).is_none() {
                labels += 1;
                hot.mark(group).for_each(|group| hot.touch(group, 1, 0));
            }
        }
        assert_eq!(hot.len(), count);
        labels
    }

    #[test]
    fn changes_all_over_a_device_soon_need_no_label() {
        let labels = marks_until_all_are_hot(1024);
        assert!((50..256).contains(&labels), "{labels}");
    }

    #[test]
    fn few_places_are_marked_with_little_around_them_and_none_where_there_is_no_room() {
        let mut hot = groups(1024, 1024);
        for place in 0..20 {
            hot.mark(place * 50).for_each(|group| hot.touch(group, 1, 0));
        }
        assert_eq!(hot.len(), 20);
        let mut hot = groups(100_000, 1024);
        hot.crowded();
        for place in 0..900 {
            hot.mark(place * 50).for_each(|group| hot.touch(group, 1, 0));
        }
        assert_eq!(hot.len(), 900);
        let mut hot = groups(100_000, 1024);
        for place in 0..900 {
            if hot.is_full() {
                break;
            }
            let marked = hot.mark(place * 50);
            assert!(marked.start() == marked.end() || !hot.is_due(), "what is marked ahead makes others leave");
            marked.for_each(|group| hot.touch(group, 1, 0));
        }
        assert!(hot.is_full());
    }
}
