//! A namespace over NVMe/TCP as a block device: the host's side of the protocol.
//!
//! [`NvmeTcpDevice`] executes each block request as commands on the I/O queues of a controller, each queue a TCP
//! connection on this reactor; [`discover`] reads the discovery log. `protocols/nvme-tcp` parses and writes the PDUs;
//! the reactor owns the sockets.
//!
//! Invariants:
//! - Every byte that a target sends is checked before use; no target can make this crate panic, loop or grow.
//! - Blocks are verified on arrival: this crate compares a [`sealblock_integrity::Sealed`] with its tags, whatever
//!   the target checked before.
//! - A request completes once: with its outcome, or with an error that names the command, its namespace and queue, and
//!   the status. Every wait has a limit in [`Options`].
//! - A block is reported bad only after a command for it alone has failed, or this crate has compared its tags.
//! - A Flush does not make writes durable that were acknowledged before a connection was lost.
//!
//! One thread, so state is in cells. `queue` is one connection, `session` all connections to a controller,
//! `remote_namespace` what `transport` needs to replace a lost session, `commands` executes single commands, of which
//! `media/nvme` makes block requests, `device` is the public type.

mod admin;
mod block_codec;
mod commands;
mod damage;
mod device;
mod error;
mod extensions;
mod fused;
mod options;
mod queue;
mod remote_namespace;
mod session;

pub use damage::KnownDamage;
pub use device::{NvmeTcpDevice, discover};
pub use error::ConnectError;
pub use options::{ConnectionInfo, Counters, MAX_IDENTITIES, Options};
pub use sealblock_media_nvme::PiSource;
/// Where a target listens. The port is 4420 by custom, 8009 for discovery.
pub use sealblock_runtime_reactor::net::HostPort;
pub use sealblock_runtime_reactor::net::Reconnect;
pub use sealblock_transport::{ConnectionMonitor, ListedIdentities, LostConnection};
