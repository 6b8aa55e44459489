//! Handoffs from one thread to another, where either side may sleep: [`SleepHandshake`] between a reactor and its
//! senders, and [`Mailbox`] between tasks of two cores.
//!
//! Invariants: no notice is missed by sleeping. A sender sets `notified` and then reads `sleeping`; the reactor sets
//! `sleeping` and then reads `notified`. All four are sequentially consistent, so at least one side sees the other:
//! either the reactor stays awake, or the sender ends its sleep. A reader that finds a mailbox empty stores its waker
//! under the same lock, and the next push takes it. So no item is missed, and a busy reader is not woken.
//!
//! `tests/handoff.rs` runs this file under many interleavings, with the locks and atomics of a model checker.

use std::sync::PoisonError;
use std::task::{Context, Poll, Waker};

use crate::primitives::{AtomicBool, Mutex, MutexGuard, Ordering};

/// The handshake between a reactor and the threads that send to it, before the reactor sleeps.
pub(crate) struct SleepHandshake {
    notified: AtomicBool,
    /// The reactor sleeps, or is about to.
    sleeping: AtomicBool,
}

impl SleepHandshake {
    pub(crate) fn new() -> SleepHandshake {
        SleepHandshake { notified: AtomicBool::new(false), sleeping: AtomicBool::new(false) }
    }

    /// Leaves a notice. True if the reactor may be sleeping: then the sender must wake it.
    #[must_use]
    pub(crate) fn notify(&self) -> bool {
        !self.notified.swap(true, Ordering::SeqCst) && self.sleeping.load(Ordering::SeqCst)
    }

    /// The reactor is about to sleep. False if there is a notice: then it must not sleep. In either case call
    /// [`SleepHandshake::wake_up`] afterwards.
    pub(crate) fn fall_asleep(&self) -> bool {
        self.sleeping.store(true, Ordering::SeqCst);
        !self.notified.load(Ordering::SeqCst)
    }

    /// The reactor is awake, and takes the notice before it next sleeps.
    pub(crate) fn wake_up(&self) {
        self.sleeping.store(false, Ordering::SeqCst);
    }

    /// True if there is a notice that the reactor has not taken.
    pub(crate) fn has_notice(&self) -> bool {
        self.notified.load(Ordering::Acquire)
    }

    /// Takes the notice. True if there was one.
    pub(crate) fn take_notice(&self) -> bool {
        self.notified.load(Ordering::Relaxed) && self.notified.swap(false, Ordering::SeqCst)
    }
}

/// A queue from one core to another. A busy reader takes all items together, and is not woken for each.
pub struct Mailbox<T>(Mutex<MailboxState<T>>);

struct MailboxState<T> {
    items: Vec<T>,
    reader: Option<Waker>,
    is_closed: bool,
}

impl<T> Default for Mailbox<T> {
    fn default() -> Mailbox<T> {
        Mailbox(Mutex::new(MailboxState { items: Vec::new(), reader: None, is_closed: false }))
    }
}

impl<T> Mailbox<T> {
    fn lock(&self) -> MutexGuard<'_, MailboxState<T>> {
        // Only moves happen under the lock, so a panic leaves nothing half done.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends an item; returns it as the error when the mailbox is closed.
    pub fn push(&self, item: T) -> Result<(), T> {
        let mut state = self.lock();
        if state.is_closed {
            return Err(item);
        }
        state.items.push(item);
        let reader = state.reader.take();
        drop(state);
        if let Some(reader) = reader {
            reader.wake();
        }
        Ok(())
    }

    /// Appends all items, in order, and wakes the reader at most once. `items` is empty afterwards, and keeps some
    /// capacity in the long run. False, with all items left, when the mailbox is closed.
    #[must_use]
    pub fn push_all(&self, items: &mut Vec<T>) -> bool {
        let mut state = self.lock();
        if state.is_closed {
            return false;
        }
        match state.items.is_empty() {
            true => std::mem::swap(&mut state.items, items),
            false => state.items.append(items),
        }
        let reader = if state.items.is_empty() { None } else { state.reader.take() };
        drop(state);
        if let Some(reader) = reader {
            reader.wake();
        }
        true
    }

    /// Swaps the queued items with `into`, which is empty. False when the mailbox is closed and empty.
    pub fn poll_take(&self, cx: &mut Context<'_>, into: &mut Vec<T>) -> Poll<bool> {
        debug_assert!(into.is_empty(), "what was taken before is done");
        let mut state = self.lock();
        if !state.items.is_empty() {
            std::mem::swap(&mut state.items, into);
            return Poll::Ready(true);
        }
        if state.is_closed {
            return Poll::Ready(false);
        }
        let previous = state.reader.replace(cx.waker().clone());
        drop(state);
        drop(previous);
        Poll::Pending
    }

    /// Accepts no further items; the reader still gets the queued ones.
    pub fn finish(&self) {
        let mut state = self.lock();
        state.is_closed = true;
        let reader = state.reader.take();
        drop(state);
        if let Some(reader) = reader {
            reader.wake();
        }
    }

    /// Accepts no further items; returns the queued ones.
    pub fn close(&self) -> Vec<T> {
        let mut state = self.lock();
        state.is_closed = true;
        std::mem::take(&mut state.items)
    }
}
