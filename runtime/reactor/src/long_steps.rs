//! The tasks that wait to begin a long step, and when one may: the state of [`crate::long_step()`].

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::task::Waker;
use std::time::{Duration, Instant};

/// How long after the first step of a turn further ones may begin. A turn costs some microseconds itself, so it
/// includes several steps that are as short as that.
pub(crate) const MAX_STEPPING: Duration = Duration::from_micros(250);

/// The tasks that wait to begin a step, by age.
#[derive(Default)]
pub(crate) struct LongSteps {
    waiting: RefCell<BTreeMap<u64, Waker>>,
    joined: Cell<u64>,
    /// The first step of a turn: the number of turns at that time, and when the step began.
    first: Cell<Option<(u64, Instant)>>,
}

impl LongSteps {
    /// True if a task waits only for the end of this turn.
    pub(crate) fn is_due(&self, turns: u64) -> bool {
        self.has_begun(turns) && !self.waiting.borrow().is_empty()
    }

    /// Wakes the first task.
    pub(crate) fn wake_first(&self) {
        let first = self.waiting.borrow().first_key_value().map(|(_, waker)| waker.clone());
        first.into_iter().for_each(Waker::wake);
    }

    /// True if a step began in this turn.
    fn has_begun(&self, turns: u64) -> bool {
        self.first.get().is_some_and(|(turn, _)| turn == turns)
    }

    /// A number after those of all waiting tasks.
    pub(crate) fn join(&self) -> u64 {
        self.joined.replace(self.joined.get() + 1)
    }

    /// Continues to wait, to be woken when it is first.
    pub(crate) fn wait(&self, place: u64, waker: Waker) {
        let replaced = self.waiting.borrow_mut().insert(place, waker);
        drop(replaced);
    }

    /// Leaves the queue, and wakes the next task. Either this task began a step, and there may be time for another one;
    /// or it was dropped, and may have been the one that was woken.
    pub(crate) fn leave(&self, place: u64) {
        let removed = self.waiting.borrow_mut().remove(&place);
        if removed.is_some() {
            self.wake_first();
        }
    }

    /// Begins a step if this task is the first.
    pub(crate) fn begin(&self, place: u64, turns: u64) -> bool {
        let is_first = self.waiting.borrow().first_key_value().is_none_or(|(first, _)| *first >= place);
        if !is_first {
            return false;
        }
        match self.first.get() {
            Some((turn, begun)) if turn == turns => begun.elapsed() < MAX_STEPPING,
            _ => {
                self.first.set(Some((turns, Instant::now())));
                true
            }
        }
    }
}
