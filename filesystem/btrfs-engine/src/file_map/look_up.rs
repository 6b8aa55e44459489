//! Reads the map of a file: the parts of a range, and the sectors that must be rewritten before bytes become zeroes.

use std::num::NonZeroUsize;
use std::ops::Range;

use super::extent::{Hole, InlinePart, Mapping};
use super::file::{File, FileMapError};
use crate::view::Items;

/// The map of a file.
#[derive(Debug)]
pub struct FileMap<'a, T> {
    file: File,
    items: &'a T,
}

/// The parts of a range of a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FileRange {
    pub(super) file: File,
    pub(super) range: Range<u64>,
    pub(super) parts: Vec<Mapping>,
}

/// Bytes that must be rewritten as zeroes before a range is dropped, because the rest of their sector stays.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Rewrite {
    /// A sector with data is to be written anew.
    Sector {
        /// Its first byte in the file.
        start: u64,
        /// The bytes of the file in it that are zeroes afterwards.
        zero: Range<u64>,
    },
    /// The file is within its item, and is to be inserted anew.
    Inline {
        /// The item.
        inline: InlinePart,
        /// The bytes of the file that are zeroes afterwards.
        zero: Range<u64>,
    },
}

/// How a range of bytes becomes zeroes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ZeroPlan {
    /// What to do first: nothing, or one or two things.
    pub rewrite: Vec<Rewrite>,
    /// Then these whole sectors are dropped.
    pub whole: Range<u64>,
}

impl FileRange {
    /// The file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The range: that of the request, or its first part if the limit of parts was reached.
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// The parts, in order and without gaps. They are cut at the ends of the range, except for an inline extent.
    pub fn parts(&self) -> &[Mapping] {
        &self.parts
    }
}

impl<'a, T: Items> FileMap<'a, T> {
    /// The map of a file in a tree.
    pub fn new(file: File, items: &'a T) -> FileMap<'a, T> {
        FileMap { file, items }
    }

    /// The parts of a range of sectors, as many as `limit` at most, and holes between them. Two holes that touch are
    /// one.
    ///
    /// # Errors
    /// If the range is not of whole sectors, items are damaged, or a node is not in memory.
    pub fn parts(&self, range: Range<u64>, limit: NonZeroUsize) -> Result<FileRange, FileMapError> {
        self.file.check_range(&range)?;
        let (mut parts, mut at, mut last) = (Vec::new(), range.start, None);
        while at < range.end && parts.len() < limit.get() {
            // Every item behind the first one is looked at, so two that overlap are noticed.
            let found = match last {
                None => self.next_in(&range)?,
                Some(last) => self.first_behind(last, range.end - 1)?,
            };
            let Some(found) = found else {
                push_hole(&mut parts, at..range.end);
                at = range.end;
                break;
            };
            let Range { start, end } = found.range(self.file.sector_bytes);
            if start < at && last.is_some() {
                return Err(FileMapError::Overlap { ino: self.file.ino, start, end: at });
            }
            last = Some(start);
            push_hole(&mut parts, at..start);
            if parts.len() == limit.get() {
                at = start;
                break;
            }
            at = end.min(range.end);
            match found {
                Mapping::Hole(hole) => push_hole(&mut parts, hole.start.max(range.start)..at),
                Mapping::Extent(part) => parts.extend(part.clip(&range).map(Mapping::Extent)),
                Mapping::Inline(inline) => parts.push(Mapping::Inline(inline)),
            }
        }
        Ok(FileRange { file: self.file, range: range.start..at, parts })
    }

    /// What must be done so that bytes of a file of this size read as zeroes: to punch a hole, to truncate (from the
    /// new size to the end of its sector, with the old size), and to make a file longer (from the old size to the end
    /// of its sector, with the new size).
    ///
    /// Holes, space that was never written, and what is behind the end of the file need no rewriting.
    ///
    /// # Errors
    /// If items are damaged, or a node is not in memory.
    pub fn plan_zero(&self, bytes: Range<u64>, size: u64) -> Result<ZeroPlan, FileMapError> {
        let sector = self.file.sector();
        let down = |at: u64| at / sector * sector;
        if bytes.is_empty() {
            return Ok(ZeroPlan { rewrite: Vec::new(), whole: down(bytes.start)..down(bytes.start) });
        }
        let first = self.file.sectors_end(bytes.start);
        // Nothing in the last sector is needed behind the end of the file.
        let is_last = bytes.end >= size && down(bytes.end) < size;
        let last = if is_last { self.file.sectors_end(bytes.end) } else { down(bytes.end) };
        let whole = first..last.max(first);
        // If both ends are in one sector, it is the head.
        let head = bytes.start..bytes.end.min(first);
        let tail = whole.end..bytes.end;
        let mut rewrite = Vec::new();
        for zero in [head, tail] {
            let start = down(zero.start);
            if zero.is_empty() || start >= size {
                continue;
            }
            match self.next_in(&(start..start.saturating_add(sector)))? {
                Some(Mapping::Extent(part)) if !part.is_prealloc => rewrite.push(Rewrite::Sector { start, zero }),
                Some(Mapping::Inline(inline)) if zero.start < inline.plain_bytes || inline.plain_bytes < size => {
                    rewrite.push(Rewrite::Inline { inline, zero });
                }
                _ => {}
            }
        }
        Ok(ZeroPlan { rewrite, whole })
    }

    /// True if the file is in its item.
    ///
    /// # Errors
    /// If the item is damaged, or a node is not in memory.
    pub fn is_inline(&self) -> Result<bool, FileMapError> {
        Ok(matches!(self.last_below(0)?, Some(Mapping::Inline(_))))
    }

    /// True if an item begins at a byte.
    pub(super) fn starts_at(&self, start: u64) -> Result<bool, FileMapError> {
        Ok(self.items.at(self.file.key(start))?.is_some())
    }

    /// The first item that covers bytes of a range.
    pub(super) fn next_in(&self, range: &Range<u64>) -> Result<Option<Mapping>, FileMapError> {
        let Some(last) = range.end.checked_sub(1).filter(|last| range.start <= *last) else { return Ok(None) };
        if let Some(before) = self.last_below(range.start)?
            && before.range(self.file.sector_bytes).end > range.start
        {
            return Ok(Some(before));
        }
        self.first_behind(range.start, last)
    }

    /// The first item that begins behind a byte, and not behind the last one.
    fn first_behind(&self, start: u64, last: u64) -> Result<Option<Mapping>, FileMapError> {
        let Some(first) = start.checked_add(1).filter(|first| *first <= last) else { return Ok(None) };
        let found = self.items.first(self.file.key(first)..=self.file.key(last))?;
        found.map(|(key, data)| Mapping::decode(&self.file, key, data)).transpose()
    }

    /// The last item that covers bytes of a range.
    pub(super) fn last_in(&self, range: &Range<u64>) -> Result<Option<Mapping>, FileMapError> {
        let Some(last) = range.end.checked_sub(1).filter(|last| range.start <= *last) else { return Ok(None) };
        let found = self.last_below(last)?;
        Ok(found.filter(|found| found.range(self.file.sector_bytes).end > range.start))
    }

    /// The last item that begins at a byte or before it.
    fn last_below(&self, at: u64) -> Result<Option<Mapping>, FileMapError> {
        let found = self.items.last(self.file.key(0)..=self.file.key(at))?;
        found.map(|(key, data)| Mapping::decode(&self.file, key, data)).transpose()
    }
}

fn push_hole(parts: &mut Vec<Mapping>, range: Range<u64>) {
    match parts.last_mut() {
        _ if range.is_empty() => {}
        Some(Mapping::Hole(before)) => {
            before.bytes += range.end - range.start;
            before.generation = None;
        }
        _ => parts.push(Mapping::Hole(Hole { start: range.start, bytes: range.end - range.start, generation: None })),
    }
}
