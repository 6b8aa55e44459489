//! What is shared of a namespace by all controllers and cores: its bad blocks, the claims on blocks, and who is told.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use sealblock_block::{Fault, Outcome};
use sealblock_units::Extent;

use crate::claims::{Blocks, Claim, Claims};
use crate::known::{About, KnownBlocks};
use crate::notices::Notices;

/// The shared state of one [`crate::Namespace`], for those who learn something about it by other ways than its commands.
#[derive(Default)]
pub struct NamespaceState {
    pub(crate) known: KnownBlocks,
    claims: Claims,
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

    /// Waits until the blocks may be written, among other writes.
    pub(crate) async fn claim(&self, blocks: Blocks) -> Claim<'_> {
        self.claims.write(blocks).await
    }

    /// Waits until nobody else writes the blocks.
    pub(crate) async fn claim_alone(&self, blocks: Blocks) -> Claim<'_> {
        self.claims.exclusive(blocks).await
    }

    /// Tells a controller, to whom the namespace is `nsid`, what happens from now on.
    pub(crate) fn watch(&self, nsid: u32, notices: &Arc<Notices>) {
        let mut watchers = self.watchers.lock().unwrap_or_else(PoisonError::into_inner);
        // The same controller asks again when namespaces have changed.
        watchers.retain(|(_, other)| other.strong_count() > 0 && !std::ptr::eq(other.as_ptr(), Arc::as_ptr(notices)));
        watchers.push((nsid, Arc::downgrade(notices)));
    }

    fn tell(&self, tell: impl Fn(u32, &Notices)) {
        let watchers = self.watchers.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for (nsid, notices) in watchers.iter().filter_map(|(nsid, notices)| Some((*nsid, notices.upgrade()?))) {
            tell(nsid, &notices);
        }
    }
}
