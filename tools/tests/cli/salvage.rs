//! `copy --salvage`, what commands that write answer, and what is asked before a whole device loses what it holds.

use std::process::Command;

use crate::common::server::Server;
use crate::common::{Answer, Place, answer, has, noise, skipped};
use serde_json::{Value, json};

/// A volume of 512 blocks, of which 5, 6 and 300 are damaged, and what they held.
fn damaged(options: &str) -> (Place, Vec<u8>) {
    let place = Place::new();
    let data = noise(1, 2 << 20);
    place.volume(&format!("--size 2MiB {options}"), &data);
    for lba in [5, 6, 300] {
        place.run(&format!("corrupt v --lba {lba} --kind data")).succeeds();
    }
    (place, data)
}

/// The data with zeroes in these blocks.
fn without(data: &[u8], lost: &[usize], block_bytes: usize) -> Vec<u8> {
    let mut data = data.to_vec();
    lost.iter().for_each(|lba| data[lba * block_bytes..(lba + 1) * block_bytes].fill(0));
    data
}

/// The lines that name what is lost.
fn lost_lines(answer: &Answer) -> Vec<&str> {
    answer.stderr.lines().filter(|line| line.contains(" lost: ")).collect()
}

fn runs(report: &Value) -> Vec<(u64, u64)> {
    let runs = report["lost"].as_array().unwrap().iter();
    runs.map(|run| (run["lba"].as_u64().unwrap(), run["blocks"].as_u64().unwrap())).collect()
}

#[test]
fn a_file_gets_all_that_can_be_read_and_zeroes_for_the_rest() {
    let (place, data) = damaged("");
    place.run("copy v out").fails(3, &["block 5", "try: use --salvage"]);
    let copied = place.run("copy v out --salvage");
    copied.ends_with(1);
    assert_eq!(lost_lines(&copied), ["blocks 5..6 lost: guard", "block 300 lost: guard"]);
    for words in
        ["3 blocks of v lost; in out they are zeroes", "2 MiB copied from v to out in ", " MiB read, ", " written, "]
    {
        assert!(copied.stderr.contains(words), "{words}: {}", copied.stderr);
    }
    assert!(place.read("out") == without(&data, &[5, 6, 300], 4096));
    let piped = place.run("copy v - --salvage");
    assert!(piped.ends_with(1).stdout == place.read("out"));
    let report = place.run("copy v out --salvage --json").ends_with(1).json();
    assert_eq!((runs(&report), &report["lost_are"]), (vec![(5, 2), (300, 1)], &"zeroes".into()));
    assert_eq!((&report["blocks_lost"], &report["lost"][1]["why"]), (&3.into(), &"guard".into()));
    // A medium that fails says so in its own words; what is whole is copied as usual.
    let media = place.run("copy fault:[read-error@7],v out --salvage");
    assert!(lost_lines(media.ends_with(1)).iter().any(|line| line.starts_with("block 7 lost: ")), "{}", media.stderr);
    place.run("copy data out --salvage").succeeds();
    assert!(place.read("out") == data);
}

/// Nothing but the CRC-32C in its map entry tells that a block without protection information is not what was written.
#[test]
fn rot_without_protection_information_is_found_by_every_command_that_reads() {
    let place = Place::new();
    let data = noise(1, 2 << 20);
    place.volume("--size 2MiB --guard none", &data);
    for command in ["verify v", "copy v out", "compare v raw:data", "rescue v out"] {
        place.run(command).succeeds();
    }
    for lba in [5, 6, 300] {
        place.run(&format!("corrupt v --lba {lba} --kind data")).succeeds();
    }
    place.run("verify v").ends_with(1).says(&["blocks 5..6: guard", "block 300: guard: expected 0x", "3 damaged"]);
    place.run("copy v out").fails(3, &["block 5", "try: use --salvage"]);
    for command in ["copy v out --salvage", "rescue v out"] {
        let copied = place.run(command);
        copied.ends_with(1);
        // The list is what `rescue` reports, and what `copy` warns of.
        let said = [copied.text(), copied.stderr.clone()].concat();
        let lost: Vec<&str> = said.lines().filter(|line| line.contains(" lost: ")).collect();
        assert_eq!(lost, ["blocks 5..6 lost: guard", "block 300 lost: guard"], "{command}");
        assert!(place.read("out") == without(&data, &[5, 6, 300], 4096), "{command}");
    }
    let compared = place.run("compare v raw:data");
    compared.ends_with(1);
    assert!(!compared.text().contains("equal"), "{}", compared.text());
    // A good second copy answers, and mends the first.
    place.run("create a --size 2MiB --guard none").succeeds();
    place.run("create b --size 2MiB --guard none").succeeds();
    place.run("copy data mirror:a,b").succeeds();
    for (name, lba) in [("a", 5), ("b", 6), ("a", 300)] {
        place.run(&format!("corrupt {name} --lba {lba} --kind data")).succeeds();
    }
    place.run("copy mirror:a,b out").succeeds();
    assert!(place.read("out") == data);
    place.run("verify mirror:a,b --repair").ends_with(1);
    place.run("verify mirror:a,b").succeeds().says(&[": clean"]);
    place.run("verify a").succeeds();
}

#[test]
fn a_volume_never_calls_good_what_could_not_be_read() {
    let (place, data) = damaged("");
    place.run("create w --size 2MiB --guard crc16").succeeds();
    place.write("old", &noise(2, 2 << 20));
    place.run("copy old w").succeeds();
    let copied = place.run("copy v w --salvage");
    assert!(
        copied.ends_with(1).stderr.contains("3 blocks of v lost; in w they are unreadable there, too"),
        "{}",
        copied.stderr
    );
    for lba in [5, 6, 300] {
        place.run(&format!("copy offset:{lba}..{lba},w -")).fails(3, &["block 0: media unreadable"]);
    }
    for (first, last) in [(0, 4), (7, 299), (301, 511)] {
        assert!(place.blocks("w", first, last) == data[first as usize * 4096..(last as usize + 1) * 4096]);
    }
    let errors = place.run("verify w --json").ends_with(1).json()["errors"].clone();
    let lbas: Vec<u64> = errors.as_array().unwrap().iter().map(|error| error["lba"].as_u64().unwrap()).collect();
    assert_eq!(lbas, [5, 6, 300]);
}

#[test]
fn what_shares_a_larger_block_with_something_lost_is_lost_and_told_so() {
    let (place, data) = damaged("--block-size 512 --guard crc16");
    place.run("create w --size 2MiB").succeeds();
    let report = place.run("copy v w --salvage --json").ends_with(1).json();
    assert_eq!((runs(&report), &report["block_size"]), (vec![(0, 8), (296, 8)], &512.into()));
    assert_eq!((&report["blocks_lost"], &report["lost_are"]), (&16.into(), &"unreadable".into()));
    place.run("copy offset:0..0,w -").ends_with(3);
    place.run("copy offset:37..37,w -").ends_with(3);
    assert!(place.blocks("w", 1, 36) == data[4096..37 * 4096] && place.blocks("w", 38, 511) == data[38 * 4096..]);
}

#[test]
fn a_server_that_would_seal_zeroes_is_not_given_any() {
    let (place, data) = damaged("");
    let old = noise(2, 2 << 20);
    place.run("create w --size 2MiB").succeeds();
    place.write("old", &old);
    place.run("copy old w").succeeds();
    let server = Server::start(&place, "w");
    let report = place.run(&format!("copy v {} --salvage --json", server.target("w"))).ends_with(1).json();
    assert_eq!((runs(&report), &report["lost_are"]), (vec![(5, 2), (300, 1)], &"unwritten".into()));
    server.stop().is_clean();
    let mut expected = data;
    for lba in [5_usize, 6, 300] {
        expected[lba * 4096..(lba + 1) * 4096].copy_from_slice(&old[lba * 4096..(lba + 1) * 4096]);
    }
    assert!(place.blocks("w", 0, 511) == expected);
}

#[test]
fn commands_that_write_answer_in_json_and_count_what_they_moved() {
    let place = Place::new();
    let created = place.run("create v --size 1.5MiB --block-size 512 --json").succeeds().json();
    assert_eq!(
        (&created["volume"], &created["blocks"], &created["block_size"]),
        (&"v".into(), &3072.into(), &512.into())
    );
    assert_eq!((&created["bytes"], &created["protection"]["guard"]), (&(3 << 19).into(), &"crc32c".into()));
    assert_eq!(created["uuid"], place.run("info v --json").succeeds().json()["volume"]["uuid"]);
    place.run("create n --size 1MB --block-size 512 --guard none --json").fails(2, &["--size 1000448"]);
    place.run("create n --size 1EiB --guard none --json").ends_with(2);

    // A chunk of data, and holes around it: only that is read and written.
    place.write("sparse", b"");
    place.set_len("sparse", 64 << 20);
    place.poke("sparse", 20 << 20, &noise(1, 1 << 20));
    let copied = place.run("copy sparse out --json").succeeds().json();
    assert_eq!((&copied["bytes"], &copied["bytes_written"]), (&(64 << 20).into(), &(1 << 20).into()));
    assert!(copied["bytes_read"].as_u64().unwrap() <= 2 << 20, "{copied}");
    assert_eq!((&copied["blocks_lost"], &copied["resume_byte"]), (&0.into(), &Value::Null));
    place.run("copy sparse - --json").fails(2, &["standard output"]);

    let zeroed = place.run("zero v --range 10..19 --json").succeeds().json();
    assert_eq!((&zeroed["target"], &zeroed["blocks"], &zeroed["bytes"]), (&"v".into(), &10.into(), &5120.into()));
    assert_eq!(zeroed["resume"], Value::Null);
    let discarded = place.run("discard v --yes --json").succeeds().json();
    assert_eq!(discarded["blocks"], 3072);
    place.run("zero v --range 7").succeeds().says(&["v: 1 block zeroed (512 B) in "]);
    place.run("discard v --range 7..8").succeeds().says(&["v: 2 blocks discarded (1 KiB) in "]);
}

#[test]
fn whoever_types_it_is_asked_before_a_whole_device_loses_what_it_holds() {
    let place = Place::new();
    let data = noise(1, 1 << 20);
    place.volume("--size 1MiB", &data);
    place.run("create other --size 1MiB").succeeds();
    for command in ["zero other", "discard other", "zero other --no-unmap --json"] {
        place.run(command).fails(2, &["other", "this erases all of other (1 MiB)", "no terminal to ask on", "--yes"]);
        place.run(&format!("{command} --yes")).succeeds();
        place.run(&format!("{command} --range 0..9")).succeeds();
    }
    // What was typed is a part, or is in memory.
    for command in
        ["zero offset:0..9,other", "discard offset:9..,other", "zero mem:1MiB", "discard mirror:mem:1MiB,null:1MiB"]
    {
        place.run(command).succeeds();
    }
    if !has("script") {
        skipped("there is no script(1) to make a terminal");
        return;
    }
    let program = env!("CARGO_BIN_EXE_sealblock");
    let typed = |line: &str, command: &str| {
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("printf '{line}\\n' | script -qec '{program} {command}' /dev/null")]);
        answer(shell.current_dir(place.path("")))
    };
    for line in ["n", "", "yep"] {
        let refused = typed(line, "discard v");
        let text = refused.ends_with(2).text();
        assert!(text.contains("This erases all of v (1 MiB). Continue? [y/N]"), "{text}");
        assert!(text.contains("not confirmed; nothing was changed"), "{text}");
    }
    assert!(place.blocks("v", 0, 255) == data);
    typed("y", "zero v").ends_with(0).says(&["v: 256 blocks zeroed (1 MiB) in "]);
    place.run("compare --zero v").succeeds();
}

#[test]
fn files_of_less_than_a_block_have_no_blocks_and_all_their_bytes() {
    let place = Place::new();
    place.run("create v --size 8KiB").succeeds();
    for length in [0, 1, 511] {
        let data = noise(length as u64 + 1, length);
        place.write("f", &data);
        for command in [
            "verify raw:f",
            "zero raw:f --yes",
            "discard raw:f --yes",
            "verify offset:0..0,raw:f",
            "serve raw:f --listen 127.0.0.1:0 --control none",
        ] {
            place.run(command).fails(3, &["raw:f", "it is smaller than one block of 512 bytes"]);
            assert!(place.read("f") == data, "{command}");
        }
        for command in
            ["verify f", "zero f --yes", "info f", "scrub status f", "rescue f out", "corrupt f --lba 0 --kind data"]
        {
            place.run(command).fails(3, &["f", "protected volume"]);
        }
        let info = place.run("info raw:f");
        let text = info.succeeds().says(&["0 blocks of 512 bytes"]).text();
        let rest = if length == 1 { "1 byte, less".to_owned() } else { format!("{length} bytes, less") };
        assert_eq!(text.contains(&format!("behind them     {rest} than a block")), length > 0, "{text}");
        place.run("compare f raw:f").succeeds();
        let copied = place.run("copy f v");
        assert_eq!(copied.succeeds().stderr.contains("nothing to copy"), length == 0, "{}", copied.stderr);
        assert!(place.blocks("v", 0, 0)[..length] == data);
        place.run("copy raw:f g").succeeds();
        assert!(place.read("g") == data);
    }
    place.run("create f --size 8KiB --force").succeeds();
    place.run("verify f").succeeds();
    place.run("verify f --range 2").fails(2, &["the device has 2 blocks"]);
}

#[test]
fn one_field_is_printed_in_one_width() {
    let (place, _) = damaged("--guard crc64");
    let answer = place.run("copy v out");
    let values: Vec<usize> = answer
        .ends_with(3)
        .stderr
        .split([' ', ',', '\n', ';'])
        .filter_map(|word| word.strip_prefix("0x"))
        .map(str::len)
        .collect();
    assert_eq!(values.len() % 2, 0);
    assert!(!values.is_empty() && values.chunks(2).all(|pair| pair[0] == pair[1]), "{}", answer.stderr);
    assert_eq!(
        json!(place.run("verify v --json").ends_with(1).json()["errors"][0]["expected"].as_str().unwrap().len()),
        18
    );
}

#[test]
fn an_nbd_server_of_small_blocks_loses_those_alone_that_are_lost() {
    let (place, data) = damaged("--block-size 512 --guard crc16");
    let server = Server::start(&place, "v --nbd 127.0.0.1:0");
    let target = format!("nbd://{}/v", server.ready["nbd"]["listeners"][0].as_str().unwrap());
    place.run(&format!("copy {target} out")).fails(3, &["try: use --salvage"]);
    let report = place.run(&format!("copy {target} out --salvage --json")).ends_with(1).json();
    assert_eq!((runs(&report), &report["block_size"]), (vec![(5, 2), (300, 1)], &512.into()));
    assert!(place.read("out") == without(&data, &[5, 6, 300], 512));
    // Numbers in names count blocks of the usual size, whether or not something is lost.
    let part = format!("offset:1..1,{target}");
    place.run(&format!("copy {part} part --salvage")).succeeds();
    assert!(place.read("part") == data[4096..8192]);
    server.stop();
    // Twin: a server of larger blocks that takes any bytes loses whole ones, and no more.
    let (place, data) = damaged("");
    let server = Server::start(&place, "v --nbd 127.0.0.1:0");
    let target = format!("nbd://{}/v", server.ready["nbd"]["listeners"][0].as_str().unwrap());
    let report = place.run(&format!("copy {target} out --salvage --json")).ends_with(1).json();
    assert_eq!((runs(&report), &report["block_size"]), (vec![(40, 16), (2400, 8)], &512.into()));
    assert!(place.read("out") == without(&data, &[5, 6, 300], 4096));
}
