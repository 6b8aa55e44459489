//! Rules for the root tree and for the trees about subvolumes: roots, positions of subvolumes, their UUIDs, and quota.

use zerocopy::little_endian::U64;

use super::context::Context;
use crate::items::device::{DevReplaceItem, QgroupStatus};
use crate::items::root::{RootFlags, RootItem, RootRef};
use crate::key::{ItemType, objectid};
use crate::names::MAX_NAME_BYTES;
use crate::refusal::{Rule, aligned, consistent, known, same, within};
use crate::superblock::MAX_LEVELS;

const MAX_LEVEL: u64 = MAX_LEVELS as u64 - 1;

pub(super) fn check_root(context: &Context, root: &RootItem) -> Result<(), Rule> {
    let (key, head) = (context.key, root.head);
    consistent(key.objectid != 0, "a tree without a number")?;
    let is_nameless = key.objectid == objectid::TREE_RELOC && key.offset == 0;
    consistent(!is_nameless, "a relocation of no tree")?;
    context.check_generation("generation", head.generation.get())?;
    context.check_generation("last snapshot", head.last_snapshot.get())?;
    if let Some(tail) = root.tail {
        context.check_generation("second generation", tail.generation_v2.get())?;
    }
    aligned("address of the root node", head.bytenr.get(), context.geometry.sector_bytes)?;
    within("level", head.level, 0, MAX_LEVEL)?;
    within("level of deleting", head.drop_level, 0, MAX_LEVEL)?;
    let progress = head.drop_progress.get();
    let is_dropping = progress.objectid != 0 || progress.item_type.0 != 0 || progress.offset != 0;
    consistent(!is_dropping || head.drop_level > 0, "deleting has come somewhere, at no level")?;
    known("flags", head.flags.get(), RootFlags::all().bits())
}

pub(super) fn check_root_ref(context: &Context, reference: &RootRef) -> Result<(), Rule> {
    let (inner, outer) = match context.key.item_type {
        ItemType::ROOT_REF => (context.key.offset, context.key.objectid),
        _ => (context.key.objectid, context.key.offset),
    };
    consistent(objectid::is_subvolume(inner), "a tree that is no subvolume lies in another")?;
    consistent(objectid::is_subvolume(outer), "a subvolume lies in a tree that is none")?;
    within("directory", reference.dirid, objectid::FIRST_FREE, objectid::LAST_FREE)?;
    within("bytes of a name", reference.name.len() as u64, 1, MAX_NAME_BYTES as u64)
}

pub(super) fn check_uuid(subvolumes: &[U64]) -> Result<(), Rule> {
    let all = subvolumes.iter().all(|id| objectid::is_subvolume(id.get()));
    consistent(all, "a UUID of a tree that is no subvolume")
}

/// Checks that its flags are known: on, rescan in progress, inconsistent, simple.
pub(super) fn check_quota(context: &Context, status: &QgroupStatus) -> Result<(), Rule> {
    same("version", status.head.version.get(), 1_u64)?;
    known("flags", status.head.flags.get(), 0xf)?;
    context.check_generation("generation", status.head.generation.get())
}

/// Checks that its state is one of: never started, started, finished, cancelled, suspended.
pub(super) fn check_replacement(replacement: &DevReplaceItem) -> Result<(), Rule> {
    within("state", replacement.replace_state.get(), 0, 4)
}
