//! The state machine of a scrub: its states, its pace, and when its record is due to be saved.

use std::collections::VecDeque;
use std::num::NonZeroU64;
use std::time::Duration;

use sealblock_units::Extent;

use crate::record::{CheckResult, FormatError, RunPhase, RunResult, SavedState, ScrubRecord, ScrubRun};
use crate::{DeviceProfile, Now, Settings};

/// Time until a device that failed is checked again.
const RETRY_INTERVAL: Duration = Duration::from_secs(30);
/// Maximum wait for the schedule: the time of day may jump.
const MAX_SCHEDULE_WAIT: Duration = Duration::from_secs(600);
/// Minimum time over which a speed is measured.
const MIN_MEASURED: Duration = Duration::from_secs(1);

/// The next step of the caller.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ScrubStep {
    /// Check these blocks, then call [`Scrub::checked`] or [`Scrub::failed`].
    Check(Extent),
    /// Call [`Scrub::step`] again after this time, or after a command.
    Wait(Duration),
    /// Call [`Scrub::step`] again after a command.
    Idle,
}

/// The state of a scrub.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ScrubState {
    /// It waits for a command.
    Idle,
    /// It checks blocks.
    Running,
    /// An operator has paused its run.
    Paused,
    /// It waits for its schedule.
    Waiting,
}

/// An event of a scrub.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ScrubEvent {
    /// A run started at this block, or resumed there after a restart.
    Started {
        /// The block.
        at: u64,
        /// True if the run started in an earlier process.
        resumed: bool,
    },
    /// A run ended.
    Ended(ScrubRun),
}

/// Why a command failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CommandError {
    /// There is no run to pause or stop.
    #[error("no run is active")]
    NotRunning,
    /// The run would start past the end of the device.
    #[error("block {from} is past the last block, {last}")]
    PastEnd {
        /// The requested first block.
        from: u64,
        /// The last block of the device.
        last: u64,
    },
}

/// The status of a scrub.
#[derive(Clone, PartialEq, Debug)]
pub struct ScrubView {
    /// Its state.
    pub state: ScrubState,
    /// True if it waits because other requests use the device.
    pub is_yielding: bool,
    /// Its record.
    pub record: ScrubRecord,
    /// The current rate limit, in bytes per second.
    pub rate: Option<NonZeroU64>,
    /// Bytes per second checked since the run started or resumed.
    pub speed: Option<f64>,
    /// Seconds until the run finishes at that speed.
    pub left_s: Option<u64>,
    /// When the schedule starts the next run, in seconds since 1970.
    pub next_unix_s: Option<u64>,
}

/// The scrub of one device. See the crate's documentation.
#[derive(Debug)]
pub struct Scrub {
    profile: DeviceProfile,
    settings: Settings,
    record: ScrubRecord,
    /// How often the record was saved.
    writes: u64,
    /// The part of the active run in this process.
    active_run: Option<ActiveRun>,
    save_timer: SaveTimer,
    events: VecDeque<ScrubEvent>,
}

/// The active run since it started or resumed in this process.
#[derive(Clone, Copy, Debug)]
struct ActiveRun {
    pace: Pace,
    began: Duration,
    blocks: u64,
}

impl Scrub {
    /// A scrub of a device without a record.
    pub fn new(profile: DeviceProfile, settings: Settings) -> Scrub {
        let (record, save_timer, events) = (ScrubRecord::default(), SaveTimer::default(), VecDeque::new());
        Scrub { profile, settings, record, writes: 0, active_run: None, save_timer, events }
    }

    /// Restores a new scrub from its saved record.
    ///
    /// # Errors
    /// When the bytes are not a valid record of this device. The scrub does not change then.
    pub fn restore(&mut self, bytes: &[u8]) -> Result<(), FormatError> {
        let state = SavedState::decode(bytes)?;
        if self.profile.uuid.is_some_and(|uuid| state.is_foreign(&uuid)) {
            return Err(FormatError::Foreign);
        }
        (self.record, self.writes) = (state.record_for(self.profile.capacity_blocks), state.writes);
        Ok(())
    }

    /// Changes the settings. The rate of a run takes precedence over theirs.
    pub fn configure(&mut self, settings: Settings) {
        self.settings = settings;
    }

    /// Adapts to a resized device: a run continues at its position to the new end, and restarts if the position is past it. Call it
    /// while no piece is being checked.
    pub fn resize(&mut self, profile: DeviceProfile) {
        let before_blocks = self.profile.capacity_blocks;
        let is_resized = before_blocks != profile.capacity_blocks;
        self.profile = profile;
        self.record.fit(before_blocks, profile.capacity_blocks);
        if is_resized {
            self.active_run = None;
            self.save_timer.state_changed();
        }
    }

    /// Returns what to do now.
    pub fn step(&mut self, now: Now, activity: Activity) -> ScrubStep {
        match self.record.phase {
            RunPhase::Paused => ScrubStep::Idle,
            RunPhase::Running => self.next_piece(now, activity),
            RunPhase::Idle => match self.due_unix_s(now) {
                None => ScrubStep::Idle,
                Some(due) if due > now.unix_s => {
                    ScrubStep::Wait(Duration::from_secs(due - now.unix_s).min(MAX_SCHEDULE_WAIT))
                }
                Some(_) => {
                    self.begin(now, 0, None);
                    self.next_piece(now, activity)
                }
            },
        }
    }

    /// Records the result of the check of a piece.
    pub fn checked(&mut self, now: Now, extent: Extent, found: CheckResult) {
        // A command may have ended the run during the check, or started another one.
        let is_due = self.record.phase != RunPhase::Idle && extent.start().get() == self.record.position;
        if !is_due {
            return;
        }
        self.record.counts.add(extent.len(), found);
        self.record.position += extent.len();
        if let Some(run) = &mut self.active_run {
            run.blocks += extent.len();
        }
        self.save_timer.progressed();
        if self.record.position >= self.profile.capacity_blocks {
            self.end(now, RunResult::Finished);
        }
    }

    /// Records that the check of a piece failed; the same piece is retried after a pause.
    pub fn failed(&mut self, now: Now) {
        if let Some(run) = &mut self.active_run {
            run.pace.hold_until(now.steady + RETRY_INTERVAL);
        }
    }

    /// Starts a run at block `from`; without `from`, resumes the paused run or changes the rate of the active one.
    ///
    /// # Errors
    /// When `from` is past the end.
    pub fn start(&mut self, now: Now, from: Option<u64>, rate: Option<NonZeroU64>) -> Result<(), CommandError> {
        let last = self.profile.capacity_blocks.saturating_sub(1);
        if let Some(from) = from.filter(|from| *from > last) {
            return Err(CommandError::PastEnd { from, last });
        }
        match (self.record.phase, from) {
            (RunPhase::Running | RunPhase::Paused, None) => {
                self.record.phase = RunPhase::Running;
                self.record.rate = rate.or(self.record.rate);
                self.active_run = Some(ActiveRun::from(now));
                self.save_timer.state_changed();
            }
            (RunPhase::Running | RunPhase::Paused, Some(from)) => {
                self.end(now, RunResult::Stopped);
                self.begin(now, from, rate);
            }
            (RunPhase::Idle, _) => self.begin(now, from.unwrap_or(0), rate),
        }
        Ok(())
    }

    /// Pauses the active run.
    ///
    /// # Errors
    /// When there is none.
    pub fn pause(&mut self) -> Result<(), CommandError> {
        if self.record.phase == RunPhase::Idle {
            return Err(CommandError::NotRunning);
        }
        self.record.phase = RunPhase::Paused;
        self.active_run = None;
        self.save_timer.state_changed();
        Ok(())
    }

    /// Stops the active run.
    ///
    /// # Errors
    /// When there is none.
    pub fn stop(&mut self, now: Now) -> Result<(), CommandError> {
        if self.record.phase == RunPhase::Idle {
            return Err(CommandError::NotRunning);
        }
        self.end(now, RunResult::Stopped);
        Ok(())
    }

    /// Takes the oldest event that was not taken yet.
    pub fn take_event(&mut self) -> Option<ScrubEvent> {
        self.events.pop_front()
    }

    /// The record, if it is due to be saved now. It counts as saved unless [`Scrub::save_failed`] is called.
    pub fn to_save(&mut self, now: Now) -> Option<Vec<u8>> {
        let is_due = self.save_timer.is_due(now.steady);
        is_due.then(|| self.save(now))
    }

    /// The record, if it has changed since it was saved. Call it before the device is closed.
    pub fn last_to_save(&mut self, now: Now) -> Option<Vec<u8>> {
        let is_changed = self.save_timer.is_changed();
        is_changed.then(|| self.save(now))
    }

    /// Records that saving failed; the record is due again later.
    pub fn save_failed(&mut self) {
        self.save_timer.progressed();
    }

    /// The status of the scrub.
    pub fn view(&self, now: Now) -> ScrubView {
        let state = match self.record.phase {
            RunPhase::Running => ScrubState::Running,
            RunPhase::Paused => ScrubState::Paused,
            RunPhase::Idle if self.settings.every.is_some() => ScrubState::Waiting,
            RunPhase::Idle => ScrubState::Idle,
        };
        let speed = self.active_run.and_then(|run| run.speed(now, self.profile));
        let left = (self.profile.capacity_blocks - self.record.position) << self.profile.block_size.shift();
        let left_s = speed.filter(|speed| *speed > 0.0).map(|speed| (left as f64 / speed).ceil() as u64);
        let next_unix_s = match state {
            ScrubState::Waiting => self.settings.every.map(|every| {
                self.schedule_base_unix_s(now).map_or(now.unix_s, |from| from.saturating_add(every.as_secs()))
            }),
            ScrubState::Idle | ScrubState::Running | ScrubState::Paused => None,
        };
        ScrubView {
            state,
            is_yielding: self.active_run.is_some_and(|run| run.pace.is_yielding()),
            record: self.record.clone(),
            rate: self.record.rate.or(self.settings.rate),
            speed,
            left_s,
            next_unix_s,
        }
    }

    /// The next piece of the active run, if the pace allows it now.
    fn next_piece(&mut self, now: Now, activity: Activity) -> ScrubStep {
        let rate = self.record.rate.or(self.settings.rate);
        let events = &mut self.events;
        let at = self.record.position;
        let run = self.active_run.get_or_insert_with(|| {
            events.push_back(ScrubEvent::Started { at, resumed: true });
            ActiveRun::from(now)
        });
        if at >= self.profile.capacity_blocks {
            // Only a run over a device without blocks finishes before its first piece.
            self.end(now, RunResult::Finished);
            return ScrubStep::Wait(Duration::ZERO);
        }
        if let Some(wait) = run.pace.wait(now.steady, activity, self.settings.pause_when_busy) {
            return ScrubStep::Wait(wait);
        }
        let max_blocks = piece_blocks(self.profile.max_blocks, self.profile.block_size.shift(), rate);
        let blocks = u64::from(max_blocks).min(self.profile.capacity_blocks - at);
        run.pace.started(now.steady, blocks << self.profile.block_size.shift(), rate);
        match Extent::from_raw(at, blocks) {
            Ok(extent) => ScrubStep::Check(extent),
            Err(_) => unreachable!("at least one block lies between the position and the end"),
        }
    }

    fn begin(&mut self, now: Now, from: u64, rate: Option<NonZeroU64>) {
        self.record.begin(now.unix_s, from, rate);
        self.active_run = Some(ActiveRun::from(now));
        self.events.push_back(ScrubEvent::Started { at: from, resumed: false });
        self.save_timer.state_changed();
    }

    fn end(&mut self, now: Now, ended: RunResult) {
        let run = self.record.end(now.unix_s, ended);
        self.active_run = None;
        self.events.push_back(ScrubEvent::Ended(run));
        self.save_timer.state_changed();
    }

    fn save(&mut self, now: Now) -> Vec<u8> {
        self.save_timer.save_started(now.steady);
        self.writes += 1;
        let state = SavedState {
            record: self.record.clone(),
            capacity_blocks: self.profile.capacity_blocks,
            device: self.profile.uuid.unwrap_or_default(),
            writes: self.writes,
            ..SavedState::default()
        };
        state.encode()
    }

    /// When the schedule starts the next run; `None` without a schedule.
    fn due_unix_s(&mut self, now: Now) -> Option<u64> {
        let every = self.settings.every?;
        let Some(from) = self.schedule_base_unix_s(now) else { return Some(now.unix_s) };
        // A clock that was ahead for a while must not keep the scrub waiting until then.
        self.record.schedule_from_unix_s = Some(from);
        Some(from.saturating_add(every.as_secs()))
    }

    /// The base of the schedule, which is never in the future.
    fn schedule_base_unix_s(&self, now: Now) -> Option<u64> {
        self.record.schedule_from_unix_s.map(|from| from.min(now.unix_s))
    }
}

impl ActiveRun {
    fn from(now: Now) -> ActiveRun {
        ActiveRun { pace: Pace::from(now.steady), began: now.steady, blocks: 0 }
    }

    fn speed(&self, now: Now, profile: DeviceProfile) -> Option<f64> {
        let time = now.steady.saturating_sub(self.began);
        let bytes = self.blocks << profile.block_size.shift();
        (time >= MIN_MEASURED).then(|| bytes as f64 / time.as_secs_f64())
    }
}

/// Maximum bytes of a piece, so that a request behind it waits only a little.
pub const PIECE_BYTES: u64 = 1 << 20;
/// A piece is no larger than what the rate allows in this time, so that a low rate has small pieces.
pub const PIECE_TIME: Duration = Duration::from_millis(100);
/// How much of a delay a run may catch up with.
pub const SLACK: Duration = Duration::from_millis(100);
/// A device is busy until this long after a request of a client. Gaps between the requests of one client are shorter.
pub const QUIET: Duration = Duration::from_millis(100);
/// Maximum wait for a busy device before the next piece is checked anyway: at least 4 MiB per second, or 1 TiB in three days.
pub const MAX_WAIT: Duration = Duration::from_millis(250);
/// How often a busy device is probed again.
pub const PROBE_INTERVAL: Duration = Duration::from_millis(20);

/// What clients do on the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Activity {
    /// Requests of clients in flight.
    pub in_flight: u64,
    /// Requests of clients that completed since the device was opened.
    pub completed: u64,
}

/// When the next piece may start: the limit on bytes per second, and waiting for a busy device. Times are monotonic.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pace {
    due: Duration,
    last_piece: Duration,
    last_busy: Option<Duration>,
    last_completed: Option<u64>,
    is_yielding: bool,
}

impl Pace {
    /// The pace of a run that starts or resumes now.
    pub fn from(now: Duration) -> Pace {
        Pace { due: now, last_piece: now, ..Pace::default() }
    }

    /// Starts no piece before `due`.
    pub(crate) fn hold_until(&mut self, due: Duration) {
        self.due = self.due.max(due);
    }

    /// How long to wait before the next piece; `None` if it may start now.
    pub fn wait(&mut self, now: Duration, activity: Activity, pause_when_busy: bool) -> Option<Duration> {
        self.probe(now, activity);
        self.is_yielding = false;
        if now < self.due {
            return Some(self.due - now);
        }
        let is_busy = self.last_busy.is_some_and(|at| now < at + QUIET);
        if pause_when_busy && is_busy && now < self.last_piece + MAX_WAIT {
            self.is_yielding = true;
            return Some(PROBE_INTERVAL);
        }
        None
    }

    /// Records that a piece of `bytes` bytes starts.
    pub fn started(&mut self, now: Duration, bytes: u64, rate: Option<NonZeroU64>) {
        self.last_piece = now;
        if let Some(rate) = rate {
            let cost = Duration::from_secs_f64(bytes as f64 / rate.get() as f64);
            self.due = self.due.max(now.saturating_sub(SLACK)) + cost;
        }
    }

    /// True if it waits because clients use the device.
    pub(crate) fn is_yielding(&self) -> bool {
        self.is_yielding
    }

    fn probe(&mut self, now: Duration, activity: Activity) {
        let last_completed = self.last_completed.replace(activity.completed);
        if activity.in_flight > 0 || last_completed.is_some_and(|last| last != activity.completed) {
            self.last_busy = Some(now);
        }
    }
}

/// Blocks of a piece under this rate; at least 1.
pub(crate) fn piece_blocks(max_blocks: u32, block_shift: u32, rate: Option<NonZeroU64>) -> u32 {
    let bytes = rate.map_or(PIECE_BYTES, |rate| {
        let allowed = u128::from(rate.get()) * PIECE_TIME.as_millis() / 1000;
        PIECE_BYTES.min(u64::try_from(allowed).unwrap_or(u64::MAX))
    });
    max_blocks.min((bytes >> block_shift) as u32).max(1)
}

/// How often the position of an active run is saved.
pub const SAVE_EVERY: Duration = Duration::from_secs(5);

/// Decides when the record is due to be saved.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SaveTimer {
    /// The record has changed since it was saved.
    is_changed: bool,
    /// A change has to be saved at once.
    is_urgent: bool,
    /// When the record was last saved, or saving failed.
    last: Option<Duration>,
}

impl SaveTimer {
    /// The position or the counts have changed.
    pub(crate) fn progressed(&mut self) {
        self.is_changed = true;
    }

    /// A run has started, was paused, or has ended.
    pub(crate) fn state_changed(&mut self) {
        (self.is_changed, self.is_urgent) = (true, true);
    }

    /// True if the record is due to be saved.
    pub(crate) fn is_due(&self, now: Duration) -> bool {
        self.is_urgent || self.is_changed && self.last.is_none_or(|last| now >= last + SAVE_EVERY)
    }

    /// True if the record has changed since it was saved.
    pub(crate) fn is_changed(&self) -> bool {
        self.is_changed
    }

    /// Records that the record is being saved.
    pub(crate) fn save_started(&mut self, now: Duration) {
        *self = SaveTimer { is_changed: false, is_urgent: false, last: Some(now) };
    }
}
