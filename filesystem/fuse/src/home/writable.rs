//! What a session knows of a filesystem that can be changed: which inodes the kernel knows, and which directories are
//! open; and opening.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::time::Duration;

use fuser::{FileHandle, FopenFlags, ReplyOpen};

use crate::attributes::{CACHED_FLAGS, DIRECT_FLAGS, DIRECTORY_FLAGS};
use crate::changes::{OpenMode, WriteFs};
use crate::error::FsError;
use crate::interface::MAX_COOKIE;
use crate::known::Known;
use crate::notices::Notifier;

/// A filesystem that can be changed.
pub struct Writable<'a, F> {
    /// The filesystem.
    pub fs: &'a F,
    /// What the kernel knows of it.
    pub known: Known,
    /// For each open directory, the last cookie that is returned through this handle.
    directories: RefCell<HashMap<u64, u64>>,
    next_directory: Cell<u64>,
    /// Tells the kernel what has changed.
    pub notifier: Notifier,
    /// How long requests in flight are awaited at the end.
    pub patience: Duration,
}

impl<'a, F: WriteFs> Writable<'a, F> {
    /// Serves this filesystem.
    pub fn new(fs: &'a F, notifier: Notifier, patience: Duration) -> Writable<'a, F> {
        let (known, directories, next_directory) = (Known::default(), RefCell::default(), Cell::new(0));
        Writable { fs, known, directories, next_directory, notifier, patience }
    }

    /// True if a file may have pages that are not here.
    pub fn is_any_written(&self) -> bool {
        self.notifier.is_any_written()
    }

    /// Waits until the kernel has written the pages of a file that somebody writes. It may have locked the file.
    ///
    /// # Errors
    /// As for [`Notifier::write_back`].
    pub async fn write_back(&self, ino: u64) -> Result<(), FsError> {
        if !self.notifier.is_written(ino) {
            return Ok(());
        }
        self.notifier.write_back_locked(ino).await
    }

    /// Opens a directory. Its handle stands for its last cookie now.
    pub async fn open_directory(&self, ino: u64, reply: ReplyOpen) {
        match self.fs.last_cookie(ino).await {
            Ok(last) => {
                let handle = self.next_directory.get();
                self.next_directory.set(handle.wrapping_add(1));
                self.directories.borrow_mut().insert(handle, last);
                reply.opened(FileHandle(handle), DIRECTORY_FLAGS);
            }
            Err(error) => reply.error(error.report_change("open directory", ino)),
        }
    }

    /// A directory is closed.
    pub fn release_directory(&self, handle: u64) {
        self.directories.borrow_mut().remove(&handle);
    }

    /// The last cookie that is returned through this handle. Reading from the beginning shows what was added since.
    pub async fn end_of_directory(&self, ino: u64, handle: u64, cookie: u64) -> u64 {
        if cookie == 0 {
            // An error also comes when the directory is read, and is reported then.
            let last = self.fs.last_cookie(ino).await.unwrap_or(MAX_COOKIE);
            if let Some(end) = self.directories.borrow_mut().get_mut(&handle) {
                *end = last;
            }
        }
        self.directories.borrow().get(&handle).copied().unwrap_or(MAX_COOKIE)
    }

    /// Opens a file.
    pub async fn open(&self, ino: u64, mode: OpenMode, bypasses_cache: bool, reply: ReplyOpen) {
        let is_killing = mode.kills_set_id && self.has_set_id(ino).await;
        match self.fs.open_as(ino, mode).await {
            Ok(opened) => {
                if is_killing {
                    self.notifier.attributes(ino);
                }
                if mode.writes {
                    self.notifier.opened(ino);
                }
                reply.opened(FileHandle(opened.handle), flags_of_open(bypasses_cache));
            }
            Err(error) => reply.error(error.report_change("open", ino)),
        }
    }

    /// True if the inode has a bit that a change of its content removes. If its attributes cannot be read, neither can
    /// it be changed.
    pub async fn has_set_id(&self, ino: u64) -> bool {
        self.fs.attributes(ino).await.is_ok_and(|attributes| attributes.mode & 0o6000 != 0)
    }
}

/// How the kernel uses an open file.
pub fn flags_of_open(bypasses_cache: bool) -> FopenFlags {
    if bypasses_cache { DIRECT_FLAGS } else { CACHED_FLAGS }
}
