//! The block devices of this machine's kernel that the server serves: one more way to reach a namespace.
//!
//! Invariants: a plan that would remove or change a block device in use is refused; a device is open as long as the
//! kernel has it.

use std::rc::{Rc, Weak};

use futures_util::future::{FutureExt, LocalBoxFuture};
use sealblock_runtime_reactor::CoreHandle;
use sealblock_stack::target::TargetName;
use sealblock_stack::{Cause, StackError};

use crate::control::protocol::RESIZING;
use crate::devices::ServedDevice;
use crate::events::Serving;
use crate::exports::block_device::{BlockDevice, Ended};
use crate::exports::export::{Change, Export, Subsystems};
use crate::exports::listeners::Place;
use crate::exports::offered::OfferedNamespace;
use crate::plan::{BlockDevicePlan, NamespacePlan, SubsystemPlan};
use crate::status::server::ExportStatus;

const ACTION: &str = "attach";

/// A namespace that is to be a block device too.
struct WantedBlockDevice {
    /// How it is attached.
    pub plan: BlockDevicePlan,
    /// The namespace's target.
    pub target: TargetName,
    /// The device.
    pub device: Rc<ServedDevice>,
}

/// A namespace that is a block device.
struct AttachedNamespace {
    plan: BlockDevicePlan,
    /// Weak, because others own it.
    device: Weak<ServedDevice>,
    served: BlockDevice,
}

impl AttachedNamespace {
    fn is(&self, wanted: &WantedBlockDevice) -> bool {
        self.plan == wanted.plan && self.is_of(&wanted.device) && !self.served.has_ended()
    }

    fn is_of(&self, device: &Rc<ServedDevice>) -> bool {
        Weak::as_ptr(&self.device) == Rc::as_ptr(device)
    }
}

/// The block devices of the server.
pub struct BlockDevices {
    cores: Vec<CoreHandle>,
    /// The reason why these cores cannot serve any, if they cannot.
    usable: Result<(), StackError>,
    attached: Vec<AttachedNamespace>,
    /// The devices that were made for a plan that is being applied.
    made: Vec<AttachedNamespace>,
}

impl BlockDevices {
    /// No block devices yet, on these cores.
    pub fn new(cores: Vec<CoreHandle>, usable: Result<(), StackError>) -> BlockDevices {
        BlockDevices { cores, usable, attached: Vec::new(), made: Vec::new() }
    }

    /// Makes those that do not exist yet. Existing ones are not changed.
    ///
    /// # Errors
    /// If one cannot be made, or if an existing one in use would be removed or changed. Then those that were made are
    /// removed again.
    async fn make_new(&self, wanted: &[WantedBlockDevice]) -> Result<Vec<AttachedNamespace>, StackError> {
        if !wanted.is_empty() {
            self.usable.clone()?;
        }
        self.check(wanted)?;
        let mut made = Vec::new();
        for wanted in wanted.iter().filter(|wanted| !self.attached.iter().any(|attached| attached.is(wanted))) {
            match self.attach(wanted).await {
                Ok(attached) => made.push(attached),
                Err(failure) => {
                    end_all(made).await;
                    return Err(failure);
                }
            }
        }
        Ok(made)
    }

    /// Refuses a plan that would remove or change a block device that must stay as it is.
    fn check(&self, wanted: &[WantedBlockDevice]) -> Result<(), StackError> {
        let stays = |attached: &AttachedNamespace| wanted.iter().any(|wanted| attached.is(wanted));
        for going in self.attached.iter().filter(|attached| !stays(attached) && !attached.served.has_ended()) {
            let refused =
                |why: &str| StackError::new(Cause::Refused, ACTION, why).on(going.served.info().path.display());
            if wanted.iter().any(|wanted| wanted.plan.number == going.plan.number) {
                return Err(refused("it is attached with another target or other options")
                    .advise("remove it from the configuration, reload, add it again and reload"));
            }
            if let Some(users) = going.served.users() {
                return Err(refused(&format!("it is in use: {users}")).advise("stop its users first"));
            }
        }
        Ok(())
    }

    /// Keeps the wanted and the newly attached devices, and removes the others. A device that is in use by now stays.
    async fn change(&mut self, wanted: &[WantedBlockDevice]) {
        let is_wanted = |attached: &AttachedNamespace| wanted.iter().any(|wanted| attached.is(wanted));
        let before = std::mem::take(&mut self.attached);
        let (mut stay, go): (Vec<_>, Vec<_>) = before.into_iter().partition(is_wanted);
        stay.append(&mut self.made);
        self.attached = stay;
        end_all(go).await;
    }

    async fn attach(&self, wanted: &WantedBlockDevice) -> Result<AttachedNamespace, StackError> {
        let served = BlockDevice::make(&wanted.plan, &wanted.target, &wanted.device, &self.cores).await?;
        Ok(AttachedNamespace { plan: wanted.plan.clone(), device: Rc::downgrade(&wanted.device), served })
    }

    fn there(&self) -> impl Iterator<Item = &AttachedNamespace> {
        self.attached.iter().filter(|attached| !attached.served.has_ended())
    }
}

impl Export for BlockDevices {
    fn protocol(&self) -> &'static str {
        "ublk"
    }

    fn prepare<'a>(&'a mut self, change: Change<'a>) -> LocalBoxFuture<'a, Result<(), StackError>> {
        let making = async move {
            self.made = self.make_new(&wanted_of(change.wanted)).await?;
            Ok(())
        };
        making.boxed_local()
    }

    /// Nothing remains of a plan that fails, because this export prepares last.
    fn abandon(&mut self) {}

    fn withdraw<'a>(&'a mut self, change: Change<'a>) -> LocalBoxFuture<'a, Result<(), StackError>> {
        let changing = async move {
            self.change(&wanted_of(change.wanted)).await;
            Ok(())
        };
        changing.boxed_local()
    }

    fn offer(&mut self, _: Change<'_>) -> Result<(), StackError> {
        Ok(())
    }

    /// If a block device cannot be made, this is logged, and the namespace is served nevertheless.
    fn add<'a>(
        &'a mut self,
        _: &'a SubsystemPlan,
        space: &'a OfferedNamespace,
    ) -> LocalBoxFuture<'a, Result<(), StackError>> {
        let adding = async move {
            let Some(wanted) = wanted_block_device(space) else { return Ok(()) };
            let made = match &self.usable {
                Ok(()) => self.attach(&wanted).await,
                Err(failure) => Err(failure.clone()),
            };
            match made {
                Ok(attached) => self.attached.push(attached),
                Err(failure) => tracing::error!("{}", failure.in_short()),
            }
            Ok(())
        };
        adding.boxed_local()
    }

    /// This export is the last one, so no other one can refuse what it adds.
    fn remove(&mut self, _: &SubsystemPlan, _: &OfferedNamespace) -> Result<(), StackError> {
        Ok(())
    }

    /// On some kernels, the size of a block device cannot change.
    fn check_resize(&self, device: &Rc<ServedDevice>) -> Result<(), StackError> {
        let mut own = self.there().filter(|attached| attached.is_of(device));
        match own.find(|attached| !attached.served.can_resize()) {
            None => Ok(()),
            Some(AttachedNamespace { served, .. }) => {
                let why = format!(
                    "it is attached as {}, which cannot be resized while attached before Linux 6.16",
                    served.info().path.display()
                );
                Err(StackError::new(Cause::Refused, RESIZING, why).on(&device.target))
            }
        }
    }

    fn resize(&mut self, device: &Rc<ServedDevice>, _: &Subsystems) -> Result<(), StackError> {
        let own = self.attached.iter_mut().filter(|attached| attached.is_of(device) && !attached.served.has_ended());
        let resized: Vec<_> = own.map(|attached| attached.served.resize(device)).collect();
        resized.into_iter().collect()
    }

    fn names(
        &self,
        _: &SubsystemPlan,
        namespace: &NamespacePlan,
        device: Option<&Rc<ServedDevice>>,
    ) -> Vec<ExportStatus> {
        let own = self.there().filter(|attached| device.is_some_and(|device| attached.is_of(device)));
        let status = |attached: &AttachedNamespace| ExportStatus {
            protocol: self.protocol().to_owned(),
            name: attached.served.info().path.display().to_string(),
            nsid: None,
            hosts: None,
            uri: None,
            read_only: namespace.read_only,
        };
        own.map(status).collect()
    }

    fn serving(&self, _: &Subsystems, serving: &mut Serving) {
        serving.block_devices = self.there().map(|attached| attached.served.info().clone()).collect();
    }

    fn places(&self) -> Vec<Place> {
        Vec::new()
    }

    /// Removes all of them except those in use: these wait for the next server, and their commands end with this
    /// process.
    fn leave(&mut self) -> LocalBoxFuture<'_, Ended> {
        end_all(std::mem::take(&mut self.attached)).boxed_local()
    }
}

/// The block devices that the plan requests for the open devices.
fn wanted_of(wanted: &Subsystems) -> Vec<WantedBlockDevice> {
    let spaces = wanted.values().flat_map(|offered| offered.spaces.values());
    spaces.filter_map(wanted_block_device).collect()
}

fn wanted_block_device(space: &OfferedNamespace) -> Option<WantedBlockDevice> {
    let (plan, target) = (space.plan.block_device.clone()?, space.plan.target.clone());
    Some(WantedBlockDevice { plan, target, device: Rc::clone(&space.device) })
}

/// Ends block devices; returns [`Ended::Left`] if any of them still exists.
async fn end_all(attached: Vec<AttachedNamespace>) -> Ended {
    let mut all = Ended::Gone;
    for AttachedNamespace { served, .. } in attached {
        let path = served.info().path.clone();
        if served.has_ended() {
            continue;
        }
        match served.end().await {
            Ok(Ended::Gone) => {}
            Ok(Ended::Left) => all = Ended::Left,
            Err(error) => {
                tracing::error!(device = %path.display(), %error, "the block device was not removed");
                all = Ended::Left;
            }
        }
    }
    all
}
