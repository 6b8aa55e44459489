//! The part of a reactor that other threads may access: its inbox, the event that ends its sleep, and the directory of
//! all reactors.
//!
//! Invariants: the reactor sees everything that is put into the inbox. [`SleepHandshake`] decides which side acts: the
//! reactor does not sleep, or the sender writes the event descriptor, which ends the sleep. Sending to a reactor that
//! is awake costs no system call. A place of the directory belongs to one reactor at a time, and whoever has the handle
//! of an earlier one reaches no later one.
//!
//! Shape: the directory is an array of places that are made when they are first needed and then stay, so finding one
//! needs no lock. The inbox is in the place: a wake from another thread takes one lock, which is that of its reactor
//! alone.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
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
    place: &'static Place,
    id: CoreId,
}

/// A place of the directory. It has cache lines of its own, so that wakes of other reactors do not slow it down.
#[derive(Default)]
#[repr(align(128))]
struct Place(Mutex<Inbox>);

#[derive(Default)]
pub(crate) struct Inbox {
    /// The reactor that has the place now.
    reactor: Option<Arc<ReactorShared>>,
    pub(crate) woken: Vec<TaskId>,
    pub(crate) messages: Vec<Message>,
    /// The deadline of the core's tasks, once its shutdown was requested.
    pub(crate) stop_by: Option<Instant>,
    /// Messages are no longer accepted.
    closed: bool,
}

impl ReactorShared {
    /// The reactor's index in the directory.
    pub(crate) fn id(&self) -> CoreId {
        self.id
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
        lock(&self.place.0)
    }

    /// True if the place still belongs to this reactor.
    fn has(&self, inbox: &Inbox) -> bool {
        inbox.reactor.as_ref().is_some_and(|reactor| std::ptr::eq(&**reactor, self))
    }

    /// Sends a message; returns it if the core stops or has stopped.
    pub(crate) fn send(&self, message: Message) -> Result<(), Message> {
        let mut inbox = self.inbox();
        if !self.has(&inbox) || inbox.closed || inbox.stop_by.is_some() {
            return Err(message);
        }
        inbox.messages.push(message);
        drop(inbox);
        self.notify();
        Ok(())
    }

    /// Requests the shutdown of the core; the first deadline counts.
    pub(crate) fn stop(&self, by: Instant) {
        let mut inbox = self.inbox();
        if self.has(&inbox) {
            inbox.stop_by.get_or_insert(by);
            drop(inbox);
            self.notify();
        }
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

/// The places of the reactors of this process, so that a waker can find its own from another thread.
static DIRECTORY: [OnceLock<&'static Place>; 1 << 16] = [const { OnceLock::new() }; 1 << 16];

/// A reactor in the directory, until it is dropped.
pub(crate) struct Registration(Arc<ReactorShared>);

impl Registration {
    /// Gives a new reactor the first place that is free.
    pub(crate) fn new() -> std::io::Result<Registration> {
        let event = File::from(eventfd(0, EventfdFlags::CLOEXEC)?);
        let places = (0..=u16::MAX).map(|id| (CoreId(id), *DIRECTORY[id as usize].get_or_init(Place::leaked)));
        let (handshake, is_shared) = (SleepHandshake::new(), AtomicBool::new(false));
        let mut locked = places.map(|(id, place)| (id, place, lock(&place.0)));
        let free = locked.find(|(_, _, inbox)| inbox.reactor.is_none());
        let (id, place, mut inbox) = free.expect("a process has at most 65536 reactors");
        let reactor = Arc::new(ReactorShared { event, handshake, is_shared, place, id });
        *inbox = Inbox { reactor: Some(Arc::clone(&reactor)), ..Inbox::default() };
        Ok(Registration(reactor))
    }

    pub(crate) fn reactor(&self) -> &Arc<ReactorShared> {
        &self.0
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let left = std::mem::take(&mut *self.0.inbox());
        // Without the lock, since messages may run any code.
        drop(left);
    }
}

impl Place {
    fn leaked() -> &'static Place {
        Box::leak(Box::default())
    }
}

/// Wakes a task from another thread; does nothing if the reactor has ended.
pub(crate) fn wake_elsewhere(core: CoreId, task: TaskId) {
    let Some(place) = DIRECTORY[core.0 as usize].get() else { return };
    let mut inbox = lock(&place.0);
    let Inbox { reactor: Some(reactor), woken, .. } = &mut *inbox else { return };
    woken.push(task);
    // The reactor may have ended by the time when the lock is free.
    let asleep = reactor.handshake.notify().then(|| Arc::clone(reactor));
    drop(inbox);
    if let Some(reactor) = asleep {
        reactor.kick();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_used_again_and_an_earlier_reactor_reaches_no_later_one() {
        let first = Registration::new().unwrap();
        let (place, address) = (first.reactor().place, Arc::clone(first.reactor()));
        assert!(address.send(Box::new(|| ())).is_ok());
        address.stop(Instant::now());
        assert!(address.send(Box::new(|| ())).is_err(), "it stops");
        drop(first);
        assert!(address.send(Box::new(|| ())).is_err(), "it has ended");
        wake_elsewhere(address.id(), TaskId::ROOT);
        // Other tests of this process may have taken the place meanwhile.
        let many: Vec<Registration> = (0..64).map(|_| Registration::new().unwrap()).collect();
        let Some(next) = many.iter().find(|next| std::ptr::eq(next.reactor().place, place)) else { return };
        let next = next.reactor();
        assert!(next.inbox().woken.is_empty() && next.inbox().messages.is_empty() && next.inbox().stop_by.is_none());
        assert!(address.send(Box::new(|| ())).is_err(), "it is not that reactor");
        address.stop(Instant::now());
        assert!(next.inbox().stop_by.is_none() && !next.has_notice());
        wake_elsewhere(next.id(), TaskId::ROOT);
        assert!(next.inbox().woken == [TaskId::ROOT] && next.take_notice() && next.send(Box::new(|| ())).is_ok());
    }
}
