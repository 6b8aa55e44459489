//! What is in a part of a file: read from its item, cut, moved, and written again.

use std::ops::Range;

use sealblock_btrfs_format::compress::{CompressError, Sizes, decompress};
use sealblock_btrfs_format::extent_refs::ExtentRef;
use sealblock_btrfs_format::items::file_extent::{Compression, ExtentLocation, FileExtent, FileExtentHead, kind};
use sealblock_btrfs_format::key::Key;

use super::file::{File, FileMapError};

/// An extent of a file's data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DiskExtent {
    /// The logical address.
    pub bytenr: u64,
    /// Bytes as stored.
    pub bytes: u64,
    /// Bytes uncompressed. Without compression these are the stored bytes.
    pub plain_bytes: u64,
    /// How it is compressed.
    pub compression: Compression,
}

/// A part of a file that is a part of an extent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExtentPart {
    /// The first byte of the file.
    pub start: u64,
    /// The number of bytes.
    pub bytes: u64,
    /// The transaction that was open when they were written.
    pub generation: u64,
    /// True if it was allocated and never written: it reads as zeroes.
    pub is_prealloc: bool,
    /// The whole extent.
    pub extent: DiskExtent,
    /// The first byte in the uncompressed extent.
    pub offset: u64,
}

/// A whole file within its item.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct InlinePart {
    /// The transaction that was open when it was written.
    pub generation: u64,
    /// How it is compressed.
    pub compression: Compression,
    /// Bytes uncompressed.
    pub plain_bytes: u64,
    /// The bytes as stored.
    pub stored: Vec<u8>,
}

/// A part of a file that reads as zeroes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hole {
    /// The first byte of the file.
    pub start: u64,
    /// The number of bytes.
    pub bytes: u64,
    /// The transaction that made the item; `None` without an item.
    pub generation: Option<u64>,
}

/// A part of a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Mapping {
    /// Zeroes, with or without an item.
    Hole(Hole),
    /// The item has the bytes.
    Inline(InlinePart),
    /// A part of an extent.
    Extent(ExtentPart),
}

impl DiskExtent {
    /// An extent without compression.
    pub fn plain(bytenr: u64, bytes: u64) -> DiskExtent {
        DiskExtent { bytenr, bytes, plain_bytes: bytes, compression: Compression::None }
    }
}

impl ExtentPart {
    /// The byte of the file after the last one. Never wraps: it was checked when the part was read or inserted.
    pub fn end(&self) -> u64 {
        self.start.saturating_add(self.bytes)
    }

    /// The reference that its item makes. Trimming at either end does not change it.
    pub fn reference(&self, root: u64, ino: u64) -> ExtentRef {
        ExtentRef::Data { root, objectid: ino, offset: self.start.wrapping_sub(self.offset) }
    }

    /// The addresses of its stored bytes: those of the whole extent if that is compressed.
    pub fn stored(&self) -> Range<u64> {
        let start = self.extent.bytenr;
        match self.extent.compression {
            Compression::None => start.saturating_add(self.offset)..start.saturating_add(self.offset + self.bytes),
            _ => start..start.saturating_add(self.extent.bytes),
        }
    }

    /// The bytes of it that are in a range; `None` if there are none.
    pub fn clip(&self, range: &Range<u64>) -> Option<ExtentPart> {
        let (start, end) = (self.start.max(range.start), self.end().min(range.end));
        let bytes = end.checked_sub(start).filter(|bytes| *bytes > 0)?;
        Some(ExtentPart { start, bytes, offset: self.offset + (start - self.start), ..*self })
    }

    /// True if `next` continues it in the file and in the extent, and both were written.
    pub(super) fn continues(&self, next: &ExtentPart) -> bool {
        let is_written = !self.is_prealloc && !next.is_prealloc && self.extent.compression == Compression::None;
        is_written
            && self.extent == next.extent
            && self.end() == next.start
            && self.offset.checked_add(self.bytes) == Some(next.offset)
    }

    /// Checks an extent and the part of it.
    pub(super) fn check(&self, file: &File) -> Result<(), &'static str> {
        let extent = &self.extent;
        let all = [self.start, self.bytes, self.offset, extent.bytenr, extent.bytes, extent.plain_bytes];
        if all.iter().any(|value| !value.is_multiple_of(file.sector())) {
            return Err("a part of an extent does not consist of whole sectors");
        }
        if self.bytes == 0 || extent.bytenr == 0 || extent.bytes == 0 {
            return Err("an extent without bytes, or without an address");
        }
        let is_compressed = extent.compression != Compression::None;
        if is_compressed && self.is_prealloc {
            return Err("an extent is compressed and was never written");
        }
        // The number that an item has for uncompressed bytes is not used without compression.
        let most = if is_compressed { extent.plain_bytes } else { extent.bytes };
        if self.offset.checked_add(self.bytes).is_none_or(|end| end > most) {
            return Err("a part of an extent ends behind the extent");
        }
        if extent.bytenr.checked_add(extent.bytes).is_none() || self.start.checked_add(self.bytes).is_none() {
            return Err("an extent ends nowhere");
        }
        Ok(())
    }

    /// The data of its item.
    pub(super) fn encode(&self) -> Vec<u8> {
        let plain_bytes = match self.extent.compression {
            Compression::None => self.extent.bytes,
            _ => self.extent.plain_bytes,
        };
        let kind = if self.is_prealloc { kind::PREALLOC } else { kind::REGULAR };
        let location = ExtentLocation {
            disk_bytenr: self.extent.bytenr.into(),
            disk_num_bytes: self.extent.bytes.into(),
            offset: self.offset.into(),
            num_bytes: self.bytes.into(),
        };
        encode(head(self.generation, plain_bytes, self.extent.compression, kind), &location)
    }
}

impl InlinePart {
    /// The bytes that the file has.
    ///
    /// # Errors
    /// If they are compressed, and the stream is damaged.
    pub fn plain(&self, sector_bytes: u32) -> Result<Vec<u8>, CompressError> {
        let plain_bytes = usize::try_from(self.plain_bytes).unwrap_or(usize::MAX);
        match self.compression {
            Compression::None => Ok(self.stored.clone()),
            kind => decompress(kind, &self.stored, Sizes { plain_bytes, sector_bytes: sector_bytes as usize }),
        }
    }

    /// The data of its item.
    pub(super) fn encode(&self) -> Vec<u8> {
        let head = head(self.generation, self.plain_bytes, self.compression, kind::INLINE);
        let mut out = Vec::new();
        FileExtent::Inline(&head, &self.stored).write(&mut out);
        out
    }
}

impl Hole {
    /// The data of its item.
    pub(super) fn encode(&self) -> Vec<u8> {
        let location = ExtentLocation {
            disk_bytenr: 0.into(),
            disk_num_bytes: 0.into(),
            offset: 0.into(),
            num_bytes: self.bytes.into(),
        };
        encode(head(self.generation.unwrap_or(0), self.bytes, Compression::None, kind::REGULAR), &location)
    }
}

impl Mapping {
    /// The bytes of the file that it covers. An inline extent covers its sector.
    pub fn range(&self, sector_bytes: u32) -> Range<u64> {
        match self {
            Mapping::Hole(hole) => hole.start..hole.start.saturating_add(hole.bytes),
            Mapping::Extent(part) => part.start..part.end(),
            Mapping::Inline(inline) => {
                let sector = u64::from(sector_bytes);
                0..inline.plain_bytes.max(1).checked_next_multiple_of(sector).unwrap_or(u64::MAX)
            }
        }
    }

    /// Reads an item of the file.
    pub(super) fn decode(file: &File, key: Key, data: &[u8]) -> Result<Mapping, FileMapError> {
        let wrong = |why| FileMapError::Item { key, why };
        let item = FileExtent::decode(data).map_err(|error| FileMapError::Shape { key, error })?;
        let head = item.head();
        if head.encryption != 0 || head.other_encoding.get() != 0 {
            return Err(wrong("its encoding is unknown"));
        }
        let compression = Compression::from_number(head.compression).ok_or(wrong("its compression is unknown"))?;
        let (generation, start) = (head.generation.get(), key.offset);
        let Some(location) = item.location() else {
            let FileExtent::Inline(_, stored) = item else { return Err(wrong("it has no location")) };
            let plain_bytes = head.ram_bytes.get();
            let fits = compression != Compression::None || stored.len() as u64 == plain_bytes;
            if start != 0 || !fits {
                return Err(wrong("an inline extent that is not a whole file"));
            }
            return Ok(Mapping::Inline(InlinePart { generation, compression, plain_bytes, stored: stored.to_vec() }));
        };
        let (is_prealloc, bytes) = (matches!(item, FileExtent::Prealloc(..)), location.num_bytes.get());
        if location.is_hole() {
            let is_whole = [start, bytes].iter().all(|value| value.is_multiple_of(file.sector()));
            if is_prealloc || bytes == 0 || !is_whole || start.checked_add(bytes).is_none() {
                return Err(wrong("a hole that does not consist of whole sectors"));
            }
            return Ok(Mapping::Hole(Hole { start, bytes, generation: Some(generation) }));
        }
        let extent = DiskExtent {
            bytenr: location.disk_bytenr.get(),
            bytes: location.disk_num_bytes.get(),
            plain_bytes: head.ram_bytes.get(),
            compression,
        };
        let part = ExtentPart { start, bytes, generation, is_prealloc, extent, offset: location.offset.get() };
        part.check(file).map_err(wrong)?;
        Ok(Mapping::Extent(part))
    }
}

fn head(generation: u64, plain_bytes: u64, compression: Compression, kind: u8) -> FileExtentHead {
    FileExtentHead {
        generation: generation.into(),
        ram_bytes: plain_bytes.into(),
        compression: compression as u8,
        encryption: 0,
        other_encoding: 0.into(),
        kind,
    }
}

fn encode(head: FileExtentHead, location: &ExtentLocation) -> Vec<u8> {
    let mut out = Vec::new();
    match head.kind {
        kind::PREALLOC => FileExtent::Prealloc(&head, location).write(&mut out),
        _ => FileExtent::Regular(&head, location).write(&mut out),
    }
    out
}
