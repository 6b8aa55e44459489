//! What a controller has to tell its host, from whatever core it happens on.

use std::sync::Arc;

use crate::controller::Controller;
use crate::namespace::Namespace;
use crate::signal::Signals;

impl Controller {
    /// Hears of damage in every namespace from now on. Called when others can see the controller, so that of a namespace
    /// that goes meanwhile either they see to it or this does.
    pub(crate) fn subscribe_to_namespaces(&self) {
        let mut watched = self.subsystem.snapshot();
        loop {
            for (nsid, namespace) in watched.1.iter() {
                namespace.state.subscribe(*nsid, &self.async_events);
            }
            let now = self.subsystem.snapshot();
            if now.0 == watched.0 {
                return;
            }
            for (nsid, namespace) in watched.1.iter() {
                namespace.state.unsubscribe(*nsid, &self.async_events);
            }
            watched = now;
        }
    }

    /// A namespace has gone; what becomes of its blocks is not this controller's business any more, and its queues let it
    /// go, each on its core. May be called on any core.
    pub(crate) fn namespace_removed(&self, nsid: u32, namespace: &Arc<Namespace>) {
        namespace.state.unsubscribe(nsid, &self.async_events);
        self.signal_io_queues(Signals::NAMESPACES);
        self.async_events.namespace_changed(nsid);
    }

    /// A namespace has another size; queues let what they had of it go, each on its core. May be called on any core.
    pub(crate) fn namespace_resized(&self, nsid: u32) {
        self.signal_io_queues(Signals::NAMESPACES);
        self.namespaces_changed(nsid);
    }

    /// A namespace came or changed. May be called on any core.
    pub(crate) fn namespaces_changed(&self, nsid: u32) {
        if let Ok(namespace) = self.namespace(nsid) {
            namespace.state.subscribe(nsid, &self.async_events);
        }
        self.async_events.namespace_changed(nsid);
    }

    /// The discovery log page changed. May be called on any core.
    pub(crate) fn discovery_changed(&self) {
        self.async_events.discovery_changed();
    }
}
