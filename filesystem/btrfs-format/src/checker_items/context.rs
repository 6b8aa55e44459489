//! What an item is checked against: the filesystem, the tree, its own key, and the item before it in the leaf.

use crate::features::Incompat;
use crate::items::Item;
use crate::key::{ItemType, Key, objectid};
use crate::refusal::{Rule, within};
use crate::superblock::Geometry;

/// An item's surroundings.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// The filesystem.
    pub geometry: &'a Geometry,
    /// The tree that its node was made for.
    pub owner: u64,
    /// Its key.
    pub key: Key,
    /// The item before it in the leaf; none for the first.
    pub previous: Option<(Key, &'a [u8])>,
}

impl<'a> Context<'a> {
    /// The item before it, if that has this type and a valid shape.
    pub(crate) fn previous_of(&self, item_type: ItemType) -> Option<(Key, Item<'a>)> {
        let (key, bytes) = self.previous.filter(|(key, _)| key.item_type == item_type)?;
        Some((key, Item::decode(key, bytes).ok()?))
    }

    /// In a subvolume, an item of an inode follows another item of the same inode, unless it is the first of its leaf.
    /// Exceptions: the root tree has the name of the default subvolume without an inode, and logs contain only what
    /// changed.
    pub(crate) fn check_attached(&self) -> Result<(), Rule> {
        match self.previous {
            Some((key, _)) if key.objectid != self.key.objectid && objectid::is_subvolume(self.owner) => {
                Err(Rule::Detached(key))
            }
            _ => Ok(()),
        }
    }

    /// Checks that a transaction is not later than the open one.
    pub(crate) fn check_generation(&self, field: &'static str, generation: u64) -> Result<(), Rule> {
        within(field, generation, 0, self.geometry.generation.saturating_add(1))
    }

    /// True if the filesystem has a feature.
    pub(crate) fn has(&self, feature: Incompat) -> bool {
        self.geometry.features.incompat.contains(feature)
    }
}

/// Checks an inode number: it must be in the range for files, or one of the two reserved numbers that are allowed.
pub(crate) fn check_inode_number(field: &'static str, ino: u64) -> Result<(), Rule> {
    match ino {
        objectid::ROOT_TREE_DIR | objectid::FREE_INO => Ok(()),
        other => within(field, other, objectid::FIRST_FREE, objectid::LAST_FREE),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inodes_have_numbers_of_files_or_one_of_two_others() {
        for ino in [6, 256, 257, -256_i64 as u64, -12_i64 as u64] {
            assert_eq!(check_inode_number("inode", ino), Ok(()));
        }
        for ino in [0, 5, 7, 255, -255_i64 as u64, u64::MAX] {
            assert!(matches!(check_inode_number("inode", ino), Err(Rule::Range { field: "inode", .. })), "{ino}");
        }
    }
}
