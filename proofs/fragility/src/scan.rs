//! Finds the places of the map entries and the data of each block on the medium.
//!
//! It scans the medium, or that of each shard, without knowing the layout: every 32 bytes that are a valid map entry of
//! a block and describe its content are a place of that map entry. In the log only the live sectors count. Each counts
//! as a whole, because one checksum covers it.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use sealblock_media_volume::format::{
    LogSector, MAP_ENTRY_BYTES, MapEntry, MapEntryKind, MapEntryRun, Region, RegionKind, Superblock,
};
use sealblock_media_volume::probe;
use sealblock_simulator::checker::Content;
use sealblock_units::Lba;

use crate::look::on_executor;
use crate::medium::Overlay;
use crate::parts::{Part, Range};
use crate::specimen::{Places, Specimen};

/// Bytes of a block's generation.
const GENERATION_BYTES: u64 = 2;

/// A live sector of the log: one that counts after a crash.
struct Live {
    range: Range,
    sequence: u64,
    is_durable: bool,
    /// The map entries of blocks, each with its bytes; the blocks of a run share them.
    entries: Vec<(MapEntry, [u8; MAP_ENTRY_BYTES])>,
}

/// Finds all places in an undamaged volume.
///
/// # Errors
/// If it has no superblock, or a block has no map entry.
pub fn find(specimen: &Specimen) -> Result<Places, String> {
    let mut places = Places::default();
    for part in &specimen.parts {
        let (start, end) = part.range();
        let image = Rc::new(specimen.image[start as usize..end as usize].to_vec());
        let overlay = Overlay::new(&image, specimen.shape.sector_bytes, true);
        let superblock = on_executor(|_| async move { probe(&overlay).await })?.map_err(|error| error.to_string())?;
        places.take_log(specimen, part, &live_log(specimen, part, &superblock));
        places.take_tables(specimen, part);
    }
    places.take_generations(specimen);
    for (&lba, content) in &specimen.found {
        if matches!(content, Content::Version(_)) && !places.entries.contains_key(&lba) {
            return Err(format!("block {lba} holds {content:?}, and its map entry is nowhere"));
        }
    }
    places.hot = places.entries.values().flatten().chain(places.data.values()).map(|range| range.0).collect();
    places.hot.sort_unstable();
    Ok(places)
}

impl Places {
    fn take_log(&mut self, specimen: &Specimen, part: &Part, live: &[Live]) {
        let entries = || live.iter().flat_map(|sector| sector.entries.iter().map(move |entry| (sector, entry)));
        // The newest map entry, by sequence number, that describes the content of a block.
        let mut newest: BTreeMap<Lba, (u64, [u8; MAP_ENTRY_BYTES])> = BTreeMap::new();
        for (sector, (entry, bytes)) in entries() {
            let is_newer = newest.get(&entry.lba).is_none_or(|(sequence, _)| *sequence < sector.sequence);
            if is_newer && describes(specimen, part, entry) {
                newest.insert(entry.lba, (sector.sequence, *bytes));
            }
        }
        for (sector, (entry, bytes)) in entries() {
            if entry.kind == MapEntryKind::Stored && !sector.is_durable && !describes(specimen, part, entry) {
                self.missing.extend(part.data(entry).map(|range| (part.block(entry.lba), range)));
            }
            if newest.get(&entry.lba).is_some_and(|(_, due)| due == bytes) {
                self.note(part, entry, sector.range);
                if !sector.is_durable {
                    self.window.insert(part.block(entry.lba));
                }
            }
        }
    }

    /// Adds the map entries in the tables. Map entries in notes, which are in free physical blocks, count only after
    /// the process has died. The map entry of a block that reads as zeroes counts only if the log has none.
    fn take_tables(&mut self, specimen: &Specimen, part: &Part) {
        let in_log: BTreeSet<Lba> = self.entries.keys().copied().collect();
        let is_table = |region: &&Region| matches!(region.kind, RegionKind::MapEntries(_));
        for region in part.regions().iter().filter(is_table) {
            let bytes = &specimen.image[region.start as usize..region.end as usize];
            for (at, cell) in (region.start..).step_by(MAP_ENTRY_BYTES).zip(bytes.as_chunks::<MAP_ENTRY_BYTES>().0) {
                let raw = MapEntry::decode_unchecked(cell);
                if raw.generation == 0 || raw.lba.get() >= part.layout.capacity_blocks() {
                    continue;
                }
                let Ok(entry) = MapEntry::decode(cell, part.seed()) else { continue };
                let counts = entry.kind == MapEntryKind::Stored || !in_log.contains(&part.block(entry.lba));
                if counts && describes(specimen, part, &entry) {
                    self.note(part, &entry, (at, at + MAP_ENTRY_BYTES as u64));
                }
            }
        }
    }

    fn take_generations(&mut self, specimen: &Specimen) {
        for lba in specimen.found.keys() {
            let here = specimen.parts.iter().find_map(|part| Some((part, part.place(*lba)?)));
            let places = here.into_iter().flat_map(|(part, place)| {
                part.layout.generation_offsets(place).into_iter().map(|offset| part.at(offset))
            });
            self.generations.insert(*lba, places.map(|at| (at, at + GENERATION_BYTES)).collect());
        }
    }

    fn note(&mut self, part: &Part, entry: &MapEntry, place: Range) {
        let lba = part.block(entry.lba);
        let places = self.entries.entry(lba).or_default();
        if !places.contains(&place) {
            places.push(place);
        }
        if let (MapEntryKind::Stored, Some(range)) = (entry.kind, part.data(entry)) {
            // The newest comes first: if a block was moved, its previous physical block may still have the same
            // content.
            self.data.entry(lba).or_insert(range);
        }
    }
}

/// The sectors of the log that count after a crash, in all its copies.
fn live_log(specimen: &Specimen, part: &Part, superblock: &Superblock) -> Vec<Live> {
    let sector_bytes = specimen.shape.sector_bytes as usize;
    let (mut live, mut mark) = (Vec::new(), superblock.log_tail);
    for region in part.regions().iter().filter(|region| matches!(region.kind, RegionKind::Log(_))) {
        let bytes = &specimen.image[region.start as usize..region.end as usize];
        for (at, sector) in (region.start..).step_by(sector_bytes).zip(bytes.chunks_exact(sector_bytes)) {
            let Ok(found) = LogSector::decode(sector, superblock.seed()) else { continue };
            if found.header.sequence < superblock.log_tail {
                continue;
            }
            mark = mark.max(found.header.durable_seq);
            // A repeated commit and the content of earlier commits have two places.
            let (earlier, last) = found.entries().split_at(usize::from(found.header.earlier));
            let decode = |bytes: &[u8; MAP_ENTRY_BYTES]| {
                let (run, bytes) = (MapEntryRun::decode(bytes, superblock.seed()).ok(), *bytes);
                run.into_iter().flat_map(MapEntryRun::entries).map(move |entry| (entry, bytes))
            };
            for (back, is_durable, entries) in [(0, false, last), (0, true, earlier), (1, true, found.repeats())] {
                live.push(Live {
                    range: (at, at + sector_bytes as u64),
                    sequence: found.header.sequence.saturating_sub(back),
                    is_durable,
                    entries: entries.iter().flat_map(decode).collect(),
                });
            }
        }
    }
    // The sector before the mark may contain the last completed commit, if only a later part of the next one is there.
    live.iter_mut().for_each(|sector| sector.is_durable |= sector.sequence + 1 < mark);
    live
}

/// True if a map entry describes the content of its block.
fn describes(specimen: &Specimen, part: &Part, entry: &MapEntry) -> bool {
    let lba = part.block(entry.lba);
    let Some(&content) = specimen.found.get(&lba) else { return false };
    match (entry.kind, content) {
        (MapEntryKind::Deallocated, Content::Zero) | (MapEntryKind::Uncorrectable, Content::Unreadable) => true,
        (MapEntryKind::Stored, Content::Version(version)) => {
            let Some((start, end)) = part.data(entry) else { return false };
            let data = &specimen.image[start as usize..end as usize];
            specimen.patterns.recognise(lba, data) == Some(content)
                && part.has_tags(entry, version, data, (&specimen.shape, &specimen.patterns))
        }
        _ => false,
    }
}
