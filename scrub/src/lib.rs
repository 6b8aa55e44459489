//! A background scrub: when which blocks of a device are checked, and what is remembered of it.
//!
//! A [`Scrub`] is driven from outside: [`Scrub::step`] says what to do at a [`Now`], [`Scrub::checked`] is told what came of it.
//! Nothing here reads a clock or touches a device, so tests run a month in a millisecond.
//!
//! Invariants:
//! - The blocks of a run are checked in order, each once, whatever is found on the way.
//! - A run never exceeds its rate by more than one piece and [`pace::SLACK`] of it.
//! - A device that is always busy still gets one piece every [`pace::MOST_WAIT`].
//! - What was saved last is the state of a moment that was: after a crash, blocks are checked again and never skipped.

mod format;
mod machine;
pub mod pace;
mod record;
mod saving;

use std::num::NonZeroU64;
use std::time::Duration;

use sealblock_units::BlockSize;

pub use format::{FormatError, MOST_BYTES, VERSION};
pub use machine::{Refusal, Scrub, ScrubEvent, ScrubView, State, Step};
pub use pace::Activity;
pub use record::{Checked, Counts, MOST_RUNS, Phase, Run, RunResult, ScrubRecord};
pub use saving::SAVE_EVERY;

/// A point in time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Now {
    /// Since some fixed moment; never goes back.
    pub steady: Duration,
    /// Seconds since 1970-01-01 00:00 UTC, as the system has it; may jump.
    pub unix_s: u64,
}

/// What a scrub is told by whoever operates the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Settings {
    /// How long after the end of a run the next one begins by itself; never without.
    pub every: Option<Duration>,
    /// Bytes a second at most.
    pub rate: Option<NonZeroU64>,
    /// Whether it gives way to other requests.
    pub pause_when_busy: bool,
}

impl Default for Settings {
    /// Only when it is started by hand, as fast as the device goes, giving way to others.
    fn default() -> Settings {
        Settings { every: None, rate: None, pause_when_busy: true }
    }
}

/// The device, as far as it matters here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Bytes of data in a block.
    pub block_size: BlockSize,
    /// Number of blocks.
    pub capacity_blocks: u64,
    /// Blocks that one request checks at most.
    pub most_blocks: u32,
}

#[cfg(test)]
mod tests;
