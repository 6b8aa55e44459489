//! Who waits to begin a long step, and when one may: the state of [`crate::long_step()`].

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::task::Waker;
use std::time::{Duration, Instant};

/// How long after the first step of a turn further ones begin. A turn has its own cost, some microseconds: of steps as short as that
/// it takes several.
pub(crate) const MAX_STEPPING: Duration = Duration::from_micros(250);

/// Who waits to begin a step, by age.
#[derive(Default)]
pub(crate) struct LongSteps {
    waiting: RefCell<BTreeMap<u64, Waker>>,
    joined: Cell<u64>,
    /// The first step of a turn: how many turns there were, and when it began.
    first: Cell<Option<(u64, Instant)>>,
}

impl LongSteps {
    /// True if one waits for the end of this turn alone.
    pub(crate) fn is_due(&self, turns: u64) -> bool {
        self.has_begun(turns) && !self.waiting.borrow().is_empty()
    }

    /// Wakes the one whose turn it is.
    pub(crate) fn wake_first(&self) {
        let first = self.waiting.borrow().first_key_value().map(|(_, waker)| waker.clone());
        first.into_iter().for_each(Waker::wake);
    }

    /// True if a step began in this turn.
    fn has_begun(&self, turns: u64) -> bool {
        self.first.get().is_some_and(|(turn, _)| turn == turns)
    }

    /// A number behind all of those that wait.
    pub(crate) fn join(&self) -> u64 {
        self.joined.replace(self.joined.get() + 1)
    }

    /// Waits on, and is woken when it is its turn.
    pub(crate) fn wait(&self, place: u64, waker: Waker) {
        let replaced = self.waiting.borrow_mut().insert(place, waker);
        drop(replaced);
    }

    /// Leaves those that wait. It began a step, and there may be time for another one; or it was dropped, and may have been the one that
    /// was woken.
    pub(crate) fn leave(&self, place: u64) {
        let removed = self.waiting.borrow_mut().remove(&place);
        if removed.is_some() {
            self.wake_first();
        }
    }

    /// Begins a step, if it is this one's turn.
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
