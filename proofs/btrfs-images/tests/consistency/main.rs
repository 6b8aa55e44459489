//! The consistency check finds nothing in filesystems that the kernel made, whatever their format, profile and content,
//! and `btrfs check` agrees.
//!
//! Needs root, loop devices, `btrfs-progs` and the filesystem. Without these the test prints what is missing and is
//! skipped.

mod format;

use std::collections::BTreeSet;
use std::path::PathBuf;

use sealblock_btrfs::OpenOptions;
use sealblock_btrfs::check::{CheckOptions, Report, WhyNotChecked, check};
use sealblock_btrfs::verify::Unwatched;
use sealblock_proofs_btrfs_images::programs::{Loops, run};
use sealblock_proofs_btrfs_images::sets::{self, Fill};
use sealblock_proofs_btrfs_images::{has_mounts, skip};
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

#[test]
fn filesystems_of_the_kernel_are_consistent() {
    if let Err(why) = has_mounts() {
        return skip(&why);
    }
    let folder = tempfile::tempdir().unwrap();
    let mut wrong = Vec::new();
    for recipe in sets::chosen() {
        let made = match recipe.make(folder.path()) {
            Ok(made) => made,
            Err(why) => {
                skip(&why);
                continue;
            }
        };
        let report = checked(&made.images);
        let expected = match recipe.fill {
            Fill::Log => BTreeSet::from([WhyNotChecked::LogTree]),
            _ => BTreeSet::new(),
        };
        let name = &recipe.name;
        if report.finding_count > 0 || report.not_checked != expected {
            let findings: Vec<String> = report.findings.iter().take(5).map(ToString::to_string).collect();
            let count = report.finding_count;
            wrong.push(format!("{name}: {count} findings, not checked {:?}: {findings:#?}", report.not_checked));
        }
        if let Some(why) = program_error(&made.images, "original") {
            eprintln!("{name}: btrfs check: {why}");
        }
        assert!(report.nodes > 8 && report.extents > 8 && report.references > 8 && report.inodes > 0, "{name}");
        made.images.iter().for_each(|image| std::fs::remove_file(image).unwrap());
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
