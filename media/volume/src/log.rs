//! The log: where it stands, and how records get there.
//!
//! Every sector of the log has two places, far apart. A commit of many records writes each of its sectors to both, in one
//! burst. A small one writes its one sector to one place, and the next commit's first sector repeats all its records; since
//! neighbours lie in different regions, they are then in two places as well, for the bytes of one. A small commit that no
//! other one follows soon gets its second copy from the worker ([`Volume::settle_log`]), which also says that the sector is
//! durable.
//!
//! Invariant: of every sector but the last one written, each record lies in two places that no 64 KiB hold both of.
//! Records are repeated even where the same sector has newer ones of their blocks: those may turn out not to have arrived.

use std::cell::{Cell, RefCell};

use futures_util::future::join_all;
use sealblock_block::{Clock, Error, Medium, MediumError};
use sealblock_runtime_memory::Slice;

use crate::commit::Encoded;
use crate::format::{LOG_REGIONS, LogHeader, LogSector, RECORD_BYTES};
use crate::open::Mutation;
use crate::volume::Volume;

/// Records of a commit that is written once at most, and blocks that they are about: two such commits fit in the smallest sector.
const SMALL: usize = 7;

/// Where the log stands. Numbers are sequence numbers of sectors.
pub(crate) struct Log {
    /// The next sector to be written. Every sector before this one is durable, with its data.
    pub next: Cell<u64>,
    /// The records of every sector before this one are in the pages of the tables in memory.
    pub applied: Cell<u64>,
    /// Every sector before this one is in the tables, and the superblock says so.
    pub tail: Cell<u64>,
    last: RefCell<Option<Last>>,
}

/// The last sector that was written.
#[derive(Clone)]
struct Last {
    sequence: u64,
    bytes: Vec<u8>,
    /// It was written to one place, so the next one must repeat it.
    is_single: bool,
    /// Its second copy could not be written.
    is_given_up: bool,
}

impl Log {
    /// A log that is empty up to `next`.
    pub fn new(next: u64, tail: u64) -> Log {
        Log { next: Cell::new(next), applied: Cell::new(next), tail: Cell::new(tail), last: RefCell::default() }
    }

    /// Whether the last commit waits for [`Volume::settle_log`].
    pub fn is_unsettled(&self) -> bool {
        self.last.borrow().as_ref().is_some_and(|last| !last.is_given_up && last.sequence >= self.tail.get())
    }

    /// The records that the next sector must repeat.
    fn to_repeat(&self) -> Vec<[u8; RECORD_BYTES]> {
        let last = self.last.borrow();
        let single = last.as_ref().filter(|last| last.is_single && last.sequence >= self.tail.get());
        single.map_or(Vec::new(), |last| LogSector::own_records(&last.bytes).to_vec())
    }
}

impl<M: Medium, C: Clock> Volume<M, C> {
    /// Sectors that a commit of so many records may take.
    pub(crate) fn log_sectors_for(&self, records: usize) -> u64 {
        (records + SMALL).div_ceil(self.layout.log_sector_records() as usize) as u64
    }

    /// Records that one commit may have in so many sectors.
    pub(crate) fn log_records_in(&self, sectors: u64) -> usize {
        ((sectors * self.layout.log_sector_records()) as usize).saturating_sub(SMALL)
    }

    /// Writes records to the log and makes them durable, with all data written before.
    pub(crate) async fn write_log(&self, records: &[Encoded]) -> Result<(), MediumError> {
        if records.iter().any(|(run, _)| run.first.loose) {
            // Recovery cannot tell such data by their guard, so they must be durable before their records.
            self.medium.sync().await?;
        }
        let first = self.log.next.get();
        let bytes = self.encode_sectors(first, records);
        let sector = self.layout.sector_bytes() as usize;
        let sectors = (bytes.len() / sector) as u64;
        // A long run is one record, and yet more than may hang on a single sector.
        let blocks: usize = records.iter().map(|(run, _)| run.blocks as usize).sum();
        let is_single = blocks <= SMALL && sectors == 1;
        let regions = if is_single { first..first + 1 } else { 0..LOG_REGIONS };
        let writes = regions.flat_map(|region| self.log_pieces(first, region, &bytes));
        let writes = writes.map(|(offset, piece)| self.medium.write(offset, piece));
        join_all(writes).await.into_iter().collect::<Result<(), MediumError>>()?;
        if self.mutation != Mutation::SkipSync {
            self.medium.sync().await?;
        }
        let (sequence, bytes) = (first + sectors - 1, bytes[bytes.len() - sector..].to_vec());
        *self.log.last.borrow_mut() = Some(Last { sequence, bytes, is_single, is_given_up: false });
        self.log.next.set(first + sectors);
        Ok(())
    }

    /// The sectors of a commit, the first of which repeats what was written once before.
    fn encode_sectors(&self, first: u64, records: &[Encoded]) -> Slice {
        let sector = self.layout.sector_bytes() as usize;
        let per_sector = self.layout.log_sector_records() as usize;
        let repeats = match self.mutation {
            Mutation::RepeatNothing => Vec::new(),
            _ => self.log.to_repeat(),
        };
        let mut buffer = self.medium.buffer((records.len() + repeats.len()).div_ceil(per_sector) * sector);
        let (mut rest, mut repeats) = (records, &repeats[..]);
        for (sequence, place) in (first..).zip(buffer.chunks_exact_mut(sector)) {
            let (own, behind) = rest.split_at(rest.len().min(per_sector - repeats.len()));
            let header = LogHeader { sequence, durable: first };
            LogSector::encode(place, self.seed, header, own.iter().map(|(_, bytes)| bytes), repeats);
            (rest, repeats) = (behind, &[]);
        }
        buffer.freeze()
    }

    /// Where the sectors from `first` on lie in a region: behind one another, but for the end of the region.
    fn log_pieces(&self, first: u64, region: u64, bytes: &Slice) -> impl Iterator<Item = (u64, Slice)> {
        let sector = u64::from(self.layout.sector_bytes());
        let before_end = (self.layout.log_sectors() - first % self.layout.log_sectors()) * sector;
        let head = bytes.len().min(before_end as usize);
        let pieces = [(first, bytes.slice(..head)), (first + head as u64 / sector, bytes.slice(head..))];
        let places = pieces.map(|(sequence, piece)| (self.layout.log_place(sequence, region), piece));
        places.into_iter().filter(|(_, piece)| !piece.is_empty())
    }

    /// Gives the last sector its second copy, which also says that the sector and its data are durable. From here on no single
    /// fault loses a record of the log, and a block that does not match its record is damaged and not a write that never
    /// arrived.
    ///
    /// # Errors
    /// When a sync fails: the volume takes no more writes. A write that fails costs nothing that was there before.
    pub(crate) async fn settle_log(&self) -> Result<(), Error> {
        let Some(mut last) = self.log.last.borrow().clone().filter(|_| self.log.is_unsettled()) else { return Ok(()) };
        LogSector::set_durable(&mut last.bytes, self.seed, last.sequence + 1);
        let mut buffer = self.medium.buffer(last.bytes.len());
        buffer.copy_from_slice(&last.bytes);
        let place = self.layout.log_place(last.sequence, last.sequence + 1);
        if let Err(error) = self.medium.write(place, buffer.freeze()).await {
            tracing::warn!(%error, "the second copy of the last log sector could not be written");
            self.log.last.borrow_mut().iter_mut().for_each(|last| last.is_given_up = true);
            return Ok(());
        }
        self.medium.sync().await.map_err(|error| self.fail(&error))?;
        *self.log.last.borrow_mut() = None;
        Ok(())
    }
}
