//! Synchronization of the tasks of one core: the range lock, an async mutex, a condition, and the clock. Changes of a
//! device that several cores share exclude each other by [`crate::Claims`] instead.
//!
//! Invariants of the range lock: locks that overlap are granted in the order in which they were requested, so no
//! request starves. Dropping a future or a guard at any point gives up its place.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::ops::RangeInclusive;
use std::task::{Poll, Waker};
use std::time::Duration;

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

/// Locks ranges of blocks for the tasks of one core. Ranges are block addresses, from the first to the last.
#[derive(Default)]
pub struct RangeLock {
    next_id: Cell<u64>,
    /// Held and waited for, in the order of the requests.
    locks: RefCell<Vec<ListedLock>>,
    released: Condition,
}

struct ListedLock {
    id: u64,
    blocks: RangeInclusive<u64>,
}

/// A lock that is held until the guard is dropped.
pub struct RangeGuard<'a> {
    lock: &'a RangeLock,
    id: u64,
}

impl RangeLock {
    /// Locks the blocks. Waits until no earlier lock overlaps them.
    pub async fn lock(&self, blocks: RangeInclusive<u64>) -> RangeGuard<'_> {
        let id = self.next_id.replace(self.next_id.get() + 1);
        self.locks.borrow_mut().push(ListedLock { id, blocks: blocks.clone() });
        // Created before the wait, so that dropping the future gives up its place.
        let guard = RangeGuard { lock: self, id };
        self.released.wait_until(|| !self.has_earlier(id, &blocks)).await;
        guard
    }

    /// Waits until none of the locks that are held or waited for now overlaps these blocks.
    pub async fn wait_unlocked(&self, blocks: RangeInclusive<u64>) {
        let end = self.next_id.get();
        self.released.wait_until(|| !self.has_earlier(end, &blocks)).await;
    }

    /// True if no lock is held or waited for.
    pub fn is_idle(&self) -> bool {
        self.locks.borrow().is_empty()
    }

    /// True if a lock of any of these blocks is held or waited for.
    pub fn is_locked(&self, blocks: RangeInclusive<u64>) -> bool {
        self.has_earlier(u64::MAX, &blocks)
    }

    fn has_earlier(&self, id: u64, blocks: &RangeInclusive<u64>) -> bool {
        let locks = self.locks.borrow();
        locks.iter().take_while(|other| other.id < id).any(|other| overlap(&other.blocks, blocks))
    }
}

fn overlap(one: &RangeInclusive<u64>, other: &RangeInclusive<u64>) -> bool {
    one.start() <= other.end() && other.start() <= one.end()
}

impl Drop for RangeGuard<'_> {
    fn drop(&mut self) {
        self.lock.locks.borrow_mut().retain(|lock| lock.id != self.id);
        self.lock.released.notify();
    }
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
    use std::pin::pin;

    fn extent(start: u64, blocks: u64) -> RangeInclusive<u64> {
        start..=start + blocks - 1
    }

    #[test]
    fn only_overlapping_locks_wait_for_each_other() {
        let ranges = RangeLock::default();
        let held = ranges.lock(extent(10, 2)).now_or_never().expect("nothing is in the way");
        let (mut over, beside) = (pin!(ranges.lock(extent(11, 4))), ranges.lock(extent(15, 4)).now_or_never());
        assert!(over.as_mut().now_or_never().is_none() && beside.is_some());
        drop(held);
        assert!(over.now_or_never().is_some());
        drop(beside);
        assert!(ranges.is_idle());
    }

    #[test]
    fn overlapping_locks_are_granted_in_their_order_and_cancelled_ones_do_not_block() {
        let ranges = RangeLock::default();
        let held = ranges.lock(extent(0, 4)).now_or_never().expect("nothing is in the way");
        let (mut second, mut third) = (Box::pin(ranges.lock(extent(0, 4))), pin!(ranges.lock(extent(3, 1))));
        assert!(second.as_mut().now_or_never().is_none() && third.as_mut().now_or_never().is_none());
        drop(held);
        assert!(third.as_mut().now_or_never().is_none(), "the second was first");
        drop(second);
        assert!(third.now_or_never().is_some());
    }

    #[test]
    fn a_reader_waits_for_earlier_locks_of_its_blocks_only() {
        let ranges = RangeLock::default();
        let wait = |blocks| ranges.wait_unlocked(blocks).now_or_never().is_some();
        assert!(wait(extent(0, 9)) && ranges.is_idle());
        let held = ranges.lock(extent(0, 4)).now_or_never().expect("nothing is in the way");
        assert!(!ranges.is_idle() && ranges.is_locked(extent(3, 9)) && !ranges.is_locked(extent(4, 9)));
        assert!(!wait(extent(3, 9)) && wait(extent(4, 9)));
        let mut reader = pin!(ranges.wait_unlocked(extent(0, 1)));
        assert!(reader.as_mut().now_or_never().is_none());
        let mut later = pin!(ranges.lock(extent(0, 4)));
        assert!(later.as_mut().now_or_never().is_none());
        drop(held);
        assert!(reader.now_or_never().is_some(), "the second lock came after the reader");
        assert!(later.now_or_never().is_some_and(|_| !ranges.is_idle()));
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
