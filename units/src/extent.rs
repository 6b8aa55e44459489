//! Block sizes, addresses, counts, and runs of blocks.

use std::fmt;
use std::num::NonZeroU32;
use std::ops::RangeInclusive;

/// Bytes of data in one logical block, without any protection information.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BlockSize {
    /// 512 bytes.
    B512,
    /// 4096 bytes.
    B4096,
}

impl BlockSize {
    /// Bytes in one block.
    pub const fn bytes(self) -> usize {
        1 << self.shift()
    }

    /// Power of two of the size: `1 << shift` bytes.
    pub const fn shift(self) -> u32 {
        match self {
            BlockSize::B512 => 9,
            BlockSize::B4096 => 12,
        }
    }

    /// The block size of this many bytes, if it is one that is supported.
    pub const fn from_bytes(bytes: u64) -> Option<BlockSize> {
        match bytes {
            512 => Some(BlockSize::B512),
            4096 => Some(BlockSize::B4096),
            _ => None,
        }
    }
}

impl fmt::Display for BlockSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.bytes())
    }
}

impl fmt::Debug for BlockSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.bytes())
    }
}

/// The address of a logical block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Lba(u64);

impl Lba {
    /// The first block of a device.
    pub const ZERO: Lba = Lba(0);

    /// The block with this number, counted from 0.
    pub const fn new(number: u64) -> Lba {
        Lba(number)
    }

    /// The block's number, counted from 0.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The block `blocks` behind this one, or none past the last address.
    pub const fn checked_add(self, blocks: u64) -> Option<Lba> {
        match self.0.checked_add(blocks) {
            Some(number) => Some(Lba(number)),
            None => None,
        }
    }

    /// The low 32 bits of the address: the reference tag of Type 1 protection.
    pub const fn low32(self) -> u32 {
        self.0 as u32
    }
}

impl fmt::Display for Lba {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for Lba {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LBA {}", self.0)
    }
}

/// A number of blocks, at least one. 0's-based fields of a wire protocol are converted before they get here.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockCount(NonZeroU32);

impl BlockCount {
    /// One block.
    pub const ONE: BlockCount = BlockCount(NonZeroU32::MIN);
    /// The largest count.
    pub const MAX: BlockCount = BlockCount(NonZeroU32::MAX);

    /// This many blocks, or none for zero.
    pub const fn new(blocks: u32) -> Option<BlockCount> {
        match NonZeroU32::new(blocks) {
            Some(blocks) => Some(BlockCount(blocks)),
            None => None,
        }
    }

    /// The number of blocks.
    pub const fn get(self) -> u32 {
        self.0.get()
    }

    /// Bytes of data in this many blocks.
    pub const fn bytes(self, size: BlockSize) -> u64 {
        (self.get() as u64) << size.shift()
    }
}

impl fmt::Display for BlockCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for BlockCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} blocks", self.0)
    }
}

/// Why a run of blocks is invalid.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RangeError {
    /// The run has no block.
    #[error("the range has no block")]
    Empty,
    /// The run goes past the last 64-bit block address.
    #[error("the range of {blocks} blocks from block {start} goes past the last address")]
    Wraps {
        /// Requested first block.
        start: u64,
        /// Requested blocks.
        blocks: u64,
    },
    /// The run is longer than 2^32 - 1 blocks.
    #[error("the range of {blocks} blocks is longer than {} blocks", u32::MAX)]
    TooLong {
        /// Requested blocks.
        blocks: u64,
    },
}

/// A run of blocks: never empty, and its last block has an address.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Extent {
    start: Lba,
    blocks: BlockCount,
}

impl Extent {
    /// The run of `blocks` blocks from `start`.
    pub const fn new(start: Lba, blocks: BlockCount) -> Result<Extent, RangeError> {
        match start.0.checked_add(blocks.get() as u64 - 1) {
            Some(_) => Ok(Extent { start, blocks }),
            None => Err(RangeError::Wraps { start: start.0, blocks: blocks.get() as u64 }),
        }
    }

    /// The run of `blocks` blocks from block `start`, from raw numbers.
    pub fn from_raw(start: u64, blocks: u64) -> Result<Extent, RangeError> {
        if blocks == 0 {
            return Err(RangeError::Empty);
        }
        let count = u32::try_from(blocks).map_err(|_| RangeError::TooLong { blocks })?;
        Extent::new(Lba(start), BlockCount::new(count).ok_or(RangeError::Empty)?)
    }

    /// Just this block.
    pub const fn one(lba: Lba) -> Extent {
        Extent { start: lba, blocks: BlockCount::ONE }
    }

    /// The first block.
    pub const fn start(self) -> Lba {
        self.start
    }

    /// How many blocks.
    pub const fn blocks(self) -> BlockCount {
        self.blocks
    }

    /// How many blocks, as a plain number for arithmetic.
    pub const fn len(self) -> u64 {
        self.blocks.get() as u64
    }

    /// Never true; an extent has at least one block.
    pub const fn is_empty(self) -> bool {
        false
    }

    /// The last block.
    pub const fn last(self) -> Lba {
        Lba(self.start.0 + (self.len() - 1))
    }

    /// Bytes of data in the run.
    pub const fn bytes(self, size: BlockSize) -> u64 {
        self.blocks.bytes(size)
    }

    /// True if `lba` is in the run.
    pub const fn contains(self, lba: Lba) -> bool {
        self.start.0 <= lba.0 && lba.0 <= self.last().0
    }

    /// True if the two runs share a block.
    pub const fn overlaps(self, other: Extent) -> bool {
        self.start.0 <= other.last().0 && other.start.0 <= self.last().0
    }

    /// True if the run lies within a device of this many blocks.
    pub const fn fits(self, capacity_blocks: u64) -> bool {
        self.last().0 < capacity_blocks
    }

    /// Every block of the run, in order.
    pub fn iter(self) -> impl ExactSizeIterator<Item = Lba> + DoubleEndedIterator {
        let start = self.start.0;
        (0..self.blocks.get()).map(move |i| Lba(start + u64::from(i)))
    }

    /// Both halves of a run, the first one the shorter where they differ; `None` of a single block.
    pub fn halves(self) -> Option<[Extent; 2]> {
        let (start, half) = (self.start.0, self.blocks.get() / 2);
        let part = |start, blocks| Some(Extent { start: Lba(start), blocks: BlockCount(NonZeroU32::new(blocks)?) });
        Some([part(start, half)?, part(start + u64::from(half), self.blocks.get() - half)?])
    }

    /// Splits the run into pieces of at most `max_blocks` blocks, each but the first starting at a multiple of `max_blocks`,
    /// so that pieces do not straddle boundaries of the device below.
    pub fn split_aligned(self, max_blocks: BlockCount) -> impl Iterator<Item = Extent> {
        let (mut at, end, max_blocks) = (self.start.0, self.last().0, u64::from(max_blocks.get()));
        let mut done = false;
        std::iter::from_fn(move || {
            if done {
                return None;
            }
            let len = (max_blocks - at % max_blocks).min(end - at + 1);
            let piece = Extent { start: Lba(at), blocks: BlockCount(NonZeroU32::new(len as u32)?) };
            match at.checked_add(len) {
                Some(next) if next <= end => at = next,
                _ => done = true,
            }
            Some(piece)
        })
    }
}

/// Its addresses, from the first to the last.
impl From<Extent> for RangeInclusive<u64> {
    fn from(extent: Extent) -> RangeInclusive<u64> {
        extent.start.0..=extent.last().0
    }
}

impl fmt::Display for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "blocks {}..{}", self.start, self.last())
    }
}

impl fmt::Debug for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_extent_is_never_empty_and_never_wraps() {
        assert_eq!(Extent::from_raw(0, 0), Err(RangeError::Empty));
        assert!(Extent::from_raw(u64::MAX, 1).is_ok());
        assert_eq!(Extent::from_raw(u64::MAX, 2), Err(RangeError::Wraps { start: u64::MAX, blocks: 2 }));
        assert_eq!(Extent::from_raw(0, 1 << 32), Err(RangeError::TooLong { blocks: 1 << 32 }));
    }

    #[test]
    fn halves_leave_nothing_out() {
        assert_eq!(Extent::one(Lba::new(7)).halves(), None);
        for (blocks, first, second) in [(2, 1, 1), (3, 1, 2), (10, 5, 5), (u32::MAX.into(), 0x7fff_ffff, 0x8000_0000)] {
            let [one, other] = Extent::from_raw(100, blocks).unwrap().halves().unwrap();
            assert_eq!([one, other].map(Extent::len), [first, second]);
            assert_eq!([one, other].map(|half| half.start().get()), [100, 100 + first]);
        }
    }

    #[test]
    fn fits_asks_for_the_last_block() {
        let extent = Extent::from_raw(6, 4).unwrap();
        assert!(extent.fits(10));
        assert!(!extent.fits(9));
    }

    #[test]
    fn pieces_cover_the_run_and_keep_to_boundaries() {
        let extent = Extent::from_raw(5, 20).unwrap();
        let pieces: Vec<_> =
            extent.split_aligned(BlockCount::new(8).unwrap()).map(|e| (e.start().get(), e.len())).collect();
        assert_eq!(pieces, [(5, 3), (8, 8), (16, 8), (24, 1)]);
        let end = Extent::from_raw(u64::MAX - 1, 2).unwrap();
        assert_eq!(end.split_aligned(BlockCount::ONE).count(), 2);
    }

    #[test]
    fn overlap_is_symmetric_and_exact() {
        let (a, b, c) =
            (Extent::from_raw(0, 4).unwrap(), Extent::from_raw(3, 2).unwrap(), Extent::from_raw(4, 1).unwrap());
        assert!(a.overlaps(b) && b.overlaps(a) && b.overlaps(c));
        assert!(!a.overlaps(c) && !c.overlaps(a));
        assert!(a.contains(Lba::new(3)) && !a.contains(Lba::new(4)));
    }
}
