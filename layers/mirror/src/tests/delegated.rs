//! Mirrors as other cores use them. All of it on one thread: the home core is a future beside the test's.

use std::cell::RefCell;
use std::pin::pin;

use futures_executor::block_on;
use futures_util::future::{Either, select};
use sealblock_block::{DeviceSource, yield_once};

use super::*;
use crate::mirror::MirrorState;
use crate::requests::delegated::answer_calls;
use crate::{Elsewhere, MirrorChannel};

thread_local!(static REPLICAS: RefCell<Vec<TestReplica>> = const { RefCell::new(Vec::new()) });

/// Opens a replica of this thread by its number.
struct ByNumber(usize);

impl DeviceSource for ByNumber {
    fn open_here(&self) -> Result<DynDevice, Error> {
        REPLICAS.with_borrow(|all| Ok(all[self.0].stack()))
    }
}

/// The replica, which every core can open.
fn everywhere(replica: &TestReplica) -> DynDevice {
    let number = REPLICAS.with_borrow_mut(|all| {
        all.push(replica.clone());
        all.len() - 1
    });
    replica.stack().on_every_core(ByNumber(number))
}

/// Two replicas, their mirror, and what opens it on other cores.
fn delegating(mutation: Mutation) -> ([TestReplica; 2], TestMirror, Elsewhere) {
    let replicas = ["a", "b"].map(|name| TestReplica::new(name, Some(TYPE1)));
    let sources = replicas.iter().map(|replica| ReplicaSource::new(replica.name, Ok(everywhere(replica)), None));
    let options = OpenOptions { is_read_only: false, accepts_lost_label: false, random: random() };
    let hooks = TestHooks { mutation, ..TestHooks::default() };
    let opened = open_with_hooks(sources.collect(), StoppedClock, options, hooks).now_or_never().unwrap().unwrap();
    let elsewhere = opened.mirror.elsewhere().unwrap();
    (replicas, opened.mirror, elsewhere)
}

/// Runs a test on another core, beside the home core.
fn beside<T>(mirror: &TestMirror, elsewhere: &Elsewhere, test: impl AsyncFnOnce(Rc<MirrorChannel>) -> T) -> T {
    let calls = mirror.calls.take().unwrap();
    let (channel, recalls) = elsewhere.open();
    block_on(async {
        let home = pin!(answer_calls(&**mirror, calls));
        let recalls = pin!(recalls);
        let home = select(home, recalls);
        match select(home, pin!(test(channel))).await {
            Either::Right((value, _)) => value,
            Either::Left(_) => panic!("the home core ended before the test"),
        }
    })
}

/// Lets the others run.
async fn rest() {
    for _ in 0..20 {
        yield_once().await;
    }
}

async fn execute(device: &impl Device, request: Request) -> Outcome {
    device.execute(request).await
}

/// Makes the mirror delegate: the first call of a mirror does.
async fn begin(channel: &MirrorChannel) {
    execute(channel, Request::flush()).await.unwrap();
    assert!(channel.abilities().freshness.is_current());
}

fn read_of(at: Extent) -> Request {
    Request::read(at, Expectations::NONE)
}

fn data_of(outcome: Outcome) -> Vec<u8> {
    match outcome {
        Ok(Response::Data(data)) => data.joined_data().to_vec(),
        other => panic!("no data but {other:?}"),
    }
}

#[test]
fn what_another_core_writes_is_on_every_replica_and_is_read_there_without_the_home_core() {
    let ([a, b], mirror, elsewhere) = delegating(Mutation::None);
    let at = extent(40, 3);
    beside(&mirror, &elsewhere, async |channel| {
        begin(&channel).await;
        let labels = a.label_writes.get();
        execute(&*channel, write_of(&*mirror, at, 7)).await.unwrap();
        assert!(a.label_writes.get() > labels, "labels mark the blocks before they are written");
        rest().await;
        let (of_a, of_b) = (a.written_blocks.get(), b.written_blocks.get());
        assert_eq!((of_a, of_b), (3, 3));
        let outcome = channel.execute(read_of(at)).now_or_never().expect("the home core is not needed");
        assert!(data_of(outcome) == content(at, 7));
        // What home writes, too.
        execute(&*mirror, write_of(&*mirror, at, 8)).await.unwrap();
        for _ in 0..2 {
            assert!(data_of(execute(&*channel, read_of(at)).await) == content(at, 8));
        }
        assert!(execute(&*channel, Request::verify(at, Expectations::NONE)).await.is_ok());
    });
    assert_reads(&*mirror, at, 8);
    assert!([a, b].iter().all(|replica| read(&*replica.memory, at).unwrap() == content(at, 8)));
}

#[test]
fn a_mirror_with_a_replica_that_stays_on_its_core_stays_there() {
    let (_, _, mirror) = pair(None);
    assert!(mirror.elsewhere().is_none());
    let ([a, b], mirror, _) = delegating(Mutation::None);
    close(&mirror);
    let read_only = [a, b].map(|replica| ReplicaSource::new(replica.name, Ok(everywhere(&replica)), None));
    let options = OpenOptions { is_read_only: true, accepts_lost_label: false, random: random() };
    let opened = open(read_only.into(), StoppedClock, options).now_or_never().unwrap().unwrap();
    assert!(opened.mirror.elsewhere().is_none());
}

/// Whether a read that began while a change was on some replicas only saw the change before it was on all of them.
fn sees_half_a_change(mutation: Mutation) -> bool {
    let ([a, b], mirror, elsewhere) = delegating(mutation);
    let at = extent(40, 1);
    beside(&mirror, &elsewhere, async |channel| {
        execute(&*mirror, write_of(&*mirror, at, 1)).await.unwrap();
        begin(&channel).await;
        b.holds_requests.set(true);
        let mut change = pin!(execute(&*mirror, write_of(&*mirror, at, 2)));
        assert!(futures_util::poll!(&mut change).is_pending());
        assert!(read(&*a.memory, at).unwrap() == content(at, 2) && read(&*b.memory, at).unwrap() == content(at, 1));
        let mut has_seen = false;
        for _ in 0..2 {
            if let Some(outcome) = channel.execute(read_of(at)).now_or_never() {
                has_seen |= data_of(outcome) == content(at, 2);
            }
        }
        let mut read = pin!(execute(&*channel, read_of(at)));
        assert!(has_seen || futures_util::poll!(&mut read).is_pending());
        b.holds_requests.set(false);
        change.await.unwrap();
        if !has_seen {
            assert!(data_of(read.await) == content(at, 2));
        }
        has_seen
    })
}

#[test]
fn a_read_waits_for_a_change_of_its_blocks() {
    assert!(!sees_half_a_change(Mutation::None));
    assert!(sees_half_a_change(Mutation::ReadLocked), "the test can fail");
}

/// Whether a read gets the older content of a replica that has failed a change.
fn reads_what_a_failed_replica_has(mutation: Mutation) -> bool {
    let ([_, b], mirror, elsewhere) = delegating(mutation);
    let at = extent(40, 1);
    beside(&mirror, &elsewhere, async |channel| {
        execute(&*channel, write_of(&*mirror, at, 1)).await.unwrap();
        begin(&channel).await;
        b.is_full.set(true);
        execute(&*channel, write_of(&*mirror, at, 2)).await.unwrap();
        rest().await;
        if mutation == Mutation::None {
            assert_eq!(states(&mirror), [ReplicaState::InSync, ReplicaState::OutOfSync]);
            let labels: Vec<_> = mirror.replicas.borrow().iter().map(|replica| replica.acked_events.get()).collect();
            assert!(labels[0] > labels[1], "the label says so before the change completes");
        }
        let mut is_older = false;
        for _ in 0..2 {
            is_older |= data_of(execute(&*channel, read_of(at)).await) == content(at, 1);
        }
        is_older
    })
}

#[test]
fn a_replica_that_failed_a_change_is_not_read_on_another_core() {
    assert!(!reads_what_a_failed_replica_has(Mutation::None));
    assert!(reads_what_a_failed_replica_has(Mutation::KeepDelegating), "the test can fail");
}

/// Whether a read completes with what a replica had that failed while it executed the read.
fn trusts_a_replica_that_fails_meanwhile(mutation: Mutation) -> bool {
    let ([a, b], mirror, elsewhere) = delegating(mutation);
    let at = extent(40, 1);
    beside(&mirror, &elsewhere, async |channel| {
        execute(&*channel, write_of(&*mirror, at, 1)).await.unwrap();
        begin(&channel).await;
        // Of two reads one is on b. Their replicas have read, and their answers are on the way.
        [&a, &b].iter().for_each(|replica| replica.holds_requests.set(true));
        let mut reads = [Box::pin(execute(&*channel, read_of(at))), Box::pin(execute(&*channel, read_of(at)))];
        for read in &mut reads {
            assert!(futures_util::poll!(read).is_pending());
        }
        b.is_full.set(true);
        a.holds_requests.set(false);
        let mut change = Box::pin(execute(&*mirror, write_of(&*mirror, at, 2)));
        assert!(futures_util::poll!(&mut change).is_pending());
        b.holds_requests.set(false);
        change.await.unwrap();
        let mut is_older = false;
        for read in reads {
            is_older |= data_of(read.await) == content(at, 1);
        }
        is_older
    })
}

#[test]
fn a_read_is_not_completed_by_a_replica_that_failed_meanwhile() {
    assert!(!trusts_a_replica_that_fails_meanwhile(Mutation::None));
    assert!(trusts_a_replica_that_fails_meanwhile(Mutation::TrustOldTerms), "the test can fail");
}

#[test]
fn a_change_that_ends_half_way_on_another_core_leaves_its_blocks_to_be_compared() {
    let ([a, b], mirror, elsewhere) = delegating(Mutation::None);
    let at = extent(40, 1);
    beside(&mirror, &elsewhere, async |channel| {
        begin(&channel).await;
        execute(&*channel, write_of(&*mirror, at, 1)).await.unwrap();
        b.holds_requests.set(true);
        {
            let mut change = pin!(execute(&*channel, write_of(&*mirror, at, 2)));
            for _ in 0..20 {
                assert!(futures_util::poll!(&mut change).is_pending());
                yield_once().await;
            }
        }
        assert!(read(&*a.memory, at).unwrap() == content(at, 2) && read(&*b.memory, at).unwrap() == content(at, 1));
        b.holds_requests.set(false);
        rest().await;
        assert!(mirror.is_nosync(at) && mirror.delegation.generation().is_none());
        // The first read makes them equal, at home.
        assert!(data_of(execute(&*channel, read_of(at)).await) == content(at, 2));
        assert!(read(&*b.memory, at).unwrap() == content(at, 2));
        mirror.reconcile_all().await.unwrap();
        begin(&channel).await;
        assert!(mirror.delegation.generation().is_some());
        // One that is dropped before it has a permit changes nothing.
        drop(channel.execute(write_of(&*mirror, at, 3)).now_or_never());
        rest().await;
        assert!(!mirror.is_nosync(at) && mirror.range_lock.is_idle());
        assert_eq!(mirror.state(), MirrorState::Optimal);
    });
}

#[test]
fn another_core_closes_the_replicas_that_are_recalled_once_it_uses_none() {
    let ([a, b], mirror, elsewhere) = delegating(Mutation::None);
    let at = extent(40, 1);
    let closed = Rc::strong_count(&b.memory);
    beside(&mirror, &elsewhere, async |channel| {
        begin(&channel).await;
        execute(&*channel, write_of(&*mirror, at, 1)).await.unwrap();
        assert_eq!(Rc::strong_count(&b.memory), closed + 1);
        rest().await;
        [&a, &b].iter().for_each(|replica| replica.holds_requests.set(true));
        let mut reads = [Box::pin(execute(&*channel, read_of(at))), Box::pin(execute(&*channel, read_of(at)))];
        for read in &mut reads {
            assert!(futures_util::poll!(read).is_pending());
        }
        let mut recall = Box::pin(mirror.recall());
        for _ in 0..20 {
            assert!(futures_util::poll!(&mut recall).is_pending(), "two reads use them");
            yield_once().await;
        }
        // Only now does the mirror delegate again; what uses the next replicas does not hold this up.
        [&a, &b].iter().for_each(|replica| replica.holds_requests.set(false));
        for read in reads {
            assert!(data_of(read.await) == content(at, 1));
        }
        recall.await;
        mirror.remove("b").await.unwrap();
        assert_eq!(Rc::strong_count(&b.memory), closed - 1, "neither core has it");
        begin(&channel).await;
        assert!(data_of(execute(&*channel, read_of(at)).await) == content(at, 1));
    });
}

#[test]
fn a_closed_mirror_answers_other_cores_until_they_are_gone() {
    let ([_, b], mirror, elsewhere) = delegating(Mutation::None);
    let at = extent(40, 1);
    let calls = mirror.calls.take().unwrap();
    let (channel, recalls) = elsewhere.open();
    block_on(async {
        let home = pin!(answer_calls(&*mirror, calls));
        let test = async {
            begin(&channel).await;
            execute(&*channel, write_of(&*mirror, at, 1)).await.unwrap();
            mirror.close().await.unwrap();
            assert!(mirror.delegation.generation().is_none());
            assert!(data_of(execute(&*channel, read_of(at)).await) == content(at, 1));
            drop(channel);
        };
        // The home core ends, and so does what closes the channel's replicas.
        futures_util::future::join3(home, test, recalls).await;
        let (channel, _recalls) = elsewhere.open();
        for request in [read_of(at), write_of(&*mirror, at, 2), Request::flush()] {
            let error = execute(&*channel, request).await.unwrap_err();
            assert!(error.to_string().contains("the mirror is closed"), "{error}");
        }
    });
    assert!(read(&*b.memory, at).unwrap() == content(at, 1));
}
