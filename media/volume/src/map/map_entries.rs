//! Map entries by block.
//!
//! Map entries are stored in buckets of neighbouring blocks: a long write then costs one look-up for many blocks, and a
//! commit finds them almost in order. Runs of blocks without data, as requests and the log have them, are stored as
//! runs of any length.
//!
//! Map entries are added either newest last ([`MapEntries::put`], [`MapEntries::put_run`]) or newest first
//! ([`MapEntries::insert_older`]), and never in both ways. With newest last, no block is both in a run and in a bucket.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;
use sealblock_units::Lba;
use smallvec::SmallVec;

use crate::format::{MapEntry, MapEntryKind, MapEntryRun};

/// Blocks of a bucket.
const BUCKET_BLOCKS: u64 = 16;
/// The number of blocks of a run that weigh as much as a single map entry: the work for a run once it is durable grows
/// with its blocks, but its memory does not.
const RUN_BLOCKS_PER_ENTRY: usize = 32;

/// Which blocks of a bucket have map entries, and the positions of these in a separate list, so that a bucket with one
/// is small.
#[derive(Clone, Default)]
struct Bucket {
    /// Bits of the blocks with a map entry.
    present: u16,
    /// Bits of those that are deallocated.
    deallocated: u16,
    at: [u32; BUCKET_BLOCKS as usize],
}

impl Bucket {
    /// The maximum number of entries that these need in the log: contiguous deallocated blocks are one.
    fn log_entries(&self) -> usize {
        let first_given_up = self.deallocated & !(self.deallocated << 1);
        ((self.present & !self.deallocated).count_ones() + first_given_up.count_ones()) as usize
    }

    /// Bits of the blocks from `start` up to `end`, in the bucket with this number.
    fn bits(key: u64, start: u64, end: u64) -> u16 {
        let first = key * BUCKET_BLOCKS;
        let (from, to) = (start.saturating_sub(first).min(BUCKET_BLOCKS), end.saturating_sub(first).min(BUCKET_BLOCKS));
        ((1_u32 << to) - (1 << from)) as u16
    }

    /// The positions of the map entries, in order of their blocks.
    fn places(&self) -> impl Iterator<Item = usize> {
        (0..BUCKET_BLOCKS as usize).filter(|index| self.present >> index & 1 == 1).map(|index| self.at[index] as usize)
    }
}

/// Map entries by block.
#[derive(Clone, Default)]
pub(crate) struct MapEntries {
    buckets: FxHashMap<u64, Bucket>,
    entries: Vec<MapEntry>,
    /// Unused positions in `entries`.
    free: Vec<u32>,
    /// The number of map entries in buckets, and the maximum number of log entries for them.
    singles: usize,
    log_entries: usize,
    /// Runs, by first block. The map entry of a block in a bucket is newer.
    runs: BTreeMap<u64, MapEntryRun>,
    run_blocks: usize,
    /// The blocks of `runs` that [`MapEntries::insert_older`] has added, from the key up to the value. Adjacent ranges
    /// are merged.
    covered: BTreeMap<u64, u64>,
}

impl MapEntries {
    /// The number of blocks with a map entry. A block that is in a bucket and in an older run counts twice.
    pub fn len(&self) -> usize {
        self.singles + self.run_blocks
    }

    /// The cost of the map entries in memory, and in work once they are durable, in map entries of single blocks.
    pub fn weight(&self) -> usize {
        self.singles + self.runs.len() + self.run_blocks / RUN_BLOCKS_PER_ENTRY
    }

    /// True if there are no map entries.
    pub fn is_empty(&self) -> bool {
        self.singles == 0 && self.runs.is_empty()
    }

    /// The maximum number of entries that these need in the log. A run counts once, even if newer map entries of single
    /// blocks split it.
    pub fn log_entries(&self) -> usize {
        self.log_entries + self.runs.len()
    }

    /// The map entry of a block.
    pub fn get(&self, lba: Lba) -> Option<MapEntry> {
        self.single(lba).copied().or_else(|| {
            let (_, run) = self.runs.range(..=lba.get()).next_back().filter(|(_, run)| lba.get() < run.end())?;
            Some(MapEntry { lba, ..run.first })
        })
    }

    /// The map entry of a block that was added as a single block, not with a run.
    pub fn single(&self, lba: Lba) -> Option<&MapEntry> {
        let bucket = self.buckets.get(&(lba.get() / BUCKET_BLOCKS))?;
        let index = (lba.get() % BUCKET_BLOCKS) as usize;
        (bucket.present >> index & 1 == 1).then(|| &self.entries[bucket.at[index] as usize])
    }

    /// True if any of these blocks has a map entry.
    pub fn meets(&self, start: u64, end: u64) -> bool {
        let has_single =
            |key| self.buckets.get(&key).is_some_and(|bucket| bucket.present & Bucket::bits(key, start, end) != 0);
        let in_run = || self.runs.range(..end).next_back().is_some_and(|(_, run)| run.end() > start);
        !self.buckets.is_empty() && (start / BUCKET_BLOCKS..=(end - 1) / BUCKET_BLOCKS).any(has_single) || in_run()
    }

    /// Adds the newest map entry of a block. Returns the single one that it replaces.
    pub fn put(&mut self, entry: MapEntry) -> Option<MapEntry> {
        self.cut(entry.lba.get(), entry.lba.get() + 1);
        self.insert(entry)
    }

    /// Adds the newest map entries of blocks without data. Returns the single ones that they replace, in order.
    pub fn put_run(&mut self, mut run: MapEntryRun) -> Vec<MapEntry> {
        let replaced = self.take_singles(run.start(), run.end());
        self.cut(run.start(), run.end());
        if let Some((&key, before)) = self.runs.range(..run.start()).next_back() {
            let mut joined = *before;
            if joined.join(&run) {
                self.forget_run(key);
                run = joined;
            }
        }
        if let Some(after) = self.runs.get(&run.end()).copied()
            && run.join(&after)
        {
            self.forget_run(after.start());
        }
        self.keep_run(run);
        replaced
    }

    /// Removes and returns the single map entries of a range of blocks.
    fn take_singles(&mut self, start: u64, end: u64) -> Vec<MapEntry> {
        let mut taken = Vec::new();
        if self.buckets.is_empty() {
            return taken;
        }
        for key in start / BUCKET_BLOCKS..=(end - 1) / BUCKET_BLOCKS {
            let Some(bucket) = self.buckets.get_mut(&key) else { continue };
            let (bits, before) = (Bucket::bits(key, start, end), bucket.log_entries());
            let gone = Bucket { present: bucket.present & bits, ..bucket.clone() };
            (bucket.present, bucket.deallocated) = (bucket.present & !bits, bucket.deallocated & !bits);
            self.singles -= gone.present.count_ones() as usize;
            self.log_entries = self.log_entries + bucket.log_entries() - before;
            if bucket.present == 0 {
                self.buckets.remove(&key);
            }
            for at in gone.places() {
                taken.push(self.entries[at]);
                self.free.push(at as u32);
            }
        }
        taken
    }

    /// Removes a range of blocks from runs.
    fn cut(&mut self, start: u64, end: u64) {
        while let Some(run) = self.runs.range(..end).next_back().map(|(_, run)| *run).filter(|run| run.end() > start) {
            self.forget_run(run.start());
            if run.end() > end {
                self.keep_run(run.part(end, run.end()));
            }
            if run.start() < start {
                self.keep_run(run.part(run.start(), start));
            }
        }
    }

    fn keep_run(&mut self, run: MapEntryRun) {
        self.run_blocks += run.blocks as usize;
        self.runs.insert(run.start(), run);
    }

    fn forget_run(&mut self, start: u64) {
        self.run_blocks -= self.runs.remove(&start).map_or(0, |run| run.blocks as usize);
    }

    /// Adds a single map entry. Returns the one that it replaces.
    fn insert(&mut self, entry: MapEntry) -> Option<MapEntry> {
        let index = (entry.lba.get() % BUCKET_BLOCKS) as usize;
        let bucket = self.buckets.entry(entry.lba.get() / BUCKET_BLOCKS).or_default();
        let (bit, before) = (1 << index, bucket.log_entries());
        let replaced = if bucket.present & bit == 0 {
            bucket.at[index] = self.free.pop().unwrap_or_else(|| {
                self.entries.push(entry);
                (self.entries.len() - 1) as u32
            });
            self.singles += 1;
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

    /// Adds map entries that are older than those already here. Returns the parts that were added; for a run, these may
    /// include blocks with newer single map entries.
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
        parts.iter().for_each(|part| self.keep_run(*part));
        parts
    }

    /// Records that runs have these blocks. Returns the ranges that none had before.
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

    /// All map entries in order of the blocks. Neighbours that differ only in their addresses are joined.
    pub fn in_order(&self) -> Vec<MapEntryRun> {
        let mut keys: Vec<u64> = self.buckets.keys().copied().collect();
        keys.sort_unstable();
        let singles = keys.into_iter().flat_map(|key| {
            let bucket = &self.buckets[&key];
            bucket.places().map(|at| self.entries[at])
        });
        let mut singles = singles.map(MapEntryRun::from).peekable();
        let mut ordered = Ordered(Vec::with_capacity(self.log_entries()));
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

    /// Removes runs and buckets until these may need `max` entries in the log, or none are left. Returns them.
    pub fn take(&mut self, max: usize) -> MapEntries {
        let mut taken = MapEntries::default();
        while taken.runs.len() < max
            && let Some((_, run)) = self.runs.first_key_value().map(|(key, run)| (*key, *run))
        {
            self.forget_run(run.start());
            taken.keep_run(run);
        }
        let keys: Vec<u64> = self.buckets.keys().copied().collect();
        for key in keys {
            if taken.log_entries() + BUCKET_BLOCKS as usize > max {
                break;
            }
            if let Some(bucket) = self.buckets.remove(&key) {
                self.singles -= bucket.present.count_ones() as usize;
                self.log_entries -= bucket.log_entries();
                for at in bucket.places() {
                    taken.insert(self.entries[at]);
                    self.free.push(at as u32);
                }
            }
        }
        taken
    }

    /// Drops everything.
    pub fn clear(&mut self) {
        self.buckets.clear();
        self.entries.clear();
        self.free.clear();
        self.runs.clear();
        self.covered.clear();
        (self.singles, self.log_entries, self.run_blocks) = (0, 0, 0);
    }
}

/// Map entries in order of their blocks, with equal neighbours joined.
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
        // Newest first: each block's first map entry counts, as if every run were added block by block.
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

    /// Each block's map entry, and a generator of what is added.
    struct Model {
        due: BTreeMap<u64, MapEntry>,
        state: u64,
    }

    impl Model {
        fn random(&mut self, below: u64) -> u64 {
            self.state = self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.state >> 33) % below
        }

        /// Adds a run, or a block with data, and checks what it replaces.
        fn put(&mut self, entries: &mut MapEntries, generation: u16) {
            let start = self.random(400);
            if self.random(2) == 0 {
                let entry = stored(start, generation).first;
                let old = self.due.insert(start, entry).filter(|old| old.kind == MapEntryKind::Stored);
                assert_eq!(entries.put(entry).filter(|old| old.kind == MapEntryKind::Stored), old);
                return;
            }
            let run = deallocated(start, 1 + self.random(20) as u32, generation % 3);
            let old: Vec<MapEntry> =
                run.entries().filter_map(|entry| self.due.insert(entry.lba.get(), entry)).collect();
            let replaced = entries.put_run(run).into_iter().filter(|old| old.kind == MapEntryKind::Stored);
            assert!(replaced.eq(old.into_iter().filter(|old| old.kind == MapEntryKind::Stored)));
        }

        fn check(&self, entries: &MapEntries) {
            for lba in 0..510 {
                assert_eq!(entries.get(Lba::new(lba)).as_ref(), self.due.get(&lba), "block {lba}");
                assert_eq!(entries.meets(lba, lba + 1), self.due.contains_key(&lba), "block {lba}");
            }
            let listed = entries.in_order();
            assert!(listed.iter().flat_map(|run| run.entries()).eq(self.due.values().copied()));
            assert!(listed.len() <= entries.log_entries() && entries.weight() <= entries.len() + entries.runs.len());
            assert_eq!(entries.len(), self.due.len(), "no block is counted twice");
        }
    }

    #[test]
    fn what_is_put_in_last_counts_whether_it_is_a_run_or_a_block() {
        let (mut entries, mut model) = (MapEntries::default(), Model { due: BTreeMap::new(), state: 7 });
        for generation in 0..300 {
            model.put(&mut entries, generation);
            model.check(&entries);
        }
        assert!(!entries.meets(510, 2000) && entries.runs.len() > 3 && entries.singles > 3, "the premise");
        // If everything is taken in parts, each block is in one of them, unchanged.
        while !entries.is_empty() {
            let taken = entries.take(20);
            assert!(!taken.is_empty() && taken.in_order().len() <= 20);
            for entry in taken.in_order().iter().flat_map(|run| run.entries()) {
                assert_eq!(model.due.remove(&entry.lba.get()), Some(entry));
            }
            model.check(&entries);
        }
        assert_eq!((entries.len(), entries.weight(), entries.log_entries()), (0, 0, 0));
    }

    #[test]
    fn runs_that_touch_are_one_where_they_say_the_same() {
        let mut entries = MapEntries::default();
        for start in [100, 300, 200, 0] {
            entries.put_run(deallocated(start, 100, 0));
        }
        assert_eq!((entries.runs.len(), entries.len(), entries.weight()), (1, 400, 1 + 400 / RUN_BLOCKS_PER_ENTRY));
        entries.put_run(MapEntryRun { first: MapEntry::uncorrectable(Lba::new(400)), blocks: 10 });
        assert_eq!(entries.runs.len(), 2, "these cannot be read");
        assert_eq!(entries.put(stored(50, 0).first), None, "a run has no physical blocks to be given back");
        assert_eq!((entries.runs.len(), entries.len(), entries.log_entries()), (3, 410, 4));
        assert_eq!(entries.put_run(deallocated(50, 1, 0)), [stored(50, 0).first]);
        assert_eq!((entries.runs.len(), entries.log_entries()), (2, 2));
    }
}
