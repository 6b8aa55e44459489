//! First come, first served: queues for writers that wait for physical blocks, and for long requests.
//!
//! Invariants: no waiter overtakes another that waits for the same thing. A waiter that is dropped leaves the queue and
//! lets the next one check. Dropping a [`Turn`] returns what it holds. Long requests together have at most
//! [`MAX_IN_FLIGHT_BYTES`] in flight at the medium, so a short one never waits behind more than that.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;

use sealblock_block::{Condition, Request, RequestKind};
use sealblock_units::BlockSize;

/// Requests of at most this many bytes do not wait.
const SHORT_BYTES: u64 = 128 << 10;
/// A request counts for at most this many bytes: longer ones run piece by piece.
const PIECE_BYTES: u64 = 1 << 20;
/// Bytes of long requests that may be in flight together. A medium of 100 MB/s needs 80 ms for them.
const MAX_IN_FLIGHT_BYTES: u64 = 8 << 20;

/// Waiters, in order, with a separate queue for each key.
#[derive(Default)]
pub(crate) struct Queue {
    waiting: RefCell<VecDeque<(u64, u64)>>,
    next: Cell<u64>,
    moved: Condition,
}

/// A place in a [`Queue`], until it is dropped.
pub(crate) struct QueuePlace<'a> {
    queue: &'a Queue,
    key: u64,
    number: u64,
}

impl Queue {
    /// Joins the end of the queue for this key.
    pub fn join(&self, key: u64) -> QueuePlace<'_> {
        let number = self.next.replace(self.next.get() + 1);
        self.waiting.borrow_mut().push_back((key, number));
        QueuePlace { queue: self, key, number }
    }

    /// True if the queue for this key is empty.
    pub fn is_empty(&self, key: u64) -> bool {
        !self.waiting.borrow().iter().any(|&(other, _)| other == key)
    }
}

impl QueuePlace<'_> {
    /// True if it is the first of its queue.
    pub fn is_first(&self) -> bool {
        let waiting = self.queue.waiting.borrow();
        waiting.iter().find(|(key, _)| *key == self.key).is_some_and(|&(_, number)| number == self.number)
    }

    /// Resolves when it is the first of its queue.
    pub async fn first(&self) {
        self.queue.moved.wait_until(|| self.is_first()).await;
    }
}

impl Drop for QueuePlace<'_> {
    fn drop(&mut self) {
        self.queue.waiting.borrow_mut().retain(|&(_, number)| number != self.number);
        self.queue.moved.notify();
    }
}

/// The budget of bytes in flight that long requests share.
#[derive(Default)]
pub(crate) struct InFlightBudget {
    held_bytes: Cell<u64>,
    queue: Queue,
    given_back: Condition,
}

/// A long request's share of the budget, until it is dropped; a short one holds nothing.
pub(crate) struct Turn<'a> {
    turns: &'a InFlightBudget,
    bytes: u64,
}

impl InFlightBudget {
    /// Waits until a request of this [`weight`] may start.
    pub async fn take(&self, bytes: u64) -> Turn<'_> {
        if bytes == 0 {
            return Turn { turns: self, bytes };
        }
        if !self.queue.is_empty(0) || !self.has_room(bytes) {
            let place = self.queue.join(0);
            place.first().await;
            self.given_back.wait_until(|| self.has_room(bytes)).await;
        }
        self.held_bytes.set(self.held_bytes.get() + bytes);
        Turn { turns: self, bytes }
    }

    fn has_room(&self, bytes: u64) -> bool {
        self.held_bytes.get() + bytes <= MAX_IN_FLIGHT_BYTES
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.turns.held_bytes.set(self.turns.held_bytes.get() - self.bytes);
            self.turns.given_back.notify();
        }
    }
}

/// The bytes that a request has in flight at a time; 0 for a short one.
pub(crate) fn weight(request: &Request, size: BlockSize) -> u64 {
    let bytes = match request.kind() {
        RequestKind::Read
        | RequestKind::Salvage
        | RequestKind::Verify
        | RequestKind::Write
        | RequestKind::WriteZeroes
        | RequestKind::WriteUncorrectable
        | RequestKind::Compare
        | RequestKind::Checksum
        | RequestKind::Discard => request.blocks() << size.shift(),
        RequestKind::Flush
        | RequestKind::BlockStatus
        | RequestKind::ReadReserved
        | RequestKind::WriteReserved
        | RequestKind::Copy
        | RequestKind::CompareAndWrite
        | RequestKind::Repair => 0,
    };
    if bytes <= SHORT_BYTES { 0 } else { bytes.min(PIECE_BYTES) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_executor::block_on;
    use futures_util::FutureExt;
    use sealblock_block::Expectations;
    use sealblock_units::Extent;

    /// The weight of a read of this many blocks.
    fn read(blocks: u64) -> u64 {
        let extent = Extent::from_raw(0, blocks).unwrap();
        weight(&Request::read(extent, Expectations::NONE), BlockSize::B4096)
    }

    #[test]
    fn lines_keep_their_order_and_close_up_behind_whoever_leaves() {
        let queue = Queue::default();
        let (one, two, other) = (queue.join(1), queue.join(1), queue.join(2));
        assert!(one.is_first() && !two.is_first() && other.is_first() && queue.is_empty(3));
        drop(one);
        assert!(two.is_first());
        assert!(two.first().now_or_never().is_some());
    }

    #[test]
    fn long_requests_wait_for_one_another_and_short_ones_do_not_wait() {
        let turns = InFlightBudget::default();
        let mut held: Vec<_> = (0..8).map(|_| block_on(turns.take(read(256)))).collect();
        assert!(turns.take(read(33)).now_or_never().is_none(), "there is no room");
        assert!(turns.take(read(32)).now_or_never().is_some(), "a short one");
        let mut large = Box::pin(turns.take(read(256)));
        let mut small = Box::pin(turns.take(read(33)));
        assert!(large.as_mut().now_or_never().is_none() && small.as_mut().now_or_never().is_none());
        drop(held.pop());
        assert!(small.as_mut().now_or_never().is_none(), "the one before it has not taken its turn");
        let turn = large.as_mut().now_or_never().expect("its turn");
        assert!(small.as_mut().now_or_never().is_none(), "no room");
        drop(turn);
        assert!(small.as_mut().now_or_never().is_some());
    }

    #[test]
    fn who_gives_up_waiting_does_not_hold_up_the_next() {
        let turns = InFlightBudget::default();
        let held: Vec<_> = (0..8).map(|_| block_on(turns.take(read(256)))).collect();
        let mut first = Box::pin(turns.take(read(256)));
        let mut second = Box::pin(turns.take(read(256)));
        assert!(first.as_mut().now_or_never().is_none() && second.as_mut().now_or_never().is_none());
        drop((first, held));
        assert!(second.as_mut().now_or_never().is_some());
    }
}
