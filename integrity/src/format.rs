//! The meaning of a tuple's bytes: the guard, the protection type, and how storage tag and reference tag share their
//! space.
//!
//! A [`PiFormat`] can only be created with a legal storage tag size, so every later shift by its widths is in range.

use std::fmt;

/// The checksum that a tuple carries as its guard.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum GuardKind {
    /// CRC-16/T10-DIF: the 16-bit guard of NVMe and SCSI, in an 8-byte tuple.
    Crc16,
    /// CRC-32C (Castagnoli): the 32-bit guard of NVMe, in a 16-byte tuple.
    Crc32c,
    /// CRC-64/NVME: the 64-bit guard of NVMe, in a 16-byte tuple.
    Crc64,
    /// The Internet checksum of RFC 1071, in an 8-byte tuple: the cheap guard of host buffers (DIX). It is never sent
    /// to an NVMe device, and it does not detect 16-bit words that were swapped.
    IpChecksum,
}

impl GuardKind {
    /// Every kind.
    pub const ALL: [GuardKind; 4] = [GuardKind::Crc16, GuardKind::Crc32c, GuardKind::Crc64, GuardKind::IpChecksum];

    /// Bits of the guard: 16, 32 or 64.
    pub const fn bits(self) -> u32 {
        match self {
            GuardKind::Crc16 | GuardKind::IpChecksum => 16,
            GuardKind::Crc32c => 32,
            GuardKind::Crc64 => 64,
        }
    }

    /// Bytes of the whole tuple: 8 or 16.
    pub const fn tuple_bytes(self) -> usize {
        match self {
            GuardKind::Crc16 | GuardKind::IpChecksum => 8,
            GuardKind::Crc32c | GuardKind::Crc64 => 16,
        }
    }

    /// The number of bits that storage tag and reference tag share (NVM Command Set specification, "Protection
    /// Information Formats").
    pub const fn space_bits(self) -> u8 {
        match self {
            GuardKind::Crc16 | GuardKind::IpChecksum => 32,
            GuardKind::Crc32c => 80,
            GuardKind::Crc64 => 48,
        }
    }

    /// Smallest and largest legal size of the storage tag, in bits (NVM Command Set specification, field STS).
    pub const fn storage_tag_limits(self) -> (u8, u8) {
        match self {
            GuardKind::Crc16 | GuardKind::IpChecksum => (0, 32),
            GuardKind::Crc32c => (16, 64),
            GuardKind::Crc64 => (0, 48),
        }
    }

    /// The name on the command line.
    pub const fn as_str(self) -> &'static str {
        match self {
            GuardKind::Crc16 => "crc16",
            GuardKind::Crc32c => "crc32c",
            GuardKind::Crc64 => "crc64",
            GuardKind::IpChecksum => "ip",
        }
    }
}

impl fmt::Display for GuardKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What the reference tag is compared with, and which tags disable checking (NVM Command Set specification, end-to-end
/// data protection).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ProtectionType {
    /// The reference tag is the low bits of the block's address and grows by one with each block.
    Type1,
    /// The reference tag starts at a value that the command chooses, and grows by one with each block.
    Type2,
    /// The reference tag belongs to the application; it is the same in all blocks of a command and never checked.
    Type3,
}

impl ProtectionType {
    /// Every type.
    pub const ALL: [ProtectionType; 3] = [ProtectionType::Type1, ProtectionType::Type2, ProtectionType::Type3];

    /// True if the reference tag grows with each block and is checked.
    pub const fn increments_ref_tag(self) -> bool {
        !matches!(self, ProtectionType::Type3)
    }
}

/// Why a format of protection information is invalid.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FormatError {
    /// The storage tag has a size that the guard does not allow.
    #[error("a storage tag of {bits} bits does not go with the {guard} guard, which allows {min} to {max}")]
    StorageTagBits {
        /// The requested guard.
        guard: GuardKind,
        /// The requested size.
        bits: u8,
        /// The smallest legal size.
        min: u8,
        /// The largest legal size.
        max: u8,
    },
    /// The metadata of a block has no room for the tuple.
    #[error("{metadata_bytes} bytes of metadata cannot hold protection information of {tuple_bytes} bytes")]
    MetadataTooSmall {
        /// Bytes of metadata per block.
        metadata_bytes: usize,
        /// Bytes of the tuple.
        tuple_bytes: usize,
    },
}

/// A format of protection information: guard, protection type and size of the storage tag.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PiFormat {
    guard: GuardKind,
    protection: ProtectionType,
    storage_tag_bits: u8,
}

impl PiFormat {
    /// The format with a storage tag of `storage_tag_bits` bits; the reference tag gets the rest of the space.
    ///
    /// Fails if the size is outside the limits of field STS in the NVM Command Set specification: 0 to 32 bits for a
    /// 16-bit guard, 16 to 64 for a 32-bit guard, 0 to 48 for a 64-bit guard.
    pub const fn new(
        guard: GuardKind,
        protection: ProtectionType,
        storage_tag_bits: u8,
    ) -> Result<PiFormat, FormatError> {
        let (min, max) = guard.storage_tag_limits();
        if storage_tag_bits < min || storage_tag_bits > max {
            return Err(FormatError::StorageTagBits { guard, bits: storage_tag_bits, min, max });
        }
        Ok(PiFormat { guard, protection, storage_tag_bits })
    }

    /// The format with the smallest legal storage tag: 16 bits for the 32-bit guard, otherwise none.
    pub const fn with_default_storage_tag(guard: GuardKind, protection: ProtectionType) -> PiFormat {
        PiFormat { guard, protection, storage_tag_bits: guard.storage_tag_limits().0 }
    }

    /// The guard.
    pub const fn guard(self) -> GuardKind {
        self.guard
    }

    /// The protection type.
    pub const fn protection(self) -> ProtectionType {
        self.protection
    }

    /// The number of bits of the storage tag; may be 0.
    pub const fn storage_tag_bits(self) -> u8 {
        self.storage_tag_bits
    }

    /// The number of bits of the reference tag; may be 0, at most 64.
    pub const fn reference_tag_bits(self) -> u8 {
        self.guard.space_bits() - self.storage_tag_bits
    }

    /// Bytes of a tuple: 8 or 16.
    pub const fn tuple_bytes(self) -> usize {
        self.guard.tuple_bytes()
    }

    /// The largest storage tag: all bits are ones.
    pub const fn storage_tag_mask(self) -> u64 {
        ones(self.storage_tag_bits)
    }

    /// The largest reference tag: all bits are ones.
    pub const fn reference_tag_mask(self) -> u64 {
        ones(self.reference_tag_bits())
    }

    /// The reference tag of the block that is `blocks` blocks after one with reference tag `first`, truncated to the
    /// bits of the format.
    pub const fn reference_tag(self, first: u64, blocks: u64) -> u64 {
        let step = if self.protection.increments_ref_tag() { blocks } else { 0 };
        first.wrapping_add(step) & self.reference_tag_mask()
    }
}

/// A number whose lowest `bits` bits are set; `bits` is at most 64.
const fn ones(bits: u8) -> u64 {
    if bits == 0 { 0 } else { u64::MAX >> (64 - bits as u32) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn storage_tags_keep_to_the_limits_of_their_guard() {
        for guard in GuardKind::ALL {
            let (min, max) = guard.storage_tag_limits();
            for bits in 0..=255 {
                let format = PiFormat::new(guard, ProtectionType::Type1, bits);
                if (min..=max).contains(&bits) {
                    let format = format.unwrap();
                    assert!(format.reference_tag_bits() <= 64);
                    assert_eq!(format.storage_tag_bits() + format.reference_tag_bits(), guard.space_bits());
                } else {
                    assert_eq!(format, Err(FormatError::StorageTagBits { guard, bits, min, max }));
                }
            }
        }
    }

    #[test]
    fn the_fields_fill_the_tuple() {
        for guard in GuardKind::ALL {
            assert_eq!(guard.bits() + 16 + u32::from(guard.space_bits()), guard.tuple_bytes() as u32 * 8);
        }
    }

    #[test]
    fn reference_tags_wrap_at_their_width_and_stand_still_in_type_3() {
        let format = PiFormat::with_default_storage_tag(GuardKind::Crc16, ProtectionType::Type1);
        assert_eq!(format.reference_tag(0xFFFF_FFFF, 1), 0);
        let format = PiFormat::with_default_storage_tag(GuardKind::Crc64, ProtectionType::Type2);
        assert_eq!(format.reference_tag(0xFFFF_FFFF, 1), 0x1_0000_0000);
        let format = PiFormat::with_default_storage_tag(GuardKind::Crc64, ProtectionType::Type3);
        assert_eq!(format.reference_tag(7, 100), 7);
        let format = PiFormat::new(GuardKind::Crc16, ProtectionType::Type1, 32).unwrap();
        assert_eq!(format.reference_tag(7, 100), 0);
    }
}
