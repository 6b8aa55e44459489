//! The items of all trees of a new filesystem, by rising keys.
//!
//! Items do not change their sizes with the addresses that are in them, so their nodes can be counted before these are
//! known.

use std::collections::BTreeMap;

use sealblock_btrfs_format::extent_refs::ExtentRef;
use sealblock_btrfs_format::features::Incompat;
use sealblock_btrfs_format::free_space::GroupFreeSpace;
use sealblock_btrfs_format::item_changes::ItemChanges;
use sealblock_btrfs_format::items::chunk::BlockGroupItem;
use sealblock_btrfs_format::items::device::{DevExtent, DevItem};
use sealblock_btrfs_format::items::directory::{DirEntry, FileType};
use sealblock_btrfs_format::items::entries::Entry;
use sealblock_btrfs_format::items::extent::{ExtentFlags, TreeBlockInfo};
use sealblock_btrfs_format::items::extent_buf::{ExtentItemBuf, KeyedRefs};
use sealblock_btrfs_format::items::inode::{InodeFlags, InodeItem, InodeRef};
use sealblock_btrfs_format::items::root::RootItemBuf;
use sealblock_btrfs_format::key::{ItemType, Key, objectid};
use sealblock_btrfs_format::names::name_hash;
use zerocopy::{FromZeros, IntoBytes};

use super::layout::{BlockGroup, Layout, PlannedDevice};
use super::options::{FormatError, FormatOptions};
use super::shapes::{Items, Trees};
use crate::datasum::Datasum;

/// Counters of a device: write, read, flush, corruption and generation errors.
const DEV_STATS: [u8; 40] = [0; 40];
/// The name of a directory in itself, as the reference of a top directory has it.
const PARENT: &[u8] = b"..";
/// The name of the default subvolume.
const DEFAULT: &[u8] = b"default";

/// The trees of a filesystem with these options.
pub(super) fn owners(options: &FormatOptions) -> Vec<u64> {
    let mut owners = vec![
        objectid::CHUNK_TREE,
        objectid::ROOT_TREE,
        objectid::EXTENT_TREE,
        objectid::DEV_TREE,
        objectid::FS_TREE,
        objectid::CSUM_TREE,
        objectid::UUID_TREE,
        objectid::FREE_SPACE_TREE,
        objectid::DATA_RELOC_TREE,
    ];
    if options.block_group_tree {
        owners.push(objectid::BLOCK_GROUP_TREE);
    }
    owners
}

/// The items of all trees, if their nodes are placed like this.
///
/// # Errors
/// If the free space of a group contradicts its nodes, or something is too long.
pub(super) fn all(
    options: &FormatOptions,
    layout: &Layout,
    trees: &Trees,
) -> Result<BTreeMap<u64, Items>, FormatError> {
    let mut items = BTreeMap::new();
    for owner in owners(options) {
        items.insert(
            owner,
            match owner {
                objectid::CHUNK_TREE => chunk_tree(options, layout)?,
                objectid::ROOT_TREE => root_tree(options, trees)?,
                objectid::DEV_TREE => device_tree(options, layout),
                objectid::FS_TREE | objectid::DATA_RELOC_TREE => {
                    let mut items = Items::new();
                    let datasum = if owner == objectid::FS_TREE { options.datasum } else { Datasum::Csum };
                    let flags = datasum.flags_of_directory();
                    push_top_directory(options, [objectid::FIRST_FREE; 2], flags, &mut items)?;
                    items
                }
                objectid::UUID_TREE => vec![uuid_item(options)],
                objectid::FREE_SPACE_TREE => free_space_tree(options, layout, trees)?,
                objectid::BLOCK_GROUP_TREE => block_groups(options, layout, trees),
                // The checksum tree is empty, and the extent tree needs the first keys of all others.
                _ => Items::new(),
            },
        );
    }
    let extents = extent_tree(options, layout, trees, &items)?;
    items.insert(objectid::EXTENT_TREE, extents);
    Ok(items)
}

/// A device, as the chunk tree and its own superblock have it.
pub(super) fn device_item(options: &FormatOptions, device: &PlannedDevice) -> DevItem {
    DevItem {
        devid: device.devid.into(),
        total_bytes: device.bytes.into(),
        bytes_used: device.used.into(),
        io_align: options.sector_bytes.into(),
        io_width: options.sector_bytes.into(),
        sector_size: options.sector_bytes.into(),
        uuid: device.uuid,
        fsid: options.fsid,
        ..DevItem::new_zeroed()
    }
}

fn chunk_tree(options: &FormatOptions, layout: &Layout) -> Result<Items, FormatError> {
    let device = |device: &PlannedDevice| {
        let key = Key::new(objectid::DEV_ITEMS, ItemType::DEV_ITEM, device.devid);
        (key, device_item(options, device).as_bytes().to_vec())
    };
    let mut items: Items = layout.devices.iter().map(device).collect();
    for group in &layout.groups {
        items.push((group.chunk_key(), layout.chunk(group, options.sector_bytes).encode()?));
    }
    Ok(items)
}

fn device_tree(options: &FormatOptions, layout: &Layout) -> Items {
    let stats = |device: &PlannedDevice| {
        let key = Key::new(objectid::DEV_STATS, ItemType::PERSISTENT_ITEM, device.devid);
        (key, DEV_STATS.to_vec())
    };
    let extents = layout.groups.iter().flat_map(|group| group.stripes.iter().map(move |stripe| (group, *stripe)));
    let extent = |(group, (devid, offset)): (&BlockGroup, (u64, u64))| {
        let extent = DevExtent {
            chunk_tree: objectid::CHUNK_TREE.into(),
            chunk_objectid: objectid::FIRST_CHUNK_TREE.into(),
            chunk_offset: group.logical.into(),
            length: group.stripe_bytes.into(),
            chunk_tree_uuid: options.chunk_tree_uuid,
        };
        (Key::new(devid, ItemType::DEV_EXTENT, offset), extent.as_bytes().to_vec())
    };
    let mut items: Items = layout.devices.iter().map(stats).chain(extents.map(extent)).collect();
    items.sort_by_key(|(key, _)| *key);
    items
}

fn root_tree(options: &FormatOptions, trees: &Trees) -> Result<Items, FormatError> {
    let mut items = Items::new();
    for (owner, tree) in trees {
        // The superblock has the roots of these two.
        if matches!(*owner, objectid::ROOT_TREE | objectid::CHUNK_TREE) {
            continue;
        }
        let has_files = matches!(*owner, objectid::FS_TREE | objectid::DATA_RELOC_TREE);
        let dirid = if has_files { objectid::FIRST_FREE } else { 0 };
        let mut root = RootItemBuf::new(tree.root(), dirid, options.node_bytes);
        let uuid = if *owner == objectid::FS_TREE { options.subvolume_uuid } else { [0; 16] };
        root.set_root(tree.root(), tree.addresses.len() as u64 * u64::from(options.node_bytes), uuid);
        if let (objectid::FS_TREE, Some(tail)) = (*owner, &mut root.tail) {
            (tail.uuid, tail.otransid, tail.otime) = (uuid, options.first_transaction.into(), options.time);
            root.set_changed(options.first_transaction, options.time);
        }
        items.push((Key::new(*owner, ItemType::ROOT_ITEM, 0), root.encode()));
    }
    let directory = objectid::ROOT_TREE_DIR;
    push_top_directory(options, [directory; 2], InodeFlags::empty(), &mut items)?;
    let location = Key::new(objectid::FS_TREE, ItemType::ROOT_ITEM, u64::MAX);
    let entry = DirEntry { location, transid: 0, kind: FileType::Directory as u8, name: DEFAULT, data: b"" };
    items.push((Key::new(directory, ItemType::DIR_ITEM, name_hash(DEFAULT)), encoded(&entry)?));
    let back = InodeRef { index: 0, name: DEFAULT };
    items.push((Key::new(objectid::FS_TREE, ItemType::INODE_REF, directory), encoded(&back)?));
    items.sort_by_key(|(key, _)| *key);
    Ok(items)
}

/// A top directory, which is its own parent.
fn push_top_directory(
    options: &FormatOptions,
    [ino, parent]: [u64; 2],
    flags: InodeFlags,
    items: &mut Items,
) -> Result<(), FormatError> {
    let top = InodeItem::new_top_directory(options.first_transaction, options.time);
    let inode = InodeItem { flags: flags.bits().into(), ..top };
    items.push((Key::new(ino, ItemType::INODE_ITEM, 0), inode.as_bytes().to_vec()));
    let name = InodeRef { index: 0, name: PARENT };
    items.push((Key::new(ino, ItemType::INODE_REF, parent), encoded(&name)?));
    Ok(())
}

fn encoded<'a>(entry: &impl Entry<'a>) -> Result<Vec<u8>, FormatError> {
    let mut data = Vec::new();
    entry.write(&mut data)?;
    Ok(data)
}

fn uuid_item(options: &FormatOptions) -> (Key, Vec<u8>) {
    let half = |at: usize| u64::from_le_bytes(std::array::from_fn(|index| options.subvolume_uuid[at + index]));
    let key = Key::new(half(0), ItemType::UUID_SUBVOL, half(8));
    (key, objectid::FS_TREE.to_le_bytes().to_vec())
}

/// Bytes of the nodes in a group.
fn used(options: &FormatOptions, group: &BlockGroup, layout: &Layout, trees: &Trees) -> u64 {
    let is_here = |owner: u64| layout.group_of_tree(owner).logical == group.logical;
    let nodes = trees.iter().filter(|(owner, _)| is_here(**owner)).map(|(_, tree)| tree.addresses.len() as u64);
    nodes.sum::<u64>() * u64::from(options.node_bytes)
}

fn block_groups(options: &FormatOptions, layout: &Layout, trees: &Trees) -> Items {
    let item = |group: &BlockGroup| {
        let item = BlockGroupItem {
            used: used(options, group, layout, trees).into(),
            chunk_objectid: objectid::FIRST_CHUNK_TREE.into(),
            flags: group.flags.bits().into(),
        };
        let key = Key::new(group.logical, ItemType::BLOCK_GROUP_ITEM, group.bytes);
        (key, item.as_bytes().to_vec())
    };
    layout.groups.iter().map(item).collect()
}

/// The bytes of all nodes.
pub(super) fn bytes_used(options: &FormatOptions, trees: &Trees) -> u64 {
    trees.values().map(|tree| tree.addresses.len() as u64).sum::<u64>() * u64::from(options.node_bytes)
}

fn free_space_tree(options: &FormatOptions, layout: &Layout, trees: &Trees) -> Result<Items, FormatError> {
    let mut items = Items::new();
    for group in &layout.groups {
        // The items are taken as they are at the end.
        let mut changes = ItemChanges::new();
        let mut space = GroupFreeSpace::create(group.logical, group.bytes, options.sector_bytes, &mut changes)?;
        let here = trees.iter().filter(|(owner, _)| layout.group_of_tree(**owner).logical == group.logical);
        for address in here.flat_map(|(_, tree)| &tree.addresses) {
            space.remove(*address, u64::from(options.node_bytes), &mut changes)?;
        }
        items.extend(space.items());
    }
    Ok(items)
}

/// The extents of all nodes, and the block groups if they have no tree of their own.
fn extent_tree(
    options: &FormatOptions,
    layout: &Layout,
    trees: &Trees,
    others: &BTreeMap<u64, Items>,
) -> Result<Items, FormatError> {
    let is_skinny = options.incompat.contains(Incompat::SKINNY_METADATA);
    let nodes = trees.iter().flat_map(|(owner, tree)| tree.nodes().map(move |node| (*owner, node)));
    let mut nodes: Vec<_> = nodes.collect();
    nodes.sort_by_key(|(_, node)| node.address);
    let mut keys: Items = match options.block_group_tree {
        true => Items::new(),
        false => block_groups(options, layout, trees),
    };
    let key_of = |address, level| match is_skinny {
        true => Key::new(address, ItemType::METADATA_ITEM, u64::from(level)),
        false => Key::new(address, ItemType::EXTENT_ITEM, u64::from(options.node_bytes)),
    };
    let mut own: Vec<Key> = nodes.iter().map(|(_, node)| key_of(node.address, node.level)).collect();
    own.extend(keys.iter().map(|(key, _)| *key));
    own.sort();
    for (owner, node) in &nodes {
        let first = match *owner {
            objectid::EXTENT_TREE => own.get(node.first_item).copied(),
            other => others[&other].get(node.first_item).map(|(key, _)| *key),
        };
        // An empty tree has no first key.
        let info = (!is_skinny).then(|| TreeBlockInfo::new(first.unwrap_or(Key::MIN), node.level));
        let mut extent = ExtentItemBuf::new(options.first_transaction, ExtentFlags::TREE_BLOCK, info);
        let reference = ExtentRef::TreeBlock { root: *owner };
        extent.add(reference, 1, KeyedRefs::default(), options.node_bytes).map_err(FormatError::Extent)?;
        keys.push((key_of(node.address, node.level), extent.encode()));
    }
    keys.sort_by_key(|(key, _)| *key);
    Ok(keys)
}
