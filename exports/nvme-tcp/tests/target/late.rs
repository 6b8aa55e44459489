//! A command of an ended connection must not execute after newer ones of the same host's next connection.
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use crate::common::*;
use sealblock_block::{Abilities, Device, DynDevice, Geometry, Outcome, Request, RequestKind};
use sealblock_exports_nvme_tcp::{Namespace, Subsystem, Target};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_media_memory::MemoryDevice;
use sealblock_protocols_nvme::admin::{FeatureSelect, GetFeatures, SetFeatures};
use sealblock_protocols_nvme::extensions::ReservedArea;
use sealblock_protocols_nvme::fabrics::{CNTLID_DYNAMIC, FabricsCommand};
use sealblock_protocols_nvme::nvm::IoCommand;
use sealblock_runtime_reactor::net::Listener;
use sealblock_runtime_reactor::{sleep, spawn};
use sealblock_units::BlockSize;

/// Delays the first write until a test releases it.
struct FirstLate(MemoryDevice, Arc<(AtomicUsize, AtomicBool)>);

impl Device for FirstLate {
    fn geometry(&self) -> &Geometry {
        self.0.geometry()
    }
    fn abilities(&self) -> Abilities {
        self.0.abilities()
    }
    async fn execute(&self, request: Request) -> Outcome {
        let writes = matches!(request.kind(), RequestKind::Write | RequestKind::WriteReserved);
        if writes && self.1.0.fetch_add(1, Ordering::SeqCst) == 0 {
            while !self.1.1.load(Ordering::SeqCst) {
                sleep(Duration::from_millis(1)).await;
            }
        }
        self.0.execute(request).await
    }
}

fn serve_late(latch: &Arc<(AtomicUsize, AtomicBool)>) -> (Target, SocketAddr) {
    let device = FirstLate(MemoryDevice::new(BlockSize::B4096, BLOCKS, None), Arc::clone(latch));
    let shared = SharedDevice::publish(DynDevice::new("mem", device));
    let subsystem = Subsystem::new(SUBNQN.parse().unwrap(), "SN1");
    let subsystem = subsystem.with_namespace(1, Namespace::new(shared, [1; 16])).unwrap();
    let target = Target::new([subsystem], short()).unwrap();
    let listener = Listener::bind((std::net::Ipv4Addr::LOCALHOST, 0).into(), 16).unwrap();
    let address = listener.local_addr().unwrap();
    let serving = target.clone();
    drop(spawn(async move { serving.serve(listener).await }));
    (target, address)
}

#[test]
fn a_write_of_a_lost_connection_does_not_overwrite_a_newer_one() {
    run(|| async {
        let latch = Arc::new((AtomicUsize::new(0), AtomicBool::new(false)));
        let (target, address) = serve_late(&latch);
        let (admin, mut io) = Queue::pair(address, false).await;
        let write = |_: u8| IoCommand::Write(blocks(7, 1)).encode(1).unwrap();
        io.submit(write(1), Data::Write(vec![1; 4096])).await;
        while latch.0.load(Ordering::SeqCst) == 0 {
            sleep(Duration::from_millis(1)).await;
        }
        // The connections are lost and the host reconnects: it repeats its write, and then writes again.
        drop((admin, io));
        let next = spawn(async move { Queue::pair(address, false).await });
        let mut other = Queue::open(address, false).await;
        other.hostnqn = "nqn.2026-11.org.example:other";
        other.connect(SUBNQN, 0, CNTLID_DYNAMIC, 0).await.ok();
        other.configure(0x0046_0001).await;
        assert_eq!(other.property(0x1C, 4).await, 1, "another host has nothing to wait for");
        sleep(Duration::from_millis(100)).await;
        assert!(!next.is_finished(), "the old write is still to land");
        latch.1.store(true, Ordering::SeqCst);
        let (_admin, mut again) = next.await.unwrap();
        for version in [1, 2] {
            let done = again.call(write(version), Data::Write(vec![version; 4096])).await;
            done.ok();
        }
        let read = IoCommand::Read(blocks(7, 1)).encode(1).unwrap();
        let data = again.call(read, Data::Read(4096)).await.ok().data;
        assert_eq!(data[0], 2, "an acknowledged write is lost to a late one");
        target.stop();
    });
}

#[test]
fn a_write_of_a_host_that_has_left_does_not_overwrite_a_newer_one_of_another_host() {
    for shuts_down in [true, false] {
        run(|| async move {
            let latch = Arc::new((AtomicUsize::new(0), AtomicBool::new(false)));
            let (target, address) = serve_late(&latch);
            let (mut admin, mut io) = Queue::pair(address, false).await;
            let mut other = Queue::open(address, false).await;
            other.hostnqn = "nqn.2026-11.org.example:other";
            other.connect(SUBNQN, 0, CNTLID_DYNAMIC, 0).await.ok();
            other.configure(0x0046_0001).await;
            let mut other_io = Queue::open(address, false).await;
            other_io.hostnqn = other.hostnqn;
            other_io.connect(SUBNQN, 1, other.cntlid, 0).await.ok();
            let write = IoCommand::Write(blocks(7, 1)).encode(1).unwrap();
            io.submit(write, Data::Write(vec![1; 4096])).await;
            while latch.0.load(Ordering::SeqCst) == 0 {
                sleep(Duration::from_millis(1)).await;
            }
            match shuts_down {
                true => admin.configure(0x0046_4001).await,
                false => drop(io.submit(FabricsCommand::Disconnect.encode(), Data::None).await),
            }
            sleep(Duration::from_millis(50)).await;
            drop((admin, io));
            sleep(Duration::from_millis(50)).await;
            let release = Arc::clone(&latch);
            drop(spawn(async move {
                sleep(Duration::from_millis(200)).await;
                release.1.store(true, Ordering::SeqCst);
            }));
            other_io.call(write, Data::Write(vec![2; 4096])).await.ok();
            sleep(Duration::from_millis(300)).await;
            let read = IoCommand::Read(blocks(7, 1)).encode(1).unwrap();
            let data = other_io.call(read, Data::Read(4096)).await.ok().data;
            assert_eq!(data[0], 2, "an acknowledged write is lost to a late one; shut down: {shuts_down}");
            target.stop();
        });
    }
}

#[test]
fn a_reserved_area_is_not_overwritten_by_a_lost_connection_either() {
    run(|| async {
        let latch = Arc::new((AtomicUsize::new(0), AtomicBool::new(false)));
        let (target, address) = serve_late(&latch);
        let slot = ReservedArea::Group;
        let fid = slot.feature().code();
        let set = SetFeatures { fid, save: false, nsid: 1, cdw11: 0 }.encode();
        let mut admin = Queue::admin(address, SUBNQN, false).await;
        admin.submit(set, Data::Write(slot.encode(b"old").unwrap())).await;
        // Longer than a capsule holds, so the target sends an R2T.
        while latch.0.load(Ordering::SeqCst) == 0 {
            assert!(admin.receive().await, "the target asks for the data");
            sleep(Duration::from_millis(1)).await;
        }
        drop(admin);
        let next = spawn(async move { Queue::admin(address, SUBNQN, false).await });
        sleep(Duration::from_millis(100)).await;
        assert!(!next.is_finished(), "the old label is still to land");
        latch.1.store(true, Ordering::SeqCst);
        let mut again = next.await.unwrap();
        again.call(set, Data::Write(slot.encode(b"new").unwrap())).await.ok();
        let get = GetFeatures { fid, select: FeatureSelect::Current, nsid: 1, cdw11: 0 }.encode();
        let data = again.call(get, Data::Read(slot.frame_bytes())).await.ok().data;
        assert_eq!(slot.decode(&data), Ok(b"new".as_slice()));
        target.stop();
    });
}
