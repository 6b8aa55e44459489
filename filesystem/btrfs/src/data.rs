//! Reading the data of files: every sector from a copy that its checksum vouches for, several requests at once.
//!
//! Invariants:
//! - A sector without a checksum is returned only of files that have none (NODATASUM). For any other file a checksum that is not there is damage, as
//!   it is for Linux.
//! - Bytes behind the end of a file never leave it, whatever the extent has there.

use std::ops::Range;
use std::rc::Rc;

use futures_util::stream::{self, Stream, StreamExt};
use sealblock_btrfs_format::compress::{CompressError, MAX_EXTENT_BYTES, Sizes, decompress};
use sealblock_btrfs_format::items::file_extent::Compression;
use sealblock_runtime_memory::{Buffer, Slice};

use crate::error::FsError;
use crate::extents::{Content, Part, Stored};
use crate::filesystem::Filesystem;
use crate::inode::{FileKind, Inode};
use crate::replicas::{Check, MAX_READ_BYTES};

/// The most bytes that one [`Filesystem::read`] returns.
pub const MAX_FILE_READ_BYTES: usize = 16 << 20;
/// Requests for the data of one read that are in flight at once.
const IN_FLIGHT: usize = 8;
/// Bytes of one step of [`Filesystem::read_in_order`].
pub const ORDERED_STEP_BYTES: u64 = 1 << 20;
/// Steps that are in flight at once.
const ORDERED_IN_FLIGHT: usize = 12;

/// Bytes of a read that come from one place.
enum Source {
    /// A run of stored sectors; `skip` bytes of them are before what is wanted.
    Stored { logical: u64, bytes: u64, skip: usize },
    /// A part of a compressed extent.
    Compressed { stored: Stored, skip: usize },
    /// Bytes of an item.
    Inline { data: Vec<u8>, compression: Compression, plain_bytes: u64, skip: usize },
}

/// A source, and which bytes of the read it is for.
struct Step {
    at: usize,
    bytes: usize,
    source: Source,
}

impl Filesystem {
    /// Reads bytes of a file or of a symbolic link's target; fewer at its end, and never more than [`MAX_FILE_READ_BYTES`].
    ///
    /// # Errors
    /// When some of them are lost. A smaller read may get the others.
    pub async fn read(&self, inode: &Inode, offset: u64, bytes: usize) -> Result<Slice, FsError> {
        if !matches!(inode.kind, FileKind::Regular | FileKind::Symlink) {
            return Err(FsError::Kind(format!("{} has no data: it is no file", self.name_of(inode))));
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
            let data = self.read_step(inode, &step).await;
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

    /// Some bytes of a file in steps of [`ORDERED_STEP_BYTES`], several of which are read at once: where each begins, and its data.
    ///
    /// A step of data that lie together is one request to a device, and its data are the buffer in which they arrived.
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

    /// What is to be read for the bytes of a part that lie from `from` up to `to`.
    fn add_steps(&self, steps: &mut Vec<Step>, part: Part, from: u64, to: u64) {
        let (first, last) = (part.start.max(from), part.end().min(to));
        if first >= last {
            return;
        }
        let (at, bytes) = ((first - from) as usize, (last - first) as usize);
        // How far into the part the wanted bytes begin.
        let into = first - part.start;
        match part.content {
            Content::Hole | Content::Prealloc(_) => {}
            Content::Inline { compression, data } => {
                let source = Source::Inline { data, compression, plain_bytes: part.bytes, skip: into as usize };
                steps.push(Step { at, bytes, source });
            }
            Content::Stored(stored) if stored.compression != Compression::None => {
                // The checker bounds the uncompressed extent by 128 KiB.
                let skip = (stored.offset + into) as usize;
                steps.push(Step { at, bytes, source: Source::Compressed { stored, skip } });
            }
            Content::Stored(stored) => {
                let sector = u64::from(self.storage().geometry().sector_bytes);
                let (mut at, mut left, mut logical) = (at, bytes as u64, stored.logical + stored.offset + into);
                while left > 0 {
                    let skip = logical % sector;
                    let bytes = left.min(MAX_READ_BYTES - skip);
                    let whole = (skip + bytes).next_multiple_of(sector);
                    let source = Source::Stored { logical: logical - skip, bytes: whole, skip: skip as usize };
                    steps.push(Step { at, bytes: bytes as usize, source });
                    (at, left, logical) = (at + bytes as usize, left - bytes, logical + bytes);
                }
            }
        }
    }

    async fn read_step(&self, inode: &Inode, step: &Step) -> Result<Slice, FsError> {
        let cut = |data: &[u8], skip: usize| {
            // What an item says of its length may be more than it has; the rest reads as zeroes.
            let end = data.len().min(skip + step.bytes);
            Slice::copy_from(&data[skip.min(end)..end])
        };
        match &step.source {
            Source::Stored { logical, bytes, skip } => {
                let data = self.read_sectors(inode.has_no_sums(), *logical, *bytes).await?;
                Ok(data.slice(*skip..skip + step.bytes))
            }
            Source::Compressed { stored, skip } => {
                let plain = self.read_plain(inode, stored).await?;
                Ok(cut(&plain, *skip))
            }
            Source::Inline { data, compression: Compression::None, skip, .. } => Ok(cut(data, *skip)),
            Source::Inline { data, compression, plain_bytes, skip } => {
                Ok(cut(&self.decompress(*compression, data, *plain_bytes, 0)?, *skip))
            }
        }
    }

    /// Stored sectors, checked.
    async fn read_sectors(&self, has_no_sums: bool, logical: u64, bytes: u64) -> Result<Slice, FsError> {
        if has_no_sums {
            if self.storage().devices.is_metadata_image() {
                return Err(FsError::NotReadable("it is an image of metadata, whose data are not there"));
            }
            let read = self.storage().read_data(logical, bytes, Check::None).await?;
            self.nodes().remember(read.bad);
            return Ok(read.data);
        }
        let runs = self.sums(logical, bytes).await?;
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

    /// A whole compressed extent, decompressed.
    async fn read_plain(&self, inode: &Inode, stored: &Stored) -> Result<Rc<Vec<u8>>, FsError> {
        let kept = self.plain.get(stored.logical);
        if let Some(plain) = kept.filter(|plain| plain.len() as u64 == stored.plain_bytes) {
            return Ok(plain);
        }
        let data = self.read_sectors(inode.has_no_sums(), stored.logical, stored.stored_bytes).await?;
        let plain = Rc::new(self.decompress(stored.compression, &data, stored.plain_bytes, stored.logical)?);
        self.plain.put(stored.logical, &plain);
        Ok(plain)
    }

    fn decompress(&self, kind: Compression, data: &[u8], plain_bytes: u64, logical: u64) -> Result<Vec<u8>, FsError> {
        let fail = |why| FsError::Compressed { logical, why };
        // The checker bounds it, too, and it is a length to allocate.
        let plain_bytes = usize::try_from(plain_bytes).ok().filter(|bytes| *bytes <= MAX_EXTENT_BYTES);
        let plain_bytes = plain_bytes.ok_or_else(|| fail(CompressError::Extent(usize::MAX)))?;
        let sector_bytes = self.storage().geometry().sector_bytes as usize;
        decompress(kind, data, Sizes { plain_bytes, sector_bytes }).map_err(fail)
    }
}
