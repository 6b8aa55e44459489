//! Changes of the data of files, and what makes them durable.

use sealblock_btrfs_engine::data::{FilePlace, WriteMode, now};
use sealblock_btrfs_engine::engine::EngineError;
use sealblock_btrfs_engine::inode::{AttributeChanges, without_set_id};
use sealblock_btrfs_format::items::inode::InodeFlags;
use sealblock_fuse::{Allocate, CopyRange, FsError, OpenMode, Write, WriteDurability};
use sealblock_runtime_memory::{ALIGNMENT, Buffer, Slice};

use super::error::{refused, to_fuse_error, to_write_error};
use super::known::WRITES;
use super::{InodeId, Writable};

/// The bit of a handle beside [`WRITES`]: every write is to be durable.
const IS_SYNCHRONOUS: u64 = 2;
/// The attribute with the capabilities that a program gets.
const CAPABILITIES: &[u8] = b"security.capability";
/// The bytes that are copied at once.
const COPY_BYTES: u64 = 1 << 20;

impl Writable<'_> {
    /// Opens a regular file. Returns the handle.
    pub(super) async fn open_file(&self, number: u64, mode: OpenMode) -> Result<u64, FsError> {
        let file = self.file(number)?;
        let item = self.regular(file).await?;
        if (mode.writes || mode.truncates) && self.is_read_only(file.root).await? {
            return Err(refused(libc::EROFS, "the subvolume is read-only"));
        }
        // Later writes may come from the kernel's cache, when a program can no longer be refused anything.
        let flags = item.flags();
        if (mode.writes || mode.truncates) && flags.contains(InodeFlags::IMMUTABLE) {
            return Err(refused(libc::EPERM, "the file is immutable"));
        }
        if (mode.truncates || mode.writes && !mode.appends) && flags.contains(InodeFlags::APPEND) {
            return Err(refused(libc::EPERM, "the file is append-only"));
        }
        if mode.truncates {
            self.drop_rights(number, file, mode.kills_set_id).await?;
            self.engine.truncate(file.root, file.ino, 0).await.map_err(to_write_error)?;
        }
        self.open_known(number, file, mode.writes)?;
        let is_synchronous = flags.contains(InodeFlags::SYNC);
        Ok(if mode.writes { WRITES } else { 0 } | if is_synchronous { IS_SYNCHRONOUS } else { 0 })
    }

    async fn is_read_only(&self, root: u64) -> Result<bool, FsError> {
        self.engine.is_read_only(root).await.map_err(to_fuse_error)
    }

    /// Removes what gives a program the rights of its owner, before its data change: the capabilities whoever changes
    /// them, and the bits if that is wanted.
    pub(super) async fn drop_rights(&self, number: u64, file: InodeId, kills_set_id: bool) -> Result<(), FsError> {
        if !self.known.has_no_capabilities(number) {
            let found = self.engine.xattr(file.root, file.ino, CAPABILITIES).await.map_err(to_fuse_error)?;
            if found.is_some() {
                let removed = self.engine.remove_xattr(file.root, file.ino, CAPABILITIES, now()).await;
                removed.map_err(to_write_error)?;
            }
            self.known.set_has_no_capabilities(number, true);
        }
        if !kills_set_id {
            return Ok(());
        }
        let mode = self.engine.stat(file.root, file.ino).await.map_err(to_fuse_error)?.mode.get();
        if without_set_id(mode) == mode {
            return Ok(());
        }
        let changes = AttributeChanges { kills_set_id: true, ..AttributeChanges::default() };
        let changed = self.engine.set_attributes(file.root, file.ino, &changes, now()).await;
        changed.map(drop).map_err(to_write_error)
    }

    pub(super) async fn write_file(&self, write: Write) -> Result<(), FsError> {
        let file = self.file(write.ino)?;
        self.drop_rights(write.ino, file, write.kills_set_id).await?;
        self.write_all(file, (write.offset, to_slice(write.data)), !write.keeps_times).await?;
        let is_synchronous = write.handle & IS_SYNCHRONOUS != 0;
        match write.durability {
            WriteDurability::All => self.sync_file(file, false).await,
            _ if is_synchronous => self.sync_file(file, false).await,
            WriteDurability::Data => self.sync_file(file, true).await,
            WriteDurability::None => Ok(()),
        }
    }

    async fn write_all(&self, file: InodeId, (offset, data): (u64, Slice), sets_times: bool) -> Result<(), FsError> {
        let mut done = 0;
        while done < data.len() {
            let mode = WriteMode { sets_times, is_open: true };
            let write = async || {
                let rest = (offset.saturating_add(done as u64), data.slice(done..));
                self.engine.write_as(file.root, file.ino, rest, mode).await
            };
            let written = self.with_space(write).await;
            done += written.map_err(to_write_error)? as usize;
        }
        Ok(())
    }

    pub(super) async fn sync_file(&self, file: InodeId, data_only: bool) -> Result<(), FsError> {
        let synced = match data_only {
            true => self.engine.sync_data(file.root, file.ino).await,
            false => self.engine.fsync(file.root, file.ino).await.map(drop),
        };
        synced.map_err(to_write_error)
    }

    pub(super) async fn allocate_range(
        &self,
        number: u64,
        what: Allocate,
        (offset, bytes): (u64, u64),
        keeps_size: bool,
    ) -> Result<(), FsError> {
        let file = self.file(number)?;
        self.drop_rights(number, file, false).await?;
        let InodeId { root, ino } = file;
        let allocate = async || match what {
            Allocate::Reserve => self.engine.allocate_range(root, ino, (offset, bytes), keeps_size).await,
            Allocate::PunchHole => self.engine.punch(root, ino, offset, bytes).await,
            Allocate::Zero if self.options.zeroes_are_written => {
                self.zero_written(file, (offset, bytes), keeps_size).await
            }
            Allocate::Zero => self.engine.zero_range(root, ino, (offset, bytes), keeps_size).await,
        };
        self.with_space(allocate).await.map_err(to_write_error)
    }

    /// Makes a range zeroes: written ones where the file can have them.
    async fn zero_written(
        &self,
        InodeId { root, ino }: InodeId,
        (offset, bytes): (u64, u64),
        keeps_size: bool,
    ) -> Result<(), EngineError> {
        let item = self.engine.stat(root, ino).await?;
        let can_have = item.flags().contains(InodeFlags::NODATACOW | InodeFlags::NODATASUM);
        // Behind the end of a file nothing is written.
        let within = if keeps_size { item.size.get().saturating_sub(offset) } else { bytes };
        let written = if can_have { bytes.min(within) } else { 0 };
        if written > 0 {
            self.engine.write_zeroes(root, ino, offset, written).await?;
        }
        match bytes - written {
            0 => Ok(()),
            rest => self.engine.zero_range(root, ino, (offset + written, rest), keeps_size).await,
        }
    }

    /// Copies a range: files share what consists of whole sectors, and the rest is read and written.
    pub(super) async fn copy_file_range(&self, copy: CopyRange) -> Result<u64, FsError> {
        let ((from, _, from_offset), (to, _, to_offset)) = (copy.from, copy.to);
        let (from, target, to) = (self.file(from)?, to, self.file(to)?);
        self.drop_rights(target, to, false).await?;
        let (source, target) = (self.regular(from).await?, self.regular(to).await?);
        let bytes = copy.bytes.min(source.size.get().saturating_sub(from_offset));
        if from == to && from_offset.abs_diff(to_offset) < bytes {
            return Err(refused(libc::EINVAL, "the ranges overlap"));
        }
        let is_alike = source.flags().contains(InodeFlags::NODATASUM) == target.flags().contains(InodeFlags::NODATASUM);
        let sector = u64::from(self.sector_bytes);
        let shareable = match is_alike && from_offset % sector == to_offset % sector {
            true => {
                // A last sector that is not full is shared whole, so nothing may be behind it in the target.
                let ends_both = from_offset + bytes == source.size.get() && to_offset + bytes >= target.size.get();
                whole_sectors(from_offset, bytes, ends_both, sector)
            }
            false => 0..0,
        };
        if shareable.is_empty() {
            return self.copy_bytes((from, from_offset), (to, to_offset), bytes).await;
        }
        let head = shareable.start - from_offset;
        let copied = self.copy_bytes((from, from_offset), (to, to_offset), head).await?;
        if copied < head {
            return Ok(copied);
        }
        let shared =
            self.share((from, shareable.start), (to, to_offset + head), shareable.end - shareable.start).await?;
        let done = head + shared;
        let rest = self.copy_bytes((from, from_offset + done), (to, to_offset + done), bytes - done).await;
        // What was done is done.
        Ok(done + rest.unwrap_or(0))
    }

    /// Lets a file share whole sectors of another one, or copies them, if that is not possible.
    async fn share(
        &self,
        (from, from_offset): (InodeId, u64),
        (to, to_offset): (InodeId, u64),
        bytes: u64,
    ) -> Result<u64, FsError> {
        let place = |id: InodeId, offset| FilePlace { root: id.root, ino: id.ino, offset };
        let share = async || self.engine.clone_range(place(from, from_offset), place(to, to_offset), bytes).await;
        match self.with_space(share).await {
            Ok(()) => Ok(bytes),
            // One of the files changed meanwhile.
            Err(EngineError::Change(error)) if EngineError::Change(error).errno() == libc::EINVAL => {
                self.copy_bytes((from, from_offset), (to, to_offset), bytes).await
            }
            Err(error) => Err(to_write_error(error)),
        }
    }

    /// Copies bytes; fewer at the end of the source, or if an error occurs after some were copied.
    async fn copy_bytes(
        &self,
        (from, from_offset): (InodeId, u64),
        (to, to_offset): (InodeId, u64),
        bytes: u64,
    ) -> Result<u64, FsError> {
        let mut done = 0;
        while done < bytes {
            let step = self.copy_step((from, from_offset + done), (to, to_offset + done), bytes - done).await;
            match step {
                Ok(0) => break,
                Ok(copied) => done += copied,
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(done)
    }

    async fn copy_step(
        &self,
        (from, from_offset): (InodeId, u64),
        (to, to_offset): (InodeId, u64),
        bytes: u64,
    ) -> Result<u64, FsError> {
        let data = self.engine.read(from.root, from.ino, from_offset, bytes.min(COPY_BYTES)).await;
        let data = data.map_err(to_fuse_error)?;
        let copied = data.len() as u64;
        self.write_all(to, (to_offset, data), true).await?;
        Ok(copied)
    }
}

/// The whole sectors of a range of a file. At the end of both files, the last one need not be whole.
fn whole_sectors(offset: u64, bytes: u64, ends_both: bool, sector: u64) -> std::ops::Range<u64> {
    let end = offset + bytes;
    let start = offset.next_multiple_of(sector);
    let last = if ends_both { end } else { end / sector * sector };
    start.min(last)..last
}

/// The bytes of a write, aligned as devices want them. They are copied only if they are not.
fn to_slice(mut data: Vec<u8>) -> Slice {
    match (data.as_mut_ptr() as usize).is_multiple_of(ALIGNMENT) {
        true => Buffer::lent(data).freeze(),
        false => Slice::copy_from(&data),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_sectors_may_end_with_the_file() {
        assert_eq!(whole_sectors(0, 8192, false, 4096), 0..8192);
        assert_eq!(whole_sectors(0, 10_000, true, 4096), 0..10_000);
        assert_eq!(whole_sectors(0, 10_000, false, 4096), 0..8192);
        assert_eq!(whole_sectors(100, 9000, false, 4096), 4096..8192);
        assert!(whole_sectors(100, 50, false, 4096).is_empty());
        assert!(whole_sectors(100, 50, true, 4096).is_empty());
    }
}
