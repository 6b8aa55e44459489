//! The gate before a transaction: closed while it is brought into the state that is committed.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::task::{Poll, Waker};

/// A gate that is open or closed.
#[derive(Default)]
pub struct Gate {
    is_closed: Cell<bool>,
    waiting: RefCell<Vec<Waker>>,
}

/// Opens the gate when it is dropped.
pub struct Closed<'a>(&'a Gate);

impl Gate {
    /// Waits until it is open. Nothing else runs on the core between the return and the next await of the caller.
    pub async fn passed(&self) {
        poll_fn(|context| {
            if !self.is_closed.get() {
                return Poll::Ready(());
            }
            self.waiting.borrow_mut().push(context.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Closes it until the result is dropped. One caller at a time closes it.
    pub fn close(&self) -> Closed<'_> {
        debug_assert!(!self.is_closed.get(), "one transaction is committed at a time");
        self.is_closed.set(true);
        Closed(self)
    }
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        self.0.is_closed.set(false);
        self.0.waiting.take().into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn whoever_comes_while_it_is_closed_waits_until_it_opens() {
        let gate = Gate::default();
        assert_eq!(gate.passed().now_or_never(), Some(()));
        let closed = gate.close();
        let mut waits = Box::pin(gate.passed());
        assert_eq!((&mut waits).now_or_never(), None);
        drop(closed);
        assert_eq!(waits.now_or_never(), Some(()));
    }
}
