//! Blocks that every in-sync replica has lost: the copies of a replica that was offline.

use crate::common::devices::Loop;
use crate::common::server::Server;
use crate::common::{Place, noise, until};
use serde_json::Value;

const BLOCK: usize = 4096;

/// `b` was away while block 1 was written; block 5 beside it is rotten on `a` since. Both are there again, and alike as far as
/// they can be.
fn beside_damage(guard: &str) -> (Place, Vec<u8>) {
    let place = Place::with_runtime("syscalls");
    let data = noise(3, 256 * BLOCK);
    place.write("data", &data);
    for name in ["a", "b"] {
        place.run(&format!("create {name} --size 1MiB --guard {guard}")).succeeds();
    }
    place.run("copy data mirror:a,b").succeeds();
    std::fs::rename(place.path("b"), place.path("b.away")).unwrap();
    place.run("zero mirror:a,b --range 1..1").ends_with(4);
    place.run("corrupt a --lba 5 --kind data").succeeds();
    std::fs::rename(place.path("b.away"), place.path("b")).unwrap();
    let server = Server::start(&place, "mirror:a,b");
    until_current(&place);
    server.stop().is_clean();
    (place, data)
}

/// Waits until both replicas are in sync.
fn until_current(place: &Place) {
    let is_current = |status: &Value| {
        let replicas = status["replicas"].as_array().unwrap();
        replicas.iter().all(|replica| replica["state"] == "in_sync")
    };
    until(|| is_current(&status(place)));
}

fn status(place: &Place) -> Value {
    serde_json::from_str(&place.run("mirror status mirror:a,b --json").text()).unwrap()
}

/// Block, field, and replica.
fn errors(report: &Value) -> Vec<(u64, String, String)> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let errors = report["errors"].as_array().unwrap().iter();
    errors.map(|error| (error["lba"].as_u64().unwrap(), text(&error["field"]), text(&error["member"]))).collect()
}

#[test]
fn a_copy_that_the_stored_guard_proves_current_repairs_the_replica_that_lost_it() {
    for guard in ["crc32c", "crc64"] {
        let (place, data) = beside_damage(guard);
        let report = place.run("verify mirror:a,b --repair --json").succeeds().json();
        assert_eq!(errors(&report), []);
        for replica in ["a", "b"] {
            assert!(place.blocks(replica, 5, 5) == data[5 * BLOCK..6 * BLOCK], "{guard}: {replica}");
            assert!(place.blocks(replica, 1, 1) == [0; BLOCK], "{guard}: {replica}");
        }
    }
}

#[test]
fn an_older_copy_is_kept_reported_with_its_place_and_taken_only_on_demand() {
    let expected = [(5, "guard".to_owned(), "a".to_owned()), (5, "stale".to_owned(), "b".to_owned())];
    for served in [false, true] {
        let (place, data) = beside_damage("crc16");
        for verify in ["verify mirror:a,b --json", "verify mirror:a,b --repair --json"] {
            assert_eq!(errors(&place.run(verify).ends_with(1).json()), expected);
        }
        place.run("verify mirror:a,b").ends_with(1).says(&["an older copy is kept here"]);
        assert_ne!(place.run("copy offset:5..5,mirror:a,b out").status, 0, "no older content is read");
        assert_eq!(status(&place)["replicas"][1]["stale_blocks"], 1);
        let whole = place.blocks("b", 5, 5);
        assert!(whole == data[5 * BLOCK..6 * BLOCK], "nothing was destroyed");
        if served {
            let server = Server::start(&place, "mirror:a,b");
            place.run("mirror accept-stale mirror:a,b b").succeeds().says(&["1 of 1"]);
            server.stop().is_clean();
        } else {
            place.run("verify mirror:a,b --repair --accept-stale b").succeeds();
        }
        assert_eq!(errors(&place.run("verify mirror:a,b --json").succeeds().json()), []);
        for replica in ["a", "b"] {
            assert!(place.blocks(replica, 5, 5) == whole, "{replica}");
        }
    }
}

#[test]
fn older_copies_are_accepted_only_from_replicas_of_a_mirror() {
    let (place, _) = beside_damage("crc16");
    place.run("verify mirror:a,b --accept-stale b").fails(2, &["--repair"]);
    place.run("verify a --repair --accept-stale a").fails(2, &["not a mirror"]);
    place.run("mirror accept-stale mirror:a,b c").fails(2, &["no replica c"]);
}

#[test]
fn a_replica_whose_label_is_lost_may_be_older_for_readers_too() {
    let place = Place::with_runtime("syscalls");
    let (old, new) = (noise(1, 256 * BLOCK), noise(2, 256 * BLOCK));
    for (name, data) in [("b", &old), ("a", &new)] {
        place.run(&format!("create {name} --size 1MiB")).succeeds();
        place.write("data", data);
        place.run(&format!("copy data {name}")).succeeds();
    }
    place.run("mirror create a b --from a --force --no-wait").ends_with(0);
    place.run("copy b out").ends_with(4);
    // The label's places behind the first two superblocks, and before the third.
    let end = place.len("b");
    for (offset, length) in [(4 << 10, 24 << 10), (36 << 10, 24 << 10), (end - (64 << 10), 56 << 10)] {
        place.poke("b", offset, &vec![0; length]);
    }
    for command in ["copy b out", "compare b data", "verify b", "info b"] {
        let told = place.run(command);
        assert!([1, 4].contains(&told.status), "{command}: {}{}", told.text(), told.stderr);
    }
    place.run("info b").ends_with(4).says(&["every copy of the label of a replica or member is lost"]);
    place.run("zero b --range 1").fails(3, &["every copy of the label of a group is lost"]);
}

/// A replica that is out of sync and one that is in sync, each served by itself: every command says the same.
#[test]
fn all_commands_agree_on_whether_a_served_replica_may_be_older() {
    let place = Place::with_runtime("syscalls");
    place.write("data", &noise(2, 256 * BLOCK));
    for name in ["a", "b"] {
        place.run(&format!("create {name} --size 1MiB")).succeeds();
    }
    place.run("copy data a").succeeds();
    place.run("mirror create a b --from a --no-wait").succeeds();
    let agree = |options: &str, older: bool| {
        let server = Server::start(&place, &format!("b --protection shown {options}"));
        let target = server.target("b");
        let status = if older { 4 } else { 0 };
        let told = |command: &str| {
            let told = place.run(command);
            assert_eq!(told.status, status, "{options}: {command}: {}{}", told.text(), told.stderr);
            let says = format!("{}{}", told.text(), told.stderr).contains("it is a replica that is out of sync");
            assert!(
                says == older || command.contains("--json"),
                "{options}: {command}: {}{}",
                told.text(),
                told.stderr
            );
            told
        };
        for command in [&*format!("info {target}"), &format!("copy {target} out"), "scrub status b", "status"] {
            told(command);
        }
        assert_eq!(
            told("scrub status b --json").json()["may_be_older"],
            if older { "out_of_sync".into() } else { Value::Null }
        );
        let scrubbed = told("scrub start b --wait");
        assert!(!older || !scrubbed.text().contains("clean"), "{}", scrubbed.text());
        assert_eq!(told("status --json").json()["servers"][0]["health"], if older { "incomplete" } else { "healthy" });
        server
    };
    for options in ["--as-member", "--force-member", "--read-only --accept-older"] {
        agree(options, true).stop().is_clean();
    }
    // Unserved, and after the mirror has resynced it.
    place.run("scrub status b").ends_with(4);
    let server = agree("--as-member", true);
    place.run(&format!("verify mirror:a,{} --repair", server.target("b"))).succeeds();
    place.run("scrub status b").succeeds();
    place.run("status").succeeds();
    server.stop().is_clean();
    agree("--as-member", false).stop().is_clean();
    agree("--read-only", false).stop().is_clean();
}

/// With --force a replica becomes the source of a mirror although its own label does not call its content current: that is said.
#[test]
fn a_replica_that_may_be_older_becomes_a_source_with_a_word() {
    const WORD: &str = "may be older than what was written: its label marked it as";
    for command in ["mirror add b n --force", "mirror create b n --from b --force"] {
        let place = Place::with_runtime("syscalls");
        place.write("data", &noise(2, 256 * BLOCK));
        for name in ["a", "b", "n"] {
            place.run(&format!("create {name} --size 1MiB")).succeeds();
        }
        place.run("copy data a").succeeds();
        place.run("mirror create a b --from a --no-wait").succeeds();
        place.run(command.trim_end_matches(" --force")).fails(3, &["b is replica ", "(resyncing) of mirror "]);
        let told = place.run(command);
        assert!(
            told.succeeds().stderr.contains(&format!("b {WORD} resyncing, as a replica of mirror ")),
            "{}",
            told.stderr
        );
        assert!(told.stderr.contains("counts as current"), "{}", told.stderr);
    }
    // Twins: the replica in sync, and one without a label.
    for (labelled, command) in [(true, "mirror create a n --from a --force"), (false, "mirror add a n --force")] {
        let place = Place::with_runtime("syscalls");
        place.write("data", &noise(2, 256 * BLOCK));
        for name in ["a", "b", "n"] {
            place.run(&format!("create {name} --size 1MiB")).succeeds();
        }
        place.run("copy data a").succeeds();
        if labelled {
            place.run("mirror create a b --from a --no-wait").succeeds();
        }
        let told = place.run(command);
        assert!(!told.succeeds().stderr.contains("may be older"), "{}", told.stderr);
    }
}

#[test]
fn paths_to_two_copies_of_a_volume_are_not_one_device() {
    let place = Place::with_runtime("syscalls");
    place.volume("--size 1MiB", &noise(1, 256 * BLOCK));
    std::fs::copy(place.path("v"), place.path("w")).unwrap();
    place.write("later", &noise(2, 256 * BLOCK));
    for command in ["copy later multipath:v,w", "verify multipath:v,w", "copy multipath:v,w out"] {
        place.run(command).fails(3, &["another device than the other paths"]);
    }
    for copy in ["v", "w"] {
        place.run(&format!("compare {copy} data")).succeeds();
    }
    std::fs::hard_link(place.path("v"), place.path("same")).unwrap();
    place.run("verify multipath:v,same").succeeds();
    // The same of block devices.
    let over = |file: &str| Loop::new(&place.path(file), &["--sector-size", "4096"]);
    let (Some(v), Some(same), Some(w)) = (over("v"), over("v"), over("w")) else { return };
    place.run(&format!("verify multipath:{},{}", v.0, w.0)).fails(3, &["another device than the other paths"]);
    place.run(&format!("verify multipath:{},{}", v.0, same.0)).succeeds();
}

#[test]
fn a_volume_whose_file_was_cut_off_under_its_server_takes_no_writes_there_until_it_is_opened_with_its_length() {
    let place = Place::with_runtime("syscalls");
    place.volume("--size 1MiB", &noise(1, 256 * BLOCK));
    let length = place.len("v");
    let server = Server::start(&place, "v");
    place.set_len("v", 1 << 19);
    place.write("later", &noise(2, 256 * BLOCK));
    let status = format!("status {}", server.pid());
    until(|| place.run(&status).status == 1);
    place.set_len("v", length);
    place.run(&format!("copy later {}", server.target("v"))).ends_with(3);
    drop(server.stop());
    // What is lost is told, and what is written from now on is there.
    place.run("verify v").ends_with(1);
    place.run("copy later v").succeeds();
    place.run("verify v --repair").succeeds();
    place.run("compare v later").succeeds();
}
