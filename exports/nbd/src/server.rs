//! The server: exports, and the connections of every listener it serves.

use std::io;
use std::sync::Arc;
use std::task::Context;
use std::time::Duration;

use sealblock_layers_cross_core::SharedDevice;
use sealblock_runtime_reactor::net::{Keepalive, Listener, Stream};
use sealblock_runtime_reactor::{CoreHandle, now, sleep, spawn};

use crate::connection::Connection;
use crate::export::{Export, SetupError};
use crate::limits::Limits;
use crate::shared::{Client, ParticipantKind, Registration, ServerState};
use crate::signal::ControlOrder;

/// How often a server that stops looks whether it is done.
const DRAIN_POLL_INTERVAL: Duration = Duration::from_millis(2);
/// How long connections get to go after they were cut off.
const ABORT_TIMEOUT: Duration = Duration::from_secs(1);
/// NBD has no keep alive of its own, and a client may be idle for as long as it likes.
const KEEPALIVE: Keepalive = Keepalive { idle_s: 60, interval_s: 10, probes: 6 };

/// An NBD server. Clones are the same server, on any core.
#[derive(Clone)]
pub struct Server(Arc<ServerState>);

impl Server {
    /// A server for these exports. The first is the default, for clients that name none, unless one has the empty name.
    ///
    /// # Errors
    /// [`SetupError::Duplicate`] and [`SetupError::Untellable`].
    pub fn new(exports: impl IntoIterator<Item = Export>, limits: Limits) -> Result<Server, SetupError> {
        let server = Server(Arc::new(ServerState::new(limits.clamped())));
        exports.into_iter().try_for_each(|export| server.add_export(export))?;
        Ok(server)
    }

    /// Offers one more export, behind the others, to clients that connect from now on.
    ///
    /// # Errors
    /// [`SetupError::Duplicate`] and [`SetupError::Untellable`].
    pub fn add_export(&self, export: Export) -> Result<(), SetupError> {
        self.0.add(export)
    }

    /// Offers an export no more. Its connections answer what they are carrying out and close, within [`Limits::drain`];
    /// what is asked meanwhile is refused with ESHUTDOWN. Another export may take its name at once.
    ///
    /// # Errors
    /// [`SetupError::Unknown`].
    pub fn remove_export(&self, name: &str) -> Result<(), SetupError> {
        self.0.remove(name)
    }

    /// Has clients that connect from now on see the geometry of `device`, which is a newer handle for the device that the export
    /// has already. The protocol has no way to tell the others, who go on with the size that they were told; what of it lies past
    /// the end now is refused by the device.
    ///
    /// # Errors
    /// [`SetupError::Unknown`] and [`SetupError::Untellable`].
    pub fn resize_export(&self, name: &str, device: SharedDevice) -> Result<(), SetupError> {
        self.0.resize(name, device)
    }

    /// Has clients that name no export and connect from now on get the one of this name, whatever was added before it; as long as
    /// it is not there they are refused, and get no other one. Without a name the first is theirs.
    pub fn set_default(&self, name: Option<String>) {
        self.0.set_default(name);
    }

    /// The names of the exports, in the order of adding. The first is the default unless another was named.
    pub fn exports(&self) -> Vec<String> {
        self.0.advertised().iter().map(|export| export.name.clone()).collect()
    }

    /// The same server, whose connections are from now on spread over these cores in turn, whichever core accepts them.
    /// Without cores, connections stay where they are accepted.
    pub fn with_cores(self, cores: impl IntoIterator<Item = CoreHandle>) -> Server {
        self.0.set_cores(cores.into_iter().map(|core| core.post()).collect());
        self
    }

    /// Serves the connections of a listener until [`Server::stop`] or until the reactor's core is told to stop, then lets
    /// requests in flight end, for [`Limits::drain`], and closes. May run for several listeners at once, on one core or
    /// on several. A core that is told to stop stops the whole server.
    ///
    /// # Errors
    /// When the listener fails for good. Only this listener ends then; connections and other listeners go on.
    pub async fn serve(&self, listener: Listener) -> io::Result<()> {
        let Some(registration) = self.0.register(ParticipantKind::Listener) else { return Ok(()) };
        let outcome = self.accept(&listener, &registration).await;
        drop(listener);
        outcome?;
        self.stop();
        self.wait_drained().await;
        Ok(())
    }

    async fn accept(&self, listener: &Listener, registration: &Registration) -> io::Result<()> {
        let mut is_stopping = |cx: &mut Context<'_>| registration.signal.poll(ControlOrder::Drain, cx);
        while let Some(stream) = listener.accept_until(&mut is_stopping).await? {
            self.hand_to_core(stream);
        }
        Ok(())
    }

    fn hand_to_core(&self, stream: Stream) {
        let Some(registration) = self.0.register(ParticipantKind::Connection) else {
            tracing::debug!(limit = self.0.limits.connections, "a connection above the limit was closed");
            return;
        };
        // A socket that refuses these is on its way out.
        let _ = stream.set_nodelay(true);
        let _ = stream.set_keepalive(Some(KEEPALIVE));
        match self.0.core_of(registration.number).filter(|address| !address.is_here()) {
            None => begin(stream, registration),
            Some(address) => {
                let Ok(fd) = stream.into_fd() else {
                    tracing::warn!("a connection was closed, since it could not be handed to its core");
                    return;
                };
                // A core that stops takes none, and what it is not given is closed.
                let _ = address.send(move || match Stream::from_fd(fd) {
                    Ok(stream) => begin(stream, registration),
                    Err(error) => tracing::warn!(%error, "a connection was closed, since its core cannot take it"),
                });
            }
        }
    }

    /// Takes no more connections and requests, on all cores; what [`Server::serve`] returns tells when it is over.
    pub fn stop(&self) {
        self.0.signal_all(ControlOrder::Drain);
    }

    /// Connections that are served now, on all cores, or whose last requests are being carried out.
    pub fn connections(&self) -> usize {
        self.0.connections()
    }

    /// The connections that use an export now, in the order of their coming.
    pub fn clients(&self) -> Vec<Client> {
        self.0.clients()
    }

    /// Waits until every connection is gone; those that take too long are cut off.
    async fn wait_drained(&self) {
        let deadline = now() + self.0.limits.drain * 2;
        while self.connections() > 0 && now() < deadline {
            sleep(DRAIN_POLL_INTERVAL).await;
        }
        if self.connections() == 0 {
            return;
        }
        self.0.signal_all(ControlOrder::Abort);
        while self.connections() > 0 && now() < deadline + ABORT_TIMEOUT {
            sleep(DRAIN_POLL_INTERVAL).await;
        }
    }
}

/// Serves a connection on this core.
fn begin(stream: Stream, registration: Registration) {
    spawn(Connection::new(stream, registration).run());
}
