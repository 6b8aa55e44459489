//! Requests under way at home whose success says that something is durable.
//!
//! A device tells of a failed flush once: of two that are under way at once one may fail and the other succeed, and the success
//! may be seen first. So a flush that has succeeded is answered only when those that were under way beside it have ended, and
//! whatever failed is recorded.
//!
//! Invariant: a request that ends without an outcome, because it was dropped, is recorded as a failure: what it was told is
//! not known.

use std::future::poll_fn;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use sealblock_block::{Error, ErrorKind, FlushErrors, Outcome};

#[derive(Default)]
pub(crate) struct Durable(Mutex<State>);

#[derive(Default)]
struct State {
    next: u64,
    under_way: Vec<u64>,
    waiting: Vec<Waker>,
}

/// A request under way.
pub(crate) struct Flight<'a> {
    of: &'a Durable,
    errors: &'a FlushErrors,
    number: u64,
    is_judged: bool,
}

impl Durable {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether none is under way.
    pub(crate) fn is_idle(&self) -> bool {
        self.lock().under_way.is_empty()
    }

    /// One begins.
    pub(crate) fn begin<'a>(&'a self, errors: &'a FlushErrors) -> Flight<'a> {
        let mut state = self.lock();
        let number = state.next;
        state.next += 1;
        state.under_way.push(number);
        Flight { of: self, errors, number, is_judged: false }
    }

    /// Waits until those have ended that are under way now.
    pub(crate) async fn settle(&self) {
        let end = self.lock().next;
        poll_fn(|cx| {
            let mut state = self.lock();
            if state.under_way.iter().all(|number| *number >= end) {
                return Poll::Ready(());
            }
            state.waiting.push(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }
}

impl Flight<'_> {
    /// It was answered so: a failure that others are to be told of is recorded.
    pub(crate) fn end(mut self, outcome: &Outcome) {
        self.is_judged = true;
        if let Err(error) = outcome
            && may_have_lost(error)
        {
            self.errors.record(error);
        }
    }
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        if !self.is_judged {
            self.errors.record(&given_up());
        }
        let mut state = self.of.lock();
        state.under_way.retain(|number| *number != self.number);
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
    }
}

/// Whether a failure of what was to be durable may have taken other writes with it. What was refused has done nothing.
fn may_have_lost(error: &Error) -> bool {
    match error.kind() {
        ErrorKind::Media { .. }
        | ErrorKind::Unreachable { .. }
        | ErrorKind::NoSpace { .. }
        | ErrorKind::Integrity(_) => true,
        ErrorKind::Miscompare { .. }
        | ErrorKind::Range { .. }
        | ErrorKind::Limit { .. }
        | ErrorKind::ReadOnly
        | ErrorKind::Absent(_) => false,
    }
}

#[cold]
fn given_up() -> Error {
    ErrorKind::Media { reason: "a durable request was given up half-way, so its outcome is not known".to_owned() }
        .into()
}
