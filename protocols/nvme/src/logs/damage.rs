//! Damage: what is wrong with each block that a namespace knows to be bad. A vendor specific page of sealblock.
//!
//! Status codes name a field and the error log one block; neither has room for the values that differ, nor for the other
//! blocks of a command that failed. This page has both. The bytes are drawn in `docs/formats/damage-log.md`. A signature
//! stands in front because other vendors have other pages under the same identifier.

use sealblock_integrity::Field as TagField;
use sealblock_units::Lba;

use crate::wire::{TooShort, flags, layout};

flags! {
    /// What is said about the page as a whole.
    pub struct DamageFlags(u16) {
        /// Bad blocks have no entry: there are too many, or it is not known which blocks of a run are bad.
        OVERFLOWED = 0,
        /// The runs behind the entries have all bad blocks without an entry.
        RUNS = 1,
        /// The list was lost, and not every block has been checked since: it may lack blocks that were known to be bad.
        LIST_LOST = 2,
    }
}

flags! {
    /// What is said about a block.
    pub struct DamageEntryFlags(u8) {
        /// The expected and the actual value are there.
        VALUES = 0,
        /// The block was written with Write Uncorrectable.
        WRITE_UNCORRECTABLE = 1,
    }
}

layout! {
    /// Head of the page; entries follow, and runs behind them.
    pub struct DamageHeader[32] {
        /// Signature, see [`DamageHeader::SIGNATURE`].
        0 => signature: [u8; 8],
        /// Version, see [`DamageHeader::VERSION`].
        8 => version: u16,
        /// About the page as a whole.
        10 => flags: DamageFlags,
        /// NSID: whose blocks.
        12 => nsid: u32,
        /// Number of entries.
        16 => entries: u32,
        /// Bytes of one entry or run, at least 32; what is behind the part known here is skipped.
        20 => entry_bytes: u16,
        /// Number of runs.
        22 => runs: u16,
        /// Generation: another one after each change of the list.
        24 => generation: u64,
    }
}

layout! {
    /// One damaged block, as it stands in the page.
    pub struct RawDamageEntry[32] {
        /// LBA: the block.
        0 => lba: u64,
        /// What the check computed or demanded, right-aligned.
        8 => expected: u64,
        /// What was stored, right-aligned.
        16 => actual: u64,
        /// Which field: 0 media, 1 guard, 2 application tag, 3 reference tag, 4 storage tag.
        24 => field: u8,
        /// About the block.
        25 => flags: DamageEntryFlags,
    }
}

layout! {
    /// Blocks some of which are bad, as they stand in the page.
    pub struct RawDamageRun[32] {
        /// The first block.
        0 => first: u64,
        /// The last block.
        8 => last: u64,
        /// How many of them are bad at least.
        16 => bad_blocks: u64,
        /// As in an entry.
        24 => field: u8,
        /// As in an entry, without values.
        25 => flags: DamageEntryFlags,
    }
}

/// The field of each code; none where the block could not be read at all.
const FIELDS: [Option<TagField>; 5] =
    [None, Some(TagField::Guard), Some(TagField::AppTag), Some(TagField::RefTag), Some(TagField::StorageTag)];

/// One damaged block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DamageEntry {
    /// The block.
    pub lba: Lba,
    /// The field that does not fit; `None` when the block could not be read at all.
    pub field: Option<TagField>,
    /// What the field should be and what it is, if that is known.
    pub values: Option<(u64, u64)>,
    /// Whether the block was written with Write Uncorrectable.
    pub write_uncorrectable: bool,
}

/// Blocks that have no entries. Some of them are bad.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DamageRunEntry {
    /// The first block.
    pub first: u64,
    /// The last block.
    pub last: u64,
    /// How many of them are bad at least; not more than there are.
    pub bad_blocks: u64,
    /// The field that does not fit, as far as it is known; `None` when blocks could not be read at all.
    pub field: Option<TagField>,
    /// Whether the blocks were written with Write Uncorrectable.
    pub write_uncorrectable: bool,
}

/// The page.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DamageLog {
    /// Whose blocks.
    pub nsid: u32,
    /// Another one after each change of the list. Who reads a page in parts compares it between the first and the last.
    pub generation: u64,
    /// Whether bad blocks have no entry.
    pub overflowed: bool,
    /// Whether the list was lost, and not every block has been checked since.
    pub is_list_lost: bool,
    /// The damaged blocks, ascending.
    pub entries: Vec<DamageEntry>,
    /// Where the other bad blocks are, if that is known of all of them. Pages of earlier versions do not have it.
    pub runs: Option<Vec<DamageRunEntry>>,
}

/// Why bytes are not this page.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DamageLogError {
    /// It ends before its last entry.
    #[error(transparent)]
    TooShort(#[from] TooShort),
    /// It is a page of another vendor.
    #[error("the page does not have the signature of a damage log")]
    Signature,
    /// It is of a version that is not known, or its entries are too small for it.
    #[error("version {version} of the damage log with entries of {entry_bytes} bytes is not known")]
    Version {
        /// The page's version.
        version: u16,
        /// The page's size of an entry.
        entry_bytes: u16,
    },
    /// An entry names a field that is not known.
    #[error("damaged field {code} is not known")]
    Field {
        /// The entry's code.
        code: u8,
    },
    /// A run ends before it begins, or has more bad blocks than blocks.
    #[error("a run of blocks {first} to {last} with {bad_blocks} bad ones is impossible")]
    Run {
        /// Its first block.
        first: u64,
        /// Its last block.
        last: u64,
        /// Its bad blocks.
        bad_blocks: u64,
    },
}

impl DamageHeader {
    /// What the page begins with.
    pub const SIGNATURE: [u8; 8] = *b"SBDAMAGE";
    /// The version drawn here.
    pub const VERSION: u16 = 1;

    /// The head in the first 32 bytes of a page, once signature and version are known to fit.
    pub fn read(page: &[u8]) -> Result<DamageHeader, DamageLogError> {
        let head = DamageHeader::decode(page)?;
        if head.signature != DamageHeader::SIGNATURE {
            return Err(DamageLogError::Signature);
        }
        let (version, entry_bytes) = (head.version, head.entry_bytes);
        if version != DamageHeader::VERSION || usize::from(entry_bytes) < RawDamageEntry::BYTES || entry_bytes % 4 != 0
        {
            return Err(DamageLogError::Version { version, entry_bytes });
        }
        Ok(head)
    }

    /// Bytes of the whole page.
    pub const fn length_bytes(&self) -> u64 {
        DamageHeader::BYTES as u64 + (self.entries as u64 + self.runs as u64) * self.entry_bytes as u64
    }
}

impl DamageEntry {
    /// The 32 bytes of the entry.
    pub fn encode(&self) -> [u8; RawDamageEntry::BYTES] {
        let (expected, actual) = self.values.unwrap_or_default();
        let values = if self.values.is_some() { DamageEntryFlags::VALUES } else { DamageEntryFlags::NONE };
        let flags = values | uncorrectable(self.write_uncorrectable);
        RawDamageEntry { lba: self.lba.get(), expected, actual, field: code(self.field), flags }.encode()
    }

    /// The entry in the first 32 bytes of `from`.
    pub fn decode(from: &[u8]) -> Result<DamageEntry, DamageLogError> {
        let raw = RawDamageEntry::decode(from)?;
        Ok(DamageEntry {
            lba: Lba::new(raw.lba),
            field: field(raw.field)?,
            values: raw.flags.contains(DamageEntryFlags::VALUES).then_some((raw.expected, raw.actual)),
            write_uncorrectable: raw.flags.contains(DamageEntryFlags::WRITE_UNCORRECTABLE),
        })
    }
}

impl DamageRunEntry {
    /// The 32 bytes of the run.
    pub fn encode(&self) -> [u8; RawDamageRun::BYTES] {
        let DamageRunEntry { first, last, bad_blocks, .. } = *self;
        let (field, flags) = (code(self.field), uncorrectable(self.write_uncorrectable));
        RawDamageRun { first, last, bad_blocks, field, flags }.encode()
    }

    /// The run in the first 32 bytes of `from`.
    pub fn decode(from: &[u8]) -> Result<DamageRunEntry, DamageLogError> {
        let RawDamageRun { first, last, bad_blocks, field: code, flags } = RawDamageRun::decode(from)?;
        // The last address has a successor, so that the number of blocks is a number.
        if last < first || last == u64::MAX || bad_blocks > last - first + 1 {
            return Err(DamageLogError::Run { first, last, bad_blocks });
        }
        let write_uncorrectable = flags.contains(DamageEntryFlags::WRITE_UNCORRECTABLE);
        Ok(DamageRunEntry { first, last, bad_blocks, field: field(code)?, write_uncorrectable })
    }
}

fn code(field: Option<TagField>) -> u8 {
    FIELDS.iter().position(|known| *known == field).expect("every field has a code") as u8
}

fn field(code: u8) -> Result<Option<TagField>, DamageLogError> {
    FIELDS.get(usize::from(code)).copied().ok_or(DamageLogError::Field { code })
}

fn uncorrectable(is_set: bool) -> DamageEntryFlags {
    if is_set { DamageEntryFlags::WRITE_UNCORRECTABLE } else { DamageEntryFlags::NONE }
}

impl DamageLog {
    /// The page.
    pub fn encode(&self) -> Vec<u8> {
        let flag = |is_set, flag| if is_set { flag } else { DamageFlags::NONE };
        let runs = self.runs.as_deref().unwrap_or_default();
        let head = DamageHeader {
            signature: DamageHeader::SIGNATURE,
            version: DamageHeader::VERSION,
            flags: flag(self.overflowed, DamageFlags::OVERFLOWED)
                | flag(self.runs.is_some(), DamageFlags::RUNS)
                | flag(self.is_list_lost, DamageFlags::LIST_LOST),
            nsid: self.nsid,
            entries: u32::try_from(self.entries.len()).unwrap_or(u32::MAX),
            entry_bytes: RawDamageEntry::BYTES as u16,
            runs: u16::try_from(runs.len()).unwrap_or(u16::MAX),
            generation: self.generation,
        };
        let mut page = head.encode().to_vec();
        page.extend(self.entries.iter().flat_map(DamageEntry::encode));
        page.extend(runs.iter().flat_map(DamageRunEntry::encode));
        page
    }

    /// The page that was read, all of it; bytes behind its last run are left alone.
    ///
    /// # Errors
    /// [`DamageLogError`] if it is another vendor's page, another version, cut short, or names an unknown field.
    pub fn decode(page: &[u8]) -> Result<DamageLog, DamageLogError> {
        let head = DamageHeader::read(page)?;
        let needed = usize::try_from(head.length_bytes()).unwrap_or(usize::MAX);
        let short = TooShort { structure: "DamageLog", needed, got: page.len() };
        let list = page.get(DamageHeader::BYTES..needed).ok_or(short)?;
        let mut all = list.chunks_exact(usize::from(head.entry_bytes));
        let entries: Result<_, _> = all.by_ref().take(head.entries as usize).map(DamageEntry::decode).collect();
        let (entries, runs): (_, Result<_, _>) = (entries?, all.map(DamageRunEntry::decode).collect());
        Ok(DamageLog {
            nsid: head.nsid,
            generation: head.generation,
            overflowed: head.flags.contains(DamageFlags::OVERFLOWED),
            is_list_lost: head.flags.contains(DamageFlags::LIST_LOST),
            entries,
            runs: head.flags.contains(DamageFlags::RUNS).then_some(runs?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn log() -> DamageLog {
        let guard = DamageEntry {
            lba: Lba::new(0x0102),
            field: Some(TagField::Guard),
            values: Some((0xABCD, 0x1234)),
            write_uncorrectable: false,
        };
        let media = DamageEntry { lba: Lba::new(9), field: None, values: None, write_uncorrectable: true };
        let entries = vec![guard, media];
        DamageLog { nsid: 3, generation: 5, overflowed: true, is_list_lost: false, entries, runs: None }
    }

    #[test]
    fn a_page_has_these_bytes_and_round_trips() {
        let page = log().encode();
        assert_eq!(page[..16], *b"SBDAMAGE\x01\0\x01\0\x03\0\0\0");
        assert_eq!(page[16..32], [2, 0, 0, 0, 32, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0]);
        let mut guard = [0; 32];
        (guard[0], guard[1], guard[24], guard[25]) = (2, 1, 1, 1);
        guard[8..10].copy_from_slice(&[0xCD, 0xAB]);
        guard[16..18].copy_from_slice(&[0x34, 0x12]);
        assert_eq!(page[32..64], guard);
        assert_eq!((page[64], page[88], page[89], page.len()), (9, 0, 2, 96));
        assert_eq!(DamageLog::decode(&page), Ok(log()));
        assert_eq!(DamageHeader::read(&page).map(|head| head.length_bytes()), Ok(96));
    }

    #[test]
    fn runs_stand_behind_the_entries_and_an_earlier_reader_does_not_see_them() {
        let field = Some(TagField::Guard);
        let run = DamageRunEntry { first: 0x0102, last: 0x0304, bad_blocks: 5, field, write_uncorrectable: false };
        let made = DamageRunEntry { write_uncorrectable: true, bad_blocks: 0, ..run };
        let log = DamageLog { runs: Some(vec![run, made]), ..log() };
        let page = log.encode();
        assert_eq!(page[10..12], [3, 0]);
        assert_eq!((&page[16..24], page.len()), (&[2, 0, 0, 0, 32, 0, 2, 0][..], 160));
        let mut bytes = [0; 32];
        (bytes[0], bytes[1], bytes[8], bytes[9], bytes[16], bytes[24]) = (2, 1, 4, 3, 5, 1);
        assert_eq!(page[96..128], bytes);
        assert_eq!((page[144], page[153]), (0, 2));
        assert_eq!(DamageLog::decode(&page).as_ref(), Ok(&log));
        assert!(matches!(DamageLog::decode(&page[..159]), Err(DamageLogError::TooShort(_))));
        let none = DamageLog { runs: Some(Vec::new()), overflowed: false, ..log };
        assert_eq!(DamageLog::decode(&none.encode()).as_ref(), Ok(&none));
        let lost = DamageLog { is_list_lost: true, ..none };
        assert_eq!(lost.encode()[10..12], [6, 0]);
        assert_eq!(DamageLog::decode(&lost.encode()), Ok(lost));
        for (first, last, bad_blocks) in [(5, 4, 0), (5, 6, 3), (5, u64::MAX, 1)] {
            let bad = DamageRunEntry { first, last, bad_blocks, ..run }.encode();
            let why = DamageLogError::Run { first, last, bad_blocks };
            assert_eq!(DamageRunEntry::decode(&bad), Err(why));
        }
    }

    #[test]
    fn larger_entries_of_later_writers_are_read() {
        let page = log().encode();
        let mut wide = page[..32].to_vec();
        wide[20] = 40;
        for entry in page[32..].chunks(32) {
            wide.extend(entry);
            wide.extend([0xEE; 8]);
        }
        assert_eq!(DamageLog::decode(&wide), Ok(log()));
    }

    #[test]
    fn other_pages_are_refused() {
        let page = log().encode();
        let changed = |at: usize, byte: u8| {
            let mut page = page.clone();
            page[at] = byte;
            DamageLog::decode(&page)
        };
        assert_eq!(changed(0, b'X'), Err(DamageLogError::Signature));
        assert_eq!(changed(8, 2), Err(DamageLogError::Version { version: 2, entry_bytes: 32 }));
        assert_eq!(changed(20, 28), Err(DamageLogError::Version { version: 1, entry_bytes: 28 }));
        assert_eq!(changed(56, 5), Err(DamageLogError::Field { code: 5 }));
        assert!(matches!(changed(19, 0xFF), Err(DamageLogError::TooShort(_))));
        assert!(matches!(DamageLog::decode(&page[..95]), Err(DamageLogError::TooShort(_))));
    }

    proptest! {
        #[test]
        fn any_page_is_read_or_refused(mut page in proptest::collection::vec(any::<u8>(), 0..300), ours: bool) {
            if ours && page.len() >= 32 {
                page[..10].copy_from_slice(b"SBDAMAGE\x01\0");
                page[20..22].copy_from_slice(&[32, 0]);
            }
            let _ = DamageLog::decode(&page);
        }
    }
}
