//! Commits: map entries and their data become durable.

use futures_util::future::join_all;
use sealblock_block::{Clock, Error, Medium, Outcome, Response};

use crate::format::{MapEntry, MapEntryKind, MapEntryRun};
use crate::log::Encoded;
use crate::map::map_page::MapLookup;
use crate::map::patches::Patch;
use crate::options::Mutation;
use crate::volume::{Volume, VolumeState};

/// Pages that are read at once to free replaced physical blocks.
const MAX_PAGES_PER_BATCH: usize = 64;
/// A commit of more blocks than this lets other requests run before each batch.
const LONG_COMMIT_BLOCKS: u64 = 1 << 14;

/// A map entry, or a part of one, for blocks of one page.
struct PagePart {
    page: u64,
    run: MapEntryRun,
    patch: Patch,
}

impl<M: Medium, C: Clock> Volume<M, C> {
    /// Waits until everything written before is durable.
    pub(crate) async fn flush(&self) -> Outcome {
        let is_kept = self.is_read_only || self.keeps_lost_log.get();
        if is_kept || (self.memtable.is_empty() && self.state.get() != VolumeState::Failed) {
            return Ok(Response::Done);
        }
        if self.state.get() != VolumeState::Closing {
            self.check_writable()?;
        }
        self.commits.flush().await.map(|()| Response::Done)
    }

    /// Commits the content of the memtable at this time. `answer` is called as soon as all of it is durable, or has
    /// failed: a flush need not wait for the block map.
    pub(crate) async fn commit(&self, answer: impl FnOnce(Result<(), Error>)) -> Result<(), Error> {
        let mut answer = Some(answer);
        let result = loop {
            if self.memtable.active_len() == 0 {
                break Ok(());
            }
            let (entries, is_last) = match self.commit_once().await {
                Ok(committed) => committed,
                Err(error) => break Err(error),
            };
            if is_last && let Some(answer) = answer.take() {
                answer(Ok(()));
            }
            self.apply(&entries, true).await;
            self.log.end_commit();
            self.memtable.end_commit();
            if is_last {
                break Ok(());
            }
        };
        if let Some(answer) = answer {
            answer(result.clone());
        }
        result
    }

    /// Makes map entries of the memtable durable, as many as one commit takes. Returns them, and true if these were
    /// all.
    async fn commit_once(&self) -> Result<(Vec<Encoded>, bool), Error> {
        self.mark_log_in_use().await?;
        let quarter = self.log.entries_in(self.layout.log_sectors() / 4);
        let needed = || self.log.sectors_for(self.memtable.active_log_entries().min(quarter));
        let mut due = 0;
        // While it waits for room, more entries may be added.
        while due < needed() {
            due = needed();
            self.make_room(due).await?;
        }
        let max = quarter.min(self.log.entries_in(due));
        let mut runs = self.memtable.begin_commit(max);
        let place = self.log.place_commit(&runs);
        runs.iter_mut().for_each(|run| run.first.generation = generation(place.first));
        let entries = self.encode(&runs);
        let is_all = self.memtable.active_len() == 0;
        debug_assert!(
            is_all || !self.notes.are_kept(),
            "a half has notes of one memtable, which is committed as a whole"
        );
        // Nothing was awaited since the memtable was taken over.
        self.notes.begin_half(self.log.end_of(&place, entries.len()), self.mutation);
        match self.log.write(&self.medium, place, &entries).await {
            Ok(()) => Ok((entries, is_all)),
            // It is unknown how much of the log was written, so nothing can be appended.
            Err(error) => Err(self.fail(&error)),
        }
    }

    /// Makes map entries from notes durable by one commit, during recovery, when nothing else runs.
    pub(crate) async fn commit_noted(&self, runs: &[MapEntryRun]) -> Result<(), Error> {
        let place = self.log.place_commit(runs);
        let generation = generation(place.first);
        let runs: Vec<MapEntryRun> =
            runs.iter().map(|run| MapEntryRun { first: MapEntry { generation, ..run.first }, ..*run }).collect();
        let entries = self.encode(&runs);
        self.log.write(&self.medium, place, &entries).await.map_err(|error| self.fail(&error))?;
        self.log.end_commit();
        Ok(())
    }

    /// Encodes map entries for the log.
    pub(crate) fn encode(&self, entries: &[MapEntryRun]) -> Vec<Encoded> {
        let said = |run: &MapEntryRun| match self.mutation.injected() {
            // An injected fault: after a crash the last block of the run is as it was before.
            Mutation::ShortRun if run.blocks > 1 => run.part(run.start(), run.end() - 1),
            _ => *run,
        };
        entries.iter().map(|run| (*run, said(run).encode(self.seed))).collect()
    }

    /// Moves durable map entries, in order of their blocks, to the block map's patches. With `defer_free`, the physical
    /// blocks that they replace are freed.
    pub(crate) async fn apply(&self, entries: &[Encoded], defer_free: bool) {
        let mut pieces = entries.iter().flat_map(|encoded| self.page_parts(encoded)).peekable();
        let is_long = entries.iter().map(|(run, _)| u64::from(run.blocks)).sum::<u64>() > LONG_COMMIT_BLOCKS;
        while pieces.peek().is_some() {
            // Completed flushes and other requests run before each batch of a long run.
            if is_long {
                self.medium.submitted().await;
            }
            let (mut batch, mut pages) = (Vec::<PagePart>::new(), 0);
            let is_same_page =
                |batch: &[PagePart], next: &PagePart| batch.last().is_some_and(|last| last.page == next.page);
            while let Some(piece) = pieces.next_if(|next| pages < MAX_PAGES_PER_BATCH || is_same_page(&batch, next)) {
                pages += usize::from(!is_same_page(&batch, &piece));
                batch.push(piece);
            }
            let page_batches: Vec<&[PagePart]> = batch.chunk_by(|a, b| a.page == b.page).collect();
            if defer_free && !self.mutation.is(Mutation::ReuseEarly) {
                join_all(page_batches.iter().map(|pieces_of_page| self.defer_free_replaced(pieces_of_page))).await;
            }
            for pieces_of_page in page_batches {
                self.block_map.patches.put(pieces_of_page[0].page, pieces_of_page.iter().map(|piece| piece.patch));
            }
        }
    }

    /// The parts of a map entry, each for one page.
    fn page_parts<'a>(&'a self, (run, bytes): &'a Encoded) -> impl Iterator<Item = PagePart> + 'a {
        self.layout.page_pieces(run.extent()).map(move |(page, piece)| {
            let part = run.part(piece.start().get(), piece.last().get() + 1);
            let index = self.block_map.locate(piece.start()).1 as u16;
            let patch = match run.blocks {
                1 => Patch { index, blocks: 1, bytes: *bytes },
                _ => Patch::new(index, &part, self.seed),
            };
            PagePart { page, run: part, patch }
        })
    }

    /// Frees the physical blocks that map entries of one page replace. If the old map entry is unknown, its physical
    /// block stays in use until the block group's map pages are read the next time.
    async fn defer_free_replaced(&self, pieces_of_page: &[PagePart]) {
        let number = pieces_of_page[0].page;
        let mut page = self.block_map.cached(number);
        let mut frees = self.allocator.frees(self.block_map.group_of(number));
        for PagePart { run, .. } in pieces_of_page {
            let is_unmapped = run.first.kind != MapEntryKind::Stored;
            let mut free = |old| {
                // Only a valid map entry frees its physical block: a stale one may name a block that is in use again.
                if let MapLookup::Mapped(old) = old
                    && old.kind == MapEntryKind::Stored
                    && self.layout.holds(&old)
                {
                    frees.add(old.pbn, is_unmapped);
                }
            };
            // For a single block the patches may have a newer map entry than its page, which then need not be read.
            if run.blocks == 1
                && let Some(old) = self.lookup_with(run.first.lba, |_| page.as_deref())
            {
                free(old);
                continue;
            }
            if page.is_none() {
                match self.block_map.page(&self.medium, number).await {
                    Ok(found) => page = Some(found),
                    Err(error) => {
                        tracing::warn!(%error, "cannot read the map entries of replaced blocks; their physical blocks stay in use");
                        return;
                    }
                }
            }
            let page = page.as_deref().expect("it was read");
            self.lookup_each(number, page, run.extent(), |_, old| free(old));
        }
    }
}

/// The generation of map entries whose commit begins with this sector, or joins it; never 0.
fn generation(sequence: u64) -> u16 {
    (sequence % u64::from(u16::MAX)) as u16 + 1
}
