//! `sealblock status`: what an operator sees of a server.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::Stdio;

use crate::common::server::{Nbd, Server};
use crate::common::{Answer, Place, RUNTIME_FOLDER, filled, noise};
use serde_json::{Value, json};

const HOST: &str = "nqn.2026-01.org.example:host";

/// A server of a volume of which blocks 5, 6 and 9 are damaged.
fn damaged(place: &Place) -> Server {
    place.volume("--size 1MiB", &noise(1, 1 << 20));
    for lba in [5, 6, 9] {
        place.run(&format!("corrupt v --lba {lba} --kind data")).succeeds();
    }
    Server::start(place, "v --nbd 127.0.0.1:0")
}

fn nbd_address(server: &Server) -> String {
    server.ready["nbd"]["listeners"][0].as_str().unwrap().to_owned()
}

/// What `status --json` says of the server, with this exit status.
#[track_caller]
fn status(place: &Place, server: &Server, exit: i32) -> Value {
    let mut report = place.run(&format!("status {} --json", server.pid())).ends_with(exit).json();
    assert_eq!((report["servers"].as_array().unwrap().len(), &report["unresponsive"]), (1, &json!([])));
    report["servers"][0].take()
}

/// The counts of an operation, without the times.
fn io(device: &Value, operation: &str) -> Value {
    let mut io = device["io"][operation].clone();
    let counts = io.as_object_mut().unwrap();
    assert!(counts.remove("queue_us").is_some() && counts.remove("device_us").is_some());
    io
}

/// Text with what differs from run to run replaced.
fn settled(answer: &Answer, server: &Server) -> String {
    let text = answer.text().replace(server.address(), "NVME").replace(&nbd_address(server), "NBD");
    let pid = server.pid().to_string();
    let line = |line: &str| match line.split_once(' ') {
        Some(("server", _)) => format!("server    process {}", if line.contains(&pid) { "PID" } else { "?" }),
        Some(("client", _)) if line.contains(" from ") => {
            let (who, rest) = line.split_once(" from ").unwrap();
            let (_, at) = rest.split_once(", at ").unwrap();
            format!("{who} from CLIENT, at {}", at.rsplit_once(", for ").unwrap().0)
        }
        _ if line.contains(": p50 ") => format!("{}: TIMES", line.split_once(": p50 ").unwrap().0),
        Some(("log", _)) => format!("log       TIME {}", line[10..].split_once(' ').unwrap().1),
        _ => line.to_owned(),
    };
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

#[test]
fn a_healthy_server_says_what_it_serves_and_to_whom() {
    let place = Place::new();
    place.volume("--size 1MiB", &noise(1, 1 << 20));
    let server = Server::start(&place, "v --nbd 127.0.0.1:0");
    let mut client = Nbd::open(&nbd_address(&server), "v").unwrap();
    client.read(0, 8192).unwrap().unwrap();
    assert_eq!(client.write(4096, &[7; 4096]), 0);
    let answer = place.run(&format!("status {}", server.pid()));
    let expected = "\
server    process PID
health    healthy: the device is healthy
listening NVME for NVMe/TCP
listening NBD for NBD

device    v, 1 MiB in blocks of 4096 bytes
health    healthy: no damage is known; no scrub has checked all blocks yet
served as nvme+tcp://NVME/nqn.2026-11.io.sealblock:v
served as nbd://NBD/v
scrub     idle
I/O       1 read of 8 KiB, 1 write of 4 KiB, 0 failed, 0 in flight
latency   reads in the device: TIMES
          reads in queue: TIMES
          writes in the device: TIMES
          writes in queue: TIMES

client    an NBD client from CLIENT, at v";
    assert_eq!(settled(answer.succeeds(), &server), expected);

    let told = status(&place, &server, 0);
    assert_eq!((&told["health"], &told["pid"], &told["errors"]), (&json!("healthy"), &json!(server.pid()), &json!([])));
    let device = &told["devices"][0];
    assert_eq!(
        (&device["target"], &device["advice"], &device["unresponsive"]),
        (&json!("v"), &json!(null), &json!(null))
    );
    assert_eq!(io(device, "read"), json!({"requests": 1, "bytes": 8192, "errors": 0}));
    assert_eq!(io(device, "write"), json!({"requests": 1, "bytes": 4096, "errors": 0}));
    let timed = &device["io"]["write"]["device_us"];
    assert!(timed["count"] == 1 && timed["p50"].as_f64() > Some(0.0), "{timed}");
    assert!(["p90", "p99", "p99_9", "max", "mean"].iter().all(|field| timed[field] == timed["p50"]), "{timed}");
    assert_eq!(
        (&device["io"]["write"]["queue_us"]["count"], &device["io"]["flush"]["device_us"]),
        (&json!(1), &json!(null))
    );
    assert_eq!(
        device["damage"],
        json!({"blocks": 0, "blocks_at_most": 0, "complete": true, "runs": [], "unlisted": 0, "made_unreadable": 0, "not_saved": [],
            "not_asked": [], "lost_lists": []})
    );
    assert_eq!((&told["clients"][0]["protocol"], &told["clients"][0]["name"]), (&json!("nbd"), &json!("v")));
    drop(client);
    server.stop().is_clean();
}

#[test]
fn a_damaged_block_that_a_host_read_is_told() {
    let place = Place::new();
    let server = damaged(&place);
    status(&place, &server, 0);
    place.run(&format!("copy {}?hostnqn={HOST} out", server.target("v"))).fails(3, &["block 5"]);
    let answer = place.run(&format!("status {}", server.address()));
    let text = settled(answer.ends_with(1), &server);
    for line in [
        "health    damaged: the device is damaged",
        "health    damaged: 3 blocks are bad (5..6, 9)",
        "try       restore these blocks from a backup, or `sealblock scrub start v`, which repairs from another replica where there is one",
        "damage    blocks 5 to 6: guard",
        "damage    block 9: guard",
        &format!("log       TIME damage found blocks=5..6 by=the host {HOST} during=read field=guard target=v"),
    ] {
        assert!(text.lines().any(|other| other == line), "'{line}' is not in:\n{text}");
    }
    let told = status(&place, &server, 1);
    let device = &told["devices"][0];
    assert_eq!((&told["health"], &device["health"]), (&json!("damaged"), &json!("damaged")));
    let runs = json!([{"first": 5, "last": 6, "field": "guard"}, {"first": 9, "last": 9, "field": "guard"}]);
    assert_eq!((&device["damage"]["blocks"], &device["damage"]["runs"]), (&json!(3), &runs));
    assert_eq!((&told["errors"][0]["message"], &told["errors"][0]["blocks"]), (&json!("damage found"), &json!("5..6")));
    server.stop().is_clean();
}

#[test]
fn a_damaged_block_that_an_nbd_client_read_is_told_until_it_is_written() {
    let place = Place::new();
    let server = damaged(&place);
    let mut client = Nbd::open(&nbd_address(&server), "v").unwrap();
    for lba in [5, 9] {
        assert_eq!(client.read(lba * 4096, 4096).unwrap(), Err(5), "EIO");
    }
    let told = status(&place, &server, 1);
    let runs = json!([{"first": 5, "last": 5, "field": "guard"}, {"first": 9, "last": 9, "field": "guard"}]);
    assert_eq!(told["devices"][0]["damage"]["runs"], runs);
    assert_eq!(crate::common::host::known_bad(server.address(), "v"), [(5, 1), (9, 1)], "hosts learn of it, too");
    assert_eq!(client.write(5 * 4096, &[7; 4096]), 0);
    assert_eq!(status(&place, &server, 1)["devices"][0]["damage"]["blocks"], 1);
    assert_eq!(client.write(9 * 4096, &[7; 4096]), 0);
    status(&place, &server, 0);
    server.stop().is_clean();
}

#[test]
fn what_a_scrub_met_is_told_after_a_restart_too() {
    let place = Place::new();
    let mut server = damaged(&place);
    place.run("scrub start v").succeeds();
    assert_eq!(server.event()["event"], "scrub_started");
    assert_eq!(server.event()["event"], "scrub_finished");
    let answer = place.run("status v");
    answer.ends_with(1).says(&[
        "3 blocks are bad (5..6, 9)",
        "256 blocks, 3 bad, 0 repaired, 3 unrepaired",
        "scrub of v: blocks 5 to 6",
    ]);
    assert_eq!(status(&place, &server, 1)["devices"][0]["scrub"]["runs"][0]["unrepaired"], 3);
    server.stop().is_clean();
    let server = Server::start(&place, "v");
    place.run("status v").ends_with(1).says(&["3 blocks are bad (5..6, 9)"]);
    assert_eq!(status(&place, &server, 1)["devices"][0]["damage"]["blocks"], 3);
    server.stop().is_clean();
}

#[test]
fn a_degraded_mirror_is_told_with_what_to_do() {
    let place = Place::new();
    filled(&place, 64);
    let server = Server::start(&place, "mirror:a,b");
    status(&place, &server, 0);
    server.stop().is_clean();
    fs::rename(place.path("b"), place.path("b.away")).unwrap();
    let server = Server::start(&place, "mirror:a,b");
    place.run("status mirror:a,b").ends_with(4).says(&[
        "health    degraded: the device is degraded",
        "health    degraded: mirror:a,b is degraded: b is offline",
        "try       if it stays offline, `sealblock mirror replace mirror:a,b b NEW`",
        "mirror    mirror:a,b is degraded\n          a: in sync\n          b: out of sync, offline",
    ]);
    let told = status(&place, &server, 4);
    let mirror = &told["devices"][0]["mirrors"][0];
    assert_eq!((&mirror["target"], &mirror["state"]), (&json!("mirror:a,b"), &json!("degraded")));
    assert_eq!(mirror["replicas"].as_array().unwrap().len(), 2);
    server.stop().is_clean();
}

#[test]
fn requests_that_fail_are_told_until_one_succeeds() {
    let place = Place::new();
    let server = Server::start(&place, "fault:[no-space@7],mem:1MiB --nbd 127.0.0.1:0 --log off");
    let mut client = Nbd::open(&nbd_address(&server), "mem").unwrap();
    let block = server.ready["subsystems"][0]["namespaces"][0]["block_size"].as_u64().unwrap();
    let data = vec![1; block as usize];
    for _ in 0..2 {
        assert_eq!(client.write(7 * block, &data), 28, "ENOSPC");
    }
    let told = status(&place, &server, 4);
    let failing = &told["devices"][0]["failing"][0];
    assert_eq!((&failing["requests"], &failing["times"]), (&json!("writes"), &json!(2)));
    assert!(told["devices"][0]["summary"].as_str().unwrap().starts_with("writes fail since"), "{told}");
    assert_eq!(told["errors"][0]["level"], "error", "kept although nothing is written at this level");
    assert_eq!(client.write(8 * block, &data), 0);
    let told = status(&place, &server, 0);
    assert_eq!((&told["devices"][0]["failing"], &told["devices"][0]["io"]["write"]["errors"]), (&json!([]), &json!(2)));
    let ended = server.stop();
    assert_eq!(ended.is_clean().stderr, "");
}

#[test]
fn a_server_is_found_by_all_that_is_known_of_it() {
    let place = Place::new();
    let server = Server::start(&place, "mem:1MiB --nbd 127.0.0.1:0");
    let other = Server::start(&place, "mem:2MiB --control here");
    let socket = place.path(RUNTIME_FOLDER).join(format!("sealblock/{}.sock", server.pid()));
    let names = [
        server.pid().to_string(),
        server.address().to_owned(),
        server.address().replace("127.0.0.1", "localhost"),
        nbd_address(&server),
        "mem:1MiB".to_owned(),
        "nqn.2026-11.io.sealblock:mem".to_owned(),
        server.target("mem"),
        socket.display().to_string(),
        format!("--control {}", socket.display()),
    ];
    for name in names {
        let report = place.run(&format!("status {name} --json")).succeeds().json();
        assert_eq!(
            (report["servers"].as_array().unwrap().len(), &report["servers"][0]["pid"]),
            (1, &json!(server.pid())),
            "{name}"
        );
    }
    assert_eq!(place.run("status here --json").succeeds().json()["servers"][0]["pid"], other.pid());
    let all = place.run("status --json").json();
    let pids: Vec<_> = all["servers"].as_array().unwrap().iter().map(|server| &server["pid"]).collect();
    assert!(pids.contains(&&json!(server.pid())) && !pids.contains(&&json!(other.pid())), "{pids:?}");
    for name in ["mem:2MiB", "1", "127.0.0.1:1", "--control there"] {
        place.run(&format!("status {name}")).fails(3, &["try:"]);
    }
    other.stop().is_clean();
    server.stop().is_clean();
}

#[test]
fn a_server_is_watched() {
    let place = Place::new();
    let server = Server::start(&place, "mem:1MiB --nbd 127.0.0.1:0");
    let mut client = Nbd::open(&nbd_address(&server), "mem").unwrap();
    let mut watching =
        place.command(&format!("status {} --watch", server.pid())).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(watching.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.starts_with("I/O       0 failed")));
    client.read(0, 4096).unwrap().unwrap();
    let second = lines.find(|line| line.starts_with("I/O")).unwrap();
    watching.kill().unwrap();
    watching.wait().unwrap();
    assert!(second.starts_with("I/O       1 read of 4 KiB (") && second.contains("/s), 0 failed"), "{second}");
    server.stop().is_clean();
}

#[test]
fn commands_for_mirrors_reach_a_server_with_a_socket_of_its_own() {
    let place = Place::new();
    filled(&place, 64);
    let server = Server::start(&place, "mirror:a,b --control here");
    let status = place.run("mirror status mirror:a,b --control here --json").succeeds().json();
    assert_eq!(status["state"], "optimal");
    place.run("create c --size 256KiB").succeeds();
    place.run("mirror replace mirror:a,b b c --control here").succeeds().says(&["c: in sync"]);
    place.run("status here").succeeds().says(&["c: in sync"]);
    place.run("mirror remove mirror:a,b c --control here").succeeds();
    place.run("mirror add mirror:a,b c --force --control here").succeeds();
    place
        .run("mirror status mirror:x,y --control here")
        .fails(3, &["mirror:x,y", "does not serve it", "sealblock status --control here"]);
    place.run("mirror status mirror:a,b --control there").fails(3, &["there"]);
    server.stop().is_clean();
}
