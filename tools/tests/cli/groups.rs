//! Targets made of several.

use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::common::server::Server;
use crate::common::{Place, noise};

/// A stripe of two volumes of 8 MiB with this content.
fn striped(place: &Place, data: &[u8]) {
    for member in ["a", "b"] {
        place.run(&format!("create {member} --size 8MiB --guard crc16")).succeeds();
    }
    place.write("data", data);
    place.run("copy data stripe:a,b").succeeds();
}

#[test]
fn a_stripe_is_one_device_and_its_members_are_devices() {
    let (place, data) = (Place::new(), noise(3, 16 << 20));
    striped(&place, &data);
    assert!(place.blocks("stripe:a,b", 0, 4095) == data);
    place.run("verify stripe:a,b").succeeds();
    place.run("verify a").succeeds();
    let chunk = 64 << 10;
    assert!(place.blocks("b", 0, 15) == data[chunk..2 * chunk]);
    place.run("compare stripe:a,b data").succeeds();
    let info = place.run("info stripe:a,b --json").succeeds().json();
    assert_eq!((&info["bytes"], &info["kind"]), (&(16 << 20).into(), &"stripe".into()));
    assert_eq!(info["members"].as_array().unwrap().len(), 2);
    assert_eq!(
        (&info["members"][1]["kind"], &info["abilities"]["verify"]),
        (&"protected volume".into(), &"native".into())
    );
}

#[test]
fn a_stripe_opens_only_as_it_was_made_and_says_how_that_was() {
    let (place, data) = (Place::new(), noise(3, 16 << 20));
    striped(&place, &data);
    place.run("create c --size 8MiB --guard crc16").succeeds();
    for command in ["verify", "info", "zero", "copy data"] {
        place.run(&format!("{command} stripe:b,a")).fails(3, &["another order", "try: stripe:a,b"]);
        place.run(&format!("{command} stripe-4KiB:a,b")).fails(3, &["chunks of 64 KiB", "try: stripe-64KiB:a,b"]);
        place.run(&format!("{command} stripe:a,c")).fails(3, &["member 1 has no label", "1 is c"]);
        place.run(&format!("{command} stripe:a,b,c")).fails(3, &["has 2 members, and 3 are given"]);
    }
    place.run("verify stripe-64KiB:a,b").succeeds();
    assert!(place.blocks("stripe:a,b", 0, 4095) == data);
    // Another stripe's member, and a mirror's.
    for name in ["x", "y", "m", "n"] {
        place.run(&format!("create {name} --size 8MiB --guard crc16")).succeeds();
    }
    place.run("zero stripe:x,y --range 0").succeeds();
    place.run("verify stripe:a,y").fails(3, &["another stripe"]);
    place.run("zero mirror:m,n --range 0").succeeds();
    place.run("verify stripe:m,n").fails(3, &["member 0 has the label of another group"]);
    let refused = place.run("verify mirror:a,b");
    refused.fails(3, &["a: it is a member of a stripe", "try: use stripe:A,B with all members"]);
    assert!(!refused.stderr.contains("create"), "{}", refused.stderr);
    let refused = place.run("mirror add mirror:m,n a");
    refused.fails(3, &["a is a device whose label cannot be used: it is a member of a stripe"]);
    assert!(place.blocks("stripe:a,b", 0, 4095) == data);
}

/// More than is checked on one core.
#[test]
fn a_long_repair_of_what_has_no_copies_checks_it_and_repairs_nothing() {
    let place = Place::new();
    for member in ["a", "b"] {
        place.run(&format!("create {member} --size 66MiB")).succeeds();
    }
    place.write("data", &noise(3, 1 << 20));
    place.run("copy data stripe:a,b").succeeds();
    place.run("verify stripe:a,b --repair").succeeds().says(&["33792 blocks verified", ": clean"]);
    place.run("verify a --repair").succeeds().says(&["16896 blocks verified", ": clean"]);
    place.run("corrupt a --lba 3 --kind data").succeeds();
    let repair = place.run("verify stripe:a,b --repair");
    assert!(repair.ends_with(1).stderr.contains("has no other copy of its blocks"), "{}", repair.stderr);
}

#[test]
fn members_without_labels_are_a_stripe_only_by_stripe_nolabel() {
    let (place, data) = (Place::new(), noise(4, 1 << 20));
    for name in ["a", "b"] {
        place.run(&format!("create {name} --size 1MiB")).succeeds();
    }
    place.write("data", &data);
    place.run("copy data b").succeeds();
    place.run("verify stripe:a,b").fails(3, &["no label", "hold data", "stripe-nolabel:a,b"]);
    place.run("copy data stripe:a,b").fails(3, &["stripe-nolabel:a,b"]);
    assert!(place.blocks("b", 0, 255) == data);
    place.run("copy data stripe:a,b --no-label").succeeds();
    assert!(place.blocks("stripe-nolabel:a,b", 0, 255) == data);
    place.run("verify stripe:a,b --no-label").succeeds();
    place.write("f", &[0; 65536]);
    place.write("g", &[0; 65536]);
    place.run("info stripe:raw:f,raw:g").fails(3, &["no room for the label", "stripe-nolabel:raw:f,raw:g"]);
    place.run("info stripe-4KiB-nolabel:raw:f,raw:g").succeeds();
}

/// The layers hide the labels from the stripe, as they do from who writes to a member.
#[test]
fn labels_below_other_layers_are_believed_by_stripe_nolabel_too() {
    let (place, data) = (Place::new(), noise(3, 1 << 20));
    for member in ["a", "b", "c", "d"] {
        place.run(&format!("create {member} --size 512KiB")).succeeds();
    }
    place.write("data", &data);
    place.run("copy data stripe:a,b").succeeds();
    let order = "another order";
    for (target, why) in [
        ("stripe-nolabel:[multipath:b,b],a", order),
        ("stripe-nolabel:b,[multipath:a,a]", order),
        ("stripe-nolabel:[multipath:b,b],[multipath:a,a]", order),
        ("stripe-nolabel:[offset:0..,b],[offset:0..,a]", order),
        ("stripe-nolabel:[offset:16..,b],[offset:16..,a]", order),
        ("stripe-nolabel:[fault:[flush-error%1],offset:0..,b],a", order),
        ("stripe-16KiB-nolabel:[multipath:a,a],[multipath:b,b]", "chunks of 64 KiB"),
        ("stripe-nolabel:[offset:0..,a],b,c", "has 2 members, and 3 are given"),
    ] {
        for command in ["copy", "verify"] {
            let command = format!("{command} {target}{}", if command == "copy" { " out" } else { "" });
            place.run(&command).fails(3, &[why]);
        }
    }
    let refused = place.run("verify stripe-nolabel:[multipath:b,b],a");
    assert!(refused.stderr.contains("try: 'stripe-nolabel:a,[multipath:b,b]'"), "{}", refused.stderr);
    for target in ["stripe-nolabel:a,[multipath:b,b]", "stripe-nolabel:[offset:0..,a],[offset:0..,b]"] {
        assert!(place.blocks(target, 0, 255) == data, "{target}");
        place.run(&format!("verify {target}")).succeeds();
        place.run(&format!("zero {target} --range 0")).fails(3, &["member"]);
    }
    let server = Server::start(&place, "a b --protection shown --as-member");
    let (a, b) = (server.target("a"), server.target("b"));
    place.run(&format!("verify stripe-nolabel:[multipath:{b},{b}],{a}")).fails(3, &[order]);
    place.run(&format!("verify stripe-nolabel:[multipath:{a},{a}],{b}")).succeeds();
    server.stop().is_clean();
    // Members without labels have no order to be wrong.
    place.run("copy data stripe-nolabel:c,d").succeeds();
    place.run("verify stripe-nolabel:[multipath:d,d],c").succeeds();
}

#[test]
fn labels_that_are_there_are_believed_by_stripe_nolabel_too() {
    let (place, data) = (Place::new(), noise(4, 1 << 20));
    for name in ["a", "b"] {
        place.run(&format!("create {name} --size 1MiB")).succeeds();
    }
    place.write("data", &data);
    place.run("copy data stripe:a,b").succeeds();
    for target in ["stripe-nolabel:b,a", "stripe-16KiB-nolabel:a,b", "stripe-nolabel:a,b,a"] {
        for command in ["copy TARGET out", "verify TARGET", "compare TARGET data", "info TARGET"] {
            place.run(&command.replace("TARGET", target)).fails(3, &["a,b"]);
        }
    }
    assert!(place.blocks("stripe-nolabel:a,b", 0, 255) == data);
}

#[test]
fn a_first_labelling_that_was_cut_short_is_finished() {
    let place = Place::new();
    for name in ["a", "b"] {
        place.run(&format!("create {name} --size 1MiB")).succeeds();
    }
    let blank = place.read("b");
    place.run("zero stripe:a,b --range 0").succeeds();
    place.write("b", &blank);
    place.run("verify stripe:a,b").succeeds();
    place.run("zero stripe:a,b --range 0").succeeds();
    place.run("verify stripe:b,a").fails(3, &["another order"]);
    // Once it holds something, a blank device is another one.
    place.write("data", &noise(1, 2 << 20));
    place.run("copy data stripe:a,b").succeeds();
    place.write("b", &blank);
    place.run("verify stripe:a,b").fails(3, &["member 1 has no label"]);
}

#[test]
fn a_mirror_of_stripes_keeps_both_kinds_of_labels() {
    let (place, data) = (Place::new(), noise(6, 2 << 20));
    for name in ["a", "b", "c"] {
        let size = if name == "c" { 2 } else { 1 };
        place.run(&format!("create {name} --size {size}MiB")).succeeds();
    }
    place.write("data", &data);
    place.run("copy data mirror:[stripe:a,b],c").succeeds();
    place.run("verify mirror:[stripe:a,b],c").succeeds();
    place.run("compare stripe:a,b c").succeeds();
    place.run("verify mirror:[stripe:b,a],c").ends_with(3);
    place.run("zero stripe:a,b").fails(3, &["member 1 of 2 of mirror"]);
    place.run("zero a").fails(3, &["member 1 of 2 of stripe"]);
    assert!(place.blocks("mirror:[stripe:a,b],c", 0, 511) == data);
}

#[test]
fn damage_of_a_stripe_names_the_member() {
    let place = Place::new();
    striped(&place, &noise(3, 16 << 20));
    place.run("corrupt b --lba 2 --kind data").succeeds();
    place.run("corrupt a --lba 17 --kind ref-tag").succeeds();
    let report = place.run("verify stripe:a,b --json").ends_with(1).json();
    let found: Vec<_> = report["errors"]
        .as_array()
        .unwrap()
        .iter()
        .map(|error| {
            (error["lba"].as_u64().unwrap(), error["member"].as_str().unwrap(), error["field"].as_str().unwrap())
        })
        .collect();
    assert_eq!(found, [(18, "b", "guard"), (33, "a", "ref_tag")]);
    place.run("copy offset:18..18,stripe:a,b -").fails(3, &["damaged"]);
}

#[test]
fn members_of_different_stripes_are_refused() {
    let place = Place::new();
    place.run("create a --size 8MiB --guard crc16").succeeds();
    place.run("create b --size 8MiB --guard crc64").succeeds();
    place.run("info stripe:a,b").fails(3, &["stripe:a,b", "different formats"]);
    place.run("zero stripe:a,a").fails(3, &["same device or file"]);
    place.run("info stripe-5KiB:mem:1MiB,mem:1MiB").fails(3, &["not a power of two"]);
    place.run("info stripe:a,missing").fails(3, &["missing"]);
    place.run("verify a").succeeds();
}

#[test]
fn a_stripe_is_served_and_stripes_nest() {
    let (place, data) = (Place::new(), noise(5, 4 << 20));
    place.write("data", &data);
    let server = Server::start(&place, "stripe:mem:4MiB,[stripe-8KiB:mem:2MiB,mem:2MiB]");
    let name = server.ready["subsystems"][0]["nqn"].as_str().unwrap().to_owned();
    let target = format!("nvme+tcp://{}/{name}", server.address());
    place.run(&format!("copy data {target}")).succeeds();
    assert!(place.blocks(&target, 0, 1023) == data);
    place.run(&format!("copy data stripe-nolabel:[offset:0..511,{target}],[offset:512..1023,{target}]")).succeeds();
    place.run(&format!("compare stripe-nolabel:[offset:0..511,{target}],[offset:512..1023,{target}] data")).succeeds();
    server.stop().is_clean();
}

#[test]
fn paths_to_one_namespace_are_one_device() {
    let (place, data) = (Place::new(), noise(7, 4 << 20));
    place.run("create v --size 4MiB --guard crc32c").succeeds();
    place.write("data", &data);
    let server = Server::start(&place, "v --protection shown");
    let (v, port) = (server.target("v"), server.address().split_once(':').unwrap().1.to_owned());
    let other = v.replace("127.0.0.1", "127.0.0.2");
    let there = format!("multipath:{v},{v}?ddgst&timeout=3s");
    place.run(&format!("copy data {there}")).succeeds();
    assert!(place.blocks(&there, 0, 1023) == data);
    let info = place.run(&format!("info {there} --json")).succeeds().json();
    let paths: Vec<_> = info["paths"].as_array().unwrap().iter().map(|path| path["live"].clone()).collect();
    assert_eq!((paths, info["members"].as_array().unwrap().len()), (vec![true.into(), true.into()], 2));
    assert_eq!(info["protection"]["guard"], "crc32c");
    // The other address has no listener: one path is enough.
    let half = format!("multipath:{other},{v}");
    let verified = place.run(&format!("verify {half} --json")).succeeds().json();
    assert_eq!((&verified["offloaded"], &verified["bytes_transferred"]), (&true.into(), &0.into()));
    let text = place.run(&format!("info {half}"));
    text.succeeds()
        .says(&[&format!("{other}?timeout=5s&keepalive=5s&reconnect=0ms: not live: "), &format!(":{port}/")]);
    place.run(&format!("info multipath:{other},{other}")).fails(3, &["cannot connect to"]);
    server.stop().is_clean();
    place.run("verify v").succeeds();
    assert!(place.blocks("v", 0, 1023) == data);
}

#[test]
fn paths_to_different_devices_are_refused() {
    let place = Place::new();
    let server = Server::start(&place, "mem:1MiB null:1MiB");
    let (mem, null) = (server.target("mem"), server.target("null"));
    place.run(&format!("info multipath:{mem},{mem}")).succeeds();
    place.run(&format!("info multipath:{mem},{null}")).fails(3, &["another device"]);
    place.run(&format!("info multipath:[offset:0..9,{mem}],[offset:10..19,{mem}]")).fails(3, &["another device"]);
    place.run("info multipath:mem:1MiB,mem:1MiB").fails(3, &["no identity to compare"]);
    server.stop().is_clean();
}

#[test]
fn two_servers_of_copies_of_a_volume_are_two_devices_and_two_listeners_of_one_server_are_one() {
    let (place, data) = (Place::new(), noise(7, 4 << 20));
    place.volume("--size 4MiB", &noise(1, 4 << 20));
    std::fs::copy(place.path("v"), place.path("w")).unwrap();
    place.write("later", &data);
    let one = Server::start(&place, "v --listen 127.0.0.1:0");
    let other = Server::start(&place, "w");
    let (v, w) = (one.target("v"), other.target("w"));
    let port = |at: usize| one.ready["listeners"][at].as_str().unwrap().to_owned();
    for paths in [format!("{v},{w}"), format!("{w},{v}")] {
        for command in [format!("copy later multipath:{paths}"), format!("verify multipath:{paths}")] {
            let refused = place.run(&command);
            refused.fails(
                3,
                &["another device than the other paths: namespace ", "copies of a volume have the same UUID"],
            );
            for name in ["nqn.2026-11.io.sealblock:v, serial number", "nqn.2026-11.io.sealblock:w, serial number"] {
                assert!(refused.stderr.contains(name), "{}", refused.stderr);
            }
        }
    }
    for copy in [&v, &w] {
        place.run(&format!("compare {copy} data")).succeeds();
    }
    assert_ne!(port(0), port(1));
    let both = format!("multipath:{v},{}", v.replace(&port(0), &port(1)));
    place.run(&format!("copy later {both}")).succeeds();
    assert!(place.blocks(&both, 0, 1023) == data);
    one.stop().is_clean();
    other.stop().is_clean();
}

#[test]
fn a_path_that_comes_back_as_a_copy_is_not_used_before_it_leads_to_the_volume_again() {
    let place = Place::new();
    place.volume("--size 4MiB", &noise(1, 4 << 20));
    std::fs::copy(place.path("v"), place.path("w")).unwrap();
    let far = Server::start(&place, "v");
    let (address, v) = (far.address().to_owned(), format!("{}?timeout=3s&keepalive=3s", far.target("v")));
    let front = Server::start(&place, &format!("multipath:{v},{v}"));
    let target = front.target("multipath");
    let until = |what: &str| {
        let start = Instant::now();
        while !place.run(&format!("status {} --json", front.pid())).text().contains(what) {
            assert!(start.elapsed() < Duration::from_secs(60), "{what} did not come");
            sleep(Duration::from_millis(50));
        }
    };
    far.kill();
    let (listener, subsystem) = (format!("[[listeners]]\naddress = \"{address}\"\n"), "[[subsystems]]\nname = \"v\"\n");
    let config = format!("{listener}{subsystem}serial = \"OTHER\"\n[[subsystems.namespaces]]\ntarget = \"w\"\n");
    place.write("copy.toml", config.as_bytes());
    let copy = Server::start_at(&place, "--config copy.toml");
    until("another device than the other paths");
    until("serial number \\\"OTHER\\\"");
    copy.stop().is_clean();
    let far = Server::start_at(&place, &format!("v --listen {address}"));
    until("\"health\":\"healthy\"");
    place.write("later", &noise(2, 4 << 20));
    place.run(&format!("copy later {target}")).succeeds();
    front.stop();
    far.stop().is_clean();
    place.run("compare v later").succeeds();
    place.run("compare w data").succeeds();
}

#[test]
fn exports_over_nbd_are_no_paths_to_one_device() {
    let place = Place::new();
    place.run("create v --size 4MiB").succeeds();
    let server = Server::start(&place, "v --nbd 127.0.0.1:0");
    let v = format!("nbd://{}/v", server.ready["nbd"]["listeners"][0].as_str().unwrap());
    place.run(&format!("info multipath:{v},{v}")).fails(3, &["no identity to compare"]);
    server.stop().is_clean();
}

#[test]
fn a_degraded_mirror_is_told_below_parts_and_groups_too() {
    let place = Place::with_runtime("syscalls");
    for name in ["a", "b", "c"] {
        place.run(&format!("create {name} --size 1MiB")).succeeds();
    }
    place.run("mirror create a b").succeeds();
    let names =
        ["mirror:a,b", "offset:0..9,mirror:a,b", "fault:[delay=1ms@3],mirror:a,b", "stripe-nolabel:[mirror:a,b],c"];
    names.iter().for_each(|name| drop(place.run(&format!("info {name}")).succeeds().text()));
    std::fs::rename(place.path("b"), place.path("b.away")).unwrap();
    place.run("zero mirror:a,b --range 3").ends_with(4);
    for name in names {
        place.run(&format!("info {name}")).ends_with(4);
    }
}

#[test]
fn a_replica_without_room_for_a_label_is_said_to_be_known_by_its_name() {
    let place = Place::with_runtime("syscalls");
    place.run("create g --size 1MiB --guard none --block-size 512").succeeds();
    place.write("f", b"");
    place.set_len("f", 1 << 20);
    place.run("mirror create g raw:f").succeeds();
    let told = place.run("mirror status mirror:g,raw:f").succeeds().text();
    assert!(told.contains("raw:f: in sync, without a label: known only by its name\n"), "{told}");
    let replicas = place.run("mirror status mirror:g,raw:f --json").succeeds().json()["replicas"].clone();
    assert_eq!((&replicas[0]["has_label_room"], &replicas[1]["has_label_room"]), (&true.into(), &false.into()));
    place.run("create a --size 1MiB").succeeds();
    place.run("create b --size 1MiB").succeeds();
    let told = place.run("mirror create a b").succeeds().text();
    assert!(!told.contains("label"), "{told}");
}

#[test]
fn two_memories_are_two_devices_and_one_that_is_given_a_uuid_keeps_it() {
    let place = Place::new();
    let uuid = |server: &Server| server.ready["subsystems"][0]["namespaces"][0]["uuid"].as_str().unwrap().to_owned();
    let (one, other) = (Server::start(&place, "mem:1MiB"), Server::start(&place, "mem:1MiB"));
    assert_ne!(uuid(&one), uuid(&other));
    let (a, b) = (one.target("mem"), other.target("mem"));
    place.run(&format!("info multipath:{a},{b}")).fails(3, &["it leads to another device than the other paths"]);
    place.run(&format!("copy {a} {b}")).succeeds();
    one.stop().is_clean();
    other.stop().is_clean();
    let fixed = "6ba7b810-9dad-11d1-80b4-00c04fd430c8";
    let space =
        format!("[[subsystems]]\nname = \"m\"\nnamespaces = [{{ target = \"mem:1MiB\", uuid = \"{fixed}\" }}]\n");
    place.write("sealblock.toml", space.as_bytes());
    for _ in 0..2 {
        let server = Server::start_at(&place, "--listen 127.0.0.1:0");
        assert_eq!(uuid(&server), fixed);
        server.stop().is_clean();
    }
}

#[test]
fn a_mirror_takes_no_name_of_itself_as_a_replica() {
    let place = Place::new();
    for name in ["a", "b"] {
        place.run(&format!("create {name} --size 1MiB")).succeeds();
    }
    place.run("mirror create a b").succeeds();
    let server = Server::start(&place, "mirror:a,b --protection shown");
    let itself = server.target("mirror");
    for command in [format!("mirror add mirror:a,b {itself}"), format!("mirror replace mirror:a,b b {itself}")] {
        place.run(&format!("{command} --force")).fails(3, &["is this mirror itself, as it is served"]);
        let replicas = place.run("mirror status mirror:a,b --json").succeeds().json()["replicas"].clone();
        assert_eq!(replicas.as_array().unwrap().len(), 2, "{replicas}");
    }
    server.stop().is_clean();
}
