//! The server: its exports, and the connections of every listener that it serves.

use std::io;
use std::sync::Arc;

use futures_util::future::LocalBoxFuture;
use sealblock_layers_cross_core::SharedDevice;
use sealblock_runtime_reactor::net::{Keepalive, Listener, Stream};
use sealblock_runtime_reactor::{CoreHandle, spawn};

use crate::connection::Connection;
use crate::export::{Export, Limits, SetupError};
use crate::shared::{Client, ServerState};

/// NBD has no keep alive of its own, and a client may be idle for any length of time.
const KEEPALIVE: Keepalive = Keepalive { idle_s: 60, interval_s: 10, probes: 6 };

/// An NBD server. Clones are the same server, on any core.
#[derive(Clone)]
pub struct Server(Arc<ServerState>);

impl Server {
    /// Returns a server for these exports. The first one is the default for clients that name none, unless an export
    /// has the empty name.
    ///
    /// # Errors
    /// [`SetupError::Duplicate`] and [`SetupError::TooLong`].
    pub fn new(exports: impl IntoIterator<Item = Export>, limits: Limits) -> Result<Server, SetupError> {
        let server = Server(Arc::new(ServerState::new(limits.clamped())));
        exports.into_iter().try_for_each(|export| server.add_export(export))?;
        Ok(server)
    }

    /// Adds an export after the existing ones, for clients that connect from now on.
    ///
    /// # Errors
    /// [`SetupError::Duplicate`] and [`SetupError::TooLong`].
    pub fn add_export(&self, export: Export) -> Result<(), SetupError> {
        self.0.add(export)
    }

    /// Removes an export. Its connections complete their requests in flight and close within [`Limits::drain`]; later
    /// requests fail with ESHUTDOWN. Another export may use its name at once.
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

    /// Sets the default export for clients that connect from now on and name none, regardless of the order of adding.
    /// As long as no export has this name, such clients are refused. With `None` the first export is the default.
    pub fn set_default(&self, name: Option<String>) {
        self.0.set_default(name);
    }

    /// The names of the exports, in the order of adding. The first is the default unless another was set.
    pub fn exports(&self) -> Vec<String> {
        self.0.advertised().iter().map(|export| export.name.clone()).collect()
    }

    /// Returns the same server, which from now on spreads its connections over these cores, whichever core accepts
    /// them: each goes to the core with the fewest, and from there to the one that executes the requests of its
    /// export's device, if only one does. Without cores, connections stay where they are accepted.
    pub fn with_cores(self, cores: impl IntoIterator<Item = CoreHandle>) -> Server {
        self.0.serving.set_cores(cores);
        self
    }

    /// Returns the same server, whose connections stay on the core that they got when they were accepted, whatever
    /// their exports are: for tests and measurements.
    pub fn without_moves(self) -> Server {
        self.0.serving.keep_in_place();
        self
    }

    /// The number of connections on each of its cores.
    pub fn connections_on_cores(&self) -> Vec<usize> {
        self.0.serving.loads()
    }

    /// Serves the connections of a listener until [`Server::stop`], or until the reactor's core stops. Then it lets
    /// requests in flight complete, for [`Limits::drain`], and closes. May be called for several listeners at once, on
    /// one core or on several. If a core stops, the whole server stops.
    ///
    /// # Errors
    /// If the listener cannot accept any more. Then only this listener ends; connections and other listeners continue.
    pub fn serve(&self, listener: Listener) -> LocalBoxFuture<'_, io::Result<()>> {
        Box::pin(async move {
            let server = Arc::clone(&self.0);
            let begin = move |stream: Stream, registration| {
                // If this fails, the socket is about to close.
                let _ = stream.set_keepalive(Some(KEEPALIVE));
                spawn(Connection::new(stream, Arc::clone(&server), registration).run());
            };
            self.0.serving.serve(listener, begin).await
        })
    }

    /// Accepts no more connections and requests, on any core. [`Server::serve`] returns when the server has stopped.
    pub fn stop(&self) {
        self.0.serving.stop();
    }

    /// Connections on all cores that are being served, or that still have requests in flight.
    pub fn connections(&self) -> usize {
        self.0.serving.connections()
    }

    /// The connections that use an export now, in the order in which they connected.
    pub fn clients(&self) -> Vec<Client> {
        self.0.clients()
    }
}
