//! One change for each rule that breaks it, and the rules that it breaks.

use sealblock_btrfs::check::Rule;
use sealblock_btrfs_format::items::Item;
use sealblock_btrfs_format::items::chunk::BlockGroupFlags;
use sealblock_btrfs_format::items::entries::Entry;
use sealblock_btrfs_format::items::inode::InodeRef;
use sealblock_btrfs_format::key::objectid::{
    CHUNK_TREE, CSUM_TREE, DATA_RELOC_TREE, DEV_ITEMS, DEV_TREE, EXTENT_CSUM, EXTENT_TREE, FREE_SPACE_TREE, FS_TREE,
    ORPHAN, ROOT_TREE, ROOT_TREE_DIR,
};
use sealblock_btrfs_format::key::{ItemType, Key};
use sealblock_btrfs_format::names::name_hash;
use sealblock_btrfs_format::node::KeyPointer;

use crate::image::Image;

const TOP: u64 = 256;

/// Whether `btrfs check` finds the change in its usual mode, and in the one for little memory.
#[derive(Clone, Copy)]
pub enum Program {
    Both,
    Original,
    LowMemory,
    Neither,
}

/// A change, and all rules that it breaks.
pub struct Case {
    pub name: &'static str,
    pub rules: &'static [Rule],
    pub program: Program,
    pub change: fn(&Image),
}

const fn case(name: &'static str, rules: &'static [Rule], program: Program, change: fn(&Image)) -> Case {
    Case { name, rules, program, change }
}

fn put(data: &mut [u8], at: usize, value: &[u8]) {
    data[at..at + value.len()].copy_from_slice(value);
}

fn inode(image: &Image, name: &str) -> Key {
    Key::new(image.ino(name), ItemType::INODE_ITEM, 0)
}

fn file_extent(image: &Image, name: &str) -> Key {
    let ino = image.ino(name);
    image.find(FS_TREE, ItemType::EXTENT_DATA, |key, data| key.objectid == ino && data[21..29] != [0; 8])
}

/// The address of the extent of a file.
fn address(image: &Image, name: &str) -> u64 {
    let key = file_extent(image, name);
    let (_, data) = image.items(FS_TREE).into_iter().find(|(other, _)| *other == key).unwrap();
    u64::from_le_bytes(data[21..29].try_into().unwrap())
}

/// Removes the only name of the file "inline", as an unlink does that leaves the inode.
fn remove_name(items: &mut Vec<(Key, Vec<u8>)>, ino: u64) {
    items.retain(|(key, data)| {
        let is_name = key.objectid == TOP && data.ends_with(b"inline") && data.len() == 36;
        !is_name && *key != Key::new(ino, ItemType::INODE_REF, TOP)
    });
    let size = items.iter_mut().find(|(key, _)| *key == Key::new(TOP, ItemType::INODE_ITEM, 0)).unwrap();
    size.1[16] -= 12;
    let inode = items.iter_mut().find(|(key, _)| *key == Key::new(ino, ItemType::INODE_ITEM, 0)).unwrap();
    inode.1[40] = 0;
}

fn extent_item(image: &Image, name: &str) -> Key {
    let address = address(image, name);
    image.find(EXTENT_TREE, ItemType::EXTENT_ITEM, |key, _| key.objectid == address)
}

/// The item of the root node of a tree.
fn node_item(image: &Image, tree: u64) -> Key {
    let root = image
        .items(ROOT_TREE)
        .into_iter()
        .find(|(key, _)| key.objectid == tree && key.item_type == ItemType::ROOT_ITEM);
    let address = u64::from_le_bytes(root.unwrap().1[176..184].try_into().unwrap());
    image.find(EXTENT_TREE, ItemType::METADATA_ITEM, |key, _| key.objectid == address)
}

fn group(image: &Image, kind: BlockGroupFlags) -> Key {
    image.find(EXTENT_TREE, ItemType::BLOCK_GROUP_ITEM, |_, data| data[16] == kind.bits() as u8)
}

/// The key of the chunk for data.
fn data_chunk(image: &Image) -> Key {
    let is_data = |_: Key, data: &[u8]| data[24] == BlockGroupFlags::DATA.bits() as u8;
    image.find(CHUNK_TREE, ItemType::CHUNK_ITEM, is_data)
}

fn dir_index(image: &Image, name: &str) -> Key {
    image.find(FS_TREE, ItemType::DIR_INDEX, |key, data| key.objectid == TOP && &data[30..] == name.as_bytes())
}

fn dir_item(name: &str) -> Key {
    Key::new(TOP, ItemType::DIR_ITEM, name_hash(name.as_bytes()))
}

fn subvolume(image: &Image, name: &str) -> u64 {
    image.ino(name)
}

fn root_item(image: &Image, id: u64) -> Key {
    image.find(ROOT_TREE, ItemType::ROOT_ITEM, |key, _| key.objectid == id)
}

/// A free run in the block group for data, behind all extents.
fn free_data(image: &Image) -> u64 {
    let group = group(image, BlockGroupFlags::DATA);
    group.objectid + group.offset - (1 << 20)
}

pub const CASES: &[Case] = &[
    case("a lost node", &[Rule::LostNode], Program::Both, |image| image.damage(CSUM_TREE, 2)),
    case("a damaged copy of a node", &[Rule::NodeCopy], Program::Neither, |image| image.damage(CSUM_TREE, 1)),
    case("a superblock with more devices", &[Rule::Superblock], Program::Both, |image| {
        image.superblock(|superblock| superblock.num_devices = 2.into());
    }),
    case("a second superblock that is three transactions older", &[], Program::Neither, |image| {
        image.superblocks_from(1, |superblock| superblock.generation = (superblock.generation.get() - 3).into());
    }),
    case("a second superblock that is four transactions older", &[Rule::Superblock], Program::Neither, |image| {
        image.superblocks_from(1, |superblock| superblock.generation = (superblock.generation.get() - 4).into());
    }),
    case(
        "another key in a pointer to a node that was reached before",
        &[Rule::LostNode],
        Program::LowMemory,
        |image| {
            image.edit_pointers(subvolume(image, "shared"), |pointers| {
                let pointer = pointers[1];
                let key = Key { offset: pointer.key().offset + 1, ..pointer.key() };
                pointers[1] = KeyPointer::new(key, pointer.blockptr.get(), pointer.generation.get());
            });
        },
    ),
    case(
        "another generation in a pointer to a node that was reached before",
        &[Rule::LostNode],
        Program::LowMemory,
        |image| {
            image.edit_pointers(subvolume(image, "shared"), |pointers| {
                let pointer = pointers[1];
                let generation = pointer.generation.get() - 1;
                pointers[1] = KeyPointer::new(pointer.key(), pointer.blockptr.get(), generation);
            });
        },
    ),
    case("a device of another filesystem", &[Rule::Superblock], Program::Both, |image| {
        image.patch(CHUNK_TREE, Key::new(DEV_ITEMS, ItemType::DEV_ITEM, 1), |data| data[97] ^= 1);
    }),
    case("unknown flags of the superblock", &[Rule::Superblock], Program::Neither, |image| {
        image.superblock(|superblock| superblock.flags = (superblock.flags.get() | 1 << 40).into());
    }),
    case("a superblock with one byte too few on all devices", &[Rule::Superblock], Program::Both, |image| {
        image.superblock(|superblock| superblock.total_bytes = (superblock.total_bytes.get() - 1).into());
    }),
    case("a superblock with part of a sector too much", &[], Program::Neither, |image| {
        image.superblock(|superblock| superblock.total_bytes = (superblock.total_bytes.get() + 255).into());
    }),
    case("a chunk on a device with another UUID", &[Rule::DeviceExtent], Program::Original, |image| {
        image.patch(CHUNK_TREE, data_chunk(image), |data| data[64] ^= 1);
    }),
    case("a chunk with other sectors", &[Rule::GroupChunk], Program::Both, |image| {
        image.patch(CHUNK_TREE, data_chunk(image), |data| data[40] = 1);
    }),
    case("a node that a relocation moved, without FULL_BACKREF", &[Rule::ExtentKind], Program::Original, |image| {
        image.change_leaf(subvolume(image, "sub"), |header| header.flags = (header.flags.get() | 2).into());
    }),
    case("a node that a relocation cannot have moved", &[Rule::ExtentKind], Program::Original, |image| {
        image.change_leaf(CSUM_TREE, |header| header.flags = (header.flags.get() | 2).into());
    }),
    case("a node with the old revision of references", &[Rule::ExtentKind], Program::Original, |image| {
        image.change_leaf(CSUM_TREE, |header| header.flags = (header.flags.get() & !(1 << 56)).into());
    }),
    case("FULL_BACKREF of a node that its owner has", &[Rule::ExtentKind], Program::Original, |image| {
        image.patch(EXTENT_TREE, node_item(image, CSUM_TREE), |data| data[17] = 1);
    }),
    case("two root items of a tree", &[Rule::RootItem], Program::Both, |image| {
        let (_, item) =
            image.items(ROOT_TREE).into_iter().find(|(key, _)| *key == root_item(image, CSUM_TREE)).unwrap();
        image.add(ROOT_TREE, Key::new(CSUM_TREE, ItemType::ROOT_ITEM, 4096), &item);
    }),
    // Linux does not mount it then.
    case("a default subvolume that does not exist", &[Rule::RootItem], Program::Neither, |image| {
        let key = Key::new(ROOT_TREE_DIR, ItemType::DIR_ITEM, name_hash(b"default"));
        image.patch(ROOT_TREE, key, |data| put(data, 0, &999_u64.to_le_bytes()));
    }),
    case("no checksum tree", &[Rule::NoTree, Rule::ReferenceNotFound], Program::Both, |image| {
        image.remove(ROOT_TREE, root_item(image, CSUM_TREE));
    }),
    case(
        "a reference from another inode",
        &[Rule::ReferenceNotRecorded, Rule::ReferenceNotFound],
        Program::Both,
        |image| image.patch(EXTENT_TREE, extent_item(image, "plain"), |data| data[33] ^= 1),
    ),
    case("a count that is too large", &[Rule::ReferenceCount], Program::Original, |image| {
        image.patch(EXTENT_TREE, extent_item(image, "plain"), |data| data[0] += 1);
    }),
    case(
        "a reference inline and in an item",
        &[Rule::ReferenceTwice, Rule::ReferenceNotFound],
        Program::Both,
        |image| {
            let key = node_item(image, CSUM_TREE);
            image.edit(EXTENT_TREE, key, |items| {
                items.iter_mut().find(|(other, _)| *other == key).unwrap().1[0] = 2;
                items.push((Key::new(key.objectid, ItemType::TREE_BLOCK_REF, CSUM_TREE), Vec::new()));
            });
        },
    ),
    case("a reference without an extent", &[Rule::ReferenceAlone, Rule::ReferenceNotFound], Program::Both, |image| {
        image.add(EXTENT_TREE, Key::new(free_data(image), ItemType::SHARED_DATA_REF, 16_384), &[1, 0, 0, 0]);
    }),
    case(
        "an extent that nothing uses",
        &[Rule::ReferenceNotFound, Rule::GroupUsed, Rule::BytesUsed, Rule::FreeSpace],
        Program::Both,
        |image| {
            let (_, item) =
                image.items(EXTENT_TREE).into_iter().find(|(key, _)| *key == extent_item(image, "plain")).unwrap();
            image.add(EXTENT_TREE, Key::new(free_data(image), ItemType::EXTENT_ITEM, 4096), &item);
        },
    ),
    case(
        "a node without an extent",
        &[Rule::NoExtent, Rule::GroupUsed, Rule::BytesUsed, Rule::FreeSpace],
        Program::Both,
        |image| image.remove(EXTENT_TREE, node_item(image, CSUM_TREE)),
    ),
    case(
        "data without an extent",
        &[Rule::NoExtent, Rule::GroupUsed, Rule::BytesUsed, Rule::FreeSpace],
        Program::Both,
        |image| image.remove(EXTENT_TREE, extent_item(image, "nosum")),
    ),
    case("a longer extent than recorded", &[Rule::ExtentKind], Program::Both, |image| {
        image.patch(FS_TREE, file_extent(image, "nosum"), |data| {
            put(data, 8, &12_288_u64.to_le_bytes());
            put(data, 29, &12_288_u64.to_le_bytes());
        });
    }),
    case("another level", &[Rule::ExtentLevel], Program::LowMemory, |image| {
        let key = node_item(image, CSUM_TREE);
        image.edit(EXTENT_TREE, key, |items| {
            items.iter_mut().find(|(other, _)| *other == key).unwrap().0.offset = 1;
        });
    }),
    case("another generation", &[Rule::ExtentGeneration], Program::LowMemory, |image| {
        image.patch(EXTENT_TREE, node_item(image, CSUM_TREE), |data| data[8] -= 1);
    }),
    case(
        "a node without FULL_BACKREF that its owner does not refer to",
        &[Rule::ExtentOwner, Rule::ReferenceNotRecorded, Rule::ReferenceNotFound],
        Program::Original,
        |image| {
            let key = image.find(EXTENT_TREE, ItemType::METADATA_ITEM, |_, data| data[17] == 1);
            image.patch(EXTENT_TREE, key, |data| data[17] = 0);
        },
    ),
    case(
        "a root node of another tree",
        &[Rule::ReferenceNotRecorded, Rule::ReferenceNotFound],
        Program::Both,
        |image| image.patch(EXTENT_TREE, node_item(image, CSUM_TREE), |data| data[25] = 9),
    ),
    case("an immutable symbolic link", &[Rule::InodeKind], Program::Both, |image| {
        image.patch(FS_TREE, inode(image, "link"), |data| data[64] |= 1 << 6);
    }),
    case("a block group for something else", &[Rule::ExtentGroup, Rule::GroupChunk], Program::Both, |image| {
        image.patch(EXTENT_TREE, group(image, BlockGroupFlags::DATA), |data| data[16] = 4);
    }),
    case("other used bytes of a block group", &[Rule::GroupUsed], Program::Both, |image| {
        image.patch(EXTENT_TREE, group(image, BlockGroupFlags::DATA), |data| data[1] ^= 0x10);
    }),
    case(
        "a chunk without a block group",
        &[Rule::GroupChunk, Rule::ExtentGroup, Rule::BytesUsed],
        Program::Both,
        |image| {
            image.remove(EXTENT_TREE, group(image, BlockGroupFlags::DATA));
        },
    ),
    case("other used bytes of the filesystem", &[Rule::BytesUsed], Program::Both, |image| {
        image.superblock(|superblock| superblock.bytes_used = (superblock.bytes_used.get() + 4096).into());
    }),
    case("no device extent", &[Rule::DeviceExtent, Rule::DeviceUsed], Program::Both, |image| {
        image.remove(DEV_TREE, image.find(DEV_TREE, ItemType::DEV_EXTENT, |_, _| true));
    }),
    case(
        "a device extent behind the device",
        &[Rule::DeviceOverlap, Rule::DeviceExtent, Rule::DeviceUsed],
        Program::Both,
        |image| {
            let last =
                image.items(DEV_TREE).into_iter().rfind(|(key, _)| key.item_type == ItemType::DEV_EXTENT).unwrap().0;
            image.patch(DEV_TREE, last, |data| put(data, 24, &(1_u64 << 32).to_le_bytes()));
        },
    ),
    case("other used bytes of a device", &[Rule::DeviceUsed, Rule::Superblock], Program::Both, |image| {
        image.patch(CHUNK_TREE, Key::new(DEV_ITEMS, ItemType::DEV_ITEM, 1), |data| data[18] ^= 1);
    }),
    case("another system chunk in the superblock", &[Rule::SystemChunks], Program::Neither, |image| {
        image.superblock(|superblock| superblock.sys_chunk_array[17 + 32] ^= 1);
    }),
    case("no free run", &[Rule::FreeSpace, Rule::FreeSpaceCount], Program::Both, |image| {
        let start = group(image, BlockGroupFlags::DATA).objectid;
        image.remove(
            FREE_SPACE_TREE,
            image.find(FREE_SPACE_TREE, ItemType::FREE_SPACE_EXTENT, |key, _| key.objectid >= start),
        );
    }),
    case("another number of free runs", &[Rule::FreeSpaceCount], Program::Both, |image| {
        let start = group(image, BlockGroupFlags::DATA).objectid;
        let info = image.find(FREE_SPACE_TREE, ItemType::FREE_SPACE_INFO, |key, _| key.objectid == start);
        image.patch(FREE_SPACE_TREE, info, |data| data[0] += 1);
    }),
    case("no checksums", &[Rule::NoChecksum], Program::Both, |image| {
        let first = image.items(CSUM_TREE)[0].0;
        image.remove(CSUM_TREE, first);
    }),
    case("checksums of nothing", &[Rule::ChecksumAlone], Program::Neither, |image| {
        image.add(CSUM_TREE, Key::new(EXTENT_CSUM, ItemType::EXTENT_CSUM, free_data(image)), &[1, 2, 3, 4]);
    }),
    case("checksums of a file without", &[Rule::ChecksumOdd], Program::Both, |image| {
        image.patch(FS_TREE, inode(image, "plain"), |data| data[64] |= 1);
    }),
    // Of any other inode, the item that follows would be refused by the checker of nodes.
    case("no INODE_ITEM", &[Rule::NoInode, Rule::TopDirectory], Program::Both, |image| {
        image.remove(FS_TREE, Key::new(TOP, ItemType::INODE_ITEM, 0));
    }),
    case("an item of an unknown type", &[Rule::UnknownItem], Program::Neither, |image| {
        image.add(FS_TREE, Key::new(image.ino("nosum"), ItemType(8), 0), b"");
    }),
    case("a name twice", &[Rule::Name], Program::Both, |image| {
        image.patch(FS_TREE, dir_item("nosum"), |data| data.extend(data.clone()));
    }),
    case("a pipe with data", &[Rule::InodeKind, Rule::NameKind], Program::Both, |image| {
        image.patch(FS_TREE, inode(image, "nosum"), |data| put(data, 52, &0o010_644_u32.to_le_bytes()));
    }),
    case("more links than names", &[Rule::Links], Program::Both, |image| {
        image.patch(FS_TREE, inode(image, "plain"), |data| data[40] = 5);
    }),
    case("an inode without links that is no orphan", &[Rule::NoOrphan], Program::Both, |image| {
        image.edit(FS_TREE, inode(image, "inline"), |items| remove_name(items, image.ino("inline")));
    }),
    case("another size of a directory", &[Rule::DirectorySize], Program::Both, |image| {
        image.patch(FS_TREE, inode(image, "folder"), |data| data[16] += 1);
    }),
    case("other bytes of an inode", &[Rule::InodeBytes], Program::Both, |image| {
        image.patch(FS_TREE, inode(image, "plain"), |data| data[25] ^= 0x10);
    }),
    case("a file extent that uses more than there is", &[Rule::FileExtent], Program::Original, |image| {
        image.patch(FS_TREE, file_extent(image, "nosum"), |data| put(data, 8, &4096_u64.to_le_bytes()));
    }),
    case("a symbolic link with another size", &[Rule::Symlink], Program::Neither, |image| {
        image.patch(FS_TREE, inode(image, "link"), |data| data[16] += 1);
    }),
    case("no DIR_INDEX", &[Rule::Name, Rule::DirectorySize], Program::Both, |image| {
        image.remove(FS_TREE, dir_index(image, "nosum"));
    }),
    case("no DIR_ITEM", &[Rule::Name], Program::Both, |image| image.remove(FS_TREE, dir_item("nosum"))),
    case("no INODE_REF", &[Rule::Name, Rule::Links], Program::Both, |image| {
        image.remove(FS_TREE, Key::new(image.ino("nosum"), ItemType::INODE_REF, TOP));
    }),
    case("an INODE_REF with another index", &[Rule::Name], Program::Both, |image| {
        let key = Key::new(image.ino("nosum"), ItemType::INODE_REF, TOP);
        image.patch(FS_TREE, key, |data| {
            let mut other = Vec::new();
            InodeRef { index: 999, name: b"nosum" }.write(&mut other).unwrap();
            *data = other;
        });
    }),
    case("an index of the top directory's name", &[Rule::Name], Program::Both, |image| {
        image.patch(FS_TREE, Key::new(TOP, ItemType::INODE_REF, TOP), |data| data[0] = 2);
    }),
    case("another type in a directory", &[Rule::NameKind], Program::Both, |image| {
        for key in [dir_item("nosum"), dir_index(image, "nosum")] {
            image.patch(FS_TREE, key, |data| data[29] = 2);
        }
    }),
    case(
        "a top that is no directory",
        &[Rule::TopDirectory, Rule::InodeKind, Rule::InodeBytes],
        Program::Both,
        |image| {
            image.patch(FS_TREE, Key::new(TOP, ItemType::INODE_ITEM, 0), |data| {
                put(data, 52, &0o100_644_u32.to_le_bytes())
            });
        },
    ),
    case("no ROOT_REF", &[Rule::RootRef], Program::Both, |image| {
        image.remove(ROOT_TREE, Key::new(FS_TREE, ItemType::ROOT_REF, subvolume(image, "sub")));
    }),
    case("no ROOT_BACKREF", &[Rule::RootRef], Program::Both, |image| {
        image.remove(ROOT_TREE, Key::new(subvolume(image, "sub"), ItemType::ROOT_BACKREF, FS_TREE));
    }),
    case("no entry for a subvolume", &[Rule::RootRef, Rule::DirectorySize], Program::Both, |image| {
        let index = dir_index(image, "sub");
        image.edit(FS_TREE, index, |items| items.retain(|(key, _)| *key != index && *key != dir_item("sub")));
    }),
    case("a deleted subvolume that is no orphan", &[Rule::RootOrphan], Program::Neither, |image| {
        let id = subvolume(image, "snap");
        let index = dir_index(image, "snap");
        image.edit(ROOT_TREE, root_item(image, id), |items| {
            items.retain(|(key, _)| {
                *key != Key::new(FS_TREE, ItemType::ROOT_REF, id)
                    && *key != Key::new(id, ItemType::ROOT_BACKREF, FS_TREE)
            });
            let (_, root) =
                items.iter_mut().find(|(key, _)| key.objectid == id && key.item_type == ItemType::ROOT_ITEM).unwrap();
            put(root, 216, &0_u32.to_le_bytes());
        });
        image.edit(FS_TREE, index, |items| {
            items.retain(|(key, _)| *key != index && *key != dir_item("snap"));
            let size = items.iter_mut().find(|(key, _)| *key == Key::new(TOP, ItemType::INODE_ITEM, 0)).unwrap();
            size.1[16] -= 8;
        });
    }),
    case("another top of the tree for the relocation of data", &[Rule::RootItem], Program::Original, |image| {
        let key = root_item(image, DATA_RELOC_TREE);
        image.patch(ROOT_TREE, key, |data| put(data, 168, &257_u64.to_le_bytes()));
    }),
    // Not a rule of its own: an orphan is allowed.
    case("an orphan", &[], Program::Neither, |image| {
        let ino = image.ino("inline");
        image.edit(FS_TREE, inode(image, "inline"), |items| {
            remove_name(items, ino);
            items.push((Key::new(ORPHAN, ItemType::ORPHAN_ITEM, ino), Vec::new()));
        });
    }),
];

/// For filesystems without NO_HOLES.
pub const HOLES: &[Case] = &[case("a hole without an item", &[Rule::FileHole], Program::Both, |image| {
    let ino = image.ino("sparse");
    let is_hole = |key: Key, data: &[u8]| {
        let Ok(Item::FileExtent(extent)) = Item::decode(key, data) else { return false };
        key.objectid == ino && extent.location().is_some_and(|location| location.is_hole())
    };
    image.remove(FS_TREE, image.find(FS_TREE, ItemType::EXTENT_DATA, is_hole));
})];
