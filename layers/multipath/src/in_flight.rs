//! Requests in flight per path, and the writes that a lost path may still deliver. Pure.
//!
//! A write that was in flight when its path failed can be executed late: it may lie in a buffer between the host and the medium.
//! Its own retry writes the same data, so a late execution does not harm it. It would undo a newer write to the same blocks
//! that completed in the meantime. So other writes to these blocks wait until the lost path can deliver nothing more.

use std::task::Waker;

use sealblock_block::Request;
use sealblock_units::Extent;
use slab::Slab;
use smallvec::SmallVec;

/// The blocks that a request changes, and those that a Copy copies: if it is executed late, they must be as they were.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(crate) struct WriteSet(SmallVec<[Extent; 1]>);

impl WriteSet {
    pub(crate) fn of(request: &Request) -> WriteSet {
        WriteSet(request.changed_extents().iter().copied().chain(request.source()).collect())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn overlaps(&self, other: &WriteSet) -> bool {
        self.0.iter().any(|a| other.0.iter().any(|b| a.overlaps(*b)))
    }
}

/// A write that was in flight when this incarnation of its path was lost.
#[derive(Debug)]
struct LateWrite {
    incarnation: u64,
    request_id: u64,
    write_set: WriteSet,
}

/// All writes that lost paths may still deliver.
#[derive(Default, Debug)]
pub(crate) struct LateWrites(Vec<LateWrite>);

impl LateWrites {
    /// Adds a write of this request that was in flight when the path was lost.
    pub(crate) fn add(&mut self, incarnation: u64, request_id: u64, write_set: WriteSet) {
        self.0.push(LateWrite { incarnation, request_id, write_set });
    }

    /// True if a request may change these blocks: no late write of another request overlaps them.
    pub(crate) fn permits(&self, request_id: u64, write_set: &WriteSet) -> bool {
        self.0.iter().all(|late| late.request_id == request_id || !late.write_set.overlaps(write_set))
    }

    /// True if this incarnation may still deliver a write.
    pub(crate) fn has(&self, incarnation: u64) -> bool {
        self.0.iter().any(|late_write| late_write.incarnation == incarnation)
    }

    /// Removes the late writes of an incarnation that can deliver nothing more.
    pub(crate) fn clear(&mut self, incarnation: u64) {
        self.0.retain(|late_write| late_write.incarnation != incarnation);
    }
}

/// One request in flight on one path.
struct InFlightRequest {
    path: usize,
    incarnation: u64,
    request_id: u64,
    write_set: WriteSet,
    /// The tick at which it was sent.
    since: u32,
    waker: Option<Waker>,
    is_lost: bool,
}

/// All requests in flight, on all paths.
#[derive(Default)]
pub(crate) struct InFlightRequests {
    entries: Slab<InFlightRequest>,
    now: u32,
}

/// What was in flight on a path when it failed.
#[derive(Default)]
pub(crate) struct PathLoss {
    /// Wakers of the requests that have to take another path.
    pub(crate) wakers: Vec<Waker>,
    /// Writes by request id, with the blocks that they may still change.
    pub(crate) writes: Vec<(u64, WriteSet)>,
}

impl InFlightRequests {
    /// Adds a request; returns its slot.
    pub(crate) fn add(&mut self, path: usize, incarnation: u64, request_id: u64, write_set: WriteSet) -> usize {
        let since = self.now;
        self.entries.insert(InFlightRequest {
            path,
            incarnation,
            request_id,
            write_set,
            since,
            waker: None,
            is_lost: false,
        })
    }

    /// Removes a request that ended on its path, by whichever outcome. Returns the entry, to be dropped outside of any borrow.
    pub(crate) fn remove(&mut self, slot: usize) -> impl Sized + use<> {
        self.entries.remove(slot)
    }

    /// Fails if the path was lost; otherwise registers the waker to call when it is. Returns the waker that was registered before,
    /// to be dropped outside of any borrow.
    pub(crate) fn is_lost(&mut self, slot: usize, waker: &Waker) -> Result<Option<Waker>, PathLost> {
        match &mut self.entries[slot] {
            entry if entry.is_lost => Err(PathLost),
            entry if entry.waker.as_ref().is_some_and(|kept| kept.will_wake(waker)) => Ok(None),
            entry => Ok(entry.waker.replace(waker.clone())),
        }
    }

    /// Marks every request on this incarnation as lost, once.
    pub(crate) fn path_lost(&mut self, incarnation: u64) -> PathLoss {
        let mut path_loss = PathLoss::default();
        let lost = self
            .entries
            .iter_mut()
            .map(|(_, entry)| entry)
            .filter(|entry| entry.incarnation == incarnation && !entry.is_lost);
        for entry in lost {
            entry.is_lost = true;
            path_loss.wakers.extend(entry.waker.take());
            if !entry.write_set.is_empty() {
                path_loss.writes.push((entry.request_id, entry.write_set.clone()));
            }
        }
        path_loss
    }

    /// Counts a tick; returns the paths, by number and incarnation, with a request in flight for more than `max_ticks`.
    pub(crate) fn tick(&mut self, max_ticks: u32) -> Vec<(usize, u64)> {
        self.now = self.now.wrapping_add(1);
        let is_late = |entry: &&InFlightRequest| !entry.is_lost && self.now.wrapping_sub(entry.since) > max_ticks;
        let mut late: Vec<_> =
            self.entries.iter().map(|(_, entry)| entry).filter(is_late).map(|e| (e.path, e.incarnation)).collect();
        late.sort_unstable();
        late.dedup();
        late
    }
}

/// The path was lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PathLost;

#[cfg(test)]
mod tests {
    use super::*;
    use sealblock_block::{Durability, Expectations};
    use smallvec::smallvec;

    #[test]
    fn a_lost_path_reports_the_writes_in_flight() {
        let mut in_flight = InFlightRequests::default();
        let write_set = write_set(3, 1);
        let answered = in_flight.add(0, 1, 10, write_set.clone());
        let unanswered = in_flight.add(0, 1, 11, write_set.clone());
        let read = in_flight.add(0, 1, 12, WriteSet::default());
        let other = in_flight.add(1, 2, 13, write_set.clone());
        drop(in_flight.remove(answered));
        assert!(in_flight.is_lost(unanswered, Waker::noop()).is_ok());
        let path_loss = in_flight.path_lost(1);
        assert_eq!((path_loss.writes, path_loss.wakers.len()), (vec![(11, write_set)], 1));
        assert!(
            in_flight.is_lost(unanswered, Waker::noop()).is_err() && in_flight.is_lost(read, Waker::noop()).is_err()
        );
        assert!(in_flight.is_lost(other, Waker::noop()).is_ok());
        assert!(in_flight.path_lost(1).writes.is_empty(), "once");
    }

    #[test]
    fn a_path_with_late_requests_is_reported_once() {
        let mut in_flight = InFlightRequests::default();
        in_flight.add(0, 1, 10, WriteSet::default());
        in_flight.add(0, 1, 11, WriteSet::default());
        assert!(in_flight.tick(1).is_empty());
        in_flight.add(1, 2, 12, WriteSet::default());
        assert_eq!(in_flight.tick(1), [(0, 1)]);
        in_flight.path_lost(1);
        assert_eq!(in_flight.tick(1), [(1, 2)]);
    }

    fn write_set(start: u64, blocks: u64) -> WriteSet {
        WriteSet(smallvec![Extent::from_raw(start, blocks).unwrap()])
    }

    #[test]
    fn other_writes_to_the_same_blocks_wait_and_nothing_else_does() {
        let mut late_writes = LateWrites::default();
        late_writes.add(1, 7, write_set(10, 5));
        assert!(!late_writes.permits(8, &write_set(14, 1)));
        assert!(
            !late_writes
                .permits(8, &WriteSet(smallvec![Extent::from_raw(0, 2).unwrap(), Extent::from_raw(9, 2).unwrap()]))
        );
        assert!(
            late_writes.permits(8, &write_set(15, 9)) && late_writes.permits(8, &write_set(0, 10)),
            "its neighbours"
        );
        assert!(late_writes.permits(7, &write_set(10, 5)), "its own repetition");
        assert!(late_writes.permits(8, &WriteSet::default()), "reads");
    }

    /// Late, it would copy what has been written since its repetition.
    #[test]
    fn writes_to_the_source_of_a_late_copy_wait_too() {
        let extent = |start, blocks| Extent::from_raw(start, blocks).unwrap();
        let copy = |source, to| Request::copy(source, to, Expectations::NONE, Durability::Volatile);
        let mut late_writes = LateWrites::default();
        late_writes.add(1, 7, WriteSet::of(&copy(extent(10, 5), extent(30, 5))));
        assert!(!late_writes.permits(8, &write_set(12, 1)) && !late_writes.permits(8, &write_set(34, 1)));
        assert!(late_writes.permits(8, &write_set(20, 5)), "between them");
        assert!(late_writes.permits(8, &WriteSet::of(&Request::read(extent(10, 5), Expectations::NONE))), "reads");
    }

    #[test]
    fn a_late_write_blocks_others_until_its_incarnation_is_cleared() {
        let mut late_writes = LateWrites::default();
        late_writes.add(1, 7, write_set(0, 1));
        late_writes.add(2, 8, write_set(0, 1));
        assert!(
            !late_writes.permits(7, &write_set(0, 1)) && !late_writes.permits(8, &write_set(0, 1)),
            "two that overlap wait both"
        );
        late_writes.clear(2);
        assert!(late_writes.has(1) && !late_writes.has(2));
        assert!(late_writes.permits(7, &write_set(0, 1)) && !late_writes.permits(9, &write_set(0, 1)));
        late_writes.clear(1);
        assert!(late_writes.permits(9, &write_set(0, 1)));
    }
}
