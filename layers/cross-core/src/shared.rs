//! Handles of devices for all cores, and attachments of one core.

use std::cell::RefCell;
use std::ops::RangeInclusive;
use std::rc::{Rc, Weak};
use std::sync::{Arc, OnceLock};

use sealblock_block::{
    Abilities, Device, DynDevice, Error, FlushCursor, FlushErrors, Gate, Geometry, Outcome, RangeGuard, RangeLock,
    Request, RequestKind,
};
use sealblock_runtime_reactor::CoreLocal;
use sealblock_units::Extent;

use crate::channel::Link;
use crate::device_slot::{DeviceSlot, Quiesced};
use crate::durable::DurableRequests;

thread_local! {
    /// The links of the reactors on this thread. Opening a new one removes those that are dropped.
    static LINKS: RefCell<Vec<Weak<Link>>> = const { RefCell::new(Vec::new()) };
}

/// A handle, usable on every core, of a device that belongs to one core. Clones are of the same device. The owner core drops the
/// device when the last handle and the last attachment are dropped, or when the core stops.
///
/// A handle shows the device's geometry as of when the handle was made. [`Quiesced::replace`] returns a handle with the new one.
#[derive(Clone)]
pub struct SharedDevice(Arc<DeviceView>);

/// Receives the results of clients' requests.
pub trait Observer: Send + Sync {
    /// A request of this client succeeded, on any core. It is called for every request, so it must be cheap.
    fn succeeded(&self, _client: &str, _info: RequestInfo) {}

    /// A request of this client failed, on any core. It is called before the client gets its response, so it must not block.
    fn failed(&self, client: &str, info: RequestInfo, error: &Error);
}

/// What an [`Observer`] learns of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RequestInfo {
    /// Its kind.
    pub kind: RequestKind,
    /// Its blocks, where it concerns one extent.
    pub extent: Option<Extent>,
}

impl RequestInfo {
    fn of(request: &Request) -> RequestInfo {
        let discarded = match request {
            Request::Discard { extents } if extents.len() == 1 => extents.first().copied(),
            _ => None,
        };
        RequestInfo { kind: request.kind(), extent: request.extent().or(discarded) }
    }
}

/// The geometry and abilities of a device as of some moment.
struct DeviceView {
    geometry: Geometry,
    abilities: Abilities,
    device: Arc<SharedDeviceState>,
}

/// The state that stays when the device is replaced.
struct SharedDeviceState {
    slot: CoreLocal<DeviceSlot>,
    name: Box<str>,
    flush_errors: Arc<FlushErrors>,
    durable: DurableRequests,
    range_lock: RangeLock,
    observer: OnceLock<Box<dyn Observer>>,
}

impl SharedDevice {
    /// Publishes a device of this core. Its geometry and abilities are read now and must not change, unless it is replaced.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn publish(device: Rc<Gate<DynDevice>>) -> SharedDevice {
        let (name, geometry, abilities) = (device.name().into(), device.geometry().clone(), device.abilities());
        let (flush_errors, durable, range_lock) = (Arc::default(), DurableRequests::default(), RangeLock::default());
        let slot = CoreLocal::new(DeviceSlot::new(device));
        let device =
            Arc::new(SharedDeviceState { slot, name, flush_errors, durable, range_lock, observer: OnceLock::new() });
        SharedDevice(Arc::new(DeviceView { geometry, abilities, device }))
    }

    /// A handle of the same device that shows the geometry and abilities of `gate`.
    pub(crate) fn with_view_of(&self, gate: &Gate<DynDevice>) -> SharedDevice {
        let (geometry, abilities, device) = (gate.geometry().clone(), gate.abilities(), Arc::clone(&self.0.device));
        SharedDevice(Arc::new(DeviceView { geometry, abilities, device }))
    }

    /// Reports the results of clients' requests ([`SharedDevice::flush_cursor`]) to `observer` from now on; requests of other
    /// attachments are not reported. The first observer stays.
    pub fn observe(&self, observer: impl Observer + 'static) {
        // A second observer is a bug of the caller that costs log lines and no data.
        let _ = self.0.device.observer.set(Box::new(observer));
    }

    /// True if both are handles of one device, whichever geometry they show.
    pub fn is_same(&self, other: &SharedDevice) -> bool {
        Arc::ptr_eq(&self.0.device, &other.0.device)
    }

    /// Keeps further requests, from any core, waiting until the result is dropped. `None` on other cores than the owner, and while
    /// the device is quiesced already.
    pub fn quiesce(&self) -> Option<Quiesced> {
        Quiesced::start(self.clone(), self.slot().get()?)
    }

    /// The device now; `None` on other cores than the owner, and while there is none.
    pub fn gate(&self) -> Option<Rc<Gate<DynDevice>>> {
        self.slot().get()?.gate()
    }

    pub(crate) fn record_lost(&self, error: &Error) {
        self.0.device.flush_errors.record(error);
    }

    /// Attaches the current core: the device itself on the owner core, a link to it on others. Never waits; if the owner core has
    /// stopped, requests fail ([`sealblock_block::ErrorKind::Unreachable`]). The attachment has its own flush cursor: it learns,
    /// once, of other clients' flushes that failed after it had written.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn attach(&self) -> Attached {
        self.attach_as(&Arc::new(self.0.device.flush_errors.alone()))
    }

    /// Attaches the current core with the flush cursor of a client that may have several attachments, on several cores; see
    /// [`SharedDevice::flush_cursor`].
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn attach_as(&self, cursor: &Arc<FlushCursor>) -> Attached {
        debug_assert!(self.has_cursor(cursor), "a flush cursor of this device");
        let route = match self.slot().get() {
            Some(slot) => Route::Local(slot),
            None => Route::Remote(self.link()),
        };
        Attached { device: self.clone(), route, cursor: Arc::clone(cursor) }
    }

    /// A new flush cursor of `client`. All cursors of a client count as one writer.
    pub fn flush_cursor(&self, client: &str) -> FlushCursor {
        self.0.device.flush_errors.join(client)
    }

    /// True if this is a flush cursor of this device.
    pub fn has_cursor(&self, cursor: &FlushCursor) -> bool {
        cursor.is_of(&self.0.device.flush_errors)
    }

    /// Executes a request on the owner core, once no other client has the blocks locked that it changes. The caller may have locked
    /// them itself (`is_locked`). A failure that other clients have to learn of is recorded before this returns.
    pub(crate) async fn execute(&self, slot: &DeviceSlot, request: Request, is_locked: bool) -> Outcome {
        let _range = match request.changed().filter(|_| !is_locked) {
            Some(blocks) => Some(self.0.device.range_lock.lock_shared(blocks).await),
            None => None,
        };
        // Counted as durable only when it has entered: a flush that has entered waits for the durable requests before it, and one
        // that waits here for the quiesce to end would keep it from draining.
        let entered = slot.enter().await.map_err(|error| error.with_device(self.name()))?;
        let gate = entered.gate();
        if !request.is_durable() {
            return gate.execute(request).await;
        }
        let is_flush = matches!(request, Request::Flush);
        let guard = self.0.device.durable.start(&self.0.device.flush_errors);
        let outcome = gate.execute(request).await;
        guard.complete(&outcome);
        if is_flush && outcome.is_ok() {
            self.0.device.durable.wait_for_earlier().await;
        }
        outcome
    }

    /// Executes a request on the owner core if that needs no waiting.
    fn try_execute(&self, slot: &DeviceSlot, request: &Request) -> Option<Outcome> {
        let _range = match request.changed() {
            Some(_) => Some(self.0.device.range_lock.try_lock_shared()?),
            None => None,
        };
        let entered = slot.try_enter()?;
        let gate = entered.gate();
        if !request.is_durable() {
            return gate.try_execute(request);
        }
        if !self.0.device.durable.is_idle() {
            return None;
        }
        let outcome = gate.try_execute(request)?;
        self.0.device.durable.start(&self.0.device.flush_errors).complete(&outcome);
        Some(outcome)
    }

    /// The link from this core, which all its attachments share.
    fn link(&self) -> Rc<Link> {
        let existing = LINKS.with_borrow(|links| {
            let mut open = links.iter().filter_map(Weak::upgrade);
            open.find(|link| link.device.is_same(self) && link.core.is_here())
        });
        existing.unwrap_or_else(|| {
            let link = Rc::new(Link::open(self));
            LINKS.with_borrow_mut(|links| {
                links.retain(|link| link.strong_count() > 0);
                links.push(Rc::downgrade(&link));
            });
            link
        })
    }

    /// Its geometry in front of its gate.
    pub fn geometry(&self) -> &Geometry {
        &self.0.geometry
    }

    /// Its abilities in front of its gate.
    pub fn abilities(&self) -> Abilities {
        self.0.abilities
    }

    /// The name of its gate.
    pub fn name(&self) -> &str {
        &self.0.device.name
    }

    pub(crate) fn slot(&self) -> &CoreLocal<DeviceSlot> {
        &self.0.device.slot
    }
}

impl std::fmt::Debug for SharedDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedDevice").field("name", &self.name()).field("slot", &self.0.device.slot).finish()
    }
}

/// The device on the current core; see [`SharedDevice::attach`]. Requests of one core start in the order of their first poll. A
/// request from another core is executed even if its future is dropped; on the owner core the device decides.
#[derive(Clone)]
pub struct Attached {
    device: SharedDevice,
    route: Route,
    cursor: Arc<FlushCursor>,
}

#[derive(Clone)]
enum Route {
    Local(Rc<DeviceSlot>),
    Remote(Rc<Link>),
}

impl Attached {
    /// True if this core owns the device, so that requests stay on it.
    pub fn is_local(&self) -> bool {
        matches!(self.route, Route::Local(_))
    }

    /// Waits until no other client changes these blocks, on any core, and locks them against changes until the result is dropped.
    /// Reads continue.
    pub async fn lock(&self, extent: Extent) -> Locked<'_> {
        let range = self.device.0.device.range_lock.lock(extent.start().get()..=extent.last().get()).await;
        Locked { attached: self, extent, _range: range }
    }

    async fn dispatch(&self, request: Request, is_locked: bool) -> Outcome {
        match &self.route {
            Route::Local(slot) => self.device.execute(slot, request, is_locked).await,
            Route::Remote(link) => link.call(request, is_locked).await,
        }
    }

    async fn execute_reported(&self, request: Request, is_locked: bool) -> Outcome {
        let info = RequestInfo::of(&request);
        let outcome = self.execute_tracked(request, is_locked).await;
        self.report(info, &outcome);
        outcome
    }

    fn report(&self, info: RequestInfo, outcome: &Outcome) {
        if let (Some(client), Some(observer)) = (self.cursor.client(), self.device.0.device.observer.get()) {
            match outcome {
                Ok(_) => observer.succeeded(client, info),
                Err(error) => observer.failed(client, info, error),
            }
        }
    }

    async fn execute_tracked(&self, request: Request, is_locked: bool) -> Outcome {
        if matches!(request, Request::Flush) {
            let flush = self.cursor.flush_started();
            return flush.complete(self.dispatch(request, is_locked).await);
        }
        if !request.is_volatile() {
            return self.dispatch(request, is_locked).await;
        }
        let mark = self.cursor.write_started();
        let outcome = self.dispatch(request, is_locked).await;
        if outcome.is_ok() {
            self.cursor.write_completed(mark);
        }
        outcome
    }
}

/// Blocks that are locked against changes; see [`Attached::lock`].
pub struct Locked<'a> {
    attached: &'a Attached,
    extent: Extent,
    _range: RangeGuard<'a>,
}

impl Locked<'_> {
    /// Executes a request that changes no other blocks. The caller has to await it: if its future is dropped, it may continue
    /// without the lock.
    pub async fn execute(&self, request: Request) -> Outcome {
        let locked = self.extent.start().get()..=self.extent.last().get();
        let is_within = |blocks: &RangeInclusive<u64>| locked.contains(blocks.start()) && locked.contains(blocks.end());
        debug_assert!(
            request.changed().as_ref().is_none_or(is_within),
            "the request changes blocks that are not locked"
        );
        self.attached.execute_reported(request, true).await
    }
}

impl Device for Attached {
    fn geometry(&self) -> &Geometry {
        self.device.geometry()
    }

    fn abilities(&self) -> Abilities {
        match &self.route {
            // The abilities of a layer may change with its members.
            Route::Local(slot) => slot.gate().map_or(self.device.abilities(), |gate| gate.abilities()),
            Route::Remote(_) => self.device.abilities(),
        }
    }

    async fn execute(&self, request: Request) -> Outcome {
        self.execute_reported(request, false).await
    }

    fn try_execute(&self, request: &Request) -> Option<Outcome> {
        let outcome = self.try_execute_tracked(request)?;
        self.report(RequestInfo::of(request), &outcome);
        Some(outcome)
    }
}

impl Attached {
    fn try_execute_tracked(&self, request: &Request) -> Option<Outcome> {
        let Route::Local(slot) = &self.route else { return None };
        let dispatch = || self.device.try_execute(slot, request);
        if matches!(request, Request::Flush) {
            let flush = self.cursor.flush_started();
            return dispatch().map(|outcome| flush.complete(outcome));
        }
        if !request.is_volatile() {
            return dispatch();
        }
        let mark = self.cursor.write_started();
        dispatch().inspect(|outcome| {
            if outcome.is_ok() {
                self.cursor.write_completed(mark);
            }
        })
    }
}
