//! Waiting for a condition on one core.

use std::cell::RefCell;
use std::future::poll_fn;
use std::task::{Poll, Waker};

/// Wakes tasks that wait for a condition. Belongs to one core; a waiter looks at its condition each time it is woken.
#[derive(Default)]
pub struct Condition {
    waiting: RefCell<Vec<Waker>>,
}

impl Condition {
    /// Resolves once `ready` says so; asked at once and after every [`Condition::notify`].
    pub async fn wait_until(&self, mut ready: impl FnMut() -> bool) {
        poll_fn(|context| {
            if ready() {
                return Poll::Ready(());
            }
            let mut waiting = self.waiting.borrow_mut();
            if !waiting.iter().any(|waker| waker.will_wake(context.waker())) {
                waiting.push(context.waker().clone());
            }
            Poll::Pending
        })
        .await;
    }

    /// Lets every waiter look again.
    pub fn notify(&self) {
        // Taken out first: a waker may run code that waits again.
        let waiting = std::mem::take(&mut *self.waiting.borrow_mut());
        waiting.into_iter().for_each(Waker::wake);
    }
}
