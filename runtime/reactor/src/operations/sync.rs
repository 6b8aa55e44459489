//! Making what was written durable.

use std::io;
use std::sync::Arc;

use io_uring::{opcode, squeue, types};

use super::{counted, entry_for};
use crate::descriptor::Descriptor;
use crate::operation::IoOp;
use crate::ring::Tables;

/// `fdatasync` or `fsync` of a whole file.
pub(crate) struct Sync {
    pub(crate) descriptor: Arc<Descriptor>,
    /// Leaves out metadata that reading the data back does not need.
    pub(crate) data_only: bool,
}

// SAFETY: the entry names the descriptor only, which the `Arc` keeps open.
unsafe impl IoOp for Sync {
    type Output = io::Result<()>;

    fn entry(&mut self, tables: &Tables) -> squeue::Entry {
        let flags = if self.data_only { types::FsyncFlags::DATASYNC } else { types::FsyncFlags::empty() };
        entry_for!(tables.target(&self.descriptor), |fd| opcode::Fsync::new(fd).flags(flags).build())
    }

    fn call(&mut self) -> io::Result<u32> {
        let fd = self.descriptor.raw();
        // SAFETY: the calls take no pointers, and the descriptor is open.
        let result = unsafe { if self.data_only { libc::fdatasync(fd) } else { libc::fsync(fd) } };
        counted(result as libc::ssize_t)
    }

    fn finish(self, result: io::Result<u32>) -> io::Result<()> {
        result.map(|_| ())
    }
}
