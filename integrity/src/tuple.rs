//! One tuple, decoded, and the tags that sealing puts into a run of tuples.

use crate::PiFormat;
use crate::wire;

/// The protection information of one block, decoded. All fields are big-endian in bytes; the storage tag is the more
/// significant part of the space that it shares with the reference tag
/// (NVM Command Set specification, "Protection Information Formats").
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Tuple {
    /// Checksum of the block, in as many low bits as the guard has.
    pub guard: u64,
    /// Application tag.
    pub app_tag: u16,
    /// Storage tag, in as many low bits as the format gives it.
    pub storage_tag: u64,
    /// Reference tag, in as many low bits as the format leaves it.
    pub ref_tag: u64,
}

impl Tuple {
    /// The tuple in the first [`PiFormat::tuple_bytes`] bytes. Any bytes are a tuple. Panics if there are fewer.
    pub fn read(format: PiFormat, bytes: &[u8]) -> Tuple {
        wire::unpack(format, wire::load(format.tuple_bytes(), bytes))
    }

    /// Writes the first [`PiFormat::tuple_bytes`] bytes; a field too large for the format loses its high bits.
    /// Panics if there are fewer bytes.
    pub fn write(&self, format: PiFormat, bytes: &mut [u8]) {
        wire::store(format.tuple_bytes(), wire::pack(format, self), bytes);
    }

    /// Whether the tuple switches the checking of its block off: an application tag of FFFFh, in Type 3 together with
    /// a reference tag of all ones, if the format has one
    /// (NVM Command Set specification, end-to-end data protection).
    pub fn is_escaped(&self, format: PiFormat) -> bool {
        let mask = wire::escape_mask(format);
        wire::pack(format, self) & mask == mask
    }
}

/// What sealing puts beside the guard. Fields too large for the format lose their high bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Tags {
    /// Application tag of every block. FFFFh makes blocks that are never checked (see [`Tuple::is_escaped`]).
    pub app_tag: u16,
    /// Storage tag of every block.
    pub storage_tag: u64,
    /// Reference tag of the first block; grows by one with each block in Types 1 and 2, stays in Type 3.
    pub initial_ref_tag: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GuardKind, ProtectionType};

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
        // Without reference tag bits only the application tag can escape.
        assert!(escaped.is_escaped(format(GuardKind::Crc16, ProtectionType::Type3, 32)));
    }
}
