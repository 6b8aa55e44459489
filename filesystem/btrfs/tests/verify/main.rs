//! Verification of filesystems that the kernel made: intact ones are clean, and for damaged ones exactly the damaged
//! copies are reported, with the files that use them.
//!
//! Needs root, loop devices, `mkfs.btrfs` and the filesystem. Without these the tests print what is missing and are
//! skipped.

mod damage;
mod images;
mod offload;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use sealblock_btrfs::verify::{DataFault, Finding, Report, Unwatched, Verdict, VerifyOptions, WhyUnchecked, verify};
use sealblock_btrfs::{CopyFault, Filesystem, Place};

use images::{Devices, Random, SECTOR, SectorCopy, Setup, content, make, now};

/// Files that begin at sector borders, with their sizes.
pub const FILES: [(u64, &str, usize); 4] =
    [(1, "large", 3 << 20), (2, "odd", 777_777), (3, "folder/deep", 64 << 10), (4, "sector", SECTOR)];

/// Fills a filesystem: files whose sectors have their offsets, a second name, and inline files.
pub fn fill(point: &Path) {
    fs::create_dir_all(point.join("folder")).unwrap();
    for (number, name, bytes) in FILES {
        fs::write(point.join(name), content(number, bytes)).unwrap();
    }
    fs::hard_link(point.join("sector"), point.join("folder/sector-too")).unwrap();
    (0..300).for_each(|number| fs::write(point.join(format!("inline-{number}")), [b'i'; 500]).unwrap());
}

/// The report of a verification of everything.
pub fn checked(fs: &Filesystem) -> Report {
    now(verify(fs, VerifyOptions::default(), &Unwatched)).unwrap()
}

/// The name of a file.
pub fn name_of(file: u64) -> &'static str {
    FILES.iter().find(|(number, ..)| *number == file).unwrap().1
}

/// The damaged copies of data in a report, each with its only file; the report must contain nothing else.
pub fn sectors_of(report: &Report) -> BTreeSet<(u64, u64, String, u64)> {
    let of = |finding: &Finding| {
        let Finding::Data(data) = finding else { panic!("{finding}") };
        let DataFault::Copy { copy, .. } = &data.fault else { panic!("{finding}") };
        assert!(matches!(copy.fault, CopyFault::Checksum(_)), "{finding}");
        assert_eq!((data.bytes, data.uses.files.len(), data.uses.more), (SECTOR as u64, 1, 0), "{finding}");
        let file = &data.uses.files[0];
        assert_eq!((file.subvolume, file.subvolume_path.as_deref()), (5, Some(&b""[..])));
        let path = String::from_utf8(file.paths.last().unwrap()[1..].to_vec()).unwrap();
        (copy.place.devid, copy.place.offset, path, file.offset)
    };
    assert_eq!(report.damage_count, report.findings.len() as u64);
    report.findings.iter().map(of).collect()
}

/// Requires a report without findings, and with everything checked.
pub fn assert_clean(report: &Report, what: &str) {
    assert!(report.findings.is_empty(), "{what}: {}", report.findings[0]);
    assert_eq!((report.verdict(), report.damage_count), (Verdict::Clean, 0), "{what}: {:?}", report.unchecked);
}

/// The place of every copy of every node in use.
fn nodes_of(fs: &Filesystem) -> Vec<Place> {
    let (trees, lost) = now(fs.trees());
    assert!(lost.is_empty());
    let (mut pending, mut nodes) = (trees.iter().map(|tree| tree.expected()).collect::<Vec<_>>(), BTreeSet::new());
    while let Some(expected) = pending.pop() {
        let node = now(fs.nodes().load(&expected)).unwrap();
        nodes.insert(expected.bytenr);
        pending.extend((0..node.view().pointers().len()).filter_map(|slot| node.child(slot, expected.owner)));
    }
    let map = &fs.storage().map;
    nodes.into_iter().flat_map(|bytenr| map.locate(bytenr, 16_384).unwrap().copies).collect()
}

/// Damages random sectors, and sometimes a copy of a node, and requires that the report contains exactly these.
fn damage_and_compare(devices: &Devices, what: &str, seeds: std::ops::Range<u64>, is_restorable: bool) {
    let nodes = nodes_of(&devices.open());
    for seed in seeds {
        let mut random = Random::new(seed + 1);
        let count = 1 + random.below(5);
        let mut damaged: BTreeSet<SectorCopy> =
            (0..count).map(|_| devices.sectors[random.below(devices.sectors.len())]).collect();
        // Sometimes all copies of a sector.
        if random.below(2) == 0 {
            let one = *damaged.first().unwrap();
            damaged.extend(devices.sectors.iter().filter(|other| (other.file, other.offset) == (one.file, one.offset)));
        }
        let node = nodes[random.below(nodes.len())];
        let of_node: Vec<Place> = [node].into_iter().take(random.below(2)).collect();
        let flip = || {
            damaged.iter().for_each(|copy| devices.damage(copy.devid, copy.place + (seed * 7919) % SECTOR as u64));
            of_node.iter().for_each(|place| devices.damage(place.devid, place.offset + (seed * 7919) % 16_384));
        };
        flip();
        let mut report = checked(&devices.open());
        flip();

        let is_node = |finding: &mut Finding| matches!(finding, Finding::Node { .. });
        let of_nodes: Vec<Finding> = report.findings.extract_if(.., is_node).collect();
        report.damage_count -= of_nodes.len() as u64;
        let places: Vec<Place> = of_nodes.iter().map(place_of_node).collect();
        assert_eq!(places, of_node, "{what}, seed {seed}");
        let expected: BTreeSet<_> =
            damaged.iter().map(|copy| (copy.devid, copy.place, name_of(copy.file).to_owned(), copy.offset)).collect();
        assert_eq!(sectors_of(&report), expected, "{what}, seed {seed}");
        assert_eq!(report.verdict(), Verdict::Damaged);
        if !is_restorable {
            report.findings.iter().for_each(|finding| compare_loss(devices, &damaged, finding));
        }
    }
}

fn place_of_node(finding: &Finding) -> Place {
    let Finding::Node { copy, .. } = finding else { panic!("{finding}") };
    copy.place
}

/// Requires that data are lost exactly where all copies are damaged.
fn compare_loss(devices: &Devices, damaged: &BTreeSet<SectorCopy>, finding: &Finding) {
    let Finding::Data(data) = finding else { panic!("{finding}") };
    let DataFault::Copy { is_lost, .. } = data.fault else { panic!("{finding}") };
    let file = &data.uses.files[0];
    let path = &file.paths.last().unwrap()[1..];
    let is_copy = |copy: &&SectorCopy| (name_of(copy.file).as_bytes(), copy.offset) == (path, file.offset);
    let mut copies = devices.sectors.iter().filter(is_copy);
    assert_eq!(is_lost, copies.all(|copy| damaged.contains(copy)), "{finding}");
}

fn whole_sectors() -> usize {
    FILES.iter().map(|(_, _, bytes)| bytes / SECTOR).sum()
}

#[test]
fn exactly_the_sectors_that_are_damaged_are_named_in_every_profile() {
    for (setup, copies) in [
        (Setup::SINGLE, 1),
        (Setup { data: "dup", ..Setup::SINGLE }, 2),
        (Setup::MIRRORED, 2),
        (Setup { data: "raid0", devices: 3, ..Setup::MIRRORED }, 1),
        (Setup { data: "raid10", metadata: "raid10", devices: 4, ..Setup::MIRRORED }, 2),
        (Setup { data: "raid1c3", metadata: "raid1c3", devices: 3, ..Setup::MIRRORED }, 3),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let Some(images) = make(folder.path(), setup, fill) else { continue };
        let devices = Devices::load(&images, None);
        assert_eq!(devices.sectors.len(), copies * whole_sectors(), "{}", setup.data);
        let report = checked(&devices.open());
        assert_clean(&report, setup.data);
        let data: usize = FILES.iter().map(|(_, _, bytes)| copies * bytes.next_multiple_of(SECTOR)).sum();
        assert!(report.bytes_verified >= data as u64 + report.nodes_verified * 2 * 16_384);
        assert!(!report.is_offloaded && report.bytes_transferred >= report.bytes_verified);
        damage_and_compare(&devices, setup.data, 0..30, false);
    }
}

#[test]
fn every_checksum_finds_damage() {
    for checksum in ["xxhash", "sha256", "blake2"] {
        let folder = tempfile::tempdir().unwrap();
        let Some(images) = make(folder.path(), Setup { checksum, ..Setup::SINGLE }, fill) else { continue };
        let devices = Devices::load(&images, None);
        assert_clean(&checked(&devices.open()), checksum);
        damage_and_compare(&devices, checksum, 0..10, false);
    }
}

#[test]
fn parity_that_does_not_fit_is_named_and_damaged_data_are_told_from_it() {
    for (data, devices, parities) in [("raid5", 3, 1), ("raid6", 4, 2)] {
        let folder = tempfile::tempdir().unwrap();
        let setup = Setup { data, metadata: data, devices, ..Setup::MIRRORED };
        let Some(images) = make(folder.path(), setup, fill) else { continue };
        let mut devices = Devices::load(&images, None);
        assert_clean(&checked(&devices.open()), data);
        // If the rest of a row is zero, parity equals the data, so such sectors are skipped.
        let of_file = |one: &SectorCopy, other: &SectorCopy| (one.file, one.offset) == (other.file, other.offset);
        let all = devices.sectors.clone();
        devices.sectors.retain(|one| all.iter().filter(|other| of_file(one, other)).count() == 1);
        assert!(devices.sectors.len() > whole_sectors() * 3 / 4);
        damage_and_compare(&devices, data, 0..15, true);

        // A row that is in use has its parity at the same offset as its data, on another device.
        let fs = devices.open();
        let address = now(fs.sums(0, u64::MAX)).unwrap()[0].logical;
        let row = fs.storage().map.locate(address, SECTOR as u64).unwrap().row.unwrap();
        let places: Vec<_> = row.pieces[row.pieces.len() - parities..].to_vec();
        for (role, place) in places {
            devices.damage(place.devid, place.offset + 5);
            let report = checked(&devices.open());
            devices.damage(place.devid, place.offset + 5);
            let [Finding::Parity { role: found, place: at, bytes: 4096, fault: None, .. }] = &report.findings[..]
            else {
                panic!("{data}: {:?}", report.findings);
            };
            assert_eq!((*found, *at), (role, place));
        }
        let report = checked(&devices.open_without(&[2]));
        assert!(report.findings.is_empty(), "{:?}", report.findings);
        assert!(report.unchecked.contains_key(&WhyUnchecked::MissingDevice));
    }
}
