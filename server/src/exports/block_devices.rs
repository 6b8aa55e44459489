//! The block devices of this machine's kernel that the server keeps besides its exports: one more way to a namespace.
//!
//! Invariants: what a plan takes away or changes is not in use, or the plan is refused; a device is open as long as the kernel has it.

use std::path::PathBuf;
use std::rc::{Rc, Weak};

use sealblock_runtime_reactor::CoreHandle;
use sealblock_stack::target::TargetName;
use sealblock_stack::{Cause, StackError};

use crate::control::protocol::RESIZING;
use crate::devices::ServedDevice;
use crate::events::AttachedInfo;
use crate::exports::block_device::{BlockDevice, Ended};
use crate::plan::BlockDevicePlan;

const ACTION: &str = "attach";

/// A namespace that is to be a block device as well.
pub struct WantedBlockDevice {
    /// How.
    pub plan: BlockDevicePlan,
    /// What the namespace is called.
    pub target: TargetName,
    /// What it is.
    pub device: Rc<ServedDevice>,
}

/// A namespace that is a block device.
pub struct AttachedNamespace {
    plan: BlockDevicePlan,
    /// Others own it.
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
    /// Why these cores can serve none, if they cannot.
    usable: Result<(), StackError>,
    attached: Vec<AttachedNamespace>,
}

impl BlockDevices {
    /// None yet, on these cores.
    pub fn new(cores: Vec<CoreHandle>, usable: Result<(), StackError>) -> BlockDevices {
        BlockDevices { cores, usable, attached: Vec::new() }
    }

    /// Makes those that are not there. What is there is not touched.
    ///
    /// # Errors
    /// When one cannot be made, or one that is there is in use and would go, or would change. Then those that were made are gone again.
    pub async fn make_new(&self, wanted: &[WantedBlockDevice]) -> Result<Vec<AttachedNamespace>, StackError> {
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

    /// Refuses what takes away or changes a block device that must stay as it is.
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

    /// Keeps the wanted and the newly attached devices, and removes the rest. A device that came into use meanwhile stays.
    pub async fn change(&mut self, made: Vec<AttachedNamespace>, wanted: &[WantedBlockDevice]) {
        let is_wanted = |attached: &AttachedNamespace| wanted.iter().any(|wanted| attached.is(wanted));
        let before = std::mem::take(&mut self.attached);
        let (mut stay, go): (Vec<_>, Vec<_>) = before.into_iter().partition(is_wanted);
        stay.extend(made);
        self.attached = stay;
        end_all(go).await;
    }

    /// Makes one more, of a namespace that was not open.
    ///
    /// # Errors
    /// Why it is not there.
    pub async fn add(&mut self, wanted: &WantedBlockDevice) -> Result<(), StackError> {
        self.usable.clone()?;
        let attached = self.attach(wanted).await?;
        self.attached.push(attached);
        Ok(())
    }

    async fn attach(&self, wanted: &WantedBlockDevice) -> Result<AttachedNamespace, StackError> {
        let served = BlockDevice::make(&wanted.plan, &wanted.target, &wanted.device, &self.cores).await?;
        Ok(AttachedNamespace { plan: wanted.plan.clone(), device: Rc::downgrade(&wanted.device), served })
    }

    /// Those that are there.
    pub fn serving(&self) -> Vec<AttachedInfo> {
        self.there().map(|attached| attached.served.info().clone()).collect()
    }

    /// The block devices that a device is.
    pub fn paths_of(&self, device: &Rc<ServedDevice>) -> Vec<PathBuf> {
        let own = self.there().filter(|attached| attached.is_of(device));
        own.map(|attached| attached.served.info().path.clone()).collect()
    }

    /// Refuses another size of a device that is a block device of a kernel which keeps its size.
    ///
    /// # Errors
    /// Which one it is.
    pub fn check_resize(&self, device: &Rc<ServedDevice>) -> Result<(), StackError> {
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

    /// Gives the block devices of a device the size that it has by now.
    ///
    /// # Errors
    /// The first that keeps its size.
    pub fn resize(&mut self, device: &Rc<ServedDevice>) -> Result<(), StackError> {
        let own = self.attached.iter_mut().filter(|attached| attached.is_of(device) && !attached.served.has_ended());
        let resized: Vec<_> = own.map(|attached| attached.served.resize(device)).collect();
        resized.into_iter().collect()
    }

    fn there(&self) -> impl Iterator<Item = &AttachedNamespace> {
        self.attached.iter().filter(|attached| !attached.served.has_ended())
    }

    /// Takes all of them away, but for those in use: they wait for the next server, and their commands end with this process.
    pub async fn end(&mut self) -> Ended {
        end_all(std::mem::take(&mut self.attached)).await
    }
}

/// Ends block devices; [`Ended::Left`] if something of one is still there.
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
