//! Requests that begin or end within a block, as clients send them by default.
//!
//! Devices have no unit smaller than a block. So to change a part of a block, this code reads the block, changes it and
//! writes it as a whole, while nothing else can change it. Invariants: the block is checked against its tags before it
//! gets new ones, so a damaged block is an error and stays damaged. A block that is read is written once, as a whole,
//! so a crash leaves the old or the new one. A session that has ended meanwhile writes nothing, because its changes
//! fail.
//!
//! The rest of the request is executed as whole blocks, without a copy, so a request needs only two blocks of
//! additional memory.

use std::cell::Cell;
use std::ops::Range;

use sealblock_block::{Durability, Expectations, Request, Response};
use sealblock_protocols_nbd::ErrorCode;
use sealblock_runtime_memory::Slice;
use sealblock_runtime_reactor::pool;
use sealblock_units::{Extent, Lba};

use crate::translate::{FailedRequest, OpenExport, PIECE_BYTES, Reply, durability};

/// What a part of a block becomes.
enum Content {
    Data(Slice),
    Zeroes,
}

/// A part of one block.
struct BlockPart {
    lba: Lba,
    /// Which bytes of the block.
    within: Range<usize>,
    /// Which bytes of the request go there.
    source: Range<usize>,
}

/// A range of bytes, divided into whole and partial blocks.
struct Parts {
    /// The block within which it begins, and the one within which it ends.
    partial: Vec<BlockPart>,
    /// The bytes of the export that are whole blocks; can be empty.
    whole: Range<u64>,
}

impl Parts {
    fn of(offset: u64, length: u64, shift: u32) -> Parts {
        let (block, end) = (1u64 << shift, offset + length);
        let (first, last) = (offset.next_multiple_of(block), end - end % block);
        let part = |from: u64, to: u64| {
            let start = from - from % block;
            BlockPart {
                lba: Lba::new(start >> shift),
                within: (from - start) as usize..(to - start) as usize,
                source: (from - offset) as usize..(to - offset) as usize,
            }
        };
        if first > last {
            return Parts { partial: vec![part(offset, end)], whole: first..first };
        }
        let head = (offset < first).then(|| part(offset, first));
        let tail = (last < end).then(|| part(last, end));
        Parts { partial: head.into_iter().chain(tail).collect(), whole: first..last }
    }
}

impl OpenExport {
    /// Writes bytes that begin or end within a block.
    pub(crate) async fn write_bytes(&self, offset: u64, data: Slice, fua: bool) -> Result<Reply, FailedRequest> {
        let Parts { partial, whole } = Parts::of(offset, data.len() as u64, self.block_shift());
        for part in partial {
            self.modify(&part, Content::Data(data.slice(part.source.clone())), fua).await?;
        }
        if !whole.is_empty() {
            let extent = self.extent(whole.start, whole.end - whole.start)?;
            let source = (whole.start - offset) as usize..(whole.end - offset) as usize;
            self.run_request(self.write_of(extent, data.slice(source), fua)).await?;
        }
        Ok(Reply::Done)
    }

    /// Zeroes bytes that may begin or end within a block.
    pub(crate) async fn zero_bytes(
        &self,
        (offset, length): (u64, u64),
        may_unmap: bool,
        fua: bool,
        is_gone: &Cell<bool>,
    ) -> Result<Reply, FailedRequest> {
        let Parts { partial, whole } = Parts::of(offset, length, self.block_shift());
        for part in partial {
            self.modify(&part, Content::Zeroes, fua).await?;
        }
        let zero = |extent| Request::write_zeroes(extent, may_unmap, durability(fua));
        self.in_pieces(whole.start, whole.end - whole.start, PIECE_BYTES, is_gone, zero).await
    }

    /// The whole blocks within a range of bytes, as offset and length; a device cannot discard the rest.
    pub(crate) fn whole_blocks(&self, offset: u64, length: u64) -> (u64, u64) {
        let whole = Parts::of(offset, length, self.block_shift()).whole;
        (whole.start, whole.end - whole.start)
    }

    /// The blocks that contain a range of bytes, as offset and length.
    pub(crate) fn covering(&self, offset: u64, length: u64) -> (u64, u64) {
        let block = 1u64 << self.block_shift();
        let (start, end) = (offset - offset % block, (offset + length).next_multiple_of(block));
        (start, end - start)
    }

    /// Changes a part of a block while changes of it are excluded.
    async fn modify(&self, part: &BlockPart, content: Content, fua: bool) -> Result<(), FailedRequest> {
        let extent = Extent::one(part.lba);
        let locked = self.device.lock(extent).await;
        let read = locked.execute(Request::read(extent, Expectations::NONE)).await;
        let before = match read.map_err(|error| self.error_reply(&error))? {
            Response::Data(sealed) => sealed.joined_data(),
            // Only a broken device returns another response to a read.
            _ => return Err(ErrorCode::Io.into()),
        };
        let is_zero_already = before[part.within.clone()].iter().all(|byte| *byte == 0);
        let request = match content {
            // A block that was never written stays unwritten.
            Content::Zeroes if is_zero_already && durability(fua) == Durability::Volatile => return Ok(()),
            Content::Zeroes if is_zero_already => Request::flush(),
            content => {
                let mut block = pool().take(before.len());
                block.copy_from_slice(&before);
                match content {
                    Content::Data(data) => block[part.within.clone()].copy_from_slice(&data),
                    Content::Zeroes => block[part.within.clone()].fill(0),
                }
                self.write_of(extent, block.freeze(), fua)
            }
        };
        locked.execute(request).await.map(drop).map_err(|error| self.error_reply(&error).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A block, which of its bytes, and which bytes of the request go there.
    type Part = (u64, Range<usize>, Range<usize>);

    /// The partial blocks of a range, with blocks of 4096 bytes, and the whole blocks.
    fn parts(offset: u64, length: u64) -> (Vec<Part>, Range<u64>) {
        let Parts { partial, whole } = Parts::of(offset, length, 12);
        (partial.into_iter().map(|part| (part.lba.get(), part.within, part.source)).collect(), whole)
    }

    #[test]
    fn a_range_has_two_partial_blocks_at_most_and_every_byte_is_in_one_part() {
        assert_eq!(parts(4096, 8192), (vec![], 4096..12288));
        assert_eq!(parts(10, 4), (vec![(0, 10..14, 0..4)], 4096..4096));
        assert_eq!(parts(0, 4095), (vec![(0, 0..4095, 0..4095)], 0..0));
        assert_eq!(parts(4095, 2), (vec![(0, 4095..4096, 0..1), (1, 0..1, 1..2)], 4096..4096));
        assert_eq!(parts(1, 12288), (vec![(0, 1..4096, 0..4095), (3, 0..1, 12287..12288)], 4096..12288));
        assert_eq!(parts(8192, 4097), (vec![(3, 0..1, 4096..4097)], 8192..12288));
        for (offset, length) in [(0, 1), (511, 9000), (4096, 4096), (4000, 96), (4000, 97), (12287, 1)] {
            let (partial, whole) = parts(offset, length);
            let in_partial: u64 = partial.iter().map(|(_, within, _)| within.len() as u64).sum();
            assert_eq!(in_partial + (whole.end - whole.start), length, "{offset} {length}");
            assert!(partial.iter().all(|(_, within, source)| within.len() == source.len() && within.len() < 4096));
        }
    }
}
