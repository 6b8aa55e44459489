//! Making legs alike again: after a crash, after a change that only some carried out, and when a leg comes back.

use std::cell::Cell;
use std::rc::Rc;

use futures_util::future::join_all;
use sealblock_block::{Clock, Error, ErrorKind, Request};
use sealblock_integrity::{Checks, PiFormat};
use sealblock_units::Extent;

use crate::label::ReplicaState;
use crate::mirror::{Legs, Mirror};
use crate::read::Found;
use crate::replica::{Replica, is_away};
use crate::stale::{LastCopy, Renewed};
use crate::test_hooks::Mutation;

/// Bytes of the regions of a leg that are looked at between two labels that say how far it is.
const BYTES_A_LABEL: u64 = 64 << 20;

impl<C: Clock> Mirror<C> {
    /// Whether current legs may differ in some of these blocks although nothing is under way there.
    pub(crate) fn is_suspect(&self, extent: Extent) -> bool {
        self.write_intent.nosync.borrow().contains_any(self.map.of(extent))
    }

    /// The parts of an extent in which current legs may differ although nothing is under way there.
    pub(crate) fn suspects_in(&self, extent: Extent) -> Vec<Extent> {
        let suspect = self.write_intent.nosync.borrow();
        let regions = self.map.of(extent).filter(|region| suspect.contains(*region));
        regions.filter_map(|region| common(extent, self.map.extent(region))).collect()
    }

    /// Makes current legs alike where they are suspect, before anybody sees what only one of them may have.
    pub(crate) async fn settle_for_reading(&self, extent: Extent) -> Result<(), Error> {
        if self.read_only || !self.is_suspect(extent) {
            return Ok(());
        }
        let suspect = self.suspects_in(extent);
        for piece in suspect.into_iter().flat_map(|part| part.split_aligned(self.geometry.limits.max_transfer_blocks)) {
            self.settle_piece(piece).await?;
        }
        Ok(())
    }

    async fn settle_piece(&self, piece: Extent) -> Result<(), Error> {
        let _claim = self.claims.take(piece).await;
        self.make_alike(piece).await?;
        let copied = self.write_intent.copied.get();
        if self.write_intent.copies_flushed.get() < copied {
            // What is seen from now on must not depend on the leg that had it. Somebody else may have failed to flush it.
            self.flush_legs().await?;
            self.write_intent.copies_flushed.set(copied.max(self.write_intent.copies_flushed.get()));
        }
        Ok(())
    }

    /// Makes all suspect regions alike; not while a leg is gone that nobody has gone on without yet.
    pub(crate) async fn settle(&self) -> Result<(), Error> {
        loop {
            if self.has_unmissed() {
                return Ok(());
            }
            let next = self.write_intent.nosync.borrow().iter().next();
            let Some(region) = next else { return Ok(()) };
            let before = self.write_intent.suspected.get();
            for piece in self.map.extent(region).split_aligned(self.geometry.limits.max_transfer_blocks) {
                if self.closing.get() {
                    return Ok(());
                }
                self.settle_piece(piece).await?;
            }
            // What became suspect meanwhile may be behind the piece that was just done.
            if self.write_intent.suspected.get() == before {
                self.write_intent.nosync.borrow_mut().remove(region);
                self.work.notify();
            }
        }
    }

    /// Makes the current legs alike in blocks that the caller has claimed. The first leg's content counts where it is good, so
    /// those that are not asked are to be noted as left behind.
    async fn make_alike(&self, piece: Extent) -> Result<(), Error> {
        loop {
            self.note_left().await?;
            self.bring_anew(piece);
            let legs = self.in_sync();
            if self.put_alike(&legs, piece).await? {
                return self.note_left().await;
            }
        }
    }

    /// Makes these legs alike in a piece. Not all of it where one has gone: that says nothing about the others, and nothing is to
    /// be written to it.
    async fn put_alike(&self, legs: &Legs, piece: Extent) -> Result<bool, Error> {
        match self.are_identical(legs, piece).await {
            Ok(true) => return Ok(true),
            Ok(false) => {}
            Err(_) => return Ok(false),
        }
        let (found, _) = self.gather(legs, piece, self.full(piece)).await?;
        for found in found {
            match self.is_already_identical(legs, &found, piece).await {
                Ok(true) => {}
                Ok(false) => self.put_on_others(legs, &found).await,
                Err(_) => return Ok(false),
            }
        }
        Ok(true)
    }

    /// Puts blocks on the legs that they do not come from. One that does not take them is left behind.
    async fn put_on_others(&self, legs: &Legs, found: &Found) {
        let _copying = Copying(&self.write_intent.copied);
        let rest: Legs =
            legs.iter().enumerate().filter(|(at, _)| *at != found.source).map(|(_, leg)| leg.clone()).collect();
        let epochs: Vec<u64> = rest.iter().map(|leg| leg.attach_count()).collect();
        let writes = rest.iter().map(|leg| {
            leg.copied_bytes.set(leg.copied_bytes.get() + found.extent.bytes(self.geometry.block_size));
            leg.put(self.geometry.protection, found.extent, &found.data)
        });
        let outcomes = join_all(writes).await;
        for ((leg, epoch), outcome) in rest.iter().zip(epochs).zip(outcomes) {
            if let Err(error) = outcome {
                self.leave_asked(leg, epoch, &format!("it could not be made like the others: {error}"));
            }
        }
    }

    /// What legs were brought before the current ones were alike may be another one's content than that which counts now.
    fn bring_anew(&self, piece: Extent) {
        if self.mutation == Mutation::ForgetFlushing {
            return;
        }
        let regions = self.map.of(piece);
        for leg in self.legs.borrow().iter().filter(|leg| leg.standing.get() == ReplicaState::Resyncing) {
            // Missed, too, as with what becomes suspect.
            leg.out_of_sync.borrow_mut().insert_all(regions.clone());
            leg.to_resync.borrow_mut().insert_all(regions.clone());
        }
    }

    /// All checks there are, from the start of an extent on.
    pub(crate) fn full(&self, extent: Extent) -> Checks {
        full(self.geometry.protection, extent)
    }

    /// Whether legs have the same data and tags in a piece, all of it good.
    ///
    /// # Errors
    /// When one of them is gone.
    async fn are_identical(&self, legs: &Legs, piece: Extent) -> Result<bool, Error> {
        let (format, checks) = (self.geometry.protection, self.full(piece));
        if legs.len() < 2 {
            return Ok(true);
        }
        let sums = self.ask_each(legs, |leg| leg.digest(format, piece, checks)).await?;
        let same_data = sums.is_some_and(|sums| sums.windows(2).all(|pair| pair[0].crc64 == pair[1].crc64));
        if !same_data || format.is_none() {
            return Ok(same_data);
        }
        // A digest says nothing about tags, and a host may have written the same data with others.
        let read = self.ask_each(legs, |leg| leg.read(format, piece, checks)).await?;
        Ok(read.is_some_and(|read| read.windows(2).all(|pair| pair[0].tags()[..] == pair[1].tags()[..])))
    }

    /// Whether legs have a block alike that was found by itself: an unreadable one beside it makes no sum of the whole piece.
    ///
    /// # Errors
    /// When one of them is gone.
    async fn is_already_identical(&self, legs: &Legs, found: &Found, piece: Extent) -> Result<bool, Error> {
        Ok(found.extent != piece && self.are_identical(legs, found.extent).await?)
    }

    /// What each leg answers, all at once; nothing where one of them fails.
    ///
    /// # Errors
    /// When one of them is gone.
    async fn ask_each<'a, T, F: Future<Output = Result<T, Error>>>(
        &self,
        legs: &'a Legs,
        ask: impl Fn(&'a Rc<Replica>) -> F,
    ) -> Result<Option<Vec<T>>, Error> {
        let epochs: Vec<u64> = legs.iter().map(|leg| leg.attach_count()).collect();
        let mut answers = Some(Vec::with_capacity(legs.len()));
        for ((leg, epoch), outcome) in legs.iter().zip(epochs).zip(join_all(legs.iter().map(ask)).await) {
            match outcome {
                Ok(answer) => {
                    if let Some(answers) = &mut answers {
                        answers.push(answer);
                    }
                }
                Err(error) if leg.attach_count() != epoch || is_away(&error) => {
                    self.fail_if_unreachable(leg, &error);
                    return Err(error);
                }
                Err(_) => answers = None,
            }
        }
        Ok(answers)
    }

    /// Brings a leg that has come back up to date.
    pub(crate) async fn rebuild(&self, leg: &Rc<Replica>) -> Result<(), Error> {
        tracing::info!(replica = %leg.name(), regions = leg.to_resync.borrow().count(), "resync started");
        // Its own label must not go on saying that it has everything.
        self.write_labels().await?;
        let has_room = self.bring_all(leg).await?;
        self.note_progress(leg).await?;
        if !has_room {
            let why =
                "its only copies of some blocks are older ones, more than the labels can list: take or write some";
            *leg.why.borrow_mut() = why.to_owned();
            return Err(ErrorKind::Media { reason: format!("leg {} is not up to date: {why}", leg.name()) }.into());
        }
        if self.write_intent.is_in_doubt() && !leg.is_unmissed.get() {
            // Labels excuse those in sync for not knowing the last change. Older images of this leg are not to be excused.
            self.write_intent.begin_change();
            self.write_labels().await?;
        }
        if leg.standing.get() == ReplicaState::Resyncing && leg.to_resync.borrow().is_empty() {
            leg.standing.set(ReplicaState::InSync);
            leg.is_new.set(false);
            leg.why.borrow_mut().clear();
            // It may have what others keep only an older copy of.
            self.write_intent.examine.set(true);
            leg.is_unmissed.set(false);
            self.go_on_without_absent();
            self.work.notify();
            self.write_labels().await?;
            tracing::info!(replica = %leg.name(), resynced_bytes = leg.copied_bytes.get(), "resync finished");
        }
        Ok(())
    }

    /// Brings everything that is left to a leg; whether there was room to list what it keeps older copies of. Regions for which
    /// there was none are still left.
    async fn bring_all(&self, leg: &Rc<Replica>) -> Result<bool, Error> {
        let (mut from, mut has_room, mut since_label) = (0, true, 0);
        loop {
            let next = leg.to_resync.borrow().next(from);
            let Some(region) = next.filter(|_| !self.closing.get()) else {
                // What failed meanwhile behind the place that was just done is left again.
                if from == 0 || !has_room || self.closing.get() || leg.to_resync.borrow().is_empty() {
                    return Ok(has_room);
                }
                from = 0;
                continue;
            };
            from = region + 1;
            // Taken out first, so that a change that fails meanwhile puts it in again.
            leg.to_resync.borrow_mut().remove(region);
            let brought = self.resync_region(leg, region).await;
            if !matches!(brought, Ok(LastCopy::Settled)) {
                leg.to_resync.borrow_mut().insert(region);
            }
            has_room &= brought? == LastCopy::Settled;
            since_label += self.map.extent(region).bytes(self.geometry.block_size);
            if since_label >= BYTES_A_LABEL {
                since_label = 0;
                self.note_progress(leg).await?;
            }
        }
    }

    /// What was brought to a leg is durable, and the labels say so.
    async fn note_progress(&self, leg: &Rc<Replica>) -> Result<(), Error> {
        let (mut lacking, renewed, epoch) = (leg.to_resync.borrow().clone(), Renewed::of(leg), leg.attach_count());
        let flushed = leg.ask(self.geometry.protection, Request::Flush).await;
        self.brought(leg, epoch, flushed.map(drop)).await?;
        if leg.standing.get() == ReplicaState::Resyncing {
            // What it was brought of blocks that it withheld.
            self.settle_renewed(&[renewed]);
            if lacking.is_empty() {
                // Nothing is left on it that never was the mirror's, whatever it will have to be brought again.
                leg.is_new.set(false);
            }
            if self.mutation != Mutation::ForgetFlushing {
                // What became suspect during the flush is lacking too, though it was not when the flush began.
                lacking.add(&leg.to_resync.borrow());
            }
            leg.out_of_sync.borrow_mut().keep(&lacking);
            self.write_labels().await?;
        }
        Ok(())
    }

    async fn resync_region(&self, leg: &Rc<Replica>, region: u32) -> Result<LastCopy, Error> {
        let mut settled = LastCopy::Settled;
        for piece in self.map.extent(region).split_aligned(self.geometry.limits.max_transfer_blocks) {
            let _claim = self.claims.take(piece).await;
            // It may have gone and come back, which takes another label of its own before anything is brought to it.
            if leg.standing.get() != ReplicaState::Resyncing || leg.is_untold() || self.closing.get() {
                return Err(gave_up(leg));
            }
            let epoch = leg.attach_count();
            let sources = self.in_sync();
            let Some(first) = sources.first() else { return Err(self.no_replica()) };
            let both: Legs = [first.clone(), leg.clone()].into_iter().collect();
            if self.are_identical(&both, piece).await? {
                continue;
            }
            let (found, lost) = self.gather(&sources, piece, self.full(piece)).await?;
            for found in found {
                if self.is_already_identical(&both, &found, piece).await? {
                    continue;
                }
                let put = leg.put(self.geometry.protection, found.extent, &found.data).await;
                self.brought(leg, epoch, put).await?;
                leg.copied_bytes.set(leg.copied_bytes.get() + found.extent.bytes(self.geometry.block_size));
            }
            for fault in lost {
                let kept = self.keep_last_copy(leg, &sources, fault.lba).await;
                self.brought(leg, epoch, kept.as_ref().map(drop).map_err(Clone::clone)).await?;
                if kept? == LastCopy::NoRoom {
                    settled = LastCopy::NoRoom;
                }
            }
        }
        Ok(settled)
    }

    /// A leg that something cannot be brought to is left behind.
    async fn brought(&self, leg: &Rc<Replica>, epoch: u64, outcome: Result<(), Error>) -> Result<(), Error> {
        if let Err(error) = &outcome {
            self.leave_asked(leg, epoch, &format!("it could not be brought up to date: {error}"));
            self.write_labels().await?;
        }
        outcome
    }
}

/// Counts blocks that were made alike, however that ends.
struct Copying<'a>(&'a Cell<u64>);

impl Drop for Copying<'_> {
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
fn gave_up(leg: &Replica) -> Error {
    ErrorKind::Unreachable { reason: format!("leg {} is no longer brought up to date", leg.name()) }.into()
}
