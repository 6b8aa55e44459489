//! One chunk of a store: blocks that are next to each other, with their tags and marks, as they are behind its lock.
//!
//! Invariants: what is missing reads as zeroes (data), ones (tags) and no marks. Bytes that were shared never change:
//! a change replaces them by a copy while a slice of them exists. A blank chunk's bytes are all zeroes. No operation
//! allocates or frees data: what it needs comes from the spares of its caller, and what is left over goes there.

use std::ops::Range;

use sealblock_runtime_memory::{Buffer, Slice};

use crate::spares::{Spare, Spares};

/// Once a partial change had to copy a shared chunk, this many short reads in a row copy what they read.
const COPIED_READS: u8 = 64;
/// Longer reads share even then: to copy them costs as much as what it saves.
const SHORT_READ_BYTES: usize = 16 << 10;

/// The lengths of the chunks of a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Shape {
    /// The power of two of the bytes of a block.
    pub(crate) block_shift: u32,
    /// The power of two of the blocks of a chunk.
    pub(crate) chunk_shift: u32,
    /// Bytes of the tag of a block; 0 without tags.
    pub(crate) tuple_bytes: usize,
}

/// A range of blocks within one chunk.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Part {
    /// The chunk.
    pub(crate) chunk: u64,
    /// The blocks, from the first one of the chunk.
    pub(crate) within: Range<usize>,
    /// The same blocks, from the first one of the whole range.
    pub(crate) of_whole: Range<usize>,
}

/// See the module's header.
#[derive(Default)]
pub(crate) struct Chunk {
    data: Option<Slice>,
    more: Option<Box<More>>,
    /// The data were never written or were cleared, and are kept because their memory was asked for ahead.
    is_blank: bool,
    /// How many more short reads copy.
    copied_reads: u8,
}

/// What only some chunks have.
#[derive(Default)]
struct More {
    tags: Option<Slice>,
    /// A mark for each block, 0 for none.
    marks: Option<Box<[u8]>>,
}

/// A chunk's bytes while they are changed.
pub(crate) struct Change {
    /// Data of all blocks.
    pub(crate) data: Buffer,
    /// Tags of all blocks; empty without tags.
    pub(crate) tags: Buffer,
}

impl Shape {
    /// Bytes of the data of a chunk.
    pub(crate) fn chunk_bytes(self) -> usize {
        1 << (self.block_shift + self.chunk_shift)
    }

    /// Bytes of the tags of a chunk.
    pub(crate) fn tag_bytes(self) -> usize {
        self.tuple_bytes << self.chunk_shift
    }

    /// Blocks of a chunk.
    pub(crate) fn blocks(self) -> usize {
        1 << self.chunk_shift
    }

    /// The bytes of data of these blocks.
    pub(crate) fn data_of(self, blocks: &Range<usize>) -> Range<usize> {
        blocks.start << self.block_shift..blocks.end << self.block_shift
    }

    /// The bytes of the tags of these blocks.
    pub(crate) fn tags_of(self, blocks: &Range<usize>) -> Range<usize> {
        blocks.start * self.tuple_bytes..blocks.end * self.tuple_bytes
    }

    /// The range of blocks split at the edges of chunks.
    pub(crate) fn parts(self, start: u64, blocks: u64) -> impl Iterator<Item = Part> {
        let mut done = 0;
        std::iter::from_fn(move || {
            let at = start.checked_add(done).filter(|_| done < blocks)?;
            let (chunk, first) = (at >> self.chunk_shift, (at & (self.blocks() as u64 - 1)) as usize);
            let count = (blocks - done).min((self.blocks() - first) as u64);
            let of_whole = done as usize..(done + count) as usize;
            done += count;
            Some(Part { chunk, within: first..first + count as usize, of_whole })
        })
    }
}

impl Chunk {
    /// A chunk of zeroes that keeps its memory.
    pub(crate) fn blank(zeroes: Buffer) -> Chunk {
        Chunk { data: Some(zeroes.freeze()), is_blank: true, ..Chunk::default() }
    }

    /// A chunk with these data.
    #[cfg(test)]
    pub(crate) fn written(data: Buffer) -> Chunk {
        Chunk { data: Some(data.freeze()), ..Chunk::default() }
    }

    /// The data; `None` if all are zeroes because they were never written, or were cleared.
    #[inline]
    pub(crate) fn data(&self) -> Option<&Slice> {
        self.data.as_ref().filter(|_| !self.is_blank)
    }

    /// The tags; `None` if all are ones because they were never written, or were cleared.
    #[inline]
    pub(crate) fn tags(&self) -> Option<&Slice> {
        self.more.as_ref()?.tags.as_ref()
    }

    /// The marks; `None` without any.
    #[inline]
    pub(crate) fn marks(&self) -> Option<&[u8]> {
        self.more.as_ref()?.marks.as_deref()
    }

    /// Bytes of memory of data and tags.
    #[inline]
    pub(crate) fn stored_bytes(&self, shape: Shape) -> u64 {
        let data = if self.data.is_some() { shape.chunk_bytes() } else { 0 };
        let tags = if self.tags().is_some() { shape.tag_bytes() } else { 0 };
        (data + tags) as u64
    }

    /// True if a read of this length should copy: changes and readers that share meet here.
    #[inline]
    pub(crate) fn should_copy(&mut self, length_bytes: usize) -> bool {
        if self.copied_reads == 0 || length_bytes > SHORT_READ_BYTES {
            return false;
        }
        self.copied_reads -= 1;
        true
    }

    /// Copies data and tags of a range of blocks.
    pub(crate) fn read(&self, shape: Shape, blocks: &Range<usize>, data: &mut [u8], tags: &mut [u8]) {
        match self.data() {
            Some(stored) => data.copy_from_slice(&stored[shape.data_of(blocks)]),
            None => data.fill(0),
        }
        match self.tags() {
            Some(stored) => tags.copy_from_slice(&stored[shape.tags_of(blocks)]),
            None => tags.fill(0xFF),
        }
    }

    /// Makes data and tags exist for a change of these blocks, with no other handle on them, and removes the blocks'
    /// marks. [`Chunk::finish`] must follow. If all blocks are to be changed, their bytes may be any.
    pub(crate) fn begin(&mut self, shape: Shape, blocks: &Range<usize>, spares: &mut Spares) -> Change {
        let is_whole = blocks.len() == shape.blocks();
        let (data, was_copied) = spares.data.unshare(self.data.take(), !is_whole);
        if was_copied || self.copied_reads > 0 {
            self.copied_reads = COPIED_READS;
        }
        let mut tags = Buffer::default();
        if shape.tuple_bytes > 0 {
            tags = spares.tags.unshare(self.more.get_or_insert_default().tags.take(), !is_whole).0;
        }
        self.is_blank = false;
        self.unmark(blocks);
        Change { data, tags }
    }

    /// Ends a change.
    #[inline]
    pub(crate) fn finish(&mut self, change: Change) {
        self.data = Some(change.data.freeze());
        if !change.tags.is_empty() {
            self.more.get_or_insert_default().tags = Some(change.tags.freeze());
        }
    }

    /// Makes blocks as if they had never been written. Memory in which nothing else is left is returned; with `keeps`
    /// that of data stays.
    pub(crate) fn clear(
        &mut self,
        shape: Shape,
        blocks: &Range<usize>,
        spares: &mut Spares,
        keeps: bool,
    ) -> [Option<Slice>; 2] {
        self.unmark(blocks);
        let data = match clear(self.data.take(), shape.data_of(blocks), 0, &mut spares.data) {
            Cleared::Some(data) => {
                self.data = Some(data);
                None
            }
            Cleared::Nothing(Some(data)) if self.is_blank => {
                self.data = Some(data);
                None
            }
            Cleared::Nothing(Some(data)) if keeps => {
                let mut data = spares.data.unshare(Some(data), false).0;
                data.fill(0);
                (self.data, self.is_blank) = (Some(data.freeze()), true);
                None
            }
            Cleared::Nothing(data) => data,
        };
        let Some(more) = self.more.as_deref_mut() else { return [data, None] };
        match clear(more.tags.take(), shape.tags_of(blocks), 0xFF, &mut spares.tags) {
            Cleared::Some(tags) => {
                more.tags = Some(tags);
                [data, None]
            }
            Cleared::Nothing(tags) => [data, tags],
        }
    }

    /// Sets the mark of a block, counted from the first one of the chunk.
    pub(crate) fn mark(&mut self, shape: Shape, block: usize, mark: u8) {
        let marks = &mut self.more.get_or_insert_default().marks;
        marks.get_or_insert_with(|| vec![0; shape.blocks()].into())[block] = mark;
    }

    #[inline]
    fn unmark(&mut self, blocks: &Range<usize>) {
        if let Some(more) = self.more.as_deref_mut()
            && let Some(marks) = &mut more.marks
        {
            marks[blocks.clone()].fill(0);
            if marks.iter().all(|mark| *mark == 0) {
                more.marks = None;
            }
        }
    }

    /// Inverts bits of a byte of the data, if there are any.
    pub(crate) fn flip_data(&mut self, at: usize, mask: u8, spares: &mut Spares) -> bool {
        flip(self.data.as_mut().filter(|_| !self.is_blank), at, mask, &mut spares.data)
    }

    /// Inverts bits of a byte of the tags, if there are any.
    pub(crate) fn flip_tags(&mut self, at: usize, mask: u8, spares: &mut Spares) -> bool {
        flip(self.more.as_deref_mut().and_then(|more| more.tags.as_mut()), at, mask, &mut spares.tags)
    }
}

/// What is left of bytes in which a range was cleared.
enum Cleared {
    /// The bytes: some are no fill bytes.
    Some(Slice),
    /// Nothing; the old bytes, if there were any, are not needed.
    Nothing(Option<Slice>),
}

/// Sets a range to the fill byte.
fn clear(bytes: Option<Slice>, range: Range<usize>, fill: u8, spares: &mut Spare) -> Cleared {
    match bytes {
        Some(bytes) if !is_filled(&bytes[..range.start], fill) || !is_filled(&bytes[range.end..], fill) => {
            let (mut bytes, _) = spares.unshare(Some(bytes), true);
            bytes[range].fill(fill);
            Cleared::Some(bytes.freeze())
        }
        bytes => Cleared::Nothing(bytes),
    }
}

fn is_filled(bytes: &[u8], fill: u8) -> bool {
    // Compared with a constant length, which needs no loop over bytes.
    let wanted = [fill; 64];
    let (lines, rest) = bytes.as_chunks::<64>();
    lines.iter().all(|line| *line == wanted) && rest.iter().all(|byte| *byte == fill)
}

fn flip(bytes: Option<&mut Slice>, at: usize, mask: u8, spares: &mut Spare) -> bool {
    let Some(bytes) = bytes else { return false };
    let (mut changed, _) = spares.unshare(Some(std::mem::take(bytes)), true);
    changed[at] ^= mask;
    *bytes = changed.freeze();
    true
}

#[cfg(test)]
mod tests;
