//! Responses of a device.

use sealblock_integrity::{ChecksumKind, Sealed};
use sealblock_runtime_memory::Slice;
use sealblock_units::BlockCount;

use crate::{BadBlock, Coverage, Error};

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
    /// The kind of the checksum, as requested.
    pub kind: ChecksumKind,
    /// The checksum of the blocks' data, in order.
    pub value: u64,
    /// Bytes of payload that crossed from the device to this host to compute it.
    pub bytes_transferred: u64,
    /// What was not checked.
    pub coverage: Coverage,
}

/// What is left of blocks: the response to a Salvage, whatever their state.
#[derive(Clone, Debug)]
pub struct Salvaged {
    /// The blocks and tags as they are stored, unchecked. A block that cannot be read has zeroes, and tags that disable
    /// all checks.
    pub blocks: Sealed,
    /// The blocks that the device's own check found bad, in order. All others are good.
    pub bad_blocks: Vec<BadBlock>,
}

/// The response to a request that succeeded.
#[derive(Debug)]
pub enum Response {
    /// Write, Flush, Discard, WriteZeroes, Copy, Compare, CompareAndWrite, WriteUncorrectable and WriteReserved.
    Done,
    /// Read: the blocks, which are good and as expected.
    Data(Sealed),
    /// Salvage: what is left of the blocks.
    Salvaged(Salvaged),
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

/// A run of blocks with the same state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StatusRun {
    /// Length of the run.
    pub blocks: BlockCount,
    /// State of each block of the run.
    pub state: BlockState,
}

/// Whether a block is allocated on the medium.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum BlockState {
    /// The block is allocated, or may be.
    Allocated,
    /// The block is not allocated and reads as zeroes.
    Hole,
}

/// Builds the runs of a block status: neighbours of the same state become one run.
#[derive(Clone, Debug, Default)]
pub struct StatusRuns(Vec<StatusRun>);

impl StatusRuns {
    /// Appends `blocks` blocks of this state.
    pub fn push(&mut self, blocks: BlockCount, state: BlockState) {
        let joined = self.0.last().filter(|last| last.state == state);
        // Runs whose total exceeds a `BlockCount` stay separate.
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
