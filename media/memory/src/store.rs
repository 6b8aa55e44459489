//! What all channels of a device in memory share: its chunks, each behind its own lock.
//!
//! Invariants:
//! - Data and tags of a write change together, under one lock of each chunk: no block is ever seen with another's tag,
//!   also where writes of several cores overlap. Across chunks a write is not whole.
//! - One lock at a time, never across an await, and no longer than a chunk is copied. Chunks are allocated and freed
//!   without it.
//!
//! Larger devices take their chunks from the process's [`Slabs`], so that their writes do not wait for the system.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use sealblock_block::{Geometry, Limits, ReservedArea};
use sealblock_integrity::PiFormat;
use sealblock_runtime_memory::{Buffer, SLAB_CHUNK_BYTES, Slabs, Slice};
use sealblock_units::BlockSize;

use crate::chunk::{Change, Chunk, Part, Shape};
use crate::spares::Spares;
use crate::table::Table;

/// Bytes of data in a chunk: small enough that memory can be freed and that copying one held by a read is cheap, large
/// enough that most reads are within one.
pub(crate) const CHUNK_BYTES: usize = SLAB_CHUNK_BYTES;
/// Devices that are no larger have no use for slabs.
const SMALL_BYTES: u64 = 2 << 20;
/// The number of chunks that a channel takes at once.
const TAKEN_AT_ONCE: usize = 4;
/// Bytes of data in one transfer; the gate splits larger requests.
const TRANSFER_BYTES: usize = 4 << 20;
/// Bytes of one step of a Verify, WriteZeroes or Discard: some hundred microseconds, during which the core does nothing
/// else. The gate splits longer ones.
const STEP_BYTES: usize = 1 << 20;

/// Chunks of one shape, for all cores.
pub(crate) struct Chunks {
    // Dropped before the chunks, so that the thread of the slabs ends first if these are the last.
    slabs: Option<OnceLock<Slabs>>,
    pub(crate) shape: Shape,
    table: Table,
    /// Bytes of data and tags in memory.
    stored_bytes: AtomicU64,
    /// The data of all chunks are in memory, and stay when they are cleared.
    pub(crate) is_preallocated: bool,
}

impl Chunks {
    /// Without content, for so many blocks.
    pub(crate) fn new(shape: Shape, blocks: u64) -> Chunks {
        let bytes = u128::from(blocks) << shape.block_shift;
        let has_slabs = shape.chunk_bytes() == SLAB_CHUNK_BYTES && bytes > u128::from(SMALL_BYTES);
        Chunks {
            slabs: has_slabs.then(OnceLock::new),
            shape,
            table: Table::new(blocks.div_ceil(shape.blocks() as u64)),
            stored_bytes: AtomicU64::new(0),
            is_preallocated: false,
        }
    }

    /// The process's slabs, if the chunks come from there.
    pub(crate) fn slabs(&self) -> Option<&Slabs> {
        Some(self.slabs.as_ref()?.get_or_init(Slabs::open))
    }

    /// No spares yet, for a channel.
    pub(crate) fn spares(&self) -> Spares {
        Spares::new(self.shape.chunk_bytes(), self.shape.tag_bytes())
    }

    /// A chunk that may have something, locked; `None` if nothing near it was ever written.
    #[inline]
    pub(crate) fn lock(&self, chunk: u64) -> Option<MutexGuard<'_, Chunk>> {
        self.table.get(chunk)
    }

    /// Changes the blocks of a part under one lock. `change` gets all bytes of the chunk; those of the part may be any
    /// before, and must all be written. The blocks have no marks then, unless `change` sets some.
    #[inline]
    pub(crate) fn change(&self, part: &Part, spares: &mut Spares, change: impl FnOnce(&mut Change, &mut Chunk)) {
        self.top_up(spares);
        let mut chunk = self.table.get_or_make(part.chunk);
        let before = chunk.stored_bytes(self.shape);
        let mut changed = chunk.begin(self.shape, &part.within, spares);
        change(&mut changed, &mut chunk);
        chunk.finish(changed);
        self.count(before, chunk.stored_bytes(self.shape));
    }

    /// Makes the blocks of a part as if they had never been written.
    pub(crate) fn clear(&self, part: &Part, spares: &mut Spares) {
        let has_something = |chunk: &Chunk| chunk.stored_bytes(self.shape) > 0 || chunk.marks().is_some();
        if self.lock(part.chunk).is_some_and(|chunk| has_something(&chunk)) {
            self.clear_and_mark(part, spares, None);
        }
    }

    /// Makes the blocks of a part as if they had never been written, and marks each.
    pub(crate) fn clear_and_mark(&self, part: &Part, spares: &mut Spares, mark: Option<u8>) {
        self.top_up(spares);
        let mut chunk = self.table.get_or_make(part.chunk);
        let before = chunk.stored_bytes(self.shape);
        let gone = chunk.clear(self.shape, &part.within, spares, self.is_preallocated);
        self.count(before, chunk.stored_bytes(self.shape));
        if let Some(mark) = mark {
            part.within.clone().for_each(|block| chunk.mark(self.shape, block, mark));
        }
        drop(chunk);
        spares.give(gone);
    }

    /// Changes a chunk in another way, if its place was made. Returns what `change` returns.
    pub(crate) fn edit<T>(
        &self,
        chunk: u64,
        spares: &mut Spares,
        change: impl FnOnce(&mut Chunk, &mut Spares) -> T,
    ) -> Option<T> {
        self.top_up(spares);
        Some(change(&mut *self.lock(chunk)?, spares))
    }

    /// Gives a missing chunk zeroed data that it keeps.
    pub(crate) fn fill(&self, chunk: u64, zeroes: Buffer) {
        *self.table.get_or_make(chunk) = Chunk::blank(zeroes);
        self.count(0, self.shape.chunk_bytes() as u64);
    }

    /// Bytes of memory of data and tags.
    pub(crate) fn stored_bytes(&self) -> u64 {
        self.stored_bytes.load(Ordering::Relaxed)
    }

    #[inline]
    fn count(&self, before: u64, after: u64) {
        if before != after {
            // Wraps to the right number, since what is subtracted was added before.
            self.stored_bytes.fetch_add(after.wrapping_sub(before), Ordering::Relaxed);
        }
    }

    /// Makes sure that there are spares for a change of one chunk. Takes no lock of a chunk.
    #[inline]
    fn top_up(&self, spares: &mut Spares) {
        spares.data.top_up(|fresh| match self.slabs() {
            Some(slabs) => slabs.take(TAKEN_AT_ONCE, fresh),
            None => fresh.push(Buffer::zeroed(self.shape.chunk_bytes())),
        });
        if self.shape.tuple_bytes > 0 {
            spares.tags.top_up(|fresh| {
                let mut ones = Buffer::zeroed(self.shape.tag_bytes());
                ones.fill(0xFF);
                fresh.push(ones);
            });
        }
    }
}

/// The blocks of a device in memory, which any number of [`crate::MemoryDevice`]s, one for each core, give access to.
pub struct MemoryStore {
    geometry: Geometry,
    pub(crate) chunks: Chunks,
    reserved: Mutex<BTreeMap<ReservedArea, Slice>>,
}

impl MemoryStore {
    /// `capacity_blocks` blocks that read as zeroes. No memory is taken yet.
    pub fn new(block_size: BlockSize, capacity_blocks: u64, protection: Option<PiFormat>) -> MemoryStore {
        let in_place = Limits::new(block_size, STEP_BYTES, (STEP_BYTES >> block_size.shift()) as u32);
        let limits =
            Limits { max_transfer_blocks: Limits::new(block_size, TRANSFER_BYTES, 1).max_transfer_blocks, ..in_place };
        let shape = Shape {
            block_shift: block_size.shift(),
            chunk_shift: CHUNK_BYTES.ilog2() - block_size.shift(),
            tuple_bytes: protection.map_or(0, PiFormat::tuple_bytes),
        };
        MemoryStore {
            geometry: Geometry { block_size, capacity_blocks, protection, limits },
            chunks: Chunks::new(shape, capacity_blocks),
            reserved: Mutex::default(),
        }
    }

    /// The geometry of the device.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Bytes of memory of stored data and tags.
    pub fn stored_bytes(&self) -> u64 {
        self.chunks.stored_bytes()
    }

    /// The content of a reserved area, empty if it was never written.
    pub(crate) fn reserved(&self, area: ReservedArea) -> Slice {
        self.areas().get(&area).cloned().unwrap_or_else(Slice::empty)
    }

    /// Replaces the content of a reserved area.
    pub(crate) fn set_reserved(&self, area: ReservedArea, bytes: &[u8]) {
        let bytes = Slice::copy_from(bytes);
        self.areas().insert(area, bytes);
    }

    fn areas(&self) -> MutexGuard<'_, BTreeMap<ReservedArea, Slice>> {
        // An insertion is whole or did not happen.
        self.reserved.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
