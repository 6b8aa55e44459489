//! Records by block.
//!
//! Records are kept in groups of neighbours: a long write then costs one look-up in a map for many blocks, and a commit
//! finds them almost in order. Runs of blocks without data, as recovery finds them in the log, are kept as runs, however
//! long they are.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;
use sealblock_units::Lba;
use smallvec::SmallVec;

use crate::format::{MapEntry, MapEntryKind, MapEntryRun};

/// Blocks of a group.
const BUCKET_BLOCKS: u64 = 16;

/// Which of some neighbouring blocks have records, and where these are kept: elsewhere, so that a group of one is small.
#[derive(Clone, Default)]
struct Bucket {
    /// Bits of the blocks that have a record.
    present: u16,
    /// Bits of those that are given up.
    deallocated: u16,
    at: [u32; BUCKET_BLOCKS as usize],
}

impl Bucket {
    /// Records that these take in the log at most: neighbours that are given up are one.
    fn log_entries(&self) -> usize {
        let first_given_up = self.deallocated & !(self.deallocated << 1);
        ((self.present & !self.deallocated).count_ones() + first_given_up.count_ones()) as usize
    }

    /// Where the records are, in order of their blocks.
    fn places(&self) -> impl Iterator<Item = usize> {
        (0..BUCKET_BLOCKS as usize).filter(|index| self.present >> index & 1 == 1).map(|index| self.at[index] as usize)
    }
}

/// Records by block.
#[derive(Clone, Default)]
pub(crate) struct MapEntries {
    buckets: FxHashMap<u64, Bucket>,
    entries: Vec<MapEntry>,
    /// Places in `records` that no group names any more.
    free: Vec<u32>,
    len: usize,
    log_entries: usize,
    /// What [`Records::insert_older`] has put in of runs, by first block. The record of a block in a group is newer.
    runs: BTreeMap<u64, MapEntryRun>,
    /// The blocks of `runs`, from the key up to the value; what touches is one.
    covered: BTreeMap<u64, u64>,
}

impl MapEntries {
    /// Number of records, runs not counted.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is nothing.
    pub fn is_empty(&self) -> bool {
        self.len == 0 && self.runs.is_empty()
    }

    /// Records that these take in the log at most, runs not counted.
    pub fn log_entries(&self) -> usize {
        self.log_entries
    }

    /// The record of a block.
    pub fn get(&self, lba: Lba) -> Option<MapEntry> {
        self.single(lba).copied().or_else(|| {
            let (_, run) = self.runs.range(..=lba.get()).next_back().filter(|(_, run)| lba.get() < run.end())?;
            Some(MapEntry { lba, ..run.first })
        })
    }

    /// The record of a block that was put in by itself, and not with a run.
    pub fn single(&self, lba: Lba) -> Option<&MapEntry> {
        let group = self.buckets.get(&(lba.get() / BUCKET_BLOCKS))?;
        let index = (lba.get() % BUCKET_BLOCKS) as usize;
        (group.present >> index & 1 == 1).then(|| &self.entries[group.at[index] as usize])
    }

    /// Puts in a record; gives back the one it replaces.
    pub fn insert(&mut self, record: MapEntry) -> Option<MapEntry> {
        let index = (record.lba.get() % BUCKET_BLOCKS) as usize;
        let group = self.buckets.entry(record.lba.get() / BUCKET_BLOCKS).or_default();
        let (bit, before) = (1 << index, group.log_entries());
        let replaced = if group.present & bit == 0 {
            group.at[index] = self.free.pop().unwrap_or_else(|| {
                self.entries.push(record);
                (self.entries.len() - 1) as u32
            });
            self.len += 1;
            None
        } else {
            Some(self.entries[group.at[index] as usize])
        };
        self.entries[group.at[index] as usize] = record;
        group.present |= bit;
        group.deallocated = group.deallocated & !bit | if record.kind == MapEntryKind::Deallocated { bit } else { 0 };
        self.log_entries = self.log_entries + group.log_entries() - before;
        replaced
    }

    /// Puts in records of which others that are here already are newer. Gives what was taken: in parts of a run there may be newer
    /// records of single blocks.
    pub fn insert_older(&mut self, run: MapEntryRun) -> SmallVec<[MapEntryRun; 1]> {
        if run.blocks == 1 {
            let is_new = self.get(run.first.lba).is_none();
            if is_new {
                self.insert(run.first);
            }
            return is_new.then_some(run).into_iter().collect();
        }
        let parts: SmallVec<[MapEntryRun; 1]> =
            self.cover(run.start(), run.end()).into_iter().map(|(from, to)| run.part(from, to)).collect();
        self.runs.extend(parts.iter().map(|part| (part.start(), *part)));
        parts
    }

    /// Notes that runs have these blocks; gives those that none had before.
    fn cover(&mut self, start: u64, end: u64) -> Vec<(u64, u64)> {
        let (mut first, mut last, mut at) = (start, end, start);
        let mut gaps = Vec::new();
        let before = self.covered.range(..start).next_back().filter(|(_, to)| **to >= start);
        let met: Vec<(u64, u64)> =
            before.into_iter().chain(self.covered.range(start..=end)).map(|(from, to)| (*from, *to)).collect();
        for (from, to) in met {
            if from > at {
                gaps.push((at, from));
            }
            (first, last, at) = (first.min(from), last.max(to), at.max(to));
            self.covered.remove(&from);
        }
        if at < end {
            gaps.push((at, end));
        }
        self.covered.insert(first, last);
        gaps
    }

    /// Every record, in order of the blocks, those of neighbours that say the same as one.
    pub fn in_order(&self) -> Vec<MapEntryRun> {
        let mut keys: Vec<u64> = self.buckets.keys().copied().collect();
        keys.sort_unstable();
        let singles = keys.into_iter().flat_map(|key| {
            let group = &self.buckets[&key];
            group.places().map(|at| self.entries[at])
        });
        let mut singles = singles.map(MapEntryRun::from).peekable();
        let mut ordered = Ordered(Vec::with_capacity(self.log_entries + self.runs.len()));
        for run in self.runs.values() {
            let mut at = run.start();
            while let Some(single) = singles.next_if(|single| single.start() < run.end()) {
                if single.start() > at {
                    ordered.push(run.part(at, single.start()));
                }
                at = at.max(single.end());
                ordered.push(single);
            }
            if at < run.end() {
                ordered.push(run.part(at, run.end()));
            }
        }
        singles.for_each(|single| ordered.push(single));
        ordered.0
    }

    /// Takes out groups until they may take `most` records in the log, or none are left.
    pub fn take(&mut self, most: usize) -> MapEntries {
        let mut taken = MapEntries::default();
        let keys: Vec<u64> = self.buckets.keys().copied().collect();
        for key in keys {
            if taken.log_entries + BUCKET_BLOCKS as usize > most {
                break;
            }
            if let Some(group) = self.buckets.remove(&key) {
                self.len -= group.present.count_ones() as usize;
                self.log_entries -= group.log_entries();
                for at in group.places() {
                    taken.insert(self.entries[at]);
                    self.free.push(at as u32);
                }
            }
        }
        taken
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.buckets.clear();
        self.entries.clear();
        self.free.clear();
        self.runs.clear();
        self.covered.clear();
        (self.len, self.log_entries) = (0, 0);
    }
}

/// Records in order of their blocks, neighbours that say the same joined.
struct Ordered(Vec<MapEntryRun>);

impl Ordered {
    fn push(&mut self, run: MapEntryRun) {
        if !self.0.last_mut().is_some_and(|last| last.join(&run)) {
            self.0.push(run);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given_up(lba: u64, blocks: u32, generation: u16) -> MapEntryRun {
        MapEntryRun { first: MapEntry { generation, ..MapEntry::deallocated(Lba::new(lba)) }, blocks }
    }

    fn stored(lba: u64, generation: u16) -> MapEntryRun {
        MapEntryRun::from(MapEntry { kind: MapEntryKind::Stored, ..given_up(lba, 1, generation).first })
    }

    #[test]
    fn neighbours_that_are_given_up_are_one_record_and_counted_so() {
        let mut records = MapEntries::default();
        (5..40).for_each(|lba| assert_eq!(records.insert(given_up(lba, 1, 0).first), None));
        records.insert(stored(40, 0).first);
        records.insert(stored(41, 0).first);
        assert_eq!(records.in_order(), [given_up(5, 35, 0), stored(40, 0), stored(41, 0)]);
        assert_eq!((records.len(), records.log_entries()), (37, 5), "a run is counted once for each group it is in");
        assert!(records.insert(stored(20, 0).first).is_some());
        assert_eq!((records.len(), records.log_entries()), (37, 7));
        let order = records.in_order();
        assert_eq!(order[..3], [given_up(5, 15, 0), stored(20, 0), given_up(21, 19, 0)]);
        records.insert(given_up(20, 1, 0).first);
        assert_eq!(records.log_entries(), 5);
        let taken = records.take(17);
        assert!(taken.log_entries() <= 17 && taken.len() + records.len() == 37);
        assert_eq!(taken.log_entries() + records.log_entries(), 5);
        assert_eq!(taken.in_order().iter().chain(&records.in_order()).map(|run| run.blocks).sum::<u32>(), 37);
        (0..taken.len() as u64).for_each(|lba| assert_eq!(records.insert(stored(100 + lba, 0).first), None));
        assert_eq!((records.len(), records.entries.len()), (37, 37), "the places of what was taken are used again");
    }

    #[test]
    fn what_is_put_in_as_older_yields_to_what_is_there_whatever_it_is() {
        // Newest first: each block's first record counts, as if every run were its blocks one by one.
        let order = [
            stored(10, 9),
            given_up(20, 10, 9),
            given_up(5, 10, 8),
            stored(25, 7),
            given_up(0, 40, 7),
            given_up(28, 4, 6),
            stored(50, 5),
            given_up(40, 10, 5),
            given_up(0, 100, 4),
            given_up(99, 4, 3),
        ];
        let (mut records, mut due) = (MapEntries::default(), BTreeMap::new());
        for run in order {
            records.insert_older(run);
            for record in run.entries() {
                due.entry(record.lba.get()).or_insert(record);
            }
        }
        for lba in 0..200 {
            assert_eq!(records.get(Lba::new(lba)).as_ref(), due.get(&lba), "block {lba}");
        }
        let listed = records.in_order();
        assert!(listed.iter().flat_map(|run| run.entries()).eq(due.into_values()));
        assert!(listed.len() <= 2 * order.len(), "{listed:?}");
        assert!(!records.is_empty());
        records.clear();
        assert!(records.is_empty() && records.in_order().is_empty() && records.get(Lba::new(5)).is_none());
    }

    #[test]
    fn many_runs_over_one_another_take_the_memory_of_what_they_cover() {
        let mut records = MapEntries::default();
        (0..1000).for_each(|at| drop(records.insert_older(given_up(at * 10, 5, 2))));
        (0..1000).for_each(|_| drop(records.insert_older(given_up(0, 10_000, 1))));
        assert_eq!((records.runs.len(), records.covered.len()), (2000, 1));
        assert_eq!(records.in_order().len(), 2000);
    }
}
