//! `fs verify`: of an image, of one file, on a protected volume, and over NVMe/TCP, where data stay where they are.

use std::fs;
use std::path::PathBuf;

use sealblock_btrfs_format::checksum::ChecksumType;
use sealblock_btrfs_format::superblock::{COPY_OFFSETS, SUPERBLOCK_BYTES, Superblock};
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
    // For a file whose data are all there, too.
    let of_file = verified(&place, "disk/small", "", 1);
    assert_eq!(of_file["errors"], report["errors"]);
    place.run("fs verify disk/small").ends_with(1).says(&["device 1 has 209715200 bytes"]);
    let info = place.run("fs info disk --json").ends_with(1).json();
    let [damage] = &info["damage"].as_array().unwrap()[..] else { panic!("{info}") };
    assert!(damage.as_str().unwrap().contains("device 1 has 209715200 bytes"), "{info}");
}

#[test]
fn wherever_an_image_is_cut_off_it_is_damaged() {
    let Some((place, _)) = place_with_image() else { return };
    // A byte; behind all chunks; before the end of data, the second superblock, and nodes.
    for bytes in [(256 << 20) - 1, 132_000_000, 100 << 20, 60 << 20, 40 << 20] {
        place.set_len("disk", bytes);
        let report = verified(&place, "disk", "", 1);
        let errors = report["errors"].as_array().unwrap();
        assert!(errors.iter().any(|error| error["kind"] == "short_device"), "{bytes}: {report}");
        place.run("fs info disk").ends_with(1).says(&["its end is cut off"]);
    }
}

/// Changes an image where a superblock or node begins, gives that its right checksum, and returns what was there.
fn change(place: &Place, image: &str, offset: u64, bytes: usize, change: impl Fn(&mut [u8])) -> Vec<u8> {
    let before = place.read(image)[offset as usize..][..bytes].to_vec();
    let mut after = before.clone();
    change(&mut after);
    ChecksumType::Crc32c.seal(&mut after);
    place.poke(image, offset, &after);
    before
}

/// Where the copies of the root node of all trees are in an image, and how long that is.
fn root_copies(place: &Place, name: &str) -> (Vec<u64>, usize) {
    let image = place.read(name);
    let superblock = *Superblock::decode(&image[COPY_OFFSETS[0] as usize..][..SUPERBLOCK_BYTES]).unwrap();
    let root = superblock.root.get().to_le_bytes();
    let is_copy = |at: &usize| image[at + 32..][..16] == superblock.fsid && image[at + 48..][..8] == root;
    let copies = (0..image.len()).step_by(SECTOR).filter(is_copy).map(|at| at as u64);
    (copies.collect(), superblock.node_bytes.get() as usize)
}

#[test]
fn intact_superblocks_of_one_transaction_that_differ_are_damage() {
    let Some((place, _)) = place_with_image() else { return };
    // Which copy, and where in it what is changed: its label, its number of devices, its bytes of all devices.
    let changes: [(usize, usize, &[u8]); 3] = [(1, 0x12b, b"other"), (0, 0x88, &[2]), (0, 0x70, &[0, 0, 0, 8])];
    for (copy, at, new) in changes {
        let offset = COPY_OFFSETS[copy];
        let before =
            change(&place, "disk", offset, SUPERBLOCK_BYTES, |bytes| bytes[at..][..new.len()].copy_from_slice(new));
        let report = verified(&place, "disk", "", 1);
        let errors = report["errors"].as_array().unwrap();
        let error = &errors[0];
        assert_eq!(error["kind"], "superblock", "{report}");
        // Numbers in the first copy contradict the chunk tree besides.
        assert_eq!(errors.len(), if copy == 0 { 2 } else { 1 }, "{report}");
        let told = &error["copies"][0];
        assert_eq!((&told["copy"], &told["offset"]), (&2.into(), &COPY_OFFSETS[1].into()), "{report}");
        let words = ["copy 2 on device 1 at byte 67108864", "differs from copy 1"];
        place.run("fs verify disk").ends_with(1).says(&words);
        place.run("fs info disk").ends_with(1).says(&words);
        assert_eq!(place.run("fs cat disk/small").succeeds().text(), "within its item");
        place.poke("disk", offset, &before);
    }
    // A sync between transactions writes its log to the first copy alone.
    change(&place, "disk", COPY_OFFSETS[0], SUPERBLOCK_BYTES, |bytes| bytes[0x63] = 2);
    let report = verified(&place, "disk", "", 4);
    assert_eq!(report["unchecked"][0]["reason"], "log_tree", "{report}");
}

#[test]
fn superblocks_that_were_changed_alike_contradict_the_chunk_tree() {
    let Some((place, _)) = place_with_image() else { return };
    // The number of devices, the bytes of all devices, and those of the device in its own item.
    let changes: [(usize, &[u8], &str); 4] = [
        (0x88, &[2], "number of devices contradicts itself: the superblock has 2, and the chunk tree 1"),
        (
            0x70,
            &[0, 0, 0, 8],
            "on all devices contradicts itself: the superblock has 134217728, and the chunk tree 268435456",
        ),
        (
            0x70,
            &[0, 0, 0, 32],
            "on all devices contradicts itself: the superblock has 536870912, and the chunk tree 268435456",
        ),
        (
            0xc9 + 8,
            &[0, 0, 0, 32],
            "bytes of device 1 contradicts itself: the superblock has 536870912, and the chunk tree 268435456",
        ),
    ];
    for (at, new, words) in changes {
        let before = COPY_OFFSETS[..2].iter().map(|offset| {
            let new = |bytes: &mut [u8]| bytes[at..][..new.len()].copy_from_slice(new);
            (*offset, change(&place, "disk", *offset, SUPERBLOCK_BYTES, new))
        });
        let before: Vec<_> = before.collect();
        let report = verified(&place, "disk", "", 1);
        let [error] = &report["errors"].as_array().unwrap()[..] else { panic!("{words}: {report}") };
        assert_eq!(error["kind"], "tree", "{report}");
        place.run("fs verify disk").ends_with(1).says(&[words]);
        place.run("fs info disk").ends_with(1).says(&[words]);
        before.iter().for_each(|(offset, bytes)| place.poke("disk", *offset, bytes));
    }
    verified(&place, "disk", "", 0);
    place.run("fs info disk").succeeds();
}

#[test]
fn copies_of_the_root_of_all_trees_on_one_device_that_differ_are_damage_and_the_first_is_read() {
    let Some((place, large)) = place_with_image() else { return };
    let (places, bytes) = root_copies(&place, "disk");
    assert_eq!(places.len(), 2, "{places:?}");
    for at in &places {
        // No item lies in its last byte.
        let before = change(&place, "disk", *at, bytes, |node| node[bytes - 1] ^= 1);
        let report = verified(&place, "disk", "", 1);
        let [error] = &report["errors"].as_array().unwrap()[..] else { panic!("{report}") };
        let copy = &error["copies"][0];
        assert_eq!((&error["kind"], &error["lost"], &error["trees"]), (&"node".into(), &false.into(), &vec![1].into()));
        assert_eq!((&copy["copy"], &copy["offset"]), (&2.into(), &places[1].into()), "{report}");
        let words = ["copy 2 on device 1 at byte", "differs from copy 1"];
        place.run("fs info disk").ends_with(1).says(&words);
        verified(&place, "disk/small", "", 1);
        place.run("fs ls disk").succeeds().says(&["large"]);
        let to = format!("to-{at}");
        let rescued = place.run(&format!("fs rescue disk {to}"));
        rescued.succeeds();
        assert!(words.iter().all(|word| rescued.stderr.contains(word)), "{}", rescued.stderr);
        assert!(place.read(&format!("{to}/large")) == large);
        place.poke("disk", *at, &before);
    }
}

#[test]
fn copies_of_the_root_of_all_trees_on_two_devices_that_differ_are_two_histories() {
    let place = Place::new();
    if let Err(why) = mkfs(&[place.path("a"), place.path("b")], 256, &["-d", "raid1", "-m", "raid1"]) {
        return skip(&why);
    }
    let (places, bytes) = root_copies(&place, "b");
    assert_eq!(places.len(), 1, "{places:?}");
    change(&place, "b", places[0], bytes, |node| node[bytes - 1] ^= 1);
    place.run("fs verify a+b").fails(2, &["two histories", "name those of one of them"]);
    place.run("fs verify a").ends_with(4);
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
    let report = verified(&place, &server.target("v"), "", 4);
    let unchecked = report["unchecked"].as_array().unwrap();
    assert!(unchecked.len() == 1 && unchecked[0]["reason"] == "unattested", "Linux gives no tags: {report}");
    assert_eq!(unchecked[0]["bytes"], LARGE_BYTES);
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
