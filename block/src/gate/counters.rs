//! What a gate counts.
//!
//! Invariant: only the core of the gate writes its counters, so a count is a load and a store, and no locked
//! instruction. Every core may read them.

use std::iter::Sum;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{ErrorKind, Outcome, RequestKind};

/// A count that one core writes and every core may read.
#[derive(Default)]
struct Count(AtomicU64);

impl Count {
    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Adds, on the core that writes it; wraps around.
    fn add(&self, more: u64) {
        self.0.store(self.get().wrapping_add(more), Ordering::Relaxed);
    }
}

/// Counters of one request kind.
#[derive(Default)]
struct KindCounters {
    requests: Count,
    bytes: Count,
    errors: Count,
}

/// Requests, bytes and errors by request kind: of one gate, or the sums of several.
#[derive(Default)]
pub struct Counters {
    by_kind: [KindCounters; RequestKind::ALL.len()],
    bad_blocks: Count,
    in_flight: Count,
}

/// Counts a request as in flight until it is dropped: completed or cancelled.
pub(super) struct InFlightGuard<'a>(&'a Counters);

impl Drop for InFlightGuard<'_> {
    fn drop(&mut self) {
        self.0.in_flight.add(u64::MAX);
    }
}

impl Counters {
    /// Counts a request as in flight until the guard is dropped.
    pub(super) fn request_started(&self) -> InFlightGuard<'_> {
        self.in_flight.add(1);
        InFlightGuard(self)
    }

    pub(super) fn record(&self, kind: RequestKind, bytes: u64, outcome: &Outcome) {
        let count = &self.by_kind[kind.index()];
        count.requests.add(1);
        match outcome {
            Ok(_) => count.bytes.add(bytes),
            Err(error) => {
                count.errors.add(1);
                if let ErrorKind::Integrity(bad_blocks) = error.kind() {
                    self.bad_blocks.add(bad_blocks.as_slice().len() as u64);
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

impl Sum<Arc<Counters>> for Counters {
    /// The sums of the counters of several gates, each as it is when it is read.
    fn sum<I: Iterator<Item = Arc<Counters>>>(gates: I) -> Counters {
        let total = Counters::default();
        for gate in gates {
            for (sum, of_gate) in total.by_kind.iter().zip(&gate.by_kind) {
                sum.requests.add(of_gate.requests.get());
                sum.bytes.add(of_gate.bytes.get());
                sum.errors.add(of_gate.errors.get());
            }
            total.bad_blocks.add(gate.bad_blocks());
            total.in_flight.add(gate.in_flight());
        }
        total
    }
}
