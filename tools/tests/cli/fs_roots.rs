//! Btrfs filesystems of the kernel whose roots or checksums are lost: what `fs rescue` gives all the same, and what `fs info` says there is to
//! begin from.

use std::fs;

use sealblock_btrfs_format::key::objectid;
use sealblock_btrfs_format::superblock::{COPY_OFFSETS, SUPERBLOCK_BYTES, Superblock};
use sealblock_proofs_btrfs_images::programs::{Mount, mkfs};
use sealblock_proofs_btrfs_images::{has_mounts, skip};
use serde_json::Value;

use crate::common::{Place, noise};

/// Transactions, each with a file that needs another chunk.
const TRANSACTIONS: u64 = 6;
const FILE_BYTES: usize = 18 << 20;

fn name(number: u64) -> String {
    format!("file-{number}")
}

fn content(number: u64) -> Vec<u8> {
    noise(number, FILE_BYTES + number as usize)
}

/// A place with a filesystem in `disk`, each file of which is of another transaction. None where none can be made.
fn place_with_image() -> Option<Place> {
    if let Err(why) = has_mounts() {
        skip(&why);
        return None;
    }
    let place = Place::new();
    let images = [place.path("disk")];
    mkfs(&images, 300, &[]).unwrap();
    let mount = Mount::new(&images, "noatime").unwrap();
    for number in 0..TRANSACTIONS {
        fs::write(mount.path(&name(number)), content(number)).unwrap();
        mount.sync().unwrap();
    }
    mount.unmount().unwrap();
    Some(place)
}

/// The information of a node about itself.
struct Header {
    owner: u64,
    bytenr: u64,
    generation: u64,
    level: u8,
}

fn superblock(place: &Place) -> Superblock {
    let at = COPY_OFFSETS[0] as usize;
    *Superblock::decode(&place.read("disk")[at..at + SUPERBLOCK_BYTES]).unwrap()
}

/// Destroys every copy of the nodes that a rule picks. Returns how many copies there were.
fn destroy(place: &Place, is_wanted: impl Fn(&Header) -> bool) -> usize {
    let (image, fsid) = (place.read("disk"), superblock(place).fsid);
    let mut count = 0;
    for at in (0..image.len() - SUPERBLOCK_BYTES).step_by(4096) {
        let field = |offset: usize| u64::from_le_bytes(*image[at + offset..].first_chunk().unwrap());
        let header = Header { owner: field(88), bytenr: field(48), generation: field(80), level: image[at + 100] };
        let is_superblock = COPY_OFFSETS.contains(&(at as u64));
        if image[at + 32..at + 48] == fsid && !is_superblock && is_wanted(&header) {
            place.poke("disk", at as u64 + 200, &[0xa5; 600]);
            count += 1;
        }
    }
    count
}

fn rescued(place: &Place, to: &str, options: &str) -> Value {
    place.run(&format!("fs rescue disk {to} --json {options}")).ends_with(1).json()
}

/// The numbers of the files that are whole in a folder.
fn whole(place: &Place, folder: &str) -> Vec<u64> {
    let is_whole =
        |number: &u64| fs::read(place.path(folder).join(name(*number))).is_ok_and(|found| found == content(*number));
    (0..TRANSACTIONS).filter(is_whole).collect()
}

fn all() -> Vec<u64> {
    (0..TRANSACTIONS).collect()
}

#[test]
fn data_whose_checksums_are_lost_are_rescued_and_called_unverified() {
    let Some(place) = place_with_image() else { return };
    let before = place.run("fs rescue disk before --json").succeeds().json();
    assert_eq!((&before["unverified_bytes"], &before["unverified"]), (&0.into(), &Value::Array(vec![])));
    assert!(destroy(&place, |header| header.owner == objectid::CSUM_TREE) >= 2);
    let report = rescued(&place, "saved", "");
    assert_eq!(whole(&place, "saved"), all());
    let bytes: usize = all().iter().map(|number| content(*number).len()).sum();
    assert_eq!((&report["unverified_bytes"], &report["lost"]), (&bytes.into(), &Value::Array(vec![])));
    let mut listed: Vec<(String, u64, u64)> = report["unverified"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| {
            (one["path"].as_str().unwrap().to_owned(), one["offset"].as_u64().unwrap(), one["bytes"].as_u64().unwrap())
        })
        .collect();
    listed.sort();
    assert_eq!(
        listed,
        all().iter().map(|number| (name(*number), 0, content(*number).len() as u64)).collect::<Vec<_>>()
    );
    let text = place.run("fs rescue disk again");
    assert!(text.ends_with(1).text().contains("/file-0 bytes 0..18874367: kept unverified"), "{}", text.text());
    // Elsewhere data that nothing vouches for are damaged, and the advice names what gives them.
    place.run("fs cat disk/file-0").fails(3, &["the checksums of the data", "cannot be read", "sealblock fs rescue"]);
    assert!(place.run("fs get disk got").ends_with(1).stderr.contains("file-0: skipped"));
}

#[test]
fn without_the_root_node_of_the_checksums_all_data_are_rescued() {
    let Some(place) = place_with_image() else { return };
    // Its leaves stay, and nothing leads to them.
    assert!(destroy(&place, |header| header.owner == objectid::CSUM_TREE && header.level > 0) >= 2);
    let report = rescued(&place, "saved", "");
    assert_eq!(whole(&place, "saved"), all());
    let bytes: usize = all().iter().map(|number| content(*number).len()).sum();
    assert_eq!((&report["unverified_bytes"], &report["lost"]), (&bytes.into(), &Value::Array(vec![])));
}

#[test]
fn without_the_newest_chunk_root_all_is_rescued() {
    let Some(place) = place_with_image() else { return };
    let (root, backups) = (superblock(&place).chunk_root, superblock(&place).backup_roots);
    assert!(backups.iter().any(|backup| backup.chunk_root != root), "an older one is in a backup");
    let healthy = place.run("fs info disk --json").succeeds().json();
    assert_eq!((&healthy["roots"][0]["source"], &healthy["roots"][0]["used"]), (&"superblock".into(), &true.into()));
    assert!(destroy(&place, |header| header.owner == objectid::CHUNK_TREE && root == header.bytenr) >= 2);
    place.run("fs ls disk").fails(3, &["sealblock fs rescue"]);
    let report = rescued(&place, "saved", "");
    assert_eq!(whole(&place, "saved"), all(), "{}", report["roots"]);
    let source = report["roots"]["chunk_tree"]["source"].as_str().unwrap();
    assert!(source.starts_with("backup "), "{source}");
    assert_eq!(report["roots"]["tree_of_trees"]["source"], "superblock", "each is chosen by itself");
    assert!(report["roots"]["chunks_of_devices"].as_u64().unwrap() > 0, "{}", report["roots"]);
    let info = place.run("fs info disk --json").ends_with(1).json();
    let roots = info["roots"].as_array().unwrap();
    assert!(roots[0]["lost"].is_string() && roots[0]["used"] == false, "{info}");
    assert!(roots.iter().any(|one| one["source"] == source && one["used"] == true), "{info}");

    // Those of the backups, too: what is left in the system chunks is found.
    let is_of_backup = |header: &Header| backups.iter().any(|backup| backup.chunk_root == header.bytenr);
    assert!(destroy(&place, |header| header.owner == objectid::CHUNK_TREE && is_of_backup(header)) > 0);
    let report = rescued(&place, "found", "");
    assert_eq!(report["roots"]["chunk_tree"]["source"], "search", "{}", report["roots"]);
    assert!(report["files"].as_u64().unwrap() > 0, "{report}");
}

#[test]
fn without_the_newest_root_of_all_trees_the_next_older_one_is_begun_from() {
    let Some(place) = place_with_image() else { return };
    let first = superblock(&place);
    assert!(destroy(&place, |header| header.owner == objectid::ROOT_TREE && first.root == header.bytenr) >= 2);
    place.run("fs ls disk").fails(3, &["sealblock fs rescue"]);
    let report = rescued(&place, "saved", "");
    assert_eq!(report["roots"]["tree_of_trees"]["source"], "backup 1", "{}", report["roots"]);
    assert_eq!(report["roots"]["chunk_tree"]["source"], "superblock");
    assert!(whole(&place, "saved").len() as u64 >= TRANSACTIONS - 1, "{:?}", whole(&place, "saved"));
    assert!(report["lost"][0]["why"].as_str().unwrap().contains("reading starts at backup 1"), "{report}");
    // A choice by hand is kept to.
    let by_hand = rescued(&place, "by-hand", "--backup-root 0");
    assert_eq!((&by_hand["roots"]["tree_of_trees"]["source"], &by_hand["files"]), (&"backup 0".into(), &0.into()));

    // All that the superblock has are lost: what is left in the block groups is found.
    let oldest = first.backup_roots.iter().map(|backup| backup.tree_root_generation.get()).min().unwrap();
    destroy(&place, |header| header.owner == objectid::ROOT_TREE && header.generation >= oldest);
    let report = rescued(&place, "found", "");
    assert_eq!(report["roots"]["tree_of_trees"]["source"], "search", "{}", report["roots"]);
    assert!(report["roots"]["tree_of_trees"]["generation"].as_u64().unwrap() < oldest);
}

#[test]
fn files_of_an_older_superblock_are_said_to_be_older() {
    let Some(place) = place_with_image() else { return };
    let at = |copy: usize| COPY_OFFSETS[copy];
    let older = "files may be older than what was written: the first superblock is lost";
    let commands = ["fs get disk/file-0 got", "fs cat disk/file-0", "fs ls disk", "fs rescue disk saved"];
    let reading = |status: i32, words: &[&str], is_older: bool| {
        for command in commands {
            fs::remove_file(place.path("got")).ok();
            fs::remove_dir_all(place.path("saved")).ok();
            let answer = place.run(command);
            answer.ends_with(status);
            let said = &answer.stderr;
            assert!(words.iter().all(|words| said.contains(words)), "{command}: {said}");
            assert_eq!(said.contains(older), is_older, "{command}: {said}");
            assert_eq!(said.contains("superblock"), !words.is_empty(), "{command}: {said}");
        }
    };
    reading(0, &[], false);
    // The second copy is only that: the first one has the last transaction.
    let image = place.read("disk");
    let restore = |copy: usize| place.poke("disk", at(copy), &image[at(copy) as usize..][..SUPERBLOCK_BYTES]);
    place.poke("disk", at(1), &[0; SUPERBLOCK_BYTES]);
    reading(0, &["superblock: copy 2 on device 1 at byte 67108864"], false);
    // The first one may have been newer than what is left.
    restore(1);
    place.poke("disk", at(0), &[0; SUPERBLOCK_BYTES]);
    reading(4, &["superblock: copy 1 on device 1 at byte 65536"], true);
    for command in ["fs verify disk", "fs info disk"] {
        let answer = place.run(command);
        answer.ends_with(1).says(&["copy 1 on device 1 at byte 65536"]);
        assert!(answer.stderr.contains(older), "{command}: {}", answer.stderr);
    }
    restore(0);
    reading(0, &[], false);
}

#[test]
fn the_first_superblock_of_another_device_shows_that_nothing_is_older() {
    if let Err(why) = has_mounts() {
        return skip(&why);
    }
    let place = Place::new();
    mkfs(&["a", "b"].map(|name| place.path(name)), 128, &[]).unwrap();
    place.poke("a", COPY_OFFSETS[0], &[0; SUPERBLOCK_BYTES]);
    let answer = place.run("fs ls a+b");
    let lost = "superblock: copy 1 on device 1 at byte 65536";
    assert!(answer.succeeds().stderr.contains(lost) && !answer.stderr.contains("older"), "{}", answer.stderr);
    place.poke("b", COPY_OFFSETS[0], &[0; SUPERBLOCK_BYTES]);
    let answer = place.run("fs ls a+b");
    assert!(answer.ends_with(4).stderr.contains("files may be older than what was written"), "{}", answer.stderr);
}
