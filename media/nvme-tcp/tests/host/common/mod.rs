//! Our own target over loopback, on devices in memory.

pub mod fake;

use std::net::{Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::time::Duration;

use sealblock_block::{Device, Durability, DynDevice, Error, Expectations, Gate, Request, Response};
use sealblock_exports_nvme_tcp::{Limits, Namespace, PiVisibility, Subsystem, Target};
use sealblock_integrity::{GuardKind, PiFormat, ProtectionType, Sealed, Tags};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_media_memory::MemoryDevice;
use sealblock_media_nvme_tcp::{HostPort, NvmeTcpDevice, Options, Reconnect};
use sealblock_runtime_memory::Slice;
use sealblock_runtime_reactor::net::Listener;
use sealblock_runtime_reactor::{BackendChoice, Config, JoinHandle, Reactor, spawn};
use sealblock_units::{BlockSize, Extent, Lba};

pub const SUBNQN: &str = "nqn.2026-11.org.example:volumes";
pub const BLOCKS: u64 = 4096;

/// Runs a test on both backends.
pub fn run<F: Future<Output = ()>>(test: impl Fn() -> F) {
    for runtime in [BackendChoice::Auto, BackendChoice::Syscalls] {
        let reactor = Reactor::new(Config { runtime, ..Config::default() }).expect("a reactor starts");
        reactor.block_on(test());
    }
}

/// A running target.
pub struct Served {
    pub target: Target,
    pub address: SocketAddr,
    pub serving: JoinHandle<std::io::Result<()>>,
}

pub fn limits() -> Limits {
    Limits { drain: Duration::from_millis(200), ..Limits::default() }
}

/// Serves these devices as namespaces 1, 2 and so on.
pub fn serve(devices: &[(Rc<MemoryDevice>, PiVisibility)]) -> Served {
    let any = (Ipv4Addr::LOCALHOST, 0).into();
    serve_at(any, devices)
}

pub fn serve_at(address: SocketAddr, devices: &[(Rc<MemoryDevice>, PiVisibility)]) -> Served {
    serve_with_serial(address, devices, "SN1")
}

/// Serves them in a subsystem with this serial number.
pub fn serve_with_serial(address: SocketAddr, devices: &[(Rc<MemoryDevice>, PiVisibility)], serial: &str) -> Served {
    let mut subsystem = Subsystem::new(SUBNQN.parse().unwrap(), serial);
    for (i, (device, shows)) in devices.iter().enumerate() {
        let gate = DynDevice::new("mem", Rc::clone(device));
        let namespace = Namespace::new(SharedDevice::publish(gate), [i as u8 + 1; 16]).with_visibility(*shows).unwrap();
        subsystem = subsystem.with_namespace(i as u32 + 1, namespace).unwrap();
    }
    let target = Target::new([subsystem], limits()).unwrap();
    let listener = Listener::bind(address, 16).unwrap();
    let address = listener.local_addr().unwrap();
    let server = target.clone();
    let serving = spawn(async move { server.serve(listener).await });
    Served { target, address, serving }
}

pub fn options() -> Options {
    Options {
        keep_alive: Duration::ZERO,
        connect_timeout: Duration::from_secs(20),
        reconnect: Reconnect {
            attempts: 1000,
            total: Duration::from_secs(20),
            first_delay: Duration::from_millis(2),
            max_delay: Duration::from_millis(20),
        },
        ..Options::default()
    }
}

pub async fn open(served: &Served, nsid: u32, options: Options) -> Gate<NvmeTcpDevice> {
    let subsystem = SUBNQN.parse().unwrap();
    let device = NvmeTcpDevice::connect(HostPort::from(served.address), subsystem, Some(nsid), options).await;
    Gate::new("remote", device.unwrap())
}

pub fn memory(size: BlockSize, format: Option<PiFormat>) -> Rc<MemoryDevice> {
    Rc::new(MemoryDevice::new(size, BLOCKS, format))
}

pub fn crc32c() -> PiFormat {
    PiFormat::with_default_storage_tag(GuardKind::Crc32c, ProtectionType::Type1)
}

pub fn crc16() -> PiFormat {
    PiFormat::with_default_storage_tag(GuardKind::Crc16, ProtectionType::Type1)
}

pub fn extent(start: u64, blocks: u64) -> Extent {
    Extent::from_raw(start, blocks).unwrap()
}

/// Bytes that differ from block to block.
pub fn pattern(len: usize, seed: u8) -> Slice {
    let bytes: Vec<u8> = (0..len).map(|i| (i / 7) as u8 ^ (i >> 9) as u8 ^ seed).collect();
    Slice::copy_from(&bytes)
}

/// Blocks with tags as a writer of this device makes them.
pub fn sealed(device: &impl Device, extent: Extent, seed: u8) -> Sealed {
    sealed_with(device, extent, seed, extent.start(), 0)
}

/// The same with a reference tag counted from `first`, and an application tag.
pub fn sealed_with(device: &impl Device, extent: Extent, seed: u8, first: Lba, app_tag: u16) -> Sealed {
    let geometry = device.geometry();
    let tags = Tags { app_tag, storage_tag: 0, initial_ref_tag: first.get() };
    let data = pattern(extent.bytes(geometry.block_size) as usize, seed);
    Sealed::seal(data, geometry.block_size, geometry.protection, &tags)
}

pub async fn write(device: &impl Device, extent: Extent, seed: u8) -> Result<Response, Error> {
    let data = sealed(device, extent, seed);
    device.execute(Request::write(extent, data, Durability::Volatile)).await
}

pub async fn read(device: &impl Device, extent: Extent) -> Result<Sealed, Error> {
    match device.execute(Request::read(extent, Expectations::NONE)).await? {
        Response::Data(sealed) => Ok(sealed),
        other => panic!("a read is answered with data, not {other:?}"),
    }
}

pub async fn verify(device: &impl Device, extent: Extent) -> Result<Response, Error> {
    device.execute(Request::verify(extent, Expectations::NONE)).await
}
