//! Drops the nodes of deleted subvolumes, in steps of a limited size.
//!
//! A step takes the first node that hangs on the left edge of the tree: the first leaf, or the first node that other
//! subvolumes share. Its references go, and its pointer. So the tree gets smaller from its left, and is a valid tree after
//! each step: whoever opens the filesystem next goes on, without any other record of how far it was.
//!
//! A node that is shared lives on. If it was made for this subvolume, its children are referred to by the subvolume's
//! number, which is about to go; so these references are changed first to ones by the node, and those of all nodes below
//! that were made for this subvolume, too. It is done from below: a node that refers by itself (FULL_BACKREF) has only such
//! nodes below it.
//!
//! Invariants:
//! - A step begins only if it can be completed, like any other change.
//! - A subvolume that Linux has begun to drop is left to it. It records how far it was in the root item, and leaves
//!   pointers to nodes that are gone; those could be cut off. But it changes the references of shared nodes from above, so
//!   that a node with FULL_BACKREF may have nodes below it that are still referred to by the subvolume's number, and
//!   nothing tells whether it was interrupted in there. To drop the reference to such a node would leave these for ever.

use sealblock_btrfs_format::checker::Expected;
use sealblock_btrfs_format::item_changes::ItemChanges;
use sealblock_btrfs_format::items::extent::ExtentFlags;
use sealblock_btrfs_format::items::root::RootItemBuf;
use sealblock_btrfs_format::key::{DiskKey, ItemType, Key, objectid};
use sealblock_btrfs_format::node::Node;

use crate::change::Change;
use crate::cow::{By, children, refs_of};
use crate::transaction::{ChangeError, Transaction};
use crate::tree::{NodeSource, TreeError};

/// The result of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Dropped {
    /// There is more to drop.
    Some,
    /// The tree is gone, with its root item.
    All,
    /// Linux has begun to drop it, and will go on when it mounts the filesystem.
    LeftToLinux,
}

/// What a step does next.
enum Next {
    /// The root is a leaf, and the last node.
    Root,
    /// The first child of the node at this level above it goes. It is a leaf if `is_shared` is false.
    Child { bytenr: u64, above: u8, is_shared: bool, is_full: bool },
    /// The references of a node, below the first one that is shared, are changed.
    Convert(u64),
}

/// A child of a node.
struct Child {
    bytenr: u64,
    refs: u64,
    flags: ExtentFlags,
    expected: Expected,
}

impl Transaction {
    /// The first deleted subvolume with this number or a higher one.
    ///
    /// # Errors
    /// If a node of the root tree is not in memory.
    pub fn next_dead(&self, from: u64) -> Result<Option<u64>, ChangeError> {
        use crate::view::Items;
        let key = |id| Key::new(objectid::ORPHAN, ItemType::ORPHAN_ITEM, id);
        Ok(self.view(objectid::ROOT_TREE)?.first(key(from)..=key(u64::MAX))?.map(|(key, _)| key.offset))
    }

    /// The first subvolume with this number or a higher one that is not deleted.
    ///
    /// # Errors
    /// If a node of the root tree is not in memory, or a root item is damaged.
    pub fn next_alive(&self, from: u64) -> Result<Option<u64>, ChangeError> {
        use crate::view::Items;
        let roots = self.view(objectid::ROOT_TREE)?;
        let mut id = from.max(objectid::FS_TREE);
        loop {
            let range = Key::new(id, ItemType::ROOT_ITEM, 0)..=Key::new(u64::MAX, ItemType::ROOT_ITEM, u64::MAX);
            let Some((key, data)) = roots.first(range)? else { return Ok(None) };
            if key.item_type == ItemType::ROOT_ITEM && objectid::is_subvolume(key.objectid) {
                let item = RootItemBuf::decode(data).map_err(|_| ChangeError::Item(key))?;
                if item.head.refs.get() != 0 {
                    return Ok(Some(key.objectid));
                }
            }
            // Other items are between those of two roots.
            id = match key.item_type < ItemType::ROOT_ITEM {
                true => key.objectid,
                false => key.objectid.saturating_add(1),
            };
            if id > objectid::LAST_FREE {
                return Ok(None);
            }
        }
    }

    /// Drops some nodes of a deleted subvolume, which is open and which nobody uses.
    ///
    /// # Errors
    /// If a node is not in memory, or there is no space for the changes.
    pub fn drop_step(&mut self, id: u64) -> Result<Dropped, ChangeError> {
        let (key, item) = self.root_item(id).ok_or(ChangeError::NoTree(id))?;
        if item.head.refs.get() != 0 {
            return Err(ChangeError::Item(key));
        }
        if item.head.drop_progress != DiskKey::from(Key::MIN) || item.head.drop_level != 0 {
            return Ok(Dropped::LeftToLinux);
        }
        match self.next_to_drop(id)? {
            Next::Convert(bytenr) => {
                self.convert(id, bytenr)?;
                Ok(Dropped::Some)
            }
            Next::Child { bytenr, above, is_shared, is_full } => {
                self.drop_child(id, bytenr, above, (is_shared, is_full))
            }
            Next::Root => {
                self.drop_root(id, key)?;
                Ok(Dropped::All)
            }
        }
    }

    fn next_to_drop(&self, id: u64) -> Result<Next, ChangeError> {
        let root = self.root(id).ok_or(ChangeError::NoTree(id))?;
        self.touch_root(id)?;
        let (mut bytenr, mut level) = (root.bytenr, root.level);
        if level == 0 {
            return Ok(Next::Root);
        }
        loop {
            let first = self.child(id, bytenr, 0)?.ok_or(TreeError::Refs(bytenr))?;
            let is_full = first.flags.contains(ExtentFlags::FULL_BACKREF);
            if first.refs > 1 {
                let is_own = self.is_made_for(id, &first)?;
                return Ok(match is_own && !is_full {
                    true => Next::Convert(self.first_to_convert(id, first.bytenr)?),
                    false => Next::Child { bytenr: first.bytenr, above: level, is_shared: true, is_full },
                });
            }
            if level == 1 {
                self.node(&first.expected)?;
                return Ok(Next::Child { bytenr: first.bytenr, above: 1, is_shared: false, is_full });
            }
            self.node(&first.expected)?;
            (bytenr, level) = (first.bytenr, level - 1);
        }
    }

    /// A child of a node in memory, with its references.
    fn child(&self, id: u64, bytenr: u64, slot: usize) -> Result<Option<Child>, ChangeError> {
        let bytes = self.nodes.get(bytenr).ok_or(TreeError::Gone(bytenr))?;
        let node = Node::decode(bytes).map_err(|_| TreeError::Refs(bytenr))?;
        let Some(expected) = Expected::of_child(&node, slot, id) else { return Ok(None) };
        let extents = self.extent_tree()?;
        let (refs, flags) = refs_of(expected.bytenr, &extents, &self.nodes, &self.refs)?;
        Ok(Some(Child { bytenr: expected.bytenr, refs, flags, expected }))
    }

    /// A node in memory.
    fn node(&self, expected: &Expected) -> Result<Node<'_>, ChangeError> {
        let bytes = self.nodes.get(expected.bytenr).ok_or(TreeError::Need(*expected))?;
        let node = Node::decode(bytes).map_err(|_| TreeError::Refs(expected.bytenr))?;
        match node.header().generation == expected.generation && node.header().level == expected.level {
            true => Ok(node),
            false => Err(TreeError::Other { bytenr: expected.bytenr, what: "generation or level" }.into()),
        }
    }

    /// True if a node was made for a subvolume, and not for the one whose snapshot it is.
    fn is_made_for(&self, id: u64, child: &Child) -> Result<bool, ChangeError> {
        // What is older than the snapshot was made for its source.
        let made = self.root_item(id).map_or(0, |(key, _)| key.offset);
        Ok(child.expected.generation >= made && self.node(&child.expected)?.header().owner == id)
    }

    /// The node to convert first: one that has no node below it that is still to be converted.
    fn first_to_convert(&self, id: u64, top: u64) -> Result<u64, ChangeError> {
        let mut bytenr = top;
        'down: loop {
            let bytes = self.nodes.get(bytenr).ok_or(TreeError::Gone(bytenr))?;
            let node = Node::decode(bytes).map_err(|_| TreeError::Refs(bytenr))?;
            if node.header().level == 0 {
                return Ok(bytenr);
            }
            for slot in 0..node.pointers().len() {
                let Some(child) = self.child(id, bytenr, slot)? else { break };
                if !child.flags.contains(ExtentFlags::FULL_BACKREF) && self.is_made_for(id, &child)? {
                    bytenr = child.bytenr;
                    continue 'down;
                }
            }
            return Ok(bytenr);
        }
    }

    /// The children of a node get references by the node instead of ones by its tree.
    fn convert(&mut self, id: u64, bytenr: u64) -> Result<(), ChangeError> {
        let bytes = self.nodes.get(bytenr).ok_or(TreeError::Gone(bytenr))?;
        let node = Node::decode(bytes).map_err(|_| TreeError::Refs(bytenr))?;
        let (by_tree, by_node) = (children(&node, By::Tree(id))?, children(&node, By::Node(bytenr))?);
        self.admit(&[], 1 + 2 * by_tree.len() as u64, true)?;
        self.count_change();
        for (child, what) in by_node {
            self.refs.add(child, what, 1)?;
        }
        for (child, what) in by_tree {
            self.refs.drop(child, what, 1)?;
        }
        self.refs.set_flags(bytenr, ExtentFlags::FULL_BACKREF);
        Ok(())
    }

    /// The first child of the first node of a level goes: only its reference if it is shared, and otherwise, as it is a
    /// leaf, also those of its extents.
    fn drop_child(
        &mut self,
        id: u64,
        bytenr: u64,
        above: u8,
        (is_shared, is_full): (bool, bool),
    ) -> Result<Dropped, ChangeError> {
        let of_extents = if is_shared { Vec::new() } else { self.refs_of_leaf(id, bytenr, is_full)? };
        let height = u64::from(self.root(id).map_or(0, |root| root.level)) + 1;
        // The nodes on the left edge are copied, and may pass on references of all their children.
        let shared = self.children_of_edge(id, above)?;
        self.admit(&[], 2 * height + 2 * shared + of_extents.len() as u64, true)?;
        self.prepare_nodes(id, 1)?;
        self.edit(id, |tree, editor| Ok::<_, ChangeError>(tree.remove_first(editor, above, !is_shared)?))?;
        for (extent, what) in of_extents {
            self.refs.drop(extent, what, 1)?;
        }
        Ok(Dropped::Some)
    }

    fn refs_of_leaf(
        &self,
        id: u64,
        bytenr: u64,
        is_full: bool,
    ) -> Result<Vec<(u64, sealblock_btrfs_format::extent_refs::ExtentRef)>, ChangeError> {
        let bytes = self.nodes.get(bytenr).ok_or(TreeError::Gone(bytenr))?;
        let node = Node::decode(bytes).map_err(|_| TreeError::Refs(bytenr))?;
        Ok(children(&node, if is_full { By::Node(bytenr) } else { By::Tree(id) })?)
    }

    /// The number of children of the first nodes of all levels from `above` on.
    fn children_of_edge(&self, id: u64, above: u8) -> Result<u64, ChangeError> {
        let root = self.root(id).ok_or(ChangeError::NoTree(id))?;
        let (mut bytenr, mut level, mut children) = (root.bytenr, root.level, 0);
        loop {
            let bytes = self.nodes.get(bytenr).ok_or(TreeError::Gone(bytenr))?;
            let node = Node::decode(bytes).map_err(|_| TreeError::Refs(bytenr))?;
            children += node.pointers().len() as u64;
            if level <= above {
                return Ok(children);
            }
            bytenr = node.pointers().first().map_or(0, |pointer| pointer.blockptr.get());
            level -= 1;
        }
    }

    /// The last node goes, and all that the root tree has of the subvolume.
    fn drop_root(&mut self, id: u64, key: Key) -> Result<(), ChangeError> {
        let root = self.root(id).ok_or(ChangeError::NoTree(id))?;
        let extents = self.extent_tree()?;
        let (_, flags) = refs_of(root.bytenr, &extents, &self.nodes, &self.refs)?;
        let of_extents = self.refs_of_leaf(id, root.bytenr, flags.contains(ExtentFlags::FULL_BACKREF))?;
        let mut in_roots = ItemChanges::new();
        in_roots.delete(key);
        in_roots.delete(Key::new(objectid::ORPHAN, ItemType::ORPHAN_ITEM, id));
        self.admit(&[], 2 + of_extents.len() as u64, true)?;
        let items = vec![(objectid::ROOT_TREE, in_roots)];
        self.apply_change(&Change { items, frees_space: true, ..Change::default() })?;
        for (extent, what) in of_extents {
            self.refs.drop(extent, what, 1)?;
        }
        self.edit(id, |tree, editor| Ok::<_, ChangeError>(tree.free_root(editor)?))?;
        self.close_tree(id);
        Ok(())
    }
}
