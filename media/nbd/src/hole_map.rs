//! Holes in bytes, as servers report them, to holes in blocks.

use sealblock_block::{BlockState, StatusRun};
use sealblock_units::BlockCount;

/// Converts runs of bytes to runs of blocks: a block is a hole only if all its bytes are.
pub(crate) struct HoleMap {
    shift: u32,
    /// Status is known up to this byte.
    at: u64,
    /// `runs` cover all bytes up to this block boundary.
    known_to: u64,
    runs: Vec<(u64, bool)>,
    /// True if the known part of the block at `known_to` has data.
    has_data: bool,
}

impl HoleMap {
    /// Starts at byte `at`, the first of a block.
    pub(crate) fn new(at: u64, shift: u32) -> HoleMap {
        HoleMap { shift, at, known_to: at, runs: Vec::new(), has_data: false }
    }

    /// First byte of the first block whose status is not fully known.
    pub(crate) fn next_block(&self) -> u64 {
        self.known_to
    }

    /// Adds the status of the next `length` bytes.
    pub(crate) fn push(&mut self, length: u64, is_hole: bool) {
        let (block, end) = (1_u64 << self.shift, self.at + length);
        // Complete the block that earlier runs began.
        if self.at > self.known_to {
            self.has_data |= !is_hole;
            if end < self.known_to + block {
                self.at = end;
                return;
            }
            self.add(block, !self.has_data);
        }
        let whole = (end - self.known_to) >> self.shift << self.shift;
        if whole > 0 {
            self.add(whole, is_hole);
        }
        (self.at, self.has_data) = (end, !is_hole);
    }

    fn add(&mut self, length: u64, is_hole: bool) {
        self.known_to += length;
        match self.runs.last_mut() {
            Some((last, same)) if *same == is_hole => *last += length,
            _ => self.runs.push((length, is_hole)),
        }
    }

    /// Ends a reply. The next request starts at a block boundary, so a block that the reply covers only in part counts
    /// as data. So every reply makes progress.
    pub(crate) fn end_reply(&mut self) {
        if self.at > self.known_to {
            self.add(1 << self.shift, false);
        }
        (self.at, self.has_data) = (self.known_to, false);
    }

    /// All runs up to `end`. Unknown blocks count as data.
    pub(crate) fn finish(mut self, end: u64) -> Vec<StatusRun> {
        if self.known_to < end {
            self.add(end - self.known_to, false);
        }
        let run = |(bytes, is_hole): (u64, bool)| {
            let blocks = BlockCount::new(u32::try_from(bytes >> self.shift).ok()?)?;
            Some(StatusRun { blocks, state: if is_hole { BlockState::Hole } else { BlockState::Allocated } })
        };
        std::mem::take(&mut self.runs).into_iter().filter_map(run).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The runs of replies, each a list of lengths in bytes and whether they are holes.
    fn map(answers: &[&[(u64, bool)]], end: u64) -> Vec<(u32, bool)> {
        let mut map = HoleMap::new(0, 12);
        for answer in answers {
            answer.iter().for_each(|(length, is_hole)| map.push(*length, *is_hole));
            map.end_reply();
        }
        map.finish(end).into_iter().map(|run| (run.blocks.get(), run.state == BlockState::Hole)).collect()
    }

    #[test]
    fn a_block_is_a_hole_only_if_all_of_it_is() {
        assert_eq!(map(&[&[(8192, true), (4096, false)]], 12288), [(2, true), (1, false)]);
        assert_eq!(map(&[&[(512, true), (512, false), (3072, true), (4096, true)]], 8192), [(1, false), (1, true)]);
        assert_eq!(map(&[&[(6144, true), (2048, true)]], 8192), [(2, true)], "parts that are alike make a whole");
        assert_eq!(map(&[&[(6144, true), (2048, false), (4096, true)]], 12288), [(1, true), (1, false), (1, true)]);
        assert_eq!(map(&[&[(6144, false), (6144, true)]], 12288), [(2, false), (1, true)]);
    }

    #[test]
    fn what_was_not_answered_is_data_and_each_answer_leads_on() {
        assert_eq!(map(&[&[(4096, true)]], 16384), [(1, true), (3, false)]);
        assert_eq!(map(&[&[(512, true)], &[(4096, true)]], 8192), [(1, false), (1, true)]);
        assert_eq!(map(&[&[(4096, true)], &[(4096, true)]], 8192), [(2, true)]);
        assert_eq!(map(&[], 8192), [(2, false)]);
    }
}
