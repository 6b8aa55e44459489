//! The state that the layer and its worker share.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Poll, Waker};

use futures_util::future::{Either, select};
use sealblock_block::{
    Abilities, Clock, Condition, Device, DeviceOpener, DynDevice, Error, ErrorKind, Geometry, LateWrites, Outcome,
    Request, WriteSet,
};

use crate::in_flight::{InFlightRequests, PathLost};
use crate::path_flushes::PathFlushes;
use crate::policy::{FailureScope, RetryPolicy, RoundRobin, classify};

/// Quiesces the target of a path.
pub struct Quiesce {
    /// Opens a device once the target has finished every command of this host's lost paths to it; the layer drops that
    /// device at once.
    pub opener: DeviceOpener,
    /// Identifies the target as of the last time that the path was open; `None` if that is not known. Targets that are
    /// different, such as two gateways, know nothing of each other's commands.
    pub target: Rc<dyn Fn() -> Option<[u8; 16]>>,
}

impl Quiesce {
    /// True if both are known to lead to different targets.
    pub(crate) fn is_apart_from(&self, other: &Quiesce) -> bool {
        (self.target)().zip((other.target)()).is_some_and(|(target, other)| target != other)
    }
}

/// One path to the device.
pub(crate) struct Path {
    pub(crate) source: DeviceOpener,
    pub(crate) quiesce: Option<Quiesce>,
    /// The device, while the path is live.
    pub(crate) device: RefCell<Option<DynDevice>>,
    pub(crate) requests: Cell<u64>,
    pub(crate) failures: Cell<u64>,
    /// Why it is not live, or why it failed last.
    pub(crate) last_error: RefCell<Option<String>>,
}

/// A path that failed, or that could not be opened at first (incarnation 0).
#[derive(Clone, Copy, Debug)]
pub(crate) struct FailedPath {
    pub(crate) path: usize,
    pub(crate) incarnation: u64,
}

/// The mutable state. No borrow of it may be held while a waker is called or a device dropped: both can reenter the
/// layer.
pub(crate) struct PathSet {
    pub(crate) round_robin: RoundRobin,
    pub(crate) late_writes: LateWrites,
    pub(crate) path_flushes: PathFlushes,
    pub(crate) in_flight: InFlightRequests,
    pub(crate) failed: VecDeque<FailedPath>,
    pub(crate) worker: Option<Waker>,
    pub(crate) is_closed: bool,
    requests: u64,
}

pub(crate) struct MultipathState<C> {
    pub(crate) paths: Vec<Path>,
    pub(crate) state: RefCell<PathSet>,
    /// Notified when a path is restored or late writes are cleared.
    pub(crate) changed: Condition,
    pub(crate) geometry: Geometry,
    /// The abilities of the paths when one was last live.
    abilities: Cell<Abilities>,
    pub(crate) clock: C,
    pub(crate) policy: RetryPolicy,
}

impl<C: Clock> MultipathState<C> {
    /// The state with these paths, none of them live yet.
    pub(crate) fn new(paths: Vec<Path>, geometry: Geometry, clock: C, policy: RetryPolicy) -> MultipathState<C> {
        let state = PathSet {
            round_robin: RoundRobin::new(paths.len()),
            late_writes: LateWrites::default(),
            path_flushes: PathFlushes::new(paths.len(), policy.has_volatile_cache),
            in_flight: InFlightRequests::default(),
            failed: VecDeque::new(),
            worker: None,
            is_closed: false,
            requests: 0,
        };
        let abilities = Cell::new(Abilities::BASIC);
        let (state, changed) = (RefCell::new(state), Condition::default());
        MultipathState { paths, state, changed, geometry, abilities, clock, policy }
    }

    /// An identifier for a request, never used before.
    pub(crate) fn next_request_id(&self) -> u64 {
        let mut state = self.state.borrow_mut();
        state.requests += 1;
        state.requests
    }

    /// The abilities that all live paths have.
    pub(crate) fn abilities(&self) -> Abilities {
        let live = self.paths.iter().filter_map(|path| path.device.borrow().as_ref().map(Device::abilities));
        match live.reduce(|a, b| a.intersect(&b)) {
            Some(abilities) => {
                self.abilities.set(abilities);
                abilities
            }
            None => self.abilities.get(),
        }
    }

    /// Makes a path live.
    pub(crate) fn restore(&self, path: usize, device: DynDevice) {
        {
            let mut state = self.state.borrow_mut();
            let incarnation = state.round_robin.restore(path);
            state.path_flushes.path_opened(path, incarnation);
        }
        self.paths[path].device.replace(Some(device));
        self.abilities();
        self.changed.notify();
    }

    /// Marks a path as failed: its requests in flight use another path, and other writes wait for its late writes.
    pub(crate) fn fail(&self, path: usize, incarnation: u64, reason: &str) {
        let (mut wakers, worker) = {
            let mut state = self.state.borrow_mut();
            if !state.round_robin.fail(path, incarnation) {
                return;
            }
            state.path_flushes.path_lost(path);
            let path_loss = state.in_flight.path_lost(incarnation);
            for (request_id, write_set) in path_loss.writes {
                state.late_writes.add(incarnation, request_id, write_set);
            }
            state.failed.push_back(FailedPath { path, incarnation });
            (path_loss.wakers, state.worker.take())
        };
        let of = &self.paths[path];
        tracing::warn!(path = of.source.name(), reason, "path failed");
        of.failures.set(of.failures.get() + 1);
        of.last_error.replace(Some(reason.to_owned()));
        // Closes its connections, unless requests that are woken below still hold the device.
        let device = of.device.take();
        drop(device);
        wakers.extend(worker);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Waits until `ready` returns a value. It is called whenever a path is restored or late writes are cleared.
    pub(crate) async fn wait_for<T>(&self, mut ready: impl FnMut(&mut PathSet) -> Option<T>) -> T {
        let mut found = None;
        self.changed
            .wait_until(|| {
                found = ready(&mut self.state.borrow_mut());
                found.is_some()
            })
            .await;
        found.expect("the wait ends once something was found")
    }

    /// Waits until no lost path can deliver a change any more, while there is another path to find it out. True if none can.
    pub(crate) async fn settled(&self) -> bool {
        let is_over = || {
            let state = self.state.borrow();
            state.late_writes.is_empty() || state.is_closed || !state.round_robin.has_live()
        };
        if !is_over() {
            tracing::warn!("waiting until a failed path can deliver nothing more");
            self.changed.wait_until(is_over).await;
        }
        self.state.borrow().late_writes.is_empty()
    }

    /// Returns a path for a request, once one is live and no late write can undo what the request changes.
    pub(crate) async fn admit(&self, request_id: u64, write_set: &WriteSet) -> Result<(usize, u64), Error> {
        let admit = |state: &mut PathSet| match state.late_writes.permits(request_id, write_set) {
            true => state.round_robin.pick(),
            false => None,
        };
        if let Some(found) = admit(&mut self.state.borrow_mut()) {
            return Ok(found);
        }
        let (waited, found) = (pin!(self.clock.sleep(self.policy.no_path_timeout)), pin!(self.wait_for(admit)));
        match select(found, waited).await {
            Either::Left((found, _)) => Ok(found),
            Either::Right(_) => Err(self.no_path_error(request_id, write_set)),
        }
    }

    /// The error of a request whose wait for a path timed out.
    #[cold]
    fn no_path_error(&self, request_id: u64, write_set: &WriteSet) -> Error {
        let has_late_write = !self.state.borrow().late_writes.permits(request_id, write_set);
        let wait = self.policy.no_path_timeout;
        let last_errors = self.paths.iter().filter_map(|path| {
            path.last_error.borrow().as_ref().map(|last_error| format!("{}: {last_error}", path.source.name()))
        });
        let last_errors = last_errors.collect::<Vec<_>>().join("; ");
        let reason = match has_late_write {
            true => format!("for {wait:?} a failed path could still have changed these blocks; {last_errors}"),
            false => format!("no path was live for {wait:?}; {last_errors}"),
        };
        ErrorKind::Unreachable { reason }.into()
    }

    /// Executes a request on one path. An outcome is final; otherwise the path was lost.
    pub(crate) async fn execute_on(
        &self,
        (path, incarnation): (usize, u64),
        request_id: u64,
        write_set: &WriteSet,
        request: Request,
    ) -> Result<Outcome, PathLost> {
        let of = &self.paths[path];
        of.requests.set(of.requests.get() + 1);
        self.send((path, incarnation), request_id, write_set, request).await
    }

    /// The same without counting the request: a probe is not a request of a client.
    pub(crate) async fn send(
        &self,
        (path, incarnation): (usize, u64),
        request_id: u64,
        write_set: &WriteSet,
        request: Request,
    ) -> Result<Outcome, PathLost> {
        let of = &self.paths[path];
        let device = of.device.borrow().clone().ok_or(PathLost)?;
        let slot = self.state.borrow_mut().in_flight.add(path, incarnation, request_id, write_set.clone());
        let mut guard = InFlightGuard { shared: self, slot, path, incarnation, is_answered: write_set.is_empty() };
        let mut execution = pin!(device.execute(request));
        let outcome = poll_fn(|cx| {
            if let Poll::Ready(outcome) = execution.as_mut().poll(cx) {
                return Poll::Ready(Ok(outcome));
            }
            match self.state.borrow_mut().in_flight.is_lost(guard.slot, cx.waker()) {
                Ok(_before) => Poll::Pending,
                Err(lost) => Poll::Ready(Err(lost)),
            }
        });
        let outcome = outcome.await;
        guard.is_answered = true;
        match outcome? {
            Err(error) if classify(error.kind()) == FailureScope::Path => {
                // Called while the request is still listed as in flight, so that other writes wait for it.
                self.fail(path, incarnation, &error.kind().to_string());
                Err(PathLost)
            }
            outcome => Ok(outcome),
        }
    }
}

/// The property of the geometry that differs from the expected one.
pub(crate) fn check_geometry(expected: &Geometry, actual: &Geometry) -> Result<(), &'static str> {
    if actual.block_size != expected.block_size {
        return Err("block size");
    }
    if actual.protection != expected.protection {
        return Err("format of protection information");
    }
    if actual.capacity_blocks != expected.capacity_blocks { Err("number of blocks") } else { Ok(()) }
}

/// The same for a reopened device, which may have grown: it still has all its former blocks.
pub(crate) fn check_reopened_geometry(expected: &Geometry, actual: &Geometry) -> Result<(), &'static str> {
    let capacity_blocks = actual.capacity_blocks.min(expected.capacity_blocks);
    check_geometry(expected, &Geometry { capacity_blocks, ..actual.clone() })
}

/// Removes a request from those in flight when dropped.
struct InFlightGuard<'a, C: Clock> {
    shared: &'a MultipathState<C>,
    slot: usize,
    path: usize,
    incarnation: u64,
    /// False for a change whose outcome is not known yet.
    is_answered: bool,
}

impl<C: Clock> Drop for InFlightGuard<'_, C> {
    fn drop(&mut self) {
        if !self.is_answered {
            // It cannot be known any more when the path executes this change; only the loss of the path ensures that it
            // cannot arrive any more. So the path fails, while the change is still listed as in flight, and other
            // changes of its blocks wait for it.
            self.shared.fail(self.path, self.incarnation, "a change was dropped before it was answered");
        }
        let ended = self.shared.state.borrow_mut().in_flight.remove(self.slot);
        drop(ended);
    }
}
