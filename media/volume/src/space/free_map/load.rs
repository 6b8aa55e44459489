//! Builds the map of a block group from the entries of its map pages.

use super::{FreeMap, NONE};

/// Takes the physical blocks of a block group's map entries, in order of their blocks, and determines the homes of
/// extents.
pub(crate) struct Loader {
    map: FreeMap,
    /// The last block and its physical block.
    last: Option<(u32, u32)>,
    /// The cluster that may hold most blocks of the current extent, and its lead over the others.
    leading: (u32, u32),
}

impl Loader {
    /// For a map with nothing in use yet.
    pub fn new(map: FreeMap) -> Loader {
        Loader { map, last: None, leading: (0, 0) }
    }

    /// Marks the physical block of the block with this index in the block group as used.
    pub fn mark_used(&mut self, index: u32, pbn: u32) {
        if pbn >= self.map.allocated.len() {
            return;
        }
        if self.map.allocated.get(pbn) {
            self.map.shared.insert(pbn);
        }
        self.map.occupy(pbn);
        let extent = index / self.map.extent_blocks;
        if self.last.is_some_and(|(before, _)| before / self.map.extent_blocks != extent) {
            self.end_extent();
        }
        let follows = self.last.is_some_and(|(before, at)| before + 1 == index && at + 1 == pbn);
        if !follows || index.is_multiple_of(self.map.extent_blocks) {
            self.map.add_fragments(extent, 1);
        }
        self.last = Some((index, pbn));
        let cluster = pbn / self.map.cluster_blocks;
        // Majority vote: each block cancels one of another cluster, and a cluster with the majority remains.
        self.leading = match self.leading {
            (_, 0) => (cluster, 1),
            (leader, by) if leader == cluster => (leader, by + 1),
            (leader, by) => (leader, by - 1),
        };
    }

    fn end_extent(&mut self) {
        let (cluster, by) = std::mem::take(&mut self.leading);
        let Some((index, _)) = self.last else { return };
        if by > 0 && self.map.owner[cluster as usize] == NONE {
            self.map.adopt(index / self.map.extent_blocks, cluster);
        }
    }

    /// The finished map.
    pub fn finish(mut self) -> FreeMap {
        self.end_extent();
        self.map
    }
}
