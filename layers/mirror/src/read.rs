//! Reads: from one leg, and what it has damaged from another, which mends it.

use sealblock_block::{BadBlock, BadBlockCause, BadBlocks, Clock, Error, ErrorKind, Request, Response};
use sealblock_integrity::{Checks, Sealed};
use sealblock_units::{Extent, Lba};

use crate::mirror::{Legs, Mirror};
use crate::replica::Replica;
use crate::test_hooks::Mutation;

/// Damage that a read has met.
type Met = Vec<(std::rc::Rc<Replica>, Vec<BadBlock>)>;

/// Blocks in a row and where they were good.
pub(crate) struct Found {
    pub extent: Extent,
    pub data: Sealed,
    /// Position of the leg among those that were asked.
    pub source: usize,
}

impl<C: Clock> Mirror<C> {
    /// Reads blocks. Damage on one leg is answered from another and mended before the answer.
    pub(crate) async fn read(&self, extent: Extent, checks: Checks) -> Result<Sealed, Error> {
        // One reader could see a change on a leg that has it, and a later one not yet on another.
        self.claims.pass(extent).await;
        self.settle_for_reading(extent).await?;
        if self.read_only && self.is_suspect(extent) {
            return self.read_unsettled(extent, checks).await;
        }
        let legs = self.read_balance(extent);
        let mut met: Met = Vec::new();
        let mut failed = None;
        for leg in &legs {
            // It may have left since, and be back without being up to date.
            if !self.may_read(leg) {
                continue;
            }
            match leg.read(self.geometry.protection, extent, checks).await {
                Ok(data) => {
                    self.heal(&met, extent, checks).await;
                    return Ok(data);
                }
                Err(error) => match error.into_bad_blocks() {
                    Ok(faults) => met.push((leg.clone(), faults)),
                    Err(error) => {
                        self.fail_if_unreachable(leg, &error);
                        failed = Some(error);
                    }
                },
            }
        }
        if met.is_empty() {
            return Err(failed.unwrap_or_else(|| self.no_replica()));
        }
        self.piece_together(&legs, &met, extent, checks).await
    }

    /// Reads blocks in which legs may differ, of a mirror that may not make them alike: from one leg as long as the mirror is open,
    /// or a reader would see now the one and now the other. What is damaged there fails: it may have been read before, and
    /// what others have may be another content.
    async fn read_unsettled(&self, extent: Extent, checks: Checks) -> Result<Sealed, Error> {
        loop {
            let first: Legs = self.in_sync().into_iter().take(1).collect();
            let leg = first.first().ok_or_else(|| self.no_replica())?;
            let is_told_apart = || self.unsettled_from.get().is_some_and(|id| id != leg.id);
            if is_told_apart() {
                return Err(told_apart(leg));
            }
            let read = self.gather(&first, extent, checks).await;
            if !leg.is_current() || is_told_apart() {
                // Nobody has seen anything of it yet, or the next look tells.
                continue;
            }
            let (found, damaged) = read?;
            self.unsettled_from.set(Some(leg.id));
            return match BadBlocks::new(damaged) {
                Some(damaged) => {
                    tracing::warn!(replica = %leg.name(), %extent, "damaged where a crash has left members unlike: open for writing");
                    Err(damaged.into())
                }
                None => Ok(Sealed::join(&found.into_iter().map(|found| found.data).collect::<Vec<_>>())),
            };
        }
    }

    /// The blocks that were found, if none is lost.
    fn join_or_lose(&self, found: Vec<Found>, lost: Vec<BadBlock>) -> Result<Sealed, Error> {
        match BadBlocks::new(lost) {
            Some(lost) => {
                self.lost_blocks.set(self.lost_blocks.get() + lost.as_slice().len() as u64);
                Err(lost.into())
            }
            None => Ok(Sealed::join(&found.into_iter().map(|found| found.data).collect::<Vec<_>>())),
        }
    }

    /// No leg has all of it: each block from where it is good.
    async fn piece_together(&self, legs: &Legs, met: &Met, extent: Extent, checks: Checks) -> Result<Sealed, Error> {
        let (found, lost) = self.gather(legs, extent, checks).await?;
        self.heal(met, extent, checks).await;
        self.join_or_lose(found, lost)
    }

    /// Whether a leg that was chosen before may still be read.
    fn may_read(&self, leg: &Replica) -> bool {
        leg.is_current() || self.mutation == Mutation::ReadRebuilding
    }

    /// Where to read from, best first. While blocks are being changed all readers ask the same leg, or what one has seen
    /// another would not see yet.
    fn read_balance(&self, extent: Extent) -> Legs {
        let legs = match self.mutation {
            Mutation::ReadRebuilding => self.write_targets(),
            _ => self.in_sync(),
        };
        let is_moving = self.claims.touches(extent) || self.is_suspect(extent);
        if is_moving { legs } else { self.in_turn(legs) }
    }

    /// Gets blocks from these legs, in their order: all from one where it has them, else block by block. Also those that no leg
    /// has, as the first one says.
    ///
    /// # Errors
    /// When a leg could not be asked and no other one has the block: it may well be good there.
    pub(crate) async fn gather(
        &self,
        legs: &Legs,
        extent: Extent,
        checks: Checks,
    ) -> Result<(Vec<Found>, Vec<BadBlock>), Error> {
        if legs.len() == 1 || extent.len() > 1 {
            for (source, leg) in legs.iter().enumerate().filter(|(_, leg)| self.may_read(leg)) {
                if let Ok(data) = leg.read(self.geometry.protection, extent, checks).await {
                    return Ok((vec![Found { extent, data, source }], Vec::new()));
                }
            }
        }
        let (mut found, mut lost) = (Vec::new(), Vec::new());
        for lba in extent.iter() {
            let one = Extent::one(lba);
            match self.gather_one(legs, one, self.onward(&checks, extent, lba)).await? {
                Ok(good) => found.push(good),
                Err(why) => lost.push(why),
            }
        }
        Ok((found, lost))
    }

    async fn gather_one(&self, legs: &Legs, one: Extent, checks: Checks) -> Result<Result<Found, BadBlock>, Error> {
        let (mut why, mut failed): (Option<BadBlock>, Option<Error>) = (None, None);
        for (source, leg) in legs.iter().enumerate() {
            if !self.may_read(leg) {
                failed.get_or_insert_with(|| self.no_replica());
                continue;
            }
            match leg.read(self.geometry.protection, one, checks).await.map_err(Error::into_bad_blocks) {
                Ok(data) => return Ok(Ok(Found { extent: one, data, source })),
                // An older copy somewhere says less than what became of the current one.
                Err(Ok(faults)) => {
                    why = why.filter(|why| why.cause != BadBlockCause::Stale).or(faults.first().copied()).or(why)
                }
                Err(Err(error)) => {
                    self.fail_if_unreachable(leg, &error);
                    failed = Some(error);
                }
            }
        }
        // A leg that is gone is left behind: what the others say counts.
        match (why, failed) {
            (None, Some(error)) => Err(error),
            (why, _) => Ok(Err(why.unwrap_or(BadBlock::media(one.start())))),
        }
    }

    /// The checks of a request over `extent`, from a block of it on.
    pub(crate) fn onward(&self, checks: &Checks, extent: Extent, lba: Lba) -> Checks {
        let blocks = lba.get() - extent.start().get();
        self.geometry.protection.map_or(*checks, |format| checks.advance(blocks, format))
    }

    /// Mends what a read over `extent` has met. What cannot be mended stays as it is.
    async fn heal(&self, met: &Met, extent: Extent, checks: Checks) {
        if self.read_only {
            return;
        }
        for (leg, faults) in met {
            for fault in faults {
                self.mend(leg, fault, self.onward(&checks, extent, fault.lba)).await;
            }
        }
    }

    /// Writes a damaged block anew from another leg; whether it is good now.
    pub(crate) async fn mend(&self, leg: &Replica, fault: &BadBlock, checks: Checks) -> bool {
        let (one, format) = (Extent::one(fault.lba), self.geometry.protection);
        let _claim = self.claims.take(one).await;
        let epoch = leg.attach_count();
        if leg.read(format, one, checks).await.is_ok() {
            // Somebody has changed it since.
            return true;
        }
        let mut others = self.in_sync();
        others.retain(|other| other.id != leg.id);
        for other in others.iter().filter(|other| other.is_current()) {
            let Ok(data) = other.read(format, one, checks).await else { continue };
            if let Err(error) = leg.put(format, one, &data).await {
                if self.in_sync().len() > 1 {
                    self.leave_asked(leg, epoch, &format!("a damaged block could not be written anew: {error}"));
                }
                return false;
            }
            let is_good =
                matches!(leg.ask(format, Request::Verify { extent: one, checks }).await, Ok(Response::Verified(_)));
            if is_good {
                leg.healed.set(leg.healed.get() + 1);
                tracing::warn!(replica = %leg.name(), %fault, "bad block repaired");
            }
            return is_good;
        }
        self.prove_kept(leg, &others, one).await
    }

    /// Leaves a leg behind that an error other than damage tells to be lost.
    pub(crate) fn fail_if_unreachable(&self, leg: &Replica, error: &Error) {
        if leg.is_lost() {
            self.fail_replica(leg, &error.to_string());
        }
    }
}

#[cold]
fn told_apart(leg: &Replica) -> Error {
    let reason = format!(
        "a crash has left members unlike here, and {} is not the one that was read before; open the mirror for writing",
        leg.name()
    );
    ErrorKind::Unreachable { reason }.into()
}
