//! The metadata that a block device stores with its blocks: `FS_IOC_GETLBMD_CAP` (`linux/fs.h`, since Linux 6.17).

use std::io;
use std::os::fd::BorrowedFd;

use crate::{bytes_of, call, u16_at, u32_at, words};

/// `_IOWR(0x15, 2, struct logical_block_metadata_cap)`, of 16 bytes.
const FS_IOC_GETLBMD_CAP: u32 = 0xC010_1502;
/// `struct logical_block_metadata_cap`.
const BYTES: usize = 16;
/// `LBMD_PI_CAP_INTEGRITY`.
const INTEGRITY: u32 = 1 << 0;
/// `LBMD_PI_CAP_REFTAG`.
const REFERENCE_TAGS: u32 = 1 << 1;

/// The checksum of a tuple, as the kernel numbers them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Checksum {
    /// None.
    None,
    /// The Internet checksum, in 16 bits.
    Ip,
    /// A number that is unknown here.
    Crc16,
    /// CRC-64/NVME.
    Crc64,
    /// A number that is not known here.
    Other(u8),
}

/// The metadata of each interval of data, in bytes unless stated otherwise. The values are unchecked and may contradict
/// each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockMetadata {
    /// The device can carry protection information.
    pub has_integrity: bool,
    /// Reference tags grow by one with each interval, from a first one that follows from the address.
    pub has_reference_tags: bool,
    /// The data of one interval.
    pub interval_bytes: u16,
    /// All metadata of an interval.
    pub metadata_bytes: u8,
    /// The tuple, which is part of the metadata.
    pub tuple_bytes: u8,
    /// Where the tuple begins in the metadata.
    pub tuple_at: u8,
    /// The kind of the guard.
    pub checksum: Checksum,
    /// The application tag.
    pub app_tag_bytes: u8,
    /// The reference tag; 0 also if it is not checked.
    pub ref_tag_bytes: u8,
    /// The storage tag.
    pub storage_tag_bytes: u8,
}

/// The metadata of an open block device; `None` if it has none.
///
/// # Errors
/// `ENOTTY` and the like before Linux 6.17, and for files that are not block devices.
pub fn of(device: BorrowedFd<'_>) -> io::Result<Option<BlockMetadata>> {
    let mut buffer = words(BYTES);
    // SAFETY: the buffer has the 16 bytes of the structure, which is what the number of the call says; it has no
    // addresses.
    unsafe { call(device, FS_IOC_GETLBMD_CAP, &mut buffer)? };
    Ok(parse(&bytes_of(&buffer)))
}

fn parse(bytes: &[u8]) -> Option<BlockMetadata> {
    let flags = u32_at(bytes, 0)?;
    let byte = |at: usize| bytes.get(at).copied();
    let metadata = BlockMetadata {
        has_integrity: flags & INTEGRITY != 0,
        has_reference_tags: flags & REFERENCE_TAGS != 0,
        interval_bytes: u16_at(bytes, 4)?,
        metadata_bytes: byte(6)?,
        tuple_bytes: byte(9)?,
        tuple_at: byte(10)?,
        checksum: match byte(11)? {
            0 => Checksum::None,
            1 => Checksum::Ip,
            2 => Checksum::Crc16,
            4 => Checksum::Crc64,
            number => Checksum::Other(number),
        },
        app_tag_bytes: byte(12)?,
        ref_tag_bytes: byte(13)?,
        storage_tag_bytes: byte(14)?,
    };
    // All fields of a device without metadata are 0.
    (flags != 0 || metadata.metadata_bytes != 0).then_some(metadata)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn each_field_is_where_the_kernel_has_it() {
        let mut bytes = Vec::from(3_u32.to_ne_bytes());
        bytes.extend(4096_u16.to_ne_bytes());
        bytes.extend([64, 48, 0, 16, 48, 4, 2, 6, 1, 0]);
        let metadata = BlockMetadata {
            has_integrity: true,
            has_reference_tags: true,
            interval_bytes: 4096,
            metadata_bytes: 64,
            tuple_bytes: 16,
            tuple_at: 48,
            checksum: Checksum::Crc64,
            app_tag_bytes: 2,
            ref_tag_bytes: 6,
            storage_tag_bytes: 1,
        };
        assert_eq!((bytes.len(), parse(&bytes)), (BYTES, Some(metadata)));
        bytes[11] = 3;
        assert_eq!(parse(&bytes).map(|metadata| metadata.checksum), Some(Checksum::Other(3)));
        assert_eq!((parse(&[0; BYTES]), parse(&bytes[..14])), (None, None));
    }

    #[test]
    fn a_file_that_is_no_block_device_carries_none() {
        let file = tempfile::tempfile().unwrap();
        assert!(of(file.as_fd()).is_err());
    }
}
