//! Blocks in RAM, with separate tags.

use std::cell::RefCell;
use std::collections::BTreeMap;

use sealblock_block::{
    Abilities, Ability, BadBlock, BadBlocks, BlockState, Checksum, Coverage, Device, ErrorKind, Expectations, Geometry,
    Limits, Operation, Outcome, Request, RequestKind, ReservedArea, Response, Salvaged, StatusRuns, Tally, VerifyStats,
    WriteData,
};
use sealblock_integrity::{Checks, ChecksumKind, Field, Mismatch, PiFormat, Sealed, Tags, Unverified, verify};
use sealblock_runtime_memory::{Buffer, Pool, Slice};
use sealblock_units::{BlockSize, Extent, Lba};

use crate::sparse::Sparse;

/// Bytes of data in a chunk: small enough that memory can be freed and that copying one held by a read is cheap, large
/// enough that most reads are within one.
const CHUNK_BYTES: usize = 128 << 10;
/// Bytes of tags in a chunk, rounded down to the tags of whole chunks of data; more if those of one chunk of data need
/// more.
const TAG_CHUNK_BYTES: usize = 8 << 10;
/// Up to this many bytes of tags are copied: that costs less than sharing them, and writes to neighbouring blocks need
/// not copy.
const COPIED_TAG_BYTES: usize = 512;
/// Bytes of data in one transfer; the gate splits larger requests.
const TRANSFER_BYTES: usize = 4 << 20;
/// Bytes of one step of a Verify, WriteZeroes or Discard: some hundred microseconds, during which the core does nothing
/// else. The gate splits longer ones.
const STEP_BYTES: usize = 1 << 20;
/// Up to this many bytes such a request is executed in place, since data in flight do not limit the number of such
/// requests. Longer ones let other tasks run in between.
const IN_PLACE_BYTES: u64 = 64 << 10;

/// Bytes of a chunk of marks.
const MARK_BYTES: usize = 4096;
/// The mark of a block that was made unreadable.
const UNREADABLE: u8 = 1;
/// The mark of a block whose host wrote a guard that does not match, and disabled its check: the guard proves nothing.
const UNPROVEN: u8 = 2;

/// A device in RAM, with or without protection information. See the crate's header.
pub struct MemoryDevice {
    geometry: Geometry,
    stored: RefCell<Stored>,
    pool: Option<Pool>,
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

struct Stored {
    data: Sparse,
    tags: Sparse,
    /// A byte for each block: a mark, or 0.
    marks: Sparse,
    /// The reserved area.
    reserved: BTreeMap<ReservedArea, Slice>,
}

impl MemoryDevice {
    /// `capacity_blocks` blocks that read as zeroes. No memory is taken yet.
    pub fn new(block_size: BlockSize, capacity_blocks: u64, protection: Option<PiFormat>) -> MemoryDevice {
        let in_place = Limits::new(block_size, STEP_BYTES, (STEP_BYTES >> block_size.shift()) as u32);
        let limits =
            Limits { max_transfer_blocks: Limits::new(block_size, TRANSFER_BYTES, 1).max_transfer_blocks, ..in_place };
        // The tags of a chunk of data are never in two chunks of tags.
        let tags_of_chunk = (CHUNK_BYTES >> block_size.shift()) * protection.map_or(0, PiFormat::tuple_bytes);
        MemoryDevice {
            geometry: Geometry { block_size, capacity_blocks, protection, limits },
            stored: RefCell::new(Stored {
                data: Sparse::new(CHUNK_BYTES, 0),
                tags: Sparse::new(tags_of_chunk * TAG_CHUNK_BYTES.checked_div(tags_of_chunk).unwrap_or(0).max(1), 0xFF),
                marks: Sparse::new(MARK_BYTES, 0),
                reserved: BTreeMap::new(),
            }),
            pool: None,
        }
    }

    /// The same device; its read responses use buffers of `pool` when they must be copied.
    pub fn with_pool(mut self, pool: Pool) -> MemoryDevice {
        self.pool = Some(pool);
        self
    }

    /// Bytes of memory used by data and tags, and by replaced chunks that read responses still held, as far as was
    /// noticed.
    pub fn allocated_bytes(&self) -> u64 {
        let stored = self.stored.borrow();
        stored.data.allocated_bytes() + stored.tags.allocated_bytes()
    }

    /// Damages a stored block; returns whether there was anything to damage (a block without memory has nothing).
    pub fn damage(&self, lba: Lba, damage: Corruption) -> bool {
        if lba.get() >= self.geometry.capacity_blocks {
            return false;
        }
        let mut stored = self.stored.borrow_mut();
        match damage {
            Corruption::Data { at, mask } => {
                let size = self.geometry.block_size.bytes();
                stored.data.flip(lba.get() * size as u64 + (at % size) as u64, mask)
            }
            Corruption::Tag { at, mask } => match self.geometry.protection.map(PiFormat::tuple_bytes) {
                Some(tuple) => stored.tags.flip(lba.get() * tuple as u64 + (at % tuple) as u64, mask),
                None => false,
            },
        }
    }

    fn tuple_bytes(&self) -> u64 {
        self.geometry.protection.map_or(0, PiFormat::tuple_bytes) as u64
    }

    fn buffer(&self, len_bytes: u64) -> Buffer {
        match &self.pool {
            Some(pool) => pool.take(len_bytes as usize),
            None => Buffer::zeroed(len_bytes as usize),
        }
    }

    /// The stored bytes themselves if they are contiguous, otherwise a copy.
    fn shared(&self, stored: &mut Sparse, offset: u64, length_bytes: u64) -> Slice {
        stored.share(offset, length_bytes as usize).unwrap_or_else(|| {
            let mut copy = self.buffer(length_bytes);
            stored.read(offset, &mut copy);
            copy.freeze()
        })
    }

    /// Stored tags.
    fn tags(&self, stored: &mut Sparse, offset: u64, length_bytes: u64) -> Slice {
        if length_bytes > COPIED_TAG_BYTES as u64 {
            return self.shared(stored, offset, length_bytes);
        }
        // Buffers of this length on the heap are reused without a lock, those of a pool only under its lock.
        let mut copy = Buffer::zeroed(length_bytes as usize);
        stored.read(offset, &mut copy);
        copy.freeze()
    }

    /// The blocks of the extent that have this mark.
    fn marked(&self, extent: Extent, mark: u8) -> Vec<Lba> {
        let stored = self.stored.borrow();
        if stored.marks.allocated_bytes() == 0 {
            return Vec::new();
        }
        let mut marks = vec![0; extent.len() as usize];
        stored.marks.read(extent.start().get(), &mut marks);
        extent.iter().zip(marks).filter(|(_, found)| *found == mark).map(|(lba, _)| lba).collect()
    }

    /// The blocks of the extent that were made unreadable.
    fn unreadable(&self, extent: Extent) -> Vec<BadBlock> {
        self.marked(extent, UNREADABLE).into_iter().map(BadBlock::media).collect()
    }

    /// The values that every tuple must have to prove its block, for blocks from `start` on.
    fn own_checks(&self, start: Lba) -> Checks {
        self.geometry.protection.map_or(Checks::NONE, |format| Checks::full(format, start))
    }

    /// Blocks and their tags as stored, unchecked.
    fn load(&self, extent: Extent) -> (Slice, Slice) {
        let (start, tuple_bytes, size) = (extent.start().get(), self.tuple_bytes(), self.geometry.block_size);
        let mut stored = self.stored.borrow_mut();
        let data = self.shared(&mut stored.data, start << size.shift(), extent.bytes(size));
        (data, self.tags(&mut stored.tags, start * tuple_bytes, extent.len() * tuple_bytes))
    }

    fn unverified(&self, (data, tags): (Slice, Slice)) -> Unverified {
        let (size, format) = (self.geometry.block_size, self.geometry.protection);
        Unverified::new(data, tags, size, format).expect("as many tuples as blocks were loaded")
    }

    fn read(&self, extent: Extent, expectations: &Expectations) -> Outcome {
        let (unreadable, loaded) = (self.unreadable(extent), self.load(extent));
        let both = expectations.joined(&self.own_checks(extent.start())).filter(|_| unreadable.is_empty());
        if let Some(Ok(sealed)) = both.map(|checks| self.unverified(loaded.clone()).verify(&checks)) {
            return Ok(Response::Data(sealed));
        }
        let mut tally = Tally { bad_blocks: unreadable, ..Tally::default() };
        if let Some(format) = self.geometry.protection {
            self.judge(extent, format, (&loaded.0, &loaded.1), expectations, &mut tally);
        }
        tally.finish()?;
        Ok(Response::Data(self.unverified(loaded).verify(&Checks::NONE).expect("nothing is checked")))
    }

    /// The stored contents of blocks, bad ones too.
    fn salvage(&self, extent: Extent) -> Outcome {
        let (loaded, mut tally) = (self.load(extent), Tally::default());
        tally.bad_blocks = self.unreadable(extent);
        if let Some(format) = self.geometry.protection {
            self.judge(extent, format, (&loaded.0, &loaded.1), &Expectations::NONE, &mut tally);
        }
        let bad_blocks = BadBlocks::new(tally.bad_blocks).map_or_else(Vec::new, |bad| bad.into_parts().0);
        let blocks = self.unverified(loaded).verify(&Checks::NONE).expect("nothing is checked");
        Ok(Response::Salvaged(Salvaged { blocks, bad_blocks }))
    }

    /// Reports which of these blocks are bad, which have tags that prove nothing, and which are not as expected; true
    /// if every guard was compared with the data and matches.
    fn judge(
        &self,
        extent: Extent,
        format: PiFormat,
        (data, tags): (&[u8], &[u8]),
        expectations: &Expectations,
        tally: &mut Tally,
    ) -> bool {
        let (size, unproven) = (self.geometry.block_size, self.marked(extent, UNPROVEN));
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
        let mut stored = self.stored.borrow_mut();
        stored.marks.clear(extent.start().get(), extent.len());
        let mut at = extent.start().get() << self.geometry.block_size.shift();
        let mut tags_at = extent.start().get() * self.tuple_bytes();
        for segment in sealed.segments() {
            stored.data.write(at, &segment.data);
            stored.tags.write(tags_at, &segment.tags);
            at += segment.data.len() as u64;
            tags_at += segment.tags.len() as u64;
        }
        self.mark_unproven(&mut stored, extent, sealed);
    }

    /// Marks written blocks whose guards prove nothing: from now on only these may have wrong guards.
    fn mark_unproven(&self, stored: &mut Stored, extent: Extent, sealed: &Sealed) {
        let Some(format) = self.geometry.protection.filter(|_| !sealed.has_verified_guards()) else { return };
        let (mut start, checks) = (extent.start(), Checks { guard: true, ..Checks::NONE });
        for segment in sealed.segments() {
            let mut note = |mismatch: Mismatch| stored.marks.write(start.get() + mismatch.block as u64, &[UNPROVEN]);
            verify(format, self.geometry.block_size, &segment.data, &segment.tags, &checks, &mut note);
            start = Lba::new(start.get() + (segment.data.len() >> self.geometry.block_size.shift()) as u64);
        }
    }

    /// Makes blocks as if they had never been written.
    fn unmap(&self, extent: Extent) {
        let (start, tuple_bytes) = (extent.start().get(), self.tuple_bytes());
        let mut stored = self.stored.borrow_mut();
        stored.marks.clear(extent.start().get(), extent.len());
        stored.data.clear(start << self.geometry.block_size.shift(), extent.bytes(self.geometry.block_size));
        stored.tags.clear(start * tuple_bytes, extent.len() * tuple_bytes);
    }

    /// Makes blocks unreadable. Their old contents are not needed any more, so the memory is freed.
    fn write_uncorrectable(&self, extent: Extent) {
        self.unmap(extent);
        self.stored.borrow_mut().marks.write(extent.start().get(), &vec![UNREADABLE; extent.len() as usize]);
    }

    /// Zeroes with tags that are checked like all others, unlike those of an unmapped block.
    fn write_zeroes(&self, extent: Extent) {
        let Some(format) = self.geometry.protection else { return self.unmap(extent) };
        let block_size = self.geometry.block_size;
        let zeroes = Buffer::zeroed(CHUNK_BYTES).freeze();
        for part in self.by_chunk(extent) {
            let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: part.start().get() };
            let data = zeroes.slice(..part.bytes(block_size) as usize);
            self.write(part, &Sealed::seal(data, block_size, Some(format), &tags));
        }
    }

    /// Checks blocks in place. Where no memory is allocated, nothing can be damaged.
    fn verify(&self, extent: Extent, expectations: &Expectations) -> Outcome {
        let mut tally = self.tally(extent);
        self.verify_parts(extent, expectations, &mut tally, |_, _, _| ());
        Ok(Response::Verified(VerifyStats { bytes_transferred: 0, coverage: tally.finish()? }))
    }

    /// Checks blocks and computes their checksum in place, each part while it is in the core's cache.
    fn checksum(&self, extent: Extent, kind: ChecksumKind, expectations: &Expectations) -> Outcome {
        let (mut tally, mut value, size) = (self.tally(extent), 0, self.geometry.block_size);
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
    fn tally(&self, extent: Extent) -> Tally {
        let coverage = Coverage::of(self.geometry.protection.is_some());
        Tally { bad_blocks: self.unreadable(extent), coverage, unexpected: None }
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
        let (size, stored) = (self.geometry.block_size, self.stored.borrow());
        for part in self.by_chunk(extent) {
            let start = part.start().get();
            let data = stored.data.peek(start << size.shift(), part.bytes(size) as usize);
            let tags = stored.tags.peek(start * self.tuple_bytes(), (part.len() * self.tuple_bytes()) as usize);
            // Missing tags are all ones, which are not checked; if only the data are missing, they are zeroes.
            let checks_escapes = expectations.checks().checks_escapes;
            let escapes =
                if checks_escapes { vec![0xFF; (part.len() * self.tuple_bytes()) as usize] } else { Vec::new() };
            let tags = tags.or(checks_escapes.then_some(&escapes[..]));
            let Some((format, tags)) = self.geometry.protection.zip(tags) else {
                each(part, data, None);
                continue;
            };
            let expected = expectations.advance(start - extent.start().get(), Some(format));
            let zeroes = if data.is_none() { vec![0; part.bytes(size) as usize] } else { Vec::new() };
            let checked = data.unwrap_or(&zeroes);
            let is_good = |checks: Checks| verify(format, size, checked, tags, &checks, &mut |_| ()) == 0;
            let is_proven = expected.joined(&self.own_checks(part.start())).is_some_and(is_good)
                || self.judge(part, format, (checked, tags), &expected, tally);
            each(part, data, is_proven.then_some((format, tags)));
        }
    }

    fn compare(&self, extent: Extent, wanted: &Sealed) -> Outcome {
        // A damaged block is reported as damage, not as a difference.
        self.verify(extent, &Expectations::NONE)?;
        let (size, stored) = (self.geometry.block_size, self.stored.borrow());
        let mut block = vec![0; size.bytes()];
        for (lba, wanted) in extent.iter().zip(wanted.iter().map(|(block, _)| block)) {
            stored.data.read(lba.get() << size.shift(), &mut block);
            if block != wanted {
                return Err(ErrorKind::Miscompare { lba }.into());
            }
        }
        Ok(Response::Done)
    }

    /// Blocks without memory are holes, unless they have tags that are checked, or are marked unreadable.
    fn allocation(&self, extent: Extent) -> Outcome {
        let size = self.geometry.block_size;
        let mut runs = StatusRuns::default();
        for part in self.by_chunk(extent) {
            let (start, tuple_bytes) = (part.start().get(), self.tuple_bytes());
            let is_empty = {
                let stored = self.stored.borrow();
                // Chunks of tags are for more blocks than those of data; the tags of unmapped blocks are all ones.
                let tags = stored.tags.peek(start * tuple_bytes, (part.len() * tuple_bytes) as usize);
                let data = stored.data.peek(start << size.shift(), part.bytes(size) as usize);
                data.is_none() && tags.is_none_or(|tags| tags.iter().all(|byte| *byte == 0xFF))
            };
            let is_hole = is_empty && self.marked(part, UNREADABLE).is_empty();
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
            Operation::ReadReserved(area) => {
                let held = self.stored.borrow().reserved.get(area).cloned();
                return Ok(Response::Reserved(held.unwrap_or_else(Slice::empty)));
            }
            Operation::WriteReserved(area, bytes) => {
                self.stored.borrow_mut().reserved.insert(*area, Slice::copy_from(bytes));
            }
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
        extent.split_aligned(Limits::new(self.geometry.block_size, CHUNK_BYTES, 1).max_transfer_blocks)
    }
}

/// What every device in memory can do.
const ABILITIES: Abilities = Abilities::COMPLETE
    .with([RequestKind::Salvage, RequestKind::BlockStatus, RequestKind::ReadReserved], Ability::Native);

impl Device for MemoryDevice {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn abilities(&self) -> Abilities {
        let bytes = self.geometry.capacity_blocks.saturating_mul(self.geometry.block_size.bytes() as u64);
        Abilities {
            bitmap_pages: ReservedArea::bitmap_pages(bytes),
            seals: self.geometry.protection.is_some(),
            ..ABILITIES
        }
    }

    async fn execute(&self, operation: Request) -> Outcome {
        self.carry_out(&operation)
    }

    fn executes_in_place(&self) -> bool {
        true
    }

    fn try_execute(&self, operation: &Request) -> Option<Outcome> {
        let bytes = operation.blocks() << self.geometry.block_size.shift();
        is_short(operation, bytes).then(|| self.carry_out(operation))
    }
}

/// True if a request is executed in place: its data are in flight, which is limited, or it covers few bytes.
fn is_short(request: &Request, bytes: u64) -> bool {
    let moves_data =
        matches!(request.kind(), RequestKind::Read | RequestKind::Write | RequestKind::Compare | RequestKind::Flush);
    moves_data || bytes <= IN_PLACE_BYTES
}

#[cfg(test)]
mod tests;
