//! Changes: to every leg, overlapping ones one after the other.

use std::rc::Rc;

use futures_util::future::join_all;
use sealblock_block::{Answer, Clock, Durability, Error, Failure, Operation, Outcome};
use sealblock_integrity::Sealed;
use sealblock_units::{Extent, Lba};

use crate::drill::Mutation;
use crate::leg::{Leg, is_away};
use crate::mirror::{Legs, Mirror};

/// Leaves the legs suspect, should a change end half-way: it failed, or whoever asked has gone away.
struct Unfinished<'a, C: Clock> {
    mirror: &'a Mirror<C>,
    extent: Option<Extent>,
}

impl<C: Clock> Drop for Unfinished<'_, C> {
    fn drop(&mut self) {
        if let Some(extent) = self.extent {
            self.mirror.suspect(extent);
        }
    }
}

/// What became of a request on a leg.
pub(crate) struct Asked {
    leg: Rc<Leg>,
    /// Which of its devices was asked.
    epoch: u64,
    outcome: Outcome,
}

impl Asked {
    /// Whether a leg in sync has carried it out. What a device did that is gone since may be gone with it, also where the leg
    /// is back and current.
    fn has_it(&self) -> bool {
        self.outcome.is_ok() && self.leg.is_current() && self.leg.epoch() == self.epoch
    }
}

#[cold]
fn lost_before_answer() -> Error {
    let reason = "the last leg that had it went away before the answer".to_owned();
    Failure::Unreachable { reason }.into()
}

impl<C: Clock> Mirror<C> {
    /// Asks legs, all at once.
    pub(crate) async fn ask_all(&self, legs: &Legs, operation: &Operation) -> Vec<Asked> {
        let ask = |leg: &Rc<Leg>| {
            let (leg, epoch) = (Rc::clone(leg), leg.epoch());
            async move {
                let outcome = leg.ask(self.geometry.protection, operation.clone()).await;
                Asked { leg, epoch, outcome }
            }
        };
        join_all(legs.iter().map(ask)).await
    }

    /// Carries out a Write, WriteZeroes or WriteUncorrectable on every leg.
    pub(crate) async fn change(&self, extent: Extent, operation: Operation) -> Outcome {
        if self.read_only {
            return Err(Failure::ReadOnly.into());
        }
        // Two legs could otherwise carry out overlapping writes in different orders, and differ for good.
        let _claim = match self.mutation {
            Mutation::Unordered => None,
            _ => Some(self.claims.take(extent).await),
        };
        self.change_claimed(extent, operation).await
    }

    /// The same for blocks that the caller has claimed.
    pub(crate) async fn change_claimed(&self, extent: Extent, operation: Operation) -> Outcome {
        self.mark(extent).await?;
        let (legs, is_durable) = (self.changeable(), !operation.is_volatile());
        let mut unfinished = Unfinished { mirror: self, extent: Some(extent) };
        let asked = self.ask_all(&legs, &operation).await;
        self.settle_outcomes(asked, Some(&mut unfinished.extent)).await?;
        unfinished.extent = None;
        if is_durable && self.has_renewed() {
            // The labels may still list the blocks as those of which a leg has only older copies.
            self.flush_legs().await?;
        }
        Ok(Answer::Done)
    }

    /// What blocks read as after a Discard must be the same on every leg, so they become zeroes.
    pub(crate) async fn discard(&self, extents: &[Extent]) -> Outcome {
        for &extent in extents {
            let zero = Operation::WriteZeroes { extent, may_unmap: true, durability: Durability::Volatile };
            self.change(extent, zero).await?;
        }
        Ok(Answer::Done)
    }

    /// Judges what became of a request that went to every leg. It is well if a current leg has carried it out; those that have
    /// not are left behind, and that is noted before this returns. With `undone`, a request that only some have carried
    /// out although it failed leaves them suspect.
    pub(crate) async fn settle_outcomes(
        &self,
        asked: Vec<Asked>,
        undone: Option<&mut Option<Extent>>,
    ) -> Result<(), Error> {
        let is_well = asked.iter().any(Asked::has_it);
        if is_well && asked.iter().all(|asked| asked.outcome.is_ok()) {
            // A leg that somebody else has left behind was not asked, and lacks this.
            return self.note_for(&asked).await;
        }
        // A request that cannot be met says nothing about the leg.
        let refused = |error: &Error| {
            matches!(error.failure(), Failure::Limit { .. } | Failure::Range { .. } | Failure::Absent(_))
        };
        let all_refused = asked.iter().all(|asked| asked.outcome.as_ref().is_err_and(refused));
        let mut first: Option<Error> = None;
        for Asked { leg, epoch, outcome } in &asked {
            let Err(error) = outcome else { continue };
            // What was asked may be gone, and another device there that was never asked.
            if (is_well || is_away(error)) && leg.epoch() == *epoch {
                self.leave(leg, &error.to_string());
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
        Err(first.unwrap_or_else(|| self.nobody()))
    }

    /// Notes who was left behind, before the answer to a request that these legs were asked.
    ///
    /// # Errors
    /// When that cannot be noted, or nobody has the change any more once it is.
    async fn note_for(&self, asked: &[Asked]) -> Result<(), Error> {
        if !self.notes.lacks_left() || self.mutation == Mutation::AnswerEarly {
            return Ok(());
        }
        self.note().await?;
        match asked.iter().any(Asked::has_it) {
            true => Ok(()),
            false => Err(lost_before_answer()),
        }
    }

    /// Compares blocks where they are, on every current leg.
    pub(crate) async fn compare(&self, extent: Extent, data: Sealed) -> Outcome {
        self.settle_for_reading(extent).await?;
        let legs = self.current();
        let compares =
            legs.iter().map(|leg| leg.ask(self.geometry.protection, Operation::Compare { extent, data: data.clone() }));
        let outcomes = join_all(compares).await;
        let (mut differs, mut is_well, mut failed): (Option<Lba>, bool, Option<Error>) = (None, false, None);
        for (leg, outcome) in legs.iter().zip(outcomes) {
            match outcome {
                Ok(_) => is_well = true,
                Err(error) => match error.failure() {
                    Failure::Miscompare { lba } => differs = Some(differs.map_or(*lba, |known| known.min(*lba))),
                    _ => {
                        self.lament(leg, &error);
                        failed = failed.or(Some(error));
                    }
                },
            }
        }
        match (differs, is_well) {
            (Some(lba), _) => Err(Failure::Miscompare { lba }.into()),
            // Damage on a leg that another leg does not have: a read or a repair will find and mend it.
            (None, true) => Ok(Answer::Done),
            (None, false) => Err(failed.unwrap_or_else(|| self.nobody())),
        }
    }
}
