//! Items as the kernel wrote them, from small filesystems that Linux 6.18 filled. Most come from a filesystem with
//! CRC-32C, nodes of 16 KiB and neither skinny metadata nor quota, the others from filesystems that have these.

use crate::key::{ItemType, Key};

/// Tree, key and data of each.
const ITEMS: &[(u64, u64, ItemType, u64, &str)] = &[
    (1, -11_i64 as u64, ItemType::UNTYPED, 30408704, "0001 0*6 01 0*8 2d 0*7 3b 0*15"),
    (
        5,
        257,
        ItemType::INODE_ITEM,
        0,
        "07 0*7 07 0*31 01 0*11 a481 0*18 01 0*39 5961076b 0*4 1d92022c5961076b 0*4 1d92022c5961076b 0*4 1d92022c5961076b 0*4 1d92022c",
    ),
    (5, 257, ItemType::INODE_REF, 256, "02 0*7 060066696c652d30"),
    (
        5,
        285,
        ItemType::INODE_EXTREF,
        5315563,
        "0001 0*6 64 0*7 c8003030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303030303831",
    ),
    (5, 259, ItemType::XATTR_ITEM, 95888091, "0*17 07 0*7 05000a0008757365722e736d616c6c76616c7565"),
    (5, -5_i64 as u64, ItemType::ORPHAN_ITEM, 841, ""),
    (-6_i64 as u64, 256, ItemType::DIR_LOG_INDEX, 508, "ffffffffffffffff"),
    (1, 6, ItemType::DIR_ITEM, 2378154706, "05 0*7 84ffffffffffffffff 0*10 07000264656661756c74"),
    (5, 256, ItemType::DIR_INDEX, 2, "0101 0*6 01 0*8 07 0*9 06000166696c652d30"),
    (5, 258, ItemType::EXTENT_DATA, 0, "07 0*7 01 0*12 6c"),
    (5, 261, ItemType::EXTENT_DATA, 0, "07 0*8 10 0*10 010000d003 0*5 10 0*15 10 0*6"),
    (7, -10_i64 as u64, ItemType::EXTENT_CSUM, 13697024, "8fc6abac49664a93"),
    (
        1,
        2,
        ItemType::ROOT_ITEM,
        0,
        "01 0*15 03 0*8 40 0*14 01 0*11 ed41 0*106 36 0*16 407602 0*14 01 0*21 01 0*21 0136 0*199",
    ),
    (1, 256, ItemType::ROOT_BACKREF, 5, "0001 0*6 4101 0*6 0300737562"),
    (1, 5, ItemType::ROOT_REF, 256, "0001 0*6 4101 0*6 0300737562"),
    (2, 22052864, ItemType::EXTENT_ITEM, 16384, "01 0*7 0a 0*7 02 0*7 01 0*7 d801 0*8 b003 0*7"),
    (2, 16777216, ItemType::EXTENT_ITEM, 1048576, "01 0*7 35 0*7 01 0*7 b22201 0*6 0901 0*14 01000000"),
    (
        2,
        13631488,
        ItemType::EXTENT_ITEM,
        1048576,
        "06 0*7 07 0*7 01 0*7 b205 0*7 1c01 0*14 03000000b800006602 0*4 03000000",
    ),
    (2, 30605312, ItemType::METADATA_ITEM, 0, "02 0*7 07 0*7 02 0*7 b02101 0*6 b005 0*7"),
    (2, 31543296, ItemType::TREE_BLOCK_REF, 278, ""),
    (2, 65986560, ItemType::EXTENT_DATA_REF, 1007496931349624086, "05 0*7 3e03 0*14 01000000"),
    (2, 65986560, ItemType::SHARED_DATA_REF, 40288256, "1d000000"),
    (2, 13631488, ItemType::BLOCK_GROUP_ITEM, 8388608, "000040 0*6 01 0*6 01 0*7"),
    (10, 1048576, ItemType::FREE_SPACE_INFO, 4194304, "01 0*7"),
    (10, 1048576, ItemType::FREE_SPACE_EXTENT, 4194304, ""),
    (4, 1, ItemType::DEV_EXTENT, 13631488, "03 0*8 01 0*8 d0 0*7 80 0*5 ce70c8b56f0f4b00a76b9af8f69eff43"),
    (
        3,
        1,
        ItemType::DEV_ITEM,
        1,
        "01 0*10 10 0*6 8009 0*5 100000001000000010 0*32 d33ef577855a44d08ae72b280a0ebb4ecf0ae3f5e23d4b8badd8cedd8d6ffa52",
    ),
    (
        3,
        256,
        ItemType::CHUNK_ITEM,
        13631488,
        "000080 0*5 02 0*9 01 0*5 01 0*9 010000000100001000000100010001 0*9 d0 0*5 d33ef577855a44d08ae72b280a0ebb4e",
    ),
    (
        3,
        256,
        ItemType::CHUNK_ITEM,
        22020096,
        "000080 0*5 02 0*9 01 0*5 22 0*9 010000000100001000000200010001 0*9 5001 0*4 d33ef577855a44d08ae72b280a0ebb4e01 0*9 d001 0*4 d33ef577855a44d08ae72b280a0ebb4e",
    ),
    (8, 0, ItemType::QGROUP_STATUS, 0, "01 0*7 3a 0*7 01 0*15"),
    (8, 0, ItemType::QGROUP_INFO, 5, "3a 0*8 f0f9 0*6 f0f9 0*6 3003 0*6 3003 0*5"),
    (8, 0, ItemType::QGROUP_LIMIT, 5, "0*40"),
    (4, 0, ItemType::PERSISTENT_ITEM, 1, "0*40"),
    (9, 4731663362879321640, ItemType::UUID_SUBVOL, 16723122402454597005, "0901 0*6"),
    (9, 5344987111070648808, ItemType::UUID_RECEIVED_SUBVOL, 2172734958543376318, "2201 0*6"),
];

/// A superblock as Linux wrote it.
const SUPERBLOCK: &str = "\
    e2621102 0*28 b07b0a0ba8f34521bbcc1ef6b3eb8eba000001 0*5 01 0*7 5f42485266535f4d07 0*9 d301 0*5 405001 0*23 \
    08 0*5 4002 0*5 06 0*7 01 0*8 1000000040000000400000001000008100000006 0*15 03 0*7 6103 0*11 01 0*10 08 0*6 \
    8005 0*5 100000001000000010 0*32 \
    df2b2db170e94106800668f42f3a3760b07b0a0ba8f34521bbcc1ef6b3eb8eba61206c6162656c 0*257 07 0*248 01 0*6 \
    e400005001 0*6 80 0*5 02 0*9 01 0*5 22 0*9 010000000100001000000200010001 0*9 5001 0*4 \
    df2b2db170e94106800668f42f3a376001 0*9 d001 0*4 df2b2db170e94106800668f42f3a376000000001 0*5 22 0*9 \
    010000000100001000000200010001 0*9 5001 0*4 df2b2db170e94106800668f42f3a376001 0*9 d001 0*4 \
    df2b2db170e94106800668f42f3a3760 0*1823 80d001 0*4 05 0*9 5001 0*4 05 0*9 d101 0*4 05 0*8 40d001 0*4 05 0*8 \
    c0d001 0*4 05 0*8 40d101 0*4 05 0*10 08 0*5 4002 0*5 01 0*56 c0d201 0*4 06 0*8 405001 0*4 06 0*9 d001 0*4 06 \
    0*8 40d001 0*4 05 0*8 40d201 0*4 06 0*8 40d101 0*4 05 0*10 08 0*5 4002 0*5 01 0*57 d301 0*4 07 0*8 405001 \
    0*4 06 0*8 c0d001 0*4 07 0*8 80d101 0*4 07 0*8 40d301 0*4 07 0*8 40d101 0*4 05 0*10 08 0*5 4002 0*5 01 0*57 \
    d001 0*4 04 0*8 4010 0*5 04 0*8 8051 0*5 04 0*8 4051 0*5 03 0*9 50 0*5 04 0*8 4011 0*5 01 0*10 08 0*5 c001 \
    0*5 01 0*620 \
";

/// An item, with its tree.
#[derive(Clone, Debug)]
pub struct Captured {
    /// The tree.
    pub owner: u64,
    /// Its key.
    pub key: Key,
    /// Its data.
    pub data: Vec<u8>,
}

/// All of them.
pub fn all() -> Vec<Captured> {
    let item = |(owner, objectid, item_type, offset, hex): &(u64, u64, ItemType, u64, &str)| Captured {
        owner: *owner,
        key: Key::new(*objectid, *item_type, *offset),
        data: bytes(hex),
    };
    ITEMS.iter().map(item).collect()
}

/// The only item of this type, or the only item of this type and size.
pub fn one(item_type: ItemType, size: usize) -> Captured {
    all().into_iter().find(|item| item.key.item_type == item_type && item.data.len() == size).unwrap()
}

/// The superblock.
pub fn superblock() -> Vec<u8> {
    bytes(SUPERBLOCK)
}

/// Pairs of hexadecimal digits; `0*9` stands for nine zero bytes.
fn bytes(hex: &str) -> Vec<u8> {
    let part = |part: &str| match part.strip_prefix("0*") {
        Some(zeroes) => vec![0; zeroes.parse().unwrap()],
        None => (0..part.len()).step_by(2).map(|at| u8::from_str_radix(&part[at..at + 2], 16).unwrap()).collect(),
    };
    hex.split_whitespace().flat_map(part).collect()
}
