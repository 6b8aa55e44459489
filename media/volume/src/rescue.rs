//! Opens what is left of a volume without a superblock, for reading only.
//!
//! The superblock had the position where the live part of the log begins. But each map page records up to which log
//! sector it includes the log: later map entries are newer than the page, earlier ones are not. As after any crash, a
//! map entry after the highest `durable_seq` counts only if its data are there. A place of the log without a sector was
//! never written, or it is lost with map entries of unknown blocks. If there is such a place, the result says that
//! blocks may be older than they were.

pub mod profile;

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use sealblock_block::{Clock, Freshness, Medium, WhyOlder};

use crate::background::Worker;
use crate::format::{Generations, HighWaterMark, LogSector, MapEntry, MapEntryRun, Superblock};
use crate::life::recovery::{DataPresence, Recovered, fits, has_data};
use crate::life::{OpenVolume, assemble, describe};
use crate::map::block_groups::BlockGroups;
use crate::map::map_entries::MapEntries;
use crate::map::map_page::MapLookup;
use crate::medium::superblocks::lost_copies;
use crate::options::{OpenOptions, VolumeError};
use crate::rescue::profile::{Hints, LayoutGuess, ProfileError};
use crate::volume::Volume;

/// Generations wrap around after this number.
const GENERATIONS: u32 = u16::MAX as u32;

/// Why the remains of a volume do not open.
#[derive(Debug, thiserror::Error)]
pub enum RemainsError {
    /// Its layout cannot be derived.
    #[error("{0}")]
    Profile(#[from] ProfileError),
    /// The medium failed.
    #[error("{0}")]
    Volume(#[from] VolumeError),
    /// It was resized, and only its superblocks recorded the new layout.
    #[error(
        "the volume was resized since it was created, and where its blocks lie stood in the superblocks alone, which are lost"
    )]
    Resized,
}

/// What was found of a volume without a superblock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Remains {
    /// Its layout.
    pub profile: LayoutGuess,
    /// Sectors of the log that were found.
    pub log_sectors: u64,
    /// Places of the log without a sector: never written, or lost.
    pub log_sectors_missing: u64,
    /// The log may be incomplete: blocks written shortly before the last use of the volume ended may have older
    /// content.
    pub may_be_older: bool,
}

/// Opens the remains of a volume for reading only. Nothing on the medium changes.
///
/// # Errors
/// When no layout fits, or the medium fails.
pub async fn open_remains<M: Medium, C: Clock>(
    medium: M,
    clock: C,
    hints: &Hints,
    options: &OpenOptions,
) -> Result<(OpenVolume<M, C>, Remains), RemainsError> {
    let shape = profile::find(&medium, hints).await?;
    let superblock = superblock(&shape);
    let log = RemainingLog::read(&medium, &superblock).await;
    let options = OpenOptions { read_only: true, ..*options };
    let nothing = Recovered { end: log.next, next: log.next, ..Recovered::default() };
    let groups = BlockGroups::read(&medium, &superblock).await.map_err(VolumeError::from)?;
    if groups.is_marked_resized() {
        return Err(RemainsError::Resized);
    }
    groups.assume_initialized();
    let volume = assemble(medium, clock, superblock, &options, &nothing, groups, HighWaterMark::default());
    let entries = log.newer_entries(&volume).await?;
    let taken = entries.in_order().iter().map(|run| u64::from(run.blocks)).sum();
    volume.memtable.recover(entries);
    let remains = Remains {
        profile: shape,
        log_sectors: log.sectors.len() as u64,
        log_sectors_missing: log.missing(),
        may_be_older: log.may_be_older(),
    };
    if remains.may_be_older {
        volume.log_freshness.set(Freshness::MayBeOlder(WhyOlder::LogLost));
    }
    let lost = volume.block_map.groups.lost_copies();
    let description = describe(&superblock, &Recovered::default(), taken, lost_copies(&superblock.layout), lost);
    let volume = Rc::new(volume);
    Ok((OpenVolume { worker: Worker { volume: volume.clone() }, volume, description }, remains))
}

/// A superblock with what is known.
fn superblock(shape: &LayoutGuess) -> Superblock {
    let new = Superblock::new(shape.seed.identity(), shape.layout, shape.protection);
    Superblock { is_clean: false, uncorrectable: true, keeps_space: true, ..new }
}

/// The newest sector of the log, from which the place of the next one follows.
#[derive(Default)]
struct NewestSector {
    sequence: u64,
    /// The number of its own map entries in each region.
    entries: [Option<usize>; 2],
}

impl NewestSector {
    fn note(&mut self, sequence: u64, region: u64, entries: usize) {
        if sequence > self.sequence {
            *self = NewestSector { sequence, ..NewestSector::default() };
        }
        if sequence == self.sequence {
            self.entries[region as usize] = Some(entries);
        }
    }

    /// The region of the next sector if it is written once: the one that lacks the newest map entries of this sector,
    /// or else by the parity of its number.
    fn next_region(&self) -> u64 {
        match self.entries {
            [a, b] if a == b => self.sequence + 1,
            [a, b] => u64::from(a > b),
        }
    }
}

/// What is left of the log.
struct RemainingLog {
    /// The map entries of each sector, from the sector itself or repeated by the next one, and whether a sector shows
    /// that they were durable.
    sectors: BTreeMap<u64, Vec<(MapEntryRun, bool)>>,
    /// The positions of the ring for which some place has a sector.
    positions: BTreeSet<u64>,
    /// The first place of the sector that would follow the newest one holds an older sector.
    is_end_known: bool,
    /// The number of sectors in the ring.
    ring: u64,
    /// Every sector before this one was durable, with its data.
    durable: u64,
    next: u64,
}

impl RemainingLog {
    async fn read<M: Medium>(medium: &M, superblock: &Superblock) -> RemainingLog {
        let (layout, mut log) = (&superblock.layout, RemainingLog::empty(superblock.layout.log_sectors()));
        let (mut places, mut newest) = (BTreeSet::new(), NewestSector::default());
        for (offset, sequence, bytes) in profile::read_log(medium, layout).await {
            let Ok(sector) = LogSector::decode(&bytes, superblock.seed()) else { continue };
            log.positions.insert(sequence % log.ring);
            places.insert(offset);
            log.durable = log.durable.max(sector.header.durable_seq);
            log.next = log.next.max(sequence + 1);
            newest.note(sequence, u64::from(offset != layout.log_sector_offset(sequence, 0)), sector.entries().len());
            let (earlier, last) = sector.entries().split_at(usize::from(sector.header.earlier));
            let parts = [(Some(sequence), last, false), (Some(sequence), earlier, true)];
            let repeats = (sequence.checked_sub(1), sector.repeats(), true);
            for (sequence, raw, is_durable) in parts.into_iter().chain([repeats]).filter(|(_, raw, _)| !raw.is_empty())
            {
                let entries = raw.iter().filter_map(|raw| MapEntryRun::decode(raw, superblock.seed()).ok());
                let Some(sequence) = sequence else { continue };
                let entries = entries.filter(|run| fits(superblock, run)).map(|run| (run, is_durable));
                log.sectors.entry(sequence).or_default().extend(entries);
            }
        }
        log.is_end_known = places.contains(&layout.log_sector_offset(log.next, newest.next_region()));
        log
    }

    fn empty(ring: u64) -> RemainingLog {
        let (sectors, positions) = (BTreeMap::new(), BTreeSet::new());
        RemainingLog { sectors, positions, is_end_known: false, ring, durable: 0, next: 0 }
    }

    fn missing(&self) -> u64 {
        self.ring - self.positions.len() as u64
    }

    /// A log that has not wrapped around yet has unwritten places after its end, which look like lost ones.
    fn may_be_older(&self) -> bool {
        self.missing() > 0 || !self.is_end_known
    }

    /// The map entries that are newer than the block map.
    async fn newer_entries<M: Medium, C: Clock>(&self, base: &Volume<M, C>) -> Result<MapEntries, VolumeError> {
        let (mut entries, mut seen, mut reached) = (MapEntries::default(), MapEntries::default(), BTreeMap::new());
        for (&sequence, found) in self.sectors.iter().rev() {
            for (run, is_durable) in found {
                if run.blocks == 1 && seen.get(run.first.lba).is_some() {
                    continue;
                }
                // Unreadable data count as present: the block is then unreadable rather than older than it was.
                let is_durable = *is_durable || sequence < self.durable;
                if !is_durable && has_data(&base.medium, &base.superblock(), &run.first).await? == DataPresence::No {
                    continue;
                }
                for part in seen.insert_older(*run) {
                    for (number, piece) in base.layout.page_pieces(part.extent()) {
                        let reach = match reached.entry(number) {
                            Entry::Occupied(entry) => *entry.get(),
                            Entry::Vacant(entry) => *entry.insert(reach(base, number).await?),
                        };
                        let piece = part.part(piece.start().get(), piece.last().get() + 1);
                        take_newer(base, [&mut entries, &mut seen], piece, reach.map(|at| sequence >= at)).await?;
                    }
                }
            }
        }
        Ok(entries)
    }
}

/// Takes over map entries of the log for blocks of one page, if they are newer than the block map. `is_newer` is `None`
/// if the page does not show it; then the map entry of each block decides.
async fn take_newer<M: Medium, C: Clock>(
    base: &Volume<M, C>,
    [entries, seen]: [&mut MapEntries; 2],
    run: MapEntryRun,
    is_newer: Option<bool>,
) -> Result<(), VolumeError> {
    match is_newer {
        Some(false) => {}
        Some(true) => drop(entries.insert_older(run)),
        None => {
            for entry in run.entries() {
                // A map entry of a single block that was seen before is newer than the run.
                let is_due = run.blocks == 1 || seen.single(entry.lba).is_none();
                if is_due && is_newer_than_table(base, &entry).await? {
                    entries.insert_older(MapEntryRun::from(entry));
                }
            }
        }
    }
    Ok(())
}

/// The log sector up to which a page includes the log; `None` if neither copy of its generations is left.
async fn reach<M: Medium, C: Clock>(base: &Volume<M, C>, number: u64) -> Result<Option<u64>, VolumeError> {
    if !base.block_map.groups.is_initialized(base.block_map.group_of(number)) {
        return Ok(Some(0));
    }
    let (place, sector) = (base.block_map.offsets(number), base.layout.sector_bytes() as usize);
    let mut reach = None;
    for offset in [place.offset, place.second_offset] {
        let (read, bytes) = base.medium.read(offset, base.medium.buffer(sector)).await;
        match read {
            Ok(()) => {
                let found = Generations::decode(&bytes, base.seed, place.first, base.layout.page_blocks());
                reach = reach.max(found.map(|generations| generations.sequence));
            }
            Err(error) if error.is_local() => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(reach)
}

/// The same for a page without generations: compares the generations of both map entries, as far as that is conclusive.
async fn is_newer_than_table<M: Medium, C: Clock>(base: &Volume<M, C>, entry: &MapEntry) -> Result<bool, VolumeError> {
    let (number, index) = base.block_map.locate(entry.lba);
    let page = base.block_map.page(&base.medium, number).await?;
    Ok(match page.lookup(index, entry.lba, base.seed) {
        MapLookup::Mapped(other) | MapLookup::Stale { entry: other, .. } => {
            let ahead = (GENERATIONS + u32::from(other.generation) - u32::from(entry.generation)) % GENERATIONS;
            ahead == 0 || ahead > GENERATIONS / 2
        }
        MapLookup::Unwritten | MapLookup::Damaged(_) | MapLookup::Unreadable => true,
    })
}
