//! How much memory a command allocates on the target's core after warm-up: none on a memory device, and little on a
//! mirror of volumes.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use sealblock_block::{Device, DynDevice, Medium};
use sealblock_exports_nvme_tcp::{Limits, Namespace, Subsystem, Target};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_media_file::{FileMedium, Options};
use sealblock_media_memory::MemoryDevice;
use sealblock_media_null::NullDevice;
use sealblock_media_volume::CreateOptions;
use sealblock_media_volume::format::Layout;
use sealblock_protocols_nvme::nvm::IoCommand;
use sealblock_runtime_memory::counting::{Counting, allocations};
use sealblock_runtime_reactor::net::Listener;
use sealblock_runtime_reactor::{BackendChoice, Config, CoreHandle, Cores, Placement, pool, spawn};
use sealblock_stack::target::TargetName;
use sealblock_units::BlockSize;

#[allow(dead_code, reason = "it is that of the other tests")]
#[path = "target/common/mod.rs"]
mod common;
use common::{BARE, Data, PLAIN, Queue, SUBNQN, blocks};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn namespace(device: impl Device + 'static, id: u8) -> Namespace {
    Namespace::new(SharedDevice::publish(DynDevice::new("device", device)), [id; 16])
}

/// Serves a subsystem on this core.
fn serve_subsystem(subsystem: Subsystem) -> SocketAddr {
    let target = Target::new([subsystem], Limits::default()).unwrap();
    let listener = Listener::bind((Ipv4Addr::LOCALHOST, 0).into(), 16).unwrap();
    let address = listener.local_addr().unwrap();
    spawn(async move { target.serve(listener).await });
    address
}

/// Serves a null device and a memory device whose tags the target makes, on this core.
async fn serve_memory() -> SocketAddr {
    let null = NullDevice::new(BlockSize::B4096, 4096, None);
    let memory = MemoryDevice::new(BlockSize::B4096, 4096, Some(common::format())).with_pool(pool());
    let subsystem = Subsystem::new(SUBNQN.parse().unwrap(), "SN1").with_namespace(PLAIN, namespace(null, 1));
    let subsystem = subsystem.and_then(|all| all.with_namespace(BARE, namespace(memory, 2))).unwrap();
    serve_subsystem(subsystem)
}

/// A new volume of 64 MiB.
async fn create_volume(dir: &Path, name: &str) -> PathBuf {
    let path = dir.join(name);
    let medium = FileMedium::open(&path, Options::CREATE).unwrap();
    let layout = Layout::new(BlockSize::B4096, medium.sector_bytes(), 16_384).unwrap();
    medium.set_len_bytes(layout.medium_bytes()).unwrap();
    let options = CreateOptions {
        block_size: BlockSize::B4096,
        capacity_blocks: 16_384,
        protection: Some(common::format()),
        uuid: [7; 16],
        preallocate: false,
    };
    sealblock_media_volume::create(&medium, &options).await.unwrap();
    path
}

/// Serves a mirror of two volumes on this core.
async fn serve_mirror(dir: PathBuf) -> SocketAddr {
    let mut replicas = Vec::new();
    for name in ["a", "b"] {
        replicas.push(create_volume(&dir, name).await.display().to_string().parse::<TargetName>().unwrap());
    }
    let mirror: TargetName = format!("mirror:{},{}", replicas[0], replicas[1]).parse().unwrap();
    let opened =
        sealblock_stack::create_mirror(&mirror, &replicas, &sealblock_stack::MirrorOptions::default()).await.unwrap();
    let subsystem = Subsystem::new(SUBNQN.parse().unwrap(), "SN1").with_namespace(PLAIN, namespace(opened.device, 1));
    serve_subsystem(subsystem.unwrap())
}

/// Writes 4 KiB to each of these blocks, 16 at a time.
async fn write_each(io: &mut Queue, blocks_of: std::ops::Range<u64>) {
    for batch in blocks_of.collect::<Vec<_>>().chunks(16) {
        let mut cids = Vec::new();
        for at in batch {
            let write = IoCommand::Write(blocks(*at, 1)).encode(PLAIN).unwrap();
            cids.push(io.submit(write, Data::Write(vec![*at as u8; 4096])).await);
        }
        for cid in cids {
            io.done(cid).await.ok();
        }
    }
}

/// Counts the allocations on the target's core during the second hundred rounds.
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
        let address = core.call(serve_memory).await.unwrap();
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

/// The path that docs/path.md shows. What remains are nodes of the memtables and buffers of commits, which the volumes'
/// workers write on the same core: 100 allocations at the time of writing.
#[test]
fn a_write_to_a_mirror_of_volumes_allocates_little_in_the_long_run() {
    let cores = match Cores::start(Placement::Count(1), Config { runtime: BackendChoice::Uring, ..Config::default() }) {
        Ok(cores) => cores,
        // Without io_uring the reactor itself allocates for each I/O operation.
        Err(_refused) => return,
    };
    let (core, dir) = (cores.handle(0).unwrap(), tempfile::tempdir().unwrap());
    let path = dir.path().to_owned();
    common::run(|| async move {
        let address = core.call(|| serve_mirror(path)).await.unwrap();
        let (_admin, mut io) = Queue::pair(address, false).await;
        write_each(&mut io, 0..4096).await;
        let before = core.call(|| async { allocations() }).await.unwrap();
        write_each(&mut io, 0..4096).await;
        let count = core.call(|| async { allocations() }).await.unwrap() - before;
        assert!(count <= 512, "{count} allocations in 4096 writes");
    });
}
