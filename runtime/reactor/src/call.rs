//! Calls from one thread to the core that does the work.
//!
//! Invariants: every call that was sent completes, at the latest when its work is dropped; a permit is held from before
//! the call is sent until it completes, so a core never holds more calls than its limit.

use std::os::fd::AsRawFd;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures_channel::oneshot;
use futures_util::FutureExt;

use crate::core;
use crate::cross_core::{CoreAddress, CoreGone};
use crate::inbox::ReactorShared;
use crate::sync::Semaphore;
use crate::task;

/// Sends work to one core. Clones are for the same core.
#[derive(Clone)]
pub struct CoreHandle {
    pub(crate) shared: Arc<ReactorShared>,
    pub(crate) semaphore: Arc<Semaphore>,
}

impl CoreHandle {
    /// Calls `work` on the core to create a future, runs it there, and returns its output. While the core has as many
    /// calls as its limit allows, the caller waits. The caller may run on any executor. Dropping the returned future
    /// does not stop work that was already sent. Calls of a core to itself count, too. So a call that is awaited inside
    /// another call can wait forever if all permits are held by such callers.
    ///
    /// # Errors
    /// [`CoreGone`] when the core stops before there is a result, or the work panics.
    pub async fn call<W, F, T>(&self, work: W) -> Result<T, CoreGone>
    where
        W: FnOnce() -> F + Send + 'static,
        F: Future<Output = T> + 'static,
        T: Send + 'static,
    {
        let permit = self.semaphore.acquire().await;
        let (reply, result) = oneshot::channel();
        let message = Box::new(move || {
            // The closure itself may panic, so it runs inside the task.
            let task = async move {
                let output = AssertUnwindSafe(async move { work().await }).catch_unwind().await;
                // The caller may be gone.
                let _ = reply.send(output.map_err(|_| CoreGone::Panicked));
                drop(permit);
            };
            drop(task::spawn_on(core::current(), task));
        });
        // A refused message is dropped here, together with its reply channel.
        drop(self.shared.send(message));
        result.await.unwrap_or(Err(CoreGone::Stopped))
    }

    /// The core's address.
    pub fn address(&self) -> CoreAddress {
        CoreAddress::of(Arc::clone(&self.shared))
    }
}

impl std::fmt::Debug for CoreHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CoreHandle").field("event_fd", &self.shared.event_fd().as_raw_fd()).finish()
    }
}
