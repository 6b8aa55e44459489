//! A tree whose nodes are in memory: items are inserted, replaced and deleted, and the nodes above them follow.
//!
//! An operation first *touches* its keys: [`Tree::touch`] walks to them and names a node that is not in memory, which
//! the caller then reads. When nothing is missing, the operation is *applied* without waiting. An operation that finds
//! a node missing changes nothing.
//!
//! Invariants:
//! - A node that an earlier transaction wrote is never changed. It is copied to a new address first, and so are all
//!   nodes above it ([`NodeMap::is_dirty`] tells which are copies already). So the tree of the last transaction stays
//!   whole until the new one is durable.
//! - The key of a pointer is the first key of its child. If the first key of a node changes, the pointers above it
//!   follow, as long as they are the first of their nodes.
//! - Only the root may be empty, and only if it is a leaf. There is no minimum otherwise: a node that is nearly empty
//!   joins a neighbour only if that is in memory, because an operation cannot wait.
//! - Nodes have no references here. Whoever allocates and frees them counts these.

use sealblock_btrfs_format::error::EditError;
use sealblock_btrfs_format::inner_edit::InnerMut;
use sealblock_btrfs_format::items::root::RootNode;
use sealblock_btrfs_format::key::Key;
use sealblock_btrfs_format::leaf_edit::LeafMut;
use sealblock_btrfs_format::leaf_split::{LeafSplit, merge};
use sealblock_btrfs_format::node::{HEADER_BYTES, Header, ITEM_HEAD_BYTES, KeyPointer, Node, flags, leaf_capacity};
use sealblock_btrfs_format::superblock::MAX_LEVELS;

/// Why an operation was not applied.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TreeError {
    /// A node is not in memory. Nothing was changed; read it and try again.
    #[error("node {0} is not in memory")]
    Need(u64),
    /// The item is there already.
    #[error("{0} is there already")]
    Exists(Key),
    /// There is no such item.
    #[error("{0} is not there")]
    Missing(Key),
    /// A node is not what its parent says, or cannot be edited so.
    #[error("node {bytenr}: {error}")]
    Edit {
        /// Its address.
        bytenr: u64,
        /// Why.
        error: EditError,
    },
    /// The tree would have more levels than a tree can have.
    #[error("the tree has the maximum number of levels")]
    Height,
    /// No address is left for a new node. Whoever starts an operation reserves space for it, so this is a fault.
    #[error("no space is left for a node")]
    NoSpace,
}

/// The nodes in memory.
pub trait NodeMap {
    /// The bytes of a node, if it is in memory.
    fn get(&self, bytenr: u64) -> Option<&[u8]>;

    /// True if the open transaction made the node, and did not write it yet. Such a node is always in memory.
    fn is_dirty(&self, bytenr: u64) -> bool;

    /// An address for a new node.
    ///
    /// # Errors
    /// If there is none.
    fn allocate(&mut self) -> Result<u64, TreeError>;

    /// Takes the bytes of a dirty node out, to be changed. [`NodeMap::put`] gives them back.
    fn take(&mut self, bytenr: u64) -> Option<Vec<u8>>;

    /// Puts a dirty node in.
    fn put(&mut self, bytenr: u64, bytes: Vec<u8>);

    /// A node is no longer part of the tree.
    fn free(&mut self, bytenr: u64);
}

/// A tree in the open transaction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tree {
    /// Its root node.
    pub root: RootNode,
    /// The header of new nodes: UUIDs, owner, and the generation of the transaction.
    pub header: Header,
    /// Bytes of a node.
    pub node_bytes: u32,
}

/// A node on the way to a key, and the index of the child, pointer or item in it.
#[derive(Clone, Copy, Debug)]
struct Step {
    bytenr: u64,
    slot: usize,
}

/// Nodes from the root to a leaf.
type Path = Vec<Step>;

impl Tree {
    /// A new tree, whose root is an empty leaf.
    ///
    /// # Errors
    /// If there is no space for the root.
    pub fn create(header: Header, node_bytes: u32, nodes: &mut impl NodeMap) -> Result<Tree, TreeError> {
        let root = RootNode { bytenr: 0, level: 0, generation: header.generation.get() };
        let mut tree = Tree { root, header, node_bytes };
        tree.root.bytenr = tree.new_node(nodes, 0)?;
        Ok(tree)
    }

    /// Walks to a key. An operation on it then finds all that it needs.
    ///
    /// # Errors
    /// The address of a node that is not in memory.
    pub fn touch(&self, nodes: &impl NodeMap, key: Key) -> Result<(), TreeError> {
        self.descend(nodes, key).map(drop)
    }

    /// The data of an item.
    ///
    /// # Errors
    /// If a node is not in memory.
    pub fn get<'n>(&self, nodes: &'n impl NodeMap, key: Key) -> Result<Option<&'n [u8]>, TreeError> {
        let (path, found) = self.descend(nodes, key)?;
        let leaf = read(nodes, last(&path).bytenr)?;
        Ok(leaf.items().get(last(&path).slot).filter(|_| found).and_then(|item| leaf.data(item)))
    }

    /// Inserts an item.
    ///
    /// # Errors
    /// If it is there, is too large for a leaf, or a node is not in memory.
    pub fn insert(&mut self, nodes: &mut impl NodeMap, key: Key, data: &[u8]) -> Result<(), TreeError> {
        let (mut path, found) = self.descend(nodes, key)?;
        if found {
            return Err(TreeError::Exists(key));
        }
        self.check_fits(&path, data.len())?;
        self.copy_path(nodes, &mut path)?;
        let Step { bytenr, slot } = last(&path);
        let inserted = edit_leaf(nodes, bytenr, |leaf| match leaf.insert(slot, key, data) {
            Err(EditError::Full { .. }) => Ok(false),
            result => result.map(|()| true),
        })?;
        match inserted {
            true => self.fix_first_key(nodes, &path, path.len() - 1),
            false => self.split_leaf(nodes, &mut path, key, data),
        }
    }

    /// Gives an item other data, of any size.
    ///
    /// # Errors
    /// If it is not there, the data are too large for a leaf, or a node is not in memory.
    pub fn replace(&mut self, nodes: &mut impl NodeMap, key: Key, data: &[u8]) -> Result<(), TreeError> {
        let (mut path, found) = self.descend(nodes, key)?;
        if !found {
            return Err(TreeError::Missing(key));
        }
        self.check_fits(&path, data.len())?;
        self.copy_path(nodes, &mut path)?;
        let Step { bytenr, slot } = last(&path);
        let replaced = edit_leaf(nodes, bytenr, |leaf| {
            let size = leaf.data(slot).map_or(0, <[u8]>::len);
            match leaf.splice(slot, 0..size, data) {
                // It goes, and comes back as a new item.
                Err(EditError::Full { .. }) => leaf.delete(slot..slot + 1).map(|()| false),
                result => result.map(|()| true),
            }
        })?;
        if replaced { Ok(()) } else { self.split_leaf(nodes, &mut path, key, data) }
    }

    /// Deletes an item.
    ///
    /// # Errors
    /// If it is not there, or a node is not in memory.
    pub fn delete(&mut self, nodes: &mut impl NodeMap, key: Key) -> Result<(), TreeError> {
        let (mut path, found) = self.descend(nodes, key)?;
        if !found {
            return Err(TreeError::Missing(key));
        }
        self.copy_path(nodes, &mut path)?;
        let Step { bytenr, slot } = last(&path);
        edit_leaf(nodes, bytenr, |leaf| leaf.delete(slot..slot + 1))?;
        let mut depth = path.len() - 1;
        // A node that is empty goes, and with it the pointer in its parent, which may be its last.
        while depth > 0 && count(nodes, path[depth].bytenr)? == 0 {
            nodes.free(path[depth].bytenr);
            depth -= 1;
            let Step { bytenr, slot } = path[depth];
            edit_inner(nodes, bytenr, |inner| inner.delete(slot..slot + 1))?;
        }
        if depth == 0 && self.root.level > 0 && count(nodes, path[0].bytenr)? == 0 {
            return self.make_root_empty(nodes);
        }
        self.fix_first_key(nodes, &path, depth)?;
        for depth in (1..=depth).rev() {
            self.join(nodes, &mut path, depth)?;
        }
        self.shrink(nodes)
    }

    /// The nodes to a key, and true if the item is there. Changes nothing.
    fn descend(&self, nodes: &impl NodeMap, key: Key) -> Result<(Path, bool), TreeError> {
        let (mut path, mut bytenr, mut level) = (Path::new(), self.root.bytenr, self.root.level);
        loop {
            let node = read(nodes, bytenr)?;
            if node.header().level != level {
                return Err(TreeError::Edit { bytenr, error: EditError::Level(node.header().level) });
            }
            let Some(below) = level.checked_sub(1) else {
                let found = node.items().binary_search_by_key(&key, |item| item.key());
                path.push(Step { bytenr, slot: found.unwrap_or_else(|slot| slot) });
                return Ok((path, found.is_ok()));
            };
            let slot = node.pointers().partition_point(|pointer| pointer.key() <= key).saturating_sub(1);
            let child = node.pointers().get(slot);
            let child = child.ok_or(TreeError::Edit { bytenr, error: EditError::Slot { slot, count: 0 } })?;
            path.push(Step { bytenr, slot });
            (bytenr, level) = (child.blockptr.get(), below);
        }
    }

    fn check_fits(&self, path: &Path, data_bytes: usize) -> Result<(), TreeError> {
        let most = leaf_capacity(self.node_bytes);
        let needed = data_bytes.saturating_add(ITEM_HEAD_BYTES);
        let error = EditError::Full { needed, free: most };
        if needed <= most { Ok(()) } else { Err(TreeError::Edit { bytenr: last(path).bytenr, error }) }
    }

    /// A new node of this level without content.
    fn new_node(&self, nodes: &mut impl NodeMap, level: u8) -> Result<u64, TreeError> {
        let (bytenr, mut bytes) = (nodes.allocate()?, vec![0; self.node_bytes as usize]);
        let header = Header { bytenr: bytenr.into(), level, ..self.header };
        let made = match level {
            0 => LeafMut::create(&mut bytes, &header).map(drop),
            _ => InnerMut::create(&mut bytes, &header).map(drop),
        };
        made.map_err(|error| TreeError::Edit { bytenr, error })?;
        nodes.put(bytenr, bytes);
        Ok(bytenr)
    }

    /// Copies all nodes of a path that earlier transactions wrote, from the root down.
    fn copy_path(&mut self, nodes: &mut impl NodeMap, path: &mut Path) -> Result<(), TreeError> {
        for depth in 0..path.len() {
            path[depth].bytenr = match depth.checked_sub(1) {
                None => {
                    let root = self.copy(nodes, path[0].bytenr)?;
                    (self.root.bytenr, self.root.generation) = (root, self.header.generation.get());
                    root
                }
                Some(above) => self.copy_child(nodes, path[above])?,
            };
        }
        Ok(())
    }

    /// Copies the child that a pointer of a dirty node leads to, and returns its new address.
    fn copy_child(&self, nodes: &mut impl NodeMap, parent: Step) -> Result<u64, TreeError> {
        let pointer = pointer(nodes, parent)?;
        let copy = self.copy(nodes, pointer.blockptr.get())?;
        if copy != pointer.blockptr.get() {
            let new = KeyPointer::new(pointer.key(), copy, self.header.generation.get());
            edit_inner(nodes, parent.bytenr, |inner| inner.replace(parent.slot, new))?;
        }
        Ok(copy)
    }

    fn copy(&self, nodes: &mut impl NodeMap, bytenr: u64) -> Result<u64, TreeError> {
        if nodes.is_dirty(bytenr) {
            return Ok(bytenr);
        }
        let old = read(nodes, bytenr)?.header();
        let (level, flags) = (old.level, old.flags.get() & !(flags::WRITTEN | flags::RELOC));
        let mut bytes = nodes.get(bytenr).ok_or(TreeError::Need(bytenr))?.to_vec();
        let new = nodes.allocate()?;
        let header = Header { bytenr: new.into(), flags: flags.into(), ..self.header };
        let opened = match level {
            0 => LeafMut::open(&mut bytes).map(|mut leaf| {
                leaf.zero_gap();
                leaf.set_header(&header);
            }),
            _ => InnerMut::open(&mut bytes).map(|mut inner| {
                inner.zero_gap();
                inner.set_header(&header);
            }),
        };
        opened.map_err(|error| TreeError::Edit { bytenr, error })?;
        nodes.put(new, bytes);
        nodes.free(bytenr);
        Ok(new)
    }

    /// Splits the last node of a path for an item that has no room.
    fn split_leaf(
        &mut self,
        nodes: &mut impl NodeMap,
        path: &mut Path,
        key: Key,
        data: &[u8],
    ) -> Result<(), TreeError> {
        let Step { bytenr, slot } = last(path);
        let split = edit_leaf(nodes, bytenr, |leaf| LeafSplit::choose(leaf, slot, data.len()))?;
        self.make_room(nodes, path, path.len() - 1, split.new_leaves())?;
        let new: Vec<u64> = (0..split.new_leaves()).map(|_| self.new_node(nodes, 0)).collect::<Result<_, _>>()?;
        let mut buffers: Vec<Vec<u8>> = new.iter().map(|new| take(nodes, *new)).collect::<Result<_, _>>()?;
        let keys: Result<Vec<Key>, TreeError> = edit_leaf(nodes, bytenr, |leaf| {
            let mut open = buffers.iter_mut().map(|bytes| LeafMut::open(bytes)).collect::<Result<Vec<_>, _>>()?;
            split.insert(leaf, &mut open, slot, (key, data))?;
            Ok(open.iter().filter_map(|leaf| leaf.key(0)).collect())
        });
        let keys = keys?;
        new.iter().zip(buffers).for_each(|(new, bytes)| nodes.put(*new, bytes));
        // The new item may be the first of all. Its pointer must be below those of the new leaves.
        self.fix_first_key(nodes, path, path.len() - 1)?;
        let parent = path[path.len() - 2];
        for (index, (key, bytenr)) in keys.into_iter().zip(new).enumerate() {
            let pointer = KeyPointer::new(key, bytenr, self.header.generation.get());
            edit_inner(nodes, parent.bytenr, |inner| inner.insert(parent.slot + 1 + index, pointer))?;
        }
        Ok(())
    }

    /// Makes room for pointers in the parent of the node at `depth`: splits the parent if it is full, and makes one if
    /// there is none. The path then leads to the same node.
    fn make_room(
        &mut self,
        nodes: &mut impl NodeMap,
        path: &mut Path,
        depth: usize,
        pointers: usize,
    ) -> Result<(), TreeError> {
        let Some(depth) = depth.checked_sub(1) else { return self.grow(nodes, path) };
        let Step { bytenr, slot } = path[depth];
        let (len, capacity) = edit_inner(nodes, bytenr, |inner| Ok((inner.len(), inner.capacity())))?;
        if len + pointers <= capacity {
            return Ok(());
        }
        let before = path.len();
        self.make_room(nodes, path, depth, 1)?;
        // A new root moved all others down.
        let depth = depth + path.len() - before;
        // At its end a tree grows on: what is before stays full.
        let at = if slot + 1 == len { slot } else { len.div_ceil(2) };
        let level = self.root.level - depth as u8;
        let new = self.new_node(nodes, level)?;
        let mut buffer = take(nodes, new)?;
        let first = edit_inner(nodes, bytenr, |inner| {
            let mut right = InnerMut::open(&mut buffer)?;
            inner.shift_right(&mut right, len - at)?;
            Ok(right.pointers()[0].key())
        })?;
        nodes.put(new, buffer);
        let parent = &mut path[depth - 1];
        let pointer = KeyPointer::new(first, new, self.header.generation.get());
        edit_inner(nodes, parent.bytenr, |inner| inner.insert(parent.slot + 1, pointer))?;
        if slot >= at {
            parent.slot += 1;
            path[depth] = Step { bytenr: new, slot: slot - at };
        }
        Ok(())
    }

    /// Puts a new root above the old one.
    fn grow(&mut self, nodes: &mut impl NodeMap, path: &mut Path) -> Result<(), TreeError> {
        let level = self.root.level + 1;
        if level >= MAX_LEVELS {
            return Err(TreeError::Height);
        }
        let old = self.root.bytenr;
        let first = read(nodes, old)?.first_key().unwrap_or(Key::MIN);
        let new = self.new_node(nodes, level)?;
        let pointer = KeyPointer::new(first, old, self.header.generation.get());
        edit_inner(nodes, new, |inner| inner.insert(0, pointer))?;
        (self.root.bytenr, self.root.level) = (new, level);
        path.insert(0, Step { bytenr: new, slot: 0 });
        Ok(())
    }

    /// Lets the pointers above the node at `depth` follow its first key.
    fn fix_first_key(&self, nodes: &mut impl NodeMap, path: &Path, depth: usize) -> Result<(), TreeError> {
        for depth in (1..=depth).rev() {
            let (child, parent) = (path[depth].bytenr, path[depth - 1]);
            let Some(first) = read(nodes, child)?.first_key() else { return Ok(()) };
            let old = pointer(nodes, parent)?;
            if old.key() != first {
                let new = KeyPointer::new(first, child, old.generation.get());
                edit_inner(nodes, parent.bytenr, |inner| inner.replace(parent.slot, new))?;
            }
            if parent.slot > 0 {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Moves all of a node that is nearly empty to a neighbour, or the other way round, if the neighbour is in memory
    /// and both fit into one node.
    fn join(&mut self, nodes: &mut impl NodeMap, path: &mut Path, depth: usize) -> Result<(), TreeError> {
        let (node, parent) = (path[depth].bytenr, path[depth - 1]);
        if !is_sparse(&read(nodes, node)?) {
            return Ok(());
        }
        let pointers = count(nodes, parent.bytenr)?;
        for left in [parent.slot.checked_sub(1), Some(parent.slot)].into_iter().flatten() {
            if left + 1 >= pointers {
                continue;
            }
            let at = |slot| pointer(nodes, Step { slot, ..parent }).map(|one| one.blockptr.get());
            let (first, second) = (at(left)?, at(left + 1)?);
            let fits = match (nodes.get(first), nodes.get(second)) {
                (Some(_), Some(_)) => fit_together(&read(nodes, first)?, &read(nodes, second)?),
                _ => false,
            };
            if fits {
                let first = self.copy_child(nodes, Step { slot: left, ..parent })?;
                let second = self.copy_child(nodes, Step { slot: left + 1, ..parent })?;
                join_two(nodes, first, second)?;
                nodes.free(second);
                edit_inner(nodes, parent.bytenr, |inner| inner.delete(left + 1..left + 2))?;
                path[depth - 1].slot = left;
                return Ok(());
            }
        }
        Ok(())
    }

    /// Makes the only child of the root the root, if it is in memory.
    fn shrink(&mut self, nodes: &mut impl NodeMap) -> Result<(), TreeError> {
        while self.root.level > 0 && count(nodes, self.root.bytenr)? == 1 {
            let root = Step { bytenr: self.root.bytenr, slot: 0 };
            if nodes.get(pointer(nodes, root)?.blockptr.get()).is_none() {
                return Ok(());
            }
            let child = self.copy_child(nodes, root)?;
            nodes.free(root.bytenr);
            (self.root.bytenr, self.root.level) = (child, self.root.level - 1);
        }
        Ok(())
    }

    fn make_root_empty(&mut self, nodes: &mut impl NodeMap) -> Result<(), TreeError> {
        nodes.free(self.root.bytenr);
        (self.root.bytenr, self.root.level) = (self.new_node(nodes, 0)?, 0);
        Ok(())
    }
}

fn last(path: &Path) -> Step {
    *path.last().expect("a path has at least the root")
}

fn read(nodes: &impl NodeMap, bytenr: u64) -> Result<Node<'_>, TreeError> {
    let bytes = nodes.get(bytenr).ok_or(TreeError::Need(bytenr))?;
    Node::decode(bytes).map_err(|error| TreeError::Edit { bytenr, error: error.into() })
}

fn count(nodes: &impl NodeMap, bytenr: u64) -> Result<usize, TreeError> {
    Ok(read(nodes, bytenr)?.header().nritems.get() as usize)
}

fn pointer(nodes: &impl NodeMap, Step { bytenr, slot }: Step) -> Result<KeyPointer, TreeError> {
    let node = read(nodes, bytenr)?;
    let count = node.pointers().len();
    node.pointers().get(slot).copied().ok_or(TreeError::Edit { bytenr, error: EditError::Slot { slot, count } })
}

fn take(nodes: &mut impl NodeMap, bytenr: u64) -> Result<Vec<u8>, TreeError> {
    nodes.take(bytenr).ok_or(TreeError::Need(bytenr))
}

fn edit_leaf<T>(
    nodes: &mut impl NodeMap,
    bytenr: u64,
    edit: impl FnOnce(&mut LeafMut) -> Result<T, EditError>,
) -> Result<T, TreeError> {
    let mut bytes = take(nodes, bytenr)?;
    let result = LeafMut::open(&mut bytes).and_then(|mut leaf| edit(&mut leaf));
    nodes.put(bytenr, bytes);
    result.map_err(|error| TreeError::Edit { bytenr, error })
}

fn edit_inner<T>(
    nodes: &mut impl NodeMap,
    bytenr: u64,
    edit: impl FnOnce(&mut InnerMut) -> Result<T, EditError>,
) -> Result<T, TreeError> {
    let mut bytes = take(nodes, bytenr)?;
    let result = InnerMut::open(&mut bytes).and_then(|mut inner| edit(&mut inner));
    nodes.put(bytenr, bytes);
    result.map_err(|error| TreeError::Edit { bytenr, error })
}

/// Bytes of the content of a node, and for how many there is room.
fn fill(node: &Node) -> (usize, usize) {
    let data: usize = node.items().iter().map(|item| item.size.get() as usize).sum();
    let used = size_of_val(node.items()) + size_of_val(node.pointers()) + data;
    (used, node.node_bytes() - HEADER_BYTES)
}

fn is_sparse(node: &Node) -> bool {
    let (used, capacity) = fill(node);
    used < capacity / 3
}

fn fit_together(first: &Node, second: &Node) -> bool {
    let ((used, capacity), (more, _)) = (fill(first), fill(second));
    used + more <= capacity
}

/// Moves all of the second node to the first one.
fn join_two(nodes: &mut impl NodeMap, first: u64, second: u64) -> Result<(), TreeError> {
    let mut bytes = take(nodes, second)?;
    let is_leaf = read(nodes, first)?.header().level == 0;
    let result = match is_leaf {
        true => edit_leaf(nodes, first, |left| merge(left, &mut LeafMut::open(&mut bytes)?)),
        false => edit_inner(nodes, first, |left| {
            let mut right = InnerMut::open(&mut bytes)?;
            let count = right.len();
            left.shift_left(&mut right, count)
        }),
    };
    nodes.put(second, bytes);
    result
}

#[cfg(test)]
mod tests;
