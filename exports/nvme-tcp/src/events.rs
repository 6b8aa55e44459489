//! Events of a controller's namespaces, from any core.

use std::sync::Arc;

use crate::controller::Controller;
use crate::namespace::Namespace;
use crate::signal::Signals;

impl Controller {
    /// Subscribes to the events of every namespace. Called after the controller is registered, so that either a
    /// concurrent removal of a namespace or this function cancels the subscription to it.
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

    /// Cancels the subscription to a removed namespace, has each I/O queue release it on its own core, and reports the
    /// change. May be called on any core.
    pub(crate) fn namespace_removed(&self, nsid: u32, namespace: &Arc<Namespace>) {
        namespace.state.unsubscribe(nsid, &self.async_events);
        self.signal_io_queues(Signals::NAMESPACES);
        self.async_events.namespace_changed(nsid);
    }

    /// Has each I/O queue release the resized namespace on its own core, and reports the change. May be called on any
    /// core.
    pub(crate) fn namespace_resized(&self, nsid: u32) {
        self.signal_io_queues(Signals::NAMESPACES);
        self.namespaces_changed(nsid);
    }

    /// Subscribes to an added or changed namespace, and reports the change. May be called on any core.
    pub(crate) fn namespaces_changed(&self, nsid: u32) {
        if let Ok(namespace) = self.namespace(nsid) {
            namespace.state.subscribe(nsid, &self.async_events);
        }
        self.async_events.namespace_changed(nsid);
    }

    /// Reports a change of the discovery log page. May be called on any core.
    pub(crate) fn discovery_changed(&self) {
        self.async_events.discovery_changed();
    }
}
