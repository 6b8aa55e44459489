//! A target on three cores, and hosts with several queues.
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use sealblock_block::{Abilities, Device, DynDevice, Geometry, Outcome, Request};
use sealblock_exports_nvme_tcp::{Limits, Namespace, Subsystem, Target};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_media_memory::MemoryDevice;
use sealblock_protocols_nvme::admin::SetFeatures;
use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_protocols_nvme::nvm::IoCommand;
use sealblock_runtime_reactor::net::Listener;
use sealblock_runtime_reactor::{Config, CoreHandle, Cores, Placement, sleep, spawn};
use sealblock_units::BlockSize;

use super::{BLOCKS, Data, Queue, SUBNQN, blocks, pattern};

pub const LATE: Duration = Duration::from_secs(30);
/// Commands on this block wait for the latch.
pub const SLOW: u64 = 4000;

/// Delays requests of the slow block until a test releases them.
#[derive(Default)]
pub struct Latch {
    pub begun: AtomicUsize,
    pub is_open: AtomicBool,
}

impl Latch {
    /// Waits until this many are delayed.
    pub async fn holds(&self, count: usize) {
        while self.begun.load(Ordering::SeqCst) < count {
            sleep(Duration::from_millis(1)).await;
        }
    }

    pub fn open(&self) {
        self.is_open.store(true, Ordering::SeqCst);
    }
}

struct Slowly(MemoryDevice, Arc<Latch>);

impl Device for Slowly {
    fn geometry(&self) -> &Geometry {
        self.0.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.0.abilities()
    }

    async fn execute(&self, request: Request) -> Outcome {
        if request.extent().is_some_and(|extent| extent.start().get() == SLOW) {
            self.1.begun.fetch_add(1, Ordering::SeqCst);
            while !self.1.is_open.load(Ordering::SeqCst) {
                sleep(Duration::from_millis(1)).await;
            }
        }
        self.0.execute(request).await
    }
}

/// A target on three cores, with devices on the first and the last.
pub struct Spread {
    pub cores: Cores,
    pub target: Target,
    pub address: SocketAddr,
    pub served: mpsc::Receiver<std::io::Result<()>>,
    pub latch: Arc<Latch>,
}

/// Runs a function on a core.
pub fn on<T: Send + 'static>(core: &CoreHandle, make: impl FnOnce() -> T + Send + 'static) -> T {
    let (send, receive) = mpsc::channel();
    core.address().send(move || send.send(make()).expect("the test waits")).expect("the core runs");
    receive.recv_timeout(LATE).expect("the core answers")
}

pub fn device(core: &CoreHandle, latch: &Arc<Latch>) -> SharedDevice {
    let latch = Arc::clone(latch);
    on(core, move || {
        let memory = MemoryDevice::new(BlockSize::from_bytes(4096).unwrap(), BLOCKS, None);
        SharedDevice::publish(DynDevice::new("mem", Slowly(memory, latch)))
    })
}

/// Connections stay on the core that they got when they were accepted, so that some use each device from another core.
pub fn spread(limits: Limits) -> Spread {
    spread_with(limits, Target::without_moves)
}

/// The same with connections that go where their devices are.
pub fn spread_by_device(limits: Limits) -> Spread {
    spread_with(limits, |target| target)
}

fn spread_with(limits: Limits, change: impl FnOnce(Target) -> Target) -> Spread {
    let config = Config { pool_arena_bytes: 4 << 20, ..Config::default() };
    let cores = Cores::start(Placement::Count(3), config).expect("cores start");
    let (first, last) = (cores.handle(0).unwrap(), cores.handle(2).unwrap());
    let latch = Arc::new(Latch::default());
    let subsystem = Subsystem::new(nqn(), "SN1")
        .with_namespace(1, Namespace::new(device(&first, &latch), [1; 16]))
        .and_then(|all| all.with_namespace(2, Namespace::new(device(&last, &latch), [2; 16])))
        .unwrap();
    let target = change(Target::new([subsystem], limits).unwrap().with_cores(cores.handles()));
    let (address, served) = listen(&target, &cores, 0);
    Spread { cores, target, address, served, latch }
}

/// Serves one more listener, on this core.
pub fn listen(target: &Target, cores: &Cores, core: usize) -> (SocketAddr, mpsc::Receiver<std::io::Result<()>>) {
    let (send, served) = mpsc::channel();
    let target = target.clone();
    let address = on(&cores.handle(core).unwrap(), move || {
        let listener = Listener::bind((std::net::Ipv4Addr::LOCALHOST, 0).into(), 64).unwrap();
        let address = listener.local_addr().unwrap();
        // Fails only if the test has ended.
        drop(spawn(async move { drop(send.send(target.serve(listener).await)) }));
        address
    });
    (address, served)
}

pub fn nqn() -> Nqn {
    SUBNQN.parse().unwrap()
}

pub async fn connections(target: &Target, wanted: usize) {
    while target.connections() != wanted {
        sleep(Duration::from_millis(1)).await;
    }
}

/// An admin queue and this many I/O queues of one controller.
pub async fn host(address: SocketAddr, queues: u16) -> (Queue, Vec<Queue>) {
    host_of(address, SUBNQN, queues).await
}

/// The same at any subsystem.
pub async fn host_of(address: SocketAddr, subnqn: &str, queues: u16) -> (Queue, Vec<Queue>) {
    let admin = admin_of(address, subnqn, queues).await;
    let mut all = Vec::new();
    for queue in 1..=queues {
        let mut io = Queue::open(address, queue % 2 == 0).await;
        io.connect(subnqn, queue, admin.cntlid, 0).await.ok();
        all.push(io);
    }
    (admin, all)
}

/// An admin queue that may have this many I/O queues.
pub async fn admin_of(address: SocketAddr, subnqn: &str, queues: u16) -> Queue {
    let mut admin = Queue::admin(address, subnqn, false).await;
    let granted = u32::from(queues - 1) << 16 | u32::from(queues - 1);
    let ask = SetFeatures { fid: 7, save: false, nsid: 0, cdw11: granted };
    assert_eq!(admin.call(ask.encode(), Data::None).await.ok().completion.dword0(), granted);
    admin
}

pub async fn write(io: &mut Queue, nsid: u32, start: u64, seed: u8, count: usize) {
    let write = IoCommand::Write(blocks(start, count as u64));
    io.io(nsid, write, Data::Write(pattern(count << 12, seed))).await.ok();
}

pub async fn assert_reads(io: &mut Queue, nsid: u32, start: u64, seed: u8, count: usize) {
    let read = IoCommand::Read(blocks(start, count as u64));
    let data = io.io(nsid, read, Data::Read(count << 12)).await.ok().data;
    assert!(data == pattern(count << 12, seed), "namespace {nsid}, block {start}");
}
