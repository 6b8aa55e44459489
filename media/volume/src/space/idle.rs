//! Detects whether a volume is idle, and counts what it did meanwhile.

use std::cell::Cell;
use std::time::Duration;

use crate::options::OpenOptions;

/// Counts of the idle work since the volume was opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct IdleWorkCounts {
    /// Blocks that were moved next to their neighbours.
    pub blocks_moved: u64,
    /// Blocks that were not moved because they failed their check or could not be read. They stay as they are.
    pub blocks_unfit: u64,
    /// Bytes of free physical blocks that were deallocated on the medium.
    pub bytes_punched: u64,
}

/// The options and counts of idle work.
pub(crate) struct IdleWork {
    pub relocates: bool,
    pub idle_after: Duration,
    /// Counts requests.
    requests: Cell<u64>,
    pub counts: Cell<IdleWorkCounts>,
}

impl IdleWork {
    /// For a volume opened with these options.
    pub fn new(options: &OpenOptions) -> IdleWork {
        let OpenOptions { relocate, idle_after, .. } = *options;
        IdleWork { relocates: relocate, idle_after, requests: Cell::new(0), counts: Cell::default() }
    }

    /// Counts a request.
    pub fn note_request(&self) {
        self.requests.set(self.requests.get().wrapping_add(1));
    }

    /// A period without requests that begins now.
    pub fn idle_period(&self) -> IdlePeriod<'_> {
        IdlePeriod { upkeep: self, since: self.requests.get() }
    }

    /// Adds to what has been done.
    pub fn count(&self, add: impl FnOnce(&mut IdleWorkCounts)) {
        let mut counts = self.counts.get();
        add(&mut counts);
        self.counts.set(counts);
    }
}

/// A period without requests. It ends when one arrives.
pub(crate) struct IdlePeriod<'a> {
    upkeep: &'a IdleWork,
    since: u64,
}

impl IdlePeriod<'_> {
    /// True if no request has arrived.
    pub fn lasts(&self) -> bool {
        self.upkeep.requests.get() == self.since
    }
}
