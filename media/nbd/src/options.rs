//! How an export is used: every limit by its name.

use std::time::Duration;

use sealblock_runtime_reactor::net::Reconnect;

/// How an export is used.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Options {
    /// Connections, all on this reactor; at least 1. More than one only where the server says that several see each
    /// other's writes and flushes (CAN_MULTI_CONN).
    pub connections: u16,
    /// Requests in flight on one connection; at least 1. Further ones wait in order.
    pub queue_depth: u16,
    /// The most bytes of data in one request, if the server's largest block does not say less; at least one block, and at
    /// most 32 MiB.
    pub transfer_bytes: u32,
    /// The most bytes that one request zeroes or gives up, so that it is answered in time.
    pub zero_bytes: u32,
    /// Time for names, connections and the negotiation, of one attempt.
    pub connect_timeout: Duration,
    /// Time for one request; then the connection is reset. Noticed up to an eighth of it late.
    pub request_timeout: Duration,
    /// Connections that one request may lose before it fails, so that a request which kills its server stops doing so.
    pub max_connection_losses: u8,
    /// What happens when a connection is lost.
    pub reconnect: Reconnect,
}

impl Default for Options {
    /// One connection of 64 requests, 1 MiB of data and 256 MiB of zeroes in one, 10 s to connect, 30 s for a request, 4
    /// losses.
    fn default() -> Options {
        Options {
            connections: 1,
            queue_depth: 64,
            transfer_bytes: 1 << 20,
            zero_bytes: 256 << 20,
            connect_timeout: Duration::from_secs(10),
            request_timeout: Duration::from_secs(30),
            max_connection_losses: 4,
            reconnect: Reconnect::default(),
        }
    }
}
