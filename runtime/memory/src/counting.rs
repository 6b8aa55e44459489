//! An allocator that counts the allocations of each thread, for tests that show that something allocates nothing.
//!
//! Not on the path of a request: only tests turn the feature `counting` on.
//!
//! ```
//! use sealblock_runtime_memory::counting::{Counting, allocations};
//!
//! #[global_allocator]
//! static ALLOCATOR: Counting = Counting;
//!
//! let before = allocations();
//! drop(std::hint::black_box(Box::new(1)));
//! assert_eq!(allocations(), before + 1);
//! ```

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// The system's allocator, counted: the `#[global_allocator]` of such a test.
pub struct Counting;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

/// Allocations of this thread so far, a change of size counted as one.
pub fn allocations() -> u64 {
    COUNT.get()
}

// SAFETY: everything is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.set(COUNT.get() + 1);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}
