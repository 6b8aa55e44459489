//! The records that an open must preserve: every sector with a good record of the volume must still have a good record
//! of the same volume afterwards.

use sealblock_block::ReservedArea;
use sealblock_media_volume::format::{
    Container, Generations, GroupMapSector, LogSector, Region, RegionKind, ReservedCopy, SUPERBLOCK_BYTES,
    SUPERBLOCK_OFFSETS, Superblock,
};

use crate::medium::Overlay;
use crate::parts::Part;
use crate::specimen::Specimen;

/// The place of a record, and how to recognise that it belongs to the volume.
enum Record {
    Superblock,
    Reserved(ReservedArea),
    Log,
    GroupMap(u64),
    Generations(u64),
}

/// A volume's own good records in their places.
pub struct Kept<'a> {
    parts: Vec<KeptPart<'a>>,
    /// The good superblocks of the container.
    container: Option<(&'a Container, Vec<u64>)>,
}

/// Those of a volume of version 2, by their offsets in it.
struct KeptPart<'a> {
    part: &'a Part,
    places: Vec<(u64, Record)>,
}

impl<'a> Kept<'a> {
    /// All places of an undamaged volume that still have a record after the damage.
    pub fn before(specimen: &'a Specimen, damaged: &Overlay) -> Kept<'a> {
        let of = |part: &'a Part| {
            let mut kept = KeptPart { part, places: Vec::new() };
            part.layout.regions().iter().for_each(|region| kept.take(region, damaged));
            kept
        };
        let container = specimen.container.as_ref().map(|container| {
            let copies = container.copy_offsets().into_iter();
            (container, copies.filter(|at| has_container(damaged, *at, container)).collect())
        });
        Kept { parts: specimen.parts.iter().map(of).collect(), container }
    }

    /// The places that no longer hold a record of the volume.
    pub fn lost(&self, after: &Overlay) -> Vec<u64> {
        let container = self
            .container
            .iter()
            .flat_map(|(container, copies)| copies.iter().copied().filter(|at| !has_container(after, *at, container)));
        self.parts.iter().flat_map(|kept| kept.lost(after)).chain(container).collect()
    }
}

/// True if a good superblock of the container is there.
fn has_container(medium: &Overlay, at: u64, container: &Container) -> bool {
    let mut bytes = [0; SUPERBLOCK_BYTES];
    medium.peek(at, &mut bytes);
    Container::decode(&bytes).is_ok_and(|found| found == *container)
}

impl KeptPart<'_> {
    fn take(&mut self, region: &Region, damaged: &Overlay) {
        let layout = &self.part.layout;
        let sector = u64::from(layout.sector_bytes());
        let mut add = |at: u64, record: Record| {
            if is_own(damaged, at, &record, self.part) {
                self.places.push((at, record));
            }
        };
        let sectors = (region.start..region.end).step_by(sector as usize);
        match region.kind {
            RegionKind::Superblock(_) => add(region.start, Record::Superblock),
            RegionKind::Log(_) => sectors.for_each(|at| add(at, Record::Log)),
            RegionKind::GroupMap(_) => sectors.zip(0..).for_each(|(at, index)| add(at, Record::GroupMap(index))),
            RegionKind::ReservedArea(_) => {
                let areas = ReservedArea::ALL.into_iter().flat_map(|area| [0, 1].map(|turn| (area, turn)));
                for (area, turn) in areas {
                    let places = layout.reserved_offsets(area, turn).into_iter();
                    places
                        .filter(|at| (region.start..region.end).contains(at))
                        .for_each(|at| add(at, Record::Reserved(area)));
                }
            }
            RegionKind::Generations(0) => {
                for group in 0..layout.block_groups() {
                    for page in layout.pages_of_group(group) {
                        let Some(place) = layout.page_offsets(page) else { continue };
                        for at in [place.offset, place.second_offset] {
                            if (region.start..region.end).contains(&place.offset) {
                                add(at, Record::Generations(place.first.get()));
                            }
                        }
                    }
                }
            }
            _ => {}
        }
    }

    fn lost(&self, after: &Overlay) -> impl Iterator<Item = u64> {
        let is_lost = |(at, record): &&(u64, Record)| !is_own(after, *at, record, self.part);
        self.places.iter().filter(is_lost).map(|(at, _)| self.part.at(*at))
    }
}

/// True if a good record of the volume is there.
fn is_own(medium: &Overlay, at: u64, record: &Record, part: &Part) -> bool {
    let (seed, layout) = (part.seed(), &part.layout);
    let length = match record {
        Record::Reserved(area) => area.max_bytes() + sealblock_media_volume::format::RESERVED_HEAD_BYTES,
        _ => layout.sector_bytes() as usize,
    };
    let mut bytes = vec![0; length];
    medium.peek(part.at(at), &mut bytes);
    match record {
        Record::Superblock => {
            let place = SUPERBLOCK_OFFSETS.contains(&at) || at == layout.third_offset();
            place && Superblock::decode(&bytes).is_ok_and(|found| found.uuid == part.uuid)
        }
        Record::Reserved(area) => ReservedCopy::decode(&bytes, *area, seed).is_some(),
        Record::Log => LogSector::decode(&bytes, seed).is_ok(),
        Record::GroupMap(index) => GroupMapSector::decode(&bytes, seed, *index).is_some(),
        Record::Generations(first) => {
            let first = sealblock_units::Lba::new(*first);
            Generations::decode(&bytes, seed, first, layout.page_blocks()).is_some()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::specimen::{Kind, State};

    #[test]
    fn a_record_that_is_overwritten_is_missed_and_one_that_is_written_anew_is_not() {
        let specimen = Specimen::make(6, State::Clean, Kind::Small).unwrap();
        let overlay = Overlay::new(&specimen.image, specimen.shape.sector_bytes, false);
        let kept = Kept::before(&specimen, &overlay);
        assert!(kept.parts[0].places.len() > 8 && kept.lost(&overlay).is_empty());
        let third = specimen.parts[0].layout.third_offset();
        overlay.poke(0, &specimen.image[third as usize..third as usize + 512]);
        assert_eq!(kept.lost(&overlay), [0; 0], "another copy of the same volume");
        overlay.poke(0, &specimen.foreign[..512]);
        assert_eq!(kept.lost(&overlay), [0]);
        let damaged = overlay.fork(false);
        assert_eq!(Kept::before(&specimen, &damaged).lost(&overlay), [0; 0], "what was not good is not missed");
    }

    #[test]
    fn a_superblock_of_the_container_and_a_log_sector_of_a_shard_are_missed_at_their_places() {
        let specimen = Specimen::make(6, State::Clean, Kind::Shards).unwrap();
        let overlay = Overlay::new(&specimen.image, specimen.shape.sector_bytes, false);
        let kept = Kept::before(&specimen, &overlay);
        let copies = specimen.container.unwrap().copy_offsets();
        let shard = &kept.parts[1];
        let log = shard.places.iter().find(|(_, record)| matches!(record, Record::Log)).unwrap().0;
        for at in [copies[1], shard.part.at(log)] {
            let damaged = overlay.fork(false);
            damaged.poke(at, &[0; 512]);
            assert_eq!(kept.lost(&damaged), [at]);
        }
    }
}
