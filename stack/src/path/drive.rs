//! Drives of this machine: opened so that the drive itself verifies, compares and zeroes where it can, and as ordinary block devices
//! where the kernel or the drive does not let them.

use std::path::Path;

use sealblock_media_file::{FileMedium, RawDevice};
use sealblock_media_linux::{NodeKind, NvmeDevice, NvmeNamespace, OpenError, Options, PiSource, ScsiDevice};
use sealblock_runtime_reactor::File;

use crate::error::{Cause, StackError};
use crate::opened::OpenTarget;
use crate::opened::held::Access;
use crate::opened::info::{DriveInfo, TargetInfo};
use crate::path::files::{NO_ROOM, medium_of, raw, raw_block_size};
use crate::path::ordinary::{OrdinaryBlocks, open_ordinary};
use crate::target::TargetName;

/// Opens a drive below another device by the node of its block device, for Verify. Its content is not examined.
pub(crate) async fn open_drive(path: &Path) -> Result<OpenTarget, StackError> {
    let target = TargetName::Linux { path: path.to_owned(), drive_makes_tags: None };
    let medium = medium_of(path, Access::Read).await?;
    match NodeKind::of(path) {
        NodeKind::NvmeBlock => open_blocks(&target, path, medium, options(None, Access::Read)).await,
        NodeKind::ScsiBlock => open_scsi(&target, path, medium).await,
        NodeKind::NvmeGeneric | NodeKind::ScsiGeneric | NodeKind::Other => raw(&target, path, medium),
    }
}

/// Opens the blocks of a SCSI disk, which have no volume.
pub(crate) async fn open_scsi(target: &TargetName, block: &Path, medium: FileMedium) -> Result<OpenTarget, StackError> {
    if !medium.is_direct() {
        // Commands do not see what is in the page cache.
        let why = "the kernel does not allow direct I/O".to_owned();
        return raw(target, block, medium).map(|opened| as_ordinary(opened, why));
    }
    let (file, description) = (medium.file().clone(), medium.describe().ok());
    let (ordinary, tags) = OrdinaryBlocks::open(block, medium).await?;
    match ScsiDevice::open(file, block, ordinary).await {
        Ok(device) => {
            let drive = Some(DriveInfo::Scsi(Box::new(device.info().clone())));
            let info = TargetInfo { file: description, drive, tags, ..TargetInfo::plain("SCSI drive") };
            Ok(OpenTarget::leaf(target, device, info, Vec::new(), NO_ROOM))
        }
        Err((error, ordinary)) => {
            tracing::info!(path = %block.display(), %error, "the drive is used as a plain block device");
            let info = TargetInfo { file: description, tags, ..TargetInfo::plain(ordinary.kind()) };
            Ok(as_ordinary(OpenTarget::leaf(target, ordinary, info, Vec::new(), NO_ROOM), error.to_string()))
        }
    }
}

/// Opens the blocks of an NVMe block device, which have no volume.
pub(crate) async fn open_blocks(
    target: &TargetName,
    block: &Path,
    medium: FileMedium,
    options: Options,
) -> Result<OpenTarget, StackError> {
    match NvmeNamespace::open(medium.file().clone(), block, options).await {
        Ok(namespace) => {
            let file = medium.describe().ok();
            let (size, is_direct) = (raw_block_size(&medium), medium.is_direct());
            // Passthrough does not see what is in the page cache.
            let ordinary = if is_direct { RawDevice::new(medium, size).ok() } else { None };
            let device = NvmeDevice::new(namespace, ordinary);
            let info = TargetInfo { file, ..drive_info(&device) };
            Ok(OpenTarget::leaf(target, device, info, Vec::new(), NO_ROOM))
        }
        Err(error) if error.is_only_the_way() && medium_has_blocks(&medium) => {
            tracing::info!(path = %block.display(), %error, "the drive is used as a plain block device");
            let opened = open_ordinary(target, block, medium).await?;
            Ok(as_ordinary(opened, error.to_string()))
        }
        Err(error) => Err(drive_error(&error, block)),
    }
}

/// Opens a character device whose block device has no node: for reading, since nothing shows whether the blocks are in use.
pub(crate) async fn open_generic(
    target: &TargetName,
    path: &Path,
    block: &Path,
    options: Options,
) -> Result<OpenTarget, StackError> {
    const ACTION: &str = "open";
    if options.write {
        let why = format!("{} is missing, so it is unknown whether the drive is in use", block.display());
        return Err(StackError::new(Cause::Refused, ACTION, why).on(path.display()));
    }
    let reading = sealblock_runtime_reactor::Options { read: true, ..Default::default() };
    let file = File::open(path, reading).map_err(|error| StackError::io(ACTION, &error).on(path.display()))?;
    let namespace = NvmeNamespace::open(file, path, options).await.map_err(|error| drive_error(&error, path))?;
    let device = NvmeDevice::<RawDevice>::new(namespace, None);
    let info = drive_info(&device);
    Ok(OpenTarget::leaf(target, device, info, Vec::new(), NO_ROOM))
}

/// How a drive is used.
pub(crate) fn options(drive_makes_tags: Option<bool>, access: Access) -> Options {
    let source = match drive_makes_tags {
        None => PiSource::Auto,
        Some(false) => PiSource::Host,
        Some(true) => PiSource::Target,
    };
    Options { source, ..if access.writes() { Options::WRITE } else { Options::READ } }
}

fn drive_info<D: sealblock_block::Device>(device: &NvmeDevice<D>) -> TargetInfo {
    let drive = DriveInfo::Nvme { info: device.info().clone(), ordinary: device.uses_ordinary_way() };
    TargetInfo { drive: Some(drive), ..TargetInfo::plain("NVMe namespace") }
}

pub(crate) fn as_ordinary(opened: OpenTarget, why: String) -> OpenTarget {
    let info = TargetInfo { drive: Some(DriveInfo::Ordinary { why }), ..opened.info };
    OpenTarget { info, ..opened }
}

/// True if the kernel itself can read and write the device: it gives no capacity to formats that it does not use.
fn medium_has_blocks(medium: &FileMedium) -> bool {
    sealblock_block::Medium::len_bytes(medium) > 0
}

/// A drive that cannot be used.
fn drive_error(error: &OpenError, path: &Path) -> StackError {
    let (cause, advice) = match error {
        OpenError::Privilege { .. } => (Cause::Refused, Some("run as root, or with the capability CAP_SYS_ADMIN")),
        OpenError::NoPassthrough(_) => (Cause::Unsuitable, None),
        OpenError::System { .. } => (Cause::Io, None),
        OpenError::Refused { .. } | OpenError::Namespace(_) => (Cause::Unsuitable, None),
    };
    StackError::new(cause, "open", error).on(path.display()).advise_if(advice)
}
