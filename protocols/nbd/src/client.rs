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
//! replies, and `pending` is a request in flight.

mod config;
mod export_info;
mod negotiate;
mod pending;
mod reply;
mod request;
mod session;
mod violation;

pub use config::{Config, Goal, Limits};
pub use export_info::{BlockSizes, ExportInfo, ListedExport, ReplyStyle};
pub use pending::{CompletedRequest, Reply, ServerError};
pub use request::{ClientRequest, SubmitError};
pub use session::{Client, Event};
pub use violation::{Closed, NegotiationError, Violation};
