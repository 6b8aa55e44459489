//! The caller's end of a link: it sends calls in the order in which they start, and completes them as they come back.
//!
//! Invariant: a call that was started is sent, whether or not its caller waits for it.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use sealblock_block::{Outcome, Request};
use sealblock_runtime_reactor::{CoreAddress, JoinHandle, Notify, now, spawn};
use slab::Slab;

use crate::changes::SessionId;
use crate::channel::{BATCH, Call, Channels, OwnerWork, unreachable};
use crate::owner_end::serve;
use crate::shared::{Origin, SharedDevice};

/// The maximum number of boxes that a link keeps for further calls.
const IDLE_LIMIT: usize = 256;

/// The caller's end: one per core and device, open as long as an attachment on this core exists.
pub(crate) struct Link {
    pub(crate) device: SharedDevice,
    /// The core of the callers.
    pub(crate) core: CoreAddress,
    end: Rc<CallerEnd>,
    tasks: [JoinHandle<()>; 2],
}

#[allow(clippy::vec_box, reason = "the boxes travel")]
struct CallerEnd {
    device: SharedDevice,
    channels: Arc<Channels>,
    calls: CallTable,
    /// Calls of this turn, which are pushed together.
    gathered: RefCell<Vec<Box<Call>>>,
    is_gathering: Notify,
    idle: RefCell<Vec<Box<Call>>>,
}

impl Link {
    pub(crate) fn open(device: &SharedDevice) -> Link {
        let end = Rc::new(CallerEnd {
            device: device.clone(),
            channels: Arc::default(),
            calls: CallTable::default(),
            gathered: RefCell::default(),
            is_gathering: Notify::default(),
            idle: RefCell::default(),
        });
        serve(device, &end.channels);
        let tasks = [spawn(push_calls(Rc::clone(&end))), spawn(complete_calls(Rc::clone(&end)))];
        Link { device: device.clone(), core: CoreAddress::here(), end, tasks }
    }

    pub(crate) async fn call(&self, request: Request, from: Origin) -> Outcome {
        self.end.start(OwnerWork::Execute(request), from).await
    }

    /// Fences what a session has in flight on the owner core, unless that core has stopped.
    pub(crate) async fn fence(&self, session: SessionId) {
        // An owner core that has stopped executes nothing.
        let _ = self.end.start(OwnerWork::Fence, Origin { session, is_locked: false, arrived: now() }).await;
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // The owner core executes the requests that it is sent, but no caller on this core waits for them any more.
        self.end.push();
        self.end.channels.requests.finish();
        let late_replies = self.end.channels.replies.close();
        self.tasks.iter().for_each(JoinHandle::abort);
        drop(late_replies);
    }
}

impl CallerEnd {
    /// Starts a call. Calls reach the owner core in the order in which they are started.
    fn start(&self, work: OwnerWork, from: Origin) -> CallFuture<'_> {
        let (place, in_flight) = {
            let mut calls = self.calls.borrow_mut();
            (calls.insert(CallState::Waiting(None)), calls.len())
        };
        let idle = self.idle.borrow_mut().pop();
        let call = match idle {
            Some(mut call) => {
                (call.place, call.from) = (place, from);
                call.work = work;
                call
            }
            None => Box::new(Call { place, work, from, data: None, outcome: None }),
        };
        let gathered = {
            let mut gathered = self.gathered.borrow_mut();
            gathered.push(call);
            gathered.len()
        };
        match gathered {
            // The owner core has nothing to do meanwhile.
            _ if in_flight == 1 => self.push(),
            1 => self.is_gathering.notify(),
            BATCH.. => self.push(),
            _ => {}
        }
        CallFuture { end: self, place: Some(place) }
    }

    /// Pushes the gathered calls. If the owner core has stopped, they fail.
    fn push(&self) {
        let mut calls = self.gathered.take();
        if !calls.is_empty() && !self.channels.requests.push_all(&mut calls) {
            for mut call in calls.drain(..) {
                call.outcome = Some(Err(unreachable(self.device.name())));
                self.complete(call);
            }
        }
        let mut gathered = self.gathered.borrow_mut();
        if gathered.capacity() == 0 {
            *gathered = calls;
        }
    }

    /// Completes a call that came back, and wakes the caller.
    fn complete(&self, call: Box<Call>) {
        let mut table = self.calls.borrow_mut();
        let (before, unwanted) = match &mut table[call.place] {
            CallState::Abandoned => (table.remove(call.place), Some(call)),
            waiting => (std::mem::replace(waiting, CallState::Completed(call)), None),
        };
        drop(table);
        if let Some(call) = unwanted {
            self.recycle(call);
        }
        if let CallState::Waiting(Some(waker)) = before {
            waker.wake();
        }
    }

    /// Drops what a call holds, and keeps its box for a further call.
    fn recycle(&self, mut call: Box<Call>) {
        (call.work, call.data, call.outcome) = (OwnerWork::Taken, None, None);
        let mut idle = self.idle.borrow_mut();
        if idle.len() < IDLE_LIMIT {
            idle.push(call);
        }
    }
}

/// Pushes what was gathered once the other tasks of a turn had theirs.
async fn push_calls(end: Rc<CallerEnd>) {
    loop {
        end.is_gathering.wait().await;
        end.push();
    }
}

/// Completes calls as replies arrive. Yields to the other tasks of this core after each batch.
async fn complete_calls(end: Rc<CallerEnd>) {
    let mut batch = Vec::new();
    poll_fn(|cx| match end.channels.replies.poll_take(cx, &mut batch) {
        Poll::Pending => Poll::Pending,
        Poll::Ready(false) => Poll::Ready(()),
        Poll::Ready(true) => {
            batch.drain(..).for_each(|call| end.complete(call));
            cx.waker().wake_by_ref();
            Poll::Pending
        }
    })
    .await
}

/// A call as its caller sees it.
enum CallState {
    Waiting(Option<Waker>),
    Completed(Box<Call>),
    /// The caller dropped its future before the reply arrived.
    Abandoned,
}

/// The calls of one core that wait for a reply.
///
/// Invariant: a call is removed only after its reply has arrived, so a reply never reaches another request's caller.
type CallTable = RefCell<Slab<CallState>>;

/// Resolves to the outcome of a call.
struct CallFuture<'a> {
    end: &'a CallerEnd,
    /// `None` once it has completed.
    place: Option<usize>,
}

impl Future for CallFuture<'_> {
    type Output = Outcome;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Outcome> {
        let place = self.place.expect("a future that has ended is not polled");
        let mut calls = self.end.calls.borrow_mut();
        let previous = match &mut calls[place] {
            CallState::Completed(_) => calls.remove(place),
            waiting => std::mem::replace(waiting, CallState::Waiting(Some(cx.waker().clone()))),
        };
        drop(calls);
        match previous {
            CallState::Completed(mut call) => {
                self.place = None;
                let outcome = call.outcome.take().expect("a call comes back with its outcome");
                self.end.recycle(call);
                Poll::Ready(outcome)
            }
            CallState::Waiting(_) | CallState::Abandoned => Poll::Pending,
        }
    }
}

impl Drop for CallFuture<'_> {
    fn drop(&mut self) {
        let Some(place) = self.place else { return };
        let mut calls = self.end.calls.borrow_mut();
        let before = match &mut calls[place] {
            CallState::Completed(_) => calls.remove(place),
            waiting => std::mem::replace(waiting, CallState::Abandoned),
        };
        drop(calls);
        if let CallState::Completed(call) = before {
            self.end.recycle(call);
        }
    }
}
