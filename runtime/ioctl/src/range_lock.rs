//! Announcements of ranges of a file that its opener reads or writes, for others who would use the same bytes by
//! another path (`fcntl(2)`, open file description locks).
//!
//! An announcement is a shared lock. It does not exclude anybody by itself, and needs no right to write the file:
//! opening a file for writing is seen by programs that watch block devices. After an announcement the opener checks
//! whether there is another one. If two do so at the same time, each sees the other, or at least one does. An
//! announcement ends when the file is closed, also by the death of the process.
//!
//! The locked bytes distinguish readers from writers: readers lock bytes beyond the end of any file.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Where announcements of readers begin. No file or device is this large.
const READERS_FROM: u64 = 1 << 61;

/// How the opener uses a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Use {
    /// It reads.
    Read,
    /// It reads and writes.
    Write,
}

/// Announces the use of a range. An end of `u64::MAX` means the end of the file, however long it becomes.
///
/// # Errors
/// When the file system does not support such locks.
pub fn announce(file: BorrowedFd<'_>, what: Use, first_byte: u64, end_byte: u64) -> io::Result<()> {
    let mut lock = lock_of(libc::F_RDLCK, what, first_byte, end_byte);
    call(file, libc::F_OFD_SETLK, &mut lock)
}

/// True if somebody else announced this use for a part of this range, through any opening of the file.
///
/// # Errors
/// When the file system does not support such locks.
pub fn is_announced(file: BorrowedFd<'_>, what: Use, first_byte: u64, end_byte: u64) -> io::Result<bool> {
    let mut lock = lock_of(libc::F_WRLCK, what, first_byte, end_byte);
    call(file, libc::F_OFD_GETLK, &mut lock)?;
    Ok(libc::c_int::from(lock.l_type) != libc::F_UNLCK)
}

/// True if somebody holds a lock of the whole file that looks like any announcement, as NFS creates for `flock(2)`:
/// then announcements cannot be recognised.
///
/// # Errors
/// When the file system does not support such locks.
pub fn is_obscured(file: BorrowedFd<'_>) -> io::Result<bool> {
    let mut lock = lock_of(libc::F_WRLCK, Use::Read, 0, 1);
    // After all announcements.
    lock.l_start = (2 * READERS_FROM) as i64;
    call(file, libc::F_OFD_GETLK, &mut lock)?;
    Ok(libc::c_int::from(lock.l_type) != libc::F_UNLCK)
}

fn lock_of(kind: libc::c_int, what: Use, first_byte: u64, end_byte: u64) -> libc::flock {
    let offset = if what == Use::Read { READERS_FROM } else { 0 };
    let start = first_byte.min(READERS_FROM - 1);
    let end = end_byte.clamp(start + 1, READERS_FROM);
    // SAFETY: the structure consists of integers only, for which zeroes are valid.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = (offset + start) as i64;
    // Never 0, which would mean everything up to the end, including readers' announcements.
    lock.l_len = (end - start) as i64;
    lock
}

fn call(file: BorrowedFd<'_>, command: libc::c_int, lock: &mut libc::flock) -> io::Result<()> {
    // SAFETY: both commands take the address of such a structure, which lives through the call, and do not keep it.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), command, std::ptr::from_mut(lock)) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::AsFd;

    #[test]
    fn ranges_are_seen_by_others_where_they_overlap_until_the_file_is_closed() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = || File::open(file.path()).unwrap();
        let (one, other) = (open(), open());
        announce(one.as_fd(), Use::Write, 4096, 8192).unwrap();
        let is_written = |file: &File, first, end| is_announced(file.as_fd(), Use::Write, first, end).unwrap();
        assert!(!is_written(&one, 0, u64::MAX), "one's own is none");
        for (first, end, is_there) in
            [(0, u64::MAX, true), (0, 4096, false), (0, 4097, true), (8191, 8192, true), (8192, u64::MAX, false)]
        {
            assert_eq!(is_written(&other, first, end), is_there, "{first}..{end}");
        }
        announce(other.as_fd(), Use::Write, 1 << 40, u64::MAX).unwrap();
        assert!(is_written(&one, u64::MAX - 1, u64::MAX), "to the end of all that there will be");
        announce(other.as_fd(), Use::Write, 0, 4096).unwrap();
        assert!(is_written(&one, 0, 1) && is_written(&other, 4096, 4097));
        drop(other);
        assert!(!is_written(&one, 0, u64::MAX));
    }

    #[test]
    fn readers_are_told_from_writers() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = || File::open(file.path()).unwrap();
        let (reader, writer, third) = (open(), open(), open());
        let is_there = |what, first, end| is_announced(third.as_fd(), what, first, end).unwrap();
        announce(reader.as_fd(), Use::Read, 0, 4096).unwrap();
        assert!(is_there(Use::Read, 4095, u64::MAX) && !is_there(Use::Read, 4096, u64::MAX));
        assert!(!is_there(Use::Write, 0, u64::MAX), "a reader is no writer");
        announce(writer.as_fd(), Use::Write, 8192, u64::MAX).unwrap();
        assert!(is_there(Use::Write, 0, u64::MAX) && !is_there(Use::Read, 4096, u64::MAX), "a writer is no reader");
    }

    #[test]
    fn a_lock_of_the_whole_file_hides_what_is_announced() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = || File::open(file.path()).unwrap();
        let (one, other) = (open(), open());
        announce(one.as_fd(), Use::Write, 0, u64::MAX).unwrap();
        announce(one.as_fd(), Use::Read, 0, u64::MAX).unwrap();
        assert!(!is_obscured(other.as_fd()).unwrap(), "announcements end before");
        let mut whole = lock_of(libc::F_RDLCK, Use::Write, 0, 1);
        whole.l_len = 0;
        call(one.as_fd(), libc::F_OFD_SETLK, &mut whole).unwrap();
        assert!(is_obscured(other.as_fd()).unwrap());
    }
}
