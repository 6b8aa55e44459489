//! Accepting connections.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt;

use super::{Stream, local_addr, peer_addr, tcp_socket};
use crate::core::{self, Core};
use crate::descriptor::Descriptor;
use crate::op::{Op, Parked, Parking};
use crate::shutdown::shutdown_requested;
use crate::socket_ops::Accept;
use crate::timer::{now, sleep};

/// Pause after a transient error.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// A transient error is logged again if there was none for this time.
const SAID_AGAIN_AFTER: Duration = Duration::from_secs(60);

/// A socket that accepts connections, used from the reactor that created it.
///
/// For several cores either accept on one and send the descriptors to the others ([`Stream::into_fd`]), or bind one
/// listener per core with [`Listener::bind_shared`] and let the kernel choose.
pub struct Listener {
    core: Rc<Core>,
    /// `None` only while it is being dropped.
    descriptor: Option<Arc<Descriptor>>,
    parked: Parked<Accept>,
    /// When the last transient error was.
    failed_at: Cell<Option<Instant>>,
}

impl Listener {
    /// Listens on an address; with port 0 the system chooses one. At most `backlog` connections wait to be accepted,
    /// and not more than the system allows (`net.core.somaxconn`). The address may have been in use a moment ago
    /// (`SO_REUSEADDR`). An unspecified IPv6 address also accepts IPv4 connections if that is the system's default.
    ///
    /// # Errors
    /// Those of `socket(2)`, `bind(2)` and `listen(2)`, such as `EADDRINUSE` and `EACCES`.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn bind(address: SocketAddr, backlog: u32) -> io::Result<Listener> {
        Listener::listen(address, backlog, false)
    }

    /// As [`Listener::bind`], for an address on which other listeners of the same user were also bound in this way; new
    /// connections are spread over them (`SO_REUSEPORT`).
    ///
    /// # Errors
    /// As [`Listener::bind`].
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn bind_shared(address: SocketAddr, backlog: u32) -> io::Result<Listener> {
        Listener::listen(address, backlog, true)
    }

    fn listen(address: SocketAddr, backlog: u32, shared: bool) -> io::Result<Listener> {
        let fd = tcp_socket(&address)?;
        sockopt::set_socket_reuseaddr(&fd, true)?;
        if shared {
            sockopt::set_socket_reuseport(&fd, true)?;
        }
        rustix::net::bind(&fd, &address)?;
        rustix::net::listen(&fd, i32::try_from(backlog).unwrap_or(i32::MAX))?;
        Listener::from_fd(fd)
    }

    /// Takes over a socket that already listens, over TCP or as a Unix socket.
    ///
    /// # Errors
    /// When the system does not let the reactor wait for it.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn from_fd(fd: OwnedFd) -> io::Result<Listener> {
        let core = core::current();
        let registration = core.adopt(fd.as_fd())?;
        let descriptor = Some(Arc::new(Descriptor::new(fd, registration)));
        Ok(Listener { core, descriptor, parked: Parked::default(), failed_at: Cell::default() })
    }

    /// Waits for a connection; returns it and the peer's address. Connections that failed before they were accepted are
    /// skipped. If a future was dropped, the next call returns the connection that it may have accepted meanwhile.
    ///
    /// # Errors
    /// `InvalidData` on a Unix socket. Those of `accept(2)`. `EMFILE`, `ENFILE`, `ENOBUFS` and `ENOMEM` concern this
    /// process or system: the connection still waits, so wait a little before the next call. `ECANCELED` after the
    /// reactor has ended.
    pub async fn accept(&self) -> io::Result<(Stream, SocketAddr)> {
        loop {
            let stream = self.accept_any().await?;
            match peer_addr(&stream) {
                Ok(peer) => return Ok((stream, peer)),
                // The connection failed meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotConnected => {}
                Err(_no_address) => return Err(io::ErrorKind::InvalidData.into()),
            }
        }
    }

    /// As [`Listener::accept`], also on a Unix socket, whose peers have no address.
    async fn accept_any(&self) -> io::Result<Stream> {
        loop {
            let op = self.parked.take().unwrap_or_else(|| {
                Op::new(Rc::clone(&self.core), Accept { descriptor: Arc::clone(self.descriptor()) })
            });
            match Parking::new(&self.parked, op).await {
                Ok(fd) => return Stream::on(&self.core, fd),
                // Either the peer gave up first, or an earlier future of this listener was dropped.
                Err(error) if error.raw_os_error() == Some(libc::ECONNABORTED) => {}
                Err(error) if error.raw_os_error() == Some(libc::ECANCELED) && !self.core.is_closed() => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Waits for a connection, as [`Listener::accept`], but retries after transient errors. `None` once `should_stop`
    /// is ready, or the shutdown of the core is requested.
    ///
    /// # Errors
    /// When the listener fails for good.
    pub async fn accept_until(
        &self,
        mut should_stop: impl FnMut(&mut Context<'_>) -> Poll<()>,
    ) -> io::Result<Option<Stream>> {
        let mut shutdown = shutdown_requested();
        loop {
            let mut next = pin!(self.accept_any());
            let accepted = poll_fn(|cx| {
                if should_stop(cx).is_ready() || pin!(&mut shutdown).poll(cx).is_ready() {
                    return Poll::Ready(None);
                }
                next.as_mut().poll(cx).map(Some)
            });
            match accepted.await {
                None => return Ok(None),
                Some(Ok(stream)) => return Ok(Some(stream)),
                Some(Err(error)) if is_transient(&error) => {
                    self.report(&error);
                    sleep(RETRY_INTERVAL).await
                }
                Some(Err(error)) => return Err(error),
            }
        }
    }

    /// Logs why connections wait, once per period of errors.
    fn report(&self, error: &io::Error) {
        let now = now();
        let last = self.failed_at.replace(Some(now));
        if last.is_none_or(|last| now.duration_since(last) > SAID_AGAIN_AFTER) {
            let is_limit = matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE));
            let advice = if is_limit { "; try: a higher limit of open files (LimitNOFILE, ulimit -n)" } else { "" };
            tracing::warn!("connections wait until they can be accepted: {error}{advice}");
        }
    }

    fn descriptor(&self) -> &Arc<Descriptor> {
        self.descriptor.as_ref().expect("only drop takes the descriptor")
    }

    /// The address it listens on, with the port that the system chose.
    ///
    /// # Errors
    /// Those of `getsockname(2)`.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        local_addr(self)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        drop(self.parked.take());
        drop(self.descriptor.take());
        self.core.forget_files();
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor().as_fd()
    }
}

impl std::fmt::Debug for Listener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Listener").field("fd", &self.as_fd().as_raw_fd()).finish()
    }
}

/// True if accepting failed for a transient reason: a lack of descriptors or memory (EMFILE, ENFILE, ENOBUFS, ENOMEM),
/// a firewall rule (EPERM), or an error of one connection, which Linux returns here (`accept(2)`, "Error handling").
/// None of these may end the service for other clients.
fn is_transient(error: &io::Error) -> bool {
    const SHORTAGES: [Errno; 4] = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM];
    const OF_A_CONNECTION: [Errno; 9] = [
        Errno::NONET,
        Errno::PROTO,
        Errno::NOPROTOOPT,
        Errno::OPNOTSUPP,
        Errno::NETDOWN,
        Errno::NETUNREACH,
        Errno::TIMEDOUT,
        Errno::HOSTDOWN,
        Errno::HOSTUNREACH,
    ];
    Errno::from_io_error(error)
        .is_some_and(|errno| errno == Errno::PERM || SHORTAGES.contains(&errno) || OF_A_CONNECTION.contains(&errno))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transient_errors_do_not_end_the_service_and_others_do() {
        for code in [1, 12, 23, 24, 64, 71, 92, 95, 100, 101, 105, 110, 112, 113] {
            assert!(is_transient(&io::Error::from_raw_os_error(code)), "{code}");
        }
        // EBADF, EINVAL and ENOTSOCK concern the listener, ECANCELED the reactor.
        for code in [9, 22, 88, 125] {
            assert!(!is_transient(&io::Error::from_raw_os_error(code)), "{code}");
        }
    }
}
