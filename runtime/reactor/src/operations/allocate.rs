//! Giving space to a range of a file, or taking it away.

use std::io;
use std::sync::Arc;

use io_uring::{opcode, squeue};

use super::{counted, entry_for};
use crate::descriptor::Descriptor;
use crate::operation::IoOp;
use crate::ring::Tables;

/// `fallocate` in any of its modes.
pub(crate) struct Allocate {
    pub(crate) descriptor: Arc<Descriptor>,
    /// `FALLOC_FL_*`.
    pub(crate) mode: i32,
    /// Both fit an `off_t`; the file checked.
    pub(crate) offset_bytes: u64,
    pub(crate) len_bytes: u64,
}

// SAFETY: the entry names the descriptor only, which the `Arc` keeps open.
unsafe impl IoOp for Allocate {
    type Output = io::Result<()>;

    fn entry(&mut self, tables: &Tables) -> squeue::Entry {
        entry_for!(tables.target(&self.descriptor), |fd| {
            opcode::Fallocate::new(fd, self.len_bytes).offset(self.offset_bytes).mode(self.mode).build()
        })
    }

    fn call(&mut self) -> io::Result<u32> {
        let (offset, len) = (self.offset_bytes as libc::off64_t, self.len_bytes as libc::off64_t);
        // SAFETY: the call takes no pointers, and the descriptor is open.
        counted(unsafe { libc::fallocate64(self.descriptor.raw(), self.mode, offset, len) } as libc::ssize_t)
    }

    fn finish(self, result: io::Result<u32>) -> io::Result<()> {
        result.map(|_| ())
    }

    fn discard(self, _: io::Result<u32>) {
        self.descriptor.late().end();
    }
}
