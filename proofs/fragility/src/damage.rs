//! Damage: which bytes change, and their new content.

use std::collections::BTreeSet;
use std::fmt;

use sealblock_media_volume::format::{Region, RegionKind};
use sealblock_simulator::random::Random;

use crate::medium::Overlay;
use crate::parts::Range;
use crate::specimen::Specimen;

/// Bytes of a long run.
const RUN_BYTES: u64 = 64 << 10;

/// The change of the bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Fault {
    /// One bit is flipped.
    Flipped,
    /// Zeroes.
    Zeroed,
    /// Random bytes.
    Random,
    /// Their content at an earlier time.
    Stale,
    /// The content of another volume of this shape that was used longer.
    Foreign,
    /// The content of another volume of this shape that is new.
    Blank,
    /// They cannot be read.
    Unreadable,
}

/// The size of the damage.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Reach {
    /// One sector, or one bit of it.
    Sector,
    /// 64 KiB in a row.
    Run,
    /// A whole region.
    Region,
    /// All regions of a kind: every copy, in every block group.
    Copies,
}

impl Reach {
    /// True if it may cover every copy of a record; then the volume may be refused, or return older contents if it
    /// reports an error.
    pub fn is_more_than_one_fault(self) -> bool {
        matches!(self, Reach::Region | Reach::Copies)
    }

    /// As text.
    pub fn name(self) -> &'static str {
        match self {
            Reach::Sector => "sector",
            Reach::Run => "64 KiB",
            Reach::Region => "region",
            Reach::Copies => "all copies",
        }
    }
}

/// The place of the damage.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Target {
    /// In one region.
    Region(RegionKind),
    /// The sectors with the map entry and with the generation of a block, in all copies: more than one sector, and more
    /// than one run.
    Tables,
    /// All superblocks and the log, in all copies: all that shows how far the volume has advanced, except the
    /// high-water mark.
    SuperblocksAndLog,
}

/// One row of the result table.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Cell {
    /// The place.
    pub target: Target,
    /// The size.
    pub reach: Reach,
    /// The change.
    pub fault: Fault,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Region(kind) => write!(f, "{kind}"),
            Target::Tables | Target::SuperblocksAndLog => f.write_str(self.class()),
        }
    }
}

impl Target {
    /// The damaged region, without the number of its copy.
    pub fn class(&self) -> &'static str {
        match self {
            Target::Region(kind) => kind.name(),
            Target::Tables => "map entry and every generation of a block",
            Target::SuperblocksAndLog => "superblocks and log",
        }
    }
}

impl Cell {
    /// The change, as text.
    pub fn damage(&self) -> String {
        let done = match self.fault {
            Fault::Flipped => return "one bit".to_owned(),
            Fault::Zeroed => "zeroed",
            Fault::Random => "random",
            Fault::Stale => "stale",
            Fault::Foreign => "of another volume",
            Fault::Blank => "of a blank volume",
            Fault::Unreadable => "unreadable",
        };
        format!("{} {done}", self.reach.name())
    }

    /// Every kind of damage of a volume: each kind of region, each size, each change.
    pub fn all(specimen: &Specimen) -> Vec<Cell> {
        const WAYS: [Fault; 7] = [
            Fault::Flipped,
            Fault::Zeroed,
            Fault::Random,
            Fault::Stale,
            Fault::Foreign,
            Fault::Blank,
            Fault::Unreadable,
        ];
        const RECORDS: [Fault; 3] = [Fault::Stale, Fault::Foreign, Fault::Blank];
        let mut kinds: Vec<RegionKind> = specimen.regions().iter().map(|region| region.kind).collect();
        kinds.sort_unstable();
        kinds.dedup();
        let mut cells = Vec::new();
        for target in kinds.into_iter().map(Target::Region) {
            cells.extend(WAYS.map(|fault| Cell { target, reach: Reach::Sector, fault }));
            cells.extend(WAYS[1..].iter().map(|&fault| Cell { target, reach: Reach::Run, fault }));
            cells.extend(RECORDS.map(|fault| Cell { target, reach: Reach::Region, fault }));
        }
        // Every copy of a kind, once.
        let mut classes = BTreeSet::new();
        for target in cells.iter().map(|cell| cell.target).collect::<Vec<_>>() {
            if classes.insert(target.class()) {
                cells.extend(RECORDS.map(|fault| Cell { target, reach: Reach::Copies, fault }));
            }
        }
        cells.push(Cell { target: Target::SuperblocksAndLog, reach: Reach::Copies, fault: Fault::Stale });
        let tables = [Fault::Zeroed, Fault::Stale];
        cells.extend(tables.map(|fault| Cell { target: Target::Tables, reach: Reach::Sector, fault }));
        cells
    }
}

/// Damage to one volume.
#[derive(Clone, Debug)]
pub struct Damage {
    /// The damaged bytes.
    pub ranges: Vec<Range>,
    fault: Fault,
    /// The seed of its random content.
    word: u64,
    /// The index of the earlier content that stale bytes get.
    earlier: usize,
    is_multiple: bool,
}

impl Damage {
    /// Damage to nothing.
    #[cfg(test)]
    pub fn none() -> Damage {
        Damage { ranges: Vec::new(), fault: Fault::Zeroed, word: 0, earlier: 0, is_multiple: false }
    }

    /// Chooses damage at random; `None` if it would change nothing, for instance if there is no earlier content.
    pub fn draw(cell: Cell, specimen: &Specimen, random: &Random) -> Option<Damage> {
        let earlier = random.below(specimen.earlier.len() as u64) as usize;
        let ranges = match cell.target {
            Target::Tables => tables(specimen, random),
            Target::SuperblocksAndLog => {
                let is_hit = |region: &Region| matches!(region.kind, RegionKind::Superblock(_) | RegionKind::Log(_));
                let regions = copies(specimen, random, is_hit);
                regions.iter().map(|region| whole(region, specimen)).collect()
            }
            Target::Region(kind) => {
                let regions = match cell.reach {
                    Reach::Copies => copies(specimen, random, |region| region.kind.name() == kind.name()),
                    _ => specimen.regions().into_iter().filter(|region| region.kind == kind).collect(),
                };
                let region = random.pick(&regions);
                match cell.reach {
                    Reach::Copies => regions.iter().map(|region| whole(region, specimen)).collect(),
                    Reach::Region => vec![whole(region, specimen)],
                    Reach::Sector | Reach::Run => {
                        vec![reach(sector(region, cell, earlier, specimen, random), cell, specimen, random)]
                    }
                }
            }
        };
        let is_multiple = cell.reach.is_more_than_one_fault();
        let damage = Damage { ranges, fault: cell.fault, word: random.word(), earlier, is_multiple };
        damage.changes(specimen).then_some(damage)
    }

    /// True if the damaged bytes become unreadable.
    pub fn is_unreadable(&self) -> bool {
        self.fault == Fault::Unreadable
    }

    /// True if it restores an earlier content.
    pub fn is_stale(&self) -> bool {
        self.fault == Fault::Stale
    }

    /// True if it is more than one fault.
    pub fn is_multiple(&self) -> bool {
        self.is_multiple
    }

    fn changes(&self, specimen: &Specimen) -> bool {
        let differs = |range: &Range| {
            let (now, new) = (bytes(&specimen.image, *range), self.bytes(*range, specimen));
            new.is_none_or(|new| new != now)
        };
        !self.ranges.is_empty() && self.ranges.iter().any(differs)
    }

    /// The content of the range after the damage; `None` if it is unreadable.
    fn bytes(&self, range: Range, specimen: &Specimen) -> Option<Vec<u8>> {
        let mut new = bytes(&specimen.image, range).to_vec();
        match self.fault {
            Fault::Flipped => new[0] ^= 1 << (self.word % 8),
            Fault::Zeroed => new.fill(0),
            Fault::Random => {
                let noise = Random::new(self.word ^ range.0);
                new.chunks_mut(8).for_each(|part| part.copy_from_slice(&noise.word().to_le_bytes()[..part.len()]));
            }
            Fault::Stale => new.copy_from_slice(bytes(&specimen.earlier[self.earlier], range)),
            Fault::Foreign => new.copy_from_slice(bytes(&specimen.foreign, range)),
            Fault::Blank => new.copy_from_slice(bytes(&specimen.blank, range)),
            Fault::Unreadable => return None,
        }
        Some(new)
    }

    /// Applies the damage.
    pub fn inflict(&self, specimen: &Specimen, overlay: &Overlay) {
        for range in &self.ranges {
            match self.bytes(*range, specimen) {
                Some(new) => overlay.poke(range.0, &new),
                None => overlay.spoil(range.0, range.1),
            }
        }
    }
}

fn bytes(image: &[u8], range: Range) -> &[u8] {
    &image[range.0 as usize..range.1 as usize]
}

/// The sector of a region to damage: any, one that is not blank, one in use, or one whose content was different before.
fn sector(region: &Region, cell: Cell, earlier: usize, specimen: &Specimen, random: &Random) -> u64 {
    let sector_bytes = u64::from(specimen.shape.sector_bytes);
    // A region may be smaller than a sector or begin within one; damage always covers whole sectors.
    let first = region.start / sector_bytes;
    let sectors = region.end.div_ceil(sector_bytes) - first;
    let range = |sector: u64| (sector * sector_bytes, (sector + 1) * sector_bytes);
    let any = first + random.below(sectors);
    let of_interest = |is: &dyn Fn(Range) -> bool| {
        let at = random.below(sectors);
        (0..sectors).map(|next| first + (at + next) % sectors).find(|sector| is(range(*sector)))
    };
    let hot = specimen.places.hot(region);
    let instead = match cell.fault {
        Fault::Stale => Some(&specimen.earlier[earlier]),
        Fault::Foreign => Some(&specimen.foreign),
        Fault::Blank => Some(&specimen.blank),
        _ => None,
    };
    if let Some(before) = instead {
        return of_interest(&|range| bytes(&specimen.image, range) != bytes(before, range)).unwrap_or(any);
    }
    match random.below(4) {
        0 => any,
        1 => of_interest(&|range| bytes(&specimen.image, range).iter().any(|byte| *byte != 0)).unwrap_or(any),
        _ if hot.is_empty() => any,
        _ => random.pick(hot) / sector_bytes,
    }
}

/// All copies of what is hit: in all shards, or in one of those that have it.
fn copies(specimen: &Specimen, random: &Random, is_hit: impl Fn(&Region) -> bool) -> Vec<Region> {
    let mut regions: Vec<Region> = specimen.regions().into_iter().filter(|region| is_hit(region)).collect();
    if specimen.parts.len() > 1 && random.chance(50) {
        let (start, end) = random.pick(&specimen.parts).range();
        let is_there = |region: &Region| (start..end).contains(&region.start);
        if regions.iter().any(is_there) {
            regions.retain(is_there);
        }
    }
    regions
}

/// All sectors of a region.
fn whole(region: &Region, specimen: &Specimen) -> Range {
    let sector_bytes = u64::from(specimen.shape.sector_bytes);
    (region.start / sector_bytes * sector_bytes, region.end.next_multiple_of(sector_bytes))
}

/// The damaged bytes around a sector that they must contain.
fn reach(sector: u64, cell: Cell, specimen: &Specimen, random: &Random) -> Range {
    let sector_bytes = u64::from(specimen.shape.sector_bytes);
    let end = specimen.image.len() as u64;
    let start = sector * sector_bytes;
    match (cell.reach, cell.fault) {
        (_, Fault::Flipped) => {
            let at = start + random.below(sector_bytes);
            (at, at + 1)
        }
        (Reach::Run, _) => {
            let back = random.below(RUN_BYTES / sector_bytes) * sector_bytes;
            let start = start.saturating_sub(back).min(end.saturating_sub(RUN_BYTES));
            (start, (start + RUN_BYTES).min(end))
        }
        _ => (start, start + sector_bytes),
    }
}

/// The sectors of the map entry and the generation of one block, in every copy.
fn tables(specimen: &Specimen, random: &Random) -> Vec<Range> {
    let sector_bytes = u64::from(specimen.shape.sector_bytes);
    let written: Vec<_> = specimen.found.keys().filter(|lba| specimen.model.is_touched(**lba)).collect();
    if written.is_empty() {
        return Vec::new();
    }
    let lba = **random.pick(&written);
    let here = specimen.parts.iter().find_map(|part| Some((part, part.place(lba)?)));
    let places = here.into_iter().flat_map(|(part, place)| {
        let offsets = std::iter::once(part.layout.map_entry_offset(place)).chain(part.layout.generation_offsets(place));
        offsets.map(|offset| part.at(offset))
    });
    let sectors = places.map(|at| at / sector_bytes * sector_bytes);
    sectors.map(|start| (start, start + sector_bytes)).collect()
}
