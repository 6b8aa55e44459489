//! The record that this project's engine keeps in the superblock's padding, which other programs keep and do not read:
//! which devices took part in the transaction, and how old their superblocks were before it.
//!
//! ```text
//! 0 magic | 8 CRC-32C of all behind it | 12 version | 14 count | 16 generation | 24 oldest | 32 reserved | 288 devices
//! ```
//!
//! A superblock with a record says: all nodes and data of transaction `generation` were durable on each of these devices
//! before the superblock was written to any of them, and the superblocks that they had then were of transaction `oldest` or
//! later. So a device whose own superblock is not older than that missed only superblocks, in power cuts. Without the record
//! it would count as a device that missed transactions, and data on it that have no checksums could not be read. A device
//! that comes back with an older superblock is one that was replaced by an old copy, or was away.
//!
//! The record is void if its generation is not that of its superblock: another program wrote a transaction and kept the
//! bytes.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::checksum::ChecksumType;
use crate::superblock::Superblock;

/// The offset of the record in the superblock.
pub const RECORD_OFFSET: usize = 0xE00;
/// Devices of which a record can tell; of a filesystem with more, it tells of none.
pub const MAX_DEVICES: usize = 28;
const MAGIC: [u8; 8] = *b"sealbtrf";
const VERSION: u16 = 1;

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Stored {
    magic: [u8; 8],
    crc: U32,
    version: U16,
    count: U16,
    generation: U64,
    oldest: U64,
    reserved: [u8; 256],
    devices: [[u8; 8]; MAX_DEVICES],
}

const _: () = assert!(size_of::<Stored>() == 512 && RECORD_OFFSET + 512 == size_of::<Superblock>());

/// What a superblock's record says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CommitRecord {
    /// The oldest superblock that one of the devices had before that of the transaction was written.
    pub oldest: u64,
    /// The first halves of the UUIDs of the devices that took part.
    devices: Vec<[u8; 8]>,
}

impl CommitRecord {
    /// The record of a transaction in which these devices took part, by their UUIDs.
    pub fn new(oldest: u64, devices: impl IntoIterator<Item = [u8; 16]>) -> CommitRecord {
        let mut devices: Vec<[u8; 8]> = devices.into_iter().map(half).collect();
        if devices.len() > MAX_DEVICES {
            devices.clear();
        }
        CommitRecord { oldest, devices }
    }

    /// The record of a superblock; `None` if it has none, or another program wrote the superblock.
    pub fn read(superblock: &Superblock) -> Option<CommitRecord> {
        let stored = Stored::ref_from_bytes(&superblock.as_bytes()[RECORD_OFFSET..]).ok()?;
        let count = usize::from(stored.count.get());
        let is_whole = stored.magic == MAGIC
            && stored.crc.get() == crc(stored)
            && stored.version == VERSION
            && stored.generation == superblock.generation
            && count <= MAX_DEVICES;
        let devices = || stored.devices[..count].to_vec();
        is_whole.then(|| CommitRecord { oldest: stored.oldest.get(), devices: devices() })
    }

    /// Puts the record into the superblock of its transaction, which has its generation already.
    pub fn write(&self, superblock: &mut Superblock) {
        let mut stored = Stored {
            magic: MAGIC,
            version: VERSION.into(),
            count: (self.devices.len() as u16).into(),
            generation: superblock.generation,
            oldest: self.oldest.into(),
            ..Stored::new_zeroed()
        };
        stored.devices[..self.devices.len()].copy_from_slice(&self.devices);
        stored.crc = crc(&stored).into();
        superblock.as_mut_bytes()[RECORD_OFFSET..].copy_from_slice(stored.as_bytes());
    }

    /// True if a device with this UUID took part in the transaction, and its own superblock, of `generation`, is one that it
    /// had then.
    pub fn missed_only_superblocks(&self, uuid: [u8; 16], generation: u64) -> bool {
        generation >= self.oldest && self.devices.contains(&half(uuid))
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

    #[test]
    fn a_record_comes_back_and_is_void_once_another_program_writes() {
        let mut superblock = Superblock::read_from_bytes(&captured::superblock()).unwrap();
        assert_eq!(CommitRecord::read(&superblock), None);
        let record = CommitRecord::new(6, [[1; 16], [2; 16]]);
        record.write(&mut superblock);
        assert_eq!(CommitRecord::read(&superblock), Some(record.clone()));
        assert!(record.missed_only_superblocks([2; 16], 6));
        assert!(!record.missed_only_superblocks([2; 16], 5) && !record.missed_only_superblocks([3; 16], 6));
        superblock.generation = (superblock.generation.get() + 1).into();
        assert_eq!(CommitRecord::read(&superblock), None);
    }

    #[test]
    fn every_changed_byte_makes_it_void_and_too_many_devices_are_none() {
        let mut superblock = Superblock::read_from_bytes(&captured::superblock()).unwrap();
        CommitRecord::new(6, (0..28).map(|number| [number; 16])).write(&mut superblock);
        let good = CommitRecord::read(&superblock).unwrap();
        assert!((0..28).all(|number| good.missed_only_superblocks([number; 16], 6)));
        for at in RECORD_OFFSET..RECORD_OFFSET + 512 {
            let mut damaged = superblock;
            damaged.as_mut_bytes()[at] ^= 1;
            assert_eq!(CommitRecord::read(&damaged), None, "{at}");
        }
        let many = CommitRecord::new(6, (0..29).map(|number| [number; 16]));
        assert!(!many.missed_only_superblocks([1; 16], 6));
    }
}
