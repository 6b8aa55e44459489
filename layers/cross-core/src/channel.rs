//! The channel between a caller's core and the owner core of a device: a mailbox in each direction, the calls that wait
//! at one end, and the execution of requests at the other end.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use sealblock_block::{Error, ErrorKind, Outcome, Request, Response};
use sealblock_runtime_reactor::{CoreAddress, JoinHandle, Mailbox, now, spawn};
use slab::Slab;

use crate::changes::SessionId;
use crate::device_slot::DeviceSlot;
use crate::shared::{Origin, SharedDevice};

/// A request on its way to the owner core.
struct CrossCoreRequest {
    /// The caller's place in its [`CallTable`].
    call: usize,
    work: OwnerWork,
    from: Origin,
}

/// The work of the owner core.
enum OwnerWork {
    Execute(Request),
    /// Fence the changes of the session that arrived earlier. The reply is [`Response::Done`].
    Fence,
}

/// The outcome of a call, on its way back to the caller.
struct CrossCoreReply {
    call: usize,
    outcome: Outcome,
}

/// The two directions of a link.
struct Channels {
    requests: Mailbox<CrossCoreRequest>,
    replies: Mailbox<CrossCoreReply>,
}

/// The caller's end: one per core and device, open as long as an attachment on this core exists.
pub(crate) struct Link {
    pub(crate) device: SharedDevice,
    /// The core of the callers.
    pub(crate) core: CoreAddress,
    channels: Arc<Channels>,
    calls: Rc<CallTable>,
    reader: JoinHandle<()>,
}

impl Link {
    pub(crate) fn open(device: &SharedDevice) -> Link {
        let channels = Arc::new(Channels { requests: Mailbox::default(), replies: Mailbox::default() });
        let calls = Rc::new(CallTable::default());
        serve(device, &channels);
        let reader = spawn(complete_calls(Arc::clone(&channels), Rc::clone(&calls)));
        Link { device: device.clone(), core: CoreAddress::here(), channels, calls, reader }
    }

    pub(crate) async fn call(&self, request: Request, from: Origin) -> Outcome {
        self.push(OwnerWork::Execute(request), from).await
    }

    /// Fences what a session has in flight on the owner core, unless that core has stopped.
    pub(crate) async fn fence(&self, session: SessionId) {
        // An owner core that has stopped executes nothing.
        let _ = self.push(OwnerWork::Fence, Origin { session, is_locked: false, arrived: now() }).await;
    }

    fn push(&self, work: OwnerWork, from: Origin) -> CallFuture<'_> {
        let (call, future) = CallFuture::start(&self.calls);
        if self.channels.requests.push(CrossCoreRequest { call, work, from }).is_err() {
            complete(&self.calls, call, Err(unreachable(self.device.name())));
        }
        future
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // The owner core executes the requests that it already has, but no caller on this core waits for them any more.
        self.channels.requests.finish();
        let late_replies = self.channels.replies.close();
        self.reader.abort();
        drop(late_replies);
    }
}

/// Completes calls as replies arrive. Yields to the other tasks of this core after each batch.
async fn complete_calls(channels: Arc<Channels>, calls: Rc<CallTable>) {
    let mut batch = Vec::new();
    poll_fn(|cx| match channels.replies.poll_take(cx, &mut batch) {
        Poll::Pending => Poll::Pending,
        Poll::Ready(false) => Poll::Ready(()),
        Poll::Ready(true) => {
            for CrossCoreReply { call, outcome } in batch.drain(..) {
                complete(&calls, call, outcome);
            }
            cx.waker().wake_by_ref();
            Poll::Pending
        }
    })
    .await
}

/// The error of a request that the owner core cannot execute any more.
fn unreachable(device: &str) -> Error {
    let reason = "its core has stopped, or its work panicked".to_owned();
    Error::from(ErrorKind::Unreachable { reason }).with_device(device)
}

/// A call that waits for a reply.
enum Call {
    Waiting(Option<Waker>),
    Completed(Outcome),
    /// The caller dropped its future before the reply arrived.
    Abandoned,
}

/// The calls of one core that wait for a reply.
///
/// Invariant: a call is removed only after its reply has arrived, so a reply never reaches another request's caller.
type CallTable = RefCell<Slab<Call>>;

/// Completes a call with the outcome from its reply, and wakes the caller.
fn complete(calls: &CallTable, call: usize, outcome: Outcome) {
    let mut table = calls.borrow_mut();
    let (before, unwanted) = match &mut table[call] {
        Call::Abandoned => (table.remove(call), Some(outcome)),
        waiting => (std::mem::replace(waiting, Call::Completed(outcome)), None),
    };
    drop(table);
    drop(unwanted);
    if let Call::Waiting(Some(waker)) = before {
        waker.wake();
    }
}

/// Resolves to the outcome of a call.
struct CallFuture<'a> {
    calls: &'a CallTable,
    /// `None` once it has completed.
    call: Option<usize>,
}

impl<'a> CallFuture<'a> {
    fn start(calls: &'a CallTable) -> (usize, CallFuture<'a>) {
        let call = calls.borrow_mut().insert(Call::Waiting(None));
        (call, CallFuture { calls, call: Some(call) })
    }
}

impl Future for CallFuture<'_> {
    type Output = Outcome;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Outcome> {
        let call = self.call.expect("a future that has ended is not polled");
        let mut calls = self.calls.borrow_mut();
        let previous = match &mut calls[call] {
            Call::Completed(_) => calls.remove(call),
            waiting => std::mem::replace(waiting, Call::Waiting(Some(cx.waker().clone()))),
        };
        drop(calls);
        match previous {
            Call::Completed(outcome) => {
                self.call = None;
                Poll::Ready(outcome)
            }
            Call::Waiting(_) | Call::Abandoned => Poll::Pending,
        }
    }
}

impl Drop for CallFuture<'_> {
    fn drop(&mut self) {
        let Some(call) = self.call else { return };
        let mut calls = self.calls.borrow_mut();
        let before = match &mut calls[call] {
            Call::Completed(_) => calls.remove(call),
            waiting => std::mem::replace(waiting, Call::Abandoned),
        };
        drop(calls);
        drop(before);
    }
}

/// Has the owner core serve the link's requests. If that core has stopped, the link closes and every call fails as
/// unreachable.
fn serve(device: &SharedDevice, channels: &Arc<Channels>) {
    let end = OwnerEnd { device: device.clone(), channels: Arc::clone(channels) };
    let owner = device.home().home();
    let start = move || {
        if let Some(slot) = end.device.home().get() {
            drop(spawn(start_requests(end, slot)));
        }
    };
    // A core that has stopped drops the task, and the owner's end of the link with it.
    let _ = owner.send(start);
}

/// The owner's end of a link. When it is dropped, requests that were not started fail as unreachable.
struct OwnerEnd {
    device: SharedDevice,
    channels: Arc<Channels>,
}

impl OwnerEnd {
    fn responder(&self, call: usize) -> Responder {
        Responder { device: self.device.clone(), channels: Arc::clone(&self.channels), call: Some(call) }
    }
}

impl Drop for OwnerEnd {
    fn drop(&mut self) {
        for CrossCoreRequest { call, work, .. } in self.channels.requests.close() {
            drop(work);
            drop(self.responder(call));
        }
    }
}

/// Replies to one request. If it is dropped before, it replies that the device is unreachable.
struct Responder {
    device: SharedDevice,
    channels: Arc<Channels>,
    call: Option<usize>,
}

impl Responder {
    fn complete(mut self, outcome: Outcome) {
        self.reply(outcome);
    }

    fn reply(&mut self, outcome: Outcome) {
        if let Some(call) = self.call.take() {
            // A closed mailbox means that no caller on the other core waits any more.
            let _ = self.channels.replies.push(CrossCoreReply { call, outcome });
        }
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        if self.call.is_some() {
            let outcome = Err(unreachable(self.device.name()));
            self.reply(outcome);
        }
    }
}

/// Starts requests as they arrive, until the callers' core closes the link. Yields to the other tasks of this core
/// after each batch.
async fn start_requests(end: OwnerEnd, slot: Rc<DeviceSlot>) {
    let mut batch = Vec::new();
    poll_fn(|cx| match end.channels.requests.poll_take(cx, &mut batch) {
        Poll::Pending => Poll::Pending,
        Poll::Ready(false) => Poll::Ready(()),
        Poll::Ready(true) => {
            for CrossCoreRequest { call, work, from } in batch.drain(..) {
                match work {
                    OwnerWork::Execute(request) => {
                        end.device.state().crossings.add_one();
                        start(&slot, end.responder(call), (request, from), cx);
                    }
                    OwnerWork::Fence => {
                        end.device.fence(&slot, from.session);
                        end.responder(call).complete(Ok(Response::Done));
                    }
                }
            }
            cx.waker().wake_by_ref();
            Poll::Pending
        }
    })
    .await
}

/// Starts a request. One that completes at its first poll, as in memory, needs no task; any other continues in its own
/// task.
fn start(slot: &Rc<DeviceSlot>, responder: Responder, (request, from): (Request, Origin), cx: &mut Context<'_>) {
    let slot = Rc::clone(slot);
    let mut execution = Box::pin(async move {
        let outcome = responder.device.execute(&slot, request, from).await;
        responder.complete(outcome);
    });
    // A panic ends only this request: `execution` is dropped with everything it holds, including the responder.
    if let Ok(Poll::Pending) = catch_unwind(AssertUnwindSafe(|| execution.as_mut().poll(cx))) {
        drop(spawn(execution));
    }
}
