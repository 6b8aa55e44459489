//! How the items of a tree are packed into nodes: full leaves, and full inner nodes above them.

use std::collections::BTreeMap;

use sealblock_btrfs_format::items::root::RootNode;
use sealblock_btrfs_format::key::Key;
use sealblock_btrfs_format::node::{ITEM_HEAD_BYTES, leaf_capacity, pointer_capacity};

/// Keys with data, by rising keys.
pub(super) type Items = Vec<(Key, Vec<u8>)>;
/// All trees by their numbers.
pub(super) type Trees = BTreeMap<u64, PlacedTree>;

/// How many items or pointers each node of a tree has: the leaves first, the root last.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Shape(Vec<Vec<usize>>);

impl Shape {
    /// Packs items, each into the first leaf that has room behind the items before it.
    pub fn of(items: &Items, node_bytes: u32) -> Shape {
        let (capacity, mut leaves, mut room) = (leaf_capacity(node_bytes), vec![0], leaf_capacity(node_bytes));
        for (_, data) in items {
            let bytes = ITEM_HEAD_BYTES + data.len();
            if bytes > room {
                leaves.push(0);
                room = capacity;
            }
            // An item that is larger than a leaf is refused when the leaf is written.
            room = room.saturating_sub(bytes);
            *leaves.last_mut().expect("there is a leaf") += 1;
        }
        let (mut levels, most) = (vec![leaves], pointer_capacity(node_bytes));
        while let Some(children) = levels.last().map(Vec::len).filter(|children| *children > 1) {
            levels.push((0..children).step_by(most).map(|first| most.min(children - first)).collect());
        }
        Shape(levels)
    }

    /// All nodes.
    pub fn nodes(&self) -> usize {
        self.0.iter().map(Vec::len).sum()
    }
}

/// A tree whose nodes have addresses.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct PlacedTree {
    shape: Shape,
    /// The address of each node: the leaves first, the root last.
    pub addresses: Vec<u64>,
    generation: u64,
}

/// A node of such a tree.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PlacedNode {
    pub address: u64,
    pub level: u8,
    /// The index of the first item below it.
    pub first_item: usize,
}

impl PlacedTree {
    /// A tree with as many addresses as it has nodes, all of one transaction.
    pub fn new(shape: Shape, addresses: Vec<u64>, generation: u64) -> PlacedTree {
        PlacedTree { shape, addresses, generation }
    }

    /// How many items or pointers the nodes of each level have.
    pub fn levels(&self) -> &[Vec<usize>] {
        &self.shape.0
    }

    /// The root node.
    pub fn root(&self) -> RootNode {
        let bytenr = self.addresses.last().copied().unwrap_or(0);
        RootNode { bytenr, level: (self.shape.0.len() - 1) as u8, generation: self.generation }
    }

    /// All nodes, in the order of their addresses.
    pub fn nodes(&self) -> impl Iterator<Item = PlacedNode> {
        let mut first_items: Vec<usize> = Vec::new();
        let mut nodes = Vec::new();
        for (level, counts) in self.shape.0.iter().enumerate() {
            let (mut next, mut firsts) = (0, Vec::new());
            for count in counts {
                // The first child of an inner node has its first item.
                firsts.push(if level == 0 { next } else { first_items[next] });
                next += count;
            }
            nodes.extend(firsts.iter().map(|first_item| (level as u8, *first_item)));
            first_items = firsts;
        }
        let placed =
            |((level, first_item), address): ((u8, usize), &u64)| PlacedNode { address: *address, level, first_item };
        nodes.into_iter().zip(&self.addresses).map(placed)
    }
}
