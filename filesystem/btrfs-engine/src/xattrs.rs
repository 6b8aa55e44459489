//! Extended attributes: names with values, which are found by the hash of the name.
//!
//! Attributes of one hash share an item. An attribute, and all attributes of one hash together, fit into one item.
//! Names are stored with their namespace (`user.`, `security.`), of which nothing here knows the meaning. The exceptions
//! are `btrfs.compression`, which is also a flag of the inode, and which new files inherit from their directory; and
//! access control lists, which belong to the mode ([`crate::acls`]).

use sealblock_btrfs_format::items::Item;
use sealblock_btrfs_format::items::directory::{DirEntry, FileType};
use sealblock_btrfs_format::items::entries::{Entries, push_entry};
use sealblock_btrfs_format::items::inode::{InodeFlags, InodeItem};
use sealblock_btrfs_format::key::{ItemType, Key};
use sealblock_btrfs_format::names::{MAX_NAME_BYTES, name_hash};

use crate::acls;
use crate::inode::kind_of;
use crate::plan::{Plan, PlanError};
use crate::view::Items;

/// The attribute with the compression of a file, or of the new files of a directory.
pub const COMPRESSION: &[u8] = b"btrfs.compression";
/// What its value begins with; a level may follow.
const ALGORITHMS: [&[u8]; 3] = [b"zlib", b"lzo", b"zstd"];

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
        match name {
            acls::ACCESS => return self.set_access_acl(ino, value, false),
            acls::DEFAULT => self.check_default_acl(ino, value)?,
            _ => {}
        }
        self.attempt(|plan| {
            if name == COMPRESSION {
                plan.set_compression(ino, value)?;
            }
            // As in Linux, an empty compression is none.
            let put = match name == COMPRESSION && value.is_empty() {
                true => plan.delete_xattr(ino, name),
                false => plan.put_xattr(ino, name, value, mode),
            };
            match put {
                Err(PlanError::NoAttribute) if mode != XattrMode::Replace => {}
                put => put?,
            }
            plan.mark_changed(ino)
        })
    }

    /// Gives an inode the flags of a compression, before it gets the attribute. One without a value is that of the mount.
    fn set_compression(&mut self, ino: u64, value: &[u8]) -> Result<(), PlanError> {
        let both = InodeFlags::COMPRESS | InodeFlags::NOCOMPRESS;
        let flags = match value {
            b"" => InodeFlags::empty(),
            b"no" | b"none" => InodeFlags::NOCOMPRESS,
            _ if ALGORITHMS.iter().any(|name| value.starts_with(name)) => InodeFlags::COMPRESS,
            _ => return Err(PlanError::InvalidArgument("not a compression")),
        };
        let inode = self.inode(ino)?;
        let is_plain = inode.flags().intersects(InodeFlags::NODATACOW | InodeFlags::NODATASUM);
        match kind_of(&inode) {
            FileType::Regular if is_plain && flags.contains(InodeFlags::COMPRESS) => {
                return Err(PlanError::InvalidArgument("a file without checksums is not compressed"));
            }
            FileType::Regular | FileType::Directory => {}
            _ => return Err(PlanError::InvalidArgument("only regular files and directories are compressed")),
        }
        self.edit_inode(ino, |inode| {
            inode.flags = (inode.flags().difference(both) | flags).bits().into();
            Ok(())
        })?;
        Ok(())
    }

    /// Writes an attribute of an inode, whether it has it or not, and does not mark the inode as changed.
    pub(crate) fn store_xattr(&mut self, ino: u64, name: &[u8], value: &[u8]) -> Result<(), PlanError> {
        self.put_xattr(ino, name, value, XattrMode::Set)
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
        self.attempt(|plan| {
            plan.delete_xattr(ino, name)?;
            if name == COMPRESSION {
                plan.set_compression(ino, b"")?;
            }
            plan.mark_changed(ino)
        })
    }

    /// Removes an attribute of an inode, which it does not mark as changed.
    pub(crate) fn delete_xattr(&mut self, ino: u64, name: &[u8]) -> Result<(), PlanError> {
        let key = key_of(ino, name);
        let without = self.xattrs_at(key)?.and_then(|entries| entries.without(|one| one.name == name));
        let (_, rest) = without.ok_or(PlanError::NoAttribute)?;
        self.put_list(key, rest)
    }

    /// Gives a new inode the compression that its directory has as an attribute, as Linux does: the algorithm without
    /// its level, and not if the file could not be compressed.
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
        let Some(algorithm) = ALGORITHMS.into_iter().find(|name| value.starts_with(name)) else { return Ok(()) };
        inode.flags = (flags.difference(InodeFlags::NOCOMPRESS) | InodeFlags::COMPRESS).bits().into();
        self.put_xattr(ino, COMPRESSION, algorithm, XattrMode::Create)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::inode::{AttributeChanges, inode_key};
    use crate::names::model::{
        GENERATION, OWNER, TOP, Tree, change, check, colliding_names, context, geometry, new_tree, time,
    };
    use crate::names::{NewFile, Place};

    #[test]
    fn attributes_with_equal_hashes_are_those_of_a_map() {
        let (mut tree, mut model) = (new_tree(), BTreeMap::<Vec<u8>, Vec<u8>>::new());
        let (mut random, names) =
            (fastrand::Rng::with_seed(1), [colliding_names(20), vec![b"user.a".to_vec()]].concat());
        let (mut full, most) = (0, 4096 - 101 - 25);
        for _ in 0..5000 {
            let (name, value) = (&names[random.usize(..names.len())], vec![random.u8(..); random.usize(..600)]);
            let mode = [XattrMode::Set, XattrMode::Create, XattrMode::Replace][random.usize(..3)];
            let bytes_of = |(name, value): (&Vec<u8>, &Vec<u8>)| 30 + name.len() + value.len();
            let others = model.iter().filter(|(other, _)| *other != name && name_hash(other) == name_hash(name));
            let bytes = others.map(bytes_of).sum::<usize>() + bytes_of((name, &value));
            if random.u8(..3) == 0 {
                let removed = model.remove(name).map(drop).ok_or(PlanError::NoAttribute);
                assert_eq!(change(&mut tree, |plan| plan.remove_xattr(TOP, name)), removed);
            } else {
                let expected = match (model.contains_key(name), mode) {
                    (true, XattrMode::Create) => Err(PlanError::Exists),
                    (false, XattrMode::Replace) => Err(PlanError::NoAttribute),
                    _ if bytes > most => Err(PlanError::NoSpaceForXattr),
                    _ => Ok(()),
                };
                full += usize::from(expected == Err(PlanError::NoSpaceForXattr));
                assert_eq!(change(&mut tree, |plan| plan.set_xattr(TOP, name, &value, mode)), expected);
                if expected.is_ok() {
                    model.insert(name.clone(), value);
                }
            }
            let geometry = geometry();
            let plan = Plan::new(&tree, context(&geometry));
            assert_eq!(plan.xattr(TOP, name).unwrap(), model.get(name).map(|value| &value[..]));
            let mut found = plan.xattr_names(TOP).unwrap();
            found.sort();
            assert!(found.iter().eq(model.keys()));
            check(&tree, &geometry);
        }
        assert!(full > 100, "the item was full");
    }

    #[test]
    fn the_largest_attribute_fills_a_leaf_and_marks_its_inode() {
        let mut tree = new_tree();
        let set = |tree: &mut Tree, ino, name: &[u8], length| {
            change(tree, |plan| plan.set_xattr(ino, name, &vec![1; length], XattrMode::Set))
        };
        let most = 4096 - 101 - 25 - 30 - 6;
        assert_eq!(set(&mut tree, TOP, b"user.a", most + 1), Err(PlanError::NoSpaceForXattr));
        assert_eq!(set(&mut tree, TOP, b"user.a", most), Ok(()));
        assert_eq!(set(&mut tree, TOP, b"user.b", 70_000), Err(PlanError::NoSpaceForXattr));
        assert_eq!(set(&mut tree, TOP, b"", 1), Err(PlanError::InvalidName));
        assert_eq!(set(&mut tree, TOP, b"a\0", 1), Err(PlanError::InvalidName));
        let long = [b'n'; 256];
        assert_eq!(set(&mut tree, TOP, &long, 1), Err(PlanError::NameTooLong { length: 256, most: 255 }));
        assert_eq!(set(&mut tree, TOP, &long[1..], 0), Ok(()));
        assert_eq!(set(&mut tree, 999, b"user.a", 1), Err(PlanError::NotFound));
        check(&tree, &geometry());
        let geometry = geometry();
        let plan = Plan::new(&tree, context(&geometry));
        let top = plan.inode(TOP).unwrap();
        assert_eq!((top.ctime, top.mtime), (time(50), time(1)));
        assert_eq!((top.transid.get(), top.sequence.get()), (GENERATION, 2));
        assert_eq!(plan.xattr(999, b"user.a"), Err(PlanError::NotFound));
        assert_eq!(plan.xattr_names(999), Err(PlanError::NotFound));
    }

    #[test]
    fn an_inode_that_must_not_change_keeps_its_attributes() {
        let mut tree = new_tree();
        change(&mut tree, |plan| plan.set_xattr(TOP, b"user.a", b"1", XattrMode::Set)).unwrap();
        for (flags, flag) in [(InodeFlags::IMMUTABLE, "immutable"), (InodeFlags::APPEND, "append-only")] {
            change(&mut tree, |plan| plan.set_flags(TOP, flags)).unwrap();
            let refused = Err(PlanError::Protected { ino: TOP, flag });
            assert_eq!(change(&mut tree, |plan| plan.set_xattr(TOP, b"user.a", b"2", XattrMode::Set)), refused);
            assert_eq!(change(&mut tree, |plan| plan.remove_xattr(TOP, b"user.a")), refused);
            let changes = AttributeChanges { uid: Some(1), ..AttributeChanges::default() };
            assert_eq!(change(&mut tree, |plan| plan.set_attributes(TOP, &changes)).map(drop), refused);
        }
        change(&mut tree, |plan| plan.set_flags(TOP, InodeFlags::empty())).unwrap();
        assert_eq!(change(&mut tree, |plan| plan.remove_xattr(TOP, b"user.a")), Ok(()));
        assert_eq!(change(&mut tree, |plan| plan.remove_xattr(TOP, b"user.a")), Err(PlanError::NoAttribute));
    }

    #[test]
    fn new_files_inherit_the_compression_of_their_directory() {
        /// A value, the new file, the flags of the directory, and the value that the file gets.
        type Case = (&'static [u8], NewFile<'static>, InodeFlags, Option<&'static [u8]>);
        let cases: [Case; 5] = [
            (b"zstd:3", NewFile::Regular, InodeFlags::empty(), Some(b"zstd")),
            (b"lzo", NewFile::Directory, InodeFlags::empty(), Some(b"lzo")),
            (b"zlib", NewFile::Symlink(b"x"), InodeFlags::empty(), None),
            (b"zlib", NewFile::Regular, InodeFlags::NODATACOW, None),
            (b"none", NewFile::Regular, InodeFlags::empty(), None),
        ];
        for (value, file, flags, expected) in cases {
            let mut tree = new_tree();
            change(&mut tree, |plan| {
                plan.set_xattr(TOP, COMPRESSION, value, XattrMode::Set)?;
                plan.set_flags(TOP, flags)?;
                let ino = plan.create(Place { directory: TOP, name: b"new" }, file, &OWNER)?;
                assert_eq!(plan.xattr(ino, COMPRESSION)?, expected);
                let compresses = plan.inode(ino)?.flags().contains(InodeFlags::COMPRESS);
                assert_eq!(compresses, expected.is_some(), "{}", value.escape_ascii());
                Ok(())
            })
            .unwrap();
            check(&tree, &geometry());
        }
    }

    #[test]
    fn the_compression_of_an_inode_is_a_flag_too() {
        use InodeFlags as F;
        let mut tree = new_tree();
        change(&mut tree, |plan| {
            let new = |plan: &mut Plan<'_, Tree>, name, file| plan.create(Place { directory: TOP, name }, file, &OWNER);
            let file = new(plan, b"file", NewFile::Regular)?;
            let fifo = new(plan, b"fifo", NewFile::Fifo)?;
            for (value, flags) in [(&b"zstd:9"[..], F::COMPRESS), (b"none", F::NOCOMPRESS), (b"", F::empty())] {
                plan.set_xattr(file, COMPRESSION, value, XattrMode::Set)?;
                assert_eq!(plan.inode(file)?.flags(), flags);
                let stored = plan.xattr(file, COMPRESSION)?;
                assert_eq!(stored, Some(value).filter(|value| !value.is_empty()));
            }
            plan.set_xattr(file, COMPRESSION, b"", XattrMode::Set)?;
            for (mode, expected) in [(XattrMode::Replace, Err(PlanError::NoAttribute)), (XattrMode::Create, Ok(()))] {
                assert_eq!(plan.set_xattr(file, COMPRESSION, b"", mode), expected);
            }
            plan.set_xattr(file, COMPRESSION, b"lzo", XattrMode::Create)?;
            plan.remove_xattr(file, COMPRESSION)?;
            assert_eq!(plan.inode(file)?.flags(), F::empty());
            for (ino, value) in [(file, &b"zip"[..]), (fifo, b"lzo")] {
                let set = plan.set_xattr(ino, COMPRESSION, value, XattrMode::Set);
                assert!(matches!(set, Err(PlanError::InvalidArgument(_))), "{set:?}");
            }
            plan.set_flags(file, F::NODATACOW)?;
            let set = plan.set_xattr(file, COMPRESSION, b"lzo", XattrMode::Set);
            assert!(matches!(set, Err(PlanError::InvalidArgument(_))), "{set:?}");
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn a_list_that_is_damaged_is_refused() {
        let mut tree = new_tree();
        let key = key_of(TOP, b"user.a");
        tree.insert(key, vec![0; 31]);
        for result in [
            change(&mut tree, |plan| plan.set_xattr(TOP, b"user.a", b"", XattrMode::Set)),
            change(&mut tree, |plan| plan.remove_xattr(TOP, b"user.a")),
            change(&mut tree, |plan| plan.xattr_names(TOP).map(drop)),
        ] {
            assert!(matches!(result, Err(PlanError::Shape { key: found, .. }) if found == key), "{result:?}");
        }
        tree.remove(&inode_key(TOP));
        assert_eq!(change(&mut tree, |plan| plan.remove_xattr(TOP, b"user.a")), Err(PlanError::NotFound));
    }
}
