//! Claims of blocks, under random interleavings of their atomic operations and locks: each rule of `claims.rs` with
//! threads, and twins, which are variants of a change or an exclusion that break one rule. `steps` tests one step after
//! the other, `random` the library against a simple model.

use std::future::{Future, poll_fn};
use std::ops::RangeInclusive;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use shuttle::future::block_on;
use shuttle::sync::{Condvar, Mutex};
use shuttle::{check_random, thread};

/// The model checker's lock and atomics replace the standard ones for the file that is included below, and it has few
/// places, so that few changes need more.
mod primitives {
    pub use shuttle::sync::atomic::{AtomicU64, Ordering};
    pub use shuttle::sync::{Mutex, MutexGuard};

    pub const LANE_PLACES: usize = 2;
    pub const EXCLUSION_PLACES: usize = 1;
}

#[path = "../../src/claims.rs"]
mod claims;

mod random;
mod steps;

use claims::{Claim, Claims, Lane, PackedRange};

const INTERLEAVINGS: usize = 20_000;

type Blocks = RangeInclusive<u64>;

/// What is in flight on each of eight blocks. Its own lock is no step of the model.
#[derive(Clone, Default)]
struct Device(Arc<std::sync::Mutex<DeviceState>>);

#[derive(Default)]
struct DeviceState {
    changes: [u32; 8],
    is_excluded: [bool; 8],
}

impl Device {
    fn state(&self) -> std::sync::MutexGuard<'_, DeviceState> {
        self.0.lock().unwrap()
    }

    fn change(&self, blocks: &Blocks) {
        let each = || blocks.clone().map(|block| block as usize);
        let is_excluded = each().any(|block| self.state().is_excluded[block]);
        assert!(!is_excluded, "a change began within an exclusion");
        each().for_each(|block| self.state().changes[block] += 1);
        thread::yield_now();
        each().for_each(|block| self.state().changes[block] -= 1);
    }

    fn exclude(&self, blocks: &Blocks) {
        let each = || blocks.clone().map(|block| block as usize);
        let is_free = |block: usize| {
            let state = self.state();
            state.changes[block] == 0 && !state.is_excluded[block]
        };
        let are_free = each().all(is_free);
        assert!(are_free, "an exclusion began within a change");
        each().for_each(|block| self.state().is_excluded[block] = true);
        thread::yield_now();
        each().for_each(|block| self.state().is_excluded[block] = false);
    }
}

/// How a change claims its blocks.
trait Enter: 'static {
    fn lane(claims: &Claims) -> Lane {
        claims.lane()
    }

    /// `None` is a change that claims nothing.
    async fn enter<'a>(claims: &Claims, lane: &'a Lane, blocks: Blocks) -> Option<Claim<'a>>;
}

struct Real;

impl Enter for Real {
    async fn enter<'a>(_claims: &Claims, lane: &'a Lane, blocks: Blocks) -> Option<Claim<'a>> {
        Some(lane.enter(blocks).await)
    }
}

/// Two threads with changes of these blocks, one after the other, and one with exclusions, each of two ranges.
fn run_changes_and_exclusions<E: Enter>(changes: [&'static [Blocks]; 2], exclusions: &'static [[Blocks; 2]]) {
    let (claims, device) = (Claims::default(), Device::default());
    let changing = changes.map(|changes| {
        let (claims, device) = (claims.clone(), device.clone());
        thread::spawn(move || {
            let lane = E::lane(&claims);
            for blocks in changes {
                let claim = block_on(E::enter(&claims, &lane, blocks.clone()));
                device.change(blocks);
                drop(claim);
            }
        })
    });
    for [one, other] in exclusions {
        let exclusion = match one == other {
            true => block_on(claims.exclude(one.clone())),
            false => block_on(claims.exclude_both(one.clone(), other.clone())),
        };
        device.exclude(one);
        if one != other {
            device.exclude(other);
        }
        drop(exclusion);
    }
    changing.into_iter().for_each(|thread| thread.join().unwrap());
    assert!(!claims.0.announced.stop(PackedRange::ALL), "nothing stays announced");
}

fn run_overlapping<E: Enter>() {
    run_changes_and_exclusions::<E>([&[0..=1, 3..=3], &[1..=2, 1..=1]], &[[1..=1, 1..=1], [1..=2, 1..=2]]);
}

#[test]
fn an_exclusion_holds_and_no_wake_is_lost() {
    check_random(run_overlapping::<Real>, INTERLEAVINGS);
}

#[test]
fn an_exclusion_of_two_ranges_holds_both() {
    let run = || run_changes_and_exclusions::<Real>([&[0..=0, 3..=3], &[2..=3]], &[[0..=0, 3..=3], [2..=2, 5..=5]]);
    check_random(run, INTERLEAVINGS);
}

/// Looks for exclusions before it claims.
struct LooksFirst;

impl Enter for LooksFirst {
    async fn enter<'a>(claims: &Claims, lane: &'a Lane, blocks: Blocks) -> Option<Claim<'a>> {
        let range = PackedRange::new(&blocks);
        match claims.0.announced.stop(range) {
            true => Some(lane.enter_queued(range).await),
            false => lane.claim(range),
        }
    }
}

#[test]
#[should_panic(expected = "began within")]
fn a_change_that_looks_before_it_claims_is_caught() {
    check_random(run_overlapping::<LooksFirst>, INTERLEAVINGS);
}

/// Keeps its place while it queues behind an exclusion, which waits for that place.
struct KeepsItsPlace;

impl Enter for KeepsItsPlace {
    async fn enter<'a>(claims: &Claims, lane: &'a Lane, blocks: Blocks) -> Option<Claim<'a>> {
        let range = PackedRange::new(&blocks);
        let claim = lane.claim(range)?;
        match claims.0.announced.stop(range) {
            true => Some(lane.enter_queued(range).await),
            false => Some(claim),
        }
    }
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_change_that_keeps_its_place_while_it_waits_is_caught() {
    check_random(run_overlapping::<KeepsItsPlace>, INTERLEAVINGS);
}

/// A lane that exclusions learn of only after its first claim.
struct JoinsLate;

impl Enter for JoinsLate {
    fn lane(claims: &Claims) -> Lane {
        Lane::new(claims)
    }

    async fn enter<'a>(_claims: &Claims, lane: &'a Lane, blocks: Blocks) -> Option<Claim<'a>> {
        let claim = lane.enter(blocks).await;
        lane.join();
        Some(claim)
    }
}

#[test]
#[should_panic(expected = "began within")]
fn a_lane_that_joins_after_its_first_claim_is_caught() {
    check_random(run_overlapping::<JoinsLate>, INTERLEAVINGS);
}

/// Looks only at the announced blocks, not at the number of exclusions that found no place for theirs.
struct LooksOnlyAtPlaces;

impl Enter for LooksOnlyAtPlaces {
    async fn enter<'a>(claims: &Claims, lane: &'a Lane, blocks: Blocks) -> Option<Claim<'a>> {
        let range = PackedRange::new(&blocks);
        let claim = lane.claim(range)?;
        if !claims.0.announced.is_in_a_place(range) {
            return Some(claim);
        }
        drop(claim);
        Some(lane.enter_queued(range).await)
    }
}

/// Two exclusions at once, only one of which can announce its blocks.
fn run_many_exclusions<E: Enter>() {
    let (claims, device) = (Claims::default(), Device::default());
    let excluding = [0..=0, 2..=2].map(|blocks: Blocks| {
        let (claims, device) = (claims.clone(), device.clone());
        thread::spawn(move || {
            let exclusion = block_on(claims.exclude(blocks.clone()));
            device.exclude(&blocks);
            drop(exclusion);
        })
    });
    let lane = E::lane(&claims);
    for blocks in [2..=2, 0..=0, 5..=5] {
        let claim = block_on(E::enter(&claims, &lane, blocks.clone()));
        device.change(&blocks);
        drop(claim);
    }
    excluding.into_iter().for_each(|thread| thread.join().unwrap());
    assert!(!claims.0.announced.stop(PackedRange::ALL));
}

#[test]
fn more_exclusions_than_there_are_places_hold() {
    check_random(run_many_exclusions::<Real>, INTERLEAVINGS);
}

#[test]
#[should_panic(expected = "began within")]
fn a_change_that_looks_only_at_places_is_caught() {
    check_random(run_many_exclusions::<LooksOnlyAtPlaces>, INTERLEAVINGS);
}

/// Goes on without being counted if nobody excludes its blocks.
struct IsNotCounted;

impl Enter for IsNotCounted {
    async fn enter<'a>(claims: &Claims, lane: &'a Lane, blocks: Blocks) -> Option<Claim<'a>> {
        match claims.0.announced.stop(PackedRange::new(&blocks)) {
            true => Some(lane.enter(blocks).await),
            false => None,
        }
    }
}

/// One change more than a lane has places, beside exclusions of that change and of another one.
fn run_many_changes<E: Enter>() {
    let (claims, device) = (Claims::default(), Device::default());
    let excluding = [2..=2, 1..=1].map(|blocks: Blocks| {
        let (claims, device) = (claims.clone(), device.clone());
        thread::spawn(move || {
            let exclusion = block_on(claims.exclude(blocks.clone()));
            device.exclude(&blocks);
            drop(exclusion);
        })
    });
    let lane = claims.lane();
    // These stay in flight. A change without a place waits for no other one, so they cannot wait for each other.
    let both = [block_on(lane.enter(6..=6)), block_on(lane.enter(7..=7))];
    for blocks in [2..=2, 1..=1] {
        let third = block_on(E::enter(&claims, &lane, blocks.clone()));
        device.change(&blocks);
        drop(third);
    }
    drop(both);
    excluding.into_iter().for_each(|thread| thread.join().unwrap());
    assert!(!claims.0.announced.stop(PackedRange::ALL));
}

#[test]
fn more_changes_than_there_are_places_are_waited_for() {
    check_random(run_many_changes::<Real>, INTERLEAVINGS);
}

#[test]
#[should_panic(expected = "began within")]
fn a_change_without_a_place_that_is_not_counted_is_caught() {
    check_random(run_many_changes::<IsNotCounted>, INTERLEAVINGS);
}

/// Polls an exclusion, and leaves the waker only afterwards, where the change looks for it when it has ended.
#[test]
#[should_panic(expected = "deadlock")]
fn an_exclusion_that_leaves_its_waker_too_late_is_caught() {
    check_random(
        || {
            let (claims, waiting) = (Claims::default(), Arc::new(Mutex::new(None::<Waker>)));
            let (of_change, woken) = (claims.clone(), Arc::clone(&waiting));
            let changing = thread::spawn(move || {
                let lane = of_change.lane();
                drop(block_on(lane.enter(0..=0)));
                if let Some(waker) = woken.lock().unwrap().take() {
                    waker.wake();
                }
            });
            let mut exclusion = pin!(claims.exclude(0..=0));
            block_on(poll_fn(|cx| {
                let looked = exclusion.as_mut().poll(&mut Context::from_waker(Waker::noop())).map(drop);
                if looked.is_pending() {
                    *waiting.lock().unwrap() = Some(cx.waker().clone());
                }
                looked
            }));
            changing.join().unwrap();
        },
        INTERLEAVINGS,
    );
}

/// Stays set.
#[derive(Default)]
struct Event(Mutex<bool>, Condvar);

impl Event {
    fn set(&self) {
        *self.0.lock().unwrap() = true;
        self.1.notify_all();
    }

    fn wait(&self) {
        let mut set = self.0.lock().unwrap();
        while !*set {
            set = self.1.wait(set).unwrap();
        }
    }
}

/// Tries again whenever it is polled, without a place in the order.
struct DoesNotQueue;

impl Enter for DoesNotQueue {
    async fn enter<'a>(_claims: &Claims, lane: &'a Lane, blocks: Blocks) -> Option<Claim<'a>> {
        let claim = poll_fn(|cx| {
            let claim = lane.try_enter(blocks.clone());
            if claim.is_none() {
                cx.waker().wake_by_ref();
            }
            claim.map_or(Poll::Pending, Poll::Ready)
        });
        Some(claim.await)
    }
}

/// A change waits for an exclusion when a second exclusion comes.
fn run_order<E: Enter>() {
    let (claims, has_changed) = (Claims::default(), Arc::new(std::sync::Mutex::new(false)));
    let queued = Arc::new(Event::default());
    let first = block_on(claims.exclude(0..=1));
    let changing = {
        let (claims, has_changed, queued) = (claims.clone(), Arc::clone(&has_changed), Arc::clone(&queued));
        thread::spawn(move || {
            let lane = E::lane(&claims);
            let mut entering = pin!(E::enter(&claims, &lane, 1..=2));
            assert!(entering.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
            queued.set();
            let claim = block_on(entering);
            *has_changed.lock().unwrap() = true;
            drop(claim);
        })
    };
    let second = {
        let (claims, has_changed, queued) = (claims.clone(), Arc::clone(&has_changed), Arc::clone(&queued));
        thread::spawn(move || {
            queued.wait();
            let second = block_on(claims.exclude(2..=2));
            assert!(*has_changed.lock().unwrap(), "an exclusion overtook a change that waited");
            drop(second);
        })
    };
    queued.wait();
    drop(first);
    changing.join().unwrap();
    second.join().unwrap();
}

#[test]
fn who_waits_is_not_overtaken() {
    check_random(run_order::<Real>, INTERLEAVINGS);
}

#[test]
#[should_panic(expected = "overtook")]
fn a_change_that_tries_again_instead_of_queueing_is_caught() {
    check_random(run_order::<DoesNotQueue>, INTERLEAVINGS);
}

/// Two threads that exclude the same two ranges, one in the other order, and one with a change of one of them.
fn run_two_ranges(is_one_ticket: bool) {
    let (claims, device) = (Claims::default(), Device::default());
    let excluding = [[0..=0, 2..=2], [2..=2, 0..=0]].map(|[one, other]: [Blocks; 2]| {
        let (claims, device) = (claims.clone(), device.clone());
        thread::spawn(move || match is_one_ticket {
            true => {
                let _both = block_on(claims.exclude_both(one.clone(), other.clone()));
                device.exclude(&one);
            }
            false => {
                let _one = block_on(claims.exclude(one.clone()));
                let _other = block_on(claims.exclude(other));
                device.exclude(&one);
            }
        })
    });
    let lane = claims.lane();
    let claim = block_on(lane.enter(2..=3));
    device.change(&(2..=3));
    drop(claim);
    excluding.into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn exclusions_of_two_ranges_do_not_wait_for_each_other() {
    check_random(|| run_two_ranges(true), INTERLEAVINGS);
}

#[test]
#[should_panic(expected = "deadlock")]
fn two_tickets_for_two_ranges_are_caught() {
    check_random(|| run_two_ranges(false), INTERLEAVINGS);
}

/// Polls a future a few times, and drops it.
fn begin(future: impl Future<Output = ()>, polls: usize) {
    let mut future = pin!(future);
    for _ in 0..polls {
        if future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready() {
            return;
        }
        thread::yield_now();
    }
}

#[test]
fn futures_that_are_dropped_and_lanes_that_end_leave_nothing() {
    check_random(
        || {
            let (claims, device) = (Claims::default(), Device::default());
            let threads = [1, 2].map(|polls| {
                let (claims, device) = (claims.clone(), device.clone());
                thread::spawn(move || {
                    let lane = claims.lane();
                    let first = block_on(lane.enter(3..=3));
                    begin(async { drop(claims.exclude_both(0..=1, 3..=3).await) }, polls);
                    begin(async { drop(lane.enter(0..=0).await) }, polls);
                    drop(first);
                    let claim = block_on(lane.enter(1..=1));
                    device.change(&(1..=1));
                    drop(claim);
                })
            });
            let exclusion = block_on(claims.exclude(0..=3));
            device.exclude(&(0..=3));
            drop(exclusion);
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            assert!(!claims.0.announced.stop(PackedRange::ALL));
            let mut all = pin!(claims.exclude(0..=u64::MAX));
            assert!(all.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready());
        },
        INTERLEAVINGS,
    );
}
