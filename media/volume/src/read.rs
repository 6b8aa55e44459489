//! Read, Verify, Checksum and BlockStatus: requests that change nothing.

use std::pin::pin;

use futures_util::stream::{self, Stream, StreamExt};
use sealblock_block::{
    BadBlock, BadBlocks, BlockState, Checksum, Clock, Coverage, Error, Medium, Outcome, Response, StatusRuns, Tally,
    Unchecked, VerifyStats, WhyUnchecked,
};
use sealblock_integrity::{Checks, ChecksumKind, Sealed, Unverified};
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_units::{BlockCount, Extent};

use crate::lookup::{BlockLocation, LocatedBlocks};
use crate::volume::Volume;

/// Bytes of the pieces that a Verify is done in, and pieces in flight at once: together they fit in a core's near cache, so
/// that data are summed before they have left it.
const VERIFY_BYTES: u32 = 256 << 10;
const VERIFY_PIECES: usize = 2;

impl<M: Medium, C: Clock> Volume<M, C> {
    pub(crate) async fn read(&self, extent: Extent, checks: &Checks) -> Outcome {
        let (located, _reading) = self.locate(extent).await?;
        self.fetch_located(extent, &located, checks).await.map(Response::Data)
    }

    /// Reads and checks without handing the data on. A bad block does not hide another.
    pub(crate) async fn verify(&self, extent: Extent, checks: &Checks) -> Outcome {
        let mut outcomes = pin!(self.check_pieces(extent, checks, |_, _| ()));
        let (mut bytes_transferred, mut tally) = (0, self.tally(checks));
        while let Some((_, bytes, outcome)) = outcomes.next().await {
            bytes_transferred += bytes;
            if let Err(error) = outcome {
                tally.take(error)?;
            }
        }
        Ok(Response::Verified(VerifyStats { bytes_transferred, coverage: self.finish(extent, tally)? }))
    }

    /// Checks blocks and sums their data. A bad block does not hide another.
    pub(crate) async fn checksum(&self, extent: Extent, kind: ChecksumKind, checks: &Checks) -> Outcome {
        let sum = |bytes, read: Option<Sealed>| read.map_or_else(|| kind.of_zeroes(bytes), |read| read.checksum(kind));
        let mut outcomes = pin!(self.check_pieces(extent, checks, sum));
        let (mut whole, mut tally) = (Checksum { kind, ..Checksum::default() }, self.tally(checks));
        while let Some((piece_bytes, bytes, outcome)) = outcomes.next().await {
            match outcome {
                Ok(part) => {
                    whole.value = kind.combine(whole.value, part, piece_bytes);
                    whole.bytes_transferred += bytes;
                }
                Err(error) => tally.take(error)?,
            }
        }
        whole.coverage = self.finish(extent, tally)?;
        Ok(Response::Checksum(whole))
    }

    /// Checks blocks piece by piece, in order: the bytes of each piece, those that were read for it, and what `see` makes of its
    /// length and its data, which are nothing where all are zeroes.
    fn check_pieces<T>(
        &self,
        extent: Extent,
        checks: &Checks,
        see: impl Fn(u64, Option<Sealed>) -> T + Copy,
    ) -> impl Stream<Item = (u64, u64, Result<T, Error>)> {
        let pieces = self.verify_pieces(extent, checks).map(move |(piece, checks)| async move {
            let piece_bytes = piece.bytes(self.geometry.block_size);
            let (bytes, outcome) = self.check_piece(piece, &checks).await;
            (piece_bytes, bytes, outcome.map(|read| see(piece_bytes, read)))
        });
        stream::iter(pieces).buffered(VERIFY_PIECES)
    }

    /// Where a check begins: it goes as far as there are seals that it is to look at.
    fn tally(&self, checks: &Checks) -> Tally {
        let coverage = Coverage::of(self.geometry.protection.is_some() && checks.guard);
        Tally { coverage, ..Tally::default() }
    }

    /// Where a check ends: nothing tells of writes that are missing, and pages that were read meanwhile may have shown that there are
    /// some.
    fn finish(&self, extent: Extent, mut tally: Tally) -> Result<Coverage, Error> {
        if !self.freshness().is_current() {
            tally.coverage.add(Unchecked::new(extent, WhyUnchecked::LogLost));
        }
        tally.finish()
    }

    /// The pieces that a Verify is done in, each with its checks.
    fn verify_pieces(&self, extent: Extent, checks: &Checks) -> impl Iterator<Item = (Extent, Checks)> {
        let max = BlockCount::new(VERIFY_BYTES >> self.geometry.block_size.shift()).unwrap_or(BlockCount::ONE);
        extent.split_aligned(max).map(move |piece| {
            let first = piece.start().get() - extent.start().get();
            (piece, self.geometry.protection.map_or(*checks, |format| checks.advance(first, format)))
        })
    }

    /// Whether nothing was ever written to the block groups of these blocks, as far as that is known without looking.
    fn is_unwritten(&self, extent: Extent) -> bool {
        let mut groups = self.layout.group_of(extent.start())..=self.layout.group_of(extent.last());
        let is_logged = !self.memtable.is_empty() || !self.block_map.patches.is_empty();
        !is_logged && groups.all(|group| !self.block_map.groups.is_initialized(group))
    }

    /// Checks blocks; also says how many bytes were read for that. Nothing is read, and nothing given, where all are zeroes:
    /// most of a large volume may be like this.
    async fn check_piece(&self, extent: Extent, checks: &Checks) -> (u64, Result<Option<Sealed>, Error>) {
        if self.is_unwritten(extent) {
            return (0, Ok(None));
        }
        self.retry_map_pages(extent);
        match self.locate(extent).await {
            Ok((located, _)) if located.iter().all(|block| matches!(block, BlockLocation::Zeroes)) => (0, Ok(None)),
            Ok((located, _reading)) => {
                let read = self.fetch_located(extent, &located, checks).await;
                (extent.bytes(self.geometry.block_size), read.map(Some))
            }
            Err(error) => (0, Err(error)),
        }
    }

    /// Reads and checks located blocks. The caller holds the read guard on their physical blocks.
    async fn fetch_located(&self, extent: Extent, located: &LocatedBlocks, checks: &Checks) -> Result<Sealed, Error> {
        let size = self.geometry.block_size;
        let buffer = self.medium.buffer(extent.bytes(size) as usize);
        let mut bad_blocks: Vec<BadBlock> = Vec::new();
        let pieces = self.pieces(extent, located);
        let data = self.collect(extent, &pieces, buffer, &mut bad_blocks).await.freeze();
        self.report_bad(extent, located, &data, &mut bad_blocks);
        let tags = self.tags(located);
        let unverified = Unverified::new(data.clone(), tags, size, self.geometry.protection)
            .expect("one tuple was laid beside each block");
        match unverified.verify(checks) {
            Ok(sealed) if bad_blocks.is_empty() => return Ok(sealed),
            Ok(_) => {}
            // Blocks that are bad for a deeper reason come first: their data and tags mean nothing.
            Err(mismatches) => bad_blocks.extend(mismatches.iter().map(|m| BadBlock::of_mismatch(extent.start(), m))),
        }
        Err(BadBlocks::new(bad_blocks).expect("a failed check left a fault").into())
    }

    /// Adds the blocks whose map entries are bad.
    fn report_bad(&self, extent: Extent, located: &LocatedBlocks, data: &Slice, bad_blocks: &mut Vec<BadBlock>) {
        let bytes = self.geometry.block_size.bytes();
        for ((lba, block), data) in extent.iter().zip(located).zip(data.chunks_exact(bytes)) {
            match block {
                BlockLocation::Zeroes | BlockLocation::Stored { .. } => {}
                BlockLocation::Bad(bad_block) => bad_blocks.push(*bad_block),
                BlockLocation::Damaged(raw) => bad_blocks.push(self.diagnose(lba, raw, Some(data))),
            }
        }
    }

    /// One tuple a block; blocks without tags get one that escapes all checks, as deallocated blocks do.
    fn tags(&self, located: &LocatedBlocks) -> Slice {
        let Some(format) = self.geometry.protection else { return Slice::empty() };
        let tuple_bytes = format.tuple_bytes();
        let mut tags = Buffer::zeroed(located.len() * tuple_bytes);
        for (place, block) in tags.chunks_exact_mut(tuple_bytes).zip(located) {
            match block {
                BlockLocation::Stored { tuple, .. } => place.copy_from_slice(&tuple[..tuple_bytes]),
                BlockLocation::Zeroes | BlockLocation::Bad(_) | BlockLocation::Damaged(_) => place.fill(0xff),
            }
        }
        tags.freeze()
    }

    /// Blocks that were never written, or were deallocated, are holes. One of which the block map cannot tell is none, so that who
    /// reads everything else meets its damage.
    pub(crate) async fn allocation(&self, extent: Extent) -> Outcome {
        let mut runs = StatusRuns::default();
        for (piece, _) in self.verify_pieces(extent, &Checks::NONE) {
            if self.is_unwritten(piece) {
                runs.push(piece.blocks(), BlockState::Hole);
                continue;
            }
            match self.locate(piece).await {
                Ok((located, _)) => {
                    let state = |block: &BlockLocation| match block {
                        BlockLocation::Zeroes => BlockState::Hole,
                        BlockLocation::Stored { .. } | BlockLocation::Bad(_) | BlockLocation::Damaged(_) => {
                            BlockState::Allocated
                        }
                    };
                    located.iter().for_each(|block| runs.push(BlockCount::ONE, state(block)));
                }
                Err(error) if error.bad_blocks().is_some() => runs.push(piece.blocks(), BlockState::Allocated),
                Err(error) => return Err(error),
            }
        }
        Ok(Response::BlockStatus(runs.into_vec()))
    }
}
