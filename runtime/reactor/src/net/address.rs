//! Addresses as the kernel writes them.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

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

    /// Where the kernel puts an address, and where it finds the room and puts the length.
    pub(crate) fn space(&mut self) -> (*mut libc::sockaddr, *mut libc::socklen_t) {
        self.len = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
        ((&raw mut self.storage).cast(), &raw mut self.len)
    }

    /// The address for the kernel to read.
    pub(crate) fn as_raw(&self) -> (*const libc::sockaddr, libc::socklen_t) {
        ((&raw const self.storage).cast(), self.len)
    }

    /// Nothing for an address that is neither IPv4 nor IPv6.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive_the_way_to_the_kernel_and_back() {
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
    fn paths_that_the_kernel_would_cut_off_are_refused() {
        for (path, fits) in
            [("s".repeat(107), true), ("s".repeat(108), false), (String::new(), false), ("a\0b".to_owned(), false)]
        {
            assert_eq!(RawAddress::of_path(Path::new(&path)).is_ok(), fits, "{path:?}");
        }
    }
}
