//! What the asker of a request expects of the tags of stored blocks, beside the device's own check.
//!
//! A device checks its own integrity on every read: what it stores with a block tells whether the block is as it was written. What a host
//! expects is another question, asked after that one: a block with another application tag than was expected is whole, and its answer
//! is [`crate::ErrorKind::Expectation`], never a bad block. So nothing here can turn the device's own check off.
//!
//! Invariant: blocks that are checked here have passed the device's own check.

use sealblock_integrity::{Checks, PiFormat};

/// What the asker expects of tags. The default expects nothing.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Expectations(Checks);

impl Expectations {
    /// Nothing.
    pub const NONE: Expectations = Expectations(Checks::NONE);

    /// What these checks of tuples look at. A guard that is among them tells a guard that its host wrote wrong, unchecked: any other wrong
    /// guard is a bad block without being asked for.
    pub const fn new(checks: Checks) -> Expectations {
        Expectations(checks)
    }

    /// The checks of tuples that tell whether the expectations are met.
    pub const fn checks(&self) -> &Checks {
        &self.0
    }

    /// True if nothing is expected.
    pub fn is_none(&self) -> bool {
        *self == Expectations::NONE
    }

    /// The checks of one pass that looks at everything: a device's own checks, and the expectations. `None` if they contradict each other,
    /// and then blocks are as expected in no pass that finds them good.
    pub fn joined(&self, own: &Checks) -> Option<Checks> {
        let initial_ref_tag = match (self.0.initial_ref_tag, own.initial_ref_tag) {
            (Some(expected), Some(own)) if expected != own => return None,
            (expected, own) => expected.or(own),
        };
        Some(Checks { guard: self.0.guard || own.guard, initial_ref_tag, ..self.0 })
    }

    /// What is expected besides what these checks look at, which blocks have passed.
    #[must_use]
    pub fn beyond(&self, passed: &Checks) -> Expectations {
        let Checks { guard, app_tag, storage_tag, initial_ref_tag } = self.0;
        Expectations(Checks {
            guard: guard && !passed.guard,
            app_tag: app_tag.filter(|_| app_tag != passed.app_tag),
            storage_tag: storage_tag.filter(|_| storage_tag != passed.storage_tag),
            initial_ref_tag: initial_ref_tag.filter(|_| initial_ref_tag != passed.initial_ref_tag),
        })
    }

    /// The same expectations of the run that starts `blocks` blocks later; modulo 2^64, so also of one that starts earlier.
    #[must_use]
    pub fn advance(&self, blocks: u64, format: Option<PiFormat>) -> Expectations {
        Expectations(format.map_or(self.0, |format| self.0.advance(blocks, format)))
    }
}
