//! One machine from start to stop: a disk, a device, and its hosts, until they end or the power fails.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use crate::checker::Checker;
use crate::client::{Client, RunContext};
use crate::disk::{Behaviour, Image, IoCounts, IoKind, SimDisk, Survival};
use crate::executor::{Executor, RunEnd, RunLimits};
use crate::random::{Random, Trace};
use crate::system::{BoxedWork, Resizing, Session, System, VolumeProfile};

/// More than any machine needs; only an endless run reaches it.
const LIMITS: RunLimits = RunLimits { steps: 3_000_000, seconds: 24 * 3600 };

/// How a machine ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum MachineEnd {
    /// It finished its work.
    Finished,
    /// It was stopped.
    Crashed,
}

/// The result of a machine.
pub struct MachineResult {
    /// How it ended; an error is a finding.
    pub end: Result<MachineEnd, String>,
    /// The disk, after the drawn loss.
    pub image: Image,
    /// The counters of its disk.
    pub counts: IoCounts,
    /// Requests that completed.
    pub completed: u64,
    /// Requests that failed by a planned fault.
    pub failed: u64,
}

/// The configuration of a machine.
pub struct MachineConfig<'a, S> {
    /// Makes the device.
    pub system: &'a S,
    /// Its shape.
    pub profile: VolumeProfile,
    /// The behaviour of the disk.
    pub behaviour: Behaviour,
    /// The kind of survival when the machine stops.
    pub survival: Survival,
    /// The checker of all blocks.
    pub checker: &'a Rc<RefCell<Checker>>,
    /// True if the disk has bit rot, so that the device may refuse to open.
    pub decayed: bool,
    /// Random choices.
    pub random: &'a Random,
    /// Records the run.
    pub trace: &'a Trace,
}

/// A running machine, as its hosts see it.
pub struct RunningMachine {
    /// A host of the device.
    pub client: Client,
    /// Time and tasks.
    pub executor: Executor,
    /// Random choices for the hosts.
    pub random: Random,
    close: BoxedWork<()>,
    lost: Option<BoxedWork<()>>,
}

impl RunningMachine {
    /// Closes the device; sometimes all hosts were told before that unflushed writes may be lost. With planned faults
    /// it may fail.
    pub async fn close(mut self) {
        if let Some(forget) = self.lost.take().filter(|_| self.random.fork("told").chance(50)) {
            // If the machine stops during this, both outcomes are permitted.
            self.client.context().checker.borrow_mut().loss_reported();
            let forgotten = forget.await;
            let context = self.client.context();
            if let Err(error) = forgotten.map_err(|error| format!("forgetting what may be lost failed: {error}"))
                && !context.faults_planned
            {
                context.find(error);
            }
        }
        let closed = self.close.await;
        let context = self.client.context();
        match closed {
            Ok(()) => context.checker.borrow_mut().closed(),
            Err(_) if context.faults_planned => {}
            Err(error) => {
                context.find(format!("close failed: {error}"));
            }
        }
    }
}

impl<S: System> MachineConfig<'_, S> {
    /// Makes a device on `image`.
    pub fn create(&self, image: Image) -> MachineResult {
        self.run(image, |system, disk, _, _, context| {
            let create = system.create(disk, self.profile);
            async move {
                if let Err(error) = create.await {
                    context.find(format!("create failed: {error}"));
                }
            }
        })
    }

    /// Resizes the device on `image`; sets `outcome` when the resize has ended.
    pub fn resize(&self, image: Image, capacity_blocks: u64, outcome: Rc<Cell<Option<Resizing>>>) -> MachineResult {
        self.run(image, |system, disk, executor, _, context| {
            let resizing = system.resize(disk, executor, capacity_blocks);
            async move {
                match resizing.await {
                    Ok(how) => outcome.set(Some(how)),
                    Err(error) => {
                        context.find(format!("resize failed: {error}"));
                    }
                }
            }
        })
    }

    /// Opens the device on `image` and lets `hosts` use it.
    pub fn run_machine<F: Future<Output = ()> + 'static>(
        &self,
        image: Image,
        read_only: bool,
        hosts: impl FnOnce(RunningMachine) -> F + 'static,
    ) -> MachineResult {
        self.run(image, |system, disk, executor, random, context| {
            let opening = system.open(disk, executor.clone(), self.profile, read_only);
            let decayed = self.decayed;
            async move {
                match opening.await {
                    Ok(Session { stack, close, lost }) => {
                        let checked = context.checker.borrow_mut().check_loss_report(lost.is_some());
                        if let Err(finding) = checked.or_else(|finding| if decayed { Ok(()) } else { Err(finding) }) {
                            context.find(finding);
                            return;
                        }
                        let client = Client::new(stack, Rc::clone(&context));
                        hosts(RunningMachine { client, executor, random, close, lost }).await;
                    }
                    Err(_) if context.faults_planned || decayed => {}
                    Err(error) => {
                        context.find(format!("open failed: {error}"));
                    }
                }
            }
        })
    }

    fn run<F: Future<Output = ()> + 'static>(
        &self,
        image: Image,
        main: impl FnOnce(&S, SimDisk, Executor, Random, Rc<RunContext>) -> F,
    ) -> MachineResult {
        let executor = Executor::new(self.random.fork("schedule"), self.trace.clone());
        let (disk_random, trace) = (self.random.fork("disk"), self.trace.clone());
        let disk = SimDisk::new(image, self.behaviour.clone(), &executor, disk_random, trace);
        let faults = &self.behaviour.faults;
        let misreads = faults.iter().any(|rule| rule.on == IoKind::Read);
        let context = Rc::new(RunContext {
            misreads,
            executor: Some(executor.clone()),
            ..RunContext::new(Rc::clone(self.checker), !faults.is_empty())
        });
        let main = main(self.system, disk.clone(), executor.clone(), self.random.fork("hosts"), Rc::clone(&context));
        let ended = executor.run(LIMITS, main);
        let counts = disk.counts();
        let found = context.finding.borrow().clone().or_else(|| disk.finding());
        let end = match (found, ended) {
            (Some(finding), _) => Err(finding),
            (None, RunEnd::Finished(())) => Ok(MachineEnd::Finished),
            (None, RunEnd::Halted) => Ok(MachineEnd::Crashed),
            (None, RunEnd::Stuck(stuck)) => Err(stuck.to_string()),
        };
        match self.survival {
            Survival::Kill if self.system.survives_kills() => self.checker.borrow_mut().kill(),
            _ => self.checker.borrow_mut().crash(),
        }
        let image = disk.power_off(self.survival, &self.random.fork("survival"));
        MachineResult { end, image, counts, completed: context.completed.get(), failed: context.failed.get() }
    }
}
