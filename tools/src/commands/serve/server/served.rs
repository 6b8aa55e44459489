//! What is served, for those who come by the control socket.

use futures_util::future::join_all;

use sealblock_exports_nvme_tcp::Hosts;
use sealblock_protocols_nvme::nqn::Nqn;

use super::{Offered, Server, Space};
use crate::commands::scrub::canonical;
use crate::commands::serve::announce::{export_uri, namespace_uri};
use crate::commands::serve::control::Offer;
use crate::commands::serve::front::{Front, on_this_machine};
use crate::control::server::ExportStatus;

impl Server {
    /// Everything that is offered now, and the server as a whole.
    pub fn served(&self) -> (Vec<Offer>, Front) {
        let listeners = self.ears.iter().map(|ear| ear.address).collect();
        (self.offers(), Front::new(self.export.clone(), listeners, self.nbd.server(), self.nbd.listeners()))
    }

    fn offers(&self) -> Vec<Offer> {
        let listeners: Vec<_> = self.ears.iter().map(|ear| ear.address).collect();
        let spaces =
            self.offered.values().flat_map(|offered| offered.spaces.values().map(move |space| (offered, space)));
        let offer = |(offered, space): (&Offered, &Space)| Offer {
            text: space.plan.target.to_string(),
            path: space.plan.target.path().and_then(canonical),
            nqn: offered.plan.nqn.to_string(),
            nsid: space.plan.nsid,
            listeners: listeners.clone(),
            scrub: space.device.scrub.clone(),
            mirror: space.device.mirror.clone(),
            insight: space.device.insight.clone(),
            exports: self.exports_of(offered, space),
        };
        spaces.map(offer).collect()
    }

    /// The names by which clients reach a namespace.
    fn exports_of(&self, offered: &Offered, space: &Space) -> Vec<ExportStatus> {
        let hosts = match &offered.plan.hosts {
            Hosts::Any => None,
            Hosts::Only(hosts) => Some(hosts.iter().map(Nqn::to_string).collect::<Vec<_>>()),
        };
        let (nqn, nsid) = (offered.plan.nqn.as_str(), space.plan.nsid);
        let named = Some(nsid).filter(|_| offered.spaces.len() > 1);
        let first = hosts.as_ref().and_then(|hosts| hosts.first()).map(String::as_str);
        // A subsystem that is for nobody has nobody who could type anything.
        let reachable = self.ears.first().filter(|_| hosts.as_ref().is_none_or(|hosts| !hosts.is_empty()));
        let uri = reachable.map(|ear| namespace_uri(on_this_machine(ear.address), nqn, named, first));
        let read_only = space.plan.read_only;
        let nvme =
            ExportStatus { protocol: "nvme".to_owned(), name: nqn.to_owned(), nsid: Some(nsid), hosts, uri, read_only };
        let nbd = self.nbd.name_of(&offered.plan, &space.plan).map(|name| ExportStatus {
            protocol: "nbd".to_owned(),
            uri: self.nbd.ears.first().map(|ear| export_uri(on_this_machine(ear.address), &name)),
            name,
            nsid: None,
            hosts: None,
            read_only,
        });
        std::iter::once(nvme).chain(nbd).collect()
    }

    /// Has the scrubs of all devices do what the plan says.
    pub(super) async fn configure_scrubs(&self) {
        let spaces = self.offered.values().flat_map(|offered| offered.spaces.values());
        join_all(spaces.map(|space| space.device.scrub.configure(space.plan.scrub))).await;
    }
}
