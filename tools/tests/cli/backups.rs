//! What lies on a device and shows only by a backup of its superblock or header, or only outside the range that is written: nothing overwrites
//! it without `--force`. Loop devices need root, and formats their tools; what is absent is skipped visibly.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use crate::common::devices::{Loop, system};
use crate::common::{Place, has, noise, skipped};

const MIB: u64 = 1 << 20;
const DATA: usize = 1 << 20;

/// A place with a volume `v` and a file `data` of as many bytes as it has, and an empty `disk` of another length.
fn place(disk_bytes: u64) -> Place {
    let place = Place::new();
    place.volume("--size 1MiB", &noise(2, DATA));
    place.write("data", &noise(1, DATA));
    place.write("disk", &[]);
    place.set_len("disk", disk_bytes);
    place
}

fn zero(place: &Place, offset: u64, bytes: usize) {
    place.poke("disk", offset, &vec![0; bytes]);
}

/// Whether the file `disk` has these bytes there.
fn has_bytes(place: &Place, offset: u64, bytes: &[u8]) -> bool {
    let mut found = vec![0; bytes.len()];
    File::open(place.path("disk")).unwrap().read_exact_at(&mut found, offset).unwrap();
    found == bytes
}

/// Makes a format on a device; false, visibly, where that cannot be done.
fn make(program: &str, arguments: &str, disk: &str) -> bool {
    if !has(program) {
        skipped(&format!("{program} is not installed"));
        return false;
    }
    let arguments: Vec<&str> = arguments.split_whitespace().map(|word| if word == "D" { disk } else { word }).collect();
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let is_made = command.status().is_ok_and(|status| status.success());
    if !is_made {
        skipped(&format!("{program} makes nothing here"));
    }
    is_made
}

/// Formats with a backup: the command that makes one, how it is called, and how many bytes are lost at its start.
const FORMATS: [(&str, &str, &str, usize); 7] = [
    ("mkfs.btrfs", "-q -f D", "a Btrfs file system (backup at byte 67108864)", 256 << 10),
    ("mkfs.ext4", "-q -F -b 4096 D", "an ext4 file system (backup at byte 134217728)", 256 << 10),
    ("mkfs.ext4", "-q -F -b 2048 D", "an ext4 file system (backup at byte 33554432)", 256 << 10),
    ("mkfs.ext2", "-q -F -b 1024 D", "an ext2 file system (backup at byte 8389632)", 256 << 10),
    ("mkfs.xfs", "-q -f D", "an XFS file system (backup at byte 134217728)", 256 << 10),
    ("sgdisk", "--new=1:2048:+1M D", "a GPT partition table (backup at byte 536870400)", 64 << 10),
    (
        "cryptsetup",
        "luksFormat --type luks2 --batch-mode --pbkdf pbkdf2 --pbkdf-force-iterations 1000 --key-file data D",
        "a LUKS container (backup at byte 16384)",
        4096,
    ),
];

#[test]
fn a_backup_asks_before_it_is_overwritten_and_is_gone_when_the_device_is_a_volume() {
    for (program, arguments, name, lost) in FORMATS {
        let place = place(512 * MIB);
        let Some(device) = Loop::new(&place.path("disk"), &[]) else { return };
        let disk = device.0.as_str();
        let arguments = arguments.replace("data", place.path("data").to_str().unwrap());
        if !make(program, &arguments, disk) {
            continue;
        }
        system("blockdev", &["--flushbufs", disk]);
        zero(&place, 0, lost);
        let offset: u64 = name.split_once("byte ").unwrap().1.trim_end_matches(')').parse().unwrap();
        let mut backup = vec![0; 512];
        File::open(place.path("disk")).unwrap().read_exact_at(&mut backup, offset).unwrap();
        for command in
            ["create D --size 16MiB", "copy data D", "copy data raw:D", "rescue v D", "copy data offset:8..,D"]
        {
            place.run(&command.replace('D', disk)).fails(3, &[disk, name, "--force"]);
        }
        assert!(has_bytes(&place, offset, &backup) && has_bytes(&place, 0, &[0; 4096]), "{name}: nothing is written");
        place.run(&format!("create {disk} --size 1MiB --force")).succeeds();
        assert!(!has_bytes(&place, offset, &backup), "{name}: a volume has none");
        if has("wipefs") {
            let found = Command::new("wipefs").arg(disk).output().unwrap();
            assert_eq!(String::from_utf8(found.stdout).unwrap(), "", "{name}: nobody else takes it for theirs");
        }
        // Twin: what is no format is overwritten as usual.
        zero(&place, 0, 64 << 20);
        place.run(&format!("copy data {disk} --force")).succeeds();
        place.run(&format!("copy data {disk}")).succeeds();
        place.run(&format!("copy data offset:8..,{disk}")).succeeds();
    }
}

#[test]
fn a_device_that_only_looks_like_a_backup_from_afar_is_free() {
    let place = place(256 * MIB);
    let Some(device) = Loop::new(&place.path("disk"), &[]) else { return };
    // An image of a file system in the middle of a device: its superblock says that it belongs elsewhere.
    let mut superblock = [0; 128];
    superblock[48..56].copy_from_slice(&(64_u64 << 10).to_le_bytes());
    superblock[64..72].copy_from_slice(b"_BHRfS_M");
    place.poke("disk", 64 * MIB, &superblock);
    place.poke("disk", 128 * MIB + 56, &[0x53, 0xef]);
    place.run(&format!("copy data {}", device.0)).succeeds();
    place.run(&format!("copy data offset:8..,{}", device.0)).succeeds();
    place.run(&format!("rescue v {}", device.0)).succeeds();
    // Twin: the same, where it belongs.
    superblock[48..56].copy_from_slice(&(64 * MIB).to_le_bytes());
    place.poke("disk", 64 * MIB, &superblock);
    place.run(&format!("copy data {}", device.0)).fails(3, &["a Btrfs file system (backup at byte 67108864)"]);
}

#[test]
fn a_bad_sector_does_not_hide_the_backup_beside_it() {
    let place = place(0);
    place.set_len("disk", 4 * MIB);
    let header = [&b"SKUL\xba\xbe\0\x02"[..], &[0; 248], &16_384_u64.to_be_bytes()].concat();
    place.poke("disk", 16_384, &header);
    let target = "stripe-nolabel:[fault:[read-error@0..31],raw:disk],null:4MiB";
    place.run(&format!("copy data {target}")).fails(3, &["a LUKS container (backup at byte 16384)"]);
}

/// What lies on a device of 64 MiB, behind the first bytes of which everything is data, and how it is called.
const OWNERS: [(&str, &str, &str); 3] = [
    ("pvcreate", "-q -y D", "an LVM physical volume"),
    ("mkswap", "D", "swap space"),
    ("sgdisk", "--new=1:2048:+32M D", "a GPT partition table"),
];

#[test]
fn a_write_into_the_middle_asks_for_what_the_whole_device_belongs_to() {
    for (program, arguments, name) in OWNERS {
        let place = place(64 * MIB);
        let Some(device) = Loop::new(&place.path("disk"), &[]) else { return };
        let disk = device.0.as_str();
        if !make(program, arguments, disk) {
            continue;
        }
        system("blockdev", &["--flushbufs", disk]);
        let before = place.read("disk");
        for range in ["offset:65536..", "offset:65536..67583", "offset:8..,offset:65536.."] {
            for command in ["copy data", "rescue v"] {
                place.run(&format!("{command} {range},{disk}")).fails(3, &[disk, name, "--force"]);
            }
        }
        place.run(&format!("copy data mirror:[offset:65536..67583,{disk}],null:1MiB")).fails(3, &[disk, name]);
        assert!(place.read("disk") == before, "{name}: nothing is written");
        place.run(&format!("copy data offset:65536..,{disk} --force")).succeeds();
        assert!(has_bytes(&place, 32 * MIB, &noise(1, DATA)));
        // Twin: without it, both ends are free.
        zero(&place, 0, 1 << 20);
        zero(&place, 63 * MIB, 1 << 20);
        place.run(&format!("copy data offset:65536..,{disk}")).succeeds();
    }
}

#[test]
fn a_write_into_the_middle_of_a_plain_file_or_a_volume_asks_for_what_it_is() {
    let place = place(0);
    let mut archive = noise(3, 4 << 20);
    archive[..10].copy_from_slice(b"\x1f\x8b\x08\0\0\0\0\0\0\0");
    place.write("archive", &archive);
    place.run("copy data offset:4096..,raw:archive").fails(3, &["archive", "a gzip archive", "--force"]);
    assert!(place.read("archive") == archive);
    place.run("copy data offset:4096..,raw:archive --force").succeeds();
    // A volume, and a group that has the file system only as a whole: its superblock is in the chunks of both members.
    let mut system = vec![0; 4 << 20];
    system[65_600..65_608].copy_from_slice(b"_BHRfS_M");
    place.write("system", &system);
    for target in ["w", "stripe-4KiB-nolabel:raw:a,raw:b"] {
        place.run("create w --size 4MiB --force").succeeds();
        place.write("a", &[0; 2 << 20]);
        place.write("b", &[0; 2 << 20]);
        place.run(&format!("copy data offset:512..,{target}")).succeeds();
        place.run(&format!("copy system {target}")).succeeds();
        place.run(&format!("copy data offset:512..,{target}")).fails(3, &[target, "a Btrfs file system", "--force"]);
        place.run(&format!("copy data offset:512..,{target} --force")).succeeds();
    }
}

/// Interrupts a copy of the file `system` to the file `to`, which is zeroes at first, once some of it is written, and gives the command that it
/// prints.
fn resume_command(place: &Place, options: &str) -> String {
    let mut child = place.start(&format!("copy fault:[delay=1s@12000..12000],raw:system offset:0..,raw:to {options}"));
    while place.read("to")[..4096] == [0; 4096] {
        assert!(child.try_wait().unwrap().is_none());
        sleep(Duration::from_millis(10));
    }
    assert!(system("kill", &["-s", "INT", &child.id().to_string()]));
    let ended = crate::common::answer_of(child);
    let command = ended.stderr.lines().find_map(|line| line.strip_prefix("try: sealblock "));
    let command = command.unwrap_or_else(|| panic!("{}", ended.stderr)).replace('\'', "");
    assert!(!command.contains(" offset:0..,fault"), "nothing was copied: {command}");
    command
}

#[test]
fn a_copy_is_resumed_as_printed_whatever_it_has_already_copied() {
    let place = place(0);
    for (magic, force) in [(&b"_BHRfS_M"[..], "--force"), (b"_BHRfS_M", ""), (b"", "--force"), (b"", "")] {
        let mut system = noise(4, 32 << 20);
        system[65_600..][..magic.len()].copy_from_slice(magic);
        place.write("system", &system);
        place.write("to", &vec![0; 32 << 20]);
        if !force.is_empty() {
            place.poke("to", 65_600, b"_BHRfS_M");
            place.run("copy raw:system offset:0..,raw:to").fails(3, &["a Btrfs file system", "--force"]);
        }
        let command = resume_command(&place, force);
        let has_force = !magic.is_empty() || !force.is_empty();
        assert_eq!(command.contains("copy --force offset:"), has_force, "{command}");
        place.run(&command).succeeds();
        assert!(place.read("to") == system, "{command}");
    }
}
