//! The PDUs: their bytes as types, and the rules of length, offset and flags that all of them share.
//!
//! Every type here is a fixed header, little endian, in which any bit pattern is a value; parsing allocates nothing.
//! [`begin`] and [`frame`] are the only way from bytes to the extent of a PDU, so no length is used unchecked. Reserved
//! fields are ignored on receipt and zero when sent, as the Base specification asks, except where a clause calls a
//! wrong value an error.

mod capsule;
mod common;
mod connect;
mod data;
mod terminate;

pub use capsule::{CapsuleCmd, CapsuleResp};
pub use common::{CommonHeader, Direction, Frame, PduRules, PduType, begin, flags, frame};
pub use connect::{
    DIGEST_DATA, DIGEST_HEADER, IcReq, IcResp, MAX_ALIGNMENT_CODE, MIN_MAXH2CDATA_BYTES, alignment_bytes,
};
pub use data::{C2HData, H2CData, R2T};
pub(crate) use data::{CCCID_AT, TTAG_AT};
pub use terminate::{MAX_TERM_PLEN_BYTES, TermReq};

/// Bytes of a header or data digest.
pub const DIGEST_BYTES: usize = 4;
/// The longest header, that of ICReq and ICResp.
pub const MAX_HEADER_BYTES: usize = 128;

#[cfg(test)]
mod tests;
