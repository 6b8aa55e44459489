//! Whether a change may begin: the space that it and the commit of everything so far can need at most.
//!
//! A commit must never run out of space. Writing the references of a changed node changes nodes of the extent tree and the
//! free space tree, which have references, too. How many nodes that makes in the worst case is computed before each change
//! ([`Transaction::admit`]), and a change is refused for which there is not as much free space of metadata. Freed space
//! does not count until it is durable.
//!
//! The bound for `k` changes of items of a tree: each copies the path to its leaf, so `k * height` nodes, but no more than
//! the tree has; and new leaves for the items that do not fit, with the nodes above them. A changed node is two changes
//! of the extent tree and up to four of the free space tree, which makes the bound a fixed point. It exists because a
//! node has room for many items.

use sealblock_btrfs_format::key::objectid;
use sealblock_btrfs_format::node::leaf_capacity;

use crate::space::{SpaceError, Use};
use crate::transaction::{ChangeError, Transaction};

/// Bytes of an item of the extent tree with its head, at least as many as most have.
const EXTENT_ITEM_BYTES: u64 = 100;
/// Bytes of a run of the free space tree.
const FREE_SPACE_BYTES: u64 = 25;
/// Bytes of a root item with its head.
const ROOT_ITEM_BYTES: u64 = 464;
/// Bytes of a block group item with its head.
const GROUP_ITEM_BYTES: u64 = 49;
/// Nodes that the steps of a commit want to see free, besides those that they need.
const STEP_NODES: u64 = 64;
/// Changes of items for which space is kept: for changes that free more than they use, and for new chunks.
const RESERVED_CHANGES: u64 = 64;
/// Leaves that change when the free space of a group changes its form.
const CONVERSION_LEAVES: u64 = 5;
/// The bound is computed by at most so many steps, each of which comes closer by a factor of 5 or more.
const MAX_STEPS: usize = 24;

/// Changes of items of one tree.
#[derive(Clone, Copy, Debug)]
pub struct TreeCost {
    /// The tree.
    pub tree: u64,
    /// Changes.
    pub changes: u64,
    /// Bytes that are inserted, with the heads of items.
    pub bytes: u64,
}

impl Transaction {
    /// Checks that there is space for changes of items and of references to data extents, and for the commit of all.
    /// Changes that free space may use what is kept for them.
    ///
    /// # Errors
    /// If there is not enough.
    pub fn admit(&self, costs: &[TreeCost], data_refs: u64, frees_space: bool) -> Result<(), ChangeError> {
        let mut needed = self.bound(costs, data_refs);
        if !frees_space {
            let tree = objectid::FS_TREE;
            let reserved = TreeCost { tree, changes: RESERVED_CHANGES, bytes: RESERVED_CHANGES * EXTENT_ITEM_BYTES };
            needed += self.bound(&[reserved], RESERVED_CHANGES);
        }
        let free = self.space.free_nodes();
        if needed.saturating_add(STEP_NODES) <= free {
            return Ok(());
        }
        tracing::debug!(needed, free, "there is no space for a change");
        Err(ChangeError::Space(SpaceError::Full(Use::Metadata)))
    }

    /// As [`Transaction::admit`], for a number of small items of one tree.
    ///
    /// # Errors
    /// If there is not enough space.
    pub fn admit_more(&self, tree: u64, changes: u64, refs: u64) -> Result<(), ChangeError> {
        let bytes = changes.saturating_mul(ROOT_ITEM_BYTES);
        self.admit(&[TreeCost { tree, changes, bytes }], refs, false)
    }

    /// The nodes that changes and the commit of all may need.
    fn bound(&self, costs: &[TreeCost], data_refs: u64) -> u64 {
        let own: u64 = costs.iter().map(|cost| self.nodes_of(cost)).sum();
        let roots = self.open_trees();
        let fixed = 2 * own + data_refs + self.refs.len() as u64;
        // The sizes of trees are the same in each step.
        let tree = |tree: u64, bytes: u64| {
            let size = self.size_of(tree);
            move |changes: u64| self.nodes_of_size(size, changes, changes.saturating_mul(bytes))
        };
        let extents = tree(objectid::EXTENT_TREE, EXTENT_ITEM_BYTES);
        let free_space = tree(objectid::FREE_SPACE_TREE, FREE_SPACE_BYTES);
        let group_items = tree(self.group_tree(), GROUP_ITEM_BYTES);
        let root_items = tree(objectid::ROOT_TREE, ROOT_ITEM_BYTES)(roots);
        let (mut heads, mut commit) = (fixed, 0);
        for _ in 0..MAX_STEPS {
            let groups = heads.min(self.space.group_count());
            commit = extents(heads)
                + free_space(heads.saturating_mul(2))
                + group_items(groups)
                + root_items
                + CONVERSION_LEAVES * groups;
            let next = fixed.saturating_add(2 * commit);
            if next == heads {
                break;
            }
            heads = next;
        }
        own.saturating_add(commit)
    }

    /// The nodes of one tree that changes may make.
    fn nodes_of(&self, cost: &TreeCost) -> u64 {
        self.nodes_of_size(self.size_of(cost.tree), cost.changes, cost.bytes)
    }

    /// As [`Transaction::nodes_of`], for a tree with a root of this level and so many nodes at most.
    fn nodes_of_size(&self, (level, nodes): (u8, u64), changes: u64, bytes: u64) -> u64 {
        if changes == 0 {
            return 0;
        }
        let height = u64::from(level) + 1;
        let copied = changes.saturating_mul(height).min(nodes);
        // A leaf that is split is at least half full afterwards, as are the nodes above.
        let half = (leaf_capacity(self.geometry().node_bytes) / 2).max(1) as u64;
        let leaves = bytes.div_ceil(half);
        copied + leaves + leaves.div_ceil(50) + height + 1
    }
}
