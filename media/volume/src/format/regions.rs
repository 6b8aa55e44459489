//! The regions of a volume by name: every byte belongs to one.
//!
//! For programs that examine a medium from outside, such as one that damages each region in turn. Add a line here for
//! each new part of the layout, so that no byte is omitted.

use std::fmt;

use sealblock_block::ReservedArea;

use sealblock_units::Lba;

use super::{Container, HEAD_BYTES, LOG_REGIONS, Layout, MAP_ENTRY_BYTES, RESERVED_HEAD_BYTES, SUPERBLOCK_OFFSETS};

/// The use of a range of the medium. Copies are numbered from 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum RegionKind {
    /// A copy of the superblock.
    Superblock(u8),
    /// Copies of the reserved areas after the superblock of the same number; 2 and 3 are their second copies in the
    /// tail.
    ReservedArea(u8),
    /// A region of the log.
    Log(u8),
    /// A copy of the group map.
    GroupMap(u8),
    /// A copy of the high-water mark.
    HighWaterMark(u8),
    /// The bitmap pages of the reserved area.
    BitmapPages,
    /// Map entries of the blocks of a block group.
    MapEntries(u8),
    /// A copy of the generations of a block group.
    Generations(u8),
    /// Physical blocks of a block group, the data.
    PhysicalBlocks,
    /// Unused: padding, or kept free.
    Unused,
    /// A copy of the superblock of a volume in shards.
    Container(u8),
}

impl RegionKind {
    /// Its name, which is the same for all copies.
    pub fn name(self) -> &'static str {
        match self {
            RegionKind::Superblock(_) => "superblock",
            RegionKind::ReservedArea(_) => "reserved area",
            RegionKind::Log(_) => "log",
            RegionKind::GroupMap(_) => "block group map",
            RegionKind::HighWaterMark(_) => "high-water mark",
            RegionKind::BitmapPages => "bitmap pages",
            RegionKind::MapEntries(_) => "map entries",
            RegionKind::Generations(_) => "generations",
            RegionKind::PhysicalBlocks => "physical blocks",
            RegionKind::Unused => "unused",
            RegionKind::Container(_) => "superblock of the container",
        }
    }
}

impl fmt::Display for RegionKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RegionKind::Superblock(copy)
            | RegionKind::ReservedArea(copy)
            | RegionKind::Log(copy)
            | RegionKind::GroupMap(copy)
            | RegionKind::HighWaterMark(copy)
            | RegionKind::MapEntries(copy)
            | RegionKind::Generations(copy)
            | RegionKind::Container(copy) => write!(f, "{} {copy}", self.name()),
            RegionKind::BitmapPages | RegionKind::PhysicalBlocks | RegionKind::Unused => f.write_str(self.name()),
        }
    }
}

/// A range of the medium, in bytes from its start.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Region {
    /// Its use.
    pub kind: RegionKind,
    /// Its first byte.
    pub start: u64,
    /// The byte after its last one.
    pub end: u64,
}

impl Region {
    fn moved(self, by: u64) -> Region {
        Region { start: self.start + by, end: self.end + by, ..self }
    }
}

/// Adds what is unused between regions that are in any order, and behind them up to `end`.
fn without_gaps(mut named: Vec<Region>, end: u64) -> Vec<Region> {
    named.retain(|region| region.start < region.end);
    named.sort_unstable_by_key(|region| region.start);
    let (mut regions, mut at) = (Vec::with_capacity(named.len() * 2 + 1), 0);
    let unused = |start, end| (start < end).then_some(Region { kind: RegionKind::Unused, start, end });
    for region in named {
        regions.extend(unused(at, region.start));
        regions.push(region);
        at = region.end;
    }
    regions.extend(unused(at, end));
    regions
}

impl Container {
    /// The regions of the volume, in order and without gaps, up to [`Container::medium_bytes`]: its own, and those of
    /// its shards.
    pub fn regions(&self) -> Vec<Region> {
        let sector = u64::from(self.shard_layout().sector_bytes());
        let copies = (0..).zip(self.copy_offsets());
        let own = copies.map(|(copy, start)| Region { kind: RegionKind::Container(copy), start, end: start + sector });
        let shards = (0..self.shards()).flat_map(|shard| self.shard_regions(shard));
        without_gaps(own.chain(shards).collect(), self.medium_bytes())
    }

    /// The regions of a shard, at their places on the medium of the whole volume.
    ///
    /// # Panics
    /// If there is no such shard.
    pub fn shard_regions(&self, shard: u32) -> Vec<Region> {
        let start = self.window(shard).offset;
        self.shard_layout().regions().into_iter().map(|region| region.moved(start)).collect()
    }
}

impl Layout {
    /// The regions of the volume, in order and without gaps, up to [`Layout::medium_bytes`]. Each map page has regions
    /// of its own.
    pub fn regions(&self) -> Vec<Region> {
        without_gaps(self.named_regions(), self.medium_bytes())
    }

    /// The offset of a block's map entry in the block map.
    pub fn map_entry_offset(&self, lba: Lba) -> u64 {
        let (number, index) = self.page_of(lba);
        let entries = self.page_offsets(number).map_or(0, |place| place.offset + u64::from(self.sector_bytes()));
        entries + (index * MAP_ENTRY_BYTES) as u64
    }

    /// The offsets of a block's generation, one for each copy.
    pub fn generation_offsets(&self, lba: Lba) -> Vec<u64> {
        let (number, index) = self.page_of(lba);
        let at = HEAD_BYTES + index as u64 * 2;
        self.page_offsets(number).map_or(Vec::new(), |place| vec![place.offset + at, place.second_offset + at])
    }

    fn named_regions(&self) -> Vec<Region> {
        let of = |kind, start, length: u64| Region { kind, start, end: start + length };
        let sector = u64::from(self.sector_bytes());
        let mut named = vec![of(RegionKind::Superblock(2), self.third_offset(), sector)];
        for (copy, start) in (0..).zip(SUPERBLOCK_OFFSETS) {
            named.push(of(RegionKind::Superblock(copy), start, sector));
            for area in [ReservedArea::GroupLabel, ReservedArea::ScrubState] {
                let length = (RESERVED_HEAD_BYTES + area.max_bytes()) as u64;
                let [start, tail] = self.reserved_offsets(area, u64::from(copy));
                named.push(of(RegionKind::ReservedArea(copy), start, length));
                named.push(of(RegionKind::ReservedArea(copy + 2), tail, length));
            }
        }
        for region in 0..LOG_REGIONS {
            let length = self.log_bytes() / LOG_REGIONS;
            named.push(of(RegionKind::Log(region as u8), self.log_sector_offset(0, region), length));
        }
        for copy in [0, 1] {
            let length = self.group_map_sectors() * sector;
            named.push(of(RegionKind::GroupMap(copy), self.group_map_offset(u64::from(copy)), length));
        }
        for (copy, start) in (0..).zip(self.high_water_offsets()) {
            named.push(of(RegionKind::HighWaterMark(copy), start, sector));
        }
        let bitmap_end = self.bitmap_offset() + u64::from(self.bitmap_pages()) * super::BITMAP_PAGE_BYTES;
        named.push(Region { kind: RegionKind::BitmapPages, start: self.bitmap_offset(), end: bitmap_end });
        for index in 0..self.block_groups() {
            let Some(group) = self.block_group(index) else { continue };
            for place in self.pages_of_group(index).filter_map(|number| self.page_offsets(number)) {
                named.push(of(RegionKind::Generations(0), place.offset, sector));
                named.push(of(RegionKind::MapEntries(0), place.offset + sector, self.page_bytes() - sector));
                named.push(of(RegionKind::Generations(1), place.second_offset, sector));
            }
            named.push(of(
                RegionKind::PhysicalBlocks,
                group.data_offset,
                u64::from(group.physical_blocks) << self.block_size().shift(),
            ));
        }
        named
    }
}

#[cfg(test)]
mod tests {
    use sealblock_units::BlockSize;

    use super::*;

    fn assert_complete(regions: &[Region], medium_bytes: u64) {
        assert!(regions.windows(2).all(|pair| pair[0].end == pair[1].start), "{regions:?}");
        assert!(regions.iter().all(|region| region.start < region.end));
        assert_eq!((regions[0].start, regions.last().unwrap().end), (0, medium_bytes));
    }

    #[test]
    fn every_byte_of_a_volume_in_shards_is_in_one_region() {
        for (sector, medium_bytes) in [(512, 0), (4096, 1 << 32)] {
            let profile = (BlockSize::B4096, sector);
            let container = Container::new([7; 16], profile, 3 << 14, None, (2, medium_bytes)).unwrap();
            let regions = container.regions();
            assert_complete(&regions, container.medium_bytes());
            let starts =
                |kind| regions.iter().filter(|region| region.kind == kind).map(|region| region.start).collect();
            let copies: Vec<Vec<u64>> = [0, 1, 2].map(|copy| starts(RegionKind::Container(copy))).into();
            assert_eq!(copies.concat(), container.copy_offsets());
            let windows: Vec<u64> = starts(RegionKind::Superblock(0));
            assert_eq!(windows, [0, 1].map(|shard| container.window(shard).offset));
        }
    }

    #[test]
    fn every_byte_is_in_one_region() {
        for (size, sector, blocks) in [
            (BlockSize::B512, 512, 700),
            (BlockSize::B4096, 4096, 5000),
            (BlockSize::B4096, 512, 3 << 18),
            (BlockSize::B4096, 512, 30_720),
        ] {
            let layout = Layout::new(size, sector, blocks).unwrap();
            let regions = layout.regions();
            assert_complete(&regions, layout.medium_bytes());
            let group = layout.block_group(0).unwrap();
            let at = |kind| regions.iter().find(|region| region.kind == kind).map(|region| region.start);
            assert_eq!(at(RegionKind::MapEntries(0)), Some(group.pages_offset + u64::from(sector)));
            assert_eq!(at(RegionKind::Superblock(2)), Some(layout.third_offset()));
            assert_eq!(at(RegionKind::BitmapPages).is_some(), layout.bitmap_pages() > 0);
            for lba in [0, 1, blocks / 2, blocks - 1].map(Lba::new) {
                let kind_at = |at| regions.iter().find(|region| (region.start..region.end).contains(&at)).unwrap().kind;
                assert_eq!(kind_at(layout.map_entry_offset(lba)), RegionKind::MapEntries(0));
                assert!(
                    layout
                        .generation_offsets(lba)
                        .into_iter()
                        .map(kind_at)
                        .eq([RegionKind::Generations(0), RegionKind::Generations(1)])
                );
            }
        }
    }
}
