//! What a server shows of a device on another host whose connection is lost while nobody uses it.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::common::Place;
use crate::common::server::Server;

/// That a connection is closed is known at once; that a machine is slow is not to be taken for a loss.
const LONG: &str = "timeout=1min&keepalive=1min";

/// Waits until `status` of a server ends with this exit status, and returns what it shows of its device.
#[track_caller]
fn until(place: &Place, server: &Server, exit: i32) -> Value {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        let answer = place.run(&format!("status {} --json", server.pid()));
        if answer.status == exit {
            return answer.json()["servers"][0]["devices"][0].clone();
        }
        assert!(Instant::now() < end, "exit status {}: {}", answer.status, String::from_utf8_lossy(&answer.stdout));
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn nbd_address(server: &Server) -> String {
    server.ready["nbd"]["listeners"][0].as_str().unwrap().to_owned()
}

/// A configuration that serves this target as `x`, over NBD, too.
fn exported(target: &str, more: &str) -> String {
    format!("[[subsystems]]\nname = \"x\"\nnamespaces = [{{ target = \"{target}\", nbd = \"x\"{more} }}]\n")
}

/// Two volumes of one size without tags, which NBD does not carry.
fn volumes() -> Place {
    let place = Place::new();
    for name in ["a", "b"] {
        place.run(&format!("create {name} --size 1MiB --guard none")).succeeds();
    }
    place
}

/// Serves `group` of the target that is `b` on another server, has that server die and come back, and returns that target, and what is
/// shown of the group while the server is away.
#[track_caller]
fn lose(place: &Place, is_nbd: bool, options: &str, group: impl Fn(&str) -> String) -> (String, Value) {
    let far = Server::start(place, &format!("--nbd 127.0.0.1:0 {options} b"));
    let (nvme, nbd) = (far.address().to_owned(), nbd_address(&far));
    let b = if is_nbd { format!("nbd://{nbd}/b") } else { format!("{}?{LONG}", far.target("b")) };
    let near = Server::start(place, &group(&b));
    let connected = until(place, &near, 0);
    assert_eq!((&connected["health"], &connected["lost_connections"]), (&json!("healthy"), &json!([])));
    far.kill();
    let lost = until(place, &near, 4);
    assert_eq!(lost["health"], "degraded");
    let far = Server::start_at(place, &format!("--listen {nvme} --nbd {nbd} {options} b"));
    let again = until(place, &near, 0);
    assert_eq!((&again["health"], &again["lost_connections"]), (&json!("healthy"), &json!([])));
    for mirror in again["mirrors"].as_array().unwrap() {
        let replica = &mirror["replicas"][1];
        assert_eq!((&mirror["state"], &replica["resynced_bytes"]), (&json!("optimal"), &json!(0)), "{replica}");
    }
    near.stop().is_clean();
    far.stop().is_clean();
    (b, lost)
}

#[test]
fn a_gateway_and_a_stripe_show_that_the_other_server_is_gone_and_that_it_is_back() {
    for is_nbd in [false, true] {
        for group in [|b: &str| b.to_owned(), |b: &str| format!("stripe-nolabel:a,{b}")] {
            let (b, lost) = lose(&volumes(), is_nbd, "", group);
            let connection = &lost["lost_connections"][0];
            assert_eq!((&connection["target"], &connection["reconnecting"]), (&json!(b), &json!(true)));
            let (summary, words) = (lost["summary"].as_str().unwrap(), format!("connection to {b} lost since "));
            assert!(summary.starts_with(&words) && summary.contains(", reconnecting: "), "{summary}");
            assert!(lost["advice"].as_str().unwrap().ends_with("automatically"), "{lost}");
        }
    }
}

#[test]
fn a_mirror_shows_that_the_server_of_a_replica_is_gone_and_that_it_is_back_without_a_resync() {
    for is_nbd in [false, true] {
        let place = volumes();
        if !is_nbd {
            place.run("mirror create a b").succeeds();
        }
        let (b, lost) = lose(&place, is_nbd, if is_nbd { "" } else { "--as-member" }, |b| {
            if is_nbd {
                place.run(&format!("mirror create a {b}")).succeeds();
            }
            format!("mirror:a,{b}")
        });
        let (mirror, words) = (&lost["mirrors"][0], lost["summary"].as_str().unwrap());
        let replica = &mirror["replicas"][1];
        assert_eq!((&mirror["state"], &replica["online"]), (&json!("degraded"), &json!(false)));
        assert!(words.ends_with(&format!("is degraded: {b} is offline")), "{words}");
        assert!(replica["last_error"].as_str().unwrap().contains("connection"), "{replica}");
        assert_eq!(lost["lost_connections"], json!([]), "the mirror shows it");
    }
}

#[test]
fn what_a_server_has_under_the_name_after_its_restart_is_used_only_if_it_is_the_same() {
    for (is_same, group) in [(true, false), (true, true), (false, false), (false, true)] {
        let place = volumes();
        place.run("create c --size 1MiB --guard none").succeeds();
        place.write("ones", &vec![1; 1 << 20]);
        place.run("copy ones c").succeeds();
        place.write("data", &vec![7; 1 << 20]);
        place.write("before.toml", exported("b", "").as_bytes());
        place.write("after.toml", exported(if is_same { "b" } else { "c" }, "").as_bytes());
        let far = Server::start_at(&place, "--config before.toml --listen 127.0.0.1:0 --nbd 127.0.0.1:0");
        let (nvme, nbd) = (far.address().to_owned(), nbd_address(&far));
        let export = format!("nbd://{nbd}/x");
        if group {
            place.run(&format!("mirror create a {export}")).succeeds();
        }
        let near = Server::start(&place, &if group { format!("mirror:a,{export}") } else { export.clone() });
        until(&place, &near, 0);
        let nqn = near.ready["subsystems"][0]["nqn"].as_str().unwrap();
        let served = format!("nvme+tcp://{}/{nqn}", near.address());
        far.kill();
        until(&place, &near, 4);
        let far = Server::start_at(&place, &format!("--config after.toml --listen {nvme} --nbd {nbd}"));
        if is_same {
            until(&place, &near, 0);
            place.run(&format!("copy data {served}")).succeeds();
        } else if group {
            let shown = until(&place, &near, 4);
            place.run(&format!("copy data {served}")).succeeds();
            let shown = until(&place, &near, 4).get("mirrors").cloned().unwrap_or(shown);
            let error = shown[0]["replicas"][1]["last_error"].as_str().unwrap().to_owned();
            assert!(error.contains("another device under the name") || error.contains("another export"), "{error}");
        } else {
            let end = Instant::now() + Duration::from_secs(60);
            loop {
                let lost = until(&place, &near, 4);
                let summary = lost["summary"].as_str().unwrap();
                if summary.contains("another export") {
                    break;
                }
                assert!(Instant::now() < end, "{summary}");
                std::thread::sleep(Duration::from_millis(50));
            }
            assert_ne!(place.run(&format!("copy data {served}?timeout=2s")).status, 0);
        }
        let _ = near.stop();
        far.stop().is_clean();
        place.run("copy c out").succeeds();
        assert!(place.read("out") == vec![1; 1 << 20], "group: {group}");
    }
}

/// The files of a far server: the one that was served comes back by another name, or another one comes in its place.
#[test]
fn a_file_is_known_after_a_restart_whatever_its_name_is_and_another_one_in_its_place_is_not_used() {
    for (is_nbd, is_replaced) in [(true, true), (true, false), (false, true), (false, false)] {
        let place = Place::new();
        for (name, byte) in [("b", 1), ("c", 2)] {
            place.write(name, &vec![byte; 1 << 20]);
        }
        let far = Server::start_at(&place, "raw:b --listen 127.0.0.1:0 --nbd 127.0.0.1:0");
        let (nvme, nbd) = (far.address().to_owned(), nbd_address(&far));
        let target = if is_nbd { format!("nbd://{nbd}/b") } else { format!("{}?{LONG}", far.target("b")) };
        let near = Server::start(&place, &target);
        until(&place, &near, 0);
        let nqn = near.ready["subsystems"][0]["nqn"].as_str().unwrap();
        let served = format!("nvme+tcp://{}/{nqn}", near.address());
        far.stop().is_clean();
        until(&place, &near, 4);
        std::fs::rename(place.path("b"), place.path("old")).unwrap();
        if is_replaced {
            std::fs::rename(place.path("c"), place.path("b")).unwrap();
        } else {
            std::os::unix::fs::symlink("old", place.path("b")).unwrap();
        }
        let far = Server::start_at(&place, &format!("raw:b --listen {nvme} --nbd {nbd}"));
        if is_replaced {
            let read = place.run(&format!("copy {served}?timeout=2s out"));
            assert_ne!(read.status, 0, "over NBD: {is_nbd}");
        } else if is_nbd {
            until(&place, &near, 0);
            place.run(&format!("copy {served} out")).succeeds();
            assert!(place.read("out") == vec![1; 1 << 20]);
        }
        let _ = near.stop();
        far.stop().is_clean();
    }
}

#[test]
fn a_mirror_takes_no_device_twice_after_the_server_of_a_replica_was_restarted() {
    let place = volumes();
    let far = Server::start(&place, "--nbd 127.0.0.1:0 b");
    let (nvme, nbd, b) = (far.address().to_owned(), nbd_address(&far), far.target("b"));
    let export = format!("nbd://{nbd}/b");
    place.run(&format!("mirror create a {export}")).succeeds();
    let mirror = format!("mirror:a,{export}");
    let near = Server::start(&place, &mirror);
    until(&place, &near, 0);
    let twice = format!("mirror add {mirror} {b} --force");
    place.run(&twice).fails(3, &["are the same device: "]);
    far.kill();
    until(&place, &near, 4);
    let far = Server::start_at(&place, &format!("--listen {nvme} --nbd {nbd} b"));
    until(&place, &near, 0);
    place.run(&twice).fails(3, &["are the same device: "]);
    near.stop().is_clean();
    far.stop().is_clean();
}

/// What lies below a name is compared, whatever is in between: a part, a fault, a UUID that stays, another server.
#[test]
fn another_device_below_the_same_name_is_not_used_after_a_restart() {
    const UUID: &str = ", uuid = \"6fa4c2d8-32c1-4fd0-8c28-d4f6b1f0e0aa\"";
    for (form, uuid, has_gateway) in [
        ("offset:0..127,", "", false),
        ("fault:[delay=1us@1],", "", false),
        ("", UUID, false),
        ("raw:", UUID, false),
        ("", "", true),
        ("offset:0..127,raw:", "", true),
    ] {
        let place = volumes();
        for plain in ["a", "b"].into_iter().filter(|_| form.ends_with("raw:")) {
            place.write(plain, &vec![1; 1 << 20]);
        }
        place.write("far.toml", exported(&format!("{form}b"), uuid).as_bytes());
        let serve = |at: &str| Server::start_at(&place, &format!("--config {at}"));
        let far = serve("far.toml --listen 127.0.0.1:0 --nbd 127.0.0.1:0");
        let far_at = format!("far.toml --listen {} --nbd {}", far.address(), nbd_address(&far));
        let mut export = format!("nbd://{}/x", nbd_address(&far));
        let gateway = has_gateway.then(|| {
            place.write("gateway.toml", exported(&export, "").as_bytes());
            serve("gateway.toml --listen 127.0.0.1:0 --nbd 127.0.0.1:0")
        });
        let gateway_at =
            gateway.as_ref().map(|it| format!("gateway.toml --listen {} --nbd {}", it.address(), nbd_address(it)));
        if let Some(gateway) = &gateway {
            export = format!("nbd://{}/x", nbd_address(gateway));
        }
        let near = Server::start(&place, &export);
        let nqn = near.ready["subsystems"][0]["nqn"].as_str().unwrap();
        let served = format!("nvme+tcp://{}/{nqn}?timeout=2s", near.address());
        place.run(&format!("copy {served} out")).succeeds();
        if let Some(gateway) = gateway {
            gateway.kill();
        }
        far.kill();
        until(&place, &near, 4);
        std::fs::rename(place.path("b"), place.path("old")).unwrap();
        std::fs::rename(place.path("a"), place.path("b")).unwrap();
        let far = serve(&far_at);
        let gateway = gateway_at.map(|at| serve(&at));
        let read = place.run(&format!("copy {served} out --force"));
        assert_ne!(read.status, 0, "{form} {uuid} {has_gateway}");
        let _ = near.stop();
        if let Some(gateway) = gateway {
            gateway.stop().is_clean();
        }
        far.stop().is_clean();
    }
}

/// The same for what has no name of its own: other blocks of the same device, and memory that is blank again under a UUID that stays.
#[test]
fn other_blocks_of_the_same_device_and_blank_memory_are_not_used_after_a_restart() {
    const UUID: &str = ", uuid = \"6fa4c2d8-32c1-4fd0-8c28-d4f6b1f0e0aa\"";
    for (before, after, uuid, is_nbd) in [
        ("offset:0..127,b", "offset:128..255,b", "", true),
        ("offset:0..127,b", "offset:128..255,b", UUID, false),
        ("offset:1..120,offset:0..127,raw:c", "offset:2..121,offset:0..127,raw:c", UUID, true),
        ("stripe-nolabel:raw:c,raw:d", "stripe-4KiB-nolabel:raw:c,raw:d", UUID, true),
        ("mem:1MiB", "mem:1MiB", UUID, true),
        ("mem:1MiB", "mem:1MiB", UUID, false),
    ] {
        let place = volumes();
        place.write("c", &vec![3; 1 << 20]);
        place.write("d", &vec![4; 1 << 20]);
        let serve = |target: &str, at: &str| {
            place.write("far.toml", exported(target, uuid).as_bytes());
            Server::start_at(&place, &format!("--config far.toml {at}"))
        };
        let far = serve(before, "--listen 127.0.0.1:0 --nbd 127.0.0.1:0");
        let far_at = format!("--listen {} --nbd {}", far.address(), nbd_address(&far));
        let namespace = format!("{}?{LONG}", far.target("x"));
        let near = match is_nbd {
            true => Server::start(&place, &format!("nbd://{}/x", nbd_address(&far))),
            false => Server::start(&place, &namespace),
        };
        let nqn = near.ready["subsystems"][0]["nqn"].as_str().unwrap();
        let served = format!("nvme+tcp://{}/{nqn}?timeout=2s", near.address());
        place.run(&format!("copy {served} out")).succeeds();
        far.kill();
        until(&place, &near, 4);
        let far = serve(after, &far_at);
        let read = place.run(&format!("copy {served} out --force"));
        assert_ne!(read.status, 0, "{before} {after} {is_nbd}");
        let _ = near.stop();
        far.stop().is_clean();
    }
}
