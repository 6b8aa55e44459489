//! Internal flushes that fail.

use futures_util::FutureExt;
use sealblock_block::Request;

use super::*;
use crate::label::ReplicaState;

fn flush(mirror: &TestMirror) -> bool {
    run(&**mirror, Request::flush()).is_ok()
}

fn sweeps(mirror: &TestMirror) -> bool {
    mirror.clear_clean_regions().now_or_never().expect("RAM never waits").is_ok()
}

/// A mirror whose second replica is out of sync, with an unflushed write.
fn alone() -> (TestReplica, TestReplica, TestMirror) {
    let (a, b, mirror) = pair(None);
    b.is_offline.set(true);
    write(&*mirror, extent(0, 1), 1).unwrap();
    (a, b, mirror)
}

#[test]
fn a_failed_internal_flush_of_the_last_replica_fails_the_next_flush() {
    let (a, _b, mirror) = alone();
    a.fails_flush.set(true);
    assert!(!sweeps(&mirror));
    assert!(!flush(&mirror), "the replica reports the loss once, and reported it to the mirror");
    assert!(flush(&mirror), "once");
    assert!(sweeps(&mirror));
}

#[test]
fn a_replica_that_fails_a_flush_beside_a_good_one_is_out_of_sync_and_the_next_flush_succeeds() {
    let (a, _b, mirror) = pair(None);
    write(&*mirror, extent(0, 1), 1).unwrap();
    a.fails_flush.set(true);
    assert!(sweeps(&mirror));
    assert_eq!(states(&mirror), [ReplicaState::OutOfSync, ReplicaState::InSync]);
    assert!(flush(&mirror), "the other replica has it all");
}

#[test]
fn replicas_that_fail_a_flush_together_fail_the_next_flush() {
    let (a, b, mirror) = pair(None);
    write(&*mirror, extent(0, 1), 1).unwrap();
    a.fails_flush.set(true);
    b.fails_flush.set(true);
    assert!(!sweeps(&mirror));
    assert!(!flush(&mirror) && flush(&mirror));
    assert!(!mirror.write_intent.nosync.borrow().is_empty(), "each may have lost something else");
    assert_eq!(states(&mirror), [ReplicaState::InSync, ReplicaState::InSync]);
}

#[test]
fn a_close_fails_if_no_flush_reported_lost_writes() {
    let (a, _b, mirror) = alone();
    a.fails_flush.set(true);
    assert!(!sweeps(&mirror));
    assert!(mirror.close().now_or_never().expect("RAM never waits").is_err());
    let (a, _b, mirror) = alone();
    a.fails_flush.set(true);
    assert!(!sweeps(&mirror) && !flush(&mirror), "it is reported");
    assert!(mirror.close().now_or_never().expect("RAM never waits").is_ok());
}

#[test]
fn what_is_flushed_without_a_replica_after_a_crash_that_replica_may_have_lost() {
    for is_flushed in [true, false] {
        let (a, b, mirror) = pair(None);
        write(&*mirror, extent(0, 8), 1).unwrap();
        assert!(flush(&mirror));
        write(&*mirror, extent(0, 1), 2).unwrap();
        drop(mirror);
        b.is_offline.set(true);
        let without = opened(&[&b, &a]);
        if is_flushed {
            assert!(flush(&without));
        }
        close(&without);
        drop(without);
        // The machine with the other replica loses power. It completed that write and never flushed it.
        b.is_offline.set(false);
        write(&*b.memory, extent(0, 1), 1).unwrap();
        let again = opened(&[&b, &a]);
        let expected = if is_flushed { ReplicaState::OutOfSync } else { ReplicaState::InSync };
        assert_eq!(states(&again), [ReplicaState::InSync, expected]);
        if is_flushed {
            assert_reads(&again, extent(0, 1), 2);
            resync(&again);
            assert_reads(&*b.memory, extent(0, 1), 2);
        }
    }
}
