//! Changes: to every leg, overlapping ones one after the other.

use std::rc::Rc;

use futures_util::future::join_all;
use sealblock_block::{Clock, Durability, Error, ErrorKind, Outcome, Request, Response};
use sealblock_integrity::Sealed;
use sealblock_units::{Extent, Lba};

use crate::mirror::{Legs, Mirror};
use crate::replica::{Replica, is_away};
use crate::test_hooks::Mutation;

/// Leaves the legs suspect, should a change end half-way: it failed, or whoever asked has gone away.
struct NosyncOnDrop<'a, C: Clock> {
    mirror: &'a Mirror<C>,
    extent: Option<Extent>,
}

impl<C: Clock> Drop for NosyncOnDrop<'_, C> {
    fn drop(&mut self) {
        if let Some(extent) = self.extent {
            self.mirror.nosync(extent);
        }
    }
}

/// What became of a request on a leg.
pub(crate) struct ReplicaResult {
    leg: Rc<Replica>,
    /// Which of its devices was asked.
    epoch: u64,
    outcome: Outcome,
}

impl ReplicaResult {
    /// Whether a leg in sync has carried it out. What a device did that is gone since may be gone with it, also where the leg
    /// is back and current.
    fn has_it(&self) -> bool {
        self.outcome.is_ok() && self.leg.is_current() && self.leg.attach_count() == self.epoch
    }
}

#[cold]
fn lost_before_answer() -> Error {
    let reason = "the last leg that had it went away before the answer".to_owned();
    ErrorKind::Unreachable { reason }.into()
}

impl<C: Clock> Mirror<C> {
    /// Asks legs, all at once.
    pub(crate) async fn ask_all(&self, legs: &Legs, operation: &Request) -> Vec<ReplicaResult> {
        let ask = |leg: &Rc<Replica>| {
            let (leg, epoch) = (Rc::clone(leg), leg.attach_count());
            async move {
                let outcome = leg.ask(self.geometry.protection, operation.clone()).await;
                ReplicaResult { leg, epoch, outcome }
            }
        };
        join_all(legs.iter().map(ask)).await
    }

    /// Carries out a Write, WriteZeroes or WriteUncorrectable on every leg.
    pub(crate) async fn change(&self, extent: Extent, operation: Request) -> Outcome {
        if self.read_only {
            return Err(ErrorKind::ReadOnly.into());
        }
        // Two legs could otherwise carry out overlapping writes in different orders, and differ for good.
        let _claim = match self.mutation {
            Mutation::Unordered => None,
            _ => Some(self.claims.take(extent).await),
        };
        self.change_claimed(extent, operation).await
    }

    /// The same for blocks that the caller has claimed.
    pub(crate) async fn change_claimed(&self, extent: Extent, operation: Request) -> Outcome {
        self.mark_dirty(extent).await?;
        let (legs, is_durable) = (self.write_targets(), !operation.is_volatile());
        let mut unfinished = NosyncOnDrop { mirror: self, extent: Some(extent) };
        let asked = self.ask_all(&legs, &operation).await;
        self.complete_write(asked, Some(&mut unfinished.extent)).await?;
        unfinished.extent = None;
        if is_durable && self.has_renewed() {
            // The labels may still list the blocks as those of which a leg has only older copies.
            self.flush_legs().await?;
        }
        Ok(Response::Done)
    }

    /// What blocks read as after a Discard must be the same on every leg, so they become zeroes.
    pub(crate) async fn discard(&self, extents: &[Extent]) -> Outcome {
        for &extent in extents {
            let zero = Request::WriteZeroes { extent, may_unmap: true, durability: Durability::Volatile };
            self.change(extent, zero).await?;
        }
        Ok(Response::Done)
    }

    /// Judges what became of a request that went to every leg. It is well if a current leg has carried it out; those that have
    /// not are left behind, and that is noted before this returns. With `undone`, a request that only some have carried
    /// out although it failed leaves them suspect.
    pub(crate) async fn complete_write(
        &self,
        asked: Vec<ReplicaResult>,
        undone: Option<&mut Option<Extent>>,
    ) -> Result<(), Error> {
        let is_well = asked.iter().any(ReplicaResult::has_it);
        if is_well && asked.iter().all(|asked| asked.outcome.is_ok()) {
            // A leg that somebody else has left behind was not asked, and lacks this.
            return self.note_for(&asked).await;
        }
        // A request that cannot be met says nothing about the leg.
        let refused = |error: &Error| {
            matches!(error.kind(), ErrorKind::Limit { .. } | ErrorKind::Range { .. } | ErrorKind::Absent(_))
        };
        let all_refused = asked.iter().all(|asked| asked.outcome.as_ref().is_err_and(refused));
        let mut first: Option<Error> = None;
        for ReplicaResult { leg, epoch, outcome } in &asked {
            let Err(error) = outcome else { continue };
            // What was asked may be gone, and another device there that was never asked.
            if (is_well || is_away(error)) && leg.attach_count() == *epoch {
                self.fail_replica(leg, &error.to_string());
            }
            // One that is there says more.
            first = first.filter(|first| !is_away(first)).or_else(|| Some(error.clone()));
        }
        if is_well {
            return self.note_for(&asked).await;
        }
        if let (true, Some(undone)) = (all_refused, undone) {
            *undone = None;
        }
        Err(first.unwrap_or_else(|| self.no_replica()))
    }

    /// Notes who was left behind, before the answer to a request that these legs were asked.
    ///
    /// # Errors
    /// When that cannot be noted, or nobody has the change any more once it is.
    async fn note_for(&self, asked: &[ReplicaResult]) -> Result<(), Error> {
        if !self.write_intent.has_unrecorded_failure() || self.mutation == Mutation::AnswerEarly {
            return Ok(());
        }
        self.write_labels().await?;
        match asked.iter().any(ReplicaResult::has_it) {
            true => Ok(()),
            false => Err(lost_before_answer()),
        }
    }

    /// Compares blocks where they are, on every current leg.
    pub(crate) async fn compare(&self, extent: Extent, data: Sealed) -> Outcome {
        self.settle_for_reading(extent).await?;
        let legs = self.in_sync();
        let compares =
            legs.iter().map(|leg| leg.ask(self.geometry.protection, Request::Compare { extent, data: data.clone() }));
        let outcomes = join_all(compares).await;
        let (mut differs, mut is_well, mut failed): (Option<Lba>, bool, Option<Error>) = (None, false, None);
        for (leg, outcome) in legs.iter().zip(outcomes) {
            match outcome {
                Ok(_) => is_well = true,
                Err(error) => match error.kind() {
                    ErrorKind::Miscompare { lba } => differs = Some(differs.map_or(*lba, |known| known.min(*lba))),
                    _ => {
                        self.fail_if_unreachable(leg, &error);
                        failed = failed.or(Some(error));
                    }
                },
            }
        }
        match (differs, is_well) {
            (Some(lba), _) => Err(ErrorKind::Miscompare { lba }.into()),
            // Damage on a leg that another leg does not have: a read or a repair will find and mend it.
            (None, true) => Ok(Response::Done),
            (None, false) => Err(failed.unwrap_or_else(|| self.no_replica())),
        }
    }
}
