//! Who waits for one event, in the order of asking.
//!
//! Invariant: a waiter that is dropped leaves nothing behind, if it gives back its ticket. Wakers are returned rather than
//! dropped or woken, because both may run anything and the caller holds a lock.

use std::collections::BTreeMap;
use std::task::Waker;

pub(crate) struct Waiters {
    next_ticket: u64,
    waiting: BTreeMap<u64, Waker>,
}

impl Waiters {
    pub(crate) const fn new() -> Waiters {
        Waiters { next_ticket: 0, waiting: BTreeMap::new() }
    }

    /// Enters a waiter, or renews its waker. Returns the waker that is replaced.
    pub(crate) fn enter(&mut self, ticket: &mut Option<u64>, waker: &Waker) -> Option<Waker> {
        let ticket = *ticket.get_or_insert_with(|| {
            self.next_ticket += 1;
            self.next_ticket
        });
        self.waiting.insert(ticket, waker.clone())
    }

    /// Takes out a waiter; `None` when it was woken, or never entered.
    pub(crate) fn leave(&mut self, ticket: &mut Option<u64>) -> Option<Waker> {
        self.waiting.remove(&ticket.take()?)
    }

    pub(crate) fn take_first(&mut self) -> Option<Waker> {
        self.waiting.pop_first().map(|(_, waker)| waker)
    }

    pub(crate) fn take_all(&mut self) -> impl Iterator<Item = Waker> + use<> {
        std::mem::take(&mut self.waiting).into_values()
    }
}
