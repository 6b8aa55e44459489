//! Replicas that fail during a resync or reconciliation.

use std::future::ready;

use futures_util::FutureExt;
use sealblock_block::{Device, Request};
use sealblock_media_memory::Corruption;
use sealblock_units::Lba;

use super::*;
use crate::label::ReplicaState;

/// A mirror whose first replica fails just before the resync of the second one ends, with an unflushed write.
fn in_sync_just_as_the_other_fails() -> (TestReplica, TestReplica, TestMirror) {
    let (a, b, mirror) = pair(Some(TYPE1));
    write(&mirror, extent(0, 8), 1).unwrap();
    b.is_offline.set(true);
    write(&mirror, extent(0, 1), 2).unwrap();
    b.is_offline.set(false);
    reattach(&mirror, &b).unwrap();
    let replica = mirror.replicas.borrow()[1].clone();
    let mut bringing = Box::pin(mirror.resync(&replica));
    b.holds_flushes.set(true);
    assert!(bringing.as_mut().now_or_never().is_none());
    b.holds_labels.set(true);
    b.holds_flushes.set(false);
    assert!(bringing.as_mut().now_or_never().is_none());
    a.is_offline.set(true);
    assert!(read(&mirror, extent(0, 1)).is_err(), "no replica is in sync");
    b.holds_labels.set(false);
    bringing.now_or_never().expect("nothing is held").unwrap();
    (a, b, mirror)
}

#[test]
fn a_resynced_replica_takes_over_from_the_last_one_that_has_failed() {
    let (a, b, mirror) = in_sync_just_as_the_other_fails();
    assert_eq!(states(&mirror), [ReplicaState::OutOfSync, ReplicaState::InSync]);
    assert!(run(&mirror, Request::flush()).is_ok(), "nothing that was written is lost");
    write(&mirror, extent(0, 1), 3).unwrap();
    run(&mirror, Request::flush()).unwrap();
    sweep(&mirror);
    let mirrors = [mirror, opened(&[&b, &a])];
    a.is_offline.set(false);
    reattach(&mirrors[0], &a).unwrap();
    for mirror in mirrors.into_iter().chain([opened(&[&a, &b])]) {
        assert_reads(&mirror, extent(0, 1), 3);
    }
    let mirror = opened(&[&a, &b]);
    resync(&mirror);
    [&*a.memory, &*b.memory].into_iter().for_each(|device| assert_reads(device, extent(0, 1), 3));
}

#[test]
fn a_change_that_is_lost_before_it_completes_fails() {
    for comes_back in [false, true] {
        let (a, b, mirror) = pair(None);
        write(&mirror, extent(0, 1), 1).unwrap();
        // Only the first replica has it, which labels must record before the write completes.
        b.is_full.set(true);
        a.holds_labels.set(true);
        let mut change = Box::pin(mirror.execute(write_of(&mirror, extent(0, 1), 2)));
        assert!(change.as_mut().now_or_never().is_none());
        if comes_back {
            assert!(
                mirror.read(extent(5, 1), &Expectations::NONE).now_or_never().is_none(),
                "a read waits for it, too"
            );
            let replica = mirror.replicas.borrow()[0].clone();
            mirror.fail_replica(&replica, "gone");
            write(&*a.memory, extent(0, 1), 1).unwrap();
            reattach(&mirror, &a).unwrap();
        }
        a.holds_labels.set(false);
        let answered = change.now_or_never().expect("nothing is held any more");
        assert_eq!(answered.is_err(), comes_back, "{answered:?}");
    }
}

#[test]
fn a_mirror_that_is_closed_during_a_resync_is_not_compared_when_it_is_opened() {
    let (a, b, mirror) = pair(None);
    write(&mirror, extent(0, BLOCKS), 1).unwrap();
    b.is_offline.set(true);
    write(&mirror, extent(0, 1), 2).unwrap();
    b.is_offline.set(false);
    reattach(&mirror, &b).unwrap();
    // In the group of the region that is copied.
    write(&mirror, extent(1, 1), 3).unwrap();
    let replica = mirror.replicas.borrow()[1].clone();
    let mut bringing = Box::pin(mirror.resync(&replica));
    b.holds_labels.set(true);
    assert!(bringing.as_mut().now_or_never().is_none());
    a.holds_requests.set(true);
    b.holds_labels.set(false);
    assert!(bringing.as_mut().now_or_never().is_none());
    assert!(mirror.range_lock.is_locked(0..=0), "it reads the region that it copies");
    let mut closing = Box::pin(mirror.close());
    assert!(closing.as_mut().now_or_never().is_none());
    a.holds_requests.set(false);
    assert!(bringing.as_mut().now_or_never().is_some());
    closing.now_or_never().expect("nothing is held any more").unwrap();
    let mirror = opened(&[&a, &b]);
    assert!(mirror.write_intent.nosync.borrow().is_empty(), "{mirror:?}");
    assert_reads(&mirror, extent(0, 1), 2);
    assert_reads(&mirror, extent(1, 1), 3);
}

#[test]
fn a_mirror_that_is_closed_beside_a_change_that_never_ends_is_compared_there_and_only_there() {
    let (a, b, mirror) = pair(None);
    write(&mirror, extent(0, 1), 1).unwrap();
    write(&mirror, extent(BLOCKS - 1, 1), 1).unwrap();
    run(&mirror, Request::flush()).unwrap();
    write(&mirror, extent(BLOCKS - 1, 1), 2).unwrap();
    b.holds_requests.set(true);
    let mut change = Box::pin(mirror.execute(write_of(&mirror, extent(0, 1), 3)));
    assert!(change.as_mut().now_or_never().is_none());
    b.holds_requests.set(false);
    let closed = mirror.close_without(ready(())).now_or_never().expect("it does not wait for the change");
    assert!(closed.unwrap_err().to_string().contains("changes were still in flight"));
    drop(change);
    let mirror = opened(&[&a, &b]);
    assert!(mirror.is_nosync(extent(0, 1)) && !mirror.is_nosync(extent(BLOCKS - 1, 1)), "{mirror:?}");
    assert_reads(&mirror, extent(BLOCKS - 1, 1), 2);
}

/// Most requests that the resync of a region with a bad block takes.
const MAX_REQUESTS: u64 = 100;

#[test]
fn a_source_that_goes_while_copies_are_compared_does_not_make_them_differ() {
    for lasts in 0..MAX_REQUESTS {
        let (a, b, mirror) = pair(Some(TYPE1));
        write(&mirror, extent(0, 16), 1).unwrap();
        b.is_offline.set(true);
        // The replica lacks the region and has the same content there already. The bad block makes the resync compare
        // block by block.
        write(&mirror, extent(0, 16), 1).unwrap();
        b.is_offline.set(false);
        assert!(a.memory.device().damage(Lba::new(5), Corruption::Data { at: 1, mask: 1 }));
        reattach(&mirror, &b).unwrap();
        b.written_blocks.set(0);
        a.requests_left.set(lasts);
        let replica = mirror.replicas.borrow()[1].clone();
        let brought = mirror.resync(&replica).now_or_never().expect("RAM never waits");
        assert_eq!(b.written_blocks.get(), 0, "the source went after {lasts} requests");
        assert!(brought.is_ok() || lasts < MAX_REQUESTS - 1, "{brought:?}");
    }
}

#[test]
fn what_could_not_be_made_durable_where_replicas_differed_is_not_read_until_it_is() {
    let (a, b, mirror) = pair(None);
    write(&mirror, extent(0, 1), 1).unwrap();
    drop(mirror);
    write(&*b.memory, extent(0, 1), 2).unwrap();
    let mirror = opened(&[&a, &b]);
    for _ in 0..2 {
        a.fails_flush.set(true);
        b.fails_flush.set(true);
        assert!(read(&mirror, extent(0, 1)).is_err());
        assert!(!a.fails_flush.get() && !b.fails_flush.get(), "nothing was flushed before the answer");
    }
    assert_reads(&mirror, extent(0, 1), 1);
}
