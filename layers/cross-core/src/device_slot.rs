//! The slot of a device on one core. It can be quiesced, so that another device replaces the one in it while clients
//! use it.
//!
//! Invariants: while the slot is quiesced no request starts, and waiting requests go to the device that is in the slot
//! afterwards. Only one caller at a time has it quiesced. A request is in flight from its entry until its guard is
//! dropped, so no request uses a device after it was drained. Requests to an unavailable slot fail with the reason.
//!
//! A request enters after it has claimed its blocks. A request that waits here blocks those that wait for its blocks,
//! but no request that has entered, so draining always ends.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;

use futures_util::task::AtomicWaker;
use sealblock_block::{Condition, DynDevice, Error, ErrorKind, Lane};

use crate::changes::ChangesInFlight;
use crate::timing::Timing;

/// A device as one core has it open, or why there is none.
pub(crate) struct DeviceSlot {
    device: RefCell<Result<DynDevice, String>>,
    is_quiesced: Cell<bool>,
    in_flight: Cell<usize>,
    changed: Condition,
    /// Dropped once no request is in flight.
    answers: RefCell<Vec<DrainAnswer>>,
    /// The changes of this core, among the claims of the device.
    pub(crate) lane: Lane,
    /// Changes in flight, by the session that sent them.
    pub(crate) changes: ChangesInFlight,
    /// The times of the requests of this core.
    pub(crate) timing: Timing,
}

/// A request in flight, and the device that executes it.
pub(crate) struct EnteredRequest<'a> {
    slot: &'a DeviceSlot,
    gate: DynDevice,
}

/// Cores whose requests in flight are waited for.
#[derive(Default)]
pub(crate) struct Drain {
    cores: AtomicUsize,
    last_answered: AtomicWaker,
}

/// A core that was told that the device is quiesced; dropping it is its answer that no request is in flight there.
pub(crate) struct DrainAnswer(Arc<Drain>);

impl DeviceSlot {
    pub(crate) fn new(gate: DynDevice, lane: Lane) -> Rc<DeviceSlot> {
        Rc::new(DeviceSlot {
            device: RefCell::new(Ok(gate)),
            is_quiesced: Cell::new(false),
            in_flight: Cell::new(0),
            changed: Condition::default(),
            answers: RefCell::default(),
            lane,
            changes: ChangesInFlight::default(),
            timing: Timing::default(),
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

    /// Keeps requests from starting, and answers once none is in flight.
    pub(crate) fn hold(&self, answer: DrainAnswer) {
        self.is_quiesced.set(true);
        self.answer_when_drained(answer);
    }

    /// Answers once no request is in flight.
    pub(crate) fn answer_when_drained(&self, answer: DrainAnswer) {
        if self.in_flight() > 0 {
            self.answers.borrow_mut().push(answer);
        }
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

    fn drained_now(&self) {
        if self.is_quiesced.get() {
            self.changed.notify();
        }
        if !self.answers.borrow().is_empty() {
            drop(self.answers.take());
        }
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
        if self.slot.in_flight.get() == 0 {
            self.slot.drained_now();
        }
    }
}

impl Drain {
    /// Waits until every core has answered.
    pub async fn answered(&self) {
        poll_fn(|cx| {
            // Stored before the look, so that the last answer finds it.
            self.last_answered.register(cx.waker());
            if self.cores.load(Ordering::SeqCst) == 0 { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
}

impl DrainAnswer {
    /// A core that owes an answer.
    pub fn expect(drain: &Arc<Drain>) -> DrainAnswer {
        drain.cores.fetch_add(1, Ordering::SeqCst);
        DrainAnswer(Arc::clone(drain))
    }
}

impl Drop for DrainAnswer {
    fn drop(&mut self) {
        if self.0.cores.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.last_answered.wake();
        }
    }
}
