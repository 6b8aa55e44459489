//! The line to a connection or a listener: what other cores tell the one it lives on.
//!
//! Invariant: an order is seen by the task that listens, once it next runs; it is never lost and never taken back.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

/// What connections and listeners are told. Later ones include earlier ones.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[repr(u8)]
pub(crate) enum Signals {
    /// Take nothing more, answer what is being carried out, then end.
    Stop = 1,
    /// End at once.
    Kill = 2,
}

#[derive(Default)]
pub(crate) struct ControlSignal {
    order: AtomicU8,
    waiter: Mutex<Option<Waker>>,
}

impl ControlSignal {
    pub(crate) fn order(&self, order: Signals) {
        self.order.fetch_max(order as u8, Ordering::SeqCst);
        let waiter = self.waiter.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(waiter) = waiter {
            waiter.wake();
        }
    }

    /// Whether the order is at least this one.
    pub(crate) fn is(&self, at_least: Signals) -> bool {
        self.order.load(Ordering::SeqCst) >= at_least as u8
    }

    /// Has the next order wake this task.
    pub(crate) fn listen(&self, waker: &Waker) {
        let before = self.waiter.lock().unwrap_or_else(PoisonError::into_inner).replace(waker.clone());
        drop(before);
    }

    /// Ready once the order is at least this one.
    pub(crate) fn poll(&self, at_least: Signals, cx: &mut Context<'_>) -> Poll<()> {
        self.listen(cx.waker());
        if self.is(at_least) { Poll::Ready(()) } else { Poll::Pending }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_stay_and_include_each_other() {
        let (line, mut cx) = (ControlSignal::default(), Context::from_waker(Waker::noop()));
        assert!(line.poll(Signals::Stop, &mut cx).is_pending());
        line.order(Signals::Stop);
        assert!(line.poll(Signals::Stop, &mut cx).is_ready() && line.poll(Signals::Kill, &mut cx).is_pending());
        line.order(Signals::Kill);
        line.order(Signals::Stop);
        assert!(line.is(Signals::Kill) && line.is(Signals::Stop));
    }
}
