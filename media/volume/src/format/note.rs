//! A page of notes: map entries of completed changes that are not durable, for use if the process dies.
//!
//! Notes are valid only as long as the machine runs, so a page has the identity of its boot, and of the open of the
//! volume. A page is written and checksummed as a whole: all of its notes count or none, and the page cache has no torn
//! pages.

use super::{MAP_ENTRY_BYTES, MapEntryRun, Seed, get, put};

/// Bytes of a page.
pub const NOTE_PAGE_BYTES: usize = 4096;
/// The number of notes in a page.
pub const NOTES_PER_PAGE: usize = (NOTE_PAGE_BYTES - HEAD_BYTES) / MAP_ENTRY_BYTES;

const MAGIC: u64 = u32::from_le_bytes(*b"SNO2") as u64;
const HEAD_BYTES: usize = 64;

const CHECKSUM: usize = 4;
const RUN: usize = 8;
const BOOT: usize = 16;
const BASE_SECTOR: usize = 32;
const BASE_ENTRIES: usize = 40;
const NOTES: usize = 42;
const NUMBER: usize = 44;
const FIRST: usize = 48;

/// A position among the own map entries of the log: a sector, by sequence number, and the number of entries in it.
/// Entries before it are older.
pub type LogPosition = (u64, u16);

/// What all notes of a page share.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoteHead {
    /// The open that it belongs to: the `write_seq` of the superblock that named the place.
    pub run: u64,
    /// The boot of the machine.
    pub boot: [u8; 16],
    /// The end of the log when the memtable of these map entries got its first entry.
    pub base: LogPosition,
    /// The number of the page in its half.
    pub number: u32,
    /// The number of its first note, counted over all notes of the open. The following notes count on.
    pub first: u64,
}

/// The map entries of a change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Note {
    /// The map entry of a block or of a run.
    pub entries: MapEntryRun,
    /// The CRC-32C of the data if the guard is unverified, else 0.
    pub data_crc: u32,
}

impl NoteHead {
    /// Writes the head of a page with this number of notes, and the checksum of the page.
    pub fn seal(&self, page: &mut [u8], notes: usize, seed: Seed) {
        put::<4>(page, 0, MAGIC);
        put::<8>(page, RUN, self.run);
        page[BOOT..BOOT + 16].copy_from_slice(&self.boot);
        put::<8>(page, BASE_SECTOR, self.base.0);
        put::<2>(page, BASE_ENTRIES, u64::from(self.base.1));
        put::<2>(page, NOTES, notes as u64);
        put::<4>(page, NUMBER, u64::from(self.number));
        put::<8>(page, FIRST, self.first);
        let checksum = seed.checksum(&page[RUN..Note::place(notes)]);
        put::<4>(page, CHECKSUM, u64::from(checksum));
    }

    /// Reads the head of a page, and its number of notes; `None` if the page is not valid.
    pub fn decode(page: &[u8], seed: Seed) -> Option<(NoteHead, usize)> {
        let page = page.get(..NOTE_PAGE_BYTES)?;
        let notes = get::<2>(page, NOTES) as usize;
        if get::<4>(page, 0) != MAGIC || !(1..=NOTES_PER_PAGE).contains(&notes) {
            return None;
        }
        let (sealed, rest) = page.split_at(Note::place(notes));
        if get::<4>(page, CHECKSUM) != u64::from(seed.checksum(&sealed[RUN..])) || rest.iter().any(|byte| *byte != 0) {
            return None;
        }
        let mut boot = [0; 16];
        boot.copy_from_slice(&page[BOOT..BOOT + 16]);
        let head = NoteHead {
            run: get::<8>(page, RUN),
            boot,
            base: (get::<8>(page, BASE_SECTOR), get::<2>(page, BASE_ENTRIES) as u16),
            number: get::<4>(page, NUMBER) as u32,
            first: get::<8>(page, FIRST),
        };
        Some((head, notes))
    }
}

impl Note {
    /// The offset of a note in its page.
    fn place(at: usize) -> usize {
        HEAD_BYTES + at * MAP_ENTRY_BYTES
    }

    /// Writes a note to its place in a page.
    #[inline]
    pub fn encode(&self, page: &mut [u8], at: usize) {
        // A map entry without a generation is invalid. The log gives it its real one.
        let mut entries = self.entries;
        entries.first.generation = 1;
        page[Note::place(at)..][..MAP_ENTRY_BYTES].copy_from_slice(&entries.encode_with(self.data_crc));
    }

    /// Reads a note of a valid page; `None` if it is impossible.
    pub fn decode(page: &[u8], at: usize) -> Option<Note> {
        let mut bytes = [0; MAP_ENTRY_BYTES];
        bytes.copy_from_slice(page.get(Note::place(at)..Note::place(at + 1))?);
        let (entries, data_crc) = MapEntryRun::decode_with(&bytes).ok()?;
        Some(Note { entries, data_crc })
    }

    /// Clears the page from this note on.
    pub fn clear_from(page: &mut [u8], at: usize) {
        page[Note::place(at)..NOTE_PAGE_BYTES].fill(0);
    }
}

#[cfg(test)]
mod tests {
    use sealblock_units::Lba;

    use super::*;
    use crate::format::{MapEntry, MapEntryKind};

    const SEED: Seed = Seed(0x1234_5678);
    const HEAD: NoteHead = NoteHead { run: 9, boot: [3; 16], base: (70, 5), number: 2, first: 4 };

    fn notes() -> [Note; 2] {
        let stored = MapEntry {
            pbn: 77,
            kind: MapEntryKind::Stored,
            generation: 1,
            tuple: [5; 16],
            guard_unverified: true,
            ..MapEntry::deallocated(Lba::new(42))
        };
        let gone = MapEntry { generation: 1, ..MapEntry::deallocated(Lba::new(1 << 39)) };
        [
            Note { entries: stored.into(), data_crc: 0xDEAD_BEEF },
            Note { entries: MapEntryRun { first: gone, blocks: 300 }, data_crc: 0 },
        ]
    }

    fn page() -> Vec<u8> {
        let mut page = vec![0; NOTE_PAGE_BYTES];
        notes().iter().enumerate().for_each(|(at, note)| note.encode(&mut page, at));
        HEAD.seal(&mut page, 2, SEED);
        page
    }

    #[test]
    fn notes_come_back_from_their_places_and_from_no_others() {
        let page = page();
        assert_eq!(NoteHead::decode(&page, SEED), Some((HEAD, 2)));
        let [first, second] = notes();
        assert_eq!([0, 1, 2].map(|at| Note::decode(&page, at)), [Some(first), Some(second), None]);
        assert_eq!(Note::decode(&page, NOTES_PER_PAGE), None, "nothing is behind the last");
        assert_eq!(Note::place(NOTES_PER_PAGE), NOTE_PAGE_BYTES);
    }

    #[test]
    fn a_full_page_comes_back_and_what_is_taken_from_it_leaves_nothing() {
        let mut page = vec![0; NOTE_PAGE_BYTES];
        let [note, _] = notes();
        (0..NOTES_PER_PAGE).for_each(|at| note.encode(&mut page, at));
        HEAD.seal(&mut page, NOTES_PER_PAGE, SEED);
        assert_eq!(NoteHead::decode(&page, SEED), Some((HEAD, NOTES_PER_PAGE)));
        assert_eq!(Note::decode(&page, NOTES_PER_PAGE - 1), Some(note));
        HEAD.seal(&mut page, 1, SEED);
        assert_eq!(NoteHead::decode(&page, SEED), None, "something lies behind the last note");
        Note::clear_from(&mut page, 1);
        assert_eq!(NoteHead::decode(&page, SEED), Some((HEAD, 1)));
        HEAD.seal(&mut page, 0, SEED);
        assert_eq!(NoteHead::decode(&page, SEED), None, "a page without notes is not written");
    }

    #[test]
    fn no_bit_of_a_page_changes_unseen() {
        let page = page();
        for bit in 0..NOTE_PAGE_BYTES * 8 {
            let mut other = page.clone();
            other[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(NoteHead::decode(&other, SEED), None, "bit {bit}");
        }
        assert_eq!(NoteHead::decode(&page, Seed(1)), None, "another volume's");
        assert_eq!(NoteHead::decode(&page[..NOTE_PAGE_BYTES - 1], SEED), None);
        assert_eq!(NoteHead::decode(&[0; NOTE_PAGE_BYTES], SEED), None);
        let mut first_format = page;
        first_format[..4].copy_from_slice(b"SNOT");
        assert_eq!(NoteHead::decode(&first_format, SEED), None);
    }
}
