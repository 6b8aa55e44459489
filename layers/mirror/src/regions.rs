//! Regions: the device in pieces large enough that a bit for each is little to write.

use std::ops::RangeInclusive;

use sealblock_units::{BlockCount, BlockSize, Extent, Lba};

/// Regions of a device at most.
pub const MOST_REGIONS: u64 = 8192;
/// The smallest region, in bytes.
const LEAST_REGION_BYTES: u64 = 1 << 20;

/// How a device is cut into regions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RegionMap {
    capacity_blocks: u64,
    shift: u32,
}

impl RegionMap {
    /// The finest map of a device of this shape that has no more than [`MOST_REGIONS`].
    pub fn new(size: BlockSize, capacity_blocks: u64) -> RegionMap {
        let mut shift = (LEAST_REGION_BYTES >> size.shift()).trailing_zeros();
        while capacity_blocks.div_ceil(1 << shift) > MOST_REGIONS {
            shift += 1;
        }
        RegionMap { capacity_blocks, shift }
    }

    /// The map whose regions have two to the power of `shift` blocks; nothing where it cannot be.
    pub fn with_shift(capacity_blocks: u64, shift: u32) -> Option<RegionMap> {
        let fits = shift < 32 && capacity_blocks.div_ceil(1 << shift) <= MOST_REGIONS;
        fits.then_some(RegionMap { capacity_blocks, shift })
    }

    /// Two to the power of this is the number of blocks of a region.
    pub fn shift(&self) -> u32 {
        self.shift
    }

    /// Number of regions.
    pub fn count(&self) -> u32 {
        self.capacity_blocks.div_ceil(1 << self.shift) as u32
    }

    /// The regions that an extent touches.
    pub fn of(&self, extent: Extent) -> RangeInclusive<u32> {
        (extent.start().get() >> self.shift) as u32..=(extent.last().get() >> self.shift) as u32
    }

    /// The blocks of a region.
    pub fn extent(&self, region: u32) -> Extent {
        let start = u64::from(region) << self.shift;
        let blocks = (1 << self.shift).min(self.capacity_blocks - start);
        let blocks = BlockCount::new(blocks as u32).expect("a region of the map has a block");
        Extent::new(Lba::new(start), blocks).expect("regions lie within the device")
    }

    /// How many blocks these regions have.
    pub fn blocks(&self, regions: &Regions) -> u64 {
        regions.iter().map(|region| self.extent(region).len()).sum()
    }
}

/// A set of regions.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Regions {
    words: Vec<u64>,
    len: u32,
}

impl Regions {
    /// None of `len` regions.
    pub fn none(len: u32) -> Regions {
        Regions { words: vec![0; len.div_ceil(64) as usize], len }
    }

    /// All of `len` regions.
    pub fn all(len: u32) -> Regions {
        let mut all = Regions::none(len);
        all.extend(0..len);
        all
    }

    /// Adds regions.
    pub fn extend(&mut self, regions: impl IntoIterator<Item = u32>) {
        for region in regions {
            self.insert(region);
        }
    }

    /// Adds a region; whether it was not there.
    pub fn insert(&mut self, region: u32) -> bool {
        let (word, bit) = (&mut self.words[region as usize / 64], 1 << (region % 64));
        let is_new = *word & bit == 0;
        *word |= bit;
        is_new
    }

    /// Takes a region out; whether it was there.
    pub fn remove(&mut self, region: u32) -> bool {
        let (word, bit) = (&mut self.words[region as usize / 64], 1 << (region % 64));
        let was_there = *word & bit != 0;
        *word &= !bit;
        was_there
    }

    /// Whether a region is in the set.
    pub fn contains(&self, region: u32) -> bool {
        self.words[region as usize / 64] & (1 << (region % 64)) != 0
    }

    /// Whether all of these are in the set.
    pub fn contains_all(&self, mut regions: RangeInclusive<u32>) -> bool {
        regions.all(|region| self.contains(region))
    }

    /// Whether one of these is in the set.
    pub fn contains_any(&self, mut regions: RangeInclusive<u32>) -> bool {
        regions.any(|region| self.contains(region))
    }

    /// Adds all regions of another set of as many.
    pub fn add(&mut self, other: &Regions) {
        self.words.iter_mut().zip(&other.words).for_each(|(word, other)| *word |= other);
    }

    /// Keeps what is in both.
    pub fn keep(&mut self, other: &Regions) {
        self.words.iter_mut().zip(&other.words).for_each(|(word, other)| *word &= other);
    }

    /// Whether there is no region in the set.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|word| *word == 0)
    }

    /// How many regions are in the set.
    pub fn count(&self) -> u32 {
        self.words.iter().map(|word| word.count_ones()).sum()
    }

    /// How many there could be.
    pub fn most(&self) -> u32 {
        self.len
    }

    /// The regions of the set in rising order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.len).filter(|region| self.contains(*region))
    }

    /// A bit for each region, in bytes from the lowest bit on.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes: Vec<u8> = self.words.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.truncate(bytes_of(self.len));
        bytes
    }

    /// The set that these bytes say; nothing when they are too few or name regions that are not there.
    pub fn from_bytes(bytes: &[u8], len: u32) -> Option<Regions> {
        let bytes = bytes.get(..bytes_of(len))?;
        let mut words = vec![0_u64; len.div_ceil(64) as usize];
        for (at, byte) in bytes.iter().enumerate() {
            words[at / 8] |= u64::from(*byte) << (at % 8 * 8);
        }
        let regions = Regions { words, len };
        let highest = regions.words.last().map_or(0, |word| 64 - word.leading_zeros());
        (len.is_multiple_of(64) || highest <= len % 64).then_some(regions)
    }
}

/// Bytes of a set of `len` regions.
pub fn bytes_of(len: u32) -> usize {
    len.div_ceil(8) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_cover_the_device_and_are_not_too_many() {
        for (size, capacity) in [
            (BlockSize::B4096, 1),
            (BlockSize::B4096, 256),
            (BlockSize::B4096, 257),
            (BlockSize::B512, (8 << 30) / 512),
            (BlockSize::B4096, (8 << 40) / 4096),
            (BlockSize::B512, 1 << 40),
        ] {
            let map = RegionMap::new(size, capacity);
            assert!(u64::from(map.count()) <= MOST_REGIONS);
            assert_eq!(RegionMap::with_shift(capacity, map.shift()), Some(map));
            assert_eq!(map.extent(0).start(), Lba::ZERO);
            assert_eq!(map.extent(map.count() - 1).last().get(), capacity - 1);
            let last = map.extent(map.count() - 1);
            assert_eq!(map.of(last), map.count() - 1..=map.count() - 1);
        }
        assert_eq!(RegionMap::with_shift(1 << 40, 20), None, "too many");
        assert_eq!(RegionMap::with_shift(8, 60), None);
    }

    #[test]
    fn sets_come_back_from_their_bytes() {
        for len in [1, 7, 8, 63, 64, 65, 8192] {
            let mut set = Regions::none(len);
            assert!(set.insert(0) && !set.insert(0));
            set.insert(len - 1);
            let back = Regions::from_bytes(&set.to_bytes(), len);
            assert_eq!(back.as_ref(), Some(&set));
            assert_eq!(Regions::all(len).count(), len);
            assert_eq!(Regions::from_bytes(&set.to_bytes()[1..], len), None, "too short");
            assert!(set.remove(0) && !set.remove(0));
        }
        assert_eq!(Regions::from_bytes(&[0b1000_0000], 7), None, "a region that is not there");
    }
}
