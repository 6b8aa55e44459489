//! The background scrub of a server: what it finds, how it is led, and what outlives the server.

use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::common::host::known_bad;
use crate::common::server::Server;
use crate::common::{Place, noise};
use serde_json::Value;

const MIB: u64 = 1 << 20;
/// More than anything here should take.
const LONG: Duration = Duration::from_secs(60);

#[track_caller]
fn status(place: &Place) -> Value {
    let answer = place.run("scrub status v --json");
    assert!(answer.status <= 1, "{}", answer.stderr);
    answer.json()
}

/// Waits until the status is so.
#[track_caller]
fn until(place: &Place, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
    let start = Instant::now();
    loop {
        let status = status(place);
        if is_so(&status) {
            return status;
        }
        assert!(start.elapsed() < LONG, "{what}: {status}");
        sleep(Duration::from_millis(20));
    }
}

fn position(status: &Value) -> u64 {
    status["position"].as_u64().unwrap()
}

/// Blocks that a run has checked, and of these the bad, the repaired and the lost ones.
fn counts(run: &Value) -> [u64; 4] {
    ["blocks", "bad", "repaired", "unrepaired"].map(|name| run[name].as_u64().unwrap())
}

#[test]
fn damage_is_found_told_known_to_hosts_and_remembered() {
    let place = Place::new();
    place.volume("--size 16MiB", &noise(1, 16 << 20));
    for (lba, kind) in [(7, "data"), (8, "guard"), (4095, "ref-tag")] {
        place.run(&format!("corrupt v --lba {lba} --kind {kind}")).succeeds();
    }
    let mut server = Server::start(&place, "v");
    assert_eq!(known_bad(server.address(), "v"), []);
    let before = status(&place);
    assert_eq!((&before["state"], &before["saved"]), (&"idle".into(), &"on_disk".into()));
    place.run("scrub start v").succeeds().says(&["v: "]);
    let started = server.event();
    assert_eq!((&started["event"], &started["position"]), (&"scrub_started".into(), &0.into()));
    let finished = server.event();
    assert_eq!((&finished["event"], &finished["result"]), (&"scrub_finished".into(), &"finished".into()));
    assert_eq!((&finished["target"], counts(&finished)), (&"v".into(), [4096, 3, 0, 3]));
    // No host has read or verified anything over NVMe.
    assert_eq!(known_bad(server.address(), "v"), [(7, 2), (4095, 1)]);

    let after = place.run("scrub status v --json").ends_with(1).json();
    assert_eq!((counts(&after["runs"][0]), &after["state"]), ([4096, 3, 0, 3], &"idle".into()));
    assert!(after["completed_unix_s"].as_u64().is_some() && after["server_pid"] == server.pid());
    place.run("scrub status v").ends_with(1).says(&["v: idle", "finished after", "3 bad, 0 repaired, 3 unrepaired"]);

    // What is rewritten is good, and the next scrub says so.
    place.run(&format!("zero {} --range 7..8", server.target("v"))).succeeds();
    place.run(&format!("zero {} --range 4095", server.target("v"))).succeeds();
    place.run("scrub start v").succeeds();
    server.event();
    assert_eq!(counts(&server.event()), [4096, 0, 0, 0]);
    place.run("scrub status v").succeeds().says(&["4096 blocks, clean"]);
    let ended = server.stop();
    ended.is_clean();
    let told: Vec<_> = ended.stderr.lines().filter(|line| line.contains("scrub of v")).collect();
    assert_eq!(told.len(), 2, "{}", ended.stderr);
    assert!(told[0].contains("blocks 7 to 8: guard, not repaired") && told[1].contains("block 4095: ref_tag"));
    let kept = place.run("scrub status v --json").succeeds().json();
    assert_eq!((kept["runs"].as_array().unwrap().len(), &kept["server_pid"]), (2, &Value::Null));
    assert_eq!(counts(&kept["runs"][0]), [4096, 3, 0, 3]);
}

#[test]
fn a_bad_block_on_one_replica_is_repaired_and_no_longer_listed() {
    let (place, data) = (Place::new(), noise(2, 4 << 20));
    for replica in ["a", "b"] {
        place.run(&format!("create {replica} --size 16MiB")).succeeds();
    }
    place.write("data", &data);
    place.run("copy data mirror:a,b").succeeds();
    for (replica, lba, kind) in [("a", 7, "data"), ("b", 7, "guard"), ("a", 30, "data"), ("b", 900, "guard")] {
        place.run(&format!("corrupt {replica} --lba {lba} --kind {kind}")).succeeds();
    }
    let mut server = Server::start(&place, "mirror:a,b");
    place.run("scrub start mirror:a,b").succeeds();
    assert_eq!(server.event()["event"], "scrub_started");
    // Block 7 is bad on both replicas.
    assert_eq!(counts(&server.event()), [4096, 3, 2, 1]);
    assert_eq!(known_bad(server.address(), "mirror"), [(7, 1)]);
    server.stop().is_clean();
    for replica in ["a", "b"] {
        let report = place.run(&format!("verify {replica} --json")).ends_with(1).json();
        assert_eq!(
            (report["errors"].as_array().unwrap().len(), &report["errors"][0]["lba"]),
            (1, &7.into()),
            "{replica}"
        );
    }
}

#[test]
fn a_run_is_paused_goes_on_and_is_stopped_also_across_a_restart() {
    let place = Place::new();
    place.run("create v --size 256MiB").succeeds();
    let server = Server::start(&place, "v");
    place.run("scrub pause v").fails(3, &["cannot pause the scrub of 'v'", "no run is active"]);
    place.run("scrub stop v").fails(3, &["no run is active"]);
    place.run("scrub start v --from 65536").fails(2, &["past the last block, 65535"]);
    place.run("scrub start v --rate 8MiB/s --from 100").succeeds();
    until(&place, "it moves", |status| position(status) > 300);
    place.run("scrub pause v").succeeds().says(&["v: paused, at block"]);
    let paused = status(&place);
    assert_eq!((&paused["run"]["from"], &paused["rate"]), (&100.into(), &(8 * MIB).into()));
    sleep(Duration::from_millis(300));
    assert_eq!(position(&status(&place)), position(&paused));
    server.kill();
    place.run("scrub status v").succeeds().says(&["v: paused, at block"]);

    let server = Server::start(&place, "v");
    let again = status(&place);
    assert_eq!((position(&again), &again["state"]), (position(&paused), &"paused".into()));
    place.run("scrub start v").succeeds();
    until(&place, "it goes on", |status| position(status) > position(&paused));
    place.run("scrub stop v").succeeds().says(&["v: idle"]);
    let stopped = status(&place);
    assert_eq!((&stopped["runs"][0]["result"], &stopped["run"]), (&"stopped".into(), &Value::Null));
    assert!(stopped["runs"][0]["blocks"].as_u64().unwrap() >= position(&paused) - 100);
    server.stop().is_clean();
}

#[test]
fn after_a_crash_it_goes_on_where_it_was_saved() {
    let place = Place::new();
    place.run("create v --size 1GiB").succeeds();
    let server = Server::start(&place, "v");
    place.run("scrub start v --rate 8MiB/s").succeeds();
    // The position is written every five seconds.
    sleep(Duration::from_millis(5500));
    let before = until(&place, "it moves", |status| position(status) > 6 * 8 * MIB / 4096);
    server.kill();
    let kept = place.run("scrub status v --json").succeeds().json();
    assert_eq!(kept["state"], "interrupted");
    assert!(position(&kept) > 0 && position(&kept) <= position(&before) + 8 * MIB / 4096, "{kept}");
    let mut server = Server::start(&place, "v");
    let event = server.event();
    assert_eq!((&event["event"], &event["resumed"]), (&"scrub_started".into(), &true.into()));
    assert_eq!(event["position"], kept["position"]);
    let ended = server.stop();
    ended.is_clean();
    // Closed in good order, it loses nothing.
    let closed = place.run("scrub status v --json").succeeds().json();
    assert!(closed["state"] == "interrupted" && position(&closed) >= position(&kept), "{closed}");
}

#[test]
fn the_rate_is_kept() {
    let place = Place::new();
    place.run("create v --size 1GiB").succeeds();
    let server = Server::start(&place, "v --scrub-rate 16MiB/s");
    for (arguments, rate) in [("", 16), (" --rate 4MiB/s", 4)] {
        let start = Instant::now();
        place.run(&format!("scrub start v{arguments}")).succeeds();
        sleep(Duration::from_secs(2));
        let bytes = position(&status(&place)) * 4096;
        let seconds = start.elapsed().as_secs_f64();
        assert!(bytes as f64 <= (seconds + 0.5) * (rate * MIB) as f64, "{bytes} bytes in {seconds} s at {rate} MiB/s");
        assert!(bytes >= rate * MIB / 4, "{bytes} bytes in {seconds} s at {rate} MiB/s");
        place.run("scrub stop v").succeeds();
    }
    server.stop().is_clean();
}

#[test]
fn a_device_with_requests_in_flight_is_given_way_to() {
    let place = Place::new();
    place.run("create v --size 1GiB").succeeds();
    // The last block of the device takes its time, and so keeps the device busy.
    let target = "fault:[delay=120s@262143],v";
    let server = Server::start(&place, target);
    let busy = || place.run(&format!("scrub status {target} --json")).succeeds().json();
    let mut read = place.start(&format!("copy offset:262143..262143,{} -", server.target("v")));
    place.run(&format!("scrub start {target} --rate 40MiB/s")).succeeds();
    let start = Instant::now();
    while busy()["yielding"] != true {
        assert!(start.elapsed() < LONG, "the read comes to the device");
    }
    let (start, before) = (Instant::now(), position(&busy()));
    sleep(Duration::from_secs(2));
    let (after, seconds) = (busy(), start.elapsed().as_secs_f64());
    // One piece of 1 MiB in 250 ms and no more; and one now and then all the same.
    let checked = (position(&after) - before) * 4096;
    assert_eq!(after["state"], "running");
    assert!(checked > 0 && checked as f64 <= (seconds + 1.0) * (4 * MIB) as f64, "{checked} in {seconds} s: {after}");
    read.kill().unwrap();
    read.wait().unwrap();
    server.kill();
}

#[test]
fn a_schedule_begins_runs_by_itself_and_is_remembered() {
    let place = Place::new();
    place.run("create v --size 1MiB").succeeds();
    let subsystems = "[[subsystems]]\nname = \"v\"\n[[subsystems.namespaces]]\ntarget = \"v\"\n";
    let memory = "[[subsystems.namespaces]]\ntarget = \"mem:1MiB\"\nscrub = { every = \"never\" }\n";
    place.write("sealblock.toml", format!("{subsystems}{memory}").as_bytes());
    let mut server = Server::start_at(&place, "--listen 127.0.0.1:0");
    assert_eq!(status(&place)["state"], "idle");
    let scrub = "[scrub]\nevery = \"7d\"\nrate = \"50MiB/s\"\npause_when_busy = true\n";
    place.write("sealblock.toml", format!("{scrub}{subsystems}{memory}").as_bytes());
    server.signal("HUP");
    let events: Vec<_> = (0..3).map(|_| server.event()).collect();
    let has = |name: &str| events.iter().any(|event| event["event"] == name);
    assert!(has("reloaded") && has("scrub_started") && has("scrub_finished"), "{events:?}");
    let waiting = status(&place);
    assert_eq!((&waiting["state"], &waiting["every_s"]), (&"waiting".into(), &604_800.into()));
    let next = waiting["completed_unix_s"].as_u64().unwrap() + 604_800;
    assert_eq!((&waiting["next_unix_s"], &waiting["rate"]), (&next.into(), &(50 * MIB).into()));
    let other = place.run("scrub status mem:1MiB --json").succeeds().json();
    assert_eq!((&other["state"], &other["saved"]), (&"idle".into(), &"in_memory".into()));
    assert!(other["saved_why"].as_str().unwrap().contains("lost when the server exits"));
    server.stop().is_clean();

    let server = Server::start(&place, "v --scrub-every 7d");
    let again = status(&place);
    assert_eq!((&again["state"], &again["next_unix_s"]), (&"waiting".into(), &next.into()), "not due yet");
    server.stop().is_clean();
    let server = Server::start(&place, "v --read-only");
    let read_only = status(&place);
    assert_eq!(read_only["saved"], "in_memory");
    assert!(read_only["saved_why"].as_str().unwrap().contains("read-only"));
    server.stop().is_clean();
}

#[test]
fn a_state_that_is_damaged_is_begun_anew_and_one_of_a_later_version_is_left_alone() {
    let place = Place::new();
    place.run("create v --size 1MiB").succeeds();
    let mut server = Server::start(&place, "v");
    place.run("scrub start v").succeeds();
    while server.event()["event"] != "scrub_finished" {}
    server.stop().is_clean();
    // The reserved area has a checksum; damage there is damage of the volume, and no state is saved then.
    let tail = std::fs::metadata(place.path("v")).unwrap().len() - (64 << 10);
    for copy in [24 << 10, 56 << 10, tail + (20 << 10), tail + (48 << 10)] {
        place.poke("v", copy + 70, b"damage");
    }
    assert_eq!(place.run("scrub status v --json").ends_with(4).json()["runs"], Value::Array(Vec::new()));
    let server = Server::start(&place, "v");
    assert_eq!(place.run("scrub status v --json").ends_with(4).json()["saved"], "on_disk");
    place.run("scrub start v --wait").succeeds();
    assert_eq!(status(&place)["damage"]["complete"], true, "all is known that is to be known");
    server.stop().is_clean();
}

#[test]
fn a_scrub_of_before_the_target_grew_was_none_of_all_its_blocks() {
    let place = Place::new();
    place.volume("--size 1MiB", &noise(2, 1 << 20));
    let server = Server::start(&place, "v");
    place.run("scrub start v --wait").succeeds().says(&["last full scrub"]);
    place.run("status v").succeeds().says(&["healthy: no damage is known; a scrub checked all blocks"]);
    place.run("resize v --size 2MiB").succeeds();
    let grown = place.run("scrub status v");
    grown.succeeds().says(&["never fully scrubbed since it grew", "finished"]);
    assert!(!grown.text().contains("last full scrub"), "{}", grown.text());
    assert!(status(&place)["completed_unix_s"].is_null());
    place.run("status v").succeeds().says(&["no damage is known; no scrub has checked all blocks yet"]);
    server.stop().is_clean();
    place.run("scrub status v").succeeds().says(&["never fully scrubbed since it grew"]);
    // The same of a volume that grows while no server has it.
    let again = Server::start(&place, "v");
    place.run("scrub start v --wait").succeeds().says(&["last full scrub"]);
    again.stop().is_clean();
    place.run("resize v --size 3MiB").succeeds();
    place.run("scrub status v").succeeds().says(&["never fully scrubbed since it grew"]);
    let again = Server::start(&place, "v");
    place.run("status v").succeeds().says(&["no scrub has checked all blocks yet"]);
    place.run("scrub start v --wait").succeeds().says(&["last full scrub"]);
    again.stop().is_clean();
    place.run("scrub status v").succeeds().says(&["last full scrub"]);
}
