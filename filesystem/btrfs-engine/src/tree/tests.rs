//! Trees under random operations, compared with a map. Nodes leave the memory at random between operations; a check of
//! the whole tree finds every node once; and the tree of the last transaction stays as it was.

use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::view::Items;
use sealblock_btrfs_format::checksum::ChecksumType;
use sealblock_btrfs_format::key::{ItemType, objectid};
use sealblock_btrfs_format::node::{write_inner, write_leaf};

const NODE_BYTES: u32 = 4096;

/// The data of an item: so many bytes of this value.
type Data = (usize, u8);
type Model = BTreeMap<Key, Data>;

/// A memory, a disk, and an allocator that reuses what was free before the transaction.
#[derive(Default)]
struct Nodes {
    memory: BTreeMap<u64, Vec<u8>>,
    disk: BTreeMap<u64, Vec<u8>>,
    dirty: BTreeSet<u64>,
    /// All nodes of the tree.
    live: BTreeSet<u64>,
    free: Vec<u64>,
    /// Above this, all is free.
    used_bytes: u64,
    /// Freed in the transaction, and still part of the tree before it.
    pinned: Vec<u64>,
    changes: usize,
}

impl NodeSource for Nodes {
    fn get(&self, bytenr: u64) -> Option<&[u8]> {
        self.memory.get(&bytenr).map(|bytes| &bytes[..])
    }

    fn is_clean(&self, bytenr: u64) -> bool {
        !self.dirty.contains(&bytenr)
    }
}

impl NodeMap for Nodes {
    type Bytes = Vec<u8>;

    fn is_own(&self, bytenr: u64) -> bool {
        self.dirty.contains(&bytenr)
    }

    fn can_join(&self, _bytenr: u64) -> bool {
        true
    }

    fn drop_ref(&mut self, bytenr: u64) -> Result<(), TreeError> {
        self.free(bytenr)
    }

    fn root_shared(&mut self, _old: u64, _new: u64) -> Result<(), TreeError> {
        Ok(())
    }

    fn copied(&mut self, old: u64, _new: u64, _is_root: bool) -> Result<(), TreeError> {
        self.free(old)
    }

    fn get_mut(&mut self, bytenr: u64) -> Option<&mut [u8]> {
        self.changes += 1;
        assert!(self.is_own(bytenr), "only copies are changed");
        self.memory.get_mut(&bytenr).map(|bytes| &mut bytes[..])
    }

    fn allocate(&mut self, _level: u8) -> Result<(u64, Vec<u8>), TreeError> {
        self.changes += 1;
        let bytenr = self.free.pop().unwrap_or_else(|| {
            self.used_bytes += u64::from(NODE_BYTES);
            self.used_bytes
        });
        assert!(self.live.insert(bytenr) && !self.disk.contains_key(&bytenr), "{bytenr} is in use");
        self.dirty.insert(bytenr);
        Ok((bytenr, vec![0; NODE_BYTES as usize]))
    }

    fn take(&mut self, bytenr: u64) -> Option<Vec<u8>> {
        self.changes += 1;
        assert!(self.is_own(bytenr), "only copies are changed");
        self.memory.remove(&bytenr)
    }

    fn put(&mut self, bytenr: u64, bytes: Vec<u8>) {
        assert!(self.is_own(bytenr));
        assert_eq!(self.memory.insert(bytenr, bytes), None);
    }

    fn free(&mut self, bytenr: u64) -> Result<(), TreeError> {
        self.changes += 1;
        assert!(self.live.remove(&bytenr), "{bytenr} is freed twice");
        if self.dirty.remove(&bytenr) {
            self.memory.remove(&bytenr).expect("a dirty node is in memory");
            self.free.push(bytenr);
        } else {
            self.pinned.push(bytenr);
        }
        Ok(())
    }
}

impl Nodes {
    fn commit(&mut self) {
        for bytenr in std::mem::take(&mut self.dirty) {
            let bytes = self.memory.get_mut(&bytenr).unwrap();
            let old = *Node::decode(bytes).unwrap().header();
            let header = Header { flags: (old.flags.get() | flags::WRITTEN).into(), ..old };
            match old.level {
                0 => LeafMut::open(bytes).unwrap().set_header(&header),
                _ => InnerMut::open(bytes).unwrap().set_header(&header),
            }
            self.disk.insert(bytenr, bytes.clone());
        }
        for bytenr in std::mem::take(&mut self.pinned) {
            self.disk.remove(&bytenr).unwrap();
            self.memory.remove(&bytenr);
            self.free.push(bytenr);
        }
        assert!(self.disk.keys().eq(&self.live));
    }

    fn evict(&mut self, random: &mut fastrand::Rng, one_of: usize) {
        let dirty = &self.dirty;
        self.memory.retain(|bytenr, _| dirty.contains(bytenr) || random.usize(..one_of) > 0);
    }
}

struct Proof {
    random: fastrand::Rng,
    nodes: Nodes,
    tree: Tree,
    model: Model,
    /// The tree and the map of the last transaction.
    durable: Option<(Tree, Model)>,
    most_level: u8,
}

fn header(generation: u64) -> Header {
    let zeroes = [0; NODE_BYTES as usize];
    let header = *Node::decode(&zeroes).unwrap().header();
    let flags = flags::MIXED_BACKREF.into();
    Header { owner: objectid::FS_TREE.into(), generation: generation.into(), flags, fsid: [7; 16], ..header }
}

fn key(number: u64) -> Key {
    Key::new(number >> 4, ItemType::EXTENT_DATA, number & 15)
}

impl Proof {
    fn new(seed: u64) -> Proof {
        let mut nodes = Nodes::default();
        let tree = Tree::create(header(1), NODE_BYTES, &mut nodes).unwrap();
        let (random, model) = (fastrand::Rng::with_seed(seed), Model::new());
        Proof { random, nodes, tree, model, durable: None, most_level: 0 }
    }

    /// Reads what the operation needs; then it is applied and needs no more.
    fn apply(
        &mut self,
        key: Key,
        change: impl FnOnce(&mut Tree, &mut Nodes) -> Result<(), TreeError>,
    ) -> Result<(), TreeError> {
        let changes = self.nodes.changes;
        while let Err(error) = self.tree.touch(&self.nodes, key..=key, |_| Ok(())) {
            let TreeError::Need(Expected { bytenr, .. }) = error else { panic!("{error}") };
            let bytes = self.nodes.disk[&bytenr].clone();
            assert_eq!(self.nodes.memory.insert(bytenr, bytes), None);
        }
        assert_eq!(self.nodes.changes, changes, "to touch changes nothing");
        let result = change(&mut self.tree, &mut self.nodes);
        assert!(result.is_ok() || self.nodes.changes == changes, "what fails changes nothing");
        assert!(!matches!(result, Err(TreeError::Need(_))));
        self.most_level = self.most_level.max(self.tree.root.level);
        result
    }

    fn insert(&mut self, key: Key, data: Data) {
        let result = self.apply(key, |tree, nodes| tree.insert(nodes, key, &vec![data.1; data.0]));
        match self.model.contains_key(&key) {
            true => assert_eq!(result, Err(TreeError::Exists(key))),
            false => {
                result.unwrap();
                self.model.insert(key, data);
            }
        }
    }

    fn replace(&mut self, key: Key, data: Data) {
        let result = self.apply(key, |tree, nodes| tree.replace(nodes, key, &vec![data.1; data.0]));
        match self.model.get_mut(&key) {
            None => assert_eq!(result, Err(TreeError::Missing(key))),
            Some(old) => {
                result.unwrap();
                *old = data;
                let view = self.tree.view(&self.nodes);
                assert_eq!(view.at(key), Ok(Some(&vec![data.1; data.0][..])));
            }
        }
    }

    /// The first and the last item of a range, with no more nodes in memory than the range needs.
    fn look(&mut self, range: RangeInclusive<Key>) {
        let wanted = |first: bool| {
            let mut all = self.model.range(range.clone());
            let one = if first { all.next() } else { all.next_back() };
            one.map(|(key, (bytes, value))| (*key, vec![*value; *bytes]))
        };
        for (is_first, wanted) in [(true, wanted(true)), (false, wanted(false))] {
            loop {
                let view = self.tree.view(&self.nodes);
                let found = if is_first { view.first(range.clone()) } else { view.last(range.clone()) };
                match found {
                    Ok(found) => {
                        assert_eq!(found, wanted.as_ref().map(|(key, data)| (*key, &data[..])));
                        break;
                    }
                    Err(TreeError::Need(Expected { bytenr, .. })) => {
                        let bytes = self.nodes.disk[&bytenr].clone();
                        assert_eq!(self.nodes.memory.insert(bytenr, bytes), None);
                    }
                    Err(error) => panic!("{error}"),
                }
            }
        }
    }

    fn delete(&mut self, key: Key) {
        let result = self.apply(key, |tree, nodes| tree.delete(nodes, key));
        match self.model.remove(&key) {
            None => assert_eq!(result, Err(TreeError::Missing(key))),
            Some(_) => result.unwrap(),
        }
    }

    /// A key that is there, or the next one.
    fn some_key(&mut self, most: u64) -> Key {
        let key = key(self.random.u64(..most));
        self.model.range(key..).next().map_or(key, |(key, _)| *key)
    }

    fn commit(&mut self) {
        assert_tree(&self.tree, &self.nodes, &self.model, true);
        if let Some((tree, model)) = &self.durable {
            assert_tree(tree, &self.nodes, model, false);
        }
        self.nodes.commit();
        self.durable = Some((self.tree, self.model.clone()));
        self.tree.header.generation = (self.tree.header.generation.get() + 1).into();
        let one_of = self.random.usize(1..5);
        self.nodes.evict(&mut self.random, one_of);
    }
}

/// The whole tree has the items of the map, and each of its nodes is as it must be. `is_now`: it is the tree of the
/// open transaction, and otherwise that of the last one, whose nodes must all be on the disk.
fn assert_tree(tree: &Tree, nodes: &Nodes, model: &Model, is_now: bool) {
    let (mut items, mut seen) = (model.iter(), BTreeSet::new());
    let mut pending = vec![(tree.root, None)];
    while let Some((root, first_key)) = pending.pop() {
        let dirty = nodes.memory.get(&root.bytenr).filter(|_| is_now && nodes.is_own(root.bytenr));
        let bytes = dirty.unwrap_or_else(|| &nodes.disk[&root.bytenr]);
        let node = Node::decode(bytes).unwrap();
        let header = node.header();
        let identity = (header.bytenr.get(), header.level, header.generation.get(), header.owner.get());
        assert_eq!(identity, (root.bytenr, root.level, root.generation, objectid::FS_TREE));
        assert_eq!(header.flags.get() & flags::WRITTEN == 0, dirty.is_some());
        assert!(seen.insert(root.bytenr), "{} is in the tree twice", root.bytenr);
        if let Some(first_key) = first_key {
            assert_eq!(node.first_key(), Some(first_key));
        }
        for (key, data) in node.entries() {
            let (wanted, (size, value)) = items.next().unwrap();
            assert!(key == *wanted && data.len() == *size && data.iter().all(|byte| byte == value), "{key}");
        }
        let again = match header.level {
            0 => write_leaf(header, node.entries(), NODE_BYTES, ChecksumType::Crc32c),
            _ => write_inner(header, node.pointers(), NODE_BYTES, ChecksumType::Crc32c),
        };
        assert!(again.unwrap()[32..] == bytes[32..], "node {}", root.bytenr);
        let below = header.level.wrapping_sub(1);
        pending.extend(node.pointers().iter().rev().map(|pointer| {
            let (bytenr, generation) = (pointer.blockptr.get(), pointer.generation.get());
            (RootNode { bytenr, level: below, generation }, Some(pointer.key()))
        }));
    }
    assert_eq!(items.next(), None);
    assert!(!is_now || seen == nodes.live, "every node is in the tree");
}

#[test]
fn random_operations_leave_the_items_of_a_map() {
    for seed in 1..=3 {
        let mut proof = Proof::new(seed);
        for change in 0..12_000 {
            let grows = change / 3000 % 2 == 0;
            let (size, value) = (proof.random.usize(..300), proof.random.u8(1..));
            let size = if proof.random.u8(..50) == 0 { 3970 - size } else { size };
            let any = key(proof.random.u64(..1 << 16));
            match proof.random.u8(..10) {
                0..6 if grows => proof.insert(any, (size, value)),
                0..2 => proof.insert(any, (size, value)),
                2..8 => {
                    let key = proof.some_key(1 << 16);
                    proof.delete(key);
                }
                _ => {
                    let key = proof.some_key(1 << 16);
                    proof.replace(key, (size, value));
                }
            }
            if proof.random.u16(..200) == 0 {
                proof.commit();
            }
            if proof.random.u8(..5) == 0 {
                let from = proof.random.u64(..1 << 16);
                let range = key(from)..=key(from + proof.random.u64(..300));
                proof.look(range);
            }
            if proof.random.u8(..20) == 0 {
                proof.nodes.evict(&mut proof.random, 3);
            }
        }
        proof.commit();
        println!("{} items, {} nodes, level {}", proof.model.len(), proof.nodes.live.len(), proof.most_level);
        assert!(proof.most_level >= 1);
    }
}

#[test]
fn a_tree_grows_to_four_levels_and_shrinks_to_an_empty_leaf() {
    let mut proof = Proof::new(4);
    let mut numbers: Vec<u64> = (0..13_000).collect();
    proof.random.shuffle(&mut numbers);
    for (index, number) in numbers.iter().enumerate() {
        // No two of them fit into a leaf.
        let data = (proof.random.usize(2000..3900), proof.random.u8(..));
        proof.insert(key(*number), data);
        if index % 4000 == 3999 {
            proof.commit();
        }
    }
    proof.commit();
    assert_eq!(proof.tree.root.level, 3);
    println!("{} nodes", proof.nodes.live.len());
    proof.random.shuffle(&mut numbers);
    for (index, number) in numbers.iter().enumerate() {
        proof.delete(key(*number));
        if index % 4000 == 3999 {
            proof.commit();
        }
    }
    proof.commit();
    assert!(proof.model.is_empty());
    assert_eq!((proof.tree.root.level, proof.nodes.live.len()), (0, 1));
}

#[test]
fn a_tree_that_grows_at_its_end_has_full_nodes() {
    let mut proof = Proof::new(5);
    for number in 0..20_000 {
        proof.insert(key(number), (54, 1));
    }
    proof.commit();
    // 50 items of 79 bytes in a leaf, 121 pointers in a node above.
    assert_eq!(proof.nodes.live.len(), 400 + 4 + 1);
    for number in 0..20_000 {
        proof.delete(key(number));
    }
    proof.commit();
    assert_eq!(proof.nodes.live.len(), 1);
}

#[test]
fn the_first_key_of_all_is_that_of_all_nodes_above_it() {
    let mut proof = Proof::new(6);
    for number in (0..3000).rev() {
        proof.insert(key(number), (100, 2));
    }
    proof.commit();
    assert!(proof.tree.root.level >= 2);
    for number in 0..2900 {
        proof.delete(key(number));
        let root = Node::decode(proof.nodes.get(proof.tree.root.bytenr).unwrap()).unwrap();
        assert_eq!(root.first_key(), Some(key(number + 1)));
    }
    proof.commit();
}

#[test]
fn items_that_no_leaf_can_have_are_refused() {
    let mut proof = Proof::new(7);
    let most = leaf_capacity(NODE_BYTES) - ITEM_HEAD_BYTES;
    let result = proof.apply(key(1), |tree, nodes| tree.insert(nodes, key(1), &vec![0; most + 1]));
    assert!(matches!(result, Err(TreeError::Edit { error: EditError::Full { .. }, .. })));
    proof.insert(key(1), (most, 1));
    let result = proof.apply(key(1), |tree, nodes| tree.replace(nodes, key(1), &vec![0; most + 1]));
    assert!(matches!(result, Err(TreeError::Edit { error: EditError::Full { .. }, .. })));
    proof.commit();
}

#[test]
fn a_new_item_in_a_leaf_whose_others_go_needs_no_neighbour() {
    let mut proof = Proof::new(8);
    // Each is alone in its leaf.
    (0..20).for_each(|number| proof.insert(key(2 * number), (3000, 3)));
    proof.commit();
    for last in 0..8 {
        proof.nodes.evict(&mut proof.random, 1);
        let mut changes = ItemChanges::new();
        proof.model.range(..=key(2 * last)).for_each(|(key, _)| changes.delete(*key));
        changes.insert(key(2 * last + 1), vec![4; 2900]);
        for (key, _) in changes.iter() {
            proof.apply(key, |_, _| Ok(())).unwrap();
        }
        proof.tree.apply(&mut proof.nodes, &changes).unwrap();
        proof.model.retain(|other, _| *other > key(2 * last));
        proof.model.insert(key(2 * last + 1), (2900, 4));
        proof.commit();
    }
}
