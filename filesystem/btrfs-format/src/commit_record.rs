//! The record that this project's engine keeps in the superblock's padding, which other programs keep and do not read:
//! which devices took part in the transaction, how old their superblocks were before it, and which transactions the engine
//! has written.
//!
//! ```text
//! 0 magic | 8 CRC-32C of all behind it | 12 version | 14 count | 16 generation | 24 oldest | 32 tagged | 36 replacement |
//! 40 flags | 44 reserved | 48 windows | 288 devices
//! ```
//!
//! A superblock with a record says: all nodes and data of transaction `generation` were durable on each of these devices
//! before the superblock was written to any of them, and the superblocks that they had then were of transaction `oldest` or
//! later. So a device whose own superblock is not older than that missed only superblocks, in power cuts. Without the record
//! it would count as a device that missed transactions, and data on it that have no checksums could not be read. A device
//! that comes back with an older superblock is one that was replaced by an old copy, or was away. All of this holds only if
//! the record's generation is that of its superblock ([`CommitRecord::is_of`]): otherwise another program wrote a transaction
//! and kept the bytes.
//!
//! What it says of the past stays true then: data without checksums that the engine wrote in one of its [`OwnWindows`] have
//! the tag of their transaction on each device that is marked as tagged.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::checksum::ChecksumType;
use crate::own_windows::{MAX_WINDOWS, OwnWindows};
use crate::superblock::Superblock;

/// The offset of the record in the superblock.
pub const RECORD_OFFSET: usize = 0xE00;
/// Devices of which a record can tell; of a filesystem with more, it tells of none.
pub const MAX_DEVICES: usize = 28;
/// A flag: the engine makes the guards of data.
const HOST_SEALED: u32 = 1;
const MAGIC: [u8; 8] = *b"sealbtrf";
const VERSION: u16 = 2;
/// That of records without windows and tags, whose fields are zero.
const VERSION_WITHOUT_WINDOWS: u16 = 1;

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Stored {
    magic: [u8; 8],
    crc: U32,
    version: U16,
    count: U16,
    generation: U64,
    oldest: U64,
    tagged: U32,
    replacement: U32,
    flags: U32,
    reserved: [u8; 4],
    windows: [[U64; 2]; MAX_WINDOWS],
    devices: [[u8; 8]; MAX_DEVICES],
}

const _: () = assert!(size_of::<Stored>() == 512 && RECORD_OFFSET + 512 == size_of::<Superblock>());

/// What a superblock's record says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CommitRecord {
    /// The transaction of which it was written.
    pub generation: u64,
    /// The oldest superblock that one of the devices had before that of the transaction was written.
    pub oldest: u64,
    /// The transactions that the engine has written, of which this is the last. Empty in old records.
    pub windows: OwnWindows,
    /// What identifies the last replacement of a device by another program.
    pub replacement: u32,
    /// True if the engine makes the guards of data with tags, instead of the devices, and whoever reads them checks them.
    pub is_host_sealed: bool,
    /// The first halves of the UUIDs of the devices that took part, and whether data on them have tags.
    devices: Vec<([u8; 8], bool)>,
}

impl CommitRecord {
    /// The record of a transaction in which these devices took part, by their UUIDs, and with whether their data have
    /// tags.
    pub fn new(generation: u64, oldest: u64, devices: impl IntoIterator<Item = ([u8; 16], bool)>) -> CommitRecord {
        let mut devices: Vec<_> = devices.into_iter().map(|(uuid, is_tagged)| (half(uuid), is_tagged)).collect();
        if devices.len() > MAX_DEVICES {
            devices.clear();
        }
        CommitRecord {
            generation,
            oldest,
            windows: OwnWindows::default(),
            replacement: 0,
            is_host_sealed: false,
            devices,
        }
    }

    /// The record of a superblock, or of one before that; `None` if it has none.
    pub fn read(superblock: &Superblock) -> Option<CommitRecord> {
        let stored = Stored::ref_from_bytes(&superblock.as_bytes()[RECORD_OFFSET..]).ok()?;
        let count = usize::from(stored.count.get());
        let is_whole = stored.magic == MAGIC
            && stored.crc.get() == crc(stored)
            && matches!(stored.version.get(), VERSION | VERSION_WITHOUT_WINDOWS)
            && stored.flags.get() & !HOST_SEALED == 0
            && stored.generation.get() <= superblock.generation.get()
            && count <= MAX_DEVICES;
        if !is_whole {
            return None;
        }
        let windows = stored.windows.iter().map(|[first, last]| (first.get(), last.get()));
        let windows = OwnWindows::stored(windows.take_while(|window| *window != (0, 0)))?;
        let generation = stored.generation.get();
        if windows.last().is_some_and(|last| last != generation) {
            return None;
        }
        let is_tagged = |index: usize| stored.tagged.get() >> index & 1 != 0;
        let devices = stored.devices[..count].iter().enumerate().map(|(index, half)| (*half, is_tagged(index)));
        let (oldest, replacement) = (stored.oldest.get(), stored.replacement.get());
        let is_host_sealed = stored.flags.get() & HOST_SEALED != 0;
        Some(CommitRecord { generation, oldest, windows, replacement, is_host_sealed, devices: devices.collect() })
    }

    /// Puts the record into the superblock of its transaction.
    pub fn write(&self, superblock: &mut Superblock) {
        let mut stored = Stored {
            magic: MAGIC,
            version: VERSION.into(),
            count: (self.devices.len() as u16).into(),
            generation: self.generation.into(),
            oldest: self.oldest.into(),
            replacement: self.replacement.into(),
            flags: if self.is_host_sealed { HOST_SEALED } else { 0 }.into(),
            ..Stored::new_zeroed()
        };
        for (place, (first, last)) in stored.windows.iter_mut().zip(self.windows.iter()) {
            *place = [first.into(), last.into()];
        }
        for (index, (half, is_tagged)) in self.devices.iter().enumerate() {
            stored.devices[index] = *half;
            stored.tagged = (stored.tagged.get() | u32::from(*is_tagged) << index).into();
        }
        stored.crc = crc(&stored).into();
        superblock.as_mut_bytes()[RECORD_OFFSET..].copy_from_slice(stored.as_bytes());
    }

    /// True if it is of this superblock's transaction: no other program has written since.
    pub fn is_of(&self, superblock: &Superblock) -> bool {
        self.generation == superblock.generation.get()
    }

    /// True if a device with this UUID took part in the transaction, and its own superblock, of `generation`, is one that it
    /// had then.
    pub fn missed_only_superblocks(&self, uuid: [u8; 16], generation: u64) -> bool {
        generation >= self.oldest && self.devices.iter().any(|(one, _)| *one == half(uuid))
    }

    /// True if data that the engine wrote to a device with this UUID have tags.
    pub fn is_tagged(&self, uuid: [u8; 16]) -> bool {
        self.devices.contains(&(half(uuid), true))
    }
}

fn half(uuid: [u8; 16]) -> [u8; 8] {
    let [a, b, c, d, e, f, g, h, ..] = uuid;
    [a, b, c, d, e, f, g, h]
}

fn crc(stored: &Stored) -> u32 {
    let sum = ChecksumType::Crc32c.compute(&stored.as_bytes()[12..]);
    sum.as_bytes().try_into().map_or(0, u32::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::captured;

    fn captured_superblock() -> Superblock {
        Superblock::read_from_bytes(&captured::superblock()).unwrap()
    }

    #[test]
    fn a_record_comes_back_and_is_of_the_past_once_another_program_writes() {
        let mut superblock = captured_superblock();
        assert_eq!(CommitRecord::read(&superblock), None);
        let generation = superblock.generation.get();
        let windows = OwnWindows::default().with(1, true, 2).with(3, true, generation);
        let record = CommitRecord::new(generation, 6, [([1; 16], true), ([2; 16], false)]);
        let record = CommitRecord { windows, replacement: 77, is_host_sealed: true, ..record };
        record.write(&mut superblock);
        assert_eq!(CommitRecord::read(&superblock), Some(record.clone()));
        assert!(record.is_of(&superblock) && record.missed_only_superblocks([2; 16], 6));
        assert!(!record.missed_only_superblocks([2; 16], 5) && !record.missed_only_superblocks([3; 16], 6));
        assert!(record.is_tagged([1; 16]) && !record.is_tagged([2; 16]) && !record.is_tagged([3; 16]));
        superblock.generation = (generation + 1).into();
        assert_eq!(CommitRecord::read(&superblock), Some(record.clone()));
        assert!(!record.is_of(&superblock));
        // A superblock is never older than its record.
        superblock.generation = (generation - 1).into();
        assert_eq!(CommitRecord::read(&superblock), None);
    }

    #[test]
    fn every_changed_byte_makes_it_void_and_too_many_devices_are_none() {
        let mut superblock = captured_superblock();
        let generation = superblock.generation.get();
        let record = CommitRecord::new(generation, 6, (0..28).map(|number| ([number; 16], number % 2 == 0)));
        CommitRecord { windows: OwnWindows::default().with(1, true, generation), ..record }.write(&mut superblock);
        let good = CommitRecord::read(&superblock).unwrap();
        assert!((0..28).all(|number| good.missed_only_superblocks([number; 16], 6)));
        assert!((0..28).all(|number| good.is_tagged([number; 16]) == (number % 2 == 0)));
        for at in RECORD_OFFSET..RECORD_OFFSET + 512 {
            let mut damaged = superblock;
            damaged.as_mut_bytes()[at] ^= 1;
            assert_eq!(CommitRecord::read(&damaged), None, "{at}");
        }
        let many = CommitRecord::new(generation, 6, (0..29).map(|number| ([number; 16], true)));
        assert!(!many.missed_only_superblocks([1; 16], 6) && !many.is_tagged([1; 16]));
    }

    #[test]
    fn old_records_have_no_windows_and_contradictions_are_void() {
        let mut superblock = captured_superblock();
        let generation = superblock.generation.get();
        let record = CommitRecord::new(generation, 6, [([1; 16], false)]);
        let with_version = |superblock: &mut Superblock, version: u16| {
            let bytes = &mut superblock.as_mut_bytes()[RECORD_OFFSET..];
            bytes[12..14].copy_from_slice(&version.to_le_bytes());
            let sum = ChecksumType::Crc32c.compute(&bytes[12..]);
            bytes[8..12].copy_from_slice(&sum.as_bytes()[..4]);
        };
        for (version, expected) in [(1, true), (2, true), (0, false), (3, false)] {
            record.write(&mut superblock);
            with_version(&mut superblock, version);
            assert_eq!(CommitRecord::read(&superblock), expected.then(|| record.clone()), "{version}");
        }
        record.write(&mut superblock);
        superblock.as_mut_bytes()[RECORD_OFFSET + 40] = 2;
        with_version(&mut superblock, 2);
        assert_eq!(CommitRecord::read(&superblock), None, "an unknown flag");
        let windows = OwnWindows::default().with(1, true, generation - 1);
        CommitRecord { windows, ..record }.write(&mut superblock);
        assert_eq!(CommitRecord::read(&superblock), None, "it is not in its own last window");
    }
}
