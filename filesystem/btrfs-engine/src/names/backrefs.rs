//! The names that an inode has, as it knows them: INODE_REF, with all names in one directory, and INODE_EXTREF, by the
//! hash of directory and name.
//!
//! A name goes into the INODE_REF of its directory as long as that fits into a leaf, and into an INODE_EXTREF
//! otherwise. It is in one of them only. Which one is not known when it is removed, so both are searched.

use std::collections::HashSet;

use sealblock_btrfs_format::features::Incompat;
use sealblock_btrfs_format::items::Item;
use sealblock_btrfs_format::items::entries::{Entries, push_entry};
use sealblock_btrfs_format::items::inode::{InodeExtref, InodeRef};
use sealblock_btrfs_format::key::{ItemType, Key, objectid};
use sealblock_btrfs_format::names::extref_hash;

use crate::plan::{Plan, PlanError};
use crate::view::Items;

fn ref_key(ino: u64, parent: u64) -> Key {
    Key::new(ino, ItemType::INODE_REF, parent)
}

fn extref_key(ino: u64, parent: u64, name: &[u8]) -> Key {
    Key::new(ino, ItemType::INODE_EXTREF, extref_hash(parent, name))
}

impl<V: Items> Plan<'_, V> {
    fn refs_at(&self, key: Key) -> Result<Option<Entries<'_, InodeRef<'_>>>, PlanError> {
        match self.item(key)? {
            Some(Item::InodeRefs(refs)) => Ok(Some(refs)),
            Some(_) => Err(PlanError::Damaged { key, why: "not a list of names" }),
            None => Ok(None),
        }
    }

    fn extrefs_at(&self, key: Key) -> Result<Option<Entries<'_, InodeExtref<'_>>>, PlanError> {
        match self.item(key)? {
            Some(Item::InodeExtrefs(refs)) => Ok(Some(refs)),
            Some(_) => Err(PlanError::Damaged { key, why: "not a list of names" }),
            None => Ok(None),
        }
    }

    /// Adds a name to an inode, which does not have it.
    ///
    /// # Errors
    /// [`PlanError::CollisionsFull`] if too many names have one hash; [`PlanError::TooManyLinks`] if the filesystem has
    /// no INODE_EXTREF.
    pub(super) fn add_backref(&mut self, ino: u64, parent: u64, index: u64, name: &[u8]) -> Result<(), PlanError> {
        let (key, most) = (ref_key(ino, parent), self.context.max_item_bytes());
        let mut list = self.at(key)?.unwrap_or_default().to_vec();
        if push_entry(&mut list, &InodeRef { index, name }, most).is_ok() {
            return self.put(key, list);
        }
        if !self.context.geometry.features.incompat.contains(Incompat::EXTENDED_IREF) {
            return Err(PlanError::TooManyLinks);
        }
        let key = extref_key(ino, parent, name);
        let mut list = self.at(key)?.unwrap_or_default().to_vec();
        let pushed = push_entry(&mut list, &InodeExtref { parent, index, name }, most);
        pushed.map_err(|_| PlanError::CollisionsFull)?;
        self.put(key, list)
    }

    /// Removes a name from an inode. Returns the index that its entry has in the directory.
    ///
    /// # Errors
    /// [`PlanError::Damaged`] if the inode does not have it.
    pub(super) fn remove_backref(&mut self, ino: u64, parent: u64, name: &[u8]) -> Result<u64, PlanError> {
        let key = ref_key(ino, parent);
        if let Some((removed, rest)) = self.refs_at(key)?.and_then(|refs| refs.without(|one| one.name == name)) {
            let index = removed.index;
            self.put_list(key, rest)?;
            return Ok(index);
        }
        let long = extref_key(ino, parent, name);
        let is_wanted = |one: &InodeExtref<'_>| one.parent == parent && one.name == name;
        let without = self.extrefs_at(long)?.and_then(|refs| refs.without(is_wanted));
        let (removed, rest) = without.ok_or(PlanError::Damaged { key, why: "the inode has no such name" })?;
        let index = removed.index;
        self.put_list(long, rest)?;
        Ok(index)
    }

    /// The directory that a directory is in.
    ///
    /// # Errors
    /// [`PlanError::Damaged`] if it has no name.
    pub(crate) fn parent_of(&self, ino: u64) -> Result<u64, PlanError> {
        let key = ref_key(ino, 0);
        let damaged = |why| PlanError::Damaged { key, why };
        let end = Key::new(ino, ItemType::INODE_EXTREF, u64::MAX);
        let (key, _) = self.first(key..=end)?.ok_or(damaged("the directory has no name"))?;
        if key.item_type == ItemType::INODE_REF {
            return Ok(key.offset);
        }
        let parent = self.extrefs_at(key)?.and_then(|refs| refs.iter().next()).map(|one| one.parent);
        parent.ok_or(damaged("the directory has no name"))
    }

    /// True if a directory is another one, or lies below it.
    ///
    /// # Errors
    /// [`PlanError::Damaged`] if it does not lie below the top.
    pub(super) fn is_within(&self, directory: u64, other: u64) -> Result<bool, PlanError> {
        let (mut at, mut seen) = (directory, HashSet::new());
        while at != other {
            if at == objectid::FIRST_FREE {
                return Ok(false);
            }
            if !seen.insert(at) {
                return Err(PlanError::Damaged { key: ref_key(at, 0), why: "the directory lies below itself" });
            }
            at = self.parent_of(at)?;
        }
        Ok(true)
    }
}
