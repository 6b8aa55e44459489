//! Inodes: their attributes as in stat(2), extended attributes, names, and the targets of symbolic links.

use futures_util::future::LocalBoxFuture;
use sealblock_btrfs_format::items::Item;
use sealblock_btrfs_format::items::inode::{InodeFlags, InodeItem};
use sealblock_btrfs_format::key::{ItemType, Key};

use crate::cursor::TreeRoot;
use crate::error::FsError;
use crate::filesystem::Filesystem;

/// The longest target of a symbolic link that Linux can resolve.
pub const MAX_LINK_BYTES: u64 = 4095;
/// The bits of a mode for the file type.
const KIND_MASK: u32 = 0o170_000;

/// The type of a file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum FileKind {
    /// A file with data.
    Regular,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A character device.
    CharDevice,
    /// A block device.
    BlockDevice,
    /// A named pipe.
    Fifo,
    /// A socket.
    Socket,
}

impl FileKind {
    /// The file type of a mode.
    pub fn of_mode(mode: u32) -> Option<FileKind> {
        Some(match mode & KIND_MASK {
            0o100_000 => FileKind::Regular,
            0o040_000 => FileKind::Directory,
            0o120_000 => FileKind::Symlink,
            0o020_000 => FileKind::CharDevice,
            0o060_000 => FileKind::BlockDevice,
            0o010_000 => FileKind::Fifo,
            0o140_000 => FileKind::Socket,
            _ => return None,
        })
    }
}

/// An inode of a subvolume.
#[derive(Clone, Copy, Debug)]
pub struct Inode {
    /// The subvolume's tree.
    pub tree: TreeRoot,
    /// Its number, which is unique in the subvolume.
    pub ino: u64,
    /// Its type.
    pub kind: FileKind,
    /// Its item.
    pub item: InodeItem,
}

impl Inode {
    /// Bytes of the file.
    pub fn size(&self) -> u64 {
        self.item.size.get()
    }

    /// Major and minor number of a device node, in the kernel's internal form.
    pub fn device_numbers(&self) -> Option<(u64, u64)> {
        /// Bits of a minor number.
        const MINOR_BITS: u32 = 20;
        let rdev = self.item.rdev.get();
        let is_device = matches!(self.kind, FileKind::CharDevice | FileKind::BlockDevice);
        is_device.then_some((rdev >> MINOR_BITS, rdev & ((1 << MINOR_BITS) - 1)))
    }

    /// True if its data have no checksums.
    pub fn has_no_sums(&self) -> bool {
        self.item.flags().contains(InodeFlags::NODATASUM)
    }

    /// True if its data may be written over in place.
    pub fn is_written_in_place(&self) -> bool {
        self.item.flags().contains(InodeFlags::NODATACOW)
    }
}

/// A name of an inode.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Name {
    /// The directory.
    pub parent: u64,
    /// The name in it.
    pub name: Vec<u8>,
}

/// An extended attribute.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Xattr {
    /// Its name, with its namespace.
    pub name: Vec<u8>,
    /// Its value.
    pub value: Vec<u8>,
}

/// The keys of all items of one type of an inode.
pub(crate) fn items_of(ino: u64, item_type: ItemType) -> std::ops::RangeInclusive<Key> {
    Key::new(ino, item_type, 0)..=Key::new(ino, item_type, u64::MAX)
}

impl Filesystem {
    /// An inode of a subvolume.
    ///
    /// # Errors
    /// If it does not exist, or cannot be read.
    pub fn inode(&self, tree: TreeRoot, ino: u64) -> LocalBoxFuture<'_, Result<Inode, FsError>> {
        Box::pin(async move {
            let mut cursor = self.cursor(tree, items_of(ino, ItemType::INODE_ITEM));
            if let Some((key, data)) = cursor.next().await?
                && let Ok(Item::Inode(item)) = Item::decode(key, data)
                && let Some(kind) = FileKind::of_mode(item.mode.get())
            {
                return Ok(Inode { tree, ino, kind, item: *item });
            }
            Err(FsError::Absent(format!("inode {ino} in subvolume {}", tree.id)))
        })
    }

    /// The extended attributes of an inode, as stored.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn xattrs<'a>(&'a self, inode: &'a Inode) -> LocalBoxFuture<'a, Result<Vec<Xattr>, FsError>> {
        Box::pin(async move {
            let mut cursor = self.cursor(inode.tree, items_of(inode.ino, ItemType::XATTR_ITEM));
            let mut all = Vec::new();
            while let Some((key, data)) = cursor.next().await? {
                if let Ok(Item::Xattrs(entries)) = Item::decode(key, data) {
                    let owned = |name: &[u8], value: &[u8]| Xattr { name: name.to_vec(), value: value.to_vec() };
                    all.extend(entries.iter().map(|entry| owned(entry.name, entry.data)));
                }
            }
            Ok(all)
        })
    }

    /// All names of an inode.
    ///
    /// # Errors
    /// If they cannot be read.
    pub async fn names(&self, tree: TreeRoot, ino: u64) -> Result<Vec<Name>, FsError> {
        let range = Key::new(ino, ItemType::INODE_REF, 0)..=Key::new(ino, ItemType::INODE_EXTREF, u64::MAX);
        let (mut cursor, mut all) = (self.cursor(tree, range), Vec::new());
        while let Some((key, data)) = cursor.next().await? {
            match Item::decode(key, data) {
                Ok(Item::InodeRefs(refs)) => {
                    all.extend(refs.iter().map(|one| Name { parent: key.offset, name: one.name.to_vec() }));
                }
                Ok(Item::InodeExtrefs(refs)) => {
                    all.extend(refs.iter().map(|one| Name { parent: one.parent, name: one.name.to_vec() }));
                }
                _ => {}
            }
        }
        Ok(all)
    }

    /// The target of a symbolic link.
    ///
    /// # Errors
    /// If it is not a symbolic link, or cannot be read.
    pub fn read_link<'a>(&'a self, inode: &'a Inode) -> LocalBoxFuture<'a, Result<Vec<u8>, FsError>> {
        Box::pin(async move {
            if inode.kind != FileKind::Symlink {
                return Err(FsError::Kind(format!("inode {} is not a symbolic link", inode.ino)));
            }
            let size = inode.size();
            if size > MAX_LINK_BYTES {
                let why = format!("a target of {size} bytes: at most {MAX_LINK_BYTES} can be resolved");
                return Err(FsError::Contradiction { what: format!("the symbolic link {}", inode.ino), why });
            }
            Ok(self.read(inode, 0, size as usize).await?.to_vec())
        })
    }
}
