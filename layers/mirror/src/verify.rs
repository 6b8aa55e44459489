//! Verifies: every leg checks its own blocks, all at once, and sums of the data tell whether they are the same.
//!
//! Damage is found by the legs. Two good copies that differ are a conflict: a write was lost on one of them, and it keeps
//! no generations that would have told. A copy that could not be looked at, or that may be out of sync, is told as unchecked:
//! nobody may take the mirror for clean then.

use std::collections::BTreeSet;

use futures_util::future::{LocalBoxFuture, join_all};
use sealblock_block::{
    BadBlock, BadBlockCause, Checksum, Clock, Error, Outcome, Request, Response, Tally, Unchecked, VerifyStats,
    WhyUnchecked,
};
use sealblock_integrity::Checks;
use sealblock_units::{Extent, Lba};

use crate::label::ReplicaState;
use crate::mirror::{Legs, Mirror};
use crate::replica::Replica;

/// What an inspection has found.
struct Inspection {
    /// The sum of the data, where all legs have the same and nothing is damaged.
    crc64: Option<u64>,
    bytes_transferred: u64,
    /// What is wrong with copies, and which were not looked at.
    tally: Tally,
}

impl Inspection {
    /// Takes in what a leg has answered: the sum of its data if all of it is good, and its bad blocks.
    ///
    /// # Errors
    /// When the leg failed without naming blocks.
    fn take_in(
        &mut self,
        leg: &Replica,
        outcome: Result<Checksum, Error>,
    ) -> Result<(Option<u64>, BTreeSet<Lba>), Error> {
        match outcome.map_err(Error::into_damage) {
            Ok(digested) => {
                self.bytes_transferred += digested.bytes_transferred;
                self.tally.coverage.merge(leg.coverage(digested.coverage));
                Ok((Some(digested.crc64), BTreeSet::new()))
            }
            Err(Ok((faults, coverage))) => {
                self.tally.faults.extend(faults.iter().map(|fault| leg.fault(fault)));
                self.tally.coverage.merge(leg.coverage(coverage));
                Ok((None, faults.iter().map(|fault| fault.lba).collect()))
            }
            Err(Err(error)) => Err(error),
        }
    }
}

impl<C: Clock> Mirror<C> {
    pub(crate) async fn verify(&self, extent: Extent, checks: Checks) -> Outcome {
        let found = self.inspect(extent, checks, None).await?;
        let bytes_transferred = found.bytes_transferred;
        Ok(Response::Verified(VerifyStats { bytes_transferred, coverage: found.tally.finish()? }))
    }

    pub(crate) async fn digest(&self, extent: Extent, checks: Checks) -> Outcome {
        let found = self.inspect(extent, checks, None).await?;
        // Differences in what is not settled yet are nobody's damage; the first leg's data count there.
        let crc64 = match (found.crc64, found.tally.faults.is_empty(), self.in_sync().first()) {
            (None, true, Some(leg)) => self.digest_of_one(leg, extent, checks).await?,
            (crc64, ..) => crc64.unwrap_or_default(),
        };
        let bytes_transferred = found.bytes_transferred;
        Ok(Response::Checksum(Checksum { crc64, bytes_transferred, coverage: found.tally.finish()? }))
    }

    /// The sum of what one leg has, the others having something else for the moment.
    async fn digest_of_one(&self, leg: &Replica, extent: Extent, checks: Checks) -> Result<u64, Error> {
        match leg.digest(self.geometry.protection, extent, checks).await {
            Ok(digested) => Ok(digested.crc64),
            Err(error) => {
                self.fail_if_unreachable(leg, &error);
                let legs = self.in_sync();
                let Some(other) = legs.iter().find(|other| other.id != leg.id) else { return Err(error) };
                other.digest(self.geometry.protection, extent, checks).await.map(|digested| digested.crc64)
            }
        }
    }

    /// Verifies, and writes anew what another leg has. Conflicts stay: nothing tells which copy is right.
    pub(crate) async fn repair(&self, extent: Extent, checks: Checks) -> Outcome {
        self.settle_for_reading(extent).await?;
        let settled = self.write_intent.suspected.get();
        let mut found = self.inspect(extent, checks, Some(settled)).await?;
        self.mend_all(&mut found.tally.faults, extent, checks).await;
        if self.has_renewed()
            && let Err(error) = self.flush_legs().await
        {
            tracing::debug!(%error, "the labels go on listing blocks that were mended");
        }
        self.lost_blocks.set(self.lost_blocks.get() + lost(&found.tally.faults, self.in_sync().len()));
        let bytes_transferred = found.bytes_transferred;
        Ok(Response::Verified(VerifyStats { bytes_transferred, coverage: found.tally.finish()? }))
    }

    /// Mends what an inspection of `extent` has found, and says of each fault whether it is. Copies that are withheld come first:
    /// one that is proven to be current by now mends the others.
    async fn mend_all(&self, faults: &mut [BadBlock], extent: Extent, checks: Checks) {
        for stale_first in [true, false] {
            for fault in faults.iter_mut().filter(|fault| (fault.cause == BadBlockCause::Stale) == stale_first) {
                let number = fault.member.outermost().map(|(number, _)| number);
                let leg = self.legs.borrow().iter().find(|leg| Some(leg.number.get()) == number).cloned();
                // A leg that is itself a group may have mended it from another copy of its own.
                let is_left = fault.cause != BadBlockCause::Conflict && !fault.repaired;
                if let Some(leg) = leg.filter(|_| is_left) {
                    fault.repaired = self.mend(&leg, fault, self.onward(&checks, extent, fault.lba)).await;
                }
            }
        }
    }

    /// Has every leg check and sum the blocks. They were made alike just now, if `settled` says after which suspicion.
    async fn inspect(&self, extent: Extent, checks: Checks, settled: Option<u64>) -> Result<Inspection, Error> {
        let legs = self.in_sync();
        let mut found = Inspection { crc64: None, bytes_transferred: 0, tally: Tally::default() };
        let mut bad: Vec<BTreeSet<Lba>> = Vec::with_capacity(legs.len());
        let (mut sums, mut asked) = (Vec::with_capacity(legs.len()), Legs::new());
        let mut unsettled = self.suspects_in(extent);
        let mut failure = None;
        for (leg, outcome) in legs.iter().zip(self.look(&legs, extent, checks).await) {
            match found.take_in(leg, outcome) {
                Ok((sum, faulty)) => {
                    sums.extend(sum);
                    bad.push(faulty);
                    asked.push(leg.clone());
                }
                Err(error) => {
                    tracing::warn!(replica = %leg.name(), %extent, %error, "a leg could not be checked");
                    self.fail_if_unreachable(leg, &error);
                    failure = Some(error);
                }
            }
        }
        if asked.is_empty() {
            return Err(failure.unwrap_or_else(|| self.no_replica()));
        }
        let is_same = sums.windows(2).all(|pair| pair[0] == pair[1]);
        match sums.first() {
            Some(sum) if is_same && found.tally.faults.is_empty() => found.crc64 = Some(*sum),
            _ if asked.len() > 1 => self.compare_extents(&asked, &bad, extent, checks, &mut found.tally.faults).await?,
            _ => {}
        }
        self.tell_unchecked(&legs, &asked, extent, &mut found.tally);
        if settled != Some(self.write_intent.suspected.get()) {
            unsettled.extend(self.suspects_in(extent));
            unsettled.into_iter().for_each(|part| {
                found.tally.coverage.add(Unchecked::new(part, WhyUnchecked::Unsettled));
            });
        }
        Ok(found)
    }

    /// Tells which copies were not looked at: those of members that were not asked or did not answer, and of those that were
    /// left behind before all was done.
    fn tell_unchecked(&self, asked: &Legs, answered: &Legs, extent: Extent, tally: &mut Tally) {
        let is_in = |legs: &Legs, leg: &Replica| legs.iter().any(|other| other.id == leg.id);
        for leg in self.legs.borrow().iter() {
            let why = match leg.standing.get() {
                ReplicaState::Removed => continue,
                ReplicaState::InSync if is_in(answered, leg) && leg.is_here() => continue,
                _ if is_in(asked, leg) => WhyUnchecked::Failed,
                _ if !leg.is_here() => WhyUnchecked::Absent,
                ReplicaState::OutOfSync => WhyUnchecked::OutOfSync,
                // It may be up to date by now, and was not when the others were asked.
                ReplicaState::Resyncing | ReplicaState::InSync => WhyUnchecked::Resyncing,
            };
            tally.coverage.add(leg.unchecked(Unchecked::new(extent, why)));
        }
    }

    /// Asks every leg, all at once. A single leg has nothing to be compared with.
    async fn look(&self, legs: &Legs, extent: Extent, checks: Checks) -> Vec<Result<Checksum, Error>> {
        let format = self.geometry.protection;
        let looks = legs.iter().map(|leg| async move {
            if legs.len() > 1 {
                return leg.digest(format, extent, checks).await;
            }
            match leg.ask(format, Request::Verify { extent, checks }).await? {
                Response::Verified(VerifyStats { bytes_transferred, coverage }) => {
                    Ok(Checksum { crc64: 0, bytes_transferred, coverage })
                }
                _ => Err(crate::replica::answered_wrongly()),
            }
        });
        join_all(looks).await
    }

    /// Compares the blocks that several legs have in good order.
    async fn compare_extents(
        &self,
        legs: &Legs,
        bad: &[BTreeSet<Lba>],
        extent: Extent,
        checks: Checks,
        faults: &mut Vec<BadBlock>,
    ) -> Result<(), Error> {
        let all_bad: BTreeSet<Lba> = bad.iter().flatten().copied().collect();
        for run in runs_between(extent, &all_bad) {
            self.conflicts(legs, run, self.onward(&checks, extent, run.start()), faults).await?;
        }
        for &lba in &all_bad {
            let good: Legs =
                legs.iter().zip(bad).filter(|(_, bad)| !bad.contains(&lba)).map(|(leg, _)| leg.clone()).collect();
            if good.len() > 1 {
                self.conflicts(&good, Extent::one(lba), self.onward(&checks, extent, lba), faults).await?;
            }
        }
        Ok(())
    }

    /// Finds the blocks in which legs differ, by halves. What looks different is looked at again while nobody may change it.
    fn conflicts<'a>(
        &'a self,
        legs: &'a Legs,
        run: Extent,
        checks: Checks,
        faults: &'a mut Vec<BadBlock>,
    ) -> LocalBoxFuture<'a, Result<(), Error>> {
        Box::pin(async move {
            if !self.differ(legs, run, checks, faults).await {
                return Ok(());
            }
            if run.len() > 1 {
                for half in halves(run) {
                    self.conflicts(legs, half, self.onward(&checks, run, half.start()), faults).await?;
                }
                return Ok(());
            }
            let _claim = self.claims.take(run).await;
            // After a crash copies may differ in what was under way. That is settled, not reported.
            if !self.is_suspect(run) && self.differ(legs, run, checks, faults).await {
                let fault = BadBlock::new(run.start(), BadBlockCause::Conflict, None, None);
                faults.extend(legs.last().map(|leg| leg.fault(&fault)));
            }
            Ok(())
        })
    }

    /// Whether legs have different data. Damage that has come since the first look is added to the faults.
    async fn differ(&self, legs: &Legs, run: Extent, checks: Checks, faults: &mut Vec<BadBlock>) -> bool {
        let mut sums = Vec::with_capacity(legs.len());
        // One that has left since may be back, and not up to date.
        let legs: Legs = legs.iter().filter(|leg| leg.is_current()).cloned().collect();
        for (leg, outcome) in legs.iter().zip(self.look(&legs, run, checks).await) {
            match outcome.map_err(Error::into_bad_blocks) {
                Ok(digested) => sums.push(digested.crc64),
                Err(Ok(found)) => faults.extend(found.iter().map(|fault| leg.fault(fault))),
                // Gone since: the others are not to be blamed, and what it has is told as unchecked.
                Err(Err(error)) => self.fail_if_unreachable(leg, &error),
            }
        }
        sums.windows(2).any(|pair| pair[0] != pair[1])
    }
}

/// How many blocks are bad on all of so many legs and were not mended.
fn lost(faults: &[BadBlock], legs: usize) -> u64 {
    let lasting = |fault: &&BadBlock| !fault.repaired && fault.cause != BadBlockCause::Conflict;
    let mut lbas: Vec<Lba> = faults.iter().filter(lasting).map(|fault| fault.lba).collect();
    lbas.sort_unstable();
    lbas.chunk_by(|a, b| a == b).filter(|same| same.len() >= legs).count() as u64
}

/// The runs of an extent without these blocks.
pub(crate) fn runs_between(extent: Extent, without: &BTreeSet<Lba>) -> Vec<Extent> {
    let (mut runs, mut from) = (Vec::new(), extent.start().get());
    let end = extent.start().get() + extent.len();
    for stop in without.iter().map(|lba| lba.get()).filter(|lba| extent.contains(Lba::new(*lba))).chain([end]) {
        runs.extend(Extent::from_raw(from, stop.saturating_sub(from)).ok());
        from = stop + 1;
    }
    runs
}

/// An extent of more than one block in two.
fn halves(extent: Extent) -> impl Iterator<Item = Extent> {
    let (start, first) = (extent.start().get(), extent.len() / 2);
    [Extent::from_raw(start, first), Extent::from_raw(start + first, extent.len() - first)].into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_and_halves_cover_what_is_left() {
        let extent = Extent::from_raw(10, 10).unwrap();
        let runs = |bad: &[u64]| -> Vec<(u64, u64)> {
            let bad = bad.iter().map(|lba| Lba::new(*lba)).collect();
            runs_between(extent, &bad).iter().map(|run| (run.start().get(), run.len())).collect()
        };
        assert_eq!(runs(&[]), [(10, 10)]);
        assert_eq!(runs(&[10, 11, 15, 19]), [(12, 3), (16, 3)]);
        assert_eq!(runs(&(10..20).collect::<Vec<_>>()), []);
        assert_eq!(halves(extent).map(|half| half.len()).collect::<Vec<_>>(), [5, 5]);
        assert_eq!(halves(Extent::from_raw(0, 3).unwrap()).map(|half| half.len()).collect::<Vec<_>>(), [1, 2]);
    }
}
