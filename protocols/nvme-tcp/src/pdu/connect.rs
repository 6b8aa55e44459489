//! ICReq and ICResp: what is agreed on before the first capsule.

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{CommonHeader, Direction, PduRules, PduType};
use crate::violation::{Violation, clause};

/// HDGST_ENABLE of the field DGST.
pub const DIGEST_HEADER: u8 = 1 << 0;
/// DDGST_ENABLE of the field DGST.
pub const DIGEST_DATA: u8 = 1 << 1;
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
    /// Byte 11: DGST, the digests the host asks for.
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

    /// Refuses versions and alignments that there are not.
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

    /// Refuses what there is not, and digests that were not among those `requested`.
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
