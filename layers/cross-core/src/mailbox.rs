//! Where one core leaves things for another.
//!
//! Invariant: a reader that finds nothing leaves its waker, and whoever comes next takes it, so nothing stays unnoticed and
//! a busy reader is not woken.

use std::sync::PoisonError;
use std::task::{Context, Poll, Waker};

use crate::sync::{Mutex, MutexGuard};

pub(crate) struct Mailbox<T>(Mutex<State<T>>);

struct State<T> {
    items: Vec<T>,
    reader: Option<Waker>,
    is_closed: bool,
}

impl<T> Mailbox<T> {
    pub(crate) fn new() -> Mailbox<T> {
        Mailbox(Mutex::new(State { items: Vec::new(), reader: None, is_closed: false }))
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        // Only moves happen under the lock, so a panic leaves nothing half done.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves an item, or gives it back when the mailbox is closed.
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

    /// Exchanges what is there for `into`, which is empty. `false` when the mailbox is closed and nothing is left.
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

    /// Takes nothing more; what is there stays for the reader.
    pub(crate) fn finish(&self) {
        let mut state = self.lock();
        state.is_closed = true;
        let reader = state.reader.take();
        drop(state);
        if let Some(reader) = reader {
            reader.wake();
        }
    }

    /// Takes nothing more, and gives what is there.
    pub(crate) fn close(&self) -> Vec<T> {
        let mut state = self.lock();
        state.is_closed = true;
        std::mem::take(&mut state.items)
    }
}
