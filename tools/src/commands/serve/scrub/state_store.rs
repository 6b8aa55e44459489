//! Stores a scrub's state in the reserved area of its device, which has to be writable for that.

use std::cell::RefCell;

use sealblock_block::{Abilities, Ability, Request, RequestKind, ReservedArea, Response};
use sealblock_runtime_memory::Slice;
use sealblock_scrub::FormatError;
use sealblock_stack::target::TargetName;

use super::ScrubTask;

/// Says if the state is saved on the device, or why not.
pub(super) struct StateStore {
    why_not: RefCell<Option<String>>,
    /// True if a failure to write was logged.
    warned: std::cell::Cell<bool>,
}

impl StateStore {
    /// The store of a device with these abilities.
    pub(super) fn of(target: &TargetName, abilities: &Abilities) -> StateStore {
        let can = |kind| abilities.of(kind) == Ability::Native;
        let why_not = match (can(RequestKind::ReadReserved), can(RequestKind::WriteReserved)) {
            // The server of a remote device has a scrub of its own, which saves its state there.
            (true, _) if abilities.offloads => Some("the device is another host's".to_owned()),
            (true, true) if is_forgetful(target) => Some("what is in memory ends with the server".to_owned()),
            (true, true) => None,
            (true, false) => Some("the device takes no changes".to_owned()),
            (false, _) => Some("the device has no room beside its blocks".to_owned()),
        };
        StateStore { why_not: RefCell::new(why_not), warned: std::cell::Cell::new(false) }
    }

    /// Why the state is in memory only; `None` if it is saved on the device.
    pub(super) fn why_not(&self) -> Option<String> {
        self.why_not.borrow().clone()
    }

    fn give_up(&self, why: String) {
        self.why_not.replace(Some(why));
    }
}

/// True if no part of the target outlives the server.
fn is_forgetful(target: &TargetName) -> bool {
    match target {
        TargetName::Memory(_) | TargetName::Null(_) => true,
        TargetName::Group { members: replicas, .. } => replicas.iter().all(is_forgetful),
        TargetName::Offset { target, .. } | TargetName::Fault { target, .. } => is_forgetful(target),
        TargetName::File(_)
        | TargetName::Raw(_)
        | TargetName::Linux(_)
        | TargetName::NvmeTcp { .. }
        | TargetName::Nbd { .. } => false,
    }
}

impl ScrubTask {
    /// Loads the saved state. A damaged one is replaced; one of a later version is left as it is.
    pub(super) async fn remember(&self) {
        if self.memory.why_not().is_some() {
            return;
        }
        let bytes = match self.ask(Request::read_reserved(ReservedArea::ScrubState)).await {
            Ok(Response::Reserved(bytes)) => bytes,
            Ok(_) => Slice::empty(),
            Err(error) => {
                tracing::warn!("scrub of {}: what is kept of it cannot be read: {error}", self.target);
                return self.memory.give_up(format!("what is there cannot be read: {error}"));
            }
        };
        if bytes.is_empty() {
            return;
        }
        let restored = self.scrub.borrow_mut().restore(&bytes);
        match restored {
            Ok(()) => {}
            Err(error @ FormatError::Version(_)) => {
                tracing::warn!("scrub of {}: what is kept of it is left alone: {error}", self.target);
                self.memory.give_up(format!("what is there was written by a later version: {error}"));
            }
            Err(error) => tracing::warn!("scrub of {}: what is kept of it is begun anew: {error}", self.target),
        }
    }

    /// Saves a state, if the device has a reserved area.
    pub(super) async fn save(&self, bytes: Vec<u8>) {
        if self.memory.why_not().is_some() {
            return;
        }
        let operation = Request::write_reserved(ReservedArea::ScrubState, Slice::copy_from(&bytes));
        match self.ask(operation).await {
            Ok(_) => self.memory.warned.set(false),
            Err(error) => {
                self.scrub.borrow_mut().save_failed();
                // The failure repeats every few seconds; one warning is enough.
                if !self.memory.warned.replace(true) {
                    tracing::warn!("scrub of {}: its state is not kept: {error}", self.target);
                }
            }
        }
    }
}
