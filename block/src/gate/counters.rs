//! What a gate counts.

use std::cell::Cell;

use crate::{ErrorKind, Outcome, RequestKind};

/// Counters of one request kind.
#[derive(Default)]
struct KindCounters {
    requests: Cell<u64>,
    bytes: Cell<u64>,
    errors: Cell<u64>,
}

/// Requests, bytes and errors by request kind. They belong to one core, so plain cells are enough.
#[derive(Default)]
pub struct Counters {
    by_kind: [KindCounters; RequestKind::ALL.len()],
    bad_blocks: Cell<u64>,
    in_flight: Cell<u64>,
}

/// Counts a request as in flight until it is dropped: completed or cancelled.
pub(super) struct InFlightGuard<'a>(&'a Counters);

impl Drop for InFlightGuard<'_> {
    fn drop(&mut self) {
        self.0.in_flight.set(self.0.in_flight.get() - 1);
    }
}

impl Counters {
    /// Counts a request as in flight until the guard is dropped.
    pub(super) fn request_started(&self) -> InFlightGuard<'_> {
        self.in_flight.set(self.in_flight.get() + 1);
        InFlightGuard(self)
    }

    pub(super) fn record(&self, kind: RequestKind, bytes: u64, outcome: &Outcome) {
        let count = &self.by_kind[kind.index()];
        count.requests.set(count.requests.get() + 1);
        match outcome {
            Ok(_) => count.bytes.set(count.bytes.get() + bytes),
            Err(error) => {
                count.errors.set(count.errors.get() + 1);
                if let ErrorKind::Integrity(bad_blocks) = error.kind() {
                    self.bad_blocks.set(self.bad_blocks.get() + bad_blocks.as_slice().len() as u64);
                }
            }
        }
    }

    /// Requests in flight: started, and neither completed nor cancelled. Requests executed in place do not count.
    pub fn in_flight(&self) -> u64 {
        self.in_flight.get()
    }

    /// Requests of all kinds completed so far, failed ones included.
    pub fn completed(&self) -> u64 {
        self.by_kind.iter().map(|count| count.requests.get()).sum()
    }

    /// Requests of this kind completed so far, failed ones included.
    pub fn requests(&self, kind: RequestKind) -> u64 {
        self.by_kind[kind.index()].requests.get()
    }

    /// Bytes of data that successful requests of this kind covered.
    pub fn bytes(&self, kind: RequestKind) -> u64 {
        self.by_kind[kind.index()].bytes.get()
    }

    /// Requests of this kind that failed.
    pub fn errors(&self, kind: RequestKind) -> u64 {
        self.by_kind[kind.index()].errors.get()
    }

    /// Bad blocks reported so far; a block counts each time it is reported.
    pub fn bad_blocks(&self) -> u64 {
        self.bad_blocks.get()
    }
}
