//! Flushes and durable writes in flight on the owner core.
//!
//! A device reports a failed flush once. Of two flushes in flight one may fail and the other succeed, and the success
//! may be seen first. So a successful flush completes only when all flushes that were in flight with it have ended and
//! their failures are recorded.
//!
//! Invariant: a request that ends without an outcome, because its future was dropped, is recorded as a failure, because
//! its outcome is unknown.

use std::cell::{Cell, RefCell};

use sealblock_block::{Condition, Error, ErrorKind, FlushErrors, Outcome};

#[derive(Default)]
pub(crate) struct DurableRequests {
    next: Cell<u64>,
    in_flight: RefCell<Vec<u64>>,
    ended: Condition,
}

/// A request in flight; dropping it records a failure.
pub(crate) struct InFlightGuard<'a> {
    requests: &'a DurableRequests,
    errors: &'a FlushErrors,
    id: u64,
    is_completed: bool,
}

impl DurableRequests {
    /// True if none is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.in_flight.borrow().is_empty()
    }

    /// Adds a request.
    pub(crate) fn start<'a>(&'a self, errors: &'a FlushErrors) -> InFlightGuard<'a> {
        let id = self.next.replace(self.next.get() + 1);
        self.in_flight.borrow_mut().push(id);
        InFlightGuard { requests: self, errors, id, is_completed: false }
    }

    /// Waits until every request that is in flight now has ended.
    pub(crate) async fn wait_for_earlier(&self) {
        let end = self.next.get();
        self.ended.wait_until(|| self.in_flight.borrow().iter().all(|id| *id >= end)).await;
    }
}

impl InFlightGuard<'_> {
    /// Ends the request with its outcome; records a failure that must be reported to other clients.
    pub(crate) fn complete(mut self, outcome: &Outcome) {
        self.is_completed = true;
        if let Err(error) = outcome
            && may_have_lost_writes(error)
        {
            self.errors.record(error);
        }
    }
}

impl Drop for InFlightGuard<'_> {
    fn drop(&mut self) {
        if !self.is_completed {
            self.errors.record(&dropped_error());
        }
        self.requests.in_flight.borrow_mut().retain(|id| *id != self.id);
        self.requests.ended.notify();
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
