//! Range locks of one core: overlapping changes run one after the other, in the order of their requests.

use std::cell::{Cell, RefCell};

use sealblock_block::Condition;
use sealblock_units::Extent;

/// Locks on extents. For one core; [`sealblock_block::RangeLock`] is for several.
#[derive(Default)]
pub(crate) struct RangeLock {
    /// Ticket and extent of each lock that is held or waited for, in the order of the requests.
    queue: RefCell<Vec<(u64, Extent)>>,
    next_ticket: Cell<u64>,
    waiting_count: Cell<usize>,
    released: Condition,
}

/// A lock on an extent; released when dropped.
pub(crate) struct RangeGuard<'a> {
    lock: &'a RangeLock,
    ticket: u64,
}

impl RangeLock {
    /// Waits until no earlier request holds, or waits for, a lock on any of these blocks, and locks them.
    pub async fn lock(&self, extent: Extent) -> RangeGuard<'_> {
        let ticket = self.next_ticket.get();
        self.next_ticket.set(ticket + 1);
        self.queue.borrow_mut().push((ticket, extent));
        let guard = RangeGuard { lock: self, ticket };
        if !self.is_granted(ticket, extent) {
            self.waiting_count.set(self.waiting_count.get() + 1);
            let _waiting = WaitingCount(self);
            self.released.wait_until(|| self.is_granted(ticket, extent)).await;
        }
        guard
    }

    /// Waits until no earlier request holds, or waits for, a lock on any of these blocks.
    pub async fn wait_unlocked(&self, extent: Extent) {
        let ticket = self.next_ticket.get();
        if !self.is_granted(ticket, extent) {
            self.waiting_count.set(self.waiting_count.get() + 1);
            let _waiting = WaitingCount(self);
            self.released.wait_until(|| self.is_granted(ticket, extent)).await;
        }
    }

    fn is_granted(&self, ticket: u64, extent: Extent) -> bool {
        !self.queue.borrow().iter().any(|(other, locked)| *other < ticket && locked.overlaps(extent))
    }

    /// True if no lock is held or waited for.
    pub fn is_idle(&self) -> bool {
        self.queue.borrow().is_empty()
    }

    /// True if a lock on any of these blocks is held or waited for.
    pub fn is_locked(&self, extent: Extent) -> bool {
        self.queue.borrow().iter().any(|(_, locked)| locked.overlaps(extent))
    }
}

impl Drop for RangeGuard<'_> {
    fn drop(&mut self) {
        let mut queue = self.lock.queue.borrow_mut();
        if let Some(at) = queue.iter().position(|(ticket, _)| *ticket == self.ticket) {
            queue.remove(at);
        }
        drop(queue);
        if self.lock.waiting_count.get() > 0 {
            self.lock.released.notify();
        }
    }
}

struct WaitingCount<'a>(&'a RangeLock);

impl Drop for WaitingCount<'_> {
    fn drop(&mut self) {
        self.0.waiting_count.set(self.0.waiting_count.get() - 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use std::pin::pin;

    #[test]
    fn overlapping_claims_wait_for_earlier_ones_and_others_do_not() {
        let at = |start, blocks| Extent::from_raw(start, blocks).unwrap();
        let locks = RangeLock::default();
        let first = locks.lock(at(0, 10)).now_or_never().unwrap();
        let mut second = pin!(locks.lock(at(5, 10)));
        assert!(second.as_mut().now_or_never().is_none());
        // It overlaps only a lock that is waited for, and must not overtake it.
        let mut third = pin!(locks.lock(at(12, 10)));
        assert!(third.as_mut().now_or_never().is_none());
        assert!(locks.lock(at(30, 1)).now_or_never().is_some());
        drop(first);
        let second = second.now_or_never().unwrap();
        assert!(third.as_mut().now_or_never().is_none());
        assert!(locks.is_locked(at(14, 1)) && !locks.is_locked(at(0, 5)));
        drop(second);
        assert!(third.now_or_never().is_some());
        assert!(!locks.is_locked(at(0, 100)), "a guard that was dropped holds nothing");
    }

    #[test]
    fn who_gives_up_waiting_is_forgotten() {
        let at = Extent::from_raw(3, 1).unwrap();
        let locks = RangeLock::default();
        let first = locks.lock(at).now_or_never().unwrap();
        assert!(locks.lock(at).now_or_never().is_none());
        drop(first);
        assert!(locks.lock(at).now_or_never().is_some());
    }
}
