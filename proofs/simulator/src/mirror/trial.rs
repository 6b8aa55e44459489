//! One seed from beginning to end: make legs, use their mirror on several machines, and look at it at rest.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use sealblock_layers_mirror::assemble::AssembleError;
use sealblock_layers_mirror::label::{Label, ReplicaState};
use sealblock_layers_mirror::{MirrorError, Mutation};
use sealblock_runtime_memory::Slice;

use super::events::trouble;
use super::legs::Leg;
use super::machine::{Opening, Stage, Up};
use super::quiesced::settle;
use super::site::ReplicaEnv;
use super::world::Harness;
use crate::checker::{Checker, Patterns};
use crate::client::{Ledger, Stop};
use crate::disk::{Behaviour, Survival};
use crate::executor::{Ended, Executor, RunLimits};
use crate::random::Random;
use crate::system::Shape;
use crate::trace::Trace;
use crate::trial::{FailureReport, Order, Report};
use crate::workload::{self, Workload};

const LIMITS: RunLimits = RunLimits { steps: 5_000_000, seconds: 24 * 3600 };

/// The loads that mirrors are put under.
pub const LOADS: [Workload; 8] = [
    Workload::Mixed,
    Workload::Forced,
    Workload::Laps,
    Workload::Hot,
    Workload::Trim,
    Workload::Crowd,
    Workload::Idle,
    Workload::Spoil,
];

/// Runs one seed.
///
/// # Errors
/// The first thing that must not be.
pub fn run(mutation: Mutation, order: Order) -> Result<Report, Box<FailureReport>> {
    let random = Random::new(order.seed ^ ((order.workload as u64) << 56) ^ (1 << 48));
    let mut shape = Shape::draw(order.workload, &random);
    shape.capacity_blocks = shape.capacity_blocks.min(300);
    let patterns = Patterns::new(random.word(), shape.block_size, shape.protection);
    let factor = *random.pick(&[1, 30, 300, 3_000]);
    let opening = Opening { mutation, region_shift: random.between(1, 6) as u32, random: [7; 16], factor };
    let mut trial = Trial {
        order,
        shape,
        opening,
        checker: Rc::new(RefCell::new(Checker::new(patterns))),
        random,
        trace: Trace::default(),
        report: Report::default(),
        story: vec![format!("{shape}, regions of {} blocks, clock times {factor}", 1u64 << opening.region_shift)],
        legs: Vec::new(),
        settled: true,
        changes: 0,
        cut_at: order.crash_at,
    };
    match trial.whole() {
        Ok(()) => {
            trial.report.blocks_checked = trial.checker.borrow().blocks_checked();
            trial.report.trace = trial.trace.hash();
            Ok(trial.report)
        }
        Err(finding) => Err(Box::new(FailureReport { order, finding, story: trial.story })),
    }
}

pub(super) struct Trial {
    pub order: Order,
    pub shape: Shape,
    pub opening: Opening,
    pub checker: Rc<RefCell<Checker>>,
    pub random: Random,
    pub trace: Trace,
    pub report: Report,
    pub story: Vec<String>,
    pub legs: Vec<Leg>,
    /// At the last stop the power of every leg went, so what is found is durable.
    pub settled: bool,
    /// Changes that the mirror has answered so far.
    pub changes: u64,
    /// Starts and ends of I/Os that are left before the one at which the order wants a machine cut.
    pub cut_at: Option<u64>,
}

/// What a machine is to be like.
pub(super) struct Plan {
    pub what: &'static str,
    /// Which legs are there.
    pub present: Vec<bool>,
    /// Whether it is to be stopped somewhere.
    pub stops: bool,
    /// At which start or end of an I/O of any leg, where that is given.
    pub cut: Option<u64>,
    /// Legs are named in any order.
    pub is_any_order: bool,
    /// A disk was damaged on purpose.
    pub is_damaged: bool,
    pub checker: Rc<RefCell<Checker>>,
}

/// What came of a machine.
pub(super) struct Came {
    pub refused: Option<MirrorError>,
    pub answered_changes: u64,
    /// It was stopped.
    pub is_stopped: bool,
    /// A mirror was up.
    pub came_up: bool,
    /// Starts and ends of I/Os that were left to come before it was to be cut.
    pub left: u64,
}

impl Trial {
    fn whole(&mut self) -> Result<(), String> {
        let count = *self.random.pick(&[2, 2, 2, 3, 3, 4]);
        let (mut has_spare, mut has_bare) = (self.random.chance(30), self.random.chance(15));
        if self.order.crash_at.is_some() {
            // Cut first labellings and replacements is what is wanted.
            (has_spare, has_bare) = (true, false);
        }
        for number in 0..count + usize::from(has_spare) {
            let mut shape = self.shape;
            shape.uuid[8] = number as u8 + 1;
            let mut leg = Leg::create(shape, &self.random, &self.trace)?;
            leg.bare = has_bare && number == 1;
            if leg.bare {
                self.story.push("leg 1 keeps no label".to_owned());
            }
            if number == count {
                (leg.is_spare, leg.is_member, leg.is_current) = (true, false, false);
            }
            self.legs.push(leg);
        }
        self.make()?;
        if self.order.crash_at.is_some() {
            self.replace()?;
            return self.end();
        }
        for _ in 0..self.random.between(1, 5) {
            if self.random.chance(25) {
                self.go_on_from_old()?;
            }
            if self.random.chance(15) {
                self.replace()?;
            }
            self.swap_old();
            let present = self.draw_present();
            if self.has_everything(&present) { self.live(present)? } else { self.fork(present)? }
        }
        self.end()
    }

    /// Books how far the machine came that the order wants cut.
    pub fn spend(&mut self, cut: Option<u64>, left: u64, is_stopped: bool) {
        if cut.is_some() && self.cut_at.is_some() {
            self.report.first_crashed = is_stopped;
            self.cut_at = (!is_stopped).then_some(left);
        }
    }

    /// Whether a refusal cannot be helped: the last label of a leg that is not up to date came before a change, may have been under
    /// way, and calls another one missing that is up to date since. An image from just before that label, put back, would look
    /// like those who went on without it, so they are refused together.
    pub fn is_in_doubt(&self, error: &MirrorError) -> bool {
        matches!(error, MirrorError::Assemble { error: AssembleError::SplitBrain { .. }, .. }) && self.has_doubt()
    }

    fn has_doubt(&self) -> bool {
        let current: Vec<_> = self.legs.iter().filter(|leg| leg.is_current).filter_map(Leg::own_label).collect();
        let lacks = |label: &Label| {
            let is_missing = |id| label.replicas.iter().any(|of| of.id == id && of.state != ReplicaState::InSync);
            let is_own_current = label.replicas[label.own_index].state == ReplicaState::InSync;
            label.is_tentative
                && is_own_current
                && current.iter().any(|other| is_missing(other.replicas[other.own_index].id))
        };
        let others = self.legs.iter().filter(|leg| leg.is_in_use() && !leg.is_current);
        others.filter_map(Leg::own_label).any(|label| lacks(&label))
    }

    /// Whether a refusal says that a leg which was away may have more than its own label and the others say.
    pub fn is_left(error: &MirrorError) -> bool {
        matches!(error, MirrorError::Assemble { error: AssembleError::NoneInSync, .. })
    }

    pub fn plan(&self, what: &'static str, present: Vec<bool>) -> Plan {
        Plan {
            what,
            present,
            stops: false,
            cut: None,
            is_any_order: false,
            is_damaged: false,
            checker: self.checker.clone(),
        }
    }

    pub fn everybody(&self) -> Vec<bool> {
        vec![true; self.legs.len()]
    }

    /// Whether a leg is there that has everything and can say so.
    pub fn has_everything(&self, present: &[bool]) -> bool {
        self.legs.iter().zip(present).any(|(leg, present)| *present && leg.is_current && !leg.bare)
    }

    fn draw_present(&self) -> Vec<bool> {
        let present: Vec<bool> = self.legs.iter().map(|_| self.random.chance(65)).collect();
        let is_anybody = self.legs.iter().zip(&present).any(|(leg, present)| *present && leg.is_in_use() && !leg.bare);
        let has_bare = self.legs.iter().any(|leg| leg.bare);
        let is_fine = is_anybody && (!has_bare || self.has_everything(&present));
        if self.random.chance(50) || !is_fine { self.everybody() } else { present }
    }

    /// One machine under load.
    fn live(&mut self, present: Vec<bool>) -> Result<(), String> {
        let (workload, settled) = (self.order.workload, self.settled);
        let must_open = self.legs.iter().zip(&present).all(|(leg, present)| *present || !leg.is_current);
        let (stops, is_any_order) = (self.random.chance(60), self.random.chance(50));
        let plan = Plan { stops, is_any_order, ..self.plan("a machine under load", present) };
        let came = self.machine(plan, move |up| async move {
            under_load(&up, workload, settled).await;
        })?;
        match came.refused {
            None => Ok(()),
            // Its own label may not have been written since it was brought up to date.
            Some(MirrorError::Assemble { error: AssembleError::NoneInSync, .. }) if !must_open => Ok(()),
            Some(error) if self.is_in_doubt(&error) => Ok(()),
            Some(error) => Err(format!("the mirror could not be opened: {error}")),
        }
    }

    /// The last machine: everything comes to rest.
    fn end(&mut self) -> Result<(), String> {
        let settled = self.settled;
        let plan = Plan { is_any_order: true, ..self.plan("the last machine", self.everybody()) };
        let came = self.machine(plan, move |up| async move {
            if audit(&up, settled).await.is_ok() && settle(&up).await.is_ok() {
                up.close().await;
            }
        })?;
        match came.refused {
            None => self.damage(),
            Some(error) if self.is_in_doubt(&error) => Ok(()),
            Some(error) => Err(format!("the mirror could not be opened: {error}")),
        }
    }

    /// Runs a machine with a mirror and books what it leaves.
    pub fn machine<F: Future<Output = ()> + 'static>(
        &mut self,
        plan: Plan,
        hosts: impl FnOnce(Up) -> F + 'static,
    ) -> Result<Came, String> {
        let refused: Rc<Cell<Option<MirrorError>>> = Rc::default();
        let told = refused.clone();
        let came = self.stage(plan, move |stage| async move {
            match stage.open().await {
                Ok(up) => hosts(up).await,
                Err(error) => told.set(Some(error)),
            }
        })?;
        Ok(Came { refused: refused.take(), ..came })
    }

    /// Runs a machine, whatever it does, and books what it leaves.
    pub fn stage<F: Future<Output = ()> + 'static>(
        &mut self,
        plan: Plan,
        main: impl FnOnce(Stage) -> F + 'static,
    ) -> Result<Came, String> {
        let executor = Executor::new(self.random.fork("schedule"), self.trace.clone());
        let ledger = Rc::new(Ledger::new(plan.checker.clone(), true));
        let legs = self.legs.len();
        let world = Rc::new(Harness::new(ledger.clone(), self.opening.region_shift, legs, self.trace.clone()));
        world.is_damaged.set(plan.is_damaged);
        ledger.decayed.set(plan.is_damaged);
        *world.went_without.borrow_mut() = self.legs.iter().map(|leg| leg.went_without).collect();
        world.is_any_order.set(plan.is_any_order && !self.legs.iter().any(|leg| leg.bare));
        world.is_in_doubt.set(self.has_doubt());
        let fuse = plan.cut.map(|cut| Rc::new(Cell::new(cut)));
        world.fuse.borrow_mut().clone_from(&fuse);
        self.place(&plan, &world, &executor);
        let (random, mut opening) = (self.random.fork("hosts"), self.opening);
        // All of it: the identity of a mirror, how far apart its labels are, and the identity of a session.
        opening.random.as_chunks_mut::<8>().0.iter_mut().for_each(|part| *part = random.word().to_le_bytes());
        let stage = Stage { world: world.clone(), executor: executor.clone(), random, opening };
        let ended = executor.run(LIMITS, main(stage));
        let (answered_changes, came_up) = (world.answered_changes.get(), world.mirror.borrow().is_some());
        self.changes += answered_changes;
        self.book(&plan, &world, &ended);
        let found = ledger.finding.borrow().clone();
        let stuck = if let Ended::Stuck(stuck) = &ended { Some(stuck.to_string()) } else { None };
        match found.or(stuck) {
            Some(finding) => Err(finding),
            None => Ok(Came {
                refused: None,
                answered_changes,
                is_stopped: matches!(ended, Ended::Halted),
                came_up,
                left: fuse.map_or(0, |fuse| fuse.get()),
            }),
        }
    }

    /// Gives the legs to a machine.
    fn place(&mut self, plan: &Plan, world: &Rc<Harness>, executor: &Executor) {
        let slow_percent = *self.random.pick(&[0, 3, 10]);
        let stops_on = plan.stops.then(|| self.random.below(self.legs.len() as u64) as usize);
        let sites = self.legs.iter_mut().enumerate().map(|(number, leg)| {
            let site = leg.site(number, world, executor, &self.random);
            site.held.set(!plan.present[number]);
            let most = self.order.workload.likely_boundaries() * 3;
            let crash_at = (stops_on == Some(number)).then(|| self.random.between(1, most));
            *site.behaviour.borrow_mut() = Behaviour { crash_at, slow_percent, ..Behaviour::default() };
            site
        });
        *world.sites.borrow_mut() = sites.collect();
    }

    /// Takes the legs back, with what the stop has left.
    fn book(&mut self, plan: &Plan, world: &Rc<Harness>, ended: &Ended<()>) {
        let crashed = matches!(ended, Ended::Halted);
        self.report.crashes += u64::from(crashed);
        self.report.answered += world.ledger.answered.get();
        self.report.failed += world.ledger.failed.get();
        let (all, is_kill) = (Survival::draw(&self.random), self.random.chance(15));
        self.story.push(format!("{} with legs {:?}", plan.what, plan.present));
        self.story.append(&mut world.story.borrow_mut());
        self.story.push(format!("    it {}", if crashed { "was stopped" } else { "ended" }));
        self.settled = true;
        for (leg, site) in self.legs.iter_mut().zip(world.sites.borrow().iter()) {
            if self.random.chance(20) && leg.image.as_ref().is_none_or(|image| image.dirty_sectors() == 0) {
                leg.older = None;
            }
            let survival = if is_kill { Survival::Kill } else { all };
            let survival = if self.random.chance(50) && !is_kill { Survival::draw(&self.random) } else { survival };
            self.report.ios += site.disk.borrow().as_ref().map_or(0, |disk| disk.counts().ios);
            leg.take_over(site, survival);
            self.story.push(format!("    leg {}: {survival}; current: {}", site.number, leg.is_current));
            self.settled &= leg.is_settled();
            if leg.older.is_none() && leg.is_settled() {
                (leg.older, leg.older_at) = (leg.image.clone(), self.changes);
            }
        }
        let leaving = world.sites.borrow().iter().filter(|site| site.is_leaving.get()).map(|site| site.number).next();
        if let Some(leg) = leaving {
            self.decide_removal(leg);
        }
        let replacing =
            |site: &Rc<ReplicaEnv>| site.replaces.get().filter(|_| !site.is_member.get()).map(|old| (site.number, old));
        let coming: Vec<(usize, usize)> = world.sites.borrow().iter().filter_map(replacing).collect();
        coming.into_iter().for_each(|(new, old)| self.decide_replacement(new, old));
        plan.checker.borrow_mut().crash();
        if world.rests.get() > 0 {
            self.report.recovery_crashes += u64::from(crashed);
        }
        // Ends the circle of what knows of each other.
        world.sites.borrow_mut().clear();
        world.mirror.borrow_mut().take();
    }

    /// A leg was being taken out when the machine stopped: whether it is out depends on what was noted.
    fn decide_removal(&mut self, leg: usize) {
        // Its own label says so first, and is believed.
        let is_told = self.legs[leg].own_standing() == Some(ReplicaState::Removed);
        let is_noted = || self.legs[leg].is_noted_as(&self.legs, |standing| standing == ReplicaState::Removed);
        self.legs[leg].is_removed = is_told || is_noted();
        let is_left = self.legs[leg].is_noted_as(&self.legs, |standing| standing != ReplicaState::InSync);
        self.legs[leg].is_current = self.legs[leg].calls_itself_current() && !is_left;
    }

    /// What a leg held at some earlier stop, by the sector.
    pub fn earlier(&self, leg: usize) -> Vec<(u64, Slice)> {
        let older = self.legs[leg].older.as_ref();
        older.map_or_else(Vec::new, |image| image.visible().map(|(at, bytes)| (at, bytes.clone())).collect())
    }
}

async fn under_load(up: &Up, workload: Workload, settled: bool) {
    let done = Rc::new(Cell::new(false));
    let early = up.random.chance(40);
    let start = || up.executor.spawn("trouble", trouble(up.clone(), done.clone()));
    let task = early.then(start);
    if audit(up, settled).await.is_err() && up.world.ledger.finding.borrow().is_some() {
        return up.executor.halt();
    }
    let task = if early || up.random.chance(20) { task } else { Some(start()) };
    for _ in 0..up.random.between(1, 2) {
        workload::drive(workload, &up.client, &up.executor, &up.random).await;
    }
    done.set(true);
    if let Some(task) = task {
        task.await;
    }
    if up.random.chance(45) && settle(up).await.is_ok() && up.random.chance(60) {
        up.close().await;
    }
}

/// Every block: permitted, and clean by Verify.
pub(super) async fn audit(up: &Up, settled: bool) -> Result<(), Stop> {
    let pieces = up.client.pieces(&up.random);
    for piece in &pieces {
        up.client.audit(*piece, settled).await?;
    }
    for piece in pieces {
        up.client.verify(piece).await?;
    }
    Ok(())
}
