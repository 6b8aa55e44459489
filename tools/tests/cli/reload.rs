//! SIGHUP: what changes, what stays, and what is refused.

use crate::common::Place;
use crate::common::server::{Nbd, Server};
use serde_json::Value;

fn subsystem(name: &str, more: &str, target: &str) -> String {
    format!("[[subsystems]]\nname = \"{name}\"\n{more}[[subsystems.namespaces]]\ntarget = \"{target}\"\n")
}

/// Has a server read this configuration.
#[track_caller]
fn reload(place: &Place, server: &mut Server, text: &str) -> Value {
    place.write("sealblock.toml", text.as_bytes());
    server.signal("HUP");
    server.event()
}

fn names(event: &Value) -> Vec<String> {
    let subsystems = event["subsystems"].as_array().unwrap().iter();
    subsystems.map(|subsystem| subsystem["nqn"].as_str().unwrap().rsplit(':').next().unwrap().to_owned()).collect()
}

#[test]
fn subsystems_and_namespaces_come_and_go_while_others_are_used() {
    let place = Place::new();
    for name in ["v", "w"] {
        place.run(&format!("create {name} --size 8MiB")).succeeds();
    }
    place.write("data", &crate::common::noise(1, 1 << 20));
    let (v, mem) = (subsystem("a", "", "v"), subsystem("m", "", "mem:1MiB"));
    place.write("sealblock.toml", format!("{v}{mem}").as_bytes());
    let mut server = Server::start_at(&place, "--listen 127.0.0.1:0");
    place.run(&format!("copy data {}", server.target("m"))).succeeds();

    let w = subsystem("b", "", "w");
    let event = reload(&place, &mut server, &format!("{mem}{w}"));
    assert_eq!((&event["event"], names(&event)), (&"reloaded".into(), vec!["m".to_owned(), "b".to_owned()]));
    assert_eq!(event["listeners"], server.ready["listeners"], "the listener stays");
    place.run(&format!("verify {}", server.target("b"))).succeeds();
    place.run(&format!("verify {}", server.target("a"))).fails(3, &["no such subsystem"]);
    // What is served no more is closed, and free for others.
    assert_eq!(place.run("info v --json").succeeds().json()["volume"]["clean"], true);
    place.run("verify w").fails(3, &["in use"]);
    assert!(place.blocks(&server.target("m"), 0, 255) == place.read("data"), "memory that stays keeps its content");

    let more = "[[subsystems.namespaces]]\nnsid = 5\ntarget = \"v\"\n";
    let event = reload(&place, &mut server, &format!("{mem}{w}{more}"));
    assert_eq!(event["subsystems"][1]["namespaces"][1]["nsid"], 5);
    place.run(&format!("verify {}/5", server.target("b"))).succeeds();
    place.run(&format!("verify {}", server.target("b"))).fails(3, &["give one of the active namespaces", "/NSID"]);
    // A volume moves to another name without being closed in between.
    let event = reload(&place, &mut server, &format!("{mem}{}", subsystem("c", "", "v")));
    assert_eq!(names(&event), ["m", "c"]);
    place.run(&format!("verify {}", server.target("c"))).succeeds();
    place.run("verify w").succeeds();
    server.stop().is_clean();
    place.run("verify v").succeeds();
}

#[test]
fn a_subsystem_is_the_same_whatever_namespaces_it_has() {
    let place = Place::new();
    let space = |nsid: u32| format!("[[subsystems.namespaces]]\nnsid = {nsid}\ntarget = \"mem:1MiB\"\n");
    let named = "[[subsystems]]\nname = \"a\"\n".to_owned();
    place.write("sealblock.toml", named.as_bytes());
    let mut server = Server::start_at(&place, "--listen 127.0.0.1:0");
    let serial = server.ready["subsystems"][0]["serial"].clone();
    place.run(&format!("info {}/1", server.target("a"))).fails(3, &["namespace"]);
    for nsids in [&[1, 2][..], &[2], &[], &[1024]] {
        let spaces: String = nsids.iter().map(|nsid| space(*nsid)).collect();
        let event = reload(&place, &mut server, &format!("{named}{spaces}"));
        assert_eq!((&event["event"], &event["subsystems"][0]["serial"]), (&"reloaded".into(), &serial));
        for nsid in nsids {
            place.run(&format!("info {}/{nsid}", server.target("a"))).succeeds();
        }
    }
    server.stop().is_clean();
}

#[test]
fn hosts_and_listeners_change() {
    let place = Place::new();
    let listener = "[[listeners]]\naddress = \"127.0.0.1:0\"\n";
    place.write("sealblock.toml", format!("{listener}{}", subsystem("m", "", "mem:1MiB")).as_bytes());
    let mut server = Server::start_at(&place, "");
    let host = "nqn.2026-01.org.example:host";
    let mem = server.target("m");
    place.run(&format!("info {mem}?hostnqn=nqn.2026-01.org.example:other")).succeeds();
    let one = subsystem("m", &format!("hosts = [\"{host}\"]\n"), "mem:1MiB");
    let six = "[[listeners]]\naddress = \"[::1]:0\"\n";
    let event = reload(&place, &mut server, &format!("{listener}{six}{one}"));
    assert_eq!(event["listeners"].as_array().unwrap().len(), 2);
    assert_eq!(event["listeners"][0], server.ready["listeners"][0]);
    place.run(&format!("info {mem}?hostnqn={host}")).succeeds();
    place.run(&format!("info {mem}?hostnqn=nqn.2026-01.org.example:other")).fails(3, &["refused"]);
    let there = mem.replace(server.address(), event["listeners"][1].as_str().unwrap());
    place.run(&format!("info {there}?hostnqn={host}")).succeeds();
    let event = reload(&place, &mut server, &format!("{six}{one}"));
    assert_eq!(event["listeners"].as_array().unwrap().len(), 1);
    place.run(&format!("info {there}?hostnqn={host}")).succeeds();
    place.run(&format!("info {mem}?hostnqn={host}")).fails(3, &["cannot connect to"]);
    server.stop().is_clean();
}

#[test]
fn what_cannot_be_is_reported_and_everything_stays() {
    let place = Place::new();
    place.run("create v --size 1MiB").succeeds();
    place.run("create w --size 1MiB").succeeds();
    let v = subsystem("a", "", "v");
    place.write("sealblock.toml", v.as_bytes());
    let mut server = Server::start_at(&place, "--listen 127.0.0.1:0");
    let bad = [
        ("name =".to_owned(), "line 1"),
        (subsystem("b", "colour = 1\n", "w"), "unknown field `colour`"),
        (format!("{}{}", subsystem("b", "", "w"), subsystem("c", "", "nosuch")), "no such file"),
        (subsystem("b", "", "mem:1MiB") + "protection = \"shown\"\n", "no protection information"),
        (subsystem("a", "", "v") + "read_only = true\n", "the other setting"),
        (format!("{v}{}", subsystem("b", "", "v")), "given twice"),
    ];
    for (text, why) in bad {
        let event = reload(&place, &mut server, &text);
        assert_eq!(event["event"], "reload_failed", "{text}");
        assert!(event["reason"].as_str().unwrap().contains(why), "{why}: {event}");
        place.run(&format!("verify {}", server.target("a"))).succeeds();
        place.run("verify w").succeeds();
    }
    let event = reload(&place, &mut server, &format!("[limits]\nconnections = 9\n{v}"));
    assert_eq!(event["event"], "reloaded");
    let ended = server.stop();
    ended.is_clean();
    assert!(ended.stderr.contains("the old configuration stays in effect"), "{}", ended.stderr);
    assert!(ended.stderr.contains("take effect at the next start"), "{}", ended.stderr);
}

/// A reload that would open the same target in another way is refused, and nothing of its content changes, wherever that lies.
#[test]
fn a_target_of_any_kind_is_served_on_as_it_is_or_the_reload_says_no() {
    let place = Place::new();
    crate::common::filled(&place, 256);
    for volume in ["v", "remote"] {
        place.run(&format!("create {volume} --size 1MiB")).succeeds();
        place.run(&format!("copy data {volume}")).succeeds();
    }
    place.run("create plain --size 1MiB").succeeds();
    let other = Server::start_at(&place, "remote --listen 127.0.0.1:0 --nbd 127.0.0.1:0");
    let (nvme, nbd) = (other.target("remote"), other.ready["nbd"]["listeners"][0].as_str().unwrap().to_owned());
    let nbd = format!("nbd://{nbd}/remote");
    for target in ["v", "mirror:a,b", "mem:1MiB", &nvme, &nbd] {
        place.write("sealblock.toml", subsystem("m", "", target).as_bytes());
        let mut server = Server::start_at(&place, "--listen 127.0.0.1:0");
        let served = server.target("m");
        place.run(&format!("copy data {served}")).succeeds();
        for key in ["read_only = true", "relocate = false"] {
            let event = reload(&place, &mut server, &format!("{}{key}\n", subsystem("m", "", target)));
            assert_eq!(event["event"], "reload_failed", "{target} with {key}");
            assert!(event["reason"].as_str().unwrap().contains("the other setting"), "{target} with {key}: {event}");
            place.run(&format!("compare data {served}")).succeeds();
        }
        server.stop().is_clean();
    }
    other.stop().is_clean();
}

#[test]
fn discovery_names_the_address_that_is_advertised() {
    let place = Place::new();
    let m = subsystem("m", "", "mem:1MiB");
    let listener = |more: &str| format!("[[listeners]]\naddress = \"127.0.0.1:0\"\n{more}{m}");
    place.write("sealblock.toml", listener("advertise = \"192.0.2.7:9\"\n").as_bytes());
    let mut server = Server::start_at(&place, "");
    let named = |server: &Server| {
        let report = place.run(&format!("discover {} --json", server.address())).succeeds().json();
        let entries = report["entries"].as_array().unwrap().clone();
        let named: Vec<_> =
            entries.iter().map(|entry| format!("{}:{}", entry["address"].as_str().unwrap(), entry["port"])).collect();
        assert_eq!(named.len(), 2);
        assert_eq!(named[0], named[1]);
        named[0].clone()
    };
    assert_eq!(named(&server), "192.0.2.7:9");
    reload(&place, &mut server, &listener(""));
    assert_eq!(named(&server), server.address());
    reload(&place, &mut server, &listener("advertise = \"[2001:db8::7]:10\"\n"));
    assert_eq!(named(&server), "2001:db8::7:10");
    server.stop().is_clean();
}

/// A configuration of a mirror, and a server of it whose replica b was replaced by c while a host was there.
fn replaced(place: &Place) -> (Server, impl Fn(&str) -> String) {
    crate::common::filled(place, 256);
    place.run("create c --size 1MiB").succeeds();
    let of = |replicas: &str| subsystem("m", "", &format!("mirror:{replicas}"));
    place.write("sealblock.toml", of("a,b").as_bytes());
    let server = Server::start_at(place, "--listen 127.0.0.1:0 --log info");
    place.run("mirror replace mirror:a,b b c").succeeds().says(&["a: in sync", "c: in sync"]);
    (server, of)
}

#[test]
fn a_mirror_whose_replica_was_replaced_stays_when_its_name_follows() {
    let place = Place::new();
    let (mut server, of) = replaced(&place);
    let uuid = server.ready["subsystems"][0]["namespaces"][0]["uuid"].clone();
    // A host that works all the while, and would fail or come again if its namespace went.
    let target = format!("{}?reconnect=0s&hostnqn=nqn.2026-01.org.example:host", server.target("m"));
    let mut reader = place.start(&format!("verify {target} --rate 256KiB/s --json"));
    std::thread::sleep(std::time::Duration::from_millis(500));
    // In another order, as an operator may write it.
    let event = reload(&place, &mut server, &of("c,a"));
    let space = &event["subsystems"][0]["namespaces"][0];
    assert_eq!((&event["event"], &space["uuid"]), (&"reloaded".into(), &uuid));
    assert_eq!(space["target"], "mirror:c,a");
    assert!(reader.try_wait().unwrap().is_none(), "the host was there during the reload");
    crate::common::answer_of(reader).succeeds();
    let status = place.run(&format!("status {} --json", server.pid())).succeeds().json();
    assert_eq!(status["servers"][0]["devices"][0]["target"], "mirror:c,a");
    let mirrors = &status["servers"][0]["devices"][0]["mirrors"];
    assert_eq!(mirrors[0]["target"], "mirror:c,a", "nothing goes on by the old name");
    assert_eq!(status["servers"][0]["devices"][0]["scrub"]["target"], "mirror:c,a");
    // By its new name it is found, and by the one that it has no more the next reload is refused.
    place.run("mirror status mirror:c,a").succeeds();
    let event = reload(&place, &mut server, &of("a,b"));
    assert_eq!(event["event"], "reload_failed");
    let reason = event["reason"].as_str().unwrap();
    assert!(reason.contains("cannot change 'mirror:a,b': the served mirror has the members a and c"), "{reason}");
    assert!(reason.contains("`sealblock mirror add`, `remove` or `replace`"), "{reason}");
    let ended = server.stop();
    ended.is_clean();
    let of_host = |line: &&Value| line["message"] == "host connected" && line["host"].to_string().contains("host");
    assert_eq!(ended.told().iter().filter(of_host).count(), 1, "{}", ended.stderr);
    // It opens so at the next start.
    place.run("verify mirror:c,a").succeeds();
}

#[test]
fn a_configuration_with_the_old_replica_is_refused_with_the_difference() {
    let place = Place::new();
    let (mut server, of) = replaced(&place);
    // Everything else of it counts.
    let event = reload(&place, &mut server, &format!("{}{}", of("a,b"), subsystem("n", "", "mem:1MiB")));
    assert_eq!((&event["event"], names(&event)), (&"reloaded".into(), vec!["m".to_owned(), "n".to_owned()]));
    place.run(&format!("verify {}", server.target("m"))).succeeds();
    // Members that it never had are nobody's to take in by a name.
    place.run("create d --size 1MiB").succeeds();
    let event = reload(&place, &mut server, &of("a,d"));
    assert_eq!(event["event"], "reload_failed");
    assert!(event["reason"].as_str().unwrap().contains("has the members a and c"), "{event}");
    place.run("verify d").succeeds();
    let ended = server.stop();
    ended.is_clean();
    let told = "the configuration has mirror:a,b, but its members are a and c now: it is served on with these, and would not open so \
         at the next start";
    assert_eq!(ended.told_of(told).len(), 1, "{}", ended.stderr);
    place.run("serve --listen 127.0.0.1:0 mirror:a,b").fails(3, &["was removed"]);
}

#[test]
fn the_number_of_a_namespace_is_given_to_no_other_device_while_a_host_uses_it() {
    let place = Place::new();
    for name in ["v", "w", "x"] {
        place.run(&format!("create {name} --size 8MiB")).succeeds();
    }
    let spaces = |targets: &[(u32, &str)]| {
        let space =
            |(nsid, target): &(u32, &str)| format!("[[subsystems.namespaces]]\nnsid = {nsid}\ntarget = \"{target}\"\n");
        format!("[[subsystems]]\nname = \"a\"\n{}", targets.iter().map(space).collect::<String>())
    };
    place.write("sealblock.toml", spaces(&[(1, "v"), (2, "w")]).as_bytes());
    let mut server = Server::start_at(&place, "--listen 127.0.0.1:0");
    // A host that stays connected, and reads no list of namespaces.
    let mut host = place.start(&format!("verify {}/1 --rate 64KiB/s", server.target("a")));
    let is_connected = |place: &Place| {
        let status = place.run(&format!("status {} --json", server.pid())).json();
        !status["servers"][0]["clients"].as_array().unwrap().is_empty()
    };
    (0..1000).find(|_| is_connected(&place)).expect("the host connects");
    let refused = |event: &Value| {
        assert_eq!(event["event"], "reload_failed", "{event}");
        let reason = event["reason"].as_str().unwrap();
        assert!(
            reason.contains("namespace 1 of nqn.2026-11.io.sealblock:a is another device for the host"),
            "{reason}"
        );
    };
    refused(&reload(&place, &mut server, &spaces(&[(1, "w"), (2, "v")])));
    refused(&reload(&place, &mut server, &spaces(&[(1, "x"), (2, "w")])));
    assert_eq!(reload(&place, &mut server, &spaces(&[(1, "v"), (2, "w"), (3, "x")]))["event"], "reloaded");
    host.kill().unwrap();
    host.wait().unwrap();
    let exchange = (0..1000).find(|_| {
        let event = reload(&place, &mut server, &spaces(&[(1, "w"), (2, "v")]));
        event["event"] == "reloaded"
    });
    assert!(exchange.is_some(), "no host uses it");
    server.stop().is_clean();
}

#[test]
fn the_name_of_an_export_is_given_to_no_other_device_while_a_client_uses_it() {
    let place = Place::new();
    for name in ["v", "w"] {
        place.run(&format!("create {name} --size 1MiB")).succeeds();
    }
    let exports = |exports: &[(&str, &str)]| {
        let space = |(target, name): &(&str, &str)| {
            format!("[[subsystems.namespaces]]\ntarget = \"{target}\"\nnbd = \"{name}\"\n")
        };
        let head = "[[nbd]]\naddress = \"127.0.0.1:0\"\n[[subsystems]]\nname = \"a\"\n";
        head.to_owned() + &exports.iter().map(space).collect::<String>()
    };
    place.write("sealblock.toml", exports(&[("v", "one"), ("w", "two")]).as_bytes());
    let mut server = Server::start_at(&place, "--listen 127.0.0.1:0");
    let address = server.ready["nbd"]["listeners"][0].as_str().unwrap().to_owned();
    let mut change = |to: &[(&str, &str)]| reload(&place, &mut server, &exports(to));
    let is_refused = |event: &Value, what: &str| {
        assert_eq!(event["event"], "reload_failed", "{event}");
        let reason = event["reason"].as_str().unwrap();
        let why = format!("{what} is another device for the client at 127.0.0.1");
        assert!(reason.contains(&why), "{reason}");
    };
    let exchanged = [("v", "two"), ("w", "one")];
    let mut client = Nbd::open(&address, "one").unwrap();
    is_refused(&change(&exchanged), "the export \"one\"");
    assert_eq!(client.write(0, &[7; 4096]), 0, "it goes on");
    // It names its export, so that the order of exports is nothing to it.
    let other_order = [("w", "two"), ("v", "one")];
    assert_eq!(change(&other_order)["event"], "reloaded");
    client.disconnect();
    let exchange = (0..1000).find(|_| change(&exchanged)["event"] == "reloaded");
    assert!(exchange.is_some(), "nobody uses it");
    // A client that names none gets the first one, whichever that is.
    let client = Nbd::open(&address, "").unwrap();
    is_refused(&change(&[("w", "one"), ("v", "two")]), "the default export");
    is_refused(&change(&[("w", "two"), ("v", "one")]), "the default export");
    client.disconnect();
    server.stop().is_clean();
}

#[test]
fn a_file_stays_open_by_each_of_its_names_and_a_name_of_another_file_is_another_device() {
    let place = Place::new();
    for name in ["v", "w"] {
        place.run(&format!("create {name} --size 1MiB")).succeeds();
    }
    std::fs::hard_link(place.path("v"), place.path("hard")).unwrap();
    std::os::unix::fs::symlink("v", place.path("soft")).unwrap();
    place.write("sealblock.toml", subsystem("a", "", "v").as_bytes());
    let mut server = Server::start_at(&place, "--listen 127.0.0.1:0");
    // A client that stays connected.
    let mut host = place.start(&format!("verify {} --rate 64KiB/s", server.target("a")));
    let is_connected = |place: &Place| {
        let status = place.run(&format!("status {} --json", server.pid())).json();
        !status["servers"][0]["clients"].as_array().unwrap().is_empty()
    };
    (0..1000).find(|_| is_connected(&place)).expect("the host connects");
    for name in ["./v", "file:v", "hard", "soft"] {
        assert_eq!(reload(&place, &mut server, &subsystem("a", "", name))["event"], "reloaded", "{name}");
    }
    std::fs::remove_file(place.path("soft")).unwrap();
    std::os::unix::fs::symlink("w", place.path("soft")).unwrap();
    let event = reload(&place, &mut server, &subsystem("a", "", "soft"));
    assert!(event["reason"].as_str().unwrap().contains("is another device for the host"), "{event}");
    host.kill().unwrap();
    host.wait().unwrap();
    let is_reloaded = |_: &i32| reload(&place, &mut server, &subsystem("a", "", "soft"))["event"] == "reloaded";
    (0..1000).find(is_reloaded).expect("no host uses it");
    place.run("verify v").succeeds();
    place.run("verify w").fails(3, &["in use"]);
    server.stop().is_clean();
}

/// A file that was renamed has its new name once a reload names it.
#[test]
fn a_file_that_was_renamed_and_is_named_by_a_reload_is_healthy() {
    let place = Place::new();
    for name in ["v", "a", "b"] {
        place.run(&format!("create {name} --size 1MiB")).succeeds();
    }
    place.run("mirror create a b").succeeds();
    let both = |v: &str, b: &str| [subsystem("v", "", v), subsystem("m", "", &format!("mirror:a,{b}"))].concat();
    place.write("sealblock.toml", both("v", "b").as_bytes());
    let mut server = Server::start_at(&place, "--listen 127.0.0.1:0");
    let status = format!("status {}", server.pid());
    let is = |exit: i32| (0..1000).any(|_| place.run(&status).status == exit);
    for (old, new) in [("v", "w"), ("b", "c")] {
        std::fs::rename(place.path(old), place.path(new)).unwrap();
    }
    assert!(is(4), "both are gone");
    assert_eq!(reload(&place, &mut server, &both("w", "c"))["event"], "reloaded");
    assert!(is(0), "both are there");
    server.stop().is_clean();
    place.run("verify w").succeeds();
    place.run("verify mirror:a,c").succeeds();
}
