//! The state of a scrub, as `scrub status --json` prints it and a server sends it.

use std::num::NonZeroU64;
use std::time::Duration;

use sealblock_block::{Device, WhyOlder};
use sealblock_scrub::{RunCounts, RunPhase, RunResult, ScrubRecord, ScrubRun, ScrubState, ScrubView};
use serde::{Deserialize, Serialize};

use super::damage::DamageStatus;
use super::health::{Checked, Health};

/// The state of a target's scrub. `docs/formats/json.md` defines it. Times are seconds since 1970.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ScrubStatus {
    /// The target, by the server's name for it, or by the name in the command.
    pub target: String,
    /// The process that serves it; `None` if none does.
    pub server_pid: Option<u32>,
    /// What the scrub is doing.
    pub state: StateWord,
    /// True if it yields to other requests.
    pub yielding: bool,
    /// The next block to be checked.
    pub position: u64,
    /// Blocks of the target.
    pub blocks: u64,
    /// Bytes in a block.
    pub block_size: usize,
    /// The progress of the run, from 0 to 100.
    pub percent: f64,
    /// The limit in bytes per second.
    pub rate: Option<NonZeroU64>,
    /// The average bytes per second of the run so far.
    pub speed: Option<u64>,
    /// The remaining seconds at that speed.
    pub left_s: Option<u64>,
    /// Seconds between runs.
    pub every_s: Option<u64>,
    /// When the next scheduled scrub starts.
    pub next_unix_s: Option<u64>,
    /// When the last scrub of all blocks was finished; `None` if the target has grown since.
    pub completed_unix_s: Option<u64>,
    /// What its blocks are checked against.
    pub checked: Checked,
    /// The run in progress.
    pub run: Option<RunStatus>,
    /// The last runs, the oldest first.
    pub runs: Vec<RunStatus>,
    /// Where the state is saved.
    pub saved: SavedWord,
    /// Why it is saved only in memory.
    pub saved_why: Option<String>,
    /// Why the scrub is suspended.
    pub error: Option<String>,
    /// Why blocks may be older than what was written, if they may. Seals do not show it. An older server does not report it.
    #[serde(default)]
    pub may_be_older: Option<String>,
    /// Blocks known to be bad now, whether a scrub or a client found them.
    #[serde(default)]
    pub damage: Option<DamageStatus>,
}

/// What a scrub is doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StateWord {
    /// Nothing.
    Idle,
    /// It checks blocks.
    Running,
    /// It was paused by a command.
    Paused,
    /// It waits for its schedule.
    Waiting,
    /// It has an unfinished run, which continues when the target is served.
    Interrupted,
}

/// Where the state is saved.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SavedWord {
    /// In the reserved area of the device.
    OnDisk,
    /// In the server, until it ends.
    InMemory,
}

/// A run.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RunStatus {
    /// When it was started.
    pub started_unix_s: u64,
    /// When it ended.
    pub ended_unix_s: Option<u64>,
    /// Its first block.
    pub from: u64,
    /// Blocks that were checked.
    pub blocks: u64,
    /// Blocks that were bad.
    pub bad: u64,
    /// Of these, those that were repaired from another copy.
    pub repaired: u64,
    /// Of these, those that were not.
    pub unrepaired: u64,
    /// Blocks of which a copy was not checked, because its member was offline or out of sync, or failed without
    /// reporting which blocks.
    pub unchecked: u64,
    /// How it ended.
    pub result: Option<ResultWord>,
}

/// How a run ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ResultWord {
    /// At the last block, with every copy of every block checked.
    Finished,
    /// At the last block, but not everything could be checked.
    Incomplete,
    /// By a command.
    Stopped,
}

impl ScrubStatus {
    /// The state of a target that is not served, from its saved record.
    pub fn saved(target: String, device: &impl Device, record: &ScrubRecord) -> ScrubStatus {
        let geometry = device.geometry();
        let state = match record.phase {
            RunPhase::Idle => StateWord::Idle,
            RunPhase::Running => StateWord::Interrupted,
            RunPhase::Paused => StateWord::Paused,
        };
        let blocks = geometry.capacity_blocks;
        ScrubStatus {
            target,
            server_pid: None,
            state,
            yielding: false,
            position: record.position,
            blocks,
            block_size: geometry.block_size.bytes(),
            percent: if blocks == 0 { 0.0 } else { record.position as f64 * 100.0 / blocks as f64 },
            rate: record.rate,
            speed: None,
            left_s: None,
            every_s: None,
            next_unix_s: None,
            completed_unix_s: record.completed_unix_s,
            checked: Checked::of(device.abilities().seals),
            run: (record.phase != RunPhase::Idle).then(|| RunStatus::in_progress(record)),
            runs: record.runs.iter().map(RunStatus::ended).collect(),
            saved: SavedWord::OnDisk,
            saved_why: None,
            error: None,
            damage: None,
            may_be_older: device.abilities().freshness.why_older().map(|why| why.as_str().to_owned()),
        }
    }

    /// The state of a target that this process serves.
    pub fn served(target: String, device: &impl Device, view: &ScrubView, every: Option<Duration>) -> ScrubStatus {
        let state = match view.state {
            ScrubState::Idle => StateWord::Idle,
            ScrubState::Running => StateWord::Running,
            ScrubState::Paused => StateWord::Paused,
            ScrubState::Waiting => StateWord::Waiting,
        };
        ScrubStatus {
            server_pid: Some(std::process::id()),
            state,
            yielding: view.is_yielding,
            rate: view.rate,
            speed: view.speed.map(|speed| speed as u64),
            left_s: view.left_s,
            every_s: every.map(|every| every.as_secs()),
            next_unix_s: view.next_unix_s,
            ..ScrubStatus::saved(target, device, &view.record)
        }
    }

    /// The run in progress, or otherwise the last one.
    pub fn last_run(&self) -> Option<&RunStatus> {
        self.run.as_ref().or(self.runs.last())
    }

    /// Why blocks may be older than what was written, if they may.
    pub fn why_older(&self) -> Option<WhyOlder> {
        self.may_be_older.as_deref().map(WhyOlder::named)
    }

    /// The health from the known bad blocks, from what the last run could not check, and from what no run can. If no list is kept, blocks
    /// that the last run could not repair count as bad, because they may be.
    pub fn health(&self) -> Health {
        let is_saved = self.damage.as_ref().is_some_and(|damage| damage.not_saved.is_empty());
        let unrepaired = self.last_run().filter(|_| !is_saved).map_or(0, |run| run.unrepaired);
        let newest = if self.may_be_older.is_some() { Health::Incomplete } else { Health::Healthy };
        let known = self.damage.as_ref().map_or(Health::Healthy, DamageStatus::health).max(newest);
        match self.last_run() {
            _ if unrepaired > 0 => Health::Damaged,
            Some(run) if run.unchecked > 0 => known.max(Health::Incomplete),
            _ => known,
        }
    }
}

impl RunStatus {
    /// A run that has ended.
    pub fn ended(run: &ScrubRun) -> RunStatus {
        let result = match run.ended {
            RunResult::Finished if run.counts.unchecked > 0 => ResultWord::Incomplete,
            RunResult::Finished => ResultWord::Finished,
            RunResult::Stopped => ResultWord::Stopped,
        };
        RunStatus {
            ended_unix_s: Some(run.ended_unix_s),
            result: Some(result),
            ..RunStatus::of(run.started_unix_s, run.from, run.counts)
        }
    }

    fn in_progress(record: &ScrubRecord) -> RunStatus {
        RunStatus::of(record.started_unix_s, record.from, record.counts)
    }

    fn of(started_unix_s: u64, from: u64, counts: RunCounts) -> RunStatus {
        let RunCounts { blocks, bad_blocks: bad, repaired, unrepaired, unchecked } = counts;
        RunStatus {
            started_unix_s,
            ended_unix_s: None,
            from,
            blocks,
            bad,
            repaired,
            unrepaired,
            unchecked,
            result: None,
        }
    }
}
