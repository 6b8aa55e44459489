//! A block group's map made from the map entries of its map pages.

use super::{FreeMap, NONE};

/// Takes the physical blocks of a block group's map entries, in order of their blocks, and finds out where the extents are at home.
pub(crate) struct Loader {
    map: FreeMap,
    /// The last block and its physical block.
    last: Option<(u32, u32)>,
    /// The cluster that may hold most blocks of the extent being looked at, and by how many more than others.
    leading: (u32, u32),
}

impl Loader {
    /// For a map of which nothing is in use yet.
    pub fn new(map: FreeMap) -> Loader {
        Loader { map, last: None, leading: (0, 0) }
    }

    /// The block with this index in the block group has a map entry that names this physical block.
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
        // A majority, if there is one, is what is left when each block is set off against one of another cluster.
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

    /// The map.
    pub fn finish(mut self) -> FreeMap {
        self.end_extent();
        self.map
    }
}
