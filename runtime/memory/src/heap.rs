//! Heap allocations: the memory of buffers that do not come from an arena.
//!
//! Invariants: `base` is valid for `layout.size()` bytes until the block is dropped. A heap allocation that a pool fell back to
//! keeps the pool alive and is charged to it. Spare allocations have no handle. The spare blocks of a pool together hold at most
//! [`SPARE_LIMIT_BYTES`], and each has the length of its order.
//!
//! Shape: a thread keeps a few small allocations for reuse, because tags of single blocks are allocated with every request. A
//! pool keeps large ones: the system hands out fresh pages for every large allocation and takes them back at once, and zeroing
//! and mapping them costs more than most requests. Spare blocks of unused lengths are freed one by one, with each lookup that
//! misses.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::cell::RefCell;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::ALIGNMENT;
use crate::buddy::{ORDERS, UNIT_BYTES, bytes_of, order_for};
use crate::buffer::Owner;
use crate::pool::PoolShared;

/// Shorter allocations get exactly this length, so that a thread can reuse them.
const SMALL_BYTES: usize = 512;
/// The longest tuple, which most of them hold: clearing a constant length needs no call.
const TUPLE_BYTES: usize = 16;
/// Maximum spare allocations of a thread.
const SPARE_LIMIT: usize = 256;

thread_local! {
    static SPARE: RefCell<SpareList> = const { RefCell::new(SpareList(Vec::new())) };
}

/// Small allocations without a handle.
struct SpareList(Vec<NonNull<Heap>>);

impl Drop for SpareList {
    fn drop(&mut self) {
        for heap in self.0.drain(..) {
            // SAFETY: no handle is left on a spare allocation.
            unsafe { Heap::release(heap) };
        }
    }
}

pub(crate) struct Heap {
    pub(crate) handles: AtomicU32,
    block: HeapBlock,
    charged_to: Option<Arc<PoolShared>>,
}

/// Heap memory, freed on drop.
pub(crate) struct HeapBlock {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: a block is the only way to its memory, and any thread may free it.
unsafe impl Send for HeapBlock {}

impl HeapBlock {
    /// `len` zeroed bytes, aligned to [`ALIGNMENT`]; `len` is not zero.
    fn zeroed(len: usize) -> HeapBlock {
        assert!(len > 0, "an empty buffer owns nothing");
        let layout = Layout::from_size_align(len, ALIGNMENT).expect("a buffer is shorter than the address space");
        // SAFETY: the layout's size is not zero, as asserted above.
        let Some(base) = NonNull::new(unsafe { alloc_zeroed(layout) }) else { handle_alloc_error(layout) };
        HeapBlock { base, layout }
    }

    /// Length in bytes.
    pub(crate) fn len_bytes(&self) -> usize {
        self.layout.size()
    }
}

impl Drop for HeapBlock {
    fn drop(&mut self) {
        // SAFETY: `base` was allocated with `layout`, and no reference to it is left.
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
        Heap::own(HeapBlock::zeroed(if is_small { SMALL_BYTES } else { len }), None)
    }

    /// `len` bytes for a pool: in its spare block, or zeroed if there is none. `len` is not zero.
    pub(crate) fn charged(len: usize, spare: Option<HeapBlock>, pool: Arc<PoolShared>) -> (NonNull<u8>, Owner) {
        let block = spare.unwrap_or_else(|| HeapBlock::zeroed(len));
        assert_eq!(block.len_bytes(), len, "a spare block has the requested length");
        Heap::own(block, Some(pool))
    }

    fn own(block: HeapBlock, charged_to: Option<Arc<PoolShared>>) -> (NonNull<u8>, Owner) {
        let base = block.base;
        let header = Box::new(Heap { handles: AtomicU32::new(1), block, charged_to });
        (base, Owner::Heap(NonNull::from(Box::leak(header))))
    }

    /// A spare allocation with `len` zeroed bytes, if this thread has one.
    fn take_spare(len: usize) -> Option<(NonNull<u8>, Owner)> {
        // A thread that is about to end has no list any more.
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

    /// Returns the memory: to this thread's spare list if it is small, to the pool that it is charged to, or to the system.
    ///
    /// # Safety
    /// `heap` came from [`Heap::zeroed`] or [`Heap::charged`] and no handle on it is left.
    pub(crate) unsafe fn free(heap: NonNull<Heap>) {
        // SAFETY: the caller promises that the allocation is alive.
        let header = unsafe { heap.as_ref() };
        let is_small = header.block.len_bytes() == SMALL_BYTES && header.charged_to.is_none();
        let is_kept = is_small
            && SPARE.try_with(|spare| {
                let spare = &mut spare.borrow_mut().0;
                let has_room = spare.len() < SPARE_LIMIT;
                spare.extend(has_room.then_some(heap));
                has_room
            }) == Ok(true);
        if !is_kept {
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

/// Maximum spare bytes of a pool.
const SPARE_LIMIT_BYTES: usize = 64 << 20;
/// Shorter blocks are not kept: the system's allocator keeps them itself.
const MIN_BYTES: usize = 8 * UNIT_BYTES;

/// The spare blocks of a pool, by order.
#[derive(Default)]
pub(crate) struct SpareBlocks {
    blocks: [Vec<HeapBlock>; ORDERS],
    spare_bytes: usize,
}

/// The result of a lookup for a spare block.
pub(crate) enum CacheLookup {
    /// A block of the length.
    Hit(HeapBlock),
    /// No block of the length. A block of another length, if there is one, is freed to make room.
    Miss { _unused: Option<HeapBlock> },
}

impl SpareBlocks {
    /// Takes a block of this order.
    pub(crate) fn take(&mut self, order: u8) -> CacheLookup {
        let found = self.blocks[order as usize].pop();
        if let Some(block) = found {
            self.spare_bytes -= block.len_bytes();
            return CacheLookup::Hit(block);
        }
        let unused = self.blocks.iter_mut().rev().find_map(Vec::pop);
        self.spare_bytes -= unused.as_ref().map_or(0, HeapBlock::len_bytes);
        CacheLookup::Miss { _unused: unused }
    }

    /// Keeps a block, or returns it if there is no room.
    pub(crate) fn keep(&mut self, block: HeapBlock) -> Result<(), HeapBlock> {
        let len = block.len_bytes();
        match order_for(len).filter(|&order| bytes_of(order) == len) {
            Some(order) if len >= MIN_BYTES && self.spare_bytes + len <= SPARE_LIMIT_BYTES => {
                self.blocks[order as usize].push(block);
                self.spare_bytes += len;
                Ok(())
            }
            _ => Err(block),
        }
    }

    /// Bytes kept now.
    pub(crate) fn spare_bytes(&self) -> usize {
        self.spare_bytes
    }
}
