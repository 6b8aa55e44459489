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
    /// Time from accepting a connection until it has chosen an export.
    pub negotiation: Duration,
    /// Time that requests in flight get when the server stops or the client leaves, and that a client gets to read the
    /// last bytes.
    pub drain: Duration,
}

impl Default for Limits {
    /// 64 connections with the defaults of `protocols/nbd`, so at most 2 GiB in flight; 10 s to choose an export, 5 s to
    /// drain.
    fn default() -> Limits {
        Limits {
            connections: 64,
            connection: core::Limits::default(),
            negotiation: Duration::from_secs(10),
            drain: Duration::from_secs(5),
        }
    }
}
