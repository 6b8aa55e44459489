//! Open devices, each with a home core that is chosen when it is opened, and what closes them there.

pub(crate) mod bad_runs;
pub(crate) mod inspect;
pub(crate) mod members;
pub mod mirrors;
pub(crate) mod observer;
pub mod resize;
pub(crate) mod scrub;
pub(crate) mod waiting;

use std::cell::RefCell;
use std::convert::Infallible;
use std::pin::pin;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{Either, join_all, select};
use sealblock_block::ErrorKind;
use sealblock_exports_nvme_tcp::{DeviceIdentities, NamespaceState};
use sealblock_layers_cross_core::{EarlierClients, SharedDevice};
use sealblock_runtime_reactor::{
    CoreAddress, CoreGone, CoreHandle, CoreLocal, now, shutdown_requested, sleep, spawn, timeout,
};
use sealblock_scrub::Settings;
use sealblock_stack::identity::new_uuid;
use sealblock_stack::{
    Access, Cause, CloseLimit, OpenTarget, ReadOnly, RemoteDevices, StackError, TargetLabel, Usage, open_for, set_cores,
};
use sealblock_units::ByteCount;

use crate::control::protocol::{ControlCommand, ControlError, ControlErrorKind, RESIZING};
use crate::devices::inspect::unresponsive;
use crate::devices::mirrors::watch;
use crate::devices::observer::{ReportTargets, RequestObserver};
use crate::devices::resize::{LocalDevice, ResizeResult};
use crate::devices::scrub::ScrubTask;
use crate::events::{Event, EventSender};
use crate::plan::NamespacePlan;
use crate::status::damage::DamageStatus;
use crate::status::mirror::MirrorStatus;
use crate::status::scrub::ScrubStatus;
use crate::status::server::DeviceSnapshot;

/// Clients of an earlier server reconnect within this time, after which an NVMe host gives up by default.
const CLIENTS_COME_BACK: Duration = Duration::from_secs(600);
/// Time for the close of devices that no request uses: a mirror gives up a remote replica that is silent for 5 s, and then closes without
/// it.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(7);
/// Time limit for getting the state of a device from its core.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);

/// An open device.
pub struct ServedDevice {
    /// Its name; a mirror gets another name when its members change.
    pub target: TargetLabel,
    /// What it may be used for (reading or writing).
    pub access: Access,
    /// Its intended use.
    pub usage: Usage,
    /// State shared by all namespaces of the device; it survives their removal and re-creation.
    pub state: Arc<NamespaceState>,
    /// The identity of its content: that of the volume or mirror, or one drawn for what is lost with the server, so that
    /// no two memories are taken for one device.
    pub content_uuid: Option<[u8; 16]>,
    /// The identity of the namespace at another server that it is, if it is one.
    pub origin: Option<[u8; 16]>,
    /// See [`TargetInfo::content`](sealblock_stack::TargetInfo::content).
    pub content: Option<u64>,
    /// Drawn when it was opened: what tells that two names lead to it.
    identity: [u8; 16],
    /// The devices at other servers that it lies on.
    below: RemoteDevices,
    /// True if it is a mirror.
    pub is_mirror: bool,
    /// True if acknowledged but unflushed changes may be lost when this process is killed: a volume collects map
    /// entries in memory, and a mirror may choose the copy of a volume.
    pub gathers_changes: bool,
    /// The device on its own core.
    pub handle: DeviceHandle,
    /// The current device, for namespaces on every core.
    shared: RefCell<SharedDevice>,
    _core_load: Rc<()>,
}

/// A device on its own core, reachable from any.
#[derive(Clone)]
pub struct DeviceHandle {
    core: CoreHandle,
    local: CoreLocal<LocalDevice>,
    reporters: ReportTargets,
}

impl DeviceHandle {
    async fn call<F, T>(&self, work: impl FnOnce(Rc<LocalDevice>) -> F + Send + 'static) -> Result<T, CoreGone>
    where
        F: Future<Output = T> + 'static,
        T: Send + 'static,
    {
        let local = self.local.clone();
        let done = self.core.call(move || async move {
            match local.get() {
                Some(local) => Ok(work(local).await),
                None => Err(CoreGone::Stopped),
            }
        });
        done.await?
    }

    /// True if both are handles of one device.
    pub fn is_same(&self, other: &DeviceHandle) -> bool {
        Arc::ptr_eq(&self.reporters.failing, &other.reporters.failing)
    }

    /// Sets when and how the device is scrubbed.
    pub async fn configure_scrub(&self, settings: Settings) {
        // A core that has stopped does no scrubs; requests to its devices report that.
        let _ = self.call(move |local| async move { local.scrub_task.configure(settings) }).await;
    }

    /// Executes a command for its scrub; returns the state of the scrub after it.
    ///
    /// # Errors
    /// If the command failed; the error has the reason.
    pub async fn execute_scrub(&self, command: ControlCommand) -> Result<ScrubStatus, ControlError> {
        let done = self.call(move |local| async move { local.scrub_task.execute(&command).await }).await;
        done.unwrap_or_else(|gone| Err(ControlError::new(ControlErrorKind::Failed, gone)))
    }

    /// Executes a command for its replicas; returns the state of the mirror after it.
    ///
    /// # Errors
    /// If the command failed; the error has the reason.
    pub async fn execute_mirror(&self, command: ControlCommand) -> Result<MirrorStatus, ControlError> {
        let done = self.call(move |local| async move { local.execute_mirror(&command).await }).await;
        done.unwrap_or_else(|gone| Err(ControlError::new(ControlErrorKind::Failed, gone)))
    }

    /// The current state of the device, or that it did not respond in time.
    pub async fn snapshot(&self) -> DeviceSnapshot {
        let looked = self.call(|local| async move { local.snapshot() });
        let seen = match timeout(PROBE_TIMEOUT, looked).await {
            Ok(Ok(seen)) => seen,
            Ok(Err(gone)) => unresponsive(&gone.to_string()),
            Err(_) => unresponsive("its core did not respond in time"),
        };
        let DamageStatus { not_saved, not_asked, .. } = seen.damage.clone();
        let damage = DamageStatus { not_saved, not_asked, ..DamageStatus::of_served(&self.reporters.damage) };
        DeviceSnapshot { damage, failing: self.reporters.failing.now(), ..seen }
    }
}

impl ServedDevice {
    /// The device for namespaces on every core.
    pub fn shared(&self) -> SharedDevice {
        self.shared.borrow().clone()
    }

    /// Sets the device from which namespaces are made: the same device with another size.
    pub fn set_shared(&self, shared: SharedDevice) {
        self.shared.replace(shared);
    }

    /// Lists what it is and lies on, as it is at any time, for comparison with what other servers list.
    pub fn identities(&self) -> DeviceIdentities {
        let (identity, below) = (self.identity, self.below.clone());
        Arc::new(move || [identity].into_iter().chain(below.identities()).collect())
    }

    /// Gives it another size, on its own core.
    ///
    /// # Errors
    /// If that core has stopped.
    pub async fn resize(&self, size: ByteCount) -> Result<ResizeResult, StackError> {
        let shared = self.shared();
        let resized = self.handle.call(move |local| async move { local.resize(&shared, size).await });
        resized.await.map_err(|gone| core_error(RESIZING, gone).on(&self.target))
    }

    /// True if namespaces of the device still exist, served or in use by commands in flight.
    pub fn is_used(&self) -> bool {
        Arc::strong_count(&self.state) > 1
    }
}

/// The cores, and the number of devices on each.
pub struct DeviceTable {
    handles: Vec<CoreHandle>,
    /// Cloned for each device, so that the number of clones is the number of devices.
    core_loads: Vec<Rc<()>>,
    events: EventSender,
    /// Clients of an earlier server reconnect within this time.
    pub(crate) clients_come_back: Duration,
}

impl DeviceTable {
    /// A table without devices on these cores; there must be at least one.
    pub fn new(handles: Vec<CoreHandle>, events: EventSender) -> DeviceTable {
        let core_loads = handles.iter().map(|_| Rc::default()).collect();
        DeviceTable { handles, core_loads, events, clients_come_back: CLIENTS_COME_BACK }
    }

    /// Opens a device on the core with the fewest devices, including those that are being opened. If the future is
    /// dropped before it has ended, the opening continues, and the device is not closed properly.
    ///
    /// # Errors
    /// If it cannot be opened; the error has the reason.
    pub fn open(&self, plan: &NamespacePlan) -> impl Future<Output = Result<ServedDevice, StackError>> + 'static {
        let core = (0..self.core_loads.len()).min_by_key(|core| Rc::strong_count(&self.core_loads[*core])).unwrap_or(0);
        let (plan, core_load) = (plan.clone(), Rc::clone(&self.core_loads[core]));
        let (handle, events, window) = (self.handles[core].clone(), self.events.clone(), self.clients_come_back);
        let cores: Vec<CoreAddress> = self.handles.iter().map(CoreHandle::address).collect();
        async move {
            let planned = plan.clone();
            let state = Arc::<NamespaceState>::default();
            let reporters = ReportTargets::to(&state);
            let theirs = reporters.clone();
            let work = move || {
                // Parts of a device may be opened on the other cores.
                set_cores(cores);
                open_on_core(planned, theirs, (events, window))
            };
            let opened = handle.call(work).await;
            let opened = opened.map_err(|gone| core_error("open", gone).on(&plan.target))??;
            Ok(ServedDevice {
                access: plan.access(),
                usage: plan.usage,
                target: opened.label,
                state,
                content_uuid: opened.content_uuid,
                origin: opened.origin,
                content: opened.content,
                identity: opened.identity,
                below: opened.below,
                is_mirror: opened.is_mirror,
                gathers_changes: opened.gathers_changes,
                handle: DeviceHandle { core: handle, local: opened.local, reporters },
                shared: RefCell::new(opened.shared),
                _core_load: core_load,
            })
        }
    }

    /// How long the close of devices may take that no request uses.
    pub fn idle_limit() -> CloseLimit {
        CloseLimit::after(now() + CLOSE_TIMEOUT)
    }

    /// Closes devices, all at the same time; after this volumes are clean.
    ///
    /// # Errors
    /// The error of the first one that could not be closed, or not in time; the others are closed nevertheless.
    pub async fn close(
        &self,
        devices: impl IntoIterator<Item = ServedDevice>,
        limit: CloseLimit,
    ) -> Result<(), StackError> {
        let closings = devices.into_iter().map(|device| async move {
            let closed = device.handle.call(move |local| async move { local.close(limit).await });
            closed.await.map_err(|gone| core_error("close", gone).on(device.target))?
        });
        join_all(closings.collect::<Vec<_>>()).await.into_iter().collect()
    }
}

/// A device that a core has opened.
struct OpenedDevice {
    label: TargetLabel,
    shared: SharedDevice,
    content_uuid: Option<[u8; 16]>,
    origin: Option<[u8; 16]>,
    content: Option<u64>,
    identity: [u8; 16],
    below: RemoteDevices,
    is_mirror: bool,
    gathers_changes: bool,
    local: CoreLocal<LocalDevice>,
}

/// Opens the target of a namespace. A target that may lack the last writes is served if the plan accepts that.
async fn open_accepted(plan: &NamespacePlan) -> Result<OpenTarget, StackError> {
    let target = &plan.target;
    match open_for(target, plan.access(), plan.usage).await {
        Err(failure) if failure.cause() == Cause::Older && plan.accept_older => {
            tracing::warn!(%target, why = failure.in_short(), "it is served nevertheless, as requested");
            open_for(target, plan.access_to_older(), plan.usage).await
        }
        Err(failure) if failure.cause() == Cause::Older => {
            let otherwise = match (target.path(), failure.advice()) {
                (None, Some(advice)) => advice.to_owned(),
                _ => "`sealblock rescue`".to_owned(),
            };
            let advice = format!("{otherwise}; to serve it as it is, --accept-older or `accept_older = true`");
            Err(failure.advise(advice))
        }
        opened => opened,
    }
}

async fn open_on_core(
    plan: NamespacePlan,
    reporters: ReportTargets,
    (events, window): (EventSender, Duration),
) -> Result<OpenedDevice, StackError> {
    let target = &plan.target;
    let opened = open_accepted(&plan).await?;
    if let Err(failure) = opened.check_blocks("serve") {
        return opened.close(Err(failure)).await;
    }
    let lost = opened.lost_answers();
    let access = if opened.why_older().is_some() { plan.access_to_older() } else { plan.access() };
    let (mut gate, info, closer) = opened.share();
    if plan.read_only {
        let Ok(read_only) = gate.layered(target.to_string(), |below| Ok::<_, Infallible>(ReadOnly::new(below)));
        gate = read_only;
    }
    watch(&info, &reporters.state);
    if let Some(state) = reporters.state.upgrade() {
        state.set_damage_source(Arc::new(info.damage.clone()));
    }
    let mirror_uuid = info.mirror.as_ref().and_then(|mirror| mirror.describe().uuid);
    let volume_uuid = info.volume.as_ref().map(|volume| volume.uuid).or(mirror_uuid);
    let named = || TargetLabel::new(target, info.identity(target));
    let label = info.mirror.as_ref().map_or_else(named, |mirror| mirror.target().clone());
    let shared = SharedDevice::publish(gate.clone());
    let earlier = report_lost_completions(&label, lost, &shared, &events);
    shared.observe(RequestObserver::new(label.clone(), reporters.clone()));
    let content_uuid = match volume_uuid {
        None if target.is_volatile() => Some(new_uuid()?),
        other => other,
    };
    let gate = (gate, info.own_labels());
    let scrub_task = ScrubTask::open(label.clone(), volume_uuid, gate, shared.attach(), reporters.state, events).await;
    let local = Rc::new(LocalDevice::new(&plan, access, &info, closer, scrub_task));
    if let Some(clients) = earlier {
        drop(spawn(forget_lost_answers(clients, Rc::downgrade(&local), window)));
    }
    Ok(OpenedDevice {
        label,
        shared,
        content_uuid,
        origin: info.namespace_behind(target),
        content: match content_uuid {
            // Memory is blank with each start, whatever its UUID is.
            Some(drawn) if target.is_volatile() => Some(u128::from_be_bytes(drawn) as u64 | 1),
            _ => info.content(target),
        },
        identity: new_uuid()?,
        below: info.remote_devices(target),
        is_mirror: info.mirror.is_some(),
        gathers_changes: info.all().iter().any(|info| info.volume.is_some() || info.mirror.is_some()),
        local: CoreLocal::new(local),
    })
}

/// If completed writes of an earlier server may be lost, makes the first flush of each client fail once, and sends an
/// event.
fn report_lost_completions(
    label: &TargetLabel,
    reasons: Vec<String>,
    shared: &SharedDevice,
    events: &EventSender,
) -> Option<EarlierClients> {
    if reasons.is_empty() {
        return None;
    }
    let reason = format!("an earlier server ended without closing it: {}", reasons.join("; "));
    let clients = shared.lost_earlier(&ErrorKind::Media { reason }.into());
    events.send(Event::AnsweredLost { target: label.to_string(), reasons });
    Some(clients)
}

/// After the time in which clients of an earlier server reconnect, neither new clients nor the next server are told
/// about the loss any more. A server that ends earlier leaves this to the next one.
async fn forget_lost_answers(clients: EarlierClients, local: Weak<LocalDevice>, window: Duration) {
    if let Either::Right(_) = select(pin!(sleep(window)), pin!(shutdown_requested())).await {
        return;
    }
    drop(clients);
    let Some(local) = local.upgrade() else { return };
    if let Err(error) = local.forget_lost().await {
        tracing::warn!(%error, "the next server will have the first flush of its clients fail as well");
    }
}

fn core_error(doing: &str, gone: CoreGone) -> StackError {
    StackError::new(Cause::Io, doing, gone)
}
