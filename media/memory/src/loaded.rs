//! How blocks get from a store to responses, and from requests to a store: the state of a channel.
//!
//! Invariants: data, tags and marks of a response are from one moment for each chunk. Memory of responses is allocated
//! before the lock of a chunk is taken.
//!
//! Reads share the bytes of a chunk and copy nothing, if all is in one chunk, and unless a change had to copy it
//! lately because of such a read. Zeroes come from the channel's own buffer: all cores would otherwise change the
//! count of one.

use std::ops::Range;

use sealblock_integrity::Sealed;
use sealblock_runtime_memory::{Buffer, Pool, Slice};

use crate::chunk::{Change, Chunk, Part, Shape};
use crate::spares::Spares;
use crate::store::Chunks;

/// Up to this many bytes of tags are copied: that costs less than sharing them, and writes to neighbouring blocks need
/// not copy.
const COPIED_TAG_BYTES: usize = 512;

/// Marks of blocks, counted from the first one of the range.
pub(crate) type Marks = Vec<(usize, u8)>;

/// Blocks as stored.
pub(crate) struct Loaded {
    pub(crate) data: Slice,
    pub(crate) tags: Slice,
    pub(crate) marks: Marks,
}

/// Blocks of one chunk as stored.
pub(crate) struct Peeked {
    /// `None` for zeroes that nothing is stored of.
    pub(crate) data: Option<Slice>,
    /// `None` for ones that nothing is stored of.
    pub(crate) tags: Option<Slice>,
    pub(crate) marks: Marks,
}

/// What a device has for itself, beside the store.
pub(crate) struct Channel {
    pub(crate) spares: Spares,
    pool: Option<Pool>,
    /// Bytes to share, as many as were needed so far.
    zeroes: Slice,
    ones: Slice,
}

impl Channel {
    /// Without any memory.
    pub(crate) fn new(chunks: &Chunks) -> Channel {
        Channel { spares: chunks.spares(), pool: None, zeroes: Slice::empty(), ones: Slice::empty() }
    }

    /// Copied responses are in buffers of this pool from now on.
    pub(crate) fn set_pool(&mut self, pool: Pool) {
        self.pool = Some(pool);
    }

    fn buffer(&self, length_bytes: usize) -> Buffer {
        match &self.pool {
            Some(pool) => pool.take(length_bytes),
            None => Buffer::zeroed(length_bytes),
        }
    }

    /// The blocks from `start` on.
    #[inline]
    pub(crate) fn load(&mut self, chunks: &Chunks, start: u64, blocks: u64) -> Loaded {
        let (shape, length_bytes) = (chunks.shape, (blocks as usize) << chunks.shape.block_shift);
        let tag_bytes = blocks as usize * shape.tuple_bytes;
        self.spares.look();
        if !self.spares.hold_much() {
            let mut parts = shape.parts(start, blocks);
            let shared = match (parts.next(), parts.next()) {
                (Some(part), None) => self.share(chunks, &part, length_bytes, tag_bytes),
                _ => is_blank(chunks, shape.parts(start, blocks)).then(|| self.blank(length_bytes, tag_bytes)),
            };
            if let Some(shared) = shared {
                return shared;
            }
        }
        self.copy(chunks, shape.parts(start, blocks), length_bytes, tag_bytes)
    }

    /// Blocks of one chunk, of which long tags and all data are the stored ones; `None` if they should be copied.
    fn share(&mut self, chunks: &Chunks, part: &Part, length_bytes: usize, tag_bytes: usize) -> Option<Loaded> {
        // Buffers of this length on the heap are reused without a lock, those of a pool only under its lock.
        let mut short_tags = Buffer::zeroed(if tag_bytes <= COPIED_TAG_BYTES { tag_bytes } else { 0 });
        let Some(mut chunk) = chunks.lock(part.chunk) else { return Some(self.blank(length_bytes, tag_bytes)) };
        if chunk.should_copy(length_bytes) {
            return None;
        }
        let data = chunk.data().map(|data| data.slice(chunks.shape.data_of(&part.within)));
        let mut long_tags = None;
        match chunk.tags().map(|tags| (tags, chunks.shape.tags_of(&part.within))) {
            Some((tags, range)) if tag_bytes <= COPIED_TAG_BYTES => short_tags.copy_from_slice(&tags[range]),
            Some((tags, range)) => long_tags = Some(tags.slice(range)),
            None if tag_bytes > 0 => short_tags.fill(0xFF),
            None => {}
        }
        let marks = marks(&chunk, part);
        drop(chunk);
        let data = data.unwrap_or_else(|| constant(&mut self.zeroes, 0, length_bytes));
        let tags = match long_tags {
            Some(tags) => tags,
            None if tag_bytes <= COPIED_TAG_BYTES => short_tags.freeze(),
            None => constant(&mut self.ones, 0xFF, tag_bytes),
        };
        Some(Loaded { data, tags, marks })
    }

    /// Blocks that nothing is stored of.
    fn blank(&mut self, length_bytes: usize, tag_bytes: usize) -> Loaded {
        let tags = constant(&mut self.ones, 0xFF, tag_bytes);
        Loaded { data: constant(&mut self.zeroes, 0, length_bytes), tags, marks: Vec::new() }
    }

    /// A copy of blocks.
    fn copy(
        &mut self,
        chunks: &Chunks,
        parts: impl Iterator<Item = Part>,
        length_bytes: usize,
        tag_bytes: usize,
    ) -> Loaded {
        let mut data = self.buffer(length_bytes);
        let mut tags = if tag_bytes <= COPIED_TAG_BYTES { Buffer::zeroed(tag_bytes) } else { self.buffer(tag_bytes) };
        let mut all = Vec::new();
        for part in parts {
            let data = &mut data[chunks.shape.data_of(&part.of_whole)];
            let tags = &mut tags[chunks.shape.tags_of(&part.of_whole)];
            match chunks.lock(part.chunk) {
                Some(chunk) => {
                    chunk.read(chunks.shape, &part.within, data, tags);
                    all.extend(marks(&chunk, &part));
                }
                None => {
                    data.fill(0);
                    tags.fill(0xFF);
                }
            }
        }
        Loaded { data: data.freeze(), tags: tags.freeze(), marks: all }
    }

    /// The blocks from `start` on, which are in one chunk, without copying, for as long as one request is executed.
    pub(crate) fn peek(&self, chunks: &Chunks, start: u64, blocks: u64) -> Peeked {
        let mut peeked = Peeked { data: None, tags: None, marks: Vec::new() };
        let found = chunks.shape.parts(start, blocks).next();
        if let Some((part, chunk)) = found.and_then(|part| chunks.lock(part.chunk).map(|chunk| (part, chunk))) {
            peeked.data = chunk.data().map(|data| data.slice(chunks.shape.data_of(&part.within)));
            peeked.tags = chunk.tags().map(|tags| tags.slice(chunks.shape.tags_of(&part.within)));
            peeked.marks = marks(&chunk, &part);
        }
        peeked
    }
}

/// True if nothing is stored in any of these parts.
fn is_blank(chunks: &Chunks, mut parts: impl Iterator<Item = Part>) -> bool {
    let is_empty = |chunk: &Chunk| chunk.data().is_none() && chunk.tags().is_none() && chunk.marks().is_none();
    parts.all(|part| chunks.lock(part.chunk).is_none_or(|chunk| is_empty(&chunk)))
}

/// The marks of a part.
#[inline]
fn marks(chunk: &Chunk, part: &Part) -> Marks {
    let Some(marks) = chunk.marks() else { return Vec::new() };
    let marked = part.of_whole.clone().zip(&marks[part.within.clone()]).filter(|(_, mark)| **mark != 0);
    marked.map(|(block, mark)| (block, *mark)).collect()
}

/// `length_bytes` fill bytes, from a shared buffer that grows when it is too short.
fn constant(shared: &mut Slice, fill: u8, length_bytes: usize) -> Slice {
    if shared.len() < length_bytes {
        let mut buffer = Buffer::zeroed(length_bytes.next_power_of_two());
        if fill != 0 {
            buffer.fill(fill);
        }
        *shared = buffer.freeze();
    }
    shared.slice(..length_bytes)
}

/// Sealed blocks that are copied to a store, one part after the other.
pub(crate) struct Source<'a, I> {
    shape: Shape,
    /// Data and tags.
    segments: I,
    /// What is left of the segment that was begun.
    data: &'a [u8],
    tags: &'a [u8],
}

/// The source of all of these blocks.
pub(crate) fn source_of<'a>(
    sealed: &'a Sealed,
    shape: Shape,
) -> Source<'a, impl Iterator<Item = (&'a [u8], &'a [u8])>> {
    let segments = sealed.segments().iter().map(|segment| (&segment.data[..], &segment.tags[..]));
    Source { shape, segments, data: &[], tags: &[] }
}

impl<'a, I: Iterator<Item = (&'a [u8], &'a [u8])>> Source<'a, I> {
    /// Copies the next blocks to this place of a chunk.
    pub(crate) fn copy(&mut self, mut to: Range<usize>, bytes: &mut Change) {
        while !to.is_empty() {
            if self.data.is_empty() {
                (self.data, self.tags) = self.segments.next().expect("as many blocks as the extent has");
            }
            let blocks = to.len().min(self.data.len() >> self.shape.block_shift);
            let step = to.start..to.start + blocks;
            let (data, tags) = (self.shape.data_of(&(0..blocks)), self.shape.tags_of(&(0..blocks)));
            let ((data, rest), (tags, tags_rest)) = (self.data.split_at(data.end), self.tags.split_at(tags.end));
            bytes.data[self.shape.data_of(&step)].copy_from_slice(data);
            if self.shape.tuple_bytes > 0 {
                bytes.tags[self.shape.tags_of(&step)].copy_from_slice(tags);
            }
            (self.data, self.tags, to.start) = (rest, tags_rest, step.end);
        }
    }
}
