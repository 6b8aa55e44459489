//! The CRC of a whole from the CRCs of its parts.
//!
//! A CRC is a remainder modulo a polynomial. Appending `n` bytes to a message multiplies it by x^(8n), so the CRC of
//! two parts is that of the first times x^(8n), plus that of the second. This holds for finished CRCs as they are,
//! because in all three kinds initial and final XOR are equal and cancel out.
//!
//! [`crc16`], [`crc32c`] and [`crc64`] combine parts of any length by multiplying bit by bit; a [`Combiner`] multiplies
//! by one fixed power with tables, with one look-up per byte of the CRC. [`InterleavedCrc`] computes the CRC-32C of an
//! interleaved buffer, such as the data digest of an NVMe/TCP PDU, from the guards of its blocks.

use sealblock_units::BlockSize;

use crate::field::CrcField;
use crate::{GuardKind, PiFormat, guard};

/// A CRC as a type. Implemented only by [`Crc16`], [`Crc32c`] and [`Crc64`].
pub trait Crc: sealed::Crc {}

mod sealed {
    use std::ops::{BitXor, BitXorAssign};

    use crate::field::CrcField;

    pub trait Crc {
        /// An unsigned integer of the CRC's width.
        type Value: Copy + Default + Into<u64> + BitXor<Output = Self::Value> + BitXorAssign;
        const FIELD: CrcField;
        /// The low bits of `value`.
        fn truncate(value: u64) -> Self::Value;
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
    fn truncate(value: u64) -> u16 {
        value as u16
    }
}

impl sealed::Crc for Crc32c {
    type Value = u32;
    const FIELD: CrcField = CrcField::reflected(32, 0x1EDC_6F41);
    fn truncate(value: u64) -> u32 {
        value as u32
    }
}

impl sealed::Crc for Crc64 {
    type Value = u64;
    const FIELD: CrcField = CrcField::reflected(64, 0xAD93_D235_94C9_3659);
    fn truncate(value: u64) -> u64 {
        value
    }
}

/// The CRC-16/T10-DIF of a part with CRC `first`, followed by a part with CRC `second` and `second_bytes` bytes.
pub fn crc16(first: u16, second: u16, second_bytes: u64) -> u16 {
    Combiner::<Crc16>::shift(first, second_bytes) ^ second
}

/// The CRC-32C of a part with CRC `first`, followed by a part with CRC `second` and `second_bytes` bytes.
pub fn crc32c(first: u32, second: u32, second_bytes: u64) -> u32 {
    Combiner::<Crc32c>::shift(first, second_bytes) ^ second
}

/// The CRC-64/NVME of a part with CRC `first`, followed by a part with CRC `second` and `second_bytes` bytes.
pub fn crc64(first: u64, second: u64, second_bytes: u64) -> u64 {
    Combiner::<Crc64>::shift(first, second_bytes) ^ second
}

/// Combines the CRCs of parts that all have the same length. Creating one takes some microseconds and 1, 4 or 16 KiB of
/// memory (CRC-16, CRC-32C, CRC-64); combining then takes a few nanoseconds.
#[derive(Clone)]
pub struct Combiner<C: Crc> {
    /// For each byte of a CRC, from the least significant one, its 256 values multiplied by the power.
    tables: Box<[[C::Value; 256]]>,
    part_bytes: u64,
}

impl<C: Crc> Combiner<C> {
    /// A combiner for parts of `part_bytes` bytes.
    pub fn new(part_bytes: u64) -> Combiner<C> {
        let power = C::FIELD.power_of_bytes(part_bytes);
        let table = |byte: u32| {
            let mut table = [C::Value::default(); 256];
            for bit in 0..8 {
                let product = C::truncate(C::FIELD.multiply(1 << (byte * 8 + bit), power));
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

    /// The CRC of a message with CRC `first`, followed by one part with CRC `part`.
    #[inline]
    pub fn join(&self, first: C::Value, part: C::Value) -> C::Value {
        let first: u64 = first.into();
        let mut joined = part;
        for (byte, table) in self.tables.iter().enumerate() {
            joined ^= table[(first >> (byte * 8)) as usize & 0xFF];
        }
        joined
    }

    /// The CRC of consecutive parts; 0, the CRC of no bytes, if there are none.
    pub fn join_all(&self, parts: impl IntoIterator<Item = C::Value>) -> C::Value {
        self.join_more(C::Value::default(), parts)
    }

    /// The CRC of a message with CRC `first`, followed by consecutive parts.
    pub fn join_more(&self, first: C::Value, parts: impl IntoIterator<Item = C::Value>) -> C::Value {
        parts.into_iter().fold(first, |first, part| self.join(first, part))
    }

    /// A CRC times x^(8 `bytes`), without tables.
    fn shift(crc: C::Value, bytes: u64) -> C::Value {
        C::truncate(C::FIELD.multiply(crc.into(), C::FIELD.power_of_bytes(bytes)))
    }
}

/// Computes the CRC-32C of data blocks interleaved with their tuples, without reading the data again. Create it once
/// per namespace: it holds tables, and no state of a run.
#[derive(Clone)]
pub struct InterleavedCrc {
    /// Appends a block's data.
    data: Combiner<Crc32c>,
    /// Appends a tuple.
    tuple: Combiner<Crc32c>,
}

impl InterleavedCrc {
    /// Tables for data blocks of `size`, each followed by `tuple_bytes` bytes (0 for plain data).
    pub fn new(size: BlockSize, tuple_bytes: usize) -> InterleavedCrc {
        InterleavedCrc { data: Combiner::new(size.bytes() as u64), tuple: Combiner::new(tuple_bytes as u64) }
    }

    /// Continues a CRC-32C: that of the bytes that `crc` covers, followed by a block with CRC-32C `data_crc` and then
    /// by `tuple`. Start with 0.
    ///
    /// Panics if `tuple` does not have `tuple_bytes` bytes.
    #[inline]
    pub fn join(&self, crc: u32, data_crc: u32, tuple: &[u8]) -> u32 {
        assert_eq!(tuple.len() as u64, self.tuple.part_bytes(), "the tables are for tuples of another length");
        let crc = self.data.join(crc, data_crc);
        if tuple.is_empty() { crc } else { self.tuple.join(crc, guard::crc32c(tuple)) }
    }

    /// Continues a CRC-32C: that of the bytes that `crc` covers, followed by blocks and their tuples, interleaved. The
    /// guards in the tuples are the CRCs of the data. They must have been compared with the data before; otherwise the
    /// CRC covers bytes that were not checked.
    ///
    /// Panics if the guard of `format` is not CRC-32C, or `tags` is not a whole number of tuples.
    pub fn join_sealed(&self, crc: u32, format: PiFormat, tags: &[u8]) -> u32 {
        assert_eq!(format.guard(), GuardKind::Crc32c, "only a CRC-32C guard can stand for the data");
        let (tuples, rest) = tags.as_chunks::<{ GuardKind::Crc32c.tuple_bytes() }>();
        assert!(rest.is_empty(), "{} bytes of tags are no whole tuples", tags.len());
        tuples.iter().fold(crc, |crc, tuple| {
            let (guard, _) = tuple.split_first_chunk().expect("a tuple is longer than its guard");
            self.join(crc, u32::from_be_bytes(*guard), tuple)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ProtectionType, Tags, seal};
    use proptest::prelude::*;

    fn assert_combines(bytes: &[u8], cut: usize) {
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
        assert_combines(b"", 0);
        assert_combines(b"123456789", 0);
        assert_combines(b"123456789", 9);
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
            assert_combines(&bytes, cut.index(bytes.len() + 1));
        }

        #[test]
        fn many_equal_parts_give_the_whole(bytes in proptest::collection::vec(any::<u8>(), 512 * 9)) {
            let parts = || bytes.chunks(512);
            prop_assert_eq!(Combiner::<Crc16>::new(512).join_all(parts().map(guard::crc16)), guard::crc16(&bytes));
            prop_assert_eq!(Combiner::<Crc32c>::new(512).join_all(parts().map(guard::crc32c)), guard::crc32c(&bytes));
            prop_assert_eq!(Combiner::<Crc64>::new(512).join_all(parts().map(guard::crc64)), guard::crc64(&bytes));
        }
    }

    const FORMAT: PiFormat = PiFormat::with_default_storage_tag(GuardKind::Crc32c, ProtectionType::Type1);

    fn interleaved(size: BlockSize, data: &[u8], tags: &[u8], tuple_bytes: usize) -> Vec<u8> {
        data.chunks(size.bytes()).zip(tags.chunks(tuple_bytes)).flat_map(|(d, t)| [d, t].concat()).collect()
    }

    proptest! {
        #[test]
        fn guards_give_the_crc_of_the_interleaved_bytes(
            data in proptest::collection::vec(any::<u8>(), 512 * 5),
            before in proptest::collection::vec(any::<u8>(), 0..100),
        ) {
            let size = BlockSize::B512;
            let mut tags = [0; 16 * 5];
            seal(FORMAT, size, &data, &mut tags, &Tags { app_tag: 1, storage_tag: 2, initial_ref_tag: 3 });
            let whole = [before.clone(), interleaved(size, &data, &tags, 16)].concat();
            let combined = InterleavedCrc::new(size, 16).join_sealed(guard::crc32c(&before), FORMAT, &tags);
            prop_assert_eq!(combined, guard::crc32c(&whole));
        }

        #[test]
        fn tuples_of_any_length_join(
            data in proptest::collection::vec(any::<u8>(), 512 * 3), tuple_bytes in 1_usize..20,
        ) {
            let size = BlockSize::B512;
            let tags: Vec<u8> = (0..3 * tuple_bytes).map(|i| i as u8).collect();
            let combined = InterleavedCrc::new(size, tuple_bytes);
            let blocks = data.chunks(512).zip(tags.chunks(tuple_bytes));
            let crc = blocks.fold(0, |crc, (data, tuple)| combined.join(crc, guard::crc32c(data), tuple));
            prop_assert_eq!(crc, guard::crc32c(&interleaved(size, &data, &tags, tuple_bytes)));
        }
    }

    #[test]
    fn without_tuples_the_data_alone_is_joined() {
        let data = [7; 1024];
        let combined = InterleavedCrc::new(BlockSize::B512, 0);
        let crc = data.chunks(512).fold(0, |crc, data| combined.join(crc, guard::crc32c(data), &[]));
        assert_eq!(crc, guard::crc32c(&data));
    }

    #[test]
    #[should_panic(expected = "CRC-32C guard")]
    fn another_guard_is_refused() {
        let format = PiFormat::with_default_storage_tag(GuardKind::Crc64, ProtectionType::Type1);
        InterleavedCrc::new(BlockSize::B512, 16).join_sealed(0, format, &[0; 16]);
    }
}
