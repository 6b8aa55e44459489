//! `sealblock resize` of a volume that a server has open: under load, refused, and beside everything else that may happen.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::common::server::{Nbd, Server};
use crate::common::{Place, noise};
use crate::paths::load;

const BLOCK: u64 = 4096;
const MIB: u64 = 1 << 20;

/// A host in a thread of this process, which writes, reads, checks and flushes.
struct Host {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    failed: Arc<Mutex<Vec<String>>>,
    thread: JoinHandle<()>,
}

impl Host {
    fn start(target: String) -> Host {
        let (stop, done, failed) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default(), Arc::default());
        let (ordered, counted, met) = (Arc::clone(&stop), Arc::clone(&done), Arc::<Mutex<Vec<String>>>::clone(&failed));
        let thread = thread::spawn(move || {
            load::work(&target, &ordered, |_, seen, _| {
                counted.store(seen.done.get(), Ordering::SeqCst);
                *met.lock().unwrap() = seen.failed.borrow().iter().take(3).cloned().collect();
            });
        });
        Host { stop, done, failed, thread }
    }

    /// Waits until it has got on; nothing may have failed.
    #[track_caller]
    fn goes_on(&self) {
        let from = self.done.load(Ordering::SeqCst);
        while self.done.load(Ordering::SeqCst) < from + 300 {
            assert_eq!(*self.failed.lock().unwrap(), Vec::<String>::new());
            assert!(!self.thread.is_finished(), "the host has ended");
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Has it check everything once more, and end.
    #[track_caller]
    fn end(self) {
        self.stop.store(true, Ordering::SeqCst);
        self.thread.join().unwrap();
        assert_eq!(*self.failed.lock().unwrap(), Vec::<String>::new());
    }
}

fn blocks(place: &Place, target: &str) -> u64 {
    place.run(&format!("info {target} --json")).succeeds().json()["blocks"].as_u64().unwrap()
}

fn nbd_address(server: &Server) -> String {
    server.ready["nbd"]["listeners"][0].as_str().unwrap().to_owned()
}

#[test]
fn a_volume_grows_twice_and_shrinks_once_under_load() {
    let place = Place::new();
    place.run("create v --size 16MiB").succeeds();
    let mut server = Server::start(&place, "v --nbd 127.0.0.1:0");
    let nbd = nbd_address(&server);
    // The same volume both ways, each with blocks of its own.
    let hosts = [Host::start(server.target("v")), Host::start(format!("offset:2048..3071,nbd://{nbd}/v"))];
    let mut before = Nbd::open(&nbd, "v").unwrap();
    let mut size = 16 * MIB;
    for next in [64 * MIB, 200 * MIB, 12 * MIB] {
        hosts.iter().for_each(Host::goes_on);
        let report = place.run(&format!("resize v --size {next} --json")).succeeds().json();
        assert_eq!((&report["before_bytes"], &report["size_bytes"]), (&size.into(), &next.into()));
        let pause_us = report["pause_us"].as_u64().unwrap();
        println!("{size} to {next} bytes: requests waited for {pause_us} us");
        assert!(pause_us > 0);
        let event = server.event();
        assert_eq!((&event["event"], &event["size_bytes"]), (&"resized".into(), &next.into()));
        hosts.iter().for_each(Host::goes_on);
        assert_eq!(blocks(&place, &server.target("v")), next / BLOCK);
        assert_eq!(Nbd::open(&nbd, "v").unwrap().size, next);
        size = next;
    }
    assert_eq!(before.size, 16 * MIB, "what a client was told stays what it was told");
    assert!(before.read(12 * MIB - BLOCK, BLOCK as usize).unwrap().is_ok());
    for at in [12 * MIB, 15 * MIB] {
        assert_eq!(before.read(at, BLOCK as usize).unwrap(), Err(22), "EINVAL past the end of what is there");
        assert!([22, 28].contains(&before.write(at, &[1; BLOCK as usize])));
    }
    hosts.into_iter().for_each(Host::end);
    server.stop().is_clean();
    let info = place.run("info v --json").succeeds().json();
    assert_eq!((&info["blocks"], &info["volume"]["clean"]), (&(12 * MIB / BLOCK).into(), &true.into()));
    place.run("verify v").succeeds();
}

#[test]
fn what_cannot_be_resized_is_refused_by_name_and_served_on() {
    let place = Place::new();
    // Servers of other tests may have a subsystem v.
    for name in ["v", "a", "b", "known-by-its-nqn"] {
        place.run(&format!("create {name} --size 8MiB")).succeeds();
    }
    let data = noise(1, 1 << 20);
    place.write("data", &data);
    place.run("copy data offset:1024..,v").succeeds();
    place.run("mirror create a b").succeeds();
    let server = Server::start(&place, "v mirror:a,b mem:1MiB known-by-its-nqn");
    let refused = |arguments: &str, status: i32, words: &[&str]| {
        place.run(&format!("resize {arguments}")).fails(status, words);
    };
    refused("v --size 4MiB", 3, &["blocks beyond the new end hold data", "block 1024", "discard"]);
    refused("v --size 5000", 2, &["not a multiple of the block size"]);
    refused("v --size 0", 2, &["at least one block"]);
    refused("v --size 16EiB", 2, &["16EiB"]);
    refused("mirror:a,b --size 16MiB", 3, &["only a protected volume that is served directly"]);
    refused("a --size 16MiB", 3, &["it is part of mirror:a,b, which is served"]);
    refused("mem:1MiB --size 2MiB", 3, &["only a protected volume"]);
    refused("nosuch --size 2MiB", 3, &["no such file"]);
    refused("v --size 16MiB --control nosuch.sock", 3, &["nosuch.sock"]);
    refused("nqn.2026-11.io.sealblock:known-to-nobody --size 16MiB", 3, &["no server"]);
    // Nothing of that has changed anything, and the volume is nobody else's.
    place.run("verify v").fails(3, &["in use"]);
    assert_eq!(blocks(&place, &server.target("v")), 2048);
    assert!(place.blocks(&server.target("v"), 1024, 1279) == data);
    let named = "nqn.2026-11.io.sealblock:known-by-its-nqn";
    place.run(&format!("resize {named} --size 16MiB")).succeeds().says(&["resized from 8 MiB to 16 MiB"]);
    place.run(&format!("resize {} --size 8MiB", server.target("v"))).succeeds().says(&["already has 8 MiB"]);
    place
        .run(&format!("resize {} --size 16MiB", server.target("v")))
        .succeeds()
        .says(&["resized from 8 MiB to 16 MiB"]);
    place.run("resize v --size 16MiB").succeeds().says(&["already has 16 MiB"]);
    server.stop().is_clean();
}

#[test]
fn what_is_served_read_only_or_as_a_member_is_refused() {
    let place = Place::new();
    for name in ["a", "b", "fixed"] {
        place.run(&format!("create {name} --size 8MiB")).succeeds();
    }
    place.run("mirror create a b").succeeds();
    for (served, name, why) in [
        ("fixed --read-only", "fixed", "it is served read-only"),
        ("a --as-member", "a", "member of a mirror or stripe"),
    ] {
        let server = Server::start(&place, served);
        place.run(&format!("resize {name} --size 16MiB")).fails(3, &[why]);
        server.stop().is_clean();
    }
    place.run("resize b --size 16MiB").fails(3, &["resizing members is not supported", "mirror"]);
    place.run("verify mirror:a,b").succeeds();
}

#[test]
fn a_volume_that_a_host_has_made_a_member_is_refused_and_served_on() {
    let place = Place::new();
    place.run("create v --size 8MiB").succeeds();
    place.run("create w --size 8MiB").succeeds();
    let (one, other) = (Server::start(&place, "v"), Server::start(&place, "w"));
    let mirror = format!("{} {}", one.target("v"), other.target("w"));
    place.run(&format!("mirror create {mirror}")).succeeds();
    for size in [16, 4] {
        place.run(&format!("resize v --size {size}MiB")).fails(3, &["resizing members is not supported", "mirror"]);
    }
    let whole = format!("mirror:{}", mirror.replace(' ', ","));
    place.write("data", &noise(9, 1 << 20));
    place.run(&format!("copy data {whole}")).succeeds();
    place.run(&format!("verify {whole}")).succeeds();
    one.stop().is_clean();
    other.stop().is_clean();
}

#[test]
fn several_orders_at_once_are_carried_out_one_after_the_other() {
    let place = Place::new();
    place.run("create v --size 8MiB").succeeds();
    let text = "[[subsystems]]\nname = \"v\"\n[[subsystems.namespaces]]\ntarget = \"v\"\n";
    place.write("sealblock.toml", text.as_bytes());
    let mut server = Server::start_at(&place, "--listen 127.0.0.1:0");
    let host = Host::start(server.target("v"));
    host.goes_on();
    let sizes = [16, 24, 32, 40].map(|mib| mib * MIB);
    let orders = sizes.map(|size| place.start(&format!("resize v --size {size} --json")));
    server.signal("HUP");
    let mut befores = vec![];
    for order in orders {
        befores.push(crate::common::answer_of(order).succeeds().json()["before_bytes"].as_u64().unwrap());
    }
    // Each found what another one had left.
    befores.sort_unstable();
    befores.dedup();
    assert_eq!(befores.len(), 4, "{befores:?}");
    let events: Vec<String> = (0..5).map(|_| server.event()["event"].as_str().unwrap().to_owned()).collect();
    assert_eq!(events.iter().filter(|event| *event == "reloaded").count(), 1, "{events:?}");
    host.goes_on();
    // The end comes beside an order, which is carried out or refused, and the volume is clean either way.
    let order = place.start("resize v --size 64MiB --json");
    host.end();
    let ended = server.stop();
    ended.is_clean();
    let answer = crate::common::answer_of(order);
    let now = blocks(&place, "v") * BLOCK;
    assert!(answer.status != 0 || now == 64 * MIB, "{now} bytes, and {answer:?}");
    assert!(answer.status == 0 || sizes.contains(&now) || now == 64 * MIB);
    assert_eq!(place.run("info v --json").succeeds().json()["volume"]["clean"], true);
    place.run("verify v").succeeds();
}

#[test]
fn nobody_else_gets_at_the_volume_in_between() {
    let place = Place::new();
    place.run("create v --size 8MiB").succeeds();
    let server = Server::start(&place, "v");
    let orders = [64, 8, 128, 8].map(|mib| place.start(&format!("resize v --size {mib}MiB")));
    let mut orders = orders.map(Some);
    while orders.iter().any(Option::is_some) {
        place.run("verify v").fails(3, &["in use"]);
        for order in &mut orders {
            if order.as_mut().is_some_and(|child| child.try_wait().unwrap().is_some()) {
                crate::common::answer_of(order.take().unwrap()).succeeds();
            }
        }
    }
    server.stop().is_clean();
}

#[test]
fn a_scrub_under_way_goes_on_to_the_new_end() {
    let place = Place::new();
    place.volume("--size 64MiB", &noise(3, 1 << 20));
    let server = Server::start(&place, "v");
    let status = || place.run("scrub status v --json").succeeds().json();
    place.run("scrub start v --rate 4MiB/s").succeeds();
    while status()["position"] == 0 {
        thread::sleep(Duration::from_millis(5));
    }
    let before = status();
    place.run("resize v --size 128MiB").succeeds();
    let after = status();
    assert_eq!((&after["state"], &after["blocks"]), (&"running".into(), &32768.into()));
    assert!(after["position"].as_u64() >= before["position"].as_u64(), "{before} {after}");
    assert_eq!(after["run"]["started_unix_s"], before["run"]["started_unix_s"], "the same run");
    assert_eq!(after["rate"], 4 << 20);
    place.run("scrub pause v").succeeds();
    place.run("resize v --size 64MiB").succeeds();
    // The piece in flight at the pause has ended by now.
    let paused = status();
    assert_eq!((&paused["state"], &paused["blocks"]), (&"paused".into(), &16384.into()));
    assert!(paused["position"].as_u64() >= after["position"].as_u64(), "{after} {paused}");
    server.stop().is_clean();
    // And when no server has it open.
    place.run("resize v --size 96MiB").succeeds();
    let kept = status();
    assert_eq!((&kept["position"], &kept["blocks"]), (&paused["position"], &24576.into()));
    let server = Server::start(&place, "v");
    place.run("scrub start v --rate 1GiB/s").succeeds();
    while status()["state"] != "idle" {
        thread::sleep(Duration::from_millis(5));
    }
    let last = status()["runs"][0].clone();
    assert_eq!((&last["blocks"], &last["result"]), (&24576.into(), &"finished".into()));
    server.stop().is_clean();
}

#[test]
fn a_server_that_dies_beside_an_order_leaves_a_volume_with_all_that_was_flushed() {
    let place = Place::new();
    let data = noise(5, 1 << 20);
    place.volume("--size 8MiB", &data);
    for (size, rest) in [(64, 0), (8, 3), (200, 7), (8, 12)] {
        let server = Server::start(&place, "v");
        let order = place.start(&format!("resize v --size {size}MiB"));
        // Wherever this comes, the same has to be true afterwards.
        thread::sleep(Duration::from_millis(rest));
        server.kill();
        drop(crate::common::answer_of(order));
        assert!(place.blocks("v", 0, 255) == data, "after {rest} ms");
        // Between the old end and the new one there is no third superblock, nor second copies of the reserved area where it shrinks.
        let answer = place.run("verify v --json");
        let report = answer.json();
        assert_eq!((&report["errors"], &report["unchecked"]), (&serde_json::json!([]), &serde_json::json!([])));
        let lost = report["lost_metadata"].as_array().unwrap();
        let is_copy = |what: &serde_json::Value| {
            let what = what.as_str().unwrap();
            what.contains("superblock") || what.starts_with("lost copies of metadata of v")
        };
        assert!(lost.iter().all(is_copy), "{lost:?}");
        answer.ends_with(if lost.is_empty() { 0 } else { 4 });
        // What was begun is finished by doing it again.
        place.run(&format!("resize v --size {size}MiB")).succeeds();
        assert_eq!(blocks(&place, "v"), size * MIB / BLOCK);
        place.run("verify v").succeeds();
    }
}
