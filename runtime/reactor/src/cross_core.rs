//! What other threads may touch: a reactor's shared state, its address, and handles to values that stay on their core.
//!
//! Invariants: the reactor sees everything that is put into the inbox. [`SleepHandshake`] decides which side acts: the reactor does
//! not sleep, or the sender writes the event descriptor, which ends the sleep. Sending to a reactor that is awake costs no system
//! call. A [`CoreLocal`] value is used and dropped on its own thread only: by its reactor when the last handle is dropped, or at
//! the latest when the reactor ends.
//!
//! Shape: a [`crate::CoreHandle::call`] holds a permit and returns a result; opening a channel between two cores, or handing over
//! a connection, needs neither and must not wait, so it sends to a [`CoreAddress`].

use std::any::Any;
use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Write};
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::call::{CoreGone, CoreHandle};
use crate::executor;
use crate::sleep_handshake::SleepHandshake;
use crate::task;
use crate::waker::TaskId;

/// Something to run on the reactor's thread.
pub(crate) type Message = Box<dyn FnOnce() + Send>;

pub(crate) struct ReactorShared {
    event: File,
    handshake: SleepHandshake,
    /// Other threads send to this reactor, so a spin may find their messages.
    is_shared: AtomicBool,
    inbox: Mutex<Inbox>,
}

#[derive(Default)]
pub(crate) struct Inbox {
    pub(crate) woken: Vec<TaskId>,
    pub(crate) messages: Vec<Message>,
    /// The deadline of the core's tasks, once its shutdown was requested.
    pub(crate) stop_by: Option<Instant>,
    /// No message is accepted any more.
    closed: bool,
}

impl ReactorShared {
    pub(crate) fn new() -> std::io::Result<ReactorShared> {
        // SAFETY: the call takes no pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
        if fd < 0 {
            return Err(std::io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new, so it has no other owner.
        let event = unsafe { File::from_raw_fd(fd) };
        Ok(ReactorShared {
            event,
            handshake: SleepHandshake::new(),
            is_shared: AtomicBool::new(false),
            inbox: Mutex::default(),
        })
    }

    pub(crate) fn event_fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }

    /// Clears the event after `event_fd` became readable. Only the reactor reads it, so this does not block then.
    pub(crate) fn clear_event(&self) {
        let mut count = [0; 8];
        // A failure would leave the event set, and the reactor would only wake once too often.
        let _ = (&self.event).read(&mut count);
    }

    /// Makes the reactor read its inbox.
    pub(crate) fn notify(&self) {
        if self.handshake.notify() {
            self.kick();
        }
    }

    /// Records that the reactor is about to sleep. False if the inbox has something: then it must not sleep. Call
    /// [`ReactorShared::wake_up`] afterwards in either case.
    pub(crate) fn fall_asleep(&self) -> bool {
        self.handshake.fall_asleep()
    }

    /// The reactor is awake again, and looks at its inbox before it next sleeps.
    pub(crate) fn wake_up(&self) {
        self.handshake.wake_up();
    }

    /// Whether something came in that the reactor has not looked at.
    pub(crate) fn has_notice(&self) -> bool {
        self.handshake.has_notice()
    }

    /// Records that other threads will send to this reactor.
    pub(crate) fn share(&self) {
        self.is_shared.store(true, Ordering::Relaxed);
    }

    /// True if other threads send to this reactor.
    pub(crate) fn is_shared(&self) -> bool {
        self.is_shared.load(Ordering::Relaxed)
    }

    /// Ends the reactor's sleep, even if the inbox is empty.
    pub(crate) fn kick(&self) {
        // The counter would have to reach 2^64 - 1 for this to fail.
        let _ = (&self.event).write(&1u64.to_ne_bytes());
    }

    /// True if something was put into the inbox since the last call.
    pub(crate) fn take_notice(&self) -> bool {
        self.handshake.take_notice()
    }

    pub(crate) fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn wake_task(&self, task: TaskId) {
        self.inbox().woken.push(task);
        self.notify();
    }

    /// Sends a message; returns it if the core stops or has stopped.
    pub(crate) fn send(&self, message: Message) -> Result<(), Message> {
        let mut inbox = self.inbox();
        if inbox.closed || inbox.stop_by.is_some() {
            return Err(message);
        }
        inbox.messages.push(message);
        drop(inbox);
        self.notify();
        Ok(())
    }

    /// Requests the shutdown of the core; the first deadline stands.
    pub(crate) fn stop(&self, by: Instant) {
        self.inbox().stop_by.get_or_insert(by);
        self.notify();
    }

    /// Rejects messages from now on and returns those that were never run.
    pub(crate) fn close(&self) -> Vec<Message> {
        let mut inbox = self.inbox();
        inbox.closed = true;
        std::mem::take(&mut inbox.messages)
    }
}

/// The address of one reactor, on a thread of [`crate::Cores`] or not. Clones are the same address.
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
        let shared = Arc::clone(&executor::current().shared);
        shared.share();
        CoreAddress { shared }
    }

    /// True if the caller runs on this reactor.
    pub fn is_here(&self) -> bool {
        executor::try_current().is_some_and(|core| Arc::ptr_eq(&core.shared, &self.shared))
    }

    /// Runs `work` on the reactor, as a task of its own, in the order of sending. Senders limit what they send. If the reactor ends
    /// before, `work` is dropped unused, possibly on this thread.
    ///
    /// # Errors
    /// [`CoreGone::Stopped`] when the core stops or has stopped.
    pub fn send(&self, work: impl FnOnce() + Send + 'static) -> Result<(), CoreGone> {
        // A task of its own, because the closure may panic, which must not end the thread.
        let message = Box::new(move || drop(task::spawn_on(executor::current(), async move { work() })));
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
        f.debug_struct("CoreAddress").field("event_fd", &self.shared.event_fd()).finish()
    }
}

impl CoreHandle {
    /// The core's address.
    pub fn address(&self) -> CoreAddress {
        self.shared.share();
        CoreAddress { shared: Arc::clone(&self.shared) }
    }
}

/// The values that stay on one reactor, by number.
#[derive(Default)]
pub(crate) struct CoreLocals {
    next: u64,
    values: HashMap<u64, Rc<dyn Any>>,
}

/// A handle to a value that stays on one core. It may be sent and shared, although the value may not. Clones are for the same
/// value.
pub struct CoreLocal<T> {
    slot: Arc<CoreLocalSlot>,
    // The value is never reached through a handle on another thread.
    _value: PhantomData<fn() -> T>,
}

struct CoreLocalSlot {
    core: CoreAddress,
    number: u64,
}

impl<T: 'static> CoreLocal<T> {
    /// Stores `value` on this reactor.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn new(value: Rc<T>) -> CoreLocal<T> {
        let core = executor::current();
        let mut values = core.core_locals.borrow_mut();
        let number = values.next;
        values.next += 1;
        values.values.insert(number, value);
        drop(values);
        CoreLocal { slot: Arc::new(CoreLocalSlot { core: CoreAddress::here(), number }), _value: PhantomData }
    }

    /// The value, if the caller runs on the value's reactor and the reactor has not ended.
    pub fn get(&self) -> Option<Rc<T>> {
        let core = executor::try_current()?;
        if !self.slot.core.is_here() {
            return None;
        }
        let value = core.core_locals.borrow().values.get(&self.slot.number).cloned()?;
        value.downcast().ok()
    }

    /// The reactor of the value.
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
fn evict(number: u64) {
    let value = executor::try_current().and_then(|core| core.core_locals.borrow_mut().values.remove(&number));
    drop(value);
}
