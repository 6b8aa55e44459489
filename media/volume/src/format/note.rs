//! A page of notes: map entries of changes that were answered and are not durable, for the time after the death of the process.
//!
//! Notes are kept as long as the machine runs, so a page names the boot that it is of, and the opening of the volume. Every note checks
//! itself, with what its page says of all of them: of a page that was torn, what counts is what was there before or is there now.

use super::{MAP_ENTRY_BYTES, MapEntryRun, Seed, get, put};

/// Bytes of a page.
pub const NOTE_PAGE_BYTES: usize = 4096;
/// Notes of a page.
pub const NOTES_PER_PAGE: usize = (NOTE_PAGE_BYTES - HEAD_BYTES) / NOTE_BYTES;

const MAGIC: u64 = u32::from_le_bytes(*b"SNOT") as u64;
const HEAD_BYTES: usize = 64;
const NOTE_BYTES: usize = 48;

const CHECKSUM: usize = 4;
const RUN: usize = 8;
const BOOT: usize = 16;
const BASE_SECTOR: usize = 32;
const BASE_ENTRIES: usize = 40;
const NUMBER: usize = 44;
const FIRST: usize = 48;

const ORDER: usize = MAP_ENTRY_BYTES;
const DATA_CRC: usize = 40;
const NOTE_CHECKSUM: usize = 44;

/// A place among the own map entries of the log: of a sector, by its sequence number, so many. Those before it are older.
pub type LogPosition = (u64, u16);

/// What all notes of a page have in common.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoteHead {
    /// The opening of the volume that it is of: the `write_seq` of the superblock that named the place.
    pub run: u64,
    /// The boot of the machine.
    pub boot: [u8; 16],
    /// Where the log ended when the memtable that has these map entries took its first.
    pub base: LogPosition,
    /// Which page of its half it is.
    pub number: u32,
    /// The order of its first note. Those behind it count on.
    pub first: u64,
}

/// The map entries of a change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Note {
    /// One map entry, or that of a run.
    pub entries: MapEntryRun,
    /// Counts the notes of the opening.
    pub order: u64,
    /// The CRC-32C of the data, of a block whose guard says nothing of them; else 0.
    pub data_crc: u32,
}

impl NoteHead {
    /// Writes the head of a page whose other bytes are zeroes.
    pub fn encode(&self, page: &mut [u8], seed: Seed) {
        put::<4>(page, 0, MAGIC);
        put::<8>(page, RUN, self.run);
        page[BOOT..BOOT + 16].copy_from_slice(&self.boot);
        put::<8>(page, BASE_SECTOR, self.base.0);
        put::<2>(page, BASE_ENTRIES, u64::from(self.base.1));
        put::<4>(page, NUMBER, u64::from(self.number));
        put::<8>(page, FIRST, self.first);
        let checksum = seed.checksum(&page[RUN..HEAD_BYTES]);
        put::<4>(page, CHECKSUM, u64::from(checksum));
    }

    /// Reads the head of a page; nothing unless it checks.
    pub fn decode(page: &[u8], seed: Seed) -> Option<NoteHead> {
        let head = page.get(..HEAD_BYTES)?;
        if get::<4>(head, 0) != MAGIC || get::<4>(head, CHECKSUM) != u64::from(seed.checksum(&head[RUN..])) {
            return None;
        }
        let mut boot = [0; 16];
        boot.copy_from_slice(&head[BOOT..BOOT + 16]);
        Some(NoteHead {
            run: get::<8>(head, RUN),
            boot,
            base: (get::<8>(head, BASE_SECTOR), get::<2>(head, BASE_ENTRIES) as u16),
            number: get::<4>(head, NUMBER) as u32,
            first: get::<8>(head, FIRST),
        })
    }

    /// The checksum of a note of this page.
    fn checksum(&self, note: &[u8], seed: Seed) -> u64 {
        let mut bytes = [0; NOTE_CHECKSUM + 18];
        bytes[..NOTE_CHECKSUM].copy_from_slice(&note[..NOTE_CHECKSUM]);
        put::<8>(&mut bytes, NOTE_CHECKSUM, self.run);
        put::<8>(&mut bytes, NOTE_CHECKSUM + 8, self.base.0);
        put::<2>(&mut bytes, NOTE_CHECKSUM + 16, u64::from(self.base.1));
        u64::from(seed.checksum(&bytes))
    }
}

impl Note {
    /// Writes a note to its place in a page, which has this head.
    pub fn encode(&self, page: &mut [u8], place: usize, head: &NoteHead, seed: Seed) {
        let at = HEAD_BYTES + place * NOTE_BYTES;
        let note = &mut page[at..at + NOTE_BYTES];
        // A map entry without a generation is none. The log gives it its own.
        let mut entries = self.entries;
        entries.first.generation = 1;
        note[..MAP_ENTRY_BYTES].copy_from_slice(&entries.encode(seed));
        put::<8>(note, ORDER, self.order);
        put::<4>(note, DATA_CRC, u64::from(self.data_crc));
        let checksum = head.checksum(note, seed);
        put::<4>(note, NOTE_CHECKSUM, checksum);
    }

    /// Reads the note at a place of a page, which has this head; nothing unless it checks.
    pub fn decode(page: &[u8], place: usize, head: &NoteHead, seed: Seed) -> Option<Note> {
        let at = HEAD_BYTES + place * NOTE_BYTES;
        let note = page.get(at..at + NOTE_BYTES)?;
        if get::<4>(note, NOTE_CHECKSUM) != head.checksum(note, seed) {
            return None;
        }
        let mut entry = [0; MAP_ENTRY_BYTES];
        entry.copy_from_slice(&note[..MAP_ENTRY_BYTES]);
        let entries = MapEntryRun::decode(&entry, seed).ok()?;
        Some(Note { entries, order: get::<8>(note, ORDER), data_crc: get::<4>(note, DATA_CRC) as u32 })
    }

    /// Leaves nothing from this place on.
    pub fn clear_from(page: &mut [u8], place: usize) {
        page[HEAD_BYTES + place * NOTE_BYTES..].fill(0);
    }

    /// Whether a place of a page has anything at all.
    pub fn is_there(page: &[u8], place: usize) -> bool {
        let at = HEAD_BYTES + place * NOTE_BYTES;
        page.get(at..at + NOTE_BYTES).is_some_and(|note| note.iter().any(|byte| *byte != 0))
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
            Note { entries: stored.into(), order: 1 << 60, data_crc: 0xDEAD_BEEF },
            Note { entries: MapEntryRun { first: gone, blocks: 300 }, order: 4, data_crc: 0 },
        ]
    }

    fn page() -> Vec<u8> {
        let mut page = vec![0; NOTE_PAGE_BYTES];
        HEAD.encode(&mut page, SEED);
        let [first, last] = notes();
        first.encode(&mut page, 0, &HEAD, SEED);
        last.encode(&mut page, NOTES_PER_PAGE - 1, &HEAD, SEED);
        page
    }

    #[test]
    fn notes_come_back_from_their_places_and_from_no_others() {
        let page = page();
        assert_eq!(NoteHead::decode(&page, SEED), Some(HEAD));
        let at = |place| Note::decode(&page, place, &HEAD, SEED);
        assert_eq!([at(0), at(1), at(NOTES_PER_PAGE - 1)], [Some(notes()[0]), None, Some(notes()[1])]);
        assert_eq!(at(NOTES_PER_PAGE), None, "nothing is behind the last");
        assert_eq!([0, 1].map(|place| Note::is_there(&page, place)), [true, false]);
        assert_eq!(HEAD_BYTES + NOTES_PER_PAGE * NOTE_BYTES, NOTE_PAGE_BYTES);
    }

    #[test]
    fn no_bit_changes_unseen_and_no_note_counts_under_another_head() {
        let page = page();
        for at in 0..HEAD_BYTES + NOTE_BYTES {
            let mut other = page.clone();
            other[at] ^= 1;
            let is_head = at < HEAD_BYTES;
            assert_eq!(NoteHead::decode(&other, SEED).is_none(), is_head, "byte {at}");
            assert_eq!(Note::decode(&other, 0, &HEAD, SEED).is_none(), !is_head, "byte {at}");
        }
        let others =
            [NoteHead { run: 8, ..HEAD }, NoteHead { base: (71, 5), ..HEAD }, NoteHead { base: (70, 4), ..HEAD }];
        assert!(others.iter().all(|head| Note::decode(&page, 0, head, SEED).is_none()));
        assert_eq!(NoteHead::decode(&page, Seed(1)), None, "another volume's");
        assert_eq!(NoteHead::decode(&page[..HEAD_BYTES - 1], SEED), None);
        assert_eq!(NoteHead::decode(&[0; NOTE_PAGE_BYTES], SEED), None);
    }
}
