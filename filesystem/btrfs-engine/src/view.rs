//! The items of one tree as the open transaction has them: what an operation reads before it changes anything.
//!
//! An operation is planned first and applied then. The plan only reads, through [`Items`], and names the changes of items
//! ([`ItemChanges`](sealblock_btrfs_format::item_changes::ItemChanges)). A node that is not in memory ends the plan with
//! [`TreeError::Need`]; whoever runs it reads the node and plans again from the start. So a plan has no effect until all
//! that it needs is in memory.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use sealblock_btrfs_format::key::Key;

use crate::tree::TreeError;

/// Items of a tree, by their keys.
pub trait Items {
    /// The data of an item.
    ///
    /// # Errors
    /// If a node is not in memory.
    fn at(&self, key: Key) -> Result<Option<&[u8]>, TreeError>;

    /// The first item of a range of keys.
    ///
    /// # Errors
    /// If a node is not in memory.
    fn first(&self, range: RangeInclusive<Key>) -> Result<Option<(Key, &[u8])>, TreeError>;

    /// The last item of a range of keys.
    ///
    /// # Errors
    /// If a node is not in memory.
    fn last(&self, range: RangeInclusive<Key>) -> Result<Option<(Key, &[u8])>, TreeError>;
}

/// Items in a map, for tests.
impl Items for BTreeMap<Key, Vec<u8>> {
    fn at(&self, key: Key) -> Result<Option<&[u8]>, TreeError> {
        Ok(self.get(&key).map(|data| &data[..]))
    }

    fn first(&self, range: RangeInclusive<Key>) -> Result<Option<(Key, &[u8])>, TreeError> {
        let found = if range.is_empty() { None } else { self.range(range).next() };
        Ok(found.map(|(key, data)| (*key, &data[..])))
    }

    fn last(&self, range: RangeInclusive<Key>) -> Result<Option<(Key, &[u8])>, TreeError> {
        let found = if range.is_empty() { None } else { self.range(range).next_back() };
        Ok(found.map(|(key, data)| (*key, &data[..])))
    }
}
