//! A namespace over NVMe/TCP as a block device: the host's side of the protocol.
//!
//! [`NvmeTcpDevice`] turns operations into commands on the I/O queues of a controller, each queue a TCP connection on this
//! reactor; [`discover`] asks a discovery controller what there is. What is one connection's business is in the core of
//! `protocols/nvme-tcp`; sockets are the reactor's.
//!
//! Invariants:
//! - Nothing that a target sends is used before it was checked; no target makes anything here panic, loop or grow.
//! - Blocks are checked where they arrive: what is handed on as [`sealblock_integrity::Sealed`] was compared with its tags
//!   here, whatever the target did before.
//! - A request is answered once: with its outcome, or with an error that says what was asked, of whom, and what was
//!   answered. All waiting has a limit in [`Options`].
//! - A block is called damaged only after a command about it alone has failed, or its tags were compared here.
//! - A Flush does not vouch for writes that were acknowledged before a connection was lost.
//!
//! Shape: one thread, so state is in cells. From below: `queue` is a connection, `session` all connections to a controller,
//! `link` the sessions that follow one another, `io` the operations, `device` the outside.

mod admin;
mod bad_block_search;
mod block_codec;
mod device;
mod error;
mod extensions;
mod in_flight;
mod io;
mod namespace_profile;
mod options;
mod queue;
mod reconnecting_session;
mod session;
mod status;

pub use device::{NvmeTcpDevice, discover};
pub use error::ConnectError;
pub use options::{ConnectionInfo, Counters, Options, PiSource};
/// Where a target listens. The port is 4420 by custom, 8009 for discovery.
pub use sealblock_runtime_reactor::net::HostPort;
pub use sealblock_runtime_reactor::net::Reconnect;
