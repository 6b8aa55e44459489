//! The common header, and the positions of digests, padding and data of a PDU.

use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, TryFromBytes, Unaligned};

use crate::violation::{Violation, clause};

/// Bytes of a header or data digest.
pub const DIGEST_BYTES: usize = 4;
/// The longest header, that of ICReq and ICResp.
pub const MAX_HEADER_BYTES: usize = 128;

/// Bits of the field FLAGS.
pub mod flags {
    /// HDGSTF: a header digest follows the header.
    pub const HEADER_DIGEST: u8 = 1 << 0;
    /// DDGSTF: a data digest follows the data.
    pub const DATA_DIGEST: u8 = 1 << 1;
    /// LAST_PDU: the last data PDU of an R2T (H2CData) or of a command (C2HData).
    pub const LAST: u8 = 1 << 2;
    /// SUCCESS: the command succeeded and no CapsuleResp follows (C2HData only).
    pub const SUCCESS: u8 = 1 << 3;
}

/// Which way a PDU goes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Direction {
    /// From the host to the controller.
    ToController,
    /// From the controller to the host.
    ToHost,
}

/// PDU type, the combined opcode of the table of PDU types (NVMe/TCP 3.3).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, TryFromBytes)]
#[repr(u8)]
pub enum PduType {
    /// Initialize Connection Request.
    IcReq = 0x00,
    /// Initialize Connection Response.
    IcResp = 0x01,
    /// Host to Controller Terminate Connection Request.
    H2CTermReq = 0x02,
    /// Controller to Host Terminate Connection Request.
    C2HTermReq = 0x03,
    /// Command Capsule.
    CapsuleCmd = 0x04,
    /// Response Capsule.
    CapsuleResp = 0x05,
    /// Host to Controller Data.
    H2CData = 0x06,
    /// Controller to Host Data.
    C2HData = 0x07,
    /// Ready to Transfer.
    R2T = 0x09,
}

impl PduType {
    /// The type with this opcode, if there is one.
    pub fn from_opcode(opcode: u8) -> Option<PduType> {
        PduType::try_read_from_bytes(&[opcode]).ok()
    }

    /// Which way it goes: bit 0 of the opcode.
    pub const fn direction(self) -> Direction {
        if self as u8 & 1 == 0 { Direction::ToController } else { Direction::ToHost }
    }

    /// The fixed length of the header, without its digest, in bytes: the only legal value of HLEN.
    pub const fn header_bytes(self) -> usize {
        match self {
            PduType::IcReq | PduType::IcResp => 128,
            PduType::CapsuleCmd => 72,
            _ => 24,
        }
    }

    /// Whether it is a termination request.
    pub const fn is_termination(self) -> bool {
        matches!(self, PduType::H2CTermReq | PduType::C2HTermReq)
    }

    /// True if negotiated digests protect it. The PDUs that open and end a connection never have any.
    pub const fn has_digests(self) -> bool {
        !matches!(self, PduType::IcReq | PduType::IcResp) && !self.is_termination()
    }
}

/// The first 8 bytes of every PDU (NVMe/TCP 3.6.2.1).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct CommonHeader {
    /// Byte 0: the opcode.
    pub pdu_type: u8,
    /// Byte 1: FLAGS.
    pub flags: u8,
    /// Byte 2: HLEN, bytes of the header without its digest.
    pub hlen: u8,
    /// Byte 3: PDO, bytes from the start of the PDU to its data.
    pub pdo: u8,
    /// Bytes 7:4: PLEN, bytes of the whole PDU.
    pub plen: U32,
}

impl CommonHeader {
    /// Bytes of the common header.
    pub const BYTES: usize = 8;

    /// The header of a PDU of `kind` that carries `data_bytes` bytes of data, under the rules of its direction.
    pub fn new(kind: PduType, rules: &PduRules, more_flags: u8, data_bytes: u32) -> CommonHeader {
        let digests = kind.has_digests();
        let header_digest = digests && rules.header_digest;
        let data_digest = digests && rules.data_digest && data_bytes > 0;
        let pdo = if data_bytes > 0 { rules.data_offset(kind) } else { 0 };
        let head_bytes = if data_bytes > 0 { pdo } else { rules.header_with_digest(kind) };
        let tail_bytes = if data_digest { DIGEST_BYTES } else { 0 };
        let flag = |set: bool, bit: u8| if set { bit } else { 0 };
        CommonHeader {
            pdu_type: kind as u8,
            flags: more_flags | flag(header_digest, flags::HEADER_DIGEST) | flag(data_digest, flags::DATA_DIGEST),
            hlen: kind.header_bytes() as u8,
            pdo: pdo as u8,
            plen: U32::new((head_bytes + tail_bytes) as u32 + data_bytes),
        }
    }
}

/// What was negotiated for the PDUs of one direction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PduRules {
    /// The direction.
    pub direction: Direction,
    /// Whether PDUs carry header digests.
    pub header_digest: bool,
    /// Whether data carries digests.
    pub data_digest: bool,
    /// The data starts at a multiple of this many bytes from the start of the PDU; 4 to 128.
    pub alignment_bytes: u8,
}

impl PduRules {
    /// The rules before the negotiation.
    pub const fn initial(direction: Direction) -> PduRules {
        PduRules { direction, header_digest: false, data_digest: false, alignment_bytes: 4 }
    }

    /// Bytes of the header of `kind` and of its digest, if it has one.
    pub const fn header_with_digest(&self, kind: PduType) -> usize {
        kind.header_bytes() + if self.header_digest && kind.has_digests() { DIGEST_BYTES } else { 0 }
    }

    /// PDO of a PDU of `kind` with data: the first aligned offset behind the header and its digest.
    pub const fn data_offset(&self, kind: PduType) -> usize {
        if kind.has_digests() {
            self.header_with_digest(kind).next_multiple_of(if self.alignment_bytes == 0 {
                1
            } else {
                self.alignment_bytes as usize
            })
        } else {
            kind.header_bytes()
        }
    }
}

/// What follows a header.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Frame {
    /// Bytes of padding before the data.
    pub pad_bytes: usize,
    /// Bytes of data.
    pub data_bytes: u32,
    /// Whether a data digest follows the data.
    pub data_digest: bool,
}

/// Checks as much of a common header as is needed to know where the header ends: type, direction and HLEN.
pub fn begin(header: &CommonHeader, rules: &PduRules) -> Result<PduType, Violation> {
    let Some(kind) = PduType::from_opcode(header.pdu_type) else {
        return Err(Violation::field(0, clause::TRANSFER_MODEL, "no PDU type has this opcode"));
    };
    if kind.direction() != rules.direction {
        return Err(Violation::sequence(clause::TRANSFER_MODEL, "a PDU of the opposite direction"));
    }
    if usize::from(header.hlen) != kind.header_bytes() {
        return Err(Violation::field(2, clause::COMMON_HEADER, "HLEN is not the header length of this type"));
    }
    Ok(kind)
}

/// Checks flags, PDO and PLEN against the rules; returns what follows the header. The header digest must have been
/// checked before.
pub fn frame(header: &CommonHeader, kind: PduType, rules: &PduRules) -> Result<Frame, Violation> {
    let has_header_digest = header.flags & flags::HEADER_DIGEST != 0;
    if kind.has_digests() && has_header_digest != rules.header_digest {
        return Err(Violation::field(1, clause::DIGESTS, "HDGSTF is not what was agreed on"));
    }
    let head_bytes = rules.header_with_digest(kind);
    let plen_bytes = header.plen.get() as usize;
    match kind {
        PduType::CapsuleCmd | PduType::H2CData | PduType::C2HData => data_frame(header, kind, rules, plen_bytes),
        PduType::H2CTermReq | PduType::C2HTermReq => {
            let data_bytes = header.plen.get().saturating_sub(head_bytes as u32);
            Ok(Frame { pad_bytes: 0, data_bytes, data_digest: false })
        }
        _ if plen_bytes != head_bytes => {
            Err(Violation::field(4, clause::COMMON_HEADER, "PLEN is not that of this type"))
        }
        _ => Ok(Frame::default()),
    }
}

fn data_frame(header: &CommonHeader, kind: PduType, rules: &PduRules, plen_bytes: usize) -> Result<Frame, Violation> {
    let head_bytes = rules.header_with_digest(kind);
    let clause = match kind {
        PduType::CapsuleCmd => clause::CAPSULE_CMD,
        PduType::H2CData => clause::H2C_DATA,
        _ => clause::C2H_DATA,
    };
    let has_data_digest = header.flags & flags::DATA_DIGEST != 0;
    if kind == PduType::CapsuleCmd && plen_bytes == head_bytes {
        // A capsule without data needs no PDO and no data digest; hosts set these fields arbitrarily.
        if has_data_digest && !rules.data_digest {
            return Err(Violation::field(1, clause::DIGESTS, "DDGSTF is set but data digests were not agreed on"));
        }
        return Ok(Frame::default());
    }
    if has_data_digest != rules.data_digest {
        return Err(Violation::field(1, clause::DIGESTS, "DDGSTF is not what was agreed on"));
    }
    let pdo = rules.data_offset(kind);
    if usize::from(header.pdo) != pdo {
        return Err(Violation::field(3, clause, "PDO is not the first aligned offset behind the header"));
    }
    let rest_bytes = if has_data_digest { DIGEST_BYTES } else { 0 };
    match plen_bytes.checked_sub(pdo + rest_bytes) {
        None | Some(0) => Err(Violation::field(4, clause, "PLEN leaves no room for data")),
        Some(data_bytes) => {
            let pad_bytes = pdo - head_bytes;
            Ok(Frame { pad_bytes, data_bytes: data_bytes as u32, data_digest: has_data_digest })
        }
    }
}
