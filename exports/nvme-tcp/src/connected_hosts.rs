//! Who is connected, for an operator.

use std::sync::Weak;
use std::time::Duration;

use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_runtime_reactor::now;

use crate::target::Target;

/// A host that is connected to a subsystem.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConnectedHost {
    /// What it calls itself; nothing if it said nothing.
    pub host: Option<Nqn>,
    /// Where its admin queue comes from.
    pub from: String,
    /// What it is connected to.
    pub subsystem: Nqn,
    /// Its controller.
    pub controller: u16,
    /// I/O queues that are connected.
    pub io_queues: usize,
    /// For how long it has been connected.
    pub connected: Duration,
}

impl Target {
    /// The hosts that are connected now, in the order of their controllers; those that only look around left out.
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
