//! `sealblock fs bench`: tiny runs, which show that it measures and counts, and nothing of speed.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::common::{Place, skipped};
use serde_json::Value;

const TERMINATED: i32 = 15;
/// More than anything here should take.
const LONG: Duration = Duration::from_secs(120);

/// Nothing of a run is left.
#[track_caller]
fn is_tidy(place: &Place) {
    let names = fs::read_dir(place.path(".")).unwrap().map(|entry| entry.unwrap().file_name());
    let left: Vec<_> = names.filter(|name| name.to_string_lossy().starts_with("sealblock-perf-")).collect();
    assert!(left.is_empty(), "{left:?}");
}

fn of<'v>(point: &'v Value, mode: &str) -> &'v Value {
    let found = point["modes"].as_array().unwrap().iter().find(|one| one["mode"] == mode);
    found.unwrap_or_else(|| panic!("{mode}: {point}"))
}

/// The median of a figure, such as `written.data`.
fn median(mode: &Value, figure: &str) -> f64 {
    let value = figure.split('.').fold(mode, |value, key| &value[key]);
    value["median"].as_f64().unwrap_or_else(|| panic!("{figure}: {mode}"))
}

#[test]
fn each_byte_that_is_written_is_counted_where_it_belongs() {
    let place = Place::in_memory();
    let arguments =
        "fs bench --size 1MiB --rounds 2 --metadata single,dup --modes csum,csum-pi,device,nodatasum,nodatacow";
    let report = place.run(&format!("{arguments} --json")).succeeds().json();
    assert_eq!((&report["version"], &report["interrupted"], &report["dir"]), (&1.into(), &false.into(), &Value::Null));
    let points = report["points"].as_array().unwrap();
    assert_eq!(points.iter().map(|point| &point["metadata_copies"]).collect::<Vec<_>>(), [1, 2]);
    for point in points {
        assert_eq!((&point["commit_writes"], &point["rounds"]), (&256.into(), &2.into()));
        for mode in point["modes"].as_array().unwrap() {
            let name = mode["mode"].as_str().unwrap();
            let tree = |tree: &str| mode["written"]["trees"].get(tree).map(|of| of["median"].as_f64().unwrap());
            assert_eq!((median(mode, "requests"), median(mode, "commits")), (512.0, 2.0), "{mode}");
            assert_eq!(median(mode, "written.data"), 1.0, "{mode}");
            assert_eq!(tree("checksum").is_some(), name.starts_with("csum"), "{mode}");
            // Written in place, data change nothing but the times of the file.
            assert!(tree("subvolume").is_some() && tree("root").is_some() && tree("other").is_none(), "{mode}");
            let has_tags = ["csum-pi", "device"].contains(&name);
            assert_eq!(median(mode, "written.protection") > 0.0, has_tags, "{mode}");
            assert!(median(mode, "iops") > 0.0 && median(mode, "cpu_us") > 0.0, "{mode}");
            assert_eq!(mode["baseline"] == "csum", name != "csum", "{mode}");
            let parts = ["data", "metadata", "superblocks", "protection"];
            let sum: f64 = parts.map(|part| median(mode, &format!("written.{part}"))).iter().sum();
            assert!((sum - median(mode, "amplification")).abs() < 0.01, "{mode}");
        }
        assert!(median(of(point, "csum"), "written.metadata") > median(of(point, "device"), "written.metadata"));
        assert!(median(of(point, "nodatacow"), "ratios.amplification") < 1.0);
    }
    // All nodes are written twice with DUP.
    let nodes = |point: usize| median(of(&points[point], "nodatasum"), "written.metadata");
    assert!((nodes(1) / nodes(0) - 2.0).abs() < 0.1, "{} {}", nodes(0), nodes(1));
    is_tidy(&place);
}

#[test]
fn what_is_collected_is_written_once() {
    let place = Place::in_memory();
    let run = |arguments: &str| {
        let answer = place.run(&format!("fs bench --size 1MiB --rounds 1 --modes csum --json {arguments}"));
        answer.succeeds().json()["points"][0].clone()
    };
    let collected = run("--buffered --commit-writes 2048");
    // 2048 writes to 256 blocks.
    assert!((median(of(&collected, "csum"), "written.data") - 0.125).abs() < 0.001, "{collected}");
    assert_eq!(collected["model_amplification"], Value::Null);
    let timed = run("--commit-interval 0.05 --commits 1");
    assert_eq!((&timed["commit_interval_s"], &timed["commit_writes"]), (&0.05.into(), &Value::Null));
    assert!(median(of(&timed, "csum"), "requests") > 0.0);
    // A commit comes by itself when there is no memory for changed nodes.
    let short = run("--dirty-memory 64KiB --commits 1");
    assert!(median(of(&short, "csum"), "commits") > 1.0, "{short}");
}

#[test]
fn devices_in_files_are_measured_and_removed() {
    let place = Place::new();
    let answer = place.run("fs bench --size 1MiB --rounds 1 --modes csum,device --dir .");
    if answer.stderr.contains("has no direct I/O") {
        return skipped("the folder of tests has no direct I/O");
    }
    answer.succeeds().says(&["csum", "device", "writes/s", "in files in ."]);
    is_tidy(&place);
}

#[test]
fn what_cannot_be_measured_is_refused() {
    let place = Place::in_memory();
    for (arguments, why) in [
        ("--size 1000", "multiple of 1 MiB"),
        ("--size 0", "multiple of 1 MiB"),
        ("--modes csum,tree", "tree"),
        ("--metadata raid1", "raid1"),
        ("--commit-writes 0", "commit-writes"),
        ("--commit-interval 0", "more than 0"),
        ("--commit-interval 1 --buffered", "--buffered"),
        ("--commit-interval 1 --commit-writes 1", "--commit-writes"),
        ("--rounds 0", "rounds"),
        ("--queue-depth 0", "queue-depth"),
    ] {
        place.run(&format!("fs bench {arguments}")).fails(2, &[why]);
    }
    place.run("fs bench --size 1PiB").fails(3, &["does not fit", "--dir"]);
    place.run("fs bench --dir nowhere").fails(3, &["nowhere"]);
    place.run("fs bench --size 64MiB --device-size 1MiB --rounds 1").fails(3, &["device 1"]);
    place.run("fs bench --size 256MiB --device-size 120MiB --rounds 1 --modes csum").fails(3, &["space"]);
    is_tidy(&place);
}

#[test]
fn the_kernel_is_measured_or_refused_with_the_reason() {
    let place = Place::in_memory();
    let answer = place.run("fs bench --size 1MiB --rounds 1 --commits 1 --modes csum --kernel --json");
    if answer.status == 3 {
        assert!(answer.stderr.contains("root") || answer.stderr.contains("Btrfs") || answer.stderr.contains("loop"));
        return skipped("the kernel's Btrfs cannot be measured here");
    }
    let point = &answer.succeeds().json()["points"][0];
    for mode in ["kernel-csum", "kernel-nodatasum", "kernel-nodatacow"] {
        let mode = of(point, mode);
        assert!(median(mode, "amplification") >= 1.0 && mode["written"].is_null(), "{mode}");
    }
    assert!(median(of(point, "csum"), "kernel_ratios.iops") > 0.0);
}

#[test]
fn a_signal_ends_it_and_its_files_are_removed() {
    let place = Place::new();
    let mut child = place.start("fs bench --size 4MiB --rounds 1000 --dir .");
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
    if child.try_wait().unwrap().is_some() {
        let output = child.wait_with_output().unwrap();
        assert!(String::from_utf8_lossy(&output.stderr).contains("has no direct I/O"));
        return skipped("the folder of tests has no direct I/O");
    }
    let sent = Command::new("kill").args(["-s", "TERM", &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.signal(), Some(TERMINATED), "{stderr}");
    assert!(stderr.contains("interrupted") && !stderr.contains("panicked"), "{stderr}");
    is_tidy(&place);
}
