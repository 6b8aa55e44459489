//! In the long run a command allocates nothing on the target's core.

use std::net::{Ipv4Addr, SocketAddr};
use std::rc::Rc;

use sealblock_block::{DynDevice, Gate};
use sealblock_exports_nvme_tcp::{Limits, Namespace, Subsystem, Target};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_media_memory::MemoryDevice;
use sealblock_media_null::NullDevice;
use sealblock_protocols_nvme::nvm::IoCommand;
use sealblock_runtime_memory::counting::{Counting, allocations};
use sealblock_runtime_reactor::net::Listener;
use sealblock_runtime_reactor::{BackendChoice, Config, CoreHandle, Cores, Placement, pool, spawn};
use sealblock_units::BlockSize;

#[allow(dead_code, reason = "it is that of the other tests")]
#[path = "target/common/mod.rs"]
mod common;
use common::{BARE, Data, PLAIN, Queue, SUBNQN, blocks};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Serves a null device and a memory device whose tags the target makes, on this core.
async fn serve() -> SocketAddr {
    let namespace = |stack, id| Namespace::new(SharedDevice::publish(Rc::new(Gate::new("device", stack))), [id; 16]);
    let null = DynDevice::new(NullDevice::new(BlockSize::B4096, 4096, None));
    let format = Some(common::format());
    let memory = DynDevice::new(MemoryDevice::new(BlockSize::B4096, 4096, format).with_pool(pool()));
    let subsystem = Subsystem::new(SUBNQN.parse().unwrap(), "SN1").with_namespace(PLAIN, namespace(null, 1));
    let subsystem = subsystem.and_then(|all| all.with_namespace(BARE, namespace(memory, 2))).unwrap();
    let target = Target::new([subsystem], Limits::default()).unwrap();
    let listener = Listener::bind((Ipv4Addr::LOCALHOST, 0).into(), 16).unwrap();
    let address = listener.local_addr().unwrap();
    spawn(async move { target.serve(listener).await });
    address
}

/// Counts allocations of the target's core in the second hundred rounds.
async fn rounds(core: &CoreHandle, io: &mut Queue, nsid: u32, digests: bool) -> u64 {
    let mut counted = Vec::new();
    for round in 0..=200 {
        if round % 100 == 0 {
            counted.push(core.call(|| async { allocations() }).await.unwrap());
        }
        // In a capsule, by R2T, and several at once.
        io.io(nsid, IoCommand::Write(blocks(0, 1)), Data::Write(vec![1; 4096])).await.ok();
        io.io(nsid, IoCommand::Write(blocks(8, 16)), Data::Write(vec![2; 65536])).await.ok();
        let mut cids = Vec::new();
        for at in 0..16 {
            let read = IoCommand::Read(blocks(at, 1)).encode(nsid).unwrap();
            cids.push(io.submit(read, Data::Read(4096)).await);
        }
        for cid in cids {
            io.done(cid).await.ok();
        }
    }
    assert_eq!(counted.len(), 3, "{digests}");
    counted[2] - counted[1]
}

#[test]
fn commands_allocate_nothing_in_the_long_run() {
    let before = allocations();
    drop(std::hint::black_box(Box::new(1)));
    assert_eq!(allocations(), before + 1, "the premise: allocations are counted");
    let cores = match Cores::start(Placement::Count(1), Config { runtime: BackendChoice::Uring, ..Config::default() }) {
        Ok(cores) => cores,
        // Without io_uring the reactor itself allocates for each I/O operation.
        Err(_refused) => return,
    };
    let core = cores.handle(0).unwrap();
    common::run(|| async move {
        let address = core.call(serve).await.unwrap();
        for digests in [false, true] {
            let (_admin, mut io) = Queue::pair(address, digests).await;
            for nsid in [PLAIN, BARE] {
                let count = rounds(&core, &mut io, nsid, digests).await;
                // Each of the two counts is a call from another thread, which allocates a little.
                assert!(count <= 8, "namespace {nsid}, digests {digests}: {count} allocations in 1800 commands");
            }
        }
    });
}
