//! The server: the open devices and offered namespaces, and the change to a new plan.
//!
//! A change has two steps: first everything that can fail, while the old state is served; then the exports change what
//! they serve. So a plan that fails changes nothing. The first plan is a change from an empty server.

mod served;

use std::collections::BTreeMap;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::{Either, join, join_all, select};
use sealblock_exports_nvme_tcp::Limits;
use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_runtime_reactor::{CoreHandle, now, sleep, sleep_until};
use sealblock_stack::{Cause, CloseLimit, StackError};
use sealblock_units::ByteCount;

use crate::control::protocol::{RESIZING, ResizeReport};
use crate::devices::members::{PlanMatch, fit, is_target, note_names, other_members_error};
use crate::devices::resize::ResizeResult;
use crate::devices::waiting::{OpenAttempt, Openings, Waiting};
use crate::devices::{DeviceTable, ServedDevice};
use crate::events::{EventSender, OpenedInfo};
use crate::exports::Exports;
use crate::exports::block_device::Ended;
use crate::exports::export::{Change, Subsystems};
use crate::exports::offered::{Identities, Offered, OfferedNamespace, serial_of};
use crate::plan::{NBD, NamespacePlan, Plan};

/// How often a waiting task checks its condition.
const DRAIN_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Clients have this time to close their connections when the server ends, before it no longer waits for them to close
/// its devices.
const MIN_DRAIN: Duration = Duration::from_secs(1);

/// A server.
pub struct Server {
    pub(crate) exports: Exports,
    pub(crate) offered: Subsystems,
    /// Namespaces of the plan whose targets are not open.
    pub(crate) openings: Openings,
    limits: Limits,
    devices: DeviceTable,
}

/// How a server has ended.
pub struct Ending {
    /// False if commands may still be in flight: of a block device that is in use and stays, of clients whose commands did
    /// not complete in time, or of a device that did not close. They end only with the process.
    pub is_idle: bool,
    /// The error of the first device that could not be closed cleanly.
    pub closed: Result<(), StackError>,
}

/// Devices that are ready to be served, when the exports are prepared too.
struct Prepared {
    wanted: Subsystems,
    waiting: Vec<Waiting>,
}

impl Server {
    /// A server that serves nothing yet, on these cores; there must be at least one. `attaches` is the reason why these
    /// cores cannot serve block devices of the kernel, if they cannot.
    pub fn new(
        cores: Vec<CoreHandle>,
        limits: &Limits,
        events: EventSender,
        attaches: Result<(), StackError>,
    ) -> Result<Server, StackError> {
        Ok(Server {
            exports: Exports::new(&cores, limits, attaches)?,
            offered: BTreeMap::new(),
            openings: Openings::new(),
            limits: limits.clone(),
            devices: DeviceTable::new(cores, events),
        })
    }

    /// The current number of connections.
    pub fn connections(&self) -> usize {
        self.exports.connections()
    }

    /// True if the plan has limits that take effect only at the next start.
    pub fn waits_for_restart(&self, plan: &Plan) -> bool {
        plan.limits != self.limits
    }

    /// Applies the plan. What the plan does not change is not touched.
    ///
    /// # Errors
    /// If the plan cannot be applied; then nothing has changed.
    pub async fn change(&mut self, plan: &Plan) -> Result<(), StackError> {
        self.openings.end_tries(&self.devices).await;
        let mut fresh = Vec::new();
        let prepared = self.prepare(plan, &mut fresh).await;
        let prepared = match prepared {
            Ok(prepared) => prepared,
            Err(failure) => {
                let devices = fresh.into_iter().filter_map(Rc::into_inner);
                // The devices opened for a failed plan have not been written. A failure to close them would hide the
                // first error.
                self.devices.close(devices, DeviceTable::idle_limit()).await.ok();
                return Err(failure);
            }
        };
        self.apply(plan, prepared).await?;
        // These devices were opened but cannot be served; they have not been written.
        let devices = fresh.into_iter().filter_map(Rc::into_inner);
        self.devices.close(devices, DeviceTable::idle_limit()).await.ok();
        Ok(())
    }

    /// Opens new devices and binds new listeners. `fresh` gets what was opened, even after a failure.
    async fn prepare(&mut self, plan: &Plan, fresh: &mut Vec<Rc<ServedDevice>>) -> Result<Prepared, StackError> {
        let (mut wanted, mut waiting, mut taken) = (BTreeMap::new(), Vec::new(), Identities::new());
        let mut devices = self.open_all(plan, fresh).await?.into_iter();
        for subsystem in &plan.subsystems {
            let mut spaces = BTreeMap::new();
            for (namespace, device) in subsystem.namespaces.iter().zip(devices.by_ref()) {
                let nqn = &subsystem.nqn;
                match device.and_then(|device| OfferedNamespace::new(nqn, namespace, device, &mut taken)) {
                    Ok(space) => drop(spaces.insert(namespace.nsid, space)),
                    Err(failure) => waiting.push(self.openings.go_without(plan.strict, nqn, namespace, failure)?),
                }
            }
            let serial = subsystem.serial.clone().unwrap_or_else(|| serial_of(&subsystem.nqn));
            wanted.insert(subsystem.nqn.clone(), Offered { plan: subsystem.clone(), serial, spaces });
        }
        if self.openings.is_new() && taken.is_empty() {
            refuse_nothing(&waiting)?;
        }
        self.exports.prepare(Change { plan, before: &self.offered, wanted: &wanted }).await?;
        Ok(Prepared { wanted, waiting })
    }

    /// The devices of all namespaces in the order of the plan: those that are already open, and new ones, opened
    /// concurrently, which are also added to `fresh`.
    ///
    /// # Errors
    /// If the plan contradicts a device that is already open.
    async fn open_all(
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
                None => (self.devices.open(namespace).await.map(Rc::new), true),
            }
        });
        let devices = join_all(opened).await;
        let new = devices.iter().filter(|(_, is_new)| *is_new).filter_map(|(device, _)| device.as_ref().ok());
        fresh.extend(new.cloned());
        Ok(devices.into_iter().map(|(device, _)| device).collect())
    }

    /// The device that is already open for this namespace.
    async fn known(&self, nqn: &Nqn, plan: &NamespacePlan) -> Result<Option<Rc<ServedDevice>>, StackError> {
        let at_its_place = self.offered.get(nqn).and_then(|subsystem| subsystem.spaces.get(&plan.nsid));
        let spaces = || self.offered.values().flat_map(|subsystem| subsystem.spaces.values());
        let has_its_uuid = |space: &OfferedNamespace| plan.uuid.is_some() && space.plan.uuid == plan.uuid;
        // Two memory targets are two devices, unless they have the same configured identity; a path is one device
        // wherever it is served.
        let elsewhere = spaces().filter(|space| plan.target.path().is_some() || has_its_uuid(space));
        for space in at_its_place.into_iter().chain(elsewhere) {
            match fit(&space.device, plan).await {
                PlanMatch::Same => {
                    note_names(&plan.target);
                    return Ok(Some(Rc::clone(&space.device)));
                }
                PlanMatch::Outdated(members) => {
                    tracing::warn!(
                        "the configuration has {}, but its members are {} now: it is served on with these, and would not open so \
                         at the next start",
                        plan.target,
                        members.join(" and ")
                    );
                    return Ok(Some(Rc::clone(&space.device)));
                }
                PlanMatch::Other(members) => return Err(other_members_error(&plan.target, &members)),
                PlanMatch::No => {}
            }
        }
        let refused = |doing, why| {
            let refused = StackError::new(Cause::Refused, doing, why).on(&plan.target);
            Err(refused.advise("remove it first, or restart the server"))
        };
        // If it were opened a second time, changes would come in two ways at once; and memory would be a different
        // device.
        let is_place = |space: &OfferedNamespace| at_its_place.is_some_and(|own| std::ptr::eq(own, space));
        let is_named = |space: &OfferedNamespace| {
            (plan.target.path().is_some() || is_place(space) || has_its_uuid(space))
                && is_target(&space.device.target, &plan.target)
        };
        if spaces().any(is_named) {
            return refused("change read_only, relocate or as_member", "it is served with the other setting");
        }
        // Hosts would find other content under an identity that they know.
        if spaces().any(|space| has_its_uuid(space) && space.plan.target.is_volatile()) {
            return refused(
                "change the target of a uuid",
                "its uuid is that of a served memory target, whose data would be lost",
            );
        }
        Ok(None)
    }

    /// Applies the prepared plan. A failure here is a bug, or a core has stopped; what cannot be
    /// closed cleanly is logged.
    async fn apply(&mut self, plan: &Plan, prepared: Prepared) -> Result<(), StackError> {
        let Prepared { wanted, waiting } = prepared;
        self.openings.replace(waiting);
        let before = std::mem::take(&mut self.offered);
        self.exports.change(Change { plan, before: &before, wanted: &wanted }).await?;
        self.offered = wanted;
        self.offered.values().flat_map(|offered| offered.spaces.values()).for_each(OfferedNamespace::rename);
        self.exports.listen(plan).await?;
        self.configure_scrubs().await;
        let devices: Vec<_> = before.into_values().flat_map(|old| old.spaces.into_values()).map(|s| s.device).collect();
        // Devices without another owner are no longer served by any namespace.
        let going: Vec<ServedDevice> = devices.into_iter().filter_map(Rc::into_inner).collect();
        let limit = match self.wait_until_idle(&going).await {
            true => DeviceTable::idle_limit(),
            false => CloseLimit::after(now()),
        };
        // The new plan is in effect all the same.
        if let Err(failure) = self.devices.close(going, limit).await {
            tracing::error!("{}", failure.in_short());
        }
        Ok(())
    }

    /// Waits for commands in flight on removed devices, up to the drain time, because closing the volume would fail
    /// them. False if some are still in flight.
    async fn wait_until_idle(&self, devices: &[ServedDevice]) -> bool {
        let deadline = now() + self.limits.drain;
        while devices.iter().any(ServedDevice::is_used) {
            if now() >= deadline {
                tracing::warn!("commands were still in flight when their device was closed");
                return false;
            }
            sleep(DRAIN_POLL_INTERVAL).await;
        }
        true
    }

    /// Waits for the next finished attempt to open a target, for [`Server::admit`]. Cancel safe.
    pub async fn next_tried(&mut self) -> OpenAttempt {
        self.openings.next_tried(&self.devices).await
    }

    /// Serves the namespace that an attempt has opened; returns what is newly served.
    pub async fn admit(&mut self, OpenAttempt { nqn, nsid, device }: OpenAttempt) -> Option<OpenedInfo> {
        let waiting = self.openings.find(&nqn, nsid)?;
        let device = match device {
            Ok(device) => Rc::new(device),
            Err(failure) => {
                waiting.failed(failure);
                return None;
            }
        };
        let plan = waiting.plan.clone();
        match self.offer(&nqn, &plan, Rc::clone(&device)).await {
            Ok(nbd) => {
                drop(device);
                let opened = self.openings.remove(&nqn, nsid)?.opened_info(nbd);
                self.configure_scrubs().await;
                Some(opened)
            }
            Err(failure) => {
                self.openings.find(&nqn, nsid)?.failed(failure);
                // The device has not been written; a failure to close it would hide why it is not served.
                self.devices.close(Rc::into_inner(device), DeviceTable::idle_limit()).await.ok();
                None
            }
        }
    }

    /// Serves a namespace whose target was not open; returns the name of its NBD export.
    async fn offer(
        &mut self,
        nqn: &Nqn,
        plan: &NamespacePlan,
        device: Rc<ServedDevice>,
    ) -> Result<Option<String>, StackError> {
        let spaces = self.offered.values().flat_map(|offered| offered.spaces.values());
        let mut taken = spaces.map(|space| (space.uuid, space.plan.target.clone())).collect();
        let space = OfferedNamespace::new(nqn, plan, device, &mut taken)?;
        let gone = || StackError::new(Cause::Unreachable, "serve", "its subsystem was removed").on(nqn);
        let offered = self.offered.get_mut(nqn).ok_or_else(gone)?;
        self.exports.add(&offered.plan, &space).await?;
        let names = self.exports.names(&offered.plan, plan, Some(&space.device));
        offered.spaces.insert(plan.nsid, space);
        Ok(names.into_iter().find(|export| export.protocol == NBD).map(|export| export.name))
    }

    /// Resizes the volume of a namespace in use, and notifies hosts.
    ///
    /// # Errors
    /// If the size did not change; the error has the reason. The volume is still served unless the error says
    /// otherwise.
    pub async fn resize(&mut self, nqn: &str, nsid: u32, size: ByteCount) -> Result<ResizeReport, StackError> {
        let offered = self.offered.iter().find(|(name, _)| name.as_str() == nqn);
        let space = offered.and_then(|(_, offered)| offered.spaces.get(&nsid));
        let gone = || StackError::new(Cause::Unreachable, RESIZING, "it is no longer served").on(nqn);
        let device = Rc::clone(&space.ok_or_else(gone)?.device);
        self.exports.check_resize(&device)?;
        let ResizeResult { device: seen, result: outcome } = device.resize(size).await?;
        // After a failed resize the size is the old one, so there is nothing to publish.
        if let Some(seen) = seen.filter(|seen| seen.geometry() != device.shared().geometry()) {
            device.state.report_resized(seen.geometry().capacity_blocks);
            device.set_shared(seen);
            self.exports.resize(&device, &self.offered)?;
        }
        outcome
    }

    /// Applies the scrub settings of the plan to all devices.
    async fn configure_scrubs(&self) {
        let spaces = self.offered.values().flat_map(|offered| offered.spaces.values());
        join_all(spaces.map(|space| space.device.handle.configure_scrub(space.plan.scrub))).await;
    }

    /// Waits for commands in flight, up to the drain time, and closes every device cleanly, as far as these commands
    /// allow that.
    pub async fn end(self) -> Ending {
        let Server { mut exports, mut openings, offered, limits, devices } = self;
        let ended = exports.leave().await;
        let given_up = now() + limits.drain.max(MIN_DRAIN);
        let spaces = offered.into_values().flat_map(|offered| offered.spaces.into_values());
        let served: Vec<_> = spaces.map(|space| space.device).collect();
        let mut stopping = pin!(join(openings.end_tries_soon(&devices), exports.stop()));
        let is_drained = matches!(select(stopping.as_mut(), pin!(sleep_until(given_up))).await, Either::Left(_));
        let served = served.into_iter().filter_map(Rc::into_inner);
        let closed = match is_drained {
            true => devices.close(served, DeviceTable::idle_limit()).await,
            // Commands that are left had their time; replies may still be on their way.
            false => join(stopping, devices.close(served, CloseLimit::after(given_up))).await.1,
        };
        Ending { is_idle: is_drained && ended == Ended::Gone && closed.is_ok(), closed }
    }
}

/// Refuses to start if no target opens, so that the operator sees the error, or the service manager retries.
fn refuse_nothing(waiting: &[Waiting]) -> Result<(), StackError> {
    let Some((first, others)) = waiting.split_first() else { return Ok(()) };
    for other in others {
        tracing::error!("{}", other.failure().in_short());
    }
    Err(first.failure().clone())
}

#[cfg(test)]
mod tests;
