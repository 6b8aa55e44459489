//! Where a device stands on its own core, and the hold that lets another take its place under those who use it.
//!
//! Invariants: while the place is quiesced no request begins, and what waits goes on with whatever stands there afterwards; who
//! has it quiesced is one; a request is under way from when it has entered until its guard is dropped, so that a place that
//! has drained is used by nobody; a place that was emptied answers, and says why.
//!
//! Shape: requests enter last of all, behind the range lock. One that waits here holds up those that wait for its blocks, but
//! none that has entered, so that draining always comes to its end.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use sealblock_block::{Condition, DynDevice, Error, ErrorKind, Gate};

use crate::shared::SharedDevice;

/// A device's place.
pub(crate) struct Place {
    stands: RefCell<Result<Rc<Gate<DynDevice>>, String>>,
    is_quiesced: Cell<bool>,
    under_way: Cell<usize>,
    changed: Condition,
}

/// A request under way, and the device that carries it out.
pub(crate) struct Entered<'a> {
    place: &'a Place,
    gate: Rc<Gate<DynDevice>>,
}

impl Place {
    pub(crate) fn new(gate: Rc<Gate<DynDevice>>) -> Rc<Place> {
        Rc::new(Place {
            stands: RefCell::new(Ok(gate)),
            is_quiesced: Cell::new(false),
            under_way: Cell::new(0),
            changed: Condition::default(),
        })
    }

    /// What stands there now, if anything.
    pub(crate) fn gate(&self) -> Option<Rc<Gate<DynDevice>>> {
        self.stands.borrow().as_ref().ok().cloned()
    }

    /// Begins a request, once the place is not quiesced.
    pub(crate) async fn enter(&self) -> Result<Entered<'_>, Error> {
        if self.is_quiesced.get() {
            self.changed.wait_until(|| !self.is_quiesced.get()).await;
        }
        let gate = self.stands.borrow().clone().map_err(|reason| Error::from(ErrorKind::Unreachable { reason }))?;
        Ok(self.begin(gate))
    }

    /// The same, if there is nothing to wait for.
    pub(crate) fn try_enter(&self) -> Option<Entered<'_>> {
        if self.is_quiesced.get() {
            return None;
        }
        self.gate().map(|gate| self.begin(gate))
    }

    fn begin(&self, gate: Rc<Gate<DynDevice>>) -> Entered<'_> {
        self.under_way.set(self.under_way.get() + 1);
        Entered { place: self, gate }
    }
}

impl Entered<'_> {
    pub(crate) fn gate(&self) -> &Gate<DynDevice> {
        &self.gate
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.place.under_way.set(self.place.under_way.get() - 1);
        if self.place.under_way.get() == 0 && self.place.is_quiesced.get() {
            self.place.changed.notify();
        }
    }
}

/// A device that begins no request, until this is dropped: [`SharedDevice::quiesce`].
pub struct Quiesced {
    device: SharedDevice,
    place: Rc<Place>,
}

impl Quiesced {
    pub(crate) fn begin(device: SharedDevice, place: Rc<Place>) -> Option<Quiesced> {
        let is_taken = place.is_quiesced.replace(true);
        // Made only for who has it: dropping one lets requests go on.
        (!is_taken).then(|| Quiesced { device, place })
    }

    /// Waits until no request is under way. Nothing bounds this but the device itself.
    pub async fn drained(&self) {
        self.place.changed.wait_until(|| self.place.under_way.get() == 0).await;
    }

    /// Requests under way now.
    pub fn under_way(&self) -> usize {
        self.place.under_way.get()
    }

    /// Puts another device in the place of the one that stood there: it is to hold the same blocks, as far as both have them, and
    /// what was durable in the one is to be durable in the other. What comes back shows it as it is; handles and attachments
    /// from before use it too, and still see the geometry that they saw.
    pub fn replace(&self, gate: Rc<Gate<DynDevice>>) -> SharedDevice {
        let view = self.device.seen_anew(&gate);
        let before = self.place.stands.replace(Ok(gate));
        drop(before);
        view
    }

    /// Leaves the place empty: every request fails from here on and says why.
    pub fn empty(&self, why: String) {
        let before = self.place.stands.replace(Err(why));
        drop(before);
    }

    /// What was written before and not flushed may be lost: those who wrote it are told by their next flush.
    pub fn lost_writes(&self, error: &Error) {
        self.device.record_lost(error);
    }
}

impl Drop for Quiesced {
    fn drop(&mut self) {
        self.place.is_quiesced.set(false);
        self.place.changed.notify();
    }
}
