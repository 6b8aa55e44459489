//! Commits: records and their data become durable.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use futures_util::future::try_join_all;
use sealblock_block::{Answer, Clock, Error, Event, Medium, MediumError, Outcome};

use crate::format::{Kind, Layout, LogHeader, LogSector, RECORD_BYTES, Record};
use crate::open::Mutation;
use crate::table::{Entry, Page};
use crate::volume::{State, Volume};

/// Records gathered in memory at most; bounds what an unclean end can lose and the memory of the overlay.
const MOST_OPEN: usize = 32 << 10;
/// Pages read at once when records are put into them.
const PAGES_AT_ONCE: usize = 64;

/// Where the log stands. Numbers are sequence numbers of sectors.
pub(crate) struct Log {
    /// The next sector to be written.
    pub next: Cell<u64>,
    /// Every sector before this one is durable, with its data.
    pub durable: Cell<u64>,
    /// Every sector before this one is in the tables, and the superblock says so.
    pub tail: Cell<u64>,
}

/// A record and its bytes.
pub(crate) type Encoded = (Record, [u8; RECORD_BYTES]);

/// What flushes wait for: the end of the first commit that begins after them.
#[derive(Default)]
struct Ticket {
    result: RefCell<Option<Result<(), Error>>>,
}

/// Who waits for commits, and how they end.
pub(crate) struct Commits {
    /// Notified when the worker has something to do.
    pub wanted: Rc<Event>,
    /// Counts commits that have ended.
    pub ended: Cell<u64>,
    /// Why the volume takes no more writes.
    pub failure: RefCell<Option<String>>,
    /// Records in memory at which writers wait for a commit.
    pub most_open: usize,
    /// There are, or may be, records of blocks that were made unreadable.
    pub uncorrectable: Cell<bool>,
    /// The worker waits without a timer, because there is nothing to commit.
    pub dozing: Cell<bool>,
    ticket: RefCell<Rc<Ticket>>,
    flush_wanted: Cell<bool>,
    space_wanted: Cell<bool>,
    last_error: RefCell<Option<Error>>,
    answered: Event,
}

impl Commits {
    /// For a volume laid out like this, whose worker waits for `wanted`.
    pub fn new(layout: &Layout, wanted: Rc<Event>) -> Commits {
        // A quarter of the log at most goes into one commit, so that a checkpoint can always make room for the next.
        let quarter = layout.log_sectors() as usize / 4 * LogSector::capacity(layout.sector_bytes());
        Commits {
            wanted,
            ended: Cell::new(0),
            failure: RefCell::default(),
            most_open: quarter.min(MOST_OPEN),
            uncorrectable: Cell::new(false),
            dozing: Cell::new(false),
            ticket: RefCell::default(),
            flush_wanted: Cell::new(false),
            space_wanted: Cell::new(false),
            last_error: RefCell::default(),
            answered: Event::default(),
        }
    }

    /// There are records to commit some time: starts the worker's timer if it does not run.
    pub fn note_work(&self) {
        if self.dozing.replace(false) {
            self.wanted.notify();
        }
    }

    /// Writers need slots or room in the overlay soon.
    pub fn want_space(&self) {
        if !self.space_wanted.replace(true) {
            self.wanted.notify();
        }
    }

    /// Whether somebody waits for a commit.
    pub fn due(&self) -> bool {
        self.flush_wanted.get() || self.space_wanted.get()
    }

    /// The error of the last commit, if one ended since the count was `since`.
    pub fn error_since(&self, since: u64) -> Option<Error> {
        (self.ended.get() != since).then(|| self.last_error.borrow().clone()).flatten()
    }

    /// Takes over everybody who waits now; the returned function answers them.
    pub fn begin(&self) -> impl FnOnce(Result<(), Error>) + '_ {
        self.flush_wanted.set(false);
        self.space_wanted.set(false);
        let ticket = self.ticket.take();
        move |result| {
            *self.last_error.borrow_mut() = result.as_ref().err().cloned();
            *ticket.result.borrow_mut() = Some(result);
            self.ended.set(self.ended.get() + 1);
            self.answered.notify();
        }
    }
}

impl<M: Medium, C: Clock> Volume<M, C> {
    /// Waits until everything written before is durable.
    pub(crate) async fn flush(&self) -> Outcome {
        if self.read_only || (self.overlay.is_empty() && self.state.get() != State::Failed) {
            return Ok(Answer::Done);
        }
        if self.state.get() != State::Closing {
            self.check_writable()?;
        }
        let ticket = self.commits.ticket.borrow().clone();
        if !self.commits.flush_wanted.replace(true) {
            self.commits.wanted.notify();
        }
        self.commits.answered.until(|| ticket.result.borrow().is_some()).await;
        let result = ticket.result.borrow().clone();
        result.unwrap_or_else(|| Err(self.failed())).map(|()| Answer::Done)
    }

    /// Commits everything that is in the overlay when it begins.
    pub(crate) async fn commit(&self) -> Result<(), Error> {
        while self.overlay.open_len() > 0 {
            if self.commit_once().await? {
                break;
            }
        }
        Ok(())
    }

    /// One commit; whether it took all records there were.
    async fn commit_once(&self) -> Result<bool, Error> {
        let per_sector = LogSector::capacity(self.layout.sector_bytes());
        let most = self.layout.log_sectors() as usize / 4 * per_sector;
        if self.commits.uncorrectable.get() && !self.superblock.get().uncorrectable {
            self.adopt_uncorrectable().await?;
        }
        let sectors_due = self.overlay.open_len().min(most).div_ceil(per_sector) as u64;
        if self.log.next.get() + sectors_due > self.log.tail.get() + self.layout.log_sectors() {
            self.checkpoint(false).await?;
        }
        let room = (self.log.tail.get() + self.layout.log_sectors() - self.log.next.get()) as usize * per_sector;
        let first = self.log.next.get();
        let records = self.encode(&self.overlay.begin_commit(most.min(room), generation(first)));
        let all = self.overlay.open_len() == 0;
        if let Err(error) = self.write_log(first, &records).await {
            // How much of the log was written is not known, so nothing can be written behind it.
            return Err(self.fail(&error));
        }
        let sectors = records.len().div_ceil(per_sector) as u64;
        self.log.next.set(first + sectors);
        self.log.durable.set(first + sectors);
        if let Err(error) = self.apply(&records, true).await {
            return Err(self.fail(&error));
        }
        self.overlay.end_commit();
        Ok(all)
    }

    /// The bytes of records, the same in the log and in the tables.
    pub(crate) fn encode(&self, records: &[Record]) -> Vec<Encoded> {
        records.iter().map(|record| (*record, record.encode(self.seed))).collect()
    }

    /// Writes records to the log and makes them durable, with all data written before.
    async fn write_log(&self, first: u64, records: &[Encoded]) -> Result<(), MediumError> {
        if records.iter().any(|(record, _)| record.loose) {
            // Recovery cannot tell such data by their guard, so they must be durable before their records.
            self.medium.sync().await?;
        }
        let sector = self.layout.sector_bytes() as usize;
        let per_sector = LogSector::capacity(sector as u32);
        let mut buffer = self.medium.buffer(records.len().div_ceil(per_sector) * sector);
        let bodies = records.chunks(per_sector).zip(buffer.chunks_exact_mut(sector));
        for (sequence, (body, place)) in (first..).zip(bodies) {
            let header = LogHeader { sequence, durable: self.log.durable.get() };
            LogSector::encode(place, self.seed, header, body.iter().map(|(_, bytes)| bytes));
        }
        let bytes = buffer.freeze();
        let (position, length) = (first % self.layout.log_sectors() * sector as u64, bytes.len() as u64);
        let head = length.min(self.layout.log_bytes() - position);
        self.medium.write(self.layout.log_offset() + position, bytes.slice(..head as usize)).await?;
        if head < length {
            self.medium.write(self.layout.log_offset(), bytes.slice(head as usize..)).await?;
        }
        match self.mutation {
            Mutation::SkipSync => Ok(()),
            _ => self.medium.sync().await,
        }
    }

    /// Puts durable records, in order of their blocks, into the pages of the tables. With `retire`, the slots they replace
    /// are given up.
    pub(crate) async fn apply(&self, records: &[Encoded], retire: bool) -> Result<(), MediumError> {
        let number = |(record, _): &Encoded| self.table.locate(record.lba).0;
        let groups: Vec<&[Encoded]> = records.chunk_by(|a, b| number(a) == number(b)).collect();
        for groups in groups.chunks(PAGES_AT_ONCE) {
            let pages = groups.iter().map(|group| self.table.page(&self.medium, number(&group[0])));
            for (group, page) in groups.iter().zip(try_join_all(pages).await?) {
                group.iter().for_each(|record| self.apply_one(record, &page, retire));
                self.table.mark_dirty(number(&group[0]));
            }
        }
        Ok(())
    }

    fn apply_one(&self, (record, bytes): &Encoded, page: &Page, retire: bool) {
        let (_, index) = self.table.locate(record.lba);
        // Only a record that is beyond doubt gives up its slot: a stale one's may be another block's by now.
        if retire
            && self.mutation != Mutation::ReuseEarly
            && let Entry::Record(old) = page.entry(index, record.lba, self.seed)
            && old.kind == Kind::Stored
            && self.plausible(&old)
        {
            let punch = record.kind != Kind::Stored;
            self.slots.retire(self.layout.zone_of(old.lba), old.slot, punch);
        }
        page.set_raw(index, *bytes, record.generation);
    }

    /// Stops all writes for good.
    pub(crate) fn fail(&self, why: &MediumError) -> Error {
        self.state.set(State::Failed);
        *self.commits.failure.borrow_mut() = Some(why.to_string());
        tracing::error!(%why, "the volume takes no more writes");
        self.failed()
    }
}

/// The generation of records whose commit begins with this sector; never 0.
fn generation(sequence: u64) -> u16 {
    (sequence % u64::from(u16::MAX)) as u16 + 1
}
