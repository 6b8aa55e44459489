//! Blocks of heap memory, and those that a pool keeps for reuse.
//!
//! Invariants: `base` is valid for `layout.size()` bytes until the block is dropped. The spare blocks of a pool
//! together hold at most [`SPARE_LIMIT_BYTES`], and each has the length of its order.
//!
//! Shape: the system maps new pages for every large allocation and unmaps them when it is freed, and zeroing and
//! mapping them costs more than most requests. Spare blocks of unused lengths are freed one by one, with each lookup
//! that finds no block of its length. Those that nobody needed for a while are freed when the owner of the pool asks
//! for it.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;

use crate::ALIGNMENT;
use crate::classes::{ORDERS, UNIT_BYTES, bytes_of, order_for};

/// Heap memory, freed on drop.
pub(crate) struct HeapBlock {
    pub(crate) base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: a block is the only way to its memory, and any thread may free it.
unsafe impl Send for HeapBlock {}

impl HeapBlock {
    /// `len` zeroed bytes, aligned to [`ALIGNMENT`]; `len` is not zero.
    pub(crate) fn zeroed(len: usize) -> HeapBlock {
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

/// The maximum number of spare bytes of a pool.
const SPARE_LIMIT_BYTES: usize = 64 << 20;
/// Shorter blocks are not kept: the system's allocator caches them itself.
const MIN_BYTES: usize = 8 * UNIT_BYTES;

/// The spare blocks of a pool, by order.
#[derive(Default)]
pub(crate) struct SpareBlocks {
    blocks: [Vec<HeapBlock>; ORDERS],
    spare_bytes: usize,
    /// The fewest that were spare since [`SpareBlocks::watch`].
    unneeded_bytes: usize,
}

impl SpareBlocks {
    /// Takes a block of this order. If there is none, returns one of another order for the caller to free, so that
    /// there is room.
    pub(crate) fn take(&mut self, order: u8) -> Result<HeapBlock, Option<HeapBlock>> {
        let found = self.blocks[order as usize].pop();
        if let Some(block) = found {
            self.spare_bytes -= block.len_bytes();
            self.unneeded_bytes = self.unneeded_bytes.min(self.spare_bytes);
            return Ok(block);
        }
        let unused = self.blocks.iter_mut().rev().find_map(Vec::pop);
        self.spare_bytes -= unused.as_ref().map_or(0, HeapBlock::len_bytes);
        self.unneeded_bytes = self.unneeded_bytes.min(self.spare_bytes);
        Err(unused)
    }

    /// Begins to find out how much is spare all the time.
    pub(crate) fn watch(&mut self) {
        self.unneeded_bytes = self.spare_bytes;
    }

    /// Takes what was spare all the time since [`SpareBlocks::watch`], long blocks first, for the caller to free.
    pub(crate) fn take_unneeded(&mut self) -> Vec<HeapBlock> {
        let mut unneeded = Vec::new();
        let mut left_bytes = self.unneeded_bytes;
        for blocks in self.blocks.iter_mut().rev() {
            while let Some(block) = blocks.pop_if(|block| block.len_bytes() <= left_bytes) {
                left_bytes -= block.len_bytes();
                self.spare_bytes -= block.len_bytes();
                unneeded.push(block);
            }
        }
        self.unneeded_bytes = 0;
        unneeded
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

    /// The number of bytes kept now.
    pub(crate) fn spare_bytes(&self) -> usize {
        self.spare_bytes
    }
}

/// Has the allocator return its free pages to the system: it keeps blocks of these lengths for itself otherwise.
pub(crate) fn return_free_pages() {
    #[cfg(target_env = "gnu")]
    // SAFETY: `malloc_trim` takes no pointer and frees nothing that is allocated.
    unsafe {
        libc::malloc_trim(0);
    }
}
