//! The contents that a block may have, from the history of its changes.
//!
//! A block may have the content of a change unless another completed change started after the first had completed.
//! Concurrent changes have no order. A kill ends the process but not the machine, so every completed change counts,
//! flushed or not.

use std::collections::HashMap;
use std::fmt;

use sealblock_units::Lba;

use crate::pattern::Content;
use crate::report::{Change, Event};

/// A moment: the number of events that happened before it.
type Moment = usize;

struct ChangeRecord {
    change: Change,
    started: Moment,
    done: Option<Moment>,
    is_durable: bool,
    fua: bool,
}

/// All events on a volume since its content was last known.
#[derive(Default)]
pub struct History {
    changes: Vec<ChangeRecord>,
    by_request: HashMap<u64, usize>,
    flushes: HashMap<u64, Moment>,
    by_block: HashMap<Lba, Vec<usize>>,
    now: Moment,
}

/// A block with content that it must not hold.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FailureReport {
    /// The block.
    pub lba: Lba,
    /// The content found.
    pub found: Content,
    /// The contents that are permitted.
    pub permitted: Vec<Content>,
}

impl fmt::Display for FailureReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block {} holds {:x?}, and may hold {:x?}", self.lba, self.found, self.permitted)
    }
}

impl History {
    /// Adds the next event.
    pub fn record(&mut self, event: Event) {
        self.now += 1;
        match event {
            Event::Ready => {}
            Event::Begin { request_id, extent, change, fua } => {
                let index = self.changes.len();
                self.changes.push(ChangeRecord { change, started: self.now, done: None, is_durable: false, fua });
                self.by_request.insert(request_id, index);
                extent.iter().for_each(|lba| self.by_block.entry(lba).or_default().push(index));
            }
            Event::Done { request_id } => {
                if let Some(record) = self.by_request.get(&request_id).map(|index| &mut self.changes[*index]) {
                    record.done = Some(self.now);
                    record.is_durable |= record.fua;
                }
            }
            Event::FlushBegin { request_id } => {
                self.flushes.insert(request_id, self.now);
            }
            Event::FlushDone { request_id } => {
                if let Some(started) = self.flushes.remove(&request_id) {
                    let covered = |record: &&mut ChangeRecord| record.done.is_some_and(|done| done < started);
                    self.changes.iter_mut().filter(covered).for_each(|record| record.is_durable = true);
                }
            }
        }
    }

    /// The moment after the last event.
    pub fn now(&self) -> Moment {
        self.now
    }

    /// The number of changes, and of durable ones.
    pub fn counts(&self) -> (usize, usize) {
        (self.changes.len(), self.changes.iter().filter(|record| record.is_durable).count())
    }

    /// Checks the content of a block after a kill; `before` is its content at the start.
    ///
    /// # Errors
    /// A [`FailureReport`] if the content is not permitted.
    pub fn check(&self, lba: Lba, before: Content, found: Content) -> Result<(), FailureReport> {
        self.check_by(lba, before, found, |record| record.done.is_some())
    }

    /// Checks the result of a read that started at `moment`. For a read, a change counts as soon as it has completed.
    ///
    /// # Errors
    /// A [`FailureReport`] if the content was not possible.
    pub fn check_read(&self, lba: Lba, found: Content, moment: Moment) -> Result<(), FailureReport> {
        self.check_by(lba, Content::Zeroes, found, |record| record.done.is_some_and(|done| done <= moment))
    }

    fn check_by(
        &self,
        lba: Lba,
        before: Content,
        found: Content,
        counts: impl Fn(&ChangeRecord) -> bool,
    ) -> Result<(), FailureReport> {
        let changes = || self.by_block.get(&lba).into_iter().flatten().map(|index| &self.changes[*index]);
        let floor = changes().filter(|record| counts(record)).map(|record| record.started).max();
        let candidates =
            changes().filter(|record| floor.is_none_or(|floor| record.done.is_none_or(|done| done > floor)));
        let mut permitted: Vec<_> = candidates
            .map(|record| match record.change {
                Change::Write(version) => Content::Written(version),
                Change::Zero => Content::Zeroes,
            })
            .chain(floor.is_none().then_some(before))
            .collect();
        if permitted.contains(&found) {
            return Ok(());
        }
        permitted.dedup();
        Err(FailureReport { lba, found, permitted })
    }
}

#[cfg(test)]
mod tests {
    use sealblock_units::Extent;

    use super::*;

    const BLOCK: Lba = Lba::new(5);

    fn begin(request_id: u64, change: Change, fua: bool) -> Event {
        Event::Begin { request_id, extent: Extent::from_raw(4, 3).unwrap(), change, fua }
    }

    fn history(events: &[Event]) -> History {
        let mut history = History::default();
        events.iter().for_each(|event| history.record(*event));
        history
    }

    /// Which of zeroes and versions 1 to 3 the block may hold, if it held zeroes before.
    fn permitted(events: &[Event]) -> Vec<u64> {
        let history = history(events);
        let content = |version| if version == 0 { Content::Zeroes } else { Content::Written(version) };
        (0..4).filter(|version| history.check(BLOCK, Content::Zeroes, content(*version)).is_ok()).collect()
    }

    fn first() -> [Event; 2] {
        [begin(1, Change::Write(1), false), Event::Done { request_id: 1 }]
    }

    const FLUSH: [Event; 2] = [Event::FlushBegin { request_id: 9 }, Event::FlushDone { request_id: 9 }];

    #[test]
    fn a_lost_flushed_write_is_reported() {
        let flushed = history(&[first(), FLUSH].concat());
        assert_eq!(flushed.check(BLOCK, Content::Zeroes, Content::Written(1)), Ok(()));
        let lost = flushed.check(BLOCK, Content::Zeroes, Content::Zeroes).unwrap_err();
        assert_eq!((lost.lba, lost.found, lost.permitted), (BLOCK, Content::Zeroes, vec![Content::Written(1)]));
        // A neighbour that was never written must be unchanged.
        assert_eq!(flushed.check(Lba::new(7), Content::Written(3), Content::Written(3)), Ok(()));
        assert!(flushed.check(Lba::new(7), Content::Written(3), Content::Written(1)).is_err());
    }

    #[test]
    fn a_change_that_was_answered_is_there_and_one_in_flight_may_be() {
        assert_eq!(permitted(&first()), [1], "flushed or not");
        assert_eq!(permitted(&first()[..1]), [0, 1]);
        assert_eq!(permitted(&[first()[0], FLUSH[0], FLUSH[1]]), [0, 1], "a flush covers what was answered before");
        let second = begin(2, Change::Write(2), false);
        assert_eq!(permitted(&[first()[0], first()[1], second]), [1, 2]);
    }

    #[test]
    fn a_later_change_takes_the_place_of_an_earlier_one_when_it_completes() {
        let write = begin(2, Change::Write(2), true);
        assert_eq!(permitted(&[first()[0], first()[1], write]), [1, 2]);
        assert_eq!(permitted(&[first()[0], first()[1], write, Event::Done { request_id: 2 }]), [2]);
    }

    #[test]
    fn changes_at_the_same_time_have_no_order() {
        let (second, done) = (begin(2, Change::Write(2), false), Event::Done { request_id: 2 });
        assert_eq!(permitted(&[first()[0], second, first()[1], done, FLUSH[0], FLUSH[1]]), [1, 2]);
        assert_eq!(permitted(&[first()[0], first()[1], second, done, FLUSH[0], FLUSH[1]]), [2]);
        let zero = begin(3, Change::Zero, false);
        let flushed_then_zeroed = [first()[0], first()[1], FLUSH[0], FLUSH[1], zero, Event::Done { request_id: 3 }];
        assert_eq!(permitted(&flushed_then_zeroed), [0]);
    }

    #[test]
    fn a_torn_block_is_never_permitted() {
        assert!(history(&first()).check(BLOCK, Content::Zeroes, Content::Foreign).is_err());
    }

    #[test]
    fn a_read_sees_changes_that_completed_before_it_started() {
        let mut history = history(&first());
        let began = history.now();
        history.record(begin(2, Change::Write(2), false));
        assert!(history.check_read(BLOCK, Content::Written(1), began).is_ok());
        assert!(history.check_read(BLOCK, Content::Written(2), began).is_ok());
        assert!(history.check_read(BLOCK, Content::Zeroes, began).is_err());
        history.record(Event::Done { request_id: 2 });
        assert!(history.check_read(BLOCK, Content::Written(1), began).is_ok());
        assert!(history.check_read(BLOCK, Content::Written(1), history.now()).is_err());
    }
}
