//! An NBD server, spread over the cores it is given.
//!
//! A [`Server`] owns [`Export`]s and serves the connections that its listeners accept, each on one core. Bytes of a
//! connection go through the core of `protocols/nbd`, its requests to the device of the export that it chose.
//!
//! Invariants:
//! - Every request is answered once, or its connection ends.
//! - No borrow of shared state is held while a task waits, and no client's input makes anything here panic.
//! - What a client can make the server hold is bounded by [`Limits`].
//! - Blocks that do not match their tags are never sent.
//! - An error is chosen in one place (`refusal.rs`), without a case for "everything else".
//!
//! Shape: a connection is one task on one core, so that its state is in cells. It carries requests out in place where the
//! device has nothing to wait for; others have a task each. A device stays on the core that opened it, and each connection attaches to it once.

mod connection;
mod export;
mod limits;
mod refusal;
mod requests;
mod server;
mod shared;
mod signal;
mod status;
mod translate;

pub use export::{Export, SetupError};
pub use limits::Limits;
pub use server::Server;
pub use shared::Client;
