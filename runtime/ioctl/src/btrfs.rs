//! Finds the file of a btrfs that has the bytes at an address (`linux/btrfs.h`, `linux/btrfs_tree.h`).
//!
//! Addresses of extents are *logical*; chunks map them to devices. [`chunks`] reads the chunk tree; [`inodes`] and
//! [`path`] follow back references. All need `CAP_SYS_ADMIN`. Structures on disk are little-endian, those of calls are
//! in native byte order.

use std::io;
use std::os::fd::BorrowedFd;

use crate::{bytes_of, call, invalid, put, text_at, u16_at, u32_at, u64_at, words};

/// `_IOWR(0x94, 17, struct btrfs_ioctl_search_args_v2)`, of 112 bytes.
const TREE_SEARCH_V2: u32 = 0xC070_9411;
/// `_IOWR(0x94, 18, struct btrfs_ioctl_ino_lookup_args)`, of 4096 bytes.
const INO_LOOKUP: u32 = 0xD000_9412;
/// `_IOWR(0x94, 30, struct btrfs_ioctl_dev_info_args)`, of 4096 bytes.
const DEV_INFO: u32 = 0xD000_941E;
/// `_IOR(0x94, 31, struct btrfs_ioctl_fs_info_args)`, of 1024 bytes.
const FS_INFO: u32 = 0x8400_941F;
/// `_IOWR(0x94, 36, struct btrfs_ioctl_logical_ino_args)`, of 56 bytes.
const LOGICAL_INO: u32 = 0xC038_9424;

const CHUNK_TREE: u64 = 3;
const FIRST_CHUNK_OBJECT: u64 = 256;
const CHUNK_ITEM: u32 = 228;
/// `struct btrfs_ioctl_search_key`, and the size of the buffer after it.
const SEARCH_HEAD_BYTES: usize = 112;
const ITEM_HEAD_BYTES: usize = 32;
const SEARCH_BYTES: usize = 64 << 10;
/// `struct btrfs_chunk` without stripes, and a stripe.
const CHUNK_BYTES: usize = 48;
const STRIPE_BYTES: usize = 32;
/// The maximum number of chunks that are read. With 1 GiB each, they are 1 PiB.
const MAX_CHUNKS: usize = 1 << 20;
/// Bytes for back references; the kernel accepts no more.
const REFERENCES_BYTES: usize = 64 << 10;
/// Path in `struct btrfs_ioctl_dev_info_args`.
const DEVICE_PATH_AT: usize = 3072;

/// A chunk: logical addresses that are mapped to stripes on devices.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Chunk {
    /// The first logical address.
    pub logical_bytes: u64,
    /// Its length in logical bytes. Never 0.
    pub length_bytes: u64,
    /// Bytes of a stripe element. Never 0.
    pub stripe_bytes: u64,
    /// Kind and profile (`BTRFS_BLOCK_GROUP_*`).
    pub profile: u64,
    /// The number of copies within a stripe, for RAID10.
    pub sub_stripes: u16,
    /// The device and the first byte on it of each stripe.
    pub stripes: Vec<(u64, u64)>,
}

/// A file that has the bytes of an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reference {
    /// The inode.
    pub inode: u64,
    /// Offset in the file.
    pub offset_bytes: u64,
    /// The subvolume.
    pub subvolume: u64,
}

/// Devices of the mounted file system: number and path.
///
/// # Errors
/// When the file system does not return them.
pub fn devices(mounted: BorrowedFd<'_>) -> io::Result<Vec<(u64, Vec<u8>)>> {
    /// The maximum device number that is tried. Numbers of removed devices are skipped.
    const MAX_NUMBER: u64 = 4096;
    let mut about = words(1024);
    // SAFETY: the buffer has a `struct btrfs_ioctl_fs_info_args`, which has no addresses.
    unsafe { call(mounted, FS_INFO, &mut about)? };
    let mut devices = Vec::new();
    for number in 1..=about[0].min(MAX_NUMBER) {
        let mut device = words(4096);
        device[0] = number;
        // SAFETY: the buffer has a `struct btrfs_ioctl_dev_info_args`, which has no addresses.
        match unsafe { call(mounted, DEV_INFO, &mut device) } {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => continue,
            Err(error) => return Err(error),
        }
        let bytes = bytes_of(&device);
        devices.push((number, text_at(&bytes, DEVICE_PATH_AT).unwrap_or_default().to_vec()));
    }
    Ok(devices)
}

/// All chunks of the mounted file system, in the order of logical addresses.
///
/// # Errors
/// When the file system does not return them, or returns impossible chunks.
pub fn chunks(mounted: BorrowedFd<'_>) -> io::Result<Vec<Chunk>> {
    let (mut chunks, mut from) = (Vec::new(), 0_u64);
    loop {
        let mut buffer = words(SEARCH_HEAD_BYTES + SEARCH_BYTES);
        let key = [CHUNK_TREE, FIRST_CHUNK_OBJECT, FIRST_CHUNK_OBJECT, from, u64::MAX, 0, u64::MAX];
        buffer[..key.len()].copy_from_slice(&key);
        put(&mut buffer, 56, &CHUNK_ITEM.to_ne_bytes());
        put(&mut buffer, 60, &CHUNK_ITEM.to_ne_bytes());
        put(&mut buffer, 64, &u32::MAX.to_ne_bytes());
        buffer[13] = SEARCH_BYTES as u64;
        // SAFETY: the buffer has a `struct btrfs_ioctl_search_args_v2` and as many bytes after it as its `buf_size`
        // says; it has no addresses.
        unsafe { call(mounted, TREE_SEARCH_V2, &mut buffer)? };
        let found = parse_chunks(&bytes_of(&buffer), from)?;
        let Some(last) = found.last() else { return Ok(chunks) };
        let next = last.logical_bytes.checked_add(1);
        chunks.extend(found);
        match next {
            Some(next) if chunks.len() < MAX_CHUNKS => from = next,
            _ => return Err(invalid("more chunks than a file system can have")),
        }
    }
}

fn parse_chunks(bytes: &[u8], from: u64) -> io::Result<Vec<Chunk>> {
    const CUT: &str = "a chunk is cut off";
    let (mut at, mut next, mut chunks) = (SEARCH_HEAD_BYTES, from, Vec::new());
    for _ in 0..u32_at(bytes, 64).unwrap_or(0) {
        let logical = u64_at(bytes, at + 16).ok_or(invalid(CUT))?;
        let (kind, length) = u32_at(bytes, at + 24).zip(u32_at(bytes, at + 28)).ok_or(invalid(CUT))?;
        let item = bytes.get(at + ITEM_HEAD_BYTES..at + ITEM_HEAD_BYTES + length as usize).ok_or(invalid(CUT))?;
        at += ITEM_HEAD_BYTES + length as usize;
        if kind != CHUNK_ITEM {
            continue;
        }
        let chunk = chunk(item, logical).ok_or(invalid("a chunk that is empty, wraps or has no stripes"))?;
        if logical < next {
            return Err(invalid("chunks that overlap or are out of order"));
        }
        next = logical + chunk.length_bytes;
        chunks.push(chunk);
    }
    Ok(chunks)
}

/// A `struct btrfs_chunk`.
fn chunk(item: &[u8], logical_bytes: u64) -> Option<Chunk> {
    let little = |at| u64_at(item, at).map(u64::from_le);
    let little_16 = |at| u16_at(item, at).map(u16::from_le);
    let (length_bytes, stripe_bytes, profile) = (little(0)?, little(16)?, little(24)?);
    let (count, sub_stripes) = (little_16(44)?, little_16(46)?);
    logical_bytes.checked_add(length_bytes).filter(|_| length_bytes > 0 && stripe_bytes > 0 && count > 0)?;
    let mut stripes = Vec::with_capacity(count.into());
    for number in 0..usize::from(count) {
        let at = CHUNK_BYTES + number * STRIPE_BYTES;
        let offset = little(at + 8)?;
        offset.checked_add(length_bytes)?;
        stripes.push((little(at)?, offset));
    }
    Some(Chunk { logical_bytes, length_bytes, stripe_bytes, profile, sub_stripes, stripes })
}

/// The files that have the byte at a logical address, and whether there are more than could be returned. Empty if no
/// file has it.
///
/// # Errors
/// When the file system does not return them.
pub fn inodes(mounted: BorrowedFd<'_>, logical_bytes: u64) -> io::Result<(Vec<Reference>, bool)> {
    let mut found = words(REFERENCES_BYTES);
    let mut buffer = words(56);
    (buffer[0], buffer[1], buffer[6]) = (logical_bytes, REFERENCES_BYTES as u64, found.as_mut_ptr() as u64);
    // SAFETY: the buffer has a `struct btrfs_ioctl_logical_ino_args`, whose only address is that of `found`, which has
    // as many bytes as its `size` says and outlives the call.
    match unsafe { call(mounted, LOGICAL_INO, &mut buffer) } {
        Ok(()) => Ok(parse_inodes(&bytes_of(&found))),
        // No extent has the address: it is free.
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok((Vec::new(), false)),
        Err(error) => Err(error),
    }
}

/// A `struct btrfs_data_container` of three words for each file.
fn parse_inodes(bytes: &[u8]) -> (Vec<Reference>, bool) {
    let values = u32_at(bytes, 8).unwrap_or(0) as usize;
    let missed = u32_at(bytes, 12).unwrap_or(0) > 0;
    let triple = |number: usize| {
        let at = 16 + number * 24;
        let (inode, offset_bytes) = (u64_at(bytes, at)?, u64_at(bytes, at + 8)?);
        Some(Reference { inode, offset_bytes, subvolume: u64_at(bytes, at + 16)? })
    };
    ((0..values / 3).map_while(triple).collect(), missed)
}

/// The subvolume of an open file or folder.
///
/// # Errors
/// When the file system does not return it.
pub fn subvolume(open: BorrowedFd<'_>) -> io::Result<u64> {
    lookup(open, 0, FIRST_CHUNK_OBJECT).map(|(subvolume, _)| subvolume)
}

/// The path of an inode within its subvolume, without a leading slash.
///
/// # Errors
/// When the file system does not return it, or the inode is gone.
pub fn path(mounted: BorrowedFd<'_>, subvolume: u64, inode: u64) -> io::Result<Vec<u8>> {
    lookup(mounted, subvolume, inode).map(|(_, path)| path)
}

fn lookup(open: BorrowedFd<'_>, tree: u64, object: u64) -> io::Result<(u64, Vec<u8>)> {
    let mut buffer = words(4096);
    (buffer[0], buffer[1]) = (tree, object);
    // SAFETY: the buffer has a `struct btrfs_ioctl_ino_lookup_args`, which has no addresses.
    unsafe { call(open, INO_LOOKUP, &mut buffer)? };
    let bytes = bytes_of(&buffer);
    let mut path = text_at(&bytes, 16).unwrap_or_default().to_vec();
    // The kernel treats the object as a folder, and ends its path with a slash.
    if path.last() == Some(&b'/') {
        path.pop();
    }
    Ok((buffer[0], path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn item(length: u64, stripe: u64, stripes: &[(u64, u64)]) -> Vec<u8> {
        let mut item = Vec::new();
        for word in [length, 2, stripe, 1] {
            item.extend(word.to_le_bytes());
        }
        item.extend([0; 12]);
        item.extend((stripes.len() as u16).to_le_bytes());
        item.extend(1_u16.to_le_bytes());
        for (device, offset) in stripes {
            item.extend(device.to_le_bytes());
            item.extend(offset.to_le_bytes());
            item.extend([0; 16]);
        }
        item
    }

    fn response(chunks: &[(u64, Vec<u8>)]) -> Vec<u8> {
        let mut bytes = vec![0; SEARCH_HEAD_BYTES];
        bytes[64..68].copy_from_slice(&(chunks.len() as u32).to_ne_bytes());
        for (logical, item) in chunks {
            bytes.extend([0; 16]);
            bytes.extend(logical.to_ne_bytes());
            bytes.extend(CHUNK_ITEM.to_ne_bytes());
            bytes.extend((item.len() as u32).to_ne_bytes());
            bytes.extend(item);
        }
        bytes
    }

    #[test]
    fn chunks_are_read_with_their_stripes() {
        let bytes = response(&[(0, item(4096, 65536, &[(1, 8192)])), (4096, item(8192, 65536, &[(1, 0), (2, 4096)]))]);
        let chunks = parse_chunks(&bytes, 0).unwrap();
        assert_eq!((chunks[0].length_bytes, &chunks[0].stripes), (4096, &vec![(1, 8192)]));
        assert_eq!((chunks[1].logical_bytes, &chunks[1].stripes), (4096, &vec![(1, 0), (2, 4096)]));
    }

    #[test]
    fn chunks_that_cannot_be_are_refused() {
        let good = || item(4096, 65536, &[(1, 8192)]);
        for chunks in [
            vec![(0, item(0, 65536, &[(1, 0)]))],
            vec![(0, item(4096, 0, &[(1, 0)]))],
            vec![(0, item(4096, 65536, &[]))],
            vec![(0, good()[..60].to_vec())],
            vec![(u64::MAX, good())],
            vec![(0, item(4096, 65536, &[(1, u64::MAX)]))],
            vec![(4096, good()), (0, good())],
            vec![(0, good()), (4095, good())],
        ] {
            assert!(parse_chunks(&response(&chunks), 0).is_err(), "{chunks:?}");
        }
        let mut cut = response(&[(0, good())]);
        cut.truncate(cut.len() - 1);
        assert!(parse_chunks(&cut, 0).is_err());
    }

    #[test]
    fn references_are_triples_and_missed_ones_are_known() {
        let mut words = words(16 + 48);
        put(&mut words, 8, &6_u32.to_ne_bytes());
        put(&mut words, 12, &1_u32.to_ne_bytes());
        words[2..8].copy_from_slice(&[257, 4096, 5, 258, 0, 256]);
        let (found, missed) = parse_inodes(&bytes_of(&words));
        assert_eq!(found[0], Reference { inode: 257, offset_bytes: 4096, subvolume: 5 });
        assert_eq!((found.len(), missed), (2, true));
        put(&mut words, 8, &u32::MAX.to_ne_bytes());
        assert_eq!(parse_inodes(&bytes_of(&words)).0.len(), 2, "no more than there are bytes");
    }

    proptest! {
        #[test]
        fn no_response_is_a_reason_to_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..400), count in 0..6_u32) {
            let _ = parse_inodes(&bytes);
            if bytes.len() >= 68 {
                bytes[64..68].copy_from_slice(&count.to_ne_bytes());
            }
            let _ = parse_chunks(&bytes, 0);
        }
    }
}
