//! The work of a reactor: its tasks, by slot, and its timers.
//!
//! Invariant: a future is returned and not dropped here, because dropping may run any code and the caller has borrowed
//! the table. A future that is being polled is not in its slot, so aborting it from within only marks the slot.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::task::Waker;
use std::time::Instant;

use slab::Slab;

/// Bits of a slot's index, and of its generation.
const FIELD_BITS: u32 = 24;
/// The largest value of either.
const FIELD_MASK: u32 = (1 << FIELD_BITS) - 1;

/// A task's slot and its generation, 24 bits each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TaskId {
    index: u32,
    generation: u32,
}

impl TaskId {
    /// The number of bits that [`TaskId::to_bits`] uses.
    pub(crate) const BITS: u32 = 2 * FIELD_BITS;
    /// The future given to `block_on`, which has no slot.
    pub(crate) const ROOT: TaskId = TaskId { index: FIELD_MASK, generation: 0 };

    pub(crate) fn to_bits(self) -> u64 {
        u64::from(self.generation) << FIELD_BITS | u64::from(self.index)
    }

    /// Ignores higher bits.
    pub(crate) fn from_bits(bits: u64) -> TaskId {
        TaskId { index: bits as u32 & FIELD_MASK, generation: (bits >> FIELD_BITS) as u32 & FIELD_MASK }
    }
}

pub(crate) type Body = Pin<Box<dyn Future<Output = ()>>>;

struct Task {
    generation: u32,
    is_queued: bool,
    is_aborted: bool,
    /// `None` while it is being polled.
    body: Option<Body>,
}

/// The tasks that have not ended.
#[derive(Default)]
pub(crate) struct Tasks {
    tasks: Slab<Task>,
    started: u32,
}

impl Tasks {
    pub(crate) fn live(&self) -> usize {
        self.tasks.len()
    }

    /// Gives the future a slot, which counts as queued already.
    pub(crate) fn insert(&mut self, body: Body) -> TaskId {
        self.started = self.started.wrapping_add(1);
        let generation = self.started & FIELD_MASK;
        let index = self.tasks.insert(Task { generation, is_queued: true, is_aborted: false, body: Some(body) }) as u32;
        // The last index is the root's.
        assert!(index < FIELD_MASK, "a reactor holds fewer than 2^24 - 1 tasks");
        TaskId { index, generation }
    }

    fn get(&mut self, id: TaskId) -> Option<&mut Task> {
        self.tasks.get_mut(id.index as usize).filter(|task| task.generation == id.generation)
    }

    /// Queues the task to be polled; false if it is gone or already queued.
    pub(crate) fn enqueue(&mut self, id: TaskId) -> bool {
        self.get(id).is_some_and(|task| !std::mem::replace(&mut task.is_queued, true))
    }

    /// Takes the future out to poll it.
    pub(crate) fn begin(&mut self, id: TaskId) -> Option<Body> {
        let task = self.get(id)?;
        task.is_queued = false;
        task.body.take()
    }

    /// Ends a poll. Returns the future of a task that has ended, for the caller to drop.
    pub(crate) fn end(&mut self, id: TaskId, body: Body, finished: bool) -> Option<Body> {
        let Some(task) = self.get(id) else { return Some(body) };
        if finished || task.is_aborted {
            self.tasks.remove(id.index as usize);
            return Some(body);
        }
        task.body = Some(body);
        None
    }

    /// Removes the future of a task that is not being polled; otherwise the task ends with its poll.
    pub(crate) fn abort(&mut self, id: TaskId) -> Option<Body> {
        let task = self.get(id)?;
        task.is_aborted = true;
        let body = task.body.take()?;
        self.tasks.remove(id.index as usize);
        Some(body)
    }

    /// Removes all futures at once, so that the end of a reactor takes time in proportion to their number. Dropping
    /// them may start others.
    pub(crate) fn evict(&mut self) -> Vec<Body> {
        std::mem::take(&mut self.tasks).into_iter().filter_map(|(_, task)| task.body).collect()
    }
}

/// The running timers, by deadline and, for equal deadlines, by age.
#[derive(Default)]
pub(crate) struct Timers {
    running: BTreeMap<(Instant, u64), Waker>,
    started: u64,
}

impl Timers {
    pub(crate) fn start(&mut self, deadline: Instant, waker: Waker) -> (Instant, u64) {
        self.started += 1;
        let key = (deadline, self.started);
        self.running.insert(key, waker);
        key
    }

    /// Sets the waker of a timer, even of one that has ended. Returns the replaced waker.
    pub(crate) fn restart(&mut self, key: (Instant, u64), waker: Waker) -> Option<Waker> {
        self.running.insert(key, waker)
    }

    /// Removes a timer. Returns its waker if it had not ended.
    pub(crate) fn stop(&mut self, key: (Instant, u64)) -> Option<Waker> {
        self.running.remove(&key)
    }

    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.running.first_key_value().map(|((deadline, _), _)| *deadline)
    }

    /// Takes the earliest timer that is due.
    pub(crate) fn pop_due(&mut self, now: Instant) -> Option<Waker> {
        let first = self.running.first_entry()?;
        (first.key().0 <= now).then(|| first.remove())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn all_futures_are_taken_away_at_once_and_later_ones_again() {
        let mut tasks = Tasks::default();
        let ids: Vec<TaskId> = (0..3).map(|_| tasks.insert(Box::pin(async {}))).collect();
        let polled = tasks.begin(ids[1]).expect("it is there");
        assert_eq!((tasks.evict().len(), tasks.live()), (2, 0), "all but the one that is being polled");
        assert!(tasks.end(ids[1], polled, false).is_some() && tasks.abort(ids[0]).is_none());
        let late = tasks.insert(Box::pin(async {}));
        assert!(!ids.contains(&late));
        assert_eq!((tasks.evict().len(), tasks.evict().len()), (1, 0));
    }

    #[test]
    fn timers_come_due_in_order_and_not_before() {
        let (start, ms) = (Instant::now(), Duration::from_millis);
        let mut timers = Timers::default();
        let late = timers.start(start + ms(9), Waker::noop().clone());
        let early = timers.start(start + ms(3), Waker::noop().clone());
        let twin = timers.start(start + ms(3), Waker::noop().clone());
        assert!(early < twin && twin < late, "equals end in the order they began");
        assert_eq!(timers.next_deadline(), Some(start + ms(3)));
        assert!(timers.pop_due(start + ms(2)).is_none());
        assert!(timers.pop_due(start + ms(3)).is_some() && timers.pop_due(start + ms(3)).is_some());
        assert!(timers.pop_due(start + ms(8)).is_none());
        assert_eq!(timers.next_deadline(), Some(start + ms(9)));
        assert!(timers.pop_due(start + ms(10)).is_some());
        assert_eq!(timers.next_deadline(), None);
    }
}
