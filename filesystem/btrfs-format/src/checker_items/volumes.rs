//! Rules of chunks, devices, and device extents.

use super::context::Context;
use crate::checksum::ChecksumType;
use crate::features::Incompat;
use crate::items::Item;
use crate::items::chunk::{BlockGroupFlags, Chunk, Profile, STRIPE_BYTES};
use crate::items::device::{DevExtent, DevItem};
use crate::key::{ItemType, Key, objectid};
use crate::refusal::{Rule, aligned, behind, consistent, end, known, same, within};
use crate::superblock::Geometry;

/// Checks a chunk of the chunk tree, or of the superblock's array, under its key.
///
/// # Errors
/// The rule that it breaks.
pub fn check_chunk(geometry: &Geometry, key: Key, chunk: &Chunk) -> Result<(), Rule> {
    let (sector, logical, bytes) = (geometry.sector_bytes, key.offset, chunk.head.length.get());
    same("object of the key", key.objectid, objectid::FIRST_CHUNK_TREE)?;
    aligned("address", logical, sector)?;
    aligned("bytes", bytes, sector)?;
    // The number of a stripe has 32 bits.
    within("bytes", bytes, 1, u64::from(u32::MAX) * STRIPE_BYTES)?;
    end(logical, bytes, "the chunk ends behind the last address")?;
    same("bytes of a stripe", chunk.head.stripe_len.get(), STRIPE_BYTES)?;
    let profile = check_flags(geometry, chunk.head.flags.get())?;
    let stripes = chunk.head.num_stripes.get();
    consistent(profile.allows_stripes(stripes), "the profile does not have so many stripes")?;
    if profile == Profile::Raid10 {
        same("sub-stripes", chunk.head.sub_stripes.get(), 2_u64)?;
    }
    chunk.stripes.iter().try_for_each(|stripe| {
        aligned("offset of a stripe", stripe.offset.get(), sector)?;
        let on_device = bytes / u64::from(profile.data_stripes(stripes).max(1));
        end(stripe.offset.get(), on_device, "a stripe ends behind the largest device").map(drop)
    })
}

/// Checks the flags of a chunk or of a block group: at most one profile, and a valid type.
pub(super) fn check_flags(geometry: &Geometry, bits: u64) -> Result<Profile, Rule> {
    known("flags", bits, BlockGroupFlags::all().bits())?;
    let flags = BlockGroupFlags::from_bits_retain(bits);
    let profile = flags.profile().ok_or(Rule::Contradiction("more than one profile"))?;
    // What is restored from parity has no tags that show which data it is.
    let has_parity = matches!(profile, Profile::Raid5 | Profile::Raid6);
    consistent(!(has_parity && geometry.checksum == ChecksumType::None), "parity in a filesystem without checksums")?;
    let types = flags.intersection(BlockGroupFlags::TYPES);
    let is_mixed = types == BlockGroupFlags::DATA | BlockGroupFlags::METADATA;
    if is_mixed && !geometry.features.incompat.contains(Incompat::MIXED_GROUPS) {
        return Err(Rule::Feature("MIXED_GROUPS"));
    }
    consistent(types.bits().count_ones() == 1 || is_mixed, "neither data nor metadata nor system alone")?;
    Ok(profile)
}

pub(super) fn check_device(context: &Context, device: &DevItem) -> Result<(), Rule> {
    same("object of the key", context.key.objectid, objectid::DEV_ITEMS)?;
    same("number of the device", device.devid.get(), context.key.offset)?;
    within("bytes used", device.bytes_used.get(), 0, device.total_bytes.get())
}

pub(super) fn check_dev_extent(context: &Context, extent: &DevExtent) -> Result<(), Rule> {
    let (sector, start, bytes) = (context.geometry.sector_bytes, context.key.offset, extent.length.get());
    same("chunk tree", extent.chunk_tree.get(), objectid::CHUNK_TREE)?;
    same("chunk object", extent.chunk_objectid.get(), objectid::FIRST_CHUNK_TREE)?;
    for (field, value) in
        [("offset on the device", start), ("address of the chunk", extent.chunk_offset.get()), ("bytes", bytes)]
    {
        aligned(field, value, sector)?;
    }
    within("bytes", bytes, 1, u64::MAX)?;
    end(start, bytes, "the extent ends behind the largest device")?;
    match context.previous_of(ItemType::DEV_EXTENT) {
        Some((key, Item::DevExtent(before))) if key.objectid == context.key.objectid => {
            let before_end = end(key.offset, before.length.get(), "the extent before ends nowhere")?;
            behind("device extent", start, before_end)
        }
        _ => Ok(()),
    }
}
