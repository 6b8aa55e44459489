//! The table of a device of device-mapper: `DM_TABLE_STATUS` (`linux/dm-ioctl.h`).

use std::io;
use std::os::fd::BorrowedFd;

use crate::{bytes_of, call, invalid, put, text_at, u32_at, u64_at, words};

/// The device file for these calls.
pub const CONTROL: &str = "/dev/mapper/control";
/// `_IOWR(0xfd, 12, struct dm_ioctl)`, of 312 bytes.
const DM_TABLE_STATUS: u32 = 0xC138_FD0C;
/// `struct dm_ioctl`.
const HEAD_BYTES: usize = 312;
/// `struct dm_target_spec`.
const SPEC_BYTES: usize = 40;
/// Version of the interface: 4.0.0 is what all kernels since 2.6 have.
const VERSION: [u32; 3] = [4, 0, 0];
/// Return tables, not states.
const STATUS_TABLE: u32 = 1 << 4;
/// The buffer was too small.
const BUFFER_FULL: u32 = 1 << 8;
/// The buffer sizes that are tried.
const BUFFER_BYTES: [usize; 3] = [16 << 10, 128 << 10, 1 << 20];
/// The maximum number of targets of a table.
const MAX_TARGETS: usize = 4096;

/// One target of a table. Sectors have 512 bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Target {
    /// The first sector on the device.
    pub start_sectors: u64,
    /// Number of sectors. Never 0.
    pub length_sectors: u64,
    /// Kind, such as `linear`.
    pub kind: String,
    /// The parameters of the target, in the format of its kind.
    pub parameters: String,
}

/// The active table of a device, by an open [`CONTROL`].
///
/// # Errors
/// Without the privilege (`CAP_SYS_ADMIN`), when there is no such device, or when the response is no table.
pub fn table(control: BorrowedFd<'_>, major: u32, minor: u32) -> io::Result<Vec<Target>> {
    for bytes in BUFFER_BYTES {
        let mut buffer = words(bytes);
        for (number, part) in VERSION.into_iter().enumerate() {
            put(&mut buffer, number * 4, &part.to_ne_bytes());
        }
        put(&mut buffer, 12, &(bytes as u32).to_ne_bytes());
        put(&mut buffer, 16, &(HEAD_BYTES as u32).to_ne_bytes());
        put(&mut buffer, 28, &STATUS_TABLE.to_ne_bytes());
        // The kernel's `new_encode_dev`.
        let device = (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12);
        put(&mut buffer, 40, &u64::from(device).to_ne_bytes());
        // SAFETY: the buffer has a `struct dm_ioctl` and as many bytes as its `data_size` says; it has no addresses.
        unsafe { call(control, DM_TABLE_STATUS, &mut buffer)? };
        let bytes = bytes_of(&buffer);
        if u32_at(&bytes, 28).unwrap_or(0) & BUFFER_FULL == 0 {
            return parse(&bytes);
        }
    }
    Err(invalid("a table that is too long"))
}

fn parse(bytes: &[u8]) -> io::Result<Vec<Target>> {
    let count = u32_at(bytes, 20).unwrap_or(0) as usize;
    let start = u32_at(bytes, 16).unwrap_or(0) as usize;
    if count > MAX_TARGETS || start < HEAD_BYTES {
        return Err(invalid("a table that is too long, or begins in its head"));
    }
    let (mut at, mut next_sector, mut targets) = (start, 0, Vec::with_capacity(count));
    for _ in 0..count {
        let target = target(bytes, at).ok_or(invalid("a target of a table is cut off, empty or wraps"))?;
        if target.start_sectors != next_sector {
            return Err(invalid("a table with gaps"));
        }
        next_sector = target.start_sectors + target.length_sectors;
        targets.push(target);
        // `next` counts bytes from the first target.
        let next = start.saturating_add(u32_at(bytes, at + 20).unwrap_or(0) as usize);
        if targets.len() < count && next < at + SPEC_BYTES {
            return Err(invalid("targets of a table that lie in each other"));
        }
        at = next;
    }
    Ok(targets)
}

fn target(bytes: &[u8], at: usize) -> Option<Target> {
    let (start_sectors, length_sectors) = (u64_at(bytes, at)?, u64_at(bytes, at.checked_add(8)?)?);
    start_sectors.checked_add(length_sectors).filter(|_| length_sectors > 0)?;
    let kind = text_at(bytes.get(at..at.checked_add(SPEC_BYTES)?)?, 24)?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Some(Target { start_sectors, length_sectors, kind: text(kind), parameters: text(text_at(bytes, at + SPEC_BYTES)?) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Targets: first sector, length, distance to the next one, kind, parameters.
    fn response(targets: &[(u64, u64, u32, &str, &str)]) -> Vec<u8> {
        let mut buffer = words(4096);
        put(&mut buffer, 16, &(HEAD_BYTES as u32).to_ne_bytes());
        put(&mut buffer, 20, &(targets.len() as u32).to_ne_bytes());
        let mut at = HEAD_BYTES;
        for (start, length, next, kind, parameters) in targets {
            put(&mut buffer, at, &start.to_ne_bytes());
            put(&mut buffer, at + 8, &length.to_ne_bytes());
            put(&mut buffer, at + 20, &next.to_ne_bytes());
            put(&mut buffer, at + 24, kind.as_bytes());
            put(&mut buffer, at + SPEC_BYTES, parameters.as_bytes());
            at = HEAD_BYTES + *next as usize;
        }
        bytes_of(&buffer)
    }

    #[test]
    fn a_table_is_read_target_by_target() {
        let bytes = response(&[(0, 100, 56, "linear", "8:16 2048"), (100, 50, 120, "striped", "2 16 8:0 0 8:16 0")]);
        let table = parse(&bytes).unwrap();
        assert_eq!(table.len(), 2);
        assert_eq!((table[0].kind.as_str(), table[0].parameters.as_str()), ("linear", "8:16 2048"));
        assert_eq!((table[1].start_sectors, table[1].length_sectors, table[1].kind.as_str()), (100, 50, "striped"));
        assert_eq!(parse(&response(&[])).unwrap(), []);
    }

    #[test]
    fn tables_that_cannot_be_are_refused() {
        for targets in [
            &[(0, 0, 56, "linear", "")][..],
            &[(1, 10, 56, "linear", "")],
            &[(0, 10, 56, "linear", ""), (11, 1, 112, "linear", "")],
            &[(0, 10, 8, "linear", ""), (10, 1, 112, "linear", "")],
            &[(0, u64::MAX, 56, "linear", ""), (u64::MAX, 1, 112, "linear", "")],
            &[(0, 10, 4092, "linear", ""), (10, 1, 8, "linear", "")],
        ] {
            assert!(parse(&response(targets)).is_err(), "{targets:?}");
        }
    }

    proptest! {
        #[test]
        fn no_response_is_a_reason_to_panic(bytes in prop::collection::vec(any::<u8>(), 0..400), count in 0..5_u32, start in 300..330_u32) {
            let _ = parse(&bytes);
            let mut bytes = bytes;
            if bytes.len() >= 24 {
                bytes[16..20].copy_from_slice(&start.to_ne_bytes());
                bytes[20..24].copy_from_slice(&count.to_ne_bytes());
                let _ = parse(&bytes);
            }
        }
    }
}
