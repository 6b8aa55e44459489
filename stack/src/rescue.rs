//! Volumes of which something is lost, opened for reading what is left: with a medium that is too short, and without any superblock.
//!
//! Nothing else opens them so: everywhere else they are refused.

use std::path::Path;
use std::rc::Rc;

use futures_util::future::LocalBoxFuture;
use sealblock_media_volume::rescue::profile::Hints;
use sealblock_media_volume::rescue::{Remains, RemainsError, open_remains};
use sealblock_media_volume::shards::{find_first_shard, probe_shards};
use sealblock_media_volume::{OpenOptions, VolumeMedium};

use crate::error::{Cause, StackError};
use crate::failures::volume_error;
use crate::opened::OpenTarget;
use crate::opened::held::Access;
use crate::opened::info::TargetInfo;
use crate::opened::out_of_sync::mark;
use crate::path::files::{medium_of, open_on, options};
use crate::program::ReactorClock;
use crate::target::TargetName;

/// Opens the volume at a path for reading, also if its medium was truncated, or its blocks may be older than
/// what was written; as the volume with this identity, if one is given.
///
/// # Errors
/// When there is none, or it cannot be opened.
pub fn open_truncated<'a>(
    target: &'a TargetName,
    path: &'a Path,
    identity: Option<[u8; 16]>,
) -> LocalBoxFuture<'a, Result<OpenTarget, StackError>> {
    Box::pin(async move {
        let medium = medium_of(path, Access::ReadOlder).await?;
        if identity.is_some() && matches!(probe_shards(&medium).await, Ok(Some(_))) {
            let why = "the identities of its shards follow from that of the volume";
            return Err(StackError::new(Cause::Usage, "open", why).on(path.display()).advise("omit --identity"));
        }
        let options = OpenOptions { truncated: true, identity, ..options(&medium, Access::ReadOlder) };
        Ok(mark(open_on(target, Rc::new(medium), path, options).await?).await)
    })
}

/// Opens the remains of a volume without a superblock, for reading.
///
/// # Errors
/// If no layout fits the remains, or the medium fails.
pub fn open_shapeless<'a>(
    target: &'a TargetName,
    path: &'a Path,
    hints: &'a Hints,
) -> LocalBoxFuture<'a, Result<(OpenTarget, Remains), StackError>> {
    Box::pin(async move {
        const ACTION: &str = "determine the layout";
        const HINT: &str =
            "give the capacity that the volume was created with as --capacity SIZE, or use another copy of the data";
        let medium = medium_of(path, Access::Read).await?;
        if let Some(at) = find_first_shard(&medium).await {
            let why = format!(
                "every superblock of the volume is lost; it was in shards, the first of which begins at byte {at}"
            );
            return Err(StackError::new(Cause::Damaged, ACTION, why).on(path.display()).advise(
                "each shard is a volume by itself: copy it to a file of its own and rescue that, or use another copy of the data",
            ));
        }
        let file = medium.describe().ok();
        let (opened, remains) =
            open_remains(VolumeMedium::whole(Rc::new(medium)), ReactorClock, hints, &OpenOptions::default())
                .await
                .map_err(|error| match error {
                    RemainsError::Volume(error) => volume_error(ACTION, &error).on(path.display()),
                    RemainsError::Resized => StackError::new(Cause::Damaged, ACTION, error)
                        .on(path.display())
                        .advise("use another copy of the data"),
                    RemainsError::Profile(why) => {
                        let why = format!("no superblock is left, and {why}");
                        StackError::new(Cause::Damaged, ACTION, why).on(path.display()).advise(HINT)
                    }
                })?;
        let info = TargetInfo {
            volume: Some(opened.description),
            file,
            ..TargetInfo::plain("the remains of a protected volume")
        };
        Ok((OpenTarget::volume(target, opened.volume, info).await, remains))
    })
}
