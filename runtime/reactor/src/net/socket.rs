//! Raw sockets: creating them, their addresses as the kernel has them, and their options.

use std::io;
use std::mem::ManuallyDrop;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6, TcpStream};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

/// A new TCP socket of the family of an address.
pub(super) fn tcp_socket(address: &SocketAddr) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    stream_socket(family, libc::IPPROTO_TCP)
}

/// A new stream socket.
pub(super) fn stream_socket(family: i32, protocol: i32) -> io::Result<OwnedFd> {
    // SAFETY: the call takes no pointers.
    let fd = unsafe { libc::socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, protocol) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new, so it has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Room for an address of any family, and the length of the one in it.
pub(crate) struct RawAddress {
    storage: libc::sockaddr_storage,
    len: libc::socklen_t,
}

impl RawAddress {
    pub(crate) fn empty() -> RawAddress {
        // SAFETY: the storage is made of integers, for which zero is a value.
        let storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
        RawAddress { storage, len: size_of::<libc::sockaddr_storage>() as libc::socklen_t }
    }

    pub(crate) fn of(address: &SocketAddr) -> RawAddress {
        let mut raw = RawAddress::empty();
        let start = &raw mut raw.storage;
        raw.len = match address {
            SocketAddr::V4(address) => {
                let v4 = libc::sockaddr_in {
                    sin_family: libc::AF_INET as libc::sa_family_t,
                    sin_port: address.port().to_be(),
                    sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(address.ip().octets()) },
                    sin_zero: [0; 8],
                };
                // SAFETY: the storage is large enough, and aligned, for every kind of address.
                unsafe { start.cast::<libc::sockaddr_in>().write(v4) };
                size_of::<libc::sockaddr_in>()
            }
            SocketAddr::V6(address) => {
                let v6 = libc::sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as libc::sa_family_t,
                    sin6_port: address.port().to_be(),
                    sin6_flowinfo: address.flowinfo(),
                    sin6_addr: libc::in6_addr { s6_addr: address.ip().octets() },
                    sin6_scope_id: address.scope_id(),
                };
                // SAFETY: as above.
                unsafe { start.cast::<libc::sockaddr_in6>().write(v6) };
                size_of::<libc::sockaddr_in6>()
            }
        } as libc::socklen_t;
        raw
    }

    /// The address of a Unix socket.
    ///
    /// # Errors
    /// `InvalidInput` for a path that is empty, has a zero byte or is longer than the kernel takes (107 bytes).
    pub(crate) fn of_path(path: &Path) -> io::Result<RawAddress> {
        let bytes = path.as_os_str().as_bytes();
        let mut unix = libc::sockaddr_un { sun_family: libc::AF_UNIX as libc::sa_family_t, sun_path: [0; 108] };
        if bytes.is_empty() || bytes.contains(&0) || bytes.len() >= unix.sun_path.len() {
            let why = format!("the path of a Unix socket has 1 to {} bytes and no zero byte", unix.sun_path.len() - 1);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        for (place, byte) in unix.sun_path.iter_mut().zip(bytes) {
            *place = *byte as libc::c_char;
        }
        let mut raw = RawAddress::empty();
        // SAFETY: the storage is large enough, and aligned, for every kind of address.
        unsafe { (&raw mut raw.storage).cast::<libc::sockaddr_un>().write(unix) };
        raw.len = size_of::<libc::sockaddr_un>() as libc::socklen_t;
        Ok(raw)
    }

    /// Pointers for the kernel to write an address, and to read the room and write the length.
    pub(crate) fn space(&mut self) -> (*mut libc::sockaddr, *mut libc::socklen_t) {
        self.len = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
        ((&raw mut self.storage).cast(), &raw mut self.len)
    }

    /// The address for the kernel to read.
    pub(crate) fn as_raw(&self) -> (*const libc::sockaddr, libc::socklen_t) {
        ((&raw const self.storage).cast(), self.len)
    }

    /// The address; none if it is neither IPv4 nor IPv6.
    pub(crate) fn decode(&self) -> Option<SocketAddr> {
        let start = &raw const self.storage;
        match i32::from(self.storage.ss_family) {
            libc::AF_INET => {
                // SAFETY: the family says what the storage holds, and any bytes are an address of it.
                let v4 = unsafe { start.cast::<libc::sockaddr_in>().read() };
                let ip = Ipv4Addr::from(v4.sin_addr.s_addr.to_ne_bytes());
                Some(SocketAddrV4::new(ip, u16::from_be(v4.sin_port)).into())
            }
            libc::AF_INET6 => {
                // SAFETY: as above.
                let v6 = unsafe { start.cast::<libc::sockaddr_in6>().read() };
                let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
                Some(SocketAddrV6::new(ip, u16::from_be(v6.sin6_port), v6.sin6_flowinfo, v6.sin6_scope_id).into())
            }
            _ => None,
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

pub(super) fn set_option(fd: BorrowedFd<'_>, level: i32, name: i32, value: i32) -> io::Result<()> {
    let len = size_of::<i32>() as libc::socklen_t;
    // SAFETY: the call reads the value, whose size it is given.
    match unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, (&raw const value).cast(), len) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

pub(super) fn option(fd: BorrowedFd<'_>, level: i32, name: i32) -> io::Result<i32> {
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
            set_option(fd, libc::IPPROTO_TCP, name, i32::try_from(value).unwrap_or(i32::MAX))?;
        }
    }
    set_option(fd, libc::SOL_SOCKET, libc::SO_KEEPALIVE, keepalive.is_some().into())
}

/// Sets how long sent data may stay unacknowledged, or without room at the peer (`TCP_USER_TIMEOUT`).
pub(super) fn set_user_timeout(fd: BorrowedFd<'_>, timeout: Duration) -> io::Result<()> {
    let ms = i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX);
    set_option(fd, libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, ms)
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
    // Sockets of other families have no peer process; a process of another namespace has no number.
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

/// Resets the connection now, even if other handles share the socket: unsent data is discarded.
pub(super) fn reset(fd: BorrowedFd<'_>) -> io::Result<()> {
    // If the system refuses to disconnect, closing the socket resets it.
    set_abortive(fd)?;
    let address = libc::sockaddr { sa_family: libc::AF_UNSPEC as libc::sa_family_t, sa_data: [0; 14] };
    let len = size_of::<libc::sockaddr>() as libc::socklen_t;
    // SAFETY: the call reads the address, whose size it is given.
    match unsafe { libc::connect(fd.as_raw_fd(), &raw const address, len) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sets whether calls on the socket return `EAGAIN` instead of blocking, for all handles that share it.
pub(crate) fn set_nonblocking(fd: BorrowedFd<'_>, nonblocking: bool) -> io::Result<()> {
    with_std(fd, |stream| stream.set_nonblocking(nonblocking))
}

/// Lends the socket to the standard library's safe calls, which serve listeners as well.
pub(super) fn with_std<T>(fd: BorrowedFd<'_>, run: impl FnOnce(&TcpStream) -> T) -> T {
    // SAFETY: the descriptor is open while it is borrowed, and is not closed at the end, as nothing drops the stream.
    let stream = ManuallyDrop::new(unsafe { TcpStream::from_raw_fd(fd.as_raw_fd()) });
    run(&stream)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_convert_to_raw_and_back() {
        for text in ["127.0.0.1:4420", "10.1.2.3:1", "[::1]:8009", "[fe80::1:2%7]:65535"] {
            let address: SocketAddr = text.parse().expect("an address");
            assert_eq!(RawAddress::of(&address).decode(), Some(address));
        }
    }

    #[test]
    fn other_families_have_no_address_and_port() {
        assert_eq!(RawAddress::of_path(Path::new("/run/s")).expect("an address").decode(), None);
    }

    #[test]
    fn paths_that_the_kernel_would_truncate_are_rejected() {
        for (path, fits) in
            [("s".repeat(107), true), ("s".repeat(108), false), (String::new(), false), ("a\0b".to_owned(), false)]
        {
            assert_eq!(RawAddress::of_path(Path::new(&path)).is_ok(), fits, "{path:?}");
        }
    }
}
