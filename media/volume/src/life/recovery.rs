//! Recovery: which map entries of the log count after a crash.
//!
//! A sector exists if either of its places has it; if they differ, the one with the entries of the last commits is
//! used. Entries with only one place also exist if the next sector repeats them. So no single fault loses map entries
//! before the newest durable_seq, and they count. After that, any subset of sectors may exist, and data of their last
//! commits may be missing: such a map entry counts only if the data in its physical block match its checksum. Of a
//! block's map entries that count, the newest wins; if none counts, the block map's entry is used. Recovery never
//! invents a map entry, so damaged data never get a new tuple.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use futures_util::future::join;
use sealblock_block::Medium;
use sealblock_units::Lba;

use crate::format::{
    HighWaterMark, LOG_REGIONS, Layout, LogPosition, LogSector, MAP_ENTRY_BYTES, MapEntry, MapEntryKind, MapEntryRun,
    Seed, Superblock,
};
use crate::map::map_entries::MapEntries;
use crate::medium::read_sectors;
use crate::options::{Mutation, OpenOptions, VolumeError};
use crate::requests::lookup::{data_match, has_data_crc};

/// Bytes of a log region that are read at once.
const CHUNK_BYTES: u64 = 1 << 20;
/// The maximum number of salts of other volumes that are counted.
const MAX_SALTS: usize = 4096;

/// What recovery found.
#[derive(Default)]
pub(crate) struct Recovered {
    /// The map entries that count, by block.
    pub entries: MapEntries,
    /// Map entries that do not count because their data are not on the medium.
    pub discarded: u64,
    /// The blocks of map entries that count although their physical blocks cannot be read.
    pub unreadable: Vec<Lba>,
    /// Sectors before the durable_seq of which every copy is lost.
    pub lost: u64,
    /// The number of the first of them.
    pub first_lost: Option<u64>,
    /// The superblocks, the log, or both were restored from an earlier state.
    pub is_rolled_back: bool,
    /// The log has sectors from its tail on, with or without map entries.
    pub is_used: bool,
    /// It has map entries there, although the superblock says that it is empty.
    pub contradicts_close: bool,
    /// The sequence number after the last sector that was found.
    pub end: u64,
    /// A sequence number that no sector had before.
    pub next: u64,
    /// Sectors of other volumes in the log, by their salts.
    pub foreign: BTreeMap<Seed, ForeignSectors>,
    /// The own map entries of the last sector that is known to be durable as a whole, and of all later sectors.
    pub tail: Vec<(LogPosition, MapEntryRun)>,
    /// All own map entries before this position are known to be durable.
    pub durable_end: LogPosition,
}

/// The sectors of another volume in the log.
#[derive(Default)]
pub(crate) struct ForeignSectors {
    /// The number of sectors and of map entries in them.
    pub records: u64,
    /// The offsets of the sectors.
    pub offsets: Vec<u64>,
}

/// What was found of a log sector.
#[derive(Default)]
struct FoundSector {
    /// Its own map entries.
    own: Vec<MapEntryRun>,
    /// The number of them, from the first one, that were durable when the sector was written.
    earlier: usize,
    /// Repeated map entries of the previous sector, which were durable when this one was written.
    repeats: Vec<MapEntryRun>,
    /// They are all that the previous sector has.
    repeats_all: bool,
}

/// The log as it was read, by sequence number.
struct LogScan<'a> {
    superblock: &'a Superblock,
    sectors: BTreeMap<u64, FoundSector>,
    durable: u64,
    /// The sequence number after the last sector found.
    next: u64,
    /// The highest sequence number found, even if it is before the tail.
    newest: Option<u64>,
    /// The number of unreadable places.
    unreadable: u64,
    /// Sectors for which both places are unreadable.
    unseen: Vec<u64>,
    /// Sectors of other volumes, by their salts.
    foreign: BTreeMap<Seed, ForeignSectors>,
    /// The number of own map entries of the sector before the tail, 0 if it is gone.
    before_tail: usize,
    /// An injected fault: of two copies the one with fewer entries is used.
    takes_less: bool,
}

/// Reads the log of a volume and decides which map entries count. `has_groups` is true if any block group has map
/// pages.
pub(crate) async fn replay<M: Medium>(
    medium: &M,
    superblock: &Superblock,
    has_groups: bool,
    options: &OpenOptions,
) -> Result<Recovered, VolumeError> {
    let mut scan = read_log(medium, superblock, options).await?;
    let (lost, first_lost) = scan.lost(has_groups);
    let is_used = scan.newest.is_some_and(|newest| newest >= superblock.log_tail);
    let contradicts_close = superblock.is_clean && scan.has_entries();
    let foreign = std::mem::take(&mut scan.foreign);
    let (end, next, tail, durable_end) = (scan.next, scan.next(), scan.tail(), scan.durable_end());
    let found = Recovered { end, next, is_used, contradicts_close, lost, first_lost, ..Recovered::default() };
    let mut recovered = Recovered { foreign, tail, durable_end, ..found };
    if options.mutation.is(Mutation::RunsFirst) {
        let found_sectors = scan.sectors.values().rev().flat_map(|found| &found.own);
        found_sectors.filter(|run| run.blocks > 1).for_each(|run| drop(recovered.entries.insert_older(*run)));
    }
    // Newest first: of the map entries of a block that count, the first one is used.
    for (&sequence, found) in scan.sectors.iter().rev() {
        if options.mutation.is(Mutation::RepeatAsNew) {
            recovered.take_all(&found.repeats);
        }
        let is_durable = sequence < scan.durable || options.mutation.is(Mutation::TrustLog);
        let (durable, last) = found.own.split_at(if is_durable { found.own.len() } else { found.earlier });
        recovered.take_all(durable);
        for run in last {
            recovered.take_if_data_present(medium, superblock, run).await?;
        }
        recovered.take_all(&found.repeats);
    }
    if scan.unreadable > 0 {
        let (sectors, lost) = (scan.unreadable, recovered.lost);
        tracing::warn!(sectors, lost, "cannot read sectors of the log");
    }
    Ok(recovered)
}

impl Recovered {
    /// Records that an earlier state was restored. The log continues after every sector that a page of the block map
    /// may name: the log is never longer than one region, and after a crash it continues one region further.
    pub fn roll_back(&mut self, layout: &Layout, mark: &HighWaterMark) {
        self.is_rolled_back = true;
        self.next = self.next.max(mark.log_end + 2 * layout.log_sectors());
    }

    /// Uses nothing of a log that contradicts the superblocks and the mark, which agree that the volume was closed: the
    /// block map has all that the volume had then. Its map entries would replace blocks of that close, most by blocks
    /// whose data are not there.
    pub fn ignore_log(&mut self) {
        self.entries = MapEntries::default();
        self.unreadable.clear();
        (self.discarded, self.lost, self.first_lost) = (0, 0, None);
    }

    /// True if blocks may be older than their last writes.
    pub fn is_older(&self) -> bool {
        self.lost > 0 || self.is_rolled_back
    }

    /// Takes map entries whose data were durable.
    fn take_all(&mut self, entries: &[MapEntryRun]) {
        entries.iter().for_each(|run| drop(self.entries.insert_older(*run)));
    }

    /// Takes a map entry if its data are on the medium.
    async fn take_if_data_present<M: Medium>(
        &mut self,
        medium: &M,
        superblock: &Superblock,
        run: &MapEntryRun,
    ) -> Result<(), VolumeError> {
        let entry = &run.first;
        if run.blocks == 1 && self.entries.get(entry.lba).is_some() {
            return Ok(());
        }
        match has_data(medium, superblock, entry).await? {
            DataPresence::No => {
                self.discarded += 1;
                return Ok(());
            }
            DataPresence::Unreadable => {
                self.unreadable.push(entry.lba);
                tracing::warn!(lba = %entry.lba, "cannot read the data of the block's last write; the block is unreadable");
            }
            DataPresence::Yes => {}
        }
        self.entries.insert_older(*run);
        Ok(())
    }
}

impl LogScan<'_> {
    /// True if any sector from the tail on has map entries; the anchor has none.
    fn has_entries(&self) -> bool {
        self.sectors.values().any(|found| !found.own.is_empty() || !found.repeats.is_empty())
    }

    /// True if all map entries of a sector were found, in it or repeated by the next one.
    fn is_known(&self, sequence: u64) -> bool {
        let is_repeated = || self.sectors.get(&(sequence + 1)).is_some_and(|found| found.repeats_all);
        self.sectors.contains_key(&sequence) || is_repeated()
    }

    /// The number of sectors of which no copy exists, and the first of them: sectors that were durable, and unreadable
    /// ones that may have been durable. A log that the superblock calls empty has none of the latter.
    ///
    /// It counts the sectors that were found and not the missing ones, because an old or forged superblock could make
    /// the missing ones too many to count.
    fn lost(&self, has_groups: bool) -> (u64, Option<u64>) {
        if self.is_gone(has_groups) {
            return (self.superblock.layout.log_sectors(), Some(self.superblock.log_tail));
        }
        let durable = self.superblock.log_tail..self.durable;
        let found = self.sectors.iter().flat_map(|(&sequence, found)| {
            let before = sequence.checked_sub(1).filter(|_| found.repeats_all);
            before.into_iter().chain([sequence])
        });
        let mut known: Vec<u64> = found.filter(|sequence| durable.contains(sequence)).collect();
        known.dedup();
        let in_a_row = known.iter().zip(durable.clone()).take_while(|(known, sequence)| **known == *sequence).count();
        let first = Some(durable.start + in_a_row as u64).filter(|first| durable.contains(first));
        let unseen = || {
            let may_be = |sequence: &u64| !self.superblock.is_clean && !durable.contains(sequence);
            self.unseen.iter().copied().filter(may_be).filter(|sequence| !self.is_known(*sequence))
        };
        let count = durable.end - durable.start - known.len() as u64 + unseen().count() as u64;
        (count, first.into_iter().chain(unseen()).min())
    }

    /// True if a log that the superblock calls in use does not exist, or is from an earlier time.
    ///
    /// An anchored log always has the sector before the tail or a later one; without a checkpoint since then, it has
    /// the tail itself. An earlier log, which the volume had when it was closed, ends with the sector before the tail.
    /// An older program has no anchors: its log was used if its tail is not at the start or if block groups have map
    /// pages, and then at least one sector must exist.
    fn is_gone(&self, has_groups: bool) -> bool {
        let tail = self.superblock.log_tail;
        match (self.superblock.is_clean, self.superblock.is_anchored, self.newest) {
            (true, ..) => false,
            (false, true, newest) => newest.is_none_or(|newest| newest + u64::from(!self.superblock.is_begun) < tail),
            (false, false, newest) => newest.is_none() && (tail > 0 || has_groups),
        }
    }

    /// The own map entries of the last sector that is known to be durable as a whole, and of all later sectors, as far
    /// as they were found.
    fn tail(&self) -> Vec<(LogPosition, MapEntryRun)> {
        let sectors = self.sectors.range(self.durable.saturating_sub(1)..);
        let own = sectors
            .flat_map(|(&sequence, found)| found.own.iter().zip(0..).map(move |(run, at)| ((sequence, at), *run)));
        own.collect()
    }

    /// The position after the last own map entry that is known to be durable.
    fn durable_end(&self) -> LogPosition {
        let whole = self.durable.checked_sub(1).map(|last| {
            let own = self.sectors.get(&last).map_or(self.before_tail, |found| found.own.len());
            (last, own as u16)
        });
        let joined = self.sectors.range(self.durable..).map(|(&sequence, found)| (sequence, found.earlier as u16));
        joined.filter(|(_, earlier)| *earlier > 0).chain(whole).max().unwrap_or_default()
    }

    /// Records that a position is unreadable in both regions.
    fn note_unreadable(&mut self, position: u64) {
        let (tail, sectors) = (self.superblock.log_tail, self.superblock.layout.log_sectors());
        let ahead = (position + sectors - tail % sectors) % sectors;
        self.unseen.push(tail + ahead);
    }

    /// Where the log continues: at its tail if it is empty, otherwise after everything that it may have, readable or
    /// not. A place that is unreadable today must not hold another sector of the same number tomorrow.
    fn next(&self) -> u64 {
        match self.unreadable == 0 && self.next == self.superblock.log_tail {
            true => self.next,
            false => self.next + self.superblock.layout.log_sectors(),
        }
    }

    /// Adds a sector of the log, if it is valid and in its place.
    fn take(&mut self, position: u64, region: u64, bytes: &[u8]) {
        let Ok(sector) = LogSector::decode(bytes, self.superblock.seed()) else {
            return self.note_foreign(position, region, bytes);
        };
        let sequence = sector.header.sequence;
        if sequence % self.superblock.layout.log_sectors() != position {
            return;
        }
        self.next = self.next.max(sequence + 1);
        self.newest = self.newest.max(Some(sequence));
        if sequence < self.superblock.log_tail {
            if sequence + 1 == self.superblock.log_tail {
                self.before_tail = self.before_tail.max(sector.entries().len());
            }
            return;
        }
        // The sector's checksum matches, so an invalid map entry, or two of one block, was written by another program
        // or forged. Such a sector does not count.
        let (Some(own), Some(repeats)) = (self.entries(sector.entries()), self.entries(sector.repeats())) else {
            return;
        };
        self.durable = self.durable.max(sector.header.durable_seq);
        let repeats_all = !repeats.is_empty() && sector.header.left_out == 0;
        let found = FoundSector { own, earlier: usize::from(sector.header.earlier), repeats, repeats_all };
        // One of two copies may lack what the last commits added. Otherwise they are equal, unless one was forged.
        match self.sectors.entry(sequence) {
            Entry::Vacant(place) => drop(place.insert(found)),
            Entry::Occupied(mut place) => {
                let has_more = found.own.len() > place.get().own.len();
                if has_more != self.takes_less {
                    place.insert(found);
                }
            }
        }
    }

    /// Counts a sector of another volume that is in its place, and its map entries that are valid under the same salt.
    fn note_foreign(&mut self, position: u64, region: u64, bytes: &[u8]) {
        let Some((sequence, salt)) = LogSector::trace_salt(bytes) else { return };
        if sequence % self.superblock.layout.log_sectors() == position && self.foreign.len() < MAX_SALTS {
            let entries = LogSector::decode(bytes, salt).map_or(0, |sector| {
                sector.entries().iter().filter(|raw| MapEntryRun::decode(raw, salt).is_ok()).count()
            });
            let foreign = self.foreign.entry(salt).or_default();
            foreign.records += 1 + entries as u64;
            foreign.offsets.push(self.superblock.layout.log_sector_offset(position, region));
        }
    }

    /// The own or the repeated map entries of a sector; `None` unless all are possible and no two are for the same
    /// block.
    fn entries(&self, raw: &[[u8; MAP_ENTRY_BYTES]]) -> Option<Vec<MapEntryRun>> {
        let decode =
            |raw| MapEntryRun::decode(raw, self.superblock.seed()).ok().filter(|run| fits(self.superblock, run));
        let entries: Vec<MapEntryRun> = raw.iter().map(decode).collect::<Option<_>>()?;
        let mut blocks: Vec<(u64, u64)> = entries.iter().map(|run| (run.start(), run.end())).collect();
        blocks.sort_unstable();
        blocks.windows(2).all(|pair| pair[0].1 <= pair[1].0).then_some(entries)
    }
}

async fn read_log<'a, M: Medium>(
    medium: &M,
    superblock: &'a Superblock,
    options: &OpenOptions,
) -> Result<LogScan<'a>, VolumeError> {
    let (layout, tail) = (&superblock.layout, superblock.log_tail);
    let takes_less = options.mutation.is(Mutation::ShorterCopy);
    let (sectors, unseen) = (BTreeMap::new(), Vec::new());
    let (foreign, before_tail) = (BTreeMap::new(), 0);
    let mut scan = LogScan {
        superblock,
        sectors,
        durable: tail,
        next: tail,
        newest: None,
        unreadable: 0,
        unseen,
        foreign,
        before_tail,
        takes_less,
    };
    let sector_bytes = layout.sector_bytes() as usize;
    let chunk = CHUNK_BYTES / sector_bytes as u64;
    for first in (0..layout.log_sectors()).step_by(chunk as usize) {
        let length = chunk.min(layout.log_sectors() - first) as usize * sector_bytes;
        let [a, b] =
            [0, 1].map(|region| read_sectors(medium, layout.log_sector_offset(first, region), length, sector_bytes));
        let (a, b) = join(a, b).await;
        let regions = if options.mutation.is(Mutation::OneRegion) { 1 } else { LOG_REGIONS as usize };
        let parts = [a?, b?];
        let [(_, missing), (_, also)] = &parts;
        missing
            .iter()
            .filter(|at| also.binary_search(at).is_ok())
            .for_each(|at| scan.note_unreadable(first + *at as u64));
        for (region, (bytes, unreadable)) in (0..).zip(parts.into_iter().take(regions)) {
            scan.unreadable += unreadable.len() as u64;
            let sectors = bytes.chunks_exact(sector_bytes);
            (first..).zip(sectors).for_each(|(position, sector)| scan.take(position, region, sector));
        }
    }
    Ok(scan)
}

/// True if a map entry is possible in this volume.
pub(crate) fn fits(superblock: &Superblock, run: &MapEntryRun) -> bool {
    run.end() <= superblock.layout.capacity_blocks() && superblock.layout.holds(&run.first)
}

/// Whether the data of a map entry are on the medium.
#[derive(PartialEq, Eq)]
pub(crate) enum DataPresence {
    Yes,
    No,
    /// The physical block cannot be read, which proves nothing. Using the older map entry could lose a flushed write
    /// for good. So the map entry counts, and the block is unreadable until it is written.
    Unreadable,
}

/// Reads and checks the physical block of a map entry that [`fits`].
pub(crate) async fn has_data<M: Medium>(
    medium: &M,
    superblock: &Superblock,
    entry: &MapEntry,
) -> Result<DataPresence, VolumeError> {
    if entry.kind != MapEntryKind::Stored || entry.guard_unverified && !has_data_crc(superblock.protection) {
        return Ok(DataPresence::Yes);
    }
    let offset = superblock.layout.data_offset(entry).expect("the map entry was found to fit the volume");
    let length = superblock.layout.block_size().bytes();
    let (data, missing) = read_sectors(medium, offset, length, length).await?;
    Ok(match missing.is_empty() {
        true if data_match(entry, superblock.protection, &data) => DataPresence::Yes,
        true => DataPresence::No,
        false => DataPresence::Unreadable,
    })
}

#[cfg(test)]
mod tests {
    use sealblock_units::BlockSize;

    use super::*;

    fn superblock(log_tail: u64, clean: bool) -> Superblock {
        let layout = Layout::new(BlockSize::B4096, 512, 1000).unwrap();
        Superblock { is_clean: clean, log_tail, ..Superblock::new([7; 16], layout, None) }
    }

    /// What is lost if these sectors were found; those in the second list repeat all of the previous one.
    fn lost(
        superblock: &Superblock,
        durable: u64,
        found: &[u64],
        repeating: &[u64],
        unseen: &[u64],
    ) -> (u64, Option<u64>) {
        let sector = |repeats_all| FoundSector { repeats_all, ..FoundSector::default() };
        let sectors = found.iter().map(|sequence| (*sequence, sector(false)));
        let sectors = sectors.chain(repeating.iter().map(|sequence| (*sequence, sector(true)))).collect();
        let (newest, unseen) = (Some(superblock.log_tail), unseen.to_vec());
        let (foreign, before_tail, takes_less) = (BTreeMap::new(), 0, false);
        let scan = LogScan {
            superblock,
            sectors,
            durable,
            next: 0,
            newest,
            unreadable: 0,
            unseen,
            foreign,
            before_tail,
            takes_less,
        };
        scan.lost(true)
    }

    #[test]
    fn lost_sectors_are_those_that_were_durable_and_are_nowhere() {
        let (dirty, clean) = (superblock(10, false), superblock(10, true));
        assert_eq!(lost(&dirty, 10, &[], &[], &[]), (0, None));
        assert_eq!(lost(&dirty, 14, &[10, 11, 12, 13], &[], &[]), (0, None));
        assert_eq!(lost(&dirty, 14, &[10, 12, 13], &[], &[]), (1, Some(11)));
        assert_eq!(lost(&dirty, 14, &[10, 13], &[12], &[]), (0, None), "12 has what 11 had");
        assert_eq!(lost(&dirty, 14, &[10, 11], &[14], &[]), (1, Some(12)), "13 is repeated behind the mark");
        assert_eq!(lost(&dirty, 14, &[], &[], &[]), (4, Some(10)));
        assert_eq!(lost(&dirty, 12, &[10, 11], &[], &[13, 11]), (1, Some(13)), "11 was found elsewhere");
        assert_eq!(lost(&clean, 12, &[10, 11], &[], &[13]), (0, None));
        assert_eq!(lost(&superblock(0, false), 1, &[], &[1], &[]), (0, None));
    }

    #[test]
    fn a_log_in_use_is_gone_where_nothing_is_as_new_as_its_anchor() {
        let is_gone = |superblock: &Superblock, has_groups, newest| {
            let (sectors, unseen) = (BTreeMap::new(), Vec::new());
            let (durable, next) = (superblock.log_tail, superblock.log_tail);
            let (foreign, before_tail, unreadable, takes_less) = (BTreeMap::new(), 0, 0, false);
            let scan = LogScan {
                superblock,
                sectors,
                durable,
                next,
                newest,
                unreadable,
                unseen,
                foreign,
                before_tail,
                takes_less,
            };
            scan.lost(has_groups) == (superblock.layout.log_sectors(), Some(superblock.log_tail))
        };
        let of = |log_tail, is_clean, is_anchored| Superblock { is_anchored, ..superblock(log_tail, is_clean) };
        for newest in [None, Some(0), Some(8), Some(9), Some(30)] {
            assert!(
                !is_gone(&of(10, true, false), true, newest),
                "nothing is in the log of a closed volume: {newest:?}"
            );
            let is_old = newest.is_none_or(|newest| newest < 9);
            assert_eq!(is_gone(&of(10, false, true), true, newest), is_old, "anchored: {newest:?}");
            let begun = Superblock { is_begun: true, ..of(10, false, true) };
            let is_older = newest.is_none_or(|newest| newest < 10);
            assert_eq!(is_gone(&begun, true, newest), is_older, "the anchor is the tail: {newest:?}");
            assert_eq!(
                is_gone(&of(10, false, false), true, newest),
                newest.is_none(),
                "of an older program: {newest:?}"
            );
            assert_eq!(is_gone(&of(0, false, true), false, newest), newest.is_none(), "from the start: {newest:?}");
            assert_eq!(is_gone(&of(0, false, false), true, newest), newest.is_none(), "with map pages: {newest:?}");
            assert!(!is_gone(&of(0, false, false), false, newest), "perhaps nothing was written yet: {newest:?}");
        }
    }

    #[test]
    fn a_superblock_far_behind_its_log_is_counted_at_once() {
        let far = 1 << 60;
        assert_eq!(lost(&superblock(0, false), far, &[far - 1], &[far - 3], &[]), (far - 3, Some(0)));
    }
}
