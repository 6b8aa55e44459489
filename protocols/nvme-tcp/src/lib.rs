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
mod crcs;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
pub mod host;
mod output;
pub mod pdu;
mod receive;
mod slab;
pub mod target;
pub mod violation;

pub use config::{HostConfig, Negotiated, TargetConfig};
pub use crcs::{BlockCrcs, BlockLayout};
pub use host::Host;
pub use output::{Payload, TransmitLimit};
pub use receive::ReceiveCounters;
pub use target::Target;
pub use violation::{Closed, FatalErrorStatus, Violation};

use zerocopy::FromBytes;

/// The reason in a termination request of the peer. Its data, the offending header, is not waited for.
fn terminated(header: &[u8]) -> Closed {
    let request = pdu::TermReq::ref_from_bytes(header).expect("the header of a termination request has its length");
    match request.is_well_formed() {
        true => Closed::Terminated { fes: request.fes.get(), fei: request.fei.get() },
        false => Closed::MalformedTermination,
    }
}

#[cfg(test)]
mod tests;
