//! The open transaction: the trees as they are now, the nodes that it made, its delayed references, and its space. All in
//! memory, all owned by one core, changed by functions that never wait.
//!
//! Invariants:
//! - Whatever changes is first looked at. A function that meets a node which is not in memory before it changed anything
//!   returns [`ChangeError::Need`], and is called again from the start when the node is there.
//! - [`Transaction::changes`] counts changes. If a function fails after it changed something, the transaction is neither
//!   the old nor the new state, and must never be written.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use sealblock_btrfs_format::features::CompatRo;
use sealblock_btrfs_format::item_changes::ItemChanges;
use sealblock_btrfs_format::items::extent::ExtentFlags;
use sealblock_btrfs_format::items::inode::Timespec;
use sealblock_btrfs_format::items::root::{RootItemBuf, RootNode};
use sealblock_btrfs_format::key::{ItemType, Key, objectid};
use sealblock_btrfs_format::node::{Header, Node, flags};
use sealblock_btrfs_format::superblock::{Geometry, Superblock};
use zerocopy::FromZeros;

use crate::chunks::Chunks;
use crate::cow::{Sharing, refs_of};
use crate::csums::CsumShape;
use crate::editor::{Editor, use_of};
pub use crate::error::ChangeError;
use crate::nodes::Nodes;
use crate::refs::{DelayedRefs, Released};
use crate::space::{Space, Use};
use crate::tree::{NodeSource, Tree};
use crate::view::{Items, TreeView};

/// A tree that is open.
#[derive(Clone, Debug)]
struct OpenTree {
    tree: Tree,
    /// Its root item; `None` for the root tree and the chunk tree, whose roots the superblock has.
    item: Option<(Key, RootItemBuf)>,
    /// Bytes of its nodes.
    bytes_used: u64,
    /// When files in it changed in the open transaction.
    changed: Option<Timespec>,
}

impl OpenTree {
    fn sharing(&self, generation: u64) -> Sharing {
        let last_snapshot = self.item.as_ref().map_or(0, |(_, item)| item.head.last_snapshot.get());
        Sharing { last_snapshot, is_now: last_snapshot == generation }
    }
}

/// The state of the filesystem in the open transaction.
pub struct Transaction {
    geometry: Geometry,
    chunk_tree_uuid: [u8; 16],
    trees: BTreeMap<u64, OpenTree>,
    /// Its nodes.
    pub nodes: Nodes,
    /// Its space.
    pub space: Space,
    /// Its delayed references.
    pub refs: DelayedRefs,
    /// Data extents that live and have fewer references than in the last durable transaction.
    pub released: Released,
    /// Its chunks.
    pub chunks: Chunks,
    /// The highest number that a new subvolume got.
    pub highest_subvolume: u64,
    /// The superblock of the last transaction, with the system chunks of the open one.
    pub superblock: Superblock,
    /// True if all devices can keep the checksums of data ([`crate::datasum`]).
    pub has_device_sums: bool,
    changes: u64,
}

impl Transaction {
    /// The state of a filesystem as its superblock has it; the open transaction has this number. `chunk_tree_uuid` is
    /// that of the header of its nodes.
    pub fn new(
        superblock: &Superblock,
        geometry: Geometry,
        chunks: Chunks,
        chunk_tree_uuid: [u8; 16],
        cache_bytes: usize,
    ) -> Transaction {
        let mut transaction = Transaction {
            geometry,
            chunk_tree_uuid,
            trees: BTreeMap::new(),
            nodes: Nodes::new(geometry.node_bytes, cache_bytes),
            space: Space::new(geometry.node_bytes, geometry.sector_bytes),
            refs: DelayedRefs::new(),
            released: Released::default(),
            chunks,
            highest_subvolume: 0,
            superblock: *superblock,
            has_device_sums: false,
            changes: 0,
        };
        let root = |bytenr: u64, level, generation| RootNode { bytenr, level, generation };
        let tree = root(superblock.root.get(), superblock.root_level, superblock.generation.get());
        let generation = superblock.chunk_root_generation.get();
        let chunk = root(superblock.chunk_root.get(), superblock.chunk_root_level, generation);
        transaction.add_tree(objectid::ROOT_TREE, tree, None, 0);
        transaction.add_tree(objectid::CHUNK_TREE, chunk, None, 0);
        transaction
    }

    /// The sizes and features of the filesystem; the generation is that of the open transaction.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The number of the open transaction.
    pub fn generation(&self) -> u64 {
        self.geometry.generation
    }

    /// The next transaction is open. Every dirty node was frozen.
    pub fn open_next(&mut self) {
        debug_assert!(self.nodes.dirty_count() == 0 && self.refs.is_empty());
        self.geometry.generation += 1;
        self.released.freeze();
        self.trees.values_mut().for_each(|open| open.changed = None);
    }

    /// Something changes that is not part of a tree.
    pub fn count_change(&mut self) {
        self.changes += 1;
    }

    /// A number that grows with each change.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// The sizes of checksums.
    pub fn csum_shape(&self) -> CsumShape {
        let Geometry { sector_bytes, node_bytes, checksum, .. } = self.geometry;
        CsumShape { sector_bytes, node_bytes, csum_bytes: checksum.bytes() }
    }

    /// The tree in which block groups have their items.
    pub fn group_tree(&self) -> u64 {
        let has_own = self.geometry.features.compat_ro.contains(CompatRo::BLOCK_GROUP_TREE);
        if has_own { objectid::BLOCK_GROUP_TREE } else { objectid::EXTENT_TREE }
    }

    /// The root node of an open tree.
    pub fn root(&self, id: u64) -> Option<RootNode> {
        self.trees.get(&id).map(|open| open.tree.root)
    }

    /// The number of open trees.
    pub fn open_trees(&self) -> u64 {
        self.trees.len() as u64
    }

    /// The level of the root of an open tree, and how many nodes it has at most.
    pub fn size_of(&self, id: u64) -> (u8, u64) {
        let Some(open) = self.trees.get(&id) else { return (0, 1) };
        let nodes = match &open.item {
            Some(_) => open.bytes_used / u64::from(self.geometry.node_bytes),
            // Nothing says how many nodes these trees have.
            None => u64::MAX,
        };
        (open.tree.root.level, nodes)
    }

    fn add_tree(&mut self, id: u64, root: RootNode, item: Option<(Key, RootItemBuf)>, bytes_used: u64) {
        self.trees.insert(id, OpenTree { tree: self.tree(id, root), item, bytes_used, changed: None });
    }

    fn tree(&self, id: u64, root: RootNode) -> Tree {
        let header = Header {
            fsid: self.geometry.node_uuid,
            flags: flags::MIXED_BACKREF.into(),
            chunk_tree_uuid: self.chunk_tree_uuid,
            owner: id.into(),
            ..Header::new_zeroed()
        };
        Tree { root, header, node_bytes: self.geometry.node_bytes }
    }

    /// Reads items of a tree, which need not be open for that.
    ///
    /// # Errors
    /// If there is none, a node of the root tree is not in memory, and those of `read`.
    pub fn peek<T>(
        &self,
        id: u64,
        read: impl FnOnce(&TreeView<'_, Nodes>) -> Result<T, ChangeError>,
    ) -> Result<T, ChangeError> {
        let tree = match self.trees.get(&id) {
            Some(open) => open.tree,
            None => self.tree(id, self.stored_root(id)?.0),
        };
        read(&tree.view(&self.nodes))
    }

    /// Opens a tree, if it is not open.
    ///
    /// # Errors
    /// If there is none, or a node of the root tree is not in memory.
    pub fn open_tree(&mut self, id: u64) -> Result<(), ChangeError> {
        if self.trees.contains_key(&id) {
            return Ok(());
        }
        let (root, key, item) = self.stored_root(id)?;
        let bytes_used = item.head.bytes_used.get();
        self.add_tree(id, root, Some((key, item)), bytes_used);
        Ok(())
    }

    /// The root node of a tree, as the root tree has it, and the item.
    fn stored_root(&self, id: u64) -> Result<(RootNode, Key, RootItemBuf), ChangeError> {
        let key = |offset| Key::new(id, ItemType::ROOT_ITEM, offset);
        // A tree has one item; a snapshot's has the transaction that made it in its key.
        let roots = self.view(objectid::ROOT_TREE)?;
        let found = roots.last(key(0)..=key(u64::MAX))?;
        let (key, data) = found.ok_or(ChangeError::NoTree(id))?;
        let item = RootItemBuf::decode(data).map_err(|_| ChangeError::Item(key))?;
        let (bytenr, generation) = (item.head.bytenr.get(), item.head.generation.get());
        Ok((RootNode { bytenr, level: item.head.level, generation }, key, item))
    }

    /// The extent tree, to be read.
    ///
    /// # Errors
    /// If it is not open.
    pub fn extent_tree(&self) -> Result<Tree, ChangeError> {
        let open = self.trees.get(&objectid::EXTENT_TREE);
        Ok(open.ok_or(ChangeError::NoTree(objectid::EXTENT_TREE))?.tree)
    }

    /// Forgets a tree that is gone.
    pub fn close_tree(&mut self, id: u64) {
        self.trees.remove(&id);
    }

    /// The items of an open tree.
    ///
    /// # Errors
    /// If it is not open.
    pub fn view(&self, id: u64) -> Result<TreeView<'_, Nodes>, ChangeError> {
        let open = self.trees.get(&id).ok_or(ChangeError::NoTree(id))?;
        Ok(open.tree.view(&self.nodes))
    }

    /// Walks to a range of keys of an open tree, so that its items can be changed.
    ///
    /// # Errors
    /// If a node is not in memory.
    pub fn touch(&self, id: u64, range: RangeInclusive<Key>) -> Result<(), ChangeError> {
        self.touch_counting(id, range).map(drop)
    }

    /// As [`Transaction::touch`]. Returns the number of children of nodes on the way that other trees share: when such a
    /// node is copied, each of them gets a reference.
    ///
    /// # Errors
    /// If a node is not in memory.
    pub fn touch_counting(&self, id: u64, range: RangeInclusive<Key>) -> Result<u64, ChangeError> {
        self.touch_as(id, range, None)
    }

    /// As [`Transaction::touch_counting`], for a change before which the nodes of the tree become shared as `sharing` says.
    ///
    /// # Errors
    /// If a node is not in memory.
    pub fn touch_as(&self, id: u64, range: RangeInclusive<Key>, sharing: Option<Sharing>) -> Result<u64, ChangeError> {
        let open = self.trees.get(&id).ok_or(ChangeError::NoTree(id))?;
        if open.item.is_some_and(|(key, _)| key.offset == self.geometry.generation) {
            return Err(ChangeError::NewSnapshot(id));
        }
        let will_share = sharing.is_some();
        let sharing = sharing.unwrap_or_else(|| open.sharing(self.geometry.generation));
        let extents = self.trees.get(&objectid::EXTENT_TREE);
        let mut children = 0;
        let see = |bytenr: u64| {
            let Some(node) = self.nodes.get(bytenr).and_then(|bytes| Node::decode(bytes).ok()) else { return Ok(()) };
            let may_share = bytenr != open.tree.root.bytenr && sharing.may_have(id, &node);
            if let Some(extents) = extents.filter(|_| may_share) {
                let (refs, flags) = refs_of(bytenr, &extents.tree, &self.nodes, &self.refs)?;
                let is_changed = refs > 1 || will_share || flags.contains(ExtentFlags::FULL_BACKREF);
                children += if is_changed { 2 * u64::from(node.header().nritems.get()) } else { 0 };
            }
            Ok(())
        };
        open.tree.touch(&self.nodes, range, see)?;
        Ok(children)
    }

    /// Sees to it that the root node of an open tree is in memory.
    ///
    /// # Errors
    /// If it is not.
    pub fn touch_root(&self, id: u64) -> Result<(), ChangeError> {
        self.touch(id, Key::MIN..=Key::MIN)
    }

    /// Changes an open tree, all nodes of which that are needed are in memory.
    ///
    /// # Errors
    /// That of the change.
    pub fn edit<T, E: From<ChangeError>>(
        &mut self,
        id: u64,
        change: impl FnOnce(&mut Tree, &mut Editor) -> Result<T, E>,
    ) -> Result<T, E> {
        let generation = self.geometry.generation;
        let open = self.trees.get(&id).ok_or(ChangeError::NoTree(id))?;
        let (mut tree, bytes_used, sharing) = (open.tree, open.bytes_used, open.sharing(generation));
        // Only a subvolume looks at it, and only to read.
        let extents = self.trees.get(&objectid::EXTENT_TREE).map_or(tree, |extents| extents.tree);
        tree.header.generation = generation.into();
        let Transaction { nodes, space, refs, changes, .. } = self;
        let (owner, root) = (id, tree.root.bytenr);
        let mut editor = Editor { nodes, space, refs, owner, root, sharing, extents, generation, bytes_used, changes };
        let result = change(&mut tree, &mut editor);
        let bytes_used = editor.bytes_used;
        let open = self.trees.get_mut(&id).ok_or(ChangeError::NoTree(id))?;
        (open.tree, open.bytes_used) = (tree, bytes_used);
        result
    }

    /// Applies changes of items to an open tree: walks to all keys first, and sees to it that there is space.
    ///
    /// # Errors
    /// If a node is not in memory, there is no space, or items contradict the changes.
    pub fn apply(&mut self, id: u64, changes: &ItemChanges) -> Result<(), ChangeError> {
        if changes.is_empty() {
            return Ok(());
        }
        changes.iter().try_for_each(|(key, _)| self.touch(id, key..=key))?;
        self.prepare_nodes(id, changes.len() as u64)?;
        self.edit(id, |tree, editor| Ok(tree.apply(editor, changes)?))
    }

    /// Sees to it that there is space for the nodes that this number of changes of a tree may need.
    ///
    /// # Errors
    /// If there is none, or a node of the free space tree is not in memory.
    pub fn prepare_nodes(&mut self, id: u64, changes: u64) -> Result<(), ChangeError> {
        self.prepare(use_of(id), self.nodes_of_changes(id, changes))
    }

    /// As [`Transaction::prepare_nodes`], for changes of several trees that are made together, none of which is the
    /// chunk tree, and some more nodes.
    ///
    /// # Errors
    /// If there is no space, or a node of the free space tree is not in memory.
    pub fn prepare_trees(
        &mut self,
        changes: impl IntoIterator<Item = (u64, u64)>,
        more: u64,
    ) -> Result<(), ChangeError> {
        let nodes = changes.into_iter().map(|(id, changes)| self.nodes_of_changes(id, changes));
        let nodes = nodes.fold(more, u64::saturating_add);
        self.prepare(Use::Metadata, nodes)
    }

    /// Each change may copy the path to its leaf, and split it.
    fn nodes_of_changes(&self, id: u64, changes: u64) -> u64 {
        let height = u64::from(self.root(id).map_or(0, |root| root.level)) + 1;
        changes.saturating_mul(2 * height + 2)
    }

    /// Sees to it that a number of nodes can be allocated.
    ///
    /// # Errors
    /// If there is no space, or a node of the free space tree is not in memory.
    pub fn prepare(&mut self, what: Use, nodes: u64) -> Result<(), ChangeError> {
        let open = self.trees.get(&objectid::FREE_SPACE_TREE);
        let tree = open.ok_or(ChangeError::NoTree(objectid::FREE_SPACE_TREE))?.tree;
        Ok(self.space.prepare(what, nodes, &tree.view(&self.nodes))?)
    }

    /// Allocates space for data, see [`Space::allocate_data`].
    ///
    /// # Errors
    /// If there is no space, or a node of the free space tree is not in memory.
    pub fn allocate_data(&mut self, bytes: u64) -> Result<std::ops::Range<u64>, ChangeError> {
        let open = self.trees.get(&objectid::FREE_SPACE_TREE);
        let tree = open.ok_or(ChangeError::NoTree(objectid::FREE_SPACE_TREE))?.tree;
        Ok(self.space.allocate_data(bytes, &tree.view(&self.nodes))?)
    }

    /// Reads the free space of the group that has an address.
    ///
    /// # Errors
    /// If a node of the free space tree is not in memory.
    pub fn load_group(&mut self, at: u64) -> Result<(), ChangeError> {
        let open = self.trees.get(&objectid::FREE_SPACE_TREE);
        let tree = open.ok_or(ChangeError::NoTree(objectid::FREE_SPACE_TREE))?.tree;
        Ok(self.space.load(at, &tree.view(&self.nodes))?)
    }

    /// The root items that do not have the root nodes of their trees: the keys, and the items as they must be.
    pub fn changed_roots(&self) -> Vec<(u64, Key, RootItemBuf)> {
        let changed = self.trees.iter().filter_map(|(id, open)| {
            let (key, item) = open.item.as_ref()?;
            let head = &item.head;
            let RootNode { bytenr, level, generation } = open.tree.root;
            let is_same = head.bytenr == bytenr
                && head.level == level
                && head.generation == generation
                && head.bytes_used == open.bytes_used;
            if is_same {
                return None;
            }
            let mut new = *item;
            new.set_root(open.tree.root, open.bytes_used, [0; 16]);
            if let Some(now) = open.changed {
                new.set_changed(self.geometry.generation, now);
            }
            Some((*id, *key, new))
        });
        changed.collect()
    }

    /// The root item of an open tree was changed in the root tree.
    pub fn set_root_item(&mut self, id: u64, key: Key, item: RootItemBuf) {
        if let Some(open) = self.trees.get_mut(&id) {
            open.item = Some((key, item));
        }
    }

    /// The root item of an open tree, and its key. The root node in it may be an older one.
    pub fn root_item(&self, id: u64) -> Option<(Key, RootItemBuf)> {
        self.trees.get(&id)?.item
    }

    /// Files of a subvolume changed at this time.
    pub fn mark_changed(&mut self, id: u64, now: Timespec) {
        if let Some(open) = self.trees.get_mut(&id).filter(|_| objectid::is_subvolume(id)) {
            open.changed = Some(now);
        }
    }

    /// Makes the first node of a new tree, whose root item is stored.
    ///
    /// # Errors
    /// If there is no space.
    pub fn create_tree(&mut self, id: u64, key: Key, item: RootItemBuf) -> Result<(), ChangeError> {
        self.add_tree(id, RootNode { bytenr: 0, level: 0, generation: 0 }, Some((key, item)), 0);
        self.edit(id, |tree, editor| {
            *tree = Tree::create(tree.header, tree.node_bytes, editor)?;
            Ok(())
        })
    }

    /// The number of children of the root node of an open tree.
    ///
    /// # Errors
    /// If it is not in memory.
    pub fn children_of_root(&self, id: u64) -> Result<u64, ChangeError> {
        self.touch_root(id)?;
        let root = self.root(id).ok_or(ChangeError::NoTree(id))?;
        let node = self.nodes.get(root.bytenr).and_then(|bytes| Node::decode(bytes).ok());
        Ok(node.map_or(0, |node| node.header().nritems.get().into()))
    }

    /// Makes a tree that has a copy of the root node of another one, and shares all nodes below with it. The other tree
    /// gets a root node that is its own.
    ///
    /// # Errors
    /// If the root is not in memory, or there is no space.
    pub fn copy_as_snapshot(&mut self, source: u64, id: u64, key: Key, item: RootItemBuf) -> Result<(), ChangeError> {
        self.edit(source, |tree, editor| Ok::<_, ChangeError>(tree.copy_root(editor)?))?;
        let open = self.trees.get(&source).ok_or(ChangeError::NoTree(source))?;
        let (root, bytes_used) = (open.tree.root, open.bytes_used);
        let node_bytes = u64::from(self.geometry.node_bytes);
        self.add_tree(id, root, Some((key, item)), bytes_used.saturating_sub(node_bytes));
        self.edit(id, |tree, editor| Ok(tree.copy_shared_root(editor)?))
    }
}
