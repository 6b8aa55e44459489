//! An export of an NBD server as a block device: the client's side of the protocol.
//!
//! [`NbdDevice`] executes each block request as NBD requests on one or more connections of this reactor, over TCP or a
//! Unix socket; [`discover`] lists a server's exports. `protocols/nbd` parses and writes the bytes; the reactor owns
//! the sockets.
//!
//! Invariants:
//! - Every byte that a server sends is checked before use; no server can make this crate panic, loop or grow.
//! - A request completes once: with its outcome, or with an error that names the request and the reply. Every wait has
//!   a limit in [`Options`].
//! - A block is reported bad only after the server has named it, or has failed a read of it alone.
//! - A Flush does not make writes durable that were acknowledged before a connection was lost.
//!
//! One thread, so state is in cells. `connection` is one connection, `session` all connections to an export,
//! `remote_export` what `transport` needs to replace a lost session, `io` executes requests, `device` is the public
//! type.

mod address;
mod connection;
mod device;
mod error;
mod export_profile;
mod hole_map;
mod io;
mod options;
mod remote_export;
mod session;
mod status;

pub use address::Address;
pub use device::{ListedExport, NbdDevice, discover};
pub use error::ConnectError;
pub use options::{ConnectionInfo, Counters, Options};
pub use sealblock_runtime_reactor::net::Reconnect;
pub use sealblock_transport::{ConnectionMonitor, LostConnection, QUIESCE};
