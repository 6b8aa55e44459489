//! H2CTermReq and C2HTermReq: the last PDU of a side that found a fatal error.

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{CommonHeader, Direction, PduRules, PduType};
use crate::violation::Violation;

/// The longest termination request, in bytes: its header and 128 bytes of data.
pub const MAX_TERM_PLEN_BYTES: u32 = 152;

/// Terminate Connection Request of either direction (NVMe/TCP 3.6.2.4, 3.6.2.5). The header of the offending PDU
/// follows it as data.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct TermReq {
    /// The common header.
    pub common: CommonHeader,
    /// Bytes 9:8: FES.
    pub fes: U16,
    /// Bytes 13:10: FEI.
    pub fei: U32,
    /// Bytes 23:14: reserved.
    pub reserved: [u8; 10],
}

impl TermReq {
    /// The request that tells the peer of `violation`, followed by `data_bytes` bytes of the offending header, at most
    /// 128.
    pub fn new(direction: Direction, violation: &Violation, data_bytes: usize) -> TermReq {
        let kind = match direction {
            Direction::ToController => PduType::H2CTermReq,
            Direction::ToHost => PduType::C2HTermReq,
        };
        let mut common = CommonHeader::new(kind, &PduRules::initial(direction), 0, data_bytes as u32);
        // PDO is reserved here, though there are data.
        common.pdo = 0;
        let (fes, fei) = (U16::new(violation.fes as u16), U32::new(violation.fei));
        TermReq { common, fes, fei, reserved: [0; 10] }
    }

    /// Whether the length is one that a receiver may read at all (NVMe/TCP 3.5).
    pub fn is_well_formed(&self) -> bool {
        (24..=MAX_TERM_PLEN_BYTES).contains(&self.common.plen.get())
    }
}
