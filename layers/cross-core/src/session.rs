//! Sessions of clients, and the fence around the changes that an ended session has in flight.
//!
//! A client that lost its connection sends unanswered changes again. The first copies may still be executing; late,
//! they would undo what any client has written since. So when a session ends, each of its changes in flight locks its
//! blocks against later changes of any client until it has ended. Reads and changes of other blocks continue.
//!
//! Invariants: changes of a session that reached the core that executes them before its end are fenced, including those
//! that wait for their blocks. A session that has ended starts no further change.
//!
//! Shape: the fence of a change excludes changes of its blocks. It is requested when the session ends and dropped as
//! soon as it is granted. What overlaps is granted in order, so the fence waits for the change, and later changes wait
//! for the fence. A session without changes in flight costs nothing.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::Weak as SharedWeak;

use futures_util::future::join_all;
use sealblock_block::{Error, Operation, Request};

use crate::caller_end::Link;
use crate::changes::{SessionId, session_has_ended};
use crate::device_slot::DeviceSlot;
use crate::shared::{DeviceView, SharedDevice};

/// A client's session on one core: a connection, or one queue of it. It may have attachments to several devices.
pub struct ClientSession {
    id: SessionId,
    has_ended: Cell<bool>,
    fences: RefCell<Vec<FencedDevice>>,
}

/// A device of a session. The session does not keep it alive.
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
        Rc::new(ClientSession { id: SessionId::new(), has_ended: Cell::new(false), fences: RefCell::default() })
    }

    pub(crate) fn id(&self) -> SessionId {
        self.id
    }

    /// Adds a device that the session uses, if it is new.
    pub(crate) fn add(&self, device: SharedWeak<DeviceView>, route: WeakRoute) {
        let mut fences = self.fences.borrow_mut();
        fences.retain(|fence| fence.device.strong_count() > 0);
        fences.push(FencedDevice { device, route });
    }

    /// Ends the session: its later changes fail, and those in flight lock their blocks against later changes of any
    /// client until they have ended. Ready when every core that executes them has locked the blocks; this does not
    /// wait for the changes.
    pub async fn end(&self) {
        if self.has_ended.replace(true) {
            return;
        }
        let mut remote = Vec::new();
        for FencedDevice { device, route } in self.fences.take() {
            let Some(device) = device.upgrade().map(SharedDevice::of_view) else { continue };
            match route {
                WeakRoute::Local(slot) => slot.upgrade().into_iter().for_each(|slot| device.fence(&slot, self.id)),
                WeakRoute::Remote(link) => remote.extend(link.upgrade()),
            }
        }
        join_all(remote.iter().map(|link| link.fence(self.id))).await;
    }

    /// True if it has ended, or is ending.
    pub fn has_ended(&self) -> bool {
        self.has_ended.get()
    }

    /// Refuses a change of a session that has ended: the fence covers only what was in flight then.
    pub(crate) fn check(&self, request: &Request) -> Result<(), Error> {
        let changes = || request.changed().is_some() || matches!(request.operation, Operation::WriteReserved(..));
        match self.has_ended.get() && changes() {
            true => Err(session_has_ended()),
            false => Ok(()),
        }
    }
}
