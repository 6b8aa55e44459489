//! Whether data may be written where they are: into space that was allocated in advance, or over old data of a file
//! with NODATACOW.
//!
//! A write in place is right only if nobody else has the extent. Otherwise it would change a snapshot, another file, or
//! what a crash should bring back. So all must hold:
//! - The item and the extent are newer than the last snapshot of the subvolume, and no snapshot is about to be taken.
//!   The extent tree does not count what a snapshot shares at first: only the leaf is shared, not the extent.
//! - All references of the extent are of this file at this offset: in the extent tree, where they are one entry behind
//!   the extent's item, and among the delayed ones. Others that it had are gone durably: before that, a power cut
//!   brings them back, and their files would have what is written now.
//! - The sectors have no checksums, which a write in place would make wrong.
//! - The extent is not compressed, and its block group may be written.
//!
//! In doubt the answer is no, and the data are written elsewhere.

use std::num::NonZeroUsize;
use std::ops::Range;

use sealblock_btrfs_format::items::extent::ExtentFlags;
use sealblock_btrfs_format::items::extent_buf::{ExtentItemBuf, ExtentRefError};
use sealblock_btrfs_format::items::file_extent::Compression;
use sealblock_btrfs_format::key::{ItemType, Key};

use crate::csums::{CsumError, CsumShape, Csums};
use crate::file_map::{ExtentPart, File, Mapping};
use crate::refs::{DelayedRefs, Released};
use crate::tree::TreeError;
use crate::view::Items;

/// Why the test cannot be made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NocowError {
    /// The extent tree cannot be read.
    #[error(transparent)]
    Tree(#[from] TreeError),
    /// The item of the extent is damaged.
    #[error("extent {bytenr}: {error}")]
    Extent {
        /// Its address.
        bytenr: u64,
        /// Why.
        error: ExtentRefError,
    },
    /// The checksum tree cannot be read.
    #[error(transparent)]
    Csums(#[from] CsumError),
}

/// Why data must be written elsewhere.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MustCow {
    /// There is a hole, or the data are in the item.
    NoExtent,
    /// The extent is compressed.
    Compressed,
    /// It has data, and the file does not have NODATACOW.
    Data,
    /// A snapshot has it, or is about to.
    Snapshot,
    /// It has other references, or more than its item says.
    Shared,
    /// The extent tree does not have it. The filesystem is damaged.
    Missing,
    /// It has checksums.
    Summed,
    /// Its block group must not be written.
    ReadOnly,
}

/// What is known of the file and the transaction.
#[derive(Clone, Copy, Debug)]
pub struct NocowTest<'a, E, C> {
    /// The file.
    pub file: File,
    /// True with NODATACOW.
    pub has_nodatacow: bool,
    /// The transaction of the last snapshot of the subvolume.
    pub last_snapshot: u64,
    /// True if a snapshot of the subvolume is to be taken in this transaction.
    pub is_snapshot_pending: bool,
    /// The extent tree.
    pub extents: &'a E,
    /// The references that are not in it yet.
    pub delayed: &'a DelayedRefs,
    /// Extents of which references are gone, and that is not durable.
    pub released: &'a Released,
    /// The checksum tree.
    pub csums: &'a C,
    /// The form of its items.
    pub shape: CsumShape,
}

impl<E: Items, C: Items> NocowTest<'_, E, C> {
    /// Tests a part of the file, of which all is to be written. `is_read_only` tells of the block group of an address
    /// whether it must not be written. `None` means that the data may be written in place.
    ///
    /// # Errors
    /// If items are damaged, or a node is not in memory.
    pub fn must_cow(&self, part: &Mapping, is_read_only: impl Fn(u64) -> bool) -> Result<Option<MustCow>, NocowError> {
        let Mapping::Extent(part) = part else { return Ok(Some(MustCow::NoExtent)) };
        if part.extent.compression != Compression::None {
            return Ok(Some(MustCow::Compressed));
        }
        if !part.is_prealloc && !self.has_nodatacow {
            return Ok(Some(MustCow::Data));
        }
        if self.is_snapshot_pending || part.generation <= self.last_snapshot {
            return Ok(Some(MustCow::Snapshot));
        }
        if is_read_only(part.extent.bytenr) {
            return Ok(Some(MustCow::ReadOnly));
        }
        if let Some(why) = self.of_extent(part)? {
            return Ok(Some(why));
        }
        Ok(self.has_sums(part.stored())?.then_some(MustCow::Summed))
    }

    /// The item of the extent, its own references, and the delayed ones.
    fn of_extent(&self, part: &ExtentPart) -> Result<Option<MustCow>, NocowError> {
        let bytenr = part.extent.bytenr;
        if self.released.contains(bytenr) {
            return Ok(Some(MustCow::Shared));
        }
        let own = part.reference(self.file.root, self.file.ino);
        let head = self.delayed.head(bytenr);
        let mut count = 0_i64;
        for (what, net) in head.into_iter().flat_map(|head| head.refs()) {
            if what != own {
                return Ok(Some(MustCow::Shared));
            }
            count += net;
        }
        let data = self.extents.at(Key::new(bytenr, ItemType::EXTENT_ITEM, part.extent.bytes))?;
        let generation = match (data, head.and_then(|head| head.new_item())) {
            (Some(data), None) => {
                let item = ExtentItemBuf::decode(ItemType::EXTENT_ITEM, data);
                let item = item.map_err(|error| NocowError::Extent { bytenr, error })?;
                let inline = i64::from(item.inline_count(own).unwrap_or(0));
                let is_own = item.flags == ExtentFlags::DATA && item.inline().len() == 1 && inline > 0;
                if !is_own || item.refs() != inline.unsigned_abs() || self.has_keyed(bytenr)? {
                    return Ok(Some(MustCow::Shared));
                }
                count += inline;
                item.generation
            }
            (None, Some(new)) => new.generation,
            _ => return Ok(Some(MustCow::Missing)),
        };
        if count <= 0 {
            return Ok(Some(MustCow::Missing));
        }
        Ok((generation <= self.last_snapshot).then_some(MustCow::Snapshot))
    }

    /// True if a reference of an extent has its own item.
    fn has_keyed(&self, bytenr: u64) -> Result<bool, TreeError> {
        let (from, to) = (ItemType::TREE_BLOCK_REF, ItemType::SHARED_DATA_REF);
        Ok(self.extents.first(Key::new(bytenr, from, 0)..=Key::new(bytenr, to, u64::MAX))?.is_some())
    }

    fn has_sums(&self, range: Range<u64>) -> Result<bool, CsumError> {
        Ok(!Csums::new(self.shape, self.csums).runs(range, NonZeroUsize::MIN)?.0.is_empty())
    }
}

#[cfg(test)]
mod tests;
