//! Reads and changes of a mirror's blocks.
//!
//! A read goes to one replica. Blocks that are bad there are read from another replica and rewritten (read-repair). A
//! change goes to every replica; overlapping changes run one after the other.

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

/// Bad blocks that a read met, by replica.
type MetBadBlocks = Vec<(Rc<Replica>, Vec<BadBlock>)>;

/// Consecutive good blocks and their source.
pub(crate) struct FoundBlocks {
    pub extent: Extent,
    pub data: Sealed,
    /// Index of the replica among those that were tried.
    pub source: usize,
}

impl<C: Clock> Mirror<C> {
    /// Reads blocks. Blocks that are bad on one replica are read from another, and repaired before the read
    /// completes.
    pub(crate) async fn read(&self, extent: Extent, checks: Checks) -> Result<Sealed, Error> {
        // Otherwise one reader could see a change on a replica that has it, and a later reader the old content on
        // another.
        self.range_lock.wait_unlocked(extent).await;
        self.reconcile_for_read(extent).await?;
        if self.is_read_only && self.is_nosync(extent) {
            return self.read_nosync(extent, checks).await;
        }
        let replicas = self.read_balance(extent);
        let mut met: MetBadBlocks = Vec::new();
        let mut failed = None;
        for replica in &replicas {
            // The replica may have failed since, and be back without being in sync.
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

    /// Reads nosync blocks of a read-only mirror, which cannot reconcile them. All such reads go to one replica until
    /// the mirror is closed: readers must not see two contents. Bad blocks there fail: a reader may have seen their
    /// content, and another replica may have another content.
    async fn read_nosync(&self, extent: Extent, checks: Checks) -> Result<Sealed, Error> {
        loop {
            let first: Replicas = self.in_sync().into_iter().take(1).collect();
            let replica = first.first().ok_or_else(|| self.no_replica())?;
            let is_other_source = || self.nosync_source.get().is_some_and(|id| id != replica.id);
            if is_other_source() {
                return Err(other_nosync_source(replica));
            }
            let read = self.gather(&first, extent, checks).await;
            if !replica.is_readable() || is_other_source() {
                // No reader has seen this data yet. The next turn reads from the replica that counts.
                continue;
            }
            let (found, damaged) = read?;
            self.nosync_source.set(Some(replica.id));
            return match BadBlocks::new(damaged) {
                Some(damaged) => {
                    tracing::warn!(replica = %replica.name(), %extent, "bad block where a crash left replicas different: open the mirror for writing");
                    Err(damaged.into())
                }
                None => Ok(Sealed::join(found.into_iter().map(|found| found.data))),
            };
        }
    }

    /// Joins the data, or fails with the blocks that no replica has.
    fn join_or_fail(&self, found: Vec<FoundBlocks>, lost: Vec<BadBlock>) -> Result<Sealed, Error> {
        match BadBlocks::new(lost) {
            Some(lost) => {
                self.lost_blocks.set(self.lost_blocks.get() + lost.as_slice().len() as u64);
                Err(lost.into())
            }
            None => Ok(Sealed::join(found.into_iter().map(|found| found.data))),
        }
    }

    /// Reads each block from a replica on which it is good; no replica has all of them.
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

    /// True if a replica that was chosen earlier may still be read.
    fn may_read(&self, replica: &Replica) -> bool {
        replica.is_readable() || self.mutation == Mutation::ReadResyncing
    }

    /// The replicas to read from, best first. While blocks are locked or nosync all readers use the same replica: a
    /// later reader must not see older content than an earlier one.
    fn read_balance(&self, extent: Extent) -> Replicas {
        let replicas = match self.mutation {
            Mutation::ReadResyncing => self.write_targets(),
            _ => self.in_sync(),
        };
        let is_unstable = self.range_lock.is_locked(extent) || self.is_nosync(extent);
        if is_unstable { replicas } else { self.balance(replicas) }
    }

    /// Reads blocks from these replicas in their order: all from one that has them all, else block by block. Also
    /// returns the blocks that no replica has, with the cause on the first replica.
    ///
    /// # Errors
    /// When a replica fails and no other one has the block: it may be good there.
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
                Err(cause) => lost.push(cause),
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
        let (mut cause, mut failed): (Option<BadBlock>, Option<Error>) = (None, None);
        for (source, replica) in replicas.iter().enumerate() {
            if !self.may_read(replica) {
                failed.get_or_insert_with(|| self.no_replica());
                continue;
            }
            match replica.read(self.geometry.protection, one, checks).await.map_err(Error::into_bad_blocks) {
                Ok(data) => return Ok(Ok(FoundBlocks { extent: one, data, source })),
                // A stale copy says less than the cause on a replica that had the current one.
                Err(Ok(bad_blocks)) => {
                    cause = cause
                        .filter(|cause| cause.cause != BadBlockCause::Stale)
                        .or(bad_blocks.first().copied())
                        .or(cause)
                }
                Err(Err(error)) => {
                    self.fail_if_unreachable(replica, &error);
                    failed = Some(error);
                }
            }
        }
        // A failed replica is out of sync by now: the result of the others counts.
        match (cause, failed) {
            (None, Some(error)) => Err(error),
            (cause, _) => Ok(Err(cause.unwrap_or(BadBlock::media(one.start())))),
        }
    }

    /// The checks of a request over `extent`, from block `lba` on.
    pub(crate) fn checks_from(&self, checks: &Checks, extent: Extent, lba: Lba) -> Checks {
        let blocks = lba.get() - extent.start().get();
        self.geometry.protection.map_or(*checks, |format| checks.advance(blocks, format))
    }

    /// Repairs the bad blocks that a read over `extent` met. A block that cannot be repaired stays bad.
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

    /// Rewrites a bad block from another replica; true if it is good now.
    pub(crate) async fn repair_block(&self, replica: &Replica, bad: &BadBlock, checks: Checks) -> bool {
        let (one, format) = (Extent::one(bad.lba), self.geometry.protection);
        let _guard = self.range_lock.lock(one).await;
        let attach_count = replica.attach_count();
        if replica.read(format, one, checks).await.is_ok() {
            // A change rewrote it meanwhile.
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
                        &format!("cannot rewrite a bad block: {error}"),
                    );
                }
                return false;
            }
            let is_good =
                matches!(replica.execute(format, Request::verify(one, checks)).await, Ok(Response::Verified(_)));
            if is_good {
                replica.repaired_blocks.set(replica.repaired_blocks.get() + 1);
                tracing::warn!(replica = %replica.name(), %bad, "bad block repaired");
            }
            return is_good;
        }
        self.accept_if_proven(replica, &others, one).await
    }

    /// Marks the replica out of sync if `error` means that its device is unreachable.
    pub(crate) fn fail_if_unreachable(&self, replica: &Replica, error: &Error) {
        if replica.is_unreachable() {
            self.fail_replica(replica, &error.to_string());
        }
    }
}

#[cold]
fn other_nosync_source(replica: &Replica) -> Error {
    let reason = format!(
        "a crash left replicas different here, and {} is not the replica that was read before; open the mirror for writing",
        replica.name()
    );
    ErrorKind::Unreachable { reason }.into()
}

/// Marks an extent nosync when dropped, if a change ended half-way: it failed, or its caller dropped it.
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

/// Result of a request on one replica.
pub(crate) struct ReplicaResult {
    replica: Rc<Replica>,
    /// The replica's attach count at the start of the request.
    attach_count: u64,
    outcome: Outcome,
}

impl ReplicaResult {
    /// True if the replica executed the request, and is still in sync with the same device. A device that was
    /// detached since may have lost the change, even if the replica is back in sync.
    fn is_written(&self) -> bool {
        self.outcome.is_ok() && self.replica.is_readable() && self.replica.attach_count() == self.attach_count
    }
}

#[cold]
fn lost_before_completion() -> Error {
    let reason = "the last replica that executed the request failed before it completed".to_owned();
    ErrorKind::Unreachable { reason }.into()
}

impl<C: Clock> Mirror<C> {
    /// Executes a request on these replicas, on all at once.
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

    /// Executes a Write, WriteZeroes or WriteUncorrectable on every replica.
    pub(crate) async fn change(&self, extent: Extent, request: Request) -> Outcome {
        if self.is_read_only {
            return Err(ErrorKind::ReadOnly.into());
        }
        // Without the lock, two replicas could execute overlapping writes in different orders and differ for good.
        let _guard = match self.mutation {
            Mutation::Unordered => None,
            _ => Some(self.range_lock.lock(extent).await),
        };
        self.change_locked(extent, request).await
    }

    /// Executes a change whose blocks the caller has locked.
    pub(crate) async fn change_locked(&self, extent: Extent, request: Request) -> Outcome {
        self.mark_dirty(extent).await?;
        let (replicas, is_durable) = (self.write_targets(), !request.is_volatile());
        let mut unfinished = NosyncOnDrop { mirror: self, extent: Some(extent) };
        let asked = self.execute_on(&replicas, &request).await;
        self.complete_write(asked, Some(&mut unfinished.extent)).await?;
        unfinished.extent = None;
        if is_durable && self.has_rewritten() {
            // The labels may still list these blocks as stale.
            self.flush_internally().await?;
        }
        Ok(Response::Done)
    }

    /// Zeroes blocks: they must read the same on every replica after a Discard.
    pub(crate) async fn discard(&self, extents: &[Extent]) -> Outcome {
        for &extent in extents {
            let zero = Request::write_zeroes(extent, true, Durability::Volatile);
            self.change(extent, zero).await?;
        }
        Ok(Response::Done)
    }

    /// Completes a request that went to every replica. It succeeds if an in-sync replica executed it. Replicas that
    /// did not are marked out of sync, durably before this returns. A request that failed on all replicas but may
    /// have been executed on some leaves `nosync_extent`, whose blocks become nosync.
    pub(crate) async fn complete_write(
        &self,
        asked: Vec<ReplicaResult>,
        nosync_extent: Option<&mut Option<Extent>>,
    ) -> Result<(), Error> {
        let is_executed = asked.iter().any(ReplicaResult::is_written);
        if is_executed && asked.iter().all(|asked| asked.outcome.is_ok()) {
            // The request did not go to a replica that failed in another request, which lacks this change.
            return self.record_failures_for(&asked).await;
        }
        // An invalid request says nothing about the state of the replica.
        let refused = |error: &Error| {
            matches!(error.kind(), ErrorKind::Limit { .. } | ErrorKind::Range { .. } | ErrorKind::Absent(_))
        };
        let all_refused = asked.iter().all(|asked| asked.outcome.as_ref().is_err_and(refused));
        let mut first: Option<Error> = None;
        for ReplicaResult { replica, attach_count, outcome } in &asked {
            let Err(error) = outcome else { continue };
            // The device that failed may be detached by now, and another one attached.
            if (is_executed || is_unreachable(error)) && replica.attach_count() == *attach_count {
                self.fail_replica(replica, &error.to_string());
            }
            // The error of a reachable replica says more.
            first = first.filter(|first| !is_unreachable(first)).or_else(|| Some(error.clone()));
        }
        if is_executed {
            return self.record_failures_for(&asked).await;
        }
        if let (true, Some(nosync_extent)) = (all_refused, nosync_extent) {
            *nosync_extent = None;
        }
        Err(first.unwrap_or_else(|| self.no_replica()))
    }

    /// Writes outstanding failures to the labels before a request that went to these replicas completes.
    ///
    /// # Errors
    /// When no label can be written, or no in-sync replica has the change afterwards.
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

    /// Executes a Compare on every in-sync replica.
    pub(crate) async fn compare(&self, extent: Extent, data: Sealed) -> Outcome {
        self.reconcile_for_read(extent).await?;
        let replicas = self.in_sync();
        let compares = replicas
            .iter()
            .map(|replica| replica.execute(self.geometry.protection, Request::compare(extent, data.clone())));
        let outcomes = join_all(compares).await;
        let (mut differs, mut is_executed, mut failed): (Option<Lba>, bool, Option<Error>) = (None, false, None);
        for (replica, outcome) in replicas.iter().zip(outcomes) {
            match outcome {
                Ok(_) => is_executed = true,
                Err(error) => match error.kind() {
                    ErrorKind::Miscompare { lba } => differs = Some(differs.map_or(*lba, |known| known.min(*lba))),
                    _ => {
                        self.fail_if_unreachable(replica, &error);
                        failed = failed.or(Some(error));
                    }
                },
            }
        }
        match (differs, is_executed) {
            (Some(lba), _) => Err(ErrorKind::Miscompare { lba }.into()),
            // A block is bad on one replica and equal on another: a read or a repair rewrites it.
            (None, true) => Ok(Response::Done),
            (None, false) => Err(failed.unwrap_or_else(|| self.no_replica())),
        }
    }
}
