//! Volumes in shards, by every command that meets volumes, and served on several cores.

use crate::common::server::{Nbd, Server};
use crate::common::{Place, noise};

const MIB: u64 = 1 << 20;
/// Blocks of a unit.
const UNIT: u64 = 256;

/// A volume of this many MiB in shards, which begins with some data.
fn filled(place: &Place, name: &str, mib: u64, shards: u32) -> Vec<u8> {
    place.run(&format!("create {name} --size {mib}MiB --shards {shards}")).succeeds();
    let data = noise(shards.into(), 5 << 20);
    place.write("data", &data);
    place.run(&format!("copy data {name}")).succeeds();
    data
}

#[test]
fn every_command_takes_it_for_one_volume() {
    let place = Place::new();
    let data = filled(&place, "v", 128, 2);
    let created = place.run("create w --size 128MiB --shards 2 --json").succeeds().json();
    assert_eq!((&created["shards"], &created["blocks"]), (&2.into(), &32768.into()));
    assert!(place.run("create x --size 64MiB --shards 1").succeeds().text().ends_with("Type 1\n"));
    place.run("info x").succeeds();
    assert!(!place.run("info x").text().contains("shards"), "one shard is a volume of version 2");

    let info = place.run("info v --json").succeeds().json();
    let volume = &info["volume"];
    assert_eq!((&info["blocks"], &volume["clean"]), (&32768.into(), &true.into()));
    assert_eq!(volume["medium_bytes"], place.len("v"));
    assert_eq!((&volume["shards"]["count"], &volume["shards"]["unit_blocks"]), (&2.into(), &UNIT.into()));
    assert_eq!(volume["shards"]["windows"][0]["offset"], 64 << 10);
    assert_eq!(volume["superblock_copies"].as_array().map(Vec::len), Some(9));
    assert!(place.run("info v").succeeds().text().contains("2 of 64 MiB, in units of 1 MiB"));

    place.run("verify v").succeeds();
    assert_eq!(place.run("copy v -").succeeds().stdout[..data.len()], data);
    place.run("copy v w").succeeds();
    assert!(place.run("compare v w").succeeds().text().contains("equal"));
    place.run(&format!("discard w --range 0..{}", 3 * UNIT)).succeeds();
    assert!(place.blocks("w", 10, 11).iter().all(|byte| *byte == 0));
    place.run("compare v w").ends_with(1);

    // Damage has the address of the volume, and nothing names the shard.
    let lba = 3 * UNIT + 7;
    place.run(&format!("corrupt v --lba {lba} --kind data")).succeeds();
    let found = place.run("verify v --json").ends_with(1).json();
    assert_eq!((&found["errors"][0]["lba"], &found["errors"][0]["member"]), (&lba.into(), &serde_json::Value::Null));
    place.run("verify v").ends_with(1).says(&[&format!("block {lba}: guard")]);
    place.run("corrupt v --lba 32768 --kind data").fails(2, &["past the last block, 32767"]);
    assert!(place.run("rescue v out").ends_with(1).text().contains("32767 of 32768 blocks copied"));
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    let place = Place::new();
    filled(&place, "v", 128, 2);
    for shards in ["0", "3", "32", "x"] {
        place.run(&format!("create w --size 1GiB --shards {shards}")).fails(2, &["must be 1, 2, 4, 8 or 16"]);
    }
    place.run("create w --size 100MiB --shards 2").fails(2, &["100 MiB", "too small for 2 shards", "fewer shards"]);
    place.run("create w --size 1GiB --shards 2").fails(2, &["too small for 2 shards", "512 MiB"]);
    assert!(!place.path("w").exists());
    place.run("resize v --size 256MiB").fails(3, &["a volume in shards cannot be resized", "sealblock copy"]);
    place.run("create v --size 8MiB").fails(3, &["it is already a protected volume", "--force"]);
    place.run("verify raw:v").fails(3, &["it is a protected volume"]);
    place.run("create v --size 8MiB --force").succeeds();
    assert_eq!(place.run("info v --json").succeeds().json()["volume"]["shards"], serde_json::Value::Null);
    place.run("create v --size 128MiB --shards 2 --force").succeeds();
    place.run("verify v").succeeds();
}

#[test]
fn lost_superblocks_are_reported_and_without_any_it_is_not_taken_for_free() {
    let place = Place::new();
    let data = filled(&place, "v", 128, 2);
    let third = place.len("v") - 4096;
    place.poke("v", 0, &[0; 4096]);
    place.poke("v", third, &[0; 4096]);
    place.run("info v").ends_with(4).says(&["7 of 9 good", "lost at byte 0"]);
    // An open for writing rewrites them.
    place.run("discard v --range 30000..30000").succeeds();
    place.run("info v").succeeds().says(&["9 of 9 good"]);
    assert_eq!(place.run("copy v -").succeeds().stdout[..data.len()], data);
    // One superblock of a shard.
    place.poke("v", 64 << 10, &[0; 4096]);
    place.run("info v").ends_with(4).says(&["8 of 9 good", "lost at byte 65536"]);
    place.run("discard v --range 30000..30000").succeeds();
    place.run("info v").succeeds();

    let info = place.run("info v --json").json();
    let last = &info["volume"]["shards"]["windows"][1];
    let (window, length) = (last["offset"].as_u64().unwrap(), last["bytes"].as_u64().unwrap());
    let whole = place.read("v");
    place.poke("v", window, &vec![0; length as usize]);
    place.run("verify v").fails(3, &["shard 1: ", "sealblock rescue VOLUME TO"]);
    place.write("v", &whole);
    for offset in [0, 32 << 10, third] {
        place.poke("v", offset, &[0; 4096]);
    }
    place.run("verify v").fails(3, &["remains of a protected volume", "the first shard of a volume in shards"]);
    place.run("create v --size 8MiB").fails(3, &["remains of a protected volume"]);
    place.run("verify raw:v").fails(3, &["remains of a protected volume"]);
    place.run("rescue v out").fails(3, &["it was in shards", "byte 65536", "a volume by itself"]);
    // A shard by itself is a volume, as its advice says.
    place.write("shard", &whole[64 << 10..window as usize]);
    place.run("verify shard").succeeds();
    assert_eq!(place.blocks("shard", UNIT, 2 * UNIT - 1), data[2 << 20..3 << 20]);
}

#[test]
fn what_the_other_shards_have_is_rescued() {
    let place = Place::new();
    let data = filled(&place, "v", 128, 2);
    let whole = place.read("v");
    let windows = place.run("info v --json").json()["volume"]["shards"]["windows"].clone();
    let window = |shard: usize| {
        let of = |key: &str| windows[shard][key].as_u64().unwrap() as usize;
        of("offset")..of("offset") + of("bytes")
    };
    filled(&place, "w", 128, 2);
    let foreign = place.read("w");
    for lost in [0, 1] {
        let mut zeroed = whole.clone();
        zeroed[window(lost)].fill(0);
        let mut exchanged = whole.clone();
        exchanged[window(lost)].copy_from_slice(&foreign[window(lost)]);
        let cut = whole[..window(lost).start].to_vec();
        let shapes = if lost == 0 { vec![zeroed, exchanged] } else { vec![zeroed, exchanged, cut] };
        for shape in shapes {
            place.write("damaged", &shape);
            let refused = place.run("verify damaged");
            refused.fails(3, &["sealblock rescue VOLUME TO"]);
            let rescued = place.run("rescue damaged out --force");
            rescued.ends_with(1).says(&["16384 of 32768 blocks copied"]);
            assert!(rescued.stderr.contains(&format!("shard {lost}: ")), "{}", rescued.stderr);
            assert!(place.read("damaged") == shape, "nothing is written");
            let out = place.read("out");
            for (unit, (read, was)) in out.chunks(1 << 20).zip(data.chunks(1 << 20)).enumerate() {
                let is_lost = unit % 2 == lost;
                assert!(if is_lost { read.iter().all(|byte| *byte == 0) } else { read[..was.len()] == *was }, "{unit}");
            }
        }
    }
    let mut none = whole.clone();
    [0, 1].into_iter().for_each(|shard| none[window(shard)].fill(0));
    place.write("damaged", &none);
    place.run("rescue damaged out --force").fails(3, &["shard 0: ", "use another copy of the data"]);
}

#[test]
fn mirrors_are_made_of_it_and_repair_it() {
    let place = Place::new();
    for name in ["a", "b"] {
        place.run(&format!("create {name} --size 128MiB --shards 2")).succeeds();
    }
    place.run("mirror create a b").succeeds();
    let data = noise(9, 5 << 20);
    place.write("data", &data);
    place.run("copy data mirror:a,b").succeeds();
    place.run("copy data a").fails(3, &["member"]);
    place.run("corrupt a --lba 700 --kind data").succeeds();
    place.run("verify mirror:a,b --repair").ends_with(1).says(&["block 700 on a", "repaired"]);
    place.run("verify mirror:a,b").succeeds();
    assert_eq!(place.run("copy a -").succeeds().stdout[..data.len()], data);
}

#[test]
fn shards_on_two_cores_keep_what_was_written_when_the_server_is_killed() {
    let place = Place::new();
    place.run("create v --size 256MiB --shards 4").succeeds();
    let server = Server::start(&place, "v --cores 2 --nbd 127.0.0.1:0");
    let v = server.target("v");
    let flushed = noise(3, 9 << 20);
    place.write("flushed", &flushed);
    place.run(&format!("copy flushed {v}?queues=2")).succeeds();
    place.run(&format!("verify {v}")).succeeds();
    // Over two units, of shards on different cores, and not flushed.
    let nbd = server.ready["nbd"]["listeners"][0].as_str().unwrap().to_owned();
    let mut client = Nbd::open(&nbd, "v").unwrap();
    let late = noise(4, 1 << 20);
    for at in [9, 10, 11, 12] {
        assert_eq!(client.write(at * MIB + MIB / 2, &late), 0);
    }
    server.kill();
    let info = place.run("info v --json").succeeds().json();
    assert_eq!(
        (&info["volume"]["clean"], &info["volume"]["unflushed_lost"]),
        (&false.into(), &serde_json::Value::Null)
    );
    place.run("verify v").succeeds();
    let blocks = place.blocks("v", 0, 14 * UNIT - 1);
    assert!(blocks[..9 << 20] == flushed);
    for at in [9_usize, 10, 11, 12] {
        let start = (at << 20) + (1 << 19);
        assert!(blocks[start..start + (1 << 20)] == late, "what was written at {at} MiB");
    }
}

#[test]
fn a_server_on_two_cores_scrubs_it_and_closes_all_shards() {
    let place = Place::new();
    let data = filled(&place, "v", 256, 4);
    place.run("corrupt v --lba 700 --kind data").succeeds();
    let mut server = Server::start(&place, "v --cores 2 --control control");
    place.run("scrub start v --control control").succeeds();
    assert_eq!(server.event()["event"], "scrub_started");
    assert_eq!(server.event()["event"], "scrub_finished");
    place.run("status --control control").ends_with(1).says(&["700"]);
    place.run("resize v --size 300MiB --control control").fails(3, &["a volume in shards cannot be resized"]);
    let target = server.target("v");
    // Written again over the network, on whichever core.
    place.write("block", &data[700 * 4096..701 * 4096]);
    place.run(&format!("copy block offset:700..700,{target}")).succeeds();
    place.run("status --control control").succeeds();
    server.stop().is_clean();
    let info = place.run("info v --json").succeeds().json();
    assert_eq!((&info["volume"]["clean"], &info["damage"]["blocks"]), (&true.into(), &0.into()));
    assert_eq!(place.run("copy v -").succeeds().stdout[..data.len()], data);
}
