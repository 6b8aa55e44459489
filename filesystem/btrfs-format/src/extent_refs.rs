//! The order of references to an extent, and the hash by which references from files are sorted.
//!
//! References follow the extent's item, by ascending type, and within a type by descending *sequence*: the hash for a
//! reference from a file, otherwise a number (that of a tree, or the address of a node). References for which there is
//! no room have their own items, whose keys end with the same number.

use std::cmp::Reverse;

use crate::checksum::raw_crc32c;
use crate::key::{ItemType, Key};

/// The sequence of a reference from the file `objectid` of the tree `root`; the extent would begin `offset` bytes into
/// the file.
///
/// The offset is that of the file extent in the file, minus its offset in the extent; it may be below zero, and wraps.
pub fn data_ref_hash(root: u64, objectid: u64, offset: u64) -> u64 {
    let high = raw_crc32c(!0, &root.to_le_bytes());
    let low = raw_crc32c(raw_crc32c(!0, &objectid.to_le_bytes()), &offset.to_le_bytes());
    u64::from(high) << 31 ^ u64::from(low)
}

/// The sort position of a reference among those after an extent's item.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct RefOrder {
    item_type: ItemType,
    sequence: Reverse<u64>,
}

impl RefOrder {
    /// The position of a reference of this type with this sequence.
    pub fn new(item_type: ItemType, sequence: u64) -> RefOrder {
        RefOrder { item_type, sequence: Reverse(sequence) }
    }
}

/// What refers to an extent, without the number of references.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum ExtentRef {
    /// A node: a tree refers to it.
    TreeBlock {
        /// The tree.
        root: u64,
    },
    /// A node: a parent refers to it, of whichever tree.
    SharedBlock {
        /// The address of the parent.
        parent: u64,
    },
    /// Data: a file refers to it.
    Data {
        /// The tree of the file.
        root: u64,
        /// The file.
        objectid: u64,
        /// The offset of the file extent in the file, minus its offset in the extent; wraps.
        offset: u64,
    },
    /// Data: a leaf refers to it, of whichever tree.
    SharedData {
        /// The address of the leaf.
        parent: u64,
    },
}

impl ExtentRef {
    /// True if a node is referred to. Such a reference exists once or not at all; one to data has a count.
    pub fn is_of_node(self) -> bool {
        matches!(self, ExtentRef::TreeBlock { .. } | ExtentRef::SharedBlock { .. })
    }

    /// The type of its item, and the number before it when it follows the extent's item.
    pub fn item_type(self) -> ItemType {
        match self {
            ExtentRef::TreeBlock { .. } => ItemType::TREE_BLOCK_REF,
            ExtentRef::SharedBlock { .. } => ItemType::SHARED_BLOCK_REF,
            ExtentRef::Data { .. } => ItemType::EXTENT_DATA_REF,
            ExtentRef::SharedData { .. } => ItemType::SHARED_DATA_REF,
        }
    }

    /// The number by which it is sorted among those of its type.
    pub fn sequence(self) -> u64 {
        match self {
            ExtentRef::TreeBlock { root } => root,
            ExtentRef::SharedBlock { parent } | ExtentRef::SharedData { parent } => parent,
            ExtentRef::Data { root, objectid, offset } => data_ref_hash(root, objectid, offset),
        }
    }

    /// Its position among those that follow the extent's item.
    pub fn order(self) -> RefOrder {
        RefOrder::new(self.item_type(), self.sequence())
    }

    /// The key of its own item. For a file, this is only the first key that it can have: if another file with the same
    /// hash has this key, the reference has the next one that is free.
    pub fn key(self, bytenr: u64) -> Key {
        Key::new(bytenr, self.item_type(), self.sequence())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_joins_a_crc_of_the_tree_with_one_of_file_and_offset() {
        let by_definition = |root: u64, objectid: u64, offset: u64| {
            let high = raw_crc32c(u32::MAX, &root.to_le_bytes());
            let low = raw_crc32c(u32::MAX, &[objectid.to_le_bytes(), offset.to_le_bytes()].concat());
            (u64::from(high) << 31) ^ u64::from(low)
        };
        for (root, objectid, offset) in [(5, 257, 0), (256, 300, 4096), (5, 257, 4096_u64.wrapping_neg())] {
            assert_eq!(data_ref_hash(root, objectid, offset), by_definition(root, objectid, offset));
        }
        assert!(data_ref_hash(5, 257, 0) < 1 << 63, "the high CRC is shifted by 31 bits");
        // The key under which Linux stored a reference from this file.
        assert_eq!(data_ref_hash(5, 0x33e, 0), 1_007_496_931_349_624_086);
    }

    #[test]
    fn types_rise_and_sequences_fall() {
        let order = [
            RefOrder::new(ItemType::TREE_BLOCK_REF, 300),
            RefOrder::new(ItemType::TREE_BLOCK_REF, 5),
            RefOrder::new(ItemType::EXTENT_DATA_REF, u64::MAX),
            RefOrder::new(ItemType::EXTENT_DATA_REF, 0),
            RefOrder::new(ItemType::SHARED_DATA_REF, 8192),
            RefOrder::new(ItemType::SHARED_DATA_REF, 4096),
        ];
        assert!(order.is_sorted_by(|a, b| a < b));
    }
}
