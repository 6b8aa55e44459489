//! Replicas whose devices may lack what was written to them last, as a volume that has lost its log: what they have counts only where
//! no other replica has the content, and they are resynchronised as a whole.

use futures_util::FutureExt;
use sealblock_block::{Device, ErrorKind, Freshness, Request, ReservedArea, Response, WhyOlder};

use super::*;
use crate::error::ReplicaError;
use crate::label::Label;
use crate::{CreateOptions, create};

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
