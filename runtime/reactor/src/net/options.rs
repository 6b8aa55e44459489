//! Socket options.

use std::io;
use std::mem::ManuallyDrop;
use std::net::TcpStream;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd};
use std::time::Duration;

/// When a silent peer is asked whether it is still there, and when it is given up (`SO_KEEPALIVE`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keepalive {
    /// Silence before the first question, in seconds (`TCP_KEEPIDLE`, 1 to 32767).
    pub idle_s: u32,
    /// Time between questions, in seconds (`TCP_KEEPINTVL`, 1 to 32767).
    pub interval_s: u32,
    /// Unanswered questions after which the connection fails with `ETIMEDOUT` (`TCP_KEEPCNT`, 1 to 127).
    pub probes: u32,
}

pub(super) fn set(fd: BorrowedFd<'_>, level: i32, name: i32, value: i32) -> io::Result<()> {
    let len = size_of::<i32>() as libc::socklen_t;
    // SAFETY: the call reads the value, whose size it is given.
    match unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, (&raw const value).cast(), len) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

pub(super) fn get(fd: BorrowedFd<'_>, level: i32, name: i32) -> io::Result<i32> {
    let (mut value, mut len) = (0i32, size_of::<i32>() as libc::socklen_t);
    // SAFETY: the call writes the value, whose size it is given, and the size.
    match unsafe { libc::getsockopt(fd.as_raw_fd(), level, name, (&raw mut value).cast(), &mut len) } {
        0 => Ok(value),
        _ => Err(io::Error::last_os_error()),
    }
}

pub(super) fn set_keepalive(fd: BorrowedFd<'_>, keepalive: Option<Keepalive>) -> io::Result<()> {
    if let Some(Keepalive { idle_s, interval_s, probes }) = keepalive {
        let options = [(libc::TCP_KEEPIDLE, idle_s), (libc::TCP_KEEPINTVL, interval_s), (libc::TCP_KEEPCNT, probes)];
        for (name, value) in options {
            // The kernel refuses what is too large, so saturating changes no meaning.
            set(fd, libc::IPPROTO_TCP, name, i32::try_from(value).unwrap_or(i32::MAX))?;
        }
    }
    set(fd, libc::SOL_SOCKET, libc::SO_KEEPALIVE, keepalive.is_some().into())
}

/// How long a peer may leave what was sent without an acknowledgement, or without room for it (`TCP_USER_TIMEOUT`).
pub(super) fn set_patience(fd: BorrowedFd<'_>, patience: Duration) -> io::Result<()> {
    let ms = i32::try_from(patience.as_millis()).unwrap_or(i32::MAX);
    set(fd, libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, ms)
}

/// The process and the user at the other end of a Unix socket.
pub(super) fn peer_process(fd: BorrowedFd<'_>) -> io::Result<(u32, u32)> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    let at = (&raw mut peer).cast();
    // SAFETY: the call writes the structure, whose size it is given, and the size.
    if unsafe { libc::getsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, at, &mut len) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // What sockets of other families have at the other end is nobody's; a process of another namespace has no number.
    match peer.uid {
        u32::MAX => Err(io::ErrorKind::Unsupported.into()),
        uid => Ok((u32::try_from(peer.pid).unwrap_or(0), uid)),
    }
}

/// Makes closing the socket discard what was not sent yet and reset the connection.
pub(super) fn set_abortive(fd: BorrowedFd<'_>) -> io::Result<()> {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    let len = size_of::<libc::linger>() as libc::socklen_t;
    // SAFETY: the call reads the structure, whose size it is given.
    let result =
        unsafe { libc::setsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_LINGER, (&raw const linger).cast(), len) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Resets the connection now, whoever still holds the socket: what was not sent yet is thrown away.
pub(super) fn reset(fd: BorrowedFd<'_>) -> io::Result<()> {
    // Should the system refuse the disconnection, closing the socket resets it.
    set_abortive(fd)?;
    let address = libc::sockaddr { sa_family: libc::AF_UNSPEC as libc::sa_family_t, sa_data: [0; 14] };
    let len = size_of::<libc::sockaddr>() as libc::socklen_t;
    // SAFETY: the call reads the address, whose size it is given.
    match unsafe { libc::connect(fd.as_raw_fd(), &raw const address, len) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether calls on the socket say `EAGAIN` rather than wait, for everybody who shares it.
pub(crate) fn set_nonblocking(fd: BorrowedFd<'_>, nonblocking: bool) -> io::Result<()> {
    with_std(fd, |stream| stream.set_nonblocking(nonblocking))
}

/// Lends the socket to the standard library's safe calls, which serve listeners as well.
pub(super) fn with_std<T>(fd: BorrowedFd<'_>, run: impl FnOnce(&TcpStream) -> T) -> T {
    // SAFETY: the descriptor is open while it is borrowed, and is not closed at the end, as nothing drops the stream.
    let stream = ManuallyDrop::new(unsafe { TcpStream::from_raw_fd(fd.as_raw_fd()) });
    run(&stream)
}
