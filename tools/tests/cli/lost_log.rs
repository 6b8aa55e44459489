//! A volume that was in use and whose log is gone: every command that reads it says so and ends with 4, what writes or serves it
//! refuses, and a mirror of it and a good one has the content of the good one.

use std::thread::sleep;
use std::time::Duration;

use sealblock_btrfs_format::checksum::ChecksumType;
use sealblock_btrfs_format::key::objectid;
use sealblock_media_volume::format::{SUPERBLOCK_OFFSETS, Superblock};
use sealblock_proofs_btrfs_images::handmade::{Handmade, Storage};

use crate::common::server::{Nbd, Server};
use crate::common::{BLOCK, Place, filled, noise};

const OLDER: &str = "may be older than what was written";

/// Wipes the log of a volume.
fn lose_log(place: &Place, name: &str) {
    let info = place.run(&format!("info {name} --json")).succeeds().json();
    let bytes = info["volume"]["log_bytes"].as_u64().unwrap();
    place.poke(name, 64 << 10, &vec![0; bytes as usize]);
}

/// The volume `v` with a file system, flushed by a server that was killed then, and no log.
fn lost() -> Place {
    let place = Place::new();
    let mut made = Handmade::new(4096, ChecksumType::Crc32c);
    made.file(objectid::FIRST_FREE, b"inline", b"a few words", Storage::Inline);
    made.build().write(&place.path("image")).unwrap();
    place.run(&format!("create v --size {}", place.len("image").next_multiple_of(1 << 20))).succeeds();
    let server = Server::start(&place, "v");
    let target = server.target("v");
    place.run(&format!("copy image {target}")).succeeds();
    // What the block map has by now is read without the log, too.
    sleep(Duration::from_secs(6));
    place.write("piece", &noise(3, 4 * BLOCK));
    let last = place.run(&format!("info {target} --json")).json()["blocks"].as_u64().unwrap() - 4;
    place.run(&format!("copy piece offset:{last}..,{target} --force")).succeeds();
    server.kill();
    lose_log(&place, "v");
    place
}

#[test]
fn a_volume_without_its_log_is_told_by_every_command_that_reads_it_and_refused_by_all_others() {
    let place = lost();
    let before = place.read("v");
    for (command, stdout) in [
        ("copy v out", false),
        ("compare v v", false),
        ("compare --zero v", false),
        ("rescue v out2", false),
        ("info v", true),
        ("fs ls v", false),
        ("fs cat v/inline", false),
        ("fs info v", false),
        ("fs verify v", false),
        ("scrub status v", false),
        ("copy offset:0..3,v out3", false),
    ] {
        let answer = place.run(command);
        let expected = if command.starts_with("compare --zero") { 1 } else { 4 };
        answer.ends_with(expected);
        let told = if stdout { answer.text() } else { answer.stderr.clone() };
        assert!(told.contains(OLDER), "{command}: {told}");
    }
    place.run("verify v").ends_with(4).says(&["incomplete"]);
    assert_eq!(place.run("copy v out5 --json").ends_with(4).json()["may_be_older"], "log_lost");
    assert_eq!(place.run("info v --json").ends_with(4).json()["may_be_older"], "log_lost");
    assert_eq!(place.run("scrub status v --json").ends_with(4).json()["may_be_older"], "log_lost");
    assert_eq!(place.run("rescue v out6 --json").ends_with(4).json()["may_be_older"], "log_lost");
    for command in
        ["copy image v", "zero v --yes", "discard v --yes", "serve v", "serve v --read-only", "resize v --size 64MiB"]
    {
        place.run(command).fails(3, &["v"]);
    }
    assert!(place.read("v") == before, "nothing is written");
}

/// Checksums match in a filesystem that is of an earlier day.
#[test]
fn a_filesystem_on_a_volume_that_may_be_older_is_not_called_clean() {
    let place = lost();
    let report = place.run("fs verify v --json").ends_with(4).json();
    assert_eq!((&report["verdict"], &report["may_be_older"]), (&"incomplete".into(), &"log_lost".into()));
    let unchecked = report["unchecked"].as_array().unwrap();
    assert_eq!(unchecked.len(), 1, "{report}");
    assert_eq!(unchecked[0]["reason"], "may_be_older");
    assert!(unchecked[0]["why"].as_str().unwrap().contains(OLDER));
    let told = place.run("fs verify v").ends_with(4).text();
    assert!(told.contains("not checked: whether this is what was written last\nv: incomplete; "), "{told}");
    for command in ["fs info v", "fs ls v", "fs rescue v saved", "fs get v/inline got"] {
        assert_eq!(
            place.run(&format!("{command} --json")).ends_with(4).json()["may_be_older"],
            "log_lost",
            "{command}"
        );
    }
    // Twin: the same filesystem where nothing is lost.
    let report = place.run("fs verify image --json").succeeds().json();
    assert_eq!((&report["verdict"], &report["may_be_older"]), (&"clean".into(), &serde_json::Value::Null));
    assert_eq!(report["unchecked"], serde_json::json!([]));
    for command in ["fs info image", "fs ls image", "fs rescue image saved2", "fs get image/inline got2"] {
        let report = place.run(&format!("{command} --json")).succeeds().json();
        assert!(
            report.as_object().unwrap().contains_key("may_be_older") && report["may_be_older"].is_null(),
            "{command}"
        );
    }
}

/// Zeroes of an image are often holes, and a copy that skips holes leaves what is there.
#[test]
fn an_image_that_is_put_back_without_its_holes_is_read_as_of_its_day_and_may_be_older() {
    let place = Place::new();
    place.run("create v --size 4MiB").succeeds();
    let data = noise(5, 1024 * BLOCK);
    place.write("day1", &data);
    place.run("copy day1 v").succeeds();
    let image = place.read("v");
    place.run("zero v --range 100..131").succeeds();
    let mut mixed = place.read("v");
    for (there, of_image) in mixed.chunks_mut(BLOCK).zip(image.chunks(BLOCK)) {
        if of_image.iter().any(|byte| *byte != 0) {
            there.copy_from_slice(of_image);
        }
    }
    assert!(mixed != image, "the log has changes of the second day");
    place.write("v", &mixed);
    place.run("verify v").ends_with(4).says(&["incomplete"]);
    assert_eq!(place.run("copy v out --json").ends_with(4).json()["may_be_older"], "rolled_back");
    assert!(place.read("out") == data);
    assert_eq!(place.run("info v --json").ends_with(4).json()["may_be_older"], "rolled_back");
    assert_eq!(place.run("rescue v out2 --json").ends_with(4).json()["may_be_older"], "rolled_back");
    for command in ["copy day1 v", "zero v --yes", "serve v", "serve v --read-only", "resize v --size 64MiB"] {
        place.run(command).fails(3, &["v", "from different times"]);
    }
    assert!(place.read("v") == mixed, "nothing is written");
}

#[test]
fn a_volume_without_its_log_is_served_where_that_is_accepted_and_hosts_hear_of_it() {
    let place = lost();
    place.run("serve --listen 127.0.0.1:0 v").fails(3, &["of the log are lost", "--accept-older"]);
    let server = Server::start(&place, "v --accept-older --nbd 127.0.0.1:0");
    let target = server.target("v");
    place.run(&format!("copy {target} out")).ends_with(4);
    // An NBD client of ours hears of it as well.
    let export = format!("nbd://{}/v", server.ready["nbd"]["listeners"][0].as_str().unwrap());
    place.run(&format!("copy {export} out")).ends_with(4);
    assert_eq!(place.run(&format!("info {export} --json")).ends_with(4).json()["may_be_older"], "log_lost");
    place.run(&format!("compare v {export}")).ends_with(4);
    assert_eq!(place.run(&format!("info {target} --json")).ends_with(4).json()["may_be_older"], "log_lost");
    place.run(&format!("copy image {target}")).fails(3, &["older"]);
    place.run("status").ends_with(4).says(&[OLDER]);
    // A server of what that server has is asked for the same.
    place.run(&format!("serve --listen 127.0.0.1:0 {target}")).fails(3, &[OLDER, "--accept-older"]);
    let again = Server::start(&place, &format!("{target} --accept-older"));
    place.run(&format!("copy {} out", again.target("v"))).ends_with(4);
    again.stop().is_clean();
    server.stop().is_clean();
    // A good one is served as usual.
    place.run("create w --size 4MiB").succeeds();
    let server = Server::start(&place, "w --accept-older");
    place.run(&format!("copy piece {}", server.target("w"))).succeeds();
    server.stop().is_clean();
}

#[test]
fn a_mirror_of_a_good_volume_and_one_without_its_log_has_the_content_of_the_good_one() {
    for order in ["a,b", "b,a"] {
        let place = Place::new();
        let data = filled(&place, 512);
        let server = Server::start(&place, "mirror:a,b");
        place.write("piece", &noise(5, 16 * BLOCK));
        place.run(&format!("copy piece offset:100..115,{}", server.target("mirror"))).succeeds();
        let data = [&data[..100 * BLOCK], &noise(5, 16 * BLOCK), &data[116 * BLOCK..]].concat();
        server.kill();
        lose_log(&place, "b");
        let before = place.read("b");
        place.run(&format!("copy mirror:{order} out")).succeeds();
        assert!(place.read("out") == data, "{order}: read only");
        assert!(place.read("b") == before);
        place.run(&format!("verify mirror:{order}")).ends_with(4);
        let server = Server::start(&place, &format!("mirror:{order}"));
        let target = server.target("mirror");
        assert!(place.run(&format!("copy {target} -")).succeeds().stdout == data, "{order}: served");
        until_in_sync(&place, order);
        server.stop().is_clean();
        place.run(&format!("verify mirror:{order}")).succeeds();
        place.run("copy b alone").succeeds();
        assert!(place.read("alone") == data, "{order}: it was resynced");
    }
}

/// Puts the superblocks and the log of a volume back to what they are in `of`, an earlier copy of it.
fn put_back(place: &Place, name: &str, of: &[u8]) {
    let info = place.run(&format!("info {name} --json")).json();
    let log = info["volume"]["log_bytes"].as_u64().unwrap() as usize;
    let third = of.len() - 4096;
    for (at, length) in [(0, 512), (32 << 10, 512), (64 << 10, log), (third, 512)] {
        place.poke(name, at as u64, &of[at..at + length]);
    }
}

#[test]
fn superblocks_and_log_that_were_put_back_together_are_told_like_a_lost_log() {
    let place = Place::new();
    place.run("create v --size 2MiB").succeeds();
    let yesterday = place.read("v");
    for seed in [5, 6] {
        place.write("piece", &noise(seed, 16 * BLOCK));
        place.run("copy piece offset:100..115,v").succeeds();
    }
    place.run("verify v").succeeds();
    put_back(&place, "v", &yesterday);
    let before = place.read("v");
    for command in ["copy v out", "verify v", "info v", "compare v v", "rescue v out2"] {
        place.run(command).ends_with(4);
    }
    assert_eq!(place.run("info v --json").ends_with(4).json()["may_be_older"], "rolled_back");
    for command in ["serve --listen 127.0.0.1:0 v", "copy piece v", "zero v --yes", "resize v --size 64MiB"] {
        place.run(command).fails(3, &["put back to an earlier state"]);
    }
    assert!(place.read("v") == before, "nothing is written");
    let server = Server::start(&place, "v --accept-older");
    place.run("status").ends_with(4).says(&[OLDER]);
    place.run("scrub status v").ends_with(4).says(&[OLDER]);
    assert_eq!(place.run("scrub status v --json").ends_with(4).json()["may_be_older"], "rolled_back");
    server.stop().is_clean();
}

/// Puts everything of a volume back that shows at its opening how old it is: only its block map and data stay.
fn put_back_but_the_map(place: &Place, name: &str, of: &[u8]) {
    let layout = Superblock::decode(of).unwrap().layout;
    let sector = u64::from(layout.sector_bytes());
    let superblocks = SUPERBLOCK_OFFSETS.into_iter().chain([layout.third_offset()]);
    let parts = superblocks.chain(layout.high_water_offsets()).map(|at| (at, sector));
    for (at, length) in parts.chain([(layout.log_offset(), layout.log_bytes())]) {
        place.poke(name, at, &of[at as usize..][..length as usize]);
    }
}

#[test]
fn a_command_that_finds_the_block_map_ahead_of_the_rest_changes_no_block_and_fails() {
    let place = Place::new();
    place.run("create v --size 2MiB").succeeds();
    let write = |seed| {
        place.write("piece", &noise(seed, 16 * BLOCK));
        place.run("copy piece offset:100..115,v").succeeds();
    };
    write(5);
    let yesterday = place.read("v");
    write(6);
    put_back_but_the_map(&place, "v", &yesterday);
    let spliced = place.read("v");
    place.run("copy v before").ends_with(4);
    for command in ["zero v --range 100", "discard v --range 100", "zero v --yes", "copy piece v --force"] {
        place.write("v", &spliced);
        for _ in 0..2 {
            place.run(command).fails(3, &["put back to an earlier state"]);
        }
        place.run("copy v after").ends_with(4);
        assert!(place.read("after") == place.read("before"), "{command}");
        // Whatever is read.
        place.run("copy offset:400..415,v -").ends_with(4);
    }
    place.write("v", &spliced);
    let server = Server::start(&place, "v");
    place.run(&format!("zero {} --range 100", server.target("v"))).fails(3, &["cannot zero"]);
    place.run("status v").ends_with(4).says(&[OLDER]);
    server.stop().is_clean();
    place.run("serve --listen 127.0.0.1:0 v").fails(3, &["put back to an earlier state"]);
}

#[test]
fn a_replica_whose_block_map_is_ahead_of_the_rest_gets_the_content_of_the_other() {
    let place = Place::new();
    let data = filled(&place, 512);
    let yesterday = place.read("b");
    let server = Server::start(&place, "mirror:a,b");
    place.write("piece", &noise(5, 16 * BLOCK));
    place.run(&format!("copy piece offset:100..115,{}", server.target("mirror"))).succeeds();
    server.stop().is_clean();
    let data = [&data[..100 * BLOCK], &noise(5, 16 * BLOCK), &data[116 * BLOCK..]].concat();
    put_back_but_the_map(&place, "b", &yesterday);
    let server = Server::start(&place, "mirror:a,b");
    place.run(&format!("zero {} --range 511", server.target("mirror"))).succeeds();
    until_in_sync(&place, "a,b");
    server.stop().is_clean();
    place.run("verify mirror:a,b").succeeds();
    place.run("copy b alone").succeeds();
    assert!(place.read("alone")[..511 * BLOCK] == data[..511 * BLOCK], "it was resynced");
}

#[test]
fn a_replica_whose_superblocks_and_log_were_put_back_gets_the_content_of_the_other() {
    for order in ["a,b", "b,a"] {
        let place = Place::new();
        let data = filled(&place, 512);
        let yesterday = place.read("b");
        let server = Server::start(&place, "mirror:a,b");
        place.write("piece", &noise(5, 16 * BLOCK));
        place.run(&format!("copy piece offset:100..115,{}", server.target("mirror"))).succeeds();
        server.stop().is_clean();
        let data = [&data[..100 * BLOCK], &noise(5, 16 * BLOCK), &data[116 * BLOCK..]].concat();
        put_back(&place, "b", &yesterday);
        place.run(&format!("copy mirror:{order} out")).succeeds();
        assert!(place.read("out") == data, "{order}: read only");
        place.run(&format!("verify mirror:{order}")).ends_with(4);
        let server = Server::start(&place, &format!("mirror:{order}"));
        let target = server.target("mirror");
        assert!(place.run(&format!("copy {target} -")).succeeds().stdout == data, "{order}: served");
        until_in_sync(&place, order);
        server.stop().is_clean();
        place.run(&format!("verify mirror:{order}")).succeeds();
        place.run("copy b alone").succeeds();
        assert!(place.read("alone") == data, "{order}: it was resynced");
    }
}

/// Waits until a served mirror is in sync.
fn until_in_sync(place: &Place, order: &str) {
    let status = format!("mirror status mirror:{order}");
    let is_done = || place.run(&status).status == 0;
    assert!(
        (0..600).any(|_| is_done() || {
            sleep(Duration::from_millis(50));
            false
        }),
        "{order}: it is resynced"
    );
}

#[test]
fn a_mirror_of_volumes_without_their_logs_is_read_as_such_and_not_written() {
    let place = Place::new();
    filled(&place, 512);
    let server = Server::start(&place, "mirror:a,b");
    place.write("piece", &noise(5, 16 * BLOCK));
    place.run(&format!("copy piece offset:100..115,{}", server.target("mirror"))).succeeds();
    server.kill();
    ["a", "b"].iter().for_each(|name| lose_log(&place, name));
    assert!(place.run("copy mirror:a,b out").ends_with(4).stderr.contains(OLDER));
    place.run("copy piece mirror:a,b").fails(3, &[OLDER]);
    place.run("serve mirror:a,b").fails(3, &[OLDER]);
    place.run("mirror status mirror:a,b").ends_with(4).says(&["state           degraded", OLDER]);
    let server = Server::start(&place, "mirror:a,b --accept-older");
    assert_eq!(place.run("mirror status mirror:a,b --json").ends_with(4).json()["may_be_older"], "log_lost");
    place.run(&format!("copy {} out2", server.target("mirror"))).ends_with(4);
    server.stop().is_clean();
}

/// The volume `v` of a server that was killed, whose notes are damaged.
fn without_notes() -> Place {
    let place = Place::new();
    place.run("create v --size 64MiB").succeeds();
    place.write("piece", &noise(3, 4 * BLOCK));
    let server = Server::start(&place, "v");
    place.run(&format!("copy piece {}", server.target("v"))).succeeds();
    server.kill();
    damage_notes(&place, "v");
    place
}

fn damage_notes(place: &Place, name: &str) {
    let volume = place.read(name);
    // The field of the superblock and the first two of its copies.
    let offsets = [0, 32 << 10].map(|at| u64::from_le_bytes(volume[at + 248..at + 256].try_into().unwrap()));
    let notes = offsets.into_iter().max().filter(|offset| *offset > 0).expect("changes are noted");
    place.poke(name, notes, &[0xA5; 4096]);
}

const UNFLUSHED: &str = "may be lost";

#[test]
fn that_writes_may_be_lost_is_told_by_every_command_until_it_is_accepted() {
    let place = without_notes();
    for command in [
        "info v",
        "verify v",
        "compare v v",
        "copy v out",
        "rescue v out2",
        "zero v --range 9..9",
        "discard v --range 9..9 --yes",
        "copy piece v",
        "resize v --size 65MiB",
        "verify v --repair",
        "scrub status v",
        "mirror create v w",
        "corrupt v --lba 1 --kind guard",
        "info v",
    ] {
        if command.starts_with("mirror") {
            place.run("create w --size 65MiB").succeeds();
        }
        let answer = place.run(command);
        let told = format!("{}{}", answer.text(), answer.stderr);
        assert_eq!(told.matches(UNFLUSHED).count(), 1, "{command}: {told}");
        assert!(told.contains("notes are damaged"), "{command}: {told}");
    }
    let info = place.run("info v --json").succeeds().json();
    assert_eq!(info["volume"]["unflushed_lost"], "notes are damaged");
}

#[test]
fn that_writes_may_be_lost_is_accepted_by_a_repair_that_is_asked_to() {
    let place = without_notes();
    place.run("verify v --accept-lost").ends_with(2);
    let accepted = place.run("verify v --repair --accept-lost");
    assert!(accepted.succeeds().stderr.contains("no server tells its hosts any more"), "{}", accepted.stderr);
    let after = place.run("info v");
    assert!(!after.succeeds().text().contains(UNFLUSHED), "{}", after.text());
    let server = Server::start(&place, "v");
    let target = server.target("v");
    place.run(&format!("copy piece {target}")).succeeds();
    let refused = place.run(&format!("verify {target} --repair --accept-lost"));
    refused.fails(2, &["for volumes of this machine", "a server tells its own hosts"]);
    server.stop().is_clean();
}

#[test]
fn hosts_of_a_killed_server_are_told_by_the_next_one_that_they_come_to_whatever_ran_between() {
    let place = without_notes();
    place.run("zero v --range 9..9").succeeds();
    place.run("resize v --size 65MiB").succeeds();
    // It is stopped, and another one is killed, before any host comes back.
    Server::start(&place, "v").stop().is_clean();
    let server = Server::start(&place, "v");
    let status = place.run("status v");
    assert!(status.succeeds().text().contains("notes are damaged"), "{}", status.text());
    let status = place.run("status v --json").succeeds().json();
    assert!(status["servers"][0]["devices"][0]["unflushed_lost"][0].as_str().unwrap().ends_with("notes are damaged"));
    server.kill();
    let server = Server::start(&place, "v");
    let target = server.target("v");
    let first = place.run(&format!("copy piece {target}"));
    assert!(first.ends_with(3).stderr.contains("flush"), "{}", first.stderr);
    for _ in 0..2 {
        place.run(&format!("copy piece {target}")).succeeds();
    }
    server.stop().is_clean();
}

fn nbd_address(server: &Server) -> String {
    server.ready["nbd"]["listeners"][0].as_str().unwrap().to_owned()
}

/// The mirror `mirror:a,b` of a server that was killed with block 20 written and not flushed, its notes damaged on these replicas.
fn mirror_without_notes(damaged: &[&str]) -> Place {
    let place = Place::new();
    place.write("piece", &noise(3, 4 * BLOCK));
    for name in ["a", "b"] {
        place.run(&format!("create {name} --size 64MiB")).succeeds();
    }
    let server = Server::start(&place, "mirror:a,b --nbd 127.0.0.1:0");
    place.run(&format!("copy piece {}", server.target("mirror"))).succeeds();
    let mut client = Nbd::open(&nbd_address(&server), "mirror").unwrap();
    assert_eq!(client.write(20 * BLOCK as u64, &noise(9, BLOCK)), 0);
    server.kill();
    damaged.iter().for_each(|name| damage_notes(&place, name));
    place
}

#[test]
fn of_a_mirror_a_replica_counts_that_has_all_that_was_answered() {
    for damaged in ["a", "b"] {
        let place = mirror_without_notes(&[damaged]);
        assert!(place.run(&format!("info {damaged}")).text().contains(UNFLUSHED));
        let server = Server::start(&place, "mirror:a,b --nbd 127.0.0.1:0");
        let status = place.run("status --json").json();
        assert_eq!(status["servers"][0]["devices"][0]["unflushed_lost"], serde_json::json!([]), "{damaged}");
        let mut client = Nbd::open(&nbd_address(&server), "mirror").unwrap();
        let found = client.read(20 * BLOCK as u64, BLOCK).unwrap().unwrap();
        assert!(found == noise(9, BLOCK), "{damaged}: what was not flushed is on the other replica");
        place.run(&format!("copy piece {}", server.target("mirror"))).succeeds();
        server.stop().is_clean();
        assert!(!place.run(&format!("info {damaged}")).succeeds().text().contains(UNFLUSHED), "{damaged}");
        place.run("verify mirror:a,b").succeeds();
    }
}

#[test]
fn a_mirror_all_of_whose_replicas_lack_something_has_hosts_told_by_replicas_that_came_later_too() {
    let place = mirror_without_notes(&["a", "b"]);
    place.run("create c --size 64MiB").succeeds();
    let added = place.run("mirror add mirror:a,b c");
    assert!(added.succeeds().stderr.contains(UNFLUSHED), "{}", added.stderr);
    place.run("mirror remove mirror:a,b,c a").succeeds();
    // By now the labels alone know of it.
    place.run("create d --size 64MiB").succeeds();
    place.run("mirror replace mirror:b,c b d").succeeds();
    let info = place.run("info mirror:d,c");
    assert!(info.succeeds().text().contains("its labels say so"), "{}", info.text());
    assert!(place.run("info mirror:d,c --json").json()["unflushed_lost"][0].as_str().is_some());
    place.run("mirror replace mirror:d,c d b --force").succeeds();
    let server = Server::start(&place, "mirror:b,c");
    let target = server.target("mirror");
    place.run(&format!("copy piece {target}")).ends_with(3);
    place.run(&format!("copy piece {target}")).succeeds();
    server.stop().is_clean();
    place.run("verify mirror:b,c --repair --accept-lost").succeeds();
    let status = place.run("mirror status mirror:b,c");
    assert!(!status.succeeds().stderr.contains(UNFLUSHED), "{}", status.stderr);
}

#[test]
fn a_replica_at_another_server_is_no_proof_that_nothing_is_lost() {
    let place = Place::new();
    place.write("piece", &noise(3, 4 * BLOCK));
    for name in ["a", "b"] {
        place.run(&format!("create {name} --size 64MiB")).succeeds();
    }
    let remote = Server::start(&place, "b --protection shown");
    let (address, target) = (remote.address().to_owned(), remote.target("b"));
    place.run(&format!("mirror create a {target}")).succeeds();
    remote.stop().is_clean();
    let member = format!("b --protection shown --as-member --listen {address}");
    let mirror = format!("mirror:a,{target} --nbd 127.0.0.1:0");
    let remote = Server::start_at(&place, &member);
    let server = Server::start(&place, &mirror);
    let mut client = Nbd::open(&nbd_address(&server), "mirror").unwrap();
    assert_eq!(client.write(20 * BLOCK as u64, &noise(9, BLOCK)), 0);
    server.kill();
    remote.kill();
    ["a", "b"].iter().for_each(|name| damage_notes(&place, name));
    let remote = Server::start_at(&place, &member);
    let server = Server::start(&place, &mirror);
    let status = place.run("status --json").json();
    let told: Vec<_> = status["servers"].as_array().unwrap().iter().map(|server| &server["devices"][0]).collect();
    assert!(told.iter().all(|device| device["unflushed_lost"][0].as_str().is_some()), "{told:?}");
    let target = server.target("mirror");
    place.run(&format!("copy piece {target}")).ends_with(3);
    place.run(&format!("copy piece {target}")).succeeds();
    server.stop().is_clean();
    remote.stop().is_clean();
}

#[test]
fn a_served_volume_of_which_writes_may_be_lost_is_resized_and_its_hosts_are_told_all_the_same() {
    let place = without_notes();
    let server = Server::start(&place, "v");
    place.run("resize v --size 65MiB").succeeds();
    let target = server.target("v");
    place.run(&format!("copy piece {target}")).ends_with(3);
    place.run("resize v --size 66MiB").succeeds();
    place.run(&format!("copy piece {target}")).succeeds();
    server.stop().is_clean();
    place.run("verify v").succeeds();
}

#[test]
fn a_mirror_of_which_a_replica_has_lost_superblocks_is_not_optimal_until_they_are_written_anew() {
    let place = Place::new();
    for name in ["a", "b"] {
        place.run(&format!("create {name} --size 1MiB")).succeeds();
    }
    place.write("piece", &noise(3, 4 * BLOCK));
    place.run("copy piece mirror:a,b").succeeds();
    place.run("mirror status mirror:a,b").succeeds().says(&["optimal"]);
    [0, 32 << 10].iter().for_each(|at| place.poke("b", *at, &[0; 512]));
    let status = place.run("mirror status mirror:a,b");
    status.ends_with(4).says(&["degraded", "the superblock of"]);
    let json = place.run("mirror status mirror:a,b --json").ends_with(4).json();
    assert_eq!(json["replicas"][1]["lost_metadata"].as_array().unwrap().len(), 2, "{json}");
    place.run("zero mirror:a,b --range 9..9").succeeds();
    place.run("mirror status mirror:a,b").succeeds().says(&["optimal"]);
}
