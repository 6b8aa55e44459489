//! The engine on filesystems that `mkfs.btrfs` and the kernel made. What it commits is checked by our own check, by
//! `btrfs check`, and by the kernel, which mounts and scrubs it.
//!
//! Needs root, loop devices, `btrfs-progs` and the filesystem. Without these a test prints what is missing and is
//! skipped.

mod commits;
mod crash;
mod crash_data;
mod damages;
mod data;
mod data_concurrent;
mod data_errors;
mod data_faults;
mod disks;
mod drop;
mod faults;
mod faulty;
mod files;
mod full;
mod history;
mod items;
mod mounted;
mod names;
mod nosum;
mod recovered;
mod releases;
mod rounds;
mod rounds_model;
mod scan;
mod subvolumes;
mod tag_rules;
mod tagged_images;
mod tags;
mod tags_mirror;
mod tasks;
mod verified_tags;
mod workload;
mod zeroes;

use std::path::PathBuf;

use futures_executor::block_on;
use sealblock_block::DynDevice;
use sealblock_btrfs::check::{CheckOptions, check};
use sealblock_btrfs::verify::Unwatched;
use sealblock_btrfs::{Candidate, Filesystem, FsError, OpenOptions};
use sealblock_proofs_btrfs_images::programs::{Mount, run};
use sealblock_recorder::Image;
use sealblock_units::BlockSize;

/// As much of a load as is run: a quarter, and all of it if `SEALBLOCK_ENGINE` is `all`.
fn share(steps: usize) -> usize {
    let is_all = std::env::var_os("SEALBLOCK_ENGINE").is_some_and(|load| load == "all");
    if is_all { steps } else { steps.div_ceil(4) }
}

/// The images of devices, for devices that record what they see.
fn images_of(disks: &disks::Disks) -> Vec<Image> {
    let load = |path: &PathBuf| Image::load(path, BlockSize::B4096).expect("an image that was just made");
    disks.images.iter().map(load).collect()
}

/// Opens the filesystem on devices.
fn open_devices(devices: impl IntoIterator<Item = DynDevice>) -> Result<Filesystem, FsError> {
    let devices = devices.into_iter().map(tagged_images::with_tags);
    let candidates = devices.map(|device| Candidate { name: device.name().into(), device });
    block_on(Filesystem::open(candidates.collect(), OpenOptions::default()))
}

/// What our own check finds.
fn findings(filesystem: &Filesystem) -> Vec<String> {
    let report = block_on(check(filesystem, CheckOptions::default(), &Unwatched));
    report.findings.iter().map(ToString::to_string).collect()
}

/// The kernel reads all copies of a mounted filesystem, and finds nothing.
fn assert_scrubbed(mount: &Mount) {
    let scrubbed = run("btrfs", ["scrub", "start", "-B", mount.path("").to_str().unwrap()]).unwrap();
    assert!(scrubbed.contains("no errors found"), "{scrubbed}");
}
