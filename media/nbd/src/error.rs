//! Why an export could not be reached, and the way a connection ends.

use std::rc::Rc;
use std::time::Duration;

use sealblock_protocols_nbd::client::{NegotiationError, SubmitError, Violation};

use crate::Address;

/// Why an export could not be opened, or the exports not listed.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The name of the host says no address.
    #[error("cannot look up {host}: {source}")]
    Resolve {
        /// The name.
        host: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// No connection.
    #[error("cannot connect to {address}: {source}")]
    Connect {
        /// Where.
        address: Address,
        /// What the system said of the last address tried.
        source: std::io::Error,
    },
    /// It took too long.
    #[error("{address} did not answer within {limit:?}")]
    Timeout {
        /// Who.
        address: Address,
        /// [`crate::Options::connect_timeout`].
        limit: Duration,
    },
    /// The connection ended while it was being set up.
    #[error("the connection to {address} ended while it was being set up: {reason}")]
    Lost {
        /// Who.
        address: Address,
        /// Why.
        reason: String,
    },
    /// The name of the export is longer than the protocol allows.
    #[error("names of exports have at most 4096 bytes")]
    Name,
    /// The server does not go on.
    #[error("{0}")]
    Refused(NegotiationError),
    /// The server broke the protocol.
    #[error("the server broke the protocol: {0}")]
    Violation(Violation),
    /// The export's shape is none that can be used.
    #[error("the export cannot be used: {0}")]
    Unsupported(String),
    /// Something is there, but not the export that was open before.
    #[error("what answers is not the export that was open: {what}")]
    Changed {
        /// What differs.
        what: String,
    },
}

impl ConnectError {
    /// Whether trying again later may help.
    pub fn is_transient(&self) -> bool {
        match self {
            ConnectError::Resolve { .. }
            | ConnectError::Connect { .. }
            | ConnectError::Timeout { .. }
            | ConnectError::Lost { .. } => true,
            // While a server starts, its exports may come one by one.
            ConnectError::Refused(refused) => {
                matches!(
                    refused,
                    NegotiationError::Unknown(_) | NegotiationError::Policy(_) | NegotiationError::Shutdown(_)
                )
            }
            ConnectError::Name
            | ConnectError::Violation(_)
            | ConnectError::Unsupported(_)
            | ConnectError::Changed { .. } => false,
        }
    }
}

/// A connection that is over; requests in flight may or may not have been carried out.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct ConnectionLost(pub(crate) Rc<str>);

/// Why a request has no answer.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum RequestError {
    /// Its connection is over.
    #[error(transparent)]
    Lost(#[from] ConnectionLost),
    /// It was not sent.
    #[error(transparent)]
    NotSent(#[from] SubmitError),
}
