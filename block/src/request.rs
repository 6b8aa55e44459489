//! What can be asked of a device, and what it answers.

use std::ops::RangeInclusive;

use sealblock_integrity::{Checks, Sealed};
use sealblock_runtime_memory::Slice;
use sealblock_units::Extent;

use crate::{Coverage, Error, ReservedArea, StatusRun};

/// Whether a write must be on the medium before it is answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Durability {
    /// A later Flush makes it durable.
    #[default]
    Volatile,
    /// Force unit access: durable before the answer.
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
        /// Whether the write waits for the medium.
        durability: Durability,
    },
    /// Make every write answered so far durable.
    Flush,
    /// Give up blocks. Promises nothing about what they read as.
    Discard {
        /// The runs of blocks.
        extents: Vec<Extent>,
    },
    /// Make blocks read as zeroes.
    WriteZeroes {
        /// The blocks.
        extent: Extent,
        /// Whether the space may be given back.
        may_unmap: bool,
        /// Whether the change waits for the medium.
        durability: Durability,
    },
    /// Read and check blocks where they are stored, handing no data on.
    Verify {
        /// The blocks.
        extent: Extent,
        /// Which tags are checked, and against what.
        checks: Checks,
    },
    /// Verify, and the CRC-64/NVME of the data, so that two devices can be compared where their data are.
    Checksum {
        /// The blocks.
        extent: Extent,
        /// Which tags are checked, and against what.
        checks: Checks,
    },
    /// Verify, and write what fails anew from another copy. The faults of its answer say which blocks were repaired.
    Repair {
        /// The blocks.
        extent: Extent,
        /// Which tags are checked, and against what.
        checks: Checks,
    },
    /// Ask which blocks take space.
    BlockStatus {
        /// The blocks.
        extent: Extent,
    },
    /// Compare stored blocks with these.
    Compare {
        /// The blocks.
        extent: Extent,
        /// What they should hold.
        data: Sealed,
    },
    /// Read a slot of the room beside the blocks.
    ReadReserved {
        /// Which.
        slot: ReservedArea,
    },
    /// Replace what a slot of the room beside the blocks holds: all of it or nothing, durable when it is answered.
    WriteReserved {
        /// Which.
        slot: ReservedArea,
        /// What it is to hold; at most [`ReservedArea::max_bytes`].
        bytes: Slice,
    },
    /// Make blocks unreadable: until they are written, zeroed or discarded, they fail as [`crate::BadBlockCause::Media`].
    WriteUncorrectable {
        /// The blocks.
        extent: Extent,
        /// Whether the change waits for the medium.
        durability: Durability,
    },
}

/// An operation's name without its arguments.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RequestKind {
    /// Read blocks.
    Read,
    /// Write blocks.
    Write,
    /// Make writes durable.
    Flush,
    /// Give up blocks.
    Discard,
    /// Make blocks read as zeroes.
    WriteZeroes,
    /// Check blocks in place.
    Verify,
    /// Compare blocks.
    Compare,
    /// Make blocks unreadable.
    WriteUncorrectable,
    /// Check blocks in place and sum them.
    Checksum,
    /// Check blocks in place and mend them.
    Repair,
    /// Ask which blocks take space.
    BlockStatus,
    /// Read from beside the blocks.
    ReadReserved,
    /// Write beside the blocks.
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

    /// Position in tables of counters.
    pub const fn index(self) -> usize {
        self as usize
    }

    /// The name as people read it.
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
            RequestKind::Checksum => "digest",
            RequestKind::Repair => "repair",
            RequestKind::BlockStatus => "allocation status",
            RequestKind::ReadReserved => "annex to read",
            RequestKind::WriteReserved => "annex to write",
        }
    }
}

impl Request {
    /// Which operation it is.
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

    /// The one run of blocks it is about; none for Flush, Discard and the annex.
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

    /// The blocks that it changes, from the first to the last; none if it changes no blocks. A Repair writes what it finds on one
    /// copy to another, so it counts.
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

    /// Whether what it changes is lost without a later Flush.
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

    /// Whether its success says that something is durable, so that its failure may be that of a flush: after that nobody knows
    /// what else is.
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

    /// How many blocks it is about, all extents together.
    pub fn blocks(&self) -> u64 {
        match self {
            Request::Discard { extents } => extents.iter().fold(0, |sum, extent| sum.saturating_add(extent.len())),
            other => other.extent().map_or(0, Extent::len),
        }
    }
}

/// What a Verify cost, and how far it went.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct VerifyStats {
    /// Bytes of payload that came from the device to this host to be checked.
    pub bytes_transferred: u64,
    /// What it could not check.
    pub coverage: Coverage,
}

/// What a Digest found.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Checksum {
    /// The CRC-64/NVME of the blocks' data, in order.
    pub crc64: u64,
    /// Bytes of payload that came from the device to this host for it.
    pub bytes_transferred: u64,
    /// What it could not check.
    pub coverage: Coverage,
}

/// What a successful operation gives back.
#[derive(Debug)]
pub enum Response {
    /// Write, Flush, Discard, WriteZeroes, Compare, WriteUncorrectable, WriteAnnex.
    Done,
    /// Read: the blocks, checked as asked.
    Data(Sealed),
    /// Verify and Repair: all blocks that were checked are good.
    Verified(VerifyStats),
    /// Digest: all blocks that were checked are good.
    Checksum(Checksum),
    /// Allocation: runs that cover the extent, in order.
    BlockStatus(Vec<StatusRun>),
    /// ReadAnnex: what was written last; empty when nothing was.
    Reserved(Slice),
}

/// How a request ends: exactly once.
pub type Outcome = Result<Response, Error>;
