//! `--datasum device`, `fs datasum` and `fs verify --reseal`: checksums of data that devices keep.

use std::fs;

use sealblock_proofs_btrfs_images::has_mounts;
use sealblock_proofs_btrfs_images::programs::Mount;
use serde_json::json;

use crate::common::server::Server;
use crate::common::{Place, noise, skipped};

const SECTOR: usize = 4096;
const FILE_BYTES: usize = 64 * SECTOR;

/// A place with a new filesystem on a protected volume, whose devices keep the checksums of data, and a local file.
fn new() -> (Place, Vec<u8>) {
    let place = Place::in_memory();
    place.run("create v --size 256MiB").succeeds();
    place.run("fs format v --datasum device").succeeds();
    let content = noise(1, FILE_BYTES);
    place.write("local", &content);
    (place, content)
}

/// True if the tree of checksums has any.
fn has_sums(place: &Place) -> bool {
    place.run("fs tree v --tree 7").succeeds().text().contains("EXTENT_CSUM")
}

#[test]
fn devices_without_protection_information_cannot_keep_checksums() {
    let place = Place::in_memory();
    place.write("disk", b"");
    place.set_len("disk", 256 << 20);
    place
        .run("fs format disk --datasum device")
        .fails(3, &["'disk': ", "protection information", "which --datasum device needs"]);
    place.run("fs format disk").succeeds();
    place.write("local", b"x");
    for command in ["mkdir disk/new", "subvolume create disk/new", "put local disk/new"] {
        place.run(&format!("fs {command} --datasum device")).fails(3, &["it has no protection information"]);
    }
    place.run("fs datasum device disk").fails(3, &["it has no protection information"]);
    assert_eq!(place.run("fs ls disk --json").succeeds().json()["entries"], json!([]), "nothing was made");
    place.run("fs datasum csum disk").succeeds();
}

#[test]
fn new_files_inherit_where_their_checksums_are_kept() {
    let (place, content) = new();
    place.run("fs mkdir v/folder").succeeds();
    place.run("fs subvolume create v/subvolume").succeeds();
    for to in ["v/file", "v/folder/file", "v/subvolume/file"] {
        place.run(&format!("fs put local {to}")).succeeds();
        assert_eq!(place.run(&format!("fs cat {to}")).succeeds().stdout, content);
    }
    assert!(!has_sums(&place));
    place.run("fs verify v").succeeds().says(&["clean; "]);
    place.run("fs check v").succeeds();
    // One of its own, and a directory.
    place.run("fs put --datasum csum local v/summed").succeeds();
    assert!(has_sums(&place));
    place.run("fs datasum csum v/folder/file").fails(2, &["a file with data"]);
    let set = place.run("fs datasum csum v/folder --json").succeeds().json();
    assert_eq!((&set["datasum"], &set["files"][0]["name"]), (&json!("csum"), &json!("v/folder")));
    place.run("fs rm v/summed").succeeds();
    assert!(!has_sums(&place));
    place.run("fs put local v/folder/other").succeeds();
    assert!(has_sums(&place));
    place.run("fs verify v").succeeds().says(&["clean; "]);
}

#[test]
fn a_file_is_verified_on_another_machine_without_a_transfer_of_its_data() {
    let (place, content) = new();
    place.run("fs put local v/file").succeeds();
    place.run("fs put local v/other").succeeds();
    let server = Server::start(&place, "v --protection shown");
    let target = server.target("v");
    let report = place.run(&format!("fs verify {target} --json")).succeeds().json();
    let (verified, transferred) = (&report["bytes_verified"], &report["bytes_transferred"]);
    assert_eq!(verified.as_u64().unwrap() - transferred.as_u64().unwrap(), 2 * content.len() as u64, "{report}");
    let one = place.run(&format!("fs verify {target}/file --json")).succeeds().json();
    assert!(one["bytes_transferred"].as_u64().unwrap() < content.len() as u64, "{one}");
    server.stop().is_clean();
}

#[test]
fn what_linux_wrote_is_unattested_until_it_is_resealed() {
    if let Err(why) = has_mounts() {
        return skipped(&why);
    }
    let (place, content) = new();
    place.run("fs put local v/file").succeeds();
    place.write("disk", b"");
    place.run("copy v disk").succeeds();
    let mount = Mount::new(&[place.path("disk")], "nodatasum").unwrap();
    assert_eq!(fs::read(mount.path("file")).unwrap(), content);
    fs::write(mount.path("linux"), &content).unwrap();
    mount.unmount().unwrap();
    place.run("copy disk v --force").succeeds();
    let report = place.run("fs verify v --json").ends_with(4).json();
    assert_eq!((&report["verdict"], &report["resealed"]), (&json!("incomplete"), &json!(null)));
    assert_eq!(report["unchecked"][0]["reason"], "unattested");
    assert_eq!(report["unchecked"][0]["bytes"], 2 * FILE_BYTES);
    place.run("fs verify v/file --reseal").fails(2, &["for a whole filesystem only"]);
    let report = place.run("fs scrub v --reseal --json").succeeds().json();
    assert_eq!(
        (&report["verdict"], &report["resealed"]["bytes"], &report["resealed"]["complete"]),
        (&json!("clean"), &json!(2 * FILE_BYTES), &json!(true)),
        "{report}"
    );
    place.run("fs verify v").succeeds();
    assert_eq!(place.run("fs cat v/linux").succeeds().stdout, content);
    place.run("fs verify v --forget-tags").ends_with(4).says(&["not checked (512.00 KiB)", "incomplete"]);
    place
        .run("fs verify v --reseal")
        .succeeds()
        .says(&["resealed: 0 bytes; all data without checksums have their tags"]);
}

/// The number of the block of a volume that has these bytes.
fn block_of(place: &Place, volume: &str, bytes: &[u8]) -> usize {
    place.write("image", b"");
    place.run(&format!("copy {volume} image --force")).succeeds();
    let image = fs::read(place.path("image")).unwrap();
    image.chunks(SECTOR).position(|block| block == bytes).expect("the block is on the volume")
}

#[test]
fn a_block_of_an_earlier_filesystem_has_no_tag_of_the_next_one() {
    for options in ["--datasum device", "--csum none"] {
        let place = Place::in_memory();
        place.run("create v --size 256MiB").succeeds();
        place.write("before", &noise(1, FILE_BYTES));
        let content = noise(2, FILE_BYTES);
        place.write("local", &content);
        place.run(&format!("fs format v {options}")).succeeds();
        place.run("fs put before v/file").succeeds();
        place.run(&format!("fs format v {options} --force --no-discard")).succeeds();
        fs::copy(place.path("v"), place.path("trial")).unwrap();
        place.run("fs put local trial/file").succeeds();
        let lost = block_of(&place, "trial", &content[40 * SECTOR..41 * SECTOR]);
        place.run(&format!("fs put local fault:[lost-write@{lost}],v/file")).succeeds();
        place.run("fs verify v").ends_with(1).says(&["/file bytes", "instead of"]);
        let read = place.run("fs cat v/file");
        read.fails(3, &["cannot read 'v/file'", "4096 bytes"]);
        assert!(read.stdout == content[..40 * SECTOR], "what lies before the damage");
    }
}

#[test]
fn a_tag_that_was_not_written_is_not_demanded() {
    let (place, content) = new();
    place.run("fs put local v/file").succeeds();
    let lost = block_of(&place, "v", &content[40 * SECTOR..41 * SECTOR]);
    // A copy of the bytes has no tags.
    place.run("copy image v --force").succeeds();
    place.run("fs verify v").ends_with(4);
    let words = ["does not have what was written to it", "not all data have their tags"];
    place.run(&format!("fs verify fault:[lost-write@{lost}],v --reseal")).ends_with(4).says(&words);
    assert_eq!(place.run("fs cat v/file").succeeds().stdout, content);
    place.run("fs verify v").ends_with(4);
    place.run("fs verify v --reseal").succeeds().says(&["all data without checksums have their tags"]);
    place.run("fs verify v").succeeds();
}
