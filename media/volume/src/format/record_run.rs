//! What one record of the log is about: a block, or a run of blocks that have no data.
//!
//! Blocks that are given up, or made unreadable, together need nothing said of each of them. A run is one record with a
//! flag and a number of blocks in place of a slot. It occurs in the log only: who reads records of the tables, or of single
//! blocks anywhere, finds the flag unknown and does not take the record for that of its first block alone.

use sealblock_units::{Extent, Lba};

use super::Seed;
use super::record::{FLAG_RUN, MAP_ENTRY_BYTES, MapEntry, MapEntryError, MapEntryKind};

/// The record of a block, or of several in a row that have no data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MapEntryRun {
    /// The record of the first block. Those of the others are the same but for their addresses.
    pub first: MapEntry,
    /// Number of blocks: 1 where there are data, else 1 to [`RecordRun::MOST_BLOCKS`].
    pub blocks: u32,
}

impl From<MapEntry> for MapEntryRun {
    fn from(first: MapEntry) -> MapEntryRun {
        MapEntryRun { first, blocks: 1 }
    }
}

impl MapEntryRun {
    /// Blocks of a run at most: what the field holds.
    pub const MAX_BLOCKS: u32 = (1 << 24) - 1;

    /// The address of the first block.
    pub fn start(&self) -> u64 {
        self.first.lba.get()
    }

    /// The address behind the last block.
    pub fn end(&self) -> u64 {
        self.start() + u64::from(self.blocks)
    }

    /// The blocks.
    pub fn extent(&self) -> Extent {
        Extent::from_raw(self.start(), u64::from(self.blocks)).expect("a run has blocks, with addresses of 40 bits")
    }

    /// The part from one address up to another, both within the run.
    ///
    /// # Panics
    /// In tests, when the part is empty or not within the run.
    pub fn part(&self, from: u64, to: u64) -> MapEntryRun {
        debug_assert!(self.start() <= from && from < to && to <= self.end(), "a part of the run");
        MapEntryRun { first: MapEntry { lba: Lba::new(from), ..self.first }, blocks: (to - from) as u32 }
    }

    /// The record of each block.
    pub fn entries(self) -> impl Iterator<Item = MapEntry> {
        (self.start()..self.end()).map(move |lba| MapEntry { lba: Lba::new(lba), ..self.first })
    }

    /// Takes in what follows, if that is about the next blocks and says the same of them.
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

    /// The bytes in the log: those of a record where it is one block.
    pub fn encode(&self, seed: Seed) -> [u8; MAP_ENTRY_BYTES] {
        match self.blocks {
            1 => self.first.encode(seed),
            blocks => MapEntry { pbn: blocks, ..self.first }.encode_flagged(seed, FLAG_RUN),
        }
    }

    /// Reads a record of the log, checking it. Addresses are in range of their fields, not yet of the volume.
    ///
    /// # Errors
    /// As [`Record::decode`]; [`RecordError::Unknown`] also for a run of fewer than two blocks, or of blocks that have data.
    pub fn decode(bytes: &[u8; MAP_ENTRY_BYTES], seed: Seed) -> Result<MapEntryRun, MapEntryError> {
        let (record, flags) = MapEntry::decode_flagged(bytes, seed, FLAG_RUN)?;
        if flags & FLAG_RUN == 0 {
            return Ok(MapEntryRun::from(record));
        }
        let first = MapEntry { pbn: 0, ..record };
        let bare = MapEntry { generation: first.generation, kind: first.kind, ..MapEntry::deallocated(first.lba) };
        if first.kind == MapEntryKind::Stored || record.pbn < 2 || first != bare {
            return Err(MapEntryError::Unknown);
        }
        Ok(MapEntryRun { first, blocks: record.pbn })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEED: Seed = Seed(77);

    fn run(lba: u64, blocks: u32) -> MapEntryRun {
        MapEntryRun { first: MapEntry { generation: 5, ..MapEntry::deallocated(Lba::new(lba)) }, blocks }
    }

    #[test]
    fn a_run_comes_back_and_is_no_record_of_a_block() {
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
        let of = |record: MapEntry| MapEntryRun::decode(&record.encode_flagged(SEED, FLAG_RUN), SEED);
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
        assert!(!joined.join(&run(12, MapEntryRun::MAX_BLOCKS)), "more than one record can say");
        let mut stored = MapEntryRun::from(MapEntry { kind: MapEntryKind::Stored, ..run(7, 1).first });
        let next = MapEntryRun::from(MapEntry { lba: Lba::new(8), ..stored.first });
        assert!(!stored.join(&next), "blocks with data have records of their own");
        assert_eq!(joined.part(8, 10), run(8, 2));
        assert!(joined.entries().map(|record| record.lba.get()).eq(7..12));
    }

    #[test]
    fn the_worked_example_of_the_documentation_is_right() {
        let seed = Seed::of(b"an identity here");
        let run =
            MapEntryRun { first: MapEntry { generation: 8, ..MapEntry::deallocated(Lba::new(42)) }, blocks: 16384 };
        let bytes = run.encode(seed);
        assert_eq!(bytes[..16], [0; 16]);
        assert_eq!(bytes[16..], [0x2a, 0, 0, 0, 0, 0, 0x40, 0, 8, 0, 2, 2, 0x8e, 0x5f, 0xae, 0xcf]);
    }
}
