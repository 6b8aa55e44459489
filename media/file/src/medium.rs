//! A file or block device as a medium.
//!
//! Invariants: with direct I/O every address handed to the kernel is aligned as the kernel requires, through a copy if
//! the caller's is not; ranges are checked against the length before anything is done.

use std::cell::{Cell, OnceCell};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sealblock_block::{Medium, MediumError, MediumErrorKind, NoteKeeping};
use sealblock_runtime_memory::{Buffer, Pool, Slice};
use sealblock_runtime_reactor::File;

use crate::backing::Backing;
use crate::kernel::{self, Alignment};
use crate::notes::NoteFile;
use crate::open::{self, OpenError, Options};

/// Bytes of zeroes written at a time where the kernel does not write them itself.
const ZEROES_BYTES: u64 = 1 << 20;
/// `FALLOC_FL_WRITE_ZEROES`: zeroes that count as written, made by the device (Linux 6.17). In a file the extents stay
/// allocated; a block device may deallocate its blocks.
const WRITE_ZEROES: i32 = 0x80;

/// How zeroes are made. A method that turns out to be missing is not tried again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Zeroing {
    /// By the device.
    Device,
    /// By the file system's metadata, or by a block device that keeps its blocks allocated.
    Range,
    /// By writing them.
    Written,
}

impl Zeroing {
    /// The best method that leaves blocks allocated.
    fn first_of(block_device: bool) -> Zeroing {
        if block_device { Zeroing::Range } else { Zeroing::Device }
    }
}

/// What `sealblock info` shows of a file or block device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FileInfo {
    /// The path it was opened by.
    pub path: PathBuf,
    /// `st_dev` of a file, `st_rdev` of a block device, whatever is at the path now.
    pub device: u64,
    /// `st_ino` of a file; 0 of a block device.
    pub inode: u64,
    /// What executes its operations, such as "io_uring (...)".
    pub backend: String,
    /// True if it bypasses the page cache.
    pub is_direct: bool,
    /// True if it is a block device.
    pub is_block_device: bool,
    /// True if it accepts no writes.
    pub is_read_only: bool,
    /// True if other processes are locked out; false where the file system has no locks.
    pub is_locked: bool,
    /// Unit of reads and writes, in bytes.
    pub sector_bytes: u32,
    /// Length in bytes, in whole sectors.
    pub length_bytes: u64,
    /// Allocated space in bytes; unknown for a block device.
    pub allocated_bytes: Option<u64>,
    /// The type of its file system; `None` for a block device.
    pub file_system: Option<String>,
}

/// A file or block device, used from the reactor that opened it. See the crate's header.
pub struct FileMedium {
    pub(crate) file: File,
    pub(crate) backing: Arc<Backing>,
    pub(crate) block_device: bool,
    pub(crate) locked: bool,
    alignment: Alignment,
    direct: bool,
    read_only: bool,
    /// For a file that is open for reading: found out when first needed.
    punches: OnceCell<bool>,
    /// For a block device that does not punch.
    discards: bool,
    zeroing: Cell<Zeroing>,
    notes: NoteFile,
    pool: Pool,
    /// Files that stay open as long as the medium.
    kept: Vec<std::fs::File>,
}

impl FileMedium {
    /// Opens `path` on the current reactor, with ordinary blocking calls. A writer is alone; readers share.
    ///
    /// # Errors
    /// [`OpenError::InUse`] if another process has locked the file, [`OpenError::Kind`] if it is neither a file nor a
    /// block device, and otherwise the error of the system.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn open(path: impl AsRef<Path>, options: Options) -> Result<FileMedium, OpenError> {
        let path = path.as_ref();
        let failed = |source| open::system(path, "find out about", source);
        let mut opened = open::open(path, options)?;
        let mut alignment = None;
        if opened.direct {
            alignment = kernel::direct_alignment(&opened.file).map_err(failed)?;
            if alignment.is_none() {
                // Locks also conflict between openings of one process, so this one's is released before the file is
                // opened again.
                drop(opened);
                let again = Options { create_new: false, write: options.writes(), buffered: true };
                opened = open::open(path, again)?;
            }
        }
        let alignment = match alignment {
            Some(found) => found,
            None => Alignment::buffered(&opened.file, opened.block_device),
        };
        let punches = OnceCell::new();
        if options.writes() || opened.block_device {
            let _ = punches.set(kernel::punches(&opened.file, opened.block_device));
        }
        let discards = opened.block_device && kernel::discards(&opened.file);
        let (block_device, direct, locked) = (opened.block_device, opened.direct, opened.locked);
        let about = opened.file.metadata().map_err(failed)?;
        let notes = NoteFile::beside(opened.direct, options.writes());
        let file = File::from_fd(opened.file.into());
        let medium = FileMedium {
            backing: Backing::new(path, &about, block_device, file.len_bytes().map_err(failed)?),
            file,
            block_device,
            locked,
            alignment,
            direct,
            read_only: !options.writes(),
            punches,
            discards,
            zeroing: Cell::new(Zeroing::first_of(block_device)),
            notes,
            pool: sealblock_runtime_reactor::pool(),
            kept: Vec::new(),
        };
        if !direct && !options.buffered {
            tracing::warn!(path = %path.display(), "no direct I/O on this file system; going through the page cache");
        }
        Ok(medium)
    }

    /// What opens the same file on other cores, with a descriptor and buffers of their own. The lock belongs to all of
    /// these descriptors: it is released when the last one is closed. Notes are for one core only.
    ///
    /// # Errors
    /// When there is no descriptor left.
    pub fn elsewhere(&self) -> io::Result<FileElsewhere> {
        Ok(FileElsewhere {
            file: self.file.as_fd().try_clone_to_owned()?,
            backing: Arc::clone(&self.backing),
            block_device: self.block_device,
            locked: self.locked,
            alignment: self.alignment,
            direct: self.direct,
            read_only: self.read_only,
            punches: self.punches.get().copied(),
            discards: self.discards,
        })
    }

    /// Keeps files open as long as the medium: those whose locks belong to it.
    pub fn keep(&mut self, files: Vec<std::fs::File>) {
        self.kept.extend(files);
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        self.backing.path()
    }

    /// The open file, for calls that are not reads and writes, such as commands to a drive.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// True if it bypasses the page cache.
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    /// True if it is a block device and not a file.
    pub fn is_block_device(&self) -> bool {
        self.block_device
    }

    /// Makes the file `length_bytes` long; new bytes are zeroes that take no space. Durable after the next `sync`. The
    /// length of a block device does not change; it is only checked that it is long enough.
    ///
    /// # Errors
    /// `ReadOnly` on a medium opened for reading, `NoSpace` if the block device or the file system has no room,
    /// `Failed` for a length that is not a multiple of the sector.
    pub fn set_len_bytes(&self, length_bytes: u64) -> Result<(), MediumError> {
        const ACTION: &str = "set the length";
        self.check_writable(ACTION, length_bytes)?;
        let refuse =
            |kind, reason: String| Err(MediumError { kind, doing: ACTION, offset_bytes: length_bytes, reason });
        if !length_bytes.is_multiple_of(u64::from(self.alignment.sector_bytes)) {
            return refuse(MediumErrorKind::Failed, "the length is not a multiple of the sector size".to_owned());
        }
        if self.block_device {
            let there = self.backing.length_bytes();
            let missing = format!("the block device has only {there} bytes");
            return if length_bytes <= there { Ok(()) } else { refuse(MediumErrorKind::NoSpace, missing) };
        }
        self.end_file_at(ACTION, length_bytes)
    }

    /// Makes the file end at `length_bytes`, which may be inside a sector; the rest of that sector is then unreachable.
    /// Durable after the next `sync`.
    ///
    /// # Errors
    /// As for [`FileMedium::set_len_bytes`]; a block device cannot be shortened: `Unsupported`.
    pub fn end_at(&self, length_bytes: u64) -> Result<(), MediumError> {
        const ACTION: &str = "set the length";
        self.check_writable(ACTION, length_bytes)?;
        if self.block_device {
            let reason = "a block device keeps its length".to_owned();
            let kind = MediumErrorKind::Unsupported;
            return Err(MediumError { kind, doing: ACTION, offset_bytes: length_bytes, reason });
        }
        self.end_file_at(ACTION, length_bytes)
    }

    fn end_file_at(&self, doing: &'static str, length_bytes: u64) -> Result<(), MediumError> {
        let resized = self.backing.resize(length_bytes, || self.file.set_len_bytes(length_bytes));
        resized.map_err(|error| MediumError::from_io(doing, length_bytes, &error))
    }

    fn check_writable(&self, doing: &'static str, offset_bytes: u64) -> Result<(), MediumError> {
        if !self.read_only {
            return Ok(());
        }
        let reason = "opened for reading only".to_owned();
        Err(MediumError { kind: MediumErrorKind::ReadOnly, doing, offset_bytes, reason })
    }

    /// Refuses ranges that are not within the length or not in whole sectors.
    fn check(&self, doing: &'static str, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        self.check_units(self.alignment.sector_bytes, doing, offset_bytes, length_bytes)
    }

    fn check_units(
        &self,
        unit_bytes: u32,
        doing: &'static str,
        offset_bytes: u64,
        length_bytes: u64,
    ) -> Result<(), MediumError> {
        let refuse = |kind, reason: &str| Err(MediumError { kind, doing, offset_bytes, reason: reason.to_owned() });
        let sector = u64::from(unit_bytes);
        if !offset_bytes.is_multiple_of(sector) || !length_bytes.is_multiple_of(sector) {
            return refuse(MediumErrorKind::Failed, "offset or length is not a multiple of the sector size");
        }
        if offset_bytes.checked_add(length_bytes).is_none_or(|end| end > self.len_bytes()) {
            return refuse(MediumErrorKind::PastEnd, "past the end of the file");
        }
        if offset_bytes + length_bytes > self.backing.kept_bytes() {
            return Err(self.cut_off(doing, offset_bytes));
        }
        Ok(())
    }

    /// The error of requests behind the end that a file was truncated to while it was in use.
    #[cold]
    fn cut_off(&self, doing: &'static str, offset_bytes: u64) -> MediumError {
        let kept = self.backing.kept_bytes();
        let reason = format!("the file was truncated to {kept} bytes while it was in use; what was behind is lost");
        MediumError { kind: MediumErrorKind::PastEnd, doing, offset_bytes, reason }
    }

    /// The error of a read of the file. One that ended early shows that the file was truncated.
    fn read_error(&self, offset_bytes: u64, error: &io::Error) -> MediumError {
        if error.kind() == io::ErrorKind::UnexpectedEof && !self.block_device {
            let expected = self.backing.length_bytes();
            if let Ok(there) = self.file.len_bytes() {
                self.backing.found_length(expected, there);
            }
            if self.backing.cut_off().is_some() {
                return self.cut_off("read", offset_bytes);
            }
        }
        MediumError::from_io("read", offset_bytes, error)
    }

    /// Reads parts of sectors by reading the sectors that contain them.
    async fn read_parts(&self, offset_bytes: u64, mut into: Buffer) -> (Result<(), MediumError>, Buffer) {
        if let Err(refused) = self.check_units(self.read_unit_bytes(), "read", offset_bytes, into.len() as u64) {
            return (Err(refused), into);
        }
        let sector = u64::from(self.alignment.sector_bytes);
        let start = offset_bytes - offset_bytes % sector;
        let end = (offset_bytes + into.len() as u64).next_multiple_of(sector);
        let (result, sectors) = self.file.read_exact_at(self.pool.take((end - start) as usize), start).await;
        let result = result.map_err(|error| self.read_error(offset_bytes, &error));
        if result.is_ok() {
            let from = (offset_bytes - start) as usize;
            let length = into.len();
            into.copy_from_slice(&sectors[from..from + length]);
        }
        (result, into)
    }

    /// True if the kernel accepts this address.
    fn is_aligned(&self, bytes: &[u8]) -> bool {
        bytes.as_ptr().addr().is_multiple_of(self.alignment.memory_bytes)
    }

    /// Writes zeroes from one buffer.
    async fn write_zeroes(&self, offset_bytes: u64, length_bytes: u64) -> io::Result<()> {
        let mut zeroes = self.pool.take(length_bytes.min(ZEROES_BYTES) as usize);
        zeroes.fill(0);
        let zeroes = zeroes.freeze();
        let mut done = 0;
        while done < length_bytes {
            let part = (length_bytes - done).min(ZEROES_BYTES);
            self.file.write_all_at(zeroes.slice(..part as usize), offset_bytes + done).await?;
            done += part;
        }
        Ok(())
    }

    /// Makes zeroes by the best available method.
    async fn make_zeroes(&self, offset_bytes: u64, length_bytes: u64) -> io::Result<()> {
        loop {
            let (mode, next) = match self.zeroing.get() {
                Zeroing::Device => (WRITE_ZEROES, Zeroing::Range),
                Zeroing::Range => (libc::FALLOC_FL_ZERO_RANGE, Zeroing::Written),
                Zeroing::Written => return self.write_zeroes(offset_bytes, length_bytes).await,
            };
            match self.file.fallocate(mode, offset_bytes, length_bytes).await {
                Err(error) if is_missing(&error) => self.zeroing.set(next),
                result => return result,
            }
        }
    }

    /// Describes the medium as it is now, with ordinary blocking calls.
    ///
    /// # Errors
    /// Errors of `statx` and `fstatfs`.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn describe(&self) -> io::Result<FileInfo> {
        let known = kernel::statx(&self.file)?;
        let file_system = if self.block_device { None } else { Some(kernel::file_system(&self.file)?) };
        let (device, inode) = match self.block_device {
            true => (libc::makedev(known.stx_rdev_major, known.stx_rdev_minor), 0),
            false => (libc::makedev(known.stx_dev_major, known.stx_dev_minor), known.stx_ino),
        };
        Ok(FileInfo {
            path: self.path().to_owned(),
            device,
            inode,
            backend: sealblock_runtime_reactor::backend().to_string(),
            is_direct: self.is_direct(),
            is_block_device: self.block_device,
            is_read_only: self.is_read_only(),
            is_locked: self.locked,
            sector_bytes: self.sector_bytes(),
            length_bytes: self.len_bytes(),
            // `st_blocks` counts 512 bytes on every file system.
            allocated_bytes: (!self.block_device).then_some(known.stx_blocks * 512),
            file_system,
        })
    }
}

/// Opens a file that a medium of another core has open; see [`FileMedium::elsewhere`].
#[derive(Debug)]
pub struct FileElsewhere {
    file: OwnedFd,
    backing: Arc<Backing>,
    block_device: bool,
    locked: bool,
    alignment: Alignment,
    direct: bool,
    read_only: bool,
    punches: Option<bool>,
    discards: bool,
}

impl FileElsewhere {
    /// The file as a medium of the current reactor.
    ///
    /// # Errors
    /// When there is no descriptor left.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn open_here(&self) -> io::Result<FileMedium> {
        Ok(FileMedium {
            file: File::from_fd(self.file.try_clone()?),
            backing: Arc::clone(&self.backing),
            block_device: self.block_device,
            locked: self.locked,
            alignment: self.alignment,
            direct: self.direct,
            read_only: self.read_only,
            punches: self.punches.map_or_else(OnceCell::new, OnceCell::from),
            discards: self.discards,
            zeroing: Cell::new(Zeroing::first_of(self.block_device)),
            notes: NoteFile::beside(self.direct, !self.read_only),
            pool: sealblock_runtime_reactor::pool(),
            kept: Vec::new(),
        })
    }
}

/// True if an operation is not supported, rather than having failed.
fn is_missing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS))
}

impl Medium for FileMedium {
    fn len_bytes(&self) -> u64 {
        // Bytes after the last whole sector are not used.
        let length = self.backing.length_bytes();
        length - length % u64::from(self.alignment.sector_bytes)
    }

    fn sector_bytes(&self) -> u32 {
        self.alignment.sector_bytes
    }

    fn read_unit_bytes(&self) -> u32 {
        kernel::SMALLEST_SECTOR_BYTES
    }

    fn reads_wait(&self) -> bool {
        self.is_direct()
    }

    fn is_read_only(&self) -> bool {
        self.read_only
    }

    fn can_punch(&self) -> bool {
        *self.punches.get_or_init(|| kernel::punches_beside(self.path()).unwrap_or(false))
    }

    fn buffer(&self, len_bytes: usize) -> Buffer {
        self.pool.take(len_bytes)
    }

    async fn read(&self, offset_bytes: u64, mut into: Buffer) -> (Result<(), MediumError>, Buffer) {
        if !(offset_bytes | into.len() as u64).is_multiple_of(u64::from(self.alignment.sector_bytes)) {
            return Box::pin(self.read_parts(offset_bytes, into)).await;
        }
        if let Err(refused) = self.check("read", offset_bytes, into.len() as u64) {
            return (Err(refused), into);
        }
        let mut unaligned = None;
        if !self.is_aligned(&into) {
            let aligned = self.pool.take(into.len());
            unaligned = Some(std::mem::replace(&mut into, aligned));
        }
        let (result, read) = self.file.read_exact_at(into, offset_bytes).await;
        let result = result.map_err(|error| self.read_error(offset_bytes, &error));
        let Some(mut into) = unaligned else { return (result, read) };
        if result.is_ok() {
            into.copy_from_slice(&read);
        }
        (result, into)
    }

    async fn write(&self, offset_bytes: u64, mut from: Slice) -> Result<(), MediumError> {
        self.check_writable("write", offset_bytes)?;
        self.check("write", offset_bytes, from.len() as u64)?;
        if !self.is_aligned(&from) {
            let mut aligned = self.pool.take(from.len());
            aligned.copy_from_slice(&from);
            from = aligned.freeze();
        }
        let written = self.file.write_all_at(from, offset_bytes).await;
        written.map_err(|error| MediumError::from_io("write", offset_bytes, &error))
    }

    fn note_keeping(&self) -> NoteKeeping {
        self.notes.keeping()
    }

    fn note(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediumError> {
        const ACTION: &str = "note";
        self.check_writable(ACTION, offset_bytes)?;
        self.check(ACTION, offset_bytes, bytes.len() as u64)?;
        let noted = self.notes.write(&self.file, offset_bytes, bytes);
        noted.map_err(|error| MediumError::from_io(ACTION, offset_bytes, &error))
    }

    async fn submitted(&self) {
        sealblock_runtime_reactor::submitted().await;
    }

    async fn sync(&self) -> Result<(), MediumError> {
        let synced = match self.notes.noted() {
            // Only notes are in the page cache on purpose, and they need not be durable.
            Some(range) => {
                let none_behind = self.notes.has_none_behind(&self.file, range.end);
                self.file.sync_data_around(range, none_behind).await
            }
            None => self.file.sync_data().await,
        };
        synced.map_err(|error| MediumError::from_io("sync", 0, &error))
    }

    async fn drain(&self) {
        self.file.drain().await;
    }

    async fn punch(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        const ACTION: &str = "punch a hole";
        self.check_writable(ACTION, offset_bytes)?;
        self.check(ACTION, offset_bytes, length_bytes)?;
        if length_bytes == 0 {
            return Ok(());
        }
        // On a block device this asks for zeroes that may unmap, unlike a discard, which promises no zeroes. It is also
        // tried if the kernel does not report that it frees space, since some drivers do so without reporting it.
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        match self.file.fallocate(mode, offset_bytes, length_bytes).await {
            Err(error) if is_missing(&error) => self.zero(offset_bytes, length_bytes).await,
            result => result.map_err(|error| MediumError::from_io(ACTION, offset_bytes, &error)),
        }
    }

    fn can_discard(&self) -> bool {
        self.discards || self.can_punch()
    }

    async fn discard(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        const ACTION: &str = "discard";
        // Callers rely on freed space reading as zeroes, also after a discard.
        if self.can_punch() || !self.block_device {
            return self.punch(offset_bytes, length_bytes).await;
        }
        self.check_writable(ACTION, offset_bytes)?;
        self.check(ACTION, offset_bytes, length_bytes)?;
        if length_bytes == 0 {
            return Ok(());
        }
        match self.file.discard(offset_bytes, length_bytes).await {
            Err(error) if is_missing(&error) => self.punch(offset_bytes, length_bytes).await,
            result => result.map_err(|error| MediumError::from_io(ACTION, offset_bytes, &error)),
        }
    }

    async fn reserve(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        const ACTION: &str = "reserve space";
        self.check_writable(ACTION, offset_bytes)?;
        self.check(ACTION, offset_bytes, length_bytes)?;
        if self.block_device || length_bytes == 0 {
            return Ok(());
        }
        match self.file.fallocate(libc::FALLOC_FL_KEEP_SIZE, offset_bytes, length_bytes).await {
            Err(error) if is_missing(&error) => {
                let reason = "the file system does not reserve space".to_owned();
                Err(MediumError { kind: MediumErrorKind::Unsupported, doing: ACTION, offset_bytes, reason })
            }
            result => result.map_err(|error| MediumError::from_io(ACTION, offset_bytes, &error)),
        }
    }

    fn is_hole(&self, offset_bytes: u64, length_bytes: u64) -> bool {
        !self.block_device && kernel::is_hole(&self.file, offset_bytes, length_bytes)
    }

    fn status_at(&self, offset_bytes: u64, length_bytes: u64) -> (u64, bool) {
        match self.block_device {
            true => (length_bytes, false),
            false => kernel::run_at(&self.file, offset_bytes, length_bytes),
        }
    }

    async fn zero(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        const ACTION: &str = "write zeroes";
        self.check_writable(ACTION, offset_bytes)?;
        self.check(ACTION, offset_bytes, length_bytes)?;
        if length_bytes == 0 {
            return Ok(());
        }
        let made = self.make_zeroes(offset_bytes, length_bytes).await;
        made.map_err(|error| MediumError::from_io(ACTION, offset_bytes, &error))
    }

    async fn set_len(&self, length_bytes: u64) -> Result<(), MediumError> {
        self.set_len_bytes(length_bytes)
    }
}

#[cfg(test)]
mod tests;
