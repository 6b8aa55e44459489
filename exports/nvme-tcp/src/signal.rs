//! The signal to a connection or a listener from other cores, and its traffic flag.
//!
//! Invariant: the task that polls a signal sees every flag that was sent, once it next runs; sending a flag twice
//! before is the same as once.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::task::{Context, Poll, Waker};

use crate::kept::Locked;

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_gather_until_they_are_taken() {
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
    fn traffic_is_told_once() {
        let signal = ControlSignal::default();
        assert!(!signal.take_traffic());
        signal.note_traffic();
        signal.note_traffic();
        assert!(signal.take_traffic() && !signal.take_traffic());
    }
}
