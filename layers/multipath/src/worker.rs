//! What goes on beside the requests: paths that failed are opened anew, what they may still change is given free, late
//! answers are noticed, and paths that have gone while nobody requested anything.

use std::future::poll_fn;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::LocalBoxFuture;
use futures_util::stream::FuturesUnordered;
use sealblock_block::{Clock, Device, Request};
use sealblock_integrity::Checks;
use sealblock_units::Extent;

use crate::check_shape_again;
use crate::late_write::WriteSet;
use crate::shared::{Failed, MultipathState};

/// Looks at what is under way in the time for one answer.
const TICKS: u32 = 8;

/// The layer's work besides requests, to be run as a task beside it. It ends when the layer is dropped.
pub struct Worker<C>(pub(crate) Rc<MultipathState<C>>);

impl<C: Clock + 'static> Worker<C> {
    /// Runs until the layer is dropped.
    pub async fn run(self) {
        let mut tasks: FuturesUnordered<LocalBoxFuture<'static, ()>> = FuturesUnordered::new();
        tasks.push(Box::pin(watch(Rc::clone(&self.0))));
        for path in 0..self.0.paths.len() {
            tasks.push(Box::pin(ask_idle(Rc::clone(&self.0), path)));
        }
        poll_fn(|cx| {
            loop {
                let failed = {
                    let mut core = self.0.core.borrow_mut();
                    if core.is_closed {
                        return Poll::Ready(());
                    }
                    core.worker = Some(cx.waker().clone());
                    core.failed.pop_front()
                };
                let Some(failed) = failed else { break };
                tasks.push(Box::pin(probe(Rc::clone(&self.0), failed.path)));
                tasks.push(Box::pin(quiesce(Rc::clone(&self.0), failed)));
            }
            while let Poll::Ready(Some(())) = tasks.poll_next_unpin(cx) {}
            Poll::Pending
        })
        .await;
    }
}

/// Opens a path anew, again and again.
async fn probe<C: Clock>(shared: Rc<MultipathState<C>>, path: usize) {
    let of = &shared.paths[path];
    for attempt in 0_u32.. {
        shared.clock.sleep(shared.patience.pause(attempt)).await;
        let trouble = match of.source.open().await {
            Ok(device) => match check_shape_again(&shared.geometry, device.geometry()) {
                Ok(()) => {
                    tracing::warn!(path = of.source.name(), "path restored");
                    return shared.restore(path, device);
                }
                Err(what) => format!("what answers is another device: it has another {what}"),
            },
            Err(error) => error.to_string(),
        };
        of.trouble.replace(Some(trouble));
    }
}

/// Waits until a lost path can deliver no more, and gives free what it may have changed.
///
/// First the target must have given the host up, which takes it the quarantine. Its commands may be under way even then;
/// where a path knows how to ask, the target is asked to finish them.
async fn quiesce<C: Clock>(shared: Rc<MultipathState<C>>, Failed { incarnation, .. }: Failed) {
    if !shared.core.borrow().fences.has(incarnation) {
        return;
    }
    shared.clock.sleep(shared.patience.quiesce_time).await;
    for attempt in 0_u32.. {
        let (path, _) = shared.when(|core| core.turns.pick()).await;
        let Some(settle) = &shared.paths[path].settle else { break };
        match settle.open().await {
            Ok(_) => break,
            Err(error) => tracing::warn!(path = settle.name(), %error, "cannot make sure that no command is left"),
        }
        shared.clock.sleep(shared.patience.pause(attempt)).await;
    }
    shared.core.borrow_mut().fences.clear(incarnation);
    shared.wake_waiting();
}

/// Fails paths that do not answer in time.
async fn watch<C: Clock>(shared: Rc<MultipathState<C>>) {
    let limit = shared.patience.request_timeout;
    loop {
        shared.clock.sleep((limit / TICKS).max(Duration::from_millis(1))).await;
        let late = shared.core.borrow_mut().flights.tick(TICKS);
        for (path, incarnation) in late {
            shared.fail(path, incarnation, &format!("a request was not answered within {limit:?}"));
        }
    }
}

/// Asks a path for a block when nobody has requested anything of it for a while, so that its loss is noticed.
async fn ask_idle<C: Clock>(shared: Rc<MultipathState<C>>, path: usize) {
    let mut block = 0;
    loop {
        let before = shared.paths[path].requests.get();
        shared.clock.sleep(shared.patience.idle).await;
        let live = shared.core.borrow().turns.live(path);
        let (Some(incarnation), true) = (live, before == shared.paths[path].requests.get()) else { continue };
        let Ok(extent) = Extent::from_raw(block % shared.geometry.capacity_blocks.max(1), 1) else { continue };
        let read = Request::Read { extent, checks: Checks::NONE };
        if let Ok(Err(_damaged)) = shared.ask((path, incarnation), shared.number(), &WriteSet::Nothing, read).await {
            // Not the same one again: whoever stores it may tell of its damage each time.
            block = block.wrapping_add(1);
        }
    }
}
