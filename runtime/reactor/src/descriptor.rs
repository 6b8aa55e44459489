//! Open descriptors and their slots in a ring's table of files.
//!
//! Invariants: the descriptor is open, and its slot is its own, while the `Descriptor` lives. A slot that is given up stays
//! out of use until the ring has forgotten the file.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Slots that were given up and that the ring still has to clear.
#[derive(Default)]
pub(crate) struct GivenUp {
    any: AtomicBool,
    slots: Mutex<Vec<u32>>,
}

impl GivenUp {
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
    pub(crate) given_up: Arc<GivenUp>,
}

pub(crate) struct Descriptor {
    fd: OwnedFd,
    slot: Option<Slot>,
}

impl Descriptor {
    pub(crate) fn new(fd: OwnedFd, slot: Option<Slot>) -> Descriptor {
        Descriptor { fd, slot }
    }

    pub(crate) fn raw(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub(crate) fn slot(&self) -> Option<&Slot> {
        self.slot.as_ref()
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        if let Some(slot) = &self.slot {
            slot.given_up.add(slot.index);
        }
    }
}
