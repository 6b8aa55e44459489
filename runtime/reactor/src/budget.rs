//! Bytes in flight that all connections of a server share.
//!
//! Invariants: what the shares hold together exceeds the budget by no more than one request and what came unasked for
//! each connection; a share that holds nothing is never refused, so that peers who do not take their answers cannot stop
//! the others; bytes that come back wake whoever was refused.
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
    held_bytes: AtomicUsize,
    is_waited_for: AtomicBool,
    waiting: Mutex<Vec<Waker>>,
}

impl Budget {
    /// One of this many bytes.
    pub fn new(most_bytes: usize) -> Arc<Budget> {
        let (held_bytes, is_waited_for) = (AtomicUsize::new(0), AtomicBool::new(false));
        Arc::new(Budget { most_bytes, held_bytes, is_waited_for, waiting: Mutex::default() })
    }

    fn try_take(&self, bytes: usize) -> bool {
        let more = |held: usize| held.checked_add(bytes).filter(|&held| held <= self.most_bytes);
        self.held_bytes.fetch_update(Ordering::SeqCst, Ordering::SeqCst, more).is_ok()
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
}

impl Share {
    /// A share that holds nothing yet.
    pub fn new(budget: &Arc<Budget>) -> Share {
        Share { budget: Arc::clone(budget), held_bytes: Cell::new(0) }
    }

    /// Whether the connection may go from `now_bytes` in flight to `more_bytes` more. If not, `waker` is used when it is
    /// worth asking again.
    pub fn grow(&self, now_bytes: usize, more_bytes: usize, waker: &Waker) -> bool {
        let need = now_bytes.saturating_add(more_bytes);
        let held = self.held_bytes.get();
        if need <= held {
            return true;
        }
        let more = need.next_multiple_of(GRAIN_BYTES) - held;
        if now_bytes == 0 {
            self.budget.held_bytes.fetch_add(more, Ordering::SeqCst);
        } else if !self.budget.try_take(more) {
            self.budget.wait(waker);
            // What came back before the waker was there woke nobody.
            if !self.budget.try_take(more) {
                return false;
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
            let more = now_bytes.next_multiple_of(GRAIN_BYTES) - held;
            self.budget.held_bytes.fetch_add(more, Ordering::SeqCst);
            self.held_bytes.set(held + more);
        } else if now_bytes == 0 && held > 0 || held - now_bytes >= SLACK_BYTES {
            let kept = now_bytes.next_multiple_of(GRAIN_BYTES).min(held);
            self.held_bytes.set(kept);
            self.budget.give(held - kept);
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
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
        let budget = Budget::new(1 << 20);
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
    fn a_share_that_holds_nothing_is_never_refused() {
        let budget = Budget::new(1 << 20);
        let (one, two) = (Share::new(&budget), Share::new(&budget));
        assert!(one.grow(0, 1 << 20, Waker::noop()));
        assert!(two.grow(0, 1 << 20, Waker::noop()), "its first command");
        assert!(!two.grow(1 << 20, 1, Waker::noop()), "but not a second one");
        assert_eq!(held(&budget), 2 << 20);
    }

    #[test]
    fn small_commands_leave_the_budget_alone() {
        let budget = Budget::new(1 << 20);
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
