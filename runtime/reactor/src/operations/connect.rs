//! Connecting to a peer.

use std::io;
use std::sync::Arc;

use io_uring::{opcode, squeue};

use super::{counted, entry_for};
use crate::descriptor::Descriptor;
use crate::net::RawAddress;
use crate::operation::{Direction, Interest, IoOp};
use crate::ring::Tables;

/// One `connect`.
pub(crate) struct Connect {
    pub(crate) descriptor: Arc<Descriptor>,
    /// Boxed, so that it stays where it is.
    pub(crate) peer: Box<RawAddress>,
}

// SAFETY: the entry names the descriptor, which the `Arc` keeps open, and the boxed address.
unsafe impl IoOp for Connect {
    type Output = io::Result<()>;

    fn entry(&mut self, tables: &Tables) -> squeue::Entry {
        let (address, len) = self.peer.as_raw();
        entry_for!(tables.target(&self.descriptor), |fd| opcode::Connect::new(fd, address, len).build())
    }

    /// Called again when the socket is ready, this says how the attempt ended.
    fn call(&mut self) -> io::Result<u32> {
        let (address, len) = self.peer.as_raw();
        // SAFETY: the call reads the address, whose length it is given.
        let result = counted(unsafe { libc::connect(self.descriptor.raw(), address, len) } as libc::ssize_t);
        match result.as_ref().map_err(io::Error::raw_os_error) {
            Err(Some(libc::EINPROGRESS | libc::EALREADY)) => Err(io::Error::from_raw_os_error(libc::EAGAIN)),
            Err(Some(libc::EISCONN)) => Ok(0),
            // To the kernel this is a lack of local ports, not a reason to wait.
            Err(Some(libc::EAGAIN)) => Err(io::Error::from_raw_os_error(libc::EADDRNOTAVAIL)),
            _ => result,
        }
    }

    fn finish(self, result: io::Result<u32>) -> io::Result<()> {
        result.map(|_| ())
    }

    fn waits(&self) -> Option<Interest> {
        Some(Interest { fd: self.descriptor.raw(), direction: Direction::Writable })
    }
}
