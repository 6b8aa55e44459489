//! Random allocations and frees in groups, compared with a list of bits, and with a tree to which only the changes are
//! applied.

use super::*;
use crate::item_changes::ItemChange;

const START: u64 = 22 << 20;

/// A group, the tree as changes made it, and which sectors are free.
struct Proof {
    space: GroupFreeSpace,
    tree: BTreeMap<Key, Vec<u8>>,
    free: Vec<bool>,
    sector_bytes: u32,
    conversions: [usize; 2],
}

impl Proof {
    fn new(bytes: u64, sector_bytes: u32) -> Proof {
        let mut changes = ItemChanges::new();
        let space = GroupFreeSpace::create(START, bytes, sector_bytes, &mut changes).unwrap();
        let free = vec![true; (bytes / u64::from(sector_bytes)) as usize];
        let mut proof = Proof { space, tree: BTreeMap::new(), free, sector_bytes, conversions: [0; 2] };
        proof.apply(changes);
        proof
    }

    /// Applies changes, each of which must fit the tree and change something.
    fn apply(&mut self, changes: ItemChanges) {
        for (key, change) in changes {
            match change {
                ItemChange::Insert(data) => assert_eq!(self.tree.insert(key, data), None, "{key}"),
                ItemChange::Replace(data) => {
                    let old = self.tree.insert(key, data.clone());
                    assert!(old.is_some_and(|old| old != data), "{key}");
                }
                ItemChange::Delete => assert!(self.tree.remove(&key).is_some(), "{key}"),
            }
        }
    }

    fn address(&self, sector: usize) -> u64 {
        START + sector as u64 * u64::from(self.sector_bytes)
    }

    /// Allocates or frees sectors, if they are all the other way; otherwise it must be refused.
    fn change(&mut self, sectors: Range<usize>, is_add: bool) {
        let (start, bytes) = (self.address(sectors.start), self.address(sectors.len()) - START);
        let (mut changes, was_bitmaps) = (ItemChanges::new(), self.space.is_bitmaps());
        let result = match is_add {
            true => self.space.add(start, bytes, &mut changes),
            false => self.space.remove(start, bytes, &mut changes),
        };
        if self.free[sectors.clone()].contains(&is_add) {
            let refused = match is_add {
                true => FreeSpaceError::Free { start, bytes },
                false => FreeSpaceError::InUse { start, bytes },
            };
            assert_eq!((result, changes), (Err(refused), ItemChanges::new()));
            return;
        }
        result.unwrap();
        self.free[sectors.clone()].fill(is_add);
        if was_bitmaps == self.space.is_bitmaps() {
            let parts = (sectors.end - 1) / 2048 - sectors.start / 2048 + 1;
            assert!(changes.len() <= if was_bitmaps { parts + 1 } else { 4 }, "{}", changes.len());
        } else {
            self.conversions[usize::from(was_bitmaps)] += 1;
        }
        self.apply(changes);
        let info = self.tree.first_key_value().unwrap().1;
        let count = u64::from(u32::from_le_bytes(info[..4].try_into().unwrap()));
        assert_eq!((count, self.space.is_bitmaps()), (self.space.extent_count(), info[4] == 1));
    }

    /// Runs, as the list of bits has them.
    fn runs(&self) -> Vec<Range<u64>> {
        let mut runs: Vec<Range<u64>> = Vec::new();
        for sector in (0..self.free.len()).filter(|sector| self.free[*sector]) {
            match runs.last_mut() {
                Some(run) if run.end == self.address(sector) => run.end = self.address(sector + 1),
                _ => runs.push(self.address(sector)..self.address(sector + 1)),
            }
        }
        runs
    }

    /// The tree has what is free, in the form that it says; the group loads from it.
    fn assert_all(&self) {
        let runs = self.runs();
        let items: Vec<_> = self.tree.iter().map(|(key, data)| (*key, data.clone())).collect();
        assert_eq!((self.space.items(), self.space.extent_count()), (items, runs.len() as u64));
        let load = GroupFreeSpace::load(self.sector_bytes, self.tree.iter().map(|(key, data)| (*key, &data[..])));
        assert_eq!(load.as_ref(), Ok(&self.space));
        assert_eq!(self.space.runs().collect::<Vec<_>>(), runs);
        let mut from_items = vec![false; self.free.len()];
        for (key, data) in self.tree.iter().skip(1) {
            let at = ((key.objectid - START) / u64::from(self.sector_bytes)) as usize;
            for sector in 0..(key.offset / u64::from(self.sector_bytes)) as usize {
                from_items[at + sector] = data.is_empty() || data[sector / 8] >> (sector % 8) & 1 == 1;
            }
        }
        assert!(from_items == self.free);
    }
}

/// Small changes make many runs, long ones join them again; both take turns.
fn random_changes(seed: u64, bytes: u64, sector_bytes: u32, changes: usize) -> [usize; 2] {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut proof = Proof::new(bytes, sector_bytes);
    let sectors = proof.free.len();
    let turn = (changes / 4).max(1);
    for change in 0..changes {
        let start = random.usize(..sectors);
        let is_splitting = (change / turn).is_multiple_of(2);
        let most = if is_splitting { 3 } else { sectors / (turn / 8).max(8) + 2 };
        let mut end = (start + random.usize(1..=most)).min(sectors);
        let is_add = if is_splitting { random.u8(..8) == 0 } else { random.bool() };
        if !is_splitting && random.u8(..4) > 0 {
            // All of a longer range is freed, run by run.
            let used: Vec<_> = (start..end).filter(|sector| !proof.free[*sector]).collect();
            used.chunk_by(|a, b| a + 1 == *b).for_each(|run| proof.change(run[0]..run[run.len() - 1] + 1, true));
        } else {
            // Mostly what can be done; sometimes what cannot.
            if random.u8(..10) > 0 && proof.free[start] != is_add {
                end = start + (start..end).take_while(|sector| proof.free[*sector] != is_add).count();
            }
            proof.change(start..end, is_add);
        }
        if change.is_multiple_of((changes / 30).max(1)) {
            proof.assert_all();
        }
    }
    proof.assert_all();
    proof.conversions
}

#[test]
fn groups_of_all_sizes_are_their_bits_in_both_forms() {
    let mebibyte = 1 << 20;
    for (seed, mebibytes, sector_bytes, changes) in
        [(1, 8, 4096, 4000), (2, 12, 4096, 4000), (3, 64, 4096, 6000), (4, 256, 4096, 8000), (5, 64, 65_536, 2000)]
    {
        let conversions = random_changes(seed, mebibytes * mebibyte, sector_bytes, changes);
        println!("{mebibytes} MiB: to bitmaps and back {conversions:?}");
        assert!(conversions[0] > 0, "{mebibytes}");
    }
    let conversions = random_changes(6, 1024 * mebibyte, 4096, 30_000);
    println!("1 GiB: to bitmaps and back {conversions:?}");
    assert!(conversions[0] > 0 && conversions[1] > 0);
}

#[test]
fn limits_are_those_of_linux() {
    let limits = |mebibytes: u64| Group::new(0, mebibytes << 20, 4096).unwrap().limits();
    assert_eq!((limits(8), limits(64), limits(1024)), ((0, 11), (0, 89), (1338, 1438)));
    assert_eq!((limits(9), limits(1), limits(10 << 10)), ((0, 22), (0, 11), (14_287, 14_387)));
}

#[test]
fn a_group_changes_its_form_above_one_limit_and_below_the_other() {
    let mut proof = Proof::new(1 << 30, 4096);
    // Every second sector of the first part of the group.
    let take = |proof: &mut Proof, run: usize| proof.change(2 * run + 1..2 * run + 2, false);
    (0..1437).for_each(|run| take(&mut proof, run));
    assert_eq!((proof.space.extent_count(), proof.space.is_bitmaps()), (1438, false));
    take(&mut proof, 1437);
    assert_eq!((proof.space.extent_count(), proof.space.is_bitmaps(), proof.tree.len()), (1439, true, 129));
    proof.assert_all();
    let give = |proof: &mut Proof, run: usize| proof.change(2 * run + 1..2 * run + 2, true);
    (1337..1438).rev().for_each(|run| give(&mut proof, run));
    assert_eq!((proof.space.extent_count(), proof.space.is_bitmaps()), (1338, true));
    give(&mut proof, 1336);
    assert_eq!((proof.space.extent_count(), proof.space.is_bitmaps(), proof.tree.len()), (1337, false, 1338));
    proof.assert_all();
    assert_eq!(proof.conversions, [1, 1]);
}

#[test]
fn a_range_over_a_border_of_bitmaps_changes_both_and_one_run_stays_one() {
    let mut proof = Proof::new(24 << 20, 4096);
    (0..40).for_each(|run| proof.change(10 + 2 * run..11 + 2 * run, false));
    assert!(proof.space.is_bitmaps());
    assert_eq!(proof.tree.len(), 4);
    for sectors in [2047..2049, 2040..4100, 4096..6144, 2048..4096] {
        let runs = proof.space.extent_count();
        proof.change(sectors.clone(), false);
        assert_eq!(proof.space.extent_count(), runs + u64::from(sectors.end < 6144));
        proof.assert_all();
        let next = proof.space.next_free(proof.address(sectors.start)).map(|run| run.start);
        assert_eq!(next, (sectors.end < 6144).then(|| proof.address(sectors.end)));
        proof.change(sectors, true);
        assert_eq!(proof.space.extent_count(), runs);
        proof.assert_all();
    }
}

#[test]
fn changes_of_several_operations_join_and_a_group_goes_with_all_its_items() {
    let mut proof = Proof::new(8 << 20, 4096);
    let mut changes = ItemChanges::new();
    for run in 0..20 {
        proof.space.remove(proof.address(2 * run + 1), 4096, &mut changes).unwrap();
        proof.free[2 * run + 1] = false;
    }
    // The run of the whole group goes, the bitmap comes, and the info has another count.
    assert_eq!(changes.len(), 3);
    proof.apply(changes);
    proof.assert_all();
    let mut changes = ItemChanges::new();
    proof.space.clone().delete(&mut changes);
    proof.apply(changes);
    assert!(proof.tree.is_empty());
}

#[test]
fn items_that_make_no_group_are_refused() {
    let mut proof = Proof::new(16 << 20, 4096);
    proof.change(5..6, false);
    let good = proof.space.items();
    let load = |items: &[(Key, Vec<u8>)]| {
        GroupFreeSpace::load(4096, items.iter().map(|(key, data)| (*key, &data[..]))).map(|space| space.items())
    };
    assert_eq!(load(&good), Ok(good.clone()));
    let with = |slot: usize, key: Key| {
        let mut items = good.clone();
        items[slot].0 = key;
        load(&items)
    };
    let run = |start: u64, bytes| Key::new(start, ItemType::FREE_SPACE_EXTENT, bytes);
    for key in [
        run(START, 4096 * 6),
        run(START - 4096, 4096),
        run(START + 1, 4096),
        run(START, 0),
        run(START, 17 << 20),
        run(u64::MAX - 4095, 4096),
        Key::new(START, ItemType::FREE_SPACE_BITMAP, 8 << 20),
    ] {
        assert!(with(1, key).is_err(), "{key}");
    }
    assert_eq!(load(&good[..2]), Err(FreeSpaceError::Count { stored: 2, found: 1 }));
    assert!(load(&[]).is_err() && load(&good[1..]).is_err());
    let info = |start, bytes| with(0, Key::new(start, ItemType::FREE_SPACE_INFO, bytes));
    assert!(info(START + 1, 16 << 20).is_err() && info(START, 0).is_err() && info(START, 1 << 50).is_err());

    (0..30).for_each(|run| proof.change(10 + 2 * run..11 + 2 * run, false));
    let bitmaps = proof.space.items();
    assert_eq!((bitmaps.len(), load(&bitmaps)), (3, Ok(bitmaps.clone())));
    assert!(load(&bitmaps[..2]).is_err());
    assert!(load(&[&bitmaps[..], &good[1..2]].concat()).is_err());
    let swapped = [bitmaps[0].clone(), bitmaps[2].clone(), bitmaps[1].clone()];
    assert!(load(&swapped).is_err());
    let mut short = bitmaps.clone();
    short[1].1.pop();
    assert_eq!(load(&short), Err(FreeSpaceError::Item(short[1].0)));

    let (mut space, mut changes) = (proof.space.clone(), ItemChanges::new());
    for (start, bytes) in
        [(START - 4096, 4096), (START, 0), (START, 100), (START + (16 << 20), 4096), (START, u64::MAX)]
    {
        let range = Err(FreeSpaceError::Range { start, bytes });
        assert_eq!((space.add(start, bytes, &mut changes), space.remove(start, bytes, &mut changes)), (range, range));
    }
    assert_eq!((space, changes), (proof.space, ItemChanges::new()));
}
