//! A queue from one core to another.
//!
//! Invariant: a reader that finds the queue empty leaves its waker, and the next push takes it. So no item is missed, and a busy
//! reader is not woken.

use std::sync::PoisonError;
use std::task::{Context, Poll, Waker};

use crate::sync::{Mutex, MutexGuard};

pub(crate) struct Mailbox<T>(Mutex<MailboxState<T>>);

struct MailboxState<T> {
    items: Vec<T>,
    reader: Option<Waker>,
    is_closed: bool,
}

impl<T> Mailbox<T> {
    pub(crate) fn new() -> Mailbox<T> {
        Mailbox(Mutex::new(MailboxState { items: Vec::new(), reader: None, is_closed: false }))
    }

    fn lock(&self) -> MutexGuard<'_, MailboxState<T>> {
        // Only moves happen under the lock, so a panic leaves nothing half done.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends an item; returns it as the error when the mailbox is closed.
    pub(crate) fn push(&self, item: T) -> Result<(), T> {
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

    /// Swaps the queued items with `into`, which is empty. False when the mailbox is closed and empty.
    pub(crate) fn poll_take(&self, cx: &mut Context<'_>, into: &mut Vec<T>) -> Poll<bool> {
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
    pub(crate) fn finish(&self) {
        let mut state = self.lock();
        state.is_closed = true;
        let reader = state.reader.take();
        drop(state);
        if let Some(reader) = reader {
            reader.wake();
        }
    }

    /// Accepts no further items; returns the queued ones.
    pub(crate) fn close(&self) -> Vec<T> {
        let mut state = self.lock();
        state.is_closed = true;
        std::mem::take(&mut state.items)
    }
}
