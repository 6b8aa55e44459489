//! Device nodes: which block device a drive's node belongs to, the kernel's limits for it, from sysfs, and the kernel's
//! errors when it cannot pass on a command.
//!
//! Sysfs is read as untrusted text: what is not a number counts as unknown.

use std::num::NonZeroU64;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::{fs, io};

use rustix::fs::{Advice, fadvise};
use sealblock_block::{Error, ErrorKind};

/// The kind of a device node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NodeKind {
    /// `/dev/nvmeXnY`: the block device of a namespace.
    NvmeBlock,
    /// `/dev/ngXnY`: the character device of a namespace, beside the block device `nvmeXnY` if there is one.
    NvmeGeneric,
    /// `/dev/sdX`: the block device of a SCSI disk, or of a drive that the kernel shows as one.
    ScsiBlock,
    /// `/dev/sgX`: the character device of a SCSI device of any type.
    ScsiGeneric,
    /// Something else.
    Other,
}

impl NodeKind {
    /// Judged by the last part of the path.
    pub fn of(path: &Path) -> NodeKind {
        match name_of(path) {
            Some(name) if namespace_of(name, "nvme").is_some() => NodeKind::NvmeBlock,
            Some(name) if namespace_of(name, "ng").is_some() => NodeKind::NvmeGeneric,
            Some(name) if is_disk(name) => NodeKind::ScsiBlock,
            Some(name) if name.strip_prefix("sg").is_some_and(is_number) => NodeKind::ScsiGeneric,
            _ => NodeKind::Other,
        }
    }
}

/// The node of the block device that belongs to a node, in the same folder. For an NVMe namespace it has the same
/// numbers (the kernel's multipath and generic devices count together), for a SCSI generic device the name in sysfs.
/// `None` if the path is not a drive's node, and for a SCSI generic device without a block device.
pub fn block_node(path: &Path) -> Option<PathBuf> {
    let name = name_of(path)?;
    match NodeKind::of(path) {
        NodeKind::NvmeBlock | NodeKind::ScsiBlock => Some(path.to_owned()),
        NodeKind::NvmeGeneric => Some(path.with_file_name(format!("nvme{}", namespace_of(name, "ng")?))),
        NodeKind::ScsiGeneric => {
            let block = disk_in(&Path::new("/sys/class/scsi_generic").join(name).join("device/block"))?;
            Some(path.with_file_name(block))
        }
        NodeKind::Other => None,
    }
}

/// The drive's node to which a path of another name leads, such as those in `/dev/disk/by-id`. `None` if it is not a
/// drive's, and if the path already has such a name itself.
pub fn linked_drive(path: &Path) -> Option<PathBuf> {
    let node = fs::canonicalize(path).ok()?;
    let is_drive = NodeKind::of(&node) != NodeKind::Other && node.starts_with("/dev");
    (is_drive && NodeKind::of(path) == NodeKind::Other).then_some(node)
}

/// The name of a SCSI device's block device, from this folder of sysfs.
fn disk_in(folder: &Path) -> Option<String> {
    let names = fs::read_dir(folder).ok()?.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    names.into_iter().find(|name| is_disk(name))
}

/// True for `sdX`: letters only, so not a partition.
fn is_disk(name: &str) -> bool {
    let letters = name.strip_prefix("sd");
    letters.is_some_and(|letters| !letters.is_empty() && letters.bytes().all(|byte| byte.is_ascii_lowercase()))
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

fn name_of(path: &Path) -> Option<&str> {
    path.file_name()?.to_str()
}

/// The numbers of a namespace's node, such as `0n1`, after this prefix.
fn namespace_of<'a>(name: &'a str, prefix: &str) -> Option<&'a str> {
    let numbers = name.strip_prefix(prefix)?;
    let (controller, namespace) = numbers.split_once('n')?;
    (is_number(controller) && is_number(namespace)).then_some(numbers)
}

/// What the kernel reports about a block device's queue. `None` means unknown.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct KernelLimits {
    /// Bytes that one command moves at most.
    pub(crate) transfer_bytes: Option<u64>,
    /// Largest Write Zeroes in bytes; 0 if the kernel sends none, for example to drives that it knows to be broken.
    pub(crate) write_zeroes_bytes: Option<u64>,
    /// Largest discard in bytes; 0 if the kernel sends none.
    pub(crate) discard_bytes: Option<u64>,
}

impl KernelLimits {
    /// Those of the block device with this node.
    pub(crate) fn of(block: &Path) -> KernelLimits {
        let Some(name) = name_of(block) else { return KernelLimits::default() };
        KernelLimits::read(&Path::new("/sys/class/block").join(name).join("queue"))
    }

    /// Those of a queue's folder in sysfs.
    pub(crate) fn read(queue: &Path) -> KernelLimits {
        /// Bytes of a page: a segment has at least one, but the first and the last.
        const PAGE_BYTES: u64 = 4096;
        let number = |name: &str| fs::read_to_string(queue.join(name)).ok()?.trim().parse::<u64>().ok();
        let whole = number("max_hw_sectors_kb").and_then(|kib| kib.checked_mul(1024));
        let segments = number("max_segments").map(|count| count.saturating_sub(1).max(1).saturating_mul(PAGE_BYTES));
        KernelLimits {
            transfer_bytes: [whole, segments].into_iter().flatten().filter(|bytes| *bytes > 0).min(),
            write_zeroes_bytes: number("write_zeroes_max_bytes"),
            discard_bytes: number("discard_max_bytes"),
        }
    }
}

/// Makes the kernel drop its cached pages of bytes of a block device that a command has changed without the kernel's
/// knowledge. Pages that it does not drop are in use by a process that maps the device; this is not an error here.
pub(crate) fn forget_cached(file: impl AsFd, start_bytes: u64, length_bytes: u64) {
    let (start_bytes, end_bytes) = whole_pages(start_bytes, length_bytes);
    let length = NonZeroU64::new(end_bytes - start_bytes);
    if let Err(error) = fadvise(file, start_bytes, length, Advice::DontNeed) {
        tracing::debug!(%error, start_bytes, "cached blocks are kept");
    }
}

/// The pages of these bytes, start and end. The kernel does not drop a page if it is told to drop only a part of it;
/// the largest pages have 64 KiB.
fn whole_pages(start_bytes: u64, length_bytes: u64) -> (u64, u64) {
    const PAGE_BYTES: u64 = 64 << 10;
    let end_bytes = start_bytes.saturating_add(length_bytes);
    (start_bytes - start_bytes % PAGE_BYTES, end_bytes.checked_next_multiple_of(PAGE_BYTES).unwrap_or(end_bytes))
}

/// The error of a call that did not get a command to its completion.
pub(crate) fn call_error(doing: &str, error: &io::Error) -> Error {
    match error.raw_os_error() {
        // The kernel returns these for devices that were removed, reset, or did not reply in time.
        Some(libc::ENODEV | libc::ENXIO | libc::EIO | libc::ESHUTDOWN | libc::ETIMEDOUT | libc::ECANCELED) => {
            ErrorKind::Unreachable { reason: format!("the drive did not complete {doing}: {error}") }
        }
        _ => ErrorKind::Media { reason: format!("the kernel did not pass {doing} to the drive: {error}") },
    }
    .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_known_by_their_names_and_belong_to_a_block_device() {
        for (path, kind, block) in [
            ("/dev/nvme0n1", NodeKind::NvmeBlock, Some("/dev/nvme0n1")),
            ("/dev/ng12n34", NodeKind::NvmeGeneric, Some("/dev/nvme12n34")),
            ("/dev/nvme0n1p1", NodeKind::Other, None),
            ("/dev/nvme0", NodeKind::Other, None),
            ("/dev/ng0n", NodeKind::Other, None),
            ("/dev/ngn1", NodeKind::Other, None),
            ("/dev/sda", NodeKind::ScsiBlock, Some("/dev/sda")),
            ("/dev/sdab", NodeKind::ScsiBlock, Some("/dev/sdab")),
            ("/dev/sda1", NodeKind::Other, None),
            ("/dev/sd", NodeKind::Other, None),
            ("/dev/sg", NodeKind::Other, None),
            ("/dev/sg4294967295", NodeKind::ScsiGeneric, None),
            ("/", NodeKind::Other, None),
        ] {
            let path = Path::new(path);
            assert_eq!((NodeKind::of(path), block_node(path)), (kind, block.map(PathBuf::from)), "{path:?}");
        }
    }

    #[test]
    fn a_generic_device_belongs_to_the_disk_that_sysfs_names() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(disk_in(&folder.path().join("absent")), None);
        assert_eq!(disk_in(folder.path()), None);
        fs::create_dir(folder.path().join("sr0")).unwrap();
        assert_eq!(disk_in(folder.path()), None);
        fs::create_dir(folder.path().join("sdq")).unwrap();
        assert_eq!(disk_in(folder.path()), Some("sdq".to_owned()));
    }

    #[test]
    fn only_links_to_drives_lead_to_one() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("sda");
        fs::write(&file, "").unwrap();
        std::os::unix::fs::symlink(&file, folder.path().join("link")).unwrap();
        assert_eq!(linked_drive(&folder.path().join("link")), None, "a file of that name is no node");
        assert_eq!((linked_drive(&folder.path().join("absent")), linked_drive(Path::new("/dev/null"))), (None, None));
    }

    #[test]
    fn limits_are_the_smaller_ones_and_what_is_no_number_is_unknown() {
        let folder = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        assert_eq!(KernelLimits::read(folder.path()), KernelLimits::default());
        put("max_hw_sectors_kb", "512\n");
        put("max_segments", "65");
        put("write_zeroes_max_bytes", "0\n");
        put("discard_max_bytes", "many");
        let limits = KernelLimits::read(folder.path());
        assert_eq!(limits.transfer_bytes, Some(64 * 4096));
        assert_eq!((limits.write_zeroes_bytes, limits.discard_bytes), (Some(0), None));
        put("max_segments", "0");
        assert_eq!(KernelLimits::read(folder.path()).transfer_bytes, Some(4096));
        put("max_hw_sectors_kb", &u64::MAX.to_string());
        put("max_segments", "-3");
        assert_eq!(KernelLimits::read(folder.path()).transfer_bytes, None);
    }

    #[test]
    fn cached_pages_are_dropped_whole() {
        let page = 64 << 10;
        assert_eq!(whole_pages(512, 512), (0, page));
        assert_eq!(whole_pages(page, page), (page, 2 * page));
        assert_eq!(whole_pages(2 * page - 512, 1024), (page, 3 * page));
        assert_eq!(whole_pages(u64::MAX - 511, 511), (u64::MAX - (page - 1), u64::MAX));
    }

    fn errno(number: i32) -> io::Error {
        io::Error::from_raw_os_error(number)
    }

    #[test]
    fn a_drive_that_is_gone_or_late_cannot_be_reached_and_a_refused_call_is_something_else() {
        for number in [libc::ENODEV, libc::ENXIO, libc::EIO, libc::ETIMEDOUT] {
            assert!(matches!(call_error("verify", &errno(number)).kind(), ErrorKind::Unreachable { .. }), "{number}");
        }
        for number in [libc::EINVAL, libc::ENOMEM, libc::EACCES] {
            assert!(matches!(call_error("verify", &errno(number)).kind(), ErrorKind::Media { .. }), "{number}");
        }
    }
}
