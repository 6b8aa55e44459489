//! What is shared of a namespace by all controllers and cores: its bad blocks, and who is told.
//!
//! It belongs to the device: namespaces of one device share it, whatever they are called and however they show it.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use sealblock_block::{Fault, Outcome};
use sealblock_units::Extent;

use crate::known::{About, KnownBlocks};
use crate::notices::Notices;

/// The shared state of all [`crate::Namespace`]s of one device, for those who learn something about it by other ways than
/// their commands.
#[derive(Default)]
pub struct NamespaceState {
    pub(crate) known: KnownBlocks,
    watchers: Mutex<Vec<(u32, Weak<Notices>)>>,
}

impl NamespaceState {
    /// Adds blocks that were found damaged, for example by a scrub, to those that hosts can ask for.
    pub fn report_damage(&self, faults: &[Fault]) {
        if self.known.record(faults) {
            self.tell(|_, notices| notices.damage_found());
        }
    }

    /// Takes out blocks that were repaired.
    pub fn report_repaired(&self, extent: Extent) {
        self.known.forget(extent);
    }

    /// Tells hosts that something changed that Identify says of the namespace.
    pub fn report_changed(&self) {
        self.tell(|nsid, notices| notices.namespace_changed(nsid));
    }

    /// Learns from the end of an operation on the namespace's device.
    pub(crate) fn learn(&self, about: &About, outcome: &Outcome) {
        if self.known.learn(about, outcome) {
            self.tell(|_, notices| notices.damage_found());
        }
    }

    /// Tells a controller, to whom the namespace is `nsid`, what happens from now on.
    pub(crate) fn watch(&self, nsid: u32, notices: &Arc<Notices>) {
        let mut watchers = self.watchers.lock().unwrap_or_else(PoisonError::into_inner);
        // The same controller asks again when namespaces have changed.
        watchers.retain(|(id, other)| other.strong_count() > 0 && !(*id == nsid && is_of(other, notices)));
        watchers.push((nsid, Arc::downgrade(notices)));
    }

    /// Tells a controller, to whom the namespace was `nsid`, nothing more under this number.
    pub(crate) fn unwatch(&self, nsid: u32, notices: &Arc<Notices>) {
        let mut watchers = self.watchers.lock().unwrap_or_else(PoisonError::into_inner);
        watchers.retain(|(id, other)| other.strong_count() > 0 && !(*id == nsid && is_of(other, notices)));
    }

    fn tell(&self, tell: impl Fn(u32, &Notices)) {
        let watchers = self.watchers.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for (nsid, notices) in watchers.iter().filter_map(|(nsid, notices)| Some((*nsid, notices.upgrade()?))) {
            tell(nsid, &notices);
        }
    }
}

fn is_of(watcher: &Weak<Notices>, notices: &Arc<Notices>) -> bool {
    std::ptr::eq(watcher.as_ptr(), Arc::as_ptr(notices))
}
