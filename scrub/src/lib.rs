//! A background scrub: decides when to check which blocks of a device, and keeps a record.
//!
//! The caller drives a [`Scrub`]: [`Scrub::step`] returns what to do at a [`Now`], [`Scrub::checked`] takes the result. Nothing here
//! reads a clock or touches a device, so tests run a month in a millisecond.
//!
//! Invariants:
//! - The blocks of a run are checked in order, each once, bad blocks or not.
//! - A run never exceeds its rate by more than one piece and [`SLACK`] of it.
//! - A device that is always busy still gets one piece every [`MAX_WAIT`].
//! - A saved record never runs ahead of the checks: after a crash, blocks are checked again and never skipped.

mod damage;
mod machine;
mod record;

use std::num::NonZeroU64;
use std::time::Duration;

use sealblock_units::BlockSize;

pub use machine::{
    Activity, CommandError, MAX_WAIT, PIECE_BYTES, PIECE_TIME, PROBE_INTERVAL, Pace, QUIET, SAVE_EVERY, SLACK, Scrub,
    ScrubEvent, ScrubState, ScrubStep, ScrubView,
};
pub use record::{
    CheckResult, FormatError, MAX_BYTES, MAX_RUNS, RunCounts, RunPhase, RunResult, SavedState, ScrubRecord, ScrubRun,
    VERSION,
};

/// A point in time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Now {
    /// Time since a fixed moment; never goes back.
    pub steady: Duration,
    /// Seconds since 1970-01-01 00:00 UTC by the system's clock; may jump.
    pub unix_s: u64,
}

/// The settings of a scrub.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Settings {
    /// Time from the end of a run to the next one by schedule; `None` for no schedule.
    pub every: Option<Duration>,
    /// Maximum rate, in bytes per second.
    pub rate: Option<NonZeroU64>,
    /// True if the scrub waits while other requests use the device.
    pub pause_when_busy: bool,
}

impl Default for Settings {
    /// No schedule, no rate limit, and other requests first.
    fn default() -> Settings {
        Settings { every: None, rate: None, pause_when_busy: true }
    }
}

/// The device, as far as a scrub needs to know it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceProfile {
    /// Bytes of data in a block.
    pub block_size: BlockSize,
    /// Number of blocks.
    pub capacity_blocks: u64,
    /// Maximum blocks of one request.
    pub max_blocks: u32,
    /// Identity of the volume or mirror; `None` if it has none.
    pub uuid: Option<[u8; 16]>,
}

#[cfg(test)]
mod tests;
