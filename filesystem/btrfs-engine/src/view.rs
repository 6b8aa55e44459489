//! The items of one tree as the open transaction has them: what an operation reads before it changes anything.
//!
//! An operation is planned first and applied then. The plan only reads, through [`Items`], and names the changes of items
//! ([`ItemChanges`]). A node that is not in memory ends the plan with [`TreeError::Need`]; whoever runs it reads the node
//! and plans again from the start. So a plan has no effect until all that it needs is in memory.
//!
//! An operation often has several steps, such as to drop a range of a file and to insert an extent there. The second
//! step must see what the first one left, though nothing was applied yet: it reads an [`Overlay`].

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use sealblock_btrfs_format::item_changes::{ItemChange, ItemChanges};
use sealblock_btrfs_format::key::Key;

use crate::tree::{NodeSource, Tree, TreeError};

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

/// The items of a tree whose nodes are in memory.
pub struct TreeView<'n, N> {
    tree: Tree,
    nodes: &'n N,
}

impl<N: NodeSource> Items for TreeView<'_, N> {
    fn at(&self, key: Key) -> Result<Option<&[u8]>, TreeError> {
        self.tree.find(self.nodes, key)
    }

    fn first(&self, range: RangeInclusive<Key>) -> Result<Option<(Key, &[u8])>, TreeError> {
        self.tree.first_of(self.nodes, range)
    }

    fn last(&self, range: RangeInclusive<Key>) -> Result<Option<(Key, &[u8])>, TreeError> {
        self.tree.last_of(self.nodes, range)
    }
}

impl Tree {
    /// Its items, for reading.
    pub fn view<'n, N: NodeSource>(&self, nodes: &'n N) -> TreeView<'n, N> {
        TreeView { tree: *self, nodes }
    }
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

/// Items of a tree, and changes that are not applied to it.
#[derive(Debug)]
pub struct Overlay<'a, T> {
    base: &'a T,
    changes: ItemChanges,
}

impl<'a, T: Items> Overlay<'a, T> {
    /// A tree without changes.
    pub fn new(base: &'a T) -> Overlay<'a, T> {
        Overlay { base, changes: ItemChanges::new() }
    }

    /// Inserts an item, or gives it other data. Data that it has already are no change.
    ///
    /// # Errors
    /// If a node is not in memory.
    pub fn put(&mut self, key: Key, data: Vec<u8>) -> Result<(), TreeError> {
        match self.at(key)? {
            None => self.changes.insert(key, data),
            Some(old) if old != data => self.changes.replace(key, data),
            Some(_) => {}
        }
        Ok(())
    }

    /// Deletes an item.
    ///
    /// # Errors
    /// If it is not there, or a node is not in memory.
    pub fn delete(&mut self, key: Key) -> Result<(), TreeError> {
        self.at(key)?.ok_or(TreeError::Missing(key))?;
        self.changes.delete(key);
        Ok(())
    }

    /// The changes so far.
    pub fn changes(&self) -> &ItemChanges {
        &self.changes
    }

    /// Goes back to earlier changes.
    pub fn set_changes(&mut self, changes: ItemChanges) {
        self.changes = changes;
    }

    /// The changes, to be applied all at once.
    pub fn into_changes(self) -> ItemChanges {
        self.changes
    }

    /// The data of an item of the base, as it is with the changes; `None` if it is deleted.
    fn changed<'s>(&'s self, key: Key, data: &'s [u8]) -> Option<&'s [u8]> {
        match self.changes.get(key) {
            None => Some(data),
            Some(change) => data_of(change),
        }
    }
}

fn data_of(change: &ItemChange) -> Option<&[u8]> {
    match change {
        ItemChange::Insert(data) | ItemChange::Replace(data) => Some(data),
        ItemChange::Delete => None,
    }
}

impl<T: Items> Items for Overlay<'_, T> {
    fn at(&self, key: Key) -> Result<Option<&[u8]>, TreeError> {
        match self.changes.get(key) {
            Some(change) => Ok(data_of(change)),
            None => self.base.at(key),
        }
    }

    fn first(&self, range: RangeInclusive<Key>) -> Result<Option<(Key, &[u8])>, TreeError> {
        let planned = self.changes.range(range.clone()).find_map(|(key, change)| Some((key, data_of(change)?)));
        // Nothing behind the planned item matters, so no node behind it has to be in memory.
        let (mut from, to) = (*range.start(), planned.map_or(*range.end(), |(key, _)| key));
        while let Some((key, data)) = self.base.first(from..=to)? {
            if let Some(data) = self.changed(key, data) {
                return Ok(Some((key, data)));
            }
            let Some(next) = key.next() else { break };
            from = next;
        }
        Ok(planned)
    }

    fn last(&self, range: RangeInclusive<Key>) -> Result<Option<(Key, &[u8])>, TreeError> {
        let planned = self.changes.range(range.clone()).rev().find_map(|(key, change)| Some((key, data_of(change)?)));
        let (from, mut to) = (planned.map_or(*range.start(), |(key, _)| key), *range.end());
        while let Some((key, data)) = self.base.last(from..=to)? {
            if let Some(data) = self.changed(key, data) {
                return Ok(Some((key, data)));
            }
            let Some(before) = key.previous() else { break };
            to = before;
        }
        Ok(planned)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sealblock_btrfs_format::checker::Expected;
    use sealblock_btrfs_format::key::ItemType;

    fn key(number: u64) -> Key {
        Key::new(number / 3, ItemType::EXTENT_DATA, [0, 1, u64::MAX][number as usize % 3])
    }

    #[test]
    fn it_reads_as_the_tree_will_when_the_changes_are_applied() {
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..3000 {
            let base: BTreeMap<Key, Vec<u8>> = (0..12).filter(|_| random.bool()).map(|n| (key(n), vec![9])).collect();
            let (mut now, mut overlay) = (base.clone(), Overlay::new(&base));
            for _ in 0..random.usize(..20) {
                let (at, data) = (key(random.u64(..12)), vec![random.u8(..4)]);
                if random.bool() {
                    assert_eq!(overlay.delete(at).is_ok(), now.remove(&at).is_some());
                } else {
                    overlay.put(at, data.clone()).unwrap();
                    now.insert(at, data);
                }
                let (from, to) = (key(random.u64(..12)), key(random.u64(..12)));
                assert_eq!(overlay.at(from), now.at(from));
                assert_eq!(overlay.first(from..=to), now.first(from..=to));
                assert_eq!(overlay.last(from..=to), now.last(from..=to));
            }
            let mut applied = base.clone();
            for (key, change) in overlay.into_changes() {
                match change {
                    ItemChange::Insert(data) => assert!(applied.insert(key, data).is_none()),
                    ItemChange::Replace(data) => assert!(applied.insert(key, data).is_some()),
                    ItemChange::Delete => assert!(applied.remove(&key).is_some()),
                }
            }
            assert_eq!(applied, now);
        }
    }

    fn need(bytenr: u64) -> TreeError {
        TreeError::Need(Expected { bytenr, owner: 5, level: 0, generation: 7, first_key: None })
    }

    /// A tree of which nothing is in memory.
    struct Absent;

    impl Items for Absent {
        fn at(&self, _: Key) -> Result<Option<&[u8]>, TreeError> {
            Err(need(1))
        }

        fn first(&self, _: RangeInclusive<Key>) -> Result<Option<(Key, &[u8])>, TreeError> {
            Err(need(2))
        }

        fn last(&self, _: RangeInclusive<Key>) -> Result<Option<(Key, &[u8])>, TreeError> {
            Err(need(3))
        }
    }

    #[test]
    fn a_node_that_is_not_in_memory_is_passed_on() {
        let mut overlay = Overlay::new(&Absent);
        assert_eq!(overlay.put(key(1), vec![]), Err(need(1)));
        assert_eq!(overlay.delete(key(1)), Err(need(1)));
        assert_eq!(overlay.first(key(0)..=key(5)), Err(need(2)));
        assert_eq!(overlay.last(key(0)..=key(5)), Err(need(3)));
    }
}
