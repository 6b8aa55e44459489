//! Errors of requests, and the error number that a program gets for them.

use fuser::Errno;

/// Why a filesystem cannot answer a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FsError {
    /// There is no such name or inode.
    #[error("no such file or directory")]
    NotFound,
    /// The request needs a directory, and the inode is not one.
    #[error("not a directory")]
    NotADirectory,
    /// The request does not apply to a directory, and the inode is one.
    #[error("a directory")]
    IsADirectory,
    /// The inode does not have the type that the request needs.
    #[error("not possible for this type of file")]
    WrongKind,
    /// The inode has no attribute of this name.
    #[error("no such attribute")]
    NoAttribute,
    /// No data or hole at or after the offset.
    #[error("no such offset")]
    NoSuchOffset,
    /// The file is not open.
    #[error("the file is not open")]
    BadHandle,
    /// The maximum number of files is open.
    #[error("too many open files")]
    TooManyOpen,
    /// The result is larger than the protocol allows.
    #[error("more than can be returned")]
    TooLarge,
    /// The filesystem does not implement this request; the kernel need not send it again.
    #[error("not implemented")]
    NotImplemented,
    /// The name exists already.
    #[error("exists already")]
    Exists,
    /// The filesystem knows no such command.
    #[error("no such command")]
    NoSuchCommand,
    /// A change is refused with this error number of Linux.
    #[error("{why}")]
    Refused {
        /// The number, as in `errno`.
        errno: i32,
        /// The reason.
        why: String,
    },
    /// Stored data are damaged, or their devices cannot be read; the text says what is damaged and where.
    #[error("{0}")]
    Damaged(String),
}

impl FsError {
    /// The error number for programs.
    pub(crate) fn errno(&self) -> Errno {
        match self {
            FsError::NotFound => Errno::ENOENT,
            FsError::NotADirectory => Errno::ENOTDIR,
            FsError::IsADirectory => Errno::EISDIR,
            FsError::WrongKind => Errno::EINVAL,
            FsError::NoAttribute => Errno::ENODATA,
            FsError::NoSuchOffset => Errno::ENXIO,
            FsError::BadHandle => Errno::EBADF,
            FsError::TooManyOpen => Errno::ENFILE,
            FsError::TooLarge => Errno::E2BIG,
            FsError::NotImplemented => Errno::ENOSYS,
            FsError::Exists => Errno::EEXIST,
            FsError::NoSuchCommand => Errno::ENOTTY,
            // The kernel rejects a reply with any other number, and the program would wait forever.
            FsError::Refused { errno: errno @ 1..=511, .. } => Errno::from_i32(*errno),
            FsError::Refused { .. } => Errno::EIO,
            FsError::Damaged(_) => Errno::EIO,
        }
    }

    /// The error number for programs. Logs damage with its text, because the number does not show it.
    pub(crate) fn report(&self, operation: &str, ino: u64) -> Errno {
        if let FsError::Damaged(what) = self {
            tracing::warn!(ino, operation, %what, "damage");
        }
        self.errno()
    }

    /// The same for requests that the kernel would never send again after ENOSYS, but take to have succeeded.
    pub(crate) fn report_change(&self, operation: &str, ino: u64) -> Errno {
        match self {
            FsError::NotImplemented => Errno::EOPNOTSUPP,
            _ => self.report(operation, ino),
        }
    }
}

/// Why a mount failed, or why serving ended without an unmount.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The kernel or the mount point refuses.
    #[error(
        "cannot mount on {point}: {source}; the folder must exist, /dev/fuse too (modprobe fuse), and without root `fusermount3` \
         is needed"
    )]
    Mount {
        /// The mount point.
        point: String,
        /// The reason.
        source: std::io::Error,
    },
    /// It ended, and the kernel could not write all that programs had written, or it was not written in time.
    #[error("what programs wrote last to {point} may be lost: {why}")]
    Lost {
        /// The mount point.
        point: String,
        /// The reason.
        why: String,
    },
    /// The session with the kernel ended with an error.
    #[error("the session of the mount on {point} failed: {source}")]
    Session {
        /// The mount point.
        point: String,
        /// The reason.
        source: std::io::Error,
    },
}
