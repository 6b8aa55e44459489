//! Changes of a mirror's blocks, on every replica, and flushes.
//!
//! Overlapping changes run one after the other. A change completes when every replica has executed it or durable labels
//! mark the replica out of sync; one that ended half-way leaves its blocks nosync.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::rc::Rc;

use sealblock_block::{Clock, Durability, Error, ErrorKind, Outcome, Request, Response};
use sealblock_units::Extent;
use smallvec::SmallVec;

use crate::mirror::{Mirror, Mutation, Replicas};
use crate::regions::Regions;
use crate::replica::{Replica, is_unreachable, side_by_side};

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
    /// `None` until the replica has executed it.
    outcome: Option<Result<(), Error>>,
}

/// Results of a request on several replicas.
pub(crate) type ReplicaResults = SmallVec<[ReplicaResult; 2]>;

impl ReplicaResult {
    /// True if the replica executed the request, and is still in sync with the same device. A device that was
    /// detached since may have lost the change, even if the replica is back in sync.
    fn is_written(&self) -> bool {
        matches!(self.outcome, Some(Ok(())))
            && self.replica.is_readable()
            && self.replica.attach_count() == self.attach_count
    }

    fn error(&self) -> Option<&Error> {
        self.outcome.as_ref()?.as_ref().err()
    }
}

/// Withheld blocks of a replica that were written.
pub(crate) struct RewrittenBlocks {
    replica: Rc<Replica>,
    attach_count: u64,
    blocks: BTreeSet<u64>,
}

impl RewrittenBlocks {
    /// The written blocks of a replica that still need a flush.
    pub fn of(replica: &Rc<Replica>) -> RewrittenBlocks {
        RewrittenBlocks {
            replica: replica.clone(),
            attach_count: replica.attach_count(),
            blocks: replica.stale.borrow().rewritten().clone(),
        }
    }
}

impl<C: Clock> Mirror<C> {
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
        let asked = execute_on(replicas, &request).await;
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
        asked: ReplicaResults,
        nosync_extent: Option<&mut Option<Extent>>,
    ) -> Result<(), Error> {
        let is_executed = asked.iter().any(ReplicaResult::is_written);
        if is_executed && asked.iter().all(|asked| asked.error().is_none()) {
            // The request did not go to a replica that failed in another request, which lacks this change.
            return self.record_failures_for(&asked).await;
        }
        // An invalid request says nothing about the state of the replica.
        let refused = |error: &Error| {
            matches!(
                error.kind(),
                ErrorKind::Expectation { .. }
                    | ErrorKind::Limit { .. }
                    | ErrorKind::Range { .. }
                    | ErrorKind::Absent(_)
            )
        };
        let all_refused = asked.iter().all(|asked| asked.error().is_some_and(refused));
        let mut first: Option<Error> = None;
        for result in &asked {
            let Some(error) = result.error() else { continue };
            // The device that failed may be detached by now, and another one attached.
            if is_executed || is_unreachable(error) {
                self.fail_replica_if_attached(&result.replica, result.attach_count, &error.to_string());
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

    /// Makes all completed writes durable on every replica.
    pub(crate) async fn flush(&self) -> Result<(), Error> {
        if self.is_read_only {
            return Ok(());
        }
        if self.writes_lost.replace(false) {
            return Err(writes_lost());
        }
        if !self.write_intent.dirty.borrow().is_empty() {
            // An offline replica has not flushed changes that completed before this opening; after this flush it must
            // count as out of sync.
            self.record_failures().await?;
        }
        self.flush_replicas().await
    }

    /// Flushes for the mirror itself, without reporting earlier losses. No writer sees a failure here, and a replica
    /// reports a lost write once, so the next flush from above reports it. An unreachable replica reports it when it
    /// is back.
    pub(crate) async fn flush_internally(&self) -> Result<(), Error> {
        self.flush_replicas().await.inspect_err(|error| {
            if !is_unreachable(error) && !self.write_intent.dirty.borrow().is_empty() && !self.writes_lost.replace(true)
            {
                tracing::warn!(%error, "cannot flush the mirror; the next flush of its user fails");
            }
        })
    }

    /// Makes all completed writes durable on every replica, without reporting earlier losses.
    pub(crate) async fn flush_replicas(&self) -> Result<(), Error> {
        let (changes, is_idle, rewritten) =
            (self.write_intent.changes.get(), self.range_lock.is_idle(), self.rewritten());
        let asked = execute_on(self.write_targets(), &Request::flush()).await;
        let flushed = self.complete_write(asked, None).await;
        if flushed.is_err() {
            // Each replica may have lost other writes, also a resyncing one.
            self.mark_dirty_nosync();
        }
        flushed?;
        if is_idle {
            self.write_intent.flushed_changes.set(changes);
        }
        if rewritten.is_empty() {
            return Ok(());
        }
        // A block that labels still list would become stale again at a crash.
        self.forget_rewritten(&rewritten);
        self.write_labels().await
    }

    /// Withheld blocks that were written, for each replica and its device.
    pub(crate) fn rewritten(&self) -> Vec<RewrittenBlocks> {
        let replicas = self.replicas.borrow();
        replicas.iter().map(RewrittenBlocks::of).filter(|rewritten| !rewritten.blocks.is_empty()).collect()
    }

    /// Drops blocks whose write is durable from the lists, if the device is still attached.
    pub(crate) fn forget_rewritten(&self, rewritten: &[RewrittenBlocks]) {
        for RewrittenBlocks { replica, attach_count, blocks } in rewritten {
            if replica.attach_count() == *attach_count {
                replica.stale.borrow_mut().forget_rewritten(blocks);
            }
        }
    }

    /// True if labels still list blocks that were written.
    pub(crate) fn has_rewritten(&self) -> bool {
        self.replicas.borrow().iter().any(|replica| !replica.stale.borrow().rewritten().is_empty())
    }

    /// Takes groups of regions out of the labels in which nothing was changed since the last sweep, after a flush of
    /// every replica.
    pub(crate) async fn clear_clean_regions(&self) -> Result<(), Error> {
        let recent = self.write_intent.written_since_sweep.replace(Regions::none(self.map.count()));
        let is_quiet = |group: &RangeInclusive<u32>| {
            !self.write_intent.written_since_sweep.borrow().contains_any(group.clone())
                && !self.write_intent.nosync.borrow().contains_any(group.clone())
                && !self.range_lock.is_locked(self.map.group_extent(group))
        };
        let mut quiet = self.dirty_groups();
        quiet.retain(|group| !recent.contains_any(group.clone()) && is_quiet(group));
        if quiet.is_empty() && !self.has_rewritten() {
            return if self.write_intent.has_unwritten() { self.write_labels().await } else { Ok(()) };
        }
        if self.mutation != Mutation::ClearUnflushed {
            self.flush_internally().await?;
        }
        for group in quiet.into_iter().filter(is_quiet) {
            // The same labels record what an offline replica lacks of it.
            self.write_intent.dirty.borrow_mut().remove_all(group.clone());
            self.write_intent.unrecorded.borrow_mut().remove_all(group.clone());
            self.write_intent.written.borrow_mut().remove_all(group);
        }
        self.write_labels().await
    }

    fn dirty_groups(&self) -> Vec<RangeInclusive<u32>> {
        let (dirty, mut groups, mut from) = (self.write_intent.dirty.borrow(), Vec::new(), 0);
        while let Some(region) = dirty.next(from) {
            let group = self.map.group(region);
            from = group.end() + 1;
            groups.push(group);
        }
        groups
    }
}

/// Executes a request on these replicas, on all at once: in place on those that need not wait.
pub(crate) async fn execute_on(replicas: Replicas, request: &Request) -> ReplicaResults {
    let attempt = |replica: Rc<Replica>| {
        let attach_count = replica.attach_count();
        let outcome = replica.try_execute(request).map(|outcome| outcome.map(drop));
        ReplicaResult { replica, attach_count, outcome }
    };
    let mut results: ReplicaResults = replicas.into_iter().map(attempt).collect();
    let waiting = results.iter_mut().filter(|result| result.outcome.is_none());
    side_by_side(waiting.map(|result| async {
        result.outcome = Some(result.replica.execute_waiting(request.clone()).await.map(drop));
    }))
    .await;
    results
}

#[cold]
fn lost_before_completion() -> Error {
    let reason = "the last replica that executed the request failed before it completed".to_owned();
    ErrorKind::Unreachable { reason }.into()
}

#[cold]
pub(crate) fn writes_lost() -> Error {
    let reason = "the last in-sync replica failed or could not flush; unflushed writes may be lost".to_owned();
    ErrorKind::Media { reason }.into()
}
