//! The target under comparison: namespaces that are opened on cores as a server opens them, and served by all of its
//! cores.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use anyhow::Context;
use sealblock_block::DynDevice;
use sealblock_exports_nvme_tcp::{Namespace, Subsystem};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_runtime_reactor::{CoreHandle, CoreLocal, now};
use sealblock_stack::target::TargetName;
use sealblock_stack::{Access, CloseLimit, Closer, Usage, open_for, set_cores};
use sealblock_units::{BlockSize, ByteCount};

use super::super::options::{DeviceKind, ScaleOptions};
use crate::load::{self, Until};
use crate::remote::{NQN, listen};
use crate::setup::{self, FILL, Prepared, Protection, Scratch};

/// How long the close of a device may take.
const CLOSE_TIME: Duration = Duration::from_secs(10);

/// A device, and what closes it on its home core.
struct Published {
    shared: SharedDevice,
    home: CoreHandle,
    closer: Option<CoreLocal<Closer>>,
    _file: Option<Scratch>,
}

/// Namespaces on some cores.
pub struct Target {
    /// Its cores.
    pub cores: Vec<CoreHandle>,
    devices: Vec<Published>,
}

impl Target {
    /// Opens the devices, each on one core in turn.
    pub async fn open(kind: DeviceKind, cores: &[CoreHandle], options: &ScaleOptions) -> anyhow::Result<Target> {
        let (mut devices, blocks) = (Vec::new(), options.blocks());
        for (index, home) in (0..options.namespaces.get()).zip(cores.iter().cycle()) {
            let (dir, name) = (options.dir.clone(), format!("scale {} {}", cores.len(), index));
            let (kind, addresses) = ((kind, options.shards), cores.iter().map(CoreHandle::address).collect());
            let opened = home.call(move || {
                set_cores(addresses);
                publish(kind, blocks, dir, name)
            });
            let opened = opened.await;
            let (shared, closer, file) = opened.context("the target's core is gone")??;
            devices.push(Published { shared, home: home.clone(), closer, _file: file });
        }
        Ok(Target { cores: cores.to_vec(), devices })
    }

    /// Starts to serve all of them, until the first core is dropped.
    pub async fn serve(&self) -> anyhow::Result<SocketAddr> {
        let shared: Vec<SharedDevice> = self.shared().collect();
        let first = self.cores.first().context("a target has a core")?;
        let cores = self.cores.clone();
        let served = first.call(move || async move { listen(subsystem(shared)?, cores).await });
        served.await.context("the target's core is gone")?
    }

    /// The devices, in the order of their namespaces.
    pub fn shared(&self) -> impl Iterator<Item = SharedDevice> {
        self.devices.iter().map(|device| device.shared.clone())
    }

    /// Requests that crossed to another core so far, over all devices.
    pub fn crossings(&self) -> u64 {
        self.devices.iter().map(|device| device.shared.crossings()).sum()
    }

    /// Closes the devices, which clients use no more.
    pub async fn close(self) -> anyhow::Result<()> {
        for Published { shared, home, closer, _file } in self.devices {
            let closed = home.call(move || async move {
                shared.close_elsewhere().await;
                match closer.and_then(|closer| closer.get()) {
                    Some(closer) => closer.close(CloseLimit::after(now() + CLOSE_TIME)).await,
                    None => Ok(()),
                }
            });
            closed.await.context("the target's core is gone")??;
        }
        Ok(())
    }
}

fn subsystem(devices: Vec<SharedDevice>) -> anyhow::Result<Subsystem> {
    let mut subsystem = Subsystem::new(NQN.parse().context("our own name")?, "PERF");
    for (index, device) in devices.into_iter().enumerate() {
        let nsid = nsid(index);
        let mut uuid = [0; 16];
        uuid[..4].copy_from_slice(&nsid.to_be_bytes());
        subsystem = subsystem.with_namespace(nsid, Namespace::new(device, uuid))?;
    }
    Ok(subsystem)
}

/// The namespace of a device, by its index.
pub fn nsid(index: usize) -> u32 {
    index as u32 + 1
}

/// Opens a device on this core, which becomes its home, with every block written.
async fn publish(
    (kind, shards): (DeviceKind, u32),
    blocks: u64,
    dir: PathBuf,
    name: String,
) -> anyhow::Result<(SharedDevice, Option<CoreLocal<Closer>>, Option<Scratch>)> {
    let (target, file) = named((kind, shards), blocks, &dir, &name).await?;
    let (device, closer) = match target {
        None => (setup::memory_volume(blocks, Protection::CRC32C).await?, None),
        // In place: a volume that moves blocks while it is idle would do so in the turns of others.
        Some(target) => {
            let (device, _, closer) = open_for(&target, Access::WriteInPlace, Usage::Alone).await?.share();
            (device, Some(CoreLocal::new(Rc::new(closer))))
        }
    };
    if matches!(kind, DeviceKind::Memory | DeviceKind::Shards) {
        // Reading blocks that were never written costs nothing.
        load::drive(DynDevice::clone(&device), FILL, Until::Asked(blocks / FILL.blocks), 1).await?;
    }
    Ok((SharedDevice::publish(device), closer, file))
}

/// What is opened, and its file; the target is `None` for a volume in memory, which has no name.
async fn named(
    (kind, shards): (DeviceKind, u32),
    blocks: u64,
    dir: &Path,
    name: &str,
) -> anyhow::Result<(Option<TargetName>, Option<Scratch>)> {
    let size = ByteCount::new(blocks << BlockSize::B4096.shift());
    Ok(match kind {
        DeviceKind::Null => (Some(TargetName::Null(size)), None),
        DeviceKind::Memory => (Some(TargetName::Memory { size, preallocate: false }), None),
        DeviceKind::File => {
            let file = setup::filled_file(dir, name, blocks).await?;
            (Some(TargetName::Raw(file.0.clone())), Some(file))
        }
        DeviceKind::Volume => {
            let (file, _) = setup::filled_volume(dir, name, blocks, Protection::CRC32C, Prepared::Written).await?;
            (Some(TargetName::File(file.0.clone())), Some(file))
        }
        DeviceKind::Shards => {
            let file = setup::new_path(dir, name)?;
            setup::new_shards(&file.0, blocks, Protection::CRC32C, shards).await?;
            (Some(TargetName::File(file.0.clone())), Some(file))
        }
        DeviceKind::MemoryVolume => (None, None),
    })
}
