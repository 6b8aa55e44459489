//! The consistency of a filesystem in images, as this project and `btrfs check` see it.

use std::path::PathBuf;

use sealblock_btrfs::OpenOptions;
use sealblock_btrfs::check::{CheckOptions, Report, check};
use sealblock_btrfs::verify::Unwatched;
use sealblock_proofs_btrfs_images::programs::{Loops, run};
use sealblock_stack::filesystem::{FilesystemName, Start};
use sealblock_stack::on_reactor;
use sealblock_stack::target::TargetName;

/// What this project finds.
pub fn checked(images: &[PathBuf]) -> Report {
    let targets = images.iter().map(|image| TargetName::File(image.clone())).collect();
    let name = FilesystemName { targets, start: Start::Default, path: Vec::new(), has_place: false };
    let report = on_reactor(async {
        let open = name.open(OpenOptions::default()).await?;
        open.close_after(async |open| Ok(check(&open.filesystem, CheckOptions::default(), &Unwatched).await)).await
    });
    report.unwrap()
}

/// What `btrfs check` finds in one of its modes, `original` or `lowmem`, if it is an error.
pub fn program_error(images: &[PathBuf], mode: &str) -> Option<String> {
    let loops = Loops::attach(images, true).unwrap();
    run("btrfs", ["check", "--readonly", "--mode", mode, &loops.devices()[0]]).err()
}
