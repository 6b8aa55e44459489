//! CapsuleCmd and CapsuleResp: a queue entry in a PDU.

use sealblock_protocols_nvme::{Command, Completion};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{CommonHeader, PduRules, PduType};

/// Command Capsule (NVMe/TCP 3.6.2.6); in-capsule data may follow.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct CapsuleCmd {
    /// The common header.
    pub common: CommonHeader,
    /// Bytes 71:8: CCSQE, the submission queue entry.
    pub command: Command,
}

impl CapsuleCmd {
    /// Offset of the command identifier from the start of the PDU, in bytes.
    pub const CID_AT: u32 = 10;

    /// A capsule with `data_bytes` of in-capsule data.
    pub fn new(rules: &PduRules, command: Command, data_bytes: u32) -> CapsuleCmd {
        CapsuleCmd { common: CommonHeader::new(PduType::CapsuleCmd, rules, 0, data_bytes), command }
    }
}

/// Response Capsule (NVMe/TCP 3.6.2.7).
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct CapsuleResp {
    /// The common header.
    pub common: CommonHeader,
    /// Bytes 23:8: RCCQE, the completion queue entry.
    pub completion: Completion,
}

impl CapsuleResp {
    /// Offset of the command identifier from the start of the PDU, in bytes.
    pub const CID_AT: u32 = 20;

    /// A capsule.
    pub fn new(rules: &PduRules, completion: Completion) -> CapsuleResp {
        CapsuleResp { common: CommonHeader::new(PduType::CapsuleResp, rules, 0, 0), completion }
    }
}
