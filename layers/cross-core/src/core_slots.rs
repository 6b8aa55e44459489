//! The slots of a device on all cores that have opened it, and what concerns all of them: quiescing, replacing the
//! device, and the sums of its counters and times.
//!
//! Invariants: a core has at most one slot of a device. Each slot that is opened while the device is quiesced is
//! quiesced, and each that was opened before is told. So once every core that was told has answered, no request is in
//! flight anywhere, and none starts. A core that has stopped counts as one that answered.
//!
//! Shape: a core opens the device when it first attaches ([`DeviceSource::open_here`]). The home core speaks to the
//! others by messages, which a core gets in the order in which they were sent. So no request pays for being quiesced
//! with more than a look at a cell of its own core.

use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sealblock_block::{Claims, Counters, DeviceSource, DynDevice, Error, Lane, Latency, LatencyCounters, RequestKind};
use sealblock_runtime_reactor::CoreLocal;

use crate::device_slot::{DeviceSlot, Drain, DrainAnswer};

/// The slots of a device on its cores.
pub(crate) struct CoreSlots {
    /// The claims of the device; each slot has a lane of its own.
    claims: Claims,
    home: CoreLocal<DeviceSlot>,
    others: Mutex<OtherCores>,
}

struct OtherCores {
    slots: Vec<OtherSlot>,
    /// What opens the device on further cores; `None` for one that is on its home core only.
    source: Option<Arc<dyn DeviceSource>>,
    /// How often the device was replaced.
    generation: u64,
    is_quiesced: bool,
    home_counters: Arc<Counters>,
    home_latency: Arc<LatencyCounters>,
}

struct OtherSlot {
    slot: CoreLocal<DeviceSlot>,
    counters: Arc<Counters>,
    latency: Arc<LatencyCounters>,
}

/// The requests that crossed to the home core of a device.
///
/// Invariant: only the home core counts, where all links of the device end, so a count is a load and a store. It has
/// cache lines of its own, since every core reads what lies beside it.
#[derive(Default)]
#[repr(align(128))]
pub(crate) struct Crossings(AtomicU64);

impl Crossings {
    /// The count so far, on any core.
    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Counts one more, on the home core.
    pub(crate) fn add_one(&self) {
        self.0.store(self.get().wrapping_add(1), Ordering::Relaxed);
    }
}

impl CoreSlots {
    /// The slot of a device on this core, which is its home.
    pub fn new(device: DynDevice, claims: Claims) -> CoreSlots {
        let (source, home_counters) = (device.source(), Arc::clone(device.counters()));
        let slot = DeviceSlot::new(device, claims.lane());
        let home_latency = Arc::clone(&slot.timing.counters);
        let (generation, is_quiesced, slots) = (0, false, Vec::new());
        let others = OtherCores { slots, source, generation, is_quiesced, home_counters, home_latency };
        CoreSlots { claims, home: CoreLocal::new(slot), others: Mutex::new(others) }
    }

    pub fn home(&self) -> &CoreLocal<DeviceSlot> {
        &self.home
    }

    /// True if any core can open the device.
    pub fn has_source(&self) -> bool {
        self.others().source.is_some()
    }

    fn others(&self) -> MutexGuard<'_, OtherCores> {
        self.others.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The slot of this core, which opens the device if it has not yet; `None` if only other cores have it.
    pub fn here(&self) -> Option<Rc<DeviceSlot>> {
        if let Some(slot) = self.home.get() {
            return Some(slot);
        }
        loop {
            let (source, generation) = {
                let others = self.others();
                if let Some(slot) = others.slots.iter().find_map(|other| other.slot.get()) {
                    return Some(slot);
                }
                (others.source.clone()?, others.generation)
            };
            // Not under the lock, since a device may take its time to open.
            let opened = source.open_here();
            let device = opened.inspect_err(warn_of_crossing).ok()?;
            let mut others = self.others();
            if others.generation != generation {
                // It was replaced meanwhile.
                continue;
            }
            return Some(others.add(device, self.claims.lane()));
        }
    }

    /// Quiesces the device on all other cores; each of them answers once no request is in flight there.
    pub fn hold_others(&self) -> Arc<Drain> {
        let mut others = self.others();
        others.is_quiesced = true;
        others.ask_all(|slot, answer| slot.hold(answer))
    }

    /// Closes the device on all other cores, and opens it on none any more; each of them answers once no request is in
    /// flight there. Later requests fail there.
    pub fn close_others(&self) -> Arc<Drain> {
        let mut others = self.others();
        others.generation += 1;
        others.source = None;
        others.ask_all(|slot, answer| {
            slot.replace(Err("it is closed".to_owned()));
            slot.answer_when_drained(answer);
        })
    }

    /// Lets requests start again on all other cores.
    pub fn resume_others(&self) {
        let mut others = self.others();
        others.is_quiesced = false;
        others.send_all(|slot| slot.resume());
    }

    /// Puts another device, or the reason why there is none, into the slots of all cores. Call it on the home core while
    /// the device is quiesced.
    pub fn replace(self: &Arc<CoreSlots>, device: Result<DynDevice, String>) {
        let mut others = self.others();
        others.generation += 1;
        others.source = device.as_ref().ok().and_then(DynDevice::source);
        if let Ok(device) = &device {
            others.home_counters = Arc::clone(device.counters());
        }
        let (source, reason) = (others.source.clone(), device.as_ref().err().cloned());
        let slots = Arc::downgrade(self);
        others.send_all(move |slot| {
            let opened = match (&source, &reason) {
                (_, Some(reason)) => Err(reason.clone()),
                (Some(source), None) => source.open_here().map_err(|error| error.to_string()),
                (None, None) => Err("it is on another core only, since it was replaced".to_owned()),
            };
            if let (Some(slots), Ok(device)) = (slots.upgrade(), &opened) {
                slots.others().set_counters_here(device.counters());
            }
            slot.replace(opened);
        });
        drop(others);
        if let Some(slot) = self.home.get() {
            slot.replace(device);
        }
    }

    /// The sums of the counters of the device's gates on all cores.
    pub fn counters(&self) -> Counters {
        let others = self.others();
        let of_others = others.slots.iter().map(|other| &other.counters);
        of_others.chain([&others.home_counters]).map(Arc::clone).sum()
    }

    /// The times of requests of this kind on all cores.
    pub fn latency(&self, kind: RequestKind) -> Latency {
        let (others, mut sum) = (self.others(), Latency::default());
        let of_others = others.slots.iter().map(|other| &other.latency);
        of_others.chain([&others.home_latency]).for_each(|core| core.add_to(kind, &mut sum));
        sum
    }

    /// Requests in flight on all cores but the home core.
    pub fn in_flight_elsewhere(&self) -> u64 {
        self.others().slots.iter().map(|other| other.counters.in_flight()).sum()
    }
}

#[cold]
fn warn_of_crossing(error: &Error) {
    tracing::warn!(%error, "a device is not opened on this core, so its requests go to another core");
}

impl OtherCores {
    /// Adds the slot of this core.
    fn add(&mut self, device: DynDevice, lane: Lane) -> Rc<DeviceSlot> {
        let counters = Arc::clone(device.counters());
        let slot = DeviceSlot::new(device, lane);
        if self.is_quiesced {
            slot.quiesce();
        }
        let latency = Arc::clone(&slot.timing.counters);
        self.slots.push(OtherSlot { slot: CoreLocal::new(Rc::clone(&slot)), counters, latency });
        slot
    }

    /// Calls `ask` with each slot, on its core, and with the answer that the core owes. Forgets cores that have stopped.
    fn ask_all(&mut self, ask: impl Fn(&DeviceSlot, DrainAnswer) + Clone + Send + 'static) -> Arc<Drain> {
        let drain = Arc::<Drain>::default();
        self.slots.retain(|OtherSlot { slot, .. }| {
            let (here, answer, ask) = (slot.clone(), DrainAnswer::expect(&drain), ask.clone());
            // A core that has stopped drops the closure with the answer, which then is one.
            let told = slot.home().send(move || {
                if let Some(slot) = here.get() {
                    ask(&slot, answer);
                }
            });
            told.is_ok()
        });
        drain
    }

    /// The same where nobody waits for the answers.
    fn send_all(&mut self, work: impl Fn(&DeviceSlot) + Clone + Send + 'static) {
        drop(self.ask_all(move |slot, _answer| work(slot)));
    }

    fn set_counters_here(&mut self, counters: &Arc<Counters>) {
        let here = self.slots.iter_mut().find(|other| other.slot.home().is_here());
        if let Some(other) = here {
            other.counters = Arc::clone(counters);
        }
    }
}
