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

use crate::mirror::replica::{Replica, is_unreachable, side_by_side};
use crate::mirror::write_intent::WriteIntent;
use crate::mirror::{Mirror, Mutation, Replicas};

/// Marks an extent nosync when dropped, if a change ended half-way: it failed, or its caller dropped it.
pub(crate) struct NosyncOnDrop<'a, C: Clock> {
    mirror: &'a Mirror<C>,
    /// `None` once replicas cannot differ there.
    pub extent: Option<Extent>,
}

impl<'a, C: Clock> NosyncOnDrop<'a, C> {
    pub fn new(mirror: &'a Mirror<C>, extent: Extent) -> NosyncOnDrop<'a, C> {
        NosyncOnDrop { mirror, extent: Some(extent) }
    }
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
    pub replica: Rc<Replica>,
    /// The replica's attach count at the start of the request.
    pub attach_count: u64,
    /// `None` until the replica has executed it.
    pub outcome: Option<Result<(), Error>>,
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
        let _guard = match self.mutation.injected() {
            Mutation::Unordered => None,
            _ => Some(self.lock_blocks(extent).await),
        };
        let changed = self.change_locked(extent, request).await?;
        if self.has_rewritten_in(extent) {
            // The labels still list these blocks as stale, and the replicas may hold nothing else of them. If only this process ends, an
            // unflushed change stays and its block would be withheld again.
            self.flush_internally().await?;
        }
        Ok(changed)
    }

    /// Has the labels mark the blocks of a change, which the caller has locked, before a replica executes it.
    pub(crate) async fn prepare_change(&self, extent: Extent) -> Result<(), Error> {
        self.make_room(extent).await;
        self.mark_dirty(extent).await
    }

    /// Executes a change whose blocks the caller has locked.
    pub(crate) async fn change_locked(&self, extent: Extent, request: Request) -> Outcome {
        self.prepare_change(extent).await?;
        let mut unfinished = NosyncOnDrop::new(self, extent);
        let asked = execute_on(self.write_targets(), &request).await;
        self.complete_write(asked, Some(&mut unfinished.extent)).await?;
        unfinished.extent = None;
        self.forget_conflicts(extent);
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
        if !self.write_intent.has_unrecorded_failure() || self.mutation.is(Mutation::CompleteEarly) {
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
        if self.write_intent.has_unflushed() {
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
            if !is_unreachable(error) && self.write_intent.has_unflushed() && !self.writes_lost.replace(true) {
                tracing::warn!(%error, "cannot flush the mirror; the next flush of its user fails");
            }
        })
    }

    /// Makes all completed writes durable on every replica, without reporting earlier losses.
    pub(crate) async fn flush_replicas(&self) -> Result<(), Error> {
        let (covered, rewritten) = (self.begin_flush(), self.rewritten());
        let asked = execute_on(self.write_targets(), &Request::flush()).await;
        let flushed = self.complete_write(asked, None).await;
        if flushed.is_err() {
            // Each replica may have lost other writes, also a resyncing one.
            self.mark_dirty_nosync();
        }
        flushed?;
        self.end_flush(covered);
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

    /// The same of these blocks.
    fn has_rewritten_in(&self, extent: Extent) -> bool {
        let blocks = extent.start().get()..=extent.last().get();
        let replicas = self.replicas.borrow();
        replicas.iter().any(|replica| replica.stale.borrow().rewritten().range(blocks.clone()).next().is_some())
    }

    /// Lets the labels forget withheld blocks that repairs wrote.
    pub(crate) async fn forget_repaired(&self) {
        if self.has_rewritten()
            && let Err(error) = self.flush_internally().await
        {
            tracing::debug!(%error, "cannot flush repaired blocks; labels go on listing them as stale");
        }
    }

    /// Number of the last change that a flush which begins now covers. Changes in flight, and regions still to be
    /// reconciled, count as changed later.
    fn begin_flush(&self) -> u64 {
        let (changes, flushed) = (&self.write_intent.changes, self.write_intent.flushed_changes.get());
        let covered = changes.get();
        let is_busy = |group| !self.is_at_rest(&self.map.group_at(group));
        if self.hot.borrow_mut().postpone(flushed, covered + 1, is_busy) {
            changes.set(covered + 1);
        }
        covered
    }

    /// Changes up to this number are durable on every in-sync replica: from now on one that fails does not lack them.
    fn end_flush(&self, covered: u64) {
        let (intent, flushed) = (&self.write_intent, self.write_intent.flushed_changes.get());
        // Another flush failed meanwhile, and copies that make replicas equal there are not flushed yet.
        let is_nosync = |group| intent.nosync.borrow().contains_any(self.map.group_at(group));
        if !intent.nosync.borrow().is_empty()
            && self.hot.borrow_mut().postpone(flushed, intent.changes.get() + 1, is_nosync)
        {
            intent.changes.set(intent.changes.get() + 1);
        }
        for group in self.hot.borrow().changed_after(flushed).filter(|group| group.change <= covered) {
            intent.written.borrow_mut().remove_all(self.map.group_at(group.group));
        }
        intent.flushed_changes.set(flushed.max(covered));
    }

    /// True if no change is in flight in these regions of a group, and all in-sync replicas have the same there.
    pub(crate) fn is_at_rest(&self, group: &RangeInclusive<u32>) -> bool {
        let passes = self.mutation.is(Mutation::CloseInFlight) && self.is_closing.get();
        !self.write_intent.nosync.borrow().contains_any(group.clone())
            && (passes || !self.range_lock.is_locked(self.map.group_extent(group).into()))
    }

    /// Waits until the labels have room for the groups of an extent, unless none can leave.
    async fn make_room(&self, extent: Extent) {
        let intent = &self.write_intent;
        let lacks_room = || {
            let groups = self.map.groups(&self.map.of(extent));
            self.hot.borrow().is_full() && !intent.dirty.borrow().contains_all(groups)
        };
        while lacks_room() {
            if intent.is_making_room.get() {
                intent.room_changed.wait_until(|| !intent.is_making_room.get()).await;
            } else if !matches!(self.evict().await, Ok(true)) {
                return;
            }
        }
    }

    /// Takes the groups out of the labels whose last change is longest ago, to make room for others; false if none can leave.
    pub(crate) async fn evict(&self) -> Result<bool, Error> {
        self.write_intent.is_making_room.set(true);
        let _making_room = MakingRoom(&self.write_intent);
        let leaving: Vec<LeavingGroup> = {
            let hot = self.hot.borrow();
            let at_rest = hot.oldest_first().filter(|hot| self.is_at_rest(&self.map.group_at(hot.group)));
            at_rest.take(hot.at_once() as usize).map(|hot| (hot.group, Some(hot.change))).collect()
        };
        if leaving.is_empty() {
            return Ok(false);
        }
        self.hot.borrow_mut().crowded();
        self.clear_groups(leaving, !self.mutation.is(Mutation::EvictUnflushed)).await?;
        Ok(true)
    }

    /// Takes all groups out of the labels in which nothing is in flight, and all replicas have the same.
    pub(crate) async fn clear_clean_regions(&self) -> Result<(), Error> {
        let mut leaving: Vec<LeavingGroup> =
            self.hot.borrow().oldest_first().map(|hot| (hot.group, Some(hot.change))).collect();
        leaving.extend(self.leftover_groups());
        self.clear_groups(leaving, true).await
    }

    /// Groups that were dirty when the mirror was opened and were not changed since.
    pub(crate) fn leftover_groups(&self) -> Vec<LeavingGroup> {
        let (leftover, mut groups, mut from) = (self.write_intent.leftover.borrow(), Vec::new(), 0);
        while let Some(region) = leftover.next(from) {
            from = self.map.group(region).end() + 1;
            groups.push((*self.map.group_numbers(&(region..=region)).start(), None));
        }
        groups
    }

    /// Takes those of these groups out of the labels that are at rest and stay so, once all that was changed there is durable on every
    /// in-sync replica. It flushes them for that if `may_flush`, and if they were not flushed since.
    pub(crate) async fn clear_groups(&self, mut leaving: Vec<LeavingGroup>, may_flush: bool) -> Result<(), Error> {
        let intent = &self.write_intent;
        leaving.retain(|(group, _)| self.is_at_rest(&self.map.group_at(*group)));
        if leaving.is_empty() && !self.has_rewritten() {
            return if intent.has_unwritten() { self.write_labels().await } else { Ok(()) };
        }
        let flushed = intent.flushed_changes.get();
        let is_unflushed = leaving.iter().any(|(_, change)| change.is_none_or(|change| change > flushed));
        if may_flush && (is_unflushed || self.has_rewritten()) && !self.mutation.is(Mutation::ClearUnflushed) {
            self.flush_internally().await?;
        }
        for (group, change) in leaving {
            let regions = self.map.group_at(group);
            if self.hot.borrow().change(group) == change && self.is_at_rest(&regions) {
                // The same labels record what an offline replica lacks of it.
                intent.dirty.borrow_mut().remove_all(regions.clone());
                intent.unrecorded.borrow_mut().remove_all(regions.clone());
                intent.leftover.borrow_mut().remove_all(regions.clone());
                intent.written.borrow_mut().remove_all(regions);
                self.hot.borrow_mut().remove(group);
            }
        }
        self.write_labels().await
    }
}

/// A group that is to leave the labels, and the number of its last change.
pub(crate) type LeavingGroup = (u32, Option<u64>);

/// Ends the making of room when dropped, also if the request that makes it is dropped half-way.
struct MakingRoom<'a>(&'a WriteIntent);

impl Drop for MakingRoom<'_> {
    fn drop(&mut self) {
        self.0.is_making_room.set(false);
        self.0.room_changed.notify();
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
