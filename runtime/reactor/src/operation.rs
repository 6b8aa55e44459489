//! Operations, independent of the backend.
//!
//! Invariant: a future that is dropped early moves its operation into the table in `op_table.rs`. An operation that waits for a
//! peer is also cancelled then, because it might never complete by itself.
//!
//! Shape: one trait, [`IoOp`], implemented in `file_ops.rs` and `socket_ops.rs`. The future, not the table, holds the operation, so
//! that a table entry has one size and an operation usually allocates nothing.

use std::any::Any;
use std::cell::Cell;
use std::future::Future;
use std::io;
use std::os::fd::RawFd;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use io_uring::squeue;

use crate::busy_poll::BusyPoll;
use crate::executor::Core;
use crate::op_table::Key;
use crate::ring::Tables;

/// How often an operation is retried after an interruption or a momentary lack of resources.
const RETRY_LIMIT: u8 = 64;

/// How many operations one poll of a task executes inline; more go to the backend, so that other tasks get their turn.
const CALLS_PER_POLL: u32 = 8;

/// Operations that the current poll of a task may still execute inline.
#[derive(Default)]
pub(crate) struct Calls(Cell<u32>);

impl Calls {
    /// Resets the number for the next poll.
    pub(crate) fn renew(&self) {
        self.0.set(CALLS_PER_POLL);
    }

    /// Takes one, if there is one left.
    fn take(&self) -> bool {
        let left = self.0.get().checked_sub(1);
        self.0.set(left.unwrap_or(0));
        left.is_some()
    }
}

/// Maximum bytes that Linux moves in one read or write (`MAX_RW_COUNT`).
pub(crate) const TRANSFER_LIMIT_BYTES: usize = 0x7fff_f000;

/// Makes an entry for a descriptor that is either a slot of the ring's table or a number.
macro_rules! entry_for {
    ($target:expr, |$fd:ident| $entry:expr) => {
        match $target {
            $crate::ring::Target::Fixed(slot) => {
                let $fd = io_uring::types::Fixed(slot);
                $entry
            }
            $crate::ring::Target::Plain(number) => {
                let $fd = io_uring::types::Fd(number);
                $entry
            }
        }
    };
}
pub(crate) use entry_for;

/// The count that a system call returned, or its error.
pub(crate) fn counted(result: libc::ssize_t) -> io::Result<u32> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(u32::try_from(result).unwrap_or(u32::MAX))
}

/// The readiness that an operation waits for; it depends on a peer and may never come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Interest {
    pub(crate) fd: RawFd,
    pub(crate) direction: Direction,
}

/// The direction of a socket's readiness.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Readable,
    Writable,
}

/// One kind of operation.
///
/// # Safety
/// All memory and descriptors named by [`IoOp::entry`] stay valid, at the same address, while the value lives, even when
/// the value itself moves, and also when it is leaked.
pub(crate) unsafe trait IoOp: Sized + Send + Unpin + 'static {
    /// The output of the operation's future.
    type Output;

    /// The submission for a ring.
    fn entry(&mut self, tables: &Tables) -> squeue::Entry;

    /// Executes the operation as a system call. It may block, unless the operation waits for a peer: then it returns `EAGAIN`.
    fn call(&mut self) -> io::Result<u32>;

    /// Converts the result of either to the output.
    fn finish(self, result: io::Result<u32>) -> Self::Output;

    /// The readiness of a peer that the operation waits for, if any. Such an operation is cancelled when its future is dropped,
    /// does not count against the limit of operations in flight, and never goes to a thread.
    fn waits(&self) -> Option<Interest> {
        None
    }

    /// True if [`IoOp::call`] is tried when the operation starts. Only for operations that wait for a peer.
    fn is_prompt(&self) -> bool {
        false
    }

    /// True if a prompt operation busy polls before it waits.
    fn busy_polls(&self) -> bool {
        false
    }

    /// Undoes the result of an operation whose future was dropped.
    fn discard(self, result: io::Result<u32>) {
        drop((self, result));
    }
}

/// An operation on its way to a thread and back.
pub(crate) trait ErasedOp: Send {
    /// Executes the operation; a negative result is an error number, as in a completion of a ring.
    fn run(&mut self) -> i32;
    /// Undoes the result of an operation whose future was dropped.
    fn discard(self: Box<Self>, result: i32);
    fn into_any(self: Box<Self>) -> Box<dyn Any>;
}

impl<K: IoOp> ErasedOp for K {
    fn run(&mut self) -> i32 {
        match self.call() {
            Ok(count) => i32::try_from(count).unwrap_or(i32::MAX),
            Err(error) => -error.raw_os_error().unwrap_or(libc::EIO),
        }
    }

    fn discard(self: Box<Self>, result: i32) {
        IoOp::discard(*self, decoded(result));
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

fn decoded(result: i32) -> io::Result<u32> {
    u32::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result))
}

/// Undoes the result of an operation whose future was dropped, wherever the operation was kept.
pub(crate) fn discard(result: i32, kept: [Option<Box<dyn ErasedOp>>; 2]) {
    kept.into_iter().flatten().for_each(|op| op.discard(result));
}

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

    /// Cancels an operation that waits for a peer. It still has to be polled to its end, or dropped.
    fn cancel(&self) {
        if let (&OpStage::InFlight(key, _), Some(interest)) = (&self.stage, self.waits) {
            self.core.cancel(key, interest);
        }
    }

    /// Executes a prompt operation inline, within the limit of the task's poll; returns it if it has to wait for the backend.
    fn try_inline(&self, mut kind: K) -> Result<K::Output, K> {
        if self.waits.is_none() || !kind.is_prompt() || !self.core.calls.take() {
            return Err(kind);
        }
        match kind.call() {
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)) => Err(kind),
            result => Ok(kind.finish(result)),
        }
    }

    /// True if an operation that would have to wait is retried in the next turn, and does not go to the backend yet.
    fn may_busy_poll(&mut self, kind: &K) -> bool {
        self.waits.is_some()
            && kind.is_prompt()
            && kind.busy_polls()
            && self.busy_poll.poll_again(&self.core.busy_polling, self.core.awaits_disk())
    }

    /// Retries in the task's next poll, or has the backend wait.
    fn wait(&mut self, kind: K, waker: &Waker) -> OpStage<K> {
        if self.may_busy_poll(&kind) {
            waker.wake_by_ref();
            return OpStage::New(kind);
        }
        let (key, kind) = self.core.start(kind, waker.clone());
        OpStage::InFlight(key, kind)
    }

    /// True if the result only says "try again" and the retries are not used up.
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

/// Holds an operation whose future was dropped; its successor finishes it first.
pub(crate) type Parked<K> = Cell<Option<Op<K>>>;

/// An operation that is cancelled and parked, not abandoned, when it is dropped in flight, so that its result (received bytes, an
/// accepted connection) is not lost.
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
