//! Requests to a device.

use std::ops::{Deref, RangeInclusive};

use sealblock_integrity::{ChecksumKind, PiFormat, Sealed};
use sealblock_runtime_memory::Slice;
use sealblock_units::{Extent, Lba};
use smallvec::SmallVec;

use crate::{Expectations, WriteData};

/// When a write is durable.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Durability {
    /// A later Flush makes it durable.
    #[default]
    Volatile,
    /// Force unit access: durable before the request completes.
    ForceUnitAccess,
}

/// One request: an operation, the blocks that it concerns, and when it is durable. Layers that only carry a request,
/// split it or move its addresses change its extents, expectations and data ([`Request::map_expectations`],
/// [`Request::map_data`]), whatever the operation.
///
/// Constructed by the functions named after the operations, so that each has the extents it needs.
#[derive(Clone, Debug)]
pub struct Request {
    /// What is done.
    pub operation: Operation,
    /// The blocks.
    pub extents: Extents,
    /// When a change is durable. A Discard and a Repair are volatile; their client flushes afterwards.
    pub durability: Durability,
}

/// What a [`Request`] does. The set is closed: no protocol-specific command passes through.
#[derive(Clone, Debug)]
pub enum Operation {
    /// Read blocks, checked where they are stored: always by the device's own check, and then against what the
    /// requester expects of tags.
    Read(Expectations),
    /// Read blocks although they may be bad: all that is left of them, and for each whether it is bad
    /// ([`crate::Salvaged`]). Only for programs that rescue lost blocks or compare their remains; no export offers it.
    Salvage,
    /// Write blocks with their tags, in the device's protection format. The device makes the tags if the data have
    /// none.
    Write(WriteData),
    /// Make every write completed so far durable.
    Flush,
    /// Deallocate blocks. Their content is undefined afterwards.
    Discard,
    /// Make blocks read as zeroes.
    WriteZeroes {
        /// True if the space may be deallocated.
        may_unmap: bool,
    },
    /// Copy other blocks of the device, with their tags as they are stored, and with the checks of a Read. The extent
    /// is the destination. It has the length of the source, and does not overlap it. If the Copy fails, some of the
    /// destination may be copied already, but no block whose source failed a check. [`crate::ErrorKind::Absent`] means
    /// that the caller may read and write instead.
    Copy {
        /// The blocks to copy.
        source: Extent,
        /// What the requester expects of their tags.
        expectations: Expectations,
    },
    /// Make blocks unreadable: until they are written, zeroed or discarded, they fail as
    /// [`crate::BadBlockCause::Media`].
    WriteUncorrectable {
        /// True if their data are lost, so that they count as damage of the device; false if a host wants them unreadable.
        marks_loss: bool,
    },
    /// Read and check blocks where they are stored, as Read does, without returning data.
    Verify(Expectations),
    /// Verify, and return a checksum of this kind of the data, so that data can be compared without moving them.
    Checksum(ChecksumKind, Expectations),
    /// Verify, and rewrite bad blocks from another copy. The bad blocks of its error show which were repaired.
    Repair,
    /// Return which blocks are allocated.
    BlockStatus,
    /// Compare stored blocks with this data, whose tags do not count.
    Compare(Sealed),
    /// Write blocks if the stored data equal other data. No other change of these blocks, by any initiator of the
    /// device, comes in between. At most [`crate::Abilities::compare_and_write_blocks`] blocks, never in pieces. It is
    /// never sent again if the first attempt may have been executed: [`crate::ErrorKind::Unreachable`] means that this
    /// is unknown.
    CompareAndWrite(Box<CompareAndWrite>),
    /// Read a part of the reserved area.
    ReadReserved(ReservedArea),
    /// Replace a part of the reserved area: all of it or nothing, durable when the request completes. At most
    /// [`ReservedArea::max_bytes`].
    WriteReserved(ReservedArea, Slice),
}

/// What a [`Operation::CompareAndWrite`] expects and writes. Both have the length of its extent.
#[derive(Clone, Debug)]
pub struct CompareAndWrite {
    /// The data that must be stored. Their tags do not count.
    pub expected: Sealed,
    /// The data that are written then, with their tags, in the device's protection format.
    pub new: Sealed,
}

/// The extents of a request: any number for a Discard, none for a Flush and for the reserved area, one for everything
/// else.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Extents(SmallVec<[Extent; 1]>);

impl Extents {
    /// The extent of an operation that has one.
    ///
    /// # Panics
    /// For a Discard, a Flush and the reserved area: a bug of the caller, who knows the operation.
    pub fn one(&self) -> Extent {
        match self.0[..] {
            [extent] => extent,
            _ => panic!("an operation with one extent, not {}", self.0.len()),
        }
    }

    /// The same number of extents, each as `change` returns it.
    #[must_use]
    pub fn map(mut self, mut change: impl FnMut(Extent) -> Extent) -> Extents {
        self.0.iter_mut().for_each(|extent| *extent = change(*extent));
        self
    }

    /// The blocks from the first to the last, including those between the extents; `None` if there is no extent.
    fn first_to_last(&self) -> Option<RangeInclusive<u64>> {
        let first = self.iter().map(|extent| extent.start().get()).min()?;
        Some(first..=self.iter().map(|extent| extent.last().get()).max()?)
    }
}

impl Deref for Extents {
    type Target = [Extent];

    fn deref(&self) -> &[Extent] {
        &self.0
    }
}

impl From<Extent> for Extents {
    fn from(extent: Extent) -> Extents {
        Extents(SmallVec::from_buf([extent]))
    }
}

impl FromIterator<Extent> for Extents {
    fn from_iter<I: IntoIterator<Item = Extent>>(extents: I) -> Extents {
        Extents(extents.into_iter().collect())
    }
}

/// The kind of an [`Operation`], without its arguments.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RequestKind {
    /// Read blocks.
    Read,
    /// Read blocks although they may be bad.
    Salvage,
    /// Write blocks.
    Write,
    /// Make writes durable.
    Flush,
    /// Deallocate blocks.
    Discard,
    /// Make blocks read as zeroes.
    WriteZeroes,
    /// Check blocks in place.
    Verify,
    /// Copy blocks of the device.
    Copy,
    /// Compare blocks.
    Compare,
    /// Write blocks if they are as expected.
    CompareAndWrite,
    /// Make blocks unreadable.
    WriteUncorrectable,
    /// Check blocks in place and return a checksum of their data.
    Checksum,
    /// Check blocks in place and repair them.
    Repair,
    /// Return which blocks are allocated.
    BlockStatus,
    /// Read a part of the reserved area.
    ReadReserved,
    /// Replace a part of the reserved area.
    WriteReserved,
}

impl RequestKind {
    /// Every kind, in the order of [`RequestKind::index`].
    pub const ALL: [RequestKind; 16] = [
        RequestKind::Read,
        RequestKind::Salvage,
        RequestKind::Write,
        RequestKind::Flush,
        RequestKind::Discard,
        RequestKind::WriteZeroes,
        RequestKind::Verify,
        RequestKind::Copy,
        RequestKind::Compare,
        RequestKind::CompareAndWrite,
        RequestKind::WriteUncorrectable,
        RequestKind::Checksum,
        RequestKind::Repair,
        RequestKind::BlockStatus,
        RequestKind::ReadReserved,
        RequestKind::WriteReserved,
    ];

    /// Index into [`RequestKind::ALL`] and into tables of counters.
    pub const fn index(self) -> usize {
        self as usize
    }

    /// The name in messages.
    pub const fn name(self) -> &'static str {
        match self {
            RequestKind::Read => "read",
            RequestKind::Salvage => "salvage",
            RequestKind::Write => "write",
            RequestKind::Flush => "flush",
            RequestKind::Discard => "discard",
            RequestKind::WriteZeroes => "write zeroes",
            RequestKind::Verify => "verify",
            RequestKind::Copy => "copy",
            RequestKind::Compare => "compare",
            RequestKind::CompareAndWrite => "compare and write",
            RequestKind::WriteUncorrectable => "write uncorrectable",
            RequestKind::Checksum => "checksum",
            RequestKind::Repair => "repair",
            RequestKind::BlockStatus => "block status",
            RequestKind::ReadReserved => "read reserved area",
            RequestKind::WriteReserved => "write reserved area",
        }
    }

    /// True if requests of this kind change blocks. Repair does: it writes to a copy what it read from another one.
    pub const fn changes_blocks(self) -> bool {
        match self {
            RequestKind::Write
            | RequestKind::WriteZeroes
            | RequestKind::Copy
            | RequestKind::CompareAndWrite
            | RequestKind::WriteUncorrectable
            | RequestKind::Discard
            | RequestKind::Repair => true,
            RequestKind::Read
            | RequestKind::Salvage
            | RequestKind::Flush
            | RequestKind::Verify
            | RequestKind::Checksum
            | RequestKind::BlockStatus
            | RequestKind::Compare
            | RequestKind::ReadReserved
            | RequestKind::WriteReserved => false,
        }
    }
}

impl Request {
    fn on(operation: Operation, extent: Extent) -> Request {
        Request { operation, extents: extent.into(), durability: Durability::Volatile }
    }

    fn without_extent(operation: Operation) -> Request {
        Request { operation, extents: Extents::default(), durability: Durability::Volatile }
    }

    /// See [`Operation::Read`].
    pub fn read(extent: Extent, expectations: Expectations) -> Request {
        Request::on(Operation::Read(expectations), extent)
    }

    /// See [`Operation::Salvage`].
    pub fn salvage(extent: Extent) -> Request {
        Request::on(Operation::Salvage, extent)
    }

    /// See [`Operation::Write`].
    pub fn write(extent: Extent, data: impl Into<WriteData>, durability: Durability) -> Request {
        Request { durability, ..Request::on(Operation::Write(data.into()), extent) }
    }

    /// See [`Operation::Flush`].
    pub fn flush() -> Request {
        Request::without_extent(Operation::Flush)
    }

    /// See [`Operation::Discard`].
    pub fn discard(extents: impl IntoIterator<Item = Extent>) -> Request {
        Request { extents: extents.into_iter().collect(), ..Request::without_extent(Operation::Discard) }
    }

    /// See [`Operation::WriteZeroes`].
    pub fn write_zeroes(extent: Extent, may_unmap: bool, durability: Durability) -> Request {
        Request { durability, ..Request::on(Operation::WriteZeroes { may_unmap }, extent) }
    }

    /// See [`Operation::Copy`].
    pub fn copy(source: Extent, destination: Extent, expectations: Expectations, durability: Durability) -> Request {
        Request { durability, ..Request::on(Operation::Copy { source, expectations }, destination) }
    }

    /// See [`Operation::WriteUncorrectable`]: as a host asks for it.
    pub fn write_uncorrectable(extent: Extent, durability: Durability) -> Request {
        Request { durability, ..Request::on(Operation::WriteUncorrectable { marks_loss: false }, extent) }
    }

    /// Makes blocks unreadable whose data are lost, as a resync or a copy does with those that its source has lost.
    pub fn mark_lost(extent: Extent) -> Request {
        Request::on(Operation::WriteUncorrectable { marks_loss: true }, extent)
    }

    /// See [`Operation::Verify`].
    pub fn verify(extent: Extent, expectations: Expectations) -> Request {
        Request::on(Operation::Verify(expectations), extent)
    }

    /// See [`Operation::Checksum`].
    pub fn checksum(extent: Extent, kind: ChecksumKind, expectations: Expectations) -> Request {
        Request::on(Operation::Checksum(kind, expectations), extent)
    }

    /// See [`Operation::Repair`].
    pub fn repair(extent: Extent) -> Request {
        Request::on(Operation::Repair, extent)
    }

    /// See [`Operation::BlockStatus`].
    pub fn block_status(extent: Extent) -> Request {
        Request::on(Operation::BlockStatus, extent)
    }

    /// See [`Operation::Compare`].
    pub fn compare(extent: Extent, data: Sealed) -> Request {
        Request::on(Operation::Compare(data), extent)
    }

    /// See [`Operation::CompareAndWrite`].
    pub fn compare_and_write(extent: Extent, expected: Sealed, new: Sealed, durability: Durability) -> Request {
        let operation = Operation::CompareAndWrite(Box::new(CompareAndWrite { expected, new }));
        Request { durability, ..Request::on(operation, extent) }
    }

    /// See [`Operation::ReadReserved`].
    pub fn read_reserved(area: ReservedArea) -> Request {
        Request::without_extent(Operation::ReadReserved(area))
    }

    /// See [`Operation::WriteReserved`].
    pub fn write_reserved(area: ReservedArea, bytes: Slice) -> Request {
        let operation = Operation::WriteReserved(area, bytes);
        Request { durability: Durability::ForceUnitAccess, ..Request::without_extent(operation) }
    }

    /// The kind of the request.
    pub const fn kind(&self) -> RequestKind {
        match self.operation {
            Operation::Read(_) => RequestKind::Read,
            Operation::Salvage => RequestKind::Salvage,
            Operation::Write(_) => RequestKind::Write,
            Operation::Flush => RequestKind::Flush,
            Operation::Discard => RequestKind::Discard,
            Operation::WriteZeroes { .. } => RequestKind::WriteZeroes,
            Operation::Copy { .. } => RequestKind::Copy,
            Operation::Verify(_) => RequestKind::Verify,
            Operation::Compare(_) => RequestKind::Compare,
            Operation::CompareAndWrite(_) => RequestKind::CompareAndWrite,
            Operation::WriteUncorrectable { .. } => RequestKind::WriteUncorrectable,
            Operation::Checksum(..) => RequestKind::Checksum,
            Operation::Repair => RequestKind::Repair,
            Operation::BlockStatus => RequestKind::BlockStatus,
            Operation::ReadReserved(_) => RequestKind::ReadReserved,
            Operation::WriteReserved(..) => RequestKind::WriteReserved,
        }
    }

    /// The same request with its data, if it has any, mapped by `change`: both compared and written data.
    #[must_use]
    pub fn map_data(mut self, mut change: impl FnMut(WriteData) -> WriteData) -> Request {
        self.operation = match self.operation {
            Operation::Write(data) => Operation::Write(change(data)),
            Operation::Compare(data) => Operation::Compare(change(data.into()).into_sealed()),
            Operation::CompareAndWrite(data) => {
                let CompareAndWrite { expected, new } = *data;
                let (expected, new) = (change(expected.into()).into_sealed(), change(new.into()).into_sealed());
                Operation::CompareAndWrite(Box::new(CompareAndWrite { expected, new }))
            }
            operation => operation,
        };
        self
    }

    /// True if it writes data without tags.
    pub const fn is_unsealed(&self) -> bool {
        matches!(self.operation, Operation::Write(WriteData::Unsealed(_)))
    }

    /// The same request with its data sealed; data without tags are sealed now.
    #[must_use]
    pub fn sealed(self) -> Request {
        self.map_data(|data| data.into_sealed().into())
    }

    /// What the requester expects of tags; nothing for operations without expectations.
    pub const fn expectations(&self) -> Expectations {
        match self.operation {
            Operation::Read(expectations)
            | Operation::Copy { expectations, .. }
            | Operation::Verify(expectations)
            | Operation::Checksum(_, expectations) => expectations,
            _ => Expectations::NONE,
        }
    }

    /// The same request with its expectations, if it has any, mapped by `change`.
    #[must_use]
    pub fn map_expectations(mut self, change: impl FnOnce(Expectations) -> Expectations) -> Request {
        if let Operation::Read(expectations)
        | Operation::Copy { expectations, .. }
        | Operation::Verify(expectations)
        | Operation::Checksum(_, expectations) = &mut self.operation
        {
            *expectations = change(*expectations);
        }
        self
    }

    /// The same request with its extents, including that of a source, mapped by `change`.
    #[must_use]
    pub fn map_extents(mut self, mut change: impl FnMut(Extent) -> Extent) -> Request {
        if let Operation::Copy { source, .. } = &mut self.operation {
            *source = change(*source);
        }
        self.extents = self.extents.map(change);
        self
    }

    /// The same request for `part` of its extent `whole`, on a device of this format: with that part of the data or of
    /// the source, and with the expected reference tag advanced to its first block.
    #[must_use]
    pub fn part(&self, whole: Extent, part: Extent, format: Option<PiFormat>) -> Request {
        let first = part.start().get() - whole.start().get();
        let mut operation = self.operation.clone();
        if let Operation::Copy { source, .. } = &mut operation {
            let start = Lba::new(source.start().get() + first);
            *source = Extent::new(start, part.blocks()).expect("a part of a source has addresses");
        }
        // Not `..self.clone()`, which would copy all extents of a long Discard for each part.
        Request { operation, extents: part.into(), durability: self.durability }
            .map_expectations(|expectations| expectations.advance(first, format))
            .map_data(|data| data.slice(first as usize, part.len() as usize))
    }

    /// The extent of the request, if it has exactly one.
    pub fn extent(&self) -> Option<Extent> {
        match self.extents[..] {
            [extent] => Some(extent),
            _ => None,
        }
    }

    /// The blocks that a Copy copies.
    pub const fn source(&self) -> Option<Extent> {
        match self.operation {
            Operation::Copy { source, .. } => Some(source),
            _ => None,
        }
    }

    /// The extents of the blocks that the request changes; empty if it changes none.
    pub fn changed_extents(&self) -> &[Extent] {
        if self.kind().changes_blocks() { &self.extents } else { &[] }
    }

    /// The blocks that the request changes, from the first to the last; `None` if it changes none.
    pub fn changed(&self) -> Option<RangeInclusive<u64>> {
        if self.kind().changes_blocks() { self.extents.first_to_last() } else { None }
    }

    /// True if a crash can lose what the request changes until a later Flush.
    pub fn is_volatile(&self) -> bool {
        self.kind().changes_blocks() && self.durability == Durability::Volatile
    }

    /// True if success makes something durable. Its failure may then be a failed flush, after which the durability of
    /// every other write is unknown too.
    pub fn is_durable(&self) -> bool {
        matches!(self.operation, Operation::Flush) || self.durability == Durability::ForceUnitAccess
    }

    /// The number of blocks of the request, over all its extents.
    pub fn blocks(&self) -> u64 {
        self.extents.iter().fold(0, |blocks: u64, extent| blocks.saturating_add(extent.len()))
    }
}

/// Bytes of a device for each bit of the bitmap pages, as long as these need at most [`MAX_BITS`] bits.
const BYTES_PER_BIT: u64 = 64 << 10;
/// Maximum bits of a bitmap. A larger device is tracked with more bytes per bit.
const MAX_BITS: u64 = 1 << 24;
/// Maximum bits of a bitmap that needs no pages, because it fits into the label.
const BITS_WITHOUT_PAGES: u64 = 8192;
/// Bitmaps of a group: the write intent, and the out-of-sync regions of each of up to eight members.
const BITMAPS: u64 = 9;
/// Bytes of a bitmap page, and of its header, which the group writes.
const PAGE_BYTES: usize = 4096;
const PAGE_HEADER_BYTES: usize = 64;

/// A part of the reserved area: a few kilobytes besides the blocks, read and written as a whole.
///
/// A group stores there which of its members are in sync, and a scrub its progress. The reserved area is not made of
/// blocks, so the device keeps its capacity, and its blocks stay identical to those of the other copies.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum ReservedArea {
    /// The label of the group that the device is a member of.
    GroupLabel,
    /// The state of the scrub of the device.
    ScrubState,
    /// A page of the group's bitmaps. It is written in place, so a crash can leave it torn: the reader checks it.
    Bitmap {
        /// Page number from 0, below [`crate::Abilities::bitmap_pages`].
        page: u32,
    },
}

impl ReservedArea {
    /// The parts that every reserved area has; each is replaced all or nothing.
    pub const ALL: [ReservedArea; 2] = [ReservedArea::GroupLabel, ReservedArea::ScrubState];

    /// The number of bitmap pages of a device of `capacity_bytes` with a reserved area: 0 if the bitmaps fit into the
    /// label.
    pub const fn bitmap_pages(capacity_bytes: u64) -> u32 {
        let bits = capacity_bytes.div_ceil(BYTES_PER_BIT);
        let bits = if bits > MAX_BITS { MAX_BITS } else { bits };
        if bits <= BITS_WITHOUT_PAGES {
            return 0;
        }
        (BITMAPS * bits.div_ceil((PAGE_BYTES - PAGE_HEADER_BYTES) as u64 * 8)) as u32
    }

    /// The maximum length of the part, in bytes.
    pub const fn max_bytes(self) -> usize {
        match self {
            ReservedArea::GroupLabel => (20 << 10) - 64,
            ReservedArea::ScrubState => (8 << 10) - 64,
            ReservedArea::Bitmap { .. } => PAGE_BYTES,
        }
    }

    /// The minimum number of bitmap pages of a device that has the part.
    pub const fn pages(self) -> u32 {
        match self {
            ReservedArea::GroupLabel | ReservedArea::ScrubState => 0,
            ReservedArea::Bitmap { page } => page.saturating_add(1),
        }
    }

    /// Index into [`ReservedArea::ALL`]; all bitmap pages share the index after the last one.
    pub const fn index(self) -> usize {
        match self {
            ReservedArea::GroupLabel => 0,
            ReservedArea::ScrubState => 1,
            ReservedArea::Bitmap { .. } => ReservedArea::ALL.len(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sealblock_integrity::Checks;

    /// Requests are moved at every level of the stack.
    #[test]
    fn a_request_is_no_larger_than_its_largest_operation_needs() {
        assert!(size_of::<Request>() <= 120, "{} bytes", size_of::<Request>());
    }

    #[test]
    fn a_part_of_a_copy_has_its_part_of_the_source_and_both_are_moved() {
        let extent = |start, blocks| Extent::from_raw(start, blocks).unwrap();
        let expectations = Expectations::new(Checks { guard: true, ..Checks::NONE });
        let copy = Request::copy(extent(100, 8), extent(20, 8), expectations, Durability::ForceUnitAccess);
        let part = copy.part(extent(20, 8), extent(23, 2), None);
        assert_eq!((part.extent(), part.source()), (Some(extent(23, 2)), Some(extent(103, 2))));
        assert_eq!((part.expectations(), part.durability), (expectations, Durability::ForceUnitAccess));
        let moved = part.map_extents(|old| extent(old.start().get() + 1000, old.len()));
        assert_eq!((moved.extent(), moved.source()), (Some(extent(1023, 2)), Some(extent(1103, 2))));
        assert_eq!((moved.changed_extents(), moved.changed()), (&[extent(1023, 2)][..], Some(1023..=1024)));
    }

    /// Requests are moved through every level of the stack.
    #[test]
    fn no_operation_makes_requests_longer_than_a_copy_does() {
        assert_eq!(size_of::<Request>(), 120);
    }

    #[test]
    fn both_data_of_a_compare_and_write_are_moved_and_its_blocks_are_changed() {
        let extent = |start, blocks| Extent::from_raw(start, blocks).unwrap();
        let data = |bytes: [u8; 2]| {
            let bytes: Vec<u8> = bytes.iter().flat_map(|byte| [*byte; 512]).collect();
            let tags = sealblock_integrity::Tags::default();
            Sealed::seal(Slice::copy_from(&bytes), sealblock_units::BlockSize::B512, None, &tags)
        };
        let fua = Durability::ForceUnitAccess;
        let request = Request::compare_and_write(extent(20, 2), data([1, 2]), data([3, 4]), fua);
        assert_eq!((request.kind(), request.changed()), (RequestKind::CompareAndWrite, Some(20..=21)));
        assert!(request.is_durable() && !request.is_volatile());
        let part = request.part(extent(20, 2), extent(21, 1), None).map_extents(|old| extent(old.start().get() + 9, 1));
        assert_eq!((part.extent(), part.durability), (Some(extent(30, 1)), fua));
        let Operation::CompareAndWrite(both) = part.operation else { panic!("the same operation") };
        assert_eq!([&both.expected, &both.new].map(|data| (data.blocks(), data.joined_data()[0])), [(1, 2), (1, 4)]);
    }

    #[test]
    fn pages_grow_with_the_device_and_end_where_tracking_gets_coarser() {
        let pages = ReservedArea::bitmap_pages;
        assert_eq!([pages(0), pages(4096), pages(512 << 20)], [0; 3], "the label is enough");
        assert_eq!(pages((512 << 20) + 1), 9);
        assert_eq!(pages(1 << 40), 9 * 521, "18.3 MiB");
        assert_eq!(pages(u64::MAX), pages(1 << 40));
    }
}
