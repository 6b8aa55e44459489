//! What labels must not lose: which replicas are out of sync, in which regions, and since when.

use futures_util::FutureExt;
use sealblock_block::{Durability, ErrorKind, Expectations, Request, ReservedArea, Response};
use sealblock_integrity::{Sealed, Tags};
use sealblock_runtime_memory::Slice;
use sealblock_units::BlockSize;

use super::assemble::history;
use super::*;
use crate::Mirror;
use crate::label::ReplicaState;
use crate::label::assemble::{AssembleError, Assembly, ReplicaProbe, assemble};
use crate::label::tests::label;

fn replica_of(mirror: &Mirror<StoppedClock>, at: usize) -> std::rc::Rc<crate::mirror::replica::Replica> {
    mirror.replicas.borrow()[at].clone()
}

#[test]
fn a_region_that_no_label_could_record_does_not_count_as_recorded() {
    let (mut a, b) = (TestReplica::new("a", None), TestReplica::new("b", None));
    a.has_no_label_room = true;
    let mirror = opened(&[&a, &b]);
    b.is_offline.set(true);
    for _ in 0..3 {
        let refused = write(&mirror, extent(0, 1), 2).unwrap_err();
        assert!(refused.to_string().contains("cannot record a failed replica"), "{refused}");
    }
}

#[test]
fn no_change_completes_before_labels_record_a_failure_that_another_request_found() {
    let (a, b, mirror) = pair(None);
    write(&mirror, extent(0, 1), 1).unwrap();
    // Another request found the failure, and the labels do not record it yet.
    mirror.fail_replica(&replica_of(&mirror, 1), "it failed another request");
    write(&mirror, extent(0, 1), 2).unwrap();
    drop(mirror);
    let again = opened(&[&b, &a]);
    assert_eq!(again.describe().replicas[1].state, ReplicaState::OutOfSync);
    assert_reads(&again, extent(0, 1), 2);
}

#[test]
fn what_the_last_replica_lost_is_said_to_a_host_and_not_to_the_worker() {
    let (a, b, mirror) = pair(None);
    b.is_offline.set(true);
    write(&mirror, extent(0, 1), 1).unwrap();
    a.is_offline.set(true);
    write(&mirror, extent(0, 1), 2).unwrap_err();
    a.is_offline.set(false);
    mirror.reattach(&replica_of(&mirror, 0), a.stack()).now_or_never().unwrap().unwrap();
    assert!(mirror.is_nosync(extent(0, 1)), "what it lost others may have");
    mirror.reconcile_all().now_or_never().unwrap().unwrap();
    sweep(&mirror);
    assert!(run(&mirror, Request::flush()).is_err());
    assert!(run(&mirror, Request::flush()).is_ok());
}

#[test]
fn a_replica_that_cannot_be_asked_is_no_replica_that_has_lost_its_blocks() {
    let (a, b, mirror) = pair(None);
    write(&mirror, extent(0, 2), 1).unwrap();
    a.is_offline.set(true);
    b.is_offline.set(true);
    let replicas = mirror.in_sync();
    let at = extent(0, 2);
    let error = mirror.gather(&replicas, at).now_or_never().unwrap().err().unwrap();
    assert!(matches!(error.kind(), ErrorKind::Unreachable { .. }), "{error}");
}

fn known(found: &[ReplicaProbe]) -> crate::label::assemble::ExistingMirror {
    match assemble(found) {
        Ok(Assembly::Known(known)) => *known,
        other => panic!("not a mirror with a past but {other:?}"),
    }
}

#[test]
fn an_older_image_of_a_replica_lacks_everything_and_is_no_split_brain() {
    let (mut a, b) = (label(2, 0, 30), label(2, 1, 20));
    (a.replicas[0].acked_events, a.replicas[1].acked_events) = (29, 29);
    let found = [a.clone(), b.clone()].map(|label| ReplicaProbe::Labelled(Box::new(label)));
    let merged = known(&found).label;
    assert_eq!((merged.replicas[1].state, merged.replicas[1].out_of_sync.count()), (ReplicaState::OutOfSync, 64));
    // The last label may have reached only one of them.
    let young = label(2, 1, 29);
    let found = [a, young].map(|label| ReplicaProbe::Labelled(Box::new(label)));
    assert_eq!(known(&found).label.replicas[1].state, ReplicaState::InSync);
}

#[test]
fn a_replica_that_left_while_another_was_missing_can_come_back() {
    // The first replica marked the second out of sync. Then it failed, and the third one resynced the second.
    let (mut first, mut second) = (label(3, 0, 40), label(3, 1, 90));
    first.replicas[1].state = ReplicaState::OutOfSync;
    second.replicas[0].state = ReplicaState::OutOfSync;
    (second.replicas[0].acked_events, second.replicas[0].sent_events) = (39, 40);
    (first.replicas[1].acked_events, first.replicas[1].sent_events) = (12, 12);
    first.lineage = history(&[(1, 40)]);
    second.lineage = history(&[(1, 40), (2, 90)]);
    let labelled = |label: &crate::label::Label| ReplicaProbe::Labelled(Box::new(label.clone()));
    assert_eq!(known(&[labelled(&first), labelled(&second)]).label.replicas[0].state, ReplicaState::OutOfSync);
    // Had it continued alone, it would have a change that the others do not know.
    first.events = 41;
    first.lineage = history(&[(1, 41)]);
    let refused = assemble(&[labelled(&first), labelled(&second)]);
    assert_eq!(refused, Err(AssembleError::SplitBrain { first: 0, second: 1 }));
}

#[test]
fn what_a_replica_lacks_since_the_last_one_was_lost_it_still_lacks_when_it_leaves_again() {
    let (a, b, mirror) = pair(None);
    write(&mirror, extent(0, 8), 1).unwrap();
    b.is_offline.set(true);
    write(&mirror, extent(0, 1), 2).unwrap();
    b.is_offline.set(false);
    reattach(&mirror, &b).unwrap();
    // To both replicas; then the only in-sync one may lose it.
    write(&mirror, extent(600, 1), 3).unwrap();
    a.is_offline.set(true);
    read(&mirror, extent(0, 1)).unwrap_err();
    a.is_offline.set(false);
    reattach(&mirror, &a).unwrap();
    mirror.reconcile_all().now_or_never().unwrap().unwrap();
    run(&mirror, Request::flush()).unwrap_err();
    sweep(&mirror);
    b.is_offline.set(true);
    write(&mirror, extent(1300, 1), 4).unwrap();
    assert_eq!(states(&mirror), [ReplicaState::InSync, ReplicaState::OutOfSync]);
    let exact = 3 << 16;
    assert_eq!(mirror.describe().replicas[1].out_of_sync_bytes, exact, "and not all that its own label calls dirty");
}

#[test]
fn a_change_that_only_a_device_has_that_is_gone_since_has_failed() {
    for is_lost in [false, true] {
        let (a, b, mirror) = pair(None);
        b.is_offline.set(true);
        write(&mirror, extent(0, 1), 1).unwrap();
        b.is_offline.set(false);
        reattach(&mirror, &b).unwrap();
        // Its own label says that it is resyncing, so changes go to it.
        mirror.write_labels().now_or_never().expect("RAM never waits").unwrap();
        b.holds_requests.set(true);
        let mut slow = Box::pin(sealblock_block::Device::execute(&*mirror, write_of(&mirror, extent(0, 1), 2)));
        assert!(slow.as_mut().now_or_never().is_none(), "the first replica has answered, the second has not");
        if is_lost {
            a.is_offline.set(true);
            read(&mirror, extent(5, 1)).unwrap_err();
            a.is_offline.set(false);
            reattach(&mirror, &a).unwrap();
        }
        b.holds_requests.set(false);
        let answered = slow.now_or_never().expect("it is held no more");
        assert_eq!(answered.is_err(), is_lost, "{answered:?}");
    }
}

/// The label of a replica.
fn label_bytes(replica: &TestReplica) -> Slice {
    match run(&*replica.memory, Request::read_reserved(ReservedArea::GroupLabel)).unwrap() {
        Response::Reserved(bytes) => bytes,
        other => panic!("no label but {other:?}"),
    }
}

#[test]
fn where_replicas_differ_the_one_with_the_later_label_is_right() {
    let (a, b, mirror) = pair(None);
    write(&mirror, extent(600, 1), 1).unwrap();
    sweep(&mirror);
    let older = [label_bytes(&a), label_bytes(&b)];
    write(&mirror, extent(600, 1), 2).unwrap();
    run(&mirror, Request::flush()).unwrap();
    drop(mirror);
    // The first replica as it was one label before: no label records yet that it acknowledged that one.
    let restore = |replica: &TestReplica, label: &Slice| {
        write(&*replica.memory, extent(600, 1), 1).unwrap();
        run(&*replica.memory, Request::write_reserved(ReservedArea::GroupLabel, label.clone())).unwrap();
    };
    restore(&a, &older[0]);
    let mirror = opened(&[&a, &b]);
    assert_reads(&mirror, extent(600, 1), 2);
    drop(mirror);
    // Now the first replica, which was reconciled with the second, knows the second's label.
    restore(&b, &older[1]);
    let mirror = opened(&[&a, &b]);
    assert_eq!(states(&mirror), [ReplicaState::InSync, ReplicaState::OutOfSync]);
    assert_eq!(mirror.describe().replicas[1].out_of_sync_bytes, 8 << 20);
    assert_reads(&mirror, extent(600, 1), 2);
}

#[test]
fn unwritten_blocks_stay_unwritten_on_a_resynced_replica() {
    let (a, b, mirror) = pair(Some(TYPE1));
    write(&mirror, extent(0, BLOCKS), 1).unwrap();
    b.is_offline.set(true);
    let zeroes = Request::write_zeroes(extent(256, 768), true, Durability::Volatile);
    run(&mirror, zeroes).unwrap();
    b.is_offline.set(false);
    reattach(&mirror, &b).unwrap();
    resync(&mirror);
    let runs = |replica: &TestReplica| {
        format!("{:?}", run(&*replica.memory, Request::block_status(extent(0, BLOCKS))).unwrap())
    };
    assert_eq!(runs(&b), runs(&a), "with a copy of their tags nothing would check them");
    assert_reads(&*b.memory, extent(1024, 3), 1);
    verify(&mirror).unwrap();
}

#[test]
fn the_same_data_with_other_tags_is_resynced() {
    let (a, b, mirror) = pair(Some(TYPE1));
    let with_tag = |app_tag| {
        let data = Slice::copy_from(&content(extent(9, 1), 1));
        let tags = Tags { app_tag, storage_tag: 0, initial_ref_tag: 9 };
        let data = Sealed::seal(data, BlockSize::B4096, Some(TYPE1), &tags);
        Request::write(extent(9, 1), data, Durability::Volatile)
    };
    let tags_on = |replica: &TestReplica| match run(&*replica.memory, Request::read(extent(9, 1), Expectations::NONE)) {
        Ok(Response::Data(data)) => data.joined_tags().to_vec(),
        other => panic!("no data but {other:?}"),
    };
    run(&mirror, with_tag(5)).unwrap();
    b.is_offline.set(true);
    run(&mirror, with_tag(6)).unwrap();
    b.is_offline.set(false);
    assert_ne!(tags_on(&a), tags_on(&b));
    reattach(&mirror, &b).unwrap();
    resync(&mirror);
    assert_eq!(tags_on(&a), tags_on(&b));
}

#[test]
fn blocks_that_were_resynced_before_the_others_were_reconciled_are_resynced_again() {
    let replicas = ["a", "b", "c"].map(|name| TestReplica::new(name, None));
    let [a, b, c] = &replicas;
    let mirror = opened(&[a, b, c]);
    write(&mirror, extent(0, 8), 1).unwrap();
    c.is_offline.set(true);
    write(&mirror, extent(600, 1), 2).unwrap();
    // A write that was in flight to both replicas at the crash, and reached one of them.
    write(&*a.memory, extent(0, 1), 3).unwrap();
    drop(mirror);
    c.is_offline.set(false);
    let mirror = opened(&[a, b, c]);
    let replica = replica_of(&mirror, 2);
    mirror.start_resync(&replica);
    c.holds_flushes.set(true);
    let mut rebuild = Box::pin(mirror.resync(&replica));
    assert!(rebuild.as_mut().now_or_never().is_none(), "it has what the first replica has, and flushes that");
    assert_reads(&*c.memory, extent(0, 1), 3);
    a.is_offline.set(true);
    mirror.reconcile_all().now_or_never().expect("RAM never waits").unwrap();
    assert!(!mirror.is_nosync(extent(0, 1)), "what the second one has counts now");
    c.holds_flushes.set(false);
    rebuild.as_mut().now_or_never();
    drop(rebuild);
    assert_eq!(replica.state.get(), ReplicaState::Resyncing);
    mirror.resync(&replica).now_or_never().unwrap().unwrap();
    assert_eq!(states(&mirror), [ReplicaState::OutOfSync, ReplicaState::InSync, ReplicaState::InSync]);
    for device in [&*b.memory, &*c.memory] {
        assert_reads(device, extent(0, 1), 1);
    }
}

#[test]
fn a_replica_that_comes_back_while_labels_are_written_gets_nothing_before_its_own_says_what_it_lacks() {
    let (mut a, b, mirror) = pair(Some(TYPE1));
    write(&mirror, extent(0, 8), 1).unwrap();
    close(&mirror);
    drop(mirror);
    a.is_offline.set(true);
    let mirror = opened(&[&a, &b]);
    write(&mirror, extent(0, 8), 2).unwrap();
    close(&mirror);
    drop(mirror);
    a.is_offline.set(false);
    a.labels_fail = true;
    let (mirror, written) = (opened(&[&a, &b]), a.written_blocks.get());
    let replica = replica_of(&mirror, 0);
    mirror.start_resync(&replica);
    a.holds_labels.set(true);
    let mut resyncing = Box::pin(mirror.resync(&replica));
    assert!((&mut resyncing).now_or_never().is_none(), "its label is in flight");
    // It fails its label, and is back while the label of the other one records that.
    b.holds_labels.set(true);
    a.labels_left.set(Some(0));
    a.holds_labels.set(false);
    assert!((&mut resyncing).now_or_never().is_none(), "the label of the other one is in flight");
    assert_eq!(states(&mirror), [ReplicaState::OutOfSync, ReplicaState::InSync]);
    a.labels_left.set(None);
    reattach(&mirror, &a).unwrap();
    b.holds_labels.set(false);
    assert!(resyncing.now_or_never().unwrap().is_err());
    assert_eq!(a.written_blocks.get(), written, "opened alone it would be taken for one that has everything");
    // The replica itself refuses a request of a caller that chose it before, and stays attached.
    let data = replica_of(&mirror, 1).read(extent(0, 1)).now_or_never().unwrap().unwrap();
    assert!(replica.put(extent(0, 1), &data).now_or_never().unwrap().is_err());
    assert_eq!(states(&mirror), [ReplicaState::Resyncing, ReplicaState::InSync]);
    resync(&mirror);
    assert_eq!(states(&mirror), [ReplicaState::InSync, ReplicaState::InSync]);
    assert_reads(&*a.memory, extent(0, 8), 2);
}
