//! Blocks of a block device by the kernel's ordinary way: with their tags where these travel with reads and writes, and without them
//! where they do not.

use std::path::Path;

use sealblock_block::{Abilities, Device, Geometry, Outcome, Request};
use sealblock_media_file::{FileMedium, RawDevice};
use sealblock_media_linux::{TaggedDevice, WhyNoTags};

use crate::error::{Cause, StackError};
use crate::opened::OpenTarget;
use crate::opened::info::{OrdinaryTags, TargetInfo};
use crate::path::files::{NO_ROOM, raw, raw_block_size};
use crate::target::TargetName;

/// The kind of a block device whose blocks have no tags here.
const RAW: &str = "raw block device";
/// The kind of one whose blocks have some.
const TAGGED: &str = "block device with tags";

/// Blocks by the kernel's ordinary way.
pub(crate) enum OrdinaryBlocks {
    /// Without tags.
    Raw(RawDevice),
    /// With tags of this host.
    Tagged(TaggedDevice<RawDevice>),
}

impl OrdinaryBlocks {
    /// The blocks of a medium, and what there is to say of their tags.
    pub(crate) async fn open(
        path: &Path,
        medium: FileMedium,
    ) -> Result<(OrdinaryBlocks, Option<OrdinaryTags>), StackError> {
        let (file, is_direct, size) = (medium.file().clone(), medium.is_direct(), raw_block_size(&medium));
        let is_block_device = medium.is_block_device();
        let blocks = RawDevice::new(medium, size)
            .map_err(|error| StackError::new(Cause::Unsuitable, "open", error).on(path.display()))?;
        if !is_block_device {
            return Ok((OrdinaryBlocks::Raw(blocks), None));
        }
        match TaggedDevice::open(file, is_direct, blocks).await {
            Ok(device) => {
                let tags = OrdinaryTags::Travel(device.profile().clone());
                Ok((OrdinaryBlocks::Tagged(device), Some(tags)))
            }
            Err((WhyNoTags::NoProfile, blocks)) => Ok((OrdinaryBlocks::Raw(blocks), None)),
            Err((why, blocks)) => {
                tracing::info!(path = %path.display(), %why, "its tags are not usable on this host");
                Ok((OrdinaryBlocks::Raw(blocks), Some(OrdinaryTags::Stay { why: why.to_string() })))
            }
        }
    }

    /// The kind of the device, as text.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            OrdinaryBlocks::Raw(_) => RAW,
            OrdinaryBlocks::Tagged(_) => TAGGED,
        }
    }
}

/// Opens a block device that has no volume, or the bytes of a file.
pub(crate) async fn open_ordinary(
    target: &TargetName,
    path: &Path,
    medium: FileMedium,
) -> Result<OpenTarget, StackError> {
    if !medium.is_block_device() {
        return raw(target, path, medium);
    }
    let file = medium.describe().ok();
    let (blocks, tags) = OrdinaryBlocks::open(path, medium).await?;
    let info = TargetInfo { file, tags, ..TargetInfo::plain(blocks.kind()) };
    Ok(OpenTarget::leaf(target, blocks, info, Vec::new(), NO_ROOM))
}

impl Device for OrdinaryBlocks {
    fn geometry(&self) -> &Geometry {
        match self {
            OrdinaryBlocks::Raw(blocks) => blocks.geometry(),
            OrdinaryBlocks::Tagged(blocks) => blocks.geometry(),
        }
    }

    fn abilities(&self) -> Abilities {
        match self {
            OrdinaryBlocks::Raw(blocks) => blocks.abilities(),
            OrdinaryBlocks::Tagged(blocks) => blocks.abilities(),
        }
    }

    async fn execute(&self, request: Request) -> Outcome {
        match self {
            OrdinaryBlocks::Raw(blocks) => blocks.execute(request).await,
            OrdinaryBlocks::Tagged(blocks) => blocks.execute(request).await,
        }
    }
}
