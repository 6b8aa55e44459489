//! The owner's end of a link: it begins requests in the order in which they arrive, executes them, and sends their
//! outcomes back.
//!
//! Invariants: a call that arrived is answered once: with its outcome, or as unreachable if its work panicked or was
//! dropped. A call begins only when every earlier one has begun, so a fence finds the changes that arrived before it.
//! A worker is in `idle` if and only if it waits for a call and no wake is on its way to it.
//!
//! Shape: a request that needs no waiting is executed at once. Any other one is executed by a *worker*: a task that
//! executes one call after the other, so that none of them allocates a task or a future. There are as many workers as
//! calls were in flight at the same time, and up to [`IDLE_LIMIT`] stay for later ones.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Poll, Waker};

use sealblock_block::{Operation, Outcome, Request, Response};
use sealblock_runtime_reactor::{Notify, spawn};

use crate::channel::{BATCH, Call, Channels, OwnerWork, unreachable};
use crate::device_slot::DeviceSlot;
use crate::shared::SharedDevice;

/// The maximum number of workers that wait for calls.
const IDLE_LIMIT: usize = 256;

/// Has the owner core serve the link's requests. If that core has stopped, the link closes and every call fails as
/// unreachable.
pub(crate) fn serve(device: &SharedDevice, channels: &Arc<Channels>) {
    let receiver = Receiver { device: device.clone(), channels: Arc::clone(channels) };
    let owner = device.home().home();
    let start = move || {
        if let Some(slot) = receiver.device.home().get() {
            drop(spawn(receive(receiver, slot)));
        }
    };
    // A core that has stopped drops the closure, and the receiver with it.
    let _ = owner.send(start);
}

/// What receives requests. When it is dropped, those that were not received fail as unreachable.
struct Receiver {
    device: SharedDevice,
    channels: Arc<Channels>,
}

impl Drop for Receiver {
    fn drop(&mut self) {
        let mut refused = self.channels.requests.close();
        for call in &mut refused {
            call.outcome = Some(Err(unreachable(self.device.name())));
        }
        // A closed mailbox means that no caller waits any more.
        let _ = self.channels.replies.push_all(&mut refused);
    }
}

/// What all tasks of the owner's end share.
#[allow(clippy::vec_box, reason = "the boxes travel")]
struct OwnerEnd {
    device: SharedDevice,
    slot: Rc<DeviceSlot>,
    channels: Arc<Channels>,
    /// Calls that have not begun.
    waiting: RefCell<VecDeque<Box<Call>>>,
    /// Workers that wait for a call.
    idle: RefCell<Vec<Rc<Worker>>>,
    /// Calls with their outcomes, which are pushed together.
    gathered: RefCell<Vec<Box<Call>>>,
    is_gathering: Notify,
    /// Calls that arrived and have no outcome yet.
    unanswered: Cell<usize>,
    /// No further calls arrive.
    has_ended: Cell<bool>,
}

#[derive(Default)]
struct Worker {
    waker: RefCell<Option<Waker>>,
    is_idle: Cell<bool>,
}

impl Worker {
    fn wake(&self) {
        self.is_idle.set(false);
        let waker = self.waker.take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// Receives requests, until the callers' core closes the link. Yields to the other tasks of this core after each batch.
async fn receive(receiver: Receiver, slot: Rc<DeviceSlot>) {
    let end = Rc::new(OwnerEnd {
        device: receiver.device.clone(),
        slot,
        channels: Arc::clone(&receiver.channels),
        waiting: RefCell::default(),
        idle: RefCell::default(),
        gathered: RefCell::default(),
        is_gathering: Notify::default(),
        unanswered: Cell::new(0),
        has_ended: Cell::new(false),
    });
    let _ended = EndGuard(Rc::clone(&end));
    drop(spawn(push_outcomes(Rc::clone(&end))));
    let mut batch = Vec::new();
    poll_fn(|cx| match receiver.channels.requests.poll_take(cx, &mut batch) {
        Poll::Pending => Poll::Pending,
        Poll::Ready(false) => Poll::Ready(()),
        Poll::Ready(true) => {
            end.unanswered.set(end.unanswered.get() + batch.len());
            batch.drain(..).for_each(|call| end.begin(call));
            end.push();
            cx.waker().wake_by_ref();
            Poll::Pending
        }
    })
    .await
}

/// Lets the other tasks end once they have nothing left to do.
struct EndGuard(Rc<OwnerEnd>);

impl Drop for EndGuard {
    fn drop(&mut self) {
        self.0.has_ended.set(true);
        self.0.is_gathering.notify();
        let idle = self.0.idle.take();
        idle.iter().for_each(|worker| worker.wake());
    }
}

impl OwnerEnd {
    /// Executes a call if that needs no waiting; otherwise a worker does.
    fn begin(self: &Rc<Self>, call: Box<Call>) {
        if matches!(call.work, OwnerWork::Execute(_)) {
            self.device.state().crossings.add_one();
        }
        match self.try_execute(&call) {
            Some(outcome) => self.complete(call, outcome),
            None => self.hand_over(call),
        }
    }

    fn try_execute(&self, call: &Call) -> Option<Outcome> {
        let OwnerWork::Execute(request) = &call.work else { return None };
        let is_next = self.waiting.borrow().is_empty();
        // The caller of a locked request holds the blocks that it would claim.
        if !is_next || call.from.is_locked || !self.device.executes_in_place() {
            return None;
        }
        let executed =
            catch_unwind(AssertUnwindSafe(|| self.device.try_execute(&self.slot, request, Some(call.from.arrived))));
        executed.unwrap_or_else(|_panic| Some(Err(unreachable(self.device.name()))))
    }

    /// Queues a call for the workers.
    fn hand_over(self: &Rc<Self>, call: Box<Call>) {
        self.waiting.borrow_mut().push_back(call);
        let idle = self.idle.borrow_mut().pop();
        match idle {
            Some(worker) => worker.wake(),
            None => drop(spawn(work(Rc::clone(self)))),
        }
    }

    /// The next call for a worker; `None` if it must end.
    async fn next(&self, worker: &Rc<Worker>) -> Option<Box<Call>> {
        poll_fn(|cx| {
            let next = self.waiting.borrow_mut().pop_front();
            if next.is_some() {
                if worker.is_idle.replace(false) {
                    // It was woken for something else, and is faster than the worker that was woken for this call.
                    self.idle.borrow_mut().retain(|other| !Rc::ptr_eq(other, worker));
                }
                return Poll::Ready(next);
            }
            if worker.is_idle.get() {
                return Poll::Pending;
            }
            let mut idle = self.idle.borrow_mut();
            if self.has_ended.get() || idle.len() >= IDLE_LIMIT {
                return Poll::Ready(None);
            }
            worker.is_idle.set(true);
            worker.waker.replace(Some(cx.waker().clone()));
            idle.push(Rc::clone(worker));
            Poll::Pending
        })
        .await
    }

    /// The request of a call that a worker executes; `None` if it is already answered.
    fn take_request(&self, mut call: Box<Call>) -> Option<(Request, Answer<'_>)> {
        match std::mem::replace(&mut call.work, OwnerWork::Taken) {
            OwnerWork::Execute(request) => {
                if let Operation::Write(data) = &request.operation {
                    call.data = Some(data.clone());
                }
                Some((request, Answer { end: self, call: Some(call) }))
            }
            OwnerWork::Fence => {
                self.device.fence(&self.slot, call.from.session);
                self.complete(call, Ok(Response::Done));
                None
            }
            OwnerWork::Taken => unreachable!("a call is executed once"),
        }
    }

    /// Gathers a call with its outcome.
    fn complete(&self, mut call: Box<Call>, outcome: Outcome) {
        call.outcome = Some(outcome);
        self.unanswered.set(self.unanswered.get() - 1);
        let gathered = {
            let mut gathered = self.gathered.borrow_mut();
            gathered.push(call);
            gathered.len()
        };
        match gathered {
            // No other outcome comes before the next calls do.
            _ if self.has_ended.get() || self.unanswered.get() == 0 => self.push(),
            1 => self.is_gathering.notify(),
            BATCH.. => self.push(),
            _ => {}
        }
    }

    /// Pushes the gathered outcomes. If no caller waits any more, they are dropped.
    fn push(&self) {
        let mut calls = self.gathered.take();
        if !calls.is_empty() && !self.channels.replies.push_all(&mut calls) {
            calls.clear();
        }
        let mut gathered = self.gathered.borrow_mut();
        if gathered.capacity() == 0 {
            *gathered = calls;
        }
    }
}

impl Drop for OwnerEnd {
    /// Only if the core stops is anything left here.
    fn drop(&mut self) {
        for call in self.waiting.take() {
            self.complete(call, Err(unreachable(self.device.name())));
        }
        self.push();
    }
}

/// Answers one call. If it is dropped before, the answer is that the device is unreachable.
struct Answer<'a> {
    end: &'a OwnerEnd,
    call: Option<Box<Call>>,
}

impl Answer<'_> {
    fn complete(mut self, outcome: Outcome) {
        if let Some(call) = self.call.take() {
            self.end.complete(call, outcome);
        }
    }
}

impl Drop for Answer<'_> {
    fn drop(&mut self) {
        if let Some(call) = self.call.take() {
            self.end.complete(call, Err(unreachable(self.end.device.name())));
        }
    }
}

/// Pushes outcomes once the other tasks of a turn had theirs.
async fn push_outcomes(end: Rc<OwnerEnd>) {
    while !end.has_ended.get() {
        end.is_gathering.wait().await;
        end.push();
    }
}

/// Executes one call after the other. The execution is written out here, so that its future, which is long, is made in
/// its place.
async fn work(end: Rc<OwnerEnd>) {
    let worker = Rc::<Worker>::default();
    while let Some(call) = end.next(&worker).await {
        let from = call.from;
        let Some((request, answer)) = end.take_request(call) else { continue };
        // A panic ends this worker and its request, with everything that it holds; `answer` answers.
        let outcome = end.device.execute(&end.slot, request, from).await;
        answer.complete(outcome);
    }
}
