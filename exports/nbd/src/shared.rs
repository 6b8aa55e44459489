//! What the cores of a server share: what it offers, its connections, and the order to end.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sealblock_layers_cross_core::SharedDevice;
use sealblock_protocols_nbd as core;
use sealblock_runtime_reactor::{Budget, CoreAddress, now};

use crate::export::{Export, SetupError};
use crate::limits::Limits;
use crate::signal::{ControlOrder, ControlSignal};

/// What is offered.
#[derive(Default)]
struct ExportList {
    /// Each is there for as long as it is offered or connections use it.
    exports: Vec<Arc<Export>>,
    /// What clients are told of each.
    advertised: Arc<[core::Export]>,
    /// The name of the export for clients that name none; the first of all unless one is named.
    default: Option<String>,
}

pub(crate) struct ServerState {
    pub(crate) limits: Limits,
    pub(crate) budget: Arc<Budget>,
    exports: Mutex<ExportList>,
    cores: Mutex<Vec<CoreAddress>>,
    next: AtomicUsize,
    /// Whoever is to hear of an order, by number. Connections are in it for as long as they live.
    participants: Mutex<Participants>,
}

#[derive(Default)]
struct Participants {
    order: Option<ControlOrder>,
    all: BTreeMap<usize, Participant>,
}

struct Participant {
    kind: ParticipantKind,
    signal: Arc<ControlSignal>,
    /// What a connection chose, where it comes from, and since when.
    chosen: Option<(Arc<Export>, String, Instant)>,
}

/// A connection that uses an export.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Client {
    /// Which.
    pub export: String,
    /// Where it comes from.
    pub from: String,
    /// For how long it has used it.
    pub connected: Duration,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum ParticipantKind {
    Listener,
    Connection,
}

/// A place among those who hear of orders, given back when it is dropped.
pub(crate) struct Registration {
    pub(crate) server: Arc<ServerState>,
    pub(crate) number: usize,
    pub(crate) signal: Arc<ControlSignal>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ServerState {
    pub(crate) fn new(limits: Limits) -> ServerState {
        ServerState {
            budget: limits.budget(),
            limits,
            exports: Mutex::default(),
            cores: Mutex::default(),
            next: AtomicUsize::new(0),
            participants: Mutex::default(),
        }
    }

    /// What clients are told that connect now.
    pub(crate) fn advertised(&self) -> Arc<[core::Export]> {
        Arc::clone(&lock(&self.exports).advertised)
    }

    /// Has clients that name no export get the one of this name, or none as long as it is not there.
    pub(crate) fn set_default(&self, name: Option<String>) {
        lock(&self.exports).default = name;
    }

    /// The place of the export for clients that name none, among what they are told.
    pub(crate) fn default_of(&self, info: &[core::Export]) -> Option<usize> {
        match &lock(&self.exports).default {
            Some(name) => info.iter().position(|export| export.name == *name),
            None => (!info.is_empty()).then_some(0),
        }
    }

    /// Offers one more export, behind the others.
    pub(crate) fn add(&self, export: Export) -> Result<(), SetupError> {
        let info = export.advertised();
        if !info.is_valid() {
            return Err(SetupError::TooLong(info.name.chars().take(80).collect()));
        }
        let mut offered = lock(&self.exports);
        if offered.advertised.iter().any(|other| other.name == info.name) {
            return Err(SetupError::Duplicate(info.name));
        }
        offered.exports.push(Arc::new(export));
        offered.advertised = offered.advertised.iter().cloned().chain([info]).collect();
        Ok(())
    }

    /// Offers an export no more, and has its connections end.
    pub(crate) fn remove(&self, name: &str) -> Result<(), SetupError> {
        let removed = {
            let mut offered = lock(&self.exports);
            let at = offered.advertised.iter().position(|info| info.name == name);
            let at = at.ok_or_else(|| SetupError::Unknown(name.to_owned()))?;
            let others = offered.advertised.iter().enumerate().filter(|(index, _)| *index != at);
            offered.advertised = others.map(|(_, other)| other.clone()).collect();
            offered.exports.remove(at)
        };
        // Those who chose it when it had another size, too.
        let uses = |member: &&Participant| member.chosen.as_ref().is_some_and(|(chosen, ..)| chosen.is_same(&removed));
        let signals: Vec<_> =
            lock(&self.participants).all.values().filter(uses).map(|user| Arc::clone(&user.signal)).collect();
        signals.iter().for_each(|signal| signal.send(ControlOrder::Drain));
        Ok(())
    }

    /// Has an export show another size to those who connect from now on.
    pub(crate) fn resize(&self, name: &str, device: SharedDevice) -> Result<(), SetupError> {
        let mut offered = lock(&self.exports);
        let at = offered.advertised.iter().position(|info| info.name == name);
        let at = at.ok_or_else(|| SetupError::Unknown(name.to_owned()))?;
        let export = offered.exports[at].resized(device);
        let info = export.advertised();
        if !info.is_valid() {
            return Err(SetupError::TooLong(info.name.chars().take(80).collect()));
        }
        let before = std::mem::replace(&mut offered.exports[at], Arc::new(export));
        offered.advertised =
            offered.advertised.iter().enumerate().map(|(i, was)| if i == at { &info } else { was }).cloned().collect();
        drop(offered);
        drop(before);
        Ok(())
    }

    /// A place for one more; `None` for a connection above the limit.
    pub(crate) fn register(self: &Arc<Self>, kind: ParticipantKind) -> Option<Registration> {
        let mut members = lock(&self.participants);
        if kind == ParticipantKind::Connection && members.connections() >= self.limits.connections {
            return None;
        }
        let signal = Arc::new(ControlSignal::default());
        if let Some(order) = members.order {
            signal.send(order);
        }
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        members.all.insert(number, Participant { kind, signal: Arc::clone(&signal), chosen: None });
        Some(Registration { server: Arc::clone(self), number, signal: signal })
    }

    pub(crate) fn connections(&self) -> usize {
        lock(&self.participants).connections()
    }

    /// The connections that have chosen an export, in the order of their coming.
    pub(crate) fn clients(&self) -> Vec<Client> {
        let members = lock(&self.participants);
        let chosen = members.all.values().filter_map(|member| member.chosen.as_ref());
        let client = |(export, from, since): &(Arc<Export>, String, Instant)| Client {
            export: export.name().to_owned(),
            from: from.clone(),
            connected: now().saturating_duration_since(*since),
        };
        chosen.map(client).collect()
    }

    /// Tells everybody. An order is never taken back.
    pub(crate) fn signal_all(&self, order: ControlOrder) {
        let signals: Vec<Arc<ControlSignal>> = {
            let mut members = lock(&self.participants);
            members.order = members.order.max(Some(order));
            members.all.values().map(|member| Arc::clone(&member.signal)).collect()
        };
        signals.iter().for_each(|signal| signal.send(order));
    }

    /// The core for a connection of this number, in turn; `None` for the one that accepted it.
    pub(crate) fn core_of(&self, number: usize) -> Option<CoreAddress> {
        let cores = lock(&self.cores);
        let index = number.checked_rem(cores.len())?;
        cores.get(index).cloned()
    }

    pub(crate) fn set_cores(&self, addresses: Vec<CoreAddress>) {
        *lock(&self.cores) = addresses;
    }
}

impl Participants {
    fn connections(&self) -> usize {
        self.all.values().filter(|member| member.kind == ParticipantKind::Connection).count()
    }
}

impl Registration {
    /// Notes that this connection, from there, chose what it was told so, if that is still offered.
    pub(crate) fn choose(&self, info: &core::Export, from: &str) -> Option<Arc<Export>> {
        // Held until the choice is noted, so that whoever takes the export away after that finds its user.
        let offered = lock(&self.server.exports);
        // It may have grown since the client was told; of one that shrank the client would know too much.
        let is_it = |other: &core::Export| {
            other.size_bytes >= info.size_bytes
                && core::Export { size_bytes: other.size_bytes, ..info.clone() } == *other
        };
        let at = offered.advertised.iter().position(is_it)?;
        let chosen = Arc::clone(&offered.exports[at]);
        if let Some(member) = lock(&self.server.participants).all.get_mut(&self.number) {
            member.chosen = Some((Arc::clone(&chosen), from.to_owned(), now()));
        }
        Some(chosen)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let member = lock(&self.server.participants).all.remove(&self.number);
        drop(member);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared(connections: usize) -> Arc<ServerState> {
        Arc::new(ServerState::new(Limits { connections, ..Limits::default() }))
    }

    #[test]
    fn places_for_connections_are_limited_and_given_back() {
        let shared = shared(1);
        let _listener = shared.register(ParticipantKind::Listener).unwrap();
        let first = shared.register(ParticipantKind::Connection).unwrap();
        assert!(shared.register(ParticipantKind::Connection).is_none());
        assert_eq!(shared.connections(), 1);
        drop(first);
        assert!(shared.register(ParticipantKind::Connection).is_some());
    }

    #[test]
    fn who_names_no_export_gets_the_one_that_is_meant_or_none() {
        let shared = shared(1);
        let info = |name: &str| core::Export {
            name: name.to_owned(),
            description: String::new(),
            size_bytes: 4096,
            block_bytes: 512,
            writable: true,
            trim: false,
            write_zeroes: false,
        };
        assert_eq!(shared.default_of(&[]), None);
        assert_eq!(shared.default_of(&[info("b"), info("a")]), Some(0), "the first unless something is said");
        shared.set_default(Some("a".to_owned()));
        assert_eq!(shared.default_of(&[info("b"), info("a")]), Some(1));
        assert_eq!(shared.default_of(&[info("b")]), None, "and not another one in its place");
    }

    #[test]
    fn orders_reach_all_and_those_who_come_later() {
        let shared = shared(2);
        let one = shared.register(ParticipantKind::Connection).unwrap();
        assert!(!one.signal.has(ControlOrder::Drain));
        shared.signal_all(ControlOrder::Drain);
        let late = shared.register(ParticipantKind::Listener).unwrap();
        assert!(
            one.signal.has(ControlOrder::Drain)
                && late.signal.has(ControlOrder::Drain)
                && !one.signal.has(ControlOrder::Abort)
        );
        shared.signal_all(ControlOrder::Abort);
        shared.signal_all(ControlOrder::Drain);
        assert!(
            one.signal.has(ControlOrder::Abort)
                && shared.register(ParticipantKind::Listener).unwrap().signal.has(ControlOrder::Abort)
        );
    }
}
