//! What needs a file system or a block device of one's own, and so root: a disk that is full, a mount that takes no
//! writes, a block device. Skipped, visibly, where they cannot be had.

use std::path::Path;

use crate::common::devices::{Loop, Mount, system};
use crate::common::{Place, noise, skipped};

/// Whether the kernel says that zeroing parts of a device gives their space back.
fn unmaps(device: &str) -> bool {
    let name = device.trim_start_matches("/dev/");
    let limit = std::fs::read_to_string(format!("/sys/block/{name}/queue/write_zeroes_unmap_max_bytes"));
    limit.is_ok_and(|limit| limit.trim() != "0")
}

/// Fills the file system to its last block.
fn fill(folder: &Path) {
    use std::io::Write;
    let mut file = std::fs::File::create(folder.join("filler")).unwrap();
    for size in [1 << 16, 4096, 512, 1] {
        while file.write_all(&vec![1; size]).is_ok() {}
    }
}

fn a_full_disk(place: &Place, mount: &Mount) {
    let (old, new) = (noise(1, 1 << 20), noise(2, 8 << 20));
    place.write("old", &old);
    place.write("new", &new);
    let v = format!("{}/v", mount.path());
    place.run(&format!("create {v} --size 8MiB")).succeeds();
    place.run(&format!("copy old {v}")).succeeds();
    std::fs::write(mount.0.join("spare"), noise(3, 1 << 20)).unwrap();

    // The disk is full somewhere in the middle of the write.
    let failed = place.run(&format!("copy new {v}"));
    failed.fails(3, &[&v, "o space left", "try:"]);
    place.run(&format!("verify {v}")).succeeds();
    let now = place.run(&format!("copy {v} -")).succeeds().stdout.clone();
    for (index, now) in now.chunks(4096).enumerate() {
        let range = index * 4096..(index + 1) * 4096;
        let before = old.get(range.clone()).map_or_else(|| now.iter().all(|byte| *byte == 0), |old| now == old);
        assert!(before || *now == new[range], "block {index} is neither old nor new");
    }

    // The disk is full from the first byte on: what is there can be read and verified, and written again as soon as there
    // is room.
    fill(&mount.0);
    let full = place.run(&format!("copy old {v}"));
    assert!(full.status == 0 || full.status == 3, "{}", full.stderr);
    place.run(&format!("verify {v}")).succeeds();
    // Whether blocks can be deallocated there depends on what the log holds; nothing else is lost either way.
    let discarded = place.run(&format!("discard {v} --range 256..1000"));
    if discarded.status != 0 {
        discarded.fails(3, &[&v, "o space left"]);
    }
    place.run(&format!("verify {v}")).succeeds();
    std::fs::remove_file(mount.0.join("filler")).unwrap();
    std::fs::remove_file(mount.0.join("spare")).unwrap();
    place.run(&format!("copy old {v}")).succeeds();
    assert!(place.blocks(&v, 0, 255) == old);
    place.run(&format!("verify {v}")).succeeds();
}

#[test]
fn a_full_tmpfs_loses_nothing() {
    let place = Place::new();
    let Some(mount) = Mount::new(place.path("mnt"), &["-t", "tmpfs", "-o", "size=6m", "none"]) else { return };
    a_full_disk(&place, &mount);
}

#[test]
fn a_full_ext4_loses_nothing() {
    let place = Place::new();
    place.write("disk", b"");
    place.set_len("disk", 8 << 20);
    if !system("mkfs.ext4", &["-q", "-m", "0", place.path("disk").to_str().unwrap()]) {
        return skipped("there is no mkfs.ext4 here");
    }
    let disk = place.path("disk");
    let Some(mount) = Mount::new(place.path("mnt"), &["-o", "loop", disk.to_str().unwrap()]) else { return };
    a_full_disk(&place, &mount);
}

#[test]
fn creating_on_a_full_disk_leaves_nothing_behind() {
    let place = Place::new();
    let Some(mount) = Mount::new(place.path("mnt"), &["-t", "tmpfs", "-o", "size=1m", "none"]) else { return };
    fill(&mount.0);
    place.run("create mnt/v --size 8MiB").fails(3, &["mnt/v", "o space left"]);
    assert!(!place.path("mnt/v").exists());
}

#[test]
fn a_mount_that_takes_no_writes_is_read() {
    let place = Place::new();
    let data = noise(1, 1 << 20);
    let Some(mount) = Mount::new(place.path("mnt"), &["-t", "tmpfs", "-o", "size=16m", "none"]) else { return };
    place.write("data", &data);
    place.run("create mnt/v --size 1MiB").succeeds();
    place.run("copy data mnt/v").succeeds();
    assert!(system("mount", &["-o", "remount,ro", mount.path()]));
    place.run("verify mnt/v").succeeds();
    assert!(place.blocks("mnt/v", 0, 255) == data);
    place.run("info mnt/v").succeeds();
    for command in ["copy data mnt/v", "zero mnt/v", "discard mnt/v", "corrupt mnt/v --lba 0 --kind data"] {
        place.run(command).fails(3, &["mnt/v", "ead-only file system"]);
    }
    place.run("create mnt/w --size 1MiB").fails(3, &["mnt/w", "ead-only file system"]);
    place.run("create mnt/v --size 1MiB --force").fails(3, &["mnt/v", "ead-only file system"]);
    assert!(place.blocks("mnt/v", 0, 255) == data);
}

#[test]
fn a_block_device_is_a_volume_like_any_other() {
    let place = Place::new();
    let data = noise(1, 2 << 20);
    place.write("data", &data);
    for sectors in ["512", "4096"] {
        place.write("disk", b"");
        place.set_len("disk", 24 << 20);
        let Some(device) = Loop::new(&place.path("disk"), &["--sector-size", sectors]) else { return };
        let device = &device.0;
        place.run(&format!("create {device} --size 64MiB")).fails(3, &[device, "bytes"]);
        place.run(&format!("create {device} --size 4MiB --guard crc64")).succeeds();
        place.run(&format!("create {device} --size 4MiB")).fails(3, &[device, "--force"]);
        place.run(&format!("copy data {device}")).succeeds();
        place.run(&format!("verify {device}")).succeeds();
        assert!(place.blocks(device, 0, 511) == data);
        let info = place.run(&format!("info {device} --json")).succeeds().json();
        assert_eq!((&info["kind"], &info["file"]["block_device"]), (&"protected volume".into(), &true.into()));
        for (lba, kind) in [(3, "data"), (70, "ref-tag"), (511, "lost-write")] {
            place.run(&format!("corrupt {device} --lba {lba} --kind {kind}")).succeeds();
        }
        let report = place.run(&format!("verify {device} --json")).ends_with(1).json();
        let found: Vec<_> = report["errors"].as_array().unwrap().iter().map(|error| error["lba"].as_u64()).collect();
        assert_eq!(found, [Some(3), Some(70), Some(511)]);
        let before = place.allocated_bytes("disk");
        place.run(&format!("discard {device} --yes")).succeeds();
        if unmaps(device) {
            assert!(place.allocated_bytes("disk") + (3 << 19) < before, "the file behind the device got smaller");
        }
        place.run(&format!("compare --zero {device}")).succeeds();
        place.run(&format!("verify {device}")).succeeds();
    }
}

#[test]
fn a_mounted_block_device_is_in_use() {
    let place = Place::new();
    place.write("disk", b"");
    place.set_len("disk", 8 << 20);
    if !system("mkfs.ext4", &["-q", place.path("disk").to_str().unwrap()]) {
        return skipped("there is no mkfs.ext4 here");
    }
    let Some(device) = Loop::new(&place.path("disk"), &[]) else { return };
    let Some(_mount) = Mount::new(place.path("mnt"), &[&device.0]) else { return };
    place.run(&format!("create {} --size 1MiB --force", device.0)).fails(3, &[&device.0, "in use"]);
    place.run(&format!("zero {}", device.0)).fails(3, &[&device.0, "in use"]);
}
