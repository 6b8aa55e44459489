//! The completion queue entry: 16 bytes that answer one command.

use std::fmt;

use zerocopy::little_endian::{U16, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::Status;

/// A completion queue entry (Base, "Completion Queue Entry"). Every bit pattern is one.
#[derive(Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Completion {
    /// Bytes 7:0: what the command returns beside its status; dword 0 in the low half.
    pub result: U64,
    /// Bytes 9:8: submission queue head pointer (SQHD), or FFFFh with flow control off.
    pub sqhd: U16,
    /// Bytes 11:10: submission queue identifier (SQID); reserved over Fabrics.
    pub sqid: U16,
    /// Bytes 13:12: identifier of the command that is answered (CID).
    pub cid: U16,
    /// Bytes 15:14: status in bits 15:1; bit 0 is the phase tag, reserved over Fabrics.
    status: U16,
}

impl Completion {
    /// Bytes of a completion queue entry.
    pub const BYTES: usize = 16;

    /// The completion of command `cid`. The sender fills in the head of the submission queue.
    pub fn new(cid: u16, status: Status, result: u64) -> Completion {
        let (cid, status) = (U16::new(cid), U16::new(status.bits() << 1));
        Completion { result: U64::new(result), cid, status, ..Completion::default() }
    }

    /// The completion in these bytes; `None` unless there are at least [`Completion::BYTES`].
    pub fn from_prefix(bytes: &[u8]) -> Option<Completion> {
        Completion::read_from_prefix(bytes).ok().map(|(completion, _)| completion)
    }

    /// The status, without the phase tag.
    pub fn status(&self) -> Status {
        Status::from_bits(self.status.get() >> 1)
    }

    /// The low 32 bits of the result: dword 0 of the entry.
    pub fn dword0(&self) -> u32 {
        self.result.get() as u32
    }

    /// The same completion with this submission queue head pointer.
    pub fn with_sqhd(mut self, sqhd: u16) -> Completion {
        self.sqhd = U16::new(sqhd);
        self
    }
}

impl fmt::Debug for Completion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (cid, sqhd, status) = (self.cid.get(), self.sqhd.get(), self.status());
        write!(f, "Completion {{ cid: {cid:#06x}, {status}, result: {:#x}, sqhd: {sqhd} }}", self.result.get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StatusCode;

    #[test]
    fn every_field_stands_where_the_specification_draws_it() {
        let bytes: [u8; 16] = std::array::from_fn(|i| i as u8);
        let completion = Completion::from_prefix(&bytes).unwrap();
        assert_eq!(completion.result.get(), 0x0706_0504_0302_0100);
        assert_eq!(completion.dword0(), 0x0302_0100);
        assert_eq!((completion.sqhd.get(), completion.sqid.get(), completion.cid.get()), (0x0908, 0x0B0A, 0x0D0C));
        assert_eq!(completion.status().bits(), 0x0F0E >> 1);
        assert!(Completion::from_prefix(&bytes[..15]).is_none());
    }

    #[test]
    fn the_status_leaves_the_phase_tag_alone() {
        let status = StatusCode::GUARD_CHECK_ERROR.status();
        let completion = Completion::new(7, status, 9).with_sqhd(3);
        assert_eq!(completion.as_bytes(), [9, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 7, 0, 0x04, 0x85]);
        assert_eq!(completion.status(), status);
    }
}
