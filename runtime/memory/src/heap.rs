//! Heap allocations: what a buffer owns when it does not come from an arena.
//!
//! Invariant: `base` is valid for `layout.size()` bytes until the block is dropped. A heap allocation that a pool fell back to keeps
//! the pool alive and is charged to it. What lies among the spare allocations has no handle.
//!
//! Shape: a thread keeps a few small allocations that were given up, because tags of single blocks are made and given up
//! with every request. A pool keeps large ones (`spare.rs`).

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
/// The longest tag of one block, which is what most of them hold: to clear a length known beforehand needs no call.
const TUPLE_BYTES: usize = 16;
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
    block: Block,
    charged_to: Option<Arc<Shared>>,
}

/// Memory of the heap, given back when this is dropped.
pub(crate) struct Block {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: a block is the only way to its memory, and any thread may give it back.
unsafe impl Send for Block {}

impl Block {
    /// `len` zeroed bytes, aligned to [`ALIGNMENT`]; `len` is not zero.
    fn zeroed(len: usize) -> Block {
        assert!(len > 0, "an empty buffer owns nothing");
        let layout = Layout::from_size_align(len, ALIGNMENT).expect("a buffer is shorter than the address space");
        // SAFETY: the layout's size is not zero, as asserted above.
        let Some(base) = NonNull::new(unsafe { alloc_zeroed(layout) }) else { handle_alloc_error(layout) };
        Block { base, layout }
    }

    /// Length in bytes.
    pub(crate) fn len_bytes(&self) -> usize {
        self.layout.size()
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: `base` was allocated with `layout`, and nobody refers to it any more.
        unsafe { dealloc(self.base.as_ptr(), self.layout) };
    }
}

impl Heap {
    /// `len` zeroed bytes aligned to [`ALIGNMENT`], and their owner. `len` is not zero.
    pub(crate) fn zeroed(len: usize) -> (NonNull<u8>, Owner) {
        assert!(len > 0, "an empty buffer owns nothing");
        let is_small = len <= SMALL_BYTES;
        if is_small && let Some(spare) = Heap::take_spare(len) {
            return spare;
        }
        Heap::own(Block::zeroed(if is_small { SMALL_BYTES } else { len }), None)
    }

    /// `len` bytes for a pool, in the block that it kept, if it kept one, or zeroed. `len` is not zero.
    pub(crate) fn charged(len: usize, kept: Option<Block>, pool: Arc<Shared>) -> (NonNull<u8>, Owner) {
        let block = kept.unwrap_or_else(|| Block::zeroed(len));
        assert_eq!(block.len_bytes(), len, "a pool keeps blocks by their length");
        Heap::own(block, Some(pool))
    }

    fn own(block: Block, charged_to: Option<Arc<Shared>>) -> (NonNull<u8>, Owner) {
        let base = block.base;
        let header = Box::new(Heap { handles: AtomicU32::new(1), block, charged_to });
        (base, Owner::Heap(NonNull::from(Box::leak(header))))
    }

    /// A spare allocation with `len` zeroed bytes, if this thread has one.
    fn take_spare(len: usize) -> Option<(NonNull<u8>, Owner)> {
        // A thread that is about to end has none any more.
        let heap = SPARE.try_with(|spare| spare.borrow_mut().0.pop()).ok().flatten()?;
        // SAFETY: a spare allocation is alive and has no handle, so this is the only access.
        let header = unsafe { heap.as_ref() };
        header.handles.store(1, Ordering::Relaxed);
        if len <= TUPLE_BYTES {
            // SAFETY: spare allocations are `SMALL_BYTES` long, which is more.
            unsafe { header.block.base.write_bytes(0, TUPLE_BYTES) };
        } else {
            // SAFETY: spare allocations are `SMALL_BYTES` long, which is at least `len`.
            unsafe { header.block.base.write_bytes(0, len) };
        }
        Some((header.block.base, Owner::Heap(heap)))
    }

    /// Gives the memory up: for this thread's next use if it is small, for the pool's if it is charged to one, else to the
    /// system.
    ///
    /// # Safety
    /// `heap` came from [`Heap::zeroed`] or [`Heap::charged`] and no handle on it is left.
    pub(crate) unsafe fn free(heap: NonNull<Heap>) {
        // SAFETY: the caller promises that the allocation is alive.
        let header = unsafe { heap.as_ref() };
        let is_small = header.block.len_bytes() == SMALL_BYTES && header.charged_to.is_none();
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

    /// Returns the memory to the pool it is charged to, or to the system.
    ///
    /// # Safety
    /// `heap` came from [`Heap::zeroed`] or [`Heap::charged`] and no handle on it is left.
    unsafe fn release(heap: NonNull<Heap>) {
        // SAFETY: `own` leaked this very box, and the caller holds the last pointer to it.
        let header = unsafe { Box::from_raw(heap.as_ptr()) };
        let Heap { block, charged_to, .. } = *header;
        if let Some(pool) = charged_to {
            pool.refund_heap(block);
        }
    }
}
