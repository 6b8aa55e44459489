//! What lies at a path: a volume, what is left of one, or bytes without seals. No command takes one for another.

use crate::common::{Answer, Place, SUPERBLOCK_OFFSETS, noise};

/// Everything that opens a path, with `v` and `small` in the folder.
const COMMANDS: [&str; 12] = [
    "info v",
    "verify v",
    "verify raw:v",
    "serve v --listen 127.0.0.1:0 --control none",
    "zero raw:v --yes",
    "zero v --yes",
    "discard v --yes",
    "compare v small",
    "copy v out",
    "copy v -",
    "copy small v",
    "create v --size 1MiB",
];

/// A volume `v` of 2 MiB with data in it, and a file `small`.
fn place() -> (Place, Vec<u8>) {
    let place = Place::new();
    let data = noise(7, 2 << 20);
    place.volume("--size 2MiB", &data);
    place.write("small", &noise(8, 4096));
    (place, data)
}

/// Where the third superblock is.
fn third(place: &Place) -> u64 {
    place.len("v") - 4096
}

/// Every command refuses `v`, changes nothing, and says what else there is.
#[track_caller]
fn is_refused_by_all(place: &Place) {
    let before = place.read("v");
    for command in COMMANDS {
        let answer = place.run(command);
        answer.fails(3, &["v", "the remains of a protected volume"]);
        let helps = answer.stderr.contains("sealblock rescue") || answer.stderr.contains("--force");
        assert!(helps, "{command}: {}", answer.stderr);
        assert!(place.read("v") == before, "{command}: what is refused is left as it is");
        assert!(!place.path("out").exists(), "{command}");
    }
}

#[test]
fn one_wrong_byte_in_every_magic_makes_no_raw_file_of_a_volume() {
    let (place, data) = place();
    for at in [SUPERBLOCK_OFFSETS[0], SUPERBLOCK_OFFSETS[1], third(&place)] {
        place.poke("v", at + 3, b"?");
    }
    is_refused_by_all(&place);
    // Its records tell where its blocks are.
    place.run("rescue v out").ends_with(1).says(&[
        "no superblock can be used",
        "512 blocks of 4096",
        "no block is known",
    ]);
    assert!(place.read("out") == data);
}

#[test]
fn a_wiped_start_and_end_leave_a_volume_that_nobody_takes_for_blank() {
    let (place, _) = place();
    place.poke("v", 0, &vec![0; 64 << 10]);
    place.poke("v", third(&place), &[0; 4096]);
    is_refused_by_all(&place);
    // Nor without its log.
    place.poke("v", 0, &vec![0; 128 << 10]);
    is_refused_by_all(&place);
    // On purpose it goes.
    place.run("copy small v --force").succeeds();
    assert_eq!(place.read("v"), noise(8, 4096));
}

#[test]
fn remains_are_overwritten_by_create_only_with_force() {
    let (place, _) = place();
    place.poke("v", 0, &vec![0; 64 << 10]);
    place.poke("v", third(&place), &[0; 4096]);
    place.run("create v --size 1MiB").fails(3, &["the remains of a protected volume", "--force"]);
    place.run("create v --size 1MiB --force").succeeds();
    place.run("compare --zero v").succeeds();
}

#[test]
fn the_third_superblock_opens_a_volume_whose_start_was_wiped() {
    let (place, data) = place();
    place.poke("v", 0, &vec![0; 64 << 10]);
    let wiped = place.read("v");
    place.run("copy v back").succeeds();
    assert!(place.read("back") == data);
    let copies = |place: &Place| place.run("info v --json").json()["volume"]["superblock_copies"].clone();
    place.run("info v").ends_with(4);
    let states =
        |place: &Place| copies(place).as_array().unwrap().iter().map(|c| c["state"] == "good").collect::<Vec<_>>();
    assert_eq!(states(&place), [false, false, true]);
    assert_eq!(copies(&place)[2]["offset"], third(&place));
    place.run("info v").ends_with(4).says(&["1 of 3 good", "lost at byte 0", "lost at byte 32768"]);
    let verified = place.run("verify v");
    verified.ends_with(4);
    verified.ends_with(4);
    for words in ["the superblock of v at byte 0 is lost", "at byte 32768 is lost", "--repair rewrites it"] {
        assert!(verified.stderr.contains(words), "{}", verified.stderr);
    }
    assert!(place.read("v") == wiped, "looking at a volume changes nothing");
    place.run("zero v --range 3").succeeds();
    assert_eq!(states(&place), [true, true, true]);
    assert!(place.run("verify v").succeeds().stderr.is_empty());
    assert!(place.blocks("v", 4, 511) == data[4 << 12..]);
}

#[test]
fn a_lost_superblock_is_told_by_a_server_and_written_anew() {
    let (place, _) = place();
    place.poke("v", third(&place), &[0; 4096]);
    let server = crate::common::server::Server::start(&place, "v");
    server.stop().is_clean();
    let copies = place.run("info v --json").succeeds().json()["volume"]["superblock_copies"].clone();
    assert!(copies.as_array().unwrap().iter().all(|copy| copy["state"] == "good" && copy["why"].is_null()));
}

#[test]
fn a_plain_file_is_blocks_only_where_the_target_says_so() {
    let (place, data) = place();
    ["f", "g"].iter().for_each(|name| place.write(name, &noise(1, 64 << 10)));
    for command in [
        "info f",
        "verify f",
        "zero f --yes",
        "discard f --yes",
        "info offset:0..1,f",
        "info stripe:f,g",
        "scrub status f",
    ] {
        let answer = place.run(command);
        answer.ends_with(3);
        let is_told = answer.stderr.contains("raw:f") && answer.stderr.contains("sealblock create");
        assert!(is_told || command.starts_with("scrub"), "{command}: {}", answer.stderr);
    }
    place.run("serve f --listen 127.0.0.1:0 --control none").fails(3, &["f", "plain file", "raw:f"]);
    assert!(place.read("f") == noise(1, 64 << 10));
    let info = place.run("info raw:f --json").succeeds().json();
    assert_eq!((&info["target"], &info["kind"], &info["bytes"]), (&"raw:f".into(), &"raw file".into(), &65536.into()));
    place.run("zero raw:f --range 1").succeeds();
    assert_eq!(place.read("f")[512..1024], [0; 512]);
    place.run("compare f raw:f").succeeds();
    // A volume is no plain file, whatever it is called by.
    for command in ["info raw:v", "zero raw:v --yes", "copy f raw:v", "copy raw:v out", "compare raw:v f"] {
        place.run(command).fails(3, &["v", "protected volume"]);
    }
    place.run("create raw:x --size 1MiB").ends_with(2);
    assert!(place.blocks("v", 0, 511) == data);
}

#[test]
fn what_looks_like_a_volume_only_further_in_is_a_plain_file() {
    let (place, _) = place();
    let volume = place.read("v");
    for before in [512, 32 << 10, 64 << 10, 1 << 20] {
        place.write("image", &[vec![0; before], volume.clone(), vec![0; 4096]].concat());
        place.run("info raw:image").succeeds();
        place.run("copy small image").succeeds();
        assert_eq!(place.read("image"), noise(8, 4096), "{before} before");
    }
}

/// The runs of lost blocks, each with why.
fn lost(answer: &Answer) -> Vec<(u64, u64, String)> {
    let runs = answer.json()["lost"].as_array().unwrap().clone();
    let of = |run: &serde_json::Value, name: &str| run[name].as_u64().unwrap();
    runs.iter().map(|run| (of(run, "lba"), of(run, "blocks"), run["why"].as_str().unwrap().to_owned())).collect()
}

#[test]
fn of_a_volume_that_was_cut_off_rescue_copies_what_is_left() {
    let (place, data) = place();
    let whole = place.read("v");
    place.write("v", &whole[..whole.len() - (3 << 20)]);
    for command in ["info v", "verify v", "copy v out", "copy small v"] {
        place.run(command).fails(3, &["v", "cut off", "sealblock rescue"]);
    }
    let answer = place.run("rescue v out --json");
    answer.ends_with(1);
    // Its slots were filled in the order of addresses, so what is lost is one run at the end.
    let [(lba, blocks, why)] = <[_; 1]>::try_from(lost(&answer)).unwrap();
    assert!(lba > 0 && lba + blocks == 512 && why == "media", "{lba} {blocks} {why}");
    let expected = [&data[..(lba as usize) << 12], &vec![0; (blocks as usize) << 12]].concat();
    assert!(place.read("out") == expected, "what lies before the cut is there, and zeroes for the rest");
}

#[test]
fn rescue_copies_what_verifies_and_lists_the_rest() {
    let (place, data) = place();
    for lba in [5, 6, 300] {
        place.run(&format!("corrupt v --lba {lba} --kind data")).succeeds();
    }
    place.poke("v", 0, &vec![0; 64 << 10]);
    let damaged = place.read("v");
    let answer = place.run("rescue v saved --json");
    answer.ends_with(1);
    let wanted = [(5, 2, "guard".to_owned()), (300, 1, "guard".to_owned())];
    assert_eq!(lost(&answer), wanted);
    let report = answer.json();
    assert_eq!((&report["blocks_rescued"], &report["blocks_lost"]), (&509.into(), &3.into()));
    let mut expected = data.clone();
    for lba in [5_usize, 6, 300] {
        expected[lba << 12..(lba + 1) << 12].fill(0);
    }
    assert!(place.read("saved") == expected, "lost blocks are zeroes in a file");
    // A volume says which of its blocks are not there.
    place.run("create w --size 2MiB --guard crc16").succeeds();
    place.run("rescue v w").ends_with(1).says(&["blocks 5..6 lost: guard", "block 300 lost: guard", "3 lost"]);
    place.run("copy offset:5..5,w -").ends_with(3);
    assert!(place.blocks("w", 7, 299) == data[7 << 12..300 << 12]);
    assert!(place.read("v") == damaged, "the volume is only read");
    // Its twin has nothing to lose.
    place.run("create x --size 2MiB").succeeds();
    place.run("copy data x").succeeds();
    assert!(place.run("rescue x -").succeeds().stdout == data);
    place.run("rescue x out").succeeds().says(&["512 of 512", "nothing lost"]);
    place.run("rescue small out").fails(3, &["small", "not a protected volume"]);
    place.run("rescue x - --json").fails(2, &["standard output"]);
}

/// A volume `v` with data in it, and two others of its shape: `used`, which was opened more often, and `blank`.
fn with_others() -> (Place, Vec<u8>) {
    let (place, data) = place();
    place.run("create blank --size 2MiB").succeeds();
    place.run("create used --size 2MiB").succeeds();
    for _ in 0..4 {
        place.run("copy small offset:0..0,used").succeeds();
    }
    (place, data)
}

#[test]
fn superblocks_of_another_volume_are_named_and_take_nothing() {
    for other in ["blank", "used"] {
        for length in [512, 64 << 10] {
            let (place, data) = with_others();
            place.poke("v", 0, &place.read(other)[..length]);
            let foreign = place.read("v");
            let uuid = |name: &str, status| {
                place.run(&format!("info {name} --json")).ends_with(status).json()["volume"].clone()
            };
            let (own, taken) = (uuid("v", 4), uuid(other, 0));
            assert!(own["uuid"] != taken["uuid"] && own["identity"] == "certain", "{own}");
            assert_eq!(own["superblock_copies"][0]["state"], "foreign");
            let name = taken["uuid"].as_str().unwrap();
            place.run("info v").ends_with(4).says(&["another volume", name]);
            assert!(place.run("verify v").ends_with(4).stderr.contains("another volume is there"));
            assert!(place.run("copy v out").succeeds().stderr.contains("another volume is there"));
            assert!(place.read("out") == data, "{other}, {length}");
            let rescued = place.run("rescue v saved");
            rescued.ends_with(1).says(&["record", "of another volume", "512 of 512", "no block is known to be lost"]);
            let says = String::from_utf8_lossy(&rescued.stdout);
            assert!(!says.contains("nothing lost") && place.read("saved") == data, "{says}");
            assert!(place.read("v") == foreign, "reading writes nothing");
            place.run("copy small offset:0..0,v").succeeds();
            place.run("verify v").succeeds();
            assert!(place.blocks("v", 1, 511) == data[4096..], "{other}, {length}");
        }
    }
}

#[test]
fn a_volume_with_every_superblock_of_another_is_what_is_left_of_one_and_rescued_as_its_own() {
    let (place, data) = with_others();
    let other = place.read("used");
    for at in [SUPERBLOCK_OFFSETS[0], SUPERBLOCK_OFFSETS[1], third(&place)] {
        place.poke("v", at, &other[at as usize..at as usize + 512]);
    }
    place.run("info v").fails(3, &["a superblock of another volume at byte 0"]);
    is_refused_by_all(&place);
    place.run("rescue v saved").ends_with(1).says(&["512 blocks of 4096"]);
    assert!(place.read("saved") == data);
}

#[test]
fn a_file_of_two_volumes_is_refused_by_both_names_and_rescued_as_the_one_that_is_asked_for() {
    let (place, data) = with_others();
    place.run("copy v used").succeeds();
    let uuid = |name: &str| place.run(&format!("info {name} --json")).succeeds().json()["volume"]["uuid"].clone();
    let names = [uuid("v"), uuid("used")].map(|uuid| uuid.as_str().unwrap().to_owned());
    // One region of the log, one copy of the group map, and the end: as much as is left of this one, but for its map pages.
    let (other, end) = (place.read("used"), place.len("v") as usize);
    for (from, to) in [(0, 512), (192 << 10, 320 << 10), (320 << 10, (320 << 10) + 512), (end - (64 << 10), end)] {
        place.poke("v", from as u64, &other[from..to]);
    }
    let before = place.read("v");
    for command in ["info v", "verify v", "copy v out", "zero v --yes", "serve v --listen 127.0.0.1:0 --control none"] {
        place.run(command).fails(3, &[&names[0], &names[1], "cannot be told", "--identity"]);
    }
    place.run(&format!("rescue v saved --identity {}", names[0])).ends_with(1).says(&["not proven (chosen)"]);
    assert!(place.read("saved") == data && place.read("v") == before);
    place.run("rescue v x --identity 00000000-0000-0000-0000-000000000000").fails(3, &["no superblock of volume"]);
    place.run("rescue v x --identity 7").fails(2, &["UUID"]);
}

/// Without any superblock, and without the first `wiped` bytes.
fn wipe_superblocks(place: &Place, name: &str, wiped: usize) {
    let end = place.read(name).len() as u64;
    place.poke(name, 0, &vec![0; wiped]);
    place.poke(name, end - 4096, &[0; 4096]);
}

#[test]
fn rescue_without_a_superblock_copies_what_verifies_and_lists_the_rest() {
    for shape in ["--guard crc16", "--guard crc64 --type 3", "--block-size 512 --guard none"] {
        let place = Place::new();
        let data = noise(3, 2 << 20);
        place.volume(&format!("--size 2MiB {shape}"), &data);
        let block: usize = if shape.contains("512") { 512 } else { 4096 };
        // Without protection information there is no guard to damage, and the data have a checksum all the same.
        let second = if shape.contains("none") { "data" } else { "guard" };
        place.run("corrupt v --lba 7 --kind data").succeeds();
        place.run(&format!("corrupt v --lba 300 --kind {second}")).succeeds();
        let sector = place.run("info v --json").succeeds().json()["volume"]["sector_bytes"].clone();
        wipe_superblocks(&place, "v", 64 << 10);
        let damaged = place.read("v");
        let answer = place.run("rescue v saved --json");
        answer.ends_with(1);
        let (report, mut due) = (answer.json(), data.clone());
        let found = &report["without_superblock"];
        assert_eq!((&report["block_size"], &found["sector_bytes"]), (&block.into(), &sector), "{shape}");
        assert_eq!(report["superblock_copies"].as_array().unwrap().len(), 3);
        let wanted = vec![(7, 1, "guard".to_owned()), (300, 1, "guard".to_owned())];
        assert_eq!(lost(&answer), wanted, "{shape}");
        wanted.iter().for_each(|(lba, ..)| due[*lba as usize * block..][..block].fill(0));
        assert!(place.read("saved") == due, "{shape}");
        assert!(place.read("v") == damaged, "the volume is only read");
    }
}

#[test]
fn rescue_finds_a_volume_whose_first_mebibyte_is_gone() {
    let place = Place::new();
    let data = noise(4, 8 << 20);
    place.write("data", &data);
    // Large enough that its tables lie behind the first mebibyte.
    place.run("create v --size 256MiB --guard crc32c").succeeds();
    place.run("copy data v").succeeds();
    wipe_superblocks(&place, "v", 1 << 20);
    let answer = place.run("rescue v saved --json");
    answer.ends_with(1);
    let report = answer.json();
    assert_eq!((&report["blocks"], &report["blocks_lost"]), (&65536.into(), &0.into()));
    assert_eq!(report["without_superblock"]["may_be_older"], true, "part of its log is gone");
    assert!(
        place.read("saved")[..data.len()] == data && place.read("saved")[data.len()..].iter().all(|byte| *byte == 0)
    );
}

#[test]
fn rescue_says_what_it_cannot_tell_and_takes_a_hint() {
    let (place, data) = place();
    wipe_superblocks(&place, "v", 64 << 10);
    // Longer than the volume, as a block device is.
    let longer = [place.read("v"), vec![0; (5 << 20) + 4096]].concat();
    place.write("long", &longer);
    place.run("rescue long out").fails(3, &["long", "no superblock is left", "--capacity"]);
    place.run("rescue long out --capacity 2MiB").ends_with(1).says(&["no block is known to be lost"]);
    assert!(place.read("out") == data);
    place.run("rescue long out --capacity 2MiB --block-size 512").fails(3, &["no superblock is left"]);
    place.run("rescue long out --capacity 1000").fails(3, &["no volume has this capacity"]);
    // Nothing of a volume: not with a hint either.
    place.write("noise", &noise(9, 4 << 20));
    place.run("rescue noise out").fails(3, &["noise", "not a protected volume"]);
    place.run("rescue noise out --capacity 2MiB").fails(3, &["noise", "no map entries of a volume"]);
    // A volume that has a superblock needs no hint, and does not ignore one.
    place.run("create w --size 2MiB").succeeds();
    place.run("rescue w out --capacity 2MiB").fails(2, &["w", "has a superblock"]);
}
