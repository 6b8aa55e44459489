//! Opening: what kind of file it is, whether others use it, and whether the page cache can be bypassed.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::kernel;

/// How to open a file or block device. The default opens for reading, with direct I/O if possible.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Options {
    /// Allow writes, and lock other processes out.
    pub write: bool,
    /// Create the file, empty; fail if it exists. Implies `write`.
    pub create_new: bool,
    /// Use the page cache even if it could be bypassed.
    pub buffered: bool,
}

impl Options {
    /// For reading, together with other readers.
    pub const READ: Options = Options { write: false, create_new: false, buffered: false };
    /// For reading and writing, alone.
    pub const WRITE: Options = Options { write: true, ..Options::READ };
    /// A new file for reading and writing, alone.
    pub const CREATE: Options = Options { create_new: true, ..Options::WRITE };

    /// True if writes are allowed.
    pub(crate) fn writes(self) -> bool {
        self.write || self.create_new
    }
}

/// The errors of opening a file.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another process has locked it.
    #[error("'{}' is in use by another process", path.display())]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// Its underlying file or device is in use under another name, and one of the two writes.
    #[error("'{}' has the same bytes as '{}', which is in use", path.display(), below.display())]
    Shared {
        /// The file.
        path: PathBuf,
        /// The file or block device below it.
        below: PathBuf,
    },
    /// A mounted file system uses the same bytes.
    #[error("'{}' has the same bytes as {device}, which is mounted at '{}'", path.display(), at.display())]
    Mounted {
        /// The file.
        path: PathBuf,
        /// The mounted device.
        device: String,
        /// Where it is mounted.
        at: PathBuf,
    },
    /// It is neither a file nor a block device.
    #[error("'{}' is {kind}, not a file or block device", path.display())]
    Kind {
        /// The file.
        path: PathBuf,
        /// What it is instead.
        kind: &'static str,
    },
    /// A block device that the kernel does not let write. Opening it for writing works, and each write fails.
    #[error("'{}' is a read-only block device", path.display())]
    ReadOnlyDevice {
        /// The block device.
        path: PathBuf,
    },
    /// An error of the system.
    #[error("cannot {doing} '{}': {source}", path.display())]
    System {
        /// The file.
        path: PathBuf,
        /// The failed step, such as "open for writing".
        doing: &'static str,
        /// The error of the system.
        source: io::Error,
    },
}

/// An open file with what was found out when opening it.
pub(crate) struct OpenFile {
    pub(crate) file: File,
    pub(crate) block_device: bool,
    /// Opened with `O_DIRECT`. Whether it works is found out later.
    pub(crate) direct: bool,
    /// True if the file system supports locks at all.
    pub(crate) locked: bool,
}

/// Opens and locks `path`.
pub(crate) fn open(path: &Path, options: Options) -> Result<OpenFile, OpenError> {
    let block_device = if options.create_new { false } else { kind(path)? };
    let (file, direct) = match options.buffered {
        true => (open_file(path, options, block_device, false), false),
        false => match open_file(path, options, block_device, true) {
            // The file system has no direct I/O. `create_new` made the file before the flag was refused.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                let again = Options { create_new: false, write: options.writes(), ..options };
                (open_file(path, again, block_device, false), false)
            }
            opened => (opened, true),
        },
    };
    let file = file.map_err(|source| match source.raw_os_error() {
        Some(libc::EBUSY) if block_device => OpenError::InUse { path: path.to_owned() },
        _ => system(path, doing(options), source),
    })?;
    if block_device && options.writes() && kernel::is_read_only(&file) {
        return Err(OpenError::ReadOnlyDevice { path: path.to_owned() });
    }
    let locked = lock(&file, path, options.writes())?;
    Ok(OpenFile { file, block_device, direct, locked })
}

/// True if `path` is a block device; refuses what is not a file either. Checked before it is opened, since opening a
/// FIFO waits.
fn kind(path: &Path) -> Result<bool, OpenError> {
    let metadata = std::fs::metadata(path).map_err(|source| system(path, "open", source))?;
    let kind = metadata.file_type();
    let other = match () {
        () if kind.is_file() => return Ok(false),
        () if kind.is_block_device() => return Ok(true),
        () if kind.is_dir() => "a directory",
        () if kind.is_char_device() => "a character device",
        () if kind.is_fifo() => "a pipe",
        () if kind.is_socket() => "a socket",
        () => "something else",
    };
    Err(OpenError::Kind { path: path.to_owned(), kind: other })
}

fn open_file(path: &Path, options: Options, block_device: bool, direct: bool) -> io::Result<File> {
    // On a block device O_EXCL means that no file system is mounted from it and no other process holds it that way.
    let exclusive = if block_device && options.writes() { libc::O_EXCL } else { 0 };
    let direct = if direct { libc::O_DIRECT } else { 0 };
    OpenOptions::new()
        .read(true)
        .write(options.writes())
        .create_new(options.create_new)
        // The blocks may hold anything that their owner stored: others can read them only after the owner changes the
        // file's permissions.
        .mode(0o600)
        .custom_flags(exclusive | direct)
        .open(path)
}

/// Locks the file, exclusively for writers and shared for readers, without waiting; returns whether the file system
/// supports locks.
fn lock(file: &File, path: &Path, alone: bool) -> Result<bool, OpenError> {
    match if alone { file.try_lock() } else { file.try_lock_shared() } {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Err(OpenError::InUse { path: path.to_owned() }),
        Err(TryLockError::Error(source)) => match source.raw_os_error() {
            Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::ENOLCK | libc::EINVAL) => {
                tracing::warn!(path = %path.display(), error = %source, "the file system has no locks");
                Ok(false)
            }
            _ => Err(system(path, "lock", source)),
        },
    }
}

fn doing(options: Options) -> &'static str {
    match options {
        Options { create_new: true, .. } => "create",
        Options { write: true, .. } => "open for writing",
        _ => "open",
    }
}

pub(crate) fn system(path: &Path, doing: &'static str, source: io::Error) -> OpenError {
    OpenError::System { path: path.to_owned(), doing, source }
}
