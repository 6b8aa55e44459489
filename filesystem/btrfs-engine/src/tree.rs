//! A tree whose nodes are in memory: items are inserted, replaced and deleted, and the nodes above them follow.
//!
//! An operation first *touches* its keys: [`Tree::touch`] walks to them and names a node that is not in memory, which
//! the caller then reads. When nothing is missing, the operation is *applied* without waiting. An operation that finds
//! a node missing changes nothing.
//!
//! Invariants:
//! - A node that an earlier transaction wrote is never changed. It is copied to a new address first, and so are all
//!   nodes above it ([`NodeMap::is_own`] tells which are copies already). So the tree of the last transaction stays
//!   whole until the new one is durable.
//! - The key of a pointer is the first key of its child. If the first key of a node changes, the pointers above it
//!   follow, as long as they are the first of their nodes.
//! - Only the root may be empty, and only if it is a leaf. There is no minimum otherwise: a node that is nearly empty
//!   joins a neighbour only if that is in memory, because an operation cannot wait.
//! - Nodes have no references here. Whoever allocates and frees them counts these.

mod path;

use std::ops::{DerefMut, RangeInclusive};

use sealblock_btrfs_format::checker::Expected;
use sealblock_btrfs_format::error::EditError;
use sealblock_btrfs_format::inner_edit::InnerMut;
use sealblock_btrfs_format::item_changes::{ItemChange, ItemChanges};
use sealblock_btrfs_format::items::root::RootNode;
use sealblock_btrfs_format::key::{Key, objectid};
use sealblock_btrfs_format::leaf_edit::LeafMut;
use sealblock_btrfs_format::leaf_split::{LeafSplit, merge};
use sealblock_btrfs_format::node::{HEADER_BYTES, Header, ITEM_HEAD_BYTES, KeyPointer, Node, flags, leaf_capacity};
use sealblock_btrfs_format::superblock::MAX_LEVELS;

use path::{Path, Step};

/// Why an operation was not applied.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TreeError {
    /// A node is not in memory. If the operation only read so far, nothing was changed: read the node and try again.
    #[error("node {} is not in memory", .0.bytenr)]
    Need(Expected),
    /// A node in memory is not the one that its parent names.
    #[error("node {bytenr}: its {what} is not that which its parent has")]
    Other {
        /// Its address.
        bytenr: u64,
        /// What differs.
        what: &'static str,
    },
    /// A node that the operation needs went from the memory after it was touched: a fault of whoever runs it.
    #[error("node {0} is no longer in memory")]
    Gone(u64),
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
    /// The references of a node cannot be counted.
    #[error("node {0}: its references do not add up")]
    Refs(u64),
}

/// The nodes in memory, for reading.
pub trait NodeSource {
    /// The bytes of a node, if it is in memory.
    fn get(&self, bytenr: u64) -> Option<&[u8]>;

    /// True if the node was only read, so that another one may have its address by now.
    fn is_clean(&self, bytenr: u64) -> bool;
}

/// The nodes in memory, for a tree that changes.
pub trait NodeMap: NodeSource {
    /// The memory of a node.
    type Bytes: DerefMut<Target = [u8]>;

    /// The bytes of a dirty node, to be changed.
    fn get_mut(&mut self, bytenr: u64) -> Option<&mut [u8]>;

    /// True if the open transaction made the node, did not write it yet, and only this tree has it. Such a node is always
    /// in memory, and is changed in place.
    fn is_own(&self, bytenr: u64) -> bool;

    /// True if a node, which is in memory, may be joined with another one: nothing else is needed in memory to copy it,
    /// and no references of its children change, for which no space was reserved.
    fn can_join(&self, bytenr: u64) -> bool;

    /// A node was copied: the tree has the new one in its place. `is_root`: as its root.
    ///
    /// # Errors
    /// If the references of the nodes cannot be counted.
    fn copied(&mut self, old: u64, new: u64, is_root: bool) -> Result<(), TreeError>;

    /// An address for a new node of a level, and zeroed memory for it. [`NodeMap::put`] puts it in.
    ///
    /// # Errors
    /// If there is none.
    fn allocate(&mut self, level: u8) -> Result<(u64, Self::Bytes), TreeError>;

    /// Takes the bytes of a dirty node out, to be changed. [`NodeMap::put`] gives them back.
    fn take(&mut self, bytenr: u64) -> Option<Self::Bytes>;

    /// Puts a dirty node in.
    fn put(&mut self, bytenr: u64, bytes: Self::Bytes);

    /// The root of another tree was copied as the root of this one, which shares all nodes below it.
    ///
    /// # Errors
    /// If the references of the nodes cannot be counted.
    fn root_shared(&mut self, old: u64, new: u64) -> Result<(), TreeError>;

    /// The tree no longer refers to a node, which may be in other trees.
    ///
    /// # Errors
    /// If the references of the node cannot be counted.
    fn drop_ref(&mut self, bytenr: u64) -> Result<(), TreeError>;

    /// A node is no longer part of the tree.
    ///
    /// # Errors
    /// If its references cannot be counted.
    fn free(&mut self, bytenr: u64) -> Result<(), TreeError>;
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

/// Where a key is, or would be.
struct Found {
    path: Path,
    /// True if there is such an item.
    found: bool,
    /// The first key of the next leaf.
    before: Option<Key>,
}

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

    /// Walks to all leaves that a range of keys may be in. An operation on these keys then finds all nodes that it needs.
    /// `see` is called with each node on the way, some of them several times.
    ///
    /// # Errors
    /// A node that is not in memory, or the error of `see`.
    pub fn touch<N: NodeSource>(
        &self,
        nodes: &N,
        range: RangeInclusive<Key>,
        mut see: impl FnMut(u64) -> Result<(), TreeError>,
    ) -> Result<(), TreeError> {
        let mut next = Some(*range.start());
        while let Some(key) = next.filter(|key| key <= range.end()) {
            let found = self.descend(nodes, key)?;
            found.path.iter().try_for_each(|step| see(step.bytenr))?;
            next = found.before;
        }
        Ok(())
    }

    /// The data of an item.
    ///
    /// # Errors
    /// If a node is not in memory.
    pub fn find<'n>(&self, nodes: &'n impl NodeSource, key: Key) -> Result<Option<&'n [u8]>, TreeError> {
        let Found { path, found, .. } = self.descend(nodes, key)?;
        if found { Ok(item(nodes, last(&path))?.map(|(_, data)| data)) } else { Ok(None) }
    }

    /// The first item of a range of keys.
    ///
    /// # Errors
    /// If a node is not in memory.
    pub fn first_of<'n>(
        &self,
        nodes: &'n impl NodeSource,
        range: RangeInclusive<Key>,
    ) -> Result<Option<(Key, &'n [u8])>, TreeError> {
        let mut found = self.descend(nodes, *range.start())?;
        loop {
            if let Some((key, data)) = item(nodes, last(&found.path))? {
                return Ok(range.contains(&key).then_some((key, data)));
            }
            // The next leaf need not be in memory if it begins behind the range.
            let Some(before) = found.before.filter(|before| before <= range.end()) else { return Ok(None) };
            found = self.descend(nodes, before)?;
        }
    }

    /// The last item of a range of keys.
    ///
    /// # Errors
    /// If a node is not in memory.
    pub fn last_of<'n>(
        &self,
        nodes: &'n impl NodeSource,
        range: RangeInclusive<Key>,
    ) -> Result<Option<(Key, &'n [u8])>, TreeError> {
        let Found { path, found, .. } = self.descend(nodes, *range.end())?;
        let Step { bytenr, slot } = last(&path);
        // In front of the first item of a leaf there is none: the pointer to the leaf is its first key.
        let slot = if found { Some(slot) } else { slot.checked_sub(1) };
        let last = slot.map(|slot| item(nodes, Step { bytenr, slot })).transpose()?.flatten();
        Ok(last.filter(|(key, _)| range.contains(key)))
    }

    /// Applies changes of items whose keys were touched.
    ///
    /// # Errors
    /// If an item to be inserted is there, or another one is not. Earlier changes were made then.
    pub fn apply(&mut self, nodes: &mut impl NodeMap, changes: &ItemChanges) -> Result<(), TreeError> {
        for (key, change) in changes.iter() {
            match change {
                ItemChange::Insert(data) => self.insert(nodes, key, data)?,
                ItemChange::Replace(data) => self.replace(nodes, key, data)?,
                ItemChange::Delete => {}
            }
        }
        // A leaf that becomes empty goes: a new item would come into a neighbour, which nobody touched.
        let mut deleted = changes.iter().filter(|(_, change)| matches!(change, ItemChange::Delete));
        deleted.try_for_each(|(key, _)| self.delete(nodes, key))
    }

    /// Copies the root node, unless the open transaction made it.
    ///
    /// # Errors
    /// If it is not in memory.
    pub fn copy_root(&mut self, nodes: &mut impl NodeMap) -> Result<(), TreeError> {
        let root = self.copy(nodes, self.root.bytenr)?;
        (self.root.bytenr, self.root.generation) = (root, self.header.generation.get());
        Ok(())
    }

    /// Inserts an item.
    ///
    /// # Errors
    /// If it is there, is too large for a leaf, or a node is not in memory.
    pub fn insert(&mut self, nodes: &mut impl NodeMap, key: Key, data: &[u8]) -> Result<(), TreeError> {
        let Found { mut path, found, .. } = self.descend(nodes, key)?;
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
        let Found { mut path, found, .. } = self.descend(nodes, key)?;
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
        let Found { mut path, found, .. } = self.descend(nodes, key)?;
        if !found {
            return Err(TreeError::Missing(key));
        }
        self.copy_path(nodes, &mut path)?;
        let Step { bytenr, slot } = last(&path);
        edit_leaf(nodes, bytenr, |leaf| leaf.delete(slot..slot + 1))?;
        let mut depth = path.len() - 1;
        // A node that is empty goes, and with it the pointer in its parent, which may be its last.
        while depth > 0 && count(nodes, path[depth].bytenr)? == 0 {
            nodes.free(path[depth].bytenr)?;
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

    /// The nodes to a key. Changes nothing.
    fn descend(&self, nodes: &impl NodeSource, key: Key) -> Result<Found, TreeError> {
        let RootNode { bytenr, level, generation } = self.root;
        let mut expected = Expected { bytenr, owner: self.header.owner.get(), level, generation, first_key: None };
        let (mut path, mut before) = (Path::new(), None);
        loop {
            let bytes = nodes.get(expected.bytenr).ok_or(TreeError::Need(expected))?;
            let node = decode(bytes, expected.bytenr)?;
            match check_place(&node, &expected, before) {
                // It was read before it was replaced.
                Err(TreeError::Other { what: "generation", .. }) if nodes.is_clean(expected.bytenr) => {
                    return Err(TreeError::Need(expected));
                }
                checked => checked?,
            }
            let bytenr = expected.bytenr;
            if node.header().level == 0 {
                let found = node.items().binary_search_by_key(&key, |item| item.key());
                path.push(Step { bytenr, slot: found.unwrap_or_else(|slot| slot) }).ok_or(TreeError::Height)?;
                return Ok(Found { path, found: found.is_ok(), before });
            }
            let slot = node.pointers().partition_point(|pointer| pointer.key() <= key).saturating_sub(1);
            path.push(Step { bytenr, slot }).ok_or(TreeError::Height)?;
            before = node.pointers().get(slot + 1).map(KeyPointer::key).or(before);
            let child = Expected::of_child(&node, slot, expected.owner);
            expected = child.ok_or(TreeError::Edit { bytenr, error: EditError::Slot { slot, count: 0 } })?;
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
        let (bytenr, mut bytes) = nodes.allocate(level)?;
        let header = Header { bytenr: bytenr.into(), level, ..self.header };
        let made = match level {
            0 => LeafMut::create(&mut bytes, &header).map(drop),
            _ => InnerMut::create(&mut bytes, &header).map(drop),
        };
        made.map_err(|error| TreeError::Edit { bytenr, error })?;
        nodes.put(bytenr, bytes);
        Ok(bytenr)
    }

    /// Copies the root node, which is that of another tree. All nodes below are then nodes of both.
    ///
    /// # Errors
    /// If it is not in memory, or there is no space.
    pub fn copy_shared_root(&mut self, nodes: &mut impl NodeMap) -> Result<(), TreeError> {
        let old = self.root.bytenr;
        let new = self.copy_node(nodes, old)?;
        (self.root.bytenr, self.root.generation) = (new, self.header.generation.get());
        nodes.root_shared(old, new)
    }

    /// Removes the first pointer of the first node of a level, with the nodes above that become empty. The child is no
    /// longer referred to by this tree, and is free if it `is_last_ref`. At least the root stays: without children it
    /// becomes an empty leaf.
    ///
    /// # Errors
    /// If a node above is not in memory, or there is no space for copies.
    pub fn remove_first(&mut self, nodes: &mut impl NodeMap, level: u8, is_last_ref: bool) -> Result<(), TreeError> {
        let mut path = Path::new();
        let (mut bytenr, mut at) = (self.root.bytenr, self.root.level);
        while at >= level.max(1) {
            path.push(Step { bytenr, slot: 0 }).ok_or(TreeError::Height)?;
            bytenr = pointer(nodes, Step { bytenr, slot: 0 })?.blockptr.get();
            at -= 1;
        }
        self.copy_path(nodes, &mut path)?;
        let mut depth = path.len().checked_sub(1).ok_or(TreeError::Gone(bytenr))?;
        let child = pointer(nodes, path[depth])?.blockptr.get();
        if is_last_ref {
            nodes.free(child)?
        } else {
            nodes.drop_ref(child)?
        }
        edit_inner(nodes, path[depth].bytenr, |inner| inner.delete(0..1))?;
        while depth > 0 && count(nodes, path[depth].bytenr)? == 0 {
            nodes.free(path[depth].bytenr)?;
            depth -= 1;
            edit_inner(nodes, path[depth].bytenr, |inner| inner.delete(0..1))?;
        }
        match depth == 0 && count(nodes, path[0].bytenr)? == 0 {
            true => self.make_root_empty(nodes),
            false => self.fix_first_key(nodes, &path, depth),
        }
    }

    /// Frees the root node, which is the last one.
    ///
    /// # Errors
    /// If its references cannot be counted.
    pub fn free_root(&mut self, nodes: &mut impl NodeMap) -> Result<(), TreeError> {
        nodes.free(self.root.bytenr)
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
        if nodes.is_own(bytenr) {
            return Ok(bytenr);
        }
        let new = self.copy_node(nodes, bytenr)?;
        nodes.copied(bytenr, new, bytenr == self.root.bytenr)?;
        Ok(new)
    }

    /// A copy of a node at another address, which belongs to this tree.
    fn copy_node(&self, nodes: &mut impl NodeMap, bytenr: u64) -> Result<u64, TreeError> {
        let old = read(nodes, bytenr)?.header();
        let (level, flags) = (old.level, old.flags.get() & !(flags::WRITTEN | flags::RELOC));
        let (new, mut bytes) = nodes.allocate(level)?;
        bytes.copy_from_slice(nodes.get(bytenr).ok_or(TreeError::Gone(bytenr))?);
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
        let mut buffers: Vec<_> = new.iter().map(|new| take(nodes, *new)).collect::<Result<_, _>>()?;
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
        path.grow(Step { bytenr: new, slot: 0 }).ok_or(TreeError::Height)
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
            let is_there = |bytenr| nodes.get(bytenr).is_some() && nodes.can_join(bytenr);
            let fits = match (is_there(first), is_there(second)) {
                (true, true) => fit_together(&read(nodes, first)?, &read(nodes, second)?),
                _ => false,
            };
            if fits {
                let first = self.copy_child(nodes, Step { slot: left, ..parent })?;
                let second = self.copy_child(nodes, Step { slot: left + 1, ..parent })?;
                join_two(nodes, first, second)?;
                nodes.free(second)?;
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
            let child = pointer(nodes, root)?.blockptr.get();
            if nodes.get(child).is_none() || !nodes.can_join(child) {
                return Ok(());
            }
            let child = self.copy_child(nodes, root)?;
            nodes.free(root.bytenr)?;
            (self.root.bytenr, self.root.level) = (child, self.root.level - 1);
        }
        Ok(())
    }

    fn make_root_empty(&mut self, nodes: &mut impl NodeMap) -> Result<(), TreeError> {
        nodes.free(self.root.bytenr)?;
        (self.root.bytenr, self.root.level) = (self.new_node(nodes, 0)?, 0);
        Ok(())
    }
}

fn last(path: &Path) -> Step {
    *path.last().expect("a path has at least the root")
}

fn item<N: NodeSource>(nodes: &N, Step { bytenr, slot }: Step) -> Result<Option<(Key, &[u8])>, TreeError> {
    let leaf = read(nodes, bytenr)?;
    let Some(head) = leaf.items().get(slot) else { return Ok(None) };
    let data = leaf.data(head).ok_or(TreeError::Edit { bytenr, error: EditError::Slot { slot, count: 0 } })?;
    Ok(Some((head.key(), data)))
}

/// Checks that a node in memory is the one that its parent names, and ends before the next one begins. A node of another
/// tree, or an older one, may have had the same address.
fn check_place(node: &Node, expected: &Expected, before: Option<Key>) -> Result<(), TreeError> {
    let header = node.header();
    let is_of_tree = header.owner == expected.owner
        || objectid::is_subvolume(expected.owner) && objectid::is_subvolume(header.owner.get());
    let is_first = expected.first_key.is_none_or(|key| node.first_key() == Some(key));
    let ends = before.is_none_or(|before| node.last_key().is_none_or(|last| last < before));
    let wrong = [
        ("level", header.level != expected.level),
        ("generation", header.generation != expected.generation),
        ("tree", !is_of_tree),
        ("first key", !is_first),
        ("last key", !ends),
    ];
    match wrong.iter().find(|(_, is_wrong)| *is_wrong) {
        Some((what, _)) => Err(TreeError::Other { bytenr: expected.bytenr, what }),
        None => Ok(()),
    }
}

fn decode(bytes: &[u8], bytenr: u64) -> Result<Node<'_>, TreeError> {
    Node::decode(bytes).map_err(|error| TreeError::Edit { bytenr, error: error.into() })
}

fn read<N: NodeSource>(nodes: &N, bytenr: u64) -> Result<Node<'_>, TreeError> {
    decode(nodes.get(bytenr).ok_or(TreeError::Gone(bytenr))?, bytenr)
}

fn count(nodes: &impl NodeSource, bytenr: u64) -> Result<usize, TreeError> {
    Ok(read(nodes, bytenr)?.header().nritems.get() as usize)
}

fn pointer(nodes: &impl NodeSource, Step { bytenr, slot }: Step) -> Result<KeyPointer, TreeError> {
    let node = read(nodes, bytenr)?;
    let count = node.pointers().len();
    node.pointers().get(slot).copied().ok_or(TreeError::Edit { bytenr, error: EditError::Slot { slot, count } })
}

fn take<N: NodeMap>(nodes: &mut N, bytenr: u64) -> Result<N::Bytes, TreeError> {
    nodes.take(bytenr).ok_or(TreeError::Gone(bytenr))
}

fn edit_leaf<T>(
    nodes: &mut impl NodeMap,
    bytenr: u64,
    edit: impl FnOnce(&mut LeafMut) -> Result<T, EditError>,
) -> Result<T, TreeError> {
    let bytes = nodes.get_mut(bytenr).ok_or(TreeError::Gone(bytenr))?;
    // A dirty node was opened when it was made.
    let result = LeafMut::reopen(bytes).and_then(|mut leaf| edit(&mut leaf));
    result.map_err(|error| TreeError::Edit { bytenr, error })
}

fn edit_inner<T>(
    nodes: &mut impl NodeMap,
    bytenr: u64,
    edit: impl FnOnce(&mut InnerMut) -> Result<T, EditError>,
) -> Result<T, TreeError> {
    let bytes = nodes.get_mut(bytenr).ok_or(TreeError::Gone(bytenr))?;
    let result = InnerMut::reopen(bytes).and_then(|mut inner| edit(&mut inner));
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
