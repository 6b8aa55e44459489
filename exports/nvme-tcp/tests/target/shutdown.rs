//! Shutdowns that follow each other while the medium is slow.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::common::*;
use sealblock_block::{Abilities, Device, DynDevice, Geometry, Outcome, Request, RequestKind};
use sealblock_exports_nvme_tcp::{Namespace, Subsystem};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_media_memory::MemoryDevice;
use sealblock_runtime_reactor::sleep;
use sealblock_units::BlockSize;

/// CC with EN, and with SHN for a normal shutdown.
const ENABLED: u64 = 0x0046_0001;
const SHUT_DOWN: u64 = 0x0046_4001;
/// CSTS: ready, and the shutdown status.
const IN_PROGRESS: u64 = 1 | 1 << 2;
const COMPLETE: u64 = 1 | 2 << 2;

/// Flushes that have started, and how many may complete.
#[derive(Default)]
struct Flushes {
    begun: AtomicUsize,
    allowed: AtomicUsize,
}

struct SlowFlush(MemoryDevice, Arc<Flushes>);

impl Device for SlowFlush {
    fn geometry(&self) -> &Geometry {
        self.0.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.0.abilities()
    }

    async fn execute(&self, request: Request) -> Outcome {
        if request.kind() == RequestKind::Flush {
            let number = self.1.begun.fetch_add(1, Ordering::SeqCst);
            while self.1.allowed.load(Ordering::SeqCst) <= number {
                sleep(Duration::from_millis(1)).await;
            }
        }
        self.0.execute(request).await
    }
}

fn serve_slowly() -> (Served, Arc<Flushes>) {
    let flushes = Arc::<Flushes>::default();
    let device = SlowFlush(MemoryDevice::new(BlockSize::B4096, BLOCKS, None), Arc::clone(&flushes));
    let served = serve_with(short(), |_| {
        let shared = SharedDevice::publish(DynDevice::new("slow", device));
        Subsystem::new(SUBNQN.parse().unwrap(), "SN1").with_namespace(1, Namespace::new(shared, [1; 16])).unwrap()
    });
    (served, flushes)
}

async fn begun(flushes: &Flushes, count: usize) {
    while flushes.begun.load(Ordering::SeqCst) < count {
        sleep(Duration::from_millis(1)).await;
    }
}

#[test]
fn each_shutdown_completes_after_a_flush_of_its_own_and_many_share_one_task() {
    run(|| async {
        let (served, flushes) = serve_slowly();
        let mut admin = Queue::admin(served.address, SUBNQN, false).await;
        admin.configure(SHUT_DOWN).await;
        begun(&flushes, 1).await;
        for _ in 0..20 {
            admin.configure(0x0046_0000).await;
            admin.configure(ENABLED).await;
            admin.configure(SHUT_DOWN).await;
        }
        assert_eq!(admin.property(0x1C, 4).await, IN_PROGRESS);
        assert_eq!(flushes.begun.load(Ordering::SeqCst), 1, "one at a time");
        // The first flush started before the host requested the last shutdown, so it does not cover that.
        flushes.allowed.store(1, Ordering::SeqCst);
        begun(&flushes, 2).await;
        assert_eq!(admin.property(0x1C, 4).await, IN_PROGRESS);
        flushes.allowed.store(usize::MAX, Ordering::SeqCst);
        while admin.property(0x1C, 4).await != COMPLETE {}
        assert_eq!(flushes.begun.load(Ordering::SeqCst), 2, "one for all that were asked for meanwhile");
    });
}

#[test]
fn a_flush_for_an_abandoned_shutdown_completes_nothing_and_blocks_nothing() {
    run(|| async {
        let (served, flushes) = serve_slowly();
        let mut admin = Queue::admin(served.address, SUBNQN, false).await;
        admin.configure(SHUT_DOWN).await;
        begun(&flushes, 1).await;
        admin.configure(0x0046_0000).await;
        admin.configure(ENABLED).await;
        flushes.allowed.store(usize::MAX, Ordering::SeqCst);
        assert_eq!(admin.property(0x1C, 4).await, 1);
        admin.configure(SHUT_DOWN).await;
        while admin.property(0x1C, 4).await != COMPLETE {}
        assert_eq!(flushes.begun.load(Ordering::SeqCst), 2);
    });
}
