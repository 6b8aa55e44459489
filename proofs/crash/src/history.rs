//! What a block may hold, given what was done to it.
//!
//! A change may still be there unless another change is settled that was begun after this one was answered. Changes
//! that were under way at the same time have no order between them. After a kill, a change is settled when it was
//! answered before a flush began that was answered too, or when it was answered and had forced unit access.

use std::collections::HashMap;
use std::fmt;

use sealblock_units::Lba;

use crate::pattern::Content;
use crate::report::{Change, Event};

/// A moment: the number of events before it.
type Moment = usize;

struct Step {
    change: Change,
    begun: Moment,
    done: Option<Moment>,
    settled: bool,
    fua: bool,
}

/// Everything that happened to a volume since its content was known.
#[derive(Default)]
pub struct History {
    steps: Vec<Step>,
    by_request: HashMap<u64, usize>,
    flushes: HashMap<u64, Moment>,
    by_block: HashMap<Lba, Vec<usize>>,
    now: Moment,
}

/// A block that holds what it must not.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FailureReport {
    /// The block.
    pub lba: Lba,
    /// What it holds.
    pub found: Content,
    /// What it might hold.
    pub permitted: Vec<Content>,
}

impl fmt::Display for FailureReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block {} holds {:x?}, and may hold {:x?}", self.lba, self.found, self.permitted)
    }
}

impl History {
    /// Takes the next event over.
    pub fn note(&mut self, event: Event) {
        self.now += 1;
        match event {
            Event::Ready => {}
            Event::Begin { request, extent, change, fua } => {
                let index = self.steps.len();
                self.steps.push(Step { change, begun: self.now, done: None, settled: false, fua });
                self.by_request.insert(request, index);
                extent.iter().for_each(|lba| self.by_block.entry(lba).or_default().push(index));
            }
            Event::Done { request } => {
                if let Some(step) = self.by_request.get(&request).map(|index| &mut self.steps[*index]) {
                    step.done = Some(self.now);
                    step.settled |= step.fua;
                }
            }
            Event::FlushBegin { request } => {
                self.flushes.insert(request, self.now);
            }
            Event::FlushDone { request } => {
                if let Some(begun) = self.flushes.remove(&request) {
                    let covered = |step: &&mut Step| step.done.is_some_and(|done| done < begun);
                    self.steps.iter_mut().filter(covered).for_each(|step| step.settled = true);
                }
            }
        }
    }

    /// The moment after the last event.
    pub fn now(&self) -> Moment {
        self.now
    }

    /// How many changes there were, and how many of them are settled.
    pub fn counts(&self) -> (usize, usize) {
        (self.steps.len(), self.steps.iter().filter(|step| step.settled).count())
    }

    /// Judges what a block holds after a kill, when it held `before` at the start.
    ///
    /// # Errors
    /// A [`FailureReport`] when it may not hold that.
    pub fn judge(&self, lba: Lba, before: Content, found: Content) -> Result<(), FailureReport> {
        self.judge_by(lba, before, found, |step| step.settled)
    }

    /// Judges what a read returned that was begun at `moment`: there, a change is settled as soon as it is answered.
    ///
    /// # Errors
    /// A [`FailureReport`] when the block could not hold that.
    pub fn judge_read(&self, lba: Lba, found: Content, moment: Moment) -> Result<(), FailureReport> {
        self.judge_by(lba, Content::Zeroes, found, |step| step.done.is_some_and(|done| done <= moment))
    }

    fn judge_by(
        &self,
        lba: Lba,
        before: Content,
        found: Content,
        settled: impl Fn(&Step) -> bool,
    ) -> Result<(), FailureReport> {
        let steps = || self.by_block.get(&lba).into_iter().flatten().map(|index| &self.steps[*index]);
        let floor = steps().filter(|step| settled(step)).map(|step| step.begun).max();
        let possible = steps().filter(|step| floor.is_none_or(|floor| step.done.is_none_or(|done| done > floor)));
        let mut permitted: Vec<_> = possible
            .map(|step| match step.change {
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

    fn begin(request: u64, change: Change, fua: bool) -> Event {
        Event::Begin { request, extent: Extent::from_raw(4, 3).unwrap(), change, fua }
    }

    fn history(events: &[Event]) -> History {
        let mut history = History::default();
        events.iter().for_each(|event| history.note(*event));
        history
    }

    /// Which of zeroes and versions 1 to 3 the block may hold that held zeroes before.
    fn permitted(events: &[Event]) -> Vec<u64> {
        let history = history(events);
        let content = |version| if version == 0 { Content::Zeroes } else { Content::Written(version) };
        (0..4).filter(|version| history.judge(BLOCK, Content::Zeroes, content(*version)).is_ok()).collect()
    }

    fn first() -> [Event; 2] {
        [begin(1, Change::Write(1), false), Event::Done { request: 1 }]
    }

    const FLUSH: [Event; 2] = [Event::FlushBegin { request: 9 }, Event::FlushDone { request: 9 }];

    #[test]
    fn a_flushed_write_that_is_lost_is_complained_about() {
        let flushed = history(&[first(), FLUSH].concat());
        assert_eq!(flushed.judge(BLOCK, Content::Zeroes, Content::Written(1)), Ok(()));
        let lost = flushed.judge(BLOCK, Content::Zeroes, Content::Zeroes).unwrap_err();
        assert_eq!((lost.lba, lost.found, lost.permitted), (BLOCK, Content::Zeroes, vec![Content::Written(1)]));
        // A neighbour that was never written must still be as it was.
        assert_eq!(flushed.judge(Lba::new(7), Content::Written(3), Content::Written(3)), Ok(()));
        assert!(flushed.judge(Lba::new(7), Content::Written(3), Content::Written(1)).is_err());
    }

    #[test]
    fn what_was_not_flushed_may_be_there_or_not() {
        assert_eq!(permitted(&first()), [0, 1]);
        assert_eq!(permitted(&first()[..1]), [0, 1]);
        assert_eq!(permitted(&[first()[0], FLUSH[0], first()[1], FLUSH[1]]), [0, 1], "answered after the flush began");
        assert_eq!(permitted(&[first()[0], first()[1], FLUSH[0]]), [0, 1], "the flush was not answered");
    }

    #[test]
    fn forced_unit_access_is_durable_when_it_is_answered() {
        let write = begin(2, Change::Write(2), true);
        assert_eq!(permitted(&[first()[0], first()[1], write]), [0, 1, 2]);
        assert_eq!(permitted(&[first()[0], first()[1], write, Event::Done { request: 2 }]), [2]);
    }

    #[test]
    fn changes_at_the_same_time_have_no_order() {
        let (second, done) = (begin(2, Change::Write(2), false), Event::Done { request: 2 });
        assert_eq!(permitted(&[first()[0], second, first()[1], done, FLUSH[0], FLUSH[1]]), [1, 2]);
        assert_eq!(permitted(&[first()[0], first()[1], second, done, FLUSH[0], FLUSH[1]]), [2]);
        let zero = begin(3, Change::Zero, false);
        let flushed_then_zeroed = [first()[0], first()[1], FLUSH[0], FLUSH[1], zero, Event::Done { request: 3 }];
        assert_eq!(permitted(&flushed_then_zeroed), [0, 1]);
    }

    #[test]
    fn a_torn_block_is_never_permitted() {
        assert!(history(&first()).judge(BLOCK, Content::Zeroes, Content::Foreign).is_err());
    }

    #[test]
    fn a_read_sees_what_was_answered_before_it_began() {
        let mut history = history(&first());
        let began = history.now();
        history.note(begin(2, Change::Write(2), false));
        assert!(history.judge_read(BLOCK, Content::Written(1), began).is_ok());
        assert!(history.judge_read(BLOCK, Content::Written(2), began).is_ok());
        assert!(history.judge_read(BLOCK, Content::Zeroes, began).is_err());
        history.note(Event::Done { request: 2 });
        assert!(history.judge_read(BLOCK, Content::Written(1), began).is_ok());
        assert!(history.judge_read(BLOCK, Content::Written(1), history.now()).is_err());
    }
}
