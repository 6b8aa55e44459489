//! Listeners that a service manager has opened for this process (`sd_listen_fds(3)`): `LISTEN_FDS` of them, from
//! descriptor 3 on, meant for the process `LISTEN_PID`, named by `LISTEN_FDNAMES`.
//!
//! Invariant: the descriptors of the manager are only copied and never owned, so a wrong variable causes an error and
//! does not close another file. Neither they nor the copies are inherited by programs that this process starts.

use std::env;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};

use rustix::io::{FdFlags, fcntl_dupfd_cloexec, fcntl_setfd};
use rustix::net::{SocketType, sockopt};

use super::local_addr;

/// The first descriptor that is passed (`SD_LISTEN_FDS_START`).
const FIRST_FD: RawFd = 3;
/// Maximum number of descriptors; a larger value is invalid.
const MAX_FDS: RawFd = 1024;

/// A TCP socket that already listens.
#[derive(Debug)]
pub struct Inherited {
    /// The manager's name for it; empty without a name.
    pub name: String,
    /// Where it listens.
    pub address: SocketAddr,
    /// The socket.
    pub fd: OwnedFd,
}

/// Why inherited descriptors are unusable.
#[derive(Debug, thiserror::Error)]
pub enum InheritedError {
    /// The variable is not a valid number of descriptors.
    #[error("LISTEN_FDS={0} is no number of sockets")]
    Count(String),
    /// The socket is closed, of another kind, or does not listen.
    #[error("socket {fd} of the service manager is no TCP socket that listens")]
    NoListener {
        /// Its descriptor number.
        fd: RawFd,
        /// The error of the system.
        #[source]
        source: io::Error,
    },
}

impl Inherited {
    /// The listeners that were passed to this process, in their order. Empty if there is no service manager, or if it
    /// passed them to another process.
    ///
    /// # Errors
    /// When a descriptor is not a TCP listener.
    pub fn all() -> Result<Vec<Inherited>, InheritedError> {
        let said = |name: &str| env::var(name).unwrap_or_default();
        if said("LISTEN_PID") != std::process::id().to_string() {
            return Ok(Vec::new());
        }
        listeners(FIRST_FD, &said("LISTEN_FDS"), &said("LISTEN_FDNAMES"))
    }
}

fn listeners(first: RawFd, count: &str, names: &str) -> Result<Vec<Inherited>, InheritedError> {
    let number = count.parse::<RawFd>().ok().filter(|number| (0..=MAX_FDS).contains(number));
    let number = number.ok_or_else(|| InheritedError::Count(count.to_owned()))?;
    let names = names.split(':').chain(std::iter::repeat(""));
    (first..first + number).zip(names).map(|(fd, name)| listener(fd, name)).collect()
}

fn listener(fd: RawFd, name: &str) -> Result<Inherited, InheritedError> {
    let failed = |source| InheritedError::NoListener { fd, source };
    let copy = copy(fd).map_err(failed)?;
    // The address comes first: only TCP sockets have one, Unix sockets and files do not.
    let address = local_addr(&copy).map_err(failed)?;
    let is_listener = sockopt::socket_acceptconn(&copy)
        .and_then(|listens| Ok(listens && sockopt::socket_type(&copy)? == SocketType::STREAM));
    match is_listener.map_err(|error| failed(error.into()))? {
        true => Ok(Inherited { name: name.to_owned(), address, fd: copy }),
        false => Err(failed(io::ErrorKind::InvalidInput.into())),
    }
}

/// A copy of a descriptor, which is this process' own.
fn copy(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: the descriptor is only borrowed for these two calls, which change no file; a closed one makes them fail.
    let manager_fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let copy = fcntl_dupfd_cloexec(manager_fd, FIRST_FD)?;
    // As above: the original stays open here, but is not inherited.
    fcntl_setfd(manager_fd, FdFlags::CLOEXEC)?;
    Ok(copy)
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream, UdpSocket};
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn listeners_come_with_their_names_and_addresses() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let taken = listeners(listener.as_raw_fd(), "1", "nbd").unwrap();
        assert_eq!((taken.len(), taken[0].name.as_str()), (1, "nbd"));
        assert_eq!(taken[0].address, listener.local_addr().unwrap());
        assert_eq!(listeners(listener.as_raw_fd(), "1", "").unwrap()[0].name, "");
        // The copy is the same socket, and accepts connections after the other one is closed.
        drop(listener);
        let copy = TcpListener::from(taken.into_iter().next().unwrap().fd);
        let client = TcpStream::connect(copy.local_addr().unwrap()).unwrap();
        assert_eq!(copy.accept().unwrap().1, client.local_addr().unwrap());
        assert!(listeners(3, "0", "").unwrap().is_empty());
    }

    #[test]
    fn what_is_no_listener_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let unix = UnixListener::bind(folder.path().join("s")).unwrap();
        let file = std::fs::File::create(folder.path().join("f")).unwrap();
        let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connected = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        for fd in [unix.as_raw_fd(), file.as_raw_fd(), udp.as_raw_fd(), connected.as_raw_fd(), 900_000] {
            let error = listeners(fd, "1", "").unwrap_err();
            assert!(matches!(error, InheritedError::NoListener { fd: named, .. } if named == fd), "{error}");
        }
        for count in ["", "-1", "many", "1025", "99999999999"] {
            assert!(matches!(listeners(3, count, ""), Err(InheritedError::Count(_))), "{count}");
        }
    }

    #[test]
    fn sockets_for_another_process_are_left_alone() {
        // The test's own process has not set these variables, or they are for its parent.
        assert!(Inherited::all().unwrap().is_empty());
    }
}
