//! The queues between requests and the worker: commits, which flushes and writers wait for, and checkpoints, which
//! commits wait for.

use std::cell::{Cell, OnceCell, RefCell};
use std::rc::Rc;

use sealblock_block::{AsyncMutex, Condition, Error};

use crate::format::Layout;

/// The limit of the memtable's weight, in map entries of single blocks. It bounds what a crash can lose, the memory of
/// the memtable and the work of a commit.
const MAX_UNCOMMITTED: usize = 32 << 10;

/// Waiters for commits, and the results of commits.
pub(crate) struct CommitQueue {
    /// Notified when the worker has something to do.
    pub wanted: Rc<Condition>,
    /// Counts commits that have ended.
    pub completed: Cell<u64>,
    /// Why the volume failed: writes are disabled.
    pub failure: RefCell<Option<String>>,
    /// Weight of map entries in memory at which writers wait for a commit.
    pub max_uncommitted: usize,
    /// There are, or may be, map entries of blocks that were made unreadable.
    pub uncorrectable: Cell<bool>,
    /// The worker waits without a timer, because there is nothing to commit.
    pub idle: Cell<bool>,
    /// What flushes wait for: the result of the first commit that begins after them.
    ticket: RefCell<Rc<OnceCell<Result<(), Error>>>>,
    flush_wanted: Cell<bool>,
    space_wanted: Cell<bool>,
    /// Writers that wait for physical blocks.
    starved: Cell<usize>,
    last_error: RefCell<Option<Error>>,
    flushed: Condition,
}

/// A writer that waits for physical blocks.
pub(crate) struct SpaceWaiter<'a>(&'a CommitQueue);

impl Drop for SpaceWaiter<'_> {
    fn drop(&mut self) {
        self.0.starved.set(self.0.starved.get() - 1);
    }
}

impl CommitQueue {
    /// The queue of a volume with this layout, whose worker waits for `wanted`.
    pub fn new(layout: &Layout, wanted: Rc<Condition>) -> CommitQueue {
        // A quarter of the log at most goes into one commit, so that a checkpoint can always make room for the next.
        let quarter = (layout.log_sectors() / 4 * layout.log_sector_entries()) as usize;
        CommitQueue {
            wanted,
            completed: Cell::new(0),
            failure: RefCell::default(),
            max_uncommitted: quarter.min(MAX_UNCOMMITTED),
            uncorrectable: Cell::new(false),
            idle: Cell::new(false),
            ticket: RefCell::default(),
            flush_wanted: Cell::new(false),
            space_wanted: Cell::new(false),
            starved: Cell::new(0),
            last_error: RefCell::default(),
            flushed: Condition::default(),
        }
    }

    /// Waits for the end of the first commit that begins after this.
    pub async fn flush(&self) -> Result<(), Error> {
        let ticket = self.ticket.borrow().clone();
        if !self.flush_wanted.replace(true) {
            self.wanted.notify();
        }
        self.flushed.wait_until(|| ticket.get().is_some()).await;
        ticket.get().cloned().expect("it was waited for")
    }

    /// Schedules a commit: starts the worker's timer if it does not run.
    pub fn schedule(&self) {
        if self.idle.replace(false) {
            self.wanted.notify();
        }
        if self.starved.get() > 0 {
            self.request_space();
        }
    }

    /// Registers a writer that waits for physical blocks, until this is dropped. Commits are requested if there is
    /// something to commit, now or later: a commit of nothing frees no physical block, and requesting it repeatedly
    /// would keep the worker busy while the physical blocks' users are in flight.
    pub fn register_space_waiter(&self, has_work: bool) -> SpaceWaiter<'_> {
        self.starved.set(self.starved.get() + 1);
        if has_work {
            self.request_space();
        }
        SpaceWaiter(self)
    }

    /// Writers need physical blocks or room in the memtable soon.
    pub fn request_space(&self) {
        if !self.space_wanted.replace(true) {
            self.wanted.notify();
        }
    }

    /// True if a flush or a writer waits for a commit.
    pub fn is_due(&self) -> bool {
        self.flush_wanted.get() || self.space_wanted.get()
    }

    /// The error of the last commit, if one ended since the count was `since`.
    pub fn error_since(&self, since: u64) -> Option<Error> {
        (self.completed.get() != since).then(|| self.last_error.borrow().clone()).flatten()
    }

    /// Takes the flushes that wait now; the returned function completes them.
    pub fn begin(&self) -> impl FnOnce(Result<(), Error>) + '_ {
        self.flush_wanted.set(false);
        self.space_wanted.set(false);
        let ticket = self.ticket.take();
        move |result| {
            *self.last_error.borrow_mut() = result.as_ref().err().cloned();
            let _ = ticket.set(result);
            self.completed.set(self.completed.get() + 1);
            self.flushed.notify();
        }
    }
}

/// Requests for checkpoints, and their results.
#[derive(Default)]
pub(crate) struct Checkpoints {
    is_requested: Cell<bool>,
    is_stopped: Cell<bool>,
    /// Counts checkpoints that have ended.
    completed: Cell<u64>,
    last_error: RefCell<Option<Error>>,
    changed: Condition,
    /// A checkpoint, or part of one: one at a time.
    pub writing_map: AsyncMutex,
    /// A write of the superblock, within a checkpoint or beside it.
    pub writing_superblock: AsyncMutex,
    /// Giving up a log of which sectors are lost. Held while a checkpoint is made.
    pub giving_up_log: AsyncMutex,
}

impl Checkpoints {
    /// Asks for a checkpoint.
    pub fn request(&self) {
        if !self.is_requested.replace(true) {
            self.changed.notify();
        }
    }

    /// Wakes every waiter to check again.
    pub fn wake(&self) {
        self.changed.notify();
    }

    /// No further checkpoint begins.
    pub fn stop(&self) {
        self.is_stopped.set(true);
        self.changed.notify();
    }

    /// Waits until a checkpoint is requested; false if none is to begin any more.
    pub async fn next(&self, has_failed: impl Fn() -> bool) -> bool {
        let is_over = || self.is_stopped.get() || has_failed();
        self.changed.wait_until(|| self.is_requested.get() || is_over()).await;
        !is_over() && self.is_requested.replace(false)
    }

    /// A checkpoint has ended.
    pub fn end(&self, result: Result<(), Error>) {
        *self.last_error.borrow_mut() = result.err();
        self.completed.set(self.completed.get() + 1);
        self.changed.notify();
    }

    /// Requests a checkpoint and waits for the end of one, or until the volume has failed.
    pub async fn wait(&self, has_failed: impl Fn() -> bool) -> Result<(), Error> {
        let since = self.completed.get();
        self.request();
        self.changed.wait_until(|| self.completed.get() != since || has_failed()).await;
        self.last_error.borrow().clone().map_or(Ok(()), Err)
    }
}
