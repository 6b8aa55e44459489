//! Recognises a volume on a medium, or the remains of one.
//!
//! A volume with damaged superblocks is a damaged volume, and never an empty medium: a medium that counts as empty is
//! overwritten, and one that counts as raw is served without a check. So besides the superblocks, everything with a
//! known position is searched: the reserved area after them, the start of the log, the map entries of the first blocks,
//! and the third superblock at the end. The same applies if all superblocks are another volume's. The fields of each
//! are checked against one another and against its place, so that neither chance nor a whole volume inside of something
//! else passes. The cost is bounded: 320 KiB of the start and of the possible starts of the block map, and one sector
//! at the end.

use std::fmt;

use sealblock_block::{Medium, MediumError, ReservedArea};
use sealblock_units::{BlockSize, Lba};

use crate::format::{
    Generations, GroupMapSector, Layout, LogSector, MAP_ENTRY_BYTES, MapEntry, ReservedCopy, SUPERBLOCK_OFFSETS,
    Superblock, SuperblockError, reserved_offset,
};
use crate::medium::container_probe::probe_shards;
use crate::medium::containers::trace;
use crate::medium::identity::IdentityError;
use crate::medium::superblocks;
use crate::medium::{PROBE_BYTES, read_probe, tail_offset};
use crate::options::VolumeError;

/// The offset of every log.
const LOG_OFFSET: u64 = 64 << 10;
/// The blocks of a volume with the longest log.
const LONGEST_LOG_BLOCKS: u64 = 1 << 30;
/// Map entries with one salt that are evidence of a block map: a single one could be chance.
const MIN_ENTRIES_OF_MAP: usize = 2;
/// The possible block and sector sizes of volumes.
pub(crate) const PROFILES: [(BlockSize, u32); 3] =
    [(BlockSize::B4096, 512), (BlockSize::B4096, 4096), (BlockSize::B512, 512)];

/// The possible sector sizes of volumes.
const SECTORS: [u32; 2] = [512, 4096];

/// What is on a medium.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Recognised {
    /// A volume with a superblock: it opens, or its open reports why not.
    Volume,
    /// Parts of a volume, without a usable superblock. Never empty.
    Remains(Vec<Trace>),
    /// No part of a volume.
    Nothing,
}

/// A part of a volume that was recognised. The number is its offset.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Trace {
    /// A damaged superblock.
    Superblock(u64),
    /// A superblock of another volume, although all other records are of this one.
    ForeignSuperblock(u64),
    /// A copy in the reserved area.
    ReservedArea(u64),
    /// A sector of the log.
    Log(u64),
    /// The group map.
    GroupMap(u64),
    /// Map entries of blocks, or their generations.
    MapEntries(u64),
    /// A superblock of the first shard of a volume in shards.
    Shard(u64),
}

impl fmt::Display for Trace {
    /// The part and its offset in bytes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Trace::Superblock(at) => write!(f, "a damaged superblock at byte {at}"),
            Trace::ForeignSuperblock(at) => write!(f, "a superblock of another volume at byte {at}"),
            Trace::ReservedArea(at) => write!(f, "notes beside the blocks at byte {at}"),
            Trace::Log(at) => write!(f, "a sector of the log at byte {at}"),
            Trace::GroupMap(at) => write!(f, "a group map at byte {at}"),
            Trace::MapEntries(at) => write!(f, "map entries of blocks at byte {at}"),
            Trace::Shard(at) => write!(f, "the first shard of a volume in shards at byte {at}"),
        }
    }
}

/// Determines what is on a medium.
///
/// # Errors
/// When the medium fails at the position of a superblock, and nothing else is found: then it is unknown.
pub async fn recognise<M: Medium>(medium: &M) -> Result<Recognised, MediumError> {
    if !matches!(probe_shards(medium).await, Ok(None)) {
        return Ok(Recognised::Volume);
    }
    let (foreign, unreadable) = match superblocks::read(medium).await {
        Ok(_) => return Ok(Recognised::Volume),
        Err(VolumeError::Superblock(
            SuperblockError::Magic | SuperblockError::Truncated | SuperblockError::Checksum | SuperblockError::Place,
        )) => (Vec::new(), None),
        Err(VolumeError::Identity(IdentityError::Foreign { foreign, .. })) => (foreign.superblocks, None),
        Err(VolumeError::Medium(error)) => (Vec::new(), Some(error)),
        Err(_) => return Ok(Recognised::Volume),
    };
    let mut traces: Vec<Trace> = foreign.into_iter().map(Trace::ForeignSuperblock).collect();
    traces.extend(at_start(&read_probe(medium, 0).await));
    traces.extend(trace(medium).await.map(Trace::Shard));
    traces.extend(in_log(&read_probe(medium, LOG_OFFSET).await));
    for offset in group_maps(medium.len_bytes()) {
        traces.extend(in_group_map(offset, &read_probe(medium, offset).await));
    }
    for offset in block_maps(medium.len_bytes()) {
        traces.extend(in_block_map(offset, &read_probe(medium, offset).await));
    }
    if let Some(offset) = tail_offset(medium).filter(|&offset| offset >= LOG_OFFSET) {
        let sector = &read_probe(medium, offset).await;
        traces.extend(Superblock::is_trace_at(sector, offset).then_some(Trace::Superblock(offset)));
    }
    match (traces.is_empty(), unreadable) {
        (false, _) => Ok(Recognised::Remains(traces)),
        (true, Some(error)) => Err(error),
        (true, None) => Ok(Recognised::Nothing),
    }
}

/// Damaged superblocks, and copies in the reserved area after each.
fn at_start(bytes: &[u8]) -> Vec<Trace> {
    let from = |offset: u64| bytes.get(offset as usize..).unwrap_or_default();
    // A valid superblock at the other one's position belongs to something that begins at another position.
    let is_damaged = |at: u64| Superblock::is_trace(from(at)) && Superblock::decode(from(at)).is_err();
    let superblocks = SUPERBLOCK_OFFSETS.into_iter().filter(|&at| is_damaged(at)).map(Trace::Superblock);
    let places = [ReservedArea::GroupLabel, ReservedArea::ScrubState]
        .into_iter()
        .flat_map(|area| [0, 1].map(|copy| (area, copy)));
    let reserved = places.filter_map(|(area, copy)| {
        let at = reserved_offset(area, copy);
        ReservedCopy::is_trace(from(at), area, copy).then_some(Trace::ReservedArea(at))
    });
    superblocks.chain(reserved).collect()
}

/// The first sector of the log that is where its number says.
fn in_log(bytes: &[u8]) -> Option<Trace> {
    [512, 4096].into_iter().find_map(|sector| {
        let places = PROBE_BYTES / sector as u64;
        let mut sectors = (0_u64..).zip(bytes.chunks_exact(sector));
        // The number of sectors of every log is a multiple of this.
        let found = sectors.find(|(place, bytes)| LogSector::trace(bytes).is_some_and(|at| at % places == *place));
        found.map(|(place, _)| Trace::Log(LOG_OFFSET + place * sector as u64))
    })
}

/// The first sector of a group map.
fn in_group_map(offset: u64, bytes: &[u8]) -> Option<Trace> {
    GroupMapSector::trace(bytes).then_some(Trace::GroupMap(offset))
}

/// The first map pages: the head of one, or map entries of the first blocks, if enough have the same salt.
fn in_block_map(offset: u64, bytes: &[u8]) -> Option<Trace> {
    // A log has map entries, too, and the log of a volume that begins further on may be here.
    if bytes.chunks_exact(512).any(|sector| LogSector::trace(sector).is_some()) {
        return None;
    }
    let is_table = SECTORS.into_iter().any(|sector| {
        // The first pages have the same length in every volume with this sector size.
        let Ok(layout) = Layout::new(BlockSize::B4096, sector, 1) else { return false };
        let (sector, page_bytes) = (sector as usize, layout.page_bytes() as usize);
        let firsts = (0_u64..).map(|page| Lba::new(page * layout.page_blocks()));
        let pages = || firsts.clone().zip(bytes.chunks_exact(page_bytes));
        let mut salts: Vec<u32> = pages()
            .flat_map(|(first, page)| (first.get()..).zip(page[sector..].as_chunks::<MAP_ENTRY_BYTES>().0))
            .filter_map(|(lba, bytes)| MapEntry::trace(bytes, Lba::new(lba)))
            .collect();
        salts.sort_unstable();
        salts.chunk_by(|a, b| a == b).any(|same| same.len() >= MIN_ENTRIES_OF_MAP)
            || pages().any(|(first, page)| Generations::trace(&page[..sector]) == Some(first))
    });
    is_table.then_some(Trace::MapEntries(offset))
}

/// The layouts of the smallest volumes, and of those that fill a medium of this length.
fn likely(len_bytes: u64) -> impl Iterator<Item = Layout> {
    let smallest = PROFILES.into_iter().filter_map(|(block_size, sector)| Layout::new(block_size, sector, 1).ok());
    smallest.chain(PROFILES.into_iter().filter_map(move |(block_size, sector)| filling(block_size, sector, len_bytes)))
}

/// The possible offsets of the block map.
fn block_maps(len_bytes: u64) -> Vec<u64> {
    in_order(likely(len_bytes).map(|layout| layout.groups_offset()), len_bytes)
}

/// The possible offsets of the group map: after the logs of those volumes, and after the longest log.
fn group_maps(len_bytes: u64) -> Vec<u64> {
    let longest = Layout::new(BlockSize::B4096, 512, LONGEST_LOG_BLOCKS).ok();
    in_order(likely(len_bytes).chain(longest).map(|layout| layout.group_map_offset(0)), len_bytes)
}

fn in_order(offsets: impl Iterator<Item = u64>, len_bytes: u64) -> Vec<u64> {
    let mut offsets: Vec<u64> = offsets.filter(|offset| *offset < len_bytes).collect();
    offsets.sort_unstable();
    offsets.dedup();
    offsets
}

/// The volume with these sizes that has this length.
fn filling(block_size: BlockSize, sector: u32, len_bytes: u64) -> Option<Layout> {
    let blocks = first_of_length(block_size, sector, len_bytes);
    Layout::new(block_size, sector, blocks).ok().filter(|layout| layout.medium_bytes() == len_bytes)
}

/// The smallest number of blocks of a volume with these sizes that is at least this long. The length grows with the
/// number of blocks.
pub(crate) fn first_of_length(block_size: BlockSize, sector: u32, len_bytes: u64) -> u64 {
    let (mut few, mut many) = (1, (len_bytes >> block_size.shift()).max(1));
    while few < many {
        let middle = few + (many - few) / 2;
        if Layout::new(block_size, sector, middle).is_ok_and(|layout| layout.medium_bytes() < len_bytes) {
            few = middle + 1;
        } else {
            many = middle;
        }
    }
    few
}
