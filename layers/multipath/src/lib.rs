//! Several paths to one device.
//!
//! Requests use the live paths in turns. A failed path gets no requests, and the worker reopens it in the background;
//! its requests in flight are retried on another path. An error of the data, the device or the request is final: every
//! path would return the same one.
//!
//! Invariants:
//! - A completed write is never undone by an earlier write that a lost path delivers late
//!   ([`LateWrites`](sealblock_block::LateWrites)).
//! - A Flush succeeds only if all writes that completed before are durable, whichever path they took. Otherwise it
//!   fails and reports that writes may be lost (`path_flushes`).
//! - A CompareAndWrite that was sent is not sent again: if it was executed, it would miscompare with its own write. It
//!   fails as unreachable, which means that it is unknown whether it was executed.
//! - Every wait has a limit in [`RetryPolicy`].
//!
//! Layout: `policy`, `in_flight` and `path_flushes` decide and are pure; `shared` and `worker` execute. The clock and
//! the openers of devices are arguments. `docs/decisions/0005-multipath-retries.md` explains what a lost path may still
//! do, and the assumptions about targets.

mod in_flight;
mod path_flushes;
mod policy;
mod shared;
mod worker;

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::task::Waker;
use std::time::Duration;

use futures_util::future::{LocalBoxFuture, join_all};
use sealblock_block::{
    Abilities, Ability, Clock, Device, DeviceOpener, DynDevice, Error, ErrorKind, Geometry, Limits, Outcome, Request,
    RequestKind, Response, WriteSet,
};

use shared::{FailedPath, MultipathState, Path, check_geometry};

pub use policy::RetryPolicy;
pub use shared::Quiesce;
use worker::LONGEST_SILENCE;
pub use worker::Worker;

/// A path that the caller passes to the layer.
pub struct PathConfig {
    /// Opens it, at first and again after it was lost.
    pub source: DeviceOpener,
    /// How the layer has the target finish what lost paths have in flight. `None` if the protocol cannot do that.
    pub quiesce: Option<Quiesce>,
    /// The open device, behind its gate, if it could be opened.
    pub device: Option<DynDevice>,
}

/// Why these paths cannot form one device.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MultipathError {
    /// None of them is open.
    #[error("none of the paths could be opened")]
    NonePresent,
    /// They lead to different devices.
    #[error("path {path} leads to another device than the first path that could be opened: the {what} differs")]
    Different {
        /// The path, from 0.
        path: usize,
        /// What differs.
        what: &'static str,
    },
}

/// The state and counters of a path.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PathStatus {
    /// Its name in messages.
    pub name: String,
    /// True if it is used for requests.
    pub is_live: bool,
    /// Requests sent on it.
    pub requests: u64,
    /// The number of times that it failed.
    pub failures: u64,
    /// Why it is not live.
    pub last_error: Option<String>,
}

/// Reports the state of a layer's paths. It keeps the paths alive, but not the layer.
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

/// The changes of a layer that a lost path may still deliver.
#[derive(Clone)]
pub struct LateChanges {
    settled: Rc<dyn Fn() -> LocalBoxFuture<'static, bool>>,
    /// The time that these may take at most.
    pub longest: Duration,
}

impl LateChanges {
    /// Waits until there are none, as long as the layer has a path and its worker runs. True if there are none.
    pub async fn settled(&self) -> bool {
        (self.settled)().await
    }
}

/// Several paths as one device. See the crate's header.
pub struct MultipathLayer<C: Clock>(Rc<MultipathState<C>>);

impl<C: Clock + 'static> MultipathLayer<C> {
    /// Joins these paths to one device. Returns the device and its worker, which the caller runs as a task.
    ///
    /// # Errors
    /// When no path is open, or the open ones have different geometries. The caller must ensure that they lead to the
    /// same device.
    pub fn new(
        paths: Vec<PathConfig>,
        clock: C,
        policy: RetryPolicy,
    ) -> Result<(MultipathLayer<C>, Worker<C>), MultipathError> {
        let open = || {
            paths
                .iter()
                .enumerate()
                .filter_map(|(path, path_config)| Some((path, path_config.device.as_ref()?.geometry())))
        };
        let (_, first) = open().next().ok_or(MultipathError::NonePresent)?;
        for (path, other) in open() {
            check_geometry(first, other).map_err(|what| MultipathError::Different { path, what })?;
        }
        let min_limits = |a: &Limits, b: &Limits| Limits {
            max_transfer_blocks: a.max_transfer_blocks.min(b.max_transfer_blocks),
            max_verify_blocks: a.max_verify_blocks.min(b.max_verify_blocks),
            max_zero_blocks: a.max_zero_blocks.min(b.max_zero_blocks),
        };
        let limits = open().fold(first.limits, |limits, (_, other)| min_limits(&limits, &other.limits));
        let geometry = Geometry { limits, ..first.clone() };
        let (paths, devices): (Vec<_>, Vec<_>) = paths.into_iter().map(split_config).unzip();
        let shared = Rc::new(MultipathState::new(paths, geometry, clock, policy));
        for (path, device) in devices.into_iter().enumerate() {
            match device {
                Some(device) => shared.restore(path, device),
                None => shared.state.borrow_mut().failed.push_back(FailedPath { path, incarnation: 0 }),
            }
        }
        Ok((MultipathLayer(Rc::clone(&shared)), Worker(shared)))
    }

    /// Returns a monitor of the paths.
    pub fn monitor(&self) -> PathMonitor {
        let shared = Rc::clone(&self.0);
        PathMonitor(Rc::new(move || {
            let status = |path: &Path| PathStatus {
                name: path.source.name().to_owned(),
                is_live: path.device.borrow().is_some(),
                requests: path.requests.get(),
                failures: path.failures.get(),
                last_error: path.last_error.borrow().clone().filter(|_| path.device.borrow().is_none()),
            };
            shared.paths.iter().map(status).collect()
        }))
    }

    /// What a close has to wait for.
    pub fn late_changes(&self) -> LateChanges {
        let shared = Rc::clone(&self.0);
        let policy = &self.0.policy;
        let longest = policy.quiesce_time + LONGEST_SILENCE + policy.request_timeout;
        let settled = Rc::new(move || {
            let shared = Rc::clone(&shared);
            let settled = async move { shared.settled().await };
            Box::pin(settled) as LocalBoxFuture<'static, bool>
        });
        LateChanges { settled, longest }
    }

    /// Executes a request on one path after the other until one returns an outcome.
    async fn execute_blocks(&self, request: Request) -> Outcome {
        let (write_set, request_id) = (WriteSet::of(&request), self.0.next_request_id());
        for _ in 0..self.0.policy.max_path_failures.max(1) {
            let path = self.0.admit(request_id, &write_set).await?;
            let Ok(outcome) = self.0.execute_on(path, request_id, &write_set, request.clone()).await else {
                match request.kind() {
                    RequestKind::CompareAndWrite => return Err(unknown_outcome()),
                    _ => continue,
                }
            };
            if outcome.is_ok() && request.is_volatile() {
                self.0.state.borrow_mut().path_flushes.write_completed(path.0, path.1);
            }
            return outcome;
        }
        Err(self.lost_too_many())
    }

    /// Flushes every path that has something to flush.
    async fn flush(&self) -> Outcome {
        let mut mark = None;
        for _ in 0..self.0.policy.max_path_failures.max(1) {
            let started = self.0.state.borrow_mut().path_flushes.flush_started();
            let flush_plan = started.map_err(|doubt| Error::from(ErrorKind::Media { reason: doubt.to_string() }))?;
            let mark = *mark.get_or_insert(flush_plan.mark);
            let paths = match flush_plan.paths.is_empty() {
                true => vec![self.0.admit(self.0.next_request_id(), &WriteSet::default()).await?],
                false => flush_plan.paths,
            };
            let flushes = paths.into_iter().map(|path| async move {
                (path, self.0.execute_on(path, self.0.next_request_id(), &WriteSet::default(), Request::flush()).await)
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
                self.0.state.borrow_mut().path_flushes.flush_completed(path.0, path.1, flush_plan.mark);
            }
            if !is_lost && self.0.state.borrow().path_flushes.is_durable(mark) {
                return Ok(Response::Done);
            }
        }
        Err(self.lost_too_many())
    }

    #[cold]
    fn lost_too_many(&self) -> Error {
        let losses = self.0.policy.max_path_failures.max(1);
        ErrorKind::Unreachable { reason: format!("{losses} paths failed with this request") }.into()
    }
}

/// The error of a request that must not be sent again and whose path was lost.
#[cold]
fn unknown_outcome() -> Error {
    let reason = "a path failed with this compare and write, which may have been executed".to_owned();
    ErrorKind::Unreachable { reason }.into()
}

/// A path and its device, if it is open.
fn split_config(path_config: PathConfig) -> (Path, Option<DynDevice>) {
    let last_error = path_config.device.is_none().then(|| "it was not opened yet".to_owned());
    let path = Path {
        source: path_config.source,
        quiesce: path_config.quiesce,
        device: RefCell::default(),
        requests: Cell::new(0),
        failures: Cell::new(0),
        last_error: RefCell::new(last_error),
    };
    (path, path_config.device)
}

impl<C: Clock + 'static> Device for MultipathLayer<C> {
    fn geometry(&self) -> &Geometry {
        &self.0.geometry
    }

    fn abilities(&self) -> Abilities {
        // A late write to the reserved area could not be distinguished from a newer one.
        self.0.abilities().with([RequestKind::ReadReserved], Ability::Absent)
    }

    async fn execute(&self, request: Request) -> Outcome {
        match request.kind() {
            RequestKind::Flush => self.flush().await,
            _ => self.execute_blocks(request).await,
        }
    }
}

impl<C: Clock> Drop for MultipathLayer<C> {
    fn drop(&mut self) {
        let worker = {
            let mut state = self.0.state.borrow_mut();
            state.is_closed = true;
            state.worker.take()
        };
        worker.into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests;
