//! Small values that several cores share, the signal to a connection on another core, and a rate limit for log lines.
//!
//! Invariant: the task that polls a signal sees every flag that was sent, once it next runs; sending a flag twice before is
//! the same as once.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// A flag, as cheap to read as a plain `bool`.
#[derive(Debug, Default)]
pub(crate) struct Flag(AtomicBool);

impl Flag {
    pub(crate) const fn new(is_on: bool) -> Flag {
        Flag(AtomicBool::new(is_on))
    }

    pub(crate) fn get(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    pub(crate) fn set(&self, is_on: bool) {
        self.0.store(is_on, Ordering::SeqCst);
    }
}

/// A counter that one core writes and others read.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    /// Adds, on the one core that writes: concurrent additions would be lost.
    pub(crate) fn add(&self, amount: u64) {
        self.0.store(self.get().saturating_add(amount), Ordering::Relaxed);
    }

    /// Sets a new value, on the one core that writes.
    pub(crate) fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A value behind a lock, for admin commands and for connections that begin or end.
#[derive(Debug, Default)]
pub(crate) struct Locked<T>(Mutex<T>);

impl<T> Locked<T> {
    pub(crate) const fn new(value: T) -> Locked<T> {
        Locked(Mutex::new(value))
    }

    /// Locks the value. The holder must not wait, wake a task or call foreign code.
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        // No code under these locks panics half way.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set(&self, value: T) {
        let before = std::mem::replace(&mut *self.lock(), value);
        drop(before);
    }

    /// Returns a copy of the value.
    pub(crate) fn get(&self) -> T
    where
        T: Clone,
    {
        self.lock().clone()
    }
}

/// The flags of a signal.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Signals(u8);

impl Signals {
    /// End at once.
    pub(crate) const ABORT: Signals = Signals(1);
    /// Take no more commands, complete those in flight, then end.
    pub(crate) const DRAIN: Signals = Signals(1 << 1);
    /// Set the timer anew.
    pub(crate) const TIMER: Signals = Signals(1 << 2);
    /// Release removed or resized namespaces.
    pub(crate) const NAMESPACES: Signals = Signals(1 << 3);

    pub(crate) fn has(self, signals: Signals) -> bool {
        self.0 & signals.0 != 0
    }
}

// A cache line of its own: the owner writes to it with every command, which must not slow other cores down.
#[repr(align(64))]
#[derive(Default)]
pub(crate) struct ControlSignal {
    pending: AtomicU8,
    had_traffic: AtomicBool,
    waker: Locked<Option<Waker>>,
}

impl ControlSignal {
    pub(crate) fn send(&self, signals: Signals) {
        self.pending.fetch_or(signals.0, Ordering::SeqCst);
        let waker = self.waker.lock().take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Takes the flags that were sent. Only one task polls.
    pub(crate) fn poll(&self, cx: &mut Context<'_>) -> Poll<Signals> {
        let before = self.waker.lock().replace(cx.waker().clone());
        drop(before);
        match self.pending.swap(0, Ordering::SeqCst) {
            0 => Poll::Pending,
            signals => Poll::Ready(Signals(signals)),
        }
    }

    /// Marks traffic. Writes only if the flag is clear, so that it mostly stays a read.
    pub(crate) fn note_traffic(&self) {
        if !self.had_traffic.load(Ordering::Relaxed) {
            self.had_traffic.store(true, Ordering::Relaxed);
        }
    }

    /// True if there was a command since the last call.
    pub(crate) fn take_traffic(&self) -> bool {
        self.had_traffic.swap(false, Ordering::Relaxed)
    }
}

/// The minimum time between two log lines.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Limits log lines that a peer can cause at will, so that they cannot fill a log.
#[derive(Default)]
pub(crate) struct LogRateLimit(Locked<RateState>);

#[derive(Default)]
struct RateState {
    unreported: u64,
    reported_at: Option<Instant>,
}

impl LogRateLimit {
    /// Counts one event. Returns the number of events since the last log line, if a line is due.
    pub(crate) fn count(&self, now: Instant) -> Option<u64> {
        let mut state = self.0.lock();
        state.unreported += 1;
        if state.reported_at.is_some_and(|reported_at| now.saturating_duration_since(reported_at) < LOG_INTERVAL) {
            return None;
        }
        state.reported_at = Some(now);
        Some(std::mem::take(&mut state.unreported))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_accumulate_until_they_are_polled() {
        let (signal, mut cx) = (ControlSignal::default(), Context::from_waker(Waker::noop()));
        assert!(signal.poll(&mut cx).is_pending());
        signal.send(Signals::DRAIN);
        signal.send(Signals::TIMER);
        signal.send(Signals::DRAIN);
        let Poll::Ready(signals) = signal.poll(&mut cx) else { panic!("there are orders") };
        assert!(signals.has(Signals::DRAIN) && signals.has(Signals::TIMER) && !signals.has(Signals::ABORT));
        assert!(signal.poll(&mut cx).is_pending(), "taken once");
    }

    #[test]
    fn traffic_is_reported_once() {
        let signal = ControlSignal::default();
        assert!(!signal.take_traffic());
        signal.note_traffic();
        signal.note_traffic();
        assert!(signal.take_traffic() && !signal.take_traffic());
    }

    #[test]
    fn the_first_event_is_logged_at_once_and_a_flood_as_a_count() {
        let (limit, start) = (LogRateLimit::default(), Instant::now());
        assert_eq!(limit.count(start), Some(1));
        for _ in 0..1000 {
            assert_eq!(limit.count(start + LOG_INTERVAL / 2), None);
        }
        assert_eq!(limit.count(start + LOG_INTERVAL), Some(1001));
        assert_eq!(limit.count(start + LOG_INTERVAL), None);
        assert_eq!(limit.count(start + LOG_INTERVAL * 3), Some(2));
    }
}
