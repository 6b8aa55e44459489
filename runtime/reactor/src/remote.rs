//! The side of a reactor that other threads may touch.
//!
//! Invariant: whatever is put into the inbox is seen. [`SleepHandshake`] decides who must act: either the reactor does not fall
//! asleep, or the sender writes the event descriptor, which ends its sleep. A reactor that is awake costs no system call.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::sleep_handshake::SleepHandshake;
use crate::waker::TaskId;

/// Something to run on the reactor's thread.
pub(crate) type Message = Box<dyn FnOnce() + Send>;

pub(crate) struct ReactorShared {
    event: File,
    handshake: SleepHandshake,
    /// Other threads have something to do with this reactor, so waiting for them is worth a spin.
    is_shared: AtomicBool,
    inbox: Mutex<Inbox>,
}

#[derive(Default)]
pub(crate) struct Inbox {
    pub(crate) woken: Vec<TaskId>,
    pub(crate) messages: Vec<Message>,
    /// Set when the core is asked to stop: until when its tasks may go on.
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
        // SAFETY: the descriptor is new, so nobody else owns it.
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

    /// Takes back the event after `event_fd` became readable. Only the reactor reads it, so this does not block then.
    pub(crate) fn clear_event(&self) {
        let mut count = [0; 8];
        // A failure would leave the event set, and the reactor would only wake once too often.
        let _ = (&self.event).read(&mut count);
    }

    /// Makes the reactor look at its inbox.
    pub(crate) fn notify(&self) {
        if self.handshake.notify() {
            self.kick();
        }
    }

    /// The reactor is about to sleep. False when something has come in: then it must not. Either way call
    /// [`ReactorShared::wake_up`] afterwards.
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

    /// Other threads will send to this reactor.
    pub(crate) fn share(&self) {
        self.is_shared.store(true, Ordering::Relaxed);
    }

    /// Whether other threads send to this reactor.
    pub(crate) fn is_shared(&self) -> bool {
        self.is_shared.load(Ordering::Relaxed)
    }

    /// Ends the reactor's sleep, whatever the inbox holds.
    pub(crate) fn kick(&self) {
        // The counter would have to reach 2^64 - 1 for this to fail.
        let _ = (&self.event).write(&1u64.to_ne_bytes());
    }

    /// Whether something came in since the last call.
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

    /// Hands over a message, or returns it when the core stops or has stopped.
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

    /// Asks the core to stop; the first deadline stands.
    pub(crate) fn stop(&self, by: Instant) {
        self.inbox().stop_by.get_or_insert(by);
        self.notify();
    }

    /// Refuses messages from now on and returns those that were never run.
    pub(crate) fn close(&self) -> Vec<Message> {
        let mut inbox = self.inbox();
        inbox.closed = true;
        std::mem::take(&mut inbox.messages)
    }
}
