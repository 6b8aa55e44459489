//! Where a server listens: over TCP, or on a Unix socket of this machine.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use sealblock_runtime_reactor::net::{HostPort as Host, Stream};

/// Where a server listens.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Address {
    /// On a host. The port is 10809 by custom.
    Tcp(Host),
    /// At this path.
    Unix(PathBuf),
}

/// One address that a name resolves to.
pub(crate) enum ResolvedAddress {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

impl Address {
    /// Over TCP: this host and port.
    pub fn new(host: impl Into<String>, port: u16) -> Address {
        Address::Tcp(Host::new(host, port))
    }

    /// Resolves the name; connect to the results in this order. Returns at least one.
    pub(crate) async fn resolve(&self) -> io::Result<Vec<ResolvedAddress>> {
        Ok(match self {
            Address::Tcp(host) => host.resolve().await?.into_iter().map(ResolvedAddress::Tcp).collect(),
            Address::Unix(path) => vec![ResolvedAddress::Unix(path.clone())],
        })
    }

    /// The host name or path, for error messages.
    pub(crate) fn host(&self) -> String {
        match self {
            Address::Tcp(host) => host.bare_host().to_owned(),
            Address::Unix(path) => path.display().to_string(),
        }
    }
}

impl ResolvedAddress {
    /// Connects.
    pub(crate) async fn connect(&self) -> io::Result<Stream> {
        match self {
            ResolvedAddress::Tcp(address) => Stream::connect(*address).await,
            ResolvedAddress::Unix(path) => Stream::connect_unix(path).await,
        }
    }

    pub(crate) fn is_tcp(&self) -> bool {
        matches!(self, ResolvedAddress::Tcp(_))
    }
}

impl From<SocketAddr> for Address {
    fn from(address: SocketAddr) -> Address {
        Address::Tcp(address.into())
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp(host) => host.fmt(f),
            Address::Unix(path) => path.display().fmt(f),
        }
    }
}
