//! Heap allocations: what a buffer owns when it does not come from an arena.
//!
//! Invariant: `base` is valid for `layout.size()` bytes until `free`. A heap allocation that a pool fell back to keeps
//! the pool alive and is charged to it.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use crate::ALIGNMENT;
use crate::owner::Owner;
use crate::pool::Shared;

pub(crate) struct Heap {
    pub(crate) handles: AtomicU32,
    base: NonNull<u8>,
    layout: Layout,
    charged_to: Option<Arc<Shared>>,
}

impl Heap {
    /// `len` zeroed bytes aligned to [`ALIGNMENT`], and their owner. `len` is not zero.
    pub(crate) fn zeroed(len: usize, charged_to: Option<Arc<Shared>>) -> (NonNull<u8>, Owner) {
        assert!(len > 0, "an empty buffer owns nothing");
        let layout = Layout::from_size_align(len, ALIGNMENT).expect("a buffer is shorter than the address space");
        // SAFETY: the layout's size is not zero, as asserted above.
        let Some(base) = NonNull::new(unsafe { alloc_zeroed(layout) }) else { handle_alloc_error(layout) };
        let header = Box::new(Heap { handles: AtomicU32::new(1), base, layout, charged_to });
        (base, Owner::Heap(NonNull::from(Box::leak(header))))
    }

    /// Returns the memory to the system.
    ///
    /// # Safety
    /// `heap` came from [`Heap::zeroed`] and no handle on it is left.
    pub(crate) unsafe fn free(heap: NonNull<Heap>) {
        // SAFETY: `zeroed` leaked this very box, and the caller holds the last pointer to it.
        let header = unsafe { Box::from_raw(heap.as_ptr()) };
        // SAFETY: `base` was allocated with `layout`, and nobody refers to it any more.
        unsafe { dealloc(header.base.as_ptr(), header.layout) };
        if let Some(pool) = &header.charged_to {
            pool.refund_heap(header.layout.size());
        }
    }
}
