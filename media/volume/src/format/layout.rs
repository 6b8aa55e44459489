//! Where everything lies: superblocks, log, zones of records, generations and slots, and the third superblock behind them.
//!
//! A volume is cut into zones so that tags lie near their data and a block's record can name its slot in three bytes.
//! A zone has more slots than blocks; the spare ones are what lets a write go to a free slot while the old data stay
//! until the new record is durable. Everything follows from three numbers, so a superblock cannot contradict itself.

use sealblock_block::AnnexSlot;
use sealblock_units::{BlockSize, Lba};

use super::RECORD_BYTES;

/// Data bytes of a full zone. Small enough that reading a zone's records to find its free slots is one short pause.
const ZONE_DATA_BYTES: u64 = 1 << 30;
/// Blocks of a zone at most: bounds the records of a zone where blocks are small.
const ZONE_BLOCKS_MAX: u64 = 1 << 18;
/// Spare slots of a zone hold this many bytes, so that several of the largest requests fit; small zones have one spare
/// slot for every block instead, and at least `SPARE_MIN` of them.
const SPARE_BYTES: u64 = 8 << 20;
const SPARE_MIN: u64 = 16;
/// One spare slot for this many blocks.
const BLOCKS_PER_SPARE: u64 = 16;
/// The log is this fraction of the data, within its bounds.
const DATA_PER_LOG: u64 = 64;
const LOG_BYTES_MIN: u64 = 64 << 10;
const LOG_BYTES_MAX: u64 = 64 << 20;
/// The first two superblocks lie before this offset.
const LOG_OFFSET: u64 = 64 << 10;
/// Zones and the parts of a zone start at multiples of this, the page and stripe unit of common media.
const ALIGNMENT: u64 = 64 << 10;
/// Bytes of a bitmap page.
pub const BITMAP_PAGE_BYTES: u64 = AnnexSlot::Bitmap { page: 0 }.most_bytes() as u64;
/// Room behind the last zone, for the third superblock: at the other end than what usually overwrites the first two.
const TAIL_BYTES: u64 = ALIGNMENT;
/// The third superblock lies this far before the end, so that it is found where nothing but the length is known.
pub const THIRD_FROM_END_BYTES: u64 = 4 << 10;
/// Most blocks a volume can have: a record keeps the address in 40 bits.
const CAPACITY_BLOCKS_MAX: u64 = 1 << 40;

/// Why there can be no volume of this shape.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LayoutError {
    /// No block.
    #[error("a volume needs at least one block")]
    Empty,
    /// More blocks than a record can name.
    #[error("{blocks} blocks are more than the {} a volume can have", CAPACITY_BLOCKS_MAX)]
    TooLarge {
        /// Blocks asked for.
        blocks: u64,
    },
    /// The medium's sector is neither 512 nor 4096 bytes, or larger than a block.
    #[error("a medium with sectors of {sector_bytes} bytes cannot hold blocks of {block_bytes} bytes")]
    Sector {
        /// The medium's sector.
        sector_bytes: u32,
        /// The volume's block.
        block_bytes: u32,
    },
}

/// Where everything of a volume lies. All offsets are bytes from the start of the medium.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layout {
    block_size: BlockSize,
    sector_bytes: u32,
    capacity_blocks: u64,
    zone_blocks: u64,
    log_sectors: u64,
}

/// Where the parts of one zone lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Zone {
    /// First block of the zone.
    pub first: Lba,
    /// Blocks of the zone.
    pub blocks: u64,
    /// Slots of the zone, more than blocks.
    pub slots: u32,
    /// Where the records start.
    pub records_offset: u64,
    /// Where the generations start.
    pub generations_offset: u64,
    /// Where the slots start.
    pub slots_offset: u64,
    /// Where the zone ends.
    pub end_offset: u64,
}

impl Layout {
    /// The layout of a volume of this shape on a medium with sectors of this size.
    pub fn new(block_size: BlockSize, sector_bytes: u32, capacity_blocks: u64) -> Result<Layout, LayoutError> {
        let block_bytes = block_size.bytes() as u32;
        if !matches!(sector_bytes, 512 | 4096) || sector_bytes > block_bytes {
            return Err(LayoutError::Sector { sector_bytes, block_bytes });
        }
        if capacity_blocks == 0 {
            return Err(LayoutError::Empty);
        }
        if capacity_blocks > CAPACITY_BLOCKS_MAX {
            return Err(LayoutError::TooLarge { blocks: capacity_blocks });
        }
        let zone_blocks = capacity_blocks.min(ZONE_BLOCKS_MAX).min(ZONE_DATA_BYTES >> block_size.shift());
        let log_bytes = ((capacity_blocks << block_size.shift()) / DATA_PER_LOG).clamp(LOG_BYTES_MIN, LOG_BYTES_MAX);
        let log_bytes = log_bytes.next_multiple_of(ALIGNMENT);
        let log_sectors = log_bytes / u64::from(sector_bytes);
        Ok(Layout { block_size, sector_bytes, capacity_blocks, zone_blocks, log_sectors })
    }

    /// The size of a block.
    pub fn block_size(&self) -> BlockSize {
        self.block_size
    }

    /// The unit in which metadata are written, in bytes.
    pub fn sector_bytes(&self) -> u32 {
        self.sector_bytes
    }

    /// Blocks of the volume.
    pub fn capacity_blocks(&self) -> u64 {
        self.capacity_blocks
    }

    /// Blocks of every zone but the last, which may have fewer.
    pub fn zone_blocks(&self) -> u64 {
        self.zone_blocks
    }

    /// Number of zones.
    pub fn zones(&self) -> u64 {
        self.capacity_blocks.div_ceil(self.zone_blocks)
    }

    /// Where the log starts.
    pub fn log_offset(&self) -> u64 {
        LOG_OFFSET
    }

    /// Sectors of the log.
    pub fn log_sectors(&self) -> u64 {
        self.log_sectors
    }

    /// Bytes of the log.
    pub fn log_bytes(&self) -> u64 {
        self.log_sectors * u64::from(self.sector_bytes)
    }

    /// Where the bitmap pages of the annex start.
    pub fn bitmap_offset(&self) -> u64 {
        LOG_OFFSET + self.log_bytes()
    }

    /// How many bitmap pages the annex has.
    pub fn bitmap_pages(&self) -> u32 {
        AnnexSlot::bitmap_pages(self.capacity_blocks << self.block_size.shift())
    }

    /// Where the first zone starts.
    pub fn zones_offset(&self) -> u64 {
        let bitmap_bytes = u64::from(self.bitmap_pages()) * BITMAP_PAGE_BYTES;
        self.bitmap_offset() + bitmap_bytes.next_multiple_of(ALIGNMENT)
    }

    /// Bytes from the start of a zone to the start of the next.
    pub fn zone_stride(&self) -> u64 {
        self.zone_at(0, 0, self.zone_blocks).end_offset
    }

    /// Where zone `index` lies, if there is one.
    pub fn zone(&self, index: u64) -> Option<Zone> {
        if index >= self.zones() {
            return None;
        }
        let first = index * self.zone_blocks;
        let blocks = self.zone_blocks.min(self.capacity_blocks - first);
        Some(self.zone_at(self.zones_offset() + index * self.zone_stride(), first, blocks))
    }

    /// Slots of the zone of a block of the volume. Asked for every block that is read, so it computes no more than that.
    pub fn slots_near(&self, lba: Lba) -> u32 {
        let first = lba.get() - lba.get() % self.zone_blocks;
        let blocks = self.zone_blocks.min(self.capacity_blocks.saturating_sub(first));
        (blocks + self.spare(blocks)) as u32
    }

    /// The zone of a block of the volume.
    pub fn zone_of(&self, lba: Lba) -> u64 {
        lba.get() / self.zone_blocks
    }

    /// Length of a medium that holds the volume, in bytes.
    pub fn medium_bytes(&self) -> u64 {
        self.zone(self.zones() - 1).map_or(0, |last| last.end_offset) + TAIL_BYTES
    }

    /// Where the third superblock lies: in the last [`THIRD_FROM_END_BYTES`] of the volume.
    pub fn third_offset(&self) -> u64 {
        self.medium_bytes() - THIRD_FROM_END_BYTES
    }

    /// Spare slots of a zone of this many blocks.
    fn spare(&self, blocks: u64) -> u64 {
        let roomy = (SPARE_BYTES >> self.block_size.shift()).min(blocks.max(SPARE_MIN));
        blocks.div_ceil(BLOCKS_PER_SPARE).max(roomy)
    }

    /// Spare slots of every zone but the last, which may have fewer.
    pub fn zone_spare(&self) -> u64 {
        self.spare(self.zone_blocks)
    }

    fn zone_at(&self, base: u64, first: u64, blocks: u64) -> Zone {
        let slots = blocks + self.spare(blocks);
        // Pages of records are read whole, so the tables are padded to whole pages.
        let pages = blocks.div_ceil(self.page_blocks());
        let generations_offset = base + (pages * self.page_records_bytes()).next_multiple_of(ALIGNMENT);
        let slots_offset = (generations_offset + pages * u64::from(self.sector_bytes)).next_multiple_of(ALIGNMENT);
        let end_offset = (slots_offset + (slots << self.block_size.shift())).next_multiple_of(ALIGNMENT);
        Zone {
            first: Lba::new(first),
            blocks,
            slots: slots as u32,
            records_offset: base,
            generations_offset,
            slots_offset,
            end_offset,
        }
    }

    /// Blocks whose generations fill one sector: the unit in which tables are read and cached.
    pub fn page_blocks(&self) -> u64 {
        u64::from(self.sector_bytes) / 2
    }

    /// Bytes of the records of one page.
    pub fn page_records_bytes(&self) -> u64 {
        self.page_blocks() * RECORD_BYTES as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_follow_one_another_and_are_aligned() {
        for (size, sector, blocks) in
            [(BlockSize::B4096, 512, 1), (BlockSize::B4096, 4096, 262_145), (BlockSize::B512, 512, 3 << 18)]
        {
            let layout = Layout::new(size, sector, blocks).unwrap();
            let mut at = layout.zones_offset();
            let mut counted = 0;
            for zone in (0..layout.zones()).map(|i| layout.zone(i).unwrap()) {
                assert_eq!(zone.records_offset, at);
                assert!(zone.generations_offset >= at + zone.blocks * RECORD_BYTES as u64);
                assert!(zone.slots_offset >= zone.generations_offset + zone.blocks * 2);
                assert!(zone.end_offset >= zone.slots_offset + (u64::from(zone.slots) << size.shift()));
                assert!(u64::from(zone.slots) > zone.blocks && zone.slots < 1 << 24);
                assert_eq!(layout.slots_near(zone.first.checked_add(zone.blocks - 1).unwrap()), zone.slots);
                assert!([zone.generations_offset, zone.slots_offset, at].iter().all(|o| o % ALIGNMENT == 0));
                (at, counted) = (zone.end_offset, counted + zone.blocks);
            }
            assert_eq!((at + TAIL_BYTES, counted), (layout.medium_bytes(), blocks));
            assert!(layout.third_offset() >= at && layout.third_offset().is_multiple_of(4096));
            assert_eq!(layout.zone(layout.zones()), None);
        }
    }

    #[test]
    fn every_zone_has_spare_slots_for_the_largest_request_it_can_get() {
        const TRANSFER_BYTES: u64 = 1 << 20;
        for size in [BlockSize::B512, BlockSize::B4096] {
            for blocks in
                [1, 15, 16, 17, 255, 2047, 2048, 2049, 100_000, (1 << 18) - 1, 1 << 18, (1 << 18) + 1, 3 << 18]
            {
                let layout = Layout::new(size, 512, blocks).unwrap();
                for zone in (0..layout.zones()).map(|i| layout.zone(i).unwrap()) {
                    let spare = u64::from(zone.slots) - zone.blocks;
                    assert!(spare >= zone.blocks.min((TRANSFER_BYTES >> size.shift()) * 4), "{size} {blocks}");
                }
            }
        }
    }

    #[test]
    fn shapes_that_cannot_be_are_refused() {
        assert_eq!(Layout::new(BlockSize::B512, 512, 0), Err(LayoutError::Empty));
        assert!(matches!(Layout::new(BlockSize::B512, 4096, 1), Err(LayoutError::Sector { .. })));
        assert!(matches!(Layout::new(BlockSize::B4096, 1024, 1), Err(LayoutError::Sector { .. })));
        assert!(matches!(Layout::new(BlockSize::B4096, 512, u64::MAX), Err(LayoutError::TooLarge { .. })));
        assert!(Layout::new(BlockSize::B4096, 512, CAPACITY_BLOCKS_MAX).is_ok());
    }
}
