//! The data of files: which extent each part of a file is in, and the changes of items and references when a part is
//! written, dropped, preallocated or shared.
//!
//! [`FileMap`] reads; [`FileEdit`] plans. A plan reads the tree, and its own changes so far, so that one operation may
//! have several steps: drop a range, then insert the new extent there. [`FileEdit::finish`] gives all changes, which
//! whoever runs the plan applies at once. Data are never read or written here. Where bytes of a sector must change
//! first, [`FileMap::plan_zero`] names the sector.
//!
//! Invariants:
//! - Two items of a file never cover the same byte. A range is dropped before something else is inserted there.
//! - Every item that is a part of an extent has one reference to the extent, and nothing else has: a plan that cuts an
//!   item in two adds one, a plan that removes an item drops one. A reference has the offset at which the extent would
//!   begin in the file, which may be below 0 and wraps. So an item that is trimmed keeps its reference.
//! - An item is a part of an extent, and keeps the place and the size of the whole: an extent is in use as long as any
//!   sector of it is, and goes at once.
//! - What is kept of an item keeps its generation: with it, the data were written.
//! - Long ranges are changed in steps with a limit of items. A file is truncated from its end, so that after each step
//!   its size can be lowered to what is left.
//! - Bytes behind the end of a file are never relied on.

mod changes;
mod convert;
mod extent;
mod file;
mod look_up;
mod remove;

use std::ops::Range;

use sealblock_btrfs_format::items::file_extent::Compression;

pub use changes::{DataRefs, FileChanges};
pub use convert::Mark;
pub use extent::{DiskExtent, ExtentPart, Hole, InlinePart, Mapping};
pub use file::{File, FileMapError, MAX_INLINE_BYTES};
pub use look_up::{FileMap, FileRange, Rewrite, ZeroPlan};
pub use remove::{Order, Truncated};

use crate::view::{Items, Overlay};

/// A plan of changes of one file.
#[derive(Debug)]
pub struct FileEdit<'a, T> {
    file: File,
    items: Overlay<'a, T>,
    refs: DataRefs,
    added_bytes: u64,
    removed_bytes: u64,
}

impl<'a, T: Items> FileEdit<'a, T> {
    /// A plan without changes. After an error it must not be continued: it has a part of the step that failed.
    pub fn new(file: File, tree: &'a T) -> FileEdit<'a, T> {
        FileEdit { file, items: Overlay::new(tree), refs: DataRefs::default(), added_bytes: 0, removed_bytes: 0 }
    }

    /// The file as it is with the changes so far.
    pub fn map(&self) -> FileMap<'_, Overlay<'a, T>> {
        FileMap::new(self.file, &self.items)
    }

    /// All changes.
    pub fn finish(self) -> FileChanges {
        FileChanges {
            items: self.items.into_changes(),
            refs: self.refs,
            added_bytes: self.added_bytes,
            removed_bytes: self.removed_bytes,
        }
    }

    /// Inserts a part of an extent where the file has no item: written data, or space that is allocated in advance.
    /// The extent gets a reference. Whoever allocated it adds its item.
    ///
    /// # Errors
    /// If there is an item, the part is impossible, or a node is not in memory.
    pub fn insert(&mut self, part: ExtentPart) -> Result<(), FileMapError> {
        let File { ino, .. } = self.file;
        let wrong = |why| FileMapError::New { ino, start: part.start, why };
        part.check(&self.file).map_err(wrong)?;
        if part.end() > self.file.max_bytes() {
            return Err(wrong("the extent ends behind the largest file"));
        }
        if part.extent.compression != Compression::None && !self.file.has_sums {
            return Err(wrong("a file without checksums has no compressed extents"));
        }
        self.check_empty(part.start..part.end())?;
        self.put_part(&part)?;
        self.refs.change(part.extent.bytenr, part.reference(self.file.root, ino), 1);
        self.added_bytes = self.added_bytes.saturating_add(part.bytes);
        Ok(())
    }

    /// Inserts a whole file into its item. `size` is the file's size then.
    ///
    /// # Errors
    /// If the file has other items or may not be inline ([`File::may_be_inline`]), or a node is not in memory.
    pub fn insert_inline(&mut self, inline: &InlinePart, size: u64) -> Result<(), FileMapError> {
        let stored = inline.stored.len() as u64;
        let may = size == inline.plain_bytes && self.file.may_be_inline(size, stored, inline.compression);
        self.put_inline(inline, may)
    }

    /// Inserts the target of a symbolic link.
    ///
    /// # Errors
    /// If it is empty, longer than [`File::max_symlink_bytes`], or a node is not in memory.
    pub fn insert_symlink(&mut self, target: &[u8], generation: u64) -> Result<(), FileMapError> {
        let plain_bytes = target.len() as u64;
        let may = (1..=self.file.max_symlink_bytes()).contains(&plain_bytes);
        let (compression, stored) = (Compression::None, target.to_vec());
        self.put_inline(&InlinePart { generation, compression, plain_bytes, stored }, may)
    }

    fn put_inline(&mut self, inline: &InlinePart, may: bool) -> Result<(), FileMapError> {
        if !may {
            let why = "a file that is empty or too long, or compressed to no use, is not inline";
            return Err(FileMapError::New { ino: self.file.ino, start: 0, why });
        }
        self.check_empty(0..u64::MAX)?;
        self.items.put(self.file.key(0), inline.encode())?;
        self.added_bytes = self.added_bytes.saturating_add(inline.plain_bytes);
        Ok(())
    }

    fn check_empty(&self, range: Range<u64>) -> Result<(), FileMapError> {
        match self.map().next_in(&range)? {
            None => Ok(()),
            Some(found) => {
                let start = found.range(self.file.sector_bytes).start;
                Err(FileMapError::Occupied { ino: self.file.ino, start })
            }
        }
    }

    fn put_part(&mut self, part: &ExtentPart) -> Result<(), FileMapError> {
        Ok(self.items.put(self.file.key(part.start), part.encode())?)
    }

    fn delete(&mut self, start: u64) -> Result<(), FileMapError> {
        Ok(self.items.delete(self.file.key(start))?)
    }
}

#[cfg(test)]
mod tests;
