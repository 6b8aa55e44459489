//! One device behind several hosts, an NBD client and a mirror's resync, whose backend loses power between write and flush.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::ready;
use std::rc::Rc;
use std::time::Duration;

use futures_util::FutureExt;
use sealblock_block::{
    Abilities, Device, Durability, DynDevice, ErrorKind, Expectations, Geometry, Outcome, Request, RequestKind,
    Response,
};
use sealblock_integrity::{Sealed, Tags};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_layers_mirror::{CreateOptions, MirrorState, ReplicaSource, create};
use sealblock_media_memory::MemoryDevice;
use sealblock_runtime_memory::Slice;
use sealblock_runtime_reactor::{sleep, spawn};
use sealblock_units::{BlockSize, Extent};

use crate::shared_device::{RealTime, any, flushes, nbd, nvme, run, serve_nbd, serve_nvme, write};

const BLOCKS: u64 = 64;

/// RAM with a volatile write cache: what was not flushed goes with the power, which the next flush reports.
struct Cached {
    memory: MemoryDevice,
    /// What the blocks that were written since the last flush held before.
    unflushed: RefCell<BTreeMap<u64, Sealed>>,
    has_lost_writes: Cell<bool>,
}

impl Cached {
    fn new() -> Cached {
        let memory = MemoryDevice::new(BlockSize::B4096, BLOCKS, None);
        Cached { memory, unflushed: RefCell::default(), has_lost_writes: Cell::new(false) }
    }

    async fn content(&self, at: u64) -> Sealed {
        let extent = Extent::from_raw(at, 1).unwrap();
        match self.memory.execute(Request::read(extent, Expectations::NONE)).await.unwrap() {
            Response::Data(data) => data,
            other => panic!("{other:?} for data"),
        }
    }

    async fn lose_power(&self) {
        for (at, data) in self.unflushed.take() {
            let extent = Extent::from_raw(at, 1).unwrap();
            self.memory.execute(Request::write(extent, data, Durability::Volatile)).await.unwrap();
        }
        self.has_lost_writes.set(true);
    }
}

impl Device for Cached {
    fn geometry(&self) -> &Geometry {
        self.memory.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.memory.abilities()
    }

    async fn execute(&self, request: Request) -> Outcome {
        match request.kind() {
            RequestKind::Write if request.is_volatile() => {
                let extent = request.extents.one();
                for at in extent.start().get()..=extent.last().get() {
                    let before = self.content(at).await;
                    self.unflushed.borrow_mut().entry(at).or_insert(before);
                }
            }
            RequestKind::Flush if self.has_lost_writes.take() => {
                return Err(ErrorKind::Media { reason: "the power was lost".to_owned() }.into());
            }
            RequestKind::Flush => self.unflushed.borrow_mut().clear(),
            _ => {}
        }
        self.memory.execute(request).await
    }
}

/// The device as a replica that cuts its power just before the first flush of a resync, and counts the flushes that fail.
struct Witness {
    replica: DynDevice,
    backend: Rc<Cached>,
    seen: Rc<Seen>,
}

#[derive(Default)]
struct Seen {
    has_cut_power: Cell<bool>,
    has_written: Cell<bool>,
    failed_flushes: Cell<u32>,
}

impl Device for Witness {
    fn geometry(&self) -> &Geometry {
        self.replica.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.replica.abilities()
    }

    async fn execute(&self, request: Request) -> Outcome {
        let is_flush = request.kind() == RequestKind::Flush;
        if is_flush && self.seen.has_written.get() && !self.seen.has_cut_power.replace(true) {
            self.backend.lose_power().await;
        }
        self.seen.has_written.set(self.seen.has_written.get() || request.kind() == RequestKind::Write);
        let outcome = self.replica.execute(request).await;
        if is_flush && outcome.is_err() {
            self.seen.failed_flushes.set(self.seen.failed_flushes.get() + 1);
        }
        outcome
    }
}

async fn filled_memory() -> DynDevice {
    let memory = MemoryDevice::new(BlockSize::B4096, BLOCKS, None);
    let extent = Extent::from_raw(0, BLOCKS).unwrap();
    let bytes = vec![9; BLOCKS as usize * 4096];
    let data = Sealed::seal(Slice::copy_from(&bytes), BlockSize::B4096, None, &Tags::default());
    memory.execute(Request::write(extent, data, Durability::Volatile)).await.unwrap();
    DynDevice::new("memory", memory)
}

#[test]
fn a_backend_that_loses_power_fails_one_flush_of_each_that_had_written_and_of_no_other() {
    run(|| async {
        let backend = Rc::new(Cached::new());
        let shared = SharedDevice::publish(DynDevice::new("cached", Rc::clone(&backend)));
        let (target, to_nvme) = serve_nvme(any(), shared.clone());
        let (server, to_nbd) = serve_nbd(&shared);
        let (one, two, idle) = (nvme(to_nvme, 1).await, nvme(to_nvme, 2).await, nvme(to_nvme, 3).await);
        let (client, other) = (nbd(to_nbd, "disk").await, nbd(to_nbd, "other").await);
        write(&one, 1).await;
        write(&two, 2).await;
        write(&client, 3).await;

        // The mirror is one more host. Its connection outlives the failure of its replica, so it is one and the same controller.
        let seen = Rc::<Seen>::default();
        let replica = DynDevice::from(nvme(to_nvme, 4).await);
        let open = {
            let (backend, seen) = (Rc::clone(&backend), Rc::clone(&seen));
            move || {
                let (replica, backend, seen) = (replica.clone(), Rc::clone(&backend), Rc::clone(&seen));
                ready(Ok(DynDevice::new("replica", Witness { replica, backend, seen }))).boxed_local()
            }
        };
        let device = open().await;
        let good = ReplicaSource::new("good", Ok(filled_memory().await), None);
        let resynced = ReplicaSource::new("resynced", device, Some(Box::new(open)));
        let options = CreateOptions { random: [5; 16], name: None, from: Some(0), force: true };
        let opened = create(vec![good, resynced], RealTime, options).await.unwrap();
        let (mirror, worker) = (opened.mirror, spawn(opened.worker.run()));
        while mirror.state() != MirrorState::Optimal {
            sleep(Duration::from_millis(5)).await;
        }
        assert!(seen.has_cut_power.get(), "the resync flushed what it wrote");
        assert_eq!(seen.failed_flushes.get(), 1, "and was told once that it is lost");
        for at in 0..BLOCKS {
            assert_eq!(backend.content(at).await.joined_data()[0], 9, "block {at} was copied anew");
        }

        for (name, failed, again) in [
            ("one", flushes(&one).await, flushes(&one).await),
            ("two", flushes(&two).await, flushes(&two).await),
            ("client", flushes(&client).await, flushes(&client).await),
        ] {
            assert_eq!((failed, again), (false, true), "{name}");
        }
        assert!(flushes(&idle).await && flushes(&other).await, "these had written nothing");
        mirror.close().await.unwrap();
        assert_eq!(seen.failed_flushes.get(), 1);
        worker.abort();
        target.stop();
        server.stop();
    });
}
