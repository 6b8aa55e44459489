//! Rules for trees of files: inodes, names, attributes, file extents, and the checksums of their data.

use super::context::{Context, check_inode_number};
use crate::checksum::ChecksumType;
use crate::compress::MAX_EXTENT_BYTES;
use crate::items::Item;
use crate::items::directory::{DirEntry, ENTRY_HEAD_BYTES, FileType};
use crate::items::entries::Entries;
use crate::items::file_extent::{Compression, FileExtent};
use crate::items::inode::{InodeExtref, InodeFlags, InodeItem};
use crate::key::{ItemType, objectid};
use crate::names::{MAX_NAME_BYTES, extref_hash, name_hash};
use crate::node::{ItemHead, leaf_capacity};
use crate::refusal::{Rule, aligned, behind, consistent, end, known, same, within};

/// The bits of a mode for the file type, and the valid types.
const KIND_MASK: u32 = 0o170_000;
/// The bits of a mode for permissions, and for setuid, setgid and sticky.
const PERMISSIONS: u32 = 0o7777;
const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const KINDS: [u32; 7] = [0o010_000, 0o020_000, DIRECTORY, 0o060_000, REGULAR, 0o120_000, 0o140_000];
/// Unknown flags above these forbid only writing.
const LOW_FLAGS: u64 = u32::MAX as u64;

pub(super) fn check_inode(context: &Context, inode: &InodeItem) -> Result<(), Rule> {
    check_inode_number("inode", context.key.objectid)?;
    same("offset of the key", context.key.offset, 0_u64)?;
    context.check_generation("generation", inode.generation.get())?;
    context.check_generation("transid", inode.transid.get())?;
    let kind = inode.mode.get() & KIND_MASK;
    if !KINDS.contains(&kind) {
        return Err(Rule::Unknown { field: "kind in the mode", found: u64::from(inode.mode.get()) });
    }
    known("mode", inode.mode.get().into(), u64::from(KIND_MASK | PERMISSIONS))?;
    if kind == DIRECTORY {
        within("links of a directory", inode.nlink.get(), 0, 1)?;
    }
    // Whoever reads a file asks only its flags whether its data have checksums.
    let may_have_sums = kind == REGULAR && !inode.flags().contains(InodeFlags::NODATASUM);
    let has_none = context.geometry.checksum == ChecksumType::None;
    consistent(!(may_have_sums && has_none), "a file with checksums in a filesystem without them")?;
    known("flags", inode.flags.get() & LOW_FLAGS, InodeFlags::all().bits())
}

pub(super) fn check_refs<'a>(context: &Context, mut names: impl Iterator<Item = &'a [u8]>) -> Result<(), Rule> {
    context.check_attached()?;
    names.try_for_each(|name| check_name_length(name, MAX_NAME_BYTES))
}

pub(super) fn check_extrefs(context: &Context, refs: &Entries<InodeExtref>) -> Result<(), Rule> {
    check_refs(context, refs.iter().map(|one| one.name))?;
    refs.iter().try_for_each(|one| {
        same("hash of a name", context.key.offset, extref_hash(one.parent, one.name))?;
        check_inode_number("directory", one.parent)
    })
}

pub(super) fn check_dir_items(context: &Context, entries: &Entries<DirEntry>) -> Result<(), Rule> {
    context.check_attached()?;
    entries.iter().try_for_each(|entry| {
        check_dir_entry(&entry)?;
        same("hash of a name", context.key.offset, name_hash(entry.name))
    })
}

pub(super) fn check_dir_index(context: &Context, entries: &Entries<DirEntry>) -> Result<(), Rule> {
    context.check_attached()?;
    same("entries", entries.iter().count() as u64, 1_u64)?;
    entries.iter().try_for_each(|entry| check_dir_entry(&entry))
}

fn check_dir_entry(entry: &DirEntry) -> Result<(), Rule> {
    let location = entry.location;
    match location.item_type {
        ItemType::ROOT_ITEM => {
            consistent(objectid::is_subvolume(location.objectid), "the entry leads to a tree that is no subvolume")?
        }
        ItemType::INODE_ITEM | ItemType::UNTYPED => {
            check_inode_number("inode of an entry", location.objectid)?;
            same("offset of an entry's key", location.offset, 0_u64)?;
        }
        ItemType(other) => {
            return Err(Rule::Unknown { field: "type of an entry's key", found: u64::from(other) });
        }
    }
    match entry.file_type() {
        None => return Err(Rule::Unknown { field: "kind of an entry", found: u64::from(entry.kind) }),
        Some(FileType::Xattr) => return Err(Rule::Contradiction("an entry of a directory is an attribute")),
        Some(_) => {}
    }
    same("bytes of an entry's value", entry.data.len() as u64, 0_u64)?;
    check_name_length(entry.name, MAX_NAME_BYTES)
}

pub(super) fn check_xattrs(context: &Context, entries: &Entries<DirEntry>) -> Result<(), Rule> {
    context.check_attached()?;
    let most = leaf_capacity(context.geometry.node_bytes) - size_of::<ItemHead>() - ENTRY_HEAD_BYTES;
    entries.iter().try_for_each(|entry| {
        let location = entry.location;
        let is_zero = (location.objectid, location.item_type.0, location.offset) == (0, 0, 0);
        consistent(is_zero, "an attribute leads somewhere")?;
        same("kind of an attribute", entry.kind, FileType::Xattr as u64)?;
        check_name_length(entry.name, MAX_NAME_BYTES)?;
        let length = entry.name.len() + entry.data.len();
        within("bytes of an attribute", length as u64, 1, most as u64)?;
        same("hash of a name", context.key.offset, name_hash(entry.name))
    })
}

fn check_name_length(name: &[u8], most: usize) -> Result<(), Rule> {
    within("bytes of a name", name.len() as u64, 1, most as u64)
}

pub(super) fn check_file_extent(context: &Context, extent: &FileExtent) -> Result<(), Rule> {
    let (sector, head) = (context.geometry.sector_bytes, extent.head());
    aligned("offset of the key", context.key.offset, sector)?;
    context.check_attached()?;
    let unknown = Rule::Unknown { field: "compression", found: u64::from(head.compression) };
    let compression = Compression::from_number(head.compression).ok_or(unknown)?;
    same("encryption", head.encryption, 0_u64)?;
    context.check_generation("generation", head.generation.get())?;
    match extent {
        FileExtent::Inline(_, data) => check_inline(context, head.ram_bytes.get(), compression, data),
        FileExtent::Regular(..) | FileExtent::Prealloc(..) => {
            check_location(context, extent, compression)?;
            let Some((key, Item::FileExtent(before))) = context.previous_of(ItemType::EXTENT_DATA) else {
                return Ok(());
            };
            let before_end = end(key.offset, before.file_bytes(), "the extent before ends nowhere")?;
            behind("extent", context.key.offset, before_end)
        }
    }
}

fn check_inline(context: &Context, ram_bytes: u64, compression: Compression, data: &[u8]) -> Result<(), Rule> {
    same("offset of an inline extent", context.key.offset, 0_u64)?;
    let stored = data.len() as u64;
    match compression {
        Compression::None => same("bytes of an inline extent", stored, ram_bytes),
        _ => within("bytes of a compressed inline extent", ram_bytes, 1, MAX_EXTENT_BYTES as u64),
    }
}

fn check_location(context: &Context, extent: &FileExtent, compression: Compression) -> Result<(), Rule> {
    let sector = context.geometry.sector_bytes;
    let Some(location) = extent.location() else { return Ok(()) };
    let ram_bytes = extent.head().ram_bytes.get();
    let (stored, offset, bytes) = (location.disk_num_bytes.get(), location.offset.get(), location.num_bytes.get());
    for (field, value) in [
        ("bytes uncompressed", ram_bytes),
        ("address of the extent", location.disk_bytenr.get()),
        ("bytes of the extent", stored),
        ("offset in the extent", offset),
        ("bytes of the file", bytes),
    ] {
        aligned(field, value, sector)?;
    }
    within("bytes of the file", bytes, 1, u64::MAX)?;
    end(context.key.offset, bytes, "the extent ends behind the largest file")?;
    end(location.disk_bytenr.get(), stored, "the extent ends behind the last address")?;
    if location.is_hole() {
        return Ok(());
    }
    let used = end(offset, bytes, "the part of the extent ends nowhere")?;
    match compression {
        Compression::None => within("end of the part of the extent", used, 0, stored),
        _ => {
            within("end of the part of the extent", used, 0, ram_bytes)?;
            within("bytes of a compressed extent", stored, 1, MAX_EXTENT_BYTES as u64)?;
            within("bytes of a compressed extent, uncompressed", ram_bytes, 1, MAX_EXTENT_BYTES as u64)
        }
    }
}

pub(super) fn check_csums(context: &Context, csums: &[u8]) -> Result<(), Rule> {
    same("object of the key", context.key.objectid, objectid::EXTENT_CSUM)?;
    aligned("offset of the key", context.key.offset, context.geometry.sector_bytes)?;
    let csum_bytes = context.geometry.checksum.bytes();
    consistent(csum_bytes > 0, "checksums in a filesystem without them")?;
    consistent(!csums.is_empty(), "no checksum at all")?;
    aligned("bytes of all checksums", csums.len() as u64, csum_bytes as u32)?;
    end_of_csums(context, context.key.offset, csums)?;
    let Some((key, Item::Csums(before))) = context.previous_of(ItemType::EXTENT_CSUM) else { return Ok(()) };
    behind("run of checksums", context.key.offset, end_of_csums(context, key.offset, before)?)
}

fn end_of_csums(context: &Context, start: u64, csums: &[u8]) -> Result<u64, Rule> {
    let sectors = csums.len() / context.geometry.checksum.bytes();
    // Both are smaller than a node.
    end(start, sectors as u64 * u64::from(context.geometry.sector_bytes), "checksums behind the last address")
}
