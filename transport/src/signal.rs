//! The signal to a listener or a connection on another core, and a rate limit for log lines that peers can cause.
//!
//! Invariants: when the task that listens to a signal next runs, it gets every flag that was sent. If a flag is sent
//! twice before that, it counts once. A flag to drain or to abort is never withdrawn.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// The flags of a signal.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Signals(u8);

impl Signals {
    /// Stop receiving requests, complete those in flight, then end.
    pub const DRAIN: Signals = Signals(1);
    /// End at once; includes [`Signals::DRAIN`].
    pub const ABORT: Signals = Signals(1 << 1 | Signals::DRAIN.0);
    /// Reset the timer.
    pub const TIMER: Signals = Signals(1 << 2);
    /// Look up the served devices again.
    pub const CHANGED: Signals = Signals(1 << 3);

    /// True if all of these flags are set.
    pub fn has(self, signals: Signals) -> bool {
        self.0 & signals.0 == signals.0
    }
}

// In a cache line of its own: its core writes to it with every request, which would slow other cores down.
/// A signal to one task.
#[repr(align(64))]
#[derive(Default)]
pub struct ControlSignal {
    /// Flags that the task has not received yet.
    pending: AtomicU8,
    /// All flags that were ever sent.
    sent: AtomicU8,
    had_traffic: AtomicBool,
    waker: Mutex<Option<Waker>>,
}

impl ControlSignal {
    /// Sends flags, and wakes the task.
    pub fn send(&self, signals: Signals) {
        self.sent.fetch_or(signals.0, Ordering::SeqCst);
        self.pending.fetch_or(signals.0, Ordering::SeqCst);
        // The task may wait for another flag after this one, so its waker is kept.
        let waker = self.waker.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// From now on, flags that are sent wake this task.
    pub fn listen(&self, waker: &Waker) {
        let before = self.waker.lock().unwrap_or_else(PoisonError::into_inner).replace(waker.clone());
        drop(before);
    }

    /// Returns the flags that were sent since the last call. Only one task may call it.
    pub fn poll(&self, cx: &mut Context<'_>) -> Poll<Signals> {
        self.listen(cx.waker());
        match self.pending.swap(0, Ordering::SeqCst) {
            0 => Poll::Pending,
            signals => Poll::Ready(Signals(signals)),
        }
    }

    /// True if these flags were ever sent.
    pub fn has(&self, signals: Signals) -> bool {
        Signals(self.sent.load(Ordering::SeqCst)).has(signals)
    }

    /// Ready once these flags have been sent.
    pub fn poll_for(&self, signals: Signals, cx: &mut Context<'_>) -> Poll<()> {
        self.listen(cx.waker());
        if self.has(signals) { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Records traffic. Writes only if the flag is clear, so most calls only read.
    pub fn note_traffic(&self) {
        if !self.had_traffic.load(Ordering::Relaxed) {
            self.had_traffic.store(true, Ordering::Relaxed);
        }
    }

    /// True if there was traffic since the last call.
    pub fn take_traffic(&self) -> bool {
        self.had_traffic.swap(false, Ordering::Relaxed)
    }
}

/// The minimum time between two log lines.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Limits log lines that a peer can cause at will, so that it cannot fill the log.
#[derive(Default)]
pub(crate) struct LogRateLimit(Mutex<RateState>);

#[derive(Default)]
struct RateState {
    unreported: u64,
    reported_at: Option<Instant>,
}

impl LogRateLimit {
    /// Counts one event. Returns the number of events since the last log line, if a line is due.
    pub(crate) fn count(&self, now: Instant) -> Option<u64> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
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
    fn orders_stay_and_include_each_other() {
        let (signal, mut cx) = (ControlSignal::default(), Context::from_waker(Waker::noop()));
        assert!(signal.poll_for(Signals::DRAIN, &mut cx).is_pending());
        signal.send(Signals::DRAIN);
        assert!(signal.poll_for(Signals::DRAIN, &mut cx).is_ready());
        assert!(signal.poll_for(Signals::ABORT, &mut cx).is_pending());
        signal.send(Signals::ABORT);
        signal.send(Signals::DRAIN);
        assert!(signal.has(Signals::ABORT) && signal.has(Signals::DRAIN));
    }

    #[test]
    fn a_task_that_waits_for_a_later_order_is_woken_by_it() {
        struct Woken(AtomicU8);
        impl std::task::Wake for Woken {
            fn wake(self: std::sync::Arc<Self>) {
                self.0.fetch_add(1, Ordering::SeqCst);
            }
        }
        let (signal, woken) = (ControlSignal::default(), std::sync::Arc::new(Woken(AtomicU8::new(0))));
        signal.listen(&woken.clone().into());
        signal.send(Signals::DRAIN);
        signal.send(Signals::ABORT);
        assert_eq!(woken.0.load(Ordering::SeqCst), 2);
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
