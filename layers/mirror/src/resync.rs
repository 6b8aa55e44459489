//! Resync and reconciliation, and the background work that runs them.
//!
//! Reconcile: make in-sync replicas identical after a crash, or after a change that only some executed. Resync: copy the
//! regions that an out-of-sync replica lacks.

use std::cell::Cell;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::{join_all, join3, select};
use sealblock_block::{Clock, Error, ErrorKind, Request};
use sealblock_integrity::{Checks, PiFormat};
use sealblock_units::Extent;

use crate::io::FoundBlocks;
use crate::label::ReplicaState;
use crate::mirror::{Mirror, Replicas};
use crate::replica::{Replica, is_unreachable};
use crate::stale::{LastCopy, RewrittenBlocks};
use crate::test_hooks::Mutation;

/// A region in which nothing was changed for one to two of these leaves the labels.
const SWEEP_INTERVAL: Duration = Duration::from_secs(5);
/// How often a replica that is gone is tried again.
const REATTACH_INTERVAL: Duration = Duration::from_secs(2);

/// Settles what a crash has left, brings replicas up to date, and tidies the labels; must be run beside the mirror.
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
        if !mirror.is_read_only {
            join3(sweep_loop(mirror), resync_loop(mirror), reattach_loop(mirror)).await;
        }
    }
}

/// Waits for `time`, or until the mirror is closed.
async fn sleep<C: Clock>(mirror: &Mirror<C>, time: Duration) {
    select(pin!(mirror.work.wait_until(|| mirror.is_closing.get())), pin!(mirror.clock.sleep(time))).await;
}

async fn sweep_loop<C: Clock>(mirror: &Mirror<C>) {
    loop {
        sleep(mirror, SWEEP_INTERVAL).await;
        if mirror.is_closing.get() {
            return;
        }
        if let Err(error) = mirror.clear_clean_regions().await {
            tracing::debug!(%error, "the mirror's labels keep what they say");
        }
    }
}

/// Makes current replicas alike, and brings those that have come back up to date.
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
        let is_due = || {
            let has_work = is_suspect() || mirror.write_intent.is_stale_check_due.get();
            mirror.is_closing.get() || has_work || !returned().is_empty()
        };
        mirror.work.wait_until(is_due).await;
        if mirror.is_closing.get() {
            return;
        }
        let mut failed = mirror.reconcile_all().await;
        if failed.is_ok() && mirror.write_intent.is_stale_check_due.take() {
            mirror.recheck_stale().await;
        }
        if failed.is_ok() {
            for replica in returned() {
                // One that cannot be brought up to date keeps no other one waiting.
                failed = mirror.resync(&replica).await.and(failed);
            }
        }
        if let Err(error) = failed {
            tracing::debug!(%error, "the replicas are not alike yet");
            sleep(mirror, REATTACH_INTERVAL).await;
        }
    }
}

/// Tries replicas that are gone again, and lets those begin that were there and left behind.
async fn reattach_loop<C: Clock>(mirror: &Mirror<C>) {
    loop {
        let replicas: Vec<Rc<Replica>> = mirror.replicas.borrow().clone();
        for replica in
            replicas.iter().filter(|replica| !mirror.is_closing.get() && replica.state.get() != ReplicaState::Removed)
        {
            if replica.is_online() && replica.state.get() == ReplicaState::OutOfSync {
                mirror.start_resync(replica);
            }
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

/// Bytes of the regions of a replica that are looked at between two labels that say how far it is.
const BYTES_PER_LABEL: u64 = 64 << 20;

impl<C: Clock> Mirror<C> {
    /// Whether current replicas may differ in some of these blocks although nothing is under way there.
    pub(crate) fn is_nosync(&self, extent: Extent) -> bool {
        self.write_intent.nosync.borrow().contains_any(self.map.of(extent))
    }

    /// The parts of an extent in which current replicas may differ although nothing is under way there.
    pub(crate) fn nosync_parts(&self, extent: Extent) -> Vec<Extent> {
        let suspect = self.write_intent.nosync.borrow();
        let regions = self.map.of(extent).filter(|region| suspect.contains(*region));
        regions.filter_map(|region| common(extent, self.map.extent(region))).collect()
    }

    /// Makes current replicas alike where they are suspect, before anybody sees what only one of them may have.
    pub(crate) async fn reconcile_for_read(&self, extent: Extent) -> Result<(), Error> {
        if self.is_read_only || !self.is_nosync(extent) {
            return Ok(());
        }
        let suspect = self.nosync_parts(extent);
        for piece in suspect.into_iter().flat_map(|part| part.split_aligned(self.geometry.limits.max_transfer_blocks)) {
            self.reconcile_piece(piece).await?;
        }
        Ok(())
    }

    async fn reconcile_piece(&self, piece: Extent) -> Result<(), Error> {
        let _guard = self.range_lock.lock(piece).await;
        self.reconcile(piece).await?;
        let copied = self.write_intent.reconciled_count.get();
        if self.write_intent.reconciled_durable.get() < copied {
            // What is seen from now on must not depend on the replica that had it. Somebody else may have failed to flush it.
            self.flush_internally().await?;
            self.write_intent.reconciled_durable.set(copied.max(self.write_intent.reconciled_durable.get()));
        }
        Ok(())
    }

    /// Makes all suspect regions alike; not while a replica is gone that nobody has gone on without yet.
    pub(crate) async fn reconcile_all(&self) -> Result<(), Error> {
        loop {
            if self.has_listed_in_sync() {
                return Ok(());
            }
            let next = self.write_intent.nosync.borrow().iter().next();
            let Some(region) = next else { return Ok(()) };
            let before = self.write_intent.nosync_count.get();
            for piece in self.map.extent(region).split_aligned(self.geometry.limits.max_transfer_blocks) {
                if self.is_closing.get() {
                    return Ok(());
                }
                self.reconcile_piece(piece).await?;
            }
            // What became suspect meanwhile may be behind the piece that was just done.
            if self.write_intent.nosync_count.get() == before {
                self.write_intent.nosync.borrow_mut().remove(region);
                self.work.notify();
            }
        }
    }

    /// Makes the current replicas alike in blocks that the caller has claimed. The first replica's content counts where it is good, so
    /// those that are not asked are to be noted as left behind.
    async fn reconcile(&self, piece: Extent) -> Result<(), Error> {
        loop {
            self.record_failures().await?;
            self.require_resync(piece);
            let replicas = self.in_sync();
            if self.try_reconcile(&replicas, piece).await? {
                return self.record_failures().await;
            }
        }
    }

    /// Makes these replicas alike in a piece. Not all of it where one has gone: that says nothing about the others, and nothing is to
    /// be written to it.
    async fn try_reconcile(&self, replicas: &Replicas, piece: Extent) -> Result<bool, Error> {
        match self.are_identical(replicas, piece).await {
            Ok(true) => return Ok(true),
            Ok(false) => {}
            Err(_) => return Ok(false),
        }
        let (found, _) = self.gather(replicas, piece, self.full(piece)).await?;
        for found in found {
            match self.is_already_identical(replicas, &found, piece).await {
                Ok(true) => {}
                Ok(false) => self.copy_to_others(replicas, &found).await,
                Err(_) => return Ok(false),
            }
        }
        Ok(true)
    }

    /// Puts blocks on the replicas that they do not come from. One that does not take them is left behind.
    async fn copy_to_others(&self, replicas: &Replicas, found: &FoundBlocks) {
        let _copying = ReconcileCount(&self.write_intent.reconciled_count);
        let rest: Replicas = replicas
            .iter()
            .enumerate()
            .filter(|(at, _)| *at != found.source)
            .map(|(_, replica)| replica.clone())
            .collect();
        let epochs: Vec<u64> = rest.iter().map(|replica| replica.attach_count()).collect();
        let writes = rest.iter().map(|replica| {
            replica.resynced_bytes.set(replica.resynced_bytes.get() + found.extent.bytes(self.geometry.block_size));
            replica.put(self.geometry.protection, found.extent, &found.data)
        });
        let outcomes = join_all(writes).await;
        for ((replica, attach_count), outcome) in rest.iter().zip(epochs).zip(outcomes) {
            if let Err(error) = outcome {
                self.fail_replica_if_attached(
                    replica,
                    attach_count,
                    &format!("it could not be made like the others: {error}"),
                );
            }
        }
    }

    /// What replicas were brought before the current ones were alike may be another one's content than that which counts now.
    fn require_resync(&self, piece: Extent) {
        if self.mutation == Mutation::ForgetFlushing {
            return;
        }
        let regions = self.map.of(piece);
        for replica in self.replicas.borrow().iter().filter(|replica| replica.state.get() == ReplicaState::Resyncing) {
            // Missed, too, as with what becomes suspect.
            replica.out_of_sync.borrow_mut().insert_all(regions.clone());
            replica.to_resync.borrow_mut().insert_all(regions.clone());
        }
    }

    /// All checks there are, from the start of an extent on.
    pub(crate) fn full(&self, extent: Extent) -> Checks {
        full(self.geometry.protection, extent)
    }

    /// Whether replicas have the same data and tags in a piece, all of it good.
    ///
    /// # Errors
    /// When one of them is gone.
    async fn are_identical(&self, replicas: &Replicas, piece: Extent) -> Result<bool, Error> {
        let (format, checks) = (self.geometry.protection, self.full(piece));
        if replicas.len() < 2 {
            return Ok(true);
        }
        let crcs = self.execute_each(replicas, |replica| replica.checksum(format, piece, checks)).await?;
        let same_data = crcs.is_some_and(|crcs| crcs.windows(2).all(|pair| pair[0].crc64 == pair[1].crc64));
        if !same_data || format.is_none() {
            return Ok(same_data);
        }
        // A digest says nothing about tags, and a host may have written the same data with others.
        let read = self.execute_each(replicas, |replica| replica.read(format, piece, checks)).await?;
        Ok(read.is_some_and(|read| read.windows(2).all(|pair| pair[0].tags()[..] == pair[1].tags()[..])))
    }

    /// Whether replicas have a block alike that was found by itself: an unreadable one beside it makes no sum of the whole piece.
    ///
    /// # Errors
    /// When one of them is gone.
    async fn is_already_identical(
        &self,
        replicas: &Replicas,
        found: &FoundBlocks,
        piece: Extent,
    ) -> Result<bool, Error> {
        Ok(found.extent != piece && self.are_identical(replicas, found.extent).await?)
    }

    /// What each replica answers, all at once; nothing where one of them fails.
    ///
    /// # Errors
    /// When one of them is gone.
    async fn execute_each<'a, T, F: Future<Output = Result<T, Error>>>(
        &self,
        replicas: &'a Replicas,
        ask: impl Fn(&'a Rc<Replica>) -> F,
    ) -> Result<Option<Vec<T>>, Error> {
        let epochs: Vec<u64> = replicas.iter().map(|replica| replica.attach_count()).collect();
        let mut answers = Some(Vec::with_capacity(replicas.len()));
        for ((replica, attach_count), outcome) in
            replicas.iter().zip(epochs).zip(join_all(replicas.iter().map(ask)).await)
        {
            match outcome {
                Ok(answer) => {
                    if let Some(answers) = &mut answers {
                        answers.push(answer);
                    }
                }
                Err(error) if replica.attach_count() != attach_count || is_unreachable(&error) => {
                    self.fail_if_unreachable(replica, &error);
                    return Err(error);
                }
                Err(_) => answers = None,
            }
        }
        Ok(answers)
    }

    /// Brings a replica that has come back up to date.
    pub(crate) async fn resync(&self, replica: &Rc<Replica>) -> Result<(), Error> {
        tracing::info!(replica = %replica.name(), regions = replica.to_resync.borrow().count(), "resync started");
        // Its own label must not go on saying that it has everything.
        self.write_labels().await?;
        let has_room = self.resync_regions(replica).await?;
        self.record_progress(replica).await?;
        if !has_room {
            let reason =
                "its only copies of some blocks are older ones, more than the labels can list: take or write some";
            *replica.last_error.borrow_mut() = reason.to_owned();
            return Err(
                ErrorKind::Media { reason: format!("replica {} is not up to date: {reason}", replica.name()) }.into()
            );
        }
        if self.write_intent.is_in_doubt() && !replica.is_listed_in_sync.get() {
            // Labels excuse those in sync for not knowing the last change. Older images of this replica are not to be excused.
            self.write_intent.begin_change();
            self.write_labels().await?;
        }
        if replica.state.get() == ReplicaState::Resyncing && replica.to_resync.borrow().is_empty() {
            replica.state.set(ReplicaState::InSync);
            replica.is_new.set(false);
            replica.last_error.borrow_mut().clear();
            // It may have what others keep only an older copy of.
            self.write_intent.is_stale_check_due.set(true);
            replica.is_listed_in_sync.set(false);
            self.demote_offline();
            self.work.notify();
            self.write_labels().await?;
            tracing::info!(replica = %replica.name(), resynced_bytes = replica.resynced_bytes.get(), "resync finished");
        }
        Ok(())
    }

    /// Brings everything that is left to a replica; whether there was room to list what it keeps older copies of. Regions for which
    /// there was none are still left.
    async fn resync_regions(&self, replica: &Rc<Replica>) -> Result<bool, Error> {
        let (mut from, mut has_room, mut since_label) = (0, true, 0);
        loop {
            let next = replica.to_resync.borrow().next(from);
            let Some(region) = next.filter(|_| !self.is_closing.get()) else {
                // What failed meanwhile behind the place that was just done is left again.
                if from == 0 || !has_room || self.is_closing.get() || replica.to_resync.borrow().is_empty() {
                    return Ok(has_room);
                }
                from = 0;
                continue;
            };
            from = region + 1;
            // Taken out first, so that a change that fails meanwhile puts it in again.
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

    /// What was brought to a replica is durable, and the labels say so.
    async fn record_progress(&self, replica: &Rc<Replica>) -> Result<(), Error> {
        let (mut lacking, renewed, attach_count) =
            (replica.to_resync.borrow().clone(), RewrittenBlocks::of(replica), replica.attach_count());
        let flushed = replica.execute(self.geometry.protection, Request::Flush).await;
        self.fail_resync_on_error(replica, attach_count, flushed.map(drop)).await?;
        if replica.state.get() == ReplicaState::Resyncing {
            // What it was brought of blocks that it withheld.
            self.forget_rewritten(&[renewed]);
            if lacking.is_empty() {
                // Nothing is left on it that never was the mirror's, whatever it will have to be brought again.
                replica.is_new.set(false);
            }
            if self.mutation != Mutation::ForgetFlushing {
                // What became suspect during the flush is lacking too, though it was not when the flush began.
                lacking.add(&replica.to_resync.borrow());
            }
            replica.out_of_sync.borrow_mut().intersect(&lacking);
            self.write_labels().await?;
        }
        Ok(())
    }

    async fn resync_region(&self, replica: &Rc<Replica>, region: u32) -> Result<LastCopy, Error> {
        let mut settled = LastCopy::Kept;
        for piece in self.map.extent(region).split_aligned(self.geometry.limits.max_transfer_blocks) {
            let _guard = self.range_lock.lock(piece).await;
            // It may have gone and come back, which takes another label of its own before anything is brought to it.
            if replica.state.get() != ReplicaState::Resyncing || replica.lacks_own_label() || self.is_closing.get() {
                return Err(resync_stopped(replica));
            }
            let attach_count = replica.attach_count();
            let sources = self.in_sync();
            let Some(first) = sources.first() else { return Err(self.no_replica()) };
            let both: Replicas = [first.clone(), replica.clone()].into_iter().collect();
            if self.are_identical(&both, piece).await? {
                continue;
            }
            let (found, lost) = self.gather(&sources, piece, self.full(piece)).await?;
            for found in found {
                if self.is_already_identical(&both, &found, piece).await? {
                    continue;
                }
                let put = replica.put(self.geometry.protection, found.extent, &found.data).await;
                self.fail_resync_on_error(replica, attach_count, put).await?;
                replica.resynced_bytes.set(replica.resynced_bytes.get() + found.extent.bytes(self.geometry.block_size));
            }
            for bad in lost {
                let kept = self.keep_last_copy(replica, &sources, bad.lba).await;
                self.fail_resync_on_error(replica, attach_count, kept.as_ref().map(drop).map_err(Clone::clone)).await?;
                if kept? == LastCopy::NoRoom {
                    settled = LastCopy::NoRoom;
                }
            }
        }
        Ok(settled)
    }

    /// A replica that something cannot be brought to is left behind.
    async fn fail_resync_on_error(
        &self,
        replica: &Rc<Replica>,
        attach_count: u64,
        outcome: Result<(), Error>,
    ) -> Result<(), Error> {
        if let Err(error) = &outcome {
            self.fail_replica_if_attached(
                replica,
                attach_count,
                &format!("it could not be brought up to date: {error}"),
            );
            self.write_labels().await?;
        }
        outcome
    }
}

/// Counts blocks that were made alike, however that ends.
struct ReconcileCount<'a>(&'a Cell<u64>);

impl Drop for ReconcileCount<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() + 1);
    }
}

/// All checks there are, from the start of an extent on.
pub(crate) fn full(format: Option<PiFormat>, extent: Extent) -> Checks {
    format.map_or(Checks::NONE, |format| Checks::full(format, extent.start()))
}

/// The blocks that are in both.
fn common(a: Extent, b: Extent) -> Option<Extent> {
    let first = a.start().max(b.start()).get();
    let last = a.last().min(b.last()).get();
    Extent::from_raw(first, (last + 1).saturating_sub(first)).ok()
}

#[cold]
fn resync_stopped(replica: &Replica) -> Error {
    ErrorKind::Unreachable { reason: format!("replica {} is no longer brought up to date", replica.name()) }.into()
}
