//! Replicas whose devices may lack what was written to them last, as a volume that has lost its log: what they have counts only where
//! no other replica has the content, and they are resynchronised as a whole.

use futures_util::FutureExt;
use sealblock_block::{Device, ErrorKind, Freshness, Request, ReservedArea, Response, WhyOlder};

use super::*;
use crate::error::ReplicaError;
use crate::label::Label;
use crate::{CreateOptions, create, mark_written_alone};

const LOST: Freshness = Freshness::MayBeOlder(WhyOlder::LogLost);

/// Two replicas with the content of seed 2, one of which has lost it: it has the content of seed 1, and says that it may.
fn good_and_older() -> (TestReplica, TestReplica) {
    let (a, b, mirror) = pair(None);
    for seed in [1, 2] {
        run(&*mirror, write_of(&*mirror, extent(0, BLOCKS), seed)).unwrap();
        run(&*mirror, Request::flush()).unwrap();
    }
    mirror.close().now_or_never().unwrap().unwrap();
    run(&*b.memory, write_of(&*b.memory, extent(0, BLOCKS), 1)).unwrap();
    b.freshness.set(LOST);
    (a, b)
}

/// The state of the second replica and the bytes that it lacks, by the label on a device.
fn recorded(on: &TestReplica, of: &TestReplica) -> (ReplicaState, u32) {
    let read = |replica: &TestReplica| match run(&*replica.memory, Request::read_reserved(ReservedArea::GroupLabel)) {
        Ok(Response::Reserved(bytes)) => Label::decode(&bytes).unwrap().expect("there is a label"),
        other => panic!("no label but {other:?}"),
    };
    let (label, own) = (read(on), read(of));
    let id = own.replicas[own.own_index].id;
    let record = label.replicas.iter().find(|record| record.id == id).unwrap();
    (record.state, record.out_of_sync.iter().count() as u32)
}

fn state_of(mirror: &TestMirror, name: &str) -> (ReplicaState, u64) {
    let replicas = mirror.describe().replicas;
    let replica = replicas.iter().find(|replica| replica.name == name).unwrap();
    (replica.state, replica.out_of_sync_bytes)
}

/// Reads so often that every replica would have had its turn.
fn reads_only(mirror: &TestMirror, seed: u8) {
    for lba in 0..16 {
        let at = extent(lba * 64, 8);
        match run(&**mirror, Request::read(at, Expectations::NONE)).unwrap() {
            Response::Data(data) => assert!(data.joined_data()[..] == content(at, seed), "block {lba}"),
            other => panic!("a read was answered with {other:?}"),
        }
    }
}

#[test]
fn a_replica_that_may_be_older_is_neither_authority_nor_source_and_lacks_everything() {
    for (order, read_only) in [(0, false), (1, false), (0, true), (1, true)] {
        let (a, b) = good_and_older();
        let replicas = if order == 0 { [&a, &b] } else { [&b, &a] };
        let mirror = try_open(&replicas, read_only).unwrap();
        assert_eq!(mirror.abilities().freshness, Freshness::Current, "the other one counts");
        assert_eq!(state_of(&mirror, "b"), (ReplicaState::OutOfSync, BLOCKS << 12));
        assert_eq!(state_of(&mirror, "a").0, ReplicaState::InSync);
        let why = mirror.describe().replicas.iter().find(|replica| replica.name == "b").unwrap().last_error.clone();
        assert!(why.contains("older"), "{why}");
        reads_only(&mirror, 2);
        let (state, regions) = recorded(&a, &b);
        let is_recorded = state == ReplicaState::OutOfSync && u64::from(regions) == BLOCKS / 16;
        assert_eq!(is_recorded, !read_only, "order {order}: before anything is written to it");
    }
}

/// A volume may find out while it is in use that it was put back: by a page of its block map that it reads.
#[test]
fn a_replica_that_turns_out_to_be_older_is_no_source_any_more_or_the_mirror_reports_it() {
    let (a, b, mirror) = pair(None);
    run(&*mirror, write_of(&*mirror, extent(0, BLOCKS), 2)).unwrap();
    mirror.close().now_or_never().unwrap().unwrap();
    let reader = try_open(&[&a, &b], true).unwrap();
    let mirror = opened(&[&a, &b]);
    assert_eq!(reader.abilities().freshness, Freshness::Current);
    b.freshness.set(LOST);
    assert_eq!(reader.abilities().freshness, LOST, "a read may have been answered by it");
    let replicas = mirror.replicas.borrow().clone();
    replicas.iter().for_each(|replica| mirror.detach_lost(replica));
    assert_eq!((state_of(&mirror, "a").0, state_of(&mirror, "b").0), (ReplicaState::InSync, ReplicaState::OutOfSync));
    assert_eq!(mirror.abilities().freshness, Freshness::Current);
    run(&*b.memory, write_of(&*b.memory, extent(0, BLOCKS), 1)).unwrap();
    reads_only(&mirror, 2);
    mirror.reattach(&replicas[1], DynDevice::new("b", b.clone())).now_or_never().unwrap().unwrap();
    assert_eq!(state_of(&mirror, "b").1, BLOCKS << 12, "it lacks everything");
    // Where no other one has the content, it stays.
    a.freshness.set(LOST);
    mirror.detach_lost(&replicas[0]);
    assert_eq!((state_of(&mirror, "a").0, mirror.abilities().freshness), (ReplicaState::InSync, LOST));
}

#[test]
fn once_it_is_recorded_the_device_need_not_tell_it_any_more() {
    let (a, b) = good_and_older();
    drop(opened(&[&a, &b]));
    b.freshness.set(Freshness::Current);
    for replicas in [[&a, &b], [&b, &a]] {
        let mirror = opened(&replicas);
        assert_eq!(state_of(&mirror, "b"), (ReplicaState::OutOfSync, BLOCKS << 12));
        reads_only(&mirror, 2);
    }
}

#[test]
fn one_with_equal_blocks_is_written_all_the_same_so_that_it_does_not_stay_in_doubt() {
    let (a, b) = good_and_older();
    run(&*b.memory, write_of(&*b.memory, extent(0, BLOCKS), 2)).unwrap();
    let mirror = opened(&[&a, &b]);
    resync(&mirror);
    assert_eq!((states(&mirror), b.freshness.get()), (vec![ReplicaState::InSync; 2], Freshness::Current));
    drop(mirror);
    assert_eq!(states(&opened(&[&a, &b])), [ReplicaState::InSync; 2]);
}

#[test]
fn where_no_other_replica_has_the_content_the_mirror_may_be_older_and_takes_no_writes() {
    let (a, b) = good_and_older();
    a.freshness.set(LOST);
    let labels = [&a, &b].map(|replica| replica.label_writes.get());
    for is_alone in [false, true] {
        a.is_offline.set(is_alone);
        for replicas in [[&a, &b], [&b, &a]] {
            let mirror = opened(&replicas);
            assert_eq!((mirror.abilities().freshness, mirror.abilities().writable), (LOST, false));
            let refused = run(&*mirror, write_of(&*mirror, extent(0, 1), 3)).unwrap_err();
            assert_eq!(*refused.kind(), ErrorKind::ReadOnly);
        }
    }
    assert_eq!([&a, &b].map(|replica| replica.label_writes.get()), labels, "nothing is written");
}

#[test]
fn one_that_takes_no_writes_is_left_out() {
    let (a, b) = good_and_older();
    b.is_read_only.set(true);
    let mirror = opened(&[&b, &a]);
    assert!(mirror.abilities().writable);
    run(&*mirror, write_of(&*mirror, extent(0, 1), 3)).unwrap();
    let replicas = mirror.describe().replicas;
    let left_out = replicas.iter().find(|replica| replica.name == "b").unwrap();
    assert!(!left_out.is_online && left_out.last_error.contains("older"), "{left_out:?}");
}

#[test]
fn one_that_comes_back_is_resynced_as_a_whole_and_the_last_one_does_not_come_back() {
    let (a, b) = good_and_older();
    b.freshness.set(Freshness::Current);
    b.is_offline.set(true);
    let mirror = opened(&[&a, &b]);
    run(&*mirror, write_of(&*mirror, extent(0, 1), 3)).unwrap();
    b.is_offline.set(false);
    b.freshness.set(LOST);
    let replica = mirror.named_replica("b").unwrap();
    mirror.reattach(&replica, b.stack()).now_or_never().unwrap().unwrap();
    assert_eq!(state_of(&mirror, "b"), (ReplicaState::Resyncing, BLOCKS << 12));
    let last = mirror.named_replica("a").unwrap();
    last.set_device(None);
    a.freshness.set(LOST);
    let refused = mirror.reattach(&last, a.stack()).now_or_never().unwrap().unwrap_err();
    assert!(refused.contains("older"), "{refused}");
}

#[test]
fn a_new_mirror_does_not_get_its_content_from_one_that_may_be_older() {
    let new = |from| {
        let (a, b) = (TestReplica::new("a", None), TestReplica::new("b", None));
        run(&*a.memory, write_of(&*a.memory, extent(0, 1), 1)).unwrap();
        a.freshness.set(LOST);
        let options = CreateOptions { random: random(), from, force: true, name: None };
        create(vec![a.source(), b.source()], StoppedClock, options).now_or_never().unwrap().map(|opened| opened.mirror)
    };
    for from in [None, Some(0)] {
        assert!(matches!(new(from), Err(ReplicaError::Unusable { .. })), "{from:?}");
    }
    assert!(new(Some(1)).is_ok(), "it is made equal to the other one");
    let (a, b) = (TestReplica::new("a", None), TestReplica::new("b", None));
    b.freshness.set(LOST);
    assert!(try_open(&[&a, &b], false).is_err(), "nothing shows that it is blank");
}

/// What opening two devices as a mirror makes of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Found {
    Refused,
    /// The content of this seed, and writes are taken.
    Content(u8),
    /// The content of this seed, which may be older than what was written; nothing is written.
    MayBeOlder(u8),
}

/// Opens images of two devices.
fn found(replicas: [&TestReplica; 2], accepts_lost_label: bool) -> Found {
    let images = replicas.map(TestReplica::image);
    let sources = images.iter().map(TestReplica::source).collect();
    let options = OpenOptions { is_read_only: false, accepts_lost_label, random: random() };
    let Ok(opened) = open(sources, StoppedClock, options).now_or_never().unwrap() else { return Found::Refused };
    let mirror = opened.mirror;
    let seed = read(&*mirror, extent(0, 1)).unwrap()[8];
    assert_reads(&*mirror, extent(0, 600), seed);
    let written = write(&*mirror, extent(0, 1), seed);
    let labels = images.iter().map(|image| image.label_writes.get()).sum::<u64>();
    match mirror.abilities().freshness {
        Freshness::Current => {
            written.unwrap();
            Found::Content(seed)
        }
        older => {
            assert_eq!(older, Freshness::MayBeOlder(WhyOlder::LabelLost));
            assert!(matches!(written.unwrap_err().kind(), ErrorKind::ReadOnly));
            assert_eq!(labels, 0, "no label is written");
            Found::MayBeOlder(seed)
        }
    }
}

/// A device of which nothing is left of the label.
fn without_label(replica: &TestReplica) -> TestReplica {
    let lost = replica.image();
    set_label(&lost, &[&b"SBMIRROR\x02\0"[..], &[0; 200]].concat());
    lost
}

/// The content of a mirror is 1, 2, and then 3, which `b` lacks at first.
#[test]
fn what_a_lost_label_may_have_said_is_not_taken_for_what_the_other_label_says() {
    let (a, b, mirror) = pair(None);
    write(&*mirror, extent(0, 600), 1).unwrap();
    write(&*mirror, extent(0, 600), 2).unwrap();
    close(&mirror);
    let old_a = a.image();
    let mirror = opened(&[&a, &b]);
    b.is_offline.set(true);
    write(&*mirror, extent(0, 600), 3).unwrap();
    close(&mirror);
    // `b` knows nothing of that: its label is older, and calls both in sync.
    let (ahead, behind) = (a.image(), b.image());
    b.is_offline.set(false);
    let mirror = opened(&[&a, &b]);
    mirror.start_resync(&mirror.named_replica("b").unwrap());
    mirror.write_labels().now_or_never().unwrap().unwrap();
    drop(mirror);
    let (beside, out_of_sync) = (a.image(), b.image());
    let mirror = opened(&[&a, &b]);
    resync(&mirror);
    close(&mirror);
    let other = TestReplica::new("c", None);
    let mirror = opened(&[&other, &TestReplica::new("d", None)]);
    write(&*mirror, extent(0, 600), 9).unwrap();
    close(&mirror);
    let alone = ahead.image();
    mark_written_alone(&alone.stack()).now_or_never().unwrap().unwrap();
    let of_a_stripe = TestReplica::new("e", None);
    set_label(&of_a_stripe, b"SBSTRIPE of a later version");
    let (lost, blank) = (without_label(&ahead), without_label(&TestReplica::new("b", None)));
    let in_sync = [&a, &b];
    let cases = [
        ("in sync, in sync", in_sync, Found::Content(3)),
        ("in sync, out of sync", [&beside, &out_of_sync], Found::Content(3)),
        ("in sync, older label", [&ahead, &behind], Found::Content(3)),
        ("in sync, label lost, known to be out of sync", [&ahead, &without_label(&behind)], Found::Content(3)),
        ("in sync, label lost and blank, known to be out of sync", [&ahead, &blank], Found::Content(3)),
        ("in sync, label lost", [&a, &without_label(&b)], Found::MayBeOlder(3)),
        ("in sync, label lost and blank", [&a, &blank], Found::MayBeOlder(3)),
        ("older label, label lost", [&behind, &lost], Found::MayBeOlder(2)),
        (
            "older label, label lost and blank",
            [&behind, &without_label(&TestReplica::new("a", None))],
            Found::MayBeOlder(2),
        ),
        ("older label, out of sync", [&old_a, &out_of_sync], Found::Refused),
        ("out of sync, label lost", [&out_of_sync, &lost], Found::Refused),
        ("out of sync, label lost and blank", [&out_of_sync, &blank], Found::Refused),
        ("out of sync, out of sync", [&alone, &out_of_sync], Found::Refused),
        ("label lost, label lost", [&lost, &without_label(&behind)], Found::Refused),
        ("label lost, label lost and blank", [&lost, &blank], Found::Refused),
        ("in sync, another mirror's", [&ahead, &other], Found::Refused),
        ("out of sync, another mirror's", [&out_of_sync, &other], Found::Refused),
        ("older label, another mirror's", [&behind, &other], Found::Refused),
        ("label lost, another mirror's", [&lost, &other], Found::MayBeOlder(9)),
        ("in sync, a stripe's", [&ahead, &of_a_stripe], Found::Refused),
        ("label lost, a stripe's", [&lost, &of_a_stripe], Found::Refused),
        // Nothing is left that could show that there was anything newer.
        ("older label, older label", [&old_a, &behind], Found::Content(2)),
    ];
    for (what, [first, second], expected) in cases {
        for replicas in [[first, second], [second, first]] {
            assert_eq!(found(replicas, false), expected, "{what}");
            let accepted = if let Found::MayBeOlder(seed) = expected { Found::Content(seed) } else { expected };
            assert_eq!(found(replicas, true), accepted, "{what}, accepted");
        }
    }
}

#[test]
fn a_lost_label_of_a_replica_that_all_others_know_to_be_out_of_sync_says_nothing_new() {
    let replicas = ["a", "b", "c"].map(|name| TestReplica::new(name, None));
    let [a, b, c] = &replicas;
    let mirror = opened(&[a, b, c]);
    write(&*mirror, extent(0, 600), 1).unwrap();
    let lost = without_label(c);
    assert_eq!(opened(&[a, b, &lost]).abilities().freshness, LOST_LABEL);
    c.is_offline.set(true);
    write(&*mirror, extent(0, 600), 2).unwrap();
    close(&mirror);
    let without = opened(&[a, b, &lost]);
    assert_eq!(without.abilities().freshness, Freshness::Current);
    assert_reads(&*without, extent(0, 600), 2);
    drop(without);
    // One that is away as well may have the label that counts; that is so without a lost one, too.
    b.is_offline.set(true);
    assert_eq!(opened(&[a, b, &lost]).abilities().freshness, LOST_LABEL);
}

const LOST_LABEL: Freshness = Freshness::MayBeOlder(WhyOlder::LabelLost);
