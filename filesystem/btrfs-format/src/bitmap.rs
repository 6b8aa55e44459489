//! Bitmaps of free sectors: bits in bytes, the lowest bit of the first byte first.
//!
//! Ranges of bits that do not exist are an error of the caller; [`Bitmap`] has as many bits as it was made with, and
//! the bits of its last byte that are none are zero.

use std::ops::Range;

/// Bits, all of which exist.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Bitmap {
    bytes: Vec<u8>,
    bits: usize,
}

impl Bitmap {
    /// Bits that are all zero.
    pub fn new(bits: usize) -> Bitmap {
        Bitmap { bytes: vec![0; bits.div_ceil(8)], bits }
    }

    /// The bits of an item's data. `None` if there are not as many bytes as `bits` need, or bits behind the last one
    /// are set.
    pub fn from_bytes(bytes: &[u8], bits: usize) -> Option<Bitmap> {
        let spare = bits % 8;
        let is_clean = spare == 0 || bytes.last().is_some_and(|last| last >> spare == 0);
        (bytes.len() == bits.div_ceil(8) && is_clean).then(|| Bitmap { bytes: bytes.to_vec(), bits })
    }

    /// The data of its item.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The number of bits.
    pub fn bits(&self) -> usize {
        self.bits
    }

    /// The bit at this index; `false` for one that does not exist.
    pub fn get(&self, bit: usize) -> bool {
        bit < self.bits && self.bytes[bit / 8] >> (bit % 8) & 1 == 1
    }

    /// Sets or clears bits.
    ///
    /// # Panics
    /// If there are no such bits.
    pub fn fill(&mut self, range: Range<usize>, value: bool) {
        assert!(range.end <= self.bits, "bits {range:?} of {}", self.bits);
        let mut at = range.start;
        while at < range.end {
            let (byte, first) = (at / 8, at % 8);
            let last = (first + range.end - at).min(8);
            let mask = ((1_u16 << last) - (1 << first)) as u8;
            if value {
                self.bytes[byte] |= mask;
            } else {
                self.bytes[byte] &= !mask;
            }
            at += last - first;
        }
    }

    /// The first bit from `from` on that has this value, or the number of bits.
    pub fn next(&self, from: usize, value: bool) -> usize {
        let mut at = from;
        while at < self.bits {
            let byte = self.bytes[at / 8];
            // Bits that are wanted are ones here.
            let wanted = (if value { byte } else { !byte }) >> (at % 8);
            if wanted != 0 {
                return (at + wanted.trailing_zeros() as usize).min(self.bits);
            }
            at = (at / 8 + 1) * 8;
        }
        self.bits
    }

    /// True if all bits of a range have this value.
    pub fn is_all(&self, range: Range<usize>, value: bool) -> bool {
        range.end <= self.bits && self.next(range.start, !value) >= range.end
    }

    /// Runs of bits that are set.
    pub fn runs(&self) -> impl Iterator<Item = Range<usize>> {
        let mut at = 0;
        std::iter::from_fn(move || {
            let start = self.next(at, true);
            at = self.next(start, false);
            (start < at).then_some(start..at)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_ranges_are_those_of_a_list_of_bits() {
        let mut random = fastrand::Rng::with_seed(1);
        for bits in [1, 7, 8, 9, 64, 2000, 2048] {
            let (mut bitmap, mut model) = (Bitmap::new(bits), vec![false; bits]);
            for _ in 0..300 {
                let start = random.usize(..=bits);
                let (end, value) = (random.usize(start..=bits), random.bool());
                bitmap.fill(start..end, value);
                model[start..end].fill(value);
                let bit = random.usize(..=bits);
                assert_eq!(bitmap.get(bit), model.get(bit) == Some(&true));
                let next = model[bit..].iter().position(|one| *one == value).map_or(bits, |ahead| bit + ahead);
                assert_eq!(bitmap.next(bit, value), next);
                assert!(bitmap.is_all(start..end, value));
                assert_eq!(bitmap.is_all(0..bit, value), model[..bit].iter().all(|one| *one == value));
                let runs: usize = bitmap.runs().map(|run| run.len()).sum();
                assert_eq!(runs, model.iter().filter(|one| **one).count());
                assert!(bitmap.runs().all(|run| run.start == 0 || !model[run.start - 1]));
                assert_eq!(Bitmap::from_bytes(bitmap.as_bytes(), bits).as_ref(), Some(&bitmap));
            }
        }
    }

    #[test]
    fn the_lowest_bit_of_the_first_byte_is_first_and_others_do_not_exist() {
        let mut bitmap = Bitmap::new(12);
        bitmap.fill(0..1, true);
        bitmap.fill(9..12, true);
        assert_eq!((bitmap.as_bytes(), bitmap.bits()), (&[1, 0b1110][..], 12));
        assert_eq!(bitmap.runs().collect::<Vec<_>>(), [0..1, 9..12]);
        assert!(!bitmap.get(12) && !bitmap.is_all(11..13, true));
        for (bytes, bits) in [(&[1, 0b1_0000][..], 12), (&[1], 12), (&[1, 0, 0], 12), (&[], 1)] {
            assert_eq!(Bitmap::from_bytes(bytes, bits), None);
        }
        assert!(Bitmap::from_bytes(&[0xff, 0xff], 16).is_some() && Bitmap::from_bytes(&[], 0).is_some());
    }
}
