//! A core's address: work is left there, and nobody waits for an answer.
//!
//! Shape: a [`crate::CoreHandle::call`] holds a permit and brings an answer back; opening a way between two cores, or handing over a
//! connection, needs neither, and must not wait.

use std::sync::Arc;

use crate::call::{CoreGone, CoreHandle};
use crate::executor;
use crate::remote::ReactorShared;
use crate::task;

/// The address of one reactor, on a thread of [`crate::Cores`] or not. Clones are the same address.
#[derive(Clone)]
pub struct CoreAddress {
    remote: Arc<ReactorShared>,
}

impl CoreAddress {
    /// The address of the current reactor.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn here() -> CoreAddress {
        let remote = Arc::clone(&executor::current().remote);
        remote.share();
        CoreAddress { remote }
    }

    /// Whether the caller runs on this reactor.
    pub fn is_here(&self) -> bool {
        executor::try_current().is_some_and(|core| Arc::ptr_eq(&core.remote, &self.remote))
    }

    /// Runs `work` on the reactor, as a task of its own, in the order of sending. Senders are to limit what they send. When
    /// the reactor ends before, `work` is dropped unused, possibly on this thread.
    ///
    /// # Errors
    /// [`CoreGone::Stopped`] when the core stops or has stopped.
    pub fn send(&self, work: impl FnOnce() + Send + 'static) -> Result<(), CoreGone> {
        // A task of its own, because the closure may panic, and its thread is not to end by that.
        let message = Box::new(move || drop(task::spawn_on(executor::current(), async move { work() })));
        self.remote.send(message).map_err(|refused| {
            drop(refused);
            CoreGone::Stopped
        })
    }
}

impl PartialEq for CoreAddress {
    /// Whether both are of one reactor.
    fn eq(&self, other: &CoreAddress) -> bool {
        Arc::ptr_eq(&self.remote, &other.remote)
    }
}

impl Eq for CoreAddress {}

impl std::fmt::Debug for CoreAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Post").field("event_fd", &self.remote.event_fd()).finish()
    }
}

impl CoreHandle {
    /// The core's address.
    pub fn post(&self) -> CoreAddress {
        self.remote.share();
        CoreAddress { remote: Arc::clone(&self.remote) }
    }
}
