//! What is served, for requests on the control socket.

use futures_util::future::join_all;

use sealblock_exports_nvme_tcp::Hosts;
use sealblock_protocols_nvme::nqn::Nqn;

use super::{Offered, OfferedNamespace, Server};
use crate::commands::scrub::canonical;
use crate::commands::serve::announce::namespace_uri;
use crate::commands::serve::control::Offer;
use crate::commands::serve::front::{Front, on_this_machine};
use crate::commands::serve::plan::nbd::export_name;
use crate::commands::serve::plan::{NamespacePlan, SubsystemPlan};
use crate::commands::serve::waiting::Waiting;
use crate::control::server::{DeviceStatus, ExportStatus};

impl Server {
    /// Everything that is offered now, and the server as a whole.
    pub fn served(&self) -> (Vec<Offer>, Front) {
        let listeners = self.ears.iter().map(|ear| ear.address).collect();
        let front = Front::new(self.export.clone(), listeners, self.nbd.server(), self.nbd.listeners());
        (self.offers(), front.without(self.not_open()).at(self.nbd.paths()))
    }

    /// The state of namespaces whose targets are not open.
    fn not_open(&self) -> Vec<DeviceStatus> {
        let status = |waiting: &Waiting| {
            let offered = self.offered.get(&waiting.nqn);
            // No client can reach it by these names yet.
            let unreached = |export| ExportStatus { uri: None, ..export };
            let exports = offered.map(|offered| self.exports_of(&offered.plan, &waiting.plan));
            waiting.status(exports.into_iter().flatten().map(unreached).collect())
        };
        self.waiting.iter().map(status).collect()
    }

    fn offers(&self) -> Vec<Offer> {
        let listeners: Vec<_> = self.ears.iter().map(|ear| ear.address).collect();
        let spaces =
            self.offered.values().flat_map(|offered| offered.spaces.values().map(move |space| (offered, space)));
        let offer = |(offered, space): (&Offered, &OfferedNamespace)| Offer {
            text: space.plan.target.to_string(),
            path: space.plan.target.path().and_then(canonical),
            nqn: offered.plan.nqn.to_string(),
            nsid: space.plan.nsid,
            listeners: listeners.clone(),
            scrub: space.device.scrub.clone(),
            mirror: space.device.mirror.clone(),
            insight: space.device.insight.clone(),
            exports: self.exports_of(&offered.plan, &space.plan),
        };
        spaces.map(offer).collect()
    }

    /// The names by which clients reach a namespace.
    fn exports_of(&self, subsystem: &SubsystemPlan, namespace: &NamespacePlan) -> Vec<ExportStatus> {
        let hosts = match &subsystem.hosts {
            Hosts::Any => None,
            Hosts::Only(hosts) => Some(hosts.iter().map(Nqn::to_string).collect::<Vec<_>>()),
        };
        let (nqn, nsid) = (subsystem.nqn.as_str(), namespace.nsid);
        let named = Some(nsid).filter(|_| subsystem.namespaces.len() > 1);
        let first = hosts.as_ref().and_then(|hosts| hosts.first()).map(String::as_str);
        // A subsystem that no host may use gets no URI.
        let reachable = self.ears.first().filter(|_| hosts.as_ref().is_none_or(|hosts| !hosts.is_empty()));
        let uri = reachable.map(|ear| namespace_uri(on_this_machine(ear.address), nqn, named, first));
        let read_only = namespace.read_only;
        let nvme =
            ExportStatus { protocol: "nvme".to_owned(), name: nqn.to_owned(), nsid: Some(nsid), hosts, uri, read_only };
        let nbd = export_name(subsystem, namespace).filter(|_| self.nbd.listens()).map(|name| ExportStatus {
            protocol: "nbd".to_owned(),
            uri: self.nbd.uri(&name),
            name,
            nsid: None,
            hosts: None,
            read_only,
        });
        std::iter::once(nvme).chain(nbd).collect()
    }

    /// Applies the scrub settings of the plan to all devices.
    pub(super) async fn configure_scrubs(&self) {
        let spaces = self.offered.values().flat_map(|offered| offered.spaces.values());
        join_all(spaces.map(|space| space.device.scrub.configure(space.plan.scrub))).await;
    }
}
