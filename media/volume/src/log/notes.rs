//! Notes: completed changes that are not durable, in case this process dies.
//!
//! A change is in the memtable for up to a second before a commit writes its map entries to the log. Its data are on
//! the medium by then, but no map entry that names them. So before a map entry goes into the memtable, it is noted:
//! written through the page cache, which outlives the process, in free physical blocks that the superblock names.
//! `recovery` uses the notes if all are there, and from this boot of the machine. If a medium does not support notes,
//! changes are made durable before they complete.
//!
//! Invariants: the order is data written, noted, in the memtable, completed. *Every* map entry that goes into the
//! memtable is noted, also that of a relocated block, so the newest note of a block is its newest change. Notes of one
//! memtable fill one half of the place, those of the next the other: when a commit takes a memtable over, the previous
//! memtable is durable, so its half is free. A half has at most half as many notes as a commit takes map entries, so a
//! commit always takes all of a memtable.
//!
//! Shape: of the changes that become ready in the same turn of the reactor, the first lets the others run and then
//! notes all of them.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ops::Range;

use sealblock_block::{AsyncMutex, Condition};

use crate::format::{LogPosition, MapEntryRun, NOTE_PAGE_BYTES, NOTES_PER_PAGE, Note, NoteHead, NotesPlace, Seed};
use crate::options::{Mutation, OpenOptions};
use crate::space::free_map::Run;

/// How a change is preserved before it completes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Way {
    /// Not: it need not survive the process.
    Memory,
    /// Unknown: the first change determines it.
    Unknown,
    /// It is noted.
    Noted,
    /// It is made durable.
    Durable,
}

/// Map entries that must be noted and put into the memtable.
pub(crate) struct Pending {
    pub group: u64,
    pub entries: MapEntryRun,
    pub data_crc: u32,
    /// For a relocated block: its former physical block. If the block is no longer there, the map entry is dropped.
    pub moved_from: Option<u32>,
    /// Its change was dropped before this was noted: it is neither noted nor put, and has no physical blocks any more.
    pub is_dropped: bool,
}

impl Pending {
    /// Map entries of a change whose data are written.
    pub fn new(group: u64, entries: MapEntryRun, data_crc: u32) -> Pending {
        Pending { group, entries, data_crc, moved_from: None, is_dropped: false }
    }
}

/// The half that is being filled.
pub(crate) struct Half {
    pub place: NotesPlace,
    /// Which of the two.
    pub number: u64,
    pub base: LogPosition,
    /// Its pages so far, as they are on the medium.
    pub pages: Vec<u8>,
    /// Notes in it.
    pub len: usize,
    /// The order of its first note.
    pub first: u64,
}

/// The notes of an open volume.
pub(crate) struct Notes {
    pub way: Cell<Way>,
    /// Bytes of a half at most.
    pub half_bytes_max: u32,
    pub half: RefCell<Option<Half>>,
    pub pending: RefCell<VecDeque<Pending>>,
    /// The number of map entries that were ever pending, and of those that are in the memtable or were dropped.
    pub asked: Cell<u64>,
    pub done: Cell<u64>,
    /// A task is noting the pending entries.
    pub is_led: Cell<bool>,
    /// Counts halves that were begun.
    pub halves: Cell<u64>,
    pub changed: Condition,
    /// Only one task makes the place.
    pub placing: AsyncMutex,
    /// The physical blocks of the place, and their block group.
    pub taken: Cell<Option<(u64, Run)>>,
}

/// Held by the task that notes the pending entries; another may do so once it is dropped.
pub(crate) struct Leader<'a>(pub &'a Notes);

impl Drop for Leader<'_> {
    fn drop(&mut self) {
        self.0.is_led.set(false);
        self.0.changed.notify();
    }
}

impl Notes {
    /// The notes of a volume opened with these options.
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
            placing: AsyncMutex::default(),
            taken: Cell::new(None),
        }
    }

    /// True if completed changes need not survive the process.
    pub fn are_needless(&self) -> bool {
        self.way.get() == Way::Memory
    }

    /// True if it is not known yet how changes are preserved.
    pub fn are_open(&self) -> bool {
        self.way.get() == Way::Unknown
    }

    /// True if changes are noted.
    pub fn are_kept(&self) -> bool {
        self.way.get() == Way::Noted
    }

    /// True if changes must be durable before they complete.
    pub fn answers_durable(&self) -> bool {
        self.way.get() == Way::Durable
    }

    /// The number of physical blocks of a block group that the place of notes takes.
    pub fn blocks_taken(&self, group: u64) -> u32 {
        self.taken.get().filter(|(of, _)| *of == group).map_or(0, |(_, (_, blocks))| blocks)
    }

    /// Begins the next half: a commit has taken over the memtable, and its entries end before `end` in the log. Further
    /// notes belong to the next memtable.
    pub fn begin_half(&self, end: LogPosition, mutation: Mutation) {
        if let Some(half) = self.half.borrow_mut().as_mut() {
            // An injected fault: the half of a memtable whose commit is in flight is overwritten.
            half.number += u64::from(!mutation.is(Mutation::HalfEarly));
            // An injected fault: the base is older by one commit.
            half.base = if mutation.is(Mutation::BaseBehind) { half.base } else { end };
            half.pages.clear();
            half.first += half.len as u64;
            half.len = 0;
        }
        self.halves.set(self.halves.get() + 1);
        self.changed.notify();
    }

    /// Wakes tasks that wait for a commit, so that they check again: there may be no further commit.
    pub fn wake(&self) {
        self.changed.notify();
    }

    pub fn finish(&self, count: usize) {
        self.done.set(self.done.get() + count as u64);
        self.changed.notify();
    }
}

impl Half {
    /// The number of notes that still fit.
    pub fn room(&self) -> usize {
        self.place.half_bytes as usize / NOTE_PAGE_BYTES * NOTES_PER_PAGE - self.len
    }

    /// Adds notes, which must fit. Returns the offset of the changed pages on the medium, and their bytes in `pages`.
    pub fn add<'a>(&mut self, pending: impl Iterator<Item = &'a Pending>, seed: Seed) -> (u64, Range<usize>) {
        let first_page = self.len / NOTES_PER_PAGE;
        for Pending { entries, data_crc, .. } in pending {
            let (page, at) = (self.len / NOTES_PER_PAGE, self.len % NOTES_PER_PAGE);
            if at == 0 {
                self.pages.resize((page + 1) * NOTE_PAGE_BYTES, 0);
            }
            let note = Note { entries: *entries, data_crc: *data_crc };
            note.encode(&mut self.pages[page * NOTE_PAGE_BYTES..], at);
            self.len += 1;
        }
        (first_page..self.len.div_ceil(NOTES_PER_PAGE)).for_each(|page| self.seal(page, seed));
        let pages = first_page * NOTE_PAGE_BYTES..self.pages.len();
        let start = self.place.offset + self.number % 2 * u64::from(self.place.half_bytes);
        (start + pages.start as u64, pages)
    }

    fn seal(&mut self, page: usize, seed: Seed) {
        let before = page * NOTES_PER_PAGE;
        let head = NoteHead {
            run: self.place.run,
            boot: self.place.boot,
            base: self.base,
            number: page as u32,
            first: self.first + before as u64,
        };
        let notes = (self.len - before).min(NOTES_PER_PAGE);
        head.seal(&mut self.pages[page * NOTE_PAGE_BYTES..], notes, seed);
    }

    /// Removes the last notes, which could not be written: the next notes must follow the last written one, or all
    /// count as lost. The next ones seal their page again.
    pub fn take_back(&mut self, count: usize) {
        self.len -= count;
        self.pages.truncate(self.len.div_ceil(NOTES_PER_PAGE) * NOTE_PAGE_BYTES);
        let (page, at) = (self.len / NOTES_PER_PAGE * NOTE_PAGE_BYTES, self.len % NOTES_PER_PAGE);
        if at > 0 {
            Note::clear_from(&mut self.pages[page..], at);
        }
    }
}
