//! Drops ranges of files: overwritten, punched or truncated, and the items of holes that this needs without NO_HOLES.

use std::num::NonZeroUsize;
use std::ops::Range;

use super::extent::{ExtentPart, Hole, Mapping};
use super::{FileEdit, FileMapError};
use crate::view::Items;

/// The end at which a long range is begun, if it is changed in several steps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// From its first byte, so that what is done is the beginning of the range.
    FromStart,
    /// From its last byte, as a file must be truncated.
    FromEnd,
}

/// A step of a truncation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Truncated {
    /// The size that the inode gets in the same step.
    pub size: u64,
    /// What is left to be dropped. If it is not empty, the step is to be repeated with the new size.
    pub rest: Range<u64>,
}

impl<T: Items> FileEdit<'_, T> {
    /// Drops a range of sectors: afterwards it has no items. Items that reach beyond it are cut. Returns what is left of
    /// the range after `limit` items; that is empty at the end.
    ///
    /// Without NO_HOLES, this is to be followed by something that fills the range, or is behind the end of the file.
    ///
    /// # Errors
    /// If the range is not of whole sectors or would cut an inline extent, items are damaged, or a node is not in
    /// memory.
    pub fn drop_range(
        &mut self,
        range: Range<u64>,
        order: Order,
        limit: NonZeroUsize,
    ) -> Result<Range<u64>, FileMapError> {
        self.file.check_range(&range)?;
        let mut rest = range;
        for _ in 0..limit.get() {
            let found = match order {
                Order::FromStart => self.map().next_in(&rest)?,
                Order::FromEnd => self.map().last_in(&rest)?,
            };
            let Some(found) = found else { return Ok(rest.start..rest.start) };
            let Range { start, end } = found.range(self.file.sector_bytes);
            self.cut(found, &rest)?;
            match order {
                Order::FromStart => rest.start = end.min(rest.end),
                Order::FromEnd => rest.end = start.max(rest.start),
            }
        }
        Ok(rest)
    }

    /// The part of a range that a step has done, if this is left.
    pub(super) fn done(range: &Range<u64>, rest: &Range<u64>) -> Range<u64> {
        match rest {
            rest if rest.is_empty() => range.clone(),
            rest if rest.start > range.start => range.start..rest.start,
            rest => rest.end..range.end,
        }
    }

    /// Removes from an item what it has in a range.
    fn cut(&mut self, found: Mapping, range: &Range<u64>) -> Result<(), FileMapError> {
        match found {
            Mapping::Hole(hole) => {
                self.delete(hole.start)?;
                for kept in outside(&(hole.start..hole.start + hole.bytes), range) {
                    let hole = Hole { start: kept.start, bytes: kept.end - kept.start, ..hole };
                    self.items.put(self.file.key(hole.start), hole.encode())?;
                }
            }
            Mapping::Inline(inline) => {
                let covered = Mapping::Inline(inline.clone()).range(self.file.sector_bytes);
                if range.start > 0 || range.end < covered.end {
                    return Err(FileMapError::Inline(self.file.ino));
                }
                self.delete(0)?;
                self.removed_bytes = self.removed_bytes.saturating_add(inline.plain_bytes);
            }
            Mapping::Extent(part) => self.cut_part(&part, range)?,
        }
        Ok(())
    }

    fn cut_part(&mut self, part: &ExtentPart, range: &Range<u64>) -> Result<(), FileMapError> {
        if part.start >= range.start {
            self.delete(part.start)?;
        }
        let (mut pieces, mut kept_bytes) = (0, 0);
        for kept in outside(&(part.start..part.end()), range) {
            if let Some(piece) = part.clip(&kept) {
                self.put_part(&piece)?;
                (pieces, kept_bytes) = (pieces + 1, kept_bytes + piece.bytes);
            }
        }
        self.refs.change(part.extent.bytenr, part.reference(self.file.root, self.file.ino), pieces - 1);
        self.removed_bytes = self.removed_bytes.saturating_add(part.bytes - kept_bytes);
        Ok(())
    }

    /// Makes a hole of a range of sectors in a file of this size. Returns what is left of the range after `limit` items.
    ///
    /// # Errors
    /// As for [`FileEdit::drop_range`].
    pub fn punch(
        &mut self,
        range: Range<u64>,
        (size, generation): (u64, u64),
        order: Order,
        limit: NonZeroUsize,
    ) -> Result<Range<u64>, FileMapError> {
        let rest = self.drop_range(range.clone(), order, limit)?;
        let done = Self::done(&range, &rest);
        let end = done.end.min(self.file.sectors_end(size));
        self.put_hole(done.start..end, generation)?;
        Ok(rest)
    }

    /// Gives a hole that is empty an item, if the filesystem has these. Holes that touch it become one with it.
    pub(super) fn put_hole(&mut self, range: Range<u64>, generation: u64) -> Result<(), FileMapError> {
        if !self.file.has_hole_items || range.is_empty() {
            return Ok(());
        }
        if range.end > self.file.max_bytes() {
            return Err(self.file.range_error(&range, "the hole ends behind the largest file"));
        }
        let Range { mut start, mut end } = range;
        if let Some(Mapping::Hole(before)) = self.map().last_in(&(start.saturating_sub(1)..start))? {
            start = before.start;
        }
        if let Some(Mapping::Hole(after)) = self.map().next_in(&(end..end.saturating_add(1)))? {
            self.delete(after.start)?;
            end = after.start.saturating_add(after.bytes);
        }
        let hole = Hole { start, bytes: end - start, generation: Some(generation) };
        Ok(self.items.put(self.file.key(start), hole.encode())?)
    }

    /// Gives holes of a range of sectors items, if the filesystem has these: before a file grows, from the end of its
    /// last sector to the end of its new one. Space that is allocated there stays. Returns what is left of the range
    /// after `limit` items; with NO_HOLES nothing.
    ///
    /// # Errors
    /// If the range is not of whole sectors, items are damaged, or a node is not in memory.
    pub fn fill_holes(
        &mut self,
        range: Range<u64>,
        generation: u64,
        limit: NonZeroUsize,
    ) -> Result<Range<u64>, FileMapError> {
        self.file.check_range(&range)?;
        if !self.file.has_hole_items {
            return Ok(range.end..range.end);
        }
        let mut at = range.start;
        for _ in 0..limit.get() {
            let found = self.map().next_in(&(at..range.end))?.map(|found| found.range(self.file.sector_bytes));
            let next = found.clone().map_or(range.end, |found| found.start.max(at));
            self.put_hole(at..next, generation)?;
            at = found.map_or(range.end, |found| found.end.min(range.end));
            if at == range.end {
                break;
            }
        }
        Ok(at..range.end)
    }

    /// Truncates a file of `old_size` bytes to `size`, from its end, with all that is allocated behind it. What
    /// [`FileMap::plan_zero`](super::FileMap::plan_zero) demands for the last sector must be done before.
    ///
    /// # Errors
    /// If the file is shorter, the item of the whole file is compressed and has more, items are damaged, or a node is
    /// not in memory.
    pub fn truncate(&mut self, size: u64, old_size: u64, limit: NonZeroUsize) -> Result<Truncated, FileMapError> {
        if size > old_size {
            return Err(self.file.range_error(&(old_size..size), "a file does not grow when it is truncated"));
        }
        let range = self.file.sectors_end(size)..u64::MAX / self.file.sector() * self.file.sector();
        let rest = self.drop_range(range, Order::FromEnd, limit)?;
        if !rest.is_empty() {
            return Ok(Truncated { size: old_size.min(rest.end), rest });
        }
        self.shorten_inline(size)?;
        Ok(Truncated { size, rest })
    }

    fn shorten_inline(&mut self, size: u64) -> Result<(), FileMapError> {
        let found = if size > 0 { self.map().next_in(&(0..1))? } else { None };
        let Some(Mapping::Inline(mut inline)) = found.filter(|found| matches!(found, Mapping::Inline(_))) else {
            return Ok(());
        };
        let Some(less) = inline.plain_bytes.checked_sub(size).filter(|less| *less > 0) else { return Ok(()) };
        if inline.plain_bytes != inline.stored.len() as u64 || inline.compression as u8 != 0 {
            return Err(FileMapError::Inline(self.file.ino));
        }
        // It is shorter than the item.
        inline.stored.truncate(size as usize);
        inline.plain_bytes = size;
        self.items.put(self.file.key(0), inline.encode())?;
        self.removed_bytes = self.removed_bytes.saturating_add(less);
        Ok(())
    }
}

/// What of `whole` lies before and behind `range`.
fn outside(whole: &Range<u64>, range: &Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let (before, behind) = (whole.start..range.start.min(whole.end), range.end.max(whole.start)..whole.end);
    [before, behind].into_iter().filter(|part| !part.is_empty())
}
