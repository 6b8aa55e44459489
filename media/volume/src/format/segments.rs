//! Segments: runs of blocks whose block groups are of one size and lie in one row.
//!
//! A volume that was never resized has one. What was laid out stays where it is, so a volume that grows behind a block group that is
//! not full gets another segment, which follows the last block group. Where everything lies still follows from numbers of blocks
//! alone. Of the last segment blocks at the end may not be the volume's any more: it has shrunk within a block group.

use super::layout::{Grouping, LayoutError};

/// Segments of a volume at most: as many as a superblock has room for beside what may come.
pub const MAX_SEGMENTS: usize = 16;

/// One segment. Offsets are bytes from the start of the medium.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Segment {
    /// Its first block.
    pub first: u64,
    /// Blocks that it has room for; the last one's may be more than the volume has.
    pub blocks: u64,
    /// Blocks of each of its block groups but the last, which may have fewer.
    pub group_blocks: u64,
    /// The number of its first block group.
    pub first_group: u64,
    /// Where its first block group starts.
    pub offset: u64,
    /// From the start of one block group to that of the next.
    pub stride: u64,
}

impl Segment {
    /// How many block groups it has.
    pub fn groups(&self) -> u64 {
        self.blocks.div_ceil(self.group_blocks)
    }

    /// The first block of a block group of the segment, counted from its own first block, and the block group's blocks.
    pub(super) fn group(&self, within: u64) -> (u64, u64) {
        let first = within * self.group_blocks;
        (first, self.group_blocks.min(self.blocks.saturating_sub(first)))
    }
}

/// The segments of a volume: at least one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Segments {
    all: [Segment; MAX_SEGMENTS],
    count: usize,
    /// Where the last block group ends.
    end_offset: u64,
}

impl Segments {
    /// Segments with so many blocks, from `offset` on. The last one has to have the last of `capacity_blocks`, in its last
    /// block group.
    pub fn lay(
        grouping: &Grouping,
        offset: u64,
        blocks: &[u64],
        capacity_blocks: u64,
    ) -> Result<Segments, LayoutError> {
        if blocks.len() > MAX_SEGMENTS {
            return Err(LayoutError::Segments);
        }
        if blocks.is_empty() {
            return Err(LayoutError::Misplaced);
        }
        let (mut all, mut next) = ([Segment::default(); MAX_SEGMENTS], Segment { offset, ..Segment::default() });
        for (place, &blocks) in all.iter_mut().zip(blocks) {
            let max = grouping.max_capacity_blocks().checked_sub(next.first).ok_or(LayoutError::Misplaced)?;
            if blocks == 0 || blocks > max {
                return Err(LayoutError::Misplaced);
            }
            let group_blocks = grouping.group_blocks(blocks);
            let stride = grouping.group_bytes(group_blocks);
            let segment = Segment { blocks, group_blocks, stride, ..next };
            let (last, last_blocks) = segment.group(segment.groups() - 1);
            next = Segment {
                first: segment.first + blocks,
                first_group: segment.first_group + segment.groups(),
                offset: segment.offset + last / group_blocks * stride + grouping.group_bytes(last_blocks),
                ..next
            };
            *place = segment;
        }
        let segments = Segments { all, count: blocks.len(), end_offset: next.offset };
        let last = segments.last();
        // What lies wholly behind the end has gone.
        let kept = last.groups().saturating_sub(1) * last.group_blocks;
        let is_last = (last.first + kept..next.first).contains(&capacity_blocks.wrapping_sub(1));
        if !is_last {
            return Err(LayoutError::Misplaced);
        }
        Ok(segments)
    }

    /// The blocks of the segments of a volume with another capacity: what lies where stays there.
    pub fn resized(&self, grouping: &Grouping, capacity_blocks: u64) -> Vec<u64> {
        let mut blocks: Vec<u64> = self.all().iter().map(|segment| segment.blocks).collect();
        let last = self.last();
        let room = last.first + last.blocks;
        if let Some(more) = capacity_blocks.checked_sub(room).filter(|more| *more > 0) {
            let is_open =
                last.group_blocks == grouping.group_blocks(u64::MAX) && last.blocks.is_multiple_of(last.group_blocks);
            match blocks.last_mut() {
                Some(last) if is_open => *last += more,
                _ => blocks.push(more),
            }
            return blocks;
        }
        let kept = self.all().iter().filter(|segment| segment.first < capacity_blocks);
        blocks = kept
            .map(|segment| {
                let groups = (capacity_blocks - segment.first).div_ceil(segment.group_blocks);
                segment.blocks.min(groups.saturating_mul(segment.group_blocks))
            })
            .collect();
        blocks
    }

    /// All of them, in order.
    pub fn all(&self) -> &[Segment] {
        &self.all[..self.count]
    }

    fn last(&self) -> &Segment {
        &self.all[self.count.saturating_sub(1)]
    }

    /// How many block groups there are.
    pub fn groups(&self) -> u64 {
        self.last().first_group + self.last().groups()
    }

    /// Where the last block group ends.
    pub fn end_offset(&self) -> u64 {
        self.end_offset
    }

    /// The segment of a block. Asked for every block that is read: nearly all volumes have one segment, and large ones most of
    /// their blocks in the first.
    pub fn of_block(&self, block: u64) -> &Segment {
        if self.count == 1 || block < self.all[0].blocks {
            return &self.all[0];
        }
        self.all().iter().rev().find(|segment| segment.first <= block).unwrap_or(&self.all[0])
    }

    /// The segment of a block group.
    pub fn of_group(&self, group: u64) -> &Segment {
        if self.count == 1 || group < self.all[1].first_group {
            return &self.all[0];
        }
        self.all().iter().rev().find(|segment| segment.first_group <= group).unwrap_or(&self.all[0])
    }
}
