//! Derives the layout of a volume without a superblock from what is left on the medium.
//!
//! The whole layout follows from block size, sector size and capacity, and the length of the medium leaves few
//! combinations. For each possible layout, map entries of sampled blocks and the sectors of the log are read at the
//! positions that the layout gives them. A map entry names its block and a log sector its position, and both have a
//! checksum salted by the volume: records of one volume agree on the salt. Then the data in the physical blocks of
//! these map entries are checked against their tuples. That determines the guard and decides between layouts.
//!
//! A salt counts only if at least two records agree on it. If several volumes have left records, the one that most
//! places name wins (`medium::identity`), not the one with the most records.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use sealblock_block::Medium;
use sealblock_integrity::{GuardKind, PiFormat, ProtectionType, Tuple, guard};
use sealblock_units::{BlockSize, Lba};

use crate::format::{LOG_REGIONS, Layout, LogSector, MAP_ENTRY_BYTES, MapEntry, MapEntryKind, MapEntryRun, Seed};
use crate::medium::identity::{Unit, sightings_in};
use crate::medium::read_probe;
use crate::medium::recognise::{PROFILES, first_of_length};

/// The number of sites where map entries are sampled, and the blocks of each site.
const SITES: u64 = 256;
const SITE_BLOCKS: u64 = 256;
/// Records that must agree on a salt: a single one could be chance.
const MIN_AGREEING: u64 = 2;
/// The number of map entries of the map pages whose data are checked, and the same number from the log.
const SAMPLES: usize = 64;
/// The owner of the remains must be named by this many more places than any other volume: one fault changes one place.
const CERTAIN_LEAD: usize = 2;
/// The number of salts that are counted. In noise, about every ten thousandth place has a new one.
const MAX_SALTS: usize = 1 << 16;
/// Bytes that are read at once and cached.
const CHUNK_BYTES: u64 = 64 << 10;
/// The number of cached chunks.
const CHUNKS: usize = 512;

/// What is known about a volume without a superblock.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Hints {
    /// Its capacity at creation, in bytes of data.
    pub capacity_bytes: Option<u64>,
    /// Bytes of a block.
    pub block_size: Option<BlockSize>,
}

/// Why no layout was found.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ProfileError {
    /// The hints contradict each other or the format.
    #[error("no volume has this capacity and block size")]
    Hints,
    /// No volume has the length of the medium.
    #[error(
        "no volume has the length of this medium, {0} bytes, so where it would lie cannot be told without its capacity"
    )]
    Length(u64),
    /// No records of a volume with a possible layout were found.
    #[error("no map entries of a volume were found where a volume of this length would have them")]
    Nothing,
    /// There are records of several volumes.
    #[error(
        "records of several volumes lie there: {places} places name one and {other_places} another, so whose the rest is cannot be told"
    )]
    Ambiguous {
        /// Places that name the volume that most places name.
        places: usize,
        /// Places that name the second one.
        other_places: usize,
    },
    /// There are map entries, but no data that match any of them.
    #[error(
        "{entries} map entries of a volume were found, and no block that any of them describes: no data of it are left"
    )]
    NoData {
        /// Map entries and log sectors that agree.
        entries: u64,
    },
}

/// The layout of a volume, and how certain it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LayoutGuess {
    /// The layout.
    pub layout: Layout,
    /// The format of the protection information, as far as reads need it: the guard is correct, and the type is one
    /// whose reference tags the writer chooses.
    pub protection: Option<PiFormat>,
    /// The salt of the checksums.
    pub seed: Seed,
    /// Map entries and sectors of the log that agree.
    pub agreeing: u64,
    /// Of the blocks that were checked, those whose data match their map entry.
    pub matching: u64,
}

/// Bytes of a medium, read in cached chunks. Bytes that cannot be read are zeroes.
struct Chunks<'a, M> {
    medium: &'a M,
    kept: HashMap<u64, Vec<u8>>,
}

impl<M: Medium> Chunks<'_, M> {
    /// `length` bytes, which must not cross the end of a chunk; `None` past the end of the medium.
    async fn get(&mut self, offset: u64, length: usize) -> Option<&[u8]> {
        let (chunk, at) = (offset / CHUNK_BYTES, (offset % CHUNK_BYTES) as usize);
        if !self.kept.contains_key(&chunk) {
            if self.kept.len() >= CHUNKS {
                self.kept.clear();
            }
            self.kept.insert(chunk, read_probe(self.medium, chunk * CHUNK_BYTES).await);
        }
        self.kept.get(&chunk)?.get(at..at + length)
    }
}

/// Layouts that the medium cannot tell apart: every block is in the same place.
struct LayoutFamily {
    /// The one with the most blocks.
    layout: Layout,
    /// The capacities of all of them, in blocks.
    capacities: Vec<u64>,
}

/// The records that agree on a salt, under one family of layouts.
#[derive(Default)]
struct Agreeing {
    /// The number of map entries and log sectors.
    pieces: u64,
    /// Some of the map entries.
    samples: Vec<MapEntry>,
    /// The places that name it.
    units: BTreeSet<Unit>,
}

/// The records that were found at the positions of a family, by salt.
#[derive(Default)]
struct SaltCounts {
    by_salt: BTreeMap<Seed, Agreeing>,
}

/// Finds the layout of the volume that has left remains on a medium. It first determines whose remains they are:
/// another volume may have left more records than this one.
///
/// # Errors
/// When no records agree, no layout fits the length of the medium, or it is unclear whose remains they are.
pub(crate) async fn find<M: Medium>(medium: &M, hints: &Hints) -> Result<LayoutGuess, ProfileError> {
    let families = families(medium.len_bytes(), medium.read_unit_bytes(), hints)?;
    let mut chunks = Chunks { medium, kept: HashMap::new() };
    let mut found = Vec::new();
    for family in &families {
        found.push(SaltCounts::of(&mut chunks, &family.layout).await);
    }
    let seed = owner(&found)?;
    let mut best: Option<(u64, u64, LayoutGuess, usize)> = None;
    let mut entries = 0;
    for (number, (family, counts)) in families.iter().zip(&found).enumerate() {
        let Some(agreeing) = counts.by_salt.get(&seed).filter(|agreeing| agreeing.pieces >= MIN_AGREEING) else {
            continue;
        };
        entries = entries.max(agreeing.pieces);
        let voted = guard_of(&mut chunks, &family.layout, &agreeing.samples).await;
        let Some((protection, matching)) = voted else { continue };
        if best.as_ref().is_none_or(|best| (best.0, best.1) < (matching, agreeing.pieces)) {
            let shape = LayoutGuess { layout: family.layout, protection, seed, agreeing: agreeing.pieces, matching };
            best = Some((matching, agreeing.pieces, shape, number));
        }
    }
    let Some((.., shape, number)) = best else { return Err(ProfileError::NoData { entries }) };
    let layout = most_likely(&mut chunks, &families[number], shape.seed).await;
    Ok(LayoutGuess { layout, ..shape })
}

/// The salt that most places name. If records agree on another salt, too, the first must lead by more than a single
/// fault can cause.
fn owner(found: &[SaltCounts]) -> Result<Seed, ProfileError> {
    let mut salts: BTreeMap<Seed, (usize, u64)> = BTreeMap::new();
    for (salt, agreeing) in found.iter().flat_map(|counts| &counts.by_salt).filter(|(_, of)| of.pieces >= MIN_AGREEING)
    {
        let most = salts.entry(*salt).or_default();
        *most = (*most).max((agreeing.units.len(), agreeing.pieces));
    }
    let mut ranked: Vec<((usize, u64), Seed)> = salts.into_iter().map(|(salt, of)| (of, salt)).collect();
    ranked.sort_unstable_by(|a, b| b.cmp(a));
    match ranked[..] {
        [] => Err(ProfileError::Nothing),
        [((most, _), _), ((next, _), _), ..] if most < next + CERTAIN_LEAD => {
            Err(ProfileError::Ambiguous { places: most, other_places: next })
        }
        [(_, seed), ..] => Ok(seed),
    }
}

/// The possible layouts, in families.
fn families(len_bytes: u64, medium_sector: u32, hints: &Hints) -> Result<Vec<LayoutFamily>, ProfileError> {
    let mut families: Vec<(u64, [u64; 4], u32, LayoutFamily)> = Vec::new();
    for (block_size, sector) in PROFILES {
        if hints.block_size.is_some_and(|hint| hint != block_size) || sector < medium_sector {
            continue;
        }
        for blocks in capacities(block_size, sector, len_bytes, hints) {
            let Ok(layout) = Layout::new(block_size, sector, blocks) else { continue };
            let Some(last) = layout.block_group(layout.block_groups() - 1) else { continue };
            let Some(first) = layout.block_group(0) else { continue };
            let places = [
                layout.map_entry_offset(first.first),
                layout.map_entry_offset(last.first),
                first.data_offset,
                last.data_offset,
            ];
            match families.last_mut() {
                Some((groups, same, of, family))
                    if (*groups, *same, *of) == (layout.block_groups(), places, sector)
                        && family.layout.block_size() == block_size =>
                {
                    family.layout = layout;
                    family.capacities.push(blocks);
                }
                _ => families.push((
                    layout.block_groups(),
                    places,
                    sector,
                    LayoutFamily { layout, capacities: vec![blocks] },
                )),
            }
        }
    }
    match (families.is_empty(), hints.capacity_bytes) {
        (false, _) => Ok(families.into_iter().map(|(.., family)| family).collect()),
        (true, Some(_)) => Err(ProfileError::Hints),
        (true, None) => Err(ProfileError::Length(len_bytes)),
    }
}

/// The capacities, in blocks, for which a volume has the length of the medium; only the known capacity if the hints
/// contain one.
fn capacities(block_size: BlockSize, sector: u32, len_bytes: u64, hints: &Hints) -> std::ops::Range<u64> {
    if let Some(bytes) = hints.capacity_bytes {
        let blocks = bytes >> block_size.shift();
        let is_whole = blocks << block_size.shift() == bytes;
        return if is_whole { blocks..blocks + 1 } else { 0..0 };
    }
    let first = first_of_length(block_size, sector, len_bytes);
    first..first_of_length(block_size, sector, len_bytes + 1)
}

impl SaltCounts {
    /// Counts the records at the positions of a layout.
    async fn of<M: Medium>(chunks: &mut Chunks<'_, M>, layout: &Layout) -> SaltCounts {
        let mut counts = SaltCounts::default();
        let stride = (layout.capacity_blocks() / SITES).max(SITE_BLOCKS);
        counts.sample_map(chunks, layout, stride).await;
        counts.sample_log(chunks, layout).await;
        if counts.by_salt.values().all(|agreeing| agreeing.pieces < MIN_AGREEING) {
            // Few of its blocks were written, so all sites are read.
            counts.sample_map(chunks, layout, SITE_BLOCKS).await;
        }
        for sighting in sightings_in(chunks.medium, layout, &[]).await {
            if let Some(agreeing) = counts.by_salt.get_mut(&sighting.salt) {
                agreeing.units.insert(sighting.unit);
            }
        }
        counts
    }

    /// Counts a record. At most `samples` map entries of its kind are kept for the check of their data.
    fn count(&mut self, seed: Seed, entry: Option<MapEntry>, samples: usize) {
        if self.by_salt.len() >= MAX_SALTS && !self.by_salt.contains_key(&seed) {
            // Salts with a single record are dropped first.
            self.by_salt.retain(|_, agreeing| agreeing.pieces > 1);
            if self.by_salt.len() >= MAX_SALTS {
                return;
            }
        }
        let agreeing = self.by_salt.entry(seed).or_default();
        agreeing.pieces += 1;
        let is_sample = |entry: &MapEntry| entry.kind == MapEntryKind::Stored && !entry.guard_unverified;
        if agreeing.samples.len() < samples {
            agreeing.samples.extend(entry.filter(is_sample));
        }
    }

    /// Samples the map entries of some blocks every `stride` blocks.
    async fn sample_map<M: Medium>(&mut self, chunks: &mut Chunks<'_, M>, layout: &Layout, stride: u64) {
        // From the end, so that not all samples are from the start, which most accidents overwrite.
        let sites = (0..layout.capacity_blocks().div_ceil(stride)).rev().map(|site| site * stride);
        for lba in sites.flat_map(|first| first..(first + SITE_BLOCKS).min(layout.capacity_blocks())) {
            let lba = Lba::new(lba);
            let Some(bytes) = chunks.get(layout.map_entry_offset(lba), MAP_ENTRY_BYTES).await else { continue };
            let Some(bytes) = bytes.first_chunk::<MAP_ENTRY_BYTES>() else { continue };
            if let Some(salt) = MapEntry::trace(bytes, lba) {
                self.count(Seed(salt), MapEntry::decode(bytes, Seed(salt)).ok(), SAMPLES);
            }
        }
        for agreeing in self.by_salt.values_mut().filter(|agreeing| agreeing.pieces >= MIN_AGREEING) {
            agreeing.units.insert(Unit::MapPages);
        }
    }

    /// Samples the sectors of the log that lie where their number says, and their map entries: the newest first, as
    /// their data are the most likely to be there.
    async fn sample_log<M: Medium>(&mut self, chunks: &mut Chunks<'_, M>, layout: &Layout) {
        let mut sectors = log_sectors(chunks, layout).await;
        sectors.sort_unstable_by_key(|(_, sequence, _)| std::cmp::Reverse(*sequence));
        for (.., bytes) in sectors {
            let Some((_, seed)) = LogSector::trace_salt(&bytes) else { continue };
            let Ok(sector) = LogSector::decode(&bytes, seed) else { continue };
            self.count(seed, None, 0);
            sector.entries().iter().for_each(|bytes| {
                let entry = MapEntryRun::decode(bytes, seed).ok().map(|run| run.first);
                if entry.is_some_and(|entry| entry.lba.get() < layout.capacity_blocks()) {
                    self.count(seed, entry, 2 * SAMPLES);
                }
            });
        }
    }
}

/// Every sector of the log, of all copies, that lies where its number says: its offset, its number and its bytes.
async fn log_sectors<M: Medium>(chunks: &mut Chunks<'_, M>, layout: &Layout) -> Vec<(u64, u64, Vec<u8>)> {
    let sector_bytes = layout.sector_bytes() as usize;
    let mut found = Vec::new();
    for region in 0..LOG_REGIONS {
        for position in 0..layout.log_sectors() {
            let at = layout.log_sector_offset(position, region);
            let Some(bytes) = chunks.get(at, sector_bytes).await else { continue };
            let belongs = |sequence: &u64| sequence % layout.log_sectors() == position;
            found.extend(LogSector::trace(bytes).filter(belongs).map(|sequence| (at, sequence, bytes.to_vec())));
        }
    }
    found
}

/// The sectors of a volume's log, of all copies: offset, number, and bytes.
pub(crate) async fn read_log<M: Medium>(medium: &M, layout: &Layout) -> Vec<(u64, u64, Vec<u8>)> {
    log_sectors(&mut Chunks { medium, kept: HashMap::new() }, layout).await
}

/// The format of the protection information that the data of these map entries have, and the number of map entries that
/// match it.
async fn guard_of<M: Medium>(
    chunks: &mut Chunks<'_, M>,
    layout: &Layout,
    samples: &[MapEntry],
) -> Option<(Option<PiFormat>, u64)> {
    let mut votes: BTreeMap<usize, u64> = BTreeMap::new();
    for entry in samples {
        let Some(offset) = layout.data_offset(entry) else { continue };
        let Some(data) = chunks.get(offset, layout.block_size().bytes()).await else { continue };
        for (number, format) in formats().enumerate() {
            *votes.entry(number).or_default() += u64::from(is_sealed_as(entry, format, data));
        }
    }
    let (number, matching) = votes.into_iter().max_by_key(|(_, votes)| *votes).filter(|(_, votes)| *votes > 0)?;
    Some((formats().nth(number)?, matching))
}

/// The formats that can be told apart: one for each guard. Of the types it is the one whose reference tags the writer
/// chooses: that a map entry belongs to its block is checked by its LBA.
fn formats() -> impl Iterator<Item = Option<PiFormat>> {
    let of = |guard| Some(PiFormat::with_default_storage_tag(guard, ProtectionType::Type3));
    std::iter::once(None).chain(GuardKind::ALL.into_iter().map(of))
}

/// True if a map entry in this format matches these data.
fn is_sealed_as(entry: &MapEntry, format: Option<PiFormat>, data: &[u8]) -> bool {
    let has_data_crc = || entry.data_crc() == guard::crc32c(data) && entry.tuple[12..] == [0; 4];
    match format {
        None => entry.tuple[..8] == [0; 8] && has_data_crc(),
        Some(format) => {
            let guard = Tuple::read(format, entry.tags(format)).guard;
            guard == guard::compute(format.guard(), data) && (format.tuple_bytes() == 16 || has_data_crc())
        }
    }
}

/// The layout of a family with the most likely capacity. All have the same blocks in the same places; they differ in
/// the number of unwritten blocks at the end. Users choose round sizes.
async fn most_likely<M: Medium>(chunks: &mut Chunks<'_, M>, family: &LayoutFamily, seed: Seed) -> Layout {
    let min = family.capacities.iter().copied().min().unwrap_or(1);
    let mut written = min;
    for lba in (min..family.layout.capacity_blocks()).map(Lba::new) {
        let bytes = chunks.get(family.layout.map_entry_offset(lba), MAP_ENTRY_BYTES).await;
        let entry = bytes.and_then(|bytes| bytes.first_chunk()).map(|bytes| MapEntry::decode(bytes, seed));
        if matches!(entry, Some(Ok(entry)) if entry.lba == lba) {
            written = lba.get() + 1;
        }
    }
    let possible = family.capacities.iter().copied().filter(|blocks| *blocks >= written);
    let round = possible.max_by_key(|blocks| (blocks.trailing_zeros(), *blocks));
    let layout = &family.layout;
    round
        .and_then(|blocks| Layout::new(layout.block_size(), layout.sector_bytes(), blocks).ok())
        .unwrap_or(family.layout)
}
