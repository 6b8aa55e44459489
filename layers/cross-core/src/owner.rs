//! The device's side of a link.

use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

use sealblock_block::{Outcome, Request};
use sealblock_runtime_reactor::spawn;

use crate::link::{Channels, CrossCoreReply, CrossCoreRequest, unreachable};
use crate::place::Place;
use crate::shared::SharedDevice;

/// Has the home core read the link's requests. When it is not to be had the link is closed, and says so to callers.
pub(crate) fn open(device: &SharedDevice, ways: &Arc<Channels>) {
    let end = End { device: device.clone(), ways: Arc::clone(ways) };
    let home = device.homed().home();
    let begin = move || {
        if let Some(place) = end.device.homed().get() {
            drop(spawn(serve(end, place)));
        }
    };
    // Work that is refused is dropped, and the end of the link with it.
    let _ = home.send(begin);
}

/// The home's end of a link. When it goes, whatever was not begun is answered.
struct End {
    device: SharedDevice,
    ways: Arc<Channels>,
}

impl End {
    fn promise(&self, slot: u32) -> Responder {
        Responder { device: self.device.clone(), ways: Arc::clone(&self.ways), slot: Some(slot) }
    }
}

impl Drop for End {
    fn drop(&mut self) {
        for CrossCoreRequest { slot, operation, .. } in self.ways.requests.close() {
            drop(operation);
            drop(self.promise(slot));
        }
    }
}

/// The duty to answer one request. Dropped, it answers that the device cannot be reached.
struct Responder {
    device: SharedDevice,
    ways: Arc<Channels>,
    slot: Option<u32>,
}

impl Responder {
    fn keep(mut self, outcome: Outcome) {
        self.answer(outcome);
    }

    fn answer(&mut self, outcome: Outcome) {
        if let Some(slot) = self.slot.take() {
            // A closed mailbox says that nobody on the other core waits any more.
            let _ = self.ways.answers.push(CrossCoreReply { slot, outcome });
        }
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        if self.slot.is_some() {
            let outcome = Err(unreachable(self.device.name()));
            self.answer(outcome);
        }
    }
}

/// Begins requests as they come, until the callers' core has closed the link. After each batch the others on this core
/// have their turn.
async fn serve(end: End, place: Rc<Place>) {
    let mut batch = Vec::new();
    poll_fn(|cx| match end.ways.requests.poll_take(cx, &mut batch) {
        Poll::Pending => Poll::Pending,
        Poll::Ready(false) => Poll::Ready(()),
        Poll::Ready(true) => {
            for CrossCoreRequest { slot, operation, is_locked } in batch.drain(..) {
                begin(&place, end.promise(slot), (operation, is_locked), cx);
            }
            cx.waker().wake_by_ref();
            Poll::Pending
        }
    })
    .await
}

/// Begins a request. One that is done at once, as in memory, needs no task; others go on in one of their own.
fn begin(place: &Rc<Place>, promise: Responder, (operation, is_locked): (Request, bool), cx: &mut Context<'_>) {
    let place = Rc::clone(place);
    let mut work = Box::pin(async move {
        let outcome = promise.device.carry_out(&place, operation, is_locked).await;
        promise.keep(outcome);
    });
    // A panic ends this request alone: what it held is dropped with `work`, the promise among it.
    if let Ok(Poll::Pending) = catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(cx))) {
        drop(spawn(work));
    }
}
