//! The network block device (NBD) protocol without sockets: a server's side of a connection, bytes in and requests out.
//!
//! Implements `doc/proto.md` of the NBD project and its extension for extended headers. [`Server`] is one connection. It
//! neither reads a clock nor does I/O: the caller moves buffers to and from a socket.
//!
//! ```text
//! receive_buffer() -> Buffer -> socket -> received(Buffer, n) -> next_event()
//! done(), data(), fail(), ... -> transmit() -> socket
//! ```
//!
//! Invariants:
//! - No input panics, and none makes a connection hold more memory than its [`Limits`] allow.
//! - How the input is cut into pieces changes nothing of what comes out.
//! - The caller sees only requests that are in range, aligned and allowed on their export; this crate fails all others
//!   with the error that the protocol names.
//! - The data of a long write is received into its own memory without a copy, and data to be sent is never copied.
//!
//! One fixed newstyle negotiation ([`Limits`] bound it), then transmission. Headers are compact or extended, and replies
//! are simple, structured or extended, as negotiated; the caller sees no difference.

pub mod client;
mod config;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
mod input;
mod negotiate;
mod output;
mod reply;
mod request;
mod server;
mod violation;
pub mod wire;

pub use config::{Export, Limits, ServerConfig, Tls};
pub use reply::{ErrorReply, StatusDescriptor};
pub use request::{Command, Request, Ticket};
pub use server::{Event, Server};
pub use violation::{Closed, Violation};
pub use wire::ErrorCode;

#[cfg(test)]
mod tests;
