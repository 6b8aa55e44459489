//! Files and block devices.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

use sealblock_runtime_memory::{Buffer, Slice};

use crate::core::{self, Core};
use crate::descriptor::Descriptor;
use crate::file_ops::{Allocate, DiscardBlocks, Read, Sync, SyncAround, SyncPart, Write, pages_to_write};
use crate::op::Op;
use crate::operation::IoOp;

/// How to open a file. The default opens nothing: set at least `read` or `write`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Allow reads.
    pub read: bool,
    /// Allow writes.
    pub write: bool,
    /// Create the file if it does not exist (with mode 0666 minus the umask).
    pub create: bool,
    /// Create the file, and fail if it exists.
    pub create_new: bool,
    /// Truncate the file to zero length.
    pub truncate: bool,
    /// Bypass the page cache (`O_DIRECT`): addresses, lengths and offsets must then be multiples of the logical block.
    pub direct: bool,
}

/// An open file or block device, used from the reactor that opened it. Clones share the descriptor.
///
/// Operations start when their future is first polled, and execute in no particular order. Dropping a future does not
/// undo its operation, which may still be executed; its buffer is kept until then. After the reactor has ended,
/// operations fail with `ECANCELED`.
#[derive(Clone)]
pub struct File {
    core: Rc<Core>,
    /// `None` only while it is being dropped.
    descriptor: Option<Arc<Descriptor>>,
}

impl File {
    /// Opens a file. This is an ordinary blocking call.
    ///
    /// # Errors
    /// Those of `open(2)`; `EINVAL` also if the file system does not support direct I/O.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn open(path: impl AsRef<Path>, options: Options) -> io::Result<File> {
        let file = std::fs::OpenOptions::new()
            .read(options.read)
            .write(options.write)
            .create(options.create)
            .create_new(options.create_new)
            .truncate(options.truncate)
            .custom_flags(if options.direct { libc::O_DIRECT } else { 0 })
            .open(path)?;
        Ok(File::from_fd(file.into()))
    }

    /// Takes over an open descriptor.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn from_fd(fd: OwnedFd) -> File {
        let core = core::current();
        let registration = core.fix(fd.as_fd());
        File { core, descriptor: Some(Arc::new(Descriptor::new(fd, registration))) }
    }

    pub(crate) fn descriptor(&self) -> &Arc<Descriptor> {
        self.descriptor.as_ref().expect("only drop takes the descriptor")
    }

    /// Executes an operation.
    pub(crate) async fn operation<K: IoOp>(&self, kind: K) -> K::Output {
        Op::new(Rc::clone(&self.core), kind).await
    }

    /// Executes an operation that changes the file.
    pub(crate) async fn change<K: IoOp>(&self, kind: K) -> K::Output {
        FileChange::new(self.descriptor(), Op::new(Rc::clone(&self.core), kind)).await
    }

    /// Reads once into the buffer, from `offset_bytes` on; returns the number of bytes read and the buffer. A read may
    /// be short, also before the end of the file.
    ///
    /// # Errors
    /// Those of `pread(2)`; `EINVAL` for an offset that does not fit an `off_t`.
    pub async fn read_at(&self, buffer: Buffer, offset_bytes: u64) -> (io::Result<usize>, Buffer) {
        self.read_behind(buffer, 0, offset_bytes).await
    }

    /// Reads until the buffer is full.
    ///
    /// # Errors
    /// As [`File::read_at`]; `UnexpectedEof` if the file ends earlier. What was read until then is in the buffer.
    pub async fn read_exact_at(&self, mut buffer: Buffer, offset_bytes: u64) -> (io::Result<()>, Buffer) {
        let mut filled = 0;
        while filled < buffer.len() {
            let offset = offset_bytes.saturating_add(filled as u64);
            let result;
            (result, buffer) = self.read_behind(buffer, filled, offset).await;
            match result {
                Ok(0) => return (Err(io::ErrorKind::UnexpectedEof.into()), buffer),
                Ok(count) => filled += count,
                Err(error) => return (Err(error), buffer),
            }
        }
        (Ok(()), buffer)
    }

    async fn read_behind(&self, buffer: Buffer, filled_bytes: usize, offset: u64) -> (io::Result<usize>, Buffer) {
        let offset_bytes = match checked(offset) {
            Ok(offset) => offset,
            Err(error) => return (Err(error), buffer),
        };
        let descriptor = Arc::clone(self.descriptor());
        self.operation(Read { descriptor, buffer, filled_bytes, offset_bytes }).await
    }

    /// Writes once from the slice, at `offset_bytes`; returns the bytes written, which may be fewer than the slice has.
    ///
    /// # Errors
    /// Those of `pwrite(2)`; `EINVAL` for an offset that does not fit an `off_t`.
    pub async fn write_at(&self, data: Slice, offset_bytes: u64) -> io::Result<usize> {
        let offset_bytes = checked(offset_bytes)?;
        let descriptor = Arc::clone(self.descriptor());
        self.change(Write { descriptor, data, offset_bytes }).await
    }

    /// Writes the whole slice.
    ///
    /// # Errors
    /// As [`File::write_at`]; `WriteZero` if the system accepts no more. How much was written is unknown.
    pub async fn write_all_at(&self, mut data: Slice, mut offset_bytes: u64) -> io::Result<()> {
        while !data.is_empty() {
            let count = self.write_at(data.clone(), offset_bytes).await?;
            if count == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            data = data.slice(count..);
            offset_bytes = offset_bytes.saturating_add(count as u64);
        }
        Ok(())
    }

    /// Makes earlier writes durable (`fdatasync(2)`), with the metadata that are needed to read them back.
    ///
    /// # Errors
    /// Those of `fdatasync(2)`. After an error it is unknown what is durable.
    pub async fn sync_data(&self) -> io::Result<()> {
        self.sync(true).await
    }

    /// The same, except that pages of the page cache in a range may stay there: the range must not contain anything
    /// that must be durable. If the system cannot do that, all pages are written out. With `none_behind` the page cache
    /// has no dirty pages after the range, which saves the second operation.
    ///
    /// # Errors
    /// As [`File::sync_data`].
    pub async fn sync_data_around(&self, range: Range<u64>, none_behind: bool) -> io::Result<()> {
        // The kernel takes the byte after a range of this length for its last one, and a length of 0 for the whole
        // file.
        let Some(last) =
            u32::try_from(range.start).ok().and_then(|start| start.checked_sub(1)).filter(|last| *last > 0)
        else {
            return self.sync_data().await;
        };
        let parts = [SyncPart::WriteFrom(range.end), SyncPart::SyncUpTo(last)];
        for part in parts.into_iter().skip(usize::from(none_behind)) {
            let descriptor = Arc::clone(self.descriptor());
            self.operation(SyncAround { descriptor, part }).await?;
        }
        Ok(())
    }

    /// True if the page cache has dirty pages from this byte on (`cachestat(2)`, Linux 6.5). An ordinary call; its time
    /// grows with the number of cached pages there, including clean ones.
    ///
    /// # Errors
    /// Those of `cachestat(2)`: `ENOSYS` before Linux 6.5, `EPERM` if it is filtered.
    pub fn has_pages_to_write(&self, from_bytes: u64) -> io::Result<bool> {
        pages_to_write(self.descriptor().as_fd(), from_bytes).map(|pages| pages > 0)
    }

    /// Makes data and metadata durable (`fsync(2)`).
    ///
    /// # Errors
    /// Those of `fsync(2)`. After an error it is unknown what is durable.
    pub async fn sync_all(&self) -> io::Result<()> {
        self.sync(false).await
    }

    async fn sync(&self, data_only: bool) -> io::Result<()> {
        let descriptor = Arc::clone(self.descriptor());
        self.operation(Sync { descriptor, data_only }).await
    }

    /// Allocates, punches out or zeroes a range; `mode` is made of `FALLOC_FL_*` as in `fallocate(2)`.
    ///
    /// # Errors
    /// Those of `fallocate(2)`: `EOPNOTSUPP` if the file system does not support the mode; `EINVAL` for a range that
    /// does not fit an `off_t`.
    pub async fn fallocate(&self, mode: i32, offset_bytes: u64, len_bytes: u64) -> io::Result<()> {
        let (offset_bytes, len_bytes) = (checked(offset_bytes)?, checked(len_bytes)?);
        let descriptor = Arc::clone(self.descriptor());
        self.change(Allocate { descriptor, mode, offset_bytes, len_bytes }).await
    }

    /// Discards a range of a block device (`BLKDISCARD`). Its content is undefined afterwards.
    ///
    /// # Errors
    /// `EOPNOTSUPP` if the device does not support it; `EINVAL` for a range that does not consist of its blocks.
    pub async fn discard(&self, offset_bytes: u64, len_bytes: u64) -> io::Result<()> {
        let descriptor = Arc::clone(self.descriptor());
        self.change(DiscardBlocks { descriptor, range: [offset_bytes, len_bytes] }).await
    }

    /// Waits until no write and no [`File::fallocate`] whose future was dropped is in flight: such an operation
    /// continues, and may still change its range until it completes.
    pub async fn drain(&self) {
        self.descriptor().late().drain().await;
    }

    /// Length in bytes of a file or of a block device. An ordinary, short call.
    ///
    /// # Errors
    /// Those of `lseek(2)`: `ESPIPE` for files without a length.
    pub fn len_bytes(&self) -> io::Result<u64> {
        // It moves the file position, which nothing here uses.
        Ok(rustix::fs::seek(self, rustix::fs::SeekFrom::End(0))?)
    }

    /// Truncates or extends the file, in the latter case with a hole (`ftruncate(2)`). An ordinary call.
    ///
    /// # Errors
    /// Those of `ftruncate(2)`; `EINVAL` for a length that does not fit an `off_t`.
    pub fn set_len_bytes(&self, len_bytes: u64) -> io::Result<()> {
        Ok(rustix::fs::ftruncate(self, checked(len_bytes)?)?)
    }
}

/// Rejects values that do not fit an `off_t`: to a ring, the offset -1 would mean the file position.
fn checked(offset_bytes: u64) -> io::Result<u64> {
    match i64::try_from(offset_bytes) {
        Ok(_) => Ok(offset_bytes),
        Err(_) => Err(io::Error::from_raw_os_error(libc::EINVAL)),
    }
}

/// An operation that changes a file. If it is dropped in flight, it is a late change until [`IoOp::discard`].
struct FileChange<'a, K: IoOp> {
    descriptor: &'a Arc<Descriptor>,
    op: Op<K>,
}

impl<'a, K: IoOp> FileChange<'a, K> {
    fn new(descriptor: &'a Arc<Descriptor>, op: Op<K>) -> FileChange<'a, K> {
        FileChange { descriptor, op }
    }
}

impl<K: IoOp> Future for FileChange<'_, K> {
    type Output = K::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<K::Output> {
        Pin::new(&mut self.op).poll(cx)
    }
}

impl<K: IoOp> Drop for FileChange<'_, K> {
    fn drop(&mut self) {
        // Before the operation is dropped, because it may have completed already.
        if self.op.is_in_flight() {
            self.descriptor.late().started();
        }
    }
}

impl Drop for File {
    fn drop(&mut self) {
        drop(self.descriptor.take());
        self.core.forget_files();
    }
}

impl AsFd for File {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor().as_fd()
    }
}

impl AsRawFd for File {
    fn as_raw_fd(&self) -> RawFd {
        self.descriptor().raw()
    }
}

impl std::fmt::Debug for File {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("File").field("fd", &self.as_raw_fd()).finish()
    }
}
