//! Attributes as they are stored, in the form of `filesystem/fuse`.

use sealblock_btrfs_format::items::directory::FileType;
use sealblock_btrfs_format::items::inode::{InodeItem, Timespec};
use sealblock_btrfs_format::names::check_file_name;
use sealblock_fuse::{Attributes, FsError, Kind, MAX_COOKIE, Time};

/// Nanoseconds in a second; stored times must have fewer.
const SECOND_NS: u32 = 1_000_000_000;
/// Bits of a minor number in the kernel's internal form.
const MINOR_BITS: u32 = 20;
/// The unit in which space is counted.
const BLOCK_BYTES: u64 = 512;

/// The attributes of an inode with this number and type.
///
/// # Errors
/// If its device number has more bits than Linux can show.
pub(crate) fn attributes(ino: u64, kind: Kind, item: &InodeItem, block_size_bytes: u32) -> Result<Attributes, FsError> {
    let is_device = matches!(kind, Kind::CharDevice | Kind::BlockDevice);
    let device = if is_device { shown_device(item.rdev.get()) } else { Some(0) };
    Ok(Attributes {
        ino,
        kind,
        mode: (item.mode.get() & 0o7777) as u16,
        links: item.nlink.get(),
        uid: item.uid.get(),
        gid: item.gid.get(),
        size_bytes: item.size.get(),
        blocks: item.nbytes.get().div_ceil(BLOCK_BYTES),
        block_size_bytes,
        device: device.ok_or_else(|| FsError::Damaged(format!("inode {ino}: its device number is too large")))?,
        atime: time(item.atime),
        mtime: time(item.mtime),
        ctime: time(item.ctime),
    })
}

/// A stored device number as Linux shows it: the low byte of the minor number, the major number, and the rest of the
/// minor number.
fn shown_device(stored: u64) -> Option<u32> {
    let (major, minor) = (stored >> MINOR_BITS, stored & ((1 << MINOR_BITS) - 1));
    u32::try_from((minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)).ok()
}

/// Major and minor number of a device as Linux shows them.
pub(crate) fn device_parts(shown: u32) -> (u32, u32) {
    ((shown & 0xf_ff00) >> 8, (shown & 0xff) | (shown >> 12 & 0xf_ff00))
}

/// The empty directory in place of a subvolume; its owner is that of the parent directory, as in Linux.
pub(crate) fn empty_directory(ino: u64, directory: &InodeItem) -> Attributes {
    let never = Time::default();
    Attributes {
        ino,
        kind: Kind::Directory,
        mode: 0o755,
        links: 1,
        uid: directory.uid.get(),
        gid: directory.gid.get(),
        size_bytes: 0,
        blocks: 0,
        block_size_bytes: 4096,
        device: 0,
        atime: never,
        mtime: never,
        ctime: never,
    }
}

/// The cookie behind the entry with this index in a directory; `None` for an entry that is not shown, because no path can
/// hold its name.
///
/// # Errors
/// If there is no such cookie.
pub(crate) fn cookie_behind(directory: u64, name: &[u8], index: u64) -> Result<Option<u64>, FsError> {
    if check_file_name(name).is_err() {
        tracing::warn!(directory, ?name, "an entry has a name that no path can hold");
        return Ok(None);
    }
    match index < MAX_COOKIE {
        true => Ok(Some(index + 1)),
        false => Err(FsError::Damaged(format!("directory {directory}: an index of {index}"))),
    }
}

/// The type of an entry.
pub(crate) fn kind_of_entry(kind: FileType) -> Kind {
    match kind {
        FileType::Directory => Kind::Directory,
        FileType::CharacterDevice => Kind::CharDevice,
        FileType::BlockDevice => Kind::BlockDevice,
        FileType::Fifo => Kind::Fifo,
        FileType::Socket => Kind::Socket,
        FileType::Symlink => Kind::Symlink,
        _ => Kind::Regular,
    }
}

fn time(time: Timespec) -> Time {
    Time { seconds: time.seconds.get(), nanoseconds: time.nanoseconds.get().min(SECOND_NS - 1) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_shown_if_a_path_can_hold_them_and_a_cookie_lies_behind() {
        assert_eq!(cookie_behind(256, b"name", 2), Ok(Some(3)));
        assert_eq!(cookie_behind(256, b"a/b", 2), Ok(None));
        assert_eq!(cookie_behind(256, b"a/b", MAX_COOKIE), Ok(None));
        assert_eq!(cookie_behind(256, b"name", MAX_COOKIE - 1), Ok(Some(MAX_COOKIE)));
        assert!(matches!(cookie_behind(256, b"name", MAX_COOKIE), Err(FsError::Damaged(_))));
    }

    #[test]
    fn device_numbers_are_those_that_linux_shows() {
        for (major, minor, shown) in [(8, 1, 0x801), (0xfff, 0xf_ffff, u32::MAX), (254, 0x12345, 0x1230_fe45)] {
            assert_eq!(shown_device(u64::from(major << MINOR_BITS | minor)), Some(shown));
            assert_eq!(device_parts(shown), (major, minor));
        }
        assert_eq!(shown_device(1 << 50), None);
    }
}
