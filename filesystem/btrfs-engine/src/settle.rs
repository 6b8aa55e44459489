//! Brings the trees into a state that can be committed: all delayed references are written, the block groups' items have
//! their bytes in use, and the root items have their root nodes.
//!
//! Each of these changes nodes, which are extents with references, in block groups, of trees with root items. It ends
//! because a node is copied once in a transaction.
//!
//! Invariants:
//! - Every step looks at all nodes that it may change before it changes one. So a step that lacks a node changed nothing,
//!   and is tried again.
//! - The free space tree says what is free after the commit. It changes with the item of an extent.

use std::num::NonZeroUsize;
use std::ops::RangeInclusive;

use sealblock_btrfs_format::item_changes::ItemChanges;
use sealblock_btrfs_format::items::extent::ExtentFlags;
use sealblock_btrfs_format::items::extent_buf::ExtentItemBuf;
use sealblock_btrfs_format::key::{ItemType, Key, objectid};

use crate::csums::CsumEdit;
use crate::editor::Editor;
use crate::refs::{ExtentItems, Fate, RefsError};
use crate::space::Use;
use crate::transaction::{ChangeError, Transaction};
use crate::tree::{Tree, TreeError};
use crate::view::Items;

/// The number of nodes for which there must be space before references are written: paths of the extent tree and the
/// free space tree, each of which may be copied and split.
const NODES_OF_A_STEP: u64 = 64;

impl Transaction {
    /// Makes one step towards a state that can be committed. Returns false if it is reached.
    ///
    /// # Errors
    /// If a node is not in memory, there is no space, or the trees contradict each other.
    pub fn settle(&mut self) -> Result<bool, ChangeError> {
        if let Some(bytenr) = self.refs.next(0) {
            self.run_head(bytenr)?;
            return Ok(true);
        }
        let groups = self.space.changed_groups();
        if !groups.is_empty() {
            let tree = self.group_tree();
            groups.iter().try_for_each(|(key, _)| self.touch(tree, key..=key))?;
            self.prepare_nodes(tree, groups.len() as u64)?;
            self.space.groups_stored();
            self.apply(tree, &groups)?;
            return Ok(true);
        }
        self.write_roots()
    }

    /// Writes the delayed references of an extent.
    fn run_head(&mut self, bytenr: u64) -> Result<(), ChangeError> {
        self.touch(objectid::EXTENT_TREE, keys_of_extent(bytenr))?;
        self.load_group(bytenr)?;
        self.touch(objectid::FREE_SPACE_TREE, self.space.keys_of(bytenr)?)?;
        let csums = self.csums_to_delete(bytenr)?;
        csums.iter().try_for_each(|(key, _)| self.touch(objectid::CSUM_TREE, key..=key))?;
        self.prepare(Use::Metadata, NODES_OF_A_STEP)?;
        let Some(head) = self.refs.take(bytenr) else { return Ok(()) };
        let (is_new, node_bytes) = (head.new_item().is_some(), self.geometry().node_bytes);
        let is_released = head.refs().any(|(_, net)| net < 0);
        let fate = self.edit(objectid::EXTENT_TREE, |tree, editor| {
            editor.count_change();
            Ok::<_, ChangeError>(head.run(bytenr, &mut ExtentTree { tree, editor }, node_bytes)?)
        })?;
        let bytes = |key: Key| if key.item_type == ItemType::METADATA_ITEM { node_bytes.into() } else { key.offset };
        let changes = match fate {
            Fate::Lives(key) if is_new => self.space.extent_added(bytenr, bytes(key))?,
            Fate::Lives(key) => {
                if is_released && key.item_type == ItemType::EXTENT_ITEM {
                    self.released.insert(bytenr);
                }
                ItemChanges::new()
            }
            // Its item was never inserted, but something may have been written there.
            Fate::Free { key, .. } if is_new => {
                self.space.pin(bytenr..bytenr + bytes(key));
                ItemChanges::new()
            }
            Fate::Free { key, flags } => {
                debug_assert!(flags.contains(ExtentFlags::TREE_BLOCK) || key.item_type == ItemType::EXTENT_ITEM);
                self.space.extent_removed(bytenr, bytes(key))?
            }
        };
        self.edit(objectid::FREE_SPACE_TREE, |tree, editor| Ok::<_, ChangeError>(tree.apply(editor, &changes)?))?;
        self.edit(objectid::CSUM_TREE, |tree, editor| Ok(tree.apply(editor, &csums)?))
    }

    /// The changes that delete the checksums of an extent, if it is data and its last references go.
    fn csums_to_delete(&self, bytenr: u64) -> Result<ItemChanges, ChangeError> {
        let extents = self.view(objectid::EXTENT_TREE)?;
        let first = Key::new(bytenr, ItemType::EXTENT_ITEM, 0);
        let old = extents.first(first..=Key::new(bytenr, ItemType::EXTENT_ITEM, u64::MAX))?;
        let (bytes, refs, flags) = match (old, self.refs.head(bytenr).and_then(|head| head.new_extent())) {
            (Some((key, data)), _) => {
                let item = ExtentItemBuf::decode(key.item_type, data).map_err(|_| ChangeError::Item(key))?;
                (key.offset, item.refs(), item.flags)
            }
            (None, Some(new)) => (new.key.offset, 0, new.item.flags),
            (None, None) => return Ok(ItemChanges::new()),
        };
        let stays = refs.checked_add_signed(self.refs.net(bytenr)) != Some(0);
        if stays || !flags.contains(ExtentFlags::DATA) {
            return Ok(ItemChanges::new());
        }
        let csums = self.view(objectid::CSUM_TREE)?;
        let mut edit = CsumEdit::new(self.csum_shape(), &csums);
        let end = bytenr.checked_add(bytes).ok_or(ChangeError::Item(first))?;
        // An extent has at most 128 MiB, so these are few items.
        edit.delete(bytenr..end, NonZeroUsize::MAX)?;
        Ok(edit.finish())
    }

    /// Writes the root items of trees whose root nodes changed. Returns false if there is none.
    fn write_roots(&mut self) -> Result<bool, ChangeError> {
        let changed = self.changed_roots();
        let mut changes = ItemChanges::new();
        changed.iter().for_each(|(_, key, item)| changes.replace(*key, item.encode()));
        self.apply(objectid::ROOT_TREE, &changes)?;
        let any = !changed.is_empty();
        for (id, key, item) in changed {
            self.set_root_item(id, key, item);
        }
        Ok(any)
    }
}

/// The keys of all items of an extent.
fn keys_of_extent(bytenr: u64) -> RangeInclusive<Key> {
    Key::new(bytenr, ItemType::EXTENT_ITEM, 0)..=Key::new(bytenr, ItemType::SHARED_DATA_REF, u64::MAX)
}

/// The extent tree, to be changed.
struct ExtentTree<'t, 'e> {
    tree: &'t mut Tree,
    editor: &'t mut Editor<'e>,
}

impl Items for ExtentTree<'_, '_> {
    fn at(&self, key: Key) -> Result<Option<&[u8]>, TreeError> {
        self.tree.find(self.editor, key)
    }

    fn first(&self, range: RangeInclusive<Key>) -> Result<Option<(Key, &[u8])>, TreeError> {
        self.tree.first_of(self.editor, range)
    }

    fn last(&self, range: RangeInclusive<Key>) -> Result<Option<(Key, &[u8])>, TreeError> {
        self.tree.last_of(self.editor, range)
    }
}

impl ExtentItems for ExtentTree<'_, '_> {
    fn put(&mut self, key: Key, data: Vec<u8>) -> Result<(), RefsError> {
        match self.tree.replace(self.editor, key, &data) {
            Err(TreeError::Missing(_)) => Ok(self.tree.insert(self.editor, key, &data)?),
            result => Ok(result?),
        }
    }

    fn delete(&mut self, key: Key) -> Result<(), RefsError> {
        Ok(self.tree.delete(self.editor, key)?)
    }
}
