//! CRCs of a whole from the CRCs of its parts.
//!
//! A CRC is a remainder modulo a polynomial. Putting `n` bytes behind a message multiplies it by x^(8n), so the CRC
//! of two parts is that of the first times x^(8n), plus that of the second. This holds for finished CRCs as they are,
//! since in all three kinds initial and final XOR are equal and cancel out.
//!
//! [`crc16`], [`crc32c`] and [`crc64`] join parts of any length by multiplying, bit by bit; a [`Combiner`] multiplies
//! by one fixed power through tables, one look-up for each byte of the CRC. [`InterleavedDigest`] makes the CRC-32C
//! of an interleaved buffer, such as the data digest of an NVMe/TCP PDU, out of the block guards.

mod digest;
mod field;

pub use digest::InterleavedDigest;

use field::CrcField;

/// A CRC as a type. Implemented by [`Crc16`], [`Crc32c`] and [`Crc64`] only.
pub trait Crc: sealed::Crc {}

mod sealed {
    use std::ops::{BitXor, BitXorAssign};

    use super::field::CrcField;

    pub trait Crc {
        /// An unsigned integer of the CRC's width.
        type Value: Copy + Default + Into<u64> + BitXor<Output = Self::Value> + BitXorAssign;
        const FIELD: CrcField;
        /// The low bits of `value`.
        fn cut(value: u64) -> Self::Value;
    }
}

/// CRC-16/T10-DIF.
#[derive(Clone, Copy, Debug)]
pub struct Crc16;
/// CRC-32C.
#[derive(Clone, Copy, Debug)]
pub struct Crc32c;
/// CRC-64/NVME.
#[derive(Clone, Copy, Debug)]
pub struct Crc64;

impl Crc for Crc16 {}
impl Crc for Crc32c {}
impl Crc for Crc64 {}

impl sealed::Crc for Crc16 {
    type Value = u16;
    const FIELD: CrcField = CrcField::plain(16, 0x8BB7);
    fn cut(value: u64) -> u16 {
        value as u16
    }
}

impl sealed::Crc for Crc32c {
    type Value = u32;
    const FIELD: CrcField = CrcField::reflected(32, 0x1EDC_6F41);
    fn cut(value: u64) -> u32 {
        value as u32
    }
}

impl sealed::Crc for Crc64 {
    type Value = u64;
    const FIELD: CrcField = CrcField::reflected(64, 0xAD93_D235_94C9_3659);
    fn cut(value: u64) -> u64 {
        value
    }
}

/// The CRC-16/T10-DIF of a part with CRC `first` followed by a part with CRC `second` and `second_bytes` bytes.
pub fn crc16(first: u16, second: u16, second_bytes: u64) -> u16 {
    Combiner::<Crc16>::shift(first, second_bytes) ^ second
}

/// The CRC-32C of a part with CRC `first` followed by a part with CRC `second` and `second_bytes` bytes.
pub fn crc32c(first: u32, second: u32, second_bytes: u64) -> u32 {
    Combiner::<Crc32c>::shift(first, second_bytes) ^ second
}

/// The CRC-64/NVME of a part with CRC `first` followed by a part with CRC `second` and `second_bytes` bytes.
pub fn crc64(first: u64, second: u64, second_bytes: u64) -> u64 {
    Combiner::<Crc64>::shift(first, second_bytes) ^ second
}

/// Joins parts that all have the same length. Making one costs some microseconds and 1, 4 or 16 KiB (CRC-16, CRC-32C,
/// CRC-64); a join then takes a few nanoseconds.
#[derive(Clone)]
pub struct Combiner<C: Crc> {
    /// For each byte of a CRC, from the least significant, its 256 values times the power.
    tables: Box<[[C::Value; 256]]>,
    part_bytes: u64,
}

impl<C: Crc> Combiner<C> {
    /// The operator for parts of `part_bytes` bytes.
    pub fn new(part_bytes: u64) -> Combiner<C> {
        let power = C::FIELD.power_of_bytes(part_bytes);
        let table = |byte: u32| {
            let mut table = [C::Value::default(); 256];
            for bit in 0..8 {
                let product = C::cut(C::FIELD.multiply(1 << (byte * 8 + bit), power));
                for low in 0..1 << bit {
                    table[low | 1 << bit] = table[low] ^ product;
                }
            }
            table
        };
        Combiner { tables: (0..C::FIELD.width() / 8).map(table).collect(), part_bytes }
    }

    /// The length of the parts, in bytes.
    pub fn part_bytes(&self) -> u64 {
        self.part_bytes
    }

    /// The CRC of whatever has CRC `first`, followed by one part with CRC `part`.
    #[inline]
    pub fn join(&self, first: C::Value, part: C::Value) -> C::Value {
        let first: u64 = first.into();
        let mut joined = part;
        for (byte, table) in self.tables.iter().enumerate() {
            joined ^= table[(first >> (byte * 8)) as usize & 0xFF];
        }
        joined
    }

    /// The CRC of parts one after the other; 0, the CRC of nothing, if there are none.
    pub fn join_all(&self, parts: impl IntoIterator<Item = C::Value>) -> C::Value {
        parts.into_iter().fold(C::Value::default(), |first, part| self.join(first, part))
    }

    /// A CRC times x^(8 `bytes`), without tables.
    fn shift(crc: C::Value, bytes: u64) -> C::Value {
        C::cut(C::FIELD.multiply(crc.into(), C::FIELD.power_of_bytes(bytes)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guard;
    use proptest::prelude::*;

    fn holds_for(bytes: &[u8], cut: usize) {
        let (first, second) = bytes.split_at(cut);
        let len = second.len() as u64;
        let whole = guard::crc16(bytes);
        assert_eq!(crc16(guard::crc16(first), guard::crc16(second), len), whole);
        assert_eq!(Combiner::<Crc16>::new(len).join(guard::crc16(first), guard::crc16(second)), whole);
        let whole = guard::crc32c(bytes);
        assert_eq!(crc32c(guard::crc32c(first), guard::crc32c(second), len), whole);
        assert_eq!(Combiner::<Crc32c>::new(len).join(guard::crc32c(first), guard::crc32c(second)), whole);
        let whole = guard::crc64(bytes);
        assert_eq!(crc64(guard::crc64(first), guard::crc64(second), len), whole);
        assert_eq!(Combiner::<Crc64>::new(len).join(guard::crc64(first), guard::crc64(second)), whole);
    }

    #[test]
    fn empty_parts_change_nothing() {
        holds_for(b"", 0);
        holds_for(b"123456789", 0);
        holds_for(b"123456789", 9);
    }

    #[test]
    fn a_wrong_length_or_order_gives_another_crc() {
        let (a, b) = (guard::crc32c(b"first"), guard::crc32c(b"second"));
        assert_ne!(crc32c(a, b, 7), guard::crc32c(b"firstsecond"));
        assert_ne!(crc32c(b, a, 5), guard::crc32c(b"firstsecond"));
    }

    #[test]
    fn lengths_near_the_limit_of_64_bits_do_not_overflow() {
        // Appending 2^64 - 1 zero bytes, then one more, is appending 2^64, and x^(8 * 2^64) = (x^(8 * 2^32))^(2^32).
        let once = crc64(crc64(1, 0, u64::MAX), 0, 1);
        let halves = crc64(crc64(1, 0, 1 << 63), 0, 1 << 63);
        assert_eq!(once, halves);
    }

    proptest! {
        #[test]
        fn two_parts_give_the_whole(
            bytes in proptest::collection::vec(any::<u8>(), 0..6000), cut in any::<prop::sample::Index>(),
        ) {
            holds_for(&bytes, cut.index(bytes.len() + 1));
        }

        #[test]
        fn many_equal_parts_give_the_whole(bytes in proptest::collection::vec(any::<u8>(), 512 * 9)) {
            let parts = || bytes.chunks(512);
            prop_assert_eq!(Combiner::<Crc16>::new(512).join_all(parts().map(guard::crc16)), guard::crc16(&bytes));
            prop_assert_eq!(Combiner::<Crc32c>::new(512).join_all(parts().map(guard::crc32c)), guard::crc32c(&bytes));
            prop_assert_eq!(Combiner::<Crc64>::new(512).join_all(parts().map(guard::crc64)), guard::crc64(&bytes));
        }
    }
}
