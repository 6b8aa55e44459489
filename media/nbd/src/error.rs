//! Errors of opening an export.

use std::time::Duration;

use sealblock_protocols_nbd::client::{NegotiationError, Violation};

use crate::Address;

/// The reasons why an export could not be opened, or the exports not listed.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The host name does not resolve.
    #[error("cannot look up {host}: {source}")]
    Resolve {
        /// The host name.
        host: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// The connection cannot be made.
    #[error("cannot connect to {address}: {source}")]
    Connect {
        /// The server's address.
        address: Address,
        /// The system's error for the last address tried.
        source: std::io::Error,
    },
    /// The server did not accept the connection and negotiate within the time limit.
    #[error("{address} did not respond within {limit:?}")]
    Timeout {
        /// The server's address.
        address: Address,
        /// [`crate::Options::connect_timeout`].
        limit: Duration,
    },
    /// The connection ended during the negotiation.
    #[error("the connection to {address} ended while it was being set up: {reason}")]
    Lost {
        /// The server's address.
        address: Address,
        /// Why it ended.
        reason: String,
    },
    /// The name of the export is longer than the protocol allows.
    #[error("names of exports have at most 4096 bytes")]
    Name,
    /// The server refuses the export.
    #[error("{0}")]
    Refused(NegotiationError),
    /// The server broke the protocol.
    #[error("the server broke the protocol: {0}")]
    Violation(Violation),
    /// The export has a size or block size that cannot be used.
    #[error("the export cannot be used: {0}")]
    Unsupported(String),
    /// The connection was lost, and nothing says whether the export is still the same one
    /// ([`crate::Options::needs_identity`]).
    #[error("the server does not identify the export, so it has to be compared after a lost connection")]
    Unidentified,
    /// After a reconnect, the export has another size, block size or other abilities.
    #[error("the server now has another export: {what}")]
    Changed {
        /// What differs.
        what: String,
    },
}

impl ConnectError {
    /// True if a later attempt may succeed.
    pub fn is_transient(&self) -> bool {
        match self {
            ConnectError::Resolve { .. }
            | ConnectError::Connect { .. }
            | ConnectError::Timeout { .. }
            | ConnectError::Lost { .. } => true,
            // A server that is starting may add its exports one by one.
            ConnectError::Refused(refused) => {
                matches!(
                    refused,
                    NegotiationError::Unknown(_) | NegotiationError::Policy(_) | NegotiationError::Shutdown(_)
                )
            }
            ConnectError::Name
            | ConnectError::Violation(_)
            | ConnectError::Unsupported(_)
            | ConnectError::Unidentified
            | ConnectError::Changed { .. } => false,
        }
    }
}
