//! The checksum tree: one checksum for each sector of data, in items of neighbouring sectors.
//!
//! [`Csums`] reads; [`CsumEdit`] plans. Data get their checksums in the transaction that inserts their file extent, and
//! lose them when their extent is free.
//!
//! Invariants:
//! - Items never overlap. Checksums of sectors that have some are not inserted: these are to be deleted first.
//! - An item has one checksum at least and [`CsumShape::max_sums`] at most, as in Linux, so that two items fit into a
//!   leaf. Items that touch need not be one: only the item before a new run is extended.
//! - A deletion from the middle of an item makes two.
//! - In a filesystem without checksums there is nothing to read or delete, and nothing can be inserted.

use std::num::NonZeroUsize;
use std::ops::Range;

use sealblock_btrfs_format::item_changes::ItemChanges;
use sealblock_btrfs_format::key::{ItemType, Key, objectid};
use sealblock_btrfs_format::node::{ITEM_HEAD_BYTES, leaf_capacity};

use crate::tree::TreeError;
use crate::view::{Items, Overlay};

/// Sizes that decide the form of items.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CsumShape {
    /// Bytes of a sector.
    pub sector_bytes: u32,
    /// Bytes of a node.
    pub node_bytes: u32,
    /// Bytes of a checksum; 0 if the filesystem has none.
    pub csum_bytes: usize,
}

/// Why checksums cannot be read or changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CsumError {
    /// The tree cannot be read.
    #[error(transparent)]
    Tree(#[from] TreeError),
    /// An item has no checksum, or a part of one, or ends behind the last address.
    #[error("{key}: {bytes} bytes are no checksums of sectors")]
    Item {
        /// Its key.
        key: Key,
        /// Its bytes.
        bytes: usize,
    },
    /// An address is not at a sector, or the range ends behind the last one.
    #[error("checksums from {start} to {end}: these are not whole sectors")]
    Range {
        /// The first byte.
        start: u64,
        /// The byte after the last one.
        end: u64,
    },
    /// The bytes are not one or more checksums.
    #[error("{0} bytes are not one or more checksums")]
    Sums(usize),
    /// A sector has a checksum already.
    #[error("the sector at {0} has a checksum already")]
    Exists(u64),
    /// The sizes of the filesystem are impossible.
    #[error("there are no items of checksums with sectors of {sector_bytes} bytes and nodes of {node_bytes}")]
    Shape {
        /// Bytes of a sector.
        sector_bytes: u32,
        /// Bytes of a node.
        node_bytes: u32,
    },
}

/// Checksums of neighbouring sectors.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CsumRun {
    /// The logical address of the first sector.
    pub start: u64,
    /// The checksums.
    pub sums: Vec<u8>,
}

/// An item.
#[derive(Clone, Copy, Debug)]
struct Entry<'a> {
    start: u64,
    end: u64,
    sums: &'a [u8],
}

impl CsumShape {
    /// The most checksums of an item.
    pub fn max_sums(&self) -> usize {
        let room = leaf_capacity(self.node_bytes).saturating_sub(2 * ITEM_HEAD_BYTES);
        (room / self.csum_bytes.max(1)).saturating_sub(1)
    }

    /// True if the filesystem has no checksums.
    fn has_none(&self) -> bool {
        self.csum_bytes == 0
    }

    fn sector(&self) -> u64 {
        u64::from(self.sector_bytes)
    }

    fn check(&self) -> Result<(), CsumError> {
        let CsumShape { sector_bytes, node_bytes, .. } = *self;
        let is_possible = sector_bytes > 0 && self.max_sums() > 0;
        if is_possible { Ok(()) } else { Err(CsumError::Shape { sector_bytes, node_bytes }) }
    }

    fn check_range(&self, range: &Range<u64>) -> Result<(), CsumError> {
        self.check()?;
        let Range { start, end } = *range;
        let is_whole = start.is_multiple_of(self.sector()) && end.is_multiple_of(self.sector()) && start <= end;
        if is_whole { Ok(()) } else { Err(CsumError::Range { start, end }) }
    }

    /// The bytes of checksums that sectors from `start` to `end` have. The range is not larger than an item.
    fn bytes(&self, start: u64, end: u64) -> usize {
        ((end - start) / self.sector()) as usize * self.csum_bytes
    }

    fn entry<'a>(&self, key: Key, sums: &'a [u8]) -> Result<Entry<'a>, CsumError> {
        let wrong = CsumError::Item { key, bytes: sums.len() };
        let is_whole = !sums.is_empty() && sums.len().is_multiple_of(self.csum_bytes);
        let bytes = (sums.len() / self.csum_bytes) as u64 * self.sector();
        let end = key.offset.checked_add(bytes).filter(|_| is_whole && key.offset.is_multiple_of(self.sector()));
        Ok(Entry { start: key.offset, end: end.ok_or(wrong)?, sums })
    }
}

impl Entry<'_> {
    /// Its checksums of sectors from `start` to `end`, which it has.
    fn part(&self, shape: &CsumShape, start: u64, end: u64) -> &[u8] {
        &self.sums[shape.bytes(self.start, start)..shape.bytes(self.start, end)]
    }
}

fn key(start: u64) -> Key {
    Key::new(objectid::EXTENT_CSUM, ItemType::EXTENT_CSUM, start)
}

/// The checksum tree.
#[derive(Debug)]
pub struct Csums<'a, T> {
    shape: CsumShape,
    items: &'a T,
}

impl<'a, T: Items> Csums<'a, T> {
    /// The checksums in a tree.
    pub fn new(shape: CsumShape, items: &'a T) -> Csums<'a, T> {
        Csums { shape, items }
    }

    /// The checksums of a range, in runs, from as many items as `limit` at most. Sectors without checksums are in no
    /// run. Returns also how far the range was read.
    ///
    /// # Errors
    /// If the range is not of whole sectors, items are damaged, or a node is not in memory.
    pub fn runs(&self, range: Range<u64>, limit: NonZeroUsize) -> Result<(Vec<CsumRun>, u64), CsumError> {
        self.shape.check_range(&range)?;
        if self.shape.has_none() {
            return Ok((Vec::new(), range.end));
        }
        let (mut runs, mut at) = (Vec::<CsumRun>::new(), range.start);
        for _ in 0..limit.get() {
            let Some(found) = self.next_in(&(at..range.end))? else { return Ok((runs, range.end)) };
            let (start, end) = (found.start.max(at), found.end.min(range.end));
            let sums = found.part(&self.shape, start, end);
            match runs.last_mut().filter(|_| start == at && at > range.start) {
                Some(run) => run.sums.extend_from_slice(sums),
                None => runs.push(CsumRun { start, sums: sums.to_vec() }),
            }
            at = end;
        }
        Ok((runs, at))
    }

    /// The first item that has sectors of a range.
    fn next_in(&self, range: &Range<u64>) -> Result<Option<Entry<'a>>, CsumError> {
        let Some(last) = range.end.checked_sub(1).filter(|last| range.start <= *last) else { return Ok(None) };
        if let Some((found, sums)) = self.items.last(key(0)..=key(range.start))? {
            let before = self.shape.entry(found, sums)?;
            if before.end > range.start {
                return Ok(Some(before));
            }
        }
        let Some((found, sums)) = self.items.first(key(range.start)..=key(last))? else { return Ok(None) };
        Ok(Some(self.shape.entry(found, sums)?))
    }
}

/// A plan of changes of the checksum tree.
#[derive(Debug)]
pub struct CsumEdit<'a, T> {
    shape: CsumShape,
    items: Overlay<'a, T>,
}

impl<'a, T: Items> CsumEdit<'a, T> {
    /// A plan without changes. After an error it must not be continued: it has a part of the step that failed.
    pub fn new(shape: CsumShape, tree: &'a T) -> CsumEdit<'a, T> {
        CsumEdit { shape, items: Overlay::new(tree) }
    }

    /// The checksums with the changes so far.
    pub fn csums(&self) -> Csums<'_, Overlay<'a, T>> {
        Csums::new(self.shape, &self.items)
    }

    /// All changes.
    pub fn finish(self) -> ItemChanges {
        self.items.into_changes()
    }

    /// Inserts the checksums of sectors from an address on.
    ///
    /// # Errors
    /// If they are not whole, a sector has one already, items are damaged, or a node is not in memory.
    pub fn insert(&mut self, start: u64, sums: &[u8]) -> Result<(), CsumError> {
        self.shape.check()?;
        if self.shape.has_none() || sums.is_empty() || !sums.len().is_multiple_of(self.shape.csum_bytes) {
            return Err(CsumError::Sums(sums.len()));
        }
        let sectors = (sums.len() / self.shape.csum_bytes) as u64;
        let end = sectors.checked_mul(self.shape.sector()).and_then(|bytes| start.checked_add(bytes));
        let end = end.ok_or(CsumError::Range { start, end: u64::MAX })?;
        self.shape.check_range(&(start..end))?;
        if let Some(found) = self.csums().next_in(&(start..end))? {
            return Err(CsumError::Exists(found.start.max(start)));
        }
        let most = self.shape.max_sums() * self.shape.csum_bytes;
        let (mut at, mut left) = (start, sums);
        if let Some((mut run, room)) = self.before(start, most)? {
            let (first, others) = left.split_at(room.min(left.len()));
            run.sums.extend_from_slice(first);
            self.items.put(key(run.start), run.sums)?;
            at += (first.len() / self.shape.csum_bytes) as u64 * self.shape.sector();
            left = others;
        }
        for part in left.chunks(most) {
            self.items.put(key(at), part.to_vec())?;
            // Not behind the end, which was computed.
            at += (part.len() / self.shape.csum_bytes) as u64 * self.shape.sector();
        }
        Ok(())
    }

    /// The item that ends at an address, and the bytes that it has room for, if any.
    fn before(&self, start: u64, most: usize) -> Result<Option<(CsumRun, usize)>, CsumError> {
        let Some(last) = start.checked_sub(1) else { return Ok(None) };
        let Some(found) = self.csums().next_in(&(last..start))?.filter(|found| found.end == start) else {
            return Ok(None);
        };
        let room = most.saturating_sub(found.sums.len());
        Ok((room > 0).then(|| (CsumRun { start: found.start, sums: found.sums.to_vec() }, room)))
    }

    /// Deletes the checksums of a range; sectors without them are skipped. Returns what is left of the range after
    /// `limit` items; that is empty at the end.
    ///
    /// # Errors
    /// If the range is not of whole sectors, items are damaged, or a node is not in memory.
    pub fn delete(&mut self, range: Range<u64>, limit: NonZeroUsize) -> Result<Range<u64>, CsumError> {
        self.shape.check_range(&range)?;
        if self.shape.has_none() {
            return Ok(range.end..range.end);
        }
        let mut at = range.start;
        for _ in 0..limit.get() {
            let Some(found) = self.csums().next_in(&(at..range.end))? else { return Ok(range.end..range.end) };
            let (start, end) = (found.start, found.end);
            let kept = found.part(&self.shape, start, at.max(start)).to_vec();
            let behind = found.part(&self.shape, range.end.min(end), end).to_vec();
            match kept.is_empty() {
                true => self.items.delete(key(start))?,
                false => self.items.put(key(start), kept)?,
            }
            if !behind.is_empty() {
                self.items.put(key(range.end), behind)?;
            }
            at = end.min(range.end);
        }
        Ok(at..range.end)
    }
}

#[cfg(test)]
mod tests;
