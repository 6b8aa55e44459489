//! One walk from beginning to end.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;

use sealblock_integrity::{GuardKind, PiFormat, ProtectionType};
use sealblock_layers_mirror::label::ReplicaState;
use sealblock_layers_mirror::{Mutation, TestHooks};
use sealblock_units::Lba;

use super::harness::{Harness, REPLICAS};
use super::model::ImageInfo;
use super::replica::{BLOCKS, Image, ReplicaLink};
use super::session::{SessionPlan, SessionResult, mark_alone, run as run_session};
use crate::executor::{Executor, RunEnd, RunLimits};
use crate::random::{Random, Trace};
use crate::trial::{FailureReport, Report, TrialConfig};
use crate::workload::Workload;

const LIMITS: RunLimits = RunLimits { steps: 2_000_000, seconds: 24 * 3600 };

/// The loads of walks: with little damage, and with much.
pub const LOADS: [Workload; 2] = [Workload::Mixed, Workload::Spoil];

/// The maximum number of saved images.
const MAX_IMAGES: usize = 16;

/// Runs one seed.
///
/// # Errors
/// The first violation.
pub fn run(mutation: Mutation, config: TrialConfig) -> Result<Report, Box<FailureReport>> {
    let random = Random::new(config.seed ^ ((config.workload as u64) << 56) ^ (1 << 49));
    let format = *random.pick(&[
        Some(PiFormat::with_default_storage_tag(GuardKind::Crc64, ProtectionType::Type1)),
        Some(PiFormat::with_default_storage_tag(GuardKind::Crc32c, ProtectionType::Type1)),
        Some(PiFormat::with_default_storage_tag(GuardKind::Crc16, ProtectionType::Type1)),
        None,
    ]);
    let region_shift = Some(random.between(0, 4) as u32);
    // Often fewer than the device has, so that groups evict others.
    let hooks = TestHooks { mutation, region_shift, hot_groups: Some(1 + (config.seed % 9) as u32) };
    let mut walk = Walk {
        config,
        hooks,
        harness: Rc::new(Harness::new(format, random.fork("world"))),
        random,
        trace: Trace::default(),
        members: BTreeSet::new(),
        taken_out: BTreeSet::new(),
        images: Vec::new(),
        report: Report::default(),
    };
    let done = walk.run_all();
    walk.report.ios = walk.harness.operations.get();
    walk.report.completed = walk.harness.completed.get();
    walk.report.failed = walk.harness.failed.get();
    walk.report.blocks_checked = walk.harness.checked.get();
    walk.report.trace = walk.trace.hash();
    match done {
        Ok(()) => Ok(walk.report),
        Err(finding) => Err(Box::new(FailureReport { config, finding, log_lines: walk.harness.log_lines.take() })),
    }
}

struct Walk {
    config: TrialConfig,
    hooks: TestHooks,
    harness: Rc<Harness>,
    random: Random,
    trace: Trace,
    /// The replicas that the operator believes to be members.
    members: BTreeSet<usize>,
    /// Removed replicas.
    taken_out: BTreeSet<usize>,
    /// Saved images, and their replicas.
    images: Vec<(usize, Image)>,
    report: Report,
}

impl Walk {
    fn run_all(&mut self) -> Result<(), String> {
        self.harness.log(format!(
            "{:?}, regions of {} blocks",
            self.harness.format,
            1 << self.hooks.region_shift.unwrap_or(0)
        ));
        self.members = (0..*self.random.pick(&[2, 2, 3, 3])).collect();
        self.make()?;
        for _ in 0..self.random.between(4, 14) {
            match self.random.below(100) {
                0..50 => self.any_session()?,
                50..63 => self.keep_image(),
                63..78 => self.restore_image(),
                78..84 => self.go_on_from_image()?,
                84..88 => self.open_taken_out()?,
                88..92 => self.corrupt(),
                92..95 => self.write_alone()?,
                95..97 => self.write_after_going_alone()?,
                _ => self.blank(),
            }
        }
        self.quiesce()
    }

    /// Makes the mirror, from blank devices or from one with content; the machine may stop meanwhile.
    fn make(&mut self) -> Result<(), String> {
        let all: Vec<usize> = self.members.iter().copied().collect();
        let (is_blank, stamp) = (self.random.chance(40), self.harness.fresh());
        for number in &all {
            let is_source = is_blank || *number == 0;
            let known =
                ImageInfo { node: is_source.then_some(0), holds: is_source.then_some(0), ..ImageInfo::default() };
            let mut image = Image::blank(ImageInfo { is_new: !is_source, ..known });
            if !is_blank && (is_source || self.random.chance(50)) {
                let blocks = image.fill(&self.random, self.harness.format, stamp + *number as u64);
                if is_source {
                    self.harness.model.borrow_mut().begin_with(&blocks, stamp);
                }
            }
            self.harness.put(*number, image);
        }
        for _ in &all {
            self.harness.fresh();
        }
        for tries in 0.. {
            let plan = SessionPlan { present: all.clone(), read_only: false, creates: true, ..self.plan(all.clone()) };
            let stops = tries < 3 && self.random.chance(40);
            self.session(plan, stops.then(|| self.random.between(1, 20)))?;
            if self.has_label(0) {
                break;
            }
        }
        Ok(())
    }

    /// The operator writes to one replica alone, after marking it as written alone.
    fn write_alone(&mut self) -> Result<(), String> {
        let number = self.random.below(REPLICAS as u64) as usize;
        if self.has_label(number) { self.write_to(number) } else { Ok(()) }
    }

    fn write_to(&mut self, number: usize) -> Result<(), String> {
        let replica = self.harness.replicas[number].clone();
        self.harness.log(format!("{} is written by itself", replica.name));
        replica.link.set(ReplicaLink::Up);
        let executor = Executor::new(self.random.fork("schedule"), self.trace.clone());
        let done = Rc::new(Cell::new(false));
        self.harness.acked.borrow_mut().clone_from(&replica.image.borrow().known.acked);
        self.harness.stop_in(self.random.chance(30).then(|| self.random.between(1, 3)));
        drop(
            executor
                .run(LIMITS, mark_alone(self.harness.clone(), executor.clone(), (number, self.hooks), done.clone())),
        );
        self.harness.stop_in(None);
        if done.get() {
            let mut image = replica.image.borrow_mut();
            let is_removed =
                image.label().is_some_and(|label| label.replicas[label.own_index].state == ReplicaState::Removed);
            if !is_removed {
                // Only this replica may have its content, so it must not be overwritten silently.
                image.known.node = None;
            }
            image.fill(&self.random, self.harness.format, self.harness.fresh());
        }
        self.harness.found().map_or(Ok(()), Err)
    }

    /// One replica is used in the mirror alone, is then written outside the mirror, and is combined with the others,
    /// which lack its changes.
    fn write_after_going_alone(&mut self) -> Result<(), String> {
        let all: Vec<usize> = self.members.iter().copied().collect();
        let number = *self.random.pick(&all);
        if all.len() < 2 || !self.has_label(number) {
            return Ok(());
        }
        let plan = SessionPlan { present: vec![number], read_only: false, closes: true, ..self.plan(all.clone()) };
        if self.session(plan, None)? {
            self.write_to(number)?;
            self.session(SessionPlan { present: all.clone(), ..self.plan(all) }, None)?;
        }
        Ok(())
    }

    fn plan(&self, named: Vec<usize>) -> SessionPlan {
        SessionPlan {
            named,
            present: Vec::new(),
            read_only: self.random.chance(8),
            creates: false,
            hooks: self.hooks,
            steps: self.random.between(1, 12),
            closes: self.random.chance(50),
            damage_percent: if self.config.workload == Workload::Spoil { 15 } else { 1 },
        }
    }

    fn has_label(&self, number: usize) -> bool {
        self.harness.labelled(number).is_some()
    }

    /// Chooses names as an operator might give them, in any order.
    fn draw_names(&self) -> Vec<usize> {
        let all: Vec<usize> = match self.random.below(10) {
            0 => (0..REPLICAS).filter(|number| self.has_label(*number)).collect(),
            _ => self.members.iter().copied().collect(),
        };
        let mut names: Vec<usize> = if self.random.chance(75) {
            all.clone()
        } else {
            all.iter().copied().filter(|_| self.random.chance(60)).collect()
        };
        if names.len() < 2 {
            names = all;
        }
        for at in (1..names.len()).rev() {
            names.swap(at, self.random.below(at as u64 + 1) as usize);
        }
        names
    }

    fn any_session(&mut self) -> Result<(), String> {
        let named = self.draw_names();
        let is_all = self.random.chance(45);
        let mut present: Vec<usize> = named.iter().copied().filter(|_| is_all || self.random.chance(60)).collect();
        // Devices that were never members do not make a mirror.
        if named.len() < 2 || !present.iter().any(|number| self.has_label(*number)) {
            return Ok(());
        }
        present.sort_unstable();
        let stops_in = self.random.chance(40).then(|| self.random.between(1, *self.random.pick(&[10, 40, 300])));
        let plan = SessionPlan { present, ..self.plan(named) };
        if !self.session(plan.clone(), stops_in)? && self.random.chance(40) {
            self.wipe_others(&plan.present);
        }
        Ok(())
    }

    /// Uses the mirror, restores a saved image of one member and uses it alone, and then combines all.
    fn go_on_from_image(&mut self) -> Result<(), String> {
        let all: Vec<usize> = self.members.iter().copied().collect();
        let number = *self.random.pick(&all);
        if all.len() < 2 || !self.has_label(number) {
            return Ok(());
        }
        let mut image = self.harness.replicas[number].image.borrow().clone();
        image.flush();
        if !self.session(SessionPlan { present: all.clone(), ..self.plan(all.clone()) }, None)? {
            return Ok(());
        }
        self.harness
            .log(format!("an image of {} from before that is put in its place", self.harness.replicas[number].name));
        self.harness.put(number, image);
        for present in [vec![number], all.clone()] {
            self.session(SessionPlan { present, ..self.plan(all.clone()) }, None)?;
        }
        Ok(())
    }

    /// The operator opens a removed replica, alone or with others.
    fn open_taken_out(&mut self) -> Result<(), String> {
        let out: Vec<usize> = self.taken_out.iter().copied().filter(|number| self.has_label(*number)).collect();
        let others: Vec<usize> = self.members.iter().copied().filter(|number| !out.contains(number)).collect();
        if out.is_empty() || others.is_empty() {
            return Ok(());
        }
        let (one, other) = (*self.random.pick(&out), *self.random.pick(&others));
        let present = if self.random.chance(70) { vec![one] } else { vec![one, other] };
        self.session(SessionPlan { present, ..self.plan(vec![one, other]) }, None).map(drop)
    }

    /// One replica is chosen to continue with; the others are wiped.
    fn wipe_others(&mut self, present: &[usize]) {
        let winner = *self.random.pick(present);
        for number in present.iter().filter(|number| **number != winner) {
            self.harness.log(format!("{} is abandoned and wiped", self.harness.replicas[*number].name));
            self.harness.put(*number, Image::blank(ImageInfo::default()));
        }
    }

    /// Runs a session; true if the mirror opened.
    fn session(&mut self, plan: SessionPlan, stops_in: Option<u64>) -> Result<bool, String> {
        let names = |numbers: &[usize]| -> String {
            numbers.iter().map(|number| self.harness.replicas[*number].name.as_str()).collect::<Vec<_>>().join(",")
        };
        let how = if plan.read_only { ", for reading only" } else { "" };
        self.harness.log(format!("mirror:{} with {} there{how}", names(&plan.named), names(&plan.present)));
        self.harness.log_labels(&plan.present);
        let executor = Executor::new(self.random.fork("schedule"), self.trace.clone());
        let mut acked = self.harness.acked.borrow_mut();
        acked.clear();
        for (known, label) in plan.present.iter().filter_map(|number| self.harness.labelled(*number)) {
            let own = (label.replicas[label.own_index].id, known.own);
            for (id, label) in known.acked.into_iter().chain([own]) {
                let last = acked.entry(id).or_default();
                *last = (*last).max(label);
            }
        }
        drop(acked);
        self.harness.stop_in(stops_in);
        let result = Rc::new(RefCell::new(SessionResult::default()));
        let main =
            run_session(self.harness.clone(), executor.clone(), plan.clone(), self.images.clone(), result.clone());
        let ended = executor.run(LIMITS, main);
        self.harness.stop_in(None);
        self.stop(&plan, &ended);
        let result = result.take();
        self.members.extend(&result.added);
        self.members.retain(|number| !result.removed.contains(number));
        self.taken_out.extend(&result.removed);
        self.taken_out.retain(|number| !result.added.contains(number));
        if let RunEnd::Stuck(stuck) = ended {
            return Err(stuck.to_string());
        }
        self.harness.found().map_or(Ok(result.opened), Err)
    }

    /// The machine has stopped; takes over its result.
    fn stop(&mut self, plan: &SessionPlan, ended: &RunEnd<()>) {
        let is_stopped = matches!(ended, RunEnd::Halted);
        self.report.crashes += u64::from(is_stopped);
        let is_power_cut = is_stopped && self.random.chance(50);
        if self.harness.session.borrow().is_none() {
            return;
        }
        self.harness.log(format!("    it {}", if is_power_cut { "loses power" } else { "ends" }));
        // Reads leave no trace, so with other replicas another content may be read.
        let untouched = self.harness.session.borrow().as_ref().map(|session| session.opened.clone());
        if let Some(untouched) = untouched.filter(|_| is_stopped) {
            self.harness.advance(|model, node, state| {
                model.stop(node, if plan.read_only { untouched } else { state }, is_power_cut)
            });
        }
        for replica in &self.harness.replicas {
            let replica_state = self.harness.replica_state(replica);
            let mut image = replica.image.borrow_mut();
            if replica_state.is_none() || replica.link.get() == ReplicaLink::Gone {
                continue;
            }
            if is_power_cut {
                image.lose_power(&self.random);
                let has_all = !replica.is_swapped.get() && matches!(replica_state, Some((ReplicaState::InSync, _)));
                if let Some(node) = image.known.node.filter(|_| !has_all) {
                    let mut model = self.harness.model.borrow_mut();
                    let state = model.state(node).clone();
                    let cut = model.stop(node, state, true);
                    image.known.node = Some(cut);
                    if image.known.holds == Some(node) {
                        image.known.holds = Some(cut);
                    }
                }
            } else if !is_stopped && plan.closes {
                image.flush();
            }
        }
        self.harness.session.borrow_mut().take();
    }

    /// Saves an image of a replica.
    fn keep_image(&mut self) {
        let number = self.random.below(REPLICAS as u64) as usize;
        if !self.has_label(number) {
            return;
        }
        let mut image = self.harness.replicas[number].image.borrow().clone();
        image.flush();
        self.harness.log(format!("an image of {} is kept", self.harness.replicas[number].name));
        self.images.push((number, image));
        if self.images.len() > MAX_IMAGES {
            self.images.remove(0);
        }
    }

    /// Restores an old image, mostly to its own replica.
    fn restore_image(&mut self) {
        if self.images.is_empty() {
            return self.keep_image();
        }
        let (from, image) = self.random.pick(&self.images).clone();
        let to = if self.random.chance(90) { from } else { self.random.below(REPLICAS as u64) as usize };
        let name = |number: usize| &self.harness.replicas[number].name;
        self.harness.log(format!("an old image of {} is put in the place of {}", name(from), name(to)));
        self.harness.put(to, image);
    }

    fn corrupt(&mut self) {
        let number = self.random.below(REPLICAS as u64) as usize;
        let replica = self.harness.replicas[number].clone();
        let (first, blocks) = (self.random.below(BLOCKS), self.random.between(1, 8));
        for block in first..(first + blocks).min(BLOCKS) {
            if replica.image.borrow_mut().damage(Lba::new(block), &self.random) {
                self.harness.log(format!("block {block} of {} is damaged", replica.name));
            }
        }
    }

    fn blank(&mut self) {
        let number = self.random.below(REPLICAS as u64) as usize;
        self.harness.log(format!("{} is wiped", self.harness.replicas[number].name));
        self.harness.put(number, Image::blank(ImageInfo::default()));
    }

    /// Combines all members and quiesces them.
    fn quiesce(&mut self) -> Result<(), String> {
        let all: Vec<usize> = self.members.iter().copied().collect();
        if all.len() < 2 || !all.iter().any(|number| self.has_label(*number)) {
            return Ok(());
        }
        let plan = SessionPlan {
            present: all.clone(),
            read_only: false,
            steps: 12,
            closes: true,
            damage_percent: 0,
            ..self.plan(all)
        };
        self.session(plan, None).map(drop)
    }
}
