//! The versions that a block may hold after its target was killed, derived from the requests and responses.
//!
//! Each block has one writer with at most one write in flight, so its writes have an order. A block holds the last
//! write that a Flush made durable, or a later write. A Flush makes durable the writes that completed before it
//! started, except those that completed before another Flush failed: that failure has already reported them as possibly
//! lost.

use std::ops::Range;

/// A version of a block, counted from 1 by its writer; 0 before the first write.
pub type Version = u64;

/// The writes of one block.
#[derive(Clone, Debug, Default)]
struct BlockHistory {
    /// Versions that it may hold: the last durable one, and those started since.
    possible: Vec<Version>,
    completed: Version,
    /// The last version that completed before a Flush failed: no later Flush makes it durable.
    unflushable: Version,
    durable: Version,
}

/// The histories of all blocks.
#[derive(Debug)]
pub struct Oracle {
    blocks: Vec<BlockHistory>,
}

/// The completed versions when a Flush started.
#[derive(Debug)]
pub struct FlushMark(Vec<Version>);

impl Oracle {
    /// Returns blocks that hold version 0, durably.
    pub fn new(blocks: usize) -> Oracle {
        Oracle { blocks: vec![BlockHistory { possible: vec![0], ..BlockHistory::default() }; blocks] }
    }

    /// A write starts.
    pub fn write_started(&mut self, blocks: Range<usize>, version: Version) {
        self.blocks[blocks].iter_mut().for_each(|block| block.possible.push(version));
    }

    /// A write completed; a durable one (FUA) is durable from then on.
    pub fn write_completed(&mut self, blocks: Range<usize>, version: Version, durable: bool) {
        for block in &mut self.blocks[blocks] {
            block.completed = version;
            if durable {
                block.make_durable(version);
            }
        }
    }

    /// A Flush starts.
    pub fn flush_started(&self) -> FlushMark {
        FlushMark(self.blocks.iter().map(|block| block.completed).collect())
    }

    /// The Flush succeeded.
    pub fn flush_completed(&mut self, mark: FlushMark) {
        for (block, version) in self.blocks.iter_mut().zip(mark.0) {
            if version > block.unflushable {
                block.make_durable(version);
            }
        }
    }

    /// The Flush failed: completed writes may be lost, and no later Flush makes them durable.
    pub fn flush_failed(&mut self) {
        self.blocks.iter_mut().for_each(|block| block.unflushable = block.completed);
    }

    /// Number of blocks whose last completed write is durable.
    pub fn durable_blocks(&self) -> usize {
        self.blocks.iter().filter(|block| block.durable > 0 && block.durable == block.completed).count()
    }

    /// The versions that a block may hold, the oldest first.
    pub fn possible(&self, block: usize) -> &[Version] {
        &self.blocks[block].possible
    }
}

impl BlockHistory {
    fn make_durable(&mut self, version: Version) {
        self.durable = self.durable.max(version);
        let durable = self.durable;
        self.possible.retain(|possible| *possible >= durable);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(versions: &[Version]) -> Oracle {
        let mut oracle = Oracle::new(2);
        for version in versions {
            oracle.write_started(0..1, *version);
            oracle.write_completed(0..1, *version, false);
        }
        oracle
    }

    #[test]
    fn a_flush_makes_durable_what_completed_before_it() {
        let mut oracle = written(&[1, 2]);
        assert_eq!(oracle.possible(0), [0, 1, 2]);
        let mark = oracle.flush_started();
        oracle.write_started(0..1, 3);
        oracle.write_completed(0..1, 3, false);
        oracle.flush_completed(mark);
        assert_eq!(oracle.possible(0), [2, 3], "the third may be lost, the second may not");
        assert_eq!(oracle.possible(1), [0]);
        assert_eq!(oracle.durable_blocks(), 0);
        let mark = oracle.flush_started();
        oracle.flush_completed(mark);
        assert_eq!((oracle.possible(0), oracle.durable_blocks()), (&[3][..], 1));
    }

    #[test]
    fn a_flush_that_failed_is_not_made_good_by_the_next() {
        let mut oracle = written(&[1]);
        oracle.flush_failed();
        let mark = oracle.flush_started();
        oracle.flush_completed(mark);
        assert_eq!(oracle.possible(0), [0, 1]);
        oracle.write_started(0..1, 2);
        oracle.write_completed(0..1, 2, false);
        let mark = oracle.flush_started();
        oracle.flush_completed(mark);
        assert_eq!(oracle.possible(0), [2], "what was written since is durable");
    }

    #[test]
    fn durable_writes_need_no_flush() {
        let mut oracle = written(&[1]);
        oracle.write_started(0..2, 2);
        assert_eq!(oracle.possible(0), [0, 1, 2]);
        oracle.write_completed(0..2, 2, true);
        assert_eq!((oracle.possible(0), oracle.possible(1)), (&[2][..], &[2][..]));
    }
}
