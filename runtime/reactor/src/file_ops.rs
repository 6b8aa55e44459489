//! Operations on files: read, write, sync, allocate, discard. To add one, copy [`Sync`].

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use io_uring::{opcode, squeue, types};
use rustix::fs::FallocateFlags;
use sealblock_runtime_memory::{Buffer, Slice};

use crate::descriptor::{Descriptor, Tables};
use crate::operation::{IoOp, TRANSFER_LIMIT_BYTES, counted, entry_for};

/// One `pread` into a buffer, after its first `filled_bytes`.
pub(crate) struct Read {
    pub(crate) descriptor: Arc<Descriptor>,
    pub(crate) buffer: Buffer,
    /// Bytes at the start of the buffer that are not changed; at most its length.
    pub(crate) filled_bytes: usize,
    /// Where in the file the first byte comes from; fits an `off_t`.
    pub(crate) offset_bytes: u64,
}

impl Read {
    /// The descriptor, and the part of the buffer that is read into.
    fn split(&mut self) -> (&Descriptor, &mut [u8]) {
        let space = &mut self.buffer[self.filled_bytes..];
        let len = space.len().min(TRANSFER_LIMIT_BYTES);
        (&self.descriptor, &mut space[..len])
    }
}

// SAFETY: the entry names the descriptor, which the `Arc` keeps open, and the buffer's memory, which does not move with
// the buffer, has no other handle, and is not freed when the buffer is leaked.
unsafe impl IoOp for Read {
    type Output = (io::Result<usize>, Buffer);

    fn entry(&mut self, tables: &Tables) -> Option<squeue::Entry> {
        let registered = self.buffer.registration().and_then(|registration| tables.buffer(registration));
        let offset = self.offset_bytes;
        let (descriptor, space) = self.split();
        let (start, len) = (space.as_mut_ptr(), space.len() as u32);
        entry_for!(tables.target(descriptor), |fd| match registered {
            Some(index) => opcode::ReadFixed::new(fd, start, len, index).offset(offset).build(),
            None => opcode::Read::new(fd, start, len).offset(offset).build(),
        })
    }

    fn call(&mut self) -> io::Result<u32> {
        let offset = self.offset_bytes;
        let (descriptor, space) = self.split();
        counted(rustix::io::pread(descriptor.as_fd(), space, offset))
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

    fn entry(&mut self, tables: &Tables) -> Option<squeue::Entry> {
        let registered = self.data.registration().and_then(|registration| tables.buffer(registration));
        let (start, len) = (self.data.as_ptr(), self.data.len().min(TRANSFER_LIMIT_BYTES) as u32);
        entry_for!(tables.target(&self.descriptor), |fd| match registered {
            Some(index) => opcode::WriteFixed::new(fd, start, len, index).offset(self.offset_bytes).build(),
            None => opcode::Write::new(fd, start, len).offset(self.offset_bytes).build(),
        })
    }

    fn call(&mut self) -> io::Result<u32> {
        let len = self.data.len().min(TRANSFER_LIMIT_BYTES);
        counted(rustix::io::pwrite(self.descriptor.as_fd(), &self.data[..len], self.offset_bytes))
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
    /// Omits metadata that reading the data back does not need.
    pub(crate) data_only: bool,
}

// SAFETY: the entry names the descriptor only, which the `Arc` keeps open.
unsafe impl IoOp for Sync {
    type Output = io::Result<()>;

    fn entry(&mut self, tables: &Tables) -> Option<squeue::Entry> {
        let flags = if self.data_only { types::FsyncFlags::DATASYNC } else { types::FsyncFlags::empty() };
        entry_for!(tables.target(&self.descriptor), |fd| opcode::Fsync::new(fd).flags(flags).build())
    }

    fn call(&mut self) -> io::Result<u32> {
        let fd = self.descriptor.as_fd();
        let result = if self.data_only { rustix::fs::fdatasync(fd) } else { rustix::fs::fsync(fd) };
        counted(result.map(|()| 0))
    }

    fn finish(self, result: io::Result<u32>) -> io::Result<()> {
        result.map(|_| ())
    }
}

/// `cachestat`, which has this number on every architecture.
const CACHESTAT: libc::c_long = 451;

/// Pages of the page cache from this byte on that are dirty or being written.
pub(crate) fn pages_to_write(file: BorrowedFd<'_>, from_bytes: u64) -> io::Result<u64> {
    // Offset and length of the range; a length of 0 means up to the end.
    let range = [from_bytes, 0];
    // The numbers of pages: cached, dirty, being written, evicted, and recently evicted.
    let mut found = [0u64; 5];
    // SAFETY: the kernel reads two numbers of 64 bits from the one array and writes five to the other; both live until
    // it returns.
    let status = unsafe { libc::syscall(CACHESTAT, file.as_raw_fd(), range.as_ptr(), found.as_mut_ptr(), 0) };
    if status == 0 { Ok(found[1] + found[2]) } else { Err(io::Error::last_os_error()) }
}

/// `fdatasync` of a file except for the pages of a range: first those after it are written out, then those before it,
/// with everything else that a sync does. Without an entry for that, all are.
pub(crate) struct SyncAround {
    pub(crate) descriptor: Arc<Descriptor>,
    pub(crate) part: SyncPart,
}

/// A step of [`SyncAround`].
#[derive(Clone, Copy)]
pub(crate) enum SyncPart {
    /// Writes out pages from this byte on.
    WriteFrom(u64),
    /// Syncs, and writes out the pages from the start up to the one with this byte.
    SyncUpTo(u32),
}

// SAFETY: the entry names the descriptor only, which the `Arc` keeps open.
unsafe impl IoOp for SyncAround {
    type Output = io::Result<()>;

    fn entry(&mut self, tables: &Tables) -> Option<squeue::Entry> {
        const WRITE_AND_WAIT: u32 =
            libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
        entry_for!(tables.target(&self.descriptor), |fd| match self.part {
            // A length of 0 means up to the end.
            SyncPart::WriteFrom(offset) =>
                opcode::SyncFileRange::new(fd, 0).offset(offset).flags(WRITE_AND_WAIT).build(),
            SyncPart::SyncUpTo(last) => opcode::Fsync::new(fd).len(last).flags(types::FsyncFlags::DATASYNC).build(),
        })
    }

    fn call(&mut self) -> io::Result<u32> {
        let synced = match self.part {
            SyncPart::WriteFrom(_) => Ok(()),
            SyncPart::SyncUpTo(_) => rustix::fs::fdatasync(self.descriptor.as_fd()),
        };
        counted(synced.map(|()| 0))
    }

    fn finish(self, result: io::Result<u32>) -> io::Result<()> {
        result.map(|_| ())
    }
}

/// `BLKDISCARD`: `_IO(0x12, 119)` of the kernel's `linux/fs.h`.
const BLOCK_DISCARD: libc::c_ulong = 0x1277;

/// A discard of a block device's range. Only newer kernels have a ring entry for it, so a thread makes the call.
pub(crate) struct DiscardBlocks {
    pub(crate) descriptor: Arc<Descriptor>,
    /// The offset and the number of bytes.
    pub(crate) range: [u64; 2],
}

// SAFETY: it has no entry.
unsafe impl IoOp for DiscardBlocks {
    type Output = io::Result<()>;

    fn entry(&mut self, _: &Tables) -> Option<squeue::Entry> {
        None
    }

    fn blocks(&self) -> bool {
        true
    }

    fn call(&mut self) -> io::Result<u32> {
        // SAFETY: the call reads two numbers of 64 bits, which are `range`, and does not use them after it returns.
        let status = unsafe { libc::ioctl(self.descriptor.as_fd().as_raw_fd(), BLOCK_DISCARD, self.range.as_ptr()) };
        if status == 0 { Ok(0) } else { Err(io::Error::last_os_error()) }
    }

    fn finish(self, result: io::Result<u32>) -> io::Result<()> {
        result.map(|_| ())
    }

    fn discard(self, _: io::Result<u32>) {
        self.descriptor.late().ended();
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

    fn entry(&mut self, tables: &Tables) -> Option<squeue::Entry> {
        entry_for!(tables.target(&self.descriptor), |fd| {
            opcode::Fallocate::new(fd, self.len_bytes).offset(self.offset_bytes).mode(self.mode).build()
        })
    }

    fn call(&mut self) -> io::Result<u32> {
        let mode = FallocateFlags::from_bits_retain(self.mode as u32);
        let result = rustix::fs::fallocate(self.descriptor.as_fd(), mode, self.offset_bytes, self.len_bytes);
        counted(result.map(|()| 0))
    }

    fn finish(self, result: io::Result<u32>) -> io::Result<()> {
        result.map(|_| ())
    }

    fn discard(self, _: io::Result<u32>) {
        self.descriptor.late().ended();
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, SeekFrom, Write as _};
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn pages_that_wait_to_be_written_are_counted_from_a_byte_on() {
        // Not in the usual place for such files, which may be in memory: its pages always count as written or never do.
        let mut file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let pages = |file: &std::fs::File, from| pages_to_write(file.as_fd(), from);
        match pages(&file, 0) {
            // Before Linux 6.5, or filtered.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM)) => return,
            none => assert_eq!(none.unwrap(), 0),
        }
        file.seek(SeekFrom::Start(1 << 20)).unwrap();
        file.write_all(&[1; 8192]).unwrap();
        assert_eq!(
            [0, 1 << 20, (1 << 20) + 4096, 2 << 20].map(|from| pages(&file, from).unwrap() > 0),
            [true, true, true, false]
        );
        file.sync_data().unwrap();
        assert_eq!(pages(&file, 0).unwrap(), 0);
    }
}
