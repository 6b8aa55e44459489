//! The four checksums of nodes, superblocks and data, a private type for filesystems without any, and the CRC that hashes
//! are made from.
//!
//! The checksum field in a node or superblock has 32 bytes, of which each type uses the first ones. Items of the
//! checksum tree have only as many bytes as the type needs.
//!
//! A filesystem without checksums ([`ChecksumType::None`]) has zeroes in the field of its nodes, and no items of checksums.
//! Something else must show that its nodes are those that were written. Superblocks, from which all else is found, have
//! CRC-32C then ([`ChecksumType::of_superblock`]).

use blake2::digest::consts::U32 as Bytes32;
use blake2::{Blake2b, Digest};
use sealblock_integrity::guard;
use sha2::Sha256;
use twox_hash::XxHash64;

/// Bytes of the field for a checksum in nodes and superblocks.
pub const FIELD_BYTES: usize = 32;

/// How a filesystem computes all its checksums.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ChecksumType {
    /// CRC-32C, 4 bytes.
    Crc32c,
    /// xxHash64 with seed 0, 8 bytes.
    XxHash64,
    /// SHA-256, 32 bytes.
    Sha256,
    /// BLAKE2b-256 without a key, 32 bytes.
    Blake2b,
    /// No checksums: the number is this project's own, and no other program knows it.
    None = 0xFF00,
}

impl ChecksumType {
    /// Those of Linux, in the order of their numbers.
    pub const ALL: [ChecksumType; 4] =
        [ChecksumType::Crc32c, ChecksumType::XxHash64, ChecksumType::Sha256, ChecksumType::Blake2b];

    /// The type with this number.
    pub fn from_number(number: u16) -> Option<ChecksumType> {
        let is_number = |kind: &ChecksumType| kind.number() == number;
        ChecksumType::ALL.into_iter().chain([ChecksumType::None]).find(is_number)
    }

    /// The number that is stored.
    pub fn number(self) -> u16 {
        self as u16
    }

    /// The type of superblocks.
    pub const fn of_superblock(self) -> ChecksumType {
        match self {
            ChecksumType::None => ChecksumType::Crc32c,
            kind => kind,
        }
    }

    /// Bytes of a checksum; 0 if there are none.
    pub const fn bytes(self) -> usize {
        match self {
            ChecksumType::Crc32c => 4,
            ChecksumType::XxHash64 => 8,
            ChecksumType::Sha256 | ChecksumType::Blake2b => 32,
            ChecksumType::None => 0,
        }
    }

    /// The checksum of `bytes`; an empty one if there are none.
    pub fn compute(self, bytes: &[u8]) -> Checksum {
        let mut field = [0; FIELD_BYTES];
        match self {
            ChecksumType::Crc32c => field[..4].copy_from_slice(&guard::crc32c(bytes).to_le_bytes()),
            ChecksumType::XxHash64 => field[..8].copy_from_slice(&XxHash64::oneshot(0, bytes).to_le_bytes()),
            ChecksumType::Sha256 => field.copy_from_slice(&Sha256::digest(bytes)),
            ChecksumType::Blake2b => field.copy_from_slice(&Blake2b::<Bytes32>::digest(bytes)),
            ChecksumType::None => {}
        }
        Checksum { field, bytes: self.bytes() }
    }

    /// Checks a block that begins with its checksum field; the checksum covers everything after the field. Without
    /// checksums, all of the field must be zero.
    ///
    /// # Errors
    /// If the checksum differs, or the field is cut off.
    pub fn verify(self, block: &[u8]) -> Result<(), ChecksumMismatch> {
        let none = ChecksumMismatch { stored: self.compute(&[]), computed: self.compute(&[]) };
        let (field, covered) = block.split_first_chunk::<FIELD_BYTES>().ok_or(none)?;
        let bytes = if self == ChecksumType::None { FIELD_BYTES } else { self.bytes() };
        let (stored, computed) = (Checksum { field: *field, bytes }, self.compute(covered));
        if stored.as_bytes() == &computed.field[..bytes] { Ok(()) } else { Err(ChecksumMismatch { stored, computed }) }
    }

    /// Sets the checksum of a block. Bytes of the field that the type does not use become zero. A block that is shorter
    /// than the field stays unchanged.
    pub fn seal(self, block: &mut [u8]) {
        if let Some((field, covered)) = block.split_first_chunk_mut::<FIELD_BYTES>() {
            *field = self.compute(covered).field;
        }
    }
}

/// A checksum of any type.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Checksum {
    field: [u8; FIELD_BYTES],
    bytes: usize,
}

impl Checksum {
    /// The checksum in these bytes; bytes after the longest possible checksum are ignored.
    pub fn stored(stored: &[u8]) -> Checksum {
        let bytes = stored.len().min(FIELD_BYTES);
        let mut field = [0; FIELD_BYTES];
        field[..bytes].copy_from_slice(&stored[..bytes]);
        Checksum { field, bytes }
    }

    /// Its bytes, as an item of the checksum tree has them.
    pub fn as_bytes(&self) -> &[u8] {
        &self.field[..self.bytes]
    }

    /// The bytes for a checksum field; unused bytes are zero.
    pub fn to_field(self) -> [u8; FIELD_BYTES] {
        self.field
    }
}

impl std::fmt::Debug for Checksum {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.as_bytes().iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// A stored checksum that differs from that of the bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("checksum {stored:?}, {}", Computed(.computed))]
pub struct ChecksumMismatch {
    /// The stored checksum.
    pub stored: Checksum,
    /// The checksum of the bytes.
    pub computed: Checksum,
}

struct Computed<'a>(&'a Checksum);

impl std::fmt::Display for Computed<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0.as_bytes() {
            [] => f.write_str("in a filesystem without checksums"),
            _ => write!(f, "computed {:?}", self.0),
        }
    }
}

/// Continues a CRC-32C from `seed` over `bytes`, without any inversion, for the hashes of names and references.
pub fn raw_crc32c(seed: u32, bytes: &[u8]) -> u32 {
    !guard::crc32c_append(!seed, bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(checksum: Checksum) -> String {
        format!("{checksum:?}")
    }

    #[test]
    fn published_vectors() {
        // Vectors: RFC 3720 for the check value of CRC-32C, FIPS 180-4 and RFC 7693 for "abc", and xxHash64 of an empty
        // input with seed 0.
        assert_eq!(hex(ChecksumType::Crc32c.compute(b"123456789")), "839206e3");
        assert_eq!(hex(ChecksumType::XxHash64.compute(b"")), "99e9d85137db46ef");
        assert_eq!(
            hex(ChecksumType::Sha256.compute(b"abc")),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
        assert_eq!(
            hex(ChecksumType::Blake2b.compute(b"abc")),
            "bddd813c634239723171ef3fee98579b94964e3bb1cb3e427262c8c068d52319"
        );
    }

    #[test]
    fn a_sealed_block_verifies_and_no_changed_one_does() {
        for kind in ChecksumType::ALL {
            assert_eq!(ChecksumType::from_number(kind.number()), Some(kind));
            let mut block = vec![7; 100];
            kind.seal(&mut block);
            kind.verify(&block).unwrap();
            for at in (0..kind.bytes()).chain(FIELD_BYTES..100) {
                let mut bad = block.clone();
                bad[at] ^= 1;
                assert!(kind.verify(&bad).is_err(), "{kind:?} {at}");
            }
            assert!(kind.verify(&block[..20]).is_err());
        }
        for number in [4, 0xFF, 0xFEFF, 0xFF01, u16::MAX] {
            assert_eq!(ChecksumType::from_number(number), None);
        }
    }

    #[test]
    fn without_checksums_the_field_is_zero() {
        let none = ChecksumType::None;
        assert_eq!((ChecksumType::from_number(0xFF00), none.number(), none.bytes()), (Some(none), 0xFF00, 0));
        assert_eq!(
            (none.of_superblock(), ChecksumType::Sha256.of_superblock()),
            (ChecksumType::Crc32c, ChecksumType::Sha256)
        );
        assert!(none.compute(b"123").as_bytes().is_empty());
        let mut block = vec![7; 100];
        none.seal(&mut block);
        none.verify(&block).unwrap();
        assert_eq!(block[..FIELD_BYTES], [0; FIELD_BYTES]);
        block[FIELD_BYTES] ^= 1;
        none.verify(&block).unwrap();
        for at in 0..FIELD_BYTES {
            let mut bad = block.clone();
            bad[at] = 1;
            let error = none.verify(&bad).unwrap_err().to_string();
            assert!(error.ends_with("in a filesystem without checksums"), "{error}");
        }
        assert!(none.verify(&block[..20]).is_err());
    }

    #[test]
    fn the_raw_crc_joins_and_starts_from_any_seed() {
        assert_eq!(raw_crc32c(!0, b"123456789"), !0xe306_9283);
        assert_eq!(raw_crc32c(raw_crc32c(5, b"1234"), b"56789"), raw_crc32c(5, b"123456789"));
        assert_eq!(raw_crc32c(0, &[0; 9]), 0);
    }
}
