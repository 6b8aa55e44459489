//! Reading blocks from whichever replica has them, and reconciling: making in-sync replicas identical after a crash, or after a
//! change that only some executed.

use std::cell::Cell;
use std::ops::RangeInclusive;
use std::rc::Rc;

use futures_util::future::join_all;
use sealblock_block::{BadBlock, BadBlockCause, Clock, Error, Expectations, Request};
use sealblock_integrity::{ChecksumKind, Sealed};
use sealblock_units::{BlockCount, Extent};

use crate::label::ReplicaState;
use crate::mirror::replica::{Replica, is_unreachable};
use crate::mirror::{Mirror, Mutation, Replicas};

/// Bad copies that reconciling or a resync has rewritten, at most, which the next [`Mirror::repair`] names. More are only logged and counted.
const MAX_RECONCILED_DAMAGE: usize = 4096;

/// Consecutive good blocks and their source.
pub(crate) struct FoundBlocks {
    pub extent: Extent,
    pub data: Sealed,
    /// Index of the replica among those that were tried.
    pub source: usize,
}

impl<C: Clock> Mirror<C> {
    /// True if a replica that was chosen earlier may still be read.
    pub(crate) fn may_read(&self, replica: &Replica) -> bool {
        replica.is_readable() || self.mutation.is(Mutation::ReadResyncing)
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
    ) -> Result<(Vec<FoundBlocks>, Vec<BadBlock>), Error> {
        if replicas.len() == 1 || extent.len() > 1 {
            for (source, replica) in replicas.iter().enumerate().filter(|(_, replica)| self.may_read(replica)) {
                if let Ok(data) = replica.read(extent).await {
                    return Ok((vec![FoundBlocks { extent, data, source }], Vec::new()));
                }
            }
        }
        let (mut found, mut lost) = (Vec::new(), Vec::new());
        for lba in extent.iter() {
            let one = Extent::one(lba);
            match self.gather_one(replicas, one).await? {
                Ok(good) => found.push(good),
                Err(cause) => lost.push(cause),
            }
        }
        Ok((found, lost))
    }

    pub(crate) async fn gather_one(
        &self,
        replicas: &Replicas,
        one: Extent,
    ) -> Result<Result<FoundBlocks, BadBlock>, Error> {
        let (mut cause, mut failed): (Option<BadBlock>, Option<Error>) = (None, None);
        for (source, replica) in replicas.iter().enumerate() {
            if !self.may_read(replica) {
                failed.get_or_insert_with(|| self.no_replica());
                continue;
            }
            match replica.read(one).await.map_err(Error::into_bad_blocks) {
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
        let _guard = self.lock_blocks(piece).await;
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
            let next = self.write_intent.nosync.borrow().runs().next();
            let Some(regions) = next.map(|run| self.regions_at_once(&run)) else { return Ok(()) };
            let before = self.write_intent.nosync_count.get();
            for piece in self.map.group_extent(&regions).split_aligned(self.geometry.limits.max_transfer_blocks) {
                if self.is_closing.get() {
                    return Ok(());
                }
                self.reconcile_piece(piece).await?;
            }
            // Blocks that became nosync meanwhile may lie before the piece that was just reconciled.
            if self.write_intent.nosync_count.get() == before {
                self.write_intent.nosync.borrow_mut().remove_all(regions);
                self.work.notify();
            }
        }
    }

    /// The first of these regions that one request can cover.
    fn regions_at_once(&self, run: &RangeInclusive<u32>) -> RangeInclusive<u32> {
        let at_once = (self.geometry.limits.max_transfer_blocks.get() >> self.map.shift()).max(1);
        let end = (run.start() / at_once + 1).saturating_mul(at_once);
        *run.start()..=(end - 1).min(*run.end())
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

    /// Makes these replicas identical in a piece; true if it did. False if it is to be tried again: if one failed, its result
    /// says nothing about the others, and nothing more is written to it.
    async fn try_reconcile(&self, replicas: &Replicas, piece: Extent) -> Result<bool, Error> {
        match self.are_identical(replicas, piece).await {
            Ok(true) => return Ok(true),
            Ok(false) => {}
            Err(_) => return Ok(false),
        }
        if !self.write_intent.is_followed_up.get() {
            // Images of the replicas from before this opening lack what is copied now, and would be in doubt again: only a
            // later label tells them apart.
            self.write_labels().await?;
            return Ok(false);
        }
        // Compared in large pieces, and copied by regions.
        let region = BlockCount::new(1 << self.map.shift()).expect("a region has a block");
        for part in piece.split_aligned(region) {
            if part != piece {
                match self.are_identical(replicas, part).await {
                    Ok(true) => continue,
                    Ok(false) => {}
                    Err(_) => return Ok(false),
                }
            }
            let bad = self.bad_copies(replicas, part).await;
            let (found, _) = self.gather(replicas, part).await?;
            for found in found {
                match self.is_already_identical(replicas, &found, part).await {
                    Ok(true) => {}
                    Ok(false) => self.copy_to_others(replicas, &found).await,
                    Err(_) => return Ok(false),
                }
            }
            self.report_repaired(bad).await;
        }
        Ok(true)
    }

    /// The copies that are bad in a part that is to be made identical.
    pub(crate) async fn bad_copies(&self, replicas: &Replicas, part: Extent) -> Vec<(Rc<Replica>, BadBlock)> {
        let mut bad = Vec::new();
        for replica in replicas {
            let Err(error) = replica.execute(Request::verify(part, Expectations::NONE)).await else { continue };
            // One that failed otherwise is met by whoever reads it next.
            let found = error.into_bad_blocks().unwrap_or_default();
            bad.extend(found.into_iter().map(|bad| (Rc::clone(replica), bad)));
        }
        bad
    }

    /// Counts the copies that are good now, and keeps them for the next [`Mirror::repair`]: they were damage, which no one has seen.
    pub(crate) async fn report_repaired(&self, bad: Vec<(Rc<Replica>, BadBlock)>) {
        for (replica, bad) in bad {
            let one = Request::verify(Extent::one(bad.lba), Expectations::NONE);
            if replica.execute(one).await.is_err() {
                continue;
            }
            replica.count_repaired(&bad);
            let mut reconciled = self.reconciled_damage.borrow_mut();
            if reconciled.len() < MAX_RECONCILED_DAMAGE {
                reconciled.push(BadBlock { repaired: true, ..replica.bad_block(&bad) });
            }
        }
    }

    /// Writes blocks to all of these replicas but their source. A replica that fails the write is marked out of sync.
    async fn copy_to_others(&self, replicas: &Replicas, found: &FoundBlocks) {
        self.forget_conflicts(found.extent);
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
            replica.put(found.extent, &found.data)
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
        if self.mutation.is(Mutation::ForgetFlushing) {
            return;
        }
        let regions = self.map.of(piece);
        for replica in self.replicas.borrow().iter().filter(|replica| replica.state.get() == ReplicaState::Resyncing) {
            // Out of sync too: if the resync stops here, labels must still list these regions.
            replica.out_of_sync.borrow_mut().insert_all(regions.clone());
            replica.to_resync.borrow_mut().insert_all(regions.clone());
        }
    }

    /// True if these replicas have the same data and tags in a piece, all of it good.
    ///
    /// # Errors
    /// When one of them failed.
    pub(crate) async fn are_identical(&self, replicas: &Replicas, piece: Extent) -> Result<bool, Error> {
        if replicas.len() < 2 {
            return Ok(true);
        }
        let crcs = self
            .execute_each(replicas, |replica| replica.checksum(piece, ChecksumKind::Crc64Nvme, Expectations::NONE))
            .await?;
        let same_data = crcs.is_some_and(|crcs| crcs.windows(2).all(|pair| pair[0].value == pair[1].value));
        if !same_data || self.geometry.protection.is_none() {
            return Ok(same_data);
        }
        // A checksum does not cover tags, and a host may have written the same data with other tags.
        let read = self.execute_each(replicas, |replica| replica.read(piece)).await?;
        Ok(read.is_some_and(|read| read.windows(2).all(|pair| pair[0].first_difference(&pair[1], true).is_none())))
    }

    /// True if the replicas agree on this block. Asked per block: one unreadable block fails the checksum of the
    /// whole piece.
    ///
    /// # Errors
    /// When one of them failed.
    pub(crate) async fn is_already_identical(
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
}

/// Counts a reconciled piece when dropped, also if the copy fails.
struct ReconcileCount<'a>(&'a Cell<u64>);

impl Drop for ReconcileCount<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() + 1);
    }
}
