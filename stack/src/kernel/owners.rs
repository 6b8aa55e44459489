//! Which files have the bytes at addresses of a block device.
//!
//! Mounted file systems are asked, those that lie on the device, at any depth (`below.rs`): ext2, ext3, ext4 and xfs file by file for their extents
//! (`walk.rs`), btrfs for back references (`back_references.rs`). A block without a file is free space, metadata, or of a file that was not found:
//! one below another mount point, one that was deleted and is open, or one that changed meanwhile. Nothing is written.

mod back_references;
mod chunk_map;
mod found;
mod walk;

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::kernel::DeviceNumber;
use crate::kernel::below::{SECTOR_BYTES, Sectors, node};
use crate::kernel::mounts::{Mount, mount_of, mounts};
use found::Wanted;

pub use found::{FilePlace, MAX_FILES, Owners};

/// Max. blocks that are looked for at once.
pub const MAX_BLOCKS: usize = 1 << 16;
/// Max. runs that a block lies in on another device.
const MAX_RUNS: usize = 64;

/// Finds the files that use blocks of this size at these byte addresses of the device at `path`, until `stop` returns true.
///
/// # Errors
/// If the content of the device is unknown.
pub fn find(path: &Path, starts: &[u64], block_bytes: u64, stop: &dyn Fn() -> bool) -> io::Result<Owners> {
    let device = DeviceNumber::from_raw(fs::metadata(path)?.rdev());
    let mut owners = Owners { of_blocks: vec![Vec::new(); starts.len()], ..Owners::default() };
    if starts.len() > MAX_BLOCKS {
        owners.note(format!("only the first {MAX_BLOCKS} blocks were searched for"));
    }
    let starts = &starts[..starts.len().min(MAX_BLOCKS)];
    for mount in one_of_each(mounts()) {
        if stop() {
            owners.note("the search was interrupted".to_owned());
            break;
        }
        ask(&mount, device, starts, block_bytes, &mut owners, stop);
    }
    Ok(owners)
}

fn ask(
    mount: &Mount,
    device: DeviceNumber,
    starts: &[u64],
    block_bytes: u64,
    owners: &mut Owners,
    stop: &dyn Fn() -> bool,
) {
    // What is mounted over it would be walked in its place.
    let is_hidden = mount_of(&mount.point).is_none_or(|seen| seen.number != mount.number);
    let hidden = || Err(io::Error::other("another file system is mounted over it"));
    let on = |number| wanted_on(number, device, starts, block_bytes);
    let asked = match mount.kind.as_str() {
        "ext2" | "ext3" | "ext4" | "xfs" => match on(mount.number) {
            Ok(None) => return,
            Ok(Some(_)) if mount.option("rtdev").is_some() => {
                Err(io::Error::other("files may lie on its realtime device"))
            }
            Ok(Some(_)) if is_hidden => hidden(),
            Ok(Some(wanted)) => walk::walk(&mount.point, &wanted, owners, stop),
            Err(error) => Err(error),
        },
        "btrfs" if is_hidden => hidden(),
        "btrfs" => match back_references::ask(mount, &on, owners, stop) {
            Ok(false) => return,
            asked => asked.map(drop),
        },
        // Any other file system on the device cannot be searched.
        kind => match on(mount.number) {
            Ok(Some(_)) => Err(io::Error::other(format!("{kind} does not show which file uses a block"))),
            Ok(None) | Err(_) => return,
        },
    };
    owners.was_asked = true;
    if let Err(error) = asked {
        owners.note(format!("files on {}: {error}", mount.point.display()));
    }
}

/// Maps blocks of `device` to a device above it; nothing if that is not above it.
fn wanted_on(
    number: DeviceNumber,
    device: DeviceNumber,
    starts: &[u64],
    block_bytes: u64,
) -> io::Result<Option<Wanted>> {
    if !number.is_device() {
        return Ok(None);
    }
    let node = node(number)?;
    if !node.lies_on(device) {
        return Ok(None);
    }
    let mut places = Vec::with_capacity(starts.len());
    for (block, start) in starts.iter().enumerate() {
        let sectors = Sectors::new(start / SECTOR_BYTES, block_bytes / SECTOR_BYTES);
        let runs = node.up_from(device, sectors, MAX_RUNS).into_iter();
        places.extend(
            runs.filter_map(|run| Some((run.start.checked_mul(SECTOR_BYTES)?, run.count * SECTOR_BYTES, block))),
        );
    }
    match &node.unknown {
        // A device above it with an unknown mapping may have any of its blocks.
        Some(why) if places.is_empty() => Err(io::Error::other(format!("{}: {why}", node.name))),
        _ => Ok(Some(Wanted::new(places))),
    }
}

/// One mount of each file system: of all of it where there is one, since others show a part. Of btrfs each subvolume is one.
fn one_of_each(mounts: Vec<Mount>) -> Vec<Mount> {
    let mut chosen: Vec<Mount> = Vec::new();
    for mount in mounts {
        let same = |other: &&mut Mount| other.number == mount.number && other.kind == mount.kind;
        match chosen.iter_mut().find(same) {
            Some(other) if mount.root.as_os_str().len() < other.root.as_os_str().len() => *other = mount,
            Some(_) => {}
            None => chosen.push(mount),
        }
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_several_mounts_of_one_file_system_that_of_all_of_it_is_asked() {
        let mount = |number: &str, root: &str, point: &str| Mount {
            number: number.parse().unwrap(),
            root: root.into(),
            point: point.into(),
            kind: "ext4".to_owned(),
            source: "/dev/x".into(),
            options: String::new(),
        };
        let mounts = vec![
            mount("8:1", "/part", "/a"),
            mount("8:1", "/", "/b"),
            mount("8:2", "/", "/c"),
            mount("8:1", "/", "/d"),
        ];
        let points: Vec<_> = one_of_each(mounts).into_iter().map(|mount| mount.point).collect();
        assert_eq!(points, [Path::new("/b"), Path::new("/c")]);
    }
}
