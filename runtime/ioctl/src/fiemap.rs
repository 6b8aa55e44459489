//! The extents of a file: `FS_IOC_FIEMAP` (`linux/fiemap.h`).

use std::io;
use std::os::fd::BorrowedFd;

use crate::{bytes_of, call, invalid, put, u32_at, u64_at, words};

/// `_IOWR('f', 11, struct fiemap)`, of 32 bytes.
const FS_IOC_FIEMAP: u32 = 0xC020_660B;
/// `struct fiemap` without extents.
const HEAD_BYTES: usize = 32;
/// `struct fiemap_extent`.
const EXTENT_BYTES: usize = 56;
/// The number of extents per call.
pub const EXTENTS: usize = 256;
/// Writes dirty pages out first, so that they have an address.
const FLAG_SYNC: u32 = 1;
/// The last extent of the file.
const EXTENT_LAST: u32 = 0x1;
/// Unknown, not chosen yet, compressed, encrypted, inside of metadata, packed: the address does not contain the bytes
/// of the file.
const EXTENT_WITHOUT_PLACE: u32 = 0x2 | 0x4 | 0x8 | 0x80 | 0x200 | 0x400;

/// Bytes of a file that are contiguous in its file system's address space; for ext4 and xfs this is the block device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// Offset in the file.
    pub offset_bytes: u64,
    /// Its address; `None` if it has no place of its own.
    pub place_bytes: Option<u64>,
    /// Its length. Never 0.
    pub length_bytes: u64,
    /// True if it is the last extent of the file.
    pub is_last: bool,
}

/// The extents of an open file from an offset on, at most [`EXTENTS`]; empty if there are no more.
///
/// # Errors
/// When the file system does not return them, or returns impossible ones.
pub fn extents(file: BorrowedFd<'_>, offset_bytes: u64) -> io::Result<Vec<Extent>> {
    let mut buffer = words(HEAD_BYTES + EXTENTS * EXTENT_BYTES);
    put(&mut buffer, 0, &offset_bytes.to_ne_bytes());
    put(&mut buffer, 8, &(u64::MAX - offset_bytes).to_ne_bytes());
    put(&mut buffer, 16, &FLAG_SYNC.to_ne_bytes());
    put(&mut buffer, 24, &(EXTENTS as u32).to_ne_bytes());
    // SAFETY: the buffer has a `struct fiemap` with room for as many extents as its `fm_extent_count` says; it has no
    // addresses.
    unsafe { call(file, FS_IOC_FIEMAP, &mut buffer)? };
    parse(&bytes_of(&buffer), offset_bytes)
}

fn parse(bytes: &[u8], from_bytes: u64) -> io::Result<Vec<Extent>> {
    let count = u32_at(bytes, 20).unwrap_or(0) as usize;
    if count > EXTENTS {
        return Err(invalid("more extents than there is room for"));
    }
    let mut next = 0;
    let mut extents = Vec::with_capacity(count);
    for number in 0..count {
        let at = HEAD_BYTES + number * EXTENT_BYTES;
        let extent = extent(bytes, at).ok_or(invalid("an extent that wraps or is empty"))?;
        let end = extent.offset_bytes + extent.length_bytes;
        // A list that does not advance would be read forever.
        if extent.offset_bytes < next || end <= from_bytes {
            return Err(invalid("extents out of order"));
        }
        next = end;
        extents.push(extent);
    }
    Ok(extents)
}

fn extent(bytes: &[u8], at: usize) -> Option<Extent> {
    let (offset_bytes, place, length_bytes) = (u64_at(bytes, at)?, u64_at(bytes, at + 8)?, u64_at(bytes, at + 16)?);
    let flags = u32_at(bytes, at + 40)?;
    let fits = length_bytes > 0 && offset_bytes.checked_add(length_bytes).is_some();
    let place_bytes = (flags & EXTENT_WITHOUT_PLACE == 0).then_some(place);
    let fits = fits && place_bytes.is_none_or(|place| place.checked_add(length_bytes).is_some());
    fits.then_some(Extent { offset_bytes, place_bytes, length_bytes, is_last: flags & EXTENT_LAST != 0 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::fd::AsFd;

    fn response(extents: &[(u64, u64, u64, u32)]) -> Vec<u8> {
        let mut buffer = words(HEAD_BYTES + EXTENTS * EXTENT_BYTES);
        put(&mut buffer, 20, &(extents.len() as u32).to_ne_bytes());
        for (number, (offset, place, length, flags)) in extents.iter().enumerate() {
            let at = HEAD_BYTES + number * EXTENT_BYTES;
            for (field, value) in [offset, place, length].into_iter().enumerate() {
                put(&mut buffer, at + field * 8, &value.to_ne_bytes());
            }
            put(&mut buffer, at + 40, &flags.to_ne_bytes());
        }
        bytes_of(&buffer)
    }

    #[test]
    fn extents_are_read_with_their_places_and_those_without_one_have_none() {
        let bytes = response(&[(0, 8192, 4096, 0x800), (4096, 0, 4096, 4), (12288, 1 << 30, 8192, 1)]);
        let found = parse(&bytes, 0).unwrap();
        let place = |extent: &Extent| extent.place_bytes;
        assert_eq!(found.iter().map(place).collect::<Vec<_>>(), [Some(8192), None, Some(1 << 30)]);
        assert_eq!((found[2].offset_bytes, found[2].length_bytes, found[2].is_last), (12288, 8192, true));
    }

    #[test]
    fn extents_that_wrap_are_empty_or_out_of_order_are_refused() {
        for extents in [
            &[(0, 0, 0, 0)][..],
            &[(u64::MAX, 0, 2, 0)],
            &[(0, u64::MAX, 2, 0)],
            &[(4096, 0, 4096, 0), (0, 0, 4096, 0)],
            &[(0, 0, 4096, 0), (4095, 0, 4096, 0)],
        ] {
            assert!(parse(&response(extents), 0).is_err(), "{extents:?}");
        }
        assert!(parse(&response(&[(0, 0, 4096, 0)]), 4096).is_err(), "it does not advance");
        let mut many = response(&[]);
        many[20..24].copy_from_slice(&u32::MAX.to_ne_bytes());
        assert!(parse(&many, 0).is_err());
    }

    proptest! {
        #[test]
        fn no_response_is_a_reason_to_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), from in any::<u64>()) {
            let _ = parse(&bytes, from);
        }
    }

    #[test]
    fn a_file_of_this_system_has_extents_where_the_file_system_tells() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), vec![7; 1 << 20]).unwrap();
        match extents(file.as_file().as_fd(), 0) {
            Ok(found) => assert_eq!(found.iter().map(|extent| extent.length_bytes).sum::<u64>(), 1 << 20),
            Err(error) => eprintln!("skipped: this file system does not tell: {error}"),
        }
    }
}
