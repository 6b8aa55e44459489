//! What a controller has to tell its host, gathered on any core and handed over on the admin queue's.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;

use crate::connection::Connection;
use crate::controller::Controller;
use crate::line::Orders;

/// Changes that the host was not told of.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Changes {
    /// Namespaces that came, went or changed.
    pub(crate) namespaces: BTreeSet<u32>,
    /// The discovery log page is another one.
    pub(crate) discovery: bool,
}

impl Controller {
    /// A namespace came, went or changed. May be called on any core.
    pub(crate) fn namespaces_changed(&self, nsid: u32) {
        self.changes.lock().namespaces.insert(nsid);
        self.tell_admin(Orders::NEWS);
    }

    /// The discovery log page changed. May be called on any core.
    pub(crate) fn discovery_changed(&self) {
        self.changes.lock().discovery = true;
        self.tell_admin(Orders::NEWS);
    }
}

/// Runs on the core of the admin queue after [`Controller::changes`] has grown; here a held Asynchronous Event Request can
/// be answered. Changes stay until somebody takes them.
pub(crate) fn on_news(connection: &Rc<Connection>, controller: &Arc<Controller>) {
    let changes = controller.changes.get();
    let (namespaces, discovery) = (changes.namespaces.len(), changes.discovery);
    let requests = controller.event_requests.get();
    tracing::debug!(controller = controller.id, namespaces, discovery, requests, "changes to tell the host");
    connection.output.ring();
}
