//! Converts values of the filesystem to those of the protocol: inode numbers, attributes and times.
//!
//! In the protocol the root has number 1, and 0 means none. So the kernel's number 1 stands for the root's own number.
//! Other inodes must not have the numbers 0, 1 or that of the root: an entry with the root's number would be a
//! directory that contains itself, which is damage.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{FileAttr, FileType, FopenFlags, INodeNo};

use crate::error::FsError;
use crate::interface::{Attributes, Kind, Time};

const NANOSECONDS: u32 = 1_000_000_000;
/// The kernel keeps a directory's entries until the directory changes, also from one opening to the next.
pub const DIRECTORY_FLAGS: FopenFlags = FopenFlags::FOPEN_KEEP_CACHE.union(FopenFlags::FOPEN_CACHE_DIR);
/// A file whose content the kernel keeps in its page cache, also from one opening to the next. When it is closed, its
/// changed pages are written and awaited. Some kernels wait for them at no other time but fsync.
pub const CACHED_FLAGS: FopenFlags = FopenFlags::FOPEN_KEEP_CACHE;
/// A file that cannot be changed, so that nothing is to be done when it is closed.
pub const READ_ONLY_FLAGS: FopenFlags = CACHED_FLAGS.union(FopenFlags::FOPEN_NOFLUSH);
/// A file of which the kernel caches nothing. Writes to it may come at the same time, which a filesystem can take.
pub const DIRECT_FLAGS: FopenFlags =
    CACHED_FLAGS.union(FopenFlags::FOPEN_DIRECT_IO).union(FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES);

/// The filesystem's number for an inode number of the kernel.
pub fn ino_of(node: INodeNo, root: u64) -> u64 {
    if node == INodeNo::ROOT { root } else { node.0 }
}

/// Refuses the number of an entry if that number is reserved.
pub fn check_ino(ino: u64, root: u64) -> Result<(), FsError> {
    if ino <= INodeNo::ROOT.0 || ino == root {
        return Err(FsError::Damaged(format!("an entry with the inode number {ino}")));
    }
    Ok(())
}

/// The attributes of an entry that is not the root.
///
/// # Errors
/// If its number is reserved.
pub fn entry(attributes: &Attributes, root: u64) -> Result<FileAttr, FsError> {
    check_ino(attributes.ino, root).map(|()| file_attr(attributes))
}

/// The reply for a name that does not exist, which the kernel may cache as well.
pub fn no_entry() -> FileAttr {
    unknown(0, Kind::Regular)
}

/// The attributes of an inode of which only number and type are known.
pub fn unknown(ino: u64, kind: Kind) -> FileAttr {
    let time = Time::default();
    let nothing = Attributes {
        ino,
        kind,
        mode: 0,
        links: 0,
        uid: 0,
        gid: 0,
        size_bytes: 0,
        blocks: 0,
        block_size_bytes: 0,
        device: 0,
        atime: time,
        mtime: time,
        ctime: time,
    };
    file_attr(&nothing)
}

/// Attributes in the form of the protocol.
pub fn file_attr(attributes: &Attributes) -> FileAttr {
    FileAttr {
        ino: INodeNo(attributes.ino),
        size: attributes.size_bytes,
        blocks: attributes.blocks,
        atime: system_time(attributes.atime),
        mtime: system_time(attributes.mtime),
        ctime: system_time(attributes.ctime),
        crtime: UNIX_EPOCH,
        kind: file_type(attributes.kind),
        perm: attributes.mode & 0o7777,
        nlink: attributes.links,
        uid: attributes.uid,
        gid: attributes.gid,
        rdev: attributes.device,
        blksize: attributes.block_size_bytes,
        flags: 0,
    }
}

/// The type in the form of the protocol.
pub fn file_type(kind: Kind) -> FileType {
    match kind {
        Kind::Regular => FileType::RegularFile,
        Kind::Directory => FileType::Directory,
        Kind::Symlink => FileType::Symlink,
        Kind::Fifo => FileType::NamedPipe,
        Kind::Socket => FileType::Socket,
        Kind::CharDevice => FileType::CharDevice,
        Kind::BlockDevice => FileType::BlockDevice,
    }
}

/// Converts any stored time; nanoseconds beyond a second count as the last nanosecond.
fn system_time(time: Time) -> SystemTime {
    let nanoseconds = Duration::from_nanos(u64::from(time.nanoseconds.min(NANOSECONDS - 1)));
    let whole = Duration::from_secs(time.seconds.unsigned_abs());
    let second = if time.seconds < 0 { UNIX_EPOCH.checked_sub(whole) } else { UNIX_EPOCH.checked_add(whole) };
    second.and_then(|second| second.checked_add(nanoseconds)).unwrap_or(UNIX_EPOCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attributes(ino: u64) -> Attributes {
        let time = Time { seconds: -2, nanoseconds: 500_000_000 };
        Attributes {
            ino,
            kind: Kind::Fifo,
            mode: 0o4755,
            links: 3,
            uid: 1,
            gid: 2,
            size_bytes: 4,
            blocks: 8,
            block_size_bytes: 4096,
            device: 5,
            atime: time,
            mtime: Time { seconds: 1, nanoseconds: 7 },
            ctime: Time { seconds: i64::MAX, nanoseconds: u32::MAX },
        }
    }

    #[test]
    fn the_root_has_its_own_number_and_the_kernel_calls_it_one() {
        assert_eq!(ino_of(INodeNo(1), 256), 256);
        assert_eq!(ino_of(INodeNo(257), 256), 257);
    }

    #[test]
    fn entries_with_numbers_that_mean_something_else_are_damage() {
        let attr = entry(&attributes(257), 256).unwrap();
        assert_eq!((attr.ino, attr.kind, attr.perm, attr.nlink), (INodeNo(257), FileType::NamedPipe, 0o4755, 3));
        for ino in [0, 1, 256] {
            let error = entry(&attributes(ino), 256).unwrap_err();
            assert_eq!(error, FsError::Damaged(format!("an entry with the inode number {ino}")));
        }
        assert_eq!(no_entry().ino, INodeNo(0));
    }

    #[test]
    fn times_before_1970_and_at_the_limits_stay_what_they_are() {
        let of = |seconds, nanoseconds| system_time(Time { seconds, nanoseconds });
        assert_eq!(of(-2, 500_000_000), UNIX_EPOCH - Duration::from_millis(1500));
        assert_eq!(of(5, 1), UNIX_EPOCH + Duration::new(5, 1));
        assert_eq!(of(5, u32::MAX), UNIX_EPOCH + Duration::new(5, 999_999_999));
        for seconds in [i64::MIN, i64::MIN + 1, i64::MAX] {
            let time = of(seconds, 3);
            let whole = Duration::new(seconds.unsigned_abs(), 0);
            let distance = if seconds < 0 { UNIX_EPOCH.duration_since(time) } else { time.duration_since(UNIX_EPOCH) };
            let wrong = distance.unwrap().abs_diff(whole);
            assert_eq!(wrong, Duration::from_nanos(3), "{seconds}");
        }
    }
}
