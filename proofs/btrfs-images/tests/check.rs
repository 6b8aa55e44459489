//! The consistency check finds nothing in filesystems that the kernel made, whatever their format, profile and content,
//! and `btrfs check` agrees.
//!
//! Needs root, loop devices, `btrfs-progs` and the filesystem. Without these the test prints what is missing and is
//! skipped.

mod consistency;

use std::collections::BTreeSet;

use sealblock_btrfs::check::WhyNotChecked;
use sealblock_proofs_btrfs_images::sets::{self, Fill};
use sealblock_proofs_btrfs_images::{has_mounts, skip};

use consistency::{checked, program_error};

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
