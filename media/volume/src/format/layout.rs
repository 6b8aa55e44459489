//! The position of every part: superblocks, log, group map, block groups of pages and physical blocks, and the third
//! superblock after them.
//!
//! A volume is cut into block groups so that tags are near their data and a map entry can name its physical block in
//! three bytes. A block group has more physical blocks than blocks: a write goes to a free physical block while the old
//! data stay until the new map entry is durable. All positions follow from three numbers, so a superblock cannot
//! contradict itself.

use sealblock_block::ReservedArea;
use sealblock_units::{BlockSize, Extent, Lba};

use super::segments::{
    ALIGNMENT, BlockGroup, Grouping, LayoutError, MAX_CAPACITY_BLOCKS, PAGE_SECTORS, Segment, Segments,
};
use super::{LogSector, MapEntry, MapEntryKind};

/// The size of each of the log's two regions, as a fraction of the data, within its bounds. The minimum is twice the
/// length of the longest fault, so that no such fault reaches both places of a sector.
const DATA_PER_LOG: u64 = 64;
const MIN_LOG_BYTES: u64 = 128 << 10;
const MAX_LOG_BYTES: u64 = 128 << 20;
/// Regions of the log: every sector has a place in each of them.
pub const LOG_REGIONS: u64 = 2;
/// The offsets of the first two copies in bytes; for the third one see [`Layout::third_offset`].
pub const SUPERBLOCK_OFFSETS: [u64; 2] = [0, 32 << 10];
/// These copies and the reserved area after them end before this offset.
const LOG_OFFSET: u64 = 64 << 10;
/// Bytes of a bitmap page.
pub const BITMAP_PAGE_BYTES: u64 = ReservedArea::Bitmap { page: 0 }.max_bytes() as u64;
/// Bytes before the generations in their sector, and before the bits in a sector of the group map.
pub const HEAD_BYTES: u64 = 32;
/// Room after the last block group, for the third superblock and more copies of the reserved area: far from the start,
/// which most accidents overwrite.
pub const TAIL_BYTES: u64 = ALIGNMENT;
/// The third superblock is at this distance from the end, so that it is found from the length alone.
pub const THIRD_FROM_END_BYTES: u64 = 4 << 10;

/// The layout of a volume. All offsets are bytes from the start of the medium.
///
/// Log, group map and bitmap pages have the size for the capacity at creation. A volume that was resized is equal to a
/// new one if it has the same layout.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layout {
    grouping: Grouping,
    capacity_blocks: u64,
    /// The capacity that it was created with.
    created_blocks: u64,
    segments: Segments,
    /// These two follow from the others, and are needed for every block.
    group_pages: u64,
    log_sectors: u64,
}

/// The position of a map page, and its blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageOffsets {
    /// Its first block.
    pub first: Lba,
    /// How many blocks of the volume it has; the last page of a block group may have room for more.
    pub blocks: u64,
    /// The offset of its [`PAGE_SECTORS`] sectors: first the generations, then the map entries.
    pub offset: u64,
    /// The offset of the second copy of the generations.
    pub second_offset: u64,
}

impl Layout {
    /// The layout of a new volume of this size on a medium with sectors of this size.
    ///
    /// # Errors
    /// When no such volume is possible.
    pub fn new(block_size: BlockSize, sector_bytes: u32, capacity_blocks: u64) -> Result<Layout, LayoutError> {
        Layout::lay(Grouping::new(block_size, sector_bytes)?, capacity_blocks, &[capacity_blocks], capacity_blocks)
    }

    /// The layout of a volume that was created with `created_blocks` and resized since, to these segments.
    ///
    /// # Errors
    /// When no such volume is possible.
    pub fn resized(
        block_size: BlockSize,
        sector_bytes: u32,
        created_blocks: u64,
        segments: &[u64],
        capacity_blocks: u64,
    ) -> Result<Layout, LayoutError> {
        let layout = Layout::lay(Grouping::new(block_size, sector_bytes)?, created_blocks, segments, capacity_blocks)?;
        let new = Layout::new(block_size, sector_bytes, capacity_blocks)?;
        Ok(if layout == (Layout { created_blocks, ..new }) { new } else { layout })
    }

    /// The layout of the same volume with another capacity. Existing parts stay in place.
    ///
    /// # Errors
    /// When no such volume is possible.
    pub fn with_capacity(&self, capacity_blocks: u64) -> Result<Layout, LayoutError> {
        check_capacity(capacity_blocks)?;
        let segments = self.segments.resized(&self.grouping, capacity_blocks);
        Layout::resized(self.block_size(), self.sector_bytes(), self.created_blocks, &segments, capacity_blocks)
    }

    fn lay(
        grouping: Grouping,
        created_blocks: u64,
        segments: &[u64],
        capacity_blocks: u64,
    ) -> Result<Layout, LayoutError> {
        check_capacity(created_blocks)?;
        check_capacity(capacity_blocks)?;
        let created_bytes = created_blocks << grouping.block_size.shift();
        let log_bytes = (created_bytes / DATA_PER_LOG).clamp(MIN_LOG_BYTES, MAX_LOG_BYTES);
        let log_sectors = log_bytes.next_multiple_of(ALIGNMENT) / u64::from(grouping.sector_bytes);
        // The fields that are set by now determine where the block groups start.
        let unplaced = Segments::lay(&grouping, 0, &[capacity_blocks], capacity_blocks)?;
        let mut layout =
            Layout { grouping, capacity_blocks, created_blocks, segments: unplaced, group_pages: 0, log_sectors };
        layout.segments = Segments::lay(&grouping, layout.groups_offset(), segments, capacity_blocks)?;
        let largest = layout.segments.all().iter().map(|segment| segment.group_blocks).max().unwrap_or(1);
        layout.group_pages = largest.div_ceil(grouping.page_blocks);
        let (groups, limit) = (layout.block_groups(), layout.max_groups());
        if groups > limit { Err(LayoutError::BlockGroups { groups, limit }) } else { Ok(layout) }
    }

    /// The capacity at creation, in blocks; that of a new volume if the layout is the same.
    pub fn created_blocks(&self) -> u64 {
        self.created_blocks
    }

    /// True if the layout differs from that of a new volume of its capacity.
    pub fn is_resized(&self) -> bool {
        let is_whole = matches!(self.segments.all(), [one] if one.blocks == self.capacity_blocks);
        self.created_blocks != self.capacity_blocks || !is_whole
    }

    /// Its segments, in order: one for a new volume.
    pub fn segments(&self) -> &[Segment] {
        self.segments.all()
    }

    /// The size of a block.
    pub fn block_size(&self) -> BlockSize {
        self.grouping.block_size
    }

    /// The unit in which metadata are written, in bytes.
    pub fn sector_bytes(&self) -> u32 {
        self.grouping.sector_bytes
    }

    /// Blocks of the volume.
    pub fn capacity_blocks(&self) -> u64 {
        self.capacity_blocks
    }

    /// Blocks of every block group of the first segment but the last, which may have fewer.
    pub fn group_blocks(&self) -> u64 {
        self.segments.all()[0].group_blocks
    }

    /// Number of block groups.
    pub fn block_groups(&self) -> u64 {
        self.segments.groups()
    }

    /// Where the log starts.
    pub fn log_offset(&self) -> u64 {
        LOG_OFFSET
    }

    /// Sectors of one region of the log: how many sequence numbers there is room for.
    pub fn log_sectors(&self) -> u64 {
        self.log_sectors
    }

    /// The maximum number of map entries in a log sector.
    pub fn log_sector_entries(&self) -> u64 {
        LogSector::capacity(self.sector_bytes()) as u64
    }

    /// Bytes of one region of the log.
    pub fn log_region_bytes(&self) -> u64 {
        self.log_sectors * u64::from(self.sector_bytes())
    }

    /// Bytes of the log: both regions, one after the other.
    pub fn log_bytes(&self) -> u64 {
        self.log_region_bytes() * LOG_REGIONS
    }

    /// The offset of a sector of the log in region `region` (modulo their number).
    pub fn log_sector_offset(&self, sequence: u64, region: u64) -> u64 {
        let within = sequence % self.log_sectors * u64::from(self.sector_bytes());
        LOG_OFFSET + region % LOG_REGIONS * self.log_region_bytes() + within
    }

    /// The start of copy 0 or 1 of the group map. No 64 KiB contain both copies of a sector.
    pub fn group_map_offset(&self, copy: u64) -> u64 {
        LOG_OFFSET + self.log_bytes() + copy * self.group_map_bytes()
    }

    /// Sectors of a copy of the group map.
    pub fn group_map_sectors(&self) -> u64 {
        self.block_groups().div_ceil(self.groups_per_map_sector())
    }

    /// The number of block groups in one sector of the group map.
    pub fn groups_per_map_sector(&self) -> u64 {
        (u64::from(self.sector_bytes()) - HEAD_BYTES) * 8
    }

    /// Bytes from one copy of the group map to the next. The size at creation determines it.
    fn group_map_bytes(&self) -> u64 {
        let groups = self.created_blocks.div_ceil(self.grouping.group_blocks(self.created_blocks));
        (groups.div_ceil(self.groups_per_map_sector()) * u64::from(self.sector_bytes())).next_multiple_of(ALIGNMENT)
    }

    /// The number of block groups that fit in the group map.
    pub fn max_groups(&self) -> u64 {
        self.group_map_bytes() / u64::from(self.sector_bytes()) * self.groups_per_map_sector()
    }

    /// The offsets of the copies of the high-water mark: at the end of the second copy of the group map, and in the
    /// first block group before the second generations, or else before the physical blocks. A copy for which there is
    /// no room is omitted.
    pub fn high_water_offsets(&self) -> impl Iterator<Item = u64> + use<> {
        let sector = u64::from(self.sector_bytes());
        let map_end = self.group_map_offset(1) + self.group_map_sectors() * sector;
        let rooms = self.block_group(0).map(|group| {
            let pages = self.pages_of_group(0).end;
            let pages_end = group.pages_offset + pages * self.page_bytes();
            [(pages_end, group.second_offset), (group.second_offset + pages * sector, group.data_offset)]
        });
        let last_of = move |(from, to): (u64, u64)| to.checked_sub(sector).filter(|start| from <= *start);
        let in_group = rooms.and_then(|rooms| rooms.into_iter().find_map(last_of));
        [last_of((map_end, self.bitmap_offset())), in_group].into_iter().flatten()
    }

    /// Where the bitmap pages of the reserved area start.
    pub fn bitmap_offset(&self) -> u64 {
        self.group_map_offset(2)
    }

    /// The number of bitmap pages of the reserved area. The size at creation determines it.
    pub fn bitmap_pages(&self) -> u32 {
        ReservedArea::bitmap_pages(self.created_blocks << self.block_size().shift())
    }

    /// Where the first block group starts.
    pub fn groups_offset(&self) -> u64 {
        let bitmap_bytes = u64::from(self.bitmap_pages()) * BITMAP_PAGE_BYTES;
        self.bitmap_offset() + bitmap_bytes.next_multiple_of(ALIGNMENT)
    }

    /// Bytes from the start of a block group of the first segment to the start of the next.
    pub fn group_stride(&self) -> u64 {
        self.segments.all()[0].stride
    }

    /// The parts of block group `index`; `None` if there is none.
    pub fn block_group(&self, index: u64) -> Option<BlockGroup> {
        if index >= self.block_groups() {
            return None;
        }
        let segment = self.segments.of_group(index);
        let within = index - segment.first_group;
        let (first, blocks) = segment.group(within);
        Some(self.grouping.group_at(segment.offset + within * segment.stride, segment.first + first, blocks))
    }

    /// The number of physical blocks in the block group of a block. Called for every read, so it computes no more than
    /// that.
    pub fn physical_blocks_at(&self, lba: Lba) -> u32 {
        let segment = self.segments.of_block(lba.get());
        let (_, blocks) = segment.group((lba.get() - segment.first) / segment.group_blocks);
        (blocks + self.grouping.spare(blocks)) as u32
    }

    /// The block group of a block, and the block's index in it.
    fn place_in_group(&self, lba: Lba) -> (u64, u64) {
        let segment = self.segments.of_block(lba.get());
        let within = lba.get() - segment.first;
        (segment.first_group + within / segment.group_blocks, within % segment.group_blocks)
    }

    /// The block group of a block of the volume.
    pub fn group_of(&self, lba: Lba) -> u64 {
        self.place_in_group(lba).0
    }

    /// The index of a block in its block group.
    pub fn index_in_group(&self, lba: Lba) -> u64 {
        self.place_in_group(lba).1
    }

    /// The number of blocks from this one to the end of its block group.
    fn left_in_group(&self, lba: Lba) -> u64 {
        let segment = self.segments.of_block(lba.get());
        let within = lba.get() - segment.first;
        (segment.group_blocks - within % segment.group_blocks).min(segment.blocks.saturating_sub(within)).max(1)
    }

    /// Length of a medium that holds the volume, in bytes.
    pub fn medium_bytes(&self) -> u64 {
        self.segments.end_offset() + TAIL_BYTES
    }

    /// Bytes up to the end of the third superblock's sector. The bytes after it are never used. If a file is truncated
    /// while it is in use, closing it restores this length.
    pub fn used_bytes(&self) -> u64 {
        self.third_offset() + u64::from(self.sector_bytes())
    }

    /// The offset of the third superblock, [`THIRD_FROM_END_BYTES`] before the end of the volume.
    pub fn third_offset(&self) -> u64 {
        self.medium_bytes() - THIRD_FROM_END_BYTES
    }

    /// The start of the tail: [`TAIL_BYTES`] after the last block group, for the reserved area and the third
    /// superblock.
    pub fn tail_offset(&self) -> u64 {
        self.medium_bytes() - TAIL_BYTES
    }

    /// The offsets of the two copies of a reserved area that the write with this write sequence number replaces: one
    /// after a superblock, one in the tail. `None` for a bitmap page, which is written in place.
    pub fn reserved_offsets(&self, pbn: ReservedArea, write_seq: u64) -> [u64; 2] {
        const GROUP_BYTES: u64 = 20 << 10;
        const BOTH_BYTES: u64 = 28 << 10;
        let within = match pbn {
            ReservedArea::GroupLabel => 0,
            ReservedArea::ScrubState | ReservedArea::Bitmap { .. } => GROUP_BYTES,
        };
        [reserved_offset(pbn, write_seq % 2), self.tail_offset() + write_seq % 2 * BOTH_BYTES + within]
    }

    /// Spare physical blocks of a block group.
    pub fn spare_blocks(&self, index: u64) -> u64 {
        let segment = self.segments.of_group(index);
        self.grouping.spare(segment.group(index - segment.first_group).1)
    }

    /// Blocks of a full map page, the unit in which map entries are read and cached. Each block group begins a new
    /// page.
    pub fn page_blocks(&self) -> u64 {
        self.grouping.page_blocks
    }

    /// Bytes of a page.
    pub fn page_bytes(&self) -> u64 {
        PAGE_SECTORS * u64::from(self.sector_bytes())
    }

    /// The difference of the numbers of the first pages of two consecutive block groups. No block group has more pages,
    /// and some have fewer.
    pub fn group_pages(&self) -> u64 {
        self.group_pages
    }

    /// The page of a block, numbered through all block groups, and the block's index in it.
    pub fn page_of(&self, lba: Lba) -> (u64, usize) {
        let (group, index) = self.place_in_group(lba);
        let page_blocks = self.page_blocks();
        (group * self.group_pages + index / page_blocks, (index % page_blocks) as usize)
    }

    /// True if a map entry is possible for its block: a block of the volume, and a physical block of its block group.
    pub fn holds(&self, entry: &MapEntry) -> bool {
        let is_in_group = || entry.pbn < self.physical_blocks_at(entry.lba);
        entry.lba.get() < self.capacity_blocks && (entry.kind != MapEntryKind::Stored || is_in_group())
    }

    /// The offset of the data of a map entry; `None` if its physical block does not exist.
    pub fn data_offset(&self, entry: &MapEntry) -> Option<u64> {
        let group = self.block_group(self.group_of(entry.lba)).filter(|group| entry.pbn < group.physical_blocks)?;
        Some(group.data_offset + (u64::from(entry.pbn) << self.block_size().shift()))
    }

    /// The position of a page; `None` if there is none with this number.
    pub fn page_offsets(&self, number: u64) -> Option<PageOffsets> {
        let group = self.block_group(number / self.group_pages)?;
        let within = number % self.group_pages;
        let blocks = group.blocks.checked_sub(within * self.page_blocks()).filter(|blocks| *blocks > 0)?;
        Some(PageOffsets {
            first: group.first.checked_add(within * self.page_blocks())?,
            blocks: blocks.min(self.page_blocks()),
            offset: group.pages_offset + within * self.page_bytes(),
            second_offset: group.second_offset + within * u64::from(self.sector_bytes()),
        })
    }

    /// The numbers of a block group's pages.
    pub fn pages_of_group(&self, group: u64) -> std::ops::Range<u64> {
        let segment = self.segments.of_group(group);
        let (_, blocks) = segment.group(group - segment.first_group);
        group * self.group_pages..group * self.group_pages + blocks.div_ceil(self.page_blocks())
    }

    /// An extent, split at the ends of block groups.
    pub fn group_pieces(&self, extent: Extent) -> impl Iterator<Item = (u64, Extent)> {
        pieces(extent, move |at| (self.group_of(at), self.left_in_group(at)))
    }

    /// An extent, split at the ends of pages: the number of each page, and the piece in it.
    pub fn page_pieces(&self, extent: Extent) -> impl Iterator<Item = (u64, Extent)> {
        pieces(extent, move |at| {
            let (number, index) = self.page_of(at);
            (number, self.left_in_group(at).min(self.page_blocks() - index as u64))
        })
    }
}

/// The offset of a copy of an area at the start, in bytes: after the superblock of the same number. For its twin see
/// [`Layout::reserved_offsets`]. Bitmap pages have no copies; see [`Layout::bitmap_offset`].
pub fn reserved_offset(area: ReservedArea, copy: u64) -> u64 {
    let within = match area {
        ReservedArea::GroupLabel => 4 << 10,
        // Bitmap pages have no copies; this value is never used.
        ReservedArea::ScrubState | ReservedArea::Bitmap { .. } => 24 << 10,
    };
    SUPERBLOCK_OFFSETS[(copy % 2) as usize] + within
}

/// An extent, split into pieces: `part` returns for a block the number of its part, and the number of blocks from it to
/// the end of the part.
fn pieces(extent: Extent, part: impl Fn(Lba) -> (u64, u64)) -> impl Iterator<Item = (u64, Extent)> {
    let (mut at, end) = (extent.start().get(), extent.last().get() + 1);
    std::iter::from_fn(move || {
        let left = end.checked_sub(at).filter(|left| *left > 0)?;
        let (number, there) = part(Lba::new(at));
        let piece = Extent::from_raw(at, left.min(there)).ok()?;
        at += piece.len();
        Some((number, piece))
    })
}

fn check_capacity(blocks: u64) -> Result<(), LayoutError> {
    match blocks {
        0 => Err(LayoutError::Empty),
        1..=MAX_CAPACITY_BLOCKS => Ok(()),
        _ => Err(LayoutError::TooLarge { blocks }),
    }
}

#[cfg(test)]
mod tests;
