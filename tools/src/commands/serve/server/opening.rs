//! Opening what is to be served, and going on without what does not open.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::{Either, join_all, pending, select};
use futures_util::stream::StreamExt;
use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_runtime_reactor::{sleep_until, timeout};

use super::nbd::Wanted;
use super::{OfferedNamespace, Server, of_setup};
use crate::commands::serve::announce::OpenedInfo;
use crate::commands::serve::devices::ServedDevice;
use crate::commands::serve::identity::derived;
use crate::commands::serve::members::{Fit, fit, of_others};
use crate::commands::serve::plan::nbd::export_name;
use crate::commands::serve::plan::{NamespacePlan, Plan};
use crate::commands::serve::waiting::{Tried, Waiting};
use crate::exit::{Cause, CliError};
use crate::target::TargetName;

/// How long the end of the server waits for targets that are being opened just then.
const LAST_TRIES: Duration = Duration::from_secs(5);

/// The identities of namespaces, and whose they are.
pub(super) type Identities = BTreeMap<[u8; 16], TargetName>;

impl Server {
    /// The devices of all namespaces in the order of the plan: those that are open already, and new ones, opened all at once, which
    /// are in `fresh`, too.
    ///
    /// # Errors
    /// What cannot be done with what is open already.
    pub(super) async fn devices(
        &self,
        plan: &Plan,
        fresh: &mut Vec<Rc<ServedDevice>>,
    ) -> Result<Vec<Result<Rc<ServedDevice>, CliError>>, CliError> {
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
    async fn known(&self, nqn: &Nqn, plan: &NamespacePlan) -> Result<Option<Rc<ServedDevice>>, CliError> {
        let at_its_place = self.offered.get(nqn).and_then(|subsystem| subsystem.spaces.get(&plan.nsid));
        let spaces = || self.offered.values().flat_map(|subsystem| subsystem.spaces.values());
        // Two targets that are memory are two memories; a path is the same device wherever it is offered.
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
                Err(CliError::new(Cause::Refused, doing, "it is being served the other way")
                    .on(&plan.target)
                    .advise("taking it out first, or starting the server anew"))
            }
        }
    }

    /// A namespace as it is offered, unless it cannot be.
    pub(super) fn space(
        nqn: &Nqn,
        plan: &NamespacePlan,
        device: Rc<ServedDevice>,
        taken: &mut Identities,
    ) -> Result<OfferedNamespace, CliError> {
        let place = format!("{nqn} {}", plan.nsid);
        let uuid = plan.uuid.or(device.volume_uuid).unwrap_or_else(|| derived(&plan.target, &place));
        // Hosts take two namespaces of one identity for two ways to one.
        if let Some(other) = taken.get(&uuid) {
            return Err(CliError::new(Cause::Unsuitable, "serving", format!("it has the identity of {other}"))
                .on(&plan.target)
                .advise("a uuid of its own, in the configuration"));
        }
        let space = OfferedNamespace { plan: plan.clone(), uuid, device };
        // Made once more when it is offered; here it shows whether that can be done.
        space.namespace()?;
        taken.insert(uuid, plan.target.clone());
        Ok(space)
    }

    /// A namespace that is to be gone without, if it may be: at the start, and where it was gone without before. A reload that
    /// brings something new brings all of it or nothing.
    pub(super) fn go_without(
        &self,
        strict: bool,
        nqn: &Nqn,
        plan: &NamespacePlan,
        failure: CliError,
    ) -> Result<Waiting, CliError> {
        let before = self.waiting.iter().find(|waiting| waiting.is_for(nqn, plan));
        // What cannot be meant is for whoever wrote it.
        let may_be = !strict && failure.cause() != Cause::Usage && (self.is_new || before.is_some());
        if may_be { Ok(Waiting::new(nqn, plan, failure, before)) } else { Err(failure) }
    }

    /// Has these be what is gone without, and tells of those that were not so before.
    pub(super) fn go_on_without(&mut self, waiting: Vec<Waiting>) {
        for new in waiting.iter().filter(|new| !self.waiting.iter().any(|old| old.is_for(&new.nqn, &new.plan))) {
            new.report();
        }
        (self.waiting, self.is_new) = (waiting, false);
    }

    /// Waits until another try to open something has ended, for [`Server::admit`]. Dropped, it goes on where it was.
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

    /// Offers what a try has opened; tells what is served then that was not.
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
                // Nothing was written to it; why it is not offered is the thing to tell.
                self.homes.close(Rc::into_inner(device)).await.ok();
                None
            }
        }
    }

    /// Offers a namespace that was gone without; gives the name of its NBD export.
    fn offer(&mut self, nqn: &Nqn, at: usize, device: Rc<ServedDevice>) -> Result<Option<String>, CliError> {
        let plan = self.waiting[at].plan.clone();
        let spaces = self.offered.values().flat_map(|offered| offered.spaces.values());
        let mut taken = spaces.map(|space| (space.uuid, space.plan.target.clone())).collect();
        let space = Server::space(nqn, &plan, device, &mut taken)?;
        let gone = || CliError::new(Cause::Unreachable, "serving", "its subsystem is gone").on(nqn);
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

    /// Has no try under way, for whoever changes what is to be served. What was opened meanwhile is opened anew as planned then.
    pub(super) async fn end_tries(&mut self) {
        while let Some(Tried { device, .. }) = self.tries.next().await {
            self.homes.close(device).await.ok();
        }
    }

    /// The same at the end of the server, which waits for none of them for long.
    pub(super) async fn end_tries_soon(&mut self) {
        if timeout(LAST_TRIES, self.end_tries()).await.is_err() {
            tracing::debug!("a target was still being opened when the server ended");
        }
    }
}
