//! The rules of items. Each file has the rules of one area.
//!
//! A rule is here if programs that read or change a filesystem rely on it. For items that no program relies on, only
//! the shape is checked; for items of unknown types, nothing.
//!
//! - `files`: inodes, names, attributes, file extents, checksums.
//! - `extents`: extents, references to them, block groups, free space.
//! - `volumes`: chunks, devices, device extents.
//! - `roots`: trees, positions of subvolumes, UUIDs, quota.
//!
//! An item is checked by itself and against the item before it in its leaf. Errors that are visible only in a whole
//! tree or in several trees are not found here, such as two overlapping extents of one file in different leaves, or a
//! wrong count of references.

mod context;
mod extents;
mod files;
mod roots;
#[cfg(test)]
mod tests;
mod volumes;

pub use context::Context;
#[cfg(test)]
pub(crate) use tests::geometry;
pub use volumes::check_chunk;

use crate::items::Item;
use crate::refusal::Rule;

/// Checks the item of the context's key.
///
/// # Errors
/// The rule that it breaks.
pub fn check_item(context: &Context, bytes: &[u8]) -> Result<(), Rule> {
    match Item::decode(context.key, bytes)? {
        Item::Inode(inode) => files::check_inode(context, inode),
        Item::InodeRefs(refs) => files::check_refs(context, refs.iter().map(|one| one.name)),
        Item::InodeExtrefs(refs) => files::check_extrefs(context, &refs),
        Item::Xattrs(entries) => files::check_xattrs(context, &entries),
        Item::DirItems(entries) => files::check_dir_items(context, &entries),
        Item::DirIndex(entries) => files::check_dir_index(context, &entries),
        Item::FileExtent(extent) => files::check_file_extent(context, &extent),
        Item::Csums(csums) => files::check_csums(context, csums),
        Item::Root(root) => roots::check_root(context, &root),
        Item::RootRef(reference) => roots::check_root_ref(context, &reference),
        Item::UuidSubvolumes(subvolumes) => roots::check_uuid(subvolumes),
        Item::QgroupStatus(status) => roots::check_quota(context, &status),
        Item::DevReplace(replacement) => roots::check_replacement(replacement),
        Item::Extent(extent) => extents::check_extent(context, &extent),
        Item::ExtentDataRefs(refs) => extents::check_data_refs(context, &refs),
        Item::SharedDataRef(shared) => extents::check_shared_data_ref(context, shared),
        Item::BlockGroup(group) => extents::check_block_group(context, group),
        Item::FreeSpaceInfo(info) => extents::check_free_space_info(context, info),
        Item::FreeSpaceBitmap(bitmap) => extents::check_free_space_bitmap(context, bitmap),
        Item::Chunk(chunk) => check_chunk(context.geometry, context.key, &chunk),
        Item::Device(device) => volumes::check_device(context, device),
        Item::DevExtent(extent) => volumes::check_dev_extent(context, extent),
        Item::Empty => extents::check_empty(context),
        _ => Ok(()),
    }
}
