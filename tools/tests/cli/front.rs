//! The first ten minutes: what a stranger types, and what the program says to it.

use std::process::Command;

use crate::common::server::Server;
use crate::common::{Place, answer, noise};

/// The binary under a limit of open files.
fn with_few_files(place: &Place, files: u32, arguments: &str) -> crate::common::Answer {
    let line = format!("ulimit -n {files}; exec {} {arguments}", env!("CARGO_BIN_EXE_sealblock"));
    answer(Command::new("sh").args(["-c", &line]).current_dir(place.path("")).env("SEALBLOCK_RUNTIME", "syscalls"))
}

#[test]
fn what_is_missing_is_named_and_create_is_advised_for_what_could_be_a_volume() {
    let place = Place::with_runtime("syscalls");
    place.volume("--size 1MiB", &noise(1, 1 << 20));
    place.run("info nothere").fails(3, &["'nothere': no such file\ntry: check the path; `sealblock create` creates"]);
    for (command, why) in [
        (
            "copy v missingdir/x",
            "cannot create 'missingdir/x': there is no directory 'missingdir'\ntry: check the path, or create",
        ),
        ("info missingdir/deeper/v", "cannot open 'missingdir/deeper/v': there is no directory 'missingdir'\n"),
        ("verify v --resume missingdir/r", "there is no directory 'missingdir'\n"),
        ("info /dev/nvme99n9", "cannot open '/dev/nvme99n9': there is no such device\ntry: check the name; `lsblk`"),
        ("bench --report missingdir/x", "cannot write results to 'missingdir/x': there is no directory 'missingdir'\n"),
    ] {
        let told = place.run(command);
        told.fails(3, &[why]);
        assert!(!told.stderr.contains("sealblock create"), "{command}: {}", told.stderr);
    }
}

#[test]
fn everything_is_read_into_dev_null_and_nothing_is_written() {
    let place = Place::with_runtime("syscalls");
    place.volume("--size 1MiB", &noise(1, 1 << 20));
    place.run("copy v /dev/null").succeeds();
    std::os::unix::fs::symlink("/dev/null", place.path("null")).unwrap();
    let report = place.run("copy v null --json").succeeds().json();
    assert_eq!((report["bytes_read"].as_u64(), report["bytes_written"].as_u64()), (Some(1 << 20), Some(0)));
    place.run("corrupt v --lba 5 --kind data").succeeds();
    place.run("copy v /dev/null").fails(3, &["block 5", "try: use --salvage"]);
    let report = place.run("copy v /dev/null --salvage --json").ends_with(1).json();
    assert_eq!((&report["blocks_lost"], &report["lost_are"]), (&1.into(), &"discarded".into()));
    for command in ["copy v /dev/zero", "copy v /dev/full", "copy /dev/zero v", "verify /dev/null"] {
        place
            .run(command)
            .fails(3, &["it is a character device\ntry: ", "`sealblock copy` reads and writes streams as `-`"]);
    }
}

#[test]
fn a_limit_of_open_files_is_told_from_a_fault_of_the_volume() {
    let place = Place::with_runtime("syscalls");
    place.volume("--size 1MiB", &noise(1, 1 << 20));
    // What the loader itself needs differs, so the first limit at which the program comes to speak counts.
    let told = (5..12)
        .map(|files| with_few_files(&place, files, "verify v"))
        .find(|told| told.stderr.starts_with("sealblock: "));
    let told = told.expect("some limit is too low for the volume and not for the program");
    told.fails(
        3,
        &["has as many files open as its limit allows", "try: a higher limit of open files: `ulimit -n 1024`"],
    );
}

#[test]
fn a_server_refuses_in_words() {
    let place = Place::new();
    place.volume("--size 1MiB", &noise(1, 1 << 20));
    let server = Server::start(&place, "v");
    let absent = server.target("v").replace(":v", ":absent");
    place.run(&format!("info {absent}")).fails(
        3,
        &["the server has no such subsystem, or does not admit this host to it\ntry: `sealblock discover` lists the subsystems"],
    );
    let uri = server.target("v");
    for command in ["info v", "copy data v", "fs ls v"] {
        let told = place.run(command);
        told.fails(3, &[&format!("try: {uri} in its place while it is served")]);
        assert!(!told.stderr.contains("sealblock verify"), "{}", told.stderr);
    }
    let shrunk = place.run("resize v --size 4KiB");
    shrunk.fails(3, &["beyond the new end hold data", "\ntry: use a larger size, or `sealblock discard`"]);
    server.stop().is_clean();
}

#[test]
fn a_cut_off_replica_is_replaced_by_the_commands_that_are_advised() {
    let place = Place::with_runtime("syscalls");
    place.run("create a --size 1MiB --guard crc64 --type 3 --block-size 512").succeeds();
    place.run("create b --size 1MiB --guard crc64 --type 3 --block-size 512").succeeds();
    place.run("mirror create a b").succeeds();
    place.set_len("b", 4096);
    // Its label is lost with it, and may have said that the other one is out of sync.
    place
        .run("mirror replace mirror:a,b b")
        .fails(3, &["cut off", "may be older", "mirror replace mirror:a,b b --force"]);
    let refused = place.run("mirror replace mirror:a,b b --force");
    refused.fails(3, &["cut off", "makes it a blank volume that fits; then repeat the command"]);
    let advice = refused.stderr.split("try: `sealblock ").nth(1).unwrap().split('`').next().unwrap();
    place.run(advice).succeeds();
    place.run("mirror replace mirror:a,b b").succeeds().says(&["optimal"]);
    place.run("create c --size 4MiB").succeeds();
    place.run("create d --size 1MiB").succeeds();
    place
        .run("mirror add d c")
        .fails(3, &["c has 1024 blocks, the mirror 256\ntry: use devices of one size for a new mirror"]);
    place.run("create e --size 1MiB --guard crc64 --type 3 --block-size 512").succeeds();
    place.run("mirror add mirror:a,b e").succeeds();
    place.run("mirror remove mirror:a,b,e e").succeeds();
    let told = place.run("mirror add mirror:a,b e").ends_with(3).stderr.clone();
    let words = told.split("of mirror ").nth(1).unwrap_or(&told);
    assert!(words.chars().nth(8) == Some('-'), "an identity is one text everywhere: {told}");
    // And it is taken without its dashes.
    let uuid = place.run("info d --json").json()["volume"]["uuid"].as_str().unwrap().replace('-', "");
    place.run(&format!("rescue d saved --identity {uuid}")).ends_with(1).says(&["no block is known to be lost"]);
}

#[test]
fn help_is_laid_out_once_and_a_version_is_a_line() {
    let place = Place::with_runtime("syscalls");
    for width in ["60", "80", "100", "120"] {
        let told = answer(place.command("copy --help").env("COLUMNS", width)).succeeds().text();
        assert!(told.contains("\n  sealblock copy v - | sha256sum\n"), "{told}");
        let columns: usize = width.parse().unwrap();
        let widest = told.lines().map(|line| line.chars().count()).max().unwrap();
        assert!(widest <= columns && widest > columns.min(100) - 12, "{widest} at {width}: {told}");
    }
    let version = place.run("--version").succeeds().text();
    assert!(version.starts_with(&format!("sealblock {}", env!("CARGO_PKG_VERSION"))) && version.lines().count() == 1);
}
