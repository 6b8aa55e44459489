//! `fs check`: of an image that is consistent, of one that is not, of one with a log, and of what grew from a seed.

use sealblock_btrfs_format::checksum::ChecksumType;
use sealblock_btrfs_format::superblock::{COPY_OFFSETS, SUPERBLOCK_BYTES};
use sealblock_proofs_btrfs_images::changes::{grow, make_seed};
use sealblock_proofs_btrfs_images::programs::mkfs;
use sealblock_proofs_btrfs_images::{has_mkfs, has_mounts};

use crate::common::{Place, skipped};

/// A place with a filesystem in `disk`. None where none can be made.
fn place_with_image() -> Option<Place> {
    if !has_mkfs() {
        return None;
    }
    let place = Place::new();
    let made = mkfs(&[place.path("disk")], 256, &[]);
    made.map_err(|why| eprintln!("skipped: {why}")).ok().map(|()| place)
}

/// Where a superblock has the used bytes, and the address of the log.
const BYTES_USED: usize = 120;
const LOG_ROOT: usize = 96;

/// Changes a byte of both superblocks of the image.
fn change(place: &Place, at: usize, value: u8) {
    for offset in &COPY_OFFSETS[..2] {
        let start = *offset as usize;
        let mut superblock = place.read("disk")[start..start + SUPERBLOCK_BYTES].to_vec();
        superblock[at] = value;
        ChecksumType::Crc32c.seal(&mut superblock);
        place.poke("disk", *offset, &superblock);
    }
}

#[test]
fn a_consistent_filesystem_is_clean_and_an_inconsistent_one_is_told() {
    let Some(place) = place_with_image() else { return };
    place.run("fs check disk").succeeds().says(&["disk: clean; ", " nodes, ", " extents, "]);
    assert_eq!(place.run("fs check disk --quiet").succeeds().text(), "");
    let report = place.run("fs check disk --json").succeeds().json();
    assert_eq!((&report["verdict"], &report["interrupted"]), (&"clean".into(), &false.into()));
    assert!(report["nodes"].as_u64().unwrap() > 5 && report["findings"].as_array().unwrap().is_empty(), "{report}");

    change(&place, BYTES_USED + 4, 1);
    place.run("fs check disk").ends_with(1).says(&["the superblock counts ", "disk: 1 inconsistency; "]);
    let report = place.run("fs check disk --json").ends_with(1).json();
    assert_eq!((&report["verdict"], &report["findings"][0]["rule"]), (&"inconsistent".into(), &"bytes_used".into()));
    place.run("fs check disk/file").ends_with(1);
    place.run("fs check absent").fails(2, &["absent"]);
}

#[test]
fn a_log_tree_is_not_checked() {
    let Some(place) = place_with_image() else { return };
    change(&place, LOG_ROOT + 2, 1);
    place.run("fs check disk").ends_with(4).says(&["not checked: the log", "disk: incomplete; "]);
    let report = place.run("fs check disk --json").ends_with(4).json();
    assert_eq!((&report["verdict"], &report["not_checked"][0]["reason"]), (&"incomplete".into(), &"log_tree".into()));
    // With a finding, what was not checked does not decide the status.
    change(&place, BYTES_USED + 4, 1);
    let report = place.run("fs check disk --json").ends_with(1).json();
    assert_eq!((&report["verdict"], &report["not_checked"][0]["reason"]), (&"inconsistent".into(), &"log_tree".into()));
}

/// What grew from a seed is neither called damaged nor clean, and is not changed.
#[test]
fn a_seed_is_not_checked_with_what_grew_from_it() {
    let Some(place) = place_with_image() else { return };
    if let Err(why) = has_mounts() {
        return skipped(&why);
    }
    make_seed(&place.path("disk")).unwrap();
    grow(&place.path("disk"), &place.path("added"), 256).unwrap();
    place.run("fs check disk").succeeds();
    place.run("fs check added").ends_with(4).says(&["not checked: a seed device", "added: incomplete; "]);
    place.run("fs mkdir added/a").fails(3, &["it grew from a seed, device 1"]);
}
