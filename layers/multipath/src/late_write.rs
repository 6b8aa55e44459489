//! Blocks that a lost path may still change.
//!
//! A write that was not answered when its path failed may be carried out late: it may lie in a buffer between here and
//! the medium. That does no harm to its own repetition, which writes the same; it would undo another write to the
//! same blocks that was answered in the meantime. So the blocks are fenced: other writes to them wait until the lost path can
//! deliver no more. Pure.

use sealblock_block::Request;
use sealblock_units::Extent;

/// What an operation changes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum WriteSet {
    Nothing,
    One(Extent),
    Many(Vec<Extent>),
}

impl WriteSet {
    pub(crate) fn by(operation: &Request) -> WriteSet {
        match operation {
            Request::Write { extent, .. }
            | Request::WriteZeroes { extent, .. }
            | Request::WriteUncorrectable { extent, .. }
            | Request::Repair { extent, .. } => WriteSet::One(*extent),
            Request::Discard { extents } => WriteSet::Many(extents.clone()),
            Request::Read { .. }
            | Request::Flush
            | Request::Verify { .. }
            | Request::Checksum { .. }
            | Request::BlockStatus { .. }
            | Request::Compare { .. }
            | Request::ReadReserved { .. }
            | Request::WriteReserved { .. } => WriteSet::Nothing,
        }
    }

    fn extents(&self) -> &[Extent] {
        match self {
            WriteSet::Nothing => &[],
            WriteSet::One(extent) => std::slice::from_ref(extent),
            WriteSet::Many(extents) => extents,
        }
    }

    pub(crate) fn is_nothing(&self) -> bool {
        self.extents().is_empty()
    }

    fn overlaps(&self, other: &WriteSet) -> bool {
        self.extents().iter().any(|a| other.extents().iter().any(|b| a.overlaps(*b)))
    }
}

/// What incarnation of a path left unanswered, and of which request.
#[derive(Debug)]
struct LateWrite {
    incarnation: u64,
    request: u64,
    touched: WriteSet,
}

/// All fences that stand.
#[derive(Default, Debug)]
pub(crate) struct LateWrites(Vec<LateWrite>);

impl LateWrites {
    /// A write of this request was left unanswered.
    pub(crate) fn add(&mut self, incarnation: u64, request: u64, touched: WriteSet) {
        self.0.push(LateWrite { incarnation, request, touched });
    }

    /// Whether a request may change these blocks: no other request's fence stands before them.
    pub(crate) fn permits(&self, request: u64, touched: &WriteSet) -> bool {
        self.0.iter().all(|fence| fence.request == request || !fence.touched.overlaps(touched))
    }

    /// Whether this incarnation has left anything.
    pub(crate) fn has(&self, incarnation: u64) -> bool {
        self.0.iter().any(|fence| fence.incarnation == incarnation)
    }

    /// The incarnation can deliver no more.
    pub(crate) fn clear(&mut self, incarnation: u64) {
        self.0.retain(|fence| fence.incarnation != incarnation);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touched(start: u64, blocks: u64) -> WriteSet {
        WriteSet::One(Extent::from_raw(start, blocks).unwrap())
    }

    #[test]
    fn other_writes_to_the_same_blocks_wait_and_nothing_else_does() {
        let mut fences = LateWrites::default();
        fences.add(1, 7, touched(10, 5));
        assert!(!fences.permits(8, &touched(14, 1)));
        assert!(
            !fences.permits(8, &WriteSet::Many(vec![Extent::from_raw(0, 2).unwrap(), Extent::from_raw(9, 2).unwrap()]))
        );
        assert!(fences.permits(8, &touched(15, 9)) && fences.permits(8, &touched(0, 10)), "its neighbours");
        assert!(fences.permits(7, &touched(10, 5)), "its own repetition");
        assert!(fences.permits(8, &WriteSet::Nothing), "reads");
    }

    #[test]
    fn a_fence_stands_until_its_incarnation_can_deliver_no_more() {
        let mut fences = LateWrites::default();
        fences.add(1, 7, touched(0, 1));
        fences.add(2, 8, touched(0, 1));
        assert!(!fences.permits(7, &touched(0, 1)) && !fences.permits(8, &touched(0, 1)), "two that overlap wait both");
        fences.clear(2);
        assert!(fences.has(1) && !fences.has(2));
        assert!(fences.permits(7, &touched(0, 1)) && !fences.permits(9, &touched(0, 1)));
        fences.clear(1);
        assert!(fences.permits(9, &touched(0, 1)));
    }
}
