//! Errors of opening a namespace.

use std::fmt;
use std::time::Duration;

use sealblock_media_nvme::NamespaceError;
use sealblock_protocols_nvme::Status;
use sealblock_protocols_nvme::identify::NamespaceFormatError;

use crate::HostPort;

/// The reasons why a namespace could not be opened, or a discovery log not read.
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
    /// The TCP connection cannot be made.
    #[error("cannot connect to {address}: {source}")]
    Connect {
        /// The target's address.
        address: HostPort,
        /// The system's error for the last address tried.
        source: std::io::Error,
    },
    /// The controller is not ready within the time limit.
    #[error("{address} did not respond within {limit:?}")]
    Timeout {
        /// The target's address.
        address: HostPort,
        /// [`crate::Options::connect_timeout`].
        limit: Duration,
    },
    /// The connection ended before the controller was ready.
    #[error("the connection to {address} ended while it was being set up: {reason}")]
    Lost {
        /// The target's address.
        address: HostPort,
        /// Why it ended.
        reason: String,
    },
    /// The target refused a command.
    #[error("the target refused {what}: {status}{detail}")]
    Refused {
        /// The command.
        what: &'static str,
        /// Its status.
        status: Status,
        /// Further detail from its completion.
        detail: String,
    },
    /// A completion or a page of the target is inconsistent, or the controller is of another type than expected.
    #[error("the target answered {what} with {why}")]
    Unexpected {
        /// The command or page.
        what: &'static str,
        /// What is wrong.
        why: String,
    },
    /// The target does not enable a requested digest.
    #[error("the target does not use {0} digests")]
    NoDigest(&'static str),
    /// The target requires authentication or a secure channel, which this host does not support.
    #[error("the target requires authentication or a secure channel")]
    AuthenticationRequired,
    /// The requested namespace is not among the active ones.
    #[error("there is no namespace {wanted}; the active ones are {}", List(.active))]
    NoNamespace {
        /// The requested NSID.
        wanted: u32,
        /// The active NSIDs.
        active: Vec<u32>,
    },
    /// No namespace was requested, and there is not exactly one.
    #[error("give one of the active namespaces: {}", List(.active))]
    WhichNamespace {
        /// The active NSIDs; possibly none.
        active: Vec<u32>,
    },
    /// The namespace's format is not supported.
    #[error("namespace {nsid} cannot be used: {source}")]
    Format {
        /// Its NSID.
        nsid: u32,
        /// Why.
        source: NamespaceFormatError,
    },
    /// The namespace has a property that TCP or this host does not support.
    #[error("namespace {nsid} cannot be used: {why}")]
    Unsupported {
        /// Its NSID.
        nsid: u32,
        /// What.
        why: String,
    },
    /// After a reconnect, the namespace has another identifier, size, format or serial number.
    #[error("the target now has another namespace: {what}")]
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
            ConnectError::Refused { status, .. } => !status.do_not_retry(),
            // A target that is starting may add its namespaces one by one.
            ConnectError::NoNamespace { .. } | ConnectError::WhichNamespace { .. } => true,
            ConnectError::Unexpected { .. }
            | ConnectError::NoDigest(_)
            | ConnectError::AuthenticationRequired
            | ConnectError::Format { .. }
            | ConnectError::Unsupported { .. }
            | ConnectError::Changed { .. } => false,
        }
    }
}

impl From<NamespaceError> for ConnectError {
    fn from(error: NamespaceError) -> ConnectError {
        match error {
            NamespaceError::Unexpected { what, why } => ConnectError::Unexpected { what, why },
            NamespaceError::Format { nsid, source } => ConnectError::Format { nsid, source },
            NamespaceError::Unsupported { nsid, why } => ConnectError::Unsupported { nsid, why },
            NamespaceError::Changed { what } => ConnectError::Changed { what },
        }
    }
}

/// Namespace identifiers as text.
struct List<'a>(&'a [u32]);

impl fmt::Display for List<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        /// The most identifiers shown.
        const SHOWN: usize = 16;
        if self.0.is_empty() {
            return f.write_str("none");
        }
        for (i, nsid) in self.0.iter().take(SHOWN).enumerate() {
            write!(f, "{}{nsid}", if i > 0 { ", " } else { "" })?;
        }
        if self.0.len() > SHOWN { write!(f, " and {} more", self.0.len() - SHOWN) } else { Ok(()) }
    }
}
