//! Operations in flight, whoever carries them out.
//!
//! Invariant: what an operation lends to the kernel or to a thread (buffers, descriptors) stays alive until its completion
//! arrives. While the future lives it holds them; when it is dropped early they move into the table, which drops them
//! with the completion.
//!
//! Shape: one trait, [`Kind`], with one file per implementation under `operations/`. The future, not the table, holds the
//! operation, so that a table entry has one size and the usual life of an operation allocates nothing.

use std::any::Any;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use io_uring::squeue;

use crate::executor::Core;
use crate::ring::Tables;

/// How often an operation that was interrupted, or met a momentary lack of resources, is started again.
const RETRY_LIMIT: u8 = 64;

/// One kind of operation.
///
/// # Safety
/// All memory and descriptors named by [`Kind::entry`] stay valid, at the same address, while the value lives, even when
/// the value itself moves, and also when it is leaked.
pub(crate) unsafe trait Kind: Send + Unpin + 'static {
    /// What the operation's future gives.
    type Output;

    /// The submission for a ring.
    fn entry(&mut self, tables: &Tables) -> squeue::Entry;

    /// The same as a blocking system call.
    fn call(&mut self) -> io::Result<u32>;

    /// Makes the output of what either of them came to.
    fn finish(self, result: io::Result<u32>) -> Self::Output;
}

/// An operation on its way to a thread and back.
pub(crate) trait Work: Send {
    /// Carries it out; a negative result is an error number, as in a completion of a ring.
    fn run(&mut self) -> i32;
    fn into_any(self: Box<Self>) -> Box<dyn Any>;
}

impl<K: Kind> Work for K {
    fn run(&mut self) -> i32 {
        match self.call() {
            Ok(count) => i32::try_from(count).unwrap_or(i32::MAX),
            Err(error) => -error.raw_os_error().unwrap_or(libc::EIO),
        }
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

/// Names an operation in flight; the upper half is a generation, so a stale key names nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key(u64);

impl Key {
    pub(crate) fn from_raw(raw: u64) -> Key {
        Key(raw)
    }

    pub(crate) fn raw(self) -> u64 {
        self.0
    }

    fn new(index: usize, generation: u32) -> Key {
        Key(u64::from(generation) << 32 | index as u64)
    }

    fn index(self) -> usize {
        self.0 as u32 as usize
    }

    fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

type Kept = Option<Box<dyn Any>>;

enum State {
    Free,
    Waiting(Waker),
    /// The result, and the operation itself if a thread had it.
    Done(i32, Kept),
    /// The future is gone; this keeps what it had lent.
    Abandoned(Kept),
}

struct Slot {
    generation: u32,
    state: State,
}

/// What is left to do for a completion once the table is not borrowed any more.
pub(crate) enum Aftermath {
    Wake(Waker),
    /// Only to be dropped, which may run anything.
    Discard(Kept, Kept),
}

/// The operations that were started and have not been answered or collected yet.
#[derive(Default)]
pub(crate) struct Pending {
    slots: Vec<Slot>,
    free: Vec<u32>,
    unanswered: usize,
}

impl Pending {
    /// Operations whose completion has not arrived.
    pub(crate) fn unanswered(&self) -> usize {
        self.unanswered
    }

    pub(crate) fn insert(&mut self, waker: Waker) -> Key {
        self.unanswered += 1;
        let index = self.free.pop().map_or(self.slots.len(), |index| index as usize);
        if index == self.slots.len() {
            assert!(u32::try_from(index).is_ok(), "fewer than 2^32 operations fit into memory");
            self.slots.push(Slot { generation: 0, state: State::Free });
        }
        let slot = &mut self.slots[index];
        slot.state = State::Waiting(waker);
        Key::new(index, slot.generation)
    }

    fn slot(&mut self, key: Key) -> Option<&mut Slot> {
        self.slots.get_mut(key.index()).filter(|slot| slot.generation == key.generation())
    }

    fn release(&mut self, key: Key) {
        let slot = &mut self.slots[key.index()];
        slot.generation = slot.generation.wrapping_add(1);
        slot.state = State::Free;
        self.free.push(key.index() as u32);
    }

    pub(crate) fn complete(&mut self, key: Key, result: i32, returned: Kept) -> Aftermath {
        let Some(slot) = self.slot(key) else { return Aftermath::Discard(returned, None) };
        match std::mem::replace(&mut slot.state, State::Free) {
            State::Waiting(waker) => {
                slot.state = State::Done(result, returned);
                self.unanswered -= 1;
                Aftermath::Wake(waker)
            }
            State::Abandoned(kept) => {
                self.unanswered -= 1;
                self.release(key);
                Aftermath::Discard(kept, returned)
            }
            other => {
                slot.state = other;
                Aftermath::Discard(returned, None)
            }
        }
    }

    pub(crate) fn is_abandoned(&self, key: Key) -> bool {
        matches!(self.slots.get(key.index()), Some(Slot { generation, state: State::Abandoned(_) }) if *generation == key.generation())
    }

    /// The result if it is there; otherwise notes the waker, and returns the one it replaces for the caller to drop.
    fn poll(&mut self, key: Key, waker: &Waker) -> Result<(i32, Kept), Option<Waker>> {
        let slot = self.slot(key).expect("a future's key is released only by the future");
        match &mut slot.state {
            State::Waiting(old) if old.will_wake(waker) => Err(None),
            State::Waiting(old) => Err(Some(std::mem::replace(old, waker.clone()))),
            state => {
                let State::Done(result, kept) = std::mem::replace(state, State::Free) else {
                    unreachable!("an operation that is polled is waiting or done")
                };
                self.release(key);
                Ok((result, kept))
            }
        }
    }

    /// Keeps what a dropped future had lent until the completion arrives. Returns what can be dropped at once.
    fn abandon(&mut self, key: Key, kept: Kept) -> Option<State> {
        let Some(slot) = self.slot(key) else {
            // The table was given up together with a failed ring, which may still use what was lent.
            std::mem::forget(kept);
            return None;
        };
        match &slot.state {
            State::Waiting(_) => Some(std::mem::replace(&mut slot.state, State::Abandoned(kept))),
            _ => {
                let done = std::mem::replace(&mut slot.state, State::Free);
                self.release(key);
                Some(done)
            }
        }
    }
}

enum Stage<K> {
    New(K),
    /// The operation is `None` while a thread has it.
    Flying(Key, Option<K>),
    Over,
}

/// The future of one operation. It starts when it is first polled.
pub(crate) struct Op<K: Kind> {
    core: Rc<Core>,
    stage: Stage<K>,
    retries: u8,
}

impl<K: Kind> Op<K> {
    pub(crate) fn new(core: Rc<Core>, kind: K) -> Op<K> {
        Op { core, stage: Stage::New(kind), retries: 0 }
    }

    /// Whether the result says no more than "try again".
    fn is_momentary(&mut self, result: i32) -> bool {
        let momentary = result == -libc::EINTR || result == -libc::EAGAIN;
        self.retries += u8::from(momentary);
        momentary && self.retries <= RETRY_LIMIT
    }
}

impl<K: Kind> Future for Op<K> {
    type Output = K::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<K::Output> {
        loop {
            match std::mem::replace(&mut self.stage, Stage::Over) {
                Stage::New(kind) => {
                    if self.core.is_closed() {
                        return Poll::Ready(kind.finish(Err(io::Error::from_raw_os_error(libc::ECANCELED))));
                    }
                    let (key, kind) = self.core.start(kind, cx.waker().clone());
                    self.stage = Stage::Flying(key, kind);
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
                    let kind = kind.or_else(|| returned?.downcast().ok().map(|kind| *kind));
                    let kind = kind.expect("a thread returns the operation that it was given");
                    if self.is_momentary(result) {
                        self.stage = Stage::New(kind);
                        continue;
                    }
                    let result = u32::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
                    return Poll::Ready(kind.finish(result));
                }
                Stage::Over => panic!("an operation was polled after its end"),
            }
        }
    }
}

impl<K: Kind> Drop for Op<K> {
    fn drop(&mut self) {
        if let Stage::Flying(key, kind) = std::mem::replace(&mut self.stage, Stage::Over) {
            let kept = kind.map(|kind| Box::new(kind) as Box<dyn Any>);
            let done = self.core.pending.borrow_mut().abandon(key, kept);
            drop(done);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_key_completes_nothing() {
        let mut pending = Pending::default();
        let key = pending.insert(Waker::noop().clone());
        assert!(matches!(pending.complete(key, 7, None), Aftermath::Wake(_)));
        assert!(matches!(pending.poll(key, Waker::noop()), Ok((7, None))));
        let next = pending.insert(Waker::noop().clone());
        assert!(matches!(pending.complete(key, 8, None), Aftermath::Discard(..)));
        assert!(pending.poll(next, Waker::noop()).is_err());
        assert_eq!(pending.unanswered(), 1);
    }

    #[test]
    fn an_abandoned_operation_keeps_what_it_lent_until_it_completes() {
        let mut pending = Pending::default();
        let lent = std::sync::Arc::new(());
        let key = pending.insert(Waker::noop().clone());
        drop(pending.abandon(key, Some(Box::new(std::sync::Arc::clone(&lent)))));
        assert!(pending.is_abandoned(key));
        assert_eq!((std::sync::Arc::strong_count(&lent), pending.unanswered()), (2, 1));
        drop(pending.complete(key, 0, None));
        assert_eq!((std::sync::Arc::strong_count(&lent), pending.unanswered()), (1, 0));
    }
}
