//! Rules of extents and their references, of block groups, and of free space.

use super::context::{Context, check_inode_number};
use super::volumes::check_flags;
use crate::features::Incompat;
use crate::items::Item;
use crate::items::chunk::{BlockGroupItem, FreeSpaceInfo};
use crate::items::entries::Entries;
use crate::items::extent::{ExtentDataRef, ExtentFlags, ExtentItem, InlineRef, SharedDataRef};
use crate::key::{ItemType, Key, objectid};
use crate::refusal::{Rule, aligned, behind, consistent, end, known, same, within};
use crate::superblock::MAX_LEVELS;

const MAX_LEVEL: u64 = MAX_LEVELS as u64 - 1;

pub(super) fn check_extent(context: &Context, extent: &ExtentItem) -> Result<(), Rule> {
    let (key, sector, node) = (context.key, context.geometry.sector_bytes, context.geometry.node_bytes);
    aligned("address", key.objectid, sector)?;
    context.check_generation("generation", extent.head.generation.get())?;
    let flags = extent.head.flags();
    known("flags", flags.bits(), ExtentFlags::all().bits())?;
    let is_node = flags.contains(ExtentFlags::TREE_BLOCK);
    consistent(is_node != flags.contains(ExtentFlags::DATA), "an extent is data, or a node, and not both")?;
    consistent(is_node || !flags.contains(ExtentFlags::FULL_BACKREF), "data with the flag of a shared node")?;
    if key.item_type == ItemType::METADATA_ITEM {
        consistent(is_node, "data under the type of a node")?;
        within("level", key.offset, 0, MAX_LEVEL)?;
        if !context.has(Incompat::SKINNY_METADATA) {
            return Err(Rule::Feature("SKINNY_METADATA"));
        }
    } else if is_node {
        same("bytes of a node", key.offset, node)?;
    } else {
        aligned("bytes", key.offset, sector)?;
        within("bytes", key.offset, 1, u64::MAX)?;
    }
    if let Some(info) = extent.tree_block {
        within("level", info.level, 0, MAX_LEVEL)?;
    }
    end_of_extent(context, key)?;
    check_inline_refs(context, extent, is_node)?;
    match context.previous {
        Some((before, _)) if matches!(before.item_type, ItemType::EXTENT_ITEM | ItemType::METADATA_ITEM) => {
            behind("extent", key.objectid, end_of_extent(context, before)?)
        }
        _ => Ok(()),
    }
}

fn end_of_extent(context: &Context, key: Key) -> Result<u64, Rule> {
    let is_metadata = key.item_type == ItemType::METADATA_ITEM;
    let bytes = if is_metadata { u64::from(context.geometry.node_bytes) } else { key.offset };
    end(key.objectid, bytes, "the extent ends behind the last address")
}

fn check_inline_refs(context: &Context, extent: &ExtentItem, is_node: bool) -> Result<(), Rule> {
    let (mut total, mut before) = (0_u64, None);
    for one in extent.refs() {
        let is_of_node = matches!(one, InlineRef::TreeBlock(_) | InlineRef::SharedBlock(_));
        let fits = is_of_node == is_node || matches!(one, InlineRef::Owner(_));
        consistent(fits, "a reference to a node is behind data, or the other way round")?;
        match one {
            InlineRef::TreeBlock(_) => {}
            InlineRef::Owner(_) if context.has(Incompat::SIMPLE_QUOTA) => {}
            InlineRef::Owner(_) => return Err(Rule::Feature("SIMPLE_QUOTA")),
            InlineRef::SharedBlock(parent) => check_parent(context, parent)?,
            InlineRef::SharedData(parent, shared) => {
                check_parent(context, parent)?;
                within("count of a reference", shared.count.get(), 1, u64::from(u32::MAX))?;
            }
            InlineRef::Data(data) => check_data_ref(context, data)?,
        }
        // Duplicates are only detected by their order, because references of different files with the same hash may
        // follow each other.
        let order = one.order();
        if before.replace(order).is_some_and(|before| before > order) {
            return Err(Rule::ReferenceOrder);
        }
        // A leaf has room for at most as many as it has bytes, and each count has 32 bits.
        total += u64::from(one.count());
    }
    within("references counted behind the extent", total, 0, extent.head.refs.get())
}

fn check_parent(context: &Context, parent: u64) -> Result<(), Rule> {
    aligned("parent of a reference", parent, context.geometry.sector_bytes)?;
    within("parent of a reference", parent, 1, u64::MAX)
}

fn check_data_ref(context: &Context, data: &ExtentDataRef) -> Result<(), Rule> {
    let root = data.root.get();
    let has_files = objectid::is_subvolume(root) || matches!(root, objectid::ROOT_TREE | objectid::DATA_RELOC_TREE);
    consistent(has_files, "a file of a tree that has none refers to it")?;
    check_inode_number("inode of a reference", data.objectid.get())?;
    aligned("offset of a reference", data.offset.get(), context.geometry.sector_bytes)?;
    within("count of a reference", data.count.get(), 1, u64::from(u32::MAX))
}

/// The hash is not compared with the key: if two files have the same hash, the item of the second file has the next
/// free number as its offset.
pub(super) fn check_data_refs(context: &Context, refs: &Entries<&ExtentDataRef>) -> Result<(), Rule> {
    aligned("address", context.key.objectid, context.geometry.sector_bytes)?;
    refs.iter().try_for_each(|data| check_data_ref(context, data))
}

pub(super) fn check_shared_data_ref(context: &Context, shared: &SharedDataRef) -> Result<(), Rule> {
    aligned("address", context.key.objectid, context.geometry.sector_bytes)?;
    check_parent(context, context.key.offset)?;
    within("count of a reference", shared.count.get(), 1, u64::from(u32::MAX))
}

pub(super) fn check_block_group(context: &Context, group: &BlockGroupItem) -> Result<(), Rule> {
    let (start, bytes) = (context.key.objectid, context.key.offset);
    aligned("address", start, context.geometry.sector_bytes)?;
    within("bytes", bytes, 1, u64::MAX)?;
    end(start, bytes, "the block group ends behind the last address")?;
    same("chunk object", group.chunk_objectid.get(), objectid::FIRST_CHUNK_TREE)?;
    within("bytes used", group.used.get(), 0, bytes)?;
    check_flags(context.geometry, group.flags.get())?;
    let Some((key, Item::BlockGroup(_))) = context.previous_of(ItemType::BLOCK_GROUP_ITEM) else { return Ok(()) };
    behind("block group", start, end(key.objectid, key.offset, "the block group before ends nowhere")?)
}

pub(super) fn check_free_space_info(context: &Context, info: &FreeSpaceInfo) -> Result<(), Rule> {
    let sector = context.geometry.sector_bytes;
    check_free_range(context)?;
    known("flags", u64::from(info.flags.get()), u64::from(FreeSpaceInfo::USING_BITMAPS))?;
    within("runs of free space", info.extent_count.get(), 0, context.key.offset / u64::from(sector))
}

pub(super) fn check_free_space_bitmap(context: &Context, bitmap: &[u8]) -> Result<(), Rule> {
    check_free_range(context)?;
    let sectors = context.key.offset / u64::from(context.geometry.sector_bytes);
    same("bytes of a bitmap", bitmap.len() as u64, sectors.div_ceil(8))?;
    check_free_before(context)
}

/// Rules of items that consist of the key only: references to nodes, and runs of free space.
pub(super) fn check_empty(context: &Context) -> Result<(), Rule> {
    match context.key.item_type {
        ItemType::TREE_BLOCK_REF => aligned("address", context.key.objectid, context.geometry.sector_bytes),
        ItemType::SHARED_BLOCK_REF => {
            aligned("address", context.key.objectid, context.geometry.sector_bytes)?;
            check_parent(context, context.key.offset)
        }
        ItemType::FREE_SPACE_EXTENT => {
            check_free_range(context)?;
            check_free_before(context)
        }
        _ => Ok(()),
    }
}

fn check_free_range(context: &Context) -> Result<(), Rule> {
    let (start, bytes, sector) = (context.key.objectid, context.key.offset, context.geometry.sector_bytes);
    aligned("address", start, sector)?;
    aligned("bytes", bytes, sector)?;
    within("bytes", bytes, 1, u64::MAX)?;
    end(start, bytes, "free space behind the last address").map(drop)
}

/// Checks that runs of free space and bitmaps do not overlap the item before. The item before the first one of a block
/// group ends where that group's free space may begin.
fn check_free_before(context: &Context) -> Result<(), Rule> {
    match context.previous {
        Some((key, _)) if matches!(key.item_type, ItemType::FREE_SPACE_EXTENT | ItemType::FREE_SPACE_BITMAP) => {
            behind("free space", context.key.objectid, end(key.objectid, key.offset, "free space ends nowhere")?)
        }
        _ => Ok(()),
    }
}
