//! A device for all cores: open on each of them, or on one and used from the others.
//!
//! [`SharedDevice::publish`] makes a handle that is `Send` of a device of this core, its *home*. [`SharedDevice::attach`]
//! turns the handle into a [`sealblock_block::Device`] of the calling core. On the home core that is the device itself.
//! A device with a source ([`sealblock_block::DeviceSource`]) is opened on each other core when it first attaches, and
//! no request crosses, but for those of the reserved areas. For a device without one, the home core is its *owner*: from
//! any other core, requests and replies cross between the two cores in batches.
//!
//! Invariants:
//! - A request that was submitted is executed once and gets one reply, whether or not the caller still waits.
//! - Requests of one core start in the order in which they were submitted, except those that wait while the device is
//!   quiesced.
//! - When a client's session ends ([`ClientSession::end`]), its changes in flight hold their blocks against later
//!   changes until they end.
//! - While a device is quiesced ([`SharedDevice::quiesce`]) another one may replace it, for example after a resize.
//!   Requests wait and do not fail because of that, and failed flushes are still reported to clients.
//! - When the owner core stops or a request on it panics, the request fails as [`sealblock_block::ErrorKind::Unreachable`];
//!   no caller waits forever.
//!
//! Each core has one `Link` per device, which its attachments share, with a mailbox for each direction. Requests of one
//! turn, and outcomes of one turn, are pushed together. A push wakes a sleeping reader. While the reader is busy, items
//! accumulate, and it takes them together. A reactor that is awake, or polls busily, is woken without a system call. A
//! mailbox is locked for one push or swap, so two cores contend for a few nanoseconds at most. A crossing allocates
//! nothing in the long run. The callers determine the number of requests in flight, and exports limit them.
//!
//! The gate is on each core that has the device open, in front of it, so an attachment needs none.

mod caller_end;
mod changes;
mod channel;
mod core_slots;
mod device_slot;
mod durable;
mod owner_end;
mod session;
mod shared;
mod timing;

/// The lock of `durable.rs`; `tests/durable.rs` replaces it with that of a model checker.
mod primitives {
    pub(crate) use std::sync::{Mutex, MutexGuard};
}

use std::cell::RefCell;
use std::ops::RangeInclusive;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Instant;

use sealblock_block::{
    Abilities, Device, Error, ErrorKind, Exclusion, FlushCursor, Geometry, Outcome, Request, RequestKind,
};
use sealblock_runtime_reactor::now;
use sealblock_units::Extent;

use caller_end::Link;
use device_slot::DeviceSlot;
use session::WeakRoute;
use shared::Origin;

pub use session::ClientSession;
pub use shared::{EarlierClients, Observer, Quiesced, RequestInfo, SharedDevice};

thread_local! {
    /// The links of the reactors on this thread. Opening a new one removes those that were dropped.
    static LINKS: RefCell<Vec<Weak<Link>>> = const { RefCell::new(Vec::new()) };
}

impl SharedDevice {
    /// Attaches the current core: the device itself where it is open or can be opened, a link to its owner core
    /// otherwise. Never waits. If the owner core has stopped, requests fail
    /// ([`sealblock_block::ErrorKind::Unreachable`]). The attachment belongs to the server itself, not to a client, and
    /// has its own flush cursor: it learns once of flushes that failed after it had written, but not of what an earlier
    /// server lost.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn attach(&self) -> Attached {
        self.attach_as(&Arc::new(self.state().flush_errors.alone()))
    }

    /// Attaches the current core with the flush cursor of a client that may have several attachments, on several cores;
    /// see [`SharedDevice::flush_cursor`].
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn attach_as(&self, cursor: &Arc<FlushCursor>) -> Attached {
        self.attach_in(cursor, &ClientSession::begin())
    }

    /// The same for a session, whose end fences its requests in flight.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn attach_in(&self, cursor: &Arc<FlushCursor>, session: &Rc<ClientSession>) -> Attached {
        debug_assert!(self.has_cursor(cursor), "a flush cursor of this device");
        let (route, weak) = match self.slots().here() {
            Some(slot) => (Route::Local(Rc::clone(&slot)), WeakRoute::Local(Rc::downgrade(&slot))),
            None => {
                let link = self.link();
                (Route::Remote(Rc::clone(&link)), WeakRoute::Remote(Rc::downgrade(&link)))
            }
        };
        session.add(Arc::downgrade(self.view()), weak);
        Attached { device: self.clone(), route, cursor: Arc::clone(cursor), session: Rc::clone(session) }
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
}

/// The device on the current core; see [`SharedDevice::attach`]. Requests of one core start in the order of their first
/// poll. A request from another core is executed even if its future is dropped; on the owner core this depends on the
/// device.
#[derive(Clone)]
pub struct Attached {
    device: SharedDevice,
    route: Route,
    cursor: Arc<FlushCursor>,
    session: Rc<ClientSession>,
}

#[derive(Clone)]
enum Route {
    Local(Rc<DeviceSlot>),
    Remote(Rc<Link>),
}

impl Attached {
    /// The device of this attachment.
    pub fn shared(&self) -> &SharedDevice {
        &self.device
    }

    /// True if this core has the device open, so that requests stay on it.
    pub fn is_local(&self) -> bool {
        matches!(self.route, Route::Local(_))
    }

    /// Waits until no other client changes these blocks, on any core, and locks them against changes until the result
    /// is dropped. Reads continue.
    pub async fn lock(&self, extent: Extent) -> Locked<'_> {
        let exclusion = self.device.state().claims.exclude(extent.into()).await;
        Locked { attached: self, extent, _exclusion: exclusion }
    }

    /// True on the core that published the device.
    fn is_home(&self) -> bool {
        self.device.home().home().is_here()
    }

    /// Executes a request that arrived at its export at this moment, which its wait is counted from.
    pub async fn execute_arrived(&self, request: Request, arrived: Instant) -> Outcome {
        self.execute_reported(request, self.origin(arrived, false)).await
    }

    /// The same as [`Device::try_execute`] for a request that arrived at its export at this moment.
    pub fn try_execute_arrived(&self, request: &Request, arrived: Instant) -> Option<Outcome> {
        self.try_execute_reported(request, Some(arrived))
    }

    fn origin(&self, arrived: Instant, is_locked: bool) -> Origin {
        Origin { session: self.session.id(), is_locked, arrived }
    }

    async fn dispatch(&self, request: Request, from: Origin) -> Outcome {
        match &self.route {
            Route::Local(_) if is_of_home(request.kind()) && !self.is_home() => {
                self.device.link().call(request, from).await
            }
            Route::Local(slot) => self.device.execute(slot, request, from).await,
            Route::Remote(link) => link.call(request, from).await,
        }
    }

    async fn execute_reported(&self, request: Request, from: Origin) -> Outcome {
        // Not reported: the end of a client is no failure of the device. Nothing is awaited until the request is on its
        // way to the owner core, so the session cannot end in between.
        self.session.check(&request)?;
        let info = RequestInfo::of(&request);
        let outcome = self.execute_tracked(request, from).await;
        // The owner core may have refused it for the same reason, before it began.
        let may_be_refused = self.session.has_ended() && info.kind.changes_blocks();
        if !(may_be_refused && outcome.as_ref().is_err_and(is_unreachable)) {
            self.report(info, &outcome);
        }
        outcome
    }

    fn report(&self, info: RequestInfo, outcome: &Outcome) {
        if let (Some(client), Some(observer)) = (self.cursor.client(), self.device.state().observer.get()) {
            match outcome {
                Ok(_) => observer.succeeded(client, info),
                Err(error) => observer.failed(client, info, error),
            }
        }
    }

    async fn execute_tracked(&self, request: Request, from: Origin) -> Outcome {
        if request.kind() == RequestKind::Flush {
            let flush = self.cursor.flush_started();
            return flush.complete(self.dispatch(request, from).await);
        }
        if !request.is_volatile() {
            return self.dispatch(request, from).await;
        }
        let mark = self.cursor.write_started();
        let outcome = self.dispatch(request, from).await;
        if outcome.is_ok() {
            self.cursor.write_completed(mark);
        }
        outcome
    }

    /// The device's slot, if the device is on this core and may execute the request in place.
    fn slot_in_place(&self, kind: RequestKind) -> Option<&DeviceSlot> {
        match &self.route {
            Route::Local(slot) if self.device.executes_in_place() && !is_of_home(kind) => Some(slot),
            _ => None,
        }
    }

    fn try_execute_reported(&self, request: &Request, arrived: Option<Instant>) -> Option<Outcome> {
        let slot = self.slot_in_place(request.kind())?;
        if let Err(ended) = self.session.check(request) {
            return Some(Err(ended));
        }
        let outcome = self.try_execute_tracked(slot, request, arrived)?;
        self.report(RequestInfo::of(request), &outcome);
        Some(outcome)
    }

    fn try_execute_tracked(&self, slot: &DeviceSlot, request: &Request, arrived: Option<Instant>) -> Option<Outcome> {
        let dispatch = || self.device.try_execute(slot, request, arrived);
        if request.kind() == RequestKind::Flush {
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

/// True for requests that only the home core executes, because labels and the state of a scrub live there.
fn is_of_home(kind: RequestKind) -> bool {
    matches!(kind, RequestKind::ReadReserved | RequestKind::WriteReserved)
}

fn is_unreachable(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Unreachable { .. })
}

/// Blocks that are locked against changes; see [`Attached::lock`].
pub struct Locked<'a> {
    attached: &'a Attached,
    extent: Extent,
    _exclusion: Exclusion<'a>,
}

impl Locked<'_> {
    /// Executes a request that changes no other blocks. The caller must await it: if its future is dropped, it may
    /// continue without the lock.
    pub async fn execute(&self, request: Request) -> Outcome {
        let locked = self.extent.start().get()..=self.extent.last().get();
        let is_within = |blocks: &RangeInclusive<u64>| locked.contains(blocks.start()) && locked.contains(blocks.end());
        debug_assert!(
            request.changed().as_ref().is_none_or(is_within),
            "the request changes blocks that are not locked"
        );
        self.attached.execute_reported(request, self.attached.origin(now(), true)).await
    }
}

impl Device for Attached {
    fn geometry(&self) -> &Geometry {
        self.device.geometry()
    }

    fn abilities(&self) -> Abilities {
        match &self.route {
            // The abilities of a layer may change with its members, which the home core knows.
            Route::Local(slot) if self.is_home() => {
                slot.gate().map_or(self.device.abilities(), |gate| gate.abilities())
            }
            Route::Local(_) | Route::Remote(_) => self.device.abilities(),
        }
    }

    async fn execute(&self, request: Request) -> Outcome {
        self.execute_arrived(request, now()).await
    }

    fn executes_in_place(&self) -> bool {
        matches!(self.route, Route::Local(_)) && self.device.executes_in_place()
    }

    fn try_execute(&self, request: &Request) -> Option<Outcome> {
        self.try_execute_reported(request, None)
    }
}
