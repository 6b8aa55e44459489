//! The superblock: the volume's identity and layout, and where its log begins.
//!
//! Two copies at the start are written alternately, each within one sector, so one of them is always intact; a third at
//! the end is written with each of them. The newest valid one is used.

use sealblock_integrity::{GuardKind, PiFormat, ProtectionType};
use sealblock_units::BlockSize;

use super::{
    Layout, LayoutError, LogPosition, MAX_COUNT, MAX_SEGMENTS, NOTE_PAGE_BYTES, NOTES_PER_PAGE, Seed, crc32c, get, put,
};

/// Bytes of a superblock: the smallest sector, which is written whole or not at all.
pub const SUPERBLOCK_BYTES: usize = 512;

/// A byte above 127, letters, line ends and an end-of-file mark reveal most ways in which copying can alter a file.
const MAGIC: [u8; 8] = *b"\x89SEAL\r\n\x1a";
const VERSION: u64 = 2;
/// The number of bytes of the magic that may be wrong in the trace of a superblock.
const MAGIC_BYTES_WRONG: usize = 3;
/// Features: there may be map entries of blocks that were made unreadable (kind 3).
const FEATURE_UNCORRECTABLE: u64 = 1;
/// Features: the volume was resized, and its segments are listed.
const FEATURE_RESIZED: u64 = 2;

pub(super) const AT_VERSION: usize = 8;
pub(super) const AT_FEATURES: usize = 12;
pub(super) const AT_UUID: usize = 16;
const AT_WRITE_SEQ: usize = 32;
pub(super) const AT_BLOCK_BYTES: usize = 40;
pub(super) const AT_SECTOR_BYTES: usize = 44;
pub(super) const AT_CAPACITY: usize = 48;
pub(super) const AT_GUARD: usize = 56;
const AT_TYPE: usize = 57;
const AT_STORAGE_TAG: usize = 58;
const AT_CLEAN: usize = 59;
const AT_LOG_SECTORS: usize = 64;
const AT_GROUP_BLOCKS: usize = 72;
const AT_GROUPS_OFFSET: usize = 80;
const AT_GROUP_STRIDE: usize = 88;
const AT_LOG_TAIL: usize = 96;
const AT_KEEPS_SPACE: usize = 60;
const AT_MARKS: usize = 61;
const AT_INITIALIZED_GROUPS: usize = 104;
const AT_CREATED: usize = 112;
const AT_SEGMENTS: usize = 120;
const AT_NOTES_OFFSET: usize = 248;
const AT_NOTES_HALF: usize = 256;
const AT_ANSWERED: usize = 260;
const AT_NOTES_RUN: usize = 264;
const AT_NOTES_NEWEST: usize = 272;
const AT_NOTES_FLOOR: usize = 280;
const AT_NOTES_COUNTED: usize = 290;
const AT_UNREPORTED_LOSS: usize = 291;
const AT_NOTES_BOOT: usize = 296;
const AT_LABELS: usize = 312;
pub(super) const AT_CHECKSUM: usize = 508;
/// Marks: the log is anchored. Programs that do not know a mark clear it with the next superblock that they write.
const MARK_ANCHORED: u64 = 1;
/// Marks: the reserved areas were zeroed.
const MARK_ZEROED_AREAS: u64 = 2;
/// Marks: the anchor is the sector `log_tail`.
const MARK_BEGUN: u64 = 4;
/// Marks: a page of the block map was newer than log and superblocks.
const MARK_PUT_BACK: u64 = 8;
/// Completed changes are durable or noted. Programs that support neither leave this 0.
const ANSWERED_DURABLE: u64 = 1;
const ANSWERED_NOTED: u64 = 2;

/// The state of completed changes while the log is in use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Answered {
    /// Some may be only in the memory of the program.
    #[default]
    Volatile,
    /// All are durable.
    Durable,
    /// All are noted, in this place.
    Noted(NotesPlace),
}

/// The place of notes: two contiguous halves of the same length, in free physical blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NotesPlace {
    /// Where the first half begins on the medium, in bytes.
    pub offset: u64,
    /// Bytes of a half, in whole pages.
    pub half_bytes: u32,
    /// The open that they belong to: the `write_seq` of the first superblock that named this place.
    pub run: u64,
    /// The boot of the machine that they belong to.
    pub boot: [u8; 16],
    /// Set while recovery makes them durable: the log that they were compared with is then in the block map already.
    pub counted: Option<CountedNotes>,
}

/// The notes that recovery has decided to use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CountedNotes {
    /// The base of the oldest notes to use.
    pub floor: LogPosition,
    /// The number of the newest note.
    pub newest: u64,
}

/// Why completed changes that were not durable may be lost. The discriminants are the codes in a superblock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum WhyLost {
    /// The program that used the volume kept them only in memory.
    InMemory = 1,
    /// The notes are of another boot.
    OtherBoot = 2,
    /// The medium does not support notes.
    NoNotes = 3,
    /// The medium failed when notes were read.
    Unreadable = 4,
    /// Notes are damaged.
    Damaged = 5,
    /// Notes are damaged or missing.
    Missing = 6,
    /// The log has changes that were not noted.
    NotNoted = 7,
    /// Notes that an earlier recovery had decided to use are gone.
    Gone = 8,
    /// The data of noted changes are not on the medium.
    DataGone = 9,
    /// A reason that this program does not know.
    Other = 255,
}

impl WhyLost {
    const ALL: [WhyLost; 9] = [
        WhyLost::InMemory,
        WhyLost::OtherBoot,
        WhyLost::NoNotes,
        WhyLost::Unreadable,
        WhyLost::Damaged,
        WhyLost::Missing,
        WhyLost::NotNoted,
        WhyLost::Gone,
        WhyLost::DataGone,
    ];

    /// As text.
    pub const fn as_str(self) -> &'static str {
        match self {
            WhyLost::InMemory => "the program that used the volume last kept them in memory alone",
            WhyLost::OtherBoot => "the machine was started anew",
            WhyLost::NoNotes => "this medium keeps no notes",
            WhyLost::Unreadable => "notes cannot be read",
            WhyLost::Damaged => "notes are damaged",
            WhyLost::Missing => "notes are damaged or missing",
            WhyLost::NotNoted => "the log has changes that are not noted",
            WhyLost::Gone => "notes that were counted are gone",
            WhyLost::DataGone => "data of noted changes are not there",
            WhyLost::Other => "a later program found so",
        }
    }

    /// The reason with this code. An unknown code still means that changes may be lost.
    fn of_code(code: u64) -> Option<WhyLost> {
        let known = || WhyLost::ALL.into_iter().find(|why| *why as u64 == code);
        (code != 0).then(|| known().unwrap_or(WhyLost::Other))
    }
}

/// The content of a superblock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Superblock {
    /// The volume's identity.
    pub uuid: [u8; 16],
    /// Counts the writes of superblocks; the higher of two valid copies counts.
    pub write_seq: u64,
    /// The layout.
    pub layout: Layout,
    /// The format of the blocks' protection information; `None` without.
    pub protection: Option<PiFormat>,
    /// The volume was closed cleanly: the log is empty from `log_tail` on.
    pub is_clean: bool,
    /// The log in use has an anchor, a sector that was durable before this superblock was written. Without a fault, the
    /// sector before `log_tail` or a later one exists. Meaningless in a volume that was closed cleanly.
    pub is_anchored: bool,
    /// The log is anchored, and there was no checkpoint since: the sector `log_tail` itself is the anchor.
    pub is_begun: bool,
    /// A page of the block map was newer than log and superblocks: these were put back to an earlier state. It stays,
    /// across opens, until a caller that accepts older content changes a block: the log soon passes what such a page
    /// shows.
    pub is_put_back: bool,
    /// Blocks may have been made unreadable (feature bit 0). Set before the first such map entry is written, and never
    /// cleared.
    pub uncorrectable: bool,
    /// Created with `--preallocate`: the volume's space was allocated then, and free physical blocks keep theirs.
    pub keeps_space: bool,
    /// The reserved areas were zeroed when the volume was created: whatever they contain was written since.
    pub areas_were_zeroed: bool,
    /// Sequence number of the first log sector whose map entries are not all in the block map.
    pub log_tail: u64,
    /// The number of block groups that were initialized when this was written: a group map with fewer is an old one.
    pub initialized_groups: u64,
    /// The state of completed changes. Impossible values do not invalidate the superblock.
    pub answered: Answered,
    /// The number of group labels that had been written durably by then: a label with a lower count was restored from
    /// an earlier state. Programs that do not know it leave 0.
    pub labels_written: u64,
    /// Completed changes may be lost, and their senders do not know it yet. The open that finds it records it here
    /// durably, before it replaces the proof; it stays, across opens, until they know. Programs that do not know it
    /// drop it.
    pub unreported_loss: Option<WhyLost>,
}

/// Why bytes are not a usable superblock.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SuperblockError {
    /// The magic bytes are missing: this is not a superblock.
    #[error("no protected volume (the magic bytes are missing)")]
    Magic,
    /// There are too few bytes.
    #[error("the superblock is cut off")]
    Truncated,
    /// The checksum does not match.
    #[error("the superblock's checksum does not match")]
    Checksum,
    /// It is a copy for another position, so this position is part of something else.
    #[error("the superblock belongs at another place")]
    Place,
    /// An unknown version of the format.
    #[error("the volume has format version {0}; this program knows version 2")]
    Version(u64),
    /// Features that this program does not know.
    #[error("the volume has features {0:#x}, which this program does not know")]
    Features(u64),
    /// A field has an impossible value.
    #[error("invalid {field} in the superblock: {value}")]
    Field {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// The layout is impossible.
    #[error("invalid superblock layout: {0}")]
    Layout(#[from] LayoutError),
}

impl Superblock {
    /// The superblock of a new volume, closed cleanly.
    pub fn new(uuid: [u8; 16], layout: Layout, protection: Option<PiFormat>) -> Superblock {
        Superblock {
            uuid,
            write_seq: 0,
            layout,
            protection,
            is_clean: true,
            is_anchored: false,
            is_begun: false,
            is_put_back: false,
            uncorrectable: false,
            keeps_space: false,
            areas_were_zeroed: false,
            log_tail: 0,
            initialized_groups: 0,
            answered: Answered::Volatile,
            labels_written: 0,
            unreported_loss: None,
        }
    }

    /// The salt of the volume's checksums.
    pub fn seed(&self) -> Seed {
        Seed::of(&self.uuid)
    }

    /// True if `bytes` begin like a protected volume, in whatever state.
    pub fn recognise(bytes: &[u8]) -> bool {
        bytes.starts_with(&MAGIC)
    }

    /// True if `bytes` are the remains of a superblock: most of the magic is there, or the fields of the shape, which
    /// are redundant, agree with each other. Neither happens by chance, nor in a file of another format.
    pub fn is_trace(bytes: &[u8]) -> bool {
        let Some(bytes) = bytes.get(..SUPERBLOCK_BYTES) else { return false };
        let wrong = MAGIC.iter().zip(bytes).filter(|(due, there)| due != there).count();
        wrong <= MAGIC_BYTES_WRONG || decode_layout(bytes).is_ok()
    }

    /// True if `bytes` are the remains of the third superblock of a volume that ends with the [`THIRD_FROM_END_BYTES`]
    /// at `offset`: a trace of a superblock whose layout, if it still has one, ends there.
    ///
    /// [`THIRD_FROM_END_BYTES`]: super::THIRD_FROM_END_BYTES
    pub fn is_trace_at(bytes: &[u8], offset: u64) -> bool {
        let shape = bytes.get(..SUPERBLOCK_BYTES).and_then(|bytes| decode_layout(bytes).ok());
        Superblock::is_trace(bytes) && shape.is_none_or(|layout| layout.third_offset() == offset)
    }

    /// Encodes the superblock.
    pub fn encode(&self) -> [u8; SUPERBLOCK_BYTES] {
        let mut bytes = [0; SUPERBLOCK_BYTES];
        bytes[..MAGIC.len()].copy_from_slice(&MAGIC);
        put::<4>(&mut bytes, AT_VERSION, VERSION);
        let uncorrectable = if self.uncorrectable { FEATURE_UNCORRECTABLE } else { 0 };
        let resized = if self.layout.is_resized() { FEATURE_RESIZED } else { 0 };
        put::<4>(&mut bytes, AT_FEATURES, uncorrectable | resized);
        bytes[AT_UUID..AT_UUID + 16].copy_from_slice(&self.uuid);
        put::<8>(&mut bytes, AT_WRITE_SEQ, self.write_seq);
        put::<4>(&mut bytes, AT_BLOCK_BYTES, self.layout.block_size().bytes() as u64);
        put::<4>(&mut bytes, AT_SECTOR_BYTES, u64::from(self.layout.sector_bytes()));
        put::<8>(&mut bytes, AT_CAPACITY, self.layout.capacity_blocks());
        let (guard, protection, storage_tag) = protection_codes(self.protection);
        put::<1>(&mut bytes, AT_GUARD, guard);
        put::<1>(&mut bytes, AT_TYPE, protection);
        put::<1>(&mut bytes, AT_STORAGE_TAG, storage_tag);
        put::<1>(&mut bytes, AT_CLEAN, u64::from(self.is_clean));
        put::<1>(&mut bytes, AT_KEEPS_SPACE, u64::from(self.keeps_space));
        let mark = |is_set, mark| if is_set { mark } else { 0 };
        let marks = mark(self.is_anchored, MARK_ANCHORED)
            | mark(self.areas_were_zeroed, MARK_ZEROED_AREAS)
            | mark(self.is_begun, MARK_BEGUN)
            | mark(self.is_put_back, MARK_PUT_BACK);
        put::<1>(&mut bytes, AT_MARKS, marks);
        put::<8>(&mut bytes, AT_LOG_SECTORS, self.layout.log_sectors());
        put::<8>(&mut bytes, AT_GROUP_BLOCKS, self.layout.group_blocks());
        put::<8>(&mut bytes, AT_GROUPS_OFFSET, self.layout.groups_offset());
        put::<8>(&mut bytes, AT_GROUP_STRIDE, self.layout.group_stride());
        put::<8>(&mut bytes, AT_LOG_TAIL, self.log_tail);
        put::<8>(&mut bytes, AT_INITIALIZED_GROUPS, self.initialized_groups);
        if self.layout.is_resized() {
            put::<8>(&mut bytes, AT_CREATED, self.layout.created_blocks());
            for (number, segment) in self.layout.segments().iter().enumerate() {
                put::<8>(&mut bytes, AT_SEGMENTS + number * 8, segment.blocks);
            }
        }
        match self.answered {
            Answered::Volatile => {}
            Answered::Durable => put::<4>(&mut bytes, AT_ANSWERED, ANSWERED_DURABLE),
            Answered::Noted(place) => {
                put::<8>(&mut bytes, AT_NOTES_OFFSET, place.offset);
                put::<4>(&mut bytes, AT_NOTES_HALF, u64::from(place.half_bytes));
                put::<4>(&mut bytes, AT_ANSWERED, ANSWERED_NOTED);
                put::<8>(&mut bytes, AT_NOTES_RUN, place.run);
                bytes[AT_NOTES_BOOT..AT_NOTES_BOOT + 16].copy_from_slice(&place.boot);
                if let Some(CountedNotes { floor, newest }) = place.counted {
                    put::<8>(&mut bytes, AT_NOTES_NEWEST, newest);
                    put::<8>(&mut bytes, AT_NOTES_FLOOR, floor.0);
                    put::<2>(&mut bytes, AT_NOTES_FLOOR + 8, u64::from(floor.1));
                    put::<1>(&mut bytes, AT_NOTES_COUNTED, 1);
                }
            }
        }
        put::<8>(&mut bytes, AT_LABELS, self.labels_written);
        put::<1>(&mut bytes, AT_UNREPORTED_LOSS, self.unreported_loss.map_or(0, |why| why as u64));
        put_checksum(&mut bytes);
        bytes
    }

    /// Reads a superblock and checks every field.
    pub fn decode(bytes: &[u8]) -> Result<Superblock, SuperblockError> {
        if !Superblock::recognise(bytes) {
            return Err(SuperblockError::Magic);
        }
        let bytes = bytes.get(..SUPERBLOCK_BYTES).ok_or(SuperblockError::Truncated)?;
        if !has_checksum(bytes) {
            return Err(SuperblockError::Checksum);
        }
        let (version, features) = (get::<4>(bytes, AT_VERSION), get::<4>(bytes, AT_FEATURES));
        if version != VERSION {
            return Err(SuperblockError::Version(version));
        }
        let unknown = features & !(FEATURE_UNCORRECTABLE | FEATURE_RESIZED);
        if unknown != 0 {
            return Err(SuperblockError::Features(unknown));
        }
        let uncorrectable = features & FEATURE_UNCORRECTABLE != 0;
        let layout = decode_layout(bytes)?;
        let log_tail = get::<8>(bytes, AT_LOG_TAIL);
        let write_seq = get::<8>(bytes, AT_WRITE_SEQ);
        if let Some((field, count)) = [("log tail", log_tail), ("write sequence number", write_seq)]
            .into_iter()
            .find(|(_, count)| *count > MAX_COUNT)
        {
            return Err(invalid(field, count));
        }
        let initialized_groups = get::<8>(bytes, AT_INITIALIZED_GROUPS);
        if initialized_groups > layout.block_groups() {
            return Err(invalid("number of initialized block groups", initialized_groups));
        }
        let mark = |at, field| match get::<1>(bytes, at) {
            0 => Ok(false),
            1 => Ok(true),
            value => Err(invalid(field, value)),
        };
        let (clean, keeps_space) = (mark(AT_CLEAN, "clean mark")?, mark(AT_KEEPS_SPACE, "space mark")?);
        let mut uuid = [0; 16];
        uuid.copy_from_slice(&bytes[AT_UUID..AT_UUID + 16]);
        let protection = decode_protection(bytes)?;
        let marks = get::<1>(bytes, AT_MARKS);
        let is_anchored = !clean && marks & MARK_ANCHORED != 0;
        Ok(Superblock {
            uuid,
            write_seq,
            layout,
            protection,
            is_clean: clean,
            is_anchored,
            is_begun: is_anchored && marks & MARK_BEGUN != 0,
            is_put_back: marks & MARK_PUT_BACK != 0,
            uncorrectable,
            keeps_space,
            areas_were_zeroed: marks & MARK_ZEROED_AREAS != 0,
            log_tail,
            initialized_groups,
            answered: decode_answered(bytes, &layout),
            labels_written: get::<8>(bytes, AT_LABELS),
            unreported_loss: WhyLost::of_code(get::<1>(bytes, AT_UNREPORTED_LOSS)),
        })
    }
}

/// Puts the checksum of all other bytes of a superblock, of either version, to its place.
pub(super) fn put_checksum(bytes: &mut [u8; SUPERBLOCK_BYTES]) {
    let checksum = crc32c(&bytes[..AT_CHECKSUM]);
    put::<4>(bytes, AT_CHECKSUM, u64::from(checksum));
}

/// True if the checksum matches the other bytes.
pub(super) fn has_checksum(bytes: &[u8]) -> bool {
    get::<4>(bytes, AT_CHECKSUM) == u64::from(crc32c(&bytes[..AT_CHECKSUM]))
}

/// An invalid place means that changes may be lost; it does not invalidate the superblock.
fn decode_answered(bytes: &[u8], layout: &Layout) -> Answered {
    let mut boot = [0; 16];
    boot.copy_from_slice(&bytes[AT_NOTES_BOOT..AT_NOTES_BOOT + 16]);
    let place = NotesPlace {
        boot,
        offset: get::<8>(bytes, AT_NOTES_OFFSET),
        half_bytes: get::<4>(bytes, AT_NOTES_HALF) as u32,
        run: get::<8>(bytes, AT_NOTES_RUN),
        counted: (get::<1>(bytes, AT_NOTES_COUNTED) == 1).then(|| CountedNotes {
            floor: (get::<8>(bytes, AT_NOTES_FLOOR), get::<2>(bytes, AT_NOTES_FLOOR + 8) as u16),
            newest: get::<8>(bytes, AT_NOTES_NEWEST),
        }),
    };
    match get::<4>(bytes, AT_ANSWERED) {
        ANSWERED_DURABLE => Answered::Durable,
        ANSWERED_NOTED if place.fits(layout) => Answered::Noted(place),
        _ => Answered::Volatile,
    }
}

impl NotesPlace {
    /// The maximum number of bytes of a half: 256 pages.
    pub const HALF_BYTES_MAX: u32 = 1 << 20;

    /// Bytes of both halves.
    pub fn bytes(&self) -> u64 {
        2 * u64::from(self.half_bytes)
    }

    /// True if a volume with this layout can have it: whole pages, within the block groups, and not more notes than fit
    /// in its log.
    fn fits(&self, layout: &Layout) -> bool {
        let page = NOTE_PAGE_BYTES as u64;
        let is_whole = self.offset.is_multiple_of(page) && u64::from(self.half_bytes).is_multiple_of(page);
        let is_possible = self.half_bytes > 0 && self.half_bytes <= NotesPlace::half_bytes_max(layout);
        let end = self.offset.checked_add(self.bytes());
        let within = self.offset >= layout.groups_offset() && end.is_some_and(|end| end <= layout.medium_bytes());
        is_whole && is_possible && within
    }

    /// The maximum number of bytes of a half in a volume with this layout: a commit has room for two log entries for
    /// each note.
    pub fn half_bytes_max(layout: &Layout) -> u32 {
        // A commit takes at most a quarter of the log, including what its first sector repeats.
        let quarter = layout.log_sectors() / 4 * layout.log_sector_entries() - 8;
        let pages = quarter / 2 / NOTES_PER_PAGE as u64;
        u32::try_from(pages * NOTE_PAGE_BYTES as u64).unwrap_or(u32::MAX).min(NotesPlace::HALF_BYTES_MAX)
    }
}

fn invalid(field: &'static str, value: u64) -> SuperblockError {
    SuperblockError::Field { field, value }
}

pub(super) fn protection_codes(protection: Option<PiFormat>) -> (u64, u64, u64) {
    let Some(format) = protection else { return (0, 0, 0) };
    let guard = match format.guard() {
        GuardKind::Crc16 => 1,
        GuardKind::Crc32c => 2,
        GuardKind::Crc64 => 3,
        GuardKind::IpChecksum => 4,
    };
    let protection = match format.protection() {
        ProtectionType::Type1 => 1,
        ProtectionType::Type2 => 2,
        ProtectionType::Type3 => 3,
    };
    (guard, protection, u64::from(format.storage_tag_bits()))
}

/// The layout follows from three fields, and for a volume that was resized also from its segments. The fields that
/// repeat parts of it must agree.
fn decode_layout(bytes: &[u8]) -> Result<Layout, SuperblockError> {
    let block_bytes = get::<4>(bytes, AT_BLOCK_BYTES);
    let block_size = BlockSize::from_bytes(block_bytes).ok_or(invalid("block size", block_bytes))?;
    let (sector_bytes, capacity_blocks) = (get::<4>(bytes, AT_SECTOR_BYTES) as u32, get::<8>(bytes, AT_CAPACITY));
    let layout = match get::<4>(bytes, AT_FEATURES) & FEATURE_RESIZED {
        0 => Layout::new(block_size, sector_bytes, capacity_blocks)?,
        _ => {
            let listed: [u64; MAX_SEGMENTS] = std::array::from_fn(|number| get::<8>(bytes, AT_SEGMENTS + number * 8));
            let count = listed.iter().position(|blocks| *blocks == 0).unwrap_or(MAX_SEGMENTS);
            if let Some(stray) = listed[count..].iter().find(|blocks| **blocks != 0) {
                return Err(invalid("list of segments", *stray));
            }
            let created = get::<8>(bytes, AT_CREATED);
            Layout::resized(block_size, sector_bytes, created, &listed[..count], capacity_blocks)?
        }
    };
    for (field, at, due) in [
        ("log size", AT_LOG_SECTORS, layout.log_sectors()),
        ("block group size", AT_GROUP_BLOCKS, layout.group_blocks()),
        ("block groups' offset", AT_GROUPS_OFFSET, layout.groups_offset()),
        ("block group stride", AT_GROUP_STRIDE, layout.group_stride()),
    ] {
        let value = get::<8>(bytes, at);
        if value != due {
            return Err(invalid(field, value));
        }
    }
    Ok(layout)
}

pub(super) fn decode_protection(bytes: &[u8]) -> Result<Option<PiFormat>, SuperblockError> {
    let guard = match get::<1>(bytes, AT_GUARD) {
        0 => return Ok(None),
        1 => GuardKind::Crc16,
        2 => GuardKind::Crc32c,
        3 => GuardKind::Crc64,
        4 => GuardKind::IpChecksum,
        value => return Err(invalid("guard", value)),
    };
    let protection = match get::<1>(bytes, AT_TYPE) {
        1 => ProtectionType::Type1,
        2 => ProtectionType::Type2,
        3 => ProtectionType::Type3,
        value => return Err(invalid("protection type", value)),
    };
    let storage_tag = get::<1>(bytes, AT_STORAGE_TAG);
    PiFormat::new(guard, protection, storage_tag as u8).map(Some).map_err(|_| invalid("storage tag size", storage_tag))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn superblock(write_seq: u64) -> Superblock {
        let layout = Layout::new(BlockSize::B4096, 512, 1000).unwrap();
        let protection = PiFormat::with_default_storage_tag(GuardKind::Crc64, ProtectionType::Type1);
        let new = Superblock::new([7; 16], layout, Some(protection));
        Superblock {
            write_seq,
            keeps_space: true,
            areas_were_zeroed: true,
            log_tail: 12,
            initialized_groups: 1,
            labels_written: 7,
            ..new
        }
    }

    /// `bytes` with `value` at `at` and a matching checksum.
    fn forged<const N: usize>(at: usize, value: u64) -> [u8; 512] {
        let mut bytes = superblock(1).encode();
        put::<N>(&mut bytes, at, value);
        let checksum = crc32c(&bytes[..AT_CHECKSUM]);
        put::<4>(&mut bytes, AT_CHECKSUM, u64::from(checksum));
        bytes
    }

    #[test]
    fn a_superblock_comes_back() {
        let old = superblock(1);
        assert_eq!(Superblock::decode(&old.encode()), Ok(old));
        let spoilt = Superblock { uncorrectable: true, ..old };
        assert_eq!((Superblock::decode(&spoilt.encode()), spoilt.encode()[AT_FEATURES]), (Ok(spoilt), 1));
        let in_use = Superblock { is_clean: false, is_anchored: true, is_begun: true, ..old };
        assert_eq!((Superblock::decode(&in_use.encode()), in_use.encode()[AT_MARKS]), (Ok(in_use), 7));
        let put_back = Superblock { is_put_back: true, ..old };
        assert_eq!((Superblock::decode(&put_back.encode()), put_back.encode()[AT_MARKS]), (Ok(put_back), 10));
        let without_anchor = Superblock { is_anchored: false, ..in_use };
        assert!(
            !Superblock::decode(&without_anchor.encode()).unwrap().is_begun,
            "it says something of the anchor only"
        );
    }

    #[test]
    fn why_changes_may_be_lost_comes_back_and_an_unknown_reason_is_one() {
        for why in WhyLost::ALL.into_iter().map(Some).chain([None]) {
            let superblock = Superblock { unreported_loss: why, ..superblock(1) };
            assert_eq!(Superblock::decode(&superblock.encode()), Ok(superblock));
        }
        let unknown = Superblock::decode(&forged::<1>(AT_UNREPORTED_LOSS, 99)).unwrap();
        assert_eq!(unknown.unreported_loss, Some(WhyLost::Other));
        assert_eq!(superblock(1).encode()[AT_UNREPORTED_LOSS], 0);
    }

    #[test]
    fn traces_are_distinguished_from_other_formats() {
        let good = superblock(1).encode();
        let (mut near, mut far, mut shapeless) = (good, good, [0; SUPERBLOCK_BYTES]);
        near[1..4].fill(b'X');
        near[AT_LOG_SECTORS] ^= 1;
        far[..8].fill(0);
        shapeless[..5].copy_from_slice(&MAGIC[..5]);
        for trace in [good, near, far, shapeless] {
            assert!(Superblock::is_trace(&trace));
        }
        far[AT_GROUP_STRIDE] ^= 1;
        let mut picture = [0; SUPERBLOCK_BYTES];
        picture[..8].copy_from_slice(b"\x89PNG\r\n\x1a\n");
        for other in [far, picture, [0; SUPERBLOCK_BYTES], [0xff; SUPERBLOCK_BYTES]] {
            assert!(!Superblock::is_trace(&other));
        }
        assert!(!Superblock::is_trace(&good[..511]));
    }

    #[test]
    fn any_flipped_bit_is_refused() {
        let good = superblock(1).encode();
        for bit in 0..SUPERBLOCK_BYTES * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            let why = Superblock::decode(&bad).unwrap_err();
            assert!(matches!(why, SuperblockError::Magic | SuperblockError::Checksum), "bit {bit}: {why}");
        }
    }

    #[test]
    fn versions_features_and_impossible_fields_are_refused_by_name() {
        assert_eq!(Superblock::decode(&forged::<4>(AT_VERSION, 1)), Err(SuperblockError::Version(1)));
        for features in [4, 5] {
            assert_eq!(Superblock::decode(&forged::<4>(AT_FEATURES, features)), Err(SuperblockError::Features(4)));
        }
        for (at, field) in [
            (AT_GUARD, "guard"),
            (AT_TYPE, "protection type"),
            (AT_STORAGE_TAG, "storage tag size"),
            (AT_CLEAN, "clean mark"),
            (AT_KEEPS_SPACE, "space mark"),
            (AT_LOG_SECTORS, "log size"),
            (AT_GROUP_STRIDE, "block group stride"),
            (AT_INITIALIZED_GROUPS, "number of initialized block groups"),
        ] {
            let why = Superblock::decode(&forged::<1>(at, 0xee)).unwrap_err();
            assert!(matches!(why, SuperblockError::Field { field: f, .. } if f == field), "{field}: {why}");
        }
        for (at, field) in [(AT_WRITE_SEQ, "write sequence number"), (AT_LOG_TAIL, "log tail")] {
            assert!(Superblock::decode(&forged::<8>(at, MAX_COUNT)).is_ok(), "{field}");
            let why = Superblock::decode(&forged::<8>(at, MAX_COUNT + 1)).unwrap_err();
            assert!(matches!(why, SuperblockError::Field { field: f, .. } if f == field), "{field}: {why}");
        }
        assert!(matches!(Superblock::decode(&forged::<8>(AT_CAPACITY, 0)), Err(SuperblockError::Layout(_))));
    }

    fn resized() -> Superblock {
        let layout = superblock(1).layout.with_capacity(1700).unwrap();
        Superblock { layout: layout.with_capacity(1500).unwrap(), ..superblock(1) }
    }

    #[test]
    fn a_resized_volume_lists_its_segments_and_a_new_one_nothing() {
        assert!(superblock(1).encode()[AT_CREATED..AT_LABELS].iter().all(|byte| *byte == 0));
        let old = resized();
        let bytes = old.encode();
        assert_eq!((bytes[AT_FEATURES], get::<8>(&bytes, AT_CREATED)), (2, 1000));
        assert_eq!([0, 8, 16].map(|at| get::<8>(&bytes, AT_SEGMENTS + at)), [1000, 700, 0]);
        assert_eq!(Superblock::decode(&bytes), Ok(old));
        assert!(Superblock::is_trace_at(&bytes, old.layout.third_offset()));
        assert!(!Superblock::is_trace_at(&bytes, superblock(1).layout.third_offset()));
    }

    #[test]
    fn segments_that_cannot_be_are_refused() {
        let forge = |segments: &[u64], created: u64, capacity: u64| {
            let mut bytes = resized().encode();
            bytes[AT_SEGMENTS..AT_CHECKSUM].fill(0);
            segments.iter().enumerate().for_each(|(at, blocks)| put::<8>(&mut bytes, AT_SEGMENTS + at * 8, *blocks));
            put::<8>(&mut bytes, AT_CREATED, created);
            put::<8>(&mut bytes, AT_CAPACITY, capacity);
            let checksum = crc32c(&bytes[..AT_CHECKSUM]);
            put::<4>(&mut bytes, AT_CHECKSUM, u64::from(checksum));
            Superblock::decode(&bytes)
        };
        assert!(forge(&[1000, 700], 1000, 1500).is_ok());
        for (segments, created, capacity) in [
            (&[][..], 1000, 1500),
            (&[1000, 499], 1000, 1500),
            (&[1000, 500, 9], 1000, 1500),
            (&[1000, 700], 1000, 1000),
            (&[1000, u64::MAX], 1000, 1500),
            (&[1000, (1 << 40) - 999], 1000, 1500),
            (&[1000, 0, 700], 1000, 1500),
            (&[0, 1000, 700], 1000, 1500),
            (&[1000, 700], 0, 1500),
            (&[1000, 700], (1 << 40) + 1, 1500),
            (&[1000, 700], 1 << 30, 1500),
            (&[900, 700], 1000, 1500),
        ] {
            let why = forge(segments, created, capacity).unwrap_err();
            assert!(matches!(why, SuperblockError::Layout(_) | SuperblockError::Field { .. }), "{segments:?}: {why}");
        }
    }

    #[test]
    fn any_list_of_segments_is_refused_or_means_what_writing_it_again_means() {
        let (mut state, mut taken) = (0x9e37_79b9_7f4a_7c15_u64, 0);
        let mut draw = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            state >> 11
        };
        for _ in 0..20_000 {
            let created = 1 + draw() % 3000;
            let mut superblock =
                Superblock { layout: Layout::new(BlockSize::B4096, 512, created).unwrap(), ..resized() };
            for _ in 0..draw() % 6 {
                let capacity = 1 + draw() % (1 << (draw() % 22));
                superblock.layout = superblock.layout.with_capacity(capacity).unwrap_or(superblock.layout);
            }
            superblock.initialized_groups = 0;
            let mut bytes = superblock.encode();
            assert_eq!(Superblock::decode(&bytes), Ok(superblock));
            for _ in 0..1 + draw() % 3 {
                let at =
                    [AT_CREATED, AT_CAPACITY, AT_SEGMENTS, AT_SEGMENTS + 8, AT_SEGMENTS + 120][draw() as usize % 5];
                let value = draw() >> (draw() % 53);
                put::<8>(&mut bytes, at, value);
            }
            let checksum = crc32c(&bytes[..AT_CHECKSUM]);
            put::<4>(&mut bytes, AT_CHECKSUM, u64::from(checksum));
            let Ok(found) = Superblock::decode(&bytes) else { continue };
            taken += 1;
            assert_eq!(Superblock::decode(&found.encode()), Ok(found));
            let layout = found.layout;
            let (last, groups) = (sealblock_units::Lba::new(layout.capacity_blocks() - 1), layout.block_groups());
            assert_eq!(layout.group_of(last), groups - 1);
            assert_eq!(layout.block_group(groups - 1).unwrap().end_offset, layout.tail_offset());
            assert!(layout.page_offsets(layout.page_of(last).0).is_some() && layout.block_group(groups).is_none());
        }
        assert!(taken > 100, "{taken} were taken");
    }

    #[test]
    fn short_and_foreign_bytes_are_refused() {
        assert_eq!(Superblock::decode(&[]), Err(SuperblockError::Magic));
        assert_eq!(Superblock::decode(&superblock(1).encode()[..100]), Err(SuperblockError::Truncated));
    }
}
