//! Writing a slice.

use std::io;
use std::sync::Arc;

use io_uring::{opcode, squeue};
use sealblock_runtime_memory::Slice;

use super::{TRANSFER_LIMIT_BYTES, counted, entry_for};
use crate::descriptor::Descriptor;
use crate::operation::IoOp;
use crate::ring::Tables;

/// One `pwrite` of a slice.
pub(crate) struct Write {
    pub(crate) descriptor: Arc<Descriptor>,
    pub(crate) data: Slice,
    /// Where in the file the first byte goes; fits an `off_t`.
    pub(crate) offset_bytes: u64,
}

// SAFETY: the entry names the descriptor, which the `Arc` keeps open, and the slice's memory, which does not move with
// the slice, is not written while it lives, and is not freed when the slice is leaked.
unsafe impl IoOp for Write {
    type Output = io::Result<usize>;

    fn entry(&mut self, tables: &Tables) -> squeue::Entry {
        let registered = self.data.registration().and_then(|registration| tables.buffer(registration));
        let (start, len) = (self.data.as_ptr(), self.data.len().min(TRANSFER_LIMIT_BYTES) as u32);
        entry_for!(tables.target(&self.descriptor), |fd| match registered {
            Some(index) => opcode::WriteFixed::new(fd, start, len, index).offset(self.offset_bytes).build(),
            None => opcode::Write::new(fd, start, len).offset(self.offset_bytes).build(),
        })
    }

    fn call(&mut self) -> io::Result<u32> {
        let (fd, offset) = (self.descriptor.raw(), self.offset_bytes as libc::off64_t);
        let len = self.data.len().min(TRANSFER_LIMIT_BYTES);
        // SAFETY: the slice is readable memory of at least that length.
        counted(unsafe { libc::pwrite64(fd, self.data.as_ptr().cast(), len, offset) })
    }

    fn finish(self, result: io::Result<u32>) -> io::Result<usize> {
        result.map(|count| count as usize)
    }

    fn discard(self, _: io::Result<u32>) {
        self.descriptor.late().end();
    }
}
