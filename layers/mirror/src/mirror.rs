//! The mirror: its parts, and its face as a device.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use sealblock_block::{
    Abilities, Ability, Clock, Condition, Device, Error, ErrorKind, Geometry, Outcome, Request, ReservedArea, Response,
};
use smallvec::SmallVec;

use crate::label::ReplicaState;
use crate::range_lock::RangeLock;
use crate::regions::RegionMap;
use crate::replica::{Replica, is_unreachable};
use crate::test_hooks::Mutation;
use crate::write_intent::WriteIntent;

/// Replicas that a request goes to.
pub(crate) type Replicas = SmallVec<[Rc<Replica>; 2]>;

/// Several devices with the same content as one. Make one with [`crate::open`], and run its [`crate::Worker`] beside it.
pub struct Mirror<C> {
    pub(crate) clock: C,
    pub(crate) geometry: Geometry,
    pub(crate) abilities: Abilities,
    pub(crate) map: RegionMap,
    pub(crate) uuid: [u8; 16],
    pub(crate) is_read_only: bool,
    pub(crate) mutation: Mutation,
    /// By their places as members.
    pub(crate) replicas: RefCell<Vec<Rc<Replica>>>,
    /// The place of the replica whose label told about the others. Where replicas differ its content counts: another one may be an
    /// image from before that label.
    authority: usize,
    pub(crate) range_lock: RangeLock,
    pub(crate) write_intent: WriteIntent,
    /// What was not flushed may be lost, because the last replica was away and came back or a flush of the mirror's own failed; the
    /// next flush says so.
    pub(crate) writes_lost: Cell<bool>,
    pub(crate) lost_blocks: Cell<u64>,
    /// Of a mirror that is open for reading only: the replica that answers where replicas may differ, once somebody has read there.
    pub(crate) nosync_source: Cell<Option<[u8; 16]>>,
    next_read: Cell<usize>,
    pub(crate) work: Condition,
    pub(crate) is_closing: Cell<bool>,
}

/// What a mirror is put together from.
pub(crate) struct MirrorParts {
    pub geometry: Geometry,
    pub map: RegionMap,
    pub uuid: [u8; 16],
    pub replicas: Vec<Rc<Replica>>,
    pub authority: usize,
    pub write_intent: WriteIntent,
    pub mutation: Mutation,
}

/// How a mirror is, in a word.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum MirrorState {
    /// All members are there and in sync.
    Optimal,
    /// A member is away or out of sync, or a crash may have left members different.
    Degraded,
    /// No member that is in sync is there.
    Failed,
}

impl MirrorState {
    /// The word.
    pub const fn as_str(self) -> &'static str {
        match self {
            MirrorState::Optimal => "optimal",
            MirrorState::Degraded => "degraded",
            MirrorState::Failed => "failed",
        }
    }
}

/// What a mirror is made of, for people.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MirrorInfo {
    /// Its identity.
    pub uuid: [u8; 16],
    /// Bytes of a region, the unit of what a replica has missed.
    pub region_bytes: u64,
    /// Whether all copies are there and in sync.
    pub state: MirrorState,
    /// Bytes of the regions in which replicas may differ: something is under way there, or was at a crash.
    pub dirty_bytes: u64,
    /// Bytes of those of them in which nothing is under way: they wait to be made alike.
    pub nosync_bytes: u64,
    /// Blocks that were asked for and had no good copy.
    pub lost_blocks: u64,
    /// Its replicas, in the order of their places.
    pub replicas: Vec<ReplicaInfo>,
}

/// A replica, for people.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ReplicaInfo {
    /// What it is called.
    pub name: String,
    /// What it is to the mirror.
    pub state: ReplicaState,
    /// Whether it can be reached.
    pub is_online: bool,
    /// Why not, or why it was left behind.
    pub last_error: String,
    /// Bytes of the regions that it still lacks.
    pub out_of_sync_bytes: u64,
    /// Bytes that were copied to bring it up to date since the mirror was opened.
    pub resynced_bytes: u64,
    /// Blocks on it that were written anew from another replica.
    pub repaired_blocks: u64,
    /// Blocks of which it keeps an older copy, and nobody has a newer one; see [`Mirror::accept_stale`].
    pub stale_blocks: u64,
    /// How often it was left behind.
    pub failures: u64,
}

impl<C: Clock> Mirror<C> {
    pub(crate) fn new(clock: C, parts: MirrorParts, abilities: Abilities, read_only: bool) -> Mirror<C> {
        let MirrorParts { geometry, map, uuid, replicas, authority, write_intent, mutation } = parts;
        Mirror {
            clock,
            geometry,
            abilities,
            map,
            uuid,
            is_read_only: read_only,
            mutation,
            replicas: RefCell::new(replicas),
            authority,
            range_lock: RangeLock::default(),
            write_intent,
            writes_lost: Cell::new(false),
            lost_blocks: Cell::new(0),
            nosync_source: Cell::new(None),
            next_read: Cell::new(0),
            work: Condition::default(),
            is_closing: Cell::new(false),
        }
    }

    /// What it is made of now.
    pub fn describe(&self) -> MirrorInfo {
        let shift = self.geometry.block_size.shift();
        let describe = |replica: &Rc<Replica>| ReplicaInfo {
            name: replica.name().to_string(),
            state: replica.state.get(),
            is_online: replica.is_online(),
            last_error: replica.last_error.borrow().clone(),
            out_of_sync_bytes: match replica.state.get() {
                ReplicaState::InSync | ReplicaState::Removed => 0,
                ReplicaState::OutOfSync => self.map.blocks(&replica.out_of_sync.borrow()) << shift,
                ReplicaState::Resyncing => self.map.blocks(&replica.to_resync.borrow()) << shift,
            },
            resynced_bytes: replica.resynced_bytes.get(),
            repaired_blocks: replica.repaired_blocks.get(),
            stale_blocks: replica.stale.borrow().count(),
            failures: replica.failures.get(),
        };
        MirrorInfo {
            uuid: self.uuid,
            region_bytes: 1 << (self.map.shift() + shift),
            state: self.state(),
            dirty_bytes: self.map.blocks(&self.write_intent.dirty.borrow()) << shift,
            nosync_bytes: self.map.blocks(&self.write_intent.nosync.borrow()) << shift,
            lost_blocks: self.lost_blocks.get(),
            replicas: self.replicas.borrow().iter().map(describe).collect(),
        }
    }

    /// How it is now.
    pub fn state(&self) -> MirrorState {
        let replicas = self.replicas.borrow();
        let mut members = replicas.iter().filter(|replica| replica.state.get() != ReplicaState::Removed);
        if !replicas.iter().any(|replica| replica.is_readable()) {
            return MirrorState::Failed;
        }
        // What is under way is settled by whoever asked for it; only what was left behind makes copies doubtful. A block of
        // which a member holds only an older copy has one copy less.
        let is_whole = |replica: &Rc<Replica>| replica.is_readable() && replica.stale.borrow().count() == 0;
        match members.all(is_whole) && self.write_intent.nosync.borrow().is_empty() {
            true => MirrorState::Optimal,
            false => MirrorState::Degraded,
        }
    }

    /// How it is once that is something else than `known`; at once if it is already, and when it is closed.
    pub async fn state_changed(&self, known: MirrorState) -> MirrorState {
        self.work.wait_until(|| self.state() != known || self.is_closing.get()).await;
        self.state()
    }

    /// Whether it was closed.
    pub fn is_closed(&self) -> bool {
        self.is_closing.get()
    }

    /// The replicas that reads may be asked of, those first whose content counts where replicas differ.
    pub(crate) fn in_sync(&self) -> Replicas {
        let replicas = self.replicas.borrow();
        let (before, from) = replicas.split_at(self.authority.min(replicas.len()));
        from.iter().chain(before).filter(|replica| replica.is_readable()).cloned().collect()
    }

    /// The replicas that changes go to.
    pub(crate) fn write_targets(&self) -> Replicas {
        let replicas = self.replicas.borrow();
        replicas.iter().filter(|replica| replica.is_writable()).cloned().collect()
    }

    /// The same replicas with the one first that has least to do; the next one in turn among equals.
    pub(crate) fn balance(&self, mut replicas: Replicas) -> Replicas {
        if replicas.len() > 1 {
            let turn = self.next_read.get().wrapping_add(1);
            self.next_read.set(turn);
            let count = replicas.len();
            replicas.rotate_left(turn % count);
            let least = (0..count).min_by_key(|at| replicas[*at].in_flight()).unwrap_or(0);
            replicas.swap(0, least);
        }
        replicas
    }

    /// What a request fails with when no replica is there.
    pub(crate) fn no_replica(&self) -> Error {
        let reasons: Vec<String> = self
            .replicas
            .borrow()
            .iter()
            .map(|replica| format!("{}: {}", replica.name(), replica.last_error.borrow()))
            .collect();
        ErrorKind::Unreachable { reason: format!("no replica of the mirror is there ({})", reasons.join("; ")) }.into()
    }

    /// Makes everything written so far durable on every replica.
    pub(crate) async fn flush(&self) -> Result<(), Error> {
        if self.is_read_only {
            return Ok(());
        }
        if self.writes_lost.replace(false) {
            return Err(writes_lost());
        }
        if !self.write_intent.dirty.borrow().is_empty() {
            // Who is gone has not flushed what was under way, and answered, before the mirror was opened.
            self.record_failures().await?;
        }
        self.flush_replicas().await
    }

    /// The same for the mirror's own purposes, without saying what was lost before. Nobody who has written hears of a failure
    /// here, and a replica tells of it once, so it is kept for the next flush from above. Of one that cannot be reached it shows
    /// when it is back.
    pub(crate) async fn flush_internally(&self) -> Result<(), Error> {
        self.flush_replicas().await.inspect_err(|error| {
            if !is_unreachable(error) && !self.write_intent.dirty.borrow().is_empty() && !self.writes_lost.replace(true)
            {
                tracing::warn!(%error, "the mirror could not be flushed; the next flush of whoever writes to it fails");
            }
        })
    }

    /// Flushes, takes what is settled out of the labels, and ends the worker. The replicas are to be closed behind it.
    ///
    /// What was answered before this opening, and is unsettled since, it makes durable on the replicas that are here: it takes a flush
    /// to vouch for it without the others.
    ///
    /// # Errors
    /// When no replica could be flushed, or writes may be lost that nobody was told of yet. What was flushed before is safe all the
    /// same.
    pub async fn close(&self) -> Result<(), Error> {
        let was_closing = self.is_closing.replace(true);
        self.work.notify();
        if was_closing || self.is_read_only {
            return Ok(());
        }
        if !self.write_intent.dirty.borrow().is_empty() || self.write_intent.has_unwritten() {
            // The first look takes the regions that were changed since the one before for busy.
            self.clear_clean_regions().await?;
            self.clear_clean_regions().await?;
            if !self.write_intent.dirty.borrow().is_empty() {
                // Regions that replicas may still differ in stay noted. What was acknowledged there is to be durable all the same.
                self.flush_internally().await?;
            }
        }
        if self.writes_lost.get() { Err(writes_lost()) } else { Ok(()) }
    }

    async fn read_reserved(&self, slot: ReservedArea) -> Outcome {
        let kind = Request::ReadReserved { slot }.kind();
        for replica in
            self.in_sync().into_iter().filter(|replica| replica.has_reserved_area() && slot == ReservedArea::ScrubState)
        {
            if let Ok(answer) = replica.execute(self.geometry.protection, Request::ReadReserved { slot }).await {
                return Ok(answer);
            }
        }
        Err(ErrorKind::Absent(kind).into())
    }

    /// The label's slot is the mirror's own; the others belong to whoever stands on the mirror, and go to every replica.
    async fn write_reserved(&self, slot: ReservedArea, bytes: sealblock_runtime_memory::Slice) -> Outcome {
        let request = Request::WriteReserved { slot, bytes };
        let mut replicas = self.write_targets();
        replicas.retain(|replica| replica.has_reserved_area() && slot == ReservedArea::ScrubState);
        if replicas.is_empty() {
            return Err(ErrorKind::Absent(request.kind()).into());
        }
        let asked = self.execute_on(&replicas, &request).await;
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

    async fn execute(&self, request: Request) -> Outcome {
        match request {
            Request::Read { extent, checks } => self.read(extent, checks).await.map(Response::Data),
            Request::Flush => self.flush().await.map(|()| Response::Done),
            Request::Write { extent, .. }
            | Request::WriteZeroes { extent, .. }
            | Request::WriteUncorrectable { extent, .. } => self.change(extent, request).await,
            Request::Discard { extents } => self.discard(&extents).await,
            Request::Verify { extent, checks } => self.verify(extent, checks).await,
            Request::Checksum { extent, checks } => self.checksum(extent, checks).await,
            Request::Repair { extent, checks } => self.repair(extent, checks).await,
            Request::Compare { extent, data } => self.compare(extent, data).await,
            Request::ReadReserved { slot } => self.read_reserved(slot).await,
            Request::WriteReserved { slot, bytes } => self.write_reserved(slot, bytes).await,
            Request::BlockStatus { .. } => Err(ErrorKind::Absent(request.kind()).into()),
        }
    }
}

/// What a mirror of these replicas can do: what all of them can.
pub(crate) fn abilities(devices: &[Abilities], read_only: bool) -> Abilities {
    let all = |can: &dyn Fn(&Abilities) -> bool| devices.iter().all(can);
    let when = |can: bool| if can { Ability::Native } else { Ability::Absent };
    let unmap_zeroes = all(&|of| of.unmap_zeroes);
    Abilities {
        writable: !read_only && all(&|of| of.writable),
        verify: Ability::Native,
        compare: Ability::Native,
        // What blocks read as after a Discard has to be the same on all replicas, so they are zeroed.
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
    let reason =
        "the last replica went away, or could not be flushed, with writes that were not flushed; they may be lost"
            .to_owned();
    ErrorKind::Media { reason }.into()
}

impl<C: Clock> std::fmt::Debug for Mirror<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Mirror").field(&self.describe()).finish()
    }
}
