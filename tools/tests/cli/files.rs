//! Plain files of any length: compared and copied to the last byte.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use crate::common::{Place, noise};

#[test]
fn a_difference_behind_the_last_whole_block_is_one() {
    let place = Place::new();
    let mut data = noise(1, 5000);
    place.write("a", &data);
    place.write("same", &data);
    data[4990] ^= 1;
    place.write("b", &data);
    let report = place.run("compare a b --json").ends_with(1).json();
    assert_eq!((&report["equal"], &report["bytes_compared"]), (&false.into(), &5000.into()));
    assert_eq!((&report["first_different_byte"], &report["differences"][0]["lba"]), (&4990.into(), &9.into()));
    place.run("compare a b").ends_with(1).says(&["block 9 differs", "byte 4990", "different (1 of 10"]);
    let equal = place.run("compare a same --json").succeeds().json();
    assert_eq!((&equal["bytes_compared"], &equal["first_different_byte"]), (&5000.into(), &serde_json::Value::Null));
    place.run("compare raw:a same").succeeds();
    // Behind the last whole block a file can be unlike zeroes, too.
    let mut zeroes = vec![0; 5000];
    place.write("z", &zeroes);
    place.run("compare --zero z").succeeds();
    zeroes[4999] = 1;
    place.write("z", &zeroes);
    let report = place.run("compare --zero z --json").ends_with(1).json();
    assert_eq!(report["first_different_byte"], 4999);
}

fn bytes(number: usize) -> String {
    if number == 1 { "1 byte".to_owned() } else { format!("{number} bytes") }
}

#[test]
fn lengths_that_differ_are_told_with_what_differs_before() {
    let place = Place::new();
    for (a, b) in [(5000, 5001), (0, 1), (511, 512), (4608, 5000), (5000, 1 << 20)] {
        place.write("a", &noise(2, a));
        place.write("b", &noise(2, b));
        let report = place.run("compare a b --json").ends_with(1).json();
        assert_eq!((&report["bytes_a"], &report["bytes_b"]), (&a.into(), &b.into()));
        assert_eq!((&report["bytes_compared"], &report["blocks_different"]), (&a.min(b).into(), &0.into()), "{a} {b}");
        place.run("compare b a").ends_with(1).says(&[&format!("the sizes differ: {} and {}", bytes(b), bytes(a))]);
    }
    place.write("a", b"");
    place.write("b", b"");
    place.run("compare a b").succeeds();
}

#[test]
fn a_file_and_a_volume_are_compared_as_far_as_both_go() {
    let place = Place::new();
    let data = noise(3, 70_001);
    place.write("f", &data);
    for options in ["--size 1MiB", "--size 1MiB --block-size 512 --guard crc16"] {
        place.run(&format!("create v {options} --force")).succeeds();
        let copied = place.run("copy f v");
        copied.succeeds();
        assert!(
            copied.stderr.contains("larger than the data; the rest of the last block is zeroed"),
            "{}",
            copied.stderr
        );
        let report = place.run("compare f v --json").ends_with(1).json();
        assert_eq!((&report["bytes_compared"], &report["blocks_different"]), (&70_001.into(), &0.into()));
    }
    // 9 blocks of 512 bytes and two of 4096: the last 512 bytes count.
    place.run("create w --size 4608 --block-size 512").succeeds();
    place.run("create x --size 8KiB").succeeds();
    place.write("g", &noise(4, 4608));
    place.run("copy g w").succeeds();
    place.run("copy g x").succeeds();
    place.run("zero w --range 8").succeeds();
    let report = place.run("compare w x --json").ends_with(1).json();
    assert_eq!((&report["bytes_compared"], &report["first_different_byte"]), (&4608.into(), &4096.into()));
}

#[test]
fn a_file_that_is_copied_to_gets_the_length_of_what_is_copied() {
    let place = Place::new();
    for length in [0, 1, 511, 512, 513, 5000, (1 << 20) - 1, (1 << 20) + 7] {
        let data = noise(length as u64 + 1, length);
        place.write("from", &data);
        for old in [0, 3, 4096, 2 << 20] {
            place.write("to", &noise(9, old));
            place.run("copy from to").succeeds();
            assert!(place.read("to") == data, "{length} bytes over {old}");
        }
        place.run_with_input("copy - to", &data).succeeds();
        assert!(place.read("to") == data, "{length} bytes from standard input");
        assert!(place.run("copy from -").succeeds().stdout == data);
        place.run("copy raw:from raw:new").succeeds();
        assert!(place.read("new") == data);
        place.run("compare from new").succeeds();
    }
}

#[test]
fn a_file_is_not_copied_to_itself_nor_into_a_folder_that_is_not_there() {
    let place = Place::new();
    let data = noise(5, 5000);
    place.write("f", &data);
    place.run("copy f f").fails(3, &["f and f are the same device or file"]);
    assert!(place.read("f") == data);
    place.run("copy f deep/file").fails(3, &["deep/file"]);
    place.run("copy missing g").fails(3, &["missing"]);
    assert!(!place.path("g").exists());
    std::os::unix::fs::symlink("far", place.path("link")).unwrap();
    place.run("copy f link").succeeds();
    assert!(place.read("far") == data && place.path("link").is_symlink());
}

#[test]
fn holes_stay_holes_both_ways() {
    let place = Place::new();
    const MIB: u64 = 1 << 20;
    place.write("sparse", b"");
    place.set_len("sparse", 64 * MIB + 5);
    place.poke("sparse", 20 * MIB + 4096, &noise(1, 4096));
    place.poke("sparse", 64 * MIB, b"end");
    let data = place.read("sparse");
    place.run("copy sparse copy").succeeds();
    assert!(place.read("copy") == data);
    assert!(place.allocated_bytes("copy") <= 64 << 10, "{} bytes are taken", place.allocated_bytes("copy"));
    // Over a file that was full, too.
    place.write("full", &noise(2, 8 << 20));
    place.run("copy sparse full").succeeds();
    assert!(place.read("full") == data && place.allocated_bytes("full") <= 64 << 10);
    place.run("create v --size 65MiB").succeeds();
    let empty = place.allocated_bytes("v");
    place.run("copy sparse v").succeeds();
    assert!(place.allocated_bytes("v") - empty <= 4 * MIB);
    place.run("copy v back").succeeds();
    assert!(place.read("back")[..data.len()] == data);
    assert!(place.allocated_bytes("back") <= 64 << 10);
}

#[test]
fn a_large_device_that_was_never_written_is_copied_in_no_time() {
    const FIRST: u64 = (700 << 30) / 4096;
    let place = Place::new();
    place.run("create v --size 1TiB").succeeds();
    place.run("create w --size 1TiB").succeeds();
    let data = noise(9, 8192);
    place.write("data", &data);
    place.run(&format!("copy data offset:{FIRST}..,v")).succeeds();
    // Minutes where each mebibyte of zeroes is asked for and looked at.
    let start = Instant::now();
    place.run("copy v w").succeeds();
    place.run("copy v file").succeeds();
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
    assert!(place.allocated_bytes("file") <= 64 << 10 && place.len("file") == 1 << 40);
    let around = [&[0; 4096], &data[..], &[0; 4096]].concat();
    assert!(place.blocks("w", FIRST - 1, FIRST + 2) == around);
    let mut found = vec![1; around.len()];
    File::open(place.path("file")).unwrap().read_exact_at(&mut found, (FIRST - 1) * 4096).unwrap();
    assert!(found == around);
}

#[test]
fn a_copy_that_was_cut_off_is_repeated() {
    let place = Place::new();
    let data = noise(6, (24 << 20) + 77);
    place.write("from", &data);
    let mut child = place.start("copy from to");
    place.run("create v --size 32MiB").succeeds();
    child.kill().unwrap();
    child.wait().unwrap();
    place.run("copy from to").succeeds();
    assert!(place.read("to") == data);
    // What a copy into a volume left half done is done by the next.
    let mut child = place.start("copy from v");
    place.wait_for_bytes("v", 2 << 20, &mut child);
    child.kill().unwrap();
    child.wait().unwrap();
    place.run("copy from v").succeeds();
    place.run("verify v").succeeds();
    assert!(place.run("copy v -").succeeds().stdout[..data.len()] == data);
}
