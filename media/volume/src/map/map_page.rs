//! A map page in memory: the map entries of a run of blocks, and the generations that they must have.
//!
//! It always equals the page on the medium. Newer map entries are patches. A checkpoint merges them into an image of
//! the page, and into the page in memory once the image has been written.

use std::cell::{Cell, RefCell};

use sealblock_units::Lba;

use crate::format::{Generations, Layout, MAP_ENTRY_BYTES, MapEntry, PAGE_SECTORS, PageOffsets, Seed};

/// The bit of the sector with the generations, in a set of sectors of a page. The bits of the sectors with map entries
/// follow.
pub(crate) const GENERATIONS_BIT: u32 = 1;
/// The generation of a block whose map entry is lost: no map entry there matches it.
const LOST: u16 = u16::MAX;

/// What the block map has for a block.
#[derive(Debug)]
pub(crate) enum MapLookup {
    /// A valid map entry.
    Mapped(MapEntry),
    /// Never written: reads as zeroes.
    Unwritten,
    /// The map entry is of another write than the generations say.
    Stale {
        /// The map entry on the medium.
        entry: MapEntry,
        /// The generation that it should have; 0 for none.
        expected: u16,
    },
    /// The map entry is not valid, or it is of another block.
    Damaged([u8; MAP_ENTRY_BYTES]),
    /// The sector with the map entry cannot be read.
    Unreadable,
}

/// The map entries and generations of a run of blocks; empty if none of the blocks was ever written.
#[derive(Default)]
pub(crate) struct MapPage {
    /// Empty for a page that is not on the medium because its block group is not initialized.
    entries: RefCell<Vec<[u8; MAP_ENTRY_BYTES]>>,
    /// `None` if neither copy is valid.
    generations: RefCell<Option<Vec<u16>>>,
    /// Bits of the sectors with map entries that cannot be read.
    unreadable: Cell<u32>,
    /// The number of copies of the generations that are not valid.
    lost_copies: Cell<u32>,
    /// One copy of the generations is older than the other.
    is_behind: Cell<bool>,
    /// The log sector up to which the page includes the log, as it was read.
    sequence: Option<u64>,
    pub touched: Cell<bool>,
}

/// The bytes of a page for the medium.
pub(crate) struct MapPageImage {
    /// The whole page.
    pub bytes: Vec<u8>,
    /// Bits of the sectors to write. The generations, and their second copy, are always written.
    pub changed: u32,
    generations: Vec<u16>,
}

/// The bit of the sector with the map entry of a block.
fn sector_bit(per_sector: usize, index: usize) -> u32 {
    1 << (1 + index / per_sector)
}

impl MapPage {
    /// A page that was read: its map entries, which are zeroes in the sectors that are `unreadable`, and the valid
    /// copies of the generations. The copy with the higher sequence counts.
    pub fn new(
        entries: Vec<[u8; MAP_ENTRY_BYTES]>,
        unreadable: u32,
        [first, second]: [Option<Generations>; 2],
    ) -> MapPage {
        let sequence = [&first, &second].into_iter().flatten().map(|copy| copy.sequence).max();
        let (generations, lost_copies, is_behind) = match (first, second) {
            (Some(a), Some(b)) if a.sequence == b.sequence => (Some(a.of_blocks), 0, false),
            (Some(a), Some(b)) => (Some(if b.sequence > a.sequence { b.of_blocks } else { a.of_blocks }), 0, true),
            (Some(one), None) | (None, Some(one)) => (Some(one.of_blocks), 1, false),
            (None, None) => (None, 2, false),
        };
        MapPage {
            entries: RefCell::new(entries),
            generations: RefCell::new(generations),
            unreadable: Cell::new(unreadable),
            lost_copies: Cell::new(lost_copies),
            is_behind: Cell::new(is_behind),
            sequence,
            touched: Cell::new(true),
        }
    }

    /// Looks up the block with this index in the page and with address `lba`.
    pub fn lookup(&self, index: usize, lba: Lba, seed: Seed) -> MapLookup {
        self.touched.set(true);
        let entries = self.entries.borrow();
        let Some(bytes) = entries.get(index) else { return MapLookup::Unwritten };
        let generation = self.generations.borrow().as_ref().map(|generations| generations[index]);
        if self.unreadable.get() & sector_bit(self.per_sector(), index) != 0 {
            return if generation == Some(0) { MapLookup::Unwritten } else { MapLookup::Unreadable };
        }
        match (MapEntry::decode(bytes, seed), generation) {
            (Ok(entry), Some(expected)) if entry.lba == lba && entry.generation != expected => {
                MapLookup::Stale { entry, expected }
            }
            (Ok(entry), _) if entry.lba == lba => MapLookup::Mapped(entry),
            // Never written: whatever else is there is older than the block map, or misdirected.
            (_, Some(0)) => MapLookup::Unwritten,
            (_, _) => MapLookup::Damaged(*bytes),
        }
    }

    fn per_sector(&self) -> usize {
        self.entries.borrow().len() / (PAGE_SECTORS as usize - 1)
    }

    /// Bits of the sectors with map entries that cannot be read.
    pub fn unreadable(&self) -> u32 {
        self.unreadable.get()
    }

    /// Treats these sectors as unreadable from now on, whatever the medium returns.
    pub fn mark_unreadable(&self, sectors: u32) {
        self.unreadable.set(self.unreadable.get() | sectors);
    }

    /// The log sector up to which the page includes the log, as it was read; `None` without valid generations.
    pub fn sequence(&self) -> Option<u64> {
        self.sequence
    }

    /// True if one copy of the generations is older than the other.
    pub fn is_behind(&self) -> bool {
        self.is_behind.get()
    }

    /// The number of copies of the generations that are not valid: 0 to 2.
    pub fn lost_copies(&self) -> u32 {
        self.lost_copies.get()
    }

    /// The stored bytes of a block's map entry.
    pub fn raw(&self, index: usize) -> [u8; MAP_ENTRY_BYTES] {
        self.entries.borrow()[index]
    }

    /// The page with the map entries of `patches` at their indices, as of the log sector `sequence`. The unreadable
    /// sectors among those that change, and those given in `deallocated`, are given up: their written blocks become
    /// damage, and unwritten ones stay unwritten.
    pub fn image(
        &self,
        layout: &Layout,
        seed: Seed,
        place: &PageOffsets,
        patches: &[(usize, [u8; MAP_ENTRY_BYTES])],
        sequence: u64,
        deallocated: u32,
    ) -> MapPageImage {
        let sector = layout.sector_bytes() as usize;
        let per_sector = self.per_sector();
        let bits = patches.iter().map(|(index, _)| sector_bit(per_sector, *index));
        let changed = bits.fold(GENERATIONS_BIT | deallocated, |changed, bit| changed | bit);
        let mut bytes = vec![0; layout.page_bytes() as usize];
        bytes[sector..].copy_from_slice(self.entries.borrow().as_flattened());
        let lost = self.unreadable.get() & changed;
        let sectors = bytes.chunks_exact_mut(sector).enumerate();
        sectors.filter(|(at, _)| lost >> at & 1 == 1).for_each(|(_, bytes)| bytes.fill(0));
        let (head, body) = bytes.split_at_mut(sector);
        let body = body.as_chunks_mut::<MAP_ENTRY_BYTES>().0;
        let known = self.generations.borrow().clone();
        let mut of_blocks = known.unwrap_or_else(|| generations_of(body, place.first, seed));
        for (index, entry) in patches {
            body[*index] = *entry;
            of_blocks[*index] = MapEntry::decode_unchecked(entry).generation;
        }
        let generations = Generations { first: place.first, sequence, of_blocks };
        generations.encode(head, seed);
        MapPageImage { bytes, changed, generations: generations.of_blocks }
    }

    /// Takes over an image that has been written.
    pub fn apply(&self, image: MapPageImage) {
        let head = image.bytes.len() / PAGE_SECTORS as usize;
        let body = image.bytes[head..].as_chunks::<MAP_ENTRY_BYTES>().0;
        let per_sector = self.per_sector();
        let mut entries = self.entries.borrow_mut();
        for (index, (to, from)) in entries.iter_mut().zip(body).enumerate() {
            if image.changed & sector_bit(per_sector, index) != 0 {
                *to = *from;
            }
        }
        drop(entries);
        self.unreadable.set(self.unreadable.get() & !image.changed);
        *self.generations.borrow_mut() = Some(image.generations);
        self.lost_copies.set(0);
        self.is_behind.set(false);
    }

    /// Replaces the bytes of one map entry, which may be invalid: they are on the medium now.
    pub fn set_raw(&self, index: usize, bytes: [u8; MAP_ENTRY_BYTES]) {
        self.entries.borrow_mut()[index] = bytes;
    }

    /// The number of the sector with the map entry of a block, and its bytes.
    pub fn sector_of(&self, index: usize) -> (u64, Vec<u8>) {
        let per_sector = self.per_sector();
        let first = index / per_sector * per_sector;
        (1 + (index / per_sector) as u64, self.entries.borrow()[first..first + per_sector].as_flattened().to_vec())
    }
}

/// The generations to use if both copies are lost: those of the valid map entries. All other blocks count as lost, and
/// none as unwritten.
fn generations_of(entries: &[[u8; MAP_ENTRY_BYTES]], first: Lba, seed: Seed) -> Vec<u16> {
    let of = |(lba, bytes): (u64, &[u8; MAP_ENTRY_BYTES])| {
        let entry = MapEntry::decode(bytes, seed).ok().filter(|entry| entry.lba.get() == lba);
        entry.map_or(LOST, |entry| entry.generation)
    };
    (first.get()..).zip(entries).map(of).collect()
}
