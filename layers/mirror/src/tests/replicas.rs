//! Replicas that fail, come back, are added and removed.

use std::rc::Rc;

use futures_util::FutureExt;
use sealblock_block::{ErrorKind, Expectations, Request};

use super::*;
use crate::Loss;
use crate::MirrorError;
use crate::MirrorState;
use crate::ReplicaError;
use crate::label::ReplicaState;
use crate::label::assemble::AssembleError;

fn refusal(replicas: &[&TestReplica]) -> AssembleError {
    match try_open(replicas, false) {
        Err(MirrorError::Assemble { error: refusal, .. }) => refusal,
        Err(other) => panic!("refused for another reason: {other}"),
        Ok(_) => panic!("not refused"),
    }
}

#[test]
fn a_replica_that_fails_is_out_of_sync_and_gets_only_the_regions_that_it_lacks() {
    let (a, b, mirror) = pair(Some(TYPE1));
    write(&mirror, extent(0, BLOCKS), 1).unwrap();
    run(&mirror, Request::flush()).unwrap();
    sweep(&mirror);
    b.is_offline.set(true);
    // One region of 64 KiB each, though labels mark whole groups of 1 MiB.
    write(&mirror, extent(600, 3), 2).unwrap();
    write(&mirror, extent(1300, 1), 2).unwrap();
    assert_eq!(states(&mirror), [ReplicaState::InSync, ReplicaState::OutOfSync]);
    assert_reads(&mirror, extent(600, 3), 2);
    assert_eq!(mirror.describe().replicas[1].out_of_sync_bytes, 2 << 16);
    b.is_offline.set(false);
    b.written_blocks.set(0);
    reattach(&mirror, &b).unwrap();
    write(&mirror, extent(10, 1), 3).unwrap();
    resync(&mirror);
    assert_eq!(states(&mirror), [ReplicaState::InSync, ReplicaState::InSync]);
    assert!(b.written_blocks.get() <= 2 * 16 + 1, "{} blocks were written", b.written_blocks.get());
    for device in [&*a.memory, &*b.memory] {
        assert_reads(device, extent(600, 3), 2);
        assert_reads(device, extent(1300, 1), 2);
        assert_reads(device, extent(10, 1), 3);
    }
    verify(&mirror).unwrap();
}

#[test]
fn a_device_that_is_lost_while_idle_is_detached_and_lacks_only_what_was_written_meanwhile() {
    for is_written in [false, true] {
        let (a, b, mirror) = pair(None);
        write(&mirror, extent(0, 100), 1).unwrap();
        run(&mirror, Request::flush()).unwrap();
        sweep(&mirror);
        let replica = Rc::clone(&mirror.replicas.borrow()[1]);
        let is_lost = Rc::new(Cell::new(false));
        let seen = Rc::clone(&is_lost);
        *replica.loss_monitor.borrow_mut() = Some(Box::new(move || seen.get().then(|| loss("closed", false))));
        mirror.detach_lost(&replica);
        assert_eq!(mirror.state(), MirrorState::Optimal, "it is there");
        is_lost.set(true);
        b.is_offline.set(true);
        mirror.detach_lost(&replica);
        mirror.detach_lost(&replica);
        let seen = mirror.describe().replicas.remove(1);
        assert_eq!((mirror.state(), seen.is_online, seen.failures), (MirrorState::Degraded, false, 1));
        assert_eq!(seen.last_error, "closed");
        if is_written {
            write(&mirror, extent(50, 1), 2).unwrap();
        }
        is_lost.set(false);
        b.is_offline.set(false);
        b.written_blocks.set(0);
        reattach(&mirror, &b).unwrap();
        resync(&mirror);
        assert_eq!(mirror.state(), MirrorState::Optimal);
        // One region of 64 KiB is compared and what differs is copied; nothing is without a write.
        assert_eq!(b.written_blocks.get() > 0, is_written);
        for device in [&*a.memory, &*b.memory] {
            assert_reads(device, extent(0, 50), 1);
            assert_reads(device, extent(50, 1), if is_written { 2 } else { 1 });
        }
    }
}

fn loss(reason: &str, lacks_everything: bool) -> Loss {
    Loss { reason: reason.to_owned(), lacks_everything }
}

/// Lets the replica of this number lose blocks when the result is set.
fn monitored(mirror: &TestMirror, number: usize) -> Rc<Cell<bool>> {
    let has_lost = Rc::new(Cell::new(false));
    let seen = Rc::clone(&has_lost);
    *mirror.replicas.borrow()[number].loss_monitor.borrow_mut() =
        Some(Box::new(move || seen.get().then(|| loss("truncated", true))));
    has_lost
}

/// It may return without what was not flushed. If the labels still called it in sync, the next start could take its
/// content for the right one.
#[test]
fn a_failure_is_recorded_before_anything_is_read_if_the_replica_may_lack_it() {
    for is_flushed in [false, true] {
        let (a, b, mirror) = pair(None);
        write(&mirror, extent(0, 8), 1).unwrap();
        run(&mirror, Request::flush()).unwrap();
        if !is_flushed {
            write(&mirror, extent(0, 8), 2).unwrap();
        }
        let replica = Rc::clone(&mirror.replicas.borrow()[1]);
        mirror.fail_replica(&replica, "gone");
        let labels = a.label_writes.get();
        let seed = if is_flushed { 1 } else { 2 };
        assert_reads(&mirror, extent(0, 8), seed);
        assert_eq!(a.label_writes.get() > labels, !is_flushed);
        // Killed, and what was not flushed is lost on the replica that failed.
        drop(mirror);
        run(&*b.memory, write_of(&*b.memory, extent(0, 8), 1)).unwrap();
        for replicas in [[&b, &a], [&a, &b]] {
            assert_reads(&opened(&replicas), extent(0, 8), seed);
        }
    }
}

/// A device that lost blocks reads as something else there, and knows nothing of it once it is opened again.
#[test]
fn a_replica_that_lost_blocks_lacks_everything_whatever_fails_first_and_after_a_restart() {
    for (is_idle, is_restarted) in [(true, false), (true, true), (false, false), (false, true)] {
        let (a, b, mirror) = pair(None);
        write(&mirror, extent(0, BLOCKS), 1).unwrap();
        run(&mirror, Request::flush()).unwrap();
        sweep(&mirror);
        let has_lost = monitored(&mirror, 1);
        let replica = Rc::clone(&mirror.replicas.borrow()[1]);
        mirror.detach_lost(&replica);
        assert_eq!(mirror.state(), MirrorState::Optimal, "it lost nothing");
        run(&*b.memory, write_of(&*b.memory, extent(1900, 100), 7)).unwrap();
        has_lost.set(true);
        if is_idle {
            mirror.detach_lost(&replica);
            mirror.record_failures().now_or_never().unwrap().unwrap();
        } else {
            // A request finds it first, and says nothing of what was lost.
            b.is_offline.set(true);
            write(&mirror, extent(50, 1), 1).unwrap();
            b.is_offline.set(false);
        }
        let seen = mirror.describe().replicas.remove(1);
        assert_eq!((mirror.state(), seen.is_online), (MirrorState::Degraded, false));
        assert_eq!((&*seen.last_error, seen.out_of_sync_bytes), ("truncated", BLOCKS << 12));
        has_lost.set(false);
        let mirror = match is_restarted {
            true => {
                drop(mirror);
                opened(&[&a, &b])
            }
            false => {
                reattach(&mirror, &b).unwrap();
                mirror
            }
        };
        assert_reads(&mirror, extent(1900, 100), 1);
        resync(&mirror);
        assert_eq!(mirror.state(), MirrorState::Optimal);
        assert_reads(&*b.memory, extent(1900, 100), 1);
    }
}

#[test]
fn a_replica_that_lost_blocks_stays_where_no_other_is_whole() {
    let (_, b, mirror) = pair(None);
    write(&mirror, extent(0, BLOCKS), 1).unwrap();
    let lost = [monitored(&mirror, 0), monitored(&mirror, 1)];
    lost.iter().for_each(|lost| lost.set(true));
    let replicas = mirror.replicas.borrow().clone();
    replicas.iter().for_each(|replica| mirror.detach_lost(replica));
    assert_eq!(states(&mirror), [ReplicaState::InSync; 2]);
    assert_eq!(mirror.state(), MirrorState::Optimal, "its files tell what is wrong");
    // The first is whole after all.
    lost[0].set(false);
    replicas.iter().for_each(|replica| mirror.detach_lost(replica));
    assert_eq!(states(&mirror), [ReplicaState::InSync, ReplicaState::OutOfSync]);
    lost[1].set(false);
    reattach(&mirror, &b).unwrap();
    resync(&mirror);
    assert_eq!(states(&mirror), [ReplicaState::InSync; 2]);
}

#[test]
fn the_last_replica_in_sync_is_not_attached_again_after_it_lost_blocks() {
    let (a, b, mirror) = pair(None);
    write(&mirror, extent(0, BLOCKS), 1).unwrap();
    b.is_offline.set(true);
    write(&mirror, extent(0, 1), 2).unwrap();
    let has_lost = monitored(&mirror, 0);
    has_lost.set(true);
    a.is_offline.set(true);
    write(&mirror, extent(0, 1), 3).unwrap_err();
    a.is_offline.set(false);
    has_lost.set(false);
    let replica = Rc::clone(&mirror.replicas.borrow()[0]);
    let refused = mirror.reattach(&replica, a.stack()).now_or_never().unwrap().unwrap_err();
    assert_eq!(refused, "it was the last in-sync replica, and lost blocks while it was in use");
    assert_eq!(mirror.state(), MirrorState::Failed);
}

#[test]
fn an_out_of_sync_replica_is_known_after_a_restart_and_never_read() {
    for clean in [true, false] {
        let (a, b, mirror) = pair(None);
        write(&mirror, extent(0, 100), 1).unwrap();
        b.is_offline.set(true);
        write(&mirror, extent(5, 1), 2).unwrap();
        if clean {
            close(&mirror);
        }
        drop(mirror);
        b.is_offline.set(false);
        for read_only in [true, false] {
            // In any order.
            let again = try_open(&[&b, &a], read_only).unwrap();
            for _ in 0..4 {
                assert_reads(&again, extent(5, 1), 2);
            }
            assert_eq!(states(&again), [ReplicaState::InSync, ReplicaState::OutOfSync]);
        }
        let again = opened(&[&b, &a]);
        resync(&again);
        assert_eq!(states(&again), [ReplicaState::InSync, ReplicaState::InSync]);
        assert_reads(&*b.memory, extent(5, 1), 2);
        assert_reads(&*b.memory, extent(6, 94), 1);
        verify(&again).unwrap();
    }
}

#[test]
fn a_stale_replica_alone_and_a_split_brain_are_refused() {
    let (a, b, mirror) = pair(None);
    write(&mirror, extent(0, 8), 1).unwrap();
    close(&mirror);
    b.is_offline.set(true);
    let alone = opened(&[&a, &b]);
    write(&alone, extent(0, 1), 2).unwrap();
    drop(alone);
    a.is_offline.set(true);
    b.is_offline.set(false);
    // This replica does not know that the other one continued.
    let other = opened(&[&a, &b]);
    write(&other, extent(0, 1), 3).unwrap();
    drop(other);
    a.is_offline.set(false);
    assert_eq!(refusal(&[&a, &b]), AssembleError::SplitBrain { first: 0, second: 1 });
}

#[test]
fn a_replica_that_went_on_elsewhere_does_not_come_back() {
    let (a, b, mirror) = pair(None);
    write(&mirror, extent(0, 8), 1).unwrap();
    b.is_offline.set(true);
    write(&mirror, extent(0, 1), 2).unwrap();
    // Meanwhile, on another machine, with a copy of only this replica.
    a.is_offline.set(true);
    b.is_offline.set(false);
    let elsewhere = opened(&[&a, &b]);
    write(&elsewhere, extent(0, 1), 3).unwrap();
    drop(elsewhere);
    a.is_offline.set(false);
    let why = reattach(&mirror, &b).unwrap_err();
    assert!(why.contains("split brain"), "{why}");
    assert_reads(&mirror, extent(0, 1), 2);
}

#[test]
fn another_device_in_the_place_of_a_replica_is_refused() {
    let (a, b, mirror) = pair(None);
    write(&mirror, extent(0, 8), 1).unwrap();
    b.is_offline.set(true);
    write(&mirror, extent(0, 1), 2).unwrap();
    let stranger = TestReplica::new("b", None);
    assert!(reattach(&mirror, &stranger).unwrap_err().contains("no label"));
    drop(mirror);
    let without = opened(&[&a, &stranger]);
    assert_eq!(states(&without), [ReplicaState::InSync, ReplicaState::OutOfSync]);
    assert!(!without.describe().replicas[1].is_online, "it is not used");
    assert!(without.describe().replicas[1].last_error.contains("mirror replace"));
    assert_reads(&without, extent(0, 1), 2);
    drop(without);
    let (c, d) = (TestReplica::new("c", None), TestReplica::new("d", None));
    let sources = vec![c.source(), d.source()];
    let options = crate::OpenOptions { is_read_only: false, accepts_lost_label: false, random: random() };
    crate::open(sources, StoppedClock, options).now_or_never().unwrap().unwrap();
    assert_eq!(refusal(&[&a, &d]), AssembleError::OtherMirror { replica: 1 });
    // The one that is named is the one that does not belong there, wherever it stands.
    assert_eq!(refusal(&[&a, &d, &c]), AssembleError::OtherMirror { replica: 0 });
    assert_eq!(refusal(&[&d, &a, &c]), AssembleError::OtherMirror { replica: 1 });
}

#[test]
fn a_new_mirror_needs_all_its_replicas_and_an_old_one_does_not() {
    let (a, b) = (TestReplica::new("a", None), TestReplica::new("b", None));
    b.is_offline.set(true);
    assert_eq!(refusal(&[&a, &b]), AssembleError::NewWithoutReplica { replica: 1 });
    b.is_offline.set(false);
    drop(opened(&[&a, &b]));
    b.is_offline.set(true);
    assert!(try_open(&[&a, &b], false).is_ok());
}

#[test]
fn the_last_replica_fails_requests_and_stays_in_sync() {
    let (a, b, mirror) = pair(None);
    write(&mirror, extent(0, 8), 1).unwrap();
    b.is_offline.set(true);
    write(&mirror, extent(0, 1), 2).unwrap();
    a.is_offline.set(true);
    let failed = write(&mirror, extent(1, 1), 3).unwrap_err();
    assert!(matches!(failed.kind(), ErrorKind::Unreachable { .. }), "{failed}");
    assert!(read(&mirror, extent(0, 1)).is_err());
    assert_eq!(states(&mirror), [ReplicaState::InSync, ReplicaState::OutOfSync]);
    a.is_offline.set(false);
    b.is_offline.set(false);
    // The replica that has been out of sync longer does not help: it lacks changes of the other one.
    reattach(&mirror, &b).unwrap();
    assert!(read(&mirror, extent(0, 1)).is_err());
    reattach(&mirror, &a).unwrap();
    assert_reads(&mirror, extent(0, 1), 2);
    let flushed = run(&mirror, Request::flush());
    assert!(flushed.is_err(), "what the last replica had not flushed may be lost");
    assert!(run(&mirror, Request::flush()).is_ok(), "which is said once");
    resync(&mirror);
    verify(&mirror).unwrap();
    assert_reads(&*b.memory, extent(0, 1), 2);
}

#[test]
fn what_a_lost_device_answers_late_counts_for_nothing() {
    let (a, b, mirror) = pair(None);
    a.is_offline.set(true);
    write(&mirror, extent(0, 1), 1).unwrap();
    for comes_back in [false, true] {
        b.holds_requests.set(true);
        let mut late = Box::pin(sealblock_block::Device::execute(&*mirror, write_of(&mirror, extent(0, 1), 2)));
        assert!(late.as_mut().now_or_never().is_none());
        b.holds_requests.set(false);
        if comes_back {
            // Offline and back meanwhile, perhaps without the earlier write.
            b.is_offline.set(true);
            assert!(read(&mirror, extent(5, 1)).is_err());
            b.is_offline.set(false);
            reattach(&mirror, &b).unwrap();
        }
        let answered = late.now_or_never().expect("it is held no more");
        assert_eq!(answered.is_err(), comes_back, "{answered:?}");
        assert_eq!(states(&mirror), [ReplicaState::OutOfSync, ReplicaState::InSync]);
    }
    write(&mirror, extent(0, 1), 3).unwrap();
    assert_reads(&mirror, extent(0, 1), 3);
}

#[test]
fn what_a_lost_device_says_late_is_no_reason_to_leave_the_one_that_is_back() {
    let (a, b, mirror) = pair(None);
    write(&mirror, extent(0, 8), 1).unwrap();
    b.is_offline.set(true);
    write(&mirror, extent(0, 1), 2).unwrap();
    a.holds_requests.set(true);
    let read_first = Request::read(extent(0, 1), Expectations::NONE);
    let mut late = Box::pin(sealblock_block::Device::execute(&*mirror, read_first));
    assert!(late.as_mut().now_or_never().is_none());
    a.holds_requests.set(false);
    a.is_offline.set(true);
    assert!(read(&mirror, extent(5, 1)).is_err());
    let back = TestReplica { is_offline: Rc::default(), ..a.clone() };
    reattach(&mirror, &back).unwrap();
    let said = late.now_or_never().expect("it is held no more").unwrap_err();
    assert!(matches!(said.kind(), ErrorKind::Unreachable { .. }), "{said}");
    assert_reads(&mirror, extent(0, 1), 2);
}

#[test]
fn a_full_replica_becomes_out_of_sync_and_two_full_replicas_only_fail() {
    let (a, b, mirror) = pair(None);
    b.is_full.set(true);
    write(&mirror, extent(0, 1), 1).unwrap();
    assert_eq!(states(&mirror), [ReplicaState::InSync, ReplicaState::OutOfSync]);
    let (a2, b2, both) = pair(None);
    a2.is_full.set(true);
    b2.is_full.set(true);
    assert!(matches!(write(&both, extent(0, 1), 1).unwrap_err().kind(), ErrorKind::NoSpace { .. }));
    assert_eq!(states(&both), [ReplicaState::InSync, ReplicaState::InSync]);
    a2.is_full.set(false);
    b2.is_full.set(false);
    write(&both, extent(0, 1), 1).unwrap();
    drop(a);
}

#[test]
fn reads_of_the_last_replica_do_not_try_again_and_again_to_write_its_label() {
    let (mut a, b) = (TestReplica::new("a", None), TestReplica::new("b", None));
    a.labels_fail = true;
    let mirror = opened(&[&a, &b]);
    write(&mirror, extent(0, BLOCKS), 1).unwrap();
    run(&mirror, Request::flush()).unwrap();
    mirror.clear_clean_regions().now_or_never().unwrap().unwrap();
    write(&mirror, extent(0, 1), 1).unwrap();
    let replica = Rc::clone(&mirror.replicas.borrow()[1]);
    mirror.fail_replica(&replica, "gone");
    a.labels_left.set(Some(0));
    assert!(read(&mirror, extent(1000, 8)).is_err(), "it is detached, as after any failure");
    reattach(&mirror, &a).unwrap();
    for _ in 0..3 {
        assert_reads(&mirror, extent(1000, 8), 1);
    }
    assert!(write(&mirror, extent(1000, 1), 2).is_err());
    a.labels_left.set(None);
    reattach(&mirror, &a).unwrap();
    write(&mirror, extent(1000, 1), 2).unwrap();
    assert_reads(&mirror, extent(1000, 1), 2);
}

#[test]
fn without_room_to_record_a_failed_replica_changes_fail() {
    let (mut a, b) = (TestReplica::new("a", None), TestReplica::new("b", None));
    a.has_no_label_room = true;
    let mirror = opened(&[&a, &b]);
    write(&mirror, extent(0, 1), 1).unwrap();
    b.is_offline.set(true);
    let refused = write(&mirror, extent(0, 1), 2).unwrap_err();
    assert!(refused.to_string().contains("cannot record a failed replica"), "{refused}");
    // The other way round, the remaining replica has room for a label.
    let (mut a, b) = (TestReplica::new("a", None), TestReplica::new("b", None));
    a.has_no_label_room = true;
    let mirror = opened(&[&a, &b]);
    a.is_offline.set(true);
    write(&mirror, extent(0, 1), 2).unwrap();
    drop(mirror);
    a.is_offline.set(false);
    let again = opened(&[&a, &b]);
    assert_eq!(states(&again), [ReplicaState::OutOfSync, ReplicaState::InSync]);
    resync(&again);
    assert_reads(&*a.memory, extent(0, 1), 2);
}

#[test]
fn changes_in_flight_at_a_crash_are_reconciled() {
    let (a, b, mirror) = pair(Some(TYPE1));
    write(&mirror, extent(0, 600), 1).unwrap();
    b.is_hung.set(true);
    let mut under_way = Box::pin(sealblock_block::Device::execute(&*mirror, write_of(&mirror, extent(300, 4), 2)));
    assert!(under_way.as_mut().now_or_never().is_none());
    // A crash of the process: nothing of it runs any more.
    std::mem::forget(under_way);
    let _dead = Rc::clone(&mirror);
    b.is_hung.set(false);
    let again = opened(&[&a, &b]);
    assert!(again.describe().dirty_bytes > 0);
    let reader = try_open(&[&a, &b], true).unwrap();
    verify(&reader).unwrap();
    assert_reads(&again, extent(300, 4), 2);
    resync(&again);
    for device in [&*a.memory, &*b.memory] {
        assert_reads(device, extent(300, 4), 2);
        assert_reads(device, extent(0, 300), 1);
    }
    verify(&again).unwrap();
}

#[test]
fn replicas_are_added_and_removed_in_use() {
    let (a, b, mirror) = pair(Some(TYPE1));
    write(&mirror, extent(0, BLOCKS), 1).unwrap();
    let c = TestReplica::new("c", Some(TYPE1));
    let add = |replica: &TestReplica| mirror.add(replica.source(), false).now_or_never().expect("RAM never waits");
    let remove = |name| mirror.remove(name).now_or_never().expect("RAM never waits");
    add(&c).unwrap();
    write(&mirror, extent(7, 1), 2).unwrap();
    resync(&mirror);
    assert_eq!(states(&mirror), [ReplicaState::InSync; 3]);
    assert_reads(&*c.memory, extent(7, 1), 2);
    assert_reads(&*c.memory, extent(8, BLOCKS - 8), 1);
    assert_eq!(add(&c), Err(ReplicaError::InUse { replica: "c".to_owned() }));
    assert_eq!(remove("x"), Err(ReplicaError::Unknown("x".to_owned())));
    remove("a").unwrap();
    write(&mirror, extent(7, 1), 3).unwrap();
    remove("b").unwrap();
    assert_eq!(remove("c"), Err(ReplicaError::LastInSync { replica: "c".to_owned(), left: Vec::new() }));
    close(&mirror);
    drop(mirror);
    assert_eq!(refusal(&[&a, &c]), AssembleError::Removed { replica: 0 });
    let d = TestReplica::new("d", Some(TYPE1));
    assert_eq!(refusal(&[&c, &d]), AssembleError::NotAReplica { replica: 1 });
    drop(b);
}

#[test]
fn a_replica_is_not_removed_when_the_others_turn_out_to_be_offline() {
    let (a, b, mirror) = pair(Some(TYPE1));
    write(&mirror, extent(0, 8), 1).unwrap();
    // No request has found that yet.
    b.is_offline.set(true);
    let removed = mirror.remove("a").now_or_never().expect("RAM never waits");
    assert_eq!(
        removed,
        Err(ReplicaError::LastInSync { replica: "a".to_owned(), left: vec!["b is out of sync".to_owned()] })
    );
    assert_eq!(states(&mirror), [ReplicaState::InSync, ReplicaState::OutOfSync]);
    write(&mirror, extent(0, 8), 2).unwrap();
    close(&mirror);
    drop(mirror);
    b.is_offline.set(false);
    let mirror = opened(&[&a, &b]);
    resync(&mirror);
    assert_reads(&*b.memory, extent(0, 8), 2);
}

/// The replicas of a mirror that was written to and closed.
fn three_closed() -> [TestReplica; 3] {
    let replicas = ["a", "b", "c"].map(|name| TestReplica::new(name, None));
    let mirror = opened(&replicas.each_ref());
    write(&mirror, extent(0, 8), 1).unwrap();
    close(&mirror);
    replicas
}

#[test]
fn a_replica_that_may_be_another_one_is_not_removed_by_its_name() {
    for believes in [false, true] {
        let replicas = three_closed();
        let [a, b, c] = &replicas;
        [b, c].iter().for_each(|replica| replica.is_offline.set(true));
        // In another order, so that nothing tells which is which.
        let mirror = opened(&[a, c, b]);
        let remove = || mirror.remove("c").now_or_never().expect("RAM never waits");
        let ambiguous = Err(ReplicaError::Ambiguous { replica: "c".to_owned(), others: "b".to_owned() });
        assert_eq!(remove(), ambiguous);
        let new = TestReplica::new("d", None);
        assert_eq!(mirror.replace("c", new.source(), true).now_or_never().unwrap(), ambiguous);
        if believes {
            mirror.trust_names();
            remove().unwrap();
            continue;
        }
        b.is_offline.set(false);
        reattach(&mirror, b).unwrap();
        resync(&mirror);
        remove().unwrap();
        let now: Vec<(String, ReplicaState)> =
            mirror.describe().replicas.into_iter().map(|replica| (replica.name, replica.state)).collect();
        assert_eq!(now.iter().filter(|(_, state)| *state == ReplicaState::InSync).count(), 2, "{now:?}");
        write(&mirror, extent(0, 8), 2).unwrap();
        assert_reads(&*b.memory, extent(0, 8), 2);
    }
}

#[test]
fn devices_without_labels_in_all_the_places_of_those_that_are_away_are_replaced_by_name() {
    let [a, ..] = &three_closed();
    let blank = ["b", "c"].map(|name| TestReplica::new(name, None));
    // One is online at the opening, the other one later: until then it may be the replica of that name, with a label.
    blank[1].is_offline.set(true);
    let mirror = opened(&[a, &blank[0], &blank[1]]);
    let replace = |replica: &TestReplica| mirror.replace(replica.name, replica.source(), false).now_or_never().unwrap();
    assert_eq!(replace(&blank[0]), Err(ReplicaError::Ambiguous { replica: "b".to_owned(), others: "c".to_owned() }));
    blank[1].is_offline.set(false);
    let why = reattach(&mirror, &blank[1]).unwrap_err();
    assert!(why.contains("mirror replace"), "{why}");
    replace(&blank[0]).unwrap();
    replace(&blank[1]).unwrap();
    resync(&mirror);
    assert_eq!(states(&mirror), [ReplicaState::InSync; 3]);
    assert_reads(&*blank[1].memory, extent(0, 8), 1);
}

#[test]
fn replicas_that_were_offline_at_the_opening_are_identified_by_their_labels_when_they_are_back() {
    let replicas = three_closed();
    let [a, b, c] = &replicas;
    // In another order, and with one that is not given: as if a crash had cut its removal short.
    for (seed, given, names) in [(2, vec![a, c, b], ["a", "b", "c"]), (3, vec![a, c], ["a", "replica 1", "c"])] {
        given[1..].iter().for_each(|replica| replica.is_offline.set(true));
        let mirror = opened(&given);
        write(&mirror, extent(0, 8), seed).unwrap();
        given[1..].iter().for_each(|replica| replica.is_offline.set(false));
        let copy = TestReplica { name: "c", ..a.image() };
        let why = reattach(&mirror, &copy).unwrap_err();
        assert!(why.contains("never was a replica"), "one that is there cannot come back: {why}");
        for replica in &given[1..] {
            reattach(&mirror, replica).unwrap();
        }
        resync(&mirror);
        let now = mirror.describe().replicas;
        assert_eq!(now.iter().map(|replica| &*replica.name).collect::<Vec<_>>(), names);
        given.iter().for_each(|replica| assert_reads(&*replica.memory, extent(0, 8), seed));
        close(&mirror);
    }
}
