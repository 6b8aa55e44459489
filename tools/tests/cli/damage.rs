//! The main promise: what was written verifies, and every kind of damage is found, on exactly the damaged blocks.

use std::collections::BTreeMap;

use crate::common::{Place, noise};
use serde_json::Value;

const KINDS: [&str; 6] = ["data", "guard", "ref-tag", "app-tag", "lost-write", "misdirected"];

/// What the finding of a kind of damage may be called. A misdirected block brings everything with it, its generation
/// included, and what differs first is named.
fn fields(kind: &str) -> &'static [&'static str] {
    match kind {
        "data" | "guard" => &["guard"],
        "ref-tag" | "misdirected" => &["ref_tag"],
        "app-tag" => &["app_tag"],
        "lost-write" => &["storage_tag"],
        other => panic!("no kind {other}"),
    }
}

/// The findings of `verify --json`, by block.
#[track_caller]
fn findings(place: &Place, status: i32) -> BTreeMap<u64, Value> {
    let report = place.run("verify v --json").ends_with(status).json();
    let errors = report["errors"].as_array().unwrap();
    let by_block: BTreeMap<_, _> = errors.iter().map(|error| (error["lba"].as_u64().unwrap(), error.clone())).collect();
    assert_eq!(by_block.len(), errors.len(), "one finding for a block: {report}");
    by_block
}

/// One volume: written, verified, damaged in every way, found, read around, repaired.
fn damage_and_repair(place: &Place, options: &str, block_bytes: usize) {
    let blocks = (1 << 20) / block_bytes as u64;
    let data = noise(1, 1 << 20);
    place.volume(&format!("--size 2MiB {options}"), &data);
    place.run("verify v").succeeds().says(&["clean"]);
    assert!(findings(place, 0).is_empty());

    // The first block, the last that has data, and some between; two of each kind.
    let step = blocks / 11;
    let mut harmed = BTreeMap::new();
    for (index, kind) in KINDS.iter().chain(&KINDS).enumerate() {
        let lba = if index == 11 { blocks - 1 } else { index as u64 * step };
        place.run(&format!("corrupt v --lba {lba} --kind {kind}")).succeeds();
        harmed.insert(lba, *kind);
    }
    let found = findings(place, 1);
    assert_eq!(found.keys().collect::<Vec<_>>(), harmed.keys().collect::<Vec<_>>(), "{options}: {harmed:?}");
    for (lba, kind) in &harmed {
        let finding = &found[lba];
        let (expected, actual) = (finding["expected"].as_str().unwrap(), finding["actual"].as_str().unwrap());
        assert!(fields(kind).contains(&finding["field"].as_str().unwrap()), "{options}: {kind}: {finding}");
        assert!(expected.starts_with("0x") && expected.len() == actual.len() && expected != actual, "{finding}");
    }
    read_around(place, &data, block_bytes, &harmed.keys().copied().collect::<Vec<_>>());

    // Rewriting the blocks repairs them.
    place.run("copy data v").succeeds();
    assert!(findings(place, 0).is_empty(), "{options}: rewritten blocks are clean");
    assert_eq!(place.blocks("v", 0, blocks - 1), data);
}

/// Damaged blocks fail to be read, by name; all others are what was written.
fn read_around(place: &Place, data: &[u8], block_bytes: usize, harmed: &[u64]) {
    for lba in harmed {
        let answer = place.run(&format!("copy offset:{lba}..{lba},v -"));
        answer.fails(3, &["integrity error", "v", "expected", "found"]);
        assert!(answer.stdout.is_empty(), "nothing of a damaged block is given out");
    }
    place.run("copy v -").fails(3, &["integrity error", &format!("block {}", harmed[0])]);
    for pair in harmed.windows(2) {
        let (first, last) = (pair[0] + 1, pair[1] - 1);
        let (start, end) = (first as usize * block_bytes, (last + 1) as usize * block_bytes);
        assert!(place.blocks("v", first, last) == data[start..end], "blocks {first}..{last}");
    }
}

fn all_types(guard: &str, block_bytes: usize) {
    // Both runtimes, and no need for all of it twice.
    for (protection, runtime) in [(1, "auto"), (2, "syscalls"), (3, "syscalls")] {
        let place = Place::with_runtime(runtime);
        damage_and_repair(
            &place,
            &format!("--guard {guard} --type {protection} --block-size {block_bytes}"),
            block_bytes,
        );
    }
}

#[test]
fn crc16_in_blocks_of_512() {
    all_types("crc16", 512);
}

#[test]
fn crc16_in_blocks_of_4096() {
    all_types("crc16", 4096);
}

#[test]
fn crc32c_in_blocks_of_512() {
    all_types("crc32c", 512);
}

#[test]
fn crc32c_in_blocks_of_4096() {
    all_types("crc32c", 4096);
}

#[test]
fn crc64_in_blocks_of_512() {
    all_types("crc64", 512);
}

#[test]
fn crc64_in_blocks_of_4096() {
    all_types("crc64", 4096);
}

#[test]
fn a_gibibyte_with_crc64_is_checked_whole() {
    let place = Place::new();
    place.write("data", &noise(2, 300_000));
    place.run("create v --size 1GiB --guard crc64").succeeds();
    place.run("copy data v").succeeds();
    let report = place.run("verify v --json").succeeds().json();
    assert_eq!(report["bytes_verified"], 1u64 << 30);
    assert_eq!(report["blocks_verified"], 1u64 << 18);
    place.run("corrupt v --lba 40 --kind data").succeeds();
    assert_eq!(findings(&place, 1).into_keys().collect::<Vec<_>>(), [40]);
}

#[test]
fn without_protection_information_a_volume_has_no_tags_to_damage_and_finds_all_other_damage() {
    let place = Place::new();
    let data = noise(3, 100 << 12);
    place.volume("--size 1MiB --guard none", &data);
    for kind in ["guard", "ref-tag", "app-tag"] {
        place.run(&format!("corrupt v --lba 4 --kind {kind}")).fails(2, &["v", "block 4", "no protection information"]);
    }
    assert!(findings(&place, 0).is_empty());
    assert_eq!(place.blocks("v", 0, 99), data, "what was refused did nothing");
    place.run("corrupt v --lba 4 --kind lost-write").succeeds();
    place.run("corrupt v --lba 9 --kind misdirected").succeeds();
    place.run("corrupt v --lba 20 --kind data").succeeds();
    assert_eq!(findings(&place, 1).into_keys().collect::<Vec<_>>(), [4, 9, 20]);
}

#[test]
fn blocks_without_data_cannot_be_damaged() {
    let place = Place::new();
    place.volume("--size 1MiB", &noise(3, 4096));
    place.run("corrupt v --lba 200 --kind data").fails(3, &["v", "block 200", "copy"]);
    place.run("corrupt v --lba 256 --kind data").fails(2, &["v", "255"]);
    place.run("corrupt v --lba 0 --kind rust").fails(2, &["rust"]);
    place.run("verify v").succeeds();
}

#[test]
fn a_range_is_checked_and_nothing_else() {
    let place = Place::new();
    place.volume("--size 1MiB", &noise(4, 1 << 20));
    place.run("corrupt v --lba 100 --kind guard").succeeds();
    for (range, status, blocks) in
        [("0..99", 0, 100), ("101..", 0, 155), ("100", 1, 1), ("..100", 1, 101), ("100..100", 1, 1), ("0..255", 1, 256)]
    {
        let report = place.run(&format!("verify v --json --range {range}")).ends_with(status).json();
        assert_eq!(report["blocks_verified"], blocks, "{range}");
    }
    // Addresses count from the start of the target that was named.
    let report = place.run("verify offset:90..110,v --json").ends_with(1).json();
    assert_eq!(report["errors"][0]["lba"], 10);
}

#[test]
fn damage_beyond_the_tool_is_found_too() {
    // Whatever bytes of the slots and records are overwritten, a verify tells, and it names no block outside.
    let place = Place::new();
    let data = noise(5, 1 << 20);
    place.volume("--size 1MiB --guard crc64", &data);
    let pristine = place.read("v");
    let needle = &data[37 * 4096..37 * 4096 + 64];
    let at =
        pristine.windows(64).position(|window| window == needle).expect("the block's data lie in the volume") as u64;
    place.poke("v", at + 1000, &[0xff, 0, 0xff, 0]);
    assert_eq!(findings(&place, 1).into_keys().collect::<Vec<_>>(), [37]);
    place.poke("v", at, &vec![0; 4096 * 3]);
    assert_eq!(findings(&place, 1).into_keys().collect::<Vec<_>>(), [37, 38, 39]);
}
