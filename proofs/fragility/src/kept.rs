//! The records that an open must preserve: every sector with a good record of the volume must still have a good record
//! of the same volume afterwards.

use sealblock_block::ReservedArea;
use sealblock_media_volume::format::{
    Generations, GroupMapSector, Layout, LogSector, Region, RegionKind, ReservedCopy, SUPERBLOCK_OFFSETS, Seed,
    Superblock,
};

use crate::medium::Overlay;
use crate::specimen::Specimen;

/// The place of a record, and how to recognise that it belongs to the volume.
enum Record {
    Superblock,
    Reserved(ReservedArea),
    Log,
    GroupMap(u64),
    Generations(u64),
}

/// The volume's own good records in their places.
pub struct Kept {
    uuid: [u8; 16],
    layout: Layout,
    places: Vec<(u64, Record)>,
}

impl Kept {
    /// All places of an undamaged volume that still have a record after the damage.
    pub fn before(specimen: &Specimen, damaged: &Overlay) -> Kept {
        let mut kept = Kept { uuid: specimen.shape.uuid, layout: specimen.layout, places: Vec::new() };
        for region in specimen.layout.regions() {
            kept.take(&region, damaged);
        }
        kept
    }

    fn take(&mut self, region: &Region, damaged: &Overlay) {
        let sector = u64::from(self.layout.sector_bytes());
        let mut add = |at: u64, record: Record| {
            if is_own(damaged, at, &record, &self.uuid, &self.layout) {
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
                    let places = self.layout.reserved_offsets(area, turn).into_iter();
                    places
                        .filter(|at| (region.start..region.end).contains(at))
                        .for_each(|at| add(at, Record::Reserved(area)));
                }
            }
            RegionKind::Generations(0) => {
                for group in 0..self.layout.block_groups() {
                    for page in self.layout.pages_of_group(group) {
                        let Some(place) = self.layout.page_offsets(page) else { continue };
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

    /// The places that no longer hold a record of the volume.
    pub fn lost(&self, after: &Overlay) -> Vec<u64> {
        let is_lost = |(at, record): &&(u64, Record)| !is_own(after, *at, record, &self.uuid, &self.layout);
        self.places.iter().filter(is_lost).map(|(at, _)| *at).collect()
    }
}

/// True if a good record of the volume is there.
fn is_own(medium: &Overlay, at: u64, record: &Record, uuid: &[u8; 16], layout: &Layout) -> bool {
    let seed = Seed::of(uuid);
    let length = match record {
        Record::Reserved(area) => area.max_bytes() + sealblock_media_volume::format::RESERVED_HEAD_BYTES,
        _ => layout.sector_bytes() as usize,
    };
    let mut bytes = vec![0; length];
    medium.peek(at, &mut bytes);
    match record {
        Record::Superblock => {
            let place = SUPERBLOCK_OFFSETS.contains(&at) || at == layout.third_offset();
            place && Superblock::decode(&bytes).is_ok_and(|found| found.uuid == *uuid)
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
    use crate::specimen::State;

    #[test]
    fn a_record_that_is_overwritten_is_missed_and_one_that_is_written_anew_is_not() {
        let specimen = Specimen::make(6, State::Clean, false).unwrap();
        let overlay = Overlay::new(&specimen.image, specimen.shape.sector_bytes, false);
        let kept = Kept::before(&specimen, &overlay);
        assert!(kept.places.len() > 8 && kept.lost(&overlay).is_empty());
        let third = specimen.layout.third_offset();
        overlay.poke(0, &specimen.image[third as usize..third as usize + 512]);
        assert_eq!(kept.lost(&overlay), [0; 0], "another copy of the same volume");
        overlay.poke(0, &specimen.foreign[..512]);
        assert_eq!(kept.lost(&overlay), [0]);
        let damaged = overlay.fork(false);
        assert_eq!(Kept::before(&specimen, &damaged).lost(&overlay), [0; 0], "what was not good is not missed");
    }
}
