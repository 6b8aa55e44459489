//! The scrub of one served device: a `sealblock_scrub::Scrub` with a clock, a device, and a store for its state.
//!
//! A [`ScrubTask`] lives on the core of its device and works beside the requests of hosts, one piece at a time. A
//! [`ScrubHandle`] reaches it from other cores. The damage lists of the namespaces are updated at once (`check.rs`); the state
//! is saved in the reserved area of the device, if it has one (`state_store.rs`).

mod check;
mod events;
mod handle;
mod state_store;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Weak;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use sealblock_block::{Condition, Device, DynDevice, Gate, Outcome, Request};
use sealblock_exports_nvme_tcp::NamespaceState;
use sealblock_layers_cross_core::Attached;
use sealblock_runtime_reactor::{JoinHandle, Notify, now, spawn, timeout, yield_now};
use sealblock_scrub::{Activity, DeviceProfile, Now, Scrub, ScrubStep, Settings};
use sealblock_stack::target::TargetLabel;

use crate::cli::Serve;
use crate::control::status::{KeptWord, ScrubStatus};
use state_store::StateStore;

pub use events::{ScrubEventSender, ScrubFinished, ScrubStarted};
pub use handle::ScrubHandle;

/// How long the piece in flight may take when the device is closed.
const LAST_PIECE: Duration = Duration::from_secs(5);

/// The settings of a command line.
pub fn settings_of(arguments: &Serve) -> Settings {
    Settings {
        every: arguments.scrub_every.map(|time| time.0),
        rate: arguments.scrub_rate.map(|rate| rate.bytes_per_second()),
        ..Settings::default()
    }
}

fn shape_of(gate: &Gate<DynDevice>) -> DeviceProfile {
    let geometry = gate.geometry();
    let (block_size, capacity_blocks) = (geometry.block_size, geometry.capacity_blocks);
    DeviceProfile { block_size, capacity_blocks, max_blocks: geometry.limits.max_verify_blocks.get() }
}

/// The scrub of a device, on the device's core.
pub struct ScrubTask {
    target: TargetLabel,
    /// `None` while the device is resized.
    gate: RefCell<Option<Rc<Gate<DynDevice>>>>,
    /// The same device as hosts use it: repairs take its range lock.
    device: Attached,
    /// The damage list of the namespaces. Weak: the device owns it.
    state: Weak<NamespaceState>,
    scrub_events: ScrubEventSender,
    scrub: RefCell<Scrub>,
    /// `None` before the first.
    settings: Cell<Option<Settings>>,
    memory: StateStore,
    /// Requests of the scrub itself among those that the gate has counted.
    own_requests: Cell<u64>,
    /// Lines of damage that were logged in this run.
    told: Cell<u32>,
    /// True if this run has logged that not every copy can be checked.
    told_unchecked: Cell<bool>,
    trouble: RefCell<Option<String>>,
    bell: Notify,
    closing: Cell<bool>,
    /// True while its device is being replaced.
    is_away: Cell<bool>,
    settled: Condition,
    task: RefCell<Option<JoinHandle<()>>>,
    epoch: Instant,
}

impl ScrubTask {
    /// Opens the scrub of a device of this core with its saved state.
    pub async fn open(
        target: TargetLabel,
        gate: Rc<Gate<DynDevice>>,
        device: Attached,
        state: Weak<NamespaceState>,
        scrub_events: ScrubEventSender,
    ) -> Rc<ScrubTask> {
        let shape = shape_of(&gate);
        let scrub_task = ScrubTask {
            memory: StateStore::of(&target.now(), &gate.abilities()),
            target,
            gate: RefCell::new(Some(gate)),
            device,
            state,
            scrub_events,
            scrub: RefCell::new(Scrub::new(shape, Settings::default())),
            settings: Cell::default(),
            own_requests: Cell::new(0),
            told: Cell::new(0),
            told_unchecked: Cell::new(false),
            trouble: RefCell::default(),
            bell: Notify::default(),
            closing: Cell::new(false),
            is_away: Cell::new(false),
            settled: Condition::default(),
            task: RefCell::default(),
            epoch: now(),
        };
        scrub_task.remember().await;
        Rc::new(scrub_task)
    }

    /// Sets the settings. The first call starts the scrub.
    fn configure(self: &Rc<ScrubTask>, settings: Settings) {
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

    fn status(&self, gate: &Gate<DynDevice>) -> ScrubStatus {
        let view = self.scrub.borrow().view(self.moment());
        let every = self.settings.get().and_then(|settings| settings.every);
        let status = ScrubStatus::served(self.target.to_string(), gate, &view, every);
        let kept_why = self.memory.why_not();
        let kept = if kept_why.is_some() { KeptWord::InMemory } else { KeptWord::OnDisk };
        ScrubStatus { kept, kept_why, trouble: self.trouble.borrow().clone(), ..status }
    }

    /// The state of the scrub, and the gate of its device; `None` while that is closed or replaced.
    pub fn glance(&self) -> Option<(ScrubStatus, Rc<Gate<DynDevice>>)> {
        let gate = self.gate.borrow().clone().filter(|_| !self.closing.get())?;
        Some((self.status(&gate), gate))
    }

    /// Ends the scrub and saves its state.
    pub async fn close(&self) {
        self.closing.set(true);
        self.bell.notify();
        let task = self.task.borrow_mut().take();
        if let Some(mut task) = task
            && timeout(LAST_PIECE, &mut task).await.is_err()
        {
            tracing::warn!("scrub of {}: its last piece was not done in time", self.target);
            task.abort();
        }
        let unsaved = self.scrub.borrow_mut().last_to_save(self.moment());
        if let Some(bytes) = unsaved {
            self.save(bytes).await;
        }
    }

    /// The same until the device was replaced: commands wait for [`ScrubTask::reopen`] or [`ScrubTask::lose`].
    pub async fn leave(&self) {
        self.is_away.set(true);
        self.close().await;
    }

    /// Drops the device after the scrub was closed.
    pub fn release(&self) {
        self.gate.take();
    }

    /// The device could not be reopened.
    pub fn lose(&self) {
        self.is_away.set(false);
        self.settled.notify();
    }

    /// Waits until the device was replaced.
    async fn settle(&self) {
        self.settled.wait_until(|| !self.is_away.get()).await;
    }

    /// Continues with the device's replacement, which may have another size.
    pub fn reopen(self: &Rc<ScrubTask>, gate: Rc<Gate<DynDevice>>) {
        self.scrub.borrow_mut().resize(shape_of(&gate));
        // The new gate counts from 0.
        self.own_requests.set(0);
        self.gate.replace(Some(gate));
        self.closing.set(false);
        self.is_away.set(false);
        self.settled.notify();
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
                    // A device in memory completes at once: other tasks of this core need a turn.
                    yield_now().await;
                }
                ScrubStep::Wait(time) => drop(timeout(time, self.bell.wait()).await),
                ScrubStep::Idle => self.bell.wait().await,
            }
        }
        self.report_events();
    }

    /// Executes a request of the scrub itself.
    async fn ask(&self, operation: Request) -> Outcome {
        let outcome = self.device.execute(operation).await;
        self.own_requests.set(self.own_requests.get() + 1);
        outcome
    }

    /// The load of other clients. Called while the scrub has no request in flight.
    fn activity(&self) -> Activity {
        let Some(gate) = self.gate.borrow().clone() else { return Activity::default() };
        let counters = gate.counters();
        let answered = counters.completed().saturating_sub(self.own_requests.get());
        Activity { in_flight: counters.in_flight(), completed: answered }
    }

    fn moment(&self) -> Now {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH);
        let steady = now().saturating_duration_since(self.epoch);
        Now { steady, unix_s: unix.map_or(0, |since| since.as_secs()) }
    }
}

#[cfg(test)]
mod tests;
