//! Operations on files: read, write, sync, allocate. To add one, copy [`Sync`].

use std::io;
use std::sync::Arc;

use io_uring::{opcode, squeue, types};
use sealblock_runtime_memory::{Buffer, Slice};

use crate::descriptor::Descriptor;
use crate::operation::{IoOp, TRANSFER_LIMIT_BYTES, counted, entry_for};
use crate::ring::Tables;

/// One `pread` into a buffer behind its first `filled_bytes`.
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
        self.descriptor.late().ended();
    }
}

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

/// `fallocate` in any of its modes.
pub(crate) struct Allocate {
    pub(crate) descriptor: Arc<Descriptor>,
    /// `FALLOC_FL_*`.
    pub(crate) mode: i32,
    /// Both fit an `off_t`; the caller checked.
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
        self.descriptor.late().ended();
    }
}
