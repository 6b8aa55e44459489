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
mod look_up;
mod remove;

use std::ops::Range;

use sealblock_btrfs_format::error::DecodeError;
use sealblock_btrfs_format::items::file_extent::{Compression, FileExtentHead};
use sealblock_btrfs_format::key::{ItemType, Key};
use sealblock_btrfs_format::node::{ITEM_HEAD_BYTES, leaf_capacity};

pub use changes::{DataRefs, FileChanges};
pub use convert::Mark;
pub use extent::{DiskExtent, ExtentPart, Hole, InlinePart, Mapping};
pub use look_up::{FileMap, FileRange, Rewrite, ZeroPlan};
pub use remove::{Order, Truncated};

use crate::overlay::Overlay;
use crate::tree::TreeError;
use crate::view::Items;

/// The most stored bytes of a file within its item, as in Linux.
pub const MAX_INLINE_BYTES: u64 = 2048;

/// A file, and what of its filesystem its items depend on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct File {
    /// The subvolume that its references have.
    pub root: u64,
    /// The inode.
    pub ino: u64,
    /// Bytes of a sector.
    pub sector_bytes: u32,
    /// Bytes of a node.
    pub node_bytes: u32,
    /// True if holes below the end of the file have items: without NO_HOLES.
    pub has_hole_items: bool,
    /// False with NODATASUM.
    pub has_sums: bool,
}

/// Why a change of a file cannot be planned.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FileMapError {
    /// The tree cannot be read.
    #[error(transparent)]
    Tree(#[from] TreeError),
    /// An item does not have the form of a file extent.
    #[error("{key}: {error}")]
    Shape {
        /// Its key.
        key: Key,
        /// Why.
        error: DecodeError,
    },
    /// An item has impossible values.
    #[error("{key}: {why}")]
    Item {
        /// Its key.
        key: Key,
        /// Why.
        why: &'static str,
    },
    /// Two items have the same bytes of the file.
    #[error("inode {ino}: the extent at {start} begins before the one before it ends, at {end}")]
    Overlap {
        /// The inode.
        ino: u64,
        /// Where the later one begins.
        start: u64,
        /// Where the earlier one ends.
        end: u64,
    },
    /// The range is not one that can be changed.
    #[error("inode {ino}, bytes {start} to {end}: {why}")]
    Range {
        /// The inode.
        ino: u64,
        /// The first byte.
        start: u64,
        /// The byte after the last one.
        end: u64,
        /// Why.
        why: &'static str,
    },
    /// Something is inserted where an item is. The range must be dropped first.
    #[error("inode {ino}: there is an extent at {start} already")]
    Occupied {
        /// The inode.
        ino: u64,
        /// Where it begins.
        start: u64,
    },
    /// The file is within its item, of which no part can be cut off or shared. It must be rewritten first.
    #[error("inode {0} is inline, and is to be rewritten first")]
    Inline(u64),
    /// Something cannot be inserted.
    #[error("inode {ino}, byte {start}: {why}")]
    New {
        /// The inode.
        ino: u64,
        /// Where.
        start: u64,
        /// Why.
        why: &'static str,
    },
    /// Extents cannot be shared by a file with checksums and one without.
    #[error("inode {from} has checksums and inode {to} has none, or the other way round")]
    Sums {
        /// The inode that has the extents.
        from: u64,
        /// The inode that is to get them.
        to: u64,
    },
}

impl File {
    /// Bytes of a sector.
    fn sector(&self) -> u64 {
        u64::from(self.sector_bytes.max(1))
    }

    /// The end of the last sector that a file can have.
    pub fn max_bytes(&self) -> u64 {
        i64::MAX as u64 / self.sector() * self.sector()
    }

    /// The end of the sectors that a file of this size has.
    pub fn sectors_end(&self, size: u64) -> u64 {
        size.checked_next_multiple_of(self.sector()).unwrap_or(u64::MAX / self.sector() * self.sector())
    }

    fn key(&self, start: u64) -> Key {
        Key::new(self.ino, ItemType::EXTENT_DATA, start)
    }

    fn range_error(&self, range: &Range<u64>, why: &'static str) -> FileMapError {
        FileMapError::Range { ino: self.ino, start: range.start, end: range.end, why }
    }

    fn check_range(&self, range: &Range<u64>) -> Result<(), FileMapError> {
        let is_whole = [range.start, range.end].iter().all(|value| value.is_multiple_of(self.sector()));
        match is_whole && range.start <= range.end {
            true => Ok(()),
            false => Err(self.range_error(range, "these are not whole sectors")),
        }
    }

    /// The most bytes that an item of this filesystem can have for a file.
    fn inline_room(&self) -> u64 {
        leaf_capacity(self.node_bytes).saturating_sub(ITEM_HEAD_BYTES + size_of::<FileExtentHead>()) as u64
    }

    /// True if a file of this size may be in its item, of which it needs `stored` bytes. The file must have nothing
    /// else, such as space allocated behind its end.
    pub fn may_be_inline(&self, size: u64, stored: u64, compression: Compression) -> bool {
        let fits = match compression {
            Compression::None => size < self.sector() && stored == size,
            // A file without checksums is never compressed.
            _ => size <= self.sector() && self.has_sums,
        };
        size > 0 && stored > 0 && fits && stored <= MAX_INLINE_BYTES.min(self.inline_room())
    }

    /// The longest target of a symbolic link, which is always in its item and never compressed.
    pub fn max_symlink_bytes(&self) -> u64 {
        self.inline_room().min(self.sector() - 1)
    }
}

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
