//! Memory that commands need besides their data: the pieces of a Copy, what a Compare reads, what a device without Verify reads, zeroes that
//! are written. A command begins once it has this memory, and waits in order for it, on its connection and over all connections.
//!
//! Invariants: a command that has the memory completes without more of it, so those that wait are started in the end. What a command has is
//! given back when it is dropped, however it ends.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Waker;

use sealblock_protocols_nvme::Command;
use sealblock_protocols_nvme_tcp::target::Token;
use sealblock_runtime_reactor::{Budget, Share};

use crate::command::io::{IoRequest, RemainingWork};

/// A command that waits for memory.
pub(crate) struct WaitingWork {
    pub(crate) token: Token,
    pub(crate) command: Command,
    pub(crate) request: IoRequest,
    pub(crate) work: RemainingWork,
    bytes: usize,
}

/// Memory that a command has, until it is dropped.
pub(crate) struct HeldBytes {
    held: Rc<Cell<usize>>,
    bytes: usize,
}

impl Drop for HeldBytes {
    fn drop(&mut self) {
        self.held.set(self.held.get() - self.bytes);
    }
}

/// The memory of the commands of one connection, and the commands that wait for some.
pub(crate) struct WorkQueue {
    share: Share,
    held: Rc<Cell<usize>>,
    limit: usize,
    waiting: RefCell<VecDeque<WaitingWork>>,
}

impl WorkQueue {
    /// A queue whose commands together have at most `limit` bytes of the budget, or one of them what it needs.
    pub(crate) fn new(budget: &Arc<Budget>, limit: usize) -> WorkQueue {
        WorkQueue { share: Share::new(budget), held: Rc::default(), limit, waiting: RefCell::default() }
    }

    /// Number of commands that wait.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.borrow().len()
    }

    /// Drops the commands that wait.
    pub(crate) fn clear(&self) {
        drop(self.waiting.take());
    }

    /// Adds a command that needs so many bytes behind those that wait.
    pub(crate) fn add(
        &self,
        (token, command): (Token, Command),
        request: IoRequest,
        work: RemainingWork,
        bytes: usize,
    ) {
        self.waiting.borrow_mut().push_back(WaitingWork { token, command, request, work, bytes });
    }

    /// Takes the next command if there is memory for it, which it has then. If not, `waker` is woken when a retry may succeed; memory that
    /// commands of this connection give back wakes nobody.
    pub(crate) fn next(&self, waker: &Waker) -> Option<WaitingWork> {
        let (held, bytes) = (self.held.get(), self.waiting.borrow().front().map(|first| first.bytes));
        self.share.set_in_flight(held);
        let bytes = bytes?;
        if held > 0 && held + bytes > self.limit || !self.share.grow(held, bytes, waker) {
            return None;
        }
        let mut first = self.waiting.borrow_mut().pop_front()?;
        self.held.set(held + bytes);
        first.request.set_held(HeldBytes { held: Rc::clone(&self.held), bytes });
        Some(first)
    }
}
