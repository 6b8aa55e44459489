//! Errors of devices as failures of commands.

use sealblock_block::{BadBlockCause, Error, ErrorKind as BlockFailure, MediumError, MediumErrorKind};
use sealblock_media_file::OpenError;
use sealblock_media_volume::format::ContainerError;
use sealblock_media_volume::{IdentityError, ResizeError, VolumeError};

use crate::error::{CHECK_PATH, Cause, StackError};
use crate::kernel::holder::{in_use, in_use_below};

/// What to try where what was written last may be missing.
pub(crate) const OLDER: &str =
    "use `sealblock copy` or `rescue` to copy the blocks as they are, or another copy of the data";

/// The same for a target that is no volume by itself, which `rescue` does not take.
pub(crate) const OLDER_GROUP: &str = "use `sealblock copy` to copy the blocks as they are, or another copy of the data";

/// What to try where a block can be read once replicas were compared.
const SETTLE: &str = "`sealblock verify MIRROR --repair` compares the replicas";

/// True if blocks are bad, but not lost: they can be read once the mirror was opened for writing.
pub(crate) fn is_unsettled(error: &Error) -> bool {
    let mut bad_blocks = error.bad_blocks().map_or(&[][..], |bad_blocks| bad_blocks.as_slice()).iter();
    bad_blocks.any(|bad| bad.cause == BadBlockCause::Unsettled)
}

/// A request that failed.
pub fn device_error(doing: impl Into<String>, error: &Error) -> StackError {
    let (cause, advice) = match error.kind() {
        BlockFailure::Integrity(_) if is_unsettled(error) => (Cause::Unreachable, Some(SETTLE)),
        BlockFailure::Integrity(_) => (Cause::Damaged, Some("`sealblock verify` lists every damaged block")),
        // Nothing here expects a tag; a drive answers so if tags of a write no longer match when they arrive.
        BlockFailure::Expectation { .. } => (Cause::Io, None),
        BlockFailure::Miscompare { .. } => (Cause::Damaged, None),
        BlockFailure::Media { .. } => (Cause::Io, None),
        BlockFailure::NoSpace { .. } => (Cause::Full, Some("free space on the volume's medium, then try again")),
        BlockFailure::ReadOnly => (Cause::Refused, None),
        BlockFailure::Range { .. } => (Cause::Usage, None),
        BlockFailure::Limit { .. } => (Cause::Unsuitable, None),
        BlockFailure::Absent(_) => (Cause::Absent, None),
        BlockFailure::MayBeOlder(_) => (Cause::Older, Some(OLDER)),
        BlockFailure::Unreachable { .. } => (Cause::Unreachable, None),
    };
    // The device name repeats a target of one device, and names the device of a target of several.
    let failure = StackError::new(cause, doing, error.kind());
    error.device_name().map_or(failure.clone(), |hop| failure.on(hop)).advise_if(advice)
}

/// A file or block device that could not be opened.
pub fn open_error(doing: &str, error: &OpenError) -> StackError {
    match error {
        OpenError::InUse { path } => in_use(doing, path),
        OpenError::Shared { path, below } => in_use_below(doing, path, below),
        OpenError::Mounted { path, device, at } => {
            let at = at.display();
            StackError::new(
                Cause::Refused,
                doing,
                format!("it shares its data with {device}, which is mounted at {at}"),
            )
            .on(path.display())
            .advise(format!("`umount {at}`"))
        }
        OpenError::Kind { path, kind } => {
            let failure = StackError::new(Cause::Unsuitable, doing, format!("it is {kind}")).on(path.display());
            failure.advise(match *kind {
                "a character device" => {
                    "give a file or a block device; `sealblock copy` reads and writes streams as `-`"
                }
                _ => "give the path of a file or a block device",
            })
        }
        OpenError::ReadOnlyDevice { path } => {
            StackError::new(Cause::Refused, doing, "it is a read-only block device").on(path.display()).advise(
                "read it (`verify`, `copy` from it, `serve --read-only`), or make it writable (`blockdev --setrw`)",
            )
        }
        OpenError::System { path, source, .. } => {
            let failure = StackError::at_path(doing, source, path);
            // Where its folder is there, a volume can be made at the path.
            let is_creatable = failure.advice() == Some(CHECK_PATH);
            failure.advise_if(is_creatable.then_some("check the path; `sealblock create` creates a volume"))
        }
    }
}

/// What helps where a shard of a volume is lost.
const WITHOUT_SHARD: &str = "`sealblock rescue VOLUME TO` copies out the blocks of the other shards";

/// A medium that failed.
pub fn medium_error(doing: &str, error: &MediumError) -> StackError {
    let cause = match error.kind {
        MediumErrorKind::NoSpace => Cause::Full,
        MediumErrorKind::ReadOnly => Cause::Refused,
        MediumErrorKind::PastEnd => Cause::Unsuitable,
        MediumErrorKind::Unsupported => Cause::Absent,
        MediumErrorKind::Failed => Cause::Io,
    };
    StackError::new(cause, doing, error)
}

/// A volume that could not be created or opened.
pub fn volume_error(doing: &str, error: &VolumeError) -> StackError {
    match error {
        VolumeError::Medium(medium) => medium_error(doing, medium),
        VolumeError::Layout(layout) => StackError::new(Cause::Usage, doing, layout),
        VolumeError::Container(ContainerError::TooSmall { .. }) => {
            StackError::new(Cause::Usage, doing, error).advise("use fewer shards or a larger size")
        }
        VolumeError::Container(_) => StackError::new(Cause::Unsuitable, doing, error),
        VolumeError::TwoContainers => StackError::new(Cause::Damaged, doing, error)
            .of_known_volume()
            .advise("use another copy of the data"),
        VolumeError::ForeignShard { .. } | VolumeError::OtherShard => {
            StackError::new(Cause::Damaged, doing, error).of_known_volume().advise(WITHOUT_SHARD)
        }
        VolumeError::Shard { shard, error } => {
            let failure = volume_error(doing, error).of_part(&format!("shard {shard}"));
            match &**error {
                VolumeError::Superblock(_) => failure.of_known_volume().advise(WITHOUT_SHARD),
                _ => failure,
            }
        }
        VolumeError::ReadOnly => StackError::new(Cause::Refused, doing, error),
        VolumeError::Recovery(_) => StackError::new(Cause::Io, doing, error),
        VolumeError::Superblock(_) => StackError::new(Cause::Unsuitable, doing, error),
        VolumeError::Sector { .. } => StackError::new(Cause::Unsuitable, doing, error).advise(
            "convert it with `sealblock create NEW --size SIZE` on a medium with such sectors and `sealblock copy VOLUME NEW`; `verify`, `copy`, `rescue` and `serve --read-only` can read it as it is",
        ),
        VolumeError::Truncated { .. } => StackError::new(Cause::Unsuitable, doing, error)
            .of_known_volume()
            .advise("`sealblock rescue VOLUME TO` copies out the remaining blocks"),
        VolumeError::Identity(IdentityError::Foreign { .. }) => StackError::new(Cause::Damaged, doing, error)
            .of_known_volume()
            .advise("`sealblock rescue VOLUME TO` finds the remaining blocks without them"),
        VolumeError::Identity(_) => StackError::new(Cause::Damaged, doing, error).of_known_volume().advise(
            "`sealblock rescue --identity UUID VOLUME TO` treats it as that volume and copies out the blocks that verify",
        ),
        VolumeError::LogDamaged { .. }
        | VolumeError::RolledBack { .. }
        | VolumeError::LogAfterClose { .. }
        | VolumeError::NewerPages => StackError::new(Cause::Older, doing, error).advise(
            "`sealblock rescue VOLUME TO` copies out all blocks that verify; `copy`, `verify` and `serve --accept-older` read the volume as it is",
        ),
    }
}

/// A volume that was not resized.
pub fn resize_error(doing: &str, error: &ResizeError) -> StackError {
    match error {
        ResizeError::Volume(error) => volume_error(doing, error),
        ResizeError::Member(_) => StackError::new(Cause::Refused, doing, error),
        ResizeError::InUse { .. } => StackError::new(Cause::Refused, doing, error)
            .advise("use a larger size, or `sealblock discard` unneeded blocks"),
        ResizeError::Room { .. } => StackError::new(Cause::Full, doing, error),
        ResizeError::Limit(_) => StackError::new(Cause::Unsuitable, doing, error),
    }
}
