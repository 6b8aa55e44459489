//! Reads the data of a request from its physical blocks into one buffer.
//!
//! Blocks in contiguous physical blocks are read directly to their position in the buffer. If a request consists of
//! many pieces that are close together, as extents are after small overwrites (see `free_map`), they are read together
//! with what is between them, and copied out.

use futures_util::future::join_all;
use futures_util::stream::{FuturesUnordered, StreamExt};
use sealblock_block::{BadBlock, Clock, Medium};
use sealblock_runtime_memory::Buffer;
use sealblock_units::{Extent, Lba};
use smallvec::SmallVec;

use crate::format::MapEntry;
use crate::requests::lookup::{BlockLocation, LocatedBlocks};
use crate::volume::Volume;

/// The largest gap between two pieces that is read with them, because that is cheaper than another request.
const GAP_BYTES: u64 = 8 << 10;
/// Bytes that are read at once if pieces are copied out: they fit in a core's near cache.
const SPAN_BYTES: u64 = 256 << 10;

/// Blocks of a request whose data are in contiguous physical blocks, or that read as zeroes.
pub(crate) struct ReadPiece {
    first: usize,
    blocks: usize,
    pbn: Option<u32>,
}

/// The pieces of a request; usually one.
pub(crate) type ReadPieces = SmallVec<[ReadPiece; 1]>;

/// Pieces that are read together, with the bytes between them.
struct Span<'a> {
    offset: u64,
    end: u64,
    /// Each with its offset on the medium.
    members: Vec<(u64, &'a ReadPiece)>,
}

impl<M: Medium, C: Clock> Volume<M, C> {
    /// Splits an extent where its physical blocks are not contiguous.
    pub(crate) fn pieces(&self, extent: Extent, located: &LocatedBlocks) -> ReadPieces {
        let mut pieces = ReadPieces::new();
        for (index, (lba, block)) in extent.iter().zip(located).enumerate() {
            let pbn = match block {
                BlockLocation::Stored(entry) => Some(entry.pbn),
                BlockLocation::Damaged(raw) => {
                    let entry = MapEntry::decode_unchecked(raw);
                    self.layout.holds(&MapEntry { lba, ..entry }).then_some(entry.pbn)
                }
                BlockLocation::Zeroes | BlockLocation::Bad(_) => None,
            };
            let crosses = self.index_in_group(lba) == 0;
            match pieces.last_mut() {
                Some(piece) if !crosses && piece.pbn.map(|first| first + piece.blocks as u32) == pbn => {
                    piece.blocks += 1;
                }
                _ => pieces.push(ReadPiece { first: index, blocks: 1, pbn }),
            }
        }
        pieces
    }

    async fn fill_all(
        &self,
        extent: Extent,
        pieces: &[ReadPiece],
        mut rest: Buffer,
        bad_blocks: &mut Vec<BadBlock>,
    ) -> Buffer {
        let shift = self.geometry.block_size.shift();
        let fills = pieces.iter().map(|piece| {
            let part = rest.split_to(piece.blocks << shift);
            async move {
                let mut bad_blocks = Vec::new();
                (self.fill(extent, piece, part, &mut bad_blocks).await, bad_blocks)
            }
        });
        let mut whole: Option<Buffer> = None;
        for (part, found) in join_all(fills).await {
            bad_blocks.extend(found);
            whole = Some(match whole {
                Some(buffer) => buffer.try_join(part).expect("parts of one buffer in order join again"),
                None => part,
            });
        }
        whole.unwrap_or(rest)
    }

    /// Reads one piece. If the medium fails, it reads block by block, so that the error names exactly the unreadable
    /// blocks.
    async fn fill(&self, extent: Extent, piece: &ReadPiece, buffer: Buffer, bad_blocks: &mut Vec<BadBlock>) -> Buffer {
        let Some(pbn) = piece.pbn else {
            let mut buffer = buffer;
            buffer.fill(0);
            return buffer;
        };
        let first = extent.start().checked_add(piece.first as u64).expect("pieces lie in the extent");
        let offset = self.pbn_offset(self.layout.group_of(first), pbn);
        match self.medium.read(offset, buffer).await {
            (Ok(()), buffer) => buffer,
            (Err(_), buffer) => Box::pin(self.fill_one_by_one(first, piece.blocks, offset, buffer, bad_blocks)).await,
        }
    }

    /// Reads contiguous physical blocks one by one.
    #[cold]
    async fn fill_one_by_one(
        &self,
        first: Lba,
        blocks: usize,
        offset: u64,
        mut buffer: Buffer,
        bad_blocks: &mut Vec<BadBlock>,
    ) -> Buffer {
        let bytes = self.geometry.block_size.bytes();
        for block in 0..blocks {
            let (result, got) = self.medium.read(offset + (block * bytes) as u64, self.medium.buffer(bytes)).await;
            match result {
                Ok(()) => buffer[block * bytes..(block + 1) * bytes].copy_from_slice(&got),
                Err(_) => {
                    buffer[block * bytes..(block + 1) * bytes].fill(0);
                    bad_blocks.extend(first.checked_add(block as u64).map(BadBlock::media));
                }
            }
        }
        buffer
    }

    /// Reads all pieces of an extent. Blocks that cannot be read become zeroes and bad blocks.
    pub(crate) async fn collect(
        &self,
        extent: Extent,
        pieces: &[ReadPiece],
        buffer: Buffer,
        bad_blocks: &mut Vec<BadBlock>,
    ) -> Buffer {
        if let [piece] = pieces {
            return self.fill(extent, piece, buffer, bad_blocks).await;
        }
        let spans = self.spans(extent, pieces);
        if spans.len() * 2 > pieces.len() {
            return Box::pin(self.fill_all(extent, pieces, buffer, bad_blocks)).await;
        }
        Box::pin(self.gather(extent, pieces, spans, buffer, bad_blocks)).await
    }

    /// The offset of a piece on the medium.
    fn place_of(&self, extent: Extent, piece: &ReadPiece) -> Option<u64> {
        let first = extent.start().checked_add(piece.first as u64)?;
        piece.pbn.map(|pbn| self.pbn_offset(self.layout.group_of(first), pbn))
    }

    /// Groups pieces that are close together.
    fn spans<'a>(&self, extent: Extent, pieces: &'a [ReadPiece]) -> Vec<Span<'a>> {
        let mut placed: Vec<(u64, &ReadPiece)> =
            pieces.iter().filter_map(|piece| Some((self.place_of(extent, piece)?, piece))).collect();
        placed.sort_unstable_by_key(|(offset, _)| *offset);
        let mut spans: Vec<Span<'a>> = Vec::new();
        for (offset, piece) in placed {
            let end = offset + ((piece.blocks as u64) << self.geometry.block_size.shift());
            match spans.last_mut() {
                Some(span) if offset <= span.end + GAP_BYTES && end <= span.offset + SPAN_BYTES => {
                    // Two map entries may name the same physical block if map pages were damaged.
                    span.end = span.end.max(end);
                    span.members.push((offset, piece));
                }
                _ => spans.push(Span { offset, end, members: vec![(offset, piece)] }),
            }
        }
        spans
    }

    /// Reads spans and copies the pieces out of them. A span that cannot be read is read piece by piece.
    async fn gather<'a>(
        &self,
        extent: Extent,
        pieces: &'a [ReadPiece],
        spans: Vec<Span<'a>>,
        mut buffer: Buffer,
        bad_blocks: &mut Vec<BadBlock>,
    ) -> Buffer {
        let shift = self.geometry.block_size.shift();
        let place = |piece: &ReadPiece| piece.first << shift..(piece.first + piece.blocks) << shift;
        pieces.iter().filter(|piece| piece.pbn.is_none()).for_each(|piece| buffer[place(piece)].fill(0));
        let reads = spans.into_iter().map(|span| async {
            let into = self.medium.buffer((span.end - span.offset) as usize);
            (self.medium.read(span.offset, into).await, span)
        });
        let mut reads: FuturesUnordered<_> = reads.collect();
        while let Some(((result, bytes), span)) = reads.next().await {
            for (offset, piece) in &span.members {
                let (to, from) = (place(piece), (offset - span.offset) as usize);
                if result.is_ok() {
                    buffer[to.clone()].copy_from_slice(&bytes[from..from + to.len()]);
                } else {
                    let part = self.fill(extent, piece, self.medium.buffer(to.len()), bad_blocks).await;
                    buffer[to].copy_from_slice(&part);
                }
            }
        }
        buffer
    }
}
