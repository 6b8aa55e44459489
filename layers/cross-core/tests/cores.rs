//! Devices used from other cores, on both backends.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::join_all;
use sealblock_block::{
    Abilities, Ability, Device, Durability, DynDevice, ErrorKind, Expectations, Geometry, Outcome, Request,
    RequestKind, Response,
};
use sealblock_integrity::{Sealed, Tags};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_media_memory::MemoryDevice;
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_runtime_reactor::{BackendChoice, Config, CoreHandle, Cores, Placement, Reactor, pool, spawn, yield_now};
use sealblock_units::{BlockSize, Extent};

const BLOCKS: u64 = 256;
const TIMEOUT: Duration = Duration::from_secs(30);

/// Runs a test on two cores, on every available backend.
fn on_each_backend(test: impl Fn(Cores)) {
    let small = Config { pool_arena_bytes: 1 << 20, ..Config::default() };
    let mut all = vec![Config { runtime: BackendChoice::Syscalls, ..small.clone() }];
    let uring = Config { runtime: BackendChoice::Uring, ..small };
    if Reactor::new(uring.clone()).is_ok() {
        all.extend([Config { spin_us: 50, ..uring.clone() }, uring]);
    }
    for config in all {
        test(Cores::start(Placement::Count(2), config).expect("cores start"));
    }
}

/// Runs a future that the core makes, and returns its output.
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

fn extent(start: u64, blocks: u64) -> Extent {
    Extent::from_raw(start, blocks).unwrap()
}

fn write(start: u64, byte: u8) -> Request {
    let data = Slice::copy_from(&[byte; 512]);
    let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: 0 };
    let data = Sealed::seal(data, BlockSize::B512, None, &tags);
    Request::write(extent(start, 1), data, Durability::Volatile)
}

fn read(start: u64) -> Request {
    Request::read(extent(start, 1), Expectations::NONE)
}

fn byte(outcome: Outcome) -> u8 {
    let Ok(Response::Data(data)) = outcome else { panic!("blocks are read: {outcome:?}") };
    data.joined_data()[0]
}

fn publish(device: impl Device + 'static) -> SharedDevice {
    SharedDevice::publish(DynDevice::new("shared", device))
}

fn memory() -> MemoryDevice {
    MemoryDevice::new(BlockSize::B512, BLOCKS, None)
}

/// Records the order of writes, and waits, panics or never completes at certain blocks.
struct OrderedDevice {
    inner: MemoryDevice,
    started: RefCell<Vec<u64>>,
    done: Cell<u64>,
}

/// Blocks with a special result for [`OrderedDevice`].
const PANICS: u64 = 200;
const NEVER: u64 = 201;
const PANICS_LATER: u64 = 202;

impl OrderedDevice {
    fn new() -> Rc<OrderedDevice> {
        Rc::new(OrderedDevice { inner: memory(), started: RefCell::default(), done: Cell::new(0) })
    }
}

impl Device for OrderedDevice {
    fn geometry(&self) -> &Geometry {
        self.inner.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.inner.abilities()
    }

    async fn execute(&self, request: Request) -> Outcome {
        let start = request.extent().map_or(0, |extent| extent.start().get());
        self.started.borrow_mut().push(start);
        match start {
            PANICS => panic!("a device that fails badly"),
            NEVER => std::future::pending().await,
            PANICS_LATER => {
                yield_now().await;
                panic!("a device that fails badly, but not at once")
            }
            // Later requests overtake it.
            _ => join_all((0..start % 5).map(|_| yield_now())).await,
        };
        let outcome = self.inner.execute(request).await;
        self.done.set(self.done.get() + 1);
        outcome
    }
}

thread_local! {
    static ORDERED_DEVICE: RefCell<Option<Rc<OrderedDevice>>> = const { RefCell::new(None) };
}

/// Publishes a device that its core can also inspect.
fn publish_ordered(owner: &CoreHandle) -> SharedDevice {
    on(owner, || async {
        let device = OrderedDevice::new();
        ORDERED_DEVICE.set(Some(Rc::clone(&device)));
        publish(device)
    })
}

#[test]
fn requests_stay_on_the_owner_core_and_cross_from_others() {
    on_each_backend(|cores| {
        let (owner, remote) = (cores.handle(0).unwrap(), cores.handle(1).unwrap());
        let shared = on(&owner, || async { publish(memory()) });
        assert_eq!((shared.geometry().capacity_blocks, shared.name()), (BLOCKS, "shared"));
        let here = shared.clone();
        on(&owner, move || async move {
            let device = here.attach();
            assert!(device.is_local());
            device.execute(write(1, 7)).await.unwrap();
        });
        let there = shared.clone();
        on(&remote, move || async move {
            let device = there.attach();
            assert!(!device.is_local());
            assert_eq!(device.geometry(), there.geometry());
            assert_eq!(byte(device.execute(read(1)).await), 7);
            device.execute(write(1, 9)).await.unwrap();
            let outside = device.execute(read(BLOCKS)).await.unwrap_err();
            assert!(matches!(outside.kind(), ErrorKind::Range { .. }));
        });
        assert_eq!(on(&owner, move || async move { byte(shared.attach().execute(read(1)).await) }), 9);
        assert_eq!(cores.shutdown(TIMEOUT).aborted_tasks, 0, "no task is left");
    });
}

#[test]
fn locked_blocks_are_not_changed_by_other_clients_on_any_core() {
    on_each_backend(|cores| {
        let (owner, remote) = (cores.handle(0).unwrap(), cores.handle(1).unwrap());
        let shared = on(&owner, || async { publish(memory()) });
        let count = |core: &CoreHandle| {
            let device = shared.clone();
            let (send, receive) = std::sync::mpsc::channel();
            let task = async move |device: SharedDevice| {
                let device = device.attach();
                for _ in 0..50 {
                    let locked = device.lock(extent(1, 1)).await;
                    let before = byte(device.execute(read(1)).await);
                    yield_now().await;
                    locked.execute(write(1, before + 1)).await.unwrap();
                }
                for _ in 0..50 {
                    device.execute(write(2, 1)).await.unwrap();
                }
                let _ = send.send(());
            };
            core.address().send(move || drop(spawn(async move { task(device).await }))).expect("the core runs");
            receive
        };
        for counting in [count(&owner), count(&remote), count(&remote)] {
            counting.recv_timeout(TIMEOUT).expect("no caller waits forever");
        }
        assert_eq!(on(&remote, move || async move { byte(shared.attach().execute(read(1)).await) }), 150);
    });
}

#[test]
fn each_of_many_requests_in_flight_gets_its_own_reply() {
    on_each_backend(|cores| {
        let (owner, remote) = (cores.handle(0).unwrap(), cores.handle(1).unwrap());
        let shared = publish_ordered(&owner);
        on(&remote, move || async move {
            let device = shared.attach();
            for round in 0..20_u8 {
                let written = join_all((0..100).map(|i| device.execute(write(i, round ^ i as u8)))).await;
                assert!(written.iter().all(Result::is_ok));
                let blocks = join_all((0..100).map(|i| device.execute(read(i)))).await;
                let bytes: Vec<u8> = blocks.into_iter().map(byte).collect();
                assert_eq!(bytes, (0..100).map(|i| round ^ i).collect::<Vec<u8>>());
            }
        });
        let started = on(&owner, || async {
            ORDERED_DEVICE.with_borrow(|device| device.as_ref().unwrap().started.borrow().clone())
        });
        let once: Vec<u64> = (0..100).collect();
        assert!(started.len() == 4000 && started.chunks(100).all(|chunk| chunk == once), "begun in order");
    });
}

#[test]
fn a_dropped_future_neither_loses_nor_repeats_its_request() {
    on_each_backend(|cores| {
        let (owner, remote) = (cores.handle(0).unwrap(), cores.handle(1).unwrap());
        let shared = publish_ordered(&owner);
        on(&remote, move || async move {
            let device = shared.attach();
            for i in 0..50 {
                let mut call = Box::pin(device.execute(write(i, 3)));
                // Submitted with the first poll, then dropped before, with or after the reply.
                assert!(futures_util::poll!(call.as_mut()).is_pending());
                for _ in 0..i % 7 {
                    yield_now().await;
                }
                drop(call);
            }
            drop(device.execute(write(60, 3)));
            // A new request in a reused slot gets its own reply.
            assert_eq!(byte(device.execute(read(60)).await), 0, "a future that was never polled never starts");
            device.execute(Request::flush()).await.unwrap();
        });
        let done = move || async {
            let device = ORDERED_DEVICE.with_borrow(|device| Rc::clone(device.as_ref().unwrap()));
            while device.done.get() < 52 {
                yield_now().await;
            }
            (0..50).all(|i| device.started.borrow().iter().filter(|&&started| started == i).count() >= 1)
                && device.started.borrow().len() == 52
        };
        assert!(on(&owner, done));
        assert_eq!(cores.shutdown(TIMEOUT).aborted_tasks, 0);
    });
}

#[test]
fn attachments_of_a_core_share_a_link_that_ends_with_the_last() {
    on_each_backend(|cores| {
        let (owner, remote) = (cores.handle(0).unwrap(), cores.handle(1).unwrap());
        let shared = on(&owner, || async { publish(memory()) });
        on(&remote, move || async move {
            for _ in 0..3 {
                let many: Vec<_> = (0..10).map(|_| shared.attach()).collect();
                for device in &many {
                    device.execute(write(0, 1)).await.unwrap();
                }
                let last = many.last().cloned().unwrap();
                drop(many);
                assert_eq!(byte(last.execute(read(0)).await), 1);
            }
        });
        assert_eq!(cores.shutdown(TIMEOUT).aborted_tasks, 0);
    });
}

fn assert_unreachable(outcome: Outcome) {
    let error = outcome.unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Unreachable { .. }), "{error}");
    assert_eq!(error.device_name(), Some("shared"));
}

#[test]
fn a_request_that_panics_fails_alone() {
    on_each_backend(|cores| {
        let (owner, remote) = (cores.handle(0).unwrap(), cores.handle(1).unwrap());
        let shared = publish_ordered(&owner);
        on(&remote, move || async move {
            let device = shared.attach();
            for block in [PANICS, PANICS_LATER] {
                let outcomes = join_all([write(3, 1), write(block, 1), read(3)].map(|request| device.execute(request)));
                let [before, panicked, after] = <[Outcome; 3]>::try_from(outcomes.await).unwrap();
                assert!(before.is_ok() && after.is_ok());
                assert_unreachable(panicked);
            }
            device.execute(write(4, 5)).await.unwrap();
            assert_eq!(byte(device.execute(read(4)).await), 5);
        });
    });
}

#[test]
fn requests_fail_when_the_owner_core_stops() {
    on_each_backend(|there| {
        let Some(remote) = there.handle(1) else { panic!("there are two cores") };
        let homes = Cores::start(Placement::Count(1), Config { pool_arena_bytes: 0, ..Config::default() }).unwrap();
        let shared = publish_ordered(&homes.handle(0).unwrap());
        let (started, is_started) = std::sync::mpsc::channel();
        let (send, receive) = std::sync::mpsc::channel();
        let device = shared.clone();
        let work = move || {
            drop(spawn(async move {
                let device = device.attach();
                device.execute(write(1, 1)).await.unwrap();
                let mut calls = join_all((0..4).map(|_| device.execute(write(NEVER, 1))));
                assert!(futures_util::poll!(&mut calls).is_pending());
                started.send(()).unwrap();
                calls.await.into_iter().for_each(assert_unreachable);
                // Later requests, on the old link and on a new one.
                assert_unreachable(device.execute(read(1)).await);
                drop(device);
                let again = shared.attach();
                assert_unreachable(again.execute(read(1)).await);
                send.send(()).unwrap();
            }));
        };
        remote.address().send(work).unwrap();
        is_started.recv_timeout(TIMEOUT).unwrap();
        homes.shutdown(Duration::from_millis(1));
        receive.recv_timeout(TIMEOUT).expect("no caller waits forever");
    });
}

#[test]
fn a_request_sent_in_the_turn_in_which_its_link_ends_is_executed() {
    on_each_backend(|cores| {
        let (owner, remote) = (cores.handle(0).unwrap(), cores.handle(1).unwrap());
        let shared = publish_ordered(&owner);
        on(&remote, move || async move {
            let device = shared.attach();
            let mut calls = join_all((0..3).map(|block| device.execute(write(block, 1))));
            assert!(futures_util::poll!(&mut calls).is_pending());
            drop(calls);
            drop(device);
        });
        let all_done = move || async {
            let device = ORDERED_DEVICE.with_borrow(|device| Rc::clone(device.as_ref().unwrap()));
            while device.done.get() < 3 {
                yield_now().await;
            }
        };
        on(&owner, all_done);
        assert_eq!(cores.shutdown(TIMEOUT).aborted_tasks, 0);
    });
}

#[test]
fn requests_that_have_not_begun_when_the_owner_core_stops_fail() {
    on_each_backend(|there| {
        let remote = there.handle(1).unwrap();
        let homes = Cores::start(Placement::Count(1), Config { pool_arena_bytes: 0, ..Config::default() }).unwrap();
        let home = homes.handle(0).unwrap();
        let shared = publish_ordered(&home);
        let (is_busy, busy) = std::sync::mpsc::channel();
        let (go_on, may_go_on) = std::sync::mpsc::channel::<()>();
        let (send, receive) = std::sync::mpsc::channel();
        let work = move || {
            drop(spawn(async move {
                let device = shared.attach();
                device.execute(write(1, 1)).await.unwrap();
                // The owner core is busy in one task, so that none of these begins before it stops.
                let occupy = move || {
                    is_busy.send(()).unwrap();
                    may_go_on.recv_timeout(TIMEOUT).unwrap();
                };
                send_to(&home, occupy);
                let mut calls = join_all((0..9).map(|_| device.execute(write(NEVER, 1))));
                assert!(futures_util::poll!(&mut calls).is_pending());
                calls.await.into_iter().for_each(assert_unreachable);
                send.send(()).unwrap();
            }));
        };
        remote.address().send(work).unwrap();
        busy.recv_timeout(TIMEOUT).unwrap();
        let stopping = std::thread::spawn(move || homes.shutdown(Duration::ZERO));
        std::thread::sleep(Duration::from_millis(5));
        go_on.send(()).unwrap();
        receive.recv_timeout(TIMEOUT).expect("no caller waits forever");
        stopping.join().unwrap();
    });
}

fn send_to(core: &CoreHandle, work: impl FnOnce() + Send + 'static) {
    core.address().send(work).expect("the core runs");
}

#[test]
fn requests_of_a_core_that_stops_are_executed_and_their_data_dropped_elsewhere() {
    on_each_backend(|cores| {
        let owner = cores.handle(0).unwrap();
        let shared = publish_ordered(&owner);
        let callers =
            Cores::start(Placement::Count(1), Config { pool_arena_bytes: 1 << 20, ..Config::default() }).unwrap();
        let (go_on, may_go_on) = std::sync::mpsc::channel::<()>();
        // The owner core begins nothing before the callers' core has ended.
        send_to(&owner, move || may_go_on.recv_timeout(TIMEOUT).unwrap());
        on(&callers.handle(0).unwrap(), move || async move {
            let device = shared.attach();
            let write = |block: u64| {
                let mut data = pool().take(512);
                data.fill(block as u8 + 1);
                let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: 0 };
                let data = Sealed::seal(data.freeze(), BlockSize::B512, None, &tags);
                Request::write(extent(block, 1), data, Durability::Volatile)
            };
            let mut calls = join_all((0..10).map(|block| device.execute(write(block))));
            assert!(futures_util::poll!(&mut calls).is_pending());
        });
        callers.shutdown(TIMEOUT);
        go_on.send(()).unwrap();
        let bytes = on(&owner, || async {
            let device = ORDERED_DEVICE.with_borrow(|device| Rc::clone(device.as_ref().unwrap()));
            while device.done.get() < 10 {
                yield_now().await;
            }
            join_all((0..10).map(|block| device.inner.execute(read(block))))
                .await
                .into_iter()
                .map(byte)
                .collect::<Vec<u8>>()
        });
        assert_eq!(bytes, (1..=10).collect::<Vec<u8>>());
        assert_eq!(cores.shutdown(TIMEOUT).aborted_tasks, 0);
    });
}

/// Memory that records the thread on which it is dropped.
struct Lender(Vec<u8>, std::sync::mpsc::Sender<std::thread::ThreadId>);

impl AsMut<[u8]> for Lender {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

impl Drop for Lender {
    fn drop(&mut self) {
        let _ = self.1.send(std::thread::current().id());
    }
}

#[test]
fn the_data_of_a_write_return_to_the_core_that_sent_it() {
    on_each_backend(|cores| {
        let (owner, remote) = (cores.handle(0).unwrap(), cores.handle(1).unwrap());
        let waits = publish_ordered(&owner);
        let in_place = on(&owner, || async { publish(memory()) });
        on(&remote, move || async move {
            for shared in [waits, in_place] {
                let device = shared.attach();
                for is_abandoned in [false, true] {
                    let (dropped, on_thread) = std::sync::mpsc::channel();
                    let data = Buffer::lent(Lender(vec![1; 512], dropped)).freeze();
                    let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: 0 };
                    let data = Sealed::seal(data, BlockSize::B512, None, &tags);
                    // It waits for some turns, where the device can.
                    let request = Request::write(extent(3, 1), data, Durability::Volatile);
                    match is_abandoned {
                        true => assert!(futures_util::poll!(Box::pin(device.execute(request))).is_pending()),
                        false => drop(device.execute(request).await.unwrap()),
                    }
                    device.execute(read(4)).await.unwrap();
                    while let Err(std::sync::mpsc::TryRecvError::Empty) = on_thread.try_recv().map(|thread| {
                        assert_eq!(thread, std::thread::current().id(), "abandoned: {is_abandoned}");
                    }) {
                        yield_now().await;
                    }
                }
            }
        });
    });
}

/// A device whose Copies wait until they are released, and that records which requests were started.
struct SlowCopies {
    inner: MemoryDevice,
    started: RefCell<Vec<(RequestKind, u64)>>,
    is_released: Cell<bool>,
}

impl Device for SlowCopies {
    fn geometry(&self) -> &Geometry {
        self.inner.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.inner.abilities().with([RequestKind::Copy], Ability::Native)
    }

    async fn execute(&self, request: Request) -> Outcome {
        self.started.borrow_mut().push((request.kind(), request.extents.one().start().get()));
        let Some(_source) = request.source() else { return self.inner.execute(request).await };
        while !self.is_released.get() {
            yield_now().await;
        }
        Ok(Response::Done)
    }
}

#[test]
fn a_copy_excludes_writers_from_its_source_and_its_destination() {
    on_each_backend(|cores| {
        on(&cores.handle(0).unwrap(), || async {
            let device = SlowCopies { inner: memory(), started: RefCell::default(), is_released: Cell::new(false) };
            let device = Rc::new(device);
            let attached = publish(Rc::clone(&device)).attach();
            let execute = |request: Request| {
                let attached = attached.clone();
                spawn(async move { attached.execute(request).await.map(drop) })
            };
            let copy = execute(Request::copy(extent(10, 4), extent(30, 4), Expectations::NONE, Durability::Volatile));
            while device.started.borrow().is_empty() {
                yield_now().await;
            }
            let held = [execute(write(13, 1)), execute(write(30, 1))];
            let others = [execute(write(14, 1)), execute(write(20, 1)), execute(read(11)), execute(read(31))];
            for other in others {
                other.await.unwrap().unwrap();
            }
            let writes = |blocks: &[u64]| {
                let started = device.started.borrow();
                blocks.iter().filter(|block| started.contains(&(RequestKind::Write, **block))).count()
            };
            assert_eq!((writes(&[14, 20]), writes(&[13, 30])), (2, 0));
            device.is_released.set(true);
            copy.await.unwrap().unwrap();
            for write in held {
                write.await.unwrap().unwrap();
            }
            assert_eq!(writes(&[13, 30]), 2);
        });
    });
}
