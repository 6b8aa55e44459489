//! Reads data: each sector from a copy that matches its checksum. Bad copies are written anew from good ones.
//!
//! Invariants:
//! - Bytes that are read are locked, so the extents that have them are not freed meanwhile.
//! - A bad copy is written only while the file still has the sector, under an exclusive lock, and with data that were
//!   read and checked under it. Otherwise it could be another file's by then.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::rc::Rc;

use futures_util::stream::{self, StreamExt};
use sealblock_btrfs::replicas::{Check, MAX_READ_BYTES};
use sealblock_btrfs::tags::WrittenIn;
use sealblock_btrfs::{BadCopy, CopyFault, FsError};
use sealblock_btrfs_format::compress::{CompressError, MAX_EXTENT_BYTES, Sizes, decompress};
use sealblock_btrfs_format::items::file_extent::Compression;
use sealblock_btrfs_format::items::inode::InodeFlags;
use sealblock_btrfs_format::key::objectid;
use sealblock_runtime_memory::{Buffer, Slice};

use super::io::Reserved;
use super::{FileId, FileInfo, FileLock, LockRange};
use crate::csums::Csums;
use crate::engine::{Engine, EngineError};
use crate::file_map::{ExtentPart, FileMap, InlinePart, Mapping};
use crate::transaction::{ChangeError, Transaction};

/// The most bytes of one read.
pub const MAX_FILE_READ_BYTES: u64 = 16 << 20;
/// Requests of one read that are in flight at once.
const IN_FLIGHT: usize = 8;

/// Stored sectors.
#[derive(Clone, Debug)]
struct Stored {
    logical: u64,
    bytes: u64,
    /// The checksums; `None` for a file without them.
    sums: Option<Vec<u8>>,
    /// When they were written.
    written: WrittenIn,
}

/// What has some bytes of a read.
#[derive(Clone, Debug)]
enum Source {
    Plain(Stored),
    Compressed { stored: Stored, part: ExtentPart },
    Inline(InlinePart),
}

/// Bytes of a file from a sector on, and what has them.
#[derive(Clone, Debug)]
struct ReadStep {
    start: u64,
    source: Source,
}

impl Transaction {
    /// What has the sectors of a range. What is in no step reads as zeroes.
    fn plan_read(&mut self, id: FileId, sectors: &Range<u64>) -> Result<(FileInfo, Vec<ReadStep>), ChangeError> {
        let info = self.file_info(id)?;
        let view = self.view(id.root)?;
        let map = FileMap::new(info.file, &view);
        let mut steps = Vec::new();
        for part in map.parts(sectors.clone(), NonZeroUsize::MAX)?.parts() {
            let start = part.range(info.file.sector_bytes).start;
            match part {
                Mapping::Hole(_) => {}
                Mapping::Inline(inline) => {
                    steps.push(ReadStep { start, source: Source::Inline(inline.clone()) });
                }
                Mapping::Extent(part) if part.is_prealloc => {}
                Mapping::Extent(part) if part.extent.compression == Compression::None => {
                    self.add_plain(&mut steps, &info, part)?;
                }
                Mapping::Extent(part) => {
                    let stored = self.stored(&info, part.generation, part.stored())?;
                    let source = Source::Compressed { stored, part: *part };
                    steps.push(ReadStep { start, source });
                }
            }
        }
        Ok((info, steps))
    }

    /// Steps that are requests of a device.
    fn add_plain(&self, steps: &mut Vec<ReadStep>, info: &FileInfo, part: &ExtentPart) -> Result<(), ChangeError> {
        let all = part.stored();
        let mut logical = all.start;
        while logical < all.end {
            let end = all.end.min(logical.saturating_add(MAX_READ_BYTES));
            let source = Source::Plain(self.stored(info, part.generation, logical..end)?);
            steps.push(ReadStep { start: part.start + (logical - all.start), source });
            logical = end;
        }
        Ok(())
    }

    fn stored(&self, info: &FileInfo, generation: u64, range: Range<u64>) -> Result<Stored, ChangeError> {
        let (logical, bytes) = (range.start, range.end.saturating_sub(range.start));
        let written = WrittenIn { generation, is_in_place: info.has(InodeFlags::NODATACOW) };
        if !info.file.has_sums {
            return Ok(Stored { logical, bytes, sums: None, written });
        }
        let view = self.view(objectid::CSUM_TREE)?;
        let (runs, _) = Csums::new(self.csum_shape(), &view).runs(range, NonZeroUsize::MAX)?;
        let sums: Vec<u8> = match <[_; 1]>::try_from(runs) {
            Ok([run]) if run.start == logical => run.sums,
            _ => Vec::new(),
        };
        Ok(Stored { logical, bytes, sums: Some(sums), written })
    }
}

impl Stored {
    fn check(&self) -> Check<'_> {
        self.sums.as_ref().map_or(Check::Tags(self.written), |sums| Check::Sums(sums))
    }

    /// The checksums of one sector of it.
    fn check_of(&self, logical: u64, sector: u64, sum_bytes: usize) -> Check<'_> {
        let index = ((logical - self.logical) / sector) as usize;
        let sums = self.sums.as_ref();
        sums.map_or(Check::Tags(self.written), |sums| Check::Sums(&sums[index * sum_bytes..][..sum_bytes]))
    }
}

impl Engine {
    /// Reads bytes of a file; fewer at its end, and never more than [`MAX_FILE_READ_BYTES`].
    ///
    /// # Errors
    /// If some of them are lost, or it is not a regular file.
    pub async fn read(&self, root: u64, ino: u64, offset: u64, bytes: u64) -> Result<Slice, EngineError> {
        let id = FileId { root, ino };
        let bytes = bytes.min(MAX_FILE_READ_BYTES);
        let end = offset.saturating_add(bytes).min(i64::MAX as u64);
        let lock = self.lock(id, vec![LockRange::shared(offset..end.max(offset))]).await;
        let info = self.inspect(|transaction| transaction.file_info(id)).await?;
        let end = end.min(lock.state().size(info.stored_size()));
        if offset >= end {
            return Ok(Slice::empty());
        }
        let sectors = info.sectors(&(offset..end));
        let (data, bad) = self.read_sectors(id, &sectors).await?;
        drop(lock);
        if !bad.is_empty() {
            self.repair(id, sectors.clone(), &bad).await;
            self.remember_bad(bad);
        }
        Ok(data.slice((offset - sectors.start) as usize..(end - sectors.start) as usize))
    }

    /// Reads whole sectors of a file that are locked, also behind its end. Returns the bad copies that were found.
    ///
    /// # Errors
    /// If some of them are lost.
    pub(super) async fn read_sectors(
        &self,
        id: FileId,
        sectors: &Range<u64>,
    ) -> Result<(Slice, Vec<BadCopy>), EngineError> {
        let (info, steps) = self.inspect(|transaction| transaction.plan_read(id, sectors)).await?;
        let (length, sector_bytes) = ((sectors.end - sectors.start) as usize, info.file.sector_bytes);
        let read = |step: ReadStep| async move {
            let data = self.read_step(&step, sector_bytes).await;
            (step, data)
        };
        let mut reads = stream::iter(steps).map(read).buffered(IN_FLIGHT);
        let (mut out, mut all_bad): (Option<Buffer>, _) = (None, Vec::new());
        while let Some((step, data)) = reads.next().await {
            let (data, bad) = data?;
            all_bad.extend(bad);
            let at = (step.start - sectors.start) as usize;
            if at == 0 && data.len() == length {
                return Ok((data, all_bad));
            }
            let out = out.get_or_insert_with(|| Buffer::zeroed(length));
            let bytes = data.len().min(length - at.min(length));
            out[at..at + bytes].copy_from_slice(&data[..bytes]);
        }
        Ok((out.unwrap_or_else(|| Buffer::zeroed(length)).freeze(), all_bad))
    }

    async fn read_step(&self, step: &ReadStep, sector_bytes: u32) -> Result<(Slice, Vec<BadCopy>), EngineError> {
        let fail = |logical, why| EngineError::Read(FsError::Compressed { logical, why });
        match &step.source {
            Source::Plain(stored) => self.read_stored(stored).await,
            Source::Inline(inline) => {
                let plain = inline.plain(sector_bytes).map_err(|why| fail(0, why))?;
                Ok((Slice::copy_from(&plain), Vec::new()))
            }
            Source::Compressed { stored, part } => {
                let plain_bytes = usize::try_from(part.extent.plain_bytes).unwrap_or(usize::MAX);
                let largest = part.extent.plain_bytes.max(stored.bytes);
                if largest > MAX_EXTENT_BYTES as u64 {
                    let largest = usize::try_from(largest).unwrap_or(usize::MAX);
                    return Err(fail(stored.logical, CompressError::Extent(largest)));
                }
                let (data, bad) = self.read_stored(stored).await?;
                let sizes = Sizes { plain_bytes, sector_bytes: sector_bytes as usize };
                let plain = decompress(part.extent.compression, &data, sizes);
                let plain = plain.map_err(|why| fail(stored.logical, why))?;
                // The part is within the extent, which was checked.
                let (from, to) = (part.offset as usize, (part.offset + part.bytes) as usize);
                Ok((Slice::copy_from(&plain[from..to]), bad))
            }
        }
    }

    async fn read_stored(&self, stored: &Stored) -> Result<(Slice, Vec<BadCopy>), EngineError> {
        let storage = self.storage();
        let (sector, sum) = (u64::from(storage.geometry().sector_bytes), storage.geometry().checksum.bytes());
        let expected = (stored.bytes / sector) as usize * sum;
        if stored.sums.as_ref().is_some_and(|sums| sums.len() != expected) {
            return Err(FsError::NoSum { logical: stored.logical }.into());
        }
        let read = storage.read_data(stored.logical, stored.bytes, stored.check()).await?;
        Ok((read.data, read.bad))
    }

    /// Writes bad copies anew. What fails is left as it is.
    async fn repair(&self, id: FileId, sectors: Range<u64>, bad: &[BadCopy]) {
        let lock = self.lock(id, vec![LockRange::exclusive(sectors.clone())]).await;
        let planned = self.change(|transaction| transaction.plan_read(id, &sectors)).await;
        let Ok((_, steps)) = planned else { return };
        for step in &steps {
            let (Source::Plain(stored) | Source::Compressed { stored, .. }) = &step.source else { continue };
            let here = stored.logical..stored.logical.saturating_add(stored.bytes);
            let mut places: Vec<u64> =
                bad.iter().filter_map(|copy| copy.logical).filter(|at| here.contains(at)).collect();
            places.sort_unstable();
            places.dedup();
            for logical in places {
                if let Err(error) = self.repair_sector(&lock, stored, logical).await {
                    tracing::warn!(logical, %error, "a bad copy cannot be written anew");
                }
            }
        }
    }

    async fn repair_sector(&self, lock: &Rc<FileLock>, stored: &Stored, logical: u64) -> Result<(), EngineError> {
        let storage = self.storage();
        let (sector, sum) = (u64::from(storage.geometry().sector_bytes), storage.geometry().checksum.bytes());
        let check = stored.check_of(logical, sector, sum);
        let read = storage.read_data(logical, sector, check).await?;
        let is_repairable = |copy: &&BadCopy| {
            let is_damaged =
                matches!(copy.fault, CopyFault::Checksum(_) | CopyFault::Tag(_) | CopyFault::Unreadable(_));
            is_damaged && !self.has_failed(copy.place.devid)
        };
        let places: Vec<BadCopy> = read.bad.iter().filter(is_repairable).cloned().collect();
        let count = places.len() as u64;
        // A tag is given only where another copy has proven to have it.
        let generation = (stored.sums.is_none() && read.is_attested).then_some(stored.written.generation);
        let (lock, data) = (Rc::clone(lock), read.data);
        let mut write = Reserved::new(self);
        let restore = Box::pin(async move {
            let mut failed = Vec::new();
            for copy in places {
                let written = storage.devices.write_tagged(copy.place, data.clone(), generation).await;
                failed.extend(written.err().map(|fault| BadCopy { fault, ..copy }));
            }
            drop(lock);
            Ok(failed)
        });
        // A copy that is not restored is as bad as it was.
        write.send(restore, false);
        let failed = write.completed().await?;
        let counters = &self.data().counters;
        counters.repaired.set(counters.repaired.get() + (count - failed.len() as u64));
        failed.iter().for_each(|copy| tracing::warn!(%copy, "a bad copy cannot be written anew"));
        Ok(())
    }
}
