//! Stock clients: the tools of libnbd and QEMU. If a tool is missing, a test prints that it is skipped.

use std::io::Write;
use std::process::{Command, Output, Stdio};

use crate::common::*;
use sealblock_exports_nbd::Limits;

/// True if a program is installed; otherwise prints that the test is skipped.
fn has(program: &str) -> bool {
    let found = Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
    if !found {
        // Bypasses the capture of test output, so that this is visible without `--nocapture`.
        let _ = writeln!(std::io::stderr(), "skipped: there is no {program} here");
    }
    found
}

fn run(program: &str, arguments: &[&str]) -> Output {
    Command::new(program).args(arguments).stdin(Stdio::null()).output().unwrap()
}

/// Runs a program that must succeed, and returns its output.
fn good(program: &str, arguments: &[&str]) -> String {
    let output = run(program, arguments);
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{program} {arguments:?}: {out}{err}");
    out.into_owned()
}

/// A file that is removed with the test.
struct Scratch(std::path::PathBuf);

impl Scratch {
    fn new(name: &str) -> Scratch {
        Scratch(std::env::temp_dir().join(format!("sealblock-nbd-{}-{name}", std::process::id())))
    }

    fn path(&self) -> &str {
        self.0.to_str().expect("the path is text")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn nbdinfo_reads_the_negotiated_export() {
    if !has("nbdinfo") {
        return;
    }
    let served = serve(Limits::default());
    let uri = format!("nbd://{}/protected", served.address);
    assert_eq!(good("nbdinfo", &["--size", &uri]).trim(), (BLOCK * BLOCKS).to_string());
    let about = good("nbdinfo", &["--json", &uri]);
    for part in [
        "\"structured\": true",
        "\"description\": \"blocks with seals\"",
        "\"base:allocation\"",
        "\"is_read_only\": false",
        "\"can_multi_conn\": true",
        "\"can_fast_zero\": true",
        "\"can_trim\": true",
        "\"can_fua\": true",
        "\"can_df\": true",
        "\"block_size_minimum\": 1",
        "\"block_size_preferred\": 4096",
        "\"block_size_maximum\": 33554432",
    ] {
        assert!(about.contains(part), "{part} is not in {about}");
    }
    let list = good("nbdinfo", &["--list", &format!("nbd://{}", served.address)]);
    assert!(["export=\"protected\"", "export=\"bare\"", "export=\"fixed\""].iter().all(|name| list.contains(name)));
    let map = good("nbdinfo", &["--map", &uri]);
    assert_eq!(map.split_whitespace().collect::<Vec<_>>(), ["0", "16777216", "3", "hole,zero"]);
    assert!(run("nbdinfo", &["--is", "read-only", &format!("nbd://{}/fixed", served.address)]).status.success());
    assert!(!run("nbdinfo", &[&format!("nbd://{}/nothing", served.address)]).status.success());
}

#[test]
fn nbdcopy_brings_back_what_it_took_over_several_connections() {
    if !has("nbdcopy") {
        return;
    }
    let served = serve(Limits::default());
    let (from, to) = (Scratch::new("from"), Scratch::new("to"));
    let mut data = pattern(BLOCK * BLOCKS, 7);
    data[1 << 20..3 << 20].fill(0);
    std::fs::write(&from.0, &data).unwrap();
    let uri = format!("nbd://{}/protected", served.address);
    good("nbdcopy", &["--connections=4", "--flush", from.path(), &uri]);
    good("nbdcopy", &["--connections=4", &uri, to.path()]);
    assert!(std::fs::read(&to.0).unwrap() == data, "what was read is what was written");
    served.damage(1000);
    assert!(!run("nbdcopy", &[&uri, to.path()]).status.success(), "a damaged block is not copied");
}

#[test]
fn nbdcopy_takes_files_of_any_length() {
    if !has("nbdcopy") {
        return;
    }
    let served = serve(Limits::default());
    let uri = format!("nbd://{}/protected", served.address);
    let (from, to) = (Scratch::new("odd"), Scratch::new("back"));
    let mut wanted = vec![0; (BLOCK * BLOCKS) as usize];
    for (seed, length) in [(1, 1), (2, 4095), (3, 1_000_001), (4, 300_000)] {
        let data = pattern(length, seed);
        std::fs::write(&from.0, &data).unwrap();
        good("nbdcopy", &["--flush", from.path(), &uri]);
        wanted[..data.len()].copy_from_slice(&data);
        good("nbdcopy", &[&uri, to.path()]);
        assert!(std::fs::read(&to.0).unwrap() == wanted, "{length} bytes, and what was behind them before");
    }
}

#[test]
fn nbdinfo_and_qemu_map_holes_as_they_are() {
    if !has("nbdinfo") || !has("qemu-img") || !has("qemu-io") {
        return;
    }
    let served = serve(Limits::default());
    let uri = format!("nbd://{}/protected", served.address);
    let write = ["-f", "raw", "-c", "write 1M 256k", "-c", "write 4M 128k", "-c", "discard 1M 128k", &uri];
    good("qemu-io", &write);
    let map = good("nbdinfo", &["--map", &uri]);
    let lines: Vec<Vec<&str>> = map.lines().map(|line| line.split_whitespace().take(3).collect()).collect();
    let expected = [
        ["0", "1179648", "3"],
        ["1179648", "131072", "0"],
        ["1310720", "2883584", "3"],
        ["4194304", "131072", "0"],
        ["4325376", "12451840", "3"],
    ];
    assert_eq!(lines, expected);
    let map = good("qemu-img", &["map", "--output=json", "-f", "raw", &uri]);
    let data = map.lines().filter(|line| line.contains("\"data\": true"));
    let starts: Vec<bool> = data
        .zip(["\"start\": 1179648, \"length\": 131072", "\"start\": 4194304, \"length\": 131072"])
        .map(|(line, expected)| line.contains(expected))
        .collect();
    assert_eq!(starts, [true, true], "{map}");
    assert!(
        map.lines().filter(|line| line.contains("\"data\": false")).all(|line| line.contains("\"zero\": true")),
        "{map}"
    );
}

#[test]
fn qemu_writes_zeroes_discards_and_verifies() {
    if !has("qemu-io") || !has("qemu-img") {
        return;
    }
    let served = serve(Limits::default());
    let uri = format!("nbd://{}/protected", served.address);
    let steps = [
        "write -P 0x5a 0 8M",
        "write -f -P 0xa5 1M 64k",
        "write -z 2M 1M",
        "write -z -u 4M 1M",
        "write -f -z 5M 64k",
        "aio_write -P 0x77 7M 64k",
        "aio_flush",
        "discard 6M 1M",
        "flush",
        "read -P 0x5a 0 1M",
        "read -P 0xa5 1M 64k",
        "read -P 0 2M 1M",
        "read -P 0 4M 1M",
        "read -P 0 5M 64k",
        "read -P 0x77 7M 64k",
        // Less than a block: QEMU reads, changes and writes a whole one.
        "write -P 0x11 512 512",
        "read -P 0x11 512 512",
        "read -P 0x5a 1024 3072",
    ];
    let arguments: Vec<&str> = ["-f", "raw"].into_iter().chain(steps.iter().flat_map(|step| ["-c", *step])).collect();
    let said = good("qemu-io", &[&arguments[..], &[&uri]].concat());
    assert!(!said.contains("failed") && !said.contains("rror"), "{said}");
    served.damage(256);
    let read = run("qemu-io", &["-f", "raw", "-r", "-c", "read 1M 4k", &uri]);
    let said = [read.stdout, read.stderr].map(|said| String::from_utf8_lossy(&said).into_owned()).concat();
    assert!(said.contains("Input/output error"), "{said}");
}

#[test]
fn qemu_copies_there_and_back() {
    if !has("qemu-io") || !has("qemu-img") {
        return;
    }
    let served = serve(Limits::default());
    let uri = format!("nbd://{}/protected", served.address);
    good("qemu-io", &["-f", "raw", "-c", "write -P 0x5a 1M 8M", &uri]);
    let about = good("qemu-img", &["info", "--output=json", &uri]);
    assert!(about.contains(&format!("\"virtual-size\": {}", BLOCK * BLOCKS)), "{about}");
    let map = good("qemu-img", &["map", "-f", "raw", "--output=json", &uri]);
    assert!(map.contains("\"start\": 0") && map.contains("\"data\": true"), "{map}");
    let copy = Scratch::new("copy");
    good("qemu-img", &["convert", "-f", "raw", "-O", "raw", &uri, copy.path()]);
    let same = good("qemu-img", &["compare", "-f", "raw", "-F", "raw", &uri, copy.path()]);
    assert!(same.contains("identical"), "{same}");
    // And the other way round, into zeroes.
    good("qemu-io", &["-f", "raw", "-c", "write -z 0 16M", &uri]);
    assert!(!run("qemu-img", &["compare", "-f", "raw", "-F", "raw", &uri, copy.path()]).status.success());
    good("qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", copy.path(), &uri]);
    let same = good("qemu-img", &["compare", "-f", "raw", "-F", "raw", &uri, copy.path()]);
    assert!(same.contains("identical"), "{same}");
}

/// True if fio is installed and has an engine for NBD.
fn has_engine() -> bool {
    has("fio") && {
        let found = run("fio", &["--enghelp=nbd"]).status.success();
        if !found {
            let _ = writeln!(std::io::stderr(), "skipped: the fio that is here has no engine for NBD");
        }
        found
    }
}

#[test]
fn fio_writes_and_checks_what_it_wrote() {
    if !has_engine() {
        return;
    }
    let served = serve(Limits::default());
    for (export, block, depth) in [("protected", "4k", 32), ("protected", "4k-128k", 8), ("bare", "512", 32)] {
        let (uri, depth) = (format!("--uri=nbd://{}/{export}", served.address), format!("--iodepth={depth}"));
        let block = if block.contains('-') { format!("--bsrange={block}") } else { format!("--bs={block}") };
        let words =
            ["--name=nbd", "--ioengine=nbd", &uri, "--rw=randwrite", &block, &depth, "--size=2M", "--verify=crc32c"];
        let state = ["--verify_state_save=0", "--verify_fatal=1", "--do_verify=1"];
        let said = good("fio", &[&words[..], &state].concat());
        assert!(said.contains("err= 0"), "{said}");
    }
    // The blocks do not contain what the next job wrote.
    let uri = format!("--uri=nbd://{}/protected", served.address);
    let words = ["--name=nbd", "--ioengine=nbd", &uri, "--rw=read", "--bs=4k", "--size=2M", "--verify=md5"];
    assert!(!run("fio", &[&words[..], &["--verify_state_save=0", "--verify_fatal=1"]].concat()).status.success());
}
