//! Which zones have tables: the zone map, read when the volume is opened and kept in memory.
//!
//! A zone gets its tables before the first record goes there, and keeps them. Until then every block of it was never written,
//! and its tables are not read, whatever lies there. The bit of a zone is set only when its generations are durable; its two
//! copies are written one after the other, with a sync between, so that one of them is whole at any time.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use sealblock_block::{Medium, MediumError, MediumErrorKind};

use crate::format::{Generations, Layout, Seed, Superblock, ZoneMapSector};
use crate::sectors::read_sectors;

/// Copies of the map.
const COPIES: u64 = 2;

/// Counts copies of metadata beside the superblocks that were found lost, or older than the other though nothing but a fault can
/// have left them so, since the volume was opened. They cost nothing while the other copy is there.
#[derive(Clone, Default, Debug)]
pub struct LostCopies(Rc<Cell<u64>>);

impl LostCopies {
    /// How many.
    pub fn count(&self) -> u64 {
        self.0.get()
    }

    pub(crate) fn add(&self, copies: u64) {
        self.0.set(self.0.get() + copies);
    }
}

/// Which zones have tables.
pub(crate) struct Zones {
    layout: Layout,
    seed: Seed,
    sectors: RefCell<Vec<ZoneMapSector>>,
    made: Cell<u64>,
    /// Sectors one of whose copies is lost or older than the other.
    to_mend: RefCell<Vec<u64>>,
    lost_copies: LostCopies,
    /// Some sector says that the volume was resized.
    tells_resized: bool,
    /// Sectors of which no copy is left.
    guessed: Vec<u64>,
}

impl Zones {
    /// The map of a new volume: no zone has tables.
    pub fn blank(layout: Layout, seed: Seed) -> Zones {
        let sectors = (0..layout.zone_map_sectors()).map(|index| blank_sector(&layout, index)).collect();
        Zones {
            layout,
            seed,
            sectors: RefCell::new(sectors),
            made: Cell::new(0),
            to_mend: RefCell::default(),
            lost_copies: LostCopies::default(),
            tells_resized: false,
            guessed: Vec::new(),
        }
    }

    /// Reads the map.
    ///
    /// # Errors
    /// When the medium fails as a whole. Sectors that are lost are no error: where both copies are, or all are from before the
    /// superblock, the zones in question are looked at. Where fewer are found than the superblock knows of, all in question have
    /// tables, so that none reads as never written.
    pub async fn read<M: Medium>(medium: &M, superblock: &Superblock) -> Result<Zones, MediumError> {
        let layout = superblock.layout;
        let mut zones = Zones::blank(layout, superblock.seed());
        let [first, second] = [zones.read_copy(medium, 0).await?, zones.read_copy(medium, 1).await?];
        let (mut doubtful, mut disputed) = (Vec::new(), Vec::new());
        for (index, copies) in (0_u64..).zip(first.into_iter().zip(second)) {
            let (newest, lost, is_behind) = match copies {
                (Some(a), Some(b)) if a == b => (Some(a), 0, false),
                (Some(a), Some(b)) if a.serial == b.serial => (Some(a.united_with(&b)), 0, true),
                (Some(a), Some(b)) => {
                    let [newer, older] = if b.serial > a.serial { [b, a] } else { [a, b] };
                    let first = index * layout.zone_map_sector_zones();
                    disputed
                        .extend(newer.denied_of(&older).map(|zone| first + zone).filter(|zone| *zone < layout.zones()));
                    (Some(newer), 0, true)
                }
                (Some(one), None) | (None, Some(one)) => (Some(one), 1, false),
                (None, None) => (None, 2, false),
            };
            zones.lost_copies.add(lost + u64::from(is_behind && superblock.clean));
            if lost > 0 || is_behind {
                zones.to_mend.get_mut().push(index);
            }
            match newest {
                Some(newest) => zones.adopt(newest),
                None => doubtful.push(index),
            }
        }
        zones.settle(medium, &disputed).await?;
        zones.guessed = doubtful.clone();
        if zones.made.get() < superblock.zones_made {
            doubtful = (0..layout.zone_map_sectors()).collect();
            zones.to_mend = RefCell::new(doubtful.clone());
        }
        zones.look(medium, &doubtful).await?;
        if zones.made.get() < superblock.zones_made {
            zones.take_for_made(&doubtful);
        }
        Ok(zones)
    }

    /// Takes a sector over, but for bits of zones that the volume does not have.
    fn adopt(&mut self, mut sector: ZoneMapSector) {
        let zones = self.layout.zones() - sector.index * self.layout.zone_map_sector_zones();
        self.tells_resized |= sector.resized;
        sector.resized = self.layout.is_resized();
        for (at, byte) in (0_u64..).zip(&mut sector.bits) {
            let bits = zones.saturating_sub(at * 8).min(8);
            *byte &= ((1_u16 << bits) - 1) as u8;
        }
        let index = sector.index as usize;
        self.sectors.get_mut()[index] = sector;
    }

    async fn read_copy<M: Medium>(&self, medium: &M, copy: u64) -> Result<Vec<Option<ZoneMapSector>>, MediumError> {
        let sector = self.layout.sector_bytes() as usize;
        let length = self.layout.zone_map_sectors() as usize * sector;
        let (bytes, _) = read_sectors(medium, self.layout.zone_map_offset(copy), length, sector).await?;
        let decode = |(index, bytes)| ZoneMapSector::decode(bytes, self.seed, index);
        Ok((0_u64..).zip(bytes.chunks_exact(sector)).map(decode).collect())
    }

    /// Finds the zones of these sectors by their generations: they were all written before the zone's bit was set.
    #[cold]
    async fn look<M: Medium>(&mut self, medium: &M, sectors: &[u64]) -> Result<(), MediumError> {
        for index in sectors {
            tracing::warn!(sector = index, "the zone map is lost or old here; zones are found by their tables");
            let first = index * self.layout.zone_map_sector_zones();
            for zone in first..(first + self.layout.zone_map_sector_zones()).min(self.layout.zones()) {
                if !self.has_tables(zone) && self.has_generations(medium, zone).await? {
                    self.set_bit(zone);
                }
            }
        }
        self.count();
        Ok(())
    }

    /// Has the tables decide of zones that an older copy of the map knows and the newer one denies. No fault but one does that: a copy
    /// put back from before the volume shrank, and what lay there then was wiped when it grew.
    async fn settle<M: Medium>(&mut self, medium: &M, disputed: &[u64]) -> Result<(), MediumError> {
        for &zone in disputed {
            if self.has_generations(medium, zone).await? {
                tracing::warn!(
                    zone,
                    "the newer copy of the zone map denies a zone whose tables are there; it is not believed"
                );
                self.set_bit(zone);
            }
        }
        self.count();
        Ok(())
    }

    /// Whether any generations of a zone are there. What cannot be read may be some: that is an error, since a zone without tables
    /// reads as never written.
    async fn has_generations<M: Medium>(&self, medium: &M, zone: u64) -> Result<bool, MediumError> {
        let sector = self.layout.sector_bytes() as usize;
        let pages = self.layout.pages_of_zone(zone);
        let places: Vec<_> = pages.filter_map(|number| self.layout.page_place(number)).collect();
        let Some(first) = places.first() else { return Ok(false) };
        let (bytes, missing) = read_sectors(medium, first.second_offset, places.len() * sector, sector).await?;
        let is_there = |bytes: &[u8], at: usize| {
            Generations::decode(bytes, self.seed, places[at].first, self.layout.page_blocks()).is_some()
        };
        if bytes.chunks_exact(sector).enumerate().any(|(at, bytes)| is_there(bytes, at)) {
            return Ok(true);
        }
        let (bytes, missing_first) = read_sectors(medium, first.offset, sector, sector).await?;
        if is_there(&bytes, 0) || (missing.is_empty() && missing_first.is_empty()) {
            return Ok(is_there(&bytes, 0));
        }
        let reason = "neither the map of zones nor the tables of a zone can be read".to_owned();
        Err(MediumError { kind: MediumErrorKind::Failed, doing: "read", offset_bytes: first.offset, reason })
    }

    /// Whether a zone has tables.
    pub fn has_tables(&self, zone: u64) -> bool {
        let per_sector = self.layout.zone_map_sector_zones();
        let sectors = self.sectors.borrow();
        let bit = (zone % per_sector) as usize;
        sectors.get((zone / per_sector) as usize).is_some_and(|sector| sector.bits[bit / 8] >> (bit % 8) & 1 == 1)
    }

    /// How many zones have tables.
    pub fn made(&self) -> u64 {
        self.made.get()
    }

    /// Where lost copies are counted.
    pub fn lost_copies(&self) -> LostCopies {
        self.lost_copies.clone()
    }

    /// Whether the map says that the volume was resized.
    pub fn tells_resized(&self) -> bool {
        self.tells_resized
    }

    /// Takes every zone of sectors that are lost for one that has tables: without a superblock nobody knows that a zone whose
    /// tables are not where they would be has none.
    pub fn doubt(&self) {
        self.take_for_made(&self.guessed);
    }

    /// Takes every zone of these sectors for one that has tables: it is known that some have, and not which, so that none may read as
    /// never written.
    fn take_for_made(&self, sectors: &[u64]) {
        for index in sectors {
            let first = index * self.layout.zone_map_sector_zones();
            let end = (first + self.layout.zone_map_sector_zones()).min(self.layout.zones());
            (first..end).for_each(|zone| self.set_bit(zone));
        }
        self.count();
    }

    /// How many zones below `end` have tables.
    pub fn made_below(&self, end: u64) -> u64 {
        (0..end.min(self.layout.zones())).filter(|zone| self.has_tables(*zone)).count() as u64
    }

    fn set_bit(&self, zone: u64) {
        let per_sector = self.layout.zone_map_sector_zones();
        let bit = (zone % per_sector) as usize;
        self.sectors.borrow_mut()[(zone / per_sector) as usize].bits[bit / 8] |= 1 << (bit % 8);
    }

    fn count(&self) {
        let sectors = self.sectors.borrow();
        let ones = |sector: &ZoneMapSector| sector.bits.iter().map(|byte| u64::from(byte.count_ones())).sum::<u64>();
        self.made.set(sectors.iter().map(ones).sum());
    }

    /// Says of zones, in order, that they have tables, once their generations are durable; durable in the end.
    ///
    /// # Errors
    /// When the medium fails. Whether the map says so then is not known; the zones' tables are as they were made either way.
    pub async fn set<M: Medium>(&self, medium: &M, zones: &[u64]) -> Result<(), MediumError> {
        let per_sector = self.layout.zone_map_sector_zones();
        let mut sectors: Vec<u64> = zones.iter().map(|zone| zone / per_sector).collect();
        sectors.dedup();
        self.rewrite(medium, &sectors, zones).await
    }

    /// Writes the sectors anew that were not there twice, of a volume opened for writing; durable in the end.
    ///
    /// # Errors
    /// When the medium fails.
    pub async fn mend<M: Medium>(&self, medium: &M) -> Result<(), MediumError> {
        let sectors = self.to_mend.borrow().clone();
        if sectors.is_empty() { Ok(()) } else { self.rewrite(medium, &sectors, &[]).await }
    }

    /// Writes sectors with the bits that they have and those of `zones`.
    async fn rewrite<M: Medium>(&self, medium: &M, sectors: &[u64], zones: &[u64]) -> Result<(), MediumError> {
        let per_sector = self.layout.zone_map_sector_zones();
        let image = |index: &u64| {
            let mut sector = self.sectors.borrow()[*index as usize].clone();
            sector.serial += 1;
            for zone in zones.iter().filter(|zone| **zone / per_sector == *index) {
                let bit = (zone % per_sector) as usize;
                sector.bits[bit / 8] |= 1 << (bit % 8);
            }
            sector
        };
        let images: Vec<ZoneMapSector> = sectors.iter().map(image).collect();
        for copy in 0..COPIES {
            self.write_copy(medium, copy, &images).await?;
            medium.sync().await?;
        }
        for image in images {
            self.to_mend.borrow_mut().retain(|index| *index != image.index);
            let index = image.index as usize;
            self.sectors.borrow_mut()[index] = image;
        }
        self.count();
        Ok(())
    }

    async fn write_copy<M: Medium>(&self, medium: &M, copy: u64, images: &[ZoneMapSector]) -> Result<(), MediumError> {
        let bytes = self.layout.sector_bytes() as usize;
        for image in images {
            let mut buffer = medium.buffer(bytes);
            image.encode(&mut buffer, self.seed);
            let offset = self.layout.zone_map_offset(copy) + image.index * bytes as u64;
            medium.write(offset, buffer.freeze()).await?;
        }
        Ok(())
    }

    /// Writes the whole map for a layout with more or fewer zones, or for the same once more: with the bits that there are, and none
    /// for zones that come, whatever an earlier size has left there. Durable in the end, each copy at its time.
    ///
    /// # Errors
    /// When the medium fails. The map says the same of the zones that were there either way.
    pub async fn relay<M: Medium>(&self, medium: &M, to: Layout, resized: bool) -> Result<(), MediumError> {
        let (here, there) = (self.layout.zone_map_sectors(), to.zone_map_sectors());
        let wide = if there > here { to } else { self.layout };
        let old = Zones::blank(wide, self.seed);
        let [first, second] = [old.read_copy(medium, 0).await?, old.read_copy(medium, 1).await?];
        let serial = |copy: &[Option<ZoneMapSector>], index: usize| copy[index].as_ref().map_or(0, |copy| copy.serial);
        let images: Vec<ZoneMapSector> = (0..wide.zone_map_sectors())
            .map(|index| {
                let known = self.sectors.borrow().get(index as usize).cloned();
                // Higher than whatever lies there, so that it never counts again.
                let [a, b] = [&first, &second].map(|copy| serial(copy, index as usize));
                ZoneMapSector { serial: a.max(b) + 1, resized, ..known.unwrap_or_else(|| blank_sector(&wide, index)) }
            })
            .collect();
        for copy in 0..COPIES {
            self.write_copy(medium, copy, &images).await?;
            medium.sync().await?;
        }
        Ok(())
    }

    /// Writes both copies of every sector of the map of a new volume; durable after the next sync.
    ///
    /// # Errors
    /// When the medium fails.
    pub async fn create<M: Medium>(&self, medium: &M) -> Result<(), MediumError> {
        let images = self.sectors.borrow().clone();
        for copy in 0..COPIES {
            self.write_copy(medium, copy, &images).await?;
        }
        Ok(())
    }
}

fn blank_sector(layout: &Layout, index: u64) -> ZoneMapSector {
    let bits = vec![0; (layout.zone_map_sector_zones() / 8) as usize];
    ZoneMapSector { index, serial: 0, bits, resized: layout.is_resized() }
}
