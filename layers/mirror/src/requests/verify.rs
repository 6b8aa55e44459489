//! Verify, checksum and repair: every replica checks its own blocks, all at once, and a comparison of CRCs finds
//! copies that differ.
//!
//! Replicas are compared by their CRC-64, or in a Checksum by the kind that its client asked for, so that they read their blocks
//! once. The replicas find bad blocks. Two good copies that differ are a conflict: one replica lost a write, and nothing on
//! it tells, but the tag that a caller expects: then the copies without it are bad. A copy that was not checked, or that may be out of sync, is reported as unchecked, so that the mirror
//! does not pass for verified.

use std::collections::BTreeSet;

use futures_util::future::{LocalBoxFuture, join_all};
use sealblock_block::{
    BadBlock, BadBlockCause, BadBlocks, Checksum, Clock, Error, ErrorKind, Expectations, Outcome, Request, Response,
    Tally, Unchecked, VerifyStats, WhyUnchecked,
};
use sealblock_integrity::ChecksumKind;
use sealblock_units::{Extent, Lba};

use crate::label::ReplicaState;
use crate::mirror::replica::{Replica, runs_between, unexpected_response};
use crate::mirror::{Mirror, Replicas};

/// Blocks in conflict that are not read, at most; more are only reported.
const MAX_CONFLICTS: usize = 16_384;

/// Result of checking and comparing all replicas.
struct Inspection {
    /// Checksum of the data, if all replicas have the same and no block is bad; means nothing if none was asked for.
    checksum: Option<u64>,
    bytes_transferred: u64,
    /// Bad blocks, and copies that were not checked.
    tally: Tally,
}

/// Result of checking one replica.
#[derive(Default)]
struct Inspected {
    /// Checksum of its data, if all of it is good and as expected.
    checksum: Option<u64>,
    bad: BTreeSet<Lba>,
    /// Its first block that is not as expected.
    unexpected: Option<Lba>,
}

impl Inspection {
    /// Adds the result of one replica.
    ///
    /// # Errors
    /// When the replica failed without naming blocks.
    fn merge(&mut self, replica: &Replica, outcome: Result<Checksum, Error>) -> Result<Inspected, Error> {
        match outcome.map_err(Error::into_damage) {
            Ok(checksum) => {
                self.bytes_transferred += checksum.bytes_transferred;
                self.tally.coverage.merge(replica.coverage(checksum.coverage));
                Ok(Inspected { checksum: Some(checksum.value), ..Inspected::default() })
            }
            Err(Ok((bad_blocks, coverage))) => {
                self.tally.bad_blocks.extend(bad_blocks.iter().map(|bad| replica.bad_block(bad)));
                self.tally.coverage.merge(replica.coverage(coverage));
                let bad = bad_blocks.iter().map(|bad| bad.lba).collect();
                Ok(Inspected { bad, ..Inspected::default() })
            }
            // It has found its blocks good before it says so; they are compared block by block then.
            Err(Err(error)) => match *error.kind() {
                ErrorKind::Expectation { lba, .. } => Ok(Inspected { unexpected: Some(lba), ..Inspected::default() }),
                _ => Err(error),
            },
        }
    }
}

impl<C: Clock> Mirror<C> {
    pub(crate) async fn verify(&self, extent: Extent, expectations: Expectations) -> Outcome {
        let found = self.inspect(extent, None, expectations, None).await?;
        let bytes_transferred = found.bytes_transferred;
        Ok(Response::Verified(VerifyStats { bytes_transferred, coverage: found.tally.finish()? }))
    }

    pub(crate) async fn checksum(&self, extent: Extent, kind: ChecksumKind, expectations: Expectations) -> Outcome {
        let found = self.inspect(extent, Some(kind), expectations, None).await?;
        // Replicas may differ in nosync regions without damage. The data of the first replica count there.
        let value = match (found.checksum, found.tally.bad_blocks.is_empty(), self.in_sync().first()) {
            (None, true, Some(replica)) => self.checksum_of_one(replica, extent, kind).await?,
            (checksum, ..) => checksum.unwrap_or_default(),
        };
        let bytes_transferred = found.bytes_transferred;
        Ok(Response::Checksum(Checksum { kind, value, bytes_transferred, coverage: found.tally.finish()? }))
    }

    /// Checksum of the data of one replica, when others have other data in nosync regions.
    async fn checksum_of_one(&self, replica: &Replica, extent: Extent, kind: ChecksumKind) -> Result<u64, Error> {
        match replica.checksum(extent, kind, Expectations::NONE).await {
            Ok(checksum) => Ok(checksum.value),
            Err(error) => {
                self.fail_if_unreachable(replica, &error);
                let replicas = self.in_sync();
                let Some(other) = replicas.iter().find(|other| other.id != replica.id) else { return Err(error) };
                other.checksum(extent, kind, Expectations::NONE).await.map(|checksum| checksum.value)
            }
        }
    }

    /// Verifies, and rewrites bad blocks from another replica. Conflicts stay: nothing tells which copy is right.
    pub(crate) async fn repair(&self, extent: Extent) -> Outcome {
        self.reconcile_for_read(extent).await?;
        let nosync_count = self.write_intent.nosync_count.get();
        let mut found = self.inspect(extent, None, Expectations::NONE, Some(nosync_count)).await?;
        let reconciled = self.reconciled_damage.borrow_mut().extract_if(.., |bad| extent.contains(bad.lba)).collect();
        found.tally.bad_blocks.extend::<Vec<_>>(reconciled);
        self.repair_all(&mut found.tally.bad_blocks).await;
        // What this repair has rewritten beside it is among its own.
        self.reconciled_damage.borrow_mut().retain(|bad| !extent.contains(bad.lba));
        self.forget_repaired().await;
        self.lost_blocks.set(self.lost_blocks.get() + count_unrepaired(&found.tally.bad_blocks, self.in_sync().len()));
        let bytes_transferred = found.bytes_transferred;
        Ok(Response::Verified(VerifyStats { bytes_transferred, coverage: found.tally.finish()? }))
    }

    /// Repairs the bad blocks that an inspection found, and records the result in each. Stale copies come
    /// first: one that proves to be current repairs the others.
    async fn repair_all(&self, bad_blocks: &mut [BadBlock]) {
        for stale_first in [true, false] {
            for bad in bad_blocks.iter_mut().filter(|bad| (bad.cause == BadBlockCause::Stale) == stale_first) {
                let number = bad.member.outermost().map(|(number, _)| number);
                let replica =
                    self.replicas.borrow().iter().find(|replica| Some(replica.number.get()) == number).cloned();
                // A replica that is itself a group may have repaired it from another copy of its own.
                let is_unrepaired = bad.cause != BadBlockCause::Conflict && !bad.repaired;
                if let Some(replica) = replica.filter(|_| is_unrepaired) {
                    bad.repaired = self.repair_block(&replica, bad).await;
                }
            }
        }
    }

    /// Has every replica check the blocks and compute checksums, of `kind` if the caller needs one. `settled` is the nosync count
    /// when the caller reconciled them, if it did.
    async fn inspect(
        &self,
        extent: Extent,
        kind: Option<ChecksumKind>,
        expectations: Expectations,
        nosync_count: Option<u64>,
    ) -> Result<Inspection, Error> {
        let replicas = self.in_sync();
        let mut found = Inspection { checksum: None, bytes_transferred: 0, tally: Tally::default() };
        let mut bad: Vec<BTreeSet<Lba>> = Vec::with_capacity(replicas.len());
        let (mut crcs, mut asked, mut strays) = (Vec::with_capacity(replicas.len()), Replicas::new(), Vec::new());
        let mut unsettled = self.nosync_parts(extent);
        let mut failure = None;
        for (replica, outcome) in replicas.iter().zip(self.checksum_all(&replicas, extent, kind, expectations).await) {
            match found.merge(replica, outcome) {
                Ok(inspected) => {
                    crcs.extend(inspected.checksum);
                    bad.push(inspected.bad);
                    strays.extend(inspected.unexpected.map(|lba| (asked.len(), lba)));
                    asked.push(replica.clone());
                }
                Err(error) => {
                    tracing::warn!(replica = %replica.name(), %extent, %error, "cannot verify a replica");
                    self.fail_if_unreachable(replica, &error);
                    failure = Some(error);
                }
            }
        }
        if asked.is_empty() {
            return Err(failure.unwrap_or_else(|| self.no_replica()));
        }
        let disputed = self.list_disputed(&asked, strays, (extent, &expectations), &mut found.tally, &mut bad).await?;
        let is_same = crcs.len() == asked.len() && crcs.windows(2).all(|pair| pair[0] == pair[1]);
        match crcs.first() {
            Some(crc) if is_same && found.tally.bad_blocks.is_empty() => found.checksum = Some(*crc),
            _ if asked.len() > 1 => self.compare_extents(&asked, &bad, extent, &mut found.tally.bad_blocks).await?,
            _ => {}
        }
        if failure.is_none() && asked.len() > 1 {
            self.keep_conflicts(extent, &found.tally.bad_blocks);
        }
        self.refuse_disputed(&asked, &disputed).await;
        self.report_unchecked(&replicas, &asked, extent, &mut found.tally);
        if nosync_count != Some(self.write_intent.nosync_count.get()) {
            unsettled.extend(self.nosync_parts(extent));
            unsettled.into_iter().for_each(|part| {
                found.tally.coverage.add(Unchecked::new(part, WhyUnchecked::Unsettled));
            });
        }
        Ok(found)
    }

    /// Reports which copies were not checked: those of replicas that did not take part or did not complete, and of
    /// those that failed before the end.
    fn report_unchecked(&self, asked: &Replicas, answered: &Replicas, extent: Extent, tally: &mut Tally) {
        let is_in = |replicas: &Replicas, replica: &Replica| replicas.iter().any(|other| other.id == replica.id);
        for replica in self.replicas.borrow().iter() {
            let why = match replica.state.get() {
                ReplicaState::Removed => continue,
                ReplicaState::InSync if is_in(answered, replica) && replica.is_online() => continue,
                _ if is_in(asked, replica) => WhyUnchecked::Failed,
                _ if !replica.is_online() => WhyUnchecked::Absent,
                ReplicaState::OutOfSync => WhyUnchecked::OutOfSync,
                // It may be in sync by now, but was not when the checks started.
                ReplicaState::Resyncing | ReplicaState::InSync => WhyUnchecked::Resyncing,
            };
            tally.coverage.add(replica.unchecked(Unchecked::new(extent, why)));
        }
    }

    /// Has every replica check and compute a checksum of the blocks, all at once. A single replica only verifies if the caller
    /// needs no checksum of some kind: there is nothing to compare with.
    async fn checksum_all(
        &self,
        replicas: &Replicas,
        extent: Extent,
        kind: Option<ChecksumKind>,
        expectations: Expectations,
    ) -> Vec<Result<Checksum, Error>> {
        let checksums = replicas.iter().map(|replica| async move {
            if replicas.len() > 1 || kind.is_some() {
                return replica.checksum(extent, kind.unwrap_or_default(), expectations).await;
            }
            match replica.execute(Request::verify(extent, expectations)).await? {
                Response::Verified(VerifyStats { bytes_transferred, coverage }) => {
                    Ok(Checksum { bytes_transferred, coverage, ..Checksum::default() })
                }
                _ => Err(unexpected_response()),
            }
        });
        join_all(checksums).await
    }

    /// Compares the blocks that are good on several replicas.
    async fn compare_extents(
        &self,
        replicas: &Replicas,
        bad: &[BTreeSet<Lba>],
        extent: Extent,
        bad_blocks: &mut Vec<BadBlock>,
    ) -> Result<(), Error> {
        let all_bad: BTreeSet<Lba> = bad.iter().flatten().copied().collect();
        for run in runs_between(extent, &all_bad) {
            self.find_conflicts(replicas, run, bad_blocks).await?;
        }
        for &lba in &all_bad {
            let good: Replicas = replicas
                .iter()
                .zip(bad)
                .filter(|(_, bad)| !bad.contains(&lba))
                .map(|(replica, _)| replica.clone())
                .collect();
            if good.len() > 1 {
                self.find_conflicts(&good, Extent::one(lba), bad_blocks).await?;
            }
        }
        Ok(())
    }

    /// Finds the blocks in which replicas differ by bisection. A block that differs is compared again under a lock.
    fn find_conflicts<'a>(
        &'a self,
        replicas: &'a Replicas,
        run: Extent,
        bad_blocks: &'a mut Vec<BadBlock>,
    ) -> LocalBoxFuture<'a, Result<(), Error>> {
        Box::pin(async move {
            if !self.differ(replicas, run, bad_blocks).await {
                return Ok(());
            }
            if let Some(halves) = run.halves() {
                for half in halves {
                    self.find_conflicts(replicas, half, bad_blocks).await?;
                }
                return Ok(());
            }
            let _guard = self.lock_blocks(run).await;
            // After a crash replicas may differ in changes that were in flight. These are reconciled, not reported.
            if !self.is_nosync(run) && self.differ(replicas, run, bad_blocks).await {
                let bad = BadBlock::new(run.start(), BadBlockCause::Conflict, None, None);
                self.add_conflict(bad.lba);
                bad_blocks.extend(replicas.last().map(|replica| replica.bad_block(&bad)));
            }
            Ok(())
        })
    }

    /// Of two copies that differ nothing tells which one is right, so a reader gets neither.
    ///
    /// # Errors
    /// The blocks that are known to be in conflict.
    pub(crate) fn refuse_conflicts(&self, extent: Extent) -> Result<(), Error> {
        if self.conflicts.borrow().is_empty() || self.in_sync().len() < 2 {
            return Ok(());
        }
        let conflicts = self.conflicts.borrow();
        let known = conflicts.range(extent.start()..=extent.last());
        let bad = known.map(|lba| BadBlock::new(*lba, BadBlockCause::Conflict, None, None)).collect();
        BadBlocks::fail_if_any(bad)
    }

    /// Copies that differ are a conflict for those who expect nothing, too.
    async fn refuse_disputed(&self, asked: &Replicas, disputed: &[Lba]) {
        for lba in disputed {
            let one = Extent::one(*lba);
            let _guard = self.lock_blocks(one).await;
            if !self.is_nosync(one) && self.differ(asked, one, &mut Vec::new()).await {
                self.add_conflict(*lba);
            }
        }
    }

    fn add_conflict(&self, lba: Lba) {
        self.revoke();
        let mut conflicts = self.conflicts.borrow_mut();
        if conflicts.len() < MAX_CONFLICTS {
            conflicts.insert(lba);
        }
    }

    /// Keeps of the blocks that are known to be in conflict those that a check has found so again.
    fn keep_conflicts(&self, extent: Extent, found: &[BadBlock]) {
        let is_found = |lba: &Lba| found.iter().any(|bad| bad.cause == BadBlockCause::Conflict && bad.lba == *lba);
        let mut conflicts = self.conflicts.borrow_mut();
        let known = conflicts.range(extent.start()..=extent.last());
        let gone: Vec<Lba> = known.filter(|lba| !is_found(lba)).copied().collect();
        for lba in gone {
            conflicts.remove(&lba);
        }
    }

    /// The copies of these blocks are equal now.
    pub(crate) fn forget_conflicts(&self, extent: Extent) {
        self.keep_conflicts(extent, &[]);
    }

    /// True if replicas have different data. Adds blocks that became bad since the first check to `bad_blocks`.
    async fn differ(&self, replicas: &Replicas, run: Extent, bad_blocks: &mut Vec<BadBlock>) -> bool {
        let mut crcs = Vec::with_capacity(replicas.len());
        // A replica that failed may be back, and out of sync.
        let replicas: Replicas = replicas.iter().filter(|replica| replica.is_readable()).cloned().collect();
        for (replica, outcome) in replicas.iter().zip(self.checksum_all(&replicas, run, None, Expectations::NONE).await)
        {
            match outcome.map_err(Error::into_bad_blocks) {
                Ok(checksum) => crcs.push(checksum.value),
                Err(Ok(found)) => bad_blocks.extend(found.iter().map(|bad| replica.bad_block(bad))),
                // It failed: that is no conflict, and its copy is reported as unchecked.
                Err(Err(error)) => self.fail_if_unreachable(replica, &error),
            }
        }
        crcs.windows(2).any(|pair| pair[0] != pair[1])
    }
}

/// Number of blocks that are bad on all of so many replicas and were not repaired.
fn count_unrepaired(bad_blocks: &[BadBlock], replicas: usize) -> u64 {
    let lasting = |bad: &&BadBlock| !bad.repaired && bad.cause != BadBlockCause::Conflict;
    let mut lbas: Vec<Lba> = bad_blocks.iter().filter(lasting).map(|bad| bad.lba).collect();
    lbas.sort_unstable();
    lbas.chunk_by(|a, b| a == b).filter(|same| same.len() >= replicas).count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_cover_what_is_left() {
        let extent = Extent::from_raw(10, 10).unwrap();
        let runs = |bad: &[u64]| -> Vec<(u64, u64)> {
            let bad = bad.iter().map(|lba| Lba::new(*lba)).collect();
            runs_between(extent, &bad).iter().map(|run| (run.start().get(), run.len())).collect()
        };
        assert_eq!(runs(&[]), [(10, 10)]);
        assert_eq!(runs(&[10, 11, 15, 19]), [(12, 3), (16, 3)]);
        assert_eq!(runs(&(10..20).collect::<Vec<_>>()), []);
    }
}
