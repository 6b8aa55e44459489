//! Background work: reopens failed paths, releases the blocks that they may still change, fails paths whose requests
//! time out, and probes idle paths.

use std::future::poll_fn;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::LocalBoxFuture;
use futures_util::stream::FuturesUnordered;
use sealblock_block::{Clock, Device, Expectations, Request, WriteSet};
use sealblock_units::Extent;

use crate::shared::{FailedPath, MultipathState, check_reopened_geometry};

/// The number of checks of the requests in flight per request timeout.
const TICKS: u32 = 8;

/// A target that cannot be used for this time, apart from attempts, counts as gone with all that it had in flight.
pub(crate) const LONGEST_SILENCE: Duration = Duration::from_secs(30);

/// The layer's background work, to be run as a task. Ends when the layer is dropped.
pub struct Worker<C>(pub(crate) Rc<MultipathState<C>>);

impl<C: Clock + 'static> Worker<C> {
    /// Runs until the layer is dropped.
    pub async fn run(self) {
        let mut tasks: FuturesUnordered<LocalBoxFuture<'static, ()>> = FuturesUnordered::new();
        tasks.push(Box::pin(fail_late_paths(Rc::clone(&self.0))));
        for path in 0..self.0.paths.len() {
            tasks.push(Box::pin(probe_idle(Rc::clone(&self.0), path)));
        }
        poll_fn(|cx| {
            loop {
                let failed = {
                    let mut state = self.0.state.borrow_mut();
                    if state.is_closed {
                        return Poll::Ready(());
                    }
                    state.worker = Some(cx.waker().clone());
                    state.failed.pop_front()
                };
                let Some(failed) = failed else { break };
                tasks.push(Box::pin(reopen(Rc::clone(&self.0), failed.path)));
                tasks.push(Box::pin(quiesce(Rc::clone(&self.0), failed)));
            }
            while let Poll::Ready(Some(())) = tasks.poll_next_unpin(cx) {}
            Poll::Pending
        })
        .await;
    }
}

/// Reopens a failed path; retries until it succeeds.
async fn reopen<C: Clock>(shared: Rc<MultipathState<C>>, path: usize) {
    let of = &shared.paths[path];
    for attempt in 0_u32.. {
        shared.clock.sleep(shared.policy.reprobe_delay(attempt)).await;
        let last_error = match of.source.open().await {
            Ok(device) => match check_reopened_geometry(&shared.geometry, device.geometry()) {
                Ok(()) => {
                    tracing::warn!(path = of.source.name(), "path restored");
                    return shared.restore(path, device);
                }
                Err(what) => format!("it leads to another device now: the {what} differs"),
            },
            Err(error) => error.to_string(),
        };
        of.last_error.replace(Some(last_error));
    }
}

/// Waits until a lost path can deliver nothing more, then releases the blocks of its late writes.
///
/// First the target must disconnect the host, which takes up to the quiesce time. Even then commands may be in flight
/// in the target. If the path supports it, the layer makes the target finish them: over any live path to it, or, if all of
/// these lead to other targets, over the lost one, as soon as that can be opened again.
async fn quiesce<C: Clock>(shared: Rc<MultipathState<C>>, FailedPath { path: lost, incarnation }: FailedPath) {
    if !shared.state.borrow().late_writes.has(incarnation) {
        return;
    }
    shared.clock.sleep(shared.policy.quiesce_time).await;
    let mut waited = Duration::ZERO;
    for attempt in 0_u32.. {
        let (path, _) = shared.wait_for(|state| state.round_robin.pick()).await;
        let Some(quiesce) = &shared.paths[path].quiesce else { break };
        let of_lost = shared.paths[lost].quiesce.as_ref().filter(|of_lost| of_lost.is_apart_from(quiesce));
        let opener = &of_lost.unwrap_or(quiesce).opener;
        match opener.open().await {
            Ok(_) => break,
            Err(error) => tracing::warn!(path = opener.name(), %error, "cannot quiesce the target"),
        }
        if of_lost.is_some() && waited >= LONGEST_SILENCE {
            break;
        }
        let delay = shared.policy.reprobe_delay(attempt);
        shared.clock.sleep(delay).await;
        waited += delay;
    }
    shared.state.borrow_mut().late_writes.clear(incarnation);
    shared.changed.notify();
}

/// Fails paths on which a request timed out.
async fn fail_late_paths<C: Clock>(shared: Rc<MultipathState<C>>) {
    let limit = shared.policy.request_timeout;
    loop {
        shared.clock.sleep((limit / TICKS).max(Duration::from_millis(1))).await;
        let late = shared.state.borrow_mut().in_flight.tick(TICKS);
        for (path, incarnation) in late {
            shared.fail(path, incarnation, &format!("a request was not answered within {limit:?}"));
        }
    }
}

/// Reads a block over a path that had no request for a while, so that its loss is noticed.
async fn probe_idle<C: Clock>(shared: Rc<MultipathState<C>>, path: usize) {
    let mut block = 0;
    loop {
        let before = shared.paths[path].requests.get();
        shared.clock.sleep(shared.policy.idle_probe_interval).await;
        let live = shared.state.borrow().round_robin.live(path);
        let (Some(incarnation), true) = (live, before == shared.paths[path].requests.get()) else { continue };
        let Ok(extent) = Extent::from_raw(block % shared.geometry.capacity_blocks.max(1), 1) else { continue };
        let read = Request::read(extent, Expectations::NONE);
        if let Ok(Err(_damaged)) =
            shared.send((path, incarnation), shared.next_request_id(), &WriteSet::default(), read).await
        {
            // Another block next time, because the storage may log each read of a bad block.
            block = block.wrapping_add(1);
        }
    }
}
