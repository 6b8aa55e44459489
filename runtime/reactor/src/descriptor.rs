//! Open descriptors and their registration with a reactor: a slot in its ring's table of files, or with its epoll.
//!
//! Invariants: the descriptor is open, and its slot is its own, while the `Descriptor` lives. A freed slot is not
//! reused until the ring has cleared it.

use std::future::poll_fn;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicIsize, Ordering};
use std::task::{Poll, Waker};

use rustix::event::epoll;
use sealblock_runtime_memory::{ArenaId, Registration};

use crate::sync::Batch;

/// Freed slots that the ring still has to clear.
pub(crate) type FreedSlots = Batch<u32>;

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
    Watched(Arc<OwnedFd>),
}

/// The late changes of one file: operations that change it and are in flight although their futures were dropped.
///
/// Invariant: each is counted from the drop of its future until it completes, so that a caller that waits for the count
/// to reach zero knows that no late change writes after that.
#[derive(Default)]
pub(crate) struct LateChanges {
    /// Below zero for a moment while an operation that has completed already is dropped.
    count: AtomicIsize,
    waiting: Batch<Waker>,
}

impl LateChanges {
    /// Records that the future of a change was dropped.
    pub(crate) fn started(&self) {
        self.count.fetch_add(1, Ordering::SeqCst);
    }

    /// Records that a late change has completed.
    pub(crate) fn ended(&self) {
        if self.count.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.waiting.wake_all();
        }
    }

    /// Waits until there are no late changes.
    pub(crate) async fn drain(&self) {
        let is_over = || self.count.load(Ordering::SeqCst) == 0;
        poll_fn(|cx| {
            if is_over() {
                return Poll::Ready(());
            }
            self.waiting.add_waker(cx.waker());
            // The last one may have completed before it could see the waker.
            if is_over() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await
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
            // A failure would only cause events that no operation waits for.
            FdRegistration::Watched(poll) => _ = epoll::delete(&*poll, self.as_fd()),
        }
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        self.forget();
    }
}

/// How an entry names a file.
pub(crate) enum Target {
    Fixed(u32),
    Plain(i32),
}

/// The tables that are registered with the ring.
pub(crate) struct Tables {
    pub(crate) arena: Option<ArenaId>,
    pub(crate) freed_slots: Arc<FreedSlots>,
    pub(crate) free_slots: Vec<u32>,
}

impl Tables {
    pub(crate) fn target(&self, descriptor: &Descriptor) -> Target {
        match descriptor.slot() {
            Some(slot) if Arc::ptr_eq(&slot.freed_slots, &self.freed_slots) => Target::Fixed(slot.index),
            _ => Target::Plain(descriptor.raw()),
        }
    }

    /// The buffer index, if the arena is registered with this ring.
    pub(crate) fn buffer(&self, registration: Registration) -> Option<u16> {
        (self.arena == Some(registration.arena)).then_some(registration.index)
    }
}
