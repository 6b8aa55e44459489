//! What the layer and its worker share.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::pin;
use std::task::{Poll, Waker};

use futures_util::future::{Either, select};
use sealblock_block::{
    Abilities, Clock, Device, DeviceOpener, DynDevice, Error, ErrorKind, Geometry, Outcome, Request,
};

use crate::in_flight::{InFlightRequests, Lost};
use crate::late_write::{LateWrites, WriteSet};
use crate::path_flushes::PathFlushes;
use crate::policy::{FailureScope, RetryPolicy, RoundRobin, classify};

/// One way to the device.
pub(crate) struct Path {
    pub(crate) source: DeviceOpener,
    pub(crate) settle: Option<DeviceOpener>,
    /// The device, while the path is live.
    pub(crate) device: RefCell<Option<DynDevice>>,
    pub(crate) requests: Cell<u64>,
    pub(crate) failures: Cell<u64>,
    /// Why it is not live, or was not the last time.
    pub(crate) trouble: RefCell<Option<String>>,
}

/// A path that failed, or was not there in the beginning (incarnation 0).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Failed {
    pub(crate) path: usize,
    pub(crate) incarnation: u64,
}

/// What changes. No borrow of it is held while a waker is called or a device dropped.
pub(crate) struct PathSet {
    pub(crate) turns: RoundRobin,
    pub(crate) fences: LateWrites,
    pub(crate) ledger: PathFlushes,
    pub(crate) flights: InFlightRequests,
    pub(crate) failed: VecDeque<Failed>,
    pub(crate) worker: Option<Waker>,
    pub(crate) is_closed: bool,
    waiting: Vec<Waker>,
    requests: u64,
}

pub(crate) struct MultipathState<C> {
    pub(crate) paths: Vec<Path>,
    pub(crate) core: RefCell<PathSet>,
    pub(crate) geometry: Geometry,
    /// What the paths could when one was live the last time.
    abilities: Cell<Abilities>,
    pub(crate) clock: C,
    pub(crate) patience: RetryPolicy,
}

impl<C: Clock> MultipathState<C> {
    /// Paths that are not live yet.
    pub(crate) fn new(paths: Vec<Path>, geometry: Geometry, clock: C, patience: RetryPolicy) -> MultipathState<C> {
        let core = PathSet {
            turns: RoundRobin::new(paths.len()),
            fences: LateWrites::default(),
            ledger: PathFlushes::new(paths.len(), patience.volatile),
            flights: InFlightRequests::default(),
            failed: VecDeque::new(),
            worker: None,
            is_closed: false,
            waiting: Vec::new(),
            requests: 0,
        };
        let abilities = Cell::new(Abilities::BASIC);
        MultipathState { paths, core: RefCell::new(core), geometry, abilities, clock, patience }
    }

    /// A number for a request.
    pub(crate) fn number(&self) -> u64 {
        let mut core = self.core.borrow_mut();
        core.requests += 1;
        core.requests
    }

    /// What all live paths can.
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

    /// A path is there, or there again.
    pub(crate) fn restore(&self, path: usize, device: DynDevice) {
        let waiting = {
            let mut core = self.core.borrow_mut();
            let incarnation = core.turns.restore(path);
            core.ledger.opened(path, incarnation);
            std::mem::take(&mut core.waiting)
        };
        self.paths[path].device.replace(Some(device));
        self.abilities();
        waiting.into_iter().for_each(Waker::wake);
    }

    /// A path has failed: what is under way on it goes elsewhere, and what it may still change is fenced.
    pub(crate) fn fail(&self, path: usize, incarnation: u64, reason: &str) {
        let (mut wakers, worker) = {
            let mut core = self.core.borrow_mut();
            if !core.turns.fail(path, incarnation) {
                return;
            }
            core.ledger.lost(path);
            let left = core.flights.lose(incarnation);
            for (request, touched) in left.writes {
                core.fences.add(incarnation, request, touched);
            }
            core.failed.push_back(Failed { path, incarnation });
            (left.wakers, core.worker.take())
        };
        let of = &self.paths[path];
        tracing::warn!(path = of.source.name(), reason, "path failed");
        of.failures.set(of.failures.get() + 1);
        of.trouble.replace(Some(reason.to_owned()));
        // Ends its connections, unless requests that hear of it now have it still.
        let device = of.device.take();
        drop(device);
        wakers.extend(worker);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Something that requests wait for has changed.
    pub(crate) fn wake_waiting(&self) {
        let waiting = std::mem::take(&mut self.core.borrow_mut().waiting);
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Waits until `ready` gives something, looked at whenever a path comes back or a fence falls.
    pub(crate) async fn when<T>(&self, mut ready: impl FnMut(&mut PathSet) -> Option<T>) -> T {
        poll_fn(|cx| {
            let mut core = self.core.borrow_mut();
            if let Some(found) = ready(&mut core) {
                return Poll::Ready(found);
            }
            if !core.waiting.iter().any(|waker| waker.will_wake(cx.waker())) {
                core.waiting.push(cx.waker().clone());
            }
            Poll::Pending
        })
        .await
    }

    /// The path for a request, as soon as there is one and nothing that was lost may undo what it changes.
    pub(crate) async fn admitted(&self, request: u64, touched: &WriteSet) -> Result<(usize, u64), Error> {
        let admit = |core: &mut PathSet| match core.fences.permits(request, touched) {
            true => core.turns.pick(),
            false => None,
        };
        if let Some(found) = admit(&mut self.core.borrow_mut()) {
            return Ok(found);
        }
        let (waited, found) = (pin!(self.clock.sleep(self.patience.no_path_timeout)), pin!(self.when(admit)));
        match select(found, waited).await {
            Either::Left((found, _)) => Ok(found),
            Either::Right(_) => Err(self.nobody(request, touched)),
        }
    }

    /// Why a request has waited in vain.
    #[cold]
    fn nobody(&self, request: u64, touched: &WriteSet) -> Error {
        let is_fenced = !self.core.borrow().fences.permits(request, touched);
        let wait = self.patience.no_path_timeout;
        let troubles = self.paths.iter().filter_map(|path| {
            path.trouble.borrow().as_ref().map(|trouble| format!("{}: {trouble}", path.source.name()))
        });
        let troubles = troubles.collect::<Vec<_>>().join("; ");
        let reason = match is_fenced {
            true => format!("for {wait:?} a path that failed could still have changed these blocks; {troubles}"),
            false => format!("no path was live for {wait:?}; {troubles}"),
        };
        ErrorKind::Unreachable { reason }.into()
    }

    /// Carries a request out over one path. An outcome is final; otherwise the path is lost.
    pub(crate) async fn over(
        &self,
        place: (usize, u64),
        request: u64,
        touched: &WriteSet,
        operation: Request,
    ) -> Result<Outcome, Lost> {
        let of = &self.paths[place.0];
        of.requests.set(of.requests.get() + 1);
        self.ask(place, request, touched, operation).await
    }

    /// The same of what nobody has requested, and does not count.
    pub(crate) async fn ask(
        &self,
        (path, incarnation): (usize, u64),
        request: u64,
        touched: &WriteSet,
        operation: Request,
    ) -> Result<Outcome, Lost> {
        let of = &self.paths[path];
        let device = of.device.borrow().clone().ok_or(Lost)?;
        let place = self.core.borrow_mut().flights.begin(path, incarnation, request, touched.clone());
        let flight = InFlightGuard { shared: self, place };
        let mut running = pin!(device.execute(operation));
        let outcome = poll_fn(|cx| {
            if let Poll::Ready(outcome) = running.as_mut().poll(cx) {
                return Poll::Ready(Ok(outcome));
            }
            match self.core.borrow_mut().flights.is_lost(flight.place, cx.waker()) {
                Ok(_before) => Poll::Pending,
                Err(lost) => Poll::Ready(Err(lost)),
            }
        });
        match outcome.await? {
            Err(error) if classify(error.kind()) == FailureScope::Path => {
                // While it is under way still, so that what it may change is fenced.
                self.fail(path, incarnation, &error.kind().to_string());
                Err(Lost)
            }
            outcome => Ok(outcome),
        }
    }
}

/// A request under way, which ends with this.
struct InFlightGuard<'a, C> {
    shared: &'a MultipathState<C>,
    place: usize,
}

impl<C> Drop for InFlightGuard<'_, C> {
    fn drop(&mut self) {
        let ended = self.shared.core.borrow_mut().flights.end(self.place);
        drop(ended);
    }
}
