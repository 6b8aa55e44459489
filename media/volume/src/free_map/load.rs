//! A zone's map made from the records of its tables.

use super::{FreeMap, NONE};

/// Takes the slots of a zone's records, in order of their blocks, and finds out where the extents are at home.
pub(crate) struct Loader {
    map: FreeMap,
    /// The last block and its slot.
    last: Option<(u32, u32)>,
    /// The group that may hold most blocks of the extent being looked at, and by how many more than others.
    leading: (u32, u32),
}

impl Loader {
    /// For a map of which nothing is in use yet.
    pub fn new(map: FreeMap) -> Loader {
        Loader { map, last: None, leading: (0, 0) }
    }

    /// The block with this index in the zone has a record that names this slot.
    pub fn mark_used(&mut self, index: u32, slot: u32) {
        if slot >= self.map.slots.len() {
            return;
        }
        if self.map.slots.get(slot) {
            self.map.shared.insert(slot);
        }
        self.map.occupy(slot);
        let extent = index / self.map.extent_blocks;
        if self.last.is_some_and(|(before, _)| before / self.map.extent_blocks != extent) {
            self.end_extent();
        }
        let follows = self.last.is_some_and(|(before, at)| before + 1 == index && at + 1 == slot);
        if !follows || index.is_multiple_of(self.map.extent_blocks) {
            self.map.note_pieces(extent, 1);
        }
        self.last = Some((index, slot));
        let group = slot / self.map.group_slots;
        // A majority, if there is one, is what is left when each block is set off against one of another group.
        self.leading = match self.leading {
            (_, 0) => (group, 1),
            (leader, by) if leader == group => (leader, by + 1),
            (leader, by) => (leader, by - 1),
        };
    }

    fn end_extent(&mut self) {
        let (group, by) = std::mem::take(&mut self.leading);
        let Some((index, _)) = self.last else { return };
        if by > 0 && self.map.owner[group as usize] == NONE {
            self.map.adopt(index / self.map.extent_blocks, group);
        }
    }

    /// The map.
    pub fn finish(mut self) -> FreeMap {
        self.end_extent();
        self.map
    }
}
