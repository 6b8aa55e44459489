//! Devices, device extents, and the state of long operations: balance, replacement, quota.
//!
//! Most of these are structures of a fixed size. Structures that newer kernels may have extended keep the bytes after
//! the known part.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::error::{DecodeError, head};
use crate::key::DiskKey;

/// A device, 98 bytes: in the chunk tree, and in the device's own superblock.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DevItem {
    /// Its number, from 1.
    pub devid: U64,
    /// Its bytes.
    pub total_bytes: U64,
    /// Bytes of its device extents.
    pub bytes_used: U64,
    /// A hint.
    pub io_align: U32,
    /// A hint.
    pub io_width: U32,
    /// The smallest write.
    pub sector_size: U32,
    /// 0.
    pub flags: U64,
    /// 0.
    pub generation: U64,
    /// 0.
    pub start_offset: U64,
    /// 0.
    pub dev_group: U32,
    /// 0.
    pub seek_speed: u8,
    /// 0.
    pub bandwidth: u8,
    /// Its UUID.
    pub uuid: [u8; 16],
    /// That of the filesystem.
    pub fsid: [u8; 16],
}

/// The owner of a range of a device, 48 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DevExtent {
    /// 3.
    pub chunk_tree: U64,
    /// 256.
    pub chunk_objectid: U64,
    /// The logical address of the chunk.
    pub chunk_offset: U64,
    /// Bytes on the device.
    pub length: U64,
    /// That of the chunk tree.
    pub chunk_tree_uuid: [u8; 16],
}

/// The progress of the replacement of a device, 72 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DevReplaceItem {
    /// The device that is replaced.
    pub src_devid: U64,
    /// Everything before this has been copied.
    pub cursor_left: U64,
    /// Nothing after this has been copied.
    pub cursor_right: U64,
    /// Whether the replaced device is read although there are other copies.
    pub cont_reading_from_srcdev_mode: U64,
    /// 0 never started, 1 started, 2 finished, 3 cancelled, 4 suspended.
    pub replace_state: U64,
    /// In seconds since 1970.
    pub time_started: U64,
    /// In seconds since 1970.
    pub time_stopped: U64,
    /// Errors.
    pub num_write_errors: U64,
    /// Errors.
    pub num_uncorrectable_read_errors: U64,
}

/// What a balance does with one type of block group, 136 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct BalanceArgs {
    /// Profiles.
    pub profiles: U64,
    /// A percentage, or two of 32 bits.
    pub usage: U64,
    /// A device.
    pub devid: U64,
    /// From this address of a device on.
    pub pstart: U64,
    /// Up to this address.
    pub pend: U64,
    /// From this logical address on.
    pub vstart: U64,
    /// Up to this address.
    pub vend: U64,
    /// The profile to convert to.
    pub target: U64,
    /// Which of the other fields are valid.
    pub flags: U64,
    /// Chunks at most, or two limits of 32 bits.
    pub limit: U64,
    /// Stripes at least.
    pub stripes_min: U32,
    /// Stripes at most.
    pub stripes_max: U32,
    /// Kept as they are.
    pub unused: [U64; 6],
}

/// A balance that was interrupted, 448 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct BalanceItem {
    /// Which of the three are valid.
    pub flags: U64,
    /// For data.
    pub data: BalanceArgs,
    /// For metadata.
    pub metadata: BalanceArgs,
    /// For the chunk tree.
    pub system: BalanceArgs,
    /// Kept as they are.
    pub unused: [U64; 4],
}

/// The state of quota, 32 bytes, and 8 more with simple quotas.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QgroupStatus<'a> {
    /// The fixed part.
    pub head: &'a QgroupStatusHead,
    /// The transaction since which simple quotas count; absent in older items.
    pub enable_generation: Option<U64>,
}

/// The fixed part of the quota state.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct QgroupStatusHead {
    /// 1.
    pub version: U64,
    /// The transaction that wrote it; the numbers of an older one are out of date.
    pub generation: U64,
    /// Bit 0 on, bit 1 a rescan runs, bit 2 inconsistent, bit 3 simple.
    pub flags: U64,
    /// How far the rescan has come.
    pub rescan: U64,
}

impl<'a> QgroupStatus<'a> {
    const WHAT: &'static str = "quota status";

    /// Reads the item.
    ///
    /// # Errors
    /// If it has neither 32 nor 40 bytes.
    pub fn decode(bytes: &'a [u8]) -> Result<QgroupStatus<'a>, DecodeError> {
        let (head, rest) = head::<QgroupStatusHead>(Self::WHAT, bytes, 0)?;
        let enable_generation = match rest.len() {
            0 => None,
            _ => Some(U64::read_from_bytes(rest).map_err(|_| DecodeError::Size {
                what: Self::WHAT,
                expected: size_of::<QgroupStatusHead>() + size_of::<U64>(),
                found: bytes.len(),
            })?),
        };
        Ok(QgroupStatus { head, enable_generation })
    }

    /// Appends its bytes.
    pub fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self.head.as_bytes());
        out.extend_from_slice(self.enable_generation.as_ref().map_or(&[], |generation| generation.as_bytes()));
    }
}

/// What a quota group uses, 40 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct QgroupInfo {
    /// The transaction that wrote it.
    pub generation: U64,
    /// Bytes that it refers to.
    pub referenced: U64,
    /// The same, compressed.
    pub referenced_compressed: U64,
    /// Bytes that no other group refers to.
    pub exclusive: U64,
    /// The same, compressed.
    pub exclusive_compressed: U64,
}

/// What a quota group may use, 40 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct QgroupLimit {
    /// Which of the other fields are valid.
    pub flags: U64,
    /// Bytes that it may refer to.
    pub max_referenced: U64,
    /// Bytes that only it may refer to.
    pub max_exclusive: U64,
    /// Reserved bytes.
    pub reserved_referenced: U64,
    /// Reserved bytes.
    pub reserved_exclusive: U64,
}

/// The header of a space cache of version 1, 41 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct FreeSpaceHeader {
    /// The key of the cache's inode.
    pub location: DiskKey,
    /// The transaction that wrote it.
    pub generation: U64,
    /// Entries.
    pub num_entries: U64,
    /// Entries that are bitmaps.
    pub num_bitmaps: U64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_format() {
        assert_eq!((size_of::<DevItem>(), size_of::<DevExtent>(), size_of::<DevReplaceItem>()), (98, 48, 72));
        assert_eq!((size_of::<BalanceArgs>(), size_of::<BalanceItem>()), (136, 448));
        assert_eq!((size_of::<QgroupInfo>(), size_of::<QgroupLimit>(), size_of::<FreeSpaceHeader>()), (40, 40, 41));
    }

    #[test]
    fn a_quota_status_has_one_of_two_sizes() {
        let bytes: Vec<u8> = (0..48).collect();
        for length in 0..=48 {
            let status = QgroupStatus::decode(&bytes[..length]);
            assert_eq!(status.is_ok(), length == 32 || length == 40, "{length}");
            if let Ok(status) = status {
                let mut again = Vec::new();
                status.write(&mut again);
                assert_eq!(again, bytes[..length]);
            }
        }
    }
}
