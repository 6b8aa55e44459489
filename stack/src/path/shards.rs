//! Volumes in shards: several volumes in one file, each on a core of its own where the program has several.
//!
//! On one core, the shards are devices like any other. On several, each shard is a shared device of its core, and the
//! volume is open on every core: there it is made of attachments to the shards, so that a request crosses to the core
//! of its blocks, or not at all. The core that opened the volume closes it, and keeps its list of bad blocks.

use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use futures_util::future::{LocalBoxFuture, join_all};
use sealblock_block::{Device, DynDevice, Error, ErrorKind};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_layers_stripe::ShardLayer;
use sealblock_media_file::{FileElsewhere, FileMedium};
use sealblock_media_volume::format::Container;
use sealblock_media_volume::shards::{Shards, summarise};
use sealblock_media_volume::{OpenOptions, OpenVolume, VolumeError, VolumeInfo, WhyLost};
use sealblock_runtime_reactor::{CoreAddress, CoreLocal, spawn};
use sealblock_units::{ByteCount, Lba};

use crate::error::{Cause, StackError};
use crate::failures::volume_error;
use crate::opened::OpenTarget;
use crate::opened::info::TargetInfo;
use crate::opened::lost_metadata::warn_of_losses;
use crate::opened::shards::{FileVolume, ShardedVolume};
use crate::path::lost_shard::LostShard;
use crate::program::{ReactorClock, cores, note, on_core};
use crate::target::TargetName;

/// A shard that a core has opened.
struct OpenShard {
    volume: CoreLocal<FileVolume>,
    description: VolumeInfo,
    may_be_lost: Option<WhyLost>,
    device: ShardDevice,
}

/// A shard as its volume uses it.
enum ShardDevice {
    /// On this core, which is the only one.
    Here(CoreLocal<DynDevice>),
    /// On some core.
    Shared(SharedDevice),
}

impl ShardDevice {
    fn publish(device: DynDevice, is_alone: bool) -> ShardDevice {
        match is_alone {
            true => ShardDevice::Here(CoreLocal::new(Rc::new(device))),
            false => ShardDevice::Shared(SharedDevice::publish(device)),
        }
    }

    /// What has the place of a shard that is lost.
    fn lost_beside(&self, why: String) -> ShardDevice {
        let (lost, is_alone) = match self {
            ShardDevice::Here(other) => {
                (LostShard::beside(&*other.get().expect("it was opened on this core"), why), true)
            }
            ShardDevice::Shared(other) => (LostShard::beside(&other.attach(), why), false),
        };
        ShardDevice::publish(DynDevice::new("a lost shard", lost), is_alone)
    }
}

/// Opens the volume in shards on a medium; `None` if there is none.
pub(crate) fn open_shards<'a>(
    target: &'a TargetName,
    medium: Rc<FileMedium>,
    path: &'a Path,
    options: OpenOptions,
) -> LocalBoxFuture<'a, Result<Option<OpenTarget>, StackError>> {
    Box::pin(async move { open_shards_on(target, &medium, path, &options).await })
}

async fn open_shards_on(
    target: &TargetName,
    medium: &Rc<FileMedium>,
    path: &Path,
    options: &OpenOptions,
) -> Result<Option<OpenTarget>, StackError> {
    let failed = |error: &VolumeError| volume_error("open", error).on(path.display());
    let Some(shards) = Shards::find(medium, options).await.map_err(|error| failed(&error))? else { return Ok(None) };
    let (mut opened, mut lost) = (Vec::new(), Vec::new());
    let opening = shards.numbers().map(|shard| open_on_its_core(&shards, medium, path, shard));
    for (shard, outcome) in (0..).zip(join_all(opening).await) {
        match outcome {
            Ok(open) => opened.push((shard, open)),
            Err(error) => lost.push((shard, error)),
        }
    }
    let may_be_lost = opened.iter().find_map(|(_, shard)| shard.may_be_lost);
    let volumes = opened.iter().map(|(_, shard)| shard.volume.clone()).collect();
    let volume = Rc::new(ShardedVolume::new(path, volumes, may_be_lost));
    let is_read_without = shards.reads_what_is_left() && !opened.is_empty();
    if !is_read_without && !lost.is_empty() {
        let (_, mut refused) = lost.swap_remove(0);
        if shards.reads_what_is_left() {
            refused = refused.advise("use another copy of the data");
        }
        // The error that is returned counts; a shard that is not closed is recovered by the next open.
        drop(volume.close().await);
        return Err(refused);
    }
    shards.repair(medium).await;
    let infos: Vec<(u32, VolumeInfo)> = opened.iter().map(|(shard, open)| (*shard, open.description.clone())).collect();
    let description = summarise(shards.container(), shards.copies(), &infos);
    warn_of_losses(path, &description, options.read_only);
    let file = medium.describe().ok();
    let info = TargetInfo { volume: Some(description), file, ..TargetInfo::plain("protected volume") };
    let mut devices: Vec<(u32, ShardDevice)> = opened.into_iter().map(|(shard, open)| (shard, open.device)).collect();
    for (shard, error) in lost {
        let why = error.in_short();
        note(format_args!("all blocks of a shard are lost: {why}"));
        devices.push((shard, devices[0].1.lost_beside(why)));
    }
    devices.sort_by_key(|(shard, _)| *shard);
    let devices = devices.into_iter().map(|(_, device)| device).collect();
    Ok(Some(assemble(target, *shards.container(), devices, volume, info).await?))
}

/// Makes one device of the shards.
async fn assemble(
    target: &TargetName,
    container: Container,
    devices: Vec<ShardDevice>,
    volume: Rc<ShardedVolume>,
    info: TargetInfo,
) -> Result<OpenTarget, StackError> {
    let (mut here, mut shared) = (Vec::new(), Vec::new());
    for device in devices {
        match device {
            ShardDevice::Here(device) => here.extend(device.get().map(|device| DynDevice::clone(&device))),
            ShardDevice::Shared(device) => shared.push(device),
        }
    }
    if shared.is_empty() {
        let layer = layer(here, &container).map_err(|error| StackError::new(Cause::Io, "open", error).on(target))?;
        return Ok(OpenTarget::shards(target, layer, None, volume, info).await);
    }
    let shared: Arc<[SharedDevice]> = shared.into();
    let open = move || {
        let attached = shared.iter().map(SharedDevice::attach).collect();
        layer(attached, &container).map(ShardLayer::sealed_before)
    };
    let device = open().map_err(|error| StackError::new(Cause::Io, "open", error).on(target))?;
    Ok(OpenTarget::shards(target, device, Some(Arc::new(open)), volume, info).await)
}

fn layer<D: Device>(shards: Vec<D>, container: &Container) -> Result<ShardLayer<D>, Error> {
    let unit = ByteCount::new(container.unit_blocks() << container.block_size().shift());
    let layer = ShardLayer::new(shards, unit, container.capacity_blocks());
    // The shards have been checked, so this is an error of the program.
    layer.map_err(|error| ErrorKind::Unreachable { reason: error.to_string() }.into())
}

/// Opens a shard on the core that it belongs to: the shards go round the cores, from this one on.
async fn open_on_its_core(
    shards: &Shards,
    medium: &Rc<FileMedium>,
    path: &Path,
    shard: u32,
) -> Result<OpenShard, StackError> {
    let cores = cores();
    let home = cores.iter().position(CoreAddress::is_here).unwrap_or(0);
    let is_alone = cores.len() < 2;
    let core = cores.get((home + shard as usize) % cores.len().max(1)).filter(|core| !core.is_here());
    let Some(core) = core else { return open_here(shards, Rc::clone(medium), path, shard, is_alone).await };
    let gone = |error: &dyn std::fmt::Display| StackError::new(Cause::Io, "open", error).on(path.display());
    let elsewhere: FileElsewhere = medium.elsewhere().map_err(|error| gone(&error))?;
    let (shards, path_there) = (shards.clone(), path.to_owned());
    let opened = on_core(core, move || async move {
        let medium = elsewhere.open_here().map_err(|error| StackError::at_path("open", &error, &path_there))?;
        open_here(&shards, Rc::new(medium), &path_there, shard, false).await
    });
    opened.await.ok_or_else(|| gone(&"a core has stopped"))?
}

/// Opens a shard on this core; with `is_alone`, for this core only.
async fn open_here(
    shards: &Shards,
    medium: Rc<FileMedium>,
    path: &Path,
    shard: u32,
    is_alone: bool,
) -> Result<OpenShard, StackError> {
    let opened = shards.open(medium, ReactorClock, shard).await;
    let OpenVolume { volume, worker, description } =
        opened.map_err(|error| volume_error("open", &error).on(path.display()))?;
    drop(spawn(worker.run()));
    let device = DynDevice::new(format!("{}, shard {shard}", path.display()), Rc::clone(&volume));
    let device = ShardDevice::publish(device, is_alone);
    Ok(OpenShard { may_be_lost: volume.may_be_lost(), volume: CoreLocal::new(volume), description, device })
}

/// Opens the shard of a block by itself, and returns the block's place in it; `None` if no volume in shards is on the
/// medium.
pub(crate) async fn open_shard(
    medium: Rc<FileMedium>,
    path: &Path,
    lba: Lba,
    options: &OpenOptions,
) -> Result<Option<(Rc<FileVolume>, Lba)>, StackError> {
    let failed = |error: VolumeError| volume_error("open", &error).on(path.display());
    let Some(shards) = Shards::find(&medium, options).await.map_err(failed)? else { return Ok(None) };
    let container = *shards.container();
    if lba.get() >= container.capacity_blocks() {
        let last = container.capacity_blocks() - 1;
        let why = format!("block {lba} is past the last block, {last}");
        let refused = StackError::new(Cause::Usage, format!("open the shard of block {lba}"), why);
        return Err(refused.on(path.display()).advise(format!("give a block from 0 to {last}")));
    }
    let (shard, place) = container.shard_of(lba);
    let opened = shards.open(medium, ReactorClock, shard).await.map_err(failed)?;
    drop(spawn(opened.worker.run()));
    Ok(Some((opened.volume, place)))
}
