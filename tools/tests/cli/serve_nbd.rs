//! `sealblock serve --nbd`: the same devices for NBD clients.

use std::time::Instant;

use crate::common::server::{Nbd, Server};
use crate::common::{Place, noise};
use serde_json::{Value, json};

/// What transmission flags say of an export that takes no writes.
const READ_ONLY: u16 = 1 << 1;

fn nbd_address(event: &Value) -> String {
    event["nbd"]["listeners"][0].as_str().unwrap().to_owned()
}

#[track_caller]
fn open(event: &Value, name: &str) -> Nbd {
    Nbd::open(&nbd_address(event), name).unwrap_or_else(|| panic!("there is an export {name}"))
}

#[test]
fn a_target_is_one_device_whichever_way_it_is_reached() {
    let place = Place::new();
    place.run("create v --size 8MiB").succeeds();
    let server = Server::start(&place, "v mem:4MiB mem:1MiB --nbd 127.0.0.1:0 --nbd 127.0.0.1:0");
    assert_eq!(server.ready["nbd"]["exports"], json!(["v", "mem", "mem-2"]));
    assert_eq!(server.ready["nbd"]["listeners"].as_array().unwrap().len(), 2);
    assert_eq!(server.ready["subsystems"][1]["namespaces"][0]["nbd"], "mem");
    for (name, size) in [("v", 8 << 20), ("mem", 4 << 20), ("mem-2", 1 << 20)] {
        let mut client = open(&server.ready, name);
        assert_eq!((client.size, client.flags & READ_ONLY), (size, 0));
        // Through NBD, and read over NVMe/TCP; then the other way round.
        let data = noise(size, 256 << 10);
        assert_eq!(client.write(64 << 10, &data), 0);
        let blocks = place.blocks(&server.target(name), 16, 16 + 63);
        assert!(blocks == data, "{name}: what NBD wrote is what NVMe/TCP reads");
        place.write("data", &noise(size + 1, 1 << 20));
        place.run(&format!("copy data {}", server.target(name))).succeeds();
        let read = client.read(0, 1 << 20).unwrap().unwrap();
        assert!(read == place.read("data"), "{name}: what NVMe/TCP wrote is what NBD reads");
    }
    assert!(Nbd::open(&nbd_address(&server.ready), "nothing").is_none());
    server.stop().is_clean();
    assert_eq!(place.run("info v --json").succeeds().json()["volume"]["clean"], true);
    assert!(place.blocks("v", 0, 255) == noise((8 << 20) + 1, 1 << 20), "and all of it is in the volume");
}

#[test]
fn without_the_option_there_is_no_nbd() {
    let place = Place::new();
    let server = Server::start(&place, "mem:1MiB");
    assert_eq!(server.ready["nbd"], Value::Null);
    assert_eq!(server.ready["subsystems"][0]["namespaces"][0]["nbd"], Value::Null);
    server.stop().is_clean();
}

#[test]
fn read_only_is_read_only_over_nbd_too() {
    let place = Place::new();
    let data = noise(3, 1 << 20);
    place.volume("--size 1MiB", &data);
    let server = Server::start(&place, "v --read-only --nbd 127.0.0.1:0");
    let mut client = open(&server.ready, "v");
    assert_ne!(client.flags & READ_ONLY, 0);
    assert_eq!(client.write(0, &[0; 4096]), 1, "EPERM");
    assert!(client.read(0, 1 << 20).unwrap().unwrap() == data);
    server.stop().is_clean();
    assert!(place.blocks("v", 0, 255) == data);
}

#[test]
fn damage_is_an_error_for_its_block_and_no_other() {
    let place = Place::new();
    place.volume("--size 1MiB", &noise(4, 1 << 20));
    place.run("corrupt v --lba 7 --kind data").succeeds();
    let server = Server::start(&place, "v --nbd 127.0.0.1:0");
    let mut client = open(&server.ready, "v");
    for lba in 0..256 {
        let expected = if lba == 7 { Some(5) } else { None };
        assert_eq!(client.read(lba << 12, 4096).unwrap().err(), expected, "block {lba}");
    }
    assert_eq!(client.write(7 << 12, &[1; 4096]), 0);
    assert_eq!(client.read(7 << 12, 4096).unwrap(), Ok(vec![1; 4096]), "what is written anew is good");
    server.stop().is_clean();
}

const MEMORY: &str = "[[subsystems]]\nname = \"m\"\n[[subsystems.namespaces]]\ntarget = \"mem:1MiB\"\n";
const VOLUME: &str = "[[subsystems]]\nname = \"a\"\n[[subsystems.namespaces]]\nnsid = 5\ntarget = \"v\"\n\
                      [[subsystems.namespaces]]\ntarget = \"mem:2MiB\"\nnsid = 6\n\
                      [[subsystems.namespaces]]\ntarget = \"mem:3MiB\"\nnsid = 7\nnbd = \"mine\"\n";
const LISTENER: &str = "[[nbd]]\naddress = \"127.0.0.1:0\"\n";

/// Has a server read this configuration.
#[track_caller]
fn reload(place: &Place, server: &mut Server, text: &str) -> Value {
    place.write("sealblock.toml", text.as_bytes());
    server.signal("HUP");
    server.event()
}

#[test]
fn exports_and_listeners_come_and_go_while_others_are_used() {
    let place = Place::new();
    place.run("create v --size 1MiB").succeeds();
    place.write("sealblock.toml", format!("{LISTENER}{MEMORY}{VOLUME}").as_bytes());
    let mut server = Server::start_at(&place, "--listen 127.0.0.1:0");
    let first = server.ready.clone();
    assert_eq!(first["nbd"]["exports"], json!(["m", "a", "a/6", "mine"]));
    let (mut memory, mut volume) = (open(&first, "m"), open(&first, "a"));
    assert_eq!(memory.write(0, &[7; 4096]), 0);
    assert_eq!(volume.write(0, &[8; 4096]), 0);

    let event = reload(&place, &mut server, &format!("{LISTENER}{MEMORY}"));
    assert_eq!((&event["event"], &event["nbd"]["exports"]), (&"reloaded".into(), &json!(["m"])));
    assert_eq!(event["nbd"]["listeners"], first["nbd"]["listeners"], "the listener stays");
    assert!(volume.read(0, 4096).is_err(), "what went is closed");
    assert_eq!(memory.read(0, 4096).unwrap(), Ok(vec![7; 4096]), "what stays goes on, on the same connection");
    assert!(Nbd::open(&nbd_address(&event), "a").is_none());
    assert_eq!(place.run("info v --json").succeeds().json()["volume"]["clean"], true);

    let event = reload(&place, &mut server, &format!("{LISTENER}{MEMORY}{VOLUME}"));
    assert_eq!(open(&event, "a").read(0, 4096).unwrap(), Ok(vec![8; 4096]));
    let event = reload(&place, &mut server, MEMORY);
    assert_eq!(event["nbd"], Value::Null);
    assert!(std::net::TcpStream::connect(nbd_address(&first)).is_err(), "nobody listens any more");
    assert!(memory.read(0, 4096).is_err(), "and nothing is offered");
    let event = reload(&place, &mut server, &format!("{MEMORY}{LISTENER}"));
    assert_eq!(open(&event, "m").read(0, 4096).unwrap(), Ok(vec![7; 4096]), "the memory was there all the time");
    // What cannot be served changes nothing.
    let taken = nbd_address(&event);
    let failed = reload(&place, &mut server, &format!("{MEMORY}{LISTENER}[[nbd]]\naddress = \"192.0.2.1:10809\"\n"));
    assert_eq!(failed["event"], "reload_failed");
    assert!(Nbd::open(&taken, "m").is_some());
    server.stop().is_clean();
}

#[test]
fn the_file_and_the_command_line_are_checked() {
    let place = Place::new();
    for (text, words) in [
        (format!("[[nbd]]\nadress = \"127.0.0.1\"\n{MEMORY}"), ["line 2", "unknown field `adress`"]),
        (format!("[[nbd]]\naddress = \"localhost\"\n{MEMORY}"), ["line 2", "127.0.0.1:10809"]),
        (
            format!("{LISTENER}{MEMORY}nbd = \"x\"\n[[subsystems.namespaces]]\ntarget = \"null:1MiB\"\nnbd = \"x\"\n"),
            ["\"x\"", "as mem:1MiB"],
        ),
    ] {
        place.write("bad.toml", text.as_bytes());
        place.run("serve --config bad.toml --listen 127.0.0.1:0").fails(2, &words);
    }
    let hosts = MEMORY.replace("[[subsystems.", "hosts = []\n[[subsystems.");
    place.write(
        "hosts.toml",
        format!("{LISTENER}{hosts}{}", VOLUME.replace("target = \"v\"", "target = \"mem:1MiB\"")).as_bytes(),
    );
    let server = Server::start(&place, "--config hosts.toml");
    assert_eq!(server.ready["nbd"]["exports"], json!(["a", "a/6", "mine"]), "what is only for some hosts stays away");
    server.stop().is_clean();
    let server = Server::start(&place, "mem:1MiB --nbd 0.0.0.0:0");
    let ended = server.stop();
    assert!(ended.is_clean().stderr.contains("every NBD client"), "{}", ended.stderr);
    let server = Server::start(&place, "mem:1MiB --nbd 127.0.0.1:0");
    assert_eq!(server.stop().is_clean().stderr, "");
}

#[test]
fn a_server_that_ends_lets_requests_end() {
    let place = Place::new();
    place.run("create v --size 8MiB").succeeds();
    let server = Server::start(&place, "v --nbd 127.0.0.1:0");
    let mut client = open(&server.ready, "v");
    assert_eq!(client.write(0, &noise(9, 1 << 20)), 0);
    let ended = server.stop();
    let draining = ended.events.iter().find(|event| event["event"] == "draining").unwrap();
    assert_eq!(draining["connections"], 1);
    ended.is_clean();
    assert!(client.read(0, 4096).is_err());
    assert!(place.blocks("v", 0, 255) == noise(9, 1 << 20));
}

#[test]
fn a_request_that_never_ends_delays_the_stop_by_the_drain_time_and_no_more() {
    const DRAIN_S: u64 = 4;
    let place = Place::new();
    place.run("create v --size 8MiB").succeeds();
    let config = format!(
        "[limits]\ndrain = \"{DRAIN_S}s\"\n\n{LISTENER}\n[[subsystems]]\nname = \"a\"\n\n[[subsystems.namespaces]]\ntarget = \"fault:[delay=3600s@9..9],v\"\n"
    );
    place.write("hung.toml", config.as_bytes());
    for is_gone in [true, false] {
        let server = Server::start(&place, "--config hung.toml");
        let mut client = open(&server.ready, "a");
        client.begin_reads(&[9 * 4096], 4096);
        let other = open(&server.ready, "a").read(0, 4096).unwrap();
        assert!(other.is_ok(), "the read above was received before this one");
        let client = Some(client).filter(|_| !is_gone);
        let begun = Instant::now();
        server.stop().is_clean();
        let took = begun.elapsed().as_secs();
        assert!((DRAIN_S - 1..2 * DRAIN_S).contains(&took), "{took} s, client gone: {is_gone}");
        drop(client);
    }
}
