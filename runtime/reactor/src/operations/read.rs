//! Reading into a buffer.

use std::io;
use std::sync::Arc;

use io_uring::{opcode, squeue};
use sealblock_runtime_memory::Buffer;

use super::{TRANSFER_LIMIT_BYTES, counted, entry_for};
use crate::descriptor::Descriptor;
use crate::operation::IoOp;
use crate::ring::Tables;

/// One `pread` into the part of a buffer behind `filled_bytes`.
pub(crate) struct Read {
    pub(crate) descriptor: Arc<Descriptor>,
    pub(crate) buffer: Buffer,
    /// Bytes at the front of the buffer that stay as they are; at most its length.
    pub(crate) filled_bytes: usize,
    /// Where in the file the first byte comes from; fits an `off_t`.
    pub(crate) offset_bytes: u64,
}

impl Read {
    fn space(&mut self) -> &mut [u8] {
        let space = &mut self.buffer[self.filled_bytes..];
        let len = space.len().min(TRANSFER_LIMIT_BYTES);
        &mut space[..len]
    }
}

// SAFETY: the entry names the descriptor, which the `Arc` keeps open, and the buffer's memory, which does not move with
// the buffer, has no other handle, and is not freed when the buffer is leaked.
unsafe impl IoOp for Read {
    type Output = (io::Result<usize>, Buffer);

    fn entry(&mut self, tables: &Tables) -> squeue::Entry {
        let target = tables.target(&self.descriptor);
        let registered = self.buffer.registration().and_then(|registration| tables.buffer(registration));
        let offset = self.offset_bytes;
        let space = self.space();
        let (start, len) = (space.as_mut_ptr(), space.len() as u32);
        entry_for!(target, |fd| match registered {
            Some(index) => opcode::ReadFixed::new(fd, start, len, index).offset(offset).build(),
            None => opcode::Read::new(fd, start, len).offset(offset).build(),
        })
    }

    fn call(&mut self) -> io::Result<u32> {
        let (fd, offset) = (self.descriptor.raw(), self.offset_bytes as libc::off64_t);
        let space = self.space();
        // SAFETY: the range is writable memory of that length, borrowed exclusively for the call.
        counted(unsafe { libc::pread64(fd, space.as_mut_ptr().cast(), space.len(), offset) })
    }

    fn finish(self, result: io::Result<u32>) -> Self::Output {
        (result.map(|count| count as usize), self.buffer)
    }
}
