//! The export over NVMe/TCP: subsystems for hosts. All other parts identify a namespace by its names here.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::{FutureExt, LocalBoxFuture, ready};
use sealblock_exports_nvme_tcp::{ConnectedHost, Hosts, Limits, SetupError, Target};
use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_runtime_reactor::{CoreHandle, now, sleep};
use sealblock_stack::{Cause, StackError};

use crate::devices::ServedDevice;
use crate::events::Serving;
use crate::exports::export::{Change, Export, ListClients, Subsystems, once_left};
use crate::exports::listeners::{Listeners, Place};
use crate::exports::offered::{Offered, OfferedNamespace, setup_error};
use crate::plan::{NVME, NamespacePlan, Plan, SubsystemPlan, namespace_uri, on_this_machine};
use crate::status::server::{ClientStatus, ExportStatus};

/// How often a waiting task checks its condition.
const DRAIN_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// What is served over NVMe/TCP.
pub struct NvmeExport {
    target: Target,
    listeners: Listeners,
    drain: Duration,
    advertised: Vec<(SocketAddr, SocketAddr)>,
    /// The UUIDs of removed namespaces, by subsystem and number.
    removed: BTreeMap<(Nqn, u32), [u8; 16]>,
}

impl NvmeExport {
    /// Serves nothing yet, on these cores; there must be at least one.
    pub fn new(cores: Vec<CoreHandle>, limits: &Limits) -> Result<NvmeExport, StackError> {
        let target = Target::new([], limits.clone()).map_err(|error| setup_error(&error))?;
        let listeners = Listeners::new(cores[0].clone());
        Ok(NvmeExport {
            target: target.with_cores(cores),
            listeners,
            drain: limits.drain,
            advertised: Vec::new(),
            removed: BTreeMap::new(),
        })
    }

    /// Refuses to give the number of a namespace to another device while hosts may send commands to the one that they
    /// know: what they write would overwrite the other.
    fn check_numbers(&self, Change { before, wanted, .. }: Change<'_>) -> Result<(), StackError> {
        for (nqn, new) in wanted {
            for (nsid, space) in &new.spaces {
                match before.get(nqn).and_then(|old| old.spaces.get(nsid)) {
                    Some(old) if Rc::ptr_eq(&old.device, &space.device) => {}
                    Some(_) => self.check_unused(nqn, space)?,
                    None => self.check_removed(nqn, space)?,
                }
            }
        }
        Ok(())
    }

    /// The same for a number that is free now.
    fn check_removed(&self, nqn: &Nqn, space: &OfferedNamespace) -> Result<(), StackError> {
        match self.removed.get(&(nqn.clone(), space.plan.nsid)) {
            Some(uuid) if *uuid != space.uuid => self.check_unused(nqn, space),
            _ => Ok(()),
        }
    }

    fn check_unused(&self, nqn: &Nqn, space: &OfferedNamespace) -> Result<(), StackError> {
        let (nsid, users) = (space.plan.nsid, self.target.hosts_that_may_use(nqn, space.plan.nsid));
        let Some(host) = users.first() else { return Ok(()) };
        let name = host.host.as_ref().map_or("unknown", Nqn::as_str);
        let why = format!("namespace {nsid} of {nqn} is another device for the host {name} at {}", host.from);
        let failure = StackError::new(Cause::Refused, "serve", why).on(&space.plan.target);
        Err(failure
            .advise("use another nsid; or remove the namespace, and add it when this host has noticed or disconnected"))
    }

    /// Applies the differences to a subsystem that stays.
    fn change_subsystem(&self, nqn: &Nqn, old: &Offered, new: &Offered) -> Result<(), StackError> {
        let failed = |error: SetupError| setup_error(&error).on(nqn);
        let stays = |nsid: &u32| {
            let (old, new) = (old.spaces.get(nsid), new.spaces.get(nsid));
            old.zip(new).is_some_and(|(old, new)| new.is_same(old))
        };
        let removed: Vec<u32> = old.spaces.keys().copied().filter(|nsid| !stays(nsid)).collect();
        let (mut added, mut added_again) = (Vec::new(), Vec::new());
        for (nsid, space) in new.spaces.iter().filter(|(nsid, _)| !stays(nsid)) {
            // A host treats it as an error if another namespace appears with the identifier of one that it has. So it
            // is added in a separate step.
            let step = if old.spaces.contains_key(nsid) { &mut added_again } else { &mut added };
            step.push((*nsid, space.namespace()?));
        }
        for (removed, added) in [(removed, added), (Vec::new(), added_again)] {
            if !removed.is_empty() || !added.is_empty() {
                self.target.exchange_namespaces(nqn, &removed, added).map_err(failed)?;
            }
        }
        if old.plan.hosts != new.plan.hosts {
            self.target.set_hosts(nqn, new.plan.hosts.clone()).map_err(failed)?;
        }
        Ok(())
    }

    /// Waits until the controllers of removed subsystems have completed their commands, up to the drain time.
    async fn wait_for(&self, ended: &[&Nqn]) {
        let deadline = now() + self.drain * 2;
        while now() < deadline && ended.iter().any(|nqn| self.target.controllers(nqn) > 0) {
            sleep(DRAIN_POLL_INTERVAL).await;
        }
    }

    async fn exchange(&mut self, Change { before, wanted, .. }: Change<'_>) -> Result<(), StackError> {
        let mut ended = Vec::new();
        for (nqn, old) in before {
            let stays = wanted.get(nqn).filter(|new| new.serial == old.serial && new.plan.model == old.plan.model);
            match stays {
                None => {
                    self.target.remove_subsystem(nqn).map_err(|error| setup_error(&error))?;
                    self.removed.retain(|(subsystem, _), _| subsystem != nqn);
                    ended.push(nqn);
                }
                Some(new) => {
                    self.change_subsystem(nqn, old, new)?;
                    let removed = old.spaces.iter().filter(|(nsid, _)| !new.spaces.contains_key(nsid));
                    self.removed.extend(removed.map(|(nsid, space)| ((nqn.clone(), *nsid), space.uuid)));
                }
            }
        }
        self.wait_for(&ended).await;
        Ok(())
    }

    async fn listen_at(&mut self, plan: &Plan) -> Result<(), StackError> {
        let target = self.target.clone();
        let serve = move |listener| {
            let target = target.clone();
            async move { target.serve(listener).await }
        };
        self.listeners.change(&plan.places(), serve).await?;
        self.advertise(plan);
        Ok(())
    }

    /// Sets the addresses that discovery reports for listeners behind address translation.
    fn advertise(&mut self, plan: &Plan) {
        let of = |(planned, address)| {
            let advertised = plan.advertised.iter().find(|(of, _)| *of == planned)?.1;
            Some((address, advertised))
        };
        let advertised: Vec<_> = self.listeners.addresses().filter_map(of).collect();
        if advertised != self.advertised {
            self.target.advertise(advertised.clone());
            self.advertised = advertised;
        }
    }
}

impl Export for NvmeExport {
    fn protocol(&self) -> &'static str {
        NVME
    }

    fn prepare<'a>(&'a mut self, change: Change<'a>) -> LocalBoxFuture<'a, Result<(), StackError>> {
        let Plan { inherited, .. } = change.plan;
        async move {
            once_left(|| self.check_numbers(change)).await?;
            self.listeners.prepare(&change.plan.places(), inherited).await
        }
        .boxed_local()
    }

    fn abandon(&mut self) {
        self.listeners.abandon();
    }

    fn withdraw<'a>(&'a mut self, change: Change<'a>) -> LocalBoxFuture<'a, Result<(), StackError>> {
        self.exchange(change).boxed_local()
    }

    fn offer(&mut self, Change { plan, wanted, .. }: Change<'_>) -> Result<(), StackError> {
        let offered = self.target.subsystems();
        // In the order of the configuration, in which discovery lists them.
        for subsystem in plan.subsystems.iter().filter(|subsystem| !offered.contains(&subsystem.nqn)) {
            if let Some(new) = wanted.get(&subsystem.nqn) {
                self.target.add_subsystem(new.subsystem()?).map_err(|error| setup_error(&error))?;
            }
        }
        Ok(())
    }

    fn listen<'a>(&'a mut self, plan: &'a Plan) -> LocalBoxFuture<'a, Result<(), StackError>> {
        self.listen_at(plan).boxed_local()
    }

    fn add<'a>(
        &'a mut self,
        subsystem: &'a SubsystemPlan,
        space: &'a OfferedNamespace,
    ) -> LocalBoxFuture<'a, Result<(), StackError>> {
        let failed = |error| setup_error(&error).on(&subsystem.nqn);
        let checked = self.check_removed(&subsystem.nqn, space);
        let added = checked.and_then(|()| space.namespace()).and_then(|namespace| {
            self.target.add_namespace(&subsystem.nqn, space.plan.nsid, namespace).map_err(failed)
        });
        ready(added.map(drop)).boxed_local()
    }

    fn remove(&mut self, subsystem: &SubsystemPlan, space: &OfferedNamespace) -> Result<(), StackError> {
        let removed = self.target.remove_namespace(&subsystem.nqn, space.plan.nsid);
        removed.map(drop).map_err(|error| setup_error(&error).on(&subsystem.nqn))
    }

    fn resize(&mut self, device: &Rc<ServedDevice>, offered: &Subsystems) -> Result<(), StackError> {
        for (nqn, subsystem) in offered {
            for (nsid, _) in subsystem.spaces.iter().filter(|(_, space)| Rc::ptr_eq(&space.device, device)) {
                let resized = self.target.resize_namespace(nqn, *nsid, device.shared());
                resized.map_err(|error| setup_error(&error).on(&device.target))?;
            }
        }
        Ok(())
    }

    fn names(
        &self,
        subsystem: &SubsystemPlan,
        namespace: &NamespacePlan,
        _: Option<&Rc<ServedDevice>>,
    ) -> Vec<ExportStatus> {
        let hosts = hosts_of(subsystem);
        let (nqn, nsid) = (subsystem.nqn.as_str(), namespace.nsid);
        let named = Some(nsid).filter(|_| subsystem.namespaces.len() > 1);
        let first = hosts.as_ref().and_then(|hosts| hosts.first()).map(String::as_str);
        // A subsystem that no host may use has no URI.
        let reachable =
            self.listeners.addresses().next().filter(|_| hosts.as_ref().is_none_or(|hosts| !hosts.is_empty()));
        let uri = reachable.map(|(_, address)| namespace_uri(on_this_machine(address), nqn, named, first));
        let (protocol, name, read_only) = (NVME.to_owned(), nqn.to_owned(), namespace.read_only);
        vec![ExportStatus { protocol, name, nsid: Some(nsid), hosts, uri, read_only }]
    }

    /// Subsystems are in the order in which hosts discover them.
    fn serving(&self, _: &Subsystems, serving: &mut Serving) {
        serving.listeners = self.listeners.addresses().map(|(_, address)| address).collect();
        let order: Vec<String> = self.target.subsystems().iter().map(Nqn::to_string).collect();
        serving.subsystems.retain(|subsystem| order.contains(&subsystem.nqn));
        serving.subsystems.sort_by_key(|subsystem| order.iter().position(|nqn| *nqn == subsystem.nqn));
    }

    fn places(&self) -> Vec<Place> {
        self.listeners.places().cloned().collect()
    }

    fn connections(&self) -> usize {
        self.target.connections()
    }

    fn clients(&self) -> ListClients {
        let target = self.target.clone();
        Box::new(move || target.connected_hosts().into_iter().map(host_status).collect())
    }

    fn stop(&mut self) {
        self.target.stop();
    }

    fn drained(&self) -> LocalBoxFuture<'_, ()> {
        self.listeners.ended().boxed_local()
    }
}

/// The hosts that may connect; `None` if every host may.
pub(crate) fn hosts_of(subsystem: &SubsystemPlan) -> Option<Vec<String>> {
    match &subsystem.hosts {
        Hosts::Any => None,
        Hosts::Only(hosts) => Some(hosts.iter().map(Nqn::to_string).collect()),
    }
}

fn host_status(guest: ConnectedHost) -> ClientStatus {
    ClientStatus {
        protocol: NVME.to_owned(),
        host: guest.host.as_ref().map(Nqn::to_string),
        from: guest.from,
        name: guest.subsystem.to_string(),
        queues: Some(guest.io_queues as u64),
        connected_s: guest.connected.as_secs(),
    }
}
