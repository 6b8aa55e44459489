//! One seed from beginning to end: makes replicas, uses their mirror on several machines, and checks it once it is
//! quiesced.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use sealblock_layers_mirror::label::assemble::AssembleError;
use sealblock_layers_mirror::label::{Label, ReplicaState};
use sealblock_layers_mirror::{MirrorError, Mutation};
use sealblock_runtime_memory::Slice;

use super::events::disturb;
use super::harness::Harness;
use super::machine::{MachineSetup, OpenConfig, RunningMirror};
use super::quiesced::quiesce_and_compare;
use super::replica::Replica;
use super::replica_env::ReplicaEnv;
use crate::checker::{Checker, Patterns};
use crate::client::{RunContext, Stop};
use crate::disk::{Behaviour, Survival};
use crate::executor::{Executor, RunEnd, RunLimits};
use crate::random::{Random, Trace};
use crate::system::VolumeProfile;
use crate::trial::{FailureReport, Report, TrialConfig};
use crate::workload::{self, Workload};

const LIMITS: RunLimits = RunLimits { steps: 5_000_000, seconds: 24 * 3600 };

/// The loads for mirrors.
pub const LOADS: [Workload; 9] = [
    Workload::Mixed,
    Workload::Forced,
    Workload::Laps,
    Workload::Hot,
    Workload::Trim,
    Workload::Crowd,
    Workload::Idle,
    Workload::Spoil,
    Workload::Abandon,
];

/// Runs one seed.
///
/// # Errors
/// The first violation.
pub fn run(mutation: Mutation, config: TrialConfig) -> Result<Report, Box<FailureReport>> {
    let random = Random::new(config.seed ^ ((config.workload as u64) << 56) ^ (1 << 48));
    let mut profile = VolumeProfile::draw(config.workload, &random);
    profile.capacity_blocks = profile.capacity_blocks.min(300);
    let patterns = Patterns::new(random.word(), profile.block_size, profile.protection);
    let factor = *random.pick(&[1, 30, 300, 3_000]);
    let region_shift = random.between(1, 6) as u32;
    // Often fewer than the device has, so that groups evict one another.
    let hot_groups = 1 + (config.seed % 9) as u32;
    let open_config = OpenConfig { mutation, region_shift, hot_groups, random: [7; 16], factor };
    let mut trial = Trial {
        config,
        profile,
        open_config,
        checker: Rc::new(RefCell::new(Checker::new(patterns))),
        random,
        trace: Trace::default(),
        report: Report::default(),
        log_lines: vec![format!(
            "{profile}, regions of {} blocks, clock times {factor}",
            1u64 << open_config.region_shift
        )],
        replicas: Vec::new(),
        is_durable: true,
        changes: 0,
        cut_at: config.crash_at,
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

pub(super) struct Trial {
    pub config: TrialConfig,
    pub profile: VolumeProfile,
    pub open_config: OpenConfig,
    pub checker: Rc<RefCell<Checker>>,
    pub random: Random,
    pub trace: Trace,
    pub report: Report,
    pub log_lines: Vec<String>,
    pub replicas: Vec<Replica>,
    /// True if all replicas had a power cut at the last stop, so that the content is durable.
    pub is_durable: bool,
    /// Changes that the mirror has completed so far.
    pub changes: u64,
    /// The remaining starts and ends of I/Os until the stop that was requested on the command line.
    pub cut_at: Option<u64>,
}

/// The plan of a machine.
pub(super) struct MachinePlan {
    pub what: &'static str,
    /// The present replicas.
    pub present: Vec<bool>,
    /// True if it is stopped at a random point.
    pub stops: bool,
    /// The number of starts and ends of I/Os of all replicas after which it stops, if given.
    pub cut: Option<u64>,
    /// True if replicas are named in random order.
    pub is_any_order: bool,
    /// True if a disk was damaged on purpose.
    pub is_damaged: bool,
    pub checker: Rc<RefCell<Checker>>,
}

/// The result of a machine.
pub(super) struct MachineResult {
    pub refused: Option<MirrorError>,
    pub completed_changes: u64,
    /// True if it was stopped.
    pub is_stopped: bool,
    /// True if a mirror was open.
    pub was_open: bool,
    /// The remaining starts and ends of I/Os until its stop.
    pub left: u64,
}

impl Trial {
    fn run_all(&mut self) -> Result<(), String> {
        let count = *self.random.pick(&[2, 2, 2, 3, 3, 4]);
        let (mut has_spare, mut has_unlabelled) = (self.random.chance(30), self.random.chance(15));
        if self.config.crash_at.is_some() {
            // The point of this option is to stop during the first label writes and replacements.
            (has_spare, has_unlabelled) = (true, false);
        }
        for number in 0..count + usize::from(has_spare) {
            let mut profile = self.profile;
            profile.uuid[8] = number as u8 + 1;
            let mut replica = Replica::create(profile, &self.random, &self.trace)?;
            replica.has_no_label = has_unlabelled && number == 1;
            if replica.has_no_label {
                self.log_lines.push("replica 1 keeps no label".to_owned());
            }
            if number == count {
                (replica.is_spare, replica.is_member, replica.is_current) = (true, false, false);
            }
            self.replicas.push(replica);
        }
        self.make()?;
        if self.config.crash_at.is_some() {
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
            if self.has_everything(&present) { self.run_machine(present)? } else { self.split_brain(present)? }
        }
        self.end()
    }

    /// Counts down to the requested stop.
    pub fn record_cut(&mut self, cut: Option<u64>, left: u64, is_stopped: bool) {
        if cut.is_some() && self.cut_at.is_some() {
            self.report.first_crashed = is_stopped;
            self.cut_at = (!is_stopped).then_some(left);
        }
    }

    /// True if a refusal is correct although nothing was lost. The last label of an out-of-sync replica was written
    /// before a change, may have been in flight, and lists another replica as out of sync that has become in sync since
    /// then. To that label, the others could also be an older image, restored from just before it, that continued
    /// alone; so they are refused together.
    pub fn is_in_doubt(&self, error: &MirrorError) -> bool {
        matches!(error, MirrorError::Assemble { error: AssembleError::SplitBrain { .. }, .. }) && self.has_doubt()
    }

    fn has_doubt(&self) -> bool {
        // By its own label: such a replica may have failed since.
        let is_listed =
            |replica: &&Replica| replica.is_current || replica.is_in_use() && replica.calls_itself_current();
        let current: Vec<_> = self.replicas.iter().filter(is_listed).filter_map(Replica::own_label).collect();
        let lacks = |label: &Label| {
            let is_missing = |id| label.replicas.iter().any(|of| of.id == id && of.state != ReplicaState::InSync);
            let is_own_current = label.replicas[label.own_index].state == ReplicaState::InSync;
            label.is_tentative
                && is_own_current
                && current.iter().any(|other| is_missing(other.replicas[other.own_index].id))
        };
        let others = self.replicas.iter().filter(|replica| replica.is_in_use() && !replica.is_current);
        others.filter_map(Replica::own_label).any(|label| lacks(&label))
    }

    /// True if a refusal names an offline replica that may have more writes than its own label and those of the others
    /// show.
    pub fn is_none_in_sync(error: &MirrorError) -> bool {
        matches!(error, MirrorError::Assemble { error: AssembleError::NoneInSync, .. })
    }

    pub fn plan(&self, what: &'static str, present: Vec<bool>) -> MachinePlan {
        MachinePlan {
            what,
            present,
            stops: false,
            cut: None,
            is_any_order: false,
            is_damaged: false,
            checker: self.checker.clone(),
        }
    }

    pub fn all_present(&self) -> Vec<bool> {
        vec![true; self.replicas.len()]
    }

    /// True if a present replica has all data and its label proves that.
    pub fn has_everything(&self, present: &[bool]) -> bool {
        self.replicas
            .iter()
            .zip(present)
            .any(|(replica, present)| *present && replica.is_current && !replica.has_no_label)
    }

    fn draw_present(&self) -> Vec<bool> {
        let present: Vec<bool> = self.replicas.iter().map(|_| self.random.chance(65)).collect();
        let is_anybody = self
            .replicas
            .iter()
            .zip(&present)
            .any(|(replica, present)| *present && replica.is_in_use() && !replica.has_no_label);
        let has_unlabelled = self.replicas.iter().any(|replica| replica.has_no_label);
        let is_fine = is_anybody && (!has_unlabelled || self.has_everything(&present));
        if self.random.chance(50) || !is_fine { self.all_present() } else { present }
    }

    /// One machine under load.
    fn run_machine(&mut self, present: Vec<bool>) -> Result<(), String> {
        let (workload, is_durable) = (self.config.workload, self.is_durable);
        let must_open = self.replicas.iter().zip(&present).all(|(replica, present)| *present || !replica.is_current);
        let (stops, is_any_order) = (self.random.chance(60), self.random.chance(50));
        let plan = MachinePlan { stops, is_any_order, ..self.plan("a machine under load", present) };
        let result = self.machine(plan, move |running| async move {
            under_load(&running, workload, is_durable).await;
        })?;
        match result.refused {
            None => Ok(()),
            // Its own label may not have been written since the resync.
            Some(MirrorError::Assemble { error: AssembleError::NoneInSync, .. }) if !must_open => Ok(()),
            Some(error) if self.is_in_doubt(&error) => Ok(()),
            Some(error) => Err(format!("the mirror could not be opened: {error}")),
        }
    }

    /// The last machine: the mirror is quiesced.
    fn end(&mut self) -> Result<(), String> {
        let is_durable = self.is_durable;
        let plan = MachinePlan { is_any_order: true, ..self.plan("the last machine", self.all_present()) };
        let result = self.machine(plan, move |running| async move {
            if audit(&running, is_durable).await.is_ok() && quiesce_and_compare(&running).await.is_ok() {
                running.close().await;
            }
        })?;
        match result.refused {
            None => self.damage(),
            Some(error) if self.is_in_doubt(&error) => Ok(()),
            Some(error) => Err(format!("the mirror could not be opened: {error}")),
        }
    }

    /// Runs a machine with a mirror and records its result.
    pub fn machine<F: Future<Output = ()> + 'static>(
        &mut self,
        plan: MachinePlan,
        hosts: impl FnOnce(RunningMirror) -> F + 'static,
    ) -> Result<MachineResult, String> {
        let refused: Rc<Cell<Option<MirrorError>>> = Rc::default();
        let refusal = refused.clone();
        let result = self.stage(plan, move |stage| async move {
            match stage.open().await {
                Ok(running) => hosts(running).await,
                Err(error) => refusal.set(Some(error)),
            }
        })?;
        Ok(MachineResult { refused: refused.take(), ..result })
    }

    /// Runs any machine and records its result.
    pub fn stage<F: Future<Output = ()> + 'static>(
        &mut self,
        plan: MachinePlan,
        main: impl FnOnce(MachineSetup) -> F + 'static,
    ) -> Result<MachineResult, String> {
        let executor = Executor::new(self.random.fork("schedule"), self.trace.clone());
        let context =
            Rc::new(RunContext { executor: Some(executor.clone()), ..RunContext::new(plan.checker.clone(), true) });
        let replicas = self.replicas.len();
        let harness =
            Rc::new(Harness::new(context.clone(), self.open_config.region_shift, replicas, self.trace.clone()));
        harness.is_damaged.set(plan.is_damaged);
        harness.drops_requests.set(self.config.workload == Workload::Abandon);
        context.decayed.set(plan.is_damaged);
        *harness.missed_writes.borrow_mut() = self.replicas.iter().map(|replica| replica.missed_writes).collect();
        harness.is_any_order.set(plan.is_any_order && !self.replicas.iter().any(|replica| replica.has_no_label));
        harness.is_in_doubt.set(self.has_doubt());
        let fuse = plan.cut.map(|cut| Rc::new(Cell::new(cut)));
        harness.fuse.borrow_mut().clone_from(&fuse);
        self.place(&plan, &harness, &executor);
        let (random, mut open_config) = (self.random.fork("hosts"), self.open_config);
        // All random identities: of a mirror, of the distance between its labels, and of a session.
        open_config.random.as_chunks_mut::<8>().0.iter_mut().for_each(|part| *part = random.word().to_le_bytes());
        let stage = MachineSetup { harness: harness.clone(), executor: executor.clone(), random, open_config };
        let ended = executor.run(LIMITS, main(stage));
        let (completed_changes, was_open) = (harness.completed_changes.get(), harness.mirror.borrow().is_some());
        self.changes += completed_changes;
        self.record_run(&plan, &harness, &ended);
        let found = context.finding.borrow().clone();
        let stuck = if let RunEnd::Stuck(stuck) = &ended { Some(stuck.to_string()) } else { None };
        match found.or(stuck) {
            Some(finding) => Err(finding),
            None => Ok(MachineResult {
                refused: None,
                completed_changes,
                is_stopped: matches!(ended, RunEnd::Halted),
                was_open,
                left: fuse.map_or(0, |fuse| fuse.get()),
            }),
        }
    }

    /// Gives the replicas to a machine.
    fn place(&mut self, plan: &MachinePlan, harness: &Rc<Harness>, executor: &Executor) {
        let slow_percent = *self.random.pick(&[0, 3, 10]);
        let stops_on = plan.stops.then(|| self.random.below(self.replicas.len() as u64) as usize);
        let envs = self.replicas.iter_mut().enumerate().map(|(number, replica)| {
            let env = replica.env(number, harness, executor, &self.random);
            env.held.set(!plan.present[number]);
            let most = self.config.workload.likely_boundaries() * 3;
            let crash_at = (stops_on == Some(number)).then(|| self.random.between(1, most));
            *env.behaviour.borrow_mut() = Behaviour { crash_at, slow_percent, ..Behaviour::default() };
            env
        });
        *harness.envs.borrow_mut() = envs.collect();
    }

    /// Takes the replicas back, with what survived the stop.
    fn record_run(&mut self, plan: &MachinePlan, harness: &Rc<Harness>, ended: &RunEnd<()>) {
        let crashed = matches!(ended, RunEnd::Halted);
        self.report.crashes += u64::from(crashed);
        self.report.completed += harness.context.completed.get();
        self.report.failed += harness.context.failed.get();
        let (all, is_kill) = (Survival::draw(&self.random), self.random.chance(15));
        self.log_lines.push(format!("{} with replicas {:?}", plan.what, plan.present));
        self.log_lines.append(&mut harness.log_lines.borrow_mut());
        self.log_lines.push(format!("    it {}", if crashed { "was stopped" } else { "ended" }));
        self.is_durable = true;
        for (replica, env) in self.replicas.iter_mut().zip(harness.envs.borrow().iter()) {
            if self.random.chance(20) && replica.image.as_ref().is_none_or(|image| image.dirty_sectors() == 0) {
                replica.older = None;
            }
            let survival = if is_kill { Survival::Kill } else { all };
            let survival = if self.random.chance(50) && !is_kill { Survival::draw(&self.random) } else { survival };
            self.report.ios += env.disk.borrow().as_ref().map_or(0, |disk| disk.counts().ios);
            replica.take_over(harness, env, survival);
            self.log_lines.push(format!("    replica {}: {survival}; current: {}", env.number, replica.is_current));
            self.is_durable &= replica.has_only_durable();
            if replica.older.is_none() && replica.has_only_durable() {
                (replica.older, replica.older_at) = (replica.image.clone(), self.changes);
            }
        }
        let leaving: Vec<usize> =
            harness.envs.borrow().iter().filter(|env| env.is_leaving.get()).map(|env| env.number).collect();
        leaving.into_iter().for_each(|replica| self.decide_removal(replica));
        let replacing =
            |env: &Rc<ReplicaEnv>| env.replaces.get().filter(|_| !env.is_member.get()).map(|old| (env.number, old));
        let coming: Vec<(usize, usize)> = harness.envs.borrow().iter().filter_map(replacing).collect();
        coming.into_iter().for_each(|(new, old)| self.decide_replacement(new, old));
        match is_kill {
            true => plan.checker.borrow_mut().kill(),
            false => plan.checker.borrow_mut().crash(),
        }
        if harness.quiesced_count.get() > 0 {
            self.report.recovery_crashes += u64::from(crashed);
        }
        // Breaks the reference cycle.
        harness.envs.borrow_mut().clear();
        harness.mirror.borrow_mut().take();
    }

    /// A removal was in progress when the machine stopped, or had failed, so the labels decide whether the replica is
    /// removed.
    fn decide_removal(&mut self, replica: usize) {
        // Its own label is written first, and is decisive.
        let is_told = self.replicas[replica].own_state() == Some(ReplicaState::Removed);
        let is_recorded =
            || self.replicas[replica].is_recorded_as(&self.replicas, |state| state == ReplicaState::Removed);
        self.replicas[replica].is_removed = is_told || is_recorded();
        let is_left = self.replicas[replica].is_recorded_as(&self.replicas, |state| state != ReplicaState::InSync);
        self.replicas[replica].is_current = self.replicas[replica].calls_itself_current() && !is_left;
    }

    /// The content of a replica at an earlier stop, by sector.
    pub fn earlier(&self, replica: usize) -> Vec<(u64, Slice)> {
        let older = self.replicas[replica].older.as_ref();
        older.map_or_else(Vec::new, |image| image.visible().map(|(at, bytes)| (at, bytes.clone())).collect())
    }
}

async fn under_load(running: &RunningMirror, workload: Workload, is_durable: bool) {
    let done = Rc::new(Cell::new(false));
    let early = running.random.chance(40);
    let start = || running.executor.spawn("trouble", disturb(running.clone(), done.clone()));
    let task = early.then(start);
    if audit(running, is_durable).await.is_err() && running.harness.context.finding.borrow().is_some() {
        return running.executor.halt();
    }
    let task = if early || running.random.chance(20) { task } else { Some(start()) };
    let ending = running.random.fork("ending");
    if ending.chance(25) {
        let (running, executor) = (running.clone(), running.executor.clone());
        drop(executor.clone().spawn("ending", async move {
            executor.delay(Duration::from_micros(ending.between(0, 300_000))).await;
            running.close_in_time(&ending).await;
        }));
    }
    for _ in 0..running.random.between(1, 2) {
        workload::drive(workload, &running.client, &running.executor, &running.random).await;
    }
    done.set(true);
    if let Some(task) = task {
        task.await;
    }
    if running.random.chance(45) && quiesce_and_compare(running).await.is_ok() && running.random.chance(60) {
        running.close().await;
    }
}

/// Reads every block: the content must be permitted, and Verify must find no damage.
pub(super) async fn audit(running: &RunningMirror, is_durable: bool) -> Result<(), Stop> {
    let pieces = running.client.pieces(&running.random);
    for piece in &pieces {
        running.client.audit(*piece, is_durable).await?;
    }
    for piece in pieces {
        running.client.verify(piece).await?;
    }
    Ok(())
}
