//! Which blocks take space: all that hold something, good or bad.

use sealblock_block::{BlockState, Clock, Medium, Outcome, Response, StatusRuns};
use sealblock_units::{BlockCount, Extent};

use crate::lookup::BlockLocation;
use crate::volume::Volume;

impl<M: Medium, C: Clock> Volume<M, C> {
    /// Blocks that were never written, or were deallocated, are holes. One of which the block map cannot tell is none, so that who
    /// reads everything else meets its damage.
    pub(crate) async fn allocation(&self, extent: Extent) -> Outcome {
        let mut runs = StatusRuns::default();
        for (piece, _) in self.verify_pieces(extent, &sealblock_integrity::Checks::NONE) {
            if self.is_unwritten(piece) {
                runs.push(piece.blocks(), BlockState::Hole);
                continue;
            }
            match self.locate(piece).await {
                Ok((located, _)) => {
                    let state = |block: &BlockLocation| match block {
                        BlockLocation::Zeroes => BlockState::Hole,
                        BlockLocation::Stored { .. } | BlockLocation::Bad(_) | BlockLocation::Damaged(_) => {
                            BlockState::Data
                        }
                    };
                    located.iter().for_each(|block| runs.push(BlockCount::ONE, state(block)));
                }
                Err(error) if error.bad_blocks().is_some() => runs.push(piece.blocks(), BlockState::Data),
                Err(error) => return Err(error),
            }
        }
        Ok(Response::BlockStatus(runs.into_vec()))
    }
}
