//! `sealblock bench`: tiny runs, which show that it measures and reports, and nothing of speed.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::common::{Answer, Place, skipped};
use serde_json::Value;

const TERMINATED: i32 = 15;
/// More than anything here should take.
const LONG: Duration = Duration::from_secs(120);

/// A run of one claim, or nothing where its folder has no direct I/O.
fn run(place: &Place, arguments: &str) -> Option<Answer> {
    let answer = place.run(&format!("bench --size 1MiB --seconds 0.01 --rounds 3 {arguments}"));
    if answer.stderr.contains("has no direct I/O") {
        skipped("the folder of tests has no direct I/O");
        return None;
    }
    Some(answer)
}

/// Nothing of a run is left but its results.
#[track_caller]
fn is_tidy(place: &Place) {
    let names = fs::read_dir(place.path(".")).unwrap().map(|entry| entry.unwrap().file_name());
    let left: Vec<_> = names.filter(|name| name.to_string_lossy().starts_with("sealblock-perf-")).collect();
    assert!(left.is_empty(), "{left:?}");
}

fn rulings(claim: &Value) -> Vec<&str> {
    claim["verdicts"].as_array().unwrap().iter().map(|verdict| verdict["ruling"].as_str().unwrap()).collect()
}

#[test]
fn verify_offload_is_measured_and_moves_no_data() {
    let place = Place::new();
    let report = place.run("bench --size 1MiB --seconds 0.05 --rounds 3 verify-offload --json").succeeds().json();
    assert_eq!((&report["version"], &report["interrupted"]), (&1.into(), &false.into()));
    let claim = &report["claims"][0];
    assert_eq!((&claim["name"], &claim["size_bytes"]), (&"verify-offload".into(), &(1 << 20).into()));
    for table in claim["tables"].as_array().unwrap() {
        assert_eq!(table["rows"].as_array().unwrap().len(), 6, "{table}");
        for row in table["rows"].as_array().unwrap() {
            let moved = row["cells"][3]["median"].as_f64().unwrap();
            let is_offloaded = row["name"].as_str().unwrap().starts_with("Verify");
            assert_eq!(is_offloaded, moved < 1e6, "payload is read or it is not: {row}");
            assert!(row["cells"][0]["median"].as_f64().unwrap() > 0.0, "{row}");
        }
    }
    // What was timed may be anything on a loaded machine; what was counted may not. A command of 96 bytes for 1 MiB is always less.
    let counted = claim["verdicts"].as_array().unwrap().iter().filter(|verdict| verdict["rounds"] == 0);
    assert!(counted.clone().count() >= 3 && counted.clone().all(|verdict| verdict["ruling"] == "holds"), "{claim}");
    assert!(rulings(claim).iter().all(|ruling| ["holds", "does not hold", "too noisy to tell"].contains(ruling)));
    is_tidy(&place);
}

#[test]
fn write_zeroes_is_measured_and_written_in_all_forms() {
    let place = Place::new();
    let Some(answer) = run(&place, "write-zeroes --json results.json --plot pictures --report page.html") else {
        return;
    };
    answer.succeeds().says(&[
        "write-zeroes: ",
        "published: 1 GiB zeroed in 0.17 s",
        "zero --no-unmap",
        "written zeroes, again",
    ]);
    let report: Value = serde_json::from_slice(&place.read("results.json")).unwrap();
    let claim = &report["claims"][0];
    assert_eq!((&claim["name"], &claim["failure"]), (&"write-zeroes".into(), &Value::Null));
    for plot in claim["plots"].as_array().unwrap() {
        let picture = place.read(&format!("pictures/{}.svg", plot["name"].as_str().unwrap()));
        assert!(picture.starts_with(b"<svg "));
    }
    let page = String::from_utf8(place.read("page.html")).unwrap();
    for verdict in claim["verdicts"].as_array().unwrap() {
        assert!(page.contains(verdict["ruling"].as_str().unwrap()), "{verdict}");
    }
    assert!(page.contains("<svg ") && !page.contains("<script"));
    is_tidy(&place);
}

#[test]
fn claims_are_listed_and_others_are_refused() {
    let place = Place::new();
    place.run("bench --list").succeeds().says(&["verify-offload: ", "write-zeroes: ", "published: "]);
    place.run("bench verify-ofload").fails(2, &["verify-ofload", "verify-offload", "write-zeroes"]);
    place.run("bench --json verify-offload").fails(2, &["verify-offload is a claim"]);
    place.run("bench --size 1000").fails(2, &["multiple of 1 MiB"]);
    place.run("bench --seconds 0").fails(2, &["more than 0"]);
    place.run("bench --seconds NaN").fails(2, &["more than 0"]);
    place.run("bench --rounds 0").fails(2, &["rounds"]);
    place.run("bench --list --rounds 3").fails(2, &["--list"]);
}

#[test]
fn what_cannot_be_measured_or_written_is_an_error() {
    let place = Place::new();
    place.run("bench write-zeroes --dir nowhere").fails(3, &["nowhere", "write-zeroes"]);
    // Nothing is measured for a file that cannot be made.
    let start = Instant::now();
    place.run("bench --json nowhere/results.json").fails(3, &["nowhere/results.json"]);
    assert!(start.elapsed() < LONG);
}

#[test]
fn a_signal_ends_it_and_its_files_are_removed() {
    let place = Place::new();
    let mut child = place.start("bench --size 1MiB --seconds 0.01 --rounds 1000 write-zeroes");
    let has_file = || {
        fs::read_dir(place.path("."))
            .unwrap()
            .any(|entry| entry.unwrap().file_name().to_string_lossy().starts_with("sealblock-perf-"))
    };
    let start = Instant::now();
    while !has_file() && child.try_wait().unwrap().is_none() {
        assert!(start.elapsed() < LONG, "no file is ever made");
        sleep(Duration::from_millis(1));
    }
    let sent = Command::new("kill").args(["-s", "TERM", &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.signal(), Some(TERMINATED), "{stderr}");
    assert!(stderr.contains("interrupted") && !stderr.contains("panicked"), "{stderr}");
    is_tidy(&place);
}
