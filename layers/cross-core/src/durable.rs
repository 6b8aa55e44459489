//! Flushes and durable writes of one device in flight, on all cores that execute its requests.
//!
//! A device reports a failed flush once. Of two flushes in flight one may fail and the other succeed, and the success
//! may be seen first. So a successful flush completes only when all flushes that were in flight with it have ended and
//! their failures are recorded.
//!
//! Invariants: a request is listed before the device executes it, and until its failure is recorded. A request that ends
//! without an outcome, because its future was dropped, is recorded as a failure, because its outcome is unknown.
//!
//! Each request locks the list twice. `tests/durable.rs` runs this file under many interleavings, with the lock of a
//! model checker.

use std::future::poll_fn;
use std::sync::PoisonError;
use std::task::{Poll, Waker};

use sealblock_block::{Error, ErrorKind, FlushErrors, Outcome};

use crate::primitives::{Mutex, MutexGuard};

#[derive(Default)]
pub(crate) struct DurableRequests(Mutex<DurableList>);

#[derive(Default)]
struct DurableList {
    next_id: u64,
    in_flight: Vec<u64>,
    waiting: Vec<Waker>,
}

/// A request in flight; dropping it records a failure.
pub(crate) struct InFlightGuard<'a> {
    requests: &'a DurableRequests,
    errors: &'a FlushErrors,
    id: u64,
    has_ended: bool,
}

impl DurableRequests {
    fn list(&self) -> MutexGuard<'_, DurableList> {
        // Nothing under the lock panics half-way through a change of the list.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a request.
    pub(crate) fn start<'a>(&'a self, errors: &'a FlushErrors) -> InFlightGuard<'a> {
        let id = self.list().add();
        InFlightGuard { requests: self, errors, id, has_ended: false }
    }

    /// Adds a request if no other one is in flight.
    pub(crate) fn start_alone<'a>(&'a self, errors: &'a FlushErrors) -> Option<InFlightGuard<'a>> {
        let mut list = self.list();
        let id = list.in_flight.is_empty().then(|| list.add())?;
        Some(InFlightGuard { requests: self, errors, id, has_ended: false })
    }

    /// Waits until every request that is in flight now has ended.
    pub(crate) async fn wait_for_earlier(&self) {
        let end = self.list().next_id;
        poll_fn(|cx| {
            let mut list = self.list();
            if list.in_flight.iter().all(|id| *id >= end) {
                return Poll::Ready(());
            }
            if !list.waiting.iter().any(|waker| waker.will_wake(cx.waker())) {
                list.waiting.push(cx.waker().clone());
            }
            Poll::Pending
        })
        .await;
    }

    /// Removes a request. True if no other one is in flight.
    fn end(&self, id: u64) -> bool {
        let (is_alone, mut waiting) = {
            let mut list = self.list();
            list.in_flight.retain(|other| *other != id);
            (list.in_flight.is_empty(), std::mem::take(&mut list.waiting))
        };
        if waiting.capacity() > 0 {
            // Woken without the lock, since waking runs foreign code.
            waiting.drain(..).for_each(Waker::wake);
            // Its capacity is kept, so that waiting allocates nothing in the long run.
            let mut list = self.list();
            if list.waiting.capacity() == 0 {
                list.waiting = waiting;
            }
        }
        is_alone
    }
}

impl DurableList {
    fn add(&mut self) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        self.in_flight.push(id);
        id
    }
}

impl InFlightGuard<'_> {
    /// Ends the request with its outcome; records a failure that must be reported to other clients. True if no other
    /// request is in flight then.
    pub(crate) fn complete(mut self, outcome: &Outcome) -> bool {
        self.has_ended = true;
        if let Err(error) = outcome
            && may_have_lost_writes(error)
        {
            self.errors.record(error);
        }
        self.requests.end(self.id)
    }

    /// Ends a request that the device did not begin.
    pub(crate) fn cancel(mut self) {
        self.has_ended = true;
        self.requests.end(self.id);
    }
}

impl Drop for InFlightGuard<'_> {
    fn drop(&mut self) {
        if !self.has_ended {
            self.errors.record(&dropped_error());
            self.requests.end(self.id);
        }
    }
}

/// True if this failure of a durable request may have lost other clients' writes. A refused request has lost nothing.
fn may_have_lost_writes(error: &Error) -> bool {
    match error.kind() {
        ErrorKind::Media { .. }
        | ErrorKind::Unreachable { .. }
        | ErrorKind::NoSpace { .. }
        | ErrorKind::MayBeOlder(_)
        | ErrorKind::Integrity(_) => true,
        ErrorKind::Expectation { .. }
        | ErrorKind::Miscompare { .. }
        | ErrorKind::Range { .. }
        | ErrorKind::Limit { .. }
        | ErrorKind::ReadOnly
        | ErrorKind::Absent(_) => false,
    }
}

#[cold]
fn dropped_error() -> Error {
    ErrorKind::Media { reason: "a durable request was dropped half-way, so its outcome is not known".to_owned() }.into()
}
