//! Space goes back to the file system, and what was given back reads as zeroes under a seal.

use crate::common::{Place, noise, skipped};

const MIB: u64 = 1 << 20;

/// A volume full of data, or nothing where the file system punches no holes.
fn full(options: &str) -> Option<(Place, u64)> {
    let place = Place::new();
    place.write("holes", &noise(1, 1 << 20));
    place.run("zero raw:holes --yes").succeeds();
    if place.allocated_bytes("holes") > 0 {
        skipped("the file system punches no holes");
        return None;
    }
    place.run(&format!("create v --size 16MiB {options}")).succeeds();
    let empty = place.allocated_bytes("v");
    place.write("data", &noise(1, 16 << 20));
    place.run("copy data v").succeeds();
    assert!(place.allocated_bytes("v") >= empty + 16 * MIB);
    Some((place, empty))
}

#[test]
fn zero_and_discard_give_space_back() {
    for options in ["", "--block-size 512 --guard crc16", "--guard crc64 --type 3", "--guard none"] {
        for command in ["zero", "discard"] {
            let Some((place, empty)) = full(options) else { return };
            let block_bytes = place.run("info v --json").succeeds().json()["block_size"].as_u64().unwrap();
            // A record and a generation for each block, in pages.
            let tables = (16 * MIB / block_bytes) * 40 + MIB / 4;
            let (quarter, half) = (4 * MIB / block_bytes, 8 * MIB / block_bytes);
            place.run(&format!("{command} v --range {quarter}..{}", quarter + half - 1)).succeeds();
            let left = place.allocated_bytes("v") - empty;
            assert!(left < 8 * MIB + tables, "{command} {options}: {left} bytes are taken for 8 MiB of data");
            let read = place.run("copy v -").succeeds().stdout.clone();
            assert!(read[4 << 20..12 << 20].iter().all(|byte| *byte == 0), "{command} {options}");
            assert!(read[..4 << 20] == noise(1, 16 << 20)[..4 << 20]);
            place.run("verify v").succeeds();
            place.run(&format!("{command} v --yes")).succeeds();
            let left = place.allocated_bytes("v").saturating_sub(empty);
            assert!(left < tables, "{command} {options}: {left} bytes are taken for no data");
            place.run("compare --zero v").succeeds();
            place.run("verify v").succeeds();
        }
    }
}

#[test]
fn blocks_that_are_not_to_be_unmapped_keep_their_space() {
    let Some((place, empty)) = full("") else { return };
    place.run("zero v --no-unmap --yes").succeeds();
    assert!(place.allocated_bytes("v") >= empty + 16 * MIB);
    place.run("compare --zero v").succeeds();
    place.run("verify v").succeeds();
}

#[test]
fn overwriting_again_and_again_takes_no_more_space() {
    let Some((place, empty)) = full("") else { return };
    for seed in 2..8 {
        place.write("data", &noise(seed, 16 << 20));
        place.run("copy data v").succeeds();
    }
    let taken = place.allocated_bytes("v") - empty;
    // Spare slots are as many as a sixteenth of the blocks, and at least 8 MiB.
    assert!(taken <= 25 * MIB, "{taken} bytes are taken for 16 MiB of data");
    place.run("compare data v").succeeds();
}

#[test]
fn a_new_volume_takes_next_to_nothing() {
    let place = Place::new();
    place.run("create v --size 1TiB").succeeds();
    assert!(place.allocated_bytes("v") <= 257 * MIB, "the log, the group map, and superblocks");
    assert_eq!(place.run("info v --json").succeeds().json()["bytes"], 1u64 << 40);
}
