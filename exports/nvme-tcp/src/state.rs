//! What all controllers and cores share of a namespace: its bad blocks, and the controllers that report events about
//! them.
//!
//! The state belongs to the device: all namespaces of one device share it, under any identifier and visibility.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use sealblock_block::{BadBlock, Geometry, Outcome};
use sealblock_units::Extent;

use crate::async_events::AsyncEvents;
use crate::damage::DamageHandle;
use crate::damage_list::{DamageList, RequestSummary};

/// The shared state of all [`crate::Namespace`]s of one device. A scrub, a repair or another export reports here what
/// it learns about the device.
#[derive(Default)]
pub struct NamespaceState {
    pub(crate) damage_list: Arc<DamageList>,
    is_degraded: AtomicBool,
    subscribers: Mutex<Vec<(u32, Weak<AsyncEvents>)>>,
}

impl NamespaceState {
    /// The device's known bad blocks, as a handle that keeps nothing else alive.
    pub fn damage(&self) -> DamageHandle {
        DamageHandle::of(&self.damage_list)
    }

    /// Adds blocks that were found bad, for example by a scrub, to the damage list, and reports them to hosts.
    pub fn report_damage(&self, bad_blocks: &[BadBlock]) {
        if self.damage_list.record(bad_blocks) {
            self.notify(|_, events| events.damage_found());
        }
    }

    /// Records the result of a check of all copies of `extent`, on a device with this geometry: removes the blocks that
    /// it found good from the damage list. `bad_blocks` are in the order of their LBAs.
    pub fn report_check(&self, geometry: &Geometry, extent: Extent, bad_blocks: &[BadBlock], is_complete: bool) {
        let (summary, _) = RequestSummary::of_check(extent, geometry);
        if self.damage_list.record_check(extent, &summary, bad_blocks) {
            self.notify(|_, events| events.damage_found());
        }
        if is_complete {
            self.damage_list.mark_checked(extent, &summary);
        }
    }

    /// Sets whether copies of the device are offline or out of sync. Hosts see it in SMART / Health Information.
    pub fn report_degraded(&self, is_degraded: bool) {
        let was = self.is_degraded.swap(is_degraded, Ordering::Relaxed);
        if is_degraded && !was {
            self.notify(|_, events| events.reliability_degraded());
        }
    }

    /// True if copies of the device are offline or out of sync.
    pub(crate) fn is_degraded(&self) -> bool {
        self.is_degraded.load(Ordering::Relaxed)
    }

    /// Drops bad blocks beyond the device's new end. [`crate::Target::resize_namespace`] reports the new size to hosts.
    pub fn report_resized(&self, capacity_blocks: u64) {
        self.damage_list.resize(capacity_blocks);
    }

    /// Reports to hosts that the namespace's Identify data changed.
    pub fn report_changed(&self) {
        self.notify(|nsid, events| events.namespace_changed(nsid));
    }

    /// Updates the damage list with the outcome of a request, and reports new damage to hosts.
    pub(crate) fn record(&self, summary: &RequestSummary, outcome: &Outcome) {
        if self.damage_list.update(summary, outcome) {
            self.notify(|_, events| events.damage_found());
        }
    }

    /// Subscribes a controller, whose identifier for the namespace is `nsid`, to events.
    pub(crate) fn subscribe(&self, nsid: u32, events: &Arc<AsyncEvents>) {
        let mut watchers = self.subscribers.lock().unwrap_or_else(PoisonError::into_inner);
        // The same controller subscribes again when namespaces have changed.
        watchers.retain(|(id, other)| other.strong_count() > 0 && !(*id == nsid && is_of(other, events)));
        watchers.push((nsid, Arc::downgrade(events)));
    }

    /// Cancels the subscription of a controller under this identifier.
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
