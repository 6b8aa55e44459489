//! Who waits for which answer, on the caller's core.
//!
//! Invariant: a slot is used again only after its answer has come, so an answer never reaches another request's caller.

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use sealblock_block::Outcome;

enum CallSlot {
    Free,
    Waiting(Option<Waker>),
    Answered(Outcome),
    /// The caller has gone; the answer has not come.
    Abandoned,
}

#[derive(Default)]
pub(crate) struct CallTable {
    slots: Vec<CallSlot>,
    free: Vec<u32>,
}

impl CallTable {
    pub(crate) fn take(&mut self) -> u32 {
        let number = self.free.pop().unwrap_or_else(|| {
            self.slots.push(CallSlot::Free);
            self.slots.len() as u32 - 1
        });
        self.slots[number as usize] = CallSlot::Waiting(None);
        number
    }

    fn put(&mut self, number: u32, slot: CallSlot) -> CallSlot {
        if matches!(slot, CallSlot::Free) {
            self.free.push(number);
        }
        std::mem::replace(&mut self.slots[number as usize], slot)
    }
}

/// Hands an answer to its caller.
pub(crate) fn deliver(slots: &RefCell<CallTable>, number: u32, outcome: Outcome) {
    let mut table = slots.borrow_mut();
    let is_awaited = matches!(table.slots[number as usize], CallSlot::Waiting(_));
    let (before, unwanted) = match is_awaited {
        true => (table.put(number, CallSlot::Answered(outcome)), None),
        false => (table.put(number, CallSlot::Free), Some(outcome)),
    };
    drop(table);
    drop(unwanted);
    if let CallSlot::Waiting(Some(waker)) = before {
        waker.wake();
    }
}

/// The wait for an answer.
pub(crate) struct Wait {
    slots: Rc<RefCell<CallTable>>,
    /// `None` once the answer was taken.
    number: Option<u32>,
}

impl Wait {
    pub(crate) fn new(slots: &Rc<RefCell<CallTable>>, number: u32) -> Wait {
        Wait { slots: Rc::clone(slots), number: Some(number) }
    }
}

impl Future for Wait {
    type Output = Outcome;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Outcome> {
        let number = self.number.expect("a future that has ended is not polled");
        let mut slots = self.slots.borrow_mut();
        if matches!(slots.slots[number as usize], CallSlot::Answered(_)) {
            let slot = slots.put(number, CallSlot::Free);
            drop(slots);
            self.number = None;
            let CallSlot::Answered(outcome) = slot else { unreachable!("that is what it was a moment ago") };
            return Poll::Ready(outcome);
        }
        let previous = slots.put(number, CallSlot::Waiting(Some(cx.waker().clone())));
        drop(slots);
        drop(previous);
        Poll::Pending
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        let Some(number) = self.number else { return };
        let mut slots = self.slots.borrow_mut();
        let is_answered = matches!(slots.slots[number as usize], CallSlot::Answered(_));
        let before = slots.put(number, if is_answered { CallSlot::Free } else { CallSlot::Abandoned });
        drop(slots);
        drop(before);
    }
}
