//! The link to a replica, for one open: it delays, counts and fails requests.

use std::future::pending;
use std::rc::Rc;
use std::time::Duration;

use sealblock_block::{
    Abilities, Ability, Device, Error, ErrorKind, Geometry, Limits, Operation, Outcome, Request, RequestKind,
    ReservedArea, Response,
};

use super::harness::Harness;
use super::replica::{BLOCKS, Replica, ReplicaLink, SIZE};
use crate::executor::Executor;

/// Blocks of one transfer, so that regions are resynced in several pieces.
const TRANSFER_BLOCKS: usize = 4;

/// The pause between two checks of a held request, and the maximum number of them. The holder may itself wait for that
/// request, as a write waits for the flush at the end of the reconciliation of its blocks.
const HELD_DELAY: Duration = Duration::from_millis(50);
const MAX_HELD_DELAYS: u32 = 1200;

/// A replica, for one open.
pub struct LinkedReplica {
    pub replica: Rc<Replica>,
    pub harness: Rc<Harness>,
    pub executor: Executor,
    geometry: Geometry,
    epoch: u64,
    opening: u64,
}

impl LinkedReplica {
    pub fn new(replica: &Rc<Replica>, harness: &Rc<Harness>, executor: &Executor) -> LinkedReplica {
        let geometry = Geometry {
            block_size: SIZE,
            capacity_blocks: BLOCKS,
            protection: harness.format,
            limits: Limits::new(SIZE, TRANSFER_BLOCKS * SIZE.bytes(), BLOCKS as u32),
        };
        let epoch = replica.epoch.get();
        replica.opened.set(epoch);
        replica.openings.set(replica.openings.get() + 1);
        let opening = replica.openings.get();
        LinkedReplica {
            replica: replica.clone(),
            harness: harness.clone(),
            executor: executor.clone(),
            geometry,
            epoch,
            opening,
        }
    }

    /// Requests take time, during which others are executed.
    async fn pause(&self) {
        match self.harness.pace_ms {
            _ if !self.harness.random.chance(25) => {}
            0 => self.executor.yield_now().await,
            most => self.executor.delay(Duration::from_millis(self.harness.random.below(most))).await,
        }
    }

    fn check(&self, is_change: bool, is_label: bool) -> Result<(), Error> {
        let is_mine = self.replica.epoch.get() == self.epoch && self.replica.openings.get() == self.opening;
        if !is_mine || self.replica.link.get() == ReplicaLink::Gone {
            return Err(ErrorKind::Unreachable { reason: "the line broke".to_owned() }.into());
        }
        let fails = match self.replica.link.get() {
            ReplicaLink::Full => is_change,
            ReplicaLink::Worn => is_change && !is_label,
            ReplicaLink::Up | ReplicaLink::Gone => false,
        };
        if fails {
            return Err(ErrorKind::NoSpace { reason: "it is full".to_owned() }.into());
        }
        Ok(())
    }
}

impl Device for LinkedReplica {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn abilities(&self) -> Abilities {
        Abilities::COMPLETE
            .with([RequestKind::ReadReserved, RequestKind::BlockStatus], Ability::Native)
            .with([RequestKind::Compare, RequestKind::Discard], Ability::Absent)
    }

    async fn execute(&self, request: Request) -> Outcome {
        self.pause().await;
        for _ in 0..MAX_HELD_DELAYS {
            if !self.replica.held.get().is_some_and(|held| held.holds(&request)) {
                break;
            }
            self.replica.is_waiting.set(true);
            self.executor.delay(HELD_DELAY).await;
        }
        let is_label = matches!(request.operation, Operation::WriteReserved(ReservedArea::GroupLabel, _));
        let is_change = is_label
            || matches!(
                request.kind(),
                RequestKind::Write
                    | RequestKind::WriteZeroes
                    | RequestKind::Copy
                    | RequestKind::CompareAndWrite
                    | RequestKind::WriteUncorrectable
                    | RequestKind::WriteReserved
            );
        self.check(is_change, is_label)?;
        let stops = self.harness.is_last_operation();
        if is_change && !is_label {
            self.harness.is_written(&self.replica);
        }
        let format = self.harness.format;
        let (is_whole, outcome) = if stops {
            (self.replica.image.borrow_mut().begin(request, format, &self.harness.random), Ok(Response::Done))
        } else {
            (true, self.replica.image.borrow_mut().execute(request, format))
        };
        if is_label && is_whole {
            self.harness.is_labelled(&self.replica);
        }
        if stops {
            self.harness.stop(&self.executor);
            return pending().await;
        }
        self.pause().await;
        self.check(false, false).and(outcome)
    }
}
