//! What each command answers, and how it ends, when nothing is out of order.

use crate::common::{Place, answer, noise};

#[test]
fn info_says_the_same_in_text_and_json_on_both_runtimes() {
    let place = Place::new();
    place.volume("--size 2MiB --guard crc64 --type 2 --block-size 512", &noise(1, 100_000));
    for (runtime, name) in [("uring", "io_uring"), ("syscalls", "system calls")] {
        let text = answer(place.command("info v").env("SEALBLOCK_RUNTIME", runtime));
        if runtime == "uring" && text.status == 3 && text.stderr.contains("io_uring was asked for") {
            crate::common::skipped("the kernel forbids io_uring here");
            continue;
        }
        text.succeeds().says(&[
            "protected volume",
            "2 MiB (4096 blocks of 512 bytes)",
            "crc64",
            "Type 2",
            "state           closed",
            name,
        ]);
        let json = answer(place.command("info v --json").env("SEALBLOCK_RUNTIME", runtime)).succeeds().json();
        assert_eq!((&json["target"], &json["kind"]), (&"v".into(), &"protected volume".into()));
        assert_eq!((json["block_size"].as_u64(), json["blocks"].as_u64()), (Some(512), Some(4096)));
        assert_eq!(json["bytes"], 2 << 20);
        assert_eq!((&json["protection"]["guard"], &json["protection"]["type"]), (&"crc64".into(), &2.into()));
        assert_eq!(json["volume"]["clean"], true);
        assert_eq!(json["file"]["bytes"], place.len("v"));
        assert_eq!(json["unmap_zeroes"], true);
        assert!(json["runtime"].as_str().unwrap().contains(name), "{json}");
        for what in ["verify", "compare", "checksum", "checksum_crc32c", "discard", "write_zeroes"] {
            assert!(matches!(json["abilities"][what].as_str(), Some("native" | "emulated" | "absent")), "{json}");
        }
    }
    answer(place.command("info v").env("SEALBLOCK_RUNTIME", "abacus")).fails(3, &["abacus", "uring", "syscalls"]);
}

#[test]
fn info_knows_what_is_no_volume() {
    let place = Place::new();
    place.write("raw", &noise(1, 8192));
    assert_eq!(place.run("info raw:raw --json").succeeds().json()["kind"], "raw file");
    assert_eq!(place.run("info mem:1MiB --json").succeeds().json()["kind"], "memory");
    assert_eq!(place.run("info null:1TiB --json").succeeds().json()["bytes"], 1u64 << 40);
    let slice = place.run("info offset:1..2,raw:raw --json").succeeds().json();
    assert_eq!((&slice["inner"]["kind"], &slice["blocks"]), (&"raw file".into(), &2.into()));
}

#[test]
fn both_runtimes_read_what_the_other_wrote() {
    let place = Place::new();
    let data = noise(2, 777_777);
    place.write("data", &data);
    place.run("create v --size 1MiB").succeeds();
    answer(place.command("copy data v").env("SEALBLOCK_RUNTIME", "syscalls")).succeeds();
    assert_eq!(&place.run("copy v -").succeeds().stdout[..data.len()], &data);
    place.run("verify v").succeeds();
    place.run("zero v --range 3").succeeds();
    let read = answer(place.command("copy v -").env("SEALBLOCK_RUNTIME", "syscalls"));
    assert_eq!(&read.succeeds().stdout[4 * 4096..data.len()], &data[4 * 4096..]);
    answer(place.command("verify v").env("SEALBLOCK_RUNTIME", "syscalls")).succeeds();
}

#[test]
fn compare_names_the_blocks_that_differ() {
    let place = Place::new();
    let mut data = noise(3, 1 << 20);
    place.volume("--size 1MiB", &data);
    place.write("same", &data);
    let report = place.run("compare v same --json").succeeds().json();
    assert_eq!((&report["equal"], &report["blocks_different"]), (&true.into(), &0.into()));
    assert_eq!(report["bytes_compared"], 1 << 20);
    for byte in [5 * 4096, 6 * 4096 + 4095, 255 * 4096] {
        data[byte] ^= 1;
    }
    place.write("other", &data);
    let report = place.run("compare v other --json").ends_with(1).json();
    assert_eq!((&report["equal"], &report["blocks_different"]), (&false.into(), &3.into()));
    let runs = serde_json::json!([{"lba": 5, "blocks": 2}, {"lba": 255, "blocks": 1}]);
    assert_eq!(report["differences"], runs);
    place.run("compare v other").ends_with(1).says(&["5", "255", "different"]);
    place.run("compare v nothing").fails(3, &["nothing"]);
    place.run("compare v").fails(2, &["TARGET_B"]);
}

#[test]
fn compare_of_unequal_sizes_and_block_sizes() {
    let place = Place::new();
    let data = noise(4, 1 << 20);
    place.volume("--size 1MiB --block-size 512 --guard crc16", &data);
    place.run("create large --size 1MiB --block-size 4096").succeeds();
    place.run("copy v large").succeeds();
    let report = place.run("compare v large --json").succeeds().json();
    assert_eq!(report["block_size"], 4096);
    // Equal as far as the shorter goes is not equal.
    place.run("create longer --size 2MiB").succeeds();
    place.run("copy data longer").succeeds();
    let report = place.run("compare v longer --json").ends_with(1).json();
    assert_eq!((&report["blocks_different"], &report["equal"]), (&0.into(), &false.into()));
    assert_eq!((&report["bytes_a"], &report["bytes_b"]), (&(1 << 20).into(), &(2 << 20).into()));
    place.run("compare v longer").ends_with(1).says(&["sizes differ"]);
}

#[test]
fn compare_with_zeroes() {
    let place = Place::new();
    place.run("create v --size 1MiB").succeeds();
    place.run("compare --zero v").succeeds();
    place.run_with_input("copy - v", &[&[0; 9000][..], &[1]].concat()).succeeds();
    let report = place.run("compare --zero v --json").ends_with(1).json();
    assert_eq!(report["differences"], serde_json::json!([{"lba": 2, "blocks": 1}]));
    place.run("compare --zero v v").fails(2, &["--zero"]);
    place.run("compare --zero mem:1MiB").succeeds();
}

#[test]
fn compare_goes_on_past_damage_and_calls_nothing_equal() {
    let place = Place::new();
    let mut data = noise(5, 1 << 20);
    place.volume("--size 1MiB", &data);
    for lba in [9, 10, 200] {
        place.run(&format!("corrupt v --lba {lba} --kind data")).succeeds();
    }
    let text = place.run("compare v data").ends_with(1).text();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[..2], ["blocks 9..10 of v cannot be read: guard", "block 200 of v cannot be read: guard"]);
    let words = "v and data: no difference in readable blocks (0 of 256 blocks differ, 3 cannot be read) in ";
    assert!(lines[2].starts_with(words) && lines.len() == 3, "{text}");
    // A difference is one whatever cannot be read beside it.
    for byte in [8 * 4096, 9 * 4096, 11 * 4096] {
        data[byte] ^= 1;
    }
    place.write("other", &data);
    let report = place.run("compare other v --json").ends_with(1).json();
    let differences = serde_json::json!([{"lba": 8, "blocks": 1}, {"lba": 11, "blocks": 1}]);
    let unreadable = serde_json::json!([
        {"lba": 9, "blocks": 2, "target": "v", "why": "guard"}, {"lba": 200, "blocks": 1, "target": "v", "why": "guard"}
    ]);
    assert_eq!((&report["differences"], &report["unreadable"]), (&differences, &unreadable));
    assert_eq!((&report["equal"], &report["blocks_unreadable"]), (&false.into(), &3.into()));
    assert_eq!(
        (&report["first_different_byte"], &report["resume_lba"]),
        (&(8 * 4096).into(), &serde_json::Value::Null)
    );
    let text = place.run("compare other v").ends_with(1).text();
    assert!(text.contains("block 8 differs\nblocks 9..10 of v cannot be read: guard\nblock 11 differs\n"), "{text}");
    assert!(text.contains("different (2 of 256 blocks differ, 3 cannot be read) in "), "{text}");
    // Zeroes are compared with what can be read, too.
    let zeroes = place.run("compare --zero v --json").ends_with(1).json();
    assert_eq!((&zeroes["blocks_different"], &zeroes["blocks_unreadable"]), (&253.into(), &3.into()));
}

#[test]
fn zero_leaves_zeroes_in_its_range_and_nowhere_else() {
    for options in ["", " --no-unmap"] {
        let place = Place::new();
        let data = noise(6, 1 << 20);
        place.volume("--size 1MiB", &data);
        place.run(&format!("zero v --range 10..19{options}")).succeeds().says(&["10 blocks zeroed"]);
        assert_eq!(place.blocks("v", 0, 9), data[..10 << 12]);
        assert_eq!(place.blocks("v", 10, 19), vec![0; 10 << 12]);
        assert_eq!(place.blocks("v", 20, 255), data[20 << 12..]);
        place.run("verify v").succeeds();
        place.run(&format!("zero v{options} --yes")).succeeds();
        place.run("compare --zero v").succeeds();
        place.run("verify v").succeeds();
    }
}

#[test]
fn zero_and_discard_repair_damaged_blocks() {
    let place = Place::new();
    place.volume("--size 1MiB", &noise(7, 1 << 20));
    for (lba, kind) in [(3, "data"), (4, "ref-tag"), (5, "lost-write"), (6, "guard")] {
        place.run(&format!("corrupt v --lba {lba} --kind {kind}")).succeeds();
    }
    place.run("zero v --range 3..4").succeeds();
    place.run("discard v --range 5..6").succeeds();
    place.run("verify v").succeeds();
    assert_eq!(place.blocks("v", 3, 6), vec![0; 4 << 12], "unmapped blocks of a volume read as zeroes");
}

#[test]
fn raw_files_are_zeroed_and_discarded_too() {
    let place = Place::new();
    let data = noise(8, 1 << 20);
    place.write("raw", &data);
    place.run("zero raw:raw --range 8..15").succeeds();
    let read = place.read("raw");
    assert_eq!((&read[..4096], &read[8192..]), (&data[..4096], &data[8192..]));
    assert_eq!(read[4096..8192], [0; 4096]);
    place.run("discard raw:raw --range 16..").succeeds();
    assert_eq!(place.len("raw"), 1 << 20, "discarding gives up content, not length");
}

#[test]
fn all_blocks_are_asked_for_however_they_are_given() {
    let place = Place::new();
    let data = noise(9, 1 << 20);
    place.volume("--size 1MiB", &data);
    let all = ["v", "v --range 0..", "v --range 0..255", "offset:0..,v", "offset:0..255,v", "offset:0..,offset:0..,v"];
    for command in ["zero", "discard"] {
        for target in all.iter().copied().chain(["fault:[read-error],offset:0..,v", "offset:0..,v --range 0.."]) {
            place.run(&format!("{command} {target}")).fails(2, &["this erases all of ", "no terminal", "--yes"]);
        }
    }
    assert!(place.blocks("v", 0, 255) == data, "nothing is erased");
    for part in
        ["v --range 1..", "v --range ..254", "offset:1..,v", "offset:0..,v --range ..254", "offset:1..,offset:0..,v"]
    {
        place.run(&format!("zero {part}")).succeeds();
    }
    place.run("zero offset:0..,v --yes").succeeds();
}

#[test]
fn ranges_have_every_documented_form() {
    let place = Place::new();
    place.volume("--size 1MiB", &noise(9, 1 << 20));
    for (range, blocks) in [("0..9", 10), ("250..", 6), ("..9", 10), ("7", 1), ("255..255", 1)] {
        assert_eq!(place.run(&format!("verify v --json --range {range}")).succeeds().json()["blocks_verified"], blocks);
    }
    for (range, words) in [("9..5", "before"), ("a..b", "range"), ("..", "range"), ("99999999999999999999", "2^64")] {
        for command in ["verify", "zero", "discard"] {
            place.run(&format!("{command} v --range {range}")).fails(2, &[words]);
        }
    }
    for range in ["256", "250..256", "0..18446744073709551615", "18446744073709551615.."] {
        for command in ["verify", "zero", "discard"] {
            place.run(&format!("{command} v --range {range}")).fails(2, &["v", "past the end", "256 blocks"]);
        }
    }
    place.run("verify offset:250..256,v").fails(2, &["past the end"]);
    place.run("verify v").succeeds();
}

#[test]
fn a_rate_limits_and_changes_nothing_else() {
    let place = Place::new();
    place.volume("--size 1MiB", &noise(10, 1 << 20));
    place.run("corrupt v --lba 77 --kind data").succeeds();
    let free = place.run("verify v --json").ends_with(1).json();
    let limited = place.run("verify v --json --rate 8MiB/s").ends_with(1).json();
    for field in ["blocks_verified", "bytes_verified", "errors"] {
        assert_eq!(free[field], limited[field]);
    }
    for (rate, words) in [("0/s", "at least 1B/s"), ("fast", "rate"), ("10MiB", "/s"), ("-1/s", "")] {
        place.run(&format!("verify v --rate={rate}")).fails(2, &["--rate", words]);
    }
}

#[test]
fn verify_modes() {
    let place = Place::new();
    place.volume("--size 1MiB", &noise(11, 1 << 20));
    place.write("raw", &noise(11, 1 << 20));
    for mode in ["auto", "emulate"] {
        place.run(&format!("verify raw:raw --mode {mode}")).succeeds();
    }
    place.run("verify raw:raw --mode offload").fails(3, &["raw", "does not support verification", "--mode"]);
    place.run("corrupt v --lba 200 --kind app-tag").succeeds();
    for mode in ["auto", "emulate"] {
        let report = place.run(&format!("verify v --json --mode {mode}")).ends_with(1).json();
        assert_eq!(report["errors"].as_array().unwrap().len(), 1, "{mode}");
        assert_eq!((&report["errors"][0]["lba"], &report["errors"][0]["field"]), (&200.into(), &"app_tag".into()));
    }
    place.run("verify v --quiet").ends_with(1).says(&["block 200"]);
    assert!(place.run("verify raw:raw --quiet").succeeds().stdout.is_empty());
    place.run("verify v --quiet --json").fails(2, &["--json"]);
}

#[test]
fn create_takes_what_it_documents_and_nothing_else() {
    let place = Place::new();
    for size in ["1", "1000", "4097"] {
        place.run(&format!("create v --size {size}")).fails(2, &["v", "multiple"]);
        assert!(!place.path("v").exists(), "nothing is left of what was refused");
    }
    for options in
        ["--size 0", "--size 1XiB", "--size -5", "--size 1MiB --guard md5", "--size 1MiB --type 4", "", "--size 16EiB"]
    {
        place.run(&format!("create v {options}")).ends_with(2);
    }
    place.run("create v --size 1MiB --block-size 1024").fails(2, &["512 or 4096"]);
    place.run("create mem:1MiB --size 1MiB").fails(2, &["file or a block device"]);
    place.run("create v --size 15000000000000000000").fails(2, &["v"]);
    assert!(!place.path("v").exists(), "nothing is left of what was refused");
    place.run("create v --size 512 --block-size 512").succeeds();
    assert_eq!(place.run("info v --json").succeeds().json()["blocks"], 1);
    place.run_with_input("copy - v", b"one block").succeeds();
    place.run("verify v").succeeds();
    assert_eq!(&place.blocks("v", 0, 0)[..10], b"one block\0");
}

#[test]
fn create_overwrites_only_when_forced() {
    let place = Place::new();
    let data = noise(12, 1 << 20);
    place.volume("--size 1MiB", &data);
    place.run("create v --size 2MiB").fails(3, &["v", "--force"]);
    place.run("create data --size 2MiB").fails(3, &["data", "--force"]);
    assert_eq!(place.blocks("v", 0, 255), data);
    place.run("create v --size 2MiB --guard crc16 --force").succeeds();
    place.run("compare --zero v").succeeds();
    place.run("verify v").succeeds();
    assert_eq!(place.run("info v --json").succeeds().json()["protection"]["guard"], "crc16");
}

#[test]
fn help_has_an_example_for_every_command() {
    let place = Place::new();
    let top = place.run("--help").succeeds().text();
    for command in
        ["create", "info", "verify", "compare", "zero", "discard", "copy", "corrupt", "demo", "completions", "man"]
    {
        assert!(top.contains(&format!("  {command} ")), "{command} is in the list");
        let help = place.run(&format!("{command} --help")).succeeds().text();
        assert!(help.contains("Example") && help.contains(&format!("  sealblock {command} ")), "{command}: {help}");
    }
    place.run("--version").succeeds().says(&["sealblock"]);
    place.run("").ends_with(2);
    place.run("frobnicate").fails(2, &["frobnicate"]);
    place.run("verify").fails(2, &["TARGET"]);
}

#[test]
fn completions_and_manual_pages_are_made() {
    let place = Place::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = place.run(&format!("completions {shell}")).succeeds().text();
        // The first three ask the program, which is tried in `completions.rs`.
        let asks = script.contains(&format!("complete {shell}"));
        assert!(script.contains("sealblock") && (asks || script.contains("corrupt")), "{shell}");
    }
    place.run("completions csh").fails(2, &["csh"]);
    place.run("man deep/man1").succeeds();
    let page = String::from_utf8(place.read("deep/man1/sealblock-verify.1")).unwrap();
    assert!(page.contains(".TH") && page.contains("range"));
    assert!(String::from_utf8(place.read("deep/man1/sealblock.1")).unwrap().contains(".SH EXIT STATUS"));
    place.write("file", b"");
    place.run("man file/man1").fails(3, &["file/man1"]);
}

#[test]
fn the_demonstration_finds_its_damage() {
    let place = Place::new();
    place.run("demo --dir here").succeeds().says(&["exactly the damaged blocks", "clean"]);
    place.run("demo --dir here").succeeds();
}

#[test]
fn what_is_no_target_is_bad_usage() {
    let place = Place::new();
    place.run("verify floppy://a").ends_with(2);
    place.run("verify mem:1000").fails(2, &["mem:1000", "512"]);
}
