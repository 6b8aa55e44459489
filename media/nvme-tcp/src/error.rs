//! Why a namespace could not be reached, and the way a queue ends.

use std::fmt;
use std::time::Duration;

use sealblock_protocols_nvme::Status;
use sealblock_protocols_nvme::identify::NamespaceFormatError;

use crate::HostPort;

/// Why a namespace could not be opened, or a discovery log not read.
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
    /// No TCP connection.
    #[error("cannot connect to {address}: {source}")]
    Connect {
        /// Where.
        address: HostPort,
        /// What the system said of the last address tried.
        source: std::io::Error,
    },
    /// It took too long.
    #[error("{address} did not answer within {limit:?}")]
    Timeout {
        /// Who.
        address: HostPort,
        /// [`crate::Options::connect_timeout`].
        limit: Duration,
    },
    /// The connection ended while it was being set up.
    #[error("the connection to {address} ended while it was being set up: {reason}")]
    Lost {
        /// Who.
        address: HostPort,
        /// Why.
        reason: String,
    },
    /// The target refused a command on the way.
    #[error("the target refused {what}: {status}{detail}")]
    Refused {
        /// Which command.
        what: &'static str,
        /// Its answer.
        status: Status,
        /// What the answer says besides.
        detail: String,
    },
    /// The target's answers make no sense, or it is none of the kind that was expected.
    #[error("the target answered {what} with {why}")]
    Unexpected {
        /// Which question.
        what: &'static str,
        /// What is wrong.
        why: String,
    },
    /// The target did not agree to a digest that was asked for.
    #[error("the target does not use {0} digests")]
    NoDigest(&'static str),
    /// It wants a host to prove who it is, which this one cannot.
    #[error("the target demands authentication or a secure channel")]
    AuthenticationRequired,
    /// The namespace asked for is not among the active ones.
    #[error("there is no namespace {wanted}; the active ones are {}", List(.active))]
    NoNamespace {
        /// NSID asked for.
        wanted: u32,
        /// NSIDs there are.
        active: Vec<u32>,
    },
    /// None was asked for, and there is not just one.
    #[error("which namespace? The active ones are {}", List(.active))]
    WhichNamespace {
        /// NSIDs there are; possibly none.
        active: Vec<u32>,
    },
    /// The format of the namespace is none that can be used.
    #[error("namespace {nsid} cannot be used: {source}")]
    Format {
        /// Its NSID.
        nsid: u32,
        /// Why.
        source: NamespaceFormatError,
    },
    /// The namespace has something that cannot be used over TCP or by this host.
    #[error("namespace {nsid} cannot be used: {why}")]
    Unsupported {
        /// Its NSID.
        nsid: u32,
        /// What.
        why: String,
    },
    /// Something is there, but not the namespace that was open before.
    #[error("what answers is not the namespace that was open: {what}")]
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
            ConnectError::Refused { status, .. } => !status.do_not_retry(),
            // While a target starts, its namespaces may come one by one.
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

/// Namespace identifiers for people.
struct List<'a>(&'a [u32]);

impl fmt::Display for List<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        /// Identifiers shown at most.
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

/// A queue whose connection is over; commands in flight may or may not have been carried out.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct ConnectionLost(pub(crate) std::rc::Rc<str>);
