//! Aligned buffers that can be registered with io_uring.
//!
//! A [`Buffer`] is the only handle on its bytes and may write them; a [`Slice`] shares its bytes and may only read
//! them. Both are ranges of a reference-counted allocation, which is on the heap, a slot of a [`Pool`]'s arena, or lent
//! by another part of the program.
//!
//! Invariants:
//! - The range of a live `Buffer` overlaps that of no other live handle.
//! - All memory is initialised: our own is zeroed when it is first obtained from the system. Memory that a pool hands
//!   out again has the bytes of its former use, so a pool's buffer must be filled before it is sent anywhere.
//! - The thread that drops the last handle of an allocation returns it. Slots go back to the thread of their pool.
//!
//! Shape: direct I/O and registered buffers both need an address that the allocator chose, not the caller, and a write
//! may be retried or mirrored while its data are still being sent. So there is one owner type that fills and one shared
//! type that travels, as in the `bytes` crate, but aligned, joinable again after a split, and aware of the arena.

#![allow(unsafe_code)]

mod arena;
mod buffer;
mod classes;
mod heap;
mod owner;
mod pool;
mod pool_shared;
mod returned;
mod slabs;
mod thread_owned;

/// The atomics of `returned.rs`; `tests/returned.rs` replaces them with those of a model checker.
mod primitives {
    pub(crate) use std::sync::atomic::{AtomicIsize, AtomicU32, Ordering};
}

pub use arena::{Arena, ArenaId, Registration};
pub use buffer::{Buffer, Slice};
pub use pool::Pool;
pub use pool_shared::{Counters, OverLimit};
pub use slabs::{SLAB_CHUNK_BYTES, Slabs};

/// Alignment, in bytes, of the start of every heap buffer and of every pool buffer of at least this length.
///
/// It is the page size of the supported platforms and the largest logical block size that direct I/O requires.
pub const ALIGNMENT: usize = 4096;

#[cfg(feature = "counting")]
pub mod counting {
    //! An allocator that counts the allocations of each thread, for tests which show that something allocates nothing.
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

    /// The system's allocator with counters: the `#[global_allocator]` of such a test.
    pub struct Counting;

    thread_local! {
        static COUNT: Cell<u64> = const { Cell::new(0) };
    }

    /// The number of allocations of this thread so far. A change of size counts as one.
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
}
