//! The PDUs: their bytes as types, and the rules of length, offset and flags that all of them share.
//!
//! Every type here is a fixed header, little endian, in which any bit pattern is a value; parsing allocates nothing.
//! [`begin`] and [`frame`] are the only way from bytes to the extent of a PDU, so no length is used unchecked. Reserved
//! fields are ignored on receipt and zero when sent, as the Base specification asks, except where a clause calls a
//! wrong value an error.

mod common;
mod types;

pub use common::{CommonHeader, Direction, Frame, PduRules, PduType, begin, flags, frame};
pub use types::{
    C2HData, CapsuleCmd, CapsuleResp, DIGEST_DATA, DIGEST_HEADER, H2CData, IcReq, IcResp, MAX_ALIGNMENT_CODE,
    MAX_TERM_PLEN_BYTES, MIN_MAXH2CDATA_BYTES, R2T, TermReq, alignment_bytes,
};
pub(crate) use types::{CCCID_AT, TTAG_AT};

/// Bytes of a header or data digest.
pub const DIGEST_BYTES: usize = 4;
/// The longest header, that of ICReq and ICResp.
pub const MAX_HEADER_BYTES: usize = 128;

#[cfg(test)]
mod tests;
