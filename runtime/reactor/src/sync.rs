//! Waiting on one core: for a notification, in the order of arrival, and for the shutdown of the core.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use crate::executor::{self, Core};

// `sleep_handshake.rs` takes its atomics from here; a model checker puts its own in their place.
pub(crate) use std::sync::atomic::{AtomicBool, Ordering};

/// A notification for one waiting task. A notification before the wait is not lost.
#[derive(Default)]
pub struct Notify {
    is_notified: Cell<bool>,
    waiter: RefCell<Option<Waker>>,
}

impl Notify {
    /// Wakes the waiting task, or completes the next wait.
    pub fn notify(&self) {
        self.is_notified.set(true);
        let waiter = self.waiter.borrow_mut().take();
        if let Some(waiter) = waiter {
            waiter.wake();
        }
    }

    /// Completes the next wait without a wake-up: for calls by the waiting task itself, which waits again before it sleeps.
    pub fn notify_self(&self) {
        self.is_notified.set(true);
    }

    /// Waits for a notification since the last wait.
    pub async fn wait(&self) {
        poll_fn(|cx| {
            if self.is_notified.take() {
                return Poll::Ready(());
            }
            let previous = self.waiter.borrow_mut().replace(cx.waker().clone());
            drop(previous);
            Poll::Pending
        })
        .await
    }
}

/// The waiters for one event, in the order of arrival.
///
/// Invariant: a dropped waiter leaves no entry, if it returns its ticket. Wakers are returned and not dropped or woken here,
/// because both may run any code and the caller holds a lock.
pub(crate) struct Waiters {
    next_ticket: u64,
    waiting: BTreeMap<u64, Waker>,
}

impl Waiters {
    pub(crate) const fn new() -> Waiters {
        Waiters { next_ticket: 0, waiting: BTreeMap::new() }
    }

    /// Adds a waiter, or renews its waker. Returns the waker that is replaced.
    pub(crate) fn enter(&mut self, ticket: &mut Option<u64>, waker: &Waker) -> Option<Waker> {
        let ticket = *ticket.get_or_insert_with(|| {
            self.next_ticket += 1;
            self.next_ticket
        });
        self.waiting.insert(ticket, waker.clone())
    }

    /// Removes a waiter; `None` if it was woken or never added.
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

/// Waits until a shutdown of the core is requested ([`crate::Cores::shutdown`]), so that tasks that serve for ever can end in
/// time. On a reactor that belongs to no [`crate::Cores`] it never ends.
///
/// # Panics
/// Outside a reactor.
pub fn shutdown_requested() -> ShutdownRequested {
    ShutdownRequested { core: executor::current(), ticket: None }
}

/// The future of [`shutdown_requested`].
pub struct ShutdownRequested {
    core: Rc<Core>,
    ticket: Option<u64>,
}

impl Future for ShutdownRequested {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.core.stop_by().is_some() {
            return Poll::Ready(());
        }
        let ShutdownRequested { core, ticket } = &mut *self;
        let previous = core.shutdown_waiters.borrow_mut().enter(ticket, cx.waker());
        drop(previous);
        Poll::Pending
    }
}

impl Drop for ShutdownRequested {
    fn drop(&mut self) {
        let waker = self.core.shutdown_waiters.borrow_mut().leave(&mut self.ticket);
        drop(waker);
    }
}
