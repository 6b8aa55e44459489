//! Notes: changes that were answered and are not durable, for the case that this process dies.
//!
//! A change is in the memtable for up to a second before a commit writes its map entries to the log. Its data are on the medium by then,
//! but no map entry that names them. So before a map entry is put into the memtable, it is noted: written through the page cache, which
//! outlives the process, in free physical blocks that the superblock names. `recovery` takes notes over where they are all there, and
//! of this boot of the machine. Where a medium takes no notes, changes are durable before they are answered.
//!
//! Invariants: data complete, then noted, then in the memtable, then answered; *every* map entry that is put into the memtable is noted,
//! also that of a block that was moved, so the newest note of a block is its newest change. Notes of one memtable fill one half of the
//! place, those of the next the other: when a commit takes a memtable over, the memtable before is durable, and so the half of that one
//! is free. A half has at most half as many notes as a commit takes map entries, so a commit always takes all of a memtable.
//!
//! Shape: changes that are ready in one turn are noted together, by the first of them, which lets the others run before.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::ops::RangeInclusive;
use std::task::Poll;

use sealblock_block::{Clock, Condition, Error, Medium, MediumError, NoteKeeping, RangeLock};
use sealblock_runtime_memory::Buffer;

use crate::format::{
    Answered, LogPosition, MapEntryKind, MapEntryRun, NOTE_PAGE_BYTES, NOTES_PER_PAGE, Note, NoteHead, NotesPlace, Seed,
};
use crate::free_map::Run;
use crate::options::{Mutation, OpenOptions};
use crate::volume::Volume;

/// The place of notes takes at most this part of the spare physical blocks of its block group.
const SPARE_PART: u64 = 4;
/// Bytes of zeroes written at a time.
const ZEROES_BYTES: u64 = 1 << 20;
/// The place is made by one at a time.
const PLACE: RangeInclusive<u64> = 0..=0;

/// What becomes of a change before it is answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    /// It need not survive the process.
    Memory,
    /// The first change finds out.
    Unknown,
    /// It is noted.
    Noted,
    /// It is made durable.
    Durable,
}

/// Map entries that are to be noted and put into the memtable.
struct Pending {
    group: u64,
    entries: MapEntryRun,
    data_crc: u32,
    /// Of a block that is moved: where it was. Nothing is put where it is elsewhere by now.
    moved_from: Option<u32>,
}

/// The half that is being filled.
struct Half {
    place: NotesPlace,
    /// Which of the two.
    number: u64,
    base: LogPosition,
    /// Its pages so far, as they are on the medium.
    pages: Vec<u8>,
    /// Notes in it.
    len: usize,
    /// The order of the next note.
    order: u64,
}

/// The notes of an open volume.
pub(crate) struct Notes {
    way: Cell<Way>,
    /// Bytes of a half at most.
    half_bytes_max: u32,
    half: RefCell<Option<Half>>,
    pending: RefCell<VecDeque<Pending>>,
    /// Counts map entries that were pending, and those that are in the memtable or were dropped.
    asked: Cell<u64>,
    done: Cell<u64>,
    /// Someone is noting what is pending.
    is_led: Cell<bool>,
    /// Counts halves that were begun.
    halves: Cell<u64>,
    changed: Condition,
    placing: RangeLock,
    /// The physical blocks of the place, and their block group.
    taken: Cell<Option<(u64, Run)>>,
}

/// The one that notes what is pending, until it is dropped.
struct Leader<'a>(&'a Notes);

impl Drop for Leader<'_> {
    fn drop(&mut self) {
        self.0.is_led.set(false);
        self.0.changed.notify();
    }
}

/// What a step of the leader came to.
enum Step {
    /// Nothing is pending.
    Done,
    /// The half is full.
    Full,
    Failed(MediumError),
}

impl Notes {
    /// For a volume that is opened like this.
    pub fn new(options: &OpenOptions) -> Notes {
        let way = if options.read_only || !options.keeps_answered { Way::Memory } else { Way::Unknown };
        Notes {
            way: Cell::new(way),
            half_bytes_max: options.notes_half_bytes,
            half: RefCell::default(),
            pending: RefCell::default(),
            asked: Cell::new(0),
            done: Cell::new(0),
            is_led: Cell::new(false),
            halves: Cell::new(0),
            changed: Condition::default(),
            placing: RangeLock::default(),
            taken: Cell::new(None),
        }
    }

    /// Whether changes that are answered need not survive the process.
    pub fn are_needless(&self) -> bool {
        self.way.get() == Way::Memory
    }

    /// Whether what becomes of changes is not found out yet.
    pub fn are_open(&self) -> bool {
        self.way.get() == Way::Unknown
    }

    /// Whether changes are noted.
    pub fn are_kept(&self) -> bool {
        self.way.get() == Way::Noted
    }

    /// Whether what is answered must be durable.
    pub fn answers_durable(&self) -> bool {
        self.way.get() == Way::Durable
    }

    /// A commit has taken the memtable over, which ends in the log before `end`: further notes are about the next memtable.
    pub fn begin_half(&self, end: LogPosition, mutation: Mutation) {
        if let Some(half) = self.half.borrow_mut().as_mut() {
            // An injected fault: the half of a memtable whose commit is in flight is written over.
            half.number += u64::from(mutation != Mutation::HalfEarly);
            // An injected fault: notes count from the commit before.
            half.base = if mutation == Mutation::BaseBehind { half.base } else { end };
            half.pages.clear();
            half.len = 0;
        }
        self.halves.set(self.halves.get() + 1);
        self.changed.notify();
    }

    /// Has whoever waits for a commit look again: there may be none any more.
    pub fn wake(&self) {
        self.changed.notify();
    }

    fn finish(&self, count: usize) {
        self.done.set(self.done.get() + count as u64);
        self.changed.notify();
    }
}

impl Half {
    /// Notes that there is room for.
    fn room(&self) -> usize {
        self.place.half_bytes as usize / NOTE_PAGE_BYTES * NOTES_PER_PAGE - self.len
    }

    /// Adds notes, for which there is room; gives where the pages that changed are on the medium, and which they are.
    fn add<'a>(&mut self, pending: impl Iterator<Item = &'a Pending>, seed: Seed) -> (u64, std::ops::Range<usize>) {
        let first_page = self.len / NOTES_PER_PAGE;
        for Pending { entries, data_crc, .. } in pending {
            let (page, at) = (self.len / NOTES_PER_PAGE, self.len % NOTES_PER_PAGE);
            let first = self.order - at as u64;
            let head =
                NoteHead { run: self.place.run, boot: self.place.boot, base: self.base, number: page as u32, first };
            if at == 0 {
                self.pages.resize((page + 1) * NOTE_PAGE_BYTES, 0);
                head.encode(&mut self.pages[page * NOTE_PAGE_BYTES..], seed);
            }
            let note = Note { entries: *entries, order: self.order, data_crc: *data_crc };
            note.encode(&mut self.pages[page * NOTE_PAGE_BYTES..], at, &head, seed);
            self.len += 1;
            self.order += 1;
        }
        let pages = first_page * NOTE_PAGE_BYTES..self.pages.len();
        let start = self.place.offset + self.number % 2 * u64::from(self.place.half_bytes);
        (start + pages.start as u64, pages)
    }
}

impl<M: Medium, C: Clock> Volume<M, C> {
    /// Has the map entries of a change, whose data are complete, put into the memtable by [`Volume::entered`].
    pub(crate) fn enter(&self, group: u64, entries: MapEntryRun, data_crc: u32) {
        self.ask(Pending { group, entries, data_crc, moved_from: None });
    }

    /// The same of a block that was moved from a physical block.
    pub(crate) fn enter_moved(&self, group: u64, entry: MapEntryRun, from: u32) {
        self.ask(Pending { group, entries: entry, data_crc: 0, moved_from: Some(from) });
    }

    fn ask(&self, pending: Pending) {
        if self.notes.way.get() != Way::Noted {
            return self.put(pending);
        }
        self.notes.asked.set(self.notes.asked.get() + 1);
        self.notes.pending.borrow_mut().push_back(pending);
    }

    /// Puts map entries into the memtable.
    fn put(&self, Pending { group, entries, moved_from, .. }: Pending) {
        match (moved_from, entries.first.kind) {
            (Some(from), _) if !self.is_still_at(&entries, from) => {
                self.allocator.give_back(group, &[(entries.first.pbn, 1)]);
            }
            (_, MapEntryKind::Stored) => {
                self.replace(group, entries.first);
                if moved_from.is_some() {
                    self.upkeep.count(|counts| counts.blocks_moved += 1);
                }
            }
            (_, MapEntryKind::Deallocated | MapEntryKind::Uncorrectable) => self.replace_run(group, entries),
        }
        self.commits.schedule();
    }

    /// Whether a block that was moved was not changed meanwhile.
    fn is_still_at(&self, entry: &MapEntryRun, from: u32) -> bool {
        let now = self.stored_entry_now(entry.first.lba).flatten();
        now.is_some_and(|now| now.pbn == from) || self.mutation == Mutation::MoveOverNewer
    }

    /// Ends when all map entries that were given to [`Volume::enter`] are noted and in the memtable.
    pub(crate) async fn entered(&self) -> Result<(), Error> {
        let (notes, asked) = (&self.notes, self.notes.asked.get());
        if self.mutation == Mutation::NoteLate && asked - notes.done.get() < 8 {
            // An injected fault: changes are answered before they are noted.
            return Ok(());
        }
        while notes.done.get() < asked {
            if notes.is_led.replace(true) {
                notes.changed.wait_until(|| notes.done.get() >= asked || !notes.is_led.get()).await;
                continue;
            }
            let _leader = Leader(notes);
            if self.changes.get() > 1 {
                yield_once().await;
            }
            Box::pin(self.note_all()).await?;
        }
        Ok(())
    }

    /// Notes everything that is pending and puts it into the memtable. Waits for commits where a half is full.
    async fn note_all(&self) -> Result<(), Error> {
        loop {
            let halves = self.notes.halves.get();
            match self.note_pending() {
                Step::Done => return Ok(()),
                Step::Full => {
                    self.commits.request_space();
                    let is_over = || self.notes.halves.get() != halves || self.has_failed();
                    self.notes.changed.wait_until(is_over).await;
                    if self.has_failed() {
                        return Err(self.failed());
                    }
                }
                Step::Failed(error) => {
                    tracing::warn!(%error, "cannot note changes; they are made durable before they are answered from now on");
                    self.give_notes_up().await?;
                }
            }
        }
    }

    /// Notes as much as there is room for, and puts it into the memtable.
    fn note_pending(&self) -> Step {
        loop {
            let front = self.notes.pending.borrow().front().map(|front| (front.entries, front.moved_from));
            let Some((entries, moved_from)) = front else { return Step::Done };
            // What a move is compared with is in the memtable: everything that was pending before.
            if moved_from.is_some_and(|from| !self.is_still_at(&entries, from)) {
                let lost = self.notes.pending.borrow_mut().pop_front();
                lost.into_iter().for_each(|lost| self.put(lost));
                self.notes.finish(1);
                continue;
            }
            let count = match self.note_some() {
                Ok(0) => return Step::Full,
                Ok(count) => count,
                Err(error) => return Step::Failed(error),
            };
            for _ in 0..count {
                let noted = self.notes.pending.borrow_mut().pop_front();
                noted.into_iter().for_each(|noted| self.put(noted));
            }
            self.notes.finish(count);
        }
    }

    /// Notes what is pending, up to the next block that was moved, as far as there is room; gives how much that is.
    fn note_some(&self) -> Result<usize, MediumError> {
        let (pending, mut half) = (self.notes.pending.borrow(), self.notes.half.borrow_mut());
        let half = half.as_mut().expect("there is a half while changes are noted");
        let is_moved = |pending: &Pending| pending.moved_from.is_some();
        let until_move = pending.iter().skip(1).position(is_moved).map_or(pending.len(), |at| at + 1);
        let count = until_move.min(half.room());
        if count > 0 {
            let (offset, pages) = half.add(pending.iter().take(count), self.seed);
            self.medium.note(offset, &half.pages[pages])?;
        }
        Ok(count)
    }

    /// Goes on without notes. What was noted is made durable before anything is put into the memtable that is not.
    async fn give_notes_up(&self) -> Result<(), Error> {
        self.flush().await?;
        self.mark_answered(Answered::Durable).await?;
        self.notes.way.set(Way::Durable);
        let pending = self.notes.pending.take();
        let count = pending.len();
        pending.into_iter().for_each(|pending| self.put(pending));
        self.notes.finish(count);
        Ok(())
    }

    /// Finds out, before the first change, what becomes of changes; a block group whose map of free physical blocks is there may give
    /// the place of notes.
    ///
    /// # Errors
    /// When the medium fails.
    pub(crate) async fn prepare_notes(&self, group: u64) -> Result<(), Error> {
        if self.notes.way.get() != Way::Unknown {
            return Ok(());
        }
        let _alone = self.notes.placing.lock(PLACE).await;
        if self.notes.way.get() != Way::Unknown {
            return Ok(());
        }
        let (way, answered) = match self.medium.note_keeping() {
            NoteKeeping::Needless => (Way::Memory, Answered::Volatile),
            NoteKeeping::None => (Way::Durable, Answered::Durable),
            NoteKeeping::UntilReboot(boot) => match self.make_place(self.group_for_notes(group).await?, boot).await {
                Some(place) => (Way::Noted, Answered::Noted(place)),
                None => (Way::Durable, Answered::Durable),
            },
        };
        if way != Way::Memory {
            self.mark_answered(answered).await?;
        }
        if let Answered::Noted(place) = answered {
            let (base, pages) = (self.log.position(), Vec::new());
            *self.notes.half.borrow_mut() = Some(Half { place, number: 0, base, pages, len: 0, order: 0 });
        }
        self.notes.way.set(way);
        Ok(())
    }

    /// The block group that has the place of notes: this one, which is written to, or the first one where this one lies far in, since a
    /// sync that leaves notes out knows offsets of 32 bits.
    async fn group_for_notes(&self, group: u64) -> Result<u64, Error> {
        if self.block_group(group).end_offset <= u64::from(u32::MAX) {
            return Ok(group);
        }
        self.load_group(0).await?;
        Ok(0)
    }

    /// Takes free physical blocks of a block group for notes and fills them with zeroes, so that they have space and nothing of an
    /// earlier opening.
    async fn make_place(&self, group: u64, boot: [u8; 16]) -> Option<NotesPlace> {
        let shift = self.geometry.block_size.shift();
        let page_blocks = (NOTE_PAGE_BYTES >> shift).max(1) as u32;
        let most = self.notes.half_bytes_max.min(NotesPlace::half_bytes_max(&self.layout));
        let half_bytes = u64::from(most).min(self.spare_bytes_for_notes(group)) as u32;
        let half_blocks = (half_bytes >> shift) / page_blocks * page_blocks;
        let half_bytes = half_blocks << shift;
        let taken = (half_blocks > 0)
            .then(|| self.allocator.take_by(group, |map| map.take_from_end(2 * half_blocks, page_blocks)))
            .flatten();
        let Some(taken) = taken else {
            tracing::debug!(group, "no room for notes; changes are made durable before they are answered");
            return None;
        };
        let offset = self.pbn_offset(group, taken.runs()[0].0);
        let run = self.superblock.get().write_seq + 1;
        let place = NotesPlace { offset, half_bytes, run, boot, counted: None };
        if let Err(error) = self.fill_place(&place).await {
            tracing::debug!(%error, "no notes; changes are made durable before they are answered");
            return None;
        }
        self.notes.taken.set(Some((group, taken.runs()[0])));
        taken.keep();
        Some(place)
    }

    /// Bytes of a half that the block group's spare physical blocks have room for beside a long write.
    fn spare_bytes_for_notes(&self, group: u64) -> u64 {
        let (spare, blocks) = (self.layout.spare_blocks(group), self.block_group(group).blocks);
        let longest = u64::from(self.geometry.limits.max_transfer_blocks.get()).min(blocks);
        let left = spare.saturating_sub(longest).min(spare / SPARE_PART);
        (left << self.geometry.block_size.shift()) / 2
    }

    async fn fill_place(&self, place: &NotesPlace) -> Result<(), MediumError> {
        let mut at = 0;
        while at < place.bytes() {
            let length = (place.bytes() - at).min(ZEROES_BYTES);
            self.medium.write(place.offset + at, Buffer::zeroed(length as usize).freeze()).await?;
            at += length;
        }
        // Whether notes work at all.
        self.medium.note(place.offset, &[0; NOTE_PAGE_BYTES])
    }

    /// Gives the place of notes back: nothing changes any more, and everything is durable.
    pub(crate) fn drop_notes(&self) {
        if let Some((group, run)) = self.notes.taken.take() {
            self.allocator.give_back(group, &[run]);
        }
    }
}

/// Lets other tasks run that are ready.
async fn yield_once() {
    let mut has_yielded = false;
    poll_fn(|cx| {
        if std::mem::replace(&mut has_yielded, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
