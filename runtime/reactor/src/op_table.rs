//! The table of operations in flight.
//!
//! Invariant: what an operation lends to the kernel or to a thread (buffers, descriptors) stays alive until its
//! completion arrives. While the future lives it holds them; when it is dropped early they move into the table, which
//! drops them with the completion.
//!
//! Shape: a slot holds no operation unless its future is gone, so that all slots have one size and reusing them
//! allocates nothing.

use std::task::Waker;

use slab::Slab;

use crate::operation::ErasedOp;

/// The key of an operation in flight: its slot, and a generation in the higher bits, so that a stale key matches
/// nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key(u64);

impl Key {
    pub(crate) fn from_raw(raw: u64) -> Key {
        Key(raw & !(WAITS_BIT | CHANGES_BIT))
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

/// An operation whose future does not hold it.
pub(crate) type LentOp = Option<Box<dyn ErasedOp>>;

/// `user_data` bit of operations that wait for a peer; no table has that many slots.
pub(crate) const WAITS_BIT: u64 = 1 << 31;
/// `user_data` bit of operations that change a file; no table has that many slots either.
pub(crate) const CHANGES_BIT: u64 = 1 << 30;

enum OpState {
    Waiting(Waker),
    /// The result, and the operation itself if a thread executed it.
    Done(i32, LentOp),
    /// The future was dropped; the operation's memory is kept here.
    Abandoned(LentOp),
}

struct InFlight {
    generation: u32,
    state: OpState,
}

/// A completion: the operation's key, its count or negative error number, and the operation if its future does not hold
/// it.
pub(crate) struct Finished {
    pub(crate) key: Key,
    pub(crate) result: i32,
    pub(crate) returned: LentOp,
}

/// The action for a completion, to run when the table is no longer borrowed.
pub(crate) enum CompletionAction {
    Wake(Waker),
    /// The future was dropped: the operation undoes its result and is dropped, which may run any code.
    Discard(i32, LentOp, LentOp),
}

/// The operations that were started and whose results were not taken yet.
#[derive(Default)]
pub(crate) struct OpTable {
    operations: Slab<InFlight>,
    started: u32,
    in_flight: usize,
}

impl OpTable {
    /// The number of operations whose completion has not arrived.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight
    }

    pub(crate) fn insert(&mut self, waker: Waker) -> Key {
        self.in_flight += 1;
        self.started = self.started.wrapping_add(1);
        let index = self.operations.insert(InFlight { generation: self.started, state: OpState::Waiting(waker) });
        assert!((index as u64) < CHANGES_BIT, "fewer than 2^30 operations fit into memory");
        Key::new(index, self.started)
    }

    fn get(&mut self, key: Key) -> Option<&mut OpState> {
        let found = self.operations.get_mut(key.index()).filter(|found| found.generation == key.generation());
        found.map(|found| &mut found.state)
    }

    pub(crate) fn complete(&mut self, Finished { key, result, returned }: Finished) -> CompletionAction {
        match self.get(key) {
            Some(state @ OpState::Waiting(_)) => {
                let OpState::Waiting(waker) = std::mem::replace(state, OpState::Done(result, returned)) else {
                    unreachable!("as matched")
                };
                self.in_flight -= 1;
                CompletionAction::Wake(waker)
            }
            Some(OpState::Abandoned(kept)) => {
                let kept = kept.take();
                self.in_flight -= 1;
                self.operations.remove(key.index());
                CompletionAction::Discard(result, kept, returned)
            }
            Some(OpState::Done(..)) | None => CompletionAction::Discard(result, returned, None),
        }
    }

    pub(crate) fn is_abandoned(&self, key: Key) -> bool {
        let found = self.operations.get(key.index()).filter(|found| found.generation == key.generation());
        found.is_some_and(|found| matches!(found.state, OpState::Abandoned(_)))
    }

    /// The result, if the operation has completed; otherwise stores the waker, and returns the replaced one for the
    /// caller to drop.
    pub(crate) fn poll(&mut self, key: Key, waker: &Waker) -> Result<(i32, LentOp), Option<Waker>> {
        match self.get(key).expect("a future's key is released only by the future") {
            OpState::Waiting(old) if old.will_wake(waker) => Err(None),
            OpState::Waiting(old) => Err(Some(std::mem::replace(old, waker.clone()))),
            OpState::Done(result, returned) => {
                let done = (*result, returned.take());
                self.operations.remove(key.index());
                Ok(done)
            }
            OpState::Abandoned(_) => unreachable!("an operation that is polled has its future"),
        }
    }

    /// Keeps what a dropped future had lent until the completion arrives. If it has already arrived, returns its result
    /// and the operation, to be discarded. The second part is a waker to drop.
    pub(crate) fn abandon(&mut self, key: Key, kept: LentOp) -> (Option<(i32, LentOp, LentOp)>, Option<Waker>) {
        let Some(state) = self.get(key) else {
            // The table was leaked together with a failed ring, which may still use what was lent.
            std::mem::forget(kept);
            return (None, None);
        };
        if let OpState::Done(result, returned) = state {
            let done = (*result, kept, returned.take());
            self.operations.remove(key.index());
            return (Some(done), None);
        }
        match std::mem::replace(state, OpState::Abandoned(kept)) {
            OpState::Waiting(waker) => (None, Some(waker)),
            OpState::Done(..) | OpState::Abandoned(_) => unreachable!("a future that is dropped has an operation"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::any::Any;

    use super::*;

    struct Lent(#[allow(dead_code, reason = "counted by its Arc")] std::sync::Arc<()>);

    impl ErasedOp for Lent {
        fn run(&mut self) -> i32 {
            0
        }
        fn discard(self: Box<Self>, _: i32) {}
        fn into_any(self: Box<Self>) -> Box<dyn Any> {
            self
        }
    }

    #[test]
    fn a_stale_key_completes_nothing() {
        let mut table = OpTable::default();
        let key = table.insert(Waker::noop().clone());
        assert!(matches!(table.complete(Finished { key, result: 7, returned: None }), CompletionAction::Wake(_)));
        assert!(matches!(table.poll(key, Waker::noop()), Ok((7, None))));
        let next = table.insert(Waker::noop().clone());
        assert!(matches!(table.complete(Finished { key, result: 8, returned: None }), CompletionAction::Discard(..)));
        assert!(table.poll(next, Waker::noop()).is_err());
        assert_eq!(table.in_flight(), 1);
    }

    #[test]
    fn an_abandoned_operation_keeps_what_it_lent_until_it_completes() {
        let mut table = OpTable::default();
        let lent = std::sync::Arc::new(());
        let key = table.insert(Waker::noop().clone());
        let (done, _waker) = table.abandon(key, Some(Box::new(Lent(std::sync::Arc::clone(&lent)))));
        assert!(done.is_none());
        assert!(table.is_abandoned(key));
        assert_eq!((std::sync::Arc::strong_count(&lent), table.in_flight()), (2, 1));
        drop(table.complete(Finished { key, result: 0, returned: None }));
        assert_eq!((std::sync::Arc::strong_count(&lent), table.in_flight()), (1, 0));
    }
}
