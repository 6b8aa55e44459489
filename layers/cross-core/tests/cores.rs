//! Devices used from other cores, on both backends.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::join_all;
use sealblock_block::{
    Abilities, Device, Durability, DynDevice, ErrorKind, Gate, Geometry, Outcome, Request, Response,
};
use sealblock_integrity::{Checks, Sealed, Tags};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_media_memory::MemoryDevice;
use sealblock_runtime_memory::Slice;
use sealblock_runtime_reactor::{BackendChoice, Config, CoreHandle, Cores, Placement, Reactor, spawn, yield_now};
use sealblock_units::{BlockSize, Extent};

const BLOCKS: u64 = 256;
const LATE: Duration = Duration::from_secs(30);

/// Runs a test on two cores, on every backend that is to be had here.
fn each(test: impl Fn(Cores)) {
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

/// Runs a future of the core's own making, and gives what it gives.
fn on<F: Future<Output = T> + 'static, T: Send + 'static>(
    core: &CoreHandle,
    work: impl FnOnce() -> F + Send + 'static,
) -> T {
    let (send, receive) = std::sync::mpsc::channel();
    let task = move || {
        let work = work();
        drop(spawn(async move { drop(send.send(work.await)) }));
    };
    core.post().send(task).expect("the core runs");
    receive.recv_timeout(LATE).expect("the work does not panic and ends")
}

fn extent(start: u64, blocks: u64) -> Extent {
    Extent::from_raw(start, blocks).unwrap()
}

fn write(start: u64, byte: u8) -> Request {
    let data = Slice::copy_from(&[byte; 512]);
    let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: 0 };
    let data = Sealed::seal(data, BlockSize::B512, None, &tags);
    Request::Write { extent: extent(start, 1), data, durability: Durability::Volatile }
}

fn read(start: u64) -> Request {
    Request::Read { extent: extent(start, 1), checks: Checks::NONE }
}

fn byte(outcome: Outcome) -> u8 {
    let Ok(Response::Data(data)) = outcome else { panic!("blocks are read: {outcome:?}") };
    data.data()[0]
}

fn publish(device: impl Device + 'static) -> SharedDevice {
    SharedDevice::publish(Rc::new(Gate::new("shared", DynDevice::new(device))))
}

fn memory() -> MemoryDevice {
    MemoryDevice::new(BlockSize::B512, BLOCKS, None)
}

/// Notes the order of writes, and waits, panics or never ends where it is told to.
struct Odd {
    below: MemoryDevice,
    begun: RefCell<Vec<u64>>,
    done: Cell<u64>,
}

/// Blocks with a meaning for [`Odd`].
const PANICS: u64 = 200;
const NEVER: u64 = 201;

impl Odd {
    fn new() -> Rc<Odd> {
        Rc::new(Odd { below: memory(), begun: RefCell::default(), done: Cell::new(0) })
    }
}

impl Device for Odd {
    fn geometry(&self) -> &Geometry {
        self.below.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.below.abilities()
    }

    async fn execute(&self, operation: Request) -> Outcome {
        let start = operation.extent().map_or(0, |extent| extent.start().get());
        self.begun.borrow_mut().push(start);
        match start {
            PANICS => panic!("a device that fails badly"),
            NEVER => std::future::pending().await,
            // Later ones overtake.
            _ => join_all((0..start % 5).map(|_| yield_now())).await,
        };
        let outcome = self.below.execute(operation).await;
        self.done.set(self.done.get() + 1);
        outcome
    }
}

thread_local! {
    static ODD: RefCell<Option<Rc<Odd>>> = const { RefCell::new(None) };
}

/// Publishes an odd device that its core can look at.
fn publish_odd(home: &CoreHandle) -> SharedDevice {
    on(home, || async {
        let odd = Odd::new();
        ODD.set(Some(Rc::clone(&odd)));
        publish(odd)
    })
}

#[test]
fn at_home_there_is_no_hop_and_elsewhere_data_crosses() {
    each(|cores| {
        let (home, away) = (cores.handle(0).unwrap(), cores.handle(1).unwrap());
        let shared = on(&home, || async { publish(memory()) });
        assert_eq!((shared.geometry().capacity_blocks, shared.name()), (BLOCKS, "shared"));
        let here = shared.clone();
        on(&home, move || async move {
            let device = here.attach();
            assert!(device.is_home());
            device.execute(write(1, 7)).await.unwrap();
        });
        let there = shared.clone();
        on(&away, move || async move {
            let device = there.attach();
            assert!(!device.is_home());
            assert_eq!(device.geometry(), there.geometry());
            assert_eq!(byte(device.execute(read(1)).await), 7);
            device.execute(write(1, 9)).await.unwrap();
            let outside = device.execute(read(BLOCKS)).await.unwrap_err();
            assert!(matches!(outside.kind(), ErrorKind::Range { .. }));
        });
        assert_eq!(on(&home, move || async move { byte(shared.attach().execute(read(1)).await) }), 9);
        assert_eq!(cores.shutdown(LATE).aborted_tasks, 0, "nothing is left open");
    });
}

#[test]
fn blocks_that_are_locked_are_changed_by_nobody_else_on_any_core() {
    each(|cores| {
        let (home, away) = (cores.handle(0).unwrap(), cores.handle(1).unwrap());
        let shared = on(&home, || async { publish(memory()) });
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
            core.post().send(move || drop(spawn(async move { task(device).await }))).expect("the core runs");
            receive
        };
        for counting in [count(&home), count(&away), count(&away)] {
            counting.recv_timeout(LATE).expect("nobody waits for ever");
        }
        assert_eq!(on(&away, move || async move { byte(shared.attach().execute(read(1)).await) }), 150);
    });
}

#[test]
fn many_are_in_flight_and_each_gets_its_own_answer() {
    each(|cores| {
        let (home, away) = (cores.handle(0).unwrap(), cores.handle(1).unwrap());
        let shared = publish_odd(&home);
        on(&away, move || async move {
            let device = shared.attach();
            for round in 0..20_u8 {
                let written = join_all((0..100).map(|i| device.execute(write(i, round ^ i as u8)))).await;
                assert!(written.iter().all(Result::is_ok));
                let blocks = join_all((0..100).map(|i| device.execute(read(i)))).await;
                let bytes: Vec<u8> = blocks.into_iter().map(byte).collect();
                assert_eq!(bytes, (0..100).map(|i| round ^ i).collect::<Vec<u8>>());
            }
        });
        let begun = on(&home, || async { ODD.with_borrow(|odd| odd.as_ref().unwrap().begun.borrow().clone()) });
        let once: Vec<u64> = (0..100).collect();
        assert!(begun.len() == 4000 && begun.chunks(100).all(|chunk| chunk == once), "begun in order");
    });
}

#[test]
fn a_caller_that_goes_loses_and_doubles_nothing() {
    each(|cores| {
        let (home, away) = (cores.handle(0).unwrap(), cores.handle(1).unwrap());
        let shared = publish_odd(&home);
        on(&away, move || async move {
            let device = shared.attach();
            for i in 0..50 {
                let mut call = Box::pin(device.execute(write(i, 3)));
                // Handed over with the first poll, and given up before, with or after the answer.
                assert!(futures_util::poll!(call.as_mut()).is_pending());
                for _ in 0..i % 7 {
                    yield_now().await;
                }
                drop(call);
            }
            drop(device.execute(write(60, 3)));
            // A new request in a slot of old ones gets its own answer.
            assert_eq!(byte(device.execute(read(60)).await), 0, "what was never polled was never begun");
            device.execute(Request::Flush).await.unwrap();
        });
        let done = move || async {
            let odd = ODD.with_borrow(|odd| Rc::clone(odd.as_ref().unwrap()));
            while odd.done.get() < 52 {
                yield_now().await;
            }
            (0..50).all(|i| odd.begun.borrow().iter().filter(|&&begun| begun == i).count() >= 1)
                && odd.begun.borrow().len() == 52
        };
        assert!(on(&home, done));
        assert_eq!(cores.shutdown(LATE).aborted_tasks, 0);
    });
}

#[test]
fn attachments_of_a_core_share_a_link_that_ends_with_the_last() {
    each(|cores| {
        let (home, away) = (cores.handle(0).unwrap(), cores.handle(1).unwrap());
        let shared = on(&home, || async { publish(memory()) });
        on(&away, move || async move {
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
        assert_eq!(cores.shutdown(LATE).aborted_tasks, 0);
    });
}

fn assert_unreachable(outcome: Outcome) {
    let error = outcome.unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Unreachable { .. }), "{error}");
    assert_eq!(error.device_name(), Some("shared"));
}

#[test]
fn work_that_panics_fails_alone() {
    each(|cores| {
        let (home, away) = (cores.handle(0).unwrap(), cores.handle(1).unwrap());
        let shared = publish_odd(&home);
        on(&away, move || async move {
            let device = shared.attach();
            assert_unreachable(device.execute(write(PANICS, 1)).await);
            device.execute(write(4, 5)).await.unwrap();
            assert_eq!(byte(device.execute(read(4)).await), 5);
        });
    });
}

#[test]
fn a_home_that_stops_answers_all_the_same() {
    each(|there| {
        let Some(away) = there.handle(1) else { panic!("there are two cores") };
        let homes = Cores::start(Placement::Count(1), Config { pool_arena_bytes: 0, ..Config::default() }).unwrap();
        let shared = publish_odd(&homes.handle(0).unwrap());
        let (begun, is_begun) = std::sync::mpsc::channel();
        let (send, receive) = std::sync::mpsc::channel();
        let device = shared.clone();
        let work = move || {
            drop(spawn(async move {
                let device = device.attach();
                device.execute(write(1, 1)).await.unwrap();
                let mut calls = join_all((0..4).map(|_| device.execute(write(NEVER, 1))));
                assert!(futures_util::poll!(&mut calls).is_pending());
                begun.send(()).unwrap();
                calls.await.into_iter().for_each(assert_unreachable);
                // Afterwards, on the old way and on a new one.
                assert_unreachable(device.execute(read(1)).await);
                drop(device);
                let again = shared.attach();
                assert_unreachable(again.execute(read(1)).await);
                send.send(()).unwrap();
            }));
        };
        away.post().send(work).unwrap();
        is_begun.recv_timeout(LATE).unwrap();
        homes.shutdown(Duration::from_millis(1));
        receive.recv_timeout(LATE).expect("nobody waits for ever");
    });
}
