//! What a controller has to tell its host, from whatever core it happens on.

use crate::controller::Controller;

impl Controller {
    /// A namespace came, went or changed. May be called on any core.
    pub(crate) fn namespaces_changed(&self, nsid: u32) {
        if let Ok(namespace) = self.namespace(nsid) {
            namespace.state.watch(nsid, &self.notices);
        }
        self.notices.namespace_changed(nsid);
    }

    /// The discovery log page changed. May be called on any core.
    pub(crate) fn discovery_changed(&self) {
        self.notices.discovery_changed();
    }
}
