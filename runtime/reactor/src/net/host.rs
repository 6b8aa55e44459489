//! Addresses as people write them, and the ones that sockets take: names are looked up on a thread, because the system's
//! resolver blocks.

use std::cell::Cell;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::rc::Rc;

use crate::{CoreAddress, CoreLocal, Notify};

/// Where somebody listens.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct HostPort {
    /// A name, an IPv4 address, or an IPv6 address (brackets are allowed). Names are looked up on a thread of their own.
    pub host: String,
    /// The TCP port.
    pub port: u16,
}

/// What the thread brings, and the bell that tells of it.
#[derive(Default)]
struct Desk {
    found: Cell<Option<io::Result<Vec<SocketAddr>>>>,
    bell: Notify,
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

    /// The addresses of the host, in the order in which they are to be tried; at least one. How long that takes is the
    /// system's business: whoever has a limit drops the future, and the thread's answer is thrown away.
    ///
    /// # Errors
    /// What the system says of a name that has no address, or of a thread that cannot be started.
    ///
    /// # Panics
    /// Outside a reactor, where a name is to be looked up.
    pub async fn resolve(&self) -> io::Result<Vec<SocketAddr>> {
        let (host, port) = (self.bare_host().to_owned(), self.port);
        if let Ok(literal) = host.parse::<IpAddr>() {
            return Ok(vec![SocketAddr::new(literal, port)]);
        }
        let desk = Rc::new(Desk::default());
        let (theirs, home) = (CoreLocal::new(Rc::clone(&desk)), CoreAddress::here());
        // Scoped IPv6 addresses (with %) are literals that only the system's resolver reads.
        std::thread::Builder::new().name("resolve".to_owned()).spawn(move || {
            let found = (host.as_str(), port).to_socket_addrs().map(Iterator::collect);
            // Whoever asked may be gone, and its reactor with it.
            let _ = home.send(move || {
                if let Some(desk) = theirs.get() {
                    desk.found.set(Some(found));
                    desk.bell.ring();
                }
            });
        })?;
        desk.bell.wait().await;
        match desk.found.take() {
            Some(Ok(addresses)) if !addresses.is_empty() => Ok(addresses),
            Some(Err(error)) => Err(error),
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
