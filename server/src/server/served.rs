//! What is served: for events, and for requests on the control socket.

use std::net::SocketAddr;

use sealblock_exports_nvme_tcp::{Hosts, PiVisibility};
use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_stack::identity::uuid_text;
use sealblock_stack::{TargetIdentity, protection_text};

use crate::devices::waiting::Waiting;
use crate::events::{NamespaceInfo, Serving, SubsystemInfo};
use crate::exports::offered::{Offered, OfferedNamespace};
use crate::plan::{NamespacePlan, SubsystemPlan, export_name, namespace_uri, on_this_machine};
use crate::server::Server;
use crate::status::server::{DeviceStatus, ExportStatus};
use crate::status::server_info::{NamespaceView, ServerInfo};

impl Server {
    /// What is served now.
    pub fn serving(&self) -> Serving {
        let mut subsystems: Vec<SubsystemInfo> = Vec::with_capacity(self.offered.len());
        for nqn in self.export.subsystems() {
            let Some(offered) = self.offered.get(&nqn) else { continue };
            let not_open = self.openings.waiting().iter().filter(|waiting| waiting.nqn == nqn);
            subsystems.push(SubsystemInfo {
                nqn: nqn.to_string(),
                serial: offered.serial.clone(),
                hosts: hosts_of(&offered.plan),
                namespaces: offered.spaces.values().map(|space| self.namespace_info(&offered.plan, space)).collect(),
                not_open: not_open.map(Waiting::not_open_info).collect(),
            });
        }
        Serving {
            listeners: self.listeners(),
            subsystems,
            nbd: self.nbd.serving(),
            block_devices: self.block_devices.serving(),
        }
    }

    fn namespace_info(
        &self,
        subsystem: &SubsystemPlan,
        OfferedNamespace { plan, uuid, device }: &OfferedNamespace,
    ) -> NamespaceInfo {
        let shared = device.shared();
        let geometry = shared.geometry();
        NamespaceInfo {
            nsid: plan.nsid,
            target: plan.target.to_string(),
            uuid: uuid_text(uuid),
            block_size: geometry.block_size.bytes(),
            blocks: geometry.capacity_blocks,
            protection: protection_text(geometry.protection),
            protection_shown: plan.protection == PiVisibility::Protected,
            read_only: plan.read_only,
            nbd: self.nbd.name_of(subsystem, plan),
        }
    }

    /// Everything that is offered now, and the server as a whole.
    pub fn served(&self) -> (Vec<NamespaceView>, ServerInfo) {
        let info = ServerInfo {
            export: self.export.clone(),
            nbd: self.nbd.server(),
            listeners: self.listeners(),
            nbd_listeners: self.nbd.listeners(),
            nbd_sockets: self.nbd.paths(),
            not_open: self.not_open(),
            waiting: self.openings.waiting().iter().map(|waiting| TargetIdentity::of(&waiting.plan.target)).collect(),
            control: String::new(),
        };
        (self.offers(), info)
    }

    /// Where it listens for hosts.
    fn listeners(&self) -> Vec<SocketAddr> {
        self.listeners.addresses().map(|(_, address)| address).collect()
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
        self.openings.waiting().iter().map(status).collect()
    }

    fn offers(&self) -> Vec<NamespaceView> {
        let listeners = self.listeners();
        let spaces =
            self.offered.values().flat_map(|offered| offered.spaces.values().map(move |space| (offered, space)));
        let offer = |(offered, space): (&Offered, &OfferedNamespace)| NamespaceView {
            text: space.plan.target.to_string(),
            label: space.device.target.clone(),
            nqn: offered.plan.nqn.to_string(),
            nsid: space.plan.nsid,
            listeners: listeners.clone(),
            device: space.device.handle.clone(),
            exports: self.exports_of(&offered.plan, &space.plan),
        };
        spaces.map(offer).collect()
    }

    /// The names by which clients reach a namespace.
    fn exports_of(&self, subsystem: &SubsystemPlan, namespace: &NamespacePlan) -> Vec<ExportStatus> {
        let hosts = hosts_of(subsystem);
        let (nqn, nsid) = (subsystem.nqn.as_str(), namespace.nsid);
        let named = Some(nsid).filter(|_| subsystem.namespaces.len() > 1);
        let first = hosts.as_ref().and_then(|hosts| hosts.first()).map(String::as_str);
        // A subsystem that no host may use gets no URI.
        let reachable =
            self.listeners.addresses().next().filter(|_| hosts.as_ref().is_none_or(|hosts| !hosts.is_empty()));
        let uri = reachable.map(|(_, address)| namespace_uri(on_this_machine(address), nqn, named, first));
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
        let space = self.offered.get(&subsystem.nqn).and_then(|offered| offered.spaces.get(&nsid));
        let paths = space.map_or_else(Vec::new, |space| self.block_devices.paths_of(&space.device));
        let block_devices = paths.into_iter().map(|path| ExportStatus {
            protocol: "ublk".to_owned(),
            name: path.display().to_string(),
            nsid: None,
            hosts: None,
            uri: None,
            read_only,
        });
        std::iter::once(nvme).chain(nbd).chain(block_devices).collect()
    }
}

/// The hosts that may connect; `None` if every host may.
fn hosts_of(subsystem: &SubsystemPlan) -> Option<Vec<String>> {
    match &subsystem.hosts {
        Hosts::Any => None,
        Hosts::Only(hosts) => Some(hosts.iter().map(Nqn::to_string).collect()),
    }
}
