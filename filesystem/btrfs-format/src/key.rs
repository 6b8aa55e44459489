//! Keys: object, type of item, offset. Every tree is sorted by them, in this order.
//!
//! A [`Key`] is a value that sorts; a [`DiskKey`] is its stored form of 17 bytes. The type decides the meaning of the
//! offset. Unknown types and objects are kept unchanged.

use std::fmt;

use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Numbers of trees and of other objects that are the same in every filesystem.
pub mod objectid {
    /// The root tree, which has the roots of all other trees.
    pub const ROOT_TREE: u64 = 1;
    /// The extent tree.
    pub const EXTENT_TREE: u64 = 2;
    /// The chunk tree, which also has the devices.
    pub const CHUNK_TREE: u64 = 3;
    /// The device tree, which has the device extents.
    pub const DEV_TREE: u64 = 4;
    /// The first subvolume.
    pub const FS_TREE: u64 = 5;
    /// The directory of the root tree, which names the default subvolume.
    pub const ROOT_TREE_DIR: u64 = 6;
    /// The checksum tree.
    pub const CSUM_TREE: u64 = 7;
    /// The quota tree.
    pub const QUOTA_TREE: u64 = 8;
    /// The UUID tree, which finds subvolumes by UUID.
    pub const UUID_TREE: u64 = 9;
    /// The free space tree.
    pub const FREE_SPACE_TREE: u64 = 10;
    /// The block group tree, if block groups are not in the extent tree.
    pub const BLOCK_GROUP_TREE: u64 = 11;
    /// The tree of stripes of zoned devices.
    pub const RAID_STRIPE_TREE: u64 = 12;
    /// Statistics of devices.
    pub const DEV_STATS: u64 = 0;
    /// All devices, in the chunk tree.
    pub const DEV_ITEMS: u64 = 1;
    /// The state of a balance.
    pub const BALANCE: u64 = -4_i64 as u64;
    /// Inodes that are to be deleted.
    pub const ORPHAN: u64 = -5_i64 as u64;
    /// Trees of the log.
    pub const TREE_LOG: u64 = -6_i64 as u64;
    /// Names that the replay of the log must repair.
    pub const TREE_LOG_FIXUP: u64 = -7_i64 as u64;
    /// Trees of a relocation.
    pub const TREE_RELOC: u64 = -8_i64 as u64;
    /// The tree of data that are being relocated.
    pub const DATA_RELOC_TREE: u64 = -9_i64 as u64;
    /// All checksums.
    pub const EXTENT_CSUM: u64 = -10_i64 as u64;
    /// The space cache of version 1.
    pub const FREE_SPACE: u64 = -11_i64 as u64;
    /// The cache of free inode numbers.
    pub const FREE_INO: u64 = -12_i64 as u64;
    /// The first number for inodes, subvolumes, and all chunks.
    pub const FIRST_FREE: u64 = 256;
    /// The last such number.
    pub const LAST_FREE: u64 = -256_i64 as u64;
    /// All chunks, in the chunk tree.
    pub const FIRST_CHUNK_TREE: u64 = 256;

    /// True for a tree of files: the first subvolume, or a later one.
    ///
    /// The high 16 bits are the level of a quota group, which a subvolume does not have.
    pub fn is_subvolume(id: u64) -> bool {
        id == FS_TREE || (FIRST_FREE..1 << 48).contains(&id)
    }
}

/// What an item is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ItemType(pub u8);

/// Writes each constant and its name once.
macro_rules! item_types {
    ($($(#[$doc:meta])* $name:ident = $value:literal;)*) => {
        #[allow(missing_docs, reason = "the names are those of the format, and the items say what they are")]
        impl ItemType {
            $($(#[$doc])* pub const $name: ItemType = ItemType($value);)*

            /// The name of the type in the format, if it has one.
            pub fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($value => Some(stringify!($name)),)*
                    _ => None,
                }
            }
        }
    };
}

item_types! {
    /// Used without a type: the header of a space cache of version 1.
    UNTYPED = 0;
    INODE_ITEM = 1;
    INODE_REF = 12;
    INODE_EXTREF = 13;
    XATTR_ITEM = 24;
    VERITY_DESC_ITEM = 36;
    VERITY_MERKLE_ITEM = 37;
    ORPHAN_ITEM = 48;
    DIR_LOG_ITEM = 60;
    DIR_LOG_INDEX = 72;
    DIR_ITEM = 84;
    DIR_INDEX = 96;
    EXTENT_DATA = 108;
    EXTENT_CSUM = 128;
    ROOT_ITEM = 132;
    ROOT_BACKREF = 144;
    ROOT_REF = 156;
    EXTENT_ITEM = 168;
    METADATA_ITEM = 169;
    EXTENT_OWNER_REF = 172;
    TREE_BLOCK_REF = 176;
    EXTENT_DATA_REF = 178;
    SHARED_BLOCK_REF = 182;
    SHARED_DATA_REF = 184;
    BLOCK_GROUP_ITEM = 192;
    FREE_SPACE_INFO = 198;
    FREE_SPACE_EXTENT = 199;
    FREE_SPACE_BITMAP = 200;
    DEV_EXTENT = 204;
    DEV_ITEM = 216;
    CHUNK_ITEM = 228;
    RAID_STRIPE = 230;
    QGROUP_STATUS = 240;
    QGROUP_INFO = 242;
    QGROUP_LIMIT = 244;
    QGROUP_RELATION = 246;
    /// A balance, under its own object number.
    TEMPORARY_ITEM = 248;
    /// Statistics of a device, under their own object number.
    PERSISTENT_ITEM = 249;
    DEV_REPLACE = 250;
    UUID_SUBVOL = 251;
    UUID_RECEIVED_SUBVOL = 252;
    STRING_ITEM = 253;
}

impl fmt::Display for ItemType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "type {}", self.0),
        }
    }
}

impl fmt::Debug for ItemType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A key, as a value that sorts as trees do.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Key {
    /// The object: an inode, a tree, an address.
    pub objectid: u64,
    /// What the item is.
    pub item_type: ItemType,
    /// Its meaning depends on the type.
    pub offset: u64,
}

impl Key {
    /// The lowest possible key.
    pub const MIN: Key = Key::new(0, ItemType(0), 0);
    /// The highest possible key.
    pub const MAX: Key = Key::new(u64::MAX, ItemType(u8::MAX), u64::MAX);

    /// A key of these parts.
    pub const fn new(objectid: u64, item_type: ItemType, offset: u64) -> Key {
        Key { objectid, item_type, offset }
    }

    /// The next key, if this is not the last one.
    pub fn next(self) -> Option<Key> {
        let carry = |objectid, item_type| Key { objectid, item_type, offset: 0 };
        match (self.offset.checked_add(1), self.item_type.0.checked_add(1)) {
            (Some(offset), _) => Some(Key { offset, ..self }),
            (None, Some(item_type)) => Some(carry(self.objectid, ItemType(item_type))),
            (None, None) => Some(carry(self.objectid.checked_add(1)?, ItemType(0))),
        }
    }

    /// The key before it, if this is not the lowest one.
    pub fn previous(self) -> Option<Key> {
        let borrow = |objectid, item_type| Key { objectid, item_type, offset: u64::MAX };
        match (self.offset.checked_sub(1), self.item_type.0.checked_sub(1)) {
            (Some(offset), _) => Some(Key { offset, ..self }),
            (None, Some(item_type)) => Some(borrow(self.objectid, ItemType(item_type))),
            (None, None) => Some(borrow(self.objectid.checked_sub(1)?, ItemType(u8::MAX))),
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let signed = |f: &mut fmt::Formatter<'_>, value: u64| match value as i64 {
            negative @ -255..0 => write!(f, "{negative}"),
            _ => write!(f, "{value}"),
        };
        f.write_str("(")?;
        signed(f, self.objectid)?;
        write!(f, " {} ", self.item_type)?;
        signed(f, self.offset)?;
        f.write_str(")")
    }
}

/// A key as it is stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DiskKey {
    objectid: U64,
    item_type: u8,
    offset: U64,
}

impl DiskKey {
    /// The value.
    pub fn get(self) -> Key {
        Key::new(self.objectid.get(), ItemType(self.item_type), self.offset.get())
    }
}

impl From<Key> for DiskKey {
    fn from(key: Key) -> DiskKey {
        DiskKey { objectid: key.objectid.into(), item_type: key.item_type.0, offset: key.offset.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_sort_by_object_then_type_then_offset_and_each_has_neighbours() {
        let keys = [
            Key::MIN,
            Key::new(0, ItemType(0), 1),
            Key::new(0, ItemType(1), 0),
            Key::new(1, ItemType(0), 0),
            Key::new(1, ItemType::INODE_ITEM, u64::MAX),
            Key::new(1, ItemType(2), 0),
            Key::MAX,
        ];
        assert!(keys.is_sorted_by(|a, b| a < b));
        assert_eq!(keys[4].next(), Some(keys[5]));
        assert_eq!(Key::new(1, ItemType(255), u64::MAX).next(), Some(Key::new(2, ItemType(0), 0)));
        assert_eq!((Key::MAX.next(), Key::MIN.previous()), (None, None));
        for key in keys {
            assert!(key.next().is_none_or(|next| next.previous() == Some(key)), "{key}");
        }
    }

    #[test]
    fn a_key_is_seventeen_bytes_and_little_endian() {
        let key = Key::new(0x0102, ItemType::DIR_ITEM, 0x0304);
        let disk = DiskKey::from(key);
        assert_eq!(disk.as_bytes(), [2, 1, 0, 0, 0, 0, 0, 0, 84, 4, 3, 0, 0, 0, 0, 0, 0]);
        assert_eq!(disk.get(), key);
    }

    #[test]
    fn keys_print_with_names_and_small_negative_numbers() {
        assert_eq!(Key::new(objectid::ORPHAN, ItemType::ORPHAN_ITEM, 257).to_string(), "(-5 ORPHAN_ITEM 257)");
        assert_eq!(Key::new(5, ItemType(7), u64::MAX).to_string(), "(5 type 7 -1)");
    }

    #[test]
    fn subvolumes_are_told_from_other_trees_and_from_quota_groups() {
        for id in [objectid::FS_TREE, 256, (1 << 48) - 1] {
            assert!(objectid::is_subvolume(id), "{id}");
        }
        for id in [0, 1, 4, 6, 255, 1 << 48, objectid::DATA_RELOC_TREE] {
            assert!(!objectid::is_subvolume(id), "{id}");
        }
    }
}
