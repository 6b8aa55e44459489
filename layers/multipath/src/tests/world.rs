//! Time that passes only when nothing else can happen, and paths that fail as they are told.

use std::cell::{Cell, RefCell};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures_util::FutureExt;
use sealblock_block::{
    Abilities, Clock, Device, DeviceOpener, Durability, DynDevice, Error, ErrorKind, Gate, Geometry, Outcome, Request,
    Response,
};
use sealblock_integrity::{Checks, Sealed, Tags};
use sealblock_media_memory::MemoryDevice;
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, Extent};

use crate::{MultipathLayer, PathConfig, RetryPolicy, Worker};

/// The time.
#[derive(Clone, Default)]
pub(super) struct Time(Rc<Hands>);

#[derive(Default)]
struct Hands {
    now: Cell<Duration>,
    alarms: RefCell<Vec<(Duration, Waker)>>,
}

impl Clock for Time {
    async fn sleep(&self, delay: Duration) {
        let until = self.now() + delay;
        std::future::poll_fn(|cx| {
            if self.now() >= until {
                return Poll::Ready(());
            }
            self.0.alarms.borrow_mut().push((until, cx.waker().clone()));
            Poll::Pending
        })
        .await;
    }
}

impl Time {
    pub(super) fn now(&self) -> Duration {
        self.0.now.get()
    }

    /// Goes on to the next alarm; tells whether there is one.
    fn pass(&self) -> bool {
        let next = self.0.alarms.borrow().iter().map(|(until, _)| *until).min();
        if let Some(next) = next {
            self.0.now.set(next);
            let (due, later) = self.0.alarms.take().into_iter().partition(|(until, _)| *until <= next);
            self.0.alarms.replace(later);
            let due: Vec<(Duration, Waker)> = due;
            due.into_iter().for_each(|(_, waker)| waker.wake());
        }
        next.is_some()
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Mode {
    Works,
    /// Answers that it cannot be reached, and cannot be opened.
    Gone,
    /// Answers that it cannot be reached, and can be opened.
    Flaps,
    /// Answers nothing, and cannot be opened.
    Silent,
}

/// A path to the device.
#[derive(Clone)]
pub(super) struct Wire {
    pub(super) memory: Rc<Gate<MemoryDevice>>,
    pub(super) mode: Rc<Cell<Mode>>,
    /// What it was asked while it was silent, and may deliver yet.
    pub(super) stuck: Rc<RefCell<Vec<Request>>>,
    pub(super) flushes: Rc<Cell<u32>>,
    /// Answers of the device itself that were failures.
    pub(super) failed: Rc<Cell<u32>>,
}

impl Wire {
    fn to(memory: &Rc<Gate<MemoryDevice>>) -> Wire {
        let mode = Rc::new(Cell::new(Mode::Works));
        Wire { memory: Rc::clone(memory), mode, stuck: Rc::default(), flushes: Rc::default(), failed: Rc::default() }
    }

    pub(super) fn source(&self) -> DeviceOpener {
        let wire = self.clone();
        DeviceOpener::new("path", move || {
            let wire = wire.clone();
            async move {
                match wire.mode.get() {
                    Mode::Works | Mode::Flaps => Ok(DynDevice::new(wire)),
                    Mode::Gone | Mode::Silent => Err(gone()),
                }
            }
        })
    }

    /// What was stuck arrives.
    pub(super) fn deliver(&self) -> usize {
        let stuck = self.stuck.take();
        let count = stuck.len();
        for operation in stuck {
            self.memory.execute(operation).now_or_never().expect("RAM never waits").unwrap();
        }
        count
    }
}

fn gone() -> Error {
    ErrorKind::Unreachable { reason: "cut".to_owned() }.into()
}

impl Device for Wire {
    fn geometry(&self) -> &Geometry {
        self.memory.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.memory.abilities()
    }

    async fn execute(&self, operation: Request) -> Outcome {
        match self.mode.get() {
            Mode::Works => {
                if matches!(operation, Request::Flush) {
                    self.flushes.set(self.flushes.get() + 1);
                }
                let outcome = self.memory.execute(operation).await;
                self.failed.set(self.failed.get() + u32::from(outcome.is_err()));
                outcome
            }
            Mode::Gone | Mode::Flaps => Err(gone()),
            Mode::Silent => {
                self.stuck.borrow_mut().push(operation);
                std::future::pending().await
            }
        }
    }
}

/// A device, paths to it, and the layer over them.
pub(super) struct World {
    pub(super) time: Time,
    pub(super) wires: Vec<Wire>,
    pub(super) layer: Rc<MultipathLayer<Time>>,
    worker: RefCell<Pin<Box<dyn Future<Output = ()>>>>,
}

/// 5 s for an answer; asked after 40 s without a request; 11 s of quarantine.
pub(super) const PATIENCE: RetryPolicy = RetryPolicy {
    no_path_timeout: Duration::from_secs(30),
    request_timeout: Duration::from_secs(5),
    max_path_failures: 8,
    idle: Duration::from_secs(40),
    min_reprobe: Duration::from_secs(1),
    max_reprobe: Duration::from_secs(10),
    quiesce_time: Duration::from_secs(11),
    volatile: true,
};

impl World {
    pub(super) fn new(paths: usize, patience: RetryPolicy) -> World {
        World::with(paths, patience, |_, _| None)
    }

    /// A world whose paths have something to settle with.
    pub(super) fn with(paths: usize, patience: RetryPolicy, settle: fn(usize, &Wire) -> Option<DeviceOpener>) -> World {
        let memory = Rc::new(Gate::new("mem", MemoryDevice::new(BlockSize::B512, 1000, None)));
        let wires: Vec<Wire> = (0..paths).map(|_| Wire::to(&memory)).collect();
        let way = |(path, wire): (usize, &Wire)| PathConfig {
            source: wire.source(),
            settle: settle(path, wire),
            device: Some(DynDevice::new(wire.clone())),
        };
        World::over(wires.iter().enumerate().map(way).collect(), wires.clone(), patience)
    }

    pub(super) fn over(ways: Vec<PathConfig>, wires: Vec<Wire>, patience: RetryPolicy) -> World {
        let time = Time::default();
        let (layer, worker): (_, Worker<Time>) = MultipathLayer::new(ways, time.clone(), patience).unwrap();
        World { time, wires, layer: Rc::new(layer), worker: RefCell::new(Box::pin(worker.run())) }
    }

    /// Polls until nothing happens any more at this time.
    fn settle<T>(&self, future: &mut Pin<&mut impl Future<Output = T>>) -> Option<T> {
        let mut cx = Context::from_waker(Waker::noop());
        for _ in 0..20 {
            let _ = self.worker.borrow_mut().as_mut().poll(&mut cx);
            if let Poll::Ready(value) = future.as_mut().poll(&mut cx) {
                return Some(value);
            }
        }
        None
    }

    /// Runs until the future has ended; says how long that took.
    pub(super) fn run<T>(&self, future: impl Future<Output = T>) -> (T, Duration) {
        let (mut future, begin) = (pin!(future), self.time.now());
        loop {
            if let Some(value) = self.settle(&mut future) {
                return (value, self.time.now() - begin);
            }
            assert!(self.time.pass(), "nothing will ever happen");
        }
    }

    pub(super) fn pass(&self, time: Duration) {
        self.run(self.time.sleep(time));
    }

    pub(super) fn requests(&self) -> Vec<u64> {
        self.layer.observer().paths().iter().map(|path| path.requests).collect()
    }

    pub(super) fn live(&self) -> Vec<bool> {
        self.layer.observer().paths().iter().map(|path| path.is_live).collect()
    }
}

pub(super) fn write(start: u64, blocks: u64, byte: u8) -> Request {
    let extent = Extent::from_raw(start, blocks).unwrap();
    let data = Slice::copy_from(&vec![byte; extent.bytes(BlockSize::B512) as usize]);
    let data = Sealed::seal(data, BlockSize::B512, None, &Tags::default());
    Request::Write { extent, data, durability: Durability::Volatile }
}

pub(super) fn read(start: u64) -> Request {
    Request::Read { extent: Extent::from_raw(start, 1).unwrap(), checks: Checks::NONE }
}

pub(super) fn byte(outcome: Outcome) -> u8 {
    match outcome.unwrap() {
        Response::Data(data) => data.data()[0],
        other => panic!("{other:?}"),
    }
}
