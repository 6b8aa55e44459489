//! Written space that was allocated in advance, and extents that files share.

use std::num::NonZeroUsize;
use std::ops::Range;

use super::extent::{ExtentPart, Mapping};
use super::look_up::FileRange;
use super::remove::Order;
use super::{FileEdit, FileMapError};
use crate::view::Items;

/// The generation of data that were written into space that was allocated in advance.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mark {
    /// This one. As in Linux, the written part becomes one with its written neighbours in the extent, which get the
    /// same generation, though their data are older.
    New(u64),
    /// That of the space. The written part becomes one only with neighbours that have the same.
    Keep,
}

impl<T: Items> FileEdit<'_, T> {
    /// Marks a range of sectors as written, all of which was allocated in advance. Items are cut in up to three.
    /// Returns what is left of the range after `limit` items.
    ///
    /// Whether the data may be written there is decided before, by [`crate::nocow`].
    ///
    /// # Errors
    /// If a part of the range has other content, the range is not of whole sectors, items are damaged, or a node is not
    /// in memory.
    pub fn mark_written(
        &mut self,
        range: Range<u64>,
        mark: Mark,
        limit: NonZeroUsize,
    ) -> Result<Range<u64>, FileMapError> {
        self.file.check_range(&range)?;
        let mut rest = range;
        for _ in 0..limit.get() {
            if rest.is_empty() {
                break;
            }
            let found = self.map().next_in(&rest)?;
            let Some(Mapping::Extent(part)) = found.filter(|found| matches!(found, Mapping::Extent(_))) else {
                return Err(self.file.range_error(&rest, "it was not allocated in advance"));
            };
            let written = part.clip(&rest).filter(|written| part.is_prealloc && written.start == rest.start);
            let Some(mut written) = written else {
                return Err(self.file.range_error(&rest, "it was not allocated in advance"));
            };
            written.is_prealloc = false;
            if let Mark::New(generation) = mark {
                written.generation = generation;
            }
            rest.start = written.end();
            self.put_written(&part, written, mark)?;
        }
        Ok(rest)
    }

    fn put_written(&mut self, part: &ExtentPart, written: ExtentPart, mark: Mark) -> Result<(), FileMapError> {
        if let Some(before) = part.clip(&(part.start..written.start)) {
            self.put_part(&before)?;
            self.count(part, 1);
        }
        if let Some(behind) = part.clip(&(written.end()..part.end())) {
            self.put_part(&behind)?;
            self.count(part, 1);
        }
        let merged = self.join(written, mark)?;
        self.put_part(&merged)
    }

    /// Removes the items of written neighbours, and returns the part with them.
    fn join(&mut self, mut part: ExtentPart, mark: Mark) -> Result<ExtentPart, FileMapError> {
        let may = |other: &ExtentPart| matches!(mark, Mark::New(_)) || other.generation == part.generation;
        let before = match part.start.checked_sub(1) {
            Some(last) => self.map().next_in(&(last..part.start))?,
            None => None,
        };
        let behind = self.map().next_in(&(part.end()..part.end().saturating_add(1)))?;
        let before = match before {
            Some(Mapping::Extent(before)) if before.continues(&part) && may(&before) => Some(before),
            _ => None,
        };
        let behind = match behind {
            Some(Mapping::Extent(behind)) if part.continues(&behind) && may(&behind) => Some(behind),
            _ => None,
        };
        if let Some(before) = before {
            // Its item gets the new end. That of the part goes, if there is one.
            if self.map().starts_at(part.start)? {
                self.delete(part.start)?;
            }
            self.count(&before, -1);
            (part.start, part.offset, part.bytes) = (before.start, before.offset, before.bytes + part.bytes);
        }
        if let Some(behind) = behind {
            self.delete(behind.start)?;
            self.count(&behind, -1);
            part.bytes += behind.bytes;
        }
        Ok(part)
    }

    fn count(&mut self, part: &ExtentPart, by: i64) {
        self.refs.change(part.extent.bytenr, part.reference(self.file.root, self.file.ino), by);
    }

    /// Makes the sectors from `to` on share the extents of a part of a file, which [`FileMap::parts`] read: of this
    /// file, or of any other of any subvolume. Drops what was there. Returns what is left of the sectors from `to` on
    /// after `limit` dropped items. For the next step, that part of the source is to be read and given again.
    ///
    /// `size` is the file's size when all is done, below which holes get items without NO_HOLES.
    ///
    /// [`FileMap::parts`]: super::FileMap::parts
    ///
    /// # Errors
    /// If one file has checksums and the other has none, a part of the source is inline, source and target overlap, the
    /// target is not at a sector or behind the largest file, items are damaged, or a node is not in memory.
    pub fn clone_range(
        &mut self,
        source: &FileRange,
        to: u64,
        (size, generation): (u64, u64),
        limit: NonZeroUsize,
    ) -> Result<Range<u64>, FileMapError> {
        let (file, from) = (self.file, &source.range);
        let end = to.checked_add(from.end - from.start).filter(|end| *end <= file.max_bytes());
        let target = to..end.ok_or(file.range_error(&(to..to), "it ends behind the largest file"))?;
        if source.file.has_sums != file.has_sums {
            return Err(FileMapError::Sums { from: source.file.ino, to: file.ino });
        }
        let is_same = (source.file.root, source.file.ino) == (file.root, file.ino);
        if is_same && from.start < target.end && target.start < from.end {
            return Err(file.range_error(&target, "it overlaps what it is to share"));
        }
        if source.parts.iter().any(|part| matches!(part, Mapping::Inline(_))) {
            return Err(FileMapError::Inline(source.file.ino));
        }
        let rest = self.drop_range(target.clone(), Order::FromStart, limit)?;
        let done = Self::done(&target, &rest);
        let moved = |at: u64| at - from.start + target.start;
        for part in &source.parts {
            match part {
                Mapping::Hole(hole) => {
                    let (start, end) = (moved(hole.start), moved(hole.start + hole.bytes));
                    let end = end.min(done.end).min(file.sectors_end(size));
                    self.put_hole(start.max(done.start)..end, generation)?;
                }
                Mapping::Extent(part) => {
                    let part = ExtentPart { start: moved(part.start), ..*part };
                    if let Some(part) = part.clip(&done) {
                        self.insert(part)?;
                    }
                }
                Mapping::Inline(_) => {}
            }
        }
        Ok(rest)
    }
}
