//! An export of an NBD server as a block device: the client's side of the protocol.
//!
//! [`NbdDevice`] turns operations into requests on one or more connections of this reactor, over TCP or a Unix socket; [`discover`] asks a server
//! what it exports. What is one connection's business is in the client's core of `protocols/nbd`; sockets are the reactor's.
//!
//! Invariants:
//! - Nothing that a server sends is used before it was checked; no server makes anything here panic, loop or grow.
//! - A request is answered once: with its outcome, or with an error that says what was asked and what was answered. All
//!   waiting has a limit in [`Options`].
//! - A block is called damaged only after the server has named it, or has failed a read of it alone.
//! - A Flush does not vouch for writes that were acknowledged before a connection was lost.
//!
//! Shape: one thread, so state is in cells. From below: `connection` is a connection, `session` all connections to an export,
//! `link` the sessions that follow one another, `io` the operations, `device` the outside.

mod address;
mod bad_block_search;
mod connection;
mod device;
mod error;
mod export_profile;
mod hole_map;
mod io;
mod options;
mod reconnecting_session;
mod session;
mod status;

pub use address::Address;
pub use device::{ListedExport, NbdDevice, discover};
pub use error::ConnectError;
pub use options::{ConnectionInfo, Counters, Options};
pub use sealblock_runtime_reactor::net::Reconnect;
