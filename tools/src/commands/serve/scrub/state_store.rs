//! Where a scrub's state is kept: in the annex of its device, which has to be writable for that.

use std::cell::RefCell;

use sealblock_block::{Abilities, Ability, Request, RequestKind, ReservedArea, Response};
use sealblock_runtime_memory::Slice;
use sealblock_scrub::FormatError;

use super::ScrubTask;
use crate::target::TargetName;

/// Whether a state is kept on the device, and why not.
pub(super) struct StateStore {
    why_not: RefCell<Option<String>>,
    /// Whether a failure to write was told.
    warned: std::cell::Cell<bool>,
}

impl StateStore {
    /// What a device with these abilities can keep.
    pub(super) fn of(target: &TargetName, abilities: &Abilities) -> StateStore {
        let can = |kind| abilities.of(kind) == Ability::Native;
        let why_not = match (can(RequestKind::ReadReserved), can(RequestKind::WriteReserved)) {
            // Its server has a scrub of its own, which keeps its state there.
            (true, _) if abilities.offloads => Some("the device is another host's".to_owned()),
            (true, true) if is_forgetful(target) => Some("what is in memory ends with the server".to_owned()),
            (true, true) => None,
            (true, false) => Some("the device takes no changes".to_owned()),
            (false, _) => Some("the device has no room beside its blocks".to_owned()),
        };
        StateStore { why_not: RefCell::new(why_not), warned: std::cell::Cell::new(false) }
    }

    /// Why nothing is kept on the device; nothing when it is.
    pub(super) fn why_not(&self) -> Option<String> {
        self.why_not.borrow().clone()
    }

    fn give_up(&self, why: String) {
        self.why_not.replace(Some(why));
    }
}

/// Whether nothing of a target outlives the server.
fn is_forgetful(target: &TargetName) -> bool {
    match target {
        TargetName::Memory(_) | TargetName::Null(_) => true,
        TargetName::Group { members: legs, .. } => legs.iter().all(is_forgetful),
        TargetName::Offset { target, .. } | TargetName::Fault { target, .. } => is_forgetful(target),
        TargetName::File(_)
        | TargetName::Raw(_)
        | TargetName::Linux(_)
        | TargetName::NvmeTcp { .. }
        | TargetName::Nbd { .. } => false,
    }
}

impl ScrubTask {
    /// Goes on from what is kept. What is damaged is begun anew, what a later version wrote is left as it is.
    pub(super) async fn remember(&self) {
        if self.memory.why_not().is_some() {
            return;
        }
        let bytes = match self.ask(Request::ReadReserved { slot: ReservedArea::ScrubState }).await {
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

    /// Keeps a state, where that can be.
    pub(super) async fn save(&self, bytes: Vec<u8>) {
        if self.memory.why_not().is_some() {
            return;
        }
        let operation = Request::WriteReserved { slot: ReservedArea::ScrubState, bytes: Slice::copy_from(&bytes) };
        match self.ask(operation).await {
            Ok(_) => self.memory.warned.set(false),
            Err(error) => {
                self.scrub.borrow_mut().not_saved();
                // It comes again every few seconds, and a warning once does.
                if !self.memory.warned.replace(true) {
                    tracing::warn!("scrub of {}: its state is not kept: {error}", self.target);
                }
            }
        }
    }
}
