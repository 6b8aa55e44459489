//! Host names and ports, resolved to socket addresses on a thread, because the system's resolver blocks.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};

use futures_channel::oneshot;

/// The address of a listener: host and port.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct HostPort {
    /// A name, an IPv4 address, or an IPv6 address (brackets are allowed). Names are looked up on a thread of their
    /// own.
    pub host: String,
    /// The TCP port.
    pub port: u16,
}

impl HostPort {
    /// The address of this host and port.
    pub fn new(host: impl Into<String>, port: u16) -> HostPort {
        HostPort { host: host.into(), port }
    }

    /// The host without brackets.
    pub fn bare_host(&self) -> &str {
        self.host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(&self.host)
    }

    /// The addresses of the host, in the order in which to try them; at least one. The system
    /// limits the time; a caller with a shorter limit drops the future, and the thread's result is discarded.
    ///
    /// # Errors
    /// When the name has no address, or the thread cannot be started.
    pub async fn resolve(&self) -> io::Result<Vec<SocketAddr>> {
        let (host, port) = (self.bare_host().to_owned(), self.port);
        if let Ok(literal) = host.parse::<IpAddr>() {
            return Ok(vec![SocketAddr::new(literal, port)]);
        }
        let (found, result) = oneshot::channel();
        // Scoped IPv6 addresses (with %) are literals that only the system's resolver reads.
        std::thread::Builder::new().name("resolve".to_owned()).spawn(move || {
            // The caller may be gone.
            let _ = found.send((host.as_str(), port).to_socket_addrs().map(Iterator::collect::<Vec<_>>));
        })?;
        match result.await {
            Ok(Ok(addresses)) if !addresses.is_empty() => Ok(addresses),
            Ok(Err(error)) => Err(error),
            _ => Err(io::Error::new(io::ErrorKind::NotFound, "the name has no address")),
        }
    }
}

impl From<SocketAddr> for HostPort {
    fn from(address: SocketAddr) -> HostPort {
        HostPort { host: address.ip().to_string(), port: address.port() }
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.bare_host() {
            host if host.contains(':') => write!(f, "[{host}]:{}", self.port),
            host => write!(f, "{host}:{}", self.port),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_show_as_uris_have_them() {
        assert_eq!(HostPort::new("::1", 4420).to_string(), "[::1]:4420");
        assert_eq!(HostPort::new("[::1]", 10809).to_string(), "[::1]:10809");
        assert_eq!(HostPort::new("target.example", 8009).to_string(), "target.example:8009");
    }
}
