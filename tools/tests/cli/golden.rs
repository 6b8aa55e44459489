//! Volumes and groups that earlier programs made, as they lie in `tools/tests/golden`: this program opens each of them, for
//! reading and for writing, and finds what is in it. What a later program makes is refused by its version.
//!
//! `SEALBLOCK_WRITE_GOLDEN=SET` makes a new set instead (see `tools/tests/golden/README.md`); a set is never made anew.

mod make;
mod pack;

use std::fs;

use sealblock_integrity::guard::crc32c;
use sealblock_media_volume::format::Superblock;

use crate::common::{Place, SUPERBLOCK_BYTES, SUPERBLOCK_OFFSETS};
use pack::Row;

/// The block that is written to see that a target can be.
const CHANGED_BLOCK: usize = 3;

/// A change of a superblock's bytes.
type Change = fn(&mut [u8]);

/// What this program finds in a packed case.
#[track_caller]
fn look(packed: &[u8], target: &str) -> Row {
    let place = Place::in_memory();
    let folder = place.path("case");
    fs::create_dir(&folder).unwrap();
    pack::unpack(packed, &folder);
    let names: Vec<String> =
        fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    for name in &names {
        fs::rename(folder.join(name), place.path(name)).unwrap();
    }
    let files = || -> Vec<String> { names.iter().map(|name| pack::digest(&place.read(name))).collect() };

    let before = files();
    let info = place.run(&format!("info {target} --json"));
    let block_bytes = info.json()["block_size"].as_u64().unwrap() as usize;
    let verify = place.run(&format!("verify {target} --json"));
    assert!([0, 1, 4].contains(&verify.status), "verify {target}: {}", verify.stderr);
    let copy = place.run(&format!("copy {target} out --salvage"));
    assert!([0, 1, 4].contains(&copy.status), "copy {target}: {}", copy.stderr);
    assert_eq!(files(), before, "reading {target} changed it");

    let mut content = place.read("out");
    let digest = pack::digest(&content);
    let zero = place.run(&format!("zero {target} --range {CHANGED_BLOCK}"));
    assert!([0, 4].contains(&zero.status), "zero {target}: {}", zero.stderr);
    assert_ne!(files(), before, "{target} was not written");
    let after = place.run(&format!("verify {target} --json"));
    fs::remove_file(place.path("out")).unwrap();
    assert!([0, 1, 4].contains(&place.run(&format!("copy {target} out --salvage")).status));
    content[CHANGED_BLOCK * block_bytes..][..block_bytes].fill(0);
    assert_eq!(
        pack::digest(&place.read("out")),
        pack::digest(&content),
        "{target} after block {CHANGED_BLOCK} was zeroed"
    );
    Row {
        name: String::new(),
        verify: verify.status,
        copy: copy.status,
        // Whether a resync ends before the command that began it is chance.
        after: if (verify.status, after.status) == (4, 4) { 0 } else { after.status },
        digest,
        target: target.to_owned(),
    }
}

/// Changes every copy of a volume's superblock, and gives each the checksum that fits.
fn patch_superblocks(place: &Place, name: &str, change: impl Fn(&mut [u8])) {
    let mut bytes = place.read(name);
    for offset in SUPERBLOCK_OFFSETS.into_iter().chain([bytes.len() as u64 - 4096]) {
        let superblock = &mut bytes[offset as usize..][..SUPERBLOCK_BYTES as usize];
        // A volume that was written once or twice has one copy at its start.
        if superblock.starts_with(b"\x89SEAL") {
            change(superblock);
            make::seal_superblock(superblock);
        }
    }
    place.write(name, &bytes);
}

#[test]
fn golden_images_of_every_set_are_opened_read_and_written() {
    if let Ok(set) = std::env::var("SEALBLOCK_WRITE_GOLDEN") {
        make::make(&set);
    }
    let mut cases = 0;
    for set in fs::read_dir(pack::sets()).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_dir()) {
        let rows = pack::table(&set);
        let is_image = |path: &std::path::Path| path.extension().is_some_and(|extension| extension == "gz");
        let images = fs::read_dir(&set).unwrap().filter(|entry| is_image(&entry.as_ref().unwrap().path())).count();
        assert_eq!(images, rows.len(), "{}: every image has a row, and every row an image", set.display());
        for row in rows {
            let packed = fs::read(set.join(format!("{}.gz", row.name))).unwrap();
            let found = Row { name: row.name.clone(), ..look(&packed, &row.target) };
            assert_eq!(found, row, "{}", set.display());
            cases += 1;
        }
    }
    assert!(cases >= 54, "only {cases} cases were found");
}

/// A case of the newest set.
fn unpacked(name: &str) -> Place {
    let place = Place::in_memory();
    let mut sets: Vec<_> = fs::read_dir(pack::sets()).unwrap().map(|entry| entry.unwrap().path()).collect();
    sets.sort();
    let newest = sets.iter().rfind(|path| path.is_dir()).unwrap();
    pack::unpack(&fs::read(newest.join(format!("{name}.gz"))).unwrap(), &place.path(""));
    place
}

#[test]
fn volumes_of_a_later_version_or_with_unknown_features_are_refused_by_name_and_stay_as_they_are() {
    let changes: [(Change, &str); 3] = [
        (|superblock| superblock[8] = 3, "format version 3"),
        (|superblock| superblock[8] = 1, "format version 1"),
        (|superblock| superblock[12] |= 0x40, "feature"),
    ];
    for (change, words) in changes {
        let place = unpacked("closed-crc32c-4096");
        patch_superblocks(&place, "v", change);
        let before = place.read("v");
        for command in
            ["info v", "verify v", "copy v out", "zero v --range 3", "resize v --size 2MiB", "serve v --strict"]
        {
            place.run(command).fails(3, &[words]);
        }
        place.run("create v --size 1MiB").ends_with(3);
        assert!(place.read("v") == before, "a volume that is not understood was changed");
    }
}

/// Gives every label in a file's reserved areas another version, with checksums that fit. Returns how many there were.
fn patch_labels(place: &Place, name: &str, magic: &[u8], version: u8) -> usize {
    let mut bytes = place.read(name);
    let salt = crc32c(&bytes[16..32]);
    let mut patched = 0;
    for at in (0..bytes.len()).step_by(512) {
        if !bytes[at..].starts_with(b"SANX") || !bytes[at + 64..].starts_with(magic) {
            continue;
        }
        let length = u32::from_le_bytes(bytes[at + 16..at + 20].try_into().unwrap()) as usize;
        let area = &mut bytes[at..at + 64 + length];
        let label = &mut area[64..];
        label[8] = version;
        match magic {
            b"SBMIRROR" => {
                let checksum = crc32c(&label[16..]);
                label[12..16].copy_from_slice(&checksum.to_le_bytes());
            }
            b"SBSTRIPE" => {
                let checksum = crc32c(&label[..12]) ^ crc32c(&label[16..]).rotate_left(1);
                label[12..16].copy_from_slice(&checksum.to_le_bytes());
            }
            _ => {
                let checksum = crc32c(&label[8..]);
                label[4..8].copy_from_slice(&checksum.to_le_bytes());
            }
        }
        let checksum = crc32c(&area[8..]) ^ salt;
        area[4..8].copy_from_slice(&checksum.to_le_bytes());
        patched += 1;
    }
    place.write(name, &bytes);
    patched
}

/// The volumes below a group are opened before its labels are read, and closed again: of these only the superblocks and the high-water
/// mark change.
fn without_superblocks(mut bytes: Vec<u8>) -> Vec<u8> {
    for offset in Superblock::decode(&bytes).unwrap().layout.high_water_offsets() {
        bytes[offset as usize..][..512].fill(0);
    }
    for offset in SUPERBLOCK_OFFSETS.into_iter().chain([bytes.len() as u64 - 4096]) {
        bytes[offset as usize..][..SUPERBLOCK_BYTES as usize].fill(0);
    }
    bytes
}

#[test]
fn labels_of_a_later_version_are_refused_by_name_and_stay_as_they_are() {
    for (case, target, magic) in [("mirror", "mirror:a,b", b"SBMIRROR"), ("stripe", "stripe-16KiB:a,b", b"SBSTRIPE")] {
        let place = unpacked(case);
        for name in ["a", "b"] {
            assert!(patch_labels(&place, name, magic, 9) >= 2, "{name} has labels");
        }
        let files = || ["a", "b"].map(|name| without_superblocks(place.read(name)));
        let before = files();
        for command in ["info", "verify", "zero --range 3"] {
            place.run(&format!("{command} {target}")).fails(3, &["label has version 9"]);
        }
        assert!(files() == before, "{case}: a label that is not understood, or what it is about, was changed");
    }
}

#[test]
fn a_scrub_state_of_a_later_version_is_kept_as_it_is() {
    let place = unpacked("scrubbed");
    let known = place.run("scrub status v --json").json();
    assert_eq!((&known["saved"], known["runs"].as_array().unwrap().len()), (&"on_disk".into(), 1), "{known}");
    assert!(patch_labels(&place, "v", b"SCRB", 9) >= 1);
    let answer = place.run("scrub status v");
    assert!(
        answer.text().contains("version 9") || answer.stderr.contains("version 9"),
        "{}{}",
        answer.text(),
        answer.stderr
    );
}

/// A record is about one state of one file, so of an earlier machine it is read, named and not used.
#[test]
fn records_of_verify_of_every_set_are_read() {
    for (set, why) in
        [("0.1.0", "an earlier version"), ("0.2.0", "it is another target now"), ("0.2.0", "damaged before: blocks 5")]
    {
        let place = Place::in_memory();
        place.run("create v --size 64MiB").succeeds();
        place.write("record", &fs::read(pack::sets().join(set).join("verify-resume")).unwrap());
        let answer = place.run("verify v --resume record");
        answer.succeeds();
        assert!(answer.stderr.contains("v starts over: ") && answer.stderr.contains(why), "{set}: {}", answer.stderr);
    }
}

#[test]
fn records_of_verify_of_other_versions_are_named() {
    let place = unpacked("closed-crc32c-4096");
    let body = "{}\n";
    let record = |version: u32| format!("sealblock-verify-resume {version} {:08x}\n{body}", crc32c(body.as_bytes()));
    place.write("later", record(3).as_bytes());
    place.run("verify v --resume later").fails(3, &["version 3"]);
    assert_eq!(place.read("later"), record(3).as_bytes());
    place.write("earlier", record(1).as_bytes());
    let answer = place.run("verify v --resume earlier");
    assert!(answer.stderr.contains("earlier version"), "{}", answer.stderr);
    answer.succeeds();
}
