//! The writes and syncs of each scheme.
//!
//! A file holds, one behind the other: the data with 1/16 of spare units, tags (32 bytes a block), and a log. Everything
//! that a scheme may put off it does put off: tags that are known from elsewhere are gathered in memory and written once
//! per sector.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use anyhow::Context;
use fastrand::Rng;
use futures_util::future::try_join_all;
use sealblock_block::Medium;
use sealblock_media_file::FileMedium;
use sealblock_runtime_memory::Slice;
use sealblock_runtime_reactor::spawn;

use crate::load::{Load, Sample, Stopwatch, payload};
use crate::options::FileOptions;
use crate::setup::{self, Prepared, Scratch};

const BLOCK_BYTES: u64 = 4096;
const SECTOR_BYTES: u64 = 512;
/// Records in a sector of a log, and tags in a sector of a table.
const LOG_RECORDS: u64 = 15;
const TABLE_RECORDS: u64 = 16;
const LOG_BYTES: u64 = 64 << 20;
/// Blocks of data that one bit of the bitmap stands for: 16 MiB.
const REGION_BLOCKS: u64 = 4096;
/// Sectors written at once by a checkpoint.
const TABLE_DEPTH: usize = 64;

/// A way to keep data and tags together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scheme {
    /// In place, no tags.
    Raw,
    /// Data to a free physical unit; map entries to a log at each commit.
    FreeSlots,
    /// Tags to a log and a sync, then data in place.
    TagsFirst,
    /// The new tag beside the old one near the data and a sync, then data in place.
    TwoTags,
    /// Data and tags to a journal, later in place.
    Journal,
    /// A mark on the region and a sync if it has none, then data and tags in place.
    Bitmap,
}

impl Scheme {
    /// What tables call it.
    pub fn name(self) -> &'static str {
        match self {
            Scheme::Raw => "raw",
            Scheme::FreeSlots => "free slots",
            Scheme::TagsFirst => "tags first",
            Scheme::TwoTags => "two tags",
            Scheme::Journal => "data journal",
            Scheme::Bitmap => "dirty bitmap",
        }
    }
}

/// A file written to in the manner of a scheme.
pub struct Emulation {
    scheme: Scheme,
    medium: FileMedium,
    _scratch: Scratch,
    payload: Slice,
    /// Blocks of a request, the unit of slots.
    unit: u64,
    places: u64,
    tags_offset: u64,
    log_offset: u64,
    log_at: Cell<u64>,
    log_used: Cell<u64>,
    /// The physical unit of each logical one, the free ones, and those freed since the last commit.
    slots: RefCell<Vec<u64>>,
    free: RefCell<Vec<u64>>,
    given_up: RefCell<Vec<u64>>,
    records: Cell<u64>,
    dirty: RefCell<BTreeSet<u64>>,
    journal: RefCell<Vec<u64>>,
    regions: RefCell<BTreeSet<u64>>,
    commit: Group<()>,
    ahead: Group<u64>,
    written_bytes: Cell<u64>,
}

impl Emulation {
    /// A new file, every byte of it written.
    pub async fn new(scheme: Scheme, options: &FileOptions, unit: u64) -> anyhow::Result<Rc<Emulation>> {
        let places = options.blocks() / unit;
        let slots = places + places.div_ceil(16);
        let tags_offset = slots * unit * BLOCK_BYTES;
        let log_offset = tags_offset + (options.blocks() * 32).next_multiple_of(BLOCK_BYTES);
        let scratch = setup::new_path(&options.dir, scheme.name())?;
        let medium = setup::new_file(&scratch.0, log_offset + LOG_BYTES, Prepared::Written).await?;
        let payload = payload();
        for at in (0..tags_offset).step_by(payload.len()) {
            let length = (tags_offset - at).min(payload.len() as u64) as usize;
            medium.write(at, payload.slice(..length)).await?;
        }
        Ok(Rc::new(Emulation {
            scheme,
            medium,
            _scratch: scratch,
            payload,
            unit,
            places,
            tags_offset,
            log_offset,
            log_at: Cell::default(),
            log_used: Cell::default(),
            slots: RefCell::new((0..places).collect()),
            free: RefCell::new((places..slots).rev().collect()),
            given_up: RefCell::default(),
            records: Cell::default(),
            dirty: RefCell::default(),
            journal: RefCell::default(),
            regions: RefCell::default(),
            commit: Group::default(),
            ahead: Group::default(),
            written_bytes: Cell::default(),
        }))
    }

    async fn put(&self, offset: u64, length: u64) -> anyhow::Result<()> {
        self.written_bytes.set(self.written_bytes.get() + length);
        Ok(self.medium.write(offset, self.payload.slice(..length as usize)).await?)
    }

    async fn put_unit(&self, slot: u64) -> anyhow::Result<()> {
        self.put(slot * self.unit * BLOCK_BYTES, self.unit * BLOCK_BYTES).await
    }

    /// Appends bytes to the log, round and round, in pieces of the payload's length.
    async fn append(&self, mut length: u64) -> anyhow::Result<()> {
        self.log_used.set(self.log_used.get() + length);
        let mut pieces = Vec::new();
        while length > 0 {
            let at = self.log_at.get();
            let piece = length.min(LOG_BYTES - at).min(self.payload.len() as u64);
            self.log_at.set((at + piece) % LOG_BYTES);
            pieces.push(self.put(self.log_offset + at, piece));
            length -= piece;
        }
        try_join_all(pieces).await.map(drop)
    }

    fn mark_dirty(&self, place: u64) {
        let (first, last) = (place * self.unit / TABLE_RECORDS, ((place + 1) * self.unit - 1) / TABLE_RECORDS);
        self.dirty.borrow_mut().extend(first..=last);
    }

    /// Writes every sector of tags that differs, runs of them in one piece.
    async fn write_tags(&self) -> anyhow::Result<()> {
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for sector in self.dirty.take() {
            match runs.last_mut() {
                Some((start, length)) if *start + *length == sector => *length += 1,
                _ => runs.push((sector, 1)),
            }
        }
        for runs in runs.chunks(TABLE_DEPTH) {
            let put = |&(start, length): &(u64, u64)| {
                self.put(
                    self.tags_offset + start * SECTOR_BYTES,
                    (length * SECTOR_BYTES).min(self.payload.len() as u64),
                )
            };
            try_join_all(runs.iter().map(put)).await?;
        }
        Ok(())
    }

    /// Brings the tags of logged records in place and begins the log anew.
    async fn checkpoint(&self) -> anyhow::Result<()> {
        self.log_used.set(0);
        self.write_tags().await?;
        self.medium.sync().await?;
        self.put(self.log_offset, SECTOR_BYTES).await?;
        Ok(self.medium.sync().await?)
    }

    fn log_is_half_full(&self) -> bool {
        self.log_used.get() * 2 > LOG_BYTES
    }

    /// One request.
    async fn write(&self, place: u64) -> anyhow::Result<()> {
        match self.scheme {
            Scheme::Raw => self.put_unit(place).await,
            Scheme::FreeSlots => self.write_to_free_slot(place).await,
            Scheme::TagsFirst => {
                self.ahead.share(Some(place), |places| self.log_tags(places)).await?;
                self.put_unit(place).await
            }
            Scheme::TwoTags => {
                self.ahead.share(Some(place), |places| self.tags_near_data(places)).await?;
                self.put_unit(place).await
            }
            Scheme::Journal => {
                self.append(self.unit * BLOCK_BYTES).await?;
                self.journal.borrow_mut().push(place);
                self.mark_dirty(place);
                if self.log_is_half_full() {
                    self.flush().await?;
                }
                Ok(())
            }
            Scheme::Bitmap => {
                let region = place * self.unit / REGION_BLOCKS;
                if !self.regions.borrow().contains(&region) {
                    self.ahead.share(Some(region), |regions| self.mark_regions(regions)).await?;
                }
                self.mark_dirty(place);
                self.put_unit(place).await
            }
        }
    }

    async fn write_to_free_slot(&self, place: u64) -> anyhow::Result<()> {
        let slot = loop {
            let slot = self.free.borrow_mut().pop();
            match slot {
                Some(slot) => break slot,
                None => self.flush().await?,
            }
        };
        self.put_unit(slot).await?;
        let old = std::mem::replace(&mut self.slots.borrow_mut()[place as usize], slot);
        self.given_up.borrow_mut().push(old);
        self.records.set(self.records.get() + self.unit);
        self.mark_dirty(place);
        Ok(())
    }

    async fn log_tags(&self, places: Vec<u64>) -> anyhow::Result<()> {
        if self.log_is_half_full() {
            self.checkpoint().await?;
        }
        self.append((places.len() as u64 * self.unit).div_ceil(LOG_RECORDS) * SECTOR_BYTES).await?;
        self.medium.sync().await?;
        places.into_iter().for_each(|place| self.mark_dirty(place));
        Ok(())
    }

    async fn tags_near_data(&self, places: Vec<u64>) -> anyhow::Result<()> {
        places.into_iter().for_each(|place| self.mark_dirty(place));
        self.write_tags().await?;
        Ok(self.medium.sync().await?)
    }

    async fn mark_regions(&self, regions: Vec<u64>) -> anyhow::Result<()> {
        self.put(self.log_offset, BLOCK_BYTES).await?;
        self.medium.sync().await?;
        self.regions.borrow_mut().extend(regions);
        Ok(())
    }

    /// Makes every request answered so far durable, together with everybody else who waits for that.
    async fn flush(&self) -> anyhow::Result<()> {
        self.commit.share(Some(()), |_| self.commit()).await
    }

    async fn commit(&self) -> anyhow::Result<()> {
        match self.scheme {
            Scheme::Raw | Scheme::TagsFirst | Scheme::TwoTags => {}
            Scheme::FreeSlots => {
                let (records, given_up) = (self.records.take(), self.given_up.take());
                self.append(records.div_ceil(LOG_RECORDS) * SECTOR_BYTES).await?;
                self.medium.sync().await?;
                self.free.borrow_mut().extend(given_up);
                return if self.log_is_half_full() { self.checkpoint().await } else { Ok(()) };
            }
            Scheme::Journal => {
                // One descriptor sector for the tags of each 15 blocks of the batch.
                let places = self.journal.borrow().len() as u64;
                self.append((places * self.unit).div_ceil(LOG_RECORDS).max(1) * SECTOR_BYTES).await?;
                self.medium.sync().await?;
                return if self.log_is_half_full() { self.write_journal_back().await } else { Ok(()) };
            }
            Scheme::Bitmap => self.write_tags().await?,
        }
        Ok(self.medium.sync().await?)
    }

    /// The blocks of the journal go in place; of a block written twice only the newer version does.
    async fn write_journal_back(&self) -> anyhow::Result<()> {
        let places: BTreeSet<u64> = self.journal.take().into_iter().collect();
        for places in places.into_iter().collect::<Vec<_>>().chunks(TABLE_DEPTH) {
            try_join_all(places.iter().map(|&place| self.put_unit(place))).await?;
        }
        self.checkpoint().await
    }
}

/// One turn of `load`; also the bytes written in it.
pub async fn drive(emulation: Rc<Emulation>, load: Load, turn: Duration, seed: u64) -> anyhow::Result<(Sample, u64)> {
    let (before, end) = (emulation.written_bytes.get(), Instant::now() + turn);
    emulation.regions.take();
    let answered = Rc::new(Cell::new(0_u64));
    let (rng, next) = (Rc::new(RefCell::new(Rng::with_seed(seed))), Rc::new(Cell::new(0)));
    let watch = Stopwatch::start();
    let workers: Vec<_> = (0..load.depth)
        .map(|_| {
            let (emulation, answered) = (Rc::clone(&emulation), Rc::clone(&answered));
            let (rng, next) = (Rc::clone(&rng), Rc::clone(&next));
            spawn(async move {
                while Instant::now() < end {
                    let place = match load.random {
                        true => rng.borrow_mut().u64(..emulation.places),
                        false => next.replace(next.get() + 1) % emulation.places,
                    };
                    emulation.write(place).await?;
                    answered.set(answered.get() + 1);
                    if answered.get().is_multiple_of(load.flush_every) {
                        emulation.flush().await?;
                    }
                }
                anyhow::Ok(())
            })
        })
        .collect();
    for worker in workers {
        worker.await.context("a worker was aborted")??;
    }
    emulation.flush().await?;
    let turn = watch.stop(answered.get(), load.blocks * BLOCK_BYTES);
    Ok((turn, emulation.written_bytes.get() - before))
}

/// Work that several requests share: gathers items until one request takes all of them, and does it for all that wait.
#[derive(Default)]
struct Group<T> {
    items: RefCell<Vec<T>>,
    begun: Cell<u64>,
    ended: Cell<u64>,
    busy: Cell<bool>,
    waiting: RefCell<Vec<Waker>>,
}

impl<T> Group<T> {
    /// Adds an item and returns once `work` was done on a batch with it in, by this request or another.
    async fn share<F: Future<Output = anyhow::Result<()>>>(
        &self,
        item: Option<T>,
        work: impl Fn(Vec<T>) -> F,
    ) -> anyhow::Result<()> {
        self.items.borrow_mut().extend(item);
        let batch = self.begun.get() + 1;
        loop {
            if self.ended.get() >= batch {
                return Ok(());
            }
            if self.busy.replace(true) {
                self.wait(batch).await;
                continue;
            }
            let items = self.items.take();
            self.begun.set(self.begun.get() + 1);
            let done = work(items).await;
            self.ended.set(self.begun.get());
            self.busy.set(false);
            self.waiting.take().into_iter().for_each(Waker::wake);
            done?;
        }
    }

    async fn wait(&self, batch: u64) {
        poll_fn(|context| {
            if self.ended.get() >= batch || !self.busy.get() {
                return Poll::Ready(());
            }
            self.waiting.borrow_mut().push(context.waker().clone());
            Poll::Pending
        })
        .await;
    }
}
