//! Checks that open files are still at their paths and have their length: an administrator may delete, rename, replace
//! or truncate a file that a program has open, and no request fails because of it until it is too late.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// The files that this process has open as media.
static OPEN: Mutex<Vec<Weak<Backing>>> = Mutex::new(Vec::new());

/// A file under a medium, for a task that watches it. It does not keep the file open.
#[derive(Debug)]
pub struct Backing {
    path: PathBuf,
    /// Another path at which it was found.
    other_path: Mutex<Option<PathBuf>>,
    /// Device and inode.
    identity: (u64, u64),
    length_bytes: AtomicU64,
    /// The bytes that were left when it was found cut off. What was behind them is not back with its length.
    kept_bytes: AtomicU64,
    error: Mutex<Option<BackingError>>,
}

/// What is wrong with the file of a medium.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BackingError {
    /// Nothing is at its path any more: it was deleted or renamed.
    Gone,
    /// Another file is at its path.
    Replaced,
    /// It was truncated.
    CutOff {
        /// Bytes that are left.
        left_bytes: u64,
        /// Its length before.
        length_bytes: u64,
    },
}

impl Backing {
    /// The entry of a file that was opened by this path. A block device is not checked: it keeps its length, and its
    /// requests fail when it is removed.
    pub(crate) fn new(path: &Path, opened: &Metadata, block_device: bool, length_bytes: u64) -> Arc<Backing> {
        let backing = Arc::new(Backing {
            path: path.to_owned(),
            other_path: Mutex::default(),
            identity: (opened.dev(), opened.ino()),
            length_bytes: AtomicU64::new(length_bytes),
            kept_bytes: AtomicU64::new(u64::MAX),
            error: Mutex::default(),
        });
        if !block_device {
            let mut open = lock(&OPEN);
            open.retain(|other| other.strong_count() > 0);
            open.push(Arc::downgrade(&backing));
        }
        backing
    }

    /// The path that it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn length_bytes(&self) -> u64 {
        self.length_bytes.load(Ordering::Acquire)
    }

    /// How much of the file may be used, if somebody truncated it while it was open. What is behind that is lost, also
    /// when the file has its length again: it would read as zeroes.
    pub(crate) fn kept_bytes(&self) -> u64 {
        self.kept_bytes.load(Ordering::Acquire)
    }

    /// Takes note of the length that the file has. It was expected to be `expected_bytes` before that was looked up, and
    /// may have been resized meanwhile.
    pub(crate) fn found_length(&self, expected_bytes: u64, now_bytes: u64) {
        if now_bytes < expected_bytes.min(self.length_bytes()) {
            self.kept_bytes.fetch_min(now_bytes, Ordering::AcqRel);
        }
    }

    /// What is known to be lost of the file, if somebody truncated it while it was open.
    pub fn cut_off(&self) -> Option<BackingError> {
        let (left_bytes, length_bytes) = (self.kept_bytes(), self.length_bytes());
        (left_bytes < length_bytes).then_some(BackingError::CutOff { left_bytes, length_bytes })
    }

    /// Changes the length of the file by `change`. Meanwhile the shorter of both lengths is expected: then the file is
    /// never shorter than expected both before and after its length is looked up.
    pub(crate) fn resize(&self, length_bytes: u64, change: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let before = self.length_bytes();
        self.length_bytes.store(before.min(length_bytes), Ordering::Release);
        let changed = change();
        if changed.is_ok() && length_bytes <= self.kept_bytes() {
            // Nothing of what was cut off belongs to it any more.
            self.kept_bytes.store(u64::MAX, Ordering::Release);
        }
        self.length_bytes.store(if changed.is_ok() { length_bytes } else { before }, Ordering::Release);
        changed
    }

    /// What the last check found wrong.
    pub fn error(&self) -> Option<BackingError> {
        *lock(&self.error)
    }

    /// Tells that `path` means a file now: it counts as another path of this one, if it is this one.
    pub fn known_at(&self, path: &Path, there: &Metadata) {
        if self.is_it(there) && path != self.path {
            *lock(&self.other_path) = Some(path.to_owned());
        }
    }

    fn is_it(&self, there: &Metadata) -> bool {
        (there.dev(), there.ino()) == self.identity
    }

    /// Checks the file, which waits for the file system; returns what is wrong if this has changed since the last
    /// check. If the file system does not reply, nothing changes.
    pub fn check(&self) -> Option<Option<BackingError>> {
        let (other_path, expected_bytes) = (lock(&self.other_path).clone(), self.length_bytes());
        let is_elsewhere =
            || other_path.and_then(|path| std::fs::metadata(path).ok()).filter(|there| self.is_it(there));
        let there = match std::fs::metadata(&self.path) {
            Ok(there) if self.is_it(&there) => Ok(there),
            other => is_elsewhere().map_or(other, Ok),
        };
        let found = match there {
            Ok(there) => self.classify(&there, expected_bytes),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Some(BackingError::Gone),
            Err(_) => return None,
        };
        let mut error = lock(&self.error);
        let before = std::mem::replace(&mut *error, found);
        (before != found).then_some(found)
    }

    fn classify(&self, there: &Metadata, expected_bytes: u64) -> Option<BackingError> {
        if !self.is_it(there) {
            return Some(BackingError::Replaced);
        }
        self.found_length(expected_bytes, there.len());
        self.cut_off()
    }
}

/// The files (not block devices) that media of this process use now.
pub fn open_files() -> Vec<Arc<Backing>> {
    lock(&OPEN).iter().filter_map(Weak::upgrade).collect()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn file(folder: &Path) -> (PathBuf, Arc<Backing>) {
        let path = folder.join("v");
        fs::write(&path, [0; 4096]).unwrap();
        let backing = Backing::new(&path, &fs::metadata(&path).unwrap(), false, 4096);
        (path, backing)
    }

    #[test]
    fn a_file_that_was_renamed_is_there_once_its_new_name_is_known() {
        let folder = tempfile::tempdir().unwrap();
        let ((path, backing), moved) = (file(folder.path()), folder.path().join("w"));
        fs::rename(&path, &moved).unwrap();
        assert_eq!(backing.check(), Some(Some(BackingError::Gone)));
        fs::write(&path, "another").unwrap();
        backing.known_at(&path, &fs::metadata(&path).unwrap());
        assert_eq!(backing.check(), Some(Some(BackingError::Replaced)));
        backing.known_at(&moved, &fs::metadata(&moved).unwrap());
        assert_eq!(backing.check(), Some(None));
        fs::write(&moved, "short").unwrap();
        assert_eq!(backing.check(), Some(Some(BackingError::CutOff { left_bytes: 5, length_bytes: 4096 })));
        fs::remove_file(&moved).unwrap();
        assert_eq!(backing.check(), Some(Some(BackingError::Replaced)));
    }

    #[test]
    fn a_file_that_is_left_alone_is_no_news() {
        let folder = tempfile::tempdir().unwrap();
        let (path, backing) = file(folder.path());
        assert_eq!((backing.check(), backing.error()), (None, None));
        fs::write(&path, [0; 8192]).unwrap();
        assert_eq!(backing.check(), None, "others may make it longer");
        assert!(open_files().iter().any(|open| open.path() == path));
        drop(backing);
        assert!(!open_files().iter().any(|open| open.path() == path), "closed");
    }

    #[test]
    fn changes_of_a_file_are_reported_once_and_so_is_its_end() {
        let folder = tempfile::tempdir().unwrap();
        let (path, backing) = file(folder.path());
        let elsewhere = folder.path().join("w");
        fs::rename(&path, &elsewhere).unwrap();
        assert_eq!((backing.check(), backing.check()), (Some(Some(BackingError::Gone)), None));
        assert_eq!(backing.error(), Some(BackingError::Gone));
        fs::write(&path, [0; 4096]).unwrap();
        assert_eq!(backing.check(), Some(Some(BackingError::Replaced)));
        fs::rename(&elsewhere, &path).unwrap();
        assert_eq!((backing.check(), backing.error()), (Some(None), None));
        fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(1000).unwrap();
        let cut = BackingError::CutOff { left_bytes: 1000, length_bytes: 4096 };
        assert_eq!(backing.check(), Some(Some(cut)));
        fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(4096).unwrap();
        assert_eq!((backing.check(), backing.error()), (None, Some(cut)), "what was cut off is not back");
        fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(2000).unwrap();
        assert_eq!(backing.check(), None, "nor a part of it");
        fs::rename(&path, &elsewhere).unwrap();
        assert_eq!(backing.check(), Some(Some(BackingError::Gone)));
        fs::rename(&elsewhere, &path).unwrap();
        assert_eq!(backing.check(), Some(Some(cut)), "nor after something else was wrong");
        let fails = || Err(io::Error::other("no"));
        for length in [512, 4096, 8192] {
            backing.resize(length, fails).unwrap_err();
            assert_eq!((backing.check(), backing.error()), (None, Some(cut)), "it keeps its length");
        }
        backing.resize(8192, || Ok(())).unwrap();
        assert_eq!(backing.check(), Some(Some(BackingError::CutOff { left_bytes: 1000, length_bytes: 8192 })));
        backing.resize(512, || Ok(())).unwrap();
        assert_eq!(backing.check(), Some(None), "it is to be shorter");
    }
}
