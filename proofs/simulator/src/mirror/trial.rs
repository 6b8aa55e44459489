//! One seed from beginning to end: make legs, use their mirror on several machines, and look at it at rest.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use sealblock_layers_mirror::judge::Refusal;
use sealblock_layers_mirror::label::Standing;
use sealblock_layers_mirror::{MirrorError, Mutation};
use sealblock_runtime_memory::Slice;

use super::events::trouble;
use super::legs::Leg;
use super::machine::{Opening, Up, open};
use super::rest::settle;
use super::world::World;
use crate::checker::{Checker, Patterns};
use crate::client::{Ledger, Stop};
use crate::disk::{Behaviour, Survival};
use crate::executor::{Ended, Executor, RunLimits};
use crate::random::Random;
use crate::system::Shape;
use crate::trace::Trace;
use crate::trial::{Defeat, Order, Report};
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
pub fn run(mutation: Mutation, order: Order) -> Result<Report, Box<Defeat>> {
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
    };
    match trial.whole() {
        Ok(()) => {
            trial.report.blocks_checked = trial.checker.borrow().blocks_checked();
            trial.report.trace = trial.trace.hash();
            Ok(trial.report)
        }
        Err(finding) => Err(Box::new(Defeat { order, finding, story: trial.story })),
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
}

/// What a machine is to be like.
pub(super) struct Plan {
    pub what: &'static str,
    /// Which legs are there.
    pub present: Vec<bool>,
    /// Whether it is to be stopped somewhere.
    pub stops: bool,
    /// A disk was damaged on purpose.
    pub is_damaged: bool,
    pub checker: Rc<RefCell<Checker>>,
}

/// What came of a machine.
pub(super) struct Came {
    pub refused: Option<MirrorError>,
    pub answered_changes: u64,
}

impl Trial {
    fn whole(&mut self) -> Result<(), String> {
        let count = *self.random.pick(&[2, 2, 2, 3, 3, 4]);
        let (has_spare, has_bare) = (self.random.chance(30), self.random.chance(15));
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
        let plan = Plan { stops: false, ..self.plan("the first machine", vec![true; self.legs.len()]) };
        self.machine(plan, |up| async move { up.close().await })?;
        for _ in 0..self.random.between(1, 5) {
            self.swap_old();
            let present = self.draw_present();
            if self.has_everything(&present) { self.live(present)? } else { self.fork(present)? }
        }
        self.end()
    }

    pub fn plan(&self, what: &'static str, present: Vec<bool>) -> Plan {
        Plan { what, present, stops: false, is_damaged: false, checker: self.checker.clone() }
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

    /// Puts an older image in the place of a leg, where at least two labels were written since.
    fn swap_old(&mut self) {
        let at = self.random.below(self.legs.len() as u64) as usize;
        // A leg that was just brought up to date may not have been told so yet, and cannot speak for itself.
        let speaks = |leg: &Leg| leg.is_current && !leg.bare && leg.calls_itself_current();
        let is_last = !self.legs.iter().enumerate().any(|(other, leg)| other != at && speaks(leg));
        let is_due = self.random.chance(30);
        let leg = &mut self.legs[at];
        if !leg.is_in_use() || leg.bare || !leg.is_settled() {
            return;
        }
        if leg.older.is_none() {
            return;
        }
        let (Some(older), Some(now)) = (leg.older.take(), leg.image.take()) else { return };
        let generation = |image| leg.label(image, &self.random).map_or(0, |label| label.generation);
        let (before, after) = (generation(&older), generation(&now));
        if is_due && !is_last && before > 0 && before + 2 <= after {
            self.story.push(format!("leg {at} is put back to what it was at label {before}; it had label {after}"));
            (leg.is_current, leg.image) = (false, Some(older));
            leg.is_old = true;
            leg.allowed = (0..1 << 12).collect();
        } else {
            (leg.older, leg.image) = (Some(older), Some(now));
        }
    }

    /// One machine under load.
    fn live(&mut self, present: Vec<bool>) -> Result<(), String> {
        let (workload, settled) = (self.order.workload, self.settled);
        let must_open = self.legs.iter().zip(&present).all(|(leg, present)| *present || !leg.is_current);
        let plan = Plan { stops: self.random.chance(60), ..self.plan("a machine under load", present) };
        let came = self.machine(plan, move |up| async move {
            under_load(&up, workload, settled).await;
        })?;
        match came.refused {
            None => Ok(()),
            // Its own label may not have been written since it was brought up to date.
            Some(MirrorError::Refused { refusal: Refusal::OnlyStale, .. }) if !must_open => Ok(()),
            Some(error) => Err(format!("the mirror could not be opened: {error}")),
        }
    }

    /// The last machine: everything comes to rest.
    fn end(&mut self) -> Result<(), String> {
        let settled = self.settled;
        let plan = self.plan("the last machine", self.everybody());
        let came = self.machine(plan, move |up| async move {
            if audit(&up, settled).await.is_ok() && settle(&up).await.is_ok() {
                up.close().await;
            }
        })?;
        match came.refused {
            None => self.damage(),
            Some(error) => Err(format!("the mirror could not be opened: {error}")),
        }
    }

    /// Runs a machine and books what it leaves.
    pub fn machine<F: Future<Output = ()> + 'static>(
        &mut self,
        plan: Plan,
        hosts: impl FnOnce(Up) -> F + 'static,
    ) -> Result<Came, String> {
        let executor = Executor::new(self.random.fork("schedule"), self.trace.clone());
        let ledger = Rc::new(Ledger::new(plan.checker.clone(), true));
        let legs = self.legs.len();
        let world = Rc::new(World::new(ledger.clone(), self.opening.region_shift, legs, self.trace.clone()));
        world.is_damaged.set(plan.is_damaged);
        ledger.decayed.set(plan.is_damaged);
        *world.went_without.borrow_mut() = self.legs.iter().map(|leg| leg.went_without).collect();
        self.place(&plan, &world, &executor);
        let refused: Rc<Cell<Option<MirrorError>>> = Rc::default();
        let main = {
            let (world, executor, refused) = (world.clone(), executor.clone(), refused.clone());
            let (random, mut opening) = (self.random.fork("hosts"), self.opening);
            // All of it: the identity of a mirror, how far apart its labels are, and the identity of a session.
            opening.random.as_chunks_mut::<8>().0.iter_mut().for_each(|part| *part = random.word().to_le_bytes());
            async move {
                match open(&world, &executor, random, opening).await {
                    Ok(up) => hosts(up).await,
                    Err(error) => refused.set(Some(error)),
                }
            }
        };
        let ended = executor.run(LIMITS, main);
        self.book(&plan, &world, &ended);
        let found = ledger.finding.borrow().clone();
        let stuck = if let Ended::Stuck(stuck) = ended { Some(stuck.to_string()) } else { None };
        match found.or(stuck) {
            Some(finding) => Err(finding),
            None => Ok(Came { refused: refused.take(), answered_changes: world.answered_changes.get() }),
        }
    }

    /// Gives the legs to a machine.
    fn place(&mut self, plan: &Plan, world: &Rc<World>, executor: &Executor) {
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
    fn book(&mut self, plan: &Plan, world: &Rc<World>, ended: &Ended<()>) {
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
                leg.older.clone_from(&leg.image);
            }
        }
        let leaving = world.sites.borrow().iter().filter(|site| site.is_leaving.get()).map(|site| site.number).next();
        if let Some(leg) = leaving {
            self.decide_removal(leg);
        }
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
        let is_told = self.legs[leg].own_standing() == Some(Standing::Removed);
        let is_noted = || self.legs[leg].is_noted_as(&self.legs, |standing| standing == Standing::Removed);
        self.legs[leg].is_removed = is_told || is_noted();
        let is_left = self.legs[leg].is_noted_as(&self.legs, |standing| standing != Standing::Current);
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
