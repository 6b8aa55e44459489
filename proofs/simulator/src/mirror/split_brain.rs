//! Opens of a mirror with only out-of-sync replicas online.
//!
//! Replicas whose labels show that they are out of sync are refused. A replica that cannot know this opens alone. After
//! that each side was written without the other, and both together must be refused as a split brain. The run is
//! isolated: afterwards the trial continues with the disks from before.

use std::cell::RefCell;
use std::rc::Rc;

use sealblock_layers_mirror::MirrorError;
use sealblock_layers_mirror::label::ReplicaState;
use sealblock_layers_mirror::label::assemble::AssembleError;

use super::machine::RunningMirror;
use super::replica::Replica;
use super::trial::{MachinePlan, Trial};
use crate::checker::Checker;
use crate::workload::{self, Workload};

impl Trial {
    /// Runs something in isolation and then restores the state from before; does nothing unless every replica had a
    /// power cut.
    pub fn isolated(&mut self, excursion: impl FnOnce(&mut Trial) -> Result<(), String>) -> Result<(), String> {
        if !self.replicas.iter().all(Replica::has_only_durable) {
            return Ok(());
        }
        let kept: Vec<_> = self.replicas.iter().map(Replica::snapshot).collect();
        let (is_durable, changes) = (self.is_durable, self.changes);
        let done = excursion(self);
        self.replicas.iter_mut().zip(kept).for_each(|(replica, kept)| replica.restore(kept));
        (self.is_durable, self.changes) = (is_durable, changes);
        done
    }

    /// A checker for an isolated run, with versions that no other checker uses.
    pub fn blank_checker(&self) -> Rc<RefCell<Checker>> {
        let checker = self.checker.borrow();
        Rc::new(RefCell::new(Checker::after(checker.patterns(), checker.requests() + ISOLATED_VERSIONS)))
    }

    /// A machine without any in-sync replica.
    pub fn split_brain(&mut self, present: Vec<bool>) -> Result<(), String> {
        self.isolated(|trial| trial.excursion(present))
    }

    fn excursion(&mut self, present: Vec<bool>) -> Result<(), String> {
        let is_recorded = |replica: &Replica| {
            replica.missed_writes
                && !replica.is_old
                && replica.is_recorded_as(&self.replicas, |state| state != ReplicaState::InSync)
        };
        let must_split = self
            .replicas
            .iter()
            .zip(&present)
            .all(|(replica, present)| !present || !replica.is_in_use() || is_recorded(replica));
        self.replicas.iter_mut().for_each(Replica::allow_all);
        let plan =
            MachinePlan { checker: self.blank_checker(), ..self.plan("a machine without what is current", present) };
        let result = self.machine(plan, move |running| async move { go_on_alone(&running).await })?;
        match result.refused {
            // They may not know of a replica that was added later.
            Some(MirrorError::Assemble {
                error:
                    AssembleError::NoneInSync
                    | AssembleError::NotAReplica { .. }
                    | AssembleError::Removed { .. }
                    // The online replicas may never have got a label.
                    | AssembleError::NewWithoutReplica { .. },
                ..
            }) => return Ok(()),
            Some(error) => return Err(format!("replicas that are out of sync: {error}")),
            None if result.completed_changes == 0 => return Ok(()),
            None => {}
        }
        match self.are_refused("a machine with both sides")? {
            false if must_split => Err("replicas that were each written without the other were not refused".to_owned()),
            _ => Ok(()),
        }
    }

    /// True if two sides, each of which may have been written without the other, are refused when all replicas are
    /// online.
    pub fn are_refused(&mut self, what: &'static str) -> Result<bool, String> {
        let plan = MachinePlan { checker: self.blank_checker(), ..self.plan(what, self.all_present()) };
        let result = self.machine(plan, |_| async {})?;
        match result.refused {
            None => Ok(false),
            // One side may not know of a replica that the other has added, or that an out-of-sync replica lists one of
            // its replicas as out of sync.
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

/// Above all versions of the trial itself.
const ISOLATED_VERSIONS: u64 = 1 << 32;

/// Accepts the current content, which must be valid, and then changes it.
pub(super) async fn go_on_alone(running: &RunningMirror) {
    for piece in running.client.pieces(&running.random) {
        if running.client.learn(piece).await.is_err() {
            return;
        }
    }
    workload::drive(Workload::Hot, &running.client, &running.executor, &running.random).await;
    if running.random.chance(50) {
        running.close().await;
    }
}
