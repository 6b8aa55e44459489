//! Blocks of a source that are lost, as they are lost in the destination.
//!
//! A destination may have larger blocks than the source, and can lose only whole ones: what shares a block with something lost is
//! lost with it, and reported.

use std::ops::Range;

use sealblock_stack::range::Run;
use sealblock_stack::{Lost, in_groups};
use sealblock_units::BlockSize;

use super::sink::{Losing, Sink};
use crate::findings::Finding;

/// How blocks of a source are lost in a destination.
pub(in crate::commands) struct Losses {
    block_size: BlockSize,
    /// Blocks of the source that can only be lost together.
    group: u64,
    /// Blocks of the source, the last of which may be cut short.
    blocks: u64,
}

impl Losses {
    /// From a source with these blocks and this length, where it is known.
    pub fn new(sink: &Sink, block_size: BlockSize, bytes: Option<u64>) -> Losses {
        let group = (sink.losing_bytes() >> block_size.shift()).max(1);
        Losses { block_size, group, blocks: bytes.map_or(u64::MAX, |bytes| bytes.div_ceil(block_size.bytes() as u64)) }
    }

    /// The blocks of the source.
    pub fn block_size(&self) -> BlockSize {
        self.block_size
    }

    /// Runs with all that is lost with them.
    pub fn widened(&self, lost: Vec<Run<Lost>>) -> Vec<Run<Lost>> {
        in_groups(lost, self.group, self.blocks)
    }
}

/// The bytes of runs, as far as `end`.
pub(in crate::commands) fn byte_ranges(lost: &[Run<Lost>], size: BlockSize, end: u64) -> Vec<Range<u64>> {
    lost.iter().map(|run| run.lba << size.shift()..(run.end() << size.shift()).min(end)).collect()
}

impl Losing {
    /// What is to be said of such blocks in the destination.
    pub fn to_text(self) -> &'static str {
        match self {
            Losing::Unreadable => "they cannot be read either",
            Losing::Unwritten => "they were not written, and are what they were",
            Losing::Zeroes => "they are zeroes",
        }
    }
}

impl Finding for Lost {
    fn line(run: &Run<Lost>) -> String {
        format!("{} lost: {}", run.place(), run.what.why)
    }
}
