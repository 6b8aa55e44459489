//! Claims of the library against a simple model: in the order of their requests, each is granted as soon as no earlier
//! one overlaps it, unless both are changes. And threads, with the real lock and atomics.

use std::future::Future;
use std::ops::RangeInclusive;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Barrier};
use std::task::{Context, Poll, Wake, Waker};

use fastrand::Rng;
use sealblock_block::{Claim, Claims, Exclusion, Lane};

const BLOCKS: u64 = 40;

/// Shows whether a future was woken.
#[derive(Default)]
struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

enum Guard<'a> {
    Change { _claim: Claim<'a> },
    Exclusion { _exclusion: Exclusion<'a> },
}

/// A request, in the order of all requests.
struct Entry<'a> {
    ranges: Vec<RangeInclusive<u64>>,
    excludes: bool,
    future: Pin<Box<dyn Future<Output = Guard<'a>> + 'a>>,
    granted: Option<Guard<'a>>,
    flag: Arc<Flag>,
}

impl Entry<'_> {
    /// Polls it as a task would be: only if it was woken.
    fn poll_if_woken(&mut self) -> bool {
        if self.granted.is_some() || !self.flag.0.swap(false, Ordering::Relaxed) {
            return false;
        }
        let waker = Waker::from(Arc::clone(&self.flag));
        if let Poll::Ready(guard) = self.future.as_mut().poll(&mut Context::from_waker(&waker)) {
            self.granted = Some(guard);
        }
        true
    }

    fn conflicts(&self, other: &Entry<'_>) -> bool {
        let overlap = |one: &RangeInclusive<u64>, other: &RangeInclusive<u64>| {
            one.start() <= other.end() && other.start() <= one.end()
        };
        (self.excludes || other.excludes)
            && self.ranges.iter().any(|one| other.ranges.iter().any(|other| overlap(one, other)))
    }
}

fn random_range(rng: &mut Rng) -> RangeInclusive<u64> {
    let first = rng.u64(..BLOCKS);
    first..=first + rng.u64(..6)
}

fn random_entry<'a>(rng: &mut Rng, claims: &'a Claims, lane: &'a Lane, exclusions: u32) -> Entry<'a> {
    let (one, other) = (random_range(rng), random_range(rng));
    let flag = Arc::new(Flag(AtomicBool::new(true)));
    let granted = None;
    if rng.u32(..100) >= exclusions {
        let blocks = one.clone();
        let future = Box::pin(async move { Guard::Change { _claim: lane.enter(blocks).await } });
        return Entry { ranges: vec![one], excludes: false, future, granted, flag };
    }
    if rng.bool() {
        let blocks = one.clone();
        let future = Box::pin(async move { Guard::Exclusion { _exclusion: claims.exclude(blocks).await } });
        return Entry { ranges: vec![one], excludes: true, future, granted, flag };
    }
    let ranges = vec![one.clone(), other.clone()];
    let future = Box::pin(async move { Guard::Exclusion { _exclusion: claims.exclude_both(one, other).await } });
    Entry { ranges, excludes: true, future, granted, flag }
}

fn check(entries: &[Entry<'_>], context: &str) {
    for (position, entry) in entries.iter().enumerate() {
        let is_first = !entries[..position].iter().any(|earlier| earlier.conflicts(entry));
        assert_eq!(entry.granted.is_some(), is_first, "{context}: {position} of {}", entries.len());
    }
}

#[test]
fn requests_are_granted_as_in_a_simple_model() {
    for seed in 0..200 {
        let rng = &mut Rng::with_seed(seed);
        let claims = Claims::default();
        let lanes: Vec<Lane> = (0..3).map(|_| claims.lane()).collect();
        let (exclusions, most) = (rng.u32(1..60), rng.usize(2..40));
        let mut entries: Vec<Entry<'_>> = Vec::new();
        for step in 0..300 {
            if entries.len() < most && rng.bool() {
                let lane = &lanes[rng.usize(..3)];
                entries.push(random_entry(rng, &claims, lane, exclusions));
            } else if !entries.is_empty() {
                // Whether it was granted or still waits.
                let position = rng.usize(..entries.len());
                drop(entries.remove(position));
            }
            while entries.iter_mut().any(Entry::poll_if_woken) {}
            check(&entries, &format!("seed {seed}, step {step}"));
        }
        entries.clear();
        assert!(lanes[0].try_enter(0..=u64::MAX).is_some(), "nothing is left");
    }
}

/// The number of changes of a lane that have a place.
const PLACES: u64 = 256;

#[test]
fn a_lane_has_room_for_more_changes_than_places() {
    let claims = Claims::default();
    let lane = claims.lane();
    let mut changes: Vec<_> = (0..PLACES + 40).map(|block| lane.try_enter(block..=block).unwrap()).collect();
    let mut exclusion = pin!(claims.exclude(1000..=1000));
    let mut poll = || exclusion.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready();
    assert!(!poll(), "those without a place count as all blocks");
    let (beyond, last) = (changes.split_off(PLACES as usize), changes.pop());
    drop(beyond);
    assert!(poll());
    let mut over = pin!(claims.exclude(PLACES - 1..=PLACES - 1));
    assert!(over.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    drop(last);
    assert!(over.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready());
}

struct Unpark(std::thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return value;
        }
        std::thread::park();
    }
}

/// Each block counts its changes, and beyond that the exclusion of it.
#[test]
fn threads_never_change_what_is_excluded() {
    const EXCLUDED: u32 = 1 << 16;
    let (claims, begin) = (Claims::default(), Barrier::new(4));
    let blocks: [AtomicU32; 48] = std::array::from_fn(|_| AtomicU32::new(0));
    let add = |range: &RangeInclusive<u64>, value: u32, is_allowed: fn(u32) -> bool| {
        for block in range.clone() {
            let before = blocks[block as usize].fetch_add(value, Ordering::SeqCst);
            assert!(is_allowed(before), "block {block} at {before:x}");
        }
    };
    let remove = |range: &RangeInclusive<u64>, value: u32| {
        range.clone().for_each(|block| {
            blocks[block as usize].fetch_sub(value, Ordering::SeqCst);
        });
    };
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let (claims, begin, add, remove) = (&claims, &begin, &add, &remove);
            scope.spawn(move || {
                let (lane, mut rng) = (claims.lane(), Rng::with_seed(seed));
                begin.wait();
                for _ in 0..20_000 {
                    let range = random_range(&mut rng);
                    if rng.u32(..8) == 0 {
                        let _exclusion = block_on(claims.exclude(range.clone()));
                        add(&range, EXCLUDED, |before| before == 0);
                        remove(&range, EXCLUDED);
                    } else {
                        let _claim = block_on(lane.enter(range.clone()));
                        add(&range, 1, |before| before < EXCLUDED);
                        remove(&range, 1);
                    }
                }
            });
        }
    });
    assert!(blocks.iter().all(|block| block.load(Ordering::SeqCst) == 0));
}
