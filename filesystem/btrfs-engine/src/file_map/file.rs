//! A file, what of its filesystem its items depend on, and why a change of it cannot be planned.

use std::ops::Range;

use sealblock_btrfs_format::error::DecodeError;
use sealblock_btrfs_format::items::file_extent::{Compression, FileExtentHead};
use sealblock_btrfs_format::key::{ItemType, Key};
use sealblock_btrfs_format::node::{ITEM_HEAD_BYTES, leaf_capacity};

use crate::tree::TreeError;

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
    /// The range ends behind the largest file.
    #[error("inode {ino}: a file cannot have {end} bytes")]
    TooLarge {
        /// The inode.
        ino: u64,
        /// The byte after the last one.
        end: u64,
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
    pub(super) fn sector(&self) -> u64 {
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

    pub(super) fn key(&self, start: u64) -> Key {
        Key::new(self.ino, ItemType::EXTENT_DATA, start)
    }

    pub(super) fn range_error(&self, range: &Range<u64>, why: &'static str) -> FileMapError {
        FileMapError::Range { ino: self.ino, start: range.start, end: range.end, why }
    }

    pub(super) fn check_range(&self, range: &Range<u64>) -> Result<(), FileMapError> {
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
