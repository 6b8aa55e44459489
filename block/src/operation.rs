//! What can be asked of a device, and what it answers.

use std::ops::RangeInclusive;

use sealblock_integrity::{Checks, Sealed};
use sealblock_runtime_memory::Slice;
use sealblock_units::Extent;

use crate::{AnnexSlot, Coverage, Error, Run};

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
pub enum Operation {
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
    Digest {
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
    Allocation {
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
    ReadAnnex {
        /// Which.
        slot: AnnexSlot,
    },
    /// Replace what a slot of the room beside the blocks holds: all of it or nothing, durable when it is answered.
    WriteAnnex {
        /// Which.
        slot: AnnexSlot,
        /// What it is to hold; at most [`AnnexSlot::most_bytes`].
        bytes: Slice,
    },
    /// Make blocks unreadable: until they are written, zeroed or discarded, they fail as [`crate::FaultField::Media`].
    WriteUncorrectable {
        /// The blocks.
        extent: Extent,
        /// Whether the change waits for the medium.
        durability: Durability,
    },
}

/// An operation's name without its arguments.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum OperationKind {
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
    Digest,
    /// Check blocks in place and mend them.
    Repair,
    /// Ask which blocks take space.
    Allocation,
    /// Read from beside the blocks.
    ReadAnnex,
    /// Write beside the blocks.
    WriteAnnex,
}

impl OperationKind {
    /// Every kind, in the order of [`OperationKind::index`].
    pub const ALL: [OperationKind; 13] = [
        OperationKind::Read,
        OperationKind::Write,
        OperationKind::Flush,
        OperationKind::Discard,
        OperationKind::WriteZeroes,
        OperationKind::Verify,
        OperationKind::Compare,
        OperationKind::WriteUncorrectable,
        OperationKind::Digest,
        OperationKind::Repair,
        OperationKind::Allocation,
        OperationKind::ReadAnnex,
        OperationKind::WriteAnnex,
    ];

    /// Position in tables of counters.
    pub const fn index(self) -> usize {
        self as usize
    }

    /// The name as people read it.
    pub const fn name(self) -> &'static str {
        match self {
            OperationKind::Read => "read",
            OperationKind::Write => "write",
            OperationKind::Flush => "flush",
            OperationKind::Discard => "discard",
            OperationKind::WriteZeroes => "write zeroes",
            OperationKind::Verify => "verify",
            OperationKind::Compare => "compare",
            OperationKind::WriteUncorrectable => "write uncorrectable",
            OperationKind::Digest => "digest",
            OperationKind::Repair => "repair",
            OperationKind::Allocation => "allocation status",
            OperationKind::ReadAnnex => "annex to read",
            OperationKind::WriteAnnex => "annex to write",
        }
    }
}

impl Operation {
    /// Which operation it is.
    pub const fn kind(&self) -> OperationKind {
        match self {
            Operation::Read { .. } => OperationKind::Read,
            Operation::Write { .. } => OperationKind::Write,
            Operation::Flush => OperationKind::Flush,
            Operation::Discard { .. } => OperationKind::Discard,
            Operation::WriteZeroes { .. } => OperationKind::WriteZeroes,
            Operation::Verify { .. } => OperationKind::Verify,
            Operation::Compare { .. } => OperationKind::Compare,
            Operation::WriteUncorrectable { .. } => OperationKind::WriteUncorrectable,
            Operation::Digest { .. } => OperationKind::Digest,
            Operation::Repair { .. } => OperationKind::Repair,
            Operation::Allocation { .. } => OperationKind::Allocation,
            Operation::ReadAnnex { .. } => OperationKind::ReadAnnex,
            Operation::WriteAnnex { .. } => OperationKind::WriteAnnex,
        }
    }

    /// The one run of blocks it is about; none for Flush, Discard and the annex.
    pub const fn extent(&self) -> Option<Extent> {
        match self {
            Operation::Read { extent, .. }
            | Operation::Write { extent, .. }
            | Operation::WriteZeroes { extent, .. }
            | Operation::Verify { extent, .. }
            | Operation::Digest { extent, .. }
            | Operation::Repair { extent, .. }
            | Operation::Allocation { extent }
            | Operation::Compare { extent, .. }
            | Operation::WriteUncorrectable { extent, .. } => Some(*extent),
            Operation::Flush
            | Operation::Discard { .. }
            | Operation::ReadAnnex { .. }
            | Operation::WriteAnnex { .. } => None,
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
            Operation::Write { extent, .. }
            | Operation::WriteZeroes { extent, .. }
            | Operation::WriteUncorrectable { extent, .. }
            | Operation::Repair { extent, .. } => first_to_last(&[*extent]),
            Operation::Discard { extents } => first_to_last(extents),
            Operation::Read { .. }
            | Operation::Flush
            | Operation::Verify { .. }
            | Operation::Digest { .. }
            | Operation::Allocation { .. }
            | Operation::Compare { .. }
            | Operation::ReadAnnex { .. }
            | Operation::WriteAnnex { .. } => None,
        }
    }

    /// Whether what it changes is lost without a later Flush.
    pub const fn is_volatile(&self) -> bool {
        match self {
            Operation::Write { durability, .. }
            | Operation::WriteZeroes { durability, .. }
            | Operation::WriteUncorrectable { durability, .. } => matches!(durability, Durability::Volatile),
            Operation::Discard { .. } | Operation::Repair { .. } => true,
            Operation::Read { .. }
            | Operation::Flush
            | Operation::Verify { .. }
            | Operation::Digest { .. }
            | Operation::Allocation { .. }
            | Operation::Compare { .. }
            | Operation::ReadAnnex { .. }
            | Operation::WriteAnnex { .. } => false,
        }
    }

    /// Whether its success says that something is durable, so that its failure may be that of a flush: after that nobody knows
    /// what else is.
    pub const fn is_durable(&self) -> bool {
        match self {
            Operation::Write { durability, .. }
            | Operation::WriteZeroes { durability, .. }
            | Operation::WriteUncorrectable { durability, .. } => matches!(durability, Durability::ForceUnitAccess),
            Operation::Flush | Operation::WriteAnnex { .. } => true,
            Operation::Discard { .. }
            | Operation::Repair { .. }
            | Operation::Read { .. }
            | Operation::Verify { .. }
            | Operation::Digest { .. }
            | Operation::Allocation { .. }
            | Operation::Compare { .. }
            | Operation::ReadAnnex { .. } => false,
        }
    }

    /// How many blocks it is about, all extents together.
    pub fn blocks(&self) -> u64 {
        match self {
            Operation::Discard { extents } => extents.iter().fold(0, |sum, extent| sum.saturating_add(extent.len())),
            other => other.extent().map_or(0, Extent::len),
        }
    }
}

/// What a Verify cost, and how far it went.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Verified {
    /// Bytes of payload that came from the device to this host to be checked.
    pub bytes_transferred: u64,
    /// What it could not check.
    pub coverage: Coverage,
}

/// What a Digest found.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Digested {
    /// The CRC-64/NVME of the blocks' data, in order.
    pub crc64: u64,
    /// Bytes of payload that came from the device to this host for it.
    pub bytes_transferred: u64,
    /// What it could not check.
    pub coverage: Coverage,
}

/// What a successful operation gives back.
#[derive(Debug)]
pub enum Answer {
    /// Write, Flush, Discard, WriteZeroes, Compare, WriteUncorrectable, WriteAnnex.
    Done,
    /// Read: the blocks, checked as asked.
    Data(Sealed),
    /// Verify and Repair: all blocks that were checked are good.
    Verified(Verified),
    /// Digest: all blocks that were checked are good.
    Digest(Digested),
    /// Allocation: runs that cover the extent, in order.
    Allocation(Vec<Run>),
    /// ReadAnnex: what was written last; empty when nothing was.
    Annex(Slice),
}

/// How a request ends: exactly once.
pub type Outcome = Result<Answer, Error>;
