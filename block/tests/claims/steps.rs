//! Claims one step after the other, their packed ranges, and what happens when there are more than fit.

use std::future::Future;
use std::ops::RangeInclusive;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use shuttle::check_random;

use crate::claims::{Claims, PackedRange};

fn poll<F: Future>(future: Pin<&mut F>) -> Option<F::Output> {
    match future.poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(guard) => Some(guard),
        Poll::Pending => None,
    }
}

fn overlap(one: RangeInclusive<u64>, other: RangeInclusive<u64>) -> bool {
    PackedRange::new(&one).overlaps(PackedRange::new(&other))
}

#[test]
fn packed_ranges_overlap_exactly_up_to_their_limits_and_outwards_beyond() {
    let end = (1 << 39) - 1;
    for first in [0, 7, 1 << 24, end - 8] {
        let blocks = first..=first + 3;
        assert!(overlap(blocks.clone(), first + 3..=first + 9) && !overlap(blocks.clone(), first + 4..=first + 9));
        assert!(first == 0 || !overlap(blocks.clone(), first - 1..=first - 1));
        assert!(overlap(blocks, 0..=u64::MAX));
    }
    let longest = (1 << 24) - 2;
    assert!(!overlap(0..=longest, longest + 1..=longest + 1), "the longest exact range");
    assert!(overlap(1..=longest + 2, longest + 3..=longest + 3), "rounded to larger units");
    assert!(!overlap(1..=longest + 2, longest + 2 + (1 << 16)..=1 << 39));
    assert!(!overlap(end..=end, end + 1..=end + 1) && overlap(1 << 39..=1 << 39, (1 << 39) + 1..=(1 << 39) + 1));
    assert!(!overlap(1 << 39..=1 << 39, (1 << 39) + (1 << 16)..=(1 << 39) + (1 << 16)));
    // No device has these, but requests may.
    for far in [1 << 55, u64::MAX - 1] {
        assert!(overlap(far..=far, far..=u64::MAX) && overlap(far..=u64::MAX, far..=far));
    }
}

#[test]
fn packed_ranges_never_miss_an_overlap() {
    let mut rng = fastrand::Rng::with_seed(1);
    let mut random = |around: u64| {
        let (most_away, longest) = (1_i64 << rng.u32(..30), 1_u64 << rng.u32(..30));
        let first = around.saturating_add_signed(rng.i64(-most_away..=most_away));
        let length = rng.u64(..longest);
        first..=first.saturating_add(length)
    };
    let mut exact = 0;
    for round in 0..200_000_u64 {
        let around = 1 << (round % 64);
        let (one, other) = (random(around), random(around));
        let truly = one.start() <= other.end() && other.start() <= one.end();
        let packed = overlap(one.clone(), other.clone());
        assert!(packed || !truly, "{one:?} and {other:?}");
        assert_eq!(packed, overlap(other, one));
        exact += u32::from(packed == truly);
    }
    assert!(exact > 150_000, "{exact}");
}

#[test]
fn only_overlapping_changes_and_exclusions_wait() {
    check_random(
        || {
            let claims = Claims::default();
            let (lane, other_lane) = (claims.lane(), claims.lane());
            let claim = lane.try_enter(10..=13).unwrap();
            let beside = poll(pin!(claims.exclude(14..=20))).expect("nothing is in the way");
            let mut over = pin!(claims.exclude(13..=13));
            assert!(poll(over.as_mut()).is_none());
            assert!(poll(pin!(other_lane.enter(9..=9))).is_some() && other_lane.try_enter(20..=20).is_none());
            let mut waiting = pin!(other_lane.enter(20..=21));
            assert!(poll(waiting.as_mut()).is_none());
            drop(claim);
            drop(poll(over.as_mut()).expect("the change has ended"));
            drop(beside);
            drop(poll(waiting).expect("the exclusion has ended"));
            assert!(!claims.0.announced.stop(PackedRange::ALL));
        },
        1,
    );
}

/// A fence must hold its blocks while it waits for an exclusion that overlaps only some of them.
#[test]
fn an_exclusion_that_waits_for_another_one_stops_later_changes() {
    check_random(
        || {
            let claims = Claims::default();
            let lane = claims.lane();
            let fenced = lane.try_enter(8..=11).unwrap();
            let mut first = Box::pin(claims.exclude(11..=11));
            let mut fence = Box::pin(claims.exclude(8..=11));
            assert!(poll(first.as_mut()).is_none() && poll(fence.as_mut()).is_none());
            let mut newer = pin!(lane.enter(8..=8));
            assert!(poll(newer.as_mut()).is_none(), "it would overtake the change that is fenced");
            drop(fenced);
            assert!(poll(fence.as_mut()).is_none(), "the first was first");
            drop(first);
            drop(poll(fence.as_mut()).expect("it is the first"));
            assert!(poll(newer).is_some());
        },
        1,
    );
}

#[test]
fn overlapping_exclusions_are_granted_in_their_order_and_dropped_ones_do_not_block() {
    check_random(
        || {
            let claims = Claims::default();
            let lane = claims.lane();
            let held = poll(pin!(claims.exclude(0..=3))).unwrap();
            let mut second = Box::pin(claims.exclude(0..=3));
            let mut third = Box::pin(lane.enter(3..=3));
            assert!(poll(second.as_mut()).is_none() && poll(third.as_mut()).is_none());
            drop(held);
            assert!(poll(third.as_mut()).is_none(), "the second was first");
            drop(second);
            assert!(poll(third.as_mut()).is_some());
        },
        1,
    );
}

#[derive(Default)]
struct Count(AtomicU32);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn an_exclusion_is_woken_by_the_changes_that_it_waits_for() {
    check_random(
        || {
            let claims = Claims::default();
            let (lane, ending) = (claims.lane(), claims.lane());
            let [over, beside] = [0..=1, 4..=5].map(|blocks| lane.try_enter(blocks).unwrap());
            std::mem::forget(ending.try_enter(1..=1).unwrap());
            let count = Arc::new(Count::default());
            let waker = Waker::from(Arc::clone(&count));
            let mut exclusion = pin!(claims.exclude(1..=2));
            let mut poll = || exclusion.as_mut().poll(&mut Context::from_waker(&waker)).is_ready();
            assert!(!poll());
            drop(beside);
            assert_eq!(count.0.load(Ordering::Relaxed), 0);
            drop(over);
            assert_eq!(count.0.load(Ordering::Relaxed), 1);
            assert!(!poll(), "a claim of the other lane was leaked");
            drop(ending);
            assert_eq!(count.0.load(Ordering::Relaxed), 2, "the end of a lane ends its claims");
            assert!(poll());
        },
        1,
    );
}

#[test]
fn changes_without_a_place_are_waited_for_and_none_begins_beside_an_exclusion() {
    check_random(
        || {
            let claims = Claims::default();
            let lane = claims.lane();
            let both = [0, 1].map(|block| lane.try_enter(block..=block).unwrap());
            let third = lane.try_enter(2..=2).expect("it is only counted");
            let mut exclusion = Box::pin(claims.exclude(9..=9));
            assert!(poll(exclusion.as_mut()).is_none(), "its blocks are not known");
            assert!(lane.try_enter(3..=3).is_none(), "otherwise the exclusion might wait forever");
            let listed = poll(pin!(lane.enter(3..=3))).expect("nothing that overlaps is in the way");
            drop(third);
            assert!(poll(exclusion.as_mut()).is_some(), "the blocks of a listed one are known");
            let mut over = pin!(claims.exclude(3..=3));
            assert!(poll(over.as_mut()).is_none(), "it is waited for, too");
            drop(listed);
            assert!(poll(over.as_mut()).is_some());
            drop(both);
            assert!([0, 1].map(|block| lane.try_enter(block..=block)).iter().all(Option::is_some), "places are reused");
        },
        1,
    );
}

#[test]
fn an_exclusion_without_a_place_holds_and_lets_others_pass() {
    check_random(
        || {
            let claims = Claims::default();
            let lane = claims.lane();
            let first = poll(pin!(claims.exclude(0..=0))).unwrap();
            let both = poll(pin!(claims.exclude_both(2..=2, 4..=4))).expect("nothing is in the way");
            for block in [2, 4] {
                assert!(poll(pin!(lane.enter(block..=block))).is_none(), "{block}");
            }
            assert!(lane.try_enter(3..=3).is_none(), "only the list knows");
            assert!(poll(pin!(lane.enter(3..=3))).is_some());
            drop(both);
            assert!(lane.try_enter(3..=3).is_some() && lane.try_enter(0..=0).is_none());
            drop(first);
            assert!(lane.try_enter(0..=0).is_some());
        },
        1,
    );
}
