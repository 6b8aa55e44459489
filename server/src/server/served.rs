//! What is served: for events, and for requests on the control socket.

use std::net::SocketAddr;

use sealblock_exports_nvme_tcp::PiVisibility;
use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_stack::identity::uuid_text;
use sealblock_stack::{TargetIdentity, protection_text};

use crate::devices::waiting::Waiting;
use crate::events::{NamespaceInfo, Serving, SubsystemInfo};
use crate::exports::nvme_tcp::hosts_of;
use crate::exports::offered::{Offered, OfferedNamespace};
use crate::plan::{NBD, NVME, NamespacePlan, SubsystemPlan};
use crate::server::Server;
use crate::status::server::{DeviceStatus, ExportStatus};
use crate::status::server_info::{NamespaceView, ServerInfo};

impl Server {
    /// What is served now.
    pub fn serving(&self) -> Serving {
        let subsystem = |(nqn, offered): (&Nqn, &Offered)| {
            let not_open = self.openings.waiting().iter().filter(|waiting| waiting.nqn == *nqn);
            SubsystemInfo {
                nqn: nqn.to_string(),
                serial: offered.serial.clone(),
                hosts: hosts_of(&offered.plan),
                namespaces: offered.spaces.values().map(namespace_info).collect(),
                not_open: not_open.map(Waiting::not_open_info).collect(),
            }
        };
        let subsystems = self.offered.iter().map(subsystem).collect();
        let mut serving = Serving { listeners: Vec::new(), subsystems, nbd: None, block_devices: Vec::new() };
        self.exports.serving(&self.offered, &mut serving);
        serving
    }

    /// Everything that is served now, and the server as a whole.
    pub fn served(&self) -> (Vec<NamespaceView>, ServerInfo) {
        let (nbd_listeners, nbd_sockets) = self.exports.listening(NBD);
        let info = ServerInfo {
            clients: self.exports.clients().into(),
            listeners: self.listeners(),
            nbd_listeners,
            nbd_sockets,
            not_open: self.not_open(),
            waiting: self.openings.waiting().iter().map(|waiting| TargetIdentity::of(&waiting.plan.target)).collect(),
            control: String::new(),
        };
        (self.offers(), info)
    }

    /// The addresses on which it listens for hosts.
    fn listeners(&self) -> Vec<SocketAddr> {
        self.exports.listening(NVME).0
    }

    /// The state of namespaces whose targets are not open.
    fn not_open(&self) -> Vec<DeviceStatus> {
        let status = |waiting: &Waiting| {
            let offered = self.offered.get(&waiting.nqn);
            // Clients cannot use these names yet.
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
        let space = self.offered.get(&subsystem.nqn).and_then(|offered| offered.spaces.get(&namespace.nsid));
        self.exports.names(subsystem, namespace, space.map(|space| &space.device))
    }
}

fn namespace_info(OfferedNamespace { plan, uuid, device }: &OfferedNamespace) -> NamespaceInfo {
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
        // Set by its export.
        nbd: None,
    }
}
