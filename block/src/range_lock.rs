//! The range lock of a shared device: how one who compares and then writes keeps other changes away.
//!
//! Invariants: while a range is locked alone, no other change of overlapping blocks is under way; locks that overlap are
//! granted in the order they were asked for, so nobody starves; a change costs two atomic additions on a counter of its thread
//! as long as nobody locks alone.
//!
//! Shape: who locks alone is rare and changes are not, so changes are only counted. Who wants blocks for itself first makes
//! its wish known, which sends new changes to the list of locks, and then waits until those that were only counted are
//! gone. The order of the two steps on either side (count, then look for wishes; wish, then look at the counts) is what
//! makes it safe, and it needs sequential consistency.

use std::future::poll_fn;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

/// Counters of changes, so that threads do not fight over one.
const SHARDS: usize = 8;

#[derive(Default)]
#[repr(align(64))]
struct Shard(AtomicUsize);

/// The locks on the blocks of one device, shared by all cores. Blocks are addresses, from the first to the last.
#[derive(Default)]
pub struct RangeLock {
    /// Changes under way that are only counted.
    counted: [Shard; SHARDS],
    /// Locks of one alone that are held or waited for.
    alone: AtomicUsize,
    list: Mutex<List>,
}

#[derive(Default)]
struct List {
    next: u64,
    /// In the order they were asked for.
    locks: Vec<Listed>,
    waiting: Vec<Waker>,
}

struct Listed {
    id: u64,
    blocks: RangeInclusive<u64>,
    alone: bool,
}

/// A lock that is held, until this is dropped.
pub struct RangeGuard<'a> {
    of: &'a RangeLock,
    kind: Kind,
}

enum Kind {
    Counted(usize),
    Listed { id: u64, alone: bool },
}

impl RangeLock {
    fn list(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the blocks may be changed, beside other changes.
    pub async fn lock_shared(&self, blocks: RangeInclusive<u64>) -> RangeGuard<'_> {
        match self.try_lock_shared() {
            Some(guard) => guard,
            None => self.listed(blocks, false).await,
        }
    }

    /// The right to change any blocks, beside other changes; nothing while somebody has, or wants, blocks for itself.
    pub fn try_lock_shared(&self) -> Option<RangeGuard<'_>> {
        let shard = shard();
        self.counted[shard].0.fetch_add(1, Ordering::SeqCst);
        let guard = RangeGuard { of: self, kind: Kind::Counted(shard) };
        (self.alone.load(Ordering::SeqCst) == 0).then_some(guard)
    }

    /// Waits until nobody else changes the blocks.
    pub async fn lock(&self, blocks: RangeInclusive<u64>) -> RangeGuard<'_> {
        self.alone.fetch_add(1, Ordering::SeqCst);
        self.listed(blocks, true).await
    }

    async fn listed(&self, blocks: RangeInclusive<u64>, alone: bool) -> RangeGuard<'_> {
        let id = {
            let mut list = self.list();
            list.next += 1;
            let id = list.next;
            list.locks.push(Listed { id, blocks: blocks.clone(), alone });
            id
        };
        // Made before the wait, so that a lock that is no longer waited for is given up too.
        let guard = RangeGuard { of: self, kind: Kind::Listed { id, alone } };
        poll_fn(|cx| {
            let mut list = self.list();
            if list.may_go_on(id, &blocks, alone) && (!alone || self.none_counted()) {
                return Poll::Ready(());
            }
            list.waiting.push(cx.waker().clone());
            Poll::Pending
        })
        .await;
        guard
    }

    fn none_counted(&self) -> bool {
        self.counted.iter().all(|shard| shard.0.load(Ordering::SeqCst) == 0)
    }

    /// Lets everybody who waits look again.
    fn wake(&self) {
        let waiting = std::mem::take(&mut self.list().waiting);
        waiting.into_iter().for_each(Waker::wake);
    }
}

impl List {
    /// Whether no earlier lock is in the way of this one.
    fn may_go_on(&self, id: u64, blocks: &RangeInclusive<u64>, alone: bool) -> bool {
        let earlier = self.locks.iter().take_while(|other| other.id < id);
        !earlier.into_iter().any(|other| (alone || other.alone) && overlap(&other.blocks, blocks))
    }
}

fn overlap(one: &RangeInclusive<u64>, other: &RangeInclusive<u64>) -> bool {
    one.start() <= other.end() && other.start() <= one.end()
}

impl Drop for RangeGuard<'_> {
    fn drop(&mut self) {
        match self.kind {
            Kind::Counted(shard) => {
                self.of.counted[shard].0.fetch_sub(1, Ordering::SeqCst);
                if self.of.alone.load(Ordering::SeqCst) == 0 {
                    return;
                }
            }
            Kind::Listed { id, alone } => {
                self.of.list().locks.retain(|lock| lock.id != id);
                if alone {
                    self.of.alone.fetch_sub(1, Ordering::SeqCst);
                }
            }
        }
        self.of.wake();
    }
}

/// The counter of this thread.
fn shard() -> usize {
    static THREADS: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static SHARD: usize = THREADS.fetch_add(1, Ordering::Relaxed) % SHARDS;
    }
    SHARD.with(|shard| *shard)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::Future;
    use std::pin::{Pin, pin};
    use std::task::Context;

    fn extent(start: u64, blocks: u64) -> RangeInclusive<u64> {
        start..=start + blocks - 1
    }

    fn poll<'a, F: Future<Output = RangeGuard<'a>>>(future: Pin<&mut F>) -> Option<RangeGuard<'a>> {
        match future.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(guard) => Some(guard),
            Poll::Pending => None,
        }
    }

    #[test]
    fn changes_do_not_wait_for_changes_and_who_locks_alone_waits_for_all_of_them() {
        let ranges = RangeLock::default();
        let (first, second) =
            (poll(pin!(ranges.lock_shared(extent(0, 8)))), poll(pin!(ranges.lock_shared(extent(4, 8)))));
        assert!(first.is_some() && second.is_some());
        let mut alone = pin!(ranges.lock(extent(100, 1)));
        assert!(poll(alone.as_mut()).is_none(), "nobody knows where the counted changes go");
        drop(first);
        assert!(poll(alone.as_mut()).is_none());
        drop(second);
        assert!(poll(alone.as_mut()).is_some());
    }

    #[test]
    fn only_overlapping_changes_wait_for_one_who_locks_alone() {
        let ranges = RangeLock::default();
        let alone = poll(pin!(ranges.lock(extent(10, 2)))).expect("nothing is in the way");
        let (mut over, mut beside) = (pin!(ranges.lock_shared(extent(11, 4))), pin!(ranges.lock_shared(extent(12, 4))));
        assert!(poll(over.as_mut()).is_none());
        assert!(poll(beside.as_mut()).is_some());
        drop(alone);
        assert!(poll(over.as_mut()).is_some());
        assert_eq!((ranges.alone.load(Ordering::SeqCst), ranges.list().locks.len()), (0, 0));
    }

    #[test]
    fn overlapping_locks_are_granted_in_their_order_and_those_given_up_are_not_in_the_way() {
        let ranges = RangeLock::default();
        let held = poll(pin!(ranges.lock(extent(0, 4)))).expect("nothing is in the way");
        let mut second = Box::pin(ranges.lock(extent(0, 4)));
        assert!(poll(second.as_mut()).is_none());
        let mut third = pin!(ranges.lock_shared(extent(3, 1)));
        assert!(poll(third.as_mut()).is_none());
        drop(held);
        assert!(poll(third.as_mut()).is_none(), "the second was first");
        drop(second);
        assert!(poll(third.as_mut()).is_some());
        assert!(
            poll(pin!(ranges.lock_shared(extent(0, 9)))).is_some_and(|guard| matches!(guard.kind, Kind::Counted(_)))
        );
    }

    #[test]
    fn a_counter_that_must_not_be_torn_is_not() {
        let ranges = RangeLock::default();
        let torn = Mutex::new(0_u32);
        let block = |future: Pin<&mut dyn Future<Output = ()>>| {
            let mut future = future;
            while future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
                std::thread::yield_now();
            }
        };
        let change = || {
            let before = *torn.lock().unwrap();
            std::thread::yield_now();
            *torn.lock().unwrap() = before + 1;
        };
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        block(pin!(async {
                            let _alone = ranges.lock(extent(0, 2)).await;
                            change();
                        }));
                    }
                });
            }
            scope.spawn(|| {
                for _ in 0..200 {
                    block(pin!(async {
                        let _alone = ranges.lock_shared(extent(1, 2)).await;
                        change();
                    }));
                }
            });
        });
        assert_eq!(*torn.lock().unwrap(), 600);
    }
}
