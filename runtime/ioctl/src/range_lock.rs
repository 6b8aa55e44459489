//! Announcements of ranges of a file that its opener writes, for others who would write the same bytes by another way (`fcntl(2)`, open
//! file description locks).
//!
//! An announcement is a shared lock: it keeps nobody out by itself, and needs no right to write the file, whose opening for writing is seen by
//! programs that watch block devices. Whoever announces then asks whether anybody else has. Of two at once each sees the other, or one does.
//! It ends when the file is closed, also by the death of the process.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Announces a range; `u64::MAX` is the end of all that there will be.
///
/// # Errors
/// When the file system has no such locks.
pub fn announce(file: BorrowedFd<'_>, first_byte: u64, end_byte: u64) -> io::Result<()> {
    let mut lock = lock_of(libc::F_RDLCK, first_byte, end_byte);
    call(file, libc::F_OFD_SETLK, &mut lock)
}

/// True if somebody else announced a part of this range, by whichever opening of the file.
///
/// # Errors
/// When the file system has no such locks.
pub fn is_announced(file: BorrowedFd<'_>, first_byte: u64, end_byte: u64) -> io::Result<bool> {
    let mut lock = lock_of(libc::F_WRLCK, first_byte, end_byte);
    call(file, libc::F_OFD_GETLK, &mut lock)?;
    Ok(libc::c_int::from(lock.l_type) != libc::F_UNLCK)
}

fn lock_of(kind: libc::c_int, first_byte: u64, end_byte: u64) -> libc::flock {
    let clamped = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
    // SAFETY: the structure is made of integers only, for which zeroes are valid.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = clamped(first_byte);
    // Length 0 is to the end of all that there will be.
    lock.l_len = if end_byte > i64::MAX as u64 { 0 } else { clamped(end_byte - first_byte.min(end_byte)) };
    lock
}

fn call(file: BorrowedFd<'_>, command: libc::c_int, lock: &mut libc::flock) -> io::Result<()> {
    // SAFETY: both commands take the address of such a structure, which lives through the call, and keep none of it.
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
        announce(one.as_fd(), 4096, 8192).unwrap();
        assert!(!is_announced(one.as_fd(), 0, u64::MAX).unwrap(), "one's own is none");
        for (first, end, is_there) in
            [(0, u64::MAX, true), (0, 4096, false), (0, 4097, true), (8191, 8192, true), (8192, u64::MAX, false)]
        {
            assert_eq!(is_announced(other.as_fd(), first, end).unwrap(), is_there, "{first}..{end}");
        }
        announce(other.as_fd(), 1 << 40, u64::MAX).unwrap();
        assert!(is_announced(one.as_fd(), u64::MAX - 1, u64::MAX).unwrap(), "to the end of all that there will be");
        announce(other.as_fd(), 0, 4096).unwrap();
        assert!(is_announced(one.as_fd(), 0, 1).unwrap() && is_announced(other.as_fd(), 4096, 4097).unwrap());
        drop(other);
        assert!(!is_announced(one.as_fd(), 0, u64::MAX).unwrap());
    }
}
