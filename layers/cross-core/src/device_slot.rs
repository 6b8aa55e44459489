//! The slot of a device on its owner core. It can be quiesced, so that another device replaces the one in it while
//! clients use it.
//!
//! Invariants: while the slot is quiesced no request starts, and waiting requests go to the device that is in the slot
//! afterwards. Only one caller at a time has it quiesced. A request is in flight from its entry until its guard is
//! dropped, so no request uses a device after it was drained. Requests to an unavailable slot fail with the reason.
//!
//! A request enters after it has claimed its blocks. A request that waits here blocks those that wait for its blocks,
//! but no request that has entered, so draining always ends.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use sealblock_block::{Condition, DynDevice, Error, ErrorKind, Lane};

use crate::changes::ChangesInFlight;

/// A device on its owner core, or why there is none.
pub(crate) struct DeviceSlot {
    device: RefCell<Result<DynDevice, String>>,
    is_quiesced: Cell<bool>,
    in_flight: Cell<usize>,
    changed: Condition,
    /// The changes of this core, among the claims of the device.
    pub(crate) lane: Lane,
    /// Changes in flight, by the session that sent them.
    pub(crate) changes: ChangesInFlight,
}

/// A request in flight, and the device that executes it.
pub(crate) struct EnteredRequest<'a> {
    slot: &'a DeviceSlot,
    gate: DynDevice,
}

impl DeviceSlot {
    pub(crate) fn new(gate: DynDevice, lane: Lane) -> Rc<DeviceSlot> {
        Rc::new(DeviceSlot {
            device: RefCell::new(Ok(gate)),
            is_quiesced: Cell::new(false),
            in_flight: Cell::new(0),
            changed: Condition::default(),
            lane,
            changes: ChangesInFlight::default(),
        })
    }

    /// The device in the slot, if there is one.
    pub(crate) fn gate(&self) -> Option<DynDevice> {
        self.device.borrow().as_ref().ok().cloned()
    }

    /// Starts a request, when the slot is not quiesced.
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

    fn start(&self, gate: DynDevice) -> EnteredRequest<'_> {
        self.in_flight.set(self.in_flight.get() + 1);
        EnteredRequest { slot: self, gate }
    }

    /// Keeps requests from starting; false if the slot is already quiesced.
    pub(crate) fn quiesce(&self) -> bool {
        !self.is_quiesced.replace(true)
    }

    /// Lets requests start again.
    pub(crate) fn resume(&self) {
        self.is_quiesced.set(false);
        self.changed.notify();
    }

    /// The number of requests in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.get()
    }

    /// Waits until no request is in flight.
    pub(crate) async fn drained(&self) {
        self.changed.wait_until(|| self.in_flight() == 0).await;
    }

    /// Puts another device into the slot, or the reason why there is none.
    pub(crate) fn replace(&self, device: Result<DynDevice, String>) {
        let previous = self.device.replace(device);
        drop(previous);
    }
}

impl EnteredRequest<'_> {
    pub(crate) fn gate(&self) -> &DynDevice {
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
