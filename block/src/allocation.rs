//! Which blocks take space.

use sealblock_units::BlockCount;

/// Blocks in a row that are alike.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    /// How many.
    pub blocks: BlockCount,
    /// What they are.
    pub state: RunState,
}

/// What blocks are to the medium.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RunState {
    /// They take space, or may.
    Data,
    /// They take no space and read as zeroes.
    Hole,
}
