//! `fs`: Btrfs filesystems as a user meets them. Small ones are put together here; those of the kernel need root, loop devices,
//! `btrfs-progs` and, for mounts, FUSE. What is absent is said and left out.

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};

use sealblock_btrfs_format::checksum::ChecksumType;
use sealblock_btrfs_format::items::directory::FileType;
use sealblock_btrfs_format::key::{ItemType, Key, objectid};
use sealblock_proofs_btrfs_images::handmade::{DATA_START, Handmade, Identity, Storage};
use sealblock_proofs_btrfs_images::has_mounts;
use sealblock_proofs_btrfs_images::manifest::Manifest;
use sealblock_proofs_btrfs_images::sets::{self, Recipe};
use serde_json::json;

use crate::common::serving::{Serving, can_mount};
use crate::common::{Answer, Place, noise, skipped};

const TOP: u64 = objectid::FIRST_FREE;

/// A filesystem with a few files in the file `image`, and what `summed` holds.
fn place() -> (Place, Vec<u8>) {
    let place = Place::new();
    let mut made = Handmade::new(4096, ChecksumType::Crc32c);
    let data = noise(1, 50_000);
    made.file(TOP, b"inline", b"a few words", Storage::Inline);
    made.file(TOP, b"summed", &data, Storage::Summed);
    let folder = made.directory(TOP, b"folder");
    made.file(folder, b"below", b"more words", Storage::Inline);
    made.build().write(&place.path("image")).unwrap();
    (place, data)
}

/// Damages the sector of `summed` that begins at this byte.
fn damage(place: &Place, at: u64) {
    let file = fs::File::options().write(true).open(place.path("image")).unwrap();
    file.write_all_at(b"damage", DATA_START + at).unwrap();
}

#[test]
fn files_are_listed_and_read() {
    let (place, data) = place();
    let listed = place.run("fs ls image");
    assert_eq!(listed.succeeds().text(), "inline\nsummed\nfolder\n");
    assert_eq!(place.run("fs ls -R image/folder").succeeds().text(), "below\n");
    assert!(
        place.run("fs ls -l image/summed").succeeds().text().starts_with("-rw-r--r--   1     0     0        50000 ")
    );
    assert_eq!(place.run("fs cat image/summed").succeeds().stdout, data);
    assert_eq!(
        place.run("fs cat image/inline image:folder/below image:5/inline").succeeds().text(),
        "a few wordsmore wordsa few words"
    );
    place.run("fs cat image/absent").fails(3, &["cannot find 'image/absent'", "there is no \"absent\""]);
    place.run("fs cat image/folder").fails(3, &["is not a file"]);
    place.run("fs ls image:77").fails(3, &["there is no subvolume 77"]);
    place.run("fs ls absent.img").fails(2, &["no prefix of \"absent.img\" is a file or a block device"]);
    place.write("empty", &[0; 1 << 20]);
    place.run("fs ls empty").fails(3, &["empty: no superblock of Btrfs"]);
    place.run("fs ls image+image").fails(2, &["image and image are both device 1"]);
    let report = place.run("fs ls image --json").succeeds().json();
    assert_eq!((&report["entries"][1]["path"], &report["entries"][1]["size"]), (&"summed".into(), &50_000.into()));
    let report = place.run("fs info image --json").succeeds().json();
    assert_eq!((&report["checksum"], &report["generation"]), (&"crc32c".into(), &9.into()));
    assert_eq!((&report["damage"], &report["space"][0]["profile"]), (&json!([]), &"single".into()));
}

#[test]
fn damage_is_named_and_the_rest_copied() {
    let (place, data) = place();
    place.run("fs get image whole").succeeds();
    assert_eq!(place.read("whole/summed"), data);
    assert_eq!(place.read("whole/folder/below"), b"more words");
    place.run("fs get image whole").fails(3, &["whole", "it is not empty"]);
    damage(&place, 8192);
    let cat = place.run("fs cat image/summed");
    cat.fails(3, &["4096 bytes at the logical address 16785408 are lost", "checksum"]);
    let got = place.run("fs get image part");
    got.ends_with(1);
    assert!(got.stderr.contains("summed: skipped: "), "{}", got.stderr);
    assert!(!place.path("part/summed").exists() && place.read("part/inline") == b"a few words");
    let rescued = place.run("fs rescue image saved");
    assert!(rescued.ends_with(1).text().contains("/summed bytes 8192..12287: "), "{}", rescued.text());
    let mut expected = data;
    expected[8192..12_288].fill(0);
    assert_eq!(place.read("saved/summed"), expected);
    let report = place.run("fs rescue image again --json").ends_with(1).json();
    assert_eq!((&report["lost"][0]["offset"], &report["lost"][0]["bytes"]), (&8192.into(), &4096.into()));
}

#[test]
fn a_colon_alone_rescues_all_that_the_image_does() {
    let place = Place::new();
    let mut made = Handmade::new(4096, ChecksumType::Crc32c);
    made.file(TOP, b"named", b"words", Storage::Inline);
    let ino = made.file(TOP, b"nameless", b"more words", Storage::Inline);
    let is_entry = |key: &Key| matches!(key.item_type, ItemType::DIR_INDEX | ItemType::DIR_ITEM);
    let items = made.trees.get_mut(&objectid::FS_TREE).unwrap();
    items.retain(|key, data| !(is_entry(key) && data.ends_with(b"nameless")));
    made.build().write(&place.path("image")).unwrap();
    for (name, to) in [("image", "a"), ("image:", "b"), ("image:/", "c")] {
        place.run(&format!("fs rescue {name} {to}")).succeeds();
        assert_eq!(place.read(format!("{to}/named").as_str()), b"words", "{name}");
        assert_eq!(place.read(format!("{to}/lost+found/subvolume-5/inode-{ino}").as_str()), b"more words", "{name}");
    }
    place.run("fs rescue image/named one").succeeds();
    assert!(!place.path("one/lost+found").exists(), "a part of it was asked for");
}

#[test]
fn names_in_a_filesystem_reach_nothing_outside() {
    let place = Place::new();
    let mut made = Handmade::new(4096, ChecksumType::Crc32c);
    let folder = made.directory(TOP, b"folder");
    made.file(folder, b"file", b"words", Storage::Inline);
    made.put_entry(TOP, b"..", folder, FileType::Directory);
    made.put_entry(TOP, b"../outside", folder, FileType::Directory);
    // A second entry of one name.
    let second = made.file(TOP, b"again", b"second", Storage::Inline);
    made.put_entry(folder, b"file", second, FileType::Regular);
    made.build().write(&place.path("image")).unwrap();
    let got = place.run("fs get image out");
    got.ends_with(1);
    for words in ["a name of dots alone", "a name with the byte 0x2f", "it already exists"] {
        assert!(got.stderr.contains(words), "{words}: {}", got.stderr);
    }
    assert!(!place.path("outside").exists());
    assert_eq!(place.read("out/folder/file"), b"words");
}

#[test]
fn a_mount_shows_files_and_errors_of_damaged_ones() {
    if !can_mount() {
        return;
    }
    let (place, data) = place();
    damage(&place, 8192);
    fs::create_dir(place.path("point")).unwrap();
    let serving = Serving::new(&place, "image point");
    assert_eq!(place.read("point/folder/below"), b"more words");
    let file = fs::File::open(place.path("point/summed")).unwrap();
    let mut read = vec![0; 8192];
    file.read_exact_at(&mut read, 0).unwrap();
    assert_eq!(read, data[..8192]);
    let error = file.read_exact_at(&mut read[..100], 8192).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(5));
    assert!(fs::write(place.path("point/new"), b"").is_err());
    drop(file);
    assert_eq!(serving.end(), 0);
    assert!(!place.path("point/folder").exists());
}

/// What is mounted where the environment names nothing: everything, parity, subvolumes, a log that is left aside, and the oldest format.
const MOUNTED: [&str; 5] = ["crc32c", "raid6", "subvolumes", "log", "old"];

#[test]
fn a_mount_shows_what_the_kernel_shows() {
    if !can_mount() {
        return;
    }
    if let Err(why) = has_mounts() {
        return skipped(&why);
    }
    let is_wanted = |recipe: &Recipe| sets::is_named() || MOUNTED.contains(&recipe.name.as_str());
    let mut mounted = 0;
    for recipe in sets::chosen().into_iter().filter(is_wanted) {
        let folder = tempfile::tempdir().unwrap();
        let made = match recipe.make(folder.path()) {
            Ok(made) => made,
            Err(why) => {
                skipped(&why);
                continue;
            }
        };
        let place = Place::new();
        fs::create_dir(place.path("point")).unwrap();
        let images: Vec<_> = made.images.iter().map(|image| image.to_str().unwrap()).collect();
        let serving = Serving::new(&place, &format!("{}: point", images.join("+")));
        let found = Manifest::scan(&place.path("point")).unwrap();
        let differences = made.manifest.difference(&found);
        assert!(differences.is_empty(), "{}: {differences:#?}", recipe.name);
        assert_eq!(serving.end(), 0, "{}", recipe.name);
        println!("{}: {} paths", recipe.name, found.entries.len());
        mounted += 1;
    }
    assert!(mounted > 0, "this machine mounts filesystems, and none was mounted");
}

#[test]
fn the_place_of_a_subvolume_is_copied_with_its_owner() {
    if let Err(why) = has_mounts() {
        return skipped(&why);
    }
    let recipes = sets::standard();
    let everything = recipes.iter().find(|recipe| recipe.name == "crc32c").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let made = everything.make(folder.path()).unwrap();
    let place = Place::new();
    place.run(&format!("fs get {}:subvolumes/snapshot copy", made.images[0].display())).succeeds();
    let (copied, shown) = (place.path("copy/inner"), &made.manifest.entries[&b"subvolumes/snapshot/inner"[..]]);
    let copied = fs::symlink_metadata(copied).unwrap();
    assert_eq!((copied.mode() & 0o7777, copied.uid(), copied.gid()), (shown.mode, shown.uid, shown.gid));
    assert_eq!((shown.mode, shown.uid, shown.gid), (0o755, 1234, 5678));
}

#[test]
fn superblocks_of_another_filesystem_are_named_and_the_own_ones_used() {
    let place = Place::new();
    let made = |name: &str, fsid: &[u8; 16], device_uuid: &[u8; 16]| {
        let identity = Identity { fsid: *fsid, device_uuid: *device_uuid, device_bytes: 80 << 20, shift_bytes: 0 };
        let mut made = Handmade::of(identity, 4096, ChecksumType::Crc32c);
        made.file(objectid::FIRST_FREE, b"file", fsid, Storage::Inline);
        made.build().write(&place.path(name)).unwrap();
        fs::File::options().write(true).open(place.path(name)).unwrap().set_len(80 << 20).unwrap();
        place.read(name)
    };
    let own = made("image", b"the own one.....", b"its own device..");
    let other = made("other", b"another one.....", b"another device..");
    let same = made("same", b"the own one.....", b"another device..");
    let put = |of: &[u8], places: &[usize]| {
        let mut image = own.clone();
        places.iter().for_each(|at| image[*at..][..4096].copy_from_slice(&of[*at..][..4096]));
        place.write("image", &image);
    };
    let named = |answer: &Answer, word: &str| assert!(answer.stderr.contains(word), "{}", answer.stderr);
    let (first, second) = (64 << 10, 64 << 20);
    place.run("fs verify image").succeeds();
    for (of, word) in
        [(&other, "it is of another filesystem, with the UUID 616e6f74"), (&same, "it is of another device")]
    {
        for (at, status) in [(first, 4), (second, 0)] {
            put(of, &[at]);
            named(place.run("fs verify image").ends_with(1), word);
            named(place.run("fs info image").ends_with(1), word);
            named(place.run("fs ls image").ends_with(status), word);
            let cat = place.run("fs cat image/file");
            named(cat.ends_with(status), word);
            assert_eq!(cat.stdout, b"the own one.....");
            let _ = fs::remove_dir_all(place.path("saved"));
            named(place.run("fs rescue image saved").ends_with(status), word);
            assert_eq!(place.read("saved/file"), b"the own one.....");
        }
    }
    // No superblock of its own is left.
    put(&same, &[first, second]);
    let uuids = ["616e6f74-6865-7220-6465-766963652e2e", "69747320-6f77-6e20-6465-766963652e2e"];
    for command in ["fs verify image", "fs ls image", "fs cat image/file"] {
        place.run(command).fails(3, &uuids);
    }
    let rescued = place.run("fs rescue image left");
    uuids.iter().for_each(|uuid| named(rescued.ends_with(1), uuid));
    assert_eq!(place.read("left/file"), b"the own one.....");
    put(&other, &[first, second]);
    place.run("fs rescue image nothing").ends_with(1);
}
