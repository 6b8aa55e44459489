//! Errors of devices as failures of commands.

use sealblock_block::{Error, ErrorKind as BlockFailure, MediumError, MediumErrorKind};
use sealblock_media_file::OpenError;
use sealblock_media_volume::{IdentityError, ResizeError, VolumeError};

use crate::error::{Cause, StackError};
use crate::holder::{in_use, in_use_below};

/// What to try where what was written last may be missing.
pub(crate) const OLDER: &str =
    "`sealblock copy` or `rescue`, which say so, to take what is there; or another copy of the data";

/// A request that failed.
pub fn of_block(doing: impl Into<String>, error: &Error) -> StackError {
    let (cause, advice) = match error.kind() {
        BlockFailure::Integrity(_) => (Cause::Damaged, Some("`sealblock verify` names every damaged block")),
        // Nothing here expects a tag; a drive answers so if tags of a write no longer match when they arrive.
        BlockFailure::Expectation { .. } => (Cause::Io, None),
        BlockFailure::Miscompare { .. } => (Cause::Damaged, None),
        BlockFailure::Media { .. } => (Cause::Io, None),
        BlockFailure::NoSpace { .. } => (Cause::Full, Some("make room where the volume lies, then again")),
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
pub fn of_open(doing: &str, error: &OpenError) -> StackError {
    match error {
        OpenError::InUse { path } => in_use(doing, path),
        OpenError::Shared { path, below } => in_use_below(doing, path, below),
        OpenError::Mounted { path, device, at } => {
            let at = at.display();
            StackError::new(
                Cause::Refused,
                doing,
                format!("it has the same bytes as {device}, which is mounted at {at}"),
            )
            .on(path.display())
            .advise(format!("`umount {at}`"))
        }
        OpenError::Kind { path, kind } => StackError::new(Cause::Unsuitable, doing, format!("it is {kind}"))
            .on(path.display())
            .advise("the path of a file or a block device"),
        OpenError::System { path, source, .. } => StackError::io(doing, source).on(path.display()),
    }
}

/// A medium that failed.
pub fn of_medium(doing: &str, error: &MediumError) -> StackError {
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
pub fn of_volume(doing: &str, error: &VolumeError) -> StackError {
    match error {
        VolumeError::Medium(medium) => of_medium(doing, medium),
        VolumeError::Layout(layout) => StackError::new(Cause::Usage, doing, layout),
        VolumeError::ReadOnly => StackError::new(Cause::Refused, doing, error),
        VolumeError::Recovery(_) => StackError::new(Cause::Io, doing, error),
        VolumeError::Superblock(_) => StackError::new(Cause::Unsuitable, doing, error),
        VolumeError::Sector { .. } => StackError::new(Cause::Unsuitable, doing, error).advise(
            "`sealblock create NEW --size SIZE` on a medium with such sectors and `sealblock copy VOLUME NEW` convert it; `verify`, `copy`, `rescue` and `serve --read-only` read it as it is",
        ),
        VolumeError::Truncated { .. } => StackError::new(Cause::Unsuitable, doing, error)
            .advise("`sealblock rescue VOLUME TO` copies out what is left of it"),
        VolumeError::Identity(IdentityError::Foreign { .. }) => StackError::new(Cause::Damaged, doing, error)
            .advise("`sealblock rescue VOLUME TO` finds what is left of it without them"),
        VolumeError::Identity(_) => StackError::new(Cause::Damaged, doing, error).advise(
            "`sealblock rescue --identity UUID VOLUME TO` takes it for that volume and copies out what verifies",
        ),
        VolumeError::LogDamaged { .. } => StackError::new(Cause::Older, doing, error).advise(
            "`sealblock rescue VOLUME TO` copies out all that verifies; `copy`, `verify` and `serve --accept-older` read the volume as it is",
        ),
    }
}

/// A volume that was not resized.
pub fn of_resize(doing: &str, error: &ResizeError) -> StackError {
    match error {
        ResizeError::Volume(error) => of_volume(doing, error),
        ResizeError::Member(_) => StackError::new(Cause::Refused, doing, error),
        ResizeError::InUse { .. } => StackError::new(Cause::Refused, doing, error)
            .advise("a larger size, or `sealblock discard` for what is not needed"),
        ResizeError::Room { .. } => StackError::new(Cause::Full, doing, error),
        ResizeError::Limit(_) => StackError::new(Cause::Unsuitable, doing, error),
    }
}
