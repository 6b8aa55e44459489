//! Creation of a mirror from blank devices or from one with content, with stops at any start or end of an I/O.
//!
//! At every point the source has its content, and an open reads it or is refused. Once an in-sync replica has its
//! label, the mirror opens, and a device without a label is added again.

use std::cell::RefCell;
use std::rc::Rc;

use sealblock_layers_mirror::MirrorError;
use sealblock_layers_mirror::label::ReplicaState;
use sealblock_units::Extent;

use super::machine::{MachineSetup, RunningMirror};
use super::quiesced::quiesce_and_compare;
use super::replica::Replica;
use super::trial::{MachinePlan, Trial, audit};
use crate::client::{Client, Stop};
use crate::workload::{self, Workload};

/// The usual number of starts and ends of I/Os while a mirror is made.
const LIKELY_BOUNDARIES: u64 = 250;

impl Trial {
    /// Makes the mirror, in as many attempts as needed.
    pub fn make(&mut self) -> Result<(), String> {
        if self.replicas.iter().any(|replica| replica.has_no_label) {
            let plan = self.plan("the first machine", self.all_present());
            let result = self.machine(plan, |running| async move { running.close().await })?;
            return result.refused.map_or(Ok(()), |error| Err(format!("a mirror could not be made: {error}")));
        }
        let has_content = self.random.chance(60);
        if has_content {
            self.fill_replicas()?;
        }
        for tries in 0.. {
            let cut = if tries < 3 { self.draw_cut(LIKELY_BOUNDARIES) } else { None };
            if self.make_once(has_content, cut)? {
                break;
            }
        }
        Ok(())
    }

    /// Where the next machine stops: at the point given on the command line, or at a random one below `before`.
    pub fn draw_cut(&mut self, before: u64) -> Option<u64> {
        let drawn = self.random.chance(50).then(|| self.random.between(1, before));
        self.cut_at.or(drawn.filter(|_| self.config.crash_at.is_none()))
    }

    /// Writes content to the first replica, which the mirror keeps, and perhaps to another one, which it does not keep.
    fn fill_replicas(&mut self) -> Result<(), String> {
        self.fill(0, self.checker.clone())?;
        if self.random.chance(40) {
            self.fill(1, self.blank_checker())?;
        }
        for (number, replica) in self.replicas.iter_mut().enumerate().filter(|(_, replica)| replica.is_member) {
            replica.is_current = number == 0;
            // The mirror must not write to the source.
            if number == 0 { replica.allowed.clear() } else { replica.allow_all() }
        }
        Ok(())
    }

    /// Writes to a device before it becomes a replica.
    fn fill(&mut self, replica: usize, checker: Rc<RefCell<crate::checker::Checker>>) -> Result<(), String> {
        self.replicas[replica].allow_all();
        let plan = MachinePlan { checker, ..self.plan("a device before there is a mirror", self.all_present()) };
        self.stage(plan, move |stage| async move { use_alone(&stage, replica).await }).map(drop)
    }

    /// Makes the mirror, or opens what already exists of it; returns whether it certainly exists.
    fn make_once(&mut self, has_content: bool, cut: Option<u64>) -> Result<bool, String> {
        let labels: Vec<bool> = self.replicas.iter().map(|replica| replica.own_label().is_some()).collect();
        let is_there = if has_content { labels[0] } else { labels.contains(&true) };
        // Blank devices also become a mirror when they are opened as one.
        let is_opened = is_there || (!has_content && self.random.chance(50));
        let (from, is_durable, is_ordered) =
            (has_content.then_some(0), self.is_durable, self.config.crash_at.is_some());
        let plan = MachinePlan { cut, ..self.plan("a machine that makes the mirror", self.all_present()) };
        let result = self.stage(plan, move |stage| async move {
            let harness = stage.harness.clone();
            let made = match is_opened {
                true => stage.open().await.map_err(|error| error.to_string()),
                false => stage.make(from).await.map_err(|error| error.to_string()),
            };
            match made {
                Ok(running) if is_ordered => quiesce_and_close(&running).await.unwrap_or(()),
                Ok(running) => first_steps(&running, is_durable).await,
                Err(error) => harness.find(format!("a mirror that may have been cut short cannot be made: {error}")),
            }
        })?;
        self.record_cut(cut, result.left, result.is_stopped);
        if result.is_stopped && !result.was_open {
            self.update_from_labels(has_content);
        }
        if !result.is_stopped {
            return Ok(true);
        }
        self.report.recovery_crashes += 1;
        let has_label = |replica: &Replica| replica.own_label().is_some();
        let is_there = if has_content { has_label(&self.replicas[0]) } else { self.replicas.iter().any(has_label) };
        let present: Vec<bool> = self.replicas.iter().map(|_| self.random.chance(50)).collect();
        self.check_open("a machine with what a cut has left of some", present, false)?;
        self.check_open("a machine with what a cut has left of all", self.all_present(), is_there || !has_content)?;
        Ok(is_there && self.random.chance(60))
    }

    /// If the mirror was never open, only labels show which replica has all data.
    fn update_from_labels(&mut self, has_content: bool) {
        let states: Vec<Option<ReplicaState>> = self.replicas.iter().map(Replica::own_state).collect();
        let is_any = states.iter().any(Option::is_some);
        for (number, (replica, state)) in self.replicas.iter_mut().zip(states).enumerate() {
            let is_source = number == 0 || !has_content;
            replica.is_current = replica.is_in_use() && (state == Some(ReplicaState::InSync) || (!is_any && is_source));
        }
    }

    /// Opens the mirror in isolation: the open must be refused, or reads must be right.
    pub fn check_open(&mut self, what: &'static str, present: Vec<bool>, must_open: bool) -> Result<(), String> {
        self.isolated(|trial| {
            trial.replicas.iter_mut().for_each(Replica::allow_all);
            let (is_durable, checker) = (trial.is_durable, Rc::new(RefCell::new(trial.checker.borrow().clone())));
            let plan = MachinePlan { checker, ..trial.plan(what, present) };
            let result = trial.machine(plan, move |running| async move {
                let _ = audit(&running, is_durable).await;
            })?;
            match result.refused {
                None => Ok(()),
                Some(MirrorError::Assemble { .. }) if !must_open => Ok(()),
                Some(error) if trial.is_in_doubt(&error) => Ok(()),
                Some(error) => Err(format!("{what}: {error}")),
            }
        })
    }
}

/// Uses a replica as a device on its own: writes to it and closes it.
async fn use_alone(stage: &MachineSetup, replica: usize) {
    let env = stage.harness.envs.borrow()[replica].clone();
    let Ok(stack) = stage.harness.open(&env).await else { return };
    let client = Client::new(stack, stage.harness.context.clone());
    for _ in 0..stage.random.between(1, 8) {
        let blocks = stage.random.between(1, client.capacity_blocks().min(8));
        let first = stage.random.below(client.capacity_blocks() - blocks + 1);
        let Ok(extent) = Extent::from_raw(first, blocks) else { return };
        if client.write(extent, stage.random.chance(20), &stage.random).await.is_err() {
            return;
        }
    }
    let close = env.close.borrow_mut().take();
    if let Some(close) = close
        && close.await.is_ok()
    {
        client.context().checker.borrow_mut().closed();
    }
}

/// Does everything that a mirror does in the background, so that it can be stopped at every point of it.
pub(super) async fn quiesce_and_close(running: &RunningMirror) -> Result<(), Stop> {
    quiesce_and_compare(running).await?;
    running.close().await;
    Ok(())
}

/// Briefly uses a mirror that was just made.
async fn first_steps(running: &RunningMirror, is_durable: bool) {
    if running.random.chance(60) && audit(running, is_durable).await.is_err() {
        return;
    }
    if running.random.chance(30) {
        workload::drive(Workload::Hot, &running.client, &running.executor, &running.random).await;
    }
    if running.random.chance(50) && quiesce_and_compare(running).await.is_err() {
        return;
    }
    if running.random.chance(60) {
        running.close().await;
    }
}
