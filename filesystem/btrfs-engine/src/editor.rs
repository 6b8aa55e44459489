//! The nodes of one tree in the open transaction, for whoever changes the tree: what is allocated gets a reference and
//! space, what is freed loses them, and what other trees share stays for them.

use sealblock_btrfs_format::extent_refs::ExtentRef;
use sealblock_btrfs_format::items::extent::ExtentFlags;
use sealblock_btrfs_format::items::extent_buf::ExtentItemBuf;
use sealblock_btrfs_format::key::{ItemType, Key, objectid};
use sealblock_btrfs_format::node::Node;
use sealblock_runtime_memory::Buffer;

use crate::cow::{By, Sharing, children, refs_of};
use crate::nodes::Nodes;
use crate::refs::{DelayedRefs, NewExtent};
use crate::space::{Space, Use};
use crate::tree::{NodeMap, NodeSource, Tree, TreeError};

/// What space the nodes of a tree need.
pub fn use_of(id: u64) -> Use {
    if id == objectid::CHUNK_TREE { Use::System } else { Use::Metadata }
}

/// The nodes of one tree in the open transaction. What is allocated gets a reference, what is freed loses it.
pub struct Editor<'a> {
    pub(crate) nodes: &'a mut Nodes,
    pub(crate) space: &'a mut Space,
    pub(crate) refs: &'a mut DelayedRefs,
    pub(crate) owner: u64,
    /// The root node of the tree before the change.
    pub(crate) root: u64,
    pub(crate) sharing: Sharing,
    /// The extent tree, for trees that share nodes.
    pub(crate) extents: Tree,
    pub(crate) generation: u64,
    pub(crate) bytes_used: u64,
    pub(crate) changes: &'a mut u64,
}

impl Editor<'_> {
    /// Something else of the transaction changes.
    pub fn count_change(&mut self) {
        *self.changes += 1;
    }

    fn new_extent(&self, bytenr: u64, level: u8) -> NewExtent {
        let key = Key::new(bytenr, ItemType::METADATA_ITEM, level.into());
        NewExtent { key, item: ExtentItemBuf::new(self.generation, ExtentFlags::TREE_BLOCK, None) }
    }
}

impl NodeSource for Editor<'_> {
    fn get(&self, bytenr: u64) -> Option<&[u8]> {
        self.nodes.get(bytenr)
    }

    fn is_clean(&self, bytenr: u64) -> bool {
        self.nodes.is_clean(bytenr)
    }
}

impl NodeMap for Editor<'_> {
    type Bytes = Buffer;

    fn get_mut(&mut self, bytenr: u64) -> Option<&mut [u8]> {
        *self.changes += 1;
        self.nodes.get_mut(bytenr)
    }

    fn is_own(&self, bytenr: u64) -> bool {
        // What cannot be found out was not touched, and copying it will say so.
        let is_shared = || self.sharing.is_now && self.may_share(bytenr) && self.is_shared(bytenr) != Ok(false);
        self.nodes.is_dirty(bytenr) && !is_shared()
    }

    fn can_join(&self, bytenr: u64) -> bool {
        !self.may_share(bytenr) || self.is_shared(bytenr) == Ok(false)
    }

    fn drop_ref(&mut self, bytenr: u64) -> Result<(), TreeError> {
        *self.changes += 1;
        let what = ExtentRef::TreeBlock { root: self.owner };
        self.refs.drop(bytenr, what, 1).map_err(|_| TreeError::Refs(bytenr))?;
        self.bytes_used = self.bytes_used.saturating_sub(self.nodes.node_bytes().into());
        Ok(())
    }

    fn root_shared(&mut self, _old: u64, new: u64) -> Result<(), TreeError> {
        self.share_children(new)
    }

    fn copied(&mut self, old: u64, _new: u64, is_root: bool) -> Result<(), TreeError> {
        let is_unused = is_root || !self.may_share(old) || self.share_copied(old)?;
        if is_unused {
            return self.free(old);
        }
        // Other trees go on to use it.
        self.drop_ref(old)
    }

    fn allocate(&mut self, level: u8) -> Result<(u64, Buffer), TreeError> {
        *self.changes += 1;
        let bytenr = self.space.allocate_node(use_of(self.owner)).ok_or(TreeError::NoSpace)?;
        let refs = TreeError::Refs(bytenr);
        self.refs.insert(self.new_extent(bytenr, level)).map_err(|_| refs)?;
        self.refs.add(bytenr, ExtentRef::TreeBlock { root: self.owner }, 1).map_err(|_| refs)?;
        self.bytes_used = self.bytes_used.saturating_add(self.nodes.node_bytes().into());
        Ok((bytenr, Buffer::zeroed(self.nodes.node_bytes() as usize)))
    }

    fn take(&mut self, bytenr: u64) -> Option<Buffer> {
        *self.changes += 1;
        self.nodes.take(bytenr)
    }

    fn put(&mut self, bytenr: u64, bytes: Buffer) {
        self.nodes.put(bytenr, bytes);
    }

    fn free(&mut self, bytenr: u64) -> Result<(), TreeError> {
        *self.changes += 1;
        let node_bytes = u64::from(self.nodes.node_bytes());
        let refs = TreeError::Refs(bytenr);
        self.drop_ref(bytenr)?;
        self.nodes.forget(bytenr);
        // Nothing was written to a node whose references were never written: it has been dirty all its life.
        if self.refs.cancel(bytenr) {
            self.space.give_back(bytenr..bytenr + node_bytes).map_err(|_| refs)?;
        }
        Ok(())
    }
}

impl Editor<'_> {
    /// True if other trees have a node that may be shared, or if its children are referred to by node: then a copy of it
    /// changes their references, and it must not be changed in place even if no other tree has it any more.
    ///
    /// # Errors
    /// If a node of the extent tree is not in memory.
    pub fn is_shared(&self, bytenr: u64) -> Result<bool, TreeError> {
        let (refs, flags) = refs_of(bytenr, &self.extents, self.nodes, self.refs)?;
        Ok(refs > 1 || flags.contains(ExtentFlags::FULL_BACKREF))
    }

    /// True if a node, which is in memory, may be shared.
    pub fn may_share(&self, bytenr: u64) -> bool {
        let node = self.nodes.get(bytenr).and_then(|bytes| Node::decode(bytes).ok());
        self.root != bytenr && node.is_some_and(|node| self.sharing.may_have(self.owner, &node))
    }

    /// The children of a node of this tree, which another tree has already, get references by this tree.
    pub fn share_children(&mut self, node: u64) -> Result<(), TreeError> {
        let bytes = self.nodes.get(node).ok_or(TreeError::Gone(node))?;
        let decoded = Node::decode(bytes).map_err(|_| TreeError::Refs(node))?;
        for (bytenr, what) in children(&decoded, By::Tree(self.owner))? {
            self.refs.add(bytenr, what, 1).map_err(|_| TreeError::Refs(bytenr))?;
        }
        Ok(())
    }

    /// Counts the references after a node that may be shared was copied. Returns true if the old node is no longer used.
    pub fn share_copied(&mut self, old: u64) -> Result<bool, TreeError> {
        let (refs, flags) = refs_of(old, &self.extents, self.nodes, self.refs)?;
        let bytes = self.nodes.get(old).ok_or(TreeError::Gone(old))?;
        let node = Node::decode(bytes).map_err(|_| TreeError::Refs(old))?;
        let (is_full, is_of_tree) = (flags.contains(ExtentFlags::FULL_BACKREF), node.header().owner == self.owner);
        let by_tree = children(&node, By::Tree(self.owner))?;
        let by_node = children(&node, By::Node(old))?;
        let (add, drop) = match (refs, is_full) {
            (1, false) => (Vec::new(), Vec::new()),
            (1, true) => (by_tree, by_node),
            (_, false) if is_of_tree => {
                self.refs.set_flags(old, ExtentFlags::FULL_BACKREF);
                (by_node, Vec::new())
            }
            _ => (by_tree, Vec::new()),
        };
        for (bytenr, what) in add {
            self.refs.add(bytenr, what, 1).map_err(|_| TreeError::Refs(bytenr))?;
        }
        for (bytenr, what) in drop {
            self.refs.drop(bytenr, what, 1).map_err(|_| TreeError::Refs(bytenr))?;
        }
        Ok(refs == 1)
    }
}
