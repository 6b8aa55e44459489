//! A device that is quiesced, and another that takes its place while it is used.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use futures_util::future::join_all;
use sealblock_block::{
    Abilities, Device, Durability, DynDevice, ErrorKind, Gate, Geometry, Outcome, Request, Response,
};
use sealblock_integrity::{Checks, Sealed, Tags};
use sealblock_layers_cross_core::{Attached, SharedDevice};
use sealblock_media_memory::MemoryDevice;
use sealblock_runtime_memory::Slice;
use sealblock_runtime_reactor::{Config, Reactor, spawn, yield_now};
use sealblock_units::{BlockSize, Extent};

const BLOCKS: u64 = 64;

/// So many of the first blocks of a memory, which answers writes only when it may.
struct Part {
    below: Rc<MemoryDevice>,
    geometry: Geometry,
    may_write: Rc<Cell<bool>>,
}

impl Device for Part {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn abilities(&self) -> Abilities {
        self.below.abilities()
    }

    async fn execute(&self, operation: Request) -> Outcome {
        while matches!(operation, Request::Write { .. }) && !self.may_write.get() {
            yield_now().await;
        }
        self.below.execute(operation).await
    }
}

struct Rig {
    memory: Rc<MemoryDevice>,
    may_write: Rc<Cell<bool>>,
}

impl Rig {
    fn new() -> Rig {
        let memory = Rc::new(MemoryDevice::new(BlockSize::B512, BLOCKS, None));
        Rig { memory, may_write: Rc::new(Cell::new(true)) }
    }

    fn part(&self, capacity_blocks: u64) -> Rc<Gate<DynDevice>> {
        let geometry = Geometry { capacity_blocks, ..self.memory.geometry().clone() };
        let (below, may_write) = (Rc::clone(&self.memory), Rc::clone(&self.may_write));
        Rc::new(Gate::new("part", DynDevice::new(Part { below, geometry, may_write })))
    }
}

fn run<F: Future<Output = ()>>(test: impl FnOnce() -> F) {
    let config = Config { pool_arena_bytes: 1 << 20, ..Config::default() };
    Reactor::new(config).unwrap().block_on(async { test().await });
}

fn extent(start: u64, blocks: u64) -> Extent {
    Extent::from_raw(start, blocks).unwrap()
}

fn write(start: u64, byte: u8, durability: Durability) -> Request {
    let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: 0 };
    let data = Sealed::seal(Slice::copy_from(&[byte; 512]), BlockSize::B512, None, &tags);
    Request::Write { extent: extent(start, 1), data, durability }
}

async fn byte(device: &Attached, start: u64) -> u8 {
    let read = Request::Read { extent: extent(start, 1), checks: Checks::NONE };
    let Ok(Response::Data(data)) = device.execute(read).await else { panic!("block {start} is read") };
    data.data()[0]
}

/// Lets everything go on that can.
async fn settle() {
    for _ in 0..50 {
        yield_now().await;
    }
}

#[test]
fn requests_wait_and_go_on_with_the_device_that_took_the_place() {
    run(|| async {
        let rig = Rig::new();
        let shared = SharedDevice::publish(rig.part(8));
        let device = shared.attach();
        rig.may_write.set(false);
        let begin = |at, value| {
            let device = device.clone();
            spawn(async move { device.execute(write(at, value, Durability::Volatile)).await })
        };
        let under_way = begin(1, 1);
        settle().await;
        let quiesced = shared.quiesce().expect("nobody else has it");
        assert!(shared.quiesce().is_none(), "one at a time");
        let waiting = [begin(2, 2), begin(12, 3)];
        let read = Request::Read { extent: extent(1, 1), checks: Checks::NONE };
        assert!(device.try_execute(&read).is_none(), "not in place either");
        settle().await;
        assert_eq!(quiesced.under_way(), 1);
        rig.may_write.set(true);
        quiesced.drained().await;
        under_way.await.unwrap().unwrap();
        let larger = quiesced.replace(rig.part(16));
        settle().await;
        assert_eq!(quiesced.under_way(), 0, "what waits goes on waiting");
        drop(quiesced);
        for done in join_all(waiting).await {
            done.unwrap().expect("the larger device has room for it");
        }
        assert_eq!((byte(&device, 1).await, byte(&device, 2).await), (1, 2));
        assert_eq!((shared.geometry().capacity_blocks, larger.geometry().capacity_blocks), (8, 16));
        assert_eq!(device.geometry().capacity_blocks, 8, "an attachment sees what it saw");
        assert_eq!(byte(&larger.attach(), 12).await, 3);
        assert!(shared.is_same(&larger) && !shared.is_same(&SharedDevice::publish(rig.part(8))));
    });
}

#[test]
fn what_lies_past_the_end_of_a_smaller_device_is_refused_for_all() {
    run(|| async {
        let rig = Rig::new();
        let shared = SharedDevice::publish(rig.part(16));
        let before = shared.attach();
        before.execute(write(12, 1, Durability::Volatile)).await.unwrap();
        let quiesced = shared.quiesce().unwrap();
        quiesced.drained().await;
        let smaller = quiesced.replace(rig.part(8));
        drop(quiesced);
        for device in [before, smaller.attach()] {
            for operation in [
                write(12, 2, Durability::Volatile),
                Request::Read { extent: extent(7, 2), checks: Checks::NONE },
                Request::Discard { extents: vec![extent(8, 1)] },
            ] {
                let failure = device.execute(operation).await.unwrap_err().into_kind();
                assert!(matches!(failure, ErrorKind::Range { .. }), "{failure}");
            }
            assert_eq!(byte(&device, 7).await, 0);
        }
    });
}

#[test]
fn a_place_that_was_emptied_says_why_and_nobody_hangs() {
    run(|| async {
        let rig = Rig::new();
        let shared = SharedDevice::publish(rig.part(8));
        let device = shared.attach();
        let quiesced = shared.quiesce().unwrap();
        let waiting = {
            let device = device.clone();
            spawn(async move { device.execute(Request::Flush).await })
        };
        settle().await;
        quiesced.empty("it could not be opened again".to_owned());
        drop(quiesced);
        for outcome in [waiting.await.unwrap(), device.execute(write(0, 1, Durability::Volatile)).await] {
            let error = outcome.unwrap_err();
            assert!(error.to_string().contains("could not be opened again"), "{error}");
            assert!(matches!(error.kind(), ErrorKind::Unreachable { .. }));
        }
        let read = Request::Read { extent: extent(0, 1), checks: Checks::NONE };
        assert!(device.try_execute(&read).is_none());
        assert_eq!(device.geometry().capacity_blocks, 8);
    });
}

#[test]
fn who_holds_a_range_alone_and_who_waits_for_it_do_not_hold_up_the_end_of_requests() {
    run(|| async {
        let rig = Rig::new();
        let shared = SharedDevice::publish(rig.part(8));
        let (one, other) = (shared.attach(), shared.attach());
        let locked = one.lock(extent(0, 2)).await;
        let waits = spawn(async move { other.execute(write(1, 7, Durability::ForceUnitAccess)).await });
        settle().await;
        let quiesced = shared.quiesce().unwrap();
        quiesced.drained().await;
        drop(quiesced);
        locked.execute(write(0, 3, Durability::Volatile)).await.unwrap();
        drop(locked);
        waits.await.unwrap().unwrap();
        assert_eq!((byte(&one, 0).await, byte(&one, 1).await), (3, 7));
    });
}

#[test]
fn a_flush_that_has_begun_ends_although_another_waits_to_begin() {
    run(|| async {
        let rig = Rig::new();
        let shared = SharedDevice::publish(rig.part(8));
        let device = shared.attach();
        rig.may_write.set(false);
        let begin = |operation| {
            let device = device.clone();
            spawn(async move { device.execute(operation).await })
        };
        let durable = begin(write(0, 1, Durability::ForceUnitAccess));
        settle().await;
        let flush = begin(Request::Flush);
        settle().await;
        let quiesced = shared.quiesce().unwrap();
        let late = begin(Request::Flush);
        settle().await;
        assert_eq!(quiesced.under_way(), 2, "the late one has not begun");
        rig.may_write.set(true);
        quiesced.drained().await;
        assert!(durable.await.unwrap().is_ok() && flush.await.unwrap().is_ok());
        drop(quiesced);
        late.await.unwrap().unwrap();
    });
}

#[test]
fn who_wrote_before_the_place_changed_is_told_of_what_was_lost() {
    run(|| async {
        let rig = Rig::new();
        let shared = SharedDevice::publish(rig.part(8));
        let (wrote, looked) = (Arc::new(shared.asker("one")), Arc::new(shared.asker("other")));
        let writer = shared.attach_as(&wrote);
        writer.execute(write(0, 1, Durability::Volatile)).await.unwrap();
        let quiesced = shared.quiesce().unwrap();
        quiesced.lost_writes(&ErrorKind::Media { reason: "the log could not be written".to_owned() }.into());
        let larger = quiesced.replace(rig.part(16));
        drop(quiesced);
        assert!(larger.knows(&wrote), "the same asker, whichever handle it came from");
        let error = larger.attach_as(&wrote).execute(Request::Flush).await.unwrap_err();
        assert!(error.to_string().contains("the log could not be written"), "{error}");
        assert!(writer.execute(Request::Flush).await.is_ok(), "told once");
        assert!(larger.attach_as(&looked).execute(Request::Flush).await.is_ok(), "who had written nothing is not told");
    });
}

#[test]
fn a_core_that_is_not_the_home_cannot_quiesce() {
    let rig = Rig::new();
    let config = Config { pool_arena_bytes: 1 << 20, ..Config::default() };
    let home = Reactor::new(config.clone()).unwrap();
    let shared = home.block_on(async { SharedDevice::publish(rig.part(8)) });
    std::thread::spawn(move || {
        let there = Reactor::new(config).unwrap();
        there.block_on(async { assert!(shared.quiesce().is_none()) });
    })
    .join()
    .unwrap();
    drop(home);
}
