//! One seed from beginning to end: make a device, use it, stop it, look, and go on with what is left.
//!
//! Everything is drawn from the seed: shape, disk, loads, where each machine stops, what survives, how often recovery is
//! itself stopped, and where damage is done. After each stop a reader that may not write looks first (in some seeds), so
//! what it saw binds everything that comes later.

mod resizing;

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use sealblock_runtime_memory::Slice;
use sealblock_units::{Extent, Lba};

use crate::checker::{Checker, Patterns};
use crate::client::Stop;
use crate::damage::Damage;
use crate::disk::{Behaviour, FaultRule, Image, IoKind, Survival};
use crate::machine::{Life, Parts, Remains, Up};
use crate::random::Random;
use crate::system::{Shape, System};
use crate::trace::Trace;
use crate::workload::{self, Workload};

pub use crate::system::ZONE_BLOCKS;

/// So long, and so many times, does a machine go on without requests in some seeds: everything is committed then and has its second
/// copy. A timer may go off before its time while tasks are ready; that all of them do before the worker has run is next to impossible.
const REST: Duration = Duration::from_millis(500);
const RESTS: usize = 8;

/// What to run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Order {
    /// Everything is drawn from this.
    pub seed: u64,
    /// The load.
    pub workload: Workload,
    /// Where the first loaded machine stops, instead of at a drawn place: its n-th start or end of an I/O.
    pub crash_at: Option<u64>,
}

/// What was run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Report {
    /// Machines that were stopped in the middle of something.
    pub crashes: u64,
    /// Of these, machines that were stopped while they recovered from an earlier crash.
    pub recovery_crashes: u64,
    /// I/Os of all machines.
    pub ios: u64,
    /// Requests answered well.
    pub answered: u64,
    /// Requests that failed by a planned fault.
    pub failed: u64,
    /// Blocks whose content was compared with what is permitted.
    pub blocks_checked: u64,
    /// Damage that was done and found.
    pub damages_found: u64,
    /// Disks that were made to decay, and whose blocks were all right or found to be damaged.
    pub decays: u64,
    /// Changes of size that were begun.
    pub resizings: u64,
    /// Logs and other metadata that were damaged between a crash and the next start.
    pub spoilt: u64,
    /// Whether the first loaded machine stopped where it was told to.
    pub first_crashed: bool,
    /// The hash of everything that happened.
    pub trace: u64,
}

impl std::ops::AddAssign for Report {
    fn add_assign(&mut self, other: Report) {
        self.crashes += other.crashes;
        self.recovery_crashes += other.recovery_crashes;
        self.ios += other.ios;
        self.answered += other.answered;
        self.failed += other.failed;
        self.blocks_checked += other.blocks_checked;
        self.damages_found += other.damages_found;
        self.decays += other.decays;
        self.spoilt += other.spoilt;
        self.resizings += other.resizings;
        self.trace = crate::random::mix(self.trace ^ other.trace);
    }
}

/// What must not be, and how it came about.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FailureReport {
    /// What to run to see it again.
    pub order: Order,
    /// What was found.
    pub finding: String,
    /// What happened before, one line for each machine.
    pub story: Vec<String>,
}

impl fmt::Display for FailureReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "seed {} of {}: {}", self.order.seed, self.order.workload.name(), self.finding)?;
        self.story.iter().try_for_each(|line| writeln!(f, "    {line}"))
    }
}

/// Runs one seed.
///
/// # Errors
/// The first thing that must not be.
pub fn run<S: System>(system: &S, order: Order) -> Result<Report, Box<FailureReport>> {
    let random = Random::new(order.seed ^ ((order.workload as u64) << 56));
    let shape = Shape::draw(order.workload, &random);
    let patterns = Patterns::new(random.word(), shape.block_size, shape.protection);
    // Draws of their own, so that a seed without changes of size is what it is without them.
    let sizes = Random::new(order.seed ^ ((order.workload as u64) << 48) ^ (1 << 40));
    let mut trial = Trial {
        system,
        order,
        shape,
        checker: Rc::new(RefCell::new(Checker::new(patterns))),
        random,
        trace: Trace::default(),
        report: Report::default(),
        story: vec![shape.to_string()],
        settled: true,
        came_up: false,
        rested: false,
        long_durable: Vec::new(),
        earlier: Vec::new(),
        unmended: None,
        keeps_length: sizes.chance(25),
        sizes,
        capacities: vec![shape.capacity_blocks],
        undoable: Vec::new(),
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

struct Trial<'a, S> {
    system: &'a S,
    order: Order,
    shape: Shape,
    checker: Rc<RefCell<Checker>>,
    random: Random,
    trace: Trace,
    report: Report,
    story: Vec<String>,
    /// The last machine under load had come up, so that its log has no older damage.
    came_up: bool,
    /// The last load had ended, and its machine went on for a while, before it was stopped.
    rested: bool,
    /// The last stop was a power cut, so what is found on the disk is durable.
    settled: bool,
    /// Blocks that nothing was in flight about when the last load ended: damage to them must be found.
    long_durable: Vec<Lba>,
    /// The kind of metadata a copy of which may still be lost from an earlier damage; another one that waits to be mended is not
    /// to be damaged then.
    unmended: Option<usize>,
    /// What the disk held before the last load.
    earlier: Vec<(u64, Slice)>,
    /// Draws for changes of size.
    sizes: Random,
    /// The sizes that the device has had, in blocks.
    capacities: Vec<u64>,
    /// Those from before changes that were seen after a kill, and that a power cut may undo.
    undoable: Vec<u64>,
    /// The disk keeps its length, and is longer than the device.
    keeps_length: bool,
}

impl<S: System> Trial<'_, S> {
    fn whole(&mut self) -> Result<(), String> {
        let mut image = self.create()?;
        let lives = self.random.between(1, 4);
        for life in 0..lives {
            if life + 1 == lives || self.random.chance(30) {
                self.earlier = image.visible().map(|(sector, bytes)| (sector, bytes.clone())).collect();
            }
            image = self.load(image, life == 0)?;
            self.spoil(&mut image);
            image = self.look(image)?;
            image = self.recover(image)?;
            image = self.resize(image)?;
        }
        self.end(image)
    }

    fn parts(&self, behaviour: Behaviour, survival: Survival) -> Parts<'_, S> {
        Parts {
            system: self.system,
            shape: self.shape,
            behaviour,
            survival,
            checker: &self.checker,
            decayed: false,
            random: &self.random,
            trace: &self.trace,
        }
    }

    fn behaviour(&self, crash_at: Option<u64>) -> Behaviour {
        self.behaviour_by(&self.random, crash_at)
    }

    fn behaviour_by(&self, random: &Random, crash_at: Option<u64>) -> Behaviour {
        let slow_percent = *random.pick(&[0, 3, 10, 40]);
        let (lie_percent, keeps_length) = (self.system.lie_percent(), self.keeps_length);
        Behaviour { crash_at, slow_percent, lie_percent, keeps_length, ..Behaviour::default() }
    }

    /// Books what a machine left.
    fn book(&mut self, what: &str, survival: Survival, remains: Remains) -> Result<(Image, Life), String> {
        self.report.ios += remains.counts.ios;
        self.report.answered += remains.answered;
        self.report.failed += remains.failed;
        let (ended, crashed) = match &remains.life {
            Ok(Life::Finished) => ("ended", false),
            Ok(Life::Crashed) => ("was stopped", true),
            Err(_) => ("failed", false),
        };
        self.report.crashes += u64::from(crashed);
        self.settled = survival.is_power_cut();
        if self.settled {
            self.undoable.clear();
        }
        let counts = remains.counts;
        self.story.push(format!(
            "{what} {ended} after {} boundaries ({} I/Os, {} answered, {} failed); then {survival}",
            counts.boundaries, counts.ios, remains.answered, remains.failed
        ));
        Ok((remains.image, remains.life?))
    }

    /// Makes the device; now and then the first attempt is stopped.
    fn create(&mut self) -> Result<Image, String> {
        let mut image = Image::blank(self.shape.sector_bytes, self.disk_bytes());
        if self.random.chance(10) {
            let survival = Survival::draw(&self.random);
            let crash_at = Some(self.random.between(1, 14));
            let remains = self.parts(self.behaviour(crash_at), survival).create(image);
            image = self.book("a first attempt to create", survival, remains)?.0;
        }
        let survival = Survival::Nothing;
        let remains = self.parts(self.behaviour(None), survival).create(image);
        Ok(self.book("creation", survival, remains)?.0)
    }

    /// One machine under load.
    fn load(&mut self, image: Image, first: bool) -> Result<Image, String> {
        let (workload, survival) = (self.order.workload, Survival::draw(&self.random));
        let drawn = self.random.chance(85).then(|| self.random.between(1, workload.likely_boundaries()));
        let crash_at = if first { self.order.crash_at.or(drawn) } else { drawn };
        let mut behaviour = self.behaviour(crash_at);
        if workload == Workload::Faulty {
            behaviour.faults = draw_faults(&self.random);
            self.story.extend(behaviour.faults.iter().map(|rule| format!("for the next machine, {rule}")));
        }
        let (closes, rests, settled) = (self.random.chance(50), self.random.chance(50), self.settled);
        let is_faulty = !behaviour.faults.is_empty();
        let misreads = behaviour.faults.iter().any(|rule| rule.on == IoKind::Read);
        let came_up = Rc::new(Cell::new(false));
        let is_up = Rc::clone(&came_up);
        let remains = self.parts(behaviour, survival).live(image, false, move |up| async move {
            is_up.set(true);
            if audit(&up, settled).await.is_err() {
                return;
            }
            workload::drive(workload, &up.client, &up.executor, &up.random).await;
            if closes && up.client.ledger().finding.borrow().is_none() {
                up.close().await;
            } else if rests {
                for _ in 0..RESTS {
                    up.executor.delay(REST).await;
                }
            }
        });
        let (image, life) = self.book("a machine under load", survival, remains)?;
        if misreads {
            self.checker.borrow_mut().doubt_all();
        }
        self.came_up = came_up.get();
        self.rested = rests && !is_faulty && life == Life::Finished;
        self.long_durable = self.checker.borrow().long_durable();
        if first {
            self.report.first_crashed = life == Life::Crashed;
        }
        Ok(image)
    }

    /// Damages the log that the last machine left, or other metadata that is there twice. Nothing that was durable may be lost by
    /// that, but for the last small commit of a machine that had no time to write its second copy.
    fn spoil(&mut self, image: &mut Image) {
        let kinds = self.system.redundant(&self.shape, image);
        if kinds.is_empty() || !self.settled || !self.came_up || !self.random.chance(60) {
            return;
        }
        let exposed = if self.rested { Vec::new() } else { self.system.exposed(&self.shape, image) };
        // The first kind is the log, which nothing is exempt from that is damaged after a rest.
        let is_log = self.rested && self.random.chance(75);
        let kind = if is_log { 0 } else { self.random.below(kinds.len() as u64) as usize };
        if !kinds[kind].is_mended && *self.unmended.get_or_insert(kind) != kind {
            return;
        }
        if let Some(what) = Damage::spoil(image, &kinds[kind].runs, &exposed, &self.earlier, &self.random) {
            self.story.push(what);
            self.report.spoilt += 1;
            // What tells damage to data from writes that never arrived may be gone with it.
            self.long_durable.clear();
        }
    }

    /// A reader looks; then, in some seeds, damage is done and a reader must find it.
    fn look(&mut self, mut image: Image) -> Result<Image, String> {
        if !self.random.chance(60) {
            return Ok(image);
        }
        let candidates = std::mem::take(&mut self.long_durable);
        image = self.look_only(image)?;
        if self.settled
            && self.random.chance(40)
            && let Some(damage) = self.damage(&mut image, &candidates)
        {
            image = self.find(image, &damage, true)?;
            damage.repair(&mut image);
        }
        Ok(image)
    }

    /// Damages one of `candidates`. Without tags nobody could find damage, so none is done then.
    fn damage(&self, image: &mut Image, candidates: &[Lba]) -> Option<Damage> {
        self.shape.protection.filter(|_| self.system.finds_damage())?;
        Damage::inflict(image, &self.checker.borrow(), candidates, &self.random)
    }

    fn reader(&self) -> Behaviour {
        let read_only = self.random.chance(50);
        Behaviour { read_only, forbid_writes: true, ..self.behaviour(None) }
    }

    fn look_only(&mut self, image: Image) -> Result<Image, String> {
        let (settled, survival) = (self.settled, Survival::Kill);
        let remains = self.parts(self.reader(), survival).live(image, true, move |up| async move {
            let _ = audit(&up, settled).await;
        });
        let (image, _) = self.book("a reader", survival, remains)?;
        // A reader writes nothing, so the doubt about what is durable is as it was.
        self.settled = settled;
        Ok(image)
    }

    /// A machine on a damaged disk must find exactly the damage.
    fn find(&mut self, image: Image, damage: &Damage, read_only: bool) -> Result<Image, String> {
        let (lba, survival, settled) = (damage.lba, Survival::Kill, self.settled);
        let behaviour = if read_only { self.reader() } else { self.behaviour(None) };
        let remains = self.parts(behaviour, survival).live(image, read_only, move |up| async move {
            for piece in up.client.pieces(&up.random) {
                if up.client.expect_damage(piece, lba).await.is_err() {
                    return;
                }
            }
            if !read_only {
                rewrite(up, lba).await;
            }
        });
        let (image, _) = self.book(&format!("a machine with damage in block {lba}"), survival, remains)?;
        self.report.damages_found += 1;
        self.settled = settled;
        Ok(image)
    }

    /// Machines that are stopped while they recover.
    fn recover(&mut self, mut image: Image) -> Result<Image, String> {
        while self.random.chance(35) {
            let survival = Survival::draw(&self.random);
            let crash_at = Some(self.random.between(1, 40));
            let settled = self.settled;
            let remains = self.parts(self.behaviour(crash_at), survival).live(image, false, move |up| async move {
                let _ = audit(&up, settled).await;
            });
            let (left, life) = self.book("a recovery", survival, remains)?;
            self.report.recovery_crashes += u64::from(life == Life::Crashed);
            image = self.look(left)?;
        }
        Ok(image)
    }

    /// The last machine: all there, closed in good order, and damage found that comes after.
    fn end(&mut self, image: Image) -> Result<(), String> {
        let (settled, survival) = (self.settled, Survival::Nothing);
        let remains = self.parts(self.behaviour(None), survival).live(image, false, move |up| async move {
            if audit(&up, settled).await.is_ok() {
                up.close().await;
            }
        });
        let mut image = self.book("the last machine", survival, remains)?.0;
        image = self.look_only(image)?;
        if self.random.chance(50) {
            return self.bit_rot(image);
        }
        let touched = self.checker.borrow().touched();
        if let Some(damage) = self.damage(&mut image, &touched) {
            self.find(image, &damage, false)?;
        }
        Ok(())
    }

    /// On a disk with a spoilt sector, no block may read as anything that was never there.
    fn bit_rot(&mut self, mut image: Image) -> Result<(), String> {
        if self.shape.protection.is_none() || !self.system.finds_damage() {
            return Ok(());
        }
        let Some(what) = Damage::bit_rot(&mut image, &self.earlier, &self.random) else { return Ok(()) };
        self.story.push(what);
        let read_only = self.random.chance(50);
        let behaviour = if read_only { self.reader() } else { self.behaviour(None) };
        let parts = Parts { decayed: true, ..self.parts(behaviour, Survival::Kill) };
        let remains = parts.live(image, read_only, move |up| async move {
            for piece in up.client.pieces(&up.random) {
                if up.client.survey(piece).await.is_err() {
                    return;
                }
            }
        });
        self.book("a machine with a decayed disk", Survival::Kill, remains)?;
        self.report.decays += 1;
        Ok(())
    }
}

/// Every block: readable, permitted, and clean by Verify.
async fn audit(up: &Up, settled: bool) -> Result<(), Stop> {
    let pieces = up.client.pieces(&up.random);
    for piece in &pieces {
        up.client.audit(*piece, settled).await?;
    }
    for piece in pieces {
        up.client.verify(piece).await?;
    }
    Ok(())
}

/// Overwriting a damaged block heals it.
async fn rewrite(up: Up, lba: Lba) {
    let extent = Extent::one(lba);
    let healed = async {
        up.client.write(extent, true, &up.random).await?;
        up.client.read(extent).await?;
        up.client.verify(extent).await
    };
    if healed.await.is_ok() {
        up.close().await;
    }
}

/// One or two runs of failing I/Os.
fn draw_faults(random: &Random) -> Vec<FaultRule> {
    use sealblock_block::MediumErrorKind::{Failed, NoSpace};
    let rule = |_| {
        let on = *random.pick(&[IoKind::Write, IoKind::Write, IoKind::Sync, IoKind::Sync, IoKind::Punch, IoKind::Read]);
        // A machine makes fewer syncs than writes; a fault beyond the last one is none.
        let last = if on == IoKind::Sync { 40 } else { 120 };
        FaultRule {
            on,
            first: random.between(1, last),
            count: *random.pick(&[1, 1, 1, 2, 10, 1_000_000]),
            how: if on == IoKind::Read || random.chance(50) { Failed } else { NoSpace },
            forgets: random.chance(50),
        }
    };
    (0..random.between(1, 2)).map(rule).collect()
}
