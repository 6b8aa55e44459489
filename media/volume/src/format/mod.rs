//! The bytes of a protected volume, pure: no I/O, no clock.
//!
//! `docs/formats/protected-volume.md` draws every byte. Everything read here is hostile until its checksum and its ranges
//! have been checked; nothing here panics on any input.

mod annex;
mod layout;
mod log_sector;
mod record;
mod superblock;

pub use annex::{ANNEX_HEAD_BYTES, AnnexCopy, annex_offset};
pub use layout::{BITMAP_PAGE_BYTES, Layout, LayoutError, THIRD_FROM_END_BYTES, Zone};
pub use log_sector::{LogHeader, LogSector, LogSectorError};
pub use record::{Kind, RECORD_BYTES, Record, RecordError};
pub use superblock::{SUPERBLOCK_BYTES, SUPERBLOCK_OFFSETS, Superblock, SuperblockError};

/// Salt of a volume's checksums, so that what an earlier volume left on the same medium is never taken for this one's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Seed(pub(crate) u32);

impl Seed {
    /// The salt of the volume with this identity.
    pub fn of(uuid: &[u8; 16]) -> Seed {
        Seed(crc32c(uuid))
    }

    /// The salted checksum of `bytes`.
    pub(crate) fn checksum(self, bytes: &[u8]) -> u32 {
        crc32c(bytes) ^ self.0
    }
}

/// CRC-32C, the checksum of all metadata.
pub(crate) fn crc32c(bytes: &[u8]) -> u32 {
    sealblock_integrity::guard::crc32c(bytes)
}

/// The little-endian number of `N` bytes at `at`.
pub(crate) fn get<const N: usize>(bytes: &[u8], at: usize) -> u64 {
    let mut wide = [0; 8];
    wide[..N].copy_from_slice(&bytes[at..at + N]);
    u64::from_le_bytes(wide)
}

/// Stores the low `N` bytes of `value` at `at`, little-endian.
pub(crate) fn put<const N: usize>(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + N].copy_from_slice(&value.to_le_bytes()[..N]);
}
