//! What a reactor and the threads that send to it agree on before it sleeps.
//!
//! Invariant: no notice is slept through. A sender sets `notified` and then reads `sleeping`; the reactor sets `sleeping` and then
//! reads `notified`. All four are sequentially consistent, so at least one side sees the other: either the reactor stays awake,
//! or the sender ends its sleep. `tests/handshake.rs` runs this file under every interleaving that it has time for.

use crate::sync::{AtomicBool, Ordering};

pub(crate) struct SleepHandshake {
    notified: AtomicBool,
    /// The reactor sleeps, or is about to.
    sleeping: AtomicBool,
}

impl SleepHandshake {
    pub(crate) fn new() -> SleepHandshake {
        SleepHandshake { notified: AtomicBool::new(false), sleeping: AtomicBool::new(false) }
    }

    /// Leaves a notice. True if the reactor may sleep: then the sender must end its sleep.
    #[must_use]
    pub(crate) fn notify(&self) -> bool {
        !self.notified.swap(true, Ordering::SeqCst) && self.sleeping.load(Ordering::SeqCst)
    }

    /// The reactor is about to sleep. False if there is a notice: then it must not. Either way call
    /// [`SleepHandshake::wake_up`] afterwards.
    pub(crate) fn fall_asleep(&self) -> bool {
        self.sleeping.store(true, Ordering::SeqCst);
        !self.notified.load(Ordering::SeqCst)
    }

    /// The reactor is awake, and takes the notice before it next sleeps.
    pub(crate) fn wake_up(&self) {
        self.sleeping.store(false, Ordering::SeqCst);
    }

    /// True if there is a notice that the reactor has not taken.
    pub(crate) fn has_notice(&self) -> bool {
        self.notified.load(Ordering::Acquire)
    }

    /// Takes the notice. True if there was one.
    pub(crate) fn take_notice(&self) -> bool {
        self.notified.load(Ordering::Relaxed) && self.notified.swap(false, Ordering::SeqCst)
    }
}
