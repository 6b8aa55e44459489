//! The signal to a connection or a listener from other cores.
//!
//! Invariant: the task that listens sees an order once it next runs; no order is lost or withdrawn.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

/// Orders to connections and listeners. A higher one includes the lower one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[repr(u8)]
pub(crate) enum ControlOrder {
    /// Take no more requests, complete those in flight, then end.
    Drain = 1,
    /// End at once.
    Abort = 2,
}

#[derive(Default)]
pub(crate) struct ControlSignal {
    order: AtomicU8,
    waker: Mutex<Option<Waker>>,
}

impl ControlSignal {
    pub(crate) fn send(&self, order: ControlOrder) {
        self.order.fetch_max(order as u8, Ordering::SeqCst);
        let waker = self.waker.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// True if the order is at least this one.
    pub(crate) fn has(&self, at_least: ControlOrder) -> bool {
        self.order.load(Ordering::SeqCst) >= at_least as u8
    }

    /// Has the next order wake this task.
    pub(crate) fn listen(&self, waker: &Waker) {
        let before = self.waker.lock().unwrap_or_else(PoisonError::into_inner).replace(waker.clone());
        drop(before);
    }

    /// Ready once the order is at least this one.
    pub(crate) fn poll(&self, at_least: ControlOrder, cx: &mut Context<'_>) -> Poll<()> {
        self.listen(cx.waker());
        if self.has(at_least) { Poll::Ready(()) } else { Poll::Pending }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_stay_and_include_each_other() {
        let (signal, mut cx) = (ControlSignal::default(), Context::from_waker(Waker::noop()));
        assert!(signal.poll(ControlOrder::Drain, &mut cx).is_pending());
        signal.send(ControlOrder::Drain);
        assert!(
            signal.poll(ControlOrder::Drain, &mut cx).is_ready()
                && signal.poll(ControlOrder::Abort, &mut cx).is_pending()
        );
        signal.send(ControlOrder::Abort);
        signal.send(ControlOrder::Drain);
        assert!(signal.has(ControlOrder::Abort) && signal.has(ControlOrder::Drain));
    }
}
