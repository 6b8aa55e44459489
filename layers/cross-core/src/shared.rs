//! Handles of a device for all cores, the execution of requests on a core that has it open, and quiescing.

use std::rc::Rc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Waker};
use std::time::Instant;

use sealblock_block::{
    Abilities, Claim, Claims, Counters, Device, DynDevice, Error, Exclusion, FlushCursor, FlushErrors, Freshness,
    Geometry, Latency, Outcome, Request, RequestKind,
};
use sealblock_runtime_reactor::{CoreAddress, CoreLocal, long_step, spawn};
use sealblock_units::Extent;

use crate::changes::{ChangeGuard, SessionId};
use crate::core_slots::{CoreSlots, Crossings};
use crate::device_slot::{DeviceSlot, Drain};
use crate::durable::DurableRequests;
use crate::timing::Timer;

/// A request without data is long if it has more bytes than this: checking or marking that many takes some 10
/// microseconds without I/O.
const LONG_BYTES: u64 = 1 << 20;

/// A handle, usable on every core, of a device that belongs to one core, or is open on several. Clones are of the same
/// device. Each core that has it open drops it when the last handle and the last attachment are dropped, or when the core
/// stops.
///
/// A handle shows the device's geometry as of when the handle was made. [`Quiesced::replace`] returns a handle with the
/// new one.
#[derive(Clone)]
pub struct SharedDevice(Arc<DeviceView>);

/// Receives the results of clients' requests.
pub trait Observer: Send + Sync {
    /// A request of this client succeeded, on any core. It is called for every request, so it must be cheap.
    fn succeeded(&self, _client: &str, _info: RequestInfo) {}

    /// A request of this client failed, on any core. It is called before the client gets its response, so it must not
    /// block.
    fn failed(&self, client: &str, info: RequestInfo, error: &Error);
}

/// The sender of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Origin {
    pub(crate) session: SessionId,
    /// True if the caller has locked the blocks that the request changes.
    pub(crate) is_locked: bool,
    /// When the request arrived at its export.
    pub(crate) arrived: Instant,
}

/// What is reported to an [`Observer`] about a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RequestInfo {
    /// Its kind.
    pub kind: RequestKind,
    /// Its blocks, if it concerns one extent.
    pub extent: Option<Extent>,
}

impl RequestInfo {
    pub(crate) fn of(request: &Request) -> RequestInfo {
        RequestInfo { kind: request.kind(), extent: request.extent() }
    }
}

/// While this exists, new clients count as clients of an earlier server, whose acknowledged writes may be lost. It does
/// not keep the device alive.
pub struct EarlierClients(Arc<FlushErrors>);

impl Drop for EarlierClients {
    fn drop(&mut self) {
        self.0.forget_earlier();
    }
}

/// The blocks that a request changes, while it is in flight.
enum HeldBlocks<'a> {
    Claimed { _by: Claim<'a> },
    Excluded { _by: Exclusion<'a> },
}

/// The geometry and abilities of a device at some moment.
pub(crate) struct DeviceView {
    geometry: Geometry,
    abilities: Abilities,
    executes_in_place: bool,
    device: Arc<SharedDeviceState>,
}

/// The state that stays when the device is replaced.
pub(crate) struct SharedDeviceState {
    slots: Arc<CoreSlots>,
    name: Box<str>,
    pub(crate) flush_errors: Arc<FlushErrors>,
    pub(crate) claims: Claims,
    durable: DurableRequests,
    pub(crate) observer: OnceLock<Box<dyn Observer>>,
    /// [`Freshness::bits`], the only ability that changes by itself.
    freshness: AtomicU8,
    pub(crate) crossings: Crossings,
}

impl SharedDevice {
    /// Publishes a device of this core. Its geometry and abilities are read now and must not change, unless it is
    /// replaced. Its freshness is read again after each request other than reads and writes.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn publish(device: DynDevice) -> SharedDevice {
        let (name, geometry, abilities) = (device.name().into(), device.geometry().clone(), device.abilities());
        let (flush_errors, claims, observer) = (Arc::default(), Claims::default(), OnceLock::new());
        let executes_in_place = device.executes_in_place();
        let slots = Arc::new(CoreSlots::new(device, claims.clone()));
        let (freshness, durable) = (AtomicU8::new(abilities.freshness.bits()), DurableRequests::default());
        let crossings = Crossings::default();
        let device = SharedDeviceState { slots, name, flush_errors, claims, durable, observer, freshness, crossings };
        let device = Arc::new(device);
        SharedDevice(Arc::new(DeviceView { geometry, abilities, executes_in_place, device }))
    }

    pub(crate) fn of_view(view: Arc<DeviceView>) -> SharedDevice {
        SharedDevice(view)
    }

    pub(crate) fn view(&self) -> &Arc<DeviceView> {
        &self.0
    }

    /// A handle of the same device that shows the geometry and abilities of `gate`.
    fn with_view_of(&self, gate: &DynDevice) -> SharedDevice {
        let (geometry, abilities, device) = (gate.geometry().clone(), gate.abilities(), Arc::clone(&self.0.device));
        device.freshness.store(abilities.freshness.bits(), Ordering::Relaxed);
        let executes_in_place = gate.executes_in_place();
        SharedDevice(Arc::new(DeviceView { geometry, abilities, executes_in_place, device }))
    }

    /// Reports the results of clients' requests ([`SharedDevice::flush_cursor`]) to `observer` from now on. Requests of
    /// other attachments are not reported. A second observer is ignored.
    pub fn observe(&self, observer: impl Observer + 'static) {
        // A second observer is a bug of the caller, which costs log lines but no data.
        let _ = self.0.device.observer.set(Box::new(observer));
    }

    /// True if both are handles of one device, whichever geometry they show.
    pub fn is_same(&self, other: &SharedDevice) -> bool {
        Arc::ptr_eq(&self.0.device, &other.0.device)
    }

    /// Makes further requests, from any core, wait until the result is dropped. `None` on other cores than the owner,
    /// and while the device is already quiesced.
    pub fn quiesce(&self) -> Option<Quiesced> {
        let slot = self.home().get()?;
        // Not built for a second caller, since dropping it would let requests start.
        slot.quiesce().then(|| Quiesced { device: self.clone(), slot, elsewhere: self.slots().hold_others() })
    }

    /// Closes the device on all cores but the home core, and waits until no request is in flight there. Later requests
    /// fail on these cores. The home core goes on, so that it can close what the device lies on.
    pub async fn close_elsewhere(&self) {
        self.slots().close_others().answered().await;
    }

    /// The current device; `None` on other cores than the owner, and while there is none.
    pub fn gate(&self) -> Option<DynDevice> {
        self.home().get()?.gate()
    }

    /// The sums of the counters of its gates on all cores.
    pub fn counters(&self) -> Counters {
        self.slots().counters()
    }

    /// How long requests of this kind waited for its gates and took there, on all cores, since it was published. Of
    /// those executed in place, a part is timed and counts for all of them.
    pub fn latency(&self, kind: RequestKind) -> Latency {
        self.slots().latency(kind)
    }

    /// Requests that came to the home core from other cores so far: those to its reserved areas, and all of a device
    /// that is on its home core only.
    pub fn crossings(&self) -> u64 {
        self.0.device.crossings.get()
    }

    /// The core that executes all requests; `None` for a device that every core can open.
    pub fn only_core(&self) -> Option<CoreAddress> {
        (!self.slots().has_source()).then(|| self.home().home().clone())
    }

    /// A new flush cursor of `client`. All cursors of a client count as one writer.
    pub fn flush_cursor(&self, client: &str) -> FlushCursor {
        self.0.device.flush_errors.join(client)
    }

    /// Records that writes which an earlier server of the device acknowledged may be lost: the first flush of each
    /// client fails once, with this error. Until the result is dropped, later clients count as clients of that server,
    /// too.
    pub fn lost_earlier(&self, error: &Error) -> EarlierClients {
        let errors = &self.0.device.flush_errors;
        errors.unclean_start(error);
        EarlierClients(Arc::clone(errors))
    }

    /// True if this is a flush cursor of this device.
    pub fn has_cursor(&self, cursor: &FlushCursor) -> bool {
        cursor.is_of(&self.0.device.flush_errors)
    }

    /// Executes a request on this core, which has the device open, once no other client has locked the blocks that it changes. With
    /// `is_locked`, the caller has locked them itself. A failure that must be reported to other clients is recorded
    /// before this returns.
    pub(crate) async fn execute(&self, slot: &DeviceSlot, request: Request, from: Origin) -> Outcome {
        let Origin { session, is_locked, arrived } = from;
        // Listed before it claims its blocks, so that a fence comes after it in either case.
        let change = slot.changes.start(session, &request);
        if self.is_long(&request) {
            // Before it claims anything, so that no other request waits for it meanwhile.
            long_step().await;
            change.as_ref().map_or(Ok(()), ChangeGuard::check).map_err(|error| error.with_device(self.name()))?;
        }
        let _blocks = match (request.changed().filter(|_| !is_locked), request.source()) {
            // Devices copy as if nothing else wrote to either range meanwhile, and a Copy may be sent again.
            (Some(blocks), Some(source)) => {
                Some(HeldBlocks::Excluded { _by: self.0.device.claims.exclude_both(source.into(), blocks).await })
            }
            (Some(blocks), None) => Some(HeldBlocks::Claimed { _by: slot.lane.enter(blocks).await }),
            (None, _) => None,
        };
        // Counted as durable only when it has entered. A flush that has entered waits for earlier durable requests; one
        // that waits here for the end of the quiesce would prevent draining.
        let entered = slot.enter().await.map_err(|error| error.with_device(self.name()))?;
        let gate = entered.gate();
        if !request.is_durable() {
            return self.execute_timed(slot, gate, request, arrived).await;
        }
        let is_flush = request.kind() == RequestKind::Flush;
        let durable = &self.0.device.durable;
        let guard = durable.start(&self.0.device.flush_errors);
        let outcome = self.execute_timed(slot, gate, request, arrived).await;
        guard.complete(&outcome);
        if is_flush && outcome.is_ok() {
            durable.wait_for_earlier().await;
        }
        outcome
    }

    async fn execute_timed(&self, slot: &DeviceSlot, gate: &DynDevice, request: Request, arrived: Instant) -> Outcome {
        let (kind, timer) = (request.kind(), Timer::start(arrived));
        let outcome = gate.execute(request).await;
        slot.timing.complete(kind, timer);
        self.note_freshness(gate, kind);
        outcome
    }

    /// Updates the device's freshness after a request that may have changed or shown it. Reads and writes are too
    /// frequent for that, and a flush or a check follows them. The home core's device counts.
    fn note_freshness(&self, gate: &DynDevice, kind: RequestKind) {
        if !matches!(kind, RequestKind::Read | RequestKind::Write) && self.home().home().is_here() {
            self.0.device.freshness.store(gate.abilities().freshness.bits(), Ordering::Relaxed);
        }
    }

    /// True for a request without a data transfer, for which the device may compute for a long time. Only a few of
    /// these begin in each turn of the core, so that many of them do not delay all other requests.
    fn is_long(&self, request: &Request) -> bool {
        let moves_data = matches!(request.kind(), RequestKind::Read | RequestKind::Write);
        !moves_data && request.blocks() << self.0.geometry.block_size.shift() > LONG_BYTES
    }

    /// Executes a request on this core if that needs no waiting. `None` as its arrival means now.
    pub(crate) fn try_execute(
        &self,
        slot: &DeviceSlot,
        request: &Request,
        arrived: Option<Instant>,
    ) -> Option<Outcome> {
        if request.source().is_some() || self.is_long(request) {
            return None;
        }
        let _claim = match request.changed() {
            Some(blocks) => Some(slot.lane.try_enter(blocks)?),
            None => None,
        };
        let entered = slot.try_enter()?;
        let called = slot.timing.start_in_place();
        let outcome = match request.is_durable() {
            true => self.try_execute_durable(entered.gate(), request),
            false => entered.gate().try_execute(request),
        };
        if outcome.is_some() {
            slot.timing.complete_in_place(request.kind(), arrived, called);
        }
        outcome
    }

    fn try_execute_durable(&self, gate: &DynDevice, request: &Request) -> Option<Outcome> {
        let durable = &self.0.device.durable;
        let guard = durable.start_alone(&self.0.device.flush_errors)?;
        let Some(outcome) = gate.try_execute(request) else {
            guard.cancel();
            return None;
        };
        let is_alone = guard.complete(&outcome);
        // A success must wait for those that began meanwhile on other cores, which is not possible here. A Flush may be
        // executed twice.
        let must_wait = request.kind() == RequestKind::Flush && outcome.is_ok() && !is_alone;
        (!must_wait).then_some(outcome)
    }

    /// Fences what a session has in flight on this core: later changes of these blocks wait until each has ended.
    pub(crate) fn fence(&self, slot: &DeviceSlot, session: SessionId) {
        for blocks in slot.changes.fence(session) {
            let device = self.clone();
            let mut fence = Box::pin(async move { drop(device.0.device.claims.exclude(blocks).await) });
            // The first poll gives it its place in the order.
            if fence.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
                drop(spawn(fence));
            }
        }
    }

    /// The geometry that its gate shows.
    pub fn geometry(&self) -> &Geometry {
        &self.0.geometry
    }

    /// The abilities that its gate shows.
    pub fn abilities(&self) -> Abilities {
        let freshness = Freshness::from_bits(self.0.device.freshness.load(Ordering::Relaxed));
        Abilities { freshness, ..self.0.abilities }
    }

    /// True if its gate may execute requests in place, as of the moment when its geometry was read.
    pub(crate) fn executes_in_place(&self) -> bool {
        self.0.executes_in_place
    }

    /// The name of its gate.
    pub fn name(&self) -> &str {
        &self.0.device.name
    }

    /// Its slot on the core that published it.
    pub(crate) fn home(&self) -> &CoreLocal<DeviceSlot> {
        self.slots().home()
    }

    pub(crate) fn slots(&self) -> &Arc<CoreSlots> {
        &self.0.device.slots
    }

    /// The state that stays when the device is replaced.
    pub(crate) fn state(&self) -> &SharedDeviceState {
        &self.0.device
    }
}

impl std::fmt::Debug for SharedDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedDevice").field("name", &self.name()).field("home", self.home()).finish()
    }
}

/// Keeps requests from starting until it is dropped; see [`SharedDevice::quiesce`].
pub struct Quiesced {
    device: SharedDevice,
    slot: Rc<DeviceSlot>,
    /// The other cores that have it open.
    elsewhere: Arc<Drain>,
}

impl Quiesced {
    /// Waits until no request is in flight. Only the device itself bounds how long that takes.
    pub async fn drained(&self) {
        self.slot.drained().await;
        self.elsewhere.answered().await;
    }

    /// The number of requests in flight.
    pub fn in_flight(&self) -> usize {
        self.slot.in_flight() + self.device.slots().in_flight_elsewhere() as usize
    }

    /// Replaces the device. The new one must have the same blocks, as far as both have them, and everything that was
    /// durable on the old one must be durable on the new one. The returned handle shows the new geometry. Earlier
    /// handles and attachments use the new device, too, but still show the old geometry.
    pub fn replace(&self, gate: DynDevice) -> SharedDevice {
        let view = self.device.with_view_of(&gate);
        self.device.slots().replace(Ok(gate));
        view
    }

    /// Removes the device: every request fails from now on, with this reason.
    pub fn set_unavailable(&self, reason: String) {
        self.device.slots().replace(Err(reason));
    }

    /// Records that completed writes without a flush may be lost: the next flush of each client that wrote fails.
    pub fn record_lost_writes(&self, error: &Error) {
        self.device.state().flush_errors.record(error);
    }
}

impl Drop for Quiesced {
    fn drop(&mut self) {
        self.device.slots().resume_others();
        self.slot.resume();
    }
}
