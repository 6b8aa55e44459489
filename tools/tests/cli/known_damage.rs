//! What is known of bad blocks: kept on the device, said by every command in the same way, and forgotten only when the copy is written or
//! found good.

use sealblock_block::{Device, Durability, Request};
use sealblock_stack::target::TargetName;
use sealblock_stack::{Access, device_error, on_reactor, open};
use sealblock_units::Extent;

use crate::common::host::known_bad;
use crate::common::server::{Nbd, Server};
use crate::common::{BLOCK, Place, damaged, filled, noise};

/// Asks every command that speaks of bad blocks of the volume `v`, served or not: how many they say.
#[track_caller]
fn said_of_v(place: &Place, exit: i32) -> Vec<u64> {
    let blocks = |json: &serde_json::Value| json["damage"]["blocks"].as_u64().unwrap();
    let scrub = place.run("scrub status v --json").ends_with(exit).json();
    let info = place.run("info v --json").json();
    vec![blocks(&scrub), blocks(&info)]
}

#[test]
fn bad_blocks_are_known_after_a_restart_until_they_are_written() {
    let place = damaged(&[5, 6, 9]);
    place.run("scrub status v").succeeds();
    let server = Server::start(&place, "v");
    place.run(&format!("verify {}", server.target("v"))).ends_with(1);
    place.run("status v").ends_with(1).says(&["3 blocks are bad (5..6, 9)"]);
    place.run("scrub status v").ends_with(1).says(&["known damage: 3 blocks are bad (5..6, 9)"]);
    server.stop().is_clean();
    // Nobody has it open: the list lies on it.
    assert_eq!(said_of_v(&place, 1), [3, 3]);
    place.run("info v").ends_with(1).says(&["3 blocks are bad (5..6, 9)"]);
    // Whoever writes a block, in whatever way, has it leave the list.
    place.run("zero v --range 9..9").succeeds();
    assert_eq!(said_of_v(&place, 1), [2, 2]);
    let server = Server::start(&place, "v --nbd 127.0.0.1:0");
    place.run("status v").ends_with(1).says(&["2 blocks are bad (5..6)"]);
    assert_eq!(known_bad(server.address(), "v"), [(5, 2)], "hosts are told before anybody looks");
    let address = server.ready["nbd"]["listeners"][0].as_str().unwrap().to_owned();
    let mut client = Nbd::open(&address, "v").unwrap();
    assert_eq!(client.read(0, 4096).unwrap().map(|data| data.len()), Ok(4096));
    assert_eq!(client.read(5 * 4096, 4096).unwrap(), Err(5), "EIO");
    for lba in [5, 6] {
        assert_eq!(client.write(lba * 4096, &[7; 4096]), 0);
    }
    place.run("status v").succeeds().says(&["no damage is known"]);
    drop(client);
    server.stop().is_clean();
    assert_eq!(said_of_v(&place, 0), [0, 0]);
    let server = Server::start(&place, "v");
    place.run("status v").succeeds();
    server.stop().is_clean();
}

#[test]
fn thousands_of_bad_blocks_have_the_same_bounds_everywhere_and_after_each_restart() {
    const SECTOR: usize = 512;
    let place = Place::with_runtime("syscalls");
    let sector = |lba: u64| [&lba.to_le_bytes()[..], &[b'x'; SECTOR - 8]].concat();
    let data: Vec<u8> = (0..32_768).flat_map(sector).collect();
    place.volume("--size 16MiB --block-size 512", &data);
    // More runs than the list on the device has room for.
    let image = place.read("v");
    let is_data = |at: &usize| image[at + 8..at + SECTOR].iter().all(|byte| *byte == b'x');
    let of_data: Vec<usize> = (0..image.len()).step_by(SECTOR).filter(is_data).collect();
    let mut damaged = image.clone();
    let is_hit = |(n, _): &(usize, usize)| n % 5 == 0 || n % 7 == 0;
    let hit: Vec<usize> = of_data.into_iter().enumerate().filter(is_hit).map(|(_, at)| at).take(4_721).collect();
    assert_eq!(hit.len(), 4_721);
    hit.iter().for_each(|at| damaged[at + 100] = b'y');
    place.write("v", &damaged);
    let bounds =
        |damage: &serde_json::Value| (damage["blocks"].as_u64().unwrap(), damage["blocks_at_most"].as_u64().unwrap());
    let said = |server: &Server| {
        let status = bounds(&place.run("status v --json").ends_with(1).json()["servers"][0]["devices"][0]["damage"]);
        let scrub = bounds(&place.run("scrub status v --json").ends_with(1).json()["damage"]);
        let host = bounds(&place.run(&format!("info {} --json", server.target("v"))).ends_with(1).json()["damage"]);
        assert_eq!((scrub, host), (status, status), "served");
        status
    };
    let of_closed = || {
        let scrub = bounds(&place.run("scrub status v --json").ends_with(1).json()["damage"]);
        let info = bounds(&place.run("info v --json").ends_with(1).json()["damage"]);
        assert_eq!(scrub, info, "not served");
        info
    };
    for _ in 0..2 {
        let server = Server::start(&place, "v");
        place.run("scrub start v --wait").ends_with(1);
        assert_eq!(said(&server), (4_721, 4_721), "a scrub of all blocks counts each");
        server.kill();
        let (least, most) = of_closed();
        assert!(least == 4_721 && most > 4_721, "at least {least}, at most {most}");
        let server = Server::start(&place, "v");
        assert_eq!(said(&server), (least, most), "what was saved");
        server.kill();
        assert_eq!(of_closed(), (least, most));
    }
    place.run("verify v").ends_with(1).says(&["4721 damaged"]);
}

#[test]
fn a_bad_copy_is_not_forgotten_when_the_good_one_is_read() {
    let place = Place::with_runtime("syscalls");
    filled(&place, 64);
    place.run("corrupt b --lba 5 --kind data").succeeds();
    // Read-only, so that nothing is repaired.
    let server = Server::start(&place, "--read-only --nbd 127.0.0.1:0 mirror:a,b");
    place.run("mirror status mirror:a,b").succeeds().says(&["optimal", "of at most"]);
    place.run(&format!("verify {}", server.target("mirror"))).ends_with(1);
    let address = server.ready["nbd"]["listeners"][0].as_str().unwrap().to_owned();
    let mut client = Nbd::open(&address, "mirror").unwrap();
    for _ in 0..8 {
        assert!(client.read(5 * BLOCK as u64, BLOCK).unwrap().is_ok(), "the other replica has it");
    }
    place.run("status mirror:a,b").ends_with(1).says(&["1 block is bad (5)", "on b 1 block is bad (5)"]);
    let told = place.run("mirror status mirror:a,b");
    told.ends_with(1).says(&["degraded", "b: in sync; 1 block is bad (5)"]);
    assert!(!told.text().contains("optimal") && !told.text().contains("a: in sync; "), "{}", told.text());
    let json = place.run("mirror status mirror:a,b --json").ends_with(1).json();
    let blocks = |replica: usize| json["replicas"][replica]["damage"]["blocks"].as_u64().unwrap();
    assert_eq!((blocks(0), blocks(1)), (0, 1));
    place.run("scrub status mirror:a,b").ends_with(1).says(&["1 block is bad (5)"]);
    assert_eq!(known_bad(server.address(), "mirror"), [(5, 1)]);
    drop(client);
    server.stop().is_clean();
}

#[test]
fn a_replica_keeps_what_is_bad_on_it_until_it_is_repaired() {
    let place = Place::with_runtime("syscalls");
    filled(&place, 64);
    place.run("corrupt b --lba 5 --kind data").succeeds();
    let server = Server::start(&place, "mirror:a,b");
    // A host's Verify finds it, and repairs nothing.
    place.run(&format!("verify {}", server.target("mirror"))).ends_with(1);
    place.run("mirror status mirror:a,b").ends_with(1);
    server.stop().is_clean();
    place.run("info b").ends_with(1).says(&["1 block is bad (5)"]);
    assert_eq!(place.run("info a --json").succeeds().json()["damage"]["blocks"], 0);
    place.run("mirror status mirror:a,b").ends_with(1).says(&["b: in sync; 1 block is bad (5)"]);
    let server = Server::start(&place, "mirror:a,b");
    place.run("status mirror:a,b").ends_with(1).says(&["on b 1 block is bad (5)"]);
    place.run("scrub start mirror:a,b --wait").succeeds();
    place.run("status mirror:a,b").succeeds();
    place.run("mirror status mirror:a,b").succeeds().says(&["optimal"]);
    server.stop().is_clean();
    assert_eq!(place.run("info b --json").succeeds().json()["damage"]["blocks"], 0);
    let server = Server::start(&place, "mirror:a,b");
    place.run("status mirror:a,b").succeeds();
    server.stop().is_clean();
    // Without a server, too.
    place.run("corrupt b --lba 7 --kind data").succeeds();
    place.run("verify mirror:a,b").ends_with(1);
    place.run("verify mirror:a,b --repair").ends_with(1);
    place.run("mirror status mirror:a,b").succeeds().says(&["optimal"]);
}

#[test]
fn blocks_of_a_stripe_are_known_by_their_members() {
    let place = Place::with_runtime("syscalls");
    for name in ["a", "b"] {
        place.run(&format!("create {name} --size 1MiB")).succeeds();
    }
    place.write("data", &noise(3, 2 << 20));
    place.run("copy data stripe:a,b").succeeds();
    // Chunks of 64 KiB: block 20 is the fifth of the second chunk, the first of b.
    place.run("corrupt b --lba 4 --kind data").succeeds();
    let server = Server::start(&place, "stripe:a,b");
    place.run(&format!("verify {}", server.target("stripe"))).ends_with(1);
    place.run("status stripe:a,b").ends_with(1).says(&["1 block is bad (20)"]);
    server.stop().is_clean();
    place.run("info b").ends_with(1).says(&["1 block is bad (4)"]);
    place.run("info stripe:a,b").ends_with(1).says(&["1 block is bad (20)"]);
}

#[test]
fn what_a_server_knows_is_said_from_afar_or_that_it_is_not_known() {
    let place = damaged(&[5, 6, 9]);
    let server = Server::start(&place, "--protection shown --nbd 127.0.0.1:0 v");
    let namespace = server.target("v");
    place.run(&format!("info {namespace}")).succeeds();
    place.run(&format!("verify {namespace}")).ends_with(1);
    place.run(&format!("info {namespace}")).ends_with(1).says(&["3 blocks are bad (5..6, 9)"]);
    let json = place.run(&format!("info {namespace} --json")).ends_with(1).json();
    assert_eq!((&json["damage"]["blocks"], &json["damage"]["complete"]), (&3.into(), &true.into()), "{json}");
    assert_eq!(json["damage"]["runs"][0]["field"], "guard", "{json}");
    assert_eq!(json["damage"]["not_asked"].as_array().map(Vec::len), Some(0), "{json}");
    // Through what lies on top of it, at its own addresses.
    place.run(&format!("info offset:6..9,{namespace}")).ends_with(1).says(&["2 blocks are bad (0, 3)"]);
    place.run(&format!("zero {namespace} --range 9..9")).succeeds();
    place.run(&format!("info {namespace}")).ends_with(1).says(&["2 blocks are bad (5..6)"]);
    // NBD cannot carry it: that is said, not left out.
    let listener = server.ready["nbd"]["listeners"][0].as_str().unwrap().to_owned();
    let export = format!("nbd://{listener}/v");
    let info = place.run(&format!("info {export}"));
    info.succeeds().says(&["damage unknown", "NBD cannot report them"]);
    assert!(!info.text().contains("are bad"), "{}", info.text());
    let json = place.run(&format!("info {export} --json")).json();
    assert!(json["damage"]["not_asked"][0].as_str().is_some_and(|why| why.starts_with(&export)), "{json}");
    server.stop().is_clean();
}

#[test]
fn what_the_server_of_a_replica_knows_counts_for_the_mirror() {
    let place = Place::with_runtime("syscalls");
    filled(&place, 64);
    place.run("corrupt b --lba 5 --kind data").succeeds();
    let server = Server::start(&place, "--protection shown --as-member b");
    let namespace = server.target("b");
    let mirror = format!("mirror:a,{namespace}");
    place.run(&format!("mirror status {mirror}")).succeeds();
    place.run(&format!("verify {namespace}")).ends_with(1);
    place.run(&format!("mirror status {mirror}")).ends_with(1).says(&["degraded", "in sync; 1 block is bad (5)"]);
    place.run(&format!("info {mirror}")).ends_with(1).says(&["1 block is bad (5)"]);
    place.run(&format!("mirror remove {mirror} a")).fails(3, &["a may have the only good copies of 1 block (5)"]);
    server.stop().is_clean();
}

#[test]
fn a_device_that_keeps_no_list_says_so() {
    let place = Place::with_runtime("syscalls");
    place.write("raw", &noise(4, 1 << 20));
    let server = Server::start(&place, "fault:[read-error@3],raw:raw");
    place.run("scrub start fault:[read-error@3],raw:raw --wait").ends_with(1);
    place.run(&format!("status {}", server.pid())).ends_with(1).says(&["not saved when the server exits: raw:"]);
    server.stop().is_clean();
}

#[test]
fn every_command_says_that_a_copy_of_a_label_is_lost_until_it_is_written_again() {
    const LOST: &str = "lost copies of metadata of b, of which the other copy is used: 1";
    let place = Place::with_runtime("syscalls");
    filled(&place, 64);
    let all_is_well = || {
        for command in ["mirror status mirror:a,b", "info mirror:a,b", "info b", "verify mirror:a,b", "verify b"] {
            let said = place.run(command);
            said.succeeds();
            assert!(!said.text().contains("lost"), "{}", said.text());
        }
    };
    all_is_well();
    let lose = || [4096, 32768 + 4096].into_iter().for_each(|offset| place.poke("b", offset, &[0; 512]));
    lose();
    for command in ["verify mirror:a,b", "verify b"] {
        let said = place.run(command);
        assert!(said.ends_with(4).stderr.contains(LOST), "{}", said.stderr);
    }
    place.run("mirror status mirror:a,b").ends_with(4).says(&["degraded", "b: in sync; lost copies", LOST]);
    place.run("info mirror:a,b").ends_with(4).says(&["degraded", "lost copies: 1"]);
    place.run("info b").ends_with(4).says(&["lost copies: 1"]);
    // Served without being written: the same.
    let server = Server::start(&place, "--read-only mirror:a,b");
    place.run("mirror status mirror:a,b").ends_with(4).says(&["degraded", LOST]);
    place.run("status mirror:a,b").ends_with(4).says(&["mirror:a,b is degraded: of b lost copies of metadata"]);
    server.stop().is_clean();
    place.run("verify b").ends_with(4);
    // A server that may write has the same words until the label is written again, at the latest when it closes the volume.
    let server = Server::start(&place, "mirror:a,b");
    let of_label = "lost copies of labels and scrub states of b";
    place.run("mirror status mirror:a,b").ends_with(4).says(&["degraded", of_label]);
    place.run("status mirror:a,b").ends_with(4).says(&["mirror:a,b is degraded: of b lost copies of labels"]);
    server.stop().is_clean();
    all_is_well();
}

#[test]
fn a_lost_copy_of_the_state_of_a_scrub_and_of_the_label_of_a_stripe_is_told_by_every_command() {
    let place = Place::with_runtime("syscalls");
    place.volume("--size 1MiB", &noise(5, 1 << 20));
    let server = Server::start(&place, "v");
    place.run("scrub start v --wait").succeeds();
    server.stop().is_clean();
    for command in ["info v", "verify v"] {
        place.run(command).succeeds();
    }
    // The first copies of both places of the scrub's state.
    for offset in [24_576, 32_768 + 24_576] {
        place.poke("v", offset, &[0; 512]);
    }
    place.run("verify v").ends_with(4);
    place.run("info v").ends_with(4).says(&["lost copies: 1"]);
    let server = Server::start(&place, "--read-only v");
    place.run("status v").ends_with(4).says(&["incomplete: lost copies of metadata of", "used: 1"]);
    server.stop().is_clean();
    // A server that may write says so, too, until it has written the state.
    let server = Server::start(&place, "v");
    place.run("status v").ends_with(4).says(&["lost copies of labels and scrub states of"]);
    place.run("scrub start v --wait").succeeds();
    place.run("status v").succeeds();
    server.kill();
    place.run("verify v").succeeds();
    for name in ["c", "d"] {
        place.run(&format!("create {name} --size 1MiB")).succeeds();
    }
    place.run("zero stripe:c,d --range 0..9").succeeds();
    place.run("info stripe:c,d").succeeds();
    [4096, 32768 + 4096].into_iter().for_each(|offset| place.poke("d", offset, &[0; 512]));
    for command in ["info stripe:c,d", "verify stripe:c,d", "info d"] {
        place.run(command).ends_with(4);
    }
    let server = Server::start(&place, "--read-only stripe:c,d");
    place.run("status stripe:c,d").ends_with(4).says(&["incomplete: lost copies of metadata of d, of which"]);
    server.stop().is_clean();
}

/// Blanks both copies of both places of the state of a scrub.
fn lose_scrub_state(place: &Place, name: &str) {
    let tail = std::fs::metadata(place.path(name)).unwrap().len() - (64 << 10);
    for offset in [24 << 10, 56 << 10, tail + (20 << 10), tail + (48 << 10)] {
        place.poke(name, offset, &[0; 8192]);
    }
}

#[test]
fn every_command_says_that_the_list_was_lost_until_every_block_was_checked() {
    const LOST: &str = "the list of bad blocks of v was lost or put back to an earlier state: bad blocks that were known are not known any more";
    let place = damaged(&[9]);
    let server = Server::start(&place, "v");
    place.run("scrub start v --wait").ends_with(1);
    server.stop().is_clean();
    lose_scrub_state(&place, "v");
    let is_told = |commands: &[&str]| {
        for command in commands {
            place.run(command).ends_with(4).says(&[LOST]);
            let damage = place.run(&format!("{command} --json")).ends_with(4).json()["damage"].clone();
            assert_eq!((&damage["blocks"], &damage["complete"]), (&0.into(), &false.into()));
            assert_eq!(damage["lost_lists"], serde_json::json!(["v"]));
        }
        let scrub = place.run("scrub status v").text();
        assert!(scrub.contains("last full scrub unknown") && !scrub.contains("never fully"), "{scrub}");
    };
    is_told(&["info v", "scrub status v"]);
    let info = place.run("info v").text();
    assert!(!info.contains("lost copies"), "there is no other copy: {info}");
    let verified = place.run("verify v --range 10..").ends_with(4).stderr.clone();
    assert!(verified.contains(LOST) && !verified.contains("other copy"), "{verified}");
    let server = Server::start(&place, "v");
    is_told(&["scrub status v"]);
    place.run("status v").ends_with(4).says(&["incomplete: ", LOST]);
    let remote = place.run(&format!("info {} --json", server.target("v"))).ends_with(4).json();
    assert_eq!((&remote["damage"]["blocks"], &remote["damage"]["complete"]), (&0.into(), &false.into()));
    server.stop().is_clean();
    // It is kept over the server, and over another one.
    is_told(&["info v", "scrub status v"]);
    let server = Server::start(&place, "v");
    place.run("status v").ends_with(4).says(&["incomplete: ", LOST]);
    place.run("scrub start v --wait").ends_with(1);
    place.run("status v").ends_with(1).says(&["damaged: 1 block is bad (9)"]);
    server.stop().is_clean();
    for command in ["info v --json", "scrub status v --json"] {
        let damage = place.run(command).ends_with(1).json()["damage"].clone();
        assert_eq!((&damage["blocks"], &damage["complete"]), (&1.into(), &true.into()));
        assert_eq!(damage["lost_lists"], serde_json::json!([]));
    }
}

#[test]
fn a_repair_of_all_blocks_makes_a_lost_list_whole_and_one_of_a_part_does_not() {
    let place = Place::with_runtime("syscalls");
    place.volume("--size 1MiB", &noise(5, 1 << 20));
    let server = Server::start(&place, "v");
    place.run("scrub start v --wait").succeeds();
    server.stop().is_clean();
    lose_scrub_state(&place, "v");
    let part = place.run("verify v --repair --range 10..");
    assert!(part.ends_with(4).stderr.contains("not every block was checked since"), "{}", part.stderr);
    place.run("info v").ends_with(4);
    let all = place.run("verify v --repair");
    assert!(all.succeeds().stderr.contains("every block was checked, and the list is whole again"), "{}", all.stderr);
    for command in ["info v", "verify v", "scrub status v"] {
        place.run(command).succeeds();
    }
}

#[test]
fn a_mirror_says_of_which_replica_the_list_was_lost() {
    let place = Place::with_runtime("syscalls");
    filled(&place, 64);
    let server = Server::start(&place, "mirror:a,b");
    place.run("scrub start mirror:a,b --wait").succeeds();
    server.stop().is_clean();
    lose_scrub_state(&place, "b");
    const LOST: &str = "the list of bad blocks of b was lost";
    for command in ["info mirror:a,b", "mirror status mirror:a,b", "info b", "scrub status b"] {
        place.run(command).ends_with(4).says(&[LOST]);
    }
    let server = Server::start(&place, "mirror:a,b");
    let status = place.run("status mirror:a,b");
    status.ends_with(4).says(&["mirror:a,b is degraded: ", LOST, "checks all blocks"]);
    place.run("scrub status mirror:a,b").ends_with(4).says(&["last full scrub 2", LOST]);
    place.run("scrub start mirror:a,b --wait").succeeds();
    place.run("status mirror:a,b").succeeds().says(&["healthy"]);
    server.stop().is_clean();
    for command in ["info mirror:a,b", "mirror status mirror:a,b", "info b"] {
        place.run(command).succeeds();
    }
}

#[test]
fn a_repair_says_of_a_lost_copy_of_metadata_what_became_of_it() {
    let place = Place::with_runtime("syscalls");
    filled(&place, 64);
    // The two copies of the place of the label that was written last are among these four; one of each pair is lost.
    for offset in [4096, 32768 + 4096] {
        place.poke("b", offset, &[0; 512]);
    }
    let lost = place.run("verify b");
    lost.ends_with(4);
    assert!(lost.stderr.contains("--repair rewrites it"), "{}", lost.stderr);
    let repaired = place.run("verify b --repair");
    repaired.succeeds();
    assert!(repaired.stderr.contains("; it was rewritten"), "{}", repaired.stderr);
    assert!(!repaired.stderr.contains("not written anew"), "{}", repaired.stderr);
    let again = place.run("verify b");
    again.succeeds();
    assert!(again.stderr.is_empty(), "what was said is so: {}", again.stderr);
    place.run("verify mirror:a,b").succeeds();
}

#[test]
fn a_block_that_was_lost_before_it_could_be_copied_is_bad_on_the_copy_as_well() {
    let place = damaged(&[7]);
    place.run("create w --size 16MiB").succeeds();
    place.run("mirror create v w").ends_with(1);
    let status = String::from_utf8(place.run("mirror status mirror:v,w").ends_with(1).stdout.clone()).unwrap();
    assert_eq!(status.matches("1 block is bad (7)").count(), 2, "{status}");
    // A server that loses the replica with the remains still knows what is lost.
    let server = Server::start(&place, "mirror:v,w");
    place.run("status mirror:v,w").ends_with(1).says(&["1 block is bad (7)"]);
    place.run("mirror remove mirror:v,w v").says(&["replica         w: in sync; 1 block is bad (7)"]);
    place.run(&format!("status {}", server.address())).ends_with(1).says(&["damaged", "1 block is bad (7)"]);
    server.stop().is_clean();
    for told in ["info w", "scrub status w"] {
        place.run(told).ends_with(1).says(&["1 block is bad (7)"]);
    }
    place.run("verify w").ends_with(1).says(&["block 7: medium: cannot be read"]);
    // So is one that a copy or a rescue had to leave out, until it is written.
    for (made, command) in [("x", "copy v x --salvage"), ("y", "rescue v y")] {
        place.run(&format!("create {made} --size 16MiB")).succeeds();
        place.run(command).ends_with(1);
        place.run(&format!("info {made}")).ends_with(1).says(&["1 block is bad (7)"]);
        place.run(&format!("zero {made} --range 7..7")).succeeds();
        place.run(&format!("info {made}")).succeeds();
    }
}

#[test]
fn blocks_that_a_host_made_unreadable_are_told_from_damage_everywhere() {
    let place = Place::new();
    place.volume("--size 1MiB", &noise(1, 1 << 20));
    place.run("corrupt v --lba 9 --kind data").succeeds();
    let volume = TargetName::File(place.path("v"));
    on_reactor(async {
        let host = open(&volume, Access::Write).await?;
        let blocks = Extent::from_raw(20, 4).unwrap();
        let made = host.device.execute(Request::write_uncorrectable(blocks, Durability::Volatile)).await;
        host.close(made.map(drop).map_err(|error| device_error("write", &error))).await
    })
    .unwrap();
    let server = Server::start(&place, "v --log info --nbd 127.0.0.1:0");
    const MADE: &str = "4 blocks made unreadable by hosts (Write Uncorrectable): no damage";
    place.run("status v").succeeds().says(&[MADE, "no damage is known"]);
    place.run("scrub start v --wait").ends_with(1).says(&[
        "1 block is bad (9)",
        MADE,
        "5 bad, 0 repaired, 5 unrepaired",
    ]);
    place.run("status v").ends_with(1).says(&[MADE, "1 block is bad (9)"]);
    let told = place.run(&format!("copy {} -", server.target("v"))).ends_with(3).stderr.clone();
    assert!(told.contains("block 9"), "{told}");
    place.run(&format!("copy offset:20..23,{} -", server.target("v"))).ends_with(3);
    let told = place.run(&format!("verify {}", server.target("v"))).ends_with(1).stderr.clone();
    assert!(told.contains("4 of 5 bad blocks made unreadable by hosts"), "{told}");
    let over_nbd = format!("nbd://{}/v", server.ready["nbd"]["listeners"][0].as_str().unwrap());
    let told = place.run(&format!("verify {over_nbd}")).ends_with(1).stderr.clone();
    assert!(told.contains(&format!("{over_nbd}: unknown whether hosts made unreadable blocks so")), "{told}");
    let ended = server.stop();
    let warned = ended.is_clean().told_of("damage found");
    assert!(warned.iter().all(|line| line["blocks"] == "9"), "{warned:?}");
    assert!(ended.stderr.contains("scrub of v: 20..23: made unreadable by a host"), "{}", ended.stderr);
    place.run("info v").ends_with(1).says(&[MADE, "1 block is bad (9)"]);
    let told = place.run("verify v");
    told.ends_with(1);
    assert!(told.stderr.contains("4 of 5 bad blocks made unreadable by hosts"), "{}", told.stderr);
    place.run("zero v --range 20..23").succeeds();
    assert!(!place.run("verify v").ends_with(1).stderr.contains("made unreadable"), "they are written");
}
