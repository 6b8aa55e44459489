//! Replicas without room for a label, which are known by their name: another device under that name.

use futures_util::FutureExt;
use sealblock_block::Request;

use super::*;
use crate::label::ReplicaState;

fn bare(name: &'static str) -> TestReplica {
    TestReplica { has_no_label_room: true, ..TestReplica::new(name, Some(TYPE1)) }
}

/// A mirror of one with a label and one without, all of which was written, closed.
fn written() -> (TestReplica, TestReplica) {
    let (a, b) = (TestReplica::new("a", Some(TYPE1)), bare("b"));
    let mirror = opened(&[&a, &b]);
    write(&mirror, extent(0, BLOCKS), 1).unwrap();
    close(&mirror);
    (a, b)
}

/// Another device with this name. Its content differs from that of [`written`] in every second block.
fn other() -> TestReplica {
    let other = bare("b");
    for start in 0..BLOCKS {
        write(&*other.memory, extent(start, 1), if start % 2 == 0 { 1 } else { 2 }).unwrap();
    }
    other
}

fn last_error(mirror: &TestMirror) -> String {
    mirror.describe().replicas[1].last_error.clone()
}

#[test]
fn another_device_under_the_name_of_a_replica_without_a_label_is_neither_read_nor_written() {
    for read_only in [true, false] {
        let (a, b) = written();
        let wrong = other();
        let mirror = try_open(&[&a, &wrong], read_only).unwrap();
        assert!(last_error(&mirror).contains("its content is not that of a"), "{}", last_error(&mirror));
        assert_eq!(states(&mirror), [ReplicaState::InSync, ReplicaState::OutOfSync]);
        for start in (0..BLOCKS).step_by(64) {
            assert_reads(&mirror, extent(start, 64), 1);
        }
        wrong.written_blocks.set(0);
        if !read_only {
            write(&mirror, extent(600, 4), 3).unwrap();
            // It does not come back either, as the device that it is and as no other.
            assert!(reattach(&mirror, &wrong).unwrap_err().contains("its content is not that of a"));
            assert_eq!(states(&mirror), [ReplicaState::InSync, ReplicaState::OutOfSync]);
            reattach(&mirror, &b).unwrap();
            resync(&mirror);
            assert_eq!(states(&mirror), [ReplicaState::InSync, ReplicaState::InSync]);
            assert_reads(&*b.memory, extent(600, 4), 3);
        }
        close(&mirror);
        assert_eq!(wrong.written_blocks.get(), 0);
        drop(mirror);
        let again = opened(&[&a, &b]);
        assert!(again.describe().replicas.iter().all(|replica| replica.is_online), "its own device is taken");
    }
}

#[test]
fn what_a_replica_without_a_label_lacks_or_has_lost_is_no_other_device() {
    let (a, b) = written();
    // A block that has rotted, and one that nobody can read.
    write(&*b.memory, extent(0, 1), 9).unwrap();
    run(&*b.memory, Request::write_uncorrectable(extent(3, 1), Durability::Volatile)).unwrap();
    let mirror = opened(&[&a, &b]);
    assert_eq!((states(&mirror)[1], last_error(&mirror)), (ReplicaState::InSync, String::new()));
    // It lacks half of what it had, and comes back twice: while the mirror is open, and with the next opening.
    b.is_offline.set(true);
    write(&mirror, extent(0, BLOCKS / 2), 2).unwrap();
    b.is_offline.set(false);
    reattach(&mirror, &b).unwrap();
    b.is_offline.set(true);
    write(&mirror, extent(0, BLOCKS / 2), 3).unwrap();
    close(&mirror);
    drop(mirror);
    b.is_offline.set(false);
    let again = opened(&[&a, &b]);
    assert!(again.describe().replicas[1].is_online, "{}", last_error(&again));
    reattach(&again, &b).unwrap();
    resync(&again);
    assert_eq!(states(&again), [ReplicaState::InSync, ReplicaState::InSync]);
    assert_reads(&*b.memory, extent(0, 64), 3);
    assert!(again.close().now_or_never().is_some());
}

#[test]
fn without_its_only_label_a_mirror_changes_nothing_and_goes_on_once_that_is_back() {
    let (a, b) = written();
    let mirror = opened(&[&a, &b]);
    write(&mirror, extent(600, 4), 2).unwrap();
    a.is_offline.set(true);
    let why = write(&mirror, extent(0, 1), 3).unwrap_err().to_string();
    assert!(why.contains("cannot record a failed replica"), "{why}");
    assert!(run(&mirror, Request::flush()).is_err());
    assert_reads(&mirror, extent(600, 4), 2);
    // It has lost what was not flushed, of which readers have seen the copy of the other one.
    write(&*a.memory, extent(600, 4), 1).unwrap();
    a.is_offline.set(false);
    reattach(&mirror, &a).unwrap();
    assert_eq!(states(&mirror), [ReplicaState::InSync, ReplicaState::InSync]);
    assert_reads(&mirror, extent(600, 4), 2);
    resync(&mirror);
    assert_reads(&*a.memory, extent(600, 4), 2);
    write(&mirror, extent(0, 1), 4).unwrap();
    run(&mirror, Request::flush()).unwrap();
    close(&mirror);
    drop(mirror);
    let again = opened(&[&a, &b]);
    assert_eq!(states(&again), [ReplicaState::InSync, ReplicaState::InSync]);
    assert_reads(&again, extent(0, 1), 4);
    assert_eq!(verify(&again).map(drop), Ok(()));
}

#[test]
fn the_only_one_with_a_label_does_not_count_if_it_was_written_alone_meanwhile() {
    let (a, b) = written();
    let mirror = opened(&[&a, &b]);
    a.is_offline.set(true);
    assert!(write(&mirror, extent(0, 1), 3).is_err());
    a.is_offline.set(false);
    crate::mark_written_alone(&a.stack()).now_or_never().expect("RAM never waits").unwrap();
    write(&*a.memory, extent(9, 1), 4).unwrap();
    let _ = reattach(&mirror, &a);
    assert_ne!(states(&mirror)[0], ReplicaState::InSync);
    assert_reads(&mirror, extent(9, 1), 1);
}

#[test]
fn another_device_is_noticed_too_once_there_is_something_to_compare_it_with() {
    for returns_first in [true, false] {
        let (a, b) = written();
        let wrong = other();
        let mirror = opened(&[&a, &b]);
        a.is_offline.set(true);
        assert!(write(&mirror, extent(0, 1), 1).is_err());
        b.is_offline.set(true);
        assert!(read(&mirror, extent(0, 1)).is_err());
        if returns_first {
            assert!(reattach(&mirror, &wrong).unwrap_err().contains("to compare it with"));
        }
        a.is_offline.set(false);
        reattach(&mirror, &a).unwrap();
        assert!(reattach(&mirror, &wrong).unwrap_err().contains("its content is not that of a"));
        assert_eq!(states(&mirror), [ReplicaState::InSync, ReplicaState::OutOfSync]);
        write(&mirror, extent(0, 1), 1).unwrap();
        for start in (0..BLOCKS).step_by(64) {
            assert_reads(&mirror, extent(start, 64), 1);
        }
        assert_eq!(wrong.written_blocks.get(), 0);
        b.is_offline.set(false);
        reattach(&mirror, &b).unwrap();
        resync(&mirror);
        assert_eq!(states(&mirror), [ReplicaState::InSync, ReplicaState::InSync]);
        assert_eq!(verify(&mirror).map(drop), Ok(()));
    }
}

/// Whether it is the replica or another device cannot be seen then.
#[test]
fn a_device_that_lacks_everything_is_not_overwritten_until_it_is_made_a_replica() {
    let (a, b) = written();
    let mirror = opened(&[&a, &b]);
    b.is_offline.set(true);
    write(&mirror, extent(0, BLOCKS), 2).unwrap();
    b.is_offline.set(false);
    assert!(reattach(&mirror, &b).unwrap_err().contains("lacks most of what was written"));
    close(&mirror);
    drop(mirror);
    b.written_blocks.set(0);
    let mirror = opened(&[&a, &b]);
    assert!(!mirror.describe().replicas[1].is_online);
    assert_eq!(b.written_blocks.get(), 0);
    mirror.replace("b", b.source(), true).now_or_never().unwrap().unwrap();
    // Nor is it in doubt when that is interrupted.
    close(&mirror);
    drop(mirror);
    let mirror = opened(&[&a, &b]);
    assert!(mirror.describe().replicas[1].is_online, "{}", last_error(&mirror));
    resync(&mirror);
    assert_eq!(states(&mirror), [ReplicaState::InSync, ReplicaState::InSync]);
    assert_eq!(verify(&mirror).map(drop), Ok(()));
}

/// After a crash, most of a small mirror is marked.
#[test]
fn another_device_is_noticed_where_all_is_marked_too_and_the_replica_itself_is_compared_there() {
    for is_other in [true, false] {
        let (a, b) = (TestReplica::new("a", Some(TYPE1)), bare("b"));
        let mirror = opened(&[&a, &b]);
        write(&mirror, extent(0, BLOCKS), 1).unwrap();
        // A crash: nothing of it runs any more, and what is marked stays so. The replica lacks a third.
        std::mem::forget(mirror);
        write(&*b.memory, extent(0, BLOCKS / 3), 9).unwrap();
        let wrong = bare("b");
        write(&*wrong.memory, extent(0, BLOCKS), 2).unwrap();
        let given = if is_other { &wrong } else { &b };
        let mirror = opened(&[&a, given]);
        assert_eq!(mirror.describe().replicas[1].is_online, !is_other, "{}", last_error(&mirror));
        assert_eq!(last_error(&mirror).contains("its content is not that of a"), is_other);
        // What was refused stays so, although labels now say that it lacks all that was marked.
        if is_other {
            write(&mirror, extent(0, 1), 3).unwrap();
            wrong.written_blocks.set(0);
            assert!(reattach(&mirror, &wrong).unwrap_err().contains("its content is not that of a"));
            close(&mirror);
            drop(mirror);
            let again = opened(&[&a, &wrong]);
            assert!(!again.describe().replicas[1].is_online);
            assert_eq!(wrong.written_blocks.get(), 0);
        }
    }
}
