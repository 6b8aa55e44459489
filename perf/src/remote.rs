//! Our target on one core and our host on another, connected over loopback.
//!
//! All namespaces of a run exist from the start, on one target; only the requested one causes work. Each device is
//! served twice: as plain blocks, and, if it has protection information, also with it.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use sealblock_block::{Device, Durability, DynDevice, Request};
use sealblock_exports_nvme_tcp::{Limits, Namespace, PiVisibility, Subsystem, Target};
use sealblock_integrity::{Sealed, Tags};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_media_file::{FileMedium, Options as FileMediumOptions, RawDevice};
use sealblock_media_memory::MemoryDevice;
use sealblock_media_null::NullDevice;
use sealblock_media_nvme_tcp::{HostPort, NvmeTcpDevice, Options, PiSource as Makes};
use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_runtime_memory::Slice;
use sealblock_runtime_reactor::net::Listener;
use sealblock_runtime_reactor::{Config, CoreHandle, Cores, Placement, Reactor, pool, spawn};
use sealblock_units::{BlockSize, Extent};

use crate::load;
use crate::setup::{self, Protection, Turn, open_volume};

/// The subsystem of our target.
pub const NQN: &str = "nqn.2026-11.org.sealblock:perf";
/// Commands in flight of a queue; one less than the entries of a queue of 256.
const DEPTH: u16 = 255;
/// How long an idle end polls, in microseconds, as in `sealblock serve`.
pub const SPIN_US: u32 = 50;
const FILL_BLOCKS: u64 = 256;

/// The storage of a namespace.
#[derive(Clone)]
pub enum Store {
    /// Nothing.
    Null,
    /// RAM, completely written.
    Memory,
    /// A protected volume in RAM, completely written, with its worker running.
    MemoryVolume,
    /// This file, with direct I/O.
    File(PathBuf),
    /// A protected volume in this file, with direct I/O, whose worker runs in its turns.
    Volume(PathBuf, Turn),
}

impl Store {
    /// When its worker may run, if it has one.
    fn turn(&self) -> Turn {
        match self {
            Store::Volume(_, on_turn) => on_turn.clone(),
            Store::Null | Store::Memory | Store::MemoryVolume | Store::File(_) => Turn::default(),
        }
    }
}

/// A device of the target.
#[derive(Clone)]
pub struct Served {
    /// Its storage.
    pub store: Store,
    /// Its tags.
    pub protection: Protection,
    /// Its number of blocks.
    pub blocks: u64,
}

/// How a host uses a device.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum View {
    /// As plain blocks; the target makes and checks tags, if there are any.
    Plain,
    /// With tags, which the host makes and checks.
    Tagged,
}

/// A target on its own core.
#[derive(Clone)]
pub struct Serving {
    /// The core.
    pub core: CoreHandle,
    /// Its address.
    pub address: SocketAddr,
    /// The turn of each device.
    pub turns: Vec<Turn>,
}

/// A core on each of these CPUs.
pub fn cores(cpus: Vec<usize>, spin_us: u32) -> anyhow::Result<Cores> {
    Ok(Cores::start(Placement::Cpus(cpus), Config { spin_us, ..Config::default() })?)
}

/// A core on this CPU.
pub fn core(cpu: usize, spin_us: u32) -> anyhow::Result<(Cores, CoreHandle)> {
    let cores = cores(vec![cpu], spin_us)?;
    let handle = cores.handle(0).context("there is one core")?;
    Ok((cores, handle))
}

/// Runs work on the main thread, which otherwise only waits.
pub fn wait<T>(work: impl Future<Output = T>) -> anyhow::Result<T> {
    Ok(Reactor::new(Config { pool_arena_bytes: 0, ..Config::default() })?.block_on(work))
}

/// Starts a target for these devices on this CPU.
pub fn start_on(cpu: usize, spin_us: u32, devices: &[Served]) -> anyhow::Result<(Cores, Serving)> {
    let (cores, core) = core(cpu, spin_us)?;
    let devices = devices.to_vec();
    let turns = devices.iter().map(|served| served.store.turn()).collect();
    let address = wait(core.call(move || serve(devices)))?.context("the target's core is gone")??;
    Ok((cores, Serving { core, address, turns }))
}

async fn serve(devices: Vec<Served>) -> anyhow::Result<SocketAddr> {
    let mut subsystem = Subsystem::new(NQN.parse().context("our own name")?, "PERF");
    for (index, served) in devices.iter().enumerate() {
        let device = SharedDevice::publish(served.device().await?);
        for (view, shows) in [(View::Plain, PiVisibility::Plain), (View::Tagged, PiVisibility::Protected)] {
            let nsid = nsid(index, view);
            let mut uuid = [0; 16];
            uuid[..4].copy_from_slice(&nsid.to_be_bytes());
            if shows == PiVisibility::Plain || served.protection.0.is_some() {
                let namespace = Namespace::new(device.clone(), uuid).with_visibility(shows)?;
                subsystem = subsystem.with_namespace(nsid, namespace)?;
            }
        }
    }
    listen(subsystem, []).await
}

/// Starts a target of this core, whose connections are spread over these cores, if there are any.
pub async fn listen(subsystem: Subsystem, cores: impl IntoIterator<Item = CoreHandle>) -> anyhow::Result<SocketAddr> {
    let target = Target::new([subsystem], Limits { commands: DEPTH + 1, ..Limits::default() })?.with_cores(cores);
    let listener = Listener::bind((Ipv4Addr::LOCALHOST, 0).into(), 128)?;
    let address = listener.local_addr()?;
    // It serves until its core is dropped.
    drop(spawn(async move { target.serve(listener).await }));
    Ok(address)
}

/// The namespace of a device, by its index in the list.
pub fn nsid(index: usize, view: View) -> u32 {
    index as u32 * 2 + if view == View::Plain { 1 } else { 2 }
}

impl Served {
    async fn device(&self) -> anyhow::Result<DynDevice> {
        let format = self.protection.0;
        Ok(match &self.store {
            Store::Null => DynDevice::new("null", NullDevice::new(BlockSize::B4096, self.blocks, format)),
            Store::Memory => {
                let device = MemoryDevice::new(BlockSize::B4096, self.blocks, format).with_pool(pool());
                fill(&device).await?;
                DynDevice::new("memory", device)
            }
            Store::MemoryVolume => setup::memory_volume(self.blocks, self.protection).await?,
            Store::File(path) => {
                let medium = FileMedium::open(path, FileMediumOptions::WRITE)?;
                DynDevice::new("file", RawDevice::new(medium, BlockSize::B4096)?)
            }
            Store::Volume(path, on_turn) => open_volume(path, on_turn.clone()).await?.stack(),
        })
    }
}

/// Writes all blocks, because reading memory that was never written costs nothing.
async fn fill(device: &MemoryDevice) -> anyhow::Result<()> {
    let geometry = device.geometry();
    let payload = Slice::copy_from(&load::payload());
    for start in (0..geometry.capacity_blocks).step_by(FILL_BLOCKS as usize) {
        let extent = Extent::from_raw(start, FILL_BLOCKS.min(geometry.capacity_blocks - start))?;
        let tags = Tags { initial_ref_tag: start, ..Tags::default() };
        let data = payload.slice(..extent.bytes(geometry.block_size) as usize);
        let data = Sealed::seal(data, geometry.block_size, geometry.protection, &tags);
        device.execute(Request::write(extent, data, Durability::Volatile)).await?;
    }
    Ok(())
}

/// Opens a namespace from this core.
pub async fn connect(
    address: SocketAddr,
    nqn: &str,
    nsid: Option<u32>,
    digests: bool,
) -> anyhow::Result<NvmeTcpDevice> {
    let name: Nqn = nqn.parse().with_context(|| format!("{nqn} is no name of a subsystem"))?;
    let options = Options {
        queue_depth: DEPTH,
        header_digest: digests,
        data_digest: digests,
        protection: Makes::Host,
        // A peer that is stopped between its turns does not reply, so there is no keep alive.
        keep_alive: Duration::ZERO,
        ..Options::default()
    };
    let device = NvmeTcpDevice::connect(HostPort::from(address), name, nsid, options).await;
    device.with_context(|| format!("connecting to {nqn} at {address}"))
}
