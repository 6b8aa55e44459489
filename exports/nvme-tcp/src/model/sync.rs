//! Small values that several cores share.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A flag, as cheap to read as a plain `bool`.
#[derive(Debug, Default)]
pub(crate) struct Flag(AtomicBool);

impl Flag {
    pub(crate) const fn new(is_on: bool) -> Flag {
        Flag(AtomicBool::new(is_on))
    }

    pub(crate) fn get(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    pub(crate) fn set(&self, is_on: bool) {
        self.0.store(is_on, Ordering::SeqCst);
    }
}

/// A counter that one core writes and others read.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    /// Adds to it; only the one core that writes may do this, because concurrent additions would be lost.
    pub(crate) fn add(&self, amount: u64) {
        self.0.store(self.get().saturating_add(amount), Ordering::Relaxed);
    }

    /// Sets a new value; only the one core that writes may do this.
    pub(crate) fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A value behind a lock, for admin commands and for connections that begin or end.
#[derive(Debug, Default)]
pub(crate) struct Locked<T>(Mutex<T>);

impl<T> Locked<T> {
    pub(crate) const fn new(value: T) -> Locked<T> {
        Locked(Mutex::new(value))
    }

    /// Locks the value. The holder must not wait, wake a task or call unknown code.
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        // No code that holds these locks can panic halfway.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set(&self, value: T) {
        let before = std::mem::replace(&mut *self.lock(), value);
        drop(before);
    }

    /// Returns a copy of the value.
    pub(crate) fn get(&self) -> T
    where
        T: Clone,
    {
        self.lock().clone()
    }
}
