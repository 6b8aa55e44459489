//! The states: each is made from outside, with the program and with bytes that are changed behind its back.

use std::fs;
use std::thread;
use std::time::Duration;

use sealblock_btrfs_format::checksum::ChecksumType;
use sealblock_btrfs_format::key::objectid;
use sealblock_media_volume::WhyLost;
use sealblock_media_volume::format::Superblock;
use sealblock_proofs_btrfs_images::handmade::{DATA_START, Handmade, Storage};

use crate::common::server::Server;
use crate::common::{BLOCK, Place, noise, until};

/// Blocks of a small volume.
const BLOCKS: usize = 64;
/// Where the log of a volume begins.
const LOG_START: u64 = 64 << 10;

/// What a state is made of: files whose names begin alike, filled with the same data.
pub struct Material {
    /// What the names of its volumes begin with.
    prefix: &'static str,
    /// The file with the data.
    pub data: &'static str,
    blocks: usize,
    /// A block that holds data.
    lba: u64,
}

/// Volumes of a few blocks.
pub const SMALL: Material = Material { prefix: "", data: "data", blocks: BLOCKS, lba: 5 };
/// Volumes with a filesystem, in which one file begins at the block that gets damaged.
pub const FILESYSTEM: Material =
    Material { prefix: "fs-", data: "image", blocks: 64 << 8, lba: DATA_START / BLOCK as u64 };

/// The same, with a filesystem that can be written, as `fs format` makes it.
pub const WRITABLE: Material = Material { prefix: "w-", data: "formatted", blocks: 128 << 8, lba: 10496 };

/// A state.
pub struct Scene {
    /// What it is called.
    pub title: &'static str,
    /// How it came about.
    pub about: &'static str,
    /// Makes it, and gives the target that is in it.
    make: fn(&Place, &Material) -> String,
    /// Whether the target is a mirror.
    pub is_mirror: bool,
    /// Whether the commands for filesystems are asked, too: on volumes of their own.
    pub has_filesystem: bool,
}

impl Scene {
    /// A place in this state, with the target, and with those that have a filesystem: one to be read, and one to be
    /// written.
    pub fn build(&self) -> (Place, String, Option<[String; 2]>) {
        let place = Place::in_memory();
        place.write("data", &noise(11, BLOCKS * BLOCK));
        place.write("older", &noise(10, BLOCKS * BLOCK));
        place.write("piece", &noise(12, 4 * BLOCK));
        place.run(&format!("create spare --size {}", BLOCKS * BLOCK)).succeeds();
        let target = (self.make)(&place, &SMALL);
        let filesystem = self.has_filesystem.then(|| {
            let mut made = Handmade::new(4096, ChecksumType::Crc32c);
            made.file(objectid::FIRST_FREE, b"file", &noise(2, 3 * BLOCK), Storage::Summed);
            made.build().write(&place.path("image")).unwrap();
            format(&place);
            [&FILESYSTEM, &WRITABLE].map(|material| (self.make)(&place, material))
        });
        (place, target, filesystem)
    }
}

/// Makes the filesystem that can be written, with a file.
fn format(place: &Place) {
    let content = noise(2, 3 * BLOCK);
    place.write("content", &content);
    place.write(WRITABLE.data, b"");
    place.set_len(WRITABLE.data, (WRITABLE.blocks * BLOCK) as u64);
    place.run("fs format formatted --metadata single").succeeds();
    place.run("fs put content formatted/file").succeeds();
    let at = WRITABLE.lba as usize * BLOCK;
    assert!(place.read(WRITABLE.data)[at..][..content.len()] == content, "the file lies elsewhere");
}

/// A volume and what it held before, then the data.
fn volume(place: &Place, of: &Material, name: &str, guard: &str) -> String {
    let name = format!("{}{name}", of.prefix);
    place.run(&format!("create {name} --size {} --guard {guard}", of.blocks * BLOCK)).succeeds();
    name
}

fn filled(place: &Place, of: &Material, guard: &str) -> String {
    let name = volume(place, of, "v", guard);
    place.run(&format!("copy {} {name}", of.data)).succeeds();
    name
}

/// Two replicas, and their mirror.
struct Pair {
    a: String,
    b: String,
    mirror: String,
}

/// A mirror that was filled twice, so that each block has older content that can come back.
fn pair(place: &Place, of: &Material, guard: &str) -> Pair {
    let [a, b] = ["a", "b"].map(|name| volume(place, of, name, guard));
    let mirror = format!("mirror:{a},{b}");
    if of.blocks == BLOCKS {
        place.run(&format!("copy older {mirror}")).succeeds();
    }
    place.run(&format!("copy {} {mirror}", of.data)).succeeds();
    Pair { a, b, mirror }
}

fn corrupt(place: &Place, volume: &str, lba: u64) {
    place.run(&format!("corrupt {volume} --lba {lba} --kind data")).succeeds();
}

fn hide(place: &Place, volume: &str) {
    fs::rename(place.path(volume), place.path(format!("{volume}.away"))).unwrap();
}

fn bring_back(place: &Place, volume: &str) {
    fs::rename(place.path(format!("{volume}.away")), place.path(volume)).unwrap();
}

/// Writes blocks once more, as they are, through a server that is killed right after, so that the logs below have records that count.
fn write_and_kill(place: &Place, of: &Material, target: &str) {
    let server = Server::start(place, &format!("{target} --no-relocate"));
    let served = server.target(target.split(':').next().unwrap());
    for first in [0, 8, 16, 24] {
        let (bytes, at) = (place.read(of.data), (of.lba + first) as usize * BLOCK);
        place.write("piece-of-it", &bytes[at..at + 4 * BLOCK]);
        // The blocks may be those of a file system, which is not written into unasked.
        place.run(&format!("copy piece-of-it offset:{}..,{served} --force", of.lba + first)).succeeds();
    }
    server.kill();
}

fn log_bytes(place: &Place, volume: &str) -> u64 {
    let info = place.run(&format!("info {volume} --json"));
    info.json()["volume"]["log_bytes"].as_u64().unwrap()
}

/// Has a server find the damage, by a host's Verify or by a scrub, which repairs what it can; and kills it.
fn find_and_kill(place: &Place, target: &str, by_scrub: bool) {
    let server = Server::start(place, target);
    let name = target.split(':').next().unwrap();
    match by_scrub {
        true => place.run(&format!("scrub start {target} --wait")),
        false => place.run(&format!("verify {}", server.target(name))),
    }
    .ends_with(1);
    // Servers save what is known within a second.
    thread::sleep(Duration::from_millis(2500));
    server.kill();
}

/// Overwrites the first copy in both places of a label: one of them is that of the newest label.
fn lose_label_copy(place: &Place, volume: &str) {
    for offset in [4096, 32768 + 4096] {
        place.poke(volume, offset, &[0; 512]);
    }
}

fn lost_label_copy(place: &Place, of: &Material) -> String {
    let pair = pair(place, of, "crc32c");
    lose_label_copy(place, &pair.b);
    pair.mirror
}

fn damaged(place: &Place, of: &Material) -> String {
    let v = filled(place, of, "crc32c");
    corrupt(place, &v, of.lba);
    v
}

fn known_damage(place: &Place, of: &Material) -> String {
    let v = damaged(place, of);
    find_and_kill(place, &v, false);
    v
}

fn older(place: &Place, of: &Material) -> String {
    let v = filled(place, of, "crc32c");
    write_and_kill(place, of, &v);
    let log = place.read(&v)[LOG_START as usize..][..log_bytes(place, &v) as usize].to_vec();
    // There are two copies of each sector, and only what comes before another one is known to have been there.
    let copy = log.len() / 2;
    let is_used = |at: &usize| log[at * 512..][..512].iter().any(|byte| *byte != 0);
    let used: Vec<usize> = (0..copy / 512).filter(is_used).collect();
    for at in &used[..used.len() - 1] {
        [at * 512, copy + at * 512].iter().for_each(|at| place.poke(&v, LOG_START + *at as u64, &[0; 512]));
    }
    v
}

fn log_lost(place: &Place, of: &Material) -> String {
    let v = filled(place, of, "crc32c");
    write_and_kill(place, of, &v);
    place.poke(&v, LOG_START, &vec![0; log_bytes(place, &v) as usize]);
    v
}

/// Superblocks and log of a state that was closed, put back after the volume was used again.
fn rolled_back(place: &Place, of: &Material) -> String {
    let v = filled(place, of, "crc32c");
    let yesterday = place.read(&v);
    place.run(&format!("copy piece offset:8..11,{v} --force")).succeeds();
    let log = log_bytes(place, &v) as usize;
    for (at, length) in [(0, 512), (32 << 10, 512), (LOG_START as usize, log), (yesterday.len() - 4096, 512)] {
        place.poke(&v, at as u64, &yesterday[at..at + length]);
    }
    v
}

/// What the next opening after the death of a process writes where notes are damaged. Volumes this small have no notes.
fn unflushed_lost(place: &Place, of: &Material) -> String {
    let v = filled(place, of, "crc32c");
    let bytes = place.read(&v);
    for at in [0, 32 << 10, bytes.len() - 4096] {
        let good = Superblock::decode(&bytes[at..]).unwrap();
        place.poke(&v, at as u64, &Superblock { unreported_loss: Some(WhyLost::Damaged), ..good }.encode());
    }
    v
}

fn rotten_without_guard(place: &Place, of: &Material) -> String {
    let v = filled(place, of, "none");
    let (first, bytes) = (of.lba as usize * BLOCK, place.read(of.data));
    let wanted = &bytes[first..first + BLOCK];
    let at = place.read(&v).chunks_exact(BLOCK).position(|held| held == wanted).unwrap();
    place.poke(&v, (at * BLOCK) as u64, &[wanted[0] ^ 1]);
    v
}

fn damaged_copy(place: &Place, of: &Material) -> String {
    let pair = pair(place, of, "crc32c");
    corrupt(place, &pair.b, of.lba);
    pair.mirror
}

fn damaged_everywhere(place: &Place, of: &Material) -> String {
    let pair = pair(place, of, "crc32c");
    corrupt(place, &pair.a, of.lba);
    corrupt(place, &pair.b, of.lba);
    pair.mirror
}

fn known_damaged_copy(place: &Place, of: &Material) -> String {
    let mirror = damaged_copy(place, of);
    find_and_kill(place, &mirror, false);
    mirror
}

/// The older copy of a block that the other replica has lost.
fn kept_older_copy(place: &Place, of: &Material) -> String {
    let pair = pair(place, of, "crc16");
    hide(place, &pair.b);
    place.run(&format!("zero {} --range 1..1", pair.mirror)).ends_with(4);
    corrupt(place, &pair.a, of.lba);
    bring_back(place, &pair.b);
    let server = Server::start(place, &pair.mirror);
    let status = format!("mirror status {}", pair.mirror);
    until(|| place.run(&format!("{status} --json")).json()["nosync_bytes"] == 0);
    until(|| !place.run(&status).text().contains("resyncing"));
    server.stop().is_clean();
    pair.mirror
}

/// Copies that differ, of which no seal says which is right.
fn conflict(place: &Place, of: &Material) -> String {
    place.run(&format!("create a --size {} --block-size 512 --guard none", of.blocks * BLOCK)).succeeds();
    place.write("b", &[]);
    place.set_len("b", (of.blocks * BLOCK) as u64);
    let mirror = "mirror:a,raw:b".to_owned();
    place.run(&format!("copy {} {mirror}", of.data)).succeeds();
    place.poke("b", of.lba * 512, &[0; 512]);
    mirror
}

/// The same, which a server has found.
fn known_conflict(place: &Place, of: &Material) -> String {
    let mirror = conflict(place, of);
    find_and_kill(place, &mirror, true);
    mirror
}

fn missing(place: &Place, of: &Material) -> String {
    let pair = pair(place, of, "crc32c");
    hide(place, &pair.b);
    pair.mirror
}

fn behind(place: &Place, of: &Material) -> Pair {
    let pair = pair(place, of, "crc32c");
    hide(place, &pair.b);
    place.run(&format!("zero {} --range 1..1", pair.mirror)).ends_with(4);
    bring_back(place, &pair.b);
    pair
}

/// The label of `b` says that it is behind: it came back, and its resync did not get far.
fn behind_and_marked(place: &Place, of: &Material) -> Pair {
    let pair = behind(place, of);
    let mirror = format!("mirror:{},[fault:[write-error@1],{}]", pair.a, pair.b);
    let server = Server::start(place, &mirror);
    until(|| place.run(&format!("mirror status {mirror} --json")).json()["replicas"][1]["failures"] != 0);
    server.kill();
    pair
}

fn stale_alone(place: &Place, of: &Material) -> String {
    behind_and_marked(place, of).b
}

fn stale_without_the_other(place: &Place, of: &Material) -> String {
    let pair = behind_and_marked(place, of);
    hide(place, &pair.a);
    pair.mirror
}

fn begun(place: &Place, of: &Material) -> Pair {
    let [a, b] = ["a", "b"].map(|name| volume(place, of, name, "crc32c"));
    place.run(&format!("copy {} {a}", of.data)).succeeds();
    place.run(&format!("mirror create {a} {b} --from {a} --no-wait")).succeeds();
    Pair { mirror: format!("mirror:{a},{b}"), a, b }
}

fn lost_log_of_one(place: &Place, of: &Material) -> String {
    let pair = pair(place, of, "crc32c");
    write_and_kill(place, of, &pair.mirror);
    place.poke(&pair.b, LOG_START, &vec![0; log_bytes(place, &pair.b) as usize]);
    pair.mirror
}

fn split_brain(place: &Place, of: &Material) -> String {
    let pair = pair(place, of, "crc32c");
    for (here, away, lba) in [(&pair.a, &pair.b, 1), (&pair.b, &pair.a, 2)] {
        hide(place, away);
        place.run(&format!("zero {} --range {lba}..{lba}", pair.mirror)).ends_with(4);
        bring_back(place, away);
        assert!(place.path(here).exists());
    }
    pair.mirror
}

const fn volume_in(title: &'static str, about: &'static str, make: fn(&Place, &Material) -> String) -> Scene {
    Scene { title, about, make, is_mirror: false, has_filesystem: true }
}

const fn without_filesystem(scene: Scene) -> Scene {
    Scene { has_filesystem: false, ..scene }
}

const fn mirror_in(title: &'static str, about: &'static str, make: fn(&Place, &Material) -> String) -> Scene {
    Scene { title, about, make, is_mirror: true, has_filesystem: false }
}

/// How writes that were not flushed got lost.
const UNFLUSHED_LOST: &str =
    "A server was killed, the notes of what it had answered were damaged, and no server has told its hosts yet.";

/// All states, in the order of the table.
pub fn scenes() -> Vec<Scene> {
    vec![
        volume_in("clean volume", "Filled and closed.", |place, of| filled(place, of, "crc32c")),
        volume_in("damaged block", "A bit of block 5 is flipped, and nobody has looked.", damaged),
        without_filesystem(volume_in(
            "damage known before a restart",
            "The same; a server found it and was killed.",
            known_damage,
        )),
        volume_in(
            "part of the log lost",
            "A server was killed, and all sectors of the log but the last one are zeroes.",
            older,
        ),
        volume_in("log lost", "A server was killed, and the whole log is zeroes.", log_lost),
        volume_in("put back in part", "Superblocks and log are those of before a write.", rolled_back),
        volume_in(
            "no guard, and rot",
            "Created with `--guard none`; a bit of block 5 is flipped.",
            rotten_without_guard,
        ),
        without_filesystem(volume_in("unflushed writes may be lost", UNFLUSHED_LOST, unflushed_lost)),
        mirror_in("clean mirror", "Filled and closed.", |place, of| pair(place, of, "crc32c").mirror),
        mirror_in("damaged copy", "Block 5 is bad on `b`, and nobody has looked.", damaged_copy),
        mirror_in("damaged on every replica", "Block 5 is bad on `a` and on `b`.", damaged_everywhere),
        mirror_in(
            "damaged copy known before a restart",
            "Block 5 is bad on `b`; a server found it and was killed.",
            known_damaged_copy,
        ),
        mirror_in(
            "older copy kept",
            "`a` has lost block 5, and `b`, which was away, has an older copy.",
            kept_older_copy,
        ),
        mirror_in(
            "copies differ",
            "Blocks of 512 bytes; `b` is a plain file without seals, and has zeroes in block 5.",
            conflict,
        ),
        mirror_in(
            "copies known to differ before a restart",
            "The same; a server found it and was killed.",
            known_conflict,
        ),
        mirror_in("missing member", "The file of `b` is gone.", missing),
        mirror_in("stale member", "`b` was away while block 1 was written, and is back.", |place, of| {
            behind(place, of).mirror
        }),
        mirror_in(
            "stale member alone",
            "The mirror `mirror:a,b` without `a`, where the label of `b` says that it is out of sync.",
            stale_without_the_other,
        ),
        volume_in(
            "out-of-sync replica by itself",
            "`b` of a mirror; its label says that it is out of sync.",
            stale_alone,
        ),
        mirror_in("unfinished resync", "`mirror create a b --from a --no-wait`.", |place, of| begun(place, of).mirror),
        without_filesystem(volume_in(
            "unfinished resync, the new replica by itself",
            "`b` of the same mirror.",
            |place, of| begun(place, of).b,
        )),
        mirror_in("copy of a label lost", "One of the two copies of the label of `b` is zeroes.", lost_label_copy),
        mirror_in("log of one replica lost", "A server was killed, and the log of `b` is zeroes.", lost_log_of_one),
        mirror_in("split brain", "Each replica was written without the other.", split_brain),
    ]
}
