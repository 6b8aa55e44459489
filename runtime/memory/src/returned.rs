//! The slots of a pool that other threads gave back, and the end of a pool whose slots outlive it.
//!
//! Invariants: a slot that is pushed is in the list until the pool's thread takes it; the thread takes all of them
//! together. Its link is written before the slot is published. Once the list is closed, nothing is pushed: slots are
//! only counted, and exactly one caller, the last, frees the pool.
//!
//! Shape: there is one reader, which takes the whole list, so a push needs no protection against a slot that comes back
//! meanwhile: whatever the head is when the exchange succeeds, the link points to it.
//!
//! `tests/returned.rs` runs this file under many interleavings, with the atomics of a model checker.

use crate::primitives::{AtomicIsize, AtomicU32, Ordering};

/// The head of an empty list; otherwise it is the number of the last slot plus one.
const EMPTY: u32 = 0;
/// The head of a closed list.
const CLOSED: u32 = u32::MAX;

/// It has cache lines of its own: other threads write it, while the pool's thread uses what lies beside it.
#[repr(align(128))]
pub(crate) struct ReturnedSlots {
    head: AtomicU32,
    /// After the list was closed, slots that are still used. Before, minus those that were counted early.
    left: AtomicIsize,
}

impl ReturnedSlots {
    pub(crate) fn new() -> ReturnedSlots {
        ReturnedSlots { head: AtomicU32::new(EMPTY), left: AtomicIsize::new(0) }
    }

    /// Gives back a slot, whose link nobody else uses. True if the pool has ended and this was its last slot: then the
    /// caller frees the pool.
    #[must_use]
    pub(crate) fn push(&self, slot: u32, link: &AtomicU32) -> bool {
        let mut head = self.head.load(Ordering::Relaxed);
        while head != CLOSED {
            link.store(head, Ordering::Relaxed);
            // What was done with the slot comes before its next use.
            match self.head.compare_exchange(head, slot + 1, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return false,
                Err(now) => head = now,
            }
        }
        self.left.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Takes all slots out of the list, on the pool's thread, while the list is not closed.
    pub(crate) fn take<'a>(&self, link: impl Fn(u32) -> &'a AtomicU32, each: impl FnMut(u32)) {
        if self.head.load(Ordering::Relaxed) != EMPTY {
            walk(self.head.swap(EMPTY, Ordering::Acquire), link, each);
        }
    }

    /// Closes the list, on the pool's thread, and takes what is in it.
    pub(crate) fn close<'a>(&self, link: impl Fn(u32) -> &'a AtomicU32, each: impl FnMut(u32)) {
        walk(self.head.swap(CLOSED, Ordering::AcqRel), link, each);
    }

    /// Adds the number of slots that are still used after the list was closed. True if there are none: then the caller
    /// frees the pool.
    #[must_use]
    pub(crate) fn count_left(&self, slots: usize) -> bool {
        // Callers of `push` may have counted before; only the sum shows who is the last.
        self.left.fetch_add(slots as isize, Ordering::AcqRel) + slots as isize == 0
    }
}

fn walk<'a>(mut head: u32, link: impl Fn(u32) -> &'a AtomicU32, mut each: impl FnMut(u32)) {
    while head != EMPTY {
        let slot = head - 1;
        // Before the slot is used again.
        head = link(slot).load(Ordering::Relaxed);
        each(slot);
    }
}
