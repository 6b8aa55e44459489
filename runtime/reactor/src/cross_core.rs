//! Addresses of reactors, and handles to values that stay on their reactor, for other threads.
//!
//! Invariant: a [`CoreLocal`] value is used and dropped only on its own thread: by its reactor when the last handle is
//! dropped, or at the latest when the reactor ends.
//!
//! Shape: a [`crate::CoreHandle::call`] holds a permit and returns a result; opening a channel between two cores, or
//! handing over a connection, needs neither and must not wait, so it sends to a [`CoreAddress`].

use std::marker::PhantomData;
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::sync::Arc;

use crate::core;
use crate::inbox::ReactorShared;
use crate::task;

/// Why a call has no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CoreGone {
    /// The core stops or has stopped. The work may have started.
    #[error("the core has stopped")]
    Stopped,
    /// The work panicked. The core continues.
    #[error("the work panicked on its core")]
    Panicked,
}

/// The address of one reactor, on a thread of [`crate::Cores`] or elsewhere. Clones are the same address.
#[derive(Clone)]
pub struct CoreAddress {
    shared: Arc<ReactorShared>,
}

impl CoreAddress {
    /// The address of the current reactor.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn here() -> CoreAddress {
        CoreAddress::of(Arc::clone(&core::current().shared))
    }

    pub(crate) fn of(shared: Arc<ReactorShared>) -> CoreAddress {
        shared.share();
        CoreAddress { shared }
    }

    /// True if the caller runs on this reactor.
    pub fn is_here(&self) -> bool {
        core::try_current().is_some_and(|core| Arc::ptr_eq(&core.shared, &self.shared))
    }

    /// Runs `work` on the reactor, as a task of its own, in the order of sending. Senders must limit what they send. If
    /// the reactor ends earlier, `work` is dropped unused, possibly on this thread.
    ///
    /// # Errors
    /// [`CoreGone::Stopped`] when the core stops or has stopped.
    pub fn send(&self, work: impl FnOnce() + Send + 'static) -> Result<(), CoreGone> {
        // A task of its own, because the closure may panic, which must not end the thread.
        let message = Box::new(move || drop(task::spawn_on(core::current(), async move { work() })));
        self.shared.send(message).map_err(|refused| {
            drop(refused);
            CoreGone::Stopped
        })
    }
}

impl PartialEq for CoreAddress {
    /// True if both are addresses of one reactor.
    fn eq(&self, other: &CoreAddress) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }
}

impl Eq for CoreAddress {}

impl std::fmt::Debug for CoreAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CoreAddress").field("event_fd", &self.shared.event_fd().as_raw_fd()).finish()
    }
}

/// A handle to a value that stays on one core. It may be sent and shared, although the value may not. Clones are for
/// the same value.
pub struct CoreLocal<T> {
    slot: Arc<CoreLocalSlot>,
    // The value is never accessed through a handle on another thread.
    _value: PhantomData<fn() -> T>,
}

struct CoreLocalSlot {
    core: CoreAddress,
    number: usize,
}

impl<T: 'static> CoreLocal<T> {
    /// Stores `value` on this reactor.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn new(value: Rc<T>) -> CoreLocal<T> {
        let number = core::current().locals.borrow_mut().insert(value);
        CoreLocal { slot: Arc::new(CoreLocalSlot { core: CoreAddress::here(), number }), _value: PhantomData }
    }

    /// The value, if the caller runs on the value's reactor and the reactor has not ended.
    pub fn get(&self) -> Option<Rc<T>> {
        let core = core::try_current()?;
        if !self.slot.core.is_here() {
            return None;
        }
        let value = core.locals.borrow().get(self.slot.number).cloned()?;
        value.downcast().ok()
    }

    /// The reactor that owns the value.
    pub fn home(&self) -> &CoreAddress {
        &self.slot.core
    }
}

impl<T> Clone for CoreLocal<T> {
    fn clone(&self) -> CoreLocal<T> {
        CoreLocal { slot: Arc::clone(&self.slot), _value: PhantomData }
    }
}

impl<T> std::fmt::Debug for CoreLocal<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CoreLocal").field("core", &self.slot.core).field("number", &self.slot.number).finish()
    }
}

impl Drop for CoreLocalSlot {
    fn drop(&mut self) {
        let number = self.number;
        if self.core.is_here() {
            return evict(number);
        }
        // A reactor that ends drops all its values by itself.
        let _ = self.core.send(move || evict(number));
    }
}

/// Drops a value of the current reactor.
fn evict(number: usize) {
    let value = core::try_current().and_then(|core| core.locals.borrow_mut().try_remove(number));
    drop(value);
}
