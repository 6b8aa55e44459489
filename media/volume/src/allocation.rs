//! Which blocks take space: all that hold something, good or bad.

use sealblock_block::{Answer, Clock, Medium, Outcome, RunState, Runs};
use sealblock_units::{BlockCount, Extent};

use crate::lookup::Located;
use crate::volume::Volume;

impl<M: Medium, C: Clock> Volume<M, C> {
    /// Blocks that were never written, or were given up, are holes. One of which the tables cannot tell is none, so that who
    /// reads everything else meets its damage.
    pub(crate) async fn allocation(&self, extent: Extent) -> Outcome {
        let mut runs = Runs::default();
        for (piece, _) in self.verify_pieces(extent, &sealblock_integrity::Checks::NONE) {
            if self.is_blank(piece) {
                runs.push(piece.blocks(), RunState::Hole);
                continue;
            }
            match self.locate(piece).await {
                Ok((located, _)) => {
                    let state = |block: &Located| match block {
                        Located::Zeroes => RunState::Hole,
                        Located::Stored { .. } | Located::Bad(_) | Located::Damaged(_) => RunState::Data,
                    };
                    located.iter().for_each(|block| runs.push(BlockCount::ONE, state(block)));
                }
                Err(error) if error.faults().is_some() => runs.push(piece.blocks(), RunState::Data),
                Err(error) => return Err(error),
            }
        }
        Ok(Answer::Allocation(runs.into_vec()))
    }
}
