//! What the cores of a server share: its exports, its connections, and the signal that ends them.
//!
//! Invariant: the task that listens to a signal sees an order once it next runs; no order is lost or withdrawn.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use sealblock_layers_cross_core::SharedDevice;
use sealblock_protocols_nbd as core;
use sealblock_runtime_reactor::{Budget, CoreAddress, now};

use crate::export::{Export, Limits, SetupError};

/// The exports.
#[derive(Default)]
struct ExportList {
    /// Each lives until it is removed and its last connection has ended.
    exports: Vec<Arc<Export>>,
    /// What clients see of each.
    advertised: Arc<[core::Export]>,
    /// The name of the default export; `None` for the first.
    default: Option<String>,
}

pub(crate) struct ServerState {
    pub(crate) limits: Limits,
    pub(crate) budget: Arc<Budget>,
    exports: Mutex<ExportList>,
    cores: Mutex<Vec<CoreAddress>>,
    next: AtomicUsize,
    /// All receivers of signals, by number. Connections are among them for as long as they live.
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
    /// The export that a connection chose, the address of its client, and since when.
    chosen: Option<(Arc<Export>, String, Instant)>,
}

/// A connection that uses an export.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Client {
    /// The name of the export.
    pub export: String,
    /// The address or process of the client.
    pub from: String,
    /// Time since it chose the export.
    pub connected: Duration,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum ParticipantKind {
    Listener,
    Connection,
}

/// Registers a listener or connection for signals, until it is dropped.
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

    /// Returns what clients see that connect now.
    pub(crate) fn advertised(&self) -> Arc<[core::Export]> {
        Arc::clone(&lock(&self.exports).advertised)
    }

    /// Sets the name of the default export. While no export has it, there is no default.
    pub(crate) fn set_default(&self, name: Option<String>) {
        lock(&self.exports).default = name;
    }

    /// The index of the default export among those that a client sees.
    pub(crate) fn default_of(&self, info: &[core::Export]) -> Option<usize> {
        match &lock(&self.exports).default {
            Some(name) => info.iter().position(|export| export.name == *name),
            None => (!info.is_empty()).then_some(0),
        }
    }

    /// Adds an export, after the others.
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

    /// Removes an export, and drains its connections.
    pub(crate) fn remove(&self, name: &str) -> Result<(), SetupError> {
        let removed = {
            let mut offered = lock(&self.exports);
            let at = offered.advertised.iter().position(|info| info.name == name);
            let at = at.ok_or_else(|| SetupError::Unknown(name.to_owned()))?;
            let others = offered.advertised.iter().enumerate().filter(|(index, _)| *index != at);
            offered.advertised = others.map(|(_, other)| other.clone()).collect();
            offered.exports.remove(at)
        };
        // Includes connections that chose it before a resize.
        let uses = |member: &&Participant| member.chosen.as_ref().is_some_and(|(chosen, ..)| chosen.is_same(&removed));
        let signals: Vec<_> =
            lock(&self.participants).all.values().filter(uses).map(|user| Arc::clone(&user.signal)).collect();
        signals.iter().for_each(|signal| signal.send(ControlOrder::Drain));
        Ok(())
    }

    /// Sets the size of an export for clients that connect from now on.
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

    /// Registers one more; `None` for a connection above the limit.
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
        Some(Registration { server: Arc::clone(self), number, signal })
    }

    pub(crate) fn connections(&self) -> usize {
        lock(&self.participants).connections()
    }

    /// The connections that have chosen an export, in the order of their connecting.
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

    /// Sends an order to all listeners and connections, now and later. No order is withdrawn.
    pub(crate) fn signal_all(&self, order: ControlOrder) {
        let signals: Vec<Arc<ControlSignal>> = {
            let mut members = lock(&self.participants);
            members.order = members.order.max(Some(order));
            members.all.values().map(|member| Arc::clone(&member.signal)).collect()
        };
        signals.iter().for_each(|signal| signal.send(order));
    }

    /// The core for a connection with this number, in turn; `None` for the core that accepted it.
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
    /// Registers that this connection chose the export that it was shown, if the server still has it.
    pub(crate) fn choose(&self, info: &core::Export, from: &str) -> Option<Arc<Export>> {
        // Held until the choice is registered, so that a later removal of the export finds this connection.
        let offered = lock(&self.server.exports);
        // The export may have grown since; a client of one that shrank would see too large a size.
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

/// Orders to connections and listeners. A higher one includes the lower one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[repr(u8)]
pub(crate) enum ControlOrder {
    /// Take no more requests, complete those in flight, then end.
    Drain = 1,
    /// End at once.
    Abort = 2,
}

#[derive(Default)]
pub(crate) struct ControlSignal {
    order: AtomicU8,
    waker: Mutex<Option<Waker>>,
}

impl ControlSignal {
    pub(crate) fn send(&self, order: ControlOrder) {
        self.order.fetch_max(order as u8, Ordering::SeqCst);
        let waker = self.waker.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// True if the order is at least this one.
    pub(crate) fn has(&self, at_least: ControlOrder) -> bool {
        self.order.load(Ordering::SeqCst) >= at_least as u8
    }

    /// Has the next order wake this task.
    pub(crate) fn listen(&self, waker: &Waker) {
        let before = self.waker.lock().unwrap_or_else(PoisonError::into_inner).replace(waker.clone());
        drop(before);
    }

    /// Ready once the order is at least this one.
    pub(crate) fn poll(&self, at_least: ControlOrder, cx: &mut Context<'_>) -> Poll<()> {
        self.listen(cx.waker());
        if self.has(at_least) { Poll::Ready(()) } else { Poll::Pending }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared(connections: usize) -> Arc<ServerState> {
        Arc::new(ServerState::new(Limits { connections, ..Limits::default() }))
    }

    #[test]
    fn connections_are_limited_and_unregistered() {
        let shared = shared(1);
        let _listener = shared.register(ParticipantKind::Listener).unwrap();
        let first = shared.register(ParticipantKind::Connection).unwrap();
        assert!(shared.register(ParticipantKind::Connection).is_none());
        assert_eq!(shared.connections(), 1);
        drop(first);
        assert!(shared.register(ParticipantKind::Connection).is_some());
    }

    #[test]
    fn clients_that_name_no_export_get_the_default_or_none() {
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
    fn signals_reach_all_and_later_connections() {
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

    #[test]
    fn orders_stay_and_include_each_other() {
        let (signal, mut cx) = (ControlSignal::default(), Context::from_waker(Waker::noop()));
        assert!(signal.poll(ControlOrder::Drain, &mut cx).is_pending());
        signal.send(ControlOrder::Drain);
        assert!(
            signal.poll(ControlOrder::Drain, &mut cx).is_ready()
                && signal.poll(ControlOrder::Abort, &mut cx).is_pending()
        );
        signal.send(ControlOrder::Abort);
        signal.send(ControlOrder::Drain);
        assert!(signal.has(ControlOrder::Abort) && signal.has(ControlOrder::Drain));
    }
}
