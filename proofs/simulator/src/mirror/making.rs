//! How a mirror comes about, of blank devices or of one with content, and what a stop at any start or end of an I/O leaves
//! of that.
//!
//! At every point the content is where it was, whoever opens what is there reads it or is refused, and once a leg that has
//! everything has its label the mirror opens: what got none yet is made a leg again.

use std::cell::RefCell;
use std::rc::Rc;

use sealblock_layers_mirror::MirrorError;
use sealblock_layers_mirror::label::ReplicaState;
use sealblock_units::Extent;

use super::legs::Leg;
use super::machine::{Stage, Up};
use super::quiesced::settle;
use super::trial::{Plan, Trial, audit};
use crate::client::{Client, Stop};
use crate::workload::{self, Workload};

/// Starts and ends of I/Os that making a mirror is likely to take.
const LIKELY_BOUNDARIES: u64 = 250;

impl Trial {
    /// The mirror is made, as often as it takes.
    pub fn make(&mut self) -> Result<(), String> {
        if self.legs.iter().any(|leg| leg.bare) {
            let plan = self.plan("the first machine", self.everybody());
            let came = self.machine(plan, |up| async move { up.close().await })?;
            return came.refused.map_or(Ok(()), |error| Err(format!("a mirror could not be made: {error}")));
        }
        let has_content = self.random.chance(60);
        if has_content {
            self.fill_legs()?;
        }
        for tries in 0.. {
            let cut = if tries < 3 { self.draw_cut(LIKELY_BOUNDARIES) } else { None };
            if self.make_once(has_content, cut)? {
                break;
            }
        }
        Ok(())
    }

    /// Where the next machine is to be cut, if it is: where the order says, or somewhere before this.
    pub fn draw_cut(&mut self, before: u64) -> Option<u64> {
        let drawn = self.random.chance(50).then(|| self.random.between(1, before));
        self.cut_at.or(drawn.filter(|_| self.order.crash_at.is_none()))
    }

    /// The first leg gets content that counts, and perhaps another one content that does not.
    fn fill_legs(&mut self) -> Result<(), String> {
        self.fill(0, self.checker.clone())?;
        if self.random.chance(40) {
            self.fill(1, self.blank_checker())?;
        }
        for (number, leg) in self.legs.iter_mut().enumerate().filter(|(_, leg)| leg.is_member) {
            leg.is_current = number == 0;
            // Nothing may be written to the leg that has everything.
            if number == 0 { leg.allowed.clear() } else { leg.allow_all() }
        }
        Ok(())
    }

    /// Somebody uses a leg that is a device of its own still.
    fn fill(&mut self, leg: usize, checker: Rc<RefCell<crate::checker::Checker>>) -> Result<(), String> {
        self.legs[leg].allow_all();
        let plan = Plan { checker, ..self.plan("a device before there is a mirror", self.everybody()) };
        self.stage(plan, move |stage| async move { use_alone(&stage, leg).await }).map(drop)
    }

    /// Makes the mirror, or opens what there is of it; whether it is there for certain.
    fn make_once(&mut self, has_content: bool, cut: Option<u64>) -> Result<bool, String> {
        let labels: Vec<bool> = self.legs.iter().map(|leg| leg.own_label().is_some()).collect();
        let is_there = if has_content { labels[0] } else { labels.contains(&true) };
        // Blank devices become a mirror by being opened, too.
        let is_opened = is_there || (!has_content && self.random.chance(50));
        let (from, settled, is_ordered) = (has_content.then_some(0), self.settled, self.order.crash_at.is_some());
        let plan = Plan { cut, ..self.plan("a machine that makes the mirror", self.everybody()) };
        let came = self.stage(plan, move |stage| async move {
            let world = stage.world.clone();
            let made = match is_opened {
                true => stage.open().await.map_err(|error| error.to_string()),
                false => stage.make(from).await.map_err(|error| error.to_string()),
            };
            match made {
                Ok(up) if is_ordered => settle_and_close(&up).await.unwrap_or(()),
                Ok(up) => first_steps(&up, settled).await,
                Err(error) => world.find(format!("a mirror that may have been cut short cannot be made: {error}")),
            }
        })?;
        self.spend(cut, came.left, came.is_stopped);
        if came.is_stopped && !came.came_up {
            self.take_stock(has_content);
        }
        if !came.is_stopped {
            return Ok(true);
        }
        self.report.recovery_crashes += 1;
        let has_label = |leg: &Leg| leg.own_label().is_some();
        let is_there = if has_content { has_label(&self.legs[0]) } else { self.legs.iter().any(has_label) };
        let present: Vec<bool> = self.legs.iter().map(|_| self.random.chance(50)).collect();
        self.probe("a machine with what a cut has left of some", present, false)?;
        self.probe("a machine with what a cut has left of all", self.everybody(), is_there || !has_content)?;
        Ok(is_there && self.random.chance(60))
    }

    /// Of a mirror that never was up only labels tell who has everything.
    fn take_stock(&mut self, has_content: bool) {
        let standings: Vec<Option<ReplicaState>> = self.legs.iter().map(Leg::own_standing).collect();
        let is_any = standings.iter().any(Option::is_some);
        for (number, (leg, standing)) in self.legs.iter_mut().zip(standings).enumerate() {
            let is_source = number == 0 || !has_content;
            leg.is_current = leg.is_in_use() && (standing == Some(ReplicaState::InSync) || (!is_any && is_source));
        }
    }

    /// Somebody opens the mirror and sees what is right, or is refused; aside.
    pub fn probe(&mut self, what: &'static str, present: Vec<bool>, must_open: bool) -> Result<(), String> {
        self.aside(|trial| {
            trial.legs.iter_mut().for_each(Leg::allow_all);
            let (settled, checker) = (trial.settled, Rc::new(RefCell::new(trial.checker.borrow().clone())));
            let plan = Plan { checker, ..trial.plan(what, present) };
            let came = trial.machine(plan, move |up| async move {
                let _ = audit(&up, settled).await;
            })?;
            match came.refused {
                None => Ok(()),
                Some(MirrorError::Assemble { .. }) if !must_open => Ok(()),
                Some(error) if trial.is_in_doubt(&error) => Ok(()),
                Some(error) => Err(format!("{what}: {error}")),
            }
        })
    }
}

/// Writes to a leg that is a device of its own, and closes it.
async fn use_alone(stage: &Stage, leg: usize) {
    let site = stage.world.sites.borrow()[leg].clone();
    let Ok(stack) = site.open().await else { return };
    let client = Client::new(stack, stage.world.ledger.clone());
    for _ in 0..stage.random.between(1, 8) {
        let blocks = stage.random.between(1, client.capacity_blocks().min(8));
        let first = stage.random.below(client.capacity_blocks() - blocks + 1);
        let Ok(extent) = Extent::from_raw(first, blocks) else { return };
        if client.write(extent, stage.random.chance(20), &stage.random).await.is_err() {
            return;
        }
    }
    let close = site.close.borrow_mut().take();
    if let Some(close) = close
        && close.await.is_ok()
    {
        client.ledger().checker.borrow_mut().closed();
    }
}

/// All that a mirror needs to do by itself, so that every point of it may be cut.
pub(super) async fn settle_and_close(up: &Up) -> Result<(), Stop> {
    settle(up).await?;
    up.close().await;
    Ok(())
}

/// What is done with a mirror that was just made: nothing much.
async fn first_steps(up: &Up, settled: bool) {
    if up.random.chance(60) && audit(up, settled).await.is_err() {
        return;
    }
    if up.random.chance(30) {
        workload::drive(Workload::Hot, &up.client, &up.executor, &up.random).await;
    }
    if up.random.chance(50) && settle(up).await.is_err() {
        return;
    }
    if up.random.chance(60) {
        up.close().await;
    }
}
