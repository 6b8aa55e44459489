//! What clients can make a server hold, and how long it waits for them.

use std::time::Duration;

use sealblock_protocols_nbd as core;

/// The limits of one [`crate::Server`], over all of its cores.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections at once; further ones are closed as soon as they are accepted.
    pub connections: usize,
    /// What one client can make its connection hold.
    pub connection: core::Limits,
    /// Bytes of reads and writes in flight over all connections. Requests that exceed it wait, but a connection without any
    /// in flight may always have one. Raised to what one connection may have if it is less.
    pub total_bytes_in_flight: usize,
    /// Time from accepting a connection until it has chosen an export.
    pub negotiation: Duration,
    /// Time that requests in flight get when the server stops or the client leaves, and that a client gets to read the
    /// last bytes.
    pub drain: Duration,
}

impl Default for Limits {
    /// 64 connections with the defaults of `protocols/nbd`, 256 MiB in flight over all; 10 s to choose an export, 5 s to drain.
    fn default() -> Limits {
        Limits {
            connections: 64,
            connection: core::Limits::default(),
            total_bytes_in_flight: 256 << 20,
            negotiation: Duration::from_secs(10),
            drain: Duration::from_secs(5),
        }
    }
}

impl Limits {
    /// The same limits, such that no connection may have more than all together.
    pub(crate) fn legal(mut self) -> Limits {
        self.total_bytes_in_flight = self.total_bytes_in_flight.max(self.connection.bytes_in_flight);
        self
    }
}
