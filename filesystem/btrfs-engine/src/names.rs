//! Names: files are created, linked, unlinked and renamed.
//!
//! A name consists of three parts, which are written together: the DIR_ITEM and the DIR_INDEX of the directory
//! (`entries`), and the INODE_REF or INODE_EXTREF of the inode (`backrefs`). Beside them, the inode counts its names,
//! and the directory their lengths.
//!
//! Invariants:
//! - Every DIR_ITEM has one DIR_INDEX and, unless it leads to a subvolume, one name of the inode, with the same index.
//! - An inode that loses its last name becomes an orphan in the same plan.
//! - The entry of a subvolume has its third part in the root tree. Only [`Plan::add_subvolume_entry`] and
//!   [`Plan::remove_subvolume_entry`] touch such entries, and their caller changes the root tree.
//!
//! Nothing here checks the permissions of a user. It does check the flags of inodes that forbid changes.

mod backrefs;
mod entries;
#[cfg(test)]
mod files;
#[cfg(test)]
pub(crate) mod model;
#[cfg(test)]
mod random;
mod rename;
#[cfg(test)]
mod tests;

use sealblock_btrfs_format::items::directory::{FileType, Target};
use sealblock_btrfs_format::items::file_extent::{FileExtent, FileExtentHead, kind};
use sealblock_btrfs_format::items::inode::InodeItem;
use sealblock_btrfs_format::key::{ItemType, Key, objectid};
use zerocopy::{FromZeros, IntoBytes};

pub use entries::DirectoryEntry;
pub use rename::{MovedSubvolume, RenameMode, Renamed};

use crate::datasum::Datasum;
use crate::inode::{DEVICE_TOO_LARGE, Ownership, inode_key, kind_of};
use crate::plan::{Plan, PlanError};
use crate::view::Items;
use entries::check_name;

/// The maximum number of names of an inode.
pub const MAX_LINKS: u32 = 65_535;
/// The longest target of a symbolic link that Linux can resolve.
const MAX_TARGET_BYTES: usize = 4095;

/// A name in a directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place<'a> {
    /// The inode of the directory.
    pub directory: u64,
    /// The name.
    pub name: &'a [u8],
}

/// What is created.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NewFile<'a> {
    /// An empty file.
    Regular,
    /// An empty directory.
    Directory,
    /// A symbolic link with this target.
    Symlink(&'a [u8]),
    /// A named pipe.
    Fifo,
    /// A socket.
    Socket,
    /// A character device with this number ([`device_number`](crate::inode::device_number)).
    CharacterDevice(u64),
    /// A block device with this number.
    BlockDevice(u64),
}

impl NewFile<'_> {
    fn kind(&self) -> FileType {
        match self {
            NewFile::Regular => FileType::Regular,
            NewFile::Directory => FileType::Directory,
            NewFile::Symlink(_) => FileType::Symlink,
            NewFile::Fifo => FileType::Fifo,
            NewFile::Socket => FileType::Socket,
            NewFile::CharacterDevice(_) => FileType::CharacterDevice,
            NewFile::BlockDevice(_) => FileType::BlockDevice,
        }
    }
}

/// An inode that lost a name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Unlinked {
    /// The inode.
    pub ino: u64,
    /// True if that was its last name: it is an orphan now, to be deleted when nobody uses it.
    pub is_orphan: bool,
}

impl<V: Items> Plan<'_, V> {
    /// The directory at the top of a new subvolume, whose tree is empty: inode 256, with the name `..` in itself. It
    /// inherits where the checksums of data are kept, and nothing else.
    ///
    /// # Errors
    /// [`PlanError::Exists`] if the tree has items.
    pub fn create_top(&mut self, owner: &Ownership, datasum: Datasum) -> Result<(), PlanError> {
        self.attempt(|plan| {
            if plan.first(Key::MIN..=Key::MAX)?.is_some() {
                return Err(PlanError::Exists);
            }
            let ino = objectid::FIRST_FREE;
            let inode = plan.new_inode(&InodeItem::new_zeroed(), FileType::Directory, owner);
            let flags = datasum.flags_of_directory().bits().into();
            plan.put(inode_key(ino), InodeItem { nlink: 1.into(), flags, ..inode }.as_bytes().to_vec())?;
            plan.add_backref(ino, ino, 0, b"..")
        })
    }

    /// Creates a file of any type. Returns its inode number.
    ///
    /// # Errors
    /// Of names: [`PlanError::Exists`], [`PlanError::InvalidName`], [`PlanError::NameTooLong`] also for a target,
    /// [`PlanError::EmptyTarget`], [`PlanError::CollisionsFull`]. Of the directory: [`PlanError::NotFound`],
    /// [`PlanError::NotADirectory`], [`PlanError::Protected`]. [`PlanError::NoNumber`].
    pub fn create(&mut self, place: Place<'_>, file: NewFile<'_>, owner: &Ownership) -> Result<u64, PlanError> {
        self.attempt(|plan| {
            let directory = plan.free_place(place)?;
            let ino = plan.create_inode(place.directory, &directory, file, owner, 1)?;
            plan.add_name(place, DirectoryEntry { target: Target::Inode(ino), kind: file.kind() })?;
            Ok(ino)
        })
    }

    /// Creates a regular file without a name, which is an orphan until [`Plan::link_unnamed`] (O_TMPFILE).
    ///
    /// # Errors
    /// Those of the directory, which only gives what the file inherits; [`PlanError::NoNumber`].
    pub fn create_unnamed(&mut self, directory: u64, owner: &Ownership) -> Result<u64, PlanError> {
        self.attempt(|plan| {
            let parent = plan.directory(directory, false)?;
            let ino = plan.create_inode(directory, &parent, NewFile::Regular, owner, 0)?;
            plan.add_orphan(ino)?;
            Ok(ino)
        })
    }

    /// Gives a file another name.
    ///
    /// # Errors
    /// [`PlanError::LinkOfDirectory`], [`PlanError::TooManyLinks`], [`PlanError::NotFound`] also for a file that lost
    /// its last name; those of names and of the directory.
    pub fn link(&mut self, ino: u64, place: Place<'_>) -> Result<(), PlanError> {
        self.add_link(ino, place, false)
    }

    /// Gives a file its first name, which [`Plan::create_unnamed`] made. Whether it was that is the caller's to know: a
    /// file that lost its last name looks the same, and must not come back.
    ///
    /// # Errors
    /// Those of [`Plan::link`]; [`PlanError::InvalidArgument`] if it has a name.
    pub fn link_unnamed(&mut self, ino: u64, place: Place<'_>) -> Result<(), PlanError> {
        self.add_link(ino, place, true)
    }

    fn add_link(&mut self, ino: u64, place: Place<'_>, is_unnamed: bool) -> Result<(), PlanError> {
        self.attempt(|plan| {
            plan.free_place(place)?;
            let inode = plan.inode(ino)?;
            let kind = kind_of(&inode);
            match inode.nlink.get() {
                _ if kind == FileType::Directory => return Err(PlanError::LinkOfDirectory),
                0 if is_unnamed && kind == FileType::Regular => plan.remove_orphan(ino)?,
                0 => return Err(PlanError::NotFound),
                _ if is_unnamed => return Err(PlanError::InvalidArgument("the file has a name")),
                MAX_LINKS.. => return Err(PlanError::TooManyLinks),
                _ => {}
            }
            plan.check_protection(ino, &inode, true)?;
            let now = plan.context.now;
            plan.edit_inode(ino, |inode| {
                (inode.nlink, inode.ctime) = ((inode.nlink.get() + 1).into(), now);
                Ok(())
            })?;
            plan.add_name(place, DirectoryEntry { target: Target::Inode(ino), kind })
        })
    }

    /// Removes a name of a file that is not a directory.
    ///
    /// # Errors
    /// [`PlanError::IsADirectory`], also for a subvolume; [`PlanError::NotFound`], [`PlanError::Protected`]; those of
    /// the directory.
    pub fn unlink(&mut self, place: Place<'_>) -> Result<Unlinked, PlanError> {
        self.attempt(|plan| {
            let entry = plan.used_place(place)?;
            match plan.target_inode(place, entry) {
                Ok((_, FileType::Directory)) | Err(PlanError::IsSubvolume(_)) => Err(PlanError::IsADirectory),
                Ok((ino, _)) => plan.remove_link(ino, place),
                Err(error) => Err(error),
            }
        })
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// [`PlanError::NotADirectory`], [`PlanError::NotEmpty`], [`PlanError::NotFound`], [`PlanError::Protected`]; those
    /// of the directory that it is in. [`PlanError::IsSubvolume`]: if the root tree has a ROOT_REF for the place, the
    /// subvolume is to be deleted first; otherwise it is elsewhere, and [`Plan::remove_subvolume_entry`] removes this
    /// entry, which is left of it in a snapshot.
    pub fn rmdir(&mut self, place: Place<'_>) -> Result<Unlinked, PlanError> {
        self.attempt(|plan| {
            let entry = plan.used_place(place)?;
            match plan.target_inode(place, entry)? {
                (ino, FileType::Directory) if plan.has_entries(ino)? => Err(PlanError::NotEmpty),
                (ino, FileType::Directory) => plan.remove_link(ino, place),
                _ => Err(PlanError::NotADirectory),
            }
        })
    }

    /// Adds the entry of a subvolume. Returns its index, which also the ROOT_REF has.
    ///
    /// # Errors
    /// Those of names and of the directory; [`PlanError::InvalidArgument`] if no subvolume has this number.
    pub fn add_subvolume_entry(&mut self, place: Place<'_>, id: u64) -> Result<u64, PlanError> {
        self.attempt(|plan| {
            plan.free_place(place)?;
            if !objectid::is_subvolume(id) || id == objectid::FS_TREE {
                return Err(PlanError::InvalidArgument("no subvolume below another has this number"));
            }
            let index = plan.take_index(place.directory)?;
            plan.add_entry(
                place.directory,
                place.name,
                index,
                DirectoryEntry { target: Target::Subvolume(id), kind: FileType::Directory },
            )?;
            plan.resize_directory(place, u64::checked_add)?;
            Ok(index)
        })
    }

    /// Removes the entry of a subvolume, and nothing else. Returns the subvolume's number. The index is that of the
    /// ROOT_REF; without one, the directory is searched.
    ///
    /// # Errors
    /// Those of names and of the directory; [`PlanError::InvalidArgument`] if the entry does not lead to a subvolume.
    pub fn remove_subvolume_entry(&mut self, place: Place<'_>, index: Option<u64>) -> Result<u64, PlanError> {
        self.attempt(|plan| {
            let entry = plan.used_place(place)?;
            let Target::Subvolume(id) = entry.target else {
                return Err(PlanError::InvalidArgument("the entry does not lead to a subvolume"));
            };
            let index = match index {
                Some(index) => index,
                None => {
                    let key = Key::new(place.directory, ItemType::DIR_INDEX, 0);
                    let missing = PlanError::Damaged { key, why: "the directory has no such entry" };
                    plan.find_index(place.directory, place.name)?.ok_or(missing)?
                }
            };
            plan.remove_entry(place.directory, place.name, index, entry.target)?;
            plan.resize_directory(place, u64::checked_sub)?;
            Ok(id)
        })
    }

    /// Checks that a name can be added. Returns its directory.
    fn free_place(&self, place: Place<'_>) -> Result<InodeItem, PlanError> {
        check_name(place.name)?;
        let directory = self.directory(place.directory, false)?;
        match self.lookup(place.directory, place.name)? {
            Some(_) => Err(PlanError::Exists),
            None => Ok(directory),
        }
    }

    /// The entry of a name that is to be removed.
    fn used_place(&self, place: Place<'_>) -> Result<DirectoryEntry, PlanError> {
        check_name(place.name)?;
        self.directory(place.directory, true)?;
        self.lookup(place.directory, place.name)?.ok_or(PlanError::NotFound)
    }

    /// The inode of an entry that is to be removed or moved.
    fn target_inode(&self, place: Place<'_>, entry: DirectoryEntry) -> Result<(u64, FileType), PlanError> {
        let ino = match entry.target {
            Target::Inode(ino) => ino,
            Target::Subvolume(id) => return Err(PlanError::IsSubvolume(id)),
        };
        let inode = self.referred_inode(ino)?;
        if kind_of(&inode) != entry.kind || inode.nlink.get() == 0 {
            let why = "its entry has another type, or it counts no names";
            return Err(PlanError::Damaged { key: inode_key(ino), why });
        }
        if ino == place.directory {
            return Err(PlanError::Damaged { key: inode_key(ino), why: "the directory lies in itself" });
        }
        self.check_protection(ino, &inode, true)?;
        Ok((ino, entry.kind))
    }

    /// A new inode with this number of links, and what it inherits.
    fn create_inode(
        &mut self,
        parent: u64,
        directory: &InodeItem,
        file: NewFile<'_>,
        owner: &Ownership,
        nlink: u32,
    ) -> Result<u64, PlanError> {
        let ino = self.take_ino()?;
        let mut inode = InodeItem { nlink: nlink.into(), ..self.new_inode(directory, file.kind(), owner) };
        match file {
            NewFile::CharacterDevice(device) | NewFile::BlockDevice(device) => {
                inode.rdev = u32::try_from(device).map(u64::from).map_err(|_| DEVICE_TOO_LARGE)?.into();
            }
            NewFile::Symlink(target) => self.put_target(ino, &mut inode, target)?,
            NewFile::Regular | NewFile::Directory | NewFile::Fifo | NewFile::Socket => {}
        }
        self.inherit_compression(parent, ino, &mut inode)?;
        self.put(inode_key(ino), inode.as_bytes().to_vec())?;
        Ok(ino)
    }

    /// The target of a symbolic link is in the tree whatever its size, and never compressed.
    fn put_target(&mut self, ino: u64, inode: &mut InodeItem, target: &[u8]) -> Result<(), PlanError> {
        let most = self.max_target_bytes();
        match target.len() {
            0 => return Err(PlanError::EmptyTarget),
            length if length > most => return Err(PlanError::NameTooLong { length, most }),
            _ if target.contains(&0) => return Err(PlanError::InvalidName),
            _ => {}
        }
        let length = target.len() as u64;
        (inode.size, inode.nbytes) = (length.into(), length.into());
        let head = FileExtentHead {
            generation: self.context.generation.into(),
            ram_bytes: length.into(),
            compression: 0,
            encryption: 0,
            other_encoding: 0.into(),
            kind: kind::INLINE,
        };
        let mut data = Vec::with_capacity(size_of::<FileExtentHead>() + target.len());
        FileExtent::Inline(&head, target).write(&mut data);
        self.put(Key::new(ino, ItemType::EXTENT_DATA, 0), data)
    }

    /// The longest target of a symbolic link.
    fn max_target_bytes(&self) -> usize {
        let sector = self.context.geometry.sector_bytes as usize;
        let of_leaf = self.context.max_item_bytes().saturating_sub(size_of::<FileExtentHead>());
        MAX_TARGET_BYTES.min(sector.saturating_sub(1)).min(of_leaf)
    }

    /// Adds all parts of a name to a place that is free. The inode counts it already.
    fn add_name(&mut self, place: Place<'_>, entry: DirectoryEntry) -> Result<(), PlanError> {
        let index = self.take_index(place.directory)?;
        self.add_entry(place.directory, place.name, index, entry)?;
        if let Target::Inode(ino) = entry.target {
            self.add_backref(ino, place.directory, index, place.name)?;
        }
        self.resize_directory(place, u64::checked_add)
    }

    /// Removes all parts of a name. The inode still counts it.
    fn remove_name(&mut self, ino: u64, place: Place<'_>) -> Result<(), PlanError> {
        let index = self.remove_backref(ino, place.directory, place.name)?;
        self.remove_entry(place.directory, place.name, index, Target::Inode(ino))?;
        self.resize_directory(place, u64::checked_sub)
    }

    /// Removes a name of an inode, which is an orphan if that was the last one.
    fn remove_link(&mut self, ino: u64, place: Place<'_>) -> Result<Unlinked, PlanError> {
        self.remove_name(ino, place)?;
        let now = self.context.now;
        let inode = self.edit_inode(ino, |inode| {
            let none = PlanError::Damaged { key: inode_key(ino), why: "it counts fewer names than it has" };
            inode.nlink = inode.nlink.get().checked_sub(1).ok_or(none)?.into();
            inode.ctime = now;
            if kind_of(inode) == FileType::Directory {
                if inode.nlink.get() != 0 {
                    return Err(PlanError::Damaged { key: inode_key(ino), why: "a directory counts several names" });
                }
                inode.size = 0.into();
            }
            Ok(())
        })?;
        let is_orphan = inode.nlink.get() == 0;
        if is_orphan {
            self.add_orphan(ino)?;
        }
        Ok(Unlinked { ino, is_orphan })
    }

    /// A directory got or lost a name.
    fn resize_directory(
        &mut self,
        place: Place<'_>,
        change: impl FnOnce(u64, u64) -> Option<u64>,
    ) -> Result<(), PlanError> {
        let now = self.context.now;
        let key = inode_key(place.directory);
        self.edit_inode(place.directory, |inode| {
            let size = change(inode.size.get(), 2 * place.name.len() as u64);
            let damaged = PlanError::Damaged { key, why: "the size of the directory is not that of its names" };
            inode.size = size.ok_or(damaged)?.into();
            (inode.mtime, inode.ctime) = (now, now);
            Ok(())
        })?;
        Ok(())
    }
}
