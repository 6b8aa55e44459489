//! One machine from start to stop: a disk, a device, and what its hosts do until they end or the power goes.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use crate::checker::Checker;
use crate::client::{Client, RunContext};
use crate::disk::{Behaviour, Image, IoCounts, IoKind, SimDisk, Survival};
use crate::executor::{Executor, RunEnd, RunLimits};
use crate::random::{Random, Trace};
use crate::system::{BoxedWork, Resizing, Session, System, VolumeProfile};

/// More than any machine takes; a run that goes nowhere ends here.
const LIMITS: RunLimits = RunLimits { steps: 3_000_000, seconds: 24 * 3600 };

/// How a machine's life ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum MachineEnd {
    /// All was done.
    Finished,
    /// It was made to stop.
    Crashed,
}

/// What a machine leaves.
pub struct MachineResult {
    /// How it ended; an error is a finding.
    pub end: Result<MachineEnd, String>,
    /// The disk, after the drawn loss.
    pub image: Image,
    /// What it asked of the disk.
    pub counts: IoCounts,
    /// Requests answered well.
    pub completed: u64,
    /// Requests that failed as planned.
    pub failed: u64,
}

/// What a machine is made of.
pub struct MachineConfig<'a, S> {
    /// What makes the device.
    pub system: &'a S,
    /// Its shape.
    pub profile: VolumeProfile,
    /// How the disk behaves.
    pub behaviour: Behaviour,
    /// What survives when the machine stops.
    pub survival: Survival,
    /// What every block may hold.
    pub checker: &'a Rc<RefCell<Checker>>,
    /// The disk has decayed, so the device may refuse to come up.
    pub decayed: bool,
    /// Where draws come from.
    pub random: &'a Random,
    /// What the run is recorded in.
    pub trace: &'a Trace,
}

/// A machine that is up, as its hosts see it.
pub struct RunningMachine {
    /// A host of the device.
    pub client: Client,
    /// Time and tasks.
    pub executor: Executor,
    /// Draws for the hosts.
    pub random: Random,
    close: BoxedWork<()>,
    lost: Option<BoxedWork<()>>,
}

impl RunningMachine {
    /// Closes the device; now and then all hosts were told before that what they had not flushed may be lost. Where faults are planned it may
    /// fail.
    pub async fn close(mut self) {
        if let Some(forget) = self.lost.take().filter(|_| self.random.fork("told").chance(50)) {
            // Stopped meanwhile, it says so later or not.
            self.client.context().checker.borrow_mut().told();
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

    /// Changes the size of the device on `image`, and says in `told` how that ended, if it did.
    pub fn resize(&self, image: Image, capacity_blocks: u64, told: Rc<Cell<Option<Resizing>>>) -> MachineResult {
        self.run(image, |system, disk, executor, _, context| {
            let resizing = system.resize(disk, executor, capacity_blocks);
            async move {
                match resizing.await {
                    Ok(how) => told.set(Some(how)),
                    Err(error) => {
                        context.find(format!("resize failed: {error}"));
                    }
                }
            }
        })
    }

    /// Opens the device on `image` and lets `hosts` use it.
    pub fn live<F: Future<Output = ()> + 'static>(
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
                        let said = context.checker.borrow_mut().says_lost(lost.is_some());
                        if let Err(finding) = said.or_else(|finding| if decayed { Ok(()) } else { Err(finding) }) {
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
            Survival::Kill if self.system.survives_kills() => self.checker.borrow_mut().die(),
            _ => self.checker.borrow_mut().crash(),
        }
        let image = disk.power_off(self.survival, &self.random.fork("survival"));
        MachineResult { end, image, counts, completed: context.completed.get(), failed: context.failed.get() }
    }
}
