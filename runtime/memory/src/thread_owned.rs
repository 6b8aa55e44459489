//! Values that only the thread which made them may access, although other threads have pointers to them.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU64, Ordering};

/// A value of the thread that made it. Any thread may drop it.
pub(crate) struct ThreadOwned<T> {
    thread: u64,
    value: RefCell<T>,
}

// SAFETY: `with` is the only access to the value, and it refuses every thread but the one that made it; numbers of
// threads are never used again. The value is `Send`, so that another thread may drop it.
unsafe impl<T: Send> Sync for ThreadOwned<T> {}

impl<T> ThreadOwned<T> {
    pub(crate) fn new(value: T) -> ThreadOwned<T> {
        ThreadOwned { thread: this_thread(), value: RefCell::new(value) }
    }

    /// Calls `access` with the value; `None` on another thread.
    ///
    /// # Panics
    /// When `access` calls this again.
    pub(crate) fn with<R>(&self, access: impl FnOnce(&mut T) -> R) -> Option<R> {
        (self.thread == this_thread()).then(|| access(&mut self.value.borrow_mut()))
    }
}

/// A number of the calling thread that no other thread has or had.
fn this_thread() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        static NUMBER: Cell<u64> = const { Cell::new(0) };
    }
    NUMBER.with(|number| {
        if number.get() == 0 {
            number.set(NEXT.fetch_add(1, Ordering::Relaxed));
        }
        number.get()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_its_own_thread_accesses_a_value() {
        let value = ThreadOwned::new(1);
        assert_eq!(value.with(|value| std::mem::replace(value, 2)), Some(1));
        std::thread::scope(|scope| {
            // Two threads, of which the second may have the stack of the first.
            for _ in 0..2 {
                let other = scope.spawn(|| value.with(|value| *value += 1)).join().expect("it does not panic");
                assert_eq!(other, None);
            }
        });
        assert_eq!(value.with(|value| *value), Some(2));
    }
}
