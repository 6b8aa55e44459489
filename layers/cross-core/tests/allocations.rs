//! What a request that crosses costs, counted: it allocates nothing on either core in the long run, and its data return
//! to the pool of the core that took them.

use std::rc::Rc;
use std::time::Duration;

use futures_util::future::join_all;
use sealblock_block::{Abilities, Device, Durability, DynDevice, Expectations, Geometry, Outcome, Request};
use sealblock_integrity::{Sealed, Tags};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_media_memory::MemoryDevice;
use sealblock_runtime_memory::counting::{Counting, allocations};
use sealblock_runtime_reactor::{
    BackendChoice, Config, CoreHandle, CoreLocal, Cores, Placement, pool, spawn, yield_now,
};
use sealblock_units::{BlockSize, Extent};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const TIMEOUT: Duration = Duration::from_secs(30);
const DEPTH: u64 = 32;
const ROUNDS: u64 = 64;
const REQUESTS: f64 = (DEPTH * ROUNDS) as f64;

/// Executes requests as a file does: none completes at its first poll.
struct Waiting(MemoryDevice);

impl Device for Waiting {
    fn geometry(&self) -> &Geometry {
        self.0.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.0.abilities()
    }

    async fn execute(&self, request: Request) -> Outcome {
        yield_now().await;
        self.0.execute(request).await
    }
}

fn on<F: Future<Output = T> + 'static, T: Send + 'static>(
    core: &CoreHandle,
    work: impl FnOnce() -> F + Send + 'static,
) -> T {
    let (send, receive) = std::sync::mpsc::channel();
    let task = move || {
        let work = work();
        drop(spawn(async move { drop(send.send(work.await)) }));
    };
    core.address().send(task).expect("the core runs");
    receive.recv_timeout(TIMEOUT).expect("the work does not panic and ends")
}

fn request(index: u64) -> Request {
    let extent = Extent::from_raw(index, 1).unwrap();
    if index.is_multiple_of(2) {
        return Request::read(extent, Expectations::NONE);
    }
    let mut data = pool().take(4096);
    data.fill(index as u8);
    let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: 0 };
    Request::write(extent, Sealed::seal(data.freeze(), BlockSize::B4096, None, &tags), Durability::Volatile)
}

async fn rounds(device: &impl Device) {
    for _ in 0..ROUNDS {
        let outcomes = join_all((0..DEPTH).map(|index| device.execute(request(index)))).await;
        assert!(outcomes.iter().all(Result::is_ok));
    }
}

/// Allocations on a core of requests of its own: those of the device, and of the requests themselves.
async fn count_at_home(device: SharedDevice) -> f64 {
    let device = device.attach();
    assert!(device.is_local());
    rounds(&device).await;
    let before = allocations();
    rounds(&device).await;
    (allocations() - before) as f64 / REQUESTS
}

/// Allocations on both cores for each request that crosses, and for each that does not, after as many others.
fn count(device: impl FnOnce() -> DynDevice + Send + 'static) -> [f64; 2] {
    let config = Config { runtime: BackendChoice::Syscalls, ..Config::default() };
    let cores = Cores::start(Placement::Count(2), config).expect("cores start");
    let (owner, caller) = (cores.handle(0).unwrap(), cores.handle(1).unwrap());
    let shared = on(&owner, move || async move { SharedDevice::publish(device()) });
    let here = shared.clone();
    let at_home = on(&owner, move || count_at_home(here));
    let there = shared.clone();
    let attached = on(&caller, move || async move {
        let device = there.attach();
        assert!(!device.is_local());
        // These fill what is kept for reuse.
        rounds(&device).await;
        CoreLocal::new(Rc::new(device))
    });
    let at_owner = on(&owner, || async { allocations() });
    let at_caller = on(&caller, move || async move {
        let device = attached.get().expect("it is of this core");
        let before = allocations();
        rounds(&*device).await;
        allocations() - before
    });
    let at_owner = on(&owner, || async { allocations() }) - at_owner;
    [(at_caller + at_owner) as f64 / REQUESTS, at_home]
}

#[test]
fn a_request_that_crosses_allocates_no_more_than_one_that_does_not() {
    let waiting = || DynDevice::new("waiting", Waiting(MemoryDevice::new(BlockSize::B4096, 64, None)));
    let in_place = || DynDevice::new("memory", MemoryDevice::new(BlockSize::B4096, 64, None));
    for [crossing, at_home] in [count(waiting), count(in_place)] {
        eprintln!("{crossing:.3} of a request that crosses, {at_home:.3} of one that does not");
        assert!(crossing < at_home + 0.1, "{crossing} allocations, and at home {at_home}");
    }
}
