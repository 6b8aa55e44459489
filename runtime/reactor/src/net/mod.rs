//! TCP and Unix sockets: listeners and streams of one reactor.
//!
//! On the path of a request: exports accept connections here and receive commands, network media connect and send them.
//!
//! Invariants:
//! - Dropping a future cancels its operation. Bytes that a dropped [`Stream::recv`] had received, and a connection that
//!   a dropped [`Listener::accept`] had accepted, are returned by the next call.
//! - Buffers and slices in flight stay alive until the kernel has finished with them, even if the stream is dropped.
//! - Nothing raises SIGPIPE; a closed connection is an error.
//!
//! Shape: a socket belongs to the reactor on which it was created, and moves to another as an `OwnedFd`
//! ([`Stream::into_fd`], [`Stream::from_fd`]), because the two may wait in different ways.

mod hangups;
mod host;
mod inherited;
mod listener;
mod stream;

pub use crate::gather::GATHER_LIMIT;
pub use hangups::{HangupWatch, Hangups};
pub use host::HostPort;
pub use inherited::{Inherited, InheritedError};
pub use listener::Listener;
pub use stream::Stream;

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::net::{AddressFamily, Protocol, SocketFlags, SocketType, ipproto, sockopt};

/// When a client reconnects after a lost connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reconnect {
    /// The maximum number of attempts; with 0 the first loss is an error.
    pub attempts: u32,
    /// The maximum time, counted from the loss.
    pub total: Duration,
    /// The pause before the second attempt; the first is made at once. Doubles with each further one.
    pub first_delay: Duration,
    /// The maximum pause.
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

/// When a silent peer is probed, and when the connection fails (`SO_KEEPALIVE`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keepalive {
    /// Silence before the first probe, in seconds (`TCP_KEEPIDLE`, 1 to 32767).
    pub idle_s: u32,
    /// Time between probes, in seconds (`TCP_KEEPINTVL`, 1 to 32767).
    pub interval_s: u32,
    /// Unanswered probes after which the connection fails with `ETIMEDOUT` (`TCP_KEEPCNT`, 1 to 127).
    pub probes: u32,
}

fn set_keepalive(fd: BorrowedFd<'_>, keepalive: Option<Keepalive>) -> io::Result<()> {
    if let Some(Keepalive { idle_s, interval_s, probes }) = keepalive {
        sockopt::set_tcp_keepidle(fd, Duration::from_secs(idle_s.into()))?;
        sockopt::set_tcp_keepintvl(fd, Duration::from_secs(interval_s.into()))?;
        sockopt::set_tcp_keepcnt(fd, probes)?;
    }
    Ok(sockopt::set_socket_keepalive(fd, keepalive.is_some())?)
}

/// A new stream socket.
fn stream_socket(family: AddressFamily, protocol: Option<Protocol>) -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, protocol)?)
}

/// A new TCP socket of the family of an address.
fn tcp_socket(address: &SocketAddr) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    stream_socket(family, Some(ipproto::TCP))
}

/// The address of this end of a TCP socket.
fn local_addr(fd: impl AsFd) -> io::Result<SocketAddr> {
    Ok(rustix::net::getsockname(fd)?.try_into()?)
}

/// The address of the other end of a TCP connection.
fn peer_addr(fd: impl AsFd) -> io::Result<SocketAddr> {
    let peer = rustix::net::getpeername(fd)?.ok_or(io::ErrorKind::NotConnected)?;
    Ok(peer.try_into()?)
}

/// The address as its peers know it: a socket for both families has IPv4 addresses as `::ffff:a.b.c.d`, to which nobody
/// can connect.
pub fn canonical(address: SocketAddr) -> SocketAddr {
    match address.ip().to_canonical() {
        ip if ip.is_ipv4() => SocketAddr::new(ip, address.port()),
        _ => address,
    }
}

/// The process and the user at the other end of a Unix socket, when it listened or connected. The process is 0 if it
/// belongs to another namespace.
///
/// # Errors
/// [`io::ErrorKind::Unsupported`] for other sockets.
pub fn peer_process(fd: impl AsFd) -> io::Result<(u32, u32)> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    let at = (&raw mut peer).cast();
    // SAFETY: the call writes the structure, whose size it is given, and the size.
    if unsafe { libc::getsockopt(fd.as_fd().as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, at, &mut len) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // Sockets of other families have no peer process; a process of another namespace has no number.
    match peer.uid {
        u32::MAX => Err(io::ErrorKind::Unsupported.into()),
        uid => Ok((u32::try_from(peer.pid).unwrap_or(0), uid)),
    }
}

#[cfg(test)]
mod tests {
    use super::canonical;

    #[test]
    fn addresses_of_a_socket_for_both_families_are_those_of_its_peers() {
        for (mapped, own) in [
            ("[::ffff:192.0.2.7]:4420", "192.0.2.7:4420"),
            ("192.0.2.7:4420", "192.0.2.7:4420"),
            ("[2001:db8::7]:4420", "[2001:db8::7]:4420"),
            ("[::1]:4420", "[::1]:4420"),
        ] {
            assert_eq!(canonical(mapped.parse().unwrap()), own.parse().unwrap());
        }
    }
}
