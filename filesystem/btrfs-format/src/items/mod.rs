//! Items: the data of each key type. Each file has the items of one area.
//!
//! [`Item::decode`] borrows from the leaf and checks only the shape. Encoding gives the same bytes again: reserved
//! bytes and unknown flags are kept, and an item of an unknown type is kept as bytes.

pub mod chunk;
pub mod device;
pub mod directory;
pub mod entries;
pub mod extent;
pub mod extent_buf;
pub mod file_extent;
pub mod inode;
pub mod root;

use zerocopy::little_endian::U64;
use zerocopy::{Immutable, IntoBytes};

use self::chunk::{BlockGroupItem, Chunk, FreeSpaceInfo};
use self::device::{
    BalanceItem, DevExtent, DevItem, DevReplaceItem, FreeSpaceHeader, QgroupInfo, QgroupLimit, QgroupStatus,
};
use self::directory::DirEntry;
use self::entries::Entries;
use self::extent::{ExtentDataRef, ExtentItem, SharedDataRef};
use self::file_extent::FileExtent;
use self::inode::{DirLogItem, InodeExtref, InodeItem, InodeRef, VerityDescriptor};
use self::root::{RootItem, RootRef};
use crate::error::{DecodeError, TooLong, parts, whole};
use crate::key::{ItemType, Key, objectid};

/// The data of an item.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Item<'a> {
    /// An inode.
    Inode(&'a InodeItem),
    /// Names of an inode in one directory.
    InodeRefs(Entries<'a, InodeRef<'a>>),
    /// Names of an inode whose hash is the key's.
    InodeExtrefs(Entries<'a, InodeExtref<'a>>),
    /// Attributes whose names have the same hash.
    Xattrs(Entries<'a, DirEntry<'a>>),
    /// Entries of a directory whose names have the same hash.
    DirItems(Entries<'a, DirEntry<'a>>),
    /// The entry of a directory with the key's index.
    DirIndex(Entries<'a, DirEntry<'a>>),
    /// The head of a verity descriptor.
    VerityHead(&'a VerityDescriptor),
    /// Bytes of a verity descriptor, from the key's offset minus 1 on.
    VerityDescriptor(&'a [u8]),
    /// Bytes of a Merkle tree from the key's offset on.
    VerityMerkle(&'a [u8]),
    /// No data; the key has everything.
    Empty,
    /// The end of a range of a directory for which a log has all entries.
    DirLog(&'a DirLogItem),
    /// Data of a file.
    FileExtent(FileExtent<'a>),
    /// Checksums of sectors from the key's offset on.
    Csums(&'a [u8]),
    /// A tree.
    Root(RootItem<'a>),
    /// The position of a subvolume.
    RootRef(RootRef<'a>),
    /// An extent.
    Extent(ExtentItem<'a>),
    /// References from files, if the extent's item has no room for them.
    ExtentDataRefs(Entries<'a, &'a ExtentDataRef>),
    /// A reference from a leaf, if the extent's item has no room for it.
    SharedDataRef(&'a SharedDataRef),
    /// The tree that made the extent.
    ExtentOwner(&'a U64),
    /// A block group.
    BlockGroup(&'a BlockGroupItem),
    /// The form of a block group's free space.
    FreeSpaceInfo(&'a FreeSpaceInfo),
    /// One bit for each sector, from the key's object number on; a set bit means that the sector is free.
    FreeSpaceBitmap(&'a [u8]),
    /// The header of a space cache of version 1.
    FreeSpaceHeader(&'a FreeSpaceHeader),
    /// A range of a device.
    DevExtent(&'a DevExtent),
    /// A device.
    Device(&'a DevItem),
    /// A chunk.
    Chunk(Chunk<'a>),
    /// The state of quota.
    QgroupStatus(QgroupStatus<'a>),
    /// What a quota group uses.
    QgroupInfo(&'a QgroupInfo),
    /// What a quota group may use.
    QgroupLimit(&'a QgroupLimit),
    /// An interrupted balance.
    Balance(&'a BalanceItem),
    /// Counted errors of a device: write, read, flush, corruption, generation; later kernels may count more.
    DevStats(&'a [U64]),
    /// A replacement of a device.
    DevReplace(&'a DevReplaceItem),
    /// Subvolumes with the key's UUID.
    UuidSubvolumes(&'a [U64]),
    /// Any other item, as bytes.
    Opaque(&'a [u8]),
}

impl<'a> Item<'a> {
    /// Reads the item of this key.
    ///
    /// # Errors
    /// If it does not have the shape of its type.
    pub fn decode(key: Key, bytes: &'a [u8]) -> Result<Item<'a>, DecodeError> {
        Ok(match key.item_type {
            ItemType::UNTYPED if key.objectid == objectid::FREE_SPACE => {
                Item::FreeSpaceHeader(whole("header of a space cache", bytes)?)
            }
            ItemType::INODE_ITEM => Item::Inode(whole("inode", bytes)?),
            ItemType::INODE_REF => Item::InodeRefs(Entries::decode(bytes)?),
            ItemType::INODE_EXTREF => Item::InodeExtrefs(Entries::decode(bytes)?),
            ItemType::XATTR_ITEM => Item::Xattrs(Entries::decode(bytes)?),
            ItemType::DIR_ITEM => Item::DirItems(Entries::decode(bytes)?),
            ItemType::DIR_INDEX => Item::DirIndex(Entries::decode(bytes)?),
            ItemType::VERITY_DESC_ITEM if key.offset == 0 => Item::VerityHead(whole("verity descriptor", bytes)?),
            ItemType::VERITY_DESC_ITEM => Item::VerityDescriptor(bytes),
            ItemType::VERITY_MERKLE_ITEM => Item::VerityMerkle(bytes),
            ItemType::DIR_LOG_ITEM | ItemType::DIR_LOG_INDEX => Item::DirLog(whole("log of a directory", bytes)?),
            ItemType::EXTENT_DATA => Item::FileExtent(FileExtent::decode(bytes)?),
            ItemType::EXTENT_CSUM => Item::Csums(bytes),
            ItemType::ROOT_ITEM => Item::Root(RootItem::decode(bytes)?),
            ItemType::ROOT_BACKREF | ItemType::ROOT_REF => Item::RootRef(RootRef::decode(bytes)?),
            ItemType::ORPHAN_ITEM | ItemType::QGROUP_RELATION => empty(key, bytes)?,
            ItemType::UUID_SUBVOL | ItemType::UUID_RECEIVED_SUBVOL => Item::UuidSubvolumes(parts("UUID item", bytes)?),
            _ => Item::decode_of_storage(key, bytes)?,
        })
    }

    /// Reads items of the trees that contain no files.
    fn decode_of_storage(key: Key, bytes: &'a [u8]) -> Result<Item<'a>, DecodeError> {
        Ok(match key.item_type {
            ItemType::EXTENT_ITEM | ItemType::METADATA_ITEM => Item::Extent(ExtentItem::decode(key.item_type, bytes)?),
            ItemType::TREE_BLOCK_REF | ItemType::SHARED_BLOCK_REF | ItemType::FREE_SPACE_EXTENT => empty(key, bytes)?,
            ItemType::EXTENT_DATA_REF => Item::ExtentDataRefs(Entries::decode(bytes)?),
            ItemType::SHARED_DATA_REF => Item::SharedDataRef(whole("reference of a leaf", bytes)?),
            ItemType::EXTENT_OWNER_REF => Item::ExtentOwner(whole("owner of an extent", bytes)?),
            ItemType::BLOCK_GROUP_ITEM => Item::BlockGroup(whole("block group", bytes)?),
            ItemType::FREE_SPACE_INFO => Item::FreeSpaceInfo(whole("free space info", bytes)?),
            ItemType::FREE_SPACE_BITMAP => Item::FreeSpaceBitmap(bytes),
            ItemType::DEV_EXTENT => Item::DevExtent(whole("device extent", bytes)?),
            ItemType::DEV_ITEM => Item::Device(whole("device", bytes)?),
            ItemType::CHUNK_ITEM => Item::Chunk(Chunk::decode(bytes)?),
            ItemType::QGROUP_STATUS => Item::QgroupStatus(QgroupStatus::decode(bytes)?),
            ItemType::QGROUP_INFO => Item::QgroupInfo(whole("quota group", bytes)?),
            ItemType::QGROUP_LIMIT => Item::QgroupLimit(whole("limit of a quota group", bytes)?),
            ItemType::TEMPORARY_ITEM if key.objectid == objectid::BALANCE => Item::Balance(whole("balance", bytes)?),
            ItemType::PERSISTENT_ITEM if key.objectid == objectid::DEV_STATS => {
                Item::DevStats(parts("statistics of a device", bytes)?)
            }
            ItemType::DEV_REPLACE => Item::DevReplace(whole("replacement of a device", bytes)?),
            _ => Item::Opaque(bytes),
        })
    }

    /// Its bytes.
    ///
    /// # Errors
    /// If a part is too long for its length field; never for a decoded item.
    pub fn encode(&self) -> Result<Vec<u8>, TooLong> {
        let mut out = Vec::new();
        match self {
            Item::Empty => {}
            Item::InodeRefs(entries) => entries.write(&mut out)?,
            Item::InodeExtrefs(entries) => entries.write(&mut out)?,
            Item::Xattrs(entries) | Item::DirItems(entries) | Item::DirIndex(entries) => entries.write(&mut out)?,
            Item::ExtentDataRefs(entries) => entries.write(&mut out)?,
            Item::FileExtent(extent) => extent.write(&mut out),
            Item::Root(root) => root.write(&mut out),
            Item::RootRef(reference) => reference.write(&mut out)?,
            Item::Extent(extent) => extent.write(&mut out)?,
            Item::Chunk(chunk) => chunk.write(&mut out)?,
            Item::QgroupStatus(status) => status.write(&mut out),
            fixed => out.extend_from_slice(fixed.fixed_bytes()),
        }
        Ok(out)
    }

    /// The bytes of an item that is a single structure, or raw bytes.
    fn fixed_bytes(&self) -> &'a [u8] {
        match *self {
            Item::Inode(one) => bytes_of(one),
            Item::VerityHead(one) => bytes_of(one),
            Item::DirLog(one) => bytes_of(one),
            Item::SharedDataRef(one) => bytes_of(one),
            Item::ExtentOwner(one) => bytes_of(one),
            Item::BlockGroup(one) => bytes_of(one),
            Item::FreeSpaceInfo(one) => bytes_of(one),
            Item::FreeSpaceHeader(one) => bytes_of(one),
            Item::DevExtent(one) => bytes_of(one),
            Item::Device(one) => bytes_of(one),
            Item::QgroupInfo(one) => bytes_of(one),
            Item::QgroupLimit(one) => bytes_of(one),
            Item::Balance(one) => bytes_of(one),
            Item::DevReplace(one) => bytes_of(one),
            Item::DevStats(list) | Item::UuidSubvolumes(list) => list.as_bytes(),
            Item::VerityDescriptor(bytes) | Item::VerityMerkle(bytes) | Item::Csums(bytes) => bytes,
            Item::FreeSpaceBitmap(bytes) | Item::Opaque(bytes) => bytes,
            _ => &[],
        }
    }
}

fn bytes_of<T: IntoBytes + Immutable>(structure: &T) -> &[u8] {
    structure.as_bytes()
}

fn empty<'a>(key: Key, bytes: &'a [u8]) -> Result<Item<'a>, DecodeError> {
    let what = key.item_type.name().unwrap_or("item");
    if bytes.is_empty() { Ok(Item::Empty) } else { Err(DecodeError::Size { what, expected: 0, found: bytes.len() }) }
}
