//! A filesystem that can be changed, as a session serves it: opening, listing directories, and forgetting.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::time::Duration;

use fuser::{FileHandle, FopenFlags, ReplyOpen};

use super::changes::answer_change;
use super::{Served, answer_reading};
use crate::attributes::{CACHED_FLAGS, DIRECT_FLAGS, DIRECTORY_FLAGS};
use crate::call::{Forget, FsRequest};
use crate::changes::{OpenMode, WriteFs};
use crate::interface::MAX_COOKIE;
use crate::known::Known;
use crate::notices::Notifier;

/// A filesystem that can be changed.
pub struct Writable<'a, F> {
    pub fs: &'a F,
    pub known: Known,
    /// For each open directory, the last cookie that is returned through this handle.
    directories: RefCell<HashMap<u64, u64>>,
    next_directory: Cell<u64>,
    pub notifier: Notifier,
    patience: Duration,
}

impl<'a, F: WriteFs> Writable<'a, F> {
    /// Serves this filesystem.
    pub fn new(fs: &'a F, notifier: Notifier, patience: Duration) -> Writable<'a, F> {
        let (known, directories, next_directory) = (Known::default(), RefCell::default(), Cell::new(0));
        Writable { fs, known, directories, next_directory, notifier, patience }
    }

    /// Opens a directory. Its handle stands for its last cookie now.
    async fn open_directory(&self, ino: u64, reply: ReplyOpen) {
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

    /// The last cookie that is returned through this handle. Reading from the beginning shows what was added since.
    async fn end_of_directory(&self, ino: u64, handle: u64, cookie: u64) -> u64 {
        if cookie == 0 {
            // An error also comes when the directory is read, and is reported then.
            let last = self.fs.last_cookie(ino).await.unwrap_or(MAX_COOKIE);
            if let Some(end) = self.directories.borrow_mut().get_mut(&handle) {
                *end = last;
            }
        }
        self.directories.borrow().get(&handle).copied().unwrap_or(MAX_COOKIE)
    }

    async fn open(&self, ino: u64, mode: OpenMode, bypasses_cache: bool, reply: ReplyOpen) {
        let is_killing = mode.kills_set_id && self.has_set_id(ino).await;
        match self.fs.open_as(ino, mode).await {
            Ok(opened) => {
                if is_killing {
                    self.notifier.attributes(ino);
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

impl<F: WriteFs> Served for Writable<'_, F> {
    fn patience(&self) -> Option<Duration> {
        Some(self.patience)
    }

    async fn answer(&self, request: FsRequest) {
        let known = Some(&self.known);
        match request {
            FsRequest::Open { ino, mode, bypasses_cache, reply } => self.open(ino, mode, bypasses_cache, reply).await,
            FsRequest::OpenDirectory { ino, reply } => self.open_directory(ino, reply).await,
            FsRequest::ReleaseDirectory { handle, reply } => {
                self.directories.borrow_mut().remove(&handle);
                reply.ok();
            }
            FsRequest::Change(request) => answer_change(self, request).await,
            FsRequest::ReadDirectory { ino, handle, cookie, .. }
            | FsRequest::ReadDirectoryPlus { ino, handle, cookie, .. } => {
                let end = self.end_of_directory(ino, handle, cookie).await;
                answer_reading(self.fs, known, end, request).await;
            }
            other => answer_reading(self.fs, known, MAX_COOKIE, other).await,
        }
    }

    fn forget(&self, forget: Forget) {
        self.known.forget(forget);
    }

    fn forget_all(&self) {
        self.known.forget_all();
    }

    fn next_forgotten(&self) -> Option<impl Future<Output = ()>> {
        let forgotten = self.known.next_forgotten()?;
        Some(async move { self.fs.forgotten(forgotten.ino).await })
    }
}
