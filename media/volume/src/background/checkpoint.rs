//! Checkpoints: the block map catches up with the log, and the log's space is free again.
//!
//! Checkpoints run beside commits, which wait for one only where there is no room without it. What commits add to the pages
//! meanwhile is durable in the log behind the place where the checkpoint lets the log begin, and may well be written with them.

use std::cell::Cell;

use futures_util::future::{join, join_all};
use futures_util::stream::{self, StreamExt};
use sealblock_block::{Clock, Error, Freshness, Medium, MediumError};

use crate::format::{Answered, Generations, MapEntryRun, PageOffsets, Superblock};
use crate::medium::superblocks;
use crate::options::Mutation;
use crate::volume::Volume;

/// Pages written at once.
const PAGES_IN_FLIGHT: usize = 32;
/// Bytes of map pages that are made at once where a block group is initialized, and how many times that is in flight.
const UNWRITTEN_BYTES: u64 = 1 << 20;
const UNWRITTEN_IN_FLIGHT: usize = 8;
/// Sectors smaller than this are not written apart where a block group is initialized: a block of common file systems and drives.
const MIN_APART_BYTES: usize = 4096;
/// Block groups that wait to be initialized until a checkpoint should not wait. What waits when the volume is closed is about that much at most,
/// 1.2 GiB, however large the volume is.
const MAX_UNINITIALIZED: u64 = 128;
/// Blocks whose map entries go to the block map together, those of one long run more.
const PORTION_BLOCKS: u64 = 1024;

impl<M: Medium, C: Clock> Volume<M, C> {
    /// Makes checkpoints on request, until [`Checkpoints::stop`] or the volume has failed.
    pub(crate) async fn run_checkpoints(&self) {
        while self.checkpoints.next(|| self.has_failed()).await {
            let result = self.checkpoint(false).await;
            if let Err(error) = &result {
                tracing::warn!(%error, "checkpoint failed; the log keeps its map entries");
            }
            self.checkpoints.end(result);
        }
    }

    /// Waits until there is room for so many sectors in the log, and for their map entries in memory.
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

    /// Writes every page whose map entries the block map does not have yet, then a superblock that begins the log behind these
    /// map entries.
    ///
    /// # Errors
    /// When the medium fails. If it was a write, the log still has everything, and a later checkpoint can do what this one
    /// could not. After a failed sync it is unknown which writes were lost, so no later one may build on them: the volume takes
    /// no more writes.
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

    /// Writes what waits for the block map while nothing is committed, and leaves the log as it is: where a log that a crash
    /// has left says more than there is memory for, before the checkpoint that gives it up. Interrupted, it will say the same
    /// again.
    ///
    /// # Errors
    /// As [`Volume::checkpoint`].
    pub(crate) async fn drain_patches(&self) -> Result<(), Error> {
        let _alone = self.checkpoints.writing_map.lock().await;
        self.write_map_pages().await?;
        self.block_map.patches.end();
        Ok(())
    }

    /// Takes all map entries that wait for the block map, and writes their pages; durable in the end. Gives the sector up to
    /// which the pages have the log.
    async fn write_map_pages(&self) -> Result<u64, Error> {
        self.new_groups.set(0);
        self.block_map.patches.take();
        let target = self.log.take_applied();
        let pages = self.block_map.to_write();
        self.initialize_groups(&pages).await?;
        let writes = pages.iter().map(|&number| self.block_map.write(&self.medium, number, target));
        all_ended(writes, PAGES_IN_FLIGHT).await?;
        if !self.mutation.is(Mutation::UnsyncedTables) {
            self.sync_or_fail().await?;
        }
        Ok(target)
    }

    /// Gives the block groups of these pages map pages, where they have none: all generations of the block group first, both
    /// copies, and only when they are durable the bit in the group map that has them read.
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

    /// Writes both copies of the generations of pages none of whose blocks has a map entry, and that lie behind one another. So do the second
    /// copies, which are one write.
    async fn write_unwritten(&self, places: Vec<PageOffsets>) -> Result<(), MediumError> {
        let (sector, page) = (self.layout.sector_bytes() as usize, self.layout.page_bytes() as usize);
        let mut second = self.medium.buffer(places.len() * sector);
        for (place, sector) in places.iter().zip(second.chunks_exact_mut(sector)) {
            Generations::unwritten(place.first, self.layout.page_blocks()).encode(sector, self.seed);
        }
        let second = second.freeze();
        let heads = || second.chunks_exact(sector);
        // The first copies are the heads of pages, apart. Small writes take a file system as long as large ones, and hold up one another.
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

    /// Says in the superblock, before the first map entry goes to the log, that the log is not empty any more, which is true by then:
    /// its anchor is durable. And before the first
    /// map entry of a block that was made unreadable that there may be such: programs that do not know these then refuse the volume.
    pub(crate) async fn mark_log_in_use(&self) -> Result<(), Error> {
        let answered = if self.notes.are_needless() { Answered::Volatile } else { self.superblock.get().answered };
        self.mark_answered(answered).await
    }

    /// The same, and what is known of changes that are answered.
    pub(crate) async fn mark_answered(&self, answered: Answered) -> Result<(), Error> {
        let has_it = |before: &Superblock| {
            let uncorrectable = before.uncorrectable || self.commits.uncorrectable.get();
            before.is_anchored && uncorrectable == before.uncorrectable && answered == before.answered
        };
        if has_it(&self.superblock.get()) {
            return Ok(());
        }
        // A commit and a note may both be the first: the superblock of the one must not call a log anchored whose anchor the other one
        // is still writing, or could not make durable.
        let _alone = self.checkpoints.writing_superblock.lock().await;
        let before = self.superblock.get();
        if has_it(&before) {
            return Ok(());
        }
        if self.has_failed() {
            return Err(self.failed());
        }
        let uncorrectable = before.uncorrectable || self.commits.uncorrectable.get();
        // An earlier attempt may have made it durable, and then failed to write the superblock.
        let is_empty = self.log.next.get() == self.log.tail.get();
        let begins = !before.is_anchored && is_empty && !self.mutation.is(Mutation::NoAnchor);
        if begins {
            self.log.write_anchor(&self.medium).await.map_err(|error| self.fail(&error))?;
            self.sync_or_fail().await?;
        }
        let anchor = self.log.next.get() - u64::from(begins);
        let is_begun = before.is_begun || begins && before.log_tail == anchor;
        let changed = Superblock { is_clean: false, is_anchored: true, is_begun, uncorrectable, answered, ..before };
        self.write_superblock(changed).await
    }

    /// Writes the next superblock; durable in the end.
    pub(crate) async fn change_superblock(&self, change: impl FnOnce(Superblock) -> Superblock) -> Result<(), Error> {
        let _alone = self.checkpoints.writing_superblock.lock().await;
        self.write_superblock(change(self.superblock.get())).await
    }

    /// The same for who has the turn.
    async fn write_superblock(&self, changed: Superblock) -> Result<(), Error> {
        let is_anchored = changed.is_anchored && !changed.is_clean;
        let is_begun = changed.is_begun && is_anchored;
        let labels_written = self.reserved.labels_written();
        let write_seq = self.superblock.get().write_seq + 1;
        let superblock = Superblock { write_seq, is_anchored, is_begun, labels_written, ..changed };
        superblocks::write(&self.medium, &superblock).await?;
        self.sync_or_fail().await?;
        self.superblock.set(superblock);
        Ok(())
    }

    /// Writes what recovery has found to the block map, and empties the log. A few map entries may say more than there is
    /// memory for, so what waits for the block map goes there bit by bit.
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
        // The log goes on far behind what a crash left, where it has no sector yet.
        self.superblock.set(Superblock { is_anchored: false, ..self.superblock.get() });
        self.checkpoint(false).await?;
        // The second superblock, and with it all of them, begins the log there: what recovery left out must not be read again, should
        // the newer copy be lost.
        self.mark_answered(self.superblock.get().answered).await
    }

    /// Gives up a log of which sectors are lost, before the first block changes: what is left of it goes to the block map, and it
    /// begins anew. From here on nothing on the medium tells that blocks may be older; who opened the volume has recorded it.
    pub(crate) async fn give_up_log(&self) -> Result<(), Error> {
        let _change = self.begin_change()?;
        let _alone = self.checkpoints.giving_up_log.lock().await;
        if !self.keeps_lost_log.get() {
            return Ok(());
        }
        self.block_map.groups.repair(&self.medium).await?;
        // What was noted beside it says nothing of the log that begins now.
        self.superblock.set(Superblock { answered: Answered::Volatile, ..self.superblock.get() });
        self.checkpoint_recovered(&self.memtable.recovered()).await?;
        self.memtable.end_commit();
        tracing::warn!("a log of which sectors were lost is given up: blocks may be older than what was written");
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

    /// Whether the log or what waits for the block map is so full that a checkpoint should not wait. The more map entries there are,
    /// the more of them share a page; what is left of the log is for commits while the checkpoint runs.
    pub(crate) fn checkpoint_due(&self) -> bool {
        (self.log.next.get() - self.log.tail.get()) * 4 > self.layout.log_sectors() * 3
            || self.block_map.is_dirty_limit_reached()
            || self.new_groups.get() >= MAX_UNINITIALIZED
    }
}

/// Makes writes, so many at once, and none more after one that failed. It ends when all that began have ended: one that the medium still
/// makes must not land on what a later checkpoint writes.
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
