//! Mirrors: replicas that go offline and return, are added and removed, and what is refused.

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::Child;
use std::thread;
use std::time::{Duration, Instant};

use crate::common::server::Server;
use crate::common::{Answer, BLOCK, Place, answer_of, filled, noise, verify};

/// A mirror that no name opens is not created; and the name that is shown is one word of a shell.
#[test]
fn a_new_mirror_has_a_name_that_opens_it() {
    let place = Place::with_runtime("syscalls");
    for name in ["[z", "[z2", "a$b", "a", "b"] {
        place.run(&format!("create ./{name} --size 1MiB")).succeeds();
    }
    let before = (place.read("[z"), place.read("a"));
    for command in ["mirror create ./[z ./[z2", "mirror create a ./[z", "mirror add ./[z ./[z2"] {
        place.run(command).fails(2, &["its name cannot be in that of a mirror", "'[' is not closed", "rename it"]);
    }
    assert!((place.read("[z"), place.read("a")) == before, "nothing was written");
    place.run("mirror create ./a$b a").succeeds().says(&["use it as       'mirror:./a$b,a'"]);
    place.run("mirror status mirror:./a$b,a").succeeds();
    for command in ["mirror add mirror:./a$b,a ./[z", "mirror replace mirror:./a$b,a a ./[z"] {
        place.run(command).fails(2, &["its name cannot be in that of a mirror"]);
    }
    std::fs::rename(place.path("a$b"), place.path("c")).unwrap();
    place.run("mirror create c a --force").succeeds();
    place.run("mirror create b ./[z").fails(2, &["rename it"]);
    std::fs::rename(place.path("[z"), place.path("z")).unwrap();
    place.run("mirror create b z").succeeds().says(&["use it as       mirror:b,z"]);
}

#[test]
fn a_replica_that_was_offline_is_resynced_and_not_read_before() {
    let place = Place::with_runtime("syscalls");
    let mut data = filled(&place, 4096);
    let away = |name: &str, back: bool| {
        let hidden = place.path(format!("{name}.away"));
        let (from, to) = if back { (hidden, place.path(name)) } else { (place.path(name), hidden) };
        std::fs::rename(from, to).unwrap();
    };
    away("b", false);
    let piece = noise(77, 600 * BLOCK);
    place.write("piece", &piece);
    let written = place.run("copy piece offset:1000..1599,mirror:a,b");
    assert!(written.ends_with(4).stderr.contains("runs without b"), "{}", written.stderr);
    data[1000 * BLOCK..1600 * BLOCK].copy_from_slice(&piece);
    away("b", true);
    let info = place.run("info mirror:a,b --json").ends_with(4).json();
    assert_eq!(info["mirror"]["replicas"][1]["state"], "out_of_sync");
    assert_eq!(
        info["mirror"]["replicas"][1]["out_of_sync_bytes"],
        38 << 16,
        "the regions of 64 KiB that were written to"
    );
    place.run("copy mirror:b,a out").succeeds();
    assert!(place.read("out") == data, "a stale replica was read");

    // An open for writing starts a resync; a server stays long enough for it.
    let server = Server::start(&place, "--log info mirror:a,b");
    let since = Instant::now();
    thread::sleep(Duration::from_secs(1));
    let ended = server.stop();
    let told = ended.told_of("resync finished");
    assert_eq!(told.len(), 1, "{} after {:?}", ended.stderr, since.elapsed());
    let copied = told[0]["resynced_bytes"].as_u64().unwrap();
    assert!((600 * BLOCK as u64..=38 << 16).contains(&copied), "{copied} bytes were copied");
    place.run("compare a b").succeeds();
    assert!(place.blocks("b", 0, 4095) == data);
}

#[test]
fn replicas_that_were_written_apart_are_refused() {
    let place = Place::with_runtime("syscalls");
    filled(&place, 512);
    let rename = |from: &str, to: &str| std::fs::rename(place.path(from), place.path(to)).unwrap();
    rename("b", "b.away");
    place.run("zero mirror:a,b --range 0..0").ends_with(4);
    rename("a", "a.away");
    rename("b.away", "b");
    place.run("zero mirror:a,b --range 1..1").ends_with(4);
    rename("a.away", "a");
    place.run("copy mirror:a,b out").fails(3, &["split brain", "inspect each replica separately"]);
    place.run("verify mirror:a,b").fails(3, &["split brain"]);
    // One of them is discarded, and a new replica takes its place.
    rename("b", "b.away");
    place.run("create n --size 2MiB").succeeds();
    place.run("mirror replace mirror:a,b b n").succeeds().says(&["n: in sync"]);
    place.run("compare a n").succeeds();
    rename("n", "b");
    place.run("verify mirror:a,b").succeeds();
    // A new volume in the place of a replica is not used until it is added.
    place.run("create b --size 2MiB --force").succeeds();
    place.run("copy data b").succeeds();
    let without = place.run("copy mirror:a,b out");
    assert!(without.succeeds().stderr.contains("runs without b: no label"), "{}", without.stderr);
    assert!(place.read("out") == place.blocks("a", 0, 511));
    place.run("mirror replace mirror:a,b b").fails(3, &["b holds data", "--force"]);
    place.run("mirror replace mirror:a,b b --force").succeeds().says(&["b: in sync"]);
    place.run("compare a b").succeeds();
    verify(&place, "mirror:b,a", 0);
}

#[test]
fn replicas_are_added_replaced_and_removed() {
    let place = Place::with_runtime("syscalls");
    let data = filled(&place, 1024);
    for name in ["c", "d", "small"] {
        let blocks = if name == "small" { 1023 } else { 1024 };
        place.run(&format!("create {name} --size {}", blocks * BLOCK)).succeeds();
    }
    place.run("mirror add mirror:a,b small").fails(3, &["1023 blocks"]);
    place.run("mirror add mirror:a,b a").fails(3, &["in use"]);
    place.run("mirror add a c").fails(3, &["a is replica 0 (in sync) of mirror", "sealblock mirror add"]);
    place.run("mirror add mirror:a,b c").succeeds().says(&["c: in sync"]);
    place.run("compare a c").succeeds();
    place.run("copy mirror:a,c out").succeeds();
    place.run("verify mirror:a,b,c").succeeds();
    place.run("mirror replace mirror:a,b,c x d").fails(2, &["no replica x"]);
    place.run("mirror replace mirror:a,b,c b d").succeeds().says(&["d: in sync"]);
    place.run("copy mirror:a,b out").fails(3, &["was removed"]);
    let status = place.run("mirror status mirror:d,a,c --json").succeeds().json();
    let replicas = status["replicas"].as_array().unwrap().iter();
    assert_eq!(replicas.filter(|replica| replica["state"] == "in_sync").count(), 3);
    place.run("mirror remove mirror:a,c,d a").succeeds();
    place.run("mirror remove mirror:c,d c").succeeds();
    place.run("copy mirror:c,d out").fails(3, &["was removed", "where only one replica is left, that one by itself"]);
    assert!(place.blocks("d", 0, 1023) == data);
    // What is said to help does.
    place
        .run("zero d --range 0")
        .fails(3, &["it is the last replica of mirror", "try: `sealblock mirror add TARGET REPLICA"]);
    place.run("zero d --range 0 --force-member").succeeds();
    place.run("mirror add d c --force").succeeds().says(&["c: in sync"]);
    assert!(place.blocks("mirror:c,d", 1, 1023) == data[BLOCK..]);
}

#[test]
fn blank_devices_without_a_label_are_no_mirror_and_get_no_identity_that_nobody_keeps() {
    let place = Place::with_runtime("syscalls");
    for name in ["a", "b"] {
        place.run(&format!("create {name} --size 1MiB")).succeeds();
    }
    let status = place.run("mirror status mirror:a,b");
    status.ends_with(4).says(&["unlabelled", "no device has a mirror label", "a: unlabelled", "b: unlabelled"]);
    for wrong in ["uuid", "optimal", "in sync", "write intent"] {
        assert!(!status.text().contains(wrong), "{}", status.text());
    }
    let json = place.run("mirror status mirror:a,b --json").ends_with(4).json();
    assert!(json["uuid"].is_null() && json["max_dirty_bytes"].is_null(), "{json}");
    assert_eq!((&json["state"], &json["replicas"][1]["state"]), (&"unlabelled".into(), &"unlabelled".into()));
    let info = place.run("info mirror:a,b");
    assert!(!info.ends_with(4).text().contains("in sync"), "{}", info.text());
    assert_eq!(info.text().matches("uuid").count(), 2, "of the volumes alone: {}", info.text());
    assert!(place.run("info mirror:a,b --json").ends_with(4).json()["mirror"]["uuid"].is_null());
    let server = Server::start(&place, "--read-only mirror:a,b");
    place.run("status mirror:a,b").ends_with(4).says(&["not a mirror yet", "mirror:a,b is unlabelled"]);
    place.run("mirror status mirror:a,b").ends_with(4).says(&["unlabelled"]);
    server.stop().is_clean();
    // The first opening for writing labels them; from then on they have an identity, and it stays.
    place.run("zero mirror:a,b --range 0..0").succeeds();
    let uuid = |answer: &Answer| answer.succeeds().json()["uuid"].as_str().unwrap().to_owned();
    let first = uuid(&place.run("mirror status mirror:a,b --json"));
    assert_eq!(uuid(&place.run("mirror status mirror:b,a --json")), first);
    place.run("mirror status mirror:a,b").succeeds().says(&[&first, "optimal", "a: in sync"]);
}

/// A mirror of 2 MiB with data, and the superblocks that its first replica had when it had 1 MiB.
fn resized_replica(place: &Place) -> Vec<(u64, Vec<u8>)> {
    place.run("create a --size 1MiB").succeeds();
    let earlier = place.read("a");
    let copies = place.run("info a --json").json()["volume"]["superblock_copies"].clone();
    place.run("resize a --size 2MiB").succeeds();
    place.run("create b --size 2MiB").succeeds();
    place.write("data", &noise(3, 2 << 20));
    place.run("mirror create a b").succeeds();
    place.run("copy data mirror:a,b").succeeds();
    let offsets = copies.as_array().unwrap().iter().map(|copy| copy["offset"].as_u64().unwrap());
    offsets.map(|at| (at, earlier[at as usize..][..512].to_vec())).collect()
}

#[test]
fn a_replica_that_has_the_size_of_an_earlier_day_is_named_and_the_mirror_goes_on_without_it() {
    let place = Place::with_runtime("syscalls");
    resized_replica(&place).into_iter().for_each(|(at, bytes)| place.poke("a", at, &bytes));
    let copied = place.run("copy mirror:a,b out");
    let why = "runs without a: its device has 256 blocks, and its label says 512";
    assert!(copied.succeeds().stderr.contains(why), "{}", copied.stderr);
    place.run("mirror status mirror:a,b").ends_with(4).says(&["degraded", "its device has 256 blocks"]);
    assert!(place.read("out") == place.read("data"));
    place.run("create c --size 2MiB").succeeds();
    place.run("mirror replace mirror:a,b a c").succeeds().says(&["optimal", "c: in sync"]);
}

#[test]
fn older_content_is_not_served_beside_a_replica_of_another_size_that_has_what_was_written_last() {
    let place = Place::with_runtime("syscalls");
    let superblocks = resized_replica(&place);
    let rename = |from: &str, to: &str| fs::rename(place.path(from), place.path(to)).unwrap();
    // `b` is away while `a` is written, and knows nothing of it.
    rename("b", "away");
    place.run("zero mirror:a,b --range 0").ends_with(4);
    rename("away", "b");
    superblocks.into_iter().for_each(|(at, bytes)| place.poke("a", at, &bytes));
    for target in ["mirror:a,b", "mirror:b,a"] {
        for command in [
            "copy {} out",
            "verify {}",
            "info {}",
            "mirror status {}",
            "zero {} --range 0",
            "mirror replace {} a --force",
        ] {
            let command = command.replace("{}", target);
            let why = ["only replica", "its device has 256 blocks, and its label says 512", "move this one away"];
            place.run(&command).fails(3, &why);
        }
        place.run(&format!("serve {target} --listen 127.0.0.1:0")).fails(3, &["its label says 512"]);
    }
    // What is said to help does.
    place.run("copy b out").succeeds();
    assert!(place.read("out") == place.read("data"));
    rename("a", "away");
    place.run("create n --size 2MiB").succeeds();
    place.run("mirror replace mirror:a,b a n").succeeds().says(&["optimal", "n: in sync"]);
}

#[test]
fn a_replica_is_replaced_while_the_mirror_is_in_use() {
    let place = Place::new();
    filled(&place, 2048);
    place.run(&format!("create c --size {}", 2048 * BLOCK)).succeeds();
    let server = Server::start(&place, "mirror:a,b");
    place.write("piece", &noise(9, 512 * BLOCK));
    let writer = load(&place, &format!("offset:100..611,{}", server.target("mirror")), "piece");
    place.run("mirror status mirror:a,b").succeeds().says(&["a: in sync", "b: in sync"]);
    place.run("mirror replace mirror:a,b b c").succeeds().says(&["a: in sync", "c: in sync"]);
    place.run("mirror remove mirror:a,b x").fails(2, &["no replica x"]);
    // Names are relative to the folder of the command, not of the server.
    fs::create_dir(place.path("elsewhere")).unwrap();
    place.run(&format!("create elsewhere/c --size {}", 2048 * BLOCK)).succeeds();
    let mut command = place.command("mirror add mirror:../a,../b c");
    let answer = crate::common::answer(command.current_dir(place.path("elsewhere")));
    answer.succeeds().says(&["elsewhere/c: in sync"]);
    end(writer);
    server.stop().is_clean();
    place.run("compare a c").succeeds();
    place.run("verify mirror:a,c,elsewhere/c").succeeds();
    place.run("verify mirror:a,b").fails(3, &["was removed"]);
}

/// Copies this into a target, over and over, until told to stop; what became of the copies does not matter.
fn load(place: &Place, target: &str, file: &str) -> Child {
    let script = format!("while \"$0\" copy {file} {target} 2>/dev/null; do :; done");
    // A group of its own, so that the running copy ends with the shell.
    let mut shell = std::process::Command::new("sh");
    shell.process_group(0);
    shell.args(["-c", &script, env!("CARGO_BIN_EXE_sealblock")]).current_dir(place.path(""));
    shell.env("SEALBLOCK_RUNTIME", "syscalls").stdin(std::process::Stdio::null()).spawn().unwrap()
}

fn end(mut child: Child) {
    let group = format!("-{}", child.id());
    assert!(std::process::Command::new("kill").args(["-s", "KILL", "--", &group]).status().unwrap().success());
    child.wait().unwrap();
}

#[test]
fn a_remote_replica_that_is_killed_under_load_is_resynced() {
    let place = Place::new();
    filled(&place, 4096);
    let back = Server::start(&place, "--protection shown --as-member b");
    let (address, b) = (back.address().to_owned(), back.target("b"));
    let front = Server::start(&place, &format!("--log info mirror:a,{b}?timeout=2s"));
    let mirror = front.target("mirror");
    place.write("piece", &noise(5, 64 * BLOCK));
    let writer = load(&place, &format!("offset:300..363,{mirror}"), "piece");
    thread::sleep(Duration::from_millis(700));
    back.kill();
    // Writes go on without it; nothing else is written to, so that what it misses is known.
    thread::sleep(Duration::from_secs(2));
    place.write("last", &noise(6, 64 * BLOCK));
    place.run(&format!("copy last offset:2000..2063,{mirror}")).succeeds();
    end(writer);
    let back = Server::start_at(&place, &format!("--listen {address} --protection shown --as-member b"));
    let until = Instant::now() + Duration::from_secs(60);
    let is_equal = |answer: &Answer| answer.status == 0;
    while !is_equal(&place.run(&format!("compare {b} {mirror}"))) {
        assert!(Instant::now() < until, "the replica does not come back");
        thread::sleep(Duration::from_millis(300));
    }
    let ended = front.stop();
    back.stop().is_clean();
    let told = ended.told_of("resync finished");
    assert!(ended.stderr.contains("replica failed, mirror degraded") && !told.is_empty(), "{}", ended.stderr);
    let copied = told[0]["resynced_bytes"].as_u64().unwrap();
    assert!(copied <= 6 << 20, "{copied} bytes were copied");
    place.run("compare a b").succeeds();
    verify(&place, "mirror:a,b", 0);
}

#[test]
fn a_mirror_that_is_killed_at_any_time_has_identical_replicas_afterwards() {
    let place = Place::new();
    filled(&place, 2048);
    for round in 0..6 {
        let server = Server::start(&place, "mirror:a,b");
        place.write("piece", &noise(round, 512 * BLOCK));
        let writer = load(
            &place,
            &format!("offset:{}..{},{}", round * 200, round * 200 + 511, server.target("mirror")),
            "piece",
        );
        thread::sleep(Duration::from_millis(150 + 37 * round));
        // However slow the machine is, something was written before the end.
        place.run(&format!("zero {} --range 0..0", server.target("mirror"))).succeeds();
        server.kill();
        end(writer);
        // Regions that may differ are no damage, and not clean before they are reconciled.
        verify(&place, "mirror:a,b", 4);
        place.run("verify mirror:a,b --repair").succeeds();
        verify(&place, "mirror:a,b", 0);
        place.run("compare a b").succeeds();
    }
}

#[test]
fn serving_a_replica_beside_its_mirror_is_refused() {
    let place = Place::with_runtime("syscalls");
    filled(&place, 512);
    let refused = answer_of(place.start("serve --listen 127.0.0.1:0 mirror:a,b a"));
    refused.fails(2, &["given twice"]);
}

#[test]
fn devices_that_hold_data_are_made_a_mirror_only_on_purpose() {
    let place = Place::with_runtime("syscalls");
    let data = noise(21, 256 * BLOCK);
    place.write("d", &data);
    for name in ["f1", "f2", "f3"] {
        place.run("create NAME --size 1MiB".replace("NAME", name).as_str()).succeeds();
    }
    place.run("copy d f1").succeeds();
    let refused = answer_of(place.start("serve --listen 127.0.0.1:0 mirror:f1,f2"));
    refused.fails(3, &["no label", "f1", "sealblock mirror create"]);
    for command in ["verify mirror:f1,f2", "copy d mirror:f1,f2", "copy mirror:f2,f1 out", "mirror status mirror:f1,f2"]
    {
        place.run(command).fails(3, &["sealblock mirror create"]);
    }
    // The one that holds data is the one whose content counts.
    place.run("mirror create f2 f1").succeeds().says(&["f1: in sync", "f2: in sync", "mirror:f2,f1"]);
    assert!(place.blocks("f2", 0, 255) == data && place.blocks("mirror:f1,f2", 0, 255) == data);
    verify(&place, "mirror:f1,f2", 0);
    // What is one already is named, in any order, with nothing that would destroy it.
    for (command, words) in [
        ("mirror create f1 f3", ["f1 is replica", "(in sync) of mirror"]),
        ("mirror create f1 f2", ["they are replicas of mirror", "already (f1: in sync, f2: in sync)"]),
        ("mirror create f2 f1", ["they are replicas of mirror", "already (f2: in sync, f1: in sync)"]),
    ] {
        let refused = place.run(command);
        refused.fails(3, &words);
        assert!(!refused.stderr.contains("--force") && !refused.stderr.contains("nothing says"), "{}", refused.stderr);
    }
    verify(&place, "mirror:f1,f2", 0);
    // Several that hold data: `--from` has to name the one that counts, and `--force` permits to replace the other.
    place.write("e", &noise(22, 256 * BLOCK));
    for name in ["g1", "g2"] {
        place.run("create NAME --size 1MiB".replace("NAME", name).as_str()).succeeds();
        place.run("copy e NAME".replace("NAME", name).as_str()).succeeds();
    }
    place.run("copy d g1").succeeds();
    place.run("mirror create g1 g2").fails(3, &["g1, g2", "--from"]);
    place.run("mirror create g1 g2 --from g3").fails(2, &["not one of its devices"]);
    place.run("mirror create g1 g2 --from g2").fails(3, &["g1 holds data", "--force"]);
    place.run("mirror create g1 g2 --from g1 --force").succeeds();
    assert!(place.blocks("g2", 0, 255) == data);
    // A plain volume becomes the first replica of a mirror.
    place.run("create h --size 1MiB").succeeds();
    place.run("copy d h").succeeds();
    place.run("mirror add h f3").succeeds().says(&["mirror:h,f3"]);
    assert!(place.blocks("f3", 0, 255) == data);
}

#[test]
fn devices_that_are_not_alike_are_refused_with_what_differs() {
    let place = Place::with_runtime("syscalls");
    place.run("create a --size 1MiB").succeeds();
    for (options, what) in [
        ("--size 2MiB", ["256 blocks", "512"]),
        ("--size 1MiB --block-size 512", ["blocks of 512 bytes", "4096"]),
        ("--size 1MiB --guard crc16", ["crc16 Type 1", "crc32c Type 1"]),
    ] {
        place.run(&format!("create b {options} --force")).succeeds();
        for command in ["mirror create b a", "mirror create a b", "copy a mirror:a,b"] {
            place.run(command).ends_with(3);
        }
        let refused = place.run("mirror create a b");
        assert!(what.iter().any(|what| refused.stderr.contains(what)), "{}", refused.stderr);
        assert!(place.run("info a --json").succeeds().json()["mirror"].is_null());
    }
    place.run("create b --size 1MiB --force").succeeds();
    place.run("mirror create a b").succeeds();
}

/// Data of a replica with other seals, or none, would be resealed on the others, bit rot included.
#[test]
fn blank_devices_that_are_not_alike_take_nothing_together() {
    let place = Place::with_runtime("syscalls");
    place.write("d", &noise(24, 4 * BLOCK));
    for options in
        ["--size 1MiB --guard none", "--size 1MiB --guard crc16", "--size 2MiB", "--size 1MiB --block-size 512"]
    {
        place.run("create a --size 1MiB --force").succeeds();
        place.run(&format!("create b {options} --force")).succeeds();
        for command in ["copy d mirror:a,b", "copy d mirror:b,a", "mirror status mirror:a,b", "verify mirror:a,b"] {
            let answer = place.run(command);
            assert_eq!(answer.status, 3, "{command}, b with {options}: {}", answer.stderr);
        }
        for name in ["a", "b"] {
            place.run(&format!("compare --zero {name}")).succeeds();
        }
    }
}

#[test]
fn a_copy_that_was_interrupted_goes_on_where_the_mirror_is_next_used() {
    let place = Place::new();
    let data = noise(23, 4096 * BLOCK);
    place.write("d", &data);
    for name in ["a", "b"] {
        place.run(&format!("create {name} --size {}", data.len())).succeeds();
    }
    place.run("copy d a").succeeds();
    place.run("mirror create a b --no-wait").succeeds();
    place.run("copy mirror:b,a out").succeeds();
    assert!(place.read("out") == data, "what is not alike yet is not read");
    // Killed at several moments, it is never read before it is done, and goes on.
    for round in 0..4 {
        let server = Server::start(&place, "mirror:a,b");
        thread::sleep(Duration::from_millis(7 * round));
        server.kill();
        place.run("copy mirror:b,a out").succeeds();
        assert!(place.read("out") == data);
    }
    let server = Server::start(&place, "mirror:a,b");
    let until = Instant::now() + Duration::from_secs(60);
    while place.run("mirror status mirror:a,b --json").json()["replicas"][1]["state"] != "in_sync" {
        assert!(Instant::now() < until, "the replicas are not made alike");
        thread::sleep(Duration::from_millis(50));
    }
    server.stop().is_clean();
    place.run("compare a b").succeeds();
    verify(&place, "mirror:a,b", 0);
}

#[test]
fn an_older_image_that_was_written_alone_is_refused_and_nothing_of_either_side_is_lost() {
    for first in ["a", "b"] {
        let place = Place::with_runtime("syscalls");
        filled(&place, 512);
        let second = if first == "a" { "b" } else { "a" };
        let file = |name: &str| place.path(name);
        // An image of one replica, put back after both were written to again.
        std::fs::copy(file(first), file("older")).unwrap();
        for round in 0..5 {
            place.write("piece", &noise(30 + round, 8 * BLOCK));
            place.run(&format!("copy piece offset:{}..{},mirror:a,b", 8 * round, 8 * round + 7)).succeeds();
        }
        std::fs::rename(file("older"), file(first)).unwrap();
        std::fs::rename(file(second), file("away")).unwrap();
        place.write("piece", &noise(40, 8 * BLOCK));
        place.run("copy piece offset:100..107,mirror:a,b").ends_with(4);
        // And then the other one without it.
        std::fs::rename(file(first), file("away.too")).unwrap();
        std::fs::rename(file("away"), file(second)).unwrap();
        place.write("other", &noise(41, 8 * BLOCK));
        place.run("copy other offset:200..207,mirror:a,b").ends_with(4);
        std::fs::rename(file("away.too"), file(first)).unwrap();
        for command in ["verify mirror:a,b", "copy mirror:b,a out", "zero mirror:a,b --range 0..0"] {
            place.run(command).fails(3, &["split brain", "inspect each replica separately"]);
        }
        assert!(place.blocks(first, 100, 107) == noise(40, 8 * BLOCK));
        assert!(place.blocks(second, 200, 207) == noise(41, 8 * BLOCK));
        // The one to discard is replaced on purpose.
        std::fs::rename(file(second), file("given.up")).unwrap();
        place.run(&format!("create {second} --size 2MiB")).succeeds();
        place.run(&format!("mirror replace mirror:a,b {second}")).succeeds();
        place.run("compare a b").succeeds();
    }
}

#[test]
fn an_older_image_that_was_not_written_to_is_only_resynced() {
    let place = Place::with_runtime("syscalls");
    filled(&place, 512);
    std::fs::copy(place.path("a"), place.path("older")).unwrap();
    place.write("piece", &noise(50, 8 * BLOCK));
    place.run("copy piece offset:0..7,mirror:a,b").succeeds();
    std::fs::rename(place.path("older"), place.path("a")).unwrap();
    // Opened alone, but nothing was changed: there is one history.
    std::fs::rename(place.path("b"), place.path("away")).unwrap();
    place.run("verify mirror:a,b --repair");
    std::fs::rename(place.path("away"), place.path("b")).unwrap();
    assert!(place.blocks("mirror:a,b", 0, 7) == noise(50, 8 * BLOCK));
    place.run("mirror replace mirror:a,b a a --force").succeeds();
    place.run("compare a b").succeeds();
}

#[test]
fn a_removed_replica_opens_neither_alone_nor_with_an_out_of_sync_one() {
    let place = Place::with_runtime("syscalls");
    filled(&place, 512);
    place.run("create c --size 2MiB").succeeds();
    place.run("mirror add mirror:a,b c").succeeds();
    let rename = |from: &str, to: &str| std::fs::rename(place.path(from), place.path(to)).unwrap();
    // The second replica does not know what comes next.
    rename("b", "b.away");
    place.run("zero mirror:a,b,c --range 0..7").ends_with(4);
    place.run("mirror remove mirror:a,b,c c").succeeds();
    place.run("zero mirror:a,b --range 8..15").ends_with(4);
    rename("a", "a.away");
    rename("b.away", "b");
    place.run("copy mirror:a,c out").fails(3, &["no in-sync replica"]);
    place.run("copy mirror:b,c out").fails(3, &["no in-sync replica"]);
    rename("a.away", "a");
    place.run("copy mirror:a,c out").fails(3, &["was removed"]);
    place.run("mirror status mirror:a,b").ends_with(4);
}

#[test]
fn a_label_of_yesterday_in_all_its_copies_is_no_label() {
    let place = Place::new();
    filled(&place, 512);
    let labels = |image: &[u8]| {
        let (kib, end) = (1 << 10, image.len());
        [4 * kib..24 * kib, 36 * kib..56 * kib, end - 64 * kib..end - 44 * kib, end - 36 * kib..end - 16 * kib]
    };
    let yesterday = place.read("a");
    // Without `b`, so that the label says since then that `b` lacks something.
    fs::rename(place.path("b"), place.path("away")).unwrap();
    place.write("piece", &noise(3, 8 * BLOCK));
    place.run("copy piece offset:0..7,mirror:a,b").ends_with(4);
    fs::rename(place.path("away"), place.path("b")).unwrap();
    let today = place.read("a");
    for zeroed in [false, true] {
        let mut image = today.clone();
        for range in labels(&image) {
            let old = if zeroed { vec![0; range.len()] } else { yesterday[range.clone()].to_vec() };
            image[range].copy_from_slice(&old);
        }
        place.write("a", &image);
        // It is no replica: `b` alone would pass for the mirror, so its own label has the word, which knows of no change without it.
        let answer = place.run("mirror status mirror:a,b");
        answer.ends_with(4);
        assert!(answer.text().contains("its label cannot be used"), "{}", answer.text());
        place.run("copy piece a").fails(3, &["label"]);
    }
    place.write("a", &today);
    place.run("mirror status mirror:a,b").ends_with(4).says(&["b: out of sync"]);
    place.run("verify mirror:a,b --repair");
    verify(&place, "mirror:a,b", 0);
}

#[test]
fn a_creation_that_did_not_wait_is_waited_for_by_the_next_one() {
    let place = Place::new();
    for name in ["a", "b"] {
        place.run(&format!("create {name} --size 4MiB")).succeeds();
    }
    place.write("data", &noise(3, 4 << 20));
    place.run("copy data a").succeeds();
    place.run("mirror create a b --no-wait").succeeds();
    place.run("mirror create a b").succeeds().says(&["a: in sync", "b: in sync"]);
    place.run("compare b data").succeeds();
}
