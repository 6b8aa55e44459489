//! New chunks where there is no space left, and the removal of chunks that nothing uses.
//!
//! Invariants:
//! - A chunk's items are made in one step: in the chunk tree, in the device tree, its block group and its free space. If
//!   it is for the chunk tree itself, the superblock has it too.
//! - Before a chunk of another kind is made there is space for two more paths of the chunk tree, so that a chunk for the
//!   chunk tree can always be made in time.

use sealblock_btrfs_format::item_changes::ItemChanges;
use sealblock_btrfs_format::items::chunk::BlockGroupFlags;
use sealblock_btrfs_format::key::objectid;
use zerocopy::IntoBytes;

use crate::chunks::ChunkChange;
use crate::space::{SpaceError, Use};
use crate::transaction::{ChangeError, Transaction};

impl Transaction {
    /// Makes a chunk for this use.
    ///
    /// # Errors
    /// If a node is not in memory, the devices have no room, or there is no space for the items. The error names what
    /// there is no space for, which may be another use: a chunk for that one has to be made first.
    pub fn allocate_chunk(&mut self, what: Use) -> Result<(), ChangeError> {
        let paths = if what == Use::System { 1 } else { 2 };
        self.prepare_nodes(objectid::CHUNK_TREE, 3 * paths)?;
        let full = ChangeError::Space(SpaceError::Full(what));
        let flags = self.space.flags_for(what).ok_or(full)?;
        let change = self.chunks.plan(flags).ok_or(full)?;
        self.touch_chunk(&change)?;
        let mut superblock = self.superblock;
        if flags.contains(BlockGroupFlags::SYSTEM) {
            superblock.push_sys_chunk(change.key(), &change.chunk.as_item()).map_err(|_| full)?;
        }
        self.chunks.add(&change).map_err(|_| full)?;
        self.count_change();
        self.superblock = superblock;
        let (logical, bytes) = (change.logical, change.bytes);
        let superblocks = self.chunks.map().superblock_ranges(logical);
        let (free_space, key, item) = self.space.create_group(logical, bytes, flags, superblocks)?;
        let mut group = ItemChanges::new();
        group.insert(key, item.as_bytes().to_vec());
        tracing::debug!(logical, bytes, ?flags, "a chunk is made");
        self.apply_chunk(&change, &group, &free_space)
    }

    /// Removes a chunk that nothing uses and that is not needed, if there is one. Returns false if there is none.
    ///
    /// # Errors
    /// If a node is not in memory, or there is no space for the copies of nodes.
    pub fn remove_empty_chunk(&mut self) -> Result<bool, ChangeError> {
        let Some((logical, bytes, flags)) = self.space.empty_group() else { return Ok(false) };
        let Some(change) = self.chunks.plan_removal(logical, bytes, flags) else { return Ok(false) };
        self.prepare_nodes(objectid::CHUNK_TREE, 3)?;
        self.touch_chunk(&change)?;
        self.count_change();
        self.chunks.remove(&change);
        let free_space = self.space.delete_group(logical);
        let mut group = ItemChanges::new();
        group.delete(group_key(&change));
        tracing::debug!(logical, bytes, "a chunk is removed");
        self.apply_chunk(&change, &group, &free_space)?;
        Ok(true)
    }

    /// Walks to all items of a chunk, and sees to it that they can be changed.
    fn touch_chunk(&mut self, change: &ChunkChange) -> Result<(), ChangeError> {
        let mut items = 1;
        for (tree, changes) in
            [(objectid::CHUNK_TREE, &change.in_chunk_tree), (objectid::DEV_TREE, &change.in_device_tree)]
        {
            changes.iter().try_for_each(|(key, _)| self.touch(tree, key..=key))?;
            items += changes.len() as u64;
        }
        let key = group_key(change);
        self.touch(self.group_tree(), key..=key)?;
        self.touch(objectid::FREE_SPACE_TREE, crate::space::keys_of(change.logical, change.bytes))?;
        self.prepare_nodes(objectid::FREE_SPACE_TREE, items + 2)
    }

    fn apply_chunk(
        &mut self,
        change: &ChunkChange,
        group: &ItemChanges,
        free_space: &ItemChanges,
    ) -> Result<(), ChangeError> {
        for (tree, changes) in [
            (objectid::CHUNK_TREE, &change.in_chunk_tree),
            (objectid::DEV_TREE, &change.in_device_tree),
            (self.group_tree(), group),
            (objectid::FREE_SPACE_TREE, free_space),
        ] {
            self.edit(tree, |tree, editor| Ok::<_, ChangeError>(tree.apply(editor, changes)?))?;
        }
        Ok(())
    }
}

fn group_key(change: &ChunkChange) -> sealblock_btrfs_format::Key {
    use sealblock_btrfs_format::key::{ItemType, Key};
    Key::new(change.logical, ItemType::BLOCK_GROUP_ITEM, change.bytes)
}
