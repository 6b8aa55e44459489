//! Devices that are open on every core.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use sealblock_block::{
    Abilities, Ability, Device, Durability, DynDevice, Error, ErrorKind, Expectations, Geometry, Latency, Limits,
    Operation, Outcome, Request, RequestKind, ReservedArea, Response, WriteData,
};
use sealblock_integrity::{Sealed, Tags};
use sealblock_layers_cross_core::{Attached, SharedDevice};
use sealblock_runtime_memory::Slice;
use sealblock_runtime_reactor::{Config, CoreAddress, CoreHandle, Cores, Placement, now, spawn, yield_now};
use sealblock_units::{BlockSize, Extent};

const BLOCKS: u64 = 16;
const TIMEOUT: Duration = Duration::from_secs(30);

/// What is stored, and what happens to requests, on every core.
struct Store {
    bytes: Mutex<Vec<u8>>,
    reserved: Mutex<Slice>,
    /// Writes wait while this is set.
    holds_writes: AtomicBool,
    /// Writes that have reached a device.
    started: AtomicUsize,
    /// The source fails while this is set.
    cannot_open: AtomicBool,
}

impl Store {
    fn new(fill: u8) -> Arc<Store> {
        Arc::new(Store {
            bytes: Mutex::new(vec![fill; BLOCKS as usize]),
            reserved: Mutex::default(),
            holds_writes: AtomicBool::new(false),
            started: AtomicUsize::new(0),
            cannot_open: AtomicBool::new(false),
        })
    }

    /// The device of this core, which every core can open.
    fn device(self: &Arc<Store>) -> DynDevice {
        let open = |store: &Arc<Store>| DynDevice::new("shared", OfCore::new(Arc::clone(store)));
        let store = Arc::clone(self);
        open(self).on_every_core(move || match store.cannot_open.load(Ordering::SeqCst) {
            true => Err(Error::from(ErrorKind::Unreachable { reason: "no descriptors are left".to_owned() })),
            false => Ok(open(&store)),
        })
    }
}

/// The device of one core, which refuses requests of another one.
struct OfCore {
    store: Arc<Store>,
    core: CoreAddress,
    geometry: Geometry,
}

impl OfCore {
    fn new(store: Arc<Store>) -> OfCore {
        let limits = Limits::new(BlockSize::B512, 1 << 20, 1 << 20);
        let geometry = Geometry { block_size: BlockSize::B512, capacity_blocks: BLOCKS, protection: None, limits };
        OfCore { store, core: CoreAddress::here(), geometry }
    }
}

impl Device for OfCore {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn abilities(&self) -> Abilities {
        let reserved = [RequestKind::ReadReserved, RequestKind::WriteReserved];
        Abilities { writable: true, ..Abilities::BASIC }.with(reserved, Ability::Native)
    }

    async fn execute(&self, request: Request) -> Outcome {
        assert!(self.core.is_here(), "a device is used on its own core");
        match &request.operation {
            Operation::Read(_) => {
                let byte = self.store.bytes.lock().unwrap()[request.extents.one().start().get() as usize];
                Ok(Response::Data(sealed(byte)))
            }
            Operation::Write(data) => {
                self.store.started.fetch_add(1, Ordering::SeqCst);
                while self.store.holds_writes.load(Ordering::SeqCst) {
                    yield_now().await;
                }
                let WriteData::Sealed(data) = data else { panic!("the tests write sealed data") };
                let byte = data.joined_data()[0];
                self.store.bytes.lock().unwrap()[request.extents.one().start().get() as usize] = byte;
                Ok(Response::Done)
            }
            Operation::ReadReserved(_) => Ok(Response::Reserved(self.store.reserved.lock().unwrap().clone())),
            Operation::WriteReserved(_, bytes) => {
                *self.store.reserved.lock().unwrap() = bytes.clone();
                Ok(Response::Done)
            }
            _ => Ok(Response::Done),
        }
    }
}

fn sealed(byte: u8) -> Sealed {
    Sealed::seal(Slice::copy_from(&[byte; 512]), BlockSize::B512, None, &Tags::default())
}

fn write(at: u64, byte: u8) -> Request {
    Request::write(Extent::from_raw(at, 1).unwrap(), sealed(byte), Durability::Volatile)
}

async fn byte(device: &Attached, at: u64) -> u8 {
    let read = Request::read(Extent::from_raw(at, 1).unwrap(), Expectations::NONE);
    let Ok(Response::Data(data)) = device.execute(read).await else { panic!("block {at} is read") };
    data.joined_data()[0]
}

fn cores(count: usize) -> Cores {
    let config = Config { pool_arena_bytes: 1 << 20, ..Config::default() };
    Cores::start(Placement::Count(count), config).expect("cores start")
}

/// Starts a future on a core; its output arrives at the receiver.
fn start<F: Future<Output = T> + 'static, T: Send + 'static>(
    core: &CoreHandle,
    work: impl FnOnce() -> F + Send + 'static,
) -> mpsc::Receiver<T> {
    let (send, receive) = mpsc::channel();
    let task = move || {
        let work = work();
        drop(spawn(async move { drop(send.send(work.await)) }));
    };
    core.address().send(task).expect("the core runs");
    receive
}

fn on<F: Future<Output = T> + 'static, T: Send + 'static>(
    core: &CoreHandle,
    work: impl FnOnce() -> F + Send + 'static,
) -> T {
    start(core, work).recv_timeout(TIMEOUT).expect("the work does not panic and ends")
}

fn wait_until(is_so: impl Fn() -> bool) {
    let since = std::time::Instant::now();
    while !is_so() {
        assert!(since.elapsed() < TIMEOUT, "it never becomes so");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Publishes the device of `store` on the first core.
fn published(cores: &Cores, store: &Arc<Store>) -> SharedDevice {
    let store = Arc::clone(store);
    on(&cores.handle(0).unwrap(), move || async move { SharedDevice::publish(store.device()) })
}

#[test]
fn requests_of_each_core_stay_there_and_are_counted_together() {
    let (cores, store) = (cores(3), Store::new(0));
    let shared = published(&cores, &store);
    for (at, core) in cores.handles().into_iter().enumerate() {
        let shared = shared.clone();
        on(&core, move || async move {
            let (device, again) = (shared.attach(), shared.attach());
            assert!(device.is_local() && again.is_local());
            device.execute(write(at as u64, 7)).await.unwrap();
            assert_eq!(byte(&again, at as u64).await, 7);
        });
    }
    let counters = shared.counters();
    assert_eq!((counters.requests(RequestKind::Write), counters.bytes(RequestKind::Read)), (3, 3 * 512));
    assert_eq!((counters.in_flight(), counters.completed()), (0, 6));
    assert_eq!(shared.crossings(), 0);
    drop(shared);
    assert_eq!(cores.shutdown(TIMEOUT).aborted_tasks, 0);
    assert_eq!(Arc::strong_count(&store), 1, "every core has dropped its device");
}

#[test]
fn each_request_is_timed_once_on_the_core_that_executes_it_from_its_arrival_on() {
    const HOUR: Duration = Duration::from_secs(3600);
    let (cores, store) = (cores(2), Store::new(0));
    let shared = published(&cores, &store);
    for core in cores.handles() {
        let shared = shared.clone();
        on(&core, move || async move {
            let device = shared.attach();
            let long_ago = now() - HOUR;
            device.execute_arrived(write(1, 7), long_ago).await.unwrap();
            device.execute(write(1, 8)).await.unwrap();
            let outside = Request::read(Extent::from_raw(BLOCKS, 1).unwrap(), Expectations::NONE);
            device.execute(outside).await.unwrap_err();
            device.execute(Request::flush()).await.unwrap();
            // The home core executes it.
            device.execute(Request::read_reserved(ReservedArea::GroupLabel)).await.unwrap();
        });
    }
    let counters = shared.counters();
    for kind in RequestKind::ALL {
        let Latency { queue, device } = shared.latency(kind);
        let count = counters.requests(kind);
        assert_eq!((queue.count(), device.count()), (count, count), "{}", kind.name());
    }
    let Latency { queue, device } = shared.latency(RequestKind::Write);
    assert!(queue.max() >= HOUR && queue.sum() >= 2 * HOUR && device.max() < HOUR);
    assert!(queue.percentile(0.5).unwrap() < HOUR, "the other two did not wait");
}

#[test]
fn reserved_areas_are_read_and_written_on_the_home_core_only() {
    let (cores, store) = (cores(2), Store::new(0));
    let shared = published(&cores, &store);
    on(&cores.handle(1).unwrap(), move || async move {
        let device = shared.attach();
        let bytes = Slice::copy_from(b"label");
        device.execute(Request::write_reserved(ReservedArea::GroupLabel, bytes)).await.unwrap();
        let read = device.execute(Request::read_reserved(ReservedArea::GroupLabel)).await;
        assert!(matches!(read, Ok(Response::Reserved(bytes)) if &bytes[..] == b"label"));
        let gate = shared.counters();
        assert_eq!((gate.requests(RequestKind::WriteReserved), gate.completed()), (1, 2));
        assert_eq!(shared.crossings(), 2);
    });
}

#[test]
fn a_core_that_cannot_open_it_crosses() {
    let (cores, store) = (cores(2), Store::new(5));
    store.cannot_open.store(true, Ordering::SeqCst);
    let shared = published(&cores, &store);
    let there = shared.clone();
    on(&cores.handle(1).unwrap(), move || async move {
        let device = there.attach();
        assert!(!device.is_local());
        device.execute(write(1, 6)).await.unwrap();
        assert_eq!((byte(&device, 1).await, byte(&device, 2).await), (6, 5));
        assert_eq!(there.crossings(), 3, "one for each request");
        store.cannot_open.store(false, Ordering::SeqCst);
        assert!(there.attach().is_local(), "the next attachment tries again");
    });
}

/// Quiesces on the home core, and keeps it so until the returned sender is dropped or gets a device.
fn quiesced(home: &CoreHandle, shared: &SharedDevice) -> (mpsc::Receiver<usize>, mpsc::Sender<Option<Arc<Store>>>) {
    let (release, released) = mpsc::channel::<Option<Arc<Store>>>();
    let (drained, is_drained) = mpsc::channel();
    let shared = shared.clone();
    drop(start(home, move || async move {
        let quiesced = shared.quiesce().expect("it is not quiesced yet");
        assert!(shared.quiesce().is_none(), "one at a time");
        drained.send(quiesced.in_flight()).unwrap();
        quiesced.drained().await;
        drained.send(quiesced.in_flight()).unwrap();
        loop {
            match released.try_recv() {
                Ok(Some(store)) => {
                    let device = store.device();
                    drop(quiesced.replace(device));
                    break;
                }
                Ok(None) => {
                    quiesced.set_unavailable("it is gone".to_owned());
                    break;
                }
                Err(mpsc::TryRecvError::Disconnected) => break,
                Err(mpsc::TryRecvError::Empty) => yield_now().await,
            }
        }
    }));
    (is_drained, release)
}

#[test]
fn a_quiesced_device_drains_on_every_core_and_waiting_requests_go_to_the_next_one() {
    let (cores, [store, next]) = (cores(3), [Store::new(0), Store::new(9)]);
    let (home, other, late) = (cores.handle(0).unwrap(), cores.handle(1).unwrap(), cores.handle(2).unwrap());
    let shared = published(&cores, &store);
    store.holds_writes.store(true, Ordering::SeqCst);
    let write_on = |core: &CoreHandle, at: u64| {
        let shared = shared.clone();
        start(core, move || async move {
            let device = shared.attach();
            device.execute(write(at, 1)).await.map(drop)
        })
    };
    let in_flight = write_on(&other, 1);
    wait_until(|| store.started.load(Ordering::SeqCst) == 1);
    let (drained, release) = quiesced(&home, &shared);
    assert_eq!(drained.recv_timeout(TIMEOUT), Ok(1));
    // The message that tells the other core was sent before these; the last core opens the device only now.
    let waiting = [write_on(&other, 2), write_on(&late, 3), write_on(&home, 4)];
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(store.started.load(Ordering::SeqCst), 1, "none of them has started");
    assert!(drained.try_recv().is_err(), "a request is in flight");
    store.holds_writes.store(false, Ordering::SeqCst);
    assert_eq!(drained.recv_timeout(TIMEOUT), Ok(0));
    in_flight.recv_timeout(TIMEOUT).unwrap().unwrap();
    assert!(waiting.iter().all(|waiting| waiting.try_recv().is_err()));
    release.send(Some(Arc::clone(&next))).unwrap();
    for waiting in waiting {
        waiting.recv_timeout(TIMEOUT).unwrap().unwrap();
    }
    assert_eq!(store.bytes.lock().unwrap()[..5], [0, 1, 0, 0, 0]);
    assert_eq!(next.bytes.lock().unwrap()[..5], [9, 9, 1, 1, 1]);
    let counted = shared.counters();
    assert_eq!(counted.requests(RequestKind::Write), 3, "the counters are those of the next device");
}

#[test]
fn a_device_that_is_gone_fails_on_every_core() {
    let (cores, store) = (cores(2), Store::new(0));
    let shared = published(&cores, &store);
    let (home, other) = (cores.handle(0).unwrap(), cores.handle(1).unwrap());
    let there = shared.clone();
    on(&other, move || async move { there.attach().execute(write(0, 1)).await.map(drop) }).unwrap();
    let (drained, release) = quiesced(&home, &shared);
    assert_eq!((drained.recv_timeout(TIMEOUT), drained.recv_timeout(TIMEOUT)), (Ok(0), Ok(0)));
    release.send(None).unwrap();
    for core in [home, other] {
        let shared = shared.clone();
        let error = on(&core, move || async move { shared.attach().execute(write(0, 1)).await.map(drop).unwrap_err() });
        assert!(error.to_string().contains("it is gone"), "{error}");
    }
    assert_eq!(store.started.load(Ordering::SeqCst), 1);
}

#[test]
fn a_device_that_is_closed_on_other_cores_drains_there_and_its_home_core_goes_on() {
    let (cores, store) = (cores(3), Store::new(0));
    let shared = published(&cores, &store);
    let (home, other, late) = (cores.handle(0).unwrap(), cores.handle(1).unwrap(), cores.handle(2).unwrap());
    store.holds_writes.store(true, Ordering::SeqCst);
    let write_on = |core: &CoreHandle| {
        let shared = shared.clone();
        start(core, move || async move { shared.attach().execute(write(1, 1)).await.map(drop) })
    };
    let in_flight = write_on(&other);
    wait_until(|| store.started.load(Ordering::SeqCst) == 1);
    let closing = shared.clone();
    let closed = start(&home, move || async move { closing.close_elsewhere().await });
    std::thread::sleep(Duration::from_millis(50));
    assert!(closed.try_recv().is_err(), "a request is in flight");
    store.holds_writes.store(false, Ordering::SeqCst);
    closed.recv_timeout(TIMEOUT).unwrap();
    // It has ended on its core, which tells this thread afterwards.
    in_flight.recv_timeout(TIMEOUT).expect("it has ended").unwrap();
    let refused = write_on(&other).recv_timeout(TIMEOUT).unwrap().unwrap_err();
    assert!(refused.to_string().contains("it is closed"), "{refused}");
    write_on(&home).recv_timeout(TIMEOUT).unwrap().unwrap();
    // A core that had not opened it does not any more.
    let (there, sent) = (shared.clone(), store.started.load(Ordering::SeqCst));
    assert!(!on(&late, move || async move { there.attach().is_local() }));
    assert_eq!(sent, 2);
}

#[test]
fn a_core_that_stops_with_requests_in_flight_is_drained() {
    let (homes, others, store) = (cores(1), cores(1), Store::new(0));
    let shared = published(&homes, &store);
    store.holds_writes.store(true, Ordering::SeqCst);
    let there = shared.clone();
    drop(start(&others.handle(0).unwrap(), move || async move { there.attach().execute(write(1, 1)).await.map(drop) }));
    wait_until(|| store.started.load(Ordering::SeqCst) == 1);
    let (drained, _release) = quiesced(&homes.handle(0).unwrap(), &shared);
    assert_eq!(drained.recv_timeout(TIMEOUT), Ok(1));
    others.shutdown(Duration::from_millis(1));
    drained.recv_timeout(TIMEOUT).expect("nothing is in flight any more");
    // A second time, when that core is long gone.
    drop(_release);
    let home = homes.handle(0).unwrap();
    let asked = shared.clone();
    on(&home, move || async move {
        while asked.quiesce().is_none() {
            yield_now().await;
        }
        asked.attach().geometry().capacity_blocks
    });
}

#[test]
fn locked_blocks_are_not_changed_from_any_core() {
    let (cores, store) = (cores(3), Store::new(0));
    let shared = published(&cores, &store);
    let counting = cores.handles().into_iter().map(|core| {
        let shared = shared.clone();
        start(&core, move || async move {
            let device = shared.attach();
            assert!(device.is_local());
            for _ in 0..40 {
                let locked = device.lock(Extent::from_raw(1, 1).unwrap()).await;
                let before = byte(&device, 1).await;
                yield_now().await;
                locked.execute(write(1, before + 1)).await.unwrap();
                drop(locked);
                device.execute(write(2, 1)).await.unwrap();
            }
        })
    });
    for counting in counting.collect::<Vec<_>>() {
        counting.recv_timeout(TIMEOUT).expect("no caller waits forever");
    }
    assert_eq!(store.bytes.lock().unwrap()[1], 120);
}
