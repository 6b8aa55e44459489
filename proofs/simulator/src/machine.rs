//! One machine from start to stop: a disk, a device, and what its hosts do until they end or the power goes.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use crate::checker::Checker;
use crate::client::{Client, Ledger};
use crate::disk::{Behaviour, Image, IoCounts, IoKind, SimDisk, Survival};
use crate::executor::{Ended, Executor, RunLimits};
use crate::random::Random;
use crate::system::{Promise, Resizing, Session, Shape, System};
use crate::trace::Trace;

/// More than any life takes; less than anybody wants to wait for a run that goes nowhere.
const LIMITS: RunLimits = RunLimits { steps: 3_000_000, seconds: 24 * 3600 };

/// How a machine's life ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Life {
    /// All was done.
    Finished,
    /// It was made to stop.
    Crashed,
}

/// What a machine leaves.
pub struct Remains {
    /// How it ended; an error is a finding.
    pub life: Result<Life, String>,
    /// The disk, after the drawn loss.
    pub image: Image,
    /// What it asked of the disk.
    pub counts: IoCounts,
    /// Requests answered well.
    pub answered: u64,
    /// Requests that failed as planned.
    pub failed: u64,
}

/// What a machine is made of.
pub struct Parts<'a, S> {
    /// What makes the device.
    pub system: &'a S,
    /// Its shape.
    pub shape: Shape,
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
pub struct Up {
    /// A host of the device.
    pub client: Client,
    /// Time and tasks.
    pub executor: Executor,
    /// Draws for the hosts.
    pub random: Random,
    close: Promise<()>,
}

impl Up {
    /// Closes the device. Where faults are planned it may fail.
    pub async fn close(self) {
        let closed = self.close.await;
        let ledger = self.client.ledger();
        match closed {
            Ok(()) => ledger.checker.borrow_mut().closed(),
            Err(_) if ledger.faults_planned => {}
            Err(error) => {
                ledger.find(format!("close failed: {error}"));
            }
        }
    }
}

impl<S: System> Parts<'_, S> {
    /// Makes a device on `image`.
    pub fn create(&self, image: Image) -> Remains {
        self.run(image, |system, disk, _, _, ledger| {
            let create = system.create(disk, self.shape);
            async move {
                if let Err(error) = create.await {
                    ledger.find(format!("create failed: {error}"));
                }
            }
        })
    }

    /// Changes the size of the device on `image`, and says in `told` how that ended, if it did.
    pub fn resize(&self, image: Image, capacity_blocks: u64, told: Rc<Cell<Option<Resizing>>>) -> Remains {
        self.run(image, |system, disk, executor, _, ledger| {
            let resizing = system.resize(disk, executor, capacity_blocks);
            async move {
                match resizing.await {
                    Ok(how) => told.set(Some(how)),
                    Err(error) => {
                        ledger.find(format!("resize failed: {error}"));
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
        hosts: impl FnOnce(Up) -> F + 'static,
    ) -> Remains {
        self.run(image, |system, disk, executor, random, ledger| {
            let opening = system.open(disk, executor.clone(), self.shape, read_only);
            let decayed = self.decayed;
            async move {
                match opening.await {
                    Ok(Session { stack, close }) => {
                        let client = Client::new(stack, Rc::clone(&ledger));
                        hosts(Up { client, executor, random, close }).await;
                    }
                    Err(_) if ledger.faults_planned || decayed => {}
                    Err(error) => {
                        ledger.find(format!("open failed: {error}"));
                    }
                }
            }
        })
    }

    fn run<F: Future<Output = ()> + 'static>(
        &self,
        image: Image,
        main: impl FnOnce(&S, SimDisk, Executor, Random, Rc<Ledger>) -> F,
    ) -> Remains {
        let executor = Executor::new(self.random.fork("schedule"), self.trace.clone());
        let (disk_random, trace) = (self.random.fork("disk"), self.trace.clone());
        let disk = SimDisk::new(image, self.behaviour.clone(), &executor, disk_random, trace);
        let faults = &self.behaviour.faults;
        let misreads = faults.iter().any(|rule| rule.on == IoKind::Read);
        let ledger = Rc::new(Ledger { misreads, ..Ledger::new(Rc::clone(self.checker), !faults.is_empty()) });
        let main = main(self.system, disk.clone(), executor.clone(), self.random.fork("hosts"), Rc::clone(&ledger));
        let ended = executor.run(LIMITS, main);
        let counts = disk.counts();
        let found = ledger.finding.borrow().clone().or_else(|| disk.finding());
        let life = match (found, ended) {
            (Some(finding), _) => Err(finding),
            (None, Ended::Finished(())) => Ok(Life::Finished),
            (None, Ended::Halted) => Ok(Life::Crashed),
            (None, Ended::Stuck(stuck)) => Err(stuck.to_string()),
        };
        self.checker.borrow_mut().crash();
        let image = disk.power_off(self.survival, &self.random.fork("survival"));
        Remains { life, image, counts, answered: ledger.answered.get(), failed: ledger.failed.get() }
    }
}
