//! Items of the kernel pass, and with one changed field they are refused for that field.

use super::*;
use crate::captured::{Captured, all, one};
use crate::checksum::ChecksumType;
use crate::features::{Compat, CompatRo, Features, Incompat};
use crate::key::{ItemType, Key};
use crate::superblock::Geometry;

/// A filesystem with all features but parity, in its hundredth transaction.
pub fn geometry() -> Geometry {
    Geometry {
        sector_bytes: 4096,
        node_bytes: 16_384,
        checksum: ChecksumType::Crc32c,
        features: Features {
            compat: Compat::empty(),
            compat_ro: CompatRo::empty(),
            incompat: Incompat::SKINNY_METADATA | Incompat::NO_HOLES | Incompat::EXTENDED_IREF,
        },
        node_uuid: [3; 16],
        generation: 100,
    }
}

fn check(item: &Captured, previous: Option<&Captured>) -> Result<(), Rule> {
    let geometry = geometry();
    let previous = previous.map(|item| (item.key, &item.data[..]));
    check_item(&Context { geometry: &geometry, owner: item.owner, key: item.key, previous }, &item.data)
}

#[test]
fn items_of_the_kernel_pass_and_come_back() {
    for item in all() {
        let decoded = Item::decode(item.key, &item.data).unwrap();
        assert_eq!(decoded.encode().unwrap(), item.data, "{}", item.key);
        check(&item, None).unwrap_or_else(|rule| panic!("{}: {rule}", item.key));
    }
}

/// An item by type and size, the offset and the value of the change, and the expected error text.
type Change = (ItemType, usize, usize, &'static [u8], &'static str);

fn refuse_all(changes: &[Change]) {
    for (item_type, size, at, bytes, says) in changes {
        let mut item = one(*item_type, *size);
        item.data[*at..*at + bytes.len()].copy_from_slice(bytes);
        let rule = check(&item, None).expect_err(says);
        assert!(rule.to_string().starts_with(says), "{item_type} byte {at}: {rule} instead of {says}");
    }
}

fn refuse_keys(changes: &[(ItemType, usize, u64, u64, &str)]) {
    for (item_type, size, objectid, offset, says) in changes {
        let mut item = one(*item_type, *size);
        item.key = Key::new(*objectid, *item_type, *offset);
        let rule = check(&item, None).expect_err(says);
        assert!(rule.to_string().starts_with(says), "{}: {rule} instead of {says}", item.key);
    }
}

const INODE: ItemType = ItemType::INODE_ITEM;
const EXTENT: ItemType = ItemType::EXTENT_DATA;

#[test]
fn inodes_with_a_wrong_field_are_refused() {
    refuse_all(&[
        (INODE, 160, 0, &[102], "generation is 102"),
        (INODE, 160, 8, &[0xff; 8], "transid is"),
        (INODE, 160, 52, &[0, 0], "kind in the mode is"),
        (INODE, 160, 52, &[0, 0xf0], "kind in the mode is"),
        (INODE, 160, 54, &[1], "mode is 0x1"),
        (INODE, 160, 65, &[0x10], "flags is 0x10"),
    ]);
    refuse_keys(&[(INODE, 160, 255, 0, "inode is 255"), (INODE, 160, 257, 1, "offset of the key is 1")]);
    let mut directory = one(INODE, 160);
    directory.data[52..54].copy_from_slice(&[0, 0x40]);
    assert_eq!(check(&directory, None), Ok(()));
    directory.data[40] = 2;
    assert!(check(&directory, None).unwrap_err().to_string().starts_with("links of a directory"));
    let mut verity = one(INODE, 160);
    verity.data[68] = 0xfe;
    assert_eq!(check(&verity, None), Ok(()), "unknown high flags only forbid writing");
}

#[test]
fn names_that_are_no_names_or_have_another_hash_are_refused() {
    refuse_all(&[
        (ItemType::INODE_REF, 16, 8, &[7], "inode reference at byte 10"),
        (ItemType::INODE_EXTREF, 218, 17, &[1], "long inode reference at byte 18"),
        (ItemType::INODE_EXTREF, 218, 30, b"1", "hash of a name"),
        (ItemType::DIR_ITEM, 37, 30, b"D", "hash of a name"),
        (ItemType::DIR_ITEM, 37, 0, &[7], "the entry leads to a tree"),
        (ItemType::DIR_ITEM, 37, 8, &[84], "type of an entry's key"),
        (ItemType::DIR_ITEM, 37, 29, &[9], "kind of an entry"),
        (ItemType::DIR_ITEM, 37, 29, &[8], "an entry of a directory is an attribute"),
        (ItemType::DIR_ITEM, 37, 25, &[1, 0, 6], "bytes of an entry's value"),
        (ItemType::DIR_INDEX, 36, 0, &[0, 0], "inode of an entry"),
        (ItemType::DIR_INDEX, 36, 9, &[1], "offset of an entry's key"),
        (ItemType::XATTR_ITEM, 45, 0, &[1], "an attribute leads somewhere"),
        (ItemType::XATTR_ITEM, 45, 29, &[1], "kind of an attribute"),
        (ItemType::XATTR_ITEM, 45, 34, b"x", "hash of a name"),
    ]);
    let mut nameless = one(ItemType::INODE_REF, 16);
    nameless.data = vec![0; 10];
    assert_eq!(check(&nameless, None).unwrap_err().to_string(), "bytes of a name is 0: from 1 to 255 it can be");
    let mut twice = one(ItemType::DIR_INDEX, 36);
    twice.data.extend_from_within(..);
    assert_eq!(check(&twice, None).unwrap_err().to_string(), "entries is 2 instead of 1");
}

#[test]
fn file_extents_that_lead_out_of_anything_are_refused() {
    refuse_all(&[
        (EXTENT, 22, 20, &[3], "file extent: type is 3"),
        (EXTENT, 22, 16, &[4], "compression is 0x4"),
        (EXTENT, 22, 17, &[1], "encryption is 1"),
        (EXTENT, 22, 8, &[2], "bytes of an inline extent"),
        (EXTENT, 22, 0, &[200], "generation is 200"),
        (EXTENT, 53, 8, &[1], "bytes uncompressed"),
        (EXTENT, 53, 21, &[1], "address of the extent"),
        (EXTENT, 53, 29, &[1], "bytes of the extent"),
        (EXTENT, 53, 37, &[1], "offset in the extent"),
        (EXTENT, 53, 45, &[1], "bytes of the file"),
        (EXTENT, 53, 45, &[0; 8], "bytes of the file"),
        (EXTENT, 53, 38, &[0x10], "end of the part of the extent"),
        (EXTENT, 53, 38, &[0xf0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff], "the part of the extent ends nowhere"),
        (EXTENT, 53, 22, &[0xf0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff], "the extent ends behind the last address"),
    ]);
    refuse_keys(&[
        (EXTENT, 53, 261, 1, "offset of the key is 1"),
        (EXTENT, 53, 261, 0_u64.wrapping_sub(4096), "the extent ends behind the largest file"),
        (EXTENT, 22, 258, 4096, "offset of an inline extent"),
    ]);
    let mut compressed = one(EXTENT, 53);
    compressed.data[16] = 1;
    assert_eq!(check(&compressed, None), Ok(()));
    compressed.data[8..16].copy_from_slice(&(132_u64 << 10).to_le_bytes());
    assert!(check(&compressed, None).unwrap_err().to_string().starts_with("bytes of a compressed extent, uncompr"));
}

#[test]
fn items_that_follow_each_other_agree() {
    let mut first = one(EXTENT, 53);
    first.data[46] = 0x20;
    (first.data[9], first.data[30]) = (0x20, 0x20);
    let mut second = one(EXTENT, 53);
    for (offset, passes) in [(4096, false), (8192, true)] {
        second.key.offset = offset;
        assert_eq!(check(&second, Some(&first)).is_ok(), passes, "{offset}");
    }
    second.key.objectid += 1;
    assert_eq!(check(&second, Some(&first)), Err(Rule::Detached(first.key)));
    second.owner = -6_i64 as u64;
    assert_eq!(check(&second, Some(&first)), Ok(()), "a log has what changed");

    let mut csums = one(ItemType::EXTENT_CSUM, 8);
    let before = csums.clone();
    for (sectors, passes) in [(1, false), (2, true)] {
        csums.key.offset = before.key.offset + sectors * 4096;
        assert_eq!(check(&csums, Some(&before)).is_ok(), passes);
    }
    let mut extent = one(ItemType::EXTENT_ITEM, 53);
    let before = extent.clone();
    for (bytes, passes) in [(4096, false), (1 << 20, true)] {
        extent.key.objectid = before.key.objectid + bytes;
        assert_eq!(check(&extent, Some(&before)).is_ok(), passes);
    }
    let mut free = one(ItemType::FREE_SPACE_EXTENT, 0);
    let before = free.clone();
    for (bytes, passes) in [(4096, false), (before.key.offset, true)] {
        free.key.objectid = before.key.objectid + bytes;
        assert_eq!(check(&free, Some(&before)).is_ok(), passes);
    }
    let mut on_device = one(ItemType::DEV_EXTENT, 48);
    let before = on_device.clone();
    for (bytes, passes) in [(4096, false), (8 << 20, true)] {
        on_device.key.offset = before.key.offset + bytes;
        assert_eq!(check(&on_device, Some(&before)).is_ok(), passes);
    }
    let mut group = one(ItemType::BLOCK_GROUP_ITEM, 24);
    let before = group.clone();
    for (bytes, passes) in [(4096, false), (8 << 20, true)] {
        group.key.objectid = before.key.objectid + bytes;
        assert_eq!(check(&group, Some(&before)).is_ok(), passes);
    }
}

#[test]
fn checksums_lie_at_sectors_and_are_whole() {
    refuse_keys(&[
        (ItemType::EXTENT_CSUM, 8, 5, 4096, "object of the key is 5"),
        (ItemType::EXTENT_CSUM, 8, -10_i64 as u64, 4095, "offset of the key is 4095"),
        (ItemType::EXTENT_CSUM, 8, -10_i64 as u64, 0_u64.wrapping_sub(4096), "checksums behind the last address"),
    ]);
    let mut csums = one(ItemType::EXTENT_CSUM, 8);
    csums.data.truncate(7);
    assert!(check(&csums, None).unwrap_err().to_string().starts_with("bytes of all checksums is 7"));
    csums.data.clear();
    assert!(check(&csums, None).is_err());
}

#[test]
fn without_checksums_there_are_neither_files_with_them_nor_items_nor_parity() {
    let none = Geometry { checksum: ChecksumType::None, ..geometry() };
    let check = |item: &Captured| {
        check_item(&Context { geometry: &none, owner: item.owner, key: item.key, previous: None }, &item.data)
    };
    let says = |item: &Captured| check(item).unwrap_err().to_string();
    assert_eq!(says(&one(ItemType::EXTENT_CSUM, 8)), "checksums in a filesystem without them");
    let mut inode = one(INODE, 160);
    (inode.data[52], inode.data[53], inode.data[64]) = (0xa4, 0x81, 0);
    assert_eq!(says(&inode), "a file with checksums in a filesystem without them");
    inode.data[64] = 1;
    assert_eq!(check(&inode), Ok(()));
    // A directory and a symbolic link have no data.
    for (mode, is_in) in [(0x41, true), (0xa1, true), (0x81, false)] {
        (inode.data[53], inode.data[64]) = (mode, 0);
        assert_eq!(check(&inode).is_ok(), is_in, "{mode:x}");
    }
    let mut group = one(ItemType::BLOCK_GROUP_ITEM, 24);
    assert_eq!(check(&group), Ok(()));
    group.data[16..24].copy_from_slice(&(1_u64 | 1 << 7).to_le_bytes());
    assert_eq!(says(&group), "parity in a filesystem without checksums");
}

#[test]
fn extents_and_references_that_contradict_themselves_are_refused() {
    let (extent, skinny) = (ItemType::EXTENT_ITEM, ItemType::METADATA_ITEM);
    refuse_all(&[
        (extent, 53, 0, &[0], "references counted behind the extent is 1"),
        (extent, 53, 8, &[200], "generation is 200"),
        (extent, 53, 16, &[0], "an extent is data, or a node"),
        (extent, 53, 17, &[1], "data with the flag of a shared node"),
        (extent, 53, 18, &[1], "flags is"),
        (extent, 53, 24, &[180], "inline reference: type is 180"),
        (extent, 53, 25, &[2, 0], "a file of a tree that has none"),
        (extent, 53, 33, &[0; 2], "inode of a reference"),
        (extent, 53, 41, &[1], "offset of a reference"),
        (extent, 53, 49, &[0], "count of a reference"),
        (extent, 66, 53, &[178], "inline reference at byte 54"),
        (extent, 51, 41, &[8], "level is 8"),
        (skinny, 42, 33, &[182], "parent of a reference"),
        (skinny, 42, 34, &[0xb1, 5], "references are not in their order"),
        (skinny, 42, 24, &[184], "inline reference at byte"),
        (ItemType::EXTENT_DATA_REF, 28, 24, &[0], "count of a reference"),
        (ItemType::SHARED_DATA_REF, 4, 0, &[0], "count of a reference"),
    ]);
    refuse_keys(&[
        (extent, 53, 4097, 4096, "address is 4097"),
        (extent, 53, 4096, 4097, "bytes is 4097"),
        (extent, 53, 4096, 0, "bytes is 0"),
        (extent, 51, 4096, 4096, "bytes of a node is 4096"),
        (skinny, 42, 4096, 8, "level is 8"),
        (skinny, 42, 0_u64.wrapping_sub(4096), 0, "the extent ends behind the last address"),
        (ItemType::EXTENT_DATA_REF, 28, 1, 0, "address is 1"),
        (ItemType::SHARED_DATA_REF, 4, 4096, 1, "parent of a reference"),
        (ItemType::TREE_BLOCK_REF, 0, 1, 5, "address is 1"),
    ]);
    let (item, mut geometry) = (one(skinny, 42), geometry());
    geometry.features.incompat = Incompat::empty();
    let context = Context { geometry: &geometry, owner: 2, key: item.key, previous: None };
    assert_eq!(check_item(&context, &item.data), Err(Rule::Feature("SKINNY_METADATA")));
}

#[test]
fn block_groups_and_free_space_lie_within_their_ranges() {
    refuse_all(&[
        (ItemType::BLOCK_GROUP_ITEM, 24, 3, &[1], "bytes used is"),
        (ItemType::BLOCK_GROUP_ITEM, 24, 8, &[1], "chunk object is 257"),
        (ItemType::BLOCK_GROUP_ITEM, 24, 16, &[0], "neither data nor metadata"),
        (ItemType::BLOCK_GROUP_ITEM, 24, 16, &[3], "neither data nor metadata"),
        (ItemType::BLOCK_GROUP_ITEM, 24, 16, &[5], "the filesystem has not the feature MIXED_GROUPS"),
        (ItemType::BLOCK_GROUP_ITEM, 24, 16, &[0x19], "more than one profile"),
        (ItemType::BLOCK_GROUP_ITEM, 24, 18, &[1], "flags is"),
        (ItemType::FREE_SPACE_INFO, 8, 4, &[2], "flags is 0x2"),
        (ItemType::FREE_SPACE_INFO, 8, 2, &[1], "runs of free space"),
    ]);
    refuse_keys(&[
        (ItemType::BLOCK_GROUP_ITEM, 24, 4096, 0, "bytes is 0"),
        (ItemType::BLOCK_GROUP_ITEM, 24, 4096, u64::MAX, "the block group ends behind"),
        (ItemType::FREE_SPACE_EXTENT, 0, 4096, 1, "bytes is 1"),
        (ItemType::FREE_SPACE_EXTENT, 0, 0_u64.wrapping_sub(4096), 8192, "free space behind the last address"),
    ]);
    let bitmap = |bytes: usize| Captured {
        owner: 10,
        key: Key::new(1 << 20, ItemType::FREE_SPACE_BITMAP, 9 * 4096),
        data: vec![0xff; bytes],
    };
    assert_eq!((check(&bitmap(2), None), check(&bitmap(1), None).is_ok()), (Ok(()), false));
}

#[test]
fn chunks_and_devices_that_cannot_be_are_refused() {
    let (chunk, device) = (ItemType::CHUNK_ITEM, ItemType::DEV_ITEM);
    refuse_all(&[
        (chunk, 80, 0, &[0; 8], "bytes is 0"),
        (chunk, 80, 0, &[1], "bytes is"),
        (chunk, 80, 7, &[0x7f], "bytes is"),
        (chunk, 80, 18, &[2], "bytes of a stripe"),
        (chunk, 80, 24, &[2 | 1], "neither data"),
        (chunk, 80, 24, &[0x11], "the profile does not have so many stripes"),
        (chunk, 80, 24, &[0x41], "the profile does not have so many stripes"),
        (chunk, 80, 56, &[1], "offset of a stripe"),
        (chunk, 112, 24, &[0x42, 0], "sub-stripes is 1 instead of 2"),
        (chunk, 112, 44, &[3], "stripes at byte 48"),
        (chunk, 112, 44, &[0], "chunk: number of stripes is 0"),
        (device, 98, 0, &[2], "number of the device is 2"),
        (device, 98, 22, &[1], "bytes used is"),
        (ItemType::DEV_EXTENT, 48, 0, &[4], "chunk tree is 4"),
        (ItemType::DEV_EXTENT, 48, 8, &[1], "chunk object is 257"),
        (ItemType::DEV_EXTENT, 48, 16, &[1], "address of the chunk"),
        (ItemType::DEV_EXTENT, 48, 24, &[0; 8], "bytes is 0"),
    ]);
    refuse_keys(&[
        (chunk, 80, 257, 4096, "object of the key is 257"),
        (chunk, 80, 256, 1, "address is 1"),
        (chunk, 80, 256, 0_u64.wrapping_sub(4096), "the chunk ends behind the last address"),
        (device, 98, 2, 1, "object of the key is 2"),
        (ItemType::DEV_EXTENT, 48, 1, 1, "offset on the device is 1"),
    ]);
}

#[test]
fn roots_that_cannot_be_are_refused() {
    let root = ItemType::ROOT_ITEM;
    refuse_all(&[
        (root, 439, 160, &[200], "generation is 200"),
        (root, 439, 176, &[1], "address of the root node"),
        (root, 439, 200, &[200], "last snapshot is 200"),
        (root, 439, 208, &[2], "flags is 0x2"),
        (root, 439, 220, &[1], "deleting has come somewhere"),
        (root, 439, 237, &[8], "level of deleting is 8"),
        (root, 439, 238, &[8], "level is 8"),
        (root, 439, 239, &[200], "second generation is 200"),
        (ItemType::ROOT_REF, 21, 0, &[0; 2], "directory is 0"),
        (ItemType::UUID_SUBVOL, 8, 0, &[7, 0], "a UUID of a tree that is no subvolume"),
        (ItemType::QGROUP_STATUS, 32, 0, &[2], "version is 2 instead of 1"),
        (ItemType::QGROUP_STATUS, 32, 16, &[16], "flags is 0x10"),
        (ItemType::ROOT_REF, 21, 16, &[2], "root reference: 21 bytes instead of 20"),
    ]);
    refuse_keys(&[
        (root, 439, 0, 0, "a tree without a number"),
        (root, 439, -8_i64 as u64, 0, "a relocation of no tree"),
        (ItemType::ROOT_REF, 21, 5, 7, "a tree that is no subvolume lies"),
        (ItemType::ROOT_BACKREF, 21, 256, 7, "a subvolume lies in a tree that is none"),
    ]);
}

#[test]
fn a_replacement_has_one_of_five_states() {
    let key = Key::new(0, ItemType::DEV_REPLACE, 0);
    let mut item = Captured { owner: 4, key, data: vec![0; 72] };
    for (state, passes) in [(0, true), (4, true), (5, false)] {
        item.data[32] = state;
        assert_eq!(check(&item, None).is_ok(), passes);
    }
}

#[test]
fn unknown_items_have_no_rules() {
    let item = Captured { owner: 5, key: Key::new(9, ItemType(99), 9), data: vec![1, 2, 3] };
    assert_eq!(check(&item, None), Ok(()));
}
