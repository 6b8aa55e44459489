//! Load on a device: its requests, and the result of a turn.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::Context;
use fastrand::Rng;
use futures_util::future::try_join_all;
use rustix::time::{ClockId, clock_gettime};
use sealblock_block::{Device, Durability, Expectations, Geometry, Request};
use sealblock_integrity::{Tags, Unsealed};
use sealblock_runtime_memory::Slice;
use sealblock_runtime_reactor::{pool, spawn};
use sealblock_units::Extent;

use crate::latency::{Latencies, Summary};

/// The largest request, in bytes.
pub const PAYLOAD_BYTES: usize = 1 << 20;

/// A load: the requests to a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Load {
    /// Its name in tables.
    pub name: &'static str,
    /// Writes or reads.
    pub write: bool,
    /// Blocks of a request.
    pub blocks: u64,
    /// True for random multiples of the request's size, false for sequential addresses that wrap around.
    pub random: bool,
    /// Requests in flight.
    pub depth: u64,
    /// After this many requests, the worker that sent the last of them flushes while the others continue; 0 means
    /// never.
    pub flush_every: u64,
}

/// The end of a turn.
#[derive(Clone, Copy)]
pub enum Until {
    /// After this time.
    Passed(Duration),
    /// After this many requests.
    Asked(u64),
}

/// The result of a turn.
#[derive(Clone, Copy, Default, Debug)]
pub struct Sample {
    /// Completed requests.
    pub requests: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// The duration; for writes, including a flush at the end.
    pub seconds: f64,
    /// CPU time of the process, including its kernel threads.
    pub cpu_seconds: f64,
    /// From the request to the reply.
    pub latency: Summary,
}

impl Sample {
    /// Requests per second.
    pub fn rate(&self) -> f64 {
        self.requests as f64 / self.seconds
    }
}

/// Measures wall and CPU time.
pub struct Stopwatch {
    wall: Instant,
    cpu: Duration,
}

impl Stopwatch {
    /// Starts.
    pub fn start() -> Stopwatch {
        Stopwatch { wall: Instant::now(), cpu: cpu_time() }
    }

    /// Stops; `requests` requests of `request_bytes` each have completed.
    pub fn stop(&self, requests: u64, request_bytes: u64) -> Sample {
        let cpu_seconds = (cpu_time() - self.cpu).as_secs_f64();
        let seconds = self.wall.elapsed().as_secs_f64();
        Sample { requests, bytes: requests * request_bytes, seconds, cpu_seconds, latency: Summary::default() }
    }
}

fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Bytes to be written, from the reactor's registered memory, so that no contender copies them.
pub fn payload() -> Slice {
    let mut buffer = pool().take(PAYLOAD_BYTES);
    Rng::with_seed(0).fill(&mut buffer);
    buffer.freeze()
}

/// Sends requests for the first `blocks` of a device, `piece` blocks at a time and with a number of requests in flight.
pub async fn in_pieces(
    blocks: u64,
    piece: u64,
    in_flight: usize,
    ask: impl AsyncFn(Extent) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let next = Cell::new(0);
    let askers = (0..in_flight).map(|_| async {
        while next.get() < blocks {
            let start = next.replace(next.get() + piece);
            ask(Extent::from_raw(start, piece.min(blocks - start))?).await?;
        }
        anyhow::Ok(())
    });
    try_join_all(askers).await?;
    Ok(())
}

/// Zeroes to be written, from the reactor's registered memory.
pub fn zeroes() -> Slice {
    let mut buffer = pool().take(PAYLOAD_BYTES);
    buffer.fill(0);
    buffer.freeze()
}

/// Blocks of one request for writing a whole device, and the number in flight.
const WRITE_BLOCKS: u64 = 256;
const WRITE_DEPTH: usize = 8;

/// Writes this number of blocks of a device, from `first` on, each request with a part of the payload, and flushes.
pub async fn write_all<D: Device>(device: &D, first: u64, blocks: u64, payload: &Slice) -> anyhow::Result<()> {
    let geometry = device.geometry();
    in_pieces(blocks, WRITE_BLOCKS, WRITE_DEPTH, async |piece| {
        let extent = Extent::from_raw(first + piece.start().get(), piece.len())?;
        device.execute(write_of(geometry, extent, payload)).await?;
        Ok(())
    })
    .await?;
    device.execute(Request::flush()).await?;
    Ok(())
}

/// A write whose tags the device makes.
pub fn write_of(geometry: &Geometry, extent: Extent, payload: &Slice) -> Request {
    let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: extent.start().get() };
    let data = payload.slice(..extent.bytes(geometry.block_size) as usize);
    Request::write(extent, Unsealed::new(data, geometry.block_size, geometry.protection, tags), Durability::Volatile)
}

struct Shared {
    load: Load,
    end: Option<Instant>,
    left: Cell<u64>,
    cursor: Cell<u64>,
    rng: RefCell<Rng>,
    answered: Cell<u64>,
    places: u64,
    payload: Slice,
    latencies: RefCell<Latencies>,
    failure: RefCell<Option<anyhow::Error>>,
}

impl Shared {
    /// The next extent, until the end of the turn.
    fn next(&self, now: Instant) -> Option<Extent> {
        let over = self.left.get() == 0 || self.end.is_some_and(|end| now >= end);
        if over || self.failure.borrow().is_some() {
            return None;
        }
        self.left.set(self.left.get() - 1);
        let place = if self.load.random {
            self.rng.borrow_mut().u64(..self.places)
        } else {
            self.cursor.replace(self.cursor.get() + 1) % self.places
        };
        Extent::from_raw(place * self.load.blocks, self.load.blocks).ok()
    }
}

/// One turn of `load` on `device`; with `seed`, random addresses differ from turn to turn.
pub async fn drive(
    device: impl Device + Clone + 'static,
    load: Load,
    until: Until,
    seed: u64,
) -> anyhow::Result<Sample> {
    let size = device.geometry().block_size;
    // Before the time begins, since it may take a while.
    let payload = payload();
    let (end, left) = match until {
        Until::Passed(time) => (Some(Instant::now() + time), u64::MAX),
        Until::Asked(requests) => (None, requests),
    };
    let shared = Rc::new(Shared {
        load,
        end,
        left: Cell::new(left),
        cursor: Cell::new(0),
        rng: Rng::with_seed(seed).into(),
        answered: Cell::new(0),
        places: device.geometry().capacity_blocks / load.blocks,
        payload,
        latencies: RefCell::default(),
        failure: RefCell::default(),
    });
    let watch = Stopwatch::start();
    let workers: Vec<_> = (0..load.depth).map(|_| spawn(worker(device.clone(), Rc::clone(&shared)))).collect();
    for worker in workers {
        worker.await.context("a worker was aborted")?;
    }
    if let Some(failure) = shared.failure.take() {
        return Err(failure);
    }
    if load.write {
        device.execute(Request::flush()).await?;
    }
    let turn = watch.stop(shared.answered.get(), load.blocks << size.shift());
    let latency = shared.latencies.borrow().summary();
    Ok(Sample { latency, ..turn })
}

async fn worker(device: impl Device, shared: Rc<Shared>) {
    let mut now = Instant::now();
    while let Some(extent) = shared.next(now) {
        if let Err(error) = request(&device, &shared, extent).await {
            *shared.failure.borrow_mut() = Some(error);
        }
        let answered = Instant::now();
        shared.latencies.borrow_mut().add(answered - now);
        now = answered;
    }
}

async fn request<D: Device>(device: &D, shared: &Shared, extent: Extent) -> anyhow::Result<()> {
    let geometry = device.geometry();
    let operation = if shared.load.write {
        // Making the tags is included in the measurement.
        write_of(geometry, extent, &shared.payload)
    } else {
        Request::read(extent, Expectations::NONE)
    };
    device.execute(operation).await?;
    let answered = shared.answered.get() + 1;
    shared.answered.set(answered);
    if shared.load.flush_every > 0 && answered.is_multiple_of(shared.load.flush_every) {
        device.execute(Request::flush()).await?;
    }
    Ok(())
}
