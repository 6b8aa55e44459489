//! What idle work does to the physical blocks of a block group: it moves fragmented extents together, and deallocates
//! free physical blocks on the medium.

use super::{FreeMap, Run, Runs};

/// An extent is moved together if it has more than one fragment for this many blocks.
const BLOCKS_PER_FRAGMENT: u32 = 16;

impl FreeMap {
    /// A fragmented extent, searched from this one with wraparound. If few clusters are completely free, any extent
    /// with more than one fragment counts.
    pub fn find_fragmented(&self, from: u32) -> Option<u32> {
        let max = if self.free_clusters * 4 > self.used.len() as u32 - self.home.len() as u32 {
            self.max_fragments()
        } else {
            1
        };
        let extents = self.home.len() as u32;
        let from = from.min(extents);
        (from..extents).chain(0..from).find(|&extent| u32::from(self.fragments[extent as usize]) > max)
    }

    /// The maximum number of fragments of an extent that is not moved.
    pub fn max_fragments(&self) -> u32 {
        (self.extent_blocks / BLOCKS_PER_FRAGMENT).max(1)
    }

    /// Records the number of fragments in which an extent was found.
    pub fn set_fragments(&mut self, extent: u32, fragments: u32) {
        self.fragments[extent as usize] = fragments.min(u32::from(u16::MAX)) as u16;
    }

    /// True if there is a cluster to move an extent to.
    pub fn has_free_cluster(&self) -> bool {
        self.free_clusters > 0
    }

    /// True if a physical block is in the home of an extent.
    pub fn is_home(&self, extent: u32, pbn: u32) -> bool {
        self.home_of(extent) == Some(pbn / self.cluster_blocks)
    }

    /// Takes physical blocks in a completely free cluster for the blocks at these offsets in an extent. The cluster
    /// becomes its home.
    pub fn take_in_free_cluster(&mut self, extent: u32, offsets: &[u32]) -> Option<Runs> {
        let cluster = self.free_cluster()?;
        self.adopt(extent, cluster);
        let mut runs = Runs::new();
        offsets.iter().for_each(|offset| self.put((cluster * self.cluster_blocks + offset, 1), &mut runs));
        Some(runs)
    }

    /// Takes physical blocks at home for the blocks at these offsets in an extent, if there is room for all.
    pub fn take_at_home(&mut self, extent: u32, offsets: &[u32]) -> Option<Runs> {
        let range = self.cluster_range(self.home_of(extent)?);
        let used = u32::from(self.used[self.home_of(extent)? as usize]);
        if range.len() as u32 - used < offsets.len() as u32 {
            return None;
        }
        let mut runs = Runs::new();
        offsets.iter().for_each(|&offset| self.put_block(extent, offset, &mut runs));
        Some(runs)
    }

    /// Takes the first run of free whole units, from unit `from` and at most `max` long, that may take space on the
    /// medium. They are in use until they are released, and do not count as taking space any more.
    pub fn take_unpunched(&mut self, from: u32, max: u32) -> Option<Run> {
        let units = self.unpunched.len();
        let mut at = from;
        loop {
            let first = self.unpunched.next_set(at, units)?;
            let count = (first..units.min(first + max)).take_while(|&unit| self.is_unpunched(unit)).count() as u32;
            if count > 0 {
                return Some(self.take_units(first, count));
            }
            at = first + 1;
        }
    }

    /// The same for one unit, if it is completely free.
    pub fn take_unpunched_unit(&mut self, unit: u32) -> Option<Run> {
        (unit < self.unpunched.len() && self.is_unpunched(unit)).then(|| self.take_units(unit, 1))
    }

    /// The unit of a physical block.
    pub fn unit_of(&self, pbn: u32) -> u32 {
        pbn / self.unit_blocks
    }

    fn is_unpunched(&self, unit: u32) -> bool {
        let run = self.unit_run(unit, 1);
        self.unpunched.get(unit) && self.allocated.is_clear(run)
    }

    fn unit_run(&self, first: u32, count: u32) -> Run {
        let start = first * self.unit_blocks;
        (start, (count * self.unit_blocks).min(self.allocated.len() - start))
    }

    fn take_units(&mut self, first: u32, count: u32) -> Run {
        let run = self.unit_run(first, count);
        (run.0..run.0 + run.1).for_each(|pbn| self.mark(pbn));
        (first..first + count).for_each(|unit| self.unpunched.unset(unit));
        run
    }
}
