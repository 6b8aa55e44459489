//! TCP and Unix sockets: listeners and streams of one reactor.
//!
//! On the path of a request: exports accept connections here and receive commands, network media connect and send them.
//!
//! Invariants:
//! - Dropping a future cancels its operation. Bytes that a dropped [`Stream::recv`] had received, and a connection that a
//!   dropped [`Listener::accept`] had accepted, are given by the next call.
//! - Buffers and slices in flight stay alive until the kernel has finished with them, also when the stream is dropped.
//! - Nothing raises SIGPIPE; a peer that is gone is an error.
//!
//! Shape: a socket belongs to the reactor it was made on, and travels to another as an `OwnedFd`
//! ([`Stream::into_fd`], [`Stream::from_fd`]), because the two may not even wait in the same way.

mod address;
mod host;
mod inherited;
mod listener;
mod options;
mod reconnect;
mod stream;

pub use crate::gather::GATHER_LIMIT;
pub use host::HostPort;
pub use inherited::{Inherited, InheritedError};
pub use listener::Listener;
pub use options::Keepalive;
pub use reconnect::Reconnect;
pub use stream::Stream;

pub(crate) use address::RawAddress;
pub(crate) use options::set_nonblocking;

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

/// A new TCP socket of the family of an address.
fn socket(address: &std::net::SocketAddr) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    new_socket(family, libc::IPPROTO_TCP)
}

/// A new socket for a stream of bytes.
fn new_socket(family: i32, protocol: i32) -> io::Result<OwnedFd> {
    // SAFETY: the call takes no pointers.
    let fd = unsafe { libc::socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, protocol) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new, so nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
