//! Late changes: operations that change a file and are still in flight although their futures were dropped.
//!
//! Invariant: each is counted from the drop of its future until it completes, so that a caller that waits for the count to reach
//! zero knows that no late change writes after that.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicIsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use crate::descriptor::Descriptor;
use crate::operation::{IoOp, Op};

/// The late changes of one file.
#[derive(Default)]
pub(crate) struct LateChanges {
    /// Below zero for a moment while an operation that has completed already is dropped.
    count: AtomicIsize,
    waiting: Mutex<Vec<Waker>>,
}

impl LateChanges {
    fn started(&self) {
        self.count.fetch_add(1, Ordering::SeqCst);
    }

    /// Records that a late change has completed.
    pub(crate) fn ended(&self) {
        if self.count.fetch_sub(1, Ordering::SeqCst) == 1 {
            let waiting = std::mem::take(&mut *self.waiting.lock().unwrap_or_else(PoisonError::into_inner));
            waiting.into_iter().for_each(Waker::wake);
        }
    }

    /// Waits until there are no late changes.
    pub(crate) async fn drain(&self) {
        let is_over = || self.count.load(Ordering::SeqCst) == 0;
        poll_fn(|cx| {
            if is_over() {
                return Poll::Ready(());
            }
            self.waiting.lock().unwrap_or_else(PoisonError::into_inner).push(cx.waker().clone());
            // The last one may have completed before it could see the waker.
            if is_over() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await
    }
}

/// An operation that changes a file; dropped in flight it is a late change until [`IoOp::discard`].
pub(crate) struct FileChange<'a, K: IoOp> {
    descriptor: &'a Arc<Descriptor>,
    op: Op<K>,
}

impl<'a, K: IoOp> FileChange<'a, K> {
    pub(crate) fn new(descriptor: &'a Arc<Descriptor>, op: Op<K>) -> FileChange<'a, K> {
        FileChange { descriptor, op }
    }
}

impl<K: IoOp> Future for FileChange<'_, K> {
    type Output = K::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<K::Output> {
        Pin::new(&mut self.op).poll(cx)
    }
}

impl<K: IoOp> Drop for FileChange<'_, K> {
    fn drop(&mut self) {
        // Before the operation is dropped, because it may have completed already.
        if self.op.is_in_flight() {
            self.descriptor.late().started();
        }
    }
}
