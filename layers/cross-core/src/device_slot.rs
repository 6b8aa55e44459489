//! The slot of a device on its owner core: can be quiesced, so that another device replaces the one in it while clients use it.
//!
//! Invariants: while the slot is quiesced no request starts, and waiting requests go to the device that is in the slot afterwards;
//! one caller at a time has it quiesced; a request is in flight from when it has entered until its guard is dropped, so no
//! request uses a device that is drained; requests to an unavailable slot fail with the reason.
//!
//! A request enters after it has taken the range lock. A request that waits here holds up those that wait for its blocks, but no
//! request that has entered, so draining always ends.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use sealblock_block::{Condition, DynDevice, Error, ErrorKind, Gate};

use crate::shared::SharedDevice;

/// A device on its owner core, or why there is none.
pub(crate) struct DeviceSlot {
    device: RefCell<Result<Rc<Gate<DynDevice>>, String>>,
    is_quiesced: Cell<bool>,
    in_flight: Cell<usize>,
    changed: Condition,
}

/// A request in flight, and the device that executes it.
pub(crate) struct EnteredRequest<'a> {
    slot: &'a DeviceSlot,
    gate: Rc<Gate<DynDevice>>,
}

impl DeviceSlot {
    pub(crate) fn new(gate: Rc<Gate<DynDevice>>) -> Rc<DeviceSlot> {
        Rc::new(DeviceSlot {
            device: RefCell::new(Ok(gate)),
            is_quiesced: Cell::new(false),
            in_flight: Cell::new(0),
            changed: Condition::default(),
        })
    }

    /// The device in the slot, if there is one.
    pub(crate) fn gate(&self) -> Option<Rc<Gate<DynDevice>>> {
        self.device.borrow().as_ref().ok().cloned()
    }

    /// Starts a request, once the slot is not quiesced.
    pub(crate) async fn enter(&self) -> Result<EnteredRequest<'_>, Error> {
        if self.is_quiesced.get() {
            self.changed.wait_until(|| !self.is_quiesced.get()).await;
        }
        let gate = self.device.borrow().clone().map_err(|reason| Error::from(ErrorKind::Unreachable { reason }))?;
        Ok(self.start(gate))
    }

    /// Starts a request if that needs no waiting.
    pub(crate) fn try_enter(&self) -> Option<EnteredRequest<'_>> {
        if self.is_quiesced.get() {
            return None;
        }
        self.gate().map(|gate| self.start(gate))
    }

    fn start(&self, gate: Rc<Gate<DynDevice>>) -> EnteredRequest<'_> {
        self.in_flight.set(self.in_flight.get() + 1);
        EnteredRequest { slot: self, gate }
    }
}

impl EnteredRequest<'_> {
    pub(crate) fn gate(&self) -> &Gate<DynDevice> {
        &self.gate
    }
}

impl Drop for EnteredRequest<'_> {
    fn drop(&mut self) {
        self.slot.in_flight.set(self.slot.in_flight.get() - 1);
        if self.slot.in_flight.get() == 0 && self.slot.is_quiesced.get() {
            self.slot.changed.notify();
        }
    }
}

/// Keeps requests from starting until it is dropped; see [`SharedDevice::quiesce`].
pub struct Quiesced {
    device: SharedDevice,
    slot: Rc<DeviceSlot>,
}

impl Quiesced {
    pub(crate) fn start(device: SharedDevice, slot: Rc<DeviceSlot>) -> Option<Quiesced> {
        let was_quiesced = slot.is_quiesced.replace(true);
        // Not built for a second caller, since dropping it would let requests start.
        (!was_quiesced).then(|| Quiesced { device, slot })
    }

    /// Waits until no request is in flight. Only the device itself bounds how long that takes.
    pub async fn drained(&self) {
        self.slot.changed.wait_until(|| self.slot.in_flight.get() == 0).await;
    }

    /// The number of requests in flight.
    pub fn in_flight(&self) -> usize {
        self.slot.in_flight.get()
    }

    /// Replaces the device. The new one has to hold the same blocks, as far as both have them, and what was durable on the old one has
    /// to be durable on the new one. The returned handle shows its geometry; earlier handles and attachments use the new device too,
    /// and still show the old geometry.
    pub fn replace(&self, gate: Rc<Gate<DynDevice>>) -> SharedDevice {
        let view = self.device.with_view_of(&gate);
        let previous = self.slot.device.replace(Ok(gate));
        drop(previous);
        view
    }

    /// Removes the device: every request fails from now on, with this reason.
    pub fn set_unavailable(&self, reason: String) {
        let previous = self.slot.device.replace(Err(reason));
        drop(previous);
    }

    /// Records that completed writes without a flush may be lost: the next flush of each client that wrote fails.
    pub fn record_lost_writes(&self, error: &Error) {
        self.device.record_lost(error);
    }
}

impl Drop for Quiesced {
    fn drop(&mut self) {
        self.slot.is_quiesced.set(false);
        self.slot.changed.notify();
    }
}
