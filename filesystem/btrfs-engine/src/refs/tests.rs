//! Random transactions, compared with a multiset of references for each extent.

use std::collections::{BTreeSet, HashMap};

use super::*;
use sealblock_btrfs_format::items::extent::TreeBlockInfo;
use sealblock_btrfs_format::items::extent_buf::decode_keyed;

/// Small nodes, so that references soon get their own items.
const NODE_BYTES: u32 = 4096;

type Tree = BTreeMap<Key, Vec<u8>>;

fn node(bytenr: u64, level: u8) -> NewExtent {
    let key = Key::new(bytenr, ItemType::METADATA_ITEM, u64::from(level));
    NewExtent { key, item: ExtentItemBuf::new(7, ExtentFlags::TREE_BLOCK, None) }
}

fn data(bytenr: u64) -> NewExtent {
    let key = Key::new(bytenr, ItemType::EXTENT_ITEM, 8192);
    NewExtent { key, item: ExtentItemBuf::new(7, ExtentFlags::DATA, None) }
}

fn of_tree(root: u64) -> ExtentRef {
    ExtentRef::TreeBlock { root }
}

/// What an extent should be.
struct Extent {
    key: Key,
    flags: ExtentFlags,
    refs: HashMap<ExtentRef, u32>,
    /// Nothing was written to it, and its item was not inserted.
    is_fresh: bool,
}

/// The filesystem as it should be, and as the tree has it with the delayed references.
struct Proof {
    random: fastrand::Rng,
    tree: Tree,
    delayed: DelayedRefs,
    extents: BTreeMap<u64, Extent>,
    /// Space that is free when the transaction is durable.
    pinned: BTreeSet<u64>,
    /// Extents that were cancelled, that became free later, that lived on after a run.
    done: [usize; 3],
}

impl Proof {
    fn allocate(&mut self) {
        let bytenr = self.random.u64(1..40) << 20;
        if self.extents.contains_key(&bytenr) || self.pinned.contains(&bytenr) {
            return;
        }
        let new = match self.random.u8(..4) {
            0 => data(bytenr),
            1 => {
                // Without SKINNY_METADATA.
                let item = ExtentItemBuf::new(7, ExtentFlags::TREE_BLOCK, Some(TreeBlockInfo::new(Key::MIN, 2)));
                NewExtent { key: Key::new(bytenr, ItemType::EXTENT_ITEM, u64::from(NODE_BYTES)), item }
            }
            _ => node(bytenr, self.random.u8(..8)),
        };
        let extent = Extent { key: new.key, flags: new.item.flags, refs: HashMap::new(), is_fresh: true };
        self.delayed.insert(new.clone()).unwrap();
        assert_eq!(self.delayed.insert(new), Err(RefsError::Exists(bytenr)));
        self.extents.insert(bytenr, extent);
        self.add(bytenr);
    }

    fn add(&mut self, bytenr: u64) {
        let extent = self.extents.get_mut(&bytenr).unwrap();
        let is_node = extent.flags.contains(ExtentFlags::TREE_BLOCK);
        let number = self.random.u64(1..60);
        let what = match (is_node, self.random.bool()) {
            (true, true) => of_tree(255 + number),
            (true, false) => ExtentRef::SharedBlock { parent: number << 14 },
            (false, true) => ExtentRef::Data { root: 5, objectid: 256 + number / 4, offset: (number % 4) << 12 },
            (false, false) => ExtentRef::SharedData { parent: number << 14 },
        };
        let count = extent.refs.entry(what).or_default();
        let by = match (is_node, *count) {
            (true, 0) => 1,
            (true, _) => return,
            _ => self.random.u32(1..4),
        };
        *count += by;
        self.delayed.add(bytenr, what, by).unwrap();
    }

    fn drop_some(&mut self, bytenr: u64) {
        let extent = self.extents.get_mut(&bytenr).unwrap();
        let mut all: Vec<_> = extent.refs.iter().map(|(what, count)| (*what, *count)).collect();
        all.sort();
        let (what, count) = all[self.random.usize(..all.len())];
        let by = self.random.u32(1..=count);
        self.delayed.drop(bytenr, what, by).unwrap();
        extent.refs.insert(what, count - by);
        extent.refs.retain(|_, count| *count > 0);
        if !extent.refs.is_empty() {
            return;
        }
        // The last reference is gone. Only a fresh extent whose flags did not change leaves nothing.
        let extent = self.extents.remove(&bytenr).unwrap();
        let is_free = self.delayed.cancel(bytenr);
        let is_full = extent.flags.contains(ExtentFlags::FULL_BACKREF);
        assert_eq!(is_free, extent.is_fresh && !is_full, "{bytenr}");
        if is_free {
            assert_eq!((self.delayed.net(bytenr), self.delayed.take(bytenr)), (0, None));
            self.done[0] += 1;
        } else {
            self.pinned.insert(bytenr);
        }
    }

    /// Runs the head of one extent.
    fn run(&mut self, bytenr: u64) {
        let head = self.delayed.take(bytenr).unwrap();
        let fate = head.run(bytenr, &mut self.tree, NODE_BYTES).unwrap();
        match self.extents.get_mut(&bytenr) {
            Some(extent) => {
                assert!(matches!(fate, Fate::Lives(_)));
                extent.is_fresh = false;
                self.done[2] += 1;
            }
            None => {
                assert!(matches!(fate, Fate::Free { key, .. } if key.objectid == bytenr));
                assert!(self.pinned.contains(&bytenr));
                self.done[1] += 1;
            }
        }
    }

    fn step(&mut self) {
        let bytenrs: Vec<_> = self.extents.keys().copied().collect();
        if bytenrs.is_empty() || self.random.u8(..8) == 0 {
            return self.allocate();
        }
        let bytenr = bytenrs[self.random.usize(..bytenrs.len())];
        match self.random.u8(..32) {
            0..16 => self.add(bytenr),
            16..30 => self.drop_some(bytenr),
            30 => {
                let extent = self.extents.get_mut(&bytenr).unwrap();
                if extent.flags.contains(ExtentFlags::TREE_BLOCK) {
                    extent.flags |= ExtentFlags::FULL_BACKREF;
                    self.delayed.set_flags(bytenr, ExtentFlags::FULL_BACKREF);
                    assert!(self.delayed.flags(bytenr).contains(ExtentFlags::FULL_BACKREF));
                }
            }
            // In the background, before the commit.
            _ => {
                if let Some(bytenr) = self.delayed.next(bytenr) {
                    self.run(bytenr);
                }
            }
        }
        // The item's count and the delayed ones are the references that there are, at any time.
        if let Some(extent) = self.extents.get(&bytenr) {
            let there = old_item(bytenr, &self.tree).unwrap().map_or(0, |(_, item)| item.refs() as i64);
            let all: i64 = extent.refs.values().map(|count| i64::from(*count)).sum();
            assert_eq!(there + self.delayed.net(bytenr), all);
        }
    }

    fn commit(&mut self) {
        while let Some(bytenr) = self.delayed.next(0) {
            self.run(bytenr);
        }
        assert!(self.delayed.is_empty());
        self.pinned.clear();
        let mut found: BTreeMap<u64, (u64, HashMap<ExtentRef, u32>)> = BTreeMap::new();
        for (key, data) in &self.tree {
            if let Some((what, count)) = decode_keyed(*key, data).unwrap() {
                let extent = found.get_mut(&key.objectid).expect("the extent's item comes first");
                assert_eq!(extent.1.insert(what, count), None, "{key}");
                continue;
            }
            let item = ExtentItemBuf::decode(key.item_type, data).unwrap();
            let extent = &self.extents[&key.objectid];
            assert_eq!((*key, item.flags), (extent.key, extent.flags));
            let new = (item.refs(), item.inline().iter().copied().collect());
            assert!(found.insert(key.objectid, new).is_none(), "two items of {key}");
        }
        assert_eq!(found.len(), self.extents.len());
        for (bytenr, extent) in &self.extents {
            let (refs, all) = &found[bytenr];
            assert_eq!(all, &extent.refs);
            assert_eq!(*refs, extent.refs.values().map(|count| u64::from(*count)).sum::<u64>());
        }
    }
}

#[test]
fn transactions_leave_the_references_of_a_multiset() {
    for seed in 1..=8 {
        let mut proof = Proof {
            random: fastrand::Rng::with_seed(seed),
            tree: Tree::default(),
            delayed: DelayedRefs::new(),
            extents: BTreeMap::new(),
            pinned: BTreeSet::new(),
            done: [0; 3],
        };
        for _ in 0..60 {
            (0..proof.random.usize(..500)).for_each(|_| proof.step());
            proof.commit();
        }
        let keyed = proof.tree.keys().filter(|key| key.item_type >= ItemType::TREE_BLOCK_REF).count();
        println!("cancelled, freed, lived: {:?}; {keyed} with keys at the end", proof.done);
        assert!(proof.done.iter().all(|count| *count > 20) && keyed > 20);
    }
}

#[test]
fn an_extent_whose_only_reference_changes_never_goes() {
    let (mut tree, mut delayed, bytenr) = (Tree::default(), DelayedRefs::new(), 1 << 20);
    delayed.insert(node(bytenr, 1)).unwrap();
    // A reference with a higher number, so that it would come second.
    delayed.add(bytenr, of_tree(256), 1).unwrap();
    delayed.take(bytenr).unwrap().run(bytenr, &mut tree, NODE_BYTES).unwrap();
    delayed.drop(bytenr, of_tree(256), 1).unwrap();
    delayed.add(bytenr, of_tree(300), 1).unwrap();
    assert_eq!(delayed.net(bytenr), 0);
    let fate = delayed.take(bytenr).unwrap().run(bytenr, &mut tree, NODE_BYTES);
    assert!(matches!(fate, Ok(Fate::Lives(_))));
    delayed.drop(bytenr, of_tree(300), 1).unwrap();
    let free = Fate::Free { key: node(bytenr, 1).key, flags: ExtentFlags::TREE_BLOCK };
    assert_eq!(delayed.take(bytenr).unwrap().run(bytenr, &mut tree, NODE_BYTES), Ok(free));
    assert!(tree.is_empty());
}

#[test]
fn what_cancels_leaves_nothing_and_a_new_node_may_have_the_address() {
    let (mut tree, mut delayed, bytenr) = (Tree::default(), DelayedRefs::new(), 1 << 20);
    delayed.insert(node(bytenr, 0)).unwrap();
    assert!(matches!(delayed.drop(bytenr, of_tree(5), 1), Err(RefsError::Count { net: -1, .. })));
    delayed.add(bytenr, of_tree(5), 1).unwrap();
    assert!(!delayed.cancel(bytenr) && delayed.insert(node(bytenr, 1)).is_err());
    delayed.drop(bytenr, of_tree(5), 1).unwrap();
    assert!(delayed.cancel(bytenr) && delayed.is_empty() && !delayed.cancel(bytenr));
    delayed.insert(node(bytenr, 1)).unwrap();
    delayed.add(bytenr, of_tree(5), 1).unwrap();
    delayed.take(bytenr).unwrap().run(bytenr, &mut tree, NODE_BYTES).unwrap();
    assert_eq!(tree.keys().collect::<Vec<_>>(), [&node(bytenr, 1).key]);

    // An old extent whose changes cancel has no head, and is not free.
    delayed.add(bytenr, of_tree(6), 1).unwrap();
    delayed.drop(bytenr, of_tree(6), 1).unwrap();
    assert!(delayed.is_empty() && !delayed.cancel(bytenr));
    // A flag that changes keeps the head, so the space stays in use.
    delayed.insert(node(2 << 20, 0)).unwrap();
    delayed.set_flags(2 << 20, ExtentFlags::FULL_BACKREF);
    assert!(!delayed.cancel(2 << 20));
    let fate = delayed.take(2 << 20).unwrap().run(2 << 20, &mut tree, NODE_BYTES);
    assert!(matches!(fate, Ok(Fate::Free { .. })) && tree.len() == 1);
}

#[test]
fn references_that_contradict_the_tree_are_errors() {
    let (mut tree, mut delayed, bytenr) = (Tree::default(), DelayedRefs::new(), 1 << 20);
    let mut run = |delayed: &mut DelayedRefs| delayed.take(bytenr).unwrap().run(bytenr, &mut tree, NODE_BYTES);
    delayed.drop(bytenr, of_tree(5), 1).unwrap();
    assert_eq!(run(&mut delayed), Err(RefsError::Missing(bytenr)));
    let file = ExtentRef::Data { root: 5, objectid: 257, offset: 0 };
    delayed.insert(data(bytenr)).unwrap();
    delayed.add(bytenr, file, 2).unwrap();
    assert!(matches!(run(&mut delayed), Ok(Fate::Lives(_))));
    delayed.insert(data(bytenr)).unwrap();
    delayed.add(bytenr, file, 2).unwrap();
    assert_eq!(run(&mut delayed), Err(RefsError::Exists(bytenr)));
    delayed.drop(bytenr, file, 3).unwrap();
    let error = ExtentRefError::Underflow { what: file, count: 2, drop: 3 };
    assert_eq!(run(&mut delayed), Err(RefsError::Extent { bytenr, error }));
    delayed.add(bytenr, file, u32::MAX).unwrap();
    assert!(matches!(run(&mut delayed), Err(RefsError::Extent { error: ExtentRefError::Overflow { .. }, .. })));
    delayed.add(bytenr, file, u32::MAX).unwrap();
    assert!(matches!(delayed.add(bytenr, file, 1), Err(RefsError::Count { .. })));
    delayed.drop(bytenr, file, u32::MAX).unwrap();
    assert!(delayed.is_empty());
    // The same tree twice.
    delayed.add(bytenr, of_tree(5), 1).unwrap();
    assert!(matches!(delayed.add(bytenr, of_tree(5), 1), Err(RefsError::Count { net: 2, .. })));
}

/// Items, and how many were looked at.
#[derive(Default)]
struct Counted {
    tree: Tree,
    looks: std::cell::Cell<usize>,
}

impl Counted {
    fn count(&self) -> &Tree {
        self.looks.set(self.looks.get() + 1);
        &self.tree
    }
}

impl Items for Counted {
    fn at(&self, key: Key) -> Result<Option<&[u8]>, TreeError> {
        self.count().at(key)
    }

    fn first(&self, range: std::ops::RangeInclusive<Key>) -> Result<Option<(Key, &[u8])>, TreeError> {
        self.count().first(range)
    }

    fn last(&self, range: std::ops::RangeInclusive<Key>) -> Result<Option<(Key, &[u8])>, TreeError> {
        self.count().last(range)
    }
}

impl ExtentItems for Counted {
    fn put(&mut self, key: Key, data: Vec<u8>) -> Result<(), RefsError> {
        self.tree.put(key, data)
    }

    fn delete(&mut self, key: Key) -> Result<(), RefsError> {
        self.tree.delete(key)
    }
}

/// Many files may share one extent: whoever adds or drops a reference does not look at those of all others.
#[test]
fn an_extent_with_many_references_gets_and_loses_one_soon() {
    let (mut tree, mut delayed, bytenr) = (Counted::default(), DelayedRefs::new(), 1 << 20);
    let file = |ino| ExtentRef::Data { root: 5, objectid: ino, offset: 0 };
    delayed.insert(data(bytenr)).unwrap();
    for is_add in [true, false] {
        for ino in 300..2300 {
            match is_add {
                true => delayed.add(bytenr, file(ino), 1).unwrap(),
                false => delayed.drop(bytenr, file(ino), 1).unwrap(),
            }
            tree.looks.set(0);
            let fate = delayed.take(bytenr).unwrap().run(bytenr, &mut tree, NODE_BYTES).unwrap();
            assert_eq!(matches!(fate, Fate::Lives(_)), is_add || ino < 2299);
            assert!(tree.looks.get() < 8, "{} items were looked at for {ino}", tree.looks.get());
        }
    }
    assert!(tree.tree.is_empty());
}
