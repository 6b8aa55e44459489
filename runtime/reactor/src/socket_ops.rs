//! Operations on sockets: accept, connect, receive, send. Each waits for a peer.
//!
//! Shape: for a receive the kernel first tries to receive, and waits only if there are no bytes. Making it wait first,
//! after a receive that had emptied the socket (`IORING_RECVSEND_POLL_FIRST`), made no measurable difference.

use std::io;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::sync::Arc;

use io_uring::{opcode, squeue};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SocketAddrAny, SocketFlags};
use sealblock_runtime_memory::Buffer;

use crate::descriptor::{Descriptor, Tables};
use crate::gather::Gather;
use crate::operation::{Direction, Interest, IoOp, TRANSFER_LIMIT_BYTES, counted, entry_for};

/// One `accept4`.
pub(crate) struct Accept {
    pub(crate) descriptor: Arc<Descriptor>,
}

// SAFETY: the entry names the descriptor only, which the `Arc` keeps open.
unsafe impl IoOp for Accept {
    type Output = io::Result<OwnedFd>;

    fn entry(&mut self, tables: &Tables) -> Option<squeue::Entry> {
        let (address, len) = (std::ptr::null_mut(), std::ptr::null_mut());
        entry_for!(tables.target(&self.descriptor), |fd| {
            opcode::Accept::new(fd, address, len).flags(libc::SOCK_CLOEXEC).build()
        })
    }

    fn call(&mut self) -> io::Result<u32> {
        let fd = rustix::net::accept_with(self.descriptor.as_fd(), SocketFlags::CLOEXEC);
        counted(fd.map(|fd| fd.into_raw_fd() as usize))
    }

    fn finish(self, result: io::Result<u32>) -> Self::Output {
        // SAFETY: the descriptor is new, so it has no other owner; and descriptors fit an `i32`.
        result.map(|fd| unsafe { OwnedFd::from_raw_fd(fd as i32) })
    }

    fn waits(&self) -> Option<Interest> {
        Some(Interest { fd: self.descriptor.raw(), direction: Direction::Readable })
    }

    /// Closes the connection, because its future is gone.
    fn discard(self, result: io::Result<u32>) {
        drop(self.finish(result));
    }
}

/// One `connect`.
pub(crate) struct Connect {
    pub(crate) descriptor: Arc<Descriptor>,
    /// Boxed, so that it does not move.
    pub(crate) peer: Box<SocketAddrAny>,
}

// SAFETY: the entry names the descriptor, which the `Arc` keeps open, and the boxed address.
unsafe impl IoOp for Connect {
    type Output = io::Result<()>;

    fn entry(&mut self, tables: &Tables) -> Option<squeue::Entry> {
        let (address, len) = (self.peer.as_ptr().cast(), self.peer.addr_len());
        entry_for!(tables.target(&self.descriptor), |fd| opcode::Connect::new(fd, address, len).build())
    }

    /// Called again once the socket is ready, it returns the result of the attempt.
    fn call(&mut self) -> io::Result<u32> {
        match rustix::net::connect(self.descriptor.as_fd(), &*self.peer) {
            Ok(()) | Err(Errno::ISCONN) => Ok(0),
            Err(Errno::INPROGRESS | Errno::ALREADY) => Err(Errno::AGAIN.into()),
            // Here this error is a lack of local ports, not a reason to wait.
            Err(Errno::AGAIN) => Err(Errno::ADDRNOTAVAIL.into()),
            Err(error) => Err(error.into()),
        }
    }

    fn finish(self, result: io::Result<u32>) -> io::Result<()> {
        result.map(|_| ())
    }

    fn waits(&self) -> Option<Interest> {
        Some(Interest { fd: self.descriptor.raw(), direction: Direction::Writable })
    }
}

/// One `recv` into the front of a buffer.
pub(crate) struct Receive {
    pub(crate) descriptor: Arc<Descriptor>,
    pub(crate) buffer: Buffer,
    /// True if the operation is attempted when it is polled, before the backend's turn.
    pub(crate) is_prompt: bool,
    /// True if it busy polls before it waits.
    pub(crate) busy_polls: bool,
}

impl Receive {
    /// The descriptor, and the part of the buffer that is received into.
    fn split(&mut self) -> (&Descriptor, &mut [u8]) {
        let len = self.buffer.len().min(TRANSFER_LIMIT_BYTES);
        (&self.descriptor, &mut self.buffer[..len])
    }
}

// SAFETY: the entry names the descriptor, which the `Arc` keeps open, and the buffer's memory, which does not move with
// the buffer, is written by no other handle while it lives, and is not freed when the buffer is leaked.
unsafe impl IoOp for Receive {
    type Output = (io::Result<usize>, Buffer);

    fn entry(&mut self, tables: &Tables) -> Option<squeue::Entry> {
        let (descriptor, space) = self.split();
        let (start, len) = (space.as_mut_ptr(), space.len() as u32);
        entry_for!(tables.target(descriptor), |fd| opcode::Recv::new(fd, start, len).build())
    }

    fn call(&mut self) -> io::Result<u32> {
        let (descriptor, space) = self.split();
        counted(rustix::net::recv(descriptor.as_fd(), space, RecvFlags::DONTWAIT).map(|(count, _)| count))
    }

    fn finish(self, result: io::Result<u32>) -> Self::Output {
        (result.map(|count| count as usize), self.buffer)
    }

    fn waits(&self) -> Option<Interest> {
        Some(Interest { fd: self.descriptor.raw(), direction: Direction::Readable })
    }

    fn is_prompt(&self) -> bool {
        self.is_prompt
    }

    fn busy_polls(&self) -> bool {
        self.busy_polls
    }
}

/// One `send` or `sendmsg` of the rest of a gather. If the peer is gone, that is an error and not a signal.
pub(crate) struct Send {
    pub(crate) descriptor: Arc<Descriptor>,
    pub(crate) gather: Box<Gather>,
    /// True if a ring sends everything before it completes, which saves completions of parts.
    pub(crate) whole: bool,
    /// True if the operation is attempted when it is polled, before the backend's turn.
    pub(crate) is_prompt: bool,
}

// SAFETY: the entry names the descriptor, which the `Arc` keeps open, and the boxed gather, with the memory of the
// slices that it holds; nothing of it moves with the box, or is freed when that is leaked.
unsafe impl IoOp for Send {
    type Output = (io::Result<usize>, Box<Gather>);

    fn entry(&mut self, tables: &Tables) -> Option<squeue::Entry> {
        let flags = libc::MSG_NOSIGNAL | if self.whole { libc::MSG_WAITALL } else { 0 };
        let target = tables.target(&self.descriptor);
        if let &[only] = self.gather.left() {
            let len = only.iov_len.min(TRANSFER_LIMIT_BYTES) as u32;
            return entry_for!(target, |fd| opcode::Send::new(fd, only.iov_base.cast(), len).flags(flags).build());
        }
        let message = self.gather.message();
        entry_for!(target, |fd| opcode::SendMsg::new(fd, message).flags(flags as u32).build())
    }

    fn call(&mut self) -> io::Result<u32> {
        let (fd, message) = (self.descriptor.raw(), self.gather.message());
        // SAFETY: the message and everything that it names belong to the gather, which does not change during the call.
        let count = unsafe { libc::sendmsg(fd, message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) };
        u32::try_from(count).map_err(|_negative| io::Error::last_os_error())
    }

    fn finish(self, result: io::Result<u32>) -> Self::Output {
        (result.map(|count| count as usize), self.gather)
    }

    fn waits(&self) -> Option<Interest> {
        Some(Interest { fd: self.descriptor.raw(), direction: Direction::Writable })
    }

    fn is_prompt(&self) -> bool {
        self.is_prompt
    }
}
