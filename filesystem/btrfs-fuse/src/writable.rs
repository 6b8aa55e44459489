//! A Btrfs filesystem that this process changes, as a [`ReadFs`] and a [`WriteFs`](sealblock_fuse::WriteFs).
//!
//! Invariants:
//! - A write is answered when its data were written; nothing of it is kept here. So an error reaches the program that
//!   wrote, and if the process is killed, only what was not committed is lost.
//! - An inode without names stays as long as the kernel knows it, and so does a deleted subvolume of which the kernel
//!   knows an inode. What the kernel does not know any more nobody can use, as an inode without names cannot be found.
//! - Changes that the kernel did not request, those of commands, are told to it by its [`Notifier`].
//!
//! The kernel checks permissions, removes bits of a mode that a user may not set, and knows nothing of subvolumes, of
//! flags of inodes, and of what a new inode inherits: those are checked and done here and by the engine. Reading does not
//! change the time of the last access.

mod background;
mod changes;
pub mod commands;
mod data;
mod error;
mod known;
mod turns;

use std::cell::{OnceCell, RefCell};
use std::collections::BTreeSet;
use std::io;

use sealblock_btrfs_engine::engine::Engine;
use sealblock_btrfs_engine::names::Place;
use sealblock_btrfs_engine::operations::{DirectoryItem, Resolved, SubvolumePlace};
use sealblock_btrfs_format::items::directory::{FileType, Target};
use sealblock_btrfs_format::items::inode::InodeItem;
use sealblock_btrfs_format::key::objectid;
use sealblock_fuse::{Attributes, DirectoryEntry, FsError, Kind, Notifier, ReadFs, Seek, Statistics};

use crate::numbers::{InodeNumbers, Numbered};
use crate::values::{attributes, cookie_behind, empty_directory, kind_of_entry};
use error::{refused, to_fuse_error};
use known::{Known, WRITES};
use turns::Background;

/// The number of entries that are read at once.
const ENTRIES: usize = 256;
/// The cookies of the first entry with a name, and so the lowest index: `.` and `..` come before.
const FIRST_INDEX: u64 = 2;

/// How a filesystem is presented.
#[derive(Clone, Copy, Debug)]
pub struct WritableOptions {
    /// Makes the UUIDs of new subvolumes, which must differ from all others.
    pub new_uuid: fn() -> io::Result<[u8; 16]>,
    /// Ranges of files with NODATACOW that become zeroes by fallocate(2) count as written, so that later writes there
    /// change no metadata. The devices make the zeroes. Without this, and in other files, the ranges are only allocated.
    pub zeroes_are_written: bool,
}

/// A filesystem that is open for writing, or a part of one.
pub struct Writable<'e> {
    engine: &'e Engine,
    options: WritableOptions,
    root: u64,
    sector_bytes: u32,
    numbers: InodeNumbers<u64>,
    known: Known,
    notifier: OnceCell<Notifier>,
    /// Subvolumes that are being deleted, or were. No file of them is opened.
    deleted: RefCell<BTreeSet<u64>>,
    background: Background,
}

/// An inode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct InodeId {
    /// The subvolume.
    root: u64,
    /// The inode's own number.
    ino: u64,
}

impl<'e> Writable<'e> {
    /// Presents everything below a directory: an inode of a subvolume.
    ///
    /// # Errors
    /// If its inode number does not fit, or nothing can be read any more.
    pub async fn new(
        engine: &'e Engine,
        (root, ino): (u64, u64),
        options: WritableOptions,
    ) -> Result<Writable<'e>, FsError> {
        let sector_bytes = engine.inspect(|transaction| Ok(transaction.geometry().sector_bytes)).await;
        let sector_bytes = sector_bytes.map_err(to_fuse_error)?;
        let (numbers, known, notifier) = (InodeNumbers::default(), Known::default(), OnceCell::new());
        let root = numbers.of_inode((root, root), ino)?;
        Ok(Writable {
            engine,
            options,
            root,
            sector_bytes,
            numbers,
            known,
            notifier,
            deleted: RefCell::default(),
            background: Background::new(),
        })
    }

    /// The kernel is told by this of changes that it did not request. Only the first one counts.
    pub fn set_notifier(&self, notifier: Notifier) {
        let _is_first = self.notifier.set(notifier).is_ok();
    }

    /// The number of an inode in this mount.
    fn number(&self, InodeId { root, ino }: InodeId) -> Result<u64, FsError> {
        self.numbers.of_inode((root, root), ino)
    }

    /// The inode with this number; `None` for an empty directory in place of a subvolume.
    fn find(&self, number: u64) -> Result<Option<InodeId>, FsError> {
        match self.numbers.find(number)? {
            Numbered::Inode(root, ino) => Ok(Some(InodeId { root, ino })),
            Numbered::Placeholder => Ok(None),
        }
    }

    /// A directory that is to be changed. There is nothing in an empty directory in place of a subvolume, ever.
    fn directory(&self, number: u64) -> Result<InodeId, FsError> {
        let why = "the empty directory in place of a subvolume is not changed";
        self.find(number)?.ok_or_else(|| refused(libc::EACCES, why))
    }

    /// An inode that is to be changed.
    fn inode(&self, number: u64) -> Result<InodeId, FsError> {
        let why = "the empty directory in place of a subvolume is not changed";
        self.find(number)?.ok_or_else(|| refused(libc::EPERM, why))
    }

    /// A regular file. That it is one, the engine checks.
    fn file(&self, number: u64) -> Result<InodeId, FsError> {
        self.find(number)?.ok_or(FsError::IsADirectory)
    }

    /// A regular file's inode.
    async fn regular(&self, id: InodeId) -> Result<InodeItem, FsError> {
        let item = self.engine.stat(id.root, id.ino).await.map_err(to_fuse_error)?;
        match FileType::of_mode(item.mode.get()) {
            Some(FileType::Regular) => Ok(item),
            Some(FileType::Directory) => Err(FsError::IsADirectory),
            _ => Err(FsError::WrongKind),
        }
    }

    /// An inode is opened, unless its subvolume goes: whoever deletes it looks only once for files that are written.
    fn open_known(&self, number: u64, id: InodeId, writes: bool) -> Result<(), FsError> {
        if self.deleted.borrow().contains(&id.root) {
            return Err(FsError::NotFound);
        }
        if writes {
            self.known.open(number);
        }
        Ok(())
    }

    /// The attributes of an inode, which the kernel knows from now on: it gets them before anything else happens on this
    /// core.
    async fn attributes_of(&self, id: InodeId) -> Result<Attributes, FsError> {
        let item = self.engine.stat(id.root, id.ino).await.map_err(to_fuse_error)?;
        let kind = kind_of_entry(FileType::of_mode(item.mode.get()).unwrap_or(FileType::Unknown));
        let attributes = attributes(self.number(id)?, kind, &item, self.sector_bytes)?;
        self.known.see(attributes.ino);
        Ok(attributes)
    }

    /// The attributes of an empty directory in place of a subvolume, which is in this directory.
    async fn placeholder_of(&self, number: u64, directory: InodeId) -> Result<Attributes, FsError> {
        let item = self.engine.stat(directory.root, directory.ino).await.map_err(to_fuse_error)?;
        self.known.see(number);
        Ok(empty_directory(number, &item))
    }

    /// What a name leads to, if it is there.
    async fn resolve(&self, directory: InodeId, name: &[u8]) -> Result<Option<Resolved>, FsError> {
        let place = Place { directory: directory.ino, name };
        let found = self.engine.lookup(directory.root, place).await.map_err(to_fuse_error)?;
        Ok(found.map(|entry| entry.target))
    }

    /// The number of an entry's target.
    async fn number_of(&self, number: u64, directory: InodeId, entry: &DirectoryItem) -> Result<u64, FsError> {
        if let Target::Inode(ino) = entry.target {
            return self.number(InodeId { ino, ..directory });
        }
        match self.resolve(directory, &entry.name).await? {
            Some(Resolved::Inode(ino)) => self.number(InodeId { ino, ..directory }),
            Some(Resolved::Subvolume(root)) => self.number(top_of(root)),
            Some(Resolved::Elsewhere(_)) => Ok(self.numbers.of_placeholder(number, &entry.name)),
            // It is gone meanwhile. The kernel looks the name up before it uses it.
            None => Ok(self.numbers.of_placeholder(number, &entry.name)),
        }
    }

    /// The number of the parent directory; for the root, its own number.
    async fn parent(&self, number: u64) -> Result<u64, FsError> {
        match self.find(number)? {
            _ if number == self.root => Ok(number),
            None => Ok(self.numbers.placeholder(number).map_or(number, |(parent, _)| parent)),
            Some(id) => match self.engine.parent(id.root, id.ino).await.map_err(to_fuse_error)? {
                Some((root, ino)) => self.number(InodeId { root, ino }),
                None => Ok(number),
            },
        }
    }
}

/// The place of a subvolume: a name in a directory.
fn place_of(directory: InodeId, name: &[u8]) -> SubvolumePlace<'_> {
    SubvolumePlace { root: directory.root, place: Place { directory: directory.ino, name } }
}

/// The top directory of a subvolume.
fn top_of(root: u64) -> InodeId {
    InodeId { root, ino: objectid::FIRST_FREE }
}

impl ReadFs for Writable<'_> {
    fn root(&self) -> u64 {
        self.root
    }

    async fn lookup(&self, parent: u64, name: &[u8]) -> Result<Attributes, FsError> {
        let Some(directory) = self.find(parent)? else { return Err(FsError::NotFound) };
        let mut is_again = false;
        loop {
            let id = match self.resolve(directory, name).await?.ok_or(FsError::NotFound)? {
                Resolved::Inode(ino) => InodeId { ino, ..directory },
                Resolved::Subvolume(root) => top_of(root),
                Resolved::Elsewhere(_) => {
                    return self.placeholder_of(self.numbers.of_placeholder(parent, name), directory).await;
                }
            };
            match self.attributes_of(id).await {
                // The name may be gone meanwhile; otherwise its target should exist.
                Err(FsError::NotFound) if is_again => {
                    return Err(FsError::Damaged(format!(
                        "a name of inode {} in subvolume {} leads to inode {}, which \
                         is lost",
                        directory.ino, directory.root, id.ino
                    )));
                }
                Err(FsError::NotFound) => is_again = true,
                result => return result,
            }
        }
    }

    async fn attributes(&self, ino: u64) -> Result<Attributes, FsError> {
        match self.find(ino)? {
            Some(id) => self.attributes_of(id).await,
            None => {
                let (parent, _) = self.numbers.placeholder(ino).ok_or(FsError::NotFound)?;
                let parent = self.find(parent)?.ok_or(FsError::NotFound)?;
                self.placeholder_of(ino, parent).await
            }
        }
    }

    async fn read_directory(
        &self,
        ino: u64,
        cookie: u64,
        add: &mut dyn FnMut(DirectoryEntry<'_>) -> bool,
    ) -> Result<(), FsError> {
        let directory = self.find(ino)?;
        let dot = |ino, name, next_cookie| DirectoryEntry { ino, kind: Kind::Directory, name, next_cookie };
        if cookie < 1 && !add(dot(ino, b".", 1)) {
            return Ok(());
        }
        if cookie < FIRST_INDEX && !add(dot(self.parent(ino).await?, b"..", FIRST_INDEX)) {
            return Ok(());
        }
        let Some(directory) = directory else { return Ok(()) };
        // The next read begins at the index after the last entry.
        let mut after = cookie.max(FIRST_INDEX) - 1;
        loop {
            let found = self.engine.read_directory(directory.root, directory.ino, (after, u64::MAX), ENTRIES).await;
            let entries = found.map_err(to_fuse_error)?;
            let Some(last) = entries.last() else { return Ok(()) };
            after = last.index;
            for entry in &entries {
                let Some(next_cookie) = cookie_behind(directory.ino, &entry.name, entry.index)? else { continue };
                let (number, kind) = (self.number_of(ino, directory, entry).await?, kind_of_entry(entry.kind));
                if !add(DirectoryEntry { ino: number, kind, name: &entry.name, next_cookie }) {
                    return Ok(());
                }
            }
        }
    }

    async fn open(&self, ino: u64) -> Result<u64, FsError> {
        self.open_file(ino, sealblock_fuse::OpenMode { reads: true, ..Default::default() }).await
    }

    async fn release(&self, ino: u64, handle: u64) {
        if handle & WRITES != 0 {
            self.known.close(ino);
        }
    }

    async fn read(&self, ino: u64, _: u64, offset: u64, size_bytes: u32) -> Result<Vec<u8>, FsError> {
        let file = self.file(ino)?;
        let data = self.engine.read(file.root, file.ino, offset, size_bytes.into()).await.map_err(to_fuse_error)?;
        Ok(data.to_vec())
    }

    async fn seek(&self, ino: u64, offset: u64, what: Seek) -> Result<u64, FsError> {
        let file = self.file(ino)?;
        let size = self.engine.stat(file.root, file.ino).await.map_err(to_fuse_error)?.size.get();
        if offset >= size {
            return Err(FsError::NoSuchOffset);
        }
        let data = self.engine.next_data(file.root, file.ino, offset).await.map_err(to_fuse_error)?;
        match (what, data) {
            (Seek::Data, Some(data)) => Ok(data.start),
            (Seek::Data, None) => Err(FsError::NoSuchOffset),
            (Seek::Hole, Some(data)) if data.start == offset => Ok(data.end),
            (Seek::Hole, _) => Ok(offset),
        }
    }

    async fn read_link(&self, ino: u64) -> Result<Vec<u8>, FsError> {
        let link = self.find(ino)?.ok_or(FsError::WrongKind)?;
        self.engine.read_link(link.root, link.ino).await.map_err(to_fuse_error)
    }

    async fn xattr(&self, ino: u64, name: &[u8]) -> Result<Vec<u8>, FsError> {
        let Some(id) = self.find(ino)? else { return Err(FsError::NoAttribute) };
        let value = self.engine.xattr(id.root, id.ino, name).await.map_err(to_fuse_error)?;
        value.ok_or(FsError::NoAttribute)
    }

    async fn xattrs(&self, ino: u64) -> Result<Vec<Vec<u8>>, FsError> {
        let Some(id) = self.find(ino)? else { return Ok(Vec::new()) };
        self.engine.xattr_names(id.root, id.ino).await.map_err(to_fuse_error)
    }

    async fn statistics(&self) -> Result<Statistics, FsError> {
        let (space, sector) = (self.engine.data_space(), u64::from(self.sector_bytes));
        let available_blocks = space.free_bytes / sector;
        // Room that is kept for metadata is not used, either.
        let free_blocks = (space.total_bytes.saturating_sub(space.used_bytes) / sector).max(available_blocks);
        Ok(Statistics {
            block_size_bytes: self.sector_bytes,
            blocks: space.total_bytes / sector,
            free_blocks,
            available_blocks,
            inodes: (0, 0),
        })
    }
}
