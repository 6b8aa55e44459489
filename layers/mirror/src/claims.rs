//! Who may work on which blocks: overlapping changes one after the other, in the order they came.

use std::cell::{Cell, RefCell};

use sealblock_block::Condition;
use sealblock_units::Extent;

/// Claims on runs of blocks. Belongs to one core.
#[derive(Default)]
pub(crate) struct Claims {
    /// Those who work and those who wait, in the order they came.
    queue: RefCell<Vec<(u64, Extent)>>,
    next: Cell<u64>,
    waiting: Cell<usize>,
    freed: Condition,
}

/// The right to work on some blocks; given up when it is dropped.
pub(crate) struct Claim<'a> {
    claims: &'a Claims,
    ticket: u64,
}

impl Claims {
    /// Waits until nobody who came earlier works on, or waits for, any of these blocks.
    pub async fn take(&self, extent: Extent) -> Claim<'_> {
        let ticket = self.next.get();
        self.next.set(ticket + 1);
        self.queue.borrow_mut().push((ticket, extent));
        let claim = Claim { claims: self, ticket };
        if !self.is_due(ticket, extent) {
            self.waiting.set(self.waiting.get() + 1);
            let _waiting = Waiting(self);
            self.freed.wait_until(|| self.is_due(ticket, extent)).await;
        }
        claim
    }

    /// Waits until nobody who came before works on, or waits for, any of these blocks.
    pub async fn pass(&self, extent: Extent) {
        let ticket = self.next.get();
        if !self.is_due(ticket, extent) {
            self.waiting.set(self.waiting.get() + 1);
            let _waiting = Waiting(self);
            self.freed.wait_until(|| self.is_due(ticket, extent)).await;
        }
    }

    fn is_due(&self, ticket: u64, extent: Extent) -> bool {
        !self.queue.borrow().iter().any(|(other, held)| *other < ticket && held.overlaps(extent))
    }

    /// Whether nobody works on any blocks.
    pub fn is_idle(&self) -> bool {
        self.queue.borrow().is_empty()
    }

    /// Whether somebody works on, or waits for, any of these blocks.
    pub fn touches(&self, extent: Extent) -> bool {
        self.queue.borrow().iter().any(|(_, held)| held.overlaps(extent))
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let mut queue = self.claims.queue.borrow_mut();
        if let Some(at) = queue.iter().position(|(ticket, _)| *ticket == self.ticket) {
            queue.remove(at);
        }
        drop(queue);
        if self.claims.waiting.get() > 0 {
            self.claims.freed.notify();
        }
    }
}

struct Waiting<'a>(&'a Claims);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.set(self.0.waiting.get() - 1);
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
        let claims = Claims::default();
        let first = claims.take(at(0, 10)).now_or_never().unwrap();
        let mut second = pin!(claims.take(at(5, 10)));
        assert!(second.as_mut().now_or_never().is_none());
        // It overlaps only one who waits, and must not overtake it.
        let mut third = pin!(claims.take(at(12, 10)));
        assert!(third.as_mut().now_or_never().is_none());
        assert!(claims.take(at(30, 1)).now_or_never().is_some());
        drop(first);
        let second = second.now_or_never().unwrap();
        assert!(third.as_mut().now_or_never().is_none());
        assert!(claims.touches(at(14, 1)) && !claims.touches(at(0, 5)));
        drop(second);
        assert!(third.now_or_never().is_some());
        assert!(!claims.touches(at(0, 100)), "a claim that was dropped holds nothing");
    }

    #[test]
    fn who_gives_up_waiting_is_forgotten() {
        let at = Extent::from_raw(3, 1).unwrap();
        let claims = Claims::default();
        let first = claims.take(at).now_or_never().unwrap();
        assert!(claims.take(at).now_or_never().is_none());
        drop(first);
        assert!(claims.take(at).now_or_never().is_some());
    }
}
