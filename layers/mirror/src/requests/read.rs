//! Reads of a mirror's blocks. A read goes to one replica; blocks that are bad there are read from another one and
//! rewritten (read-repair). A read with expectations of tags that one replica does not meet goes on in `expected.rs`.

use std::rc::Rc;

use futures_util::future::join_all;
use sealblock_block::{
    BadBlock, BadBlockCause, BadBlocks, Clock, Error, ErrorKind, Expectations, Outcome, Request, Response,
};
use sealblock_integrity::Sealed;
use sealblock_units::{Extent, Lba};

use crate::mirror::replica::Replica;
use crate::mirror::{Mirror, Mutation, Replicas};
use crate::requests::expected::is_strict;
use crate::requests::reconcile::FoundBlocks;

/// Bad blocks that a read met, by replica.
type MetBadBlocks = Vec<(Rc<Replica>, Vec<BadBlock>)>;

impl<C: Clock> Mirror<C> {
    /// Reads blocks. Blocks that are bad on one replica are read from another, and repaired before the read completes.
    pub(crate) async fn read(&self, extent: Extent, expectations: &Expectations) -> Result<Sealed, Error> {
        // Otherwise one reader could see a change on a replica that has it, and a later reader the old content on
        // another.
        self.range_lock.wait_unlocked(extent.into()).await;
        self.reconcile_for_read(extent).await?;
        if self.write_intent.has_new_failure() {
            // What is read now must be what is read after the next start, too. Where no label can be written, reads go
            // on: it is all there is.
            let _ = self.write_labels().await;
        }
        if self.is_read_only && self.is_nosync(extent) {
            return check_expectations(extent, self.read_nosync(extent).await?, expectations);
        }
        let expects = self.expects_tags(expectations);
        if expects && (is_strict(expectations) || self.refuse_conflicts(extent).is_err()) {
            // What is expected tells which copies count, if they differ.
            return self.read_expected(extent, expectations, None).await;
        }
        self.refuse_conflicts(extent)?;
        let replicas = self.read_balance(extent);
        let mut met: MetBadBlocks = Vec::new();
        let mut failed = None;
        for replica in &replicas {
            // The replica may have failed since, and be back without being in sync.
            if !self.may_read(replica) {
                continue;
            }
            match replica.read_expecting(extent, expectations).await {
                Ok(data) => {
                    self.repair_met(&met).await;
                    return Ok(data);
                }
                Err(error) if expects && is_about_blocks(&error) => {
                    return self.read_expected(extent, expectations, Some(replica)).await;
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
        // No replica has all of the blocks: each is read from one on which it is good.
        let (found, lost) = self.gather(&replicas, extent).await?;
        self.repair_met(&met).await;
        self.lost_blocks.set(self.lost_blocks.get() + lost.len() as u64);
        join_or_fail(found, lost)
    }

    /// Reads blocks in place, where no reader has to wait and they are good on the replica whose turn it is.
    pub(crate) fn try_read(&self, request: &Request) -> Option<Outcome> {
        let extent = request.extent()?;
        if self.range_lock.is_locked(extent.into()) || self.is_nosync(extent) || !self.conflicts.borrow().is_empty() {
            return None;
        }
        if is_strict(&request.expectations()) || self.write_intent.has_new_failure() {
            return None;
        }
        // A read that meets bad blocks starts over, and repairs them.
        let outcome = self.balance(self.in_sync()).first()?.try_execute(request).filter(Result::is_ok)?;
        self.count_turn();
        Some(outcome)
    }

    fn count_turn(&self) {
        self.next_read.set(self.next_read.get().wrapping_add(1));
    }

    /// Reads nosync blocks of a read-only mirror, which cannot reconcile them. All such reads go to one replica until
    /// the mirror is closed: readers must not see two contents. Bad blocks there fail: a reader may have seen their
    /// content, and another replica may have another content. They are not lost, if another replica has them.
    async fn read_nosync(&self, extent: Extent) -> Result<Sealed, Error> {
        loop {
            let first: Replicas = self.in_sync().into_iter().take(1).collect();
            let replica = first.first().ok_or_else(|| self.no_replica())?;
            let is_other_source = || self.nosync_source.get().is_some_and(|id| id != replica.id);
            if is_other_source() {
                return Err(other_nosync_source(replica));
            }
            let read = self.gather(&first, extent).await;
            if !replica.is_readable() || is_other_source() {
                // No reader has seen this data yet. The next turn reads from the replica that counts.
                continue;
            }
            let (found, damaged) = read?;
            self.nosync_source.set(Some(replica.id));
            let others: Replicas = self.in_sync().into_iter().skip(1).collect();
            let mut unread = Vec::with_capacity(damaged.len());
            for bad in damaged {
                let is_elsewhere = matches!(self.gather_one(&others, Extent::one(bad.lba)).await, Ok(Ok(_)));
                let unsettled = BadBlock::new(bad.lba, BadBlockCause::Unsettled, None, None);
                unread.push(if is_elsewhere { unsettled } else { bad });
            }
            return join_or_fail(found, unread);
        }
    }

    /// The replicas to read from, best first. While blocks are locked or nosync all readers use the same replica: a
    /// later reader must not see older content than an earlier one.
    fn read_balance(&self, extent: Extent) -> Replicas {
        let replicas = match self.mutation.injected() {
            Mutation::ReadResyncing => self.write_targets(),
            _ => self.in_sync(),
        };
        let is_unstable = self.range_lock.is_locked(extent.into()) || self.is_nosync(extent);
        if is_unstable {
            return replicas;
        }
        let balanced = self.balance(replicas);
        self.count_turn();
        balanced
    }

    /// Repairs the bad blocks that a read met. A block that cannot be repaired stays bad.
    async fn repair_met(&self, met: &MetBadBlocks) {
        if self.is_read_only {
            return;
        }
        for (replica, bad_blocks) in met {
            for bad in bad_blocks {
                self.repair_block(replica, bad).await;
            }
        }
        if !met.is_empty() {
            self.forget_repaired().await;
        }
    }

    /// Rewrites a bad block from another replica; true if it is good now.
    pub(crate) async fn repair_block(&self, replica: &Replica, bad: &BadBlock) -> bool {
        let one = Extent::one(bad.lba);
        let _guard = self.lock_blocks(one).await;
        let attach_count = replica.attach_count();
        // Not a read: a replica that is itself a mirror reads from any of its copies, and one of them may be bad.
        if replica.execute(Request::verify(one, Expectations::NONE)).await.is_ok() {
            // A change rewrote it meanwhile.
            return true;
        }
        let mut others = self.in_sync();
        others.retain(|other| other.id != replica.id);
        for other in others.iter().filter(|other| other.is_readable()) {
            let Ok(data) = other.read(one).await else { continue };
            return self.rewrite(replica, attach_count, (one, &data), bad, Expectations::NONE).await;
        }
        self.accept_if_proven(replica, &others, one).await
    }

    /// Writes a block as another replica has it; true if it is good, and as expected. The caller has locked it.
    pub(crate) async fn rewrite(
        &self,
        replica: &Replica,
        attach_count: u64,
        (one, copy): (Extent, &Sealed),
        bad: &BadBlock,
        expected: Expectations,
    ) -> bool {
        if let Err(error) = replica.put(one, copy).await {
            if self.in_sync().len() > 1 {
                self.fail_replica_if_attached(replica, attach_count, &format!("cannot rewrite a bad block: {error}"));
            }
            return false;
        }
        let is_good = matches!(replica.execute(Request::verify(one, expected)).await, Ok(Response::Verified(_)));
        if is_good {
            replica.count_repaired(bad);
        }
        is_good
    }

    /// Executes a Compare on every in-sync replica.
    pub(crate) async fn compare(&self, extent: Extent, data: Sealed) -> Outcome {
        self.reconcile_for_read(extent).await?;
        let replicas = self.in_sync();
        let compares = replicas.iter().map(|replica| replica.execute(Request::compare(extent, data.clone())));
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

/// True if an error says that blocks are bad, or not as expected.
fn is_about_blocks(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Expectation { .. } | ErrorKind::Integrity(_))
}

/// Checks good blocks against the caller's expectations.
fn check_expectations(extent: Extent, data: Sealed, expectations: &Expectations) -> Result<Sealed, Error> {
    expectations.check(extent, &data).map(|()| data)
}

/// Joins the data, or fails with the bad blocks.
fn join_or_fail(found: Vec<FoundBlocks>, bad_blocks: Vec<BadBlock>) -> Result<Sealed, Error> {
    match BadBlocks::new(bad_blocks) {
        Some(bad_blocks) => Err(bad_blocks.into()),
        None => Ok(Sealed::join(found.into_iter().map(|found| found.data))),
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
