//! How a change of a block changes its guards, without computing a guard of the block.
//!
//! A CRC is linear: the CRCs of a block and of the changed block differ by the CRC (without a preset value) of the bits
//! that differ, whatever else the block contains. So the difference of two CRCs is the sum of one residue, taken from a
//! table, for each bit that differs. A fault goes undetected if the sum is 0. The Internet checksum is a sum of 16-bit
//! words modulo FFFFh, so only the difference of the words' sums matters, and that depends on the previous content.
//! All-zero data are the one exception: their sum is 0 instead of FFFFh. The code that injects faults must detect those
//! that produce such a block.
//!
//! Bits are numbered in the order in which a guard processes them: CRC-16 and the words of the Internet checksum begin
//! with the most significant bit of each byte, CRC-32C and CRC-64 with the least significant one. A burst is a run of
//! bits in that order. The theory of bursts applies only to this order.

use sealblock_integrity::combine::{Combiner, Crc16, Crc32c, Crc64};
use sealblock_integrity::{GuardKind, guard};

/// The modulus of the Internet checksum.
pub const ONES: u64 = 0xFFFF;
/// The indices of the CRCs in a [`Residues`].
const CRC32C_SHIFT: u32 = 64;
const CRC16_SHIFT: u32 = 96;

/// Differences of the three CRCs.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Residues(u128);

impl Residues {
    fn new(crc16: u64, crc32c: u64, crc64: u64) -> Residues {
        Residues(u128::from(crc16) << CRC16_SHIFT | u128::from(crc32c) << CRC32C_SHIFT | u128::from(crc64))
    }

    /// The difference of the CRC of this kind; `None` for the Internet checksum, which is not a CRC.
    pub fn of(self, kind: GuardKind) -> Option<u64> {
        match kind {
            GuardKind::Crc16 => Some(u64::from((self.0 >> CRC16_SHIFT) as u16)),
            GuardKind::Crc32c => Some(u64::from((self.0 >> CRC32C_SHIFT) as u32)),
            GuardKind::Crc64 => Some(self.0 as u64),
            GuardKind::IpChecksum => None,
        }
    }

    /// The difference of both changes together.
    pub fn and(self, other: Residues) -> Residues {
        Residues(self.0 ^ other.0)
    }
}

/// A run of at most 128 bits of a block, and its change.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Change {
    /// The first bit.
    pub start: usize,
    /// The number of bits.
    pub width: usize,
    /// Their values; the first bit is the most significant.
    pub before: u128,
    /// Their new values.
    pub after: u128,
}

impl Change {
    /// The change of the sum of the block's words, modulo FFFFh.
    pub fn growth(&self) -> u64 {
        // Each following bit weighs half as much as the one before; modulo FFFFh this also holds from the last bit of a
        // word to the first bit of the next.
        let last = 15 - (self.start + self.width - 1) % 16;
        let sum = |bits: u128| (0..8).map(|word| u64::from((bits >> (word * 16)) as u16)).sum::<u64>();
        let growth = sum(self.after) + 8 * ONES - sum(self.before);
        (growth << last) % ONES
    }
}

/// Used by tests that compare with completely computed blocks.
#[cfg(test)]
impl Change {
    /// Makes the change in a block whose bits have this order.
    pub fn apply(&self, order: BitOrder, block: &mut [u8]) {
        for index in 0..self.width {
            let (byte, mask) = order.place(self.start + index);
            let bit = |value: u128| value >> (self.width - 1 - index) & 1 == 1;
            debug_assert_eq!(block[byte] & mask != 0, bit(self.before), "the block is another one");
            block[byte] = if bit(self.after) { block[byte] | mask } else { block[byte] & !mask };
        }
    }

    /// Restores the earlier bits in a block whose bits have this order.
    pub fn prepare(&self, order: BitOrder, block: &mut [u8]) {
        for index in 0..self.width {
            let (byte, mask) = order.place(self.start + index);
            let is_set = self.before >> (self.width - 1 - index) & 1 == 1;
            block[byte] = if is_set { block[byte] | mask } else { block[byte] & !mask };
        }
    }
}

/// The first bit of each byte for a guard.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BitOrder {
    /// The most significant one.
    MostFirst,
    /// The least significant one.
    LeastFirst,
}

impl BitOrder {
    /// The order of a guard.
    pub fn of(kind: GuardKind) -> BitOrder {
        match kind {
            GuardKind::Crc16 | GuardKind::IpChecksum => BitOrder::MostFirst,
            GuardKind::Crc32c | GuardKind::Crc64 => BitOrder::LeastFirst,
        }
    }

    /// The byte of a bit, and its number in it.
    fn place(self, bit: usize) -> (usize, u8) {
        match self {
            BitOrder::MostFirst => (bit / 8, 0x80 >> (bit % 8)),
            BitOrder::LeastFirst => (bit / 8, 1 << (bit % 8)),
        }
    }
}

/// The residue of each bit of a block.
pub struct BitResidues(Vec<Residues>);

impl BitResidues {
    /// For blocks of this size; computes the guards of each single bit.
    pub fn new(block_bytes: usize) -> BitResidues {
        let mut block = vec![0; block_bytes];
        let unchanged = GuardKind::ALL.map(|kind| guard::compute(kind, &block));
        let residue = |bit: usize| {
            let mut difference = |kind: GuardKind| {
                let (byte, mask) = BitOrder::of(kind).place(bit);
                block[byte] = mask;
                let changed = guard::compute(kind, &block);
                block[byte] = 0;
                changed ^ unchanged[GuardKind::ALL.iter().position(|other| *other == kind).unwrap_or(0)]
            };
            Residues::new(difference(GuardKind::Crc16), difference(GuardKind::Crc32c), difference(GuardKind::Crc64))
        };
        BitResidues((0..block_bytes * 8).map(residue).collect())
    }

    /// Bits of a block.
    pub fn bits(&self) -> usize {
        self.0.len()
    }

    /// The difference of one change.
    #[inline]
    pub fn of(&self, change: &Change) -> Residues {
        let (mut differ, last) = (change.before ^ change.after, change.start + change.width - 1);
        let mut sum = 0;
        while differ != 0 {
            sum ^= self.0[last - differ.trailing_zeros() as usize].0;
            differ &= differ - 1;
        }
        Residues(sum)
    }
}

/// Moves a change to an earlier place in the block, by a number of parts of equal length.
pub struct Shifts(Vec<(Combiner<Crc16>, Combiner<Crc32c>, Combiner<Crc64>)>);

impl Shifts {
    /// For blocks of this number of parts of this size.
    pub fn new(part_bytes: usize, parts: usize) -> Shifts {
        let by = |parts: usize| (parts * part_bytes) as u64;
        Shifts((0..parts).map(|n| (Combiner::new(by(n)), Combiner::new(by(n)), Combiner::new(by(n)))).collect())
    }

    /// The number of parts of a block.
    pub fn parts(&self) -> usize {
        self.0.len()
    }

    /// The difference of a change of the last part, as if it were in part `part`, counted from 0.
    pub fn to_part(&self, part: usize, last: Residues) -> Residues {
        let (crc16, crc32c, crc64) = &self.0[self.0.len() - 1 - part];
        let value = |kind: GuardKind| last.of(kind).unwrap_or(0);
        Residues::new(
            u64::from(crc16.join(value(GuardKind::Crc16) as u16, 0)),
            u64::from(crc32c.join(value(GuardKind::Crc32c) as u32, 0)),
            crc64.join(value(GuardKind::Crc64), 0),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fastrand::Rng;

    const CRCS: [GuardKind; 3] = [GuardKind::Crc16, GuardKind::Crc32c, GuardKind::Crc64];

    fn random_change(rng: &mut Rng, bits: usize) -> Change {
        let width = rng.usize(1..=128);
        let mask = u128::MAX >> (128 - width);
        Change { start: rng.usize(..=bits - width), width, before: rng.u128(..) & mask, after: rng.u128(..) & mask }
    }

    #[test]
    fn crcs_of_changed_blocks_differ_by_the_residues() {
        let mut rng = Rng::with_seed(1);
        for bytes in [512, 4096] {
            let table = BitResidues::new(bytes);
            for _ in 0..200 {
                let change = random_change(&mut rng, bytes * 8);
                for kind in CRCS {
                    let mut block: Vec<u8> = (0..bytes).map(|_| rng.u8(..)).collect();
                    change.prepare(BitOrder::of(kind), &mut block);
                    let before = guard::compute(kind, &block);
                    change.apply(BitOrder::of(kind), &mut block);
                    let difference = before ^ guard::compute(kind, &block);
                    assert_eq!(table.of(&change).of(kind), Some(difference), "{kind} {change:?}");
                }
            }
        }
    }

    #[test]
    fn the_sum_of_the_words_grows_by_what_is_said() {
        let mut rng = Rng::with_seed(2);
        // The guard is the inverted sum; both representations of zero are 0 modulo FFFFh.
        let sum = |block: &[u8]| (ONES - guard::compute(GuardKind::IpChecksum, block)) % ONES;
        for _ in 0..500 {
            let change = random_change(&mut rng, 4096);
            let mut block: Vec<u8> = (0..512).map(|_| rng.u8(..)).collect();
            change.prepare(BitOrder::MostFirst, &mut block);
            let before = sum(&block);
            change.apply(BitOrder::MostFirst, &mut block);
            assert_eq!(change.growth(), (sum(&block) + ONES - before) % ONES, "{change:?}");
        }
    }

    #[test]
    fn changes_move_by_whole_parts() {
        let (block, part) = (BitResidues::new(4096), BitResidues::new(512));
        let shifts = Shifts::new(512, 8);
        let mut rng = Rng::with_seed(3);
        for index in 0..shifts.parts() {
            let change = random_change(&mut rng, 4096);
            let moved = Change { start: change.start + index * 4096, ..change };
            assert_eq!(shifts.to_part(index, part.of(&change)), block.of(&moved), "{change:?}");
        }
    }

    #[test]
    fn both_changes_together_make_both_differences() {
        let table = BitResidues::new(512);
        let one = Change { start: 10, width: 1, before: 0, after: 1 };
        let both = Change { start: 10, width: 2, before: 0, after: 3 };
        let other = Change { start: 11, ..one };
        assert_eq!(table.of(&one).and(table.of(&other)), table.of(&both));
        assert_eq!(table.of(&one).and(table.of(&one)), Residues::default());
        assert_eq!((table.bits(), table.of(&one).of(GuardKind::IpChecksum)), (4096, None));
    }
}
