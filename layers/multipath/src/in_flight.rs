//! Requests that are under way, and by which path.

use std::task::Waker;

use crate::late_write::WriteSet;

/// One request on one path.
struct Entry {
    path: usize,
    incarnation: u64,
    request: u64,
    touched: WriteSet,
    /// The tick at which it began.
    since: u32,
    waker: Option<Waker>,
    is_lost: bool,
}

/// All that are under way.
#[derive(Default)]
pub(crate) struct InFlightRequests {
    entries: Vec<Option<Entry>>,
    free: Vec<usize>,
    now: u32,
}

/// What a path that failed has left behind.
#[derive(Default)]
pub(crate) struct PathLoss {
    /// Who is to hear of it.
    pub(crate) wakers: Vec<Waker>,
    /// Requests, and what they may still change.
    pub(crate) writes: Vec<(u64, WriteSet)>,
}

impl InFlightRequests {
    /// A request begins; gives its place.
    pub(crate) fn begin(&mut self, path: usize, incarnation: u64, request: u64, touched: WriteSet) -> usize {
        let since = self.now;
        let entry = Some(Entry { path, incarnation, request, touched, since, waker: None, is_lost: false });
        match self.free.pop() {
            Some(place) => {
                self.entries[place] = entry;
                place
            }
            None => {
                self.entries.push(entry);
                self.entries.len() - 1
            }
        }
    }

    /// A request is over on its path, one way or the other.
    pub(crate) fn end(&mut self, place: usize) -> impl Sized + use<> {
        self.free.push(place);
        self.entries[place].take()
    }

    /// Whether the path was lost; if not, who is to hear when it is. Gives the waker that was there before, to be dropped
    /// outside of any borrow.
    pub(crate) fn is_lost(&mut self, place: usize, waker: &Waker) -> Result<Option<Waker>, Lost> {
        match &mut self.entries[place] {
            Some(entry) if entry.is_lost => Err(Lost),
            Some(entry) if entry.waker.as_ref().is_some_and(|kept| kept.will_wake(waker)) => Ok(None),
            Some(entry) => Ok(entry.waker.replace(waker.clone())),
            None => Err(Lost),
        }
    }

    /// An incarnation of a path is lost, and all that was under way on it.
    pub(crate) fn lose(&mut self, incarnation: u64) -> PathLoss {
        let mut left = PathLoss::default();
        let lost = self.entries.iter_mut().flatten().filter(|entry| entry.incarnation == incarnation && !entry.is_lost);
        for entry in lost {
            entry.is_lost = true;
            left.wakers.extend(entry.waker.take());
            if !entry.touched.is_nothing() {
                left.writes.push((entry.request, entry.touched.clone()));
            }
        }
        left
    }

    /// Counts a tick; gives the paths, by number and incarnation, with requests under way for more than `most` of them.
    pub(crate) fn tick(&mut self, most: u32) -> Vec<(usize, u64)> {
        self.now = self.now.wrapping_add(1);
        let is_late = |entry: &&Entry| !entry.is_lost && self.now.wrapping_sub(entry.since) > most;
        let mut late: Vec<_> = self.entries.iter().flatten().filter(is_late).map(|e| (e.path, e.incarnation)).collect();
        late.sort_unstable();
        late.dedup();
        late
    }
}

/// The path was lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Lost;

#[cfg(test)]
mod tests {
    use super::*;
    use sealblock_units::Extent;

    #[test]
    fn what_a_path_leaves_are_the_writes_that_were_not_answered() {
        let mut flights = InFlightRequests::default();
        let touched = WriteSet::One(Extent::from_raw(3, 1).unwrap());
        let answered = flights.begin(0, 1, 10, touched.clone());
        let unanswered = flights.begin(0, 1, 11, touched.clone());
        let read = flights.begin(0, 1, 12, WriteSet::Nothing);
        let other = flights.begin(1, 2, 13, touched.clone());
        drop(flights.end(answered));
        assert!(flights.is_lost(unanswered, Waker::noop()).is_ok());
        let left = flights.lose(1);
        assert_eq!((left.writes, left.wakers.len()), (vec![(11, touched)], 1));
        assert!(flights.is_lost(unanswered, Waker::noop()).is_err() && flights.is_lost(read, Waker::noop()).is_err());
        assert!(flights.is_lost(other, Waker::noop()).is_ok());
        assert!(flights.lose(1).writes.is_empty(), "once");
    }

    #[test]
    fn what_is_under_way_for_too_long_is_told_once_for_each_path() {
        let mut flights = InFlightRequests::default();
        flights.begin(0, 1, 10, WriteSet::Nothing);
        flights.begin(0, 1, 11, WriteSet::Nothing);
        assert!(flights.tick(1).is_empty());
        flights.begin(1, 2, 12, WriteSet::Nothing);
        assert_eq!(flights.tick(1), [(0, 1)]);
        flights.lose(1);
        assert_eq!(flights.tick(1), [(1, 2)]);
    }
}
