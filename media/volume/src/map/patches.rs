//! Map entries that are durable in the log but not in the block map yet, by page.
//!
//! A commit puts its map entries here. A checkpoint takes all of them when it begins, and later commits put new ones
//! beside them. A block is looked up in the new ones, then in those that a checkpoint has taken, then in its page.
//! Those that were taken are kept until the checkpoint has succeeded. So a checkpoint that fails or is dropped loses
//! nothing, and the next one takes both.
//!
//! Blocks of a page that were deallocated or made unreadable together are one patch. A long run takes a few bytes for
//! each page, and becomes one map entry for each block only in the image of a page that is written.

use std::cell::RefCell;
use std::collections::hash_map::Entry;
use std::mem::size_of;
use std::ops::Range;

use rustc_hash::FxHashMap;
use sealblock_units::Lba;

use crate::format::{MAP_ENTRY_BYTES, MapEntry, MapEntryRun, Seed};
use crate::map::map_page::MapLookup;

/// The map entry of a block, or of several contiguous blocks that differ only in their addresses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patch {
    /// The first block's index in its page.
    pub index: u16,
    /// Number of blocks.
    pub blocks: u16,
    /// The first block's map entry, as it will be in the page.
    pub bytes: [u8; MAP_ENTRY_BYTES],
}

impl Patch {
    /// The patch of a run in one page; `index` is that of its first block.
    pub fn new(index: u16, run: &MapEntryRun, seed: Seed) -> Patch {
        Patch { index, blocks: run.blocks as u16, bytes: run.first.encode(seed) }
    }

    fn end(&self) -> u16 {
        self.index + self.blocks
    }

    /// The map entry of one of its blocks.
    fn at(&self, index: u16, seed: Seed) -> [u8; MAP_ENTRY_BYTES] {
        if index == self.index {
            return self.bytes;
        }
        let first = MapEntry::decode_unchecked(&self.bytes);
        let lba = Lba::new(first.lba.get() + u64::from(index - self.index));
        MapEntry { lba, ..first }.encode(seed)
    }

    /// The part between two blocks, the second one excluded; `None` if it is empty.
    fn part(&self, from: u16, to: u16, seed: Seed) -> Option<Patch> {
        (from < to).then(|| Patch { index: from, blocks: to - from, bytes: self.at(from, seed) })
    }
}

/// The blocks of a patch, from `start` up to `end`, and the index of its map entry in `entries`.
#[derive(Clone, Copy)]
struct Span {
    start: u16,
    end: u16,
    at: u16,
}

/// The patches of one page. Spans are stored separately from map entries, in order of their blocks, so that a search
/// touches little memory and an insertion moves few bytes.
#[derive(Default)]
struct PagePatches {
    spans: Vec<Span>,
    entries: Vec<[u8; MAP_ENTRY_BYTES]>,
    /// Unused map entries.
    free: Vec<u16>,
}

impl PagePatches {
    /// Empty, with memory for this number.
    fn for_patches(count: usize) -> PagePatches {
        PagePatches { spans: Vec::with_capacity(count), entries: Vec::with_capacity(count), free: Vec::new() }
    }

    fn put(&mut self, patch: Patch, seed: Seed) {
        // Common case: the blocks of a long write come in order.
        if self.spans.last().is_none_or(|last| last.end <= patch.index) {
            let span = self.span(&patch);
            return self.spans.push(span);
        }
        let first = self.spans.partition_point(|before| before.end <= patch.index);
        let behind = first + self.spans[first..].partition_point(|before| before.start < patch.end());
        let old = &self.spans[first..behind];
        if let [same] = old
            && (same.start, same.end) == (patch.index, patch.end())
        {
            self.entries[usize::from(same.at)] = patch.bytes;
            return;
        }
        let left = old.first().and_then(|old| self.patch(*old).part(old.start, patch.index, seed));
        let right = old.last().and_then(|old| self.patch(*old).part(patch.end(), old.end, seed));
        self.free.extend(old.iter().map(|old| old.at));
        let new = [left, Some(patch), right].map(|part| part.map(|part| self.span(&part)));
        self.spans.splice(first..behind, new.into_iter().flatten());
    }

    /// Stores the map entry of a patch.
    fn span(&mut self, patch: &Patch) -> Span {
        let at = self.free.pop().unwrap_or_else(|| {
            self.entries.push(patch.bytes);
            (self.entries.len() - 1) as u16
        });
        self.entries[usize::from(at)] = patch.bytes;
        Span { start: patch.index, end: patch.end(), at }
    }

    fn patch(&self, span: Span) -> Patch {
        Patch { index: span.start, blocks: span.end - span.start, bytes: self.entries[usize::from(span.at)] }
    }

    fn get(&self, index: u16, seed: Seed) -> Option<[u8; MAP_ENTRY_BYTES]> {
        let at = self.spans.partition_point(|span| span.end <= index);
        self.spans.get(at).filter(|span| span.start <= index).map(|span| self.patch(*span).at(index, seed))
    }

    fn patches(&self) -> impl Iterator<Item = Patch> {
        self.spans.iter().map(|span| self.patch(*span))
    }

    /// Memory in use, in bytes.
    fn bytes(&self) -> usize {
        self.spans.capacity() * size_of::<Span>()
            + self.entries.capacity() * MAP_ENTRY_BYTES
            + self.free.capacity() * size_of::<u16>()
    }
}

/// Looks up the blocks of a page in order.
struct Cursor<'a> {
    page: &'a PagePatches,
    at: usize,
    /// The decoded first map entry of the current span, if it has several blocks.
    first: Option<MapEntry>,
}

impl Cursor<'_> {
    /// A cursor before the block with this index.
    fn new(page: &PagePatches, index: u16) -> Cursor<'_> {
        Cursor { page, at: page.spans.partition_point(|span| span.end <= index), first: None }
    }

    /// Looks up a block. The indices must not decrease from call to call.
    fn lookup(&mut self, index: u16, seed: Seed) -> Option<MapLookup> {
        while self.page.spans.get(self.at).is_some_and(|span| span.end <= index) {
            (self.at, self.first) = (self.at + 1, None);
        }
        let span = *self.page.spans.get(self.at).filter(|span| span.start <= index)?;
        let patch = self.page.patch(span);
        if patch.blocks == 1 {
            return Some(lookup_of(patch.bytes, seed));
        }
        self.first = self.first.or_else(|| MapEntry::decode(&patch.bytes, seed).ok());
        Some(match self.first {
            Some(first) => {
                MapLookup::Mapped(MapEntry { lba: Lba::new(first.lba.get() + u64::from(index - span.start)), ..first })
            }
            None => MapLookup::Damaged(patch.bytes),
        })
    }
}

/// Decodes a map entry that the block map does not have yet.
pub(crate) fn lookup_of(bytes: [u8; MAP_ENTRY_BYTES], seed: Seed) -> MapLookup {
    MapEntry::decode(&bytes, seed).map_or(MapLookup::Damaged(bytes), MapLookup::Mapped)
}

/// The patches of some pages.
#[derive(Default)]
struct Patched {
    pages: FxHashMap<u64, PagePatches>,
    bytes: usize,
}

/// The approximate memory of a page's entry in the map.
const ENTRY_BYTES: usize = 2 * size_of::<(u64, PagePatches)>();

impl Patched {
    fn put(&mut self, number: u64, patches: impl Iterator<Item = Patch>, seed: Seed) {
        let mut before = 0;
        let page = match self.pages.entry(number) {
            Entry::Occupied(page) => {
                let page = page.into_mut();
                before = page.bytes();
                page
            }
            Entry::Vacant(place) => {
                self.bytes += ENTRY_BYTES;
                place.insert(PagePatches::for_patches(patches.size_hint().0))
            }
        };
        patches.for_each(|patch| page.put(patch, seed));
        self.bytes += page.bytes() - before;
    }

    fn get(&self, number: u64, index: u16, seed: Seed) -> Option<[u8; MAP_ENTRY_BYTES]> {
        self.pages.get(&number)?.get(index, seed)
    }
}

/// Map entries that the block map does not have yet.
pub(crate) struct Patches {
    seed: Seed,
    active: RefCell<Patched>,
    taken: RefCell<Patched>,
}

impl Patches {
    /// Empty, for a volume with this salt.
    pub fn new(seed: Seed) -> Patches {
        Patches { seed, active: RefCell::default(), taken: RefCell::default() }
    }

    /// Adds durable map entries of one page.
    pub fn put(&self, number: u64, patches: impl Iterator<Item = Patch>) {
        self.active.borrow_mut().put(number, patches, self.seed);
    }

    /// The newest map entry of a block, if it is here.
    pub fn get(&self, number: u64, index: usize) -> Option<[u8; MAP_ENTRY_BYTES]> {
        let index = index as u16;
        let open = self.active.borrow().get(number, index, self.seed);
        open.or_else(|| self.taken.borrow().get(number, index, self.seed))
    }

    /// Calls `see` for each block of a page in a range of indices, with its newest map entry here, if any.
    pub fn each(&self, number: u64, indices: Range<u16>, mut see: impl FnMut(u16, Option<MapLookup>)) {
        let (active, taken) = (self.active.borrow(), self.taken.borrow());
        let cursor = |page| Cursor::new(page, indices.start);
        let [mut newer, mut older] = [&active, &taken].map(|patched| patched.pages.get(&number).map(cursor));
        for index in indices.clone() {
            let newest = newer.as_mut().and_then(|page| page.lookup(index, self.seed));
            see(index, newest.or_else(|| older.as_mut()?.lookup(index, self.seed)));
        }
    }

    /// True if there is a patch for a page.
    pub fn has_page(&self, number: u64) -> bool {
        self.active.borrow().pages.contains_key(&number) || self.taken.borrow().pages.contains_key(&number)
    }

    /// True if there is a patch for any of these pages. Its cost is the smaller of the numbers of these pages and of
    /// the pages with patches.
    pub fn has_any_of(&self, numbers: Range<u64>) -> bool {
        [&self.active, &self.taken].into_iter().any(|patched| {
            let pages = &patched.borrow().pages;
            match (pages.len() as u64) < numbers.end - numbers.start {
                true => pages.keys().any(|number| numbers.contains(number)),
                false => numbers.clone().any(|number| pages.contains_key(&number)),
            }
        })
    }

    /// True if there are no patches.
    pub fn is_empty(&self) -> bool {
        self.active.borrow().pages.is_empty() && self.taken.borrow().pages.is_empty()
    }

    /// Memory in use, in bytes.
    pub fn bytes(&self) -> usize {
        self.active.borrow().bytes + self.taken.borrow().bytes
    }

    /// Memory in use by patches that no checkpoint has taken, in bytes.
    pub fn active_bytes(&self) -> usize {
        self.active.borrow().bytes
    }

    /// Takes everything for a checkpoint, including what an earlier one has left.
    pub fn take(&self) {
        let mut left = self.taken.take();
        if left.pages.is_empty() {
            left = self.active.take();
        } else {
            for (number, patches) in self.active.take().pages {
                left.put(number, patches.patches(), self.seed);
            }
        }
        *self.taken.borrow_mut() = left;
    }

    /// The pages for which a checkpoint has taken map entries.
    pub fn taken_pages(&self) -> Vec<u64> {
        self.taken.borrow().pages.keys().copied().collect()
    }

    /// The map entries that a checkpoint has taken for a page, in order, with the index of each block.
    pub fn taken(&self, number: u64) -> Vec<(usize, [u8; MAP_ENTRY_BYTES])> {
        let taken = self.taken.borrow();
        let patches = taken.pages.get(&number).into_iter().flat_map(PagePatches::patches);
        let entries = |patch: Patch| {
            (patch.index..patch.end()).map(move |index| (usize::from(index), patch.at(index, self.seed)))
        };
        patches.flat_map(entries).collect()
    }

    /// Drops what the checkpoint has taken: it is in the block map, and the superblock says so.
    pub fn end(&self) {
        drop(self.taken.take());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEED: Seed = Seed(5);

    /// A patch of some blocks of page 0, which is recognised by its generation.
    fn run(index: u16, blocks: u16, generation: u16) -> Patch {
        let first = MapEntry { generation, ..MapEntry::deallocated(Lba::new(u64::from(index))) };
        Patch::new(index, &MapEntryRun { first, blocks: u32::from(blocks) }, SEED)
    }

    fn patch(index: u16, generation: u16) -> Patch {
        run(index, 1, generation)
    }

    fn found(patches: &Patches, number: u64, index: usize) -> Option<u16> {
        let entry = MapEntry::decode(&patches.get(number, index)?, SEED).unwrap();
        assert_eq!(entry.lba.get(), index as u64);
        Some(entry.generation)
    }

    /// The index and generation of each block that a checkpoint has taken.
    fn taken(patches: &Patches, number: u64) -> Vec<(usize, u16)> {
        let of = |(index, bytes): (usize, [u8; MAP_ENTRY_BYTES])| {
            let entry = MapEntry::decode(&bytes, SEED).unwrap();
            assert_eq!(entry.lba.get(), index as u64);
            (index, entry.generation)
        };
        patches.taken(number).into_iter().map(of).collect()
    }

    #[test]
    fn the_newest_is_found_while_a_checkpoint_runs_and_what_it_had_goes_with_its_end() {
        let patches = Patches::new(SEED);
        patches.put(7, [patch(1, 1), patch(9, 1)].into_iter());
        patches.take();
        patches.put(7, [patch(9, 2)].into_iter());
        assert_eq!([1, 9, 2].map(|index| found(&patches, 7, index)), [Some(1), Some(2), None]);
        assert_eq!(taken(&patches, 7), [(1, 1), (9, 1)]);
        patches.end();
        assert_eq!([1, 9].map(|index| found(&patches, 7, index)), [None, Some(2)]);
        assert!(patches.has_page(7) && !patches.has_page(8) && !patches.is_empty());
    }

    #[test]
    fn a_checkpoint_that_failed_leaves_everything_to_the_next_and_the_newer_map_entry_wins() {
        let patches = Patches::new(SEED);
        patches.put(7, [patch(1, 1), run(2, 3, 1)].into_iter());
        patches.take();
        patches.put(7, [patch(3, 2)].into_iter());
        patches.put(5, [patch(0, 2)].into_iter());
        patches.take();
        assert_eq!(taken(&patches, 7), [(1, 1), (2, 1), (3, 2), (4, 1)]);
        let mut pages = patches.taken_pages();
        pages.sort_unstable();
        assert_eq!(pages, [5, 7]);
        patches.end();
        assert!(patches.is_empty());
        assert_eq!(patches.bytes(), 0);
    }

    #[test]
    fn runs_and_single_blocks_replace_one_another_where_they_meet() {
        let patches = Patches::new(SEED);
        let mut due = [None; 64];
        let puts = [
            (8, 16, 1),
            (10, 2, 2),
            (0, 9, 3),
            (23, 10, 4),
            (30, 1, 5),
            (12, 1, 6),
            (5, 30, 7),
            (20, 1, 8),
            (0, 64, 9),
        ];
        for (index, blocks, generation) in puts {
            patches.put(0, std::iter::once(run(index, blocks, generation)));
            due[usize::from(index)..usize::from(index + blocks)].fill(Some(generation));
            for (index, due) in due.iter().enumerate() {
                assert_eq!(found(&patches, 0, index), *due, "block {index} after {generation}");
            }
            for (from, to) in [(0, 64), (9, 31), (63, 64)] {
                let (mut at, due) = (from, &due);
                patches.each(0, from..to, |index, lookup| {
                    let found = lookup.map(|lookup| match lookup {
                        MapLookup::Mapped(entry) => (entry.lba.get(), entry.generation),
                        other => panic!("{other:?}"),
                    });
                    assert_eq!((index, found), (at, due[usize::from(at)].map(|due| (u64::from(at), due))));
                    at += 1;
                });
                assert_eq!(at, to);
            }
            if generation == 4 {
                // Those that a checkpoint has taken are looked up after the newer ones.
                patches.take();
            }
        }
        patches.take();
        assert_eq!(taken(&patches, 0), (0..64).map(|index| (index, 9)).collect::<Vec<_>>());
        let one = Patches::new(SEED);
        one.put(0, std::iter::once(run(0, 240, 1)));
        assert!(one.bytes() < 512, "a run takes the memory of a few map entries, and not of 240: {}", one.bytes());
    }
}
