//! A target on one core, for benchmarks: `target DEVICE SIZE_MIB PI ADDRESS CORE [SPIN_US]`.
//!
//! DEVICE is `null` or `memory`. PI is `none`, `made` (the target makes and checks it, hosts see plain blocks) or
//! `shown` (extended blocks, PRACT of each command says whether the host or the target makes it). The namespace is 1 of
//! `nqn.2026-11.org.example:speed`, in blocks of 4096 bytes, with the 16-bit guard and Type 1. `memory` is filled
//! first, because reading memory that was never written costs nothing. It runs until it is killed.

use std::error::Error;
use std::net::SocketAddr;

use sealblock_block::{Device, Durability, DynDevice, Request};
use sealblock_exports_nvme_tcp::{Limits, Namespace, PiVisibility, Subsystem, Target};
use sealblock_integrity::{GuardKind, PiFormat, ProtectionType, Sealed, Tags};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_media_memory::MemoryDevice;
use sealblock_media_null::NullDevice;
use sealblock_runtime_memory::Buffer;
use sealblock_runtime_reactor::net::Listener;
use sealblock_runtime_reactor::{Config, Cores, Placement, pool};
use sealblock_units::{BlockSize, Extent};

const NQN: &str = "nqn.2026-11.org.example:speed";
const USAGE: &str = "target null|memory SIZE_MIB none|made|shown ADDRESS CORE [SPIN_US]";
const FILL_BLOCKS: u64 = 256;

struct Ask {
    device: String,
    blocks: u64,
    pi: String,
    address: SocketAddr,
}

async fn fill(device: &MemoryDevice, format: Option<PiFormat>, blocks: u64) -> Result<(), sealblock_block::Error> {
    let mut at = 0;
    while at < blocks {
        let Ok(extent) = Extent::from_raw(at, FILL_BLOCKS.min(blocks - at)) else { return Ok(()) };
        let mut data = Buffer::zeroed(extent.bytes(BlockSize::B4096) as usize);
        data.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i as u64 ^ at) as u8);
        let tags = Tags { initial_ref_tag: at, ..Tags::default() };
        let data = Sealed::seal(data.freeze(), BlockSize::B4096, format, &tags);
        device.execute(Request::write(extent, data, Durability::Volatile)).await?;
        at += FILL_BLOCKS;
    }
    Ok(())
}

async fn serve(ask: Ask) -> Result<(), String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let made = PiFormat::with_default_storage_tag(GuardKind::Crc16, ProtectionType::Type1);
    let format = (ask.pi != "none").then_some(made);
    let stack = match ask.device.as_str() {
        "null" => DynDevice::new("null", NullDevice::new(BlockSize::B4096, ask.blocks, format)),
        _ => {
            let device = MemoryDevice::new(BlockSize::B4096, ask.blocks, format).with_pool(pool());
            fill(&device, format, ask.blocks).await.map_err(|error| text(&error))?;
            DynDevice::new("memory", device)
        }
    };
    let shows = if ask.pi == "shown" { PiVisibility::Protected } else { PiVisibility::Plain };
    let namespace = Namespace::new(SharedDevice::publish(stack), [1; 16]);
    let nqn = NQN.parse().map_err(|_| "the name is a name".to_owned())?;
    let namespace = namespace.with_visibility(shows).map_err(|error| text(&error))?;
    let subsystem = Subsystem::new(nqn, "SPEED1").with_namespace(1, namespace).map_err(|error| text(&error))?;
    let target = Target::new([subsystem], Limits::default()).map_err(|error| text(&error))?;
    let listener = Listener::bind(ask.address, 128).map_err(|error| text(&error))?;
    println!("listening on {}", listener.local_addr().map_err(|error| text(&error))?);
    target.serve(listener).await.map_err(|error| text(&error))
}

fn main() -> Result<(), Box<dyn Error>> {
    let all: Vec<String> = std::env::args().skip(1).collect();
    let [device, size_mib, pi, address, core, rest @ ..] = all.as_slice() else { return Err(USAGE.into()) };
    if !matches!(device.as_str(), "null" | "memory") || !matches!(pi.as_str(), "none" | "made" | "shown") {
        return Err(USAGE.into());
    }
    let ask = Ask {
        device: device.clone(),
        blocks: size_mib.parse::<u64>()? << 8,
        pi: pi.clone(),
        address: address.parse()?,
    };
    let spin_us = rest.first().map_or(Ok(50), |text| text.parse())?;
    let config = Config { spin_us, ..Config::default() };
    let cores = Cores::start(Placement::Cpus(vec![core.parse()?]), config)?;
    let handle = cores.handle(0).ok_or("there is one core")?;
    println!("{}", cores.backend(0).ok_or("there is one core")?);
    futures_executor::block_on(handle.call(move || serve(ask)))??;
    Ok(())
}
