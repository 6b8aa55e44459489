//! Accepting a connection.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::Arc;

use io_uring::{opcode, squeue};

use super::{counted, entry_for};
use crate::descriptor::Descriptor;
use crate::net::RawAddress;
use crate::operation::{Direction, Interest, IoOp};
use crate::ring::Tables;

/// One `accept4`.
pub(crate) struct Accept {
    pub(crate) descriptor: Arc<Descriptor>,
    /// Where the kernel writes the peer's address; boxed, so that it stays where it is.
    pub(crate) peer: Box<RawAddress>,
}

impl Accept {
    fn taken(result: io::Result<u32>) -> io::Result<OwnedFd> {
        // SAFETY: the descriptor is new, so nobody else owns it; and descriptors fit an `i32`.
        result.map(|fd| unsafe { OwnedFd::from_raw_fd(fd as i32) })
    }
}

// SAFETY: the entry names the descriptor, which the `Arc` keeps open, and the boxed address.
unsafe impl IoOp for Accept {
    /// The peer has no address where the socket is of another family than IP.
    type Output = io::Result<(OwnedFd, Option<SocketAddr>)>;

    fn entry(&mut self, tables: &Tables) -> squeue::Entry {
        let target = tables.target(&self.descriptor);
        let (address, len) = self.peer.space();
        entry_for!(target, |fd| opcode::Accept::new(fd, address, len).flags(libc::SOCK_CLOEXEC).build())
    }

    fn call(&mut self) -> io::Result<u32> {
        let (address, len) = self.peer.space();
        // SAFETY: the call writes the address, within the length that it is given, and the length.
        let fd = unsafe { libc::accept4(self.descriptor.raw(), address, len, libc::SOCK_CLOEXEC) };
        counted(fd as libc::ssize_t)
    }

    fn finish(self, result: io::Result<u32>) -> Self::Output {
        let fd = Accept::taken(result)?;
        Ok((fd, self.peer.decode()))
    }

    fn waits(&self) -> Option<Interest> {
        Some(Interest { fd: self.descriptor.raw(), direction: Direction::Readable })
    }

    /// Closes the connection, for which nobody is left.
    fn discard(self, result: io::Result<u32>) {
        drop(Accept::taken(result));
    }
}
