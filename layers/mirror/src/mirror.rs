//! The mirror, its state, and the device that it presents.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use sealblock_block::{
    Abilities, Ability, Clock, Condition, Device, Error, ErrorKind, Geometry, Operation, Outcome, Request, RequestKind,
    ReservedArea, Response,
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

/// A mirror of several replicas. Open one with [`crate::open`], and run its [`crate::Worker`] beside it.
pub struct Mirror<C> {
    pub(crate) clock: C,
    pub(crate) geometry: Geometry,
    pub(crate) abilities: Abilities,
    pub(crate) map: RegionMap,
    pub(crate) uuid: [u8; 16],
    pub(crate) is_read_only: bool,
    pub(crate) mutation: Mutation,
    /// In the order of the records in labels.
    pub(crate) replicas: RefCell<Vec<Rc<Replica>>>,
    /// Index of the replica whose label assembly took for the newest. Where in-sync replicas differ, its content
    /// counts: another replica may be an image from before that label.
    authority: usize,
    pub(crate) range_lock: RangeLock,
    pub(crate) write_intent: WriteIntent,
    /// The next flush fails: unflushed writes may be lost, because the last in-sync replica went offline and came
    /// back, or an internal flush failed.
    pub(crate) writes_lost: Cell<bool>,
    pub(crate) lost_blocks: Cell<u64>,
    /// Identity of the replica that serves nosync regions of a read-only mirror, once one was read: readers must not
    /// see two contents.
    pub(crate) nosync_source: Cell<Option<[u8; 16]>>,
    next_read: Cell<usize>,
    pub(crate) work: Condition,
    pub(crate) is_closing: Cell<bool>,
}

/// What [`crate::open`] and [`crate::create`] make a mirror of.
pub(crate) struct MirrorParts {
    pub geometry: Geometry,
    pub map: RegionMap,
    pub uuid: [u8; 16],
    pub replicas: Vec<Rc<Replica>>,
    pub authority: usize,
    pub write_intent: WriteIntent,
    pub mutation: Mutation,
}

/// State of a mirror.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum MirrorState {
    /// All replicas are in sync and online.
    Optimal,
    /// At least one replica is in sync and online, but not all are; or a crash may have left replicas different.
    Degraded,
    /// No in-sync replica is online.
    Failed,
}

impl MirrorState {
    /// The name in JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            MirrorState::Optimal => "optimal",
            MirrorState::Degraded => "degraded",
            MirrorState::Failed => "failed",
        }
    }
}

/// State of a mirror and of its replicas.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MirrorInfo {
    /// Identity of the mirror.
    pub uuid: [u8; 16],
    /// Bytes of a region, the unit of resync.
    pub region_bytes: u64,
    /// State of the mirror.
    pub state: MirrorState,
    /// Bytes of the dirty regions: replicas may differ there, because changes are in flight or were at a crash.
    pub dirty_bytes: u64,
    /// Bytes of the nosync regions: replicas may differ there and no change is in flight; they wait for
    /// reconciliation.
    pub nosync_bytes: u64,
    /// Blocks of requests that had no good copy on any replica.
    pub lost_blocks: u64,
    /// Its replicas, in the order of their records.
    pub replicas: Vec<ReplicaInfo>,
}

/// State of a replica.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ReplicaInfo {
    /// Name of the replica on the command line.
    pub name: String,
    /// State that labels give it.
    pub state: ReplicaState,
    /// True if a device is attached to it.
    pub is_online: bool,
    /// Why it is offline or out of sync; empty if it is neither.
    pub last_error: String,
    /// Bytes of the regions that it lacks.
    pub out_of_sync_bytes: u64,
    /// Bytes that resync and reconciliation wrote to it since the mirror was opened.
    pub resynced_bytes: u64,
    /// Blocks on it that were rewritten from another replica.
    pub repaired_blocks: u64,
    /// Blocks of which it has an older copy and no replica has a newer one; see [`Mirror::accept_stale`].
    pub stale_blocks: u64,
    /// How often it failed since the mirror was opened.
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

    /// State of the mirror and of its replicas.
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

    /// State of the mirror.
    pub fn state(&self) -> MirrorState {
        let replicas = self.replicas.borrow();
        let mut members = replicas.iter().filter(|replica| replica.state.get() != ReplicaState::Removed);
        if !replicas.iter().any(|replica| replica.is_readable()) {
            return MirrorState::Failed;
        }
        // Dirty regions do not count: the change in flight makes replicas identical when it completes. Nosync regions
        // count. A replica with stale blocks counts as degraded, because these blocks have one copy less.
        let is_whole = |replica: &Rc<Replica>| replica.is_readable() && replica.stale.borrow().count() == 0;
        match members.all(is_whole) && self.write_intent.nosync.borrow().is_empty() {
            true => MirrorState::Optimal,
            false => MirrorState::Degraded,
        }
    }

    /// Waits until the state is another than `known` or the mirror is closed, and returns the state.
    pub async fn state_changed(&self, known: MirrorState) -> MirrorState {
        self.work.wait_until(|| self.state() != known || self.is_closing.get()).await;
        self.state()
    }

    /// True if the mirror was closed.
    pub fn is_closed(&self) -> bool {
        self.is_closing.get()
    }

    /// The replicas that are in sync and online, from the one whose content counts where they differ.
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

    /// Moves the replica with the fewest requests in flight to the front; among equals they take turns.
    pub(crate) fn balance(&self, mut replicas: Replicas) -> Replicas {
        if replicas.len() > 1 {
            let turn = self.next_read.get().wrapping_add(1);
            self.next_read.set(turn);
            let count = replicas.len();
            replicas.rotate_left(turn % count);
            let idlest = (0..count).min_by_key(|at| replicas[*at].in_flight()).unwrap_or(0);
            replicas.swap(0, idlest);
        }
        replicas
    }

    /// The error of a request while no replica is online.
    pub(crate) fn no_replica(&self) -> Error {
        let reasons: Vec<String> = self
            .replicas
            .borrow()
            .iter()
            .map(|replica| format!("{}: {}", replica.name(), replica.last_error.borrow()))
            .collect();
        ErrorKind::Unreachable { reason: format!("no replica of the mirror is online ({})", reasons.join("; ")) }.into()
    }

    /// Makes all completed writes durable on every replica.
    pub(crate) async fn flush(&self) -> Result<(), Error> {
        if self.is_read_only {
            return Ok(());
        }
        if self.writes_lost.replace(false) {
            return Err(writes_lost());
        }
        if !self.write_intent.dirty.borrow().is_empty() {
            // An offline replica has not flushed changes that completed before this opening; after this flush it must
            // count as out of sync.
            self.record_failures().await?;
        }
        self.flush_replicas().await
    }

    /// Flushes for the mirror itself, without reporting earlier losses. No writer sees a failure here, and a replica
    /// reports a lost write once, so the next flush from above reports it. An unreachable replica reports it when it
    /// is back.
    pub(crate) async fn flush_internally(&self) -> Result<(), Error> {
        self.flush_replicas().await.inspect_err(|error| {
            if !is_unreachable(error) && !self.write_intent.dirty.borrow().is_empty() && !self.writes_lost.replace(true)
            {
                tracing::warn!(%error, "cannot flush the mirror; the next flush of its user fails");
            }
        })
    }

    /// Flushes, takes clean regions out of the labels, and ends the worker. The caller closes the replicas
    /// afterwards.
    ///
    /// Changes that completed before this opening and whose regions are still dirty become durable on the online
    /// replicas only; a flush makes them durable without the offline ones.
    ///
    /// # Errors
    /// When no replica can be flushed, or when writes may be lost and no flush has reported it. Changes that were
    /// flushed before are safe.
    pub async fn close(&self) -> Result<(), Error> {
        let was_closing = self.is_closing.replace(true);
        self.work.notify();
        if was_closing || self.is_read_only {
            return Ok(());
        }
        if !self.write_intent.dirty.borrow().is_empty() || self.write_intent.has_unwritten() {
            // The first sweep skips the regions that were changed since the sweep before.
            self.clear_clean_regions().await?;
            self.clear_clean_regions().await?;
            if !self.write_intent.dirty.borrow().is_empty() {
                // Regions in which replicas may still differ stay in the labels. Completed changes there become
                // durable all the same.
                self.flush_internally().await?;
            }
        }
        if self.writes_lost.get() { Err(writes_lost()) } else { Ok(()) }
    }

    async fn read_reserved(&self, slot: ReservedArea) -> Outcome {
        let kind = RequestKind::ReadReserved;
        for replica in
            self.in_sync().into_iter().filter(|replica| replica.has_reserved_area() && slot == ReservedArea::ScrubState)
        {
            if let Ok(answer) = replica.execute(self.geometry.protection, Request::read_reserved(slot)).await {
                return Ok(answer);
            }
        }
        Err(ErrorKind::Absent(kind).into())
    }

    /// Writes to a reserved area on every replica. The group label belongs to the mirror; the scrub state belongs to
    /// the level above.
    async fn write_reserved(&self, slot: ReservedArea, bytes: sealblock_runtime_memory::Slice) -> Outcome {
        let request = Request::write_reserved(slot, bytes);
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
        let extents = request.extents.clone();
        match request.operation {
            Operation::Read(checks) => self.read(extents.one(), checks).await.map(Response::Data),
            Operation::Flush => self.flush().await.map(|()| Response::Done),
            Operation::Write(_) | Operation::WriteZeroes { .. } | Operation::WriteUncorrectable => {
                self.change(extents.one(), request).await
            }
            Operation::Discard => self.discard(&extents).await,
            Operation::Verify(checks) => self.verify(extents.one(), checks).await,
            Operation::Checksum(checks) => self.checksum(extents.one(), checks).await,
            Operation::Repair(checks) => self.repair(extents.one(), checks).await,
            Operation::Compare(data) => self.compare(extents.one(), data).await,
            Operation::ReadReserved(area) => self.read_reserved(area).await,
            Operation::WriteReserved(area, bytes) => self.write_reserved(area, bytes).await,
            Operation::BlockStatus => Err(ErrorKind::Absent(request.kind()).into()),
        }
    }
}

/// The abilities of a mirror of these devices: those that all of them have.
pub(crate) fn abilities(devices: &[Abilities], read_only: bool) -> Abilities {
    let all = |can: &dyn Fn(&Abilities) -> bool| devices.iter().all(can);
    let when = |can: bool| if can { Ability::Native } else { Ability::Absent };
    let unmap_zeroes = all(&|of| of.unmap_zeroes);
    Abilities {
        writable: !read_only && all(&|of| of.writable),
        verify: Ability::Native,
        compare: Ability::Native,
        // Blocks must read the same on all replicas after a Discard, so the mirror zeroes them.
        discard: when(unmap_zeroes),
        write_zeroes: Ability::Native,
        write_uncorrectable: when(all(&|of| of.write_uncorrectable == Ability::Native)),
        checksum: Ability::Native,
        repair: Ability::Native,
        block_status: Ability::Absent,
        reserved: when(all(&|of| of.reserved == Ability::Native)),
        // Bitmap pages belong to the mirror, as the label does.
        bitmap_pages: 0,
        unmap_zeroes,
        offloads: all(&|of| of.offloads),
        seals: all(&|of| of.seals),
        copies: true,
    }
}

#[cold]
fn writes_lost() -> Error {
    let reason = "the last in-sync replica failed or could not flush; unflushed writes may be lost".to_owned();
    ErrorKind::Media { reason }.into()
}

impl<C: Clock> std::fmt::Debug for Mirror<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Mirror").field(&self.describe()).finish()
    }
}
