//! Tuples: decoded, as bytes, and as integers.
//!
//! A tuple is loaded as one big-endian integer (64-bit ones are widened), in which guard, application tag, storage tag
//! and reference tag follow each other from the most to the least significant bit. So every format uses the same
//! arithmetic, and a whole tuple is compared at once. [`GuardFormat`] provides the constants of a guard kind at compile
//! time, so that the loop over blocks is compiled once for each kind.

use crate::{GuardKind, PiFormat, ProtectionType, guard};

/// The protection information of one block, decoded. As bytes, all fields are big-endian; the storage tag is the more
/// significant part of the space that it shares with the reference tag (NVM Command Set specification, "Protection
/// Information Formats").
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Tuple {
    /// Checksum of the block, in the low bits.
    pub guard: u64,
    /// Application tag.
    pub app_tag: u16,
    /// Storage tag, in the low bits.
    pub storage_tag: u64,
    /// Reference tag, in the low bits.
    pub ref_tag: u64,
}

impl Tuple {
    /// Reads the first [`PiFormat::tuple_bytes`] bytes as a tuple. Any bytes are a tuple. Panics if there are fewer.
    pub fn read(format: PiFormat, bytes: &[u8]) -> Tuple {
        unpack(format, load(format.tuple_bytes(), bytes))
    }

    /// Writes the first [`PiFormat::tuple_bytes`] bytes; a field that is too large for the format loses its high bits.
    /// Panics if there are fewer bytes.
    pub fn write(&self, format: PiFormat, bytes: &mut [u8]) {
        store(format.tuple_bytes(), pack(format, self), bytes);
    }

    /// True if the tuple disables the check of its block: an application tag of FFFFh; in Type 3 together with a
    /// reference tag of all ones, if the format has one (NVM Command Set specification, end-to-end data protection).
    pub fn is_escaped(&self, format: PiFormat) -> bool {
        let mask = escape_mask(format);
        pack(format, self) & mask == mask
    }
}

/// The tags that sealing stores beside the guard. Fields that are too large for the format lose their high bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Tags {
    /// Application tag of every block. With FFFFh the blocks are never checked (see [`Tuple::is_escaped`]).
    pub app_tag: u16,
    /// Storage tag of every block.
    pub storage_tag: u64,
    /// Reference tag of the first block; grows by one with each block in Types 1 and 2, stays in Type 3.
    pub initial_ref_tag: u64,
}

/// The application tag that disables the check of its block.
pub(crate) const ESCAPE: u16 = 0xFFFF;

/// A guard kind as a type.
pub(crate) trait GuardFormat {
    const KIND: GuardKind;
    fn compute(bytes: &[u8]) -> u64;

    const TUPLE_BYTES: usize = Self::KIND.tuple_bytes();
    /// The lowest bit of the application tag; also the number of bits of storage and reference tag together.
    const APP_SHIFT: u32 = Self::KIND.space_bits() as u32;
    /// The lowest bit of the guard.
    const GUARD_SHIFT: u32 = Self::APP_SHIFT + 16;
    /// The largest guard.
    const GUARD_MASK: u64 = u64::MAX >> (64 - Self::KIND.bits());
}

macro_rules! guard_formats {
    ($($name:ident: $compute:expr;)*) => { $(
        pub(crate) struct $name;
        impl GuardFormat for $name {
            const KIND: GuardKind = GuardKind::$name;
            #[inline(always)]
            fn compute(bytes: &[u8]) -> u64 {
                u64::from($compute(bytes))
            }
        }
    )* };
}

guard_formats! {
    Crc16: guard::crc16;
    Crc32c: guard::crc32c;
    Crc64: guard::crc64;
    IpChecksum: guard::ip_checksum;
}

/// Calls a function that is generic over [`GuardFormat`] with the type of a guard kind.
macro_rules! for_kind {
    ($kind:expr, $function:ident $(:: <$($more:ty),*>)? ($($argument:expr),* $(,)?)) => {
        match $kind {
            $crate::GuardKind::Crc16 => $function::<$crate::tuple::Crc16 $($(, $more)*)?>($($argument),*),
            $crate::GuardKind::Crc32c => $function::<$crate::tuple::Crc32c $($(, $more)*)?>($($argument),*),
            $crate::GuardKind::Crc64 => $function::<$crate::tuple::Crc64 $($(, $more)*)?>($($argument),*),
            $crate::GuardKind::IpChecksum => $function::<$crate::tuple::IpChecksum $($(, $more)*)?>($($argument),*),
        }
    };
}
pub(crate) use for_kind;

/// Loads the tuple at the start of `bytes`. Panics if there are too few.
#[inline(always)]
pub(crate) fn load(tuple_bytes: usize, bytes: &[u8]) -> u128 {
    if tuple_bytes == 8 {
        let (word, _) = bytes.split_first_chunk().expect("a tuple of a 16-bit guard has 8 bytes");
        u128::from(u64::from_be_bytes(*word))
    } else {
        let (word, _) = bytes.split_first_chunk().expect("a tuple of a 32-bit or 64-bit guard has 16 bytes");
        u128::from_be_bytes(*word)
    }
}

/// Stores the tuple at the start of `bytes`. Panics if there are too few.
#[inline(always)]
pub(crate) fn store(tuple_bytes: usize, word: u128, bytes: &mut [u8]) {
    if tuple_bytes == 8 {
        *bytes.first_chunk_mut().expect("a tuple of a 16-bit guard has 8 bytes") = (word as u64).to_be_bytes();
    } else {
        *bytes.first_chunk_mut().expect("a tuple of a 32-bit or 64-bit guard has 16 bytes") = word.to_be_bytes();
    }
}

/// The integer of a tuple; each field is truncated to its width.
pub(crate) fn pack(format: PiFormat, tuple: &Tuple) -> u128 {
    let space = u32::from(format.guard().space_bits());
    let guard = tuple.guard & (u64::MAX >> (64 - format.guard().bits()));
    u128::from(guard) << (space + 16)
        | u128::from(tuple.app_tag) << space
        | u128::from(tuple.storage_tag & format.storage_tag_mask()) << format.reference_tag_bits()
        | u128::from(tuple.ref_tag & format.reference_tag_mask())
}

/// The fields of a tuple's integer.
pub(crate) fn unpack(format: PiFormat, word: u128) -> Tuple {
    let space = u32::from(format.guard().space_bits());
    Tuple {
        guard: (word >> (space + 16)) as u64,
        app_tag: (word >> space) as u16,
        storage_tag: (word >> format.reference_tag_bits()) as u64 & format.storage_tag_mask(),
        ref_tag: word as u64 & format.reference_tag_mask(),
    }
}

/// The bits of a tuple's integer that disable the check of its block if all are set.
pub(crate) fn escape_mask(format: PiFormat) -> u128 {
    let app = u128::from(ESCAPE) << format.guard().space_bits();
    match format.protection() {
        ProtectionType::Type1 | ProtectionType::Type2 => app,
        ProtectionType::Type3 => app | u128::from(format.reference_tag_mask()),
    }
}

/// True if any of the tuples disables the check of its block. It is called with the tuples of every transfer that is
/// checked, so it reads only the bits that matter.
pub(crate) fn any_is_escaped(format: PiFormat, tags: &[u8]) -> bool {
    let (mask, tuple_bytes) = (escape_mask(format), format.tuple_bytes());
    tags.chunks_exact(tuple_bytes).any(|tuple| load(tuple_bytes, tuple) & mask == mask)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn format(guard: GuardKind, protection: ProtectionType, storage_tag_bits: u8) -> PiFormat {
        PiFormat::new(guard, protection, storage_tag_bits).unwrap()
    }

    fn bytes_of(format: PiFormat, tuple: Tuple) -> Vec<u8> {
        let mut bytes = vec![0; format.tuple_bytes()];
        tuple.write(format, &mut bytes);
        assert_eq!(Tuple::read(format, &bytes), tuple);
        bytes
    }

    #[test]
    fn the_layouts_of_the_specification() {
        let tuple = Tuple { guard: 0x0102, app_tag: 0x0304, storage_tag: 0, ref_tag: 0x0506_0708 };
        let crc16 = format(GuardKind::Crc16, ProtectionType::Type1, 0);
        assert_eq!(bytes_of(crc16, tuple), [1, 2, 3, 4, 5, 6, 7, 8]);

        let tuple = Tuple { guard: 0x0102_0304, app_tag: 0x0506, storage_tag: 0x0708, ref_tag: 0x090A_0B0C_0D0E_0F10 };
        let crc32c = format(GuardKind::Crc32c, ProtectionType::Type1, 16);
        assert_eq!(bytes_of(crc32c, tuple), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]);

        let tuple = Tuple { guard: 0x0102_0304_0506_0708, app_tag: 0x090A, storage_tag: 0x0B, ref_tag: 0x0C_0D0E_0F10 };
        let crc64 = format(GuardKind::Crc64, ProtectionType::Type1, 8);
        assert_eq!(bytes_of(crc64, tuple), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]);
    }

    #[test]
    fn storage_tags_split_the_space_at_any_bit() {
        let odd = format(GuardKind::Crc16, ProtectionType::Type1, 5);
        let tuple = Tuple { guard: 0, app_tag: 0, storage_tag: 0b10001, ref_tag: 1 };
        assert_eq!(bytes_of(odd, tuple), [0, 0, 0, 0, 0b1000_1000, 0, 0, 1]);
        let all = format(GuardKind::Crc32c, ProtectionType::Type1, 64);
        let tuple = Tuple { guard: 0, app_tag: 0, storage_tag: u64::MAX, ref_tag: 0x1234 };
        assert_eq!(bytes_of(all, tuple)[6..], [255, 255, 255, 255, 255, 255, 255, 255, 0x12, 0x34]);
    }

    #[test]
    fn fields_too_large_lose_their_high_bits_only() {
        let narrow = format(GuardKind::Crc16, ProtectionType::Type1, 16);
        let mut bytes = [0; 8];
        Tuple { guard: 0xA_0001, app_tag: 2, storage_tag: 0xB_0003, ref_tag: 0xC_0004 }.write(narrow, &mut bytes);
        assert_eq!(bytes, [0, 1, 0, 2, 0, 3, 0, 4]);
    }

    #[test]
    fn escapes_follow_the_protection_type() {
        let escaped = Tuple { guard: 1, app_tag: 0xFFFF, storage_tag: 0, ref_tag: 5 };
        let checked = Tuple { app_tag: 0xFFFE, ref_tag: 0xFFFF_FFFF, ..escaped };
        for protection in [ProtectionType::Type1, ProtectionType::Type2] {
            assert!(escaped.is_escaped(format(GuardKind::Crc16, protection, 0)));
            assert!(!checked.is_escaped(format(GuardKind::Crc16, protection, 0)));
        }
        let type3 = format(GuardKind::Crc16, ProtectionType::Type3, 0);
        assert!(!escaped.is_escaped(type3));
        assert!(!checked.is_escaped(type3));
        assert!(Tuple { ref_tag: 0xFFFF_FFFF, ..escaped }.is_escaped(type3));
        let type1 = format(GuardKind::Crc32c, ProtectionType::Type1, 16);
        let (plain, odd) = (Tuple { app_tag: 1, ..escaped }, escaped);
        for (tuples, any) in [([plain; 3], false), ([odd, plain, plain], true), ([plain, plain, odd], true)] {
            assert_eq!(any_is_escaped(type1, &tuples.map(|tuple| bytes_of(type1, tuple)).concat()), any);
            assert!(!any_is_escaped(type3, &tuples.map(|tuple| bytes_of(type3, tuple)).concat()));
        }
        // Without reference tag bits only the application tag decides.
        assert!(escaped.is_escaped(format(GuardKind::Crc16, ProtectionType::Type3, 32)));
    }
}
