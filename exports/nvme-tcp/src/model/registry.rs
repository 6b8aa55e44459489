//! What all cores of a target share: subsystems, controllers by identifier, connections and the cores that serve them.
//!
//! Invariants: only admin commands, and connections that begin or end, take locks. A task that registers something
//! checks afterwards that it is still wanted, and a task that ends things marks that first, so that nothing slips
//! through between.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_runtime_reactor::{Budget, CoreAddress};

use crate::model::controller::Controller;
use crate::model::limits::Limits;
use crate::model::subsystem::Subsystem;
use crate::model::sync::LogRateLimit;
use crate::model::sync::{ControlSignal, Signals};
use crate::model::sync::{Flag, Locked};

/// The largest controller identifier that is not reserved.
const MAX_CONTROLLER_ID: u16 = 0xFFEF;

/// What all cores share of one target.
pub(crate) struct TargetState {
    pub(crate) limits: Limits,
    /// Bytes in flight over all connections.
    pub(crate) budget: Arc<Budget>,
    pub(crate) is_stopped: Flag,
    pub(crate) listeners: Locked<Vec<Weak<ControlSignal>>>,
    /// Pairs of a local address and of the address that the discovery log names instead.
    pub(crate) advertised: Locked<Vec<(SocketAddr, SocketAddr)>>,
    /// Rate limit of the log line about connections above the limit.
    pub(crate) over_limit: LogRateLimit,
    pub(crate) cores: Locked<Arc<Vec<ServingCore>>>,
    subsystems: Locked<SubsystemList>,
    discovery: Arc<Subsystem>,
    controllers: Locked<Controllers>,
    connections: Locked<BTreeMap<u64, Weak<ControlSignal>>>,
    accepted: AtomicU64,
}

/// A core that serves connections.
pub(crate) struct ServingCore {
    pub(crate) address: CoreAddress,
    /// Connections on this core, without admin queues, which cost little.
    load: AtomicUsize,
}

impl ServingCore {
    pub(crate) fn new(address: CoreAddress) -> ServingCore {
        ServingCore { address, load: AtomicUsize::new(0) }
    }
}

#[derive(Default)]
struct SubsystemList {
    generation: u64,
    all: Arc<Vec<Arc<Subsystem>>>,
}

#[derive(Default)]
struct Controllers {
    by_id: BTreeMap<u16, Arc<Controller>>,
    last: u16,
}

/// Counts a connection against the limit until its last task has ended.
pub(crate) struct Permit {
    target: Arc<TargetState>,
    number: u64,
    /// The core that serves it.
    core: Option<(Arc<Vec<ServingCore>>, usize)>,
    counts_as_load: Cell<bool>,
}

impl Permit {
    /// The core that serves the connection; `None` for the core that accepted it.
    pub(crate) fn core_address(&self) -> Option<&CoreAddress> {
        self.core.as_ref().map(|(cores, index)| &cores[*index].address)
    }

    /// Counts the connection as no load, because it is an admin queue.
    pub(crate) fn exclude_from_load(&self) {
        if let Some((cores, index)) = &self.core
            && self.counts_as_load.replace(false)
        {
            cores[*index].load.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.exclude_from_load();
        self.target.connections.lock().remove(&self.number);
    }
}

impl TargetState {
    pub(crate) fn new(limits: Limits) -> TargetState {
        let limits = limits.clamped();
        TargetState {
            budget: Budget::new(limits.total_bytes_in_flight, limits.transfer_with_tags()),
            limits,
            is_stopped: Flag::new(false),
            listeners: Locked::default(),
            advertised: Locked::default(),
            over_limit: LogRateLimit::default(),
            cores: Locked::default(),
            subsystems: Locked::default(),
            discovery: Arc::new(Subsystem::new(Nqn::discovery(), "discovery")),
            controllers: Locked::default(),
            connections: Locked::default(),
            accepted: AtomicU64::new(0),
        }
    }

    /// The generation of the discovery log, and the subsystems that it names.
    pub(crate) fn subsystems(&self) -> (u64, Arc<Vec<Arc<Subsystem>>>) {
        let list = self.subsystems.lock();
        (list.generation, Arc::clone(&list.all))
    }

    /// Changes the list of subsystems, and counts a new generation of the discovery log even if `change` leaves the
    /// list alone.
    pub(crate) fn change_subsystems<E>(
        &self,
        change: impl FnOnce(&mut Vec<Arc<Subsystem>>) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut list = self.subsystems.lock();
        let mut all = Vec::clone(&list.all);
        change(&mut all)?;
        list.generation += 1;
        let before = std::mem::replace(&mut list.all, Arc::new(all));
        drop(list);
        drop(before);
        for controller in self.controllers().iter().filter(|controller| controller.is_discovery) {
            controller.discovery_changed();
        }
        Ok(())
    }

    /// The address that the discovery log gives to hosts that connected to this one.
    pub(crate) fn advertised(&self, at: SocketAddr) -> SocketAddr {
        let advertised = self.advertised.lock();
        let named =
            |like: &dyn Fn(&SocketAddr) -> bool| advertised.iter().find(|(local, _)| like(local)).map(|named| named.1);
        // A listener on the unspecified address serves each address of this machine.
        let any = |local: &SocketAddr| local.ip().is_unspecified() && local.port() == at.port();
        named(&|local| *local == at).or_else(|| named(&any)).unwrap_or(at)
    }

    /// The subsystem of this name, or the discovery subsystem.
    pub(crate) fn subsystem(&self, nqn: &Nqn) -> Option<Arc<Subsystem>> {
        let (_, all) = self.subsystems();
        all.iter().chain([&self.discovery]).find(|subsystem| subsystem.nqn == *nqn).cloned()
    }

    pub(crate) fn controller(&self, id: u16) -> Option<Arc<Controller>> {
        self.controllers.lock().by_id.get(&id).cloned()
    }

    /// All controllers that exist now.
    pub(crate) fn controllers(&self) -> Vec<Arc<Controller>> {
        self.controllers.lock().by_id.values().cloned().collect()
    }

    /// Makes a controller with the identifier that was unused for the longest time; `None` if all are in use.
    pub(crate) fn new_controller(&self, make: impl FnOnce(u16) -> Controller) -> Option<Arc<Controller>> {
        let mut controllers = self.controllers.lock();
        let last = controllers.last;
        let free = |id: &u16| !controllers.by_id.contains_key(id);
        let id = (last + 1..=MAX_CONTROLLER_ID).chain(1..=last).find(free)?;
        controllers.last = id;
        let controller = Arc::new(make(id));
        controllers.by_id.insert(id, Arc::clone(&controller));
        Some(controller)
    }

    pub(crate) fn remove_controller(&self, id: u16) {
        let controller = self.controllers.lock().by_id.remove(&id);
        drop(controller);
    }

    /// Registers one more connection, with its signal; `None` at the limit.
    pub(crate) fn admit(self: &Arc<Self>) -> Option<(Permit, Arc<ControlSignal>)> {
        let signal = Arc::new(ControlSignal::default());
        let number = self.accepted.fetch_add(1, Ordering::Relaxed);
        let mut connections = self.connections.lock();
        if connections.len() >= self.limits.connections {
            return None;
        }
        connections.insert(number, Arc::downgrade(&signal));
        drop(connections);
        if self.is_stopped.get() {
            signal.send(Signals::DRAIN);
        }
        let core = self.pick_core(number);
        Some((Permit { target: Arc::clone(self), number, core, counts_as_load: Cell::new(true) }, signal))
    }

    /// The core with the least load; among equals they take turns.
    fn pick_core(&self, number: u64) -> Option<(Arc<Vec<ServingCore>>, usize)> {
        let cores = self.cores.get();
        let count = cores.len();
        let turn = (0..count).map(|i| (number as usize).wrapping_add(i) % count);
        let index = turn.min_by_key(|&index| cores[index].load.load(Ordering::Relaxed))?;
        cores[index].load.fetch_add(1, Ordering::Relaxed);
        Some((cores, index))
    }

    /// Number of connections.
    pub(crate) fn connections(&self) -> usize {
        self.connections.lock().len()
    }

    /// Sends signals to all connections.
    pub(crate) fn signal_all(&self, signals: Signals) {
        let connections: Vec<Arc<ControlSignal>> = self.connections.lock().values().filter_map(Weak::upgrade).collect();
        for signal in connections {
            signal.send(signals);
        }
    }
}
