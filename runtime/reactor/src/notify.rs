//! One task waits, any other rings.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::task::{Poll, Waker};

/// A bell for one waiting task. Ringing before the wait is not lost.
#[derive(Default)]
pub struct Notify {
    rung: Cell<bool>,
    waiter: RefCell<Option<Waker>>,
}

impl Notify {
    /// Wakes whoever waits, or the next one who will.
    pub fn ring(&self) {
        self.rung.set(true);
        let waiter = self.waiter.borrow_mut().take();
        if let Some(waiter) = waiter {
            waiter.wake();
        }
    }

    /// Rings while the waiting task itself is running, which will wait again before it rests.
    pub fn note(&self) {
        self.rung.set(true);
    }

    /// Ends when the bell has been rung since the last wait.
    pub async fn wait(&self) {
        poll_fn(|cx| {
            if self.rung.take() {
                return Poll::Ready(());
            }
            let previous = self.waiter.borrow_mut().replace(cx.waker().clone());
            drop(previous);
            Poll::Pending
        })
        .await
    }
}
