//! Files of a btrfs, by its back references: no file is looked into.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use sealblock_runtime_ioctl::btrfs::{self, Reference};

use super::chunk_map::{Meaning, meaning};
use super::found::{Owners, Wanted};
use crate::kernel::DeviceNumber;
use crate::kernel::mounts::{Mount, mounts};

/// Bytes that are looked up at once: the smallest block of a btrfs.
const STEP: u64 = 4096;

/// Where blocks are on a device of the file system.
type On<'a> = &'a dyn Fn(DeviceNumber) -> io::Result<Option<Wanted>>;

/// Asks a mounted file system. Returns false if it does not lie on the device.
pub(super) fn ask(mount: &Mount, on: On<'_>, owners: &mut Owners, stop: &dyn Fn() -> bool) -> io::Result<bool> {
    // Whether it has to do with the device at all is told to everybody; the rest needs CAP_SYS_ADMIN.
    let (mounted, mut wanted) = (File::open(&mount.point)?, Vec::new());
    for (number, path) in btrfs::devices(mounted.as_fd())? {
        let Ok(about) = fs::metadata(PathBuf::from(OsString::from_vec(path))) else { continue };
        if let Some(on_device) = on(DeviceNumber::from_raw(about.rdev()))? {
            wanted.push((number, on_device));
        }
    }
    if wanted.is_empty() {
        return Ok(false);
    }
    let chunks = btrfs::chunks(mounted.as_fd())?;
    let names = Names::of(mount, &mounted)?;
    for (device, wanted) in wanted {
        for (start, length, block) in wanted.places {
            if stop() {
                return Err(io::Error::other("the search was interrupted"));
            }
            for byte in (start..start.saturating_add(length)).step_by(STEP as usize) {
                let logical = match meaning(&chunks, device, byte) {
                    Meaning::Data(logical) => logical,
                    Meaning::NoFile => continue,
                    Meaning::Unknown => return Err(io::Error::other("its data has parity (RAID5, RAID6)")),
                };
                let (found, are_more) = btrfs::inodes(mounted.as_fd(), logical)?;
                if are_more {
                    owners.note("a block used by many files has only some of them listed".to_owned());
                }
                for reference in found {
                    // One that was deleted meanwhile has no path.
                    if let Some(path) = names.path(&mounted, reference) {
                        owners.add(block, &path, reference.offset_bytes);
                    }
                }
            }
        }
    }
    Ok(true)
}

/// Where subvolumes are mounted.
struct Names {
    point: PathBuf,
    mounted: Vec<(u64, PathBuf)>,
}

impl Names {
    fn of(mount: &Mount, open: &File) -> io::Result<Names> {
        let own = btrfs::subvolume(open.as_fd())?;
        let others = mounts().into_iter().filter(|other| other.number == mount.number).filter_map(|other| {
            let number = other.option("subvolid")?.parse().ok()?;
            // A mount of a part of a subvolume would begin elsewhere than its paths do.
            let is_whole = other.option("subvol").is_some_and(|whole| other.root.as_os_str() == whole);
            is_whole.then_some((number, other.point))
        });
        let mut mounted: Vec<(u64, PathBuf)> = others.collect();
        if mounted.is_empty() {
            mounted.push((own, mount.point.clone()));
        }
        Ok(Names { point: mount.point.clone(), mounted })
    }

    fn path(&self, open: &File, reference: Reference) -> Option<PathBuf> {
        let within = btrfs::path(open.as_fd(), reference.subvolume, reference.inode).ok()?;
        let within = PathBuf::from(OsString::from_vec(within));
        match self.mounted.iter().find(|(number, _)| *number == reference.subvolume) {
            Some((_, point)) => Some(point.join(within)),
            // It is not mounted by itself: a snapshot, say.
            None => Some(self.point.join(format!("<subvolume {}>", reference.subvolume)).join(within)),
        }
    }
}
