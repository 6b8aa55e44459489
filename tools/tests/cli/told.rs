//! What a server logs on standard error.

use std::fs;

use crate::common::server::{Nbd, Server};
use crate::common::{Place, filled, noise, until};
use serde_json::{Value, json};

/// That a connection is closed is known at once; that a machine is slow is not to be taken for a loss.
const LONG: &str = "timeout=60s&keepalive=60s";
const HOST: &str = "nqn.2026-01.org.example:host";

fn nbd_address(server: &Server) -> String {
    server.ready["nbd"]["listeners"][0].as_str().unwrap().to_owned()
}

/// A server of a volume of which blocks 5 and 6 are damaged.
fn damaged(place: &Place, options: &str) -> Server {
    place.volume("--size 1MiB", &noise(1, 1 << 20));
    for lba in [5, 6] {
        place.run(&format!("corrupt v --lba {lba} --kind data")).succeeds();
    }
    Server::start(place, &format!("v --nbd 127.0.0.1:0 {options}"))
}

#[test]
fn damage_is_told_once_to_each_who_meets_it() {
    let place = Place::new();
    let mut server = damaged(&place, "");
    let v = format!("{}?hostnqn={HOST}", server.target("v"));
    for _ in 0..3 {
        place.run(&format!("copy {v} out")).fails(3, &["block 5"]);
    }
    let mut client = Nbd::open(&nbd_address(&server), "v").unwrap();
    for lba in [5, 6, 5] {
        assert_eq!(client.read(lba * 4096, 4096).unwrap(), Err(5), "EIO");
    }
    place.run("scrub start v").succeeds();
    assert_eq!(server.event()["event"], "scrub_started");
    assert_eq!(server.event()["event"], "scrub_finished");
    place.run("status v").ends_with(1).says(&["2 blocks are bad (5..6)"]);
    drop(client);
    let ended = server.stop();
    let found = ended.is_clean().told_of("damage found");
    let of = |by: &str| -> Vec<&Value> { found.iter().filter(|line| line["by"] == by).collect() };
    let by_host = of(&format!("the host {HOST}"));
    assert_eq!(by_host.len(), 1, "{}", ended.stderr);
    assert_eq!(
        (&by_host[0]["target"], &by_host[0]["blocks"], &by_host[0]["field"]),
        (&json!("v"), &json!("5..6"), &json!("guard"))
    );
    assert_eq!((&by_host[0]["level"], &by_host[0]["during"]), (&json!("warn"), &json!("read")));
    // This client asks for one block after the other.
    let by_client: Vec<_> = of("an NBD client of v").iter().map(|line| line["blocks"].clone()).collect();
    assert_eq!(by_client, ["5", "6"], "{}", ended.stderr);
    assert_eq!(found.len(), 3, "{}", ended.stderr);
    let by_scrub =
        ended.told().into_iter().filter(|line| line["message"].as_str().unwrap().starts_with("scrub of v")).count();
    assert_eq!(by_scrub, 1, "{}", ended.stderr);
}

#[test]
fn who_is_refused_is_told_and_who_comes_and_goes_on_request() {
    let place = Place::new();
    for log in ["warn", "info"] {
        let server = Server::start(&place, &format!("mem:1MiB --allow-host {HOST} --log {log}"));
        let mem = server.target("mem");
        place.run(&format!("info {mem}?hostnqn={HOST}")).succeeds();
        place.run(&format!("info {mem}?hostnqn=nqn.2026-01.org.example:other")).ends_with(3);
        place.run(&format!("info {}?hostnqn={HOST}", server.target("nothing"))).fails(3, &["no such subsystem"]);
        let ended = server.stop();
        let refused = ended.is_clean().told_of("host refused: not allowed to connect to this subsystem");
        assert_eq!(refused.len(), 1, "{}", ended.stderr);
        assert_eq!(refused[0]["host"], "nqn.2026-01.org.example:other");
        assert!(refused[0]["from"].as_str().unwrap().starts_with("127.0.0.1:"), "{}", ended.stderr);
        let unknown = ended.told_of("host refused: no such subsystem");
        assert_eq!(unknown.len(), 1, "{}", ended.stderr);
        assert_eq!(unknown[0]["subsystem"], "nqn.2026-11.io.sealblock:nothing");
        for message in ["host connected", "host disconnected"] {
            let told = ended.told_of(message);
            assert_eq!(told.len(), usize::from(log == "info"), "{message}: {}", ended.stderr);
        }
    }
}

#[test]
fn an_export_that_is_not_there_is_told_with_its_name() {
    let place = Place::new();
    let server = Server::start(&place, "mem:1MiB --nbd 127.0.0.1:0");
    assert!(Nbd::open(&nbd_address(&server), "nothing").is_none());
    let ended = server.stop();
    let told = ended.is_clean().told_of("NBD client refused: no such export");
    assert_eq!(told.len(), 1, "{}", ended.stderr);
    assert_eq!(told[0]["export"], "nothing");
}

#[test]
fn a_client_that_vanishes_is_told_with_what_it_had_in_flight_in_one_line() {
    const LOST: &str =
        "NBD client lost: it did not disconnect, and none of its requests in flight is executed after newer changes";
    const CLOSED: &str = "NBD client closed its connection without disconnecting; no request was in flight";
    let place = Place::new();
    let server = Server::start(&place, "fault:[delay=500ms@0..9],mem:1MiB --nbd 127.0.0.1:0 --log info");
    let address = nbd_address(&server);
    let export = server.ready["nbd"]["exports"][0].as_str().unwrap().to_owned();
    let status = format!("status {}", server.pid());
    let has_clients = |clients: usize| {
        let json = place.run(&format!("{status} --json")).json();
        json["servers"][0]["clients"].as_array().map(Vec::len) == Some(clients)
    };
    let open = || {
        let client = Nbd::open(&address, &export).unwrap();
        until(|| has_clients(1));
        (client.local_address(), client)
    };
    let (polite_address, polite) = open();
    polite.disconnect();
    until(|| has_clients(0));
    let (closed_address, mut closed) = open();
    assert!(closed.read(20 * 4096, 4096).unwrap().is_ok());
    drop(closed);
    until(|| has_clients(0));
    let (lost_address, mut lost) = open();
    lost.begin_reads(&[0, 4096, 8192], 4096);
    drop(lost);
    until(|| has_clients(0));
    // Of these, `status` shows the one that an operator should know of.
    place.run(&status).says(&["NBD client lost", "in_flight=3", &lost_address]);
    let ended = server.stop();
    for (message, from) in
        [("NBD client disconnected", &polite_address), (CLOSED, &closed_address), (LOST, &lost_address)]
    {
        let told = ended.is_clean().told_of(message);
        assert_eq!(told.len(), 1, "{message}: {}", ended.stderr);
        assert_eq!((&told[0]["from"], &told[0]["export"]), (&json!(from), &json!(export)), "{}", ended.stderr);
    }
    let lost = &ended.told_of(LOST)[0];
    assert_eq!((&lost["level"], &lost["in_flight"]), (&json!("warn"), &json!(3)), "{lost}");
}

#[test]
fn a_file_that_is_deleted_or_cut_off_under_the_server_is_told_once() {
    let place = Place::new();
    place.volume("--size 1MiB", &noise(1, 1 << 20));
    let server = Server::start(&place, "v");
    let status = format!("status {}", server.pid());
    place.run(&status).succeeds();
    let hidden = place.path("hidden");
    fs::rename(place.path("v"), &hidden).unwrap();
    until(|| place.run(&status).status == 4);
    place.run(&status).says(&["v was deleted or renamed while in use", "copy the data elsewhere"]);
    fs::rename(&hidden, place.path("v")).unwrap();
    until(|| place.run(&status).status == 0);
    // Its third superblock is there, and nothing was asked of it.
    let length = fs::metadata(place.path("v")).unwrap().len();
    fs::OpenOptions::new().write(true).open(place.path("v")).unwrap().set_len(length - 4096).unwrap();
    until(|| place.run(&status).status == 1);
    let trouble =
        &place.run(&format!("{status} --json")).ends_with(1).json()["servers"][0]["devices"][0]["file_errors"][0];
    assert_eq!((&trouble["error"], &trouble["length_bytes"]), (&json!("cut_off"), &json!(length)));
    fs::OpenOptions::new().write(true).open(place.path("v")).unwrap().set_len(length).unwrap();
    // What was cut off is not back with the length.
    place.run(&status).ends_with(1);
    let ended = server.stop();
    for (message, level, times) in [
        ("the file in use was deleted or renamed", "error", 1),
        ("the file in use was truncated", "error", 1),
        ("the file is back", "warn", 1),
    ] {
        let told = ended.told_of(message);
        assert_eq!(told.len(), times, "{message}: {}", ended.stderr);
        assert!(told[0]["level"] == level && told[0]["file"].as_str().unwrap().ends_with('v'), "{}", ended.stderr);
    }
    // Nothing is written behind the cut until the file is opened anew.
    let unwritten = ended.told_of("cannot write the third copy of the superblock").len();
    assert!(unwritten > 0 && ended.told().len() == 3 + unwritten, "{}", ended.stderr);
    let lost = place.run("verify v");
    assert!(lost.ends_with(4).stderr.contains("the superblock of v at byte"), "{}", lost.stderr);
    place.run("verify v --repair").succeeds();
    place.run("verify v").succeeds();
}

#[test]
fn a_lost_replica_is_logged_once_and_so_is_its_return() {
    let place = Place::new();
    filled(&place, 64);
    let member = Server::start(&place, "--protection shown --as-member b");
    let (address, b) = (member.address().to_owned(), member.target("b"));
    let server = Server::start(&place, &format!("mirror:a,{b}?{LONG}"));
    let (status, target) = (format!("status {}", server.pid()), server.target("mirror"));
    member.kill();
    place.write("piece", &noise(2, 4096));
    place.run(&format!("copy piece offset:5..5,{target}")).succeeds();
    until(|| place.run(&status).status == 4);
    let member = Server::start_at(&place, &format!("--listen {address} --protection shown --as-member b"));
    until(|| place.run(&status).status == 0);
    let ended = server.stop();
    member.stop().is_clean();
    for message in ["replica failed, mirror degraded", "connection lost", "is optimal again: all members are in sync"] {
        let told: Vec<_> = ended.stderr.lines().filter(|line| line.contains(message)).collect();
        assert_eq!(told.len(), 1, "{message}: {}", ended.stderr);
    }
}

#[test]
fn paths_that_are_lost_are_told_once_and_so_is_their_return_even_if_nobody_uses_them() {
    let place = Place::new();
    place.volume("--size 1MiB", &noise(1, 1 << 20));
    let far = Server::start(&place, "v");
    let (address, v) = (far.address().to_owned(), format!("{}?{LONG}", far.target("v")));
    let server = Server::start(&place, &format!("multipath:{v},{v}"));
    let (status, target) = (format!("status {}", server.pid()), server.target("multipath"));
    until(|| place.run(&status).status == 0);
    far.kill();
    until(|| place.run(&status).status == 4);
    let far = Server::start_at(&place, &format!("v --listen {address}"));
    until(|| place.run(&status).status == 0);
    place.run(&format!("copy {target} out")).succeeds();
    let ended = server.stop();
    far.stop().is_clean();
    for message in ["path failed", "path restored"] {
        let told: Vec<_> = ended.stderr.lines().filter(|line| line.contains(message)).collect();
        assert_eq!(told.len(), 2, "{message}: {}", ended.stderr);
    }
}

#[test]
fn what_fails_is_there_for_debugging() {
    let place = Place::new();
    let server = damaged(&place, "--log debug");
    place.run(&format!("copy {} out", server.target("v"))).fails(3, &["block 5"]);
    let ended = server.stop();
    let failed = ended.is_clean().told_of("command failed");
    assert!(failed.iter().any(|line| line["lba"] == 5 && line["opcode"] == 2), "{}", ended.stderr);
}

#[test]
fn a_server_that_does_not_start_says_why_on_one_line() {
    let place = Place::new();
    let refused = place.run("serve nothing --json").ends_with(3).stderr.clone();
    assert_eq!(refused.lines().count(), 1, "{refused}");
    let line: Value = serde_json::from_str(&refused).unwrap();
    assert_eq!(line["level"], "error");
    assert!(line["message"].as_str().unwrap().contains("nothing") && line["try"].is_string(), "{refused}");
    // For people, on two.
    place.run("serve nothing").fails(3, &["sealblock: ", "\ntry: "]);
}
