//! Sessions that end with changes in flight: nothing of them is executed after a newer change of the same blocks.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Waker};
use std::time::Duration;

use futures_util::future::{Either, select};
use sealblock_block::{
    Abilities, Device, Durability, DynDevice, Error, ErrorKind, Expectations, Geometry, Operation, Outcome, Request,
};
use sealblock_integrity::{Sealed, Tags};
use sealblock_layers_cross_core::{Attached, ClientSession, Observer, RequestInfo, SharedDevice};
use sealblock_media_memory::MemoryDevice;
use sealblock_runtime_memory::Slice;
use sealblock_runtime_reactor::{Config, CoreHandle, Cores, Placement, Reactor, long_step, spawn, yield_now};
use sealblock_units::{BlockSize, Extent};

/// Long enough for a request of all of them to wait for its turn.
const BLOCKS: u64 = 4096;

/// A device whose writes of a certain first byte wait until this byte is released. It records the order in which they
/// are executed.
struct HeldWrites {
    inner: MemoryDevice,
    released: Arc<Mutex<Vec<u8>>>,
    executed: Arc<Mutex<Vec<u8>>>,
}

impl Device for HeldWrites {
    fn geometry(&self) -> &Geometry {
        self.inner.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.inner.abilities()
    }

    async fn execute(&self, request: Request) -> Outcome {
        let byte = written(&request);
        while byte.is_some_and(|byte| !self.released.lock().unwrap().contains(&byte)) {
            yield_now().await;
        }
        self.executed.lock().unwrap().extend(byte);
        self.inner.execute(request).await
    }
}

fn written(request: &Request) -> Option<u8> {
    match &request.operation {
        Operation::Write(data) => Some(data.clone().into_sealed().joined_data()[0]),
        _ => None,
    }
}

#[derive(Clone, Default)]
struct Held {
    released: Arc<Mutex<Vec<u8>>>,
    executed: Arc<Mutex<Vec<u8>>>,
}

impl Held {
    fn publish(&self) -> SharedDevice {
        let inner = MemoryDevice::new(BlockSize::B512, BLOCKS, None);
        let (released, executed) = (Arc::clone(&self.released), Arc::clone(&self.executed));
        SharedDevice::publish(DynDevice::new("held", HeldWrites { inner, released, executed }))
    }

    fn release(&self, byte: u8) {
        self.released.lock().unwrap().push(byte);
    }

    fn executed(&self) -> Vec<u8> {
        self.executed.lock().unwrap().clone()
    }
}

fn extent(start: u64, blocks: u64) -> Extent {
    Extent::from_raw(start, blocks).unwrap()
}

fn write(start: u64, blocks: u64, byte: u8) -> Request {
    let data = Slice::copy_from(&vec![byte; blocks as usize * 512]);
    let data = Sealed::seal(data, BlockSize::B512, None, &Tags::default());
    Request::write(extent(start, blocks), data, Durability::Volatile)
}

fn read(start: u64) -> Request {
    Request::read(extent(start, 1), Expectations::NONE)
}

fn attach(device: &SharedDevice, session: &Rc<ClientSession>) -> Attached {
    device.attach_in(&Arc::new(device.flush_cursor("test")), session)
}

/// A request that has started and not ended.
fn begun<'a>(device: &'a Attached, request: Request) -> Pin<Box<dyn Future<Output = Outcome> + 'a>> {
    let mut future: Pin<Box<dyn Future<Output = Outcome> + 'a>> = Box::pin(device.execute(request));
    assert!(future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    future
}

async fn turns() {
    for _ in 0..64 {
        yield_now().await;
    }
}

fn run(test: impl AsyncFnOnce(Held, SharedDevice)) {
    let reactor = Reactor::new(Config::default()).unwrap();
    reactor.block_on(async {
        let held = Held::default();
        let device = held.publish();
        test(held, device).await;
    });
}

#[test]
fn a_change_of_an_ended_session_is_not_executed_after_a_newer_one() {
    run(async |held, device| {
        let (old, new) = (ClientSession::begin(), ClientSession::begin());
        let (old_device, new_device) = (attach(&device, &old), attach(&device, &new));
        let first = begun(&old_device, write(8, 4, 1));
        old.end().await;
        held.release(2);
        held.release(3);
        let overlapping = RefCell::new(begun(&new_device, write(11, 4, 2)));
        // Other changes continue meanwhile, and so do reads.
        new_device.execute(write(12, 4, 3)).await.unwrap();
        new_device.execute(read(9)).await.unwrap();
        turns().await;
        assert!(!held.executed().contains(&2), "it waits for the first copy");
        held.release(1);
        first.await.unwrap();
        overlapping.into_inner().await.unwrap();
        assert_eq!(held.executed().iter().filter(|byte| **byte != 3).collect::<Vec<_>>(), [&1, &2]);
    });
}

/// A fence around everything would delay every host whenever one of them disconnects.
#[test]
fn the_end_of_a_session_fences_no_change_of_another_one() {
    run(async |held, device| {
        let (ended, other) = (ClientSession::begin(), ClientSession::begin());
        let (ended_device, other_device) = (attach(&device, &ended), attach(&device, &other));
        ended_device.execute(read(8)).await.unwrap();
        let first = begun(&other_device, write(8, 4, 1));
        ended.end().await;
        held.release(2);
        let newer = Box::pin(other_device.execute(write(8, 4, 2)));
        let ended_first = select(newer, Box::pin(turns())).await;
        assert!(matches!(ended_first, Either::Left((Ok(_), _))), "it waits for a change that is not fenced");
        held.release(1);
        first.await.unwrap();
        assert_eq!(held.executed(), [2, 1]);
    });
}

#[test]
fn without_an_ended_session_overlapping_changes_do_not_wait() {
    run(async |held, device| {
        let session = ClientSession::begin();
        let attached = attach(&device, &session);
        let first = begun(&attached, write(8, 4, 1));
        held.release(2);
        attached.execute(write(8, 4, 2)).await.unwrap();
        held.release(1);
        first.await.unwrap();
        assert_eq!(held.executed(), [2, 1]);
    });
}

#[test]
fn a_lock_waits_only_for_the_changes_of_its_blocks() {
    run(async |held, device| {
        let session = ClientSession::begin();
        let attached = attach(&device, &session);
        let first = begun(&attached, write(8, 4, 1));
        let beside = Box::pin(attached.lock(extent(12, 4)));
        let is_granted = select(beside, Box::pin(turns())).await;
        assert!(matches!(is_granted, Either::Left(_)), "it waits for a change of other blocks");
        drop(is_granted);
        let overlapping = Box::pin(attached.lock(extent(11, 4)));
        let is_granted = select(overlapping, Box::pin(turns())).await;
        let Either::Right(((), overlapping)) = is_granted else {
            panic!("it does not wait for a change of its blocks")
        };
        held.release(1);
        first.await.unwrap();
        drop(overlapping.await);
    });
}

/// A change that waits for a lock when its session ends is in flight, too.
#[test]
fn a_change_that_waits_for_its_turn_is_fenced_too() {
    run(async |held, device| {
        let (old, new) = (ClientSession::begin(), ClientSession::begin());
        let (old_device, new_device) = (attach(&device, &old), attach(&device, &new));
        let locked = new_device.lock(extent(8, 1)).await;
        let waiting = begun(&old_device, write(8, 1, 1));
        old.end().await;
        held.release(2);
        let newer = begun(&new_device, write(8, 1, 2));
        drop(locked);
        let both = pin!(futures_util::future::join(waiting, newer));
        let release = pin!(async {
            turns().await;
            assert!(held.executed().is_empty(), "{:?}", held.executed());
            held.release(1);
        });
        let ((first, second), ()) = futures_util::future::join(both, release).await;
        first.and(second).unwrap();
        assert_eq!(held.executed(), [1, 2]);
    });
}

/// A long change that waits until the core has time for it has claimed nothing yet, so no fence waits for it.
#[test]
fn a_long_change_that_has_not_begun_when_its_session_ends_is_refused() {
    run(async |held, device| {
        let (old, new) = (ClientSession::begin(), ClientSession::begin());
        let (old_device, new_device) = (attach(&device, &old), attach(&device, &new));
        let failures = Failures::default();
        device.observe(failures.clone());
        let zeroes = || Request::write_zeroes(extent(0, BLOCKS), false, Durability::Volatile);
        long_step().await;
        std::thread::sleep(Duration::from_millis(1));
        let [old_change, other_change] = [&old_device, &new_device].map(|device| begun(device, zeroes()));
        old.end().await;
        held.release(2);
        new_device.execute(write(8, 4, 2)).await.unwrap();
        let refused = old_change.await.unwrap_err();
        assert!(matches!(refused.kind(), ErrorKind::Unreachable { .. }), "{refused}");
        other_change.await.unwrap();
        assert_eq!(failures.0.load(Ordering::Relaxed), 0, "the end of a client is no failure of the device");
    });
}

#[test]
fn an_ended_session_changes_nothing_more_and_still_reads() {
    run(async |held, device| {
        let session = ClientSession::begin();
        let attached = attach(&device, &session);
        let failures = Failures::default();
        device.observe(failures.clone());
        held.release(1);
        attached.execute(write(0, 1, 1)).await.unwrap();
        session.end().await;
        let refused = attached.execute(write(0, 1, 1)).await.unwrap_err();
        assert!(matches!(refused.kind(), ErrorKind::Unreachable { .. }), "{refused}");
        assert!(attached.try_execute(&write(0, 1, 1)).is_none_or(|outcome| outcome.is_err()));
        attached.execute(read(0)).await.unwrap();
        assert_eq!(held.executed(), [1]);
        assert_eq!(failures.0.load(Ordering::Relaxed), 0, "the end of a client is no failure of the device");
        attached.execute(read(1 << 40)).await.unwrap_err();
        assert_eq!(failures.0.load(Ordering::Relaxed), 1);
    });
}

/// Counts the failed requests that are reported.
#[derive(Clone, Default)]
struct Failures(Arc<AtomicUsize>);

impl Observer for Failures {
    fn succeeded(&self, _client: &str, _request: RequestInfo) {}

    fn failed(&self, _client: &str, _request: RequestInfo, _error: &Error) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// The same from another core: the fence comes after the requests that crossed before it.
#[test]
fn changes_that_cross_between_cores_are_fenced_too() {
    let cores = Cores::start(Placement::Count(2), Config { pool_arena_bytes: 4 << 20, ..Config::default() }).unwrap();
    let [owner, client] = [0, 1].map(|core| cores.handle(core).unwrap());
    let held = Held::default();
    let theirs = held.clone();
    let device = on(&owner, move || async move { theirs.publish() });
    let theirs = held.clone();
    let home = owner.address();
    on(&client, move || async move {
        let (old, new) = (ClientSession::begin(), ClientSession::begin());
        let (old_device, new_device) = (attach(&device, &old), attach(&device, &new));
        // The owner core is busy, so that it gets the change and the fence together.
        let (go_on, may_go_on) = mpsc::channel::<()>();
        home.send(move || may_go_on.recv_timeout(Duration::from_secs(30)).unwrap()).unwrap();
        let first = begun(&old_device, write(8, 4, 1));
        let mut ending = pin!(old.end());
        assert!(futures_util::poll!(&mut ending).is_pending());
        turns().await;
        go_on.send(()).unwrap();
        ending.await;
        theirs.release(2);
        let newer = begun(&new_device, write(8, 4, 2));
        let is_done = Cell::new(false);
        let release = async {
            // A read after it shows that the owner core has seen the newer write.
            new_device.execute(read(0)).await.unwrap();
            turns().await;
            new_device.execute(read(0)).await.unwrap();
            assert!(theirs.executed().is_empty());
            theirs.release(1);
            is_done.set(true);
        };
        let (outcomes, ()) = futures_util::future::join(futures_util::future::join(first, newer), release).await;
        outcomes.0.and(outcomes.1).unwrap();
        assert!(is_done.get());
    });
    assert_eq!(held.executed(), [1, 2]);
    cores.shutdown(Duration::from_secs(30));
}

/// Runs a future on a core.
fn on<T: Send + 'static, F: Future<Output = T>>(core: &CoreHandle, work: impl FnOnce() -> F + Send + 'static) -> T {
    let (send, receive) = mpsc::channel();
    let begin = move || drop(spawn(async move { drop(send.send(work().await)) }));
    core.address().send(begin).expect("the core runs");
    receive.recv_timeout(Duration::from_secs(30)).expect("the core responds")
}
