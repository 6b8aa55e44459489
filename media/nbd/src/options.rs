//! Where an export is, and how it is used: every limit by its name.

use std::fmt;
use std::time::Duration;

/// Where a server listens.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Address {
    /// A name, an IPv4 address, or an IPv6 address (brackets are allowed). Names are looked up on a thread of their own.
    pub host: String,
    /// The TCP port; 10809 by custom.
    pub port: u16,
}

impl Address {
    /// The address of this host and port.
    pub fn new(host: impl Into<String>, port: u16) -> Address {
        Address { host: host.into(), port }
    }

    /// The host without brackets.
    pub(crate) fn bare_host(&self) -> &str {
        self.host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(&self.host)
    }
}

impl From<std::net::SocketAddr> for Address {
    fn from(address: std::net::SocketAddr) -> Address {
        Address { host: address.ip().to_string(), port: address.port() }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.bare_host() {
            host if host.contains(':') => write!(f, "[{host}]:{}", self.port),
            host => write!(f, "{host}:{}", self.port),
        }
    }
}

/// How a lost connection is set up again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reconnect {
    /// Attempts after which the device is given up for good; 0 gives it up with its first loss.
    pub attempts: u32,
    /// Time after which it is given up, counted from the loss.
    pub total: Duration,
    /// Pause before the second attempt; the first is made at once. Doubles with each further one.
    pub first_delay: Duration,
    /// The longest pause.
    pub max_delay: Duration,
}

impl Default for Reconnect {
    /// 100 attempts within 60 s, pauses from 100 ms to 5 s.
    fn default() -> Reconnect {
        Reconnect {
            attempts: 100,
            total: Duration::from_secs(60),
            first_delay: Duration::from_millis(100),
            max_delay: Duration::from_secs(5),
        }
    }
}

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
    pub losses: u8,
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
            losses: 4,
            reconnect: Reconnect::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_show_as_uris_have_them() {
        assert_eq!(Address::new("::1", 10809).to_string(), "[::1]:10809");
        assert_eq!(Address::new("[::1]", 10809).to_string(), "[::1]:10809");
        assert_eq!(Address::new("server.example", 1).to_string(), "server.example:1");
    }
}
