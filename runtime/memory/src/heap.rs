//! Heap allocations: what a buffer owns when it does not come from an arena.
//!
//! Invariant: `base` is valid for `layout.size()` bytes until `free`. A heap allocation that a pool fell back to keeps
//! the pool alive and is charged to it. What lies among the spare allocations has no handle.
//!
//! Shape: a thread keeps a few small allocations that were given up, because tags of single blocks are made and given up
//! with every request.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::cell::RefCell;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::ALIGNMENT;
use crate::owner::Owner;
use crate::pool::Shared;

/// Allocations of at most this length have exactly this length, and are kept.
const SMALL_BYTES: usize = 512;
/// How many of them a thread keeps.
const SPARE_LIMIT: usize = 256;

thread_local! {
    static SPARE: RefCell<Spare> = const { RefCell::new(Spare(Vec::new())) };
}

/// Small allocations that nobody uses.
struct Spare(Vec<NonNull<Heap>>);

impl Drop for Spare {
    fn drop(&mut self) {
        for heap in self.0.drain(..) {
            // SAFETY: no handle is left on a spare allocation.
            unsafe { Heap::release(heap) };
        }
    }
}

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
        let is_small = len <= SMALL_BYTES && charged_to.is_none();
        if is_small && let Some(spare) = Heap::take_spare(len) {
            return spare;
        }
        let size = if is_small { SMALL_BYTES } else { len };
        let layout = Layout::from_size_align(size, ALIGNMENT).expect("a buffer is shorter than the address space");
        // SAFETY: the layout's size is not zero, as asserted above.
        let Some(base) = NonNull::new(unsafe { alloc_zeroed(layout) }) else { handle_alloc_error(layout) };
        let header = Box::new(Heap { handles: AtomicU32::new(1), base, layout, charged_to });
        (base, Owner::Heap(NonNull::from(Box::leak(header))))
    }

    /// A spare allocation with `len` zeroed bytes, if this thread has one.
    fn take_spare(len: usize) -> Option<(NonNull<u8>, Owner)> {
        // A thread that is about to end has none any more.
        let heap = SPARE.try_with(|spare| spare.borrow_mut().0.pop()).ok().flatten()?;
        // SAFETY: a spare allocation is alive and has no handle, so this is the only access.
        let header = unsafe { heap.as_ref() };
        header.handles.store(1, Ordering::Relaxed);
        // SAFETY: spare allocations are `SMALL_BYTES` long, which is at least `len`.
        unsafe { header.base.write_bytes(0, len) };
        Some((header.base, Owner::Heap(heap)))
    }

    /// Gives the memory up: for this thread's next use if it is small, else to the system.
    ///
    /// # Safety
    /// `heap` came from [`Heap::zeroed`] and no handle on it is left.
    pub(crate) unsafe fn free(heap: NonNull<Heap>) {
        // SAFETY: the caller promises that the allocation is alive.
        let header = unsafe { heap.as_ref() };
        let is_small = header.layout.size() == SMALL_BYTES && header.charged_to.is_none();
        let kept = is_small
            && SPARE.try_with(|spare| {
                let spare = &mut spare.borrow_mut().0;
                let has_room = spare.len() < SPARE_LIMIT;
                spare.extend(has_room.then_some(heap));
                has_room
            }) == Ok(true);
        if !kept {
            // SAFETY: the caller's promise.
            unsafe { Heap::release(heap) };
        }
    }

    /// Returns the memory to the system.
    ///
    /// # Safety
    /// `heap` came from [`Heap::zeroed`] and no handle on it is left.
    unsafe fn release(heap: NonNull<Heap>) {
        // SAFETY: `zeroed` leaked this very box, and the caller holds the last pointer to it.
        let header = unsafe { Box::from_raw(heap.as_ptr()) };
        // SAFETY: `base` was allocated with `layout`, and nobody refers to it any more.
        unsafe { dealloc(header.base.as_ptr(), header.layout) };
        if let Some(pool) = &header.charged_to {
            pool.refund_heap(header.layout.size());
        }
    }
}
