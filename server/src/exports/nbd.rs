//! The NBD side of the server: exports and listeners besides those of NVMe/TCP, of the same devices.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::rc::{Rc, Weak};
use std::sync::Arc;

use sealblock_exports_nbd::{Export, Server as Nbd, SetupError};
use sealblock_exports_nvme_tcp::Limits;
use sealblock_runtime_reactor::CoreHandle;
use sealblock_stack::target::NbdAddress;
use sealblock_stack::{Cause, StackError};

use crate::devices::ServedDevice;
use crate::events::NbdInfo;
use crate::exports::listeners::{BoundListener, Listeners, Place};
use crate::plan::{NamespacePlan, Plan, SubsystemPlan, export_name, export_uri, nbd_limits, on_this_machine};

/// Longest text about an export, in bytes ("String encoding" of the protocol).
const MAX_DESCRIPTION_BYTES: usize = 4096;

/// An export that is to be offered.
pub struct Wanted {
    pub name: String,
    pub device: Rc<ServedDevice>,
}

/// What is served over NBD.
pub struct NbdSide {
    server: Nbd,
    /// The devices by the names of their exports; others own them.
    offered: BTreeMap<String, Weak<ServedDevice>>,
    pub listeners: Listeners,
    /// The default export.
    default: Option<String>,
}

impl NbdSide {
    /// Nothing yet, on these cores.
    pub fn new(cores: Vec<CoreHandle>, nvme_limits: &Limits) -> Result<NbdSide, StackError> {
        let server = Nbd::new([], nbd_limits(nvme_limits)).map_err(|error| setup_error(&error))?;
        Ok(NbdSide {
            server: server.with_cores(cores),
            offered: BTreeMap::new(),
            listeners: Listeners::default(),
            default: None,
        })
    }

    /// Connections now.
    pub fn connections(&self) -> usize {
        self.server.connections()
    }

    /// Has clients that name no export get the first of the plan, and no other one while that is not open.
    pub fn set_default(&mut self, plan: &Plan) {
        let names = plan.subsystems.iter().flat_map(|subsystem| {
            subsystem.namespaces.iter().filter_map(|namespace| export_name(subsystem, namespace))
        });
        self.default = names.into_iter().next();
        self.server.set_default(self.default.clone());
    }

    /// Whether it listens anywhere.
    pub fn listens(&self) -> bool {
        !self.listeners.is_empty()
    }

    /// Takes away what is not wanted, or is another device now.
    pub fn remove_others(&mut self, wanted: &[Wanted]) -> Result<(), StackError> {
        let stays = |name: &String, device: &Weak<ServedDevice>| {
            let is_same = |wanted: &Wanted| wanted.name == *name && Weak::as_ptr(device) == Rc::as_ptr(&wanted.device);
            wanted.iter().any(is_same)
        };
        let go: Vec<String> =
            self.offered.iter().filter(|(name, device)| !stays(name, device)).map(|(name, _)| name.clone()).collect();
        for name in go {
            self.offered.remove(&name);
            self.server.remove_export(&name).map_err(|error| setup_error(&error))?;
        }
        Ok(())
    }

    /// Offers what is not offered yet.
    pub fn add_new(&mut self, wanted: Vec<Wanted>) -> Result<(), StackError> {
        for Wanted { name, device } in wanted {
            if self.offered.contains_key(&name) {
                continue;
            }
            let mut description = device.target.to_string();
            description.truncate(description.floor_char_boundary(MAX_DESCRIPTION_BYTES));
            let export = Export::new(name.clone(), device.shared())
                .described(description)
                .with_owner(Arc::clone(&device.state) as _);
            self.server.add_export(export).map_err(|error| setup_error(&error).on(&device.target))?;
            self.offered.insert(name, Rc::downgrade(&device));
        }
        Ok(())
    }

    /// Has clients that connect from now on see a device as it is now, under all names that it has.
    pub fn resize(&self, device: &Rc<ServedDevice>) -> Result<(), StackError> {
        let names = self.offered.iter().filter(|(_, offered)| Weak::as_ptr(offered) == Rc::as_ptr(device));
        for (name, _) in names {
            let resized = self.server.resize_export(name, device.shared());
            resized.map_err(|error| setup_error(&error).on(&device.target))?;
        }
        Ok(())
    }

    /// Accepts at these places too, and no more at those that are not planned.
    pub async fn listen(&mut self, bound: Vec<BoundListener>, planned: &[Place]) -> Result<(), StackError> {
        let server = self.server.clone();
        let serve = move |listener| {
            let server = server.clone();
            async move { server.serve(listener).await }
        };
        self.listeners.change(bound, planned, serve).await
    }

    /// What clients on this machine type for an export.
    pub fn uri(&self, name: &str) -> Option<String> {
        let at_address =
            self.listeners.addresses().next().map(|(_, address)| export_uri(on_this_machine(address), name));
        at_address.or_else(|| Some(NbdAddress::Unix(self.listeners.paths().next()?.to_owned()).uri(name)))
    }

    /// The name under which a namespace is offered, if it is.
    pub fn name_of(&self, subsystem: &SubsystemPlan, namespace: &NamespacePlan) -> Option<String> {
        export_name(subsystem, namespace).filter(|name| self.offered.contains_key(name))
    }

    /// What is served now, if anything.
    pub fn serving(&self) -> Option<NbdInfo> {
        let exports = self.server.exports();
        let default_export = self.default.clone().filter(|name| exports.contains(name));
        let (listeners, sockets) = (self.listeners(), self.paths());
        self.listens().then_some(NbdInfo { listeners, sockets, exports, default_export })
    }

    /// The server's state for `status`.
    pub fn server(&self) -> Nbd {
        self.server.clone()
    }

    /// Where it listens.
    pub fn listeners(&self) -> Vec<SocketAddr> {
        self.listeners.addresses().map(|(_, address)| address).collect()
    }

    /// Where its Unix sockets are.
    pub fn paths(&self) -> Vec<PathBuf> {
        self.listeners.paths().map(Path::to_owned).collect()
    }

    /// Takes no more connections and requests.
    pub fn stop(&self) {
        self.server.stop();
    }
}

fn setup_error(error: &SetupError) -> StackError {
    // Names were checked with the plan, and exports are taken away by the names they have.
    StackError::new(Cause::Usage, "serve over NBD", error)
}
