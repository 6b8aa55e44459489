//! What is remembered of a scrub, also over a restart.

use std::num::NonZeroU64;

/// Runs that are remembered.
pub const MOST_RUNS: usize = 16;

/// What a run has met.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    /// Blocks that were checked, bad ones included.
    pub blocks: u64,
    /// Blocks that were bad.
    pub bad_blocks: u64,
    /// Of these, blocks that were written anew from another copy.
    pub repaired: u64,
    /// Of these, blocks that were not: there is no good copy, or it could not be written.
    pub unrepaired: u64,
    /// Blocks of which a copy was not checked: its member was away or out of sync, or failed without naming blocks.
    pub unchecked: u64,
}

/// What a check of a piece has met.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Checked {
    /// Blocks that were bad.
    pub bad_blocks: u64,
    /// Of these, blocks that were written anew from another copy.
    pub repaired: u64,
    /// Blocks of which a copy was not checked.
    pub unchecked: u64,
}

impl Counts {
    /// Adds a piece.
    pub(crate) fn add(&mut self, blocks: u64, found: Checked) {
        let bad = found.bad_blocks.min(blocks);
        let repaired = found.repaired.min(bad);
        self.unchecked += found.unchecked.min(blocks);
        self.blocks += blocks;
        self.bad_blocks += bad;
        self.repaired += repaired;
        self.unrepaired += bad - repaired;
    }

    /// Whether such counts can be.
    pub(crate) fn is_sound(&self) -> bool {
        self.bad_blocks <= self.blocks
            && self.unchecked <= self.blocks
            && self.repaired.checked_add(self.unrepaired) == Some(self.bad_blocks)
    }
}

/// How a run ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RunResult {
    /// It came to the last block.
    Finished,
    /// It was ended by hand.
    Stopped,
}

/// A run that has ended. Times are seconds since 1970.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    /// When it was started.
    pub started_unix_s: u64,
    /// When it ended.
    pub ended_unix_s: u64,
    /// Its first block.
    pub from: u64,
    /// What it met.
    pub counts: Counts,
    /// How it ended.
    pub ended: RunResult,
}

/// Whether a run is under way.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Phase {
    /// None is.
    #[default]
    Idle,
    /// One is.
    Running,
    /// One is held by hand.
    Paused,
}

/// Everything that is remembered. Times are seconds since 1970.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ScrubRecord {
    /// Whether a run is under way.
    pub phase: Phase,
    /// The next block of the run under way; 0 without one.
    pub position: u64,
    /// The first block of the run under way; 0 without one.
    pub from: u64,
    /// When the run under way was started; 0 without one.
    pub started_unix_s: u64,
    /// What the run under way has met; nothing without one.
    pub counts: Counts,
    /// Bytes a second that the run under way was started with.
    pub rate: Option<NonZeroU64>,
    /// When a run over all blocks was finished last.
    pub completed_unix_s: Option<u64>,
    /// What the schedule counts from: when a run over all blocks was finished, or any was stopped by hand.
    pub schedule_from_unix_s: Option<u64>,
    /// The last runs, oldest first; at most [`MOST_RUNS`].
    pub runs: Vec<Run>,
}

impl ScrubRecord {
    /// A run begins.
    pub(crate) fn begin(&mut self, now_unix_s: u64, from: u64, rate: Option<NonZeroU64>) {
        self.phase = Phase::Running;
        (self.position, self.from) = (from, from);
        (self.started_unix_s, self.counts, self.rate) = (now_unix_s, Counts::default(), rate);
    }

    /// The device has so many blocks now. A run goes on where it was; one that was past the new end begins anew, since what it has
    /// counted is of blocks that are no more.
    pub(crate) fn fit(&mut self, capacity_blocks: u64) {
        if self.phase != Phase::Idle && self.position >= capacity_blocks {
            (self.position, self.from, self.counts) = (0, 0, Counts::default());
        }
    }

    /// The run under way ends.
    pub(crate) fn end(&mut self, now_unix_s: u64, ended: RunResult) -> Run {
        let (started_unix_s, from, counts) = (self.started_unix_s, self.from, self.counts);
        let run = Run { started_unix_s, ended_unix_s: now_unix_s, from, counts, ended };
        if self.runs.len() == MOST_RUNS {
            self.runs.remove(0);
        }
        self.runs.push(run);
        let is_complete = ended == RunResult::Finished && from == 0;
        if is_complete {
            self.completed_unix_s = Some(now_unix_s);
        }
        if is_complete || ended == RunResult::Stopped {
            self.schedule_from_unix_s = Some(now_unix_s);
        }
        self.phase = Phase::Idle;
        (self.position, self.from, self.started_unix_s) = (0, 0, 0);
        (self.counts, self.rate) = (Counts::default(), None);
        run
    }
}
