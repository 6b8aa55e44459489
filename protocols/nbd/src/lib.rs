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

pub mod client {
    //! The client's side of a connection: bytes in, replies out.
    //!
    //! ```text
    //! receive_buffer() -> Buffer -> socket -> received(Buffer, n) -> next_event()
    //! submit(ClientRequest) -> transmit() -> socket
    //! ```
    //!
    //! Invariants:
    //! - No input panics, and none makes a connection hold more memory than its [`Limits`] allow.
    //! - A request completes once, and only by a reply to it: cookies, types and order of chunks, offsets and lengths are
    //!   checked before a chunk is used. The data of a successful read covers all of it, each byte once.
    //! - A request that the server does not support, or that violates its block sizes, is refused and never sent.
    //! - The data of a long read is received into its own memory without a copy, and data of writes is never copied.
    //!
    //! `session` is the connection, `negotiate` and `export_info` its negotiation; `request` writes requests, `reply` reads
    //! replies chunk by `chunk`, and `pending` is a request in flight.

    mod chunk;
    mod config;
    mod export_info;
    mod negotiate;
    mod pending;
    mod reply;
    mod request;
    mod session;
    mod violation;

    pub use crate::reply::ReplyStyle;
    pub use config::{Config, Goal, Limits};
    pub use export_info::{BlockSizes, ExportInfo, ListedExport};
    pub use pending::{CompletedRequest, Reply, ServerError};
    pub use request::{ClientRequest, SubmitError};
    pub use session::{Client, Event};
    pub use violation::{Closed, NegotiationError, Violation};
}
mod config;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
mod identity;
mod input;
mod negotiate;
mod output;
mod reply;
mod request;
mod server;
mod session_name;
mod violation;
pub mod wire;

pub use config::{Export, Limits, ServerConfig};
pub use identity::{Identity, IdentitySource};
pub use reply::{ErrorReply, StatusDescriptor};
pub use request::{Command, Request, Ticket};
pub use server::{Event, Server};
pub use session_name::SessionName;
pub use violation::{Closed, Violation};
pub use wire::ErrorCode;

#[cfg(test)]
mod tests;
