//! TCP and Unix sockets: listeners and streams of one reactor.
//!
//! On the path of a request: exports accept connections here and receive commands, network media connect and send them.
//!
//! Invariants:
//! - Dropping a future cancels its operation. Bytes that a dropped [`Stream::recv`] had received, and a connection that a
//!   dropped [`Listener::accept`] had accepted, are returned by the next call.
//! - Buffers and slices in flight stay alive until the kernel has finished with them, even if the stream is dropped.
//! - Nothing raises SIGPIPE; a closed connection is an error.
//!
//! Shape: a socket belongs to the reactor it was made on, and travels to another as an `OwnedFd`
//! ([`Stream::into_fd`], [`Stream::from_fd`]), because the two may wait in different ways.

mod host;
mod inherited;
mod listener;
mod socket;
mod stream;

pub use crate::gather::GATHER_LIMIT;
pub use host::HostPort;
pub use inherited::{Inherited, InheritedError};
pub use listener::Listener;
pub use socket::Keepalive;
pub use stream::Stream;

pub(crate) use socket::{RawAddress, set_nonblocking};

use std::time::Duration;

/// When a client reconnects after a lost connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reconnect {
    /// Maximum attempts; 0 fails with the first loss.
    pub attempts: u32,
    /// Maximum time, counted from the loss.
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
