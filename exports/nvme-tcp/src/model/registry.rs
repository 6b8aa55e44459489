//! The state that all cores of a target share: subsystems, controllers by identifier, and the connections that are
//! served.
//!
//! Invariants: only admin commands, and connections that begin or end, take locks. A task that registers something
//! checks afterwards whether it is still wanted, and a task that ends things marks that first, so that nothing is
//! missed in between.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};

use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_runtime_reactor::Budget;
use sealblock_runtime_reactor::net::canonical;
use sealblock_transport::{Ends, Serving, work_budget};

use crate::model::controller::Controller;
use crate::model::limits::Limits;
use crate::model::subsystem::Subsystem;
use crate::model::sync::Locked;

/// The largest controller identifier that is not reserved.
const MAX_CONTROLLER_ID: u16 = 0xFFEF;

/// The state of one target that all cores share.
pub(crate) struct TargetState {
    pub(crate) limits: Limits,
    /// Bytes in flight over all connections.
    pub(crate) budget: Arc<Budget>,
    /// Bytes that commands hold in addition to their data, over all connections.
    pub(crate) work_budget: Arc<Budget>,
    pub(crate) serving: Arc<Serving>,
    /// Tracks I/O queues that have ended but were not completely read.
    pub(crate) ends: Arc<Ends<Arc<Controller>>>,
    /// Pairs of a local address and the address that the discovery log names instead.
    pub(crate) advertised: Locked<Vec<(SocketAddr, SocketAddr)>>,
    subsystems: Locked<SubsystemList>,
    discovery: Arc<Subsystem>,
    controllers: Locked<Controllers>,
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
    /// Controllers that were removed, in case some of their I/O queues are not fenced yet.
    ending: Vec<Weak<Controller>>,
}

impl TargetState {
    pub(crate) fn new(limits: Limits) -> TargetState {
        let limits = limits.clamped();
        TargetState {
            budget: Budget::new(limits.total_bytes_in_flight, limits.transfer_with_tags()),
            work_budget: work_budget(limits.total_bytes_in_flight),
            serving: Serving::new(limits.connections, limits.drain),
            ends: Arc::default(),
            limits,
            advertised: Locked::default(),
            subsystems: Locked::default(),
            discovery: Arc::new(Subsystem::new(Nqn::discovery(), "discovery")),
            controllers: Locked::default(),
        }
    }

    /// The generation of the discovery log, and the subsystems that it names.
    pub(crate) fn subsystems(&self) -> (u64, Arc<Vec<Arc<Subsystem>>>) {
        let list = self.subsystems.lock();
        (list.generation, Arc::clone(&list.all))
    }

    /// Changes the list of subsystems, and counts a new generation of the discovery log even if `change` changes
    /// nothing.
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

    /// The address in the discovery log for hosts that connected to this address.
    pub(crate) fn advertised(&self, at: SocketAddr) -> SocketAddr {
        let advertised = self.advertised.lock();
        let named =
            |like: &dyn Fn(&SocketAddr) -> bool| advertised.iter().find(|(local, _)| like(local)).map(|named| named.1);
        // A listener on the unspecified address serves each address of this machine.
        let any = |local: &SocketAddr| local.ip().is_unspecified() && local.port() == at.port();
        named(&|local| canonical(*local) == at).or_else(|| named(&any)).unwrap_or(at)
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

    /// Creates a controller with the identifier that was unused for the longest time; `None` if all are in use.
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
        let mut controllers = self.controllers.lock();
        let controller = controllers.by_id.remove(&id);
        controllers.ending.retain(|ending| ending.strong_count() > 0);
        controllers.ending.extend(controller.as_ref().map(Arc::downgrade));
        drop(controllers);
        drop(controller);
    }

    /// All controllers of which a command may still be executed before requests of other hosts that arrive later: those
    /// that exist, and those that ended while an I/O queue had not been read to its end.
    pub(crate) fn unfenced_controllers(&self) -> Vec<Arc<Controller>> {
        let controllers = self.controllers.lock();
        let mut all: Vec<_> = controllers.by_id.values().cloned().collect();
        let ended = controllers.ending.clone();
        drop(controllers);
        all.extend(ended.iter().filter_map(Weak::upgrade).filter(|controller| controller.has_io_queues()));
        all
    }
}
