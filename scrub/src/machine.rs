//! The scrub itself: its states, and what leads from one to the other.

use std::collections::VecDeque;
use std::num::NonZeroU64;
use std::time::Duration;

use sealblock_units::Extent;

use crate::format::{self, FormatError};
use crate::pace::{Activity, Pace, piece_blocks};
use crate::record::{Checked, Phase, Run, RunResult, ScrubRecord};
use crate::saving::SaveTimer;
use crate::{Now, Settings, Shape};

/// How long a device that cannot be reached is left alone.
const RETRY: Duration = Duration::from_secs(30);
/// How long a wait for the schedule is at most: the time of day may jump.
const MOST_REST: Duration = Duration::from_secs(600);
/// A speed is told when it was measured for so long.
const LEAST_MEASURED: Duration = Duration::from_secs(1);

/// What is to be done next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Check these blocks, then call [`Scrub::checked`] or [`Scrub::failed`].
    Check(Extent),
    /// Ask again after this time, or after a command.
    Wait(Duration),
    /// Ask again after a command.
    Idle,
}

/// What a scrub does now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// Nothing, until it is told to.
    Idle,
    /// It checks blocks.
    Running,
    /// Its run is held by hand.
    Paused,
    /// It waits for its schedule.
    Waiting,
}

/// What has happened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ScrubEvent {
    /// A run began at this block, or goes on there after a restart.
    Started {
        /// The block.
        at: u64,
        /// Whether it was begun before.
        resumed: bool,
    },
    /// A run ended.
    Ended(Run),
}

/// Why a command is not carried out.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Refusal {
    /// There is no run to hold or end.
    #[error("no run is under way")]
    NotRunning,
    /// It would begin past the end.
    #[error("block {from} is past the last block, {last}")]
    PastEnd {
        /// Where it was to begin.
        from: u64,
        /// The last block of the device.
        last: u64,
    },
}

/// What can be seen of a scrub.
#[derive(Clone, PartialEq, Debug)]
pub struct ScrubView {
    /// What it does.
    pub state: State,
    /// Whether it gives way to other requests just now.
    pub is_yielding: bool,
    /// What is remembered.
    pub record: ScrubRecord,
    /// The limit that counts now, in bytes a second.
    pub rate: Option<NonZeroU64>,
    /// Bytes a second that were checked since the run began or went on.
    pub speed: Option<f64>,
    /// Seconds until it is done, at that speed.
    pub left_s: Option<u64>,
    /// When the next run begins by itself, in seconds since 1970.
    pub next_unix_s: Option<u64>,
}

/// The scrub of one device. See the crate's documentation.
#[derive(Debug)]
pub struct Scrub {
    shape: Shape,
    settings: Settings,
    record: ScrubRecord,
    /// Of the run under way in this process.
    session: Option<ActiveRun>,
    saving: SaveTimer,
    news: VecDeque<ScrubEvent>,
}

/// A run under way, since it was begun or went on.
#[derive(Clone, Copy, Debug)]
struct ActiveRun {
    pace: Pace,
    began: Duration,
    blocks: u64,
}

impl Scrub {
    /// A scrub of a device of which nothing is remembered.
    pub fn new(shape: Shape, settings: Settings) -> Scrub {
        let (record, saving, news) = (ScrubRecord::default(), SaveTimer::default(), VecDeque::new());
        Scrub { shape, settings, record, session: None, saving, news }
    }

    /// Goes on from what was saved; for a scrub that is fresh.
    ///
    /// # Errors
    /// Why the bytes are no state of this device's scrub; it is as it was then.
    pub fn restore(&mut self, bytes: &[u8]) -> Result<(), FormatError> {
        self.record = format::decode(bytes, self.shape.capacity_blocks)?;
        Ok(())
    }

    /// What is remembered in these bytes, about a device of so many blocks.
    ///
    /// # Errors
    /// Why the bytes are no such state.
    pub fn read(bytes: &[u8], capacity_blocks: u64) -> Result<ScrubRecord, FormatError> {
        format::decode(bytes, capacity_blocks)
    }

    /// Has these settings count from now on. A run's own rate goes before.
    pub fn configure(&mut self, settings: Settings) {
        self.settings = settings;
    }

    /// The device has another shape from now on, after it was resized: a run goes on where it was, to the new end, and begins anew
    /// if that lies before. To be called while no piece is being checked.
    pub fn resize(&mut self, shape: Shape) {
        let is_other = self.shape.capacity_blocks != shape.capacity_blocks;
        self.shape = shape;
        self.record.fit(shape.capacity_blocks);
        if is_other {
            self.session = None;
            self.saving.state_changed();
        }
    }

    /// What to do now.
    pub fn step(&mut self, now: Now, activity: Activity) -> Step {
        match self.record.phase {
            Phase::Paused => Step::Idle,
            Phase::Running => self.go_on(now, activity),
            Phase::Idle => match self.due_unix_s(now) {
                None => Step::Idle,
                Some(due) if due > now.unix_s => Step::Wait(Duration::from_secs(due - now.unix_s).min(MOST_REST)),
                Some(_) => {
                    self.begin(now, 0, None);
                    self.go_on(now, activity)
                }
            },
        }
    }

    /// These blocks were checked, and this was found.
    pub fn checked(&mut self, now: Now, extent: Extent, found: Checked) {
        // While they were checked, the run may have been ended, or another one begun.
        let is_due = self.record.phase != Phase::Idle && extent.start().get() == self.record.position;
        if !is_due {
            return;
        }
        self.record.counts.add(extent.len(), found);
        self.record.position += extent.len();
        if let Some(session) = &mut self.session {
            session.blocks += extent.len();
        }
        self.saving.progressed();
        if self.record.position >= self.shape.capacity_blocks {
            self.end(now, RunResult::Finished);
        }
    }

    /// The device could not be asked; the same blocks come again later.
    pub fn failed(&mut self, now: Now) {
        if let Some(session) = &mut self.session {
            session.pace.hold_until(now.steady + RETRY);
        }
    }

    /// Begins a run at a block, or has one that was held go on; one that is under way gets the new rate.
    ///
    /// # Errors
    /// When it would begin past the end.
    pub fn start(&mut self, now: Now, from: Option<u64>, rate: Option<NonZeroU64>) -> Result<(), Refusal> {
        let last = self.shape.capacity_blocks.saturating_sub(1);
        if let Some(from) = from.filter(|from| *from > last) {
            return Err(Refusal::PastEnd { from, last });
        }
        match (self.record.phase, from) {
            (Phase::Running | Phase::Paused, None) => {
                self.record.phase = Phase::Running;
                self.record.rate = rate.or(self.record.rate);
                self.session = Some(ActiveRun::from(now));
                self.saving.state_changed();
            }
            (Phase::Running | Phase::Paused, Some(from)) => {
                self.end(now, RunResult::Stopped);
                self.begin(now, from, rate);
            }
            (Phase::Idle, _) => self.begin(now, from.unwrap_or(0), rate),
        }
        Ok(())
    }

    /// Holds the run under way where it is.
    ///
    /// # Errors
    /// When there is none.
    pub fn pause(&mut self) -> Result<(), Refusal> {
        if self.record.phase == Phase::Idle {
            return Err(Refusal::NotRunning);
        }
        self.record.phase = Phase::Paused;
        self.session = None;
        self.saving.state_changed();
        Ok(())
    }

    /// Ends the run under way.
    ///
    /// # Errors
    /// When there is none.
    pub fn stop(&mut self, now: Now) -> Result<(), Refusal> {
        if self.record.phase == Phase::Idle {
            return Err(Refusal::NotRunning);
        }
        self.end(now, RunResult::Stopped);
        Ok(())
    }

    /// What has happened and was not taken yet, oldest first.
    pub fn take_news(&mut self) -> Option<ScrubEvent> {
        self.news.pop_front()
    }

    /// What is to be written now, if anything is; it counts as written then, unless [`Scrub::not_saved`] says otherwise.
    pub fn to_save(&mut self, now: Now) -> Option<Vec<u8>> {
        let is_due = self.saving.is_due(now.steady);
        is_due.then(|| self.save(now))
    }

    /// What is to be written before the device is closed.
    pub fn last_to_save(&mut self, now: Now) -> Option<Vec<u8>> {
        let is_changed = self.saving.is_changed();
        is_changed.then(|| self.save(now))
    }

    /// What was to be written was not; it will come again.
    pub fn not_saved(&mut self) {
        self.saving.progressed();
    }

    /// What can be seen of it.
    pub fn view(&self, now: Now) -> ScrubView {
        let state = match self.record.phase {
            Phase::Running => State::Running,
            Phase::Paused => State::Paused,
            Phase::Idle if self.settings.every.is_some() => State::Waiting,
            Phase::Idle => State::Idle,
        };
        let speed = self.session.and_then(|session| session.speed(now, self.shape));
        let left = (self.shape.capacity_blocks - self.record.position) << self.shape.block_size.shift();
        let left_s = speed.filter(|speed| *speed > 0.0).map(|speed| (left as f64 / speed).ceil() as u64);
        let next_unix_s = match state {
            State::Waiting => self
                .settings
                .every
                .map(|every| self.counts_from(now).map_or(now.unix_s, |from| from.saturating_add(every.as_secs()))),
            State::Idle | State::Running | State::Paused => None,
        };
        ScrubView {
            state,
            is_yielding: self.session.is_some_and(|session| session.pace.is_yielding()),
            record: self.record.clone(),
            rate: self.record.rate.or(self.settings.rate),
            speed,
            left_s,
            next_unix_s,
        }
    }

    /// A piece of the run under way, if it may go now.
    fn go_on(&mut self, now: Now, activity: Activity) -> Step {
        let rate = self.record.rate.or(self.settings.rate);
        let news = &mut self.news;
        let at = self.record.position;
        let session = self.session.get_or_insert_with(|| {
            news.push_back(ScrubEvent::Started { at, resumed: true });
            ActiveRun::from(now)
        });
        if at >= self.shape.capacity_blocks {
            // Only a device without blocks has a run that is done before it has begun.
            self.end(now, RunResult::Finished);
            return Step::Wait(Duration::ZERO);
        }
        if let Some(wait) = session.pace.wait(now.steady, activity, self.settings.pause_when_busy) {
            return Step::Wait(wait);
        }
        let most = piece_blocks(self.shape.most_blocks, self.shape.block_size.shift(), rate);
        let blocks = u64::from(most).min(self.shape.capacity_blocks - at);
        session.pace.go(now.steady, blocks << self.shape.block_size.shift(), rate);
        match Extent::from_raw(at, blocks) {
            Ok(extent) => Step::Check(extent),
            Err(_) => unreachable!("at least one block lies between the position and the end"),
        }
    }

    fn begin(&mut self, now: Now, from: u64, rate: Option<NonZeroU64>) {
        self.record.begin(now.unix_s, from, rate);
        self.session = Some(ActiveRun::from(now));
        self.news.push_back(ScrubEvent::Started { at: from, resumed: false });
        self.saving.state_changed();
    }

    fn end(&mut self, now: Now, ended: RunResult) {
        let run = self.record.end(now.unix_s, ended);
        self.session = None;
        self.news.push_back(ScrubEvent::Ended(run));
        self.saving.state_changed();
    }

    fn save(&mut self, now: Now) -> Vec<u8> {
        self.saving.begun(now.steady);
        format::encode(&self.record, self.shape.capacity_blocks)
    }

    /// When the next run begins by itself; `None` without a schedule.
    fn due_unix_s(&mut self, now: Now) -> Option<u64> {
        let every = self.settings.every?;
        let Some(from) = self.counts_from(now) else { return Some(now.unix_s) };
        // A clock that was ahead for a while must not keep the scrub waiting until then.
        self.record.schedule_from_unix_s = Some(from);
        Some(from.saturating_add(every.as_secs()))
    }

    /// What the schedule counts from, which is never in the future.
    fn counts_from(&self, now: Now) -> Option<u64> {
        self.record.schedule_from_unix_s.map(|from| from.min(now.unix_s))
    }
}

impl ActiveRun {
    fn from(now: Now) -> ActiveRun {
        ActiveRun { pace: Pace::from(now.steady), began: now.steady, blocks: 0 }
    }

    fn speed(&self, now: Now, shape: Shape) -> Option<f64> {
        let time = now.steady.saturating_sub(self.began);
        let bytes = self.blocks << shape.block_size.shift();
        (time >= LEAST_MEASURED).then(|| bytes as f64 / time.as_secs_f64())
    }
}
