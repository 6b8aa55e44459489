//! Operations, whoever carries them out.
//!
//! Invariant: a future that is dropped early leaves its operation to the table of `pending.rs`. One that waits for a peer is
//! also cancelled then, as it might never end by itself.
//!
//! Shape: one trait, [`IoOp`], with one file per implementation under `operations/`. The future, not the table, holds the
//! operation, so that a table entry has one size and the usual life of an operation allocates nothing.

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

/// How often an operation that was interrupted, or met a momentary lack of resources, is started again.
const RETRY_LIMIT: u8 = 64;

/// How many operations one poll of a task carries out at once; more go to the backend, so that others get their turn.
const CALLS_PER_POLL: u32 = 8;

/// Operations that the present poll of a task may still carry out at once.
#[derive(Default)]
pub(crate) struct Calls(Cell<u32>);

impl Calls {
    /// For the next poll.
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

/// What an operation waits for that may never come: a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Interest {
    pub(crate) fd: RawFd,
    pub(crate) direction: Direction,
}

/// Which readiness of a socket lets an operation go on.
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
    /// What the operation's future gives.
    type Output;

    /// The submission for a ring.
    fn entry(&mut self, tables: &Tables) -> squeue::Entry;

    /// The same as a system call. It may block when the operation waits for nobody; otherwise it says `EAGAIN`.
    fn call(&mut self) -> io::Result<u32>;

    /// Makes the output of what either of them came to.
    fn finish(self, result: io::Result<u32>) -> Self::Output;

    /// The peer that the operation waits for, if any. Such an operation is cancelled when its future is dropped, does not
    /// count against the limit of operations in flight, and never goes to a thread.
    fn waits(&self) -> Option<Interest> {
        None
    }

    /// Whether to carry it out where it is started, by [`IoOp::call`], if it need not wait then. Only for those that wait.
    fn is_prompt(&self) -> bool {
        false
    }

    /// Whether to ask again for a while when it would have to wait, if it is prompt.
    fn lingers(&self) -> bool {
        false
    }

    /// Undoes what the operation came to after its future was dropped.
    fn discard(self, result: io::Result<u32>) {
        drop((self, result));
    }
}

/// An operation on its way to a thread and back.
pub(crate) trait ErasedOp: Send {
    /// Carries it out; a negative result is an error number, as in a completion of a ring.
    fn run(&mut self) -> i32;
    /// Tells the operation of a dropped future what came of it.
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

/// Tells an operation without a future, wherever it was kept, what came of it.
pub(crate) fn discard(result: i32, kept: [Option<Box<dyn ErasedOp>>; 2]) {
    kept.into_iter().flatten().for_each(|work| work.discard(result));
}

enum Stage<K> {
    New(K),
    /// The operation is `None` while a thread has it.
    Flying(Key, Option<K>),
    Over,
}

/// The future of one operation. It starts when it is first polled.
pub(crate) struct Op<K: IoOp> {
    core: Rc<Core>,
    stage: Stage<K>,
    waits: Option<Interest>,
    retries: u8,
    busy_poll: BusyPoll,
}

impl<K: IoOp> Op<K> {
    pub(crate) fn new(core: Rc<Core>, kind: K) -> Op<K> {
        let waits = kind.waits();
        Op { core, stage: Stage::New(kind), waits, retries: 0, busy_poll: BusyPoll::default() }
    }

    /// Whether it was started and has not given its output yet.
    pub(crate) fn is_flying(&self) -> bool {
        matches!(self.stage, Stage::Flying(..))
    }

    /// Asks for an early end, if the operation is one that waits. It still has to be polled to its end, or dropped.
    fn cancel(&self) {
        if let (&Stage::Flying(key, _), Some(interest)) = (&self.stage, self.waits) {
            self.core.cancel(key, interest);
        }
    }

    /// Carries out what is to be done at once and need not wait, as far as the task may; gives back what is to be started.
    fn at_once(&self, mut kind: K) -> Result<K::Output, K> {
        if self.waits.is_none() || !kind.is_prompt() || !self.core.calls.take() {
            return Err(kind);
        }
        match kind.call() {
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)) => Err(kind),
            result => Ok(kind.finish(result)),
        }
    }

    /// Whether an operation that would have to wait is to ask again soon, rather than have the backend wait.
    fn lingers(&mut self, kind: &K) -> bool {
        self.waits.is_some()
            && kind.is_prompt()
            && kind.lingers()
            && self.busy_poll.goes_on(&self.core.lingering, self.core.awaits_disk())
    }

    /// Asks again in the task's next poll, or has the backend wait.
    fn wait(&mut self, kind: K, waker: &Waker) -> Stage<K> {
        if self.lingers(&kind) {
            waker.wake_by_ref();
            return Stage::New(kind);
        }
        let (key, kind) = self.core.start(kind, waker.clone());
        Stage::Flying(key, kind)
    }

    /// Whether the result says no more than "try again".
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
            match std::mem::replace(&mut self.stage, Stage::Over) {
                Stage::New(kind) => {
                    if self.core.is_closed() {
                        return Poll::Ready(kind.finish(Err(io::Error::from_raw_os_error(libc::ECANCELED))));
                    }
                    match self.at_once(kind) {
                        Ok(output) => return Poll::Ready(output),
                        Err(kind) => self.stage = self.wait(kind, cx.waker()),
                    }
                    return Poll::Pending;
                }
                Stage::Flying(key, kind) => {
                    let polled = self.core.pending.borrow_mut().poll(key, cx.waker());
                    let (result, returned) = match polled {
                        Ok(done) => done,
                        Err(_replaced) => {
                            self.stage = Stage::Flying(key, kind);
                            return Poll::Pending;
                        }
                    };
                    let kind = kind.or_else(|| returned?.into_any().downcast().ok().map(|kind| *kind));
                    let kind = kind.expect("a thread returns the operation that it was given");
                    if self.is_momentary(result) {
                        self.stage = Stage::New(kind);
                        continue;
                    }
                    return Poll::Ready(kind.finish(decoded(result)));
                }
                Stage::Over => panic!("an operation was polled after its end"),
            }
        }
    }
}

impl<K: IoOp> Drop for Op<K> {
    fn drop(&mut self) {
        self.cancel();
        self.busy_poll.end(&self.core.lingering);
        if let Stage::Flying(key, kind) = std::mem::replace(&mut self.stage, Stage::Over) {
            let kept = kind.map(|kind| Box::new(kind) as Box<dyn ErasedOp>);
            let (done, waker) = self.core.pending.borrow_mut().abandon(key, kept);
            drop(waker);
            if let Some((result, kept, returned)) = done {
                discard(result, [kept, returned]);
            }
        }
    }
}

/// The place where an operation whose future was dropped waits for its successor, which must not overtake it.
pub(crate) type Parked<K> = Cell<Option<Op<K>>>;

/// An operation that is cancelled and parked, rather than abandoned, when it is dropped in flight, so that what it may yet
/// bring (received bytes, an accepted connection) is not lost.
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
        let Some(op) = self.op.take().filter(Op::is_flying) else { return };
        op.cancel();
        let displaced = self.parked.replace(Some(op));
        drop(displaced);
    }
}
