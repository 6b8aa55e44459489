//! Changes that a client has sent and that have not ended. They must not undo newer changes.
//!
//! A change ends when its reply arrives. If its session is lost, or its future is dropped, the peer may still execute
//! it: the change is late, and other changes to its blocks wait ([`LateWrites`]). A change whose future was dropped
//! ends with its reply. A change whose session was lost ends when the peer reports on a later session that it has
//! fenced the lost one, or after the time that the protocol allows the peer.
//!
//! Invariants: a change is listed before it is sent, and until it has ended. Its future and the connection that waits
//! for the reply have handles to it; dropping the last handle removes it. No list is scanned while no change is late.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

use sealblock_block::{Condition, LateWrites, WriteSet};
use slab::Slab;

/// The changes of one client, over all its sessions.
#[derive(Default)]
pub(crate) struct Changes {
    state: RefCell<ChangesState>,
    /// Notified when a late change has ended, and when a session was lost.
    ended: Condition,
}

#[derive(Default)]
struct ChangesState {
    sent: Slab<Sent>,
    late: LateWrites,
    requests: u64,
}

/// A change that was sent, or is about to be.
struct Sent {
    session: u64,
    request_id: u64,
    write_set: WriteSet,
    handles: u32,
    stage: Stage,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// In flight: a caller waits for it.
    InFlight,
    /// Late, until its reply arrives.
    Abandoned,
    /// Late, until its session is cleared.
    Lost,
}

/// A handle to a change in flight.
pub struct SentChange {
    changes: Rc<Changes>,
    key: usize,
}

impl Changes {
    /// A new request number.
    pub(crate) fn next_request(&self) -> u64 {
        let mut state = self.state.borrow_mut();
        state.requests += 1;
        state.requests
    }

    /// True if the request may change these blocks: no late change of another request overlaps.
    pub(crate) fn permits(&self, request_id: u64, write_set: &WriteSet) -> bool {
        let state = self.state.borrow();
        state.late.is_empty() || state.late.permits(request_id, write_set)
    }

    /// Waits until `ready` returns true. It is called again whenever a late change has ended or a session was lost.
    pub(crate) async fn wait_until(&self, ready: impl FnMut() -> bool) {
        self.ended.wait_until(ready).await;
    }

    /// Makes the waiters of [`Changes::wait_until`] check again.
    pub(crate) fn notify(&self) {
        self.ended.notify();
    }

    /// Lists a change that is about to be sent on this session; `None` for a request that changes nothing.
    pub(crate) fn start(self: &Rc<Self>, session: u64, request_id: u64, write_set: &WriteSet) -> Option<SentChange> {
        if write_set.is_empty() {
            return None;
        }
        let sent = Sent { session, request_id, write_set: write_set.clone(), handles: 1, stage: Stage::InFlight };
        let key = self.state.borrow_mut().sent.insert(sent);
        Some(SentChange { changes: Rc::clone(self), key })
    }

    /// True if changes of this session are late.
    pub(crate) fn has_late(&self, session: u64) -> bool {
        self.state.borrow().late.has(session)
    }

    /// True if any change is late.
    pub(crate) fn has_any_late(&self) -> bool {
        !self.state.borrow().late.is_empty()
    }

    /// Removes the late changes of a session, none of which can be executed any more.
    pub(crate) fn clear(&self, session: u64) {
        self.state.borrow_mut().late.clear(session);
        self.notify();
    }

    /// Removes the late changes of all these sessions, which their peer has fenced.
    pub(crate) fn clear_all(&self, sessions: Range<u64>) {
        self.state.borrow_mut().late.clear_all(sessions);
        self.notify();
    }
}

impl ChangesState {
    /// Marks a change in flight as late.
    fn set_late(&mut self, key: usize, stage: Stage) {
        let sent = &mut self.sent[key];
        if std::mem::replace(&mut sent.stage, stage) == Stage::InFlight {
            self.late.add(sent.session, sent.request_id, sent.write_set.clone());
        }
    }
}

impl SentChange {
    /// Marks the change as late because its connection was lost. The caller must wake the waiters
    /// ([`Changes::notify`]).
    pub(crate) fn lost(self) -> Rc<Changes> {
        self.changes.state.borrow_mut().set_late(self.key, Stage::Lost);
        Rc::clone(&self.changes)
    }

    /// Marks the change as late because no caller waits for it any more. If it was sent, the peer may still execute it.
    fn abandoned(self) {
        let mut state = self.changes.state.borrow_mut();
        if state.sent[self.key].handles > 1 {
            state.set_late(self.key, Stage::Abandoned);
        }
    }
}

impl Clone for SentChange {
    fn clone(&self) -> SentChange {
        self.changes.state.borrow_mut().sent[self.key].handles += 1;
        SentChange { changes: Rc::clone(&self.changes), key: self.key }
    }
}

impl Drop for SentChange {
    fn drop(&mut self) {
        let mut state = self.changes.state.borrow_mut();
        let sent = &mut state.sent[self.key];
        sent.handles -= 1;
        if sent.handles > 0 {
            return;
        }
        let sent = state.sent.remove(self.key);
        if sent.stage == Stage::Abandoned {
            state.late.answered(sent.session, sent.request_id);
            drop(state);
            self.changes.notify();
        }
    }
}

/// The handle of the future that waits for a change. If it is dropped without [`AwaitedChange::end`], the change is
/// abandoned.
pub(crate) struct AwaitedChange(pub(crate) Option<SentChange>);

impl AwaitedChange {
    /// Drops the handle: the change has an outcome, or was lost.
    pub(crate) fn end(mut self) {
        drop(self.0.take());
    }
}

impl Drop for AwaitedChange {
    fn drop(&mut self) {
        if let Some(change) = self.0.take() {
            change.abandoned();
        }
    }
}

#[cfg(test)]
mod tests {
    use sealblock_units::Extent;

    use super::*;

    fn blocks(start: u64) -> WriteSet {
        WriteSet::of_extents([Extent::from_raw(start, 8).unwrap()])
    }

    /// A change of request 1 on session 1: the handle of the future and that of the connection.
    fn sent(changes: &Rc<Changes>) -> (AwaitedChange, SentChange) {
        let change = changes.start(1, 1, &blocks(0)).unwrap();
        (AwaitedChange(Some(change.clone())), change)
    }

    fn is_empty(changes: &Changes) -> bool {
        let state = changes.state.borrow();
        state.late.is_empty() && state.sent.is_empty()
    }

    #[test]
    fn an_answered_change_leaves_nothing() {
        let changes = Rc::<Changes>::default();
        assert!(changes.start(1, 1, &WriteSet::default()).is_none(), "a read");
        let (future, connection) = sent(&changes);
        assert!(changes.permits(2, &blocks(0)), "somebody waits for it");
        drop(connection);
        future.end();
        assert!(is_empty(&changes));
    }

    #[test]
    fn a_lost_change_is_late_until_its_session_is_cleared() {
        let changes = Rc::<Changes>::default();
        let (future, connection) = sent(&changes);
        drop(connection.lost());
        future.end();
        assert!(!changes.permits(2, &blocks(7)) && changes.permits(2, &blocks(8)) && changes.permits(1, &blocks(0)));
        changes.clear_all(0..1);
        assert!(changes.has_late(1), "its own session fences only those before");
        changes.clear_all(0..2);
        assert!(is_empty(&changes));
    }

    #[test]
    fn an_abandoned_change_is_late_until_its_reply_arrives() {
        let changes = Rc::<Changes>::default();
        let (future, connection) = sent(&changes);
        drop(future);
        assert!(!changes.permits(2, &blocks(0)));
        drop(connection);
        assert!(changes.permits(2, &blocks(0)) && is_empty(&changes));
    }

    #[test]
    fn an_abandoned_change_that_is_lost_stays_late() {
        let changes = Rc::<Changes>::default();
        let (future, connection) = sent(&changes);
        drop(future);
        drop(connection.lost());
        assert!(!changes.permits(2, &blocks(0)));
        changes.clear(1);
        assert!(is_empty(&changes));
    }

    #[test]
    fn a_change_that_was_not_sent_is_not_late() {
        let changes = Rc::<Changes>::default();
        drop(AwaitedChange(changes.start(1, 1, &blocks(0))));
        assert!(is_empty(&changes));
    }
}
