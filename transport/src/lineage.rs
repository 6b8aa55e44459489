//! State that outlives a client's device: its identity at the peer, and changes that may still be executed.
//!
//! A device that is closed with unacknowledged changes, because its sessions were lost for too long, is often opened
//! again: a mirror reattaches its replica, a multipath device its path. The new device must not write to blocks that
//! the old device's changes may still overwrite. So it continues the lineage of the old device: a peer that fences
//! sessions gets higher session numbers of the same client, and with another peer the new device waits as long as the
//! old one would have waited.
//!
//! Shape: lineages that wait for their next device are kept in a list of the reactor's thread, by peer, and only while
//! changes are late. An open device has a lineage of its own, so two devices to one peer never share one.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

use sealblock_runtime_reactor::{now, sleep, spawn};

use crate::changes::Changes;
use crate::random_id;

/// The time after which a server executes nothing more of a connection that was lost, unless it fences it: a gateway gives a request up
/// after 30 s, which it notices up to an eighth later, and its own server fences it then.
pub const QUIESCE: Duration = Duration::from_secs(40);

/// The maximum number of lineages that wait for their next device. If there are more, the oldest is dropped.
const MAX_KEPT: usize = 1024;

thread_local! {
    static KEPT: RefCell<Vec<Kept>> = const { RefCell::new(Vec::new()) };
}

/// The state of a lineage whose device is closed.
struct Kept {
    peer: String,
    client: [u8; 16],
    sessions: u64,
    changes: Rc<Changes>,
    ended: Vec<u16>,
    server: Vec<[u8; 16]>,
    since: u64,
    /// The time from which none of its changes is late any more.
    until: Instant,
}

/// The lineage of a device; see the module's header. If it is dropped while changes are late, it is kept for the next
/// device to its peer.
pub struct Lineage {
    peer: String,
    quiesce: Duration,
    client: [u8; 16],
    sessions: Cell<u64>,
    pub(crate) changes: Rc<Changes>,
    /// The peer's identifiers of the sessions that have ended and that the peer may still consider alive.
    ended: RefCell<Vec<u16>>,
    /// What the server of the last session listed.
    server: RefCell<Vec<[u8; 16]>>,
    /// The first of the last sessions that were all at this server: only these can it fence.
    since: Cell<u64>,
    /// The time from which no change of earlier devices is late any more; `None` once this device has had a session.
    until: Cell<Option<Instant>>,
}

impl Lineage {
    /// The lineage of a new device to this peer. `quiesce` after a session has ended, none of its changes can be
    /// executed any more.
    pub fn of(peer: String, quiesce: Duration) -> Lineage {
        let kept = KEPT.with_borrow_mut(|kept| {
            kept.retain(|kept| kept.until > now());
            kept.iter().position(|kept| kept.peer == peer).map(|at| kept.remove(at))
        });
        let Some(Kept { client, sessions, changes, ended, server, since, until, .. }) = kept else {
            let (client, changes) = (random_id(), Rc::default());
            let (sessions, ended, until) = (Cell::default(), RefCell::default(), Cell::default());
            let (server, since) = (RefCell::default(), Cell::default());
            return Lineage { peer, quiesce, client, sessions, changes, ended, server, since, until };
        };
        let late = Rc::downgrade(&changes);
        spawn(async move {
            sleep(until.saturating_duration_since(now())).await;
            if let Some(changes) = late.upgrade() {
                changes.clear_all(0..sessions + 1);
            }
        });
        let (sessions, ended, until) = (Cell::new(sessions), RefCell::new(ended), Cell::new(Some(until)));
        let (server, since) = (RefCell::new(server), Cell::new(since));
        Lineage { peer, quiesce, client, sessions, changes, ended, server, since, until }
    }

    /// The client's identity at its peer.
    pub fn client(&self) -> [u8; 16] {
        self.client
    }

    /// A session number that is higher than all previous ones.
    pub fn next_session(&self) -> u64 {
        self.sessions.set(self.sessions.get() + 1);
        self.sessions.get()
    }

    /// Records that a session of this device accepts requests.
    pub(crate) fn session_started(&self) {
        self.until.set(None);
    }

    /// Records what the server of the session that is being opened lists ([`ListedIdentities`](crate::ListedIdentities)). True if it
    /// can fence the sessions before: it is the same one, or the device is its own, which no other server has open. Two gateways of one
    /// device, behind one address, know nothing of each other's requests.
    pub fn is_at_same_server(&self, listed: &[[u8; 16]]) -> bool {
        let before = self.server.replace(listed.to_vec());
        let is_same =
            self.since.get() == 0 || before.first() == listed.first() || (before.len(), listed.len()) == (1, 1);
        if !is_same || self.since.get() == 0 {
            self.since.set(self.sessions.get());
        }
        if !is_same {
            self.ended.take();
        }
        is_same
    }

    /// Removes the changes of the sessions at the same server before this one, which has fenced them.
    pub(crate) fn fenced_at(&self, session: u64) {
        self.changes.clear_all(self.since.get()..session);
    }

    /// The peer's identifiers of the sessions that have ended, without those that were passed to
    /// [`Lineage::are_ended`].
    pub fn ended(&self) -> Vec<u16> {
        self.ended.borrow().clone()
    }

    /// Records a session that has ended and that the peer may still consider alive.
    pub fn add_ended(&self, session: u16) {
        self.ended.borrow_mut().push(session);
    }

    /// Records that the peer has ended these sessions too.
    pub fn are_ended(&self, sessions: &[u16]) {
        self.ended.borrow_mut().retain(|session| !sessions.contains(session));
    }
}

impl Drop for Lineage {
    fn drop(&mut self) {
        if !self.changes.has_any_late() {
            return;
        }
        let kept = Kept {
            peer: std::mem::take(&mut self.peer),
            client: self.client,
            sessions: self.sessions.get(),
            changes: Rc::clone(&self.changes),
            ended: self.ended.take(),
            server: self.server.take(),
            since: self.since.get(),
            until: self.until.get().unwrap_or_else(|| now() + self.quiesce),
        };
        // The thread may be ending.
        let _ = KEPT.try_with(|all| {
            let mut all = all.borrow_mut();
            if all.len() >= MAX_KEPT {
                all.remove(0);
            }
            all.push(kept);
        });
    }
}

#[cfg(test)]
mod tests {
    use sealblock_block::WriteSet;
    use sealblock_runtime_reactor::{Config, Reactor};

    use super::*;

    const QUIESCE: Duration = Duration::from_secs(60);

    /// Opens a device to a peer, loses a change on its first session, and closes the device; returns its client.
    fn lose(peer: &str, quiesce: Duration) -> [u8; 16] {
        let lineage = Lineage::of(peer.to_owned(), quiesce);
        let number = lineage.next_session();
        lineage.session_started();
        drop(lineage.changes.start(number, 1, &WriteSet::reserved_area()).unwrap().lost());
        lineage.client()
    }

    fn to(peer: &str) -> Lineage {
        Lineage::of(peer.to_owned(), QUIESCE)
    }

    fn run(test: impl AsyncFnOnce()) {
        Reactor::new(Config { pool_arena_bytes: 0, ..Config::default() }).unwrap().block_on(test());
    }

    #[test]
    fn a_device_that_is_opened_again_goes_on_with_what_is_late() {
        run(async || {
            let old = lose("peer", QUIESCE);
            assert_ne!(to("another peer").client(), old);
            // After a failed attempt the lineage is kept for the next one.
            drop(to("peer"));
            let new = to("peer");
            assert_eq!((new.client(), new.next_session()), (old, 2));
            assert!(new.changes.has_any_late());
            assert_ne!(to("peer").client(), old, "one device has it");
        });
    }

    #[test]
    fn a_server_fences_the_sessions_that_it_had_and_no_others() {
        run(async || {
            let lineage = to("peer");
            let lose = |request: u64| {
                let number = lineage.sessions.get();
                drop(lineage.changes.start(number, request, &WriteSet::reserved_area()).unwrap().lost());
                lineage.add_ended(number as u16);
            };
            let number = || lineage.next_session();
            // Two gateways of one device: each lists its own device first.
            let [one, other] = [1, 2].map(|own| [[own; 16], [9; 16]]);
            number();
            assert!(lineage.is_at_same_server(&one), "there was none before");
            lose(1);
            let second = number();
            assert!(lineage.is_at_same_server(&one));
            lineage.fenced_at(second);
            assert!(!lineage.changes.has_any_late());
            lose(2);
            number();
            assert!(!lineage.is_at_same_server(&other) && lineage.ended().is_empty());
            lose(3);
            let fourth = number();
            assert!(lineage.is_at_same_server(&other));
            assert_eq!(lineage.ended(), [3], "what the other one knows");
            lineage.fenced_at(fourth);
            assert_eq!([2, 3].map(|session| lineage.changes.has_late(session)), [true, false]);
            number();
            assert!(!lineage.is_at_same_server(&one), "it has seen nothing of the session between");
            // What a server has open itself, no other one has: after its restart nothing of before is in flight.
            number();
            assert!(!lineage.is_at_same_server(&[[5; 16]]));
            number();
            assert!(lineage.is_at_same_server(&[[6; 16]]));
            number();
            assert!(!lineage.is_at_same_server(&[]), "it does not say");
            assert!(lineage.is_at_same_server(&[]));
        });
    }

    #[test]
    fn what_can_come_no_more_is_not_kept() {
        run(async || {
            let quiet = to("peer").client();
            assert_ne!(to("peer").client(), quiet);
            let old = lose("peer", Duration::ZERO);
            assert_ne!(to("peer").client(), old);
        });
    }

    #[test]
    fn a_new_device_waits_no_longer_than_the_old_one_would_have() {
        run(async || {
            lose("peer", Duration::from_millis(20));
            drop(to("peer"));
            let new = to("peer");
            while new.changes.has_any_late() {
                sleep(Duration::from_millis(1)).await;
            }
        });
    }
}
