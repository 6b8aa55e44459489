//! Extended attributes: names with values, which are found by the hash of the name.
//!
//! Attributes of one hash share an item. An attribute, and all attributes of one hash together, fit into one item.
//! Names are stored with their namespace (`user.`, `security.`), of which nothing here knows the meaning. The exception
//! is `btrfs.compression`, which new files inherit from their directory.

use sealblock_btrfs_format::items::Item;
use sealblock_btrfs_format::items::directory::{DirEntry, FileType};
use sealblock_btrfs_format::items::entries::{Entries, push_entry};
use sealblock_btrfs_format::items::inode::{InodeFlags, InodeItem};
use sealblock_btrfs_format::key::{ItemType, Key};
use sealblock_btrfs_format::names::{MAX_NAME_BYTES, name_hash};

use crate::inode::kind_of;
use crate::plan::{Plan, PlanError};
use crate::view::Items;

/// The attribute with the compression of a file, or of the new files of a directory.
pub const COMPRESSION: &[u8] = b"btrfs.compression";

/// Whether an attribute that is set must be new.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum XattrMode {
    /// It is created, or its value is replaced.
    Set,
    /// It must not be there (XATTR_CREATE).
    Create,
    /// It must be there (XATTR_REPLACE).
    Replace,
}

fn check_name(name: &[u8]) -> Result<(), PlanError> {
    match name.len() {
        0 => Err(PlanError::InvalidName),
        length if length > MAX_NAME_BYTES => Err(PlanError::NameTooLong { length, most: MAX_NAME_BYTES }),
        // A list of names for a program has a zero byte after each.
        _ if name.contains(&0) => Err(PlanError::InvalidName),
        _ => Ok(()),
    }
}

fn key_of(ino: u64, name: &[u8]) -> Key {
    Key::new(ino, ItemType::XATTR_ITEM, name_hash(name))
}

fn stored<'a>(name: &'a [u8], data: &'a [u8]) -> DirEntry<'a> {
    DirEntry { location: Key::new(0, ItemType::UNTYPED, 0), transid: 0, kind: FileType::Xattr as u8, name, data }
}

impl<V: Items> Plan<'_, V> {
    fn xattrs_at(&self, key: Key) -> Result<Option<Entries<'_, DirEntry<'_>>>, PlanError> {
        match self.item(key)? {
            Some(Item::Xattrs(entries)) => Ok(Some(entries)),
            Some(_) => Err(PlanError::Damaged { key, why: "not a list of extended attributes" }),
            None => Ok(None),
        }
    }

    /// The value of an attribute, if the inode has it.
    ///
    /// # Errors
    /// If the inode is not there, or the name cannot be one.
    pub fn xattr(&self, ino: u64, name: &[u8]) -> Result<Option<&[u8]>, PlanError> {
        check_name(name)?;
        self.inode(ino)?;
        let entries = self.xattrs_at(key_of(ino, name))?;
        Ok(entries.and_then(|entries| entries.iter().find(|one| one.name == name)).map(|one| one.data))
    }

    /// The names of all attributes, in the order of their hashes.
    ///
    /// # Errors
    /// If the inode is not there.
    pub fn xattr_names(&self, ino: u64) -> Result<Vec<Vec<u8>>, PlanError> {
        self.inode(ino)?;
        let (mut from, end) = (0, Key::new(ino, ItemType::XATTR_ITEM, u64::MAX));
        let mut names = Vec::new();
        while let Some((key, _)) = self.first(Key { offset: from, ..end }..=end)? {
            let entries = self.xattrs_at(key)?;
            names.extend(entries.iter().flat_map(Entries::iter).map(|one| one.name.to_vec()));
            let Some(next) = key.offset.checked_add(1) else { break };
            from = next;
        }
        Ok(names)
    }

    /// Sets an attribute.
    ///
    /// # Errors
    /// [`PlanError::Exists`], [`PlanError::NoAttribute`]: by the mode. [`PlanError::NoSpaceForXattr`]: it does not fit
    /// into an item, alone or with the others of its hash. Also if the inode is not there, or is immutable, append-only
    /// or read-only.
    pub fn set_xattr(&mut self, ino: u64, name: &[u8], value: &[u8], mode: XattrMode) -> Result<(), PlanError> {
        check_name(name)?;
        let inode = self.inode(ino)?;
        self.check_protection(ino, &inode, true)?;
        self.attempt(|plan| {
            plan.put_xattr(ino, name, value, mode)?;
            plan.mark_changed(ino)
        })
    }

    /// Writes an attribute of an inode, which it does not mark as changed.
    fn put_xattr(&mut self, ino: u64, name: &[u8], value: &[u8], mode: XattrMode) -> Result<(), PlanError> {
        let (key, most) = (key_of(ino, name), self.context.max_item_bytes());
        let entries = self.xattrs_at(key)?;
        let without = entries.and_then(|entries| entries.without(|one| one.name == name));
        let mut list = match (without, mode) {
            (Some(_), XattrMode::Create) => return Err(PlanError::Exists),
            (None, XattrMode::Replace) => return Err(PlanError::NoAttribute),
            (Some((_, rest)), _) => rest,
            (None, _) => self.at(key)?.unwrap_or_default().to_vec(),
        };
        push_entry(&mut list, &stored(name, value), most).map_err(|_| PlanError::NoSpaceForXattr)?;
        self.put(key, list)
    }

    /// Removes an attribute.
    ///
    /// # Errors
    /// [`PlanError::NoAttribute`] if the inode does not have it. Also if the inode is not there, or is immutable,
    /// append-only or read-only.
    pub fn remove_xattr(&mut self, ino: u64, name: &[u8]) -> Result<(), PlanError> {
        check_name(name)?;
        let inode = self.inode(ino)?;
        self.check_protection(ino, &inode, true)?;
        let key = key_of(ino, name);
        let without = self.xattrs_at(key)?.and_then(|entries| entries.without(|one| one.name == name));
        let (_, rest) = without.ok_or(PlanError::NoAttribute)?;
        self.attempt(|plan| {
            plan.put_list(key, rest)?;
            plan.mark_changed(ino)
        })
    }

    fn mark_changed(&mut self, ino: u64) -> Result<(), PlanError> {
        let now = self.context.now;
        self.edit_inode(ino, |inode| {
            inode.ctime = now;
            Ok(())
        })?;
        Ok(())
    }

    /// Gives a new inode the compression that its directory has as an attribute, as Linux does: the algorithm without its
    /// level, and not if the file could not be compressed.
    pub(crate) fn inherit_compression(
        &mut self,
        parent: u64,
        ino: u64,
        inode: &mut InodeItem,
    ) -> Result<(), PlanError> {
        let flags = inode.flags();
        let has_data = matches!(kind_of(inode), FileType::Regular | FileType::Directory);
        if !has_data || flags.intersects(InodeFlags::NODATACOW | InodeFlags::NODATASUM) {
            return Ok(());
        }
        let value = self.xattr(parent, COMPRESSION)?.unwrap_or_default();
        let algorithms: [&[u8]; 3] = [b"zlib", b"lzo", b"zstd"];
        let Some(algorithm) = algorithms.into_iter().find(|name| value.starts_with(name)) else { return Ok(()) };
        inode.flags = (flags.difference(InodeFlags::NOCOMPRESS) | InodeFlags::COMPRESS).bits().into();
        self.put_xattr(ino, COMPRESSION, algorithm, XattrMode::Create)
    }
}
