//! Changes that a client has sent and that have not ended, so that none of them undoes a newer one.
//!
//! A change ends when its reply arrives. One whose session is lost, or whose future is dropped, may still be executed by the peer:
//! it is late, and other changes of its blocks wait ([`LateWrites`]). A dropped one ends with its reply after all; a lost one when a later session says
//! that the peer has fenced the lost one, or when the peer has had the protocol's time to end it.
//!
//! Invariants: a change is listed from before it is sent until it has ended; handles of it are held by its future and by the
//! connection that waits for the reply, so that the last of them removes it; nothing is scanned while nothing is late.

use std::cell::RefCell;
use std::rc::Rc;

use sealblock_block::{Condition, LateWrites, WriteSet};
use slab::Slab;

/// The changes of one client, over all its sessions.
#[derive(Default)]
pub(crate) struct Changes {
    state: RefCell<ChangesState>,
    /// Notified when something is late no more, and when a session was lost.
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
    /// A caller waits for it.
    InFlight,
    /// Late, until its reply arrives.
    Abandoned,
    /// Late, until its session is cleared.
    Lost,
}

/// A handle of a change in flight.
pub struct SentChange {
    changes: Rc<Changes>,
    key: usize,
}

impl Changes {
    /// A number for a request, never used before.
    pub(crate) fn next_request(&self) -> u64 {
        let mut state = self.state.borrow_mut();
        state.requests += 1;
        state.requests
    }

    /// True if a request may change this: no late change of another one overlaps.
    pub(crate) fn permits(&self, request_id: u64, write_set: &WriteSet) -> bool {
        let state = self.state.borrow();
        state.late.is_empty() || state.late.permits(request_id, write_set)
    }

    /// Waits until `ready`, which is looked at again whenever something is late no more or a session was lost.
    pub(crate) async fn wait_until(&self, ready: impl FnMut() -> bool) {
        self.ended.wait_until(ready).await;
    }

    /// Has those that wait look again.
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

    /// A session can deliver nothing more.
    pub(crate) fn clear(&self, session: u64) {
        self.state.borrow_mut().late.clear(session);
        self.notify();
    }

    /// The peer has fenced all sessions before this one.
    pub(crate) fn clear_before(&self, session: u64) {
        self.state.borrow_mut().late.clear_before(session);
        self.notify();
    }
}

impl ChangesState {
    /// Makes a change in flight late.
    fn set_late(&mut self, key: usize, stage: Stage) {
        let sent = &mut self.sent[key];
        if std::mem::replace(&mut sent.stage, stage) == Stage::InFlight {
            self.late.add(sent.session, sent.request_id, sent.write_set.clone());
        }
    }
}

impl SentChange {
    /// Its connection was lost before its reply arrived. Those that wait must be told ([`Changes::notify`]).
    pub(crate) fn lost(self) -> Rc<Changes> {
        self.changes.state.borrow_mut().set_late(self.key, Stage::Lost);
        Rc::clone(&self.changes)
    }

    /// No caller waits for it any more. If it was sent, it may still be executed.
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

/// The handle of the future that waits for a change. Dropped without [`AwaitedChange::end`], it abandons the change.
pub(crate) struct AwaitedChange(pub(crate) Option<SentChange>);

impl AwaitedChange {
    /// The change has an outcome, or was lost.
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

    /// A change of request 1 on session 1, as the future and the connection hold it.
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
        changes.clear_before(1);
        assert!(changes.has_late(1), "its own session fences only those before");
        changes.clear_before(2);
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
