//! Reads the data of files: each sector from a copy that matches its checksum, with several requests at once.
//!
//! Invariants:
//! - A sector without a checksum is returned only from files without checksums (NODATASUM). In any other file a missing
//!   checksum is damage, as in Linux. Only [`Filesystem::read_any`] returns such sectors, and lists them.
//! - A sector that does not match its checksum is never returned.
//! - Bytes beyond the end of a file are never returned, whatever the extent contains there.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

use futures_util::future::LocalBoxFuture;
use futures_util::stream::{self, Stream, StreamExt};
use sealblock_btrfs_format::compress::{CompressError, MAX_EXTENT_BYTES, Sizes, decompress};
use sealblock_btrfs_format::items::file_extent::Compression;
use sealblock_runtime_memory::{Buffer, Slice};

use crate::error::{FsError, FsFuture};
use crate::extents::{Content, Part, Stored};
use crate::filesystem::Filesystem;
use crate::inode::{FileKind, Inode};
use crate::replicas::{Check, MAX_READ_BYTES};
use crate::tags::WrittenIn;

/// The maximum bytes of one [`Filesystem::read`].
pub const MAX_FILE_READ_BYTES: usize = 16 << 20;
/// Requests for the data of one read that are in flight at once.
const IN_FLIGHT: usize = 8;
/// Bytes of one step of [`Filesystem::read_in_order`].
pub const ORDERED_STEP_BYTES: u64 = 1 << 20;
/// Steps that are in flight at once.
const ORDERED_IN_FLIGHT: usize = 12;

/// The source of some bytes of a read.
enum Source {
    /// A run of stored sectors that were written in a transaction, of which the first `skip` bytes precede the requested
    /// ones.
    Stored { logical: u64, bytes: u64, skip: usize, generation: u64 },
    /// A part of a compressed extent.
    Compressed { stored: Stored, skip: usize, generation: u64 },
    /// Bytes of an item.
    Inline { data: Vec<u8>, compression: Compression, plain_bytes: u64, skip: usize },
}

/// A source, and the bytes of the read that it has.
struct Step {
    at: usize,
    bytes: usize,
    source: Source,
}

impl Filesystem {
    /// Reads bytes of a file or of a symbolic link's target; fewer at its end, and never more than
    /// [`MAX_FILE_READ_BYTES`].
    ///
    /// # Errors
    /// If some of them are lost. A smaller read may return the others.
    pub fn read<'a>(
        &'a self,
        inode: &'a Inode,
        offset: u64,
        bytes: usize,
    ) -> LocalBoxFuture<'a, Result<Slice, FsError>> {
        Box::pin(async move { self.read_as(inode, offset, bytes, None).await })
    }

    /// The same, but sectors whose checksums are absent or lost are returned as stored, for callers that prefer
    /// unchecked data to none. Returns also the unchecked bytes of the file, in no order.
    ///
    /// # Errors
    /// As for [`Filesystem::read`], except for missing checksums.
    pub fn read_any<'a>(
        &'a self,
        inode: &'a Inode,
        offset: u64,
        bytes: usize,
    ) -> FsFuture<'a, (Slice, Vec<Range<u64>>)> {
        Box::pin(async move {
            let unverified = RefCell::default();
            let data = self.read_as(inode, offset, bytes, Some(&unverified)).await?;
            Ok((data, unverified.into_inner()))
        })
    }

    /// Reads bytes of a file. With a list, sectors without checksums are also returned, and are added to the list.
    async fn read_as(
        &self,
        inode: &Inode,
        offset: u64,
        bytes: usize,
        unverified: Option<&RefCell<Vec<Range<u64>>>>,
    ) -> Result<Slice, FsError> {
        if !matches!(inode.kind, FileKind::Regular | FileKind::Symlink) {
            return Err(FsError::Kind(format!("{} has no data: it is not a file", self.name_of(inode))));
        }
        let end = inode.size().min(offset.saturating_add(bytes.min(MAX_FILE_READ_BYTES) as u64));
        if offset >= end {
            return Ok(Slice::empty());
        }
        let mut steps = Vec::new();
        for part in self.parts(inode, offset, end).await? {
            self.add_steps(&mut steps, part, offset, end);
        }
        let read = |step: Step| async move {
            let data = self.read_step(inode, offset, &step, unverified).await;
            (step, data)
        };
        let mut steps = stream::iter(steps).map(read).buffered(IN_FLIGHT);
        let length = (end - offset) as usize;
        let mut out: Option<Buffer> = None;
        while let Some((step, data)) = steps.next().await {
            let data = data?;
            if step.at == 0 && data.len() == length {
                return Ok(data);
            }
            out.get_or_insert_with(|| Buffer::zeroed(length))[step.at..][..data.len()].copy_from_slice(&data);
        }
        Ok(out.unwrap_or_else(|| Buffer::zeroed(length)).freeze())
    }

    /// Reads bytes of a file in steps of [`ORDERED_STEP_BYTES`], several at once; yields the start of each step, and
    /// its data, in order.
    ///
    /// For a step with contiguous data, one request is sent to a device, and the data stay in the buffer in which they
    /// arrive.
    pub fn read_in_order<'a>(
        &'a self,
        inode: &'a Inode,
        range: Range<u64>,
    ) -> impl Stream<Item = (u64, Result<Slice, FsError>)> + use<'a> {
        let starts = (range.start..range.end).step_by(ORDERED_STEP_BYTES as usize);
        let read = move |at: u64| async move {
            let bytes = (range.end - at).min(ORDERED_STEP_BYTES);
            (at, self.read(inode, at, bytes as usize).await)
        };
        stream::iter(starts).map(read).buffered(ORDERED_IN_FLIGHT)
    }

    /// Adds what must be read for the bytes of a part from `from` up to `to`.
    fn add_steps(&self, steps: &mut Vec<Step>, part: Part, from: u64, to: u64) {
        let (first, last) = (part.start.max(from), part.end().min(to));
        if first >= last {
            return;
        }
        let (at, bytes) = ((first - from) as usize, (last - first) as usize);
        // The offset of the requested bytes in the part.
        let into = first - part.start;
        match part.content {
            Content::Hole | Content::Prealloc(_) => {}
            Content::Inline { compression, data } => {
                let source = Source::Inline { data, compression, plain_bytes: part.bytes, skip: into as usize };
                steps.push(Step { at, bytes, source });
            }
            Content::Stored(stored) if stored.compression != Compression::None => {
                // The checker limits the uncompressed extent to 128 KiB.
                let skip = (stored.offset + into) as usize;
                let source = Source::Compressed { stored, skip, generation: part.generation };
                steps.push(Step { at, bytes, source });
            }
            Content::Stored(stored) => {
                let sector = u64::from(self.storage().geometry().sector_bytes);
                let (mut at, mut left, mut logical) = (at, bytes as u64, stored.logical + stored.offset + into);
                while left > 0 {
                    let skip = logical % sector;
                    let bytes = left.min(MAX_READ_BYTES - skip);
                    let whole = (skip + bytes).next_multiple_of(sector);
                    let (start, skip, generation) = (logical - skip, skip as usize, part.generation);
                    let source = Source::Stored { logical: start, bytes: whole, skip, generation };
                    steps.push(Step { at, bytes: bytes as usize, source });
                    (at, left, logical) = (at + bytes as usize, left - bytes, logical + bytes);
                }
            }
        }
    }

    /// Reads one step of a read, which begins at a byte of the file.
    async fn read_step(
        &self,
        inode: &Inode,
        offset: u64,
        step: &Step,
        unverified: Option<&RefCell<Vec<Range<u64>>>>,
    ) -> Result<Slice, FsError> {
        let (start, end) = (offset + step.at as u64, offset + (step.at + step.bytes) as u64);
        let cut = |data: &[u8], skip: usize| {
            // An item may contain fewer bytes than it records; the rest reads as zeroes.
            let end = data.len().min(skip + step.bytes);
            Slice::copy_from(&data[skip.min(end)..end])
        };
        match &step.source {
            Source::Stored { logical, bytes, skip, generation } => {
                let place = (*logical, *bytes, *generation);
                let (data, without) = self.read_stored(inode, place, unverified.is_some()).await?;
                if let Some(list) = unverified {
                    // The sectors begin before the requested bytes, and may end after them.
                    let in_file = |at: u64| (start + (at - logical)).saturating_sub(*skip as u64).clamp(start, end);
                    list.borrow_mut().extend(without.iter().map(|range| in_file(range.start)..in_file(range.end)));
                }
                Ok(data.slice(*skip..skip + step.bytes))
            }
            Source::Compressed { stored, skip, generation } => {
                let (plain, is_verified) = self.read_plain(inode, (stored, *generation), unverified.is_some()).await?;
                if let Some(list) = unverified.filter(|_| !is_verified) {
                    list.borrow_mut().push(start..end);
                }
                Ok(cut(&plain, *skip))
            }
            Source::Inline { data, compression: Compression::None, skip, .. } => Ok(cut(data, *skip)),
            Source::Inline { data, compression, plain_bytes, skip } => {
                Ok(cut(&self.decompress(*compression, data, *plain_bytes, 0)?, *skip))
            }
        }
    }

    /// Stored sectors of a transaction, and the logical addresses of those without a usable checksum, if these are
    /// allowed.
    async fn read_stored(
        &self,
        inode: &Inode,
        (logical, bytes, generation): (u64, u64, u64),
        takes_unsummed: bool,
    ) -> Result<(Slice, Vec<Range<u64>>), FsError> {
        let written = WrittenIn { generation, is_in_place: inode.is_written_in_place() };
        let without_sums = inode.has_no_sums().then_some(Check::Tags(written));
        match self.read_sectors(without_sums, logical, bytes).await {
            Err(FsError::NoSum { .. } | FsError::SumsLost { .. }) if takes_unsummed => {
                self.read_summed_and_unsummed(logical, bytes).await
            }
            read => read.map(|data| (data, Vec::new())),
        }
    }

    /// Stored sectors, checked if their checksums can be read, and the addresses of the others.
    async fn read_summed_and_unsummed(&self, logical: u64, bytes: u64) -> Result<(Slice, Vec<Range<u64>>), FsError> {
        let geometry = self.storage().geometry();
        let (sector, sum) = (u64::from(geometry.sector_bytes), geometry.checksum.bytes());
        let (runs, _) = self.sums_left(logical, bytes).await;
        let (mut out, mut unverified, mut at) = (Buffer::zeroed(bytes as usize), Vec::new(), logical);
        let ends = runs.iter().map(|run| (run.logical, Some(run))).chain([(logical + bytes, None)]);
        for (start, run) in ends {
            if at < start {
                let data = self.read_sectors(Some(Check::None), at, start - at).await?;
                out[(at - logical) as usize..][..data.len()].copy_from_slice(&data);
                unverified.push(at..start);
            }
            at = start;
            if let Some(run) = run {
                let bytes = (run.bytes.len() / sum) as u64 * sector;
                let read = self.storage().read_data(start, bytes, Check::Sums(&run.bytes)).await?;
                self.nodes().remember(read.bad);
                out[(start - logical) as usize..][..read.data.len()].copy_from_slice(&read.data);
                at = start + bytes;
            }
        }
        Ok((out.freeze(), unverified))
    }

    /// Stored sectors, checked against their checksums, or otherwise if they have none.
    async fn read_sectors(&self, without_sums: Option<Check<'_>>, logical: u64, bytes: u64) -> Result<Slice, FsError> {
        if let Some(check) = without_sums {
            if self.storage().devices.is_metadata_image() {
                return Err(FsError::NotReadable("it is an image of metadata, whose data are not there"));
            }
            let read = self.storage().read_data(logical, bytes, check).await?;
            self.nodes().remember(read.bad);
            return Ok(read.data);
        }
        let lost = |why| FsError::SumsLost { logical, why: Box::new(why) };
        let runs = self.sums(logical, bytes).await.map_err(lost)?;
        let (sector, sum) =
            (u64::from(self.storage().geometry().sector_bytes), self.storage().geometry().checksum.bytes());
        match &runs[..] {
            [run] if run.logical == logical && (run.bytes.len() / sum) as u64 * sector == bytes => {
                let read = self.storage().read_data(logical, bytes, Check::Sums(&run.bytes)).await?;
                self.nodes().remember(read.bad);
                Ok(read.data)
            }
            runs => {
                let covered = |at: u64| {
                    let holds = |run: &&crate::extents::Sums| {
                        (run.logical..run.logical + (run.bytes.len() / sum) as u64 * sector).contains(&at)
                    };
                    runs.iter().any(|run| holds(&run))
                };
                let absent = (0..bytes / sector).map(|index| logical + index * sector).find(|at| !covered(*at));
                Err(FsError::NoSum { logical: absent.unwrap_or(logical) })
            }
        }
    }

    /// Reads a whole compressed extent and decompresses it; also returns true unless a part of it had no checksum.
    async fn read_plain(
        &self,
        inode: &Inode,
        (stored, generation): (&Stored, u64),
        takes_unsummed: bool,
    ) -> Result<(Rc<Vec<u8>>, bool), FsError> {
        let kept = self.plain.get(stored.logical);
        if let Some(plain) = kept.filter(|plain| plain.len() as u64 == stored.plain_bytes) {
            return Ok((plain, true));
        }
        let place = (stored.logical, stored.stored_bytes, generation);
        let (data, without) = self.read_stored(inode, place, takes_unsummed).await?;
        let plain = Rc::new(self.decompress(stored.compression, &data, stored.plain_bytes, stored.logical)?);
        // A cached extent counts as checked.
        if without.is_empty() {
            self.plain.put(stored.logical, &plain);
        }
        Ok((plain, without.is_empty()))
    }

    fn decompress(&self, kind: Compression, data: &[u8], plain_bytes: u64, logical: u64) -> Result<Vec<u8>, FsError> {
        let fail = |why| FsError::Compressed { logical, why };
        // The checker limits it as well; here it limits an allocation.
        let plain_bytes = usize::try_from(plain_bytes).ok().filter(|bytes| *bytes <= MAX_EXTENT_BYTES);
        let plain_bytes = plain_bytes.ok_or_else(|| fail(CompressError::Extent(usize::MAX)))?;
        let sector_bytes = self.storage().geometry().sector_bytes as usize;
        decompress(kind, data, Sizes { plain_bytes, sector_bytes }).map_err(fail)
    }
}
