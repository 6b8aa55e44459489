//! Paths of this machine: files and block devices by their content, and drives by their nodes.

pub(crate) mod backups;
pub(crate) mod drive;
pub(crate) mod files;
mod lost_shard;
pub(crate) mod mapped;
pub(crate) mod occupied;
pub(crate) mod ordinary;
pub(crate) mod seen;
pub(crate) mod shards;
pub(crate) mod signature;

use std::path::Path;
use std::rc::Rc;

use sealblock_media_file::FileMedium;
use sealblock_media_linux::{NodeKind, block_node};

use crate::error::{Cause, StackError};
use crate::opened::OpenTarget;
use crate::opened::held::Access;
use crate::path::drive::{open_blocks, open_generic, open_scsi, options};
use crate::path::files::{FileKind, inspect, medium_of, plain_file, remains_error, volume_as};
use crate::path::mapped::raw_or_mapped;
use crate::path::signature::check_free;
use crate::target::TargetName;

/// Whether the bytes of a plain file may be the blocks of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PlainFilePolicy {
    /// No: the path should be a volume.
    Refused,
    /// Yes: the command needs bytes only.
    Taken,
}

/// What to try instead of writing over remains of a volume.
pub(crate) const FORCE_ADVICE: &str = "use another path, or --force to erase the remains";

/// How to treat the remains of a volume, and other known content, on a drive that is opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RemainsPolicy {
    /// They are not opened: a command would take them for blocks.
    Kept,
    /// They are not overwritten, nor is what has a signature, though the command overwrites the rest.
    NotReplaced,
    /// They are given up.
    Replaced,
}

impl RemainsPolicy {
    fn refuse(self, path: &Path, parts: &str) -> Result<(), StackError> {
        match self {
            RemainsPolicy::Kept => Err(remains_error("open", path, parts)),
            RemainsPolicy::NotReplaced => Err(remains_error("write", path, parts).advise(FORCE_ADVICE)),
            RemainsPolicy::Replaced => Ok(()),
        }
    }
}

/// The content of a medium. A block device that cannot be read where a volume would be recognised, and shows no other trace of one, is read
/// as blocks, of which those are bad; it is written only if remains of a volume would be given up, too.
pub(crate) async fn kind_of(
    medium: &FileMedium,
    access: Access,
    remains: RemainsPolicy,
) -> Result<FileKind, StackError> {
    let is_only_read = medium.is_block_device() && !access.writes();
    match (inspect(medium).await, remains) {
        (Err(error), _) if is_only_read || remains == RemainsPolicy::Replaced => {
            tracing::warn!(path = %medium.path().display(), %error, "cannot tell whether it is a volume; assuming it is not");
            Ok(FileKind::Raw)
        }
        (Err(error), RemainsPolicy::NotReplaced) => Err(error.advise(FORCE_ADVICE)),
        (kind, _) => kind,
    }
}

/// Opens a path as a device.
pub(crate) async fn open_file(
    target: &TargetName,
    path: &Path,
    access: Access,
    plain: PlainFilePolicy,
) -> Result<OpenTarget, StackError> {
    let medium = medium_of(path, access).await?;
    match kind_of(&medium, access, RemainsPolicy::Kept).await? {
        FileKind::Volume => volume_as(target, Rc::new(medium), path, access).await,
        FileKind::Raw if medium.is_block_device() || plain == PlainFilePolicy::Taken => {
            raw_or_mapped(target, path, medium).await
        }
        FileKind::Raw => Err(plain_file(path)),
        FileKind::Remains(parts) => Err(remains_error("open", path, &parts)),
    }
}

/// Opens a drive by its node: as the protected volume on it, or as its blocks.
pub(crate) async fn open_linux(
    target: &TargetName,
    path: &Path,
    drive_makes_tags: Option<bool>,
    access: Access,
    remains: RemainsPolicy,
) -> Result<OpenTarget, StackError> {
    let options = options(drive_makes_tags, access);
    let (kind, block) = (NodeKind::of(path), block_node(path));
    match (kind, &block) {
        (NodeKind::NvmeGeneric, Some(block)) if !block.exists() => {
            return open_generic(target, path, block, options).await;
        }
        (NodeKind::ScsiGeneric, None) => {
            let why = "it is not a disk with a block device of the kernel";
            return Err(StackError::new(Cause::Unsuitable, "open", why).on(path.display()));
        }
        _ => {}
    }
    // A generic node has a block device beside it: opening that shows whether it is in use, and holds it.
    let node = block.as_deref().unwrap_or(path);
    let medium = medium_of(node, access).await?;
    match kind_of(&medium, access, remains).await? {
        FileKind::Volume => return volume_as(target, Rc::new(medium), node, access).await,
        FileKind::Remains(parts) => remains.refuse(node, &parts)?,
        FileKind::Raw if remains == RemainsPolicy::NotReplaced => check_free(&medium, None).await?,
        FileKind::Raw => {}
    }
    match kind {
        NodeKind::NvmeBlock | NodeKind::NvmeGeneric => open_blocks(target, node, medium, options).await,
        NodeKind::ScsiBlock | NodeKind::ScsiGeneric => open_scsi(target, node, medium).await,
        NodeKind::Other => raw_or_mapped(target, node, medium).await,
    }
}
