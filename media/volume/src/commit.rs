//! Commits: map entries and their data become durable.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use futures_util::future::join_all;
use sealblock_block::{Clock, Condition, Error, Medium, MediumError, Outcome, Response};

use crate::format::{Layout, MAP_ENTRY_BYTES, MapEntryKind, MapEntryRun};
use crate::map_page::MapLookup;
use crate::mutation::Mutation;
use crate::patches::Patch;
use crate::volume::{Volume, VolumeState};

/// Map entries gathered in memory at most; bounds what an unclean end can lose and the memory of the memtable.
const MAX_UNCOMMITTED: usize = 32 << 10;
/// Pages read at once when map entries are put into them.
const MAX_PAGES_PER_BATCH: usize = 64;

/// A map entry of a block or a run of blocks, and its bytes in the log.
pub(crate) type Encoded = (MapEntryRun, [u8; MAP_ENTRY_BYTES]);

/// A map entry, or a part of one, about blocks of one page.
struct Piece {
    page: u64,
    run: MapEntryRun,
    patch: Patch,
}

/// What flushes wait for: the end of the first commit that begins after them.
#[derive(Default)]
struct FlushWaiter {
    result: RefCell<Option<Result<(), Error>>>,
}

/// Waiters for commits, and the results of commits.
pub(crate) struct CommitQueue {
    /// Notified when the worker has something to do.
    pub wanted: Rc<Condition>,
    /// Counts commits that have ended.
    pub completed: Cell<u64>,
    /// Why the volume failed: writes are disabled.
    pub failure: RefCell<Option<String>>,
    /// Map entries in memory at which writers wait for a commit.
    pub max_uncommitted: usize,
    /// There are, or may be, map entries of blocks that were made unreadable.
    pub uncorrectable: Cell<bool>,
    /// The worker waits without a timer, because there is nothing to commit.
    pub idle: Cell<bool>,
    ticket: RefCell<Rc<FlushWaiter>>,
    flush_wanted: Cell<bool>,
    space_wanted: Cell<bool>,
    /// Writers that wait for physical blocks.
    starved: Cell<usize>,
    last_error: RefCell<Option<Error>>,
    flushed: Condition,
}

/// A writer that waits for physical blocks.
pub(crate) struct Starved<'a>(&'a CommitQueue);

impl Drop for Starved<'_> {
    fn drop(&mut self) {
        self.0.starved.set(self.0.starved.get() - 1);
    }
}

impl CommitQueue {
    /// For a volume laid out like this, whose worker waits for `wanted`.
    pub fn new(layout: &Layout, wanted: Rc<Condition>) -> CommitQueue {
        // A quarter of the log at most goes into one commit, so that a checkpoint can always make room for the next.
        let quarter = (layout.log_sectors() / 4 * layout.log_sector_entries()) as usize;
        CommitQueue {
            wanted,
            completed: Cell::new(0),
            failure: RefCell::default(),
            max_uncommitted: quarter.min(MAX_UNCOMMITTED),
            uncorrectable: Cell::new(false),
            idle: Cell::new(false),
            ticket: RefCell::default(),
            flush_wanted: Cell::new(false),
            space_wanted: Cell::new(false),
            starved: Cell::new(0),
            last_error: RefCell::default(),
            flushed: Condition::default(),
        }
    }

    /// There are map entries to commit some time: starts the worker's timer if it does not run.
    pub fn schedule(&self) {
        if self.idle.replace(false) {
            self.wanted.notify();
        }
        if self.starved.get() > 0 {
            self.request_space();
        }
    }

    /// A writer waits for physical blocks until this is dropped. Commits are asked for where there is something to commit, now or once
    /// there is: one of nothing frees no physical block, and asking for it again and again would keep the worker busy to no end while
    /// what holds the physical blocks is in flight.
    pub fn starve(&self, has_work: bool) -> Starved<'_> {
        self.starved.set(self.starved.get() + 1);
        if has_work {
            self.request_space();
        }
        Starved(self)
    }

    /// Writers need physical blocks or room in the memtable soon.
    pub fn request_space(&self) {
        if !self.space_wanted.replace(true) {
            self.wanted.notify();
        }
    }

    /// True if a flush or a writer waits for a commit.
    pub fn is_due(&self) -> bool {
        self.flush_wanted.get() || self.space_wanted.get()
    }

    /// The error of the last commit, if one ended since the count was `since`.
    pub fn error_since(&self, since: u64) -> Option<Error> {
        (self.completed.get() != since).then(|| self.last_error.borrow().clone()).flatten()
    }

    /// Takes the flushes that wait now; the returned function completes them.
    pub fn begin(&self) -> impl FnOnce(Result<(), Error>) + '_ {
        self.flush_wanted.set(false);
        self.space_wanted.set(false);
        let ticket = self.ticket.take();
        move |result| {
            *self.last_error.borrow_mut() = result.as_ref().err().cloned();
            *ticket.result.borrow_mut() = Some(result);
            self.completed.set(self.completed.get() + 1);
            self.flushed.notify();
        }
    }
}

impl<M: Medium, C: Clock> Volume<M, C> {
    /// Waits until everything written before is durable.
    pub(crate) async fn flush(&self) -> Outcome {
        if self.is_read_only || (self.memtable.is_empty() && self.state.get() != VolumeState::Failed) {
            return Ok(Response::Done);
        }
        if self.state.get() != VolumeState::Closing {
            self.check_writable()?;
        }
        let ticket = self.commits.ticket.borrow().clone();
        if !self.commits.flush_wanted.replace(true) {
            self.commits.wanted.notify();
        }
        self.commits.flushed.wait_until(|| ticket.result.borrow().is_some()).await;
        let result = ticket.result.borrow().clone();
        result.unwrap_or_else(|| Err(self.failed())).map(|()| Response::Done)
    }

    /// Commits everything that is in the memtable when it begins. `answer` is called as soon as all of it is durable, or has
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

    /// Makes map entries of the memtable durable, as many as one commit takes. Gives them, and whether that was all there were.
    async fn commit_once(&self) -> Result<(Vec<Encoded>, bool), Error> {
        self.mark_log_in_use().await?;
        let quarter = self.log_entries_in(self.layout.log_sectors() / 4);
        let needed = || self.log_sectors_for(self.memtable.active_log_entries().min(quarter));
        let mut due = 0;
        // While it waits for room, more may be put in.
        while due < needed() {
            due = needed();
            self.make_room(due).await?;
        }
        let max = quarter.min(self.log_entries_in(due));
        let mut runs = self.memtable.begin_commit(max);
        let place = self.log.place_commit(&runs, &self.layout, self.mutation);
        runs.iter_mut().for_each(|run| run.first.generation = generation(place.first));
        let entries = self.encode(&runs);
        let is_all = self.memtable.active_len() == 0;
        match self.write_log(place, &entries).await {
            Ok(()) => Ok((entries, is_all)),
            // How much of the log was written is not known, so nothing can be written behind it.
            Err(error) => Err(self.fail(&error)),
        }
    }

    /// The bytes of map entries in the log.
    pub(crate) fn encode(&self, entries: &[MapEntryRun]) -> Vec<Encoded> {
        let said = |run: &MapEntryRun| match self.mutation {
            // An injected fault: after a crash the last block of the run is as it was before.
            Mutation::ShortRun if run.blocks > 1 => run.part(run.start(), run.end() - 1),
            _ => *run,
        };
        entries.iter().map(|run| (*run, said(run).encode(self.seed))).collect()
    }

    /// Hands durable map entries, in order of their blocks, over to the block map. With `defer_free`, the physical blocks they
    /// replace are deallocated.
    pub(crate) async fn apply(&self, entries: &[Encoded], defer_free: bool) {
        let mut pieces = entries.iter().flat_map(|encoded| self.page_parts(encoded)).peekable();
        while pieces.peek().is_some() {
            let (mut batch, mut pages) = (Vec::<Piece>::new(), 0);
            let is_same_page = |batch: &[Piece], next: &Piece| batch.last().is_some_and(|last| last.page == next.page);
            while let Some(piece) = pieces.next_if(|next| pages < MAX_PAGES_PER_BATCH || is_same_page(&batch, next)) {
                pages += usize::from(!is_same_page(&batch, &piece));
                batch.push(piece);
            }
            let page_batches: Vec<&[Piece]> = batch.chunk_by(|a, b| a.page == b.page).collect();
            if defer_free && self.mutation != Mutation::ReuseEarly {
                join_all(page_batches.iter().map(|pieces_of_page| self.defer_free_replaced(pieces_of_page))).await;
            }
            for pieces_of_page in page_batches {
                self.block_map.patches.put(pieces_of_page[0].page, pieces_of_page.iter().map(|piece| piece.patch));
            }
        }
    }

    /// The parts of a map entry that are each about one page.
    fn page_parts<'a>(&'a self, (run, bytes): &'a Encoded) -> impl Iterator<Item = Piece> + 'a {
        self.layout.page_pieces(run.extent()).map(move |(page, piece)| {
            let part = run.part(piece.start().get(), piece.last().get() + 1);
            let index = self.block_map.locate(piece.start()).1 as u16;
            let patch = match run.blocks {
                1 => Patch { index, blocks: 1, bytes: *bytes },
                _ => Patch::new(index, &part, self.seed),
            };
            Piece { page, run: part, patch }
        })
    }

    /// Frees the physical blocks that map entries of one page replace. An unknown one stays in use until the block group's map
    /// pages are read the next time.
    async fn defer_free_replaced(&self, pieces_of_page: &[Piece]) {
        let number = pieces_of_page[0].page;
        let mut page = self.block_map.cached(number);
        for entry in pieces_of_page.iter().flat_map(|piece| piece.run.entries()) {
            let old = loop {
                if let Some(old) = self.lookup_with(entry.lba, |_| page.as_deref()) {
                    break old;
                }
                match self.block_map.page(&self.medium, number).await {
                    Ok(found) => page = Some(found),
                    Err(error) => {
                        tracing::warn!(%error, "cannot read the map entries of replaced blocks; their physical blocks stay in use");
                        return;
                    }
                }
            };
            // Only a map entry that is beyond doubt frees its physical block: a stale one's may be another block's by now.
            if let MapLookup::Mapped(old) = old
                && old.kind == MapEntryKind::Stored
                && self.is_in_bounds(&old)
            {
                self.allocator.defer_free(self.layout.group_of(old.lba), old.pbn, entry.kind != MapEntryKind::Stored);
            }
        }
    }

    /// Stops all writes for good.
    pub(crate) fn fail(&self, why: &MediumError) -> Error {
        self.state.set(VolumeState::Failed);
        *self.commits.failure.borrow_mut() = Some(why.to_string());
        tracing::error!(%why, "volume failed, writes disabled");
        self.commits.wanted.notify();
        self.checkpoints.wake();
        self.failed()
    }
}

/// The generation of map entries whose commit begins with this sector, or joins it; never 0.
fn generation(sequence: u64) -> u16 {
    (sequence % u64::from(u16::MAX)) as u16 + 1
}
