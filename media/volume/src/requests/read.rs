//! Read, Verify, Checksum and BlockStatus: requests that change nothing.

use std::pin::pin;

use futures_util::stream::{Stream, StreamExt};
use sealblock_block::{
    BadBlock, BadBlocks, BlockState, Checksum, Clock, Coverage, Error, Expectations, Medium, Outcome, Response,
    Salvaged, StatusRuns, Tally, Unchecked, VerifyStats, WhyUnchecked,
};
use sealblock_integrity::{Checks, ChecksumKind, Sealed, Tuple, Unverified};
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_units::{BlockCount, Extent};

use crate::format::MapEntry;
use crate::requests::ahead::{PIECE_BYTES, in_order};
use crate::requests::lookup::{BlockLocation, LocatedBlocks, check_block};
use crate::volume::Volume;

/// Blocks that were read but not checked yet.
struct Fetched {
    data: Slice,
    tags: Slice,
    /// Blocks that are known to be bad without a check of their data.
    bad_blocks: Vec<BadBlock>,
}

/// Blocks that passed all checks.
struct Checked {
    blocks: Sealed,
    /// False if some block had no seal to check it against.
    is_sealed: bool,
}

impl<M: Medium, C: Clock> Volume<M, C> {
    pub(crate) async fn read(&self, extent: Extent, expectations: &Expectations) -> Outcome {
        let (located, _reading) = self.locate(extent).await?;
        self.fetch_checked(extent, &located, expectations).await.map(|checked| Response::Data(checked.blocks))
    }

    /// Returns all blocks that could be read, including bad ones.
    pub(crate) async fn salvage(&self, extent: Extent) -> Outcome {
        let (located, _reading) = self.locate(extent).await?;
        let mut fetched = self.fetch(extent, &located).await;
        let found = std::mem::take(&mut fetched.bad_blocks);
        let (_, bad_blocks) = self.check_seals(&located, &fetched.data, found, |_| false);
        let bad_blocks = BadBlocks::new(bad_blocks).map_or_else(Vec::new, |bad_blocks| bad_blocks.into_parts().0);
        Ok(Response::Salvaged(Salvaged { blocks: self.unchecked(fetched), bad_blocks }))
    }

    /// Reads and checks without returning the data. A bad block does not hide another.
    pub(crate) async fn verify(&self, extent: Extent, expectations: &Expectations) -> Outcome {
        let mut outcomes = pin!(self.check_pieces(extent, expectations, |_, _| ()));
        let (mut bytes_transferred, mut tally) = (0, Tally::default());
        while let Some((_, bytes, outcome)) = outcomes.next().await {
            bytes_transferred += bytes;
            match outcome {
                Ok(((), is_sealed)) => tally.coverage.merge(Coverage::of(is_sealed)),
                Err(error) => tally.take(error)?,
            }
        }
        Ok(Response::Verified(VerifyStats { bytes_transferred, coverage: self.finish(extent, tally)? }))
    }

    /// Checks blocks and checksums their data. A bad block does not hide another.
    pub(crate) async fn checksum(&self, extent: Extent, kind: ChecksumKind, expectations: &Expectations) -> Outcome {
        let sum = |bytes, read: Option<Sealed>| read.map_or_else(|| kind.of_zeroes(bytes), |read| read.checksum(kind));
        let mut outcomes = pin!(self.check_pieces(extent, expectations, sum));
        let (mut whole, mut tally) = (Checksum { kind, ..Checksum::default() }, Tally::default());
        while let Some((piece_bytes, bytes, outcome)) = outcomes.next().await {
            match outcome {
                Ok((part, is_sealed)) => {
                    tally.coverage.merge(Coverage::of(is_sealed));
                    whole.value = kind.combine(whole.value, part, piece_bytes);
                    whole.bytes_transferred += bytes;
                }
                Err(error) => tally.take(error)?,
            }
        }
        whole.coverage = self.finish(extent, tally)?;
        Ok(Response::Checksum(whole))
    }

    /// Checks blocks piece by piece, in order. Returns the bytes of each piece, the bytes that were read for it, the
    /// result of `see` for its length and its data (empty if all are zeroes), and whether every block of it has a seal.
    fn check_pieces<T>(
        &self,
        extent: Extent,
        expectations: &Expectations,
        see: impl Fn(u64, Option<Sealed>) -> T + Copy,
    ) -> impl Stream<Item = (u64, u64, Result<(T, bool), Error>)> {
        let pieces = self.verify_pieces(extent, expectations).map(move |(piece, expectations)| async move {
            let piece_bytes = piece.bytes(self.geometry.block_size);
            let (bytes, outcome) = self.check_piece(piece, &expectations).await;
            let seen = outcome.map(|checked| match checked {
                Some(Checked { blocks, is_sealed }) => (see(piece_bytes, Some(blocks)), is_sealed),
                None => (see(piece_bytes, None), true),
            });
            (piece_bytes, bytes, seen)
        });
        in_order(pieces, self.medium.reads_wait())
    }

    /// Ends a check. If writes may be missing, nothing shows which, so the extent counts as unchecked. Map pages that
    /// were read during the check may have shown that writes are missing.
    fn finish(&self, extent: Extent, mut tally: Tally) -> Result<Coverage, Error> {
        if !self.freshness().is_current() {
            tally.coverage.add(Unchecked::new(extent, WhyUnchecked::LogLost));
        }
        tally.finish()
    }

    /// The pieces of a Verify, each with its expectations.
    fn verify_pieces(
        &self,
        extent: Extent,
        expectations: &Expectations,
    ) -> impl Iterator<Item = (Extent, Expectations)> {
        let max = BlockCount::new(PIECE_BYTES >> self.geometry.block_size.shift()).unwrap_or(BlockCount::ONE);
        extent.split_aligned(max).map(move |piece| {
            let first = piece.start().get() - extent.start().get();
            (piece, expectations.advance(first, self.geometry.protection))
        })
    }

    /// True if the block groups of these blocks are known, without reading, to be unwritten.
    fn is_unwritten(&self, extent: Extent) -> bool {
        let mut groups = self.layout.group_of(extent.start())..=self.layout.group_of(extent.last());
        let is_logged = !self.memtable.is_empty() || !self.block_map.patches.is_empty();
        !is_logged && groups.all(|group| !self.block_map.groups.is_initialized(group))
    }

    /// Checks blocks. Also returns the number of bytes read. Nothing is read if all are zeroes, as may be most of a
    /// large volume.
    async fn check_piece(&self, extent: Extent, expectations: &Expectations) -> (u64, Result<Option<Checked>, Error>) {
        // Of blocks without tags nothing else can be expected than that they have some.
        let may_have_no_tags = !expectations.checks().checks_escapes;
        if may_have_no_tags && self.is_unwritten(extent) {
            return (0, Ok(None));
        }
        self.retry_map_pages(extent);
        let is_zeroes = |block: &BlockLocation| may_have_no_tags && matches!(block, BlockLocation::Zeroes);
        match self.locate(extent).await {
            Ok((located, _)) if located.iter().all(is_zeroes) => (0, Ok(None)),
            Ok((located, _reading)) => {
                let checked = self.fetch_checked(extent, &located, expectations).await;
                (extent.bytes(self.geometry.block_size), checked.map(Some))
            }
            Err(error) => (0, Err(error)),
        }
    }

    /// Reads located blocks. The caller holds the read guard on their physical blocks.
    async fn fetch(&self, extent: Extent, located: &LocatedBlocks) -> Fetched {
        let buffer = self.medium.buffer(extent.bytes(self.geometry.block_size) as usize);
        let mut bad_blocks: Vec<BadBlock> = Vec::new();
        let pieces = self.pieces(extent, located);
        let data = self.collect(extent, &pieces, buffer, &mut bad_blocks).await.freeze();
        self.report_bad(extent, located, &data, &mut bad_blocks);
        Fetched { data, tags: self.tags(located), bad_blocks }
    }

    /// Reads located blocks and checks them, first against the volume's own seals, then the good ones against the
    /// caller's expectations.
    ///
    /// Usually one pass over the tuples checks both. These blocks are then checked one by one: those without tuples,
    /// those whose tuples disable checks, those whose guard does not match because the host wrote it so, and those that
    /// failed.
    async fn fetch_checked(
        &self,
        extent: Extent,
        located: &LocatedBlocks,
        expectations: &Expectations,
    ) -> Result<Checked, Error> {
        let mut fetched = self.fetch(extent, located).await;
        let found = std::mem::take(&mut fetched.bad_blocks);
        let format = self.geometry.protection;
        let both = format.and_then(|format| expectations.joined(&Checks::full(format, extent.start())));
        let passed = both.and_then(|checks| self.unverified(&fetched).verify(&checks).ok());
        let passed = match passed {
            Some(blocks) if blocks.has_verified_guards() && found.is_empty() => {
                return Ok(Checked { blocks, is_sealed: true });
            }
            passed => passed,
        };
        let is_told = |entry: &MapEntry| {
            let is_escaped = |format| Tuple::read(format, entry.tags(format)).is_escaped(format);
            passed.is_some() && !format.is_some_and(is_escaped)
        };
        let (is_sealed, bad_blocks) = self.check_seals(located, &fetched.data, found, is_told);
        BadBlocks::fail_if_any(bad_blocks)?;
        let blocks = match passed {
            Some(blocks) => blocks,
            None => {
                let blocks = self.unchecked(fetched);
                expectations.check(extent, &blocks)?;
                blocks
            }
        };
        Ok(Checked { blocks, is_sealed })
    }

    /// The volume's own check of the blocks that were read, except those that `is_told` declares good. Returns whether
    /// all have seals, and the bad blocks including those in `found`.
    fn check_seals(
        &self,
        located: &LocatedBlocks,
        data: &Slice,
        mut found: Vec<BadBlock>,
        is_told: impl Fn(&MapEntry) -> bool,
    ) -> (bool, Vec<BadBlock>) {
        let (unreadable, mut is_sealed) = (found.len(), true);
        for (block, data) in located.iter().zip(data.chunks_exact(self.geometry.block_size.bytes())) {
            let BlockLocation::Stored(entry) = block else { continue };
            if is_told(entry) || found[..unreadable].iter().any(|bad| bad.lba == entry.lba) {
                continue;
            }
            match check_block(entry, self.geometry.protection, data) {
                Ok(has_seal) => is_sealed &= has_seal,
                Err(bad) => found.push(bad),
            }
        }
        (is_sealed, found)
    }

    fn unverified(&self, fetched: &Fetched) -> Unverified {
        let (data, tags) = (fetched.data.clone(), fetched.tags.clone());
        Unverified::new(data, tags, self.geometry.block_size, self.geometry.protection)
            .expect("one tuple was laid beside each block")
    }

    /// Blocks with their tags, without any check.
    fn unchecked(&self, fetched: Fetched) -> Sealed {
        self.unverified(&fetched).verify(&Checks::NONE).expect("nothing is checked")
    }

    /// Adds the blocks whose map entries are bad.
    fn report_bad(&self, extent: Extent, located: &LocatedBlocks, data: &Slice, bad_blocks: &mut Vec<BadBlock>) {
        let bytes = self.geometry.block_size.bytes();
        for ((lba, block), data) in extent.iter().zip(located).zip(data.chunks_exact(bytes)) {
            match block {
                BlockLocation::Zeroes | BlockLocation::Stored(_) => {}
                BlockLocation::Bad(bad_block) => bad_blocks.push(*bad_block),
                BlockLocation::Damaged(raw) => bad_blocks.push(self.diagnose(lba, raw, Some(data))),
            }
        }
    }

    /// One tuple for each block. Blocks without tags get one that disables all checks, as deallocated blocks have.
    fn tags(&self, located: &LocatedBlocks) -> Slice {
        let Some(format) = self.geometry.protection else { return Slice::empty() };
        let tuple_bytes = format.tuple_bytes();
        let mut tags = Buffer::zeroed(located.len() * tuple_bytes);
        for (place, block) in tags.chunks_exact_mut(tuple_bytes).zip(located) {
            match block {
                BlockLocation::Stored(entry) => place.copy_from_slice(entry.tags(format)),
                BlockLocation::Zeroes | BlockLocation::Bad(_) | BlockLocation::Damaged(_) => place.fill(0xff),
            }
        }
        tags.freeze()
    }

    /// Unwritten and deallocated blocks are holes. If the block map is damaged, a block does not count as a hole, so
    /// that a reader meets the damage.
    pub(crate) async fn allocation(&self, extent: Extent) -> Outcome {
        let mut runs = StatusRuns::default();
        for (piece, _) in self.verify_pieces(extent, &Expectations::NONE) {
            if self.is_unwritten(piece) {
                runs.push(piece.blocks(), BlockState::Hole);
                continue;
            }
            match self.locate(piece).await {
                Ok((located, _)) => {
                    let state = |block: &BlockLocation| match block {
                        BlockLocation::Zeroes => BlockState::Hole,
                        BlockLocation::Stored(_) | BlockLocation::Bad(_) | BlockLocation::Damaged(_) => {
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
