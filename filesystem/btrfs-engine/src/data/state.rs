//! What the data path remembers between requests: files that are used, writes that were given up, and counters.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::LocalBoxFuture;
use sealblock_btrfs::{BadCopy, FsError};

use super::files::{Files, InPlaceWrites};

/// The copies that failed, or why nothing was written.
pub(super) type WriteOutcome = Result<Vec<BadCopy>, FsError>;

/// A write that devices are executing. It needs nothing of whoever requested it.
pub(super) type WriteFuture = LocalBoxFuture<'static, WriteOutcome>;

/// A write whose request is gone, with its space.
pub(crate) struct AbandonedWrite {
    pub write: WriteFuture,
    pub space: Vec<Range<u64>>,
    /// True if it overwrites what a file has.
    pub is_in_place: bool,
}

/// Counters of the data path.
#[derive(Default)]
pub(crate) struct Counters {
    pub sum_time: Cell<Duration>,
    pub hidden_sum_time: Cell<Duration>,
    pub abandoned: Cell<u64>,
    pub repaired: Cell<u64>,
}

impl Counters {
    pub fn add_sum_time(&self, time: Duration, is_hidden: bool) {
        self.sum_time.set(self.sum_time.get() + time);
        if is_hidden {
            self.hidden_sum_time.set(self.hidden_sum_time.get() + time);
        }
    }
}

/// What the data path remembers.
#[derive(Default)]
pub(crate) struct DataState {
    pub files: Rc<Files>,
    pub in_place: Rc<InPlaceWrites>,
    pub abandoned: RefCell<Vec<AbandonedWrite>>,
    pub counters: Counters,
}

impl DataState {
    pub fn abandon(&self, write: AbandonedWrite) {
        self.counters.abandoned.set(self.counters.abandoned.get() + 1);
        self.abandoned.borrow_mut().push(write);
    }

    pub fn take_abandoned(&self) -> Vec<AbandonedWrite> {
        self.abandoned.take()
    }

    /// Puts those back that have not completed. Returns true if there are any.
    pub fn put_abandoned(&self, writes: Vec<AbandonedWrite>) -> bool {
        let mut all = self.abandoned.borrow_mut();
        all.extend(writes);
        !all.is_empty()
    }
}
