//! What a block may hold after its target was killed, going by what was asked of it and what was answered.
//!
//! Each block has one writer, who has one write of it under way at most, so its writes have an order. A block holds the last
//! write that a Flush has vouched for, or a later one. A Flush vouches for writes that were answered before it began, but not
//! for those that were answered before another Flush failed: that one has said of them that they may be lost.

use std::ops::Range;

/// A version of a block, counted from 1 by its writer; 0 before the first write.
pub type Version = u64;

/// Writes of one block, and what is known of them.
#[derive(Clone, Debug, Default)]
struct Block {
    /// Versions that may be there: the last one that is vouched for, and what was begun since.
    possible: Vec<Version>,
    answered: Version,
    /// Answered before a Flush failed.
    doubtful: Version,
    vouched: Version,
}

/// All blocks.
#[derive(Debug)]
pub struct Account {
    blocks: Vec<Block>,
}

/// What was answered when a Flush began.
#[derive(Debug)]
pub struct Mark(Vec<Version>);

impl Account {
    /// Blocks that hold version 0, durably.
    pub fn new(blocks: usize) -> Account {
        Account { blocks: vec![Block { possible: vec![0], ..Block::default() }; blocks] }
    }

    /// A write begins.
    pub fn begin(&mut self, blocks: Range<usize>, version: Version) {
        self.blocks[blocks].iter_mut().for_each(|block| block.possible.push(version));
    }

    /// It was answered; a durable one (FUA) is vouched for with that.
    pub fn answered(&mut self, blocks: Range<usize>, version: Version, durable: bool) {
        for block in &mut self.blocks[blocks] {
            block.answered = version;
            if durable {
                block.vouch(version);
            }
        }
    }

    /// A Flush begins.
    pub fn flush(&self) -> Mark {
        Mark(self.blocks.iter().map(|block| block.answered).collect())
    }

    /// It succeeded.
    pub fn flushed(&mut self, mark: Mark) {
        for (block, version) in self.blocks.iter_mut().zip(mark.0) {
            if version > block.doubtful {
                block.vouch(version);
            }
        }
    }

    /// It failed: what was answered so far may be lost, and no later Flush vouches for it.
    pub fn doubted(&mut self) {
        self.blocks.iter_mut().for_each(|block| block.doubtful = block.answered);
    }

    /// Blocks whose last answered write is vouched for.
    pub fn vouched(&self) -> usize {
        self.blocks.iter().filter(|block| block.vouched > 0 && block.vouched == block.answered).count()
    }

    /// What a block may hold, the oldest first.
    pub fn possible(&self, block: usize) -> &[Version] {
        &self.blocks[block].possible
    }
}

impl Block {
    fn vouch(&mut self, version: Version) {
        self.vouched = self.vouched.max(version);
        let vouched = self.vouched;
        self.possible.retain(|possible| *possible >= vouched);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(versions: &[Version]) -> Account {
        let mut account = Account::new(2);
        for version in versions {
            account.begin(0..1, *version);
            account.answered(0..1, *version, false);
        }
        account
    }

    #[test]
    fn a_flush_vouches_for_what_was_answered_before_it() {
        let mut account = written(&[1, 2]);
        assert_eq!(account.possible(0), [0, 1, 2]);
        let mark = account.flush();
        account.begin(0..1, 3);
        account.answered(0..1, 3, false);
        account.flushed(mark);
        assert_eq!(account.possible(0), [2, 3], "the third may be lost, the second may not");
        assert_eq!(account.possible(1), [0]);
        assert_eq!(account.vouched(), 0);
        let mark = account.flush();
        account.flushed(mark);
        assert_eq!((account.possible(0), account.vouched()), (&[3][..], 1));
    }

    #[test]
    fn a_flush_that_failed_is_not_made_good_by_the_next() {
        let mut account = written(&[1]);
        account.doubted();
        let mark = account.flush();
        account.flushed(mark);
        assert_eq!(account.possible(0), [0, 1]);
        account.begin(0..1, 2);
        account.answered(0..1, 2, false);
        let mark = account.flush();
        account.flushed(mark);
        assert_eq!(account.possible(0), [2], "what was written since is vouched for");
    }

    #[test]
    fn durable_writes_need_no_flush() {
        let mut account = written(&[1]);
        account.begin(0..2, 2);
        assert_eq!(account.possible(0), [0, 1, 2]);
        account.answered(0..2, 2, true);
        assert_eq!((account.possible(0), account.possible(1)), (&[2][..], &[2][..]));
    }
}
