//! What a filesystem must answer to be mounted, without a word of the protocol.
//!
//! Shape: inodes are named by numbers that the filesystem chooses and that mean the same as long as it is mounted; the kernel keeps
//! what it received, because nothing changes. Everything is asked on one core, and several questions may be open at once.

use crate::error::FsError;

/// The most bytes that are read at once.
pub const MAX_READ_BYTES: u32 = 1 << 20;
/// The most bytes of a name.
pub const MAX_NAME_BYTES: usize = 255;
/// The most bytes of the value of an attribute, and of all names of the attributes of an inode with a zero behind each (Linux).
pub const MAX_XATTR_BYTES: usize = 64 << 10;
/// The highest cookie of a directory: the kernel keeps it in a signed number.
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

/// Seconds since 1970, before it if negative, and nanoseconds after that second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Time {
    /// Seconds since 1970.
    pub seconds: i64,
    /// Nanoseconds after the second, below 1,000,000,000.
    pub nanoseconds: u32,
}

/// What is known of an inode besides its content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// Its number: not 0 and not 1, which mean something else in the protocol.
    pub ino: u64,
    /// What it is.
    pub kind: Kind,
    /// Permissions, and the bits for setting user and group, and the sticky bit: the lowest 12 bits.
    pub mode: u16,
    /// How many names it has.
    pub links: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Size in bytes.
    pub size_bytes: u64,
    /// What it occupies, in units of 512 bytes.
    pub blocks: u64,
    /// The size of a read that suits the filesystem, in bytes.
    pub block_size_bytes: u32,
    /// The device that a node stands for, as Linux packs major and minor number into 32 bits.
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
    /// What it is.
    pub kind: Kind,
    /// 1 to 255 bytes without `/` and zero.
    pub name: &'a [u8],
    /// Where reading continues after this entry. It stays valid as long as the filesystem is mounted, and is not 0, which is the
    /// beginning.
    pub next_cookie: u64,
}

/// The size of a filesystem.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// The unit of the next three, in bytes.
    pub block_size_bytes: u32,
    /// All blocks.
    pub blocks: u64,
    /// Blocks that are free.
    pub free_blocks: u64,
    /// Blocks that users may still use.
    pub available_blocks: u64,
    /// Inodes, and free ones; 0 where there is no such limit.
    pub inodes: (u64, u64),
}

/// What a seek looks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seek {
    /// The first byte at or behind the offset that is in no hole.
    Data,
    /// The first byte at or behind the offset that is in a hole; the end of the file is one.
    Hole,
}

/// A filesystem that can be read. Its futures run on the core that serves it and need not be `Send`; each is dropped at an `await` when
/// serving ends before it.
///
/// All take inode numbers that an earlier answer had, or the root's; but who keeps a number longer than the filesystem does must expect
/// [`FsError::NotFound`].
pub trait ReadFs {
    /// The inode number of the root directory.
    fn root(&self) -> u64;

    /// The inode with this name in a directory.
    fn lookup(&self, parent: u64, name: &[u8]) -> impl Future<Output = Result<Attributes, FsError>>;

    /// What is known of an inode.
    fn attributes(&self, ino: u64) -> impl Future<Output = Result<Attributes, FsError>>;

    /// Gives entries of a directory, `.` and `..` among them, from a cookie on (0 is the beginning), until `add` returns false: then the
    /// entry was not taken, and comes again.
    fn read_directory(
        &self,
        ino: u64,
        cookie: u64,
        add: &mut dyn FnMut(DirectoryEntry<'_>) -> bool,
    ) -> impl Future<Output = Result<(), FsError>>;

    /// Opens a regular file. Returns a number of the filesystem's choice that stands for it until it is released.
    fn open(&self, ino: u64) -> impl Future<Output = Result<u64, FsError>>;

    /// Ends what [`ReadFs::open`] began. Files that are open when serving ends are not released.
    fn release(&self, ino: u64, handle: u64) -> impl Future<Output = ()>;

    /// Reads at most so many bytes, never more than [`MAX_READ_BYTES`]; fewer only at the end of the file.
    fn read(
        &self,
        ino: u64,
        handle: u64,
        offset: u64,
        size_bytes: u32,
    ) -> impl Future<Output = Result<Vec<u8>, FsError>>;

    /// Where data or a hole begins in an open file; [`FsError::NoSuchOffset`] behind the last. A filesystem that does not implement it has
    /// no holes for callers.
    fn seek(&self, ino: u64, offset: u64, what: Seek) -> impl Future<Output = Result<u64, FsError>> {
        let _ = (ino, offset, what);
        std::future::ready(Err(FsError::NotImplemented))
    }

    /// Where a symbolic link points.
    fn read_link(&self, ino: u64) -> impl Future<Output = Result<Vec<u8>, FsError>>;

    /// The value of an extended attribute.
    fn xattr(&self, ino: u64, name: &[u8]) -> impl Future<Output = Result<Vec<u8>, FsError>>;

    /// The names of all extended attributes of an inode.
    fn xattrs(&self, ino: u64) -> impl Future<Output = Result<Vec<Vec<u8>>, FsError>>;

    /// The size of the filesystem.
    fn statistics(&self) -> impl Future<Output = Result<Statistics, FsError>>;
}
