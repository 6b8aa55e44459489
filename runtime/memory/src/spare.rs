//! Heap memory that a pool fell back to, kept for the next time.
//!
//! The system gives fresh pages for every large allocation and takes them back at once, and zeroing and mapping them costs more
//! than most requests do. So a pool whose arena is too small for the bytes in flight keeps the blocks it made instead.
//!
//! Invariants: all blocks together are no more than [`KEPT_BYTES`], and each has the length of its order. Blocks of lengths that
//! nobody asks for any more make room for others, one with each request in vain.

use crate::buddy::{ORDERS, UNIT_BYTES, bytes_of, order_for};
use crate::heap::Block;

/// Bytes that a pool keeps at most.
const KEPT_BYTES: usize = 64 << 20;
/// Shorter blocks come from what the system's allocator keeps itself.
const LEAST_BYTES: usize = 8 * UNIT_BYTES;

/// The blocks that are kept, by order.
#[derive(Default)]
pub(crate) struct SpareBlocks {
    blocks: [Vec<Block>; ORDERS],
    kept_bytes: usize,
}

/// What came of asking for a block.
pub(crate) enum CacheLookup {
    /// One of the length.
    Hit(Block),
    /// None; one of another length, if there was any, has to make room.
    Miss { _unused: Option<Block> },
}

impl SpareBlocks {
    /// Takes a block of this order.
    pub(crate) fn take(&mut self, order: u8) -> CacheLookup {
        let found = self.blocks[order as usize].pop();
        if let Some(block) = found {
            self.kept_bytes -= block.len_bytes();
            return CacheLookup::Hit(block);
        }
        let unused = self.blocks.iter_mut().rev().find_map(Vec::pop);
        self.kept_bytes -= unused.as_ref().map_or(0, Block::len_bytes);
        CacheLookup::Miss { _unused: unused }
    }

    /// Keeps a block, or returns it.
    pub(crate) fn keep(&mut self, block: Block) -> Result<(), Block> {
        let len = block.len_bytes();
        match order_for(len).filter(|&order| bytes_of(order) == len) {
            Some(order) if len >= LEAST_BYTES && self.kept_bytes + len <= KEPT_BYTES => {
                self.blocks[order as usize].push(block);
                self.kept_bytes += len;
                Ok(())
            }
            _ => Err(block),
        }
    }

    /// Bytes kept now.
    pub(crate) fn kept_bytes(&self) -> usize {
        self.kept_bytes
    }
}
