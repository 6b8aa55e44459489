//! Open descriptors and what a reactor knows them by: a slot in its ring's table of files, or a place among its sockets.
//!
//! Invariants: the descriptor is open, and its slot is its own, while the `Descriptor` lives. A slot that is given up stays
//! out of use until the ring has forgotten the file.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::driver::Driver;
use crate::executor::Core;
use crate::late::Late;
use crate::net::set_nonblocking;
use crate::sockets::Epoll;

/// Slots that were given up and that the ring still has to clear.
#[derive(Default)]
pub(crate) struct FreedSlots {
    any: AtomicBool,
    slots: Mutex<Vec<u32>>,
}

impl FreedSlots {
    fn add(&self, slot: u32) {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner).push(slot);
        self.any.store(true, Ordering::Release);
    }

    /// Takes the slots; cheap when there are none.
    pub(crate) fn take(&self) -> Vec<u32> {
        if !self.any.load(Ordering::Relaxed) || !self.any.swap(false, Ordering::Acquire) {
            return Vec::new();
        }
        std::mem::take(&mut self.slots.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A descriptor's place in the table of one ring.
pub(crate) struct Slot {
    pub(crate) index: u32,
    pub(crate) given_up: Arc<FreedSlots>,
}

/// What a reactor knows a descriptor by, besides its number.
pub(crate) enum FdRegistration {
    /// Nothing else.
    Plain,
    /// A slot of a ring's table.
    Fixed(Slot),
    /// Registered with epoll.
    Watched(Arc<Epoll>),
}

impl Core {
    /// Gives a descriptor a slot of the ring's table, if there is a ring, and room.
    pub(crate) fn fix(&self, fd: RawFd) -> FdRegistration {
        match self.driver.borrow_mut().as_mut() {
            Some(Driver::Ring(ring)) => ring.fix(fd).map_or(FdRegistration::Plain, FdRegistration::Fixed),
            _ => FdRegistration::Plain,
        }
    }

    /// Has the ring let go of files that were closed, now and not in its next turn, so that locks on them end, and
    /// connections are closed, here. While the ring is busy the next turn is near.
    pub(crate) fn forget_files(&self) {
        if let Ok(mut driver) = self.driver.try_borrow_mut()
            && let Some(Driver::Ring(ring)) = driver.as_mut()
        {
            ring.forget_files();
        }
    }

    /// Prepares a socket for this reactor's way of waiting: a ring waits itself, while epoll waits for others to try.
    pub(crate) fn adopt(&self, fd: BorrowedFd<'_>) -> io::Result<FdRegistration> {
        if let Some(Driver::Threads(threads)) = self.driver.borrow().as_ref() {
            set_nonblocking(fd, true)?;
            return threads.sockets.watch(fd.as_raw_fd()).map(FdRegistration::Watched);
        }
        set_nonblocking(fd, false)?;
        Ok(self.fix(fd.as_raw_fd()))
    }
}

pub(crate) struct Descriptor {
    /// `None` only after `into_fd`.
    fd: Option<OwnedFd>,
    known: FdRegistration,
    late: Late,
}

impl Descriptor {
    pub(crate) fn new(fd: OwnedFd, known: FdRegistration) -> Descriptor {
        Descriptor { fd: Some(fd), known, late: Late::default() }
    }

    fn fd(&self) -> &OwnedFd {
        self.fd.as_ref().expect("only `into_fd` takes it, and the descriptor with it")
    }

    pub(crate) fn raw(&self) -> RawFd {
        self.fd().as_raw_fd()
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd().as_fd()
    }

    /// What goes on although nobody waits for it.
    pub(crate) fn late(&self) -> &Late {
        &self.late
    }

    pub(crate) fn slot(&self) -> Option<&Slot> {
        match &self.known {
            FdRegistration::Fixed(slot) => Some(slot),
            FdRegistration::Plain | FdRegistration::Watched(_) => None,
        }
    }

    /// Gives up what the reactor knows, and keeps the descriptor open.
    pub(crate) fn into_fd(mut self) -> OwnedFd {
        self.forget();
        self.fd.take().expect("only this takes it")
    }

    fn forget(&mut self) {
        match std::mem::replace(&mut self.known, FdRegistration::Plain) {
            FdRegistration::Plain => {}
            FdRegistration::Fixed(slot) => slot.given_up.add(slot.index),
            FdRegistration::Watched(epoll) => epoll.remove(self.raw()),
        }
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        self.forget();
    }
}
