//! Delayed references: what a transaction adds to the references of extents and drops from them, until it is written to
//! the extent tree.
//!
//! References are delayed because writing them changes the extent tree, whose nodes are extents too. They are counted
//! for each extent in a *head*: for each kind of reference the number that was added less the number that was dropped.
//! What cancels is never written. [`Head::run`] writes the rest, after which the extent lives or is free.
//!
//! Invariants:
//! - Of one extent, references are added before others are dropped. In the other order its count would be 0 in between,
//!   and the extent and its checksums would go while the extent is in use.
//! - The own item of a reference is looked for before the references behind the extent's item, so no reference is in
//!   both places.
//! - An address has one head. If an extent is allocated and goes again in one transaction, a new extent may have its
//!   address only if the head of the old one is gone: [`DelayedRefs::cancel`]. Otherwise one head would have references
//!   of two extents, whose items have different keys.
//! - Nothing wraps. A count that is too small or too large is an error. It comes from damage, or from a fault here, and
//!   the transaction must not be committed.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use sealblock_btrfs_format::error::DecodeError;
use sealblock_btrfs_format::extent_refs::ExtentRef;
use sealblock_btrfs_format::items::extent::ExtentFlags;
use sealblock_btrfs_format::items::extent_buf::{
    ExtentItemBuf, ExtentRefError, KeyedPlace, KeyedRefs, RefChange, find_keyed, keyed_data,
};
use sealblock_btrfs_format::key::{ItemType, Key};

use crate::tree::TreeError;
use crate::view::Items;

/// Why references cannot be counted or written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RefsError {
    /// An item of the extent tree cannot be read.
    #[error(transparent)]
    Shape(#[from] DecodeError),
    /// The references of an extent are not as they must be.
    #[error("extent {bytenr}: {error}")]
    Extent {
        /// Its address.
        bytenr: u64,
        /// Why.
        error: ExtentRefError,
    },
    /// An extent is allocated at an address that has a head, or an item in the extent tree.
    #[error("extent {0} is there already")]
    Exists(u64),
    /// The extent tree has no item for an extent whose references change.
    #[error("extent {0} has no item")]
    Missing(u64),
    /// More references are counted than an item can have, or fewer than a new extent has.
    #[error("extent {bytenr}: {net} references {what:?}")]
    Count {
        /// The address of the extent.
        bytenr: u64,
        /// Which.
        what: ExtentRef,
        /// Added less dropped.
        net: i64,
    },
    /// The tree cannot be changed.
    #[error("the extent tree: {0}")]
    Tree(#[from] TreeError),
}

/// The items of the extent tree.
pub trait ExtentItems: Items {
    /// Inserts an item, or replaces its data.
    ///
    /// # Errors
    /// If the tree cannot be changed.
    fn put(&mut self, key: Key, data: Vec<u8>) -> Result<(), RefsError>;

    /// Deletes an item, which is there.
    ///
    /// # Errors
    /// If the tree cannot be changed.
    fn delete(&mut self, key: Key) -> Result<(), RefsError>;
}

/// Items in a map, for tests.
impl ExtentItems for BTreeMap<Key, Vec<u8>> {
    fn put(&mut self, key: Key, data: Vec<u8>) -> Result<(), RefsError> {
        self.insert(key, data);
        Ok(())
    }

    fn delete(&mut self, key: Key) -> Result<(), RefsError> {
        self.remove(&key).map(drop).ok_or(RefsError::Tree(TreeError::Missing(key)))
    }
}

/// How far behind the hash of a reference its own item is looked for when it is added, and first when it is dropped. An
/// extent may have very many references, and hardly ever two whose hashes are as near.
const NEAR: u64 = 1 << 10;

/// An extent that the transaction allocated.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NewExtent {
    /// The key of its item, with its address.
    pub key: Key,
    /// Its item, without references.
    pub item: ExtentItemBuf,
}

/// What becomes of an extent whose references were written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Fate {
    /// It has references, and an item with this key.
    Lives(Key),
    /// It has none: its item and its checksums go, and its space is free once the transaction is durable.
    Free {
        /// The key that its item has or would have had.
        key: Key,
        /// What it was.
        flags: ExtentFlags,
    },
}

/// All changes of the references of one extent.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Head {
    /// The item is still to be inserted.
    new: Option<NewExtent>,
    /// Flags that the item gets besides those that it has.
    set_flags: u64,
    /// Added less dropped; never 0.
    net: BTreeMap<ExtentRef, i64>,
}

/// The heads of a transaction, by the addresses of their extents.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct DelayedRefs {
    heads: BTreeMap<u64, Head>,
}

impl DelayedRefs {
    /// None.
    pub fn new() -> DelayedRefs {
        DelayedRefs::default()
    }

    /// An extent is allocated. Its first reference is to be added before it is written.
    ///
    /// # Errors
    /// If there are delayed references of its address: its space was not free.
    pub fn insert(&mut self, new: NewExtent) -> Result<(), RefsError> {
        match self.heads.entry(new.key.objectid) {
            Entry::Occupied(entry) => Err(RefsError::Exists(*entry.key())),
            Entry::Vacant(entry) => {
                entry.insert(Head { new: Some(new), ..Head::default() });
                Ok(())
            }
        }
    }

    /// References of one kind are added.
    ///
    /// # Errors
    /// If they are more than an item can count.
    pub fn add(&mut self, bytenr: u64, what: ExtentRef, count: u32) -> Result<(), RefsError> {
        self.change(bytenr, what, i64::from(count))
    }

    /// References of one kind are dropped.
    ///
    /// # Errors
    /// If they are more than an item can count, or than an extent has that the transaction allocated.
    pub fn drop(&mut self, bytenr: u64, what: ExtentRef, count: u32) -> Result<(), RefsError> {
        self.change(bytenr, what, -i64::from(count))
    }

    fn change(&mut self, bytenr: u64, what: ExtentRef, by: i64) -> Result<(), RefsError> {
        let head = self.heads.entry(bytenr).or_default();
        // Neither number has more than 33 bits.
        let net = head.net.get(&what).copied().unwrap_or(0) + by;
        let most = if what.is_of_node() { 1 } else { i64::from(u32::MAX) };
        let least = if head.new.is_some() { 0 } else { -most };
        match net {
            _ if !(least..=most).contains(&net) => {
                self.forget_empty(bytenr);
                return Err(RefsError::Count { bytenr, what, net });
            }
            0 => drop(head.net.remove(&what)),
            net => drop(head.net.insert(what, net)),
        }
        self.forget_empty(bytenr);
        Ok(())
    }

    /// A head of an old extent without changes is no head.
    fn forget_empty(&mut self, bytenr: u64) {
        if self.heads.get(&bytenr).is_some_and(|head| *head == Head::default()) {
            self.heads.remove(&bytenr);
        }
    }

    /// The item of an extent gets flags, such as FULL_BACKREF. They are never taken back.
    pub fn set_flags(&mut self, bytenr: u64, flags: ExtentFlags) {
        self.heads.entry(bytenr).or_default().set_flags |= flags.bits();
        self.forget_empty(bytenr);
    }

    /// The delayed references of an extent: the number that is to be added to its item's, to know how many it has now.
    pub fn net(&self, bytenr: u64) -> i64 {
        self.heads.get(&bytenr).map_or(0, |head| head.net.values().sum())
    }

    /// The delayed changes of an extent, if there are any.
    pub fn head(&self, bytenr: u64) -> Option<&Head> {
        self.heads.get(&bytenr)
    }

    /// The flags that an extent's item is to get, besides those that it has.
    pub fn flags(&self, bytenr: u64) -> ExtentFlags {
        let of_head = |head: &Head| {
            let new = head.new.as_ref().map_or(0, |new| new.item.flags.bits());
            ExtentFlags::from_bits_retain(head.set_flags | new)
        };
        self.heads.get(&bytenr).map_or(ExtentFlags::empty(), of_head)
    }

    /// Forgets an extent that the transaction allocated and that has no references left. Returns true if its head is
    /// gone: then nothing is left of it, and if nothing was written to it, its space is free at once. Otherwise the
    /// head is to be run, and the space stays in use until the transaction is durable.
    pub fn cancel(&mut self, bytenr: u64) -> bool {
        let is_whole = |head: &Head| head.new.is_some() && head.set_flags == 0 && head.net.is_empty();
        let cancels = self.heads.get(&bytenr).is_some_and(is_whole);
        if cancels {
            self.heads.remove(&bytenr);
        }
        cancels
    }

    /// The lowest address that has delayed references, from one on.
    pub fn next(&self, from: u64) -> Option<u64> {
        self.heads.range(from..).next().map(|(bytenr, _)| *bytenr)
    }

    /// Takes the head of an extent, to be run.
    pub fn take(&mut self, bytenr: u64) -> Option<Head> {
        self.heads.remove(&bytenr)
    }

    /// The number of extents with delayed references.
    pub fn len(&self) -> usize {
        self.heads.len()
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.heads.is_empty()
    }
}

/// Data extents that live and lost references which the last durable transaction has: after a power cut these are there
/// again. Until then whoever is left with such an extent must not write over it.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Released {
    open: BTreeSet<u64>,
    frozen: BTreeSet<u64>,
}

impl Released {
    /// The open transaction wrote that an extent has fewer references.
    pub fn insert(&mut self, bytenr: u64) {
        self.open.insert(bytenr);
    }

    /// True if an extent lost references, and that is not durable.
    pub fn contains(&self, bytenr: u64) -> bool {
        self.open.contains(&bytenr) || self.frozen.contains(&bytenr)
    }

    /// The open transaction is about to be written.
    pub fn freeze(&mut self) {
        self.frozen.append(&mut self.open);
    }

    /// It is durable.
    pub fn thaw(&mut self) {
        self.frozen.clear();
    }
}

impl Head {
    /// The extent, if the transaction allocated it and its item is not in the tree yet.
    pub fn new_extent(&self) -> Option<&NewExtent> {
        self.new.as_ref()
    }

    /// The item of the extent, without references, if the transaction allocated it and it is not in the tree yet.
    pub fn new_item(&self) -> Option<&ExtentItemBuf> {
        self.new.as_ref().map(|new| &new.item)
    }

    /// The references that change, each with the number that is added less the number that is dropped; never 0.
    pub fn refs(&self) -> impl Iterator<Item = (ExtentRef, i64)> {
        self.net.iter().map(|(what, net)| (*what, *net))
    }

    /// Writes the references to the extent tree.
    ///
    /// # Errors
    /// If the extent's items contradict the references. Some items may have changed: the transaction cannot be
    /// committed.
    pub fn run(self, bytenr: u64, tree: &mut impl ExtentItems, node_bytes: u32) -> Result<Fate, RefsError> {
        let old = old_item(bytenr, tree)?;
        let is_old = old.is_some();
        let (key, mut item) = match (old, self.new) {
            (Some(_), Some(_)) => return Err(RefsError::Exists(bytenr)),
            (None, None) => return Err(RefsError::Missing(bytenr)),
            (Some(old), None) => old,
            (None, Some(new)) => (new.key, new.item),
        };
        item.flags |= ExtentFlags::from_bits_retain(self.set_flags);
        let (added, dropped): (Vec<_>, Vec<_>) = self.net.into_iter().partition(|(_, net)| *net > 0);
        for (what, net) in added.into_iter().chain(dropped) {
            let count = u32::try_from(net.unsigned_abs()).map_err(|_| RefsError::Count { bytenr, what, net })?;
            change_one(bytenr, &mut item, (what, count, net > 0), tree, node_bytes)?;
        }
        if item.refs() > 0 {
            tree.put(key, item.encode())?;
            return Ok(Fate::Lives(key));
        }
        if is_old {
            tree.delete(key)?;
        }
        Ok(Fate::Free { key, flags: item.flags })
    }
}

/// The item of an extent, under either type.
fn old_item(bytenr: u64, tree: &impl Items) -> Result<Option<(Key, ExtentItemBuf)>, RefsError> {
    let first = Key::new(bytenr, ItemType::EXTENT_ITEM, 0);
    let last = Key::new(bytenr, ItemType::METADATA_ITEM, u64::MAX);
    let Some((key, data)) = tree.first(first..=last)? else { return Ok(None) };
    let item = ExtentItemBuf::decode(key.item_type, data).map_err(|error| RefsError::Extent { bytenr, error })?;
    Ok(Some((key, item)))
}

/// Adds or drops references of one kind, in the item or in the tree.
fn change_one(
    bytenr: u64,
    item: &mut ExtentItemBuf,
    (what, count, is_add): (ExtentRef, u32, bool),
    tree: &mut impl ExtentItems,
    node_bytes: u32,
) -> Result<(), RefsError> {
    // The owner has a type that is no reference's.
    let first = Key::new(bytenr, ItemType::TREE_BLOCK_REF, 0);
    let last = Key::new(bytenr, ItemType::SHARED_DATA_REF, u64::MAX);
    let any = tree.first(first..=last)?.is_some();
    let own = what.key(bytenr);
    let near = Key { offset: own.offset.saturating_add(NEAR), ..own };
    let mut place = match any {
        true => find_own_item(bytenr, what, tree, near)?,
        false => KeyedPlace::Free(own),
    };
    // One that is there and is not near is far behind its hash.
    if any && !is_add && matches!(place, KeyedPlace::Free(_)) && item.inline_count(what).is_none() {
        place = find_own_item(bytenr, what, tree, last)?;
    }
    let (key, found) = match place {
        KeyedPlace::Found(key, count) => (key, Some(count)),
        KeyedPlace::Free(key) => (key, None),
    };
    let change = match is_add {
        true => item.add(what, count, KeyedRefs { found, any }, node_bytes),
        false => item.drop(what, count, found),
    };
    match change.map_err(|error| RefsError::Extent { bytenr, error })? {
        RefChange::Inline => Ok(()),
        RefChange::Keyed(0) => tree.delete(key),
        RefChange::Keyed(count) => tree.put(key, keyed_data(what, count)),
    }
}

/// The own item of a reference of an extent, whose last reference has a key of at most `last`.
fn find_own_item(bytenr: u64, what: ExtentRef, tree: &impl Items, last: Key) -> Result<KeyedPlace, RefsError> {
    let (mut next, mut error) = (Some(what.key(bytenr)), None);
    let items = std::iter::from_fn(|| {
        let found = tree.first(next?..=last);
        let item = found.unwrap_or_else(|one| {
            error = Some(one);
            None
        });
        next = item.and_then(|(key, _)| key.next());
        item
    });
    let place = find_keyed(what, bytenr, items)?;
    error.map_or(Ok(place), |error| Err(error.into()))
}

#[cfg(test)]
mod tests;
