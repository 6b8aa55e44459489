//! An NBD server that spreads its connections over several cores.
//!
//! A [`Server`] owns [`Export`]s and serves the connections that its listeners accept, each on one core.
//! `protocols/nbd` turns the bytes of a connection into requests, and the device of the chosen export executes them.
//!
//! Invariants:
//! - Every request gets exactly one reply, or its connection ends.
//! - No task holds a borrow of shared state while it waits, and no input from a client makes this crate panic.
//! - [`Limits`] bounds what a client can make the server hold.
//! - A block that does not match its tags is never sent.
//! - One place chooses the error of a failed request (`translate.rs`), without a case for "everything else".
//!
//! Shape: a connection is one task on one core, so its state is in cells. It executes a request in place if the device
//! need not wait; other requests each have their own task. A device is on one core or on all, and a connection goes to
//! where the device is when its client has chosen the export (`placement.rs`).

mod connection;
mod export;
mod parts;
mod placement;
mod server;
mod shared;
mod translate;

pub use export::{Export, Limits, SetupError};
pub use sealblock_protocols_nbd::{Identity, IdentitySource};
pub use server::Server;
pub use shared::Client;
