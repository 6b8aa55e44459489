//! `fs verify`: of an image, of one file, on a protected volume, and over NVMe/TCP, where data stay where they are.

use std::fs;
use std::path::PathBuf;

use sealblock_btrfs_format::checksum::ChecksumType;
use sealblock_proofs_btrfs_images::programs::{Mount, mkfs};
use sealblock_proofs_btrfs_images::{has_mkfs, has_mounts, skip};
use serde_json::Value;

use crate::common::server::Server;
use crate::common::{Place, noise};

const SECTOR: usize = 4096;
const LARGE_BYTES: usize = 20 << 20;

/// A place with a filesystem in `disk`: a large file, another one, and one within its item. None where none can be made.
fn place_with_image() -> Option<(Place, Vec<u8>)> {
    if !has_mkfs() {
        return None;
    }
    let place = Place::new();
    let (source, image): (PathBuf, PathBuf) = (place.path("source"), place.path("disk"));
    fs::create_dir_all(source.join("folder")).unwrap();
    let large = noise(1, LARGE_BYTES);
    fs::write(source.join("large"), &large).unwrap();
    fs::write(source.join("folder/other"), noise(2, 100_000)).unwrap();
    fs::write(source.join("small"), b"within its item").unwrap();
    let made = mkfs(&[image], 256, &["--rootdir", source.to_str().unwrap()]);
    made.map_err(|why| eprintln!("skipped: {why}")).ok().map(|()| (place, large))
}

/// Where a sector of the large file is in the image.
fn find(place: &Place, large: &[u8], sector: usize) -> usize {
    let (image, wanted) = (place.read("disk"), &large[sector * SECTOR..(sector + 1) * SECTOR]);
    image.chunks(SECTOR).position(|chunk| chunk == wanted).expect("the image holds the file") * SECTOR
}

/// Inverts a byte of the image.
fn flip(place: &Place, offset: usize) {
    let byte = !place.read("disk")[offset];
    place.poke("disk", offset as u64, &[byte]);
}

fn verified(place: &Place, target: &str, options: &str, status: i32) -> Value {
    let report = place.run(&format!("fs verify {target} --json {options}")).ends_with(status).json();
    let verdict = match status {
        0 => "clean",
        1 => "damaged",
        _ => "incomplete",
    };
    assert_eq!(
        (&report["verdict"], &report["target"], &report["interrupted"]),
        (&verdict.into(), &target.into(), &false.into())
    );
    report
}

#[test]
fn a_damaged_sector_of_an_image_is_named_with_its_file() {
    let Some((place, large)) = place_with_image() else { return };
    let report = verified(&place, "disk", "", 0);
    assert!(report["nodes_verified"].as_u64().unwrap() > 5);
    assert!(report["bytes_verified"].as_u64().unwrap() > LARGE_BYTES as u64);
    assert_eq!((&report["errors"], &report["unchecked"]), (&Value::Array(vec![]), &Value::Array(vec![])));
    place.run("fs verify disk").succeeds().says(&["disk: clean; ", " nodes and "]);
    assert_eq!(place.run("fs verify disk --quiet").succeeds().text(), "");

    let offset = find(&place, &large, 7);
    flip(&place, offset + 99);
    let report = verified(&place, "disk", "", 1);
    let [error] = &report["errors"].as_array().unwrap()[..] else { panic!("{report}") };
    assert_eq!((&error["kind"], &error["bytes"], &error["lost"]), (&"data".into(), &SECTOR.into(), &true.into()));
    let copy = &error["copies"][0];
    assert_eq!((&copy["device"], &copy["offset"], &copy["target"]), (&1.into(), &offset.into(), &"disk".into()));
    let checksum = |bytes: &[u8]| format!("{:?}", ChecksumType::Crc32c.compute(bytes));
    let stored = checksum(&large[7 * SECTOR..8 * SECTOR]);
    let computed = checksum(&place.read("disk")[offset..offset + SECTOR]);
    assert_eq!(
        (&copy["expected"], &copy["actual"]),
        (&stored.into(), &computed.into()),
        "stored, and of what is there"
    );
    let file = &error["files"][0];
    assert_eq!(
        (&file["paths"][0], &file["offset"], &file["bytes"]),
        (&"/large".into(), &(7 * SECTOR).into(), &SECTOR.into())
    );
    let words = ["/large bytes 28672..32767: copy 1 on device 1 (disk) at byte", "it is lost", "disk: 1 damaged"];
    place.run("fs verify disk").ends_with(1).says(&words);

    verified(&place, "disk/large", "", 1);
    verified(&place, "disk/folder/other", "", 0);
    verified(&place, "disk:5/small", "", 0);
    verified(&place, "disk/folder", "", 0);
    verified(&place, "disk/", "", 1);
    let below = verified(&place, "disk:", "", 1);
    assert_eq!(
        (&below["errors"], below["nodes_verified"].as_u64() < report["nodes_verified"].as_u64()),
        (&report["errors"], true)
    );
    place.run("fs verify disk/absent").fails(3, &["absent"]);
    place.run("fs verify disk --mode offload").fails(3, &["cannot check data itself", "--mode auto"]);
    assert_eq!(verified(&place, "disk", "--mode emulate --rate 1GiB/s", 1)["offloaded"], false);
}

#[test]
fn an_image_whose_end_is_cut_off_is_damaged() {
    let Some((place, _)) = place_with_image() else { return };
    verified(&place, "disk", "", 0);
    let bytes = 200_u64 << 20;
    place.set_len("disk", bytes);
    let report = verified(&place, "disk", "", 1);
    let [error] = &report["errors"].as_array().unwrap()[..] else { panic!("{report}") };
    let copy = &error["copies"][0];
    assert_eq!((&error["kind"], &error["bytes"]), (&"short_device".into(), &(56_u64 << 20).into()), "{report}");
    assert_eq!((&copy["device"], &copy["target"], &copy["offset"]), (&1.into(), &"disk".into(), &bytes.into()));
    place.run("fs verify disk").ends_with(1).says(&["device 1 has 209715200 bytes", "disk: 1 damaged"]);
    let info = place.run("fs info disk --json").ends_with(1).json();
    let [damage] = &info["damage"].as_array().unwrap()[..] else { panic!("{info}") };
    assert!(damage.as_str().unwrap().contains("device 1 has 209715200 bytes"), "{info}");
}

#[test]
fn a_mirror_without_either_device_is_incomplete_and_not_damaged() {
    let place = Place::new();
    let images = [place.path("a"), place.path("b")];
    if let Err(why) = mkfs(&images, 256, &["-d", "raid1", "-m", "raid1"]) {
        return skip(&why);
    }
    place.run("fs info a+b").succeeds();
    for one in ["a", "b"] {
        let info = place.run(&format!("fs info {one} --json")).ends_with(4).json();
        assert_eq!((&info["damage"], &info["unread"]), (&Value::Array(vec![]), &Value::Array(vec![])), "{one}");
        verified(&place, one, "", 4);
    }
}

#[test]
fn copies_without_checksums_that_differ_are_in_the_report() {
    if let Err(why) = has_mounts() {
        return skip(&why);
    }
    let place = Place::new();
    let images = [place.path("disk"), place.path("other")];
    mkfs(&images, 256, &["-d", "raid1", "-m", "raid1"]).unwrap();
    let mount = Mount::new(&images, "nodatasum").unwrap();
    let plain = noise(4, 1 << 20);
    fs::write(mount.path("plain"), &plain).unwrap();
    mount.unmount().unwrap();
    verified(&place, "disk+other", "", 4);
    let offset = find(&place, &plain, 3);
    flip(&place, offset + 5);
    let report = verified(&place, "disk+other", "", 1);
    let [error] = &report["errors"].as_array().unwrap()[..] else { panic!("{report}") };
    assert_eq!((&error["kind"], &error["lost"]), (&"copies_differ".into(), &Value::Null), "{report}");
    let copies = error["copies"].as_array().unwrap();
    assert_eq!(copies.len(), 2, "nothing says which of them is right");
    assert!(copies.iter().any(|copy| copy["offset"] == offset && copy["target"] == "disk"), "{report}");
    let words =
        ["/plain bytes 12288..16383: no checksum, and the copies differ: copy ", " (disk) at byte", " (other) at byte"];
    place.run("fs verify disk+other").ends_with(1).says(&words);
}

#[test]
fn a_volume_verifies_and_over_nvme_only_metadata_cross() {
    let Some((place, large)) = place_with_image() else { return };
    place.run("create v --size 256MiB").succeeds();
    place.run("copy disk v").succeeds();
    let here = verified(&place, "v", "", 0);
    let offset = find(&place, &large, 1000);
    let server = Server::start(&place, "v");
    let remote = server.target("v");
    let there = verified(&place, &remote, "", 0);
    assert_eq!((&there["offloaded"], &there["bytes_verified"]), (&true.into(), &here["bytes_verified"]));
    let crossed = there["bytes_transferred"].as_u64().unwrap();
    assert!(crossed < LARGE_BYTES as u64 / 10, "{crossed}");
    assert!(verified(&place, &remote, "--mode emulate", 0)["bytes_transferred"].as_u64().unwrap() > LARGE_BYTES as u64);
    server.stop().is_clean();

    place.run(&format!("corrupt v --lba {} --kind data", offset / SECTOR)).succeeds();
    let server = Server::start(&place, "v");
    let remote = server.target("v");
    let report = verified(&place, &remote, "", 1);
    let [error] = &report["errors"].as_array().unwrap()[..] else { panic!("{report}") };
    let file = &error["files"][0];
    assert_eq!((&file["paths"][0], &file["offset"]), (&"/large".into(), &(1000 * SECTOR).into()));
    assert!(report["bytes_transferred"].as_u64().unwrap() < LARGE_BYTES as u64 / 5);
    server.stop().is_clean();
    let report = verified(&place, "v", "", 1);
    assert_eq!(report["errors"][0]["files"][0]["offset"], 1000 * SECTOR);
    verified(&place, "v/folder/other", "", 0);
}

/// Adds a file without checksums to the filesystem.
fn add_unsummed(place: &Place, content: &[u8]) {
    let mount = Mount::new(&[place.path("disk")], "nodatasum").unwrap();
    fs::write(mount.path("plain"), content).unwrap();
    mount.unmount().unwrap();
}

#[test]
fn data_without_checksums_are_checked_by_the_seals_of_a_device_on_another_machine() {
    if let Err(why) = has_mounts() {
        return skip(&why);
    }
    let Some((place, _)) = place_with_image() else { return };
    let plain = noise(3, LARGE_BYTES);
    add_unsummed(&place, &plain);
    let report = verified(&place, "disk/plain", "", 4);
    assert_eq!(report["unchecked"][0]["reason"], "no_checksum", "an image has no seals");
    place.run("create v --size 256MiB").succeeds();
    place.run("copy disk v").succeeds();
    let lba = find(&place, &plain, 500) / SECTOR;
    let server = Server::start(&place, "v");
    let report = verified(&place, &server.target("v"), "", 0);
    assert!(report["bytes_transferred"].as_u64().unwrap() < LARGE_BYTES as u64 / 10, "{report}");
    server.stop().is_clean();

    place.run(&format!("corrupt v --lba {lba} --kind data")).succeeds();
    let server = Server::start(&place, "v");
    for options in ["", "--mode emulate"] {
        let report = verified(&place, &server.target("v"), options, 1);
        let [error] = &report["errors"].as_array().unwrap()[..] else { panic!("{report}") };
        let file = &error["files"][0];
        assert_eq!((&error["lost"], &error["bytes"]), (&true.into(), &SECTOR.into()), "{report}");
        assert_eq!((&file["paths"][0], &file["offset"]), (&"/plain".into(), &(500 * SECTOR).into()), "{report}");
    }
    verified(&place, &format!("{}/large", server.target("v")), "", 0);
    server.stop().is_clean();
}
