//! The physical blocks of one block group, and the placement of blocks that keeps neighbours together.
//!
//! Blocks form *extents* of 1 MiB, physical blocks form *clusters* of an extent and some spare physical blocks. Half of
//! a block group's spare physical blocks are spread over its clusters in this way; the other half forms clusters that
//! are completely free. Most blocks of an extent are in one cluster, its *home*. A small write takes a free physical
//! block of its home, so a cluster stays full of one extent however its blocks are overwritten, and a long read finds
//! them within little more than their own length. A write of a whole extent takes a completely free cluster, which
//! becomes the home; the old one is completely free once the write is durable.
//!
//! None of this is on the medium: any physical block of the block group may have any of its blocks. Homes and order are
//! determined when the block group is loaded; if they are wrong, the placement is worse and nothing else.

mod load;
mod upkeep;

use rustc_hash::FxHashSet;
use smallvec::SmallVec;

use crate::space::bits::Bits;
pub(crate) use crate::space::bits::Run;
pub(crate) use load::Loader;

/// The runs of one request; usually one.
pub(crate) type Runs = SmallVec<[Run; 1]>;

/// Bytes of an extent, and its maximum number of blocks: if blocks are small, so are block groups, which need many
/// completely free clusters.
const EXTENT_BYTES: u32 = 1 << 20;
const EXTENT_BLOCKS_MAX: u32 = 512;
/// A write is long if it has at least one part in this many of an extent. It is kept together if possible, even away
/// from home.
const LONG_PART: u32 = 32;
/// Space is deallocated on the medium in units of this size.
pub(crate) const PUNCH_BYTES: u32 = 64 << 10;
/// No cluster, or no extent.
const NONE: u16 = u16::MAX;

/// The physical blocks of one block group.
pub(crate) struct FreeMap {
    /// Set for physical blocks in use.
    allocated: Bits,
    free: u32,
    extent_blocks: u32,
    cluster_blocks: u32,
    /// The number of physical blocks in use in each cluster.
    used: Vec<u16>,
    /// The extent whose home a cluster is.
    owner: Vec<u16>,
    /// The home of each extent.
    home: Vec<u16>,
    /// The approximate number of fragments of each extent, if above the minimum.
    fragments: Vec<u16>,
    /// The number of completely free clusters that can hold an extent.
    free_clusters: u32,
    /// Where the search for a completely free cluster continues.
    next_free: u32,
    /// The cluster for blocks that do not fit at home.
    overflow: u32,
    /// Units of [`PUNCH_BYTES`] that may take space on the medium although they are free.
    unpunched: Bits,
    unit_blocks: u32,
    /// Physical blocks that more than one entry of the block map names, because of damaged or forged map pages. They
    /// are not freed when such an entry is replaced, because another one may really own them.
    shared: FxHashSet<u32>,
}

impl FreeMap {
    /// The map of a block group with this number of blocks and physical blocks, all of them free.
    pub fn new(blocks: u32, pbns: u32, block_bytes: u32) -> FreeMap {
        let extent_blocks = (EXTENT_BYTES / block_bytes).min(EXTENT_BLOCKS_MAX).min(blocks);
        let extents = blocks.div_ceil(extent_blocks);
        let cluster_blocks = extent_blocks + (pbns - blocks) / 2 / extents;
        let clusters = pbns.div_ceil(cluster_blocks);
        let unit_blocks = PUNCH_BYTES / block_bytes;
        let mut unpunched = Bits::clear(pbns.div_ceil(unit_blocks));
        (0..unpunched.len()).for_each(|unit| unpunched.set(unit));
        let mut map = FreeMap {
            allocated: Bits::clear(pbns),
            free: pbns,
            extent_blocks,
            cluster_blocks,
            used: vec![0; clusters as usize],
            owner: vec![NONE; clusters as usize],
            home: vec![NONE; extents as usize],
            fragments: vec![0; extents as usize],
            free_clusters: 0,
            next_free: 0,
            overflow: 0,
            unpunched,
            unit_blocks,
            shared: FxHashSet::default(),
        };
        map.free_clusters = (0..clusters).filter(|&cluster| map.holds_extent(cluster)).count() as u32;
        map
    }

    /// The number of free physical blocks.
    pub fn free(&self) -> u32 {
        self.free
    }

    /// Blocks of an extent.
    pub fn extent_blocks(&self) -> u32 {
        self.extent_blocks
    }

    /// True if no cluster is completely free for a write of `count` blocks, but one may be after a commit of this
    /// number of map entries.
    pub fn lacks_free_cluster(&self, count: u32, entries: usize) -> bool {
        self.free_clusters == 0 && count * 2 >= self.extent_blocks && entries >= 4 * self.extent_blocks as usize
    }

    /// Takes physical blocks for `count` blocks from index `first` in the block group; `None` if there are too few.
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

    /// Takes a run of free physical blocks for another use than blocks, aligned to `align`. It takes the last ones, so
    /// that it splits no cluster that extents would use earlier.
    pub fn take_from_end(&mut self, count: u32, align: u32) -> Option<Runs> {
        let last = self.allocated.len().checked_sub(count)? / align;
        let start = (0..=last).rev().map(|at| at * align).find(|&start| self.allocated.is_clear((start, count)))?;
        let mut runs = Runs::new();
        self.put((start, count), &mut runs);
        Some(runs)
    }

    /// Takes physical blocks for blocks of one extent.
    fn place(&mut self, extent: u32, offset: u32, count: u32, runs: &mut Runs) {
        let goal = self.home_or_new(extent).map(|cluster| (cluster * self.cluster_blocks + offset, count));
        if let Some(run) = goal.filter(|&run| self.allocated.is_clear(run)) {
            return self.put(run, runs);
        }
        let is_long = count * LONG_PART >= self.extent_blocks;
        if is_long && (offset == 0 || count * 2 >= self.extent_blocks) {
            // The beginning of an extent is rewritten, and its rest will probably follow.
            if let Some(cluster) = self.free_cluster() {
                self.adopt(extent, cluster);
                self.fragments[extent as usize] = u16::from(count != self.extent_blocks);
                return self.put((cluster * self.cluster_blocks + offset, count), runs);
            }
        }
        let together = self.run_at_home(extent, count).or_else(|| self.overflow_run(count).filter(|_| is_long));
        if let Some(run) = together {
            self.add_fragments(extent, 1);
            return self.put(run, runs);
        }
        match is_long {
            true => self.put_fragments(extent, count, runs),
            false => (0..count).for_each(|index| self.put_block(extent, offset + index, runs)),
        }
    }

    /// Takes a physical block for one block, as near to its own position as possible.
    fn put_block(&mut self, extent: u32, offset: u32, runs: &mut Runs) {
        let goal = self.home_of(extent).map(|cluster| cluster * self.cluster_blocks + offset);
        let pbn = match goal.filter(|&pbn| self.allocated.is_clear((pbn, 1))) {
            Some(pbn) => Some((pbn, 1)),
            None => {
                self.add_fragments(extent, 1);
                self.run_at_home(extent, 1).or_else(|| self.overflow_run(1))
            }
        };
        let anywhere = || self.allocated.clear_run(0, self.allocated.len(), 1);
        self.put(pbn.or_else(anywhere).expect("there are free physical blocks, by their count"), runs);
    }

    /// Takes physical blocks for a long write for which no run is long enough: at home, then in clusters that are not a
    /// home, those with most room first, and only then in other homes.
    fn put_fragments(&mut self, extent: u32, count: u32, runs: &mut Runs) {
        let home = self.home_of(extent).map_or(0..0, |cluster| self.cluster_range(cluster));
        let mut mixed: Vec<u32> =
            (0..self.used.len() as u32).filter(|&cluster| self.owner[cluster as usize] == NONE).collect();
        mixed.sort_by_key(|&cluster| self.used[cluster as usize]);
        let mixed = mixed.into_iter().map(|cluster| self.cluster_range(cluster)).collect::<Vec<_>>();
        let mut missing = count;
        for range in std::iter::once(home).chain(mixed).chain(std::iter::once(0..self.allocated.len())) {
            while missing > 0
                && let Some(run) = self.allocated.clear_run(range.start, range.end, missing)
            {
                self.add_fragments(extent, 1);
                self.put(run, runs);
                missing -= run.1;
            }
        }
        debug_assert_eq!(missing, 0, "the count of free physical blocks is right");
    }

    /// A run of free physical blocks in an extent's home, first among the spare ones, which are no block's own
    /// position.
    fn run_at_home(&self, extent: u32, count: u32) -> Option<Run> {
        let range = self.cluster_range(self.home_of(extent)?);
        let spare = (range.start + self.extent_blocks).min(range.end);
        [spare, range.start].into_iter().find_map(|from| self.run_within(from, range.end, count))
    }

    fn run_within(&self, from: u32, end: u32, count: u32) -> Option<Run> {
        self.allocated.clear_runs(from, end, count).find(|&(_, len)| len == count)
    }

    /// A run of free physical blocks away from home, if possible in a cluster that already has such blocks, so that it
    /// splits no free one.
    fn overflow_run(&mut self, count: u32) -> Option<Run> {
        let within = |map: &FreeMap, cluster: u32| {
            let range = map.cluster_range(cluster);
            map.run_within(range.start, range.end, count)
        };
        if let Some(run) = within(self, self.overflow).filter(|_| self.takes_overflow(self.overflow)) {
            return Some(run);
        }
        let clusters = 0..self.used.len() as u32;
        let mixed = clusters.filter(|&cluster| self.takes_overflow(cluster));
        let found = mixed.filter_map(|cluster| Some((cluster, within(self, cluster)?))).next();
        let (cluster, run) = match found {
            Some(found) => found,
            None => {
                let cluster = self.free_cluster().or_else(|| self.short_cluster())?;
                (cluster, within(self, cluster)?)
            }
        };
        self.overflow = cluster;
        Some(run)
    }

    /// True if a cluster is no home, is partly in use, and is not about to become free: one whose extent was just
    /// rewritten elsewhere is nearly full.
    fn takes_overflow(&self, cluster: u32) -> bool {
        let (used, range) = (u32::from(self.used[cluster as usize]), self.cluster_range(cluster));
        let is_new_home_elsewhere = used * 8 > (range.end - range.start) * 7 && cluster != self.overflow;
        self.owner[cluster as usize] == NONE && used > 0 && !is_new_home_elsewhere
    }

    /// The last cluster, if it is too short for an extent.
    fn short_cluster(&self) -> Option<u32> {
        let last = self.used.len() as u32 - 1;
        (!self.holds_extent(last)).then_some(last)
    }

    fn home_of(&self, extent: u32) -> Option<u32> {
        Some(self.home[extent as usize]).filter(|&cluster| cluster != NONE).map(u32::from)
    }

    /// The home of an extent. Without one, it gets the cluster with its own number, or else any completely free one.
    fn home_or_new(&mut self, extent: u32) -> Option<u32> {
        if let Some(cluster) = self.home_of(extent) {
            return Some(cluster);
        }
        let own = Some(extent).filter(|&cluster| self.used[cluster as usize] == 0 && self.holds_extent(cluster));
        let cluster = own.or_else(|| self.free_cluster())?;
        self.adopt(extent, cluster);
        Some(cluster)
    }

    /// A completely free cluster. The search continues after the last one found, so extents that are written in
    /// sequence are stored in sequence.
    fn free_cluster(&mut self) -> Option<u32> {
        let clusters = self.used.len() as u32;
        let mut order = (self.next_free..clusters).chain(0..self.next_free).filter(|_| self.free_clusters > 0);
        let cluster = order.find(|&cluster| self.used[cluster as usize] == 0 && self.holds_extent(cluster))?;
        self.next_free = (cluster + 1) % clusters;
        Some(cluster)
    }

    /// Makes a cluster the home of an extent.
    fn adopt(&mut self, extent: u32, cluster: u32) {
        if let Some(before) = self.home_of(extent) {
            self.owner[before as usize] = NONE;
        }
        self.home[extent as usize] = cluster as u16;
        self.owner[cluster as usize] = extent as u16;
    }

    fn cluster_range(&self, cluster: u32) -> std::ops::Range<u32> {
        let start = cluster * self.cluster_blocks;
        start..(start + self.cluster_blocks).min(self.allocated.len())
    }

    fn holds_extent(&self, cluster: u32) -> bool {
        self.cluster_range(cluster).len() as u32 >= self.extent_blocks
    }

    fn add_fragments(&mut self, extent: u32, more: u16) {
        let fragments = &mut self.fragments[extent as usize];
        *fragments = fragments.saturating_add(more);
    }

    /// Takes a run of free physical blocks.
    fn put(&mut self, run: Run, runs: &mut Runs) {
        (run.0..run.0 + run.1).for_each(|pbn| self.occupy(pbn));
        match runs.last_mut() {
            Some((start, len)) if *start + *len == run.0 => *len += run.1,
            _ => runs.push(run),
        }
    }

    /// Marks a physical block as in use; has no effect if it is already. Physical blocks past the end come from damaged
    /// map entries and are ignored.
    fn occupy(&mut self, pbn: u32) {
        if pbn < self.allocated.len() && !self.allocated.get(pbn) {
            self.mark(pbn);
            self.unpunched.set(pbn / self.unit_blocks);
        }
    }

    fn mark(&mut self, pbn: u32) {
        let cluster = pbn / self.cluster_blocks;
        if self.used[cluster as usize] == 0 && self.holds_extent(cluster) {
            self.free_clusters -= 1;
        }
        self.allocated.set(pbn);
        self.free -= 1;
        self.used[cluster as usize] += 1;
    }

    /// Marks a run of physical blocks as free, except those that another map entry may name.
    pub fn release(&mut self, (start, count): Run) {
        if !self.shared.is_empty() && count > 1 {
            return (start..start + count).for_each(|pbn| self.release((pbn, 1)));
        }
        if self.shared.contains(&start) {
            return;
        }
        let (mut at, end) = (start, (start + count).min(self.allocated.len()));
        while at < end {
            let cluster = at / self.cluster_blocks;
            let here = (self.cluster_range(cluster).end - at).min(end - at);
            self.release_in(cluster, (at, here));
            at += here;
        }
    }

    /// The same for physical blocks in one cluster, none of which another map entry may name.
    fn release_in(&mut self, cluster: u32, run: Run) {
        let freed = self.allocated.unset_run(run);
        debug_assert_eq!(freed, run.1, "a physical block is released once");
        self.free += freed;
        self.used[cluster as usize] -= freed as u16;
        if freed == 0 || self.used[cluster as usize] > 0 {
            return;
        }
        if self.holds_extent(cluster) {
            self.free_clusters += 1;
        }
        let owner = std::mem::replace(&mut self.owner[cluster as usize], NONE);
        if owner != NONE {
            self.home[owner as usize] = NONE;
        }
    }
}

#[cfg(test)]
mod tests;
