//! Bytes in flight that all connections of a server share.
//!
//! Invariants: every share has as much as one request set aside, so that peers who do not take their answers cannot stop the
//! others; besides what came unasked and one request, the shares hold no more than the budget together, as long as it is not
//! less than what is set aside for all of them; bytes that come back wake whoever was refused. The one request is of a share
//! without any in flight that needs more than is set aside: it would else wait for as long as others want little.
//!
//! Shape: a share takes and gives whole grains, so that small requests seldom touch what the connections share. It may be
//! shared by reactors.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Waker;

/// Shares grow by multiples of this, in bytes.
const GRAIN_BYTES: usize = 64 << 10;
/// What a share that is in use keeps beyond its need, in bytes.
const SLACK_BYTES: usize = 256 << 10;

/// The budget of a server.
pub struct Budget {
    most_bytes: usize,
    aside_bytes: usize,
    held_bytes: AtomicUsize,
    /// A share has taken more than there is.
    is_overdrawn: AtomicBool,
    is_waited_for: AtomicBool,
    waiting: Mutex<Vec<Waker>>,
}

impl Budget {
    /// One of this many bytes, of which each share has `aside_bytes` for itself. Both are made whole grains.
    pub fn new(most_bytes: usize, aside_bytes: usize) -> Arc<Budget> {
        let (held_bytes, is_overdrawn, is_waited_for) =
            (AtomicUsize::new(0), AtomicBool::new(false), AtomicBool::new(false));
        let (most_bytes, aside_bytes) = (Budget::whole(most_bytes), Budget::whole(aside_bytes));
        Arc::new(Budget { most_bytes, aside_bytes, held_bytes, is_overdrawn, is_waited_for, waiting: Mutex::default() })
    }

    /// So many bytes in whole grains.
    pub fn whole(bytes: usize) -> usize {
        bytes.next_multiple_of(GRAIN_BYTES)
    }

    fn try_take(&self, bytes: usize) -> bool {
        let more = |held: usize| held.checked_add(bytes).filter(|&held| held <= self.most_bytes);
        self.held_bytes.fetch_update(Ordering::SeqCst, Ordering::SeqCst, more).is_ok()
    }

    /// Takes bytes whether or not they are there, unless another share did.
    fn overdraw(&self, bytes: usize) -> bool {
        let is_first = !self.is_overdrawn.swap(true, Ordering::SeqCst);
        if is_first {
            self.held_bytes.fetch_add(bytes, Ordering::SeqCst);
        }
        is_first
    }

    fn give(&self, bytes: usize) {
        self.held_bytes.fetch_sub(bytes, Ordering::SeqCst);
        if self.is_waited_for.swap(false, Ordering::SeqCst) {
            let waiting = std::mem::take(&mut *self.waiting.lock().unwrap_or_else(PoisonError::into_inner));
            waiting.into_iter().for_each(Waker::wake);
        }
    }

    fn wait(&self, waker: &Waker) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if !waiting.iter().any(|other| other.will_wake(waker)) {
            waiting.push(waker.clone());
        }
        self.is_waited_for.store(true, Ordering::SeqCst);
    }
}

/// What one connection holds of a [`Budget`].
pub struct Share {
    budget: Arc<Budget>,
    held_bytes: Cell<usize>,
    /// It is the one that has taken more than there is.
    has_overdrawn: Cell<bool>,
}

impl Share {
    /// A share that holds what is set aside for it.
    pub fn new(budget: &Arc<Budget>) -> Share {
        budget.held_bytes.fetch_add(budget.aside_bytes, Ordering::SeqCst);
        Share { budget: Arc::clone(budget), held_bytes: Cell::new(budget.aside_bytes), has_overdrawn: Cell::new(false) }
    }

    /// Whether the connection may go from `now_bytes` in flight to `more_bytes` more. If not, `waker` is used when it is
    /// worth asking again.
    pub fn grow(&self, now_bytes: usize, more_bytes: usize, waker: &Waker) -> bool {
        let need = now_bytes.saturating_add(more_bytes);
        let held = self.held_bytes.get();
        if need <= held {
            return true;
        }
        let more = Budget::whole(need) - held;
        if !self.budget.try_take(more) {
            self.budget.wait(waker);
            // What came back before the waker was there woke nobody.
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

    /// What the connection holds, in bytes.
    pub fn held_bytes(&self) -> usize {
        self.held_bytes.get()
    }

    /// Whether the shares together hold more than there is.
    pub fn is_over(&self) -> bool {
        self.budget.held_bytes.load(Ordering::Relaxed) > self.budget.most_bytes
    }

    /// Notes that `now_bytes` are in flight: takes what is missing, whether or not it is there, and gives back what is not
    /// needed.
    pub fn settle(&self, now_bytes: usize) {
        let held = self.held_bytes.get();
        if now_bytes > held {
            let more = Budget::whole(now_bytes) - held;
            self.budget.held_bytes.fetch_add(more, Ordering::SeqCst);
            self.held_bytes.set(held + more);
        } else if now_bytes == 0 && held > 0 || held - now_bytes >= SLACK_BYTES {
            let kept = Budget::whole(now_bytes).max(self.budget.aside_bytes).min(held);
            if kept == held {
                return;
            }
            self.held_bytes.set(kept);
            if kept == self.budget.aside_bytes {
                self.end_overdraft();
            }
            self.budget.give(held - kept);
        }
    }

    /// All that was taken beyond what there was is coming back.
    fn end_overdraft(&self) {
        if self.has_overdrawn.replace(false) {
            self.budget.is_overdrawn.store(false, Ordering::SeqCst);
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.end_overdraft();
        self.budget.give(self.held_bytes.get());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;
    use std::task::Wake;

    #[derive(Default)]
    struct Count(AtomicU32);

    impl Wake for Count {
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
        let count = Arc::new(Count::default());
        let waker = Waker::from(Arc::clone(&count));
        assert!(one.grow(0, 900 << 10, &waker));
        assert!(two.grow(0, 64 << 10, &waker));
        assert!(!two.grow(64 << 10, 128 << 10, &waker), "not enough is left");
        assert_eq!(count.0.load(Ordering::Relaxed), 0);
        one.settle(100 << 10);
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
        assert!(two.grow(64 << 10, 128 << 10, &waker));
        drop((one, two));
        assert_eq!(held(&budget), 0);
    }

    #[test]
    fn what_is_set_aside_is_never_refused_and_counts() {
        let budget = Budget::new(1 << 20, 256 << 10);
        let (one, two) = (Share::new(&budget), Share::new(&budget));
        assert!(!one.grow(1, 1 << 20, Waker::noop()), "a part of it is the other's");
        assert!(one.grow(1, (768 << 10) - 1, Waker::noop()), "all the rest");
        assert!(two.grow(0, 256 << 10, Waker::noop()) && !budget_is_exceeded(&budget));
        assert!(!two.grow(256 << 10, 1, Waker::noop()));
        one.settle(0);
        assert_eq!(held(&budget), 512 << 10, "what is set aside stays so");
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
    fn one_request_beyond_what_is_set_aside_may_exceed_the_budget() {
        let budget = Budget::new(1 << 20, 64 << 10);
        let shares: Vec<Share> = (0..4).map(|_| Share::new(&budget)).collect();
        assert!(shares[0].grow(0, 832 << 10, Waker::noop()) && !budget_is_exceeded(&budget));
        assert!(!shares[1].grow(64 << 10, 1 << 20, Waker::noop()), "it has some in flight");
        assert!(shares[1].grow(0, 1 << 20, Waker::noop()) && budget_is_exceeded(&budget));
        assert!(!shares[2].grow(0, 1 << 20, Waker::noop()), "one at a time");
        shares[1].settle(0);
        assert!(shares[2].grow(0, 1 << 20, Waker::noop()));
        drop(shares);
        assert_eq!(held(&budget), 0);
    }

    fn budget_is_exceeded(budget: &Budget) -> bool {
        held(budget) > budget.most_bytes
    }

    #[test]
    fn small_commands_leave_the_budget_alone() {
        let budget = Budget::new(1 << 20, 0);
        let share = Share::new(&budget);
        assert!(share.grow(0, 8192, Waker::noop()));
        let before = held(&budget);
        for now in 1..7 {
            assert!(share.grow(now * 8192, 8192, Waker::noop()));
            share.settle(now * 8192);
        }
        assert_eq!(held(&budget), before);
        share.settle(0);
        assert_eq!(held(&budget), 0, "a connection at rest holds nothing");
    }
}
