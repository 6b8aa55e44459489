//! Sending slices.

use std::io;
use std::sync::Arc;

use io_uring::{opcode, squeue};

use super::{TRANSFER_LIMIT_BYTES, counted, entry_for};
use crate::descriptor::Descriptor;
use crate::gather::Gather;
use crate::operation::{Direction, Interest, IoOp};
use crate::ring::Tables;

/// One `send` or `sendmsg` of what a gather has left. A peer that is gone is an error and no signal.
pub(crate) struct Send {
    pub(crate) descriptor: Arc<Descriptor>,
    pub(crate) gather: Box<Gather>,
    /// A ring is to go on until everything is sent, which saves it from coming back with a part.
    pub(crate) whole: bool,
    /// Not to wait for the backend's turn.
    pub(crate) is_prompt: bool,
}

// SAFETY: the entry names the descriptor, which the `Arc` keeps open, and the boxed gather, with the memory of the slices that
// it holds; nothing of it moves with the box, or is freed when that is leaked.
unsafe impl IoOp for Send {
    type Output = (io::Result<usize>, Box<Gather>);

    fn entry(&mut self, tables: &Tables) -> squeue::Entry {
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
        // SAFETY: the message and all that it names belong to the gather, which nobody changes during the call.
        counted(unsafe { libc::sendmsg(fd, message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) })
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
