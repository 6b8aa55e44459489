//! The bytes of a protected volume, pure: no I/O, no clock.
//!
//! `docs/formats/protected-volume.md` describes every byte, and `protected-volume-shards.md` those of `container`. All input is untrusted until its checksum and its ranges
//! have been checked; nothing here panics on any input.

mod container;
mod generations;
mod group_map;
mod high_water;
mod layout;
mod log_sector;
mod map_entry;
mod note;
mod regions;
mod reserved;
mod segments;
mod superblock;

pub(crate) use sealblock_units::little_endian::{get, put};

pub use container::{Container, ContainerError, MAX_SHARDS, MIN_SHARD_BYTES, SHARD_UNIT_BYTES, Window};
pub use generations::Generations;
pub use group_map::GroupMapSector;
pub use high_water::HighWaterMark;
pub use layout::{
    BITMAP_PAGE_BYTES, HEAD_BYTES, LOG_REGIONS, Layout, PageOffsets, SUPERBLOCK_OFFSETS, TAIL_BYTES,
    THIRD_FROM_END_BYTES, reserved_offset,
};
pub use log_sector::{LogHeader, LogSector, LogSectorError};
pub use map_entry::{MAP_ENTRY_BYTES, MapEntry, MapEntryError, MapEntryKind, MapEntryRun};
pub use note::{LogPosition, NOTE_PAGE_BYTES, NOTES_PER_PAGE, Note, NoteHead};
pub use regions::{Region, RegionKind};
pub use reserved::{RESERVED_HEAD_BYTES, ReservedCopy};
pub use segments::{BlockGroup, LayoutError, MAX_SEGMENTS, PAGE_SECTORS, Segment};
pub use superblock::{Answered, CountedNotes, NotesPlace, SUPERBLOCK_BYTES, Superblock, SuperblockError, WhyLost};

/// The highest write sequence number or sequence number. They grow by one with each write, so they never get near it in
/// the life of a medium. A higher one is forged, and counting on from it could wrap to 0.
pub(crate) const MAX_COUNT: u64 = u64::MAX / 2;

/// Salt of a volume's checksums, so that records of an earlier volume on the same medium are never taken for this
/// one's.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Seed(pub(crate) u32);

impl Seed {
    /// The salt of the volume with this identity.
    pub fn of(uuid: &[u8; 16]) -> Seed {
        Seed(crc32c(uuid))
    }

    /// An identity with this salt, for a volume of which only the salt is known. It is not the volume's own identity.
    pub(crate) fn identity(self) -> [u8; 16] {
        let of = |word: u32| {
            let mut identity = [0; 16];
            identity[12..].copy_from_slice(&word.to_le_bytes());
            identity
        };
        // A CRC is linear except for a constant, and four consecutive bytes can give it any value: a system of 32
        // equations.
        let origin = crc32c(&of(0));
        let mut reduced = [(0_u32, 0_u32); 32];
        for bit in 0..32 {
            let (mut value, mut word) = (crc32c(&of(1 << bit)) ^ origin, 1 << bit);
            while let Some(lead) = value.checked_ilog2() {
                let place = &mut reduced[lead as usize];
                if place.0 == 0 {
                    *place = (value, word);
                    break;
                }
                (value, word) = (value ^ place.0, word ^ place.1);
            }
        }
        let (mut left, mut word) = (self.0 ^ origin, 0);
        for (value, part) in reduced.into_iter().rev() {
            if value != 0 && left ^ value < left {
                (left, word) = (left ^ value, word ^ part);
            }
        }
        of(word)
    }

    /// The salted checksum of `bytes`.
    pub(crate) fn checksum(self, bytes: &[u8]) -> u32 {
        crc32c(bytes) ^ self.0
    }
}

/// A volume's identity as text, in the usual form of a UUID.
pub fn uuid_text(uuid: &[u8; 16]) -> String {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    [&uuid[..4], &uuid[4..6], &uuid[6..8], &uuid[8..10], &uuid[10..]].map(hex).join("-")
}

/// CRC-32C, the checksum of all metadata.
pub(crate) fn crc32c(bytes: &[u8]) -> u32 {
    sealblock_integrity::guard::crc32c(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_salt_has_an_identity() {
        for salt in [0, 1, 0xffff_ffff, 0xd88b_2fc4, 0x1234_5678, 0x8000_0000] {
            assert_eq!(Seed::of(&Seed(salt).identity()), Seed(salt), "{salt:#x}");
        }
    }
}
