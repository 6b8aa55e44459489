//! Connections.

use std::cell::{Cell, RefCell};
use std::io;
use std::net::{Shutdown, SocketAddr};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use sealblock_runtime_memory::{Buffer, Slice};

use super::{Keepalive, RawAddress, new_socket, options, socket};
use crate::descriptor::Descriptor;
use crate::executor::{self, Core};
use crate::gather::Gather;
use crate::operation::{Op, Parked, Parking};
use crate::operations::{Connect, Receive, Send};
use crate::timer::timeout;

/// How much [`Stream::close`] receives and throws away at once, and how often at most.
const DRAIN_BYTES: usize = 64 << 10;
const DRAIN_ROUNDS: usize = 256;

/// A TCP connection, or one over a Unix socket, used from the reactor that made it. To use it on another, send [`Stream::into_fd`] there.
///
/// One task may receive while another sends. Two that receive at once get the bytes in pieces of no certain order, and the
/// bytes of two that send at once are mixed. Operations start when their future is first polled. After the reactor has
/// ended, they fail with `ECANCELED`.
///
/// Dropping a stream closes it; see [`Stream::close`] for what the peer may lose then.
pub struct Stream {
    core: Rc<Core>,
    /// `None` only while it is being taken apart.
    descriptor: Option<Arc<Descriptor>>,
    /// A receipt whose future was dropped.
    parked: Parked<Receive>,
    /// What such a one had received, and the part of it that nobody has taken.
    leftover: RefCell<Option<(Buffer, Range<usize>)>>,
    is_prompt: Cell<bool>,
    lingers: Cell<bool>,
}

impl Stream {
    /// Connects to an address. Dropping the future gives up.
    ///
    /// # Errors
    /// Those of `socket(2)` and `connect(2)`, such as `ECONNREFUSED`, `EHOSTUNREACH` and, after minutes, `ETIMEDOUT`.
    ///
    /// # Panics
    /// Outside a reactor.
    pub async fn connect(address: SocketAddr) -> io::Result<Stream> {
        let stream = Stream::from_fd(socket(&address)?)?;
        let descriptor = Arc::clone(stream.descriptor());
        let peer = Box::new(RawAddress::of(&address));
        Op::new(Rc::clone(&stream.core), Connect { descriptor, peer }).await?;
        Ok(stream)
    }

    /// Connects to the Unix socket at a path. Dropping the future gives up.
    ///
    /// # Errors
    /// `InvalidInput` for a path that no Unix socket can have. Those of `socket(2)` and `connect(2)`, such as `ENOENT`,
    /// `ECONNREFUSED` where nobody listens any more, and `EACCES`.
    ///
    /// # Panics
    /// Outside a reactor.
    pub async fn connect_unix(path: &Path) -> io::Result<Stream> {
        let peer = Box::new(RawAddress::of_path(path)?);
        let stream = Stream::from_fd(new_socket(libc::AF_UNIX, 0)?)?;
        let descriptor = Arc::clone(stream.descriptor());
        Op::new(Rc::clone(&stream.core), Connect { descriptor, peer }).await?;
        Ok(stream)
    }

    /// Takes over a connected socket. The reactor sets it to block or not to block as it needs, for everybody who shares it.
    ///
    /// # Errors
    /// When the system does not let the reactor wait for it.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn from_fd(fd: OwnedFd) -> io::Result<Stream> {
        Stream::on(&executor::current(), fd)
    }

    pub(super) fn on(core: &Rc<Core>, fd: OwnedFd) -> io::Result<Stream> {
        let known = core.adopt(fd.as_fd())?;
        Ok(Stream {
            core: Rc::clone(core),
            descriptor: Some(Arc::new(Descriptor::new(fd, known))),
            parked: Parked::default(),
            leftover: RefCell::default(),
            is_prompt: Cell::new(false),
            lingers: Cell::new(false),
        })
    }

    /// Gives the socket away, for instance to another core.
    ///
    /// # Errors
    /// Returns the stream when an operation on it has not ended, or when bytes that a dropped [`Stream::recv`] had received
    /// were not taken: these would be lost.
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

    fn descriptor(&self) -> &Arc<Descriptor> {
        self.descriptor.as_ref().expect("the stream is not being taken apart")
    }

    /// Receives into the buffer, from its start, at least one byte and at most what fits; gives the number of bytes and the
    /// buffer back. Zero says that the peer sends no more, or that the buffer has no room.
    ///
    /// A future that is dropped, as by [`crate::timeout`], loses its buffer but no bytes: what it had received, the next
    /// call gives.
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
        let (is_prompt, lingers) = (self.is_prompt.get(), self.lingers.get());
        let receive = Op::new(Rc::clone(&self.core), Receive { descriptor, buffer, is_prompt, lingers });
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

    /// Sends once from the slice; gives the number of bytes that the system took, at least one unless the slice is empty.
    /// When the future is dropped, they may be sent or not.
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

    /// Sends all slices, one behind the other, up to [`GATHER_LIMIT`](super::GATHER_LIMIT) with one system operation. Pass
    /// `vector.drain(..)` to use a vector again, or an array of slices; then sending allocates nothing. When the future is
    /// dropped, any part may be sent, so that the connection is of no more use.
    ///
    /// # Errors
    /// Those of `sendmsg(2)`, such as `EPIPE` and `ECONNRESET`. How much was sent by then is not told.
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

    /// Whether what is sent goes to the system where the future is polled, rather than with the reactor's next turn, so that
    /// the peer has it while the task goes on. That costs a system call for each send; a task whose sends follow each other
    /// closely gets a few of these, and then waits for its turn. A receive as well takes at once what is there. Off in a new
    /// stream.
    pub fn set_prompt(&self, prompt: bool) {
        self.is_prompt.set(prompt);
    }

    /// Whether a receive of a prompt stream, on a reactor that spins, asks again and again for half of that time before it lets
    /// the system wait; one stream of a reactor at a time. It meets a peer that answers soon a little sooner, and one with
    /// several questions too soon, when it has written only the first. Off in a new stream.
    pub fn set_lingering(&self, lingers: bool) {
        self.lingers.set(lingers);
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
        options::with_std(self.as_fd(), |stream| stream.shutdown(how))
    }

    /// Closes so that the peer gets all that was sent: [`Stream::linger`] with room for 16 MiB of unread bytes, and then the
    /// stream is dropped in any case.
    ///
    /// # Errors
    /// As [`Stream::linger`].
    pub async fn close(self, limit: Duration) -> io::Result<()> {
        self.busy_poll(limit, DRAIN_BYTES).await
    }

    /// Says that there is no more, then receives and throws away what still comes until the peer closes too. Merely dropping a
    /// stream with unread bytes resets the connection, and the peer may lose the last answer. Receives at most 256 times, up to
    /// `chunk_bytes` each.
    ///
    /// # Errors
    /// When the connection fails before the peer closes it, and `TimedOut` when the peer does not within `limit`.
    pub async fn busy_poll(&self, limit: Duration, chunk_bytes: usize) -> io::Result<()> {
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

    /// Resets the connection: the peer gets an error, and what was not sent yet is thrown away. Operations in flight are
    /// cancelled when their futures are dropped, and the reset takes place when they have ended.
    ///
    /// # Errors
    /// Those of `setsockopt(2)`.
    pub fn abort(self) -> io::Result<()> {
        options::set_abortive(self.as_fd())
    }

    /// Resets the connection now, as [`Stream::abort`] does once the last operation has ended: operations in flight fail, and
    /// what the system was given and has not sent is thrown away. Otherwise it goes on for minutes to send that, whoever has
    /// given up the connection. What the peer's system has received, its program may still read.
    ///
    /// # Errors
    /// Those of `setsockopt(2)` and `connect(2)`. The connection is reset when the stream is dropped, if not before.
    pub fn reset(&self) -> io::Result<()> {
        // A Unix socket knows no reset: its two ends are one system's, which keeps nothing for a peer that is cut off.
        options::reset(self.as_fd()).or_else(|_refused| self.shutdown(Shutdown::Both))
    }
}

/// Addresses and options; ordinary, short calls, with the errors of `getsockname(2)` or `setsockopt(2)`.
impl Stream {
    /// The address of this end.
    ///
    /// # Errors
    /// Those of `getsockname(2)`.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        options::with_std(self.as_fd(), |stream| stream.local_addr())
    }

    /// The address of the other end.
    ///
    /// # Errors
    /// `ENOTCONN` when the connection is gone.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        options::with_std(self.as_fd(), |stream| stream.peer_addr())
    }

    /// The process and the user at the other end of a Unix socket, as they were when it connected. A process that this one cannot
    /// see, as from within a container, is number 0.
    ///
    /// # Errors
    /// Those of `getsockopt(2)`; `Unsupported` for a socket of another family.
    pub fn peer_process(&self) -> io::Result<(u32, u32)> {
        options::peer_process(self.as_fd())
    }

    /// Whether short segments are sent without waiting for acknowledgements (`TCP_NODELAY`). Off in a new stream.
    ///
    /// # Errors
    /// Those of `setsockopt(2)`.
    pub fn set_nodelay(&self, nodelay: bool) -> io::Result<()> {
        options::with_std(self.as_fd(), |stream| stream.set_nodelay(nodelay))
    }

    /// Turns questions to a silent peer on or off. Off in a new stream.
    ///
    /// # Errors
    /// `EINVAL` when a number is out of range.
    pub fn set_keepalive(&self, keepalive: Option<Keepalive>) -> io::Result<()> {
        options::set_keepalive(self.as_fd(), keepalive)
    }

    /// How long the peer may take nothing of what was sent before the connection fails with `ETIMEDOUT`, in whole milliseconds; 0
    /// leaves it to the system. A new stream does.
    ///
    /// # Errors
    /// Those of `setsockopt(2)`; `EOPNOTSUPP` for what is not TCP.
    pub fn set_patience(&self, patience: Duration) -> io::Result<()> {
        options::set_patience(self.as_fd(), patience)
    }

    /// Asks for a send buffer of this size in bytes (`SO_SNDBUF`), which then no longer adapts itself; gives what the system
    /// made of it.
    ///
    /// # Errors
    /// Those of `setsockopt(2)`.
    pub fn set_send_buffer_bytes(&self, size_bytes: usize) -> io::Result<usize> {
        self.set_size(libc::SO_SNDBUF, size_bytes)
    }

    /// The same for the receive buffer (`SO_RCVBUF`).
    ///
    /// # Errors
    /// Those of `setsockopt(2)`.
    pub fn set_recv_buffer_bytes(&self, size_bytes: usize) -> io::Result<usize> {
        self.set_size(libc::SO_RCVBUF, size_bytes)
    }

    fn set_size(&self, name: i32, size_bytes: usize) -> io::Result<usize> {
        options::set(self.as_fd(), libc::SOL_SOCKET, name, i32::try_from(size_bytes).unwrap_or(i32::MAX))?;
        Ok(usize::try_from(options::get(self.as_fd(), libc::SOL_SOCKET, name)?).unwrap_or(0))
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
