//! The line to a connection or a listener: what other cores tell the one it lives on, and what they may ask about it.
//!
//! Invariant: what was ordered is carried out by the task that waits on the line, once it next runs; orders never get lost,
//! and the same order twice is the same as once.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::task::{Context, Poll, Waker};

use crate::kept::Locked;

/// What a connection is told.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Signals(u8);

impl Signals {
    /// End at once.
    pub(crate) const ABORT: Signals = Signals(1);
    /// Take nothing more, answer what is being carried out, then end.
    pub(crate) const DRAIN: Signals = Signals(1 << 1);
    /// What the clock is watched for has changed.
    pub(crate) const TIMER: Signals = Signals(1 << 2);
    /// Namespaces have gone, and are to be let go.
    pub(crate) const NAMESPACES: Signals = Signals(1 << 3);

    pub(crate) fn has(self, signals: Signals) -> bool {
        self.0 & signals.0 != 0
    }
}

// A cache line of its own: the owner writes to it with every command, and the others must not be slowed down by that.
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

    /// Takes the orders, if there are any. One task waits.
    pub(crate) fn poll(&self, cx: &mut Context<'_>) -> Poll<Signals> {
        let before = self.waker.lock().replace(cx.waker().clone());
        drop(before);
        match self.pending.swap(0, Ordering::SeqCst) {
            0 => Poll::Pending,
            signals => Poll::Ready(Signals(signals)),
        }
    }

    /// Notes a command. Written only when nobody has noted one since the last look, so it mostly stays a read.
    pub(crate) fn note_traffic(&self) {
        if !self.had_traffic.load(Ordering::Relaxed) {
            self.had_traffic.store(true, Ordering::Relaxed);
        }
    }

    /// Whether there was a command since the last call.
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
