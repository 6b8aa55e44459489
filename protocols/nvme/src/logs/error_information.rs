//! Error Information: the newest errors, each with the block where it happened (Base, "Error Information").
//!
//! A Verify that failed reports its first bad block here.

use sealblock_units::Lba;

use crate::error::FieldLocation;
use crate::status::Status;
use crate::wire::{Field, layout};

layout! {
    /// An entry of the Error Information log. An entry with an error count of 0 is not in use.
    pub struct ErrorEntry[64] {
        /// Error count: one more with each error of the controller's life, never 0.
        0 => error_count: u64,
        /// SQID: queue of the command, FFFFh for none.
        8 => sqid: u16,
        /// CID: the command, FFFFh for none.
        10 => cid: u16,
        /// Status with the phase tag in bit 0; see [`ErrorEntry::status`].
        12 => status_field: u16,
        /// Parameter error location: byte in bits 7:0, bit in bits 10:8, FFFFh for none.
        14 => parameter_error_location: u16,
        /// LBA: the first block with the error.
        16 => lba: u64,
        /// NSID: namespace.
        24 => nsid: u32,
        /// Vendor specific information: log page with more, 0 for none.
        28 => vendor_information: u8,
        /// TRTYPE: transport.
        29 => trtype: u8,
        /// CSI: command set, if the log page version is 1.
        30 => csi: u8,
        /// Opcode, if the log page version is 1.
        31 => opcode: u8,
        /// Command specific information.
        32 => command_specific: u64,
        /// Transport type specific information.
        40 => transport_specific: u16,
        /// Log page version: 1 if CSI and opcode are valid.
        63 => version: u8,
    }
}

impl ErrorEntry {
    /// What became of the command.
    pub const fn status(&self) -> Status {
        Status::from_bits(self.status_field >> 1)
    }

    /// The entry for a command that failed at a block.
    pub fn at_block(sqid: u16, cid: u16, status: Status, nsid: u32, lba: Lba) -> ErrorEntry {
        ErrorEntry {
            sqid,
            cid,
            status_field: status.bits() << 1,
            parameter_error_location: 0xFFFF,
            lba: lba.get(),
            nsid,
            trtype: super::TransportType::Tcp.code(),
            ..ErrorEntry::default()
        }
    }

    /// The same entry with the place of a wrong parameter.
    pub fn with_location(mut self, location: Option<FieldLocation>) -> ErrorEntry {
        self.parameter_error_location = location.map_or(0xFFFF, FieldLocation::bits);
        self
    }
}

/// The newest errors of a controller, newest first, at most as many as ELPE says.
#[derive(Clone, Debug)]
pub struct ErrorLog {
    entries: std::collections::VecDeque<ErrorEntry>,
    most: usize,
    count: u64,
}

impl ErrorLog {
    /// An empty log with room for `most` entries.
    pub fn new(most: usize) -> ErrorLog {
        ErrorLog { entries: std::collections::VecDeque::new(), most, count: 0 }
    }

    /// Puts an entry in front and gives it the next error count, which is returned.
    pub fn push(&mut self, entry: ErrorEntry) -> u64 {
        self.count = self.count.wrapping_add(1).max(1);
        self.entries.push_front(ErrorEntry { error_count: self.count, ..entry });
        self.entries.truncate(self.most);
        self.count
    }

    /// Errors of the controller's life, for Number of Error Information Log Entries in SMART / Health Information.
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// The page: always as long as the log has room, entries not in use are zero.
    pub fn encode(&self) -> Vec<u8> {
        let mut page: Vec<u8> = self.entries.iter().flat_map(ErrorEntry::encode).collect();
        page.resize(self.most * ErrorEntry::BYTES, 0);
        page
    }

    /// The entries in use of a page that was read.
    pub fn decode(page: &[u8]) -> impl Iterator<Item = ErrorEntry> {
        page.chunks_exact(ErrorEntry::BYTES).map(ErrorEntry::get).filter(|entry| entry.error_count != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StatusCode;

    #[test]
    fn the_newest_error_is_first_and_the_oldest_goes() {
        let mut log = ErrorLog::new(2);
        assert_eq!(ErrorLog::decode(&log.encode()).count(), 0);
        let status = StatusCode::GUARD_CHECK_ERROR.status();
        for lba in 0..3 {
            log.push(ErrorEntry::at_block(1, 2, status, 1, Lba::new(lba)));
        }
        let read: Vec<_> = ErrorLog::decode(&log.encode()).map(|entry| (entry.error_count, entry.lba)).collect();
        assert_eq!((read, log.count()), (vec![(3, 2), (2, 1)], 3));
        assert_eq!(log.encode().len(), 128);
    }

    #[test]
    fn an_entry_has_these_bytes() {
        let status = StatusCode::GUARD_CHECK_ERROR.status().with_more(true);
        let location = Some(FieldLocation::dword(12, 29));
        let entry = ErrorEntry::at_block(1, 0x0203, status, 4, Lba::new(0x0506)).with_location(location);
        let mut expected = [0; 64];
        expected[8..16].copy_from_slice(&[1, 0, 3, 2, 0x04, 0xC5, 0x33, 5]);
        expected[16..25].copy_from_slice(&[6, 5, 0, 0, 0, 0, 0, 0, 4]);
        expected[29] = 3;
        assert_eq!(entry.encode(), expected);
        assert_eq!(entry.status(), status);
    }
}
