//! Which blocks take space.

use sealblock_units::BlockCount;

/// Blocks in a row that are alike.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StatusRun {
    /// How many.
    pub blocks: BlockCount,
    /// What they are.
    pub state: BlockState,
}

/// What blocks are to the medium.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum BlockState {
    /// They take space, or may.
    Data,
    /// They take no space and read as zeroes.
    Hole,
}

/// Runs in the making: neighbours that are alike become one.
#[derive(Clone, Debug, Default)]
pub struct StatusRuns(Vec<StatusRun>);

impl StatusRuns {
    /// Appends blocks.
    pub fn push(&mut self, blocks: BlockCount, state: BlockState) {
        let joined = self.0.last().filter(|last| last.state == state);
        // Runs whose sum no count can hold stay two.
        let joined = joined.and_then(|last| BlockCount::new(last.blocks.get().checked_add(blocks.get())?));
        match (self.0.last_mut(), joined) {
            (Some(last), Some(blocks)) => last.blocks = blocks,
            _ => self.0.push(StatusRun { blocks, state }),
        }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All of them, in order.
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
        let parts = [(1, BlockState::Hole), (2, BlockState::Hole), (3, BlockState::Data), (u32::MAX, BlockState::Data)];
        for (blocks, state) in parts {
            runs.push(BlockCount::new(blocks).unwrap(), state);
        }
        let told: Vec<_> = runs.into_vec().iter().map(|run| (run.blocks.get(), run.state)).collect();
        assert_eq!(told, [(3, BlockState::Hole), (3, BlockState::Data), (u32::MAX, BlockState::Data)]);
    }
}
