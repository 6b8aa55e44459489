//! Orphans: inodes without names that are still to be deleted.
//!
//! An inode that loses its last name may be open. Its ORPHAN_ITEM is there from then on, until all its items are gone, so
//! a filesystem that stops in between finds what is left to delete.
//!
//! Invariants:
//! - An inode has an ORPHAN_ITEM if and only if its link count is 0.
//! - An inode is deleted from its last item to its first, in steps of a limited size. The INODE_ITEM and the ORPHAN_ITEM
//!   go last, together.
//! - An ORPHAN_ITEM of an inode that has links is left from elsewhere. It goes, and nothing else: Linux does not truncate
//!   such a file either.

use std::ops::RangeInclusive;

use sealblock_btrfs_format::items::Item;
use sealblock_btrfs_format::items::file_extent::FileExtent;
use sealblock_btrfs_format::key::{ItemType, Key, objectid};

use crate::inode::items_of;
use crate::plan::{Plan, PlanError};
use crate::view::Items;

/// What an orphan is, when a filesystem is opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Orphan {
    /// An inode without names: first its extents go, and then the inode ([`Plan::delete_inode`]).
    Unlinked,
    /// An inode with names, or none at all: the ORPHAN_ITEM goes, and this plan has done that.
    Stale,
}

pub(crate) const fn orphan_key(ino: u64) -> Key {
    Key::new(objectid::ORPHAN, ItemType::ORPHAN_ITEM, ino)
}

impl<V: Items> Plan<'_, V> {
    /// The first orphan with this inode number or a higher one.
    ///
    /// # Errors
    /// If a node is not in memory.
    pub fn next_orphan(&self, from: u64) -> Result<Option<u64>, PlanError> {
        Ok(self.first(orphan_key(from)..=orphan_key(u64::MAX))?.map(|(key, _)| key.offset))
    }

    /// Looks at an orphan that an earlier mount left, and removes its ORPHAN_ITEM if the inode is not to be deleted.
    ///
    /// # Errors
    /// [`PlanError::NotFound`] if there is no such orphan.
    pub fn recover_orphan(&mut self, ino: u64) -> Result<Orphan, PlanError> {
        if self.at(orphan_key(ino))?.is_none() {
            return Err(PlanError::NotFound);
        }
        if self.find_inode(ino)?.is_some_and(|inode| inode.nlink.get() == 0) {
            return Ok(Orphan::Unlinked);
        }
        self.delete(orphan_key(ino));
        Ok(Orphan::Stale)
    }

    /// An inode has no names left.
    pub(crate) fn add_orphan(&mut self, ino: u64) -> Result<(), PlanError> {
        self.put(orphan_key(ino), Vec::new())
    }

    /// An inode without names gets one.
    pub(crate) fn remove_orphan(&mut self, ino: u64) -> Result<(), PlanError> {
        let key = orphan_key(ino);
        if self.at(key)?.is_none() {
            return Err(PlanError::Damaged { key, why: "the inode has no names, and is no orphan" });
        }
        self.delete(key);
        Ok(())
    }

    /// Deletes an inode that has no names, and that nobody uses: at most this many of its items, from the last one on.
    /// Returns true if the inode is gone. Otherwise the changes are to be applied, and the rest to be deleted with
    /// another plan; the inode stays an orphan until then.
    ///
    /// Its file extents outside the tree must be gone: this counts no references. What is in the item, such as the target
    /// of a symbolic link, goes with it.
    ///
    /// # Errors
    /// [`PlanError::InUse`] if the inode has links or extents; [`PlanError::Damaged`] if it has links none of which it
    /// counts, or entries.
    pub fn delete_inode(&mut self, ino: u64, max_items: usize) -> Result<bool, PlanError> {
        if self.inode(ino)?.nlink.get() != 0 {
            return Err(PlanError::InUse { ino, what: "links" });
        }
        self.attempt(|plan| {
            let mut range = Some(items_of(ino));
            for _ in 0..max_items {
                let Some(key) = range.take().map(|range| plan.last(range)).transpose()?.flatten().map(|(key, _)| key)
                else {
                    break;
                };
                plan.check_deletable(key)?;
                plan.delete(key);
                range = before(ino, key);
            }
            let is_gone = range.map(|range| plan.first(range)).transpose()?.flatten().is_none();
            match (is_gone, plan.at(orphan_key(ino))?.is_some()) {
                (true, true) => plan.delete(orphan_key(ino)),
                (false, false) => plan.add_orphan(ino)?,
                _ => {}
            }
            Ok(is_gone)
        })
    }

    fn check_deletable(&self, key: Key) -> Result<(), PlanError> {
        let ino = key.objectid;
        let damaged = |why| Err(PlanError::Damaged { key, why });
        match self.item(key)? {
            Some(Item::Inode(_) | Item::Xattrs(_)) => Ok(()),
            Some(Item::VerityHead(_) | Item::VerityDescriptor(_) | Item::VerityMerkle(_)) => Ok(()),
            Some(Item::FileExtent(FileExtent::Inline(..))) => Ok(()),
            Some(Item::FileExtent(extent)) => match extent.location().is_some_and(|location| location.is_hole()) {
                true => Ok(()),
                false => Err(PlanError::InUse { ino, what: "extents" }),
            },
            Some(Item::InodeRefs(_) | Item::InodeExtrefs(_)) => damaged("the inode has names, and its link count is 0"),
            Some(Item::DirItems(_) | Item::DirIndex(_)) => damaged("a directory that was removed has entries"),
            _ => damaged("an item that no inode has"),
        }
    }
}

/// The items of an inode before one of them.
fn before(ino: u64, key: Key) -> Option<RangeInclusive<Key>> {
    let range = key.previous().map(|end| *items_of(ino).start()..=end);
    range.filter(|range| !range.is_empty())
}
