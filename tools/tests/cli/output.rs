//! Where output goes: full and closed streams, readers that go, new files, and names in advice.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::common::server::Server;
use crate::common::{Place, answer, noise};

/// Longer than everything here takes on a loaded machine.
const LONG: Duration = Duration::from_secs(60);

fn full() -> File {
    File::options().write(true).open("/dev/full").unwrap()
}

#[test]
fn a_full_or_closed_standard_error_fails_no_work() {
    let place = Place::with_runtime("syscalls");
    place.volume("--size 1MiB", &noise(1, 1 << 20));
    place.run("create bad --size 1MiB").succeeds();
    place.run("copy data bad").succeeds();
    place.run("corrupt bad --lba 5 --kind data").succeeds();
    for (command, status) in [
        ("copy v -", 0),
        ("copy v out", 0),
        ("copy data v", 0),
        ("copy v /dev/null", 0),
        ("copy bad salvaged --salvage", 1),
        ("rescue v -", 0),
        ("rescue bad rescued", 1),
        ("verify bad", 1),
        ("verify bad --repair", 1),
        ("mirror create v blank", 0),
        ("zero v", 3),
        ("info nothere", 3),
        ("--nothing", 2),
    ] {
        for closed in [false, true] {
            if command.starts_with("mirror") {
                place.run("create v --size 1MiB --force").succeeds();
                place.run("create blank --size 1MiB --force").succeeds();
                place.run("copy data v").succeeds();
            }
            let mut command = place.command(command);
            command.stdout(Stdio::null()).stdin(Stdio::null());
            // A pipe that nobody reads is what a supervisor leaves behind.
            let (reader, writer) = std::io::pipe().unwrap();
            drop(reader);
            let ended = if closed { command.stderr(writer).status() } else { command.stderr(full()).status() };
            assert_eq!(ended.unwrap().code(), Some(status), "closed: {closed}: {command:?}");
        }
    }
}

#[test]
fn help_that_could_not_be_printed_is_an_error() {
    let place = Place::with_runtime("syscalls");
    for command in ["--help", "copy --help", "--version"] {
        let child = place.command(command).stdout(full()).stderr(Stdio::piped()).spawn().unwrap();
        let told = crate::common::answer_of(child);
        told.fails(3, &["sealblock: cannot write to standard output: no space left on device\ntry: write it to where there is space"]);
        assert_eq!(told.stderr.matches("sealblock:").count(), 1, "{}", told.stderr);
    }
}

#[test]
fn data_for_a_full_standard_output_are_an_error_that_says_so() {
    let place = Place::with_runtime("syscalls");
    place.volume("--size 1MiB", &noise(1, 1 << 20));
    for command in ["copy v -", "rescue v -", "info v", "info v --json", "verify v"] {
        let child = place.command(command).stdout(full()).stderr(Stdio::piped()).spawn().unwrap();
        let told = crate::common::answer_of(child);
        told.fails(
            3,
            &["cannot write to standard output: no space left on device\ntry: write it to where there is space"],
        );
    }
}

#[test]
fn data_for_a_closed_standard_stream_are_an_error() {
    let place = Place::with_runtime("syscalls");
    place.volume("--size 1MiB", &noise(1, 1 << 20));
    let shell = |line: &str| {
        let mut shell = std::process::Command::new("sh");
        shell.args(["-c", &format!("exec {} {line}", env!("CARGO_BIN_EXE_sealblock"))]).current_dir(place.path(""));
        answer(shell.env("SEALBLOCK_RUNTIME", "syscalls").stdin(Stdio::null()))
    };
    for command in ["copy v -", "rescue v -"] {
        shell(&format!("{command} >&-")).fails(3, &["cannot write to standard output: it is closed"]);
        for discarded in [">/dev/null", "1<>/dev/null"] {
            shell(&format!("{command} {discarded}")).succeeds();
        }
    }
    shell("copy - v <&-").fails(3, &["cannot read standard input: it is closed"]);
    assert!(place.blocks("v", 0, 255) == noise(1, 1 << 20));
    // Nothing but a report is lost.
    shell("info v >&-").succeeds();
    shell("copy v out >&- <&-").succeeds();
}

#[test]
fn what_is_watched_ends_without_a_standard_output() {
    let place = Place::new();
    place.volume("--size 1MiB", &noise(1, 1 << 20));
    let server = Server::start(&place, "v");
    for command in ["status --watch", "status --watch --json"] {
        let line = format!("exec timeout 60 {} {command} >&-", env!("CARGO_BIN_EXE_sealblock"));
        let mut shell = std::process::Command::new("sh");
        shell.args(["-c", &line]).env("XDG_RUNTIME_DIR", place.path(crate::common::RUNTIME_FOLDER));
        answer(&mut shell).succeeds();
    }
    server.stop().is_clean();
}

#[test]
fn what_is_watched_ends_with_its_reader() {
    let place = Place::new();
    place.volume("--size 16MiB", &noise(1, 1 << 20));
    let server = Server::start(&place, "v");
    place.run("scrub start v --rate 64KiB/s").succeeds();
    for command in ["status --watch", "status --watch --json", "scrub status v --watch"] {
        let mut child = place.command(command).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut output = child.stdout.take().unwrap();
        if command.starts_with("status") {
            output.read_exact(&mut [0; 20]).unwrap();
        }
        drop(output);
        let started = Instant::now();
        let ended = loop {
            if let Some(ended) = child.try_wait().unwrap() {
                break ended;
            }
            if started.elapsed() > LONG {
                child.kill().unwrap();
                panic!("{command} goes on though nobody reads it");
            }
            sleep(Duration::from_millis(20));
        };
        assert_eq!(ended.code(), Some(0), "{command}");
    }
    let status = place.run("scrub status v --json").succeeds().json();
    assert!(!status["run"].is_null(), "the scrub itself goes on: {status}");
    server.stop().is_clean();
}

#[test]
fn what_is_watched_on_a_terminal_is_drawn_in_place() {
    let place = Place::new();
    place.volume("--size 1MiB", &noise(1, 1 << 20));
    let server = Server::start(&place, "v");
    // `script` gives the command a terminal and writes down what that gets.
    let binary = env!("CARGO_BIN_EXE_sealblock");
    let line = format!("timeout -s INT 5 {binary} status --watch");
    let mut command = std::process::Command::new("script");
    command.args(["-qec", &line, "/dev/null"]).current_dir(place.path("")).stdin(Stdio::null());
    command.env("XDG_RUNTIME_DIR", place.path(crate::common::RUNTIME_FOLDER)).env("TERM", "xterm");
    let Ok(output) = command.output() else { return eprintln!("skipped: there is no `script` here") };
    let drawn = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(drawn.matches("\x1b[H\x1b[2J").count() >= 2 && !drawn.contains("\\u{1b}"), "{drawn}");
    server.stop().is_clean();
}

#[test]
fn copies_are_as_private_as_volumes() {
    let place = Place::with_runtime("syscalls");
    place.volume("--size 1MiB", &noise(1, 1 << 20));
    place.run("copy v out").succeeds();
    place.run("rescue v saved").succeeds();
    let mode = |name: &str| fs::metadata(place.path(name)).unwrap().permissions().mode() & 0o777;
    assert_eq!([mode("v"), mode("out"), mode("saved")], [0o600; 3]);
    // What is there keeps what its owner chose.
    place.write("mine", b"");
    fs::set_permissions(place.path("mine"), fs::Permissions::from_mode(0o644)).unwrap();
    place.run("copy v mine").succeeds();
    assert_eq!(mode("mine"), 0o644);
}

#[test]
fn commands_that_are_advised_quote_names() {
    let place = Place::with_runtime("syscalls");
    let run = |arguments: &[&str]| answer(place.command("").args(arguments));
    run(&["scrub", "start", "my v"]).fails(3, &["try: `sealblock serve 'my v'`;"]);
    run(&["scrub", "start", "it's"]).fails(3, &[r"try: `sealblock serve 'it'\''s'`;"]);
    run(&["scrub", "start", "v"]).fails(3, &["try: `sealblock serve v`;"]);
}
