//! `copy`: what goes in comes out, from and to everything that can be named.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::symlink;
use std::process::Stdio;

use crate::common::{Place, answer_of, noise};

#[test]
fn a_file_of_any_length_comes_back() {
    for (length, options) in [
        (1, "--size 1MiB"),
        (4095, "--size 1MiB"),
        (512 * 7 + 3, "--size 1MiB --block-size 512 --guard crc16"),
        ((1 << 20) + 1, "--size 3MiB --guard crc64"),
        ((3 << 20) - 1, "--size 3MiB --block-size 512"),
        (3 << 20, "--size 3MiB --guard none"),
    ] {
        let place = Place::new();
        let data = noise(length as u64, length);
        place.volume(options, &data);
        place.run("verify v").succeeds();
        place.run("copy v back").succeeds();
        let back = place.read("back");
        assert!(back[..length] == data, "{options}");
        assert!(back[length..].iter().all(|byte| *byte == 0), "{options}: zeroes behind the data");
        assert_eq!(back.len() as u64, place.run("info v --json").succeeds().json()["bytes"].as_u64().unwrap());
    }
}

#[test]
fn an_empty_file_changes_nothing() {
    let place = Place::new();
    let data = noise(1, 1 << 20);
    place.volume("--size 1MiB", &data);
    place.run_with_input("copy - v", b"").succeeds();
    assert_eq!(place.blocks("v", 0, 255), data);
}

#[test]
fn standard_input_and_output() {
    let place = Place::new();
    let data = noise(2, 2_500_001);
    place.run("create v --size 3MiB").succeeds();
    let copied = place.run_with_input("copy - v", &data);
    copied.succeeds();
    assert!(copied.stdout.is_empty(), "standard output is for data");
    let read = place.run("copy v -");
    assert!(read.succeeds().stdout[..data.len()] == data);
    assert_eq!(read.stdout.len(), 3 << 20);
}

#[test]
fn input_that_trickles_in_is_put_together() {
    let place = Place::new();
    let data = noise(3, 1_200_000);
    place.run("create v --size 2MiB --block-size 512").succeeds();
    let mut child = place.start("copy - v");
    let mut input = child.stdin.take().unwrap();
    for piece in data.chunks(70_001) {
        input.write_all(piece).unwrap();
        input.flush().unwrap();
    }
    drop(input);
    answer_of(child).succeeds();
    assert!(place.run("copy v -").succeeds().stdout[..data.len()] == data);
    place.run("verify v").succeeds();
}

#[test]
fn between_volumes_of_different_shape() {
    let place = Place::new();
    let data = noise(4, 2 << 20);
    place.volume("--size 2MiB --block-size 512 --guard crc16 --type 3", &data);
    place.run("create w --size 2MiB --block-size 4096 --guard crc64 --type 2").succeeds();
    place.run("create x --size 3MiB --block-size 512 --guard none").succeeds();
    place.run("copy v w").succeeds();
    place.run("copy w x").succeeds();
    assert!(place.blocks("x", 0, 4095) == data);
    for target in ["v", "w", "x"] {
        place.run(&format!("verify {target}")).succeeds();
    }
    place.run("compare v w").succeeds();
}

#[test]
fn slices_are_read_and_written_in_place() {
    let place = Place::new();
    let data = noise(5, 1 << 20);
    place.volume("--size 1MiB", &data);
    place.write("patch", &noise(6, 3 * 4096));
    place.run("copy patch offset:100..102,v").succeeds();
    place.run("verify v").succeeds();
    let mut expected = data;
    expected[100 << 12..103 << 12].copy_from_slice(&noise(6, 3 * 4096));
    assert!(place.blocks("v", 0, 255) == expected);
    place.run("copy offset:100..102,v offset:0..2,v").ends_with(3);
    assert!(place.blocks("v", 0, 255) == expected, "a volume that is being read is not written by another");
}

#[test]
fn what_is_too_large_is_refused_before_anything_is_written() {
    let place = Place::new();
    let data = noise(7, 1 << 20);
    place.volume("--size 1MiB", &data);
    place.write("large", &noise(8, (1 << 20) + 1));
    place.run("copy large v").fails(3, &["v", "1048577 bytes do not fit", "larger volume"]);
    assert!(place.blocks("v", 0, 255) == data);
    // How much comes through a pipe shows only when it has come.
    place.run_with_input("copy - v", &noise(9, (1 << 20) + 1)).fails(3, &["v", "do not fit"]);
    place.run("verify v").succeeds();
}

#[test]
fn zeroes_are_not_stored() {
    let place = Place::new();
    place.run("create v --size 64MiB").succeeds();
    let empty = place.allocated_bytes("v");
    let mut data = vec![0; 48 << 20];
    data[20 << 20..21 << 20].copy_from_slice(&noise(10, 1 << 20));
    place.run_with_input("copy - v", &data).succeeds();
    let taken = place.allocated_bytes("v") - empty;
    assert!((1 << 20..4 << 20).contains(&taken), "one MiB of data takes {taken} bytes");
    place.run("verify v").succeeds();
    let read = place.run("copy v -").succeeds().stdout.clone();
    assert!(read[..data.len()] == data && read.len() == 64 << 20);
    // Zeroes over data do give way to zeroes.
    place.run_with_input("copy - v", &vec![0; 48 << 20]).succeeds();
    place.run("compare --zero v").succeeds();
}

#[test]
fn a_file_takes_the_bytes_whatever_it_held() {
    let place = Place::new();
    place.volume("--size 1MiB", &noise(11, 1 << 20));
    place.run("copy v deep/file").fails(3, &["deep/file"]);
    place.write("short", &noise(12, 4096));
    place.run("copy v short").succeeds();
    assert!(place.read("short") == noise(11, 1 << 20));
}

#[test]
fn links_lead_to_the_volume() {
    let place = Place::new();
    let data = noise(13, 1 << 20);
    place.volume("--size 1MiB", &data);
    symlink("v", place.path("link")).unwrap();
    symlink("nowhere", place.path("dangling")).unwrap();
    place.run("verify link").succeeds();
    place.run("zero link --range 0").succeeds();
    assert_eq!(place.blocks("v", 0, 0), [0; 4096]);
    assert!(fs::symlink_metadata(place.path("link")).unwrap().is_symlink());
    place.run("verify dangling").fails(3, &["dangling"]);
}

#[test]
fn a_reader_that_goes_away_is_no_panic() {
    let place = Place::new();
    place.volume("--size 4MiB", &noise(14, 4 << 20));
    let mut child = place.start("copy v -");
    let mut first = [0; 1000];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    let answer = answer_of(child);
    assert_eq!((answer.status, answer.stderr.as_str()), (3, ""), "no success, and no words about it");
    for lba in 0..200 {
        if lba % 50 == 0 {
            place.run(&format!("corrupt v --lba {lba} --kind data")).succeeds();
        }
    }
    // The work was done, and ends as it would have for a reader; completions have no other purpose than to be read.
    for (arguments, status) in [
        ("verify v", 1),
        ("verify v --json", 1),
        ("info v", 0),
        ("completions bash", 3),
        ("compare --zero null:1MiB", 0),
        ("compare --zero v", 1),
    ] {
        // Nobody ever reads: a short answer would else fit in the pipe before its reader is gone.
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = place.command(arguments);
        let child = command.stdin(Stdio::null()).stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
        // The command keeps a copy of the writing end, not of the reading one.
        drop(command);
        let answer = answer_of(child);
        assert_eq!((answer.status, answer.stderr.as_str()), (status, ""), "{arguments}");
    }
    place.run("verify v").ends_with(1);
}
