//! Which bytes this process reads or writes, announced at the files and devices at the bottom, so that no other opening writes them by another
//! name, and none reads what another one is writing.
//!
//! A file keeps other writers out by its own lock, whatever it is called: by hard links, bind mounts and `/proc/self/fd` it is one file. The
//! kernel keeps them out of a block device by its number, and of a disk and its partitions. What remains is seen here: a loop device beside
//! the file below it or another loop device over it, and mappings over the same bytes; and readers of block devices, which the kernel lets in beside
//! a writer. Who opens a file or device announces the
//! ranges that it has of the files and devices below it (`leaves`); of a block device it also holds a shared lock of these files, which a writer of the
//! file itself does not get beside it. Writers meet readers and writers, and readers meet writers.
//!
//! A mounted file system does not announce itself: before something is written, mounts of loop devices over the same file are looked for. What
//! is mounted can be read.

use std::collections::BTreeSet;
use std::fs::{self, File, TryLockError};
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use sealblock_runtime_ioctl::range_lock::{Use, announce, is_announced, is_obscured};

use crate::kernel::DeviceNumber;
use crate::kernel::below::{Arrangement, DeviceNode, Map, NodeKind, node};
use crate::kernel::leaves::{Leaf, Storage, leaves_at};
use crate::kernel::mounts::mounted_devices;

/// Where the kernel lists block devices.
const BLOCK_DEVICES: &str = "/sys/block";

/// The holder of the same bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Conflict {
    /// Another opening, which has announced it at this file or device.
    Opened(PathBuf),
    /// A mounted file system.
    Mount {
        /// The mounted device.
        device: String,
        /// Where it is mounted.
        at: PathBuf,
    },
}

/// Announces that the file or block device at a path is open for this use. What this returns is to be kept open as long.
///
/// # Errors
/// Who else writes the same bytes. What cannot be looked at is no conflict.
pub(crate) fn claim(path: &Path, what: Use) -> Result<Vec<File>, Conflict> {
    let Ok(about) = fs::metadata(path) else { return Ok(Vec::new()) };
    let own = about.file_type().is_block_device().then(|| DeviceNumber::of(&about));
    let tree = own.and_then(|number| node(number).ok());
    let leaves = match &tree {
        // Where a mapping is not known, two devices over one member need not share a byte.
        Some(tree) if !is_known(tree) => vec![Leaf::whole(Storage::Device(tree.number))],
        _ => leaves_at(path).unwrap_or_default(),
    };
    if what == Use::Write
        && let Some((device, at)) = mounted_over(&leaves, own)
    {
        return Err(Conflict::Mount { device, at });
    }
    let mut paths = vec![path.to_owned()];
    match &tree {
        Some(tree) => add_paths(tree, &mut paths),
        // The file's own lock keeps everybody out.
        None if what == Use::Write => return Ok(Vec::new()),
        None => {}
    }
    let storages: BTreeSet<Storage> = leaves.iter().map(|leaf| leaf.storage).collect();
    let mut held = Vec::new();
    for storage in storages {
        held.extend(claim_storage(storage, &leaves, &paths, what)?);
    }
    Ok(held)
}

/// Announces the ranges of one file or device. Nothing where it cannot be opened.
fn claim_storage(storage: Storage, leaves: &[Leaf], paths: &[PathBuf], what: Use) -> Result<Option<File>, Conflict> {
    let is_it = |path: &&PathBuf| fs::metadata(path).is_ok_and(|about| Storage::of(&about) == storage);
    // The last one is the kernel's own name of a device, so that all announce at one node.
    let Some(path) = paths.iter().rev().find(is_it) else { return Ok(None) };
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) => {
            tracing::debug!(path = %path.display(), %error, "cannot lock the devices below");
            return Ok(None);
        }
    };
    let others: &[Use] = match what {
        Use::Write => &[Use::Write, Use::Read],
        // Another reader's lock of the file would look like a writer's.
        Use::Read if is_obscured(file.as_fd()).unwrap_or(true) => &[],
        Use::Read => &[Use::Write],
    };
    for leaf in leaves.iter().filter(|leaf| leaf.storage == storage) {
        let is_there = |other| is_announced(file.as_fd(), other, leaf.first_byte, leaf.end_byte);
        let there = announce(file.as_fd(), what, leaf.first_byte, leaf.end_byte)
            .and_then(|()| others.iter().try_fold(false, |found, other| Ok(found || is_there(*other)?)));
        match there {
            Ok(false) => {}
            Ok(true) => return Err(Conflict::Opened(path.clone())),
            Err(error) => {
                tracing::debug!(path = %path.display(), %error, "the file system does not support range locks")
            }
        }
    }
    // After the ranges: some file systems make these locks of one kind, and one's own would look like another's.
    let is_file = matches!(storage, Storage::File { .. });
    match if is_file { file.try_lock_shared() } else { Ok(()) } {
        Err(TryLockError::WouldBlock) => Err(Conflict::Opened(path.clone())),
        Ok(()) | Err(TryLockError::Error(_)) => Ok(Some(file)),
    }
}

/// True if it is known of all sectors where they lie.
fn is_known(node: &DeviceNode) -> bool {
    let segments = || node.map.iter().flat_map(Map::segments);
    node.unknown.is_none()
        && !segments().any(|segment| segment.how == Arrangement::Unknown)
        && node.members.iter().all(is_known)
}

/// Paths of a device and of all below it: of devices, and of the files under loop devices.
fn add_paths(node: &DeviceNode, paths: &mut Vec<PathBuf>) {
    let name = node.name.split(' ').next().unwrap_or_default();
    paths.push(Path::new("/dev").join(name.replace('!', "/")));
    if let NodeKind::Loop { file, .. } = &node.kind {
        paths.push(file.clone());
    }
    node.members.iter().for_each(|member| add_paths(member, paths));
}

/// A mounted device, other than this one, that has some of these bytes through a loop device.
fn mounted_over(leaves: &[Leaf], own: Option<DeviceNumber>) -> Option<(String, PathBuf)> {
    // The kernel itself keeps mounted devices apart where no loop device is between.
    let devices = fs::read_dir(BLOCK_DEVICES).ok()?.flatten();
    if !devices.into_iter().any(|device| device.path().join("loop/backing_file").exists()) {
        return None;
    }
    let mut seen = BTreeSet::new();
    for (number, point) in mounted_devices() {
        if Some(number) == own || !seen.insert(number) {
            continue;
        }
        let Ok(tree) = node(number) else { continue };
        let theirs = crate::kernel::leaves::leaves_below(&tree);
        if is_known(&tree) && leaves.iter().any(|leaf| theirs.iter().any(|other| leaf.overlaps(other))) {
            return Some((tree.name, point));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plain_file_that_is_written_and_what_is_not_there_need_no_announcement() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(claim(file.path(), Use::Write).unwrap().is_empty());
        for what in [Use::Read, Use::Write] {
            assert!(claim(Path::new("/nowhere/v"), what).unwrap().is_empty());
        }
    }

    #[test]
    fn two_that_announce_the_same_bytes_of_a_file_meet_and_parts_of_it_do_not() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let storage = Storage::of(&file.as_file().metadata().unwrap());
        let paths = [file.path().to_owned()];
        let part = |first_byte, end_byte| [Leaf { storage, first_byte, end_byte }];
        let claim = |first, end, what| claim_storage(storage, &part(first, end), &paths, what);
        let first = claim(0, 4096, Use::Write).unwrap();
        assert!(first.is_some());
        let second = claim(4096, 8192, Use::Write).unwrap();
        for what in [Use::Read, Use::Write] {
            let writer = Conflict::Opened(file.path().to_owned());
            assert_eq!(claim(0, 512, what).unwrap_err(), writer);
        }
        // Who writes the file itself meets them all, and they meet it.
        let whole = File::open(file.path()).unwrap();
        assert!(matches!(whole.try_lock(), Err(TryLockError::WouldBlock)));
        drop((first, second));
        whole.try_lock().unwrap();
        for what in [Use::Read, Use::Write] {
            assert!(claim(0, 512, what).is_err());
        }
        whole.unlock().unwrap();
        assert!(claim(0, 512, Use::Write).is_ok());
    }

    #[test]
    fn readers_of_a_file_or_a_part_meet_its_writers_and_no_other_readers() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let storage = Storage::of(&file.as_file().metadata().unwrap());
        let paths = [file.path().to_owned()];
        let part = |end_byte| [Leaf { storage, first_byte: 0, end_byte }];
        let reader = Conflict::Opened(file.path().to_owned());
        let all = claim(file.path(), Use::Read).unwrap();
        assert_eq!(all.len(), 1, "a reader of the file itself");
        let some = claim_storage(storage, &part(512), &paths, Use::Read).unwrap();
        assert_eq!(claim_storage(storage, &part(512), &paths, Use::Write).unwrap_err(), reader);
        drop(all);
        assert_eq!(claim_storage(storage, &part(u64::MAX), &paths, Use::Write).unwrap_err(), reader);
        drop(some);
        let writer = claim_storage(storage, &part(512), &paths, Use::Write).unwrap();
        assert!(claim(file.path(), Use::Read).is_err());
        drop(writer);
        assert!(claim(file.path(), Use::Read).is_ok());
    }

    #[test]
    fn names_of_the_kernel_are_paths() {
        let bare = |name: &str, kind| DeviceNode {
            number: DeviceNumber { major: 7, minor: 0 },
            name: name.to_owned(),
            kind,
            sectors: 8,
            id: None,
            members: Vec::new(),
            map: None,
            unknown: None,
        };
        let mut paths = Vec::new();
        add_paths(&bare("loop0", NodeKind::Loop { file: "/v".into(), offset_bytes: 0 }), &mut paths);
        add_paths(&bare("dm-3 (name)", NodeKind::DeviceMapper), &mut paths);
        add_paths(&bare("cciss!c0d0", NodeKind::Disk), &mut paths);
        assert_eq!(paths, ["/dev/loop0", "/v", "/dev/dm-3", "/dev/cciss/c0d0"].map(PathBuf::from));
        assert!(is_known(&bare("sda", NodeKind::Disk)));
        assert!(!is_known(&DeviceNode { unknown: Some("why".to_owned()), ..bare("dm-1", NodeKind::DeviceMapper) }));
    }
}
