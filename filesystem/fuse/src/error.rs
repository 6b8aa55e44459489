//! Why a question has no answer, and the error number that a program gets for it.

use fuser::Errno;

/// Why a filesystem does not answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FsError {
    /// There is no such name or inode.
    #[error("no such file or directory")]
    NotFound,
    /// Something that only a directory has was asked of another inode.
    #[error("not a directory")]
    NotADirectory,
    /// Something that a directory does not have was asked of one.
    #[error("a directory")]
    IsADirectory,
    /// The inode is of another type than the question is about.
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
    /// As many files are open as may be.
    #[error("too many open files")]
    TooManyOpen,
    /// What there is exceeds what the protocol can carry.
    #[error("more than can be returned")]
    TooLarge,
    /// The filesystem does not do this at all, so it need not be asked again.
    #[error("not implemented")]
    NotImplemented,
    /// What is stored is damaged, or its devices cannot be read; the text says what and where.
    #[error("{0}")]
    Damaged(String),
}

impl FsError {
    /// The number for programs.
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
            FsError::Damaged(_) => Errno::EIO,
        }
    }

    /// The number for programs. Says of damage what it is, since the number does not.
    pub(crate) fn report(&self, asked: &str, ino: u64) -> Errno {
        if let FsError::Damaged(what) = self {
            tracing::warn!(ino, asked, %what, "damage");
        }
        self.errno()
    }
}

/// Why nothing was mounted, or serving ended otherwise than by unmounting.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The kernel or the mount point refuses.
    #[error(
        "cannot mount on {point}: {source}; the folder must exist, /dev/fuse too (modprobe fuse), and without root `fusermount3` \
         is needed"
    )]
    Mount {
        /// Where.
        point: String,
        /// Why.
        source: std::io::Error,
    },
    /// The session with the kernel ended with an error.
    #[error("the session of the mount on {point} failed: {source}")]
    Session {
        /// Where.
        point: String,
        /// Why.
        source: std::io::Error,
    },
}
