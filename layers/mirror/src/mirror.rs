//! The mirror: its parts, and its face as a device.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use sealblock_block::{
    Abilities, Ability, Clock, Condition, Device, Error, ErrorKind, Geometry, Outcome, Request, ReservedArea, Response,
};
use smallvec::SmallVec;

use crate::claims::Claims;
use crate::label::ReplicaState;
use crate::regions::RegionMap;
use crate::replica::{Replica, is_away};
use crate::test_hooks::Mutation;
use crate::write_intent::WriteIntent;

/// Legs that a request goes to.
pub(crate) type Legs = SmallVec<[Rc<Replica>; 2]>;

/// Several devices with the same content as one. Make one with [`crate::open`], and run its [`crate::Worker`] beside it.
pub struct Mirror<C> {
    pub(crate) clock: C,
    pub(crate) geometry: Geometry,
    pub(crate) abilities: Abilities,
    pub(crate) map: RegionMap,
    pub(crate) uuid: [u8; 16],
    pub(crate) read_only: bool,
    pub(crate) mutation: Mutation,
    /// By their places as members.
    pub(crate) legs: RefCell<Vec<Rc<Replica>>>,
    /// The place of the leg whose label told about the others. Where legs differ its content counts: another one may be an
    /// image from before that label.
    authority: usize,
    pub(crate) claims: Claims,
    pub(crate) write_intent: WriteIntent,
    /// What was not flushed may be lost, because the last leg was away and came back or a flush of the mirror's own failed; the
    /// next flush says so.
    pub(crate) cache_lost: Cell<bool>,
    pub(crate) lost_blocks: Cell<u64>,
    /// Of a mirror that is open for reading only: the leg that answers where legs may differ, once somebody has read there.
    pub(crate) unsettled_from: Cell<Option<[u8; 16]>>,
    turn: Cell<usize>,
    pub(crate) work: Condition,
    pub(crate) closing: Cell<bool>,
}

/// What a mirror is put together from.
pub(crate) struct Parts {
    pub geometry: Geometry,
    pub map: RegionMap,
    pub uuid: [u8; 16],
    pub legs: Vec<Rc<Replica>>,
    pub authority: usize,
    pub write_intent: WriteIntent,
    pub mutation: Mutation,
}

/// How a mirror is, in a word.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum State {
    /// All members are there and in sync.
    Optimal,
    /// A member is away or out of sync, or a crash may have left members different.
    Degraded,
    /// No member that is in sync is there.
    Failed,
}

impl State {
    /// The word.
    pub const fn as_str(self) -> &'static str {
        match self {
            State::Optimal => "optimal",
            State::Degraded => "degraded",
            State::Failed => "failed",
        }
    }
}

/// What a mirror is made of, for people.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Description {
    /// Its identity.
    pub uuid: [u8; 16],
    /// Bytes of a region, the unit of what a leg has missed.
    pub region_bytes: u64,
    /// Whether all copies are there and in sync.
    pub state: State,
    /// Bytes of the regions in which legs may differ: something is under way there, or was at a crash.
    pub unsettled_bytes: u64,
    /// Bytes of those of them in which nothing is under way: they wait to be made alike.
    pub suspect_bytes: u64,
    /// Blocks that were asked for and had no good copy.
    pub lost_blocks: u64,
    /// Its legs, in the order of their places.
    pub legs: Vec<LegDescription>,
}

/// A leg, for people.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LegDescription {
    /// What it is called.
    pub name: String,
    /// What it is to the mirror.
    pub standing: ReplicaState,
    /// Whether it can be reached.
    pub is_here: bool,
    /// Why not, or why it was left behind.
    pub why: String,
    /// Bytes of the regions that it still lacks.
    pub missed_bytes: u64,
    /// Bytes that were copied to bring it up to date since the mirror was opened.
    pub copied_bytes: u64,
    /// Blocks on it that were written anew from another leg.
    pub healed_blocks: u64,
    /// Blocks of which it keeps an older copy, and nobody has a newer one; see [`Mirror::accept_stale`].
    pub stale_blocks: u64,
    /// How often it was left behind.
    pub failures: u64,
}

impl<C: Clock> Mirror<C> {
    pub(crate) fn new(clock: C, parts: Parts, abilities: Abilities, read_only: bool) -> Mirror<C> {
        let Parts { geometry, map, uuid, legs, authority: teller, write_intent: notes, mutation } = parts;
        Mirror {
            clock,
            geometry,
            abilities,
            map,
            uuid,
            read_only,
            mutation,
            legs: RefCell::new(legs),
            authority: teller,
            claims: Claims::default(),
            write_intent: notes,
            cache_lost: Cell::new(false),
            lost_blocks: Cell::new(0),
            unsettled_from: Cell::new(None),
            turn: Cell::new(0),
            work: Condition::default(),
            closing: Cell::new(false),
        }
    }

    /// What it is made of now.
    pub fn describe(&self) -> Description {
        let shift = self.geometry.block_size.shift();
        let describe = |leg: &Rc<Replica>| LegDescription {
            name: leg.name().to_string(),
            standing: leg.standing.get(),
            is_here: leg.is_here(),
            why: leg.why.borrow().clone(),
            missed_bytes: match leg.standing.get() {
                ReplicaState::InSync | ReplicaState::Removed => 0,
                ReplicaState::OutOfSync => self.map.blocks(&leg.out_of_sync.borrow()) << shift,
                ReplicaState::Resyncing => self.map.blocks(&leg.to_resync.borrow()) << shift,
            },
            copied_bytes: leg.copied_bytes.get(),
            healed_blocks: leg.healed.get(),
            stale_blocks: leg.stale.borrow().count(),
            failures: leg.failures.get(),
        };
        Description {
            uuid: self.uuid,
            region_bytes: 1 << (self.map.shift() + shift),
            state: self.state(),
            unsettled_bytes: self.map.blocks(&self.write_intent.dirty.borrow()) << shift,
            suspect_bytes: self.map.blocks(&self.write_intent.nosync.borrow()) << shift,
            lost_blocks: self.lost_blocks.get(),
            legs: self.legs.borrow().iter().map(describe).collect(),
        }
    }

    /// How it is now.
    pub fn state(&self) -> State {
        let legs = self.legs.borrow();
        let mut members = legs.iter().filter(|leg| leg.standing.get() != ReplicaState::Removed);
        if !legs.iter().any(|leg| leg.is_current()) {
            return State::Failed;
        }
        // What is under way is settled by whoever asked for it; only what was left behind makes copies doubtful. A block of
        // which a member holds only an older copy has one copy less.
        let is_whole = |leg: &Rc<Replica>| leg.is_current() && leg.stale.borrow().count() == 0;
        match members.all(is_whole) && self.write_intent.nosync.borrow().is_empty() {
            true => State::Optimal,
            false => State::Degraded,
        }
    }

    /// How it is once that is something else than `known`; at once if it is already, and when it is closed.
    pub async fn other_state(&self, known: State) -> State {
        self.work.wait_until(|| self.state() != known || self.closing.get()).await;
        self.state()
    }

    /// Whether it was closed.
    pub fn is_closed(&self) -> bool {
        self.closing.get()
    }

    /// The legs that reads may be asked of, those first whose content counts where legs differ.
    pub(crate) fn in_sync(&self) -> Legs {
        let legs = self.legs.borrow();
        let (before, from) = legs.split_at(self.authority.min(legs.len()));
        from.iter().chain(before).filter(|leg| leg.is_current()).cloned().collect()
    }

    /// The legs that changes go to.
    pub(crate) fn write_targets(&self) -> Legs {
        let legs = self.legs.borrow();
        legs.iter().filter(|leg| leg.takes_changes()).cloned().collect()
    }

    /// The same legs with the one first that has least to do; the next one in turn among equals.
    pub(crate) fn in_turn(&self, mut legs: Legs) -> Legs {
        if legs.len() > 1 {
            let turn = self.turn.get().wrapping_add(1);
            self.turn.set(turn);
            let count = legs.len();
            legs.rotate_left(turn % count);
            let least = (0..count).min_by_key(|at| legs[*at].busy()).unwrap_or(0);
            legs.swap(0, least);
        }
        legs
    }

    /// What a request fails with when no leg is there.
    pub(crate) fn no_replica(&self) -> Error {
        let reasons: Vec<String> =
            self.legs.borrow().iter().map(|leg| format!("{}: {}", leg.name(), leg.why.borrow())).collect();
        ErrorKind::Unreachable { reason: format!("no leg of the mirror is there ({})", reasons.join("; ")) }.into()
    }

    /// Makes everything written so far durable on every leg.
    pub(crate) async fn flush(&self) -> Result<(), Error> {
        if self.read_only {
            return Ok(());
        }
        if self.cache_lost.replace(false) {
            return Err(writes_lost());
        }
        if !self.write_intent.dirty.borrow().is_empty() {
            // Who is gone has not flushed what was under way, and answered, before the mirror was opened.
            self.note_left().await?;
        }
        self.ask_flush().await
    }

    /// The same for the mirror's own purposes, without saying what was lost before. Nobody who has written hears of a failure
    /// here, and a leg tells of it once, so it is kept for the next flush from above. Of one that cannot be reached it shows
    /// when it is back.
    pub(crate) async fn flush_legs(&self) -> Result<(), Error> {
        self.ask_flush().await.inspect_err(|error| {
            if !is_away(error) && !self.write_intent.dirty.borrow().is_empty() && !self.cache_lost.replace(true) {
                tracing::warn!(%error, "the mirror could not be flushed; the next flush of whoever writes to it fails");
            }
        })
    }

    /// Flushes, takes what is settled out of the labels, and ends the worker. The legs are to be closed behind it.
    ///
    /// What was answered before this opening, and is unsettled since, it makes durable on the legs that are here: it takes a flush
    /// to vouch for it without the others.
    ///
    /// # Errors
    /// When no leg could be flushed, or writes may be lost that nobody was told of yet. What was flushed before is safe all the
    /// same.
    pub async fn close(&self) -> Result<(), Error> {
        let was_closing = self.closing.replace(true);
        self.work.notify();
        if was_closing || self.read_only {
            return Ok(());
        }
        if !self.write_intent.dirty.borrow().is_empty() || self.write_intent.is_due() {
            // The first look takes the regions that were changed since the one before for busy.
            self.clear_clean_regions().await?;
            self.clear_clean_regions().await?;
            if !self.write_intent.dirty.borrow().is_empty() {
                // Regions that legs may still differ in stay noted. What was acknowledged there is to be durable all the same.
                self.flush_legs().await?;
            }
        }
        if self.cache_lost.get() { Err(writes_lost()) } else { Ok(()) }
    }

    async fn read_annex(&self, slot: ReservedArea) -> Outcome {
        let kind = Request::ReadReserved { slot }.kind();
        for leg in self.in_sync().into_iter().filter(|leg| leg.has_annex() && slot == ReservedArea::ScrubState) {
            if let Ok(answer) = leg.ask(self.geometry.protection, Request::ReadReserved { slot }).await {
                return Ok(answer);
            }
        }
        Err(ErrorKind::Absent(kind).into())
    }

    /// The label's slot is the mirror's own; the others belong to whoever stands on the mirror, and go to every leg.
    async fn write_annex(&self, slot: ReservedArea, bytes: sealblock_runtime_memory::Slice) -> Outcome {
        let operation = Request::WriteReserved { slot, bytes };
        let mut legs = self.write_targets();
        legs.retain(|leg| leg.has_annex() && slot == ReservedArea::ScrubState);
        if legs.is_empty() {
            return Err(ErrorKind::Absent(operation.kind()).into());
        }
        let asked = self.ask_all(&legs, &operation).await;
        self.complete_write(asked, None).await.map(|()| Response::Done)
    }
}

impl<C: Clock> Device for Mirror<C> {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn abilities(&self) -> Abilities {
        self.abilities
    }

    async fn execute(&self, operation: Request) -> Outcome {
        match operation {
            Request::Read { extent, checks } => self.read(extent, checks).await.map(Response::Data),
            Request::Flush => self.flush().await.map(|()| Response::Done),
            Request::Write { extent, .. }
            | Request::WriteZeroes { extent, .. }
            | Request::WriteUncorrectable { extent, .. } => self.change(extent, operation).await,
            Request::Discard { extents } => self.discard(&extents).await,
            Request::Verify { extent, checks } => self.verify(extent, checks).await,
            Request::Checksum { extent, checks } => self.digest(extent, checks).await,
            Request::Repair { extent, checks } => self.repair(extent, checks).await,
            Request::Compare { extent, data } => self.compare(extent, data).await,
            Request::ReadReserved { slot } => self.read_annex(slot).await,
            Request::WriteReserved { slot, bytes } => self.write_annex(slot, bytes).await,
            Request::BlockStatus { .. } => Err(ErrorKind::Absent(operation.kind()).into()),
        }
    }
}

/// What a mirror of these legs can do: what all of them can.
pub(crate) fn abilities(devices: &[Abilities], read_only: bool) -> Abilities {
    let all = |can: &dyn Fn(&Abilities) -> bool| devices.iter().all(can);
    let when = |can: bool| if can { Ability::Native } else { Ability::Absent };
    let unmap_zeroes = all(&|of| of.unmap_zeroes);
    Abilities {
        writable: !read_only && all(&|of| of.writable),
        verify: Ability::Native,
        compare: Ability::Native,
        // What blocks read as after a Discard has to be the same on all legs, so they are zeroed.
        discard: when(unmap_zeroes),
        write_zeroes: Ability::Native,
        write_uncorrectable: when(all(&|of| of.write_uncorrectable == Ability::Native)),
        checksum: Ability::Native,
        repair: Ability::Native,
        allocation: Ability::Absent,
        reserved: when(all(&|of| of.reserved == Ability::Native)),
        // They are the mirror's own, as the label is.
        annex_pages: 0,
        unmap_zeroes,
        offloads: all(&|of| of.offloads),
        seals: all(&|of| of.seals),
        copies: true,
    }
}

#[cold]
fn writes_lost() -> Error {
    let reason = "the last leg went away, or could not be flushed, with writes that were not flushed; they may be lost"
        .to_owned();
    ErrorKind::Media { reason }.into()
}

impl<C: Clock> std::fmt::Debug for Mirror<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Mirror").field(&self.describe()).finish()
    }
}
