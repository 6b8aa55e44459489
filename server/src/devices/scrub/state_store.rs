//! Saves a scrub's state in the reserved area of its device, which must be writable.

use std::cell::{Cell, RefCell};

use sealblock_block::{Abilities, Ability, Outcome, RequestKind, Response};
use sealblock_runtime_memory::Slice;
use sealblock_scrub::FormatError;
use sealblock_stack::TargetLabel;
use sealblock_stack::target::TargetName;

/// Whether the state is saved on the device, and if not, why.
pub struct StateStore {
    target: TargetLabel,
    why_not: RefCell<Option<String>>,
    /// True if a failure to write has been logged.
    warned: Cell<bool>,
}

impl StateStore {
    /// The store for a device with these abilities.
    pub fn of(target: &TargetLabel, abilities: &Abilities) -> StateStore {
        let can = |kind| abilities.of(kind) == Ability::Native;
        let why_not = match (can(RequestKind::ReadReserved), can(RequestKind::WriteReserved)) {
            // The server of a remote device has its own scrub, which saves its state there.
            (true, _) if abilities.offloads => Some("the device belongs to another host".to_owned()),
            (true, true) if is_forgetful(&target.now()) => {
                Some("data in memory is lost when the server exits".to_owned())
            }
            (true, true) => None,
            (true, false) => Some("the device is read-only".to_owned()),
            (false, _) => Some("the device has no reserved area".to_owned()),
        };
        StateStore { target: target.clone(), why_not: RefCell::new(why_not), warned: Cell::new(false) }
    }

    /// Why the state is in memory only; `None` if it is saved on the device.
    pub fn why_not(&self) -> Option<String> {
        self.why_not.borrow().clone()
    }

    /// Processes the result of reading the saved state, which is passed to `restore`. A damaged state is replaced; a
    /// state of a later version is left unchanged.
    pub fn was_read(&self, read: Outcome, restore: impl FnOnce(&[u8]) -> Result<(), FormatError>) {
        let target = &self.target;
        let bytes = match read {
            Ok(Response::Reserved(bytes)) => bytes,
            Ok(_) => Slice::empty(),
            Err(error) => {
                tracing::warn!("scrub of {target}: the saved state cannot be read: {error}");
                self.why_not.replace(Some(format!("the saved state cannot be read: {error}")));
                return;
            }
        };
        match if bytes.is_empty() { Ok(()) } else { restore(&bytes) } {
            Ok(()) => {}
            Err(error @ FormatError::Version(_)) => {
                tracing::warn!("scrub of {target}: the saved state is kept unchanged: {error}");
                self.why_not.replace(Some(format!("the saved state is of a later version: {error}")));
            }
            Err(error) => tracing::warn!("scrub of {target}: the saved state is replaced: {error}"),
        }
    }

    /// Processes the result of writing a state. Returns true if it is saved.
    pub fn was_written(&self, written: Outcome) -> bool {
        // A failure is repeated every few seconds, so one warning is enough.
        let was_warned = self.warned.replace(written.is_err());
        if let (Err(error), false) = (&written, was_warned) {
            tracing::warn!("scrub of {}: its state is not saved: {error}", self.target);
        }
        written.is_ok()
    }
}

/// True if no part of the target outlives the server.
fn is_forgetful(target: &TargetName) -> bool {
    target.leaves().iter().all(|leaf| matches!(leaf, TargetName::Memory { .. } | TargetName::Null(_)))
}
