//! One block's record: where its data are, and its tags.
//!
//! A record is the same 32 bytes in the log and in the table. It checks itself, so that damage to a table is charged to
//! exactly the blocks it hit.

use sealblock_integrity::PiFormat;
use sealblock_units::Lba;

use super::{Seed, crc32c, get, put};

/// Bytes of a record.
pub const MAP_ENTRY_BYTES: usize = 32;
/// Addresses are kept in 40 bits.
const LBA_LIMIT: u64 = 1 << 40;

const TUPLE: usize = 0;
const DATA_CRC: usize = 8;
const LBA: usize = 16;
const PBN: usize = 21;
const GENERATION: usize = 24;
const KIND: usize = 26;
const FLAGS: usize = 27;
const CHECKSUM: usize = 28;

/// Flag: the tags came from a host and their guard was not found to match the data, so recovery cannot use it.
const FLAG_GUARD_UNVERIFIED: u8 = 1;
/// Flag, in the log only: the record is that of several blocks without data, as many as the slot field says.
pub(super) const FLAG_RUN: u8 = 2;

/// What a record says of its block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MapEntryKind {
    /// The data are in the slot.
    Stored,
    /// The block was given up and reads as zeroes.
    Deallocated,
    /// The block was made unreadable, and stays so until it is written or given up.
    Uncorrectable,
}

/// A block's record. See `docs/formats/protected-volume.md`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MapEntry {
    /// The block.
    pub lba: Lba,
    /// Stored, given up, or made unreadable.
    pub kind: MapEntryKind,
    /// The slot of the block's zone that holds the data.
    pub pbn: u32,
    /// Which commit wrote the record; never 0.
    pub generation: u16,
    /// The protection information tuple as it was sealed, padded with zeroes; for an 8-byte tuple or none, bytes 8..12
    /// are the CRC-32C of the data, by which recovery recognises data that did not all reach the medium.
    pub tuple: [u8; 16],
    /// The tuple's guard was not checked when it was written.
    pub guard_unverified: bool,
}

/// Why 32 bytes are no record of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MapEntryError {
    /// All bytes are zero: no record was ever written here.
    #[error("no record")]
    Unwritten,
    /// The checksum does not match.
    #[error("the record's checksum does not match")]
    Checksum,
    /// The checksum matches and the content is impossible: made by a newer version, or on purpose.
    #[error("the record has an unknown kind or flag")]
    Unknown,
}

impl MapEntry {
    /// The record of a block that was given up.
    pub fn deallocated(lba: Lba) -> MapEntry {
        MapEntry {
            lba,
            kind: MapEntryKind::Deallocated,
            pbn: 0,
            generation: 0,
            tuple: [0; 16],
            guard_unverified: false,
        }
    }

    /// The record of a block that was made unreadable.
    pub fn uncorrectable(lba: Lba) -> MapEntry {
        MapEntry { kind: MapEntryKind::Uncorrectable, ..MapEntry::deallocated(lba) }
    }

    /// The bytes of the record.
    pub fn encode(&self, seed: Seed) -> [u8; MAP_ENTRY_BYTES] {
        self.encode_flagged(seed, 0)
    }

    /// The bytes of the record with further flags.
    pub(super) fn encode_flagged(&self, seed: Seed, flags: u8) -> [u8; MAP_ENTRY_BYTES] {
        let mut bytes = [0; MAP_ENTRY_BYTES];
        bytes[TUPLE..TUPLE + 16].copy_from_slice(&self.tuple);
        put::<5>(&mut bytes, LBA, self.lba.get() % LBA_LIMIT);
        put::<3>(&mut bytes, PBN, u64::from(self.pbn));
        put::<2>(&mut bytes, GENERATION, u64::from(self.generation));
        bytes[KIND] = match self.kind {
            MapEntryKind::Stored => 1,
            MapEntryKind::Deallocated => 2,
            MapEntryKind::Uncorrectable => 3,
        };
        bytes[FLAGS] = flags | if self.guard_unverified { FLAG_GUARD_UNVERIFIED } else { 0 };
        let checksum = seed.checksum(&bytes[..CHECKSUM]);
        put::<4>(&mut bytes, CHECKSUM, u64::from(checksum));
        bytes
    }

    /// Reads a record, checking it. Slot and address are in range of their fields, not yet of the volume.
    pub fn decode(bytes: &[u8; MAP_ENTRY_BYTES], seed: Seed) -> Result<MapEntry, MapEntryError> {
        MapEntry::decode_flagged(bytes, seed, 0).map(|(record, _)| record)
    }

    /// Reads a record that may have further flags, and gives those it has.
    pub(super) fn decode_flagged(
        bytes: &[u8; MAP_ENTRY_BYTES],
        seed: Seed,
        flags: u8,
    ) -> Result<(MapEntry, u8), MapEntryError> {
        if *bytes == [0; MAP_ENTRY_BYTES] {
            return Err(MapEntryError::Unwritten);
        }
        if get::<4>(bytes, CHECKSUM) != u64::from(seed.checksum(&bytes[..CHECKSUM])) {
            return Err(MapEntryError::Checksum);
        }
        let kind = match bytes[KIND] {
            1 => MapEntryKind::Stored,
            2 => MapEntryKind::Deallocated,
            3 => MapEntryKind::Uncorrectable,
            _ => return Err(MapEntryError::Unknown),
        };
        if bytes[FLAGS] & !(FLAG_GUARD_UNVERIFIED | flags) != 0 || get::<2>(bytes, GENERATION) == 0 {
            return Err(MapEntryError::Unknown);
        }
        Ok((MapEntry::fields(bytes, kind), bytes[FLAGS] & flags))
    }

    /// The salt with which `bytes` would be the record of this block, where they can be one at all.
    pub fn trace(bytes: &[u8; MAP_ENTRY_BYTES], lba: Lba) -> Option<u32> {
        let is_possible = matches!(bytes[KIND], 1..=3)
            && bytes[FLAGS] & !FLAG_GUARD_UNVERIFIED == 0
            && get::<2>(bytes, GENERATION) != 0
            && get::<5>(bytes, LBA) == lba.get() % LBA_LIMIT;
        is_possible.then(|| get::<4>(bytes, CHECKSUM) as u32 ^ crc32c(&bytes[..CHECKSUM]))
    }

    /// The fields as they stand, unchecked: to say what is wrong with a damaged record.
    pub fn decode_unchecked(bytes: &[u8; MAP_ENTRY_BYTES]) -> MapEntry {
        let kind = match bytes[KIND] {
            2 => MapEntryKind::Deallocated,
            3 => MapEntryKind::Uncorrectable,
            _ => MapEntryKind::Stored,
        };
        MapEntry::fields(bytes, kind)
    }

    fn fields(bytes: &[u8; MAP_ENTRY_BYTES], kind: MapEntryKind) -> MapEntry {
        let mut tuple = [0; 16];
        tuple.copy_from_slice(&bytes[TUPLE..TUPLE + 16]);
        MapEntry {
            lba: Lba::new(get::<5>(bytes, LBA)),
            kind,
            pbn: get::<3>(bytes, PBN) as u32,
            generation: get::<2>(bytes, GENERATION) as u16,
            tuple,
            guard_unverified: bytes[FLAGS] & FLAG_GUARD_UNVERIFIED != 0,
        }
    }

    /// The part of [`Record::tuple`] that is the tuple of `format`.
    pub fn tags(&self, format: PiFormat) -> &[u8] {
        &self.tuple[..format.tuple_bytes()]
    }

    /// The CRC-32C of the data in a record whose tuple leaves room for it.
    pub fn data_crc(&self) -> u32 {
        get::<4>(&self.tuple, DATA_CRC) as u32
    }

    /// Stores the CRC-32C of the data in a record whose tuple leaves room for it.
    pub fn set_data_crc(&mut self, crc: u32) {
        put::<4>(&mut self.tuple, DATA_CRC, u64::from(crc));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEED: Seed = Seed(0x1234_5678);

    fn record() -> MapEntry {
        MapEntry {
            lba: Lba::new(0x12_3456_789a),
            kind: MapEntryKind::Stored,
            pbn: 0x00ab_cdef,
            generation: 7,
            tuple: [9; 16],
            guard_unverified: false,
        }
    }

    #[test]
    fn a_record_comes_back() {
        assert_eq!(MapEntry::decode(&record().encode(SEED), SEED), Ok(record()));
        let gone = MapEntry { generation: 1, ..MapEntry::deallocated(Lba::new(3)) };
        assert_eq!(MapEntry::decode(&gone.encode(SEED), SEED), Ok(gone));
        let spoiled = MapEntry { generation: 1, ..MapEntry::uncorrectable(Lba::new(3)) };
        let bytes = spoiled.encode(SEED);
        assert_eq!((MapEntry::decode(&bytes, SEED), bytes[KIND]), (Ok(spoiled), 3));
        assert_eq!(MapEntry::decode_unchecked(&bytes).kind, MapEntryKind::Uncorrectable);
    }

    #[test]
    fn a_trace_has_the_salt_of_its_volume() {
        let bytes = record().encode(SEED);
        assert_eq!(MapEntry::trace(&bytes, record().lba), Some(SEED.0));
        assert_eq!(MapEntry::trace(&bytes, Lba::new(1)), None);
        assert_eq!(MapEntry::trace(&[0; MAP_ENTRY_BYTES], Lba::ZERO), None);
    }

    #[test]
    fn any_flipped_bit_is_found() {
        let good = record().encode(SEED);
        for bit in 0..MAP_ENTRY_BYTES * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(MapEntry::decode(&bad, SEED), Err(MapEntryError::Checksum), "bit {bit}");
        }
    }

    #[test]
    fn a_record_of_another_volume_is_refused() {
        assert_eq!(MapEntry::decode(&record().encode(Seed(1)), SEED), Err(MapEntryError::Checksum));
    }

    #[test]
    fn zeroes_are_blank_and_unknown_kinds_are_refused() {
        assert_eq!(MapEntry::decode(&[0; 32], SEED), Err(MapEntryError::Unwritten));
        let mut bytes = record().encode(SEED);
        bytes[KIND] = 9;
        let checksum = SEED.checksum(&bytes[..CHECKSUM]);
        put::<4>(&mut bytes, CHECKSUM, u64::from(checksum));
        assert_eq!(MapEntry::decode(&bytes, SEED), Err(MapEntryError::Unknown));
    }

    #[test]
    fn the_worked_example_of_the_documentation_is_right() {
        let seed = Seed::of(b"an identity here");
        assert_eq!(seed, Seed(0xd88b_2fc4));
        let data: Vec<u8> = b"sealblock!".iter().copied().cycle().take(4096).collect();
        let mut tuple = [0; 16];
        tuple[..2].copy_from_slice(&sealblock_integrity::guard::crc16(&data).to_be_bytes());
        tuple[7] = 42;
        let mut record = MapEntry {
            lba: Lba::new(42),
            kind: MapEntryKind::Stored,
            pbn: 0x4_0003,
            generation: 8,
            tuple,
            guard_unverified: false,
        };
        record.set_data_crc(sealblock_integrity::guard::crc32c(&data));
        let bytes = [
            0x11, 0xf9, 0, 0, 0, 0, 0, 0x2a, 0x0c, 0xae, 0x4f, 0x37, 0, 0, 0, 0, 0x2a, 0, 0, 0, 0, 3, 0, 4, 8, 0, 1, 0,
            0x29, 0x04, 0xd0, 0x3e,
        ];
        assert_eq!(record.encode(seed), bytes);
        assert_eq!(MapEntry::decode(&bytes, seed), Ok(record));
    }

    #[test]
    fn the_bytes_are_stable() {
        let bytes = record().encode(SEED);
        assert_eq!(bytes[16..28], [0x9a, 0x78, 0x56, 0x34, 0x12, 0xef, 0xcd, 0xab, 7, 0, 1, 0]);
    }
}
