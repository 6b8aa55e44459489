//! The server: its exports, and the connections of every listener that it serves.

use std::io;
use std::sync::Arc;
use std::task::Context;
use std::time::Duration;

use sealblock_layers_cross_core::SharedDevice;
use sealblock_runtime_reactor::net::{Keepalive, Listener, Stream};
use sealblock_runtime_reactor::{CoreHandle, now, sleep, spawn};

use crate::connection::Connection;
use crate::export::{Export, Limits, SetupError};
use crate::shared::{Client, ControlOrder, ParticipantKind, Registration, ServerState};

/// Time between two checks of a stopping server for remaining connections.
const DRAIN_POLL_INTERVAL: Duration = Duration::from_millis(2);
/// Time that connections get to end after they were aborted.
const ABORT_TIMEOUT: Duration = Duration::from_secs(1);
/// NBD has no keep alive of its own, and a client may be idle for any time.
const KEEPALIVE: Keepalive = Keepalive { idle_s: 60, interval_s: 10, probes: 6 };

/// An NBD server. Clones are the same server, on any core.
#[derive(Clone)]
pub struct Server(Arc<ServerState>);

impl Server {
    /// Returns a server for these exports. The first is the default, for clients that name none, unless one has the
    /// empty name.
    ///
    /// # Errors
    /// [`SetupError::Duplicate`] and [`SetupError::TooLong`].
    pub fn new(exports: impl IntoIterator<Item = Export>, limits: Limits) -> Result<Server, SetupError> {
        let server = Server(Arc::new(ServerState::new(limits.clamped())));
        exports.into_iter().try_for_each(|export| server.add_export(export))?;
        Ok(server)
    }

    /// Adds an export, after the others, for clients that connect from now on.
    ///
    /// # Errors
    /// [`SetupError::Duplicate`] and [`SetupError::TooLong`].
    pub fn add_export(&self, export: Export) -> Result<(), SetupError> {
        self.0.add(export)
    }

    /// Removes an export. Its connections complete their requests in flight and close, within [`Limits::drain`]; later
    /// requests fail with ESHUTDOWN. Another export may take its name at once.
    ///
    /// # Errors
    /// [`SetupError::Unknown`].
    pub fn remove_export(&self, name: &str) -> Result<(), SetupError> {
        self.0.remove(name)
    }

    /// Sets the geometry of an export, for clients that connect from now on, to that of `device`, which is a newer
    /// handle of the same device. The protocol cannot report it to connected clients, which keep the size that they
    /// negotiated; the device fails their requests past its end.
    ///
    /// # Errors
    /// [`SetupError::Unknown`] and [`SetupError::TooLong`].
    pub fn resize_export(&self, name: &str, device: SharedDevice) -> Result<(), SetupError> {
        self.0.resize(name, device)
    }

    /// Sets the default export, for clients that connect from now on and name none, whatever was added before it. While
    /// no export has this name, such clients are refused. With `None` the first export is the default.
    pub fn set_default(&self, name: Option<String>) {
        self.0.set_default(name);
    }

    /// The names of the exports, in the order of adding. The first is the default unless another was set.
    pub fn exports(&self) -> Vec<String> {
        self.0.advertised().iter().map(|export| export.name.clone()).collect()
    }

    /// Returns the same server, which from now on gives its connections to these cores in turn, whichever core accepts
    /// them. Without cores, connections stay where they are accepted.
    pub fn with_cores(self, cores: impl IntoIterator<Item = CoreHandle>) -> Server {
        self.0.set_cores(cores.into_iter().map(|core| core.address()).collect());
        self
    }

    /// Serves the connections of a listener until [`Server::stop`] or until the reactor's core stops. Then lets
    /// requests in flight complete, for [`Limits::drain`], and closes. May run for several listeners at once, on one
    /// core or on several. A core that stops also stops the whole server.
    ///
    /// # Errors
    /// The error of a listener that cannot accept any more. Only this listener ends then; connections and other
    /// listeners continue.
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
            tracing::debug!(limit = self.0.limits.connections, "connection closed: connection limit reached");
            return;
        };
        // A socket that fails here is about to close.
        let _ = stream.set_nodelay(true);
        let _ = stream.set_keepalive(Some(KEEPALIVE));
        match self.0.core_of(registration.number).filter(|address| !address.is_here()) {
            None => begin(stream, registration),
            Some(address) => {
                let Ok(fd) = stream.into_fd() else {
                    tracing::warn!("connection closed: cannot hand it to its core");
                    return;
                };
                // A stopping core drops the closure, which closes the connection.
                let _ = address.send(move || match Stream::from_fd(fd) {
                    Ok(stream) => begin(stream, registration),
                    Err(error) => tracing::warn!(%error, "connection closed: its core cannot adopt the socket"),
                });
            }
        }
    }

    /// Takes no more connections and requests, on any core. [`Server::serve`] returns when the server has stopped.
    pub fn stop(&self) {
        self.0.signal_all(ControlOrder::Drain);
    }

    /// Connections that are served now, on all cores, or that still have requests in flight.
    pub fn connections(&self) -> usize {
        self.0.connections()
    }

    /// The connections that use an export now, in the order of their connecting.
    pub fn clients(&self) -> Vec<Client> {
        self.0.clients()
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
