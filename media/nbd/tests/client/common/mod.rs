//! Our own server over loopback, on devices in memory, and one that replies as a script specifies.
pub mod fake;

use std::net::{Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::time::Duration;

use sealblock_block::{Device, Durability, DynDevice, Error, Expectations, Gate, Request, Response};
use sealblock_exports_nbd::{Export, Limits, Server};
use sealblock_integrity::{GuardKind, PiFormat, ProtectionType, Sealed, Tags};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_media_memory::MemoryDevice;
use sealblock_media_nbd::{Address, NbdDevice, Options, Reconnect};
use sealblock_runtime_memory::Slice;
use sealblock_runtime_reactor::net::Listener;
use sealblock_runtime_reactor::{BackendChoice, Config, JoinHandle, Reactor, spawn};
use sealblock_units::{BlockSize, Extent};

pub const BLOCKS: u64 = 4096;

/// Runs a test on both backends.
pub fn run<F: Future<Output = ()>>(test: impl Fn() -> F) {
    for runtime in [BackendChoice::Auto, BackendChoice::Syscalls] {
        let reactor = Reactor::new(Config { runtime, ..Config::default() }).expect("a reactor starts");
        reactor.block_on(test());
    }
}

/// One of our servers while it runs.
pub struct Served {
    pub server: Server,
    pub address: SocketAddr,
    pub serving: JoinHandle<std::io::Result<()>>,
}

/// Serves a device as `disk`.
pub fn serve(device: &Rc<MemoryDevice>) -> Served {
    serve_at((Ipv4Addr::LOCALHOST, 0).into(), device)
}

pub fn serve_at(address: SocketAddr, device: &Rc<MemoryDevice>) -> Served {
    let listener = Listener::bind(address, 16).unwrap();
    let address = listener.local_addr().unwrap();
    let (server, serving) = serve_on(listener, device);
    Served { server, address, serving }
}

/// Serves a device on this listener.
pub fn serve_on(listener: Listener, device: &Rc<MemoryDevice>) -> (Server, JoinHandle<std::io::Result<()>>) {
    let gate = DynDevice::new("mem", Rc::clone(device));
    let shared = SharedDevice::publish(gate);
    let exports = [Export::new("disk", shared.clone()).described("blocks"), Export::new("fixed", shared).read_only()];
    let limits = Limits { drain: Duration::from_millis(200), ..Limits::default() };
    let server = Server::new(exports, limits).unwrap();
    let serves = server.clone();
    let serving = spawn(async move { serves.serve(listener).await });
    (server, serving)
}

pub fn options() -> Options {
    Options {
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

/// Like [`options`], without another attempt after a connection is lost.
pub fn impatient() -> Options {
    Options { reconnect: Reconnect { attempts: 0, ..Reconnect::default() }, ..options() }
}

pub async fn open(address: SocketAddr, export: &str, options: Options) -> Gate<NbdDevice> {
    Gate::new("remote", NbdDevice::connect(Address::from(address), export, options).await.unwrap())
}

pub fn plain(size: BlockSize) -> Rc<MemoryDevice> {
    Rc::new(MemoryDevice::new(size, BLOCKS, None))
}

pub fn protected() -> Rc<MemoryDevice> {
    let format = PiFormat::with_default_storage_tag(GuardKind::Crc16, ProtectionType::Type1);
    Rc::new(MemoryDevice::new(BlockSize::B4096, BLOCKS, Some(format)))
}

pub fn extent(start: u64, blocks: u64) -> Extent {
    Extent::from_raw(start, blocks).unwrap()
}

/// Bytes that differ from block to block.
pub fn pattern(len: usize, seed: u8) -> Slice {
    let bytes: Vec<u8> = (0..len).map(|i| (i / 7) as u8 ^ (i >> 9) as u8 ^ seed).collect();
    Slice::copy_from(&bytes)
}

pub fn sealed(device: &impl Device, extent: Extent, seed: u8) -> Sealed {
    let geometry = device.geometry();
    let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: extent.start().get() };
    Sealed::seal(pattern(extent.bytes(geometry.block_size) as usize, seed), geometry.block_size, None, &tags)
}

pub async fn write(device: &impl Device, extent: Extent, seed: u8) -> Result<Response, Error> {
    write_with(device, extent, seed, Durability::Volatile).await
}

pub async fn write_with(
    device: &impl Device,
    extent: Extent,
    seed: u8,
    durability: Durability,
) -> Result<Response, Error> {
    let data = sealed(device, extent, seed);
    device.execute(Request::write(extent, data, durability)).await
}

pub async fn read(device: &impl Device, extent: Extent) -> Result<Sealed, Error> {
    match device.execute(Request::read(extent, Expectations::NONE)).await? {
        Response::Data(sealed) => Ok(sealed),
        other => panic!("a read is answered with data, not {other:?}"),
    }
}

/// True if these blocks contain what was written with this seed.
pub async fn holds(device: &impl Device, extent: Extent, seed: u8) -> bool {
    read(device, extent).await.unwrap().joined_data()[..] == sealed(device, extent, seed).joined_data()[..]
}

pub async fn flush(device: &impl Device) -> Result<Response, Error> {
    device.execute(Request::flush()).await
}

/// The blocks that an error names.
pub fn bad(error: &Error) -> Vec<u64> {
    error
        .bad_blocks()
        .map(|bad_blocks| bad_blocks.as_slice().iter().map(|bad_block| bad_block.lba.get()).collect())
        .unwrap_or_default()
}
