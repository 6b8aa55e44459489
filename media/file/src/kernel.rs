//! What the kernel knows about an open file: alignment of direct I/O, whether holes can be punched, names of file
//! systems.
//!
//! All of it is read through `statx`, `fstatfs`, `fallocate` and sysfs, so that nothing here needs unsafe code.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::Path;

use rustix::fs::{AtFlags, FallocateFlags, Mode, OFlags, Statx, StatxFlags};
use sealblock_runtime_memory::Buffer;

/// The largest sector that a medium may have, in bytes.
const LARGEST_SECTOR_BYTES: u32 = 4096;
/// The smallest.
pub(crate) const SMALLEST_SECTOR_BYTES: u32 = 512;

/// Alignment of direct I/O.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Alignment {
    /// Of offsets and lengths, in bytes: 512 or 4096.
    pub(crate) sector_bytes: u32,
    /// Of addresses, in bytes.
    pub(crate) memory_bytes: usize,
}

impl Alignment {
    /// For the page cache the data may be anywhere in memory; a sector is what a disk writes as a whole.
    pub(crate) fn buffered(file: &File, block_device: bool) -> Alignment {
        let mut sector_bytes = SMALLEST_SECTOR_BYTES;
        if block_device && logical_sector(file).is_none_or(|bytes| bytes > SMALLEST_SECTOR_BYTES) {
            sector_bytes = LARGEST_SECTOR_BYTES;
        }
        Alignment { sector_bytes, memory_bytes: 1 }
    }
}

/// True if a range of a file has no data, as far as the file system reports it. The position of the file is not used
/// otherwise.
pub(crate) fn is_hole(file: impl rustix::fd::AsFd, offset_bytes: u64, length_bytes: u64) -> bool {
    match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(offset_bytes)) {
        Ok(data) => data >= offset_bytes.saturating_add(length_bytes),
        Err(error) => error == rustix::io::Errno::NXIO,
    }
}

/// How a range of a file begins: how many bytes are of the same kind, and whether the file system reports them as a
/// hole. If it does not report this, all of it counts as data.
pub(crate) fn run_at(file: impl rustix::fd::AsFd, offset_bytes: u64, length_bytes: u64) -> (u64, bool) {
    use rustix::fs::{SeekFrom, seek};
    match seek(&file, SeekFrom::Data(offset_bytes)) {
        Err(error) if error == rustix::io::Errno::NXIO => return (length_bytes, true),
        Ok(data) if data > offset_bytes => return (length_bytes.min(data - offset_bytes), true),
        Ok(_) | Err(_) => {}
    }
    match seek(&file, SeekFrom::Hole(offset_bytes)) {
        Ok(hole) if hole > offset_bytes => (length_bytes.min(hole - offset_bytes), false),
        // Punched in between, or not reported.
        Ok(_) | Err(_) => (length_bytes, false),
    }
}

/// What `statx` says about an open file.
pub(crate) fn statx(file: impl rustix::fd::AsFd) -> io::Result<Statx> {
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::DIOALIGN;
    Ok(rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, wanted)?)
}

/// The alignment of direct I/O on a file opened for it, or `None` where it does not work.
pub(crate) fn direct_alignment(file: &File) -> io::Result<Option<Alignment>> {
    // This file system accepts the flag but keeps the file in the page cache anyway, because it stores it nowhere else.
    // The nodes of block devices are on one too.
    if file.metadata()?.is_file() && file_system(file).is_ok_and(|name| name == "tmpfs") {
        return Ok(None);
    }
    match statx(file) {
        Ok(known) if known.stx_mask & StatxFlags::DIOALIGN.bits() != 0 => {
            Ok(alignment(known.stx_dio_offset_align, known.stx_dio_mem_align))
        }
        Ok(_) | Err(_) => probe_direct(file, |length| {
            file.read_at(&mut Buffer::zeroed(length as usize), 0).map(|read| read == length as usize)
        }),
    }
}

/// The alignment from what `statx` reports, where 0 stands for "no direct I/O".
fn alignment(offset_bytes: u32, memory_bytes: u32) -> Option<Alignment> {
    let sector_bytes = match offset_bytes {
        1..=SMALLEST_SECTOR_BYTES => SMALLEST_SECTOR_BYTES,
        513..=LARGEST_SECTOR_BYTES => LARGEST_SECTOR_BYTES,
        _ => return None,
    };
    let memory_bytes = memory_bytes.max(1) as usize;
    (memory_bytes <= sealblock_runtime_memory::ALIGNMENT).then_some(Alignment { sector_bytes, memory_bytes })
}

/// Finds the alignment by trying, if the kernel (before 6.1) or the file system does not report it. `read` reads this
/// many bytes of the start, and returns whether there were as many. Of its errors only EINVAL counts: on another error
/// the kernel accepted the alignment, and the bytes are unreadable.
fn probe_direct(file: &File, read: impl Fn(u32) -> io::Result<bool>) -> io::Result<Option<Alignment>> {
    let is_taken = |length: u32| match read(length) {
        Ok(is_whole) => (true, is_whole),
        Err(error) => (error.raw_os_error() != Some(libc::EINVAL), true),
    };
    let found = |sector_bytes| Alignment { sector_bytes, memory_bytes: sector_bytes as usize };
    let about = file.metadata()?;
    let may_be_small = match about.file_type().is_block_device() {
        true => logical_sector(file) == Some(SMALLEST_SECTOR_BYTES),
        false => about.len() >= u64::from(LARGEST_SECTOR_BYTES),
    };
    if may_be_small && is_taken(SMALLEST_SECTOR_BYTES) == (true, true) {
        return Ok(Some(found(SMALLEST_SECTOR_BYTES)));
    }
    // An empty file shows nothing about smaller sectors; the largest are always correct.
    Ok(is_taken(LARGEST_SECTOR_BYTES).0.then(|| found(LARGEST_SECTOR_BYTES)))
}

/// The sector size of a block device, if sysfs reports it.
fn logical_sector(file: &File) -> Option<u32> {
    let device = file.metadata().ok()?.rdev();
    u32::try_from(queue_limit(libc::major(device), libc::minor(device), "logical_block_size")?).ok()
}

/// True if holes can be punched into a file that is open for writing. If this cannot be tried, the file counts as
/// having none: zeroes are written there.
pub(crate) fn punches(file: &File, block_device: bool) -> bool {
    let Ok(about) = file.metadata() else { return false };
    if block_device {
        let limit = |name: &str| queue_limit(libc::major(about.rdev()), libc::minor(about.rdev()), name);
        // Newer kernels report whether zeroing unmaps; older ones only that the device has both.
        let unmaps = limit("write_zeroes_unmap_max_bytes").or_else(|| limit("discard_max_bytes"));
        return unmaps.unwrap_or(0) > 0 && limit("write_zeroes_max_bytes").unwrap_or(0) > 0;
    }
    // A hole after the end changes nothing, and is refused where holes are not supported.
    let behind = about.len().next_multiple_of(u64::from(LARGEST_SECTOR_BYTES));
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    loop {
        match rustix::fs::fallocate(file, mode, behind, u64::from(LARGEST_SECTOR_BYTES)) {
            Ok(()) => return true,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => {
                tracing::debug!(%error, "no holes can be punched");
                return false;
            }
        }
    }
}

/// True if holes can be punched into files in the same folder. It tells this about a file that is open for reading
/// only: a file without a name is created there and disappears again. `None` if that cannot be tried.
pub fn punches_beside(path: &Path) -> Option<bool> {
    let path = path.canonicalize().ok()?;
    let beside = rustix::fs::open(path.parent()?, OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, Mode::RUSR).ok()?;
    let beside = File::from(beside);
    let is_same_system = beside.metadata().ok()?.dev() == path.metadata().ok()?.dev();
    is_same_system.then(|| punches(&beside, false))
}

/// True if a block device supports discards, whether or not these zero.
pub(crate) fn discards(file: &File) -> bool {
    let (major, minor) = device_number(file);
    queue_limit(major, minor, "discard_max_bytes").unwrap_or(0) > 0
}

/// True if a block device is read-only, as `blockdev --setro` and a read-only loop device are, as far as sysfs is there.
pub(crate) fn is_read_only(file: &File) -> bool {
    let (major, minor) = device_number(file);
    let found = std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/ro"));
    found.is_ok_and(|flag| flag.trim() == "1")
}

/// The major and minor number of a block device.
fn device_number(file: &File) -> (u32, u32) {
    let device = file.metadata().map_or(0, |about| about.rdev());
    (libc::major(device), libc::minor(device))
}

/// A number from a disk's queue in sysfs; a partition's queue is that of its disk.
fn queue_limit(major: u32, minor: u32, name: &str) -> Option<u64> {
    let device = format!("/sys/dev/block/{major}:{minor}");
    let text = std::fs::read_to_string(format!("{device}/queue/{name}"))
        .or_else(|_| std::fs::read_to_string(format!("{device}/../queue/{name}")));
    text.ok()?.trim().parse().ok()
}

/// The name of the file system an open file is on, or its magic number in hexadecimal.
pub(crate) fn file_system(file: impl rustix::fd::AsFd) -> io::Result<String> {
    // From `linux/magic.h` and the file systems' own headers. The kernel's type of the field differs by platform.
    const NAMES: &[(u32, &str)] = &[
        (0x0000_EF53, "ext4"),
        (0x5846_5342, "xfs"),
        (0x9123_683E, "btrfs"),
        (0x0102_1994, "tmpfs"),
        (0x794C_7630, "overlay"),
        (0xCA45_1A4E, "bcachefs"),
        (0x2FC1_2FC1, "zfs"),
        (0xF2F5_2010, "f2fs"),
        (0x0000_6969, "nfs"),
        (0xFF53_4D42, "cifs"),
        (0xFE53_4D42, "smb2"),
        (0x0102_1997, "9p"),
        (0x00C3_6400, "ceph"),
        (0x6573_5546, "fuse"),
        (0x0000_4D44, "vfat"),
        (0x2011_BAB0, "exfat"),
        (0x7366_746E, "ntfs3"),
    ];
    let magic = rustix::fs::fstatfs(file)?.f_type as u32;
    let known = NAMES.iter().find(|(number, _)| *number == magic);
    Ok(known.map_or_else(|| format!("{magic:#x}"), |(_, name)| (*name).to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What probing finds for a file of this length if reads of 512 and of 4096 bytes give these results.
    fn probed(length: u64, small: io::Result<bool>, large: io::Result<bool>) -> Option<u32> {
        let file = tempfile::tempfile().unwrap();
        file.set_len(length).unwrap();
        let answers = std::cell::RefCell::new([Some(small), Some(large)]);
        let read = |length: u32| answers.borrow_mut()[usize::from(length > 512)].take().unwrap();
        probe_direct(&file, read).unwrap().map(|found| found.sector_bytes)
    }

    #[test]
    fn a_start_that_cannot_be_read_is_no_reason_to_refuse_a_file() {
        let error = |number| Err(io::Error::from_raw_os_error(number));
        assert_eq!(probed(8192, Ok(true), Ok(true)), Some(512));
        assert_eq!(probed(8192, error(libc::EINVAL), Ok(true)), Some(4096));
        assert_eq!(probed(8192, error(libc::EINVAL), error(libc::EINVAL)), None, "no direct I/O");
        assert_eq!(probed(8192, error(libc::EIO), error(libc::EIO)), Some(512));
        assert_eq!(probed(8192, error(libc::EINVAL), error(libc::EIO)), Some(4096));
        assert_eq!(probed(0, Ok(false), Ok(false)), Some(4096), "an empty file does not tell");
    }

    #[test]
    fn a_file_that_lets_nothing_be_tried_has_no_holes() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(!punches(&File::open(file.path()).unwrap(), false), "EBADF: it is not open for writing");
    }

    #[test]
    fn alignments_are_those_a_medium_can_have() {
        let of = |sector_bytes, memory_bytes| Some(Alignment { sector_bytes, memory_bytes });
        assert_eq!(alignment(512, 4), of(512, 4));
        assert_eq!(alignment(1, 0), of(512, 1));
        assert_eq!(alignment(4096, 512), of(4096, 512));
        assert_eq!(alignment(2048, 512), of(4096, 512));
        assert_eq!(alignment(0, 0), None, "no direct I/O");
        assert_eq!(alignment(8192, 512), None, "sectors too large");
        assert_eq!(alignment(512, 65536), None, "buffers are not aligned that far");
    }
}
