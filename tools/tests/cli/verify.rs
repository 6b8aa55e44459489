//! What `verify` and its neighbours say when not everything could be checked: `clean`, and exit status 0, are for what was.

use std::time::{Duration, Instant};

use crate::common::server::Server;
use crate::common::{Place, noise};
use serde_json::Value;

const BLOCKS: usize = 512;
const LAST: u64 = BLOCKS as u64 - 1;

/// Two volumes that a mirror has filled.
fn mirrored(place: &Place) {
    for name in ["a", "b"] {
        place.run(&format!("create {name} --size {}", BLOCKS * 4096)).succeeds();
    }
    place.write("data", &noise(1, BLOCKS * 4096));
    place.run("copy data mirror:a,b").succeeds();
}

fn rename(place: &Place, from: &str, to: &str) {
    std::fs::rename(place.path(from), place.path(to)).unwrap();
}

/// Whose copy of which blocks was not checked.
fn unchecked(report: &Value) -> Vec<(Option<&str>, u64, u64)> {
    let runs = report["unchecked"].as_array().unwrap().iter();
    runs.map(|run| (run["member"].as_str(), run["first"].as_u64().unwrap(), run["last"].as_u64().unwrap())).collect()
}

#[test]
fn a_mirror_without_a_member_is_incomplete_and_damage_counts_more() {
    let place = Place::with_runtime("syscalls");
    mirrored(&place);
    let clean = place.run("verify mirror:a,b");
    clean.succeeds().says(&[": clean"]);
    let report = place.run("verify mirror:a,b --json").succeeds().json();
    assert_eq!((unchecked(&report), report["checked"].as_str()), (vec![], Some("seals")));
    place.run("mirror status mirror:a,b").succeeds().says(&["optimal"]);

    rename(&place, "b", "b.away");
    let text = place.run("verify mirror:a,b");
    text.ends_with(4).says(&["blocks 0 to 511 on b: not checked: the member is offline", ": incomplete"]);
    assert!(!text.text().contains("clean"), "{}", text.text());
    let report = place.run("verify mirror:a,b --json").ends_with(4).json();
    assert_eq!(unchecked(&report), [(Some("b"), 0, LAST)]);
    let range = place.run("verify mirror:a,b --range 7..9 --json").ends_with(4).json();
    assert_eq!(unchecked(&range), [(Some("b"), 7, 9)]);
    assert!(place.run("verify mirror:a,b --quiet").ends_with(4).text().contains("incomplete"));
    place.run("mirror status mirror:a,b").ends_with(4).says(&["degraded"]);
    assert_eq!(place.run("mirror status mirror:a,b --json").ends_with(4).json()["state"], "degraded");
    place.run("info mirror:a,b").ends_with(4).says(&["degraded"]);

    place.run("corrupt a --lba 3 --kind data").succeeds();
    let report = place.run("verify mirror:a,b --json").ends_with(1).json();
    assert_eq!((unchecked(&report), report["errors"][0]["member"].as_str()), (vec![(Some("b"), 0, LAST)], Some("a")));
    place.run("verify mirror:a,b").ends_with(1).says(&["1 damaged, incomplete"]);
    place.run("verify mirror:a,b --repair").ends_with(1);
}

#[test]
fn a_member_that_is_out_of_sync_is_resynced_before_a_repair() {
    let place = Place::with_runtime("syscalls");
    mirrored(&place);
    rename(&place, "b", "b.away");
    place.write("piece", &noise(2, 100 * 4096));
    place.run("copy piece offset:100..199,mirror:a,b").ends_with(4);
    rename(&place, "b.away", "b");
    let report = place.run("verify mirror:a,b --json").ends_with(4).json();
    assert_eq!(unchecked(&report), [(Some("b"), 0, LAST)]);
    assert_eq!(report["unchecked"][0]["why"], "the member is out of sync");
    place.run("corrupt a --lba 300 --kind data").succeeds();
    let repaired = place.run("verify mirror:a,b --repair --json").ends_with(1).json();
    assert_eq!((unchecked(&repaired), repaired["errors"].as_array().unwrap().len()), (vec![], 1));
    assert_eq!(repaired["errors"][0]["repaired"], true);
    place.run("verify mirror:a,b").succeeds().says(&[": clean"]);
    place.run("mirror status mirror:a,b").succeeds();
    place.run("compare a b").succeeds();
}

#[test]
fn what_a_kill_has_left_unsettled_is_incomplete_until_it_is_settled() {
    let place = Place::new();
    mirrored(&place);
    let server = Server::start(&place, "mirror:a,b");
    place.write("piece", &noise(3, 64 * 4096));
    place.run(&format!("copy piece offset:0..63,{}", server.target("mirror"))).succeeds();
    server.kill();
    let report = place.run("verify mirror:a,b --json").ends_with(4).json();
    assert_eq!(unchecked(&report)[0].0, None, "no member is at fault");
    assert_eq!(report["unchecked"][0]["why"], "a crash may have left the copies different");
    place.run("mirror status mirror:a,b").ends_with(4);
    place.run("verify mirror:a,b --repair").succeeds();
    place.run("verify mirror:a,b").succeeds().says(&[": clean"]);
}

#[test]
fn blocks_without_seals_are_readable_and_never_clean() {
    let place = Place::new();
    place.run("create v --size 1MiB").succeeds();
    place.run("create n --size 1MiB --guard none").succeeds();
    for target in ["mem:1MiB", "null:1MiB", "stripe:mem:1MiB,mem:1MiB", "offset:1..9,mem:1MiB"] {
        let text = place.run(&format!("verify {target}"));
        text.succeeds().says(&["readable; not every block has a seal"]);
        assert!(!text.text().contains("clean"), "{}", text.text());
        assert_eq!(place.run(&format!("verify {target} --json")).succeeds().json()["checked"], "readability");
    }
    // A volume without protection information has a checksum of each block all the same.
    place.run("verify n").succeeds().says(&[": clean"]);
    let server = Server::start(&place, "v mem:1MiB n");
    for (name, checked) in [("v", "seals"), ("mem", "readability"), ("n", "seals")] {
        let target = server.target(name);
        let report = place.run(&format!("verify {target} --json")).succeeds().json();
        assert_eq!((report["checked"].as_str(), &report["offloaded"]), (Some(checked), &true.into()), "{name}");
        let read = place.run(&format!("verify {target} --mode emulate --json")).succeeds().json();
        assert_eq!(read["checked"].as_str(), Some(checked), "{name}, read");
    }
    server.stop().is_clean();
}

#[test]
fn a_check_by_reading_looks_at_one_of_the_copies() {
    let place = Place::new();
    mirrored(&place);
    let here = place.run("verify mirror:a,b --mode emulate --json").ends_with(4).json();
    assert_eq!(here["unchecked"][0]["why"], "only one of the copies was read");
    let server = Server::start(&place, "mirror:a,b");
    let target = server.target("mirror");
    assert_eq!(place.run(&format!("verify {target} --json")).succeeds().json()["checked"], "seals");
    let read = place.run(&format!("verify {target} --mode emulate --json")).ends_with(4).json();
    assert_eq!(read["unchecked"][0]["why"], "only one of the copies was read");
    server.stop().is_clean();
}

#[test]
fn a_served_mirror_tells_hosts_its_log_and_its_scrub_what_it_cannot_check() {
    let place = Place::new();
    mirrored(&place);
    rename(&place, "b", "b.away");
    let server = Server::start(&place, "mirror:a,b");
    let target = server.target("mirror");
    let report = place.run(&format!("verify {target} --json")).ends_with(4).json();
    assert_eq!(unchecked(&report), [(None, 0, LAST)]);
    assert_eq!(report["unchecked"][0]["why"], "the member is offline");
    place.run("scrub start mirror:a,b").succeeds();
    let until = Instant::now() + Duration::from_secs(60);
    let status = loop {
        let answer = place.run("scrub status mirror:a,b --json");
        let status = answer.json();
        if status["state"] == "idle" {
            answer.ends_with(4);
            break status;
        }
        assert!(Instant::now() < until, "{status}");
        std::thread::sleep(Duration::from_millis(20));
    };
    assert_eq!((&status["runs"][0]["result"], &status["runs"][0]["unchecked"]), (&"incomplete".into(), &512.into()));
    assert_eq!(status["checked"], "seals");
    place.run("scrub status mirror:a,b").ends_with(4).says(&["incomplete", "512 with unchecked copies"]);

    // It comes back: the server brings it up to date, and says when all is well.
    rename(&place, "b.away", "b");
    while place.run(&format!("verify {target}")).status != 0 {
        assert!(Instant::now() < until, "the member does not come back");
        std::thread::sleep(Duration::from_millis(100));
    }
    place.run("mirror status mirror:a,b").succeeds().says(&["optimal"]);
    let stderr = server.stop().stderr;
    assert!(stderr.contains("mirror:a,b is degraded: b is out of sync"), "{stderr}");
    assert!(stderr.contains("mirror:a,b is optimal again"), "{stderr}");
    // What was kept of the scrub says so, too.
    place.run("scrub status a").ends_with(4);
}

#[test]
fn a_host_may_choose_the_reference_tags_of_type_2_and_a_spoilt_one_is_damage() {
    for kind in [2, 3] {
        let place = Place::new();
        place.run(&format!("create v --size 1MiB --type {kind} --guard crc64")).succeeds();
        place.write("data", &noise(4, 1 << 20));
        place.run("copy data v").succeeds();
        place.run("verify v").succeeds().says(&[": clean"]);
        place.run("corrupt v --lba 9 --kind ref-tag").succeeds();
        let report = place.run("verify v --json").ends_with(1).json();
        assert_eq!((&report["errors"][0]["lba"], &report["errors"][0]["field"]), (&9.into(), &"ref_tag".into()));
    }
}

#[test]
fn several_targets_have_an_object_each_and_the_worst_exit_status() {
    let place = Place::new();
    for name in ["a", "b", "c"] {
        place.run(&format!("create {name} --size 1MiB")).succeeds();
    }
    place.write("data", &noise(4, 1 << 20));
    place.run("copy data b").succeeds();
    let objects = |answer: &crate::common::Answer| -> std::collections::BTreeMap<String, Value> {
        let each = answer.text().lines().map(|line| serde_json::from_str::<Value>(line).unwrap()).collect::<Vec<_>>();
        each.into_iter().map(|object| (object["target"].as_str().unwrap().to_owned(), object)).collect()
    };
    let clean = objects(place.run("verify a b c --json").succeeds());
    assert_eq!(clean.keys().collect::<Vec<_>>(), ["a", "b", "c"]);
    assert!(clean.values().all(|object| object["blocks_verified"] == 256 && object["errors"] == serde_json::json!([])));

    // What is not there, and what is incomplete or damaged beside it.
    let away = place.run("verify a away c --json");
    let report = objects(away.ends_with(3));
    assert_eq!(report["away"].as_object().unwrap().len(), 2);
    assert!(report["away"]["error"].as_str().unwrap().contains("cannot open"), "{report:?}");
    assert!(away.stderr.contains("sealblock: ") && away.stderr.contains("away"), "{}", away.stderr);
    place.run("corrupt b --lba 7 --kind data").succeeds();
    assert_eq!(objects(place.run("verify a b away --json").ends_with(1))["b"]["errors"][0]["lba"], 7);
    let text = place.run("verify b a");
    text.ends_with(1).says(&["b: block 7: guard: expected 0x", "b: 256 blocks verified", ": 1 damaged\n"]);
    assert!(text.text().contains("a: 256 blocks verified"), "{}", text.text());
    // A range past the end of one of them is bad usage, and the others are verified all the same.
    place.run("create long --size 2MiB").succeeds();
    let past = place.run("verify a long --range 300..400");
    past.fails(2, &["block 300 is past the end"]).says(&["long: 101 blocks verified"]);
    place.run("verify a b --quiet").ends_with(1);
    assert_eq!(place.run("verify a c --quiet").succeeds().text(), "");
    place.run("verify a c --repair --accept-stale a").fails(2, &["single target"]);
}

#[test]
fn an_idle_verify_checks_everything_and_is_refused_where_load_is_not_known() {
    let place = Place::new();
    place.run("create v --size 1MiB").succeeds();
    place.write("data", &noise(4, 1 << 20));
    place.run("copy data v").succeeds();
    place.run("corrupt v --lba 200 --kind data").succeeds();
    let answer = place.run("verify v --idle --json");
    if answer.status == 3 {
        answer.fails(3, &["--idle cannot determine how busy it is"]);
        crate::common::skipped("the file system of this folder lies on no block device");
    } else {
        let report = answer.ends_with(1).json();
        assert_eq!((&report["blocks_verified"], &report["errors"][0]["lba"]), (&256.into(), &200.into()));
    }
    for target in ["mem:1MiB", "stripe:mem:1MiB,mem:1MiB"] {
        place
            .run(&format!("verify {target} --idle"))
            .fails(3, &["--idle cannot determine how busy it is", "try: use --rate"]);
    }
}
