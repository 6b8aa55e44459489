//! The future of one operation.
//!
//! Invariant: a future that is dropped early moves its operation into the table in `op_table.rs`. An operation that
//! waits for a peer is also cancelled then, because it might never complete otherwise.
//!
//! Shape: the future, not the table, holds the operation, so that a table entry has one size and an operation usually
//! allocates nothing.

use std::cell::Cell;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use crate::busy_poll::BusyPoll;
use crate::core::Core;
use crate::op_table::Key;
use crate::operation::{ErasedOp, Interest, IoOp, decoded, discard};

/// How often an operation is retried after an interruption or a temporary lack of resources.
const RETRY_LIMIT: u8 = 64;

enum OpStage<K> {
    New(K),
    /// The operation is `None` while a thread has it.
    InFlight(Key, Option<K>),
    Over,
}

/// The future of one operation. It starts when it is first polled.
pub(crate) struct Op<K: IoOp> {
    core: Rc<Core>,
    stage: OpStage<K>,
    waits: Option<Interest>,
    retries: u8,
    busy_poll: BusyPoll,
}

impl<K: IoOp> Op<K> {
    pub(crate) fn new(core: Rc<Core>, kind: K) -> Op<K> {
        let waits = kind.waits();
        Op { core, stage: OpStage::New(kind), waits, retries: 0, busy_poll: BusyPoll::default() }
    }

    /// True if the operation was started and its future has not returned the output.
    pub(crate) fn is_in_flight(&self) -> bool {
        matches!(self.stage, OpStage::InFlight(..))
    }

    /// Cancels an operation that waits for a peer. It must still be polled until it completes, or be dropped.
    fn cancel(&self) {
        if let (&OpStage::InFlight(key, _), Some(interest)) = (&self.stage, self.waits) {
            self.core.cancel(key, interest);
        }
    }

    /// Executes a prompt operation inline, within the limit of the task's poll; returns it if it must wait for the
    /// backend.
    fn try_inline(&self, mut kind: K) -> Result<K::Output, K> {
        if self.waits.is_none() || !kind.is_prompt() || !self.core.calls.take() {
            return Err(kind);
        }
        match kind.call() {
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)) => Err(kind),
            result => Ok(kind.finish(result)),
        }
    }

    /// True if an operation that would have to wait is retried in the next turn, before it goes to the backend.
    fn may_busy_poll(&mut self, kind: &K) -> bool {
        self.waits.is_some()
            && kind.is_prompt()
            && kind.busy_polls()
            && self.busy_poll.poll_again(&self.core.busy_polling, self.core.awaits_disk())
    }

    /// Retries in the task's next poll, or makes the backend wait.
    fn wait(&mut self, kind: K, waker: &Waker) -> OpStage<K> {
        if self.may_busy_poll(&kind) {
            waker.wake_by_ref();
            return OpStage::New(kind);
        }
        let (key, kind) = self.core.start(kind, waker.clone());
        OpStage::InFlight(key, kind)
    }

    /// True if the result only means "try again" and retries are left.
    fn is_momentary(&mut self, result: i32) -> bool {
        let momentary = result == -libc::EINTR || result == -libc::EAGAIN;
        self.retries += u8::from(momentary);
        momentary && self.retries <= RETRY_LIMIT
    }
}

impl<K: IoOp> Future for Op<K> {
    type Output = K::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<K::Output> {
        loop {
            match std::mem::replace(&mut self.stage, OpStage::Over) {
                OpStage::New(kind) => {
                    if self.core.is_closed() {
                        return Poll::Ready(kind.finish(Err(io::Error::from_raw_os_error(libc::ECANCELED))));
                    }
                    match self.try_inline(kind) {
                        Ok(output) => return Poll::Ready(output),
                        Err(kind) => self.stage = self.wait(kind, cx.waker()),
                    }
                    return Poll::Pending;
                }
                OpStage::InFlight(key, kind) => {
                    let polled = self.core.op_table.borrow_mut().poll(key, cx.waker());
                    let (result, returned) = match polled {
                        Ok(done) => done,
                        Err(_replaced) => {
                            self.stage = OpStage::InFlight(key, kind);
                            return Poll::Pending;
                        }
                    };
                    let kind = kind.or_else(|| returned?.into_any().downcast().ok().map(|kind| *kind));
                    let kind = kind.expect("a thread returns the operation that it was given");
                    if self.is_momentary(result) {
                        self.stage = OpStage::New(kind);
                        continue;
                    }
                    return Poll::Ready(kind.finish(decoded(result)));
                }
                OpStage::Over => panic!("an operation was polled after its end"),
            }
        }
    }
}

impl<K: IoOp> Drop for Op<K> {
    fn drop(&mut self) {
        self.cancel();
        self.busy_poll.end(&self.core.busy_polling);
        if let OpStage::InFlight(key, kind) = std::mem::replace(&mut self.stage, OpStage::Over) {
            let kept = kind.map(|kind| Box::new(kind) as Box<dyn ErasedOp>);
            let (done, waker) = self.core.op_table.borrow_mut().abandon(key, kept);
            drop(waker);
            if let Some((result, kept, returned)) = done {
                discard(result, [kept, returned]);
            }
        }
    }
}

/// Holds an operation whose future was dropped; the next one finishes it first.
pub(crate) type Parked<K> = Cell<Option<Op<K>>>;

/// An operation that is cancelled and parked, not abandoned, if it is dropped in flight, so that its result (received
/// bytes, an accepted connection) is not lost.
pub(crate) struct Parking<'a, K: IoOp> {
    parked: &'a Parked<K>,
    op: Option<Op<K>>,
}

impl<'a, K: IoOp> Parking<'a, K> {
    pub(crate) fn new(parked: &'a Parked<K>, op: Op<K>) -> Parking<'a, K> {
        Parking { parked, op: Some(op) }
    }
}

impl<K: IoOp> Future for Parking<'_, K> {
    type Output = K::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<K::Output> {
        let op = self.op.as_mut().expect("not polled after its end");
        let polled = Pin::new(op).poll(cx);
        if polled.is_ready() {
            self.op = None;
        }
        polled
    }
}

impl<K: IoOp> Drop for Parking<'_, K> {
    fn drop(&mut self) {
        let Some(op) = self.op.take().filter(Op::is_in_flight) else { return };
        op.cancel();
        let displaced = self.parked.replace(Some(op));
        drop(displaced);
    }
}
