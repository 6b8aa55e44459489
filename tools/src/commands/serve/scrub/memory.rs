//! Where a scrub's state is kept: in the annex of its device, which has to be writable for that.

use std::cell::RefCell;

use sealblock_block::{Abilities, Ability, AnnexSlot, Answer, Operation, OperationKind};
use sealblock_runtime_memory::Slice;
use sealblock_scrub::FormatError;

use super::Keeper;
use crate::target::Target;

/// Whether a state is kept on the device, and why not.
pub(super) struct Memory {
    why_not: RefCell<Option<String>>,
    /// Whether a failure to write was told.
    warned: std::cell::Cell<bool>,
}

impl Memory {
    /// What a device with these abilities can keep.
    pub(super) fn of(target: &Target, abilities: &Abilities) -> Memory {
        let can = |kind| abilities.of(kind) == Ability::Native;
        let why_not = match (can(OperationKind::ReadAnnex), can(OperationKind::WriteAnnex)) {
            // Its server has a scrub of its own, which keeps its state there.
            (true, _) if abilities.offloads => Some("the device is another host's".to_owned()),
            (true, true) if is_forgetful(target) => Some("what is in memory ends with the server".to_owned()),
            (true, true) => None,
            (true, false) => Some("the device takes no changes".to_owned()),
            (false, _) => Some("the device has no room beside its blocks".to_owned()),
        };
        Memory { why_not: RefCell::new(why_not), warned: std::cell::Cell::new(false) }
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
fn is_forgetful(target: &Target) -> bool {
    match target {
        Target::Memory(_) | Target::Null(_) => true,
        Target::Group { legs, .. } => legs.iter().all(is_forgetful),
        Target::Offset { target, .. } | Target::Fault { target, .. } => is_forgetful(target),
        Target::File(_) | Target::Raw(_) | Target::Linux(_) | Target::NvmeTcp { .. } | Target::Nbd { .. } => false,
    }
}

impl Keeper {
    /// Goes on from what is kept. What is damaged is begun anew, what a later version wrote is left as it is.
    pub(super) async fn remember(&self) {
        if self.memory.why_not().is_some() {
            return;
        }
        let bytes = match self.ask(Operation::ReadAnnex { slot: AnnexSlot::Scrub }).await {
            Ok(Answer::Annex(bytes)) => bytes,
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
        let operation = Operation::WriteAnnex { slot: AnnexSlot::Scrub, bytes: Slice::copy_from(&bytes) };
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
