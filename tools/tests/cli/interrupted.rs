//! Findings are printed while the work goes on; after Ctrl-C the rest and where to resume.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::common::server::Server;
use crate::common::{Place, damaged, noise};
use serde_json::Value;

const INTERRUPT: i32 = 2;
/// More than anything here should take.
const LONG: Duration = Duration::from_secs(60);

fn signal(child: &Child) {
    let sent = Command::new("kill").args(["-s", "INT", &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
}

/// Waits until the process handles the signal.
fn wait_for_handler(child: &mut Child) {
    let start = Instant::now();
    loop {
        let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
        if u64::from_str_radix(mask.trim(), 16).unwrap() >> (INTERRUPT - 1) & 1 == 1 {
            return;
        }
        assert!(child.try_wait().unwrap().is_none() && start.elapsed() < LONG, "{status}");
        sleep(Duration::from_millis(2));
    }
}

/// How a command ended that a signal was to end: what it has printed, from now on.
struct Ended {
    stdout: String,
    stderr: String,
}

#[track_caller]
fn ended_by_the_signal(mut child: Child, mut stdout: impl Read) -> Ended {
    let (mut rest, mut stderr) = (String::new(), String::new());
    stdout.read_to_string(&mut rest).unwrap();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    let status = child.wait().unwrap();
    assert_eq!(status.signal(), Some(INTERRUPT), "a shell shows 130: {status}\n{rest}{stderr}");
    assert!(!stderr.contains("panicked"), "{stderr}");
    Ended { stdout: rest, stderr }
}

/// The first line that a command prints, while it still runs.
fn first_line(child: &mut Child) -> (String, BufReader<impl Read + use<>>) {
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    stdout.read_line(&mut line).unwrap();
    assert!(child.try_wait().unwrap().is_none(), "it is told only in the end: {line}");
    (line, stdout)
}

/// The range after `try: --range`.
fn range(stderr: &str) -> &str {
    let line = stderr.lines().find_map(|line| line.strip_prefix("try: --range ")).unwrap_or_else(|| panic!("{stderr}"));
    line.strip_suffix(" resumes the command").unwrap()
}

#[test]
fn a_verify_tells_runs_as_they_end() {
    let place = damaged(&[5, 6, 7, 300]);
    let answer = place.run("verify v");
    let text = answer.ends_with(1).text();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "blocks 5..7: guard: does not match");
    assert!(lines[1].starts_with("block 300: guard: expected 0x") && lines[1].contains(", found 0x"), "{text}");
    assert!(lines[2].starts_with("v: 4096 blocks verified in ") && lines[2].ends_with(" MiB/s): 4 damaged"), "{text}");
    assert_eq!(lines.len(), 3);
    // One block, and a volume of which nothing was ever written: nothing is read, and there is no speed.
    place.run("create w --size 4KiB").succeeds();
    let text = place.run("verify w").succeeds().text();
    assert!(text.starts_with("w: 1 block verified in ") && text.ends_with(" s: clean\n"), "{text}");
}

#[test]
fn an_interrupted_verify_tells_what_it_found_and_goes_on_where_it_was() {
    let place = damaged(&[5, 6, 4000]);
    let mut child = place.start("verify v --rate 2MiB/s");
    let (line, stdout) = first_line(&mut child);
    assert_eq!(line, "blocks 5..6: guard: does not match\n");
    signal(&child);
    let ended = ended_by_the_signal(child, stdout);
    assert!(ended.stdout.contains("2 damaged") && ended.stdout.contains("interrupted"), "{}", ended.stdout);
    assert!(ended.stderr.starts_with("sealblock: verifying v: interrupted at block "), "{}", ended.stderr);
    let range = range(&ended.stderr);
    let first: u64 = range.strip_suffix("..4095").unwrap().parse().unwrap();
    assert!((7..4000).contains(&first), "{range}");
    let rest = place.run(&format!("verify v --range {range}"));
    let text = rest.ends_with(1).text();
    assert!(text.starts_with("block 4000: guard: ") && !text.contains("5..6"), "{text}");
    assert!(text.contains(&format!("v: {} blocks verified", 4096 - first)), "{text}");
}

#[test]
fn an_interrupted_verify_prints_its_object() {
    let place = damaged(&[0]);
    let mut child = place.start("verify v --rate 1MiB/s --json");
    wait_for_handler(&mut child);
    sleep(Duration::from_millis(300));
    signal(&child);
    let stdout = child.stdout.take().unwrap();
    let ended = ended_by_the_signal(child, stdout);
    let report: Value = serde_json::from_str(&ended.stdout).unwrap();
    let resume = report["resume"].as_str().unwrap();
    assert_eq!((resume, &report["errors"][0]["lba"]), (range(&ended.stderr), &0.into()));
    let blocks = report["blocks_verified"].as_u64().unwrap();
    assert!(blocks < 4096);
    assert_eq!(resume, format!("{blocks}..4095"), "pieces that wait leave no gap behind those that are checked");
    assert_eq!(place.run("verify v --json").ends_with(1).json()["resume"], Value::Null);
}

#[test]
fn an_interrupted_copy_of_standard_input_tells_what_it_wrote() {
    let place = Place::new();
    for (to, is_json) in [("v", false), ("v", true), ("plain", false)] {
        place.run("create v --size 8MiB --force").succeeds();
        let data = noise(3, 5 << 20);
        let mut child = place.start(&format!("copy - {to}{}", if is_json { " --json" } else { "" }));
        let mut input = child.stdin.take().unwrap();
        input.write_all(&data).unwrap();
        wait_for_handler(&mut child);
        // Pipes take the bytes in order, and an empty one was read.
        while rustix::io::ioctl_fionread(&input).unwrap() > 0 {
            sleep(Duration::from_millis(2));
        }
        signal(&child);
        let stdout = child.stdout.take().unwrap();
        let ended = ended_by_the_signal(child, stdout);
        drop(input);
        let said = format!("copying - to {to}: interrupted after byte 5242880; the rest of the input was not written");
        assert!(ended.stderr.contains(&said), "{}", ended.stderr);
        match is_json {
            true => assert_eq!(serde_json::from_str::<Value>(&ended.stdout).unwrap()["resume_byte"], 5 << 20),
            false => assert!(ended.stderr.contains(&format!("5 MiB copied from - to {to} in ")), "{}", ended.stderr),
        }
        let written = if to == "v" { place.blocks("v", 0, 1279) } else { place.read(to) };
        assert!(written == data, "{to}");
        if to == "plain" {
            fs::remove_file(place.path(to)).unwrap();
        }
    }
}

#[test]
fn what_does_not_answer_keeps_nobody_from_going() {
    let place = damaged(&[5]);
    // One of the lanes waits for a minute.
    let hung = "verify fault:[delay=60s@4000..4000],v";
    let mut child = place.start(hung);
    let (line, stdout) = first_line(&mut child);
    assert!(line.starts_with("block 5: guard: "), "{line}");
    let start = Instant::now();
    signal(&child);
    let ended = ended_by_the_signal(child, stdout);
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    assert!(ended.stdout.contains("1 damaged"), "{}", ended.stdout);
    assert!(range(&ended.stderr).ends_with("..4095"), "{}", ended.stderr);
    // Twice is at once.
    let mut child = place.start(hung);
    let (_, stdout) = first_line(&mut child);
    let start = Instant::now();
    signal(&child);
    sleep(Duration::from_millis(100));
    signal(&child);
    ended_by_the_signal(child, stdout);
    assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
}

#[test]
fn a_signal_that_is_ignored_stays_ignored() {
    let place = damaged(&[]);
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' INT; exec \"$0\" verify v --rate 16MiB/s"]).arg(env!("CARGO_BIN_EXE_sealblock"));
    let child = command.current_dir(place.path("")).stdout(std::process::Stdio::piped()).spawn().unwrap();
    sleep(Duration::from_millis(300));
    signal(&child);
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.contains(": clean"), "{text}");
}

#[test]
fn a_flood_of_findings_is_told_whole() {
    let place = Place::new();
    let target = "fault:[seed=7;read-error%50],mem:8MiB";
    let report = place.run(&format!("verify {target} --json")).ends_with(1).json();
    let lbas: Vec<u64> =
        report["errors"].as_array().unwrap().iter().map(|error| error["lba"].as_u64().unwrap()).collect();
    let runs = lbas.iter().zip(lbas.iter().skip(1)).filter(|(lba, next)| *lba + 1 != **next).count() + 1;
    let text = place.run(&format!("verify {target}")).ends_with(1).text();
    assert!(runs > 300 && text.lines().count() == runs + 1, "{runs} runs\n{text}");
    assert!(text.lines().last().unwrap().ends_with(&format!("{} damaged", lbas.len())), "{text}");
    let mut next = 0;
    for line in text.lines().take(runs) {
        let place = line.split([' ', ':', '.']).find_map(|word| word.parse::<u64>().ok()).unwrap();
        assert!(place >= next && line.ends_with(": medium: cannot be read"), "{line}");
        next = place + 1;
    }
}

#[test]
fn a_compare_tells_runs_as_they_end_and_where_it_was_interrupted() {
    let place = damaged(&[77]);
    let mut data = place.read("data");
    data[10 * 4096] ^= 1;
    data[11 * 4096] ^= 1;
    place.write("other", &data);
    let mut child = place.start("compare fault:[delay=60s@3000..4095],v other");
    let (line, mut stdout) = first_line(&mut child);
    assert_eq!(line, "blocks 10..11 differ\n");
    let mut line = String::new();
    stdout.read_line(&mut line).unwrap();
    assert!(line.starts_with("block 77 of fault:") && line.ends_with(" cannot be read: guard\n"), "{line}");
    signal(&child);
    let ended = ended_by_the_signal(child, stdout);
    let (_, place_of_it) = ended.stderr.lines().next().unwrap().split_once(": interrupted at block ").unwrap();
    let first: u64 = place_of_it.parse().unwrap();
    assert!((78..3000).contains(&first), "past what was told, before what is not read yet: {}", ended.stderr);
    let try_line = format!("try: --range {first}.. resumes the command");
    assert!(ended.stderr.contains(&try_line), "{}", ended.stderr);
    place.run(&format!("compare v other --range {first}..")).succeeds();
}

#[test]
fn an_interrupted_copy_leaves_what_it_has_copied() {
    let place = damaged(&[]);
    place.write("out", b"");
    let mut child = place.start("copy fault:[delay=2s@1000..1000],v out");
    place.wait_for_bytes("out", 3 << 20, &mut child);
    signal(&child);
    let stdout = child.stdout.take().unwrap();
    let ended = ended_by_the_signal(child, stdout);
    let (copied, data) = (place.read("out"), place.read("data"));
    assert!(
        (3 << 20..16 << 20).contains(&copied.len()) && copied[..] == data[..copied.len()],
        "{} bytes",
        copied.len()
    );
    let words = format!("copying fault:[delay=2s@1000..1000],v to out: interrupted after byte {}\n", copied.len());
    assert!(ended.stderr.contains(&words), "{words}: {}", ended.stderr);
}

#[test]
fn an_interrupted_copy_between_devices_prints_the_command_that_resumes_it() {
    let place = damaged(&[]);
    place.run("create w --size 16MiB --block-size 512").succeeds();
    let mut child = place.start("copy fault:[delay=2s@1000..1000],v w --salvage");
    wait_for_handler(&mut child);
    sleep(Duration::from_millis(200));
    signal(&child);
    let stdout = child.stdout.take().unwrap();
    let ended = ended_by_the_signal(child, stdout);
    let command = ended.stderr.lines().find_map(|line| line.strip_prefix("try: sealblock ")).unwrap_or_default();
    assert!(command.starts_with("copy --salvage 'offset:"), "{}", ended.stderr);
    let blocks: Vec<u64> =
        command.split("offset:").skip(1).map(|rest| rest.split("..").next().unwrap().parse().unwrap()).collect();
    assert_eq!(blocks[1], 8 * blocks[0], "each in its own blocks: {command}");
    place.run(&command.replace('\'', "")).succeeds();
    place.run("compare v w").succeeds();
}

#[test]
fn an_interrupted_zero_says_which_blocks_are_left() {
    let place = Place::with_runtime("syscalls");
    let mut child = place.start("zero fault:[delay=2s],null:4GiB --yes --json");
    wait_for_handler(&mut child);
    signal(&child);
    let stdout = child.stdout.take().unwrap();
    let ended = ended_by_the_signal(child, stdout);
    let report: Value = serde_json::from_str(&ended.stdout).unwrap_or_else(|_| panic!("{}", ended.stderr));
    let blocks = report["blocks"].as_u64().unwrap();
    assert!(blocks < 1 << 20 && blocks.is_multiple_of(1 << 16), "{report}");
    assert_eq!(report["resume"].as_str(), Some(range(&ended.stderr)));
    assert_eq!(range(&ended.stderr), format!("{blocks}..1048575"));
}

#[test]
fn waiting_for_a_scrub_tells_what_it_meets() {
    let place = damaged(&[5, 6]);
    let server = Server::start(&place, "v");
    let answer = place.run("scrub start v --rate 8MiB/s --wait");
    let text = answer.ends_with(1).text();
    let line = text.lines().next().unwrap();
    assert!(
        line.starts_with("among blocks 0..") && line.ends_with(": 2 bad blocks, 0 repaired, 2 unrepaired"),
        "{text}"
    );
    assert!(text.contains("v: idle") && text.contains("4096 blocks, 2 bad"), "{text}");
    let report = place.run("scrub start v --wait --json").ends_with(1).json();
    assert_eq!((&report["state"], &report["runs"][1]["bad"]), (&"idle".into(), &2.into()));
    // Without a run there is nothing to wait for.
    place.run("scrub status v --watch").ends_with(1).says(&["v: idle"]);

    let answer = place.run("scrub start v --rate 1MiB/s --json");
    assert_eq!(answer.succeeds().json()["state"], "running");
    let mut child = place.start("scrub status v --watch");
    let (line, stdout) = first_line(&mut child);
    assert!(line.starts_with("among blocks 0.."), "{line}");
    signal(&child);
    let ended = ended_by_the_signal(child, stdout);
    assert!(ended.stdout.starts_with("v: running, at block "), "{}", ended.stdout);
    assert!(ended.stderr.contains("the scrub continues\ntry: `sealblock scrub status v --watch`"), "{}", ended.stderr);
    assert_eq!(place.run("scrub status v --json").ends_with(1).json()["state"], "running");
    // What is held is not waited for.
    let child = place.start("scrub status v --watch");
    sleep(Duration::from_millis(300));
    place.run("scrub pause v").succeeds();
    let answer = crate::common::answer_of(child);
    answer.ends_with(1).says(&["v: paused"]);
    server.stop().is_clean();
}

/// The file systems of tests have files without names.
#[test]
fn a_create_that_is_killed_leaves_nothing_or_a_volume() {
    let place = Place::new();
    let path = place.path("v");
    place.run("create v --size 1MiB").succeeds();
    std::fs::remove_file(&path).unwrap();
    let names =
        || std::fs::read_dir(place.path(".")).unwrap().map(|entry| entry.unwrap().file_name()).collect::<BTreeSet<_>>();
    let before = names();
    for delay_ms in [0, 0, 0, 0, 1, 2, 4, 8] {
        let mut child = place.start("create v --size 64MiB --preallocate");
        while !path.exists() && child.try_wait().unwrap().is_none() {
            std::hint::spin_loop();
        }
        std::thread::sleep(std::time::Duration::from_millis(delay_ms));
        let _ = child.kill();
        child.wait().unwrap();
        if path.exists() {
            place.run("verify v").succeeds();
            std::fs::remove_file(&path).unwrap();
        }
        let mut child = place.start("create v --size 64MiB --preallocate");
        std::thread::sleep(std::time::Duration::from_millis(delay_ms));
        let _ = child.kill();
        child.wait().unwrap();
        match path.exists() {
            true => place.run("verify v").succeeds(),
            false => place.run("create v --size 64MiB").succeeds(),
        };
        std::fs::remove_file(&path).unwrap();
    }
    assert_eq!(names(), before, "nothing is left beside it");
}
