//! A device that is quiesced, and replaced while clients use it.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use sealblock_block::{
    Abilities, Ability, Device, Durability, DynDevice, ErrorKind, Expectations, Freshness, Geometry, Outcome, Request,
    RequestKind, Response, VerifyStats, WhyOlder,
};
use sealblock_integrity::{Sealed, Tags};
use sealblock_layers_cross_core::{Attached, SharedDevice};
use sealblock_media_memory::MemoryDevice;
use sealblock_runtime_memory::Slice;
use sealblock_runtime_reactor::{Config, Reactor, spawn, submitted, yield_now};
use sealblock_units::{BlockSize, Extent};

const BLOCKS: u64 = 64;

/// The first blocks of a memory device; its writes complete only while that is allowed.
struct PartDevice {
    inner: Rc<MemoryDevice>,
    geometry: Geometry,
    may_write: Rc<Cell<bool>>,
}

impl Device for PartDevice {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn abilities(&self) -> Abilities {
        self.inner.abilities()
    }

    async fn execute(&self, request: Request) -> Outcome {
        while request.kind() == RequestKind::Write && !self.may_write.get() {
            yield_now().await;
        }
        self.inner.execute(request).await
    }
}

struct Harness {
    memory: Rc<MemoryDevice>,
    may_write: Rc<Cell<bool>>,
}

impl Harness {
    fn new() -> Harness {
        let memory = Rc::new(MemoryDevice::new(BlockSize::B512, BLOCKS, None));
        Harness { memory, may_write: Rc::new(Cell::new(true)) }
    }

    fn device(&self, capacity_blocks: u64) -> DynDevice {
        let geometry = Geometry { capacity_blocks, ..self.memory.geometry().clone() };
        let (inner, may_write) = (Rc::clone(&self.memory), Rc::clone(&self.may_write));
        DynDevice::new("part", PartDevice { inner, geometry, may_write })
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
    Request::write(extent(start, 1), data, durability)
}

async fn byte(device: &Attached, start: u64) -> u8 {
    let read = Request::read(extent(start, 1), Expectations::NONE);
    let Ok(Response::Data(data)) = device.execute(read).await else { panic!("block {start} is read") };
    data.joined_data()[0]
}

/// Runs every task until it waits.
async fn run_until_idle() {
    for _ in 0..50 {
        yield_now().await;
    }
}

#[test]
fn waiting_requests_go_to_the_device_that_replaced_the_first() {
    run(|| async {
        let harness = Harness::new();
        let shared = SharedDevice::publish(harness.device(8));
        let device = shared.attach();
        harness.may_write.set(false);
        let begin = |at, value| {
            let device = device.clone();
            spawn(async move { device.execute(write(at, value, Durability::Volatile)).await })
        };
        let in_flight = begin(1, 1);
        run_until_idle().await;
        let quiesced = shared.quiesce().expect("it is not quiesced yet");
        assert!(shared.quiesce().is_none(), "one at a time");
        let waiting = [begin(2, 2), begin(12, 3)];
        let read = Request::read(extent(1, 1), Expectations::NONE);
        assert!(device.try_execute(&read).is_none(), "not in place either");
        run_until_idle().await;
        assert_eq!(quiesced.in_flight(), 1);
        harness.may_write.set(true);
        quiesced.drained().await;
        in_flight.await.unwrap().unwrap();
        let larger = quiesced.replace(harness.device(16));
        run_until_idle().await;
        assert_eq!(quiesced.in_flight(), 0, "waiting requests still wait");
        drop(quiesced);
        for done in join_all(waiting).await {
            done.unwrap().expect("the larger device has room for it");
        }
        assert_eq!((byte(&device, 1).await, byte(&device, 2).await), (1, 2));
        assert_eq!((shared.geometry().capacity_blocks, larger.geometry().capacity_blocks), (8, 16));
        assert_eq!(device.geometry().capacity_blocks, 8, "an attachment sees what it saw");
        assert_eq!(byte(&larger.attach(), 12).await, 3);
        assert!(shared.is_same(&larger) && !shared.is_same(&SharedDevice::publish(harness.device(8))));
    });
}

#[test]
fn blocks_past_the_end_of_a_smaller_device_are_refused_for_all() {
    run(|| async {
        let harness = Harness::new();
        let shared = SharedDevice::publish(harness.device(16));
        let before = shared.attach();
        before.execute(write(12, 1, Durability::Volatile)).await.unwrap();
        let quiesced = shared.quiesce().unwrap();
        quiesced.drained().await;
        let smaller = quiesced.replace(harness.device(8));
        drop(quiesced);
        for device in [before, smaller.attach()] {
            for request in [
                write(12, 2, Durability::Volatile),
                Request::read(extent(7, 2), Expectations::NONE),
                Request::discard([extent(8, 1)]),
            ] {
                let failure = device.execute(request).await.unwrap_err().into_kind();
                assert!(matches!(failure, ErrorKind::Range { .. }), "{failure}");
            }
            assert_eq!(byte(&device, 7).await, 0);
        }
    });
}

#[test]
fn requests_to_an_unavailable_device_fail_with_the_reason() {
    run(|| async {
        let harness = Harness::new();
        let shared = SharedDevice::publish(harness.device(8));
        let device = shared.attach();
        let quiesced = shared.quiesce().unwrap();
        let waiting = {
            let device = device.clone();
            spawn(async move { device.execute(Request::flush()).await })
        };
        run_until_idle().await;
        quiesced.set_unavailable("it could not be opened again".to_owned());
        drop(quiesced);
        for outcome in [waiting.await.unwrap(), device.execute(write(0, 1, Durability::Volatile)).await] {
            let error = outcome.unwrap_err();
            assert!(error.to_string().contains("could not be opened again"), "{error}");
            assert!(matches!(error.kind(), ErrorKind::Unreachable { .. }));
        }
        let read = Request::read(extent(0, 1), Expectations::NONE);
        assert!(device.try_execute(&read).is_none());
        assert_eq!(device.geometry().capacity_blocks, 8);
    });
}

#[test]
fn an_exclusion_and_those_who_wait_for_it_do_not_hold_up_draining() {
    run(|| async {
        let harness = Harness::new();
        let shared = SharedDevice::publish(harness.device(8));
        let (one, other) = (shared.attach(), shared.attach());
        let locked = one.lock(extent(0, 2)).await;
        let waits = spawn(async move { other.execute(write(1, 7, Durability::ForceUnitAccess)).await });
        run_until_idle().await;
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
fn a_started_flush_completes_although_another_waits_to_start() {
    run(|| async {
        let harness = Harness::new();
        let shared = SharedDevice::publish(harness.device(8));
        let device = shared.attach();
        harness.may_write.set(false);
        let begin = |request| {
            let device = device.clone();
            spawn(async move { device.execute(request).await })
        };
        let durable = begin(write(0, 1, Durability::ForceUnitAccess));
        run_until_idle().await;
        let flush = begin(Request::flush());
        run_until_idle().await;
        let quiesced = shared.quiesce().unwrap();
        let late = begin(Request::flush());
        run_until_idle().await;
        assert_eq!(quiesced.in_flight(), 2, "the late one has not started");
        harness.may_write.set(true);
        quiesced.drained().await;
        assert!(durable.await.unwrap().is_ok() && flush.await.unwrap().is_ok());
        drop(quiesced);
        late.await.unwrap().unwrap();
    });
}

#[test]
fn clients_that_wrote_before_a_replacement_learn_of_lost_writes() {
    run(|| async {
        let harness = Harness::new();
        let shared = SharedDevice::publish(harness.device(8));
        let (writer_cursor, reader) = (Arc::new(shared.flush_cursor("one")), Arc::new(shared.flush_cursor("other")));
        let writer = shared.attach_as(&writer_cursor);
        writer.execute(write(0, 1, Durability::Volatile)).await.unwrap();
        let quiesced = shared.quiesce().unwrap();
        quiesced.record_lost_writes(&ErrorKind::Media { reason: "the log could not be written".to_owned() }.into());
        let larger = quiesced.replace(harness.device(16));
        drop(quiesced);
        assert!(larger.has_cursor(&writer_cursor), "the same cursor, whichever handle made it");
        let error = larger.attach_as(&writer_cursor).execute(Request::flush()).await.unwrap_err();
        assert!(error.to_string().contains("the log could not be written"), "{error}");
        assert!(writer.execute(Request::flush()).await.is_ok(), "reported once");
        assert!(
            larger.attach_as(&reader).execute(Request::flush()).await.is_ok(),
            "a client that wrote nothing gets no error"
        );
    });
}

#[test]
fn only_the_owner_core_can_quiesce() {
    let harness = Harness::new();
    let config = Config { pool_arena_bytes: 1 << 20, ..Config::default() };
    let owner = Reactor::new(config.clone()).unwrap();
    let shared = owner.block_on(async { SharedDevice::publish(harness.device(8)) });
    std::thread::spawn(move || {
        let there = Reactor::new(config).unwrap();
        there.block_on(async { assert!(shared.quiesce().is_none()) });
    })
    .join()
    .unwrap();
    drop(owner);
}

/// A device whose every Verify computes for so long that no further one begins in the same turn, and whose reads take a
/// turn.
struct Slow {
    geometry: Geometry,
    verified: Rc<Cell<u64>>,
}

impl Device for Slow {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn abilities(&self) -> Abilities {
        Abilities::BASIC.with([RequestKind::Verify], Ability::Native)
    }

    async fn execute(&self, request: Request) -> Outcome {
        if request.kind() != RequestKind::Verify {
            submitted().await;
            return Ok(Response::Done);
        }
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(1) {}
        self.verified.set(self.verified.get() + 1);
        Ok(Response::Verified(VerifyStats::default()))
    }
}

#[test]
fn a_short_request_does_not_wait_for_all_long_ones_that_came_before_it() {
    const LONG_BLOCKS: u64 = 8192;
    const MANY: u64 = 40;
    run(|| async {
        let verified = Rc::new(Cell::new(0));
        let memory = MemoryDevice::new(BlockSize::B512, MANY * LONG_BLOCKS, None);
        let slow = Slow { geometry: memory.geometry().clone(), verified: Rc::clone(&verified) };
        let shared = SharedDevice::publish(DynDevice::new("slow", slow));
        let device = shared.attach();
        let begin = |request| {
            let device = device.clone();
            spawn(async move { device.execute(request).await })
        };
        let long: Vec<_> = (0..MANY)
            .map(|at| begin(Request::verify(extent(at * LONG_BLOCKS, LONG_BLOCKS), Expectations::NONE)))
            .collect();
        begin(Request::flush()).await.unwrap().unwrap();
        // Eight on an idle machine; more if this thread is interrupted, and all of them if nothing limits them.
        assert!(verified.get() < MANY * 3 / 4, "{} long requests ended first", verified.get());
        for done in join_all(long).await {
            done.unwrap().unwrap();
        }
        assert!(verified.get() >= MANY, "all of them, in one part or several");
    });
}

/// A device that may be older until it is flushed.
struct Older {
    geometry: Geometry,
    freshness: Cell<Freshness>,
}

impl Device for Older {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn abilities(&self) -> Abilities {
        Abilities { freshness: self.freshness.get(), ..Abilities::BASIC }
    }

    async fn execute(&self, request: Request) -> Outcome {
        if request.kind() == RequestKind::Flush {
            self.freshness.set(Freshness::Current);
        }
        Ok(Response::Done)
    }
}

#[test]
fn handles_show_the_freshness_that_a_device_has_now() {
    run(|| async {
        let memory = MemoryDevice::new(BlockSize::B512, BLOCKS, None);
        let older = Freshness::MayBeOlder(WhyOlder::RolledBack);
        let device = Older { geometry: memory.geometry().clone(), freshness: Cell::new(older) };
        let shared = SharedDevice::publish(DynDevice::new("older", device));
        let handle = shared.clone();
        assert_eq!(handle.abilities().freshness, older);
        shared.attach().execute(Request::flush()).await.unwrap();
        assert_eq!(handle.abilities().freshness, Freshness::Current);
    });
}
