//! The log: its state, and how map entries are written to it.
//!
//! Every sector of the log has two distant places. A commit of many map entries writes each of its sectors to both, in
//! one burst. A small commit uses one sector and writes it to one place. The next small commit joins that sector: it
//! writes it to the other place, with the map entries of both, and the one after that to the first place again, as long
//! as there is room. The following sector, in the other region, repeats the map entries that have only one place. So
//! all map entries have two places at the cost of one, and a sector of the log serves as many small commits as it has
//! room for. If no other commit follows soon, the worker writes the second copy ([`Log::write_second_copy`]), which
//! also records that the sector is durable.
//!
//! Invariant: each map entry except those of the last commit has two places that no 64 KiB both contain. While one
//! place is rewritten, the other has all of its earlier content. Each period in which the log is used begins with a
//! sector without map entries: the anchor, in both places, durable before a superblock marks the log as in use. So a
//! log in use is never empty, and one without any sector is lost ([`Log::write_anchor`]).
//!
//! Map entries are repeated even if the same sector has newer ones of their blocks: the newer ones may turn out not to
//! have arrived.

pub(crate) mod notes;
pub(crate) mod work_queue;

use std::cell::{Cell, RefCell};

use futures_util::future::join_all;
use sealblock_block::{Medium, MediumError};
use sealblock_runtime_memory::Slice;

use crate::format::{
    LOG_REGIONS, Layout, LogHeader, LogPosition, LogSector, MAP_ENTRY_BYTES, MapEntryRun, Seed, Superblock,
};
use crate::medium::padded;
use crate::options::Mutation;

/// A commit is small if it has at most this many map entries and blocks: two such commits fit in the smallest sector.
/// Small commits are written once.
const SMALL_COMMIT_ENTRIES: usize = 7;

/// A map entry of a block or a run of blocks, and its bytes in the log.
pub(crate) type Encoded = (MapEntryRun, [u8; MAP_ENTRY_BYTES]);

/// The state of the log. Numbers are sequence numbers of sectors.
pub(crate) struct Log {
    layout: Layout,
    seed: Seed,
    mutation: Mutation,
    /// The first sector that no commit has used. Every earlier sector is durable, with its data, except what a commit
    /// in flight adds to the last one.
    pub next: Cell<u64>,
    /// The map entries of every earlier sector are in the block map's patches, or in the block map.
    applied: Cell<u64>,
    /// Every earlier sector is in the block map, and the superblock says so.
    pub tail: Cell<u64>,
    /// The number of commits that were written.
    pub commits: Cell<u64>,
    last: RefCell<Option<LastSector>>,
}

/// The last sector that was written.
#[derive(Clone)]
struct LastSector {
    sequence: u64,
    bytes: Vec<u8>,
    /// The blocks of its own map entries, as ranges, if only one place has the newest.
    blocks: Vec<(u64, u64)>,
    /// The region that has its newest map entries; `None` if both have all.
    only_in: Option<u64>,
    /// A checkpoint counts it as wholly in the block map, so no commit may join it.
    is_closed: bool,
    /// Its second copy could not be written.
    has_no_second_copy: bool,
}

/// Where a commit is written.
pub(crate) struct LogPlacement {
    /// The first sector.
    pub first: u64,
    /// The region to which the only sector is written; `None` for both.
    region: Option<u64>,
    /// The map entries that the sector has already.
    earlier: Vec<[u8; MAP_ENTRY_BYTES]>,
    /// The map entries of the previous sector that the first one repeats.
    repeats: Vec<[u8; MAP_ENTRY_BYTES]>,
    left_out: u16,
    /// The blocks of all own map entries, for a sector that is written once.
    blocks: Vec<(u64, u64)>,
}

impl Log {
    /// The log of a volume with this superblock; empty up to `next`.
    pub fn new(superblock: &Superblock, next: u64, mutation: Mutation) -> Log {
        Log {
            layout: superblock.layout,
            seed: superblock.seed(),
            mutation,
            next: Cell::new(next),
            applied: Cell::new(next),
            tail: Cell::new(superblock.log_tail),
            commits: Cell::new(0),
            last: RefCell::default(),
        }
    }

    /// True if the last commit needs [`Log::write_second_copy`].
    pub fn needs_second_copy(&self) -> bool {
        self.last.borrow().as_ref().is_some_and(|last| !last.has_no_second_copy && last.sequence >= self.tail.get())
    }

    /// Records that the map entries of every written sector are in the block map's patches.
    pub fn end_commit(&self) {
        self.applied.set(self.next.get());
    }

    /// Returns the first sector whose map entries are not all in the block map's patches. No commit joins an earlier
    /// sector from now on.
    pub fn take_applied(&self) -> u64 {
        let applied = self.applied.get();
        if let Some(last) = self.last.borrow_mut().as_mut().filter(|last| last.sequence < applied) {
            last.is_closed = true;
        }
        applied
    }

    /// Decides where map entries are written, for which the log must have room. If they join a sector, that sector is
    /// not wholly in the block map any more.
    pub fn place_commit(&self, entries: &[MapEntryRun]) -> LogPlacement {
        // A long run is one map entry, but too much to depend on a single sector.
        let is_small = entries.iter().map(|run| run.blocks as usize).sum::<usize>() <= SMALL_COMMIT_ENTRIES;
        let small = if is_small { entries } else { &[] };
        let blocks: Vec<(u64, u64)> = small.iter().map(|run| (run.start(), run.end())).collect();
        let last = self.last.borrow();
        let last = last.as_ref().filter(|last| last.sequence >= self.tail.get());
        let single = last.and_then(|last| Some((last, last.only_in?)));
        if is_small
            && let Some((last, region)) = single
            && last.has_room_for(&blocks, &self.layout, self.mutation)
        {
            if !self.mutation.is(Mutation::JoinTaken) {
                self.applied.set(last.sequence);
            }
            let sector = LogSector::of_encoded(&last.bytes);
            let region = if self.mutation.is(Mutation::JoinInPlace) { region } else { region + 1 };
            let (earlier, repeats) = (sector.entries().to_vec(), sector.repeats().to_vec());
            let blocks = last.blocks.iter().copied().chain(blocks).collect();
            let (first, left_out) = (last.sequence, sector.header.left_out);
            return LogPlacement { first, region: Some(region), earlier, repeats, left_out, blocks };
        }
        let first = self.next.get();
        let (mut repeats, mut left_out) = (Vec::new(), 0);
        if let Some((last, _)) = single.filter(|_| !self.mutation.is(Mutation::RepeatNothing)) {
            let sector = LogSector::of_encoded(&last.bytes);
            left_out = sector.header.earlier;
            repeats = sector.entries()[usize::from(left_out)..].to_vec();
        }
        let region = is_small.then(|| single.map_or(first, |(_, region)| region + 1));
        // The last place of the first region and the first place of the second region are adjacent.
        let region =
            region.filter(|region| region % LOG_REGIONS == 0 || !first.is_multiple_of(self.layout.log_sectors()));
        LogPlacement { first, region, earlier: Vec::new(), repeats, left_out, blocks }
    }

    /// The position after all map entries of the log.
    pub fn position(&self) -> LogPosition {
        let last = self.last.borrow();
        let own = last.as_ref().map(|last| (last.sequence, LogSector::of_encoded(&last.bytes).entries().len() as u16));
        own.unwrap_or((self.next.get(), 0))
    }

    /// The position after all map entries of the log once this number of them is written as placed.
    pub fn end_of(&self, place: &LogPlacement, entries: usize) -> LogPosition {
        let per_sector = self.layout.log_sector_entries() as usize;
        let (mut sector, mut own) = (place.first, place.earlier.len() + entries);
        let mut here = per_sector - place.repeats.len();
        while own > here {
            (sector, own, here) = (sector + 1, own - here, per_sector);
        }
        (sector, own as u16)
    }

    /// The maximum number of sectors for a commit of this number of map entries.
    pub fn sectors_for(&self, entries: usize) -> u64 {
        (entries + SMALL_COMMIT_ENTRIES).div_ceil(self.layout.log_sector_entries() as usize) as u64
    }

    /// The number of map entries that always fit in a commit of this number of sectors.
    pub fn entries_in(&self, sectors: u64) -> usize {
        ((sectors * self.layout.log_sector_entries()) as usize).saturating_sub(SMALL_COMMIT_ENTRIES)
    }

    /// Writes map entries to their place in the log and makes them durable, with all data written before.
    pub async fn write<M: Medium>(
        &self,
        medium: &M,
        place: LogPlacement,
        entries: &[Encoded],
    ) -> Result<(), MediumError> {
        if entries.iter().any(|(run, _)| run.first.guard_unverified) {
            // Recovery cannot check such data by their guard, so they must be durable before their map entries.
            medium.sync().await?;
        }
        let bytes = self.encode_sectors(medium, &place, entries);
        let LogPlacement { first, region, blocks, .. } = place;
        let regions = region.map_or(0..LOG_REGIONS, |region| region..region + 1);
        let writes = regions.flat_map(|region| self.log_pieces(first, region, &bytes));
        let writes = writes.map(|(offset, piece)| medium.write(offset, piece));
        join_all(writes).await.into_iter().collect::<Result<(), MediumError>>()?;
        if !self.mutation.is(Mutation::SkipSync) {
            medium.sync().await?;
        }
        let sector = self.layout.sector_bytes() as usize;
        let end = first + (bytes.len() / sector) as u64;
        let bytes = bytes[bytes.len() - sector..].to_vec();
        let last = LastSector {
            sequence: end - 1,
            bytes,
            blocks,
            only_in: region,
            is_closed: false,
            has_no_second_copy: false,
        };
        *self.last.borrow_mut() = Some(last);
        self.next.set(end);
        self.commits.set(self.commits.get() + 1);
        Ok(())
    }

    /// Begins an empty log with the anchor, a sector without map entries, in both places. It is durable after the next
    /// sync.
    ///
    /// Its durable_seq is 0 and covers no earlier sectors: after a crash its number is far ahead of theirs.
    pub async fn write_anchor<M: Medium>(&self, medium: &M) -> Result<(), MediumError> {
        let sequence = self.next.get();
        debug_assert_eq!(sequence, self.tail.get(), "the log is empty");
        let mut buffer = medium.buffer(self.layout.sector_bytes() as usize);
        LogSector::encode(&mut buffer, self.seed, LogHeader::new(sequence, 0), [].into_iter(), &[]);
        let bytes = buffer.freeze();
        let places = (0..LOG_REGIONS).map(|region| self.layout.log_sector_offset(sequence, region));
        let writes = places.map(|offset| medium.write(offset, bytes.clone()));
        join_all(writes).await.into_iter().collect::<Result<(), MediumError>>()?;
        *self.last.borrow_mut() = None;
        self.next.set(sequence + 1);
        self.applied.set(sequence + 1);
        Ok(())
    }

    /// Encodes the sectors of a commit. The first one repeats the map entries that have only one place.
    fn encode_sectors(&self, medium: &impl Medium, place: &LogPlacement, entries: &[Encoded]) -> Slice {
        let sector = self.layout.sector_bytes() as usize;
        let per_sector = self.layout.log_sector_entries() as usize;
        let LogPlacement { first, earlier, repeats, left_out, .. } = place;
        let own: Vec<&[u8; MAP_ENTRY_BYTES]> = earlier.iter().chain(entries.iter().map(|(_, bytes)| bytes)).collect();
        let mut buffer = medium.buffer((own.len() + repeats.len()).div_ceil(per_sector) * sector);
        // Only the first sector has the repeated entries, and after a crash the others may exist without it. So the
        // durable_seq of the others does not cover the previous sector.
        let durable = first - u64::from(!repeats.is_empty());
        let (mut rest, mut repeats) = (&own[..], &repeats[..]);
        let mut header =
            LogHeader { earlier: earlier.len() as u16, left_out: *left_out, ..LogHeader::new(*first, *first) };
        for bytes in buffer.chunks_exact_mut(sector) {
            let (own, behind) = rest.split_at(rest.len().min(per_sector - repeats.len()));
            LogSector::encode(bytes, self.seed, header, own.iter().copied(), repeats);
            (rest, repeats) = (behind, &[]);
            header = LogHeader::new(header.sequence + 1, durable);
        }
        buffer.freeze()
    }

    /// The parts of the sectors from `first` in a region: contiguous, but split at the end of the region.
    fn log_pieces(&self, first: u64, region: u64, bytes: &Slice) -> impl Iterator<Item = (u64, Slice)> {
        let sector = u64::from(self.layout.sector_bytes());
        let before_end = (self.layout.log_sectors() - first % self.layout.log_sectors()) * sector;
        let head = bytes.len().min(before_end as usize);
        let pieces = [(first, bytes.slice(..head)), (first + head as u64 / sector, bytes.slice(head..))];
        let places = pieces.map(|(sequence, piece)| (self.layout.log_sector_offset(sequence, region), piece));
        places.into_iter().filter(|(_, piece)| !piece.is_empty())
    }

    /// Writes the second copy of the last sector, if one place lacks the newest map entries. It also records that the
    /// sector and its data are durable. From here on no single fault loses a map entry of the log, and a block that
    /// does not match its map entry is damage, not a write that never arrived.
    ///
    /// # Errors
    /// When a sync fails. A failed write loses nothing that was there before.
    pub async fn write_second_copy<M: Medium>(&self, medium: &M) -> Result<(), MediumError> {
        let Some(mut last) = self.last.borrow().clone().filter(|_| self.needs_second_copy()) else {
            return Ok(());
        };
        LogSector::set_durable_seq(&mut last.bytes, self.seed, last.sequence + 1);
        if self.write_copy(medium, &last).await {
            medium.sync().await?;
            *self.last.borrow_mut() = None;
        }
        Ok(())
    }

    /// Writes the other copy of the last sector, if no commit joins it any more. After a checkpoint that covers this
    /// sector, it alone may show that the log is there: an empty log is told from a lost one by the sector before its
    /// start. Durable with the next sync.
    pub async fn write_closed_copy<M: Medium>(&self, medium: &M) {
        if self.mutation.is(Mutation::JoinTaken) {
            // An injected fault: the next commit joins the sector all the same.
            return;
        }
        let needs_copy = |last: &LastSector| last.is_closed && last.only_in.is_some() && !last.has_no_second_copy;
        let Some(last) = self.last.borrow().clone().filter(needs_copy) else { return };
        if self.write_copy(medium, &last).await {
            self.change_last(last.sequence, |last| last.only_in = None);
        }
    }

    /// Writes a sector to the place that lacks its newest map entries. If that fails, it is not tried again.
    async fn write_copy<M: Medium>(&self, medium: &M, last: &LastSector) -> bool {
        let bytes = padded(medium, &last.bytes, last.bytes.len());
        let place = self.layout.log_sector_offset(last.sequence, last.only_in.unwrap_or(last.sequence) + 1);
        let written = medium.write(place, bytes).await;
        if let Err(error) = &written {
            tracing::warn!(%error, "cannot write the second copy of the last log sector");
            self.change_last(last.sequence, |last| last.has_no_second_copy = true);
        }
        written.is_ok()
    }

    /// Changes what is known of the last sector, if it is still this one.
    fn change_last(&self, sequence: u64, change: impl FnOnce(&mut LastSector)) {
        if let Some(last) = self.last.borrow_mut().as_mut().filter(|last| last.sequence == sequence) {
            change(last);
        }
    }
}

impl LastSector {
    /// True if map entries of these blocks may be added. Two entries of one block would have the same generation.
    fn has_room_for(&self, blocks: &[(u64, u64)], layout: &Layout, mutation: Mutation) -> bool {
        let sector = LogSector::of_encoded(&self.bytes);
        let entries = (sector.entries().len() + sector.repeats().len() + blocks.len()) as u64;
        let meets = |(start, end): &(u64, u64)| self.blocks.iter().any(|(from, to)| start < to && from < end);
        (!self.is_closed || mutation.is(Mutation::JoinTaken))
            && entries <= layout.log_sector_entries()
            && !blocks.iter().any(meets)
    }
}
