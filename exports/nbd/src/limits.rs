//! What clients can make a server hold, and how long it waits for them.

use std::sync::Arc;
use std::time::Duration;

use sealblock_protocols_nbd as core;
use sealblock_runtime_reactor::Budget;

/// The reserve for each connection in bytes, unless requests are smaller.
const ASIDE_BYTES: usize = 512 << 10;

/// The limits of one [`crate::Server`], over all of its cores.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Concurrent connections; further ones are closed as soon as they are accepted.
    pub connections: usize,
    /// What one client can make its connection hold.
    pub connection: core::Limits,
    /// Bytes of reads and writes in flight over all connections. Reserves 512 KiB for each, and one request of the
    /// maximum length for the connection that needs more; requests that exceed the rest wait. Raised to the reserve if
    /// it is less.
    pub total_bytes_in_flight: usize,
    /// Time from accepting a connection until it has chosen an export.
    pub negotiation: Duration,
    /// Time that a client may receive nothing of what was sent to it, in whole milliseconds. Then the connection ends.
    pub receive: Duration,
    /// Time that requests in flight get when the server stops or the client disconnects, and that a client gets to
    /// receive the last bytes.
    pub drain: Duration,
}

impl Default for Limits {
    /// 64 connections with the defaults of `protocols/nbd`, 256 MiB in flight over all; 10 s to choose an export, 1 min
    /// without receiving, 5 s to drain.
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
    /// Returns the limits, raised so that any one connection can make progress.
    pub(crate) fn clamped(mut self) -> Limits {
        let aside = self.connections.saturating_mul(self.aside_bytes()).saturating_add(self.longest_request());
        self.total_bytes_in_flight = self.total_bytes_in_flight.max(aside);
        self
    }

    /// The budget of all connections, without the one request that may exceed it.
    pub(crate) fn budget(&self) -> Arc<Budget> {
        Budget::new(self.total_bytes_in_flight - self.longest_request(), self.aside_bytes())
    }

    fn longest_request(&self) -> usize {
        Budget::whole(self.connection.payload_bytes as usize)
    }

    /// The reserve for each connection, in bytes.
    fn aside_bytes(&self) -> usize {
        Budget::whole(ASIDE_BYTES.min(self.connection.payload_bytes as usize))
    }
}
