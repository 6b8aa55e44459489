//! The server: what is open and offered now, and how it becomes what a plan says.
//!
//! A change has two steps: first everything that can fail, while the old state is served; then subsystems are added and
//! removed. So a plan that fails changes nothing. The first plan is a change from an empty server.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::LocalBoxFuture;
use futures_util::stream::FuturesUnordered;
use sealblock_exports_nvme_tcp::{Limits, Namespace, PiVisibility, SetupError, Subsystem, Target as Export};
use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_runtime_reactor::{CoreHandle, now, sleep};
use sealblock_stack::{Cause, StackError};

use super::announce::{NamespaceInfo, Serving, SubsystemInfo};
use super::devices::{DeviceTable, ServedDevice};
use super::identity::serial_of;
use super::listeners::{ActiveListener, BoundListener, bind_new, close_old};
use super::plan::nbd::export_name;
use super::plan::{NamespacePlan, Plan, SubsystemPlan};
use super::scrub::ScrubEventSender;
use super::sockets::{self, UnixBound};
use super::waiting::{Tried, Waiting};
use crate::cli::Protection;
use nbd::{NbdSide, Wanted};
use opening::Identities;

mod opening;
mod served;

/// How often a waiting task checks its condition.
const DRAIN_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// A server.
pub struct Server {
    export: Export,
    nbd: NbdSide,
    limits: Limits,
    core: CoreHandle,
    homes: DeviceTable,
    offered: BTreeMap<Nqn, Offered>,
    /// Namespaces of the plan whose targets are not open.
    waiting: Vec<Waiting>,
    /// Those that are being opened.
    tries: FuturesUnordered<LocalBoxFuture<'static, Tried>>,
    /// True before the first plan.
    is_new: bool,
    ears: Vec<ActiveListener>,
    advertised: Vec<(SocketAddr, SocketAddr)>,
}

/// Devices and listeners that are ready to be offered.
struct Prepared {
    wanted: BTreeMap<Nqn, Offered>,
    waiting: Vec<Waiting>,
    bound: Vec<BoundListener>,
    nbd_bound: Vec<BoundListener>,
    sockets: Vec<UnixBound>,
}

/// A subsystem that is offered.
struct Offered {
    plan: SubsystemPlan,
    serial: String,
    spaces: BTreeMap<u32, OfferedNamespace>,
}

/// A namespace that is offered.
#[derive(Clone)]
struct OfferedNamespace {
    plan: NamespacePlan,
    uuid: [u8; 16],
    device: Rc<ServedDevice>,
}

impl OfferedNamespace {
    /// True if hosts see no difference between both.
    fn is_same(&self, other: &OfferedNamespace) -> bool {
        let shows = |space: &OfferedNamespace| space.plan.protection;
        Rc::ptr_eq(&self.device, &other.device) && self.uuid == other.uuid && shows(self) == shows(other)
    }

    /// Gives the device the name that the plan has for it.
    fn rename(&self) {
        self.device.target.set(&self.plan.target);
    }

    /// The namespace for the export; fails where its tags are to be shown and it has none.
    fn namespace(&self) -> Result<Namespace, StackError> {
        let shows = match self.plan.protection {
            Protection::Plain => PiVisibility::Plain,
            Protection::Shown => PiVisibility::Protected,
        };
        let namespace = Namespace::new(self.device.shared(), self.uuid).with_state(Arc::clone(&self.device.state));
        namespace.with_visibility(shows).map_err(|error| of_setup(&error).on(&self.plan.target))
    }
}

impl Server {
    /// A server that offers nothing yet, on these cores, of which there is at least one.
    pub fn new(cores: Vec<CoreHandle>, limits: &Limits, scrub_events: ScrubEventSender) -> Result<Server, StackError> {
        let export = Export::new([], limits.clone()).map_err(|error| of_setup(&error))?;
        Ok(Server {
            export: export.with_cores(cores.clone()),
            nbd: NbdSide::new(cores.clone(), limits)?,
            limits: limits.clone(),
            core: cores[0].clone(),
            homes: DeviceTable::new(cores, scrub_events),
            offered: BTreeMap::new(),
            waiting: Vec::new(),
            tries: FuturesUnordered::new(),
            is_new: true,
            ears: Vec::new(),
            advertised: Vec::new(),
        })
    }

    /// Connections now.
    pub fn connections(&self) -> usize {
        self.export.connections() + self.nbd.connections()
    }

    /// True if the plan has limits that take effect at the next start only.
    pub fn waits_for_restart(&self, plan: &Plan) -> bool {
        plan.limits != self.limits
    }

    /// Applies the plan. What the plan does not change is not touched.
    ///
    /// # Errors
    /// Why the plan cannot be applied; nothing was changed then.
    pub async fn change(&mut self, plan: &Plan) -> Result<(), StackError> {
        self.end_tries().await;
        let mut fresh = Vec::new();
        let prepared = self.prepare(plan, &mut fresh).await;
        let prepared = match prepared {
            Ok(prepared) => prepared,
            Err(failure) => {
                let devices = fresh.into_iter().filter_map(Rc::into_inner);
                // Devices opened for a failed plan were not written to. A failure to close them would hide the first failure.
                self.homes.close(devices).await.ok();
                return Err(failure);
            }
        };
        self.apply(plan, prepared).await?;
        // Devices that were opened and cannot be offered; they were not written to.
        self.homes.close(fresh.into_iter().filter_map(Rc::into_inner)).await.ok();
        Ok(())
    }

    /// Opens new devices and binds new listeners. `fresh` has what was opened, also after a failure.
    async fn prepare(&mut self, plan: &Plan, fresh: &mut Vec<Rc<ServedDevice>>) -> Result<Prepared, StackError> {
        let (mut wanted, mut waiting, mut taken) = (BTreeMap::new(), Vec::new(), Identities::new());
        let mut devices = self.devices(plan, fresh).await?.into_iter();
        for subsystem in &plan.subsystems {
            let mut spaces = BTreeMap::new();
            for (namespace, device) in subsystem.namespaces.iter().zip(devices.by_ref()) {
                let nqn = &subsystem.nqn;
                match device.and_then(|device| Server::space(nqn, namespace, device, &mut taken)) {
                    Ok(space) => drop(spaces.insert(namespace.nsid, space)),
                    Err(failure) => waiting.push(self.go_without(plan.strict, nqn, namespace, failure)?),
                }
            }
            let serial = subsystem.serial.clone().unwrap_or_else(|| serial_of(&subsystem.nqn));
            wanted.insert(subsystem.nqn.clone(), Offered { plan: subsystem.clone(), serial, spaces });
        }
        if self.is_new && taken.is_empty() {
            refuse_nothing(&waiting)?;
        }
        let bound = bind_new(&self.core, &plan.listeners, &plan.inherited, &self.ears).await?;
        let nbd_bound = bind_new(&self.core, &plan.nbd, &plan.inherited, &self.nbd.ears).await?;
        let sockets = sockets::bind_new(&self.core, &plan.nbd_sockets, &self.nbd.sockets).await?;
        Ok(Prepared { wanted, waiting, bound, nbd_bound, sockets })
    }

    /// Offers the prepared plan. A failure here is a bug or a core that has stopped.
    async fn apply(&mut self, plan: &Plan, prepared: Prepared) -> Result<(), StackError> {
        let Prepared { wanted, waiting, bound, nbd_bound, sockets } = prepared;
        self.go_on_without(waiting);
        let exports = exports(plan, &wanted);
        self.nbd.set_default(plan);
        self.nbd.remove_others(&exports)?;
        let before = std::mem::take(&mut self.offered);
        let mut ended = Vec::new();
        for (nqn, old) in &before {
            let stays = wanted.get(nqn).filter(|new| new.serial == old.serial && new.plan.model == old.plan.model);
            match stays {
                None => {
                    self.export.remove_subsystem(nqn).map_err(|error| of_setup(&error))?;
                    ended.push(nqn.clone());
                }
                Some(new) => self.change_subsystem(nqn, old, new)?,
            }
        }
        self.wait_for(&ended).await;
        // In the order of the file, as discovery lists them.
        for subsystem in &plan.subsystems {
            let is_new = !before.contains_key(&subsystem.nqn) || ended.contains(&subsystem.nqn);
            if let Some(new) = wanted.get(&subsystem.nqn).filter(|_| is_new) {
                self.export.add_subsystem(new.subsystem()?).map_err(|error| of_setup(&error))?;
            }
        }
        self.nbd.add_new(exports)?;
        self.offered = wanted;
        self.offered.values().flat_map(|offered| offered.spaces.values()).for_each(OfferedNamespace::rename);
        self.listen(bound, &plan.listeners).await?;
        self.nbd.listen(nbd_bound, &plan.nbd).await?;
        self.nbd.listen_at(sockets, &plan.nbd_sockets).await?;
        self.advertise(plan);
        self.configure_scrubs().await;
        let devices: Vec<_> = before.into_values().flat_map(|old| old.spaces.into_values()).map(|s| s.device).collect();
        // Devices without another owner are offered by no namespace.
        let going: Vec<ServedDevice> = devices.into_iter().filter_map(Rc::into_inner).collect();
        self.wait_until_idle(&going).await;
        self.homes.close(going).await
    }

    /// Listens at the planned addresses and closes the other listeners.
    async fn listen(&mut self, bound: Vec<BoundListener>, planned: &[SocketAddr]) -> Result<(), StackError> {
        for bound in bound {
            let export = self.export.clone();
            self.ears.push(bound.accept(|listener| async move { export.serve(listener).await }).await?);
        }
        close_old(&mut self.ears, planned).await;
        Ok(())
    }

    /// Sets the addresses that discovery reports for listeners behind a translated address.
    fn advertise(&mut self, plan: &Plan) {
        let of = |ear: &ActiveListener| {
            Some((ear.address, plan.advertised.iter().find(|(planned, _)| *planned == ear.planned)?.1))
        };
        let advertised: Vec<_> = self.ears.iter().filter_map(of).collect();
        if advertised != self.advertised {
            self.export.advertise(advertised.clone());
            self.advertised = advertised;
        }
    }

    /// Waits for commands in flight on removed devices, up to the drain time: closing the volume would fail them.
    async fn wait_until_idle(&self, devices: &[ServedDevice]) {
        let deadline = now() + self.limits.drain;
        while devices.iter().any(ServedDevice::is_used) {
            if now() >= deadline {
                tracing::warn!("commands were not done when their device was closed");
                return;
            }
            sleep(DRAIN_POLL_INTERVAL).await;
        }
    }

    /// Applies the differences to a subsystem that stays.
    fn change_subsystem(&self, nqn: &Nqn, old: &Offered, new: &Offered) -> Result<(), StackError> {
        let failed = |error: SetupError| of_setup(&error).on(nqn);
        for (nsid, space) in &old.spaces {
            if !new.spaces.get(nsid).is_some_and(|new| new.is_same(space)) {
                self.export.remove_namespace(nqn, *nsid).map_err(failed)?;
            }
        }
        for (nsid, space) in &new.spaces {
            if !old.spaces.get(nsid).is_some_and(|old| old.is_same(space)) {
                self.export.add_namespace(nqn, *nsid, space.namespace()?).map_err(failed)?;
            }
        }
        if old.plan.hosts != new.plan.hosts {
            self.export.set_hosts(nqn, new.plan.hosts.clone()).map_err(failed)?;
        }
        Ok(())
    }

    /// Waits until the controllers of removed subsystems have completed their commands, up to the drain time.
    async fn wait_for(&self, ended: &[Nqn]) {
        let deadline = now() + self.limits.drain * 2;
        while now() < deadline && ended.iter().any(|nqn| self.export.controllers(nqn) > 0) {
            sleep(DRAIN_POLL_INTERVAL).await;
        }
    }

    /// What is served now.
    pub fn serving(&self) -> Serving {
        let listeners: Vec<SocketAddr> = self.ears.iter().map(|ear| ear.address).collect();
        let mut subsystems: Vec<SubsystemInfo> = Vec::with_capacity(self.offered.len());
        for nqn in self.export.subsystems() {
            let Some(offered) = self.offered.get(&nqn) else { continue };
            let info = |space: &OfferedNamespace| {
                let shared = space.device.shared();
                let nbd = self.nbd.name_of(&offered.plan, &space.plan);
                NamespaceInfo::new(&space.plan, shared.geometry(), &space.uuid, nbd)
            };
            let spaces = offered.spaces.values().map(info).collect();
            let not_open =
                self.waiting.iter().filter(|waiting| waiting.nqn == nqn).map(Waiting::not_open_info).collect();
            subsystems.push(SubsystemInfo::new(&offered.plan, offered.serial.clone(), spaces, not_open));
        }
        Serving { listeners, subsystems, nbd: self.nbd.serving() }
    }

    /// Waits for commands in flight and closes every volume cleanly.
    ///
    /// # Errors
    /// The first volume that could not be closed.
    pub async fn end(mut self) -> Result<(), StackError> {
        self.end_tries_soon().await;
        self.export.stop();
        self.nbd.stop();
        for ear in self.ears.iter().chain(&self.nbd.ears) {
            while !ear.has_ended().await {
                sleep(DRAIN_POLL_INTERVAL).await;
            }
        }
        for ear in &self.nbd.sockets {
            while !ear.has_ended().await {
                sleep(DRAIN_POLL_INTERVAL).await;
            }
        }
        let spaces = self.offered.into_values().flat_map(|offered| offered.spaces.into_values());
        let devices: Vec<_> = spaces.map(|space| space.device).collect();
        self.homes.close(devices.into_iter().filter_map(Rc::into_inner)).await
    }
}

impl Offered {
    /// The subsystem for the export.
    fn subsystem(&self) -> Result<Subsystem, StackError> {
        let mut subsystem =
            Subsystem::new(self.plan.nqn.clone(), self.serial.clone()).with_hosts(self.plan.hosts.clone());
        if let Some(model) = &self.plan.model {
            subsystem = subsystem.with_model(model.clone());
        }
        for (nsid, space) in &self.spaces {
            let made = subsystem.with_namespace(*nsid, space.namespace()?);
            subsystem = made.map_err(|error| of_setup(&error).on(&self.plan.nqn))?;
        }
        Ok(subsystem)
    }
}

/// The NBD exports, in the order of the plan.
fn exports(plan: &Plan, wanted: &BTreeMap<Nqn, Offered>) -> Vec<Wanted> {
    let mut exports = Vec::new();
    for subsystem in plan.subsystems.iter().filter(|_| plan.has_nbd()) {
        for namespace in &subsystem.namespaces {
            let space = wanted.get(&subsystem.nqn).and_then(|offered| offered.spaces.get(&namespace.nsid));
            let name = export_name(subsystem, namespace);
            exports.extend(space.zip(name).map(|(space, name)| Wanted { name, device: Rc::clone(&space.device) }));
        }
    }
    exports
}

/// Refuses to start if no target opens: the operator sees the error, or the service manager tries again.
fn refuse_nothing(waiting: &[Waiting]) -> Result<(), StackError> {
    let Some((first, others)) = waiting.split_first() else { return Ok(()) };
    for other in others {
        tracing::error!("{}", other.failure().in_short());
    }
    Err(first.failure().clone())
}

fn of_setup(error: &SetupError) -> StackError {
    let failure = |cause| StackError::new(cause, "serving", error);
    match error {
        SetupError::NotProtected => failure(Cause::Unsuitable).advise("--protection plain, or a protected volume"),
        SetupError::Nsid(_)
        | SetupError::DuplicateNsid(_)
        | SetupError::Reserved(_)
        | SetupError::DuplicateNqn(_)
        | SetupError::UnknownNqn(_)
        | SetupError::UnknownNsid(_) => failure(Cause::Usage),
    }
}

mod nbd;
mod resize;
#[cfg(test)]
mod tests;
