//! `fs format`: new filesystems on targets of every kind, what is refused, and what a failure leaves.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use sealblock_btrfs_format::superblock::COPY_OFFSETS;
use sealblock_proofs_btrfs_images::has_mounts;
use sealblock_proofs_btrfs_images::programs::{Mount, run};

use crate::common::devices::Loop;
use crate::common::server::Server;
use crate::common::{Place, is_root, skipped};

const MIB: u64 = 1 << 20;
const MAGIC: &[u8] = b"_BHRfS_M";

/// A place with sparse files of this size.
fn place(names: &[&str], bytes: u64) -> Place {
    let place = Place::in_memory();
    for name in names {
        place.write(name, b"");
        place.set_len(name, bytes);
    }
    place
}

/// The filesystem is consistent, and has this label.
#[track_caller]
fn is_clean(place: &Place, name: &str, label: &str) {
    place.run(&format!("fs check {name}")).succeeds().says(&["clean; "]);
    assert_eq!(place.run(&format!("fs info {name} --json")).succeeds().json()["label"], label);
    assert_eq!(place.run(&format!("fs ls {name}")).succeeds().text(), "");
}

/// Whether a file has a superblock in any of its places.
fn has_superblock(place: &Place, name: &str) -> bool {
    let bytes = place.read(name);
    let at = |offset: &u64| bytes.get(*offset as usize + 64..).is_some_and(|bytes| bytes.starts_with(MAGIC));
    COPY_OFFSETS.iter().any(at)
}

#[test]
fn a_file_becomes_a_filesystem_with_what_was_chosen() {
    let place = place(&["disk"], 200 * MIB + 5000);
    let chosen = "--label backup --uuid 01234567-89ab-cdef-0123-456789abcdef --csum blake2b --node-size 32KiB \
                  --metadata single --data dup --features block-group-tree,^extref";
    let report = place.run(&format!("fs format disk {chosen} --json")).succeeds().json();
    is_clean(&place, "disk", "backup");
    let info = place.run("fs info disk --json").succeeds().json();
    for key in ["label", "uuid", "checksum", "sector_bytes", "node_bytes", "total_bytes", "used_bytes", "features"] {
        assert_eq!(report[key], info[key], "{key}");
    }
    assert_eq!(info["uuid"], "01234567-89ab-cdef-0123-456789abcdef");
    assert_eq!((&info["checksum"], &info["node_bytes"]), (&"blake2b".into(), &32_768.into()));
    let features: Vec<&str> = info["features"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
    assert!(features.contains(&"block_group_tree") && !features.contains(&"extended_iref"), "{features:?}");
    for key in ["id", "uuid", "target", "total_bytes", "used_bytes"] {
        assert_eq!(report["devices"][0][key], info["devices"][0][key], "{key}");
    }
    // A file that is no multiple of a sector keeps its end.
    assert_eq!((&report["total_bytes"], place.len("disk")), (&(200 * MIB + 4096).into(), 200 * MIB + 5000));
    let groups = report["block_groups"].as_array().unwrap();
    let kinds: Vec<_> = groups.iter().map(|group| (&group["kind"], &group["profile"])).collect();
    let one = |kind: &str, profile: &str| (kind.into(), profile.into());
    let expected = [one("system", "single"), one("metadata", "single"), one("data", "DUP")];
    assert!(kinds.iter().zip(&expected).all(|((a, b), (c, d))| (*a, *b) == (c, d)) && kinds.len() == 3, "{groups:?}");
    // Its space is that of what was written.
    assert!(place.allocated_bytes("disk") < 4 * MIB, "{}", place.allocated_bytes("disk"));
}

#[test]
fn a_filesystem_is_made_on_targets_of_every_kind() {
    let place = place(&["a", "b", "c", "disk"], 150 * MIB);
    place.run("fs format a b c --data raid0 --metadata raid1c3").succeeds().says(&["device 3", "RAID1C3", "RAID0"]);
    is_clean(&place, "a+b+c", "");
    place.run("create v --size 150MiB").succeeds();
    place.run("fs format v --label sealed").succeeds();
    is_clean(&place, "v", "sealed");
    place.run("verify v").succeeds();
    place.run("create w --size 150MiB --block-size 512 --guard crc16").succeeds();
    place.run("fs format w raw:disk --label both").succeeds();
    is_clean(&place, "w+raw:disk", "both");
    place.run("create m --size 150MiB").succeeds();
    place.run("create n --size 150MiB").succeeds();
    place.run("mirror create m n").succeeds();
    place.run("fs format mirror:m,n --label mirrored").succeeds();
    is_clean(&place, "mirror:m,n", "mirrored");
    place.run("fs format mem:1GiB").succeeds();
    place.run("fs format m").fails(3, &["member"]);
}

#[test]
fn a_filesystem_is_made_over_a_network() {
    let place = place(&[], 0);
    place.run("create v --size 100MiB").succeeds();
    let server = Server::start(&place, "v mem:120MiB --nbd 127.0.0.1:0");
    let nbd = format!("nbd://{}/mem", server.ready["nbd"]["listeners"][0].as_str().unwrap());
    for (target, label) in [(server.target("v"), "nvme"), (nbd, "nbd")] {
        place.run(&format!("fs format {target} --label {label}")).succeeds();
        is_clean(&place, &format!("[{target}]"), label);
    }
    server.stop().is_clean();
    is_clean(&place, "v", "nvme");
}

/// Tags prove everything where devices have protection information; elsewhere it is refused.
#[test]
fn without_checksums_only_devices_with_protection_information_are_formatted() {
    let place = place(&["disk"], 150 * MIB);
    for name in ["v", "w", "m", "n"] {
        place.run(&format!("create {name} --size 150MiB")).succeeds();
    }
    place.run("mirror create m n").succeeds();
    let words = ["'raw:disk'", "shows no protection information", "--csum none", "sealblock create"];
    place.run("fs format v raw:disk --csum none").fails(3, &words);
    assert!(!has_superblock(&place, "disk"));
    place.run("fs info v").ends_with(3);
    for targets in ["v w --data raid1", "mirror:m,n"] {
        let report = place.run(&format!("fs format {targets} --csum none --json")).succeeds().json();
        assert_eq!(report["checksum"], "none");
        assert!(report["features"].as_array().unwrap().contains(&"no_checksums".into()), "{report}");
    }
    for name in ["v+w", "[mirror:m,n]"] {
        is_clean(&place, name, "");
        assert_eq!(place.run(&format!("fs info {name} --json")).succeeds().json()["checksum"], "none");
        place.run(&format!("fs info {name}")).succeeds().says(&["checksums       none"]);
        place.run(&format!("fs mkdir {name}:folder")).succeeds();
        place.write("file", b"content");
        place.run(&format!("fs put file {name}:folder/file")).succeeds();
        assert_eq!(place.run(&format!("fs cat {name}:folder/file")).succeeds().text(), "content");
        place.run(&format!("fs snapshot {name}: {name}:snapshot")).succeeds();
        place.run(&format!("fs rm {name}:folder/file")).succeeds();
        place.run(&format!("fs check {name}")).succeeds().says(&["clean; "]);
        assert_eq!(place.run(&format!("fs cat {name}:snapshot/folder/file")).succeeds().text(), "content");
    }
    place.run("fs verify v+w").succeeds().says(&["clean; "]);
    // Tags cross the network, if the server shows them.
    for (protection, status, words) in [("shown", 0, ""), ("plain", 3, "shows no protection information")] {
        let server = Server::start(&place, &format!("v w --protection {protection}"));
        let served = format!("[{}]+[{}]", server.target("v"), server.target("w"));
        let made = place.run(&format!("fs mkdir {served}:{protection}"));
        assert!(made.ends_with(status).stderr.contains(words), "{}", made.stderr);
        let status = if protection == "shown" { 0 } else { 4 };
        place.run(&format!("fs verify {served}")).ends_with(status);
        server.stop().is_clean();
    }
    place.run("fs verify v+w").succeeds().says(&["clean; "]);
}

/// A copy of the bytes has no tags, and nothing shows whether it is good: it is read, and not written.
#[test]
fn a_copy_without_tags_of_a_filesystem_without_checksums_is_read_with_a_warning() {
    let place = place(&["bytes"], 150 * MIB);
    place.run("create v --size 150MiB").succeeds();
    place.run("create back --size 150MiB").succeeds();
    place.run("fs format v --csum none").succeeds();
    place.write("file", b"content");
    place.run("fs put file v:file").succeeds();
    place.run("copy v raw:bytes").succeeds();
    place.run("copy raw:bytes back").succeeds();
    for (name, why) in [("bytes", "it shows no protection information"), ("back", "it has lost the tags")] {
        let read = place.run(&format!("fs cat {name}:file"));
        assert_eq!((read.succeeds().text(), read.stderr.contains("WARNING")), ("content".to_owned(), true));
        assert!(read.stderr.contains(why), "{}", read.stderr);
        place.run(&format!("fs mkdir {name}:folder")).fails(3, &[why, "copy the files to a new filesystem"]);
        for command in ["verify", "check"] {
            let report = place.run(&format!("fs {command} {name} --json")).ends_with(4).json();
            assert_eq!(report["verdict"], "incomplete");
            assert!(report.to_string().contains("\"node_tags\""), "{report}");
        }
    }
}

#[test]
fn what_has_something_is_refused_and_overwritten_with_force() {
    let end = 200 * MIB;
    let text = b"a line of text\n".repeat(300);
    let known: [(u64, &[u8], &str); 12] = [
        (1024 + 56, b"\x53\xef", "ext"),
        (0, b"XFSB", "XFS"),
        (0, b"LUKS\xba\xbe", "LUKS"),
        (512, b"LABELONE", "LVM"),
        (512, b"EFI PART", "GPT"),
        (end - 512, b"EFI PART", "GPT"),
        (4096, b"\xfc\x4e\x2b\xa9", "md array"),
        (4086, b"SWAPSPACE2", "swap"),
        (COPY_OFFSETS[0] + 64, MAGIC, "Btrfs"),
        (0, &text, "plain text"),
        (3, b"NTFS    ", "NTFS"),
        (0, b"QFI\xfb", "qcow2"),
    ];
    for (at, magic, name) in known {
        let place = place(&["disk"], end);
        place.poke("disk", at, magic);
        place.run("fs format disk").fails(3, &["disk", name, "--force"]);
        assert!(!has_superblock(&place, "disk") || name == "Btrfs", "{name}");
        place.run("fs format disk --force").succeeds();
        is_clean(&place, "disk", "");
        let there = place.read("disk");
        let is_gone = !there[at as usize..].starts_with(magic) || name == "Btrfs";
        assert!(is_gone, "{name} would still be found");
    }
    let place = place(&["disk"], end);
    let mut sector = [0; 512];
    sector[446 + 4..446 + 16].copy_from_slice(&[0x83, 0, 0, 0, 0, 8, 0, 0, 0, 0, 1, 0]);
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    place.poke("disk", 0, &sector);
    place.run("fs format disk").fails(3, &["MBR partition table"]);
    place.poke("disk", 0, &[0; 512]);

    place.run("fs format disk --label one").succeeds();
    place.run("fs format disk --label two").fails(3, &["Btrfs"]);
    // One that is only found by its second superblock.
    place.poke("disk", COPY_OFFSETS[0], &[0; 4096]);
    place.run("fs format disk --label two").fails(3, &["Btrfs", "backup"]);
    is_refused_elsewhere(&place);
    place.run("fs format disk --label two --force").succeeds();
    is_clean(&place, "disk", "two");
}

/// Below other targets the same is found.
fn is_refused_elsewhere(place: &Place) {
    for target in ["raw:disk", "offset:0..,raw:disk", "stripe-nolabel:raw:disk,mem:200MiB"] {
        place.run(&format!("fs format {target}")).fails(3, &["Btrfs"]);
    }
}

#[test]
fn bad_usage_and_unsuitable_targets_are_refused_and_change_nothing() {
    let place = place(&["disk", "other"], 200 * MIB);
    place.write("small", b"");
    place.set_len("small", 20 * MIB);
    fs::hard_link(place.path("disk"), place.path("link")).unwrap();
    for (arguments, words) in [
        ("", &["TARGET"][..]),
        ("disk disk", &["the same device or file"]),
        ("disk link", &["the same device or file"]),
        ("disk other offset:0..9,raw:disk", &["the same device or file"]),
        ("disk --data raid5", &["RAID5", "an interrupted write"]),
        ("disk --metadata raid6", &["RAID6", "an interrupted write"]),
        ("disk --data raid1", &["RAID1", "at least 2 devices, not 1"]),
        ("disk other --metadata raid1c3", &["RAID1C3", "at least 3 devices, not 2"]),
        ("disk --data raid7", &["raid7"]),
        ("disk --csum md5", &["md5"]),
        ("disk --sector-size 16KiB", &["sectors of 16384 bytes are not supported", "4096"]),
        ("disk --sector-size 1TiB", &["sectors of"]),
        ("disk --node-size 2KiB", &["2048"]),
        ("disk --node-size 128KiB", &["131072"]),
        ("disk --node-size 1TiB", &["nodes"]),
        ("disk --mixed --node-size 16KiB", &["mixed", "16384"]),
        ("disk --mixed --data single --metadata dup", &["mixed"]),
        ("disk --features ^free-space-tree", &["always made"]),
        ("disk --features zoned", &["not supported"]),
        ("disk --features block-group-tree,^no-holes", &["NO_HOLES"]),
        ("disk --uuid 12", &["UUID"]),
        ("disk --uuid 00000000-0000-0000-0000-000000000000", &["all zero"]),
        (&format!("disk --label {}", "x".repeat(256)), &["label of 256 bytes"]),
    ] {
        place.run(&format!("fs format {arguments}")).fails(2, words);
    }
    place.run("fs format absent").fails(3, &["absent", "no such file"]);
    place.run("fs format small").fails(3, &["small", "20 MiB", "needs at least", "--mixed"]);
    place.run("fs format small --mixed").fails(3, &["needs at least"]);
    place.run("fs format disk small").fails(3, &["small", "needs at least"]);
    for name in ["disk", "other", "small"] {
        assert_eq!(place.allocated_bytes(name), 0, "{name} was changed");
    }
    place.set_len("small", 41 * MIB);
    place.run("fs format small --mixed").succeeds();
    is_clean(&place, "small", "");
    if !is_root() {
        fs::set_permissions(place.path("disk"), fs::Permissions::from_mode(0o400)).unwrap();
        place.run("fs format disk").fails(3, &["disk", "permission denied"]);
    }
}

#[test]
fn a_failure_leaves_the_old_filesystem_or_none() {
    // Blocks of a plain file have 512 bytes.
    let faults = [
        // An old superblock that cannot be erased: nothing else is changed.
        ("write-error@128..128", "old"),
        ("write-error@131072..131072", "old"),
        ("flush-error", "old or none"),
        // The start, and nodes.
        ("write-error@16..16", "none"),
        ("write-error@18432..18500", "none"),
    ];
    for (fault, expected) in faults {
        let place = place(&["disk"], 200 * MIB);
        place.run("fs format disk --label old").succeeds();
        place
            .run(&format!("fs format fault:[{fault}],raw:disk --label new --force --no-discard"))
            .fails(3, &["by rule"]);
        let info = place.run("fs info disk --json");
        let label = if info.status == 3 { None } else { Some(info.json()["label"].clone()) };
        match label {
            Some(label) => {
                assert!(label == "old" && expected.contains("old"), "{fault}: {label}");
                // A superblock may be gone, but no node.
                let check = place.run("fs check disk --json").json();
                let findings = check["findings"].as_array().unwrap();
                assert!(findings.iter().all(|finding| finding["rule"] == "superblock"), "{fault}: {findings:?}");
            }
            None => assert!(expected.contains("none"), "{fault}: there is none"),
        }
        place.run("fs format disk --label new --force").succeeds();
        is_clean(&place, "disk", "new");
    }
}

#[test]
fn linux_mounts_what_was_made_on_its_devices() {
    if let Err(why) = has_mounts() {
        return skipped(&why);
    }
    let place = place(&["a", "b"], 300 * MIB);
    let (Some(one), Some(two)) = (Loop::new(&place.path("a"), &[]), Loop::new(&place.path("b"), &[])) else { return };
    let report =
        place.run(&format!("fs format {} {} --data raid1 --label made --json", one.0, two.0)).succeeds().json();
    assert!(report["devices"][1]["discarded_bytes"].as_u64().unwrap() > 299 * MIB, "{report}");
    let label = run("blkid", ["-p", "-o", "value", "-s", "LABEL", &one.0]);
    assert_eq!(label.as_deref(), Ok("made"));
    drop((one, two));
    let images = [place.path("a"), place.path("b")];
    let mount = Mount::new(&images, "noatime").unwrap();
    fs::write(mount.path("file"), vec![7; 3 << 20]).unwrap();
    for name in ["a", "b"] {
        place.run(&format!("fs format {name} --force")).fails(3, &[name, "mounted"]);
    }
    mount.unmount().unwrap();
    place.run("fs check a+b").succeeds();
    assert_eq!(place.run("fs cat a+b/file").succeeds().stdout, vec![7; 3 << 20]);
}
