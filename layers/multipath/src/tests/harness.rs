//! A virtual clock that advances only when every task waits, and paths that fail as a test specifies.

use crate::Quiesce;
use std::cell::{Cell, RefCell};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures_util::FutureExt;
use sealblock_block::{
    Abilities, Clock, Device, DeviceOpener, Durability, DynDevice, Error, ErrorKind, Expectations, Gate, Geometry,
    Outcome, Request, RequestKind, Response,
};
use sealblock_integrity::{Sealed, Tags};
use sealblock_media_memory::MemoryDevice;
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, Extent};

use crate::{MultipathLayer, PathConfig, RetryPolicy, Worker};

/// A virtual clock.
#[derive(Clone, Default)]
pub(super) struct Time(Rc<TimeState>);

#[derive(Default)]
struct TimeState {
    now: Cell<Duration>,
    timers: RefCell<Vec<(Duration, Waker)>>,
}

impl Clock for Time {
    async fn sleep(&self, delay: Duration) {
        let until = self.now() + delay;
        std::future::poll_fn(|cx| {
            if self.now() >= until {
                return Poll::Ready(());
            }
            self.0.timers.borrow_mut().push((until, cx.waker().clone()));
            Poll::Pending
        })
        .await;
    }
}

impl Time {
    pub(super) fn now(&self) -> Duration {
        self.0.now.get()
    }

    /// Advances to the next timer; false if there is none.
    fn pass(&self) -> bool {
        let next = self.0.timers.borrow().iter().map(|(until, _)| *until).min();
        if let Some(next) = next {
            self.0.now.set(next);
            let (due, later) = self.0.timers.take().into_iter().partition(|(until, _)| *until <= next);
            self.0.timers.replace(later);
            let due: Vec<(Duration, Waker)> = due;
            due.into_iter().for_each(|(_, waker)| waker.wake());
        }
        next.is_some()
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Mode {
    Works,
    /// Requests fail as unreachable, and the path cannot be opened.
    Gone,
    /// Requests fail as unreachable, and the path can be opened.
    Flaps,
    /// Requests get no response, and the path cannot be opened.
    Silent,
}

/// A path to the device.
#[derive(Clone)]
pub(super) struct TestLink {
    pub(super) memory: Rc<Gate<MemoryDevice>>,
    pub(super) mode: Rc<Cell<Mode>>,
    /// Requests that it accepted while it was silent, and may deliver late.
    pub(super) stuck: Rc<RefCell<Vec<Request>>>,
    pub(super) flushes: Rc<Cell<u32>>,
    /// Requests that the device itself failed.
    pub(super) failed: Rc<Cell<u32>>,
}

impl TestLink {
    fn to(memory: &Rc<Gate<MemoryDevice>>) -> TestLink {
        let mode = Rc::new(Cell::new(Mode::Works));
        TestLink {
            memory: Rc::clone(memory),
            mode,
            stuck: Rc::default(),
            flushes: Rc::default(),
            failed: Rc::default(),
        }
    }

    pub(super) fn source(&self) -> DeviceOpener {
        let link = self.clone();
        DeviceOpener::new("path", move || {
            let link = link.clone();
            async move {
                match link.mode.get() {
                    Mode::Works | Mode::Flaps => Ok(DynDevice::new("path", link)),
                    Mode::Gone | Mode::Silent => Err(gone()),
                }
            }
        })
    }

    /// Delivers the stuck requests; returns how many there were.
    pub(super) fn deliver(&self) -> usize {
        let stuck = self.stuck.take();
        let count = stuck.len();
        for request in stuck {
            self.memory.execute(request).now_or_never().expect("RAM never waits").unwrap();
        }
        count
    }
}

fn gone() -> Error {
    ErrorKind::Unreachable { reason: "cut".to_owned() }.into()
}

impl Device for TestLink {
    fn geometry(&self) -> &Geometry {
        self.memory.geometry()
    }

    /// The abilities of RAM, and CompareAndWrite, which can also get lost.
    fn abilities(&self) -> Abilities {
        Abilities { compare_and_write_blocks: 1, ..self.memory.abilities() }
    }

    async fn execute(&self, request: Request) -> Outcome {
        match self.mode.get() {
            Mode::Works => {
                if request.kind() == RequestKind::Flush {
                    self.flushes.set(self.flushes.get() + 1);
                }
                let outcome = self.memory.execute(request).await;
                self.failed.set(self.failed.get() + u32::from(outcome.is_err()));
                outcome
            }
            Mode::Gone | Mode::Flaps => Err(gone()),
            Mode::Silent => {
                self.stuck.borrow_mut().push(request);
                std::future::pending().await
            }
        }
    }
}

/// A device, paths to it, and the layer over them.
pub(super) struct Harness {
    pub(super) time: Time,
    pub(super) links: Vec<TestLink>,
    pub(super) layer: Rc<MultipathLayer<Time>>,
    worker: RefCell<Pin<Box<dyn Future<Output = ()>>>>,
}

/// 5 s for a request; a probe after 40 s without one; 11 s of quiesce time.
pub(super) const POLICY: RetryPolicy = RetryPolicy {
    no_path_timeout: Duration::from_secs(30),
    request_timeout: Duration::from_secs(5),
    max_path_failures: 8,
    idle_probe_interval: Duration::from_secs(40),
    min_reprobe: Duration::from_secs(1),
    max_reprobe: Duration::from_secs(10),
    quiesce_time: Duration::from_secs(11),
    has_volatile_cache: true,
};

impl Harness {
    pub(super) fn new(paths: usize, policy: RetryPolicy) -> Harness {
        Harness::with(paths, policy, |_, _| None)
    }

    /// A harness whose paths can quiesce the target.
    pub(super) fn with(paths: usize, policy: RetryPolicy, quiesce: fn(usize, &TestLink) -> Option<Quiesce>) -> Harness {
        Harness::to(MemoryDevice::new(BlockSize::B512, 1000, None), paths, policy, quiesce)
    }

    /// The same with another device behind them.
    pub(super) fn to(
        memory: MemoryDevice,
        paths: usize,
        policy: RetryPolicy,
        quiesce: fn(usize, &TestLink) -> Option<Quiesce>,
    ) -> Harness {
        let memory = Rc::new(Gate::new("mem", memory));
        let links: Vec<TestLink> = (0..paths).map(|_| TestLink::to(&memory)).collect();
        let path_config = |(path, link): (usize, &TestLink)| PathConfig {
            source: link.source(),
            quiesce: quiesce(path, link),
            device: Some(DynDevice::new("path", link.clone())),
        };
        Harness::over(links.iter().enumerate().map(path_config).collect(), links.clone(), policy)
    }

    pub(super) fn over(paths: Vec<PathConfig>, links: Vec<TestLink>, policy: RetryPolicy) -> Harness {
        let time = Time::default();
        let (layer, worker): (_, Worker<Time>) = MultipathLayer::new(paths, time.clone(), policy).unwrap();
        Harness { time, links, layer: Rc::new(layer), worker: RefCell::new(Box::pin(worker.run())) }
    }

    /// Polls until every task waits for time to pass.
    fn run_until_idle<T>(&self, future: &mut Pin<&mut impl Future<Output = T>>) -> Option<T> {
        let mut cx = Context::from_waker(Waker::noop());
        for _ in 0..20 {
            let _ = self.worker.borrow_mut().as_mut().poll(&mut cx);
            if let Poll::Ready(value) = future.as_mut().poll(&mut cx) {
                return Some(value);
            }
        }
        None
    }

    /// Runs until the future has ended. Also returns how long that took.
    pub(super) fn run<T>(&self, future: impl Future<Output = T>) -> (T, Duration) {
        let (mut future, begin) = (pin!(future), self.time.now());
        loop {
            if let Some(value) = self.run_until_idle(&mut future) {
                return (value, self.time.now() - begin);
            }
            assert!(self.time.pass(), "a deadlock: no timer is set");
        }
    }

    pub(super) fn pass(&self, time: Duration) {
        self.run(self.time.sleep(time));
    }

    pub(super) fn requests(&self) -> Vec<u64> {
        self.layer.monitor().paths().iter().map(|path| path.requests).collect()
    }

    pub(super) fn live(&self) -> Vec<bool> {
        self.layer.monitor().paths().iter().map(|path| path.is_live).collect()
    }
}

pub(super) fn write(start: u64, blocks: u64, byte: u8) -> Request {
    let extent = Extent::from_raw(start, blocks).unwrap();
    let data = Slice::copy_from(&vec![byte; extent.bytes(BlockSize::B512) as usize]);
    let data = Sealed::seal(data, BlockSize::B512, None, &Tags::default());
    Request::write(extent, data, Durability::Volatile)
}

pub(super) fn read(start: u64) -> Request {
    Request::read(Extent::from_raw(start, 1).unwrap(), Expectations::NONE)
}

pub(super) fn byte(outcome: Outcome) -> u8 {
    match outcome.unwrap() {
        Response::Data(data) => data.joined_data()[0],
        other => panic!("{other:?}"),
    }
}
