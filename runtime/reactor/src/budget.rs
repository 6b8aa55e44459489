//! A budget of bytes in flight that all connections of a server share.
//!
//! Invariants: each share has reserved bytes, so that peers that do not receive their replies cannot stop other
//! connections. All shares together do not exceed the budget, unless their reserved bytes do. There are two exceptions:
//! data that a peer sent unsolicited; and one request at a time that needs more than its share's reserve, of a share
//! without bytes in flight, which would otherwise wait as long as other shares need little. Released bytes wake the
//! waiting shares.
//!
//! Shape: a share takes and releases whole grains, so that small requests seldom touch the shared counters. Several
//! reactors may share a budget.

use std::cell::Cell;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::Waker;

use crate::sync::Batch;

/// Shares grow in multiples of this, in bytes.
const GRAIN_BYTES: usize = 64 << 10;
/// Bytes that an active share keeps beyond its need.
const SLACK_BYTES: usize = 256 << 10;

/// Bytes, on cache lines of their own: every connection reads beside them, and some change them.
#[derive(Default)]
#[repr(align(128))]
struct HeldBytes(AtomicUsize);

impl Deref for HeldBytes {
    type Target = AtomicUsize;

    fn deref(&self) -> &AtomicUsize {
        &self.0
    }
}

/// The budget of a server.
pub struct Budget {
    limit_bytes: usize,
    reserved_bytes: usize,
    held_bytes: HeldBytes,
    /// True if a share has exceeded the budget.
    is_overdrawn: AtomicBool,
    waiting: Batch<Waker>,
}

impl Budget {
    /// A budget of `limit_bytes`, with `reserved_bytes` reserved for each share. Both are rounded up to whole grains.
    pub fn new(limit_bytes: usize, reserved_bytes: usize) -> Arc<Budget> {
        let (held_bytes, is_overdrawn) = (HeldBytes::default(), AtomicBool::new(false));
        let (limit_bytes, reserved_bytes) = (Budget::round_up(limit_bytes), Budget::round_up(reserved_bytes));
        Arc::new(Budget { limit_bytes, reserved_bytes, held_bytes, is_overdrawn, waiting: Batch::default() })
    }

    /// `bytes`, rounded up to whole grains.
    pub fn round_up(bytes: usize) -> usize {
        bytes.next_multiple_of(GRAIN_BYTES)
    }

    fn try_take(&self, bytes: usize) -> bool {
        let more = |held: usize| held.checked_add(bytes).filter(|&held| held <= self.limit_bytes);
        self.held_bytes.fetch_update(Ordering::SeqCst, Ordering::SeqCst, more).is_ok()
    }

    /// Takes bytes beyond the budget, unless another share has done so.
    fn overdraw(&self, bytes: usize) -> bool {
        let is_first = !self.is_overdrawn.swap(true, Ordering::SeqCst);
        if is_first {
            self.held_bytes.fetch_add(bytes, Ordering::SeqCst);
        }
        is_first
    }

    fn release(&self, bytes: usize) {
        self.held_bytes.fetch_sub(bytes, Ordering::SeqCst);
        self.waiting.wake_all();
    }
}

/// The share of one connection in a [`Budget`].
pub struct Share {
    budget: Arc<Budget>,
    held_bytes: Cell<usize>,
    /// True if this share has exceeded the budget.
    has_overdrawn: Cell<bool>,
}

impl Share {
    /// A share that holds its reserved bytes.
    pub fn new(budget: &Arc<Budget>) -> Share {
        budget.held_bytes.fetch_add(budget.reserved_bytes, Ordering::SeqCst);
        Share {
            budget: Arc::clone(budget),
            held_bytes: Cell::new(budget.reserved_bytes),
            has_overdrawn: Cell::new(false),
        }
    }

    /// True if the connection may have `more_bytes` more in flight, in addition to `now_bytes`. If not, `waker` is
    /// woken when a retry may succeed.
    pub fn grow(&self, now_bytes: usize, more_bytes: usize, waker: &Waker) -> bool {
        let need = now_bytes.saturating_add(more_bytes);
        let held = self.held_bytes.get();
        if need <= held {
            return true;
        }
        let more = Budget::round_up(need) - held;
        if !self.budget.try_take(more) {
            self.budget.waiting.add_waker(waker);
            // Bytes that were released before the waker was stored woke no share, so try again.
            if !self.budget.try_take(more) {
                if now_bytes > 0 || !self.budget.overdraw(more) {
                    return false;
                }
                self.has_overdrawn.set(true);
            }
        }
        self.held_bytes.set(held + more);
        true
    }

    /// The number of bytes that the connection holds.
    pub fn held_bytes(&self) -> usize {
        self.held_bytes.get()
    }

    /// True if a share with another waker than this one waits for bytes.
    pub fn others_wait(&self, waker: &Waker) -> bool {
        self.budget.waiting.has_other(waker)
    }

    /// True if the shares together exceed the budget. Then `waker` is woken when they may no longer do so.
    pub fn is_over(&self, waker: &Waker) -> bool {
        let is_over = || self.budget.held_bytes.load(Ordering::SeqCst) > self.budget.limit_bytes;
        if !is_over() {
            return false;
        }
        self.budget.waiting.add_waker(waker);
        // Bytes that were released before the waker was stored woke no share.
        is_over()
    }

    /// Sets the bytes in flight: takes missing bytes, even beyond the budget, and releases bytes that are not needed.
    pub fn set_in_flight(&self, now_bytes: usize) {
        let held = self.held_bytes.get();
        if now_bytes > held {
            let more = Budget::round_up(now_bytes) - held;
            self.budget.held_bytes.fetch_add(more, Ordering::SeqCst);
            self.held_bytes.set(held + more);
        } else if now_bytes == 0 && held > 0 || held - now_bytes >= SLACK_BYTES {
            let kept = Budget::round_up(now_bytes).max(self.budget.reserved_bytes).min(held);
            if kept == held {
                return;
            }
            self.held_bytes.set(kept);
            if kept == self.budget.reserved_bytes {
                self.end_overdraft();
            }
            self.budget.release(held - kept);
        }
    }

    /// Ends this share's excess over the budget, if it has one.
    fn end_overdraft(&self) {
        if self.has_overdrawn.replace(false) {
            self.budget.is_overdrawn.store(false, Ordering::SeqCst);
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.end_overdraft();
        self.budget.release(self.held_bytes.get());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;
    use std::task::Wake;

    #[derive(Default)]
    struct WakeCount(AtomicU32);

    impl Wake for WakeCount {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn held(budget: &Budget) -> usize {
        budget.held_bytes.load(Ordering::Relaxed)
    }

    #[test]
    fn a_share_waits_for_what_another_holds() {
        let budget = Budget::new(1 << 20, 0);
        let (one, two) = (Share::new(&budget), Share::new(&budget));
        let count = Arc::new(WakeCount::default());
        let waker = Waker::from(Arc::clone(&count));
        assert!(one.grow(0, 900 << 10, &waker));
        assert!(two.grow(0, 64 << 10, &waker));
        assert!(!two.grow(64 << 10, 128 << 10, &waker), "not enough is left");
        assert_eq!(count.0.load(Ordering::Relaxed), 0);
        one.set_in_flight(100 << 10);
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
        assert!(two.grow(64 << 10, 128 << 10, &waker));
        drop((one, two));
        assert_eq!(held(&budget), 0);
    }

    #[test]
    fn reserved_bytes_are_always_granted_and_count() {
        let budget = Budget::new(1 << 20, 256 << 10);
        let (one, two) = (Share::new(&budget), Share::new(&budget));
        assert!(!one.grow(1, 1 << 20, Waker::noop()), "a part of it is the other's");
        assert!(one.grow(1, (768 << 10) - 1, Waker::noop()), "all the rest");
        assert!(two.grow(0, 256 << 10, Waker::noop()) && !budget_is_exceeded(&budget));
        assert!(!two.grow(256 << 10, 1, Waker::noop()));
        one.set_in_flight(0);
        assert_eq!(held(&budget), 512 << 10, "reserved bytes stay");
        assert!(two.grow(256 << 10, 1, Waker::noop()));
        drop(one);
        let three = Share::new(&budget);
        assert!(three.grow(0, 256 << 10, Waker::noop()));
        drop((two, three));
        assert_eq!(held(&budget), 0);
    }

    #[test]
    fn a_budget_of_less_than_a_grain_has_room_for_one_request() {
        let budget = Budget::new(5000, 0);
        assert!(Share::new(&budget).grow(0, 5000, Waker::noop()));
    }

    #[test]
    fn one_request_beyond_the_reserve_may_exceed_the_budget() {
        let budget = Budget::new(1 << 20, 64 << 10);
        let shares: Vec<Share> = (0..4).map(|_| Share::new(&budget)).collect();
        assert!(shares[0].grow(0, 832 << 10, Waker::noop()) && !budget_is_exceeded(&budget));
        assert!(!shares[1].grow(64 << 10, 1 << 20, Waker::noop()), "it has some in flight");
        assert!(shares[1].grow(0, 1 << 20, Waker::noop()) && budget_is_exceeded(&budget));
        assert!(!shares[2].grow(0, 1 << 20, Waker::noop()), "one at a time");
        shares[1].set_in_flight(0);
        assert!(shares[2].grow(0, 1 << 20, Waker::noop()));
        drop(shares);
        assert_eq!(held(&budget), 0);
    }

    #[test]
    fn a_share_at_rest_is_woken_when_the_budget_is_no_longer_exceeded() {
        let budget = Budget::new(1 << 20, 64 << 10);
        let (one, at_rest) = (Share::new(&budget), Share::new(&budget));
        let count = Arc::new(WakeCount::default());
        let waker = Waker::from(Arc::clone(&count));
        assert!(!at_rest.is_over(&waker));
        one.set_in_flight(2 << 20);
        assert!(at_rest.is_over(&waker));
        one.set_in_flight(0);
        assert_eq!(count.0.load(Ordering::Relaxed), 1, "nothing else would wake it");
        assert!(!at_rest.is_over(&waker));
    }

    fn budget_is_exceeded(budget: &Budget) -> bool {
        held(budget) > budget.limit_bytes
    }

    #[test]
    fn small_commands_leave_the_budget_alone() {
        let budget = Budget::new(1 << 20, 0);
        let share = Share::new(&budget);
        assert!(share.grow(0, 8192, Waker::noop()));
        let before = held(&budget);
        for now in 1..7 {
            assert!(share.grow(now * 8192, 8192, Waker::noop()));
            share.set_in_flight(now * 8192);
        }
        assert_eq!(held(&budget), before);
        share.set_in_flight(0);
        assert_eq!(held(&budget), 0, "a connection at rest holds nothing");
    }
}
