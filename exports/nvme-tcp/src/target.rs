//! The target: its subsystems, and the connections of every listener that it serves.

use std::io;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_runtime_reactor::net::{Listener, Stream};
use sealblock_runtime_reactor::{CoreHandle, now, sleep, spawn};

use crate::connection::task::Connection;
use crate::model::checksums::ChecksumStats;
use crate::model::limits::Limits;
use crate::model::namespace::SetupError;
use crate::model::registry::{Permit, ServingCore, TargetState};
use crate::model::subsystem::Subsystem;
use crate::model::sync::{ControlSignal, Signals};

/// Time between two checks of a stopping target for remaining connections.
const DRAIN_POLL_INTERVAL: Duration = Duration::from_millis(2);
/// Time that connections get to end after they were aborted.
const ABORT_TIMEOUT: Duration = Duration::from_secs(1);

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
    /// them: each goes to the core with the fewest I/O queues. Without cores, connections stay where they are accepted.
    pub fn with_cores(self, cores: impl IntoIterator<Item = CoreHandle>) -> Target {
        let cores = cores.into_iter().map(|core| ServingCore::new(core.address())).collect();
        self.0.cores.set(Arc::new(cores));
        self
    }

    /// Serves the connections of a listener until [`Target::stop`] or until the reactor's core stops. Then lets
    /// commands in flight complete, for [`Limits::drain`], and closes. May run for several listeners at once, on one
    /// core or on several. A core that stops also stops the whole target.
    ///
    /// # Errors
    /// The error of a listener that cannot accept any more. Only this listener ends then; connections and other
    /// listeners continue.
    pub async fn serve(&self, listener: Listener) -> io::Result<()> {
        let signal = self.new_signal();
        let outcome = self.accept(&listener, &signal).await;
        drop(listener);
        outcome?;
        self.stop();
        self.wait_drained().await;
        Ok(())
    }

    /// Returns the signal of one more listener.
    fn new_signal(&self) -> Arc<ControlSignal> {
        let signal = Arc::new(ControlSignal::default());
        let mut listeners = self.0.listeners.lock();
        listeners.retain(|signal| signal.strong_count() > 0);
        listeners.push(Arc::downgrade(&signal));
        signal
    }

    async fn accept(&self, listener: &Listener, signal: &ControlSignal) -> io::Result<()> {
        let mut is_stopping = |cx: &mut Context<'_>| match signal.poll(cx).is_ready() || self.0.is_stopped.get() {
            true => Poll::Ready(()),
            false => Poll::Pending,
        };
        while let Some(stream) = listener.accept_until(&mut is_stopping).await? {
            self.hand_to_core(stream);
        }
        Ok(())
    }

    fn hand_to_core(&self, stream: Stream) {
        let Some((permit, signal)) = self.0.admit() else {
            if let Some(connections) = self.0.over_limit.count(now()) {
                let limit = self.0.limits.connections;
                tracing::warn!(limit, connections, "connections closed: connection limit reached");
            }
            return;
        };
        // Without it a small completion waits for an acknowledgement. A socket that fails here is about to close.
        let _ = stream.set_nodelay(true);
        match permit.core_address().cloned() {
            Some(address) if !address.is_here() => {
                let Ok(fd) = stream.into_fd() else {
                    tracing::warn!("connection closed: cannot hand it to its core");
                    return;
                };
                let target = self.clone();
                let start = move || match Stream::from_fd(fd) {
                    Ok(stream) => target.start_connection(stream, signal, permit),
                    Err(error) => tracing::warn!(%error, "connection closed: its core cannot adopt the socket"),
                };
                // A stopping core drops the closure, which closes the connection.
                let _ = address.send(start);
            }
            _ => self.start_connection(stream, signal, permit),
        }
    }

    /// Serves a connection on this core.
    fn start_connection(&self, stream: Stream, signal: Arc<ControlSignal>, permit: Permit) {
        spawn(Connection::new(&self.0, stream, signal, permit).run());
    }

    /// Takes no more connections and commands, on any core. [`Target::serve`] returns when the target has stopped.
    pub fn stop(&self) {
        self.0.is_stopped.set(true);
        let listeners: Vec<Arc<ControlSignal>> = self.0.listeners.lock().iter().filter_map(Weak::upgrade).collect();
        for signal in listeners {
            signal.send(Signals::DRAIN);
        }
        self.0.signal_all(Signals::DRAIN);
    }

    /// Connections that are served now, on all cores, or that still have commands in flight.
    pub fn connections(&self) -> usize {
        self.0.connections()
    }

    /// Returns what the I/O queues of a subsystem moved since it was added, and how much of it had its CRC computed.
    /// `None` if there is no such subsystem. Bytes in flight may be missing.
    pub fn checksum_stats(&self, nqn: &Nqn) -> Option<ChecksumStats> {
        Some(self.0.subsystem(nqn)?.traffic().checksums)
    }

    /// Controllers of this subsystem. The subsystem may be removed already, with controllers that have not all ended.
    pub fn controllers(&self, nqn: &Nqn) -> usize {
        self.0.controllers().iter().filter(|controller| controller.subsystem.nqn == *nqn).count()
    }

    /// Waits until every connection has ended, and aborts those that take too long.
    async fn wait_drained(&self) {
        let deadline = now() + self.0.limits.drain * 2;
        while self.connections() > 0 && now() < deadline {
            sleep(DRAIN_POLL_INTERVAL).await;
        }
        if self.connections() == 0 {
            return;
        }
        self.0.signal_all(Signals::ABORT);
        while self.connections() > 0 && now() < deadline + ABORT_TIMEOUT {
            sleep(DRAIN_POLL_INTERVAL).await;
        }
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
