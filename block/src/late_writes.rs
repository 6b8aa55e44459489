//! Changes that may still be executed although no caller waits for them any more, because their session was lost or
//! their future was dropped. Pure.
//!
//! A change that was in flight when its session was lost can be executed late: it may be in a buffer between the client
//! and the medium. A repetition of the change writes the same data, so a late execution does not harm it. But it would
//! undo a newer change of the same blocks that completed in the meantime. So other changes of these blocks wait until
//! the lost session can deliver nothing more.

use std::ops::Range;

use sealblock_units::Extent;
use smallvec::SmallVec;

use crate::{Operation, Request};

/// What a request changes: its blocks, and whether it writes to the reserved area. For a Copy this includes the source,
/// which must be unchanged if the Copy is executed late.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct WriteSet {
    extents: SmallVec<[Extent; 1]>,
    has_reserved: bool,
}

impl WriteSet {
    /// What the request changes.
    pub fn of(request: &Request) -> WriteSet {
        WriteSet {
            extents: request.changed_extents().iter().copied().chain(request.source()).collect(),
            has_reserved: matches!(request.operation, Operation::WriteReserved(..)),
        }
    }

    /// The set with these blocks.
    pub fn of_extents(extents: impl IntoIterator<Item = Extent>) -> WriteSet {
        WriteSet { extents: extents.into_iter().collect(), has_reserved: false }
    }

    /// The set with the reserved area.
    pub fn reserved_area() -> WriteSet {
        WriteSet { extents: SmallVec::new(), has_reserved: true }
    }

    /// True if nothing is changed.
    pub fn is_empty(&self) -> bool {
        self.extents.is_empty() && !self.has_reserved
    }

    /// True if both change the same blocks, or both the reserved area.
    pub fn overlaps(&self, other: &WriteSet) -> bool {
        self.has_reserved && other.has_reserved
            || self.extents.iter().any(|a| other.extents.iter().any(|b| a.overlaps(*b)))
    }
}

/// A change that was in flight when this session was lost, or when its future was dropped.
#[derive(Debug)]
struct LateWrite {
    session: u64,
    request_id: u64,
    write_set: WriteSet,
}

/// All changes that lost sessions may still deliver. A session is one incarnation of a connection or path; its number
/// is used once.
#[derive(Default, Debug)]
pub struct LateWrites(Vec<LateWrite>);

impl LateWrites {
    /// Adds a change of this request that was in flight on this session.
    pub fn add(&mut self, session: u64, request_id: u64, write_set: WriteSet) {
        self.0.push(LateWrite { session, request_id, write_set });
    }

    /// True if there are no such changes.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// True if a request may make these changes: no late change of another request overlaps them.
    pub fn permits(&self, request_id: u64, write_set: &WriteSet) -> bool {
        self.0.iter().all(|late| late.request_id == request_id || !late.write_set.overlaps(write_set))
    }

    /// True if this session may still deliver a change.
    pub fn has(&self, session: u64) -> bool {
        self.0.iter().any(|late| late.session == session)
    }

    /// Removes the changes of a session that can deliver nothing more.
    pub fn clear(&mut self, session: u64) {
        self.0.retain(|late| late.session != session);
    }

    /// Removes the changes of all these sessions: their peer has fenced them.
    pub fn clear_all(&mut self, sessions: Range<u64>) {
        self.0.retain(|late| !sessions.contains(&late.session));
    }

    /// Removes a change whose reply arrived after all.
    pub fn answered(&mut self, session: u64, request_id: u64) {
        self.0.retain(|late| late.session != session || late.request_id != request_id);
    }
}

#[cfg(test)]
mod tests {
    use crate::Expectations;
    use sealblock_runtime_memory::Slice;
    use smallvec::smallvec;

    use super::*;
    use crate::{Durability, ReservedArea};

    fn extent(start: u64, blocks: u64) -> Extent {
        Extent::from_raw(start, blocks).unwrap()
    }

    fn write_set(start: u64, blocks: u64) -> WriteSet {
        WriteSet::of_extents([extent(start, blocks)])
    }

    #[test]
    fn other_writes_to_the_same_blocks_wait_and_nothing_else_does() {
        let mut late_writes = LateWrites::default();
        late_writes.add(1, 7, write_set(10, 5));
        assert!(!late_writes.permits(8, &write_set(14, 1)));
        let several = WriteSet { extents: smallvec![extent(0, 2), extent(9, 2)], has_reserved: false };
        assert!(!late_writes.permits(8, &several));
        assert!(late_writes.permits(8, &write_set(15, 9)) && late_writes.permits(8, &write_set(0, 10)), "neighbours");
        assert!(late_writes.permits(7, &write_set(10, 5)), "its own repetition");
        assert!(late_writes.permits(8, &WriteSet::default()), "reads");
        assert!(late_writes.permits(8, &WriteSet::reserved_area()), "what is not made of blocks");
    }

    /// A late Copy would copy what was written to its source since its repetition.
    #[test]
    fn writes_to_the_source_of_a_late_copy_wait_too() {
        let copy = |source, to| Request::copy(source, to, Expectations::NONE, Durability::Volatile);
        let mut late_writes = LateWrites::default();
        late_writes.add(1, 7, WriteSet::of(&copy(extent(10, 5), extent(30, 5))));
        assert!(!late_writes.permits(8, &write_set(12, 1)) && !late_writes.permits(8, &write_set(34, 1)));
        assert!(late_writes.permits(8, &write_set(20, 5)), "between them");
        assert!(late_writes.permits(8, &WriteSet::of(&Request::read(extent(10, 5), Expectations::NONE))), "reads");
    }

    /// An older label that overwrites a newer one would undo what a mirror has recorded.
    #[test]
    fn a_late_write_to_the_reserved_area_holds_back_other_writes_to_it() {
        let label = WriteSet::of(&Request::write_reserved(ReservedArea::GroupLabel, Slice::empty()));
        let mut late_writes = LateWrites::default();
        late_writes.add(1, 7, label.clone());
        assert!(!label.is_empty() && !late_writes.permits(8, &label) && late_writes.permits(7, &label));
        assert!(late_writes.permits(8, &write_set(0, 1)));
        assert!(WriteSet::of(&Request::read_reserved(ReservedArea::GroupLabel)).is_empty());
    }

    #[test]
    fn a_late_write_blocks_others_until_its_session_is_cleared() {
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
        late_writes.answered(1, 8);
        assert!(late_writes.has(1), "another request's");
        late_writes.answered(1, 7);
        assert!(late_writes.permits(9, &write_set(0, 1)) && late_writes.is_empty());
    }

    #[test]
    fn a_fenced_peer_clears_the_sessions_before_it() {
        let mut late_writes = LateWrites::default();
        for session in [1, 2, 3] {
            late_writes.add(session, session, write_set(session, 1));
        }
        late_writes.clear_all(0..3);
        assert_eq!([1, 2, 3].map(|session| late_writes.has(session)), [false, false, true]);
    }
}
