//! The client's side of a connection: bytes in, answers out.
//!
//! ```text
//! receive_buffer() -> Buffer -> socket -> received(Buffer, n) -> next_event()
//! submit(Ask) -> transmit() -> socket
//! ```
//!
//! Invariants:
//! - Nothing that a server sends panics, and none of it makes a connection hold more memory than its [`Limits`] allow.
//! - A request is answered once, and only by a reply to it: cookies, kinds and order of chunks, offsets and lengths are
//!   checked before anything of a chunk is used. Data of a read that succeeded covers all of it, each byte once.
//! - What the server does not offer, or does not take by its block sizes, is refused here and never sent.
//! - The data of a long read lands in its own memory without a copy, and data of writes is never copied.
//!
//! Shape: `session` is the connection, `negotiate` and `options` its first half, `reply` and `chunk` the second; `ask` is
//! what goes out, `pending` what is in flight.

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
