//! Small values that several cores read and change.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A switch; reading it is as cheap as reading a plain one.
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

/// A counter that one core counts and others read.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    /// Adds, on the one core that counts: others' additions at the same time would be lost.
    pub(crate) fn add(&self, amount: u64) {
        self.0.store(self.get().saturating_add(amount), Ordering::Relaxed);
    }

    /// Puts a new value in place of the old, on the one core that counts.
    pub(crate) fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A value behind a lock, for what is touched at most by admin commands and when connections come and go.
#[derive(Debug, Default)]
pub(crate) struct Locked<T>(Mutex<T>);

impl<T> Locked<T> {
    pub(crate) const fn new(value: T) -> Locked<T> {
        Locked(Mutex::new(value))
    }

    /// Locks the value for a moment: nobody waits, wakes or runs foreign code while holding it.
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        // What is done under these locks does not panic half way.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set(&self, value: T) {
        let before = std::mem::replace(&mut *self.lock(), value);
        drop(before);
    }

    /// A copy of the value.
    pub(crate) fn get(&self) -> T
    where
        T: Clone,
    {
        self.lock().clone()
    }
}
