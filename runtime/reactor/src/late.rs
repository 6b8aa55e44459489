//! Operations that change a file and go on although their futures were dropped.
//!
//! Invariant: each is counted from the moment its future goes until its end, so that whoever waits for none to be left knows
//! that nothing is written behind its back.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicIsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use crate::descriptor::Descriptor;
use crate::operation::{IoOp, Op};

/// Late operations of one file.
#[derive(Default)]
pub(crate) struct Late {
    /// Below zero for the moment in which an operation that is over already is dropped.
    count: AtomicIsize,
    waiting: Mutex<Vec<Waker>>,
}

impl Late {
    fn begin(&self) {
        self.count.fetch_add(1, Ordering::SeqCst);
    }

    /// One is over.
    pub(crate) fn end(&self) {
        if self.count.fetch_sub(1, Ordering::SeqCst) == 1 {
            let waiting = std::mem::take(&mut *self.waiting.lock().unwrap_or_else(PoisonError::into_inner));
            waiting.into_iter().for_each(Waker::wake);
        }
    }

    /// Waits until there are none.
    pub(crate) async fn drain(&self) {
        let is_over = || self.count.load(Ordering::SeqCst) == 0;
        poll_fn(|cx| {
            if is_over() {
                return Poll::Ready(());
            }
            self.waiting.lock().unwrap_or_else(PoisonError::into_inner).push(cx.waker().clone());
            // The last one may have ended before it could see the waker.
            if is_over() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await
    }
}

/// An operation that changes a file; dropped in flight it is late, until its [`IoOp::discard`] says that it is over.
pub(crate) struct Change<'a, K: IoOp> {
    descriptor: &'a Arc<Descriptor>,
    op: Op<K>,
}

impl<'a, K: IoOp> Change<'a, K> {
    pub(crate) fn new(descriptor: &'a Arc<Descriptor>, op: Op<K>) -> Change<'a, K> {
        Change { descriptor, op }
    }
}

impl<K: IoOp> Future for Change<'_, K> {
    type Output = K::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<K::Output> {
        Pin::new(&mut self.op).poll(cx)
    }
}

impl<K: IoOp> Drop for Change<'_, K> {
    fn drop(&mut self) {
        // Before the operation is dropped, which may find that it is over.
        if self.op.is_flying() {
            self.descriptor.late().begin();
        }
    }
}
