//! Records and generations as they are on the medium, in pages, with those in use kept in memory.
//!
//! A page holds only what is durable in the log or was read from the medium, so it may be written back at any time. The
//! number of pages kept is bounded; pages that differ from the medium stay until a checkpoint has written them.
//!
//! A page of which the medium does not give every sector is for readers alone, who meet damage on the blocks whose records
//! were there. It is never changed and never written back: the sector may well be readable the next time.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use futures_util::future::join;
use rustc_hash::{FxHashMap, FxHashSet};
use sealblock_block::{Event, Medium, MediumError, MediumErrorKind};
use sealblock_runtime_memory::Buffer;
use sealblock_units::Lba;

use crate::format::{Layout, RECORD_BYTES, Record, RecordError, Seed};

/// Sectors that hold a page's records, whatever the size of a sector.
const RECORD_SECTORS: u32 = 16;
/// Pages looked at for one to drop whenever one is read. A commit may make more pages dirty than the limit allows; looking
/// at all of them for each further page would take time quadratic in their number.
const LOOKS_PER_PAGE: usize = 32;
/// The dirty bit of the sector with the generations.
const GENERATIONS_DIRTY: u32 = 1 << RECORD_SECTORS;

/// The records and generations of a run of blocks.
pub(crate) struct Page {
    records: RefCell<Vec<[u8; RECORD_BYTES]>>,
    generations: RefCell<Vec<u16>>,
    dirty: Cell<u32>,
    /// The sectors that could not be read, by their dirty bits.
    unreadable: u32,
    touched: Cell<bool>,
}

/// What the tables say of a block.
pub(crate) enum Entry {
    /// A good record.
    Record(Record),
    /// Never written: reads as zeroes.
    Blank,
    /// The record is of another write than the one the generations know of.
    Stale {
        /// The record as it stands.
        record: Record,
        /// The generation it should have; 0 for none.
        expected: u16,
    },
    /// The record does not check, or is about another block.
    Damaged([u8; RECORD_BYTES]),
    /// The sector with the record, or the one with the generations, cannot be read.
    Unreadable,
}

impl Page {
    /// What the page says of the block with this index in it, whose address is `lba`.
    pub fn entry(&self, index: usize, lba: Lba, seed: Seed) -> Entry {
        self.touched.set(true);
        if self.unreadable != 0 && self.unreadable & self.sectors_of(index) != 0 {
            return Entry::Unreadable;
        }
        let bytes = &self.records.borrow()[index];
        let generation = self.generations.borrow()[index];
        match Record::decode(bytes, seed) {
            Ok(record) if record.lba != lba => Entry::Damaged(*bytes),
            Ok(record) if record.generation != generation => Entry::Stale { record, expected: generation },
            Ok(record) => Entry::Record(record),
            Err(RecordError::Blank) if generation == 0 => Entry::Blank,
            Err(_) => Entry::Damaged(*bytes),
        }
    }

    /// Puts these bytes and this generation into the page, right or wrong.
    pub fn set_raw(&self, index: usize, bytes: [u8; RECORD_BYTES], generation: u16) {
        self.records.borrow_mut()[index] = bytes;
        self.generations.borrow_mut()[index] = generation;
        self.dirty.set(self.dirty.get() | self.sectors_of(index));
    }

    /// The dirty bits of the sectors with the record and the generation of a block.
    fn sectors_of(&self, index: usize) -> u32 {
        let per_sector = self.records.borrow().len() / RECORD_SECTORS as usize;
        1 << (index / per_sector) | GENERATIONS_DIRTY
    }

    /// The stored bytes and generation of a block.
    pub fn raw(&self, index: usize) -> ([u8; RECORD_BYTES], u16) {
        (self.records.borrow()[index], self.generations.borrow()[index])
    }
}

/// Where a page lies on the medium.
struct Place {
    records_offset: u64,
    generations_offset: u64,
}

/// The tables of a volume.
pub(crate) struct Table {
    layout: Layout,
    pages: RefCell<FxHashMap<u64, Rc<Page>>>,
    order: RefCell<VecDeque<u64>>,
    loading: RefCell<FxHashSet<u64>>,
    loaded: Event,
    dirty: RefCell<FxHashSet<u64>>,
    limit_pages: usize,
}

/// Takes a page off the list of those being loaded, also when the load is dropped half-way.
struct Loading<'a>(&'a Table, u64);

impl Drop for Loading<'_> {
    fn drop(&mut self) {
        self.0.loading.borrow_mut().remove(&self.1);
        self.0.loaded.notify();
    }
}

impl Table {
    /// The tables of a volume laid out like this, of which about `cache_bytes` are kept in memory.
    pub fn new(layout: Layout, cache_bytes: usize) -> Table {
        let page_bytes = (layout.page_records_bytes() + u64::from(layout.sector_bytes())) as usize;
        Table {
            layout,
            pages: RefCell::default(),
            order: RefCell::default(),
            loading: RefCell::default(),
            loaded: Event::default(),
            dirty: RefCell::default(),
            limit_pages: (cache_bytes / page_bytes).max(8),
        }
    }

    /// The page of a block, and the block's index in it.
    pub fn locate(&self, lba: Lba) -> (u64, usize) {
        let per_page = self.layout.page_blocks();
        (lba.get() / per_page, (lba.get() % per_page) as usize)
    }

    /// A page that is in memory.
    pub fn cached(&self, number: u64) -> Option<Rc<Page>> {
        self.pages.borrow().get(&number).cloned()
    }

    /// A page of which every sector is there, read from the medium if need be.
    ///
    /// # Errors
    /// What the medium said of a sector that it does not give.
    pub async fn page<M: Medium>(&self, medium: &M, number: u64) -> Result<Rc<Page>, MediumError> {
        self.retry(number);
        let page = self.page_to_read(medium, number).await?;
        match page.unreadable {
            0 => Ok(page),
            _ => Err(self.unreadable(number)),
        }
    }

    /// Has the medium asked once more for a page of which it did not give every sector.
    pub fn retry(&self, number: u64) {
        let mut pages = self.pages.borrow_mut();
        if pages.get(&number).is_some_and(|page| page.unreadable != 0) {
            pages.remove(&number);
        }
    }

    /// A page as far as the medium gives it; two that want the same page read it once.
    pub async fn page_to_read<M: Medium>(&self, medium: &M, number: u64) -> Result<Rc<Page>, MediumError> {
        loop {
            if let Some(page) = self.cached(number) {
                return Ok(page);
            }
            if self.loading.borrow_mut().insert(number) {
                let _loading = Loading(self, number);
                let page = Rc::new(self.read(medium, number).await?);
                self.keep(number, &page);
                return Ok(page);
            }
            self.loaded.until(|| !self.loading.borrow().contains(&number)).await;
        }
    }

    fn place(&self, number: u64) -> Place {
        let first = Lba::new(number * self.layout.page_blocks());
        let zone = self.layout.zone(self.layout.zone_of(first)).expect("pages are asked for blocks of the volume");
        let within = (first.get() - zone.first.get()) / self.layout.page_blocks();
        Place {
            records_offset: zone.records_offset + within * self.layout.page_records_bytes(),
            generations_offset: zone.generations_offset + within * u64::from(self.layout.sector_bytes()),
        }
    }

    async fn read<M: Medium>(&self, medium: &M, number: u64) -> Result<Page, MediumError> {
        let place = self.place(number);
        let (records, generations) = join(
            medium.read(place.records_offset, medium.buffer(self.layout.page_records_bytes() as usize)),
            medium.read(place.generations_offset, medium.buffer(self.layout.sector_bytes() as usize)),
        )
        .await;
        let ((read_records, mut records), (read_generations, mut generations)) = (records, generations);
        let mut unreadable = 0;
        if let Err(error) = read_records {
            unreadable |= self.read_sectors(medium, place.records_offset, &mut records, error).await?;
        }
        if let Err(error) = read_generations {
            let missing = self.read_sectors(medium, place.generations_offset, &mut generations, error).await?;
            unreadable |= if missing == 0 { 0 } else { GENERATIONS_DIRTY };
        }
        if unreadable != 0 {
            tracing::warn!(
                page = number,
                "sectors of the tables cannot be read; the blocks whose records lie there are lost"
            );
        }
        let pairs = generations.as_chunks::<2>().0;
        Ok(Page {
            unreadable,
            records: RefCell::new(records.as_chunks::<RECORD_BYTES>().0.to_vec()),
            generations: RefCell::new(pairs.iter().map(|pair| u16::from_le_bytes(*pair)).collect()),
            dirty: Cell::new(0),
            touched: Cell::new(true),
        })
    }

    /// Reads sector by sector what could not be read as a whole; a bit for each that is not there.
    #[cold]
    async fn read_sectors<M: Medium>(
        &self,
        medium: &M,
        offset: u64,
        into: &mut Buffer,
        error: MediumError,
    ) -> Result<u32, MediumError> {
        let passes = |error: &MediumError| matches!(error.kind, MediumErrorKind::Failed | MediumErrorKind::PastEnd);
        if !passes(&error) {
            return Err(error);
        }
        let sector = self.layout.sector_bytes() as usize;
        let mut missing = 0;
        for (at, part) in into.chunks_exact_mut(sector).enumerate() {
            let (result, bytes) = medium.read(offset + (at * sector) as u64, medium.buffer(sector)).await;
            match result {
                Ok(()) => part.copy_from_slice(&bytes),
                Err(error) if passes(&error) => {
                    part.fill(0);
                    missing |= 1 << at;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(missing)
    }

    /// Why a page cannot be changed.
    #[cold]
    fn unreadable(&self, number: u64) -> MediumError {
        let reason = "a sector of the tables cannot be read".to_owned();
        let offset_bytes = self.place(number).records_offset;
        MediumError { kind: MediumErrorKind::Failed, doing: "read", offset_bytes, reason }
    }

    fn keep(&self, number: u64, page: &Rc<Page>) {
        self.pages.borrow_mut().insert(number, page.clone());
        self.order.borrow_mut().push_back(number);
        self.evict();
    }

    /// Drops pages over the limit that are as on the medium and that nobody holds, those untouched longest first.
    fn evict(&self) {
        let (mut pages, mut order) = (self.pages.borrow_mut(), self.order.borrow_mut());
        let mut looks = LOOKS_PER_PAGE;
        while pages.len() > self.limit_pages && looks > 0 {
            looks -= 1;
            let Some(number) = order.pop_front() else { return };
            let Some(page) = pages.get(&number) else { continue };
            if page.touched.replace(false) || page.dirty.get() != 0 || Rc::strong_count(page) > 1 {
                order.push_back(number);
            } else {
                pages.remove(&number);
            }
        }
    }

    /// Notes that a page differs from the medium.
    pub fn mark_dirty(&self, number: u64) {
        self.dirty.borrow_mut().insert(number);
    }

    /// Whether so many pages differ from the medium that a checkpoint is due.
    pub fn crowded(&self) -> bool {
        self.dirty.borrow().len() * 4 > self.limit_pages * 3
    }

    /// The pages that differ from the medium, in order.
    pub fn dirty_pages(&self) -> Vec<u64> {
        let mut numbers: Vec<u64> = self.dirty.borrow().iter().copied().collect();
        numbers.sort_unstable();
        numbers
    }

    /// Writes the sectors of a page that differ from the medium. The write is durable after the next sync.
    pub async fn write_back<M: Medium>(&self, medium: &M, number: u64) -> Result<(), MediumError> {
        let Some(page) = self.cached(number) else { return Ok(()) };
        let dirty = page.dirty.replace(0);
        self.dirty.borrow_mut().remove(&number);
        let result = self.write_sectors(medium, number, &page, dirty).await;
        if result.is_err() {
            page.dirty.set(page.dirty.get() | dirty);
            self.mark_dirty(number);
        }
        result
    }

    async fn write_sectors<M: Medium>(
        &self,
        medium: &M,
        number: u64,
        page: &Page,
        dirty: u32,
    ) -> Result<(), MediumError> {
        let sector = self.layout.sector_bytes() as usize;
        let place = self.place(number);
        let mut at = 0;
        while at < RECORD_SECTORS {
            let run = (!(dirty >> at)).trailing_zeros().min(RECORD_SECTORS - at);
            if run == 0 {
                at += 1;
                continue;
            }
            let mut buffer = medium.buffer(run as usize * sector);
            {
                let records = page.records.borrow();
                let bytes = records.as_flattened();
                buffer.copy_from_slice(&bytes[at as usize * sector..(at + run) as usize * sector]);
            }
            medium.write(place.records_offset + u64::from(at) * sector as u64, buffer.freeze()).await?;
            at += run;
        }
        if dirty & GENERATIONS_DIRTY != 0 {
            let mut buffer = medium.buffer(sector);
            let generations = page.generations.borrow().clone();
            buffer.as_chunks_mut::<2>().0.iter_mut().zip(generations).for_each(|(to, from)| *to = from.to_le_bytes());
            medium.write(place.generations_offset, buffer.freeze()).await?;
        }
        Ok(())
    }
}
