//! What the requester expects of the tags of stored blocks, in addition to the device's own check.
//!
//! A device checks its own integrity on every read: from what it stores with a block it knows whether the block is as
//! it was written. Expectations of a host are checked after that. A block with another application tag than expected is
//! intact, and the result is [`crate::ErrorKind::Expectation`], never a bad block. So no expectation can disable the
//! device's own check.
//!
//! Invariant: blocks that are checked here have passed the device's own check.

use sealblock_integrity::{Checks, PiFormat};

/// What the requester expects of tags. The default expects nothing.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Expectations(Checks);

impl Expectations {
    /// No expectations.
    pub const NONE: Expectations = Expectations(Checks::NONE);

    /// Expectations that correspond to these checks of tuples. With a guard check, a block fails whose host wrote a
    /// wrong guard unchecked; any other wrong guard makes a bad block anyway.
    pub const fn new(checks: Checks) -> Expectations {
        Expectations(checks)
    }

    /// The checks of tuples that decide whether the expectations are met.
    pub const fn checks(&self) -> &Checks {
        &self.0
    }

    /// True if there are no expectations.
    pub fn is_none(&self) -> bool {
        *self == Expectations::NONE
    }

    /// The checks for a single pass: a device's own checks, and the expectations. `None` if they contradict each other;
    /// then no good block is as expected.
    pub fn joined(&self, own: &Checks) -> Option<Checks> {
        let initial_ref_tag = match (self.0.initial_ref_tag, own.initial_ref_tag) {
            (Some(expected), Some(own)) if expected != own => return None,
            (expected, own) => expected.or(own),
        };
        Some(Checks { guard: self.0.guard || own.guard, initial_ref_tag, ..self.0 })
    }

    /// The expectations that remain after blocks have passed these checks.
    #[must_use]
    pub fn beyond(&self, passed: &Checks) -> Expectations {
        let Checks { guard, app_tag, storage_tag, initial_ref_tag, checks_escapes } = self.0;
        if checks_escapes && !passed.checks_escapes {
            // Blocks may have passed because nothing of them was checked.
            return *self;
        }
        Expectations(Checks {
            guard: guard && !passed.guard,
            app_tag: app_tag.filter(|_| app_tag != passed.app_tag),
            storage_tag: storage_tag.filter(|_| storage_tag != passed.storage_tag),
            initial_ref_tag: initial_ref_tag.filter(|_| initial_ref_tag != passed.initial_ref_tag),
            checks_escapes: false,
        })
    }

    /// The same expectations for the run that starts `blocks` blocks later; modulo 2^64, so also for one that starts
    /// earlier.
    #[must_use]
    pub fn advance(&self, blocks: u64, format: Option<PiFormat>) -> Expectations {
        Expectations(format.map_or(self.0, |format| self.0.advance(blocks, format)))
    }
}
