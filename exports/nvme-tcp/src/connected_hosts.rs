//! Lists the connected hosts for an operator.

use std::sync::Weak;
use std::time::Duration;

use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_runtime_reactor::now;

use crate::target::Target;

/// A host that is connected to a subsystem.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConnectedHost {
    /// Its NQN; `None` if Connect carried none.
    pub host: Option<Nqn>,
    /// The address of its admin queue.
    pub from: String,
    /// The subsystem.
    pub subsystem: Nqn,
    /// Its controller identifier.
    pub controller: u16,
    /// Number of connected I/O queues.
    pub io_queues: usize,
    /// Time since its admin queue connected.
    pub connected: Duration,
}

impl Target {
    /// The hosts that are connected now, in the order of their controllers. Leaves out hosts of the discovery
    /// subsystem.
    pub fn connected_hosts(&self) -> Vec<ConnectedHost> {
        let controllers = self.0.controllers();
        let users = controllers.iter().filter(|controller| !controller.is_discovery);
        users
            .map(|controller| ConnectedHost {
                host: controller.host.clone(),
                from: controller.from.clone(),
                subsystem: controller.subsystem.nqn.clone(),
                controller: controller.id,
                io_queues: controller.io_queues.lock().values().filter(|queue| Weak::strong_count(queue) > 0).count(),
                connected: now().saturating_duration_since(controller.connected_at),
            })
            .collect()
    }
}
