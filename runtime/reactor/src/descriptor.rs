//! Open descriptors and their registration with a reactor: a slot in its ring's table of files, or with its epoll.
//!
//! Invariants: the descriptor is open, and its slot is its own, while the `Descriptor` lives. A freed slot is not reused until the
//! ring has cleared it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::executor::Core;
use crate::late::LateChanges;
use crate::net::set_nonblocking;
use crate::ring::Driver;
use crate::sockets::Epoll;

/// Freed slots that the ring still has to clear.
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

/// A descriptor's slot in the table of one ring.
pub(crate) struct FileSlot {
    pub(crate) index: u32,
    pub(crate) freed_slots: Arc<FreedSlots>,
}

/// The registration of a descriptor with a reactor.
pub(crate) enum FdRegistration {
    /// Not registered.
    Plain,
    /// A slot of a ring's table.
    Fixed(FileSlot),
    /// Registered with epoll.
    Watched(Arc<Epoll>),
}

impl Core {
    /// Registers a descriptor in the ring's table, if there is a ring with room.
    pub(crate) fn fix(&self, fd: RawFd) -> FdRegistration {
        match self.driver.borrow_mut().as_mut() {
            Some(Driver::Ring(ring)) => ring.fix(fd).map_or(FdRegistration::Plain, FdRegistration::Fixed),
            _ => FdRegistration::Plain,
        }
    }

    /// Has the ring clear closed files now and not in its next turn, so that file locks and connections end before the caller
    /// continues. If the ring is in use, its next turn clears them.
    pub(crate) fn forget_files(&self) {
        if let Ok(mut driver) = self.driver.try_borrow_mut()
            && let Some(Driver::Ring(ring)) = driver.as_mut()
        {
            ring.forget_files();
        }
    }

    /// Registers a socket with this reactor's backend: a ring blocks on it, epoll needs it non-blocking.
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
    registration: FdRegistration,
    late: LateChanges,
}

impl Descriptor {
    pub(crate) fn new(fd: OwnedFd, registration: FdRegistration) -> Descriptor {
        Descriptor { fd: Some(fd), registration, late: LateChanges::default() }
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

    /// The late changes of the file.
    pub(crate) fn late(&self) -> &LateChanges {
        &self.late
    }

    pub(crate) fn slot(&self) -> Option<&FileSlot> {
        match &self.registration {
            FdRegistration::Fixed(slot) => Some(slot),
            FdRegistration::Plain | FdRegistration::Watched(_) => None,
        }
    }

    /// Ends the registration and keeps the descriptor open.
    pub(crate) fn into_fd(mut self) -> OwnedFd {
        self.forget();
        self.fd.take().expect("only this takes it")
    }

    fn forget(&mut self) {
        match std::mem::replace(&mut self.registration, FdRegistration::Plain) {
            FdRegistration::Plain => {}
            FdRegistration::Fixed(slot) => slot.freed_slots.add(slot.index),
            FdRegistration::Watched(epoll) => epoll.remove(self.raw()),
        }
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        self.forget();
    }
}
