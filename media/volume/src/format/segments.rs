//! Block groups and segments. A segment is a run of blocks whose block groups have one size and are contiguous.
//!
//! A volume that was never resized has one segment. Existing block groups stay in place, so a volume that grows after a
//! block group that is not full gets another segment, which follows the last block group. All positions still follow
//! from numbers of blocks alone. The last blocks of the last segment may not belong to the volume any more: it was
//! shrunk within a block group.

use sealblock_units::{BlockSize, Lba};

use super::MAP_ENTRY_BYTES;

/// Data bytes of a full block group. Small enough that reading all its map entries to find its free physical blocks is
/// only a short pause.
const GROUP_DATA_BYTES: u64 = 1 << 30;
/// The maximum number of blocks of a block group: it bounds the map entries of a block group if blocks are small.
const MAX_GROUP_BLOCKS: u64 = 1 << 18;
/// Bytes of the spare physical blocks of a block group, so that several of the largest requests fit. Small block groups
/// have one spare physical block for every block instead, and at least `MIN_SPARE_BLOCKS`.
const SPARE_BYTES: u64 = 8 << 20;
const MIN_SPARE_BLOCKS: u64 = 16;
/// One spare physical block for this many blocks.
const BLOCKS_PER_SPARE: u64 = 16;
/// The alignment of block groups and of their parts: the page and stripe unit of common media.
pub(super) const ALIGNMENT: u64 = 64 << 10;
/// Sectors of a map page: one with the generations of its blocks, and those with their map entries.
pub const PAGE_SECTORS: u64 = 16;
/// The maximum number of blocks of a volume: the LBA of a map entry has 40 bits.
pub(super) const MAX_CAPACITY_BLOCKS: u64 = 1 << 40;
/// The maximum number of segments of a volume: what a superblock has room for besides future fields.
pub const MAX_SEGMENTS: usize = 16;

/// Why no volume with this layout is possible.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LayoutError {
    /// No block.
    #[error("a volume needs at least one block")]
    Empty,
    /// More blocks than a map entry can name.
    #[error("{blocks} blocks are more than the {} a volume can have", MAX_CAPACITY_BLOCKS)]
    TooLarge {
        /// Blocks requested.
        blocks: u64,
    },
    /// The medium's sector is neither 512 nor 4096 bytes, or it is larger than a block.
    #[error("a medium with sectors of {sector_bytes} bytes cannot hold blocks of {block_bytes} bytes")]
    Sector {
        /// The medium's sector.
        sector_bytes: u32,
        /// The volume's block.
        block_bytes: u32,
    },
    /// More segments than fit in a superblock.
    #[error("a volume that is resized so would lie in more than {MAX_SEGMENTS} parts")]
    Segments,
    /// The segments do not end where the volume ends.
    #[error("the parts of the volume do not have its blocks")]
    Misplaced,
    /// More block groups than fit in the group map.
    #[error("{groups} block groups are more than the {limit} that a volume created with this size has room for")]
    BlockGroups {
        /// Block groups that the volume would have.
        groups: u64,
        /// Block groups that fit in its group map.
        limit: u64,
    },
}

/// How blocks are divided into block groups.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Grouping {
    pub block_size: BlockSize,
    pub sector_bytes: u32,
    /// Blocks of a full map page.
    pub page_blocks: u64,
}

/// The positions of the parts of a block group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockGroup {
    /// First block of the block group.
    pub first: Lba,
    /// Blocks of the block group.
    pub blocks: u64,
    /// Physical blocks of the block group: more than it has blocks.
    pub physical_blocks: u32,
    /// Where its map pages start.
    pub pages_offset: u64,
    /// Where the second copies of their generations start, one sector for each page. No 64 KiB contain both copies of a
    /// page.
    pub second_offset: u64,
    /// Where the physical blocks start.
    pub data_offset: u64,
    /// Where the block group ends.
    pub end_offset: u64,
}

impl Grouping {
    /// How blocks of this size are grouped on a medium with sectors of this size.
    pub fn new(block_size: BlockSize, sector_bytes: u32) -> Result<Grouping, LayoutError> {
        let block_bytes = block_size.bytes() as u32;
        if !matches!(sector_bytes, 512 | 4096) || sector_bytes > block_bytes {
            return Err(LayoutError::Sector { sector_bytes, block_bytes });
        }
        let page_blocks = (PAGE_SECTORS - 1) * u64::from(sector_bytes) / MAP_ENTRY_BYTES as u64;
        Ok(Grouping { block_size, sector_bytes, page_blocks })
    }

    /// Blocks of each block group except the last, if this many blocks are divided into block groups.
    pub fn group_blocks(&self, blocks: u64) -> u64 {
        blocks.min(MAX_GROUP_BLOCKS).min(GROUP_DATA_BYTES >> self.block_size.shift())
    }

    /// Bytes of a block group of this many blocks.
    pub fn group_bytes(&self, blocks: u64) -> u64 {
        self.group_at(0, 0, blocks).end_offset
    }

    /// Spare physical blocks of a block group of this many blocks.
    pub fn spare(&self, blocks: u64) -> u64 {
        let roomy = (SPARE_BYTES >> self.block_size.shift()).min(blocks.max(MIN_SPARE_BLOCKS));
        blocks.div_ceil(BLOCKS_PER_SPARE).max(roomy)
    }

    /// The block group of this many blocks, from block `first`, that starts at offset `base`.
    pub fn group_at(&self, base: u64, first: u64, blocks: u64) -> BlockGroup {
        let physical_blocks = blocks + self.spare(blocks);
        let pages = blocks.div_ceil(self.page_blocks);
        let sector = u64::from(self.sector_bytes);
        // The second copy of the last page is the nearest to its first one. A distance of 64 KiB from start to start is
        // enough: whatever touches both is longer.
        let second_offset = (base + (pages - 1) * PAGE_SECTORS * sector + ALIGNMENT).next_multiple_of(ALIGNMENT);
        let data_offset = (second_offset + pages * sector).next_multiple_of(ALIGNMENT);
        let end_offset = (data_offset + (physical_blocks << self.block_size.shift())).next_multiple_of(ALIGNMENT);
        BlockGroup {
            first: Lba::new(first),
            blocks,
            physical_blocks: physical_blocks as u32,
            pages_offset: base,
            second_offset,
            data_offset,
            end_offset,
        }
    }
}

/// One segment. Offsets are bytes from the start of the medium.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Segment {
    /// Its first block.
    pub first: u64,
    /// The number of blocks that fit in it. The last segment may have room for more than the volume has.
    pub blocks: u64,
    /// Blocks of each of its block groups except the last, which may have fewer.
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

    /// The first block of a block group of the segment, relative to the segment, and the number of its blocks.
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
    /// Lays out segments with these numbers of blocks, from `offset`. The last of `capacity_blocks` must be in the last
    /// block group of the last segment.
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
            let max = MAX_CAPACITY_BLOCKS.checked_sub(next.first).ok_or(LayoutError::Misplaced)?;
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
        // Block groups that are wholly after the end have been dropped.
        let kept = last.groups().saturating_sub(1) * last.group_blocks;
        let is_last = (last.first + kept..next.first).contains(&capacity_blocks.wrapping_sub(1));
        if !is_last {
            return Err(LayoutError::Misplaced);
        }
        Ok(segments)
    }

    /// The blocks of the segments after a change of the capacity. Existing block groups stay in place.
    pub fn resized(&self, grouping: &Grouping, capacity_blocks: u64) -> Vec<u64> {
        let last = self.last();
        let room = last.first + last.blocks;
        if let Some(more) = capacity_blocks.checked_sub(room).filter(|more| *more > 0) {
            let is_open =
                last.group_blocks == grouping.group_blocks(u64::MAX) && last.blocks.is_multiple_of(last.group_blocks);
            let mut blocks: Vec<u64> = self.all().iter().map(|segment| segment.blocks).collect();
            match blocks.last_mut() {
                Some(last) if is_open => *last += more,
                _ => blocks.push(more),
            }
            return blocks;
        }
        let kept = self.all().iter().filter(|segment| segment.first < capacity_blocks);
        kept.map(|segment| {
            let groups = (capacity_blocks - segment.first).div_ceil(segment.group_blocks);
            segment.blocks.min(groups.saturating_mul(segment.group_blocks))
        })
        .collect()
    }

    /// All segments, in order.
    pub fn all(&self) -> &[Segment] {
        &self.all[..self.count]
    }

    fn last(&self) -> &Segment {
        &self.all[self.count.saturating_sub(1)]
    }

    /// The number of block groups.
    pub fn groups(&self) -> u64 {
        self.last().first_group + self.last().groups()
    }

    /// Where the last block group ends.
    pub fn end_offset(&self) -> u64 {
        self.end_offset
    }

    /// The segment of a block. Called for every block that is read, so the common cases come first: nearly all volumes
    /// have one segment, and large ones have most of their blocks in the first.
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
