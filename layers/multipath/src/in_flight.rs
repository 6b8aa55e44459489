//! Requests in flight per path. Pure.
//!
//! Changes that are in flight when their path fails become late ([`LateWrites`](sealblock_block::LateWrites)).

use std::task::Waker;

use sealblock_block::WriteSet;
use slab::Slab;

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

/// The requests in flight on a path when it failed.
#[derive(Default)]
pub(crate) struct PathLoss {
    /// Wakers of the requests that must take another path.
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

    /// Removes a request that ended on its path, with any outcome. Returns the entry, to be dropped outside of any
    /// borrow.
    pub(crate) fn remove(&mut self, slot: usize) -> impl Sized + use<> {
        self.entries.remove(slot)
    }

    /// Fails if the path was lost; otherwise registers the waker for that event. Returns the previously registered
    /// waker, to be dropped outside of any borrow.
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
    use sealblock_units::Extent;

    fn write_set(start: u64, blocks: u64) -> WriteSet {
        WriteSet::of_extents([Extent::from_raw(start, blocks).unwrap()])
    }

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
}
