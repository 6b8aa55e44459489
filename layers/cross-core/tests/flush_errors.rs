//! A failed flush is reported to every client that had written, whichever client sent it and on whichever core.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll};
use std::time::Duration;

use sealblock_block::{
    Abilities, Device, Durability, DynDevice, Error, ErrorKind, FlushCursor, Geometry, Outcome, Request,
};
use sealblock_integrity::{Sealed, Tags};
use sealblock_layers_cross_core::{Attached, SharedDevice};
use sealblock_media_memory::MemoryDevice;
use sealblock_runtime_memory::Slice;
use sealblock_runtime_reactor::{Config, CoreHandle, Cores, Placement, Reactor, spawn, yield_now};
use sealblock_units::{BlockSize, Extent};

/// The results of the next durable requests, from the back: when they may end, and whether they succeed.
type Plans = Rc<RefCell<Vec<(Rc<Cell<bool>>, bool)>>>;

/// RAM whose flushes and durable writes fail as planned.
struct PlannedDevice(MemoryDevice, Plans);

fn failed() -> Error {
    ErrorKind::Media { reason: "planned".to_owned() }.into()
}

impl Device for PlannedDevice {
    fn geometry(&self) -> &Geometry {
        self.0.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.0.abilities()
    }

    async fn execute(&self, request: Request) -> Outcome {
        let plan = if request.is_durable() { self.1.borrow_mut().pop() } else { None };
        if let Some((may_end, succeeds)) = plan {
            poll_fn(|cx| {
                cx.waker().wake_by_ref();
                if may_end.get() { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
            if !succeeds {
                return Err(failed());
            }
        }
        self.0.execute(request).await
    }
}

fn planned() -> (SharedDevice, Plans) {
    let plans = Plans::default();
    let device = PlannedDevice(MemoryDevice::new(BlockSize::B4096, 64, None), Rc::clone(&plans));
    (SharedDevice::publish(DynDevice::new("planned", device)), plans)
}

fn plan(plans: &Plans, succeeds: bool) -> Rc<Cell<bool>> {
    let may_end = Rc::new(Cell::new(false));
    plans.borrow_mut().insert(0, (Rc::clone(&may_end), succeeds));
    may_end
}

fn fail_next(plans: &Plans) {
    plan(plans, false).set(true);
}

async fn write(device: &Attached, durability: Durability) -> Outcome {
    let extent = Extent::from_raw(3, 1).unwrap();
    let data = Sealed::seal(Slice::copy_from(&[7; 4096]), BlockSize::B4096, None, &Tags::default());
    device.execute(Request::write(extent, data, durability)).await
}

async fn flushes(device: &Attached) -> bool {
    device.execute(Request::flush()).await.is_ok()
}

fn run<F: Future<Output = ()>>(test: impl FnOnce() -> F) {
    Reactor::new(Config::default()).expect("a reactor starts").block_on(async { test().await });
}

#[test]
fn every_client_that_had_written_learns_of_a_failed_flush_once() {
    run(|| async {
        let (shared, plans) = planned();
        let [one, two, idle] = [(); 3].map(|()| shared.attach());
        let [left, right] = [(); 2].map(|()| shared.attach_as(&Arc::new(shared.flush_cursor("client"))));
        for device in [&one, &two, &left] {
            write(device, Durability::Volatile).await.unwrap();
        }
        fail_next(&plans);
        assert!(!flushes(&one).await && flushes(&one).await);
        assert!(!flushes(&two).await && flushes(&two).await);
        assert!(!flushes(&right).await && !flushes(&left).await && flushes(&right).await && flushes(&left).await);
        assert!(flushes(&idle).await);
    });
}

#[test]
fn clients_that_had_written_learn_of_a_failed_durable_write() {
    run(|| async {
        let (shared, plans) = planned();
        let [one, two] = [(); 2].map(|()| shared.attach());
        write(&two, Durability::Volatile).await.unwrap();
        fail_next(&plans);
        assert!(write(&one, Durability::ForceUnitAccess).await.is_err());
        assert!(flushes(&one).await, "the client knows, and had nothing else unflushed");
        assert!(!flushes(&two).await && flushes(&two).await);
    });
}

#[test]
fn a_flush_that_succeeds_beside_one_that_fails_waits_for_it() {
    run(|| async {
        let (shared, plans) = planned();
        let [one, two] = [(); 2].map(|()| shared.attach());
        write(&two, Durability::Volatile).await.unwrap();
        let (slow, quick) = (plan(&plans, false), plan(&plans, true));
        let (mut fails, mut succeeds) = (pin!(flushes(&one)), pin!(flushes(&two)));
        for turn in 0..10 {
            let ended = poll_fn(|cx| Poll::Ready((poll(&mut fails, cx), poll(&mut succeeds, cx)))).await;
            assert_eq!(ended, (None, None), "the outcome of the other flush counts for both");
            quick.set(turn >= 3);
            yield_now().await;
        }
        slow.set(true);
        assert_eq!((fails.await, succeeds.await), (false, false));
        assert!(flushes(&one).await && flushes(&two).await);
    });
}

fn poll<F: Future<Output = bool>>(future: &mut Pin<&mut F>, cx: &mut Context<'_>) -> Option<bool> {
    match future.as_mut().poll(cx) {
        Poll::Ready(ended) => Some(ended),
        Poll::Pending => None,
    }
}

#[test]
fn a_dropped_flush_is_reported_as_a_failure() {
    run(|| async {
        let (shared, plans) = planned();
        let [one, two] = [(); 2].map(|()| shared.attach());
        write(&one, Durability::Volatile).await.unwrap();
        write(&two, Durability::Volatile).await.unwrap();
        plan(&plans, false);
        {
            let mut flush = pin!(flushes(&one));
            assert_eq!(poll_fn(|cx| Poll::Ready(poll(&mut flush, cx))).await, None);
        }
        assert!(!flushes(&one).await && !flushes(&two).await);
        assert!(flushes(&one).await && flushes(&two).await);
    });
}

/// Runs a future on a core.
fn on<T: Send + 'static, F: Future<Output = T>>(core: &CoreHandle, work: impl FnOnce() -> F + Send + 'static) -> T {
    let (send, receive) = mpsc::channel();
    let begin = move || drop(spawn(async move { drop(send.send(work().await)) }));
    core.address().send(begin).expect("the core runs");
    receive.recv_timeout(Duration::from_secs(30)).expect("the core responds")
}

#[test]
fn a_flush_cursor_is_the_same_on_every_core() {
    let cores = Cores::start(Placement::Count(3), Config { pool_arena_bytes: 4 << 20, ..Config::default() }).unwrap();
    let [owner, near, far] = [0, 1, 2].map(|core| cores.handle(core).unwrap());
    let shared = on(&owner, || async {
        let (shared, plans) = planned();
        fail_next(&plans);
        shared
    });
    let [one, other] = ["one", "other"].map(|client| Arc::new(shared.flush_cursor(client)));
    let writes = |core: &CoreHandle, cursor: &Arc<FlushCursor>| {
        let (shared, cursor) = (shared.clone(), Arc::clone(cursor));
        on(core, move || async move { write(&shared.attach_as(&cursor), Durability::Volatile).await.is_ok() })
    };
    let flush_on = |core: &CoreHandle, cursor: &Arc<FlushCursor>| {
        let (shared, cursor) = (shared.clone(), Arc::clone(cursor));
        on(core, move || async move { flushes(&shared.attach_as(&cursor)).await })
    };
    assert!(writes(&near, &one) && writes(&far, &other));
    assert!(!flush_on(&far, &one), "it fails on the owner core");
    assert!(flush_on(&near, &one) && flush_on(&owner, &one), "reported once, on whichever core");
    assert!(!flush_on(&owner, &other) && flush_on(&far, &other));
    drop((one, other, shared));
    cores.shutdown(Duration::from_secs(30));
}
