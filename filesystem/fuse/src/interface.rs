//! The interface of a filesystem that can be mounted, independent of the protocol.
//!
//! Shape: the filesystem chooses inode numbers, which stay valid as long as it is mounted. The kernel caches replies,
//! because nothing changes but by its own requests (`changes.rs`). All requests are sent on one core, and several may
//! be in flight at once.

use crate::error::FsError;

/// The maximum bytes of a read.
pub const MAX_READ_BYTES: u32 = 1 << 20;
/// The maximum bytes of a name.
pub const MAX_NAME_BYTES: usize = 255;
/// The maximum bytes of an attribute's value, and of all attribute names of an inode with a zero after each (Linux).
pub const MAX_XATTR_BYTES: usize = 64 << 10;
/// The highest cookie of a directory; the kernel stores cookies in a signed number.
pub const MAX_COOKIE: u64 = i64::MAX as u64;

/// The types of inodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "they are what POSIX calls them")]
pub enum Kind {
    Regular,
    Directory,
    Symlink,
    Fifo,
    Socket,
    CharDevice,
    BlockDevice,
}

/// Seconds since 1970, negative before that, and nanoseconds after that second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Time {
    /// Seconds since 1970.
    pub seconds: i64,
    /// Nanoseconds after the second, below 1,000,000,000.
    pub nanoseconds: u32,
}

/// The attributes of an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// Its number; not 0 or 1, which the protocol reserves.
    pub ino: u64,
    /// Its type.
    pub kind: Kind,
    /// Permissions, the set-user-ID and set-group-ID bits, and the sticky bit: the lowest 12 bits.
    pub mode: u16,
    /// The number of its names.
    pub links: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Size in bytes.
    pub size_bytes: u64,
    /// The space that it occupies, in units of 512 bytes.
    pub blocks: u64,
    /// The preferred size of a read in bytes.
    pub block_size_bytes: u32,
    /// The device number of a device node, as Linux packs major and minor number into 32 bits.
    pub device: u32,
    /// Last access.
    pub atime: Time,
    /// Last change of the content.
    pub mtime: Time,
    /// Last change of the inode.
    pub ctime: Time,
}

/// An entry of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectoryEntry<'a> {
    /// The inode.
    pub ino: u64,
    /// Its type.
    pub kind: Kind,
    /// 1 to 255 bytes, none of which is `/` or zero.
    pub name: &'a [u8],
    /// The cookie to continue after this entry. It stays valid as long as the filesystem is mounted, and is not 0,
    /// which is the beginning.
    pub next_cookie: u64,
}

/// The size of a filesystem.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// The unit of the next three fields, in bytes.
    pub block_size_bytes: u32,
    /// All blocks.
    pub blocks: u64,
    /// Blocks that are free.
    pub free_blocks: u64,
    /// Free blocks that users can use.
    pub available_blocks: u64,
    /// The number of inodes, and of free ones; 0 without a limit.
    pub inodes: (u64, u64),
}

/// The target of a seek.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seek {
    /// The first byte of data at or after the offset.
    Data,
    /// The first byte of a hole at or after the offset; the end of the file is a hole.
    Hole,
}

/// A filesystem for reading. Its futures run on the core that serves it and need not be `Send`. If serving ends, each
/// is dropped at its current `await`.
///
/// All methods take inode numbers from earlier replies, or the root's number. For a number that no longer exists they
/// return [`FsError::NotFound`].
pub trait ReadFs {
    /// The inode number of the root directory.
    fn root(&self) -> u64;

    /// The inode with this name in a directory.
    fn lookup(&self, parent: u64, name: &[u8]) -> impl Future<Output = Result<Attributes, FsError>>;

    /// The attributes of an inode.
    fn attributes(&self, ino: u64) -> impl Future<Output = Result<Attributes, FsError>>;

    /// Passes the entries of a directory from a cookie on, including `.` and `..`, to `add` (0 is the beginning). When
    /// `add` returns false, it did not accept the entry, which must come again in the next call.
    fn read_directory(
        &self,
        ino: u64,
        cookie: u64,
        add: &mut dyn FnMut(DirectoryEntry<'_>) -> bool,
    ) -> impl Future<Output = Result<(), FsError>>;

    /// Opens a regular file. Returns a handle that the filesystem chooses and that is valid until it is released.
    fn open(&self, ino: u64) -> impl Future<Output = Result<u64, FsError>>;

    /// Releases a handle of [`ReadFs::open`], or of one of the methods of `WriteFs` that open. Files that are open when
    /// serving ends are not released.
    fn release(&self, ino: u64, handle: u64) -> impl Future<Output = ()>;

    /// Reads at most `size_bytes`, never more than [`MAX_READ_BYTES`]; fewer only at the end of the file.
    fn read(
        &self,
        ino: u64,
        handle: u64,
        offset: u64,
        size_bytes: u32,
    ) -> impl Future<Output = Result<Vec<u8>, FsError>>;

    /// The start of data or of a hole in an open file; [`FsError::NoSuchOffset`] if there is none at or after the
    /// offset. Without an implementation, files have no holes.
    fn seek(&self, ino: u64, offset: u64, what: Seek) -> impl Future<Output = Result<u64, FsError>> {
        let _ = (ino, offset, what);
        std::future::ready(Err(FsError::NotImplemented))
    }

    /// The target of a symbolic link.
    fn read_link(&self, ino: u64) -> impl Future<Output = Result<Vec<u8>, FsError>>;

    /// The value of an extended attribute.
    fn xattr(&self, ino: u64, name: &[u8]) -> impl Future<Output = Result<Vec<u8>, FsError>>;

    /// The names of all extended attributes of an inode.
    fn xattrs(&self, ino: u64) -> impl Future<Output = Result<Vec<Vec<u8>>, FsError>>;

    /// The size of the filesystem.
    fn statistics(&self) -> impl Future<Output = Result<Statistics, FsError>>;
}
