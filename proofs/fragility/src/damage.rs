//! Damage: what is done to which bytes.

use std::fmt;

use sealblock_media_volume::format::{Region, RegionKind};
use sealblock_simulator::random::Random;

use crate::medium::Overlay;
use crate::specimen::{Range, Specimen};

/// Bytes of a long run.
const RUN_BYTES: u64 = 64 << 10;

/// What is done to bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Fault {
    /// One bit is turned over.
    Flipped,
    /// They are zeroes.
    Zeroed,
    /// They are noise.
    Random,
    /// They are what they were before.
    Stale,
    /// They cannot be read.
    Unreadable,
}

/// How many bytes are damaged.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Reach {
    /// One sector, or one bit of it.
    Sector,
    /// 64 KiB in a row.
    Run,
}

/// Where damage is done.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Target {
    /// In one region.
    Region(RegionKind),
    /// The sector of a block's map entry and that of its generation, in all copies: more than one sector, and more than one run.
    Tables,
}

/// One row of the result table.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Cell {
    /// Where.
    pub target: Target,
    /// How much.
    pub reach: Reach,
    /// What.
    pub fault: Fault,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Region(kind) => write!(f, "{kind}"),
            Target::Tables => f.write_str(self.class()),
        }
    }
}

impl Target {
    /// What is damaged, whichever copy of it.
    pub fn class(&self) -> &'static str {
        match self {
            Target::Region(kind) => kind.name(),
            Target::Tables => "map entry and every generation of a block",
        }
    }
}

impl Cell {
    /// What is done, in words.
    pub fn damage(&self) -> &'static str {
        match (self.reach, self.fault) {
            (_, Fault::Flipped) => "one bit",
            (Reach::Sector, Fault::Zeroed) => "sector zeroed",
            (Reach::Sector, Fault::Random) => "sector random",
            (Reach::Sector, Fault::Stale) => "sector stale",
            (Reach::Sector, Fault::Unreadable) => "sector unreadable",
            (Reach::Run, Fault::Zeroed) => "64 KiB zeroed",
            (Reach::Run, Fault::Random) => "64 KiB random",
            (Reach::Run, Fault::Stale) => "64 KiB stale",
            (Reach::Run, Fault::Unreadable) => "64 KiB unreadable",
        }
    }

    /// Every damage there is for a volume: each kind of region, each reach, each way.
    pub fn all(specimen: &Specimen) -> Vec<Cell> {
        const WAYS: [Fault; 5] = [Fault::Flipped, Fault::Zeroed, Fault::Random, Fault::Stale, Fault::Unreadable];
        let mut kinds: Vec<RegionKind> = specimen.layout.regions().iter().map(|region| region.kind).collect();
        kinds.sort_unstable();
        kinds.dedup();
        let mut cells = Vec::new();
        for target in kinds.into_iter().map(Target::Region) {
            cells.extend(WAYS.map(|fault| Cell { target, reach: Reach::Sector, fault }));
            cells.extend(WAYS[1..].iter().map(|&fault| Cell { target, reach: Reach::Run, fault }));
        }
        let tables = [Fault::Zeroed, Fault::Stale];
        cells.extend(tables.map(|fault| Cell { target: Target::Tables, reach: Reach::Sector, fault }));
        cells
    }
}

/// Damage to one volume.
#[derive(Clone, Debug)]
pub struct Damage {
    /// The bytes that are damaged.
    pub ranges: Vec<Range>,
    fault: Fault,
    /// A draw for what is random in it.
    word: u64,
    /// Which of the earlier contents stale bytes have.
    earlier: usize,
}

impl Damage {
    /// Damage to nothing.
    #[cfg(test)]
    pub fn none() -> Damage {
        Damage { ranges: Vec::new(), fault: Fault::Zeroed, word: 0, earlier: 0 }
    }

    /// Draws one; nothing where it would change nothing, such as an older content where there is none.
    pub fn draw(cell: Cell, specimen: &Specimen, random: &Random) -> Option<Damage> {
        let earlier = random.below(specimen.earlier.len() as u64) as usize;
        let ranges = match cell.target {
            Target::Tables => tables(specimen, random),
            Target::Region(kind) => {
                let regions = specimen.layout.regions();
                let regions: Vec<Region> = regions.into_iter().filter(|region| region.kind == kind).collect();
                let region = random.pick(&regions);
                let sector = sector(region, cell, earlier, specimen, random);
                vec![reach(sector, cell, specimen, random)]
            }
        };
        let damage = Damage { ranges, fault: cell.fault, word: random.word(), earlier };
        damage.changes(specimen).then_some(damage)
    }

    /// Whether what it hits cannot be read any more.
    pub fn is_unreadable(&self) -> bool {
        self.fault == Fault::Unreadable
    }

    /// Whether it is of the kind that puts back what was there before.
    pub fn is_stale(&self) -> bool {
        self.fault == Fault::Stale
    }

    fn changes(&self, specimen: &Specimen) -> bool {
        let differs = |range: &Range| {
            let (now, new) = (bytes(&specimen.image, *range), self.bytes(*range, specimen));
            new.is_none_or(|new| new != now)
        };
        !self.ranges.is_empty() && self.ranges.iter().any(differs)
    }

    /// What stands in the range afterwards; nothing for what cannot be read.
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
            Fault::Unreadable => return None,
        }
        Some(new)
    }

    /// Does it.
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

/// The sector of a region that is hit: any, one that is not blank, one that is in use, or one that was something else.
fn sector(region: &Region, cell: Cell, earlier: usize, specimen: &Specimen, random: &Random) -> u64 {
    let sector_bytes = u64::from(specimen.shape.sector_bytes);
    // A region may be smaller than a sector or begin within one: nothing smaller than a sector goes bad.
    let first = region.start / sector_bytes;
    let sectors = region.end.div_ceil(sector_bytes) - first;
    let range = |sector: u64| (sector * sector_bytes, (sector + 1) * sector_bytes);
    let any = first + random.below(sectors);
    let of_interest = |is: &dyn Fn(Range) -> bool| {
        let at = random.below(sectors);
        (0..sectors).map(|next| first + (at + next) % sectors).find(|sector| is(range(*sector)))
    };
    let hot = specimen.places.hot(region);
    if cell.fault == Fault::Stale {
        let before = &specimen.earlier[earlier];
        return of_interest(&|range| bytes(&specimen.image, range) != bytes(before, range)).unwrap_or(any);
    }
    match random.below(4) {
        0 => any,
        1 => of_interest(&|range| bytes(&specimen.image, range).iter().any(|byte| *byte != 0)).unwrap_or(any),
        _ if hot.is_empty() => any,
        _ => random.pick(hot) / sector_bytes,
    }
}

/// The bytes that are hit, given one sector that must be.
fn reach(sector: u64, cell: Cell, specimen: &Specimen, random: &Random) -> Range {
    let sector_bytes = u64::from(specimen.shape.sector_bytes);
    let end = specimen.layout.medium_bytes();
    let start = sector * sector_bytes;
    match (cell.reach, cell.fault) {
        (_, Fault::Flipped) => {
            let at = start + random.below(sector_bytes);
            (at, at + 1)
        }
        (Reach::Sector, _) => (start, start + sector_bytes),
        (Reach::Run, _) => {
            let back = random.below(RUN_BYTES / sector_bytes) * sector_bytes;
            let start = start.saturating_sub(back).min(end.saturating_sub(RUN_BYTES));
            (start, (start + RUN_BYTES).min(end))
        }
    }
}

/// The sectors of the map entry and the generation of one block, of every copy there is.
fn tables(specimen: &Specimen, random: &Random) -> Vec<Range> {
    let (layout, sector_bytes) = (&specimen.layout, u64::from(specimen.shape.sector_bytes));
    let written: Vec<_> = specimen.found.keys().filter(|lba| specimen.model.is_touched(**lba)).collect();
    if written.is_empty() {
        return Vec::new();
    }
    let lba = **random.pick(&written);
    let places = std::iter::once(layout.map_entry_offset(lba)).chain(layout.generation_offsets(lba));
    let sectors = places.map(|at| at / sector_bytes * sector_bytes);
    sectors.map(|start| (start, start + sector_bytes)).collect()
}
