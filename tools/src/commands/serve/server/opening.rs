//! Opens the targets of a plan; targets that do not open are retried in the background.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::{Either, join_all, pending, select};
use futures_util::stream::StreamExt;
use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_runtime_reactor::{sleep_until, timeout};
use sealblock_stack::target::TargetName;
use sealblock_stack::{Cause, StackError};

use super::nbd::Wanted;
use super::{OfferedNamespace, Server, of_setup};
use crate::commands::serve::announce::OpenedInfo;
use crate::commands::serve::devices::ServedDevice;
use crate::commands::serve::identity::derived;
use crate::commands::serve::members::{Fit, fit, of_others};
use crate::commands::serve::plan::nbd::export_name;
use crate::commands::serve::plan::{NamespacePlan, Plan};
use crate::commands::serve::waiting::{Tried, Waiting};

/// How long the end of the server waits for targets that are being opened.
const LAST_TRIES: Duration = Duration::from_secs(5);

/// The UUIDs of namespaces, and their targets.
pub(super) type Identities = BTreeMap<[u8; 16], TargetName>;

impl Server {
    /// The devices of all namespaces in the order of the plan: those that are open already, and new ones, opened concurrently, which
    /// are in `fresh`, too.
    ///
    /// # Errors
    /// If the plan contradicts a device that is open already.
    pub(super) async fn devices(
        &self,
        plan: &Plan,
        fresh: &mut Vec<Rc<ServedDevice>>,
    ) -> Result<Vec<Result<Rc<ServedDevice>, StackError>>, StackError> {
        let mut known = Vec::new();
        for subsystem in &plan.subsystems {
            for namespace in &subsystem.namespaces {
                known.push((self.known(&subsystem.nqn, namespace).await?, namespace));
            }
        }
        let opened = known.into_iter().map(|(known, namespace)| async move {
            match known {
                Some(device) => (Ok(device), false),
                None => (self.homes.open(namespace).await.map(Rc::new), true),
            }
        });
        let devices = join_all(opened).await;
        let new = devices.iter().filter(|(_, is_new)| *is_new).filter_map(|(device, _)| device.as_ref().ok());
        fresh.extend(new.cloned());
        Ok(devices.into_iter().map(|(device, _)| device).collect())
    }

    /// The device that is open already for this namespace.
    async fn known(&self, nqn: &Nqn, plan: &NamespacePlan) -> Result<Option<Rc<ServedDevice>>, StackError> {
        let at_its_place = self.offered.get(nqn).and_then(|subsystem| subsystem.spaces.get(&plan.nsid));
        let spaces = || self.offered.values().flat_map(|subsystem| subsystem.spaces.values());
        // Two memory targets are two devices; a path is one device wherever it is offered.
        let elsewhere = spaces().filter(|_| plan.target.path().is_some());
        for space in at_its_place.into_iter().chain(elsewhere) {
            match fit(&space.device, plan).await {
                Fit::Same => return Ok(Some(Rc::clone(&space.device))),
                Fit::Outdated(members) => {
                    tracing::warn!(
                        "the configuration has {}, but its members are {} now: it is served on with these, and would not open so \
                         at the next start",
                        plan.target,
                        members.join(" and ")
                    );
                    return Ok(Some(Rc::clone(&space.device)));
                }
                Fit::Other(members) => return Err(of_others(&plan.target, &members)),
                Fit::No => {}
            }
        }
        let same = |space: &&OfferedNamespace| plan.target.path().is_some() && space.device.target.is(&plan.target);
        match spaces().find(same) {
            None => Ok(None),
            Some(_) => {
                let doing = "changing read_only, relocate or as_member";
                Err(StackError::new(Cause::Refused, doing, "it is being served the other way")
                    .on(&plan.target)
                    .advise("taking it out first, or starting the server anew"))
            }
        }
    }

    /// A namespace, or why it cannot be offered.
    pub(super) fn space(
        nqn: &Nqn,
        plan: &NamespacePlan,
        device: Rc<ServedDevice>,
        taken: &mut Identities,
    ) -> Result<OfferedNamespace, StackError> {
        let place = format!("{nqn} {}", plan.nsid);
        let uuid = plan.uuid.or(device.volume_uuid).unwrap_or_else(|| derived(&plan.target, &place));
        // Hosts take two namespaces with one UUID for two paths to one namespace.
        if let Some(other) = taken.get(&uuid) {
            return Err(StackError::new(Cause::Unsuitable, "serving", format!("it has the identity of {other}"))
                .on(&plan.target)
                .advise("a uuid of its own, in the configuration"));
        }
        let space = OfferedNamespace { plan: plan.clone(), uuid, device };
        // Created again when it is offered; here only to find errors early.
        space.namespace()?;
        taken.insert(uuid, plan.target.clone());
        Ok(space)
    }

    /// A namespace that is served without its target, if allowed: at the start, or if it was not open before either. A reload
    /// adds all new namespaces or none.
    pub(super) fn go_without(
        &self,
        strict: bool,
        nqn: &Nqn,
        plan: &NamespacePlan,
        failure: StackError,
    ) -> Result<Waiting, StackError> {
        let before = self.waiting.iter().find(|waiting| waiting.is_for(nqn, plan));
        // A usage error needs a change of the configuration.
        let may_be = !strict && failure.cause() != Cause::Usage && (self.is_new || before.is_some());
        if may_be { Ok(Waiting::new(nqn, plan, failure, before)) } else { Err(failure) }
    }

    /// Sets the namespaces without an open target, and logs those that are new.
    pub(super) fn go_on_without(&mut self, waiting: Vec<Waiting>) {
        for new in waiting.iter().filter(|new| !self.waiting.iter().any(|old| old.is_for(&new.nqn, &new.plan))) {
            new.report();
        }
        (self.waiting, self.is_new) = (waiting, false);
    }

    /// Waits for the next finished attempt to open a target, for [`Server::admit`]. Cancel safe.
    pub async fn next_tried(&mut self) -> Tried {
        loop {
            self.begin_due();
            let due = self.waiting.iter().filter_map(Waiting::due).min();
            let timer = async {
                match due {
                    Some(at) => sleep_until(at).await,
                    None => pending().await,
                }
            };
            let tried = async {
                match self.tries.next().await {
                    Some(tried) => tried,
                    None => pending().await,
                }
            };
            if let Either::Left((tried, _)) = select(std::pin::pin!(tried), std::pin::pin!(timer)).await {
                return tried;
            }
        }
    }

    fn begin_due(&mut self) {
        let now = sealblock_runtime_reactor::now();
        for waiting in self.waiting.iter_mut().filter(|waiting| waiting.due().is_some_and(|due| due <= now)) {
            waiting.begin();
            let (nqn, nsid, opening) = (waiting.nqn.clone(), waiting.plan.nsid, self.homes.open(&waiting.plan));
            self.tries.push(Box::pin(async move { Tried { nqn, nsid, device: opening.await } }));
        }
    }

    /// Offers the namespace that an attempt has opened; returns what is newly served.
    pub async fn admit(&mut self, tried: Tried) -> Option<OpenedInfo> {
        let Tried { nqn, nsid, device } = tried;
        let at = self.waiting.iter().position(|waiting| waiting.is(&nqn, nsid))?;
        let device = match device {
            Ok(device) => Rc::new(device),
            Err(failure) => {
                self.waiting[at].failed(failure);
                return None;
            }
        };
        match self.offer(&nqn, at, Rc::clone(&device)) {
            Ok(nbd) => {
                drop(device);
                let opened = self.waiting.remove(at).opened_info(nbd);
                self.configure_scrubs().await;
                Some(opened)
            }
            Err(failure) => {
                self.waiting[at].failed(failure);
                // The device was not written to; a failure to close it would hide why it is not offered.
                self.homes.close(Rc::into_inner(device)).await.ok();
                None
            }
        }
    }

    /// Offers a namespace whose target was not open; returns the name of its NBD export.
    fn offer(&mut self, nqn: &Nqn, at: usize, device: Rc<ServedDevice>) -> Result<Option<String>, StackError> {
        let plan = self.waiting[at].plan.clone();
        let spaces = self.offered.values().flat_map(|offered| offered.spaces.values());
        let mut taken = spaces.map(|space| (space.uuid, space.plan.target.clone())).collect();
        let space = Server::space(nqn, &plan, device, &mut taken)?;
        let gone = || StackError::new(Cause::Unreachable, "serving", "its subsystem is gone").on(nqn);
        let offered = self.offered.get_mut(nqn).ok_or_else(gone)?;
        let failed = |error| of_setup(&error).on(nqn);
        self.export.add_namespace(nqn, plan.nsid, space.namespace()?).map_err(failed)?;
        let name = export_name(&offered.plan, &plan).filter(|_| self.nbd.listens());
        if let Some(name) = name.clone() {
            let added = self.nbd.add_new(vec![Wanted { name, device: Rc::clone(&space.device) }]);
            if let Err(failure) = added {
                self.export.remove_namespace(nqn, plan.nsid).map_err(failed)?;
                return Err(failure);
            }
        }
        offered.spaces.insert(plan.nsid, space);
        Ok(name)
    }

    /// Cancels all attempts, before a change of the plan. Targets that were opened meanwhile are opened again as planned.
    pub(super) async fn end_tries(&mut self) {
        while let Some(Tried { device, .. }) = self.tries.next().await {
            self.homes.close(device).await.ok();
        }
    }

    /// The same at the end of the server, with a timeout.
    pub(super) async fn end_tries_soon(&mut self) {
        if timeout(LAST_TRIES, self.end_tries()).await.is_err() {
            tracing::debug!("a target was still being opened when the server ended");
        }
    }
}
