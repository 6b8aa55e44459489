//! An export: a device under a name, what clients see of it, and the limits of the server.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use sealblock_block::{Ability, RequestKind};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_protocols_nbd as core;
use sealblock_runtime_reactor::Budget;

/// A device under a name. The server makes and checks its protection information, so clients see plain blocks.
#[derive(Clone)]
pub struct Export {
    pub(crate) name: String,
    description: String,
    pub(crate) device: SharedDevice,
    is_read_only: bool,
    identity: core::IdentitySource,
    /// Kept as long as a connection may use the device.
    _kept: Option<Arc<dyn Any + Send + Sync>>,
}

impl fmt::Debug for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Export").field("name", &self.name).field("device", &self.device).finish_non_exhaustive()
    }
}

/// Why an export cannot be added, removed or resized.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SetupError {
    /// Two exports have one name.
    #[error("duplicate export name {0:?}")]
    Duplicate(String),
    /// The protocol cannot describe it to clients: a name or description is longer than 4096 bytes.
    #[error("invalid export {0:?}: its name or description is longer than 4096 bytes")]
    TooLong(String),
    /// No export has this name.
    #[error("no export {0:?}")]
    Unknown(String),
}

impl Export {
    /// Returns `device` under this name. Clients that name no export use the empty name.
    pub fn new(name: impl Into<String>, device: SharedDevice) -> Export {
        let (description, identity) = (String::new(), core::IdentitySource::default());
        Export { name: name.into(), description, device, is_read_only: false, identity, _kept: None }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the same export, which keeps `kept` until the export has been removed and its last connection has ended.
    /// The owner of a clone can see by its reference count when the device may be closed.
    pub fn with_owner(mut self, kept: Arc<dyn Any + Send + Sync>) -> Export {
        self._kept = Some(kept);
        self
    }

    /// Returns the same with a description, which clients show in lists of exports.
    pub fn described(mut self, description: impl Into<String>) -> Export {
        self.description = description.into();
        self
    }

    /// Returns the same, which tells clients of sealblock what it is.
    pub fn with_identity(mut self, identity: core::IdentitySource) -> Export {
        self.identity = identity;
        self
    }

    /// Returns the same, read-only for clients.
    pub fn read_only(mut self) -> Export {
        self.is_read_only = true;
        self
    }

    /// Returns the same with the new size of its device.
    pub(crate) fn resized(&self, device: SharedDevice) -> Export {
        Export { device, ..self.clone() }
    }

    /// True if both are one export, before and after a resize.
    pub(crate) fn is_same(&self, other: &Export) -> bool {
        self.name == other.name && self.device.is_same(&other.device)
    }

    /// Returns what clients see.
    pub(crate) fn advertised(&self) -> core::Export {
        let (geometry, abilities) = (self.device.geometry(), self.device.abilities());
        let is_there = |kind| abilities.of(kind) != Ability::Absent;
        core::Export {
            name: self.name.clone(),
            description: self.description.clone(),
            size_bytes: geometry.capacity_bytes(),
            // The server itself reads, changes and writes parts of blocks; clients learn that larger requests are
            // better.
            block_bytes: 1,
            writable: !self.is_read_only && abilities.writable,
            trim: is_there(RequestKind::Discard),
            write_zeroes: is_there(RequestKind::WriteZeroes),
            older: abilities.freshness.bits(),
            identity: self.identity.clone(),
        }
    }
}

/// The reserve for each connection in bytes, unless requests are smaller.
const ASIDE_BYTES: usize = 512 << 10;

/// The limits of one [`crate::Server`], over all of its cores.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Concurrent connections; further ones are closed as soon as they are accepted.
    pub connections: usize,
    /// What one client can make its connection hold in memory.
    pub connection: core::Limits,
    /// Bytes of reads and writes in flight over all connections. Each connection has a reserve of 512 KiB, and there is
    /// one request of the maximum length for a connection that needs more; requests beyond that wait. Raised to the
    /// reserve if it is less.
    pub total_bytes_in_flight: usize,
    /// Time from accepting a connection until it has chosen an export.
    pub negotiation: Duration,
    /// How long a client may receive nothing of what was sent to it, in whole milliseconds. Then its connection ends.
    pub receive: Duration,
    /// Time that requests in flight get when the server stops or the client disconnects, and that a client gets to
    /// receive the last bytes.
    pub drain: Duration,
}

impl Default for Limits {
    /// 64 connections with the defaults of `protocols/nbd`, and 256 MiB in flight over all of them; 10 s to choose an
    /// export, 1 min without receiving, 5 s to drain.
    fn default() -> Limits {
        Limits {
            connections: 64,
            connection: core::Limits::default(),
            total_bytes_in_flight: 256 << 20,
            negotiation: Duration::from_secs(10),
            receive: Duration::from_secs(60),
            drain: Duration::from_secs(5),
        }
    }
}

impl Limits {
    /// Returns the limits, raised so that every connection can make progress.
    pub(crate) fn clamped(mut self) -> Limits {
        let aside = self.connections.saturating_mul(self.aside_bytes()).saturating_add(self.longest_request());
        self.total_bytes_in_flight = self.total_bytes_in_flight.max(aside);
        self
    }

    /// The budget of all connections, not counting the one request that may exceed it.
    pub(crate) fn budget(&self) -> Arc<Budget> {
        Budget::new(self.total_bytes_in_flight - self.longest_request(), self.aside_bytes())
    }

    fn longest_request(&self) -> usize {
        Budget::round_up(self.connection.payload_bytes as usize)
    }

    /// The reserve for each connection, in bytes.
    pub(crate) fn aside_bytes(&self) -> usize {
        Budget::round_up(ASIDE_BYTES.min(self.connection.payload_bytes as usize))
    }
}
