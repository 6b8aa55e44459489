//! The target: its subsystems, and the connections of every listener that it serves.

use std::io;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::LocalBoxFuture;
use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_runtime_reactor::net::Listener;
use sealblock_runtime_reactor::{CoreHandle, now, spawn};

use crate::connection::task::Connection;
use crate::model::checksums::ChecksumStats;
use crate::model::controller::Controller;
use crate::model::limits::Limits;
use crate::model::namespace::SetupError;
use crate::model::registry::TargetState;
use crate::model::subsystem::Subsystem;

/// An NVMe/TCP target. Clones are the same target, on any core.
#[derive(Clone)]
pub struct Target(pub(crate) Arc<TargetState>);

impl Target {
    /// Returns a target for these subsystems, and for the discovery subsystem that names them.
    ///
    /// # Errors
    /// [`SetupError::DuplicateNqn`] and [`SetupError::Reserved`].
    pub fn new(subsystems: impl IntoIterator<Item = Subsystem>, limits: Limits) -> Result<Target, SetupError> {
        let target = Target(Arc::new(TargetState::new(limits)));
        for subsystem in subsystems {
            target.add_subsystem(subsystem)?;
        }
        Ok(target)
    }

    /// Returns the same target, which from now on spreads its connections over these cores, whichever core accepts
    /// them: each goes to the core with the fewest I/O queues, and an I/O queue from there to the one that executes the
    /// requests of its namespaces, if only one does. Without cores, connections stay where they are accepted.
    pub fn with_cores(self, cores: impl IntoIterator<Item = CoreHandle>) -> Target {
        self.0.serving.set_cores(cores);
        self
    }

    /// Returns the same target, whose connections stay on the core that they got when they were accepted, whatever
    /// their namespaces are: for tests and measurements.
    pub fn without_moves(self) -> Target {
        self.0.serving.keep_in_place();
        self
    }

    /// The number of I/O queues on each of its cores, with connections that have not connected to a controller yet.
    pub fn queues_on_cores(&self) -> Vec<usize> {
        self.0.serving.loads()
    }

    /// Serves the connections of a listener until [`Target::stop`], or until the reactor's core stops. Then it lets
    /// commands in flight complete, for [`Limits::drain`], and closes. May be called for several listeners at once, on
    /// one core or on several. If a core stops, the whole target stops.
    ///
    /// # Errors
    /// If the listener cannot accept any more. Then only this listener ends; connections and other listeners continue.
    pub fn serve(&self, listener: Listener) -> LocalBoxFuture<'_, io::Result<()>> {
        Box::pin(async move {
            let target = Arc::clone(&self.0);
            let begin = move |stream, registration| {
                spawn(Connection::new(&target, stream, registration, now()).run());
            };
            self.0.serving.serve(listener, begin).await
        })
    }

    /// Accepts no more connections and commands, on any core. [`Target::serve`] returns when the target has stopped.
    pub fn stop(&self) {
        self.0.serving.stop();
    }

    /// Connections on all cores that are being served, or that still have commands in flight.
    pub fn connections(&self) -> usize {
        self.0.serving.connections()
    }

    /// Returns how many bytes the I/O queues of a subsystem have moved since it was added, and for how many a CRC was
    /// computed. `None` if there is no such subsystem. Bytes in flight may be missing from the counts.
    pub fn checksum_stats(&self, nqn: &Nqn) -> Option<ChecksumStats> {
        Some(self.0.subsystem(nqn)?.traffic().checksums)
    }

    /// Controllers of this subsystem. The subsystem may already be removed, with controllers that have not all ended.
    pub fn controllers(&self, nqn: &Nqn) -> usize {
        self.0.controllers().iter().filter(|controller| controller.subsystem.nqn == *nqn).count()
    }
}

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
    /// The hosts that are connected now, in the order of their controllers, and then hosts whose last commands may still
    /// be executed: a command of a host that is not in this list cannot overtake one that arrives from now on. Hosts of
    /// the discovery subsystem are not included.
    pub fn connected_hosts(&self) -> Vec<ConnectedHost> {
        let controllers = self.0.unfenced_controllers();
        let users = controllers.iter().filter(|controller| !controller.is_discovery);
        users.map(connected_host).collect()
    }

    /// The hosts that may send commands to the namespace that has, or had, this number, or whose last commands to it may
    /// still be executed: if another device got the number, they would be executed on that one.
    pub fn hosts_that_may_use(&self, nqn: &Nqn, nsid: u32) -> Vec<ConnectedHost> {
        let controllers = self.0.unfenced_controllers();
        let users =
            controllers.iter().filter(|controller| controller.subsystem.nqn == *nqn && controller.may_use(nsid));
        users.map(connected_host).collect()
    }
}

fn connected_host(controller: &Arc<Controller>) -> ConnectedHost {
    ConnectedHost {
        host: controller.host.clone(),
        from: controller.from.clone(),
        subsystem: controller.subsystem.nqn.clone(),
        controller: controller.id,
        io_queues: controller.io_queues.lock().values().filter(|queue| Weak::strong_count(queue) > 0).count(),
        connected: now().saturating_duration_since(controller.connected_at),
    }
}
