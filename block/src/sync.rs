//! Synchronization of concurrent requests of one device: the range lock, an async mutex, a condition, and the clock.
//!
//! Invariants of the range lock: while a range is locked exclusively, no other change of overlapping blocks is in
//! flight; locks that overlap are granted in the order in which they were requested, so no request starves; a shared
//! lock costs two atomic additions on a counter of its thread as long as there is no exclusive lock.
//!
//! Shape: exclusive locks (compare and write) are rare and shared ones (writes) are frequent, so shared locks are only
//! counted. An exclusive lock first announces itself, which sends new shared locks to the list, and then waits until
//! the counted ones are released. Both sides write before they read: a shared lock counts itself and then looks for
//! exclusive ones; an exclusive one announces itself and then looks at the counters. So one of them sees the other.
//! This needs sequential consistency.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::Duration;

/// Number of counters of shared locks, so that threads do not contend for one cache line.
const SHARDS: usize = 8;

#[derive(Default)]
#[repr(align(64))]
struct Shard(AtomicUsize);

/// Lets other ready tasks run.
pub async fn yield_once() {
    let mut has_yielded = false;
    poll_fn(|cx| {
        if std::mem::replace(&mut has_yielded, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// The range lock of one device, shared by all cores. Ranges are block addresses, from the first to the last.
#[derive(Default)]
pub struct RangeLock {
    /// Shared locks that are counted but not listed.
    counted: [Shard; SHARDS],
    /// Exclusive locks that are held or waited for.
    exclusive: AtomicUsize,
    list: Mutex<LockList>,
}

#[derive(Default)]
struct LockList {
    next: u64,
    /// In the order of the requests. The ranges of one lock are adjacent and have the same id.
    locks: Vec<ListedLock>,
    waiting: Vec<Waker>,
}

struct ListedLock {
    id: u64,
    blocks: RangeInclusive<u64>,
    exclusive: bool,
}

/// A lock that is held until the guard is dropped.
pub struct RangeGuard<'a> {
    lock: &'a RangeLock,
    kind: RangeGuardKind,
}

enum RangeGuardKind {
    Counted(usize),
    Listed { id: u64, exclusive: bool },
}

impl RangeLock {
    fn list(&self) -> MutexGuard<'_, LockList> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the blocks for a change, concurrently with other changes. Waits for overlapping exclusive locks.
    pub async fn lock_shared(&self, blocks: RangeInclusive<u64>) -> RangeGuard<'_> {
        match self.try_lock_shared() {
            Some(guard) => guard,
            None => self.lock_listed([blocks], false).await,
        }
    }

    /// Locks all blocks for a change, concurrently with other changes, if no exclusive lock is held or waited for.
    pub fn try_lock_shared(&self) -> Option<RangeGuard<'_>> {
        let shard = shard();
        self.counted[shard].0.fetch_add(1, Ordering::SeqCst);
        let guard = RangeGuard { lock: self, kind: RangeGuardKind::Counted(shard) };
        (self.exclusive.load(Ordering::SeqCst) == 0).then_some(guard)
    }

    /// Locks the blocks exclusively. Waits until no other change of them is in flight.
    pub async fn lock(&self, blocks: RangeInclusive<u64>) -> RangeGuard<'_> {
        self.exclusive.fetch_add(1, Ordering::SeqCst);
        self.lock_listed([blocks], true).await
    }

    /// Locks the blocks of both ranges exclusively, which must not overlap. They are one lock with one place in the
    /// order, so two such locks cannot wait for each other.
    pub async fn lock_both(&self, one: RangeInclusive<u64>, other: RangeInclusive<u64>) -> RangeGuard<'_> {
        self.exclusive.fetch_add(1, Ordering::SeqCst);
        self.lock_listed([one, other], true).await
    }

    /// Waits until none of the exclusive locks that are held or waited for now overlaps these blocks.
    pub async fn wait_unlocked(&self, blocks: RangeInclusive<u64>) {
        if self.is_idle() {
            return;
        }
        let next = self.list().next + 1;
        self.wait_until(|list| list.is_grantable(next, &blocks, false)).await;
    }

    /// True if no exclusive lock is held or waited for.
    pub fn is_idle(&self) -> bool {
        self.exclusive.load(Ordering::SeqCst) == 0
    }

    /// True if an exclusive lock of any of these blocks is held or waited for.
    pub fn is_locked(&self, blocks: RangeInclusive<u64>) -> bool {
        !self.is_idle() && !self.list().is_grantable(u64::MAX, &blocks, false)
    }

    async fn lock_listed<const N: usize>(&self, ranges: [RangeInclusive<u64>; N], exclusive: bool) -> RangeGuard<'_> {
        let is_free = |list: &LockList, id| {
            let is_grantable = ranges.iter().all(|blocks| list.is_grantable(id, blocks, exclusive));
            is_grantable && (!exclusive || self.has_no_counted())
        };
        let (id, is_granted) = {
            let mut list = self.list();
            list.next += 1;
            let id = list.next;
            list.locks.extend(ranges.iter().map(|blocks| ListedLock { id, blocks: blocks.clone(), exclusive }));
            (id, is_free(&list, id))
        };
        // Created before the wait, so that dropping the future removes the lock from the list.
        let guard = RangeGuard { lock: self, kind: RangeGuardKind::Listed { id, exclusive } };
        if !is_granted {
            self.wait_until(|list| is_free(list, id)).await;
        }
        guard
    }

    /// Waits until the list meets a condition. It is checked at once and each time a lock is released.
    async fn wait_until(&self, ready: impl Fn(&LockList) -> bool) {
        poll_fn(|cx| {
            let mut list = self.list();
            if ready(&list) {
                return Poll::Ready(());
            }
            if !list.waiting.iter().any(|waker| waker.will_wake(cx.waker())) {
                list.waiting.push(cx.waker().clone());
            }
            Poll::Pending
        })
        .await;
    }

    fn has_no_counted(&self) -> bool {
        self.counted.iter().all(|shard| shard.0.load(Ordering::SeqCst) == 0)
    }

    /// Changes the list, and wakes all waiters, which check it again.
    fn change(&self, change: impl FnOnce(&mut LockList)) {
        let mut waiting = {
            let mut list = self.list();
            change(&mut list);
            std::mem::take(&mut list.waiting)
        };
        if waiting.capacity() == 0 {
            return;
        }
        waiting.drain(..).for_each(Waker::wake);
        // Its capacity is kept, so that waiting allocates nothing in the long run.
        let mut list = self.list();
        if list.waiting.capacity() == 0 {
            list.waiting = waiting;
        }
    }
}

impl LockList {
    /// True if no earlier lock conflicts with this one.
    fn is_grantable(&self, id: u64, blocks: &RangeInclusive<u64>, exclusive: bool) -> bool {
        let earlier = self.locks.iter().take_while(|other| other.id < id);
        !earlier.into_iter().any(|other| (exclusive || other.exclusive) && overlap(&other.blocks, blocks))
    }
}

fn overlap(one: &RangeInclusive<u64>, other: &RangeInclusive<u64>) -> bool {
    one.start() <= other.end() && other.start() <= one.end()
}

impl Drop for RangeGuard<'_> {
    fn drop(&mut self) {
        match self.kind {
            RangeGuardKind::Counted(shard) => {
                self.lock.counted[shard].0.fetch_sub(1, Ordering::SeqCst);
                if !self.lock.is_idle() {
                    self.lock.change(|_| ());
                }
            }
            RangeGuardKind::Listed { id, exclusive } => self.lock.change(|list| {
                list.locks.retain(|lock| lock.id != id);
                if exclusive {
                    self.lock.exclusive.fetch_sub(1, Ordering::SeqCst);
                }
            }),
        }
    }
}

/// The index of this thread's counter.
fn shard() -> usize {
    static THREADS: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static SHARD: usize = THREADS.fetch_add(1, Ordering::Relaxed) % SHARDS;
    }
    SHARD.with(|shard| *shard)
}

/// Wakes tasks that wait for a condition. Belongs to one core; a waiter checks its condition each time it is woken.
#[derive(Default)]
pub struct Condition {
    waiting: RefCell<Vec<Waker>>,
}

impl Condition {
    /// Waits until `ready` returns true; calls it at once and after every [`Condition::notify`].
    pub async fn wait_until(&self, mut ready: impl FnMut() -> bool) {
        poll_fn(|context| {
            if ready() {
                return Poll::Ready(());
            }
            let mut waiting = self.waiting.borrow_mut();
            if !waiting.iter().any(|waker| waker.will_wake(context.waker())) {
                waiting.push(context.waker().clone());
            }
            Poll::Pending
        })
        .await;
    }

    /// Wakes every waiter, which checks its condition again.
    pub fn notify(&self) {
        // Taken before waking: a waker may run code that waits again.
        let mut waiting = std::mem::take(&mut *self.waiting.borrow_mut());
        waiting.drain(..).for_each(Waker::wake);
        // Its capacity is kept, so that waiting allocates nothing in the long run.
        let mut now = self.waiting.borrow_mut();
        if now.capacity() == 0 {
            *now = waiting;
        }
    }
}

/// A mutex for the tasks of one core, in the order of their requests. The protected data are stored separately.
#[derive(Default)]
pub struct AsyncMutex {
    /// Tickets of the holder and of the waiters, in the order of their requests.
    queue: RefCell<VecDeque<u64>>,
    next_ticket: Cell<u64>,
    left: Condition,
}

/// Holds the mutex until it is dropped.
pub struct AsyncMutexGuard<'a> {
    mutex: &'a AsyncMutex,
    ticket: u64,
}

impl AsyncMutex {
    /// Waits until all earlier holders and waiters have released it.
    pub async fn lock(&self) -> AsyncMutexGuard<'_> {
        let ticket = self.next_ticket.get();
        self.next_ticket.set(ticket + 1);
        self.queue.borrow_mut().push_back(ticket);
        // Created before the wait, so that dropping the future gives up its place.
        let guard = AsyncMutexGuard { mutex: self, ticket };
        self.left.wait_until(|| self.queue.borrow().front() == Some(&ticket)).await;
        guard
    }
}

impl Drop for AsyncMutexGuard<'_> {
    fn drop(&mut self) {
        self.mutex.queue.borrow_mut().retain(|ticket| *ticket != self.ticket);
        self.mutex.left.notify();
    }
}

/// A source of delays: the reactor's clock, or the simulator's.
pub trait Clock {
    /// Waits for `delay`.
    fn sleep(&self, delay: Duration) -> impl Future<Output = ()>;
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
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
    fn shared_locks_do_not_wait_for_each_other_and_an_exclusive_lock_waits_for_all_of_them() {
        let ranges = RangeLock::default();
        let (first, second) =
            (poll(pin!(ranges.lock_shared(extent(0, 8)))), poll(pin!(ranges.lock_shared(extent(4, 8)))));
        assert!(first.is_some() && second.is_some());
        let mut exclusive = pin!(ranges.lock(extent(100, 1)));
        assert!(poll(exclusive.as_mut()).is_none(), "the blocks of counted locks are unknown");
        drop(first);
        assert!(poll(exclusive.as_mut()).is_none());
        drop(second);
        assert!(poll(exclusive.as_mut()).is_some());
    }

    #[test]
    fn only_overlapping_changes_wait_for_an_exclusive_lock() {
        let ranges = RangeLock::default();
        let exclusive = poll(pin!(ranges.lock(extent(10, 2)))).expect("nothing is in the way");
        let (mut over, mut beside) = (pin!(ranges.lock_shared(extent(11, 4))), pin!(ranges.lock_shared(extent(12, 4))));
        assert!(poll(over.as_mut()).is_none());
        assert!(poll(beside.as_mut()).is_some());
        drop(exclusive);
        assert!(poll(over.as_mut()).is_some());
        assert_eq!((ranges.exclusive.load(Ordering::SeqCst), ranges.list().locks.len()), (0, 0));
    }

    #[test]
    fn overlapping_locks_are_granted_in_their_order_and_cancelled_ones_do_not_block() {
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
            poll(pin!(ranges.lock_shared(extent(0, 9))))
                .is_some_and(|guard| matches!(guard.kind, RangeGuardKind::Counted(_)))
        );
    }

    #[test]
    fn a_lock_of_two_ranges_holds_both_and_waits_for_both() {
        let ranges = RangeLock::default();
        let held = poll(pin!(ranges.lock(extent(30, 1)))).expect("nothing is in the way");
        let mut both = Box::pin(ranges.lock_both(extent(10, 4), extent(30, 4)));
        assert!(poll(both.as_mut()).is_none(), "the second is held");
        // A lock of the same two in the other order waits for it, whichever of them is free.
        let mut turned = Box::pin(ranges.lock_both(extent(30, 4), extent(10, 4)));
        let mut between = pin!(ranges.lock_shared(extent(20, 4)));
        assert!(poll(turned.as_mut()).is_none());
        assert!(poll(between.as_mut()).is_some(), "what lies between is free");
        drop(held);
        let both = poll(both.as_mut()).expect("nothing is in the way any more");
        assert!(poll(turned.as_mut()).is_none());
        for start in [13, 33] {
            assert!(poll(pin!(ranges.lock_shared(extent(start, 1)))).is_none(), "{start}");
        }
        drop(both);
        assert!(poll(turned.as_mut()).is_some());
        drop(turned);
        assert!(ranges.list().locks.is_empty());
    }

    #[test]
    fn changes_under_the_lock_are_not_torn() {
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
                            let _exclusive = ranges.lock(extent(0, 2)).await;
                            change();
                        }));
                    }
                });
            }
            scope.spawn(|| {
                for _ in 0..200 {
                    block(pin!(async {
                        let _exclusive = ranges.lock_shared(extent(1, 2)).await;
                        change();
                    }));
                }
            });
        });
        assert_eq!(*torn.lock().unwrap(), 600);
    }

    #[test]
    fn a_reader_waits_for_earlier_exclusive_locks_of_its_blocks_only() {
        let ranges = RangeLock::default();
        let wait = |blocks| ranges.wait_unlocked(blocks).now_or_never().is_some();
        assert!(wait(extent(0, 9)) && ranges.is_idle());
        let held = poll(pin!(ranges.lock(extent(0, 4)))).expect("nothing is in the way");
        assert!(!ranges.is_idle() && ranges.is_locked(extent(3, 9)) && !ranges.is_locked(extent(4, 9)));
        assert!(!wait(extent(3, 9)) && wait(extent(4, 9)));
        let mut reader = pin!(ranges.wait_unlocked(extent(0, 1)));
        assert!(reader.as_mut().now_or_never().is_none());
        let mut later = pin!(ranges.lock(extent(0, 4)));
        assert!(poll(later.as_mut()).is_none());
        drop(held);
        assert!(reader.now_or_never().is_some(), "the second lock came after the reader");
        assert!(poll(later.as_mut()).is_some_and(|_| !ranges.is_idle()));
        assert!(ranges.is_idle() && !ranges.is_locked(extent(0, 100)));
    }

    #[test]
    fn a_mutex_lets_in_one_after_the_other_and_forgets_who_gives_up() {
        let mutex = AsyncMutex::default();
        let first = mutex.lock().now_or_never().expect("nobody is in");
        let (mut second, mut third) = (Box::pin(mutex.lock()), pin!(mutex.lock()));
        assert!(second.as_mut().now_or_never().is_none() && third.as_mut().now_or_never().is_none());
        drop(first);
        assert!(third.as_mut().now_or_never().is_none(), "the second was first");
        drop(second);
        assert!(third.now_or_never().is_some());
        assert!(mutex.queue.borrow().is_empty());
    }
}
