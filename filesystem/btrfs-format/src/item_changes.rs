//! The changes of items that an operation makes in a tree, one for each key.
//!
//! Later changes of an item join earlier ones, so an item that an operation inserts and deletes again is not in the
//! list, and whoever applies the list touches each item once.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::RangeInclusive;

use crate::key::Key;

/// What happens to an item.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ItemChange {
    /// It is new, with these data.
    Insert(Vec<u8>),
    /// It has these data now.
    Replace(Vec<u8>),
    /// It goes.
    Delete,
}

/// Changes by key, in the order of the tree.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct ItemChanges(BTreeMap<Key, ItemChange>);

impl ItemChanges {
    /// None.
    pub fn new() -> ItemChanges {
        ItemChanges::default()
    }

    /// An item that was not there is inserted.
    pub fn insert(&mut self, key: Key, data: Vec<u8>) {
        match self.0.entry(key) {
            Entry::Vacant(entry) => drop(entry.insert(ItemChange::Insert(data))),
            // It was deleted. Without data, it is the item that was there.
            Entry::Occupied(entry) if data.is_empty() => drop(entry.remove()),
            Entry::Occupied(mut entry) => drop(entry.insert(ItemChange::Replace(data))),
        }
    }

    /// An item that was there has other data.
    pub fn replace(&mut self, key: Key, data: Vec<u8>) {
        let change = match self.0.get(&key) {
            Some(ItemChange::Insert(_)) => ItemChange::Insert(data),
            _ => ItemChange::Replace(data),
        };
        self.0.insert(key, change);
    }

    /// An item that was there goes.
    pub fn delete(&mut self, key: Key) {
        match self.0.entry(key) {
            Entry::Occupied(entry) if matches!(entry.get(), ItemChange::Insert(_)) => drop(entry.remove()),
            Entry::Occupied(mut entry) => drop(entry.insert(ItemChange::Delete)),
            Entry::Vacant(entry) => drop(entry.insert(ItemChange::Delete)),
        }
    }

    /// What happens to an item, if anything does.
    pub fn get(&self, key: Key) -> Option<&ItemChange> {
        self.0.get(&key)
    }

    /// The changes of a range of keys, by rising keys.
    pub fn range(&self, range: RangeInclusive<Key>) -> impl DoubleEndedIterator<Item = (Key, &ItemChange)> {
        // A map refuses a range that ends before it begins.
        let range = (!range.is_empty()).then_some(range);
        range.into_iter().flat_map(|range| self.0.range(range)).map(|(key, change)| (*key, change))
    }

    /// The changes, by rising keys.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (Key, &ItemChange)> {
        self.0.iter().map(|(key, change)| (*key, change))
    }

    /// The number of changes.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// True if there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl IntoIterator for ItemChanges {
    type Item = (Key, ItemChange);
    type IntoIter = std::collections::btree_map::IntoIter<Key, ItemChange>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::ItemType;

    #[test]
    fn changes_of_one_item_join() {
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..2000 {
            let key = |number| Key::new(number, ItemType::FREE_SPACE_BITMAP, 0);
            let before: BTreeMap<Key, Vec<u8>> = (0..4).map(|number| (key(number), vec![number as u8])).collect();
            let (mut now, mut changes) = (before.clone(), ItemChanges::new());
            for _ in 0..random.usize(..12) {
                let (key, data) = (key(random.u64(..8)), vec![random.u8(1..)]);
                match (now.contains_key(&key), random.bool()) {
                    (true, true) => changes.replace(key, data.clone()),
                    (true, false) => {
                        changes.delete(key);
                        now.remove(&key);
                        continue;
                    }
                    (false, _) => changes.insert(key, data.clone()),
                }
                now.insert(key, data);
            }
            let mut after = before;
            assert_eq!((changes.iter().count(), changes.is_empty()), (changes.len(), changes.iter().next().is_none()));
            for (key, change) in changes {
                let old = match change {
                    ItemChange::Insert(data) => after.insert(key, data).xor(Some(Vec::new())),
                    ItemChange::Replace(data) => after.insert(key, data),
                    ItemChange::Delete => after.remove(&key),
                };
                assert!(old.is_some(), "only what is there is replaced or deleted, and only what is not is inserted");
            }
            assert_eq!(after, now);
        }
    }

    #[test]
    fn changes_are_found_by_key_and_by_range() {
        let key = |number| Key::new(number, ItemType::FREE_SPACE_BITMAP, 0);
        let mut changes = ItemChanges::new();
        changes.insert(key(1), vec![1]);
        changes.delete(key(2));
        changes.replace(key(4), vec![4]);
        assert_eq!(changes.get(key(2)), Some(&ItemChange::Delete));
        assert_eq!(changes.get(key(3)), None);
        let keys = |range| changes.range(range).map(|(key, _)| key.objectid).collect::<Vec<_>>();
        assert_eq!(keys(key(1)..=key(4)), [1, 2, 4]);
        assert_eq!(keys(key(2)..=key(3)), [2]);
        assert!(keys(key(4)..=key(1)).is_empty(), "a range that ends before it begins");
        assert_eq!(changes.range(key(0)..=key(9)).next_back().unwrap().0, key(4));
    }

    #[test]
    fn an_item_without_data_that_comes_back_is_no_change() {
        let (key, mut changes) = (Key::new(1, ItemType::FREE_SPACE_EXTENT, 4096), ItemChanges::new());
        changes.delete(key);
        assert_eq!(changes.iter().next(), Some((key, &ItemChange::Delete)));
        assert_eq!((changes.get(key), changes.get(Key::MIN)), (Some(&ItemChange::Delete), None));
        let count = |from, to| changes.range(from..=to).count();
        assert_eq!((count(Key::MIN, key), count(key, Key::MAX), count(Key::MIN, Key::MIN)), (1, 1, 0));
        assert_eq!(count(Key::MAX, Key::MIN), 0);
        changes.insert(key, Vec::new());
        changes.insert(key.next().unwrap(), Vec::new());
        changes.delete(key.next().unwrap());
        assert_eq!(changes, ItemChanges::new());
    }
}
