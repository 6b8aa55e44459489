//! Resync, which copies the regions that an out-of-sync replica lacks, and the worker that does all background work.

pub(crate) mod reattach;
pub(crate) mod sweep;

use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::{join4, select};
use sealblock_block::{BadBlock, BadBlockCause, Clock, Error, ErrorKind, Request};

use crate::background::sweep::sweep_loop;
use crate::label::ReplicaState;
use crate::mirror::replica::Replica;
use crate::mirror::{Mirror, Mutation, Replicas};
use crate::requests::change::RewrittenBlocks;
use crate::requests::delegated::answer_calls;
use crate::requests::stale::LastCopy;

/// Time between attempts to reattach an offline replica.
const REATTACH_INTERVAL: Duration = Duration::from_secs(2);

/// Bytes of regions to resync between two labels that record the progress.
const BYTES_PER_LABEL: u64 = 64 << 20;

/// Background work of a mirror: reconciles after a crash, resyncs replicas, sweeps the labels and reattaches
/// replicas. It must run beside the mirror.
pub struct Worker<C> {
    mirror: Rc<Mirror<C>>,
}

impl<C: Clock> Worker<C> {
    pub(crate) fn new(mirror: Rc<Mirror<C>>) -> Worker<C> {
        Worker { mirror }
    }

    /// Runs until the mirror is closed. Spawn this.
    pub async fn run(self) {
        let mirror = &*self.mirror;
        let Some(calls) = mirror.calls.take().filter(|_| !mirror.is_read_only) else { return };
        join4(sweep_loop(mirror), resync_loop(mirror), reattach_loop(mirror), answer_calls(mirror, calls)).await;
    }
}

/// Waits for `time`, or until the mirror is closed.
async fn sleep<C: Clock>(mirror: &Mirror<C>, time: Duration) {
    select(pin!(mirror.work.wait_until(|| mirror.is_closing.get())), pin!(mirror.clock.sleep(time))).await;
}

/// Reconciles in-sync replicas, and resyncs those that have returned.
async fn resync_loop<C: Clock>(mirror: &Mirror<C>) {
    loop {
        let returned = || -> Vec<Rc<Replica>> {
            mirror
                .replicas
                .borrow()
                .iter()
                .filter(|replica| replica.state.get() == ReplicaState::Resyncing)
                .cloned()
                .collect()
        };
        let is_suspect = || !mirror.write_intent.nosync.borrow().is_empty() && !mirror.has_listed_in_sync();
        // Not only before the next change: a replica that failed may return without what was not flushed, and until the
        // labels say so it counts as much as the others at the next start.
        let has_unrecorded = || mirror.write_intent.has_new_failure() && !mirror.in_sync().is_empty();
        let is_due = || {
            let has_work = is_suspect() || has_unrecorded() || mirror.write_intent.is_stale_check_due.get();
            mirror.is_closing.get() || has_work || !returned().is_empty()
        };
        mirror.work.wait_until(is_due).await;
        if mirror.is_closing.get() {
            return;
        }
        let recorded = if has_unrecorded() { mirror.write_labels().await } else { Ok(()) };
        let mut failed = recorded.and(mirror.reconcile_all().await);
        if failed.is_ok() && mirror.write_intent.is_stale_check_due.take() {
            mirror.recheck_stale().await;
        }
        if failed.is_ok() {
            for replica in returned() {
                // The resync of one replica does not wait for another's failure.
                failed = mirror.resync(&replica).await.and(failed);
            }
        }
        if let Err(error) = failed {
            tracing::debug!(%error, "resync or reconciliation failed; retrying");
            sleep(mirror, REATTACH_INTERVAL).await;
        }
    }
}

/// Reattaches offline replicas, starts the resync of online ones that are out of sync, and detaches devices that are
/// lost while no request is sent to them.
async fn reattach_loop<C: Clock>(mirror: &Mirror<C>) {
    loop {
        let replicas: Vec<Rc<Replica>> = mirror.replicas.borrow().clone();
        for replica in
            replicas.iter().filter(|replica| !mirror.is_closing.get() && replica.state.get() != ReplicaState::Removed)
        {
            mirror.detach_lost(replica);
            if replica.is_online() && replica.state.get() == ReplicaState::OutOfSync {
                mirror.start_resync(replica);
            }
            if replica.is_online() || replica.reopen.borrow().is_none() {
                continue;
            }
            // Another core may still have the device that failed.
            mirror.recall().await;
            let opening = replica.reopen.borrow().as_ref().filter(|_| !replica.is_online()).map(|reopen| reopen());
            let Some(opening) = opening else { continue };
            let number = replica.number.get();
            let taken = match opening.await {
                Ok(device) => mirror.reattach(replica, device).await,
                Err(reason) => Err(reason),
            };
            if let Err(reason) = taken {
                mirror.set_last_error(number, reason);
            }
        }
        sleep(mirror, REATTACH_INTERVAL).await;
        if mirror.is_closing.get() {
            return;
        }
    }
}

impl<C: Clock> Mirror<C> {
    /// Detaches the device of a replica that is lost, or was put back to an earlier state, while no request is sent to
    /// it, as if a request had failed now.
    pub(crate) fn detach_lost(&self, replica: &Replica) {
        // Where no replica is whole, what is left of each may be all that there is.
        let loss = replica.loss().filter(|loss| !loss.lacks_everything || self.has_whole_beside(replica));
        if let Some(reason) = loss.map(|loss| loss.reason).or_else(|| self.why_outdated(replica)) {
            self.fail_replica(replica, &reason);
        }
        self.set_found_freshness(self.read_freshness());
    }

    /// Resyncs a replica that has returned.
    pub(crate) async fn resync(&self, replica: &Rc<Replica>) -> Result<(), Error> {
        tracing::info!(replica = %replica.name(), regions = replica.to_resync.borrow().count(), "resync started");
        // Its own label must no longer list it as in sync.
        self.write_labels().await?;
        let has_room = self.resync_regions(replica).await?;
        self.record_progress(replica).await?;
        if !has_room {
            let reason = "it has more stale blocks than the labels can list: accept or write some of them";
            *replica.last_error.borrow_mut() = reason.to_owned();
            return Err(
                ErrorKind::Media { reason: format!("cannot resync replica {}: {reason}", replica.name()) }.into()
            );
        }
        if self.write_intent.is_in_doubt() && !replica.is_listed_in_sync.get() {
            // Labels accept in-sync replicas that do not know the last change. They must not accept older images of
            // this one.
            self.write_intent.begin_change();
            self.write_labels().await?;
        }
        if replica.state.get() == ReplicaState::Resyncing && replica.to_resync.borrow().is_empty() {
            replica.state.set(ReplicaState::InSync);
            replica.is_new.set(false);
            replica.last_error.borrow_mut().clear();
            // It may have the current copy of blocks that other replicas list as stale.
            self.write_intent.is_stale_check_due.set(true);
            replica.is_listed_in_sync.set(false);
            self.demote_offline();
            self.work.notify();
            self.write_labels().await?;
            tracing::info!(replica = %replica.name(), resynced_bytes = replica.resynced_bytes.get(), "resync finished");
        }
        Ok(())
    }

    /// Copies all regions that a replica lacks; false if the labels have no room for its stale blocks. Regions with
    /// such blocks remain to resync.
    async fn resync_regions(&self, replica: &Rc<Replica>) -> Result<bool, Error> {
        let (mut from, mut has_room, mut since_label) = (0, true, 0);
        loop {
            let next = replica.to_resync.borrow().next(from);
            let Some(region) = next.filter(|_| !self.is_closing.get()) else {
                // Changes that failed meanwhile add regions before this one.
                if from == 0 || !has_room || self.is_closing.get() || replica.to_resync.borrow().is_empty() {
                    return Ok(has_room);
                }
                from = 0;
                continue;
            };
            from = region + 1;
            // Removed first, so that a change that fails meanwhile adds it again.
            replica.to_resync.borrow_mut().remove(region);
            let brought = self.resync_region(replica, region).await;
            if !matches!(brought, Ok(LastCopy::Kept)) {
                replica.to_resync.borrow_mut().insert(region);
            }
            has_room &= brought? == LastCopy::Kept;
            since_label += self.map.extent(region).bytes(self.geometry.block_size);
            if since_label >= BYTES_PER_LABEL {
                since_label = 0;
                self.record_progress(replica).await?;
            }
        }
    }

    /// Makes what was copied to a replica durable, and records it in the labels.
    async fn record_progress(&self, replica: &Rc<Replica>) -> Result<(), Error> {
        let (mut lacking, rewritten, attach_count) =
            (replica.to_resync.borrow().clone(), RewrittenBlocks::of(replica), replica.attach_count());
        let flushed = replica.execute(Request::flush()).await;
        self.fail_resync_on_error(replica, attach_count, flushed.map(drop)).await?;
        if replica.state.get() == ReplicaState::Resyncing {
            // Stale blocks that the resync rewrote.
            self.forget_rewritten(&[rewritten]);
            if lacking.is_empty() {
                // All its content is the mirror's from here on, even if regions have to be resynced again.
                replica.is_new.set(false);
            }
            if !self.mutation.is(Mutation::ForgetFlushing) {
                // Regions that became nosync during the flush are still to resync.
                lacking.add(&replica.to_resync.borrow());
            }
            replica.out_of_sync.borrow_mut().intersect(&lacking);
            self.write_labels().await?;
        }
        Ok(())
    }

    async fn resync_region(&self, replica: &Rc<Replica>, region: u32) -> Result<LastCopy, Error> {
        let mut last_copy = LastCopy::Kept;
        for piece in self.map.extent(region).split_aligned(self.geometry.limits.max_transfer_blocks) {
            let _guard = self.lock_blocks(piece).await;
            // It may have failed and returned. Then its own label must be written again before anything is copied to
            // it.
            if replica.state.get() != ReplicaState::Resyncing || replica.lacks_own_label() || self.is_closing.get() {
                return Err(resync_stopped(replica));
            }
            let attach_count = replica.attach_count();
            let sources = self.in_sync();
            let Some(first) = sources.first() else { return Err(self.no_replica()) };
            let both: Replicas = [first.clone(), replica.clone()].into_iter().collect();
            // Equal blocks leave such a device in doubt.
            if !replica.may_be_older() && self.are_identical(&both, piece).await? {
                continue;
            }
            let (found, lost) = self.gather(&sources, piece).await?;
            for found in found {
                if !replica.may_be_older() && self.is_already_identical(&both, &found, piece).await? {
                    continue;
                }
                let put = replica.put(found.extent, &found.data).await;
                self.fail_resync_on_error(replica, attach_count, put).await?;
                replica.resynced_bytes.set(replica.resynced_bytes.get() + found.extent.bytes(self.geometry.block_size));
            }
            for bad in lost {
                let kept = self.keep_last_copy(replica, &sources, bad.lba).await;
                self.fail_resync_on_error(replica, attach_count, kept.as_ref().map(drop).map_err(Clone::clone)).await?;
                if kept? == LastCopy::NoRoom {
                    last_copy = LastCopy::NoRoom;
                }
            }
        }
        Ok(last_copy)
    }

    /// Marks a replica out of sync if `outcome`, of a request that its resync sent, is an error.
    async fn fail_resync_on_error(
        &self,
        replica: &Rc<Replica>,
        attach_count: u64,
        outcome: Result<(), Error>,
    ) -> Result<(), Error> {
        if let Err(error) = &outcome {
            self.fail_replica_if_attached(replica, attach_count, &format!("cannot resync it: {error}"));
            self.write_labels().await?;
        }
        outcome
    }

    /// Looks for good copies of withheld blocks.
    pub(crate) async fn recheck_stale(&self) {
        let replicas: Vec<Rc<Replica>> =
            self.replicas.borrow().iter().filter(|replica| replica.is_readable()).cloned().collect();
        for replica in replicas {
            let kept = replica.stale.borrow().withheld();
            for lba in kept {
                if self.is_closing.get() || !replica.is_readable() {
                    return;
                }
                let bad = BadBlock::new(lba, BadBlockCause::Stale, None, None);
                self.repair_block(&replica, &bad).await;
            }
        }
        self.forget_repaired().await;
    }
}

#[cold]
fn resync_stopped(replica: &Replica) -> Error {
    ErrorKind::Unreachable { reason: format!("the resync of replica {} stopped", replica.name()) }.into()
}
