//! Damage on replicas: what is repaired, what is lost, and the exit status.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use crate::common::server::Server;
use crate::common::{Answer, BLOCK, Place, filled, noise, verify};
use serde_json::Value;

const KINDS: [&str; 6] = ["data", "guard", "ref-tag", "app-tag", "lost-write", "misdirected"];

/// Different numbers below `blocks`.
fn draw(seed: u64, count: usize, blocks: u64) -> Vec<u64> {
    let (mut drawn, mut state) = (BTreeSet::new(), seed);
    while drawn.len() < count {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        drawn.insert((state >> 33) % blocks);
    }
    drawn.into_iter().collect()
}

fn corrupt(place: &Place, volume: &str, lbas: impl IntoIterator<Item = u64>) {
    for (lba, kind) in lbas.into_iter().zip(KINDS.into_iter().cycle()) {
        place.run(&format!("corrupt {volume} --lba {lba} --kind {kind}")).succeeds();
    }
}

/// Block, replica and whether it was repaired.
fn errors(report: &Value) -> Vec<(u64, String, bool)> {
    let errors = report["errors"].as_array().unwrap().iter();
    errors
        .map(|error| {
            let replica = error["member"].as_str().unwrap_or_default().to_owned();
            (error["lba"].as_u64().unwrap(), replica, error["repaired"].as_bool().unwrap())
        })
        .collect()
}

fn lbas(report: &Value) -> BTreeSet<u64> {
    errors(report).into_iter().map(|(lba, ..)| lba).collect()
}

#[test]
fn a_thousand_damaged_blocks_on_each_replica_one_of_them_remote_are_read_and_repaired() {
    let place = Place::with_runtime("syscalls");
    let data = filled(&place, 8192);
    let damaged = draw(5, 2000, 8192);
    let (on_a, on_b) = damaged.split_at(1000);
    thread::scope(|scope| {
        scope.spawn(|| corrupt(&place, "a", on_a.iter().copied()));
        scope.spawn(|| corrupt(&place, "b", on_b.iter().copied()));
    });
    assert_eq!(lbas(&verify(&place, "a", 1)), on_a.iter().copied().collect());
    let server = Server::start(&place, "--protection shown --as-member b");
    let b = server.target("b");
    let mirror = format!("mirror:a,{b}");
    assert_eq!(lbas(&verify(&place, &b, 1)), on_b.iter().copied().collect());

    // An open for reading repairs nothing; every block is right all the same.
    place.run(&format!("copy {mirror} out")).succeeds();
    assert!(place.read("out") == data);

    let repaired = place.run(&format!("verify {mirror} --repair --json")).ends_with(1).json();
    let found = errors(&repaired);
    assert_eq!(found.len(), 2000);
    assert!(found.iter().all(|(_, _, repaired)| *repaired));
    let replicas: BTreeSet<u64> = found.iter().filter(|(_, replica, _)| replica == "a").map(|(lba, ..)| *lba).collect();
    assert_eq!(replicas, on_a.iter().copied().collect());
    verify(&place, "a", 0);
    verify(&place, &b, 0);
    let clean = verify(&place, &mirror, 0);
    assert_eq!(clean["bytes_transferred"], 0, "both replicas look and sum where their data are");
    server.stop().is_clean();
    place.run("compare a b").succeeds();
}

/// Whether the pieces of a mirror between these blocks read as expected, and the blocks themselves fail.
fn assert_reads_but(place: &Place, data: &[u8], lost: &[u64]) {
    let mut first = 0;
    for end in lost.iter().copied().chain([(data.len() / BLOCK) as u64]) {
        if first < end {
            let expected = &data[first as usize * BLOCK..end as usize * BLOCK];
            assert!(place.blocks("mirror:a,b", first, end - 1) == expected, "blocks {first} to {}", end - 1);
        }
        first = end + 1;
    }
    for lba in lost {
        place.run(&format!("copy offset:{lba}..{lba},mirror:a,b out")).fails(3, &["integrity"]);
    }
}

/// Whether a block of 8192 lies in one of a hundred regions of 64 KiB, of 16 blocks each, that a replica lacks.
fn is_stale(lba: u64) -> bool {
    lba % 80 < 16 && lba < 8000
}

/// The block that is written in each of these regions.
fn is_written(lba: u64) -> bool {
    is_stale(lba) && lba % 80 == 3
}

/// A thousand blocks to be damaged on one replica, a thousand others on the other one, and fifty on both.
fn draw_damage() -> [Vec<u64>; 3] {
    let mix = |lba: &u64| lba.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(20) & 0xFFFF_FFFF;
    let (mut both, mut others): (Vec<u64>, Vec<u64>) = (Vec::new(), Vec::new());
    for lba in draw(9, 2200, 8192).into_iter().filter(|lba| !is_written(*lba)) {
        if both.len() < 50 && !is_stale(lba) && mix(&lba) % 8 == 0 { both.push(lba) } else { others.push(lba) }
    }
    others.sort_by_key(mix);
    [others[..1000].to_vec(), others[1000..2000].to_vec(), both]
}

/// Two replicas, of which the second, `b.away`, lacks a hundred regions, with this damage; and what they should hold.
fn damaged_and_stale(place: &Place, [on_a, on_b, both]: &[Vec<u64>; 3]) -> Vec<u8> {
    let mut data = filled(place, 8192);
    verify(place, "mirror:a,b", 0);
    rename(place, "b", "b.away");
    for lba in (0..8192).filter(|lba| is_written(*lba)) {
        place.run(&format!("zero mirror:a,b --range {lba}..{lba}")).ends_with(4);
        let lba = lba as usize;
        data[lba * BLOCK..(lba + 1) * BLOCK].fill(0);
    }
    let alone = verify(place, "mirror:a,b", 4);
    assert_eq!((errors(&alone), alone["unchecked"].as_array().unwrap().len()), (vec![], 1), "no damage, and no b");
    place.run("mirror status mirror:a,b").ends_with(4);
    // What was not rewritten in a region that b lacks is current there: what is left of the data's seal on a proves it.
    rot(place, "a", &data, on_a.iter().chain(both));
    rot(place, "b.away", &data, on_b.iter().chain(both));
    data
}

/// Flips a bit of what the file of a volume holds of these blocks, wherever that lies.
fn rot<'a>(place: &Place, volume: &str, data: &[u8], lbas: impl Iterator<Item = &'a u64>) {
    let blocks = lbas.map(|lba| (&data[*lba as usize * BLOCK..][..BLOCK], *lba));
    let (mut left, mut file): (BTreeMap<&[u8], u64>, Vec<u8>) = (blocks.collect(), place.read(volume));
    for held in file.chunks_exact_mut(BLOCK) {
        if left.remove(&*held).is_some() {
            held[7] ^= 1;
        }
    }
    assert!(left.is_empty(), "{volume} does not hold {:?}", left.values());
    place.write(volume, &file);
}

fn rename(place: &Place, from: &str, to: &str) {
    std::fs::rename(place.path(from), place.path(to)).unwrap();
}

#[test]
fn damage_on_both_replicas_beside_a_hundred_stale_regions_ends_as_the_exit_status_says() {
    let place = Place::with_runtime("syscalls");
    let damage = draw_damage();
    let data = damaged_and_stale(&place, &damage);
    let [_, _, both] = &damage;
    assert_eq!(
        errors(&verify(&place, "mirror:a,b", 1)).len(),
        1050,
        "damage counts for more than a replica that is away"
    );

    rename(&place, "b.away", "b");
    let repaired = verify(&place, "mirror:a,b --repair", 1);
    let lasting = |report: &Value| -> BTreeSet<(u64, String)> {
        errors(report)
            .into_iter()
            .filter(|(_, _, repaired)| !repaired)
            .map(|(lba, replica, _)| (lba, replica))
            .collect()
    };
    let lost: BTreeSet<_> = both.iter().flat_map(|lba| ["a", "b"].map(|replica| (*lba, replica.to_owned()))).collect();
    assert_eq!(lasting(&repaired), lost);
    assert_eq!(lasting(&verify(&place, "mirror:a,b", 1)), lost, "and nothing else is left");
    assert_reads_but(&place, &data, both);
    let bad = format!("in sync; {} blocks are bad", both.len());
    place.run("mirror status mirror:a,b").ends_with(1).says(&[&format!("a: {bad}"), &format!("b: {bad}")]);

    // Writing the lost ones ends it.
    for lba in both {
        place.run(&format!("zero mirror:a,b --range {lba}..{lba}")).succeeds();
    }
    place.run("mirror status mirror:a,b").succeeds().says(&["optimal"]);
    assert_eq!(errors(&verify(&place, "mirror:a,b", 0)), []);
    rename(&place, "a", "a.away");
    verify(&place, "mirror:a,b", 4);
}

#[test]
fn blocks_damaged_on_both_replicas_are_lost_and_stay_so() {
    let place = Place::with_runtime("syscalls");
    let data = filled(&place, 512);
    corrupt(&place, "a", [3, 100, 200]);
    corrupt(&place, "b", [4, 100]);
    for _ in 0..2 {
        let report = place.run("verify mirror:a,b --repair --json").ends_with(1).json();
        let lost: Vec<_> = errors(&report).into_iter().filter(|(_, _, repaired)| !repaired).collect();
        assert_eq!(lost, [(100, "a".to_owned(), false), (100, "b".to_owned(), false)]);
    }
    let told = place.run("verify mirror:a,b --repair");
    assert!(told.ends_with(1).stderr.contains("2 of 2 could not be repaired"), "{}", told.stderr);
    place.run("copy mirror:a,b out").fails(3, &["block 100"]);
    assert!(place.blocks("mirror:a,b", 0, 99) == data[..100 * BLOCK]);
    place.run("zero mirror:a,b --range 100..100").succeeds();
    verify(&place, "mirror:a,b", 0);
}

#[test]
fn a_replica_that_may_have_the_only_copy_of_a_block_is_not_given_up_without_force() {
    let place = Place::with_runtime("syscalls");
    let data = filled(&place, 256);
    corrupt(&place, "b", [7, 9]);
    // A host's Verify finds them, and repairs nothing.
    let server = Server::start(&place, "mirror:a,b");
    place.run(&format!("verify {}", server.target("mirror"))).ends_with(1);
    let names =
        ["a may have the only good copies of 2 blocks (7, 9)", "the remaining replicas, b", "--repair", "--force"];
    place.run("mirror remove mirror:a,b a").fails(3, &names);
    place.run("mirror status mirror:a,b").ends_with(1).says(&["a: in sync", "b: in sync; 2 blocks are bad (7, 9)"]);
    server.stop().is_clean();
    place.run("mirror remove mirror:a,b a").fails(3, &names);
    // The one that has nothing of its own goes, and so does the other one where its copies are elsewhere.
    place.run(&format!("create c --size {}", 256 * BLOCK)).succeeds();
    for name in ["a", "b"] {
        fs::copy(place.path(name), place.path(format!("{name}.kept"))).unwrap();
    }
    place.run("mirror replace mirror:a,b a c").says(&["c: in sync"]);
    assert!(place.blocks("c", 0, 255) == data);
    for name in ["a", "b"] {
        fs::rename(place.path(format!("{name}.kept")), place.path(name)).unwrap();
    }
    place.run("mirror remove mirror:a,b b").succeeds().says(&["optimal", "a: in sync"]);
    let place = Place::with_runtime("syscalls");
    filled(&place, 256);
    corrupt(&place, "b", [7]);
    let server = Server::start(&place, "mirror:a,b");
    place.run(&format!("verify {}", server.target("mirror"))).ends_with(1);
    server.stop().is_clean();
    place.run("mirror remove mirror:a,b a --force").ends_with(1).says(&["b: in sync; 1 block is bad (7)"]);
}

#[test]
fn a_replica_that_has_the_last_older_copy_or_is_the_last_in_sync_one_stays() {
    let place = Place::with_runtime("syscalls");
    for name in ["a", "b", "c"] {
        place.run(&format!("create {name} --size 1MiB --guard crc16")).succeeds();
    }
    place.write("data", &noise(5, 1 << 20));
    place.run("copy data mirror:a,b").succeeds();
    rename(&place, "b", "b.away");
    place.run("zero mirror:a,b --range 1..1").ends_with(4);
    corrupt(&place, "a", [5]);
    rename(&place, "b.away", "b");
    // While it has what was written last, and the other one is behind it.
    let behind = "mirror:a,[fault:[write-error@1],b]";
    let server = Server::start(&place, behind);
    place
        .run(&format!("mirror remove {behind} a --force"))
        .fails(3, &["last in-sync replica", "no full copy: ", "b is "]);
    server.stop();
    let server = Server::start(&place, "mirror:a,b");
    let start = Instant::now();
    while !place.run("mirror status mirror:a,b").text().contains("older copies kept") {
        assert!(start.elapsed() < Duration::from_secs(30), "the older copy is not kept");
        thread::sleep(Duration::from_millis(20));
    }
    let names = ["b has the only, older copies of 1 block", "the remaining replicas, a", "accept-stale", "--force"];
    place.run("mirror remove mirror:a,b b").fails(3, &names);
    server.stop().is_clean();
    place.run("mirror remove mirror:a,b b").fails(3, &names);
    place.run("mirror remove mirror:a,b b --force").ends_with(1);
}

#[test]
fn a_lost_write_is_repaired_where_generations_are_known_and_a_conflict_where_not() {
    let place = Place::with_runtime("syscalls");
    let data = filled(&place, 512);
    place.run("corrupt b --lba 7 --kind lost-write").succeeds();
    let report = place.run("verify mirror:a,b --repair --json").ends_with(1).json();
    assert_eq!(errors(&report), [(7, "b".to_owned(), true)]);
    assert_eq!(report["errors"][0]["field"], "storage_tag");
    assert!(place.blocks("b", 7, 7) == data[7 * BLOCK..8 * BLOCK]);
    verify(&place, "mirror:a,b", 0);

    // A raw file keeps no generations.
    place.run(&format!("create r --size {} --block-size 512 --guard none", 64 * BLOCK)).succeeds();
    std::fs::File::create(place.path("s")).unwrap().set_len(64 * BLOCK as u64).unwrap();
    place.write("data", &noise(3, 64 * BLOCK));
    place.run("copy data mirror:r,raw:s").succeeds();
    verify(&place, "mirror:r,raw:s", 0);
    place.poke("s", 512 * 33, &[0; 512]);
    let report = place.run("verify mirror:r,raw:s --repair --json").ends_with(1).json();
    assert_eq!(
        (errors(&report), &report["errors"][0]["field"]),
        (vec![(33, "raw:s".to_owned(), false)], &"conflict".into())
    );
    place.run("verify mirror:r,raw:s").ends_with(1).says(&["block 33 on raw:s: conflict: good copies differ"]);
}

/// Where the copies of the group label of a volume begin: each with its magic, and the number of the area, 0, at byte 20.
fn label_copies(place: &Place, volume: &str) -> Vec<usize> {
    let bytes = place.read(volume);
    let is_copy = |at: &usize| bytes[*at..].starts_with(b"SANX") && bytes[*at + 20] == 0;
    (0..bytes.len()).step_by(512).filter(is_copy).collect()
}

/// Puts the first of so many copies of the label of `from`, a volume of the same shape, in the places of those of `volume`.
fn transplant(place: &Place, from: &str, volume: &str, count: usize) {
    const COPY_BYTES: usize = 20 << 10;
    let (bytes, copies) = (place.read(from), label_copies(place, volume));
    assert_eq!((copies.len(), &copies), (4, &label_copies(place, from)), "both were labelled more than once");
    copies.into_iter().take(count).for_each(|at| place.poke(volume, at as u64, &bytes[at..at + COPY_BYTES]));
}

/// The bytes of a volume as a power cut leaves them in the middle of its label: those of before, with the first copy of the newest label
/// of now, and a part of the second: this label has less than a sector, and not every medium writes a sector as a whole.
fn cut_off_label(place: &Place, volume: &str, before: &[u8]) -> Vec<u8> {
    const COPY_BYTES: usize = 20 << 10;
    let (now, mut cut) = (place.read(volume), before.to_vec());
    let write_seq = |at: &usize| u64::from_le_bytes(now[at + 8..at + 16].try_into().unwrap());
    let copies = label_copies(place, volume);
    let newest = copies.iter().map(write_seq).max().unwrap();
    let twins: Vec<usize> = copies.into_iter().filter(|at| write_seq(at) == newest).collect();
    for (at, bytes) in twins.into_iter().zip([COPY_BYTES, 128]) {
        cut[at..at + bytes].copy_from_slice(&now[at..at + bytes]);
    }
    cut
}

#[test]
fn a_label_that_a_power_cut_tore_is_not_called_damaged_alone_and_the_next_write_ends_it() {
    let place = Place::with_runtime("syscalls");
    let data = filled(&place, 512);
    place.write("data", &data);
    let before = place.read("a");
    place.run("copy data mirror:a,b").succeeds();
    let (cut, closed) = (cut_off_label(&place, "a", &before), place.read("a"));
    place.write("a", &cut);
    let info = place.run("info a");
    let said = "lost copies: 1, damaged, or cut off by a crash while written";
    assert!(info.text().contains(said), "{}", info.text());
    let counts = |answer: &Answer| {
        let json = answer.json()["volume"].clone();
        ["lost_metadata_copies", "maybe_cut_off_metadata_copies"].map(|field| json[field].as_u64().unwrap())
    };
    assert_eq!(counts(&place.run("info a --json")), [1, 1]);
    let found = place.run("verify mirror:a,b").ends_with(4).stderr.clone();
    assert!(found.contains("used: 1, damaged, or cut off by a crash while written; --repair rewrites it"), "{found}");
    // Either ends it.
    for end in ["zero mirror:a,b --range 2", "verify mirror:a,b --repair"] {
        place.write("a", &cut);
        place.run(end);
        assert_eq!(counts(&place.run("info a --json")), [0, 0], "{end}");
        verify(&place, "mirror:a,b", 0);
        assert!(place.blocks("mirror:a,b", 3, 511) == data[3 * BLOCK..]);
    }
    // Twin: a volume that was closed in good order knows that its label was complete.
    place.write("a", &closed);
    let copies = label_copies(&place, "a");
    let write_seq = |at: &usize| u64::from_le_bytes(closed[at + 8..at + 16].try_into().unwrap());
    let newest = copies.into_iter().max_by_key(write_seq).unwrap();
    place.poke("a", newest as u64 + 64, &[0xA5]);
    assert_eq!(counts(&place.run("info a --json")), [1, 0]);
    let info = place.run("info a");
    assert!(info.text().contains("lost copies: 1; "), "{}", info.text());
}

#[test]
fn labels_of_another_volume_are_damage_and_no_sign_of_a_device_without_one() {
    let place = Place::with_runtime("syscalls");
    let data = filled(&place, 512);
    let size = 512 * BLOCK;
    for name in ["x", "y", "c"] {
        place.run(&format!("create {name} --size {size}")).succeeds();
    }
    place.run("zero mirror:x,y --range 0").succeeds();
    for count in 1..4 {
        transplant(&place, "x", "a", count);
        let copied = place.run("copy mirror:a,b out");
        // Of three the last may be the label before, which is none.
        assert!(copied.status == 0 || copied.status == 4 && count == 3, "{count}: {}", copied.stderr);
        assert!(place.read("out") == data, "{count} copies are another volume's");
    }
    place.run("zero mirror:x,y --range 0").succeeds();
    transplant(&place, "x", "a", 4);
    // What it said of `b` is not known. The mirror goes on without it for who reads, and it is nothing that may be written by itself.
    let without = place.run("copy mirror:a,b out");
    assert!(without.ends_with(4).stderr.contains("runs without a: its label cannot be used"), "{}", without.stderr);
    assert!(place.read("out") == data);
    place.run("mirror status mirror:a,b").ends_with(4).says(&["a: ", "offline", "every copy of the label"]);
    for command in ["zero mirror:a,b --range 0", "verify mirror:a,b --repair", "mirror replace mirror:a,b a"] {
        let advice = "mirror replace mirror:a,b a --force";
        place.run(command).fails(3, &["may be older", "that of a may have marked the others", advice]);
    }
    place.run("zero a --range 0").fails(3, &["member of a mirror or stripe", "--force-member"]);
    place.run("mirror create a c").fails(3, &["a is a device whose label cannot be used", "--force"]);
    // What its label said is not known: that it was out of sync, perhaps.
    place.run("copy a out").ends_with(4);
    assert!(place.read("out") == data, "nothing of it was changed");
    place.run("mirror replace mirror:a,b a --force").succeeds().says(&["a: in sync"]);
    verify(&place, "mirror:a,b", 0);
}

#[test]
fn older_content_beside_a_lost_label_is_never_served_in_silence() {
    let place = Place::with_runtime("syscalls");
    let older = filled(&place, 512);
    for name in ["x", "y"] {
        place.run(&format!("create {name} --size {}", 512 * BLOCK)).succeeds();
    }
    place.run("zero mirror:x,y --range 0").succeeds();
    place.run("zero mirror:x,y --range 0").succeeds();
    // `b` is away while `a` is written, and knows nothing of it.
    place.write("data", &noise(8, 512 * BLOCK));
    rename(&place, "b", "away");
    place.run("copy data mirror:a,b").ends_with(4);
    rename(&place, "away", "b");
    transplant(&place, "x", "a", 4);
    for target in ["mirror:a,b", "mirror:b,a"] {
        for command in [format!("copy {target} out"), format!("compare {target} {target}"), format!("info {target}")] {
            let answer = place.run(&command);
            let said = answer.ends_with(4).text() + &answer.stderr;
            assert!(said.contains("every copy of the label of a replica or member is lost"), "{command}: {said}");
        }
        place.run(&format!("verify {target}")).ends_with(4);
        let json = place.run(&format!("info {target} --json")).ends_with(4).json();
        assert_eq!(json["may_be_older"], "label_lost");
        place.run(&format!("zero {target} --range 0")).fails(3, &["may be older", "--force"]);
        let advice = format!("mirror replace {target} a --force");
        let refused = place.run(&format!("serve {target} --listen 127.0.0.1:0"));
        refused.fails(3, &["may be older", &advice, "--accept-older"]);
        assert!(!refused.stderr.contains("rescue"), "{}", refused.stderr);
    }
    assert!(place.read("out") == older);
    // The newer content is there to be copied.
    place.run("copy a out").ends_with(4);
    assert!(place.read("out") == place.read("data"));
}

#[test]
fn a_replica_whose_file_was_cut_off_may_have_marked_the_others() {
    let place = Place::with_runtime("syscalls");
    let older = filled(&place, 512);
    // `b` is away while `a` is written, and knows nothing of it.
    place.write("data", &noise(8, 512 * BLOCK));
    rename(&place, "b", "away");
    place.run("copy data mirror:a,b").ends_with(4);
    rename(&place, "away", "b");
    let whole = |name: &str| std::fs::metadata(place.path(name)).unwrap().len();
    let cut = |name: &str| place.set_len(name, whole(name) - BLOCK as u64);
    let copy_of_a = place.read("a");
    cut("a");
    for target in ["mirror:a,b", "mirror:b,a"] {
        place.run(&format!("copy {target} out")).ends_with(4);
        assert!(place.read("out") == older);
        let json = place.run(&format!("info {target} --json")).ends_with(4).json();
        assert_eq!(json["may_be_older"], "label_lost");
        place.run(&format!("zero {target} --range 0")).fails(3, &["may be older", "--force"]);
        place.run(&format!("mirror remove {target} a")).fails(3, &["may be older", "--force"]);
    }
    // Twin: without the end of a replica that lacks the changes, those are there.
    place.write("a", &copy_of_a);
    cut("b");
    for target in ["mirror:a,b", "mirror:b,a"] {
        place.run(&format!("copy {target} out")).succeeds();
        assert!(place.read("out") == place.read("data"));
    }
}

#[test]
fn a_member_of_a_stripe_with_the_label_of_another_volume_is_named_and_a_mirror_goes_on_without_the_stripe() {
    let place = Place::with_runtime("syscalls");
    let data = noise(5, 512 * BLOCK);
    place.write("data", &data);
    for name in ["m", "n", "x", "y"] {
        place.run(&format!("create {name} --size {}", 256 * BLOCK)).succeeds();
    }
    place.run(&format!("create c --size {}", 512 * BLOCK)).succeeds();
    place.run("zero stripe:x,y --range 0").succeeds();
    place.run("zero stripe:x,y --range 0").succeeds();
    place.run("copy data mirror:[stripe:m,n],c").succeeds();
    place.run("copy data mirror:[stripe:m,n],c").succeeds();
    for member in ["m", "n"] {
        let whole = place.read(member);
        transplant(&place, "x", member, 4);
        for command in ["verify", "copy data"] {
            place.run(&format!("{command} stripe:m,n")).fails(3, &["every copy of the label", &format!("is {member}")]);
        }
        let without = place.run("copy mirror:[stripe:m,n],c out");
        assert!(without.succeeds().stderr.contains("runs without stripe:m,n"), "{}", without.stderr);
        assert!(place.read("out") == data);
        place.write(member, &whole);
        place.run("verify mirror:[stripe:m,n],c").succeeds();
    }
}
