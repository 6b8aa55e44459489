//! What happens when only legs are there that were left behind.
//!
//! Those that know it are refused. One that cannot know is let go on alone; then each side was written without the other,
//! and both together must be refused. A fork is an excursion: the trial goes on with the disks as they were before it.

use std::cell::RefCell;
use std::rc::Rc;

use sealblock_layers_mirror::MirrorError;
use sealblock_layers_mirror::assemble::AssembleError;
use sealblock_layers_mirror::label::ReplicaState;

use super::legs::Leg;
use super::machine::Up;
use super::trial::{Plan, Trial};
use crate::checker::Checker;
use crate::workload::{self, Workload};

impl Trial {
    /// Does something after which everything is as it was before; nothing unless the power of every leg has gone.
    pub fn aside(&mut self, excursion: impl FnOnce(&mut Trial) -> Result<(), String>) -> Result<(), String> {
        if !self.legs.iter().all(Leg::is_settled) {
            return Ok(());
        }
        let kept: Vec<_> = self.legs.iter().map(Leg::keep).collect();
        let (settled, changes) = (self.settled, self.changes);
        let done = excursion(self);
        self.legs.iter_mut().zip(kept).for_each(|(leg, kept)| leg.restore(kept));
        (self.settled, self.changes) = (settled, changes);
        done
    }

    /// A checker of what hosts do aside, whose versions nobody else has.
    pub fn blank_checker(&self) -> Rc<RefCell<Checker>> {
        let checker = self.checker.borrow();
        Rc::new(RefCell::new(Checker::after(checker.patterns(), checker.requests() + ASIDE)))
    }

    /// A machine without any leg that has everything.
    pub fn fork(&mut self, present: Vec<bool>) -> Result<(), String> {
        self.aside(|trial| trial.excursion(present))
    }

    fn excursion(&mut self, present: Vec<bool>) -> Result<(), String> {
        let is_noted = |leg: &Leg| {
            leg.went_without && !leg.is_old && leg.is_noted_as(&self.legs, |standing| standing != ReplicaState::InSync)
        };
        let must_split =
            self.legs.iter().zip(&present).all(|(leg, present)| !present || !leg.is_in_use() || is_noted(leg));
        self.legs.iter_mut().for_each(Leg::allow_all);
        let plan = Plan { checker: self.blank_checker(), ..self.plan("a machine without what is current", present) };
        let came = self.machine(plan, move |up| async move { go_on_alone(&up).await })?;
        match came.refused {
            // They may not know of a leg that was added since.
            Some(MirrorError::Assemble {
                error:
                    AssembleError::NoneInSync
                    | AssembleError::NotAReplica { .. }
                    | AssembleError::Removed { .. }
                    // Those that are there may never have got a label.
                    | AssembleError::NewWithoutReplica { .. },
                ..
            }) => return Ok(()),
            Some(error) => return Err(format!("legs that were left behind: {error}")),
            None if came.answered_changes == 0 => return Ok(()),
            None => {}
        }
        match self.are_refused("a machine with both sides")? {
            false if must_split => Err("legs that were each written without the other were not refused".to_owned()),
            _ => Ok(()),
        }
    }

    /// Whether two sides, each of which may have been written without the other, are refused where all are there.
    pub fn are_refused(&mut self, what: &'static str) -> Result<bool, String> {
        let plan = Plan { checker: self.blank_checker(), ..self.plan(what, self.everybody()) };
        let came = self.machine(plan, |_| async {})?;
        match came.refused {
            None => Ok(false),
            // One side may not know of a leg that the other has added, or that it was left behind by one that lacks something.
            Some(MirrorError::Assemble {
                error:
                    AssembleError::SplitBrain { .. }
                    | AssembleError::NotAReplica { .. }
                    | AssembleError::Removed { .. }
                    | AssembleError::NoneInSync,
                ..
            }) => Ok(true),
            Some(error) => Err(format!("{what}: {error}")),
        }
    }
}

/// Versions that the trial itself does not get to.
const ASIDE: u64 = 1 << 32;

/// Learns what is there, which must be content, and changes it.
pub(super) async fn go_on_alone(up: &Up) {
    for piece in up.client.pieces(&up.random) {
        if up.client.learn(piece).await.is_err() {
            return;
        }
    }
    workload::drive(Workload::Hot, &up.client, &up.executor, &up.random).await;
    if up.random.chance(50) {
        up.close().await;
    }
}
