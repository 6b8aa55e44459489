//! Last copies: blocks that every in-sync replica has lost, and of which another replica has a copy that may be older.
//!
//! A replica that was offline may have an old copy of a block that every other replica has lost since. Nothing tells
//! whether the block was changed while it was offline. To read the copy could return old data; to overwrite it could
//! destroy the last copy of current data. So the replica keeps it, labels list it, and every request finds the block
//! bad until it is written, a good copy is found, or the administrator accepts it ([`Mirror::accept_stale`]).

use std::rc::Rc;

use sealblock_block::{BadBlock, BadBlockCause, Clock, Error, Expectations, Request, Response};
use sealblock_integrity::{Field, PiFormat, Sealed, Tuple};
use sealblock_units::{Extent, Lba};

use crate::error::ReplicaError;
use crate::label::stale_fits;
use crate::mirror::replica::{Replica, copies, unexpected_response};
use crate::mirror::{Mirror, Mutation, Replicas};

/// Fewest guard bits by which two copies count as the same: guards of 16 bits are equal by chance too often.
const MIN_PROOF_GUARD_BITS: u32 = 32;

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
        let one = Extent::one(lba);
        if replica.is_new.get() || self.mutation.is(Mutation::PoisonLastCopy) {
            // Its content never was the mirror's.
            return replica.execute(Request::mark_lost(one)).await.map(|_| LastCopy::Kept);
        }
        let read = Request::read(one, Expectations::NONE);
        let is_good = match replica.execute_raw(read).await.map_err(Error::into_bad_blocks) {
            Ok(Response::Data(copy)) => {
                if self.is_proven_current(sources, one, &copy).await {
                    self.accept_as_current(replica, sources, one, &copy).await;
                    return Ok(LastCopy::Kept);
                }
                true
            }
            Ok(_) => return Err(unexpected_response()),
            Err(Err(error)) => return Err(error),
            Err(Ok(_)) => false,
        };
        if !self.may_list(replica, lba) {
            // An unreadable block is no copy that could pass for a newer one.
            return Ok(if is_good { LastCopy::NoRoom } else { LastCopy::Kept });
        }
        if self.mutation.is(Mutation::ForgetStale) {
            return Ok(LastCopy::Kept);
        }
        // Also if it is unreadable: it may become readable later, and is just as old then.
        self.revoke();
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
        let Err(Ok(bad_blocks)) = replica.read(one).await.map_err(Error::into_bad_blocks) else {
            // It has the block after all, or failed: that proves nothing.
            return Evidence::Against;
        };
        if let Ok(Response::Salvaged(lost)) = replica.execute_raw(Request::salvage(one)).await {
            let tags = lost.blocks.joined_tags();
            // Tags that are lost too prove nothing.
            if lost.blocks.format() == Some(format) && !Tuple::read(format, &tags).is_escaped(format) {
                return if tags[..] == copy.joined_tags()[..] { Evidence::For } else { Evidence::Against };
            }
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
        let read = Request::read(one, Expectations::NONE);
        let Ok(Response::Data(copy)) = replica.execute_raw(read).await else { return false };
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
        let bad = self.bad_copies(sources, one).await;
        for replica in sources {
            if let Err(error) = replica.put(one, copy).await {
                self.fail_if_unreachable(replica, &error);
            }
        }
        self.report_repaired(bad).await;
    }

    /// The stale blocks of a replica in rising order; none if there is no such replica.
    pub fn stale_blocks(&self, name: &str) -> Vec<Lba> {
        self.named_replica(name).map_or_else(Vec::new, |replica| replica.stale.borrow().withheld())
    }

    /// Makes the stale copies of a replica the content of their blocks, on every replica; returns how many. Skips
    /// blocks that have a good copy elsewhere by now, and those whose stale copy is bad.
    ///
    /// # Errors
    /// When there is no such replica, it is offline or out of sync, or the blocks cannot be written. Blocks that were accepted
    /// before stay accepted.
    pub async fn accept_stale(&self, name: &str) -> Result<u64, ReplicaError> {
        if self.is_read_only {
            return Err(ReplicaError::ReadOnly);
        }
        let replica = self.named_replica(name).ok_or_else(|| ReplicaError::Unknown(name.to_owned()))?;
        if replica.is_online() && !replica.is_writable() {
            return Err(ReplicaError::OutOfSync(name.to_owned()));
        }
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
        let _guard = self.lock_blocks(one).await;
        if replica.stale.borrow().within(one).is_empty() {
            return Ok(false);
        }
        for other in self.in_sync().iter().filter(|other| other.id != replica.id) {
            match other.read(one).await.map_err(Error::into_bad_blocks) {
                Ok(newer) => return replica.put(one, &newer).await.map(|()| false),
                Err(Ok(_)) => {}
                Err(Err(error)) => self.fail_if_unreachable(other, &error),
            }
        }
        let copy =
            match replica.execute_raw(Request::read(one, Expectations::NONE)).await.map_err(Error::into_bad_blocks) {
                Ok(Response::Data(copy)) => copy,
                Ok(_) => return Err(unexpected_response()),
                Err(Ok(_)) => return Ok(false),
                Err(Err(error)) => return Err(error),
            };
        for request in copies(one, &copy) {
            self.change_locked(one, request).await?;
        }
        Ok(true)
    }
}
