//! Map entries by block.
//!
//! Map entries are kept in buckets of neighbours: a long write then costs one look-up in a map for many blocks, and a commit
//! finds them almost in order. Runs of blocks without data, as recovery finds them in the log, are kept as runs, however
//! long they are.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;
use sealblock_units::Lba;
use smallvec::SmallVec;

use crate::format::{MapEntry, MapEntryKind, MapEntryRun};

/// Blocks of a bucket.
const BUCKET_BLOCKS: u64 = 16;

/// Which of some neighbouring blocks have map entries, and where these are kept: elsewhere, so that a bucket of one is small.
#[derive(Clone, Default)]
struct Bucket {
    /// Bits of the blocks that have a map entry.
    present: u16,
    /// Bits of those that are deallocated.
    deallocated: u16,
    at: [u32; BUCKET_BLOCKS as usize],
}

impl Bucket {
    /// Map entries that these take in the log at most: neighbours that are deallocated are one.
    fn log_entries(&self) -> usize {
        let first_given_up = self.deallocated & !(self.deallocated << 1);
        ((self.present & !self.deallocated).count_ones() + first_given_up.count_ones()) as usize
    }

    /// Where the map entries are, in order of their blocks.
    fn places(&self) -> impl Iterator<Item = usize> {
        (0..BUCKET_BLOCKS as usize).filter(|index| self.present >> index & 1 == 1).map(|index| self.at[index] as usize)
    }
}

/// Map entries by block.
#[derive(Clone, Default)]
pub(crate) struct MapEntries {
    buckets: FxHashMap<u64, Bucket>,
    entries: Vec<MapEntry>,
    /// Places in `entries` that no bucket names any more.
    free: Vec<u32>,
    len: usize,
    log_entries: usize,
    /// What [`MapEntries::insert_older`] has put in of runs, by first block. The map entry of a block in a bucket is newer.
    runs: BTreeMap<u64, MapEntryRun>,
    /// The blocks of `runs`, from the key up to the value; what touches is one.
    covered: BTreeMap<u64, u64>,
}

impl MapEntries {
    /// Number of map entries, runs not counted.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is nothing.
    pub fn is_empty(&self) -> bool {
        self.len == 0 && self.runs.is_empty()
    }

    /// Map entries that these take in the log at most, runs not counted.
    pub fn log_entries(&self) -> usize {
        self.log_entries
    }

    /// The map entry of a block.
    pub fn get(&self, lba: Lba) -> Option<MapEntry> {
        self.single(lba).copied().or_else(|| {
            let (_, run) = self.runs.range(..=lba.get()).next_back().filter(|(_, run)| lba.get() < run.end())?;
            Some(MapEntry { lba, ..run.first })
        })
    }

    /// The map entry of a block that was put in by itself, and not with a run.
    pub fn single(&self, lba: Lba) -> Option<&MapEntry> {
        let bucket = self.buckets.get(&(lba.get() / BUCKET_BLOCKS))?;
        let index = (lba.get() % BUCKET_BLOCKS) as usize;
        (bucket.present >> index & 1 == 1).then(|| &self.entries[bucket.at[index] as usize])
    }

    /// Puts in a map entry; gives back the one it replaces.
    pub fn insert(&mut self, entry: MapEntry) -> Option<MapEntry> {
        let index = (entry.lba.get() % BUCKET_BLOCKS) as usize;
        let bucket = self.buckets.entry(entry.lba.get() / BUCKET_BLOCKS).or_default();
        let (bit, before) = (1 << index, bucket.log_entries());
        let replaced = if bucket.present & bit == 0 {
            bucket.at[index] = self.free.pop().unwrap_or_else(|| {
                self.entries.push(entry);
                (self.entries.len() - 1) as u32
            });
            self.len += 1;
            None
        } else {
            Some(self.entries[bucket.at[index] as usize])
        };
        self.entries[bucket.at[index] as usize] = entry;
        bucket.present |= bit;
        bucket.deallocated = bucket.deallocated & !bit | if entry.kind == MapEntryKind::Deallocated { bit } else { 0 };
        self.log_entries = self.log_entries + bucket.log_entries() - before;
        replaced
    }

    /// Puts in map entries of which others that are here already are newer. Gives what was taken: in parts of a run there may be newer
    /// map entries of single blocks.
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

    /// Every map entry, in order of the blocks, those of neighbours that say the same as one.
    pub fn in_order(&self) -> Vec<MapEntryRun> {
        let mut keys: Vec<u64> = self.buckets.keys().copied().collect();
        keys.sort_unstable();
        let singles = keys.into_iter().flat_map(|key| {
            let bucket = &self.buckets[&key];
            bucket.places().map(|at| self.entries[at])
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

    /// Takes out buckets until they may take `max` map entries in the log, or none are left.
    pub fn take(&mut self, max: usize) -> MapEntries {
        let mut taken = MapEntries::default();
        let keys: Vec<u64> = self.buckets.keys().copied().collect();
        for key in keys {
            if taken.log_entries + BUCKET_BLOCKS as usize > max {
                break;
            }
            if let Some(bucket) = self.buckets.remove(&key) {
                self.len -= bucket.present.count_ones() as usize;
                self.log_entries -= bucket.log_entries();
                for at in bucket.places() {
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

/// Map entries in order of their blocks, neighbours that say the same joined.
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

    fn deallocated(lba: u64, blocks: u32, generation: u16) -> MapEntryRun {
        MapEntryRun { first: MapEntry { generation, ..MapEntry::deallocated(Lba::new(lba)) }, blocks }
    }

    fn stored(lba: u64, generation: u16) -> MapEntryRun {
        MapEntryRun::from(MapEntry { kind: MapEntryKind::Stored, ..deallocated(lba, 1, generation).first })
    }

    #[test]
    fn neighbours_that_are_given_up_are_one_map_entry_and_counted_so() {
        let mut entries = MapEntries::default();
        (5..40).for_each(|lba| assert_eq!(entries.insert(deallocated(lba, 1, 0).first), None));
        entries.insert(stored(40, 0).first);
        entries.insert(stored(41, 0).first);
        assert_eq!(entries.in_order(), [deallocated(5, 35, 0), stored(40, 0), stored(41, 0)]);
        assert_eq!((entries.len(), entries.log_entries()), (37, 5), "a run is counted once for each bucket it is in");
        assert!(entries.insert(stored(20, 0).first).is_some());
        assert_eq!((entries.len(), entries.log_entries()), (37, 7));
        let order = entries.in_order();
        assert_eq!(order[..3], [deallocated(5, 15, 0), stored(20, 0), deallocated(21, 19, 0)]);
        entries.insert(deallocated(20, 1, 0).first);
        assert_eq!(entries.log_entries(), 5);
        let taken = entries.take(17);
        assert!(taken.log_entries() <= 17 && taken.len() + entries.len() == 37);
        assert_eq!(taken.log_entries() + entries.log_entries(), 5);
        assert_eq!(taken.in_order().iter().chain(&entries.in_order()).map(|run| run.blocks).sum::<u32>(), 37);
        (0..taken.len() as u64).for_each(|lba| assert_eq!(entries.insert(stored(100 + lba, 0).first), None));
        assert_eq!((entries.len(), entries.entries.len()), (37, 37), "the places of what was taken are used again");
    }

    #[test]
    fn what_is_put_in_as_older_yields_to_what_is_there_whatever_it_is() {
        // Newest first: each block's first map entry counts, as if every run were its blocks one by one.
        let order = [
            stored(10, 9),
            deallocated(20, 10, 9),
            deallocated(5, 10, 8),
            stored(25, 7),
            deallocated(0, 40, 7),
            deallocated(28, 4, 6),
            stored(50, 5),
            deallocated(40, 10, 5),
            deallocated(0, 100, 4),
            deallocated(99, 4, 3),
        ];
        let (mut entries, mut due) = (MapEntries::default(), BTreeMap::new());
        for run in order {
            entries.insert_older(run);
            for entry in run.entries() {
                due.entry(entry.lba.get()).or_insert(entry);
            }
        }
        for lba in 0..200 {
            assert_eq!(entries.get(Lba::new(lba)).as_ref(), due.get(&lba), "block {lba}");
        }
        let listed = entries.in_order();
        assert!(listed.iter().flat_map(|run| run.entries()).eq(due.into_values()));
        assert!(listed.len() <= 2 * order.len(), "{listed:?}");
        assert!(!entries.is_empty());
        entries.clear();
        assert!(entries.is_empty() && entries.in_order().is_empty() && entries.get(Lba::new(5)).is_none());
    }

    #[test]
    fn many_runs_over_one_another_take_the_memory_of_what_they_cover() {
        let mut entries = MapEntries::default();
        (0..1000).for_each(|at| drop(entries.insert_older(deallocated(at * 10, 5, 2))));
        (0..1000).for_each(|_| drop(entries.insert_older(deallocated(0, 10_000, 1))));
        assert_eq!((entries.runs.len(), entries.covered.len()), (2000, 1));
        assert_eq!(entries.in_order().len(), 2000);
    }
}
