//! Devices of this machine that are made of drives (partitions, device-mapper, md), opened so that the drives verify their blocks.
//!
//! Drives are opened for reading, whatever their use, and get only Verify. If a drive does not support Verify, or the kernel does
//! not show how the device is mapped to drives, blocks are read instead, and the reason is reported.

mod device;
mod plan;
#[cfg(test)]
mod tests;

use std::fs;
use std::path::{Path, PathBuf};

use sealblock_block::{Device, DynDevice};
use sealblock_media_file::FileMedium;

use crate::error::StackError;
use crate::kernel::DeviceNumber;
use crate::kernel::below::{DeviceNode, NodeKind, node};
use crate::opened::OpenTarget;
use crate::opened::info::{DriveInfo, TargetInfo};
use crate::path::drive::{as_ordinary, open_drive};
use crate::path::files::{NO_ROOM, raw_block_size};
use crate::path::ordinary::{OrdinaryBlocks, open_ordinary};
use crate::target::TargetName;
use device::MappedDevice;
use plan::Plan;

/// Opens the bytes of a file or block device that are no volume's, so that its drives verify them if it has any.
pub(crate) async fn raw_or_mapped(
    target: &TargetName,
    path: &Path,
    medium: FileMedium,
) -> Result<OpenTarget, StackError> {
    let Some(node) = mapped_node(path, &medium) else { return open_ordinary(target, path, medium).await };
    match drives_of(node, &medium).await {
        Ok((plan, drives)) => mapped(target, path, medium, plan, drives).await,
        Err(why) => {
            tracing::info!(path = %path.display(), why, "blocks are read to be verified");
            open_ordinary(target, path, medium).await.map(|opened| as_ordinary(opened, why))
        }
    }
}

/// The devices below a block device, if it is made of others.
fn mapped_node(path: &Path, medium: &FileMedium) -> Option<DeviceNode> {
    if !medium.is_block_device() {
        return None;
    }
    let about = fs::metadata(path).ok()?;
    let node = node(DeviceNumber::of(&about)).ok()?;
    (!matches!(node.kind, NodeKind::Disk | NodeKind::Loop { .. })).then_some(node)
}

/// A drive of a device that is made of them.
struct MemberDrive {
    path: PathBuf,
    device: DynDevice,
}

/// Opens the drives of a device.
///
/// # Errors
/// In words, why they do not verify its blocks.
async fn drives_of(node: DeviceNode, medium: &FileMedium) -> Result<(Plan, Vec<MemberDrive>), String> {
    if !medium.is_direct() {
        return Err("the kernel does not allow direct I/O".to_owned());
    }
    let block_size = raw_block_size(medium);
    let plan = Plan::new(node, block_size.bytes() as u64)?;
    // What was written through the page cache is not on the drives yet.
    medium.file().sync_data().await.map_err(|error| format!("its page cache cannot be flushed: {error}"))?;
    let mut drives = Vec::with_capacity(plan.drives().len());
    for number in plan.drives() {
        let path = drive_path(plan.node(), *number)?;
        let opened = open_drive(&path).await.map_err(|error| format!("{}: {error}", path.display()))?;
        let geometry = opened.device.geometry();
        if !opened.device.abilities().offloads {
            return Err(format!("{} does not verify by itself{}", path.display(), why_not(&opened.info)));
        }
        if geometry.block_size != block_size {
            let (own, whole) = (geometry.block_size, block_size);
            return Err(format!("{} has blocks of {own} bytes, and not of {whole}", path.display()));
        }
        drives.push(MemberDrive { path, device: opened.device });
    }
    Ok((plan, drives))
}

/// The node of a drive in `/dev`, which has its number.
fn drive_path(node: &DeviceNode, number: DeviceNumber) -> Result<PathBuf, String> {
    let name = name_of(node, number).ok_or_else(|| format!("device {number} has no name"))?;
    let path = Path::new("/dev").join(name);
    match fs::metadata(&path) {
        Ok(about) if DeviceNumber::of(&about) == number => Ok(path),
        Ok(_) => Err(format!("{} is another device than {number}", path.display())),
        Err(error) => Err(format!("{}: {error}", path.display())),
    }
}

fn name_of(node: &DeviceNode, number: DeviceNumber) -> Option<&str> {
    let here = (node.number == number).then_some(node.name.as_str());
    here.or_else(|| node.members.iter().find_map(|member| name_of(member, number)))
}

/// Why a drive does no integrity work, if it is known.
fn why_not(info: &TargetInfo) -> String {
    match &info.drive {
        Some(DriveInfo::Ordinary { why }) => format!(": {why}"),
        Some(DriveInfo::Nvme { info, .. }) => info.refused.first().map_or(String::new(), |why| format!(": {why}")),
        Some(DriveInfo::Scsi(info)) => info.refused.first().map_or(String::new(), |why| format!(": {why}")),
        Some(DriveInfo::Mapped { .. }) | None => String::new(),
    }
}

async fn mapped(
    target: &TargetName,
    path: &Path,
    medium: FileMedium,
    plan: Plan,
    drives: Vec<MemberDrive>,
) -> Result<OpenTarget, StackError> {
    let (file, number) = (medium.describe().ok(), plan.node().number);
    let (ordinary, tags) = OrdinaryBlocks::open(path, medium).await?;
    let names = drives.iter().map(|drive| drive.path.display().to_string()).collect();
    let drive = Some(DriveInfo::Mapped { drives: names });
    let info = TargetInfo { file, drive, tags, ..TargetInfo::plain(ordinary.kind()) };
    let drives = drives.into_iter().map(|drive| drive.device).collect();
    let device = MappedDevice::new(ordinary, plan, drives, Box::new(move || node(number)));
    Ok(OpenTarget::leaf(target, device, info, Vec::new(), NO_ROOM))
}
