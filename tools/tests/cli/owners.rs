//! Damaged blocks of a block device are told with their files. Needs root for loop devices and mounts; skipped visibly without.
//!
//! The kernel gives a loop device no bad blocks; the fault layer in front of it does, at the places that `FIEMAP` tells of files.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::devices::{Loop, Mount, system};
use crate::common::{BLOCK, Place, noise, skipped};
use serde_json::Value;

/// Bytes of the disks: xfs takes none below 300 MiB.
const DISK_BYTES: u64 = 512 << 20;
const SECTOR: usize = 512;

/// A file system of this kind on a loop device.
fn made(place: &Place, kind: &str) -> Option<(Mount, Loop)> {
    place.write("disk", b"");
    place.set_len("disk", DISK_BYTES);
    let disk = place.path("disk");
    let force = if kind == "ext4" { "-F" } else { "-f" };
    if !system(&format!("mkfs.{kind}"), &["-q", force, disk.to_str().unwrap()]) {
        skipped(&format!("there is no mkfs.{kind} here"));
        return None;
    }
    let device = Loop::new(&disk, &[])?;
    let mount = Mount::new(place.path("mnt"), &["-t", kind, &device.0])?;
    Some((mount, device))
}

/// A file that is on the disk, not only in memory.
fn file(path: &Path, bytes: &[u8]) {
    let mut file = fs::File::create(path).unwrap();
    file.write_all(bytes).unwrap();
    file.sync_all().unwrap();
}

/// The sector of the device that has the first of these bytes, which are nowhere else. File systems may have small blocks.
fn sector_of(device: &str, needle: &[u8]) -> u64 {
    Command::new("sync").status().unwrap();
    let disk = fs::read(device).unwrap();
    let found = disk.chunks(SECTOR).position(|sector| sector == &needle[..SECTOR]);
    found.unwrap_or_else(|| panic!("{device} does not have the file")) as u64
}

fn files(report: &Value, lba: u64) -> Vec<(PathBuf, u64)> {
    let errors = report["errors"].as_array().unwrap();
    let error = errors.iter().find(|error| error["lba"] == lba).unwrap_or_else(|| panic!("{lba}: {report}"));
    let files = error["files"].as_array().unwrap_or_else(|| panic!("{report}"));
    files.iter().map(|file| (file["path"].as_str().unwrap().into(), file["offset"].as_u64().unwrap())).collect()
}

/// Damages a block of one file, one of another and one of none, and looks for them.
fn look_for_files(kind: &str) {
    let place = Place::new();
    let Some((mount, device)) = made(&place, kind) else { return };
    let (first, second) = (noise(21, 64 * BLOCK), noise(22, 16 * BLOCK));
    let folder = mount.0.join("a/folder with spaces");
    fs::create_dir_all(&folder).unwrap();
    file(&folder.join("first"), &first);
    file(&mount.0.join("second"), &second);
    let in_first = sector_of(&device.0, &first[8 * BLOCK..]);
    let in_second = sector_of(&device.0, &second);
    // The last block of the disk has no file: there is little on it.
    let (free, bs) = (DISK_BYTES / SECTOR as u64 - 16, BLOCK as u64);
    let block_size = place.run(&format!("info {} --json", device.0)).succeeds().json()["block_size"].as_u64().unwrap();
    let lba = |sector: u64| sector * SECTOR as u64 / block_size;
    let rules = [in_first, in_second, free].map(|block| format!("read-error@{}", lba(block))).join(";");
    let target = format!("fault:[{rules}],{}", device.0);

    let report = place.run(&format!("verify {target} --json")).ends_with(1).json();
    assert_eq!(files(&report, lba(in_first)), [(folder.join("first"), 8 * bs)], "{kind}");
    assert_eq!(files(&report, lba(in_second)), [(mount.0.join("second"), 0)], "{kind}");
    assert_eq!(files(&report, lba(free)), [], "{kind}");

    let text = place.run(&format!("verify {target}")).ends_with(1).text();
    let place_in_first = format!("block {}: {} at byte {}\n", lba(in_first), folder.join("first").display(), 8 * bs);
    let nowhere = format!("block {}: free space, metadata, or a file that was not found\n", lba(free));
    assert!(text.contains(&place_in_first) && text.contains(&nowhere), "{kind}: {text}");

    // A file on it lies on the device, and the load of the device is that of the file.
    let volume = mount.0.join("v").display().to_string();
    place.run(&format!("create {volume} --size 1MiB")).succeeds();
    let info = place.run(&format!("info {volume} --json")).succeeds().json();
    let name = device.0.trim_start_matches("/dev/");
    assert_eq!(
        info["file"]["lies_on"].as_array().map(|nodes| (nodes.len(), &nodes[0]["name"])),
        Some((1, &name.into()))
    );
    place.run(&format!("verify {volume} --idle")).succeeds();

    // What is mounted over a file system hides its files, and is not taken for it.
    let Some(_over) = Mount::new(mount.0.clone(), &["-t", "tmpfs", "none"]) else { return };
    fs::write(mount.0.join("second"), &second).unwrap();
    let report = place.run(&format!("verify {target} --json")).ends_with(1).json();
    assert_eq!(files(&report, lba(in_second)), [], "{kind}");
    assert!(report["files_notes"].to_string().contains("mounted over it"), "{kind}: {report}");
}

#[test]
fn damaged_blocks_of_ext4_are_told_with_their_files() {
    look_for_files("ext4");
}

#[test]
fn damaged_blocks_of_xfs_are_told_with_their_files() {
    look_for_files("xfs");
}

#[test]
fn damaged_blocks_of_btrfs_are_told_with_their_files() {
    look_for_files("btrfs");
}

#[test]
fn a_file_is_its_own_and_a_device_without_a_file_system_has_none() {
    let place = Place::new();
    place.write("plain", &noise(1, 16 * BLOCK));
    place.run("create v --size 1MiB").succeeds();
    place.write("data", &noise(2, 1 << 20));
    place.run("copy data v").succeeds();
    place.run("corrupt v --lba 3 --kind data").succeeds();
    let report = place.run("verify v --json").ends_with(1).json();
    assert_eq!(report["errors"][0]["files"], serde_json::json!([{"path": "v", "offset": null}]));
    let report = place.run("verify fault:[read-error@5],raw:plain --json").ends_with(1).json();
    let block = place.run("info raw:plain --json").succeeds().json()["block_size"].as_u64().unwrap();
    assert_eq!(report["errors"][0]["files"], serde_json::json!([{"path": "plain", "offset": 5 * block}]));
    let report = place.run("verify offset:2..9,fault:[read-error@5],raw:plain --json").ends_with(1).json();
    assert_eq!(
        (&report["errors"][0]["lba"], &report["errors"][0]["files"][0]["offset"]),
        (&3.into(), &(5 * block).into())
    );
    assert_eq!(
        place.run("verify fault:[read-error@5],mem:1MiB --json").ends_with(1).json()["errors"][0].get("files"),
        None
    );

    place.write("disk", &noise(3, 1 << 20));
    let Some(device) = Loop::new(&place.path("disk"), &[]) else { return };
    let report = place.run(&format!("verify fault:[read-error@5],{} --json", device.0)).ends_with(1).json();
    assert_eq!(files(&report, 5), []);
    assert!(report["files_notes"][0].as_str().unwrap().contains("is mounted"), "{report}");
}

/// A file system on a device that lies on another one from sector `START` on: damage of either is of a file.
fn look_below(place: &Place, device: &str, part: &str, kind: &str) {
    if !system("mkfs.ext4", &["-q", "-F", part]) {
        return skipped("there is no mkfs.ext4 here");
    }
    let Some(mount) = Mount::new(place.path("mnt"), &["-t", "ext4", part]) else { return };
    let bytes = noise(23, 4 * BLOCK);
    file(&mount.0.join("f"), &bytes);
    let lba = sector_of(device, &bytes);
    for (target, lba) in [(device, lba), (part, lba - START)] {
        let report = place.run(&format!("verify fault:[read-error@{lba}],{target} --json")).ends_with(1).json();
        assert_eq!(files(&report, lba), [(mount.0.join("f"), 0)], "{target}");
    }
    let info = place.run(&format!("info {part} --json")).succeeds().json();
    let node = &info["file"]["lies_on"][0];
    assert_eq!((&node["kind"], &node["arrangement"]), (&kind.into(), &"linear".into()));
    let disk = place.path("disk").canonicalize().unwrap();
    assert_eq!((&node["bytes"], &node["members"][0]["kind"]), (&(DISK_BYTES - START * 512).into(), &"loop".into()));
    assert_eq!(node["members"][0]["loop_file"]["path"].as_str(), disk.to_str());
    let name = |device: &str| device.trim_start_matches("/dev/").to_owned();
    let over = format!("{}: loop over {}", name(device), disk.display());
    place.run(&format!("info {part}")).succeeds().says(&[&format!("{}: {kind} ", name(part)), &over]);
}

/// The first sector of what lies on the disk.
const START: u64 = 2048;

#[test]
fn a_damaged_block_of_a_disk_is_of_a_file_on_its_partition() {
    let place = Place::new();
    // A master boot record with one partition of Linux: a byte for its type, first sector and number of sectors.
    let mut table = vec![0; 512];
    table[450] = 0x83;
    table[454..458].copy_from_slice(&(START as u32).to_le_bytes());
    table[458..462].copy_from_slice(&((DISK_BYTES / 512 - START) as u32).to_le_bytes());
    table[510..].copy_from_slice(&[0x55, 0xaa]);
    place.write("disk", &table);
    place.set_len("disk", DISK_BYTES);
    let Some(device) = Loop::new(&place.path("disk"), &["--partscan"]) else { return };
    let part = format!("{}p1", device.0);
    if !Path::new(&part).exists() {
        return skipped("loop devices have no partitions here");
    }
    look_below(&place, &device.0, &part, "partition");
}

#[test]
fn a_damaged_block_of_a_device_is_of_a_file_on_the_loop_device_over_it() {
    let place = Place::new();
    place.write("disk", b"");
    place.set_len("disk", DISK_BYTES);
    let Some(device) = Loop::new(&place.path("disk"), &[]) else { return };
    let offset = (START * 512).to_string();
    let Some(part) = Loop::new(Path::new(&device.0), &["--offset", &offset]) else { return };
    look_below(&place, &device.0, &part.0, "loop");
}
