//! Stale blocks: an in-sync replica has only an older copy of them, and no other replica has any.
//!
//! A replica that was offline may have an old copy of a block that every other replica has lost since. Nothing tells
//! whether the block was changed while it was offline. To read the copy could return old data; to overwrite it could
//! destroy the last copy of current data. So the replica keeps it, labels list it, and every request finds the block
//! bad until it is written, a good copy is found, or the administrator accepts it ([`Mirror::accept_stale`]).
//!
//! Invariant: a label drops a block from the list only when the write to it is durable. A crash before that makes a
//! good block stale again, and the worker corrects it.

use std::collections::BTreeSet;
use std::rc::Rc;

use sealblock_block::{
    BadBlock, BadBlockCause, Checksum, Clock, Durability, Error, Outcome, Request, RequestKind, Response, Tally,
    VerifyStats,
};
use sealblock_integrity::{Checks, Field, PiFormat, Sealed, Tuple};
use sealblock_units::{Extent, Lba};

use crate::label::{ReplicaState, stale_fits};
use crate::members::ReplicaError;
use crate::mirror::{Mirror, Replicas};
use crate::replica::{Replica, copies};
use crate::resync::full;
use crate::test_hooks::Mutation;

/// Fewest guard bits by which two copies count as the same: guards of 16 bits are equal by chance too often.
const MIN_PROOF_GUARD_BITS: u32 = 32;

/// The stale blocks of a replica.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct StaleBlocks {
    /// Blocks that requests find bad.
    withheld: BTreeSet<u64>,
    /// Blocks that were written since; the write may not be durable, so labels go on listing them.
    rewritten: BTreeSet<u64>,
}

impl StaleBlocks {
    pub fn new(listed: &[u64]) -> StaleBlocks {
        StaleBlocks { withheld: listed.iter().copied().collect(), rewritten: BTreeSet::new() }
    }

    /// The blocks for the list in labels.
    pub fn listed(&self) -> Vec<u64> {
        self.withheld.union(&self.rewritten).copied().collect()
    }

    /// Number of withheld blocks.
    pub fn count(&self) -> u64 {
        self.withheld.len() as u64
    }

    /// True if no block is withheld.
    pub fn is_empty(&self) -> bool {
        self.withheld.is_empty()
    }

    /// All withheld blocks.
    fn withheld(&self) -> Vec<Lba> {
        self.withheld.iter().map(|lba| Lba::new(*lba)).collect()
    }

    /// The withheld blocks of an extent.
    pub fn within(&self, extent: Extent) -> Vec<Lba> {
        let (first, last) = (extent.start().get(), extent.last().get());
        if self.withheld.is_empty() {
            return Vec::new();
        }
        self.withheld.range(first..=last).map(|lba| Lba::new(*lba)).collect()
    }

    fn withhold(&mut self, lba: Lba) {
        self.rewritten.remove(&lba.get());
        self.withheld.insert(lba.get());
    }

    /// Marks the blocks of an extent as written.
    pub fn mark_rewritten(&mut self, extent: Extent) {
        for lba in self.within(extent) {
            self.withheld.remove(&lba.get());
            self.rewritten.insert(lba.get());
        }
    }

    /// Withholds written blocks again: the device may have lost unflushed writes, and have the older copies again.
    pub fn withhold_again(&mut self) {
        self.withheld.append(&mut self.rewritten);
    }

    /// The written blocks that still need a flush.
    pub fn rewritten(&self) -> BTreeSet<u64> {
        self.rewritten.clone()
    }

    /// Drops blocks whose write is durable.
    pub fn forget_rewritten(&mut self, rewritten: &BTreeSet<u64>) {
        self.rewritten.retain(|lba| !rewritten.contains(lba));
    }
}

impl Replica {
    /// Executes a request on a replica that withholds some of its blocks: these are bad, and the request runs on all
    /// others. A withheld block that is unreadable has its own cause.
    pub(crate) async fn execute_around_stale(
        &self,
        format: Option<PiFormat>,
        request: Request,
        extent: Extent,
        withheld: &[Lba],
    ) -> Outcome {
        let mut found = Tally::default();
        for &lba in withheld {
            let one = Extent::one(lba);
            let checks = full(format, one);
            match self.execute_raw(format, Request::verify(one, checks)).await {
                Ok(_) => found.bad_blocks.push(BadBlock::new(lba, BadBlockCause::Stale, None, None)),
                Err(error) => found.take(error)?,
            }
        }
        let without = withheld.iter().copied().collect();
        for run in crate::verify::runs_between(extent, &without) {
            if request.kind() == RequestKind::Compare {
                // The other replicas tell whether they are equal.
                break;
            }
            match self.execute_raw(format, request.part(extent, run, format)).await {
                Ok(
                    Response::Verified(VerifyStats { coverage, .. }) | Response::Checksum(Checksum { coverage, .. }),
                ) => {
                    found.coverage.merge(coverage);
                }
                Ok(_) => {}
                Err(error) => found.take(error)?,
            }
        }
        found.finish()?;
        Err(crate::replica::unexpected_response())
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
            blocks: replica.stale.borrow().rewritten(),
        }
    }
}

/// What the remains of a lost block on one replica say about a copy on another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Evidence {
    /// The copy is that block.
    For,
    /// The copy has another content, or nothing can tell.
    Against,
    /// Nothing.
    None,
}

/// What was done about a block that every in-sync replica has lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LastCopy {
    /// The last copy is kept, or there is none.
    Kept,
    /// The block must be listed as stale, and the list is full.
    NoRoom,
}

impl<C: Clock> Mirror<C> {
    /// Decides about a block that every in-sync replica has lost, in a resync of `replica`. The caller has locked it.
    ///
    /// # Errors
    /// When the replica fails, or cannot make a block unreadable that never was the mirror's.
    pub(crate) async fn keep_last_copy(
        &self,
        replica: &Rc<Replica>,
        sources: &Replicas,
        lba: Lba,
    ) -> Result<LastCopy, Error> {
        let (one, format) = (Extent::one(lba), self.geometry.protection);
        if replica.is_new.get() || self.mutation == Mutation::PoisonLastCopy {
            // Its content never was the mirror's.
            let poison = Request::write_uncorrectable(one, Durability::Volatile);
            return replica.execute(format, poison).await.map(|_| LastCopy::Kept);
        }
        let read = Request::read(one, self.full(one));
        let is_good = match replica.execute_raw(format, read).await.map_err(Error::into_bad_blocks) {
            Ok(Response::Data(copy)) => {
                if self.is_proven_current(sources, one, &copy).await {
                    self.accept_as_current(replica, sources, one, &copy).await;
                    return Ok(LastCopy::Kept);
                }
                true
            }
            Ok(_) => return Err(crate::replica::unexpected_response()),
            Err(Err(error)) => return Err(error),
            Err(Ok(_)) => false,
        };
        if !self.may_list(replica, lba) {
            // An unreadable block is no copy that could pass for a newer one.
            return Ok(if is_good { LastCopy::NoRoom } else { LastCopy::Kept });
        }
        if self.mutation == Mutation::ForgetStale {
            return Ok(LastCopy::Kept);
        }
        // Also if it is unreadable: it may become readable later, and is just as old then.
        replica.stale.borrow_mut().withhold(lba);
        if is_good {
            tracing::warn!(replica = %replica.name(), block = %lba, "block lost on all in-sync replicas; keeping a stale copy");
        }
        Ok(LastCopy::Kept)
    }

    /// True if the labels have room to list one more block.
    fn may_list(&self, of: &Rc<Replica>, lba: Lba) -> bool {
        let listed = |replica: &Rc<Replica>| {
            let mut stale = replica.stale.borrow().clone();
            if Rc::ptr_eq(replica, of) {
                stale.withhold(lba);
            }
            stale.listed()
        };
        let lists: Vec<Vec<u64>> = self.replicas.borrow().iter().map(listed).collect();
        stale_fits(lists.iter().map(|list| &list[..]))
    }

    /// True if the remains of a block on the in-sync replicas prove that a copy is the current one.
    async fn is_proven_current(&self, sources: &Replicas, one: Extent, copy: &Sealed) -> bool {
        let Some(format) = self.geometry.protection.filter(|format| format.guard().bits() >= MIN_PROOF_GUARD_BITS)
        else {
            return false;
        };
        if Tuple::read(format, &copy.joined_tags()[..]).is_escaped(format) {
            return false;
        }
        let mut is_proven = false;
        // A replica that withholds the block has lost an older copy: its remains prove nothing.
        for replica in sources.iter().filter(|replica| replica.stale.borrow().within(one).is_empty()) {
            match self.evidence_on(replica, format, one, copy).await {
                Evidence::For => is_proven = true,
                Evidence::None => {}
                Evidence::Against => return false,
            }
        }
        is_proven
    }

    /// Evidence of a replica that has lost a block about a copy: whether it stored the same tags. A remote replica
    /// may return only the guard, and that counts.
    async fn evidence_on(&self, replica: &Replica, format: PiFormat, one: Extent, copy: &Sealed) -> Evidence {
        let Err(Ok(bad_blocks)) = replica.read(Some(format), one, self.full(one)).await.map_err(Error::into_bad_blocks)
        else {
            // It has the block after all, or failed: that proves nothing.
            return Evidence::Against;
        };
        let unchecked = Request::read(one, Checks::NONE);
        if let Ok(Response::Data(lost)) = replica.execute_raw(Some(format), unchecked).await {
            return if lost.joined_tags()[..] == copy.joined_tags()[..] { Evidence::For } else { Evidence::Against };
        }
        let guard = Tuple::read(format, &copy.joined_tags()[..]).guard;
        let is_guard = |bad: &&BadBlock| bad.cause == BadBlockCause::Tag(Field::Guard);
        let stored: Vec<u64> = bad_blocks.iter().filter(is_guard).filter_map(|bad| bad.actual).collect();
        match stored.iter().all(|stored| *stored == guard) {
            _ if stored.is_empty() => Evidence::None,
            true => Evidence::For,
            false => Evidence::Against,
        }
    }

    /// Accepts a withheld copy as current if the remains on the other replicas prove it by now; true if it does. The
    /// caller has locked the block.
    pub(crate) async fn accept_if_proven(&self, replica: &Replica, others: &Replicas, one: Extent) -> bool {
        if replica.stale.borrow().within(one).is_empty() {
            return false;
        }
        let (format, read) = (self.geometry.protection, Request::read(one, self.full(one)));
        let Ok(Response::Data(copy)) = replica.execute_raw(format, read).await else { return false };
        if !self.is_proven_current(others, one, &copy).await {
            return false;
        }
        self.accept_as_current(replica, others, one, &copy).await;
        true
    }

    /// No longer withholds a copy that is proven current, and writes it to the replicas that have lost it.
    async fn accept_as_current(&self, replica: &Replica, others: &Replicas, one: Extent, copy: &Sealed) {
        replica.stale.borrow_mut().mark_rewritten(one);
        self.write_to_bad(others, one, copy).await;
    }

    /// Writes a copy that is proven current to the replicas that have lost it. A failure leaves the copy itself.
    async fn write_to_bad(&self, sources: &Replicas, one: Extent, copy: &Sealed) {
        let (format, checks) = (self.geometry.protection, self.full(one));
        for replica in sources {
            if let Err(error) = replica.put(format, one, copy).await {
                self.fail_if_unreachable(replica, &error);
                continue;
            }
            if replica.execute(format, Request::verify(one, checks)).await.is_ok() {
                replica.repaired_blocks.set(replica.repaired_blocks.get() + 1);
                tracing::warn!(replica = %replica.name(), block = %one.start(), "bad block repaired from a replica that was offline: its copy is current");
            }
        }
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
                self.repair_block(&replica, &bad, self.full(Extent::one(lba))).await;
            }
        }
    }

    fn named_replica(&self, name: &str) -> Option<Rc<Replica>> {
        let named = |replica: &&Rc<Replica>| *replica.name() == *name && replica.state.get() != ReplicaState::Removed;
        self.replicas.borrow().iter().find(named).cloned()
    }

    /// The stale blocks of a replica in rising order; none if there is no such replica.
    pub fn stale_blocks(&self, name: &str) -> Vec<Lba> {
        self.named_replica(name).map_or_else(Vec::new, |replica| replica.stale.borrow().withheld())
    }

    /// Makes the stale copies of a replica the content of their blocks, on every replica; returns how many. Skips
    /// blocks that have a good copy elsewhere by now, and those whose stale copy is bad.
    ///
    /// # Errors
    /// When there is no such replica, it is offline, or the blocks cannot be written. Blocks that were accepted
    /// before stay accepted.
    pub async fn accept_stale(&self, name: &str) -> Result<u64, ReplicaError> {
        if self.is_read_only {
            return Err(ReplicaError::ReadOnly);
        }
        let replica = self.named_replica(name).ok_or_else(|| ReplicaError::Unknown(name.to_owned()))?;
        if !replica.is_writable() {
            let reason = replica.last_error.borrow().clone();
            return Err(ReplicaError::Offline { replica: name.to_owned(), reason });
        }
        let (kept, mut taken) = (replica.stale.borrow().withheld(), 0);
        for lba in kept {
            taken += u64::from(self.accept_one(&replica, Extent::one(lba)).await.map_err(ReplicaError::WriteBlocks)?);
        }
        self.flush_internally().await.map_err(ReplicaError::WriteBlocks)?;
        self.write_labels().await.map_err(ReplicaError::WriteLabels)?;
        Ok(taken)
    }

    async fn accept_one(&self, replica: &Rc<Replica>, one: Extent) -> Result<bool, Error> {
        let (format, checks) = (self.geometry.protection, self.full(one));
        let _guard = self.range_lock.lock(one).await;
        if replica.stale.borrow().within(one).is_empty() {
            return Ok(false);
        }
        for other in self.in_sync().iter().filter(|other| other.id != replica.id) {
            match other.read(format, one, checks).await.map_err(Error::into_bad_blocks) {
                Ok(newer) => return replica.put(format, one, &newer).await.map(|()| false),
                Err(Ok(_)) => {}
                Err(Err(error)) => self.fail_if_unreachable(other, &error),
            }
        }
        let copy = match replica.execute_raw(format, Request::read(one, checks)).await.map_err(Error::into_bad_blocks) {
            Ok(Response::Data(copy)) => copy,
            Ok(_) => return Err(crate::replica::unexpected_response()),
            Err(Ok(_)) => return Ok(false),
            Err(Err(error)) => return Err(error),
        };
        for request in copies(one, &copy) {
            self.change_locked(one, request).await?;
        }
        Ok(true)
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
        self.replicas.borrow().iter().any(|replica| !replica.stale.borrow().rewritten.is_empty())
    }
}
