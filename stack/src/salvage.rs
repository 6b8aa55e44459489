//! Reading on behind blocks that cannot be read: what `rescue`, `copy --salvage` and `compare` do.
//!
//! Unreadable data is never passed on: zeroes take its place, and the blocks are named; the caller decides what to do.

use sealblock_block::{Device, Error, ErrorKind as BlockFailure};
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_units::{Extent, Lba};
use serde::Serialize;

use crate::error::StackError;
use crate::failures::device_error;
use crate::opened::{OpenTarget, data_of};
use crate::range::{Run, join_run};
use crate::whole::ByteView;

/// Why a block cannot be read: the field of `verify` that is wrong, or what the medium said.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Lost {
    /// A short text.
    pub why: String,
}

/// What could be read: zeroes where it could not, and where that is, in blocks of the device.
pub struct Salvaged {
    /// The data.
    pub data: Slice,
    /// Blocks that could not be read, in order.
    pub lost: Vec<Run<Lost>>,
}

impl OpenTarget {
    /// Reads blocks; where that fails, one by one.
    ///
    /// # Errors
    /// What keeps any block from being read, and is not its own damage.
    pub async fn read_past_damage(&self, doing: &str, extent: Extent) -> Result<Salvaged, StackError> {
        if let Ok(answer) = self.read(extent).await {
            return Ok(Salvaged { data: data_of(answer), lost: Vec::new() });
        }
        let size = self.device.geometry().block_size;
        let (mut data, mut lost) = (Buffer::zeroed(extent.bytes(size) as usize), Vec::new());
        for (place, lba) in data.chunks_exact_mut(size.bytes()).zip(extent.iter()) {
            match self.read_block(doing, lba).await? {
                Ok(block) => place.copy_from_slice(&block),
                Err(why) => join_run(&mut lost, Run::new(lba.get(), 1, Lost { why })),
            }
        }
        Ok(Salvaged { data: data.freeze(), lost })
    }

    /// A block, or why it is lost.
    async fn read_block(&self, doing: &str, lba: Lba) -> Result<Result<Slice, String>, StackError> {
        match self.read(Extent::one(lba)).await {
            Ok(answer) => Ok(Ok(data_of(answer))),
            Err(error) => damage(&error).map(Err).ok_or_else(|| device_error(doing, &error)),
        }
    }
}

impl ByteView {
    /// As [`ByteView::read`], with zeroes where blocks cannot be read, and where that is.
    ///
    /// # Errors
    /// As [`OpenTarget::read_past_damage`].
    pub async fn read_past_damage(&self, doing: &str, offset: u64, length: u64) -> Result<Salvaged, StackError> {
        let mut lost = Vec::new();
        let data = self
            .assemble(offset, length, async |blocks: Extent| {
                let salvaged = self.opened.read_past_damage(doing, blocks).await?;
                lost = salvaged.lost;
                Ok(salvaged.data)
            })
            .await?;
        Ok(Salvaged { data, lost })
    }
}

/// What is wrong with blocks that were read, if the error is theirs.
pub fn damage(error: &Error) -> Option<String> {
    match error.kind() {
        BlockFailure::Integrity(faults) => {
            Some(faults.as_slice().first().map_or("media", |fault| fault.cause.as_str()).to_owned())
        }
        BlockFailure::Media { reason } => Some(reason.clone()),
        _ => None,
    }
}

/// The same runs as whole groups of `group` blocks, as far as `end`: what is lost where blocks can only be lost together. Groups
/// that follow one another are one run, for the reason of its first block.
pub fn in_groups(lost: Vec<Run<Lost>>, group: u64, end: u64) -> Vec<Run<Lost>> {
    let mut wide: Vec<Run<Lost>> = Vec::new();
    for run in lost {
        let (first, behind) = (run.lba / group * group, run.end().next_multiple_of(group).min(end));
        match wide.last_mut() {
            Some(last) if first < last.end() => last.blocks = last.blocks.max(behind - last.lba),
            _ => join_run(&mut wide, Run::new(first, behind - first, run.what)),
        }
    }
    wide
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_that_can_only_be_lost_together_are() {
        let run = |lba, blocks, why: &str| Run::new(lba, blocks, Lost { why: why.to_owned() });
        let lost = vec![run(9, 2, "guard"), run(13, 1, "media"), run(17, 1, "guard"), run(35, 1, "media")];
        let wide = in_groups(lost.clone(), 8, 38);
        assert_eq!(wide, [run(8, 16, "guard"), run(32, 6, "media")]);
        assert_eq!(in_groups(lost.clone(), 1, 38), lost);
    }
}
