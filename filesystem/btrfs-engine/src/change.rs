//! A change of several trees, applied in one step: items, references to data extents, and new data extents.
//!
//! Invariants:
//! - Before anything changes, all nodes are in memory that the change needs, and there is space for it and for the commit
//!   of everything so far.
//! - A new data extent has its first reference in the same change, so no extent is ever without one.

use sealblock_btrfs_format::item_changes::{ItemChange, ItemChanges};
use sealblock_btrfs_format::items::extent::ExtentFlags;
use sealblock_btrfs_format::items::extent_buf::ExtentItemBuf;
use sealblock_btrfs_format::key::{ItemType, Key};
use sealblock_btrfs_format::node::ITEM_HEAD_BYTES;

use crate::file_map::DataRefs;
use crate::refs::NewExtent;
use crate::reserve::TreeCost;
use crate::transaction::{ChangeError, Transaction};

/// A change of several trees.
#[derive(Clone, Default, Debug)]
pub struct Change {
    /// The trees, and the changes of their items.
    pub items: Vec<(u64, ItemChanges)>,
    /// References to data extents.
    pub refs: DataRefs,
    /// New data extents, which were allocated: their addresses and bytes.
    pub extents: Vec<(u64, u64)>,
    /// True if it frees more space than it uses, so that it may use what is kept for such changes.
    pub frees_space: bool,
}

impl Change {
    /// A change of one tree.
    pub fn of(tree: u64, items: ItemChanges) -> Change {
        Change { items: vec![(tree, items)], ..Change::default() }
    }
}

impl Transaction {
    /// Applies a change.
    ///
    /// # Errors
    /// If a node is not in memory, there is no space, or the trees contradict the change.
    pub fn apply_change(&mut self, change: &Change) -> Result<(), ChangeError> {
        let mut costs = Vec::new();
        let mut shared_children = 0;
        // A filesystem may lack a tree in which nothing changes.
        let trees = || change.items.iter().filter(|(_, items)| !items.is_empty());
        for (tree, items) in trees() {
            for (key, _) in items.iter() {
                shared_children += self.touch_counting(*tree, key..=key)?;
            }
            let (changes, bytes) = (items.len() as u64, inserted_bytes(items));
            costs.push(TreeCost { tree: *tree, changes, bytes });
        }
        self.admit(&costs, shared_children + change.refs.iter().count() as u64, change.frees_space)?;
        self.prepare_trees(trees().map(|(tree, items)| (*tree, items.len() as u64)), 0)?;
        self.count_change();
        let generation = self.generation();
        for (bytenr, bytes) in &change.extents {
            let key = Key::new(*bytenr, ItemType::EXTENT_ITEM, *bytes);
            self.refs.insert(NewExtent { key, item: ExtentItemBuf::new(generation, ExtentFlags::DATA, None) })?;
        }
        for (tree, items) in trees() {
            self.edit(*tree, |tree, editor| Ok::<_, ChangeError>(tree.apply(editor, items)?))?;
        }
        Ok(change.refs.apply(&mut self.refs)?)
    }
}

/// Bytes of items that are new or have other data, with their heads.
fn inserted_bytes(items: &ItemChanges) -> u64 {
    let bytes = |change: &ItemChange| match change {
        ItemChange::Insert(data) | ItemChange::Replace(data) => data.len() + ITEM_HEAD_BYTES,
        ItemChange::Delete => 0,
    };
    items.iter().map(|(_, change)| bytes(change) as u64).sum()
}
