//! Receiving into a buffer.
//!
//! Shape: the kernel looks for data first and waits only then. Having it wait first where the last receipt had emptied the
//! socket (`IORING_RECVSEND_POLL_FIRST`) made no difference that could be measured.

use std::io;
use std::sync::Arc;

use io_uring::{opcode, squeue};
use sealblock_runtime_memory::Buffer;

use super::{TRANSFER_LIMIT_BYTES, counted, entry_for};
use crate::descriptor::Descriptor;
use crate::operation::{Direction, Interest, IoOp};
use crate::ring::Tables;

/// One `recv` into the front of a buffer.
pub(crate) struct Receive {
    pub(crate) descriptor: Arc<Descriptor>,
    pub(crate) buffer: Buffer,
    /// Not to wait for the backend's turn.
    pub(crate) is_prompt: bool,
    /// To ask again before it waits.
    pub(crate) lingers: bool,
}

impl Receive {
    fn space(&mut self) -> &mut [u8] {
        let len = self.buffer.len().min(TRANSFER_LIMIT_BYTES);
        &mut self.buffer[..len]
    }
}

// SAFETY: the entry names the descriptor, which the `Arc` keeps open, and the buffer's memory, which does not move with the
// buffer, is written by nobody else while it lives, and is not freed when the buffer is leaked.
unsafe impl IoOp for Receive {
    type Output = (io::Result<usize>, Buffer);

    fn entry(&mut self, tables: &Tables) -> squeue::Entry {
        let target = tables.target(&self.descriptor);
        let space = self.space();
        let (start, len) = (space.as_mut_ptr(), space.len() as u32);
        entry_for!(target, |fd| opcode::Recv::new(fd, start, len).build())
    }

    fn call(&mut self) -> io::Result<u32> {
        let fd = self.descriptor.raw();
        let space = self.space();
        // SAFETY: the range is writable memory of that length, borrowed exclusively for the call.
        counted(unsafe { libc::recv(fd, space.as_mut_ptr().cast(), space.len(), libc::MSG_DONTWAIT) })
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

    fn lingers(&self) -> bool {
        self.lingers
    }
}
