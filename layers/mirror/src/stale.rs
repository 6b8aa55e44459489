//! Blocks of which a member in sync holds only an older copy, and nobody else any.
//!
//! A member that was away may hold an old copy of a block that every other one has lost meanwhile. Nobody knows whether the
//! block was changed while it was away, so the copy is neither content, to be read, nor worthless, to be overwritten: it is
//! kept, listed in the labels, and withheld from every request until the block is written, another copy turns up, or
//! somebody takes it on purpose ([`Mirror::accept_stale`]).
//!
//! Invariant: a label takes a block off the list only when what was written there instead is durable. A crash that forgets
//! that it was written only withholds what is good, and the worker finds out.

use std::collections::BTreeSet;
use std::rc::Rc;

use sealblock_block::{
    BadBlock, BadBlockCause, Checksum, Clock, Durability, Error, Outcome, Request, Response, Tally, VerifyStats,
};
use sealblock_integrity::{Checks, Field, PiFormat, Sealed, Tuple};
use sealblock_units::{Extent, Lba};

use crate::label::{ReplicaState, stale_fits};
use crate::members::ReplicaError;
use crate::mirror::{Mirror, Replicas};
use crate::replica::{Replica, copies};
use crate::resync::full;
use crate::test_hooks::Mutation;

/// The least bits of a guard by which two copies are taken for the same: one of 16 bits is alike by chance too often.
const MIN_PROOF_GUARD_BITS: u32 = 32;

/// The older copies that a member keeps.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct StaleBlocks {
    /// Withheld.
    withheld: BTreeSet<u64>,
    /// Written since, which is not known to be durable; the labels go on listing them.
    rewritten: BTreeSet<u64>,
}

impl StaleBlocks {
    pub fn new(listed: &[u64]) -> StaleBlocks {
        StaleBlocks { withheld: listed.iter().copied().collect(), rewritten: BTreeSet::new() }
    }

    /// What the labels are to list.
    pub fn listed(&self) -> Vec<u64> {
        self.withheld.union(&self.rewritten).copied().collect()
    }

    /// How many blocks are withheld.
    pub fn count(&self) -> u64 {
        self.withheld.len() as u64
    }

    /// Whether no block is withheld.
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

    /// Blocks were written.
    pub fn mark_rewritten(&mut self, extent: Extent) {
        for lba in self.within(extent) {
            self.withheld.remove(&lba.get());
            self.rewritten.insert(lba.get());
        }
    }

    /// The device may have lost what was written to it and not flushed: the copies there may be the older ones again.
    pub fn withhold_again(&mut self) {
        self.withheld.append(&mut self.rewritten);
    }

    /// The blocks whose being written is to be made durable.
    pub fn rewritten(&self) -> BTreeSet<u64> {
        self.rewritten.clone()
    }

    /// What was written to these blocks is durable.
    pub fn forget_rewritten(&mut self, renewed: &BTreeSet<u64>) {
        self.rewritten.retain(|lba| !renewed.contains(lba));
    }
}

impl Replica {
    /// A request to a member that withholds some of the blocks: all others are asked for, and these are faults. Of a copy that
    /// is bad in itself the fault is what it says.
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
            match self.execute_raw(format, Request::Verify { extent: one, checks }).await {
                Ok(_) => found.faults.push(BadBlock::new(lba, BadBlockCause::Stale, None, None)),
                Err(error) => found.take(error)?,
            }
        }
        let without = withheld.iter().copied().collect();
        for run in crate::verify::runs_between(extent, &without) {
            let blocks = run.start().get() - extent.start().get();
            let on = |checks: &Checks| format.map_or(*checks, |format| checks.advance(blocks, format));
            let part = match &request {
                Request::Read { checks, .. } => Request::Read { extent: run, checks: on(checks) },
                Request::Checksum { checks, .. } => Request::Checksum { extent: run, checks: on(checks) },
                Request::Verify { checks, .. } => Request::Verify { extent: run, checks: on(checks) },
                // Whether they are equal others tell.
                _ => continue,
            };
            match self.execute_raw(format, part).await {
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

/// Blocks of a replica that were withheld and written.
pub(crate) struct RewrittenBlocks {
    replica: Rc<Replica>,
    attach_count: u64,
    blocks: BTreeSet<u64>,
}

impl RewrittenBlocks {
    /// What was written to blocks that a replica withheld, not known to be durable.
    pub fn of(replica: &Rc<Replica>) -> RewrittenBlocks {
        RewrittenBlocks {
            replica: replica.clone(),
            attach_count: replica.attach_count(),
            blocks: replica.stale.borrow().rewritten(),
        }
    }
}

/// What is left of a lost block on one member says of a copy on another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Evidence {
    /// It is that block.
    For,
    /// It is another content of it, or nobody can tell.
    Against,
    /// Nothing.
    None,
}

/// What became of the copy of a lost block on a member that is brought up to date.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LastCopy {
    /// It is taken care of.
    Kept,
    /// It would have to be listed, and the list is full.
    NoRoom,
}

impl<C: Clock> Mirror<C> {
    /// Decides about a block that every member in sync has lost while `replica` is brought up to date, in a claimed extent.
    ///
    /// # Errors
    /// When the member fails, or cannot be told that what it has is none of the mirror's.
    pub(crate) async fn keep_last_copy(
        &self,
        replica: &Rc<Replica>,
        sources: &Replicas,
        lba: Lba,
    ) -> Result<LastCopy, Error> {
        let (one, format) = (Extent::one(lba), self.geometry.protection);
        if replica.is_new.get() || self.mutation == Mutation::PoisonLastCopy {
            // What lies there never was the mirror's.
            let spoil = Request::WriteUncorrectable { extent: one, durability: Durability::Volatile };
            return replica.execute(format, spoil).await.map(|_| LastCopy::Kept);
        }
        let read = Request::Read { extent: one, checks: self.full(one) };
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
            // What cannot be read is no copy that could be taken for a newer one, as far as anybody can tell.
            return Ok(if is_good { LastCopy::NoRoom } else { LastCopy::Kept });
        }
        if self.mutation == Mutation::ForgetStale {
            return Ok(LastCopy::Kept);
        }
        // Also if it cannot be read: it may be readable another day, and is as old then.
        replica.stale.borrow_mut().withhold(lba);
        if is_good {
            tracing::warn!(replica = %replica.name(), block = %lba, "lost on the members in sync; an older copy is kept here");
        }
        Ok(LastCopy::Kept)
    }

    /// Whether the labels have room to list one more block.
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

    /// Whether what is left of a block on the members in sync shows that a copy is the current one.
    async fn is_proven_current(&self, sources: &Replicas, one: Extent, copy: &Sealed) -> bool {
        let Some(format) = self.geometry.protection.filter(|format| format.guard().bits() >= MIN_PROOF_GUARD_BITS)
        else {
            return false;
        };
        if Tuple::read(format, &copy.tags()[..]).is_escaped(format) {
            return false;
        }
        let mut is_proven = false;
        // One that withholds the block has lost an older copy, if any: what is left of that proves nothing.
        for replica in sources.iter().filter(|replica| replica.stale.borrow().within(one).is_empty()) {
            match self.evidence_on(replica, format, one, copy).await {
                Evidence::For => is_proven = true,
                Evidence::None => {}
                Evidence::Against => return false,
            }
        }
        is_proven
    }

    /// What a member that has lost a block tells of a copy: whether it has stored just these tags with it. Where it gives only
    /// the guard, as one on another host does, that counts.
    async fn evidence_on(&self, replica: &Replica, format: PiFormat, one: Extent, copy: &Sealed) -> Evidence {
        let Err(Ok(bad_blocks)) = replica.read(Some(format), one, self.full(one)).await.map_err(Error::into_bad_blocks)
        else {
            // It has it after all, or has gone: nothing is proven by that.
            return Evidence::Against;
        };
        let unchecked = Request::Read { extent: one, checks: Checks::NONE };
        if let Ok(Response::Data(lost)) = replica.execute_raw(Some(format), unchecked).await {
            return if lost.tags()[..] == copy.tags()[..] { Evidence::For } else { Evidence::Against };
        }
        let guard = Tuple::read(format, &copy.tags()[..]).guard;
        let is_guard = |bad: &&BadBlock| bad.cause == BadBlockCause::Tag(Field::Guard);
        let stored: Vec<u64> = bad_blocks.iter().filter(is_guard).filter_map(|bad| bad.actual).collect();
        match stored.iter().all(|stored| *stored == guard) {
            _ if stored.is_empty() => Evidence::None,
            true => Evidence::For,
            false => Evidence::Against,
        }
    }

    /// Takes a copy that is withheld for current if what is left on the others proves it by now; whether it does. The caller
    /// has claimed the block.
    pub(crate) async fn accept_if_proven(&self, replica: &Replica, others: &Replicas, one: Extent) -> bool {
        if replica.stale.borrow().within(one).is_empty() {
            return false;
        }
        let (format, read) = (self.geometry.protection, Request::Read { extent: one, checks: self.full(one) });
        let Ok(Response::Data(copy)) = replica.execute_raw(format, read).await else { return false };
        if !self.is_proven_current(others, one, &copy).await {
            return false;
        }
        self.accept_as_current(replica, others, one, &copy).await;
        true
    }

    /// Withholds a copy no longer that is proven to be current, and gives it to the members that have lost it.
    async fn accept_as_current(&self, replica: &Replica, others: &Replicas, one: Extent, copy: &Sealed) {
        replica.stale.borrow_mut().mark_rewritten(one);
        self.write_to_bad(others, one, copy).await;
    }

    /// Writes a copy that is proven to be current to the members that have lost it. Where that fails the copy itself is left.
    async fn write_to_bad(&self, sources: &Replicas, one: Extent, copy: &Sealed) {
        let (format, checks) = (self.geometry.protection, self.full(one));
        for replica in sources {
            if let Err(error) = replica.put(format, one, copy).await {
                self.fail_if_unreachable(replica, &error);
                continue;
            }
            if replica.execute(format, Request::Verify { extent: one, checks }).await.is_ok() {
                replica.repaired_blocks.set(replica.repaired_blocks.get() + 1);
                tracing::warn!(replica = %replica.name(), block = %one.start(), "bad block repaired from a replica that was offline: its copy is current");
            }
        }
    }

    /// Looks whether blocks that are withheld have a good copy somewhere by now.
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

    /// The blocks of which a member keeps only an older copy now, in rising order; none where there is no such member.
    pub fn stale_blocks(&self, name: &str) -> Vec<Lba> {
        self.named_replica(name).map_or_else(Vec::new, |replica| replica.stale.borrow().withheld())
    }

    /// Takes the older copies that a member keeps for what the blocks hold from now on, on every member; how many blocks.
    /// Blocks that have a good copy elsewhere by now, and those whose older copy is bad itself, are not taken.
    ///
    /// # Errors
    /// When there is no such member, it is not here, or the blocks could not be written. Those taken until then stay taken.
    pub async fn accept_stale(&self, name: &str) -> Result<u64, ReplicaError> {
        if self.is_read_only {
            return Err(ReplicaError::ReadOnly);
        }
        let replica = self.named_replica(name).ok_or_else(|| ReplicaError::Unknown(name.to_owned()))?;
        if !replica.is_writable() {
            let reason = replica.last_error.borrow().clone();
            return Err(ReplicaError::Offline { replica: name.to_owned(), reason: reason });
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
        let copy = match replica
            .execute_raw(format, Request::Read { extent: one, checks })
            .await
            .map_err(Error::into_bad_blocks)
        {
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

    /// What was written to blocks that were withheld, and on which device.
    pub(crate) fn rewritten(&self) -> Vec<RewrittenBlocks> {
        let replicas = self.replicas.borrow();
        replicas.iter().map(RewrittenBlocks::of).filter(|renewed| !renewed.blocks.is_empty()).collect()
    }

    /// What was written to these blocks is durable where the device is still there: nobody needs to list them any more.
    pub(crate) fn forget_rewritten(&self, renewed: &[RewrittenBlocks]) {
        for RewrittenBlocks { replica, attach_count, blocks } in renewed {
            if replica.attach_count() == *attach_count {
                replica.stale.borrow_mut().forget_rewritten(blocks);
            }
        }
    }

    /// Whether something was written to blocks that the labels still list.
    pub(crate) fn has_rewritten(&self) -> bool {
        self.replicas.borrow().iter().any(|replica| !replica.stale.borrow().rewritten.is_empty())
    }
}
