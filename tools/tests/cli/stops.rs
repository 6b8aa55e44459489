//! A server that is stopped while requests never end, for each composition of devices that closes something: it ends soon after the drain
//! time, reports what it could not close, and what was acknowledged is there.

use std::time::{Duration, Instant};

use crate::common::server::{Nbd, Server};
use crate::common::{Place, noise};

const DRAIN: Duration = Duration::from_secs(3);
const BLOCK: u64 = 4096;
/// A block whose writes never end on one replica.
const HUNG: u64 = 100;
/// What a server logs of changes that are in flight when it closes a mirror.
const IN_FLIGHT: &str = "changes were still in flight; the next opening compares the replicas there";

fn config(place: &Place, name: &str, target: &str) {
    let text = format!(
        "[limits]\ndrain = \"{}s\"\n\n[[nbd]]\naddress = \"127.0.0.1:0\"\n\n[[subsystems]]\nname = \"{name}\"\n\n[[subsystems.namespaces]]\ntarget = \
         \"{target}\"\n",
        DRAIN.as_secs()
    );
    place.write("stops.toml", text.as_bytes());
}

fn open(server: &Server) -> Nbd {
    Nbd::open(server.ready["nbd"]["listeners"][0].as_str().unwrap(), "a").unwrap()
}

fn mirror(place: &Place, a: &str, b: &str) {
    place.run(&format!("create {a} --size 8MiB")).succeeds();
    place.run(&format!("create {b} --size 8MiB")).succeeds();
    place.run(&format!("mirror create {a} {b}")).succeeds();
}

/// A server of this target with a client whose write to [`HUNG`] does not end; what came before it was acknowledged and flushed.
fn with_hung_write(place: &Place, target: &str) -> (Server, Nbd) {
    config(place, "a", target);
    let server = Server::start(place, "--config stops.toml");
    let mut client = open(&server);
    assert_eq!(client.write(0, &noise(1, BLOCK as usize)), 0);
    assert_eq!(client.flush(), 0);
    client.begin_write(HUNG * BLOCK, &noise(2, BLOCK as usize));
    assert!(open(&server).read(0, BLOCK as usize).unwrap().is_ok(), "the write was received before this read");
    (server, client)
}

/// Ends the server, which takes the drain time and little more; returns its log.
#[track_caller]
fn stop(server: Server, status: i32) -> String {
    let begun = Instant::now();
    let ended = server.stop();
    let took = begun.elapsed();
    assert!(took >= DRAIN - Duration::from_secs(1) && took < DRAIN * 3, "{took:?}: {}", ended.stderr);
    assert_eq!(ended.status, Some(status), "{}", ended.stderr);
    ended.stderr
}

/// The flushed block is there, and both replicas have the same: the old or the new content of the block that was being written.
fn assert_recovers(place: &Place, mirror: &str, block: &[u8]) {
    let status = place.run(&format!("mirror status {mirror}"));
    assert!(status.ends_with(4).text().contains("not compared yet"), "{}", status.text());
    assert_eq!(place.blocks(mirror, 0, 0), block);
    // An opening for writing compares them.
    place.run(&format!("verify {mirror} --repair")).succeeds();
    place.run(&format!("mirror status {mirror}")).succeeds();
    let (a, b) = mirror.trim_start_matches("mirror:").split_once(',').unwrap();
    place.run(&format!("compare {a} {b}")).succeeds();
}

#[test]
fn a_mirror_with_a_write_that_never_ends_is_left_as_in_a_crash() {
    let place = Place::new();
    mirror(&place, "a", "b");
    let (server, client) = with_hung_write(&place, &format!("mirror:[fault:[delay=3600s@{HUNG}..{HUNG}],a],b"));
    let log = stop(server, 3);
    assert!(log.contains("cannot close 'mirror:") && log.contains(IN_FLIGHT), "{log}");
    drop(client);
    assert_recovers(&place, "mirror:a,b", &noise(1, BLOCK as usize));
}

#[test]
fn every_member_is_closed_beside_one_that_does_not_close() {
    let place = Place::new();
    mirror(&place, "a", "b");
    mirror(&place, "c", "d");
    // Chunks of 16 blocks: the block is in the fourth chunk of the first mirror.
    let target = "stripe-nolabel:[mirror:[fault:[delay=3600s@48..63],a],b],[mirror:c,d]";
    let (server, client) = with_hung_write(&place, target);
    let log = stop(server, 3);
    assert!(log.contains("cannot close 'stripe-nolabel:"), "{log}");
    drop(client);
    place.run("mirror status mirror:c,d").succeeds();
    assert_recovers(&place, "mirror:a,b", &noise(1, BLOCK as usize));
}

#[test]
fn a_reload_leaves_a_mirror_that_does_not_close() {
    let place = Place::new();
    mirror(&place, "a", "b");
    let (mut server, _client) = with_hung_write(&place, &format!("mirror:[fault:[delay=3600s@{HUNG}..{HUNG}],a],b"));
    config(&place, "other", "mem:4MiB");
    server.signal("HUP");
    assert_eq!(server.event()["event"], "reloaded");
    let ended = server.stop();
    assert!(ended.stderr.contains("cannot close 'mirror:") && ended.stderr.contains(IN_FLIGHT), "{}", ended.stderr);
    place.run("mirror status mirror:a,b").ends_with(4);
}

#[test]
fn a_second_signal_ends_a_server_at_once() {
    let place = Place::new();
    mirror(&place, "a", "b");
    let (server, _client) = with_hung_write(&place, &format!("mirror:[fault:[delay=3600s@{HUNG}..{HUNG}],a],b"));
    let begun = Instant::now();
    server.signal("TERM");
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(server.stop().status, None, "by the signal");
    assert!(begun.elapsed() < DRAIN, "{:?}", begun.elapsed());
}

#[test]
fn a_replica_whose_server_hangs_delays_the_end_only_for_the_drain_time() {
    let place = Place::new();
    place.run("create a --size 8MiB").succeeds();
    place.run("create b --size 8MiB").succeeds();
    let other = Server::start(&place, "b --protection shown");
    // The drain time ends long before the write would, also on a busy machine.
    let remote = format!("{}?timeout=60s&keepalive=60s", other.target("b"));
    place.run(&format!("mirror create a {remote}")).succeeds();
    config(&place, "a", &format!("mirror:a,{remote}"));
    let server = Server::start(&place, "--config stops.toml");
    let mut client = open(&server);
    assert_eq!(client.write(0, &noise(1, BLOCK as usize)), 0);
    assert_eq!(client.flush(), 0);
    other.signal("STOP");
    client.begin_write(HUNG * BLOCK, &noise(2, BLOCK as usize));
    stop(server, 3);
    other.signal("CONT");
    other.stop().is_clean();
    assert_eq!(place.blocks("mirror:a,b", 0, 0), noise(1, BLOCK as usize));
    place.run("verify mirror:a,b --repair").succeeds();
    place.run("compare a b").succeeds();
}
