//! Resync and reconciliation, and the background work that runs them.
//!
//! Reconcile: make in-sync replicas identical after a crash, or after a change that only some executed. Resync: copy
//! the regions that an out-of-sync replica lacks.

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

/// Time between sweeps. A region leaves the labels when nothing was changed in it for one to two of these.
const SWEEP_INTERVAL: Duration = Duration::from_secs(5);
/// Time between attempts to reattach an offline replica.
const REATTACH_INTERVAL: Duration = Duration::from_secs(2);

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
            tracing::debug!(%error, "cannot sweep the mirror labels; retrying");
        }
    }
}

/// Reconciles in-sync replicas, and resyncs those that are back.
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
                // A replica whose resync fails does not hold up the others.
                failed = mirror.resync(&replica).await.and(failed);
            }
        }
        if let Err(error) = failed {
            tracing::debug!(%error, "resync or reconciliation failed; retrying");
            sleep(mirror, REATTACH_INTERVAL).await;
        }
    }
}

/// Reattaches offline replicas, and starts the resync of online ones that are out of sync.
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

/// Bytes of regions to resync between two labels that record the progress.
const BYTES_PER_LABEL: u64 = 64 << 20;

impl<C: Clock> Mirror<C> {
    /// True if in-sync replicas may differ in some of these blocks although no change is in flight there.
    pub(crate) fn is_nosync(&self, extent: Extent) -> bool {
        self.write_intent.nosync.borrow().contains_any(self.map.of(extent))
    }

    /// The parts of an extent in which in-sync replicas may differ although no change is in flight there.
    pub(crate) fn nosync_parts(&self, extent: Extent) -> Vec<Extent> {
        let nosync = self.write_intent.nosync.borrow();
        let regions = self.map.of(extent).filter(|region| nosync.contains(*region));
        regions.filter_map(|region| common(extent, self.map.extent(region))).collect()
    }

    /// Reconciles the nosync blocks of an extent before a reader sees content that only one replica may have.
    pub(crate) async fn reconcile_for_read(&self, extent: Extent) -> Result<(), Error> {
        if self.is_read_only || !self.is_nosync(extent) {
            return Ok(());
        }
        let nosync = self.nosync_parts(extent);
        for piece in nosync.into_iter().flat_map(|part| part.split_aligned(self.geometry.limits.max_transfer_blocks)) {
            self.reconcile_piece(piece).await?;
        }
        Ok(())
    }

    async fn reconcile_piece(&self, piece: Extent) -> Result<(), Error> {
        let _guard = self.range_lock.lock(piece).await;
        self.reconcile(piece).await?;
        let copied = self.write_intent.reconciled_count.get();
        if self.write_intent.reconciled_durable.get() < copied {
            // What readers see from now on must not depend on the replica that had it. An earlier flush of these
            // copies may have failed.
            self.flush_internally().await?;
            self.write_intent.reconciled_durable.set(copied.max(self.write_intent.reconciled_durable.get()));
        }
        Ok(())
    }

    /// Reconciles all nosync regions. Does nothing while a replica is offline that labels list in sync: its copy may
    /// count.
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
            // Blocks that became nosync meanwhile may lie before the piece that was just reconciled.
            if self.write_intent.nosync_count.get() == before {
                self.write_intent.nosync.borrow_mut().remove(region);
                self.work.notify();
            }
        }
    }

    /// Reconciles the in-sync replicas in blocks that the caller has locked. The content of the first replica counts
    /// where it is good, so the labels must mark replicas that do not take part out of sync.
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

    /// Makes these replicas identical in a piece; true if it did. False if one failed: then its result says nothing
    /// about the others, and nothing more is written to it.
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

    /// Writes blocks to all of these replicas but their source. A replica that fails the write is marked out of sync.
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
                self.fail_replica_if_attached(replica, attach_count, &format!("cannot reconcile it: {error}"));
            }
        }
    }

    /// Resyncing replicas may have got these blocks from a replica whose content no longer counts; they get them
    /// again.
    fn require_resync(&self, piece: Extent) {
        if self.mutation == Mutation::ForgetFlushing {
            return;
        }
        let regions = self.map.of(piece);
        for replica in self.replicas.borrow().iter().filter(|replica| replica.state.get() == ReplicaState::Resyncing) {
            // Out of sync too: if the resync stops here, labels must still list these regions.
            replica.out_of_sync.borrow_mut().insert_all(regions.clone());
            replica.to_resync.borrow_mut().insert_all(regions.clone());
        }
    }

    /// All checks of the format, from the start of an extent on.
    pub(crate) fn full(&self, extent: Extent) -> Checks {
        full(self.geometry.protection, extent)
    }

    /// True if these replicas have the same data and tags in a piece, all of it good.
    ///
    /// # Errors
    /// When one of them failed.
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
        // A checksum does not cover tags, and a host may have written the same data with other tags.
        let read = self.execute_each(replicas, |replica| replica.read(format, piece, checks)).await?;
        Ok(read.is_some_and(|read| read.windows(2).all(|pair| pair[0].first_difference(&pair[1], true).is_none())))
    }

    /// True if the replicas agree on this block. Asked per block: one unreadable block fails the checksum of the
    /// whole piece.
    ///
    /// # Errors
    /// When one of them failed.
    async fn is_already_identical(
        &self,
        replicas: &Replicas,
        found: &FoundBlocks,
        piece: Extent,
    ) -> Result<bool, Error> {
        Ok(found.extent != piece && self.are_identical(replicas, found.extent).await?)
    }

    /// Executes a request on each replica, on all at once; `None` if one of them found its blocks bad.
    ///
    /// # Errors
    /// When one of them failed.
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

    /// Resyncs a replica that is back.
    pub(crate) async fn resync(&self, replica: &Rc<Replica>) -> Result<(), Error> {
        tracing::info!(replica = %replica.name(), regions = replica.to_resync.borrow().count(), "resync started");
        // Its own label must no longer say that it is in sync.
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
        let flushed = replica.execute(self.geometry.protection, Request::flush()).await;
        self.fail_resync_on_error(replica, attach_count, flushed.map(drop)).await?;
        if replica.state.get() == ReplicaState::Resyncing {
            // Stale blocks that the resync rewrote.
            self.forget_rewritten(&[rewritten]);
            if lacking.is_empty() {
                // All its content is the mirror's from here on, even if regions have to be resynced again.
                replica.is_new.set(false);
            }
            if self.mutation != Mutation::ForgetFlushing {
                // Regions that became nosync during the flush are still to resync.
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
            // It may have failed and be back. Then its own label must be written again before anything is copied to
            // it.
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
}

/// Counts a reconciled piece when dropped, also if the copy fails.
struct ReconcileCount<'a>(&'a Cell<u64>);

impl Drop for ReconcileCount<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() + 1);
    }
}

/// All checks of a format, from the start of an extent on.
pub(crate) fn full(format: Option<PiFormat>, extent: Extent) -> Checks {
    format.map_or(Checks::NONE, |format| Checks::full(format, extent.start()))
}

/// The blocks that both extents have.
fn common(a: Extent, b: Extent) -> Option<Extent> {
    let first = a.start().max(b.start()).get();
    let last = a.last().min(b.last()).get();
    Extent::from_raw(first, (last + 1).saturating_sub(first)).ok()
}

#[cold]
fn resync_stopped(replica: &Replica) -> Error {
    ErrorKind::Unreachable { reason: format!("the resync of replica {} stopped", replica.name()) }.into()
}
