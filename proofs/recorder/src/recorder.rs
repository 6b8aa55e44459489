//! The recording devices: they log what they execute, in a random order, late, or not at all.
//!
//! Invariants: the content of a device is that of its first image with all changes applied in the order in which they
//! landed by the log; a change lands at most once. A change whose future is dropped stays in flight: it lands at some
//! later time, or never.

use std::cell::RefCell;
use std::ops::RangeInclusive;
use std::rc::Rc;

use sealblock_block::{
    Abilities, Device, DynDevice, ErrorKind, Geometry, Operation, Outcome, Request, RequestKind, Response, yield_once,
};

use crate::device;
use crate::faults::{FailedWrite, Fault};
use crate::image::{Content, Image};
use crate::log::{Log, Recorded, RequestId};
use crate::tear;

/// Bytes of a sector, the unit in which failed changes are torn.
const SECTOR_BYTES: u64 = 512;
/// How often a delayed discard yields while nothing else happens before it completes nevertheless: its caller waits for
/// it before the flushes that it waits for.
const PATIENCE: u32 = 1000;
/// The percentage of request starts at which a change lands whose future was dropped.
const LATE_PERCENT: u32 = 25;

/// How the devices behave.
#[derive(Clone, Debug)]
pub struct Options {
    /// The seed of all random choices.
    pub seed: u64,
    /// How often each request yields before it completes, chosen anew for each. With several values, requests complete
    /// in a random order; with zero alone, each completes when it is polled first.
    pub yields: RangeInclusive<u32>,
    /// The content of discarded blocks.
    pub discarded: Discarded,
    /// How many later flushes of its device a Discard waits for before it completes and takes effect.
    pub discard_delay: u32,
}

impl Default for Options {
    fn default() -> Options {
        Options { seed: 0, yields: 0..=8, discarded: Discarded::Random, discard_delay: 0 }
    }
}

/// The content of discarded blocks, which is undefined.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Discarded {
    /// Zeroes.
    Zeroes,
    /// A pattern that nobody wrote.
    Garbage,
    /// Their old content.
    Kept,
    /// One of these, chosen for each Discard.
    Random,
}

/// Devices in memory that share one log. Clones are the same devices.
#[derive(Clone)]
pub struct Recorder(Rc<Shared>);

struct Shared {
    options: Options,
    state: RefCell<State>,
}

struct State {
    images: Vec<Image>,
    log: Log,
    rng: fastrand::Rng,
    faults: Vec<Fault>,
    /// For each device, how often its requests yield besides what the options say.
    slowness: Vec<u32>,
    /// For each device, the flushes that ended.
    flushes: Vec<u64>,
    /// Changes in flight whose futures were dropped.
    dropped: Vec<RequestId>,
}

impl Recorder {
    /// One device for each image.
    pub fn new(images: Vec<Image>, options: Options) -> Recorder {
        let state = State {
            log: Log::new(images.clone()),
            rng: fastrand::Rng::with_seed(options.seed),
            faults: Vec::new(),
            slowness: vec![0; images.len()],
            flushes: vec![0; images.len()],
            dropped: Vec::new(),
            images,
        };
        Recorder(Rc::new(Shared { options, state: RefCell::new(state) }))
    }

    /// The device with this index, behind a gate.
    ///
    /// # Panics
    /// If there is no such device.
    pub fn device(&self, index: usize) -> DynDevice {
        let geometry = device::geometry(&self.0.state.borrow().images[index]);
        let device = RecordedDevice { shared: Rc::clone(&self.0), index, geometry };
        DynDevice::new(format!("recorded:{index}"), device)
    }

    /// All devices, each behind a gate.
    pub fn devices(&self) -> Vec<DynDevice> {
        let count = self.0.state.borrow().images.len();
        (0..count).map(|index| self.device(index)).collect()
    }

    /// Logs that something is promised from now on, such as "fsync of a returned".
    pub fn mark(&self, name: impl Into<Rc<str>>) {
        self.0.state.borrow_mut().log.mark(name.into());
    }

    /// Adds a fault, which counts requests from now on.
    pub fn inject(&self, fault: Fault) {
        self.0.state.borrow_mut().faults.push(fault);
    }

    /// Removes all faults.
    pub fn clear_faults(&self) {
        self.0.state.borrow_mut().faults.clear();
    }

    /// Each request to the device that starts from now on yields this often besides what the options say.
    ///
    /// # Panics
    /// If there is no such device.
    pub fn slow_down(&self, device: usize, yields: u32) {
        self.0.state.borrow_mut().slowness[device] = yields;
    }

    /// What has happened so far.
    pub fn log(&self) -> Log {
        self.0.state.borrow().log.clone()
    }

    /// What reads return now, for each device: without a power cut.
    pub fn images(&self) -> Vec<Image> {
        self.0.state.borrow().images.clone()
    }
}

impl Shared {
    fn with<R>(&self, use_state: impl FnOnce(&mut State) -> R) -> R {
        use_state(&mut self.state.borrow_mut())
    }
}

impl State {
    /// How the request fails, if it does. Every fault counts it.
    fn fault(&mut self, index: usize, request: &Request) -> Option<FailedWrite> {
        let size = self.images[index].block_size();
        let hits: Vec<FailedWrite> =
            self.faults.iter_mut().filter_map(|fault| fault.hit(index, request, size)).collect();
        hits.first().copied()
    }

    /// Logs the start of a change or a Flush.
    fn start(&mut self, index: usize, request: &Request, discarded: Discarded) -> Result<RequestId, ErrorKind> {
        let size = self.images[index].block_size();
        let content = match discarded {
            Discarded::Random => self.rng.choice([Some(Content::Zeroes), Some(Content::Garbage), None]).flatten(),
            Discarded::Zeroes => Some(Content::Zeroes),
            Discarded::Garbage => Some(Content::Garbage),
            Discarded::Kept => None,
        };
        let pieces = device::changes(request, size, content)?;
        if self.rng.u32(..100) < LATE_PERCENT {
            self.land_dropped();
        }
        Ok(self.log.start(Recorded {
            device: index,
            kind: request.kind(),
            may_unmap: matches!(request.operation, Operation::WriteZeroes { may_unmap: true }),
            durability: request.durability,
            pieces,
            started: 0,
            landed: None,
            ended: None,
            stored: None,
            failed: false,
        }))
    }

    /// One of the changes whose futures were dropped lands.
    fn land_dropped(&mut self) {
        if !self.dropped.is_empty() {
            let chosen = self.rng.usize(..self.dropped.len());
            let id = self.dropped.swap_remove(chosen);
            self.log.land(id);
            self.apply(id);
        }
    }

    fn end(&mut self, id: RequestId, failed: Option<FailedWrite>) {
        let pieces = &self.log.request(id).pieces;
        let stored = failed.map(|failed| match failed {
            FailedWrite::Lost => Vec::new(),
            FailedWrite::Stored => pieces.clone(),
            FailedWrite::Torn => tear::torn(pieces, SECTOR_BYTES, &mut self.rng),
        });
        self.log.end(id, stored);
        self.apply(id);
    }

    fn apply(&mut self, id: RequestId) {
        let request = self.log.request(id);
        request.pieces_at(usize::MAX).iter().for_each(|piece| self.images[request.device].apply(piece));
        self.flushes[request.device] += u64::from(request.is_flush());
    }
}

struct RecordedDevice {
    shared: Rc<Shared>,
    index: usize,
    geometry: Geometry,
}

impl RecordedDevice {
    async fn wait(&self) {
        let range = self.shared.options.yields.clone();
        let yields = self.shared.with(|state| state.rng.u32(range).saturating_add(state.slowness[self.index]));
        for _ in 0..yields {
            yield_once().await;
        }
    }

    /// Waits for as many flushes of this device as a Discard is delayed by.
    async fn wait_for_flushes(&self) {
        let now = || self.shared.with(|state| (state.flushes[self.index], state.log.events().len()));
        let (before, mut events) = now();
        let wanted = before + u64::from(self.shared.options.discard_delay);
        let mut idle = 0;
        while idle < PATIENCE {
            let (flushes, events_now) = now();
            if flushes >= wanted {
                return;
            }
            idle = if events_now == events { idle + 1 } else { 0 };
            events = events_now;
            yield_once().await;
        }
    }
}

/// A logged request that has not ended. If its future is dropped, it stays in flight.
struct InFlight<'a> {
    shared: &'a Shared,
    id: RequestId,
    has_ended: bool,
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        let id = self.id;
        let is_left = |state: &State| !self.has_ended && !state.log.request(id).is_flush();
        self.shared.with(|state| is_left(state).then(|| state.dropped.push(id)));
    }
}

impl Device for RecordedDevice {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn abilities(&self) -> Abilities {
        device::ABILITIES
    }

    async fn execute(&self, request: Request) -> Outcome {
        let fault = self.shared.with(|state| state.fault(self.index, &request));
        let error = fault.map(|_| ErrorKind::Media { reason: "input/output error, as the test demands".to_owned() });
        if let Operation::Read(_) = request.operation {
            self.wait().await;
            return match error {
                Some(error) => Err(error.into()),
                None => self.shared.with(|state| device::read(&state.images[self.index], request.extents.one())),
            };
        }
        let discarded = self.shared.options.discarded;
        let id = self.shared.with(|state| state.start(self.index, &request, discarded))?;
        let mut in_flight = InFlight { shared: &self.shared, id, has_ended: false };
        self.wait().await;
        if request.kind() == RequestKind::Discard {
            self.wait_for_flushes().await;
        }
        self.shared.with(|state| state.end(id, fault));
        in_flight.has_ended = true;
        error.map_or(Ok(Response::Done), |error| Err(error.into()))
    }
}

#[cfg(test)]
mod tests;
