//! Reads and changes of a mirror's blocks.
//!
//! A read goes to one replica. Blocks that are bad there are read from another replica and rewritten (read-repair).
//! A change goes to every replica; overlapping changes run one after the other.

use std::rc::Rc;

use futures_util::future::join_all;
use sealblock_block::{
    BadBlock, BadBlockCause, BadBlocks, Clock, Durability, Error, ErrorKind, Outcome, Request, Response,
};
use sealblock_integrity::{Checks, Sealed};
use sealblock_units::{Extent, Lba};

use crate::mirror::{Mirror, Replicas};
use crate::replica::{Replica, is_unreachable};
use crate::test_hooks::Mutation;

/// Damage that a read has met.
type MetBadBlocks = Vec<(Rc<Replica>, Vec<BadBlock>)>;

/// Blocks in a row and where they were good.
pub(crate) struct FoundBlocks {
    pub extent: Extent,
    pub data: Sealed,
    /// Position of the replica among those that were asked.
    pub source: usize,
}

impl<C: Clock> Mirror<C> {
    /// Reads blocks. Damage on one replica is answered from another and mended before the answer.
    pub(crate) async fn read(&self, extent: Extent, checks: Checks) -> Result<Sealed, Error> {
        // One reader could see a change on a replica that has it, and a later one not yet on another.
        self.range_lock.wait_unlocked(extent).await;
        self.reconcile_for_read(extent).await?;
        if self.is_read_only && self.is_nosync(extent) {
            return self.read_nosync(extent, checks).await;
        }
        let replicas = self.read_balance(extent);
        let mut met: MetBadBlocks = Vec::new();
        let mut failed = None;
        for replica in &replicas {
            // It may have left since, and be back without being up to date.
            if !self.may_read(replica) {
                continue;
            }
            match replica.read(self.geometry.protection, extent, checks).await {
                Ok(data) => {
                    self.repair_met(&met, extent, checks).await;
                    return Ok(data);
                }
                Err(error) => match error.into_bad_blocks() {
                    Ok(bad_blocks) => met.push((replica.clone(), bad_blocks)),
                    Err(error) => {
                        self.fail_if_unreachable(replica, &error);
                        failed = Some(error);
                    }
                },
            }
        }
        if met.is_empty() {
            return Err(failed.unwrap_or_else(|| self.no_replica()));
        }
        self.piece_together(&replicas, &met, extent, checks).await
    }

    /// Reads blocks in which replicas may differ, of a mirror that may not make them alike: from one replica as long as the mirror is open,
    /// or a reader would see now the one and now the other. What is damaged there fails: it may have been read before, and
    /// what others have may be another content.
    async fn read_nosync(&self, extent: Extent, checks: Checks) -> Result<Sealed, Error> {
        loop {
            let first: Replicas = self.in_sync().into_iter().take(1).collect();
            let replica = first.first().ok_or_else(|| self.no_replica())?;
            let is_told_apart = || self.nosync_source.get().is_some_and(|id| id != replica.id);
            if is_told_apart() {
                return Err(other_nosync_source(replica));
            }
            let read = self.gather(&first, extent, checks).await;
            if !replica.is_readable() || is_told_apart() {
                // Nobody has seen anything of it yet, or the next look tells.
                continue;
            }
            let (found, damaged) = read?;
            self.nosync_source.set(Some(replica.id));
            return match BadBlocks::new(damaged) {
                Some(damaged) => {
                    tracing::warn!(replica = %replica.name(), %extent, "damaged where a crash has left members unlike: open for writing");
                    Err(damaged.into())
                }
                None => Ok(Sealed::join(&found.into_iter().map(|found| found.data).collect::<Vec<_>>())),
            };
        }
    }

    /// The blocks that were found, if none is lost.
    fn join_or_fail(&self, found: Vec<FoundBlocks>, lost: Vec<BadBlock>) -> Result<Sealed, Error> {
        match BadBlocks::new(lost) {
            Some(lost) => {
                self.lost_blocks.set(self.lost_blocks.get() + lost.as_slice().len() as u64);
                Err(lost.into())
            }
            None => Ok(Sealed::join(&found.into_iter().map(|found| found.data).collect::<Vec<_>>())),
        }
    }

    /// No replica has all of it: each block from where it is good.
    async fn piece_together(
        &self,
        replicas: &Replicas,
        met: &MetBadBlocks,
        extent: Extent,
        checks: Checks,
    ) -> Result<Sealed, Error> {
        let (found, lost) = self.gather(replicas, extent, checks).await?;
        self.repair_met(met, extent, checks).await;
        self.join_or_fail(found, lost)
    }

    /// Whether a replica that was chosen before may still be read.
    fn may_read(&self, replica: &Replica) -> bool {
        replica.is_readable() || self.mutation == Mutation::ReadResyncing
    }

    /// Where to read from, best first. While blocks are being changed all readers ask the same replica, or what one has seen
    /// another would not see yet.
    fn read_balance(&self, extent: Extent) -> Replicas {
        let replicas = match self.mutation {
            Mutation::ReadResyncing => self.write_targets(),
            _ => self.in_sync(),
        };
        let is_moving = self.range_lock.is_locked(extent) || self.is_nosync(extent);
        if is_moving { replicas } else { self.balance(replicas) }
    }

    /// Gets blocks from these replicas, in their order: all from one where it has them, else block by block. Also those that no replica
    /// has, as the first one says.
    ///
    /// # Errors
    /// When a replica could not be asked and no other one has the block: it may well be good there.
    pub(crate) async fn gather(
        &self,
        replicas: &Replicas,
        extent: Extent,
        checks: Checks,
    ) -> Result<(Vec<FoundBlocks>, Vec<BadBlock>), Error> {
        if replicas.len() == 1 || extent.len() > 1 {
            for (source, replica) in replicas.iter().enumerate().filter(|(_, replica)| self.may_read(replica)) {
                if let Ok(data) = replica.read(self.geometry.protection, extent, checks).await {
                    return Ok((vec![FoundBlocks { extent, data, source }], Vec::new()));
                }
            }
        }
        let (mut found, mut lost) = (Vec::new(), Vec::new());
        for lba in extent.iter() {
            let one = Extent::one(lba);
            match self.gather_one(replicas, one, self.checks_from(&checks, extent, lba)).await? {
                Ok(good) => found.push(good),
                Err(why) => lost.push(why),
            }
        }
        Ok((found, lost))
    }

    async fn gather_one(
        &self,
        replicas: &Replicas,
        one: Extent,
        checks: Checks,
    ) -> Result<Result<FoundBlocks, BadBlock>, Error> {
        let (mut why, mut failed): (Option<BadBlock>, Option<Error>) = (None, None);
        for (source, replica) in replicas.iter().enumerate() {
            if !self.may_read(replica) {
                failed.get_or_insert_with(|| self.no_replica());
                continue;
            }
            match replica.read(self.geometry.protection, one, checks).await.map_err(Error::into_bad_blocks) {
                Ok(data) => return Ok(Ok(FoundBlocks { extent: one, data, source })),
                // An older copy somewhere says less than what became of the current one.
                Err(Ok(bad_blocks)) => {
                    why = why.filter(|why| why.cause != BadBlockCause::Stale).or(bad_blocks.first().copied()).or(why)
                }
                Err(Err(error)) => {
                    self.fail_if_unreachable(replica, &error);
                    failed = Some(error);
                }
            }
        }
        // A replica that is gone is left behind: what the others say counts.
        match (why, failed) {
            (None, Some(error)) => Err(error),
            (why, _) => Ok(Err(why.unwrap_or(BadBlock::media(one.start())))),
        }
    }

    /// The checks of a request over `extent`, from a block of it on.
    pub(crate) fn checks_from(&self, checks: &Checks, extent: Extent, lba: Lba) -> Checks {
        let blocks = lba.get() - extent.start().get();
        self.geometry.protection.map_or(*checks, |format| checks.advance(blocks, format))
    }

    /// Mends what a read over `extent` has met. What cannot be mended stays as it is.
    async fn repair_met(&self, met: &MetBadBlocks, extent: Extent, checks: Checks) {
        if self.is_read_only {
            return;
        }
        for (replica, bad_blocks) in met {
            for bad in bad_blocks {
                self.repair_block(replica, bad, self.checks_from(&checks, extent, bad.lba)).await;
            }
        }
    }

    /// Writes a damaged block anew from another replica; whether it is good now.
    pub(crate) async fn repair_block(&self, replica: &Replica, bad: &BadBlock, checks: Checks) -> bool {
        let (one, format) = (Extent::one(bad.lba), self.geometry.protection);
        let _guard = self.range_lock.lock(one).await;
        let attach_count = replica.attach_count();
        if replica.read(format, one, checks).await.is_ok() {
            // Somebody has changed it since.
            return true;
        }
        let mut others = self.in_sync();
        others.retain(|other| other.id != replica.id);
        for other in others.iter().filter(|other| other.is_readable()) {
            let Ok(data) = other.read(format, one, checks).await else { continue };
            if let Err(error) = replica.put(format, one, &data).await {
                if self.in_sync().len() > 1 {
                    self.fail_replica_if_attached(
                        replica,
                        attach_count,
                        &format!("a damaged block could not be written anew: {error}"),
                    );
                }
                return false;
            }
            let is_good = matches!(
                replica.execute(format, Request::Verify { extent: one, checks }).await,
                Ok(Response::Verified(_))
            );
            if is_good {
                replica.repaired_blocks.set(replica.repaired_blocks.get() + 1);
                tracing::warn!(replica = %replica.name(), %bad, "bad block repaired");
            }
            return is_good;
        }
        self.accept_if_proven(replica, &others, one).await
    }

    /// Leaves a replica behind that an error other than damage tells to be lost.
    pub(crate) fn fail_if_unreachable(&self, replica: &Replica, error: &Error) {
        if replica.is_unreachable() {
            self.fail_replica(replica, &error.to_string());
        }
    }
}

#[cold]
fn other_nosync_source(replica: &Replica) -> Error {
    let reason = format!(
        "a crash has left members unlike here, and {} is not the one that was read before; open the mirror for writing",
        replica.name()
    );
    ErrorKind::Unreachable { reason }.into()
}

/// Leaves the replicas suspect, should a change end half-way: it failed, or whoever asked has gone away.
struct NosyncOnDrop<'a, C: Clock> {
    mirror: &'a Mirror<C>,
    extent: Option<Extent>,
}

impl<C: Clock> Drop for NosyncOnDrop<'_, C> {
    fn drop(&mut self) {
        if let Some(extent) = self.extent {
            self.mirror.mark_nosync(extent);
        }
    }
}

/// What became of a request on a replica.
pub(crate) struct ReplicaResult {
    replica: Rc<Replica>,
    /// Which of its devices was asked.
    attach_count: u64,
    outcome: Outcome,
}

impl ReplicaResult {
    /// Whether a replica in sync has carried it out. What a device did that is gone since may be gone with it, also where the replica
    /// is back and current.
    fn is_written(&self) -> bool {
        self.outcome.is_ok() && self.replica.is_readable() && self.replica.attach_count() == self.attach_count
    }
}

#[cold]
fn lost_before_completion() -> Error {
    let reason = "the last replica that had it went away before the answer".to_owned();
    ErrorKind::Unreachable { reason }.into()
}

impl<C: Clock> Mirror<C> {
    /// Asks replicas, all at once.
    pub(crate) async fn execute_on(&self, replicas: &Replicas, request: &Request) -> Vec<ReplicaResult> {
        let ask = |replica: &Rc<Replica>| {
            let (replica, attach_count) = (Rc::clone(replica), replica.attach_count());
            async move {
                let outcome = replica.execute(self.geometry.protection, request.clone()).await;
                ReplicaResult { replica, attach_count, outcome }
            }
        };
        join_all(replicas.iter().map(ask)).await
    }

    /// Carries out a Write, WriteZeroes or WriteUncorrectable on every replica.
    pub(crate) async fn change(&self, extent: Extent, request: Request) -> Outcome {
        if self.is_read_only {
            return Err(ErrorKind::ReadOnly.into());
        }
        // Two replicas could otherwise carry out overlapping writes in different orders, and differ for good.
        let _guard = match self.mutation {
            Mutation::Unordered => None,
            _ => Some(self.range_lock.lock(extent).await),
        };
        self.change_locked(extent, request).await
    }

    /// The same for blocks that the caller has claimed.
    pub(crate) async fn change_locked(&self, extent: Extent, request: Request) -> Outcome {
        self.mark_dirty(extent).await?;
        let (replicas, is_durable) = (self.write_targets(), !request.is_volatile());
        let mut unfinished = NosyncOnDrop { mirror: self, extent: Some(extent) };
        let asked = self.execute_on(&replicas, &request).await;
        self.complete_write(asked, Some(&mut unfinished.extent)).await?;
        unfinished.extent = None;
        if is_durable && self.has_rewritten() {
            // The labels may still list the blocks as those of which a replica has only older copies.
            self.flush_internally().await?;
        }
        Ok(Response::Done)
    }

    /// What blocks read as after a Discard must be the same on every replica, so they become zeroes.
    pub(crate) async fn discard(&self, extents: &[Extent]) -> Outcome {
        for &extent in extents {
            let zero = Request::WriteZeroes { extent, may_unmap: true, durability: Durability::Volatile };
            self.change(extent, zero).await?;
        }
        Ok(Response::Done)
    }

    /// Judges what became of a request that went to every replica. It is well if a current replica has carried it out; those that have
    /// not are left behind, and that is noted before this returns. With `undone`, a request that only some have carried
    /// out although it failed leaves them suspect.
    pub(crate) async fn complete_write(
        &self,
        asked: Vec<ReplicaResult>,
        undone: Option<&mut Option<Extent>>,
    ) -> Result<(), Error> {
        let is_well = asked.iter().any(ReplicaResult::is_written);
        if is_well && asked.iter().all(|asked| asked.outcome.is_ok()) {
            // A replica that somebody else has left behind was not asked, and lacks this.
            return self.record_failures_for(&asked).await;
        }
        // A request that cannot be met says nothing about the replica.
        let refused = |error: &Error| {
            matches!(error.kind(), ErrorKind::Limit { .. } | ErrorKind::Range { .. } | ErrorKind::Absent(_))
        };
        let all_refused = asked.iter().all(|asked| asked.outcome.as_ref().is_err_and(refused));
        let mut first: Option<Error> = None;
        for ReplicaResult { replica, attach_count, outcome } in &asked {
            let Err(error) = outcome else { continue };
            // What was asked may be gone, and another device there that was never asked.
            if (is_well || is_unreachable(error)) && replica.attach_count() == *attach_count {
                self.fail_replica(replica, &error.to_string());
            }
            // One that is there says more.
            first = first.filter(|first| !is_unreachable(first)).or_else(|| Some(error.clone()));
        }
        if is_well {
            return self.record_failures_for(&asked).await;
        }
        if let (true, Some(undone)) = (all_refused, undone) {
            *undone = None;
        }
        Err(first.unwrap_or_else(|| self.no_replica()))
    }

    /// Notes who was left behind, before the answer to a request that these replicas were asked.
    ///
    /// # Errors
    /// When that cannot be noted, or nobody has the change any more once it is.
    async fn record_failures_for(&self, asked: &[ReplicaResult]) -> Result<(), Error> {
        if !self.write_intent.has_unrecorded_failure() || self.mutation == Mutation::CompleteEarly {
            return Ok(());
        }
        self.write_labels().await?;
        match asked.iter().any(ReplicaResult::is_written) {
            true => Ok(()),
            false => Err(lost_before_completion()),
        }
    }

    /// Compares blocks where they are, on every current replica.
    pub(crate) async fn compare(&self, extent: Extent, data: Sealed) -> Outcome {
        self.reconcile_for_read(extent).await?;
        let replicas = self.in_sync();
        let compares = replicas
            .iter()
            .map(|replica| replica.execute(self.geometry.protection, Request::Compare { extent, data: data.clone() }));
        let outcomes = join_all(compares).await;
        let (mut differs, mut is_well, mut failed): (Option<Lba>, bool, Option<Error>) = (None, false, None);
        for (replica, outcome) in replicas.iter().zip(outcomes) {
            match outcome {
                Ok(_) => is_well = true,
                Err(error) => match error.kind() {
                    ErrorKind::Miscompare { lba } => differs = Some(differs.map_or(*lba, |known| known.min(*lba))),
                    _ => {
                        self.fail_if_unreachable(replica, &error);
                        failed = failed.or(Some(error));
                    }
                },
            }
        }
        match (differs, is_well) {
            (Some(lba), _) => Err(ErrorKind::Miscompare { lba }.into()),
            // Damage on a replica that another replica does not have: a read or a repair will find and mend it.
            (None, true) => Ok(Response::Done),
            (None, false) => Err(failed.unwrap_or_else(|| self.no_replica())),
        }
    }
}
