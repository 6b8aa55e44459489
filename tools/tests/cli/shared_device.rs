//! One device behind several exports: which clients see a failed flush, and who waits for blocks that are locked.

use std::cell::Cell;
use std::net::{Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::time::Duration;

use sealblock_block::{
    Abilities, Clock, Device, DeviceOpener, Durability, DynDevice, Error, ErrorKind, Gate, Geometry, Outcome, Request,
    RequestKind,
};
use sealblock_exports_nbd::{Export, Limits as NbdLimits, Server};
use sealblock_exports_nvme_tcp::{Limits, Namespace, Subsystem, Target};
use sealblock_integrity::{Sealed, Tags};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_layers_multipath::{MultipathLayer, PathConfig, RetryPolicy};
use sealblock_media_memory::MemoryDevice;
use sealblock_media_nbd::{NbdDevice, Options as NbdOptions};
use sealblock_media_nvme_tcp::{NvmeTcpDevice, Options, Reconnect};
use sealblock_runtime_memory::Slice;
use sealblock_runtime_reactor::net::Listener;
use sealblock_runtime_reactor::{Config, Reactor, sleep, spawn};
use sealblock_units::{BlockSize, Extent};

const SUBNQN: &str = "nqn.2026-11.org.example:volumes";

pub fn run<F: Future<Output = ()>>(test: impl FnOnce() -> F) {
    Reactor::new(Config::default()).expect("a reactor starts").block_on(async { test().await });
}

/// RAM of which one flush fails.
struct Flaky(MemoryDevice, Rc<Cell<bool>>);

impl Device for Flaky {
    fn geometry(&self) -> &Geometry {
        self.0.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.0.abilities()
    }

    async fn execute(&self, operation: Request) -> Outcome {
        if operation.kind() == RequestKind::Flush && self.1.take() {
            return Err(ErrorKind::Media { reason: "a flush failed".to_owned() }.into());
        }
        self.0.execute(operation).await
    }
}

pub async fn write(device: &impl Device, at: u64) {
    let extent = Extent::from_raw(at, 1).unwrap();
    let data = Sealed::seal(Slice::copy_from(&[7; 4096]), BlockSize::B4096, None, &Tags::default());
    device.execute(Request::write(extent, data, Durability::Volatile)).await.unwrap();
}

pub async fn flushes(device: &impl Device) -> bool {
    device.execute(Request::flush()).await.is_ok()
}

fn listen(at: SocketAddr) -> (Listener, SocketAddr) {
    let listener = Listener::bind(at, 16).unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

pub fn any() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, 0).into()
}

pub fn serve_nvme(at: SocketAddr, shared: SharedDevice) -> (Target, SocketAddr) {
    let subsystem = Subsystem::new(SUBNQN.parse().unwrap(), "SN1").with_namespace(1, Namespace::new(shared, [1; 16]));
    let limits = Limits { drain: Duration::from_millis(200), ..Limits::default() };
    let target = Target::new([subsystem.unwrap()], limits).unwrap();
    let ((listener, address), server) = (listen(at), target.clone());
    spawn(async move { server.serve(listener).await });
    (target, address)
}

pub fn serve_nbd(shared: &SharedDevice) -> (Server, SocketAddr) {
    let exports = ["disk", "other"].map(|name| Export::new(name, shared.clone()));
    let server = Server::new(exports, NbdLimits::default()).unwrap();
    let ((listener, address), serving) = (listen(any()), server.clone());
    spawn(async move { serving.serve(listener).await });
    (server, address)
}

pub async fn nvme(address: SocketAddr, host: u8) -> Gate<NvmeTcpDevice> {
    connect(address, host).await.unwrap()
}

async fn connect(address: SocketAddr, host: u8) -> Result<Gate<NvmeTcpDevice>, Error> {
    let host_nqn = format!("nqn.2026-11.org.example:host{host}").parse().unwrap();
    let reconnect = Reconnect { attempts: 0, ..Reconnect::default() };
    let options = Options { host_nqn, host_id: [host; 16], reconnect, ..Options::default() };
    let device = NvmeTcpDevice::connect(address.into(), SUBNQN.parse().unwrap(), Some(1), options).await;
    let device = device.map_err(|error| Error::from(ErrorKind::Unreachable { reason: error.to_string() }))?;
    Ok(Gate::new("nvme", device))
}

pub async fn nbd(address: SocketAddr, export: &str) -> Gate<NbdDevice> {
    Gate::new("nbd", NbdDevice::connect(address.into(), export, NbdOptions::default()).await.unwrap())
}

#[test]
fn everybody_who_had_written_learns_of_a_failed_flush_once_and_nobody_else_does() {
    run(|| async {
        let fails = Rc::<Cell<bool>>::default();
        let flaky = Flaky(MemoryDevice::new(BlockSize::B4096, 64, None), Rc::clone(&fails));
        let shared = SharedDevice::publish(DynDevice::new("flaky", flaky));
        let (target, to_nvme) = serve_nvme(any(), shared.clone());
        let (server, to_nbd) = serve_nbd(&shared);
        // Two controllers of one host, one of another, and one that writes nothing.
        let (one, again, two) = (nvme(to_nvme, 1).await, nvme(to_nvme, 1).await, nvme(to_nvme, 2).await);
        let idle = nvme(to_nvme, 3).await;
        // Two connections to an export, which may be one client's, and one to another.
        let (left, right, other) = (nbd(to_nbd, "disk").await, nbd(to_nbd, "disk").await, nbd(to_nbd, "other").await);
        write(&one, 1).await;
        write(&two, 2).await;
        write(&left, 3).await;
        fails.set(true);
        assert!(!flushes(&one).await && flushes(&one).await);
        assert!(!flushes(&again).await && flushes(&again).await, "it is asked to flush what the other one has written");
        assert!(!flushes(&two).await && flushes(&two).await);
        assert!(!flushes(&right).await && flushes(&right).await, "a flush on any connection covers all");
        assert!(!flushes(&left).await && flushes(&left).await);
        assert!(flushes(&idle).await && flushes(&other).await);
        target.stop();
        server.stop();
    });
}

#[test]
fn a_host_that_comes_back_learns_what_befell_the_writes_of_its_lost_controller() {
    run(|| async {
        let fails = Rc::<Cell<bool>>::default();
        let flaky = Flaky(MemoryDevice::new(BlockSize::B4096, 64, None), Rc::clone(&fails));
        let shared = SharedDevice::publish(DynDevice::new("flaky", flaky));
        let (target, to_nvme) = serve_nvme(any(), shared.clone());
        let lost = nvme(to_nvme, 1).await;
        write(&lost, 1).await;
        drop(lost);
        while target.connections() > 0 {
            sleep(Duration::from_millis(1)).await;
        }
        fails.set(true);
        assert!(!flushes(&shared.attach()).await);
        let (back, stranger) = (nvme(to_nvme, 1).await, nvme(to_nvme, 2).await);
        assert!(!flushes(&back).await && flushes(&back).await);
        assert!(flushes(&stranger).await);
        target.stop();
    });
}

#[derive(Clone)]
pub struct RealTime;

impl Clock for RealTime {
    async fn sleep(&self, time: Duration) {
        sleep(time).await;
    }
}

/// Several paths to a target, as a device that two exports share: when the target starts again, the writes before are in doubt,
/// which the paths tell once.
#[test]
fn a_target_restart_under_several_paths_is_reported_to_both_clients() {
    run(|| async {
        let memory = Rc::new(MemoryDevice::new(BlockSize::B4096, 64, None));
        let publish = || SharedDevice::publish(DynDevice::new("mem", Rc::clone(&memory)));
        // An address of its own: no other test can take its port while nothing listens there.
        let (first, address) = serve_nvme((Ipv4Addr::new(127, 0, 0, 77), 0).into(), publish());
        let source = DeviceOpener::new("path", move || async move { connect(address, 1).await.map(DynDevice::from) });
        let device = Some(source.open().await.unwrap());
        let patience = RetryPolicy { min_reprobe: Duration::from_millis(300), ..RetryPolicy::default() };
        let way = PathConfig { source, quiesce: None, device };
        let (layer, worker) = MultipathLayer::new(vec![way], RealTime, patience).unwrap();
        let worker = spawn(worker.run());
        let shared = SharedDevice::publish(DynDevice::new("paths", layer));
        let (one, two, idle) = (shared.attach(), shared.attach(), shared.attach());
        write(&one, 1).await;
        write(&two, 2).await;
        first.stop();
        while first.connections() > 0 {
            sleep(Duration::from_millis(1)).await;
        }
        let (second, _) = serve_nvme(address, publish());
        assert!(!flushes(&one).await && flushes(&one).await);
        assert!(!flushes(&two).await && flushes(&two).await);
        assert!(flushes(&idle).await);
        second.stop();
        worker.abort();
    });
}

#[test]
fn an_nbd_client_waits_for_blocks_that_somebody_compares_and_writes() {
    run(|| async {
        let memory = MemoryDevice::new(BlockSize::B4096, 64, None);
        let shared = SharedDevice::publish(DynDevice::new("mem", memory));
        let (server, to_nbd) = serve_nbd(&shared);
        let client = Rc::new(nbd(to_nbd, "disk").await);
        // As a fused Compare and Write over NVMe/TCP does it.
        let other = shared.attach();
        let locked = other.lock(Extent::from_raw(3, 1).unwrap()).await;
        let writing = Rc::clone(&client);
        let writing = spawn(async move { write(&*writing, 3).await });
        for at in 4..20 {
            write(&*client, at).await;
        }
        assert!(!writing.is_finished(), "others go on, and this one waits");
        drop(locked);
        writing.await.unwrap();
        server.stop();
    });
}
