//! The two items that a directory has for each entry: DIR_ITEM, by the hash of the name, and DIR_INDEX, by the order of
//! creation.
//!
//! Names with one hash share a DIR_ITEM. A name that would make it larger than a leaf is refused: whoever chooses names
//! can make their hashes equal.

use sealblock_btrfs_format::items::Item;
use sealblock_btrfs_format::items::directory::{DirEntry, FileType, Target};
use sealblock_btrfs_format::items::entries::{Entries, Entry as _, push_entry};
use sealblock_btrfs_format::key::{ItemType, Key, objectid};
use sealblock_btrfs_format::names::{MAX_NAME_BYTES, NameError, check_file_name, name_hash};

use crate::plan::{Plan, PlanError};
use crate::view::Items;

/// The first index of a directory; 0 and 1 are those of `.` and `..`, which have no entries.
const FIRST_INDEX: u64 = 2;

/// What an entry of a directory leads to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DirectoryEntry {
    /// Its target.
    pub target: Target,
    /// The type of the target.
    pub kind: FileType,
}

/// Checks a name that a program gives.
pub(super) fn check_name(name: &[u8]) -> Result<(), PlanError> {
    check_file_name(name).map_err(|error| match error {
        NameError::Length(length) if length > MAX_NAME_BYTES => PlanError::NameTooLong { length, most: MAX_NAME_BYTES },
        NameError::Length(_) | NameError::Byte(_) | NameError::Dots => PlanError::InvalidName,
    })
}

fn item_key(directory: u64, name: &[u8]) -> Key {
    Key::new(directory, ItemType::DIR_ITEM, name_hash(name))
}

fn index_key(directory: u64, index: u64) -> Key {
    Key::new(directory, ItemType::DIR_INDEX, index)
}

/// True if the key of an entry is one of this target. That of a subvolume may end with any number: Linux writes -1 when
/// it creates the subvolume, and that of the root item when it renames it.
fn leads_to(location: Key, target: Target) -> bool {
    match target {
        Target::Inode(_) => location == target.location(),
        Target::Subvolume(_) => Target::of(location) == target,
    }
}

impl<V: Items> Plan<'_, V> {
    /// Remembers the index of the next new entry of a directory: higher than that of every entry which it ever had.
    pub fn set_next_index(&mut self, directory: u64, index: u64) {
        self.next_index.insert(directory, index);
    }

    /// The index of the next new entry of a directory, if the plan had to find it.
    pub fn next_index(&self, directory: u64) -> Option<u64> {
        self.next_index.get(&directory).copied()
    }

    /// The entry of this name, if the directory has it.
    ///
    /// # Errors
    /// If the name cannot be one, or the entry is damaged. Whether the inode is a directory is not checked: others have
    /// no entries.
    pub fn lookup(&self, directory: u64, name: &[u8]) -> Result<Option<DirectoryEntry>, PlanError> {
        check_name(name)?;
        let key = item_key(directory, name);
        let damaged = |why| Err(PlanError::Damaged { key, why });
        let Some(entry) = self.entries_at(key)?.and_then(|entries| entries.iter().find(|one| one.name == name)) else {
            return Ok(None);
        };
        let target = Target::of(entry.location);
        let is_valid = match target {
            Target::Inode(ino) => {
                leads_to(entry.location, target)
                    && (objectid::FIRST_FREE..=objectid::LAST_FREE).contains(&ino)
                    // The top directory has no name.
                    && ino != objectid::FIRST_FREE
            }
            Target::Subvolume(id) => objectid::is_subvolume(id),
        };
        match entry.file_type() {
            _ if !is_valid => damaged("an entry leads to something else than an inode or a subvolume"),
            None | Some(FileType::Unknown | FileType::Xattr) => damaged("an entry has no type that an inode can have"),
            Some(kind) => Ok(Some(DirectoryEntry { target, kind })),
        }
    }

    fn entries_at(&self, key: Key) -> Result<Option<Entries<'_, DirEntry<'_>>>, PlanError> {
        match self.item(key)? {
            Some(Item::DirItems(entries) | Item::DirIndex(entries)) => Ok(Some(entries)),
            Some(_) => Err(PlanError::Damaged { key, why: "not an entry of a directory" }),
            None => Ok(None),
        }
    }

    /// True if a directory has an entry.
    pub(crate) fn has_entries(&self, directory: u64) -> Result<bool, PlanError> {
        let first = Key::new(directory, ItemType::DIR_ITEM, 0);
        Ok(self.first(first..=index_key(directory, u64::MAX))?.is_some())
    }

    /// The index of a new entry.
    pub(super) fn take_index(&mut self, directory: u64) -> Result<u64, PlanError> {
        let index = match self.next_index(directory) {
            Some(index) => index,
            None => {
                let all = index_key(directory, 0)..=index_key(directory, u64::MAX);
                let last = self.last(all)?.map_or(0, |(key, _)| key.offset);
                last.saturating_add(1).max(FIRST_INDEX)
            }
        };
        // Programs get the index as a signed number.
        if index >= i64::MAX as u64 {
            return Err(PlanError::NoNumber("index of the directory"));
        }
        if index < FIRST_INDEX || self.at(index_key(directory, index))?.is_some() {
            return Err(PlanError::InvalidArgument("the next index of the directory is in use"));
        }
        self.next_index.insert(directory, index + 1);
        Ok(index)
    }

    /// Adds both items of an entry whose name the directory does not have.
    pub(super) fn add_entry(
        &mut self,
        directory: u64,
        name: &[u8],
        index: u64,
        entry: DirectoryEntry,
    ) -> Result<(), PlanError> {
        let location = entry.target.location();
        let stored = DirEntry { location, transid: self.context.generation, kind: entry.kind as u8, name, data: b"" };
        let (key, most) = (item_key(directory, name), self.context.max_item_bytes());
        let mut list = self.at(key)?.unwrap_or_default().to_vec();
        push_entry(&mut list, &stored, most).map_err(|_| PlanError::CollisionsFull)?;
        self.put(key, list)?;
        let mut alone = Vec::new();
        stored.write(&mut alone).map_err(|_| PlanError::InvalidName)?;
        self.put(index_key(directory, index), alone)
    }

    /// Removes both items of an entry.
    pub(super) fn remove_entry(
        &mut self,
        directory: u64,
        name: &[u8],
        index: u64,
        target: Target,
    ) -> Result<(), PlanError> {
        let key = item_key(directory, name);
        let is_wanted = |one: &DirEntry<'_>| one.name == name && leads_to(one.location, target);
        let without = self.entries_at(key)?.and_then(|entries| entries.without(is_wanted));
        let missing = |key| PlanError::Damaged { key, why: "the directory has no such entry" };
        let (_, rest) = without.ok_or_else(|| missing(key))?;
        self.put_list(key, rest)?;
        let key = index_key(directory, index);
        let without = self.entries_at(key)?.and_then(|entries| entries.without(is_wanted));
        let (_, rest) = without.ok_or_else(|| missing(key))?;
        if !rest.is_empty() {
            return Err(PlanError::Damaged { key, why: "several entries with one index" });
        }
        self.delete(key)?;
        Ok(())
    }

    /// The index of an entry, found by reading all of the directory: the only way for the entry of a subvolume that is
    /// elsewhere.
    pub(super) fn find_index(&self, directory: u64, name: &[u8]) -> Result<Option<u64>, PlanError> {
        let (mut from, end) = (0, index_key(directory, u64::MAX));
        while let Some((key, _)) = self.first(index_key(directory, from)..=end)? {
            if self.entries_at(key)?.is_some_and(|entries| entries.iter().any(|one| one.name == name)) {
                return Ok(Some(key.offset));
            }
            let Some(next) = key.offset.checked_add(1) else { break };
            from = next;
        }
        Ok(None)
    }
}
