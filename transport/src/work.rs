//! Memory that a server's commands need besides their data: for the pieces of a Copy, for the blocks that a Compare
//! reads, for the blocks that Verify reads from a device without that command, and for zeroes that are written. A
//! command begins once it has this memory; commands wait for it in order, within their connection and among all
//! connections. Long commands reserve some memory even if they need none, so that only a few of them begin at a time. A
//! command that has not begun when its client disconnects never begins.
//!
//! Invariants: a command that has its memory completes without more of it, so waiting commands begin eventually. A
//! command returns its memory when it is dropped, however it ends.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Waker;

use sealblock_runtime_reactor::{Budget, Share};

/// The part of the bytes in flight over all connections that commands may hold besides their data: one divided by this
/// number.
const SHARE_OF_IN_FLIGHT: usize = 8;

/// The additional memory for the commands of a server that allows `total_bytes_in_flight`.
pub fn work_budget(total_bytes_in_flight: usize) -> Arc<Budget> {
    Budget::new(total_bytes_in_flight / SHARE_OF_IN_FLIGHT, 0)
}

/// The memory of a command; it is returned on drop.
pub struct HeldBytes {
    held: Rc<Cell<usize>>,
    bytes: usize,
}

impl Drop for HeldBytes {
    fn drop(&mut self) {
        self.held.set(self.held.get() - self.bytes);
    }
}

/// The memory of the commands of one connection, and the commands that wait for it.
pub struct WorkQueue<W> {
    share: Share,
    held: Rc<Cell<usize>>,
    limit: usize,
    /// Each command, and the number of bytes that it needs.
    waiting: RefCell<VecDeque<(usize, W)>>,
}

impl<W> WorkQueue<W> {
    /// A queue whose commands together hold at most `limit` bytes of the budget; a single command may hold more.
    pub fn new(budget: &Arc<Budget>, limit: usize) -> WorkQueue<W> {
        WorkQueue { share: Share::new(budget), held: Rc::default(), limit, waiting: RefCell::default() }
    }

    /// The number of waiting commands.
    pub fn waiting(&self) -> usize {
        self.waiting.borrow().len()
    }

    /// Removes the waiting commands; they never begin.
    pub fn take_waiting(&self) -> impl Iterator<Item = W> + use<W> {
        self.waiting.take().into_iter().map(|(_, work)| work)
    }

    /// Adds a command that needs `bytes` at the end of the queue.
    pub fn add(&self, work: W, bytes: usize) {
        self.waiting.borrow_mut().push_back((bytes, work));
    }

    /// Removes the next command and reserves its memory, if there is enough. If not, `waker` is woken when a retry may
    /// succeed, but not when commands of this connection return memory.
    pub fn next(&self, waker: &Waker) -> Option<(W, HeldBytes)> {
        let (held, bytes) = (self.held.get(), self.waiting.borrow().front().map(|(bytes, _)| *bytes));
        self.share.set_in_flight(held);
        let bytes = bytes?;
        if held > 0 && held + bytes > self.limit || !self.share.grow(held, bytes, waker) {
            return None;
        }
        let (_, first) = self.waiting.borrow_mut().pop_front()?;
        self.held.set(held + bytes);
        Some((first, HeldBytes { held: Rc::clone(&self.held), bytes }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_begin_in_order_as_memory_comes_back() {
        let budget = Budget::new(1 << 20, 0);
        let (one, two) = (WorkQueue::new(&budget, 1 << 19), WorkQueue::new(&budget, 1 << 30));
        let next = |queue: &WorkQueue<u8>| queue.next(Waker::noop());
        (0..3).for_each(|number| one.add(number, 256 << 10));
        let (first, second) = (next(&one).unwrap(), next(&one).unwrap());
        assert_eq!((first.0, second.0, one.waiting()), (0, 1, 1));
        assert!(next(&one).is_none(), "the limit of the connection");
        two.add(7, 512 << 10);
        two.add(8, 64 << 10);
        let other = next(&two).unwrap();
        assert!(next(&two).is_none(), "the budget");
        drop(first.1);
        assert!(next(&one).is_some_and(|(number, _)| number == 2), "and given back at once");
        drop((second, other));
        assert!(next(&one).is_none() && next(&two).is_some_and(|(number, _)| number == 8));
        one.add(9, 1 << 30);
        assert!(next(&one).is_some(), "one that needs more than there is goes on alone");
        one.add(10, 1);
        assert_eq!(one.take_waiting().collect::<Vec<_>>(), [10]);
        assert!(next(&one).is_none());
    }
}
