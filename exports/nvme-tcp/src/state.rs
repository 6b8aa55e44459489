//! What is shared of a namespace by all controllers and cores: its bad blocks, and who is told.
//!
//! It belongs to the device: namespaces of one device share it, whatever they are called and however they show it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use sealblock_block::{BadBlock, Geometry, Outcome};
use sealblock_units::Extent;

use crate::async_events::AsyncEvents;
use crate::damage::DamageHandle;
use crate::damage_list::{DamageList, RequestSummary};

/// The shared state of all [`crate::Namespace`]s of one device, for those who learn something about it by other ways than
/// their commands.
#[derive(Default)]
pub struct NamespaceState {
    pub(crate) damage_list: Arc<DamageList>,
    is_degraded: AtomicBool,
    subscribers: Mutex<Vec<(u32, Weak<AsyncEvents>)>>,
}

impl NamespaceState {
    /// The blocks of the device that are known to be bad, as a handle that keeps nothing else alive.
    pub fn damage(&self) -> DamageHandle {
        DamageHandle::of(&self.damage_list)
    }

    /// Adds blocks that were found damaged, for example by a scrub, to those that hosts can ask for.
    pub fn report_damage(&self, bad_blocks: &[BadBlock]) {
        if self.damage_list.record(bad_blocks) {
            self.notify(|_, events| events.damage_found());
        }
    }

    /// Takes in what a check of all copies of an extent has found, of a device of this shape: blocks that it has not found bad are
    /// so no more. The faults are in the order of their blocks.
    pub fn report_check(&self, geometry: &Geometry, extent: Extent, bad_blocks: &[BadBlock], is_complete: bool) {
        let (summary, _) = RequestSummary::of_check(extent, geometry);
        if self.damage_list.record_check(extent, &summary, bad_blocks) {
            self.notify(|_, events| events.damage_found());
        }
        if is_complete {
            self.damage_list.mark_checked(extent, &summary);
        }
    }

    /// Says whether copies of the device are away or out of sync. Hosts see it in SMART / Health Information.
    pub fn report_degraded(&self, is_degraded: bool) {
        let was = self.is_degraded.swap(is_degraded, Ordering::Relaxed);
        if is_degraded && !was {
            self.notify(|_, events| events.reliability_degraded());
        }
    }

    /// Whether copies of the device are away or out of sync.
    pub(crate) fn is_degraded(&self) -> bool {
        self.is_degraded.load(Ordering::Relaxed)
    }

    /// Takes in that the device has so many blocks now: damage beyond its end is known no more. Hosts are told of the new size by
    /// [`crate::Target::resize_namespace`].
    pub fn report_resized(&self, capacity_blocks: u64) {
        self.damage_list.resize(capacity_blocks);
    }

    /// Tells hosts that something changed that Identify says of the namespace.
    pub fn report_changed(&self) {
        self.notify(|nsid, events| events.namespace_changed(nsid));
    }

    /// Learns from the end of an operation on the namespace's device.
    pub(crate) fn record(&self, summary: &RequestSummary, outcome: &Outcome) {
        if self.damage_list.update(summary, outcome) {
            self.notify(|_, events| events.damage_found());
        }
    }

    /// Tells a controller, to whom the namespace is `nsid`, what happens from now on.
    pub(crate) fn subscribe(&self, nsid: u32, events: &Arc<AsyncEvents>) {
        let mut watchers = self.subscribers.lock().unwrap_or_else(PoisonError::into_inner);
        // The same controller asks again when namespaces have changed.
        watchers.retain(|(id, other)| other.strong_count() > 0 && !(*id == nsid && is_of(other, events)));
        watchers.push((nsid, Arc::downgrade(events)));
    }

    /// Tells a controller, to whom the namespace was `nsid`, nothing more under this number.
    pub(crate) fn unsubscribe(&self, nsid: u32, events: &Arc<AsyncEvents>) {
        let mut watchers = self.subscribers.lock().unwrap_or_else(PoisonError::into_inner);
        watchers.retain(|(id, other)| other.strong_count() > 0 && !(*id == nsid && is_of(other, events)));
    }

    fn notify(&self, report: impl Fn(u32, &AsyncEvents)) {
        let watchers = self.subscribers.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for (nsid, events) in watchers.iter().filter_map(|(nsid, events)| Some((*nsid, events.upgrade()?))) {
            report(nsid, &events);
        }
    }
}

fn is_of(watcher: &Weak<AsyncEvents>, events: &Arc<AsyncEvents>) -> bool {
    std::ptr::eq(watcher.as_ptr(), Arc::as_ptr(events))
}
