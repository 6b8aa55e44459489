//! The part of a reactor that other threads may access: its inbox, the event that ends its sleep, and the directory of
//! all reactors.
//!
//! Invariant: the reactor sees everything that is put into the inbox. [`SleepHandshake`] decides which side acts: the
//! reactor does not sleep, or the sender writes the event descriptor, which ends the sleep. Sending to a reactor that
//! is awake costs no system call.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Instant;

use rustix::event::{EventfdFlags, eventfd};

use crate::handoff::SleepHandshake;
use crate::scheduler::TaskId;
use crate::sync::lock;

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
    /// Messages are no longer accepted.
    closed: bool,
}

impl ReactorShared {
    pub(crate) fn new() -> std::io::Result<ReactorShared> {
        let event = File::from(eventfd(0, EventfdFlags::CLOEXEC)?);
        Ok(ReactorShared {
            event,
            handshake: SleepHandshake::new(),
            is_shared: AtomicBool::new(false),
            inbox: Mutex::default(),
        })
    }

    pub(crate) fn event_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
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

    /// Records that the reactor is awake, and will read its inbox before it next sleeps.
    pub(crate) fn wake_up(&self) {
        self.handshake.wake_up();
    }

    /// True if there is something that the reactor has not read.
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
        lock(&self.inbox)
    }

    fn wake_task(&self, task: TaskId) {
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

    /// Requests the shutdown of the core; the first deadline counts.
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

/// A reactor's index in the directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CoreId(pub(crate) u16);

/// The reactors of this process, so that a waker can find its own from another thread.
static DIRECTORY: RwLock<Vec<Option<Arc<ReactorShared>>>> = RwLock::new(Vec::new());

pub(crate) fn register(shared: &Arc<ReactorShared>) -> CoreId {
    let mut cores = DIRECTORY.write().unwrap_or_else(PoisonError::into_inner);
    let place = cores.iter().position(Option::is_none).unwrap_or(cores.len());
    let id = u16::try_from(place).expect("a process has fewer than 65536 reactors");
    if place == cores.len() {
        cores.push(None);
    }
    cores[place] = Some(Arc::clone(shared));
    CoreId(id)
}

pub(crate) fn unregister(id: CoreId) {
    DIRECTORY.write().unwrap_or_else(PoisonError::into_inner)[id.0 as usize] = None;
}

/// Wakes a task from another thread; does nothing if the reactor has ended.
pub(crate) fn wake_elsewhere(core: CoreId, task: TaskId) {
    let cores = DIRECTORY.read().unwrap_or_else(PoisonError::into_inner);
    if let Some(shared) = cores.get(core.0 as usize).and_then(Option::as_ref) {
        shared.wake_task(task);
    }
}
