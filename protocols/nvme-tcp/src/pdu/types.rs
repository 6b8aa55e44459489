//! The headers of each PDU type (NVMe/TCP 3.6.2).

use sealblock_protocols_nvme::{Command, Completion};
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::common::{CommonHeader, Direction, Frame, PduRules, PduType, flags};
use crate::violation::{Closed, Violation, clause};

/// The header of Host to Controller Data, Controller to Host Data, and Ready to Transfer (NVMe/TCP 3.6.2.8 to 3.6.2.10).
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct TransferPdu {
    /// The common header.
    pub common: CommonHeader,
    /// Bytes 9:8: CCCID, identifier of the command.
    pub cccid: U16,
    /// Bytes 11:10: TTAG, the tag of an R2T, which the H2CData PDUs repeat; reserved in C2HData.
    pub ttag: U16,
    /// Bytes 15:12: DATAO or R2TO, offset in the Command Data Buffer, in bytes.
    pub offset: U32,
    /// Bytes 19:16: DATAL or R2TL, bytes of data that follow or are requested.
    pub length: U32,
    /// Bytes 23:20: reserved.
    pub reserved: U32,
}

/// Offset of CCCID from the start of the PDU, in bytes.
pub(crate) const CCCID_AT: u32 = 8;
/// Offset of TTAG.
pub(crate) const TTAG_AT: u32 = 10;
/// Offset of DATAO and R2TO.
const OFFSET_AT: u32 = 12;
/// Offset of DATAL and R2TL.
const LENGTH_AT: u32 = 16;

impl TransferPdu {
    fn new(common: CommonHeader, cccid: u16, ttag: u16, offset: u32, length: u32) -> TransferPdu {
        let (cccid, ttag) = (U16::new(cccid), U16::new(ttag));
        TransferPdu { common, cccid, ttag, offset: U32::new(offset), length: U32::new(length), reserved: U32::ZERO }
    }

    /// H2CData: `datal` bytes of data at `datao`.
    pub fn h2c_data(rules: &PduRules, last: bool, cccid: u16, ttag: u16, datao: u32, datal: u32) -> TransferPdu {
        let more_flags = if last { flags::LAST } else { 0 };
        TransferPdu::new(CommonHeader::new(PduType::H2CData, rules, more_flags, datal), cccid, ttag, datao, datal)
    }

    /// C2HData: `datal` bytes of data at `datao`; `more_flags` of [`flags::LAST`] and [`flags::SUCCESS`].
    pub fn c2h_data(rules: &PduRules, more_flags: u8, cccid: u16, datao: u32, datal: u32) -> TransferPdu {
        TransferPdu::new(CommonHeader::new(PduType::C2HData, rules, more_flags, datal), cccid, 0, datao, datal)
    }

    /// R2T: a request for `r2tl` bytes at `r2to`.
    pub fn r2t(rules: &PduRules, cccid: u16, ttag: u16, r2to: u32, r2tl: u32) -> TransferPdu {
        TransferPdu::new(CommonHeader::new(PduType::R2T, rules, 0, 0), cccid, ttag, r2to, r2tl)
    }

    /// Whether LAST_PDU is set.
    pub fn is_last(&self) -> bool {
        self.common.flags & flags::LAST != 0
    }

    /// Whether SUCCESS is set.
    pub fn is_success(&self) -> bool {
        self.common.flags & flags::SUCCESS != 0
    }

    /// Checks the fields of a PDU of this type alone.
    pub fn check(&self, kind: PduType, frame: &Frame) -> Result<(), Violation> {
        let clause = match kind {
            PduType::H2CData => clause::H2C_DATA,
            PduType::C2HData => clause::C2H_DATA,
            _ => clause::R2T,
        };
        if kind == PduType::C2HData && self.is_success() && !self.is_last() {
            return Err(Violation::field(1, clause::C2H, "SUCCESS without LAST_PDU"));
        }
        if kind != PduType::R2T && self.length.get() != frame.data_bytes {
            return Err(Violation::field(4, clause, "PLEN does not fit PDO and DATAL"));
        }
        if !self.offset.get().is_multiple_of(4) {
            return Err(Violation::field(OFFSET_AT, clause, "the data offset is not a number of dwords"));
        }
        if self.length.get() == 0 || !self.length.get().is_multiple_of(4) {
            return Err(Violation::field(LENGTH_AT, clause, "the data length is not a positive number of dwords"));
        }
        Ok(())
    }
}

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

/// HDGST_ENABLE of the field DGST.
pub const DIGEST_HEADER: u8 = 1 << 0;
/// DDGST_ENABLE of the field DGST.
pub const DIGEST_DATA: u8 = 1 << 1;
/// The field DGST for these digests.
pub(crate) const fn digests(header: bool, data: bool) -> u8 {
    let header = if header { DIGEST_HEADER } else { 0 };
    header | if data { DIGEST_DATA } else { 0 }
}

/// The largest legal HPDA and CPDA: alignment to 128 bytes.
pub const MAX_ALIGNMENT_CODE: u8 = 31;
/// What MAXH2CDATA should at least be, in bytes; less is refused as unsupported.
pub const MIN_MAXH2CDATA_BYTES: u32 = 4096;

/// The alignment, in bytes, that a legal HPDA or CPDA stands for: a count of dwords, 0's based.
pub const fn alignment_bytes(code: u8) -> u8 {
    (if code > MAX_ALIGNMENT_CODE { MAX_ALIGNMENT_CODE } else { code } + 1) * 4
}

/// Initialize Connection Request (NVMe/TCP 3.6.2.2).
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct IcReq {
    /// The common header.
    pub common: CommonHeader,
    /// Bytes 9:8: PFV, format version of the PDUs; 0.
    pub pfv: U16,
    /// Byte 10: HPDA, alignment of data sent to the host, dwords, 0's based.
    pub hpda: u8,
    /// Byte 11: DGST, the digests that the host requests.
    pub digests: u8,
    /// Bytes 15:12: MAXR2T, R2Ts that may be outstanding for a command, 0's based.
    pub maxr2t: U32,
    /// Bytes 127:16: reserved.
    pub reserved: [u8; 112],
}

impl IcReq {
    /// A request; `maxr2t` is 0's based as on the wire.
    pub fn new(hpda: u8, digests: u8, maxr2t: u32) -> IcReq {
        let common = CommonHeader::new(PduType::IcReq, &PduRules::initial(Direction::ToController), 0, 0);
        IcReq { common, pfv: U16::ZERO, hpda, digests, maxr2t: U32::new(maxr2t), reserved: [0; 112] }
    }

    /// Refuses unknown versions and alignments.
    pub fn check(&self) -> Result<(), Violation> {
        if self.pfv.get() != 0 {
            return Err(Violation::unsupported(8, clause::ICREQ, "a PDU format version other than 0"));
        }
        if self.hpda > MAX_ALIGNMENT_CODE {
            return Err(Violation::field(10, clause::ICREQ, "HPDA exceeds 31"));
        }
        Ok(())
    }
}

/// Initialize Connection Response (NVMe/TCP 3.6.2.3).
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct IcResp {
    /// The common header.
    pub common: CommonHeader,
    /// Bytes 9:8: PFV, format version of the PDUs; 0.
    pub pfv: U16,
    /// Byte 10: CPDA, alignment of data sent to the controller, dwords, 0's based.
    pub cpda: u8,
    /// Byte 11: DGST, the digests that are in use from here on.
    pub digests: u8,
    /// Bytes 15:12: MAXH2CDATA, most data bytes of an H2CData PDU.
    pub maxh2cdata_bytes: U32,
    /// Bytes 127:16: reserved.
    pub reserved: [u8; 112],
}

impl IcResp {
    /// A response.
    pub fn new(cpda: u8, digests: u8, maxh2cdata_bytes: u32) -> IcResp {
        let common = CommonHeader::new(PduType::IcResp, &PduRules::initial(Direction::ToHost), 0, 0);
        let maxh2cdata_bytes = U32::new(maxh2cdata_bytes);
        IcResp { common, pfv: U16::ZERO, cpda, digests, maxh2cdata_bytes, reserved: [0; 112] }
    }

    /// Refuses unknown versions, alignments and lengths, and digests that were not `requested`.
    pub fn check(&self, requested: u8) -> Result<(), Violation> {
        if self.pfv.get() != 0 {
            return Err(Violation::unsupported(8, clause::ICRESP, "a PDU format version other than 0"));
        }
        if self.cpda > MAX_ALIGNMENT_CODE {
            return Err(Violation::field(10, clause::ICRESP, "CPDA exceeds 31"));
        }
        if self.digests & (DIGEST_HEADER | DIGEST_DATA) & !requested != 0 {
            return Err(Violation::field(11, clause::DIGESTS, "a digest is enabled that was not requested"));
        }
        let maxh2cdata_bytes = self.maxh2cdata_bytes.get();
        if maxh2cdata_bytes == 0 || !maxh2cdata_bytes.is_multiple_of(4) {
            return Err(Violation::field(12, clause::ICRESP, "MAXH2CDATA is not a number of dwords"));
        }
        if maxh2cdata_bytes < MIN_MAXH2CDATA_BYTES {
            return Err(Violation::unsupported(12, clause::ICRESP, "MAXH2CDATA is less than 4096 bytes"));
        }
        Ok(())
    }
}

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
    /// The request that reports `violation`, followed by `data_bytes` bytes of the offending header, at most 128.
    pub fn new(direction: Direction, violation: &Violation, data_bytes: usize) -> TermReq {
        let kind = match direction {
            Direction::ToController => PduType::H2CTermReq,
            Direction::ToHost => PduType::C2HTermReq,
        };
        let mut common = CommonHeader::new(kind, &PduRules::initial(direction), 0, data_bytes as u32);
        // PDO is reserved here, although data follows.
        common.pdo = 0;
        let (fes, fei) = (U16::new(violation.fes as u16), U32::new(violation.fei));
        TermReq { common, fes, fei, reserved: [0; 10] }
    }

    /// The reason that a peer's request gives. Its data, the offending header, is not waited for.
    pub(crate) fn reason(header: &[u8]) -> Closed {
        let request = TermReq::ref_from_bytes(header).expect("the header of a termination request has its length");
        // Other lengths are not to be read (NVMe/TCP 3.5).
        match (24..=MAX_TERM_PLEN_BYTES).contains(&request.common.plen.get()) {
            true => Closed::Terminated { fes: request.fes.get(), fei: request.fei.get() },
            false => Closed::MalformedTermination,
        }
    }
}
