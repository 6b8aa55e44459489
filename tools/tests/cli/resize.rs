//! `sealblock resize` of volumes that no server has open.

use crate::common::{Place, noise};

const MIB: u64 = 1 << 20;

fn made(size: &str) -> Place {
    let place = Place::new();
    place.run(&format!("create v --size {size}")).succeeds();
    place
}

#[test]
fn a_volume_grows_and_shrinks_and_keeps_what_it_holds() {
    let place = made("8MiB");
    place.write("data", &noise(1, 8 << 20));
    place.run("copy data v").succeeds();
    let told = place.run("resize v --size 40MiB --json").succeeds().json();
    assert_eq!((told["before_bytes"].as_u64(), told["size_bytes"].as_u64()), (Some(8 * MIB), Some(40 * MIB)));
    assert!(told["pause_us"].is_null(), "nobody waited");
    let info = place.run("info v --json").succeeds().json();
    assert_eq!(info["bytes"], 40 * MIB);
    let volume = &info["volume"];
    assert_eq!((volume["created_bytes"].as_u64(), volume["block_groups"].as_u64()), (Some(8 * MIB), Some(2)));
    assert_eq!(volume["segments"][1]["first_block"], 2048);
    assert_eq!(volume["segments"][1]["blocks"], 8192);
    assert_eq!(volume["medium_bytes"], place.len("v"));
    assert!(place.run("info v").succeeds().text().contains("created with 8 MiB; in 2 of at most 16 parts"));
    let read = place.run("copy v -").succeeds().stdout.clone();
    assert!(read[..8 << 20] == noise(1, 8 << 20) && read[8 << 20..].iter().all(|byte| *byte == 0));
    place.write("more", &noise(2, 40 << 20));
    place.run("copy more v").succeeds();
    place.run("verify v").succeeds();
    place
        .run("resize v --size 8MiB")
        .fails(3, &["8192 blocks beyond the new end hold data, the first of them block 2048", "discard"]);
    place.run("discard v --range 2048..").succeeds();
    place.run("resize v --size 8MiB").succeeds();
    place.run("verify v").succeeds();
    assert_eq!(place.run("copy v -").succeeds().stdout, noise(2, 40 << 20)[..8 << 20]);
    let info = place.run("info v --json").succeeds().json();
    assert_eq!(info["volume"]["segments"].as_array().map(Vec::len), Some(1));
    assert_eq!(info["volume"]["medium_bytes"], place.len("v"));
}

#[test]
fn a_preallocated_volume_takes_the_space_of_what_comes() {
    let place = Place::new();
    place.run("create v --size 8MiB --preallocate").succeeds();
    if place.allocated_bytes("v") < 8 * MIB {
        return crate::common::skipped("the file system reserves no space");
    }
    place.run("resize v --size 32MiB").succeeds();
    assert!(place.allocated_bytes("v") >= place.len("v"));
}

#[test]
fn sizes_and_targets_that_cannot_be_are_refused() {
    let place = made("8MiB");
    place.write("plain", &noise(1, 1 << 20));
    for (arguments, status, why) in [
        ("resize v --size 0", 2, "at least one block"),
        ("resize v --size 8000000", 2, "a multiple of the block size"),
        ("resize v --size 5PiB", 2, "more than"),
        ("resize plain --size 2MiB", 3, "not a protected volume"),
        ("resize nothing --size 2MiB", 3, ""),
        ("resize mem:8MiB --size 16MiB", 3, "volume"),
    ] {
        place.run(arguments).fails(status, &[why]);
    }
    let before = place.read("v");
    let told = place.run("resize v --size 8MiB").succeeds().text();
    assert!(told.contains("already"), "{told}");
    assert_eq!(place.len("v"), before.len() as u64);
}

#[test]
fn members_are_refused_and_a_volume_that_was_resized_becomes_one() {
    let place = made("16MiB");
    place.run("resize v --size 700MiB").succeeds();
    place.run("create w --size 700MiB").succeeds();
    place.write("data", &noise(3, 4 << 20));
    place.run("copy data mirror:v,w").succeeds();
    place.run("verify mirror:v,w").succeeds();
    for member in ["v", "w"] {
        place
            .run(&format!("resize {member} --size 800MiB"))
            .fails(3, &["resizing members is not supported", "of 2 of mirror"]);
    }
    place.run("copy mirror:v,w back").succeeds();
    assert_eq!(place.read("back")[..4 << 20], noise(3, 4 << 20));
}

#[test]
fn without_superblocks_a_resized_volume_is_not_guessed_at() {
    let place = made("8MiB");
    place.run("resize v --size 20MiB").succeeds();
    place.write("data", &noise(1, 20 << 20));
    place.run("copy data v").succeeds();
    for at in crate::common::SUPERBLOCK_OFFSETS {
        place.poke("v", at, &[0; 512]);
    }
    // The one at the new end opens it.
    place.run("rescue v saved").succeeds();
    assert_eq!(place.read("saved"), noise(1, 20 << 20));
    place.poke("v", place.len("v") - 4096, &[0; 512]);
    for hint in ["", "--capacity 8MiB", "--capacity 20MiB"] {
        place.run(&format!("rescue v again {hint}")).fails(3, &[]);
        assert!(!place.path("again").exists() || place.len("again") == 0, "{hint}");
    }
    place.run("rescue v again --capacity 8MiB").fails(3, &["was resized"]);
}
