//! Every command against a server of our own, over NVMe/TCP.

use crate::common::server::Server;
use crate::common::{Place, answer_of, noise};
use serde_json::Value;

const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:f81d4fae-7dec-11d0-a765-00a0c91e6bf6";

fn bad_blocks(report: &Value) -> Vec<(u64, &str)> {
    let errors = report["errors"].as_array().unwrap().iter();
    errors.map(|error| (error["lba"].as_u64().unwrap(), error["field"].as_str().unwrap())).collect()
}

#[test]
fn subsystems_are_discovered() {
    let place = Place::new();
    let server = Server::start(&place, "mem:1MiB null:1MiB");
    let (host, port) = server.address().split_once(':').unwrap();
    let names = "nqn.2026-11.io.sealblock:mem\nnqn.2026-11.io.sealblock:null\n";
    assert_eq!(place.run(&format!("discover {}", server.address())).succeeds().text(), names);
    let report = place.run(&format!("discover {} --json", server.address())).succeeds().json();
    let entries = report["entries"].as_array().unwrap();
    assert_eq!(entries.len(), 3);
    let mem = entries.iter().find(|entry| entry["nqn"] == "nqn.2026-11.io.sealblock:mem").unwrap();
    assert_eq!((&mem["type"], &mem["transport"]), (&"nvm".into(), &"tcp".into()));
    assert_eq!((&mem["address"], mem["port"].to_string()), (&host.into(), port.to_owned()));
    let address = server.address().to_owned();
    server.stop().is_clean();
    place.run(&format!("discover {address}")).fails(3, &["cannot query", &address, "server is running"]);
    place.run("discover [::1").fails(2, &["not closed"]);
    place.run("discover localhost/x").fails(2, &["'/'"]);
}

#[test]
fn the_commands_work_on_a_namespace_that_is_away() {
    let place = Place::new();
    place.run("create v --size 16MiB --guard crc16").succeeds();
    let data = noise(7, 6 << 20);
    place.write("data", &data);
    let server = Server::start(&place, "v mem:16MiB");
    let (v, mem) = (server.target("v"), server.target("mem"));
    let info = place.run(&format!("info {v} --json")).succeeds().json();
    assert_eq!((&info["bytes"], &info["abilities"]["verify"]), (&(16 << 20).into(), &"native".into()));
    assert_eq!((&info["offloads"], &info["remote"]["nsid"]), (&true.into(), &1.into()));
    assert_eq!(info["remote"]["uuid"], server.ready["subsystems"][0]["namespaces"][0]["uuid"]);

    for options in ["", "?hdgst", "?ddgst&queues=3", "/1?hdgst&ddgst&depth=2"] {
        place.run(&format!("copy data {v}{options}")).succeeds();
        assert!(place.blocks(&format!("{v}{options}"), 0, 1535) == data, "{options}");
    }
    place.run(&format!("copy {v} {mem}")).succeeds();
    let equal = place.run(&format!("compare {v} {mem} --json")).succeeds().json();
    assert_eq!((&equal["equal"], &equal["bytes_transferred"]), (&true.into(), &0.into()));
    assert_eq!(equal["offloaded"], true);
    place.run(&format!("zero {mem} --range 100..199")).succeeds();
    let different = place.run(&format!("compare {v} {mem} --json")).ends_with(1).json();
    assert_eq!(different["differences"].to_string(), r#"[{"blocks":100,"lba":100}]"#);
    place.run(&format!("discard {mem} --yes")).succeeds();
    place.run(&format!("compare --zero {mem}")).succeeds();
    place.run(&format!("compare --zero {v}")).ends_with(1);
    let verified = place.run(&format!("verify {v} --json")).succeeds().json();
    assert_eq!((&verified["offloaded"], &verified["bytes_transferred"]), (&true.into(), &0.into()));
    server.stop().is_clean();
    place.run("verify v").succeeds();
    assert!(place.blocks("v", 0, 1535) == data);
}

#[test]
fn damage_is_found_by_the_server_and_by_the_client_alike() {
    let place = Place::new();
    place.volume("--size 16MiB", &noise(3, 16 << 20));
    let harm = [(0, "data", "guard"), (7, "guard", "guard"), (8, "ref-tag", "ref_tag"), (900, "app-tag", "app_tag")];
    for (lba, kind, _) in harm {
        place.run(&format!("corrupt v --lba {lba} --kind {kind}")).succeeds();
    }
    place.run("corrupt v --lba 4095 --kind lost-write").succeeds();
    let here = place.run("verify v --json").ends_with(1).json();
    let server = Server::start(&place, "v");
    let v = server.target("v");
    for mode in ["auto", "offload"] {
        let there = place.run(&format!("verify {v} --mode {mode} --json")).ends_with(1).json();
        assert_eq!(bad_blocks(&there), bad_blocks(&here));
        assert_eq!((&there["offloaded"], &there["bytes_transferred"]), (&true.into(), &0.into()));
    }
    let read = place.run(&format!("verify {v} --mode emulate --json")).ends_with(1).json();
    assert_eq!(bad_blocks(&read), bad_blocks(&here));
    assert_eq!(read["offloaded"], false);
    assert!(read["bytes_transferred"].as_u64().unwrap() > 8 << 20, "{}", read["bytes_transferred"]);
    let text = place.run(&format!("verify {v} --range 7..8"));
    text.ends_with(1).says(&["block 7: guard: ", "block 8: reference tag: ", "2 damaged"]);
    // Only what is damaged cannot be read.
    place.run(&format!("copy offset:8..8,{v} -")).fails(3, &["damaged"]);
    place.run(&format!("copy offset:9..899,{v} -")).succeeds();
    server.stop().is_clean();
}

#[test]
fn tags_that_are_shown_travel_or_stay() {
    let place = Place::new();
    let data = noise(5, 1 << 20);
    for guard in ["crc16", "crc32c", "crc64"] {
        place.run(&format!("create v --size 4MiB --guard {guard} --force")).succeeds();
        place.write("data", &data);
        let server = Server::start(&place, "v --protection shown");
        for (options, maker) in [("", "host"), ("?pract=0&ddgst", "host"), ("?pract=1", "target")] {
            let v = format!("{}{options}", server.target("v"));
            let info = place.run(&format!("info {v} --json")).succeeds().json();
            assert_eq!(info["remote"]["tags_made_by"], maker);
            place.run(&format!("copy data {v}")).succeeds();
            assert!(place.blocks(&v, 0, 255) == data, "{guard} {options}");
            place.run(&format!("verify {v}")).succeeds();
        }
        server.stop().is_clean();
        place.run("verify v").succeeds();
        assert!(place.blocks("v", 0, 255) == data);
    }
}

#[test]
fn nobody_there_is_told_at_once() {
    let place = Place::new();
    // The port of a server that is gone.
    let server = Server::start(&place, "mem:1MiB");
    let mem = server.target("mem");
    let other = mem.replace(":mem", ":other");
    place.run(&format!("info {other}")).fails(3, &["cannot connect to", &other, "sealblock discover"]);
    place.run(&format!("info {mem}/2")).fails(3, &["no namespace 2", "the active ones are 1"]);
    server.stop().is_clean();
    place.run(&format!("info {mem}")).fails(3, &["cannot connect to", &mem, "server is running"]);
    place.run("info nvme+tcp://127.0.0.1/nqn.x").fails(2, &["nqn.yyyy-mm"]);
    place.run("info nvme+tcp://127.0.0.1/nqn.2026-01.org.example:x?tls").fails(2, &["'tls' is no option", "hdgst"]);
}

#[test]
fn hosts_that_are_not_named_are_refused() {
    let place = Place::new();
    let server = Server::start(&place, &format!("mem:1MiB --allow-host {HOST}"));
    let mem = server.target("mem");
    place.run(&format!("info {mem}?hostnqn={HOST}")).succeeds();
    place.run(&format!("info {mem}?hostnqn=nqn.2026-01.org.example:other")).fails(3, &["refused", "hostnqn="]);
    let discover = format!("discover {}", server.address());
    assert_eq!(place.run(&format!("{discover} --host-nqn {HOST}")).succeeds().text(), "nqn.2026-11.io.sealblock:mem\n");
    let other = "--host-nqn nqn.2026-01.org.example:other";
    let nothing = place.run(&format!("{discover} {other}"));
    assert_eq!(nothing.succeeds().text(), "");
    assert!(nothing.stderr.contains("the server may restrict hosts"), "{}", nothing.stderr);
    server.stop().is_clean();
}

#[test]
fn what_is_read_only_takes_no_writes() {
    let place = Place::new();
    let data = noise(2, 1 << 20);
    place.volume("--size 1MiB", &data);
    let before = place.read("v");
    let server = Server::start(&place, "v mem:1MiB --read-only");
    for name in ["v", "mem"] {
        let target = server.target(name);
        for command in ["copy data", "zero --yes", "discard --yes"] {
            place.run(&format!("{command} {target}")).ends_with(3);
        }
        place.run(&format!("verify {target}")).succeeds();
    }
    assert!(place.blocks(&server.target("v"), 0, 255) == data);
    // Others may read beside it.
    place.run("verify v").succeeds();
    server.stop().is_clean();
    assert!(place.read("v") == before, "not a byte has changed");
}

#[test]
fn a_server_that_is_told_to_end_under_load_leaves_a_clean_volume() {
    let place = Place::new();
    place.run("create v --size 64MiB").succeeds();
    place.write("data", &noise(4, 64 << 20));
    let server = Server::start(&place, "v");
    let address = server.address().to_owned();
    let mut copy = place.start(&format!("copy data {}", server.target("v")));
    // Until something is on its way.
    place.wait_for_bytes("v", 24 << 20, &mut copy);
    server.signal("TERM");
    server.wait().is_clean();
    place.run("verify v").succeeds();
    assert_eq!(place.run("info v --json").json()["volume"]["clean"], true);
    // The copy may have come through before; else it goes on with the next server, which cannot vouch for what the one before
    // had not flushed.
    let again = Server::start_at(&place, &format!("v --listen {address}"));
    let told = answer_of(copy);
    if told.status != 0 {
        told.fails(3, &["written again"]);
    }
    again.stop().is_clean();
}

#[test]
fn a_server_that_is_killed_under_load_loses_nothing_that_was_flushed() {
    let place = Place::new();
    place.run("create v --size 64MiB").succeeds();
    let (first, second) = (noise(8, 16 << 20), noise(9, 32 << 20));
    place.write("first", &first);
    place.write("second", &second);
    let server = Server::start(&place, "v");
    // A copy ends with a flush.
    place.run(&format!("copy first {}", server.target("v"))).succeeds();
    let before = place.allocated_bytes("v");
    let mut copy = place.start(&format!("copy second offset:4096..12287,{}", server.target("v")));
    place.wait_for_bytes("v", before + (4 << 20), &mut copy);
    server.kill();
    copy.kill().ok();
    copy.wait().unwrap();
    let again = Server::start(&place, "v");
    let v = again.target("v");
    assert!(place.blocks(&v, 0, 4095) == first, "what was flushed is there");
    place.run(&format!("verify {v}")).succeeds();
    let now = place.blocks(&v, 4096, 12287);
    for (index, (now, new)) in now.chunks(4096).zip(second.chunks(4096)).enumerate() {
        assert!(now == new || now.iter().all(|byte| *byte == 0), "block {index} is neither old nor new");
    }
    again.stop().is_clean();
}

#[test]
fn whoever_writes_while_a_server_dies_is_told_and_need_only_do_it_again() {
    let place = Place::new();
    place.run("create v --size 64MiB").succeeds();
    let data = noise(6, 64 << 20);
    place.write("data", &data);
    let server = Server::start(&place, "v");
    let (address, v) = (server.address().to_owned(), server.target("v"));
    let mut copy = place.start(&format!("copy data {v}"));
    place.wait_for_bytes("v", 24 << 20, &mut copy);
    server.kill();
    let again = Server::start_at(&place, &format!("v --listen {address}"));
    let told = answer_of(copy);
    // It goes on with the new server, and knows that the old one may have taken unflushed writes along. Only one that had
    // come to its end before the server died has nothing to say.
    if told.status != 0 {
        told.fails(3, &["written again"]);
        place.run(&format!("copy data {v}")).succeeds();
    }
    again.stop().is_clean();
    assert!(place.blocks("v", 0, 16383) == data);
    place.run("verify v").succeeds();
}

/// A value that does not depend on how many digits a field is given: a client of a plain namespace does not know its width.
fn number(value: &Value) -> Value {
    match value.as_str().and_then(|text| text.strip_prefix("0x")) {
        Some(digits) => u64::from_str_radix(digits, 16).unwrap().into(),
        None => value.clone(),
    }
}

#[test]
fn the_values_of_every_kind_of_damage_come_over_the_network() {
    let place = Place::new();
    let kinds = ["data", "guard", "ref-tag", "app-tag", "lost-write", "misdirected"];
    for (guard, protection_type) in [("crc16", 1), ("crc32c", 1), ("crc64", 2), ("crc32c", 3)] {
        place.volume(&format!("--size 1MiB --guard {guard} --type {protection_type} --force"), &noise(3, 1 << 20));
        for (i, kind) in kinds.iter().enumerate() {
            place.run(&format!("corrupt v --lba {} --kind {kind}", 7 + i * 20)).succeeds();
        }
        let here = place.run("verify v --json").ends_with(1).json();
        assert_eq!(here["errors"].as_array().unwrap().len(), kinds.len());
        for shown in ["plain", "shown"] {
            let server = Server::start(&place, &format!("v --protection {shown}"));
            for mode in ["auto", "offload", "emulate"] {
                let there = place.run(&format!("verify {} --mode {mode} --json", server.target("v")));
                let there = there.ends_with(1).json();
                for (here, there) in here["errors"].as_array().unwrap().iter().zip(there["errors"].as_array().unwrap())
                {
                    for key in ["lba", "field", "expected", "actual"] {
                        let what = format!("{guard} type {protection_type} {shown} {mode}: {there}");
                        assert_eq!(number(&there[key]), number(&here[key]), "{what}");
                        assert!(!there[key].is_null(), "{what}");
                    }
                }
                assert_eq!(there["errors"].as_array().unwrap().len(), kinds.len(), "{there}");
            }
            server.stop().is_clean();
        }
    }
}
