//! A Btrfs filesystem that this process reads, as a [`ReadFs`].

use sealblock_btrfs::directory::{DirEntry, Target};
use sealblock_btrfs::inode::{FileKind, Inode};
use sealblock_btrfs::{Filesystem, FsError as ReadError, TreeRoot};
use sealblock_fuse::{Attributes, DirectoryEntry, FsError, Kind, ReadFs, Seek, Statistics};

use crate::numbers::{InodeNumbers, Numbered};
use crate::values::{attributes, cookie_behind, empty_directory, kind_of_entry};

/// The number of entries that are read at once.
const ENTRIES: usize = 256;
/// Bytes in which data are searched for at once.
const RUN_BYTES: u64 = 1 << 40;

/// A mounted filesystem, or a part of one.
pub struct Mounted<'a> {
    filesystem: &'a Filesystem,
    root: u64,
    numbers: InodeNumbers<TreeRoot>,
}

impl<'a> Mounted<'a> {
    /// Presents everything below a directory.
    ///
    /// # Errors
    /// If its inode number does not fit.
    pub fn new(filesystem: &'a Filesystem, root: &Inode) -> Result<Mounted<'a>, FsError> {
        let mut mounted = Mounted { filesystem, root: 0, numbers: InodeNumbers::default() };
        mounted.root = mounted.number(root.tree, root.ino)?;
        Ok(mounted)
    }

    /// The number of an inode in this mount.
    fn number(&self, tree: TreeRoot, ino: u64) -> Result<u64, FsError> {
        self.numbers.of_inode((tree.id, tree), ino)
    }

    /// The inode with this number; `None` for an empty directory.
    async fn inode(&self, number: u64) -> Result<Option<Inode>, FsError> {
        match self.numbers.find(number)? {
            Numbered::Inode(tree, ino) => self.filesystem.inode(tree, ino).await.map(Some).map_err(to_fuse_error),
            Numbered::Placeholder => Ok(None),
        }
    }

    async fn file(&self, number: u64) -> Result<Inode, FsError> {
        let inode = self.inode(number).await?.ok_or(FsError::IsADirectory)?;
        match inode.kind {
            FileKind::Regular => Ok(inode),
            FileKind::Directory => Err(FsError::IsADirectory),
            _ => Err(FsError::WrongKind),
        }
    }

    async fn directory(&self, number: u64) -> Result<Option<Inode>, FsError> {
        match self.inode(number).await? {
            Some(inode) if inode.kind != FileKind::Directory => Err(FsError::NotADirectory),
            inode => Ok(inode),
        }
    }

    fn attributes_of(&self, inode: &Inode) -> Result<Attributes, FsError> {
        let sector_bytes = self.filesystem.storage().geometry().sector_bytes;
        let number = self.number(inode.tree, inode.ino)?;
        attributes(number, kind(inode.kind), &inode.item, sector_bytes)
    }

    /// The number of an entry's target.
    async fn number_of(&self, number: u64, directory: &Inode, entry: &DirEntry) -> Result<u64, FsError> {
        match entry.target {
            Target::Inode(ino) => self.number(directory.tree, ino),
            Target::Subvolume(_) => match self.filesystem.follow(directory, entry).await.map_err(to_fuse_error)? {
                Some(inode) => self.number(inode.tree, inode.ino),
                None => Ok(self.numbers.of_placeholder(number, &entry.name)),
            },
        }
    }

    /// The number of the parent directory; for the root, its own number.
    async fn parent(&self, number: u64, directory: Option<&Inode>) -> Result<u64, FsError> {
        let Some(inode) = directory.filter(|_| number != self.root) else {
            return Ok(self.numbers.placeholder(number).map_or(number, |(parent, _)| parent));
        };
        let subvolume = self.filesystem.subvolume(inode.tree.id).await.map_err(to_fuse_error)?;
        if inode.ino != subvolume.root_dirid {
            let names = self.filesystem.names(inode.tree, inode.ino).await.map_err(to_fuse_error)?;
            return names.first().map_or(Ok(number), |name| self.number(inode.tree, name.parent));
        }
        match subvolume.parent {
            Some(parent) => {
                let outer = self.filesystem.subvolume(parent.id).await.map_err(to_fuse_error)?;
                self.number(outer.root, parent.dirid)
            }
            None => Ok(number),
        }
    }
}

fn kind(kind: FileKind) -> Kind {
    match kind {
        FileKind::Regular => Kind::Regular,
        FileKind::Directory => Kind::Directory,
        FileKind::Symlink => Kind::Symlink,
        FileKind::CharDevice => Kind::CharDevice,
        FileKind::BlockDevice => Kind::BlockDevice,
        FileKind::Fifo => Kind::Fifo,
        FileKind::Socket => Kind::Socket,
    }
}

fn to_fuse_error(error: ReadError) -> FsError {
    match error {
        ReadError::Absent(_) => FsError::NotFound,
        other => FsError::Damaged(other.to_string()),
    }
}

impl ReadFs for Mounted<'_> {
    fn root(&self) -> u64 {
        self.root
    }

    async fn lookup(&self, parent: u64, name: &[u8]) -> Result<Attributes, FsError> {
        let Some(directory) = self.directory(parent).await? else { return Err(FsError::NotFound) };
        let entry = self.filesystem.entry(&directory, name).await.map_err(to_fuse_error)?.ok_or(FsError::NotFound)?;
        match self.filesystem.follow(&directory, &entry).await {
            Ok(Some(inode)) => self.attributes_of(&inode),
            Ok(None) => Ok(empty_directory(self.numbers.of_placeholder(parent, name), &directory.item)),
            // The name exists, so its target should exist.
            Err(error) => Err(FsError::Damaged(error.to_string())),
        }
    }

    async fn attributes(&self, ino: u64) -> Result<Attributes, FsError> {
        match self.inode(ino).await? {
            Some(inode) => self.attributes_of(&inode),
            None => {
                let parent = self.inode(self.parent(ino, None).await?).await?;
                Ok(empty_directory(ino, &parent.ok_or(FsError::NotFound)?.item))
            }
        }
    }

    async fn read_directory(
        &self,
        ino: u64,
        cookie: u64,
        add: &mut dyn FnMut(DirectoryEntry<'_>) -> bool,
    ) -> Result<(), FsError> {
        let directory = self.directory(ino).await?;
        let dot = |ino, name, next_cookie| DirectoryEntry { ino, kind: Kind::Directory, name, next_cookie };
        if cookie < 1 && !add(dot(ino, b".", 1)) {
            return Ok(());
        }
        if cookie < 2 && !add(dot(self.parent(ino, directory.as_ref()).await?, b"..", 2)) {
            return Ok(());
        }
        let Some(directory) = directory else { return Ok(()) };
        // Indices begin at 2; the next read begins at the index after the last entry.
        let mut from = cookie.max(2);
        loop {
            let entries = self.filesystem.entries(&directory, from, ENTRIES).await.map_err(to_fuse_error)?;
            let Some(last) = entries.last() else { return Ok(()) };
            from = last.index.saturating_add(1);
            for entry in &entries {
                let Some(next_cookie) = cookie_behind(directory.ino, &entry.name, entry.index)? else { continue };
                let (number, kind) = (self.number_of(ino, &directory, entry).await?, kind_of_entry(entry.kind));
                if !add(DirectoryEntry { ino: number, kind, name: &entry.name, next_cookie }) {
                    return Ok(());
                }
            }
        }
    }

    async fn open(&self, ino: u64) -> Result<u64, FsError> {
        self.file(ino).await.map(|_| 0)
    }

    async fn release(&self, _: u64, _: u64) {}

    async fn read(&self, ino: u64, _: u64, offset: u64, size_bytes: u32) -> Result<Vec<u8>, FsError> {
        let inode = self.file(ino).await?;
        let data = self.filesystem.read(&inode, offset, size_bytes as usize).await.map_err(to_fuse_error)?;
        Ok(data.to_vec())
    }

    async fn seek(&self, ino: u64, offset: u64, what: Seek) -> Result<u64, FsError> {
        let inode = self.file(ino).await?;
        let size = inode.size();
        if offset >= size {
            return Err(FsError::NoSuchOffset);
        }
        let run = self.filesystem.next_data(&inode, offset, RUN_BYTES).await.map_err(to_fuse_error)?;
        match (what, run.filter(|(start, _)| *start < size)) {
            (Seek::Data, Some((start, _))) => Ok(start),
            (Seek::Data, None) => Err(FsError::NoSuchOffset),
            (Seek::Hole, Some((start, end))) if start == offset => Ok(end.min(size)),
            (Seek::Hole, _) => Ok(offset),
        }
    }

    async fn read_link(&self, ino: u64) -> Result<Vec<u8>, FsError> {
        let inode = self.inode(ino).await?.filter(|inode| inode.kind == FileKind::Symlink).ok_or(FsError::WrongKind)?;
        self.filesystem.read_link(&inode).await.map_err(to_fuse_error)
    }

    async fn xattr(&self, ino: u64, name: &[u8]) -> Result<Vec<u8>, FsError> {
        let Some(inode) = self.inode(ino).await? else { return Err(FsError::NoAttribute) };
        let all = self.filesystem.xattrs(&inode).await.map_err(to_fuse_error)?;
        all.into_iter().find(|one| one.name == name).map(|one| one.value).ok_or(FsError::NoAttribute)
    }

    async fn xattrs(&self, ino: u64) -> Result<Vec<Vec<u8>>, FsError> {
        let Some(inode) = self.inode(ino).await? else { return Ok(Vec::new()) };
        let all = self.filesystem.xattrs(&inode).await.map_err(to_fuse_error)?;
        Ok(all.into_iter().map(|one| one.name).collect())
    }

    async fn statistics(&self) -> Result<Statistics, FsError> {
        let (superblock, sector) = (self.filesystem.superblock(), self.filesystem.storage().geometry().sector_bytes);
        let (total, used) = (superblock.total_bytes.get(), superblock.bytes_used.get());
        let free = total.saturating_sub(used) / u64::from(sector);
        Ok(Statistics {
            block_size_bytes: sector,
            blocks: total / u64::from(sector),
            free_blocks: free,
            available_blocks: free,
            inodes: (0, 0),
        })
    }
}
