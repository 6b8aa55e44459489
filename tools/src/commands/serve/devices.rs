//! Open devices, each on a core of its own choice, and what closes them there.

use std::rc::Rc;
use std::sync::{Arc, Weak};

use futures_util::future::join_all;
use sealblock_block::{Gate, Stack};
use sealblock_exports_nvme_tcp::NamespaceState;
use sealblock_layers_remote_core::SharedDevice;
use sealblock_runtime_reactor::{CoreGone, CoreHandle, Homed};

use super::legs::MirrorHandle;
use super::plan::NamespacePlan;
use super::scrub::{Keeper, ScrubHandle, Teller};
use super::watch::watch;
use crate::exit::{Cause, Failure};
use crate::stack::{Access, Closer, OpenMirror, ReadOnly, Usage, open_for};
use crate::target::Target;

/// An open device.
pub struct Device {
    /// What it is.
    pub target: Target,
    /// Whether it was opened for reading only.
    pub read_only: bool,
    /// What it was opened for.
    pub usage: Usage,
    /// The device for namespaces on every core.
    pub shared: SharedDevice,
    /// What all namespaces of it share, however often they are taken away and offered anew.
    pub state: Arc<NamespaceState>,
    /// The identity of the volume or mirror, where it is one.
    pub volume_uuid: Option<[u8; 16]>,
    /// Its scrub, which begins nothing until it has settings.
    pub scrub: ScrubHandle,
    /// Its legs, where it is a mirror.
    pub mirror: Option<MirrorHandle>,
    core: usize,
    closer: Homed<Closer>,
}

impl Device {
    /// Whether namespaces of it are still there, offered or held by commands in flight.
    pub fn is_used(&self) -> bool {
        Arc::strong_count(&self.state) > 1
    }

    /// Whether a namespace of this plan would have this device.
    pub fn fits(&self, plan: &NamespacePlan) -> bool {
        self.target == plan.target && self.read_only == plan.read_only && self.usage == plan.usage
    }
}

/// The cores, and how many devices live on each.
pub struct Homes {
    handles: Vec<CoreHandle>,
    devices: Vec<usize>,
    teller: Teller,
}

impl Homes {
    /// No devices on these cores, of which there is at least one.
    pub fn new(handles: Vec<CoreHandle>, teller: Teller) -> Homes {
        let devices = vec![0; handles.len()];
        Homes { handles, devices, teller }
    }

    /// Opens a device on the core that has the fewest.
    ///
    /// # Errors
    /// Why it cannot be opened.
    pub async fn open(&mut self, plan: &NamespacePlan) -> Result<Device, Failure> {
        let core = (0..self.devices.len()).min_by_key(|core| self.devices[*core]).unwrap_or(0);
        let (target, read_only, usage) = (plan.target.clone(), plan.read_only, plan.usage);
        let state = Arc::<NamespaceState>::default();
        let (theirs, teller) = (Arc::downgrade(&state), self.teller.clone());
        let opened = self.handles[core].call(move || at_home(target, (read_only, usage), theirs, teller)).await;
        let opened = opened.map_err(|gone| of_core("opening", gone).on(&plan.target))??;
        self.devices[core] += 1;
        let scrub = ScrubHandle::new(self.handles[core].clone(), opened.keeper);
        let mirror = opened.mirror.map(|mirror| MirrorHandle::new(self.handles[core].clone(), mirror));
        let (shared, volume_uuid, closer) = (opened.shared, opened.volume_uuid, opened.closer);
        let target = plan.target.clone();
        Ok(Device { target, read_only, usage, shared, state, volume_uuid, scrub, mirror, core, closer })
    }

    /// Closes devices, all at once: volumes are clean then.
    ///
    /// # Errors
    /// The first that could not be closed; the others are closed all the same.
    pub async fn close(&mut self, devices: impl IntoIterator<Item = Device>) -> Result<(), Failure> {
        let closings = devices.into_iter().map(|device| {
            self.devices[device.core] -= 1;
            let handle = self.handles[device.core].clone();
            async move {
                // What the scrub keeps, it keeps on the device.
                device.scrub.close().await;
                let closer = device.closer;
                let closed = handle.call(move || async move {
                    match closer.get() {
                        Some(closer) => closer.close().await,
                        None => Err(of_core("closing", CoreGone::Stopped)),
                    }
                });
                closed.await.map_err(|gone| of_core("closing", gone).on(device.target))?
            }
        });
        join_all(closings.collect::<Vec<_>>()).await.into_iter().collect()
    }
}

/// What a core says of a device that it has opened.
struct Opened {
    shared: SharedDevice,
    volume_uuid: Option<[u8; 16]>,
    mirror: Option<Homed<OpenMirror>>,
    closer: Homed<Closer>,
    keeper: Homed<Keeper>,
}

async fn at_home(
    target: Target,
    (read_only, usage): (bool, Usage),
    state: Weak<NamespaceState>,
    teller: Teller,
) -> Result<Opened, Failure> {
    let access = if read_only { Access::Read } else { Access::Write };
    let (mut gate, facts, closer) = open_for(&target, access, usage).await?.share();
    if read_only {
        gate = Rc::new(Gate::new(target.to_string(), Stack::new(ReadOnly::new(gate))));
    }
    watch(&facts, &state);
    let mirror_uuid = facts.mirror.as_ref().map(|mirror| mirror.describe().uuid);
    let shared = SharedDevice::publish(Rc::clone(&gate));
    let keeper = Keeper::open(&target, gate, shared.attach(), state, teller).await;
    Ok(Opened {
        shared,
        volume_uuid: facts.volume.as_ref().map(|volume| volume.uuid).or(mirror_uuid),
        mirror: facts.mirror.map(Homed::new),
        closer: Homed::new(Rc::new(closer)),
        keeper: Homed::new(keeper),
    })
}

fn of_core(doing: &str, gone: CoreGone) -> Failure {
    Failure::new(Cause::Io, doing, gone)
}
