//! `verify --resume FILE`: what was verified before an interruption and found then is part of the last report.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::common::devices::Loop;
use crate::common::server::Server;
use crate::common::{Answer, Place, damaged, noise};
use serde_json::Value;

/// More than anything here should take.
const LONG: Duration = Duration::from_secs(60);
const BLOCKS: u64 = 4096;
const SLOW: &str = "verify v --resume r --rate 2MiB/s --json";
const REST: &str = "verify v --resume r --json";

/// The record, if it is there.
fn record(file: &Path) -> Option<Value> {
    let text = fs::read_to_string(file).ok()?;
    serde_json::from_str(text.split_once('\n')?.1).ok()
}

/// Begins a slow verify, and sends it a signal when a part of it is in the file.
fn cut_off(place: &Place, signal: &str) -> std::process::ExitStatus {
    let mut child = begun(place, SLOW);
    let sent = Command::new("kill").args(["-s", signal, &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
    child.wait().unwrap()
}

/// Starts a verify and waits until a part of it is in the file.
fn begun(place: &Place, command: &str) -> std::process::Child {
    let mut child = place.start(command);
    let start = Instant::now();
    let parts = |file: &Path| record(file).map_or(0, |record| record["parts"].as_array().unwrap().len());
    while parts(&place.path("r")) == 0 {
        assert!(start.elapsed() < LONG && child.try_wait().unwrap().is_none());
        sleep(Duration::from_millis(20));
    }
    child
}

fn cut_off_when_begun(place: &Place, command: &str) {
    let mut child = begun(place, command);
    child.kill().unwrap();
    child.wait().unwrap();
}

fn lbas(report: &Value) -> Vec<u64> {
    report["errors"].as_array().unwrap().iter().map(|error| error["lba"].as_u64().unwrap()).collect()
}

/// The parts of a report, which have to follow each other over the whole volume.
#[track_caller]
fn parts(report: &Value) -> usize {
    let parts = report["parts"].as_array().unwrap();
    let mut next = 0;
    for part in parts {
        assert_eq!(part["first"].as_u64(), Some(next), "{report}");
        next = part["last"].as_u64().unwrap() + 1;
        assert!(part["started_unix_s"].as_u64() <= part["ended_unix_s"].as_u64());
    }
    assert_eq!(next, BLOCKS);
    parts.len()
}

#[test]
fn what_was_found_before_an_interruption_is_in_the_last_report() {
    let place = damaged(&[3, 4000]);
    assert_eq!(cut_off(&place, "INT").signal(), Some(2));
    let kept = record(&place.path("r")).unwrap();
    assert_eq!(kept["errors"][0]["lba"], 3);
    let report = place.run(REST).ends_with(1).json();
    assert_eq!((lbas(&report), parts(&report)), (vec![3, 4000], 2));
    assert_eq!((&report["blocks_verified"], &report["resume"]), (&BLOCKS.into(), &Value::Null));
    assert!(!place.path("r").exists(), "it was reported");

    // Without an interruption there is one part, and no file behind it; without the option there are no parts.
    let report = place.run(REST).ends_with(1).json();
    assert_eq!((lbas(&report), parts(&report)), (vec![3, 4000], 1));
    assert_eq!(place.run("verify v --json").ends_with(1).json().get("parts"), None);
}

#[test]
fn a_killed_verify_goes_on_behind_what_it_saved_and_says_so() {
    let place = damaged(&[3]);
    assert_eq!(cut_off(&place, "KILL").signal(), Some(9));
    let kept = record(&place.path("r")).unwrap();
    let last = kept["parts"][0]["last"].as_u64().unwrap();
    // A crash in the middle of the next save leaves this.
    fs::write(place.path("r.new"), b"sealblock-verify-resume 1 0").unwrap();
    let answer = place.run("verify v --resume r");
    answer.ends_with(1).says(&["block 3: guard: ", &format!("blocks 0 to {last}: verified "), ": 1 damaged\n"]);
    assert!(answer.stderr.contains(&format!("resumes at block {}", last + 1)), "{}", answer.stderr);
    assert!(!place.path("r.lock").exists() && !place.path("r").exists(), "nothing is left of a run that was reported");
}

#[test]
fn a_verify_of_what_was_resized_meanwhile_starts_over_and_says_what_was_damaged() {
    let place = damaged(&[3]);
    cut_off(&place, "KILL");
    place.run("resize v --size 20MiB").succeeds();
    // A part of the blocks that are there now is another request.
    place.run("verify v --resume r --range 0..9").fails(2, &["--range 0..4095"]);
    let answer = place.run("verify v --resume r");
    answer.ends_with(1).says(&["block 3: guard: "]);
    let why = "the target had 4096 blocks of 4096 bytes, and has 5120 of 4096; damaged before: blocks 3";
    assert!(answer.stderr.contains(why), "{}", answer.stderr);
    assert!(!place.path("r").exists(), "it was reported");
}

/// What was verified counts only of what is there: a write, another replica, another file start a run over.
#[test]
fn a_verify_of_what_was_changed_meanwhile_starts_over_and_says_so() {
    let place = damaged(&[3]);
    cut_off(&place, "KILL");
    place.write("good", &noise(1, 16 << 20)[3 * 4096..4 * 4096]);
    place.run("copy good offset:3..3,v").succeeds();
    let answer = place.run("verify v --resume r");
    answer.succeeds().says(&[": clean"]);
    for word in ["starts over: the target was written since", "damaged before: blocks 3"] {
        assert!(answer.stderr.contains(word), "{word}: {}", answer.stderr);
    }
    // Another volume at its path, of the same size and content.
    cut_off(&place, "KILL");
    fs::copy(place.path("v"), place.path("w")).unwrap();
    fs::rename(place.path("w"), place.path("v")).unwrap();
    let answer = place.run("verify v --resume r");
    assert!(answer.succeeds().stderr.contains("starts over: it is another target now: file "), "{}", answer.stderr);
}

/// A replica that took the place of one that was verified was never read.
#[test]
fn a_replica_that_was_replaced_meanwhile_is_verified() {
    let place = Place::new();
    for name in ["a", "b"] {
        place.run(&format!("create {name} --size 16MiB")).succeeds();
    }
    place.write("data", &noise(1, 16 << 20));
    place.run("copy data mirror:a,b").succeeds();
    cut_off_when_begun(&place, "verify mirror:a,b --resume r --rate 2MiB/s --json");
    fs::rename(place.path("b"), place.path("b.away")).unwrap();
    place.run("create b --size 16MiB").succeeds();
    place.run("mirror replace mirror:a,b b").succeeds();
    place.run("corrupt b --lba 3 --kind data").succeeds();
    let answer = place.run("verify mirror:a,b --resume r");
    answer.ends_with(1).says(&["block 3 on b: guard: "]);
    assert!(answer.stderr.contains("starts over: it is another target now"), "{}", answer.stderr);
}

#[test]
fn links_beside_the_file_lead_to_no_other_file() {
    let place = damaged(&[]);
    place.write("diary", b"dear");
    for name in ["r.new", "r.lock"] {
        std::os::unix::fs::symlink("diary", place.path(name)).unwrap();
    }
    place.run("verify v --resume r").fails(3, &["r.lock"]);
    fs::remove_file(place.path("r.lock")).unwrap();
    place.run("verify v --resume r").succeeds();
    std::os::unix::fs::symlink("diary", place.path("s")).unwrap();
    place.run("verify v --resume s").fails(3, &["not a plain file"]);
    assert_eq!(place.read("diary"), b"dear");
}

#[test]
fn a_file_of_another_run_or_target_or_a_damaged_one_is_refused() {
    let place = damaged(&[]);
    cut_off(&place, "KILL");
    let good = fs::read(place.path("r")).unwrap();
    place.run("create w --size 16MiB").succeeds();
    for (arguments, status, words) in [
        ("w --resume r", 2, "it is of the target v"),
        ("v --resume r --range 0..9", 2, "it is of --range 0..4095"),
        ("v --resume r --mode emulate", 2, "it was started with --mode auto"),
        ("v --resume r --repair", 2, "it was started without --repair"),
    ] {
        place.run(&format!("verify {arguments}")).fails(status, &[words, "remove r to start over"]);
    }
    place.run("verify v w --resume r").fails(2, &["--resume needs a single target"]);
    // Damage, cut off, another file, a later version.
    let mut flipped = good.clone();
    flipped[good.len() / 2] ^= 1;
    let later = String::from_utf8(good.clone()).unwrap().replacen(" 2 ", " 3 ", 1).into_bytes();
    for (bytes, word) in [
        (flipped, "its checksum does not match"),
        (good[..good.len() / 2].to_vec(), "its checksum does not match"),
        (b"12\n".to_vec(), "not written by --resume"),
        (Vec::new(), "not written by --resume"),
        (later, "has version 3"),
    ] {
        fs::write(place.path("r"), &bytes).unwrap();
        place.run("verify v --resume r").fails(3, &[word, "remove r to start over"]);
        assert_eq!(fs::read(place.path("r")).unwrap(), bytes, "a refusal changes nothing");
    }
    fs::write(place.path("r"), &good).unwrap();
    place.run("verify v --resume r").succeeds().says(&[": clean"]);
    fs::create_dir(place.path("d")).unwrap();
    place.run("verify v --resume d").fails(3, &["not a plain file"]);
    place.run("verify v --resume away/r").fails(3, &["away/r.lock"]);
}

#[test]
fn one_run_at_a_time_goes_on_by_a_file() {
    let place = damaged(&[]);
    let mut child = place.start(SLOW);
    let start = Instant::now();
    while !place.path("r").exists() {
        assert!(start.elapsed() < LONG);
        sleep(Duration::from_millis(10));
    }
    place.run("verify v --resume r").fails(3, &["another verify uses this file"]);
    child.kill().unwrap();
    child.wait().unwrap();
    place.run("verify v --resume r").succeeds();
}

#[test]
fn what_is_complete_and_was_not_reported_is_reported_by_the_next_run() {
    let place = damaged(&[9]);
    // Standard output is full: the report is lost, and the file is not.
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut command = place.command("verify v --resume r --json");
    let status = command.stdout(full).status().unwrap();
    assert_eq!(status.code(), Some(3));
    let kept = record(&place.path("r")).unwrap();
    assert_eq!(kept["parts"][0]["last"], BLOCKS - 1);
    let report = place.run(REST).ends_with(1).json();
    assert_eq!((lbas(&report), parts(&report), &report["blocks_verified"]), (vec![9], 1, &BLOCKS.into()));
    assert!(!place.path("r").exists());
}

#[test]
fn a_replica_that_fell_behind_since_makes_all_parts_incomplete() {
    let place = Place::new();
    for name in ["a", "b"] {
        place.run(&format!("create {name} --size 16MiB")).succeeds();
    }
    place.write("data", &noise(1, 16 << 20));
    place.run("copy data mirror:a,b").succeeds();
    cut_off_when_begun(&place, "verify mirror:a,b --resume r --rate 2MiB/s --json");
    fs::rename(place.path("b"), place.path("b.away")).unwrap();
    place.write("piece", &noise(2, 4096));
    place.run("copy piece offset:0..0,mirror:a,b").ends_with(4);
    let report = place.run("verify mirror:a,b --resume r --json").ends_with(4).json();
    let covered = |lba: u64| {
        let runs = report["unchecked"].as_array().unwrap().iter();
        runs.clone().any(|run| run["first"].as_u64().unwrap() <= lba && lba <= run["last"].as_u64().unwrap())
    };
    assert!(covered(0) && covered(BLOCKS - 1), "{report}");
    assert_eq!(parts(&report), 1, "a replica was written and one went out of sync: it starts over");
}

#[test]
fn a_volume_that_was_put_back_and_written_as_often_as_before_is_another_state() {
    let place = damaged(&[]);
    let before = place.read("v");
    place.write("piece", &noise(7, 4096));
    place.run("copy piece offset:0..0,v").succeeds();
    cut_off_when_begun(&place, SLOW);
    // The same file, as it was before, and opened for writing once more: its count is the same.
    fs::write(place.path("v"), &before).unwrap();
    place.write("piece", &noise(8, 4096));
    place.run("copy piece offset:0..0,v").succeeds();
    let answer = place.run(REST);
    assert!(answer.succeeds().stderr.contains("starts over: the target was written since"), "{}", answer.stderr);
    assert_eq!(parts(&answer.json()), 1);
}

/// Begins a slow verify of what does not show whether it was written, ends it, has `change` do its work, and repeats it.
fn resumed(place: &Place, target: &str, change: impl FnOnce()) -> Answer {
    cut_off_when_begun(place, &format!("verify {target} --resume r --rate 2MiB/s --json"));
    change();
    place.run(&format!("verify {target} --resume r --json"))
}

/// The blocks that the report calls verified before.
fn verified_before(report: &Value) -> Option<(u64, u64)> {
    let before = report.get("verified_before")?;
    Some((before["first"].as_u64().unwrap(), before["last"].as_u64().unwrap()))
}

#[test]
fn what_shows_that_it_was_not_written_is_clean_although_it_was_verified_in_two_runs() {
    let place = damaged(&[]);
    place.write("data", &noise(2, 16 << 20));
    for (target, checked) in [("v", "seals"), ("raw:data", "readability")] {
        let report = resumed(&place, target, || ()).succeeds().json();
        assert_eq!(report["parts"].as_array().unwrap().len(), 2, "{target}: {report}");
        assert_eq!((verified_before(&report), &report["checked"]), (None, &checked.into()), "{target}");
    }
    let answer = resumed(&place, "raw:data", || place.poke("data", 3 * 4096, b"changed"));
    assert!(answer.succeeds().stderr.contains("starts over: the target was written since"), "{}", answer.stderr);
}

#[test]
fn an_export_over_nbd_may_be_another_one_and_starts_over() {
    let place = damaged(&[]);
    let serve = |listen: &str| Server::start(&place, &format!("v --nbd {listen}"));
    let nbd = |server: &Server| server.ready["nbd"]["listeners"][0].as_str().unwrap().to_owned();
    let server = serve("127.0.0.1:0");
    let listen = nbd(&server);
    let target = format!("nbd://{listen}/v");
    let mut again = None;
    let answer = resumed(&place, &target, || {
        server.stop().is_clean();
        place.run("create v --size 16MiB --force").succeeds();
        place.write("data", &noise(1, 16 << 20));
        place.run("copy data v").succeeds();
        place.run("corrupt v --lba 3 --kind data").succeeds();
        again = Some(serve(&listen));
    });
    assert_eq!((lbas(&answer.ends_with(1).json()), parts(&answer.json())), (vec![3], 1));
    let why = "starts over: nothing identifies this NBD export, so another one may be there now";
    assert!(answer.stderr.contains(why), "{}", answer.stderr);
    // What an interrupted run advises does not resume by itself.
    let child = begun(&place, &format!("verify {target} --resume r --rate 2MiB/s"));
    assert!(Command::new("kill").args(["-s", "INT", &child.id().to_string()]).status().unwrap().success());
    let ended = child.wait_with_output().unwrap();
    let errors = String::from_utf8(ended.stderr).unwrap();
    assert!(errors.contains("..4095 resumes the command") && !errors.contains("repeat the command"), "{errors}");
    again.unwrap().stop();
}

#[test]
fn blocks_of_a_namespace_that_were_verified_before_are_not_called_clean() {
    let place = damaged(&[]);
    let server = Server::start(&place, "v");
    let (listen, target) = (server.address().to_owned(), server.target("v"));
    let mut again = None;
    let answer = resumed(&place, &target, || {
        server.stop().is_clean();
        place.write("data", &noise(2, 16 << 20));
        place.run("copy data v").succeeds();
        place.run("corrupt v --lba 3 --kind data").succeeds();
        again = Some(Server::start_at(&place, &format!("v --listen {listen}")));
    });
    let report = answer.ends_with(4).json();
    let last = report["parts"][0]["last"].as_u64().unwrap();
    assert_eq!((parts(&report), verified_before(&report)), (2, Some((0, last))));
    assert!(!place.path("r").exists(), "it was reported");
    // The next run checks everything, and in one run it is known what is clean and what is not.
    let whole = place.run(&format!("verify {target} --resume r --json")).ends_with(1).json();
    assert_eq!((lbas(&whole), parts(&whole), verified_before(&whole)), (vec![3], 1, None));
    // Without a change nothing shows that there was none.
    place.run(&format!("zero {target} --range 3")).succeeds();
    cut_off_when_begun(&place, &format!("verify {target} --resume r --rate 2MiB/s --json"));
    let text = place.run(&format!("verify {target} --resume r"));
    text.ends_with(4).says(&[
        ": incomplete: blocks 0 to ",
        " were verified before, last on ",
        "and may have been written since\n",
    ]);
    let whole = place.run(&format!("verify {target} --resume r --json")).succeeds().json();
    assert_eq!((parts(&whole), verified_before(&whole)), (1, None));
    // Another namespace in its place.
    let answer = resumed(&place, &target, || {
        again.take().unwrap().stop();
        place.run("create v --size 16MiB --force").succeeds();
        again = Some(Server::start_at(&place, &format!("v --listen {listen}")));
    });
    assert!(
        answer.succeeds().stderr.contains("starts over: it is another target now: namespace "),
        "{}",
        answer.stderr
    );
    again.unwrap().stop().is_clean();
}

#[test]
fn blocks_of_a_device_without_a_volume_that_were_verified_before_are_not_called_clean() {
    let place = damaged(&[]);
    place.write("data", &noise(2, 16 << 20));
    let Some(raw) = Loop::new(&place.path("data"), &["--sector-size", "4096"]) else { return };
    let report = resumed(&place, &format!("raw:{}", raw.0), || ()).ends_with(4).json();
    assert!(verified_before(&report).is_some(), "{report}");
    // The volume on another one counts how often it was opened for writing.
    let Some(held) = Loop::new(&place.path("v"), &["--sector-size", "4096"]) else { return };
    let report = resumed(&place, &held.0, || ()).succeeds().json();
    assert_eq!((parts(&report), verified_before(&report)), (2, None));
}

#[test]
fn blocks_of_a_repair_that_were_verified_before_are_not_called_clean() {
    let place = Place::new();
    for name in ["a", "b"] {
        place.run(&format!("create {name} --size 16MiB")).succeeds();
    }
    place.write("data", &noise(1, 16 << 20));
    place.run("copy data mirror:a,b").succeeds();
    cut_off_when_begun(&place, "verify mirror:a,b --repair --resume r --rate 2MiB/s --json");
    let report = place.run("verify mirror:a,b --repair --resume r --json").ends_with(4).json();
    assert_eq!((parts(&report), verified_before(&report).map(|(first, _)| first)), (2, Some(0)));
    place.run("verify mirror:a,b --repair --resume r").succeeds().says(&[": clean"]);
}
