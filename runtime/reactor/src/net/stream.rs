//! Connections.

use std::cell::{Cell, RefCell};
use std::io;
use std::net::{Shutdown, SocketAddr};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::{AddressFamily, SocketAddrAny, SocketAddrUnix, sockopt};
use sealblock_runtime_memory::{Buffer, Slice};

use super::{Keepalive, canonical, local_addr, peer_addr, peer_process, set_keepalive, stream_socket, tcp_socket};
use crate::core::{self, Core};
use crate::descriptor::Descriptor;
use crate::gather::Gather;
use crate::op::{Op, Parked, Parking};
use crate::socket_ops::{Connect, Receive, Send};
use crate::timer::timeout;

/// Bytes of one receive of [`Stream::close`], and the maximum number of receives.
const DRAIN_BYTES: usize = 64 << 10;
const DRAIN_ROUNDS: usize = 256;
/// The longest path that the kernel accepts for a Unix socket (`sun_path`, minus the zero byte at its end).
const UNIX_PATH_LIMIT_BYTES: usize = 107;

/// A TCP connection, or one over a Unix socket, used from the reactor that made it. To use it on another, send
/// [`Stream::into_fd`] there.
///
/// One task may receive while another sends. Two that receive at once get the bytes in pieces of undefined order, and
/// the bytes of two that send at once are mixed. Operations start when their future is first polled. After the reactor
/// has ended, they fail with `ECANCELED`.
///
/// Dropping a stream closes it; see [`Stream::close`] for what the peer may lose then.
pub struct Stream {
    core: Rc<Core>,
    /// `None` only while it is being taken apart.
    descriptor: Option<Arc<Descriptor>>,
    /// A receive whose future was dropped.
    parked: Parked<Receive>,
    /// The bytes of a parked receive, and the range that was not returned yet.
    leftover: RefCell<Option<(Buffer, Range<usize>)>>,
    is_prompt: Cell<bool>,
    busy_polls: Cell<bool>,
}

impl Stream {
    /// Connects to an address. Dropping the future cancels the attempt.
    ///
    /// # Errors
    /// Those of `socket(2)` and `connect(2)`, such as `ECONNREFUSED`, `EHOSTUNREACH` and, after minutes, `ETIMEDOUT`.
    ///
    /// # Panics
    /// Outside a reactor.
    pub async fn connect(address: SocketAddr) -> io::Result<Stream> {
        Stream::connect_to(tcp_socket(&address)?, address.into()).await
    }

    /// Connects to the Unix socket at a path. Dropping the future cancels the attempt.
    ///
    /// # Errors
    /// `InvalidInput` for a path that no Unix socket can have. Those of `socket(2)` and `connect(2)`, such as `ENOENT`,
    /// `ECONNREFUSED` without a listener, and `EACCES`.
    ///
    /// # Panics
    /// Outside a reactor.
    pub async fn connect_unix(path: &Path) -> io::Result<Stream> {
        let address = unix_address(path)?;
        Stream::connect_to(stream_socket(AddressFamily::UNIX, None)?, address.into()).await
    }

    async fn connect_to(fd: OwnedFd, peer: SocketAddrAny) -> io::Result<Stream> {
        let stream = Stream::from_fd(fd)?;
        let (descriptor, peer) = (Arc::clone(stream.descriptor()), Box::new(peer));
        Op::new(Rc::clone(&stream.core), Connect { descriptor, peer }).await?;
        Ok(stream)
    }

    /// Takes over a connected socket. The reactor makes it blocking or non-blocking as it needs, for all handles that
    /// share it.
    ///
    /// # Errors
    /// When the system does not let the reactor wait for it.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn from_fd(fd: OwnedFd) -> io::Result<Stream> {
        Stream::on(&core::current(), fd)
    }

    pub(super) fn on(core: &Rc<Core>, fd: OwnedFd) -> io::Result<Stream> {
        let registration = core.adopt(fd.as_fd())?;
        Ok(Stream {
            core: Rc::clone(core),
            descriptor: Some(Arc::new(Descriptor::new(fd, registration))),
            parked: Parked::default(),
            leftover: RefCell::default(),
            is_prompt: Cell::new(false),
            busy_polls: Cell::new(false),
        })
    }

    /// Releases the socket, for example to another core.
    ///
    /// # Errors
    /// Returns the stream if an operation on it has not ended, or if bytes that a dropped [`Stream::recv`] had received
    /// were not returned: these would be lost.
    #[allow(clippy::result_large_err, reason = "what comes back is the stream itself, and rarely")]
    pub fn into_fd(mut self) -> Result<OwnedFd, Stream> {
        let parked = self.parked.take();
        if parked.is_some() || self.leftover.borrow().is_some() {
            self.parked.set(parked);
            return Err(self);
        }
        let descriptor = self.descriptor.take().expect("only this and drop take the descriptor");
        match Arc::try_unwrap(descriptor) {
            Ok(descriptor) => Ok(descriptor.into_fd()),
            Err(descriptor) => {
                self.descriptor = Some(descriptor);
                Err(self)
            }
        }
    }

    pub(super) fn descriptor(&self) -> &Arc<Descriptor> {
        self.descriptor.as_ref().expect("the stream is not being taken apart")
    }

    /// Receives into the buffer, from its start, at least one byte and at most what fits. Returns the number of bytes
    /// and the buffer. Zero means that the peer sends no more, or that the buffer has no room.
    ///
    /// A dropped future, for example by [`crate::timeout`], loses its buffer but no bytes: the next call returns what
    /// it had received.
    ///
    /// # Errors
    /// Those of `recv(2)`, such as `ECONNRESET` and `ETIMEDOUT`.
    pub async fn recv(&self, mut buffer: Buffer) -> (io::Result<usize>, Buffer) {
        if buffer.is_empty() {
            return (Ok(0), buffer);
        }
        if let Some(parked) = self.parked.take() {
            let (result, received) = Parking::new(&self.parked, parked).await;
            match result {
                Ok(0) => return (Ok(0), buffer),
                Ok(count) => *self.leftover.borrow_mut() = Some((received, 0..count)),
                Err(error) if error.raw_os_error() == Some(libc::ECANCELED) => {}
                Err(error) => return (Err(error), buffer),
            }
        }
        if let Some(count) = self.take_leftover(&mut buffer) {
            return (Ok(count), buffer);
        }
        let descriptor = Arc::clone(self.descriptor());
        let (is_prompt, busy_polls) = (self.is_prompt.get(), self.busy_polls.get());
        let receive = Op::new(Rc::clone(&self.core), Receive { descriptor, buffer, is_prompt, busy_polls });
        Parking::new(&self.parked, receive).await
    }

    fn take_leftover(&self, buffer: &mut Buffer) -> Option<usize> {
        let mut place = self.leftover.borrow_mut();
        let (received, range) = place.as_mut()?;
        let count = range.len().min(buffer.len());
        buffer[..count].copy_from_slice(&received[range.start..range.start + count]);
        range.start += count;
        let emptied = if range.start == range.end { place.take() } else { None };
        drop(place);
        drop(emptied);
        Some(count)
    }

    /// Sends once from the slice. Returns the number of bytes that the system accepted, at least one unless the slice
    /// is empty. If the future is dropped, they may or may not be sent.
    ///
    /// # Errors
    /// Those of `send(2)`, such as `EPIPE` and `ECONNRESET`.
    pub async fn send(&self, data: Slice) -> io::Result<usize> {
        let mut gather = self.core.gathers.take();
        gather.fill(&mut std::iter::once(data));
        if gather.left().is_empty() {
            self.core.gathers.put_back(gather);
            return Ok(0);
        }
        let (result, gather) = self.send_gather(gather, false).await;
        self.core.gathers.put_back(gather);
        result
    }

    /// Sends all slices, one after the other, up to [`GATHER_LIMIT`](super::GATHER_LIMIT) with one system operation.
    /// Pass `vector.drain(..)` to reuse a vector, or an array of slices; then sending allocates nothing. If the future
    /// is dropped, any part may be sent, so that the connection is not usable any more.
    ///
    /// # Errors
    /// Those of `sendmsg(2)`, such as `EPIPE` and `ECONNRESET`. How much was sent is unknown.
    pub async fn send_all(&self, slices: impl IntoIterator<Item = Slice>) -> io::Result<()> {
        let mut slices = slices.into_iter();
        let mut gather = self.core.gathers.take();
        let mut outcome = Ok(());
        while outcome.is_ok() {
            if gather.left().is_empty() {
                gather.fill(&mut slices);
            }
            if gather.left().is_empty() {
                break;
            }
            let result;
            (result, gather) = self.send_gather(gather, true).await;
            match result {
                Ok(0) => outcome = Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => gather.advance(count),
                Err(error) => outcome = Err(error),
            }
        }
        self.core.gathers.put_back(gather);
        outcome
    }

    /// Sets whether sends and receives are attempted when their future is polled, rather than with the reactor's next
    /// turn, so that the peer gets data while the task continues. This costs a system call for each send; a task may
    /// make a few of these per poll and then waits for its turn. Off in a new stream.
    pub fn set_prompt(&self, prompt: bool) {
        self.is_prompt.set(prompt);
    }

    /// Sets whether a receive of a prompt stream busy polls, on a reactor that spins: it retries for half of the spin
    /// time before the system waits; one stream of a reactor at a time. This helps with a peer that replies soon, and
    /// hurts with one that sends several requests, because the receive returns after the first. Off in a new stream.
    pub fn set_busy_poll(&self, busy_polls: bool) {
        self.busy_polls.set(busy_polls);
    }

    async fn send_gather(&self, gather: Box<Gather>, whole: bool) -> (io::Result<usize>, Box<Gather>) {
        let descriptor = Arc::clone(self.descriptor());
        Op::new(Rc::clone(&self.core), Send { descriptor, gather, whole, is_prompt: self.is_prompt.get() }).await
    }

    /// Ends one direction or both (`shutdown(2)`): the peer sees the end after all bytes that were sent; a waiting
    /// [`Stream::recv`] ends. An ordinary, short call.
    ///
    /// # Errors
    /// `ENOTCONN` when the connection is gone.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        let how = match how {
            Shutdown::Read => rustix::net::Shutdown::Read,
            Shutdown::Write => rustix::net::Shutdown::Write,
            Shutdown::Both => rustix::net::Shutdown::Both,
        };
        Ok(rustix::net::shutdown(self, how)?)
    }

    /// Closes the stream so that the peer gets everything that was sent: it calls [`Stream::lingering_close`] for up to
    /// 16 MiB of unread bytes, and then drops the stream in any case.
    ///
    /// # Errors
    /// As [`Stream::lingering_close`].
    pub async fn close(self, limit: Duration) -> io::Result<()> {
        self.lingering_close(limit, DRAIN_BYTES).await
    }

    /// Shuts down the sending direction, then receives and discards data until the peer closes too. Merely dropping a
    /// stream with unread bytes resets the connection, and the peer may lose the last reply. Receives at most 256
    /// times, up to `chunk_bytes` each.
    ///
    /// # Errors
    /// When the connection fails before the peer closes it, and `TimedOut` when the peer does not within `limit`.
    pub async fn lingering_close(&self, limit: Duration, chunk_bytes: usize) -> io::Result<()> {
        self.shutdown(Shutdown::Write)?;
        let drained = async {
            let mut buffer = Buffer::zeroed(chunk_bytes);
            for _ in 0..DRAIN_ROUNDS {
                let result;
                (result, buffer) = self.recv(buffer).await;
                if result? == 0 {
                    return Ok(());
                }
            }
            Err(io::ErrorKind::TimedOut.into())
        };
        timeout(limit, drained).await.unwrap_or_else(|_elapsed| Err(io::ErrorKind::TimedOut.into()))
    }

    /// Resets the connection: the peer gets an error, and unsent data is discarded. Operations in flight are
    /// cancelled when their futures are dropped, and the reset takes place when they have ended.
    ///
    /// # Errors
    /// Those of `setsockopt(2)`.
    pub fn abort(self) -> io::Result<()> {
        Ok(sockopt::set_socket_linger(&self, Some(Duration::ZERO))?)
    }

    /// Resets the connection now, rather than when the last operation has ended as [`Stream::abort`] does: operations
    /// in flight fail, and unsent data are discarded. Otherwise the system would continue to send them for minutes. The
    /// peer's program may still read what its system has received.
    ///
    /// # Errors
    /// Those of `setsockopt(2)` and `connect(2)`. The connection is reset when the stream is dropped, if not before.
    pub fn reset(&self) -> io::Result<()> {
        // If the system refuses to disconnect, closing the socket resets it.
        sockopt::set_socket_linger(self, Some(Duration::ZERO))?;
        // A Unix socket has no reset: both ends are on one system, which keeps no data for a closed peer.
        rustix::net::connect_unspec(self).or_else(|_refused| self.shutdown(Shutdown::Both))
    }
}

/// Addresses and options; ordinary, short calls, with the errors of `getsockname(2)` or `setsockopt(2)`.
impl Stream {
    /// The address of this end; see [`canonical`].
    ///
    /// # Errors
    /// Those of `getsockname(2)`.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        local_addr(self).map(canonical)
    }

    /// The address of the other end; see [`canonical`].
    ///
    /// # Errors
    /// `ENOTCONN` when the connection is gone.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        peer_addr(self).map(canonical)
    }

    /// The process and the user at the other end of a Unix socket, as they were when it connected. A process that this
    /// one cannot see, as from within a container, is number 0.
    ///
    /// # Errors
    /// Those of `getsockopt(2)`; `Unsupported` for a socket of another family.
    pub fn peer_process(&self) -> io::Result<(u32, u32)> {
        peer_process(self.as_fd())
    }

    /// Sets whether short segments are sent without waiting for acknowledgements (`TCP_NODELAY`). Off in a new stream.
    ///
    /// # Errors
    /// Those of `setsockopt(2)`.
    pub fn set_nodelay(&self, nodelay: bool) -> io::Result<()> {
        Ok(sockopt::set_tcp_nodelay(self, nodelay)?)
    }

    /// Turns probes of a silent peer on or off. Off in a new stream.
    ///
    /// # Errors
    /// `EINVAL` when a number is out of range.
    pub fn set_keepalive(&self, keepalive: Option<Keepalive>) -> io::Result<()> {
        set_keepalive(self.as_fd(), keepalive)
    }

    /// Sets how long sent data may stay unacknowledged before the connection fails with `ETIMEDOUT`, in whole
    /// milliseconds. 0, as in a new stream, leaves the limit to the system.
    ///
    /// # Errors
    /// Those of `setsockopt(2)`; `EOPNOTSUPP` for what is not TCP.
    pub fn set_user_timeout(&self, timeout: Duration) -> io::Result<()> {
        let ms = i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX);
        Ok(sockopt::set_tcp_user_timeout(self, ms as u32)?)
    }

    /// Requests a send buffer of this size in bytes (`SO_SNDBUF`), which then no longer adapts automatically. Returns
    /// the size that the system chose.
    ///
    /// # Errors
    /// Those of `setsockopt(2)`.
    pub fn set_send_buffer_bytes(&self, size_bytes: usize) -> io::Result<usize> {
        sockopt::set_socket_send_buffer_size(self, size_bytes.min(i32::MAX as usize))?;
        Ok(sockopt::socket_send_buffer_size(self)?)
    }

    /// The same for the receive buffer (`SO_RCVBUF`).
    ///
    /// # Errors
    /// Those of `setsockopt(2)`.
    pub fn set_recv_buffer_bytes(&self, size_bytes: usize) -> io::Result<usize> {
        sockopt::set_socket_recv_buffer_size(self, size_bytes.min(i32::MAX as usize))?;
        Ok(sockopt::socket_recv_buffer_size(self)?)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        drop(self.parked.take());
        drop(self.descriptor.take());
        self.core.forget_files();
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor().as_fd()
    }
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stream").field("fd", &self.as_fd().as_raw_fd()).finish()
    }
}

/// The address of the Unix socket at a path. To the kernel an empty path would be an unnamed socket, and it would
/// truncate a longer one.
fn unix_address(path: &Path) -> io::Result<SocketAddrUnix> {
    let fits = (1..=UNIX_PATH_LIMIT_BYTES).contains(&path.as_os_str().as_bytes().len());
    SocketAddrUnix::new(path).ok().filter(|_| fits).ok_or_else(|| {
        let why = format!("the path of a Unix socket has 1 to {UNIX_PATH_LIMIT_BYTES} bytes and no zero byte");
        io::Error::new(io::ErrorKind::InvalidInput, why)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_that_the_kernel_would_truncate_are_rejected() {
        for (path, fits) in
            [("s".repeat(107), true), ("s".repeat(108), false), (String::new(), false), ("a\0b".to_owned(), false)]
        {
            assert_eq!(unix_address(Path::new(&path)).is_ok(), fits, "{path:?}");
        }
    }
}
