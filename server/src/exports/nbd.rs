//! The export over NBD: additional names and listeners for the same devices.

use std::collections::BTreeMap;
use std::path::Path;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use futures_util::future::{FutureExt, LocalBoxFuture, ready};
use sealblock_exports_nbd::{Client, Export, Identity, IdentitySource, Server as Nbd, SetupError};
use sealblock_exports_nvme_tcp::Limits;
use sealblock_runtime_reactor::CoreHandle;
use sealblock_stack::identity::uuid_of;
use sealblock_stack::target::NbdAddress;
use sealblock_stack::{Cause, StackError};

use crate::devices::ServedDevice;
use crate::events::{NbdInfo, Serving};
use crate::exports::export::{self, Change, ListClients, Subsystems};
use crate::exports::listeners::{Listeners, Place};
use crate::exports::offered::OfferedNamespace;
use crate::plan::{NBD, NamespacePlan, Plan, SubsystemPlan, export_name, export_uri, nbd_limits, on_this_machine};
use crate::status::server::{ClientStatus, ExportStatus};

/// The maximum bytes of a description of an export ("String encoding" in the protocol).
const MAX_DESCRIPTION_BYTES: usize = 4096;

/// What is served over NBD.
pub struct NbdExport {
    server: Nbd,
    /// The devices by the names of their exports; weak, because others own them.
    offered: BTreeMap<String, Weak<ServedDevice>>,
    listeners: Listeners,
    /// The default export.
    default: Option<String>,
}

/// An export that is to be offered.
struct Wanted<'a> {
    name: String,
    device: &'a Rc<ServedDevice>,
    /// The identity by which clients recognise its content.
    uuid: [u8; 16],
}

impl<'a> Wanted<'a> {
    fn new(name: String, space: &'a OfferedNamespace) -> Wanted<'a> {
        // A file is known whatever its path is, and a configured UUID stays with whatever is there.
        let uuid = space.device.content.map_or(space.uuid, |content| uuid_of(&["content", &content.to_string()]));
        Wanted { name, device: &space.device, uuid }
    }
}

impl NbdExport {
    /// Serves nothing yet, on these cores; there must be at least one.
    pub fn new(cores: Vec<CoreHandle>, nvme_limits: &Limits) -> Result<NbdExport, StackError> {
        let server = Nbd::new([], nbd_limits(nvme_limits)).map_err(|error| setup_error(&error))?;
        let listeners = Listeners::new(cores[0].clone());
        Ok(NbdExport { server: server.with_cores(cores), offered: BTreeMap::new(), listeners, default: None })
    }

    /// Makes the first export of the plan the default for clients that name none; while it is not open, there is no
    /// default.
    fn set_default(&mut self, plan: &Plan) {
        self.default = default_name(plan);
        self.server.set_default(self.default.clone());
    }

    /// Refuses to give the name of an export to another device while clients use it: they connect again by themselves,
    /// and would go on with the other.
    fn check_names(&self, default: Option<&String>, wanted: &[Wanted<'_>]) -> Result<(), StackError> {
        for client in self.server.clients() {
            let (known, says) = match client.names_none {
                true => (default, "the default export".to_owned()),
                false => (Some(&client.export), format!("the export {:?}", client.export)),
            };
            let before = self.offered.get(&client.export).map(Weak::as_ptr);
            let now = wanted.iter().find(|wanted| Some(&wanted.name) == known);
            if let Some(Wanted { device, .. }) =
                now.filter(|now| before.is_some_and(|before| before != Rc::as_ptr(now.device)))
            {
                let why = format!("{says} is another device for the client at {}", client.from);
                let failure = StackError::new(Cause::Refused, "serve", why).on(&device.target);
                return Err(failure.advise("use another name, or disconnect the client first"));
            }
        }
        Ok(())
    }

    /// Withdraws what is no longer wanted, or is another device now.
    fn remove_others(&mut self, wanted: &[Wanted<'_>]) -> Result<(), StackError> {
        let stays = |name: &String, device: &Weak<ServedDevice>| {
            let is_same =
                |wanted: &Wanted<'_>| wanted.name == *name && Weak::as_ptr(device) == Rc::as_ptr(wanted.device);
            wanted.iter().any(is_same)
        };
        let go: Vec<String> =
            self.offered.iter().filter(|(name, device)| !stays(name, device)).map(|(name, _)| name.clone()).collect();
        go.into_iter().try_for_each(|name| self.remove_name(&name))
    }

    fn remove_name(&mut self, name: &str) -> Result<(), StackError> {
        self.offered.remove(name);
        self.server.remove_export(name).map_err(|error| setup_error(&error))
    }

    /// Offers what is not offered yet.
    fn add_new(&mut self, Wanted { name, device, uuid }: Wanted<'_>) -> Result<(), StackError> {
        if self.offered.contains_key(&name) {
            return Ok(());
        }
        let mut description = device.target.to_string();
        description.truncate(description.floor_char_boundary(MAX_DESCRIPTION_BYTES));
        let devices = device.identities();
        let identity = IdentitySource::new(move || Identity { uuid: Some(uuid), devices: devices() });
        let export = Export::new(name.clone(), device.shared())
            .described(description)
            .with_identity(identity)
            .with_owner(Arc::clone(&device.state) as _);
        self.server.add_export(export).map_err(|error| setup_error(&error).on(&device.target))?;
        self.offered.insert(name, Rc::downgrade(device));
        Ok(())
    }

    async fn listen_at(&mut self, plan: &Plan) -> Result<(), StackError> {
        let server = self.server.clone();
        let serve = move |listener| {
            let server = server.clone();
            async move { server.serve(listener).await }
        };
        self.listeners.change(&plan.places_of(NBD), serve).await
    }

    /// The URI of an export for clients on this machine.
    fn uri(&self, name: &str) -> Option<String> {
        let at_address =
            self.listeners.addresses().next().map(|(_, address)| export_uri(on_this_machine(address), name));
        at_address.or_else(|| Some(NbdAddress::Unix(self.listeners.paths().next()?.to_owned()).uri(name)))
    }
}

impl export::Export for NbdExport {
    fn protocol(&self) -> &'static str {
        NBD
    }

    fn prepare<'a>(&'a mut self, change: Change<'a>) -> LocalBoxFuture<'a, Result<(), StackError>> {
        let Plan { inherited, .. } = change.plan;
        async move {
            let wanted = exports(change.plan, change.wanted);
            let default = default_name(change.plan);
            export::once_left(|| self.check_names(default.as_ref(), &wanted)).await?;
            self.listeners.prepare(&change.plan.places_of(NBD), inherited).await
        }
        .boxed_local()
    }

    fn abandon(&mut self) {
        self.listeners.abandon();
    }

    fn withdraw<'a>(
        &'a mut self,
        Change { plan, wanted, .. }: Change<'a>,
    ) -> LocalBoxFuture<'a, Result<(), StackError>> {
        self.set_default(plan);
        ready(self.remove_others(&exports(plan, wanted))).boxed_local()
    }

    fn offer(&mut self, Change { plan, wanted, .. }: Change<'_>) -> Result<(), StackError> {
        exports(plan, wanted).into_iter().try_for_each(|wanted| self.add_new(wanted))
    }

    fn listen<'a>(&'a mut self, plan: &'a Plan) -> LocalBoxFuture<'a, Result<(), StackError>> {
        self.listen_at(plan).boxed_local()
    }

    fn add<'a>(
        &'a mut self,
        subsystem: &'a SubsystemPlan,
        space: &'a OfferedNamespace,
    ) -> LocalBoxFuture<'a, Result<(), StackError>> {
        let name = export_name(subsystem, &space.plan).filter(|_| !self.listeners.is_empty());
        let added = name.map_or(Ok(()), |name| self.add_new(Wanted::new(name, space)));
        ready(added).boxed_local()
    }

    fn remove(&mut self, subsystem: &SubsystemPlan, space: &OfferedNamespace) -> Result<(), StackError> {
        let name = export_name(subsystem, &space.plan).filter(|name| self.offered.contains_key(name));
        name.map_or(Ok(()), |name| self.remove_name(&name))
    }

    /// Clients that connect from now on see the current size of the device.
    fn resize(&mut self, device: &Rc<ServedDevice>, _: &Subsystems) -> Result<(), StackError> {
        let names = self.offered.iter().filter(|(_, offered)| Weak::as_ptr(offered) == Rc::as_ptr(device));
        for (name, _) in names {
            let resized = self.server.resize_export(name, device.shared());
            resized.map_err(|error| setup_error(&error).on(&device.target))?;
        }
        Ok(())
    }

    fn names(
        &self,
        subsystem: &SubsystemPlan,
        namespace: &NamespacePlan,
        _: Option<&Rc<ServedDevice>>,
    ) -> Vec<ExportStatus> {
        let name = export_name(subsystem, namespace).filter(|_| !self.listeners.is_empty());
        let status = |name: String| ExportStatus {
            protocol: NBD.to_owned(),
            uri: self.uri(&name),
            name,
            nsid: None,
            hosts: None,
            read_only: namespace.read_only,
        };
        name.map(status).into_iter().collect()
    }

    fn serving(&self, offered: &Subsystems, serving: &mut Serving) {
        for subsystem in &mut serving.subsystems {
            let planned = offered.values().find(|offered| offered.plan.nqn.as_str() == subsystem.nqn);
            for namespace in &mut subsystem.namespaces {
                let space = planned.and_then(|planned| Some((planned, planned.spaces.get(&namespace.nsid)?)));
                let name = space.and_then(|(planned, space)| export_name(&planned.plan, &space.plan));
                namespace.nbd = name.filter(|name| self.offered.contains_key(name));
            }
        }
        let exports = self.server.exports();
        let default_export = self.default.clone().filter(|name| exports.contains(name));
        let listeners = self.listeners.addresses().map(|(_, address)| address).collect();
        let sockets = self.listeners.paths().map(Path::to_owned).collect();
        let info = NbdInfo { listeners, sockets, exports, default_export };
        serving.nbd = Some(info).filter(|_| !self.listeners.is_empty());
    }

    fn places(&self) -> Vec<Place> {
        self.listeners.places().cloned().collect()
    }

    fn connections(&self) -> usize {
        self.server.connections()
    }

    fn clients(&self) -> ListClients {
        let server = self.server.clone();
        Box::new(move || server.clients().into_iter().map(client_status).collect())
    }

    fn stop(&mut self) {
        self.server.stop();
    }

    fn drained(&self) -> LocalBoxFuture<'_, ()> {
        self.listeners.ended().boxed_local()
    }
}

/// The name of the first export of the plan, whether it is open or not.
fn default_name(plan: &Plan) -> Option<String> {
    let mut names = plan
        .subsystems
        .iter()
        .flat_map(|subsystem| subsystem.namespaces.iter().filter_map(|namespace| export_name(subsystem, namespace)));
    names.next()
}

/// The exports, in the order of the plan.
fn exports<'a>(plan: &Plan, wanted: &'a Subsystems) -> Vec<Wanted<'a>> {
    let mut exports = Vec::new();
    for subsystem in plan.subsystems.iter().filter(|_| plan.has_nbd()) {
        for namespace in &subsystem.namespaces {
            let space = wanted.get(&subsystem.nqn).and_then(|offered| offered.spaces.get(&namespace.nsid));
            let name = export_name(subsystem, namespace);
            exports.extend(space.zip(name).map(|(space, name)| Wanted::new(name, space)));
        }
    }
    exports
}

fn client_status(client: Client) -> ClientStatus {
    ClientStatus {
        protocol: NBD.to_owned(),
        host: None,
        from: client.from,
        name: client.export,
        queues: None,
        connected_s: client.connected.as_secs(),
    }
}

fn setup_error(error: &SetupError) -> StackError {
    // Names were checked with the plan, and exports are removed by their existing names.
    StackError::new(Cause::Usage, "serve over NBD", error)
}
