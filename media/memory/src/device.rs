//! A device over a store: one core's channel to it.

use std::cell::RefCell;
use std::sync::Arc;

use sealblock_block::{
    Abilities, Ability, BadBlock, BadBlocks, BlockState, Checksum, Coverage, Device, ErrorKind, Expectations, Geometry,
    Limits, Operation, Outcome, Request, RequestKind, ReservedArea, Response, Salvaged, StatusRuns, Tally, VerifyStats,
    WriteData,
};
use sealblock_integrity::{Checks, ChecksumKind, Field, Mismatch, PiFormat, Sealed, Tags, Unverified, verify};
use sealblock_runtime_memory::{Buffer, Pool, Slice};
use sealblock_units::{BlockSize, Extent, Lba};

use crate::chunk::Part;
use crate::loaded::{Channel, Loaded, Marks, source_of};
use crate::store::{CHUNK_BYTES, MemoryStore};

/// Up to this many bytes such a request is executed in place, since data in flight do not limit the number of such
/// requests. Longer ones let other tasks run in between.
const IN_PLACE_BYTES: u64 = 64 << 10;

/// The mark of a block that was made unreadable.
const UNREADABLE: u8 = 1;
/// The mark of a block whose host wrote a guard that does not match, and disabled its check: the guard proves nothing.
const UNPROVEN: u8 = 2;

/// A device in RAM, with or without protection information. See the crate's header.
///
/// It is one channel to a [`MemoryStore`]: it belongs to one core, and any number of them give access to the same
/// blocks.
pub struct MemoryDevice {
    store: Arc<MemoryStore>,
    channel: RefCell<Channel>,
}

/// How to change a stored block without its tag. Offsets count from the start of the block's data or tuple.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Corruption {
    /// Inverts the bits of `mask` in the byte at `at` of the data.
    Data {
        /// Byte of the data, taken modulo the block size.
        at: usize,
        /// Bits to invert.
        mask: u8,
    },
    /// Inverts the bits of `mask` in the byte at `at` of the tuple.
    Tag {
        /// Byte of the tuple, taken modulo its length.
        at: usize,
        /// Bits to invert.
        mask: u8,
    },
}

impl MemoryDevice {
    /// `capacity_blocks` blocks that read as zeroes, in a store of their own. No memory is taken yet.
    pub fn new(block_size: BlockSize, capacity_blocks: u64, protection: Option<PiFormat>) -> MemoryDevice {
        MemoryDevice::on(Arc::new(MemoryStore::new(block_size, capacity_blocks, protection)))
    }

    /// Another channel to the same blocks, for the calling core. It takes no memory yet.
    pub fn on(store: Arc<MemoryStore>) -> MemoryDevice {
        let channel = RefCell::new(Channel::new(&store.chunks));
        MemoryDevice { store, channel }
    }

    /// The same device; its read responses use buffers of `pool` when they must be copied. The pool is that of the
    /// core that uses the device.
    pub fn with_pool(self, pool: Pool) -> MemoryDevice {
        self.channel.borrow_mut().set_pool(pool);
        self
    }

    /// The store, to open channels of other cores.
    pub fn store(&self) -> &Arc<MemoryStore> {
        &self.store
    }

    /// Bytes of memory used by data and tags, and by replaced chunks that read responses still held, as far as was
    /// noticed by this channel.
    pub fn allocated_bytes(&self) -> u64 {
        self.store.stored_bytes() + self.channel.borrow().spares.held_bytes()
    }

    /// Damages a stored block; returns whether there was anything to damage (a block without memory has nothing).
    pub fn damage(&self, lba: Lba, damage: Corruption) -> bool {
        let (geometry, shape) = (self.store.geometry(), self.store.chunks.shape);
        if lba.get() >= geometry.capacity_blocks {
            return false;
        }
        let Some(Part { chunk, within, .. }) = shape.parts(lba.get(), 1).next() else { return false };
        let spares = &mut self.channel.borrow_mut().spares;
        let was_there = self.store.chunks.edit(chunk, spares, |chunk, spares| match damage {
            Corruption::Data { at, mask } => {
                let at = shape.data_of(&within).start + at % geometry.block_size.bytes();
                chunk.flip_data(at, mask, spares)
            }
            Corruption::Tag { .. } if shape.tuple_bytes == 0 => false,
            Corruption::Tag { at, mask } => {
                let at = shape.tags_of(&within).start + at % shape.tuple_bytes;
                chunk.flip_tags(at, mask, spares)
            }
        });
        was_there.unwrap_or(false)
    }

    fn protection(&self) -> Option<PiFormat> {
        self.store.geometry().protection
    }

    fn block_size(&self) -> BlockSize {
        self.store.geometry().block_size
    }

    /// The parts of an extent, each within one chunk.
    fn parts(&self, extent: Extent) -> impl Iterator<Item = Part> + use<> {
        self.store.chunks.shape.parts(extent.start().get(), extent.len())
    }

    /// The values that every tuple must have to prove its block, for blocks from `start` on.
    fn own_checks(&self, start: Lba) -> Checks {
        self.protection().map_or(Checks::NONE, |format| Checks::full(format, start))
    }

    /// Blocks and their tags and marks as stored, unchecked.
    fn load(&self, extent: Extent) -> Loaded {
        self.channel.borrow_mut().load(&self.store.chunks, extent.start().get(), extent.len())
    }

    fn unverified(&self, data: Slice, tags: Slice) -> Unverified {
        Unverified::new(data, tags, self.block_size(), self.protection()).expect("as many tuples as blocks were loaded")
    }

    fn read(&self, extent: Extent, expectations: &Expectations) -> Outcome {
        let Loaded { data, tags, marks } = self.load(extent);
        let as_stored = |data, tags| {
            Ok(Response::Data(self.unverified(data, tags).verify(&Checks::NONE).expect("nothing is checked")))
        };
        if self.protection().is_none() && marks.is_empty() {
            return as_stored(data, tags);
        }
        let mut tally = Tally { bad_blocks: unreadable(extent, &marks), ..Tally::default() };
        if let Some(format) = self.protection() {
            let checks = expectations.joined(&self.own_checks(extent.start())).filter(|_| tally.bad_blocks.is_empty());
            if let Some(Ok(sealed)) = checks.map(|c| self.unverified(data.clone(), tags.clone()).verify(&c)) {
                return Ok(Response::Data(sealed));
            }
            self.judge(extent, format, (&data, &tags), &marks, expectations, &mut tally);
        }
        tally.finish()?;
        as_stored(data, tags)
    }

    /// The stored contents of blocks, bad ones too.
    fn salvage(&self, extent: Extent) -> Outcome {
        let Loaded { data, tags, marks } = self.load(extent);
        let mut tally = Tally { bad_blocks: unreadable(extent, &marks), ..Tally::default() };
        if let Some(format) = self.protection() {
            self.judge(extent, format, (&data, &tags), &marks, &Expectations::NONE, &mut tally);
        }
        let bad_blocks = BadBlocks::new(tally.bad_blocks).map_or_else(Vec::new, |bad| bad.into_parts().0);
        let blocks = self.unverified(data, tags).verify(&Checks::NONE).expect("nothing is checked");
        Ok(Response::Salvaged(Salvaged { blocks, bad_blocks }))
    }

    /// Reports which of these blocks are bad, which have tags that prove nothing, and which are not as expected; true
    /// if every guard was compared with the data and matches.
    fn judge(
        &self,
        extent: Extent,
        format: PiFormat,
        (data, tags): (&[u8], &[u8]),
        marks: &Marks,
        expectations: &Expectations,
        tally: &mut Tally,
    ) -> bool {
        let (size, unproven) = (self.block_size(), marked(extent, marks, UNPROVEN));
        if !unproven.is_empty() {
            tally.coverage.merge(Coverage::of(false));
        }
        let own = self.own_checks(extent.start());
        let mut note_bad = |mismatch: Mismatch| {
            let bad = BadBlock::of_mismatch(extent.start(), &mismatch);
            if mismatch.field != Field::Guard || !unproven.contains(&bad.lba) {
                tally.bad_blocks.push(bad);
            }
        };
        let wrong = verify(format, size, data, tags, &own, &mut note_bad);
        if !unproven.is_empty() {
            // If the guard proves nothing, the reference tag must still be the address.
            verify(format, size, data, tags, &Checks { guard: false, ..own }, &mut note_bad);
        }
        let mut note_unexpected = |mismatch: Mismatch| {
            tally.unexpected.get_or_insert_with(|| ErrorKind::unexpected(extent.start(), &mismatch).into());
        };
        verify(format, size, data, tags, expectations.checks(), &mut note_unexpected);
        wrong == 0
    }

    fn write(&self, extent: Extent, sealed: &Sealed) {
        let (chunks, unproven) = (&self.store.chunks, self.unproven(sealed));
        let (mut source, spares) = (source_of(sealed, chunks.shape), &mut self.channel.borrow_mut().spares);
        for part in self.parts(extent) {
            chunks.change(&part, spares, |bytes, chunk| {
                source.copy(part.within.clone(), bytes);
                let of_part = unproven.iter().filter(|block| part.of_whole.contains(block));
                of_part.for_each(|block| {
                    chunk.mark(chunks.shape, block - part.of_whole.start + part.within.start, UNPROVEN);
                });
            });
        }
    }

    /// The blocks, counted from the first one, whose guards prove nothing: once they are written, only these may have
    /// wrong guards.
    fn unproven(&self, sealed: &Sealed) -> Vec<usize> {
        let (mut unproven, mut start) = (Vec::new(), 0);
        let Some(format) = self.protection().filter(|_| !sealed.has_verified_guards()) else { return unproven };
        let checks = Checks { guard: true, ..Checks::NONE };
        for segment in sealed.segments() {
            let mut note = |mismatch: Mismatch| unproven.push(start + mismatch.block);
            verify(format, self.block_size(), &segment.data, &segment.tags, &checks, &mut note);
            start += segment.data.len() >> self.block_size().shift();
        }
        unproven
    }

    /// Makes blocks as if they had never been written.
    fn unmap(&self, extent: Extent) {
        let spares = &mut self.channel.borrow_mut().spares;
        self.parts(extent).for_each(|part| self.store.chunks.clear(&part, spares));
    }

    /// Makes blocks unreadable. Their old contents are not needed any more, so the memory is freed.
    fn write_uncorrectable(&self, extent: Extent) {
        let spares = &mut self.channel.borrow_mut().spares;
        self.parts(extent).for_each(|part| self.store.chunks.clear_and_mark(&part, spares, Some(UNREADABLE)));
    }

    /// Zeroes with tags that are checked like all others, unlike those of an unmapped block.
    fn write_zeroes(&self, extent: Extent) {
        let Some(format) = self.protection() else { return self.unmap(extent) };
        let block_size = self.block_size();
        let zeroes = Buffer::zeroed(CHUNK_BYTES).freeze();
        for part in self.by_chunk(extent) {
            let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: part.start().get() };
            let data = zeroes.slice(..part.bytes(block_size) as usize);
            self.write(part, &Sealed::seal(data, block_size, Some(format), &tags));
        }
    }

    /// Checks blocks in place. Where no memory is allocated, nothing can be damaged.
    fn verify(&self, extent: Extent, expectations: &Expectations) -> Outcome {
        let mut tally = self.tally();
        self.verify_parts(extent, expectations, &mut tally, |_, _, _| ());
        Ok(Response::Verified(VerifyStats { bytes_transferred: 0, coverage: tally.finish()? }))
    }

    /// Checks blocks and computes their checksum in place, each part while it is in the core's cache.
    fn checksum(&self, extent: Extent, kind: ChecksumKind, expectations: &Expectations) -> Outcome {
        let (mut tally, mut value, size) = (self.tally(), 0, self.block_size());
        self.verify_parts(extent, expectations, &mut tally, |part, data, guards| {
            let of_guards = guards.and_then(|(format, tags)| kind.append_guards(value, format, size, tags));
            value = match (of_guards, data) {
                (Some(of_guards), _) => of_guards,
                (None, Some(data)) => kind.append(value, data),
                (None, None) => kind.combine(value, kind.of_zeroes(part.bytes(size)), part.bytes(size)),
            };
        });
        Ok(Response::Checksum(Checksum { kind, value, bytes_transferred: 0, coverage: tally.finish()? }))
    }

    /// The start of a check.
    fn tally(&self) -> Tally {
        let coverage = Coverage::of(self.protection().is_some());
        Tally { bad_blocks: Vec::new(), coverage, unexpected: None }
    }

    /// Checks blocks part by part. `each` gets a part, its data (`None` for zeroes), and its tags with their format if
    /// all guards in them were compared with the data and match.
    fn verify_parts(
        &self,
        extent: Extent,
        expectations: &Expectations,
        tally: &mut Tally,
        mut each: impl FnMut(Extent, Option<&[u8]>, Option<(PiFormat, &[u8])>),
    ) {
        let size = self.block_size();
        for part in self.by_chunk(extent) {
            // The lock is not held while the blocks are checked: a write meanwhile copies them.
            let peeked = self.channel.borrow_mut().peek(&self.store.chunks, part.start().get(), part.len());
            let (start, data, marks) = (part.start().get(), peeked.data.as_deref(), &peeked.marks);
            tally.bad_blocks.extend(unreadable(part, marks));
            // Missing tags are all ones, which are not checked; if only the data are missing, they are zeroes.
            let tag_bytes = part.len() as usize * self.store.chunks.shape.tuple_bytes;
            let checks_escapes = expectations.checks().checks_escapes;
            let escapes = if checks_escapes { vec![0xFF; tag_bytes] } else { Vec::new() };
            let tags = peeked.tags.as_deref().or(checks_escapes.then_some(&escapes[..]));
            let Some((format, tags)) = self.protection().zip(tags) else {
                each(part, data, None);
                continue;
            };
            let expected = expectations.advance(start - extent.start().get(), Some(format));
            let zeroes = if data.is_none() { vec![0; part.bytes(size) as usize] } else { Vec::new() };
            let checked = data.unwrap_or(&zeroes);
            let is_good = |checks: Checks| verify(format, size, checked, tags, &checks, &mut |_| ()) == 0;
            let is_proven = expected.joined(&self.own_checks(part.start())).is_some_and(is_good)
                || self.judge(part, format, (checked, tags), marks, &expected, tally);
            each(part, data, is_proven.then_some((format, tags)));
        }
    }

    fn compare(&self, extent: Extent, wanted: &Sealed) -> Outcome {
        let (mut tally, mut different, size) = (self.tally(), None, self.block_size());
        let mut wanted = wanted.iter().map(|(block, _)| block);
        let zeroes = vec![0; size.bytes()];
        self.verify_parts(extent, &Expectations::NONE, &mut tally, |part, data, _| {
            for (block, lba) in part.iter().enumerate() {
                let stored = data.map_or(&zeroes[..], |data| &data[block << size.shift()..][..size.bytes()]);
                if wanted.next() != Some(stored) {
                    different.get_or_insert(lba);
                }
            }
        });
        // A damaged block is reported as damage, not as a difference.
        tally.finish()?;
        different.map_or(Ok(Response::Done), |lba| Err(ErrorKind::Miscompare { lba }.into()))
    }

    /// Blocks without memory are holes, unless they have tags that are checked, or are marked unreadable.
    fn allocation(&self, extent: Extent) -> Outcome {
        let mut runs = StatusRuns::default();
        for part in self.by_chunk(extent) {
            let peeked = self.channel.borrow_mut().peek(&self.store.chunks, part.start().get(), part.len());
            // The tags of unmapped blocks are all ones.
            let is_empty =
                peeked.data.is_none() && peeked.tags.is_none_or(|tags| tags.iter().all(|byte| *byte == 0xFF));
            let is_hole = is_empty && unreadable(part, &peeked.marks).is_empty();
            runs.push(part.blocks(), if is_hole { BlockState::Hole } else { BlockState::Allocated });
        }
        Ok(Response::BlockStatus(runs.into_vec()))
    }

    fn carry_out(&self, request: &Request) -> Outcome {
        let Request { operation, extents, .. } = request;
        match operation {
            Operation::Read(expectations) => return self.read(extents.one(), expectations),
            Operation::Salvage => return self.salvage(extents.one()),
            Operation::Verify(expectations) => return self.verify(extents.one(), expectations),
            Operation::Checksum(kind, expectations) => return self.checksum(extents.one(), *kind, expectations),
            Operation::Compare(data) => return self.compare(extents.one(), data),
            Operation::ReadReserved(area) => return Ok(Response::Reserved(self.store.reserved(*area))),
            Operation::WriteReserved(area, bytes) => self.store.set_reserved(*area, bytes),
            Operation::BlockStatus => return self.allocation(extents.one()),
            Operation::Copy { .. } | Operation::CompareAndWrite(_) | Operation::Repair => {
                return Err(ErrorKind::Absent(request.kind()).into());
            }
            Operation::Write(WriteData::Sealed(data)) => self.write(extents.one(), data),
            Operation::Write(WriteData::Unsealed(data)) => self.write(extents.one(), &data.clone().seal()),
            Operation::WriteZeroes { may_unmap: true } => self.unmap(extents.one()),
            Operation::WriteZeroes { may_unmap: false } => self.write_zeroes(extents.one()),
            Operation::Discard => extents.iter().for_each(|extent| self.unmap(*extent)),
            Operation::WriteUncorrectable { .. } => self.write_uncorrectable(extents.one()),
            Operation::Flush => {}
        }
        Ok(Response::Done)
    }

    /// The extent split at the ends of chunks of data, each of which has its tags in one chunk.
    fn by_chunk(&self, extent: Extent) -> impl Iterator<Item = Extent> + use<> {
        extent.split_aligned(Limits::new(self.block_size(), CHUNK_BYTES, 1).max_transfer_blocks)
    }
}

/// What every device in memory can do.
const ABILITIES: Abilities = Abilities::COMPLETE
    .with([RequestKind::Salvage, RequestKind::BlockStatus, RequestKind::ReadReserved], Ability::Native);

impl Device for MemoryDevice {
    fn geometry(&self) -> &Geometry {
        self.store.geometry()
    }

    fn abilities(&self) -> Abilities {
        let Geometry { block_size, capacity_blocks, protection, .. } = *self.store.geometry();
        let bytes = capacity_blocks.saturating_mul(block_size.bytes() as u64);
        Abilities { bitmap_pages: ReservedArea::bitmap_pages(bytes), seals: protection.is_some(), ..ABILITIES }
    }

    async fn execute(&self, operation: Request) -> Outcome {
        self.carry_out(&operation)
    }

    fn executes_in_place(&self) -> bool {
        true
    }

    fn try_execute(&self, operation: &Request) -> Option<Outcome> {
        let bytes = operation.blocks() << self.block_size().shift();
        is_short(operation, bytes).then(|| self.carry_out(operation))
    }
}

/// True if a request is executed in place: its data are in flight, which is limited, or it covers few bytes.
fn is_short(request: &Request, bytes: u64) -> bool {
    let moves_data =
        matches!(request.kind(), RequestKind::Read | RequestKind::Write | RequestKind::Compare | RequestKind::Flush);
    moves_data || bytes <= IN_PLACE_BYTES
}

/// The blocks of the extent that have this mark.
fn marked(extent: Extent, marks: &Marks, mark: u8) -> Vec<Lba> {
    let of_mark = marks.iter().filter(|(_, found)| *found == mark);
    of_mark.map(|(block, _)| Lba::new(extent.start().get() + *block as u64)).collect()
}

/// The blocks of the extent that were made unreadable.
fn unreadable(extent: Extent, marks: &Marks) -> Vec<BadBlock> {
    marked(extent, marks, UNREADABLE).into_iter().map(BadBlock::media).collect()
}

#[cfg(test)]
mod tests;
