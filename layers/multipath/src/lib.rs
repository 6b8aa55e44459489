//! Several ways to one device.
//!
//! Requests take the live paths in turns. A path that fails is left out, opened anew in the background, and comes back;
//! what was under way on it is carried out over another one. Failures of the data, the device or the request are the same on
//! every path and final.
//!
//! Invariants:
//! - A write that was answered is not undone by an earlier one that a lost path delivers late (`fence`).
//! - A Flush is answered only when all writes answered before are durable, whichever way they went, or says that some may be
//!   lost (`ledger`).
//! - Every wait has its limit in [`RetryPolicy`].
//!
//! Shape: the decisions are pure (`policy`, `fence`, `ledger`, `flights`); `shared` and `worker` carry them out. Time and
//! the opening of devices are arguments. What a lost path may still do, and what is assumed of targets, is in
//! `docs/decisions/0005-multipath-retries.md`.

mod in_flight;
mod late_write;
mod path_flushes;
mod policy;
mod shared;
mod worker;

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::task::Waker;

use futures_util::future::join_all;
use sealblock_block::{
    Abilities, Ability, Clock, Device, DeviceOpener, DynDevice, Error, ErrorKind, Geometry, Limits, Outcome, Request,
    Response,
};

use late_write::WriteSet;
use shared::{Failed, MultipathState, Path};

pub use policy::RetryPolicy;
pub use worker::Worker;

/// A path, as it is given to the layer.
pub struct PathConfig {
    /// Opens it, at first and whenever it was lost.
    pub source: DeviceOpener,
    /// Opens what is ready only when nothing is under way any more of what this host's lost paths had begun, and is
    /// dropped then. Nothing where there is no way to ask.
    pub settle: Option<DeviceOpener>,
    /// The open device, behind its gate, where it could be opened.
    pub device: Option<DynDevice>,
}

/// Why paths cannot be one device.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MultipathError {
    /// None of them is open.
    #[error("none of the paths could be opened")]
    NonePresent,
    /// They lead to different devices.
    #[error("path {path} leads to another device than the first that could be opened: it has another {what}")]
    Different {
        /// Which path, from 0.
        path: usize,
        /// What differs.
        what: &'static str,
    },
}

/// What a path has done.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PathStatus {
    /// What people call it.
    pub name: String,
    /// Whether it takes requests.
    pub is_live: bool,
    /// Requests that it was given.
    pub requests: u64,
    /// Times that it failed.
    pub failures: u64,
    /// Why it is not live.
    pub trouble: Option<String>,
}

/// Tells what the paths of a layer have done, for as long as anybody asks.
#[derive(Clone)]
pub struct PathMonitor(Rc<dyn Fn() -> Vec<PathStatus>>);

impl PathMonitor {
    /// The paths, in order.
    pub fn paths(&self) -> Vec<PathStatus> {
        (self.0)()
    }
}

impl fmt::Debug for PathMonitor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.paths()).finish()
    }
}

/// Several ways as one device. See the crate's header.
pub struct MultipathLayer<C: Clock>(Rc<MultipathState<C>>);

impl<C: Clock + 'static> MultipathLayer<C> {
    /// These ways as one device, and the work beside its requests, which is to be run as a task.
    ///
    /// # Errors
    /// When no path is open, or those that are lead to devices of different shapes. Whether they lead to the same device of that
    /// shape is for who opens them to know.
    pub fn new(
        ways: Vec<PathConfig>,
        clock: C,
        patience: RetryPolicy,
    ) -> Result<(MultipathLayer<C>, Worker<C>), MultipathError> {
        let open = || ways.iter().enumerate().filter_map(|(path, way)| Some((path, way.device.as_ref()?.geometry())));
        let (_, first) = open().next().ok_or(MultipathError::NonePresent)?;
        for (path, other) in open() {
            check_shape(first, other).map_err(|what| MultipathError::Different { path, what })?;
        }
        let least = |a: &Limits, b: &Limits| Limits {
            max_transfer_blocks: a.max_transfer_blocks.min(b.max_transfer_blocks),
            max_verify_blocks: a.max_verify_blocks.min(b.max_verify_blocks),
            max_zero_blocks: a.max_zero_blocks.min(b.max_zero_blocks),
        };
        let limits = open().fold(first.limits, |limits, (_, other)| least(&limits, &other.limits));
        let geometry = Geometry { limits, ..first.clone() };
        let (paths, devices): (Vec<_>, Vec<_>) = ways.into_iter().map(split).unzip();
        let shared = Rc::new(MultipathState::new(paths, geometry, clock, patience));
        for (path, device) in devices.into_iter().enumerate() {
            match device {
                Some(device) => shared.restore(path, device),
                None => shared.core.borrow_mut().failed.push_back(Failed { path, incarnation: 0 }),
            }
        }
        Ok((MultipathLayer(Rc::clone(&shared)), Worker(shared)))
    }

    /// Tells what the paths have done.
    pub fn observer(&self) -> PathMonitor {
        let shared = Rc::clone(&self.0);
        PathMonitor(Rc::new(move || {
            let status = |path: &Path| PathStatus {
                name: path.source.name().to_owned(),
                is_live: path.device.borrow().is_some(),
                requests: path.requests.get(),
                failures: path.failures.get(),
                trouble: path.trouble.borrow().clone().filter(|_| path.device.borrow().is_none()),
            };
            shared.paths.iter().map(status).collect()
        }))
    }

    /// A request for blocks, over one path after the other until one has answered.
    async fn request(&self, operation: Request) -> Outcome {
        let (touched, request) = (WriteSet::by(&operation), self.0.number());
        for _ in 0..self.0.patience.max_path_failures.max(1) {
            let path = self.0.admitted(request, &touched).await?;
            let Ok(outcome) = self.0.over(path, request, &touched, operation.clone()).await else { continue };
            if outcome.is_ok() && operation.is_volatile() {
                self.0.core.borrow_mut().ledger.wrote(path.0, path.1);
            }
            return outcome;
        }
        Err(self.lost_too_many())
    }

    /// Flushes every path that has something to flush.
    async fn flush(&self) -> Outcome {
        let mut mark = None;
        for _ in 0..self.0.patience.max_path_failures.max(1) {
            let begun = self.0.core.borrow_mut().ledger.begin();
            let plan = begun.map_err(|doubt| Error::from(ErrorKind::Media { reason: doubt.to_string() }))?;
            let mark = *mark.get_or_insert(plan.mark);
            let paths = match plan.paths.is_empty() {
                true => vec![self.0.admitted(self.0.number(), &WriteSet::Nothing).await?],
                false => plan.paths,
            };
            let flushes = paths.into_iter().map(|path| async move {
                (path, self.0.over(path, self.0.number(), &WriteSet::Nothing, Request::Flush).await)
            });
            let mut is_lost = false;
            for (path, outcome) in join_all(flushes).await {
                match outcome {
                    Ok(outcome) => outcome.map(drop)?,
                    Err(_lost) => {
                        is_lost = true;
                        continue;
                    }
                }
                self.0.core.borrow_mut().ledger.flushed(path.0, path.1, plan.mark);
            }
            if !is_lost && self.0.core.borrow().ledger.is_clear(mark) {
                return Ok(Response::Done);
            }
        }
        Err(self.lost_too_many())
    }

    #[cold]
    fn lost_too_many(&self) -> Error {
        let losses = self.0.patience.max_path_failures.max(1);
        ErrorKind::Unreachable { reason: format!("{losses} paths were lost with this request") }.into()
    }
}

/// A path and its device, if it is open.
fn split(way: PathConfig) -> (Path, Option<DynDevice>) {
    let trouble = way.device.is_none().then(|| "it could not be opened yet".to_owned());
    let path = Path {
        source: way.source,
        settle: way.settle,
        device: RefCell::default(),
        requests: Cell::new(0),
        failures: Cell::new(0),
        trouble: RefCell::new(trouble),
    };
    (path, way.device)
}

/// What tells a device from the one that is expected, by shape.
pub(crate) fn check_shape(expected: &Geometry, actual: &Geometry) -> Result<(), &'static str> {
    if actual.block_size != expected.block_size {
        return Err("block size");
    }
    if actual.protection != expected.protection {
        return Err("format of protection information");
    }
    if actual.capacity_blocks != expected.capacity_blocks { Err("number of blocks") } else { Ok(()) }
}

/// The same of a device that was opened anew: one that has grown since still has all the blocks that it had.
pub(crate) fn check_shape_again(expected: &Geometry, actual: &Geometry) -> Result<(), &'static str> {
    let capacity_blocks = actual.capacity_blocks.min(expected.capacity_blocks);
    check_shape(expected, &Geometry { capacity_blocks, ..actual.clone() })
}

impl<C: Clock + 'static> Device for MultipathLayer<C> {
    fn geometry(&self) -> &Geometry {
        &self.0.geometry
    }

    fn abilities(&self) -> Abilities {
        // A late write beside the blocks could not be told from a newer one.
        Abilities { reserved: Ability::Absent, ..self.0.abilities() }
    }

    async fn execute(&self, operation: Request) -> Outcome {
        match operation {
            Request::Flush => self.flush().await,
            operation => self.request(operation).await,
        }
    }
}

impl<C: Clock> Drop for MultipathLayer<C> {
    fn drop(&mut self) {
        let worker = {
            let mut core = self.0.core.borrow_mut();
            core.is_closed = true;
            core.worker.take()
        };
        worker.into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests;
