//! Connections whose end has arrived although some of their requests were not read yet.
//!
//! A client that closes a connection with unacknowledged changes sends them again on another connection, followed by
//! newer changes. They arrive in that order. But each core reads its own connections independently, and could execute
//! the unread requests of the old connection last. So a receiver first checks whether the end of another connection of
//! its client has arrived, and waits until that connection can execute nothing more.
//!
//! Invariants: a connection is watched from before its first change until its changes in flight are fenced. Requests
//! that were received after the end of that connection had arrived are executed after its changes are fenced.
//!
//! Limit: bytes that have not arrived cannot be detected. Those of an old connection may still be in the network when
//! newer ones arrive on another connection.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sealblock_runtime_reactor::net::{HangupWatch, Hangups, Stream};
use sealblock_runtime_reactor::{now, sleep};

use crate::serving::Registration;
use crate::signal::{ControlSignal, Signals};

/// The first and the longest pause between two checks whether the other connections have ended.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
const MAX_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// The time that a closed connection has to execute its unread requests; then it is aborted. Its client no longer reads
/// replies.
const PATIENCE: Duration = Duration::from_secs(1);

/// The watched connections of a server. `C` is compared to decide whether two of them may belong to the same client.
pub struct Ends<C> {
    members: Mutex<Members<C>>,
    /// The number of different owners among the members.
    owners: AtomicUsize,
}

struct Members<C> {
    /// An epoll descriptor: opened with the first member, and closed after the last one.
    hangups: Option<Hangups>,
    by_number: BTreeMap<u64, Member<C>>,
}

struct Member<C> {
    owner: u64,
    client: C,
    signal: Arc<ControlSignal>,
}

/// Watches a connection until this is dropped.
pub struct WatchedEnd<C> {
    ends: Arc<Ends<C>>,
    hangups: Hangups,
    number: u64,
    _watch: HangupWatch,
}

impl<C> Default for Ends<C> {
    fn default() -> Ends<C> {
        let members = Members { hangups: None, by_number: BTreeMap::new() };
        Ends { members: Mutex::new(members), owners: AtomicUsize::new(0) }
    }
}

impl<C> Ends<C> {
    /// Watches a connection. Connections of one `owner` end together, and never wait for each other.
    ///
    /// # Errors
    /// When the process may open no more descriptors, or the kernel cannot watch one more.
    pub fn watch(
        self: &Arc<Self>,
        stream: &Stream,
        registration: &Registration,
        owner: u64,
        client: C,
    ) -> io::Result<WatchedEnd<C>> {
        let number = registration.number;
        let mut members = self.members();
        let hangups = match &members.hangups {
            Some(hangups) => hangups.clone(),
            None => members.hangups.insert(Hangups::new()?).clone(),
        };
        let watch = hangups.watch(stream, number)?;
        let signal = Arc::clone(&registration.signal);
        members.by_number.insert(number, Member { owner, client, signal });
        self.count_owners(&members);
        drop(members);
        Ok(WatchedEnd { ends: Arc::clone(self), hangups, number, _watch: watch })
    }

    fn count_owners(&self, members: &Members<C>) {
        let mut owners: Vec<u64> = members.by_number.values().map(|member| member.owner).collect();
        owners.sort_unstable();
        owners.dedup();
        self.owners.store(owners.len(), Ordering::SeqCst);
    }

    fn members(&self) -> MutexGuard<'_, Members<C>> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits for something that ends on other cores: calls `has_ended` at once, and then with growing pauses, until it
/// returns true.
pub async fn poll_until(mut has_ended: impl FnMut() -> bool) {
    let mut pause = POLL_INTERVAL;
    while !has_ended() {
        sleep(pause).await;
        pause = (pause * 2).min(MAX_POLL_INTERVAL);
    }
}

impl<C> WatchedEnd<C> {
    /// Waits until every other connection that may belong to the same client, and whose end has arrived, can execute
    /// nothing more. Costs one system call if nothing has ended, and none if only one client is connected.
    ///
    /// A connection whose own end has arrived does not wait: otherwise two connections that have ended would wait for
    /// each other.
    pub async fn wait_for_others(&self, may_be_same: impl Fn(&C, &C) -> bool) {
        if self.ends.owners.load(Ordering::SeqCst) < 2 || !self.hangups.any() {
            return;
        }
        let begun = now();
        poll_until(|| {
            let others = self.ended_before(&may_be_same);
            if now().saturating_duration_since(begun) >= PATIENCE {
                others.iter().for_each(|signal| signal.send(Signals::ABORT));
            }
            others.is_empty()
        })
        .await;
    }

    /// The signals of the client's other connections whose ends have arrived.
    fn ended_before(&self, may_be_same: impl Fn(&C, &C) -> bool) -> Vec<Arc<ControlSignal>> {
        let members = &self.ends.members().by_number;
        let arrived = self.hangups.arrived(members.len());
        let own = members.get(&self.number).filter(|_| !arrived.contains(&self.number));
        let Some(own) = own else { return Vec::new() };
        let others = arrived.iter().filter_map(|number| members.get(number));
        let others = others.filter(|other| other.owner != own.owner && may_be_same(&own.client, &other.client));
        others.map(|other| Arc::clone(&other.signal)).collect()
    }
}

impl<C> Drop for WatchedEnd<C> {
    fn drop(&mut self) {
        let mut members = self.ends.members();
        let member = members.by_number.remove(&self.number);
        self.ends.count_owners(&members);
        let unused = if members.by_number.is_empty() { members.hangups.take() } else { None };
        drop(members);
        drop((member, unused));
    }
}
