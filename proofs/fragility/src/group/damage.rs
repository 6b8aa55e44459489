//! Damage to the records of a group's members: which record, which members, and the new content.

use std::fmt;
use std::rc::Rc;

use sealblock_block::ReservedArea;
use sealblock_media_volume::format::{Layout, RESERVED_HEAD_BYTES, RegionKind};
use sealblock_runtime_memory::Slice;
use sealblock_simulator::random::Random;

use crate::damage::Reach;
use crate::group::open::{Media, read_record, write_record};
use crate::group::shape::{Kind, on_machine};
use crate::group::specimen::GroupSpecimen;
use crate::medium::Overlay;
use crate::parts::Range;

/// Bytes of a long run.
const RUN_BYTES: u64 = 64 << 10;

/// The damaged part of a member.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum What {
    /// The bytes of its label on the medium.
    LabelBytes,
    /// The bytes of its superblocks.
    Superblock,
    /// The bytes of its log.
    Log,
    /// The bytes of its superblocks and of its log.
    SuperblockAndLog,
    /// The bytes of its block group map.
    GroupMap,
    /// Its label, replaced by a record that is valid on this member.
    Label,
    /// The whole member: another device is in its place.
    Device,
}

/// The new content.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum NewContent {
    /// Its content at an earlier time.
    Stale,
    /// The content of a member of another group of the same shape.
    Foreign,
    /// The content of a volume that was in no group.
    Blank,
    /// The content of another member of the same group.
    Sibling,
    /// Zeroes.
    Zeroes,
    /// Random bytes.
    Noise,
    /// Unreadable.
    Unreadable,
}

/// The damaged members.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum On {
    /// One member, chosen at random.
    One,
    /// The second volume of a replica.
    Second,
    /// All.
    Every,
}

/// A kind of damage.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Cell {
    /// The part.
    pub what: What,
    /// The size.
    pub reach: Reach,
    /// The new content.
    pub content: NewContent,
    /// The members.
    pub on: On,
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            What::LabelBytes => "bytes of the label",
            What::Superblock => "superblock",
            What::Log => "log",
            What::SuperblockAndLog => "superblock and log",
            What::GroupMap => "block group map",
            What::Label => "label",
            What::Device => "device",
        })
    }
}

impl fmt::Display for On {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            On::One => "one member",
            On::Second => "second member of a member",
            On::Every => "every member",
        })
    }
}

impl fmt::Display for NewContent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            NewContent::Stale => "of before",
            NewContent::Foreign => "of another group",
            NewContent::Blank => "of a blank volume",
            NewContent::Sibling => "of another member",
            NewContent::Zeroes => "zeroed",
            NewContent::Noise => "random",
            NewContent::Unreadable => "unreadable",
        })
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Cell { what, reach, content, on } = self;
        match what {
            What::Label | What::Device => write!(f, "{what} {content}, {on}"),
            _ => write!(f, "{what}, {} {content}, {on}", reach.name()),
        }
    }
}

impl Cell {
    /// Every kind of damage of a group.
    pub fn all(kind: Kind) -> Vec<Cell> {
        use NewContent::{Blank, Foreign, Noise, Sibling, Stale, Unreadable, Zeroes};
        let some = [On::One, On::Every];
        let second = if kind == Kind::MirrorOfStripe { &[On::Second][..] } else { &[] };
        let mut cells = Vec::new();
        let mut add = |what, reach, ways: &[NewContent], on: On| {
            cells.extend(ways.iter().map(|&content| Cell { what, reach, content, on }));
        };
        for on in some.iter().chain(second) {
            for what in [What::LabelBytes, What::Superblock, What::Log, What::GroupMap] {
                for reach in [Reach::Sector, Reach::Run] {
                    add(what, reach, &[Stale, Foreign, Blank, Sibling, Zeroes, Noise, Unreadable], *on);
                }
                for reach in [Reach::Region, Reach::Copies] {
                    add(what, reach, &[Stale, Foreign, Blank, Sibling, Zeroes, Unreadable], *on);
                }
            }
            add(What::SuperblockAndLog, Reach::Copies, &[Stale], *on);
            add(What::Label, Reach::Copies, &[Stale, Foreign, Blank, Sibling], *on);
            // Excluded for all members together, because the result is another valid group: all of another group, all
            // blank, or all from an earlier state.
            let ways: &[NewContent] = if *on == On::Every { &[Sibling] } else { &[Stale, Foreign, Blank, Sibling] };
            add(What::Device, Reach::Copies, ways, *on);
        }
        cells
    }
}

/// The change of one member.
#[derive(Clone)]
enum Change {
    Bytes(Vec<Range>),
    Record(Slice),
    Device,
}

/// Damage to one group.
#[derive(Clone)]
pub struct Damage {
    /// Its kind.
    pub cell: Cell,
    changes: Vec<(usize, Change)>,
    /// The index of the earlier state that is restored.
    pub earlier: usize,
    word: u64,
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let members: Vec<usize> = self.members().collect();
        write!(f, "members {members:?}, state before {}", self.earlier)?;
        self.changes.iter().try_for_each(|(_, change)| match change {
            Change::Bytes(ranges) => write!(f, ", bytes {ranges:?}"),
            _ => Ok(()),
        })
    }
}

impl Damage {
    /// Damage to nothing.
    #[cfg(test)]
    pub fn none(cell: Cell) -> Damage {
        Damage { cell, changes: Vec::new(), earlier: 0, word: 0 }
    }

    /// Chooses damage at random; `None` if it would change nothing.
    pub fn draw(cell: Cell, specimen: &GroupSpecimen, random: &Random) -> Option<Damage> {
        let volumes = specimen.images.len();
        let members = match cell.on {
            On::One => {
                let one = random.below(volumes as u64) as usize;
                one..one + 1
            }
            On::Second => 1..2,
            On::Every => 0..volumes,
        };
        let earlier = random.below(specimen.earlier.len() as u64) as usize;
        let mut damage = Damage { cell, changes: Vec::new(), earlier, word: random.word() };
        for member in members {
            let change = damage.draw_on(member, specimen, random);
            damage.changes.extend(change.map(|change| (member, change)));
        }
        (!damage.changes.is_empty()).then_some(damage)
    }

    /// The change of this member; `None` if it changes nothing.
    fn draw_on(&self, member: usize, specimen: &GroupSpecimen, random: &Random) -> Option<Change> {
        let now = &specimen.images[member];
        match self.cell.what {
            What::Device => (self.source(member, specimen)? != &now[..]).then_some(Change::Device),
            What::Label => {
                let (own, other) = (record_of(now, specimen)?, self.record(member, specimen)?);
                (own[..] != other[..]).then_some(Change::Record(other))
            }
            _ => {
                let ranges = self.ranges(member, specimen, random);
                let differs = |range: &Range| {
                    let place = range.0 as usize..range.1 as usize;
                    self.bytes(member, *range, specimen).is_none_or(|new| new[..] != now[place])
                };
                ranges.iter().any(differs).then_some(Change::Bytes(ranges))
            }
        }
    }

    /// The new bytes of a whole member.
    fn source<'a>(&self, member: usize, specimen: &'a GroupSpecimen) -> Option<&'a [u8]> {
        match self.cell.content {
            NewContent::Stale => Some(&specimen.earlier[self.earlier][member]),
            NewContent::Foreign => Some(&specimen.foreign[member]),
            NewContent::Blank => Some(&specimen.blank[member]),
            NewContent::Sibling => {
                let (images, length) = (&specimen.images, specimen.images[member].len());
                let others = (1..images.len()).map(|next| (member + next) % images.len());
                others.map(|other| &images[other]).find(|image| image.len() == length).map(|image| &image[..])
            }
            NewContent::Zeroes | NewContent::Noise | NewContent::Unreadable => None,
        }
    }

    /// The replacement label.
    fn record(&self, member: usize, specimen: &GroupSpecimen) -> Option<Slice> {
        match self.cell.content {
            NewContent::Blank => Some(Slice::copy_from(&[])),
            _ => record_of(&Rc::new(self.source(member, specimen)?.to_vec()), specimen),
        }
    }

    fn ranges(&self, member: usize, specimen: &GroupSpecimen, random: &Random) -> Vec<Range> {
        let layout = specimen.shape.layout(member);
        let (regions, sector_bytes) = (regions_of(&layout, self.cell.what), u64::from(layout.sector_bytes()));
        let region = *random.pick(&regions);
        match self.cell.reach {
            Reach::Copies => regions,
            Reach::Region => vec![region],
            Reach::Sector | Reach::Run => {
                let sectors = (region.1 - region.0) / sector_bytes;
                let now = &specimen.images[member];
                let of = |sector: u64| (region.0 + sector * sector_bytes, region.0 + (sector + 1) * sector_bytes);
                let differs = |sector: &u64| {
                    let range = of(*sector);
                    let place = range.0 as usize..range.1 as usize;
                    self.bytes(member, range, specimen).is_none_or(|new| new[..] != now[place])
                };
                let first = random.below(sectors);
                let hit = (0..sectors).map(|next| (first + next) % sectors).find(differs).unwrap_or(first);
                let (start, end) = of(hit);
                if self.cell.reach == Reach::Sector {
                    return vec![(start, end)];
                }
                let back = random.below(RUN_BYTES / sector_bytes) * sector_bytes;
                let start = start.saturating_sub(back).min(layout.medium_bytes().saturating_sub(RUN_BYTES));
                vec![(start, (start + RUN_BYTES).min(layout.medium_bytes()))]
            }
        }
    }

    /// The new content of a range; `None` for unreadable bytes.
    fn bytes(&self, member: usize, range: Range, specimen: &GroupSpecimen) -> Option<Vec<u8>> {
        let place = range.0 as usize..range.1 as usize;
        match self.cell.content {
            NewContent::Unreadable => None,
            NewContent::Noise => {
                let (mut bytes, noise) = (vec![0; place.len()], Random::new(self.word ^ range.0));
                bytes.chunks_mut(8).for_each(|part| part.copy_from_slice(&noise.word().to_le_bytes()[..part.len()]));
                Some(bytes)
            }
            NewContent::Zeroes => Some(vec![0; place.len()]),
            _ => {
                let source = self.source(member, specimen).unwrap_or(&specimen.images[member]);
                Some(source[place].to_vec())
            }
        }
    }

    /// The members that it changes.
    pub fn members(&self) -> impl Iterator<Item = usize> + '_ {
        self.changes.iter().map(|(member, _)| *member)
    }

    /// True if it changes bytes of regions of this kind.
    pub fn meets(&self, specimen: &GroupSpecimen, is_it: impl Fn(RegionKind) -> bool) -> bool {
        self.changes.iter().any(|(member, change)| {
            let Change::Bytes(hits) = change else { return false };
            let regions = specimen.shape.layout(*member).regions().into_iter().filter(|region| is_it(region.kind));
            regions.into_iter().any(|region| hits.iter().any(|hit| hit.0 < region.end && region.start < hit.1))
        })
    }

    /// Applies the damage; returns the members after it.
    pub fn inflict(&self, specimen: &GroupSpecimen) -> Media {
        let sector_bytes = specimen.shape.sector_bytes;
        let of = |image: &Rc<Vec<u8>>| Overlay::new(image, sector_bytes, false);
        let mut media: Media = specimen.images.iter().map(of).collect();
        for (member, change) in &self.changes {
            let overlay = &media[*member];
            match change {
                Change::Bytes(ranges) => {
                    for range in ranges {
                        match self.bytes(*member, *range, specimen) {
                            Some(new) => overlay.poke(range.0, &new),
                            None => overlay.spoil(range.0, range.1),
                        }
                    }
                }
                Change::Record(bytes) => {
                    let (overlay, bytes) = (overlay.clone(), bytes.clone());
                    let write = on_machine(&Random::new(self.word), false, |machine| async move {
                        write_record(&overlay, ReservedArea::GroupLabel, bytes, &machine).await
                    });
                    write.expect("an undamaged member takes a label");
                }
                Change::Device => {
                    let source = self.source(*member, specimen).unwrap_or(&specimen.images[*member]);
                    media[*member] = of(&Rc::new(source.to_vec()));
                }
            }
        }
        media
    }
}

/// The label of a member with these bytes.
fn record_of(image: &Rc<Vec<u8>>, specimen: &GroupSpecimen) -> Option<Slice> {
    let overlay = Overlay::new(image, specimen.shape.sector_bytes, true);
    let read = on_machine(&Random::new(3), true, |machine| async move {
        read_record(&overlay, ReservedArea::GroupLabel, &machine).await
    });
    read.ok()
}

/// The places of the damaged part on a member, each copy separately.
fn regions_of(layout: &Layout, what: What) -> Vec<Range> {
    let sector = u64::from(layout.sector_bytes());
    if what == What::LabelBytes {
        let length = (RESERVED_HEAD_BYTES + ReservedArea::GroupLabel.max_bytes()) as u64;
        let copies = [0, 1].into_iter().flat_map(|turn| layout.reserved_offsets(ReservedArea::GroupLabel, turn));
        return copies.map(|start| (start, start + length)).collect();
    }
    let is_it = |kind: RegionKind| match what {
        What::Superblock => matches!(kind, RegionKind::Superblock(_)),
        What::Log => matches!(kind, RegionKind::Log(_)),
        What::SuperblockAndLog => matches!(kind, RegionKind::Superblock(_) | RegionKind::Log(_)),
        What::GroupMap => matches!(kind, RegionKind::GroupMap(_)),
        What::LabelBytes | What::Label | What::Device => false,
    };
    let regions = layout.regions().into_iter().filter(|region| is_it(region.kind));
    regions.map(|region| (region.start / sector * sector, region.end.next_multiple_of(sector))).collect()
}
