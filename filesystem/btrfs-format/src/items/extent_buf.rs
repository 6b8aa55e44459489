//! An extent's item that can be changed: references are added and dropped, and counted.
//!
//! The item counts all references of the extent, and has as many of them as it has room for behind it. The others have
//! items of their own, with keys. The rules:
//! - A reference is in one place: behind the item, or in an item of its own. Whoever changes it looks for its own item
//!   first.
//! - A new reference goes behind the item if no reference of the extent has an item of its own, and the extent's item
//!   stays below a sixteenth of a leaf. Otherwise it gets its own.
//! - References of nodes exist once; those of data have a count, of at least 1.
//! - The item's count is the sum of all. When it falls to 0, nothing is left, and the extent is free.
//!
//! A count that would fall below 0 or rise above its field is an error and never wraps: such a count comes from damage,
//! and with it an extent would be freed that is in use.

use zerocopy::IntoBytes;

use super::entries::Entry;
use super::extent::{ExtentDataRef, ExtentFlags, ExtentHead, ExtentItem, InlineRef, SharedDataRef, TreeBlockInfo};
use crate::error::{DecodeError, whole};
use crate::extent_refs::ExtentRef;
use crate::key::{DiskKey, ItemType, Key};
use crate::node::{ITEM_HEAD_BYTES, leaf_capacity};

/// Why references of an extent cannot be changed. The item is then unchanged.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ExtentRefError {
    /// It is not an extent's item.
    #[error(transparent)]
    Shape(#[from] DecodeError),
    /// References behind the item are not sorted, or one is there twice.
    #[error("the references behind the extent are not in their order")]
    Order,
    /// The counts behind the item are more than the item's, or there is one of 0.
    #[error("the references of the extent are {total}, and those behind it {inline}")]
    Sum {
        /// The item's count.
        total: u64,
        /// The sum of those behind it.
        inline: u64,
    },
    /// More are dropped than there are.
    #[error("{drop} references {what:?} are dropped, and {count} are there")]
    Underflow {
        /// Which.
        what: ExtentRef,
        /// How many there are.
        count: u64,
        /// How many are dropped.
        drop: u64,
    },
    /// More are added than can be counted, or a node is referred to twice by the same tree or parent.
    #[error("{add} references {what:?} are added to {count}, which is more than there can be")]
    Overflow {
        /// Which.
        what: ExtentRef,
        /// How many there are.
        count: u64,
        /// How many are added.
        add: u64,
    },
}

/// What is known about the references of an extent that have items of their own.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct KeyedRefs {
    /// The count of the reference that is changed, if it has its own item.
    pub found: Option<u32>,
    /// True if any reference of the extent has its own item.
    pub any: bool,
}

/// What to do besides writing the extent's item.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RefChange {
    /// Nothing: the reference is behind the item.
    Inline,
    /// The item of the reference gets this count, and is inserted if there was none. With 0 it is deleted.
    Keyed(u32),
}

/// An extent's item, owned. Its references are always sorted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExtentItemBuf {
    refs: u64,
    /// The transaction that allocated it.
    pub generation: u64,
    /// What it is; unknown flags are kept.
    pub flags: ExtentFlags,
    /// The first key and the level of a node, without SKINNY_METADATA.
    pub tree_block: Option<TreeBlockInfo>,
    /// The tree that made it, with simple quotas.
    owner: Option<u64>,
    /// Those behind the item, with their counts.
    inline: Vec<(ExtentRef, u32)>,
}

impl ExtentItemBuf {
    /// An extent without references. It gets its first one before it is written.
    pub fn new(generation: u64, flags: ExtentFlags, tree_block: Option<TreeBlockInfo>) -> ExtentItemBuf {
        ExtentItemBuf { refs: 0, generation, flags, tree_block, owner: None, inline: Vec::new() }
    }

    /// Reads the item of a key of this type.
    ///
    /// # Errors
    /// If it has another form, or its references are not sorted or not counted right.
    pub fn decode(item_type: ItemType, bytes: &[u8]) -> Result<ExtentItemBuf, ExtentRefError> {
        let item = ExtentItem::decode(item_type, bytes)?;
        let (generation, tree_block) = (item.head.generation.get(), item.tree_block.copied());
        let mut extent = ExtentItemBuf::new(generation, item.head.flags(), tree_block);
        extent.refs = item.head.refs.get();
        let mut sum = 0_u64;
        for (index, one) in item.refs().enumerate() {
            let Some(reference) = one.reference() else {
                // The owner has the lowest type, so it is the first.
                if let (0, InlineRef::Owner(owner)) = (index, one) {
                    extent.owner = Some(owner);
                    continue;
                }
                return Err(ExtentRefError::Order);
            };
            let is_sorted = extent.inline.last().is_none_or(|(before, _)| before.order() <= reference.order());
            if !is_sorted || extent.find(reference).is_some() {
                return Err(ExtentRefError::Order);
            }
            sum += u64::from(one.count());
            if one.count() == 0 || sum > extent.refs {
                return Err(ExtentRefError::Sum { total: extent.refs, inline: sum });
            }
            extent.inline.push((reference, one.count()));
        }
        Ok(extent)
    }

    /// Its bytes.
    pub fn encode(&self) -> Vec<u8> {
        let head =
            ExtentHead { refs: self.refs.into(), generation: self.generation.into(), flags: self.flags.bits().into() };
        let mut out = head.as_bytes().to_vec();
        out.extend_from_slice(self.tree_block.as_ref().map_or(&[], |info| info.as_bytes()));
        let mut write = |one: InlineRef| one.write(&mut out).expect("an inline reference has no length field");
        self.owner.into_iter().for_each(|owner| write(InlineRef::Owner(owner)));
        for (reference, count) in &self.inline {
            match *reference {
                ExtentRef::TreeBlock { root } => write(InlineRef::TreeBlock(root)),
                ExtentRef::SharedBlock { parent } => write(InlineRef::SharedBlock(parent)),
                ExtentRef::SharedData { parent } => {
                    write(InlineRef::SharedData(parent, &SharedDataRef { count: (*count).into() }));
                }
                ExtentRef::Data { root, objectid, offset } => {
                    write(InlineRef::Data(&data_ref(root, objectid, offset, *count)));
                }
            }
        }
        out
    }

    /// The number of all references.
    pub fn refs(&self) -> u64 {
        self.refs
    }

    /// The references behind the item, with their counts.
    pub fn inline(&self) -> &[(ExtentRef, u32)] {
        &self.inline
    }

    /// The count of a reference behind the item.
    pub fn inline_count(&self, what: ExtentRef) -> Option<u32> {
        self.find(what).map(|index| self.inline[index].1)
    }

    /// Its bytes when written.
    pub fn encoded_bytes(&self) -> usize {
        let fixed = size_of::<ExtentHead>() + self.tree_block.map_or(0, |_| size_of::<TreeBlockInfo>());
        let refs: usize = self.inline.iter().map(|(reference, _)| inline_bytes(*reference)).sum();
        fixed + self.owner.map_or(0, |_| OWNER_BYTES) + refs
    }

    /// Adds references of one kind.
    ///
    /// # Errors
    /// If there would be more than can be counted, or a second one of a kind that exists once.
    pub fn add(
        &mut self,
        what: ExtentRef,
        count: u32,
        keyed: KeyedRefs,
        node_bytes: u32,
    ) -> Result<RefChange, ExtentRefError> {
        let here = self.find(what);
        let old = keyed.found.or(here.map(|index| self.inline[index].1));
        let before = old.unwrap_or(0);
        let overflow = ExtentRefError::Overflow { what, count: u64::from(before), add: u64::from(count) };
        let is_again = what.is_of_node() && before.saturating_add(count) > 1;
        let after = before.checked_add(count).filter(|after| *after > before && !is_again).ok_or(overflow)?;
        let refs = self.refs.checked_add(u64::from(count)).ok_or(overflow)?;
        let size = self.encoded_bytes() + inline_bytes(what);
        let change = match (keyed.found, here) {
            (Some(_), Some(_)) => return Err(ExtentRefError::Order),
            (Some(_), None) => RefChange::Keyed(after),
            (None, Some(index)) => {
                self.inline[index].1 = after;
                RefChange::Inline
            }
            (None, None) if keyed.any || size >= inline_limit(node_bytes) => RefChange::Keyed(after),
            (None, None) => {
                let behind = self.inline.partition_point(|(other, _)| other.order() <= what.order());
                self.inline.insert(behind, (what, after));
                RefChange::Inline
            }
        };
        self.refs = refs;
        Ok(change)
    }

    /// Drops references of one kind. If [`ExtentItemBuf::refs`] is 0 afterwards, the extent is free, and its item is to
    /// be deleted. `found` is the count of the reference if it has its own item.
    ///
    /// # Errors
    /// If there are not as many, or references would be left of an extent that has none.
    pub fn drop(&mut self, what: ExtentRef, count: u32, found: Option<u32>) -> Result<RefChange, ExtentRefError> {
        let here = self.find(what);
        let before = match (found, here) {
            (Some(_), Some(_)) => return Err(ExtentRefError::Order),
            (found, here) => found.or(here.map(|index| self.inline[index].1)).unwrap_or(0),
        };
        let underflow = ExtentRefError::Underflow { what, count: u64::from(before), drop: u64::from(count) };
        let after = before.checked_sub(count).filter(|_| count > 0).ok_or(underflow)?;
        let refs = self.refs.checked_sub(u64::from(count)).ok_or(underflow)?;
        let inline: u64 = self.inline.iter().map(|(_, count)| u64::from(*count)).sum();
        let inline = inline - here.map_or(0, |_| u64::from(count));
        if inline > refs || (refs == 0 && after > 0) {
            return Err(ExtentRefError::Sum { total: refs, inline });
        }
        self.refs = refs;
        let Some(index) = here else { return Ok(RefChange::Keyed(after)) };
        match after {
            0 => drop(self.inline.remove(index)),
            after => self.inline[index].1 = after,
        }
        Ok(RefChange::Inline)
    }

    fn find(&self, what: ExtentRef) -> Option<usize> {
        self.inline.iter().position(|(reference, _)| *reference == what)
    }
}

const OWNER_BYTES: usize = 9;

/// Bytes of a reference behind an extent's item.
pub fn inline_bytes(what: ExtentRef) -> usize {
    match what {
        ExtentRef::TreeBlock { .. } | ExtentRef::SharedBlock { .. } => 9,
        ExtentRef::Data { .. } => 1 + size_of::<ExtentDataRef>(),
        ExtentRef::SharedData { .. } => 9 + size_of::<SharedDataRef>(),
    }
}

/// The size from which on an extent's item gets no more references behind it.
pub fn inline_limit(node_bytes: u32) -> usize {
    (leaf_capacity(node_bytes) / 16).saturating_sub(ITEM_HEAD_BYTES)
}

/// The data of the own item of a reference.
pub fn keyed_data(what: ExtentRef, count: u32) -> Vec<u8> {
    match what {
        ExtentRef::TreeBlock { .. } | ExtentRef::SharedBlock { .. } => Vec::new(),
        ExtentRef::SharedData { .. } => SharedDataRef { count: count.into() }.as_bytes().to_vec(),
        ExtentRef::Data { root, objectid, offset } => data_ref(root, objectid, offset, count).as_bytes().to_vec(),
    }
}

/// The reference and the count of an item of its own; `None` for an item of another type.
///
/// # Errors
/// If it does not have the form of its type.
pub fn decode_keyed(key: Key, bytes: &[u8]) -> Result<Option<(ExtentRef, u32)>, DecodeError> {
    let parent = key.offset;
    Ok(match key.item_type {
        ItemType::TREE_BLOCK_REF => Some((ExtentRef::TreeBlock { root: key.offset }, 1)),
        ItemType::SHARED_BLOCK_REF => Some((ExtentRef::SharedBlock { parent }, 1)),
        ItemType::SHARED_DATA_REF => {
            let shared = whole::<SharedDataRef>("reference of a leaf", bytes)?;
            Some((ExtentRef::SharedData { parent }, shared.count.get()))
        }
        ItemType::EXTENT_DATA_REF => {
            let data = whole::<ExtentDataRef>("reference of a file", bytes)?;
            Some((data.reference(), data.count.get()))
        }
        _ => None,
    })
}

/// Where the own item of a reference is, or would be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KeyedPlace {
    /// It has this key and this count.
    Found(Key, u32),
    /// There is none; a new one gets this key.
    Free(Key),
}

/// Looks for the own item of a reference among the items from [`ExtentRef::key`] on.
///
/// Files with the same hash have successive keys, and when one of them goes, a gap is left. So the item may be behind a
/// gap, and this looks at all references of files that `items` still gives. An extent has many of them, and equal
/// hashes are rare: a caller that adds a reference may stop soon after the hash. Linux, too, then gives a reference a
/// second item if its first one is behind a gap.
///
/// # Errors
/// If an item of the extent does not have the form of its type, or no key is left.
pub fn find_keyed<'a>(
    what: ExtentRef,
    bytenr: u64,
    items: impl IntoIterator<Item = (Key, &'a [u8])>,
) -> Result<KeyedPlace, DecodeError> {
    let mut free = what.key(bytenr);
    for (key, bytes) in items {
        let is_other = (key.objectid, key.item_type) != (bytenr, what.item_type());
        if is_other || (key != free && !matches!(what, ExtentRef::Data { .. })) {
            break;
        }
        match decode_keyed(key, bytes)? {
            Some((found, count)) if found == what => return Ok(KeyedPlace::Found(key, count)),
            _ if key == free => {
                let full = DecodeError::Layout { what: "reference of a file", field: "hash", value: key.offset };
                free.offset = free.offset.checked_add(1).ok_or(full)?;
            }
            _ => {}
        }
    }
    Ok(KeyedPlace::Free(free))
}

fn data_ref(root: u64, objectid: u64, offset: u64, count: u32) -> ExtentDataRef {
    ExtentDataRef { root: root.into(), objectid: objectid.into(), offset: offset.into(), count: count.into() }
}

impl TreeBlockInfo {
    /// What the item of a node says about it.
    pub fn new(first_key: Key, level: u8) -> TreeBlockInfo {
        TreeBlockInfo { key: DiskKey::from(first_key), level }
    }
}

#[cfg(test)]
mod tests;
