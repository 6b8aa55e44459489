//! Requests to a device, and its responses.

use std::ops::RangeInclusive;

use sealblock_integrity::{Checks, Sealed};
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockCount, Extent};

use crate::{Coverage, Error};

/// When a write is durable.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Durability {
    /// A later Flush makes it durable.
    #[default]
    Volatile,
    /// Force unit access: durable before the request completes.
    ForceUnitAccess,
}

/// One request. The set is closed: no protocol's own command passes through.
#[derive(Clone, Debug)]
pub enum Request {
    /// Read blocks, checked where they are stored.
    Read {
        /// The blocks.
        extent: Extent,
        /// Which tags are checked, and against what.
        checks: Checks,
    },
    /// Write blocks with their tags.
    Write {
        /// The blocks.
        extent: Extent,
        /// Their data and tags, in the device's protection format.
        data: Sealed,
        /// When the write is durable.
        durability: Durability,
    },
    /// Make every write completed so far durable.
    Flush,
    /// Deallocate blocks. What they read as afterwards is undefined.
    Discard {
        /// The runs of blocks.
        extents: Vec<Extent>,
    },
    /// Make blocks read as zeroes.
    WriteZeroes {
        /// The blocks.
        extent: Extent,
        /// True if the space may be deallocated.
        may_unmap: bool,
        /// When the change is durable.
        durability: Durability,
    },
    /// Read and check blocks where they are stored, without returning data.
    Verify {
        /// The blocks.
        extent: Extent,
        /// Which tags are checked, and against what.
        checks: Checks,
    },
    /// Verify, and return the CRC-64/NVME of the data, so that two devices can be compared without moving their data.
    Checksum {
        /// The blocks.
        extent: Extent,
        /// Which tags are checked, and against what.
        checks: Checks,
    },
    /// Verify, and rewrite bad blocks from another copy. The bad blocks of its error say which of them were repaired.
    Repair {
        /// The blocks.
        extent: Extent,
        /// Which tags are checked, and against what.
        checks: Checks,
    },
    /// Return which blocks take space.
    BlockStatus {
        /// The blocks.
        extent: Extent,
    },
    /// Compare stored blocks with the given data.
    Compare {
        /// The blocks.
        extent: Extent,
        /// The expected data.
        data: Sealed,
    },
    /// Read a part of the reserved area.
    ReadReserved {
        /// The part.
        area: ReservedArea,
    },
    /// Replace a part of the reserved area: all of it or nothing, durable when the request completes.
    WriteReserved {
        /// The part.
        area: ReservedArea,
        /// The new content; at most [`ReservedArea::max_bytes`].
        bytes: Slice,
    },
    /// Make blocks unreadable: until they are written, zeroed or discarded, they fail as [`crate::BadBlockCause::Media`].
    WriteUncorrectable {
        /// The blocks.
        extent: Extent,
        /// When the change is durable.
        durability: Durability,
    },
}

/// The kind of a [`Request`], without its arguments.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RequestKind {
    /// Read blocks.
    Read,
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
    /// Compare blocks.
    Compare,
    /// Make blocks unreadable.
    WriteUncorrectable,
    /// Check blocks in place and return the CRC of their data.
    Checksum,
    /// Check blocks in place and repair them.
    Repair,
    /// Return which blocks take space.
    BlockStatus,
    /// Read a part of the reserved area.
    ReadReserved,
    /// Replace a part of the reserved area.
    WriteReserved,
}

impl RequestKind {
    /// Every kind, in the order of [`RequestKind::index`].
    pub const ALL: [RequestKind; 13] = [
        RequestKind::Read,
        RequestKind::Write,
        RequestKind::Flush,
        RequestKind::Discard,
        RequestKind::WriteZeroes,
        RequestKind::Verify,
        RequestKind::Compare,
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
            RequestKind::Write => "write",
            RequestKind::Flush => "flush",
            RequestKind::Discard => "discard",
            RequestKind::WriteZeroes => "write zeroes",
            RequestKind::Verify => "verify",
            RequestKind::Compare => "compare",
            RequestKind::WriteUncorrectable => "write uncorrectable",
            RequestKind::Checksum => "checksum",
            RequestKind::Repair => "repair",
            RequestKind::BlockStatus => "block status",
            RequestKind::ReadReserved => "read reserved area",
            RequestKind::WriteReserved => "write reserved area",
        }
    }
}

impl Request {
    /// The kind of the request.
    pub const fn kind(&self) -> RequestKind {
        match self {
            Request::Read { .. } => RequestKind::Read,
            Request::Write { .. } => RequestKind::Write,
            Request::Flush => RequestKind::Flush,
            Request::Discard { .. } => RequestKind::Discard,
            Request::WriteZeroes { .. } => RequestKind::WriteZeroes,
            Request::Verify { .. } => RequestKind::Verify,
            Request::Compare { .. } => RequestKind::Compare,
            Request::WriteUncorrectable { .. } => RequestKind::WriteUncorrectable,
            Request::Checksum { .. } => RequestKind::Checksum,
            Request::Repair { .. } => RequestKind::Repair,
            Request::BlockStatus { .. } => RequestKind::BlockStatus,
            Request::ReadReserved { .. } => RequestKind::ReadReserved,
            Request::WriteReserved { .. } => RequestKind::WriteReserved,
        }
    }

    /// The extent of the request; none for Flush, Discard, ReadReserved and WriteReserved.
    pub const fn extent(&self) -> Option<Extent> {
        match self {
            Request::Read { extent, .. }
            | Request::Write { extent, .. }
            | Request::WriteZeroes { extent, .. }
            | Request::Verify { extent, .. }
            | Request::Checksum { extent, .. }
            | Request::Repair { extent, .. }
            | Request::BlockStatus { extent }
            | Request::Compare { extent, .. }
            | Request::WriteUncorrectable { extent, .. } => Some(*extent),
            Request::Flush | Request::Discard { .. } | Request::ReadReserved { .. } | Request::WriteReserved { .. } => {
                None
            }
        }
    }

    /// The blocks that the request changes, from the first to the last; none if it changes no blocks. Repair counts, because it
    /// writes to a copy what it read from another one.
    pub fn changed(&self) -> Option<RangeInclusive<u64>> {
        let first_to_last = |extents: &[Extent]| {
            let first = extents.iter().map(|extent| extent.start().get()).min()?;
            Some(first..=extents.iter().map(|extent| extent.last().get()).max()?)
        };
        match self {
            Request::Write { extent, .. }
            | Request::WriteZeroes { extent, .. }
            | Request::WriteUncorrectable { extent, .. }
            | Request::Repair { extent, .. } => first_to_last(&[*extent]),
            Request::Discard { extents } => first_to_last(extents),
            Request::Read { .. }
            | Request::Flush
            | Request::Verify { .. }
            | Request::Checksum { .. }
            | Request::BlockStatus { .. }
            | Request::Compare { .. }
            | Request::ReadReserved { .. }
            | Request::WriteReserved { .. } => None,
        }
    }

    /// True if a crash can lose what the request changes until a later Flush.
    pub const fn is_volatile(&self) -> bool {
        match self {
            Request::Write { durability, .. }
            | Request::WriteZeroes { durability, .. }
            | Request::WriteUncorrectable { durability, .. } => matches!(durability, Durability::Volatile),
            Request::Discard { .. } | Request::Repair { .. } => true,
            Request::Read { .. }
            | Request::Flush
            | Request::Verify { .. }
            | Request::Checksum { .. }
            | Request::BlockStatus { .. }
            | Request::Compare { .. }
            | Request::ReadReserved { .. }
            | Request::WriteReserved { .. } => false,
        }
    }

    /// True if success makes something durable. Its failure may then be a failed flush, after which the durability of every other
    /// write is unknown too.
    pub const fn is_durable(&self) -> bool {
        match self {
            Request::Write { durability, .. }
            | Request::WriteZeroes { durability, .. }
            | Request::WriteUncorrectable { durability, .. } => matches!(durability, Durability::ForceUnitAccess),
            Request::Flush | Request::WriteReserved { .. } => true,
            Request::Discard { .. }
            | Request::Repair { .. }
            | Request::Read { .. }
            | Request::Verify { .. }
            | Request::Checksum { .. }
            | Request::BlockStatus { .. }
            | Request::Compare { .. }
            | Request::ReadReserved { .. } => false,
        }
    }

    /// The number of blocks of the request, over all its extents.
    pub fn blocks(&self) -> u64 {
        match self {
            Request::Discard { extents } => {
                extents.iter().fold(0, |blocks: u64, extent| blocks.saturating_add(extent.len()))
            }
            other => other.extent().map_or(0, Extent::len),
        }
    }
}

/// The result of a Verify: its cost and its coverage.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct VerifyStats {
    /// Bytes of payload that crossed from the device to this host to be checked.
    pub bytes_transferred: u64,
    /// What was not checked.
    pub coverage: Coverage,
}

/// The result of a Checksum request.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Checksum {
    /// The CRC-64/NVME of the blocks' data, in order.
    pub crc64: u64,
    /// Bytes of payload that crossed from the device to this host to compute it.
    pub bytes_transferred: u64,
    /// What was not checked.
    pub coverage: Coverage,
}

/// The response to a request that succeeded.
#[derive(Debug)]
pub enum Response {
    /// Write, Flush, Discard, WriteZeroes, Compare, WriteUncorrectable and WriteReserved.
    Done,
    /// Read: the blocks, checked as requested.
    Data(Sealed),
    /// Verify and Repair: all blocks that were checked are good.
    Verified(VerifyStats),
    /// Checksum: all blocks that were checked are good.
    Checksum(Checksum),
    /// BlockStatus: runs that cover the extent, in order.
    BlockStatus(Vec<StatusRun>),
    /// ReadReserved: what the last WriteReserved wrote; empty if there was none.
    Reserved(Slice),
}

/// The outcome of a request: exactly one per request.
pub type Outcome = Result<Response, Error>;

/// Bytes of a device for each bit of the bitmap pages, while it has no more than [`MOST_BITS`] of them.
const BYTES_PER_BIT: u64 = 64 << 10;
/// Maximum bits of a bitmap. A larger device is tracked with more bytes per bit.
const MAX_BITS: u64 = 1 << 24;
/// Maximum bits of a bitmap that needs no pages, because it fits into the label.
const BITS_WITHOUT_PAGES: u64 = 8192;
/// Bitmaps of a group: the write intent, and what is out of sync on each of up to eight members.
const BITMAPS: u64 = 9;
/// Bytes of a bitmap page, and of its header, which the group writes.
const PAGE_BYTES: usize = 4096;
const PAGE_HEADER_BYTES: usize = 64;

/// A part of the reserved area: a few kilobytes beside the blocks, read and written as a whole.
///
/// A group stores there which of its members are in sync, and a scrub its progress. The reserved area is not made of blocks, so
/// the device keeps its capacity, and its blocks stay identical to those of the other copies.
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

    /// The number of bitmap pages of a device of `capacity_bytes` with a reserved area: 0 as long as the label has room for the
    /// bitmaps.
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

    /// Index into [`ReservedArea::ALL`]; all bitmap pages share the index behind the last one.
    pub const fn index(self) -> usize {
        match self {
            ReservedArea::GroupLabel => 0,
            ReservedArea::ScrubState => 1,
            ReservedArea::Bitmap { .. } => ReservedArea::ALL.len(),
        }
    }
}

/// A run of blocks with the same state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StatusRun {
    /// Length of the run.
    pub blocks: BlockCount,
    /// State of each block of the run.
    pub state: BlockState,
}

/// Whether a block takes space on the medium.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum BlockState {
    /// The block takes space, or may.
    Allocated,
    /// The block takes no space and reads as zeroes.
    Hole,
}

/// Builds the runs of a block status: neighbours of the same state become one run.
#[derive(Clone, Debug, Default)]
pub struct StatusRuns(Vec<StatusRun>);

impl StatusRuns {
    /// Appends `blocks` blocks of this state.
    pub fn push(&mut self, blocks: BlockCount, state: BlockState) {
        let joined = self.0.last().filter(|last| last.state == state);
        // Runs whose total exceeds a `BlockCount` stay apart.
        let joined = joined.and_then(|last| BlockCount::new(last.blocks.get().checked_add(blocks.get())?));
        match (self.0.last_mut(), joined) {
            (Some(last), Some(blocks)) => last.blocks = blocks,
            _ => self.0.push(StatusRun { blocks, state }),
        }
    }

    /// The number of runs.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// True if there are no runs.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The runs, in order.
    pub fn into_vec(self) -> Vec<StatusRun> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_grow_with_the_device_and_end_where_tracking_gets_coarser() {
        let pages = ReservedArea::bitmap_pages;
        assert_eq!([pages(0), pages(4096), pages(512 << 20)], [0; 3], "the label is enough");
        assert_eq!(pages((512 << 20) + 1), 9);
        assert_eq!(pages(1 << 40), 9 * 521, "18.3 MiB");
        assert_eq!(pages(u64::MAX), pages(1 << 40));
    }

    #[test]
    fn neighbours_that_are_alike_become_one_run() {
        let mut runs = StatusRuns::default();
        let parts = [
            (1, BlockState::Hole),
            (2, BlockState::Hole),
            (3, BlockState::Allocated),
            (u32::MAX, BlockState::Allocated),
        ];
        for (blocks, state) in parts {
            runs.push(BlockCount::new(blocks).unwrap(), state);
        }
        let merged: Vec<_> = runs.into_vec().iter().map(|run| (run.blocks.get(), run.state)).collect();
        assert_eq!(merged, [(3, BlockState::Hole), (3, BlockState::Allocated), (u32::MAX, BlockState::Allocated)]);
    }
}
