//! H2CData, C2HData and R2T: parts of a Command Data Buffer, and the request for one.

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{CommonHeader, Frame, PduRules, PduType, flags};
use crate::violation::{Violation, clause};

macro_rules! transfer_header {
    (
        $(#[$doc:meta])* $name:ident, $tag:ident, $tag_doc:literal,
        $offset:ident, $offset_doc:literal, $length:ident, $length_doc:literal
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
        #[repr(C)]
        pub struct $name {
            /// The common header.
            pub common: CommonHeader,
            /// Bytes 9:8: CCCID, identifier of the command.
            pub cccid: U16,
            #[doc = $tag_doc]
            pub $tag: U16,
            #[doc = $offset_doc]
            pub $offset: U32,
            #[doc = $length_doc]
            pub $length: U32,
            /// Bytes 23:20: reserved.
            pub reserved: U32,
        }
    };
}

transfer_header!(
    /// Host to Controller Data (NVMe/TCP 3.6.2.8).
    H2CData,
    ttag,
    "Bytes 11:10: TTAG, the tag of the R2T that is answered.",
    datao,
    "Bytes 15:12: DATAO, offset in the Command Data Buffer, in bytes.",
    datal,
    "Bytes 19:16: DATAL, bytes of data."
);
transfer_header!(
    /// Controller to Host Data (NVMe/TCP 3.6.2.9).
    C2HData,
    reserved_tag,
    "Bytes 11:10: reserved.",
    datao,
    "Bytes 15:12: DATAO, offset in the Command Data Buffer, in bytes.",
    datal,
    "Bytes 19:16: DATAL, bytes of data."
);
transfer_header!(
    /// Ready to Transfer (NVMe/TCP 3.6.2.10).
    R2T,
    ttag,
    "Bytes 11:10: TTAG, a tag that the H2CData PDUs repeat.",
    r2to,
    "Bytes 15:12: R2TO, offset in the Command Data Buffer, in bytes.",
    r2tl,
    "Bytes 19:16: R2TL, bytes asked for."
);

/// Offset of CCCID from the start of the PDU, in bytes.
pub(crate) const CCCID_AT: u32 = 8;
/// Offset of TTAG.
pub(crate) const TTAG_AT: u32 = 10;
/// Offset of DATAO and R2TO.
pub(crate) const OFFSET_AT: u32 = 12;
/// Offset of DATAL and R2TL.
pub(crate) const LENGTH_AT: u32 = 16;

/// Checks what one PDU by itself tells about a range: dwords throughout, and not empty.
fn check_range(offset: u32, length: u32, clause: &'static str) -> Result<(), Violation> {
    if !offset.is_multiple_of(4) {
        return Err(Violation::field(OFFSET_AT, clause, "the data offset is not a number of dwords"));
    }
    if length == 0 || !length.is_multiple_of(4) {
        return Err(Violation::field(LENGTH_AT, clause, "the data length is not a positive number of dwords"));
    }
    Ok(())
}

fn check_length(length: u32, frame: &Frame, clause: &'static str) -> Result<(), Violation> {
    if length != frame.data_bytes {
        return Err(Violation::field(4, clause, "PLEN does not fit PDO and DATAL"));
    }
    Ok(())
}

impl H2CData {
    /// A header for `datal` bytes of data at `datao`.
    pub fn new(rules: &PduRules, last: bool, cccid: u16, ttag: u16, datao: u32, datal: u32) -> H2CData {
        let more_flags = if last { flags::LAST } else { 0 };
        H2CData {
            common: CommonHeader::new(PduType::H2CData, rules, more_flags, datal),
            cccid: U16::new(cccid),
            ttag: U16::new(ttag),
            datao: U32::new(datao),
            datal: U32::new(datal),
            reserved: U32::ZERO,
        }
    }

    /// Whether LAST_PDU is set.
    pub fn is_last(&self) -> bool {
        self.common.flags & flags::LAST != 0
    }

    /// Checks what this PDU tells by itself.
    pub fn check(&self, frame: &Frame) -> Result<(), Violation> {
        check_length(self.datal.get(), frame, clause::H2C_DATA)?;
        check_range(self.datao.get(), self.datal.get(), clause::H2C_DATA)
    }
}

impl C2HData {
    /// A header for `datal` bytes of data at `datao`; `more_flags` of [`flags::LAST`] and [`flags::SUCCESS`].
    pub fn new(rules: &PduRules, more_flags: u8, cccid: u16, datao: u32, datal: u32) -> C2HData {
        C2HData {
            common: CommonHeader::new(PduType::C2HData, rules, more_flags, datal),
            cccid: U16::new(cccid),
            reserved_tag: U16::ZERO,
            datao: U32::new(datao),
            datal: U32::new(datal),
            reserved: U32::ZERO,
        }
    }

    /// Whether LAST_PDU is set.
    pub fn is_last(&self) -> bool {
        self.common.flags & flags::LAST != 0
    }

    /// Whether SUCCESS is set.
    pub fn is_success(&self) -> bool {
        self.common.flags & flags::SUCCESS != 0
    }

    /// Checks what this PDU tells by itself.
    pub fn check(&self, frame: &Frame) -> Result<(), Violation> {
        if self.is_success() && !self.is_last() {
            return Err(Violation::field(1, clause::C2H, "SUCCESS without LAST_PDU"));
        }
        check_length(self.datal.get(), frame, clause::C2H_DATA)?;
        check_range(self.datao.get(), self.datal.get(), clause::C2H_DATA)
    }
}

impl R2T {
    /// A request for `r2tl` bytes at `r2to`.
    pub fn new(rules: &PduRules, cccid: u16, ttag: u16, r2to: u32, r2tl: u32) -> R2T {
        R2T {
            common: CommonHeader::new(PduType::R2T, rules, 0, 0),
            cccid: U16::new(cccid),
            ttag: U16::new(ttag),
            r2to: U32::new(r2to),
            r2tl: U32::new(r2tl),
            reserved: U32::ZERO,
        }
    }

    /// Checks what this PDU tells by itself.
    pub fn check(&self) -> Result<(), Violation> {
        check_range(self.r2to.get(), self.r2tl.get(), clause::R2T)
    }
}
