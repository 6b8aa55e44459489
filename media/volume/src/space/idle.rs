//! Whether a volume is idle, and what it has done while it was.

use std::cell::Cell;
use std::time::Duration;

use crate::options::OpenOptions;

/// What upkeep has done since the volume was opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct IdleWorkCounts {
    /// Blocks that were moved to lie beside their neighbours.
    pub blocks_moved: u64,
    /// Blocks that were to be moved and did not check, or could not be read: they stay as they are.
    pub blocks_unfit: u64,
    /// Bytes of free physical blocks given back to the medium.
    pub bytes_punched: u64,
}

/// How upkeep is done, and what it has done.
pub(crate) struct IdleWork {
    pub relocates: bool,
    pub idle_after: Duration,
    /// Counts requests.
    requests: Cell<u64>,
    pub counts: Cell<IdleWorkCounts>,
}

impl IdleWork {
    /// For a volume opened like this.
    pub fn new(options: &OpenOptions) -> IdleWork {
        let OpenOptions { relocate, idle_after, .. } = *options;
        IdleWork { relocates: relocate, idle_after, requests: Cell::new(0), counts: Cell::default() }
    }

    /// Notes a request.
    pub fn note_request(&self) {
        self.requests.set(self.requests.get().wrapping_add(1));
    }

    /// A time without requests that begins now.
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

/// A time without requests: over as soon as one comes.
pub(crate) struct IdlePeriod<'a> {
    upkeep: &'a IdleWork,
    since: u64,
}

impl IdlePeriod<'_> {
    /// Whether no request has come.
    pub fn lasts(&self) -> bool {
        self.upkeep.requests.get() == self.since
    }
}
