//! NVMe/TCP without sockets: a target's and a host's side of a connection, bytes in and events out.
//!
//! Implements the NVM Express TCP Transport Specification, revision 1.0. [`Target`] and [`Host`] are each one connection,
//! that is, one queue. Neither reads a clock or does I/O: the caller moves buffers to and from a socket.
//!
//! ```text
//! receive_buffer() -> Buffer -> socket -> received(Buffer, n) -> next_event()
//! respond(), send_data(), submit(), ... -> has_output() -> transmit() -> socket
//! ```
//!
//! Invariants:
//! - No input panics, and none makes a side hold more memory than its configuration allows.
//! - Every fatal transport error of the peer ends the connection with the termination request that the specification
//!   names; see [`Violation`].
//! - Received data is copied at most once into the memory of its command, and checksummed at most once; data to be sent is
//!   never copied.
//!
//! The two sides share the bytes ([`pdu`]), input, output and CRCs; each has its own state and data transfer.

pub mod config;
mod connection;
mod crcs;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
pub mod host;
mod output;
pub mod pdu {
    //! The PDUs: their bytes as types, and the rules of length, offset and flags that all of them share.
    //!
    //! Every type here is a fixed header, little endian, in which any bit pattern is a value; parsing allocates nothing.
    //! [`begin`] and [`frame`] are the only way from bytes to the extent of a PDU, so no length is used unchecked. Reserved
    //! fields are ignored on receipt and zero when sent, as the Base specification asks, except where a clause calls a
    //! wrong value an error.

    mod common;
    mod types;

    pub use common::{
        CommonHeader, DIGEST_BYTES, Direction, Frame, MAX_HEADER_BYTES, PduRules, PduType, begin, flags, frame,
    };
    pub(crate) use types::{CCCID_AT, TTAG_AT, digests};
    pub use types::{
        CapsuleCmd, CapsuleResp, DIGEST_DATA, DIGEST_HEADER, IcReq, IcResp, MAX_ALIGNMENT_CODE, MAX_TERM_PLEN_BYTES,
        MIN_MAXH2CDATA_BYTES, TermReq, TransferPdu, alignment_bytes,
    };

    #[cfg(test)]
    mod tests;
}
mod receive;
mod slab;
pub mod target;
pub mod violation;

pub use config::{HostConfig, Negotiated, TargetConfig};
pub use connection::{Connection, Counters};
pub use crcs::{BlockCrcs, BlockLayout};
pub use host::Host;
pub use output::{Payload, TransmitLimit};
pub use receive::ReceiveCounters;
pub use target::Target;
pub use violation::{Closed, FatalErrorStatus, Violation};

#[cfg(test)]
mod tests;
