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
use crate::mirror::{Legs, Mirror};
use crate::replica::{Replica, copies};
use crate::resync::full;
use crate::test_hooks::Mutation;

/// The least bits of a guard by which two copies are taken for the same: one of 16 bits is alike by chance too often.
const PROVING_GUARD_BITS: u32 = 32;

/// The older copies that a member keeps.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Stale {
    /// Withheld.
    kept: BTreeSet<u64>,
    /// Written since, which is not known to be durable; the labels go on listing them.
    renewed: BTreeSet<u64>,
}

impl Stale {
    pub fn new(listed: &[u64]) -> Stale {
        Stale { kept: listed.iter().copied().collect(), renewed: BTreeSet::new() }
    }

    /// What the labels are to list.
    pub fn listed(&self) -> Vec<u64> {
        self.kept.union(&self.renewed).copied().collect()
    }

    /// How many blocks are withheld.
    pub fn count(&self) -> u64 {
        self.kept.len() as u64
    }

    /// Whether no block is withheld.
    pub fn is_empty(&self) -> bool {
        self.kept.is_empty()
    }

    /// All withheld blocks.
    fn kept(&self) -> Vec<Lba> {
        self.kept.iter().map(|lba| Lba::new(*lba)).collect()
    }

    /// The withheld blocks of an extent.
    pub fn within(&self, extent: Extent) -> Vec<Lba> {
        let (first, last) = (extent.start().get(), extent.last().get());
        if self.kept.is_empty() {
            return Vec::new();
        }
        self.kept.range(first..=last).map(|lba| Lba::new(*lba)).collect()
    }

    fn keep(&mut self, lba: Lba) {
        self.renewed.remove(&lba.get());
        self.kept.insert(lba.get());
    }

    /// Blocks were written.
    pub fn renew(&mut self, extent: Extent) {
        for lba in self.within(extent) {
            self.kept.remove(&lba.get());
            self.renewed.insert(lba.get());
        }
    }

    /// The device may have lost what was written to it and not flushed: the copies there may be the older ones again.
    pub fn withhold_again(&mut self) {
        self.kept.append(&mut self.renewed);
    }

    /// The blocks whose being written is to be made durable.
    pub fn renewed(&self) -> BTreeSet<u64> {
        self.renewed.clone()
    }

    /// What was written to these blocks is durable.
    pub fn settle(&mut self, renewed: &BTreeSet<u64>) {
        self.renewed.retain(|lba| !renewed.contains(lba));
    }
}

impl Replica {
    /// A request to a member that withholds some of the blocks: all others are asked for, and these are faults. Of a copy that
    /// is bad in itself the fault is what it says.
    pub(crate) async fn ask_around(
        &self,
        format: Option<PiFormat>,
        operation: Request,
        extent: Extent,
        withheld: &[Lba],
    ) -> Outcome {
        let mut found = Tally::default();
        for &lba in withheld {
            let one = Extent::one(lba);
            let checks = full(format, one);
            match self.ask_as_it_is(format, Request::Verify { extent: one, checks }).await {
                Ok(_) => found.faults.push(BadBlock::new(lba, BadBlockCause::Stale, None, None)),
                Err(error) => found.take(error)?,
            }
        }
        let without = withheld.iter().copied().collect();
        for run in crate::verify::runs_between(extent, &without) {
            let blocks = run.start().get() - extent.start().get();
            let on = |checks: &Checks| format.map_or(*checks, |format| checks.advance(blocks, format));
            let part = match &operation {
                Request::Read { checks, .. } => Request::Read { extent: run, checks: on(checks) },
                Request::Checksum { checks, .. } => Request::Checksum { extent: run, checks: on(checks) },
                Request::Verify { checks, .. } => Request::Verify { extent: run, checks: on(checks) },
                // Whether they are equal others tell.
                _ => continue,
            };
            match self.ask_as_it_is(format, part).await {
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
        Err(crate::replica::answered_wrongly())
    }
}

/// Blocks of a leg that were withheld and written.
pub(crate) struct Renewed {
    leg: Rc<Replica>,
    epoch: u64,
    blocks: BTreeSet<u64>,
}

impl Renewed {
    /// What was written to blocks that a leg withheld, not known to be durable.
    pub fn of(leg: &Rc<Replica>) -> Renewed {
        Renewed { leg: leg.clone(), epoch: leg.attach_count(), blocks: leg.stale.borrow().renewed() }
    }
}

/// What is left of a lost block on one member says of a copy on another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Testimony {
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
    Settled,
    /// It would have to be listed, and the list is full.
    NoRoom,
}

impl<C: Clock> Mirror<C> {
    /// Decides about a block that every member in sync has lost while `leg` is brought up to date, in a claimed extent.
    ///
    /// # Errors
    /// When the member fails, or cannot be told that what it has is none of the mirror's.
    pub(crate) async fn keep_last_copy(&self, leg: &Rc<Replica>, sources: &Legs, lba: Lba) -> Result<LastCopy, Error> {
        let (one, format) = (Extent::one(lba), self.geometry.protection);
        if leg.is_new.get() || self.mutation == Mutation::SpoilLastCopy {
            // What lies there never was the mirror's.
            let spoil = Request::WriteUncorrectable { extent: one, durability: Durability::Volatile };
            return leg.ask(format, spoil).await.map(|_| LastCopy::Settled);
        }
        let read = Request::Read { extent: one, checks: self.full(one) };
        let is_good = match leg.ask_as_it_is(format, read).await.map_err(Error::into_bad_blocks) {
            Ok(Response::Data(copy)) => {
                if self.is_proven_current(sources, one, &copy).await {
                    self.take_as_current(leg, sources, one, &copy).await;
                    return Ok(LastCopy::Settled);
                }
                true
            }
            Ok(_) => return Err(crate::replica::answered_wrongly()),
            Err(Err(error)) => return Err(error),
            Err(Ok(_)) => false,
        };
        if !self.may_list(leg, lba) {
            // What cannot be read is no copy that could be taken for a newer one, as far as anybody can tell.
            return Ok(if is_good { LastCopy::NoRoom } else { LastCopy::Settled });
        }
        if self.mutation == Mutation::ForgetStale {
            return Ok(LastCopy::Settled);
        }
        // Also if it cannot be read: it may be readable another day, and is as old then.
        leg.stale.borrow_mut().keep(lba);
        if is_good {
            tracing::warn!(replica = %leg.name(), block = %lba, "lost on the members in sync; an older copy is kept here");
        }
        Ok(LastCopy::Settled)
    }

    /// Whether the labels have room to list one more block.
    fn may_list(&self, of: &Rc<Replica>, lba: Lba) -> bool {
        let listed = |leg: &Rc<Replica>| {
            let mut stale = leg.stale.borrow().clone();
            if Rc::ptr_eq(leg, of) {
                stale.keep(lba);
            }
            stale.listed()
        };
        let lists: Vec<Vec<u64>> = self.legs.borrow().iter().map(listed).collect();
        stale_fits(lists.iter().map(|list| &list[..]))
    }

    /// Whether what is left of a block on the members in sync shows that a copy is the current one.
    async fn is_proven_current(&self, sources: &Legs, one: Extent, copy: &Sealed) -> bool {
        let Some(format) = self.geometry.protection.filter(|format| format.guard().bits() >= PROVING_GUARD_BITS) else {
            return false;
        };
        if Tuple::read(format, &copy.tags()[..]).is_escaped(format) {
            return false;
        }
        let mut is_proven = false;
        // One that withholds the block has lost an older copy, if any: what is left of that proves nothing.
        for leg in sources.iter().filter(|leg| leg.stale.borrow().within(one).is_empty()) {
            match self.testimony(leg, format, one, copy).await {
                Testimony::For => is_proven = true,
                Testimony::None => {}
                Testimony::Against => return false,
            }
        }
        is_proven
    }

    /// What a member that has lost a block tells of a copy: whether it has stored just these tags with it. Where it gives only
    /// the guard, as one on another host does, that counts.
    async fn testimony(&self, leg: &Replica, format: PiFormat, one: Extent, copy: &Sealed) -> Testimony {
        let Err(Ok(faults)) = leg.read(Some(format), one, self.full(one)).await.map_err(Error::into_bad_blocks) else {
            // It has it after all, or has gone: nothing is proven by that.
            return Testimony::Against;
        };
        let unchecked = Request::Read { extent: one, checks: Checks::NONE };
        if let Ok(Response::Data(lost)) = leg.ask_as_it_is(Some(format), unchecked).await {
            return if lost.tags()[..] == copy.tags()[..] { Testimony::For } else { Testimony::Against };
        }
        let guard = Tuple::read(format, &copy.tags()[..]).guard;
        let is_guard = |fault: &&BadBlock| fault.cause == BadBlockCause::Tag(Field::Guard);
        let stored: Vec<u64> = faults.iter().filter(is_guard).filter_map(|fault| fault.actual).collect();
        match stored.iter().all(|stored| *stored == guard) {
            _ if stored.is_empty() => Testimony::None,
            true => Testimony::For,
            false => Testimony::Against,
        }
    }

    /// Takes a copy that is withheld for current if what is left on the others proves it by now; whether it does. The caller
    /// has claimed the block.
    pub(crate) async fn prove_kept(&self, leg: &Replica, others: &Legs, one: Extent) -> bool {
        if leg.stale.borrow().within(one).is_empty() {
            return false;
        }
        let (format, read) = (self.geometry.protection, Request::Read { extent: one, checks: self.full(one) });
        let Ok(Response::Data(copy)) = leg.ask_as_it_is(format, read).await else { return false };
        if !self.is_proven_current(others, one, &copy).await {
            return false;
        }
        self.take_as_current(leg, others, one, &copy).await;
        true
    }

    /// Withholds a copy no longer that is proven to be current, and gives it to the members that have lost it.
    async fn take_as_current(&self, leg: &Replica, others: &Legs, one: Extent, copy: &Sealed) {
        leg.stale.borrow_mut().renew(one);
        self.give_back(others, one, copy).await;
    }

    /// Writes a copy that is proven to be current to the members that have lost it. Where that fails the copy itself is left.
    async fn give_back(&self, sources: &Legs, one: Extent, copy: &Sealed) {
        let (format, checks) = (self.geometry.protection, self.full(one));
        for leg in sources {
            if let Err(error) = leg.put(format, one, copy).await {
                self.fail_if_unreachable(leg, &error);
                continue;
            }
            if leg.ask(format, Request::Verify { extent: one, checks }).await.is_ok() {
                leg.healed.set(leg.healed.get() + 1);
                tracing::warn!(replica = %leg.name(), block = %one.start(), "bad block repaired from a replica that was offline: its copy is current");
            }
        }
    }

    /// Looks whether blocks that are withheld have a good copy somewhere by now.
    pub(crate) async fn reexamine(&self) {
        let legs: Vec<Rc<Replica>> = self.legs.borrow().iter().filter(|leg| leg.is_current()).cloned().collect();
        for leg in legs {
            let kept = leg.stale.borrow().kept();
            for lba in kept {
                if self.closing.get() || !leg.is_current() {
                    return;
                }
                let fault = BadBlock::new(lba, BadBlockCause::Stale, None, None);
                self.mend(&leg, &fault, self.full(Extent::one(lba))).await;
            }
        }
    }

    fn keeper(&self, name: &str) -> Option<Rc<Replica>> {
        let named = |leg: &&Rc<Replica>| *leg.name() == *name && leg.standing.get() != ReplicaState::Removed;
        self.legs.borrow().iter().find(named).cloned()
    }

    /// The blocks of which a member keeps only an older copy now, in rising order; none where there is no such member.
    pub fn stale_blocks(&self, name: &str) -> Vec<Lba> {
        self.keeper(name).map_or_else(Vec::new, |leg| leg.stale.borrow().kept())
    }

    /// Takes the older copies that a member keeps for what the blocks hold from now on, on every member; how many blocks.
    /// Blocks that have a good copy elsewhere by now, and those whose older copy is bad itself, are not taken.
    ///
    /// # Errors
    /// When there is no such member, it is not here, or the blocks could not be written. Those taken until then stay taken.
    pub async fn accept_stale(&self, name: &str) -> Result<u64, ReplicaError> {
        if self.read_only {
            return Err(ReplicaError::ReadOnly);
        }
        let leg = self.keeper(name).ok_or_else(|| ReplicaError::Unknown(name.to_owned()))?;
        if !leg.takes_changes() {
            let why = leg.why.borrow().clone();
            return Err(ReplicaError::Absent { leg: name.to_owned(), why });
        }
        let (kept, mut taken) = (leg.stale.borrow().kept(), 0);
        for lba in kept {
            taken += u64::from(self.accept_one(&leg, Extent::one(lba)).await.map_err(ReplicaError::Change)?);
        }
        self.flush_legs().await.map_err(ReplicaError::Change)?;
        self.write_labels().await.map_err(ReplicaError::Note)?;
        Ok(taken)
    }

    async fn accept_one(&self, leg: &Rc<Replica>, one: Extent) -> Result<bool, Error> {
        let (format, checks) = (self.geometry.protection, self.full(one));
        let _claim = self.claims.take(one).await;
        if leg.stale.borrow().within(one).is_empty() {
            return Ok(false);
        }
        for other in self.in_sync().iter().filter(|other| other.id != leg.id) {
            match other.read(format, one, checks).await.map_err(Error::into_bad_blocks) {
                Ok(newer) => return leg.put(format, one, &newer).await.map(|()| false),
                Err(Ok(_)) => {}
                Err(Err(error)) => self.fail_if_unreachable(other, &error),
            }
        }
        let copy =
            match leg.ask_as_it_is(format, Request::Read { extent: one, checks }).await.map_err(Error::into_bad_blocks)
            {
                Ok(Response::Data(copy)) => copy,
                Ok(_) => return Err(crate::replica::answered_wrongly()),
                Err(Ok(_)) => return Ok(false),
                Err(Err(error)) => return Err(error),
            };
        for operation in copies(one, &copy) {
            self.change_claimed(one, operation).await?;
        }
        Ok(true)
    }

    /// What was written to blocks that were withheld, and on which device.
    pub(crate) fn renewed(&self) -> Vec<Renewed> {
        let legs = self.legs.borrow();
        legs.iter().map(Renewed::of).filter(|renewed| !renewed.blocks.is_empty()).collect()
    }

    /// What was written to these blocks is durable where the device is still there: nobody needs to list them any more.
    pub(crate) fn settle_renewed(&self, renewed: &[Renewed]) {
        for Renewed { leg, epoch, blocks } in renewed {
            if leg.attach_count() == *epoch {
                leg.stale.borrow_mut().settle(blocks);
            }
        }
    }

    /// Whether something was written to blocks that the labels still list.
    pub(crate) fn has_renewed(&self) -> bool {
        self.legs.borrow().iter().any(|leg| !leg.stale.borrow().renewed.is_empty())
    }
}
