//! Open devices, each on a core of its own choice, and what closes them there.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use futures_util::future::join_all;
use sealblock_block::{DynDevice, Gate};
use sealblock_exports_nvme_tcp::NamespaceState;
use sealblock_layers_cross_core::SharedDevice;
use sealblock_runtime_reactor::{CoreGone, CoreHandle, CoreLocal};
use sealblock_stack::target::TargetLabel;
use sealblock_stack::{Access, Cause, OpenMirror, ReadOnly, StackError, Usage, open_for};
use sealblock_units::ByteCount;

use crate::events::EventSender;
use crate::inspect::{DeviceInspector, InspectedDevice};
use crate::mirrors::{MirrorHandle, watch};
use crate::observer::{ReportTargets, RequestObserver};
use crate::plan::NamespacePlan;
use crate::resize::{LocalDevice, ResizeResult};
use crate::scrub::{ScrubHandle, ScrubTask};

/// An open device.
pub struct ServedDevice {
    /// What it is called: a mirror has another name when it has other members.
    pub target: TargetLabel,
    /// What it was opened to do.
    pub access: Access,
    /// What it was opened for.
    pub usage: Usage,
    /// What all namespaces of it share, however often they are taken away and offered anew.
    pub state: Arc<NamespaceState>,
    /// The identity of the volume or mirror, where it is one.
    pub volume_uuid: Option<[u8; 16]>,
    /// Its scrub, which begins nothing until it has settings.
    pub scrub: ScrubHandle,
    /// Its replicas, if it is a mirror.
    pub mirror: Option<MirrorHandle>,
    /// How it is.
    pub insight: DeviceInspector,
    /// The device for namespaces on every core, as it is now.
    shared: RefCell<SharedDevice>,
    handle: CoreHandle,
    home: CoreLocal<LocalDevice>,
    _seat: Rc<()>,
}

impl ServedDevice {
    /// The device for namespaces on every core.
    pub fn shared(&self) -> SharedDevice {
        self.shared.borrow().clone()
    }

    /// Has this be what namespaces are made of: the same device with another size.
    pub fn see(&self, shared: SharedDevice) {
        self.shared.replace(shared);
    }

    /// Gives it another size, on its own core.
    ///
    /// # Errors
    /// When that core is gone.
    pub async fn resize(&self, size: ByteCount) -> Result<ResizeResult, StackError> {
        let (home, shared) = (self.home.clone(), self.shared());
        let resized = self.handle.call(move || async move {
            match home.get() {
                Some(home) => Ok(home.resize(&shared, size).await),
                None => Err(of_core("changing the size", CoreGone::Stopped)),
            }
        });
        resized.await.map_err(|gone| of_core("changing the size", gone).on(&self.target))?
    }

    /// Whether namespaces of it are still there, offered or held by commands in flight.
    pub fn is_used(&self) -> bool {
        Arc::strong_count(&self.state) > 1
    }
}

/// The cores, and how many devices live on each.
pub struct DeviceTable {
    handles: Vec<CoreHandle>,
    /// Cloned for each device, so that the count of clones is that of devices.
    seats: Vec<Rc<()>>,
    events: EventSender,
}

impl DeviceTable {
    /// No devices on these cores, of which there is at least one.
    pub fn new(handles: Vec<CoreHandle>, events: EventSender) -> DeviceTable {
        let seats = handles.iter().map(|_| Rc::default()).collect();
        DeviceTable { handles, seats, events }
    }

    /// Opens a device on the core that has the fewest, counting those that are being opened. Dropped before it has ended, it goes on,
    /// and what it opens is not closed in good order.
    ///
    /// # Errors
    /// Why it cannot be opened.
    pub fn open(&self, plan: &NamespacePlan) -> impl Future<Output = Result<ServedDevice, StackError>> + 'static {
        let core = (0..self.seats.len()).min_by_key(|core| Rc::strong_count(&self.seats[*core])).unwrap_or(0);
        let (plan, seat) = (plan.clone(), Rc::clone(&self.seats[core]));
        let (handle, events) = (self.handles[core].clone(), self.events.clone());
        async move {
            let planned = plan.clone();
            let state = Arc::<NamespaceState>::default();
            let ties = ReportTargets::to(&state);
            let theirs = ties.clone();
            let opened = handle.call(move || open_on_core(planned, theirs, events)).await;
            let opened = opened.map_err(|gone| of_core("opening", gone).on(&plan.target))??;
            Ok(ServedDevice {
                access: plan.access(),
                usage: plan.usage,
                target: opened.called,
                state,
                volume_uuid: opened.volume_uuid,
                scrub: ScrubHandle::new(handle.clone(), opened.scrub_task),
                mirror: opened.mirror.map(|mirror| MirrorHandle::new(handle.clone(), mirror)),
                insight: DeviceInspector::new(handle.clone(), opened.watched, ties),
                shared: RefCell::new(opened.shared),
                handle,
                home: opened.home,
                _seat: seat,
            })
        }
    }

    /// Closes devices, all at once: volumes are clean then.
    ///
    /// # Errors
    /// The first that could not be closed; the others are closed all the same.
    pub async fn close(&self, devices: impl IntoIterator<Item = ServedDevice>) -> Result<(), StackError> {
        let closings = devices.into_iter().map(|device| {
            async move {
                // What the scrub keeps, it keeps on the device.
                device.scrub.close().await;
                let home = device.home;
                let closed = device.handle.call(move || async move {
                    match home.get() {
                        Some(home) => home.close().await,
                        None => Err(of_core("closing", CoreGone::Stopped)),
                    }
                });
                closed.await.map_err(|gone| of_core("closing", gone).on(device.target))?
            }
        });
        join_all(closings.collect::<Vec<_>>()).await.into_iter().collect()
    }
}

/// A device that a core has opened.
struct OpenedDevice {
    called: TargetLabel,
    shared: SharedDevice,
    volume_uuid: Option<[u8; 16]>,
    mirror: Option<CoreLocal<OpenMirror>>,
    home: CoreLocal<LocalDevice>,
    scrub_task: CoreLocal<ScrubTask>,
    watched: CoreLocal<InspectedDevice>,
}

async fn open_on_core(
    plan: NamespacePlan,
    ties: ReportTargets,
    events: EventSender,
) -> Result<OpenedDevice, StackError> {
    let target = &plan.target;
    let opened = open_for(target, plan.access(), plan.usage).await?;
    if let Err(failure) = opened.check_blocks("serving") {
        return opened.close(Err(failure)).await;
    }
    let (mut gate, info, closer) = opened.share();
    if plan.read_only {
        gate = Rc::new(Gate::new(target.to_string(), DynDevice::new(ReadOnly::new(gate))));
    }
    watch(&info, &ties.state);
    let mirror_uuid = info.mirror.as_ref().map(|mirror| mirror.describe().uuid);
    let called = info.mirror.as_ref().map_or_else(|| TargetLabel::new(target), |mirror| mirror.target().clone());
    let shared = SharedDevice::publish(Rc::clone(&gate));
    shared.observe(RequestObserver::new(called.clone(), ties.clone()));
    let scrub_task = ScrubTask::open(called.clone(), gate, shared.attach(), ties.state, events).await;
    let watched = InspectedDevice::new(&scrub_task, &info);
    Ok(OpenedDevice {
        called,
        shared,
        volume_uuid: info.volume.as_ref().map(|volume| volume.uuid).or(mirror_uuid),
        mirror: info.mirror.map(CoreLocal::new),
        home: CoreLocal::new(Rc::new(LocalDevice::new(&plan, closer, Rc::clone(&scrub_task)))),
        scrub_task: CoreLocal::new(scrub_task),
        watched: CoreLocal::new(Rc::new(watched)),
    })
}

fn of_core(doing: &str, gone: CoreGone) -> StackError {
    StackError::new(Cause::Io, doing, gone)
}
