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
    pub(crate) known: Arc<DamageList>,
    degraded: AtomicBool,
    watchers: Mutex<Vec<(u32, Weak<AsyncEvents>)>>,
}

impl NamespaceState {
    /// The blocks of the device that are known to be bad, as a handle that keeps nothing else alive.
    pub fn damage(&self) -> DamageHandle {
        DamageHandle::of(&self.known)
    }

    /// Adds blocks that were found damaged, for example by a scrub, to those that hosts can ask for.
    pub fn report_damage(&self, faults: &[BadBlock]) {
        if self.known.record(faults) {
            self.tell(|_, notices| notices.damage_found());
        }
    }

    /// Takes in what a check of all copies of an extent has found, of a device of this shape: blocks that it has not found bad are
    /// so no more. The faults are in the order of their blocks.
    pub fn report_check(&self, geometry: &Geometry, extent: Extent, faults: &[BadBlock], is_complete: bool) {
        let (about, _) = RequestSummary::of_check(extent, geometry);
        if self.known.checked(extent, &about, faults) {
            self.tell(|_, notices| notices.damage_found());
        }
        if is_complete {
            self.known.scanned(extent, &about);
        }
    }

    /// Says whether copies of the device are away or out of sync. Hosts see it in SMART / Health Information.
    pub fn report_degraded(&self, is_degraded: bool) {
        let was = self.degraded.swap(is_degraded, Ordering::Relaxed);
        if is_degraded && !was {
            self.tell(|_, notices| notices.reliability_degraded());
        }
    }

    /// Whether copies of the device are away or out of sync.
    pub(crate) fn is_degraded(&self) -> bool {
        self.degraded.load(Ordering::Relaxed)
    }

    /// Takes in that the device has so many blocks now: damage beyond its end is known no more. Hosts are told of the new size by
    /// [`crate::Target::resize_namespace`].
    pub fn report_resized(&self, capacity_blocks: u64) {
        self.known.resize(capacity_blocks);
    }

    /// Tells hosts that something changed that Identify says of the namespace.
    pub fn report_changed(&self) {
        self.tell(|nsid, notices| notices.namespace_changed(nsid));
    }

    /// Learns from the end of an operation on the namespace's device.
    pub(crate) fn learn(&self, about: &RequestSummary, outcome: &Outcome) {
        if self.known.update(about, outcome) {
            self.tell(|_, notices| notices.damage_found());
        }
    }

    /// Tells a controller, to whom the namespace is `nsid`, what happens from now on.
    pub(crate) fn watch(&self, nsid: u32, notices: &Arc<AsyncEvents>) {
        let mut watchers = self.watchers.lock().unwrap_or_else(PoisonError::into_inner);
        // The same controller asks again when namespaces have changed.
        watchers.retain(|(id, other)| other.strong_count() > 0 && !(*id == nsid && is_of(other, notices)));
        watchers.push((nsid, Arc::downgrade(notices)));
    }

    /// Tells a controller, to whom the namespace was `nsid`, nothing more under this number.
    pub(crate) fn unwatch(&self, nsid: u32, notices: &Arc<AsyncEvents>) {
        let mut watchers = self.watchers.lock().unwrap_or_else(PoisonError::into_inner);
        watchers.retain(|(id, other)| other.strong_count() > 0 && !(*id == nsid && is_of(other, notices)));
    }

    fn tell(&self, tell: impl Fn(u32, &AsyncEvents)) {
        let watchers = self.watchers.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for (nsid, notices) in watchers.iter().filter_map(|(nsid, notices)| Some((*nsid, notices.upgrade()?))) {
            tell(nsid, &notices);
        }
    }
}

fn is_of(watcher: &Weak<AsyncEvents>, notices: &Arc<AsyncEvents>) -> bool {
    std::ptr::eq(watcher.as_ptr(), Arc::as_ptr(notices))
}
