//! What is left of formats whose first superblock or header is lost: the backups that they keep elsewhere on the device.
//!
//! A backup counts only if it says itself that it belongs where it lies, so that an image in the middle of other data is none. Places are those
//! that the formats document or that their tools choose by default; one that only the lost superblock knows is not found.

use std::ops::Range;

use crate::path::seen::Seen;

const GIB: u64 = 1 << 30;
/// Where Btrfs has further superblocks, and their fields: the own offset, and the magic number.
const BTRFS_AT: [u64; 2] = [64 << 20, 256 * GIB];
const BTRFS_BYTENR: u64 = 48;
const BTRFS_MAGIC: (u64, &[u8]) = (64, b"_BHRfS_M");
/// Block groups of ext2 to ext4 that have a superblock by default: the powers of 3, 5 and 7.
const EXT_GROUPS: [u16; 7] = [1, 3, 5, 7, 9, 25, 27];
/// The number of ext2 to ext4, where it is in a superblock, and the bytes of one.
pub(super) const EXT_MAGIC: [u8; 2] = [0x53, 0xef];
pub(super) const EXT_MAGIC_AT: usize = 56;
pub(super) const EXT_BYTES: usize = 1024;
/// Where LUKS2 may have its second header: behind a first one of any size that is allowed.
const LUKS_AT: [u64; 9] = [16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20];
const LUKS_HEADER_OFFSET: u64 = 256;
/// Where Ceph BlueStore has further labels.
const BLUESTORE_AT: [u64; 4] = [GIB, 10 * GIB, 100 * GIB, 1000 * GIB];
/// Allocation groups of XFS after the first one, each with a superblock, if there are four. Devices above 4 TiB have groups of 1 TiB.
const XFS_GROUPS: Range<u64> = 1..4;
const XFS_LARGEST_GROUP: u64 = 1 << 40;
/// A label of ZFS: two at the start and two at the end, at multiples of their size. Their second half is a ring of uberblocks.
const ZFS_LABEL_BYTES: u64 = 256 << 10;
const ZFS_RING_BYTES: u64 = 128 << 10;
const ZFS_UBERBLOCK_BYTES: usize = 1024;
/// The number of an uberblock, whichever way around its pool is.
pub(super) const ZFS: [[u8; 8]; 2] = [[0x0c, 0xb1, 0xba, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0xba, 0xb1, 0x0c]];

/// The format that may have a backup somewhere.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Format {
    Btrfs,
    Ext(ExtGroup),
    Luks,
    BlueStore,
    Xfs,
}

/// The block group of a backup, and the size of blocks as its superblock has it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct ExtGroup {
    group: u16,
    log_block_size: u32,
}

impl ExtGroup {
    fn block_bytes(self) -> u64 {
        1024 << self.log_block_size
    }

    /// Blocks in each group: as many as one block has bits.
    fn blocks(self) -> u64 {
        8 * self.block_bytes()
    }

    fn offset_bytes(self) -> u64 {
        (u64::from(self.group) * self.blocks() + self.first_block()) * self.block_bytes()
    }

    /// The block of the first superblock, which begins at byte 1024 whatever the size of blocks.
    fn first_block(self) -> u64 {
        u64::from(self.log_block_size == 0)
    }
}

/// Where backups lie that are no longer than a page.
fn superblocks(len_bytes: u64) -> impl Iterator<Item = (u64, Format)> {
    let btrfs = BTRFS_AT.map(|at| (at, Format::Btrfs));
    let luks = LUKS_AT.map(|at| (at, Format::Luks));
    let bluestore = BLUESTORE_AT.map(|at| (at, Format::BlueStore));
    let ext = (0..3).flat_map(|log_block_size| EXT_GROUPS.map(|group| ExtGroup { group, log_block_size }));
    let ext = ext.map(|group| (group.offset_bytes(), Format::Ext(group)));
    let xfs_group = (len_bytes / 4096).div_ceil(4) * 4096;
    let xfs = XFS_GROUPS.map(move |group| group * xfs_group).chain([XFS_LARGEST_GROUP]);
    let all = btrfs.into_iter().chain(ext).chain(luks).chain(bluestore).chain(xfs.map(|at| (at, Format::Xfs)));
    all.filter(move |(at, _)| *at > 0 && *at < len_bytes)
}

/// The uberblocks of the labels of ZFS after the first one, with which the signatures at the start begin.
fn zfs_rings(len_bytes: u64) -> impl Iterator<Item = Range<u64>> {
    let labels = len_bytes / ZFS_LABEL_BYTES;
    // A device that has no room for four labels has none.
    let numbers = if labels < 4 { Vec::new() } else { vec![1, labels - 2, labels - 1] };
    numbers.into_iter().map(|number| {
        let end = (number + 1) * ZFS_LABEL_BYTES;
        end - ZFS_RING_BYTES..end
    })
}

/// The bytes of a device of this length that [`find`] looks at.
pub(super) fn places(len_bytes: u64) -> impl Iterator<Item = Range<u64>> {
    superblocks(len_bytes).map(|(at, _)| at..at + 1).chain(zfs_rings(len_bytes))
}

/// The first backup of a device: its name, and where it lies.
pub(super) fn find(seen: &Seen) -> Option<(&'static str, u64)> {
    let superblock = superblocks(seen.len_bytes()).find_map(|(at, format)| Some((format.name(seen, at)?, at)));
    superblock.or_else(|| {
        let uberblock = zfs_rings(seen.len_bytes()).find_map(|ring| uberblock(seen, ring));
        uberblock.map(|at| ("a member of a ZFS pool", at))
    })
}

/// The first uberblock of a ring.
pub(super) fn uberblock(seen: &Seen, ring: Range<u64>) -> Option<u64> {
    let is_uberblock = |at: &u64| ZFS.iter().any(|magic| seen.has(*at, magic));
    ring.step_by(ZFS_UBERBLOCK_BYTES).find(is_uberblock)
}

impl Format {
    /// What the device was, if a backup lies there.
    fn name(self, seen: &Seen, at: u64) -> Option<&'static str> {
        match self {
            Format::Btrfs => {
                let is_backup =
                    seen.has(at + BTRFS_MAGIC.0, BTRFS_MAGIC.1) && seen.has(at + BTRFS_BYTENR, &at.to_le_bytes());
                is_backup.then_some("a Btrfs file system")
            }
            Format::Luks => {
                let is_backup =
                    seen.has(at, b"SKUL\xba\xbe\0\x02") && seen.has(at + LUKS_HEADER_OFFSET, &at.to_be_bytes());
                is_backup.then_some("a LUKS container")
            }
            Format::BlueStore => seen.has(at, b"bluestore block device").then_some("a Ceph BlueStore device"),
            Format::Xfs => is_xfs(seen, at).then_some("an XFS file system"),
            Format::Ext(group) => {
                let superblock = seen.bytes(at, EXT_BYTES)?;
                let word = |at| u32::from_le_bytes(*superblock[at..].first_chunk().expect("it lies in a superblock"));
                let is_backup = superblock[EXT_MAGIC_AT..].starts_with(&EXT_MAGIC)
                    && superblock[90..92] == group.group.to_le_bytes()
                    && word(24) == group.log_block_size
                    && u64::from(word(32)) == group.blocks()
                    && u64::from(word(20)) == group.first_block();
                is_backup.then(|| ext(superblock))
            }
        }
    }
}

/// Which of them it is, by a superblock: with extents it is ext4, with a journal ext3.
pub(super) fn ext(superblock: &[u8]) -> &'static str {
    const FEATURES_AT: usize = 0x5c;
    const HAS_JOURNAL: u32 = 0x4;
    const EXTENTS_64BIT_FLEX_BG: u32 = 0x40 | 0x80 | 0x200;
    let word =
        |at: usize| superblock.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |word| u32::from_le_bytes(*word));
    let (compatible, incompatible) = (word(FEATURES_AT), word(FEATURES_AT + 4));
    match () {
        () if incompatible & EXTENTS_64BIT_FLEX_BG != 0 => "an ext4 file system",
        () if compatible & HAS_JOURNAL != 0 => "an ext3 file system",
        () => "an ext2 file system",
    }
}

/// A superblock of XFS that begins an allocation group of the length that it has itself.
fn is_xfs(seen: &Seen, at: u64) -> bool {
    let word = |within: u64| Some(u64::from(u32::from_be_bytes(*seen.bytes(at + within, 4)?.first_chunk()?)));
    let group_bytes = word(4).zip(word(84)).map_or(0, |(block_bytes, blocks)| block_bytes * blocks);
    seen.has(at, b"XFSB") && group_bytes > 0 && at.is_multiple_of(group_bytes)
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    const LENGTH: u64 = 1 << 42;

    /// What is found on a device of this length that has these bytes, and zeroes elsewhere.
    fn found_on(len_bytes: u64, parts: &[(u64, Vec<u8>)]) -> Option<(&'static str, u64)> {
        let read = async |at: u64, length: u64| {
            let byte = |at: u64| parts.iter().find_map(|(start, part)| part.get(at.checked_sub(*start)? as usize));
            Some((at..at + length).map(|at| byte(at).copied().unwrap_or_default()).collect())
        };
        let seen = Seen::read((len_bytes, 512), places(len_bytes).collect(), read).now_or_never().unwrap();
        find(&seen)
    }

    fn found(parts: &[(u64, Vec<u8>)]) -> Option<(&'static str, u64)> {
        found_on(LENGTH, parts)
    }

    /// Bytes of a backup: parts of it at offsets in it.
    fn backup(parts: &[(usize, &[u8])]) -> Vec<u8> {
        let mut bytes = vec![0; 1024];
        for (at, part) in parts {
            bytes[*at..][..part.len()].copy_from_slice(part);
        }
        bytes
    }

    fn ext4(group: u16, log_block_size: u32) -> Vec<u8> {
        let (blocks, first) = (8192_u32 << log_block_size, u32::from(log_block_size == 0));
        backup(&[
            (20, &first.to_le_bytes()),
            (24, &log_block_size.to_le_bytes()),
            (32, &blocks.to_le_bytes()),
            (56, &EXT_MAGIC),
            (90, &group.to_le_bytes()),
            (0x60, &[0x40]),
        ])
    }

    fn btrfs(at: u64) -> Vec<u8> {
        backup(&[(48, &at.to_le_bytes()), (64, b"_BHRfS_M")])
    }

    fn luks(at: u64) -> Vec<u8> {
        backup(&[(0, b"SKUL\xba\xbe\0\x02"), (256, &at.to_be_bytes())])
    }

    fn xfs(group_bytes: u64) -> Vec<u8> {
        let blocks = ((group_bytes / 4096) as u32).to_be_bytes();
        backup(&[(0, b"XFSB"), (4, &4096_u32.to_be_bytes()), (84, &blocks)])
    }

    #[test]
    fn each_backup_is_found_at_its_place_and_an_image_of_it_elsewhere_is_none() {
        const MIB: u64 = 1 << 20;
        assert_eq!(found(&[]), None);
        for at in BTRFS_AT {
            assert_eq!(found(&[(at, btrfs(at))]), Some(("a Btrfs file system", at)));
            assert_eq!(found(&[(at, btrfs(64 << 10))]), None, "the first superblock of an image");
        }
        for at in LUKS_AT {
            assert_eq!(found(&[(at, luks(at))]), Some(("a LUKS container", at)));
            assert_eq!(found(&[(at, luks(at + 4096))]), None);
        }
        for (at, group, log) in [(8 * MIB + 1024, 1, 0), (32 * MIB, 1, 1), (128 * MIB, 1, 2), (3456 * MIB, 27, 2)] {
            assert_eq!(found(&[(at, ext4(group, log))]), Some(("an ext4 file system", at)));
            assert_eq!(found(&[(at, ext4(group + 1, log))]), None, "of another group");
            assert_eq!(found(&[(at, ext4(group, log + 1))]), None, "of other blocks");
        }
        assert_eq!(found(&[(128 * MIB, ext4(0, 2))]), None, "the first superblock of an image");
        for at in BLUESTORE_AT {
            let label = backup(&[(0, b"bluestore block device\n")]);
            assert_eq!(found(&[(at, label.clone())]), Some(("a Ceph BlueStore device", at)));
            assert_eq!(found(&[(at + 512, label)]), None);
        }
    }

    #[test]
    fn a_group_of_xfs_begins_at_a_multiple_of_its_length() {
        const GROUP: u64 = 512 << 20;
        for group in XFS_GROUPS {
            let at = group * GROUP;
            assert_eq!(found_on(4 * GROUP, &[(at, xfs(GROUP))]), Some(("an XFS file system", at)));
            assert_eq!(found_on(4 * GROUP, &[(at, xfs(GROUP - 4096))]), None);
            assert_eq!(found_on(4 * GROUP, &[(at, xfs(0))]), None);
        }
        // The last group is shorter where the device has no multiple of four blocks.
        assert_eq!(found_on(4 * GROUP - 8192, &[(GROUP, xfs(GROUP))]), Some(("an XFS file system", GROUP)));
        assert_eq!(found(&[(1 << 40, xfs(1 << 40))]), Some(("an XFS file system", 1 << 40)));
    }

    #[test]
    fn every_label_of_zfs_after_the_first_counts() {
        const MIB: u64 = 1 << 20;
        let ring = 128 << 10;
        for label in [256 << 10, 99 * MIB + (512 << 10), 99 * MIB + (768 << 10)] {
            let at = label + ring + 5 * 1024;
            for magic in ZFS {
                let zfs = Some(("a member of a ZFS pool", at));
                assert_eq!(found_on(100 * MIB + 4096, &[(at, magic.to_vec())]), zfs);
            }
            assert_eq!(found_on(100 * MIB + 4096, &[(at + 512, ZFS[0].to_vec())]), None);
            assert_eq!(found_on(100 * MIB + 4096, &[(label, ZFS[0].to_vec())]), None);
        }
        assert_eq!(found_on(512 << 10, &[((384 << 10), ZFS[0].to_vec())]), None, "it has no room for a pool");
    }

    #[test]
    fn few_places_are_looked_at_whatever_the_length() {
        for len_bytes in [0, 512, 4096, 1 << 20, 1 << 30, 1 << 50, u64::MAX - 511] {
            let places: Vec<Range<u64>> = places(len_bytes).collect();
            assert!(places.len() <= 45 && places.iter().all(|place| place.start < len_bytes), "{len_bytes}");
            assert!(places.iter().map(|place| place.end - place.start).sum::<u64>() < 512 << 10);
        }
    }
}
