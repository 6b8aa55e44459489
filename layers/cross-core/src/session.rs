//! Sessions of clients, and the fence around what an ended one has in flight.
//!
//! A client that lost its connection sends unanswered changes again. The first copies may still be executing; late, they would undo
//! what the client, or anybody else, has written since. So when a session ends, each of its changes in flight holds its blocks against
//! later changes of anyone until it has ended. Reads and other blocks go on.
//!
//! Invariants: changes of a session that reached the owner core before its end are fenced, those that wait for a lock among them; a
//! session that has ended starts no further change.
//!
//! Shape: the fence of a change is an exclusive lock of its blocks, requested when the session ends and released as soon as it is
//! granted. Locks are granted in order: it waits for the change, and later changes wait for it. A session without changes in flight
//! costs nothing.

use std::cell::{Cell, RefCell};
use std::ops::RangeInclusive;
use std::rc::{Rc, Weak};
use std::sync::Weak as SharedWeak;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Waker};

use futures_util::future::join_all;
use sealblock_block::{Error, ErrorKind, Operation, Request};
use sealblock_runtime_reactor::spawn;
use slab::Slab;

use crate::channel::Link;
use crate::device_slot::DeviceSlot;
use crate::shared::{DeviceView, SharedDevice};

/// A client's session on one core: a connection, or one queue of it. Attachments to several devices may belong to it.
pub struct ClientSession {
    id: SessionId,
    has_ended: Cell<bool>,
    fences: RefCell<Vec<FencedDevice>>,
}

/// Identifies a session; unique in this process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SessionId(u64);

/// A device of a session, which does not keep it.
struct FencedDevice {
    device: SharedWeak<DeviceView>,
    route: WeakRoute,
}

pub(crate) enum WeakRoute {
    Local(Weak<DeviceSlot>),
    Remote(Weak<Link>),
}

impl ClientSession {
    /// A session that has sent nothing yet.
    pub fn begin() -> Rc<ClientSession> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = SessionId(NEXT.fetch_add(1, Ordering::Relaxed));
        Rc::new(ClientSession { id, has_ended: Cell::new(false), fences: RefCell::default() })
    }

    pub(crate) fn id(&self) -> SessionId {
        self.id
    }

    /// Adds a device that the session uses, if it is not known yet.
    pub(crate) fn add(&self, device: SharedWeak<DeviceView>, route: WeakRoute) {
        let mut fences = self.fences.borrow_mut();
        fences.retain(|fence| fence.device.strong_count() > 0);
        fences.push(FencedDevice { device, route });
    }

    /// Ends the session: its later changes fail, and those in flight hold their blocks against later changes of anyone until they have
    /// ended. Ready when every owner core holds the blocks, which waits for no change.
    pub async fn end(&self) {
        if self.has_ended.replace(true) {
            return;
        }
        let mut remote = Vec::new();
        for FencedDevice { device, route } in self.fences.take() {
            let Some(device) = device.upgrade().map(SharedDevice::of_view) else { continue };
            match route {
                WeakRoute::Local(slot) => slot.upgrade().into_iter().for_each(|slot| fence(&device, &slot, self.id)),
                WeakRoute::Remote(link) => remote.extend(link.upgrade()),
            }
        }
        join_all(remote.iter().map(|link| link.fence(self.id))).await;
    }

    /// Refuses a change of a session that has ended: the fence is around what was in flight then.
    pub(crate) fn check(&self, request: &Request) -> Result<(), Error> {
        let changes = || request.changed().is_some() || matches!(request.operation, Operation::WriteReserved(..));
        match self.has_ended.get() && changes() {
            true => Err(ErrorKind::Unreachable { reason: "the session of its client has ended".to_owned() }.into()),
            false => Ok(()),
        }
    }
}

/// The changes in flight on a device's owner core that did not complete at once.
#[derive(Default)]
pub(crate) struct ChangesInFlight(RefCell<Slab<Change>>);

struct Change {
    session: SessionId,
    blocks: RangeInclusive<u64>,
    source: Option<RangeInclusive<u64>>,
}

/// Removes a change from those in flight when dropped.
pub(crate) struct ChangeGuard<'a> {
    changes: &'a ChangesInFlight,
    key: usize,
}

impl ChangesInFlight {
    /// Adds a request that is about to wait for its lock; `None` for one that changes no blocks.
    pub(crate) fn start(&self, session: SessionId, request: &Request) -> Option<ChangeGuard<'_>> {
        let blocks = request.changed()?;
        let source = request.source().map(|source| source.start().get()..=source.last().get());
        let key = self.0.borrow_mut().insert(Change { session, blocks, source });
        Some(ChangeGuard { changes: self, key })
    }

    /// The blocks of a session's changes.
    fn of(&self, session: SessionId) -> Vec<RangeInclusive<u64>> {
        let changes = self.0.borrow();
        let own = changes.iter().map(|(_, change)| change).filter(|change| change.session == session);
        own.flat_map(|change| std::iter::once(&change.blocks).chain(&change.source)).cloned().collect()
    }
}

impl Drop for ChangeGuard<'_> {
    fn drop(&mut self) {
        self.changes.0.borrow_mut().remove(self.key);
    }
}

/// Fences what this session has in flight, on the device's owner core.
pub(crate) fn fence(device: &SharedDevice, slot: &DeviceSlot, session: SessionId) {
    for blocks in slot.changes.of(session) {
        let device = device.clone();
        let mut fence = Box::pin(async move { drop(device.state().range_lock.lock(blocks).await) });
        // The first poll gives it its place in the order of locks.
        if fence.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
            drop(spawn(fence));
        }
    }
}
