//! Blocks that a lost path may still change.
//!
//! A write that was not answered when its path failed may be carried out late: it may lie in a buffer between here and
//! the medium. That does no harm to its own repetition, which writes the same; it would undo another write to the
//! same blocks that was answered in the meantime. So the blocks are fenced: other writes to them wait until the lost path can
//! deliver no more. Pure.

use sealblock_block::Operation;
use sealblock_units::Extent;

/// What an operation changes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Touched {
    Nothing,
    One(Extent),
    Many(Vec<Extent>),
}

impl Touched {
    pub(crate) fn by(operation: &Operation) -> Touched {
        match operation {
            Operation::Write { extent, .. }
            | Operation::WriteZeroes { extent, .. }
            | Operation::WriteUncorrectable { extent, .. }
            | Operation::Repair { extent, .. } => Touched::One(*extent),
            Operation::Discard { extents } => Touched::Many(extents.clone()),
            Operation::Read { .. }
            | Operation::Flush
            | Operation::Verify { .. }
            | Operation::Digest { .. }
            | Operation::Allocation { .. }
            | Operation::Compare { .. }
            | Operation::ReadAnnex { .. }
            | Operation::WriteAnnex { .. } => Touched::Nothing,
        }
    }

    fn extents(&self) -> &[Extent] {
        match self {
            Touched::Nothing => &[],
            Touched::One(extent) => std::slice::from_ref(extent),
            Touched::Many(extents) => extents,
        }
    }

    pub(crate) fn is_nothing(&self) -> bool {
        self.extents().is_empty()
    }

    fn overlaps(&self, other: &Touched) -> bool {
        self.extents().iter().any(|a| other.extents().iter().any(|b| a.overlaps(*b)))
    }
}

/// What incarnation of a path left unanswered, and of which request.
#[derive(Debug)]
struct Fence {
    incarnation: u64,
    request: u64,
    touched: Touched,
}

/// All fences that stand.
#[derive(Default, Debug)]
pub(crate) struct Fences(Vec<Fence>);

impl Fences {
    /// A write of this request was left unanswered.
    pub(crate) fn raise(&mut self, incarnation: u64, request: u64, touched: Touched) {
        self.0.push(Fence { incarnation, request, touched });
    }

    /// Whether a request may change these blocks: no other request's fence stands before them.
    pub(crate) fn admit(&self, request: u64, touched: &Touched) -> bool {
        self.0.iter().all(|fence| fence.request == request || !fence.touched.overlaps(touched))
    }

    /// Whether this incarnation has left anything.
    pub(crate) fn stand(&self, incarnation: u64) -> bool {
        self.0.iter().any(|fence| fence.incarnation == incarnation)
    }

    /// The incarnation can deliver no more.
    pub(crate) fn lift(&mut self, incarnation: u64) {
        self.0.retain(|fence| fence.incarnation != incarnation);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touched(start: u64, blocks: u64) -> Touched {
        Touched::One(Extent::from_raw(start, blocks).unwrap())
    }

    #[test]
    fn other_writes_to_the_same_blocks_wait_and_nothing_else_does() {
        let mut fences = Fences::default();
        fences.raise(1, 7, touched(10, 5));
        assert!(!fences.admit(8, &touched(14, 1)));
        assert!(
            !fences.admit(8, &Touched::Many(vec![Extent::from_raw(0, 2).unwrap(), Extent::from_raw(9, 2).unwrap()]))
        );
        assert!(fences.admit(8, &touched(15, 9)) && fences.admit(8, &touched(0, 10)), "its neighbours");
        assert!(fences.admit(7, &touched(10, 5)), "its own repetition");
        assert!(fences.admit(8, &Touched::Nothing), "reads");
    }

    #[test]
    fn a_fence_stands_until_its_incarnation_can_deliver_no_more() {
        let mut fences = Fences::default();
        fences.raise(1, 7, touched(0, 1));
        fences.raise(2, 8, touched(0, 1));
        assert!(!fences.admit(7, &touched(0, 1)) && !fences.admit(8, &touched(0, 1)), "two that overlap wait both");
        fences.lift(2);
        assert!(fences.stand(1) && !fences.stand(2));
        assert!(fences.admit(7, &touched(0, 1)) && !fences.admit(9, &touched(0, 1)));
        fences.lift(1);
        assert!(fences.admit(9, &touched(0, 1)));
    }
}
