//! The interface of a filesystem that can be changed through a mount, independent of the protocol.
//!
//! Shape: what [`ReadFs`] offers, and changes. Many requests may be in flight at once, also for one file. The kernel
//! checks permissions before it asks, and knows umask, owner and group of who asks; the filesystem does what only it
//! can know: what a new inode inherits, which bits of a mode go, whether a name may be moved.
//!
//! The filesystem removes the attribute `security.capability` whenever content or owner change, whoever does it. The
//! set-user-ID and set-group-ID bits it removes when it is told to (`kills_set_id`), but never those of a directory.

use crate::error::FsError;
use crate::interface::{Attributes, Kind, MAX_COOKIE, ReadFs, Time};

/// The maximum bytes of a write.
pub const MAX_WRITE_BYTES: u32 = 1 << 20;
/// The maximum bytes of an argument of [`WriteFs::ioctl`], in each direction.
pub const MAX_IOCTL_BYTES: u32 = 16 << 10;

/// The user and group that ask.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Caller {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
}

/// How a file is opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenMode {
    /// For reading.
    pub reads: bool,
    /// For writing.
    pub writes: bool,
    /// Every write goes to the end (O_APPEND).
    pub appends: bool,
    /// The file is cut to no bytes first (O_TRUNC).
    pub truncates: bool,
    /// Past the page cache (O_DIRECT).
    pub is_direct: bool,
    /// With `truncates`: the set-user-ID bit, and the set-group-ID bit if the group may execute the file, are removed.
    pub kills_set_id: bool,
}

/// A file that has been opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opened {
    /// Chosen by the filesystem, valid until it is released.
    pub handle: u64,
}

/// A new inode, and where it gets its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewInode<'a> {
    /// The directory.
    pub parent: u64,
    /// 1 to 255 bytes, none of which is `/` or zero.
    pub name: &'a [u8],
    /// The lowest 12 bits of its mode, as they were asked for.
    pub mode: u16,
    /// The bits that are removed from the mode, unless the directory has a default access control list.
    pub umask: u16,
    /// The owner of the inode; its group, unless the directory decides it.
    pub caller: Caller,
}

/// The content of a new inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content<'a> {
    /// A directory.
    Directory,
    /// A symbolic link to this target, of at least one byte.
    Symlink(&'a [u8]),
    /// A regular file, a FIFO, a socket, or a device node with this number, which Linux packs into 32 bits.
    Node(Kind, u32),
}

/// What happens if the new name of a rename exists.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RenameMode {
    /// It is replaced.
    #[default]
    Replace,
    /// The rename fails.
    NoReplace,
    /// The two names are exchanged; both must exist.
    Exchange,
    /// It is replaced, and the old name stays as a whiteout, a character device with the number 0.
    Whiteout,
}

/// A time that is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewTime {
    /// The filesystem's present time.
    Now,
    /// This one.
    At(Time),
}

/// Attributes that change. Those that are `None` stay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// The lowest 12 bits of the mode.
    pub mode: Option<u16>,
    /// The owner.
    pub uid: Option<u32>,
    /// The group.
    pub gid: Option<u32>,
    /// The size of a regular file in bytes.
    pub size_bytes: Option<u64>,
    /// The last access.
    pub atime: Option<NewTime>,
    /// The last change of the content.
    pub mtime: Option<NewTime>,
    /// The last change of the inode; `None` for the present time.
    pub ctime: Option<Time>,
    /// The set-user-ID bit, and the set-group-ID bit if the group may execute the file, are removed.
    pub kills_set_id: bool,
}

/// A write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write {
    /// The file.
    pub ino: u64,
    /// The handle with which it is open. Pages of the cache are written with any handle of the file that may write.
    pub handle: u64,
    /// Where in the file.
    pub offset: u64,
    /// At most [`MAX_WRITE_BYTES`].
    pub data: Vec<u8>,
    /// True if it must be durable before it is answered, because the kernel sends no fsync after it (O_SYNC, O_DSYNC).
    pub durability: WriteDurability,
    /// The set-user-ID bit, and the set-group-ID bit if the group may execute the file, are removed.
    pub kills_set_id: bool,
    /// The times of the file stay: the kernel, which has collected the write, sets them.
    pub keeps_times: bool,
}

/// What must be durable when a write is answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WriteDurability {
    /// Nothing.
    #[default]
    None,
    /// The data, and what is needed to read them (O_DSYNC).
    Data,
    /// The data and all attributes (O_SYNC).
    All,
}

/// What fallocate(2) does with a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allocate {
    /// Space is allocated; what is there stays.
    Reserve,
    /// The range becomes a hole; the size stays.
    PunchHole,
    /// The range reads as zeroes, and space is allocated for it.
    Zero,
}

/// Whether an attribute may or must exist before it is set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum XattrMode {
    /// Either.
    #[default]
    Set,
    /// It must not exist.
    Create,
    /// It must exist.
    Replace,
}

/// A range of a file that is copied into another one, or into another place of the same file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyRange {
    /// The source: inode, handle, offset.
    pub from: (u64, u64, u64),
    /// The target: inode, handle, offset.
    pub to: (u64, u64, u64),
    /// Bytes.
    pub bytes: u64,
}

/// A filesystem that can be changed. What [`ReadFs`] says of futures and of inode numbers also applies here.
///
/// If a change returns an error, it changed nothing, unless the method says otherwise.
pub trait WriteFs: ReadFs {
    /// Opens a regular file. The kernel also reads with a handle that is only for writing, if it collects writes in its
    /// page cache and a write does not fill a page.
    fn open_as(&self, ino: u64, mode: OpenMode) -> impl Future<Output = Result<Opened, FsError>>;

    /// The highest cookie that an entry of this directory has now. Entries that are added later have higher ones. A
    /// program that has opened the directory before gets none of these, so that listing a directory ends although it
    /// renames what it lists. Without an implementation it gets all.
    fn last_cookie(&self, ino: u64) -> impl Future<Output = Result<u64, FsError>> {
        let _ = ino;
        std::future::ready(Ok(MAX_COOKIE))
    }

    /// Creates a regular file and opens it. The name does not exist, as far as the kernel knows; if it does,
    /// [`FsError::Exists`].
    fn create(&self, new: NewInode<'_>, mode: OpenMode) -> impl Future<Output = Result<(Attributes, Opened), FsError>>;

    /// Creates any inode but does not open it.
    fn make(&self, new: NewInode<'_>, content: Content<'_>) -> impl Future<Output = Result<Attributes, FsError>>;

    /// Gives an inode another name.
    fn link(&self, ino: u64, parent: u64, name: &[u8]) -> impl Future<Output = Result<Attributes, FsError>>;

    /// Removes a name of anything but a directory. Without a name the inode stays until [`WriteFs::forgotten`].
    fn unlink(&self, parent: u64, name: &[u8]) -> impl Future<Output = Result<(), FsError>>;

    /// Removes an empty directory; it, too, stays until [`WriteFs::forgotten`].
    fn rmdir(&self, parent: u64, name: &[u8]) -> impl Future<Output = Result<(), FsError>>;

    /// Renames.
    fn rename(
        &self,
        from: (u64, &[u8]),
        to: (u64, &[u8]),
        mode: RenameMode,
    ) -> impl Future<Output = Result<(), FsError>>;

    /// Changes attributes. It also serves to remove the set-user-ID and set-group-ID bits before [`WriteFs::allocate`]
    /// and [`WriteFs::copy_range`]. If the size changes, and the rest then fails, the new size stays.
    fn set_attributes(&self, ino: u64, changes: &Changes) -> impl Future<Output = Result<Attributes, FsError>>;

    /// Writes all of the data, or fails; then any part of them may be written.
    fn write(&self, write: Write) -> impl Future<Output = Result<(), FsError>>;

    /// Makes everything durable that was done to the file; only what is needed to read its data, with `data_only`.
    fn sync(&self, ino: u64, data_only: bool) -> impl Future<Output = Result<(), FsError>>;

    /// Makes everything durable that was done to the directory and its entries.
    fn sync_directory(&self, ino: u64) -> impl Future<Output = Result<(), FsError>>;

    /// Does this with a range; the file then ends behind it at least, unless `keeps_size`.
    fn allocate(
        &self,
        ino: u64,
        what: Allocate,
        range: (u64, u64),
        keeps_size: bool,
    ) -> impl Future<Output = Result<(), FsError>>;

    /// Copies, or lets the files share, a range. Returns how many bytes from its start; fewer at the end of the source,
    /// or if the program shall ask again for the rest. Pages in the kernel's cache were written before.
    fn copy_range(&self, copy: CopyRange) -> impl Future<Output = Result<u64, FsError>>;

    /// Sets an extended attribute.
    fn set_xattr(
        &self,
        ino: u64,
        name: &[u8],
        value: &[u8],
        mode: XattrMode,
        kills_set_group_id: bool,
    ) -> impl Future<Output = Result<(), FsError>>;

    /// Removes an extended attribute.
    fn remove_xattr(&self, ino: u64, name: &[u8]) -> impl Future<Output = Result<(), FsError>>;

    /// A command for a file or directory: its number, its argument, and the bytes that may be returned, each at most
    /// [`MAX_IOCTL_BYTES`]. [`FsError::NoSuchCommand`] for one that the filesystem does not know. What else it changes,
    /// the kernel must be told ([`Notifier`](crate::Notifier)); pages that the kernel has not written yet it does not
    /// know. Before the kernel sets flags (FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR), it gets them with FS_IOC_FSGETXATTR.
    fn ioctl(
        &self,
        caller: Caller,
        ino: u64,
        command: u32,
        argument: &[u8],
        answer_bytes: u32,
    ) -> impl Future<Output = Result<Vec<u8>, FsError>>;

    /// The kernel knows an inode no more: neither is it open, nor has it any entry or page in a cache. One without
    /// names can be deleted. It may be looked up again at any time, also before this ends, but this is never called
    /// twice at once for an inode. When serving ends, it is called for every inode that the kernel still knew, also for
    /// those that are open, whose handles are then worth nothing.
    fn forgotten(&self, ino: u64) -> impl Future<Output = ()>;
}
