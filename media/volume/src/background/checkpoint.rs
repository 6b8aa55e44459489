//! Checkpoints: the block map catches up with the log, and the log's space is free again.
//!
//! Checkpoints run concurrently with commits. A commit waits for a checkpoint only if there is no room without it. Map
//! entries that commits add to the pages meanwhile are durable in the log after the position where the checkpoint lets
//! the log begin, and may be written with the pages.

use std::cell::Cell;

use futures_util::future::{join, join_all};
use futures_util::stream::{self, StreamExt};
use sealblock_block::{Clock, Error, Freshness, Medium, MediumError, ReservedArea};

use crate::format::{Answered, Generations, HighWaterMark, MapEntryRun, PageOffsets, Superblock};
use crate::medium::superblocks;
use crate::options::Mutation;
use crate::volume::Volume;

/// Pages that are written at once.
const PAGES_IN_FLIGHT: usize = 32;
/// Bytes of map pages that are written at once when a block group is initialized, and the number of such writes in
/// flight.
const UNWRITTEN_BYTES: u64 = 1 << 20;
const UNWRITTEN_IN_FLIGHT: usize = 8;
/// Sectors smaller than this are not written separately when a block group is initialized: the block size of common
/// file systems and drives.
const MIN_APART_BYTES: usize = 4096;
/// The number of uninitialized block groups above which a checkpoint is due. It bounds the work of a close to 1.2 GiB,
/// whatever the size of the volume.
const MAX_UNINITIALIZED: u64 = 128;
/// The number of blocks whose map entries are written to the block map together; more for one long run.
const PORTION_BLOCKS: u64 = 1024;

impl<M: Medium, C: Clock> Volume<M, C> {
    /// Makes checkpoints on request, until [`Checkpoints::stop`] or until the volume has failed.
    pub(crate) async fn run_checkpoints(&self) {
        while self.checkpoints.next(|| self.has_failed()).await {
            let result = self.checkpoint(false).await;
            if let Err(error) = &result {
                tracing::warn!(%error, "checkpoint failed; the log keeps its map entries");
            }
            self.checkpoints.end(result);
        }
    }

    /// Waits until the log has room for this number of sectors, and memory for their map entries.
    pub(crate) async fn make_room(&self, sectors: u64) -> Result<(), Error> {
        while self.log.next.get() + sectors > self.log.tail.get() + self.layout.log_sectors()
            || self.block_map.is_full()
        {
            let ended = self.checkpoints.wait(|| self.has_failed()).await;
            if self.has_failed() {
                return Err(self.failed());
            }
            ended?;
        }
        Ok(())
    }

    /// Writes every page with map entries that the block map does not have yet, then a superblock that begins the log
    /// after these map entries.
    ///
    /// # Errors
    /// When the medium fails. After a failed write the log still has everything, and a later checkpoint can succeed.
    /// After a failed sync it is unknown which writes were lost, so no later checkpoint may rely on them: the volume
    /// disables writes.
    pub(crate) async fn checkpoint(&self, clean: bool) -> Result<(), Error> {
        let _alone = self.checkpoints.writing_map.lock().await;
        let mut target = self.write_map_pages().await?;
        if self.mutation.is(Mutation::TailEarly) {
            target = self.log.take_applied();
        }
        let initialized_groups = self.block_map.groups.initialized_count();
        self.change_superblock(|before| {
            let answered = if clean { Answered::Volatile } else { before.answered };
            let is_begun = before.is_begun && target == before.log_tail;
            Superblock { is_clean: clean, is_begun, log_tail: target, initialized_groups, answered, ..before }
        })
        .await?;
        self.log.tail.set(target);
        self.block_map.patches.end();
        Ok(())
    }

    /// Writes the map entries that wait for the block map, and leaves the log unchanged; no commit may run. It is used
    /// when the log after a crash has more map entries than memory, before the checkpoint that frees the log. If it is
    /// interrupted, the log still has everything.
    ///
    /// # Errors
    /// As [`Volume::checkpoint`].
    pub(crate) async fn drain_patches(&self) -> Result<(), Error> {
        let _alone = self.checkpoints.writing_map.lock().await;
        self.write_map_pages().await?;
        self.block_map.patches.end();
        Ok(())
    }

    /// Takes all map entries that wait for the block map, and writes their pages durably. Returns the log sector up to
    /// which the pages include the log.
    async fn write_map_pages(&self) -> Result<u64, Error> {
        self.new_groups.set(0);
        self.block_map.patches.take();
        let target = self.log.take_applied();
        self.log.write_closed_copy(&self.medium).await;
        let pages = self.block_map.to_write();
        self.initialize_groups(&pages).await?;
        let writes = pages.iter().map(|&number| self.block_map.write(&self.medium, number, target));
        all_ended(writes, PAGES_IN_FLIGHT).await?;
        if !self.mutation.is(Mutation::UnsyncedTables) {
            self.sync_or_fail().await?;
        }
        Ok(target)
    }

    /// Initializes the block groups of these pages, if they are not: first all generations of the block group, in both
    /// copies, and only when they are durable its bit in the group map, which makes them valid.
    async fn initialize_groups(&self, pages: &[u64]) -> Result<(), Error> {
        let mut groups: Vec<u64> = pages.iter().map(|page| self.block_map.group_of(*page)).collect();
        groups.dedup();
        groups.retain(|group| !self.block_map.groups.is_initialized(*group));
        if groups.is_empty() {
            return Ok(());
        }
        if self.mutation.is(Mutation::MapFirst) {
            self.block_map.groups.set_initialized(&self.medium, &groups).await.map_err(|error| self.fail(&error))?;
        }
        let at_once = (UNWRITTEN_BYTES / self.layout.page_bytes()).max(1) as usize;
        let places = |group| self.layout.pages_of_group(group).map(|page| self.block_map.offsets(page)).collect();
        let parts = groups.iter().flat_map(|group| {
            let places: Vec<PageOffsets> = places(*group);
            places.chunks(at_once).map(<[_]>::to_vec).collect::<Vec<_>>()
        });
        all_ended(parts.map(|places| self.write_unwritten(places)), UNWRITTEN_IN_FLIGHT).await?;
        self.sync_or_fail().await?;
        self.block_map.groups.set_initialized(&self.medium, &groups).await.map_err(|error| self.fail(&error))
    }

    /// Writes both copies of the generations of contiguous pages without map entries. Their second copies are
    /// contiguous, so they are one write.
    async fn write_unwritten(&self, places: Vec<PageOffsets>) -> Result<(), MediumError> {
        let (sector, page) = (self.layout.sector_bytes() as usize, self.layout.page_bytes() as usize);
        let mut second = self.medium.buffer(places.len() * sector);
        for (place, sector) in places.iter().zip(second.chunks_exact_mut(sector)) {
            Generations::unwritten(place.first, self.layout.page_blocks()).encode(sector, self.seed);
        }
        let second = second.freeze();
        let heads = || second.chunks_exact(sector);
        // The first copies are the heads of pages, which are apart. Small writes take a file system as long as large
        // ones, and delay each other.
        let first = async {
            if sector >= MIN_APART_BYTES {
                let parts = (0..places.len()).map(|at| second.slice(at * sector..(at + 1) * sector));
                let writes = places.iter().zip(parts).map(|(place, part)| self.medium.write(place.offset, part));
                return join_all(writes).await.into_iter().collect();
            }
            let mut pages = self.medium.buffer(places.len() * page);
            pages.fill(0);
            pages.chunks_exact_mut(page).zip(heads()).for_each(|(page, head)| page[..sector].copy_from_slice(head));
            self.medium.write(places[0].offset, pages.freeze()).await
        };
        let (first, second) = join(first, self.medium.write(places[0].second_offset, second.clone())).await;
        first.and(second)
    }

    /// Writes a superblock that marks the log as in use, before the first map entry goes to the log; its anchor is
    /// durable by then. Before the first map entry of a block that was made unreadable it also sets the feature bit for
    /// these, so that programs that do not support it refuse the volume.
    pub(crate) async fn mark_log_in_use(&self) -> Result<(), Error> {
        let answered = if self.notes.are_needless() { Answered::Volatile } else { self.superblock.get().answered };
        self.mark_answered(answered).await
    }

    /// The same, with the state of completed changes.
    pub(crate) async fn mark_answered(&self, answered: Answered) -> Result<(), Error> {
        let has_it = |before: &Superblock| {
            let uncorrectable = before.uncorrectable || self.commits.uncorrectable.get();
            // The log must not pass what shows it before that is recorded.
            let is_put_back_known = before.is_put_back || !self.block_map.has_newer_pages();
            before.is_anchored
                && uncorrectable == before.uncorrectable
                && answered == before.answered
                && is_put_back_known
        };
        if has_it(&self.superblock.get()) {
            return Ok(());
        }
        // A commit and a note may both be the first: the superblock of one must not mark the log as anchored while the
        // other's anchor is not durable.
        let _alone = self.checkpoints.writing_superblock.lock().await;
        let before = self.superblock.get();
        if has_it(&before) {
            return Ok(());
        }
        if self.has_failed() {
            return Err(self.failed());
        }
        let uncorrectable = before.uncorrectable || self.commits.uncorrectable.get();
        // An earlier attempt may have made it durable and then failed to write the superblock.
        let is_empty = self.log.next.get() == self.log.tail.get();
        let begins = !before.is_anchored && is_empty && !self.mutation.is(Mutation::NoAnchor);
        if begins {
            self.log.write_anchor(&self.medium).await.map_err(|error| self.fail(&error))?;
            self.sync_or_fail().await?;
        }
        let anchor = self.log.next.get() - u64::from(begins);
        let is_begun = before.is_begun || begins && before.log_tail == anchor;
        let is_clean = before.is_clean && self.mutation.is(Mutation::KeepClean);
        let changed = Superblock { is_clean, is_anchored: true, is_begun, uncorrectable, answered, ..before };
        self.write_superblock(changed).await
    }

    /// Writes the next superblock durably.
    pub(crate) async fn change_superblock(&self, change: impl FnOnce(Superblock) -> Superblock) -> Result<(), Error> {
        let _alone = self.checkpoints.writing_superblock.lock().await;
        self.write_superblock(change(self.superblock.get())).await
    }

    /// The same for a caller that holds the lock.
    async fn write_superblock(&self, changed: Superblock) -> Result<(), Error> {
        let is_anchored = changed.is_anchored && !changed.is_clean;
        let is_begun = changed.is_begun && is_anchored;
        let labels_written = self.reserved.writes(ReservedArea::GroupLabel);
        let write_seq = self.superblock.get().write_seq + 1;
        let is_put_back = changed.is_put_back || self.block_map.has_newer_pages();
        let superblock = Superblock { write_seq, is_anchored, is_begun, is_put_back, labels_written, ..changed };
        // Requests write superblocks, too. The write of a dropped one may still be in flight, and could overwrite this
        // one.
        self.medium.drain().await;
        superblocks::write(&self.medium, &superblock).await?;
        self.sync_or_fail().await?;
        self.superblock.set(superblock);
        // The anchor of a log that has just begun is in both its places.
        let log_end = superblock.log_tail + u64::from(is_begun);
        let durable =
            HighWaterMark { superblocks: write_seq, log_end, labels: labels_written, ..HighWaterMark::default() };
        self.high_water.raise(&self.medium, durable).await;
        Ok(())
    }

    /// Writes the map entries that recovery found to the block map, and empties the log. A run of blocks may need more
    /// memory than there is, so the waiting map entries are written in parts.
    pub(crate) async fn checkpoint_recovered(&self, entries: &[MapEntryRun]) -> Result<(), Error> {
        let (mut first, mut blocks) = (0, 0_u64);
        for (at, run) in entries.iter().enumerate() {
            blocks += u64::from(run.blocks);
            if blocks < PORTION_BLOCKS && at + 1 < entries.len() {
                continue;
            }
            self.apply(&self.encode(&entries[first..=at]), false).await;
            if self.block_map.is_dirty_limit_reached() {
                self.drain_patches().await?;
            }
            (first, blocks) = (at + 1, 0);
        }
        // The log continues far after the end that a crash left, in sectors that were never written.
        self.superblock.set(Superblock { is_anchored: false, ..self.superblock.get() });
        self.checkpoint(false).await?;
        // The second superblock, so that all of them begin the log there: entries that recovery dropped must not be
        // read again if the newer copy is lost.
        self.mark_answered(self.superblock.get().answered).await
    }

    /// Discards a log with lost sectors, before the first block changes: its remaining entries are written to the block
    /// map, and it starts over. From here on nothing on the medium shows that blocks may be older; the caller that
    /// opened the volume has recorded it.
    pub(crate) async fn give_up_log(&self) -> Result<(), Error> {
        let _change = self.begin_change()?;
        let _alone = self.checkpoints.giving_up_log.lock().await;
        if !self.keeps_lost_log.get() {
            return Ok(());
        }
        // Writes of a dropped request that began this may still be in flight.
        self.medium.drain().await;
        self.block_map.groups.repair(&self.medium).await?;
        // Its notes do not belong to the new log. The next superblock counts on from the newest that there ever was.
        let before = self.superblock.get();
        let write_seq = before.write_seq.max(self.high_water.mark().superblocks);
        self.superblock.set(Superblock { answered: Answered::Volatile, write_seq, is_put_back: false, ..before });
        self.block_map.forget_newer_pages();
        self.checkpoint_recovered(&self.memtable.recovered()).await?;
        self.memtable.end_commit();
        tracing::warn!("what the log and the superblocks lack is given up: blocks may be older than what was written");
        self.keeps_lost_log.set(false);
        self.log_freshness.set(Freshness::Current);
        self.commits.wanted.notify();
        Ok(())
    }

    /// Rewrites all superblocks.
    pub(crate) async fn checkpoint_both(&self, clean: bool) -> Result<(), Error> {
        self.checkpoint(clean).await?;
        self.checkpoint(clean).await
    }

    /// True if the log or the waiting map entries take so much space that a checkpoint is due. More map entries share
    /// more pages, so it should not be too early; the rest of the log is for commits while the checkpoint runs.
    pub(crate) fn checkpoint_due(&self) -> bool {
        (self.log.next.get() - self.log.tail.get()) * 4 > self.layout.log_sectors() * 3
            || self.block_map.is_dirty_limit_reached()
            || self.new_groups.get() >= MAX_UNINITIALIZED
    }
}

/// Runs writes, a limited number at once, and starts none after one that failed. It ends when all started ones have
/// ended: a write in flight must not overwrite that of a later checkpoint.
async fn all_ended<W>(writes: impl Iterator<Item = W>, in_flight: usize) -> Result<(), MediumError>
where
    W: Future<Output = Result<(), MediumError>>,
{
    let is_failed = Cell::new(false);
    let mut ended = stream::iter(writes.take_while(|_| !is_failed.get())).buffer_unordered(in_flight);
    let mut all = Ok(());
    while let Some(one) = ended.next().await {
        is_failed.set(is_failed.get() || one.is_err());
        all = all.and(one);
    }
    all
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use futures_executor::block_on;
    use futures_util::future::poll_fn;
    use sealblock_block::MediumErrorKind;

    use super::*;

    #[test]
    fn a_write_that_fails_is_the_last_to_begin_and_those_in_flight_end() {
        let (begun, ended) = (RefCell::new(Vec::new()), RefCell::new(Vec::new()));
        let write = |number: u32| {
            let (mut left, begun, ended) = (if number == 1 { 1 } else { 5 }, &begun, &ended);
            let poll = poll_fn(move |context| {
                if left == 0 {
                    return std::task::Poll::Ready(());
                }
                left -= 1;
                context.waker().wake_by_ref();
                std::task::Poll::Pending
            });
            async move {
                begun.borrow_mut().push(number);
                poll.await;
                ended.borrow_mut().push(number);
                let (kind, reason) = (MediumErrorKind::Failed, String::new());
                let failure = MediumError { kind, doing: "write", offset_bytes: number.into(), reason };
                if number == 1 { Err(failure) } else { Ok(()) }
            }
        };
        assert_eq!(block_on(all_ended((0..9).map(write), 3)).unwrap_err().offset_bytes, 1);
        assert_eq!((begun.into_inner(), ended.into_inner()), (vec![0, 1, 2], vec![1, 0, 2]));
        assert!(block_on(all_ended([std::future::ready(Ok(()))].into_iter(), 3)).is_ok());
    }
}
