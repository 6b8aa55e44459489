//! Devices as handles that travel, and what they become on a core.

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

use crate::durable::Durable;
use crate::link::Link;
use crate::place::{Place, Quiesced};

thread_local! {
    /// The links of the reactors on this thread. Those that nobody uses any more are cleared when a new one is opened.
    static LINKS: RefCell<Vec<Weak<Link>>> = const { RefCell::new(Vec::new()) };
}

/// A device that lives on one core, as a handle for all of them. Clones are for the same device, which is given up on its core
/// when the last handle and the last attachment have gone, or when its core ends.
///
/// What a handle says of the device's geometry is what it was when the handle was made. Who changes it, as
/// [`Quiesced::replace`] does, gets a handle that says the new one, and hands it on.
#[derive(Clone)]
pub struct SharedDevice(Arc<View>);

/// Who is told how requests end.
pub trait Observer: Send + Sync {
    /// A request of this client succeeded, on whichever core. In the way of every request, so it must cost next to nothing.
    fn succeeded(&self, _client: &str, _request: CrossCoreRequest) {}

    /// A request of this client failed, on whichever core. Called before the client has its answer, so it must not wait.
    fn failed(&self, client: &str, request: CrossCoreRequest, error: &Error);
}

/// What a request was, for those who are told how it ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CrossCoreRequest {
    /// What it asked for.
    pub kind: RequestKind,
    /// The blocks, where it is about one extent.
    pub extent: Option<Extent>,
}

impl CrossCoreRequest {
    fn of(operation: &Request) -> CrossCoreRequest {
        let discarded = match operation {
            Request::Discard { extents } if extents.len() == 1 => extents.first().copied(),
            _ => None,
        };
        CrossCoreRequest { kind: operation.kind(), extent: operation.extent().or(discarded) }
    }
}

/// The device as it was at some time.
struct View {
    geometry: Geometry,
    abilities: Abilities,
    device: Arc<SharedDeviceState>,
}

/// What stays the same, whatever stands in the device's place.
struct SharedDeviceState {
    homed: CoreLocal<Place>,
    name: Box<str>,
    flush_errors: Arc<FlushErrors>,
    durable: Durable,
    ranges: RangeLock,
    observer: OnceLock<Box<dyn Observer>>,
}

impl SharedDevice {
    /// Publishes a device of this core. Its geometry and abilities are taken now and are to stay, unless it is replaced.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn publish(device: Rc<Gate<DynDevice>>) -> SharedDevice {
        let (name, geometry, abilities) = (device.name().into(), device.geometry().clone(), device.abilities());
        let (flush_errors, durable, ranges) = (Arc::default(), Durable::default(), RangeLock::default());
        let homed = CoreLocal::new(Place::new(device));
        let device =
            Arc::new(SharedDeviceState { homed, name, flush_errors, durable, ranges, observer: OnceLock::new() });
        SharedDevice(Arc::new(View { geometry, abilities, device }))
    }

    /// A handle for the same device, with what `gate` says of itself.
    pub(crate) fn seen_anew(&self, gate: &Gate<DynDevice>) -> SharedDevice {
        let (geometry, abilities, device) = (gate.geometry().clone(), gate.abilities(), Arc::clone(&self.0.device));
        SharedDevice(Arc::new(View { geometry, abilities, device }))
    }

    /// Has this be told from now on how requests of clients end ([`SharedDevice::asker`]); of others, whoever asks tells himself.
    /// The first one stays.
    pub fn observe(&self, observer: impl Observer + 'static) {
        // A second one is a fault of the caller that costs lines and no data.
        let _ = self.0.device.observer.set(Box::new(observer));
    }

    /// Whether both are for one device, whatever they say of its geometry.
    pub fn is_same(&self, other: &SharedDevice) -> bool {
        Arc::ptr_eq(&self.0.device, &other.0.device)
    }

    /// Lets no further request begin, on whichever core it is made, until what comes back is dropped; requests wait meanwhile.
    /// `None` away from the device's own core, and while somebody else has it quiesced.
    pub fn quiesce(&self) -> Option<Quiesced> {
        Quiesced::begin(self.clone(), self.homed().get()?)
    }

    /// What stands in its place now; on its own core only, and while it is not empty.
    pub fn gate(&self) -> Option<Rc<Gate<DynDevice>>> {
        self.homed().get()?.gate()
    }

    pub(crate) fn record_lost(&self, error: &Error) {
        self.0.device.flush_errors.record(error);
    }

    /// The device as one of the current core: the device itself at home, a way there elsewhere. Never waits; a home
    /// that has stopped shows in the outcome of requests ([`sealblock_block::ErrorKind::Unreachable`]). Whoever uses it is
    /// an asker of its own: it is told, once, of flushes of others that failed after it had written.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn attach(&self) -> Attached {
        self.attach_as(&Arc::new(self.0.device.flush_errors.alone()))
    }

    /// The same for an asker that may have several attachments, on several cores: [`SharedDevice::asker`].
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn attach_as(&self, asker: &Arc<FlushCursor>) -> Attached {
        debug_assert!(self.knows(asker), "an asker of this device");
        let way = match self.homed().get() {
            Some(place) => Way::Here(place),
            None => Way::There(self.link()),
        };
        Attached { device: self.clone(), way, asker: Arc::clone(asker) }
    }

    /// A new asker among those of `client`, who take each other's writes and flushes for their own.
    pub fn asker(&self, client: &str) -> FlushCursor {
        self.0.device.flush_errors.join(client)
    }

    /// Whether this is an asker of this device.
    pub fn knows(&self, asker: &FlushCursor) -> bool {
        asker.is_of(&self.0.device.flush_errors)
    }

    /// Carries a request out at home, when nobody has the blocks locked that it changes; whoever asks may have done so itself. A
    /// failure that others are to be told of is known before this returns.
    pub(crate) async fn carry_out(&self, place: &Place, operation: Request, is_locked: bool) -> Outcome {
        let _range = match operation.changed().filter(|_| !is_locked) {
            Some(blocks) => Some(self.0.device.ranges.lock_shared(blocks).await),
            None => None,
        };
        // Counted as durable only when it has entered: who has entered waits for such.
        let entered = place.enter().await.map_err(|error| error.with_device(self.name()))?;
        let gate = entered.gate();
        if !operation.is_durable() {
            return gate.execute(operation).await;
        }
        let is_flush = matches!(operation, Request::Flush);
        let flight = self.0.device.durable.begin(&self.0.device.flush_errors);
        let outcome = gate.execute(operation).await;
        flight.end(&outcome);
        if is_flush && outcome.is_ok() {
            self.0.device.durable.settle().await;
        }
        outcome
    }

    /// The same, if there is nothing to wait for.
    fn carry_out_at_once(&self, place: &Place, operation: &Request) -> Option<Outcome> {
        let _range = match operation.changed() {
            Some(_) => Some(self.0.device.ranges.try_lock_shared()?),
            None => None,
        };
        let entered = place.try_enter()?;
        let gate = entered.gate();
        if !operation.is_durable() {
            return gate.try_execute(operation);
        }
        if !self.0.device.durable.is_idle() {
            return None;
        }
        let outcome = gate.try_execute(operation)?;
        self.0.device.durable.begin(&self.0.device.flush_errors).end(&outcome);
        Some(outcome)
    }

    /// The link from this core, shared with whoever is attached already.
    fn link(&self) -> Rc<Link> {
        let known = LINKS.with_borrow(|links| {
            let mut open = links.iter().filter_map(Weak::upgrade);
            open.find(|link| link.device.is_same(self) && link.here.is_here())
        });
        known.unwrap_or_else(|| {
            let link = Rc::new(Link::open(self));
            LINKS.with_borrow_mut(|links| {
                links.retain(|link| link.strong_count() > 0);
                links.push(Rc::downgrade(&link));
            });
            link
        })
    }

    /// Its shape, as seen in front of its gate.
    pub fn geometry(&self) -> &Geometry {
        &self.0.geometry
    }

    /// What it can do, as seen in front of its gate.
    pub fn abilities(&self) -> Abilities {
        self.0.abilities
    }

    /// The name of its gate.
    pub fn name(&self) -> &str {
        &self.0.device.name
    }

    pub(crate) fn homed(&self) -> &CoreLocal<Place> {
        &self.0.device.homed
    }
}

impl std::fmt::Debug for SharedDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedDevice").field("name", &self.name()).field("homed", &self.0.device.homed).finish()
    }
}

/// A device as the current core uses it; see [`SharedDevice::attach`]. Requests of one core are begun in the order of their
/// first poll. A request whose future is dropped is carried out at home all the same, or, at home itself, ends as the
/// device has it.
#[derive(Clone)]
pub struct Attached {
    device: SharedDevice,
    way: Way,
    asker: Arc<FlushCursor>,
}

#[derive(Clone)]
enum Way {
    Here(Rc<Place>),
    There(Rc<Link>),
}

impl Attached {
    /// Whether the device lives on this core, so that requests cross nothing.
    pub fn is_home(&self) -> bool {
        matches!(self.way, Way::Here(_))
    }

    /// Waits until nobody else changes these blocks, whoever it is and on whichever core, and keeps others from it for as long as
    /// what comes back lives. Reads go on.
    pub async fn lock(&self, extent: Extent) -> Locked<'_> {
        let range = self.device.0.device.ranges.lock(extent.start().get()..=extent.last().get()).await;
        Locked { attached: self, extent, _range: range }
    }

    async fn ask(&self, operation: Request, is_locked: bool) -> Outcome {
        match &self.way {
            Way::Here(place) => self.device.carry_out(place, operation, is_locked).await,
            Way::There(link) => link.call(operation, is_locked).await,
        }
    }

    async fn carry_out(&self, operation: Request, is_locked: bool) -> Outcome {
        let request = CrossCoreRequest::of(&operation);
        let outcome = self.carry_out_counted(operation, is_locked).await;
        self.tell(request, &outcome);
        outcome
    }

    fn tell(&self, request: CrossCoreRequest, outcome: &Outcome) {
        if let (Some(client), Some(observer)) = (self.asker.client(), self.device.0.device.observer.get()) {
            match outcome {
                Ok(_) => observer.succeeded(client, request),
                Err(error) => observer.failed(client, request, error),
            }
        }
    }

    async fn carry_out_counted(&self, operation: Request, is_locked: bool) -> Outcome {
        if matches!(operation, Request::Flush) {
            let flush = self.asker.begin_flush();
            return flush.end(self.ask(operation, is_locked).await);
        }
        if !operation.is_volatile() {
            return self.ask(operation, is_locked).await;
        }
        let mark = self.asker.begin_write();
        let outcome = self.ask(operation, is_locked).await;
        if outcome.is_ok() {
            self.asker.wrote(mark);
        }
        outcome
    }
}

/// Blocks that nobody else changes; see [`Attached::lock`].
pub struct Locked<'a> {
    attached: &'a Attached,
    extent: Extent,
    _range: RangeGuard<'a>,
}

impl Locked<'_> {
    /// Carries a request out that changes no other blocks. To be waited for: one that is given up goes on without the lock.
    pub async fn execute(&self, operation: Request) -> Outcome {
        let locked = self.extent.start().get()..=self.extent.last().get();
        let is_within = |blocks: &RangeInclusive<u64>| locked.contains(blocks.start()) && locked.contains(blocks.end());
        debug_assert!(operation.changed().as_ref().is_none_or(is_within), "others are not locked");
        self.attached.carry_out(operation, true).await
    }
}

impl Device for Attached {
    fn geometry(&self) -> &Geometry {
        self.device.geometry()
    }

    fn abilities(&self) -> Abilities {
        match &self.way {
            // They may change with what a layer is made of.
            Way::Here(place) => place.gate().map_or(self.device.abilities(), |gate| gate.abilities()),
            Way::There(_) => self.device.abilities(),
        }
    }

    async fn execute(&self, operation: Request) -> Outcome {
        self.carry_out(operation, false).await
    }

    fn try_execute(&self, operation: &Request) -> Option<Outcome> {
        let outcome = self.at_once_counted(operation)?;
        self.tell(CrossCoreRequest::of(operation), &outcome);
        Some(outcome)
    }
}

impl Attached {
    fn at_once_counted(&self, operation: &Request) -> Option<Outcome> {
        let Way::Here(place) = &self.way else { return None };
        let ask = || self.device.carry_out_at_once(place, operation);
        if matches!(operation, Request::Flush) {
            let flush = self.asker.begin_flush();
            return ask().map(|outcome| flush.end(outcome));
        }
        if !operation.is_volatile() {
            return ask();
        }
        let mark = self.asker.begin_write();
        ask().inspect(|outcome| {
            if outcome.is_ok() {
                self.asker.wrote(mark);
            }
        })
    }
}
