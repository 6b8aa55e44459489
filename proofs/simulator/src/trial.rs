//! One seed from beginning to end: creates a device, uses it, stops the machine, checks, and continues with the disk.
//!
//! Everything follows from the seed: profile, disk, loads, where each machine stops, what survives, how often recovery
//! is itself stopped, and where damage is injected. In some seeds a read-only machine checks first after each stop;
//! later machines must see the same content.

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
use crate::machine::{MachineConfig, MachineEnd, MachineResult, RunningMachine};
use crate::random::{Random, Trace};
use crate::system::{System, VolumeProfile};
use crate::workload::{self, Workload};

/// How long, and how often, a machine is idle in some seeds; afterwards everything is committed and has its second
/// copy. A timer may fire early while tasks are ready; it is practically impossible that all of them do so before the
/// worker has run.
const REST: Duration = Duration::from_millis(500);
const RESTS: usize = 8;

/// The configuration of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TrialConfig {
    /// The seed of all random choices.
    pub seed: u64,
    /// The load.
    pub workload: Workload,
    /// Where the machine that is first under load stops, if not at random: its n-th start or end of an I/O.
    pub crash_at: Option<u64>,
}

/// The counters of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Report {
    /// Machines that were stopped.
    pub crashes: u64,
    /// How many of these were stopped during recovery from an earlier crash.
    pub recovery_crashes: u64,
    /// I/Os of all machines.
    pub ios: u64,
    /// Requests that succeeded.
    pub completed: u64,
    /// Requests that failed by a planned fault.
    pub failed: u64,
    /// Blocks whose content was compared with the permitted ones.
    pub blocks_checked: u64,
    /// Injected damage that was found.
    pub damages_found: u64,
    /// Disks with injected bit rot on which each block was right or found to be damaged.
    pub decays: u64,
    /// Resizes that were started.
    pub resizings: u64,
    /// Logs and other metadata that were damaged between a crash and the next start.
    pub corrupted: u64,
    /// True if the machine that is first under load stopped at the requested point.
    pub first_crashed: bool,
    /// The hash of all events.
    pub trace: u64,
}

impl std::ops::AddAssign for Report {
    fn add_assign(&mut self, other: Report) {
        self.crashes += other.crashes;
        self.recovery_crashes += other.recovery_crashes;
        self.ios += other.ios;
        self.completed += other.completed;
        self.failed += other.failed;
        self.blocks_checked += other.blocks_checked;
        self.damages_found += other.damages_found;
        self.decays += other.decays;
        self.corrupted += other.corrupted;
        self.resizings += other.resizings;
        self.trace = crate::random::mix(self.trace ^ other.trace);
    }
}

/// A violation, and the events before it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FailureReport {
    /// The command that reproduces it.
    pub config: TrialConfig,
    /// The violation.
    pub finding: String,
    /// The events before it, one line for each machine.
    pub log_lines: Vec<String>,
}

impl fmt::Display for FailureReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "seed {} of {}: {}", self.config.seed, self.config.workload.name(), self.finding)?;
        self.log_lines.iter().try_for_each(|line| writeln!(f, "    {line}"))
    }
}

/// Runs one seed.
///
/// # Errors
/// The first violation.
pub fn run<S: System>(system: &S, config: TrialConfig) -> Result<Report, Box<FailureReport>> {
    let random = Random::new(config.seed ^ ((config.workload as u64) << 56));
    // A separate generator, so that the rest of a seed does not depend on notes.
    let notes = Random::new(config.seed ^ ((config.workload as u64) << 48) ^ (1 << 41));
    let profile = VolumeProfile::draw(config.workload, &random).with_notes(config.workload, &notes);
    let patterns = Patterns::new(random.word(), profile.block_size, profile.protection);
    let (parts, unit_blocks) = system.parts(&profile);
    // A separate generator, so that a seed without resizes stays the same.
    let sizes = Random::new(config.seed ^ ((config.workload as u64) << 48) ^ (1 << 40));
    let mut trial = Trial {
        system,
        config,
        profile,
        checker: Rc::new(RefCell::new(Checker::new(patterns).in_parts(parts, unit_blocks))),
        random,
        trace: Trace::default(),
        report: Report::default(),
        log_lines: vec![profile.to_string()],
        is_durable: true,
        has_started: false,
        was_idle: false,
        long_durable: Vec::new(),
        earlier: Vec::new(),
        damaged_kind: None,
        keeps_length: sizes.chance(25),
        sizes,
        capacities: vec![profile.capacity_blocks],
        undoable: Vec::new(),
    };
    match trial.run_all() {
        Ok(()) => {
            trial.report.blocks_checked = trial.checker.borrow().blocks_checked();
            trial.report.trace = trial.trace.hash();
            Ok(trial.report)
        }
        Err(finding) => Err(Box::new(FailureReport { config, finding, log_lines: trial.log_lines })),
    }
}

struct Trial<'a, S> {
    system: &'a S,
    config: TrialConfig,
    profile: VolumeProfile,
    checker: Rc<RefCell<Checker>>,
    random: Random,
    trace: Trace,
    report: Report,
    log_lines: Vec<String>,
    /// True if the last machine under load had opened the device, so that its log has no older damage.
    has_started: bool,
    /// True if the last load had ended and its machine was idle for a while before it stopped.
    was_idle: bool,
    /// True if the last stop was a power cut, so that the content of the disk is durable.
    is_durable: bool,
    /// Blocks that had no write in flight when the last load ended: damage to them must be found.
    long_durable: Vec<Lba>,
    /// The kind of metadata in which a damaged copy may not be repaired yet; until then no other kind may be damaged.
    damaged_kind: Option<usize>,
    /// The content of the disk before the last load.
    earlier: Vec<(u64, Slice)>,
    /// Random choices for resizes.
    sizes: Random,
    /// All sizes of the device so far, in blocks.
    capacities: Vec<u64>,
    /// Sizes that a power cut may bring back, because the resizes were only seen after a kill.
    undoable: Vec<u64>,
    /// True if the disk keeps its length and is longer than the device.
    keeps_length: bool,
}

impl<S: System> Trial<'_, S> {
    fn run_all(&mut self) -> Result<(), String> {
        let mut image = self.create()?;
        let machines = self.random.between(1, 4);
        for machine in 0..machines {
            if machine + 1 == machines || self.random.chance(30) {
                self.earlier = image.visible().map(|(sector, bytes)| (sector, bytes.clone())).collect();
            }
            image = self.load(image, machine == 0)?;
            self.corrupt_metadata(&mut image);
            image = self.check_read_only(image)?;
            image = self.recover(image)?;
            image = self.resize(image)?;
        }
        self.end(image)
    }

    fn config(&self, behaviour: Behaviour, survival: Survival) -> MachineConfig<'_, S> {
        MachineConfig {
            system: self.system,
            profile: self.profile,
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

    /// Records the result of a machine.
    fn record_run(
        &mut self,
        what: &str,
        survival: Survival,
        result: MachineResult,
    ) -> Result<(Image, MachineEnd), String> {
        self.report.ios += result.counts.ios;
        self.report.completed += result.completed;
        self.report.failed += result.failed;
        let (ended, crashed) = match &result.end {
            Ok(MachineEnd::Finished) => ("ended", false),
            Ok(MachineEnd::Crashed) => ("was stopped", true),
            Err(_) => ("failed", false),
        };
        self.report.crashes += u64::from(crashed);
        self.is_durable = survival.is_power_cut();
        if self.is_durable {
            self.undoable.clear();
        }
        let counts = result.counts;
        self.log_lines.push(format!(
            "{what} {ended} after {} boundaries ({} I/Os, {} answered, {} failed); then {survival}",
            counts.boundaries, counts.ios, result.completed, result.failed
        ));
        Ok((result.image, result.end?))
    }

    /// Makes the device; sometimes the first attempt is stopped.
    fn create(&mut self) -> Result<Image, String> {
        let mut image = Image::blank(self.profile.sector_bytes, self.disk_bytes());
        if self.random.chance(10) {
            let survival = Survival::draw_of_process(&self.random);
            let crash_at = Some(self.random.between(1, 14));
            let result = self.config(self.behaviour(crash_at), survival).create(image);
            image = self.record_run("a first attempt to create", survival, result)?.0;
        }
        let survival = Survival::Nothing;
        let result = self.config(self.behaviour(None), survival).create(image);
        Ok(self.record_run("creation", survival, result)?.0)
    }

    /// One machine under load.
    fn load(&mut self, image: Image, first: bool) -> Result<Image, String> {
        let (workload, survival) = (self.config.workload, Survival::draw_of_process(&self.random));
        let drawn = self.random.chance(85).then(|| self.random.between(1, workload.likely_boundaries()));
        let crash_at = if first { self.config.crash_at.or(drawn) } else { drawn };
        let mut behaviour = self.behaviour(crash_at);
        if workload == Workload::Faulty {
            behaviour.faults = draw_faults(&self.random);
            self.log_lines.extend(behaviour.faults.iter().map(|rule| format!("for the next machine, {rule}")));
        }
        let (closes, rests, is_durable) = (self.random.chance(50), self.random.chance(50), self.is_durable);
        let is_faulty = !behaviour.faults.is_empty();
        let misreads = behaviour.faults.iter().any(|rule| rule.on == IoKind::Read);
        let has_started = Rc::new(Cell::new(false));
        let is_up = Rc::clone(&has_started);
        let result = self.config(behaviour, survival).run_machine(image, false, move |up| async move {
            is_up.set(true);
            if audit(&up, is_durable).await.is_err() {
                return;
            }
            workload::drive(workload, &up.client, &up.executor, &up.random).await;
            if closes && up.client.context().finding.borrow().is_none() {
                up.close().await;
            } else if rests {
                for _ in 0..RESTS {
                    up.executor.delay(REST).await;
                }
            }
        });
        let (image, end) = self.record_run("a machine under load", survival, result)?;
        if misreads {
            self.checker.borrow_mut().doubt_all();
        }
        self.has_started = has_started.get();
        self.was_idle = rests && !is_faulty && end == MachineEnd::Finished;
        self.long_durable = self.checker.borrow().long_durable();
        if first {
            self.report.first_crashed = end == MachineEnd::Crashed;
        }
        Ok(image)
    }

    /// Damages the log of the last machine, or other metadata that has two copies. Nothing durable may be lost by this,
    /// except the last small commit of a machine that had no time to write its second copy.
    fn corrupt_metadata(&mut self, image: &mut Image) {
        let kinds = self.system.redundant(&self.profile, image);
        if kinds.is_empty() || !self.is_durable || !self.has_started || !self.random.chance(60) {
            return;
        }
        let single_copy = if self.was_idle { Vec::new() } else { self.system.single_copy(&self.profile, image) };
        // The first kind is the log; after an idle time any part of it may be damaged.
        let is_log = self.was_idle && self.random.chance(75);
        let kind = if is_log { 0 } else { self.random.below(kinds.len() as u64) as usize };
        if !kinds[kind].is_repaired_at_open && *self.damaged_kind.get_or_insert(kind) != kind {
            return;
        }
        if let Some(what) = Damage::corrupt(image, &kinds[kind].runs, &single_copy, &self.earlier, &self.random) {
            self.log_lines.push(what);
            self.report.corrupted += 1;
            // The metadata that distinguishes damaged data from writes that never arrived may be damaged too.
            self.long_durable.clear();
        }
    }

    /// A read-only machine checks; then, in some seeds, damage is injected and a read-only machine must find it.
    fn check_read_only(&mut self, mut image: Image) -> Result<Image, String> {
        if !self.random.chance(60) {
            return Ok(image);
        }
        let candidates = std::mem::take(&mut self.long_durable);
        image = self.look_only(image)?;
        if self.is_durable
            && self.random.chance(40)
            && let Some(damage) = self.damage(&mut image, &candidates)
        {
            image = self.find(image, &damage, true)?;
            damage.repair(&mut image);
        }
        Ok(image)
    }

    /// Damages one of `candidates`. Without tags no check could find damage, so none is injected then.
    fn damage(&self, image: &mut Image, candidates: &[Lba]) -> Option<Damage> {
        self.profile.protection.filter(|_| self.system.finds_damage())?;
        Damage::inflict(image, &self.checker.borrow(), candidates, &self.random)
    }

    fn reader(&self) -> Behaviour {
        let read_only = self.random.chance(50);
        Behaviour { read_only, forbid_writes: true, ..self.behaviour(None) }
    }

    fn look_only(&mut self, image: Image) -> Result<Image, String> {
        let (is_durable, survival) = (self.is_durable, Survival::Kill);
        let result = self.config(self.reader(), survival).run_machine(image, true, move |up| async move {
            let _ = audit(&up, is_durable).await;
        });
        let (image, _) = self.record_run("a reader", survival, result)?;
        // A read-only machine writes nothing, so what is durable does not change.
        self.is_durable = is_durable;
        Ok(image)
    }

    /// A machine on a damaged disk must find exactly the damage.
    fn find(&mut self, image: Image, damage: &Damage, read_only: bool) -> Result<Image, String> {
        let (lba, survival, is_durable) = (damage.lba, Survival::Kill, self.is_durable);
        let behaviour = if read_only { self.reader() } else { self.behaviour(None) };
        let result = self.config(behaviour, survival).run_machine(image, read_only, move |up| async move {
            for piece in up.client.pieces(&up.random) {
                if up.client.expect_damage(piece, lba).await.is_err() {
                    return;
                }
            }
            if !read_only {
                rewrite(up, lba).await;
            }
        });
        let (image, _) = self.record_run(&format!("a machine with damage in block {lba}"), survival, result)?;
        self.report.damages_found += 1;
        self.is_durable = is_durable;
        Ok(image)
    }

    /// Runs machines that are stopped during recovery.
    fn recover(&mut self, mut image: Image) -> Result<Image, String> {
        while self.random.chance(35) {
            let survival = Survival::draw_of_process(&self.random);
            let crash_at = Some(self.random.between(1, 40));
            let is_durable = self.is_durable;
            let result =
                self.config(self.behaviour(crash_at), survival).run_machine(image, false, move |up| async move {
                    let _ = audit(&up, is_durable).await;
                });
            let (left, end) = self.record_run("a recovery", survival, result)?;
            self.report.recovery_crashes += u64::from(end == MachineEnd::Crashed);
            image = self.check_read_only(left)?;
        }
        Ok(image)
    }

    /// Runs the last machine: all data must be there; it is closed, and damage after that must be found.
    fn end(&mut self, image: Image) -> Result<(), String> {
        let (is_durable, survival) = (self.is_durable, Survival::Nothing);
        let result = self.config(self.behaviour(None), survival).run_machine(image, false, move |up| async move {
            if audit(&up, is_durable).await.is_ok() {
                up.close().await;
            }
        });
        let mut image = self.record_run("the last machine", survival, result)?.0;
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

    /// With a corrupted sector on the disk, no block may read as a content that it never had.
    fn bit_rot(&mut self, mut image: Image) -> Result<(), String> {
        if self.profile.protection.is_none() || !self.system.finds_damage() {
            return Ok(());
        }
        let Some(what) = Damage::bit_rot(&mut image, &self.earlier, &self.random) else { return Ok(()) };
        self.log_lines.push(what);
        let read_only = self.random.chance(50);
        let behaviour = if read_only { self.reader() } else { self.behaviour(None) };
        let parts = MachineConfig { decayed: true, ..self.config(behaviour, Survival::Kill) };
        let result = parts.run_machine(image, read_only, move |up| async move {
            for piece in up.client.pieces(&up.random) {
                if up.client.check_decayed(piece).await.is_err() {
                    return;
                }
            }
        });
        self.record_run("a machine with a decayed disk", Survival::Kill, result)?;
        self.report.decays += 1;
        Ok(())
    }
}

/// Reads every block: it must be readable, its content permitted, and Verify must find no damage.
async fn audit(up: &RunningMachine, is_durable: bool) -> Result<(), Stop> {
    let pieces = up.client.pieces(&up.random);
    for piece in &pieces {
        up.client.audit(*piece, is_durable).await?;
    }
    for piece in pieces {
        up.client.verify(piece).await?;
    }
    Ok(())
}

/// Overwrites a damaged block, which repairs it.
async fn rewrite(up: RunningMachine, lba: Lba) {
    let extent = Extent::one(lba);
    let repaired = async {
        up.client.write(extent, true, &up.random).await?;
        up.client.read(extent).await?;
        up.client.verify(extent).await
    };
    if repaired.await.is_ok() {
        up.close().await;
    }
}

/// One or two runs of failing I/Os.
fn draw_faults(random: &Random) -> Vec<FaultRule> {
    use sealblock_block::MediumErrorKind::{Failed, NoSpace};
    let rule = |_| {
        let on = *random.pick(&[IoKind::Write, IoKind::Write, IoKind::Sync, IoKind::Sync, IoKind::Punch, IoKind::Read]);
        // A machine makes fewer syncs than writes, and a fault after the last one has no effect.
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
