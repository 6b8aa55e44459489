//! The map entry of one block, and of a run of blocks without data: where the data are, and their tuple.
//!
//! Blocks that are deallocated, or made unreadable, together share one entry in the log: a run, with a flag and a
//! number of blocks instead of the pbn. A reader of single entries refuses the unknown flag, so a run never counts as
//! its first block alone.
//!
//! A map entry has the same 32 bytes in the log and in the block map, with a checksum, so damage to a map page costs
//! exactly the damaged blocks.

use sealblock_integrity::PiFormat;
use sealblock_units::{Extent, Lba};

use super::{Seed, crc32c, get, put};

/// Bytes of a map entry.
pub const MAP_ENTRY_BYTES: usize = 32;
/// An address has 40 bits.
const LBA_LIMIT: u64 = 1 << 40;

const TUPLE: usize = 0;
const DATA_CRC: usize = 8;
const LBA: usize = 16;
const PBN: usize = 21;
const GENERATION: usize = 24;
const KIND: usize = 26;
const FLAGS: usize = 27;
const CHECKSUM: usize = 28;

/// Flag: the host disabled checks and its guard does not match the data, so the guard proves nothing about them.
const FLAG_GUARD_UNVERIFIED: u8 = 1;
/// Flag, in the log only: the entry describes several blocks without data; the pbn field has their number.
pub(super) const FLAG_RUN: u8 = 2;

/// The state of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MapEntryKind {
    /// The data are in the physical block.
    Stored,
    /// The block was deallocated and reads as zeroes.
    Deallocated,
    /// The block was made unreadable (Write Uncorrectable), and stays so until it is written or deallocated.
    Uncorrectable,
}

/// A block's map entry. See `docs/formats/protected-volume.md`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MapEntry {
    /// The block.
    pub lba: Lba,
    /// Stored, deallocated, or made unreadable.
    pub kind: MapEntryKind,
    /// The physical block of the block's block group that holds the data.
    pub pbn: u32,
    /// The commit that wrote the map entry; never 0.
    pub generation: u16,
    /// The protection information tuple as it was sealed, padded with zeroes. If it has 8 bytes or there is none, bytes
    /// 8..12 are the CRC-32C of the data, which shows recovery whether all data reached the medium.
    pub tuple: [u8; 16],
    /// The guard came from the host unchecked, and does not match the data.
    pub guard_unverified: bool,
}

/// Why 32 bytes are no map entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MapEntryError {
    /// All bytes are zero: the block was never written.
    #[error("no map entry")]
    Unwritten,
    /// The checksum does not match.
    #[error("the map entry's checksum does not match")]
    Checksum,
    /// The checksum matches but the content is impossible: from a newer version, or forged.
    #[error("the map entry has an unknown kind or flag")]
    Unknown,
}

impl MapEntry {
    /// The map entry of a block that was deallocated.
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

    /// The map entry of a block that was made unreadable.
    pub fn uncorrectable(lba: Lba) -> MapEntry {
        MapEntry { kind: MapEntryKind::Uncorrectable, ..MapEntry::deallocated(lba) }
    }

    /// Encodes the map entry.
    pub fn encode(&self, seed: Seed) -> [u8; MAP_ENTRY_BYTES] {
        self.encode_flagged(seed, 0)
    }

    /// Encodes the map entry with further flags.
    fn encode_flagged(&self, seed: Seed, flags: u8) -> [u8; MAP_ENTRY_BYTES] {
        let mut bytes = self.encode_unsealed(flags);
        let checksum = seed.checksum(&bytes[..CHECKSUM]);
        put::<4>(&mut bytes, CHECKSUM, u64::from(checksum));
        bytes
    }

    /// Encodes the map entry with further flags and without a checksum.
    #[inline]
    fn encode_unsealed(&self, flags: u8) -> [u8; MAP_ENTRY_BYTES] {
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
        bytes
    }

    /// Reads and checks a map entry. The physical block and the address are in range of their fields, but maybe not of
    /// the volume.
    pub fn decode(bytes: &[u8; MAP_ENTRY_BYTES], seed: Seed) -> Result<MapEntry, MapEntryError> {
        MapEntry::decode_flagged(bytes, seed, 0).map(|(entry, _)| entry)
    }

    /// Reads a map entry that may have these further flags. Also returns those that it has.
    fn decode_flagged(bytes: &[u8; MAP_ENTRY_BYTES], seed: Seed, flags: u8) -> Result<(MapEntry, u8), MapEntryError> {
        if *bytes == [0; MAP_ENTRY_BYTES] {
            return Err(MapEntryError::Unwritten);
        }
        if get::<4>(bytes, CHECKSUM) != u64::from(seed.checksum(&bytes[..CHECKSUM])) {
            return Err(MapEntryError::Checksum);
        }
        MapEntry::decode_unsealed(bytes, flags)
    }

    /// The same without a check of the checksum.
    fn decode_unsealed(bytes: &[u8; MAP_ENTRY_BYTES], flags: u8) -> Result<(MapEntry, u8), MapEntryError> {
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

    /// The salt for which `bytes` are the map entry of this block; `None` if they cannot be one.
    pub fn trace(bytes: &[u8; MAP_ENTRY_BYTES], lba: Lba) -> Option<u32> {
        let is_possible = matches!(bytes[KIND], 1..=3)
            && bytes[FLAGS] & !FLAG_GUARD_UNVERIFIED == 0
            && get::<2>(bytes, GENERATION) != 0
            && get::<5>(bytes, LBA) == lba.get() % LBA_LIMIT;
        is_possible.then(|| get::<4>(bytes, CHECKSUM) as u32 ^ crc32c(&bytes[..CHECKSUM]))
    }

    /// The fields as they are, unchecked, to find out what is wrong with a damaged map entry.
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

    /// The part of [`MapEntry::tuple`] that is the tuple of `format`.
    pub fn tags(&self, format: PiFormat) -> &[u8] {
        &self.tuple[..format.tuple_bytes()]
    }

    /// The CRC-32C of the data in a map entry whose tuple leaves room for it.
    pub fn data_crc(&self) -> u32 {
        get::<4>(&self.tuple, DATA_CRC) as u32
    }

    /// Stores the CRC-32C of the data in a map entry whose tuple leaves room for it.
    pub fn set_data_crc(&mut self, crc: u32) {
        put::<4>(&mut self.tuple, DATA_CRC, u64::from(crc));
    }
}

/// The map entry of a block, or of several contiguous blocks without data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MapEntryRun {
    /// The map entry of the first block. Those of the others differ only in their addresses.
    pub first: MapEntry,
    /// Number of blocks: 1 if there are data, else 1 to [`MapEntryRun::MAX_BLOCKS`].
    pub blocks: u32,
}

impl From<MapEntry> for MapEntryRun {
    fn from(first: MapEntry) -> MapEntryRun {
        MapEntryRun { first, blocks: 1 }
    }
}

impl MapEntryRun {
    /// The maximum number of blocks of a run: what the field holds.
    pub const MAX_BLOCKS: u32 = (1 << 24) - 1;

    /// The address of the first block.
    pub fn start(&self) -> u64 {
        self.first.lba.get()
    }

    /// The address after the last block.
    pub fn end(&self) -> u64 {
        self.start() + u64::from(self.blocks)
    }

    /// The blocks.
    pub fn extent(&self) -> Extent {
        Extent::from_raw(self.start(), u64::from(self.blocks)).expect("a run has blocks, with addresses of 40 bits")
    }

    /// The part between two addresses of the run, the second one excluded.
    ///
    /// # Panics
    /// In tests, when the part is empty or not within the run.
    pub fn part(&self, from: u64, to: u64) -> MapEntryRun {
        debug_assert!(self.start() <= from && from < to && to <= self.end(), "a part of the run");
        MapEntryRun { first: MapEntry { lba: Lba::new(from), ..self.first }, blocks: (to - from) as u32 }
    }

    /// The map entry of each block.
    pub fn entries(self) -> impl Iterator<Item = MapEntry> {
        (self.start()..self.end()).map(move |lba| MapEntry { lba: Lba::new(lba), ..self.first })
    }

    /// Appends `next` if it follows and its map entries are the same except for their addresses. True if it did.
    pub fn join(&mut self, next: &MapEntryRun) -> bool {
        let blocks = self.blocks.saturating_add(next.blocks);
        let joins = self.first.kind != MapEntryKind::Stored
            && MapEntry { lba: self.first.lba, ..next.first } == self.first
            && self.end() == next.start()
            && blocks <= MapEntryRun::MAX_BLOCKS;
        if joins {
            self.blocks = blocks;
        }
        joins
    }

    /// Encodes the run for the log; a single block as an ordinary map entry.
    pub fn encode(&self, seed: Seed) -> [u8; MAP_ENTRY_BYTES] {
        match self.blocks {
            1 => self.first.encode(seed),
            blocks => MapEntry { pbn: blocks, ..self.first }.encode_flagged(seed, FLAG_RUN),
        }
    }

    /// Encodes the run for a page with a checksum of its own: `word` takes the place of the map entry's checksum.
    #[inline]
    pub fn encode_with(&self, word: u32) -> [u8; MAP_ENTRY_BYTES] {
        let mut bytes = match self.blocks {
            1 => self.first.encode_unsealed(0),
            blocks => MapEntry { pbn: blocks, ..self.first }.encode_unsealed(FLAG_RUN),
        };
        put::<4>(&mut bytes, CHECKSUM, u64::from(word));
        bytes
    }

    /// Reads and checks a map entry of the log. Addresses are in range of their fields, but maybe not of the volume.
    ///
    /// # Errors
    /// As [`MapEntry::decode`]; [`MapEntryError::Unknown`] also for a run of fewer than two blocks, or of blocks that
    /// have data.
    pub fn decode(bytes: &[u8; MAP_ENTRY_BYTES], seed: Seed) -> Result<MapEntryRun, MapEntryError> {
        MapEntry::decode_flagged(bytes, seed, FLAG_RUN).and_then(MapEntryRun::of_flagged)
    }

    /// Reads what [`MapEntryRun::encode_with`] wrote. Also returns the word.
    ///
    /// # Errors
    /// [`MapEntryError::Unknown`] as [`MapEntryRun::decode`].
    pub fn decode_with(bytes: &[u8; MAP_ENTRY_BYTES]) -> Result<(MapEntryRun, u32), MapEntryError> {
        let run = MapEntry::decode_unsealed(bytes, FLAG_RUN).and_then(MapEntryRun::of_flagged)?;
        Ok((run, get::<4>(bytes, CHECKSUM) as u32))
    }

    fn of_flagged((entry, flags): (MapEntry, u8)) -> Result<MapEntryRun, MapEntryError> {
        if flags & FLAG_RUN == 0 {
            return Ok(MapEntryRun::from(entry));
        }
        let first = MapEntry { pbn: 0, ..entry };
        let bare = MapEntry { generation: first.generation, kind: first.kind, ..MapEntry::deallocated(first.lba) };
        if first.kind == MapEntryKind::Stored || entry.pbn < 2 || first != bare {
            return Err(MapEntryError::Unknown);
        }
        Ok(MapEntryRun { first, blocks: entry.pbn })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEED: Seed = Seed(0x1234_5678);

    fn entry() -> MapEntry {
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
    fn a_map_entry_comes_back() {
        assert_eq!(MapEntry::decode(&entry().encode(SEED), SEED), Ok(entry()));
        let gone = MapEntry { generation: 1, ..MapEntry::deallocated(Lba::new(3)) };
        assert_eq!(MapEntry::decode(&gone.encode(SEED), SEED), Ok(gone));
        let spoiled = MapEntry { generation: 1, ..MapEntry::uncorrectable(Lba::new(3)) };
        let bytes = spoiled.encode(SEED);
        assert_eq!((MapEntry::decode(&bytes, SEED), bytes[KIND]), (Ok(spoiled), 3));
        assert_eq!(MapEntry::decode_unchecked(&bytes).kind, MapEntryKind::Uncorrectable);
    }

    #[test]
    fn a_trace_has_the_salt_of_its_volume() {
        let bytes = entry().encode(SEED);
        assert_eq!(MapEntry::trace(&bytes, entry().lba), Some(SEED.0));
        assert_eq!(MapEntry::trace(&bytes, Lba::new(1)), None);
        assert_eq!(MapEntry::trace(&[0; MAP_ENTRY_BYTES], Lba::ZERO), None);
    }

    #[test]
    fn any_flipped_bit_is_found() {
        let good = entry().encode(SEED);
        for bit in 0..MAP_ENTRY_BYTES * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(MapEntry::decode(&bad, SEED), Err(MapEntryError::Checksum), "bit {bit}");
        }
    }

    #[test]
    fn a_map_entry_of_another_volume_is_refused() {
        assert_eq!(MapEntry::decode(&entry().encode(Seed(1)), SEED), Err(MapEntryError::Checksum));
    }

    #[test]
    fn zeroes_are_unwritten_and_unknown_kinds_are_refused() {
        assert_eq!(MapEntry::decode(&[0; 32], SEED), Err(MapEntryError::Unwritten));
        let mut bytes = entry().encode(SEED);
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
        let mut entry = MapEntry {
            lba: Lba::new(42),
            kind: MapEntryKind::Stored,
            pbn: 0x4_0003,
            generation: 8,
            tuple,
            guard_unverified: false,
        };
        entry.set_data_crc(sealblock_integrity::guard::crc32c(&data));
        let bytes = [
            0x11, 0xf9, 0, 0, 0, 0, 0, 0x2a, 0x0c, 0xae, 0x4f, 0x37, 0, 0, 0, 0, 0x2a, 0, 0, 0, 0, 3, 0, 4, 8, 0, 1, 0,
            0x29, 0x04, 0xd0, 0x3e,
        ];
        assert_eq!(entry.encode(seed), bytes);
        assert_eq!(MapEntry::decode(&bytes, seed), Ok(entry));
    }

    #[test]
    fn the_bytes_are_stable() {
        let bytes = entry().encode(SEED);
        assert_eq!(bytes[16..28], [0x9a, 0x78, 0x56, 0x34, 0x12, 0xef, 0xcd, 0xab, 7, 0, 1, 0]);
    }

    fn run(lba: u64, blocks: u32) -> MapEntryRun {
        MapEntryRun { first: MapEntry { generation: 5, ..MapEntry::deallocated(Lba::new(lba)) }, blocks }
    }

    #[test]
    fn a_run_comes_back_and_is_no_map_entry_of_a_block() {
        for run in [run(7, 2), run(0, MapEntryRun::MAX_BLOCKS), run((1 << 40) - 3, 3)] {
            for kind in [MapEntryKind::Deallocated, MapEntryKind::Uncorrectable] {
                let run = MapEntryRun { first: MapEntry { kind, ..run.first }, ..run };
                assert_eq!(MapEntryRun::decode(&run.encode(SEED), SEED), Ok(run));
                assert_eq!(MapEntry::decode(&run.encode(SEED), SEED), Err(MapEntryError::Unknown));
                assert_eq!(MapEntry::trace(&run.encode(SEED), run.first.lba), None);
            }
        }
        let single = run(7, 1);
        assert_eq!(single.encode(SEED), single.first.encode(SEED));
        assert_eq!(MapEntryRun::decode(&single.encode(SEED), SEED), Ok(single));
        let stored =
            MapEntryRun::from(MapEntry { kind: MapEntryKind::Stored, pbn: 9, guard_unverified: true, ..single.first });
        assert_eq!(MapEntryRun::decode(&stored.encode(SEED), SEED), Ok(stored));
        let mut bytes = run(7, 2).encode(SEED);
        bytes[22] ^= 1;
        assert_eq!(MapEntryRun::decode(&bytes, SEED), Err(MapEntryError::Checksum));
    }

    #[test]
    fn runs_that_cannot_be_are_refused() {
        let of = |entry: MapEntry| MapEntryRun::decode(&entry.encode_flagged(SEED, FLAG_RUN), SEED);
        let good = MapEntry { pbn: 2, ..run(7, 2).first };
        assert_eq!(of(good), Ok(run(7, 2)));
        for (what, bad) in [
            ("no blocks", MapEntry { pbn: 0, ..good }),
            ("one block", MapEntry { pbn: 1, ..good }),
            ("data", MapEntry { kind: MapEntryKind::Stored, ..good }),
            ("a guard", MapEntry { guard_unverified: true, ..good }),
            ("a tuple", MapEntry { tuple: [1; 16], ..good }),
        ] {
            assert_eq!(of(bad), Err(MapEntryError::Unknown), "{what}");
        }
    }

    #[test]
    fn neighbours_that_say_the_same_are_one() {
        let mut joined = run(7, 2);
        assert!(joined.join(&run(9, 3)) && joined == run(7, 5));
        let spoilt =
            MapEntryRun { first: MapEntry { kind: MapEntryKind::Uncorrectable, ..run(12, 1).first }, blocks: 1 };
        let other = MapEntryRun { first: MapEntry { generation: 6, ..run(12, 1).first }, blocks: 1 };
        assert!(!joined.join(&spoilt) && !joined.join(&other) && !joined.join(&run(13, 1)));
        assert!(!joined.join(&run(12, MapEntryRun::MAX_BLOCKS)), "more than one map entry can say");
        let mut stored = MapEntryRun::from(MapEntry { kind: MapEntryKind::Stored, ..run(7, 1).first });
        let next = MapEntryRun::from(MapEntry { lba: Lba::new(8), ..stored.first });
        assert!(!stored.join(&next), "blocks with data have map entries of their own");
        assert_eq!(joined.part(8, 10), run(8, 2));
        assert!(joined.entries().map(|entry| entry.lba.get()).eq(7..12));
    }

    #[test]
    fn the_worked_example_of_a_run_is_right() {
        let seed = Seed::of(b"an identity here");
        let run =
            MapEntryRun { first: MapEntry { generation: 8, ..MapEntry::deallocated(Lba::new(42)) }, blocks: 16384 };
        let bytes = run.encode(seed);
        assert_eq!(bytes[..16], [0; 16]);
        assert_eq!(bytes[16..], [0x2a, 0, 0, 0, 0, 0, 0x40, 0, 8, 0, 2, 2, 0x8e, 0x5f, 0xae, 0xcf]);
    }
}
