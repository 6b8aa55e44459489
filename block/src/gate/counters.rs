//! What has gone through a gate.

use std::cell::Cell;

use crate::{ErrorKind, Outcome, RequestKind};

/// Counts of one operation.
#[derive(Default)]
struct Count {
    requests: Cell<u64>,
    bytes: Cell<u64>,
    errors: Cell<u64>,
}

/// Requests, bytes and errors by operation. Belongs to one core, so plain cells do.
#[derive(Default)]
pub struct Counters {
    by_kind: [Count; RequestKind::ALL.len()],
    damaged_blocks: Cell<u64>,
    in_flight: Cell<u64>,
}

/// A request that is under way; it is no more once this is dropped, however that comes.
pub(super) struct Flight<'a>(&'a Counters);

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        self.0.in_flight.set(self.0.in_flight.get() - 1);
    }
}

impl Counters {
    /// A request begins.
    pub(super) fn begin(&self) -> Flight<'_> {
        self.in_flight.set(self.in_flight.get() + 1);
        Flight(self)
    }

    pub(super) fn count(&self, kind: RequestKind, bytes: u64, outcome: &Outcome) {
        let count = &self.by_kind[kind.index()];
        count.requests.set(count.requests.get() + 1);
        match outcome {
            Ok(_) => count.bytes.set(count.bytes.get() + bytes),
            Err(error) => {
                count.errors.set(count.errors.get() + 1);
                if let ErrorKind::Integrity(faults) = error.kind() {
                    self.damaged_blocks.set(self.damaged_blocks.get() + faults.as_slice().len() as u64);
                }
            }
        }
    }

    /// Requests under way: begun, and neither answered nor given up. Those that are carried out in place never are.
    pub fn in_flight(&self) -> u64 {
        self.in_flight.get()
    }

    /// Requests of all kinds answered so far, errors among them.
    pub fn answered(&self) -> u64 {
        self.by_kind.iter().map(|count| count.requests.get()).sum()
    }

    /// Requests of this kind answered so far, errors among them.
    pub fn requests(&self, kind: RequestKind) -> u64 {
        self.by_kind[kind.index()].requests.get()
    }

    /// Bytes of data that successful requests of this kind were about.
    pub fn bytes(&self, kind: RequestKind) -> u64 {
        self.by_kind[kind.index()].bytes.get()
    }

    /// Requests of this kind that failed.
    pub fn errors(&self, kind: RequestKind) -> u64 {
        self.by_kind[kind.index()].errors.get()
    }

    /// Damaged blocks reported so far, counted once a report.
    pub fn damaged_blocks(&self) -> u64 {
        self.damaged_blocks.get()
    }
}
