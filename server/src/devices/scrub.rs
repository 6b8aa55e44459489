//! The scrub of one served device: a `sealblock_scrub::Scrub` with a clock, a device, and saved state.
//!
//! A [`ScrubTask`] lives on the core of its device and works one piece at a time, beside the requests of hosts. The
//! damage lists of the namespaces are updated at once (`check.rs`); the state is saved in the reserved area of the
//! device, if it has one (`state_store.rs`).

mod check;
mod state_store;

use std::cell::{Cell, RefCell};
use std::num::NonZeroU64;
use std::rc::Rc;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use sealblock_block::{Condition, Coverage, Device, DynDevice, Error, Outcome, Request, ReservedArea, Tally};
use sealblock_exports_nvme_tcp::NamespaceState;
use sealblock_layers_cross_core::{Attached, SharedDevice};
use sealblock_runtime_memory::Slice;
use sealblock_runtime_reactor::{JoinHandle, Notify, now, spawn, timeout, yield_now};
use sealblock_scrub::{
    Activity, CheckResult, CommandError, DeviceProfile, Now, Scrub, ScrubEvent, ScrubStep, Settings,
};
use sealblock_stack::{DamageView, OwnLabel, TargetLabel};
use sealblock_units::Extent;

use crate::control::protocol::{ControlCommand, ControlError, ControlErrorKind};
use crate::dates::unix_s;
use crate::devices::bad_runs::{BadRun, bad_runs};
use crate::events::{Event, EventSender};
use crate::status::damage::DamageStatus;
use crate::status::scrub::{RunStatus, SavedWord, ScrubStatus};
use state_store::StateStore;

/// How long the piece in flight may take when the device is closed.
const LAST_PIECE: Duration = Duration::from_secs(5);
/// The maximum number of lines about damage that are logged in one run.
const MAX_LINES: u32 = 16;

fn shape_of(gate: &DynDevice, uuid: Option<[u8; 16]>) -> DeviceProfile {
    let geometry = gate.geometry();
    let (block_size, capacity_blocks) = (geometry.block_size, geometry.capacity_blocks);
    DeviceProfile { block_size, capacity_blocks, max_blocks: geometry.limits.max_verify_blocks.get(), uuid }
}

/// The scrub of a device, on the device's core.
pub struct ScrubTask {
    target: TargetLabel,
    /// Identity of the volume or mirror, if it has one.
    uuid: Option<[u8; 16]>,
    /// What the labels of members in it say that are served by themselves.
    labels: Vec<OwnLabel>,
    /// `None` while the device is being resized.
    gate: RefCell<Option<DynDevice>>,
    /// The same device that hosts use, because a repair must wait for hosts that exclude changes of its blocks.
    device: Attached,
    /// The damage list of the namespaces. Weak, because the device owns it.
    state: Weak<NamespaceState>,
    events: EventSender,
    scrub: RefCell<Scrub>,
    /// `None` before the first call of [`ScrubTask::configure`].
    settings: Cell<Option<Settings>>,
    memory: StateStore,
    /// How many of the requests that the gate has counted are the scrub's own.
    own_requests: Cell<u64>,
    /// Lines about damage that were logged in this run.
    told: Cell<u32>,
    /// True if this run has logged that not every copy can be checked.
    told_unchecked: Cell<bool>,
    error: RefCell<Option<String>>,
    bell: Notify,
    closing: Cell<bool>,
    /// True while its device is being replaced.
    is_away: Cell<bool>,
    reopened: Condition,
    task: RefCell<Option<JoinHandle<()>>>,
    epoch: Instant,
}

impl ScrubTask {
    /// Opens the scrub of a device on this core with its saved state.
    pub async fn open(
        target: TargetLabel,
        uuid: Option<[u8; 16]>,
        (gate, labels): (DynDevice, Vec<OwnLabel>),
        device: Attached,
        state: Weak<NamespaceState>,
        events: EventSender,
    ) -> Rc<ScrubTask> {
        let shape = shape_of(&gate, uuid);
        let scrub_task = ScrubTask {
            memory: StateStore::of(&target, &gate.abilities()),
            target,
            uuid,
            labels,
            gate: RefCell::new(Some(gate)),
            device,
            state,
            events,
            scrub: RefCell::new(Scrub::new(shape, Settings::default())),
            settings: Cell::default(),
            own_requests: Cell::new(0),
            told: Cell::new(0),
            told_unchecked: Cell::new(false),
            error: RefCell::default(),
            bell: Notify::default(),
            closing: Cell::new(false),
            is_away: Cell::new(false),
            reopened: Condition::default(),
            task: RefCell::default(),
            epoch: now(),
        };
        scrub_task.remember().await;
        Rc::new(scrub_task)
    }

    /// Sets the settings. The first call starts the scrub.
    pub fn configure(self: &Rc<ScrubTask>, settings: Settings) {
        self.settings.set(Some(settings));
        self.scrub.borrow_mut().configure(settings);
        let mut task = self.task.borrow_mut();
        if task.is_none() && !self.closing.get() {
            *task = Some(spawn(Rc::clone(self).run()));
        }
        drop(task);
        self.bell.notify();
    }

    /// Changes the scrub and wakes its task.
    fn with_scrub<T>(&self, apply: impl FnOnce(&mut Scrub, Now) -> T) -> T {
        let done = apply(&mut self.scrub.borrow_mut(), self.moment());
        self.bell.notify();
        done
    }

    fn status(&self, gate: &DynDevice) -> ScrubStatus {
        let view = self.scrub.borrow().view(self.moment());
        let every = self.settings.get().and_then(|settings| settings.every);
        let status = ScrubStatus::served(self.target.to_string(), gate, &view, every);
        let saved_why = self.memory.why_not();
        let saved = if saved_why.is_some() { SavedWord::InMemory } else { SavedWord::OnDisk };
        let damage = self.state.upgrade().map(|state| DamageStatus::of_served(&state.damage()));
        let is_saved = |damage: DamageStatus| {
            let not_saved = if saved_why.is_some() { vec![self.target.to_string()] } else { Vec::new() };
            DamageStatus { not_saved, ..damage }
        };
        let damage = damage.map(is_saved);
        let by_label = self.labels.iter().find_map(OwnLabel::why_older).map(|why| why.as_str().to_owned());
        let may_be_older = status.may_be_older.clone().or(by_label);
        ScrubStatus { damage, saved, saved_why, error: self.error.borrow().clone(), may_be_older, ..status }
    }

    /// Reports the bad blocks of the reopened device to hosts.
    pub fn set_damage(&self, damage: DamageView) {
        if let Some(state) = self.state.upgrade() {
            state.set_damage_source(Arc::new(damage));
        }
    }

    /// The state of the scrub; `None` while its device is closed or replaced.
    pub fn glance(&self) -> Option<ScrubStatus> {
        let gate = self.gate.borrow().clone().filter(|_| !self.closing.get())?;
        Some(self.status(&gate))
    }

    /// The device on all cores.
    pub fn shared(&self) -> &SharedDevice {
        self.device.shared()
    }

    /// Ends the scrub and saves its state.
    pub async fn close(&self) {
        self.closing.set(true);
        self.bell.notify();
        let task = self.task.borrow_mut().take();
        if let Some(mut task) = task
            && timeout(LAST_PIECE, &mut task).await.is_err()
        {
            tracing::warn!("scrub of {}: its last request did not complete in time", self.target);
            task.abort();
        }
        let unsaved = self.scrub.borrow_mut().last_to_save(self.moment());
        if let Some(bytes) = unsaved {
            self.save(bytes).await;
        }
    }

    /// The same until the device has been replaced: commands wait for [`ScrubTask::reopen`] or [`ScrubTask::lose`].
    pub async fn leave(&self) {
        self.is_away.set(true);
        self.close().await;
    }

    /// Drops the device after the scrub has been closed.
    pub fn release(&self) {
        self.gate.take();
    }

    /// The device could not be reopened.
    pub fn lose(&self) {
        self.is_away.set(false);
        self.reopened.notify();
    }

    /// Waits until the device has been replaced.
    async fn wait_reopened(&self) {
        self.reopened.wait_until(|| !self.is_away.get()).await;
    }

    /// Continues with the device's replacement, which may have another size.
    pub fn reopen(self: &Rc<ScrubTask>, gate: DynDevice) {
        self.scrub.borrow_mut().resize(shape_of(&gate, self.uuid));
        // The new gate counts from 0.
        self.own_requests.set(0);
        self.gate.replace(Some(gate));
        self.closing.set(false);
        self.is_away.set(false);
        self.reopened.notify();
        if let Some(settings) = self.settings.get() {
            self.configure(settings);
        }
    }

    async fn run(self: Rc<ScrubTask>) {
        while !self.closing.get() {
            let step = self.scrub.borrow_mut().step(self.moment(), self.activity());
            self.report_events();
            let due = self.scrub.borrow_mut().to_save(self.moment());
            if let Some(bytes) = due {
                self.save(bytes).await;
            }
            match step {
                ScrubStep::Check(extent) => {
                    self.check(extent).await;
                    // A device in memory completes at once, so other tasks of this core must get a chance to run.
                    yield_now().await;
                }
                ScrubStep::Wait(time) => drop(timeout(time, self.bell.wait()).await),
                ScrubStep::Idle => self.bell.wait().await,
            }
        }
        self.report_events();
    }

    /// Checks a piece and reports to the scrub, the namespaces and the log.
    async fn check(&self, extent: Extent) {
        let Some(gate) = self.gate.borrow().clone() else { return };
        let found = check::check(&gate, extent, async |request| self.ask(request).await).await;
        let Tally { bad_blocks: faults, coverage, .. } = match found {
            Ok(found) => found,
            Err(error) => return self.cannot_go_on(&error),
        };
        if let Some(error) = self.error.take() {
            tracing::warn!("scrub of {}: resumed after {error}", self.target);
        }
        let state = self.state.upgrade();
        let harmed = bad_runs(&faults, state.as_ref().map(|state| state.damage()).as_ref());
        let blocks = |of: &dyn Fn(&BadRun) -> bool| -> u64 {
            harmed.iter().filter(|run| of(run)).map(|run| run.last - run.first + 1).sum()
        };
        let found = CheckResult {
            bad_blocks: blocks(&|_| true),
            repaired: blocks(&|run| run.repaired),
            unchecked: coverage.blocks(),
        };
        if let Some(state) = state {
            // New bad blocks are added to the damage list, and blocks that are good again are removed.
            state.report_check(gate.geometry(), extent, &faults, coverage.is_complete());
        }
        self.report_damage(&harmed);
        self.report_unchecked(&coverage);
        self.scrub.borrow_mut().checked(self.moment(), extent, found);
    }

    fn cannot_go_on(&self, error: &Error) {
        self.scrub.borrow_mut().failed(self.moment());
        if self.error.replace(Some(error.to_string())).is_none() {
            tracing::warn!("scrub of {}: suspended, retrying: {error}", self.target);
        }
    }

    /// Logs once in a run that not every copy can be checked, and why.
    fn report_unchecked(&self, coverage: &Coverage) {
        if let Some(first) = coverage.unchecked().first()
            && !self.told_unchecked.replace(true)
        {
            let (target, why) = (&self.target, first.why.to_text());
            tracing::warn!("scrub of {target}: incomplete from block {} on: {why}", first.first);
        }
    }

    fn report_damage(&self, harmed: &[BadRun]) {
        for run in harmed {
            let told = self.told.get();
            self.told.set(told.saturating_add(1));
            let target = &self.target;
            match told {
                ..MAX_LINES if run.is_made => tracing::info!("scrub of {target}: {}", check::to_text(run)),
                ..MAX_LINES => tracing::warn!("scrub of {target}: {}", check::to_text(run)),
                MAX_LINES => tracing::warn!(
                    "scrub of {target}: more blocks are bad; `sealblock scrub status` counts them, `sealblock verify` lists them"
                ),
                _ => return,
            }
        }
    }

    /// Reports the events since the last call.
    fn report_events(&self) {
        loop {
            let event = self.scrub.borrow_mut().take_event();
            let target = self.target.to_string();
            match event {
                None => return,
                Some(ScrubEvent::Started { at: position, resumed }) => {
                    self.told.set(0);
                    self.told_unchecked.set(false);
                    self.events.send(Event::ScrubStarted { target, position, resumed });
                }
                Some(ScrubEvent::Ended(run)) => {
                    self.events.send(Event::ScrubFinished { target, run: RunStatus::ended(&run) });
                }
            }
        }
    }

    /// Loads the saved state.
    async fn remember(&self) {
        if self.memory.why_not().is_none() {
            let read = self.ask(Request::read_reserved(ReservedArea::ScrubState)).await;
            self.memory.was_read(read, |bytes| self.scrub.borrow_mut().restore(bytes));
        }
    }

    /// Saves a state, if the device has a reserved area.
    async fn save(&self, bytes: Vec<u8>) {
        if self.memory.why_not().is_some() {
            return;
        }
        let write = Request::write_reserved(ReservedArea::ScrubState, Slice::copy_from(&bytes));
        if !self.memory.was_written(self.ask(write).await) {
            self.scrub.borrow_mut().save_failed();
        }
    }

    /// Executes a command; returns the new state.
    ///
    /// # Errors
    /// If the command failed; the error has the reason.
    pub async fn execute(&self, command: &ControlCommand) -> Result<ScrubStatus, ControlError> {
        self.wait_reopened().await;
        let gate = self.gate.borrow().clone().filter(|_| !self.closing.get());
        let Some(gate) = gate else {
            return Err(ControlError::new(ControlErrorKind::Refused, "it is closed or being closed"));
        };
        let start =
            |from: Option<u64>, rate: Option<NonZeroU64>| self.with_scrub(|scrub, now| scrub.start(now, from, rate));
        let done = match command {
            ControlCommand::Find
            | ControlCommand::Status
            | ControlCommand::Log { .. }
            | ControlCommand::ScrubStatus
            | ControlCommand::MirrorStatus
            | ControlCommand::MirrorAdd { .. }
            | ControlCommand::MirrorReplace { .. }
            | ControlCommand::MirrorAcceptStale { .. }
            | ControlCommand::MirrorRemove { .. }
            | ControlCommand::Resize { .. } => Ok(()),
            ControlCommand::ScrubStart { from, rate } => start(*from, *rate),
            ControlCommand::ScrubPause => self.with_scrub(|scrub, _| scrub.pause()),
            ControlCommand::ScrubStop => self.with_scrub(|scrub, now| scrub.stop(now)),
        };
        match done {
            Ok(()) => Ok(self.status(&gate)),
            Err(refusal @ CommandError::NotRunning) => Err(ControlError::new(ControlErrorKind::Refused, refusal)),
            Err(refusal @ CommandError::PastEnd { .. }) => Err(ControlError::new(ControlErrorKind::Usage, refusal)),
        }
    }

    /// Executes a request of the scrub itself.
    async fn ask(&self, operation: Request) -> Outcome {
        let outcome = self.device.execute(operation).await;
        self.own_requests.set(self.own_requests.get() + 1);
        outcome
    }

    /// The load of other clients. Called while the scrub has no request in flight.
    fn activity(&self) -> Activity {
        if self.gate.borrow().is_none() {
            return Activity::default();
        }
        let counters = self.shared().counters();
        let answered = counters.completed().saturating_sub(self.own_requests.get());
        Activity { in_flight: counters.in_flight(), completed: answered }
    }

    fn moment(&self) -> Now {
        Now { steady: now().saturating_duration_since(self.epoch), unix_s: unix_s() }
    }
}

#[cfg(test)]
mod tests;
