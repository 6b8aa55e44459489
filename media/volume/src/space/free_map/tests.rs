//! The placement of blocks of 4 KiB.

use super::*;

/// A full block group: 1024 extents of 256 blocks, and clusters of 264 physical blocks, 31 of which are no home.
fn full() -> FreeMap {
    FreeMap::new(1 << 18, (1 << 18) + (1 << 14), 4096)
}

/// Blocks as a volume would track them: the physical block of each, and those that the next commit frees.
struct Blocks {
    map: FreeMap,
    pbn: Vec<Option<u32>>,
    deallocated: Vec<u32>,
    state: u64,
}

impl Blocks {
    fn new(map: FreeMap, blocks: u32) -> Blocks {
        Blocks { map, pbn: vec![None; blocks as usize], deallocated: Vec::new(), state: 1 }
    }

    fn write(&mut self, first: u32, count: u32) {
        let runs = self.map.take(first, count).expect("there is room");
        let pbns = runs.iter().flat_map(|&(start, len)| start..start + len);
        for (block, pbn) in (first..first + count).zip(pbns) {
            self.deallocated.extend(self.pbn[block as usize].replace(pbn));
        }
    }

    fn commit(&mut self) {
        std::mem::take(&mut self.deallocated).into_iter().for_each(|pbn| self.map.release((pbn, 1)));
    }

    fn random(&mut self, below: u32) -> u32 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        (self.state % u64::from(below)) as u32
    }

    /// The physical blocks from the first to the last of an extent, without this number of outliers.
    fn span(&self, extent: u32, outliers: usize) -> u32 {
        let size = self.map.extent_blocks as usize;
        let mut pbns: Vec<u32> = self.pbn[extent as usize * size..][..size].iter().flatten().copied().collect();
        pbns.sort_unstable();
        (0..=outliers).map(|low| pbns[pbns.len() - 1 - outliers + low] - pbns[low] + 1).min().unwrap()
    }

    /// The number of blocks that are not in the home of their extent.
    fn misplaced(&self) -> usize {
        let away = |(block, pbn): (usize, &Option<u32>)| {
            pbn.is_some_and(|pbn| !self.map.is_home(block as u32 / self.map.extent_blocks, pbn))
        };
        self.pbn.iter().enumerate().filter(|&pair| away(pair)).count()
    }

    fn fill(&mut self) {
        for extent in 0..self.map.home.len() as u32 {
            self.write(extent * self.map.extent_blocks, self.map.extent_blocks);
        }
    }
}

#[test]
fn extents_of_a_new_block_group_lie_one_after_the_other_each_in_its_group() {
    let mut blocks = Blocks::new(full(), 1 << 18);
    assert_eq!((blocks.map.cluster_blocks, blocks.map.used.len(), blocks.map.free_clusters), (264, 1056, 1055));
    blocks.fill();
    assert!((0..1 << 18).all(|block| blocks.pbn[block as usize] == Some(block / 256 * 264 + block % 256)));
    assert_eq!((blocks.map.free_clusters, blocks.map.free()), (31, 1 << 14));
    assert_eq!(blocks.map.find_fragmented(0), None);
}

#[test]
fn random_overwrites_leave_extents_together() {
    let mut blocks = Blocks::new(full(), 1 << 18);
    blocks.fill();
    for round in 0..3 << 18 {
        let block = blocks.random(1 << 18);
        blocks.write(block, 1);
        if round % 4096 == 0 {
            blocks.commit();
        }
    }
    blocks.commit();
    assert!(blocks.misplaced() < 3000, "{} of 262144 blocks are not at home", blocks.misplaced());
    assert!(blocks.map.free_clusters >= 16, "{} clusters are free", blocks.map.free_clusters);
    let spread = (0..1024).filter(|&extent| blocks.span(extent, 6) > 264).count();
    assert!(spread < 50, "{spread} of 1024 extents have more than six blocks away from home");
    assert!(blocks.map.find_fragmented(0).is_some());
    // Extents that are written as a whole are in one piece, however long this goes on.
    for extent in 0..4096 {
        blocks.write(extent % 1024 * 256, 256);
        if extent % 8 == 7 {
            blocks.commit();
        }
    }
    assert!((0..1024).all(|extent| blocks.span(extent, 0) == 256), "every extent is one run");
    assert_eq!((blocks.misplaced(), blocks.map.find_fragmented(0)), (0, None));
    blocks.commit();
    assert_eq!(blocks.map.free_clusters, 31);
}

#[test]
fn writes_one_after_the_other_that_are_shorter_than_an_extent_end_up_in_one_run_as_well() {
    let mut blocks = Blocks::new(full(), 1 << 18);
    blocks.fill();
    for at in 0..3 * (1 << 18) / 16 {
        blocks.write(at * 16 % (1 << 18), 16);
        if at % 64 == 63 {
            blocks.commit();
        }
    }
    assert!((0..1024).all(|extent| blocks.span(extent, 0) == 256));
}

#[test]
fn a_block_group_is_used_up_to_its_last_physical_block_whatever_its_shape() {
    for (count, block_bytes) in [(1, 4096), (7, 512), (16, 4096), (257, 4096), (700, 4096), (5000, 512)] {
        let spare = count.max(16);
        let mut map = FreeMap::new(count, count + spare, block_bytes);
        let mut taken: Vec<u32> = Vec::new();
        let mut lengths = [1, 5, 40, 300].into_iter().cycle();
        while map.free() > 0 {
            let length = lengths.next().unwrap().min(map.free()).min(count);
            let runs = map.take(count - length, length).unwrap();
            taken.extend(runs.iter().flat_map(|&(start, len)| start..start + len));
        }
        assert!(map.take(0, 1).is_none());
        taken.sort_unstable();
        assert!(taken.iter().copied().eq(0..count + spare), "every physical block once: {count} {block_bytes}");
        taken.into_iter().for_each(|pbn| map.release((pbn, 1)));
        assert_eq!(map.free(), count + spare);
        assert!(map.home.iter().chain(&map.owner).all(|&of| of == NONE));
    }
}

#[test]
fn a_block_group_that_is_loaded_again_has_its_homes() {
    let mut blocks = Blocks::new(full(), 1 << 18);
    blocks.fill();
    for _ in 0..100_000 {
        let block = blocks.random(1 << 18);
        blocks.write(block, 1);
        blocks.commit();
    }
    let mut loader = Loader::new(full());
    let found = blocks.pbn.iter().enumerate().filter_map(|(block, pbn)| Some((block as u32, (*pbn)?)));
    found.for_each(|(block, pbn)| loader.mark_used(block, pbn));
    let loaded = loader.finish();
    assert_eq!((loaded.free, loaded.free_clusters), (blocks.map.free, blocks.map.free_clusters));
    assert_eq!((&loaded.used, &loaded.home), (&blocks.map.used, &blocks.map.home));
    assert_eq!(loaded.find_fragmented(0), Some(0));
}

#[test]
fn a_physical_block_that_two_map_entries_name_is_never_free_again() {
    let mut loader = Loader::new(FreeMap::new(8, 16, 4096));
    [(1, 1), (2, 2), (3, 2), (4, 99)].into_iter().for_each(|(block, pbn)| loader.mark_used(block, pbn));
    let mut map = loader.finish();
    assert_eq!(map.free(), 14);
    [(1, 1), (2, 1), (2, 1)].into_iter().for_each(|run| map.release(run));
    assert_eq!(map.free(), 15);
    assert!(map.allocated.get(2));
    let mut loader = Loader::new(FreeMap::new(8, 16, 4096));
    [(0, 0), (1, 1), (2, 2), (3, 2), (4, 3)].into_iter().for_each(|(block, pbn)| loader.mark_used(block, pbn));
    let mut map = loader.finish();
    map.release((0, 4));
    assert!(map.free() == 15 && map.allocated.get(2), "nor in a run");
}

#[test]
fn a_run_is_released_as_its_physical_blocks_one_by_one_are() {
    let runs = [(0, 264), (300, 1000), (1320, 1), (2000, 5000), (1321, 679), (264, 36), (270_000, 8528)];
    let [mut whole, mut single] = [full(), full()].map(|mut map| {
        (0..map.allocated.len()).for_each(|pbn| map.occupy(pbn));
        (0..1024).for_each(|extent| map.adopt(extent, extent));
        map
    });
    for run in runs {
        whole.release(run);
        (run.0..run.0 + run.1).for_each(|pbn| single.release((pbn, 1)));
        assert_eq!((whole.free, whole.free_clusters), (single.free, single.free_clusters), "{run:?}");
        assert_eq!((&whole.used, &whole.home, &whole.owner), (&single.used, &single.home, &single.owner), "{run:?}");
        assert!(whole.allocated.is_clear(run) && whole.free < whole.allocated.len());
    }
    assert_eq!(whole.free, runs.iter().map(|run| run.1).sum::<u32>());
    let kept: Vec<usize> = (0..27).filter(|extent| whole.home[*extent] != NONE).collect();
    assert_eq!(kept, [4, 26], "clusters that are in use in part stay homes");
}

#[test]
fn an_extent_is_brought_to_a_new_home_or_its_strays_to_the_old_one() {
    let mut blocks = Blocks::new(full(), 1 << 18);
    blocks.fill();
    let offsets: Vec<u32> = (0..100).chain(120..256).collect();
    let runs = blocks.map.take_in_free_cluster(7, &offsets).unwrap();
    assert_eq!(runs.iter().map(|run| run.1).collect::<Vec<_>>(), [100, 136], "one run where blocks follow each other");
    assert!(runs.iter().all(|run| blocks.map.is_home(7, run.0)));
    assert_eq!(blocks.map.take_at_home(7, &[100, 255, 9]).unwrap().iter().map(|run| run.1).sum::<u32>(), 3);
    assert!(blocks.map.take_at_home(8, &(0..9).collect::<Vec<_>>()).is_none(), "eight physical blocks are free there");
}

#[test]
fn free_units_are_punched_once_and_a_unit_in_use_never() {
    let mut map = FreeMap::new(256, 512, 4096);
    assert_eq!(map.take(0, 256).unwrap().as_slice(), [(0, 256)]);
    assert_eq!(map.take_unpunched(0, 4), Some((256, 64)), "what an earlier life left there is not known");
    assert_eq!(map.take_unpunched(20, 100), Some((320, 192)));
    assert_eq!((map.take_unpunched(0, 100), map.free()), (None, 0));
    map.release((256, 256));
    assert_eq!(map.take_unpunched(0, 100), None, "it takes no space any more");
    map.release((17, 31));
    assert_eq!(map.take_unpunched_unit(1), None, "one of its physical blocks is in use");
    assert_eq!(map.take_unpunched(0, 100), Some((32, 16)));
}
